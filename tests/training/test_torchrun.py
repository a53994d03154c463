"""torchrun: a rank is killed at random moments, all are started again, and the end is that of a run left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import torchrun_script
from learning import same_state
from reconbound import FisherAccountant

KILLS = int(os.environ.get("KILLS", "2"))  # KILLS=10 for the large form
LIMIT = 180  # seconds for a start
pytestmark = pytest.mark.slow


def start(folder: Path, steps: int, restarts: int) -> subprocess.Popen[str]:
    """Starts torchrun on two ranks: no port is fixed, and the processes are a group of their own."""
    helpers = str(Path(torchrun_script.__file__).parent)
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, torchrun_script.__file__]
    paths = os.pathsep.join(p for p in (helpers, os.environ.get("PYTHONPATH", "")) if p)
    # a store that torchrun keeps from one attempt to the next still has the addresses of ranks that have ended
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    own = {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [*command, str(folder), str(steps)],
            env={**os.environ, **own, **fresh},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def stop(job: subprocess.Popen[str], folder: Path) -> None:
    """Ends torchrun and its ranks, if they are still there."""
    job.terminate()  # torchrun ends its ranks, which are in groups of their own
    with suppress(subprocess.TimeoutExpired):
        job.wait(40)
    pids = [int(text) for path in folder.glob("pid-*") if (text := path.read_text()) and job.returncode is None]
    for pid in [*pids, job.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


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


def wait_for_ranks(folder: Path, job: subprocess.Popen[str], killed: set[int]) -> list[int]:
    until = time.monotonic() + LIMIT
    while not (pids := running(folder)) or killed & set(pids):
        assert job.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < until, (folder / "output.txt").read_text()
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
            assert job.poll() is None, "it ended before its kill: make it longer"
            one = rng.choice(pids)
            with suppress(ProcessLookupError):  # the attempt has failed by itself
                os.kill(one, signal.SIGKILL)
            killed |= set(pids)
            places.append(saved_steps(tmp_path))
        with suppress(subprocess.TimeoutExpired):
            job.wait(LIMIT)
        assert job.poll() == 0, (tmp_path / "output.txt").read_text()
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
        assert job.wait(LIMIT) != 0
    finally:
        stop(job, tmp_path)
    assert "SIGKILL" in (tmp_path / "output.txt").read_text()
    assert running(tmp_path) == []
