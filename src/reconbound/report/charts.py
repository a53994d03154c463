"""The page's charts, as plotly figures (plain dictionaries): colours, axes, legends, and each chart.

All axes of floors are logarithmic with their own ticks. Text is escaped for plotly. Colours are Okabe and Ito's, which
colour-blind readers can distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound._internal.formatting import Side, format_percent
from reconbound.accounting.divergence_queries import mechanism_successes
from reconbound.report import folder
from reconbound.report.formats import amount, count, for_plotly, guess_error, plus_minus
from reconbound.report.text import column_sentence
from reconbound.report.view import NEGLIGIBLE, NO_LIMIT, View

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7d8590",
)  # fmt: skip
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
#: Decades around the median that a chart of floors shows; what lies beyond is drawn at its edge.
DECADES = 4.0
MOST_ROWS = 24  #: classes and columns in one chart

Figure = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One entry of a chart's legend. It is drawn in HTML, which wraps on a phone and never overlaps."""

    colour: str
    text: str
    kind: str = "bar"  # or "line", "upright", "dot", "diamond", "none"
    dash: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A figure with its legend and a note. `id` names the element that it is drawn in."""

    id: str
    figure: Figure
    keys: tuple[Key, ...] = ()
    note: str = ""
    label: str = ""


# --- axes ------------------------------------------------------------------------------


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns the ticks of a logarithmic axis from 10^low to 10^high: numbers, from 2 to `most`.

    Args:
        low: log10 of the lower end.
        high: log10 of the upper end.
        most: the largest number of ticks.
    """
    choices: tuple[tuple[int, ...], ...] = ((1, 2, 5), (1, 3), (1,))
    for marks in choices:
        values = [
            m * 10.0**e for e in range(math.floor(low) - 1, math.ceil(high) + 1) for m in marks
            if low - 1e-9 <= math.log10(m * 10.0**e) <= high + 1e-9
        ]  # fmt: skip
        if 2 < len(values) <= most or (2 <= len(values) <= most and marks == (1,)):
            return values
    if high - low > 2:
        apart = math.ceil((high - low) / (most - 1))
        return [10.0**e for e in range(math.ceil(low), math.floor(high) + 1, apart)]
    ends, room = (10.0**low, 10.0**high), (10.0**high - 10.0**low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(room))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= room)
    return [k * step for k in range(max(math.ceil(ends[0] / step), 1), math.floor(ends[1] / step) + 1)]


def logs_of(values: Any) -> np.ndarray:
    """Returns log10 of the values, NaN where there is none."""
    array = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(array > 0, np.log10(array), np.nan)


def shown_range(logs: np.ndarray, marks: Sequence[float] = (), reach: float = 1.5) -> tuple[float, float]:
    """Returns the range of the axis.

    It shows the data, at most four decades to each side of their median, and marks within reach.

    Args:
        logs: log10 of the data.
        marks: values that should be visible, if they are above 0.
        reach: the distance, in decades, up to which a mark extends the range.
    """
    known = logs[np.isfinite(logs)] if np.isfinite(logs).any() else np.array([0.0])
    middle = float(np.median(known))
    low, high = max(float(known.min()), middle - DECADES), min(float(known.max()), middle + DECADES)
    for mark in (math.log10(value) for value in marks if value > 0):
        if low - reach <= mark <= high + reach:
            low, high = min(low, mark), max(high, mark)
    room = max(0.05 * (high - low), 0.02)
    return low - room, high + room


def log_axis(low: float, high: float, title: str) -> Figure:
    """Returns a logarithmic axis from 10^low to 10^high, whose ticks have as few digits as tell them apart."""
    values = log_ticks(low, high)
    digits = next((n for n in range(3, 15) if len({f"{v:.{n}g}" for v in values}) == len(values)), 15)
    texts = []
    for v in values:
        short = float(f"{v:.{digits}g}")
        power = math.log10(short)
        large = f"10^{round(power)}" if abs(power - round(power)) < 1e-9 else f"{v:.0e}"
        texts.append(f"{short:,.10g}" if 1e-4 <= short < 1e6 else large)
    return {
        "range": [low, high], "tickvals": [math.log10(v) for v in values], "ticktext": texts, "title": title,
        "zeroline": False, "fixedrange": True, "tickangle": 0,
    }  # fmt: skip


