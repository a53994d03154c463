"""Compares several audits, and says what makes their floors hard to compare: other data, columns, ranges or units."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError
from reconbound._internal.files import CONFIDENTIAL, write_whole
from reconbound._internal.formatting import format_percent
from reconbound.report import charts
from reconbound.report.folder import PLAN, read_audit
from reconbound.report.formats import amount, clean, for_plotly, guess_error, plus_minus, span
from reconbound.report.headline import comparison_headline, warnings
from reconbound.report.pages import render
from reconbound.report.view import View

#: Columns named in one cell of the table, before the rest is folded away.
NAMED = 12
#: What makes a page a comparison (templates/compare.html).
KICKER = '<p class="kicker">reconbound · comparison</p>'.encode()
#: Differences that are about what floors are shares of.
SCALES = ("kind of data", "private columns", "range of", "unit of", "pixels")


def compare(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Writes one page (confidential, mode 0600) that compares several audits.

    Args:
        folders: of finished audits, two or more.
        out: the file to write.

    Returns:
        The path of the page.
    """
    views, names = read_audits(folders)
    found = _facts(views, names, folders)
    chart = overlay(views, names)
    context = {
        "title": f"{len(views)} audits side by side",
        "rows": [audit_row(audit) for audit in found["audits"]],
        "differences": found["differences"],
        "headline": found["headline"],
        "caveats": found["caveats"],
        "columns": found["columns"],
        "unknown": any(view.unknown for view in views),
        "chart": {chart.id: chart},
    }
    target = Path(out)
    write_whole(target, render("compare.html", context, {chart.id: chart.figure}), mode=CONFIDENTIAL)
    return target


