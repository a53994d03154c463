"""The two databases that can hold a sweep: how they are opened and locked, and how long a worker waits for them.

Faults of the environment (a full disk, a database out of reach) never count against a setting: the sweep waits, and
stops with one line when that does not help.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import optuna
import sqlalchemy as sql

from reconbound._internal.checks import InputError
from reconbound._internal.files import CONFIDENTIAL, disk_fault, open_lock

#: Storage as it must be written: without its driver, SQLAlchemy looks for another than reconbound[postgres] brings.
POSTGRES = "postgresql+psycopg2://user@host/name"
ANSWER = 15  # seconds within which a PostgreSQL server must answer
PATIENCE = 120.0  # seconds that a worker waits for a disk or a database before it stops
REPAIR = "bring it back from a copy, or begin the sweep anew in another folder"
AGAIN = "The sweep stops; nothing is lost: run the same command again to go on"
QUIET = 3.0  # seconds of waiting before a line says so
_LOCK = 0x7265636F6E  # "recon": the key of PostgreSQL's advisory lock
_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # at the end of a SQLite journal that names a super-journal
_RACES = 2  # number of times that a refusal may be a race between two workers
_DATABASE_ERRORS = (sql.exc.DBAPIError, sql.exc.TimeoutError, optuna.exceptions.StorageInternalError)
_Result = TypeVar("_Result")


# --- URLs -----------------------------------------------------------------------------------


def checked_url(url: str) -> Any:
    """Parses the URL of a SQLite file or a PostgreSQL database into SQLAlchemy's object."""
    try:
        parsed = sql.make_url(url)
        backend = parsed.get_backend_name()
    except (sql.exc.ArgumentError, ValueError):
        raise InputError("storage", f"must be a URL such as sqlite:///sweep.db or {POSTGRES}", _hidden(url)) from None
    if "@" in (parsed.host or ""):  # the rest of a password would be taken for a host, and be shown
        raise InputError("storage", "must have an @ that is no separator, as in a password, as %40", _hidden(url))
    if "password" in parsed.query:  # it would be shown there
        user, password = (_last(parsed.query.get(name, "")) for name in ("user", "password"))
        parsed = parsed.set(username=user or parsed.username or "", password=password)
        parsed = parsed.difference_update_query(["user", "password"])
    if backend not in ("sqlite", "postgresql") or (backend == "sqlite" and parsed.database in (None, "", ":memory:")):
        raise InputError("storage", "must be a SQLite file or a PostgreSQL database", shown_url(parsed))
    if parsed.drivername == "postgresql" and find_spec("psycopg2"):  # the default depends on SQLAlchemy's version
        parsed = parsed.set(drivername="postgresql+psycopg2")
    return parsed


def shown_url(url: Any) -> str:
    """Returns the URL as it may be shown: without passwords, including that of a client's key (sslpassword)."""
    url = checked_url(url) if isinstance(url, str) else url
    hidden = url.update_query_dict({name: "***" for name in url.query if "password" in name.lower()})
    return str(hidden.render_as_string(hide_password=True)).replace("%2A%2A%2A", "***")


def _hidden(url: str) -> str:
    """Returns text that is not a URL without possible passwords: removes what is before the last @, or after =."""
    return re.sub(r"^([\w+]+:?//?)?.*@", r"\1***@", re.sub(r"(?i)(pass\w*=)[^&\s]*", r"\1***", url), flags=re.DOTALL)


def _last(given: str | tuple[str, ...]) -> str:
    return given if isinstance(given, str) else given[-1]


# --- connections ----------------------------------------------------------------------------


def engine_options(url: Any, *, reading: bool = False) -> dict[str, Any]:
    """Returns the options for connections to the database.

    Args:
        url: from `checked_url`.
        reading: whether the database must refuse to write.
    """
    if url.get_backend_name() == "sqlite":
        if not reading:
            return {"connect_args": {"timeout": 120}}
        path = Path(url.database).absolute()
        nobody = not path.with_name(f"{path.name}-wal").exists()  # then SQLite need not create its own files beside it
        return {"creator": partial(_connect_reading, path, "immutable=1" if nobody else "mode=ro")}
    options = {"connect_timeout": ANSWER, **(_limited_factories() if url.get_driver_name() == "psycopg2" else {})}
    more = {"execution_options": {"postgresql_readonly": True}} if reading else {}
    return {"pool_pre_ping": True, "pool_size": 2, "connect_args": options, **more}


