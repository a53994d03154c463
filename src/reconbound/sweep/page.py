"""Writes frontier.html: the frontier of a sweep on one self-contained page, with a small page for each of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reconbound._internal.files import CONFIDENTIAL, write_whole
from reconbound._internal.formatting import Side, format_limit, format_number, format_percent
from reconbound.report import charts
from reconbound.report import text as report_text
from reconbound.report.charts import Chart, Key
from reconbound.report.folder import prepare
from reconbound.report.formats import amount, clean, count, for_plotly, guess_error, plus_minus
from reconbound.report.headline import model_caveats
from reconbound.report.pages import render
from reconbound.sweep import space
from reconbound.sweep.frontier import (
    ASSUMPTIONS,
    CROSSED,
    attacker_of,
    best,
    columns_of,
    crossed_of,
    default_floor,
    describe_floor,
    describe_majority,
    describe_precision,
    floors_in,
    pareto,
    protection_of,
)
from reconbound.sweep.space import Row
from reconbound.sweep.trial import LEDGER, trial_folder

PAGE, RUN_PAGE = "frontier.html", "index.html"
#: What a row's "accuracy" is: the share of right classes, or of a number's spread that is explained.
ACCURACY, R2 = "accuracy", "R²"
#: Decades on either side of 1 that a chart shows; what lies beyond is drawn at its edge.
DECADES = 4.0


def write_pages(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> Path:
    """Writes frontier.html and a page for each run, for their owner only (mode 0600).

    Args:
        folder: the sweep's.
        rows: of the finished trials.
        facts: data, runs, trials, finished and failed; guesses, task, caveats and inferred_ranges where they are known.
    """
    prepare(folder)
    for number in sorted({row["trial"] for row in rows}):
        own = [row for row in rows if row["trial"] == number]
        place = trial_folder(folder, number)
        prepare(place)
        content = run_page(own, facts, ledger=(place / LEDGER).exists())
        write_whole(place / RUN_PAGE, content, mode=CONFIDENTIAL)
    write_whole(folder / PAGE, frontier_page(rows, facts), mode=CONFIDENTIAL)
    return folder / PAGE


def frontier_page(rows: Sequence[Row], facts: Mapping[str, Any]) -> bytes:
    """Builds the page as HTML with everything that it needs inside.

    Args:
        rows: of the finished trials.
        facts: as in `write_pages`.
    """
    floors, names = floors_in(rows), settings_in(rows)
    proved = default_floor(rows)
    rule = proved.partition("_")[0]
    measure = measured_by(facts)
    shown = {chart.id: chart for chart in (_lines(rows, floors, measure), _places(rows, rule, measure))}
    fronts = [
        {
            "name": floor,
            "text": describe_floor(floor),
            "crossed": has_crossed(pareto(rows, floor), floor),
            "rows": [_cells(row, floor, names, measure) for row in pareto(rows, floor)],
        }
        for floor in floors
    ]
    measured = min((row.get("measured_median") or 0.0 for row in rows), default=0.0)
    context = {
        "title": f"{clean(facts['data'], 80)}: how accurate, for how high a floor?",
        "warnings": cautions(rows, facts),
        "finding": verdict(rows, proved, facts.get("guesses"), measure),
        "precision": describe_precision(proved, facts["runs"], measured),
        "measure": measure,
        "chart": shown,
        "fronts": fronts,
        "names": names,
        "proved": describe_floor(f"{rule}_max").partition(",")[0],
        "crossed": _describe_crossed(rows),
        "delta": next((format_limit(row["delta"], 6) for row in rows if row.get("delta")), "–"),
        "assumptions": (*ASSUMPTIONS, *(("Model", t) for t in report_text.describe_smoothness(facts.get("caveats")))),
        **{name: f"{facts[name]:,}" for name in ("runs", "trials", "finished")},
        "failed": facts["failed"],
    }
    return render("frontier.html", context, {key: chart.figure for key, chart in shown.items()})


def run_page(rows: Sequence[Row], facts: Mapping[str, Any], *, ledger: bool = False) -> bytes:
    """Builds the page of one run: its setting, and accuracy, ε and every floor at each step count.

    Args:
        rows: of the trial.
        facts: as in `write_pages`.
        ledger: whether its ledger is in the folder.
    """
    names = settings_in(rows)
    kept = [name for name in columns_of(rows) if name not in ("trial", "steps", *names)]
    context = {
        "title": f"Run {rows[0]['trial']}",
        "setting": [(name, _value(rows[0][name])) for name in names],
        "cautions": cautions(rows, facts),
        "counts": [f"{row['steps']:,}" for row in rows],
        "rows": [
            (
                describe_floor(name).replace("accuracy", measured_by(facts)),
                [_value(row.get(name), _side(name)) for row in rows],
            )
            for name in kept
        ],
        "crossed": _describe_crossed(rows),
        "ledger": ledger,
    }
    return render("trial.html", context, None)


def measured_by(facts: Mapping[str, Any]) -> str:
    """Returns the meaning of a row's "accuracy": R² where a number is predicted."""
    return R2 if facts.get("task") == "number" else ACCURACY


