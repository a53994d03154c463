"""Several workers on one machine: one that dies is replaced, and what it held goes to the others at once."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from reconbound.sweep.faults import SweepError, SweepStopped, patiently
from reconbound.sweep.store import Store
from reconbound.sweep.worker import owner_name

#: What a worker needs, loaded once for all of them; the last three are what Optuna's storage loads when it is made.
PRELOAD = (
    "reconbound.sweep.trial",
    "reconbound.sweep.run",
    "alembic.command",
    "alembic.migration",
    "optuna.storages._rdb.models",
)
_RAISED = 3  # so many workers of a machine may end by an error of their own
_STOPPED = 75  # the exit status of one that the environment stopped: it has said why to the process that began it


def _child(job: Callable[[str, Callable[[], bool]], Any], owner: str, reasons: Any) -> None:
    """A worker in a process of its own; it ends, after the trial at hand, when the process that began it is gone."""
    signal.signal(signal.SIGTERM, _interrupted)
    parent = multiprocessing.parent_process()
    try:
        job(owner, lambda: parent is not None and not parent.is_alive())
    except KeyboardInterrupt:
        pass
    except SweepStopped as reason:
        reasons.put(str(reason))
        sys.exit(_STOPPED)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: a process that starts meanwhile is known here, and does not hear it (it is told to end)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _start_server() -> None:
    """The process that workers are forked from. Started deaf to Ctrl-C, and so are they: the parent ends them."""
    from multiprocessing import forkserver

    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def supervise(store: Store, workers: int, job: Callable[[str, Callable[[], bool]], Any]) -> None:
    """Keep so many workers going until every trial is finished.

    Args:
        job: what a worker does, called with its name and a function that says when to stop; it is sent to its process.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(PRELOAD))
        _start_server()
    going: dict[str, Any] = {}
    raised, reasons = 0, context.SimpleQueue()
    try:
        while True:
            for owner, process in list(going.items()):
                if process.is_alive():
                    continue
                del going[owner]
                patiently(partial(store.expire, owner))  # so that nobody waits for its lease to run out
                if process.exitcode == _STOPPED and not reasons.empty():
                    raise SweepStopped(reasons.get())
                raised += process.exitcode > 0
            left = sum(not trial.state.is_finished() for trial in patiently(store.trials))
            if left == 0:
                break
            if raised > _RAISED:
                raise SweepError(f"{raised} workers ended by an error, which they wrote to standard error")
            for _ in range(min(workers, left) - len(going)):
                owner = owner_name()
                process = context.Process(target=_child, args=(job, owner, reasons), daemon=True)
                with _uninterrupted():
                    process.start()
                    going[owner] = process
            time.sleep(0.2)
        for process in going.values():
            process.join(30)
    finally:
        for process in going.values():
            if process.is_alive():
                process.terminate()
        for process in going.values():
            process.join(30)
