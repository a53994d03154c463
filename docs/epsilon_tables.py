"""Computes the tables of guides/what_epsilon_means.md: `python docs/epsilon_tables.py` writes them into the page."""

from __future__ import annotations

import re
from pathlib import Path

from reconbound._internal.formatting import format_limit, format_noise, format_percent
from reconbound.mechanisms import ADD_REMOVE, DP, REPLACE_ONE, Mechanism, SampledGaussian
from reconbound.mechanisms.calibrate import calibrate_epsilon
from reconbound.mechanisms.risk import risks

PAGE = Path(__file__).parent / "guides" / "what_epsilon_means.md"
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0)
#: Noise multiplier, batch size, records, epochs.
SETTINGS = ((1.5, 256, 50_000, 30), (1.0, 256, 50_000, 10), (1.0, 256, 50_000, 100), (0.6, 256, 50_000, 30),
            (4.0, 4096, 50_000, 100), (1.0, 64, 1_000, 50), (0.8, 1024, 1_000_000, 3))  # fmt: skip
COLUMNS = ("advantage", "wrong answers", "chance at 0.01%", "at 1%", "at 10%", "μ")


def cells(mechanism: Mechanism, adjacency: str = ADD_REMOVE) -> list[str]:
    """Returns the cells of one row."""
    found = risks(mechanism, adjacency, baselines=[1e-4, 1e-2, 1e-1])
    assert found is not None
    chances = [format_percent(success) for _, success in found.success]
    wrong = format_percent(found.bayes_risk[0][1], side="down")
    return [format_percent(found.advantage), f"≥ {wrong}", *chances, format_limit(found.gdp.mu)]


def table(names: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def only_epsilon() -> str:
    """Returns the table for who knows (ε, δ) only."""
    rows = [[f"{epsilon:g}", *cells(DP(epsilon, DELTA, ADD_REMOVE))] for epsilon in EPSILONS]
    return table(["ε", *COLUMNS], rows)


def mechanism_of_epsilon() -> str:
    """Returns the table for private SGD with noise for each ε: batches of 1 %, 1,000 steps."""
    rows = []
    for epsilon in EPSILONS:
        found = calibrate_epsilon(SampledGaussian(1.0, 0.01, 1000, clip="hard"), epsilon, adjacency=ADD_REMOVE)
        rows.append([f"{epsilon:g}", format_noise(found.noise_multiplier, 4), *cells(found)])
    return table(["ε", "noise", *COLUMNS], rows)


def common_settings() -> str:
    """Returns the table of common trainings, for both kinds of neighbours."""
    rows = []
    for noise, batch, records, epochs in SETTINGS:
        sgd = SampledGaussian(noise, batch / records, round(epochs * records / batch), clip="hard")
        words = f"σ = {noise:g}, {batch:,} of {records:,}, {epochs} epochs"
        for adjacency in (ADD_REMOVE, REPLACE_ONE):
            epsilon = sgd.epsilon_at(DELTA, adjacency)
            assert epsilon is not None
            rows.append([words, adjacency, format_limit(epsilon), *cells(sgd, adjacency)])
            words = ""
    return table(["training", "neighbours", "ε", *COLUMNS], rows)


TABLES = {"only": only_epsilon, "mechanism": mechanism_of_epsilon, "settings": common_settings}


def filled(page: str) -> str:
    """Returns the page with its tables computed anew.

    Args:
        page: its text, with a comment before and after each table.
    """
    for name, make in TABLES.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert len(place.findall(page)) == 1, name
        page = place.sub(rf"\g<1>\n{make()}\n\n\g<2>", page)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
