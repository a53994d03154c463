"""The two databases that can store a sweep: how they are opened, and how one process locks them."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sql

from reconbound._internal.checks import InputError
from reconbound._internal.files import CONFIDENTIAL, open_lock
from reconbound.sweep.words import POSTGRES

BACKENDS = ("sqlite", "postgresql")
_LOCK = 0x7265636F6E  # "recon": the key of PostgreSQL's advisory lock


def checked_url(url: str) -> Any:
    """Parses the URL of a SQLite file or a PostgreSQL database into SQLAlchemy's object."""
    try:
        made = sql.make_url(url)
        backend = made.get_backend_name()
    except (sql.exc.ArgumentError, ValueError):
        raise InputError("storage", f"must be a URL such as sqlite:///sweep.db or {POSTGRES}", _hidden(url)) from None
    if "@" in (made.host or ""):  # the rest of a password would be taken for a host, and be shown
        raise InputError("storage", "must have an @ that is no separator, as in a password, as %40", _hidden(url))
    if "password" in made.query:  # it would be shown there
        user, password = (_last(made.query.get(name, "")) for name in ("user", "password"))
        made = made.difference_update_query(["user", "password"]).set(
            username=user or made.username or "", password=password
        )
    if backend not in BACKENDS or (backend == "sqlite" and not _file(made)):
        raise InputError("storage", "must be a SQLite file or a PostgreSQL database", shown_url(made))
    if made.drivername == "postgresql" and find_spec("psycopg2"):  # the default depends on SQLAlchemy's version
        made = made.set(drivername="postgresql+psycopg2")
    return made


def shown_url(url: Any) -> str:
    """Returns the URL as it may be shown: without passwords, including that of a client's key (sslpassword)."""
    hidden = url.update_query_dict({name: "***" for name in url.query if "password" in name.lower()})
    return str(hidden.render_as_string(hide_password=True)).replace("%2A%2A%2A", "***")


def _last(given: str | tuple[str, ...]) -> str:
    return given if isinstance(given, str) else given[-1]


def _hidden(url: str) -> str:
    """Returns text that is not a URL without possible passwords: removes what is before the last @, or after =."""
    return re.sub(r"^([\w+]+:?//?)?.*@", r"\1***@", re.sub(r"(?i)(pass\w*=)[^&\s]*", r"\1***", url), flags=re.DOTALL)


def _file(url: Any) -> str:
    return "" if url.database in (None, "", ":memory:") else str(url.database)


def engine_options(url: Any) -> dict[str, Any]:
    """Returns the options for a connection to the database."""
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 120}}
    options: dict[str, Any] = {"connect_timeout": 15}
    if url.get_driver_name() == "psycopg2":
        from reconbound.sweep import answering

        options = {"connect_timeout": answering.ANSWER, "connection_factory": answering.AnsweringConnection}
    return {"pool_pre_ping": True, "pool_size": 2, "connect_args": options}


def reading_options(url: Any) -> dict[str, Any]:
    """Returns the options for a connection that only reads: the database refuses to write."""
    if url.get_backend_name() != "sqlite":
        return {**engine_options(url), "execution_options": {"postgresql_readonly": True}}
    path = Path(_file(url)).absolute()
    nobody = not path.with_name(f"{path.name}-wal").exists()  # then SQLite need not create its own files beside it
    return {"creator": partial(_connect, path, "immutable=1" if nobody else "mode=ro")}


def _connect(path: Path, how: str) -> Any:
    found = sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True, timeout=120, check_same_thread=False)
    found.execute("PRAGMA trusted_schema = OFF")  # the file may come from anyone
    return found


def check_whole(url: Any) -> None:
    """Refuses a SQLite file whose own check finds damage: anything written to it could be lost."""
    if url.get_backend_name() != "sqlite":
        return
    connection = sqlite3.connect(_file(url), timeout=120)
    try:
        said = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as reason:
        said = str(reason)
    finally:
        connection.close()
    if said != "ok":
        raise InputError(
            "storage", f"must be a whole SQLite file ({said[:200]}): bring it back from a copy", shown_url(url)
        )


def storage_shown(url: str) -> str:
    """Returns the URL of a storage as it may be shown."""
    return shown_url(checked_url(url))


def locked_from_the_start(engine: Any) -> None:
    """Makes SQLite begin transactions with BEGIN IMMEDIATE and use a write-ahead log.

    sqlite3 itself begins a transaction only at the first write.

    The log survives a killed process. A loss of power may undo the last moments; that work is then repeated.
    """

    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sql.event.listen(engine, "connect", connected)
    sql.event.listen(engine, "begin", begun)
    engine.dispose()


@contextmanager
def alone(url: Any) -> Iterator[None]:
    """Lets one process at a time create tables and trials. The lock ends with its holder."""
    if url.get_backend_name() == "sqlite":
        path = Path(_file(url))
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
