"""Random hostile CSV files, .npz files, images and options: a result or one line, and nothing is written elsewhere.

A small seeded share; FUZZ=500 tries so many of each. Faults for users of Python alone: full disks and flipped bits."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import reconbound as rb
from injecting import REFUSALS, damage, ended, refusing
from reconbound.cli import app as cli
from reconbound.cli.options import option_names
from wrong_values import _data, _ledger, _loss, ledger_with_worlds

SHARE = int(os.environ.get("FUZZ", "0"))
PIL = pytest.importorskip("PIL.Image")
SHORT = ["--steps", "2", "--runs", "1", "--model", "linear", "--quiet"]


def check(words: list[str], place: Path, about: object) -> int:
    """Runs a command in a folder of its own; the only thing that it may write is its folder `out`."""
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    found = ended(words)
    assert found.clear, (about, words, found)
    assert "\x1b" not in found.err, about
    out = place / "out"
    after = {path for path in place.rglob("*") if path != out and out not in path.parents}
    assert after == set(before), (about, after ^ set(before))
    assert all(path.is_dir() or path.stat().st_mtime_ns == then for path, then in before.items()), about
    shutil.rmtree(out, ignore_errors=True)
    return int(found.status == 0)


CELLS = ["1", "2.5", "-3", "", "nan", "inf", "-inf", "1e400", "1e-400", "a", "é", "\x00", "\x1b[31m", '"', '""', "'",
         ",", ";", "\t", "\r", "\n", "1,5", "$3", "50%", "0x1F", "1_000", "x" * 5000, "9" * 400, "=1+1", "NULL",
         "\ufeff", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "٣", "True",
         "2020-01-01", " 4 "]  # fmt: skip


def nearly_good_csv(rng: random.Random) -> bytes:
    """A table of numbers and words with two classes, b0, and at most two odd cells."""
    rows = [[f"{rng.uniform(0, 9):.2f}", f"{rng.randint(0, 90)}", rng.choice("xyz"), "pq"[k % 2]] for k in range(24)]
    for _ in range(rng.randint(0, 2)):
        rng.choice(rows)[rng.randrange(4)] = rng.choice(CELLS)
    comma = rng.choice([",", ",", ";", "\t"])
    text = "\n".join(comma.join(row) for row in [["a", "age", "\x1b[1mjob", "b0"], *rows])
    return text.encode(rng.choice(["utf-8", "utf-8", "utf-16"]), "replace")


def random_csv(rng: random.Random) -> bytes:
    columns, rows = rng.randint(0, 5), rng.randint(0, 25)
    comma, end = rng.choice([",", ",", ",", ";", "\t", "|"]), rng.choice(["\n", "\n", "\r\n", "\r"])
    names = [
        rng.choice(["a", "b", "age", "", "a", "\x1b[1m", "pay,", "1"]) + rng.choice(["", str(k)])
        for k in range(columns)
    ]
    plain = rng.random() < 0.5
    cells = ["1", "2", "3.5", "0", "7"] if plain else CELLS
    lines = [comma.join(names)]
    for _ in range(rows):
        width = columns if rng.random() < 0.95 else rng.randint(0, 7)
        lines.append(comma.join(rng.choice(cells if rng.random() < 0.97 else CELLS) for _ in range(width)))
    text = end.join(lines).encode(rng.choice(["utf-8", "utf-8", "latin-1", "utf-16"]), "replace")
    if rng.random() < 0.2 and text:
        spoilt = bytearray(text)
        spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        text = bytes(spoilt)
    return text


def test_random_csv_files(tmp_path) -> None:
    rng, read = random.Random(f"csv {SHARE}"), 0
    for k in range(SHARE or 12):
        path, good = tmp_path / "d.csv", rng.random() < 0.5
        path.write_bytes(nearly_good_csv(rng) if good else random_csv(rng))
        more = rng.choice([[], ["--target", "a"], ["--target", "b0"], ["--private", "a"], ["--header", "p,q,r"]])
        words = ["audit", str(path), *SHORT, *(["--target", "b0"] if good else more), "--out", str(tmp_path / "out")]
        read += check(words, tmp_path, (k, path.read_bytes()[:300]))
    assert read > 0


def test_random_parquet_files(tmp_path) -> None:
    """Whole ones with cells of many types, and damaged ones."""
    rng, read = random.Random(f"parquet {SHARE}"), 0
    for k in range(SHARE or 15):
        path, rows = tmp_path / "d.parquet", rng.randint(4, 20)
        columns = {name: [rng.choice(CELLS) for _ in range(rows)] for name in rng.sample(["b", "\x1b[1m", "age"], 2)}
        columns |= {"a": [rng.random() for _ in range(rows)], "y": [n % 2 for n in range(rows)]}
        pd.DataFrame(columns).to_parquet(path, compression=rng.choice(["snappy", "gzip", "zstd", None]))
        if rng.random() < 0.6:
            damage(path, rng)
        words = ["audit", str(path), *SHORT, "--target", "y", "--out", str(tmp_path / "out")]
        read += check(words, tmp_path, k)
    assert read > 0


KINDS = ["f8", "f4", "f2", "i8", "u1", "i2", "?", "c16", "U3", "S2", "M8[D]", "O", ">f8", "f8"]


def random_array(rng: random.Random) -> np.ndarray:
    shape = tuple(rng.choice([0, 1, 2, 3, 5, 9]) for _ in range(rng.randint(0, 4)))
    kind = rng.choice(KINDS)
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 5, shape)
    array = values.astype(kind) if kind != "O" else values.astype(object)
    if array.size and array.dtype.kind == "f" and rng.random() < 0.3:
        array.flat[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, -6e4])
    return array


def good_arrays(rng: random.Random) -> dict[str, np.ndarray]:
    make = np.random.default_rng(rng.randrange(2**32))
    shape = rng.choice([(12, 3), (12, 4, 4), (12, 1, 4, 4)])
    x, y = make.random(shape).astype(rng.choice(["f4", "f8"])), np.arange(12) % 2
    names = rng.choice([("x", "y"), ("x_train", "y_train"), ("inputs", "targets"), ("data", "target")])
    if rng.random() < 0.25:  # texts
        return {"tokens": make.integers(0, 9, (12, 3), dtype=rng.choice(["i8", "u1", "u8"])), "y": y}
    return {names[0]: x, names[1]: y}


def random_npz(rng: random.Random, path: Path) -> None:
    arrays = good_arrays(rng) if rng.random() < 0.6 else {}
    for _ in range(rng.randint(0, 2)):
        names = ["x", "y", "x_train", "y_train", "x_test", "y_test", "feature_names", "class_names", "../e", "a" * 300]
        names += ["tokens", "tokens_test", "vocabulary"]
        arrays[rng.choice([*names, *arrays])] = random_array(rng)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as file:
        for name, array in arrays.items():
            one = io.BytesIO()
            np.save(one, array, allow_pickle=True)  # a hostile file: load_dataset must refuse its pickle
            content = bytearray(one.getvalue())
            if rng.random() < 0.2:  # a header that lies
                content[rng.randrange(min(len(content), 128))] = rng.randrange(256)
            file.writestr(f"{name}.npy", bytes(content))
    path.write_bytes(made.getvalue())
    if rng.random() < 0.3:
        damage(path, rng)


def test_random_npz_files(tmp_path) -> None:
    rng = random.Random(f"npz {SHARE}")
    for k in range(SHARE or 15):
        path = tmp_path / "d.npz"
        random_npz(rng, path)
        more = rng.choice([[], [], ["--range", "pixel=0:255"], ["--private", "a"], ["--limit", "5"]])
        check(["audit", str(path), *SHORT, *more, "--out", str(tmp_path / "out")], tmp_path, k)


def random_image(rng: random.Random, path: Path) -> None:
    mode = rng.choice(["L", "RGB", "RGBA", "P", "1", "I;16", "F", "LA", "CMYK"])
    kind = {"F": "TIFF", "I;16": "PNG", "CMYK": "JPEG"}.get(
        mode, rng.choice(["PNG", "GIF", "BMP"] if mode not in ("LA",) else ["PNG"])
    )
    size = rng.choice([(4, 4), (4, 4), (5, 3), (1, 1), (1, 300)])
    try:
        PIL.new(mode, size, rng.choice([0, 1])).save(path, kind)
    except (OSError, TypeError, ValueError):
        path.write_bytes(b"no image")
    if rng.random() < 0.15:
        damage(path, rng)


def test_random_folders_of_images(tmp_path) -> None:
    rng = random.Random(f"images {SHARE}")
    for k in range(SHARE or 8):
        root = tmp_path / "pictures"
        for name in rng.sample(["cat", "dog", "train/a", "train/b", "test/a", "\x1b[2J", ".hidden"], rng.randint(1, 4)):
            (root / name).mkdir(parents=True, exist_ok=True)
            for n in range(rng.randint(1, 5)):
                path = root / name / f"{n}.{rng.choice(['png', 'jpg', 'gif', 'tif', 'txt', 'bmp'])}"
                if rng.random() < 0.05:
                    os.mkfifo(path)
                elif rng.random() < 0.05:
                    path.symlink_to(rng.choice(["/dev/zero", "/dev/stdin", "nowhere", str(root)]))
                else:
                    random_image(rng, path)
        before = sorted(str(path) for path in root.rglob("*"))
        more = rng.choice([[], ["--size", "4"], ["--size", "1"]])
        found = ended(["audit", str(root), *SHORT, *more, "--out", str(tmp_path / "out")])
        assert found.clear, (k, before, found)
        assert sorted(str(path) for path in root.rglob("*")) == before
        shutil.rmtree(root)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


WORDS = ["", "-1", "0", "1", "2", "0.5", "1e-5", "nan", "inf", "-inf", "1e400", "x", "every", "fixed", "poisson",
         "hard", "a=1", "a=0:1", "lr=0.1", "lr=0.1:1:log", "\x1b[31m", "9" * 50, "1/0", "3x3", "é", "--", "-",
         "sqlite://", "a:b", "os:system", "true", "None", "lecam", "theorem1", "logistic", "1,2"]  # fmt: skip


def test_random_options(tmp_path, monkeypatch) -> None:
    """Every command with options drawn from all that there are, and values that are wrong for most."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(f"options {SHARE}")
    for k in range(SHARE or 40):
        command = rng.choice(
            ["bound", "bound", "calibrate", "calibrate", "audit", "sweep", "report", "show", "frontier"]
        )
        known = sorted(option_names(cli.app, command) - {"--out", "-o", "--curve", "--data-folder"})  # they name files
        words = [command, *rng.choice([[], [], [rng.choice(["nowhere", "", "digits.csv", "\x1b"])]])]
        for name in rng.sample(known, min(len(known), rng.randint(0, 5))):
            words += [name, *([rng.choice(WORDS)] if rng.random() < 0.9 else [])]
        if command in ("audit", "sweep"):
            words = [command, "nowhere", *words[1:]] if rng.random() < 0.9 else [*words, "--steps", "0"]
        before = sorted(tmp_path.rglob("*"))
        found = ended(words)
        lines = [line for line in found.err.splitlines() if line.startswith("reconbound: ")]
        assert found.status is not None, (k, words, found)
        assert found.status == 0 or len(lines) >= 1, (k, words, found)
        assert "Traceback" not in found.err, (k, words, found)
        assert "\x1b" not in found.err, (k, words)
        assert sorted(tmp_path.rglob("*")) == before, (k, words)


