"""Every command on a disk that refuses to write at some moment, and with damaged files: a clear line or the right
result, and it goes on when the fault is gone. A small seeded share; INJECT=500 runs so many of each."""

from __future__ import annotations

import math
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import small_folders
from injecting import REFUSALS, Ended, damage, ended, refusing
from reconbound._internal.files import is_leftover, unsealed
from reconbound.auditing.release import load_release
from reconbound.sweep import database

pytestmark = pytest.mark.slow

SHARE = int(os.environ.get("INJECT", "0"))
PAGES = ("report.html", "report-public.html", "frontier.html", "sweep.csv", "index.html")
#: Each test takes the next kind in turn.
KINDS = small_folders.AUDITS


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    return small_folders.make(tmp_path_factory.mktemp("done"), *KINDS[1:])


@pytest.fixture(autouse=True)
def _short(monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.05)


def copied(done: Path, base: Path, name: str, kind: str = "audit") -> None:
    """Copies the data, the sweep and the audit of a kind, which is called audit in the copy."""
    shutil.copytree(done, base, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*KINDS))
    shutil.copytree(done / kind, base / "audit")
    if name == "unfinished":
        for part in ("run.json", "leakage.safetensors", *PAGES):
            (base / "audit" / part).unlink(missing_ok=True)


def words_of(command: str, base: Path, kind: str = "audit") -> list[str]:
    return {
        "audit": small_folders.audit_words(base, "new", kind),
        "unfinished": small_folders.audit_words(base, "audit", kind),
        "again": small_folders.audit_words(base, "audit", kind),
        "sweep": small_folders.sweep_words(base, "new"),
        "sweep again": small_folders.sweep_words(base, "sweep"),
        "report": ["report", str(base / "audit")],
        "compare": ["report", str(base / "audit"), str(base / "audit"), "--out", str(base / "new.html")],
        "show": ["show", str(base / "audit")],
        "record": ["show", str(base / "audit"), "--record", "3", "--json"],
        "frontier": ["frontier", str(base / "sweep"), "--json"],
    }[command]


def same_audit(one: Path, other: Path) -> None:
    (tensors, facts), (others, told) = (unsealed(folder / "leakage.safetensors") for folder in (one, other))
    assert facts == told
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())
    for name in ("run.json", "model.safetensors", "inputs.json", *PAGES[:2]):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


#: (command, how many writes it makes at least: the fault falls on one of them)
WRITES = [("audit", 60), ("unfinished", 30), ("sweep", 60), ("report", 6), ("compare", 3), ("frontier", 9)]


@pytest.mark.parametrize(("command", "writes"), WRITES)
def test_full_disk_is_one_line_and_resumable(command, writes, done, tmp_path) -> None:
    rng = random.Random(f"{command} {SHARE}")
    for k in range(SHARE or 2):
        base, kind = tmp_path / str(k), KINDS[k % len(KINDS)]
        copied(done, base, command, kind)
        words, first, number = words_of(command, base, kind), rng.randrange(writes), rng.choice(REFUSALS)
        with refusing(base, number, first, rng.choice([1, float("inf")])):
            faulty = ended(words)
        assert faulty.clear, (kind, first, number, faulty)
        healed = ended(words)
        assert healed.status == 0, (kind, first, number, healed)
        if command in ("audit", "unfinished", "sweep"):
            check_healed(command, base, done, kind)
        shutil.rmtree(base)


#: (command, the most bytes that a file needs, and the disk beyond what is there; pages have no plotly here)
SIZES = [
    ("audit", 90_000, 180_000),
    ("unfinished", 90_000, 120_000),
    ("sweep", 140_000, 300_000),
    ("report", 90_000, 110_000),
    ("frontier", 75_000, 80_000),
]