def cautions(rows: Sequence[Row], facts: Mapping[str, Any]) -> list[str]:
    """Lists what weakens the floors, to be shown first.

    These are settings that guarantee little, kinks of the model, records never measured or without information, and
    ranges read off the data.

    Args:
        rows: of the finished trials.
        facts: as in `write_pages`.
    """
    found = [*_describe_weak_settings(rows), *model_caveats(facts.get("caveats"))]
    unmeasured = max((int(row.get("never_measured") or 0) for row in rows), default=0)
    if unmeasured:
        found.append(
            f"Up to {count(unmeasured, 'record')} of a training {'was' if unmeasured == 1 else 'were'} never measured, "
            "and the floors leave them out. A number as --budget measures every record."
        )
    saturated = [row for row in rows if row.get("zero_information")]
    if saturated:
        most = count(max(row["zero_information"] for row in saturated), "record")
        trainings = count(len({row["trial"] for row in saturated}), "training")
        found.append(
            f"In {trainings}, all measurements of up to {most} were zero: outputs are saturated, or the training has "
            "diverged. Ignore the largest floors there (1e300 at most). Lower lr or the noise, or raise --budget or "
            "--runs."
        )
    return [*found, report_text.INFERRED] if facts.get("inferred_ranges") else found


def _describe_weak_settings(rows: Sequence[Row]) -> list[str]:
    """Describes the setting without a meaningful guarantee that has the largest chance of rebuilding a record."""
    weak = [row for row in rows if not protection_of(row).meaningful]
    if not weak:
        return []
    worst = max(weak, key=lambda row: (protection_of(row).success or 0.0, row.get("epsilon") or 0.0))
    warning = protection_of(worst).warning()
    many = f"{len(weak):,} of {count(len(rows), 'row')}: {warning[0].lower()}{warning[1:]}"
    return [warning if len(rows) == 1 else many]


