"""The two pages of an audit: report.html for the data's owner, report-public.html to be shown.

A page is one self-contained file. It makes no request and runs no script but ours: its Content-Security-Policy names
every script by its digest, so that text which was taken for markup by mistake could still run and fetch nothing. The
same folder gives the same bytes: no clock, no random id.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from reconbound import __version__
from reconbound._internal.files import CONFIDENTIAL, PUBLIC, write_whole
from reconbound._internal.formatting import format_limit, format_percent
from reconbound.mechanisms.base import read_protection, with_article
from reconbound.report import charts, headline, text
from reconbound.report.folder import (
    ATTACK,
    CHOSEN_SEED,
    PUBLIC_REPORT,
    REPORT,
    TORCH_NOISE,
    Leakage,
    Run,
    line,
    read_audit,
    terms,
)
from reconbound.report.formats import amount, beyond, chance, clean, guess_error, percent, plus_minus, span, templates
from reconbound.report.records import cards, tiles
from reconbound.report.success import SHOWN
from reconbound.report.view import NEGLIGIBLE, View

if TYPE_CHECKING:
    from reconbound.report.attack import Attacked


def build(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes report.html (confidential, mode 0600) and report-public.html (mode 0644) of a finished audit.

    Args:
        folder: the audit's, with run.json and leakage.safetensors.

    Returns:
        The paths of the two pages.

    Guarantee:
        - The public page is built from run.json only.
        - The same folder gives the same bytes.
    """
    run, leakage = read_audit(folder)
    own, shown = Path(folder) / REPORT, Path(folder) / PUBLIC_REPORT
    attacked = None
    if (Path(folder) / ATTACK).exists():
        from reconbound.report.attack import read_attack  # late: attacks load linear models

        attacked = read_attack(folder, leakage)
    write_whole(own, confidential_page(run, leakage, attacked), mode=CONFIDENTIAL)
    write_whole(shown, public_page(run), mode=PUBLIC)
    return own, shown


# --- the page for the data's owner -----------------------------------------------------------


def confidential_page(run: Run, leakage: Leakage, attacked: Attacked | None = None) -> bytes:
    """Builds the page for the data's owner.

    Args:
        run: the public facts.
        leakage: the leakage of each record.
        attacked: what attacks found; None: without their section.
    """
    view = View(run, leakage)
    unbiased = (charts.histogram, charts.by_feature, charts.by_class, charts.growth) if view.unbiased else ()
    drawn, attack = [make(view) for make in (charts.success, charts.accuracy, *unbiased)], None
    if attacked is not None:
        from reconbound.report.attack import attack_section, sandwich_chart

        attack = attack_section(view, attacked)
        drawn.append(sandwich_chart(view, attacked))
    shown = {chart.id: chart for chart in drawn if chart is not None}
    slider = _slider(view, shown["chart-floors"]) if view.unbiased else None
    context = {
        "title": f"{clean(run.data.get('name', 'data'), 80)}: how well is each {view.noun} protected?",
        "view": view,
        "headline": headline,
        "words": text,
        "tiles": tiles(view),
        "chart": shown,
        "slider": slider,
        "cards": cards(view) if view.unbiased else None,
        "features": feature_rows(view),
        "success": success_table(view),
        "attack": attack,
        **_mechanism_context(run, view.noun, view.part, view.unit, view.of_range),
    }
    floors = base64.b64encode(np.sort(view.shown).astype("<f8").tobytes()).decode()
    figures = {name: chart.figure for name, chart in shown.items()}
    return render("report.html", context, figures, {"floors": floors, "slider": slider} if view.unbiased else None)


def success_table(view: View) -> dict[str, Any] | None:
    """Returns a row for each world, and the most exposed records in the leading one; None where none was measured."""
    lead = view.success.leading
    if lead is None:
        return None
    rows = []
    for world in view.success.worlds:
        row = world.row()
        texts = {name: chance(row[name], estimate=name in row["estimates"]) for name in ("median", "p99", "max")}
        instead = f"in its place: {world.reference or 'a public value'}"
        instead = f"without the {view.noun}" if world.kind == "removed" else instead
        rows.append({"name": world.title(view.noun), "instead": instead, **texts})
    most = [
        (view.record_name(i), chance(float(lead.chances[i]), estimate=bool(lead.estimated[i])))
        for i in lead.most_exposed()
    ]
    return {"rows": rows, "most": most, "lead": lead, "baseline": format_percent(SHOWN, side="near")}


def _slider(view: View, histogram: charts.Chart) -> dict[str, Any]:
    """Returns the slider's range (log10) and the text before it is moved: the records below the guess."""
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


def feature_rows(view: View) -> list[dict[str, Any]]:
    """Returns the columns of a table in their own units, the most exposed first.

    Each row has the floor of the average record, that of the record most exposed in this column, and the guess.
    """
    average = view.feature_floors(None)
    if view.image or average is None:
        return []
    lowest, found = view.lowest_by_column, view.columns
    rows = []
    for j in view.most_exposed_columns(average if lowest is None else lowest):
        unit, width = view.feature_unit(j), float(view.scale[j])
        worst = found[j]["lowest"] if found else None
        rows.append({
            "name": view.feature_name(j),
            "range": span(float(view.offset[j]), float(view.offset[j] + view.scale[j]), unit),
            "average": plus_minus(float(average[j]), width=width),
            "worst": plus_minus(worst, width=width),
            "whose": (found[j]["record_name"] or "") if found else "",
            "beyond": [beyond(float(average[j]), width), beyond(worst, width)],
            "guess": guess_error(float(view.guess_each[j])),
            "below": text.column_sentence(found[j]) if found else "",
        })  # fmt: skip
    return rows


