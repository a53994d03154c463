"""What many tests compute alike is computed once in a process, and pages carry a short script in place of plotly's."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

#: In pages in place of plotly's script of 4.7 MB, which each page would hash, write and copy.
SHORT_SCRIPT = "window.Plotly = undefined; // the tests in a browser, of reports and of the docs have plotly itself"


def remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which keeps what it returned for arguments that are equal and are written alike.

    Tensors and arguments without a hash, other than arrays, are computed anew; errors too.

    Args:
        function: a pure one, whose results nobody changes; arrays are copied.
    """
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        own = [*given, *sorted(options.items())]
        try:
            key = tuple(_key(one) for one in own)
            hash(key)
        except TypeError:
            return function(*given, **options)
        if key not in known:
            known[key] = function(*given, **options)
        found = known[key]
        return found.copy() if isinstance(found, np.ndarray) else found

    return call


def _key(one: Any) -> Any:
    if isinstance(one, torch.Tensor) or (isinstance(one, np.ndarray) and one.dtype.hasobject):
        raise TypeError  # hash and bytes do not tell what is in it
    return (one.shape, one.dtype.str, one.tobytes()) if isinstance(one, np.ndarray) else (one, repr(one))


@contextlib.contextmanager
def replaced_everywhere(own: Any, other: Any) -> Iterator[None]:
    """Puts `other` in place of `own` in all modules of the package, and afterwards also in those imported meanwhile."""
    _replace(own, other)
    try:
        yield
    finally:
        _replace(other, own)


def _replace(one: Any, other: Any) -> None:
    for title, module in list(sys.modules.items()):
        if title.startswith("reconbound"):
            for name in [name for name, value in vars(module).items() if value is one]:
                setattr(module, name, other)


def short_script() -> contextlib.AbstractContextManager[Any]:
    """Puts SHORT_SCRIPT in place of plotly's script."""
    return mock.patch("plotly.offline.get_plotlyjs", return_value=SHORT_SCRIPT)


def one_target() -> contextlib.AbstractContextManager[Any]:
    """Leaves the first of the floors for which a page says how much noise they need."""
    from reconbound.report import text

    return mock.patch.object(text, "TARGETS", text.TARGETS[:1])
