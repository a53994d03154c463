"""Clipped gradient norms of the records of a step, as Opacus's optimizers compute them."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
)
from opacus.optimizers import optimizer as opacus_optimizer
from torch import _VF, Tensor
from torch.overrides import TorchFunctionMode

from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import source_digest
from reconbound.integrations.ghost import GhostNorms, check_covered, check_criterion

_SMALL = 1e-6  # Opacus's clip factor is C/(norm + 1e-6), at most 1
#: SHA-256 of the source of `DPOptimizer.clip_and_accumulate` and of what it calls, which `_flat_sums` and
#: `ClippedNorms._clip_again` repeat: that of Opacus 1.6.
_REPEATED = "0898ad3580861f1e0dcefe39b68fbc983670d1745d3d5bd73770d8bec5cae133"
#: The dtypes in which gradients may be: norms of others are rounded.
_KINDS = frozenset((torch.float32, torch.float64))


class _SeenCalls(TorchFunctionMode):
    """Keeps the norms that are computed in a block, and the factors by which per-record gradients are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        self.factors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.norm:
            self.norms.append(result)
        elif func is torch.einsum and len(args) == 3:
            self.factors.append(args[1])
        return result


class ClippedNorms:
    """Reads the norms of a step's records while Opacus clips; what Opacus computes is not changed.

        flat:       ‖g‖, which Opacus clips to C        per layer:  √Σ min(‖g_l‖, C_l)²

    Both, clipped to C, are at least the norm that Opacus lets through, as its factor is C/(‖g‖ + 1e-6).

    Where Opacus's flat clipping is the one that is known here, its operations are repeated in place of it, once they
    have given a batch the same norms and sums, bit for bit. Otherwise the norms are seen as Opacus computes them.

    Args:
        optimizer: Opacus's optimizer.
        criterion: with ghost clipping, the criterion that make_private returned.

    Attributes:
        bound: the clip norm with which the present batch was clipped, C; None before.
    """

    def __init__(self, optimizer: DPOptimizer, criterion: Any) -> None:
        self.optimizer = optimizer
        self.bound: float | None = None
        self._ghost = GhostNorms(criterion) if isinstance(optimizer, DPOptimizerFastGradientClipping) else None
        self._parts: list[Tensor] = []
        self._trusted = self._repeats = False
        self._layers = isinstance(optimizer, DPPerLayerOptimizer)
        self._known = _clips_as_known(optimizer)
        name = "clip_and_accumulate" if self._ghost is None else "accumulate"
        self._name, self._original = name, getattr(optimizer, name)
        setattr(optimizer, name, self._clip)

    @property
    def half_done(self) -> bool:
        """Returns whether the optimizer has clipped a part of a batch, or waits for one."""
        return self.bound is not None or any(self.optimizer._step_skip_queue)

    def detach(self) -> None:
        """Makes the optimizer and the criterion what they were before."""
        vars(self.optimizer).pop(self._name, None)
        if self._ghost is not None:
            self._ghost.detach()

    def take(self) -> tuple[Tensor, float]:
        """Returns the norms of the batch that ends now, (B,), and the clip norm; refuses a changed clip.

        Norms are not clipped yet. That of a record whose gradient is not finite is not finite.
        """
        parts, bound = self._parts, self.bound
        self._parts, self.bound = [], None
        if bound is None:
            raise InputError("optimizer", "must clip before it adds noise", "no clipped gradients")
        if bound != clip_norm(self.optimizer):
            why = "must be, where noise is added, the clip norm of the step's gradients"
            raise InputError("max_grad_norm", f"{why}, {bound:g}", clip_norm(self.optimizer))
        if self._layers:
            check_layers(self.optimizer)
        if self._ghost is not None:
            check_covered(self.optimizer, self._ghost.module)
        return parts[0] if len(parts) == 1 else torch.cat(parts), bound

    def _clip(self) -> None:
        bound = self._one_bound(clip_norm(self.optimizer if self._ghost is None else self._ghost.module))
        if self._ghost is not None:
            norms = [self._ghost.take()]
            self._original()
        else:
            norms = self._read()
        self._parts.append(self._joined(norms) if self._layers else norms[0].detach())
        self.bound = bound

    def _clip_again(self) -> None:
        """Clips as Opacus does, by repeating its operations, after `_clip` has compared them with it."""
        optimizer = self.optimizer
        bound = self._one_bound(float(optimizer.max_grad_norm))
        params, samples = optimizer.params, []
        for p in params:
            found = getattr(p, "grad_sample", None)
            if type(found) is not Tensor or hasattr(found, "_processed"):
                opacus_optimizer._check_processed_flag(found)
                found = optimizer._get_flat_grad_sample(p)
            samples.append(found)
        _check_kinds(samples)
        norms, sums = _flat_sums(optimizer.max_grad_norm, params, samples)
        for p, total in zip(params, sums, strict=True):
            if p.summed_grad is None:
                p.summed_grad = total
            else:
                p.summed_grad += total
            opacus_optimizer._mark_as_processed(p.grad_sample)
        self._parts.append(norms.detach())
        self.bound = bound

    def _one_bound(self, bound: float) -> float:
        """Returns the clip norm of a part of a batch; refuses one that is not that of its earlier parts."""
        if self.bound is not None and bound != self.bound:
            raise InputError("max_grad_norm", f"must not change within a batch, from {self.bound:g}", bound)
        return bound

    def _read(self) -> list[Tensor]:
        """Clips by Opacus's method; returns the norms, of each record or of each layer of each record."""
        params = self.optimizer.params
        samples = [self.optimizer._get_flat_grad_sample(p) for p in params]
        _check_kinds(samples)
        compared = self._known and len(samples[0]) > 0 and all(p.summed_grad is None for p in params)
        mine = _flat_sums(self.optimizer.max_grad_norm, params, samples) if compared else None
        with _SeenCalls() as seen:
            self._original()
        found = self._norms_of(seen, samples)
        if mine is not None:
            self._known = False  # compared once
            theirs = (found[0], *(p.summed_grad for p in params))
            self._repeats = all(map(_same_bits, (mine[0], *mine[1]), theirs))
            if self._repeats and vars(self.optimizer).get(self._name) == self._clip:  # nobody has wrapped it since
                setattr(self.optimizer, self._name, self._clip_again)
        return found

    def _norms_of(self, seen: _SeenCalls, samples: list[Tensor]) -> list[Tensor]:
        """Returns the norms by which Opacus clipped: of each record, or of each layer of each record."""
        layers = self._layers
        if len(samples[0]) == 0:
            return [samples[0].new_zeros(0)]
        found = seen.norms if layers else seen.norms[-1:]
        bounds = self.optimizer.max_grad_norms if layers else [self.optimizer.max_grad_norm]
        if not self._trusted:  # another version of Opacus may clip otherwise
            self._trusted = len(found) == len(bounds) and len(seen.factors) == len(samples) and all(
                torch.equal((c / (n + _SMALL)).clamp(max=1.0).to(f.dtype), f)
                for n, c, f in zip(found, bounds, seen.factors, strict=False)
            )  # fmt: skip
        if self._trusted:
            return found
        own = [g.flatten(1).norm(dim=1).double() for g in samples]
        return own if layers else [torch.stack(own).norm(dim=0)]

    def _joined(self, norms: list[Tensor]) -> Tensor:
        """Returns the norm of each record from those of its layers; NaN where one is not finite."""
        if not len(norms[0]):
            return norms[0].detach().double()
        each = torch.stack([n.detach().double() for n in norms])
        bounds = torch.tensor(self.optimizer.max_grad_norms, dtype=each.dtype, device=each.device)
        return torch.where(each.isfinite().all(0), each.clamp(max=bounds.unsqueeze(1)).norm(dim=0), torch.nan)


