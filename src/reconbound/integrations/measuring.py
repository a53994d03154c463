"""Measurements beside Opacus: distances to worlds with public values in place, and Fisher information.

Each record is measured once in a block of steps, drawn or not, at the parameters before the step, as `PrivateSGD` does
(docs/theory/accounting.md, the third way), in groups of one or several batches. The records are those of the loader's
data set, read once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset, default_collate

from reconbound._internal.checks import InputError, flag, function, number, rounded_up
from reconbound._internal.opacus_hooks import without_hooks
from reconbound._internal.rng import derive, new_seed, random_states_kept, torch_stream
from reconbound.fisher.worlds import World, check_worlds
from reconbound.training.ranks import Ranks
from reconbound.training.sampling import Poisson, make_plan
from reconbound.training.settings import Settings
from reconbound.training.step import FEW_NUMBERS, Kept, LossFn, Measured, Measurer

#: By how much the norms of the first batch may differ from Opacus's, relatively: they are rounded.
_CLOSE = 1e-3
#: The fewest groups of several batches in a block: limits of confidence pool records, and do not cover where all of
#: them are measured at few steps.
_GROUPS = 16


@dataclass(frozen=True, eq=False)
class Measuring:
    """Says what `watch` measures beside "removed", and how often.

    Attributes:
        model: the network that is trained, as Opacus wraps it or as it is.
        epochs: of the training; measurements are planned over them, and it must not become longer.
        worlds: the worlds in which a part of each record has a public value in place of its own, by name: functions
            (inputs, targets) → those of the other world, such as Replacement.
        information: whether Fisher information is measured, for floors in the data's units; needs a smooth model.
        private: the private part of a record, as in `step_information`; for Fisher information.
        budget: records measured over records trained on, for each kind of measurement; each once in a block of
            1/(q·budget) steps, at least once in a run.
        feature_scale: the size of one unit of the model's input in the data's own, as in FisherAccountant.
        split: what a batch of the loader is for the model and the loss, batch → (inputs, targets); None: its first two
            parts.
    """

    model: Any
    epochs: float
    worlds: Mapping[str, World] = field(default_factory=dict)
    information: bool = False
    private: Any = None
    budget: float = 0.15
    feature_scale: Any = 1.0
    split: Callable[[Any], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.model, "_module", self.model), nn.Module):
            raise InputError("model", "must be the network that is trained", f"a {type(self.model).__name__}")
        number("epochs", self.epochs, above=0.0)
        number("budget", self.budget, above=0.0)
        check_worlds(self.worlds)
        if not flag("information", self.information) and not self.worlds:
            raise InputError("worlds", "or information must be given: otherwise nothing is measured", "neither")
        if self.split is not None:
            function("split", self.split, "batch → inputs and targets")


class BlockMeasurer:
    """Measures the records whose turn it is at each step of a training with Opacus.

    Args:
        options: what is measured.
        criterion: the loss of the training.
        optimizer: Opacus's.
        loader: of the training.
        rate: q, with which the loader draws.

    Attributes:
        steps: the number of steps that are planned.
        group: the number of records measured together.
        seed: of the random assignment of records to steps; secret, and nothing of the training depends on it.
        measurer: of the network.
    """

    def __init__(
        self, options: Measuring, criterion: Any, optimizer: Any, loader: DataLoader[Any], rate: float
    ) -> None:
        network = getattr(options.model, "_module", options.model)
        if isinstance(network, DifferentiallyPrivateDistributedDataParallel | DistributedDataParallel):
            network = network.module
        if {id(p) for p in network.parameters() if p.requires_grad} != {id(p) for p in optimizer.params}:
            why = "must be the network whose trainable parameters the optimizer has, all of them and no others"
            raise InputError("model", why, type(network).__name__)
        sigma, bound = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        rules: tuple[str, ...] | None = () if options.information else None
        settings = Settings(sigma, bound, rate, clip="hard", rules=rules, budget=float(options.budget))
        data, kept = all_records(loader, options.split), Kept(worlds=dict(options.worlds))
        with without_hooks(network):
            self.measurer = Measurer(network, losses_of(criterion), data, settings, options.private, kept=kept)
        records, worlds = self.measurer.records, len(options.worlds)
        self.options, self.seed = options, new_seed()
        self.steps = rounded_up(options.epochs * len(loader.batch_sampler))  # type: ignore[arg-type]
        plan = [make_plan(options.budget / n, Poisson(records, rate), self.steps) for n in (1, 1 + worlds)]
        with without_hooks(network):
            self.group = plan[0].group * batches_together(self.measurer, plan[0].group)
        plan = [replace(one, group=self.group) for one in plan]
        self._information = plan[0] if options.information else None
        self._distances = plan[1] if worlds else None
        self._compared = False

    def compare(self, records: Tensor, norms: Tensor, bound: float) -> None:
        """Refuses a loss or data that are not those of the training: the first batch's clipped norms differ then.

        Args:
            records: of the step.
            norms: of their gradients, as Opacus computed them.
            bound: the clip norm at this step.
        """
        if self._compared or not len(records):
            return
        norms = norms.double().clamp(max=bound)
        own = self.measurer.gradient_sum(records)[1].to(norms)
        limit = _CLOSE * self.measurer.settings.max_grad_norm
        if float((own - norms).abs().max()) > limit:
            worst = int((own - norms).abs().argmax())
            why = (
                "must be the loss of the training, with one loss per record, and the data set must give the same "
                f"records each time: Opacus's clipped norm of record {int(records[worst])} is {float(norms[worst]):.4g}"
            )
            raise InputError("loss_fn", why, float(own[worst]))
        self._compared = True

    def measure(self, step: int, bound: float, ranks: Ranks) -> list[Measured[Any]]:
        """Measures the records whose turn it is, of each group an equal share on every rank.

        Args:
            step: the number of the step.
            bound: the clip norm at this step.
            ranks: of the training.
        """
        if step >= self.steps:
            why = f"must be those of the training: measurements were planned over {self.steps} steps"
            raise InputError("epochs", why, self.options.epochs)
        if bound != self.measurer.settings.max_grad_norm:
            why = f"must stay {self.measurer.settings.max_grad_norm:g} where more than 'removed' is measured"
            raise InputError("max_grad_norm", why, bound)
        found: list[Measured[Any]] = []
        if self._information is not None:
            for k, group in enumerate(self._information.at(self.seed, step), 1):
                if len(own := group[ranks.rank :: ranks.size]):
                    probes = torch_stream(self.seed, f"probe {k}", step, self.measurer.device)
                    information = replace(self.measurer.information(own, probes)[0], gradient_sum={})
                    found.append(Measured(own, information, self._information.weight(step), True))
        if self._distances is not None:
            for group in self._distances.at(derive(self.seed, "worlds"), step):
                if len(own := group[ranks.rank :: ranks.size]):
                    found.append(Measured(own, self.measurer.distances(own), self._distances.weight(step), True))
        return found


def batches_together(measurer: Measurer, batch: int) -> int:
    """Returns the number of batches whose records are measured together, at fewer steps.

    More than one where records take few numbers: what Python does for a measurement then takes longer than its
    arithmetic. Each record is measured at a random step of its block all the same.

    Args:
        measurer: of the network.
        batch: the number of records in a batch.

    Guarantee:
        - Each record's estimates, and their standard errors, have the law that they have in groups of a batch. Those of
          different records depend more on each other.
    """
    numbers = measurer.numbers_per_record
    together = 1 if numbers is None else FEW_NUMBERS // (batch * numbers)
    return max(1, min(together, measurer.records // (batch * _GROUPS)))


@random_states_kept()
def all_records(loader: DataLoader[Any], split: Any) -> tuple[Any, Any]:
    """Returns inputs and targets of all records of a loader's data set, as one batch; refuses records that change.

    Args:
        loader: of the training.
        split: as in Measuring.
    """
    dataset: Any = loader.dataset
    collate = getattr(loader.collate_fn, "wrapped_collator_fn", loader.collate_fn)
    parts = split or _first_two
    if type(dataset) is TensorDataset and collate is default_collate:
        return _split(parts, list(dataset.tensors))  # without a copy

    def read(count: int) -> tuple[Any, Any]:
        return _split(parts, collate([dataset[i] for i in range(count)]))

    again = [tree_leaves(read(1)) for _ in range(2)]
    pairs = [(a, b) for a, b in zip(*again, strict=True) if isinstance(a, Tensor)]
    if not all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs):
        why = "must give the same record each time where more than 'removed' is measured: no random augmentation"
        raise InputError("data_loader", why, type(dataset).__name__)
    return read(len(dataset))


def _split(parts: Callable[[Any], tuple[Any, Any]], batch: Any) -> tuple[Any, Any]:
    found = parts(batch)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise InputError("split", "must return inputs and targets", f"a {type(found).__name__}")
    return found[0], found[1]


def _first_two(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise InputError("split", "must say what are inputs and targets of a batch", f"a {type(batch).__name__}")
    return batch[0], batch[1]


def losses_of(criterion: Any) -> LossFn:
    """Returns the loss of each record, (B,), in place of their mean or sum.

    Args:
        criterion: a module with a reduction, a function that takes one, or a function that returns one loss per record.
    """
    own = getattr(criterion, "criterion", criterion)  # of ghost clipping
    if hasattr(own, "reduction"):
        each: LossFn = copy.copy(own)
        each.reduction = "none"  # type: ignore[attr-defined]
        return each
    if inspect.isfunction(own) and "reduction" in inspect.signature(own).parameters:
        return partial(own, reduction="none")
    return own  # type: ignore[no-any-return]


__all__ = ["BlockMeasurer", "Measuring"]