def learner(folder: Path) -> rb.PrivateSGD:
    torch.manual_seed(0)
    settings = rb.Settings(1.0, 1.0, 0.5, seed=1)
    made = nn.Linear(3, 2)
    return rb.PrivateSGD(made, _loss, *_data(), settings, checkpoint=folder, every=1, progress=False, check=False)


def state_of(done: rb.PrivateSGD) -> list[torch.Tensor]:
    assert done.accountant is not None
    return [*done.model.state_dict().values(), *done.accountant.state().values()]


def test_a_disk_that_refuses_loses_nothing_of_a_training_in_python(tmp_path) -> None:
    wanted = state_of(learner(tmp_path / "wanted").fit(5))
    rng, stopped = random.Random(f"python disk {SHARE}"), 0
    for k in range(SHARE or 12):
        folder = tmp_path / str(k)
        number = rng.choice(REFUSALS)
        with refusing(tmp_path, number, rng.randrange(25), rng.choice([1, 3, float("inf")])):
            try:
                learner(folder).fit(5)
                said = None
            except (OSError, ValueError) as error:
                said = str(error)
        if said is not None:
            stopped += 1
            assert "\n" not in said
            assert os.strerror(number) in said
        found = state_of(learner(folder).fit(5))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), k
    assert stopped > 0


