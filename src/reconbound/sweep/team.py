"""Several workers on one machine: one that dies is replaced, and its trials go to the others at once."""

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
_RAISED = 3  # this many workers of a machine may end by their own error
_STOPPED = 75  # the exit status of a worker that the environment stopped: it has reported the reason to its parent


def _child(job: Callable[[str, Callable[[], bool]], Any], owner: str, reasons: Any) -> None:
    """Runs a worker in its own process. It ends, after its present trial, when the process that started it is gone."""
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
    """Delays Ctrl-C, so that a process that starts in the meantime is registered here and can be told to end."""
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
    """Starts the process from which workers are forked. It ignores Ctrl-C, and so do they: the parent ends them."""
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
    """Keeps n workers running until every trial is finished.

    Args:
        store: the sweep's storage.
        workers: the number of workers.
        job: the work of a worker, called with its name and a function that says when to stop; it is sent to its
            process.
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
                patiently(partial(store.expire, owner))  # so that nobody waits until its lease ends
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
