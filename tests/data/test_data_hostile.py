"""Data files that somebody made to take time or memory, to hang, or to be misread."""

from __future__ import annotations

import gzip
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from injecting import ended
from reconbound._internal.checks import DataError
from reconbound.data import DataWarning, load_dataset, npz
from reconbound.data import csv as text

LONG = 130_000  # characters of a cell, near the most that Python's csv takes


@pytest.mark.parametrize(
    "cell",
    ["1" * LONG + "x", "1" * LONG + "." + "1" * 9 + "x", "1,111" * (LONG // 5) + "x", "$" + "1" * LONG + "x",
     "1" * LONG + "e", "9" * 400 + "kg" + "g" * LONG, "1-" * (LONG // 2), " " * LONG + "x", "'" * LONG],
    ids=range(9),
)  # fmt: skip
def test_one_long_cell_takes_no_time(tmp_path, cell) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{k},{k % 7},{'a' if k % 2 else 'b'}" for k in range(40)]
    path.write_text("\n".join(["x,y,z", *rows, f'"{cell}",3,a']) + "\n")
    begun = time.perf_counter()
    try:
        load_dataset(path, target="z")
    except DataError as reason:
        assert len(str(reason)) < 1000  # noqa: PT017
    assert time.perf_counter() - begun < 5


def test_a_column_of_long_measures_takes_no_time(tmp_path) -> None:
    """Of a few kinds of text each is compared with a number and its unit."""
    path = tmp_path / "a.csv"
    rows = [f"{k},{'1' * LONG}{k % 12}!,{'a' if k % 2 else 'b'}" for k in range(24)]
    path.write_text("\n".join(["x,y,z", *rows]) + "\n")
    begun = time.perf_counter()
    load_dataset(path, target="z", ranges={"x": (0, 30)})
    assert time.perf_counter() - begun < 5


def test_many_columns_take_no_more_than_their_number(tmp_path) -> None:
    """40,000 names took 13 s, each looked up among all before it, and take 0.02 s."""
    begun = time.perf_counter()
    assert len(text.check_names("a.csv", [f"c{k}" for k in range(40_000)])) == 40_000
    assert time.perf_counter() - begun < 3
    with pytest.raises(DataError, match="columns 1 and 3 are both named 'a'"):
        text.check_names("a.csv", ["a", "b", "a"])


@pytest.mark.parametrize(("unit", "status"), [("e307", 2), ("e98", 0), ("e-100", 0), ("e-310", 2)])
@pytest.mark.parametrize("target", ["class", "number"])
def test_values_of_any_size_are_a_report_or_one_line(tmp_path, unit, status, target) -> None:
    """Floors in the unit of the column are squared, multiplied and drawn on the page."""
    path = tmp_path / "a.csv"
    rows = [f"{k + 1}{unit},{k % 2},{k + 0.5}{unit}" for k in range(17)]
    path.write_text("\n".join(["x,class,number", *rows]))
    words = ["audit", str(path), "--target", target, "--model", "linear", "--steps", "2", "--runs", "2", "--quiet"]
    found = ended([*words, "--out", str(tmp_path / "a")])
    assert found.clear, found
    assert found.status == status
    for words in ([], ["--range", f"x=0:20{unit}"]):
        found = ended(["audit", str(path), "--target", target, *words, "--steps", "2", "--out", str(tmp_path / "b")])
        assert found.clear, found


def test_a_packed_bomb_is_one_line(tmp_path, monkeypatch) -> None:
    path = tmp_path / "bomb.csv.gz"
    path.write_bytes(gzip.compress(b"x,y\n" + b"1,2\n" * 2**24))
    refused_within(2**24, ["audit", str(path), "--target", "y", "--out", str(tmp_path / "a")], monkeypatch)


@pytest.mark.parametrize("packed", [True, False])
def test_a_packed_array_is_one_line(tmp_path, packed, monkeypatch) -> None:
    """Zeros of 32 MiB are packed into a thousandth of it; as they are they take no more memory than their file."""
    path, parts = tmp_path / "bomb.npz", {"x": np.zeros((64, 2**17), np.float32), "y": np.arange(64) % 2}
    (np.savez_compressed if packed else np.savez)(path, **parts)
    if packed:
        refused_within(2**24, ["audit", str(path), "--out", str(tmp_path / "a")], monkeypatch)
    else:
        monkeypatch.setattr(text, "MOST_UNPACKED", 2**20)
        assert npz._read(path)["x"].shape == (64, 2**17)


def refused_within(most: int, words: list[str], monkeypatch) -> None:
    """One line says what a limit of 1 MiB allows, before more than `most` bytes were taken."""
    monkeypatch.setattr(text, "MOST_UNPACKED", 2**20)
    tracemalloc.start()
    try:
        found = ended(words)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.status, found.clear) == (2, True), found
    assert "unpacks to more than 1 MB" in found.err
    assert peak < most


def test_too_little_memory_is_one_line(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,2\n")
    monkeypatch.setattr(text, "read_csv", full)
    found = ended(["audit", str(path), "--target", "y", "--out", str(tmp_path / "a")])
    assert (found.status, found.clear) == (2, True)
    assert "the memory does not suffice" in found.err


def _images(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for k in range(6):
            image.fromarray(np.full((4, 4), 20 * k, dtype=np.uint8)).save(folder / name / f"{k}.png")
    return folder


def test_a_pipe_among_the_images_is_passed_over(tmp_path) -> None:
    folder = _images(tmp_path / "images")
    os.mkfifo(folder / "cat" / "pipe.png")
    with pytest.warns(DataWarning, match="1 files that are not images were passed over"):
        load_dataset(folder)


def test_floating_point_pixels_are_refused(tmp_path) -> None:
    folder = _images(tmp_path / "images")
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(folder / "cat" / "7.tiff")
    with pytest.raises(DataError, match="floating-point"):
        load_dataset(folder)
