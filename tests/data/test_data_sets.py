"""The Dataset type, the split by seed, scikit-learn's own sets, and MNIST and CIFAR-10 by name."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from reconbound._internal.checks import InputError
from reconbound.data import NAMES, DataError, Dataset, Feature, Pixels, load_dataset
from reconbound.data.dataset import DataOptions, clean, keep
from where import FOLDER, needs


def everything(found):
    """Training and test records together, in the data's own units, sorted by row."""
    inputs = np.concatenate([found.inputs, found.test_inputs]).reshape(-1, len(found.features)).astype(np.float64)
    private = inputs if found.private is None else inputs[:, found.private]
    values = found.offset + found.scale * private
    return values[np.lexsort(values.T)]


def test_digits_are_scikit_learns_in_their_own_units():
    found = load_dataset("digits")
    bunch = datasets.load_digits()
    own = bunch.data[np.lexsort(bunch.data.T)]
    assert np.array_equal(everything(found), own)
    assert found.shape == (1, 8, 8)
    assert found.kind == "image"
    assert found.private is None
    assert found.features[11] == Feature("pixel (1, 3)", "grey levels", 0.0, 16.0)
    assert found.class_names == tuple("0123456789")
    assert found.record_names is None
    assert "1,438 records to train on, 359 to test" in found.summary()


def test_labels_stay_with_their_images():
    found, bunch = load_dataset("digits", seed=3), datasets.load_digits()
    label = {image.tobytes(): int(y) for image, y in zip(bunch.data, bunch.target, strict=True)}
    for x, y in ((found.inputs, found.targets), (found.test_inputs, found.test_targets)):
        assert [label[(16.0 * image.astype(np.float64)).tobytes()] for image in x] == y.tolist()


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_tables_of_scikit_learn_lie_within_their_declared_ranges(name):
    found = load_dataset(name)  # a value outside would have been warned about, and warnings are errors here
    bunch = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    columns = [k for k, spelled in enumerate(bunch.feature_names) if spelled != "sex"]
    own = bunch.data[:, columns]
    assert np.allclose(everything(found), own[np.lexsort(own.T)], rtol=1e-6, atol=1e-6 * found.scale)
    assert not found.inferred_ranges
    assert found.notes == ()
    assert all(f.declared and np.isfinite([f.low, f.high]).all() for f in found.features)
    if name == "diabetes":
        assert found.task == "number"
        assert found.target == Feature("disease progression", "", 0.0, 400.0, True, False)
        number = np.sort(np.concatenate([found.targets, found.test_targets]).astype(np.float64)) * 400
        assert np.allclose(number, np.sort(bunch.target), atol=1e-4)
        assert [f.name for f in found.features if not f.private] == ["sex = 1", "sex = 2"]
        assert found.features[found.private[0]].unit == "years"
    else:
        assert found.private is None
        names = np.array(found.class_names)[np.concatenate([found.targets, found.test_targets])]
        assert {n: int((names == n).sum()) for n in found.class_names} == {
            str(t): int((bunch.target == k).sum()) for k, t in enumerate(bunch.target_names)
        }


def test_ranges_and_private_columns_of_a_table_of_scikit_learn():
    found = load_dataset("diabetes", private="age,blood sugar", ranges={"age": (0, 200)}, units={"age": "a"})
    assert [f.name for f in found.private_features] == ["age", "blood sugar"]
    assert found.private_features[0] == Feature("age", "a", 0.0, 200.0, True, True)
    assert found.private.tolist() == [0, 10]
    mixed = load_dataset("diabetes", private=["sex", "age"])
    assert mixed.columns[0] == ("age", "sex")
    assert [f.name for f in mixed.features if f.private and f.category] == ["sex = 1", "sex = 2"]
    assert mixed.private.tolist() == [0]
    with pytest.raises(InputError, match="must not name the target"):
        load_dataset("diabetes", private="disease progression")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"private": ["x"]}, "private is for tables"),
        ({"ranges": {"x": (0, 1)}}, "ranges is for tables"),
        ({"target": "x"}, "target is for CSV and Parquet files"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"limit": 9}, "limit must be at least 10, one record a class"),
        ({"limit": 2.5}, "limit must be a whole number"),
        ({"test_share": -0.1}, "test_share must be at least 0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(InputError, match=message):
        load_dataset("digits", **options)


def test_an_unknown_name_lists_what_there_is(tmp_path):
    with pytest.raises(
        InputError, match=rf"^digit does not exist: name one of {', '.join(NAMES)}, or a file or folder that exists$"
    ):
        load_dataset("digit")
    (tmp_path / "a.xlsx").write_bytes(b"x")
    with pytest.raises(InputError, match=r"must be a \.csv, \.csv\.gz, \.parquet or \.npz file"):
        load_dataset(tmp_path / "a.xlsx")


def test_the_split_is_stratified_and_of_the_seed():
    targets = np.repeat([0, 1, 2], [100, 37, 1])
    chosen = DataOptions(seed=5, test_share=0.2)
    train, test = chosen.choose_rows(targets, "classes")
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(138))
    assert np.bincount(targets[test], minlength=3).tolist() == [20, 7, 0]
    assert all(np.array_equal(a, b) for a, b in zip((train, test), chosen.choose_rows(targets, "classes"), strict=True))
    assert not np.array_equal(test, DataOptions(seed=6, test_share=0.2).choose_rows(targets, "classes")[1])
    assert len(DataOptions(seed=0, test_share=0.3).choose_rows(np.linspace(0, 1, 50), "number")[1]) == 15
    assert len(DataOptions(seed=0, test_share=0.0).choose_rows(targets, "classes")[1]) == 0
    with pytest.raises(DataError, match="no records"):
        DataOptions(seed=0, test_share=0.2).choose_rows(np.zeros(0, np.int64), "classes")


