"""Received folders in which somebody changed any file and made its digest anew, through every command that reads it:
a result or one line, nothing that steers the terminal, nothing written elsewhere, and no waiting for ever.

A small seeded share; FUZZ=200 tries so many changes."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sqlite3
import traceback
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import auditing
import reconbound as rb
import small_folders
from injecting import Ended, ended
from reconbound.sweep import database
from small_folders import AUDITS
from tampering import tamper
from waiting import time_limit
from wrong_values import _ledger, ledger_with_worlds

pytestmark = pytest.mark.slow

SHARE = int(os.environ.get("FUZZ", "0"))
PEOPLE = {"age": [30, 40], "hours": [3, 70], "job": ["clerk", "cook"]}


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    base = small_folders.make(tmp_path_factory.mktemp("done"), *AUDITS[1:])
    small_folders.make_watched(base)
    return base


@pytest.fixture(autouse=True)
def _short(monkeypatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.05)


def called(function) -> Ended:
    """A call in Python: an error of the library's own is a ValueError of one line."""
    try:
        return Ended(0, repr(function()), "")
    except ValueError as reason:
        return Ended(2, "", f"reconbound: {reason}")
    except Exception:
        return Ended(None, "", traceback.format_exc())


def loaded(folder: Path, name: str) -> object:
    model = auditing.binned((4,), 2) if name == "jumps" else None
    release = rb.load_release(folder, model)
    return release, release.predict(np.array([[0, 1, 8]]) if name == "tokens" else PEOPLE)


COMMANDS = {
    **{kind: ("report", "show", "record", "json", "compare", "audit", "unfinished", "release") for kind in AUDITS},
    "watch": ("report", "show", "record", "json", "compare"),
    "sweep": ("frontier", "best", "chance", "sweep", "begun", "anew"),
}


def use(command: str, name: str, base: Path, done: Path) -> Ended:
    audit, sweep = str(base / name), str(base / "sweep")
    if command == "release":
        return called(lambda: loaded(base / name, name))
    if command == "unfinished":
        for part in ("run.json", "leakage.safetensors", "report.html"):
            _remove(base / name / part)
    if command == "anew":  # what was trained is in the folders of the trials
        _remove(base / "sweep" / "sweep.db")
    if command == "begun" and (base / "sweep" / "sweep.db").is_file():
        _begin_again(base / "sweep" / "sweep.db")
    again = small_folders.audit_words(base, name, name)
    return ended(
        {
            "report": ["report", audit],
            "show": ["show", audit],
            "record": ["show", audit, "--record", "3"],
            "json": ["show", audit, "--record", "0", "--json"],
            "compare": ["report", audit, str(done / "audit"), "--out", str(base / name / "both.html")],
            "audit": again,
            "unfinished": again,
            "frontier": ["frontier", sweep, "--json"],
            "best": ["frontier", sweep, "--at-least", "1e-9"],
            "chance": ["frontier", sweep, "--chance", "success_removed_median", "--at-most", "1"],
        }.get(command, small_folders.sweep_words(base, "sweep"))
    )


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)


def _begin_again(path: Path) -> None:
    """As if nobody had begun the second setting: its rows are in its folder."""
    try:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE trials SET state = 'WAITING' WHERE number = 1")
    except sqlite3.Error:
        pass


def seen(base: Path, folder: Path) -> dict[Path, bytes | None]:
    """Everything below base but for the folder."""
    others = (path for path in base.rglob("*") if path != folder and folder not in path.parents)
    return {path: path.read_bytes() if path.is_file() else None for path in others}


def check(command: str, name: str, kept: Path, done: Path, about: object) -> int:
    """Uses a copy of the folder; it alone may change. Returns whether there was a result."""
    base = kept.parent / "base"
    folder = base / name
    shutil.copytree(kept, folder, dirs_exist_ok=True, copy_function=_copy)
    for data in ("people.csv", "texts.npz"):
        shutil.copy(done / data, base)
    before = seen(base, folder)
    with time_limit(60, (about, command)):
        found = use(command, name, base, done)
    assert found.clear, (about, command, found)
    assert not {"\x1b", "\u202e"} & {*found.out, *found.err}, (about, command)
    assert seen(base, folder) == before, (about, command)
    shutil.rmtree(base)
    return int(found.status == 0)


