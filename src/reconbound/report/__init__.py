"""Reports: a self-contained page from a run folder; report.html for the owner, report-public.html to be shown."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import numpy as np

from reconbound import __version__
from reconbound._internal.files import CONFIDENTIAL, PUBLIC, write_whole
from reconbound.report import advice, charts, columns, page, public, verdicts, words
from reconbound.report.axes import Chart
from reconbound.report.comparison import compare
from reconbound.report.figures import amount, clean, guess_error, percent
from reconbound.report.folder import PUBLIC_REPORT, REPORT, Leakage, Run, read_audit
from reconbound.report.public import headline
from reconbound.report.records import cards, glance, quantiles, record_facts, record_table
from reconbound.report.view import View

__all__ = ["build", "compare", "confidential_page", "headline", "public_page", "record_facts", "record_table"]


def build(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes report.html (confidential, mode 0600) and report-public.html (mode 0644) of a finished audit.

    Args:
        folder: the audit's, with run.json and leakage.safetensors.

    Returns:
        The paths of the two pages.

    Guarantee: the public page is built from run.json only. The same folder gives the same bytes.
    """
    run, leakage = read_audit(folder)
    own, shown = Path(folder) / REPORT, Path(folder) / PUBLIC_REPORT
    write_whole(own, confidential_page(run, leakage), mode=CONFIDENTIAL)
    write_whole(shown, public_page(run), mode=PUBLIC)
    return own, shown


def confidential_page(run: Run, leakage: Leakage) -> bytes:
    """Builds the page for the data's owner: HTML with everything that it needs inside.

    Args:
        run: the public facts.
        leakage: the leakage of each record.
    """
    view = View(run, leakage)
    drawn = [charts.histogram(view), charts.by_feature(view), charts.by_class(view), charts.accuracy(view),
             charts.growth(view)]  # fmt: skip
    shown = {chart.id: chart for chart in drawn if chart is not None}
    context = {
        "title": f"{clean(run.data.get('name', 'data'), 80)}: how well is each {view.noun} protected?",
        "view": view,
        "part": view.part,
        "noun": view.noun,
        "verdict": verdicts.verdict(view),
        "sureness": verdicts.sureness(view),
        "glance": glance(view),
        "chart": shown,
        "slider": slider(view, shown["chart-floors"]),
        "quantiles": quantiles(view),
        "rules": words.RULES,
        "cards": cards(view),
        "features": public.feature_rows(view),
        "columns_note": columns.note(view),
        "columns_of": columns.which(view) if len(view.looked_at[0]) < view.records else "",
        "assumptions": words.assumptions(view),
        "floors": public.floor_rows(run, view.unit),
        "guess_middle": guess_error(view.unit / 2),
        "of_range": view.of_range,
        "two_demands": words.two_demands(view.noun),
        "growth_note": words.growth_note(view),
        "advice": advice.for_records(view),
        "targets": advice.targets(run, view.noun, view.part, view.unit),
        "without_noise": advice.without_noise(run, view.noun, view.part, view.unit),
        "settings": words.settings(run),
        "accuracy": accuracy_line(view),
        "version": __version__,
    }
    sorted_floors = base64.b64encode(np.sort(view.shown).astype("<f8").tobytes()).decode()
    data = {"floors": sorted_floors, "slider": context["slider"]}
    return page.render("report.html", context, {key: chart.figure for key, chart in shown.items()}, data)


def slider(view: View, histogram: Chart) -> dict[str, Any]:
    """Returns the slider's range (log10) and the text before it is moved: the records below the guess.

    Args:
        view: the audit.
        histogram: the chart whose axis the slider follows.
    """
    low, high = histogram.figure["layout"]["xaxis"]["range"]
    start = view.guess if view.guess > 0 and low <= np.log10(view.guess) <= high else float(10 ** ((low + high) / 2))
    return {
        "low": low,
        "high": high,
        "start": start,
        "place": round(1000 * (float(np.log10(start)) - low) / (high - low)),
        "below": view.below(start),
        "records": view.records,
        "shown": amount(start),
        "share": percent(view.below(start), view.records),
        "guess": view.guess,
    }


def accuracy_line(view: View) -> str:
    """Returns a sentence on the accuracy at the end of the run."""
    found = view.leakage.accuracy
    if found.numel() == 0 or not bool(found[-1].isfinite()):
        return "No accuracy was measured."
    last, plain = float(found[-1]), view.facts.get("accuracy_baseline")
    classes = view.facts.get("task", "classes") == "classes"
    said = (
        f"Test accuracy at the end of the run: {last:.1%}"
        if classes
        else f"R² on test data is {last:.3f} at the end of the run"
    )
    if plain is None:
        return f"{said}."
    other = (
        f"always naming the most frequent class: {plain:.1%}"
        if classes
        else f"always naming the mean of the training data: {plain:.3f}"
    )
    poor = " The model is no better than that." if last <= plain else ""
    return f"{said}; {other}.{poor}"


def public_page(run: Run) -> bytes:
    """Builds the page that may be shown, from the run's public facts and from nothing else.

    Args:
        run: the public facts.

    Guarantee: no per-record leakage is read, so none can be in it; accuracy only where its owner chose to publish it.
    """
    return page.render("public.html", {**public.context(run), "version": __version__}, None)
