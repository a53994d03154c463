"""Compares several audits, and says what makes their floors hard to compare: other data, columns, ranges or units."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reconbound import __version__
from reconbound._internal.checks import InputError
from reconbound._internal.files import CONFIDENTIAL, write_whole
from reconbound._internal.formatting import format_percent
from reconbound.report import charts, page, words
from reconbound.report.columns import counts
from reconbound.report.figures import amount, beyond, clean, guess_error, names_its_unit, plus_minus, value
from reconbound.report.folder import PLAN, read_audit
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
    views, names = opened(folders)
    told = differences(views, names, folders)
    chart = charts.overlay(views, names)
    rows = [compared(view, name) for view, name in zip(views, names, strict=True)]
    context = {
        "title": f"{len(views)} audits side by side",
        "rows": [row | {"shown": row["columns"][:NAMED], "more": row["columns"][NAMED:]} for row in rows],
        "differences": told,
        "warning": warning(told),
        "caveats": caveats(views, names),
        "columns": column_rows(common(views, names)),
        "unknown": any(view.unknown for view in views),
        "chart": {chart.id: chart},
        "version": __version__,
    }
    target = Path(out)
    write_whole(target, page.render("compare.html", context, {chart.id: chart.figure}), mode=CONFIDENTIAL)
    return target


def is_comparison(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is a page that `compare` wrote, which may be overwritten."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return False
    return b'<meta name="generator" content="reconbound ' in content and KICKER in content


def facts(folders: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Returns the comparison for machines and the terminal; confidential.

    Args:
        folders: of finished audits, two or more.
    """
    views, names = opened(folders)
    told = differences(views, names, folders)
    audits = []
    for view, name, folder in zip(views, names, folders, strict=True):
        worst = None if view.worst is None else float(view.floor[view.worst]) / view.unit
        audits.append({
            "name": name, "folder": os.fspath(folder), "data": clean(view.run.data.get("name", ""), 60),
            "records": view.records, "private": private(view), "mechanism": dict(view.run.mechanism),
            "epsilon": view.run.guarantee.get("epsilon"), "accuracy": _accuracy(view),
            "accuracy_said": _said(view), "accuracy_baseline": view.facts.get("accuracy_baseline"),
            "floors": {"lowest_lower_limit": _limit(view), "lowest_estimate": worst,
                       "median_estimate": _median(view)},
            "meaningful": view.protection.meaningful, "success_at_1_percent": view.protection.success,
            "guess": view.guess / view.unit, "unit": "± share of the range", "below_guess": view.below(view.guess),
            "never_measured": view.unknown, "without_limit": view.unlimited,
            "caveats": dict(view.run.caveats or {}),
        })  # fmt: skip
    return {"confidential": True, "audits": audits, "columns": common(views, names), "differences": told,
            "warning": warning(told), "caveats": caveats(views, names)}  # fmt: skip


def opened(folders: Sequence[str | os.PathLike[str]]) -> tuple[list[View], list[str]]:
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
        for said in filter(None, (view.protection.warning(view.noun), *words.caveats(view.run))):
            about.setdefault(said, []).append(name)
    return [f"{', '.join(whose)}: {said}" for said, whose in about.items()]


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


def ranged(column: dict[str, Any]) -> str:
    """Formats the range of a column.

    >>> ranged({"low": 0.0, "high": 120.0, "unit": "years", "declared": False})
    '0 to 120 years, read off the data'
    """
    unit = f" {column['unit']}" if column["unit"] else ""
    return (
        f"{value(column['low'])} to {value(column['high'])}{unit}{'' if column['declared'] else ', read off the data'}"
    )


def compared(view: View, name: str) -> dict[str, Any]:
    """Returns one audit's row, ready for the template.

    Args:
        view: the audit.
        name: its name.
    """
    m, limit = view.run.mechanism, _limit(view)
    worst = None if view.worst is None else float(view.floor[view.worst]) / view.unit
    epsilon = view.run.guarantee.get("epsilon")
    return {
        "name": name,
        "data": clean(view.run.data.get("name", "–"), 60),
        "records": f"{view.records:,}",
        "columns": [(column["name"], ranged(column)) for column in private(view)],
        "noise": f"{float(m.get('noise_multiplier', 0)):g}",
        "clip": f"{float(m.get('max_grad_norm', 0)):g}",
        "rate": f"{float(m.get('sample_rate', 0)):.3g}",
        "steps": f"{int(m.get('steps', 0)):,}",
        "runs": f"{int(m.get('runs', 1)):,}",
        "epsilon": "–" if epsilon is None else amount(float(epsilon), side="up"),
        "accuracy": _said(view),
        "worst": plus_minus(worst),
        "limit": limited(limit, view.unlimited),
        "median": plus_minus(_median(view)),
        "success": "–" if view.protection.success is None else format_percent(view.protection.success),
        "guess": guess_error(view.guess / view.unit),
        "below": f"{view.below(view.guess):,} of {view.records:,}",
        "unknown": f"{view.unknown:,}",
    }


