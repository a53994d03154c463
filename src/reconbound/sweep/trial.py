"""The training of one trial: runs of the largest step count, measured and evaluated at each smaller one on the way.

A run of T steps is, up to step t, a run of t steps: the batches, the noise and the parameters do not depend on T. Only
the ledger does, in two places. Records are measured once in each block of steps, so blocks end at every step count
(otherwise a record would be counted for a block that is cut off). And the paper's κ splits its δ over the T steps: it
is one number for all records and steps, so it is corrected by κ(t)/κ(T). ε and the floors of the mechanism are computed
for t steps.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import LARGEST, InputError
from reconbound._internal.files import CONFIDENTIAL, Unreadable, disk_fault, sealed_json, unsealed_json, write_whole
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.spec import Account
from reconbound.auditing.models import check_model, score
from reconbound.auditing.options import AuditOptions, make_learner
from reconbound.auditing.priors import baseline_of, guess_of
from reconbound.data import Dataset
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.guarantee import guarantee
from reconbound.report.folder import CHECKPOINTS, prepare
from reconbound.sweep.chances import chances_of
from reconbound.sweep.space import Row, Setting, seed_of
from reconbound.training.checkpoint import CheckpointError, data_digest, plain_json
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Callback
from reconbound.validate import ModelError

TRIALS, TRIAL, LEDGER = "trials", "trial.json", "ledger.safetensors"


def trial_folder(out: Path, slot: int) -> Path:
    """Returns the folder for a setting's checkpoints and results: confidential.

    Args:
        out: the sweep's folder.
        slot: the number of the setting.
    """
    return out / TRIALS / f"{slot:05d}"


class Trainer:
    """Trains settings on one data set.

    Args:
        dataset: the data to train on.
        plan: everything that the settings leave open.
        counts: step counts, ascending.
        runs: the number of runs for each setting.
        seed: the seed of the sweep.
        delta: the δ at which ε is reported.

    Attributes:
        steps: the number of steps of a whole trial.
    """

    def __init__(
        self, dataset: Dataset, plan: AuditOptions, counts: Sequence[int], runs: int, seed: int, delta: float = 1e-5
    ) -> None:
        self.dataset, self.counts, self.runs, self.seed, self.delta = dataset, tuple(counts), runs, seed, delta
        self.steps = self.counts[-1] * runs
        self.plan = plan.with_changes(steps=self.counts[-1], runs=runs, seed=None)
        names = ("inputs", "targets", "test_inputs", "test_targets")
        self.digest = data_digest([torch.from_numpy(getattr(dataset, name)) for name in names], None)

    together: bool | None = None  # whether settings are trained many at once

    def facts(self) -> dict[str, Any]:
        """Returns everything that determines a trial's rows, apart from its setting; JSON."""
        about: dict[str, Any] = {"data": self.digest, "seed": fingerprint(self.seed, self.digest)}
        about |= {"steps": self.counts, "runs": self.runs, "together": self.together, "private": None}
        if self.dataset.private is not None:  # the same data, but other floors
            about["private"] = list(self.dataset.columns[0])
        found: dict[str, Any] = plain_json({**about, "delta": self.delta, "plan": self.plan.to_dict()})
        return found

    def guesses(self) -> dict[str, float | None]:
        """Returns what is reached without the model, for comparison. Confidential: these are figures of the data.

        Returns:
            `accuracy` of always predicting the largest class (None for a number), and `error`, ± in ranges, of guessing
            the average record.
        """
        accuracy = baseline_of(self.dataset) if self.dataset.task == "classes" else None
        return {"accuracy": accuracy, "error": float(np.sqrt(np.nan_to_num(guess_of(self.dataset)).mean()))}

    def caveats(self, models: Sequence[str] = ()) -> dict[str, str]:
        """Returns what the floors do not cover of the models, as `check_model` finds it before any is trained.

        Args:
            models: those that the settings name; the plan's own where they name none. One of the package's own that
                does not fit the data fails later with its own setting.
        """
        found: dict[str, str] = {}
        for model in models or (self.plan.model,):
            try:
                found |= check_model(self.dataset, model)
            except InputError:
                if ":" in model:
                    raise
            if "derivative" in found:
                raise ModelError(f"a sweep compares unbiased floors. {found['derivative']}")
        return found

    def __call__(self, setting: Setting, folder: Path, report: Callable[[int], None] = lambda done: None) -> list[Row]:
        """Trains a setting and returns one row for each step count; continues from what the folder holds.

        Args:
            setting: what to train.
            folder: the trial's.
            report: called with the steps done.
        """
        prepare(folder)
        found = finished_rows(folder, self._about(setting))
        if found is not None:
            return found
        for damaged in (False, True):
            try:
                learner = make_learner(
                    self.dataset,
                    self.plan.with_changes(**setting, seed=seed_of(self.seed, setting)),
                    folder / CHECKPOINTS,
                    callbacks=[_Evaluate(self, report)],
                    worlds={},
                    whole_at=self.counts,
                    every=max(20, self.counts[-1] // 30),
                    progress=False,
                )
                with one_thread():
                    learner.repeat(self.runs, self.counts[-1])
                break
            except (Unreadable, CheckpointError) as reason:
                if damaged or "is in use by" in str(reason) or disk_fault(reason) is not None:
                    raise
                shutil.rmtree(folder / CHECKPOINTS)  # damaged: a new start gives the same rows
        assert learner.accountant is not None
        rows = self._rows_of(learner.accountant, learner.history)
        learner.accountant.save(folder / LEDGER)
        self._keep_rows(setting, folder, rows)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        return rows

    def _rows_of(self, ledger: FisherAccountant, history: Sequence[Mapping[str, float]]) -> list[Row]:
        """Returns a row for each step count, from what finished runs measured and reached on the way."""
        rows = []
        for count in self.counts:
            scores = [h["accuracy"] for h in history if h["step"] == count]
            dfil = torch.stack([ledger.traces.dfil_of_runs(count, rule) for rule in ledger.account.kept_rules], 1)
            account, measured = replace(ledger.account, steps=count), ledger.traces.measured_in_runs(count)
            chances = chances_of(ledger.divergences.at(count)) if ledger.divergences.worlds else {}
            rows.append(self._row(account, scores, dfil, measured) | chances)
        return rows

    def _about(self, setting: Setting) -> dict[str, Any]:
        """Returns everything that determines a trial's rows."""
        return {"setting": dict(setting), **self.facts()}

    def _keep_rows(self, setting: Setting, folder: Path, rows: list[Row]) -> None:
        content = sealed_json({"confidential": True, **self._about(setting), "rows": rows})
        write_whole(folder / TRIAL, content, mode=CONFIDENTIAL)

    def _row(self, account: Account, scores: Sequence[float], dfil: Tensor, measured: Tensor) -> Row:
        """Returns the row of a run of `account.steps` steps: accuracy, ε and every floor, in units of the ranges.

        Args:
            account: of a run of this length.
            scores: accuracies of the runs.
            dfil: dFIL of each run, (runs, rules, N).
            measured: the number of measurements per record over all runs, (N,).
        """
        row: Row = {"steps": account.steps, "accuracy": fmean(scores)}
        row["accuracy_sd"] = stdev(scores) if len(scores) > 1 else None
        mean = dfil.mean(0)
        for k, rule in enumerate(account.kept_rules):
            row |= {f"{rule}_{place}": floor for place, floor in floors_of(mean[k], measured).items()}
            if len(dfil) > 1:
                row[f"{rule}_crossed"] = crossed_floor(dfil[:, k])
        row["measured_median"] = float(measured.double().median())
        row["never_measured"] = int((measured == 0).sum())
        row["zero_information"] = int(((mean[0] == 0) & (measured > 0)).sum())
        row |= {**mechanism_floors(account.mechanism(), account.features, self.delta), "delta": self.delta}
        no_json = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        return row | dict.fromkeys(no_json)


class _Evaluate(Callback):
    """Evaluates the model at each step count, and reports how far the trial is."""

    def __init__(self, trainer: Trainer, report: Callable[[int], None]) -> None:
        self.trainer, self.report = trainer, report
        every = math.gcd(*trainer.counts)  # none of the step counts is skipped
        self.often = next(k for k in range(min(every, 50), 0, -1) if every % k == 0)

    def on_step(self, learner: PrivateSGD) -> dict[str, float] | None:
        """Returns the accuracy at a step count."""
        if learner.step and learner.step % self.often == 0:
            self.report(learner.run * learner.steps + learner.step)
        return {"accuracy": score(self.trainer.dataset, learner.model)} if learner.step in self.trainer.counts else None


#: Where over the records a floor is taken: name → quantile of dFIL.
PLACES = {"max": 1.0, "q99": 0.99, "median": 0.5}


def floors_of(dfil: Tensor, measured: Tensor) -> dict[str, float]:
    """Returns 1/dFIL at the most exposed record, at the 99 % quantile and at the median, of those that were measured.

    Args:
        dfil: of each record, (N,).
        measured: how often each record was measured, (N,).
    """
    seen = dfil[measured > 0].sort().values
    if len(seen) == 0:
        return dict.fromkeys(PLACES, 0.0)
    at = {place: float(seen[min(len(seen) - 1, math.ceil(q * (len(seen) - 1)))]) for place, q in PLACES.items()}
    return {place: 1 / max(value, 1e-300) for place, value in at.items()}


def crossed(dfil: Tensor) -> float:
    """Computes what each run finds for the record that the other runs find most exposed, on average over the runs.

        mean over r of dFIL_r(i_r),     i_r = argmax of the mean of dFIL over the other runs

    Run r has no part in the choice of i_r, so each term is unbiased for a record's dFIL, and the whole is on average at
    most the largest; the maximum over records of the runs' mean is on average at least that.

    Args:
        dfil: of each run and record, (R, N), R at least 2.
    """
    others = [torch.cat([dfil[:r], dfil[r + 1 :]]).mean(0) for r in range(len(dfil))]
    return fmean([float(own[other.argmax()]) for own, other in zip(dfil, others, strict=True)])


def crossed_floor(dfil: Tensor) -> float | None:
    """Returns 1/crossed; None where no run measured the records that the others point at."""
    found = crossed(dfil)
    return 1 / found if found > 0 else None


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs with one thread: the last digits of sums depend on the number of threads, and rows must not."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1000)
def mechanism_floors(mechanism: SampledGaussian, features: int, delta: float) -> dict[str, float | None]:
    """Returns the mechanism's floors whatever the data, and its ε: the same for all settings that differ otherwise.

    Args:
        mechanism: of a training.
        features: d, the number of private features.
        delta: the δ at which ε is reported.
    """
    found = guarantee(mechanism, dim=features, delta=delta)
    floors = {bound.name: float(bound.value) for bound in found.bounds}
    epsilons = {"epsilon": found.epsilon, "epsilon_add_remove": found.epsilon_add_remove}
    chances = {"success_at_1_percent": found.protection.success, "never_drawn": found.protection.never_drawn}
    return {**floors, **epsilons, **chances}


@lru_cache(maxsize=8)
def fingerprint(seed: int, data: str) -> str:
    """Returns a fingerprint of a seed: 24 bits of scrypt, which takes 64 MiB and about 0.2 s for each guess.

    A key in the folder would hide even a small seed, but workers on other machines share only the seed. So trying seeds
    is slow, guesses for one sweep are of no use for another, and whoever tries 2³² seeds is left with 256.

    Args:
        seed: of the sweep.
        data: the digest of the data, as salt.
    """
    key = seed.to_bytes(32, "little")
    return hashlib.scrypt(key, salt=data.encode(), n=2**16, r=8, p=1, maxmem=2**27, dklen=3).hex()


def finished_rows(folder: Path, about: Mapping[str, Any]) -> list[Row] | None:
    """Returns the rows of a trial that was trained here but not stored yet.

    Args:
        folder: the trial's.
        about: everything that determines its rows.
    """
    try:
        content = unsealed_json(folder / TRIAL)
    except (OSError, Unreadable):
        return None
    if any(content.get(name) != value for name, value in about.items()):
        return None
    rows: Any = content.get("rows")
    return rows if isinstance(rows, list) and all(map(_is_row, rows)) else None


def _is_row(row: Any) -> bool:
    """Returns whether a row is as `Trainer._row` makes it: numbers that are finite, or nothing."""
    if not isinstance(row, dict) or not {"steps", "accuracy"} <= set(row):
        return False
    return all(value is None or (isinstance(value, int | float) and abs(value) <= LARGEST) for value in row.values())