def verdict(
    rows: Sequence[Row],
    floor: str,
    guesses: Mapping[str, Any] | None = None,
    measure: str = ACCURACY,
) -> list[str]:
    """Returns the first paragraph of the page: the most accurate settings, in at most three sentences.

    Args:
        rows: of the finished trials.
        floor: the name of the floor.
        guesses: what is reached without a model: "accuracy" and "error" (± in ranges; 0.5, of guessing the middle at
            worst, where it is not known).
        measure: the meaning of accuracy, from `measured_by`.
    """
    front = pareto(rows, floor)
    if not front:
        return [
            "There were no test records: no setting has an accuracy." if rows else "No setting has been trained yet."
        ]
    last = max(front, key=lambda row: row["accuracy"])
    weak = "" if protection_of(last).meaningful else ", without a meaningful guarantee,"
    # settings of another sampler have another floor
    only = "" if all(row.get(floor) is not None for row in rows) else " that has this floor"
    attacker, place = attacker_of(floor)
    estimate = " by an estimate" if floor.endswith(("_max", "_q99", "_median")) else ""
    sentences = [
        f"The most accurate setting{only}{weak} reaches {_accuracy(last, measure)}; {attacker} errs by at least "
        f"{plus_minus(math.sqrt(last[floor]))} of a feature's range {place}{estimate}."
    ]
    known = (guesses or {}).get("error")
    error, guess = (known, "guessing the average") if known else (0.5, "guessing the middle, at worst")
    sound = [row for row in rows if protection_of(row).meaningful]
    chosen = best(sound, floor, error**2)
    some = "" if len(sound) == len(rows) else " with a meaningful guarantee"
    as_much = f"the error of {guess} ({guess_error(error)} of the range)"
    if chosen is None:
        sentences.append(f"No setting{some} has a floor as high as {as_much}.")
    elif chosen is not last:
        measured = ", for the records that were measured," if chosen.get("never_measured") else ""
        reached = _accuracy(chosen, measure)
        sentences.append(
            f"The most accurate setting{some} whose floor is at least {as_much}{measured} reaches {reached}."
        )
    return [*sentences, *describe_majority(guesses)]


def has_crossed(rows: Sequence[Row], floor: str) -> bool:
    """Returns whether there is a second number beside this floor.

    Args:
        rows: of the finished trials.
        floor: the name of the floor.
    """
    return any(row.get(crossed_of(floor) or "") is not None for row in rows)


def _describe_crossed(rows: Sequence[Row]) -> str:
    return CROSSED if any(has_crossed(rows, floor) for floor in floors_in(rows)) else ""


def settings_in(rows: Sequence[Row]) -> list[str]:
    """Returns the settings that the sweep names."""
    return [name for name in space.PARAMETERS if any(name in row for row in rows)]


# --- charts --------------------------------------------------------------------------------


def _lines(rows: Sequence[Row], floors: Sequence[str], measure: str) -> Chart:
    """Draws the front of each floor at the most exposed record, and of those of the mechanism."""
    # the first is the most exposed record's, in the same colour in both charts and in an audit's
    colours = (charts.VERMILLION, *(colour for colour in charts.SERIES if colour != charts.VERMILLION))
    traces, keys = [], []
    for k, floor in enumerate(floor for floor in floors if not floor.endswith(("_q99", "_median"))):
        colour, dash = colours[k % len(colours)], charts.DASHES[k % len(charts.DASHES)]
        traces.append(_trace(pareto(rows, floor), floor, colour, dash, measure))
        keys.append(Key(colour, describe_floor(floor), "line", dash))
    return _chart("chart-frontier", traces, keys, "every floor: the best settings", measure)


def _places(rows: Sequence[Row], rule: str, measure: str) -> Chart:
    """Draws all settings at three quantiles of the records, and the fronts."""
    drawn = [f"{rule}_{place}" for place in ("max", "q99", "median") if any(f"{rule}_{place}" in row for row in rows)]
    traces, keys = [], []
    for floor, colour in zip(drawn, (charts.VERMILLION, charts.ORANGE, charts.BLUE), strict=False):
        traces.append({**_trace(rows, floor, colour, "solid", measure), "mode": "markers", "opacity": 0.45})
        traces.append(_trace(pareto(rows, floor), floor, colour, "solid", measure))
        keys.append(Key(colour, describe_floor(floor), "line"))
    return _chart("chart-places", traces, keys, "the floors of the records", measure)


