"""The command line. A sub-command parses, calls one library function and prints; torch is never imported here."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ._check import InputError
from .calculator import FLOORS, Guarantee, guarantee
from .calibrate import Calibration, calibrate
from .mechanisms import DP, Mechanism, OutputPerturbation, RenyiDP, SampledGaussian

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How well is each training record protected against reconstruction?",
)

#: What `reconbound bound` without a mechanism speaks of.
DEFAULT = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}

Noise = Annotated[float | None, typer.Option(help="Noise std on the SUM of clipped gradients over the clip norm.")]
Rate = Annotated[float | None, typer.Option(help="Chance of a record to be in a batch.")]
Steps = Annotated[int | None, typer.Option(help="Number of steps.")]
Clip = Annotated[str | None, typer.Option(help="smooth (the paper's GELU clip; default) or hard (as in Opacus).")]
Sampler = Annotated[str | None, typer.Option(help="poisson (default) or fixed (fixed size without replacement).")]
Epsilon = Annotated[float | None, typer.Option(help="Of the mechanism only this epsilon is known.")]
Rdp2 = Annotated[float | None, typer.Option("--rdp2", help="Only its order-2 Renyi divergence (replace-one) is known.")]
Adjacency = Annotated[str | None, typer.Option(help="Neighbours of --epsilon: replace-one (default) or add/remove.")]
Delta = Annotated[
    float | None, typer.Option(help="Delta at which epsilon is reported (1e-5), or that of --epsilon (0).")
]
Output = Annotated[bool, typer.Option("--output-perturbation", help="Noise on the minimiser of a linear model.")]
Records = Annotated[int | None, typer.Option(help="Output perturbation: number of records.")]
L2 = Annotated[float | None, typer.Option("--l2", help="Output perturbation: regularisation, as in mean loss + l2/2.")]
NoiseStd = Annotated[float | None, typer.Option(help="Output perturbation: noise std per coefficient.")]
DataNorm = Annotated[float | None, typer.Option(help="Output perturbation: norm to which rows are clipped (1).")]
Dim = Annotated[int, typer.Option(help="Number of private coordinates of a record.")]
Low = Annotated[float, typer.Option(help="Smallest value of a coordinate.")]
High = Annotated[float, typer.Option(help="Largest value of a coordinate.")]
Baseline = Annotated[float | None, typer.Option(help="MSE of a plain guess on your data (default: guess the middle).")]
Units = Annotated[str, typer.Option(help="Unit of the data, for printing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.callback()
def _group() -> None:
    """How well is each training record protected against reconstruction?"""


@app.command("bound")
def bound_command(
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    clip: Clip = None,
    sampler: Sampler = None,
    epsilon: Epsilon = None,
    rdp2: Rdp2 = None,
    adjacency: Adjacency = None,
    delta: Delta = None,
    output_perturbation: Output = False,
    records: Records = None,
    l2: L2 = None,
    noise_std: NoiseStd = None,
    data_norm: DataNorm = None,
    dim: Dim = 1,
    low: Low = 0.0,
    high: High = 1.0,
    baseline: Baseline = None,
    units: Units = "",
    as_json: Json = False,
) -> None:
    """What a mechanism guarantees against reconstruction, in the units of your data."""
    given = _given(locals())
    mechanism = _mechanism(given)
    report_delta = 1e-5 if delta is None or (delta == 0 and epsilon is not None) else delta
    found = guarantee(mechanism, dim=dim, low=low, high=high, delta=report_delta, baseline=baseline, units=units)
    _print_json(found.to_dict()) if as_json else _print_guarantee(found, default=not given)


@app.command("calibrate")
def calibrate_command(
    target_mse: Annotated[float | None, typer.Option(help="Squared error per coordinate that must be kept.")] = None,
    bound: Annotated[str, typer.Option(help=f"The floor that must keep it: {', '.join(FLOORS)}.")] = "theorem1",
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    clip: Clip = None,
    sampler: Sampler = None,
    epsilon: Epsilon = None,
    rdp2: Rdp2 = None,
    adjacency: Adjacency = None,
    delta: Delta = None,
    output_perturbation: Output = False,
    records: Records = None,
    l2: L2 = None,
    noise_std: NoiseStd = None,
    data_norm: DataNorm = None,
    dim: Dim = 1,
    low: Low = 0.0,
    high: High = 1.0,
    units: Units = "",
    as_json: Json = False,
) -> None:
    """The smallest noise with which a floor meets a target."""
    given = _given(locals())
    if target_mse is None:
        raise typer.BadParameter("is missing", param_hint="--target-mse")
    for name in ("epsilon", "rdp2"):
        if name in given:
            raise InputError(name, "has no noise to calibrate: describe the mechanism instead", given[name])
    noise = "noise_std" if output_perturbation else "noise_multiplier"
    if noise in given:
        raise InputError(noise, "must be left out: calibrate finds it", given[noise])
    mechanism = _mechanism({**given, noise: 1.0})
    assert isinstance(mechanism, (SampledGaussian, OutputPerturbation))
    found = calibrate(mechanism, target_mse, bound=bound, dim=dim, low=low, high=high, units=units)
    report_delta = 1e-5 if delta is None else delta
    eps = found.mechanism.epsilon_at(report_delta)
    if as_json:
        _print_json(_calibration_dict(found, eps, report_delta))
    else:
        _print_calibration(found, eps, report_delta)


# --- from options to a mechanism -----------------------------------

_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # trigger -> needed, allowed
    "noise_multiplier": (("noise_multiplier", "sample_rate", "steps"), ("clip", "sampler")),
    "epsilon": (("epsilon",), ("adjacency",)),
    "rdp2": (("rdp2",), ()),
    "output_perturbation": (("records", "l2", "noise_std"), ("data_norm",)),
}
_MECHANISM_OPTIONS = {name for needed, allowed in _KINDS.values() for name in (*needed, *allowed)} | set(_KINDS)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The mechanism options that the user gave (and delta)."""
    return {
        k: v for k, v in options.items() if k in _MECHANISM_OPTIONS | {"delta"} and v is not None and v is not False
    }


