"""Folders that come from somebody else: nothing outside them is read, written or called because they say so."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sql

import auditing
import reconbound as rb
import small_folders
from injecting import ended
from reconbound._internal.checks import InputError
from reconbound._internal.files import Unreadable, open_lock, sealed_json, unsealed
from reconbound.auditing.release import load_release
from reconbound.auditing.run import run_audit
from reconbound.data import Dataset, Feature
from reconbound.report.folder import read_audit, read_leakage, read_run
from reconbound.sweep.queue import Queue
from reconbound.sweep.run import read_about
from reconbound.training.checkpoint import CheckpointError, lock_folder
from sealing import sealed

SHARE = int(os.environ.get("INJECT", "0"))


#: Audits of every kind in the large form.
AUDITS = small_folders.AUDITS if SHARE else small_folders.AUDITS[:1]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    return small_folders.make(tmp_path_factory.mktemp("done"), *AUDITS[1:])


@pytest.fixture
def base(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "base"))


def tamper(path: Path, **changes) -> None:
    """Changes a sealed file of facts as somebody does who knows how its digest is made."""
    content = json.loads(path.read_text())
    path.write_bytes(sealed_json({**{k: v for k, v in content.items() if k != "sha256"}, **changes}))


def refused(words: list[str], said: str) -> None:
    found = ended(words)
    assert found.status == 2, found
    assert found.clear, found
    assert said in found.err, found.err


# --- where the results are -----------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg2://victim@evil.example/x?sslmode=disable",
        "postgresql://***@evil.example/x",
        "sqlite:///o.db",
    ],
)
def test_frontier_does_not_trust_the_storage_that_a_folder_names(base, url, monkeypatch) -> None:
    connected: list[str] = []
    monkeypatch.setattr("optuna.storages.RDBStorage.__init__", lambda self, url, **_: connected.append(url))
    monkeypatch.chdir(base)
    sqlite3.connect("o.db").execute("CREATE TABLE precious (x)").connection.close()
    before = Path("o.db").read_bytes()
    tamper(base / "sweep" / "sweep.json", storage=url)
    refused(["frontier", "sweep"], "--storage must be given")
    assert connected == []
    assert Path("o.db").read_bytes() == before


def test_frontier_alters_no_other_programs_database(base, monkeypatch) -> None:
    """Even where it is named on the command line: reading is all that frontier does."""
    monkeypatch.chdir(base)
    sqlite3.connect("o.db").execute("CREATE TABLE precious (x)").connection.close()
    before = Path("o.db").read_bytes()
    found = ended(["frontier", "sweep", "--storage", "sqlite:///o.db"])
    assert (found.status, found.clear) == (2, True), found
    assert Path("o.db").read_bytes() == before
    assert not Path("o.db.lock").exists()


def test_frontier_leaves_its_own_database_as_it_is(base) -> None:
    path = base / "sweep" / "sweep.db"
    before, there = path.read_bytes(), sorted(os.listdir(base / "sweep"))
    assert ended(["frontier", str(base / "sweep")]).status == 0
    assert path.read_bytes() == before
    assert sorted(os.listdir(base / "sweep")) == there
    queue = Queue(f"sqlite:///{path}", "sweep", reading=True)
    with pytest.raises(sql.exc.OperationalError, match="readonly"), queue.storage.engine.begin() as connection:
        connection.execute(sql.text("CREATE TABLE another (x)"))
    queue.dispose()


def test_frontier_reads_what_a_killed_sweep_left_in_its_log(base) -> None:
    """Its write-ahead log has rows that the file itself has not."""
    path = base / "sweep" / "sweep.db"
    wanted = ended(["frontier", str(base / "sweep"), "--json"]).out
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    moved = connection.execute("SELECT value_json FROM trial_user_attributes WHERE key = 'rows'").fetchall()
    for value in ("'[]'", "?"):
        for (text,) in moved:
            given = (text,) if value == "?" else ()
            connection.execute(
                f"UPDATE trial_user_attributes SET value_json = {value} WHERE key = 'rows' AND rowid = rowid "
                "AND trial_id = (SELECT trial_id FROM trial_user_attributes WHERE key = 'slot' LIMIT 1)",
                given,
            ) if text == moved[0][0] else None
    connection.commit()
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{path}{suffix}.copy")
    connection.close()
    for suffix in ("", "-wal"):
        os.replace(f"{path}{suffix}.copy", f"{path}{suffix}")
    assert (path.parent / "sweep.db-wal").stat().st_size > 0
    assert ended(["frontier", str(base / "sweep"), "--json"]).out == wanted


@pytest.mark.parametrize("command", ["frontier", "sweep"])
def test_a_view_in_place_of_a_table_is_one_line(base, command) -> None:
    """A view may have no end, and SQLite does not stop for a signal: this test would hang."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with contextlib.closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection:
        connection.execute("ALTER TABLE trials RENAME TO kept")
        connection.execute(f"CREATE VIEW trials AS {endless} SELECT kept.* FROM kept, n WHERE n.i < 0")
    words = {"frontier": ["frontier", str(base / "sweep")], "sweep": small_folders.sweep_words(base, "sweep")}
    refused(words[command], "it holds a view")