def layout(height: int, x: Figure, y: Figure, **more: Any) -> Figure:
    """Returns the layout of a figure. Titles of axes are text, drawn small enough for a phone.

    Args:
        height: in pixels.
        x: the axis.
        y: the axis.
        **more: further settings of plotly's.
    """
    small = {"standoff": 12, "font": {"size": 13}}
    x, y = ({**axis, "title": {"text": axis["title"], **small}} if "title" in axis else axis for axis in (x, y))
    return {
        "height": height, "autosize": True, "showlegend": False, "hovermode": "closest", "dragmode": False,
        "margin": {"l": 56, "r": 14, "t": 12, "b": 58}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"family": "system-ui, sans-serif", "size": 13},
        "xaxis": x, "yaxis": {"automargin": True, **y}, **more,
    }  # fmt: skip


def numbers(values: Any) -> list[float | None]:
    """Returns finite numbers for JSON, None in place of others."""
    return [float(v) if math.isfinite(v) else None for v in np.asarray(values, dtype=np.float64).tolist()]


def scatter(x: Any, y: Any, hover: str | list[str] | None = None, *, mode: str = "lines", **more: Any) -> Figure:
    """Returns a trace of lines or markers; without `hover`, pointing at it shows nothing.

    Args:
        x: the positions.
        y: the positions.
        hover: texts, one for each point or one for all.
        mode: "lines", "markers" or "lines+markers".
        **more: further settings of plotly's.
    """
    shown = {"hoverinfo": "skip"} if hover is None else {"hovertext": hover, "hoverinfo": "text"}
    return {"type": "scatter", "mode": mode, "x": numbers(x), "y": numbers(y), **shown, **more}


def rows_axis(names: Sequence[str]) -> Figure:
    """Returns an axis whose ticks are names."""
    return {
        "tickvals": list(range(len(names))), "ticktext": [for_plotly(name, 18) for name in names], "zeroline": False,
        "range": [-0.6, len(names) - 0.4], "fixedrange": True, "automargin": True, "showgrid": False,
    }  # fmt: skip


STEPS_AXIS: Figure = {"title": "training step", "fixedrange": True, "nticks": 6, "zeroline": False}


# --- chances of success ------------------------------------------------------------------------


def success(view: View) -> Chart | None:
    """Draws the largest chance of success over the chance in the other world, for the leading world."""
    lead, baselines = view.success.leading, np.geomspace(1e-4, 0.999, 60)
    if lead is None:
        return None
    best = mechanism_successes(lead.divergences.account, baselines, removed=lead.divergences.removed)
    rows = lead.rows_at(baselines, best)
    series = [
        (f"the most exposed {view.noun}", [r["max"] for r in rows], VERMILLION, "solid"),
        ("all but 1 in 100", [r["p99"] for r in rows], ORANGE, "dash"),
        (f"the better-protected half of the {view.noun}s", [r["median"] for r in rows], BLUE, "solid"),
        ("the mechanism, whatever the data", best, GREY, "dot"),
        ("no help from the model", baselines, GREEN, "dashdot"),
    ]
    traces, keys = [], []
    for text, given, colour, dash in series:
        chances = np.asarray(given, dtype=np.float64)
        hover = [
            f"{format_percent(k, side='near')} → {format_percent(p)}" for k, p in zip(baselines, chances, strict=True)
        ]
        traces.append(scatter(np.log10(baselines), np.log10(chances), hover, line={"color": colour, "dash": dash}))
        keys.append(Key(colour, text, "line", dash))
    marks = [1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0]
    axis = {
        "range": [-4, 0], "tickvals": [math.log10(m) for m in marks], "zeroline": False, "fixedrange": True,
        "ticktext": [format_percent(m, side="near") for m in marks], "tickangle": 0,
    }  # fmt: skip
    x, y = {**axis, "title": "chance without"}, {**axis, "title": "at most, with this model"}
    label = "Largest chance of success with this model over the chance without."
    return Chart("chart-success", {"data": traces, "layout": layout(330, x, y)}, tuple(keys), label=label)


# --- floors of all records -----------------------------------------------------------------


def lines(view: View) -> list[tuple[str, float, str, str]]:
    """Returns the calculator's lines and the guess: (text, ± error, colour, dash)."""
    everywhere = f"any data, attacker unbiased for every {view.noun}"
    paper = "Theorem 1 as the paper computes it (not proved, no guarantee)"
    found = [("guessing the average", view.guess, GREY, "dot")]
    for name, text, colour, dash in (
        ("theorem1", f"Theorem 1, {everywhere}", GREEN, "solid"),
        ("theorem1_paper", paper, PURPLE, "dash"),
        ("corners", f"all corners, {everywhere}", ORANGE, "dashdot"),
    ):
        at = folder.line(view.run, name, view.unit)
        found += [] if at is None else [(text, at, colour, dash)]
    return found


