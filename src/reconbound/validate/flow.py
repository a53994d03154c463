"""The path of the private part: which kinks and jumps it passes through on its way to the loss.

Every operation of a run is seen. A memory block is marked once something of the private part has been written to it;
whatever is computed from marked memory is marked, through views, detach(), in-place changes and integers. Each kink and
each jump has a mark of its own, and counts where its mark arrives at the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reconbound.validate.derivatives import Placed
from reconbound.validate.model import OPERATIONS
from reconbound.validate.watch import Trace, recorded_calls

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


class _Flow(TorchDispatchMode):
    def __init__(self, trace: Trace, sources: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.events: list[Event] = []
        self.marks: dict[int, set[int]] = {}
        self.alive: list[Tensor] = []  # so that no memory block is used again for something else
        for source in sources:
            self._mark(source, {_PRIVATE})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marks: set[int] = set()
        for x in given:
            marks |= self._passed_on(x)
        output = func(*args, **kwargs)
        if _PRIVATE not in marks:
            return output
        name = func._overloadpacket.__name__.removesuffix("_")
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        own: dict[int, set[int]] = {}
        floats = [x for x in given if x.is_floating_point() and _PRIVATE in self.of(x)]
        if floats:
            for x, part in flat_parts(name, args, kwargs, output):
                what = f"a cast to {x.dtype}" if name == "_to_copy" else name
                own.setdefault(id(x), set()).add(self._note(what, part.detach().clone(), floats))
            if is_kinked(name, args, kwargs):
                number = self._note(name, None, floats)
                for x in outputs:
                    if x.is_floating_point():
                        own.setdefault(id(x), set()).add(number)
        for x in (*outputs, *_written(func, args, kwargs)):
            self._mark(x, marks | own.get(id(x), set()))
        return output

    def of(self, x: Tensor) -> set[int]:
        """Returns the marks of a tensor's memory."""
        return self.marks.get(x.untyped_storage()._cdata, set())

    def _passed_on(self, x: Tensor) -> set[int]:
        """Returns the marks that results of x take over.

        A kink counts along paths with derivatives. For detached paths the differences of the gradient show whether they
        matter.
        """
        marks = self.of(x)
        if x.requires_grad:
            return marks
        return {m for m in marks if m == _PRIVATE or self.events[m - 1].part is not None}

    def _mark(self, x: Tensor, marks: set[int]) -> None:
        self.alive.append(x)
        self.marks[x.untyped_storage()._cdata] = self.of(x) | marks

    def _note(self, name: str, part: Tensor | None, given: list[Tensor]) -> int:
        self.events.append(Event(name, self.trace.here, part, [x.detach().clone() for x in given]))
        return len(self.events)


def observe(placed: Placed, z: list[Tensor], model: nn.Module) -> tuple[list[Event], Tensor]:
    """Returns the kinks and jumps that the private part meets in a run, and the losses.

    Args:
        placed: the records.
        z: their private part.
        model: whose modules the events are named by.
    """
    trace = Trace()
    z = [x.detach().clone().requires_grad_() for x in z]
    sources = z or [x for x in tree_leaves(placed.inputs) if isinstance(x, Tensor)]
    flow = _Flow(trace, sources)
    with torch.enable_grad(), recorded_calls(model, trace), flow:
        losses = placed.losses(z)
    for number in flow.of(losses) - {_PRIVATE}:
        flow.events[number - 1].reaches = True
    return flow.events, losses.detach()


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
    if _is_about_infinity(name, args):
        return []
    if name in _FLAT or (name == "div" and kwargs.get("rounding_mode") is not None):
        return [(x, x) for x in outputs]
    part = _jumping_part(name, args, kwargs)
    if part is not None:
        return [(outputs[0], part)]
    return [(x, x) for x in outputs if not x.is_floating_point() and not x.is_complex()]


def _jumping_part(name: str, args: Any, kwargs: Any) -> Tensor | None:
    x = args[0] if args else None
    if not isinstance(x, Tensor):
        return None
    x = x.detach()
    other = args[1] if len(args) > 1 else kwargs.get("lambd", 0.5)  # hardshrink's own; the others have no default
    other = other.detach() if isinstance(other, Tensor) else other
    parts: dict[str, Callable[[], Tensor]] = {
        "frac": x.trunc,
        "remainder": lambda: (x / other).floor(),
        "fmod": lambda: (x / other).trunc(),
        "hardshrink": lambda: torch.gt(x.abs(), other),
        "threshold": lambda: torch.gt(x, other),
    }
    return parts[name]() if name in parts else None


def _is_about_infinity(name: str, args: Any) -> bool:
    """Returns whether the operation tests for infinite values or NaN, which never changes for finite values."""
    if name in ("isnan", "isinf", "isposinf", "isneginf"):
        return True
    if name not in COMPARISONS or len(args) < 2:
        return False
    first, second = args[:2]
    if isinstance(second, Tensor) and second.dim() == 0 and second.device.type == "cpu" and second.is_floating_point():
        second = float(second)
    return first is second or (isinstance(second, float) and not math.isfinite(second))
