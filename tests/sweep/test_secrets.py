"""Data, seeds and passwords of a command line: where they are shown, and where not."""

from __future__ import annotations

import hashlib
import inspect
import time

import pytest

import calling
import injecting
import small_folders
from reconbound.sweep import trial as train

BANNER = "keep it as secret as the data"
LINE = "this line shows data: keep it as secret as they are"


def test_notes_that_quote_the_data_come_under_the_banner(tmp_path) -> None:
    calling.write_people(tmp_path / "people.csv")
    words = ["people.csv", "--target", "<b>pay</b>", "--out", str(tmp_path / "a")]
    words[0] = str(tmp_path / words[0])
    grid = ["--grid", "lr=0.5", "--model", "linear", "--steps", "2"]
    for command in (["audit", *words, *calling.QUICK], ["sweep", *words[:-1], str(tmp_path / "s"), *grid]):
        text = injecting.ended(command)
        assert text.status == 0, text.err
        lines = text.err.splitlines()
        ranges = next(k for k, line in enumerate(lines) if "was read off the data" in line)
        assert any(BANNER in line for line in lines[:ranges]), text.err


@pytest.mark.parametrize(
    ("cells", "more", "shown"),
    [
        (["17"] * 30 + ["s3cr3t"], [], "s3cr3t"),
        (["17"] * 30 + ["1e999"], [], "1e999"),
        (["17"] * 9 + ["$4,200"], [], "4,200"),
        (["17", "18"] * 9 + ["s3cr3t"], ["--range", "pay=0:9"], "s3cr3t"),
        (["1e-320", "2e-320"] * 9, [], "e-320"),
    ],
)
def test_error_quoting_data_is_marked(tmp_path, cells, more, shown) -> None:
    path = tmp_path / "p.csv"
    path.write_text("age,pay\n" + "\n".join(f"{20 + k},{cell!r}".replace("'", '"') for k, cell in enumerate(cells)))
    text = injecting.ended(["audit", str(path), "--target", "age", *more, "--out", str(tmp_path / "a")])
    assert text.clear
    assert text.status == 2
    assert shown in text.err
    assert LINE in text.err


def test_a_seed_is_not_found_from_its_fingerprint_in_a_moment() -> None:
    """A seed's check in the database is short, and each guess at the seed takes 64 MiB and a tenth of a second."""
    data = "0" * 64
    own = train.fingerprint(7, data)
    assert len(own) == 6
    assert own != train.fingerprint(8, data)
    assert own != train.fingerprint(7, "1" * 64)  # what was tried for one sweep does not serve for another
    wanted = hashlib.scrypt((7).to_bytes(32, "little"), salt=data.encode(), n=2**16, r=8, p=1, maxmem=2**27, dklen=3)
    assert own == wanted.hex()
    began = time.process_time()
    train.fingerprint(9, data)
    assert time.process_time() - began > 0.02
    assert "derive" not in inspect.getsource(train.fingerprint)


def test_a_seed_and_a_storage_come_from_the_environment(tmp_path, monkeypatch) -> None:
    by_option = [*small_folders.sweep_words(tmp_path, "one"), "--json"]
    by_variable = [
        word for word in [*small_folders.sweep_words(tmp_path, "two"), "--json"] if word not in ("--seed", "1")
    ]
    assert injecting.ended(by_option).status == 0
    monkeypatch.setenv("RECONBOUND_SEED", "1")
    monkeypatch.setenv("RECONBOUND_STORAGE", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    assert injecting.ended(by_variable).status == 0
    assert (tmp_path / "elsewhere.db").exists()
    assert not (tmp_path / "two" / "sweep.db").exists()
    assert injecting.ended(["frontier", str(tmp_path / "two")]).status == 0
    one, two = ((tmp_path / name / "sweep.csv").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 100])
def test_wrong_environment_seed_is_not_shown(tmp_path, monkeypatch, value) -> None:
    monkeypatch.setenv("RECONBOUND_SEED", value)
    text = injecting.ended(["audit", "digits", "--out", str(tmp_path / "a")])
    assert text.status == 2
    assert text.clear
    assert "seed" in text.err
    assert value not in text.err.replace("2**256 - 1", "")


@pytest.mark.parametrize("command", ["audit", "sweep"])
@pytest.mark.parametrize(
    "given", [["--seed", "98765x"], ["--seed=98765x"], ["--seed", "-98765"], ["--seed", "98765.5"]]
)
def test_wrong_seed_on_the_command_line_is_not_shown(tmp_path, command, given) -> None:
    """It may be the right one with a typing error, and a log keeps what is shown."""
    grid = ["--grid", "lr=0.5"] if command == "sweep" else []
    text = injecting.ended([command, "digits", *given, *grid, "--out", str(tmp_path / "a")])
    assert (text.status, text.clear) == (2, True), text
    assert "seed" in text.err
    assert "98765" not in text.out + text.err


@pytest.mark.parametrize("command", ["audit", "sweep", "frontier"])
def test_help_names_the_variables(command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(injecting.ended([command, "--help"]).out.replace("│", " ").split())
    assert command == "frontier" or "RECONBOUND_SEED" in text
    assert command == "audit" or "RECONBOUND_STORAGE" in text
    assert command == "frontier" or "Other users" in text
