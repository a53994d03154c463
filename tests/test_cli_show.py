"""reconbound report and show: finished audits, as pages and in the terminal."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from reconbound.cli import run

QUICK = ["--steps", "4", "--runs", "1", "--sample-rate", "0.1", "--lr", "0.5", "--model", "linear", "--quiet"]


@pytest.mark.parametrize("target", ["name", "record", "floor", "columns", "confidential"])
def test_a_target_that_is_called_as_a_fact_of_ours_takes_nobodys_place(target, tmp_path, capsys) -> None:
    table = tmp_path / "table.csv"
    table.write_text("\n".join([f"age,{target}", *(f"{k % 50},{'ab'[k % 2]}" for k in range(40))]) + "\n")
    words = ["audit", str(table), "--target", target, "--range", "age=0:60"]
    assert run([*words, *QUICK, "--out", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert run(["show", str(tmp_path / "a"), "--record", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["confidential"] is True
    assert facts["record"] == 3
    assert facts["name"].startswith("row ")
    assert isinstance(facts["floor"], float)
    assert facts[f"{target} (target)"] in ("a", "b")
    assert run(["show", str(tmp_path / "a"), "--record", facts["name"]]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["record", "3,", *facts["name"].split()]
    assert shown[2].split() == [*f"{target} (target)".split(), facts[f"{target} (target)"]]


@pytest.fixture(scope="module")
def wine(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wine") / "out"
    assert run(["audit", "wine", *QUICK, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("given", ["--5", "²", "٣", "1-2", "-"])
def test_what_only_looks_like_a_number_is_no_record(given, wine, capsys) -> None:
    assert run(["show", str(wine), f"--record={given}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("reconbound: --record must be ")
    assert said.endswith(f", got {given}\n")
    assert "int()" not in said


@pytest.mark.parametrize(("out", "why"), [("nowhere/x.html", "No such file or directory"), ("a", "Is a directory")])
def test_a_comparison_that_cannot_be_written_names_the_file_that_was_asked_for(
    out, why, wine, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert run(["report", str(wine), str(wine), "--out", out]) == 2
    assert capsys.readouterr().err == f"reconbound: {out}: {why}\n"
    assert os.listdir() == ["a"]  # no part is left
    assert run(["report", str(wine), str(wine)]) == 0
    assert stat.S_IMODE(os.stat("comparison.html").st_mode) == 0o600


@pytest.mark.parametrize("command", [["audit", "digits"], ["sweep", "digits", "--grid", "lr=1"]])
def test_a_mistyped_seed_is_not_shown(command, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--seed", "8675309O"], ["--seed=8675309.5"]):
        assert run([*command, *words]) == 2
        assert capsys.readouterr().err == "reconbound: --seed must be a whole number\n"


def test_stopped_with_fresh_it_says_how_to_go_on_without_losing_what_was_done(tmp_path, monkeypatch, capsys) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reconbound.audit.audit", stopped)
    words = ["audit", "wine", *QUICK, "--out", str(tmp_path / "a")]
    for more, how in (([], ""), (["--fresh"], ", without --fresh,")):
        assert run([*words, *more]) == 130
        assert capsys.readouterr().err.endswith(f"reconbound: stopped; run the same command again{how} to go on\n")
