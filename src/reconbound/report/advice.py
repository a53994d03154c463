"""Advice on what to do next: how much noise a target needs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_limit, format_noise, format_percent
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.calibrate import Calibration, calibrate
from reconbound.report import columns
from reconbound.report.figures import guess_error, plus_minus
from reconbound.report.folder import Run
from reconbound.report.view import View

#: Targets, as shares of the range: (± error, floor, attacker in words).
TARGETS = (
    (0.25, "lecam", "any attacker, on some conceivable {noun}, each {part}"),
    (0.4, "lecam", "any attacker, on some conceivable {noun}, each {part}"),
    (0.45, "rate_distortion", "any attacker, on some conceivable {noun}, average over the {part}s"),
    (0.5, "theorem1", "attacker unbiased for every {noun}, each {part}"),
)


def mechanism_of(run: Run) -> SampledGaussian | None:
    """Returns the mechanism that the calculator was asked about; None where no noise can be found for it."""
    given = {k: v for k, v in run.guarantee.get("mechanism", {}).items() if k != "type"}
    if run.guarantee.get("mechanism", {}).get("type") != "SampledGaussian":
        return None
    try:
        return SampledGaussian(**given)
    except (InputError, TypeError):
        return None


def targets(run: Run, noun: str, part: str, unit: float = 1.0) -> list[dict[str, Any]]:
    """Returns the smallest noise multiplier for some floors that hold whatever the data are; empty if none is found.

    Args:
        run: the public facts.
        noun: the name of a record.
        part: the name of a private number of a record.
        unit: errors are shown in units of the data's range times this.
    """
    mechanism, found = mechanism_of(run), []
    dim = int(run.guarantee.get("data", {}).get("dim", 1))
    for error, name, who in TARGETS if mechanism is not None else ():
        assert mechanism is not None
        reached = smallest_noise(replace(mechanism, noise_multiplier=1.0), error**2, name, dim)
        if reached is not None and reached.without_noise is None:
            noise, means = reached.noise, reached.mechanism.protection()
            found.append({
                "target": plus_minus(error * unit), "who": who.format(noun=noun, part=part),
                "noise": format_noise(noise, 3),
                "success": "–" if means.success is None else format_percent(means.success),
                "meaningful": means.meaningful,
                "enough": noise <= mechanism.noise_multiplier and means.meaningful,
            })  # fmt: skip
    return found


def without_noise(run: Run, noun: str, part: str, unit: float = 1.0) -> str:
    """Says which targets are met whatever the noise, and why that is no advice; empty where none is.

    Args:
        run: the public facts.
        noun: the name of a record.
        part: the name of a private number of a record.
        unit: errors are shown in units of the data's range times this.
    """
    mechanism, met = mechanism_of(run), []
    dim = int(run.guarantee.get("data", {}).get("dim", 1))
    for error, name, who in TARGETS if mechanism is not None else ():
        assert mechanism is not None
        reached = smallest_noise(replace(mechanism, noise_multiplier=1.0), error**2, name, dim)
        if reached is not None and reached.without_noise is not None:
            met.append(f"{plus_minus(error * unit)} ({who.format(noun=noun, part=part)})")
    if not met or mechanism is None:
        return ""
    return (
        f"{' and '.join(met)} {'is' if len(met) == 1 else 'are'} met without noise: with chance "
        f"{format_percent(mechanism.never_drawn, 2, 'near')} a record is never drawn in the whole run, and that "
        "floor is an average over it. "
        "It protects no record that is drawn, so no noise follows from it."
    )


@lru_cache(maxsize=64)
def smallest_noise(mechanism: SampledGaussian, target_mse: float, name: str, dim: int) -> Calibration | None:
    """Returns the result of `calibrate`, computed once for both pages; None where no noise is enough.

    Args:
        mechanism: the mechanism whose noise is searched.
        target_mse: the floor to reach.
        name: the name of the floor.
        dim: the number of private features.
    """
    try:
        return calibrate(mechanism, target_mse, bound=name, dim=dim)
    except InputError:
        return None


def for_records(view: View) -> list[str]:
    """Estimates what more noise would do to the per-record floors, and says why it is only an estimate."""
    if view.worst is None or view.guess <= 0:
        return []
    noise = float(view.run.mechanism.get("noise_multiplier", 0.0))
    worst = view.lowest
    why = (
        "A step’s information is that of the clipped gradient over the square of the noise, times a sampling factor "
        "that shrinks with more noise: along the same training path, twice the noise about doubles every ± floor or "
        "better. "
        "The path itself changes with the noise, so this is an estimate; only another audit tells."
    )
    single, some = _single(view)
    if not view.protection.meaningful:
        return [
            "First of all more noise, whatever the floors of single records: they bind unbiased attackers only, and "
            "the mechanism by itself rules out next to nothing. The table says how much noise, and what it means.",
            why,
        ]
    if worst >= view.guess and not single:
        each = "each of its pixels" if view.image else "every single column, for each record looked at"
        also = f", and so is that of {each}" if view.features > 1 else ""
        return [
            f"The most exposed {view.noun}’s floor for unbiased attackers is above the error of a guess{also}, "
            f"{view.basis}.",
            why,
        ]
    factor = _factor(view, worst)
    if noise <= 0 or not math.isfinite(factor):
        return [why]
    what = (
        f"the most exposed {view.noun} from {plus_minus(worst)} to the error of a guess, {guess_error(view.guess)}"
        if not single
        else f"the {f'{single:,} single {view.part}s' if single > 1 else f'one {view.part}'} of {some} that "
        f"{'lie' if single > 1 else 'lies'} below a guess to the error of a guess"
    )
    return [
        f"To lift {what}, try a noise multiplier of about {format_limit(noise * factor)} (now {noise:g}): an estimate.",
        why,
        "Fewer steps, a smaller sampling rate, or leaving out the few most exposed records also help; leaving records "
        "out by their leakage is itself a choice that depends on the data, and is not accounted for.",
    ]


def _single(view: View) -> tuple[int, str]:
    """Counts the single features below a guess, and names whose: the most exposed image's; in a table, any record's."""
    if view.features == 1:
        return 0, ""
    if view.image:
        return view.parts_below_guess(), "the most exposed image"
    return sum(c["below"] > 0 for c in columns.counts(view)), "some records"


def _factor(view: View, worst: float) -> float:
    """Returns the factor of noise that lifts the most exposed record to the error of a guess.

    It must lift the record's pixels too, or for a table the columns of all records.
    """
    assert view.worst is not None
    floors = view.feature_floors(view.worst) if view.image else columns.lowest(view)
    found = view.guess / worst if worst > 0 else math.inf
    if floors is None:
        return found
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return max(found, float(np.nan_to_num(view.guess_each / floors, nan=0.0, posinf=np.inf).max()))
