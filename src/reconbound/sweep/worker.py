"""A worker: takes a trial, trains it, stores its rows, until none is left."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from reconbound.sweep.clock import Clock
from reconbound.sweep.faults import Away, Patience, SweepStopped, environment_fault, patiently
from reconbound.sweep.space import Setting
from reconbound.sweep.store import ERRORS, Claim, Store
from reconbound.training.checkpoint import CheckpointError

TRIALS = "trials"
Row: TypeAlias = dict[str, Any]
#: (setting, folder of its own, to be called with the steps done) → one row for each step count. Called again in the
#: same folder after a kill it must give the same rows.
Train: TypeAlias = Callable[[Setting, Path, Callable[[int], None]], list[Row]]


class LeaseLost(Exception):
    """Another worker has the trial by now: this worker was asleep for too long."""


def owner_name() -> str:
    """Returns a name for this worker that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def work(
    store: Store,
    ask: Callable[[Claim], Setting],
    train: Train,
    values: Callable[[Sequence[Row]], Sequence[float]],
    out: Path,
    *,
    steps: int,
    owner: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    wait: float = 1.0,
) -> int:
    """Works on the sweep until every trial is finished.

    Args:
        store: the sweep's storage.
        ask: a claim → its setting.
        train: trains a setting.
        values: a trial's rows → the numbers that a search maximises.
        out: the sweep's folder.
        steps: of a whole trial, for progress.
        owner: this worker's name.
        stop: asked between trials.
        wait: seconds between two attempts when other workers have all trials.

    Returns:
        The number of trials that this worker finished.
    """
    me = owner or owner_name()
    finished, patience, clock = 0, Patience(), Clock(store)
    while not stop():
        claim = patiently(lambda: store.claim(me))
        if claim is None:
            if all(trial.state.is_finished() for trial in patiently(store.trials)):
                break
            patiently(clock.look)
            time.sleep(wait)  # others have the remaining trials; one of them may die
            continue
        try:
            finished += _one(store, claim, ask, train, values, out, steps)
            patience.end()
        except Away as fault:
            patience.wait(fault, str(fault))
    return finished


def _one(
    store: Store,
    claim: Claim,
    ask: Callable[[Claim], Setting],
    train: Train,
    values: Callable[[Sequence[Row]], Sequence[float]],
    out: Path,
    steps: int,
) -> int:
    """Trains one trial.

    Returns 1 if that finished it. Raises Away, with the trial released, for a fault of the environment.
    """
    try:
        with Heart(store, claim) as heart:
            rows = train(patiently(lambda: ask(claim)), trial_folder(out, claim.number), heart.tell)
        return int(patiently(lambda: store.finish(claim, rows, values(rows), steps)))
    except LeaseLost:
        return 0
    except CheckpointError as reason:
        if "is in use by" not in str(reason):
            failed(store, [claim], reason)
        else:  # the worker that had the trial before is not dead, only late
            patiently(lambda: store.release(claim, pause=store.lease / 2))
    except SweepStopped:
        release_quietly(store, claim)
        raise
    except Exception as reason:
        failed(store, [claim], reason)
    except BaseException:  # stopped from outside: the next worker need not wait until the lease ends
        release_quietly(store, claim)
        raise
    return 0


def release_quietly(store: Store, claim: Claim) -> None:
    """Releases a trial. Where the database is out of reach, its lease ends by itself.

    Args:
        store: the sweep's storage.
        claim: the trial.
    """
    with suppress(Exception):
        store.release(claim)


def failed(store: Store, claims: Sequence[Claim], reason: Exception) -> None:
    """Leaves trials that raised an error to another attempt, or gives them up after the last.

    Raises Away, with the trials released as they were, if the environment caused it and not the settings.

    Args:
        store: the sweep's storage.
        claims: the trials.
        reason: the error.
    """
    fault = environment_fault(reason)
    if fault is not None:
        for claim in claims:
            release_quietly(store, claim)
        raise Away(fault) from reason
    why = f"{type(reason).__name__}: {reason}"
    for claim in claims:
        if claim.errors + 1 >= ERRORS:
            patiently(partial(store.fail, claim, why))
        else:
            patiently(partial(store.release, claim, error=True))


def trial_folder(out: Path, number: int) -> Path:
    """Returns the folder for a trial's checkpoints and results: confidential.

    Args:
        out: the sweep's folder.
        number: of the trial.
    """
    return out / TRIALS / f"{number:05d}"


class Heart:
    """Renews a claim's lease from its own thread while the training runs."""

    def __init__(self, store: Store, claim: Claim) -> None:
        self.store, self.claim, self.done = store, claim, 0
        self.lost, self._stop = False, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Asks the thread to stop, without waiting."""
        self._stop.set()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def tell(self, done: int) -> None:
        """Records the steps done. Raises LeaseLost if another worker has the trial."""
        self.done = done
        if self.lost:
            raise LeaseLost

    def _beat(self) -> None:
        while not self._stop.wait(min(self.store.lease / 4, 5.0)):
            with suppress(Exception):  # out of reach for the moment: the next attempt may succeed
                self.lost = self.lost or not self.store.beat(self.claim, self.done)
