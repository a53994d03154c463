"""Numbers that are shown: floors never too high, epsilon and chances never too low."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconbound import guarantee
from reconbound._internal.formatting import format_floor, format_limit, format_number, format_percent, round_to
from reconbound.bounds.bound import Bound
from reconbound.cli import app as cli
from reconbound.mechanisms import DP, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibrate import Calibration
from reconbound.report import comparison, pages, records
from reconbound.report.folder import read_leakage, read_run
from reconbound.report.formats import amount, guess_error, plus_minus
from reconbound.report.view import View

positive = st.floats(min_value=1e-300, max_value=1e300)


def read(text: str) -> float:
    return float(text.replace(",", ""))


def number_in(text: str) -> float:
    """The last number of a cell: '±12.3 years', 'over ±1,000,000', '51.2%'."""
    return read(re.findall(r"[\d.,]+(?:e[+-]?\d+)?", text)[-1])


@given(positive, st.integers(1, 10))
def test_floor_is_rounded_down_and_limit_up_by_less_than_one_digit(x: float, digits: int) -> None:
    low, high = read(format_floor(x, digits)), read(format_limit(x, digits))
    assert low <= x <= high
    assert high - low <= 10 ** (math.floor(math.log10(x)) - digits + 1) * (1 + 1e-5)
    assert min(abs(low - x), abs(high - x)) <= abs(read(format_number(x, digits)) - x) * (1 + 1e-9) + 1e-12 * x


@given(st.floats(min_value=0, max_value=1))
def test_percent_of_a_success_is_rounded_up(x: float) -> None:
    assert read(format_percent(x).rstrip("%")) / 100 >= x * (1 - 1e-15)
    assert read(format_percent(x, side="down").rstrip("%")) / 100 <= x * (1 + 1e-15)


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_bound_prints_its_floor_rounded_down_and_the_guess_up(mse: float) -> None:
    text = str(Bound("theorem1", mse, "Theorem 1", "unbiased", "replace-one", guess=mse, coordinates="each"))
    found = re.search(r"at least ±(\S+) \(MSE (\S+)\); a plain guess errs by ±(\S+) \[", text)
    assert found is not None, text
    assert read(found[1]) <= math.sqrt(mse) <= read(found[3])
    assert read(found[2]) <= mse


@given(st.floats(min_value=1e-6, max_value=9e5))
def test_pages_print_floors_down_epsilon_up_and_guesses_up(x: float) -> None:
    assert read(plus_minus(x).removeprefix("±")) <= x
    assert read(guess_error(x).removeprefix("±")) >= x
    assert read(amount(x, side="up")) >= x


@pytest.mark.parametrize("seed", range(8))
def test_printed_guarantee_rounds_to_the_safe_side(seed: int) -> None:
    draw = random.Random(seed)
    mechanism = (
        SampledGaussian(
            draw.uniform(0.5, 5), draw.uniform(0.001, 1), draw.randint(1, 500), draw.choice(["hard", "smooth"])
        )
        if seed % 2
        else OutputPerturbation(draw.randint(10, 10**5), draw.uniform(1e-3, 1), draw.uniform(0.01, 1))
    )
    found = guarantee(mechanism, dim=draw.randint(1, 1000), high=draw.uniform(1, 300))
    text = str(found)
    for bound in found.bounds:
        line = next(line for line in text.splitlines() if line.startswith(f"{bound.name}:"))
        shown = re.search(r"±(\S+).*?\(MSE ([^\s)]+)\)", line) or re.search(r"()\(MSE ([^\s)]+)\)", line)
        assert shown is not None
        assert read(shown[2]) <= bound.value
        assert not shown[1] or read(shown[1]) <= bound.rmse
    reported = re.findall(r"ε = (\S+) \((\S+)\)", text)
    known = {"replace-one": found.epsilon, "add/remove": found.epsilon_add_remove}
    assert reported
    for shown_epsilon, which in reported:
        exact = known[which]
        assert exact is not None
        assert read(shown_epsilon) >= exact
    assert found.in_short.count("±") in (0, 1, 2)
    least = re.search(r"at least ±(\S+)", found.in_short)
    if least:
        strongest = re.search(r"\((\w+)\)\.$", found.in_short)
        assert strongest is not None
        assert read(least[1].rstrip(",")) <= found[strongest[1]].rmse


def test_examples_that_were_rounded_to_the_wrong_side() -> None:
    """19.781 was printed as ±19.8, an epsilon of 8.80004 as 8.8, a chance of 3.5541 % as 3.55 %."""
    bound = Bound("theorem1", 391.3, "Theorem 1", "unbiased", "replace-one", coordinates="each")
    assert "±19.7 (MSE 391)" in str(bound)
    assert format_limit(8.80004, 4) == "8.801"
    assert format_percent(0.035541) == "3.56%"
    chosen = SampledGaussian(1.2345678, 0.01, 10)
    assert "1.234568" in str(Calibration(chosen, 1.2345671, 1.0, bound))
    assert "ε = 2.001 (replace-one)" in str(guarantee(DP(2.00001)))


@pytest.mark.parametrize("write", [format_floor, format_limit, format_number])
def test_round_numbers_stay_as_they_are(write) -> None:
    assert [write(x) for x in (0.1, 0.25, 1e-5, 1e-6, 255.0, 0.0)] == ["0.1", "0.25", "1e-05", "1e-06", "255", "0"]
    assert [round_to(x, 4, "up") for x in (1.3720001, 0.07, 1e-300)] == [1.373, 0.07, 1e-300]


@pytest.mark.parametrize("kind", ["digits", "people"])
@pytest.mark.slow
def test_reports_round_to_the_safe_side(kind: str, request: pytest.FixtureRequest) -> None:
    """Each number on a page beside the exact one, for ledgers and guarantees of many sizes."""
    folder = request.getfixturevalue(kind)
    draw = random.Random(15)
    checked = 0
    for _ in range(2):
        run, leakage = read_run(folder), read_leakage(folder)
        times = draw.uniform(0.5, 2)
        upper = None if leakage.upper is None else leakage.upper * times
        leakage = replace(leakage, dfil=leakage.dfil * times, upper=upper)
        mechanism = SampledGaussian(draw.uniform(0.5, 3), draw.uniform(0.01, 0.2), draw.randint(1, 200))
        reported = guarantee(mechanism, dim=int(run.guarantee["data"]["dim"])).to_dict()
        run = replace(run, guarantee=reported)
        view = View(run, leakage)
        for row, bound in zip(pages.floor_rows(run, view.unit), reported["bounds"], strict=True):
            if row["error"] != "says nothing":
                assert number_in(row["error"]) <= bound["rmse"] * view.unit
                checked += 1
        for group in ("most", "least"):
            for card in records.cards(view)[group]:
                assert number_in(card["floor"]) <= view.shown[card["record"]]
                if card["estimate"]:
                    assert number_in(card["estimate"]) <= view.floor[card["record"]]
                checked += 1
        tiles = {tile["title"]: tile["figure"] for tile in records.tiles(view)}
        (most,) = (figure for title, figure in tiles.items() if title.startswith(f"Most exposed {view.noun}"))
        assert number_in(most) <= view.shown[view.worst]
        assert number_in(tiles["Guessing the average"]) >= view.guess
        assert number_in(tiles["ε, replace-one"]) >= reported["epsilon"]
        own = comparison.audit_row(comparison.audit_facts(view, "a", folder))
        assert number_in(own["epsilon"]) >= reported["epsilon"]
        assert number_in(own["worst"]) <= view.floor[view.worst] / view.unit
        page = pages.public_context(run)
        for name, shown, _ in page["epsilons"]:
            assert number_in(shown) >= reported["epsilon" if name == "replace-one" else "epsilon_add_remove"]
        assert number_in(str(page["membership"])) / 100 >= (1 + reported["membership_advantage"]) / 2
        for (_, shown), exact in zip(page["rero"], reported["rero"], strict=True):
            assert number_in(shown) / 100 >= exact["success"] * (1 - 1e-15)
        for column in pages.feature_rows(view):
            assert number_in(column["guess"]) >= 0
    assert checked > 20


@pytest.mark.parametrize("seed", range(4))
def test_command_line_rounds_floors_down_and_epsilon_up(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of bound and calibrate beside their JSON."""
    draw = random.Random(seed)
    space = ["--dim", str(draw.randint(1, 50)), "--high", f"{draw.uniform(1, 300)}"]
    sgd = ["--sample-rate", f"{draw.uniform(0.01, 0.5)}", "--steps", str(draw.randint(1, 100))]
    command = ["bound", "--noise-multiplier", f"{draw.uniform(0.7, 4)}", *sgd, *space]
    assert cli.run(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert cli.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for bound in found["bounds"]:
        row = re.search(rf"│ {bound['name']} │ (\S+) │ (\S+) │", text)
        assert row is not None
        assert read(row[1]) <= bound["rmse"]
        assert read(row[2]) <= bound["mse"]
    assert read(re.findall(r"ε = (\S+) \(replace-one\)", text)[0]) >= found["epsilon"]
    assert read(re.findall(r"advantage (\S+),", text)[0]) >= found["membership_advantage"]
    assert read(re.findall(r"right at most (\S+)%", text)[0]) / 100 >= (1 + found["membership_advantage"]) / 2
    for shown, exact in zip(re.findall(r"(?:rebuilt|→) (\S+)%", text), found["rero"], strict=True):
        assert read(shown) / 100 >= exact["success"] * (1 - 1e-15)
    target = ["calibrate", "--target-epsilon", f"{draw.uniform(0.5, 20)}", *sgd, *space]
    assert cli.run(target) == 0
    text = capsys.readouterr().out
    assert cli.run([*target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert read(text.splitlines()[0].rsplit(": ", 1)[1]) >= found["noise_multiplier"]
    assert read(re.findall(r"ε = (\S+) \(replace-one\)", text)[0]) >= found["epsilon"]
    assert read(re.findall(r"ε = (\S+) \(add/remove", text)[0]) >= found["epsilon_add_remove"]
