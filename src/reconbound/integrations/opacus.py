"""A ledger beside Opacus: how far the release of a private training is from that without each record.

    ledger = watch(optimizer, data_loader, criterion)      after make_private
    ...                                                    the training, as it was
    ledger.report("folder")

The norms to which Opacus clips are read where it computes them, and the records of each batch where its sampler draws
them. Nothing that is trained changes, and no random number is drawn from a global generator. What a divergence says:
docs/theory/any_attacker.md.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

try:
    from opacus.optimizers import DPPerLayerOptimizer
except ImportError as missing:
    raise ImportError("reconbound.integrations.opacus needs Opacus: pip install opacus") from missing

from reconbound._internal.checks import InputError, file_path, number, warn_user
from reconbound._internal.rng import checked_seed, derive, new_seed, random_states_kept
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.spec import Account
from reconbound.bounds import Bound
from reconbound.data import Dataset
from reconbound.fisher.worlds import REMOVED, StepDistances
from reconbound.integrations.clipped_norms import DISTRIBUTED, ClippedNorms, check_optimizer, clip_norm
from reconbound.integrations.loaders import (
    check_collate,
    check_generators,
    drawn_rate,
    forget_batches,
    poisson_sampler,
    record_batches,
    records_drawn_from,
)
from reconbound.integrations.measuring import BlockMeasurer, Measuring
from reconbound.integrations.reports import describe_parameters, records_of, write_report
from reconbound.mechanisms.base import ADD_REMOVE
from reconbound.report import folder as files
from reconbound.training.ranks import Ranks, on_cpu
from reconbound.training.step import Measured
from reconbound.validate.model import ReconboundWarning
from reconbound.validate.private import as_private

PADDED = (
    "batches are padded to the longest record: the ledger holds only where padding changes nothing of a record's loss, "
    "as with a mask; otherwise a long record moves others' gradients, which no clip bounds"
)


def watch(optimizer: Any, data_loader: Any, loss_fn: Any, *, measure: Measuring | None = None) -> OpacusLedger:
    """Begins a ledger of a training with Opacus; the training itself stays as it is.

    Call it after make_private or make_private_with_epsilon and before the first step. It reads the clipped norms that
    Opacus computes, and the records of each batch as the loader's sampler draws them: record numbers in the data are
    not needed. Record i is number i of the loader's data set.

    Args:
        optimizer: the optimizer that make_private returned; flat or per-layer clipping, or ghost clipping.
        data_loader: the loader that make_private returned, with Poisson batches. BatchMemoryManager may stand between.
        loss_fn: the criterion of the training; with ghost clipping the one that make_private returned.
        measure: what else is measured: worlds with a public value in place of a part of each record, and Fisher
            information. None: nothing.

    With Opacus on several ranks of torch.distributed, call it on each. Each rank clips and measures its own records,
    and all of them have the whole ledger; `report` writes on rank 0.

    Returns:
        The ledger, which grows with each step.

    Raises:
        InputError: names what cannot be accounted for, and why. It is also raised by a later step where the training
            turns out to be another one: a batch without a step, another loader, a change of the noise.

    Guarantee: as that of `OpacusLedger`. The training is the same bit for bit with and without the ledger.
    """
    check_optimizer(optimizer, loss_fn)
    number("noise_multiplier", optimizer.noise_multiplier, above=0.0)
    number("max_grad_norm", clip_norm(optimizer), above=0.0)
    check_loss(loss_fn, optimizer.loss_reduction)
    devices = {p.device for p in optimizer.params}
    if len(devices) != 1:
        raise InputError("optimizer", "must have parameters, all on one device", [str(d) for d in devices])
    shared = isinstance(optimizer, DISTRIBUTED)
    ranks = Ranks.present() if shared else Ranks()
    sampler = poisson_sampler(data_loader, ranks if shared else None)
    check_accounted(optimizer, drawn_rate(sampler))

    def prepared() -> BlockMeasurer | None:
        if measure is None:
            return None
        if not isinstance(measure, Measuring):
            raise InputError("measure", "must be a Measuring(model, epochs, ...)", f"a {type(measure).__name__}")
        if isinstance(optimizer, DPPerLayerOptimizer):
            why = "must be None with per-layer clipping: the whole gradient's clip is measured"
            raise InputError("measure", why, type(optimizer).__name__)
        return BlockMeasurer(measure, loss_fn, optimizer, data_loader, drawn_rate(sampler))

    blocks = ranks.try_all(prepared)
    if shared and not optimizer.secure_mode:
        check_generators(sampler, ranks)
    ledger = OpacusLedger(optimizer, (data_loader, sampler), loss_fn, blocks, ranks)
    if PADDED in ledger.statements:
        warn_user(PADDED, ReconboundWarning)
    return ledger


class OpacusLedger:
    """The divergence of every record's release to that without the record, over the steps of one training.

    `watch` makes it.

    Attributes:
        steps: the number of steps so far.
        finished: whether it is closed: later steps do not count.

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
        ranks.check_alike(self._mark())
        seeds = ranks.from_first(lambda: (new_seed(), None if blocks is None else blocks.seed))
        self._ledger.begin_run(derive(seeds[0], "fingerprint").to_bytes(32, "little")[:16].hex())
        if blocks is not None and seeds[1] is not None:
            blocks.seed = seeds[1]
        padded = (PADDED,) if check_collate(loader) else ()
        self._statements = (*describe_training(optimizer, account, ranks), *padded)
        self._ledger.caveats = (*(blocks.measurer.caveats if blocks is not None else ()), *self._statements)
        self._batches = record_batches(sampler, ranks)  # from here on nothing is refused
        self._norms = ClippedNorms(optimizer, criterion)
        self._add_noise = optimizer.add_noise
        optimizer.add_noise = self._before_noise

    def __repr__(self) -> str:
        a, state = self._ledger.account, "finished" if self.finished else "in progress"
        return f"OpacusLedger({a.records:,} records, q={a.sample_rate:.4g}, {self.steps:,} steps, {state})"

    # --- writing ---------------------------------------------------------------------

    def _before_noise(self) -> None:
        """Adds a step to the ledger, and then lets Opacus add its noise: a step that is refused is not taken."""
        account, parts = self._ledger.account, self._ranks.gather(self._own_part)
        records, norms = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        bounds, divisions = [part[2] for part in parts], [part[3] for part in parts]
        if len({*bounds}) > 1:
            raise InputError("max_grad_norm", "must be the same on all ranks", bounds)
        if any(division != divisions[0] for division in divisions) or len(records.unique()) < len(records):
            why = "must give each record to one rank: call set_epoch on all of them, and take each batch on all, not on"
            raise InputError("data_loader", why, f"some (epoch, shuffle, seed, ranks and iteration: {divisions})")
        for one in (one for part in parts for one in part[4]):
            add = self._ledger.add_distances if isinstance(one.found, StepDistances) else self._ledger.add
            add(one.records, one.found, weight=one.weight, stratified=one.stratified)
        if len(norms):  # over the noise, as if the clip norm had stayed what it was
            self._ledger.divergences.add_norms(records, norms * (account.max_grad_norm / bounds[0]), 1.0)
        self.steps += 1
        self._add_noise()

    def _own_part(self) -> tuple[Tensor, Tensor, float, Any, list[Measured[Any]]]:
        """Returns of this rank: records, clipped norms, clip norm, how records are divided, and what was measured."""
        account = self._ledger.account
        if self._optimizer.noise_multiplier != account.noise_multiplier:
            why = f"must stay {account.noise_multiplier:g}: schedules of the noise are not accounted for"
            raise InputError("noise_multiplier", why, self._optimizer.noise_multiplier)
        norms, bound = self._norms.take()
        records = torch.tensor(self._batches.take(len(norms)), dtype=torch.int64)
        bad = torch.nonzero(~norms.isfinite()).flatten()
        if len(bad):
            why = "must be finite: otherwise the sum is not, which shows who took part; of record "
            raise InputError("gradient", f"{why}{int(records[int(bad[0])])}", "a norm that is not")
        found: list[Measured[Any]] = []
        if self._blocks is not None:
            self._blocks.compare(records, norms)
            found = self._blocks.measure(self.steps, bound, self._ranks)
        if self._ranks.size == 1:
            return records, norms, bound, None, found
        return records, norms.cpu(), bound, self._sampler.division, on_cpu(found)

    def finish(self) -> FisherAccountant:
        """Closes the ledger and returns it as that of one finished run. Optimizer and loader are as before `watch`.

        Ledgers of several trainings with the same mechanism are joined by `FisherAccountant.merge`, for confidence
        limits.
        """
        if self.steps == 0:
            raise InputError("ledger", "must have seen a step", "none")
        if not self.finished:
            self._detach()
            self._ledger = self._counted()
            self._ledger.finish_run()
            self.finished = True
        return self._ledger

    def _detach(self) -> None:
        self._norms.detach()
        vars(self._optimizer).pop("add_noise", None)
        forget_batches(self._sampler)

    def _counted(self) -> FisherAccountant:
        """Returns a copy of the ledger whose account has the number of steps so far."""
        account = replace(self._ledger.account, steps=max(1, self.steps))
        found = self._empty(account, self._ledger.device)
        found.restore(self._ledger.state(), self._ledger.runs)
        found.caveats = self._ledger.caveats
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
        return self._statements

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
        """Closes the ledger and writes its report: the same folder and pages as those of an audit.

        Args:
            folder: a new or empty folder, or that of an earlier report of this training.
            dataset: the records with their names, units and ranges, in the order of the loader's data set; None: as the
                loader's data set gives them (images, token sequences or rows of numbers, each with its target).
            name: of the data, for the pages.

        Returns:
            The page for the data's owner; report-public.html beside it may be shown. Of several ranks the first writes.
        """
        ledger = self.finish()
        if self._ranks.rank:
            return Path(file_path("folder", folder)) / files.REPORT
        records = records_of(self._loader, name) if dataset is None else dataset
        if not isinstance(records, Dataset):
            raise InputError("dataset", "must be what load_dataset returns", f"a {type(records).__name__}")
        return write_report(folder, ledger, records, describe_parameters(self._optimizer))

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
        if state.get("mark") != self._mark():
            raise InputError("state", f"must be of the same training, {self._mark()}", state.get("mark"))
        steps, finished = state.get("steps"), state.get("finished")
        if type(steps) is not int or steps < 0 or type(finished) is not bool or (finished and not steps):
            raise InputError("state", "must have its number of steps", (steps, finished))
        self._ledger.restore(state.get("tensors"), int(finished))  # type: ignore[arg-type]
        self.steps = steps
        if self._blocks is not None:
            self._blocks.seed = checked_seed(state.get("seed"), "state")
        if finished:
            self._detach()
            self._ledger, self.finished = self._counted(), True

    def _mark(self) -> dict[str, Any]:
        a = self._ledger.account
        facts: dict[str, Any] = {"noise_multiplier": a.noise_multiplier, "max_grad_norm": a.max_grad_norm}
        if self._blocks is not None:
            facts |= {"worlds": list(self._blocks.options.worlds), "rules": list(a.kept_rules)}
            facts |= {"steps": self._blocks.steps, "budget": self._blocks.options.budget}
        return {**facts, "sample_rate": a.sample_rate, "records": a.records}


