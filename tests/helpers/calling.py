"""Shared by the tests of the command line: options, a small table, and the form of a refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SGD = ["--noise-multiplier", "1", "--sample-rate", "0.01", "--steps", "1000"]
OUTPUT = ["--output-perturbation", "--loss", "logistic", "--records", "12665", "--l2", "0.01", "--noise-std", "0.01"]
NAMES = ["theorem1", "theorem1_paper", "corners", "lecam_unbiased", "lecam", "rate_distortion"]
QUICK = ["--steps", "4", "--runs", "2", "--sample-rate", "0.1", "--seed", "1", "--lr", "0.5", "--model", "linear"]


def floors(found):
    return {bound["name"]: bound for bound in found["bounds"]}


def check_refused(status, out, err):
    assert status == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("reconbound: ")
    assert "Traceback" not in err


def write_people(path: Path, records: int = 60) -> Path:
    rng = np.random.default_rng(0)
    lines = ["age,hours,job,<b>pay</b>"]
    for _ in range(records):
        age, hours = int(rng.integers(18, 90)), int(rng.integers(1, 80))
        lines.append(f"{age},{hours},{rng.choice(['clerk', 'cook'])},{'high' if age + hours > 90 else 'low'}")
    path.write_text("\n".join(lines) + "\n")
    return path
