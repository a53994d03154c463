"""The guarantees of the mechanism itself: tables made from run.json only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from reconbound._internal.formatting import format_limit, format_percent
from reconbound.mechanisms.base import BLIND, read_protection, with_article
from reconbound.report import advice, columns, words
from reconbound.report.figures import amount, beyond, clean, guess_error, pixel_scale, plus_minus, value
from reconbound.report.folder import CHOSEN_SEED, Run
from reconbound.report.view import NOTHING, View, line

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
#: The floors that bind any attacker: of each number by itself, and on average over them.
ANY = ("lecam", "rate_distortion")
ATTACKERS = {
    "unbiased": "attacker unbiased for every {noun} there could be",
    "any": "any attacker, on some conceivable {noun}, not on each",
}


def floor_rows(run: Run, unit: float = 1.0) -> list[dict[str, Any]]:
    """Returns the calculator's floors, ready for the template, in units of the data's range times `unit`.

    Args:
        run: the public facts.
        unit: the factor on the data's range.
    """
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
    """Returns the columns of a table in their own units.

    Each row has the floor of the average record, that of the record most exposed in this column, and the guess.
    """
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
    """Returns everything that the public page shows."""
    data, found = run.data, run.guarantee
    noun, part = _nouns(run)
    unit, of_range = units(run)
    return {
        "title": f"{clean(data.get('name', 'data'), 80)}: what the training guarantees",
        "noun": noun,
        "part": part,
        "a_noun": with_article(noun),
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
        "targets": advice.targets(run, noun, part, unit),
        "without_noise": advice.without_noise(run, noun, part, unit),
        "settings": [(clean(name, 80), clean(said, 400)) for name, said in words.settings(run)],
        "accuracy": None if run.accuracy is None else _accuracy(run),
    }


def _accuracy(run: Run) -> str:
    assert run.accuracy is not None
    return f"{run.accuracy:.0%}"


def _nouns(run: Run) -> tuple[str, str]:
    return ("image", "pixel") if run.data.get("kind") == "image" else ("record", "column")


def units(run: Run) -> tuple[float, str]:
    """Returns the unit of the page's errors, as the audit prints it: an image's range, or shares of a column's."""
    ends = run.data.get("range")
    if run.data.get("kind") != "image" or not ends:
        return 1.0, "of the range"
    low, high = float(ends[0]), float(ends[1])
    return high - low, pixel_scale(low, high)


def headline(run: Run) -> list[str]:
    """Says what the mechanism guarantees, in sentences that are true by themselves.

    They are the first words of the public page and of run.json: that the guarantee means little, where that is so; how
    often a record can be rebuilt; and the floors for any attacker. Where ranges were read off the data, the first
    sentence names the condition that it rests on.
    """
    (noun, part), (unit, of_range) = _nouns(run), units(run)
    found, inferred = read_protection(run.guarantee), bool(run.data.get("inferred_ranges"))
    if not found.meaningful:
        return [found.warning(noun)]
    known = f"Provided that every column’s range is known without the data, which is not so here ({read_off(run)}): "
    who = f"even one who knows every other {noun} and sees every step of the training"
    said = []
    if found.success is not None:
        rebuilds = found.sentence(noun)
        said.append(f"Whatever the data and the attacker, {who}: {rebuilds[0].lower()}{rebuilds[1:]}")
    each, mean = ((x if x is not None and x >= NOTHING else None) for x in (line(run, n) for n in ANY))
    shown = partial(_in_unit, unit=unit, of_range=of_range)
    one = int(run.data.get("features", 0)) == 1
    floors = words.for_any_attacker(noun, part, each, mean, shown, one=one)
    guess = f"Guessing the middle errs by at most {shown(0.5)} on every {noun}."
    said += [*floors, guess] if floors else ["These settings give no floor worth naming that binds every attacker."]
    if not inferred:
        return said
    others = (f"If the ranges were known without the data: {s[0].lower()}{s[1:]}" for s in said[1:])
    return [f"{known}{said[0][0].lower()}{said[0][1:]}", *others]


def _in_unit(share: float, unit: float, of_range: str) -> str:
    return f"{plus_minus(share * unit)} {of_range}"


