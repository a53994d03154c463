"""An audit killed at random moments and run again gives the same files, byte for byte, as one that was not."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

import auditing
import small_folders
from killing import kill, start_reporting
from reconbound.auditing.run import run_audit
from reconbound.cli import app as cli
from reconbound.report.folder import MODEL, PLAN, PUBLIC_REPORT, REPORT, RUN

KILLS = int(os.environ.get("KILLS", "5"))
pytestmark = pytest.mark.slow


def start(folder: Path):
    return start_reporting(auditing.slow, str(folder))


def test_kills_give_the_same_report(tmp_path) -> None:
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
    check_same(killed, whole)


def check_same(killed: Path, whole: Path) -> None:
    auditing.assert_same_leakage(killed, whole)
    for name in (MODEL, PLAN, REPORT, PUBLIC_REPORT, RUN):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in whole.iterdir())


@pytest.mark.parametrize("kind", small_folders.AUDITS[1:])
def test_kills_of_other_audits_give_the_same_report(kind, tmp_path) -> None:
    """With a private category, of texts, and by a model without derivatives; half a second each."""
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(kind)
    small_folders.write_data(tmp_path)
    assert cli.run(small_folders.audit_words(tmp_path, "whole", kind)) == 0
    words = small_folders.audit_words(tmp_path, "killed", kind)
    for _ in range(3):
        process, _ = start_reporting(auditing.slow_command, words)
        time.sleep(rng.uniform(0.0, 0.35))
        kill(process)
    process, pipe = start_reporting(auditing.slow_command, words)
    assert pipe.poll(240)
    assert pipe.recv() == "done"
    process.join(10)
    check_same(killed, whole)
