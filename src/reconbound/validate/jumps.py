"""Jumps: places where a record's loss changes at once, which no derivative shows.

There are three independent searches. `check_events` uses the operations: a comparison, an integer or a step of the
private part that reaches the loss is followed to a point where it changes, and the losses just before and just after
are compared. `check_gaps` uses the numbers: between far points the loss must change by the integral of its derivative;
where it does not, the interval is halved until only a jump, or nothing, is left. Both compute in float64 where the
model runs in it. `check_rounding` looks for steps that are there in the model's own precision only.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconbound._internal.rng import random_states_kept
from reconbound.validate.derivatives import Placed, along, drawn_like, place_precisely
from reconbound.validate.flow import COMPARISONS, Event, observe
from reconbound.validate.model import ModelError, label
from reconbound.validate.private import Private
from reconbound.validate.watch import LossFn, Trace, Watch

_SAME = 1e-6  # change of the loss across a jump, relative to its size, that counts as none (float64)
_PANELS = 6
_SUSPECT = 0.02  # of the loss's whole variation along a segment
_STEPS = "steps computed by NumPy, .item(), if-statements on values of the records, or operations of your own"
_BACKWARD = "backward passes written by hand"
#: The largest difference of a loss from that in float64, relative to the largest loss, that may be rounding.
_ROUNDED = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_FEW = 8  # jumping operations that are followed along two segments; more of them along one
_LOOKED: WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]] = WeakKeyDictionary()  # loss and private part


def check_events(placed: Placed) -> dict[str, str]:
    """Refuses jumps that operations of the model or the loss show.

    Args:
        placed: a few records, in the precision to compute in.

    Returns:
        The kinks: a name of an operation for each module that performs one. A jump of an operation that leaves the
        loss continuous counts as a kink.

    Raises:
        ModelError: the loss jumps with the private part; it names the module and the operation.
    """
    here, losses = observe(placed)
    if not any(event.reaches for event in here):
        return {}
    moves = placed.moves()
    ends = [observe(placed, v, 1.0)[0] for v in moves]
    found = [(i, e) for i, e in enumerate(here) if e.reaches and _depends(i, e, ends)]
    jumps = [(i, e) for i, e in found if e.part is not None]
    for i, event in jumps:
        flips = [k for k, end in enumerate(ends) if not _alike(i, event, end)][: 2 if len(jumps) <= _FEW else 1]
        unseen = not flips and event.name not in COMPARISONS and placed.z
        if unseen or any(_jumps(placed, moves[k], i, event, losses) for k in flips):
            raise ModelError(
                f"{label(placed.model, event.path)} uses {event.name}, which is not differentiable: it is flat between "
                "jumps, its derivative says nothing of what it reveals. Replace it by a smooth function, or apply it "
                "to the data beforehand"
            )
    kinks: dict[str, str] = {}
    for _, event in found:
        kinks.setdefault(event.path, event.name)
    return kinks


def check_jumps_once(model: nn.Module, loss_fn: LossFn, few: Any, private: Private) -> None:
    """Refuses a model or loss that jumps; searches once for each model, loss and private part.

    An error that the few records raise when run is ignored here: the caller's own run of all of them raises it.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of the few records.
        private: what is private.
    """
    shapes = [x.shape[1:] for x in tree_leaves(few) if isinstance(x, Tensor) and x.dim()]
    key = (private.part, private.name, shapes)
    done = _LOOKED.setdefault(model, [])
    if any(known is loss_fn and other == key for known, other in done):
        return
    autocast = partial(torch.autocast, enabled=False)  # its rounding is not the model's own
    with torch.enable_grad(), random_states_kept(), autocast("cpu"), autocast("cuda"):
        try:
            placed = place_precisely(model, loss_fn, few, private)
            check_events(placed)
            check_gaps(placed, smooth=False)
            check_rounding(placed, few)
        except ModelError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError):
            return
    done.append((loss_fn, key))


def _depends(i: int, event: Event, ends: list[list[Event]]) -> bool:
    """Returns whether the operation's arguments change with the private part; True where it cannot be moved."""
    others = [end[i] for end in ends if _matches(i, event, end)]
    if len(others) < len(ends) or not others:
        return True
    return any(not _equal(a, b) for other in others for a, b in zip(event.given, other.given, strict=True))


def _matches(i: int, event: Event, run: list[Event]) -> bool:
    return i < len(run) and (run[i].name, run[i].path, len(run[i].given)) == (event.name, event.path, len(event.given))


def _alike(i: int, event: Event, run: list[Event]) -> bool:
    """Returns whether a jumping operation gave the same in another run; a run without it took another path."""
    other = run[i].part if _matches(i, event, run) else None
    return other is not None and event.part is not None and _equal(event.part, other)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _jumps(placed: Placed, v: list[Tensor], i: int, event: Event, at_start: Tensor) -> bool:
    """Returns whether the losses differ on the two sides of the point where the operation's result changes."""
    low, high, before = 0.0, 1.0, at_start
    run, after = observe(placed, v, 1.0)
    exact = at_start.dtype == torch.float64
    allowed = (_SAME if exact else 1e-3) * (at_start.abs() + 1e-3)
    for _ in range(36 if exact else 20):
        if bool(((after - before).abs() <= allowed).all()):
            return False
        middle = (low + high) / 2
        run, losses = observe(placed, v, middle)
        if _alike(i, event, run):
            low, before = middle, losses
        else:
            high, after = middle, losses
    return bool(((after - before).abs() > allowed).any())


