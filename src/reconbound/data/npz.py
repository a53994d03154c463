"""NumPy's .npz files, never a pickle: tables or images, with classes or a number to predict."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reconbound._internal.checks import DataError, DataMissing, DataShown, InputError
from reconbound.data import csv
from reconbound.data.dataset import FOR_TABLES, DataOptions, Dataset, Feature, Pixels, clean
from reconbound.data.tables import MOST_CATEGORIES, Column, check_column_options, format_names, make_table

# names of the arrays (whatever their case): inputs, targets, inputs to test on, targets to test on
LAYOUTS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("x", "y", "x_test", "y_test"),
    ("inputs", "targets", "test_inputs", "test_targets"),
    ("images", "labels", "test_images", "test_labels"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("data", "target", "test_data", "test_target"),
    ("tokens_train", "y_train", "tokens_test", "y_test"),
    ("tokens", "y", "tokens_test", "y_test"),
)
TOKENS = "tokens"
#: The largest vocabulary: the model has parameters for each token in it.
MOST_TOKENS = 2**20
PIXEL = "pixel"
Arrays = Mapping[str, np.ndarray]


def load_npz(path: str | os.PathLike[str], options: DataOptions) -> Dataset:
    """Returns the data set in arrays X and y, or x_train, y_train, x_test, y_test, or inputs and targets.

    X of (N, columns) is a table, whose columns are named by an array feature_names, else "column 1" and so on.
    (N, H, W), (N, H, W, C) and (N, C, H, W) are images: bytes, or numbers in [0, 1] or [0, 255], or in what
    ranges={"pixel": (lowest, highest)} says. An array class_names names the classes 0, 1, ...

    An array tokens (N, length) of whole numbers in place of X makes texts; a scalar vocabulary says how many different
    tokens there may be.
    """
    file = os.fspath(path)
    arrays = _read(Path(path))
    lower = {name.lower(): value for name, value in arrays.items()}
    layout = next((names for names in LAYOUTS if names[0] in lower and names[1] in lower), None)
    if layout is None:
        names = format_names(sorted(clean(name)[:60] for name in arrays))
        raise DataError(f"{file}: no arrays X and y (or x_train and y_train, inputs and targets) among {names}")
    x, y, x_test, y_test = (lower.get(name) for name in layout)
    assert x is not None
    assert y is not None
    if (x_test is None) != (y_test is None):
        raise DataError(f"{file}: only one of {layout[2]} and {layout[3]} is there")
    held = None
    _same_length(file, layout[:2], x, y)
    if x_test is not None and y_test is not None:
        _same_length(file, layout[2:], x_test, y_test)
        if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
            raise DataError(f"{file}: {layout[0]} and {layout[2]} differ in the shape or type of a record")
        held = np.arange(len(x) + len(x_test)) >= len(x)
        x, y = np.concatenate([x, x_test]), np.concatenate([y.reshape(len(y)), y_test.reshape(len(y_test))])
    texts = layout[0].startswith(TOKENS)
    if texts and (x.ndim != 2 or x.dtype.kind not in "iu"):
        what = f"{x.dtype} of shape {x.shape}"
        raise DataError(f"{file}, array {layout[0]}: must hold whole numbers, (records, length), not {what}")
    if x.dtype.kind not in "fiub":
        raise DataError(f"{file}, array {layout[0]}: must hold numbers, not {x.dtype}")
    if y.dtype.kind not in "fiubUS":
        raise DataError(f"{file}, array {layout[1]}: must hold numbers or text, not {y.dtype}")
    if x.dtype.kind == "f" and (wrong := np.isinf(x)).any():
        raise DataError(f"{file}, array {layout[0]}: record {np.argwhere(wrong)[0][0]} holds an infinite number")
    if y.dtype.kind == "f" and (wrong := ~np.isfinite(y)).any():
        raise DataError(f"{file}, array {layout[1]}: record {np.argwhere(wrong)[0][0]} is not finite")
    make = _make_tokens if texts else _make_table if x.ndim == 2 else _make_images
    return make(file, x, y, held, lower, options)


def _read(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, which is a zip of .npy files."""
    found = {}
    try:
        with path.open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise DataError(f"{path}: a single array, not an .npz file")
            with zipfile.ZipFile(file) as archive:
                parts = archive.infolist()
                if sum(part.compress_size for part in parts) > os.fstat(file.fileno()).st_size:
                    raise DataError(f"{path}: damaged: its arrays lie within each other")  # and would fill any memory
                packed = [part for part in parts if part.compress_type != zipfile.ZIP_STORED]
                if sum(part.file_size for part in packed) > csv.MOST_UNPACKED:  # no part unpacks to more than it says
                    most = f"{csv.MOST_UNPACKED >> 20:,} MB"
                    raise DataError(f"{path}: unpacks to more than {most}; save it with numpy.savez if that is right")
                for name in archive.namelist():
                    with archive.open(name) as part:
                        found[name.removesuffix(".npy")] = np.lib.format.read_array(part, allow_pickle=False)
    except FileNotFoundError:
        raise DataMissing(f"{path} does not exist") from None
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path}: too large for this machine's memory, or damaged") from None
    except Exception as reason:  # zip, zlib and NumPy each have their own ways to say that a file is damaged
        words = " ".join(str(reason).split())
        if "allow_pickle" in words:
            raise DataError(f"{path}: holds Python objects; pickles are never read") from None
        raise DataError(f"{path}: damaged or not an .npz file ({words[:160]})") from None
    return found