@random_states_kept()
def features_of(loader: Any) -> int:
    """Returns the number of values in the inputs of a record, for the mechanism's floors; at least 1."""
    record = loader.dataset[0]
    inputs = record[0] if isinstance(record, tuple | list) and len(record) > 1 else record
    return max(1, sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))


def check_loss(loss_fn: Any, reduction: str) -> None:
    """Refuses a loss whose gradient of one record depends on the other records of the batch, where that can be seen.

    Args:
        loss_fn: of the training.
        reduction: of the batch's losses, as make_private was told.
    """
    if not callable(loss_fn):
        raise InputError("loss_fn", "must be the criterion of the training", f"a {type(loss_fn).__name__}")
    own = getattr(loss_fn, "reduction", reduction)
    if own in ("mean", "sum") and own != reduction:
        why = f"must have reduction={reduction!r}, as make_private was told by loss_reduction: otherwise a record's "
        raise InputError("loss_fn", f"{why}gradient depends on how many records were drawn with it", own)
    divides = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and loss_fn.reduction == "mean"
    if divides and loss_fn.weight is not None:
        why = "must not have class weights with reduction='mean', which divides by the weights of the whole batch: a "
        raise InputError("loss_fn", f"{why}record then moves others' gradients, and no clip bounds that", str(loss_fn))


