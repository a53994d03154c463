"""Trains many settings at once on one device, as a fleet: one small network leaves a GPU idle and Python busy.

The trainings of a sweep share first parameters, batches and the records measured. This does not change the distribution
of each one, and removes this chance from the comparison. The noise of each is its own. So the rows are a function of
the data, the sweep's seed, the plan and the setting, except for the rounding of the device, however many are trained at
once. A fleet that ends by an error, including too little memory, is halved until the error is that of one setting.

A fleet keeps no checkpoints: when a worker is killed, nothing of its trials is lost or counted twice, but they begin
again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reconbound._internal.checks import InputError, warn_user
from reconbound._internal.rng import derive
from reconbound.accounting.divergence_ledger import DivergenceLedger
from reconbound.accounting.spec import Account
from reconbound.auditing.models import as_tensor, make_loss, make_model, model_kind, score, start_afresh
from reconbound.auditing.options import AuditOptions
from reconbound.fisher.worlds import REMOVED
from reconbound.report.folder import prepare
from reconbound.sweep.chances import chances_of
from reconbound.sweep.fleet.trainer import Fleet, Snapshot
from reconbound.sweep.queue import Exploded, TrialLost
from reconbound.sweep.space import Row, Setting, key, seed_of
from reconbound.sweep.trial import Trainer, finished_rows, one_thread

#: (which of the settings, steps that each of them has done)
Report = Callable[[Sequence[int], int], None]
_SHARED = ("sampler", "sample_rate", "clip")  # what the trainings of one fleet have in common, beside the model


class TogetherTrainer(Trainer):
    """A Trainer of many settings at once.

    Args:
        args: as in Trainer.
        device: where to train; when None, a GPU where there is one.
        options: as in Trainer.
    """

    together = True

    def __init__(self, *args: Any, device: torch.device | str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.most: int | None = None  # the most that the memory allows at once, once it was too little
        self.check(self.plan)

    @staticmethod
    def check(plan: AuditOptions) -> AuditOptions:
        """Returns the plan if a fleet can train it; raises an InputError otherwise."""
        if plan.settings.sampler not in ("poisson", "fixed"):
            what = "must be poisson or fixed for settings trained together"
            raise InputError("sampler", what, plan.settings.sampler)
        if isinstance(plan.settings.budget, str | tuple):
            raise InputError("budget", "must be a number for settings trained together", plan.settings.budget)
        return plan

    def train_all(
        self, settings: Sequence[Setting], folders: Sequence[Path], report: Report = lambda which, done: None
    ) -> list[list[Row] | Exception]:
        """Trains the settings. Equal settings are trained once.

        Args:
            settings: what to train.
            folders: a folder for each.
            report: called with positions of settings and their steps done.

        Returns:
            For each setting its rows, one for each step count, or the error that it ended by.
        """
        found: dict[int, list[Row] | Exception] = {}
        for k, (setting, folder) in enumerate(zip(settings, folders, strict=True)):
            prepare(folder)
            known = finished_rows(folder, self._about(setting))
            if known is not None:
                found[k] = known
        for part in self._parts(settings, found):
            for k, own in self._part(settings, part, report):
                found[k] = own
                if not isinstance(own, Exception):
                    self._keep_rows(settings[k], folders[k], own)
        first = {key(s): k for k, s in reversed(list(enumerate(settings)))}
        return [found[k] if k in found else found[first[key(s)]] for k, s in enumerate(settings)]

    def __call__(self, setting: Setting, folder: Path, report: Callable[[int], None] = lambda done: None) -> list[Row]:
        """Trains one setting and returns its rows; raises its error otherwise.

        Args:
            setting: what to train.
            folder: the trial's.
            report: called with the steps done.
        """
        (found,) = self.train_all([setting], [folder], lambda which, done: report(done))
        if isinstance(found, Exception):
            raise found
        return found

    def _parts(self, settings: Sequence[Setting], done: dict[int, Any]) -> list[list[int]]:
        """Groups the settings that can be trained together: their positions, equal settings once.

        Settings that cannot be trained are put into `done` with the reason.
        """
        parts: dict[tuple[Any, ...], dict[str, int]] = {}
        for k, setting in enumerate(settings):
            if k in done:
                continue
            try:
                plan = self.check(self.plan.with_changes(**setting))
            except InputError as reason:
                done[k] = reason
                continue
            kind = (plan.model, *(getattr(plan.settings, name) for name in _SHARED))
            parts.setdefault(kind, {}).setdefault(key(setting), k)
        return [list(of.values()) for of in parts.values()]

    def _part(
        self, settings: Sequence[Setting], part: list[int], report: Report
    ) -> Iterator[tuple[int, list[Row] | Exception]]:
        """Trains the settings of one kind, and yields each when it is done.

        Settings that end by an error are tried again in two halves, which gives the same rows. The error of a single
        setting is its own.
        """
        whole = self.most is None or len(part) <= self.most
        found = self._fleet([settings[k] for k in part], partial(report, part)) if whole else None
        if isinstance(found, list):
            yield from zip(part, found, strict=True)
        elif isinstance(found, Exception) and len(part) == 1:
            yield part[0], found
        else:
            middle = (len(part) + 1) // 2
            if isinstance(found, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(found):
                self.most = middle
                warn_user(f"the memory does not suffice for {len(part)} settings at once: they are trained by {middle}")
            for half in (part[:middle], part[middle:]):
                yield from self._part(settings, half, report)

    def _fleet(
        self, settings: Sequence[Setting], report: Callable[[int], None]
    ) -> list[list[Row] | Exception] | Exception:
        """Returns the rows of each of these settings, or the error that their fleet ended by."""
        try:
            with one_thread():
                return list(self._trained_together(settings, report))
        except TrialLost:
            raise
        except Exception as reason:
            return reason.with_traceback(None)  # without the frames, which hold the fleet
        finally:
            gc.collect()  # a fleet and its work refer to each other, and hold the device's memory
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _trained_together(self, settings: Sequence[Setting], report: Callable[[int], None]) -> list[Any]:
        plans = [self.plan.with_changes(**s, seed=derive(self.seed, "together", 0)) for s in settings]
        kind = model_kind(self.dataset, plans[0].model)
        fleet = Fleet(
            lambda: make_model(self.dataset, kind, seed=0),
            make_loss(self.dataset),
            as_tensor(self.dataset.inputs),
            as_tensor(self.dataset.targets),
            [plan.settings for plan in plans],
            at=self.counts,
            device=self.device,
            initialise=partial(start_afresh, self.dataset, kind),
            private=None if self.dataset.private is None else as_tensor(self.dataset.private),
        )
        seeds, evaluate = [seed_of(self.seed, s) for s in settings], partial(score, self.dataset)

        def trained(run: int) -> list[Snapshot]:
            before = run * self.counts[-1]
            return list(fleet.run(run, evaluate=evaluate, seeds=seeds, report=lambda step: report(before + step)))

        shots = [trained(run) for run in range(self.runs)]
        return [self._rows(k, fleet, list(zip(*shots, strict=True))) for k in range(len(settings))]

    def _rows(self, k: int, fleet: Fleet, shots: Sequence[Sequence[Snapshot]]) -> list[Row] | Exploded:
        """Returns the rows of the k-th training, from the snapshots of all runs at each step count."""
        lost = [shot.step for at in shots for shot in at if not shot.finite[k]]
        if lost:
            what = f"the parameters or the ledger are not finite after {min(lost)} steps"
            return Exploded(f"{what}: the model has exploded; lower lr")
        rows = []
        for at in shots:
            account = replace(fleet.ledger.factors.accounts[k], steps=at[0].step)
            dfil = torch.stack([torch.stack([shot.dfil(rule)[k] for rule in account.kept_rules]) for shot in at])
            scores = [float(shot.found[k]) for shot in at]
            row = self._row(account, scores, dfil, fleet.ledger.measured_in_runs(account.steps))
            rows.append(row | _chances(account, at, k))
        return rows


def _chances(account: Account, shots: Sequence[Snapshot], k: int) -> Row:
    """Returns the chances of success against the records of the k-th training; none without Poisson batches."""
    nats = [shot.nats[k][None] for shot in shots if shot.nats is not None]
    times = [shot.drawn[None] for shot in shots if shot.drawn is not None]
    if not nats:
        return {}
    return chances_of(DivergenceLedger.of_runs(account, [REMOVED], torch.stack(nats), torch.stack(times)))
