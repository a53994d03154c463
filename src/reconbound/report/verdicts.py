"""The verdict: what the floors mean, and how far they can be relied on. Plain text: the templates escape it."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import columns, words
from .figures import amount, beyond, count, guess_error, percent, plus_minus, rough
from .view import NO_LIMIT, NOTHING, View

#: Fewer training records than this, and a larger ε than this, get a warning.
FEW, WEAK = 30, 10.0
#: How many columns the verdict names.
NAMED = 3


def verdict(view: View) -> list[str]:
    """What is at stake, in sentences: the lowest floors beside a guess; of a table, for how many records some single
    column is exposed; and what the floors of whole records mean for all of them."""
    worst = view.worst
    if worst is None:
        return [
            f"None of the {count(view.records, view.noun)} was ever measured, so nothing can be said about them.",
            "Audit with more steps or a larger accounting budget.",
        ]
    exposed = columns.anyone(view) if view.features > 1 else None
    single = [] if exposed is None else [_single(view, *exposed)]
    rest = [_first(view, worst), *single, _together(view, 0 if exposed is None else exposed[0])]
    return [*words.caveats(view.run), *rest]


def _first(view: View, worst: int) -> str:
    if view.image:
        return (
            "An attacker who knows everything but one image’s pixels and is not biased errs by at least "
            f"{plus_minus(float(view.floor[worst]))} {view.of_range} per pixel on the most exposed image; guessing the "
            f"average image errs by {guess_error(view.guess)}."
        )
    floors = columns.lowest(view)
    if floors is None or np.isnan(floors).all():
        return (
            f"An attacker who knows everything but one record’s {view.private_parts} and is not biased errs by at "
            f"least {plus_minus(float(view.floor[worst]))} {view.of_range} on the most exposed record (root mean "
            f"square over its {view.private_parts}); guessing the average errs by {guess_error(view.guess)}."
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
    rest = (
        f" {count(more, 'private column')} more {'is' if more == 1 else 'are'} less exposed beside a guess."
        if more
        else ""
    )
    return (
        f"An attacker who knows everything but one record’s {view.private_parts} and is not biased errs by at least "
        f"{_listed(said)}, {whose}{', and each more than the whole range: nothing is learnt' if far else ''}; guessing "
        f"the average errs by {_listed(guesses)}.{rest}"
    )


def _lowest(column: dict[str, Any], *, tell_far: bool) -> str:
    """A column's lowest floor and whose it is; tell_far: also that it is beyond the range, where it is."""
    floor = plus_minus(column["lowest"], column["unit"], column["width"])
    far = f"; {columns.BEYOND}" if tell_far and beyond(column["lowest"], column["width"]) else ""
    return f"{floor} on {column['name']} ({column['record_name']}{far})"


def _single(view: View, below: int, of: int) -> str:
    """For how many records some column is exposed, and which."""
    whose = f"{count(of, 'record')}" if of == view.records else f"the {count(of, 'record')} looked at"
    if below == 0:
        return f"By these estimates no single column’s floor lies below the error of a guess, for any of {whose}."
    found = [c for c in columns.counts(view) if c["below"]]
    found.sort(key=lambda c: -c["below"])
    said = ", ".join(f"{c['name']} {c['below']:,}" for c in found[:NAMED])
    said += f", and {count(len(found) - NAMED, 'column')} more" if len(found) > NAMED else ""
    return (
        f"By these estimates the floor of at least one column lies below the error of a guess for {below:,} of {whose} "
        f"({percent(below, of)}), and the release may tell more about it than a guess does: {said}."
    )


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _together(view: View, exposed: int) -> str:
    """What the floors of whole records mean; exposed: records of which some single column lies below a guess."""
    below, all_of, unknown = view.below(view.guess), count(view.records, view.noun), view.unknown
    upper = view.upper_floor
    unsure = upper is None or bool((upper < view.guess).any())
    estimate = "By this estimate, such" if unsure else "Such"
    over = f" over all {view.part}s together" if view.features > 1 and not view.image else ""
    pixels = view.parts_below_guess() if view.image and view.features > 1 else 0
    if unknown and below <= unknown:
        return (
            f"{unknown:,} of the {all_of} {_were(unknown)} never measured: nothing is known about them, and they count "
            f"as unprotected. {estimate} an attacker does better by guessing{over} for all others."
        )
    if below == 0 and pixels:
        return (
            f"{estimate} an attacker does better by guessing over all {view.part}s together, for every one of the "
            f"{all_of}; but on {pixels:,} of {view.features:,} single {view.part}s of the most "
            f"exposed {view.noun} the floor lies below a guess, and the release may tell more."
        )
    if below == 0 and exposed:
        return (
            f"{estimate} an attacker does better by guessing{over}, for every one of the {all_of}: a mean that hides "
            "the columns which are exposed."
        )
    if below == 0:
        return (
            f"{estimate} an attacker does better by guessing{over} than by relying on the release, for every one of "
            f"the {all_of}: on its own the release hardly helps it."
        )
    if below == view.records:
        return (
            f"For all of the {all_of} the floor{over} lies below {'a guess of them' if over else 'that guess'}: the "
            "release may tell such an attacker more than a guess does, and more noise is called for."
        )
    share = f"{below:,} of the {all_of} ({percent(below, view.records)}"
    share += f", {unknown:,} of them never measured)" if unknown else ")"
    single = (
        f" Single {view.part}s can be known better than that: at the most exposed {view.noun}, {pixels:,} of "
        f"{view.features:,} {_have(pixels)} a floor below a guess."
        if pixels
        else ""
    )
    floor, guess = "the floor", "a guess"
    if view.features > 1:
        floor, guess = f"the floor over all {view.part}s together", "a guess of them"
    return (
        f"For {share} {floor} lies below the error of {guess}, and the "
        f"release may tell more than a guess does; for all others such an attacker does better by guessing.{single}"
    )