def is_comparison(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is a page that `compare` wrote, which may be overwritten."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return False
    return b'<meta name="generator" content="reconbound ' in content and KICKER in content


def comparison_facts(folders: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Returns the comparison for machines and the terminal; confidential.

    Args:
        folders: of finished audits, two or more.
    """
    return _facts(*read_audits(folders), folders)


def _facts(views: Sequence[View], names: Sequence[str], folders: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    found = differences(views, names, folders)
    audits = [audit_facts(view, name, folder) for view, name, folder in zip(views, names, folders, strict=True)]
    caution = warning(found)
    return {"confidential": True, "headline": comparison_headline(audits, caution), "audits": audits,
            "columns": common_columns(views, names), "differences": found, "warning": caution,
            "caveats": caveats(views, names)}  # fmt: skip


def audit_facts(view: View, name: str, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the facts of one audit that are compared. Floors are shares of the range.

    Args:
        view: the audit.
        name: its name.
        folder: its folder.
    """
    limits, estimates = view.shown[view.limited] / view.unit, view.floor[view.measured] / view.unit
    accuracy = "–" if view.accuracy is None else view.format_accuracy(view.accuracy)
    return {
        "name": name, "folder": os.fspath(folder), "data": clean(view.run.data.get("name", "–"), 60),
        "records": view.records, "private": private(view), "mechanism": dict(view.run.mechanism),
        "epsilon": view.run.guarantee.get("epsilon"), "accuracy": view.accuracy,
        "accuracy_said": accuracy if view.classes or view.accuracy is None else f"R² {accuracy}",
        "accuracy_baseline": view.facts.get("accuracy_baseline"),
        "floors": {"lowest_lower_limit": float(limits.min()) if limits.size else None,
                   "lowest_estimate": float(estimates.min()) if estimates.size else None,
                   "median_estimate": float(np.median(estimates)) if estimates.size else 0.0},
        "meaningful": view.protection.meaningful, "success_at_1_percent": view.protection.success,
        "guess": view.guess / view.unit, "unit": "± share of the range", "below_guess": view.below(view.guess),
        "never_measured": view.unknown, "without_limit": view.unlimited, "caveats": dict(view.run.caveats or {}),
    }  # fmt: skip


def audit_row(audit: dict[str, Any]) -> dict[str, Any]:
    """Formats the facts of one audit for the page and the terminal.

    Args:
        audit: as `audit_facts` returns it.
    """
    m, floors = audit["mechanism"], audit["floors"]
    success, columns = audit["success_at_1_percent"], [(c["name"], format_range(c)) for c in audit["private"]]
    return {
        "name": audit["name"],
        "data": audit["data"],
        "records": f"{audit['records']:,}",
        "shown": columns[:NAMED],
        "more": columns[NAMED:],
        "noise": f"{float(m.get('noise_multiplier', 0)):g}",
        "clip": f"{float(m.get('max_grad_norm', 0)):g}",
        "rate": f"{float(m.get('sample_rate', 0)):.3g}",
        "steps": f"{int(m.get('steps', 0)):,}",
        "runs": f"{int(m.get('runs', 1)):,}",
        "epsilon": amount(audit["epsilon"], side="up"),
        "accuracy": audit["accuracy_said"],
        "worst": plus_minus(floors["lowest_estimate"]),
        "limit": format_lowest_limit(floors["lowest_lower_limit"], audit["without_limit"]),
        "median": plus_minus(floors["median_estimate"]),
        "success": "–" if success is None else format_percent(success),
        "guess": guess_error(audit["guess"]),
        "below": f"{audit['below_guess']:,} of {audit['records']:,}",
        "unknown": f"{audit['never_measured']:,}",
    }


def read_audits(folders: Sequence[str | os.PathLike[str]]) -> tuple[list[View], list[str]]:
    """Reads the audits, and finds a short unique name for each.

    The name is the last part of its folder, or all of it where last parts are equal, with its position where even that
    is too long to distinguish them.
    """
    if len(folders) < 2:
        raise InputError("folders", "must be two or more to compare", [str(folder) for folder in folders])
    views = [View(*read_audit(folder)) for folder in folders]
    short = [clean(Path(folder).resolve().name, 60) for folder in folders]
    names = [s if short.count(s) == 1 else clean(os.fspath(f), 120) for s, f in zip(short, folders, strict=True)]
    return views, [n if names.count(n) == 1 else f"{k + 1}: {n}" for k, n in enumerate(names)]


def caveats(views: Sequence[View], names: Sequence[str]) -> list[str]:
    """Lists what weakens the guarantee of these audits, each once, with the audits that it applies to.

    These are mechanisms that guarantee little, and what the floors of the models do not cover.

    Args:
        views: the audits.
        names: a name for each.
    """
    about: dict[str, list[str]] = {}
    for view, name in zip(views, names, strict=True):
        for text in warnings(view):
            about.setdefault(text, []).append(name)
    return [f"{', '.join(whose)}: {text}" for text, whose in about.items()]


def private(view: View) -> list[dict[str, Any]]:
    """Returns the private columns with range and unit; for images one entry for all pixels."""
    if view.image:
        low, high = float(view.offset[0]), float(view.offset[0] + view.scale[0])
        unit = clean(view.run.data.get("unit", "") or "", 40)
        return [{"name": "every pixel", "low": low, "high": high, "unit": unit, "declared": True}]
    declared = view.run.data.get("ranges") or {}
    spelled = view.facts.get("feature_names") or ()
    return [
        {
            "name": view.feature_name(j),
            "low": float(view.offset[j]),
            "high": float(view.offset[j] + view.scale[j]),
            "unit": view.feature_unit(j),
            "declared": j < len(spelled) and spelled[j] in declared,
        }
        for j in range(view.features)
    ]


def format_range(column: dict[str, Any]) -> str:
    """Formats the range of a column.

    >>> format_range({"low": 0.0, "high": 120.0, "unit": "years", "declared": False})
    '0 to 120 years, read off the data'
    """
    read = "" if column["declared"] else ", read off the data"
    return span(column["low"], column["high"], column["unit"]) + read


def format_lowest_limit(limit: float | None, without: int) -> str:
    """Formats the lowest limit, and the number of measured records without one.

    Args:
        limit: the lowest limit; None where no record has one.
        without: the number of measured records without a limit.

    >>> format_lowest_limit(0.25, 0), format_lowest_limit(0.25, 3), format_lowest_limit(None, 3)
    ('±0.25', '±0.25, 3 without', '–')
    """
    return "–" if limit is None else f"{plus_minus(limit)}{f', {without:,} without' if without else ''}"


def common_columns(views: Sequence[View], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the columns that two or more audits have by the same name and in the same unit.

    For each audit it gives, in that unit, the lowest floor and its record, the guess, and the number of records below
    it: [{"name", "unit", "audits": {audit: counts}}].

    Args:
        views: the audits.
        names: a name for each.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for view, audit in zip(views, names, strict=True):
        for c in view.columns:
            found.setdefault((c["name"], c["unit"]), {})[audit] = {k: c[k] for k in c if k not in ("name", "unit")}
    return [{"name": n, "unit": u, "audits": audits} for (n, u), audits in found.items() if len(audits) > 1]


# --- what differs -----------------------------------------------------------------------------------


def differences(
    views: Sequence[View], names: Sequence[str], folders: Sequence[str | os.PathLike[str]]
) -> list[dict[str, Any]]:
    """Lists differences of the audits except settings: [{"what": "range of age", "values": {audit: "0 to 120"}}].

    Args:
        views: the audits.
        names: a name for each.
        folders: their folders.
    """
    facts = [_about(view) for view in views]
    found = []
    for what in ("data set", "kind of data", "private columns", "pixels", "target", "training records"):
        found += _differing(what, names, [about["plain"].get(what) for about in facts])
    for column in dict.fromkeys(c for about in facts for c in about["columns"]):
        for k, what in enumerate((f"range of {column}", f"unit of {column}")):
            found += _differing(what, names, [about["columns"].get(column, (None, None))[k] for about in facts])
    if not found:
        digests = [_digest(folder) for folder in folders]
        found += _differing("values of the data", names, ["unknown" if d is None else d[:8] for d in digests])
    return found


def _about(view: View) -> dict[str, Any]:
    own = private(view)
    shape = view.run.data.get("shape")
    plain = {
        "data set": clean(view.run.data.get("name", "–"), 60),
        "kind of data": "images" if view.image else "a table",
        "target": view.target_name,
        "training records": f"{view.records:,}",
    }
    if view.image:
        size = " × ".join(str(k) for k in shape) if shape else f"{view.features:,} numbers"
        return {"plain": plain | {"pixels": f"{size}, {format_range(own[0])}"}, "columns": {}}
    plain["private columns"] = ", ".join(column["name"] for column in own)
    return {"plain": plain, "columns": {c["name"]: (format_range({**c, "unit": ""}), c["unit"] or "none") for c in own}}


def _differing(what: str, names: Sequence[str], values: Sequence[str | None]) -> list[dict[str, Any]]:
    """Returns the values as one difference, or nothing where they agree. None: the audit has no such thing."""
    if len(set(values) - {None}) < 2:
        return []
    return [{"what": what, "values": {n: "–" if v is None else v for n, v in zip(names, values, strict=True)}}]


def _digest(folder: str | os.PathLike[str]) -> str | None:
    """Returns the digest of the data from the plan file; None where it cannot be read."""
    try:
        return str(json.loads((Path(folder) / PLAN).read_text())["data"]["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def warning(found: Sequence[dict[str, Any]]) -> str:
    """Returns one or two sentences about the differences; empty where there are none."""
    if not found:
        return ""
    names = [difference["what"] for difference in found]
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    if any(name.startswith(SCALES) for name in names):
        return (
            f"Not comparable as they stand: these audits differ in {listed}. Floors are shares of a range, so compare "
            "single columns in their own units."
        )
    return f"Compare with care: these audits differ in {listed}."


def overlay(views: Sequence[View], names: Sequence[str]) -> charts.Chart:
    """Draws the histograms of several runs, each as shares of its records, over one axis.

    Args:
        views: the audits.
        names: a name for each.
    """
    logs = [charts.logs_of(view.floor[view.measured] / view.unit) for view in views]
    low, high = charts.shown_range(np.concatenate(logs), [v.guess / v.unit for v in views])
    edges = charts.bins_of(np.concatenate(logs), low, high)
    data, keys = [], []
    for k, (view, name, own) in enumerate(zip(views, names, logs, strict=True)):
        colour = charts.SERIES[k % len(charts.SERIES)]
        dash = charts.DASHES[(k // len(charts.SERIES)) % len(charts.DASHES)]
        share = np.repeat(charts.counts_in(own, edges) / max(view.records, 1), 2)
        line = {"color": colour, "width": 2.2, "dash": dash}
        outline, fill = np.repeat(edges, 2)[1:-1], {"fill": "tozeroy", "fillcolor": f"{colour}1f"}
        data.append(charts.scatter(outline, share, for_plotly(name, 60), line=line, **fill))
        keys.append(charts.Key(colour, name, "line", dash))
    y = {"title": "share of records", "tickformat": ".0%", "fixedrange": True, "rangemode": "tozero"}
    drawn = charts.layout(400, charts.log_axis(low, high, "± error, share of the range (log scale)"), y)
    return charts.Chart("chart-compare", {"data": data, "layout": drawn}, tuple(keys), "", "Floors of several runs")
