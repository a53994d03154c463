"""Prints the results of the calculator's commands, bound and calibrate. torch is not imported here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from reconbound._internal.formatting import format_floor, format_limit, format_noise, format_percent
from reconbound.bounds.bound import NOT_PROVED
from reconbound.bounds.data_space import DataSpace
from reconbound.mechanisms import ADJACENCIES, Mechanism, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibrate import Calibration, OutOfReach, calibrate
from reconbound.mechanisms.guarantee import FLOORS, Guarantee, floor


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2, allow_nan=False))


def calibration_dict(
    found: Calibration, delta: float, space: dict[str, Any], data: DataSpace, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what print_calibration says, for machines.

    In "other_bounds" is the noise that each other bound would need, None where no noise is enough.

    Args:
        found: the result of the calibration.
        delta: the δ at which ε is reported.
        space: facts of the data space that are shown.
        data: the data space.
        notes: more notes, shown first.
    """
    also = {"proved": found.bound.proved, "data": data.to_dict(), "randomness": found.mechanism.randomness}
    also |= {"notes": [*_first(found), *notes, *found.mechanism.notes(), *data.notes()]}
    if found.without_noise is not None:  # no noise is named, nor an ε that would be that of the search's end
        told = {**found.mechanism.to_dict(), "sampler": found.mechanism.sampler, found.mechanism.noise_field: None}
        facts: dict[str, Any] = {found.mechanism.noise_field: None}
        facts |= {"met_without_noise": True, "never_drawn": found.without_noise}
        facts |= {"target_mse": found.target, "mse": found.bound.value, "bound": found.bound.to_dict()}
        return {**facts, "mechanism": told, "epsilon": None, "epsilon_add_remove": None, "delta": delta, **also}
    known = found.mechanism.protection(delta)
    replace_one, add_remove = (found.mechanism.epsilon_at(delta, adjacency) for adjacency in ADJACENCIES)
    return {
        found.mechanism.noise_field: found.noise,
        "target_mse": found.target,
        "mse": found.bound.value,
        "bound": found.bound.to_dict(),
        "mechanism": {**found.mechanism.to_dict(), "sampler": found.mechanism.sampler},
        "epsilon": replace_one,
        "epsilon_add_remove": add_remove,
        "delta": delta,
        "success_at_1_percent": known.success,
        "meaningful": known.meaningful,
        "other_bounds": {name: _other(name, found, space) for name in FLOORS if name not in _own(found)},
        **also,
    }


def _first(found: Calibration) -> tuple[str, ...]:
    """Returns the first sentence about noise for a floor that is not proved."""
    if found.bound.proved:
        return ()
    return (f"{found.bound.name} is {NOT_PROVED}: by it, this noise protects nobody. Say --bound theorem1.",)


def _own(found: Calibration) -> tuple[str, ...]:
    """The floors whose noise is not told beside."""
    return found.bound.name, "theorem1_paper"


def _other(name: str, found: Calibration, space: dict[str, Any]) -> dict[str, Any]:
    """The noise that another floor needs for the same target, None where none is enough or none is needed."""
    try:
        reached = calibrate(found.mechanism, found.target, bound=name, **space)
    except OutOfReach as error:
        return {found.mechanism.noise_field: None, "highest_mse": error.highest}
    if reached.without_noise is not None:
        return {found.mechanism.noise_field: None, "met_without_noise": True}
    return {found.mechanism.noise_field: reached.noise}


def _unit(units: str) -> str:
    return f" {units}" if units else ""


