"""Risks on the command line: the options, the table, and the trade-off curve as a page. torch is not imported here."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, number
from reconbound._internal.files import write_whole
from reconbound._internal.formatting import format_floor, format_limit, format_percent
from reconbound.cli.options import Options, count, print_table, ratio
from reconbound.mechanisms import ADD_REMOVE, REPLACE_ONE, Mechanism
from reconbound.mechanisms.risk import BASELINES, FPRS, PRIORS, Risks, risks

RISK: Options = {
    "group": (count, "Rows of one person (1): everything is for all of them together."),
    "fpr": (ratio, "A false-positive rate: the true-positive rate of membership tests is printed at it too."),
    "blind_chance": (
        ratio,
        "Chance of a blind guess to rebuild a record, as 1/50257: that with the release is printed.",
    ),
    "curve": (Path, "Write the trade-off curve as a page, down to a false-positive rate of 1e-10."),
}
#: False-positive rates of the printed table.
SHOWN = (1e-2, 1e-4, 1e-6)
#: False-positive rates of the curve in JSON and on the page.
RATES = 10.0 ** np.linspace(-10, 0, 101)
NAMES = {ADD_REMOVE: "is the record in the data?", REPLACE_ONE: "which of two records is?"}
_MARK = "<!-- a trade-off curve by reconbound -->"


def find_risks(mechanism: Mechanism, asked: Mapping[str, Any]) -> dict[str, Risks]:
    """Returns the risks by neighbours, add/remove first, where they are known.

    Args:
        mechanism: the mechanism, for a group where one was asked for.
        asked: the options of RISK that were given.
    """
    for name in ("fpr", "blind_chance"):
        if name in asked:
            number(name, asked[name], at_least=0.0, at_most=1.0)
    fprs = (*FPRS, asked["fpr"]) if "fpr" in asked else FPRS
    baselines = (*BASELINES, asked["blind_chance"]) if "blind_chance" in asked else BASELINES
    found = {}
    for adjacency in (ADD_REMOVE, REPLACE_ONE):
        known = risks(mechanism, adjacency, fprs=fprs, baselines=baselines)
        if known is not None:
            found[adjacency] = known
    return found


def risk_facts(found: Mapping[str, Risks]) -> dict[str, Any]:
    """Returns the risks for JSON, each with its curve."""
    return {
        adjacency: {**one.to_dict(), "curve": {"fpr": RATES.tolist(), "tpr": one.curve.tpr(RATES).tolist()}}
        for adjacency, one in found.items()
    }


def print_risks(found: Mapping[str, Risks], asked: Mapping[str, Any], console: Any) -> None:
    """Prints the risks as a table with a column for each kind of neighbours.

    Args:
        found: the risks by neighbours.
        asked: the options of RISK that were given.
        console: from `terminal`.
    """
    rates = [*SHOWN, *([asked["fpr"]] if "fpr" in asked else [])]
    rows = [["advantage of a test", *[format_percent(one.advantage) for one in found.values()]]]
    for rate in rates:
        name = f"TPR at FPR {format_percent(rate, side='near')}"
        rows.append([name, *[format_percent(dict(one.tpr).get(rate, one.curve.tpr(rate))) for one in found.values()]])
    prior = PRIORS[0]
    least = [f"≥ {format_percent(dict(one.bayes_risk)[prior], side='down')}" for one in found.values()]
    rows.append([f"wrong answers, prior {format_percent(prior)}", *least])
    if "blind_chance" in asked:
        chance = asked["blind_chance"]
        blind = format_percent(chance, side="near")
        rebuilt = [format_percent(float(one.curve.tpr(chance))) for one in found.values()]
        rows.append([f"rebuilt, blindly {blind}", *rebuilt])
    rows.append(["μ of Gaussian DP (regret)", *[_format_mu(one) for one in found.values()]])
    title = "The most that any attacker can reach, by neighbours"
    print_table(console, title, ["risk", *found], rows, ["risk"])
    tests = " ".join(f"{name.capitalize()}: {NAMES[name]}" for name in found)
    console.print(f"TPR and FPR: true- and false-positive rates of a test. {tests}")


def _format_mu(one: Risks) -> str:
    if not np.isfinite(one.gdp.mu):
        return "none"
    return f"{format_limit(one.gdp.mu)} ({format_limit(one.gdp.regret, 2)})"


def check_curve(path: Path) -> None:
    """Refuses to replace a file that is not a curve of ours, before anything is computed."""
    if not path.exists():
        return
    if not path.is_file():
        raise InputError("curve", "must be a file: this is a folder, a pipe or a device", str(path))
    with path.open("rb") as opened:
        begins = opened.read(200)
    if _MARK.encode() not in begins:
        raise InputError("curve", "must be a new file, or an earlier curve: what is there is something else", str(path))


def write_curve(path: Path, found: Mapping[str, Risks], mechanism: Mechanism) -> None:
    """Writes the trade-off curves as one page that needs no network.

    Args:
        path: where.
        found: the risks by neighbours.
        mechanism: described above the chart.
    """
    check_curve(path)
    write_whole(path, curve_page(found, str(mechanism)).encode(), mode=0o644)


def curve_page(found: Mapping[str, Risks], mechanism: str) -> str:
    """Returns the page.

    Args:
        found: the risks by neighbours.
        mechanism: described above the chart.
    """
    from plotly.io import to_html

    rates = 10.0 ** np.linspace(-10, 0, 401)
    colours = {ADD_REMOVE: "#0072B2", REPLACE_ONE: "#D55E00"}
    lines: list[dict[str, Any]] = [
        {"x": rates, "y": one.curve.tpr(rates), "name": f"{name}: {NAMES[name]}", "line": {"color": colours[name]}}
        for name, one in found.items()
    ]
    lines.append({"x": rates, "y": rates, "name": "a guess", "line": {"color": "#888888", "dash": "dot"}})
    hover = "FPR %{x:.2e}<br>TPR at most %{y:.3e}"
    axis = {"type": "log", "exponentformat": "power", "dtick": 1}
    figure = {
        "data": [
            {"type": "scatter", "mode": "lines", "hovertemplate": hover, **line, "x": list(rates), "y": list(line["y"])}
            for line in lines
        ],
        "layout": {
            "xaxis": {**axis, "title": {"text": "false-positive rate"}, "range": [-10, 0]},
            "yaxis": {**axis, "title": {"text": "largest true-positive rate"}, "range": [-10, 0.02]},
            "legend": {"x": 0.98, "y": 0.02, "xanchor": "right", "yanchor": "bottom"},
            "height": 620,
        },
    }
    chart = to_html(figure, include_plotlyjs=True, full_html=False, validate=False, div_id="curve")
    facts = "".join(
        f"<li>{name}: advantage at most {format_percent(one.advantage)}; at a false-positive rate of 0.01% a "
        f"true-positive rate of at most {format_percent(float(one.curve.tpr(1e-4)))}; wrong at least "
        f"{format_floor(100 * dict(one.bayes_risk)[PRIORS[0]])}% of the time where both answers are as likely</li>"
        for name, one in found.items()
    )
    return (
        f'<!doctype html>{_MARK}<html lang="en"><head><meta charset="utf-8"><title>Trade-off curve</title><style>body{{'
        "font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}</style></head><body>"
        "<h1>No attacker is above these lines</h1>"
        f"<p>{html.escape(mechanism)}</p><ul>{facts}</ul>{chart}"
        "<p>A membership test sees the whole release and knows all other records. Add/remove: it tests whether a "
        "record is in the data. Replace-one: it tests which of two candidates is. The same lines bound "
        "reconstruction: a record that a blind guess rebuilds with the chance on the horizontal axis is rebuilt with "
        "that on the vertical axis at most.</p></body></html>\n"
    )