def _clips_as_known(optimizer: DPOptimizer) -> bool:
    """Returns whether an optimizer clips by the code that is repeated here, not only in the batches seen so far."""
    kind, module = type(optimizer), opacus_optimizer
    if kind not in (DPOptimizer, DistributedDPOptimizer):
        return False
    flags = (module._check_processed_flag, module._check_processed_flag_tensor, module._mark_as_processed)
    return source_digest(kind.clip_and_accumulate, kind._get_flat_grad_sample, *flags) == _REPEATED


def _check_kinds(samples: list[Tensor]) -> None:
    """Refuses gradients in half precision."""
    if not _KINDS.issuperset(kinds := [g.dtype for g in samples]):
        why = "must have gradients in float32 or float64: others are clipped to norms that are rounded"
        raise InputError("model", why, ", ".join(map(str, {*kinds})))


def _flat_sums(bound: Any, params: list[Any], samples: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the norm of each record's gradient, (B,), and the clipped sum for each parameter, as Opacus rounds them.

    Args:
        bound: C.
        params: the optimizer's parameters.
        samples: the gradients of each record, of each parameter.
    """
    if len(samples[0]) == 0:
        norms = factors = torch.zeros((0,), device=samples[0].device)
    else:
        norm = torch.linalg.vector_norm
        each = [norm(g if g.dim() == 2 else g.reshape(g.shape[0], -1), 2, dim=-1) for g in samples]
        norms = norm(torch.stack(each, dim=1), 2, dim=1)
        if isinstance(bound, Tensor):
            factors = (bound / (norms + _SMALL)).clamp(max=1.0)
        else:  # what torch does for a number over a tensor, without tensors in between
            factors = norms.add(_SMALL).reciprocal_().mul_(bound).clamp_(max=1.0)
    sums = []
    for p, gradients in zip(params, samples, strict=True):
        if gradients.dtype is not p.dtype:
            gradients = gradients.to(p.dtype)
        own = factors if factors.dtype is p.dtype else factors.to(p.dtype)
        sums.append(_VF.einsum("i,i...", (own, gradients)))  # type: ignore[attr-defined]  # what torch.einsum calls
    return norms, sums


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def clip_norm(clips: Any) -> float:
    """Returns C: of an optimizer, to which its noise is scaled; of a module for ghost clipping, to which it clips."""
    return float(clips.max_grad_norm)


#: Optimizers of Opacus that are not watched, and why.
_REFUSED: dict[str, str] = {
    "AdaClipDPOptimizer": "adaptive clipping divides the noisy count by the true size of the batch, which no noise "
    "covers: the clip norm tells it",
    "FSDPOptimizerFastGradientClipping": "each rank draws the noise of its own piece of the parameters: two ranks with "
    "the same seed give two pieces the same noise, and no rank sees the whole of what is released",
}
#: Those that train on several ranks of torch.distributed: each clips its own records, and rank 0 adds the noise.
DISTRIBUTED = (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)


def check_optimizer(optimizer: Any, criterion: Any) -> None:
    """Refuses an optimizer whose clipped gradients are not known here, with the reason.

    Args:
        optimizer: as it was given.
        criterion: what the loss is computed with.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, DPOptimizer):
        raise InputError("optimizer", "must be the optimizer that make_private returned", f"a {kind}")
    if kind in _REFUSED:
        raise InputError("optimizer", f"cannot be accounted for ({_REFUSED[kind]})", kind)
    if type(optimizer) not in (DPOptimizer, DPPerLayerOptimizer, DPOptimizerFastGradientClipping, *DISTRIBUTED):
        raise InputError("optimizer", "must be of Opacus's own class: another may clip otherwise", kind)
    if not {"clip_and_accumulate", "accumulate", "add_noise"}.isdisjoint(vars(optimizer)):
        raise InputError("optimizer", "must not be watched already: finish the first ledger", "a watched optimizer")
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        check_criterion(optimizer, criterion)
    if isinstance(optimizer, DPPerLayerOptimizer):
        check_layers(optimizer)


def check_layers(optimizer: DPPerLayerOptimizer) -> None:
    """Refuses clip norms of layers that the noise is not scaled to."""
    total = float(torch.tensor(optimizer.max_grad_norms, dtype=torch.float64).norm())
    if abs(total - clip_norm(optimizer)) > 1e-6 * total:
        why = f"must be the L2 norm of the layers' clip norms, {total:g}, which a scheduler does not change"
        raise InputError("max_grad_norm", why, clip_norm(optimizer))
