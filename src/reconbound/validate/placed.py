"""A few records with their private part as a variable, however it is placed, for the numerical checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from reconbound.validate.private import Private, Problem, feature_mask, private_part, twice_differentiable
from reconbound.validate.watch import LossFn, arguments, call_with

_SHAKEN = 0.05  # how far parameters are moved, so that what an initial zero hides is seen


class Placed:
    """The losses of a few records as a function of their private part.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of the few records.
        private: what is private; None: every floating-point input.
        dtype: the precision to compute in; None: that of model and data.
        shaken: move the parameters a little.

    Attributes:
        z: the private part, one tensor or (private=None) one for each input; empty where all inputs are tokens.
        features: the chosen features as 0 and 1, for each tensor of z; None: all.
        params: the trained parameters, by name.
        largest_output: the largest absolute value among the outputs of the last call of `losses`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        few: Any,
        private: Private | None,
        *,
        dtype: torch.dtype | None = None,
        shaken: bool = False,
    ) -> None:
        self.model, self.loss_fn, self.private, self.dtype = model, loss_fn, private, dtype
        self.inputs, self.targets = tree_map(lambda x: converted(x, dtype), few)
        self.state = {name: converted(t, dtype) for name, t in (*model.named_parameters(), *model.named_buffers())}
        self.params = {name: self.state[name] for name, p in model.named_parameters() if p.requires_grad}
        generator = torch.Generator().manual_seed(1)
        for p in self.params.values():
            if shaken:
                p += _SHAKEN * (p.abs().mean() + _SHAKEN) * drawn_like(p, generator)
            p.requires_grad_()
        if self.private is None:
            self.z: list[Tensor] = [x for x in tree_leaves(self.inputs) if _is_float(x)]
            self.features: list[Tensor | None] = [None] * len(self.z)
        else:
            part = converted(private_part(Problem(model, loss_fn, self.private), *few), dtype)
            self.z, self.features = [part], [feature_mask(self.private, part)]
        self.largest_output = 0.0

    def losses(self, z: list[Tensor]) -> Tensor:
        """Returns the loss of each record with z in the place of the private part, (B,)."""
        fresh = {name: t if t.requires_grad else t.clone() for name, t in self.state.items()}
        with _Wide() if self.dtype == torch.float64 else nullcontext():  # type: ignore[no-untyped-call]
            if self.private is not None:
                problem = Problem(self.model, self.loss_fn, self.private)
                losses, outputs = problem.losses_and_outputs(z[0], self.inputs, self.targets, fresh)
                self.largest_output = _largest(outputs)
                return losses
            leaves, structure = tree_flatten(self.inputs)
            moved = iter(z)
            inputs = tree_unflatten([next(moved) if _is_float(x) else x for x in leaves], structure)
            with twice_differentiable():
                outputs = call_with(self.model, fresh, *arguments(inputs))
                self.largest_output = _largest(outputs)
                return self.loss_fn(outputs, self.targets)

    def chosen(self, v: list[Tensor]) -> list[Tensor]:
        """Returns a direction of the private part, with zeros in the features that are not private."""
        return [x if mask is None else x * mask for x, mask in zip(v, self.features, strict=True)]

    def noise(self, generator: torch.Generator) -> list[Tensor]:
        """Returns a random direction of the private part, of the size of its values' spread."""
        sizes = [x.std() if x.numel() > 1 else x.abs().sum() for x in self.z]
        return self.chosen(
            [(s + 1e-3 * x.abs().mean() + 1e-3) * drawn_like(x, generator) for s, x in zip(sizes, self.z, strict=True)]
        )


def _largest(outputs: Any) -> float:
    """Returns the largest absolute value in a tree of outputs; infinite values count as 0."""
    numbers = [x.detach().abs() for x in tree_leaves(outputs) if _is_float(x) and x.numel()]
    return max((float(x.nan_to_num(0.0, 0.0, 0.0).max()) for x in numbers), default=0.0)


class _Wide(TorchDispatchMode):
    """A mode in which casts to less precise floating-point numbers are casts to float64: rounding is not tested."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and wanted is not None and wanted.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def place_precisely(model: nn.Module, loss_fn: LossFn, few: Any, private: Private | None) -> Placed:
    """Returns the records in float64 where model and loss run in it, otherwise in their own precision.

    The parameters are moved a little, so that a last layer of zeros hides nothing, where the losses stay finite.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of the few records.
        private: what is private; None: every floating-point input.
    """
    for dtype in (torch.float64, None):
        for shaken in (True, False):
            placed = Placed(model, loss_fn, few, private, dtype=dtype, shaken=shaken)
            try:
                losses = placed.losses(placed.z)
            except (RuntimeError, ValueError, TypeError):
                if dtype is None and not shaken:
                    raise
                continue
            if bool(torch.isfinite(losses).all()):
                return placed
    return placed


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switches autocast off: differences of numbers rounded to half precision prove nothing."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def converted(x: Any, dtype: torch.dtype | None) -> Any:
    """Returns a detached copy of a tensor, floating-point ones in this precision; anything else unchanged."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(dtype or x.dtype, copy=True) if x.is_floating_point() else x.detach().clone()


def drawn_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns standard normal numbers of x's shape, precision and device, from a generator on the CPU."""
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
