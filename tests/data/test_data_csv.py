"""CSV files become tables as they should, and whatever is wrong with one is said by file, row and column."""

import csv
import gzip
import io
import re

import numpy as np
import pytest

from reconbound._internal.checks import InputError
from reconbound.data import DataError, DataMissing, DataWarning, load_dataset, read_ranges, read_units

PEOPLE = """age,job,hours,income
30,nurse,40,low
60,clerk,,high
45,,20,low
?,nurse,60,high
"""
DECLARED = {"ranges": {"age": (0, 120), "hours": (0, 100)}}


@pytest.fixture
def write(tmp_path):
    def written(content, name="people.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return written


def all_rows(path, **options):
    """Every row in the file's order: nothing is held out."""
    return load_dataset(path, test_share=0, **options)


def test_numbers_categories_and_missing_values(write):
    found = all_rows(write(PEOPLE), target="income", units={"age": "years"}, **DECLARED)
    assert [f.name for f in found.features] == [
        "age",
        "age (missing)",
        "job = (missing)",
        "job = clerk",
        "job = nurse",
        "hours",
        "hours (missing)",
    ]
    assert np.allclose(
        found.inputs,
        [
            [30 / 120, 0, 0, 0, 1, 0.4, 0],
            [60 / 120, 0, 0, 1, 0, 0.5, 1],
            [45 / 120, 0, 1, 0, 0, 0.2, 0],
            [0.5, 1, 0, 0, 1, 0.6, 0],
        ],
    )
    assert found.private.tolist() == [0, 5]
    assert found.scale.tolist() == [120, 100]
    assert found.offset.tolist() == [0, 0]
    assert found.features[0].unit == "years"
    assert found.class_names == ("high", "low")
    assert found.targets.tolist() == [1, 0, 1, 0]
    assert found.record_names == ("row 2", "row 3", "row 4", "row 5")
    assert not found.inferred_ranges
    assert found.notes == ()
    assert "a table of 3 columns beside the target (2 private, 1 public)" in found.summary()
    assert found.columns == (("age", "hours"), ("job",))
    single = all_rows(write("a,y\n" + "1,u\n2,v\n" * 3), target="y", ranges={"a": (0, 9)})
    assert "a table of 1 column beside the target (1 private, 0 public)" in single.summary()


def test_the_way_back_to_the_datas_units(write):
    rng = np.random.default_rng(0)
    values = rng.uniform(-50, 300, (30, 2))
    text = "a,b,y\n" + "".join(f"{a!r},{b!r},{k % 3}\n" for k, (a, b) in enumerate(values.tolist()))
    found = all_rows(write(text), target="y", ranges={"a": (-50, 300), "b": (-60, 310)})
    assert np.allclose(found.offset + found.scale * found.inputs.astype(np.float64), values, atol=1e-4)


def test_ranges_read_off_the_data_are_marked_and_warned_about(write):
    with pytest.warns(DataWarning, match="hours: no range was given, so 20 to 60 was read off the data"):
        found = all_rows(write(PEOPLE), target="income", ranges={"age": (0, 120)})
    assert [f.declared for f in found.features if f.name in ("age", "hours")] == [True, False]
    assert found.inferred_ranges
    assert found.inputs[:, found.private[1]].max() == 1


def test_values_outside_a_range_are_moved_to_its_ends_and_counted(write):
    with pytest.warns(DataWarning, match=r"age: 2 of 4 values lie outside 0 to 44"):
        found = all_rows(write(PEOPLE), target="income", ranges={"age": (0, 44), "hours": (0, 100)})
    assert found.inputs[:, 0].tolist() == pytest.approx([30 / 44, 1, 1, 0.5])


def test_private_names_the_columns_to_protect(write):
    found = all_rows(write(PEOPLE), target="income", private="hours", **DECLARED)
    assert [f.name for f in found.private_features] == ["hours"]
    listed = all_rows(write(PEOPLE), target="income", private=["hours", "age"], **DECLARED)
    assert [f.name for f in listed.private_features] == ["age", "hours"]


def test_a_table_without_numbers_needs_private_categories(write):
    with pytest.raises(DataError, match=r"no column of numbers to protect; name the categories .* --private"):
        all_rows(write("a,y\nx,0\nz,1\n"), target="y")
    found = all_rows(write("a,y\nx,0\nz,1\n"), target="y", private="a")
    assert found.columns == (("a",), ())
    assert found.private.tolist() == []
    assert found.scale.shape == (0,)


def test_declared_ranges_make_rows_independent(write):
    """No statistic of the other people leaks into a person's input."""
    rng = np.random.default_rng(3)
    jobs = ("nurse", "clerk", "")

    def people(seed):
        own = np.random.default_rng(seed)
        rows = [[repr(own.uniform(0, 200)), jobs[k % 3], repr(own.normal(50, 40)), "lh"[k % 2]] for k in range(40)]
        return [["55.5", "nurse", "", "h"], ["17", "clerk", "12.25", "l"], *rows, ["", "clerk", "0", "h"]]

    def inputs(rows):
        text = io.StringIO()
        csv.writer(text).writerows([["age", "job", "hours", "income"], *rows])
        with pytest.warns(DataWarning, match="outside"):
            return all_rows(write(text.getvalue()), target="income", **DECLARED).inputs

    one, other = inputs(people(int(rng.integers(1 << 30)))), inputs(people(int(rng.integers(1 << 30))))
    assert not np.array_equal(one[2:-1], other[2:-1])
    assert np.array_equal(one[:2], other[:2])
    assert np.array_equal(one[-1], other[-1])


def test_held_out_rows_do_not_depend_on_the_inputs(write):
    text = "a,y\n" + "".join(f"{k},{k % 2}\n" for k in range(50))
    changed = "a,y\n" + "".join(f"{(k * 7) % 50},{k % 2}\n" for k in range(50))
    names = [load_dataset(write(t), target="y", ranges={"a": (0, 50)}).record_names for t in (text, changed)]
    assert names[0] == names[1]


@pytest.mark.parametrize("mark", [",", ";", "\t", ", "])
def test_delimiters_quotes_and_byte_order_marks(write, mark):
    text = (
        mark.join(['"a, b; c"', "x", "y"])
        + "\r\n"
        + "".join(mark.join([f'"{k}"', "0.5", "pq"[k % 2]]) + "\r\n" for k in range(4))
    )
    found = all_rows(write(b"\xef\xbb\xbf" + text.encode()), target="y", ranges={"a, b; c": (0, 10), "x": (0, 1)})
    assert [f.name for f in found.features] == ["a, b; c", "x"]
    assert np.allclose(found.inputs, [[k / 10, 0.5] for k in range(4)])


def test_decimal_commas_go_with_semicolons(write):
    found = all_rows(write("a;y\n1,5;p\n-2,25e1;q\n"), target="y", ranges={"a": (-30, 10)})
    assert np.allclose(found.offset + found.scale * found.inputs.astype(float), [[1.5], [-22.5]], atol=1e-5)


def test_gz_and_header_argument(write):
    plain = gzip.compress(b"1,p\n2,q\n")
    found = all_rows(write(plain, "a.csv.gz"), target="y", header=["x", "y"], ranges={"x": (0, 4)})
    assert found.inputs[:, 0].tolist() == [0.25, 0.5]
    assert found.record_names == ("row 1", "row 2")


def test_targets_classes_or_a_number(write):
    ranges = {"x": (0, 4)}
    classes = all_rows(write("x,y\n1,3\n2,10\n3,3\n"), target="y", ranges=ranges)
    assert classes.task == "classes"
    assert classes.class_names == ("3", "10")
    assert classes.targets.dtype == np.int64
    number = all_rows(write("x,y\n1,3\n2,10\n3,3\n"), target="y", ranges={**ranges, "y": (0, 20)})
    assert number.task == "number"
    assert number.targets.tolist() == pytest.approx([0.15, 0.5, 0.15])
    assert number.targets.dtype == np.float32
    assert (number.target.low, number.target.high, number.target.declared) == (0, 20, True)
    with pytest.warns(DataWarning, match="y: no range was given"):
        other = all_rows(write("x,y\n1,3.5\n2,10\n3,3\n"), target="y", ranges=ranges)
    assert other.task == "number"
    assert other.inferred_ranges


def test_hostile_names_stay_text_without_control_characters(write):
    evil = "<script>alert(1)</script>"
    text = f'"{evil}","b\x1b[31m\u202ered",y\n1,"<b>x</b>",p\n2,"\x07z",q\n'
    found = all_rows(write(text), target="y", ranges={evil: (0, 2)})
    assert [f.name for f in found.features] == [evil, "b[31mred = <b>x</b>", "b[31mred = z"]


def test_identifiers_and_empty_columns_are_left_out_with_a_note(write):
    text = "name,empty,x,y\n" + "".join(f"p{k},,{k},{k % 2}\n" for k in range(200))
    with pytest.warns(DataWarning) as caught:
        found = all_rows(write(text), target="y", ranges={"x": (0, 200)})
    output = [str(w.message) for w in caught]
    assert any("name: 200 different texts, more than 100" in s for s in output)
    assert any("empty: every value is missing" in s for s in output)
    assert [f.name for f in found.features] == ["x"]
    dropped = all_rows(write(text), target="y", ranges={"x": (0, 200)}, drop="name,empty")
    assert dropped.notes == ()


def test_a_number_of_two_values_is_no_continuous_one(write):
    text = "sex,x,y\n" + "".join(f"{k % 2},{k},{'pq'[k % 3 == 0]}\n" for k in range(20))
    ranges = {"sex": (0, 1), "x": (0, 20)}
    with pytest.warns(DataWarning, match="sex: taken as a continuous number, but holds at most two different values"):
        all_rows(write(text), target="y", ranges=ranges)
    assert all_rows(write(text), target="y", ranges=ranges, private="x").notes == ()


def test_a_mostly_numeric_column_with_a_word_in_it(write):
    text = "a,x,y\n1,1,p\n2,2,q\n3,3,p\nfour,4,q\n"
    with pytest.warns(
        DataWarning, match="a: taken as categories, since row 5 holds 'four', though 3 of 4 values are numbers"
    ):
        found = all_rows(write(text), target="y", ranges={"x": (0, 4)})
    assert len(found.features) == 5
    for wish in ({"private": ["a"]}, {"ranges": {"a": (0, 9)}}):
        with pytest.raises(DataError, match=r"people\.csv, row 5, column 'a': 'four' is not a number"):
            all_rows(write(text), target="y", **wish)


def test_a_few_words_among_numbers_are_refused_with_their_place(write):
    """One bad cell neither drops a sensitive column nor makes it public."""
    rows = [f"{1000 + k},{k},{'pq'[k % 2]}" for k in range(120)]
    rows[19] = "abc,19,q"
    text = "income,x,y\n" + "\n".join(rows)
    output = (
        r"row 21, column 'income': 'abc' is not a number, but 119 of 120 values are: .* --category 'income' or --drop"
    )
    for options in ({}, {"private": "x"}):
        with pytest.raises(DataError, match=output):
            all_rows(write(text), target="y", ranges={"x": (0, 200)}, **options)
    with pytest.raises(DataError, match="row 21, column 'income': 'abc' is not a number, and the column is private"):
        all_rows(write(text), target="y", private="income")
    with pytest.warns(DataWarning, match="income: 120 different texts, more than 100"):
        asked = all_rows(write(text), target="y", ranges={"x": (0, 200)}, categories="income")
    assert [f.name for f in asked.features] == ["x"]
    emptied = all_rows(write(text.replace("abc", "")), target="y", ranges={"x": (0, 200), "income": (0, 2000)})
    assert emptied.columns == (("income", "x"), ())
    rows[:13] = [f"abc,{k},{'pq'[k % 2]}" for k in range(13)]  # 106 of 120: fewer than nine of ten
    with pytest.warns(DataWarning) as caught:
        all_rows(write("income,x,y\n" + "\n".join(rows)), target="y", ranges={"x": (0, 200)})
    assert any("though 106 of 120 values are numbers" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("form", "plain"),
    [
        ("${:,}", "1000"),
        ("$ {}.50", "1000.50"),
        ("-$ {}", "-1000"),
        ("{} %", "1000"),
        ("€{}", "1000"),
        ("{} EUR", "1000"),
        ("{:,}", "1000"),
        ("({:,})", "-1000"),
    ],
)
@pytest.mark.parametrize("kinds", [20, 120])
def test_signed_numbers_are_reported(write, form, plain, kinds):
    """A column of dollars must not become a category that the attacker is taken to know, nor an identifier."""
    cells = [form.format(1000 + k % kinds) for k in range(120)]
    text = "pay,x,y\n" + "".join(f'"{cell}",{k},{"pq"[k % 2]}\n' for k, cell in enumerate(cells))
    shown = re.escape(repr(cells[0]))
    output = rf"row 2, column 'pay': {shown} .* write it as {re.escape(plain)}.*--category 'pay' or --drop"
    for options in ({}, {"private": "pay"}, {"private": "x"}, {"ranges": {"pay": (0, 2000)}}):
        with pytest.raises(DataError, match=output):
            all_rows(write(text), target="y", **options)
    found = all_rows(write(text), target="y", ranges={"x": (0, 120)}, drop="pay")
    assert found.columns == (("x",), ())


def test_signed_classes_and_codes_are_unchanged(write):
    text = "code,x,y\n" + "".join(f"{['A$B', 'C%', '1-2', '1.2.3'][k % 4]},{k},{k % 3 * 10}%\n" for k in range(30))
    found = all_rows(write(text), target="y", ranges={"x": (0, 30)})
    assert found.class_names == ("0%", "10%", "20%")
    assert [f.name for f in found.features if not f.private] == [f"code = {c}" for c in ("1-2", "1.2.3", "A$B", "C%")]


def test_numbers_with_a_unit_behind_them_get_a_note(write):
    text = "age,x,y\n" + "".join(f"{20 + k % 30} years,{k},{'pq'[k % 2]}\n" for k in range(60))
    with pytest.warns(DataWarning, match="age: numbers with 'years' after them, taken as categories, which are public"):
        all_rows(write(text), target="y", ranges={"x": (0, 60)})


def test_columns_can_be_asked_for_as_categories(write):
    text = "code,n,y\n" + "".join(f"{k % 3},{k},{k % 2 if k else '1+'}\n" for k in range(30))
    with pytest.warns(DataWarning, match="y: taken as categories"):
        found = all_rows(write(text), target="y", ranges={"n": (0, 30)}, categories=["code"])
    assert [f.name for f in found.features] == ["code = 0", "code = 1", "code = 2", "n"]
    assert found.class_names == ("0", "1", "1+")  # a target of few classes may be numbers and a word
    with pytest.raises(InputError, match="category must not name a column with a range"):
        all_rows(write(text), target="y", ranges={"code": (0, 3)}, categories="code")
    with pytest.warns(DataWarning, match="y: taken as categories"):
        both = all_rows(write(text), target="y", private=["code"], categories="code", ranges={"n": (0, 30)})
    assert both.columns == (("code",), ("n",))
    np.testing.assert_array_equal(both.inputs, found.inputs)
    with pytest.raises(InputError, match=r"category must name columns of .*did you mean 'code'"):
        all_rows(write(text), target="y", categories="codes")
    with pytest.raises(InputError, match="category is for CSV and Parquet files"):
        load_dataset("wine", categories="alcohol")


def test_a_column_with_a_comma_in_its_name_can_be_private(write):
    text = 'age,"hours, week",hours,pay\n' + "".join(f"{k},{k + 1},{k + 2},{'lh'[k % 2]}\n" for k in range(20))
    ranges = dict.fromkeys(("age", "hours, week", "hours"), (0, 99))
    for private in ("hours, week", ["hours, week"], "hours,week"):
        if private == "hours,week":
            with pytest.raises(InputError, match=r"private must name columns .* did you mean 'hours, week'"):
                all_rows(write(text), target="pay", ranges=ranges, private=private)
        else:
            found = all_rows(write(text), target="pay", ranges=ranges, private=private)
            assert [f.name for f in found.private_features] == ["hours, week"]
    for private in ("age, hours, week", ["age", "hours, week"], "hours, week,age"):
        found = all_rows(write(text), target="pay", ranges=ranges, private=private)
        assert [f.name for f in found.private_features] == ["age", "hours, week"]
    del ranges["hours, week"]
    assert all_rows(write(text), target="pay", ranges=ranges, private="age,hours", drop="hours, week").columns[1] == ()


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("", "people.csv: empty"),
        ("\n\n \n", "people.csv: empty"),
        ("x,y\n", "names 2 columns, but holds no rows"),
        ("x,y\n1,p\n2\n", "row 3: 1 cells, but there are 2 columns"),
        ("x,y\n1,p\n\n2,q,r\n", "row 4: 3 cells, but there are 2 columns"),
        ('x,y\n"1\n",p\n2,q,r\n', "row 3 (line 4): 3 cells"),
        ("x,y,x\n1,p,2\n", "row 1: columns 1 and 3 are both named 'x'"),
        ("x,y,x \n1,p,2\n", "columns 1 and 3 are both named 'x'"),
        ("x,y\n1,p\n2,\0\n", "line 3: a NUL byte"),
        (b"x,y\n1,p\n2,\xe9\n", "line 3: byte 0xe9 is not UTF-8"),
        ("x,y\n1,p\n".encode("utf-16"), "UTF-16"),
        ("x,y\n1,p\ninf,q\n", "row 3, column 'x': 'inf' is not a finite number"),
        ("x,y\n1,p\n-1e999,q\n", "row 3, column 'x': '-1e999' is not a finite number"),
        ("x,y\n1,p\n2,NA\n", "row 3, column 'y': the target is missing"),
        ("x,y\n1,p\n2,p\n", "column 'y': the target is p in every row"),
        ("x,y\n1,2.5\n2,2.5\n", "column 'y': the target is 2.5 in every row"),
        ('x,y\n1,"p\n2,q\n', "not CSV"),
        ('x,y\n1,"p"q\n2,q\n', "row 2 (line 2): not CSV"),
        ("x,y\n" + "".join(f"1,t{k}\n" for k in range(101)), "column 'y': a target of 101 classes"),
        ("x,y\n-1e308,p\n1e308,q\n", "column 'x': values from -1e+308 to 1e+308 span no usable range"),
    ],
)
def test_errors_name_their_place(write, content, output):
    path = write(content)
    with pytest.raises(DataError, match=re.escape(output)) as caught:
        load_dataset(path, target="y")
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({}, r"target must name the column of .* \(age, job, hours, income\)"),
        ({"target": "salary"}, r"target must be a column of .*, got 'salary'"),
        (
            {"target": "income", "private": "agee"},
            r"private must name columns of the table \(age, job, hours, income\)",
        ),
        ({"target": "income", "private": []}, "private must name at least one column"),
        ({"target": "income", "private": ""}, r"private must name at least one column \(without it"),
        ({"target": "income", "private": "hour"}, "did you mean 'hours'"),
        ({"target": "incom"}, r"did you mean 'income'\?, got 'incom'"),
        ({"target": "income", "private": "income"}, "private must not name the target"),
        ({"target": "age", "private": "age"}, "private must not name the target"),
        ({"target": "income", "ranges": {"nobody": (0, 1)}}, "range must name columns"),
        ({"target": "income", "ranges": {"age": (5, 5)}}, "from a lower to a higher value of age, got '5:5'"),
        ({"target": "income", "ranges": {"age": (0, float("inf"))}}, "the highest age must be a finite number"),
        ({"target": "income", "ranges": {"age": 7}}, "a lowest and a highest value of age"),
        (
            {"target": "income", "ranges": {"job": (0, 1)}},
            "row 2, column 'job': 'nurse' is not a number, and the column has a range",
        ),
        ({"target": "income", "ranges": {"income": (0, 1)}}, "row 2, column 'income': 'low' is not a number"),
        ({"target": "income", "units": {"nobody": "m"}}, "unit must name columns"),
        ({"target": "income", "drop": "nobody"}, "drop must name columns"),
        ({"target": "income", "drop": "income"}, "drop must not name the target"),
        ({"target": "income", "limit": 1, **DECLARED}, "limit must be at least 2, one record a class"),
        ({"target": "income", "test_share": 1.0, **DECLARED}, "test_share must be less than 1"),
        ({"target": "income", "seed": -1, **DECLARED}, "seed must be at least 0"),
        ({"target": "income", "header": ["a", "b"]}, "row 1: 4 cells, but there are 2 columns"),
    ],
)
def test_wishes_that_cannot_be_met(write, options, output):
    if "header" in options:
        options = {**options, "target": "a"}
    with pytest.raises(InputError, match=output):
        load_dataset(write(PEOPLE), **options)


