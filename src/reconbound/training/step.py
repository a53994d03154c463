"""Clipped gradient sums and the information of a step, for the records of a data set at a model's present parameters.

A fault of a record (a loss that is not finite, a label out of range) raises a Fault that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from reconbound import fisher
from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import network
from reconbound._internal.rng import derive, random_states_kept, torch_stream
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.measurement_plan import Blocks, Plans, Segments, batch_weight
from reconbound.data.dataset import describe_copies, find_copies
from reconbound.fisher import Private, StepInformation
from reconbound.fisher.sums import ClippedSum, methods_that_pass, numbers_per_record
from reconbound.fisher.worlds import StepDistances, World, step_distances
from reconbound.training.noise import Release, record_losses
from reconbound.training.rows import DatasetRows, record_count, take_rows
from reconbound.training.sampling import WHOLE, Shard, within
from reconbound.training.settings import STEPS, Fault, FiniteChecks, Settings, all_finite, largest_parameter
from reconbound.training.static_step import Moment, StaticStep, Summed
from reconbound.validate import ModelError, check_batch, check_clipping
from reconbound.validate.model import known_caveats
from reconbound.validate.private import Problem, as_private, batch_rows, feature_mask, module_caveats, private_part

LossFn = Callable[[Any, Any], Tensor]
FEW_NUMBERS = 2**22  # in passes that keep no more of them Python takes longer than the arithmetic
Found = TypeVar("Found", StepInformation, StepDistances)


class Measured(NamedTuple, Generic[Found]):
    """A measurement of some records, its weight, and whether each record is measured once in a block."""

    records: Tensor
    found: Found
    weight: float
    stratified: bool

    @property
    def how(self) -> dict[str, Any]:
        """Returns how a ledger is to add it; that its numbers are finite is the measurer's to check."""
        return {"weight": self.weight, "stratified": self.stratified, "checked": True}


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
        batch: the records that took part.
        total: Σ c g over the batch, flat.
        released: the noisy mean gradient, flat, where it was computed with the sum.
        clipped_norm: of the batch's records.
        information: what was measured of Fisher information.
        distances: what was measured of distances to replaced worlds.
        followed: the information about the records whose features are kept.
    """

    batch: Tensor
    total: Tensor
    clipped_norm: Tensor
    released: Tensor | None = None
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
        if network(model) is not model:
            why = "must be the network itself, as before Opacus's make_private: clipping and noise are added here"
            raise InputError("model", why, type(model).__name__)
        self._clip: dict[str, Any] = {"max_grad_norm": settings.max_grad_norm, "clip": settings.clip}
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.params.values())).device
        self.records = record_count(inputs, targets)
        first = torch.arange(min(3, self.records))
        few = self.rows(first)
        self._first: tuple[Any, Any] = batch_rows(few, slice(1))
        measured = Private("nothing") if settings.rules is None else as_private(private)
        if check and settings.rules is None:
            check_clipping(model, loss_fn, *few)
            found: tuple[str, ...] = ()
        elif check:
            found = check_batch(model, loss_fn, *few, private=private)
        else:
            found = (*known_caveats(model), *module_caveats(Problem(model, loss_fn, measured), few))
        more: tuple[str, ...] = ()
        if check:
            copies = inputs.copies if isinstance(inputs, DatasetRows) else find_copies(inputs, targets)
            more = describe_copies(copies, self.records)
        self.caveats = (*found, *more)
        kinds = (Private("nothing"), measured)
        with _model_errors_explained():
            if check:  # only methods that pass on four records
                four = self.rows(torch.tensor([i * (self.records - 1) // 3 for i in range(4)]).unique())
                self.methods = methods_that_pass(model, loss_fn, four, kinds, **self._clip)
            else:
                self.methods = [fisher.covering_method(model, loss_fn, *few, kind) for kind in kinds]
        self.static: StaticStep | None = None
        self.checks = FiniteChecks()
        self._columns, self.features = self._private_features(few, measured)
        if check:
            self._try(first)

    def replay(self, sizes: Sequence[int], release: Release | None = None) -> None:
        """Computes at fixed shapes from now on: on a GPU as CUDA graphs, whose results are looked at some steps later.

        Who calls this settles `checks` before anything is saved or released.

        Args:
            sizes: to which records are padded, ascending; more records are computed eagerly.
            release: makes the noisy mean gradient of a batch's sum in the same graph; None: it is made elsewhere.
        """
        self.static = StaticStep(self, sizes, release)
        self.checks = FiniteChecks(STEPS if self.device.type == "cuda" else 0)

    def apart_from_training(self, settings: Settings, kept: Kept) -> Measurer:
        """Returns a measurer of the same model and data that computes eagerly.

        Args:
            settings: of its measurements.
            kept: what its measurements contain.
        """
        found = copy(self)
        found.settings, found.kept, found.static, found.checks = settings, kept, None, FiniteChecks()
        return found

    def rows(self, indices: Tensor) -> tuple[Any, Any]:
        """Returns inputs and targets of these records, on the model's device."""
        if isinstance(self.inputs, DatasetRows):
            data = self.inputs.read(indices)
            moved: tuple[Any, Any] = tree_map_only(Tensor, lambda t: t.to(self.device), data)
            return moved
        data = (self.inputs, self.targets)
        own: tuple[Any, Any] = tree_map_only(Tensor, lambda t: take_rows(t, indices).to(self.device), data)
        return own

    @cached_property
    def numbers_per_record(self) -> int | None:
        """Returns how many numbers a pass keeps for a record; None where not all layers have rules."""
        return numbers_per_record(self.model, self.loss_fn, *self._first, self.methods[0])

    def some_losses(self) -> list[float] | None:
        """Returns the losses of eight records at the present parameters, as `record_losses` does."""
        last = self.records - 1
        some = torch.linspace(0, last, min(8, last + 1)).long().clamp(max=last)  # above 2²⁴ floats round up too
        return record_losses(self.model, self.loss_fn, *self.rows(some))

    def gradient_sum(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Computes Σ c g over these records, flat, in the order of `params`, and their clipped norms."""
        clipped, summed = self._clipped_and_sum(indices)
        return summed.total, clipped.factor * clipped.norm

    def _clipped_and_sum(self, indices: Tensor, moment: Moment | None = None) -> tuple[ClippedSum, Summed]:
        with self._record_errors_explained(indices):
            static = None if self.static is None else self.static.gradient_sum(indices, moment)
            if static is not None:
                clipped, summed = static
            else:
                how = self.sum_options()
                clipped = fisher.clipped_gradient_sum(self.model, self.loss_fn, *self.rows(indices), **how)
                summed = Summed(self.joined(clipped.gradient_sum))
        self._check_finite(summed, indices, (clipped.loss, clipped.norm))
        return clipped, summed

    def joined(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Returns sums of gradients as one vector, in the order of `params`."""
        return torch.cat([sums[name].flatten() for name in self.params])

    def distances(self, indices: Tensor) -> StepDistances:
        """Measures how far the clipped gradients of these records are from those in the replaced worlds."""
        with self._record_errors_explained(indices):
            static = None if self.static is None else self.static.distances(indices)
            if static is not None:
                found, finite = static
            else:
                how = self.sum_options(worlds=len(self.worlds), records=len(indices))
                found = step_distances(self.model, self.loss_fn, *self.rows(indices), self.worlds, **how)
                finite = None
        none = Summed(found.loss[:0], finite)
        self._check_finite(none, indices, (found.loss, found.clipped_norm, *found.other_norm.values()))
        return found

    def information(
        self, indices: Tensor, generator: torch.Generator, moment: Moment | None = None
    ) -> tuple[StepInformation, Summed]:
        """Measures what a step would reveal about each of these records; the same pass gives their clipped sum, flat.

        Args:
            indices: the records.
            generator: draws the probes.
            moment: of the step whose batch they are; None: nothing is released.
        """
        probes = fisher.ProbeOptions(count=self.settings.probes, error="bound", generator=generator)
        with self._record_errors_explained(indices):
            static = None if self.static is None else self.static.information(indices, generator, moment)
            if static is not None:
                found, summed = static
            else:
                how = self.step_options(probes)
                found = fisher.step_information(self.model, self.loss_fn, *self.rows(indices), **how)
                summed = Summed(self.joined(found.gradient_sum))
        self._check_finite(summed, indices, (found.loss, found.norm, found.trace))
        if self._columns is None or found.diagonal_across is None or found.diagonal_along is None:
            return found, summed
        across, along = (d.flatten(1)[:, self._columns] for d in (found.diagonal_across, found.diagonal_along))
        return replace(found, diagonal_across=across, diagonal_along=along), summed

    def sum_options(
        self, *, mask: Tensor | None = None, method: Any = None, worlds: int = 0, records: int = 0
    ) -> dict[str, Any]:
        """Returns how clipped sums and distances are computed: arguments of `clipped_gradient_sum`.

        With other worlds, passes of many numbers are made in parts on a CPU, with as many rows as there are records:
        memory beyond that of a step is new each time.
        """
        how: dict[str, Any] = {"mask": mask, "method": self.methods[0] if method is None else method}
        size, each = self.settings.micro_batch, 1 + worlds
        if size is None and worlds and self.device.type == "cpu":
            large = records * each * (self.numbers_per_record or 0) > FEW_NUMBERS
            size = math.ceil(records / each) if large else None
        options = fisher.SumOptions(micro_batch=size, checked=True, **how)
        return {**self._clip, "options": options}

    def step_options(
        self, probes: fisher.ProbeOptions, *, mask: Tensor | None = None, method: Any = None
    ) -> dict[str, Any]:
        """Returns how information is computed: arguments of `step_information`."""
        how: dict[str, Any] = {"mask": mask, "method": self.methods[1] if method is None else method}
        how |= {"private": self.private, "diagonal": self.kept.diagonal, "spectral": self.kept.spectral}
        options = fisher.StepOptions(probes=probes, micro_batch=self.settings.micro_batch, checked=True, **how)
        return {**self._clip, "noise_multiplier": self.settings.noise_multiplier, "options": options}

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
        work = StepWork(batch, nothing, nothing)
        weight = None if ledger is None else batch_weight(self.settings.budget, seed, step)
        informed = ledger is not None and bool(ledger.account.kept_rules)
        if ledger is not None and informed:
            if plans.information is not None:
                for k, group in _turns(plans.information, seed, step, shard):
                    found, _ = self.information(group, probe(f"probe {k}"))
                    work.information.append(Measured(group, found, plans.information.weight(step), True))
            turn = step % shard.count == shard.number  # what is done once in a step is done with each shard in turn
            if turn and ledger.features.followed and ledger.rows is not None and len(ledger.rows):
                work.followed, _ = self.information(ledger.rows, probe("probe kept"))
        if ledger is not None and self.worlds:
            if plans.distances is not None:
                for _, group in _turns(plans.distances, derive(seed, "worlds"), step, shard):
                    work.distances.append(Measured(group, self.distances(group), plans.distances.weight(step), True))
            elif weight is not None and len(batch):
                work.distances.append(Measured(batch, self.distances(batch), weight, False))
        if len(batch) == 0:
            work.total = self.joined({name: torch.zeros_like(p) for name, p in self.params.items()})
        elif weight is None or not informed:
            clipped, (work.total, _, work.released) = self._clipped_and_sum(batch, Moment(seed, step))
            work.clipped_norm = clipped.factor * clipped.norm
        else:  # the same pass gives the sum
            found, (work.total, _, work.released) = self.information(batch, probe("probe 0"), Moment(seed, step))
            work.information.append(Measured(batch, found, weight, False))
            work.clipped_norm = found.clipped_norm
        return work

    def settle(self) -> None:
        """Looks at all results that are pending, and at the parameters."""
        self.check_parameters(now=True)
        self.checks.settle()

    def check_parameters(self, *, now: bool = False) -> None:
        """Checks that the parameters are finite after a step: where results are looked at later, not at every one.

        Parameters that are not finite do not become finite again, and the next step's losses show them as well.

        Args:
            now: at this one.
        """
        if not (now or self.checks.is_due):
            return

        def explain() -> Fault:
            bad = [name for name, p in self.params.items() if not bool(torch.isfinite(p.detach()).all())]
            which = f"the parameter {(bad or list(self.params))[0]}"
            return Fault(f"{which} is not finite after it: the model has exploded; lower lr")

        self.checks.add(largest_parameter(self.params).isfinite(), explain)

    def _try(self, indices: Tensor) -> None:
        """Refuses a model whose records PyTorch cannot take apart or differentiate, before training starts."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        try:
            with _model_errors_explained(), random_states_kept():
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

    def _check_finite(self, summed: Summed, indices: Tensor, values: tuple[Tensor, ...]) -> None:
        """Checks that losses, gradient norms and what else there is of these records are finite, and their sum.

        Args:
            summed: the sum, and whether all is finite, where that is known.
            indices: the records.
            values: with one number per record.
        """

        def explain() -> Fault:
            for what, found in zip(("loss", "gradient norm", "information"), values, strict=False):
                bad = torch.nonzero(~torch.isfinite(found)).flatten()
                if len(bad):
                    record, value = int(indices[int(bad[0])]), float(found[bad[0]])
                    large = float(largest_parameter(self.params))
                    return Fault(f"record {record} has {what} {value} (the largest parameter is {large:.3g})")
            return Fault("the clipped gradient sum is not finite: the model has exploded; lower lr")

        self.checks.add(all_finite(*values, summed.total) if summed.finite is None else summed.finite, explain)

    @contextmanager
    def _record_errors_explained(self, indices: Tensor) -> Iterator[None]:
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


def _turns(plan: Blocks | Segments, seed: int, step: int, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Yields the number of each group that is measured at a step, from 1, and those of its records in the shard."""
    for k, group in enumerate(plan.at(seed, step), 1):
        own = within(group, shard.span)
        if len(own):
            yield k, own


@contextmanager
def _model_errors_explained() -> Iterator[None]:
    """Explains PyTorch's error where it cannot separate a model's records or differentiate the model."""
    try:
        yield
    except Fault:
        raise
    except RuntimeError as error:
        why = str(error).split("\n")[0]
        raise ModelError(f"the information of single records cannot be computed for this model: {why}") from error
