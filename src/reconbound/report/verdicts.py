"""The verdict: what the floors mean, and how far they can be relied on. Plain text: the templates escape it."""

from __future__ import annotations

from typing import Any

import numpy as np

from reconbound.accounting.confidence import describe_one_run
from reconbound.mechanisms.base import Protection
from reconbound.report import columns, words
from reconbound.report.figures import amount, beyond, count, guess_error, percent, plus_minus, rough
from reconbound.report.view import NO_LIMIT, NOTHING, View

#: Fewer training records than this, and a larger ε than this, get a warning.
FEW, WEAK = 30, 10.0
#: How many columns the verdict names.
NAMED = 3


def verdict(view: View) -> list[str]:
    """Says what is at risk, in sentences that are true by themselves.

    They are: that the mechanism guarantees little, where that is so; the lowest floors beside a guess; for a table, for
    how many records some single column is exposed; and what the floors of whole records mean for all of them.
    """
    first = [said for said in (view.protection.warning(view.noun),) if said]
    worst = view.worst
    if worst is None:
        return [
            *first,
            f"None of the {count(view.records, view.noun)} was ever measured: nothing is known about "
            f"{'it' if view.records == 1 else 'them'}.",
            "Audit with more steps or a larger accounting budget.",
        ]
    exposed = columns.anyone(view) if view.features > 1 else None
    single = [] if exposed is None else _single(view, *exposed)
    rest = [_first(view, worst), *single, *_together(view, 0 if exposed is None else exposed[0])]
    return [*first, *words.caveats(view.run), *rest]


def _first(view: View, worst: int) -> str:
    who = f"an unbiased attacker who knows everything but one {view.noun}’s {view.private_parts}"
    floors = None if view.image else columns.lowest(view)
    limit = view.single and view.limited(worst)  # with several columns only their mean has one
    if view.image or limit or floors is None or np.isnan(floors).all():
        sure = f"At {view.level} confidence" if view.limited(worst) else "By an estimate"
        per = "per pixel " if view.image else ""
        over = "" if view.image or view.single else f" (root mean square over its {view.private_parts})"
        guess = "the average image" if view.image else "the average"
        return (
            f"{sure}, {who} errs by at least {plus_minus(view.lowest)} {view.of_range} {per}on the most "
            f"exposed {view.noun}{over}; guessing {guess} errs by {guess_error(view.guess)}."
        )
    told = [j for j in range(view.features) if not columns.constant(view, j)] or list(range(view.features))
    order = [j for j in columns.most_exposed(view, floors, view.features) if j in told and not np.isnan(floors[j])]
    named = order[:NAMED]
    found = columns.counts(view)
    far = all(beyond(found[j]["lowest"], found[j]["width"]) for j in named) and len(named) > 1
    said = [_lowest(found[j], tell_far=not far) for j in named]
    guesses = [guess_error(float(view.guess_each[j]), view.feature_unit(j)) for j in named]
    whose = (
        "for the record most exposed in it" if len(named) == 1 else "each for the record most exposed in that column"
    )
    if len(view.looked_at[0]) < view.records:
        whose += f" among the {len(view.looked_at[0]):,} records looked at (of {view.records:,})"
    more = len(order) - len(named)
    rest = f" {count(more, 'private column')} more {'is' if more == 1 else 'are'} less exposed." if more else ""
    return (
        f"By estimates, {who} errs by at least {_listed(said)}, {whose}"
        f"{f', and each {columns.BEYOND}' if far else ''}; guessing the average errs by {_listed(guesses)}.{rest}"
    )


def _lowest(column: dict[str, Any], *, tell_far: bool) -> str:
    """Describes a column's lowest floor and its record; with `tell_far`, also whether it is beyond the range."""
    floor = plus_minus(column["lowest"], column["unit"], column["width"])
    far = f"; {columns.BEYOND}" if tell_far and beyond(column["lowest"], column["width"]) else ""
    return f"{floor} on {column['name']} ({column['record_name']}{far})"


