"""Workers that take many trials at a time: their leases, errors, interruptions and kills."""

from __future__ import annotations

import time
from dataclasses import replace

import optuna
import pytest
from test_sweep import Searched
from test_sweep_kills import check, count_finishes, expected  # noqa: F401

import sweep_stub
from reconbound.sweep import Sweep, run, sweep
from reconbound.sweep.crowd import Hearts
from reconbound.sweep.store import ERRORS, Store
from reconbound.sweep.worker import Heart, LeaseLost

pytestmark = pytest.mark.usefixtures("forked_helpers")


class Crowd(Searched):
    """Searched, many at once."""

    def train_all(self, settings, folders, tell):
        self.crowds = [*getattr(self, "crowds", []), len(settings)]
        tell(range(len(settings)), 0)
        return [self(setting, folder, lambda done: None) for setting, folder in zip(settings, folders, strict=True)]


def test_a_worker_takes_so_many_and_errors_are_tried_again(tmp_path) -> None:
    class Fails(Crowd):
        def train_all(self, settings, folders, tell):
            found = super().train_all(settings, folders, tell)
            if len(self.crowds) < ERRORS:
                raise RuntimeError("out of memory")
            return found

    stub = Fails()
    space = {"lr": [0.1, 0.2, 0.3, 0.4, 0.5], "noise_multiplier": [1.0]}
    rows = sweep(Sweep("stub", tmp_path / "a", space, (5,), seed=1, together=3), make_train=lambda _: stub, show=False)
    assert [row["lr"] for row in rows] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert stub.crowds == [3, 3, 3, 2]

    class Always(Crowd):
        def train_all(self, settings, folders, tell):
            super().train_all(settings, folders, tell)
            raise RuntimeError("out of memory")

    stub = Always()
    config = Sweep("stub", tmp_path / "b", space, (5,), seed=1, together=5)
    assert sweep(config, make_train=lambda _: stub, show=False) == []
    assert stub.crowds == [5] * ERRORS
    assert run.stored(tmp_path / "b")[1]["error"] == "RuntimeError: out of memory"


def test_an_interrupted_worker_gives_all_its_trials_back_at_once(tmp_path) -> None:
    class Stopped(Crowd):
        def train_all(self, settings, folders, tell):
            raise KeyboardInterrupt

    config = Sweep("stub", tmp_path, {"lr": [0.1, 0.2], "noise_multiplier": [1.0]}, (5,), seed=1, together=2, lease=999)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, make_train=lambda _: Stopped(), show=False)
    store = run.open_store(config)
    assert [lease.claims for lease in store.leases().values()] == [0, 0]  # nobody died on them
    store.dispose()
    stub = Crowd()
    assert len(sweep(config, make_train=lambda _: stub, show=False)) == 2
    assert stub.crowds == [2]


def test_a_search_asks_for_many_and_does_not_train_a_setting_again(tmp_path) -> None:
    stub = Crowd()
    space = {"lr": [0.1, 0.3], "noise_multiplier": [0.5, 1.0]}
    config = Sweep("stub", tmp_path, space, (5,), seed=1, search="tpe", trials=16, together=4)
    sweep(config, make_train=lambda _: stub, show=False)
    assert run.stored(tmp_path)[1]["finished"] == 16
    assert sum(stub.crowds) < 16


def test_steps_are_told_of_the_trial_that_does_them(tmp_path, monkeypatch) -> None:
    """The third trial has the first one's setting, so only the fourth, second of its crowd, is trained."""
    rates, told = [0.1, 0.2, 0.1, 0.3], []
    monkeypatch.setattr(run, "ask", lambda store, config, claim: noted(store, claim, rates[claim.number]))
    monkeypatch.setattr(Hearts, "tell", lambda self, which, done: told.append(list(which)))

    def noted(store, claim, lr) -> dict:
        store.note(claim, "setting", {"lr": lr, "noise_multiplier": 1.0})
        return {"lr": lr, "noise_multiplier": 1.0}

    space = {"lr": [0.1, 0.2, 0.3], "noise_multiplier": [1.0]}
    config = Sweep("stub", tmp_path, space, (5,), seed=1, search="tpe", trials=4, together=2)
    stub = Crowd()
    rows = sweep(config, make_train=lambda _: stub, show=False)
    assert [row["lr"] for row in rows] == [0.1, 0.2, 0.3]
    assert stub.crowds == [2, 1]
    assert told == [[0, 1], [1]]


