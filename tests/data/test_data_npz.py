"""Arrays from .npz files: tables and images are told apart, and nothing is ever unpickled."""

import numpy as np
import pytest

from reconbound._internal.checks import InputError
from reconbound.data import DataError, DataMissing, DataWarning, load_dataset

RNG = np.random.default_rng(0)
LABELS = np.arange(12) % 3


@pytest.fixture
def save(tmp_path):
    def saved(**arrays):
        np.savez(tmp_path / "a.npz", **arrays)
        return tmp_path / "a.npz"

    return saved


@pytest.mark.parametrize("shape", [(12, 6, 5), (12, 6, 5, 3), (12, 3, 6, 5), (12, 6, 5, 1), (12, 1, 6, 5)])
def test_bytes_are_images_of_any_order_of_axes(save, shape):
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    found = load_dataset(save(X=x, y=LABELS), test_share=0)
    planes = x[:, None] if x.ndim == 3 else np.moveaxis(x, 3, 1) if shape[-1] in (1, 3) else x
    assert found.kind == "image"
    assert np.allclose(found.inputs, planes / 255)
    assert found.class_names == ("0", "1", "2")
    assert (found.scale[0], found.offset[0]) == (255, 0)


@pytest.mark.parametrize(
    ("names", "tests"),
    [
        (("x_train", "y_train", "x_test", "y_test"), True),
        (("X_train", "Y_train", "X_test", "Y_test"), True),
        (("inputs", "targets", "test_inputs", "test_targets"), True),
        (("X", "y", "", ""), False),
        (("images", "labels", "", ""), False),
    ],
)
def test_names_of_arrays_and_own_test_sets(save, names, tests):
    x, x_test = RNG.random((12, 4, 4)), RNG.random((6, 4, 4))
    arrays = {names[0]: x, names[1]: LABELS} | ({names[2]: x_test, names[3]: LABELS[:6]} if tests else {})
    found = load_dataset(save(**arrays))
    assert len(found.inputs) == (12 if tests else 9)
    if tests:
        assert np.allclose(found.test_inputs[:, 0], x_test)
        assert found.test_targets.tolist() == LABELS[:6].tolist()


def test_tables_with_names_classes_and_missing_values(save):
    x = RNG.random((12, 2))
    x[3, 1] = np.nan
    path = save(X=x, y=LABELS, feature_names=np.array(["<i>age</i>", "b"]), class_names=np.array(["p", "q", "r"]))
    found = load_dataset(path, ranges={"<i>age</i>": (0, 1), "b": (0, 2)}, test_share=0)
    assert [f.name for f in found.features] == ["<i>age</i>", "b", "b (missing)"]
    assert found.class_names == ("p", "q", "r")
    assert np.allclose(found.inputs[:, 0], x[:, 0])
    assert found.inputs[3, 1:].tolist() == [0.5, 1]
    assert found.private.tolist() == [0, 1]


def test_tables_with_a_number_or_text_to_predict(save):
    x = RNG.random((12, 2))
    ranges = {"column 1": (0, 1), "column 2": (0, 1)}
    number = load_dataset(
        save(X=x, y=np.linspace(-1, 1, 12)[:, None]), ranges={**ranges, "target": (-1, 1)}, test_share=0
    )
    assert number.task == "number"
    assert np.allclose(number.targets, np.linspace(0, 1, 12))
    text = load_dataset(save(X=x, y=np.array(["u", "v", "w"])[LABELS]), ranges=ranges, test_share=0)
    assert text.class_names == ("u", "v", "w")
    assert text.targets.tolist() == LABELS.tolist()
    with pytest.warns(DataWarning, match=r"column [12]: no range was given"):
        assert load_dataset(save(X=x, y=LABELS)).inferred_ranges


