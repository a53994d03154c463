"""The page's charts, as plotly figures (plain dictionaries).

All axes of floors are logarithmic with their own ticks. Text is escaped for plotly. Colours are Okabe and Ito's, which
colour-blind readers can distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from reconbound._internal.formatting import Side
from reconbound.report.axes import (
    BLUE,
    DASHES,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SERIES,
    VERMILLION,
    Chart,
    Figure,
    Key,
    faint,
    layout,
    log_axis,
    logs_of,
    numbers,
    rows_axis,
    shown_range,
    steps_axis,
    titled,
)
from reconbound.report.columns import counts, lowest, most_exposed, sentence
from reconbound.report.figures import amount, for_plotly, guess_error, plus_minus
from reconbound.report.view import NO_LIMIT, NOTHING, View

#: Classes and columns in one chart.
MOST_ROWS = 24


# --- floors of all records -----------------------------------------------------------------


def lines(view: View) -> list[tuple[str, float, str, str]]:
    """Returns the calculator's lines and the guess: (text, ± error, colour, dash)."""
    found = [("guessing the average", view.guess, GREY, "dot")]
    everywhere = f"any data, attacker unbiased for every {view.noun}"
    for name, text, colour, dash in (
        ("theorem1", f"Theorem 1, {everywhere}", GREEN, "solid"),
        ("theorem1_paper", "Theorem 1 as the paper computes it (not proved, no guarantee)", PURPLE, "dash"),
        ("corners", f"all corners, {everywhere}", ORANGE, "dashdot"),
    ):
        at = view.line(name)
        if at is not None:
            found.append((text, at, colour, dash))
    return found


def histogram(view: View) -> Chart:
    """Draws the histogram of records by floor, with the guess and the mechanism's own lines.

    It shows lower confidence limits, and estimates where there is none. Where there are limits, the estimates are an
    outline.
    """
    logs = logs_of(view.shown[view.measured])
    marks, limits = lines(view), view.upper_floor is not None and bool((view.upper_floor > 0).any())
    both = logs if not limits else np.concatenate([logs, logs_of(view.floor[view.measured])])
    low, high = shown_range(both, [math.log10(at) for _, at, _, _ in marks if at > 0])
    edges = _bins(logs, low, high)
    counts = _counted(logs, edges)
    top = max(1.0, float(counts.max(initial=0)))
    hover = [
        f"{c:,} {view.noun}{'' if c == 1 else 's'}<br>{plus_minus(10**a)} to ±{amount(10**b, side='up')}"
        for c, a, b in zip(counts.tolist(), edges[:-1], edges[1:], strict=True)
    ]
    bars: Figure = {
        "type": "bar", "x": numbers((edges[:-1] + edges[1:]) / 2), "y": counts.tolist(),
        "width": float(edges[1] - edges[0]) * 0.94, "marker": {"color": BLUE}, "hovertext": hover, "hoverinfo": "text",
    }  # fmt: skip
    data, keys = [bars], [Key(BLUE, f"{view.noun}s by floor, {view.basis}")]
    notes = [_edges_note(view, logs, low, high)]
    if view.unlimited:
        notes.append(f"Without a confidence limit: {view.unlimited:,} ({NO_LIMIT}).")
    if limits:
        trace = _estimates(view, edges)
        top = max(top, float(max(trace["y"])))
        data.append(trace)
        keys.append(Key(VERMILLION, "the same by estimates alone", "line"))
    for text, at, colour, dash in marks:
        place = math.log10(at) if at > 0 else -math.inf
        where = " (off the chart, left)" if place < low else " (off the chart, right)" if place > high else ""
        said = guess_error(at) if colour == GREY else plus_minus(at)
        if where and at < NOTHING * view.unit:
            said, where = f"{said}, next to nothing", " (not drawn)"
        keys.append(Key(colour, f"{text}: {said}{where}", "none" if where else "line", dash))
        if not where:
            data.append(_upright(place, 1.08 * top, colour, dash, f"{text}: {said}"))
    keys.append(Key("currentColor", "the threshold below; shaded: lower floors", "line"))
    drawn = layout(
        380,
        log_axis(low, high, f"± {'' if view.single else 'error '}{view.of_range} (log scale)"),
        {"title": titled(f"{view.noun}s"), "range": [0, 1.08 * top], "fixedrange": True, "rangemode": "tozero"},
        shapes=[
            {"type": "rect", "xref": "x", "yref": "paper", "x0": low, "x1": low, "y0": 0, "y1": 1, "layer": "below",
             "line": {"width": 0}, "fillcolor": "rgba(213,94,0,0.16)"},
            {"type": "line", "xref": "x", "yref": "paper", "x0": low, "x1": low, "y0": 0, "y1": 1, "layer": "below",
             "line": {"width": 1.5, "color": VERMILLION}},
        ],
    )  # fmt: skip
    label = f"Histogram of the floors of {view.records:,} {view.noun}s"
    return Chart("chart-floors", {"data": data, "layout": drawn}, tuple(keys), " ".join(n for n in notes if n), label)