def sureness(view: View) -> list[str]:
    """How far the verdict can be relied on: confidence limits or standard errors, records never measured."""
    found = [_confidence(view)] if view.worst is not None else []
    if view.unknown:
        found.append(
            f"{count(view.unknown, view.noun)} of {view.records:,} {_were(view.unknown)} never measured: nothing is "
            "known about them, and they count as unprotected (floor 0) below."
        )
    found += weak(view.records, view.run.guarantee.get("epsilon"), view.noun)
    if view.facts.get("inferred_ranges"):
        found.append(
            "Some columns’ ranges were read off the data. Their units rest on it, and the training did too: declare "
            "ranges (--range) to rule this out."
        )
    found.append(
        "A biased attacker, such as one who mixes the release with what it knows about "
        f"{'pictures' if view.image else 'people'} in general, is not bound by these floors. " + _any_attacker(view)
    )
    return found


def weak(records: int, epsilon: float | None, noun: str) -> list[str]:
    """Warnings: too few records for a share of them to mean much, an ε that says little."""
    found = []
    if records < FEW:
        found.append(
            f"Only {count(records, f'training {noun}')}: shares, quantiles and the guess (the average of so few) mean "
            "little, and every one of them weighs heavily in the model."
        )
    if epsilon is not None and epsilon > WEAK:
        found.append(
            f"ε = {amount(float(epsilon), side='up')} is weak as differential privacy goes (it hardly hides who took "
            f"part); the floors here are about rebuilding the values of one {noun}, and stand by themselves."
        )
    return found


def _confidence(view: View) -> str:
    worst, upper = view.worst, view.upper_floor
    assert worst is not None
    if upper is None:
        error = view.floor_error(worst)
        size = f"of {rough(error)}" if error is not None else "of more than half of it"
        return (
            f"These are estimates from one run. {_whose(view, worst)} is {_here(view, float(view.floor[worst]))}, with "
            f"a standard error {size} from measuring alone; another run would differ by more. Guessing errs by "
            f"{guess_error(view.guess)}. Audit with --runs 10 for confidence limits."
        )
    level = f"{100 * float(view.facts.get('confidence', 0.95)):g} %"
    runs = int(view.run.mechanism.get("runs", 2))
    limited = upper > 0
    rare = view.unlimited
    said = f"Average of {runs:,} runs. "
    said += f"{_whose(view, worst)} is {_here(view, float(view.floor[worst]))} by the estimate"
    if upper[worst] > 0:
        own, lowest = float(upper[worst]), float(upper[limited].min())
        said += f", and at {level} confidence at least {plus_minus(own)}"
        any_one = f"any {view.noun}{' that has a limit' if rare else ''}"
        said += f"; that of {any_one} at least {plus_minus(lowest)}" if lowest < own else ""
    said += f". Guessing errs by {guess_error(view.guess)}. "
    if rare:
        said += f"{count(rare, view.noun)} {_have(rare)} no limit: {NO_LIMIT}. "
    short = int((limited & (upper < view.guess) & (view.floor >= view.guess)).sum())
    if short:
        said += (
            f"For {count(short, view.noun)} the floor lies above a guess by the estimate but not at that confidence: "
            "more runs would tell. "
        )
    if view.features > 1 and limited.any():
        said += f"Floors of single {view.part}s are estimates without a limit. "
    said += "The limits are checked by simulation, not proved: docs/theory-accounting.md." if limited.any() else ""
    return said.rstrip()


def _whose(view: View, record: int) -> str:
    over = f" over all its {view.part}s" if view.features > 1 else ""
    return f"The floor of the most exposed {view.noun}{over} ({view.record_name(record)})"


def _here(view: View, error: float) -> str:
    return f"{plus_minus(error)} {view.of_range}"


def _were(n: int) -> str:
    return "was" if n == 1 else "were"


def _have(n: int) -> str:
    return "has" if n == 1 else "have"


def _any_attacker(view: View) -> str:
    each, mean = (view.line(name) or 0.0 for name in ("lecam", "rate_distortion"))
    said = []
    if each >= NOTHING * view.unit:
        said.append(f"{plus_minus(each)} on each {view.part}")
    if mean >= max(NOTHING * view.unit, each):
        said.append(f"{plus_minus(mean)} on average over the {view.part}s")
    if not said:
        return "The noise by itself gives no floor worth naming for it."
    if view.single:
        said = [f"{plus_minus(max(each, mean))} {view.of_range}"]
    where = "" if view.single else f" ({view.of_range})"
    return (
        f"Any attacker, biased or not, errs by at least {' and '.join(said)}{where} in the worst case over "
        f"all {view.noun}s there could be: that is what the noise by itself guarantees, whatever the data."
    )
