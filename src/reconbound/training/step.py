"""Clipped gradient sums and the information of a step, for the records of a data set at a model's present parameters.

A fault of a record (a loss that is not finite, a label out of range) raises a Fault that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from reconbound import fisher
from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import is_wrapper
from reconbound._internal.rng import derive, random_states_kept, seeded, torch_stream
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.measurement_plan import Blocks, Plans, Segments, batch_weight
from reconbound.accounting.spec import Account
from reconbound.data.dataset import describe_copies, find_copies
from reconbound.fisher import Private, StepInformation
from reconbound.fisher.sums import methods_that_pass
from reconbound.fisher.worlds import REMOVED, StepDistances, World, step_distances
from reconbound.training.sampling import WHOLE, Shard, within
from reconbound.training.settings import Fault, Settings, record_count
from reconbound.validate import ModelError, check_batch, check_clipping
from reconbound.validate.model import known_caveats
from reconbound.validate.private import Problem, as_private, feature_mask, private_part, uncovered_caveats

LossFn = Callable[[Any, Any], Tensor]
Found = TypeVar("Found", StepInformation, StepDistances)


class Measured(NamedTuple, Generic[Found]):
    """A measurement of some records, its weight, and whether each record is measured once in a block."""

    records: Tensor
    found: Found
    weight: float
    stratified: bool


@dataclass(frozen=True)
class Kept:
    """Names what a ledger keeps beside traces.

    Attributes:
        diagonal: whether measurements have diagonals.
        spectral: whether measurements have spectral norms.
        worlds: the replaced worlds, by name.
    """

    diagonal: bool = False
    spectral: bool = False
    worlds: Mapping[str, World] = field(default_factory=dict)


@dataclass
class StepWork:
    """Holds what a step computes before anything is changed.

    Attributes:
        total: Σ c g over the batch, flat.
        clipped_norm: of the batch's records.
        information: what was measured of Fisher information.
        distances: what was measured of distances to replaced worlds.
        followed: the information about the records whose features are kept.
    """

    total: Tensor
    clipped_norm: Tensor
    information: list[Measured[StepInformation]] = field(default_factory=list)
    distances: list[Measured[StepDistances]] = field(default_factory=list)
    followed: StepInformation | None = None


class Measurer:
    """Computes gradients and information of a model's records, as the settings of a run ask for them.

    Args:
        model: as in PrivateSGD.
        loss_fn: as in PrivateSGD.
        data: inputs and targets, as in PrivateSGD.
        settings: as in PrivateSGD.
        private: as in PrivateSGD.
        kept: what the ledger keeps.
        check: whether to check model and data first.

    Attributes:
        features: d, the number of private features of a record.
        caveats: what every floor of this model must carry.
    """

    @random_states_kept()
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: tuple[Any, Any],
        settings: Settings,
        private: Private | Tensor | Sequence[int] | str | None,
        *,
        kept: Kept = Kept(),
        check: bool = True,
    ) -> None:
        self.model, self.loss_fn, self.settings = model, loss_fn, settings
        self.inputs, self.targets = inputs, targets = data
        self.private, self.kept, self.worlds = private, kept, kept.worlds
        if is_wrapper(model):
            why = "must be the network itself, as before Opacus's make_private: clipping and noise are added here"
            raise InputError("model", why, type(model).__name__)
        self._clip: dict[str, Any] = {"max_grad_norm": settings.max_grad_norm, "clip": settings.clip}
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.params.values())).device
        self.records = record_count(inputs, targets)
        first = torch.arange(min(3, self.records))
        few = self.rows(first)
        measured = Private("nothing") if settings.rules is None else as_private(private)
        if check and settings.rules is None:
            check_clipping(model, loss_fn, *few)
            found: tuple[str, ...] = ()
        elif check:
            found = check_batch(model, loss_fn, *few, private=private)
        else:
            found = (*known_caveats(model), *uncovered_caveats(model, loss_fn, few, measured))
        more = describe_copies(find_copies(inputs, targets), self.records) if check else ()
        self.caveats = (*found, *more)
        kinds = (Private("nothing"), measured)
        with _refusing():
            if check:  # only methods that pass on four records
                four = self.rows(torch.tensor([i * (self.records - 1) // 3 for i in range(4)]).unique())
                self._methods = methods_that_pass(model, loss_fn, four, kinds, **self._clip)
            else:
                self._methods = [fisher.covering_method(model, loss_fn, *few, kind) for kind in kinds]
        self._sums = fisher.SumOptions(micro_batch=settings.micro_batch, method=self._methods[0], checked=True)
        self._columns, self.features = self._private_features(few, measured)
        if check:
            self._try(first)

    def rows(self, indices: Tensor) -> tuple[Any, Any]:
        """Returns inputs and targets of these records, on the model's device."""
        data = (self.inputs, self.targets)
        own: tuple[Any, Any] = tree_map_only(Tensor, lambda t: t[indices.to(t.device)].to(self.device), data)
        return own

    def some_losses(self) -> list[float] | None:
        """Returns the losses of eight records at the present parameters, as `record_losses` does."""
        last = self.records - 1
        some = torch.linspace(0, last, min(8, last + 1)).long().clamp(max=last)  # above 2²⁴ floats round up too
        return record_losses(self.model, self.loss_fn, *self.rows(some))

    def gradient_sum(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Computes Σ c g over these records, by parameter name, and their clipped norms."""
        with self._explained(indices):
            data = self.rows(indices)
            clipped = fisher.clipped_gradient_sum(self.model, self.loss_fn, *data, options=self._sums, **self._clip)
        self._check_finite(indices, clipped.loss, clipped.norm)
        return clipped.gradient_sum, clipped.factor * clipped.norm

    def distances(self, indices: Tensor) -> StepDistances:
        """Measures how far the clipped gradients of these records are from those in the replaced worlds."""
        step: dict[str, Any] = {**self._clip, "options": self._sums}
        with self._explained(indices):
            found = step_distances(self.model, self.loss_fn, *self.rows(indices), self.worlds, **step)
        self._check_finite(indices, found.loss, found.clipped_norm, *found.other_norm.values())
        return found

    def information(self, indices: Tensor, generator: torch.Generator) -> StepInformation:
        """Measures what a step would reveal about each of these records.

        Args:
            indices: the records.
            generator: draws the probes.
        """
        s = self.settings
        probes = fisher.ProbeOptions(count=s.probes, error="bound", generator=generator)
        kept: Any = {
            "private": self.private,
            "diagonal": self.kept.diagonal,
            "spectral": self.kept.spectral,
            "probes": probes,
        }
        options = fisher.StepOptions(micro_batch=s.micro_batch, method=self._methods[1], checked=True, **kept)
        step = {**self._clip, "noise_multiplier": s.noise_multiplier, "options": options}
        with self._explained(indices):
            found = fisher.step_information(self.model, self.loss_fn, *self.rows(indices), **step)
        self._check_finite(indices, found.loss, found.norm, found.trace)
        if self._columns is None or found.diagonal_across is None or found.diagonal_along is None:
            return found
        across, along = (d.flatten(1)[:, self._columns] for d in (found.diagonal_across, found.diagonal_along))
        return replace(found, diagonal_across=across, diagonal_along=along)

    def compute_step(
        self,
        batch: Tensor,
        seed: int,
        step: int,
        ledger: FisherAccountant | None,
        plans: Plans,
        shard: Shard = WHOLE,
    ) -> StepWork:
        """Computes the clipped sum of a batch and measures the records whose turn it is. Nothing is changed.

        Args:
            batch: indices of the records, of the shard only.
            seed: of the run.
            step: its number.
            ledger: which records it follows at every step; None without accounting.
            plans: which records are measured at which step.
            shard: the records to measure. Those that the ledger follows are measured with each shard in turn.
        """
        probe = partial(torch_stream, seed, step=step, device=self.device)
        nothing = torch.zeros(0, device=self.device)
        work = StepWork(nothing, nothing)
        weight = None if ledger is None else batch_weight(self.settings.budget, seed, step)
        informed = ledger is not None and bool(ledger.account.kept_rules)
        if ledger is not None and informed:
            if plans.information is not None:
                for k, group in _turns(plans.information, seed, step, shard):
                    found = self.information(group, probe(f"probe {k}"))
                    work.information.append(Measured(group, found, plans.information.weight(step), True))
            if shard.has_turn(step) and ledger.features.followed and ledger.rows is not None and len(ledger.rows):
                work.followed = self.information(ledger.rows, probe("probe kept"))
        if ledger is not None and self.worlds:
            if plans.distances is not None:
                for _, group in _turns(plans.distances, derive(seed, "worlds"), step, shard):
                    work.distances.append(Measured(group, self.distances(group), plans.distances.weight(step), True))
            elif weight is not None and len(batch):
                work.distances.append(Measured(batch, self.distances(batch), weight, False))
        if len(batch) == 0:
            sums = {name: torch.zeros_like(p) for name, p in self.params.items()}
        elif weight is None or not informed:
            sums, work.clipped_norm = self.gradient_sum(batch)
        else:  # the same pass gives the sum
            found = self.information(batch, probe("probe 0"))
            work.information.append(Measured(batch, found, weight, False))
            sums, work.clipped_norm = found.gradient_sum, found.clipped_norm
        work.total = torch.cat([sums[name].flatten() for name in self.params])
        if not bool(torch.isfinite(work.total).all()):
            raise Fault("the clipped gradient sum is not finite: the model has exploded; lower lr")
        return work

    def _try(self, indices: Tensor) -> None:
        """Refuses a model whose records PyTorch cannot take apart or differentiate, before training starts."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        try:
            with _refusing(), random_states_kept():
                self.gradient_sum(indices)
                if self.settings.rules is not None:
                    self.information(indices, torch.Generator(self.device).manual_seed(0))
                if self.worlds:
                    self.distances(indices)
        except Fault:
            return  # errors of single records and their values: training reports them with the step
        finally:
            for name, b in self.model.named_buffers():
                b.copy_(buffers[name])

    def _check_finite(self, indices: Tensor, losses: Tensor, *others: Tensor) -> None:
        """Raises a Fault that names the first record whose loss, gradient or information is not a finite number."""
        if bool(torch.isfinite(torch.stack([losses.double(), *(o.double() for o in others)])).all()):
            return
        for what, values in zip(("loss", "gradient norm", "information"), (losses, *others), strict=False):
            bad = torch.nonzero(~torch.isfinite(values)).flatten()
            if len(bad):
                record, value = int(indices[int(bad[0])]), float(values[bad[0]])
                large = max(float(p.detach().abs().max()) for p in self.params.values())
                raise Fault(f"record {record} has {what} {value} (the largest parameter is {large:.3g})")

    @contextmanager
    def _explained(self, indices: Tensor) -> Iterator[None]:
        """Raises a Fault that names the record whose label or token is out of range."""
        try:
            yield
        except IndexError as reason:
            for i in indices.tolist():
                inputs, targets = self.rows(torch.tensor([i]))
                try:
                    with torch.no_grad():
                        Problem(self.model, self.loss_fn, Private("nothing")).losses(torch.zeros(1), inputs, targets)
                except IndexError as own:
                    raise Fault(f"record {i} has an index that is out of range: {own}") from own
            raise Fault(f"an index is out of range: {reason}") from reason

    def _private_features(self, few: tuple[Any, Any], private: Private) -> tuple[Tensor | None, int]:
        """Returns the private columns of a record's flattened private part (None: all), and their number."""
        if private.part == "nothing":  # no derivative is taken: whatever goes in counts
            return None, max(
                1, sum(math.prod(leaf.shape[1:]) for leaf in tree_leaves(few[0]) if isinstance(leaf, Tensor))
            )
        z = private_part(Problem(self.model, self.loss_fn, private), *few)
        mask = feature_mask(private, z)
        if mask is None:
            return None, z[0].numel()
        columns = torch.nonzero(mask.flatten()).flatten()
        if len(columns) == 0:
            raise InputError("private", "must name at least one feature", self.private)
        return columns, len(columns)


def add_to_ledger(ledger: FisherAccountant, batch: Tensor, work: StepWork) -> None:
    """Adds a step to the ledger of its training.

    Args:
        ledger: of the training.
        batch: the records that took part.
        work: what was computed.
    """
    for one in work.information:
        ledger.add(one.records, one.found, weight=one.weight, stratified=one.stratified)
    if work.followed is not None:
        ledger.follow(work.followed)
    for each in work.distances:
        ledger.add_distances(each.records, each.found, weight=each.weight, stratified=each.stratified)
    if REMOVED in ledger.divergences.worlds and len(batch):
        ledger.divergences.add_norms(batch, work.clipped_norm, 1.0)


def _turns(plan: Blocks | Segments, seed: int, step: int, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Yields the number of each group that is measured at a step, from 1, and those of its records in the shard."""
    for k, group in enumerate(plan.at(seed, step), 1):
        own = within(group, shard.span)
        if len(own):
            yield k, own


def make_ledger(account: Account, measurer: Measurer, options: Mapping[str, Any]) -> FisherAccountant:
    """Returns an empty ledger for what a measurer measures beside the norms of all batches.

    Args:
        account: of the training.
        measurer: of its model.
        options: of FisherAccountant.
    """
    ledger = FisherAccountant(account, **options)
    ledger.divergences.from_batches = True
    ledger.caveats = measurer.caveats
    ledger.needs_range = as_private(measurer.private).part == "module"
    # within a shuffled epoch the parameters depend on whether a record was seen: only batches can be measured
    ledger.features.followed = ledger.diagonal == "chosen" and account.sampler != "shuffle"
    return ledger


@contextmanager
def _refusing() -> Iterator[None]:
    """Explains PyTorch's error where it cannot separate a model's records or differentiate the model."""
    try:
        yield
    except Fault:
        raise
    except RuntimeError as error:
        why = str(error).split("\n")[0]
        raise ModelError(f"the information of single records cannot be computed for this model: {why}") from error


def record_losses(model: nn.Module, loss_fn: Any, inputs: Any, targets: Any) -> list[float] | None:
    """Returns the losses of these records; None where they cannot be computed or are not finite.

    Buffers and random numbers are not changed.

    Args:
        model: at its present parameters.
        loss_fn: (outputs, targets) → one loss per record.
        inputs: of these records.
        targets: of these records.
    """
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    problem = Problem(model, loss_fn, Private("nothing"))
    try:
        with torch.no_grad(), seeded(0):
            losses = problem.losses(torch.zeros(record_count(inputs, targets)), inputs, targets, own)
    except Exception:  # errors of the loss or of a record are reported when it is trained on, not here
        return None
    return losses.double().cpu().tolist() if bool(torch.isfinite(losses).all()) else None
