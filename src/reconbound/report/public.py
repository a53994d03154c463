"""What the mechanism by itself guarantees: tables made from run.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rounding import format_limit, format_percent
from ..run_folder import CHOSEN_SEED, Run
from . import advice, columns, words
from .figures import amount, beyond, clean, guess_error, pixel_scale, plus_minus, value
from .view import NOTHING, View, line

TITLES = {
    "theorem1": "Theorem 1",
    "theorem1_paper": "Theorem 1, the paper’s line",
    "corners": "all corners",
    "lecam": "Le Cam",
    "rate_distortion": "rate–distortion",
}
ABOUT = {
    "name": "Data",
    "kind": "Kind",
    "records": "Training records",
    "shape": "Shape",
    "features": "Private numbers of a record",
    "private": "Private",
    "public": "Public, taken as known to the attacker",
}
ATTACKERS = {
    "unbiased": "attacker unbiased for every {noun} there could be",
    "any": "any attacker, in the worst case over all {noun}s there could be",
}


def floor_rows(run: Run, unit: float = 1.0) -> list[dict[str, Any]]:
    """The calculator's floors, ready for the template, in units of the data's range times `unit`."""
    rows = []
    for bound in run.guarantee.get("bounds", ()):
        error = line(run, bound["name"], unit)
        rows.append({
            "title": TITLES.get(bound["name"], bound["name"]),
            "paper": not bound.get("proved", bound["name"] != "theorem1_paper"),
            "error": "says nothing" if bound.get("vacuous") is True else plus_minus(error),
            "attacker": ATTACKERS.get(bound["attacker"], bound["attacker"]).format(noun=_nouns(run)[0]),
            "neighbours": bound["adjacency"],
            "coordinates": bound.get("coordinates", "average"),
            "theorem": bound["theorem"],
            "assumes": "; ".join(bound.get("assumes", ())),
            "share": round(100 * min(1.0, (error or 0.0) / (unit / 2)), 1),
            "above": bool(error and error >= unit / 2),
        })  # fmt: skip
    return rows


def feature_rows(view: View) -> list[dict[str, Any]]:
    """Columns of a table in their own units: floor of the average record, of the one most exposed in that column, and
    the guess."""
    average = view.feature_floors(None)
    if view.image or average is None:
        return []
    worst, found = columns.lowest(view), columns.counts(view)
    order = columns.most_exposed(view, average if worst is None else worst, view.features)
    below = [columns.sentence(column) for column in found]
    rows = []
    for j in order:
        unit, width = view.feature_unit(j), float(view.scale[j])
        low, high = value(float(view.offset[j])), value(float(view.offset[j] + view.scale[j]))
        rows.append({
            "name": view.feature_name(j),
            "range": f"{low} to {high}{f' {unit}' if unit else ''}",
            "average": plus_minus(float(average[j]), width=width),
            "worst": "–" if worst is None else plus_minus(found[j]["lowest"], width=width),
            "whose": "" if worst is None else found[j]["record_name"] or "",
            "beyond": [beyond(float(average[j]), width), worst is not None and beyond(found[j]["lowest"], width)],
            "guess": guess_error(float(view.guess_each[j])),
            "below": below[j] if below else "",
        })  # fmt: skip
    return rows


def context(run: Run) -> dict[str, Any]:
    """All that the public page says."""
    data, found = run.data, run.guarantee
    noun, part = _nouns(run)
    unit, of_range = units(run)
    return {
        "title": f"{clean(data.get('name', 'data'), 80)}: what the training guarantees",
        "noun": noun,
        "part": part,
        "a_noun": "an image" if noun == "image" else "a record",
        "verdict": headline(run),
        "caveats": caveats(run),
        "about": about(run),
        "floors": floor_rows(run, unit),
        "guess_middle": guess_error(unit / 2),
        "of_range": of_range,
        "two_demands": words.two_demands(noun),
        "columns": column_rows(run),
        "any_unbiased": (line(run, "theorem1") or 0.0) >= NOTHING,
        "membership": membership(found),
        "rero": [
            (format_percent(r["kappa"], side="near"), format_percent(r["success"])) for r in found.get("rero", ())
        ],
        "epsilons": epsilons(found),
        "notes": [clean(note, 400) for note in found.get("notes", ())],
        "assumptions": assumptions(run, noun, part),
        "targets": advice.targets(run, part, unit),
        "without_noise": advice.without_noise(run, part, unit),
        "settings": [(clean(name, 80), clean(said, 400)) for name, said in words.settings(run)],
        "accuracy": None if run.accuracy is None else _accuracy(run),
    }


def _accuracy(run: Run) -> str:
    assert run.accuracy is not None
    if run.data.get("task") == "number":
        return f"R² {run.accuracy:.3f}"
    return f"{run.accuracy:.1%}"


def _nouns(run: Run) -> tuple[str, str]:
    return ("image", "pixel") if run.data.get("kind") == "image" else ("record", "column")


def units(run: Run) -> tuple[float, str]:
    """In what the page's errors are, as the audit prints them: an image's range, else shares of a column's."""
    ends = run.data.get("range")
    if run.data.get("kind") != "image" or not ends:
        return 1.0, "of the range"
    low, high = float(ends[0]), float(ends[1])
    return high - low, pixel_scale(low, high)