def test_files_that_are_not_there_or_damaged(write, tmp_path):
    with pytest.raises(DataMissing, match=r"nowhere\.csv does not exist"):
        load_dataset(tmp_path / "nowhere.csv", target="y")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        load_dataset(tmp_path / "folder.csv", target="y")
    for content in (
        gzip.compress(PEOPLE.encode())[:-9],
        b"plain text",
        gzip.compress(PEOPLE.encode())[:30] + bytes(40),
    ):
        with pytest.raises(DataError, match="damaged or cut off"):
            load_dataset(write(content, "a.csv.gz"), target="y")


def test_a_huge_cell_does_not_fill_the_memory(write):
    text = "x,note,y\n" + f"1,{'a' * 100_000},p\n" + "".join(f"{k},b,{'pq'[k % 2]}\n" for k in range(20_000))
    assert len(all_rows(write(text), target="y", ranges={"x": (0, 20_000)}).features) == 3


def test_ranges_and_units_from_words():
    assert read_ranges(["a=b=-1:2.5"]) == {"a=b": (-1.0, 2.5)}
    for word in ("age", "age=5", "=0:1", "age=0:1:2", "age=x:y", "age=3:1", "age=0:nan"):
        with pytest.raises(InputError):
            read_ranges([word])
    assert read_units(["hours per week=hours"]) == {"hours per week": "hours"}
    with pytest.raises(InputError):
        read_units(["hours"])
