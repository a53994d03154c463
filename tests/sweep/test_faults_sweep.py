"""Sweeps whose disk fills up, or whose database goes away: one line, nothing lost, and they go on."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import sqlalchemy as sql

import postgres_server
import sweep_stub
from reconbound.sweep import database, sweep
from reconbound.sweep.queue import Queue
from reconbound.sweep.run import open_queue
from reconbound.sweep.space import settings_of

pytestmark = pytest.mark.slow

NO_SERVER = postgres_server.missing()
FULL = OSError(errno.ENOSPC, "No space left on device", "trials/00003/checkpoint-0.safetensors")


@pytest.fixture(autouse=True)
def _short(monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 12.0)


class Faulty(sweep_stub.Stub):
    """A training that the environment refuses so many times, each time at another step."""

    def __init__(self, times: float, error: Exception = FULL) -> None:
        self.times, self.error, self.calls, self.pause = times, error, 0, 0.001

    def __call__(self, setting, folder, tell):
        if self.times == float("inf"):
            raise self.error

        def reported(done: int) -> None:
            if self.times > 0 and done % 12 == self.calls % 12:
                self.calls, self.times = self.calls + 1, self.times - 1
                raise self.error
            tell(done)

        return super().__call__(setting, folder, reported)


def check_whole(config, rows: list[dict]) -> None:
    """Every setting was finished, none failed, and no error of the environment was counted as one of a setting."""
    found = {tuple(row.items()) for row in ({k: v for k, v in row.items() if k != "trial"} for row in rows)}
    settings = settings_of(config.space)
    wanted = [{**setting, **row} for setting in settings for row in sweep_stub.rows_of(setting)]
    assert found == {tuple(row.items()) for row in wanted}
    assert len(rows) == len(wanted)
    queue = open_queue(config)
    try:
        slots = queue.slots()
        assert all(slot.complete is not None for slot in slots)
        assert not any("error" in trial.user_attrs for slot in slots for trial in slot.attempts)
    finally:
        queue.dispose()


@pytest.mark.parametrize("together", [None, 4])
@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EROFS, "Read-only file system", "x"),
        OSError(errno.EIO, "Input/output error"),
        sql.exc.OperationalError("UPDATE", {}, Exception("server closed the connection unexpectedly")),
    ],
    ids=["full", "read-only", "I/O", "database"],
)
def test_a_transient_fault_is_no_error_of_a_setting(tmp_path, together, error, capfd) -> None:
    config = sweep_stub.config(tmp_path / "s", None, 4, together)
    rows = sweep(config, make_train=lambda _: Faulty(5, error), show=False)
    check_whole(config, rows)


def test_a_worker_does_not_wait_for_its_own_trial(tmp_path, monkeypatch) -> None:
    """The database, too, refuses at the moment of the fault: the trial is released when it answers again."""
    config, own, refused = replace(sweep_stub.config(tmp_path / "s", None, 4), grace=60), Queue.release_owner, []

    def release(self, owner, why=None) -> None:
        if len(refused) < 2:
            refused.append(why)
            raise sql.exc.OperationalError("UPDATE", {}, Exception("database or disk is full"))
        own(self, owner, why)

    monkeypatch.setattr(Queue, "release_owner", release)
    began = time.monotonic()
    check_whole(config, sweep(config, make_train=lambda _: Faulty(1), show=False))
    assert len(refused) == 2
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("together", [None, 4])
def test_a_fault_that_stays_stops_the_sweep_with_one_line(tmp_path, together, capfd, monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 1.0)
    config = sweep_stub.config(tmp_path / "s", None, 4, together)
    with pytest.raises(database.SweepStopped, match=r"No space left on device.*run the same command again") as found:
        sweep(config, make_train=lambda _: Faulty(float("inf")), show=False)
    assert "\n" not in str(found.value)
    assert capfd.readouterr().err.count("\n") == 1  # that it waits
    check_whole(config, sweep(config, make_train=sweep_stub.make, show=False))


def test_a_workers_fault_stops_the_team_with_its_line(tmp_path, monkeypatch, capfd) -> None:
    """The workers are processes of their own: the reason comes back from there."""
    config = sweep_stub.config(tmp_path / "s", None, 4)
    with pytest.raises(database.SweepStopped, match="No space left on device"):
        sweep(config, make_train=_always_full, show=False, workers=2)
    assert "Traceback" not in capfd.readouterr().err
    check_whole(config, sweep(config, make_train=sweep_stub.make, show=False))


def _always_full(config):
    database.PATIENCE = 0.5
    return Faulty(float("inf"))


def test_sqlite_on_a_full_disk(tmp_path, monkeypatch) -> None:
    """SQLite's own error for it, raised by SQLite, in the middle of the sweep, and again in the next call."""
    config = sweep_stub.config(tmp_path / "s", None, 4)
    monkeypatch.setattr(database, "PATIENCE", 0.5)
    stopped: list[str] = []
    for room in (0, 1, 2, 4):  # every new connection may add so many pages to the file and no more
        with little_room(room):
            try:
                sweep(config, make_train=lambda _: _Long(), show=False)
            except (database.SweepStopped, ValueError) as reason:
                stopped.append(str(reason))
    assert len(stopped) >= 2
    assert all("full" in text and "\n" not in text for text in stopped)
    rows = sweep(config, make_train=sweep_stub.make, show=False)
    check_whole(config, [{**row, "delta": None} for row in rows])