# --- links ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["symbolic", "hard", "fifo"])
def test_linked_lock_is_refused_and_target_untouched(tmp_path, kind) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("all my work\n")
    folder.mkdir(mode=0o700)
    if kind == "fifo":
        os.mkfifo(folder / "lock")
    else:
        (os.symlink if kind == "symbolic" else os.link)(precious, folder / "lock")
    with pytest.raises((CheckpointError, ValueError), match="link"), lock_folder(folder):
        pass
    with pytest.raises(OSError, match=r"link|no plain file|symbolic"):  # by itself, too
        open_lock(folder / "lock")
    assert precious.read_text() == "all my work\n"


@pytest.mark.parametrize("part", ["lock", "checkpoints", "plan.json", "checkpoints/lock", "model.safetensors"])
@pytest.mark.parametrize("fresh", [False, True])
def test_an_audit_goes_through_no_link(base, part, fresh) -> None:
    elsewhere, place = base / "elsewhere", base / "audit" / part
    shutil.move(place, elsewhere)
    place.symlink_to(elsewhere)
    before = _content(elsewhere)
    words = [*small_folders.audit_words(base, "audit"), *(["--fresh"] if fresh else [])]
    refused(words, "is a symbolic link")
    assert _content(elsewhere) == before
    for command in ("report", "show"):
        refused([command, str(base / "audit")], "is a symbolic link")


@pytest.mark.parametrize(
    "part",
    ["sweep.db", "sweep.db.lock", "seed", "trials", "sweep.json", "trials/00000", "trials/00000/ledger.safetensors"],
)
def test_a_sweep_goes_through_no_link(base, part) -> None:
    elsewhere, place = base / "elsewhere", base / "sweep" / part
    shutil.move(place, elsewhere)
    place.symlink_to(elsewhere)
    before = _content(elsewhere)
    refused(small_folders.sweep_words(base, "sweep"), "is a symbolic link")
    refused(["frontier", str(base / "sweep")], "is a symbolic link")
    assert _content(elsewhere) == before


def test_nothing_changes_behind_a_link_in_place_of_any_part(base, tmp_path) -> None:
    """Every file and folder in turn, behind a link or in place of one to nothing; INJECT=1 tries all of them."""
    inside = sorted(p.relative_to(base) for name in (*AUDITS, "sweep") for p in (base / name).rglob("*"))
    cases = [(part, dangling) for part in inside for dangling in (False, True)]
    for part, dangling in cases if SHARE else random.Random(0).sample(cases, 4):
        here, elsewhere = tmp_path / "linked", tmp_path / "outside"
        shutil.copytree(base, here, symlinks=True)
        shutil.move(here / part, elsewhere)
        (here / part).symlink_to(tmp_path / "nothing" if dangling else elsewhere)
        before = _content(elsewhere)
        kind, place = part.parts[0], str(here / part.parts[0])
        own = small_folders.audit_words(here, kind, kind), ["report", place], ["show", place]
        others = small_folders.sweep_words(here, "sweep"), ["frontier", place]
        for words in own if kind in AUDITS else others:
            found = ended(words)
            assert found.clear, (part, words[0], found)
            assert _content(elsewhere) == before, (part, words[0])
            assert not (tmp_path / "nothing").exists(), (part, words[0])
        shutil.rmtree(here)
        shutil.rmtree(elsewhere) if elsewhere.is_dir() else elsewhere.unlink()


