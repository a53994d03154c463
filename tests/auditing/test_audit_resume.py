"""Audits that were stopped, or whose folder lost a file: they go on, and nothing is taken for finished that is not."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

import auditing
from reconbound import report
from reconbound._internal import files as _files
from reconbound._internal.checks import InputError
from reconbound._internal.files import Unreadable
from reconbound.auditing.options import finished, open_folder
from reconbound.auditing.run import run_audit
from reconbound.cli import app as cli
from reconbound.report.folder import MODEL, PLAN, PUBLIC_REPORT, REPORT, RUN, read_run
from reconbound.training.checkpoint import CheckpointError, lock_folder

pytestmark = pytest.mark.slow


def test_removed_model_is_restored(tmp_path) -> None:
    people, options = auditing.people(), auditing.options(steps=4)
    folder = run_audit(people, options, tmp_path, show=False)
    before = (folder / MODEL).read_bytes()
    (folder / MODEL).unlink()
    assert not finished(folder, people, options)
    run_audit(people, options, folder, show=False)
    assert (folder / MODEL).read_bytes() == before
    assert (folder / MODEL).stat().st_mode & 0o777 == 0o644
    assert finished(folder, people, options)


def test_audit_killed_before_its_pages_is_unfinished(tmp_path, monkeypatch) -> None:
    people = auditing.people()
    run_audit(people, auditing.options(steps=4, runs=1), tmp_path, show=False)
    old = [(tmp_path / name).read_bytes() for name in (REPORT, PUBLIC_REPORT)]
    more = auditing.options(steps=4, runs=2)

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "build", killed)
        with pytest.raises(KeyboardInterrupt):
            run_audit(people, more, tmp_path, show=False)
    assert not finished(tmp_path, people, more)
    assert not any((tmp_path / name).exists() for name in (REPORT, PUBLIC_REPORT))  # of one run: neither stays
    run_audit(people, more, tmp_path, show=False)
    assert finished(tmp_path, people, more)
    assert read_run(tmp_path).mechanism["runs"] == 2
    for name, page in zip((REPORT, PUBLIC_REPORT), old, strict=True):
        assert (tmp_path / name).read_bytes() != page


def test_audit_killed_between_files_shows_no_older_facts(tmp_path, monkeypatch, capsys) -> None:
    """Else the leakage of two runs would be told with the facts of one."""
    people = auditing.people()
    run_audit(people, auditing.options(steps=4, runs=1), tmp_path, show=False)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("reconbound.report.folder.write_run", killed)
        with pytest.raises(KeyboardInterrupt):
            run_audit(people, auditing.options(steps=4, runs=2), tmp_path, show=False)
    assert cli.run(["show", str(tmp_path)]) == 2
    assert "was begun and is not finished" in capsys.readouterr().err


def test_leftover_files_do_not_block_a_folder(tmp_path) -> None:
    """Killed while it wrote its very first file."""
    (tmp_path / f".{PLAN}.0123abcd.part").write_text("{")
    assert open_folder(tmp_path) == tmp_path
    run_audit(auditing.people(), auditing.options(steps=2, runs=1), tmp_path, show=False)
    assert not list(tmp_path.glob(".*.part"))


def test_users_partial_download_is_kept(tmp_path) -> None:
    """Hidden and named .part too, but not by us."""
    mine = tmp_path / "a" / ".film.mkv.part"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="must be a new or empty folder"):
        open_folder(mine.parent)
    mine.unlink()
    run_audit(auditing.people(), auditing.options(steps=2, runs=1), mine.parent, show=False)
    mine.write_text("mine")
    inside = mine.parent / "checkpoints" / ".parameters-0-1.safetensors.0123abcd.part"  # killed while it wrote this
    inside.write_text("ours")
    run_audit(auditing.people(), auditing.options(steps=2, runs=2), mine.parent, show=False)
    assert mine.read_text() == "mine"
    assert not inside.exists()


def test_more_runs_can_be_added(audited, tmp_path) -> None:
    people = auditing.people()
    run_audit(people, auditing.options(runs=1), tmp_path / "a", show=False)
    run_audit(people, auditing.options(runs=3), tmp_path / "a", show=False)
    for name in (RUN, REPORT, PUBLIC_REPORT, MODEL, PLAN):
        assert (tmp_path / "a" / name).read_bytes() == (audited / name).read_bytes(), name
    auditing.assert_same_leakage(tmp_path / "a", audited)
    with pytest.raises(InputError, match="runs was 3 and is 2"):
        run_audit(people, auditing.options(runs=2), tmp_path / "a", show=False)


def test_other_options_or_data_are_refused(audited) -> None:
    people = auditing.people()
    before = {p: p.read_bytes() for p in audited.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=r"noise_multiplier was 0.7 and is 2.0; lr was 0.5 and is 0.1"):
        run_audit(people, auditing.options(runs=3, noise_multiplier=2.0, lr=0.1), audited, show=False)
    with pytest.raises(InputError, match="the data have changed"):
        run_audit(auditing.people(seed=1), auditing.options(runs=3), audited, show=False)
    wider = replace(people, features=(replace(people.features[0], high=130.0), *people.features[1:]))
    with pytest.raises(InputError, match=r"ranges of age was \[0.0, 120.0\] and is \[0.0, 130.0\]"):
        run_audit(wider, auditing.options(runs=3), audited, show=False)
    assert before == {p: p.read_bytes() for p in audited.rglob("*") if p.is_file()}


def test_fresh_removes_only_files_of_the_audit(tmp_path) -> None:
    people, folder = auditing.people(), tmp_path / "a"
    run_audit(people, auditing.options(runs=1, steps=4), folder, show=False)
    (folder / "notes.txt").write_text("mine")
    run_audit(people, auditing.options(runs=1, steps=3), folder, show=False, fresh=True)
    assert read_run(folder).mechanism["steps"] == 3
    assert (folder / "notes.txt").read_text() == "mine"


def test_each_folder_keeps_its_own_seed(tmp_path) -> None:
    people = auditing.people()
    seeds = []
    for name in ("a", "b", "a"):
        run_audit(people, auditing.options(runs=1, steps=2, seed=None), tmp_path / name, show=False)
        seeds.append(json.loads((tmp_path / name / PLAN).read_text())["seed"])
    assert seeds[0] == seeds[2] != seeds[1]
    assert seeds[0] > 2**64


def test_other_folders_are_refused(tmp_path) -> None:
    (tmp_path / "letter.txt").write_text("x")
    before = auditing.mode(tmp_path)
    with pytest.raises(InputError, match="must be a new or empty folder"):
        open_folder(tmp_path)
    with pytest.raises(InputError, match="must be a folder that can be read"):
        open_folder(tmp_path / "letter.txt")
    assert auditing.mode(tmp_path) == before


def test_one_audit_at_a_time_in_a_folder(tmp_path) -> None:
    with lock_folder(tmp_path / "a"), pytest.raises(CheckpointError, match="in use"):
        run_audit(auditing.people(), auditing.options(), tmp_path / "a", show=False)


def test_damaged_and_missing_files_are_named(tmp_path) -> None:
    people, options, folder = auditing.people(), auditing.options(runs=1, steps=4), tmp_path / "a"
    run_audit(people, options, folder, show=False)
    path = next((folder / "checkpoints").glob("parameters-*"))
    path.unlink()
    with pytest.raises(Unreadable, match="has been removed: bring it back from a copy, or start over with --fresh"):
        run_audit(people, options, folder, show=False)
    (folder / PLAN).write_text("{")
    with pytest.raises(
        Unreadable, match=r"plan.json is damaged, or not a file of reconbound's .* start over with --fresh"
    ):
        run_audit(people, options, folder, show=False)


def test_full_disk_keeps_the_last_state(tmp_path, monkeypatch) -> None:
    people, options, folder = auditing.people(), auditing.options(), tmp_path / "a"
    fsync, left = os.fsync, [12]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises((OSError, CheckpointError), match="No space left"):
        run_audit(people, options, folder, show=False)
    monkeypatch.undo()
    run_audit(people, options, folder, show=False)
    run_audit(people, options, tmp_path / "b", show=False)
    assert (folder / REPORT).read_bytes() == (tmp_path / "b" / REPORT).read_bytes()
    assert not list(folder.rglob("*.part"))