def test_pixels_of_other_ranges(save):
    x = RNG.uniform(-1, 1, (12, 4, 4))
    with pytest.raises(InputError, match=r"range must say the pixels' range, as pixel=LOW:HIGH"):
        load_dataset(save(X=x, y=LABELS))
    found = load_dataset(save(X=x, y=LABELS), ranges={"pixel": (-1, 1)}, test_share=0)
    assert np.allclose(found.offset + found.scale * found.inputs.reshape(12, -1), x.reshape(12, -1), atol=1e-6)
    with pytest.warns(DataWarning, match="pixels lie outside 0 to 1"):
        assert load_dataset(save(X=x, y=LABELS), ranges={"pixel": (0, 1)}).inputs.min() == 0
    with pytest.warns(DataWarning, match="taken to range from 0 to 255"):
        assert load_dataset(save(X=100 * np.abs(x), y=LABELS)).features[0].high == 255
    assert load_dataset(save(X=x > 0, y=LABELS)).inputs.max() == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": LABELS}, r"no arrays X and y .* among a"),
        ({"X": np.zeros((12, 2)), "y": LABELS[:5]}, r"X has 12 records|x has 12 records"),
        ({"X": np.zeros(12), "y": LABELS}, "neither a table"),
        ({"X": np.zeros((12, 2, 2, 2, 2)), "y": LABELS}, "neither a table"),
        ({"X": np.zeros((0, 2)), "y": LABELS[:0]}, "neither a table"),
        ({"X": np.zeros((12, 5, 5, 5)), "y": LABELS}, "neither can be"),
        ({"X": np.zeros((12, 3, 5, 3)), "y": LABELS}, "both could be"),
        ({"X": np.full((12, 2), np.inf), "y": LABELS}, "record 0 holds an infinite number"),
        ({"X": np.full((12, 2, 2), np.nan), "y": LABELS}, "image 0 holds a value that is not a number"),
        ({"X": np.zeros((12, 2)), "y": np.full(12, np.nan)}, "record 0 is not finite"),
        ({"X": np.zeros((12, 2)), "y": np.zeros(12)}, "nothing to learn"),
        ({"X": np.zeros((12, 2, 2)), "y": np.zeros(12, int)}, "1 classes"),
        ({"X": np.zeros((12, 2, 2)), "y": LABELS + 0.5}, "must be classes"),
        ({"X": np.zeros((12, 2), complex), "y": LABELS}, "must hold numbers, not complex128"),
        ({"X": np.zeros((12, 2)), "y": LABELS.astype(complex)}, "complex128"),
        ({"X": np.zeros((12, 2, 2)), "y": LABELS, "class_names": np.array(["a"])}, "class_names holds 1"),
        ({"X": np.zeros((12, 2)), "y": LABELS, "feature_names": np.array(["a"])}, "must be 2 different names"),
        ({"X": np.zeros((12, 2)), "y": LABELS, "feature_names": np.array([1, 2])}, "must be a list of text"),
        ({"X": np.zeros((12, 2)), "y": LABELS, "x_test": np.zeros((2, 2))}, "only one of x_test and y_test"),
        (
            {"X": np.zeros((12, 2)), "y": LABELS, "x_test": np.zeros((2, 3)), "y_test": LABELS[:2]},
            "differ in the shape",
        ),
        ({"X": np.array([[{}]] * 12), "y": LABELS}, "pickles are never read"),
    ],
)
def test_errors_are_reported(save, arrays, message):
    path = save(**arrays)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


class Planted:
    """Counts how often it was unpickled."""

    loaded = 0

    def __setstate__(self, state: object) -> None:
        Planted.loaded += 1

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def test_damaged_files_and_pickles(save, tmp_path):
    content = save(X=RNG.random((12, 2)), y=LABELS).read_bytes()
    path = tmp_path / "b.npz"
    for wrong in (b"", b"hello", content[:100], content[:-30], content[:80] + bytes(40) + content[120:], b"\x80\x04N."):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"b\.npz: damaged or not an \.npz file"):
            load_dataset(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="a single array"):
        load_dataset(path)
    with pytest.raises(DataError, match="holds Python objects; pickles are never read"):
        load_dataset(save(X=np.array([[Planted(), 1.0]] * 12, dtype=object), y=LABELS))
    assert Planted.loaded == 0
    with pytest.raises(DataMissing, match=r"c\.npz does not exist"):
        load_dataset(tmp_path / "c.npz")
    with pytest.raises(InputError, match="private is for tables"):
        load_dataset(save(X=np.zeros((12, 4, 4)), y=LABELS), private="x")


def test_flipped_bytes_raise_only_our_error(save, tmp_path):
    content = save(X=RNG.random((12, 4, 4)), y=LABELS).read_bytes()
    rng, path, refused = np.random.default_rng(1), tmp_path / "c.npz", 0
    for _ in range(300):
        wrong = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            wrong[int(rng.integers(len(wrong)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(wrong))
        try:
            load_dataset(path)
        except InputError:
            refused += 1
    assert refused > 100
