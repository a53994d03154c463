"""No sentence contradicts the table: what is said of every page, at every size of ε, floor and data set."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pages import Elements
from reconbound import guarantee, report
from reconbound.cli.audit import result
from reconbound.mechanisms import DP, SampledGaussian
from reconbound.mechanisms.base import BLIND, SURE, read_protection
from reconbound.report import verdicts
from reconbound.report.folder import Leakage, Run, prepare, write_leakage, write_run
from reconbound.report.public import headline
from reconbound.report.view import View
from statements import NOISES, made

#: Words that reassure: none of them may stand where an image that is guessed with 1 % may be rebuilt with 90 %.
REASSURING = re.compile(
    r"does better by guessing|hardly helps|stand by themselves|less noise may do|nothing is learnt|no single column.s "
    r"floor lies below",
    re.IGNORECASE,
)
FIRST = "No meaningful guarantee"

SHAPES: dict[str, dict[str, Any]] = {
    "images": {"kind": "image"},
    "table": {"kind": "table", "features": 4},
    "one column": {"kind": "table", "features": 1},
    "one record": {"kind": "table", "features": 3, "records": 1},
    "floors above the range": {"kind": "table", "features": 3, "level": 50.0},
    "floors below a guess": {"kind": "image", "level": 0.2},
    "nobody measured": {"kind": "image", "measured": "none"},
    "half measured": {"kind": "table", "features": 3, "measured": "some"},
    "constant column": {"kind": "table", "features": 3, "constant": True},
    "only a constant column": {"kind": "table", "features": 1, "constant": True},
    "a number as target": {"kind": "table", "features": 3, "task": "number"},
    "one run": {"kind": "image", "runs": 1, "relative": 0.9},
    "ranges read off": {"kind": "table", "features": 3, "inferred_ranges": True, "ranges": {}},
}


def text_of(page: bytes) -> str:
    return " ".join(Elements(page.decode()).text.split())


def all_texts(run: Run, leakage: Leakage, folder: Path) -> dict[str, str]:
    """What every page and the terminal say."""
    prepare(folder)
    write_run(folder, run)
    write_leakage(folder, leakage)
    view = View(run, leakage)
    two = folder.parent / f"{folder.name}-again"
    prepare(two)
    write_run(two, run)
    write_leakage(two, leakage)
    return {
        "confidential": text_of(report.confidential_page(run, leakage)),
        "public": text_of(report.public_page(run)),
        "comparison": text_of(report.compare([folder, two], folder / "comparison.html").read_bytes()),
        "terminal": " ".join(result(folder)["verdict"]),
        "sureness": " ".join(verdicts.sureness(view)),
        "headline": " ".join(headline(run)),
        "weak": " ".join(verdicts.weak(view.records, view.protection, view.noun)),
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Callable[[str, float], tuple[Run, Leakage, dict[str, str]]]:
    """Audits of a shape and a noise with what is said of them, each made once."""

    @cache
    def find(shape: str, noise: float) -> tuple[Run, Leakage, dict[str, str]]:
        run, leakage = made(noise, **SHAPES[shape])
        return run, leakage, all_texts(run, leakage, tmp_path_factory.mktemp("told") / "a")

    return find


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", NOISES)  # the slower to change: its loss distributions are kept
def test_no_reassuring_word_where_a_record_may_be_rebuilt(shape: str, noise: float, told) -> None:
    run, leakage, texts = told(shape, noise)
    success = read_protection(run.guarantee).success_if_drawn
    assert success is not None
    first = {
        "confidential": verdicts.verdict(View(run, leakage))[0],
        "public": headline(run)[0],
        "terminal": texts["terminal"],
    }
    assert (success >= SURE) == (noise < 0.2)  # the table has both kinds
    for where, said in first.items():
        assert said.startswith(FIRST) == (success >= SURE), (where, said)
    assert (FIRST in texts["comparison"]) == (success >= SURE)
    if success >= SURE:
        for where, text in texts.items():
            assert not REASSURING.search(text), (where, REASSURING.search(text), text)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", NOISES)
def test_any_attacker_floors_state_they_concern_some_record(shape: str, noise: float, told) -> None:
    """Read alone, a sentence that bounds any attacker names its condition; no "worst case", which has two meanings."""
    for where, text in told(shape, noise)[2].items():
        assert "worst case" not in text.lower(), where
        assert "a image" not in text, where
        for sentence in re.split(r"(?<=[.;:]) ", text):
            if re.search(r"(any|every|no) attacker\b.*\berrs? by at least ±", sentence, re.IGNORECASE):
                assert re.search(r"\b(some|conceivable)\b", sentence), (where, sentence)
            assert not sentence.startswith("On average over"), (where, sentence)


def test_headline_holds_for_guess_below_floor() -> None:
    """Guessing the average image errs by ±66 of 255 here, below the minimax floor of ±127: no sentence may deny it."""
    run, leakage = made(3e6, "image", features=64)
    said = headline(run)
    assert "rebuild an image with a chance of 1%" in said[0]
    assert View(run, leakage).guess < 100
    floors = [s for s in said if "at least ±12" in s]
    assert floors
    for sentence in floors:
        assert "conceivable image" in sentence
        assert "may err by less" in sentence


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 8.0, 50.0, 1000.0])
def test_weak_guarantee_is_printed_first(epsilon: float) -> None:
    found = guarantee(DP(epsilon), dim=4)
    success = found.protection.success_if_drawn
    assert success is not None
    for text in (str(found), found.in_short):
        assert text.startswith(FIRST) == (success >= SURE)
    assert found.to_dict()["meaningful"] == (success < SURE)
    assert "worst case" not in str(found) + found.in_short


def test_calibrate_prints_other_meanings_of_noise(run: Any, answer: Any) -> None:
    """The issue's case: a floor of ±60 on 0 to 255 needs next to no noise, and ε is 1,054."""
    options = ["--bound", "rate_distortion", "--target-error", "60", "--dim", "784", "--high", "255"]
    options += ["--sample-rate", "0.01", "--steps", "1000"]
    status, out, _ = run("calibrate", *options)
    assert status == 0
    assert out.startswith(FIRST)
    assert "ε = " in out
    assert "with a chance of at most 100%" in out or "with a chance of 100%" in out
    found = answer("calibrate", *options)
    assert found["meaningful"] is False
    assert found["success_at_1_percent"] >= SURE
    weaker = ["--bound", "lecam", "--target-error", "0.45", "--sample-rate", "0.01", "--steps", "1000"]
    status, out, _ = run("calibrate", *weaker)
    assert not out.startswith(FIRST)
    assert "Who can rebuild a record with a chance of 1% without the release" in out
    status, out, _ = run("calibrate", "--target-epsilon", "500", "--sample-rate", "0.1", "--steps", "10")
    assert out.startswith(FIRST)
    assert answer("calibrate", "--target-epsilon", "1", "--sample-rate", "0.1", "--steps", "10")["meaningful"] is True


def test_bound_command_prints_it_first(run: Any) -> None:
    _, out, _ = run("bound", "--noise-multiplier", "0.1", "--sample-rate", "0.1", "--steps", "100")
    assert out.startswith(FIRST)
    assert dict(guarantee(SampledGaussian(0.1, 0.1, 100)).rero)[BLIND] >= SURE