def _single(view: View, below: int, of: int) -> list[str]:
    """Says for how many records some column is exposed, and which columns."""
    whose = f"{count(of, 'record')}" if of == view.records else f"the {count(of, 'record')} looked at"
    if below == 0:
        if not view.protection.meaningful:
            return []
        return [
            "By estimates, an unbiased attacker’s floor is above the error of a guess in every column, for each of "
            f"{whose}."
        ]
    found = [c for c in columns.counts(view) if c["below"]]
    found.sort(key=lambda c: -c["below"])
    said = ", ".join(f"{c['name']} {c['below']:,}" for c in found[:NAMED])
    said += f", and {count(len(found) - NAMED, 'column')} more" if len(found) > NAMED else ""
    return [
        f"By estimates, the floor of at least one column lies below the error of a guess for {below:,} of {whose} "
        f"({percent(below, of)}), and the release may tell more about it than a guess does: {said}."
    ]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _together(view: View, exposed: int) -> list[str]:
    """Says what the floors of whole records mean.

    Args:
        view: the audit.
        exposed: the number of records of which some single column lies below a guess.
    """
    below, all_of, unknown = view.below(view.guess), count(view.records, view.noun), view.unknown
    over = f" over all {view.part}s together" if view.features > 1 else ""
    pixels = view.parts_below_guess() if view.image and view.features > 1 else 0
    sure = view.basis != "by estimates"
    errs = f"an unbiased attacker errs by at least as much as a guess{over}, {'each ' if sure else ''}{view.basis}"
    unbound = "" if view.protection.meaningful else "; a biased attacker is not bound by this"
    if unknown and below <= unknown:
        them = "it, and it counts" if unknown == 1 else "them, and they count"
        of = f"{unknown:,} of the {all_of} {_were(unknown)}"
        none = f"{of} never measured: nothing is known about {them} as unprotected."
        return [none] if unknown == view.records else [none, f"On all other {view.noun}s {errs}{unbound}."]
    every = f"On {'this one' if view.records == 1 else 'every one of the'} {view.noun if view.records == 1 else all_of}"
    if below == 0 and pixels:
        return [
            f"{every} {errs}; but on {pixels:,} of {view.features:,} single {view.part}s of the most exposed "
            f"{view.noun} the floor lies below a guess, and the release may tell more{unbound}."
        ]
    if below == 0 and exposed:
        return [f"{every} {errs}: a mean that hides the columns which are exposed{unbound}."]
    if below == 0:
        return [f"{every} {errs}{unbound}."]
    floor, guess = ("the floor", "a guess") if not over else (f"the floor{over}", "a guess of them")
    unsure = bool(((view.shown < view.guess) & (view.floor >= view.guess)).any())  # above the guess by the estimate
    may = "is not shown to be above" if unsure else "lies below"
    may += f" the error of {guess}, {view.basis}, and the release may tell an unbiased attacker more than that"
    if below == view.records:
        whose = "the one" if view.records == 1 else "all of the"
        return [f"For {whose} {view.noun if view.records == 1 else all_of} {floor} {may}: more noise is called for."]
    share = f"{below:,} of the {all_of} ({percent(below, view.records)}"
    share += f", {unknown:,} of them never measured)" if unknown else ")"
    said = [f"For {share} {floor} {may}.", f"On all other {view.noun}s {errs}{unbound}."]
    if pixels:
        said.append(
            f"Single {view.part}s can be known better than their average: at the most exposed {view.noun}, "
            f"{pixels:,} of {view.features:,} {_have(pixels)} a floor below a guess."
        )
    return said


def sureness(view: View) -> list[str]:
    """Says how far the verdict can be relied on: confidence limits or standard errors, records never measured."""
    found = [_confidence(view)] if view.worst is not None else []
    if view.unknown:
        found.append(
            f"{count(view.unknown, view.noun)} of {view.records:,} {_were(view.unknown)} never measured: nothing is "
            "known about them, and they count as unprotected (floor 0) below."
        )
    found += copied(view)
    found += weak(view.records, view.protection, view.noun)
    if view.facts.get("inferred_ranges"):
        found.append(
            "Some columns’ ranges were read off the data. Their units rest on it, and the training did too: declare "
            "ranges (--range) to rule this out."
        )
    found.append(
        "A biased attacker, such as one who mixes the release with what it knows about "
        f"{'pictures' if view.image else 'people'} in general, is not bound by the floors of single {view.noun}s. "
        + _any_attacker(view)
    )
    return found


def copied(view: View) -> list[str]:
    """Says how many records have exact copies, and what that means for somebody who has several rows."""
    found = view.facts.get("copies")
    if found is None:
        return []
    rows, alike = list(found["largest"]), (found.get("private") or {}).get("records", 0)
    also = ""
    if alike > found["records"]:
        also = f" {alike:,} agree with another in the {view.private_parts} and {view.target_name}, be it by chance."
    if not rows:
        return [f"No {view.noun} has an exact copy among the others.{also} A floor is for one row."]
    floor, k = view.group_floor(rows), len(rows)
    least = "not known, as not all were measured"
    if floor > 0:
        least = f"{plus_minus(floor)} {view.of_range} (from each row’s, {view.basis})"
    return [
        f"{found['records']:,} of the {count(view.records, view.noun)} have exact copies among the others (at most "
        f"{k:,} of one). A floor is for one row: should the {k:,} equal rows of the largest group "
        f"({view.record_name(rows[0])} and others) be one person’s, the floor of an unbiased attacker is {least}.{also}"
    ]


