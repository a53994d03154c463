"""Writes frontier.html: the frontier of a sweep on one self-contained page, with a small page for each of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reconbound._internal.files import CONFIDENTIAL, write_whole
from reconbound._internal.formatting import Side, format_limit, format_number, format_percent
from reconbound.report import charts
from reconbound.report import text as report_text
from reconbound.report.charts import Chart, Key
from reconbound.report.folder import prepare
from reconbound.report.formats import amount, clean, for_plotly, paragraphs, plus_minus
from reconbound.report.headline import model_caveats
from reconbound.report.pages import render
from reconbound.sweep import chances, frontier, space
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
    floors, names, found = frontier.floors_in(rows), settings_in(rows), chances.chances_in(rows)
    proved = frontier.checked_floor(rows)
    rule = proved.partition("_")[0]
    measure = measured_by(facts)
    places = [f"{rule}_{place}" for place in ("max", "q99", "median") if any(f"{rule}_{place}" in row for row in rows)]
    exposed = [floor for floor in floors if not floor.endswith(("_q99", "_median"))]
    drawn = (
        _chart("chart-chances", rows, found, measure, "the chance of success of the best attack", every=True),
        _chart("chart-frontier", rows, exposed, measure, "every floor: the best settings"),
        _chart("chart-places", rows, places, measure, "the floors of the records", every=True),
    )
    shown = {chart.id: chart for chart in drawn if chart.figure["data"]}
    fronts = [
        {
            "name": name,
            "text": frontier.describe_floor(name),
            "crossed": has_crossed(front, name),
            "rows": [_cells(row, name, names, found, measure) for row in front],
        }
        for name in (*found, *floors)
        for front in (frontier.pareto(rows, name),)
    ]
    measured = min((row.get("measured_median") or 0.0 for row in rows), default=0.0)
    context = {
        "title": f"{clean(facts['data'], 80)}: how accurate, and how well protected?",
        "warnings": cautions(rows, facts),
        "finding": verdict(rows, proved, facts.get("guesses"), measure),
        "precision": frontier.describe_precision(proved, facts["runs"], measured),
        "measure": measure,
        "chart": shown,
        "safest": fronts[: len(found)],
        "fronts": fronts[len(found) :],
        "chances": [chances.head_chance(name) for name in found],
        "not_measured": chances.NOT_MEASURED,
        "without_chance": sum(not chances.chances_in([row]) for row in rows),
        "rows": len(rows),
        "names": names,
        "proved": frontier.describe_floor(f"{rule}_max").partition(",")[0],
        "crossed": frontier.CROSSED if has_crossed(rows, *floors) else "",
        "delta": next((format_limit(row["delta"], 6) for row in rows if row.get("delta")), "–"),
        "smooth": report_text.describe_smoothness(facts.get("caveats")),
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
    columns = (name for name in frontier.columns_of(rows) if not name.endswith(chances.ESTIMATE))
    kept = [name for name in columns if name not in ("trial", "steps", *names)]
    context = {
        "title": f"Run {rows[0]['trial']}",
        "setting": [(name, _value(rows[0][name])) for name in names],
        "cautions": cautions(rows, facts),
        "counts": [f"{row['steps']:,}" for row in rows],
        "rows": [
            (
                frontier.describe_floor(name).replace("accuracy", measured_by(facts)),
                [_shown(row, name) for row in rows],
            )
            for name in kept
        ],
        "crossed": frontier.CROSSED if has_crossed(rows, *frontier.floors_in(rows)) else "",
        "chances": bool(chances.chances_in(rows)),
        "not_measured": chances.NOT_MEASURED,
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
    weak = [own for own in map(frontier.protection_of, rows) if not own.meaningful]
    worst = max(weak, key=lambda own: (own.success or 0.0, own.epsilon or 0.0), default=None)
    context: dict[str, Any] = {"rows": rows, "weak": weak, "worst": worst}
    context["caveats"] = model_caveats(facts.get("caveats"))
    context["unmeasured"] = max((int(row.get("never_measured") or 0) for row in rows), default=0)
    context["saturated"] = [row for row in rows if row.get("zero_information")]
    found = paragraphs("sweep-cautions.txt", **context)
    return [*found, report_text.INFERRED] if facts.get("inferred_ranges") else found


def verdict(
    rows: Sequence[Row], floor: str, guesses: Mapping[str, Any] | None = None, measure: str = ACCURACY
) -> list[str]:
    """Returns the first paragraph of the page: the most accurate settings, in at most three sentences.

    Args:
        rows: of the finished trials.
        floor: the name of the floor.
        guesses: what is reached without a model: "accuracy" and "error" (± in ranges; 0.5, of guessing the middle at
            worst, where it is not known).
        measure: the meaning of accuracy, from `measured_by`.
    """
    sound = [row for row in rows if frontier.protection_of(row).meaningful]
    context = {"rows": rows, "floor": floor, "sound": sound, "guesses": guesses, "known": (guesses or {}).get("error")}
    context["chance"] = next(iter(chances.chances_in(rows)), None)
    return paragraphs("sweep-finding.txt", **context, frontier=frontier, accuracy=partial(_accuracy, measure=measure))


def has_crossed(rows: Sequence[Row], *floors: str) -> bool:
    """Returns whether there is a second number beside one of these floors.

    Args:
        rows: of the finished trials.
        *floors: the names of the floors.
    """
    return any(row.get(frontier.crossed_of(floor) or "") is not None for floor in floors for row in rows)


def settings_in(rows: Sequence[Row]) -> list[str]:
    """Returns the settings that the sweep names."""
    return [name for name in space.PARAMETERS if any(name in row for row in rows)]


# --- charts --------------------------------------------------------------------------------


def _chart(
    name: str, rows: Sequence[Row], columns: Sequence[str], measure: str, against: str, *, every: bool = False
) -> Chart:
    """Draws the front of each column, of chances or of floors; `every`: in front of all settings."""
    # the first is the most exposed record's, in the same colour in all charts and in an audit's
    others = (charts.ORANGE, charts.BLUE) if every else (c for c in charts.SERIES if c != charts.VERMILLION)
    colours, traces, keys = (charts.VERMILLION, *others), [], []
    for k, column in enumerate(columns):
        colour = colours[k % len(colours)]
        dash = "solid" if every else charts.DASHES[k % len(charts.DASHES)]
        if every:
            traces.append({**_trace(rows, column, colour, dash, measure), "mode": "markers", "opacity": 0.45})
        traces.append(_trace(frontier.pareto(rows, column), column, colour, dash, measure))
        keys.append(Key(colour, frontier.describe_floor(column), "line", dash))
    heights, note = [y for trace in traces for y in trace["y"]] or [0.0], ""
    side = {"zeroline": False, "fixedrange": True, "nticks": 7}
    if set(columns) <= set(chances.CHANCES):
        y = {**side, "title": "chance of success (%)", "range": [0.0, min(104.0, 1.1 * max(heights) + 2)]}
    else:
        y = charts.log_axis(min(heights) - 0.2, max(heights) + 0.2, "floor (MSE)")
        if any(abs(height) >= DECADES for height in heights):
            note = f"What lies beyond {10**DECADES:,.0f} or below {10**-DECADES:g} is drawn at the edge."
    x = {**side, "title": f"{measure} (%)" if measure == ACCURACY else f"{measure} on test data"}
    label = f"{measure[0].upper()}{measure[1:]} against {against}"
    return Chart(name, {"data": traces, "layout": charts.layout(460, x, y)}, tuple(keys), note, label)


def _trace(rows: Sequence[Row], floor: str, colour: str, dash: str, measure: str) -> dict[str, Any]:
    times = 100 if measure == ACCURACY else 1
    rows = [row for row in rows if row.get(floor) is not None and row.get("accuracy") is not None]
    if floor in chances.CHANCES:  # in percent
        heights = [100 * min(1.0, max(0.0, row[floor])) for row in rows]
    else:
        heights = [min(DECADES, max(-DECADES, space.log10(row[floor]))) for row in rows]
    return {
        "type": "scatter", "mode": "lines+markers", "x": [times * row["accuracy"] for row in rows],
        "y": heights,
        "line": {"color": colour, "dash": dash, "width": 2}, "marker": {"color": colour, "size": 7},
        "text": [_hover(row, floor, measure) for row in rows], "hoverinfo": "text",
        "customdata": [_link(row) for row in rows],
    }  # fmt: skip


def _hover(row: Row, floor: str, measure: str) -> str:
    setting = ", ".join(f"{name} {_value(row[name])}" for name in space.PARAMETERS if name in row)
    lines = [
        f"run {row['trial']}: {setting}, {row['steps']:,} steps",
        f"accuracy {_accuracy(row)}" if measure == ACCURACY else _accuracy(row, measure),
        f"{frontier.describe_floor(floor)}: {_shown(row, floor) if floor in chances.CHANCES else _mse(row[floor])}",
        *([f"crossed: {_mse(row[frontier.crossed_of(floor) or ''])}"] if has_crossed([row], floor) else []),
        f"ε = {_value(row.get('epsilon'), 'up')}",
    ]
    return "<br>".join(for_plotly(line, 160) for line in lines)


def _mse(floor: float) -> str:
    return f"{_value(floor, 'down')} ({plus_minus(math.sqrt(floor))})"


def _cells(row: Row, column: str, names: Sequence[str], found: Sequence[str], measure: str) -> dict[str, Any]:
    """Returns the cells of a row in a front's table: of a floor, or of a chance beside all that were found."""
    cells = {
        "link": _link(row),
        "trial": row["trial"],
        "settings": [_value(row.get(name)) for name in names],
        "steps": f"{row['steps']:,}",
        "accuracy": _accuracy(row, measure).removeprefix(f"{R2} "),
        "epsilon": _value(row.get("epsilon"), "up"),
    }
    if column in chances.CHANCES:
        return cells | {"chances": [chances.format_chance(row, name) for name in found]}
    success = frontier.protection_of(row).success
    return cells | {
        "floor": _value(row[column], "down"),
        "error": plus_minus(math.sqrt(row[column])),
        "crossed": _value(row.get(frontier.crossed_of(column) or ""), "down"),
        "success": "–" if success is None else format_percent(success),
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


def _shown(row: Row, name: str) -> str:
    """Formats a row's chance, floor or other number. Floors are rounded down, upper bounds up."""
    if name in chances.CHANCES:
        return chances.format_chance(row, name)
    side: Side = "near" if name.startswith("accuracy") else "down"
    return _value(row.get(name), "up" if name in ("epsilon", "epsilon_add_remove", "delta") else side)
