"""reconbound bound: the guarantee of a mechanism, before any data; and the options that describe a mechanism.

torch is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from reconbound._internal.checks import number, rounded_up
from reconbound._internal.formatting import format_floor, format_limit, format_percent
from reconbound.bounds.bound import NOT_PROVED
from reconbound.cli.options import (
    Options,
    count,
    epochs_as_steps,
    option,
    plain_errors,
    print_json,
    print_line,
    ratio,
    takes,
    terminal,
)
from reconbound.cli.risk import RISK, check_curve, find_risks, print_risks, risk_facts, write_curve
from reconbound.mechanisms import (
    DP,
    GDP,
    ZCDP,
    Mechanism,
    OutputPerturbation,
    RenyiDP,
    SampledGaussian,
    read_opacus_state,
    read_schedule,
)
from reconbound.mechanisms.group import group_of
from reconbound.mechanisms.guarantee import Guarantee, guarantee
from reconbound.mechanisms.sampled_gaussian import fewest_batches

#: The options that describe the data.
SPACE: Options = {
    "dim": (count, "Number of private coordinates of a record (1): 784, or 3x32x32."),
    "low": (float, "Smallest value of a coordinate (0; see --data-norm)."),
    "high": (float, "Largest value of a coordinate (1; see --data-norm)."),
    "units": (str, "Unit of the data, for printing.", {"names": ("--units", "--unit")}),
}
#: The options that describe a mechanism: type and help.
OPTIONS: Options = {
    "noise_multiplier": (float, "Noise std on the SUM of clipped gradients over the clip norm, as in Opacus."),
    "sample_rate": (ratio, "Chance of a record to be in a batch: 0.01, or 256/50000."),
    "steps": (count, "Number of steps: epochs over the sample rate."),
    "epochs": (float, "The same as passes over the data: epochs over the sample rate are the steps, rounded up."),
    "clip": (str, "smooth (the paper's GELU clip; default) or hard (as in Opacus)."),
    "sampler": (
        str,
        "poisson (default), fixed (a size, without replacement) or shuffle (epochs: no protection counted).",
    ),
    "epsilon": (float, "Of the mechanism only this epsilon is known."),
    "rdp2": (float, "Only its order-2 Renyi divergence is known; see --adjacency."),
    "mu": (float, "Only mu-Gaussian DP is known; see --adjacency."),
    "rho": (float, "Only rho-zCDP is known; see --adjacency."),
    "schedule": (
        Path,
        "JSON file with stretches of private SGD whose noise, clipping or rate differ: a list of "
        '{"noise_multiplier": 1, "sample_rate": 0.01, "steps": 500}.',
    ),
    "opacus_state": (
        Path,
        "What Opacus recorded of its steps: a checkpoint of save_checkpoint, or the accountant's state_dict() as JSON "
        "or by torch.save.",
    ),
    "adjacency": (
        str,
        "Neighbours of --epsilon, --rdp2, --mu or --rho: replace-one (assumed, with a note, when left out), or "
        "add/remove (as Opacus and most libraries count; the safe choice).",
    ),
    "delta": (float, "Delta at which epsilon is reported (1e-5), or that of --epsilon (0)."),
    "output_perturbation": (bool, "Noise on the minimiser of a linear model."),
    "records": (count, "Output perturbation: number of records."),
    "l2": (float, "Output perturbation: regularisation, as in mean loss + l2/2 |w|^2."),
    "noise_std": (float, "Output perturbation: noise std per coefficient."),
    "data_norm": (
        float,
        "Output perturbation: norm to which rows are clipped, a constant feature not counted (1); floors are for the "
        "ball of this radius.",
    ),
    "loss": (str, "Output perturbation: the loss: logistic (two classes), softmax, or squared (ridge)."),
    "target_bound": (float, "Output perturbation with squared loss: targets are clipped to this size."),
    "intercept": (bool, "Output perturbation: rows have a constant feature 1 beside."),
}

#: The mechanism of `reconbound bound` without options.
DEFAULT = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # trigger -> needed, allowed
    "output_perturbation": (("loss", "records", "l2", "noise_std"), ("data_norm", "target_bound", "intercept")),
    "noise_multiplier": (("noise_multiplier", "sample_rate", "steps"), ("clip", "sampler", "epochs")),
    "epsilon": (("epsilon",), ("adjacency",)),
    "rdp2": (("rdp2",), ("adjacency",)),
    "mu": (("mu",), ("adjacency",)),
    "rho": (("rho",), ("adjacency",)),
    "schedule": (("schedule",), ()),
    "opacus_state": (("opacus_state",), ("clip", "sampler")),
}
#: The note where an epsilon was given without its delta.
NO_DELTA = (
    "no δ was given with ε, so δ = 0 was assumed, which Gaussian noise never gives. An ε from Opacus, TF Privacy and "
    "most libraries for private SGD holds at a δ, and these floors do not follow from it: give --delta, or better "
    "describe the mechanism."
)
#: The note where it was not given how batches are drawn.
NO_SAMPLER = (
    "Poisson sampling was assumed: each record is in each batch with the same chance, drawn independently. A loader "
    "that shuffles (torch's DataLoader with shuffle=True) protects less: give --sampler shuffle, or --sampler fixed "
    "for uniform batches of one size."
)
#: The note beside every schedule from a file.
NO_STRETCH_SAMPLER = (
    'stretches without a "sampler" were counted with Poisson batches, and those without a "clip" with the smooth clip. '
    "A loader that shuffles protects less."
)


def assumption_notes(given: dict[str, Any]) -> tuple[str, ...]:
    """Returns the assumptions that the options leave open.

    Args:
        given: the options that describe the mechanism, and delta.
    """
    notes = []
    if "epsilon" in given and "delta" not in given:
        notes.append(NO_DELTA)
    sampled = "sampler" not in given and float(given.get("sample_rate", DEFAULT["sample_rate"])) < 1
    if sampled and not {"epsilon", "rdp2", "mu", "rho", "schedule", "output_perturbation"} & set(given):
        notes.append(NO_SAMPLER)
    if "schedule" in given:
        notes.append(NO_STRETCH_SAMPLER)
    if given.get("sampler") == "shuffle" and "steps" in given and "sample_rate" in given:
        batches = fewest_batches(given["sample_rate"])
        epochs = math.ceil(given["steps"] / batches)
        notes.append(
            f"{given['steps']:,} steps of shuffled batches were counted as {epochs:,} epochs of {batches:,} batches "
            "(the last one dropped), so that no loader takes more. Give --epochs if you know them."
        )
    return tuple(notes)


def make_mechanism(given: dict[str, Any], searched: str | None = None) -> Mechanism:
    """Returns the one mechanism that the options describe; refuses missing options and those that do not fit.

    Args:
        given: the options that describe the mechanism, and delta.
        searched: the noise that calibrate looks for, so that the user did not give it.
    """
    chosen = {k: v for k, v in given.items() if k != "delta"}
    if not chosen:
        return SampledGaussian(**DEFAULT)  # type: ignore[arg-type]
    kind: str = next((k for k in _KINDS if k != "noise_multiplier" and k in chosen), "noise_multiplier")
    needed, allowed = _KINDS[kind]
    for name in chosen:
        if name not in (*needed, *allowed, kind):
            raise typer.BadParameter(f"does not go with {option(kind)}", param_hint=option(name))
    if "epochs" in chosen:
        if "steps" in chosen:
            raise typer.BadParameter("does not go with --steps", param_hint="--epochs")
        shuffled = chosen.get("sampler") == "shuffle"  # a record is in one batch of each epoch, whatever their size
        needed = tuple(name for name in needed if name != "steps" and not (shuffled and name == "sample_rate"))
    _check_needed(chosen, needed, kind, searched)
    stated = _stated(kind, chosen, given.get("delta", 0.0))
    if stated is not None:
        return stated
    if kind == "output_perturbation":
        if chosen["loss"] == "squared" and "target_bound" not in chosen:
            raise typer.BadParameter("is missing: --loss squared needs it", param_hint="--target-bound")
        return OutputPerturbation(**{k: v for k, v in chosen.items() if k != kind})
    return _private_sgd(chosen)


def _stated(kind: str, chosen: dict[str, Any], delta: float) -> Mechanism | None:
    """Returns the mechanism of which only a statement or a file is given; None for other kinds."""
    adjacency = chosen.get("adjacency")
    if kind == "epsilon":
        return DP(chosen["epsilon"], delta, adjacency)
    if kind == "rdp2":
        return RenyiDP(number("rdp2", chosen["rdp2"], at_least=0.0), 2.0, adjacency)
    if kind == "mu":
        return GDP(chosen["mu"], adjacency)
    if kind == "rho":
        return ZCDP(chosen["rho"], 0.0, adjacency)
    with plain_errors():
        if kind == "schedule":
            return read_schedule(chosen["schedule"])
        if kind == "opacus_state":
            settings = {"clip": "hard", **{k: v for k, v in chosen.items() if k != kind}}
            return read_opacus_state(chosen["opacus_state"], **settings)
    return None


def _check_needed(chosen: dict[str, Any], needed: tuple[str, ...], kind: str, searched: str | None) -> None:
    """Refuses a missing option."""
    for name in needed:
        if name not in chosen:
            need = "" if name == kind or searched == kind else f": {option(kind)} needs it"
            if name in ("sample_rate", "steps") and searched == kind:
                need = ": private SGD needs it (or give --output-perturbation, --loss, --records and --l2)"
            either = " (or --epochs)" if name == "steps" else " (logistic, softmax or squared)" * (name == "loss")
            raise typer.BadParameter(f"is missing{either}{need}", param_hint=option(name))


def _private_sgd(chosen: dict[str, Any]) -> SampledGaussian:
    """Returns private SGD of T steps, or of epochs; in a shuffled epoch a record is in one batch."""
    noise, clip, sampler = chosen["noise_multiplier"], chosen.get("clip", "smooth"), chosen.get("sampler", "poisson")
    if sampler == "shuffle":
        if "sample_rate" in chosen:
            number("sample_rate", chosen["sample_rate"], above=0.0, at_most=1.0)
        if "epochs" in chosen:
            epochs = rounded_up(number("epochs", chosen["epochs"], above=0.0, at_most=1e15))
            return SampledGaussian(noise, 1.0, epochs, clip, sampler)
        return SampledGaussian.shuffled(noise, fewest_batches(chosen["sample_rate"]), chosen["steps"], clip)
    steps = epochs_as_steps(chosen["epochs"], chosen["sample_rate"]) if "epochs" in chosen else chosen["steps"]
    return SampledGaussian(noise, chosen["sample_rate"], steps, clip, sampler)


@takes(given=OPTIONS, space=SPACE, asked=RISK)
def bound_command(
    *,
    given: dict[str, Any],
    space: dict[str, Any],
    asked: dict[str, Any],
    baseline: Annotated[
        float | None, typer.Option(help="MSE of a plain guess on your data (default: guess the middle).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print what a mechanism guarantees against reconstruction, in the units of your data."""
    delta = given.get("delta")
    delta = 1e-5 if delta is None or (delta == 0 and "epsilon" in given) else delta
    if "curve" in asked:
        check_curve(asked["curve"])
    mechanism = group_of(make_mechanism(given), asked.get("group", 1))
    found = guarantee(mechanism, delta=delta, baseline=baseline, **space)
    known = find_risks(mechanism, asked)
    notes = (*assumption_notes(given), *found.notes)
    if "curve" in asked:
        write_curve(asked["curve"], known, mechanism)
    if as_json:
        print_json({**found.to_dict(), "risks": risk_facts(known), "notes": notes})
        return
    print_guarantee(found, default=not given, notes=notes, print_table=partial(print_risks, known, asked))
    if "curve" in asked:
        print_line(asked["curve"])


