"""The page's charts, as plotly figures (plain dictionaries). All axes of floors are logarithms with their own ticks;
text is escaped for plotly; colours are Okabe and Ito's, which the colour-blind tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .figures import amount, for_plotly, plus_minus
from .view import View

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7d8590",
)  # fmt: skip
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
#: Decades around the median that a chart of floors shows; what lies beyond is drawn at its edge.
DECADES = 4.0
#: Classes and columns in one chart.
MOST_ROWS = 24

Figure = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One entry of a chart's legend, which is drawn in HTML: it wraps on a phone and never overlaps."""

    colour: str
    text: str
    kind: str = "bar"  # or "line", "dot"
    dash: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A figure with its legend and a note. id: the element that it is drawn in."""

    id: str
    figure: Figure
    keys: tuple[Key, ...] = ()
    note: str = ""
    label: str = ""
    height: int = field(default=360)


# --- axes ------------------------------------------------------------------------------


def log_ticks(low: float, high: float, most: int = 6) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis from 10^low to 10^high: places (log10) and texts; at least two, at most `most`."""
    for marks in ((1, 2, 5), (1, 3), (1,)):
        values = [
            m * 10.0**e for e in range(math.floor(low) - 1, math.ceil(high) + 1) for m in marks
            if low - 1e-9 <= math.log10(m * 10.0**e) <= high + 1e-9
        ]  # fmt: skip
        if 2 < len(values) <= most or (2 <= len(values) <= most and marks == (1,)):
            return _ticks(values)
    if high - low > 2:
        step = math.ceil((high - low) / (most - 1))
        return _ticks([10.0**e for e in range(math.ceil(low), math.floor(high) + 1, step)])
    ends, room = (10.0**low, 10.0**high), (10.0**high - 10.0**low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(room))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= room)
    first = math.ceil(ends[0] / step)
    return _ticks([k * step for k in range(max(first, 1), math.floor(ends[1] / step) + 1)])


def _ticks(values: Sequence[float]) -> tuple[list[float], list[str]]:
    return [math.log10(v) for v in values], [_tick(v) for v in values]


def _tick(v: float) -> str:
    short = float(f"{v:.3g}")
    return f"{short:,.10g}" if 1e-4 <= short < 1e6 else f"10^{round(math.log10(short))}" if _power(short) else f"{v:.0e}"


def _power(v: float) -> bool:
    return abs(math.log10(v) - round(math.log10(v))) < 1e-9


def _logs(values: Any) -> np.ndarray:
    """log10, NaN where there is none."""
    array = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(array > 0, np.log10(array), np.nan)


def _range(logs: np.ndarray, marks: Sequence[float] = ()) -> tuple[float, float]:
    """What the axis shows: the data, four decades at most to each side of their median, and marks near by."""
    known = logs[np.isfinite(logs)]
    if known.size == 0:
        known = np.array([0.0])
    middle = float(np.median(known))
    low = max(float(known.min()), middle - DECADES)
    high = min(float(known.max()), middle + DECADES)
    for mark in marks:
        if low - 1.5 <= mark <= high + 1.5:
            low, high = min(low, mark), max(high, mark)
    room = max(0.05 * (high - low), 0.02)
    return low - room, high + room


def _axis(low: float, high: float, title: str, *, most: int = 6) -> Figure:
    places, texts = log_ticks(low, high, most)
    return {
        "range": [low, high], "tickvals": places, "ticktext": texts, "title": {"text": title, "standoff": 12},
        "zeroline": False, "fixedrange": True, "tickangle": 0,
    }  # fmt: skip


def _layout(height: int, x: Figure, y: Figure, **more: Any) -> Figure:
    return {
        "height": height, "autosize": True, "showlegend": False, "hovermode": "closest", "dragmode": False,
        "margin": {"l": 56, "r": 14, "t": 12, "b": 58}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"family": "system-ui, sans-serif", "size": 13},
        "xaxis": x, "yaxis": y, **more,
    }  # fmt: skip


def _numbers(values: Any) -> list[float | None]:
    """Finite numbers for JSON; what is not finite is left out."""
    return [float(v) if math.isfinite(v) else None for v in np.asarray(values, dtype=np.float64).tolist()]


# --- floors of all records -----------------------------------------------------------------


def lines(view: View) -> list[tuple[str, float, str, str]]:
    """The calculator's lines and the guess: (text, ± error, colour, dash)."""
    found = [("guessing the average", view.guess, GREY, "dot")]
    for name, text, colour, dash in (
        ("theorem1", "Theorem 1, any data", GREEN, "solid"),
        ("theorem1_paper", "Theorem 1 as the paper computes it (no guarantee)", PURPLE, "dash"),
        ("corners", "all corners, any data", ORANGE, "dashdot"),
    ):
        at = view.line(name)
        if at is not None:
            found.append((text, at, colour, dash))
    return found


