"""DataFrames and Parquet files become the tables that the same CSV file becomes."""

from __future__ import annotations

import datetime
import decimal
import time
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reconbound._internal.checks import InputError
from reconbound.data import DataError, DataMissing, DataWarning, load_dataset

OPTIONS = {"target": "y", "ranges": {"a": (0, 100)}, "test_share": 0}


def frame_of(**columns: object) -> pd.DataFrame:
    """Returns a frame with a column of numbers, a target, and more columns of six cells."""
    return pd.DataFrame({"a": [1, 2, 3, 4, 5, 6], **columns, "y": list("ppqqpq")})


KINDS = {
    "float": [0.5, 1.5, np.nan, 3.25, 4.0, 5.0],
    "nullable": pd.array([1, 2, None, 4, 5, 6], dtype="Int64"),
    "bool": [True, False, True, True, False, True],
    "text": ["u", None, "v", "NA", "u", " v "],
    "text of numbers": ["1", "2", "", "4.5", "-1e3", "0"],
    "category": pd.Categorical(["u", "v", "u", None, "v", "u"]),
    "date": pd.to_datetime(["2020-01-01", "2021-01-01"] * 3),
    "decimal": [decimal.Decimal("1.5"), decimal.Decimal(2), None, decimal.Decimal(4), decimal.Decimal(5), None],
    "mixed": pd.Series([1, "2", 3.5, None, 5, 6], dtype=object),
    "small": np.arange(6, dtype=np.int8),
}


@pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("form", ["frame", "parquet"])
def test_the_same_as_from_a_csv_file(tmp_path, kind, form) -> None:
    frame = frame_of(b=KINDS[kind])
    frame.to_csv(tmp_path / "t.csv", index=False)
    if form == "parquet" and kind == "mixed":
        pytest.skip("Parquet has no mixed columns")
    if form == "parquet":
        frame.to_parquet(tmp_path / "t.parquet")
    wanted = load_dataset(tmp_path / "t.csv", **OPTIONS)
    found = load_dataset(frame if form == "frame" else tmp_path / "t.parquet", **OPTIONS)
    assert np.array_equal(found.inputs, wanted.inputs)
    assert np.array_equal(found.targets, wanted.targets)
    assert found.features == wanted.features
    assert found.class_names == wanted.class_names
    assert found.record_names == tuple(f"row {k}" for k in range(6))


def test_a_frame_is_left_as_it_is_and_rows_have_their_labels() -> None:
    frame = frame_of().set_index(pd.Index(["ann", "bob", "cy", "di", "ed\x1b", "flo"]))
    before = frame.copy()
    found = load_dataset(frame, **OPTIONS)
    pd.testing.assert_frame_equal(frame, before)
    assert found.name == "table"
    assert found.record_names == ("row ann", "row bob", "row cy", "row di", "row ed", "row flo")


def test_categorical_dtype_is_public_even_with_numbers() -> None:
    frame = frame_of(b=pd.Categorical([1, 2, 3, 1, 2, 3]))
    assert load_dataset(frame, **OPTIONS).columns == (("a",), ("b",))
    found = load_dataset(frame, private="b", **OPTIONS)
    assert found.columns == (("b",), ("a",))
    assert [f.category for f in found.features if f.private] == [True] * 3
    with pytest.raises(DataError, match=r"column 'b': is of type category, and has a range"):
        load_dataset(frame, private="b", **{**OPTIONS, "ranges": {"b": (0, 5)}})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"b": [1.0, np.inf, 2, 3, 4, 5]}, "row 1, column 'b': 'inf' is not a finite number"),
        ({"b": [[1], [2], [3], [4], [5], [6]]}, "row 0, column 'b': a list is neither a number nor text"),
        ({"b": [b"x"] * 6}, "row 0, column 'b': a bytes is neither"),
        ({"b": [1 + 2j] * 6}, "row 0, column 'b': a complex is neither"),
        ({" a": [1] * 6}, "columns 1 and 2 are both named 'a'"),
        ({"y ": [1] * 6}, "columns 2 and 3 are both named 'y'"),
        ({"b": ["1", "2", "x", "4", "5", "6"] * 1}, ""),
    ],
)
def test_errors_name_their_place(columns, message) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        if not message:
            assert load_dataset(frame_of(**columns), **OPTIONS).columns == (("a",), ("b",))
            return
        with pytest.raises(DataError, match=message):
            load_dataset(frame_of(**columns), **OPTIONS)


