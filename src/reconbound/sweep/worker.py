"""A worker: takes a trial, trains it, puts its rows in, until none is left."""

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
    """The trial is in other hands by now: this worker was asleep for too long."""


def owner_name() -> str:
    """A name for this worker that no other has."""
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
    """Work on the sweep until every trial is finished; how many of them this worker finished.

    Args:
        store: the sweep's. ask: a claim → its setting. train: does the work. values: a trial's rows → what the search
            looks at. out: the sweep's folder. steps: of a whole trial, for progress.
        owner: this worker's name. stop: asked between trials. wait: seconds between two looks when others have all.
    """
    me = owner or owner_name()
    finished, patience, clock = 0, Patience(), Clock(store)
    while not stop():
        claim = patiently(lambda: store.claim(me))
        if claim is None:
            if all(trial.state.is_finished() for trial in patiently(store.trials)):
                break
            patiently(clock.look)
            time.sleep(wait)  # others have the rest; one of them may die
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
    """Train one trial; 1 if that finished it. Raises Away, with the trial let go, if the environment is in the way."""
    try:
        with Heart(store, claim) as heart:
            rows = train(patiently(lambda: ask(claim)), trial_folder(out, claim.number), heart.tell)
        return int(patiently(lambda: store.finish(claim, rows, values(rows), steps)))
    except LeaseLost:
        return 0
    except CheckpointError as reason:
        if "is in use by" not in str(reason):
            failed(store, [claim], reason)
        else:  # whoever had the trial before is not dead, only late
            patiently(lambda: store.release(claim, pause=store.lease / 2))
    except SweepStopped:
        release_quietly(store, claim)
        raise
    except Exception as reason:
        failed(store, [claim], reason)
    except BaseException:  # stopped from outside: the next worker need not wait for the lease to run out
        release_quietly(store, claim)
        raise
    return 0


def release_quietly(store: Store, claim: Claim) -> None:
    """Lets go of a trial; where the database is away, its lease runs out by itself."""
    with suppress(Exception):
        store.release(claim)


def failed(store: Store, claims: Sequence[Claim], reason: Exception) -> None:
    """Leaves trials that raised an error to another attempt, or gives them up after the last.

    Raises Away, with the trials let go as they were, if the environment is to blame and not the settings."""
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
    """Where a trial keeps its checkpoints and what it found: confidential."""
    return out / TRIALS / f"{number:05d}"


class Heart:
    """Renews a claim's lease from a thread of its own while the training goes on."""

    def __init__(self, store: Store, claim: Claim) -> None:
        self.store, self.claim, self.done = store, claim, 0
        self.lost, self._stop = False, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ask it to stop, without waiting."""
        self._stop.set()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def tell(self, done: int) -> None:
        """Note the steps done; raises LeaseLost if the trial is another's."""
        self.done = done
        if self.lost:
            raise LeaseLost

    def _beat(self) -> None:
        while not self._stop.wait(min(self.store.lease / 4, 5.0)):
            with suppress(Exception):  # out of reach for the moment: the next beat may come through
                self.lost = self.lost or not self.store.beat(self.claim, self.done)
