"""The queue of a sweep: Optuna's own, and what it lacks for workers that may be killed at any moment."""

from __future__ import annotations

import sqlite3
import threading
import time
import warnings
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import optuna
import pytest
import sqlalchemy as sql
from optuna.trial import TrialState
from test_sweep_kills import postgres, url  # noqa: F401

import sweep_stub
from reconbound._internal.checks import DataError, InputError
from reconbound.sweep import run
from reconbound.sweep.database import SweepStopped, prepare_engine
from reconbound.sweep.queue import DEATHS, ERRORS, Claim, Heartbeats, Queue, TrialLost

ROWS = [{"steps": 5, "accuracy": 0.5}]


def make_queue(folder, url=None) -> Queue:  # noqa: F811
    """A queue with twelve settings."""
    config = replace(sweep_stub.config(folder, url), name=folder.name)
    queue = run.open_queue(config)
    if not queue.slots():
        run.begin(queue, config, sweep_stub.Stub())
    return queue


@pytest.fixture
def queue(tmp_path):
    made = make_queue(tmp_path)
    yield made
    made.dispose()


def age(queue: Queue, seconds: float) -> None:
    """Makes all heartbeats older, or with a negative number puts them into the future."""
    table = sql.table("trial_heartbeats", sql.column("trial_id"), sql.column("heartbeat", sql.DateTime))
    with queue.storage.engine.begin() as connection:
        for trial_id, at in connection.execute(sql.select(table)).all():
            older = sql.update(table).where(table.c.trial_id == trial_id)
            connection.execute(older.values(heartbeat=at - timedelta(seconds=seconds)))


def states(queue: Queue) -> list[str]:
    return [trial.state.name for trial in queue.study.get_trials(deepcopy=False)]


# --- what Optuna lacks ------------------------------------------------------------------------


def test_optuna_never_fails_a_trial_whose_worker_dies_right_after_ask(queue) -> None:
    """Why `Queue.claim` records a heartbeat before it takes a trial, and is not `Study.ask`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = queue.study.ask()
    age(queue, 3600)
    assert queue.recover() == 0
    assert queue.storage.get_trial(asked._trial_id).state == TrialState.RUNNING
    claim = queue.claim("me")
    age(queue, 3600)
    assert queue.recover() == 1
    assert queue.storage.get_trial(claim.trial_id).state == TrialState.FAIL


def test_optuna_creates_a_trial_when_the_queue_is_empty(queue) -> None:
    while queue.claim("me") is not None:
        pass
    assert len(states(queue)) == 12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        queue.study.ask()
    assert len(states(queue)) == 13
    with pytest.raises(DataError, match="earlier version, or another program's study"):
        queue.slots()


def test_worker_killed_before_retry_loses_nothing(queue) -> None:
    """Why settings that are missing are enqueued again, and there is no retry callback."""
    claim = queue.claim("me")
    queue.storage.set_trial_state_values(claim.trial_id, TrialState.FAIL)  # as fail_stale_trials does, and then dies
    assert queue.slots()[0].is_missing
    assert queue.refill() == 1
    assert queue.refill() == 0
    slot = queue.slots()[0]
    assert [trial.state.name for trial in slot.attempts] == ["FAIL", "WAITING"]
    assert slot.setting == claim.setting


@pytest.mark.parametrize("prepared", [True, False])
def test_two_sqlite_workers_get_one_trial(tmp_path, prepared) -> None:
    """Why `prepare_engine` begins every transaction with the write lock: Optuna reads a state and then writes it."""
    storages = [optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'x.db'}") for _ in range(2)]
    study = optuna.create_study(storage=storages[0])
    study.enqueue_trial({})
    (trial,) = study.get_trials()
    if prepared:
        for storage in storages:
            prepare_engine(storage.engine)
    got, first, second = [], threading.Event(), threading.Event()
    check = storages[0].check_trial_is_updatable

    def pause(*args) -> None:  # the first worker, between reading and writing
        check(*args)
        first.set()
        second.wait(1)

    storages[0].check_trial_is_updatable = pause

    def other() -> None:
        first.wait(10)
        got.append(storages[1].set_trial_state_values(trial._trial_id, TrialState.RUNNING))
        second.set()

    thread = threading.Thread(target=other)
    thread.start()
    got.append(storages[0].set_trial_state_values(trial._trial_id, TrialState.RUNNING))
    thread.join()
    assert sorted(got) == [not prepared, True]
    for storage in storages:
        storage.engine.dispose()


def test_a_claim_that_the_database_cut_short_is_taken_up_again(queue, monkeypatch) -> None:
    """The trial runs and has no owner yet: nobody else can take it before the grace period has passed."""
    own = queue.storage.set_trial_user_attr

    def refuse(*_) -> None:
        monkeypatch.setattr(queue.storage, "set_trial_user_attr", own)
        raise optuna.exceptions.StorageInternalError("disk full")

    monkeypatch.setattr(queue.storage, "set_trial_user_attr", refuse)
    with pytest.raises(optuna.exceptions.StorageInternalError):
        queue.claim("me")
    claim = queue.claim("me")
    assert (claim.slot, states(queue).count("RUNNING")) == (0, 1)
    assert queue.slots()[0].attempts[-1].user_attrs["owner"] == "me"
    assert queue.claim("me").slot == 1


def test_a_cut_claim_that_others_failed_is_left_to_them(queue, monkeypatch) -> None:
    own = queue.storage.set_trial_user_attr
    monkeypatch.setattr(queue.storage, "set_trial_user_attr", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.claim("me")
    monkeypatch.setattr(queue.storage, "set_trial_user_attr", own)
    age(queue, 100)
    assert queue.recover() == 1
    assert queue.claim("me").slot == 1


@pytest.mark.postgres
@pytest.mark.parametrize("zones", [("UTC", "Asia/Tokyo"), ("Asia/Tokyo", "UTC")])
def test_workers_in_other_time_zones_are_not_taken_for_dead(tmp_path, postgres, monkeypatch, zones) -> None:  # noqa: F811
    """Optuna stores PostgreSQL's heartbeats in the time zone of the session, and without it."""
    queues = []
    for zone in zones:
        monkeypatch.setenv("PGTZ", zone)
        queues.append(make_queue(tmp_path, postgres))
    claim = queues[0].claim("me")
    assert queues[1].recover() == 0
    assert queues[0].beat(claim, 1)
    for queue in queues:
        queue.dispose()


