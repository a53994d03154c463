"""No sentence contradicts the numbers, on every page, at every size of ε, floor and data set."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pages import Elements, certainty_text
from reconbound import guarantee, report
from reconbound.cli.audit import result
from reconbound.mechanisms import DP, SampledGaussian
from reconbound.mechanisms.base import BLIND, SURE, Protection, read_protection
from reconbound.report.folder import Leakage, Run, prepare, write_leakage, write_run
from reconbound.report.headline import any_attacker_sentences, finding, headline, public_headline
from reconbound.report.text import next_steps, weaknesses
from reconbound.report.view import View
from statements import NOISES, synthetic_audit

#: Words that reassure: none of them may stand where an image that is guessed with 1 % may be rebuilt with 90 %.
REASSURING = re.compile(
    r"does better by guessing|hardly helps|stand by themselves|less noise may do|nothing is learnt|no single column.s "
    r"floor lies below|every floor is above|in every column of",
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
    """Returns the text of every page and of the terminal."""
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
        "certainty": certainty_text(view),
        "headline": " ".join([*public_headline(run), *any_attacker_sentences(run)]),
        "weak": " ".join(weaknesses(view.records, view.protection, view.noun)),
    }


@pytest.fixture(scope="module", params=product(NOISES, SHAPES), ids=lambda pair: f"{pair[0]}-{pair[1]}")
def audited(request, tmp_path_factory) -> tuple[float, Run, Leakage, dict[str, str]]:
    """Returns a noise, an audit with it and its texts. All tests of one audit run one after the other."""
    noise, shape = request.param
    run, leakage = synthetic_audit(noise, **SHAPES[shape])
    return noise, run, leakage, all_texts(run, leakage, tmp_path_factory.mktemp("audited") / "a")


def success_if_drawn(protection: Protection) -> float | None:
    """The chance for records that are in some batch, where all others are rebuilt as by a guess."""
    if protection.success is None or protection.never_drawn >= 1:
        return protection.success
    return min(1.0, (protection.success - BLIND * protection.never_drawn) / (1 - protection.never_drawn))


def test_weak_guarantee_is_never_called_safe(audited) -> None:
    noise, run, leakage, texts = audited
    success = success_if_drawn(read_protection(run.guarantee))
    assert success is not None
    first = {
        "confidential": headline(View(run, leakage))[0],
        "public": public_headline(run)[0],
        "terminal": texts["terminal"],
    }
    assert (success >= SURE) == (noise < 0.2)  # the table has both kinds
    for where, sentence in first.items():
        assert sentence.startswith(FIRST) == (success >= SURE), (where, sentence)
    assert (FIRST in texts["comparison"]) == (success >= SURE)
    steps = next_steps(View(run, leakage))  # none where nothing was measured, or one value is all there is
    assert not steps or steps[0].startswith("First of all more noise") == (success >= SURE)
    if success >= SURE:
        for where, text in texts.items():
            assert not REASSURING.search(text), (where, REASSURING.search(text), text)


def test_floors_for_any_attacker_name_their_condition(audited) -> None:
    """Each sentence names it by itself; no "worst case", which has two meanings."""
    for where, text in audited[3].items():
        assert "worst case" not in text.lower(), where
        assert "a image" not in text, where
        for sentence in re.split(r"(?<=[.;:]) ", text):
            if re.search(r"(any|every|no) attacker\b.*\berrs? by at least ±", sentence, re.IGNORECASE):
                assert re.search(r"\b(some|conceivable)\b", sentence), (where, sentence)
            assert not sentence.startswith("On average over"), (where, sentence)


def test_any_attacker_floor_above_the_guess_is_about_some_record() -> None:
    """Guessing the average image errs by ±66 of 255 here, below the minimax floor of ±127: no sentence may deny it."""
    run, leakage = synthetic_audit(3e6, "image", features=64)
    assert "rebuild an image with a chance of 1%" in public_headline(run)[0]
    assert View(run, leakage).guess < 100
    floors = [s for s in any_attacker_sentences(run) if "at least ±12" in s]
    assert floors
    for sentence in floors:
        assert "conceivable image" in sentence
        assert "may err by less" in sentence


def test_first_paragraph_is_at_most_three_short_sentences(audited) -> None:
    _, run, leakage, _ = audited
    for sentences in (finding(View(run, leakage)), public_headline(run)):
        assert 1 <= len(sentences) <= 3
        assert all(len(sentence) < 300 for sentence in sentences), sentences


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 8.0, 50.0, 1000.0])
def test_weak_guarantee_is_printed_first(epsilon: float) -> None:
    found = guarantee(DP(epsilon), dim=4)
    success = success_if_drawn(found.protection)
    assert success is not None
    for text in (str(found), found.in_short):
        assert text.startswith(FIRST) == (success >= SURE)
    assert found.to_dict()["meaningful"] == (success < SURE)
    assert "worst case" not in str(found) + found.in_short


def test_calibrate_warns_about_weak_noise(run: Any, answer: Any) -> None:
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


def test_bound_warns_first(run: Any) -> None:
    _, out, _ = run("bound", "--noise-multiplier", "0.1", "--sample-rate", "0.1", "--steps", "100")
    assert out.startswith(FIRST)
    assert dict(guarantee(SampledGaussian(0.1, 0.1, 100)).rero)[BLIND] >= SURE
