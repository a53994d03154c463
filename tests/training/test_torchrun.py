"""torchrun: a rank is killed at random moments, all are started again, and the end is that of a run left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrun_script
from learning import same_state
from many_ranks import start_torchrun, stop_torchrun
from reconbound import FisherAccountant

KILLS = int(os.environ.get("KILLS", "2"))  # KILLS=10 for the large form
LIMIT = 180  # seconds for a start
pytestmark = pytest.mark.slow


def start(folder: Path, steps: int, restarts: int) -> Any:
    """Starts torchrun on two ranks; no port is fixed."""
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    return start_torchrun([*options, torchrun_script.__file__, str(folder), str(steps)], folder, fork=True)


def stop(job: Any, folder: Path) -> None:
    stop_torchrun(job, lambda: [int(text) for path in folder.glob("pid-*") if (text := path.read_text())])


def errors(folder: Path) -> str:
    return (folder / "errors.txt").read_text()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(folder: Path) -> list[int]:
    """Returns the processes of the newest attempt once both are there and alive; none otherwise.

    An attempt may fail by itself on a busy machine: its ranks do not find each other in time.
    """
    attempts = sorted({int(path.name.split("-")[1]) for path in folder.glob("pid-*")})
    texts = [path.read_text() for path in folder.glob(f"pid-{attempts[-1]}-*")] if attempts else []
    pids = [int(text) for text in texts if text]
    return pids if len(pids) == 2 and all(map(is_alive, pids)) else []


def wait_for_ranks(folder: Path, job: Any, killed: set[int]) -> list[int]:
    until = time.monotonic() + LIMIT
    while not (pids := running(folder)) or killed & set(pids):
        assert job.exitcode is None, errors(folder)
        assert time.monotonic() < until, errors(folder)
        time.sleep(0.02)
    return pids


def saved_steps(folder: Path) -> int:
    from test_kills import newest_step

    return newest_step(folder / "checkpoints") if (folder / "checkpoints").exists() else -1


def test_ranks_killed_at_random_moments_change_nothing(tmp_path) -> None:
    steps, rng, places, killed = 60 + 15 * KILLS, random.Random(0), [], set[int]()
    job = start(tmp_path, steps, restarts=KILLS + 3)
    try:
        for _ in range(KILLS):
            pids = wait_for_ranks(tmp_path, job, killed)
            target = max([0, *places]) + rng.randrange(steps // (KILLS + 1))  # so that kills fall all over the run
            while saved_steps(tmp_path) < target and all(map(is_alive, pids)):
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 0.3))
            assert job.exitcode is None, "it ended before its kill: make it longer"
            one = rng.choice(pids)
            with suppress(ProcessLookupError):  # the attempt has failed by itself
                os.kill(one, signal.SIGKILL)
            killed |= set(pids)
            places.append(saved_steps(tmp_path))
        job.join(LIMIT)
        assert job.exitcode == 0, errors(tmp_path)
    finally:
        stop(job, tmp_path)
    assert places == sorted(places)  # never back behind what was saved
    assert len(set(places)) > KILLS // 2
    assert places[-1] < steps
    assert len([*tmp_path.glob("pid-*-0")]) > KILLS
    undisturbed = torchrun_script.learner(None).fit(steps)
    killed = torchrun_script.learner(tmp_path / "checkpoints").fit(steps)  # in one process, from the last checkpoint
    assert same_state(undisturbed, killed)
    assert undisturbed.history == killed.history
    assert len(killed.history) == steps
    assert undisturbed.accountant is not None
    ledger = FisherAccountant.load(tmp_path / "ledger.safetensors")
    for name, value in undisturbed.accountant.state().items():
        assert torch.equal(ledger.state()[name], value), name
    print("killed at steps", places)


def test_a_job_without_restarts_ends(tmp_path) -> None:
    job = start(tmp_path, 10_000, restarts=0)
    try:
        os.kill(wait_for_ranks(tmp_path, job, set())[1], signal.SIGKILL)
        job.join(LIMIT)
        assert job.exitcode not in (0, None)
    finally:
        stop(job, tmp_path)
    assert any(text in errors(tmp_path) for text in ("SIGKILL", "has lost another rank"))  # whichever ends first
    assert running(tmp_path) == []
