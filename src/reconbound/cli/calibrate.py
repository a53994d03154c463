"""reconbound calibrate: the smallest noise for a floor, an epsilon or a risk. torch is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from reconbound._internal.checks import InputError, number
from reconbound._internal.formatting import format_floor, format_limit, format_noise, format_percent
from reconbound.bounds.bound import NOT_PROVED, DataSpace, data_space
from reconbound.cli.bound import OPTIONS, SPACE, assumption_notes, format_epsilons, make_mechanism
from reconbound.cli.options import Options, count, option, print_json, ratio, takes, terminal
from reconbound.cli.risk import find_risks, print_risks, risk_facts
from reconbound.mechanisms import ADD_REMOVE, ADJACENCIES, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibrate import Calibration, OutOfReach, calibrate, calibrate_epsilon
from reconbound.mechanisms.calibrate_risk import RiskTarget, calibrate_risk
from reconbound.mechanisms.group import group_of
from reconbound.mechanisms.guarantee import FLOORS, floor

ADVICE = (
    "Use lecam or rate_distortion for attackers who may guess with a bias, as most do; theorem1 or corners for a "
    "statement about every single record, against unbiased attackers only."
)


_HELPS = {
    "adjacency": "Neighbours of --target-epsilon and of risks: replace-one (default; --target-success: without the "
    "record), or add/remove (as Opacus counts).",
    "delta": "Delta at which epsilon is reported (1e-5).",
}
#: Refused by name: --help leaves them out.
_HIDDEN = ("noise_multiplier", "epsilon", "rdp2", "mu", "rho", "schedule", "opacus_state", "noise_std")
MECHANISM: Options = {
    name: (kind, _HELPS.get(name, text), {**dict(*more), "hidden": name in _HIDDEN})
    for name, (kind, text, *more) in OPTIONS.items()
}
TARGETS: Options = {
    "target_mse": (float, "Squared error per coordinate that must be kept."),
    "target_error": (float, "The same as an error in data units: the root of --target-mse."),
    "target_epsilon": (float, "In place of a floor: the epsilon to reach, at --delta and --adjacency."),
    "target_advantage": (float, "For any attacker: the largest advantage of a membership test."),
    "target_tpr": (float, "For any attacker: the largest true-positive rate of a membership test, at --fpr."),
    "target_success": (float, "For any attacker: the largest chance to rebuild a record that a blind guess rebuilds "
                       "with the chance --baseline."),
    "target_mu": (float, "For any attacker: mu of Gaussian differential privacy."),
}  # fmt: skip
#: What risks are at or for.
LIMITS: Options = {
    "fpr": (ratio, "False-positive rate of --target-tpr."),
    "baseline": (ratio, "Chance of a blind guess, for --target-success: 0.1, or 1/50257 for a token."),
    "group": (count, "Rows of one person (1): the risk is for all of them together."),
}
#: What each target of a risk is at.
AT = {"target_advantage": "", "target_tpr": "fpr", "target_success": "baseline", "target_mu": ""}


@dataclass(frozen=True)
class Request:
    """Options of a calibration, apart from the mechanism and the target.

    Attributes:
        delta: the δ at which ε is reported.
        space: dim, low, high and units, as they were given.
        data: the data space that they describe.
        notes: assumptions that the options left open.
    """

    delta: float
    space: dict[str, Any]
    data: DataSpace
    notes: tuple[str, ...]

    def facts(self, mechanism: SampledGaussian | OutputPerturbation) -> dict[str, Any]:
        """Returns the mechanism and the data, for JSON."""
        return {
            "mechanism": {**mechanism.to_dict(), "sampler": mechanism.sampler},
            "delta": self.delta,
            "data": self.data.to_dict(),
            "randomness": mechanism.randomness,
            "notes": [*self.notes, *mechanism.notes(), *self.data.notes()],
        }

    def privacy(self, mechanism: SampledGaussian | OutputPerturbation, group: int = 1) -> dict[str, Any]:
        """Returns the noise and what else it means, for JSON, for this number of rows of one person."""
        together = group_of(mechanism, group)
        replace_one, add_remove = (together.epsilon_at(self.delta, adjacency) for adjacency in ADJACENCIES)
        protection = together.protection(self.delta)
        return {
            mechanism.noise_field: getattr(mechanism, mechanism.noise_field),
            "epsilon": replace_one,
            "epsilon_add_remove": add_remove,
            "success_at_1_percent": protection.success,
            "meaningful": protection.meaningful,
            "membership_advantage": together.membership_advantage(),
        }


@takes(targets=TARGETS, limits=LIMITS, given=MECHANISM, space=SPACE)
def calibrate_command(
    *,
    targets: dict[str, Any],
    limits: dict[str, Any],
    bound: Annotated[
        str,
        typer.Option(
            help=f"The floor that must keep it: {', '.join(FLOORS)}. theorem1, lecam_unbiased (unbiased attackers) and "
            "lecam (any) keep it in each coordinate, corners and rate_distortion on average over them."
        ),
    ] = "lecam",
    given: dict[str, Any],
    space: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Find the smallest noise with which a floor, epsilon or a risk meets a target."""
    _check_targets(given, list(targets))
    _check_limits(next(iter(targets)), limits)
    adjacency = given.pop("adjacency", None)
    noise = "noise_std" if given.get("output_perturbation") else "noise_multiplier"
    if noise in given:
        raise InputError(noise, "must be left out: calibrate finds it", given[noise])
    mechanism = make_mechanism({**given, noise: 1.0}, noise)
    assert isinstance(mechanism, (SampledGaussian, OutputPerturbation))
    data = data_space(space.get("dim", 1), space.get("low"), space.get("high"), mechanism.radius)
    request = Request(given.get("delta", 1e-5), space, data, assumption_notes(given))
    name, limit = next(iter(targets.items()))
    if name in AT:
        if name == "target_success" and mechanism.trade_off(ADD_REMOVE) is not None:
            adjacency = adjacency or ADD_REMOVE  # blind is who sees a release without the record
        target = RiskTarget(name.removeprefix("target_"), limit, limits.get(AT[name]), adjacency)
        _print_risk(mechanism, target, limits.get("group", 1), partial(floor, bound, **space), request, as_json)
        return
    if "target_epsilon" in targets:
        target_epsilon = targets["target_epsilon"]
        which = adjacency or ADJACENCIES[0]
        reached = calibrate_epsilon(mechanism, target_epsilon, delta=request.delta, adjacency=which)
        own = floor(bound, reached, **space)
        if as_json:
            facts = {"target_epsilon": target_epsilon, "adjacency": which, **request.privacy(reached)}
            print_json({**facts, **request.facts(reached), "bound": own.to_dict()})  # type: ignore[union-attr]
            return
        at = f"{format_limit(target_epsilon, 6)} ({which}) at δ = {format_limit(request.delta, 6)}"
        noise = format_noise(getattr(reached, reached.noise_field), 5)
        _print_mechanism(reached, f"ε at most {at}: {noise}", own, request)
        if adjacency is None:
            print("Opacus and TF Privacy count add/remove: for their ε use --adjacency add/remove.")
        _print_notes(reached, request)
        return
    found = _calibrate_floor(mechanism, bound, *targets.popitem(), request)
    if as_json:
        print_json(_calibration_facts(found, request))
    else:
        _print_calibration(found, request)