def _trace(rows: Sequence[Row], floor: str, colour: str, dash: str, measure: str) -> dict[str, Any]:
    times = 100 if measure == ACCURACY else 1
    rows = [row for row in rows if row.get(floor) is not None and row.get("accuracy") is not None]
    return {
        "type": "scatter", "mode": "lines+markers", "x": [times * row["accuracy"] for row in rows],
        "y": [min(DECADES, max(-DECADES, space.log10(row[floor]))) for row in rows],
        "line": {"color": colour, "dash": dash, "width": 2}, "marker": {"color": colour, "size": 7},
        "text": [_hover(row, floor, measure) for row in rows], "hoverinfo": "text",
        "customdata": [_link(row) for row in rows],
    }  # fmt: skip


def _chart(name: str, traces: list[Any], keys: list[Key], against: str, measure: str) -> Chart:
    logs = [y for trace in traces for y in trace["y"]] or [0.0]
    low, high = min(logs) - 0.2, max(logs) + 0.2
    title = charts.titled(f"{measure} (%)" if measure == ACCURACY else f"{measure} on test data")
    x = {"title": title, "zeroline": False, "fixedrange": True, "nticks": 7}
    layout = charts.layout(460, x, charts.log_axis(low, high, "floor (MSE)"))
    beyond = any(abs(y) >= DECADES for y in logs)
    note = f"What lies beyond {10**DECADES:,.0f} or below {10**-DECADES:g} is drawn at the edge." if beyond else ""
    label = f"{measure[0].upper()}{measure[1:]} against {against}"
    return Chart(name, {"data": traces, "layout": layout}, tuple(keys), note, label)


def _hover(row: Row, floor: str, measure: str) -> str:
    setting = ", ".join(f"{name} {_value(row[name])}" for name in space.PARAMETERS if name in row)
    lines = [
        f"run {row['trial']}: {setting}, {row['steps']:,} steps",
        f"accuracy {_accuracy(row)}" if measure == ACCURACY else _accuracy(row, measure),
        f"{describe_floor(floor)}: {_mse(row[floor])}",
        *([f"crossed: {_mse(row[crossed_of(floor) or ''])}"] if has_crossed([row], floor) else []),
        f"ε = {_value(row.get('epsilon'), 'up')}",
    ]
    return "<br>".join(for_plotly(line, 160) for line in lines)


def _mse(floor: float) -> str:
    return f"{_value(floor, 'down')} ({plus_minus(math.sqrt(floor))})"


def _cells(row: Row, floor: str, names: Sequence[str], measure: str) -> dict[str, Any]:
    return {
        "link": _link(row),
        "trial": row["trial"],
        "settings": [_value(row.get(name)) for name in names],
        "steps": f"{row['steps']:,}",
        "accuracy": _accuracy(row, measure).removeprefix(f"{R2} "),
        "floor": _value(row[floor], "down"),
        "error": plus_minus(math.sqrt(row[floor])),
        "crossed": _value(row.get(crossed_of(floor) or ""), "down"),
        "epsilon": _value(row.get("epsilon"), "up"),
        "success": "–" if protection_of(row).success is None else format_percent(protection_of(row).success or 0.0),
    }


def _link(row: Row) -> str:
    return f"trials/{row['trial']:05d}/{RUN_PAGE}"


def _accuracy(row: Row, measure: str = ACCURACY) -> str:
    sd = row.get("accuracy_sd")
    if measure == R2:
        return f"{R2} {row['accuracy']:.3f}" + (f" ± {sd:.3f}" if sd else "")
    return f"{100 * row['accuracy']:.1f} %" + (f" ± {100 * sd:.1f}" if sd else "")


def _value(value: Any, side: Side = "near") -> str:
    if isinstance(value, str):
        return clean(value, 60)
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return format_number(value, 4, side) if value < 1e6 else amount(value, side=side)


def _side(name: str) -> Side:
    """Returns the side to which a column of the table is rounded: floors down, upper bounds up."""
    if name in ("epsilon", "epsilon_add_remove", "delta"):
        return "up"
    return "near" if name.startswith("accuracy") else "down"
