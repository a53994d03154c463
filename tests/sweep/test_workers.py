"""Workers that take several trials at a time: errors, interruptions, and what they store of each trial."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_sweep import Searched

from reconbound.sweep import Range, Sweep, run, sweep
from reconbound.sweep.queue import ERRORS, Heartbeats, Queue


class Crowd(Searched):
    """Searched, many at once."""

    def train_all(self, settings, folders, tell):
        self.crowds = [*getattr(self, "crowds", []), len(settings)]
        tell(range(len(settings)), 0)
        return [self(setting, folder, lambda done: None) for setting, folder in zip(settings, folders, strict=True)]


def test_a_worker_takes_n_settings_and_errors_are_tried_again(tmp_path) -> None:
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
    assert stub.crowds == [3, 2, 3, 2]

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

    config = Sweep("stub", tmp_path, {"lr": [0.1, 0.2], "noise_multiplier": [1.0]}, (5,), seed=1, together=2, grace=999)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, make_train=lambda _: Stopped(), show=False)
    queue = run.open_queue(config)
    attempts = [trial for slot in queue.slots() for trial in slot.attempts]
    assert [(trial.state.name, trial.user_attrs["released"]) for trial in attempts] == [("FAIL", "interrupted")] * 2
    queue.dispose()
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


def test_steps_are_reported_for_the_trial_that_does_them(tmp_path, monkeypatch) -> None:
    """The third trial has the first one's setting, so only the fourth, second of its crowd, is trained."""
    rates, reported = [0.1, 0.2, 0.1, 0.3], []
    monkeypatch.setattr(run, "choose_setting", lambda queue, config, claim: choose(queue, claim, rates[claim.slot]))
    monkeypatch.setattr(Heartbeats, "report", lambda self, which, done: reported.append(list(which)))

    def choose(queue, claim, lr):
        setting = {"lr": lr, "noise_multiplier": 1.0}
        queue.set_fact(claim, "setting", setting)
        return replace(claim, setting=setting)

    space = {"lr": [0.1, 0.2, 0.3], "noise_multiplier": [1.0]}
    config = Sweep("stub", tmp_path, space, (5,), seed=1, search="tpe", trials=4, together=2)
    stub = Crowd()
    rows = sweep(config, make_train=lambda _: stub, show=False)
    assert [row["lr"] for row in rows] == [0.1, 0.2, 0.3]
    assert stub.crowds == [2, 1]
    assert reported == [[0, 1], [1]]


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
def test_interrupted_before_the_training_nothing_is_kept(tmp_path, monkeypatch, where) -> None:
    """Ctrl-C between two claims, and while the heartbeats begin: the next worker waits for no grace period."""
    space = {"lr": [0.1, 0.2, 0.3], "noise_multiplier": [1.0]}
    config = Sweep("stub", tmp_path, space, (5,), seed=1, grace=999, together=3)
    calls, owner, name = [], Queue if where == "claim" else Heartbeats, "claim" if where == "claim" else "__enter__"
    real = getattr(owner, name)

    def interrupted(self, *args):
        calls.append(self)
        if len(calls) == 3 or where == "start":
            raise KeyboardInterrupt
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(config, make_train=lambda _: Crowd(), show=False)
    stub = Crowd()
    assert len(sweep(config, make_train=lambda _: stub, show=False)) == 3
    assert stub.crowds == [3]


def test_a_search_continues_the_setting_of_a_worker_that_died(tmp_path) -> None:
    class Interrupted(Searched):
        def __call__(self, setting, folder, tell):
            super().__call__(setting, folder, tell)
            raise KeyboardInterrupt

    stub = Interrupted()
    space = {"noise_multiplier": Range(0.5, 2.0), "lr": Range(0.1, 1.0)}
    config = Sweep("stub", tmp_path, space, (5,), seed=1, search="tpe", trials=1)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, make_train=lambda _: stub, show=False)
    (row,) = sweep(config, make_train=lambda _: Searched(), show=False)
    assert [{name: row[name] for name in space}] == stub.asked