def histogram(view: View) -> Chart:
    """Records by floor, with the same at the upper confidence limit, the guess, and the mechanism's own lines."""
    logs = _logs(view.floor[view.measured])
    marks = lines(view)
    low, high = _range(logs, [math.log10(at) for _, at, _, _ in marks if at > 0])
    edges = np.linspace(low, high, _bins(logs, low, high) + 1)
    counts = _counted(logs, edges)
    top = max(1.0, float(counts.max(initial=0)))
    hover = [
        f"{c:,} {view.noun}{'' if c == 1 else 's'}<br>±{amount(10**a)} to ±{amount(10**b)}"
        for c, a, b in zip(counts.tolist(), edges[:-1], edges[1:], strict=True)
    ]
    bars: Figure = {
        "type": "bar", "x": _numbers((edges[:-1] + edges[1:]) / 2), "y": counts.tolist(),
        "width": float(edges[1] - edges[0]) * 0.94, "marker": {"color": BLUE}, "hovertext": hover, "hoverinfo": "text",
    }  # fmt: skip
    data, keys = [bars], [Key(BLUE, f"{view.noun}s by floor (estimate)")]
    notes = [_edges_note(view, logs, low, high)]
    if view.upper_floor is not None:
        trace, note = _upper(view, edges)
        top = max(top, float(max(trace["y"])))
        data.append(trace)
        level = f"{100 * float(view.facts.get('confidence', 0.95)):g} %"
        keys.append(Key(VERMILLION, f"the same at the {level} upper limit of their leakage", "line"))
        notes.append(note)
    for text, at, colour, dash in marks:
        place = math.log10(at) if at > 0 else -math.inf
        where = " ← off the chart" if place < low else " → off the chart" if place > high else ""
        keys.append(Key(colour, f"{text}: {plus_minus(at)}{where}", "line", dash))
        if not where:
            data.append(_upright(place, 1.08 * top, colour, dash, f"{text}: {plus_minus(at)}"))
    layout = _layout(
        380,
        _axis(low, high, f"floor: ± error {view.of_range}, log scale"),
        {"title": {"text": f"{view.noun}s"}, "range": [0, 1.08 * top], "fixedrange": True, "rangemode": "tozero"},
        shapes=[
            {"type": "rect", "xref": "x", "yref": "paper", "x0": low, "x1": low, "y0": 0, "y1": 1, "layer": "below",
             "line": {"width": 0}, "fillcolor": "rgba(213,94,0,0.16)"},
            {"type": "line", "xref": "x", "yref": "paper", "x0": low, "x1": low, "y0": 0, "y1": 1,
             "line": {"width": 2.5, "color": VERMILLION}},
        ],
    )  # fmt: skip
    label = f"Histogram of the floors of {view.records:,} {view.noun}s"
    return Chart("chart-floors", {"data": data, "layout": layout}, tuple(keys), " ".join(n for n in notes if n), label)


def _bins(logs: np.ndarray, low: float, high: float) -> int:
    """About √N bars, 12 to 48, each wide enough to be seen on a phone."""
    known = int(np.isfinite(logs).sum())
    return int(np.clip(round(math.sqrt(max(known, 1)) * 1.2), 12, 48))


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


