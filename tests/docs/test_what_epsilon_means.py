"""The page on ε shows what the library computes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from reconbound import DP, risks

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("epsilon_tables", DOCS / "epsilon_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_computed(tables) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page
    assert page.count("\n| ") > 25


def test_sentence_and_code_of_the_page(tables) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    stated = float(re.search(r"chance of ([\d.]+) % in place of 1 %", page)[1])
    (chance,) = [
        success for kappa, success in risks(DP(3.0, 1e-5, "add/remove"), "add/remove").success if kappa == 0.01
    ]
    assert 0 <= stated - 100 * chance < 0.1
    row = next(line for line in page.partition("<!-- mechanism -->")[2].splitlines() if line.startswith("| 3 |"))
    in_words = " ".join(page.partition("**In words**")[2].partition("\n\n")[0].split()).replace(" %", "%")
    wrong, at_one_percent = (row.split(" | ")[i] for i in (3, 5))
    assert f"with at most {at_one_percent} from it" in in_words
    assert f"wrong at least {wrong.removeprefix('≥ ')} of the time" in in_words
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "what_epsilon_means.md", "exec"), {})