def test_the_hearts_note_the_steps_of_the_trials_that_did_them() -> None:
    hearts = Hearts(None, [None] * 3)
    hearts.tell([1, 2], 5)
    hearts.tell([2], 7)
    assert [heart.done for heart in hearts.each] == [0, 5, 7]


def test_leases_that_others_took_are_theirs(tmp_path) -> None:
    config = sweep_stub.config(tmp_path, None)
    tmp_path.chmod(0o700)
    store = run.open_store(config)
    run.begin(store, config, sweep_stub.Stub())
    claims = [store.claim("me") for _ in range(2)]
    with Hearts(store, claims) as hearts:
        hearts.tell([0], 5)
        assert [heart.done for heart in hearts.each] == [5, 0]
        hearts.each[0].lost = True
        hearts.tell([1], 6)
        hearts.each[1].lost = True
        with pytest.raises(LeaseLost):
            hearts.tell([0, 1], 7)
    store.dispose()


def test_no_heart_beats_after_its_claims_are_let_go() -> None:
    """A beat under way, as of a slow database, is waited for: it would take back a lease that was given back."""

    class Slow:
        lease, begun, ended = 0.04, 0, 0

        def beat(self, claim, done) -> bool:
            self.begun += 1
            time.sleep(0.3)
            self.ended += 1
            return True

    store = Slow()
    with Hearts(store, [None]):
        while not store.begun:
            time.sleep(0.01)
    assert store.ended == store.begun == 1


def test_an_error_with_one_trials_rows_is_its_own(tmp_path, monkeypatch) -> None:
    def values(config, rows):
        if rows[0]["exact_max"] > 2:
            raise ValueError("no such number")
        return [1.0, 1.0]

    monkeypatch.setattr(run, "values_of", values)
    stub = Crowd()
    space = {"noise_multiplier": [0.5, 2.0, 1.0], "lr": [0.1]}
    config = Sweep("stub", tmp_path, space, (5,), seed=1, together=3)
    rows = sweep(config, make_train=lambda _: stub, show=False)
    assert [row["noise_multiplier"] for row in rows] == [0.5, 1.0]
    assert stub.crowds == [3, *[1] * (ERRORS - 1)]
    assert run.stored(tmp_path)[1]["error"] == "ValueError: no such number"


@pytest.mark.parametrize("where", ["claim", "start"])
def test_interrupted_before_the_training_nothing_is_held(tmp_path, monkeypatch, where) -> None:
    """Ctrl-C between two claims, and while the hearts begin to beat: the next worker waits for no lease."""
    config = Sweep("stub", tmp_path, {"lr": [0.1, 0.2, 0.3], "noise_multiplier": [1.0]}, (5,), seed=1, lease=999)
    config = replace(config, together=3)
    calls, kind = [], Store if where == "claim" else Heart
    name = "claim" if where == "claim" else "__enter__"
    real = getattr(kind, name)

    def third(self, *args):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, third)
        with pytest.raises(KeyboardInterrupt):
            sweep(config, make_train=lambda _: Crowd(), show=False)
    if where == "start":
        for heart in calls[:2]:
            heart._thread.join(10)
            assert not heart._thread.is_alive()
    stub = Crowd()
    assert len(sweep(config, make_train=lambda _: stub, show=False)) == 3
    assert stub.crowds == [3]


def test_a_trial_that_another_has_is_not_given_up_for_it(tmp_path) -> None:
    config = sweep_stub.config(tmp_path, None)
    tmp_path.chmod(0o700)
    store = run.open_store(config)
    run.begin(store, config, sweep_stub.Stub())
    mine = store.claim("me")
    store.expire("me")
    theirs = store.claim("other")
    assert mine.trial_id == theirs.trial_id
    store.fail(mine, "too late")
    assert store.finish(theirs, [{"steps": 5}], [1.0, 1.0], 5)
    store.dispose()


def test_a_trial_is_closed_only_when_it_is_finished(tmp_path, monkeypatch) -> None:
    """The database goes away in the middle of finishing, and the worker with it: the lease runs out as any other."""
    config = sweep_stub.config(tmp_path, None)
    tmp_path.chmod(0o700)
    store = run.open_store(config)
    run.begin(store, config, sweep_stub.Stub())
    claim = store.claim("me")

    def away(*_):
        raise optuna.exceptions.StorageInternalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store.storage, "set_trial_state_values", away)
        with pytest.raises(optuna.exceptions.StorageInternalError):
            store.finish(claim, [{"steps": 5}], [1.0, 1.0], 5)
    assert store.leases()[claim.trial_id].until < store.now() + 2 * config.lease
    store.dispose()