def _mechanism(given: dict[str, Any]) -> Mechanism:
    """The one mechanism that the options describe; a clear line about what is missing or too much."""
    delta = given.get("delta", 0.0)
    chosen = {k: v for k, v in given.items() if k != "delta"}
    if not chosen:
        return SampledGaussian(**DEFAULT)  # type: ignore[arg-type]
    kind: str = next((k for k in ("output_perturbation", "epsilon", "rdp2") if k in chosen), "noise_multiplier")
    needed, allowed = _KINDS[kind]
    for name in chosen:
        if name not in (*needed, *allowed, kind):
            raise typer.BadParameter(f"does not go with {_option(kind)}", param_hint=_option(name))
    for name in needed:
        if name not in chosen:
            need = "" if name == kind else f": {_option(kind)} needs it"
            raise typer.BadParameter(f"is missing{need}", param_hint=_option(name))
    values = {k: v for k, v in chosen.items() if k != "output_perturbation"}
    if kind == "epsilon":
        return DP(values["epsilon"], delta, values.get("adjacency", "replace-one"))
    if kind == "rdp2":
        return RenyiDP(values["rdp2"])
    return SampledGaussian(**values) if kind == "noise_multiplier" else OutputPerturbation(**values)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


# --- printing -----------------------------------


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def _calibration_dict(found: Calibration, eps: float | None, delta: float) -> dict[str, Any]:
    return {
        found.mechanism.noise_field: found.noise,
        "target_mse": found.target,
        "mse": found.bound.value,
        "bound": found.bound.to_dict(),
        "mechanism": {**found.mechanism.to_dict(), "sampler": found.mechanism.sampler},
        "epsilon": eps,
        "delta": delta,
    }


def _unit(units: str) -> str:
    return f" {units}" if units else ""