@contextmanager
def little_room(pages: int):
    def connected(connection, _) -> None:
        now = connection.execute("PRAGMA page_count").fetchone()[0]
        if now > 4:
            connection.execute(f"PRAGMA max_page_count = {now + pages}")

    sql.event.listen(sql.engine.Engine, "connect", connected)
    try:
        yield
    finally:
        sql.event.remove(sql.engine.Engine, "connect", connected)


class _Long(sweep_stub.Stub):
    """Whose rows need room in the database."""

    pause = 0.001

    def __call__(self, setting, folder, tell):
        return [{**row, "delta": "x" * 20_000} for row in super().__call__(setting, folder, tell)]


@pytest.mark.parametrize(
    "edit",
    [
        "CREATE TRIGGER odd BEFORE INSERT ON trial_values BEGIN SELECT RAISE(ABORT, 'odd'); END",
        "CREATE TRIGGER odd BEFORE INSERT ON trial_user_attributes BEGIN SELECT RAISE(ABORT, 'odd'); END",
        "CREATE TRIGGER odd BEFORE UPDATE ON trials BEGIN SELECT RAISE(ABORT, 'odd'); END",
        "DROP TABLE trial_heartbeats",
        "ALTER TABLE trial_heartbeats DROP COLUMN heartbeat",
        "DROP TABLE trial_values",
    ],
)
def test_a_database_edited_by_hand_is_one_line_at_once(tmp_path, edit, capfd, monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 12.0)
    config = sweep_stub.config(tmp_path / "s", None, 4)
    began: list[float] = []

    with pytest.raises(
        (database.SweepError, ValueError), match=r"odd|UNIQUE|no such|no column|edited by hand"
    ) as found:
        sweep(config, make_train=lambda _: _Edited(config, edit, began), show=False)
    assert "\n" not in str(found.value)
    assert time.monotonic() - began[0] < 8
    assert "Traceback" not in capfd.readouterr().err


class _Edited(sweep_stub.Stub):
    """A training during which somebody edits the database."""

    def __init__(self, config, edit: str, began: list[float]) -> None:
        self.config, self.edit, self.began, self.pause = config, edit, began, 0.001

    def __call__(self, setting, folder, tell):
        if not self.began:
            self.began.append(time.monotonic())
            with contextlib.closing(sqlite3.connect(self.config.out / "sweep.db")) as connection:
                connection.execute(self.edit)
                connection.commit()
        return super().__call__(setting, folder, tell)


# --- a PostgreSQL server ------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    if NO_SERVER:
        pytest.skip(NO_SERVER)
    monkeypatch.setattr(database, "ANSWER", 2)
    with postgres_server.controlled() as one:
        yield one


def begun(config) -> tuple[threading.Thread, list]:
    """A sweep in a thread, and what became of it."""
    found: list = []

    def job() -> None:
        try:
            found.append(sweep(config, make_train=sweep_stub.make, show=False))
        except BaseException as reason:
            found.append(reason)

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("how", ["stopped", "still"])
@pytest.mark.postgres
def test_sweep_waits_for_returning_server(tmp_path, server, how, capfd, monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 20.0)
    monkeypatch.setattr(database, "QUIET", 0.2)
    config = sweep_stub.config(tmp_path / "s", server.url, 4)
    thread, found = begun(config)
    _wait_for_training(config)
    _take_away(server, how)
    time.sleep(6.5 if how == "still" else 2)
    _bring_back(server, how)
    thread.join(40)
    assert not thread.is_alive()
    assert isinstance(found[0], list), found[0]
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert "waiting for up to 20 s" in text
    assert "the sweep goes on" in text
    check_whole(config, found[0])


@pytest.mark.parametrize("how", ["stopped", "still"])
@pytest.mark.postgres
def test_sweep_stops_without_server_and_resumes(tmp_path, server, how, monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 1.5)
    config = sweep_stub.config(tmp_path / "s", server.url, 4)
    thread, found = begun(config)
    _wait_for_training(config)
    _take_away(server, how)
    thread.join(40)
    assert not thread.is_alive()
    assert isinstance(found[0], database.SweepStopped), found[0]
    assert "run the same command again" in str(found[0])
    assert "\n" not in str(found[0])
    _bring_back(server, how)
    check_whole(config, sweep(config, make_train=sweep_stub.make, show=False))


def _wait_for_training(config) -> None:
    until = time.monotonic() + 60
    while not (config.out / "trials" / "starts").exists() and time.monotonic() < until:
        time.sleep(0.02)


def _take_away(server, how: str) -> None:
    server.stop() if how == "stopped" else server.stand_still()


def _bring_back(server, how: str) -> None:
    server.start() if how == "stopped" else server.go_on()


@pytest.mark.postgres
def test_worker_waits_for_server_at_start(tmp_path, server, monkeypatch) -> None:
    """One of a team, or a replaced one: its sweep is under way, so its storage is no mistyped one."""
    from reconbound.sweep.run import _join

    monkeypatch.setattr(database, "PATIENCE", 30.0)
    config = sweep_stub.config(tmp_path / "s", server.url, 4)
    sweep(config, make_train=sweep_stub.make, show=False)
    server.stop()
    threading.Timer(1.0, server.start).start()
    assert _join(config, sweep_stub.make, "me", lambda: False) == 0  # nothing was left to do
    server.stop()
    monkeypatch.setattr(database, "PATIENCE", 0.5)
    with pytest.raises(database.SweepStopped):
        _join(config, sweep_stub.make, "me", lambda: False)