def _bins(logs: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns the edges of bars over the whole axis: about √N over the data, 10 to 40, each wide enough for a phone."""
    known = np.clip(logs[np.isfinite(logs)], low, high)
    spread = float(known.max() - known.min()) if known.size else 0.0
    width = max(spread / float(np.clip(math.sqrt(max(known.size, 1)), 10, 40)), (high - low) / 90)
    return np.linspace(low, high, max(round((high - low) / width), 8) + 1)


def _counted(logs: np.ndarray, edges: np.ndarray) -> np.ndarray:
    known = logs[np.isfinite(logs)]
    return np.histogram(np.clip(known, edges[0], edges[-1]), bins=edges)[0]


def _edges_note(view: View, logs: np.ndarray, low: float, high: float) -> str:
    found = []
    left, right = int((logs < low).sum()), int((logs > high).sum())
    if left:
        found.append(f"{left:,} with lower floors are drawn in the first bar.")
    if right:
        found.append(f"{right:,} with higher floors are drawn in the last bar.")
    if view.unknown:
        found.append(f"{view.unknown:,} never measured are not drawn.")
    return " ".join(found)


def _estimates(view: View, edges: np.ndarray) -> Figure:
    """Draws the outline of the histogram of the floors' estimates."""
    counts = _counted(logs_of(view.floor[view.measured]), edges)
    return {
        "type": "scatter", "mode": "lines", "x": numbers(np.repeat(edges, 2)[1:-1]),
        "y": np.repeat(counts, 2).tolist(), "line": {"color": VERMILLION, "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip


def _upright(x: float, top: float, colour: str, dash: str, text: str) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "x": [x] * 9, "y": [top * k / 8 for k in range(9)],
        "line": {"color": colour, "dash": dash, "width": 3}, "hovertext": for_plotly(text, 120), "hoverinfo": "text",
    }  # fmt: skip


# --- classes, features, training ----------------------------------------------------------------


def by_class(view: View) -> Chart | None:
    """Draws the spread of floors within each class or part of the target's range; most exposed classes on top."""
    groups = [(name, logs) for name, logs in _groups(view) if logs.size]
    if not groups:
        return None
    groups.sort(key=lambda group: (float(np.median(group[1])), group[0]))
    left_out = len(groups) - MOST_ROWS
    shown = groups[:MOST_ROWS][::-1]
    low, high = shown_range(
        np.concatenate([logs for _, logs in shown]), [math.log10(view.guess)] if view.guess > 0 else [], 0.5
    )
    quantiles = np.array([np.quantile(logs, (0, 0.25, 0.5, 0.75, 1)) for _, logs in shown]).T
    shape = [numbers(np.clip(q, low, high)) for q in quantiles]
    places = list(range(len(shown)))
    hover = [
        f"{for_plotly(name)}: {logs.size:,} {view.noun}s<br>lowest {plus_minus(10 ** float(logs.min()))}, "
        f"median {plus_minus(10 ** float(np.median(logs)))}"
        for name, logs in shown
    ]
    box: Figure = {
        "type": "box", "orientation": "h", "y": places, "lowerfence": shape[0], "q1": shape[1], "median": shape[2],
        "q3": shape[3], "upperfence": shape[4], "line": {"color": BLUE, "width": 1.6}, "hoverinfo": "skip",
        "fillcolor": "rgba(0,114,178,0.25)", "width": 0.6,
    }  # fmt: skip
    dots: Figure = {
        "type": "scatter", "mode": "markers", "x": shape[0], "y": places, "hovertext": hover, "hoverinfo": "text",
        "marker": {"color": VERMILLION, "size": 8},
    }  # fmt: skip
    data, keys = [box, dots], [Key(BLUE, "middle half, with the median"), Key(VERMILLION, "lowest floor", "dot")]
    if view.guess > 0 and low <= math.log10(view.guess) <= high:
        x, top = math.log10(view.guess), len(shown) - 0.5
        data.append({**_upright(x, 1.0, GREY, "dot", f"guessing the average: {guess_error(view.guess)}"),
                     "y": [-0.5 + (top + 0.5) * k / 8 for k in range(9)]})  # fmt: skip
        keys.append(Key(GREY, f"guessing the average: {guess_error(view.guess)}", "line", "dot"))
    height = 110 + 30 * len(shown)
    drawn = layout(
        height,
        log_axis(low, high, f"± {view.of_range if view.image or view.single else 'share of the range'} (log)"),
        rows_axis([name for name, _ in shown]),
    )
    note = f"The {MOST_ROWS} most exposed of {len(groups):,} classes." if left_out > 0 else ""
    return Chart("chart-classes", {"data": data, "layout": drawn}, tuple(keys), note, "Floors by class", height)


def _groups(view: View) -> list[tuple[str, np.ndarray]]:
    targets = view.leakage.targets.double().numpy()
    logs = logs_of(view.floor)
    seen = view.measured & np.isfinite(logs)
    if view.facts.get("task", "classes") == "classes":
        return [(view.class_name(int(k)), logs[seen & (targets == k)]) for k in np.unique(targets[seen])]
    if not seen.any():
        return []
    cuts = np.unique(np.quantile(targets[seen], np.linspace(0, 1, 6)))
    low, width = float(view.facts.get("target_offset", 0.0)), float(view.facts.get("target_scale", 1.0))
    own = low + width * cuts
    found = []
    for k in range(max(len(cuts) - 1, 1)):
        a, b = cuts[k], cuts[min(k + 1, len(cuts) - 1)]
        inside = seen & (targets >= a) & ((targets < b) if k + 2 < len(cuts) else (targets <= b))
        found.append((f"{own[k]:.3g} to {own[min(k + 1, len(own) - 1)]:.3g}", logs[inside]))
    return found


def by_feature(view: View) -> Chart | None:
    """Draws the floors of each column as shares of its range, beside the guess.

    There is one for the average record, and one for the record that is most exposed in that column.
    """
    average = view.feature_floors(None)
    if view.image or average is None:
        return None
    worst = lowest(view)
    order = most_exposed(view, average if worst is None else worst, MOST_ROWS)[::-1]
    kinds = [
        ("average record", average, BLUE, "circle"),
        ("guessing the average", view.guess_each, GREY, "line-ns-open"),
    ]
    if worst is not None:
        kinds.insert(1, ("the record most exposed in that column", worst, VERMILLION, "diamond"))
    told_counts = [sentence(found) for found in counts(view)]
    logs = {text: logs_of(np.minimum(values[order] / view.scale[order], 1e150)) for text, values, _, _ in kinds}
    low, high = shown_range(np.concatenate(list(logs.values())))
    data = []
    for text, values, colour, symbol in kinds:
        side: Side = "up" if colour == GREY else "down"
        told = [plus_minus(float(values[j]), view.feature_unit(j), float(view.scale[j]), side=side) for j in order]
        hover = [
            f"{for_plotly(view.feature_name(j))}: {for_plotly(own, 80)}<br>{text}"
            + (f"<br>{for_plotly(told_counts[j], 160)}" if told_counts else "")
            for j, own in zip(order, told, strict=True)
        ]
        data.append({
            "type": "scatter", "mode": "markers", "x": numbers(np.clip(logs[text], low, high)),
            "y": list(range(len(order))), "hovertext": hover, "hoverinfo": "text",
            "marker": {"color": colour, "size": 11, "symbol": symbol, "line": {"color": colour, "width": 2.5}},
        })  # fmt: skip
    drawn = layout(
        110 + 30 * len(order),
        log_axis(low, high, "± share of the range (log)"),
        {**rows_axis([view.feature_name(j) for j in order]), "showgrid": True},
    )
    marks = {"circle": "dot", "line-ns-open": "upright"}
    keys = tuple(Key(colour, text, marks.get(symbol, symbol)) for text, _, colour, symbol in kinds)
    left_out = view.features - len(order)
    note = f"The {len(order)} most exposed of {view.features:,} columns." if left_out > 0 else ""
    return Chart(
        "chart-features", {"data": data, "layout": drawn}, keys, note, "Floors by column", 110 + 30 * len(order)
    )


def growth(view: View) -> Chart | None:
    """Draws the floors over the steps of the first run: of the most exposed record, the 1 % quantile and the median."""
    steps = view.leakage.history_step.double().numpy()
    history = view.leakage.history.double().numpy()
    if len(steps) < 2:
        return None
    with np.errstate(divide="ignore"):
        floor = view.unit / np.sqrt(np.where(history > 0, history, 0.0))
    logs = np.where(np.isfinite(floor), logs_of(floor), np.nan)
    low, high = shown_range(logs[np.isfinite(logs)], [math.log10(view.guess)] if view.guess > 0 else [], 0.7)
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
        data.append({
            "type": "scatter", "mode": "lines", "x": numbers(steps), "y": numbers(np.clip(logs[:, k], low, high)),
            "line": {"color": colour, "width": 2.5, "dash": dash}, "hovertext": hover, "hoverinfo": "text",
        })  # fmt: skip
    keys = [Key(colour, text, "line", dash) for text, colour, dash in kinds]
    if view.guess > 0 and low <= math.log10(view.guess) <= high:
        ends = [float(steps[0]), float(steps[-1])]
        data.append({"type": "scatter", "mode": "lines", "x": ends, "y": [math.log10(view.guess)] * 2,
                     "line": {"color": GREY, "width": 2, "dash": "dot"}, "hoverinfo": "skip"})  # fmt: skip
        keys.append(Key(GREY, f"guessing the average: {guess_error(view.guess)}", "line", "dot"))
    drawn = layout(320, steps_axis(), log_axis(low, high, f"floor, ± {view.of_range}"))
    return Chart(
        "chart-growth", {"data": data, "layout": drawn}, tuple(keys), _ends(view, floor), "Floors over training", 320
    )


def _ends(view: View, floor: np.ndarray) -> str:
    """Explains why the chart of one run ends at another number than the verdict's."""
    runs = int(view.run.mechanism.get("runs", 1))
    if runs < 2 or view.worst is None or not math.isfinite(floor[-1, 0]):
        return ""
    return (
        f"The first run alone ends at {plus_minus(float(floor[-1, 0]))} for the {view.noun} most exposed in it. The "
        f"page’s floors are of the mean over {runs:,} runs, where the lowest is "
        f"{plus_minus(float(view.floor[view.worst]))}."
    )


def accuracy(view: View) -> Chart | None:
    """Draws the test accuracy (R² for a number) over the steps of the run."""
    steps, found = (t.double().numpy() for t in (view.leakage.accuracy_step, view.leakage.accuracy))
    if len(steps) < 2 or not np.isfinite(found).any():
        return None
    classes = view.facts.get("task", "classes") == "classes"
    said = [
        f"step {s:,.0f}: {a:.1%}" if classes else f"step {s:,.0f}: R² {a:.3f}"
        for s, a in zip(steps, found, strict=True)
    ]
    trace = {
        "type": "scatter", "mode": "lines+markers", "x": numbers(steps), "y": numbers(found), "hovertext": said,
        "line": {"color": BLUE, "width": 2.5}, "marker": {"size": 6}, "hoverinfo": "text",
    }  # fmt: skip
    y: Figure = {"title": titled("test accuracy" if classes else "R² on test data"), "fixedrange": True}
    if classes:
        y |= {"tickformat": ".0%", "range": [0, 1.04]}
    drawn = layout(320, steps_axis(), y)
    return Chart("chart-accuracy", {"data": [trace], "layout": drawn}, (), "", "Accuracy over training", 320)


# --- several runs ---------------------------------------------------------------------------------


def overlay(views: Sequence[View], names: Sequence[str]) -> Chart:
    """Draws the histograms of several runs, each as shares of its records, over one axis.

    Args:
        views: the audits.
        names: a name for each.
    """
    logs = [logs_of(view.floor[view.measured] / view.unit) for view in views]
    low, high = shown_range(np.concatenate(logs), [math.log10(v.guess / v.unit) for v in views if v.guess > 0])
    edges = _bins(np.concatenate(logs), low, high)
    data, keys = [], []
    for k, (view, name, own) in enumerate(zip(views, names, logs, strict=True)):
        colour, dash = SERIES[k % len(SERIES)], DASHES[(k // len(SERIES)) % len(DASHES)]
        share = _counted(own, edges) / max(view.records, 1)
        data.append({
            "type": "scatter", "mode": "lines", "x": numbers(np.repeat(edges, 2)[1:-1]), "fill": "tozeroy",
            "y": numbers(np.repeat(share, 2)), "line": {"color": colour, "width": 2.2, "dash": dash},
            "fillcolor": faint(colour), "hoverinfo": "text", "hovertext": for_plotly(name, 60),
        })  # fmt: skip
        keys.append(Key(colour, name, "line", dash))
    y = {"title": titled("share of records"), "tickformat": ".0%", "fixedrange": True, "rangemode": "tozero"}
    drawn = layout(400, log_axis(low, high, "± error, share of the range (log scale)"), y)
    return Chart("chart-compare", {"data": data, "layout": drawn}, tuple(keys), "", "Floors of several runs", 400)