def _connect_reading(path: Path, how: str) -> Any:
    _refuse_foreign_files(path)  # SQLite keeps its -shm file even so
    connection = sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True, timeout=120, check_same_thread=False)
    connection.execute("PRAGMA trusted_schema = OFF")  # the file may come from anyone
    _refuse_programs(connection)
    return connection


def _refuse_programs(connection: Any) -> None:
    """Refuses a SQLite file with more than tables and indices: a view or a trigger may never end, and nothing stops it.

    SQLite goes by the statement and not by the type that stands beside it.
    """
    for name, statement in connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        if not str(statement).upper().startswith(("CREATE TABLE ", "CREATE INDEX ", "CREATE UNIQUE INDEX ")):
            what = " ".join(str(statement).split()[1:2]).lower()[:20]
            raise sqlite3.DatabaseError(f"it holds a {what}, {str(name)[:60]!r}, and a sweep's has plain tables only")


def _refuse_foreign_files(path: Path) -> None:
    """Refuses a SQLite file that is another file's link, or whose journal names a file outside.

    SQLite writes into the file itself, and so into everything that shares its content. When it takes a journal back, it
    removes the file that the journal's end names as its super-journal, whatever that file is.
    """
    for own in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        if own.exists() and own.stat().st_nlink > 1:
            raise sqlite3.DatabaseError(f"{own.name} is a hard link, and its other names would change with it: copy it")
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists():
        with journal.open("rb") as file:
            file.seek(-min(len(_JOURNAL), journal.stat().st_size), os.SEEK_END)
            if file.read() == _JOURNAL:
                raise sqlite3.DatabaseError(f"{journal.name} names another file, which SQLite would remove: remove it")