def check_gaps(placed: Placed, *, smooth: bool) -> None:
    """Refuses jumps of the loss, and of a smooth model's gradient, that no operation shows.

    Args:
        placed: a few records, in the precision to compute in.
        smooth: no kinks are known; the gradient, which jumps at every kink, is then searched as well.

    Raises:
        ModelError: the loss or its gradient jumps with the private part.
    """
    generator, params = torch.Generator().manual_seed(3), list(placed.params.values())
    weights = [drawn_like(p, generator) for p in params]
    for k, v in enumerate(placed.moves()[:2]):
        for what, own, cause in (("loss", None, _STEPS), ("gradient", weights, _BACKWARD)):
            if (own is None or (smooth and k == 1)) and _has_gap(placed, v, own):
                raise ModelError(
                    f"the {what} of {type(placed.model).__name__} jumps with the private part, where its derivative "
                    f"shows nothing: information would be missed. Look for {cause}"
                )


def check_rounding(placed: Placed, few: Any) -> None:
    """Refuses losses that rounding decides: steps in the model's precision that are not there in float64.

    x − ((x + 1.5 · 2²³) − 1.5 · 2²³), for one, is 0 in float64 and the distance to a whole number in float32.

    Args:
        placed: a few records; nothing is compared unless they are in float64.
        few: the same records as they were given.

    Raises:
        ModelError: the losses, at the records or away from them, are other ones than in float64.
    """
    if placed.dtype != torch.float64:
        return
    given = (placed.model, placed.loss_fn, few, placed.private)
    own, wide = (Placed(*given, dtype=dtype) for dtype in (None, torch.float64))
    computed = Trace()
    found, exact = [], []
    for v in [[torch.zeros_like(x) for x in wide.z], *wide.moves()]:
        z = [(x + d).to(other) for x, d, other in zip(wide.z, v, own.z, strict=True)]
        with Watch(computed):
            found.append(own.losses(z).detach().double())
        exact.append(wide.losses([x.double() for x in z]).detach())
    rough = computed.dtypes & set(_ROUNDED)
    losses, others = torch.stack(exact), torch.stack(found)
    finite = torch.isfinite(losses) & torch.isfinite(others)  # far from the records float16 overflows
    if not rough or not bool(finite.any()):
        return
    off = float((others - losses)[finite].abs().max() / losses[finite].abs().max().clamp(min=1e-300))
    if off > max(_ROUNDED[dtype] for dtype in rough):
        kind = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in rough))
        raise ModelError(
            f"the loss of {type(placed.model).__name__} differs by {off:.1%} from the one in float64: in {kind} "
            "rounding decides over it, and no derivative shows what that reveals. Use float64, or scale what is large"
        )


def _has_gap(placed: Placed, v: list[Tensor], weights: list[Tensor] | None) -> bool:
    """Returns whether the losses jump along a segment, or the component of their gradient along the weights.

    With the value f and the slope f' at both ends of an interval of length h, f(b) − f(a) − h (f'(a) + f'(b))/2 is
    of order h³ where f is smooth, of order h at a kink, and J at a jump of size J. The halves with the larger gap are
    followed; what is left when they have no length is a jump.
    """
    params = list(placed.params.values())
    look = partial(along, lambda z: (placed.losses(z), params), placed.z, v, weights=weights)
    seen = torch.stack([look(torch.full((1,), k / _PANELS, dtype=torch.float64)) for k in range(_PANELS + 1)])
    values, slopes = seen.unbind(1)
    change, integral = values.diff(dim=0), (slopes[1:] + slopes[:-1]) / (2 * _PANELS)
    if not bool(torch.isfinite(seen).all()):
        return False
    scale = change.abs().sum(0) + integral.abs().sum(0)
    rounding = 1e-9 if placed.z[0].dtype == torch.float64 else 1e-4
    least = _SUSPECT * scale + rounding * values.abs().amax(0)
    if values.shape[1] == len(placed.z[0]):  # losses: one near 0 has the rounding of the outputs
        least += 64 * torch.finfo(placed.z[0].dtype).eps * placed.largest_output
    worst = (change - integral).abs().argmax(0)
    if bool(((change - integral).abs().amax(0) <= least).all()):
        return False
    pick = torch.arange(values.shape[1])
    low, high = worst.double() / _PANELS, (worst + 1).double() / _PANELS
    at_low, at_high = seen[worst, :, pick].T, seen[worst + 1, :, pick].T
    for _ in range(36 if placed.z[0].dtype == torch.float64 else 16):
        middle = (low + high) / 2
        at_middle = look(middle)
        first = _gap(at_low, at_middle, (high - low) / 2)
        second = _gap(at_middle, at_high, (high - low) / 2)
        if not bool((torch.maximum(first, second) > least / 2).any()):
            return False
        left = first >= second
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
        at_low, at_high = torch.where(left, at_low, at_middle), torch.where(left, at_middle, at_high)
    return bool((_gap(at_low, at_high, high - low) > least / 2).any())


def _gap(at_low: Tensor, at_high: Tensor, width: Tensor) -> Tensor:
    gap = (at_high[0] - at_low[0] - width * (at_low[1] + at_high[1]) / 2).abs()
    return torch.nan_to_num(gap, 0.0, 0.0, 0.0)
