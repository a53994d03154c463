"""A limit on the time that a call may take."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Late(BaseException):
    """It passes through `except Exception`."""


@contextmanager
def time_limit(seconds: int, about: object) -> Iterator[None]:
    """Fails where what is inside takes longer.

    Args:
        seconds: the limit.
        about: what is tried, for the message.
    """

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    except Late:
        raise AssertionError(("it hangs", about)) from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
