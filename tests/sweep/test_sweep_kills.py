"""Workers that are killed at any moment: every setting is finished exactly once, with the rows of a single worker."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sql

import killing
import postgres_server
import sweep_stub
from reconbound.sweep import database, frontier, pareto, run, sweep
from reconbound.sweep.database import SweepError
from reconbound.sweep.run import begin, open_queue
from reconbound.sweep.space import key
from reconbound.sweep.workers import supervise

HERE = Path(__file__).resolve().parents[1] / "helpers"
KILLS = int(os.environ.get("KILLS", "8"))
NO_SERVER = postgres_server.missing()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def postgres():
    if NO_SERVER:
        pytest.skip(NO_SERVER)
    with postgres_server.server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request, tmp_path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shared.db'}"
    return request.getfixturevalue("postgres")


@pytest.fixture(autouse=True)
def _count(monkeypatch) -> None:
    """A sweep refuses databases with triggers, and `count_finishes` makes one."""
    monkeypatch.setattr(database, "_refuse_programs", lambda connection: None)


class Quick(sweep_stub.Stub):
    pause = 0.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict]:
    """Returns the results of a single worker, without waiting at its steps, because nothing kills it."""
    single = tmp_path_factory.mktemp("alone") / "sweep"
    return sweep(sweep_stub.config(single, None), make_train=lambda _: Quick(), show=False)


def count_finishes(url: str) -> None:
    """Have the database itself note every time that a trial's state becomes COMPLETE."""
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sql.text("CREATE TABLE finishes (trial_id INTEGER)"))
        for statement in TRIGGERS[engine.dialect.name]:
            connection.exec_driver_sql(statement)
    engine.dispose()


TRIGGERS = {
    "sqlite": [
        "CREATE TRIGGER finished AFTER UPDATE OF state ON trials WHEN NEW.state = 'COMPLETE' "
        "BEGIN INSERT INTO finishes VALUES (NEW.trial_id); END"
    ],
    "postgresql": [
        "CREATE FUNCTION noted() RETURNS trigger AS $$ BEGIN INSERT INTO finishes VALUES (NEW.trial_id); RETURN NEW; "
        "END $$ LANGUAGE plpgsql",
        "CREATE TRIGGER finished AFTER UPDATE OF state ON trials FOR EACH ROW WHEN (NEW.state = 'COMPLETE') "
        "EXECUTE FUNCTION noted()",
    ],
}


def finishes(url: str) -> list[int]:
    engine = sql.create_engine(url)
    with engine.connect() as connection:
        found = [row[0] for row in connection.execute(sql.text("SELECT trial_id FROM finishes ORDER BY trial_id"))]
    engine.dispose()
    return found


def start(out: Path, url: str):
    return killing.start(sweep_stub.join, str(out), url)


def holders(queue) -> set[int]:
    """The processes that have a trial now, or had it when they died."""
    running = [slot.attempts[-1] for slot in queue.slots() if slot.attempts[-1].state.name == "RUNNING"]
    return {int(trial.user_attrs["owner"].split(":")[-2]) for trial in running if "owner" in trial.user_attrs}


def check(url: str, out: Path, found: list[dict], wanted: list[dict]) -> None:
    """Every setting was finished once, by the database's own count, with the rows of a single worker."""
    queue = open_queue(sweep_stub.config(out, url))
    slots = queue.slots()
    assert len(slots) == len({key(slot.setting) for slot in slots}) == 12
    complete = [trial for slot in slots for trial in slot.attempts if trial.state.name == "COMPLETE"]
    assert len(complete) == 12
    assert {trial.state.name for slot in slots for trial in slot.attempts} <= {"COMPLETE", "FAIL"}
    assert finishes(url) == sorted(trial._trial_id for trial in complete)
    queue.dispose()
    assert found == wanted
    assert pareto(found, "exact_max") == pareto(wanted, "exact_max")
    assert frontier.table(found) == frontier.table(wanted)


def test_four_independent_workers_killed_at_random(tmp_path, url, expected) -> None:
    """Processes that know of each other only through the storage; heartbeats of the dead stop."""
    out, rng = tmp_path / "out", random.Random(0)
    settings = sweep_stub.config(out, url)
    out.mkdir(mode=0o700)
    queue = open_queue(settings)
    begin(queue, settings, sweep_stub.Stub())
    count_finishes(url)
    workers = [start(out, url) for _ in range(4)]
    kills, end = 0, time.monotonic() + 150
    try:
        while not all(slot.is_over for slot in queue.slots()):
            assert time.monotonic() < end, "a trial is left to nobody"
            time.sleep(rng.uniform(0.02, 0.3))
            at_work = [worker for worker in workers if worker.pid in holders(queue)]
            if kills < KILLS and at_work:
                rng.choice(at_work).kill()
                kills += 1
            workers = [worker if worker.is_alive() else start(out, url) for worker in workers]
        for worker in workers:
            worker.join(60)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    queue.dispose()
    assert kills >= 3
    starts = (out / "trials" / "starts").read_text().splitlines()
    assert len(set(starts)) == 12
    assert len(starts) <= 12 + kills + 4  # none is trained twice, but for kills (and heartbeats late on a busy machine)
    found = sweep(settings, make_train=sweep_stub.make, show=False)
    check(url, out, found, expected)


@pytest.mark.parametrize(("together", "workers", "most", "pause"), [(None, 3, 6, 0.1), (3, 2, 3, 0.2)])
def test_workers_of_one_command_that_are_killed_are_replaced(
    tmp_path, together, workers, most, pause, expected
) -> None:
    out, rng, kills = tmp_path / "out", random.Random(workers), []
    database = tmp_path / "shared.db"
    settings = sweep_stub.config(out, f"sqlite:///{database}", together=together)
    out.mkdir(mode=0o700)
    queue = open_queue(settings)
    begin(queue, settings, sweep_stub.Stub())
    count_finishes(settings.url)
    over = threading.Event()

    def killer() -> None:
        while len(kills) < most and not over.wait(rng.uniform(pause, pause + 0.3)):
            going = multiprocessing.active_children()
            if going and holders(queue):
                victim = rng.choice(going)
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(victim.pid, signal.SIGKILL)
                    kills.append(victim.pid)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        found = sweep(settings, workers=workers, make_train=sweep_stub.make, show=False)
    finally:
        over.set()
        thread.join()
        queue.dispose()
    assert len(kills) >= 2
    check(settings.url, out, found, expected)
    assert (database.stat().st_mode & 0o777) == 0o600
    assert sqlite3.connect(database).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def broken(config) -> None:
    raise OSError("no data here")


def test_workers_that_cannot_start_end_the_sweep_with_an_error(tmp_path) -> None:
    settings = sweep_stub.config(tmp_path / "out", None)
    (tmp_path / "out").mkdir(mode=0o700)
    queue = open_queue(settings)
    begin(queue, settings, sweep_stub.Stub())
    with pytest.raises(SweepError, match="workers ended by an error"):
        supervise(queue, 3, partial(run._join, settings, broken))
    queue.dispose()
