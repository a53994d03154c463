"""reconbound.audit gives what the command gives, from a file, a DataFrame or a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import reconbound as rb
from reconbound._internal.checks import InputError
from reconbound.auditing.options import default_options
from reconbound.cli.app import run
from reconbound.report.folder import read_audit

RANGES = {"age": (0, 100), "hours": (0, 80)}
SHORT = {"steps": 6, "runs": 2, "model": "linear", "seed": 3, "noise_multiplier": 1.0}


@pytest.fixture(scope="module")
def people() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    jobs = [None if k % 9 == 0 else ["nurse", "clerk"][k % 2] for k in range(60)]
    return pd.DataFrame(
        {
            "age": rng.integers(18, 90, 60),
            "job": jobs,
            "hours": np.where(rng.random(60) < 0.1, np.nan, rng.uniform(1, 70, 60)),
            "income": ["low" if k % 3 else "high" for k in range(60)],
        }
    )


def measured(folder: Path) -> tuple[dict[str, object], list[torch.Tensor]]:
    facts, leakage = read_audit(folder)
    tensors = [value for name, value in vars(leakage).items() if isinstance(value, torch.Tensor) and name != "names"]
    assert len(tensors) > 3
    return facts.guarantee, tensors


def check_same(one: Path, other: Path) -> None:
    (first, tensors), (second, others) = measured(one), measured(other)
    assert first == second
    for a, b in zip(tensors, others, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.fixture(scope="module")
def command(people: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    people.to_csv(folder / "people.csv", index=False)
    words = ["audit", str(folder / "people.csv"), "--target", "income", "--private", "age,hours", "--quiet"]
    words += ["--range", "age=0:100", "--range", "hours=0:80", "--out", str(folder / "out")]
    words += [word for name, value in SHORT.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run(words) == 0
    return folder / "out"


@pytest.mark.parametrize("kind", ["frame", "parquet", "csv", "dataset"])
def test_audit_equals_the_command(kind, people, command, tmp_path) -> None:
    chosen = {"target": "income", "private": ["age", "hours"], "ranges": RANGES}
    data: object = people
    if kind == "parquet":
        people.to_parquet(tmp_path / "people.parquet")
        data = tmp_path / "people.parquet"
    elif kind == "csv":
        data = command.parent / "people.csv"
    elif kind == "dataset":
        data, chosen = rb.load_dataset(people, **chosen), {}
    found = rb.audit(data, **chosen, out=tmp_path / "out", options=SHORT)
    assert found.folder == tmp_path / "out"
    assert found.report.is_file()
    assert found.public_report.is_file()
    assert found.headline
    check_same(found.folder, command)


def test_finished_audit_is_not_repeated(people, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = rb.load_dataset(people, target="income", ranges=RANGES)
    options = default_options(dataset, **{**SHORT, "runs": 1})
    found = rb.audit(dataset, options=options)
    assert found.folder == Path("audit-table")
    before = found.report.stat().st_mtime_ns
    assert rb.audit(dataset, options=options) == found
    assert found.report.stat().st_mtime_ns == before
    rb.audit(dataset, options=options, fresh=True)
    assert found.report.stat().st_mtime_ns > before


def test_reading_options_are_refused_for_a_dataset(people) -> None:
    dataset = rb.load_dataset(people, target="income", ranges=RANGES)
    with pytest.raises(InputError, match="target is for data that are still to be read"):
        rb.audit(dataset, target="income")
    with pytest.raises(InputError, match="data must be a path"):
        rb.audit(7)  # type: ignore[arg-type]
