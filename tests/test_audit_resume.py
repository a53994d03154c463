"""Audits that were stopped, or whose folder lost a file: they go on, and nothing is taken for finished that is not."""

from __future__ import annotations

import pytest

import auditing
from reconbound import report
from reconbound.audit import audit
from reconbound.plan_file import finished, open_folder
from reconbound.run_folder import MODEL, PLAN, PUBLIC_REPORT, REPORT, read_run


def test_a_released_model_that_was_removed_comes_back_the_same(tmp_path) -> None:
    people, plan = auditing.people(), auditing.plan(steps=4)
    folder = audit(people, plan, tmp_path, show=False)
    before = (folder / MODEL).read_bytes()
    (folder / MODEL).unlink()
    assert not finished(folder, people, plan)
    audit(people, plan, folder, show=False)
    assert (folder / MODEL).read_bytes() == before
    assert (folder / MODEL).stat().st_mode & 0o777 == 0o644
    assert finished(folder, people, plan)


def test_killed_before_the_pages_of_more_runs_are_there_an_audit_is_not_finished(tmp_path, monkeypatch) -> None:
    people = auditing.people()
    audit(people, auditing.plan(steps=4, runs=1), tmp_path, show=False)
    old = [(tmp_path / name).read_bytes() for name in (REPORT, PUBLIC_REPORT)]
    more = auditing.plan(steps=4, runs=2)

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "build", killed)
        with pytest.raises(KeyboardInterrupt):
            audit(people, more, tmp_path, show=False)
    assert not finished(tmp_path, people, more)
    audit(people, more, tmp_path, show=False)
    assert finished(tmp_path, people, more)
    assert read_run(tmp_path).mechanism["runs"] == 2
    for name, page in zip((REPORT, PUBLIC_REPORT), old, strict=True):
        assert (tmp_path / name).read_bytes() != page


def test_what_is_left_of_a_file_does_not_make_a_folder_anothers(tmp_path) -> None:
    """Killed while it wrote its very first file."""
    (tmp_path / f".{PLAN}.0123abcd.part").write_text("{")
    assert open_folder(tmp_path) == tmp_path
    audit(auditing.people(), auditing.plan(steps=2, runs=1), tmp_path, show=False)
    assert not list(tmp_path.glob(".*.part"))
