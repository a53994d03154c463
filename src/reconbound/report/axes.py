"""Parts of the charts: colours, logarithmic axes with their own ticks, layout, legends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound.report.formats import for_plotly

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7d8590",
)  # fmt: skip
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
#: Decades around the median that a chart of floors shows; what lies beyond is drawn at its edge.
DECADES = 4.0

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


def log_ticks(low: float, high: float, most: int = 6) -> tuple[list[float], list[str]]:
    """Returns the ticks of a logarithmic axis from 10^low to 10^high: positions (log10) and texts, from 2 to `most`.

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
            return _ticks(values)
    if high - low > 2:
        apart = math.ceil((high - low) / (most - 1))
        return _ticks([10.0**e for e in range(math.ceil(low), math.floor(high) + 1, apart)])
    ends, room = (10.0**low, 10.0**high), (10.0**high - 10.0**low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(room))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= room)
    first = math.ceil(ends[0] / step)
    return _ticks([k * step for k in range(max(first, 1), math.floor(ends[1] / step) + 1)])


def _ticks(values: Sequence[float]) -> tuple[list[float], list[str]]:
    digits = next((n for n in range(3, 15) if len({f"{v:.{n}g}" for v in values}) == len(values)), 15)
    return [math.log10(v) for v in values], [_tick(v, digits) for v in values]


def _tick(v: float, digits: int) -> str:
    short = float(f"{v:.{digits}g}")
    return (
        f"{short:,.10g}" if 1e-4 <= short < 1e6 else f"10^{round(math.log10(short))}" if _power(short) else f"{v:.0e}"
    )


def _power(v: float) -> bool:
    return abs(math.log10(v) - round(math.log10(v))) < 1e-9


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
        marks: log10 of values that should be visible.
        reach: the distance, in decades, up to which a mark extends the range.
    """
    known = logs[np.isfinite(logs)]
    if known.size == 0:
        known = np.array([0.0])
    middle = float(np.median(known))
    low = max(float(known.min()), middle - DECADES)
    high = min(float(known.max()), middle + DECADES)
    for mark in marks:
        if low - reach <= mark <= high + reach:
            low, high = min(low, mark), max(high, mark)
    room = max(0.05 * (high - low), 0.02)
    return low - room, high + room


def titled(text: str) -> Figure:
    """Returns an axis title, small enough for a phone."""
    return {"text": text, "standoff": 12, "font": {"size": 13}}


def log_axis(low: float, high: float, title: str, *, most: int = 6) -> Figure:
    places, texts = log_ticks(low, high, most)
    return {
        "range": [low, high], "tickvals": places, "ticktext": texts, "title": titled(title),
        "zeroline": False, "fixedrange": True, "tickangle": 0,
    }  # fmt: skip


def layout(height: int, x: Figure, y: Figure, **more: Any) -> Figure:
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


def steps_axis() -> Figure:
    return {"title": titled("training step"), "fixedrange": True, "nticks": 6, "zeroline": False}


def faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"