def _upper(view: View, edges: np.ndarray) -> tuple[Figure, str]:
    """Outline of the histogram of floors at the upper confidence limit."""
    assert view.upper_floor is not None
    limited = view.upper_floor > 0
    counts = _counted(_logs(view.upper_floor[limited]), edges)
    none = int((view.measured & ~limited).sum())
    trace = {
        "type": "scatter", "mode": "lines", "x": _numbers(np.repeat(edges, 2)[1:-1]), "y": np.repeat(counts, 2).tolist(),
        "line": {"color": VERMILLION, "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip
    return trace, f"{none:,} were measured too rarely for an upper limit." if none else ""


def _upright(x: float, top: float, colour: str, dash: str, text: str) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "x": [x] * 9, "y": [top * k / 8 for k in range(9)],
        "line": {"color": colour, "dash": dash, "width": 2.5}, "hovertext": for_plotly(text, 120), "hoverinfo": "text",
    }  # fmt: skip


# --- classes, features, training ----------------------------------------------------------------


def by_class(view: View) -> Chart | None:
    """Spread of floors within each class, or within parts of the target's range; most exposed classes on top."""
    groups = [(name, logs) for name, logs in _groups(view) if logs.size]
    if not groups:
        return None
    groups.sort(key=lambda group: (float(np.median(group[1])), group[0]))
    left_out = len(groups) - MOST_ROWS
    shown = groups[:MOST_ROWS][::-1]
    low, high = _range(np.concatenate([logs for _, logs in shown]), [math.log10(view.guess)] if view.guess > 0 else [])
    quantiles = np.array([np.quantile(logs, (0, 0.25, 0.5, 0.75, 1)) for _, logs in shown]).T
    shape = [_numbers(np.clip(q, low, high)) for q in quantiles]
    places = list(range(len(shown)))
    hover = [
        f"{for_plotly(name)}: {logs.size:,} {view.noun}s<br>lowest ±{amount(10 ** float(logs.min()))}, "
        f"median ±{amount(10 ** float(np.median(logs)))}"
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
    data, keys = [box, dots], [Key(BLUE, "half of the class, and its median"), Key(VERMILLION, "lowest floor", "dot")]
    if view.guess > 0 and low <= math.log10(view.guess) <= high:
        x, top = math.log10(view.guess), len(shown) - 0.5
        data.append({**_upright(x, 1.0, GREY, "dot", f"guessing the average: {plus_minus(view.guess)}"),
                     "y": [-0.5 + (top + 0.5) * k / 8 for k in range(9)]})  # fmt: skip
        keys.append(Key(GREY, f"guessing the average: {plus_minus(view.guess)}", "line", "dot"))
    height = 110 + 30 * len(shown)
    layout = _layout(
        height,
        _axis(low, high, f"floor: ± error {view.of_range}, log scale"),
        _rows([name for name, _ in shown]),
    )
    note = f"The {MOST_ROWS} most exposed of {len(groups):,} classes." if left_out > 0 else ""
    return Chart("chart-classes", {"data": data, "layout": layout}, tuple(keys), note, "Floors by class", height)


def _rows(names: Sequence[str]) -> Figure:
    """An axis whose ticks are names."""
    return {
        "tickvals": list(range(len(names))), "ticktext": [for_plotly(name, 18) for name in names], "zeroline": False,
        "range": [-0.6, len(names) - 0.4], "fixedrange": True, "automargin": True, "showgrid": False,
    }  # fmt: skip


def _groups(view: View) -> list[tuple[str, np.ndarray]]:
    targets = view.leakage.targets.double().numpy()
    logs = _logs(view.floor)
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
    """Floors of each column as shares of its range: of the average record, of the most exposed one, beside the guess."""
    average = view.feature_floors(None)
    if view.image or average is None:
        return None
    place = None if view.worst is None else view.place(view.worst)
    worst = None if place is None else view.feature_floors(place)
    ratio = (average if worst is None else worst) / np.maximum(view.guess_each, np.finfo(float).tiny)
    order = np.argsort(ratio, kind="stable")[:MOST_ROWS][::-1]
    kinds = [("average record", average, BLUE, "circle"), ("guessing the average", view.guess_each, GREY, "line-ns-open")]
    if worst is not None:
        kinds.insert(1, ("most exposed record", worst, VERMILLION, "diamond"))
    logs = {text: _logs(np.minimum(values[order] / view.scale[order], 1e150)) for text, values, _, _ in kinds}
    low, high = _range(np.concatenate(list(logs.values())))
    data = []
    for text, values, colour, symbol in kinds:
        hover = [
            f"{for_plotly(view.feature_name(int(j)))}: {for_plotly(plus_minus(float(values[j]), view.feature_unit(int(j))), 80)}"
            f"<br>{text}"
            for j in order
        ]
        data.append({
            "type": "scatter", "mode": "markers", "x": _numbers(np.clip(logs[text], low, high)),
            "y": list(range(len(order))), "hovertext": hover, "hoverinfo": "text",
            "marker": {"color": colour, "size": 11, "symbol": symbol, "line": {"color": colour, "width": 2.5}},
        })  # fmt: skip
    layout = _layout(
        110 + 30 * len(order),
        _axis(low, high, "± error as a share of the column’s range, log scale"),
        {**_rows([view.feature_name(int(j)) for j in order]), "showgrid": True},
    )
    keys = tuple(Key(colour, text, "dot" if symbol != "line-ns-open" else "line") for text, _, colour, symbol in kinds)
    left_out = view.features - len(order)
    note = f"The {len(order)} most exposed of {view.features:,} columns." if left_out > 0 else ""
    return Chart("chart-features", {"data": data, "layout": layout}, keys, note, "Floors by column", 110 + 30 * len(order))


def growth(view: View) -> Chart | None:
    """Floors over the steps of the first run: of the most exposed record, the 1 % quantile and the median."""
    steps = view.leakage.history_step.double().numpy()
    history = view.leakage.history.double().numpy()
    if len(steps) < 2:
        return None
    with np.errstate(divide="ignore"):
        floor = view.unit / np.sqrt(np.where(history > 0, history, 0.0))
    logs = np.where(np.isfinite(floor), _logs(floor), np.nan)
    low, high = _range(logs[np.isfinite(logs)], [math.log10(view.guess)] if view.guess > 0 else [])
    kinds = (("most exposed", VERMILLION, "solid"), ("1 in 100 is more exposed", ORANGE, "dash"), ("median", BLUE, "dot"))
    data: list[Figure] = []
    for k, (text, colour, dash) in enumerate(kinds):
        hover = [f"{text}, step {s:,.0f}: ±{amount(f) if math.isfinite(f) else '∞'}" for s, f in zip(steps, floor[:, k])]  # noqa: B905
        data.append({
            "type": "scatter", "mode": "lines", "x": _numbers(steps), "y": _numbers(np.clip(logs[:, k], low, high)),
            "line": {"color": colour, "width": 2.5, "dash": dash}, "hovertext": hover, "hoverinfo": "text",
        })  # fmt: skip
    keys = [Key(colour, text, "line", dash) for text, colour, dash in kinds]
    if view.guess > 0 and low <= math.log10(view.guess) <= high:
        ends = [float(steps[0]), float(steps[-1])]
        data.append({"type": "scatter", "mode": "lines", "x": ends, "y": [math.log10(view.guess)] * 2,
                     "line": {"color": GREY, "width": 2, "dash": "dot"}, "hoverinfo": "skip"})  # fmt: skip
        keys.append(Key(GREY, f"guessing the average: {plus_minus(view.guess)}", "line", "dot"))
    layout = _layout(320, _steps_axis(), _axis(low, high, f"floor, ± {view.of_range}"))
    return Chart("chart-growth", {"data": data, "layout": layout}, tuple(keys), "", "Floors over training", 320)


def accuracy(view: View) -> Chart | None:
    """Test accuracy (R² for a number) over the steps of the run."""
    steps, found = (t.double().numpy() for t in (view.leakage.accuracy_step, view.leakage.accuracy))
    if len(steps) < 2 or not np.isfinite(found).any():
        return None
    classes = view.facts.get("task", "classes") == "classes"
    said = [f"step {s:,.0f}: {a:.1%}" if classes else f"step {s:,.0f}: R² {a:.3f}" for s, a in zip(steps, found)]  # noqa: B905
    trace = {
        "type": "scatter", "mode": "lines+markers", "x": _numbers(steps), "y": _numbers(found), "hovertext": said,
        "line": {"color": BLUE, "width": 2.5}, "marker": {"size": 6}, "hoverinfo": "text",
    }  # fmt: skip
    y: Figure = {"title": {"text": "test accuracy" if classes else "R² on test data"}, "fixedrange": True}
    if classes:
        y |= {"tickformat": ".0%", "range": [0, 1.04]}
    layout = _layout(320, _steps_axis(), y)
    return Chart("chart-accuracy", {"data": [trace], "layout": layout}, (), "", "Accuracy over training", 320)


def _steps_axis() -> Figure:
    return {"title": {"text": "training step", "standoff": 12}, "fixedrange": True, "nticks": 6, "zeroline": False}


# --- several runs ---------------------------------------------------------------------------------


def overlay(views: Sequence[View], names: Sequence[str]) -> Chart:
    """Histograms of several runs, each as shares of its records, over one axis."""
    logs = [_logs(view.floor[view.measured] / view.unit) for view in views]
    low, high = _range(np.concatenate(logs), [math.log10(v.guess / v.unit) for v in views if v.guess > 0])
    edges = np.linspace(low, high, _bins(np.concatenate(logs), low, high) + 1)
    data, keys = [], []
    for k, (view, name, own) in enumerate(zip(views, names, logs, strict=True)):
        colour, dash = SERIES[k % len(SERIES)], DASHES[(k // len(SERIES)) % len(DASHES)]
        share = _counted(own, edges) / max(view.records, 1)
        data.append({
            "type": "scatter", "mode": "lines", "x": _numbers(np.repeat(edges, 2)[1:-1]), "fill": "tozeroy",
            "y": _numbers(np.repeat(share, 2)), "line": {"color": colour, "width": 2.2, "dash": dash},
            "fillcolor": _faint(colour), "hoverinfo": "text", "hovertext": for_plotly(name, 60),
        })  # fmt: skip
        keys.append(Key(colour, name, "line", dash))
    y = {"title": {"text": "share of records"}, "tickformat": ".0%", "fixedrange": True, "rangemode": "tozero"}
    layout = _layout(400, _axis(low, high, "floor: ± error as a share of the range, log scale"), y)
    return Chart("chart-compare", {"data": data, "layout": layout}, tuple(keys), "", "Floors of several runs", 400)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"