def _same_length(file: str, names: Sequence[str], x: np.ndarray, y: np.ndarray) -> None:
    if x.ndim < 2 or x.ndim > 4 or 0 in x.shape:
        raise DataError(f"{file}, array {names[0]}: shape {x.shape} is neither a table (2 axes) nor images (3 or 4)")
    if y.shape not in ((len(x),), (len(x), 1)):
        must = f"{names[1]} must be of shape ({len(x)},), not {y.shape}"
        raise DataError(f"{file}: {names[0]} has {len(x)} records, so {must}")


def _texts(file: str, name: str, arrays: Arrays) -> list[str] | None:
    if name not in arrays:
        return None
    if arrays[name].dtype.kind not in "US" or arrays[name].ndim != 1:
        raise DataError(f"{file}, array {name}: must be a list of text, not {arrays[name].dtype}")
    return [clean(t.decode("utf-8", "replace") if isinstance(t, bytes) else str(t)) for t in arrays[name]]


def _classes(file: str, y: np.ndarray, labels: list[str] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns classes 0, 1, ... and their names; with class_names, whole numbers are places in that list."""
    whole = y.dtype.kind in "iub" or (y.dtype.kind == "f" and bool(np.all(y == np.round(y))))
    if labels is not None and whole:
        if y.min() < 0 or y.max() >= len(labels):
            raise DataShown(f"{file}: classes from {y.min()} to {y.max()}, but class_names holds {len(labels)}")
        return y.astype(np.int64), tuple(labels)
    if y.dtype.kind not in "iubUS" and not whole:
        what = "the targets of images and of tokens must be classes (whole numbers or text)"
        raise DataError(f"{file}: {what}, not {y.dtype}")
    found, codes = np.unique(y, return_inverse=True)
    if len(found) < 2 or len(found) > 10 * MOST_CATEGORIES:
        raise DataError(f"{file}: {len(found):,} classes; there must be 2 to {10 * MOST_CATEGORIES:,}")
    names = [v.decode("utf-8", "replace") if isinstance(v, bytes) else f"{v:.0f}" if whole else str(v) for v in found]
    return codes.reshape(-1).astype(np.int64), tuple(clean(name) for name in names)


def _make_table(
    file: str, x: np.ndarray, y: np.ndarray, held: np.ndarray | None, arrays: Arrays, options: DataOptions
) -> Dataset:
    labels, names = (_texts(file, name, arrays) for name in ("class_names", "feature_names"))
    names = names if names is not None else [f"column {k + 1}" for k in range(x.shape[1])]
    if len(names) != x.shape[1] or len(set(names)) != len(names) or "target" in names:
        raise DataError(f"{file}, array feature_names: must be {x.shape[1]} different names, none of them 'target'")
    if labels is not None or y.dtype.kind in "USb":
        codes, shown = _classes(file, y, labels)
        aim: np.ndarray = np.array(shown, dtype=object)[codes]
    else:
        aim = y.astype(np.float64)
    columns = [Column(name, x[:, k].astype(np.float64)) for k, name in enumerate(names)]
    settings = check_column_options([*names, "target"], options, "target")
    target = Column("target", aim.reshape(-1))
    return make_table(file, columns, target, settings, options, held=held)


def _make_images(
    file: str, x: np.ndarray, y: np.ndarray, held: np.ndarray | None, arrays: Arrays, options: DataOptions
) -> Dataset:
    labels = _texts(file, "class_names", arrays)
    options.refuse(FOR_TABLES, "private", "units")
    planes = _planes(file, x)
    low, high, notes = _pixel_range(file, x, options)
    targets, class_names = _classes(file, y.reshape(-1), labels)
    train, test = options.choose_rows(targets, "classes", held)
    unit = "grey levels" if high == 255.0 else ""
    scaled = [((planes[rows].astype(np.float64) - low) / (high - low)).clip(0, 1) for rows in (train, test)]
    parts = (scaled[0].astype(np.float32), targets[train], scaled[1].astype(np.float32), targets[test])
    facts: dict[str, Any] = {"class_names": class_names, "target": Feature("class", private=False)}
    pixels = Pixels(planes.shape[1:], high, unit, low)
    return Dataset(clean(Path(file).name), "image", *parts, pixels, notes=tuple(notes), **facts)


def _make_tokens(
    file: str, x: np.ndarray, y: np.ndarray, held: np.ndarray | None, arrays: Arrays, options: DataOptions
) -> Dataset:
    labels = _texts(file, "class_names", arrays)
    options.refuse(FOR_TABLES, "private", "units", "ranges")
    vocabulary, notes = _vocabulary(file, x, arrays.get("vocabulary"))
    targets, class_names = _classes(file, y.reshape(-1), labels)
    train, test = options.choose_rows(targets, "classes", held)
    tokens = x.astype(np.int64)
    declared = not notes
    features = tuple(Feature(f"token {k}", declared=declared, category=True) for k in range(x.shape[1]))
    facts: dict[str, Any] = {"class_names": class_names, "target": Feature("class", private=False)}
    facts |= {"notes": tuple(notes), "vocabulary": vocabulary}
    parts = (tokens[train], targets[train], tokens[test], targets[test])
    return Dataset(clean(Path(file).name), "tokens", *parts, features, **facts)


def _vocabulary(file: str, x: np.ndarray, given: np.ndarray | None) -> tuple[int, list[str]]:
    """Returns how many different tokens there may be, and a note where that was read off the data."""
    least, most = int(x.min()), int(x.max())
    if least < 0 or most >= MOST_TOKENS:
        raise DataShown(f"{file}: tokens from {least} to {most}; they must be from 0 to at most {MOST_TOKENS - 1:,}")
    if given is None:
        what = f"no array vocabulary was given, so {most + 1:,} different tokens was read off the data"
        return most + 1, [f"{what}; the size of the released model shows it"]
    if given.size != 1 or given.dtype.kind not in "iu":
        raise DataError(f"{file}, array vocabulary: must be one whole number, not {given.dtype} of {given.shape}")
    size = int(given.reshape(()))
    if not most < size <= MOST_TOKENS:
        must = f"must be above every token and at most {MOST_TOKENS:,}"
        raise DataShown(f"{file}, array vocabulary: {must}, got {size:,} for tokens up to {most:,}")
    return size, []


def _planes(file: str, x: np.ndarray) -> np.ndarray:
    """Returns (N, C, H, W) from (N, H, W), (N, H, W, C) or (N, C, H, W); C is 1, 3 or 4."""
    if x.ndim == 3:
        return x[:, None]
    first, last = (x.shape[axis] in (1, 3, 4) for axis in (1, 3))
    if first == last:
        what = "both could be" if first else "neither can be"
        raise DataError(f"{file}: images of shape {x.shape[1:]}: colour planes are first or last, and here {what} they")
    return x if first else np.moveaxis(x, 3, 1)


def _pixel_range(file: str, x: np.ndarray, options: DataOptions) -> tuple[float, float, list[str]]:
    """Returns the declared range; otherwise that of bytes for whole numbers, and [0, 1] or [0, 255] for others."""
    if options.ranges:
        low, high = check_column_options([PIXEL], options).ranges[PIXEL]
        outside = int(np.sum((x < low) | (x > high)))
        note = f"{outside:,} pixels lie outside {low:g} to {high:g} and were moved to its ends"
        return low, high, [note] if outside else []
    if x.dtype.kind == "f" and np.isnan(x).any():
        raise DataError(f"{file}: image {int(np.argwhere(np.isnan(x))[0][0])} holds a value that is not a number")
    if x.dtype == np.uint8:
        return 0.0, 255.0, []
    least, most = float(x.min()), float(x.max())
    if x.dtype.kind == "b" or (least >= 0 and most <= 1):
        return 0.0, 1.0, []
    if least >= 0 and most <= 255:
        note = "pixels are taken to range from 0 to 255; ranges={'pixel': (lowest, highest)} says otherwise"
        return 0.0, 255.0, [note]
    must = f"must say the pixels' range, as {PIXEL}=LOW:HIGH, for {file}"
    raise InputError("range", must, f"pixels {least:g} to {most:g}")
