"""One small audit and one small sweep from the command line, for tests that copy and spoil them."""

from __future__ import annotations

from pathlib import Path

import calling
import injecting

SWEEP = ["--limit", "60", "--grid", "noise_multiplier=0.5,1", "--grid", "lr=0.5", "--model", "linear", "--steps", "3,6"]


def audit_words(base: Path, out: str) -> list[str]:
    options = ["--target", "<b>pay</b>", "--range", "age=0:120", "--range", "hours=0:100", *calling.QUICK]
    return ["audit", str(base / "people.csv"), *options, "--quiet", "--out", str(base / out)]


def sweep_words(base: Path, out: str) -> list[str]:
    return ["sweep", "digits", *SWEEP, "--seed", "1", "--quiet", "--out", str(base / out)]


def make(base: Path) -> Path:
    """The folder with people.csv, a finished audit in audit/ and a finished sweep in sweep/."""
    calling.write_people(base / "people.csv")
    for words in (audit_words(base, "audit"), sweep_words(base, "sweep")):
        done = injecting.ended(words)
        assert done.status == 0, done.err
    return base