@pytest.mark.filterwarnings("ignore:.*going on from the other one")
def test_a_flipped_bit_in_a_checkpoint_is_seen_in_python(tmp_path) -> None:
    learner(tmp_path / "good").fit(5)
    wanted = state_of(learner(tmp_path / "good").fit(5))
    rng = random.Random(f"python bits {SHARE}")
    for k in range(SHARE or 12):
        folder = tmp_path / "spoilt"
        shutil.copytree(tmp_path / "good", folder)
        what = damage(rng.choice(sorted(folder.glob("checkpoint-*"))), rng)
        try:
            found, said = state_of(learner(folder).fit(5)), ""
        except ValueError as error:
            found, said = wanted, str(error)
        assert "\n" not in said, (what, said)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), (k, what)
        shutil.rmtree(folder)


def test_a_saved_ledger_is_whole_or_refused(tmp_path) -> None:
    path, rng = tmp_path / "ledger", random.Random(f"ledger {SHARE}")
    for k in range(SHARE or 12):
        ledger = _ledger() if k % 2 else ledger_with_worlds()
        ledger.save(path)
        what = damage(path, rng)
        try:
            found, said = rb.FisherAccountant.load(path), str(path)
        except ValueError as error:
            found, said = ledger, str(error)
        assert all(torch.equal(v, found.state()[n]) for n, v in ledger.state().items()), what
        assert "\n" not in said
        assert str(path) in said
        ledger.save(path)
        number = rng.choice(REFUSALS)
        with refusing(tmp_path, number, rng.randrange(3)), pytest.raises(OSError, match=os.strerror(number)):
            ledger.save(path)
        kept = rb.FisherAccountant.load(path).state()
        assert all(torch.equal(value, kept[name]) for name, value in ledger.state().items())
        assert not list(tmp_path.glob(".*.part")) or number in (errno.EROFS, errno.EACCES)
        for left in tmp_path.glob(".*.part"):
            left.unlink()