def _content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p): p.read_bytes() for p in files}


# --- what a folder says ----------------------------------------------------------------------


def test_epsilon_comes_from_mechanism_not_run_json(base) -> None:
    folder = base / "audit"
    right = read_run(folder).guarantee["epsilon"]
    floors = [bound["rmse"] for bound in read_audit(folder)[0].guarantee["bounds"]]
    bounds = [{**bound, "rmse": 100.0, "mse": 1e4} for bound in read_run(folder).guarantee["bounds"]]
    assert len(bounds) > 1
    guarantee = {**read_run(folder).guarantee, "epsilon": right / 100, "bounds": bounds}
    tamper(folder / "run.json", guarantee=guarantee)
    refused(["report", str(folder)], "are of different audits")
    tensors, facts = unsealed(folder / "leakage.safetensors")
    facts.pop("run")  # as somebody does who knows that too
    (folder / "leakage.safetensors").write_bytes(sealed(tensors, facts))
    before = (folder / "report-public.html").read_bytes()
    found = ended(["report", str(folder)])
    assert found.status == 0, found
    assert "which is reported" in found.err
    assert (folder / "report-public.html").read_bytes() == before
    shown = ended(["show", str(folder), "--json"])
    assert json.loads(shown.out)["epsilon"] == pytest.approx(right)
    with pytest.warns(UserWarning, match="which is reported"):
        computed = read_audit(folder)[0].guarantee["bounds"]
    assert [bound["rmse"] for bound in computed] == floors


def test_the_headline_of_an_audit_is_not_that_of_a_changed_run(tmp_path) -> None:
    people, options = auditing.people(), auditing.options(steps=4, runs=1)
    right = rb.audit(people, out=tmp_path / "a", options=options)
    assert list(right.headline) == list(read_run(right.folder).headline)
    tamper(right.folder / "run.json", headline=["Nobody can learn anything."])
    tensors, facts = unsealed(right.folder / "leakage.safetensors")
    facts.pop("run")
    (right.folder / "leakage.safetensors").write_bytes(sealed(tensors, facts))
    assert rb.audit(people, out=tmp_path / "a", options=options).headline == right.headline


def test_a_mechanism_that_was_changed_is_of_another_audit(base) -> None:
    folder = base / "audit"
    tamper(folder / "run.json", mechanism={**read_run(folder).mechanism, "noise_multiplier": 100.0})
    for words in (["report", str(folder)], ["show", str(folder)]):
        refused(words, "are of different audits")


def test_two_sweeps_do_not_share_a_folder(base) -> None:
    words = small_folders.sweep_words(base, "sweep")
    refused([*words, "--name", "second"], "must be another folder: it holds the sweep 'sweep'")
    refused([*words, "--storage", f"sqlite:///{base}/other.db"], "must be another folder: it holds the sweep 'sweep'")
    assert not (base / "other.db").exists()


def test_rows_that_were_changed_in_the_database_are_refused(base) -> None:
    path = base / "sweep" / "sweep.db"
    connection = sqlite3.connect(path)
    connection.execute("UPDATE trial_user_attributes SET value_json = replace(value_json, '\"accuracy\": 0.', "
                       "'\"accuracy\": 1.') WHERE key = 'rows'")  # fmt: skip
    connection.commit()
    connection.close()
    refused(["frontier", str(base / "sweep")], "have another digest")


