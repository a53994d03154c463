"""Large Parquet tables: what is read in batches is what is read whole, and what cannot be is refused."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from reconbound import PrivateSGD, Settings
from reconbound._internal.checks import DataError, DataShown, InputError
from reconbound.data import Dataset, load_dataset, streaming

ROWS = 700


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every table large, and batches small."""
    monkeypatch.setattr(streaming, "MOST_CELLS", 0)
    monkeypatch.setattr(streaming, "BATCH", 64)


def table(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    income = rng.lognormal(10, 1, ROWS)
    age = rng.integers(17, 90, ROWS)
    return pd.DataFrame({
        "age": age,
        "income": np.where(rng.random(ROWS) < 0.1, np.nan, income),
        "hours": rng.normal(40, 10, ROWS).astype(np.float32),
        "members": rng.integers(0, 2, ROWS),
        "job": rng.choice(["clerk", " cook", "driver", "?"], ROWS),
        "town": pd.Categorical(rng.choice(["Bern", "Basel", None], ROWS)),
        "code": [f"x{k}" for k in range(ROWS)],
        "member": rng.random(ROWS) < 0.5,
        "nothing": np.full(ROWS, np.nan),
        "one": "same",
        "answer": np.where(age + rng.normal(0, 10, ROWS) > 50, "yes", "no"),
        "count": rng.integers(0, 5, ROWS),
        "amount": income * rng.random(ROWS),
    })  # fmt: skip


def both(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Dataset, Dataset]:
    """Returns the table read whole, and read in batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = load_dataset(path, **options)
        monkeypatch.setattr(streaming, "MOST_CELLS", 0)
        monkeypatch.setattr(streaming, "BATCH", 64)
        return whole, load_dataset(path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"target": "answer"},
        {"target": "count", "private": "age,job", "ranges": {"age": (20, 80)}, "units": {"age": "years"}},
        {"target": "amount", "test_share": 0.1, "limit": 300, "seed": 4},
        {"target": "amount", "ranges": {"amount": (0, 1e5)}, "drop": ["code", "nothing"], "test_share": 0.0},
        {"target": "member", "private": "town,income", "categories": "members"},
    ],
)
def test_batches_give_the_same_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    table().to_parquet(tmp_path / "people.parquet", row_group_size=100)
    whole, parts = both(tmp_path / "people.parquet", monkeypatch, **options)
    assert isinstance(parts.inputs, np.memmap)
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        one, two = getattr(whole, name), getattr(parts, name)
        assert one.dtype == two.dtype, name
        assert np.array_equal(one, two), name
    for name in ("name", "kind", "features", "task", "class_names", "target", "vocabulary"):
        assert getattr(whole, name) == getattr(parts, name), name
    assert parts.record_names is not None
    assert list(parts.record_names) == list(whole.record_names or ())
    # the number of different texts is not counted to the end, and hints are about the first batch
    ours, theirs = ([n for n in d.notes if "different" not in n and "(in the first" not in n] for d in (parts, whole))
    assert ours == theirs
    assert parts.summary() == whole.summary()


def test_hints_say_that_they_are_about_the_first_rows(tmp_path: Path, batches: None) -> None:
    pd.DataFrame({"id": range(ROWS), "x": np.random.default_rng(0).random(ROWS), "y": [0, 1] * (ROWS // 2)}).to_parquet(
        tmp_path / "t.parquet"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_dataset(tmp_path / "t.parquet", target="y")
    said = [str(one.message) for one in caught if "identifier" in str(one.message)]
    assert len(said) == 1
    assert "id: 64 whole numbers, all different" in said[0]
    assert said[0].endswith("(in the first 64 rows)")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("column", "values", "options", "match"),
    [
        ("x", [1.0] * 100 + [np.inf] + [2.0] * 99, {}, "row 100, column 'x': inf is not a finite number"),
        ("y", [0.0] * 150 + [np.nan] + [1.0] * 49, {}, "row 150, column 'y': the target is missing"),
        ("y", ["a", "b"] * 99 + [None, "a"], {}, "row 198, column 'y': the target is missing"),
        ("y", ["a"] * 200, {}, "the target is a in every row"),
        ("y", [f"t{k}" for k in range(200)], {}, "too many for a private category or a target"),
        ("z", [f"{k}.5" for k in range(200)], {}, "written as text"),
        ("z", ["$1,000", "$2,000"] * 100, {}, "written as text"),
        ("z", ["a", "b"] * 100, {"ranges": {"z": (0, 1)}}, "has a range"),
        ("z", [f"t{k}" for k in range(200)], {"private": "z"}, "too many for a private category"),
        ("z", [np.nan] * 200, {"private": "z"}, "every value is missing"),
        ("z", pd.date_range("2020-01-01", periods=200), {}, "convert it, or leave it out by --drop 'z'"),
        ("z", [1, None] * 100, {"categories": "z"}, "cannot be a category here"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, batches: None, column: str, values: Any, options: Any, match: str
) -> None:
    frame = pd.DataFrame({"x": np.linspace(0, 1, 200), "y": [0, 1] * 100})
    frame.assign(**{column: values}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises((DataError, DataShown), match=match):
        load_dataset(tmp_path / "t.parquet", target="y", **options)


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_and_full_disks_are_refused(
    tmp_path: Path, batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    table().to_parquet(path)
    with monkeypatch.context() as patch:
        patch.setattr(streaming.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
        with pytest.raises(DataError, match="TMPDIR"):
            load_dataset(path, target="answer")
        patch.setattr(streaming.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**9}))

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(streaming.tempfile, "TemporaryFile", full)
        with pytest.raises(DataError, match="is full"):
            load_dataset(path, target="answer")
    with pytest.raises(InputError, match="target"):
        load_dataset(path)
    content = bytearray(path.read_bytes())
    content[200:4000] = bytes(3800)
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        load_dataset(path, target="answer")


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_on_disk(tmp_path: Path, batches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    table().to_parquet(tmp_path / "t.parquet")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(streaming.tempfile, "tempdir", str(tmp_path / "temporary"))
    found = load_dataset(tmp_path / "t.parquet", target="answer")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert found.inputs.sum() > 0


@pytest.mark.filterwarnings("ignore")
def test_training_does_not_copy_what_is_mapped(tmp_path: Path, batches: None) -> None:
    table().to_parquet(tmp_path / "t.parquet")
    found = load_dataset(tmp_path / "t.parquet", target="answer", drop="code")
    model = torch.nn.Linear(found.inputs.shape[1], 2)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    one = PrivateSGD(model, loss, found.inputs, found.targets, Settings(1.0, 1.0, 0.1, seed=2**90), progress=False)
    assert one.inputs.data_ptr() == found.inputs.ctypes.data
    one.fit(3)