def headline(run: Run) -> list[str]:
    """What the mechanism guarantees, in two sentences, with the condition that it rests on where ranges were read off
    the data: the first words of the public page, and of run.json."""
    (noun, part), (unit, of_range) = _nouns(run), units(run)
    each, mean = line(run, "lecam"), line(run, "rate_distortion")
    one = int(run.data.get("features", 0)) == 1
    known = f"Provided that every column’s range is known without the data, which is not so here ({read_off(run)}): "
    what = f"{known + 'w' if run.data.get('inferred_ranges') else 'W'}hatever the data and however clever the attacker"
    said = []
    if each is not None and each >= NOTHING:
        said.append(
            f"{what}, even one who knows every other {noun} and sees every "
            f"step of the training errs by at least {plus_minus(each * unit)} {of_range} on "
            f"{f'the private {part}' if one else f'each {part}'} of one {noun}, in "
            f"the worst case over all {noun}s there could be; without the model, guessing the middle errs by at most "
            f"{guess_error(unit / 2)}."
        )
    if mean is not None and mean > max(NOTHING, each or 0.0):
        over = f"On a {noun}’s private {part}" if one else f"On average over a {noun}’s {part}s"
        start = f"{over} it errs" if said else f"{what}, it errs {over[0].lower()}{over[1:]}"
        said.append(f"{start} by at least {plus_minus(mean * unit)} {of_range}.")
    return said or ["This mechanism’s settings give no floor worth naming for every attacker."]


def read_off(run: Run) -> str:
    """Which ranges were read off the data and how to declare them; names private columns alone."""
    ranges, own = run.data.get("ranges") or {}, [str(name) for name in run.data.get("private") or ()]
    names = [clean(name, 40) for name in own if name not in ranges]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    which = f"{'that' if len(names) == 1 else 'those'} of {listed}" if names else "some"
    verb, them = ("was", "it") if len(names) == 1 else ("were", "them")
    return f"{which} {verb} read off it: declare {them} by --range COLUMN=LOWEST:HIGHEST and audit again"


def caveats(run: Run) -> list[str]:
    """What takes the guarantee away, said beside it."""
    found = [words.INFERRED] if run.data.get("inferred_ranges") else []
    if run.training.get("seed_from") == CHOSEN_SEED:
        found.append(f"The noise is {words.CHOSEN}")
    return found


