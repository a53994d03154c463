"""A PostgreSQL server of our own for a test: a new cluster in a temporary folder, on a Unix socket alone."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def server() -> Iterator[str]:
    """The URL of a running server; it and its files are gone afterwards."""
    bin_folder = programs()
    assert bin_folder is not None
    folder = Path(tempfile.mkdtemp(prefix="reconbound-pg-"))
    who = _unprivileged() if os.geteuid() == 0 else None
    identity = {} if who is None else {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
    if who is not None:
        os.chown(folder, who.pw_uid, who.pw_gid)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **identity}
    try:
        place = folder / "data"
        subprocess.run([bin_folder / "initdb", "-D", place, "-A", "trust", "-U", "tester", "-N"], check=True, **quiet)
        options = ["-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        process = subprocess.Popen([bin_folder / "postgres", "-D", place, *options], **quiet)
        try:
            url = f"postgresql+psycopg2://tester@/postgres?host={folder}"
            _wait(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