def _check_targets(given: dict[str, Any], asked: list[str]) -> None:
    """Refuses a mechanism without noise, and anything but one target."""
    for name, advice in (("epsilon", "use --target-epsilon for the noise that reaches it"),
                         ("rdp2", "describe the mechanism")):  # fmt: skip
        if name in given:
            raise InputError(name, f"has no noise to calibrate: {advice}", given[name])
    if not asked:
        others = ", ".join(option(name) for name in TARGETS if name != "target_mse")
        raise typer.BadParameter(f"is missing (or one of {others})", param_hint="--target-mse")
    if len(asked) > 1:
        raise typer.BadParameter(f"does not go with {option(asked[0])}", param_hint=option(asked[1]))
    if "adjacency" in given and asked[0] not in ("target_epsilon", *AT):
        raise typer.BadParameter("goes with --target-epsilon and with risks only", param_hint="--adjacency")


def _check_limits(target: str, limits: dict[str, Any]) -> None:
    """Refuses what a target is not at, and a missing rate or chance."""
    for name in limits:
        goes_with = list(AT) if name == "group" else [asked for asked, at in AT.items() if at == name]
        if target not in goes_with:
            which = ", ".join(option(one) for one in goes_with)
            raise typer.BadParameter(f"goes with {which} only", param_hint=option(name))
    needed = AT.get(target)
    if needed and needed not in limits:
        raise typer.BadParameter(f"is missing: {option(target)} needs it", param_hint=option(needed))