def test_nothing_in_a_received_folder_steers_the_terminal(base, monkeypatch) -> None:
    evil = "\x1b]0;owned\x07\x1b[31mred\u202e"
    tamper(base / "sweep" / "sweep.json", data=evil, caveats={"kinks": evil}, task=evil)
    connection = sqlite3.connect(base / "sweep" / "sweep.db")
    from reconbound.sweep.queue import seal_of

    for trial, number in connection.execute("SELECT trial_id, number FROM trials").fetchall():
        get = "SELECT value_json FROM trial_user_attributes WHERE trial_id = ? AND key = ?"
        setting, rows = (json.loads(connection.execute(get, (trial, k)).fetchone()[0]) for k in ("setting", "rows"))
        setting["model"] = evil
        put = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?"
        connection.execute(put, (json.dumps(setting), trial, "setting"))
        connection.execute(put, (json.dumps(seal_of(number, setting, rows)), trial, "sha256"))
    connection.commit()
    connection.close()
    tensors, facts = unsealed(base / "audit" / "leakage.safetensors")
    facts |= {"feature_names": [evil] * 2, "units": [evil] * 2, "class_names": [evil] * 2, "target_name": evil}
    facts.pop("run")
    (base / "audit" / "leakage.safetensors").write_bytes(sealed(tensors, facts))
    data = {**read_run(base / "audit").data, "name": evil, "private": [evil] * 2}
    tamper(base / "audit" / "run.json", data=data, caveats={"kinks": evil})
    about = read_about(base / "sweep")
    assert not {"\x1b", "\x07", "\u202e"} & {*about["data"], *about["caveats"]["kinks"], *about["task"]}
    compare = ["report", "audit", "audit", "--out", str(base / "c.html")]
    for words in (
        ["frontier", "sweep"],
        ["frontier", "sweep", "--at-least", "1e-9"],
        ["show", "audit"],
        ["show", "audit", "--record", "3"],
        compare,
    ):
        found = ended([w if w not in ("sweep", "audit") else str(base / w) for w in words])
        assert found.status == 0, found
        for sign in ("\x1b", "\x07", "\u202e"):
            assert sign not in found.out + found.err, words


DEEP = "[" * 100_000
HOSTILE = ["null", "[]", "{}", "3", '"x"', DEEP, '{"a": NaN}', "\x00", "{" + '"a":{' * 50_000]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_files_that_hold_something_else_are_one_line(base, content) -> None:
    for name, commands in {
        "audit/run.json": (["report", "audit"], ["show", "audit"]),
        "audit/leakage.safetensors": (["report", "audit"], ["show", "audit"]),
        "sweep/sweep.json": (["frontier", "sweep"],),
        "sweep/sweep.db": (["frontier", "sweep"],),
    }.items():
        path = base / name
        own = path.read_bytes()
        path.write_text(content)
        for command, folder in commands:
            found = ended([command, str(base / folder)])
            assert (found.status, found.clear) == (2, True), (name, found)
        path.write_bytes(own)
    for name, read in (("run.json", read_run), ("inputs.json", load_release), ("leakage.safetensors", read_leakage)):
        (base / "audit" / name).write_text(content)  # in Python, where no command says it in one line
        with pytest.raises(Unreadable, match=name):
            read(base / "audit")