@pytest.mark.parametrize("limit", [3, 4, 10, 57, 137, 138, 1000])
def test_a_limit_keeps_every_class(limit):
    targets = np.repeat([0, 1, 2], [100, 37, 1])
    kept = keep(targets, limit, seed=0, task="classes")
    counts = np.bincount(targets[kept], minlength=3)
    assert len(kept) == min(limit, 138)
    assert len(set(kept.tolist())) == len(kept)
    assert counts.min() >= 1
    assert abs(counts[0] - min(limit, 138) * 100 / 138) <= 1.5


def test_limit_keeps_test_records():
    whole, part = load_dataset("digits"), load_dataset("digits", limit=100)
    assert np.array_equal(whole.test_inputs, part.test_inputs)
    assert part.inputs.shape == (100, 1, 8, 8)
    assert np.bincount(part.targets).min() >= 9
    rows = {image.tobytes() for image in whole.inputs}
    assert all(image.tobytes() in rows for image in part.inputs)
    train, test = DataOptions(limit=4).choose_rows(np.arange(10) % 2, "classes", np.arange(10) >= 6)
    assert test.tolist() == [6, 7, 8, 9]
    assert len(train) == 4
    assert train.max() < 6


def test_pixels_are_created_on_access():
    pixels = Pixels((3, 4, 5))
    assert len(pixels) == 60
    assert [f.name for f in pixels[:2]] == ["pixel (0, 0) red", "pixel (0, 1) red"]
    assert pixels[-1].name == "pixel (3, 4) blue"
    assert len(list(pixels)) == 60
    assert Pixels((2, 1, 1))[1].name == "pixel (0, 0) plane 1"
    with pytest.raises(IndexError):
        pixels[60]


def test_a_dataset_checks_its_parts():
    good = {
        "name": "a",
        "kind": "table",
        "inputs": np.zeros((3, 2), np.float32),
        "targets": np.zeros(3, np.int64),
        "test_inputs": np.zeros((0, 2), np.float32),
        "test_targets": np.zeros(0, np.int64),
        "features": (Feature("u", "m", -1.0, 3.0), Feature("v", private=False)),
    }
    found = Dataset(**good)
    assert found.private.tolist() == [0]
    assert (found.scale.tolist(), found.offset.tolist()) == ([4.0], [-1.0])
    for wrong in (
        {"inputs": np.zeros((3, 2))},
        {"inputs": np.zeros((3, 2, 1, 1), np.float32)},
        {"targets": np.zeros(2, np.int64)},
        {"targets": np.zeros(3, np.float32)},
        {"test_inputs": np.zeros((0, 3), np.float32)},
        {"features": good["features"][:1]},
        {"record_names": ("a",)},
        {"kind": "sound"},
        {"task": "number"},
    ):
        with pytest.raises(InputError):
            Dataset(**{**good, **wrong})


def test_data_errors_are_one_line(monkeypatch, capsys):
    from reconbound.cli import app as cli

    def broken(**_):
        raise DataError("a.csv, row 3, column 'x': 'b' is not a number")

    monkeypatch.setattr(cli.options, "command_parser", lambda _: broken)
    assert cli.run(["audit", "a.csv"]) == 2
    assert capsys.readouterr().err == "reconbound: a.csv, row 3, column 'x': 'b' is not a number\n"


def test_text_is_kept_but_for_what_steers_a_terminal():
    assert clean(" <b onclick='x'>Ünï 💉</b>\x1b[2J\n\u202e\ud800") == "<b onclick='x'>Ünï 💉</b>[2J"


def test_torch_is_not_imported():
    code = (
        "import sys; from reconbound.data import load_dataset; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'pandas', 'pyarrow', 'PIL')]); "
        "load_dataset('digits'); "  # scikit-learn itself imports pandas where it is installed
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'PIL')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


@needs("mnist")
def test_mnist_by_name():
    found = load_dataset("mnist", folder=FOLDER, limit=500)
    assert found.inputs.shape == (500, 1, 28, 28)
    assert found.test_inputs.shape == (10_000, 1, 28, 28)
    assert 0.1 < found.inputs.mean() < 0.16
    assert found.inputs.max() == 1
    assert np.bincount(found.targets).min() >= 40
    assert found.features[28].name == "pixel (1, 0)"


@needs("adult")
def test_adult_as_a_csv_file_with_six_private_columns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    import adult_csv

    path = tmp_path / "adult.csv"
    assert adult_csv.write(path, FOLDER / "adult") == 32_561
    ranges = {name: (low, high) for name, (_, low, high) in adult_csv.NUMBERS.items()}
    units = {name: unit for name, (unit, *_) in adult_csv.NUMBERS.items()}
    found = load_dataset(path, target="income", private=list(adult_csv.NUMBERS), ranges=ranges, units=units)
    assert found.notes == ()
    assert [f.name for f in found.private_features] == list(adult_csv.NUMBERS)
    assert len(found.inputs) + len(found.test_inputs) == 32_561
    assert found.class_names == ("<=50K", ">50K")
    assert int(found.targets.sum() + found.test_targets.sum()) == 7_841

    values = found.offset + found.scale * found.inputs[:, found.private].astype(np.float64)
    people = adult_csv.rows(FOLDER / "adult")
    for k in (0, 1000, 20_000):
        person = people[int(found.record_names[k].removeprefix("row ")) - 2]
        own = [float(person[adult_csv.COLUMNS.index(name)]) for name in adult_csv.NUMBERS]
        assert values[k] == pytest.approx(own, abs=0.1)