def _print_risk(mechanism: Any, target: RiskTarget, group: int, bound: Any, request: Request, as_json: bool) -> None:
    """Prints the noise for a risk and all that it means, or JSON.

    Args:
        mechanism: the mechanism without its noise.
        target: the risk.
        group: the number of rows of one person.
        bound: a function that returns the floor of a mechanism.
        request: the other options.
        as_json: whether to print JSON.
    """
    reached = calibrate_risk(mechanism, target, group=group)
    together = group_of(reached, group)
    found = find_risks(together, {"fpr": target.at} if target.measure == "tpr" else {})
    own = bound(reached)
    if as_json:
        asked = {"measure": target.measure, "limit": target.limit, "at": target.at, "adjacency": target.neighbours}
        facts = {"target": asked, "group": group, **request.privacy(reached, group), **request.facts(reached)}
        print_json({**facts, "risks": risk_facts(found), "bound": own.to_dict()})
        return
    noise = format_noise(getattr(reached, reached.noise_field), 5)
    rows = f", for {group:,} rows of one person" if group > 1 else ""
    _print_mechanism(reached, f"{target}, for any attacker{rows}: {noise}", own, request, group)
    print_risks(found, {"fpr": target.at} if target.measure == "tpr" else {}, terminal())
    _print_notes(reached, request)


def _calibrate_floor(
    mechanism: SampledGaussian | OutputPerturbation, bound: str, name: str, given: float, request: Request
) -> Calibration:
    """Returns the calibration for a floor; refuses a target that is out of reach, in the terms of its option."""
    data, target, power = request.data, given, 1.0
    if name == "target_error":  # the root of MSE
        target, power = number(name, given, above=0.0, at_least=1e-150, at_most=1e150) ** 2, 0.5
    given_by = "--low and --high" if data.ball is None else "--data-norm, --low and --high"
    own_limit = bound in ("lecam", "rate_distortion")  # below the range
    if not own_limit and data.widest > 0 and target > data.widest**2 * (1 + 1e-9):
        which = "the range" if name == "target_error" else "the square of the range"
        most = data.widest ** (2 * power)
        text = f"must be at most {most:g}, {which} of the data ({data.describe()}): give the range by {given_by}"
        raise InputError(name, text, given)
    try:
        return calibrate(mechanism, target, bound=bound, **request.space)
    except OutOfReach as error:
        where = f" on data in {data.describe()} ({given_by})"
        raise OutOfReach(name, error.bound, error.highest**power, given, where) from None


def _calibration_facts(found: Calibration, request: Request) -> dict[str, Any]:
    """Returns the calibration for JSON.

    "other_bounds" has the noise that each other bound would need, None where no noise is enough.
    """
    facts = request.facts(found.mechanism)
    facts |= {"target_mse": found.target, "mse": found.bound.value, "bound": found.bound.to_dict()}
    facts |= {"proved": found.bound.proved, "notes": [*_not_proved(found), *facts["notes"]]}
    if found.without_noise is None:
        others = {name: _other(name, found, request) for name in _others(found)}
        return {**request.privacy(found.mechanism), **facts, "other_bounds": others}
    field = found.mechanism.noise_field  # no noise is named, nor an ε: it would be that of the search's end
    facts |= {field: None, "epsilon": None, "epsilon_add_remove": None}
    facts |= {"mechanism": {**facts["mechanism"], field: None}}
    return {**facts, "met_without_noise": True, "never_drawn": found.without_noise}


def _not_proved(found: Calibration) -> tuple[str, ...]:
    """Returns the first sentence about noise for a floor that is not proved."""
    if found.bound.proved:
        return ()
    return (f"{found.bound.name} is {NOT_PROVED}: by it, this noise protects nobody. Use --bound theorem1.",)


