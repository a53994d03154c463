"""A worker that takes many trials at a time and trains them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from reconbound._internal.checks import InputError
from reconbound.sweep.clock import Clock
from reconbound.sweep.faults import Away, Patience, SweepStopped, patiently
from reconbound.sweep.space import Setting
from reconbound.sweep.store import Claim, Store
from reconbound.sweep.worker import Heart, LeaseLost, Row, failed, owner_name, release_quietly, trial_folder


class Exploded(RuntimeError):
    """The parameters of a training, or its leakage, are no longer finite."""


def work_together(
    store: Store,
    ask: Callable[[Claim], Setting],
    train: Callable[..., Sequence[list[Row] | Exception]],
    values: Callable[[Sequence[Row]], Sequence[float]],
    out: Path,
    *,
    steps: int,
    together: int,
    owner: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    wait: float = 1.0,
) -> int:
    """Works on the sweep until every trial is finished, n trials at a time.

    Args:
        store: as in `work`.
        ask: as in `work`.
        train: (settings, folders, tell) → the rows of each, or the exception that it ended by.
        values: as in `work`.
        out: as in `work`.
        steps: as in `work`.
        together: the number of trials at a time.
        owner: as in `work`.
        stop: as in `work`.
        wait: as in `work`.

    Returns:
        The number of trials that this worker finished.
    """
    me = owner or owner_name()
    finished, patience, clock = 0, Patience(), Clock(store)
    try:
        while not stop():
            claims = _claimed(store, me, together)
            if claims:
                try:
                    finished += _all(store, claims, ask, train, values, out, steps)
                    patience.end()
                except Away as fault:
                    patience.wait(fault, str(fault))
            elif all(trial.state.is_finished() for trial in patiently(store.trials)):
                break
            else:
                patiently(clock.look)
                time.sleep(wait)  # others have the remaining trials; one of them may die
    except BaseException:  # interrupted between two claims, for example
        with suppress(Exception):
            store.expire(me)
        raise
    return finished


def _claimed(store: Store, me: str, together: int) -> list[Claim]:
    claims: list[Claim] = []
    while len(claims) < together:
        claim = patiently(lambda: store.claim(me))
        if claim is None:
            break
        claims.append(claim)
    return claims


def _all(
    store: Store,
    claims: list[Claim],
    ask: Callable[[Claim], Setting],
    train: Callable[..., Sequence[list[Row] | Exception]],
    values: Callable[[Sequence[Row]], Sequence[float]],
    out: Path,
    steps: int,
) -> int:
    """Trains these trials. Returns how many of them it finished."""
    left = list(claims)
    finished = 0
    try:
        with Hearts(store, claims) as hearts:
            settings = [patiently(partial(ask, claim)) for claim in claims]
            found = train(settings, [trial_folder(out, claim.number) for claim in claims], hearts.tell)
        for claim, rows in zip(claims, found, strict=True):
            finished += _end(store, claim, rows, values, steps)
            left.remove(claim)
    except LeaseLost:
        pass
    except Exception as reason:
        if isinstance(reason, Away | SweepStopped):
            for claim in left:
                release_quietly(store, claim)
            raise
        failed(store, left, reason)
    except BaseException:  # stopped from outside: the next worker need not wait until the leases end
        for claim in left:
            release_quietly(store, claim)
        raise
    return finished


def _end(
    store: Store,
    claim: Claim,
    rows: list[Row] | Exception,
    values: Callable[[Sequence[Row]], Sequence[float]],
    steps: int,
) -> int:
    """Stores one trial's rows, or records its error, whatever happens to the others.

    Returns 1 if that finished the trial.
    """
    try:
        if not isinstance(rows, Exception):
            return int(patiently(partial(store.finish, claim, rows, values(rows), steps)))
        if isinstance(rows, Exploded | InputError):  # another attempt would end the same way
            patiently(partial(store.fail, claim, f"{type(rows).__name__}: {rows}"))
        else:
            failed(store, [claim], rows)
    except (Away, SweepStopped):
        raise
    except Exception as reason:
        failed(store, [claim], reason)
    return 0


class Hearts:
    """Renews several claims, with a Heart for each.

    A lost lease is reported when its trial is to be finished. Only if all leases are lost does the training stop.
    """

    def __init__(self, store: Store, claims: Sequence[Claim]) -> None:
        self.each = [Heart(store, claim) for claim in claims]

    def __enter__(self) -> Hearts:
        try:
            for heart in self.each:
                heart.__enter__()
        except BaseException:  # those that still beat would hold their trials as long as this process lives
            for heart in self.each:
                heart.stop()
            raise
        return self

    def __exit__(self, *what: Any) -> None:
        for heart in self.each:
            heart.stop()
        for heart in self.each:
            heart.__exit__(*what)

    def tell(self, which: Sequence[int], done: int) -> None:
        """Records the steps that these trials have done. Raises LeaseLost if other workers have all trials.

        Args:
            which: positions of the trials.
            done: the number of steps.
        """
        for k in which:
            self.each[k].done = done
        if all(heart.lost for heart in self.each):
            raise LeaseLost


__all__ = ["Exploded", "Hearts", "work_together"]
