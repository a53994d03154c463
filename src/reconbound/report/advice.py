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
from reconbound.report.folder import Run
from reconbound.report.formats import guess_error, plus_minus
from reconbound.report.view import View

#: Targets, as shares of the range: (± error, floor, attacker in words).
TARGETS = (
    (0.25, "lecam", "any attacker, on some conceivable {noun}, each {part}"),
    (0.4, "lecam", "any attacker, on some conceivable {noun}, each {part}"),
    (0.45, "rate_distortion", "any attacker, on some conceivable {noun}, average over the {part}s"),
    (0.5, "theorem1", "attacker unbiased for every {noun}, each {part}"),
)
ESTIMATE = (
    "This is an estimate. Along the same training path, twice the noise about doubles every ± floor or better; but the "
    "path changes with the noise, so only another audit tells."
)


def run_mechanism(run: Run) -> SampledGaussian | None:
    """Returns the mechanism of the run; None where no noise can be found for it."""
    facts = dict(run.guarantee.get("mechanism", {}))
    if facts.pop("type", None) != "SampledGaussian":
        return None
    try:
        return SampledGaussian(**facts)
    except (InputError, TypeError):
        return None


def targets(run: Run, noun: str, part: str, unit: float = 1.0) -> tuple[list[dict[str, Any]], str]:
    """Returns the smallest noise multiplier for some floors that hold whatever the data are.

    Args:
        run: the public facts.
        noun: the name of a record.
        part: the name of a private number of a record.
        unit: errors are shown in units of the data's range times this.

    Returns:
        A row for each target that needs noise, and a note about those that do not, for which no noise follows.
    """
    mechanism = run_mechanism(run)
    rows: list[dict[str, Any]] = []
    met: list[str] = []
    if mechanism is None:
        return rows, ""
    dim = int(run.guarantee.get("data", {}).get("dim", 1))
    for error, name, who in TARGETS:
        reached = smallest_noise(replace(mechanism, noise_multiplier=1.0), error**2, name, dim)
        who, target = who.format(noun=noun, part=part), plus_minus(error * unit)
        if reached is None:
            continue
        if reached.without_noise is not None:
            met.append(f"{target} ({who})")
            continue
        protection = reached.mechanism.protection()
        rows.append({
            "target": target, "who": who, "noise": format_noise(reached.noise, 3),
            "success": "–" if protection.success is None else format_percent(protection.success),
            "meaningful": protection.meaningful,
            "enough": reached.noise <= mechanism.noise_multiplier and protection.meaningful,
        })  # fmt: skip
    if not met:
        return rows, ""
    never = format_percent(mechanism.never_drawn, 2, "near")
    return rows, (
        f"{' and '.join(met)} {'is' if len(met) == 1 else 'are'} met without noise, because a record is never drawn "
        f"with chance {never}. That protects no record that is drawn, so no noise follows from it."
    )


@lru_cache(maxsize=64)
def smallest_noise(mechanism: SampledGaussian, target_mse: float, name: str, dim: int) -> Calibration | None:
    """Returns the result of `calibrate`, computed once for both pages; None where no noise is enough."""
    try:
        return calibrate(mechanism, target_mse, bound=name, dim=dim)
    except InputError:
        return None


def next_steps(view: View) -> list[str]:
    """Returns what more noise would do to the per-record floors."""
    if view.worst is None or view.guess <= 0:
        return []
    if not view.protection.meaningful:
        return ["First of all more noise: the mechanism by itself rules out next to nothing. The table says how much."]
    noise, lowest = float(view.run.mechanism.get("noise_multiplier", 0.0)), view.lowest
    single = 0  # pixels of the most exposed image, or columns of any record, below a guess
    if view.features > 1:
        single = view.parts_below_guess() if view.image else sum(c["below"] > 0 for c in view.columns)
    if lowest >= view.guess and not single:
        also = f", in each single {view.part} too" if view.features > 1 else ""
        return [f"For unbiased attackers, every floor is above the error of a guess{also}, {view.basis}.", ESTIMATE]
    factor = _noise_factor(view, lowest)
    if noise <= 0 or not math.isfinite(factor):
        return [ESTIMATE]
    what = f"the most exposed {view.noun} from {plus_minus(lowest)} to the error of a guess, {guess_error(view.guess)}"
    if single:
        whose = "the most exposed image" if view.image else "some records"
        what = (
            f"the {single:,} {view.part}{'' if single == 1 else 's'} of {whose} below a guess to the error of a guess"
        )
    return [
        f"To lift {what}, try a noise multiplier of about {format_limit(noise * factor)} (now {noise:g}).",
        ESTIMATE,
        "Fewer steps, a smaller sampling rate, or leaving out the most exposed records also help. Leaving records out "
        "by their leakage depends on the data, and is not accounted for.",
    ]


def _noise_factor(view: View, lowest: float) -> float:
    """Returns the factor of noise that lifts the most exposed record, and its pixels or all columns, to a guess."""
    assert view.worst is not None
    floors = view.feature_floors(view.worst) if view.image else view.lowest_by_column
    factor = view.guess / lowest if lowest > 0 else math.inf
    if floors is None:
        return factor
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return max(factor, float(np.nan_to_num(view.guess_each / floors, nan=0.0, posinf=np.inf).max()))