def _others(found: Calibration) -> list[str]:
    """Returns the other floors, whose noise is reported beside."""
    return [name for name in FLOORS if name not in (found.bound.name, "theorem1_paper")]


def _other(name: str, found: Calibration, request: Request) -> dict[str, Any]:
    """Returns the noise that another floor needs for the same target, None where none is enough or none is needed."""
    field = found.mechanism.noise_field
    try:
        reached = calibrate(found.mechanism, found.target, bound=name, **request.space)
    except OutOfReach as error:
        return {field: None, "highest_mse": error.highest}
    return {field: None, "met_without_noise": True} if reached.without_noise is not None else {field: reached.noise}


def _print_calibration(found: Calibration, request: Request) -> None:
    """Prints the noise, the floor that it gives, and the noise that other floors would need for the same target."""
    for line in _not_proved(found):
        print(line)
    unit = f" {found.bound.units}" if found.bound.units else ""
    error = f"±{format_floor(found.target**0.5)}{unit}"
    if found.without_noise is not None:
        print(
            f"{error} is met without noise: with chance {format_percent(found.without_noise, 2, 'near')} a record is "
            f"never drawn in the whole run, and {found.bound.name} is an average over that. It protects no record that "
            "is drawn. Use a larger target, --bound theorem1, corners or rate_distortion, or --target-epsilon."
        )
        return
    what = f"{found.bound.name} at least {error} (MSE {format_floor(found.target)}): {format_noise(found.noise)}"
    _print_mechanism(found.mechanism, what, found.bound, request)
    print(f"{found.bound.name} binds {_kind(found.bound.name, request.data)}. The same target by another --bound:")
    for name in _others(found):
        other = _other(name, found, request)
        noise = other[found.mechanism.noise_field]
        shown = "met without noise" if noise is None else format_noise(noise, 4)
        if "highest_mse" in other:
            shown = f"no noise is enough, it ends at ±{format_limit(other['highest_mse'] ** 0.5)}"
        print(f"  {name} ({_kind(name, request.data)}): {shown}")
    print(f"{ADVICE} Records lie in {request.data.describe(found.bound.units)}.")
    _print_notes(found.mechanism, request)


def _print_mechanism(
    mechanism: SampledGaussian | OutputPerturbation, what: str, bound: Any, request: Request, group: int = 1
) -> None:
    """Prints the noise that was found, with the floor, ε, the advantage of a test and the chance to rebuild a record.

    Args:
        mechanism: with that noise.
        what: the target that it meets.
        bound: the floor, for one row.
        request: the other options.
        group: the number of rows of one person, for all but the floor.
    """
    together = group_of(mechanism, group)
    protection = together.protection(request.delta)
    if protection.warning():
        print(protection.warning())
    name = {"noise_multiplier": "noise multiplier", "noise_std": "noise standard deviation"}[mechanism.noise_field]
    print(f"The smallest {name} with {what}")
    print(bound)
    replace_one, add_remove = (together.epsilon_at(request.delta, adjacency) for adjacency in ADJACENCIES)
    line = format_epsilons(mechanism, replace_one, add_remove, request.delta)
    if line:
        print(line)
    advantage = format_percent(together.membership_advantage())
    print(f"No test tells two candidate records apart with an advantage above {advantage} (replace-one).")
    print(protection.sentence())


def _print_notes(mechanism: SampledGaussian | OutputPerturbation, request: Request) -> None:
    for note in request.facts(mechanism)["notes"]:
        print(f"Note: {note}")


def _kind(name: str, data: DataSpace) -> str:
    """Returns whom a floor binds, where, and whether on average over the coordinates."""
    average = name in ("corners", "rate_distortion") or (name == "theorem1" and data.place != "the box")
    mean = ", on average over the coordinates" if data.dim > 1 and average else ""
    if name == "theorem1_paper":
        return "nobody: the paper's own line, to compare with"
    if name == "lecam_unbiased":
        return f"unbiased attackers, on average over the ends of the range{mean}"
    some = name in ("lecam", "rate_distortion")
    return f"{f'any attacker, on some record of {data.place}' if some else 'unbiased attackers, at every record'}{mean}"
