"""The workers of a sweep: what each does, how several run on one machine, and how far they are."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_duration, progress_bar
from reconbound.sweep import database
from reconbound.sweep.queue import Claim, Exploded, Heartbeats, Queue, Slot, TrialLost
from reconbound.sweep.space import PARAMETERS, Row, Setting, format_setting
from reconbound.sweep.trial import trial_folder
from reconbound.training.checkpoint import CheckpointError

#: What a worker needs, loaded once for all of them; the last three are what Optuna's storage loads when it is made.
PRELOAD = (
    "reconbound.sweep.trial",
    "reconbound.sweep.run",
    "alembic.command",
    "alembic.migration",
    "optuna.storages._rdb.models",
)
_MOST_ERRORS = 3  # this many workers of a machine may end by their own error
_STOPPED = 75  # the exit status of a worker that the environment stopped: it has reported the reason to its parent


def owner_name() -> str:
    """Returns a name for this worker that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


# --- one worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The work of a sweep.

    Attributes:
        choose: a claim → the same with its setting, which a search chooses.
        train: (settings, folders, report) → for each setting its rows or the exception that it ended by. Called again
            with the same folders after a kill it must give the same rows.
        values: a setting's rows → the numbers that a search maximises.
        out: the sweep's folder.
        together: the number of settings that are trained at once.
    """

    choose: Callable[[Claim], Claim]
    train: Callable[[Sequence[Setting], Sequence[Path], Callable[[Sequence[int], int], None]], Sequence[Any]]
    values: Callable[[Sequence[Row]], Sequence[float]]
    out: Path
    together: int


def work(queue: Queue, job: Job, owner: str, stop: Callable[[], bool] = lambda: False) -> int:
    """Works on the sweep until every setting is over.

    Args:
        queue: the sweep's queue.
        job: what to do.
        owner: this worker's name.
        stop: asked between trials.

    Returns:
        The number of trials that this worker finished.
    """
    finished, patience, released = 0, database.Patience(), True
    try:
        while not stop():
            released = released or _release_quietly(queue, owner, "after a fault")
            claim = partial(database.retry_database, partial(queue.claim, owner))
            claims = list(islice(iter(claim, None), job.together))
            if claims:
                try:
                    finished += _attempt(queue, job, claims)
                    patience.end()
                except database.EnvironmentFault as fault:
                    released = _release_quietly(queue, owner, str(fault))
                    patience.wait(fault, str(fault))
            elif all(slot.is_over for slot in database.retry_database(queue.slots)):
                break
            elif not database.retry_database(queue.recover):
                time.sleep(min(1.0, queue.grace / 4))  # others have the remaining trials; one of them may die
    except BaseException:  # stopped from outside: the others need not wait for the grace period
        _release_quietly(queue, owner, "interrupted")
        raise
    return finished


def _release_quietly(queue: Queue, owner: str, why: str) -> bool:
    """Releases a worker's trials. Returns False if the database is out of reach: they become stale by themselves."""
    try:
        queue.release_owner(owner, why)
    except Exception:
        return False
    return True


def _attempt(queue: Queue, job: Job, claims: list[Claim]) -> int:
    """Trains the settings of these trials. Returns the number of trials that it finished."""
    found: Sequence[Any]
    try:
        with Heartbeats(queue, claims) as beats:
            claims = [database.retry_database(partial(job.choose, claim)) for claim in claims]
            folders = [trial_folder(job.out, claim.slot) for claim in claims]
            found = job.train([claim.setting or {} for claim in claims], folders, beats.report)
    except TrialLost:
        return 0
    except database.SweepStopped:
        raise
    except Exception as reason:
        found = [reason] * len(claims)
    return sum(_settle(queue, job, claim, rows) for claim, rows in zip(claims, found, strict=True))


def _settle(queue: Queue, job: Job, claim: Claim, rows: list[Row] | Exception) -> bool:
    """Stores one trial's rows, or its error, and returns whether that finished it.

    Raises EnvironmentFault if the environment caused the error and not the setting.
    """
    try:
        if not isinstance(rows, Exception):
            values = job.values(rows)
            return database.retry_database(partial(queue.finish, claim, rows, values))
    except database.SweepStopped:
        raise
    except Exception as reason:
        rows = reason
    if isinstance(rows, CheckpointError) and "is in use by" in str(rows):
        # The worker that had the setting before is not dead, only late. Without heartbeats this trial becomes stale,
        # and so the setting is tried again after the grace period.
        with suppress(RuntimeError):
            database.retry_database(partial(queue.set_fact, claim, "released", "its folder is in use"))
        return False
    fault = database.describe_fault(rows)
    if fault is not None:
        raise database.EnvironmentFault(fault) from rows
    final = isinstance(rows, Exploded | InputError)  # another attempt would end in the same way
    database.retry_database(partial(queue.fail, claim, rows, final=final))
    return False