def weak(records: int, found: Protection, noun: str) -> list[str]:
    """Returns warnings: too few records for a share of them to mean much, an ε that guarantees little.

    Args:
        records: the number of records.
        found: what the mechanism guarantees.
        noun: the name of a record.
    """
    said = []
    if records < FEW:
        said.append(
            f"Only {count(records, f'training {noun}')}: shares, quantiles and the guess (the average of so few) mean "
            "little, and every one of them weighs heavily in the model."
        )
    if found.epsilon is not None and found.epsilon > WEAK:
        said.append(
            f"ε = {amount(float(found.epsilon), side='up')} is weak as differential privacy goes: it hardly hides who "
            "took part. Floors for unbiased attackers can be high all the same; they bind nobody who guesses with a "
            "bias."
        )
    return said


def _confidence(view: View) -> str:
    worst, upper = view.worst, view.upper_floor
    assert worst is not None
    estimate, whose = _here(view, float(view.floor[worst])), _whose(view, worst)
    if upper is None:
        error, off = (
            view.floor_error(worst),
            describe_one_run(float(view.leakage.measured.double().median()), squared=False),
        )
        size = f"of {rough(error)}" if error is not None else "of more than half of it"
        return (
            f"These are estimates from one run, without a confidence limit: {off}. {whose} is {estimate} by the "
            f"estimate, with a standard error {size} from measuring alone; another run would differ by more. Guessing "
            f"errs by {guess_error(view.guess)}. Audit with --runs 10 for confidence limits."
        )
    limited, rare = upper > 0, view.unlimited
    said = f"Average of {int(view.run.mechanism.get('runs', 2)):,} runs. "
    if limited[worst]:
        own, lowest = float(upper[worst]), float(upper[limited].min())
        whose = whose if lowest == own else _whose(view, worst, " by the estimates")
        said += f"{whose} is at least {_here(view, own)} at {view.level} confidence "
        said += f"(estimate {plus_minus(float(view.floor[worst]))})"
        any_one = f"any {view.noun}{' that has a limit' if rare else ''}"
        said += f"; that of {any_one} at least {plus_minus(lowest)}" if lowest < own else ""
    else:
        said += f"{whose} is {estimate} by an estimate without a confidence limit"
    said += f". Guessing errs by {guess_error(view.guess)}. "
    if rare:
        said += f"{count(rare, view.noun)} {_have(rare)} no limit: {NO_LIMIT}. "
        said += "Estimates without a limit are more often too high than too low. "
    short = int((limited & (upper < view.guess) & (view.floor >= view.guess)).sum())
    if short:
        said += (
            f"For {count(short, view.noun)} the floor lies above a guess by the estimate but not at that confidence: "
            "more runs would tell. "
        )
    if view.features > 1 and limited.any():
        said += f"Floors of single {view.part}s are estimates without a limit. "
    said += "The limits are checked by simulation, not proved: docs/theory/accounting.md." if limited.any() else ""
    return said.rstrip()


def _whose(view: View, record: int, by: str = "") -> str:
    over = f" over all its {view.part}s" if view.features > 1 else ""
    return f"The floor of the {view.noun} most exposed{by}{over} ({view.record_name(record)})"


def _here(view: View, error: float) -> str:
    return f"{plus_minus(error)} {view.of_range}"


def _were(n: int) -> str:
    return "was" if n == 1 else "were"


def _have(n: int) -> str:
    return "has" if n == 1 else "have"


def _any_attacker(view: View) -> str:
    least = NOTHING * view.unit
    each, mean = ((x if x is not None and x >= least else None) for x in map(view.line, ("lecam", "rate_distortion")))
    said = words.for_any_attacker(
        view.noun, view.part, each, mean, lambda error: f"{plus_minus(error)} {view.of_range}", one=view.features == 1
    )
    if not said or not view.protection.meaningful:
        return "The noise by itself gives no floor worth naming for it."
    return " ".join(["The noise by itself guarantees, whatever the data:", *said])