def check_accounted(optimizer: Any, rate: float) -> None:
    """Warns where Opacus accounts for a lower rate than that of the loader: its ε is then too small."""
    hook = optimizer.step_hook
    accounted = inspect.getclosurevars(hook).nonlocals.get("sample_rate") if inspect.isfunction(hook) else None
    if isinstance(accounted, float) and accounted < rate * (1 - 1e-3):
        what = f"Opacus accounts for the sample rate {accounted:.6g}, but the loader draws with {rate:.6g}"
        warn_user(f"{what}: its epsilon is too small. This ledger's get_epsilon has the loader's", ReconboundWarning)


def describe_training(optimizer: Any, account: Account, ranks: Ranks) -> tuple[str, ...]:
    """Returns what the numbers of a ledger rest on, in sentences."""
    divided = "is not divided"
    if optimizer.loss_reduction == "mean":  # Opacus's number is that of a rank
        expected = optimizer.expected_batch_size * ranks.size
        divided = f"is divided by the expected batch size {expected:g}, whoever was drawn"
    noise = "from Opacus's secure generator (secure_mode=True)"
    if not optimizer.secure_mode:
        noise = (
            "from torch's generator (secure_mode=False): whoever finds its seed or state subtracts the noise, and what "
            "rounding of the noise shows is not covered"
        )
    return (
        f"hard clipping: a record moves the sum by at most C = {account.max_grad_norm:g}",
        f"noise on the sum: standard deviation σC = {account.noise:g}; the noisy sum {divided}",
        f"noise {noise}",
        f"each record is drawn with chance q = {account.sample_rate:.6g}, independently at each step",
        "loss and model treat each record separately",
        *(("one noise, that of rank 0, is on the sum over all ranks",) if ranks.size > 1 else ()),
    )


__all__ = ["Measuring", "OpacusLedger", "watch"]