def _copy(source: str, target: str) -> None:
    if Path(source).is_file():
        shutil.copy(source, target)
    elif Path(source).is_fifo():
        os.mkfifo(target)
    else:
        _listen(Path(target))


def _listen(path: Path) -> None:
    """A socket; its path may be long, and the name that it is bound to may not."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("name", COMMANDS)
def test_changed_files_with_right_digests_are_one_line_or_a_result(name, done, tmp_path) -> None:
    rng, results, uses = random.Random(f"tampered {name} {SHARE}"), 0, 0
    for k in range(SHARE or (6 if name in ("audit", "sweep") else 4)):
        kept = tmp_path / "kept"
        shutil.copytree(done / name, kept)
        files = [p for p in sorted(kept.rglob("*")) if p.suffix in (".json", ".safetensors", ".db") or p.name == "seed"]
        chosen = rng.choices(files, [1 if p.name.startswith("parameters-") else 4 for p in files])[0]
        what = tamper(chosen, rng)
        for command in COMMANDS[name] if SHARE else rng.sample(COMMANDS[name], 3):
            results, uses = results + check(command, name, kept, done, (k, chosen.name, what)), uses + 1
        shutil.rmtree(kept)
    assert 0 < results < uses  # some changes make no difference to a command, and some do


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_one_line_in_place_of_any(kind, done, tmp_path) -> None:
    """FUZZ=1 tries every file."""
    files = [(name, p.relative_to(done / name)) for name in COMMANDS for p in sorted((done / name).rglob("*"))]
    files = [(name, part) for name, part in files if (done / name / part).is_file()]
    for name, part in files if SHARE else random.Random(kind).sample(files, 5):
        kept = tmp_path / "kept"
        shutil.copytree(done / name, kept)
        (kept / part).unlink()
        {"pipe": os.mkfifo, "socket": _listen, "folder": os.mkdir}[kind](kept / part)
        for command in COMMANDS[name]:
            check(command, name, kept, done, (kind, part))
        shutil.rmtree(kept)


def test_a_changed_ledger_with_a_right_digest_is_refused_by_its_path(tmp_path) -> None:
    path, rng, refused = tmp_path / "ledger.safetensors", random.Random(f"ledger {SHARE}"), 0
    for k in range(SHARE or 40):
        (_ledger() if k % 2 else ledger_with_worlds()).save(path)
        what = tamper(path, rng)
        with time_limit(60, what):
            found = called(lambda: rb.FisherAccountant.load(path))
        assert found.status == 0 or (found.status == 2 and "path must be a ledger" in found.err), (k, what, found)
        assert "\n" not in found.err, what
        refused += found.status == 2
        if found.status == 0:
            check_answers(rb.FisherAccountant.load(path), what)
    assert refused > 0


def check_answers(ledger: rb.FisherAccountant, about: object) -> None:
    """All that a ledger says of its records is a number in its limits."""
    for world in ledger.divergences.worlds:
        nats, cap = ledger.divergence(world), ledger.divergences.cap(world)
        assert bool(((nats >= 0) & (nats <= cap)).all()), (about, world, nats)
        chances = torch.as_tensor(ledger.max_success(0.1, world).value)
        assert bool(((chances >= 0.1) & (chances <= 1)).all()), (about, world, chances)
    assert "nan" not in repr(ledger)
    if ledger.account.kept_rules:
        assert ledger.summary()["runs"] == ledger.runs
        for found in (ledger.dfil(), ledger.standard_error(), torch.as_tensor(ledger.mse_floor().value)):
            assert bool((found >= 0).all()), (about, found)  # NaN is not