@contextmanager
def _time_limit(connection: Any) -> Iterator[None]:
    """Shuts a connection's socket down when the server does not answer in time: libpq itself waits without a limit."""

    def shut() -> None:
        with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(ANSWER, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@cache
def _limited_factories() -> dict[str, Any]:
    """Returns the classes of psycopg2's connections and cursors with a time limit for all that waits for the server."""
    import psycopg2.extensions as pg  # type: ignore[import-untyped]

    def limited(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with _time_limit(getattr(self, "connection", self)):
                return method(self, *args, **options)

        return call

    waiting = {"connection": (pg.connection, "commit", "rollback"), "cursor": (pg.cursor, "execute", "executemany")}
    return {
        f"{what}_factory": type(f"Limited{what}", (base,), {name: limited(getattr(base, name)) for name in names})
        for what, (base, *names) in waiting.items()
    }


def prepare_engine(engine: Any) -> None:
    """Makes the transactions of several workers safe.

    SQLite begins them with BEGIN IMMEDIATE: Optuna reads a trial's state and then writes it, and sqlite3 itself takes
    the lock only at the first write, so that two workers could get one trial. Its write-ahead log survives a killed
    process; a loss of power may undo the last moments, and that work is then repeated.

    PostgreSQL's sessions have one time zone: Optuna stores heartbeats without one.
    """
    if engine.dialect.name == "sqlite":
        sql.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        sql.event.listen(engine, "connect", _set_up_sqlite)
    else:
        sql.event.listen(engine, "connect", _set_time_zone)
    engine.dispose()


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _set_time_zone(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'UTC'")
    connection.commit()


def check_whole(url: Any) -> None:
    """Refuses a SQLite file whose own check finds damage, or that would act on other files or never end."""
    if url.get_backend_name() != "sqlite":
        return
    try:
        _refuse_foreign_files(Path(url.database))
        with closing(sqlite3.connect(url.database, timeout=120)) as connection:
            _refuse_programs(connection)
            result = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as reason:
        result = str(reason)
    if result != "ok":
        what = f"must be a whole SQLite file ({result[:200]}): bring it back from a copy"
        raise InputError("storage", what, shown_url(url))


@contextmanager
def exclusive_lock(url: Any) -> Iterator[None]:
    """Lets one process at a time create tables and trials. The lock ends with its holder."""
    if url.get_backend_name() == "sqlite":
        path = Path(url.database)
        with suppress(FileExistsError):  # created here, so that SQLite does not choose its mode; never opened again:
            # closing a file's handle releases the locks that SQLite holds on it in this process
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, CONFIDENTIAL))
        handle = open_lock(path.with_name(f"{path.name}.lock"))
        try:
            with suppress(ImportError):  # Windows
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
        return
    engine = sql.create_engine(url, **engine_options(url))
    try:
        with engine.connect() as connection:
            while not connection.execute(sql.text(f"SELECT pg_try_advisory_lock({_LOCK})")).scalar():
                time.sleep(0.1)  # asked repeatedly, because a late answer means a server that is gone
            yield
    finally:
        engine.dispose()  # the end of the session releases the lock


# --- faults of the environment ----------------------------------------------------------------


class SweepError(RuntimeError):
    """A sweep cannot continue; finished trials are kept."""


class SweepStopped(SweepError):
    """A sweep stopped because of its environment; the same command continues it."""


class EnvironmentFault(Exception):
    """The environment refused something that a training needs; the message gives the reason."""


def describe_fault(error: BaseException) -> str | None:
    """Returns what the disk or the database refused, in one line; None for an error of any other kind."""
    for reason in _causes(error):
        if isinstance(reason, EnvironmentFault):
            return str(reason)
        if isinstance(reason, _DATABASE_ERRORS):
            return f"the database: {first_line(reason)}"
    return disk_fault(error)


def first_line(error: BaseException) -> str:
    """Returns the root cause of an error, in one line."""
    *_, root = _causes(error)
    return " ".join(str(getattr(root, "orig", None) or root).split())[:300]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, its cause, the cause of that, and so on."""
    reason: BaseException | None = error
    while reason is not None:
        yield reason
        reason = reason.__cause__


def _is_lasting(error: BaseException, tries: int) -> bool:
    """Returns whether waiting does not help: a SQLite file is damaged, or the tables themselves refuse it.

    The latter is so after edits by hand, but also once or twice in a race between two workers.
    """
    wrong = (sql.exc.IntegrityError, sql.exc.ProgrammingError, sql.exc.DataError)
    refused = any(
        isinstance(reason, wrong)  # or SQLite's "no such table", "no such column"
        or (isinstance(reason, sql.exc.OperationalError) and "no such " in str(reason.orig))
        for reason in _causes(error)
    )
    damaged = any(words in first_line(error) for words in ("malformed", "is not a database"))
    return damaged or (refused and tries > _RACES)


class Patience:
    """Waits longer and longer for the environment, reports it in one line, and stops the sweep at the limit."""

    def __init__(self) -> None:
        self.limit = PATIENCE
        self.pause, self.since, self.reported, self.tries = 0.05, 0.0, False, 0

    def wait(self, error: BaseException, why: str) -> None:
        """Waits once. Raises SweepStopped when the limit is over, or at once if waiting does not help.

        Args:
            error: the error that the environment caused.
            why: the reason, in words.
        """
        now = time.monotonic()
        self.since, self.tries = self.since or now, self.tries + 1
        if _is_lasting(error, self.tries):
            raise SweepStopped(f"{why}: {REPAIR}") from error
        if now - self.since >= self.limit:
            raise SweepStopped(f"{why}: waited {self.limit:.0f} s. {AGAIN}") from error
        if not self.reported and now - self.since >= min(QUIET, self.limit / 4):
            notify(f"{why}: waiting for up to {self.limit:.0f} s")
            self.reported = True
        time.sleep(min(self.pause, max(0.0, self.since + self.limit - now)))
        self.pause = min(2 * self.pause, 5.0)

    def end(self) -> None:
        """Records that the environment is back."""
        if self.reported:
            notify("the sweep goes on")
        self.pause, self.since, self.reported, self.tries = 0.05, 0.0, False, 0


def retry_database(action: Callable[[], _Result]) -> _Result:
    """Repeats an action that a database out of reach refuses, until it succeeds or PATIENCE ends.

    An InputError that the environment caused counts as well: a storage that cannot be opened.
    """
    patience = Patience()
    patience.since = time.monotonic()  # a database may take a long time to report its error
    while True:
        try:
            result = action()
        except (*_DATABASE_ERRORS, InputError) as reason:
            fault = describe_fault(reason)
            if fault is None:
                raise
            patience.wait(reason, fault)
        else:
            patience.end()
            return result


def notify(line: str) -> None:
    """Prints a line on standard error. Of several workers only the process that started them prints."""
    if multiprocessing.parent_process() is None:
        print(f"reconbound: {' '.join(line.split())}", file=sys.stderr, flush=True)