def read_off(run: Run) -> str:
    """Says which ranges were read off the data and how to declare them. It names private columns only."""
    ranges, own = run.data.get("ranges") or {}, [str(name) for name in run.data.get("private") or ()]
    names = [clean(name, 40) for name in own if name not in ranges]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    which = f"{'that' if len(names) == 1 else 'those'} of {listed}" if names else "some"
    verb, them = ("was", "it") if len(names) == 1 else ("were", "them")
    return f"{which} {verb} read off it: declare {them} by --range COLUMN=LOWEST:HIGHEST and audit again"


def caveats(run: Run) -> list[str]:
    """Lists what weakens the guarantee, to be shown beside it."""
    found = [words.INFERRED] if run.data.get("inferred_ranges") else []
    if run.training.get("seed_from") == CHOSEN_SEED:
        found.append(f"The noise is {words.CHOSEN}")
    return found


def about(run: Run) -> list[tuple[str, str]]:
    """Returns the data's public facts: the kind, the number of records, the private columns."""
    data, rows = run.data, []
    for key, title in ABOUT.items():
        given = data.get(key)
        if given not in (None, "", [], ()):
            said = " × ".join(str(g) for g in given) if key == "shape" else words._plain(given)
            rows.append((title, clean(said, 1000)))
    return rows


def column_rows(run: Run) -> list[dict[str, str]]:
    """Returns the floors of each column whose range was declared, in its own unit.

    Le Cam and Theorem 1 scale with the range.
    """
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
    """Returns rows of (neighbours, ε, at which δ)."""
    delta = float(found.get("delta", 1e-5))
    rows = (("replace-one", found.get("epsilon")), ("add/remove", found.get("epsilon_add_remove")))
    return [
        (name, amount(float(e), side="up"), f"at δ = {format_limit(delta, 6)}") for name, e in rows if e is not None
    ]


def copies(run: Run, noun: str) -> list[tuple[str, str]]:
    """Says what the mechanism guarantees to somebody who has several rows; empty where that is not known.

    Args:
        run: the public facts.
        noun: the name of a record.
    """
    mechanism = advice.mechanism_of(run)
    if mechanism is None:
        return []
    found = [(k, mechanism.for_group(k).rero(BLIND)) for k in (2, 5, 10)]
    told = [(k, format_percent(float(success))) for k, success in found]
    some = [f"at most {chance} with {k} {noun}s" for k, chance in told if chance != "100%"]
    none = next((f"not bounded with {k} {noun}s or more" for k, chance in told if chance == "100%"), "")
    rates = ", ".join([*some, none] if none else some)
    return [
        (
            "Several rows",
            f"All floors here are for one {noun}. Of somebody with several in the data, who is rebuilt with "
            f"a chance of {format_percent(BLIND)} without the release, the chance with it is {rates}.",
        )
    ]


def assumptions(run: Run, noun: str, part: str) -> list[tuple[str, str]]:
    """Lists the assumptions of the mechanism's own floors.

    Args:
        run: the public facts.
        noun: the name of a record.
        part: the name of a private number of a record.
    """
    m = run.mechanism
    return [
        (
            "Attacker",
            f"Knows every other {noun}, the label, the model, the code and all settings; sees every noisy step.",
        ),
        (
            "Two kinds",
            f"Floors for any attacker, biased ones included, say that for each attacker there is some conceivable "
            f"{noun} on which it errs by as much; on others, those trained on included, it may err by less. "
            f"Floors for an attacker who is unbiased for every {noun} there could be hold at each of them, "
            f"and say little where they exceed a guess. An attacker who is unbiased only near one {noun} is bound by "
            f"that {noun}’s own floor, which may be far lower and which the owner of the data has.",
        ),
        (
            "Each or average",
            f"“Each”: the floor holds for any one {part} by itself. “Average”: only the mean over the {part}s is "
            "bounded, and some may be known much better.",
        ),
        ("Neighbours", "As named in the table: replace-one changes one record, add/remove adds or leaves out one."),
        ("Sampler", words.SAMPLERS.get(str(m.get("sampler")), f"Batches: {m.get('sampler')}.")),
        ("Clip", words.CLIPS.get(str(m.get("clip")), f"Clip: {m.get('clip')}.")),
        ("Noise", f"Gaussian, {words.seed(run)}"),
        ("Release", words.release(run)),
        *(("Model", said) for said in words.caveats(run)),
        *copies(run, noun),
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
