"""A run that is killed again and again ends exactly as if it had not been."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

import kill_run
from killing import kill, start_reporting
from learning import learner, same_state

KILLS = int(os.environ.get("KILLS", "6"))  # KILLS=20 for the large form: two seconds each
pytestmark = pytest.mark.slow


def start(folder: Path, call: str):
    return start_reporting(kill_run.in_process, str(folder), call)


def test_kills_at_random_moments_change_nothing(tmp_path) -> None:
    """SIGKILL at random moments, several in a row, while the run goes on; then it is left to end."""
    call, rng, places, longest = "fit 200", random.Random(0), [], 0.4
    for _ in range(KILLS):
        process, _ = start(tmp_path, call)
        time.sleep(rng.uniform(0.0, longest))
        kill(process)
        places.append(newest_step(tmp_path))
        longest *= 1.4 if places[-1] <= 0 or places[-2:-1] == places[-1:] else 0.9  # a busy machine needs more time
    assert places == sorted(places)  # never back behind what was saved
    assert len(set(places)) > KILLS // 4  # the kills fell all over the run
    assert places[-1] < 200
    process, pipe = start(tmp_path, call)
    process.join(120)
    assert pipe.recv() == "done"
    undisturbed, killed = kill_run.run(None, call), kill_run.run(tmp_path, call)
    assert same_state(undisturbed, killed)
    assert undisturbed.history == killed.history
    assert len(killed.history) == 200
    assert_same_optimizer(undisturbed, killed)


def test_repeated_runs_resume_run_by_run(tmp_path) -> None:
    call, rng = "repeat 30", random.Random(1)
    for _ in range(4):
        process, _ = start(tmp_path, call)
        time.sleep(rng.uniform(0.05, 0.35))
        kill(process)
    undisturbed, killed = kill_run.run(None, call), kill_run.run(tmp_path, call)
    assert killed.accountant.runs == 4
    assert same_state(undisturbed, killed)
    assert undisturbed.history == killed.history
    assert [(h["run"], h["step"]) for h in killed.history] == [(r, s) for r in range(4) for s in range(1, 31)]


def newest_step(folder: Path) -> int:
    """Read without the library: the header is JSON."""
    steps = [-1]
    for path in folder.glob("checkpoint-*.safetensors"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        steps.append(json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["reconbound"])["step"])
    return max(steps)


def assert_same_optimizer(a, b) -> None:
    one, other = a.optimizer.state_dict(), b.optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]
    for key, state in one["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(other["state"][key][name], value, rtol=0, atol=0)
    assert a.schedule.state_dict() == b.schedule.state_dict()


@pytest.mark.parametrize("every", [1, 4, 100])
def test_stopping_between_steps(tmp_path, every: int, monkeypatch) -> None:
    """An exception in the evaluation, a stop from the keyboard in a step: the same learner and a new one go on."""
    whole = learner().fit(10)

    def once(model, fail=[5, 6]):  # noqa: B006
        if fail and one.step == fail[0]:
            fail.pop(0)
            raise KeyboardInterrupt
        return {}

    one = learner(checkpoint=tmp_path, every=every, evaluate=once, evaluate_every=1)
    with pytest.raises(KeyboardInterrupt):
        one.fit(10)
    with pytest.raises(KeyboardInterrupt):
        one.fit(10)
    monkeypatch.setattr(one, "_restart", lambda original=one._restart: (original(), patched(one)))
    with pytest.raises(KeyboardInterrupt):
        one.fit(10)
    monkeypatch.undo()
    one.fit(10)
    assert same_state(one, whole)


def patched(one) -> None:
    """The next optimizer step is interrupted once it has been taken."""
    step = one.optimizer.step

    def interrupted(*args, **kwargs):
        one.optimizer.step = step
        step(*args, **kwargs)
        raise KeyboardInterrupt

    one.optimizer.step = interrupted


def test_learner_without_folder_refuses_to_continue_mid_step() -> None:
    from reconbound.training.private_sgd import TrainingError

    one = learner()
    patched(one)
    with pytest.raises(KeyboardInterrupt):
        one.fit(4)
    with pytest.raises(TrainingError, match="in the middle of a step"):
        one.fit(4)


def test_errors_before_a_step_keep_the_ledger() -> None:
    whole, one = learner(budget=1e6).fit(4), learner(budget=1e6)
    sampler, calls = one.sampler, []

    class Fails:
        sample_rate, divisor, steps_per_epoch, records, name = sampler.sample_rate, sampler.divisor, 4.0, 24, "poisson"

        def batch(self, seed: int, step: int):
            calls.append(step)
            if calls == [0, 1]:
                raise RuntimeError("out of range")
            return sampler.batch(seed, step)

    one.sampler = Fails()
    with pytest.raises(RuntimeError, match="out of range"):
        one.fit(4)
    assert one.step == 1
    assert same_state(one.fit(4), whole)
