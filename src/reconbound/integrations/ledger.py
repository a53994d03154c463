"""The ledger of a training with Opacus: what it sees of each step, what it says, and its state in checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, file_path, number
from reconbound._internal.rng import checked_seed
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.spec import Account
from reconbound.bounds import Bound
from reconbound.data import Dataset
from reconbound.fisher.worlds import REMOVED, StepDistances
from reconbound.integrations.clipped_norms import ClippedNorms, clip_norm
from reconbound.integrations.guards import (
    NoiseStates,
    Settings,
    is_same_mark,
    packed_sequences_refused,
    steps_before,
)
from reconbound.integrations.loaders import (
    DrawnBatches,
    check_collate,
    drawn_rate,
    features_of,
    forget_batches,
    record_batches,
    records_drawn_from,
)
from reconbound.integrations.measuring import BlockMeasurer
from reconbound.integrations.reports import PADDED, describe_parameters, describe_training, records_of, write_report
from reconbound.mechanisms.base import ADD_REMOVE
from reconbound.report import folder as files
from reconbound.training.ranks import Ranks, TrainingError, on_cpu
from reconbound.training.step import Measured
from reconbound.validate.private import as_private

#: Steps, and records in them, after which what they had is added to the ledger at once.
_STEPS, _RECORDS = 64, 2**14


class _Part(NamedTuple):
    """Holds what a rank knows of a step: about its records, and how the records are divided between the ranks."""

    records: Tensor
    norms: Tensor
    bound: float
    state: str
    found: list[Measured[Any]]
    division: list[Any] | None


class OpacusLedger:
    """The divergence of every record's release to that without the record, over the steps of one training.

    `opacus.watch` makes it.

    Attributes:
        steps: the number of steps so far.
        finished: whether it is closed: later steps do not count.
        refused: why no step is taken any more, after one that could not be accounted for; empty otherwise.

    Guarantee: against every attacker who sees all noisy sums and knows all other records. The neighbour is the data set
    without the record; batches are Poisson samples at the rate with which the loader draws; D is an unbiased estimate,
    from one training, of an upper bound over the noise and the batches. It rests on what `statements` says, and on a
    loss and a model that treat each record separately.
    """

    def __init__(
        self, optimizer: Any, drawn: tuple[Any, Any], criterion: Any, blocks: BlockMeasurer | None, ranks: Ranks
    ) -> None:
        self.steps, self.finished, self._blocks, self._ranks = 0, False, blocks, ranks
        self._optimizer, (self._loader, self._sampler) = optimizer, drawn
        loader, sampler = drawn
        device = next(iter(optimizer.params)).device
        informed = blocks is not None and blocks.options.information
        account = Account(
            float(optimizer.noise_multiplier),
            clip_norm(optimizer),
            drawn_rate(sampler),
            clip="hard",
            rules=() if informed else None,
            records=records_drawn_from(sampler),
            features=features_of(loader) if blocks is None else blocks.measurer.features,
            steps=1,
        )
        self._ledger = self._empty(account, device if device.type == "cuda" else torch.device("cpu"))
        self._padded, self._before = check_collate(loader), steps_before(optimizer)
        self._bounds: list[float] = []  # the smallest and the largest clip norm so far
        self._settings, self._states = Settings(optimizer), NoiseStates(optimizer)
        self.refused, self._counts = "", False
        self._pending: list[tuple[Tensor, Tensor, float]] = []  # records, norms and clip norm of steps that count
        self._waiting = 0  # the number of records in them
        ranks.check_alike(self._mark())
        if blocks is not None:
            blocks.seed = ranks.from_first(lambda: blocks.seed)
        # from here on nothing is refused
        self._norms = ClippedNorms(optimizer, criterion)
        self._batches = DrawnBatches(
            sampler,
            lambda: self._norms.half_done,
            ahead=loader.num_workers > 0,
            begin=lambda: self._states.begin(device),
        )
        record_batches(sampler, self._batches, ranks)
        self._allow_packed = packed_sequences_refused(optimizer.params)
        self._add_noise = optimizer.add_noise
        optimizer.add_noise = self._before_noise
        inner = optimizer.original_optimizer
        hooked = hasattr(inner, "_optimizer_step_pre_hooks")  # one that wraps another may have called no constructor
        self._update_hook = inner.register_step_pre_hook(self._before_update) if hooked else None

    def __repr__(self) -> str:
        a, state = self._ledger.account, "finished" if self.finished else "in progress"
        return f"OpacusLedger({a.records:,} records, q={a.sample_rate:.4g}, {self.steps:,} steps, {state})"

    # --- writing ---------------------------------------------------------------------

    def _before_noise(self) -> None:
        """Adds a step to the ledger, and then lets Opacus add its noise: a step that is refused is not taken."""
        if self.refused:
            why = "must not go on after a step that was refused: begin anew, or from a checkpoint before it"
            raise InputError("ledger", why, self.refused)
        try:
            alone = self._ranks.size == 1
            self._count_step([self._own_part()] if alone else self._ranks.gather(self._own_part))
        except (InputError, TrainingError) as reason:
            self.refused = str(reason)
            raise
        self._counts = True
        self._add_noise()

    def _own_part(self) -> _Part:
        """Returns what a rank knows of the step that is taken."""
        self._settings.check()
        norms, bound = self._norms.take()
        records = self._batches.take(norms.numel())
        if not math.isfinite(norms.sum().item()) and not bool((finite := norms.isfinite()).all()):
            why = "must be finite: otherwise the sum is not, which shows who took part; of record "
            raise InputError("gradient", f"{why}{int(records[int(finite.long().argmin())])}", "a norm that is not")
        state = self._states.note(norms.device) if self._ranks.rank == 0 else ""  # rank 0 draws the noise
        found: list[Measured[Any]] = []
        if self._blocks is not None:
            self._blocks.compare(records, norms, bound)
            found = self._blocks.measure(self.steps, bound, self._ranks)
        if self._ranks.size == 1:
            return _Part(records, norms, bound, state, found, None)
        return _Part(records, norms.cpu(), bound, state, on_cpu(found), self._sampler.division)

    def _count_step(self, parts: Sequence[_Part]) -> None:
        if len(parts) > 1:
            _check_shares(parts)
        bound, state = parts[0].bound, parts[0].state
        self._states.keep(state)
        if self.steps == 0:
            self._ledger.begin_run(state)  # the same where a training is repeated
        for part in parts:
            for one in part.found:
                add = self._ledger.add_distances if isinstance(one.found, StepDistances) else self._ledger.add
                add(one.records, one.found, weight=one.weight, stratified=one.stratified)
            if rows := part.norms.numel():
                self._pending.append((part.records, part.norms, bound))
                self._waiting += rows
        if len(self._pending) >= _STEPS or self._waiting >= _RECORDS:
            self._settle()
        if bound not in self._bounds:
            self._bounds = [min(bound, *self._bounds), max(bound, *self._bounds)] if self._bounds else [bound, bound]
        self.steps += 1

    def _settle(self) -> None:
        """Adds the norms of the last steps to the ledger: of many steps together they cost little more than of one."""
        for bound, some in groupby([*self._pending], key=itemgetter(2)):
            records, norms, _ = zip(*some, strict=True)
            # over the noise, as if the clip norm had stayed what it was
            scaled = torch.cat(norms).double().clamp(max=bound) * (self._ledger.account.max_grad_norm / bound)
            self._ledger.divergences.add_norms(torch.cat(records), scaled, 1.0)
            self._ledger.divergences.settle()
            del self._pending[: len(records)]
        self._waiting = 0

    def _before_update(self, *_: Any) -> None:
        """Refuses an update of the parameters whose noise this ledger has not seen."""
        if not self._counts:
            why = "must be the one that takes all steps while it is watched: finish the ledger before another begins"
            raise InputError("optimizer", why, "an update of the parameters without a step of this ledger")
        self._counts = False

    def finish(self) -> FisherAccountant:
        """Closes the ledger and returns it as that of one finished run. Optimizer and loader are as before `watch`.

        Ledgers of several trainings with the same mechanism are joined by `FisherAccountant.merge`, for confidence
        limits.
        """
        if not self.finished:
            self._ledger = self._closed()
            self._detach()
            self.finished = True
        return self._ledger

    def _closed(self) -> FisherAccountant:
        """Returns the ledger as that of a run that ends here."""
        if self.steps == 0:
            raise InputError("ledger", "must have seen a step", "none")
        self._batches.check_complete()
        if self._batches.refused:
            raise InputError("ledger", "must know the records of each step", self._batches.refused)
        found = self._counted()
        found.finish_run()
        return found

    def _detach(self) -> None:
        self._norms.detach()
        vars(self._optimizer).pop("add_noise", None)
        forget_batches(self._sampler)
        self._allow_packed()
        if self._update_hook is not None:
            self._update_hook.remove()

    def _counted(self) -> FisherAccountant:
        """Returns a copy of the ledger whose account has the number of steps so far."""
        self._settle()
        account = replace(self._ledger.account, steps=max(1, self.steps))
        found = self._empty(account, self._ledger.device)
        found.restore(self._ledger.state(), self._ledger.runs)
        measured = () if self._blocks is None else self._blocks.measurer.caveats
        found.caveats = (*measured, *self.statements)
        return found

    def _empty(self, account: Account, device: torch.device) -> FisherAccountant:
        options = None if self._blocks is None else self._blocks.options
        scale = 1.0 if options is None else options.feature_scale
        worlds = () if options is None else tuple(options.worlds)
        found = FisherAccountant(account, worlds=worlds, feature_scale=scale, device=device)
        found.divergences.from_batches = True
        found.needs_range = options is not None and as_private(options.private).part == "module"
        return found

    # --- reading ---------------------------------------------------------------------

    @property
    def accountant(self) -> FisherAccountant:
        """Returns the ledger as it is now: of the finished run, or a copy of that in progress."""
        return self._ledger if self.finished else self._counted()

    @property
    def statements(self) -> tuple[str, ...]:
        """Lists what the numbers of this ledger rest on: clip, noise, divisor, generator and sample rate."""
        found = describe_training(self._optimizer, self._ledger.account, self._bounds)
        missed = f"{self._before} steps were taken before watch: they are not in this ledger"
        return (*found, *((PADDED,) if self._padded else ()), *((missed,) if self._before else ()))

    def divergence(self, world: str = REMOVED) -> Tensor:
        """Returns D of each record in nats, (N,): KL ≤ D for its release and that in the other world.

        Args:
            world: "removed", or one of those that are measured.
        """
        return self.accountant.divergence(world)

    def max_success(self, baseline: float, world: str = REMOVED) -> Bound:
        """Returns the largest chance that an attack succeeds on each record, (N,).

        Args:
            baseline: κ, the chance that the same attack succeeds in the other world.
            world: "removed": the record is left out; or one of those that are measured.

        Guarantee: every attacker, every notion of success and every model; D is an estimate from one training.
        """
        bound = self.accountant.max_success(baseline, world)
        return replace(bound, assumes=(*bound.assumes, *self.statements))

    def report(
        self, folder: str | os.PathLike[str], *, dataset: Dataset | None = None, name: str = "training data"
    ) -> Path:
        """Writes the report of the steps so far: the same folder and pages as those of an audit.

        The training may go on: a later report has its later steps, too.

        Args:
            folder: a new or empty folder, or that of an earlier report of this training.
            dataset: the records with their names, units and ranges, in the order of the loader's data set; None: as the
                loader's data set gives them (images, token sequences or rows of numbers, each with its target).
            name: of the data, for the pages.

        Returns:
            The page for the data's owner; report-public.html beside it may be shown. Of several ranks the first writes.
        """
        ledger = self._ledger if self.finished else self._closed()
        if self._ranks.rank:
            return Path(file_path("folder", folder)) / files.REPORT
        records = records_of(self._loader, name) if dataset is None else dataset
        if not isinstance(records, Dataset):
            raise InputError("dataset", "must be what load_dataset returns", f"a {type(records).__name__}")
        published = [statement for statement in self.statements if statement != PADDED]  # that depends on the records
        return write_report(folder, ledger, records, describe_parameters(self._optimizer, self._bounds), published)

    # --- as an accountant of Opacus ------------------------------------------------------

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Returns noise multiplier, sample rate and number of steps, as Opacus's accountants do."""
        account = self._ledger.account
        return [(account.noise_multiplier, account.sample_rate, self.steps)] if self.steps else []

    def __len__(self) -> int:
        return self.steps

    def __bool__(self) -> bool:
        return True

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Refuses to count a step: a ledger counts those of the training that it watches, by itself."""
        why = "must not be the accountant of another training: use a new PrivacyEngine for that"
        raise InputError("ledger", why, f"a step with noise multiplier {noise_multiplier:g}, rate {sample_rate:g}")

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns a hook that refuses each step, for a second make_private of the same engine."""
        return lambda optimizer: self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=sample_rate)

    def get_epsilon(self, delta: float) -> float:
        """Returns ε at this δ of the steps so far, under add/remove as Opacus counts.

        It is for the rate with which the loader draws. PrivacyEngine uses it after `engine.accountant = ledger`.

        Args:
            delta: δ.
        """
        number("delta", delta, above=0.0, below=1.0)
        if self.steps == 0:
            return 0.0
        found = self.accountant.account.mechanism().epsilon_at(delta, ADD_REMOVE)
        assert found is not None
        return found

    @classmethod
    def mechanism(cls) -> str:
        """Returns the name under which Opacus's checkpoints keep this accountant."""
        return "reconbound"

    def state_dict(self, destination: Any = None) -> Any:
        """Returns the ledger for a checkpoint, beside those of the model and the optimizer; as secret as the data.

        Args:
            destination: a dictionary to put it into; a new one when None.
        """
        found = {} if destination is None else destination
        facts = {"history": self.history, "mechanism": self.mechanism(), "steps": self.steps}
        seed = None if self._blocks is None else self._blocks.seed
        found.update({**facts, "finished": self.finished, "mark": self._mark(), "seed": seed})
        found.update({"bounds": list(self._bounds), "noise_digests": self._states.tensor()})
        self._settle()
        found["tensors"] = self._ledger.state()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into a ledger of the same training that has seen no step yet.

        Args:
            state: the dictionary.
        """
        if not isinstance(state, Mapping) or state.get("mechanism") != self.mechanism():
            raise InputError("state", "must be what state_dict of such a ledger returned", type(state).__name__)
        if self.steps or self.finished:
            raise InputError("state", "must be loaded before the first step", f"{self.steps} steps")
        if not is_same_mark(self._mark(), state.get("mark")):
            raise InputError("state", f"must be of the same training, {self._mark()}", "that of another one")
        steps, finished = state.get("steps"), state.get("finished")
        if type(steps) is not int or steps < 0 or type(finished) is not bool or (finished and not steps):
            raise InputError("state", "must have its number of steps", f"{type(steps).__name__} and {finished is True}")
        bounds = state.get("bounds")
        if not isinstance(bounds, list | tuple) or len(bounds) != (2 if steps else 0) or {*map(type, bounds)} - {float}:
            raise InputError("state", "must have the smallest and the largest clip norm", f"a {type(bounds).__name__}")
        bounds = [number("bounds", bound, above=0.0) for bound in bounds]
        states = NoiseStates(self._optimizer)
        states.restore(state.get("noise_digests"))  # "noise_states" of earlier versions are digests of other parts
        seed = None if self._blocks is None else checked_seed(state.get("seed"), "state")
        self._ledger.restore(state.get("tensors"), int(finished))  # type: ignore[arg-type]
        self.steps, self._bounds, self._states = steps, bounds, states
        self._before = max(0, self._before - steps)
        if self._blocks is not None and seed is not None:
            self._blocks.seed = seed
        if finished:
            self._detach()
            self._ledger, self.finished = self._counted(), True

    def _mark(self) -> dict[str, Any]:
        a = self._ledger.account
        facts: dict[str, Any] = {"noise_multiplier": a.noise_multiplier, "max_grad_norm": a.max_grad_norm}
        if self._blocks is not None:
            facts |= {"worlds": list(self._blocks.options.worlds), "rules": list(a.kept_rules)}
            facts |= {name: getattr(self._blocks, name) for name in ("steps", "group")}
            facts |= {"budget": self._blocks.options.budget}
        return {**facts, "sample_rate": a.sample_rate, "records": a.records}


def _check_shares(parts: Sequence[_Part]) -> None:
    """Refuses a step whose ranks clip to different norms, or have a record twice."""
    bounds, divisions = [p.bound for p in parts], [p.division for p in parts]
    if len({*bounds}) > 1:
        raise InputError("max_grad_norm", "must be the same on all ranks", bounds)
    records = torch.cat([p.records for p in parts])
    if divisions.count(divisions[0]) < len(parts) or len(records.unique()) < len(records):
        why = "must give each record to one rank: call set_epoch on all of them, and take each batch on all, not on"
        raise InputError("data_loader", why, f"some (epoch, shuffle, seed, ranks and iteration: {divisions})")