def _median(view: View) -> float:
    """Returns the median of the estimates, as a share of the range."""
    return float(np.median(view.floor[view.measured])) / view.unit if view.measured.any() else 0.0


def _accuracy(view: View) -> float | None:
    last = float(view.leakage.accuracy[-1]) if view.leakage.accuracy.numel() else float("nan")
    return None if last != last else last


def _said(view: View) -> str:
    last = _accuracy(view)
    classes = view.facts.get("task", "classes") == "classes"
    return "–" if last is None else f"{last:.1%}" if classes else f"R² {last:.3f}"


def limited(limit: float | None, without: int) -> str:
    """Formats the lowest limit, and the number of measured records without one.

    Args:
        limit: the lowest limit; None where no record has one.
        without: the number of measured records without a limit.

    >>> limited(0.25, 0), limited(0.25, 3), limited(None, 3)
    ('±0.25', '±0.25, 3 without', '–')
    """
    return "–" if limit is None else f"{plus_minus(limit)}{f', {without:,} without' if without else ''}"


def _limit(view: View) -> float | None:
    """Returns the lowest floor at the upper confidence limit, as a share of the range; None without a limit."""
    upper = view.upper_floor
    return None if upper is None or not (upper > 0).any() else float(upper[upper > 0].min()) / view.unit


def common(views: Sequence[View], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the columns that two or more audits have by the same name and in the same unit.

    For each audit it gives, in that unit, the lowest floor and its record, the guess, and the number of records below
    it: [{"name", "unit", "audits": {audit: counts}}].

    Args:
        views: the audits.
        names: a name for each.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for view, audit in zip(views, names, strict=True):
        for c in counts(view):
            found.setdefault((c["name"], c["unit"]), {})[audit] = {k: c[k] for k in c if k not in ("name", "unit")}
    return [{"name": n, "unit": u, "audits": audits} for (n, u), audits in found.items() if len(audits) > 1]


def column_rows(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the columns of `common`, ready for the template."""
    return [
        {
            "name": column["name"],
            "unit": "" if names_its_unit(column["name"], column["unit"]) else column["unit"],
            "audits": [
                {
                    "audit": audit,
                    "lowest": plus_minus(c["lowest"], width=c["width"]),
                    "beyond": beyond(c["lowest"], c["width"]),
                    "record": c["record_name"] or "–",
                    "guess": guess_error(c["guess"]),
                    "below": f"{c['below']:,} of {c['of']:,}",
                }
                for audit, c in column["audits"].items()
            ],
        }
        for column in columns
    ]


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
    told = [_about(view) for view in views]
    found = []
    for what in ("data set", "kind of data", "private columns", "pixels", "predicts", "training records"):
        found += _differing(what, names, [about["plain"].get(what) for about in told])
    for column in dict.fromkeys(c for about in told for c in about["columns"]):
        for k, what in enumerate((f"range of {column}", f"unit of {column}")):
            found += _differing(what, names, [about["columns"].get(column, (None, None))[k] for about in told])
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
        "predicts": view.target_name,
        "training records": f"{view.records:,}",
    }
    if view.image:
        size = " × ".join(str(k) for k in shape) if shape else f"{view.features:,} numbers"
        return {"plain": plain | {"pixels": f"{size}, {ranged(own[0])}"}, "columns": {}}
    plain["private columns"] = ", ".join(column["name"] for column in own)
    return {"plain": plain, "columns": {c["name"]: (ranged({**c, "unit": ""}), c["unit"] or "none") for c in own}}


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


def warning(told: Sequence[dict[str, Any]]) -> str:
    """Returns one or two plain sentences about the differences; empty where there are none."""
    if not told:
        return ""
    whats = [d["what"] for d in told]
    named = ", ".join(whats[:6]) + (f" and {len(whats) - 6} more" if len(whats) > 6 else "")
    if any(what.startswith(SCALES) for what in whats):
        return (
            f"Not comparable as they stand: these audits differ in {named}. Floors here are shares of a range, over "
            "all private columns together: with another range, unit or set of columns the same figure means another "
            "error. Compare single columns in their own units: those in common are listed."
        )
    return f"Compare with care: these audits differ in {named}."
