"""Folders of images by class: sizes, colours, names, broken files and attacks."""

import struct
import sys
import zlib
from contextlib import suppress

import numpy as np
import pytest

from reconbound._internal.checks import InputError
from reconbound.data import DataError, DataMissing, DataOptions, DataWarning, load_dataset
from reconbound.data import images as pictures

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def put(path, size=(7, 5), mode="L", value=None):
    """A picture of noise, or of one value; width and height as Pillow has them. Its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8) if value is None else np.full(shape, value, np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def pets(tmp_path):
    """Ten grey pictures in two classes, and their pixels by name."""
    return tmp_path / "pets", {
        f"{kind}/{k}.png": put(tmp_path / "pets" / kind / f"{k}.png") for kind in ("cat", "dog") for k in range(5)
    }


def test_grey_images_by_class(pets):
    root, pixels = pets
    found = load_dataset(root, test_share=0.2)
    assert found.name == "pets"
    assert found.inputs.shape == (8, 1, 5, 7)
    assert found.test_inputs.shape == (2, 1, 5, 7)
    assert found.class_names == ("cat", "dog")
    for k, name in enumerate(found.record_names):
        assert np.allclose(found.inputs[k, 0], pixels[name] / 255)
        assert found.class_names[found.targets[k]] == name.split("/")[0]
    assert found.features[8].name == "pixel (1, 1)"
    assert found.features[8].high == 255
    assert len(load_dataset(root, limit=4).inputs) == 4


def test_one_image_in_colour_makes_all_of_them_colour(pets):
    root, _ = pets
    pixels = put(root / "cat" / "red.png", mode="RGB")
    found = load_dataset(root, test_share=0)
    assert found.inputs.shape == (11, 3, 5, 7)
    assert np.allclose(found.inputs[found.record_names.index("cat/red.png")], np.moveaxis(pixels, 2, 0) / 255)
    grey = found.inputs[found.record_names.index("dog/0.png")]
    assert np.array_equal(grey[0], grey[1])


def test_own_train_and_test_folders(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        for kind in ("a", "b"):
            for k in range(count):
                put(tmp_path / part / kind / f"{k}.png")
    found = load_dataset(tmp_path)
    assert (len(found.inputs), len(found.test_inputs)) == (6, 4)
    assert all(name.startswith("train/") for name in found.record_names)
    assert found.class_names == ("a", "b")
    put(tmp_path / "val" / "a" / "0.png")
    with pytest.warns(DataWarning, match="the folder 'val' was passed over"):
        assert len(load_dataset(tmp_path).inputs) == 6
    put(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(DataError, match="the class 'c' has no images to train on"):
        load_dataset(tmp_path)


def test_a_class_may_be_called_train(tmp_path):
    for kind in ("train", "test", "bus"):
        put(tmp_path / kind / "0.png")
    assert load_dataset(tmp_path, test_share=0).class_names == ("bus", "test", "train")


def test_images_of_several_sizes_are_resized_with_a_notice(pets):
    root, _ = pets
    put(root / "cat" / "large.png", size=(40, 30), value=51)
    with pytest.warns(DataWarning, match=r"1 of 11 images were resized to 7×5 pixels"):
        found = load_dataset(root, test_share=0)
    assert np.allclose(found.inputs[found.record_names.index("cat/large.png")], 0.2)
    with pytest.warns(DataWarning, match=r"11 of 11 images were resized to 14×10"):
        assert load_dataset(root, size=14).shape == (1, 10, 14)
    with pytest.raises(InputError, match="size must be at least 1"):
        load_dataset(root, size=0)


def test_large_images_are_shrunk(tmp_path):
    for kind in "ab":
        put(tmp_path / kind / "0.png", size=(400, 200))
    with pytest.warns(DataWarning, match=r"2 of 2 images were resized to 64×32"):
        assert load_dataset(tmp_path, test_share=0).shape == (1, 32, 64)


def test_pictures_are_seen_upright(tmp_path):
    for kind in "ab":
        (tmp_path / kind).mkdir()
        picture = Image.fromarray(np.arange(35, dtype=np.uint8).reshape(5, 7))
        exif = picture.getexif()
        exif[0x0112] = 6  # turned by a quarter
        picture.save(tmp_path / kind / "0.png", exif=exif)
    found = load_dataset(tmp_path, test_share=0)
    assert found.shape == (1, 7, 5)
    assert np.allclose(found.inputs[0, 0] * 255, np.rot90(np.arange(35).reshape(5, 7), -1))


def test_sixteen_bits_palettes_and_transparency(tmp_path):
    for kind in "ab":
        (tmp_path / kind).mkdir()
    Image.fromarray(np.full((4, 4), 32768, np.uint16)).save(tmp_path / "a" / "deep.png")
    Image.fromarray(np.full((4, 4), 100, np.uint8)).save(tmp_path / "b" / "plain.png")
    found = load_dataset(tmp_path, test_share=0)
    assert found.shape == (1, 4, 4)
    assert np.allclose(found.inputs[0], 128 / 255)
    Image.fromarray(np.full((4, 4, 4), 77, np.uint8)).save(tmp_path / "b" / "clear.png")
    Image.fromarray(np.full((4, 4), 1, np.uint8)).convert("P").save(tmp_path / "b" / "few.gif")
    assert load_dataset(tmp_path, test_share=0).inputs.shape == (4, 3, 4, 4)


def test_names_with_html_stay_text(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    for kind in (evil, "b\x1b[31m"):
        put(tmp_path / "set" / kind / "<i>1.png")
    found = load_dataset(tmp_path / "set", test_share=0)
    assert found.class_names == (evil, "b[31m")
    assert found.record_names[0] == f"{evil}/<i>1.png"


def test_other_files_are_noted_and_hidden_files_skipped(pets):
    root, _ = pets
    (root / "cat" / "notes.txt").write_text("x")
    (root / "cat" / ".DS_Store").write_text("x")
    (root / ".git").mkdir()
    (root / ".git" / "a.png").write_text("x")
    with pytest.warns(DataWarning, match="1 files that are not images"):
        assert len(load_dataset(root, test_share=0).inputs) == 10


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_a_broken_image_is_named(pets, content):
    root, _ = pets
    (root / "dog" / "broken.png").write_bytes(content)
    with pytest.raises(DataError, match=r"dog.broken\.png: cannot be read as an image") as caught:
        load_dataset(root)
    assert "\n" not in str(caught.value)


def test_damaged_images_raise_only_our_error(pets):
    root, _ = pets
    rng, path = np.random.default_rng(2), root / "dog" / "4.png"
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    with pytest.raises(DataError, match=r"4\.png: cannot be read as an image"):
        load_dataset(root, test_share=0)
    for _ in range(60):
        wrong = bytearray(content)
        wrong[int(rng.integers(len(wrong)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(wrong))
        with suppress(DataError, DataWarning):
            load_dataset(root, test_share=0)


def bomb(path, side):
    """A PNG whose header promises side × side pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [8_000, 12_000, 60_000])
def test_images_that_would_fill_the_memory_are_refused(pets, side):
    root, _ = pets
    bomb(root / "cat" / "bomb.png", side)
    with pytest.raises(DataError, match=r"bomb\.png: (8000×8000 pixels|12000×12000 pixels|cannot be read.*bomb)"):
        load_dataset(root)


def test_folders_that_hold_no_classes(tmp_path):
    with pytest.raises(DataError, match="no images in its sub-folders; expected one sub-folder per class"):
        load_dataset(tmp_path)
    put(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match=r"images of one class alone \('cat'\)"):
        load_dataset(tmp_path)
    put(tmp_path / "loose.png")
    with pytest.raises(DataError, match=r"'loose\.png' lies in no class's folder"):
        load_dataset(tmp_path)
    with pytest.raises(DataMissing, match="is not a folder"):
        pictures.load_images(tmp_path / "nowhere", DataOptions())
    with pytest.raises(InputError, match="private is for tables"):
        load_dataset(tmp_path, private="x")


def test_missing_pillow_names_package(pets, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'reconbound\[images\]'"):
        load_dataset(pets[0])