@contextmanager
def limited_files(base: Path, size: int) -> Iterator[None]:
    """No file may grow beyond the size: the system refuses it, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def limited_disk(base: Path, size: int) -> Iterator[None]:
    """The folder is a disk of its own (`disk`), with so much room left."""
    used = int(_mount("df", "--output=used", "--block-size=1", str(base)).split()[-1])
    _mount("mount", "-o", f"remount,size={used + size}", str(base))
    try:
        yield
    finally:
        _mount("mount", "-o", "remount,size=64m", str(base))


@contextmanager
def disk(base: Path) -> Iterator[None]:
    base.mkdir()
    try:
        _mount("mount", "-t", "tmpfs", "-o", "size=64m", "reconbound-test", str(base))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be mounted here: that needs root on Linux")
    try:
        yield
    finally:
        _mount("umount", "--lazy", str(base))  # connections that were refused are closed when they are collected


def _mount(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", ["file", "disk"])
@pytest.mark.parametrize(("command", "of_file", "of_disk"), SIZES)
def test_a_disk_that_is_really_full_is_one_line_and_resumable(command, of_file, of_disk, kind, done, tmp_path) -> None:
    """The system's own refusals: writes that end in the middle, and SQLite's."""
    rng = random.Random(f"{command} {kind} {SHARE}")
    limited, most = (limited_files, of_file) if kind == "file" else (limited_disk, of_disk)
    for k in range(SHARE or 2):
        base, audit = tmp_path / str(k), KINDS[k % len(KINDS)]
        size = int(math.exp(rng.uniform(math.log(4096), math.log(most))))
        with disk(base) if kind == "disk" else nullcontext():
            copied(done, base, command, audit)
            words = words_of(command, base, audit)
            with limited(base, size):
                faulty = ended(words)
            assert faulty.clear, (audit, size, faulty)
            healed = ended(words)
            assert healed.status == 0, (audit, size, faulty, healed)
            check_healed(command, base, done, audit)
            shutil.rmtree(base / "audit")
            shutil.rmtree(base / "sweep")


def check_healed(command: str, base: Path, done: Path, kind: str) -> None:
    """What a command wrote is what it writes on a healthy disk."""
    if command in ("audit", "unfinished"):
        same_audit(base / ("new" if command == "audit" else "audit"), done / kind)
    if command == "sweep":
        assert (base / "new" / "sweep.csv").read_bytes() == (done / "sweep" / "sweep.csv").read_bytes()
    left = list(base.rglob("*.part"))  # a sweep leaves young ones: another worker may be writing them
    assert all(is_leftover(path.name) for path in left) if command.startswith("sweep") else not left


READS = ["show", "record", "report", "compare", "again", "unfinished", "frontier", "sweep again"]


@pytest.mark.parametrize("command", READS)
def test_damaged_file_is_one_line_or_harmless(command, done, tmp_path) -> None:
    rng = random.Random(f"{command} {SHARE}")
    base = tmp_path / "base"  # the same for all: tables break long paths anywhere
    wanted: dict[str, Ended] = {}
    for k in range(SHARE or {"unfinished": 4, "again": 4, "sweep again": 4}.get(command, 8)):
        kind = "audit" if "sweep" in command or command == "frontier" else KINDS[k % len(KINDS)]
        copied(done, base, command, kind)
        words = words_of(command, base, kind)
        if kind not in wanted:
            wanted[kind] = ended(words)
            assert wanted[kind].status == 0, wanted
            shutil.rmtree(base)
            copied(done, base, command, kind)
        inside = base / ("sweep" if command in ("frontier", "sweep again") else "audit")
        files = [
            p for p in sorted(inside.rglob("*")) if p.is_file() and p.name not in ("lock", "sweep.db.lock", *PAGES)
        ]
        damaged = rng.choice(files)
        what = kind, damage(damaged, rng)
        found = ended(words)
        assert found.clear, (what, found)
        if found.status == 0:
            assert found.out == wanted[kind].out, what
            if command in ("report", "again", "unfinished"):
                if command == "report" and damaged.name == "inputs.json":  # of the model: not read, and not restored
                    shutil.copy(done / kind / "inputs.json", damaged)
                same_audit(base / "audit", done / kind)
            if command in ("sweep again", "frontier"):
                assert (inside / "sweep.csv").read_bytes() == (done / "sweep" / "sweep.csv").read_bytes(), what
        shutil.rmtree(base)


def test_a_damaged_release_is_refused(done, tmp_path) -> None:
    rng = random.Random(SHARE)
    rows = {"age": [30, 40], "hours": [3, 70], "job": ["clerk", "cook"]}
    wanted = load_release(done / "audit").outputs(rows)
    for name in ("model.safetensors", "inputs.json"):
        for _ in range(SHARE or 10):
            folder = tmp_path / "a"
            shutil.copytree(done / "audit", folder)
            what = damage(folder / name, rng)
            try:
                assert torch.equal(load_release(folder).outputs(rows), wanted), what
            except ValueError as reason:
                said = str(reason)
                assert "\n" not in said, (what, said)
            shutil.rmtree(folder)
    path = Path(shutil.copytree(done / "audit", tmp_path / "b")) / "model.safetensors"
    content = path.read_bytes()
    for at in range(8 + int.from_bytes(content[:8], "little"), len(content)):  # every byte of a parameter
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="was changed or damaged: it is not the model that was trained here"):
            load_release(tmp_path / "b")
    for command in ("report", "show"):
        found = ended([command, str(tmp_path / "b")])
        assert (found.status, found.clear) == (2, True), found
        assert "it is not the model that was trained here" in found.err


def test_the_model_is_restored_from_the_checkpoint(done, tmp_path) -> None:
    copied(done, tmp_path, "again")
    model, words = tmp_path / "audit" / "model.safetensors", words_of("again", tmp_path)
    for spoil in (lambda: model.write_bytes(b""), model.unlink, lambda: model.write_bytes(model.read_bytes()[:-1])):
        spoil()
        assert ended(words).status == 0
        assert model.read_bytes() == (done / "audit" / "model.safetensors").read_bytes()


def test_snapshots_of_another_audit_are_refused(done, tmp_path) -> None:
    """The same data and model, another seed: the parameters fit, and the numbers would be wrong."""
    copied(done, tmp_path, "unfinished")
    other = [*small_folders.audit_words(tmp_path, "other"), "--seed", "2"]
    assert ended(other).status == 0
    for path in (tmp_path / "other" / "checkpoints").glob("parameters-*"):
        shutil.copy(path, tmp_path / "audit" / "checkpoints" / path.name)
    found = ended(words_of("unfinished", tmp_path))
    assert found.clear
    assert found.status == 2
    assert "is of another audit, run or step" in found.err


def test_a_damaged_snapshot_comes_with_advice(done, tmp_path) -> None:
    copied(done, tmp_path, "unfinished")
    for path in (tmp_path / "audit" / "checkpoints").glob("parameters-*"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    found = ended(words_of("unfinished", tmp_path))
    assert found.clear
    assert found.status == 2
    assert "bring it back from a copy, or start over with --fresh" in found.err
    assert ended([*words_of("unfinished", tmp_path), "--fresh"]).status == 0
