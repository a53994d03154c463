"""Models that Opacus has wrapped: its hooks are removed while a step is measured, and then restored. Its sources."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from torch import nn

from reconbound._internal.checks import InputError

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """Removes, for the block, the hooks by which Opacus keeps per-record gradients.

    They would keep those of our passes too, and fail on second derivatives.

    Args:
        model: the wrapper, the network inside, or the network as it was before. Nothing is done with what is no model:
            whoever uses it reports the error.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    if type(model).__name__ == "GradSampleModuleExpandedWeights":
        raise InputError(
            "model",
            "must be the network itself, model._module, not Opacus's wrapper for grad_sample_mode='ew'",
            f"a {type(model).__name__}",
        )
    taken = [
        (hooks, list(hooks.items()))
        for module in model.modules()
        for hooks in (module._forward_hooks, module._backward_hooks)
        if any(map(by_opacus, hooks.values()))
    ]
    try:
        for hooks, items in taken:
            for key, hook in items:
                if by_opacus(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, items in taken:  # the same dictionaries, because the hooks' handles point to them
            hooks.clear()
            hooks.update(items)


def unhooked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function whose first argument, a model, is passed on without Opacus's hooks."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        model: Any = args[0] if args else kwargs.get("model")
        with without_hooks(model):
            return function(*args, **kwargs)

    return called


def network(model: nn.Module) -> nn.Module:
    """Returns the network that one of Opacus's own modules is around; any other model as it is."""
    wraps = any(kind.__module__.startswith("opacus.grad_sample") for kind in type(model).__mro__)
    inner = getattr(model, "_module", None) if wraps else None
    return inner if isinstance(inner, nn.Module) else model


def by_opacus(hook: Any) -> bool:
    """Returns whether a hook is one of Opacus's own."""
    owner = getattr(getattr(hook, "func", hook), "__self__", None)  # a method, or a partial of one
    return any(kind.__module__.startswith("opacus.") for kind in type(owner).__mro__)


def source_digest(*functions: Callable[..., Any]) -> str:
    """Returns the SHA-256 of the source of some functions, in hexadecimal digits; empty where it cannot be read."""
    try:
        return hashlib.sha256("".join(map(inspect.getsource, functions)).encode()).hexdigest()
    except (OSError, TypeError):
        return ""
