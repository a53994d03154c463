"""Random bytes and cells in CSV files: a data set or a refusal, never another error."""

import csv
import io
import warnings

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reconbound._internal.checks import InputError
from reconbound.data import DataWarning, load_dataset

CELL = st.one_of(
    st.sampled_from(
        ["", "NA", "?", "1", "-2.5", "1e5", "inf", "nan", "a", '"', "x,y", "1_0", "٣", "\ufeff", "<b>", "1,5", "0x10"]
    ),
    st.floats(width=32).map(repr),
    st.text(max_size=5),
)

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RAGGED = st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=6)
EVEN = st.lists(st.tuples(CELL, CELL, CELL).map(list), min_size=2, max_size=8).map(
    lambda rows: [["x", "y", "z"], *rows]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr)
GOOD = st.lists(st.tuples(NUMBERS, st.sampled_from("pq"), NUMBERS).map(list), min_size=2, max_size=8).map(
    lambda rows: [["x", "y", "z"], *rows]
)


@FUZZ
@given(rows=st.one_of(RAGGED, EVEN, GOOD), mark=st.sampled_from(",;\t"), private=st.booleans())
@example(rows=[["x", "y"], ["5e-324", "a"], ["1e-323", "b"]], mark=",", private=True)
@example(rows=[["x", "y"], ["-1.7e308", "1"], ["1.7e308", "2"]], mark=",", private=True)
def test_any_table_of_cells_is_read_or_refused_in_one_line(tmp_path, rows, mark, private):
    text = io.StringIO()
    csv.writer(text, delimiter=mark).writerows(rows)
    read_or_refused(tmp_path, text.getvalue().encode("utf-8", "replace"), private)


@FUZZ
@given(content=st.one_of(st.binary(max_size=60), st.text('x,y;"\n\r\t01.e-a ', max_size=60).map(str.encode)))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path, content):
    for head in (b"", b"x,y\n1,p\n2,q\n"):
        read_or_refused(tmp_path, head + content, False)


def read_or_refused(folder, content, private):
    path, refused = folder / "fuzz.csv", None
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            found = load_dataset(path, target="y", private="x" if private else None)
    except InputError as reason:
        refused = reason
    if refused is not None:
        assert "fuzz.csv" in str(refused) or refused.name == "private"
        assert len(str(refused).splitlines()) == 1
        return
    for part in (found.inputs, found.test_inputs):
        assert np.isfinite(part).all()
        assert part.min(initial=0) >= 0
        assert part.max(initial=0) <= 1
    assert np.isfinite(found.scale).all()
    assert np.all(found.scale > 0)