# --- the page to be shown --------------------------------------------------------------------


def public_page(run: Run) -> bytes:
    """Builds the page that may be shown, from the run's public facts only.

    Args:
        run: the public facts.

    Guarantee:
        - No per-record leakage is read, so none can be in it.
        - Accuracy is shown only where its owner chose to publish it.
    """
    return render("public.html", public_context(run), None)


def public_context(run: Run) -> dict[str, Any]:
    """Returns everything that the public page shows."""
    data, found = run.data, run.guarantee
    noun, part, unit, of_range = terms(run)
    at = f"at δ = {format_limit(float(found.get('delta', 1e-5)), 6)}"
    epsilons = (("replace-one", found.get("epsilon")), ("add/remove", found.get("epsilon_add_remove")))
    caveats = [text.INFERRED] if data.get("inferred_ranges") else []
    if run.training.get("seed_from") in (CHOSEN_SEED, TORCH_NOISE):
        caveats.append(f"The noise is {text.SEEDS[str(run.training['seed_from'])]}")
    advantage = found.get("membership_advantage")
    any_attacker = headline.any_attacker_sentences(run) if read_protection(found).meaningful else []
    return {
        "title": f"{clean(data.get('name', 'data'), 80)}: what the training guarantees",
        "a_noun": with_article(noun),
        "headline": headline.public_headline(run),
        "any_attacker": headline.conditional(run, any_attacker),
        "caveats": caveats,
        "data": data,
        "columns": column_rows(run),
        "any_unbiased": (line(run, "theorem1") or 0.0) >= NEGLIGIBLE,
        "membership": None if advantage is None else format_percent((1 + float(advantage)) / 2),
        "rero": [
            (format_percent(r["kappa"], side="near"), format_percent(r["success"])) for r in found.get("rero", ())
        ],
        "epsilons": [(name, amount(float(e), side="up"), at) for name, e in epsilons if e is not None],
        "notes": [clean(note, 400) for note in found.get("notes", ())],
        "assumptions": text.public_assumptions(run, noun, part),
        "accuracy": None if run.accuracy is None else f"{run.accuracy:.0%}",
        **_mechanism_context(run, noun, part, unit, of_range),
    }


def _mechanism_context(run: Run, noun: str, part: str, unit: float, of_range: str) -> dict[str, Any]:
    """Returns what both pages say of the mechanism."""
    targets, without_noise = text.targets(run, noun, part, unit)
    return {
        "noun": noun,
        "part": part,
        "of_range": of_range,
        "floors": floor_rows(run, unit),
        "guess_middle": guess_error(unit / 2),
        "targets": targets,
        "without_noise": without_noise,
        "settings": [(clean(name, 80), clean(setting, 600)) for name, setting in text.settings(run)],
    }


def floor_rows(run: Run, unit: float = 1.0) -> list[dict[str, Any]]:
    """Returns the calculator's floors, in units of the data's range times `unit`.

    Args:
        run: the public facts.
        unit: the factor on the data's range.
    """
    rows = []
    for bound in run.guarantee.get("bounds", ()):
        error = line(run, bound["name"], unit)
        rows.append({
            "name": bound["name"],
            "paper": not bound.get("proved", bound["name"] != "theorem1_paper"),
            "error": "says nothing" if bound.get("vacuous") is True else plus_minus(error),
            "attacker": bound["attacker"],
            "neighbours": bound["adjacency"],
            "coordinates": bound.get("coordinates", "average"),
            "above": bool(error and error >= unit / 2),
        })  # fmt: skip
    return rows


def column_rows(run: Run) -> list[dict[str, str]]:
    """Returns the floors of each column whose range was declared, in its own unit: they scale with the range."""
    units = run.data.get("units") or {}
    floors = {"any": line(run, "lecam"), "unbiased": line(run, "theorem1")}
    rows = []
    for name, (low, high) in sorted((run.data.get("ranges") or {}).items()):
        width, unit = float(high) - float(low), clean(units.get(name, "") if isinstance(units, Mapping) else "", 40)
        shown = {
            who: "nothing" if share is None or share < NEGLIGIBLE else plus_minus(share * width, width=width)
            for who, share in floors.items()
        }
        ends = span(float(low), float(high), unit)
        rows.append({"name": clean(name, 80), "range": ends, "guess": guess_error(width / 2), **shown})
    return rows


# --- templates -------------------------------------------------------------------------------


def as_json(content: Any) -> Markup:
    """Returns JSON for a script element: nothing in it can end the element or start another."""
    return htmlsafe_json_dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":"), sort_keys=True)


def render(template: str, context: Mapping[str, Any], figures: Mapping[str, Any] | None, data: Any = None) -> bytes:
    """Renders a page from a template; with figures, also plotly, our script and their data.

    Args:
        template: the name of the template.
        context: its variables.
        figures: by the id of their element; None for a page without scripts.
        data: for our script.
    """
    folder, scripts = files("reconbound.report") / "templates", []
    if figures is not None:
        from plotly.offline import get_plotlyjs

        scripts = [str(get_plotlyjs()), (folder / "report.js").read_text(encoding="utf-8")]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "script-src " + (" ".join(f"'sha256-{digest}'" for digest in digests) or "'none'")
    )
    page = templates(html=True).get_template(template).render(
        **context,
        version=__version__,
        policy=policy,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        content=None if figures is None else as_json({"charts": figures, **(data or {})}),
    )  # fmt: skip
    return page.encode("utf-8", "replace")