# --- several workers on one machine -----------------------------------------------------------


def supervise(queue: Queue, workers: int, work_as: Callable[[str, Callable[[], bool]], Any]) -> None:
    """Keeps n workers running until every setting is over. One that dies is replaced.

    Args:
        queue: the sweep's queue.
        workers: the number of workers.
        work_as: the work of a worker, called with its name and a function that says when to stop; it is sent to its
            process.
    """
    context = _worker_context()
    running: dict[str, Any] = {}
    errors, reasons = 0, context.SimpleQueue()
    try:
        while True:
            for owner, process in list(running.items()):
                if process.is_alive():
                    continue
                del running[owner]
                database.retry_database(partial(queue.release_owner, owner))  # nobody waits for the grace period
                if process.exitcode == _STOPPED and not reasons.empty():
                    raise database.SweepStopped(reasons.get())
                errors += process.exitcode > 0
            left = sum(not slot.is_over for slot in database.retry_database(queue.slots))
            if left == 0:
                break
            if errors > _MOST_ERRORS:
                raise database.SweepError(f"{errors} workers ended by an error, which they wrote to standard error")
            for _ in range(min(workers, left) - len(running)):
                owner = owner_name()
                running[owner] = context.Process(target=_run_worker, args=(work_as, owner, reasons), daemon=True)
                running[owner].start()
            time.sleep(0.2)
        for process in running.values():
            process.join(30)
    finally:
        alive = [process for process in running.values() if process.is_alive()]
        for process in alive:
            process.terminate()
        for process in alive:
            process.join(30)


def _worker_context() -> Any:
    """Returns multiprocessing's context for workers: where possible they are forked from a server that has loaded all.

    The server ignores Ctrl-C, and so do its workers: the process that supervises them ends them.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        forkserver.ensure_running()
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
    return context


def _run_worker(work_as: Callable[[str, Callable[[], bool]], Any], owner: str, reasons: Any) -> None:
    """Runs a worker in its own process. It ends, after its present trial, when the process that started it is gone."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    parent = multiprocessing.parent_process()
    try:
        work_as(owner, lambda: parent is not None and not parent.is_alive())
    except KeyboardInterrupt:
        pass
    except database.SweepStopped as reason:
        reasons.put(str(reason))
        sys.exit(_STOPPED)


# --- progress -------------------------------------------------------------------------------


@contextmanager
def progress(queue: Queue, steps: int, show: bool) -> Iterator[None]:
    """Shows on standard error how far the whole sweep is, others' work included, with the time that remains.

    Args:
        queue: the sweep's queue.
        steps: of a whole trial.
        show: whether to show anything: a bar on a terminal, elsewhere a line for each setting that ends.
    """
    if not show:
        yield
        return
    slots, begun, stop = queue.slots(), time.monotonic(), threading.Event()
    before = done = _steps_done(slots, steps)
    printed = {slot.number for slot in slots if slot.is_over}

    def update(advance: Callable[[int], None]) -> None:
        nonlocal done
        slots, earlier = queue.slots(), done
        done = max(done, _steps_done(slots, steps))
        advance(done - earlier)
        for slot in slots:
            if sys.stderr.isatty() or not slot.is_over or slot.number in printed:
                continue
            printed.add(slot.number)
            seconds = (time.monotonic() - begun) * (len(slots) * steps - done) / max(1, done - before)
            left = f"; about {format_duration(seconds)} left" if len(printed) < len(slots) else ""
            ended = f"{len(printed)} of {len(slots)} {'trained' if slot.failure is None else 'failed'}"
            which = format_setting(slot.setting or {}, PARAMETERS)
            print(f"{ended}: {which}{left}", file=sys.stderr, flush=True)

    def watch() -> None:
        with progress_bar(len(slots) * steps, done, True, "steps of all settings") as advance:
            ended = False
            while not ended:
                ended = stop.wait(1.0)
                with suppress(Exception):  # the storage is busy: the next attempt may succeed
                    update(advance)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _steps_done(slots: Sequence[Slot], steps: int) -> int:
    return sum(steps if slot.is_over else min(steps, slot.done) for slot in slots)
