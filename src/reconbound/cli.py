"""The command line. A sub-command parses, calls one library function and prints; torch is never imported here."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import __version__
from ._check import DataError, InputError, number
from .calculator import FLOORS, guarantee
from .calibrate import calibrate
from .commands import register
from .commands.options import STOPPED, Told, count, one_line, ratio
from .commands.printing import calibration_dict, print_calibration, print_guarantee, print_json
from .mechanisms import DP, Mechanism, OutputPerturbation, RenyiDP, SampledGaussian

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How well is each training record protected against reconstruction?",
)

#: What `reconbound bound` without a mechanism speaks of.
DEFAULT = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}


Noise = Annotated[
    float | None,
    typer.Option(
        help="Noise std on the SUM of clipped gradients over the clip norm, as in Opacus; the clip norm itself does "
        "not matter."
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(parser=ratio, metavar="<float>", help="Chance of a record to be in a batch: 0.01, or 256/50000."),
]
Steps = Annotated[
    int | None, typer.Option(parser=count, metavar="<int>", help="Number of steps: epochs over the sample rate.")
]
Clip = Annotated[str | None, typer.Option(help="smooth (the paper's GELU clip; default) or hard (as in Opacus).")]
Sampler = Annotated[str | None, typer.Option(help="poisson (default) or fixed (fixed size without replacement).")]
Epsilon = Annotated[float | None, typer.Option(help="Of the mechanism only this epsilon is known.")]
Rdp2 = Annotated[float | None, typer.Option("--rdp2", help="Only its order-2 Renyi divergence (replace-one) is known.")]
Adjacency = Annotated[
    str | None,
    typer.Option(
        help="Neighbours of --epsilon: replace-one (default), or add/remove (as Opacus and most libraries for private "
        "SGD report it, and the safe choice)."
    ),
]
Delta = Annotated[
    float | None, typer.Option(help="Delta at which epsilon is reported (1e-5), or that of --epsilon (0).")
]
Output = Annotated[bool, typer.Option("--output-perturbation", help="Noise on the minimiser of a linear model.")]
Records = Annotated[
    int | None, typer.Option(parser=count, metavar="<int>", help="Output perturbation: number of records.")
]
L2 = Annotated[float | None, typer.Option("--l2", help="Output perturbation: regularisation, as in mean loss + l2/2.")]
NoiseStd = Annotated[float | None, typer.Option(help="Output perturbation: noise std per coefficient.")]
DataNorm = Annotated[float | None, typer.Option(help="Output perturbation: norm to which rows are clipped (1).")]
Dim = Annotated[
    int,
    typer.Option(parser=count, metavar="<int>", help="Number of private coordinates of a record: 784, or 3x32x32."),
]
Low = Annotated[float, typer.Option(help="Smallest value of a coordinate.")]
High = Annotated[float, typer.Option(help="Largest value of a coordinate.")]
Baseline = Annotated[float | None, typer.Option(help="MSE of a plain guess on your data (default: guess the middle).")]
Units = Annotated[str, typer.Option(help="Unit of the data, for printing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"reconbound {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
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
    unsaid = epsilon is not None and adjacency is None
    print_json(found.to_dict()) if as_json else print_guarantee(found, default=not given, unsaid=unsaid)


@app.command("calibrate")
def calibrate_command(
    target_mse: Annotated[float | None, typer.Option(help="Squared error per coordinate that must be kept.")] = None,
    target_error: Annotated[
        float | None, typer.Option(help="The same as an error in data units: the root of --target-mse.")
    ] = None,
    bound: Annotated[
        str,
        typer.Option(
            help=f"The floor that must keep it: {', '.join(FLOORS)}. theorem1 (unbiased attackers) and lecam (any) "
            "keep it in each coordinate, corners and rate_distortion on average over them."
        ),
    ] = "theorem1",
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
    if target_mse is not None and target_error is not None:
        raise typer.BadParameter("does not go with --target-mse", param_hint="--target-error")
    if target_error is not None:
        target_mse = number("target_error", target_error, above=0.0, at_most=1e150) ** 2
    if target_mse is None:
        raise typer.BadParameter("is missing (or --target-error)", param_hint="--target-mse")
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
    if as_json:
        print_json(calibration_dict(found, found.mechanism.epsilon_at(report_delta), report_delta))
    else:
        print_calibration(found, report_delta)


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
        return RenyiDP(number("rdp2", values["rdp2"], at_least=0.0))
    return SampledGaussian(**values) if kind == "noise_multiplier" else OutputPerturbation(**values)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


register(app)


# --- the way in -----------------------------------


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status. Every error is one line on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=words or ["--help"], prog_name="reconbound", standalone_mode=False) or 0
        return _stopped() if status == STOPPED and not isinstance(status, Told) else int(status)
    except InputError as error:
        name = _option(error.name) if error.name.isidentifier() else error.name
        message = str(error) if isinstance(error, DataError) else f"{name} {error.requirement}, got {error.value}"
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _stopped()
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's: a fault of ours, shown in full
            raise
        hint = getattr(error, "param_hint", None) or _own(error)
        message = f"{hint} {error.message}" if hint and hasattr(error, "message") else error.format_message()
        message = _ELSEWHERE.get(getattr(error, "option_name", ""), message)
        value = _value(words, getattr(getattr(error, "param", None), "opts", ()))
        if value is not None and value not in message:
            message = f"{message}, got {value}"
    print(f"reconbound: {one_line(message)}", file=sys.stderr)
    return 2


def _stopped() -> int:
    print("\nreconbound: stopped", file=sys.stderr)
    return STOPPED


#: Words of Opacus and of people, for which the command line has another.
_ELSEWHERE = {
    "--epochs": "--epochs is not known: give --steps, the number of epochs over the sample rate",
    "--batch-size": "--batch-size is not known: give --sample-rate, the batch size over the number of records",
    "--max-grad-norm": "--max-grad-norm is not needed: --noise-multiplier is already in units of the clip norm",
    "--target-rmse": "--target-rmse is not known: give --target-error, or its square as --target-mse",
}


def _own(error: Any) -> str | None:
    """The option's name where one of our own parsers refused its value."""
    options = getattr(getattr(error, "param", None), "opts", ())
    return str(options[0]) if options and str(getattr(error, "message", "")).startswith("must be") else None


def _value(words: Sequence[str], options: Sequence[str]) -> str | None:
    """What was given for an option that could not be read."""
    for word, following in zip(reversed(words), [None, *reversed(words)], strict=False):
        name, equals, rest = word.partition("=")
        if name in options:
            return rest if equals else following
    return None


_SPELT = {"±": "+/-", "ε": "epsilon", "δ": "delta", "≥": ">=", "→": "->", "–": "-", "é": "e", "λ": "lambda",
          "’": "'", "“": '"', "”": '"', "×": "x", "²": "^2", "κ": "kappa", "…": "..."}  # fmt: skip


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Write what the terminal cannot show in plain letters."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_SPELT.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error("reconbound.spell", _spell)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="reconbound.spell")  # a terminal without ± and ε shows +/- and epsilon
    try:
        status = run()
        sys.stdout.flush()
    except OSError as error:  # the reader went away, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet
        if not isinstance(error, BrokenPipeError):
            print(f"reconbound: cannot write: {error.strerror}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