def print_guarantee(
    found: Guarantee, *, default: bool, notes: Sequence[str], print_table: Callable[[Any], None]
) -> None:
    """Prints the guarantee: in short, the floors and the risks as tables, chances and ε, and what they assume."""
    console = terminal()
    unit = f" {found.bounds[0].units}" if found.bounds[0].units else ""
    if default:
        console.print("No mechanism was given: this is the default one. See reconbound bound --help.", style="italic")
    console.print(found.in_short)
    console.print(str(found.mechanism), style="bold")
    console.print(f"{found.box}.")
    _print_floors(found, unit, console)
    print_table(console)
    for note in notes:
        console.print(f"Note: {note}")
    guess = found.bounds[0].guess
    if guess is not None:
        console.print(f"A plain guess (of the middle, or as you gave it) errs by ±{format_limit(guess**0.5)}{unit}.")
    right = (1 + found.membership_advantage) / 2
    console.print(f"Telling two candidate records apart: right at most {format_percent(right)} of the time (advantage "
                  f"{format_limit(found.membership_advantage)}, replace-one).")  # fmt: skip
    (blind, success), *more = found.rero
    parts = "".join(f"; {format_percent(kappa, side='near')} → {format_percent(rebuilt)}" for kappa, rebuilt in more)
    console.print(
        f"A record that a blind guess gets right {format_percent(blind, side='near')} of the time is rebuilt "
        f"{format_percent(success)} of the time at most{parts}."
    )
    epsilons = format_epsilons(found.mechanism, found.epsilon, found.epsilon_add_remove, found.delta)
    if epsilons:
        console.print(epsilons)
    console.print(_assumptions(found), style="dim")


