"""Formats numbers for people, and makes text from outside safe to show."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from reconbound._internal.formatting import Side, format_floor, format_limit, format_number, format_percent

#: Beyond so many ranges a floor says "out of reach" and nothing more.
REACH = 1e6
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def amount(x: float | None, width: float = 1.0, *, side: Side = "near") -> str:
    """Formats a number with three digits; above a million ranges it only says so.

    Args:
        x: the number; None or NaN is shown as a dash.
        width: the width of the range.
        side: the side to which it is rounded: "down" for floors, "up" for ε and other upper bounds.

    >>> amount(0.4321), amount(0.0), amount(1e300), amount(None)
    ('0.432', '0', 'over 1,000,000', '–')
    """
    if x is None or math.isnan(x):
        return "–"
    return f"over {format_number(REACH * width, side='down')}" if x > REACH * width else format_number(x, side=side)


def chance(p: float, *, estimate: bool) -> str:
    """Formats the largest chance of success; an estimate without a confidence limit says so itself.

    Args:
        p: the chance.
        estimate: whether it rests on an estimate.

    >>> chance(0.1234, estimate=True), chance(0.1234, estimate=False)
    ('12.4% (estimate)', '12.4%')
    """
    return f"{format_percent(p)}{' (estimate)' if estimate else ''}"


def rough(x: float) -> str:
    """Formats a number with two digits, as for an error of an error.

    >>> rough(123.4), rough(0.01234), rough(5.0)
    ('120', '0.012', '5')
    """
    return amount(float(f"{x:.2g}"))


def plus_minus(x: float | None, unit: str = "", width: float = 1.0, *, side: Side = "down") -> str:
    """Formats a ± error with its unit: a floor, rounded down. For errors of a guess see `guess_error`.

    Args:
        x: the error; None or NaN is shown as a dash.
        unit: the unit, or "".
        width: the width of the range.
        side: the side to which it is rounded.

    >>> plus_minus(12.3456, "years"), plus_minus(1e300)
    ('±12.3 years', 'over ±1,000,000')
    """
    text = amount(x, width, side=side)
    signed = text if text == "–" else text.replace("over ", "over ±") if text.startswith("over") else f"±{text}"
    return f"{signed} {unit}" if unit and x is not None else signed


def guess_error(x: float | None, unit: str = "") -> str:
    """Formats the ± error of a guess with its unit, rounded up, so that no floor looks better beside it than it is.

    Args:
        x: the error; None or NaN is shown as a dash.
        unit: the unit, or "".

    >>> guess_error(12.3781, "years"), plus_minus(12.3781, "years")
    ('±12.4 years', '±12.3 years')
    """
    return plus_minus(x, unit, side="up")


def beyond(x: float | None, width: float) -> bool:
    """Returns whether a floor is more than the whole range: nothing is learnt, because every value in it is nearer.

    Args:
        x: the floor; None where it is not known.
        width: the width of the range.
    """
    return x is not None and x > width


def value(x: float) -> str:
    """Formats a value of the data in its own unit, as its owner would write it.

    >>> value(39.00000038), value(1234567.0), value(0.5), value(-1e-9)
    ('39', '1,234,567', '0.5', '0')
    """
    if not math.isfinite(x):
        return "–"
    short = float(f"{x:.6g}")
    if abs(short) < 1e-8:
        return "0"
    if short == int(short) and abs(short) < 1e15:
        return f"{x:,.0f}"
    return f"{short:,.0f}" if 1e3 <= abs(short) < 1e15 else f"{short:.4g}"


def span(low: float, high: float, unit: str = "") -> str:
    """Formats a range of values.

    Args:
        low: the smallest value.
        high: the largest value.
        unit: the unit, or "".

    >>> span(0.0, 120.0, "years")
    '0 to 120 years'
    """
    return f"{value(low)} to {value(high)}{f' {unit}' if unit else ''}"


def percent(part: int, whole: int) -> str:
    """Formats a share in percent; 0 % and 100 % are shown only where they are exact.

    Args:
        part: the number of records in the share.
        whole: the number of all records.

    >>> percent(0, 50), percent(1, 1797), percent(1796, 1797), percent(25, 50)
    ('0 %', '0.056 %', '99.9 %', '50 %')
    """
    if whole == 0 or part in (0, whole):
        return "100 %" if whole and part == whole else "0 %"
    share = 100 * part / whole
    if share > 99:
        return f"{math.floor(share * 10) / 10:.1f} %"
    return f"{share:.2g} %"


def count(n: int, noun: str) -> str:
    """Formats a count with its noun.

    Args:
        n: the number.
        noun: in the singular.

    >>> count(1, "record"), count(1797, "image")
    ('1 record', '1,797 images')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def pixel_scale(low: float, high: float) -> str:
    """Returns the unit of an image's errors. "Of the range" would be read as a number of ranges.

    Args:
        low: the smallest pixel value.
        high: the largest pixel value.

    >>> f"±17.7 {pixel_scale(0, 16)}"
    '±17.7 on the 0–16 pixel scale'
    """
    return f"on the {low:g}–{high:g} pixel scale"


def clean(text: object, most: int = 200) -> str:
    """Returns text from outside without control and direction characters or lone surrogates, at most `most` long.

    Args:
        text: from outside.
        most: the largest number of characters.
    """
    shown = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text)).encode("utf-8", "replace").decode("utf-8")
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def names_its_unit(name: str, unit: str) -> bool:
    """Returns whether a column's name ends in its unit, so that the unit need not be repeated.

    Args:
        name: the column's name.
        unit: its unit.

    >>> names_its_unit("Gewicht kg", "kg"), names_its_unit("age (years)", "years"), names_its_unit("harm", "m")
    (True, True, False)
    """
    return bool(unit) and re.search(rf"[\W_]{re.escape(unit)}\W*$", name, re.IGNORECASE) is not None


def plain(value: Any) -> str:
    """Formats a value of run.json for people."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(part)}" for name, part in value.items())
    return str(value)


def for_plotly(text: object, most: int = 32) -> str:
    """Returns text for a plotly label, with <b>, <a href> and entities escaped: plotly would take them for markup.

    Args:
        text: from outside.
        most: the largest number of characters.
    """
    return clean(text, most).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# --- templates -------------------------------------------------------------------------------


@cache
def templates(*, html: bool) -> jinja2.Environment:
    """Returns the folder of templates: pages, or plain text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reconbound.report"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_controls,
    )
    environment.filters.update(breaks=breaks)
    ours = (amount, beyond, chance, count, guess_error, names_its_unit, percent, plain, plus_minus)
    shared = (format_floor, format_limit, format_number, format_percent)
    environment.globals.update({f.__name__: f for f in (*ours, *shared)})
    return environment


def _without_controls(shown: Any) -> Any:
    """Returns a value for a page: text is cleaned of control characters, whatever its source."""
    return clean(shown, len(shown)) if isinstance(shown, str) and not isinstance(shown, Markup) else shown


def breaks(name: str) -> Markup:
    """Returns a name that may be broken after each underscore, rather than within a word.

    >>> breaks("hours_per_<week>")
    Markup('hours_<wbr>per_<wbr>&lt;week&gt;')
    """
    return Markup("_<wbr>").join(clean(name, len(name)).split("_"))


def paragraphs(template: str, **context: Any) -> list[str]:
    """Returns the paragraphs of a template of plain text, which are set apart by blank lines.

    Args:
        template: the name of the template.
        **context: its variables.
    """
    shown = templates(html=False).get_template(template).render(**context)
    return [part.strip().replace("\n", " ") for part in shown.split("\n\n") if part.strip()]