def _print_guarantee(found: Guarantee, *, default: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    units = found.bounds[0].units
    if default:
        console.print("No mechanism was given: this is the default one. See reconbound bound --help.", style="italic")
    console.print(str(found.mechanism), style="bold")
    plural = "s" if found.dim != 1 else ""
    console.print(
        f"Records of {found.dim:,} private coordinate{plural} in [{found.low:g}, {found.high:g}]{_unit(units)}."
    )
    inside = f", in{_unit(units)}" if units else ""
    table = Table(title=f"No attacker of the kind named errs by less, per coordinate{inside}", title_justify="left")
    for name in ("floor", "± error", "MSE", "attacker", "neighbours", "error vs. a guess"):
        numeric = name in ("± error", "MSE")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric or name in ("floor", "attacker"))
    for bound in found.bounds:
        says = "says nothing" if bound.vacuous else "≥ a guess" if bound.above_guess else _share(bound)
        table.add_row(bound.name, f"{bound.rmse:.3g}", f"{bound.mse:.3g}", bound.attacker, bound.adjacency, says)
    console.print(table)
    guess = found.bounds[0].guess
    if guess is not None:
        console.print(f"A plain guess (of the middle, or as you gave it) errs by ±{guess**0.5:.3g}{_unit(units)}.")
    right = (1 + found.membership_advantage) / 2
    console.print(f"Telling two candidate records apart: right at most {right:.1%} of the time (advantage "
                  f"{found.membership_advantage:.3g}, replace-one).")  # fmt: skip
    parts = [f"{kappa:g} → {success:.3g}" for kappa, success in found.rero]
    console.print(f"Chance to reconstruct, by chance of a blind guess: {', '.join(parts)}.")
    known = [(found.epsilon, "replace-one"), (found.epsilon_add_remove, "add/remove, as Opacus counts")]
    told = [f"ε = {eps:.4g} ({which})" for eps, which in known if eps is not None]
    if told:
        console.print(f"At δ = {found.delta:g}: {'; '.join(told)}.")
    console.print(
        "The attacker knows every other record and sees the whole release. Unbiased floors hold at every record; "
        "floors for any attacker hold in the worst case over the box. theorem1_paper is the paper's own line, and no "
        "guarantee where it is above theorem1.",
        style="dim",
    )


def _share(bound: Any) -> str:
    return f"{bound.rmse / bound.guess**0.5:.0%} of a guess" if bound.guess else ""


def _print_calibration(found: Calibration, eps: float | None, delta: float) -> None:
    what = {"noise_multiplier": "noise multiplier", "noise_std": "noise standard deviation"}[
        found.mechanism.noise_field
    ]
    typer.echo(f"The smallest {what} with {found.bound.name} at least {found.target:g}: {found.noise:.7g}")
    typer.echo(str(found.bound))
    if eps is not None:
        typer.echo(f"At δ = {delta:g}: ε = {eps:.4g} (replace-one).")


# --- the way in -----------------------------------


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status. Every error is one line on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return app(args=words or ["--help"], prog_name="reconbound", standalone_mode=False) or 0
    except InputError as error:
        name = _option(error.name) if error.name.isidentifier() else error.name
        message = f"{name} {error.requirement}, got {error.value}"
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.Abort:
        message = "stopped"
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's: a fault of ours, shown in full
            raise
        hint = getattr(error, "param_hint", None)
        message = f"{hint} {error.message}" if hint and hasattr(error, "message") else error.format_message()
        value = _value(words, getattr(getattr(error, "param", None), "opts", ()))
        if value is not None and value not in message:
            message = f"{message}, got {value}"
    print(f"reconbound: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _value(words: Sequence[str], options: Sequence[str]) -> str | None:
    """What was given for an option that could not be read."""
    for word, following in zip(reversed(words), [None, *reversed(words)], strict=False):
        name, equals, rest = word.partition("=")
        if name in options:
            return rest if equals else following
    return None


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± and ε shows a question mark
    sys.exit(run())


if __name__ == "__main__":
    main()
