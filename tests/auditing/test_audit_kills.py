"""An audit killed at random moments and run again gives the same files, byte for byte, as one that was not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import auditing
from killing import kill, start_reporting
from reconbound.auditing.run import run_audit
from reconbound.report.folder import MODEL, PLAN, PUBLIC_REPORT, REPORT, RUN

KILLS = 5
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_helpers")]


def start(folder: Path):
    return start_reporting(["auditing"], auditing.slow, str(folder))


def test_five_kills_give_the_same_report(tmp_path) -> None:
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(5)
    run_audit(auditing.people(), auditing.options(), whole, show=False)
    for _ in range(KILLS):
        process, _ = start(killed)
        time.sleep(rng.uniform(0.0, 0.35))
        kill(process)
    assert not (killed / REPORT).exists()
    process, pipe = start(killed)
    assert pipe.poll(240)  # a busy machine needs more time
    assert pipe.recv() == "done"
    process.join(10)
    auditing.assert_same_leakage(killed, whole)
    for name in (MODEL, PLAN, REPORT, PUBLIC_REPORT, RUN):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in whole.iterdir())