def test_frames_that_cannot_be_used() -> None:
    with pytest.raises(DataError, match="table, row 2, column 'y': the target is missing"):
        load_dataset(pd.DataFrame({"a": [1, 2, 3], "y": ["p", "q", None]}), **OPTIONS)
    with pytest.raises(DataError, match="holds no rows"):
        load_dataset(frame_of().iloc[:0], **OPTIONS)
    with pytest.raises(InputError, match=r"target must be a column of table \(a, y\), got 'z'"):
        load_dataset(frame_of(), target="z")
    with pytest.raises(InputError, match="header is for CSV files"):
        load_dataset(frame_of(), header=["p", "q"], **OPTIONS)
    with pytest.raises(InputError, match="size is for folders"):
        load_dataset(frame_of(), size=3, **OPTIONS)


def test_parquet_types_of_other_writers(tmp_path) -> None:
    day = datetime.date(2020, 1, 1)
    columns = {
        "a": pa.array([1, 2, None, 4], pa.uint16()),
        "big": pa.array(["u", "v", "u", None], pa.large_string()),
        "code": pa.array(["7", "8", "7", "8"]).dictionary_encode(),
        "day": pa.array([day, day, day, None], pa.date32()),
        "flag": pa.array([True, False, None, True]),
        "y": pa.array([1, 2, 1, 2], pa.int8()),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", compression="zstd")
    with pytest.warns(DataWarning, match="dates"):
        found = load_dataset(tmp_path / "t.parquet", **OPTIONS)
    assert found.columns == (("a",), ("big", "code", "day", "flag"))
    assert found.class_names == ("1", "2")
    nested = pa.table({"a": [1, 2], "b": [[1], [2]], "y": [0, 1]})
    pq.write_table(nested, tmp_path / "n.parquet")
    with pytest.raises(DataError, match=r"column 'b': list<.*> is neither a number nor text"):
        load_dataset(tmp_path / "n.parquet", **OPTIONS)
    assert load_dataset(tmp_path / "n.parquet", drop="b", **OPTIONS).columns == (("a",), ())


def test_parquet_files_that_are_not_there_damaged_or_too_large(tmp_path, monkeypatch) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(DataMissing, match="does not exist"):
        load_dataset(path, **OPTIONS)
    frame_of().to_parquet(path)
    content = path.read_bytes()
    for wrong in (b"", b"x" * 100, content[:-20], content[:40] + bytes(60) + content[100:]):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"t\.parquet: damaged or not a Parquet file") as caught:
            load_dataset(path, **OPTIONS)
        assert "\n" not in str(caught.value)
    same = pa.table({"a": pa.array(np.zeros(2_000_000)), "y": pa.array(np.zeros(2_000_000, dtype=np.int8))})
    pq.write_table(same, path, compression="zstd")
    assert path.stat().st_size < 50_000  # a bomb: it unpacks to 30 MB
    monkeypatch.setattr("reconbound.data.csv.MOST_UNPACKED", 2**23)
    with pytest.raises(DataError, match="holds more than 8 MB"):
        load_dataset(path, **OPTIONS)


@pytest.mark.parametrize("text", ["z" * 130_000, "1" * 130_000 + "x"])
def test_a_long_text_that_comes_often_takes_no_time(tmp_path, text) -> None:
    """A file of some kilobytes, in which 100,000 rows hold a text of 130 kB."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, dtype=np.int32)), pa.array([text]))
    columns = {"a": np.arange(100_000), "b": text, "y": np.arange(100_000) % 2}
    table = pa.table(columns).replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "t.parquet", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 2**21
    begun = time.perf_counter()
    with pytest.warns(DataWarning, match="b: every value is"):
        load_dataset(tmp_path / "t.parquet", **{**OPTIONS, "ranges": {"a": (0, 1e5)}})
    assert time.perf_counter() - begun < 10
    with pytest.raises(DataError, match="a text of more than 131,072 characters"):
        load_dataset(frame_of(b=["z" * 131_073] * 6), **OPTIONS)
