"""An audit killed at random moments and run again gives the same files, byte for byte, as one that was not."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

import auditing
from reconbound.auditing.run import audit
from reconbound.report.folder import MODEL, PLAN, PUBLIC_REPORT, REPORT, RUN

KILLS = 5


@pytest.fixture(autouse=True)
def _importable(monkeypatch) -> None:
    """The fork server loads auditing before it knows this process's path (a bug of Python's until 3.12.8)."""
    here = Path(__file__).resolve().parents[1] / "helpers"
    paths = [str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))


def start(folder: Path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["auditing"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=auditing.slow, args=(str(folder), there), daemon=True)
    process.start()
    there.close()
    assert here.poll(60)
    assert here.recv() == "ready"
    return process, here


def test_five_kills_give_the_same_report(tmp_path) -> None:
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(5)
    audit(auditing.people(), auditing.options(), whole, show=False)
    for _ in range(KILLS):
        process, _ = start(killed)
        time.sleep(rng.uniform(0.0, 0.35))
        assert process.is_alive(), "the audit ended before its kill: make it longer"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert not (killed / REPORT).exists()
    process, told = start(killed)
    assert told.poll(240)  # a busy machine needs more time
    assert told.recv() == "done"
    process.join(10)
    auditing.assert_same_leakage(killed, whole)
    for name in (MODEL, PLAN, REPORT, PUBLIC_REPORT, RUN):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in whole.iterdir())
