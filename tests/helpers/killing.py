"""Processes that a test starts and kills: forked from a server that has loaded `preloaded` and computed nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any


def start(target: Callable[..., None], *args: Any, daemon: bool = True) -> Any:
    """Starts a process. Only one that is no daemon may start others, as the workers of a DataLoader."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def start_reporting(target: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    """The process, once it has sent "ready" through the pipe that is its last argument, and our end of the pipe."""
    ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    process = start(target, *args, theirs)
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == "ready"
    return process, ours


def kill(process: Any) -> None:
    assert process.is_alive(), "it ended before its kill: make it longer"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
