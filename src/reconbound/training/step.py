"""Clipped gradient sums and the information of a step, for the records of a data set at a model's present parameters.

A fault of a record (a loss that is not finite, a label out of range) raises a Fault that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import is_wrapper
from reconbound._internal.rng import random_states_kept
from reconbound.data.copies import describe_copies, find_copies
from reconbound.fisher import (
    Private,
    ProbeOptions,
    StepInformation,
    StepOptions,
    SumOptions,
    clipped_gradient_sum,
    covering_method,
    step_information,
)
from reconbound.fisher.sum_check import methods_that_pass
from reconbound.training.settings import Settings
from reconbound.validate import ModelError, check_batch
from reconbound.validate.kinds import is_about_kinds, model_dtype
from reconbound.validate.private import Problem, as_private, feature_mask, private_part
from reconbound.validate.structure import known_caveats
from reconbound.validate.uncovered import uncovered_caveats

LossFn = Callable[[Any, Any], Tensor]


class Fault(RuntimeError):
    """A record or a model with which training cannot continue."""


class Measurer:
    """Computes gradients and information of a model's records, as the settings of a run ask for them.

    Args:
        model: as in PrivateSGD.
        loss_fn: as in PrivateSGD.
        inputs: as in PrivateSGD.
        targets: as in PrivateSGD.
        settings: as in PrivateSGD.
        private: as in PrivateSGD.
        diagonal: whether measurements have diagonals.
        spectral: whether measurements have spectral norms.
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
        inputs: Any,
        targets: Any,
        settings: Settings,
        private: Private | Tensor | Sequence[int] | str | None,
        *,
        diagonal: bool,
        spectral: bool,
        check: bool,
    ) -> None:
        self.model, self.loss_fn, self.inputs, self.targets, self.settings = model, loss_fn, inputs, targets, settings
        self.private, self.diagonal, self.spectral = private, diagonal, spectral
        if is_wrapper(model):
            why = "must be the network itself, as before Opacus's make_private: clipping and noise are added here"
            raise InputError("model", why, type(model).__name__)
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.device = self.params[0].device
        few = self.rows(torch.arange(min(3, record_count(inputs, targets))))
        self.caveats: tuple[str, ...]
        if check:
            found = check_batch(model, loss_fn, *few, private=private)
            self.caveats = (*found, *describe_copies(find_copies(inputs, targets), record_count(inputs, targets)))
        else:
            self.caveats = (*known_caveats(model), *uncovered_caveats(model, loss_fn, few, as_private(private)))
        self._methods = self._methods_that_pass(few, check)
        self._columns, self.features = self._private_features(few)
        if check:
            self._try(torch.arange(min(3, record_count(inputs, targets))))

    def _methods_that_pass(self, few: tuple[Any, Any], check: bool) -> list[Any]:
        """Returns the methods for sums and for information; with `check`, only those that pass on four records."""
        kinds = (Private("nothing"), as_private(self.private))
        with _refusing():
            if not check:
                return [covering_method(self.model, self.loss_fn, *few, kind) for kind in kinds]
            last = record_count(self.inputs, self.targets) - 1
            spread = self.rows(torch.tensor([i * last // 3 for i in range(4)]).unique())
            s = self.settings
            clipped: Any = {"max_grad_norm": s.max_grad_norm, "clip": s.clip}
            return methods_that_pass(self.model, self.loss_fn, spread, kinds, **clipped)

    def rows(self, indices: Tensor) -> tuple[Any, Any]:
        """Returns inputs and targets of these records, on the model's device."""

        def pick(t: Any) -> Any:
            return t[indices.to(t.device)].to(self.device) if isinstance(t, Tensor) else t

        return tree_map(pick, self.inputs), tree_map(pick, self.targets)

    def gradient_sum(self, indices: Tensor) -> dict[str, Tensor]:
        """Computes Σ c g over these records, by parameter name."""
        s = self.settings
        with self._explained(indices):
            clipped = clipped_gradient_sum(
                self.model,
                self.loss_fn,
                *self.rows(indices),
                max_grad_norm=s.max_grad_norm,
                clip=s.clip,
                options=SumOptions(micro_batch=s.micro_batch, method=self._methods[0], checked=True),
            )
        self._check_finite(indices, clipped.loss, clipped.norm)
        return clipped.gradient_sum

    def information(self, indices: Tensor, generator: torch.Generator) -> StepInformation:
        """Measures what a step would reveal about each of these records.

        Args:
            indices: the records.
            generator: draws the probes.
        """
        s = self.settings
        with self._explained(indices):
            found = step_information(
                self.model,
                self.loss_fn,
                *self.rows(indices),
                max_grad_norm=s.max_grad_norm,
                noise_multiplier=s.noise_multiplier,
                clip=s.clip,
                options=StepOptions(
                    diagonal=self.diagonal,
                    spectral=self.spectral,
                    micro_batch=s.micro_batch,
                    private=self.private,
                    method=self._methods[1],
                    checked=True,
                    probes=ProbeOptions(count=s.probes, error="bound", generator=generator),
                ),
            )
        self._check_finite(indices, found.loss, found.norm, found.trace)
        if self._columns is None or found.diagonal_across is None or found.diagonal_along is None:
            return found
        across, along = (d.flatten(1)[:, self._columns] for d in (found.diagonal_across, found.diagonal_along))
        return replace(found, diagonal_across=across, diagonal_along=along)

    def _try(self, indices: Tensor) -> None:
        """Refuses a model whose records PyTorch cannot take apart or differentiate, before training starts."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        try:
            with _refusing(), random_states_kept():
                self.gradient_sum(indices)
                if self.settings.rules is not None:
                    self.information(indices, torch.Generator(self.device).manual_seed(0))
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
                large = max(float(p.detach().abs().max()) for p in self.params)
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

    def _private_features(self, few: tuple[Any, Any]) -> tuple[Tensor | None, int]:
        """Returns the private columns of a record's flattened private part (None: all), and their number."""
        private = as_private(self.private)
        z = private_part(Problem(self.model, self.loss_fn, private), *few)
        mask = feature_mask(private, z)
        if mask is None:
            return None, z[0].numel()
        columns = torch.nonzero(mask.flatten()).flatten()
        if len(columns) == 0:
            raise InputError("private", "must name at least one feature", self.private)
        return columns, len(columns)


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


def evaluated(evaluate: Callable[[nn.Module], Any], model: nn.Module) -> dict[str, float]:
    """Returns the numbers that a user's function computes for a model; refuses any other result.

    Args:
        evaluate: model → dictionary of numbers.
        model: the model to evaluate.
    """
    try:
        found = evaluate(model)
    except RuntimeError as reason:
        if not is_about_kinds(reason):
            raise
        why = str(reason).split("\n")[0]
        raise Fault(f"evaluate gave the model data that are not {model_dtype(model)}, as it is: {why}") from reason
    if not isinstance(found, Mapping):
        raise InputError("evaluate", "must return a dictionary of numbers, by name", _told(found))
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if str(name) in ("run", "step"):
            raise InputError("evaluate", "must not return a number of this name, which the history has itself", name)
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"evaluate's {name!r}", "must be one number", _told(value)) from None
    return numbers


def _told(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def as_tensors(model: nn.Module, name: str, tree: Any) -> Any:
    """Returns a data set with its NumPy arrays as tensors, the rest unchanged.

    Arrays of floats get the model's dtype (NumPy's own is float64). Targets of whole numbers become int64, as losses
    require (except bytes, which they accept). Inputs of whole numbers keep their type, because they may be tokens.

    Args:
        model: gives the dtype.
        name: the name of the argument, for messages.
        tree: an array, a tensor, or a tuple or dictionary of them.
    """
    kind = model_dtype(model)

    def turned(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if not np.issubdtype(x.dtype, np.number) and x.dtype != np.bool_:
            raise InputError(name, "must hold numbers", f"an array of {x.dtype}")
        if not x.dtype.isnative or x.dtype == np.longdouble:
            x = x.astype(np.float64 if x.dtype == np.longdouble else x.dtype.newbyteorder("="))
        own = x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy()  # what torch can share
        found = torch.as_tensor(own)
        if found.is_floating_point() and kind is not None:
            return found.to(kind)
        return found.long() if name == "targets" and found.dtype in _NARROW else found

    return tree_map(turned, tree) if any(isinstance(x, np.ndarray) for x in tree_leaves(tree)) else tree


_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)


def row_counts(inputs: Any, targets: Any) -> set[int]:
    """Returns the row counts of the tensors of a data set: one number if all agree.

    Args:
        inputs: tensors with one row per record.
        targets: tensors with one row per record.
    """
    return {len(t) if t.dim() > 0 else 0 for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor)}


def record_count(inputs: Any, targets: Any) -> int:
    """Returns the number of records of a data set, or raises an InputError where its tensors disagree.

    Args:
        inputs: tensors with one row per record.
        targets: tensors with one row per record.
    """
    sizes = row_counts(inputs, targets)
    for name, tree in (("inputs", inputs), ("targets", targets)):
        if not any(isinstance(t, Tensor) for t in tree_leaves(tree)) and (name == "inputs" or tree is not None):
            what = "must be a tensor or a NumPy array with one row per record, or a tuple or dictionary of such"
            raise InputError(name, what, f"a {type(tree).__name__} without one")
    if len(sizes) != 1 or 0 in sizes:
        raise InputError("inputs", "and targets must have one row for each record", sorted(sizes))
    return sizes.pop()