def about(run: Run) -> list[tuple[str, str]]:
    """The data's public facts: what kind, how many, which columns are private."""
    data, rows = run.data, []
    for key, title in ABOUT.items():
        given = data.get(key)
        if given not in (None, "", [], ()):
            said = " × ".join(str(g) for g in given) if key == "shape" else words._plain(given)
            rows.append((title, clean(said, 1000)))
    return rows


def column_rows(run: Run) -> list[dict[str, str]]:
    """Floors of each column whose range was declared, in its own unit. Le Cam and Theorem 1 scale with the range."""
    ranges: Mapping[str, Any] = run.data.get("ranges") or {}
    units = run.data.get("units") or {}
    each, unbiased = line(run, "lecam"), line(run, "theorem1")
    rows = []
    for name, (low, high) in sorted(ranges.items()):
        width, unit = float(high) - float(low), clean(units.get(name, "") if isinstance(units, Mapping) else "", 40)
        rows.append({
            "name": clean(name, 80),
            "range": f"{value(float(low))} to {value(float(high))}{f' {unit}' if unit else ''}",
            "any": _or_nothing(each, width),
            "unbiased": _or_nothing(unbiased, width),
            "guess": guess_error(width / 2),
        })  # fmt: skip
    return rows


def _or_nothing(share: float | None, width: float) -> str:
    return "nothing" if share is None or share < NOTHING else plus_minus(share * width, width=width)


def _taken_as_public(run: Run, noun: str) -> str:
    if noun == "image":
        return "How many images there are and of what size, the classes, and each image’s class."
    return (
        "How many records there are; what the columns are, which categories, classes and missing values occur in them "
        "(they decide the model’s shape); declared ranges; each record’s target, its public columns, and which of its "
        "values are missing."
    )


def membership(found: Mapping[str, Any]) -> str | None:
    advantage = found.get("membership_advantage")
    return None if advantage is None else format_percent((1 + float(advantage)) / 2)


def epsilons(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(neighbours, ε, at which δ)."""
    delta = float(found.get("delta", 1e-5))
    rows = (("replace-one", found.get("epsilon")), ("add/remove", found.get("epsilon_add_remove")))
    return [
        (name, amount(float(e), side="up"), f"at δ = {format_limit(delta, 6)}") for name, e in rows if e is not None
    ]


def assumptions(run: Run, noun: str, part: str) -> list[tuple[str, str]]:
    """What the mechanism's own floors rest on."""
    m = run.mechanism
    return [
        (
            "Attacker",
            f"Knows every other {noun}, the label, the model, the code and all settings; sees every noisy step.",
        ),
        (
            "Two kinds",
            f"Floors for any attacker hold in the worst case over all {noun}s there could be, biased attackers "
            f"included. Floors for an attacker who is unbiased for every {noun} there could be hold at each of them, "
            f"and say little where they exceed a guess. An attacker who is unbiased only near one {noun} is bound by "
            f"that {noun}’s own floor, which may be far lower and which the owner of the data has.",
        ),
        (
            "Each or average",
            f"“Each”: no {part} by itself is known better. “Average”: only the mean over the {part}s is bounded, and "
            "some may be known much better.",
        ),
        ("Neighbours", "As named in the table: replace-one changes one record, add/remove adds or leaves out one."),
        ("Sampler", words.SAMPLERS.get(str(m.get("sampler")), f"Batches: {m.get('sampler')}.")),
        ("Clip", words.CLIPS.get(str(m.get("clip")), f"Clip: {m.get('clip')}.")),
        ("Noise", f"Gaussian, {words.seed(run)}"),
        ("Release", words.release(run)),
        *(("Model", said) for said in words.caveats(run)),
        ("Taken as public", _taken_as_public(run, noun)),
        (
            "Not covered",
            "Whatever else was released from these data; settings that were chosen by looking at results; test "
            f"{noun}s, on which an accuracy is measured: the noise is for the training {noun}s.",
        ),
        (
            "Not on this page",
            f"How well each single {noun} is protected: that depends on the data, and their owner has it.",
        ),
    ]
