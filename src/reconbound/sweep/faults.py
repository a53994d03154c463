"""Faults of the environment (a full disk, a lost database): the sweep waits; they never count against a setting."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import optuna
import sqlalchemy as sql

from reconbound._internal.files import disk_fault

#: Seconds that a worker waits for a disk or a database before it stops.
PATIENCE = 120.0
#: Seconds of waiting after which one line says so: a database that is busy for a moment is not worth one.
SILENT = 3.0
_RACES = 2  # number of times that a refusal may be a race between two workers
_Result = TypeVar("_Result")
_LATER = "nothing is lost: run the same command again to go on"


class SweepError(RuntimeError):
    """A sweep cannot continue; finished trials are kept."""


class SweepStopped(SweepError):
    """A sweep stopped because of its environment; the same command continues it."""


class Away(Exception):
    """The environment refused something that a training needs; the message gives the reason."""


def environment_fault(error: BaseException) -> str | None:
    """Returns what the disk or the database refused, in one line; None for an error of any other kind."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, Away):
            return str(reason)
        if isinstance(reason, sql.exc.DBAPIError | sql.exc.TimeoutError | optuna.exceptions.StorageInternalError):
            return f"the database: {first_line(reason)}"
        reason = reason.__cause__
    return disk_fault(error)


def is_damaged(error: BaseException) -> bool:
    """Returns whether a SQLite file is damaged: waiting does not repair it."""
    return any(said in first_line(error) for said in ("malformed", "is not a database"))


def is_contradictory(error: BaseException) -> bool:
    """Returns whether a database refuses something that its own tables do not allow, as after edits by hand.

    Waiting does not help, except in a race between two workers.
    """
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, sql.exc.IntegrityError | sql.exc.ProgrammingError | sql.exc.DataError):
            return True
        if isinstance(reason, sql.exc.OperationalError) and "no such " in str(reason.orig):  # SQLite: table, column
            return True
        reason = reason.__cause__
    return False


def first_line(reason: BaseException) -> str:
    """Returns the root cause of an error, in one line."""
    while reason.__cause__ is not None:
        reason = reason.__cause__
    return " ".join(str(getattr(reason, "orig", None) or reason).split())[:300]


class Patience:
    """Waits longer and longer for the environment, reports it in one line, and stops the sweep at the limit.

    Args:
        limit: seconds; PATIENCE when None.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = PATIENCE if limit is None else limit
        self.pause, self.since, self.said = 0.05, None, False  # type: float, float | None, bool
        self.tries = 0

    def wait(self, error: BaseException, why: str) -> None:
        """Waits once. Raises SweepStopped when the limit is over, or at once if waiting does not help.

        Args:
            error: the error that the environment caused.
            why: the reason, in words.
        """
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        self.tries += 1
        if is_damaged(error) or (is_contradictory(error) and self.tries > _RACES):
            raise SweepStopped(
                f"{why}: bring it back from a copy, or begin the sweep anew in another folder"
            ) from error
        if now - self.since >= self.limit:
            raise SweepStopped(f"{why}: waited {self.limit:.0f} s. The sweep stops; {_LATER}") from error
        if not self.said and now - self.since >= min(SILENT, self.limit / 4):
            self.said = say(f"{why}: waiting for up to {self.limit:.0f} s")
        time.sleep(min(self.pause, max(0.0, self.since + self.limit - now)))
        self.pause = min(2 * self.pause, 5.0)

    def end(self) -> None:
        """Records that the environment is back."""
        if self.said:
            say("the sweep goes on")
        self.pause, self.since, self.said, self.tries = 0.05, None, False, 0


def patiently(action: Callable[[], _Result], patience: float | None = None) -> _Result:
    """Repeats an action that a database out of reach refuses, until it succeeds or the patience ends.

    Args:
        action: what to do.
        patience: seconds; PATIENCE when None.
    """
    waiting = Patience(patience)
    waiting.since = time.monotonic()  # a database may take a long time to report its error
    while True:
        try:
            found = action()
        except (sql.exc.DBAPIError, sql.exc.TimeoutError, optuna.exceptions.StorageInternalError) as reason:
            waiting.wait(reason, f"the database: {first_line(reason)}")
        else:
            waiting.end()
            return found


def say(line: str) -> bool:
    """Prints a line on standard error. In a team of workers only the process that started them prints."""
    if multiprocessing.parent_process() is None:
        print(f"reconbound: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return True


__all__ = ["Away", "Patience", "SweepError", "SweepStopped", "environment_fault", "first_line", "is_damaged",
           "patiently", "say"]  # fmt: skip