def _print_floors(found: Guarantee, unit: str, console: Any) -> None:
    """Prints the floors as a table, or as a list where the terminal is too narrow for it."""
    from rich.table import Table

    whose = "of unbiased attackers on every record (lecam_unbiased: on average), of any attacker on some record"
    title = f"Least error per coordinate{f', in{unit}' if unit else ''}: {whose}"
    table = Table(title=title, title_justify="left")
    for name in ("floor", "± error", "MSE", "attacker", "neighbours", "error vs. a guess"):
        numeric = name in ("± error", "MSE")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric or name in ("floor", "attacker"))
    for bound in found.bounds:
        guess = f"{format_percent(bound.rmse / bound.guess**0.5, 2, 'down')} of a guess" if bound.guess else ""
        guess = "says nothing" if bound.vacuous else "≥ a guess" if bound.above_guess else guess
        guess = guess if bound.proved else NOT_PROVED
        errors = format_floor(bound.rmse), format_floor(bound.mse)
        table.add_row(bound.name, *errors, bound.attacker, bound.adjacency, guess)
    with console.capture() as drawn:
        console.print(table)
    if "…" not in drawn.get():
        console.print(table)
        return
    console.print(f"{title}:")
    for bound in found.bounds:
        console.print(f"- {bound}")