def print_guarantee(found: Guarantee, *, default: bool, notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    units = found.bounds[0].units
    names = [bound.name for bound in found.bounds]
    if default:
        console.print("No mechanism was given: this is the default one. See reconbound bound --help.", style="italic")
    console.print(found.in_short)
    console.print(str(found.mechanism), style="bold")
    console.print(f"{found.box}.")
    inside = f", in{_unit(units)}" if units else ""
    whose = "of unbiased attackers on every record, of any attacker on some record"
    table = Table(title=f"Least error per coordinate{inside}: {whose}", title_justify="left")
    for name in ("floor", "± error", "MSE", "attacker", "neighbours", "error vs. a guess"):
        numeric = name in ("± error", "MSE")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric or name in ("floor", "attacker"))
    for bound in found.bounds:
        says = "says nothing" if bound.vacuous else "≥ a guess" if bound.above_guess else _share(bound)
        says = says if bound.proved else NOT_PROVED
        table.add_row(
            bound.name, format_floor(bound.rmse), format_floor(bound.mse), bound.attacker, bound.adjacency, says
        )
    with console.capture() as drawn:
        console.print(table)
    if "…" not in drawn.get():
        console.print(table)
    else:  # a table with its cells cut off tells nobody anything
        console.print(f"{table.title}:")
        for bound in found.bounds:
            console.print(f"- {bound}")
    for note in notes:
        console.print(f"Note: {note}")
    guess = found.bounds[0].guess
    if guess is not None:
        console.print(
            f"A plain guess (of the middle, or as you gave it) errs by ±{format_limit(guess**0.5)}{_unit(units)}."
        )
    right = (1 + found.membership_advantage) / 2
    console.print(f"Telling two candidate records apart: right at most {format_percent(right)} of the time (advantage "
                  f"{format_limit(found.membership_advantage)}, replace-one).")  # fmt: skip
    (blind, success), *more = found.rero
    parts = "".join(f"; {format_percent(kappa, side='near')} → {format_percent(rebuilt)}" for kappa, rebuilt in more)
    console.print(
        f"A record that a blind guess gets right {format_percent(blind, side='near')} of the time is rebuilt "
        f"{format_percent(success)} of the time at most{parts}."
    )
    told = _epsilons(found.mechanism, found.epsilon, found.epsilon_add_remove, found.delta)
    if told:
        console.print(told)
    space = found.space.place
    closing = (
        "The attacker knows every other record and sees the whole release. Unbiased floors hold at every record for "
        f"attackers who are unbiased all over {space}, not for those who guess with a bias. Floors for any attacker "
        f"say that there is some record in {space}, the hardest for it, on which it errs by as much: on other records, "
        "those trained on included, it may err by less. Chances and mean errors are over "
        f"{found.mechanism.randomness}."
    )
    if found.dim > 1 and found["theorem1"].coordinates == "average":
        closing += " lecam holds for each coordinate by itself, the others for the average over the coordinates."
    elif found.dim > 1:
        closing += (
            " theorem1 and lecam hold for each coordinate by itself; corners and rate_distortion for the average over "
            "the coordinates, some of which may be known much better."
        )
    if "theorem1_paper" in names:
        closing += f" theorem1_paper is the paper's own line: {NOT_PROVED}."
    console.print(closing, style="dim")


def _epsilons(mechanism: Mechanism, replace_one: float | None, add_remove: float | None, delta: float) -> str:
    """One line about (ε, δ); empty where the mechanism does not say."""
    opacus = ""
    if isinstance(mechanism, SampledGaussian) and mechanism.sampler == "poisson":
        hard = mechanism.clip == "hard"
        opacus = ", as Opacus counts" if hard else "; for Opacus' clipping say --clip hard"
    known = [(replace_one, "replace-one"), (add_remove, f"add/remove{opacus}")]
    told = [f"ε = {format_limit(eps, 4)} ({which})" for eps, which in known if eps is not None]
    return f"At δ = {format_limit(delta, 6)}: {'; '.join(told)}." if told else ""


def _share(bound: Any) -> str:
    return f"{format_percent(bound.rmse / bound.guess**0.5, 2, 'down')} of a guess" if bound.guess else ""


def without_noise(found: Calibration) -> str:
    """Why no noise is named for a target that is met without any."""
    absent = format_percent(found.without_noise or 0.0, 2, "near")
    return (
        f"±{format_floor(found.target**0.5)}{_unit(found.bound.units)} is met without noise: with chance "
        f"{absent} a record is never drawn in the whole run, and {found.bound.name} is an average over that. It "
        "protects no record that is drawn: no noise follows from it. Ask for more, or for --bound theorem1, corners or "
        "rate_distortion, or for --target-epsilon."
    )


#: Whom each floor binds and where, and so when to use it.
KINDS = {
    "theorem1": "unbiased attackers, at every record",
    "theorem1_paper": "nobody: the paper's own line, to compare with",
    "corners": "unbiased attackers, at every record",
    "lecam": "any attacker, on some record of {place}",
    "rate_distortion": "any attacker, on some record of {place}",
}
ADVICE = (
    "lecam and rate_distortion are for attackers who may guess with a bias or know what is likely, as most do; "
    "theorem1 and corners for a statement about every single record, against unbiased attackers only."
)