def histogram(view: View) -> Chart:
    """Draws the histogram of records by floor, with the guess and the mechanism's own lines.

    It shows lower confidence limits, and estimates where there is none. Where there are limits, the estimates are an
    outline.
    """
    logs, estimates = logs_of(view.shown[view.measured]), logs_of(view.floor[view.measured])
    marks, limits = lines(view), bool(view.limited.any())
    both = np.concatenate([logs, estimates]) if limits else logs
    low, high = shown_range(both, [at for _, at, _, _ in marks])
    edges = bins_of(logs, low, high)
    counts = counts_in(logs, edges)
    top = max(1.0, float(counts.max(initial=0)))
    hover = [
        f"{count(c, view.noun)}<br>{plus_minus(10**a)} to ±{amount(10**b, side='up')}"
        for c, a, b in zip(counts.tolist(), edges[:-1], edges[1:], strict=True)
    ]
    bars: Figure = {
        "type": "bar", "x": numbers((edges[:-1] + edges[1:]) / 2), "y": counts.tolist(),
        "width": float(edges[1] - edges[0]) * 0.94, "marker": {"color": BLUE}, "hovertext": hover, "hoverinfo": "text",
    }  # fmt: skip
    data, keys = [bars], [Key(BLUE, f"{view.noun}s by floor, {view.basis}")]
    if limits:
        outline = np.repeat(counts_in(estimates, edges), 2)
        top = max(top, float(outline.max()))
        data.append(scatter(np.repeat(edges, 2)[1:-1], outline, line={"color": VERMILLION, "width": 2}))
        keys.append(Key(VERMILLION, "estimates", "line"))
    for text, at, colour, dash in marks:
        place = math.log10(at) if at > 0 else -math.inf
        where = " (off the chart, left)" if place < low else " (off the chart, right)" if place > high else ""
        error = guess_error(at) if colour == GREY else plus_minus(at)
        if where and at < NEGLIGIBLE * view.unit:
            error, where = f"{error}, negligible", " (not drawn)"
        keys.append(Key(colour, f"{text}: {error}{where}", "none" if where else "line", dash))
        if not where:
            data.append(_upright(place, 0, 1.08 * top, colour, dash, f"{text}: {error}"))
    keys.append(Key("currentColor", "the threshold below; shaded: lower floors", "line"))
    shape = {"xref": "x", "yref": "paper", "x0": low, "x1": low, "y0": 0, "y1": 1, "layer": "below"}
    drawn = layout(
        380,
        log_axis(low, high, f"± {'' if view.single else 'error '}{view.of_range} (log scale)"),
        {"title": f"{view.noun}s", "range": [0, 1.08 * top], "fixedrange": True, "rangemode": "tozero"},
        shapes=[
            {**shape, "type": "rect", "line": {"width": 0}, "fillcolor": "rgba(213,94,0,0.16)"},
            {**shape, "type": "line", "line": {"width": 1.5, "color": VERMILLION}},
        ],
    )
    label = f"Histogram of the floors of {view.records:,} {view.noun}s"
    return Chart("chart-floors", {"data": data, "layout": drawn}, tuple(keys), _note(view, logs, low, high), label)


