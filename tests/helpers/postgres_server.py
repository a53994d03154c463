"""A PostgreSQL server of our own for a test: a new cluster in a temporary folder, on a Unix socket alone."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def programs() -> Path | None:
    """The folder with initdb and postgres; None where there is none."""
    named = [shutil.which(name) for name in ("initdb", "postgres")]
    folders = [Path(os.path.realpath(path)).parent for path in named if path]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None)


def missing() -> str | None:
    """Why there is no server here, or None."""
    if programs() is None:
        return "PostgreSQL (initdb and postgres) is not installed"
    try:
        import psycopg2  # noqa: F401
    except ImportError:
        return "psycopg2 is not installed: pip install 'reconbound[postgres]'"
    return None if os.geteuid() != 0 or _unprivileged() else "postgres does not run as root, and no other user is there"


class Server:
    """A cluster of our own that can be stopped, started again, and made to stand still."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"postgresql+psycopg2://tester@/postgres?host={folder}"
        who = _unprivileged() if os.geteuid() == 0 else None
        identity = {} if who is None else {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        if who is not None:
            os.chown(folder, who.pw_uid, who.pw_gid)
        self._quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **identity}
        found = programs()
        assert found is not None
        self._programs, self._process = found, None
        make = [found / "initdb", "-D", folder / "data", "-A", "trust", "-U", "tester", "-N"]
        subprocess.run(make, check=True, **self._quiet)

    def start(self) -> None:
        options = ["-k", str(self.folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", self.folder / "data", *options], **self._quiet
        )
        _wait(self.url, self._process)

    def stop(self) -> None:
        """At once: connections are cut, what was not committed is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stand_still(self) -> None:
        """The server and all its connections no longer answer, and do not end either."""
        self._all(signal.SIGSTOP)

    def go_on(self) -> None:
        self._all(signal.SIGCONT)

    def _all(self, number: int) -> None:
        assert self._process is not None
        first = self._process.pid
        children = [int(pid) for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split()]
        for pid in (first, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def controlled() -> Iterator[Server]:
    """A running server; it and its files are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="reconbound-pg-"))
    try:
        one = Server(folder)
        one.start()
        try:
            yield one
        finally:
            if one._process is not None:
                one.go_on()
            one.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def server() -> Iterator[str]:
    """The URL of a running server."""
    with controlled() as one:
        yield one.url


def _wait(url: str, process: subprocess.Popen) -> None:
    import sqlalchemy as sql

    engine = sql.create_engine(url)
    for _ in range(300):
        assert process.poll() is None, "postgres ended"
        try:
            engine.connect().close()
        except sql.exc.OperationalError:
            time.sleep(0.1)
        else:
            engine.dispose()
            return
    raise AssertionError(f"postgres of {getpass.getuser()} did not start")


def _unprivileged() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None