@pytest.mark.parametrize("kind", AUDITS)
def test_sealed_files_of_other_shapes_are_one_line(base, kind) -> None:
    """A digest that is right says nothing of who made the file: parts missing, of other types and shapes."""
    folder = base / kind
    run, (parts, facts) = json.loads((folder / "run.json").read_text()), unsealed(folder / "leakage.safetensors")
    facts.pop("run")
    cases: list[tuple[dict, dict, dict]] = []
    for name in set(run) - {"format", "sha256"}:
        values = ({}, [], None, "x", 3, {"records": "many"}, {"sampler": 3, "steps": -1})
        cases += [({name: value}, {}, {}) for value in values]
    for name, own in parts.items():
        cases += [({}, {name: other.clone()}, {}) for other in (own[..., :0], own.flatten()[:1], own.unsqueeze(0))]
    cases += [({}, {}, {name: value}) for name in facts for value in (None, [], {}, "x", -3)]
    rng = random.Random(SHARE)
    for in_run, in_parts, in_facts in cases if SHARE else rng.sample(cases, 12):
        (folder / "run.json").write_bytes(sealed_json({**{k: v for k, v in run.items() if k != "sha256"}, **in_run}))
        (folder / "leakage.safetensors").write_bytes(sealed({**parts, **in_parts}, {**facts, **in_facts}))
        for words in (["report", str(folder)], ["show", str(folder)], ["show", str(folder), "--record", "3"]):
            found = ended(words)
            assert found.clear, (in_run, list(in_parts), in_facts, found)


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("run.json", "mechanism.runs", "x"),
        ("run.json", "mechanism.steps", "x"),
        ("run.json", "accuracy", "x"),
        ("run.json", "data.records", "x"),
        ("run.json", "data.ranges.age", ["x", 1]),
        ("run.json", "data.ranges.age", 3),
        ("run.json", "data.public", 3),
        ("run.json", "caveats", "x"),
        ("leakage.safetensors", "most", "x"),
        ("leakage.safetensors", "scale", ["x", 1]),
        ("leakage.safetensors", "scale", [[], 1]),
        ("leakage.safetensors", "private", None),
        ("leakage.safetensors", "accuracy_baseline", "x"),
        ("leakage.safetensors", "copies", "x"),
    ],
    ids=str,
)
def test_text_in_place_of_a_number_is_one_line_that_names_file_and_field(base, file, place, value) -> None:
    folder = base / "audit"
    tensors, facts = unsealed(folder / "leakage.safetensors")
    run = {name: part for name, part in json.loads((folder / "run.json").read_text()).items() if name != "sha256"}
    facts.pop("run")
    *above, last = place.split(".")
    inner = run if file == "run.json" else facts
    for name in above:
        inner = inner[name]
    inner[last] = value
    (folder / "run.json").write_bytes(sealed_json(run))
    (folder / "leakage.safetensors").write_bytes(sealed(tensors, facts))
    named, field = str(folder / file), last
    if place == "private":  # what cannot be told before it is used: the folder, and why
        named, field = f"{folder} is damaged, or", "shapes (2,) (4,)"
    for words in (["report", str(folder)], ["show", str(folder)]):
        refused(words, f"reconbound: {named} ")
        refused(words, field)


# --- what is published -------------------------------------------------------------------------


def test_a_published_accuracy_is_in_whole_percent(tmp_path) -> None:
    people = auditing.people()
    people = replace(people, test_inputs=people.test_inputs[:7], test_targets=people.test_targets[:7])
    folder = run_audit(people, auditing.options(steps=4, runs=1), tmp_path / "a", show=False, publish_accuracy=True)
    exact, published = float(read_leakage(folder).accuracy[-1]), read_run(folder).accuracy
    assert exact not in (0, 1)  # of seven: no whole percent
    assert published == round(exact, 2) != exact
    assert f"{published:.0%}" in (folder / "report-public.html").read_text()


def test_the_accuracy_of_a_number_is_not_published(tmp_path) -> None:
    """R² of one unknown held-out value is a quadratic equation in it."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.random((30, 2)).astype(np.float32), rng.random(30).astype(np.float32)
    features = (Feature("age", "years", 0.0, 120.0), Feature("pay", "$", 0.0, 1e5))
    numbers = Dataset("n", "table", inputs[:20], targets[:20], inputs[20:], targets[20:], features,
                      task="number", target=Feature("loan", private=False))  # fmt: skip
    with pytest.raises(InputError, match="publish_accuracy must be left out where the target is a number"):
        run_audit(numbers, auditing.options(steps=4, runs=1), tmp_path / "a", show=False, publish_accuracy=True)
    assert not (tmp_path / "a").exists()
    words = ["audit", "diabetes", "--steps", "4", "--runs", "1", "--publish-accuracy", "--out", str(tmp_path / "b")]
    refused(words, "--publish-accuracy must be left out where the target is a number")