def _assumptions(found: Guarantee) -> str:
    """Returns what the floors assume and which of them hold for each coordinate."""
    text = (
        "The attacker knows every other record and sees the whole release. Unbiased floors hold at every record, for "
        f"attackers who are unbiased all over {found.space.place}; lecam_unbiased holds on average over both ends of a "
        f"coordinate. Floors for any attacker hold on some record in {found.space.place}, the hardest for it; on other "
        "records, those trained on included, it may err by less. Chances and mean errors are over "
        f"{found.mechanism.randomness}."
    )
    if found.dim > 1 and found["theorem1"].coordinates == "average":
        text += (
            " lecam and lecam_unbiased hold for each coordinate by itself, the others for the average over the "
            "coordinates."
        )
    elif found.dim > 1:
        text += (
            " theorem1, lecam_unbiased and lecam hold for each coordinate by itself. corners and rate_distortion hold "
            "for the average over the coordinates; some may be known much better."
        )
    if any(bound.name == "theorem1_paper" for bound in found.bounds):
        text += f" theorem1_paper is the paper's own line: {NOT_PROVED}."
    return text


def format_epsilons(mechanism: Mechanism, replace_one: float | None, add_remove: float | None, delta: float) -> str:
    """Returns one line about (ε, δ); empty where the mechanism does not say.

    Args:
        mechanism: the mechanism.
        replace_one: ε for replace-one neighbours.
        add_remove: ε for add/remove neighbours.
        delta: the δ of both.
    """
    opacus = ""
    if isinstance(mechanism, SampledGaussian) and mechanism.sampler == "poisson":
        opacus = ", as Opacus counts" if mechanism.clip == "hard" else "; for Opacus' clipping use --clip hard"
    known = [(replace_one, "replace-one"), (add_remove, f"add/remove{opacus}")]
    epsilons = [f"ε = {format_limit(epsilon, 4)} ({which})" for epsilon, which in known if epsilon is not None]
    return f"At δ = {format_limit(delta, 6)}: {'; '.join(epsilons)}." if epsilons else ""
