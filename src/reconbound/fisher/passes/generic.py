"""Products with per-record gradients and their Jacobians by torch.func, for any module that it can differentiate."""

from __future__ import annotations

from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp, vmap
from torch.utils._pytree import tree_map

from reconbound.fisher.options import dependence_error, gradient_error
from reconbound.fisher.passes.products import Params, rounded_above, squares, squares_above, wide_dtype
from reconbound.validate.private import Inputs, Problem, batch_rows, trainable


class GenericPass:
    """A pass by torch.func over single records: slower than layer rules, correct for all it can differentiate.

    Its methods are those of LayerPass.
    """

    method: Literal["layers", "mixed", "generic"] = "generic"

    def __init__(self, problem: Problem, z: Tensor, inputs: Inputs, targets: Any, *, check: bool = False) -> None:
        self.problem, self.z = problem, z.detach()
        self.params = {name: p.detach() for name, p in trainable(problem).items()}
        self.dtype = wide_dtype(*self.params.values())
        self.public = (inputs, targets)
        refused = fused_recurrence(problem.model)
        if refused is not None:
            raise ValueError(
                f"torch.func cannot take {refused} record by record: write the recurrence with nn.Linear layers"
            )
        if check:
            self._check_private()
        self.gradients, self.losses = self._each(self._gradient, self.z)
        self._check_dependence()  # after it: what the model has kept of that run is refused where it is used

    def norms(self) -> Tensor:
        above = torch.stack([squares_above(_rows(g).to(self.dtype)) for g in self.gradients.values()]).sum(0)
        return rounded_above(above.sqrt(), self.dtype)

    def own(self, *, moving: bool = False) -> tuple[Tensor, Tensor]:
        return self.norms(), self._each(self._pull, self.z, self.gradients)

    @property
    def slope(self) -> Tensor:
        at_z: Tensor = self._each(lambda z, pub: grad(lambda z: self._loss(self.params, z, pub))(z), self.z)
        return at_z

    def output_slope(self) -> Tensor | None:
        return None

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        dots = [_rows(g) @ direction[name].flatten() for name, g in self.gradients.items()]
        pull = lambda z, pub: self._pull(z, pub, direction)  # noqa: E731
        return torch.stack(dots).sum(0), self._each(pull, self.z)

    def moved(self, v: Tensor) -> Tensor:
        moved: dict[str, Tensor] = self._each(self._push, self.z, v.to(self.z.dtype))
        return torch.stack([squares(_rows(m)) for m in moved.values()]).sum(0)

    def rows(self, rows: slice) -> GenericPass:
        found = copy(self)
        found.gradients = {name: g[rows] for name, g in self.gradients.items()}
        return found

    def squared_distances(self, weights: Tensor, other: GenericPass, other_weights: Tensor) -> Tensor:
        differences = [
            _rows(g) * weights.to(self.dtype)[:, None] - _rows(g2) * other_weights.to(self.dtype)[:, None]
            for g, g2 in zip(self.gradients.values(), other.gradients.values(), strict=True)
        ]
        return squares(*differences)

    def normal(self, v: Tensor) -> Tensor:
        pulled: Tensor = self._each(self._pull, self.z, self._each(self._push, self.z, v.to(self.z.dtype)))
        return pulled

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        weights = weights.to(self.dtype)
        return {
            name: (weights @ _rows(g).to(self.dtype)).reshape(self.params[name].shape)
            for name, g in self.gradients.items()
        }

    def _check_dependence(self) -> None:
        """Checks that the loss depends on no parameter that was not replaced."""
        z, inputs, targets = batch_rows((self.z, *self.public), slice(0, 1))
        with torch.enable_grad():
            if self.problem.losses(z, inputs, targets, self.params).requires_grad:
                raise ValueError(
                    "the loss reaches trainable parameters by another way than calling the model (a penalty inside "
                    "loss_fn?): a record's gradient must come from its own loss alone"
                )

    def _check_private(self) -> None:
        """Checks, on up to two records, that each has a loss and that its gradient depends on its private part."""
        one = batch_rows((self.z, *self.public), slice(0, 1))
        z, inputs, targets = tree_map(lambda t: torch.cat([t, t]) if isinstance(t, Tensor) else t, one)
        z = z.detach().requires_grad_()
        params = {name: p.clone().requires_grad_() for name, p in self.params.items()}
        with torch.enable_grad():
            losses = self.problem.losses(z, inputs, targets, params)
            found: Any = ()
            if losses.requires_grad:
                found = torch.autograd.grad(losses.sum(), [*params.values()], create_graph=True, allow_unused=True)
            moving = [g.sum() for g in found if g is not None and g.requires_grad]
        if all(g is None for g in found):
            raise gradient_error()
        if not moving or torch.autograd.grad(moving, z, allow_unused=True)[0] is None:
            raise dependence_error(self.problem.private.part)

    def _loss(self, params: Params, z: Tensor, public: Any) -> Tensor:
        one = tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, public)
        return self.problem.losses(z.unsqueeze(0), one[0], one[1], params)[0]

    def _gradient(self, z: Tensor, public: Any) -> Any:
        return grad_and_value(lambda w: self._loss(w, z, public))(self.params)

    def _pull(self, z: Tensor, public: Any, direction: Params) -> Any:
        """Returns Jᵀ·direction."""
        return self._reverse(z, public)(dict(direction))[0]

    def _push(self, z: Tensor, public: Any, v: Tensor) -> Any:
        """Returns Jv, the pull-back of the pull-back, which is linear in what it pulls."""
        pull = self._reverse(z, public)
        return vjp(lambda w: pull(w)[0], {name: torch.zeros_like(p) for name, p in self.params.items()})[1](v)[0]

    def _reverse(self, z: Tensor, public: Any) -> Any:
        return vjp(lambda z: self._gradient(z, public)[0], z)[1]

    def _each(self, function: Any, *args: Any) -> Any:
        """Maps function(z, public, ...) over records by vmap."""
        dims = tree_map(lambda t: 0 if isinstance(t, Tensor) else None, self.public)
        return vmap(function, in_dims=(0, dims, *(0,) * (len(args) - 1)))(args[0], self.public, *args[1:])


def fused_recurrence(model: torch.nn.Module) -> str | None:
    """Returns the name of a recurrent layer of PyTorch's, for which there are no rules by record; None: there is none.

    (Cells are taken record by record by a slow loop on a CPU, and not at all on CUDA.)
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase):
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def _rows(each: Tensor) -> Tensor:
    """Returns a row for each record, (B, ...) → (B, p); for a parameter that is one number, (B,) → (B, 1)."""
    return each.unsqueeze(-1).flatten(1)
