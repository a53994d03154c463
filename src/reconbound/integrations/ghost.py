"""Ghost clipping: reads the norms that Opacus computes, and checks that they are those of what is summed.

Opacus computes norms from the inputs and output gradients of layers, and then differentiates the sum of the records'
losses, each times its clip factor. What it differentiates can be more than what it measured: a penalty on the
parameters, a weight that is used outside its layer, or losses of shape (B, 1), which are multiplied with the factors of
all records. No clip bounds that. Here each product of factors and losses is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from reconbound._internal.checks import InputError

#: By how much a record's gradient may be larger than its norm, relatively and absolutely: both are rounded.
_ROUNDING, _TINY = 1e-2, 1e-6


class GhostNorms:
    """Stands for Opacus's module in a criterion for ghost clipping, and keeps the norms of each backward pass.

    Args:
        criterion: that make_private returned; its losses are clipped as before.

    Attributes:
        module: Opacus's, which knows the norms.
    """

    def __init__(self, criterion: DPLossFastGradientClipping) -> None:
        self.module, self._criterion = criterion.module, criterion
        self._norms: Tensor | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor | None, int]] = []  # as the pass left them, with versions
        self._products = 0
        criterion.module = self

    def detach(self) -> None:
        """Makes the criterion what it was before."""
        self._criterion.module = self.module

    def take(self) -> Tensor:
        """Returns the norms of the last backward pass, (B,); refuses a pass that the criterion did not make."""
        norms, self._norms = self._norms, None
        gradients, self._gradients = self._gradients, []
        same = all(p.grad is kept and (kept is None or kept._version == version) for p, kept, version in gradients)
        if norms is None or not same:
            why = "must be what backward() is called on, by itself, and nothing else may change the gradients before "
            raise InputError(
                "loss_fn", f"{why}the step: only those of its own are clipped", "gradients of another kind"
            )
        return norms

    def get_clipping_coef(self) -> _Factors:
        """Returns Opacus's clip factors, which look at the losses that they are multiplied with."""
        factors = self.module.get_clipping_coef()
        self._norms = self.module.per_sample_gradient_norms.flatten().clone()  # the module's may be changed later
        return _Factors(factors, self)

    def enable_hooks(self) -> None:
        """Ends a backward pass, as in Opacus, and remembers the gradients that it made."""
        self.module.enable_hooks()
        trained = self.module.trainable_parameters
        self._gradients = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in trained]

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.module, name)

    def check_losses(self, losses: Tensor) -> None:
        """Refuses losses whose gradients are not those of the norms.

        Two records are looked at, at the first product, and whenever the number of products has doubled.

        Args:
            losses: what the clip factors are multiplied with.
        """
        norms, self._norms = self._norms, None  # kept if nothing is refused
        assert norms is not None
        if losses.shape != norms.shape:
            why = (
                f"must give one loss per record, of shape ({len(norms)},): Opacus multiplies losses of another shape "
                "with the clip factors of all records, so that nothing is clipped"
            )
            raise InputError("loss_fn", why, tuple(losses.shape))
        count, self._products = self._products, self._products + 1
        if len(norms) and not count & (count - 1):
            for row in {count % len(norms), int(norms.argmin())}:
                self._check_record(losses, row, float(norms[row]))
        self._norms = norms

    def _check_record(self, losses: Tensor, row: int, norm: float) -> None:
        self.module.disable_hooks()
        try:
            trained = [p for p in self.module.trainable_parameters if p.requires_grad]
            parts = torch.autograd.grad(losses[row], trained, retain_graph=True, allow_unused=True)
        finally:
            self.module.enable_hooks()
        own = torch.stack([part.double().norm() for part in parts if part is not None]).norm()
        if float(own) > norm * (1 + _ROUNDING) + _TINY:
            why = (
                "must depend on the parameters through the layers of the model only: no penalty on the parameters, and "
                f"no weight outside its layer. Ghost clipping takes {norm:.4g} for the norm of a record's gradient"
            )
            raise InputError("loss_fn", why, f"{float(own):.4g}")


class _Factors:
    """Clip factors, as Opacus uses them: `factors.to(device) * losses`."""

    def __init__(self, factors: Tensor, norms: GhostNorms) -> None:
        self._factors, self._norms = factors, norms

    def to(self, device: torch.device) -> _Factors:
        return _Factors(self._factors.to(device), self._norms)

    def __mul__(self, losses: Tensor) -> Tensor:
        self._norms.check_losses(losses)
        return self._factors * losses


def check_criterion(optimizer: DPOptimizer, criterion: Any) -> None:
    """Refuses a criterion that is not the one of ghost clipping, or clips adaptively.

    Args:
        optimizer: for ghost clipping.
        criterion: what the loss is computed with.
    """
    kind = type(criterion).__name__
    if not isinstance(criterion, DPLossFastGradientClipping) or criterion.optimizer is not optimizer:
        why = "must be the criterion that make_private returned with ghost clipping: it knows the norms"
        raise InputError("loss_fn", why, f"a {kind}")
    if type(criterion) is not DPLossFastGradientClipping:
        why = "cannot be accounted for (adaptive clipping uses the true size of the batch, which no noise covers)"
        raise InputError("loss_fn", why, kind)
    module: Any = criterion.module
    if float(module.max_grad_norm) != float(optimizer.max_grad_norm):
        why = f"must be the module's, {float(module.max_grad_norm):g}: ghost clipping clips to that"
        raise InputError("max_grad_norm", why, float(optimizer.max_grad_norm))
    check_covered(optimizer, module)


def check_covered(optimizer: DPOptimizer, module: Any) -> None:
    """Refuses trainable parameters that ghost clipping left out of the norms: their gradients are not clipped.

    Args:
        optimizer: for ghost clipping.
        module: Opacus's.
    """
    clipped = {id(p) for p in module.trainable_parameters}
    loose = [tuple(p.shape) for p in optimizer.params if id(p) not in clipped]
    if loose:
        why = "must have no parameters that became trainable after make_private: ghost clipping does not see them"
        raise InputError("optimizer", why, loose)
    if hasattr(optimizer, "_adjusted_noise_multiplier"):
        why = "must add the noise that is accounted for: adaptive clipping adds other noise"
        raise InputError("optimizer", why, optimizer._adjusted_noise_multiplier)