def bins_of(logs: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns the edges of bars over the whole axis: about √N over the data, 10 to 40, each wide enough for a phone."""
    known = np.clip(logs[np.isfinite(logs)], low, high)
    spread = float(known.max() - known.min()) if known.size else 0.0
    width = max(spread / float(np.clip(math.sqrt(max(known.size, 1)), 10, 40)), (high - low) / 90)
    return np.linspace(low, high, max(round((high - low) / width), 8) + 1)


def counts_in(logs: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the number of values in each bar; those beyond the ends are in the first and the last."""
    known = logs[np.isfinite(logs)]
    return np.histogram(np.clip(known, edges[0], edges[-1]), bins=edges)[0]


def _note(view: View, logs: np.ndarray, low: float, high: float) -> str:
    """Returns what the histogram does not show, or not at its place."""
    left, right = int((logs < low).sum()), int((logs > high).sum())
    notes = (
        (left, f"{left:,} with lower floors are drawn in the first bar."),
        (right, f"{right:,} with higher floors are drawn in the last bar."),
        (view.unknown, f"{view.unknown:,} never measured are not drawn."),
        (view.unlimited, f"Without a confidence limit: {view.unlimited:,} ({NO_LIMIT})."),
    )
    return " ".join(note for number, note in notes if number)


def _upright(x: float, bottom: float, top: float, colour: str, dash: str, text: str) -> Figure:
    """Draws an upright line, of nine points so that its text shows wherever one points at it."""
    line = {"color": colour, "dash": dash, "width": 3}
    return scatter([x] * 9, np.linspace(bottom, top, 9), for_plotly(text, 120), line=line)


# --- classes, features, training ----------------------------------------------------------------


def by_class(view: View) -> Chart | None:
    """Draws the spread of floors within each class, or within parts of the target's range, most exposed on top."""
    groups = [(name, logs) for name, logs in _groups(view) if logs.size]
    if not groups:
        return None
    groups.sort(key=lambda group: (float(np.median(group[1])), group[0]))
    shown = groups[:MOST_ROWS][::-1]
    low, high = shown_range(np.concatenate([logs for _, logs in shown]), [view.guess], 0.5)
    quantiles = np.array([np.quantile(logs, (0, 0.25, 0.5, 0.75, 1)) for _, logs in shown]).T
    shape = [numbers(np.clip(q, low, high)) for q in quantiles]
    places = list(range(len(shown)))
    hover = [
        f"{for_plotly(name)}: {count(logs.size, view.noun)}<br>lowest {plus_minus(10 ** float(logs.min()))}, "
        f"median {plus_minus(10 ** float(np.median(logs)))}"
        for name, logs in shown
    ]
    box: Figure = {
        "type": "box", "orientation": "h", "y": places, "lowerfence": shape[0], "q1": shape[1], "median": shape[2],
        "q3": shape[3], "upperfence": shape[4], "line": {"color": BLUE, "width": 1.6}, "hoverinfo": "skip",
        "fillcolor": "rgba(0,114,178,0.25)", "width": 0.6,
    }  # fmt: skip
    marker = {"color": VERMILLION, "size": 8}
    dots = scatter(np.clip(quantiles[0], low, high), places, hover, mode="markers", marker=marker)
    data, keys = [box, dots], [Key(BLUE, "middle half, with the median"), Key(VERMILLION, "lowest floor", "dot")]
    if view.guess > 0 and low <= math.log10(view.guess) <= high:
        guess = f"guessing the average: {guess_error(view.guess)}"
        data.append(_upright(math.log10(view.guess), -0.5, len(shown) - 0.5, GREY, "dot", guess))
        keys.append(Key(GREY, guess, "line", "dot"))
    title = f"± {view.of_range if view.image or view.single else 'share of the range'} (log)"
    drawn = layout(110 + 30 * len(shown), log_axis(low, high, title), rows_axis([name for name, _ in shown]))
    note = f"The {MOST_ROWS} most exposed of {len(groups):,} classes." if len(groups) > MOST_ROWS else ""
    return Chart("chart-classes", {"data": data, "layout": drawn}, tuple(keys), note, "Floors by class")


def _groups(view: View) -> list[tuple[str, np.ndarray]]:
    """Returns (name, log10 of the floors) of each class, or of five parts of the target's range."""
    targets = view.leakage.targets.double().numpy()
    logs = logs_of(view.floor)
    seen = view.measured & np.isfinite(logs)
    if view.classes:
        return [(view.class_name(int(k)), logs[seen & (targets == k)]) for k in np.unique(targets[seen])]
    if not seen.any():
        return []
    cuts = np.unique(np.quantile(targets[seen], np.linspace(0, 1, 6)))
    own = float(view.facts.get("target_offset", 0.0)) + float(view.facts.get("target_scale", 1.0)) * cuts
    last = max(len(cuts) - 2, 0)
    part = np.clip(np.searchsorted(cuts, targets, side="right") - 1, 0, last)
    return [(f"{own[k]:.3g} to {own[min(k + 1, len(own) - 1)]:.3g}", logs[seen & (part == k)]) for k in range(last + 1)]


def by_feature(view: View) -> Chart | None:
    """Draws the floors of each column as shares of its range, beside the guess.

    There is one for the average record, and one for the record that is most exposed in that column.
    """
    average = view.feature_floors(None)
    if view.image or average is None:
        return None
    lowest = view.lowest_by_column
    order = view.most_exposed_columns(average if lowest is None else lowest)[:MOST_ROWS][::-1]
    kinds = [("average record", average, BLUE, "circle", "dot")]
    if lowest is not None:
        kinds.append(("the record most exposed in that column", lowest, VERMILLION, "diamond", "diamond"))
    kinds.append(("guessing the average", view.guess_each, GREY, "line-ns-open", "upright"))
    counts = [f"<br>{for_plotly(column_sentence(column), 160)}" for column in view.columns]
    logs = [logs_of(np.minimum(values[order] / view.scale[order], 1e150)) for _, values, *_ in kinds]
    low, high = shown_range(np.concatenate(logs))
    data = []
    for (text, values, colour, symbol, _), places in zip(kinds, logs, strict=True):
        side: Side = "up" if colour == GREY else "down"
        errors = [plus_minus(float(values[j]), view.feature_unit(j), float(view.scale[j]), side=side) for j in order]
        hover = [
            f"{for_plotly(view.feature_name(j))}: {for_plotly(error, 80)}<br>{text}{counts[j] if counts else ''}"
            for j, error in zip(order, errors, strict=True)
        ]
        marker = {"color": colour, "size": 11, "symbol": symbol, "line": {"color": colour, "width": 2.5}}
        data.append(scatter(np.clip(places, low, high), np.arange(len(order)), hover, mode="markers", marker=marker))
    rows = {**rows_axis([view.feature_name(j) for j in order]), "showgrid": True}
    drawn = layout(110 + 30 * len(order), log_axis(low, high, "± share of the range (log)"), rows)
    keys = tuple(Key(colour, text, kind) for text, _, colour, _, kind in kinds)
    note = f"The {len(order)} most exposed of {view.features:,} columns." if view.features > len(order) else ""
    return Chart("chart-features", {"data": data, "layout": drawn}, keys, note, "Floors by column")


def growth(view: View) -> Chart | None:
    """Draws the floors over the steps of the first run: of the most exposed record, the 1 % quantile and the median."""
    steps = view.leakage.history_step.double().numpy()
    history = view.leakage.history.double().numpy()
    if len(steps) < 2:
        return None
    with np.errstate(divide="ignore"):
        floor = view.unit / np.sqrt(np.where(history > 0, history, 0.0))
    logs = np.where(np.isfinite(floor), logs_of(floor), np.nan)
    low, high = shown_range(logs[np.isfinite(logs)], [view.guess], 0.7)
    kinds = (
        ("most exposed", VERMILLION, "solid"),
        ("1 in 100 is more exposed", ORANGE, "dash"),
        ("median", BLUE, "dot"),
    )
    data: list[Figure] = []
    for k, (text, colour, dash) in enumerate(kinds):
        hover = [
            f"{text}, step {s:,.0f}: {plus_minus(f) if math.isfinite(f) else '±∞'}"
            for s, f in zip(steps, floor[:, k], strict=True)
        ]
        line = {"color": colour, "width": 2.5, "dash": dash}
        data.append(scatter(steps, np.clip(logs[:, k], low, high), hover, line=line))
    keys = [Key(colour, text, "line", dash) for text, colour, dash in kinds]
    if view.guess > 0 and low <= math.log10(view.guess) <= high:
        mark = [math.log10(view.guess)] * 2
        data.append(scatter(steps[[0, -1]], mark, line={"color": GREY, "width": 2, "dash": "dot"}))
        keys.append(Key(GREY, f"guessing the average: {guess_error(view.guess)}", "line", "dot"))
    drawn = layout(320, STEPS_AXIS, log_axis(low, high, f"floor, ± {view.of_range}"))
    runs, note = int(view.run.mechanism.get("runs", 1)), ""
    if runs > 1 and view.worst is not None and math.isfinite(floor[-1, 0]):
        note = (
            f"The first run ends at {plus_minus(float(floor[-1, 0]))} for the {view.noun} most exposed in it; the mean "
            f"over {runs:,} runs is {plus_minus(float(view.floor[view.worst]))} for the {view.noun} most exposed in it."
        )
    return Chart("chart-growth", {"data": data, "layout": drawn}, tuple(keys), note, "Floors over training")


def accuracy(view: View) -> Chart | None:
    """Draws the test accuracy (R² for a number) over the steps of the run."""
    steps, found = (t.double().numpy() for t in (view.leakage.accuracy_step, view.leakage.accuracy))
    if len(steps) < 2 or not np.isfinite(found).any():
        return None
    name = "" if view.classes else "R² "
    hover = [f"step {s:,.0f}: {name}{view.format_accuracy(a)}" for s, a in zip(steps, found, strict=True)]
    how: Figure = {"mode": "lines+markers", "line": {"color": BLUE, "width": 2.5}, "marker": {"size": 6}}
    trace = scatter(steps, found, hover, **how)
    y: Figure = {"title": "test accuracy" if view.classes else "R² on test data", "fixedrange": True}
    if view.classes:
        y |= {"tickformat": ".0%", "range": [0, 1.04]}
    drawn = layout(320, STEPS_AXIS, y)
    return Chart("chart-accuracy", {"data": [trace], "layout": drawn}, (), "", "Accuracy over training")
