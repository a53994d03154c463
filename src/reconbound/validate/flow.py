"""The path of the private part: which kinks and jumps it passes through on its way to the loss.

Every operation of a run is seen. A memory block is marked once something of the private part has been written to it;
whatever is computed from marked memory is marked, through views, detach(), in-place changes and integers. Each kink and
each jump has a mark of its own, and counts where its mark arrives at the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reconbound.validate.derivatives import Placed
from reconbound.validate.model import OPERATIONS
from reconbound.validate.watch import Trace, Watch, recorded_calls

_PRIVATE = 0  # the mark of the private part; events have those from 1 on


@dataclass
class Event:
    """A kink or a jump that the private part passes through.

    Attributes:
        name: the operation.
        path: the module that performs it.
        part: for a jump, the values that are flat between jumps; None for a kink.
        given: the floating-point arguments, to see whether they change with the private part.
        reaches: whether the loss depends on the result.
    """

    name: str
    path: str
    part: Tensor | None
    given: list[Tensor]
    reaches: bool = False


@dataclass
class _Marked(Trace):
    """A watched run with the marks of each memory block, and what they stand for: `events[m - 1]` has the mark m."""

    events: list[Event] = field(default_factory=list)
    marks: dict[int, set[int]] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # so that no memory block is used again for something else

    def of(self, x: Tensor) -> set[int]:
        """Returns the marks of a tensor's memory."""
        return self.marks.get(x.untyped_storage()._cdata, set())

    def add(self, x: Tensor, marks: set[int]) -> None:
        """Marks a tensor's memory."""
        self.alive.append(x)
        self.marks[x.untyped_storage()._cdata] = self.of(x) | marks


class _Flow(Watch):
    """A mode that marks whatever is computed from marked memory."""

    trace: _Marked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, trace = kwargs or {}, self.trace
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marks: set[int] = set()
        for x in given:  # a kink counts along paths with derivatives: `check_differences` shows what detached ones hide
            own = trace.of(x)
            marks |= {m for m in own if x.requires_grad or m == _PRIVATE or trace.events[m - 1].part is not None}
        output = func(*args, **kwargs)
        if _PRIVATE not in marks:
            return output
        name = func._overloadpacket.__name__.removesuffix("_")
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        floats = [x for x in given if x.is_floating_point() and _PRIVATE in trace.of(x)]
        events: list[tuple[str, Tensor | None, list[Tensor]]] = []  # what, the part that jumps, the outputs
        if floats:
            for x, part in flat_parts(name, args, kwargs, output):
                events.append((f"a cast to {x.dtype}" if name == "_to_copy" else name, part.detach().clone(), [x]))
            if is_kinked(name, args, kwargs):
                events.append((name, None, [x for x in outputs if x.is_floating_point()]))
        added: dict[int, set[int]] = {}
        for what, jumping, changed in events:
            trace.events.append(Event(what, trace.stack[-1], jumping, [x.detach().clone() for x in floats]))
            for x in changed:
                added.setdefault(id(x), set()).add(len(trace.events))
        for x in (*outputs, *_written(func, args, kwargs)):
            trace.add(x, marks | added.get(id(x), set()))
        return output


def observe(placed: Placed, v: list[Tensor] | None = None, t: float = 0.0) -> tuple[list[Event], Tensor]:
    """Returns the kinks and jumps that the private part meets in a run, and the losses.

    Args:
        placed: the records.
        v: a direction of their private part.
        t: how far it is moved in this direction.
    """
    trace = _Marked()
    moved = placed.z if v is None else [x + t * d for x, d in zip(placed.z, v, strict=True)]
    z = [x.detach().clone().requires_grad_() for x in moved]
    for source in z or [x for x in tree_leaves(placed.inputs) if isinstance(x, Tensor)]:
        trace.add(source, {_PRIVATE})
    with torch.enable_grad(), recorded_calls(placed.model, trace), _Flow(trace):
        losses = placed.losses(z)
    for number in trace.of(losses) - {_PRIVATE}:
        trace.events[number - 1].reaches = True
    return trace.events, losses.detach()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the arguments that an operation changes."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


_KINKED, _FLAT, COMPARISONS = (frozenset(OPERATIONS[name]) for name in ("kinked", "flat", "comparisons"))
#: Of operations that jump and are not flat between jumps: what jumps, computed from the arguments.
_PARTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "frac": lambda x, other: x.trunc(),
    "remainder": lambda x, other: (x / other).floor(),
    "fmod": lambda x, other: (x / other).trunc(),
    "hardshrink": lambda x, other: torch.gt(x.abs(), other),
    "threshold": lambda x, other: torch.gt(x, other),
}
_OF_INFINITIES = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
_NORMS = frozenset({"linalg_vector_norm", "norm", "dist", "cdist", "_cdist_forward"})


def is_kinked(name: str, args: Any, kwargs: Any) -> bool:
    """Returns whether the operation's derivative jumps somewhere.

    ELU and its kin, the Huber and the smooth L1 loss have a continuous first derivative, so that the gradient that is
    released does not jump; an ELU only where alpha times the input scale is 1.

    Args:
        name: the operation's name in PyTorch, without the underscore of in-place ones.
        args: its positional arguments.
        kwargs: its named arguments.
    """
    if name in _KINKED:
        return True
    if name == "elu":
        alpha, input_scale = (args[i] if len(args) > i else 1 for i in (1, 3))
        return not math.isclose(alpha * input_scale, 1.0)
    if name in _NORMS:
        order = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and not isinstance(x, bool)][:1]
        return bool(order) and (math.isinf(order[0]) or order[0] <= 1)
    return False


def flat_parts(name: str, args: Any, kwargs: Any, output: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns the parts of an operation's output that are flat between jumps.

    Args:
        name: the operation's name in PyTorch, without the underscore of in-place ones.
        args: its positional arguments.
        kwargs: its named arguments.
        output: what it returned for floating-point arguments.

    Returns:
        Pairs of an output tensor that has jumps and the values whose changes are the jumps: itself, for a remainder
        the quotient, for a shrinkage whether the value is kept.
    """
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    if name in _FLAT or (name == "div" and kwargs.get("rounding_mode") is not None):
        return [(x, x) for x in outputs]
    if name in _PARTS and args and isinstance(args[0], Tensor):
        x = args[0].detach()
        other = args[1] if len(args) > 1 else kwargs.get("lambd", 0.5)  # hardshrink's own; the others have no default
        return [(outputs[0], _PARTS[name](x, other.detach() if isinstance(other, Tensor) else other))]
    constant = name in _OF_INFINITIES  # the same for all finite values
    if name in COMPARISONS and len(args) > 1:
        first, second = args[:2]
        number = isinstance(second, Tensor) and second.dim() == 0 and second.is_floating_point()
        if number and second.device.type == "cpu":
            second = float(second)
        constant = first is second or (isinstance(second, float) and not math.isfinite(second))
    return [] if constant else [(x, x) for x in outputs if not x.is_floating_point() and not x.is_complex()]