def test_clock_set_back_is_reported_once(queue, capfd) -> None:
    """A worker died, and the clock was then set back by an hour: Optuna would wait for an hour."""
    claim = queue.claim("dead")
    age(queue, -3600)
    end = time.monotonic() + 20
    while not queue.recover():
        assert time.monotonic() < end
        time.sleep(0.2)
    assert queue.storage.get_trial(claim.trial_id).state == TrialState.FAIL
    err = capfd.readouterr().err
    assert err.count("the clock was set back") == err.count("\n") == 1


def test_a_worker_that_beats_survives_a_clock_that_was_set_back(queue) -> None:
    claim = queue.claim("alive")
    age(queue, -3600)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        assert queue.beat(claim, 0)
        assert queue.recover() == 0
        time.sleep(0.1)


# --- claims -----------------------------------------------------------------------------------


def test_only_one_worker_gets_a_trial(tmp_path, url) -> None:  # noqa: F811
    one, other = make_queue(tmp_path, url), make_queue(tmp_path, url)
    count = len(states(one))
    first = one.claim("one")
    assert other.claim("other").slot == first.slot + 1
    age(one, 60)
    assert other.recover() == 2
    assert other.recover() == 0
    taken = None
    while taken is None or taken.slot != first.slot:
        taken = other.claim("other")
    assert taken.trial_id != first.trial_id
    assert not one.beat(first, 3)
    assert not one.finish(first, ROWS, [0.0, 0.0])
    assert other.finish(taken, ROWS, [0.0, 0.0])
    assert not other.finish(taken, [], [0.0, 0.0])
    one.fail(taken, RuntimeError("too late"))
    slot = one.slots()[first.slot]
    assert (slot.complete._trial_id, slot.complete.user_attrs["rows"]) == (taken.trial_id, ROWS)
    assert len(states(one)) == count + 2
    for queue in (one, other):
        queue.dispose()


def test_a_dead_workers_trials_are_released_by_name(queue) -> None:
    claims = [queue.claim(owner) for owner in ("dead", "alive", "dead")]
    queue.release_owner("dead")
    assert queue.refill() == 2
    assert [queue.beat(claim, 0) for claim in claims] == [False, True, False]


@pytest.mark.parametrize("how", ["error", "final", "death", "released"])
def test_setting_given_up_after_errors_not_faults(queue, how) -> None:
    attempts = {"error": ERRORS, "final": 1, "death": DEATHS, "released": DEATHS + 1}[how]
    for number in range(1, 12):  # only setting 0 is left
        queue.finish(Claim(queue.slots()[number].attempts[0]._trial_id, number, {}), ROWS, [0.0, 0.0])
    for k in range(attempts):
        claim = queue.claim("me")
        assert claim.slot == 0
        assert queue.slots()[0].failure is None, k
        if how in ("error", "final"):
            queue.fail(claim, RuntimeError("exploded"), final=how == "final")
        else:
            queue.release_owner("me", "the disk was full" if how == "released" else None)
        queue.refill()
    wanted = {"death": f"{DEATHS} workers died on it", "released": None}.get(how, "RuntimeError: exploded")
    assert queue.slots()[0].failure == wanted
    assert (queue.claim("me") is None) == (how != "released")


def test_a_trial_is_complete_only_with_its_rows(queue, monkeypatch) -> None:
    """The database goes away in the middle of finishing, and the worker with it: the trial becomes stale."""
    claim = queue.claim("me")

    def away(*_):
        raise optuna.exceptions.StorageInternalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(queue.storage, "set_trial_state_values", away)
        with pytest.raises(optuna.exceptions.StorageInternalError):
            queue.finish(claim, ROWS, [1.0, 1.0])
    age(queue, 60)
    assert queue.recover() == 1


