"""Connections to PostgreSQL with a time limit: a server that stops answering is treated like one that is gone.

libpq waits for an answer without a limit, and the server's own limits do not help when the server itself hangs. So a
timer shuts the connection's socket down, which ends the wait with psycopg2's usual error.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2.extensions as pg  # type: ignore[import-untyped]

#: Seconds within which a server must answer.
ANSWER = 15


@contextmanager
def _limited(connection: Any) -> Iterator[None]:
    """Ends whatever is being done on the connection when the server does not answer in time."""
    timer = threading.Timer(ANSWER, _shut, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(connection: Any) -> None:
    with suppress(Exception):  # it may be closed by now
        own = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            own.shutdown(socket.SHUT_RDWR)
        finally:
            own.close()


class AnsweringCursor(pg.cursor):  # type: ignore[misc]
    """A cursor whose statements have a time limit."""

    def execute(self, *given: Any, **options: Any) -> Any:
        """Executes a statement, or raises psycopg2's OperationalError when the server does not answer."""
        with _limited(self.connection):
            return super().execute(*given, **options)

    def executemany(self, *given: Any, **options: Any) -> Any:
        """Executes a statement for many values, each time with the limit of one."""
        with _limited(self.connection):
            return super().executemany(*given, **options)


class AnsweringConnection(pg.connection):  # type: ignore[misc]
    """A connection whose commits and rollbacks have a time limit too."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.cursor_factory = AnsweringCursor

    def commit(self) -> None:
        """Commits, or raises psycopg2's OperationalError when the server does not answer."""
        with _limited(self):
            super().commit()

    def rollback(self) -> None:
        """Rolls back, or raises psycopg2's OperationalError when the server does not answer."""
        with _limited(self):
            super().rollback()


__all__ = ["ANSWER", "AnsweringConnection"]