def print_calibration(
    found: Calibration, delta: float, space: dict[str, Any], data: DataSpace, notes: Sequence[str] = ()
) -> None:
    """The noise, the floor that it gives, and the noise that other floors would need for the same target."""
    for first in _first(found):
        print(first)
    if found.without_noise is not None:
        print(without_noise(found))
        return
    what = {"noise_multiplier": "noise multiplier", "noise_std": "noise standard deviation"}[
        found.mechanism.noise_field
    ]
    known = found.mechanism.protection(delta)
    if known.warning():
        print(known.warning())
    least = f"at least ±{format_floor(found.target**0.5)}{_unit(found.bound.units)} (MSE {format_floor(found.target)})"
    print(f"The smallest {what} with {found.bound.name} {least}: {format_noise(found.noise)}")
    print(found.bound)
    replace_one, add_remove = (found.mechanism.epsilon_at(delta, adjacency) for adjacency in ADJACENCIES)
    told = _epsilons(found.mechanism, replace_one, add_remove, delta)
    if told:
        print(told)
    print(known.sentence())
    print(f"{found.bound.name} binds {_kind(found.bound.name, data)}. The same target by another --bound:")
    for name in FLOORS:
        if name not in _own(found):
            print(f"  {name} ({_kind(name, data)}): {_noise_for(name, found, space)}")
    print(f"{ADVICE} Records lie in {data.describe(found.bound.units)}.")
    for note in (*notes, *found.mechanism.notes(), *data.notes()):
        print(f"Note: {note}")


def _kind(name: str, data: DataSpace) -> str:
    average = name in ("corners", "rate_distortion") or (name == "theorem1" and data.place != "the box")
    mean = ", on average over the coordinates" if data.dim > 1 and average else ""
    return f"{KINDS[name].format(place=data.place)}{mean}"


def _noise_for(name: str, found: Calibration, space: dict[str, Any]) -> str:
    other = _other(name, found, space)
    if "highest_mse" in other:
        return f"no noise is enough, it ends at ±{format_limit(other['highest_mse'] ** 0.5)}"
    noise = other[found.mechanism.noise_field]
    return "met without noise" if noise is None else format_noise(noise, 4)


def print_epsilon_calibration(
    mechanism: SampledGaussian | OutputPerturbation,
    target: float,
    delta: float,
    adjacency: str | None,
    bound: str,
    space: dict[str, Any],
    data: DataSpace,
    notes: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """The noise for an ε, and the floor that comes with it."""
    noise = getattr(mechanism, mechanism.noise_field)
    replace_one, add_remove = (mechanism.epsilon_at(delta, which) for which in ADJACENCIES)
    reached = floor(bound, mechanism, **space)
    assert reached is not None  # both mechanisms have every floor
    which = adjacency or ADJACENCIES[0]
    known = mechanism.protection(delta)
    if as_json:
        facts = {mechanism.noise_field: noise, "target_epsilon": target, "adjacency": which, "delta": delta}
        facts |= {"epsilon": replace_one, "epsilon_add_remove": add_remove, "bound": reached.to_dict()}
        facts |= {"success_at_1_percent": known.success, "meaningful": known.meaningful}
        facts |= {"randomness": mechanism.randomness, "notes": [*notes, *mechanism.notes(), *data.notes()]}
        facts |= {"data": data.to_dict()}
        print_json({**facts, "mechanism": {**mechanism.to_dict(), "sampler": mechanism.sampler}})
        return
    what = mechanism.noise_field.replace("_", " ")
    if known.warning():
        print(known.warning())
    at = f"ε at most {format_limit(target, 6)} ({which}) at δ = {format_limit(delta, 6)}"
    print(f"The smallest {what} with {at}: {format_noise(noise, 5)}")
    print(reached)
    print(_epsilons(mechanism, replace_one, add_remove, delta))
    print(known.sentence())
    if adjacency is None:
        print("Opacus and TF Privacy count add/remove: for an ε of theirs say --adjacency add/remove.")
    for note in (*notes, *mechanism.notes(), *data.notes()):
        print(f"Note: {note}")