def test_a_grid_may_grow_but_the_grace_period_must_stay(queue, tmp_path) -> None:
    """Workers with other grace periods would take each other for dead."""
    larger = replace(sweep_stub.config(tmp_path, None, 16), name=tmp_path.name)
    run.begin(queue, larger, sweep_stub.Stub())
    assert [slot.number for slot in queue.slots()] == list(range(16))
    queue.grace = 2
    with pytest.raises(InputError, match=r"grace must stay that of the sweep .* in .*, 1, got 2"):
        run.begin(queue, larger, sweep_stub.Stub())


def test_a_database_that_refuses_to_begin_a_trial_stops_the_sweep(queue) -> None:
    with queue.storage.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TRIGGER odd BEFORE UPDATE ON trials BEGIN SELECT RAISE(ABORT, 'odd'); END")
    with pytest.raises(SweepStopped, match="refused to begin setting 0, as if it was edited by hand"):
        queue.claim("me")


# --- heartbeats -------------------------------------------------------------------------------


def test_heartbeats_store_the_steps_of_the_trials_that_did_them() -> None:
    beats = Heartbeats(None, [None] * 3)
    beats.report([1, 2], 5)
    beats.report([2], 7)
    assert beats.done == [0, 5, 7]


def test_a_training_ends_when_all_its_trials_are_lost(queue) -> None:
    claims = [queue.claim("me") for _ in range(2)]
    with Heartbeats(queue, claims) as beats:
        for k in range(2):
            beats.report([0, 1], k)
            queue.fail(claims[k], RuntimeError("as others do with a dead worker's trial"))
            end = time.monotonic() + 10
            while not beats.lost[k] and time.monotonic() < end:
                time.sleep(0.05)
        assert beats.lost == [True, True]
        with pytest.raises(TrialLost):
            beats.report([0, 1], 7)


def test_heartbeats_keep_a_trial_alive_through_faults_of_the_database(queue, monkeypatch) -> None:
    """Optuna's own thread would end at the first of them."""
    claim, real, calls = queue.claim("me"), queue.storage.record_heartbeat, []

    def beat(trial_id) -> None:
        calls.append(trial_id)
        if len(calls) % 2:
            raise optuna.exceptions.StorageInternalError("away")
        real(trial_id)

    monkeypatch.setattr(queue.storage, "record_heartbeat", beat)
    with Heartbeats(queue, [claim]):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            time.sleep(0.1)
    assert len(calls) > 4
    assert queue.finish(claim, ROWS, [0.0, 0.0])


def test_no_heartbeat_comes_after_the_end() -> None:
    """A beat under way, as of a slow database, is waited for."""

    class Slow:
        grace, begun, ended = 0.04, 0, 0

        def beat(self, claim, done) -> bool:
            self.begun += 1
            time.sleep(0.3)
            self.ended += 1
            return True

    slow = Slow()
    with Heartbeats(slow, [None]):
        while not slow.begun:
            time.sleep(0.01)
    assert slow.ended == slow.begun == 1


def test_a_database_with_a_damaged_page_is_not_written_to(tmp_path) -> None:
    """SQLite itself would go on, and lose what it writes there."""
    made = make_queue(tmp_path)
    made.dispose()
    path = tmp_path / "sweep.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trial_values'").fetchone()
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(content)
    with pytest.raises(InputError, match="must be a whole SQLite file"):
        make_queue(tmp_path)
    assert path.read_bytes() == bytes(content)


@pytest.mark.parametrize(
    ("edit", "reading"),
    [
        ("UPDATE alembic_version SET version_num = 'v99.0.0.a'", True),
        ("UPDATE alembic_version SET version_num = 'v99.0.0.a'", False),
        ("DELETE FROM version_info", True),
        ("DELETE FROM alembic_version", True),
    ],
)
def test_a_database_of_another_optuna_is_one_line(tmp_path, edit, reading) -> None:
    make_queue(tmp_path).dispose()
    with closing(sqlite3.connect(tmp_path / "sweep.db")) as connection, connection:
        connection.execute(edit)
    with pytest.raises(InputError, match="storage must be a database that can be used") as found:
        Queue(f"sqlite:///{tmp_path / 'sweep.db'}", tmp_path.name, reading=reading)
    assert "\n" not in str(found.value)


def test_tables_that_optuna_cannot_read_are_one_line(tmp_path) -> None:
    made = make_queue(tmp_path)
    claim = made.claim("me")
    assert made.finish(claim, ROWS, [0.5, 0.5])
    made.dispose()
    with closing(sqlite3.connect(tmp_path / "sweep.db")) as connection, connection:
        connection.execute("UPDATE trial_values SET objective = 7 WHERE objective = 1")
    again = Queue(f"sqlite:///{tmp_path / 'sweep.db'}", tmp_path.name, reading=True)
    with pytest.raises(DataError, match="is damaged"):
        again.slots()
    again.dispose()
