"""A folder of images by class: FOLDER/cat/1.png, or FOLDER/train/cat/1.png and FOLDER/test/cat/2.png."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from reconbound._internal.checks import DataError, DataMissing, whole
from reconbound.data.dataset import DataOptions, Dataset, Feature, Pixels, clean

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # no format that runs a program
ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"))
TESTS = ("test", "val", "valid", "validation")
MOST_PIXELS = 50_000_000  # in one image: more is taken for an attack on the memory
LARGEST, SHRUNK = 128, 64  # images with a longer side than the first are shrunk to the second


def load_images(folder: str | os.PathLike[str], options: DataOptions) -> Dataset:
    """Returns images (N, C, H, W) in [0, 1] from one sub-folder per class; grey if all are grey, otherwise in colour.

    Args:
        folder: with the sub-folders.
        options: `size` is the longest side, in pixels, of all images. Without it, images keep their size if they share
            one of at most 128 pixels; otherwise they are brought to the most common shape, at most 64 pixels long.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError(f"{folder}: reading images needs Pillow: pip install 'reconbound[images]'") from None
    root = Path(folder)
    files, labels, held, names, notes = _listing(root)
    train, test = options.choose_rows(labels, "classes", held)
    chosen = [files[k] for k in np.concatenate([train, test])]
    kinds = [_header(path) for path in chosen]
    shape, grey = _shape(Counter(kind[0] for kind in kinds), options.size), all(kind[1] for kind in kinds)
    changed = sum(kind[0] != shape for kind in kinds)
    if changed:
        size = f"{shape[0]}×{shape[1]} pixels (width×height)"
        notes.append(f"{changed:,} of {len(chosen):,} images were resized to {size}")
    inputs = np.empty((len(chosen), 1 if grey else 3, shape[1], shape[0]), dtype=np.float32)
    for k, path in enumerate(chosen):
        inputs[k] = _pixels(path, shape, grey)
    facts: dict[str, Any] = {"target": Feature("class", private=False), "notes": tuple(notes)}
    facts["class_names"] = tuple(clean(name) for name in names)
    facts["record_names"] = tuple(clean(files[k].relative_to(root).as_posix()) for k in train)
    parts = (inputs[: len(train)], labels[train], inputs[len(train) :], labels[test])
    return Dataset(clean(root.resolve().name), "image", *parts, Pixels(inputs.shape[1:]), **facts)


def _listing(root: Path) -> tuple[list[Path], np.ndarray, np.ndarray | None, list[str], list[str]]:
    """Returns files, classes, which are for testing (None where the folder does not say), names of classes, notes."""
    if not root.is_dir():
        raise DataMissing(f"{root} is not a folder")
    folders = _folders(root)
    parted = "train" in folders and bool(_folders(root / "train"))  # a class may be called train, too
    used = ["train", *[name for name in TESTS if name in folders][:1]] if parted else []
    parts = [root / name for name in used] or [root]
    found = [(k, path.parent, path) for k, part in enumerate(parts) for path in _files(part)]
    images = [(k, parts[k], path) for k, _, path in found if path.suffix.lower() in ENDINGS and path.is_file()]
    loose = next((path for _, part, path in images if path.parent == part), None)
    if not images or loose is not None:
        what = f"{loose.name!r} lies in no class's folder" if loose is not None else "no images in its sub-folders"
        raise DataError(f"{root}: {what}; expected one sub-folder per class, such as {root.resolve().name}/cat/1.png")
    class_of = [path.relative_to(part).parts[0] for _, part, path in images]
    names = sorted({name for name, (k, *_) in zip(class_of, images, strict=True) if k == 0})
    for name, (_, _, path) in zip(class_of, images, strict=True):
        if name not in names:
            raise DataError(f"{path}: the class {name!r} has no images to train on")
    if len(names) < 2:
        raise DataError(f"{root}: images of only one class ({names[0]!r}): there is nothing to learn")
    others = len(found) - len(images)
    notes = [f"{others:,} files that are not images were passed over"] if others else []
    notes += [f"the folder {name!r} was passed over" for name in folders if parted and name not in used]
    labels = np.array([names.index(name) for name in class_of], dtype=np.int64)
    held = np.array([k == 1 for k, *_ in images]) if len(parts) > 1 else None
    return [path for *_, path in images], labels, held, names, notes


def _folders(root: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as reason:
        raise DataError(f"{root}: cannot be read ({reason.strerror})") from None


def _files(root: Path) -> list[Path]:
    """Lists every file below, in order of its path, without hidden ones; links to folders are not followed."""
    below: list[Path] = []
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below.extend(Path(place) / name for name in files if not name.startswith("."))
    return sorted(below)


def _shape(sizes: Counter[tuple[int, int]], size: int | None) -> tuple[int, int]:
    """Returns width and height of all: the most common ones (the smaller of equals), shrunk or brought to `size`."""
    width, height = min(sizes, key=lambda pair: (-sizes[pair], pair))
    longest = max(width, height)
    wanted = SHRUNK if longest > (LARGEST if len(sizes) == 1 else SHRUNK) else longest
    ratio = (wanted if size is None else whole("size", size)) / longest
    return max(1, round(width * ratio)), max(1, round(height * ratio))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens an image and checks its header; turns every error while it is read into one line that names the file."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise DataError(f"{path}: {image.width}×{image.height} pixels, more than {MOST_PIXELS:,}")
                yield image
    except DataError:
        raise
    except Exception as reason:
        words = " ".join(str(reason).split())[:160]
        raise DataError(f"{path}: cannot be read as an image ({words})") from None


def _header(path: Path) -> tuple[tuple[int, int], bool]:
    """Returns width and height as seen upright, and whether the image is grey."""
    with _opened(path) as image:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        size = (image.height, image.width) if turned else (image.width, image.height)
        return size, image.mode in ("1", "L", "LA", "I", "I;16", "I;16B")


def _pixels(path: Path, shape: tuple[int, int], grey: bool) -> np.ndarray:
    """Returns the pixels, (C, H, W) in [0, 1]."""
    from PIL import Image, ImageOps

    with _opened(path) as image:
        image.load()
        if image.mode == "F":  # Pillow would cut them off to whole numbers from 0 to 255 without a word
            raise DataError(f"{path}: its pixels are floating-point numbers; save it with 8 or 16 bits")
        if image.mode.startswith("I"):  # sixteen bits
            image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        seen = ImageOps.exif_transpose(image).convert("L" if grey else "RGB")
        values = np.asarray(seen if seen.size == shape else seen.resize(shape), dtype=np.float32) / np.float32(255)
    return values[None] if grey else np.moveaxis(values, 2, 0)
