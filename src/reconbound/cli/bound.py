"""reconbound bound: the guarantee of a mechanism, before any data. torch is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from reconbound._internal.formatting import format_floor, format_limit, format_percent
from reconbound.bounds.bound import NOT_PROVED
from reconbound.cli.mechanism import OPTIONS, SPACE, assumption_notes, make_mechanism
from reconbound.cli.options import print_json, takes, terminal
from reconbound.mechanisms import Mechanism, SampledGaussian
from reconbound.mechanisms.guarantee import Guarantee, guarantee


@takes("space", SPACE)
@takes("given", OPTIONS)
def bound_command(
    *,
    given: dict[str, Any],
    space: dict[str, Any],
    baseline: Annotated[
        float | None, typer.Option(help="MSE of a plain guess on your data (default: guess the middle).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print what a mechanism guarantees against reconstruction, in the units of your data."""
    delta = given.get("delta")
    delta = 1e-5 if delta is None or (delta == 0 and "epsilon" in given) else delta
    mechanism = make_mechanism(given)
    found = guarantee(mechanism, delta=delta, baseline=baseline, **space)
    notes = (*assumption_notes(given), *found.notes)
    if as_json:
        print_json({**found.to_dict(), "notes": notes})
    else:
        print_guarantee(found, default=not given, notes=notes)


def print_guarantee(found: Guarantee, *, default: bool, notes: Sequence[str]) -> None:
    """Prints the guarantee: in short, the floors as a table, chances and ε, and what they assume."""
    console = terminal()
    unit = f" {found.bounds[0].units}" if found.bounds[0].units else ""
    if default:
        console.print("No mechanism was given: this is the default one. See reconbound bound --help.", style="italic")
    console.print(found.in_short)
    console.print(str(found.mechanism), style="bold")
    console.print(f"{found.box}.")
    _print_floors(found, unit, console)
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

    whose = "of unbiased attackers on every record, of any attacker on some record"
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
        f"attackers who are unbiased all over {found.space.place}. Floors for any attacker hold on some record in "
        f"{found.space.place}, the hardest for it; on other records, those trained on included, it may err by less. "
        f"Chances and mean errors are over {found.mechanism.randomness}."
    )
    if found.dim > 1 and found["theorem1"].coordinates == "average":
        text += " lecam holds for each coordinate by itself, the others for the average over the coordinates."
    elif found.dim > 1:
        text += (
            " theorem1 and lecam hold for each coordinate by itself. corners and rate_distortion hold for the average "
            "over the coordinates; some may be known much better."
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
