"""The command line. A sub-command parses, calls one library function and prints; torch is never imported here."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from reconbound import __version__
from reconbound._internal.checks import InputError, number
from reconbound.bounds.data_space import data_space
from reconbound.cli import register
from reconbound.cli.errors import command_parser, describe_refused_value, describe_usage_error
from reconbound.cli.mechanism import given_of, mechanism_of, notes_of
from reconbound.cli.options import STOPPED, Told, count, one_line, option, ratio, within_range
from reconbound.cli.printing import (
    calibration_dict,
    print_calibration,
    print_epsilon_calibration,
    print_guarantee,
    print_json,
)
from reconbound.mechanisms import OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibration import OutOfReach, calibrate, calibrate_epsilon
from reconbound.mechanisms.guarantees import FLOORS, guarantee

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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
Epochs = Annotated[
    float | None,
    typer.Option(help="The same as passes over the data: epochs over the sample rate are the steps, rounded up."),
]
Clip = Annotated[str | None, typer.Option(help="smooth (the paper's GELU clip; default) or hard (as in Opacus).")]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="poisson (default), fixed (fixed size without replacement), or shuffle (shuffled epochs, from which no "
        "protection is counted)."
    ),
]
Epsilon = Annotated[float | None, typer.Option(help="Of the mechanism only this epsilon is known.")]
Rdp2 = Annotated[
    float | None, typer.Option("--rdp2", help="Only its order-2 Renyi divergence is known; see --adjacency.")
]
Adjacency = Annotated[
    str | None,
    typer.Option(
        help="Neighbours of --epsilon or --rdp2: replace-one (assumed, and said, when left out), or add/remove (as "
        "Opacus, TF Privacy and most libraries for private SGD report it, and the safe choice)."
    ),
]
Delta = Annotated[
    float | None, typer.Option(help="Delta at which epsilon is reported (1e-5), or that of --epsilon (0).")
]
Output = Annotated[bool, typer.Option("--output-perturbation", help="Noise on the minimiser of a linear model.")]
Records = Annotated[
    int | None, typer.Option(parser=count, metavar="<int>", help="Output perturbation: number of records.")
]
L2 = Annotated[
    float | None, typer.Option("--l2", help="Output perturbation: regularisation, as in mean loss + l2/2 |w|^2.")
]
NoiseStd = Annotated[float | None, typer.Option(help="Output perturbation: noise std per coefficient.")]
DataNorm = Annotated[
    float | None,
    typer.Option(
        help="Output perturbation: norm to which rows are clipped, a constant feature not counted (1). Records lie in "
        "the ball of this radius, and the floors are for it."
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(help="Output perturbation: the loss: logistic (two classes), softmax, or squared (ridge)."),
]
TargetBound = Annotated[
    float | None, typer.Option(help="Output perturbation with squared loss: targets are clipped to this size.")
]
Intercept = Annotated[
    bool, typer.Option("--intercept", help="Output perturbation: rows have a constant feature 1 beside.")
]
Dim = Annotated[
    int,
    typer.Option(parser=count, metavar="<int>", help="Number of private coordinates of a record: 784, or 3x32x32."),
]
Low = Annotated[float | None, typer.Option(help="Smallest value of a coordinate (0; see --data-norm).")]
High = Annotated[float | None, typer.Option(help="Largest value of a coordinate (1; see --data-norm).")]
Baseline = Annotated[float | None, typer.Option(help="MSE of a plain guess on your data (default: guess the middle).")]
Units = Annotated[str, typer.Option("--units", "--unit", help="Unit of the data, for printing.")]
Found = Annotated[float | None, typer.Option(hidden=True)]  # given to calibrate, which looks for it: refused by name
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
    """Says how well each training record is protected against reconstruction.

    Start with reconbound audit, which trains on small pictures and writes a report, or with reconbound bound, which
    needs no data. Each command has its own --help.
    """


@app.command("bound", short_help="What a mechanism guarantees, before any data.")
def bound_command(
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    epochs: Epochs = None,
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
    loss: Loss = None,
    target_bound: TargetBound = None,
    intercept: Intercept = False,
    dim: Dim = 1,
    low: Low = None,
    high: High = None,
    baseline: Baseline = None,
    units: Units = "",
    as_json: Json = False,
) -> None:
    """Says what a mechanism guarantees against reconstruction, in the units of your data."""
    given = given_of(locals())
    mechanism = mechanism_of(given)
    report_delta = 1e-5 if delta is None or (delta == 0 and epsilon is not None) else delta
    found = guarantee(mechanism, dim=dim, low=low, high=high, delta=report_delta, baseline=baseline, units=units)
    unsaid = notes_of(given)
    if as_json:
        print_json({**found.to_dict(), "notes": [*unsaid, *found.notes]})
    else:
        print_guarantee(found, default=not given, notes=(*unsaid, *found.notes))


@app.command("calibrate", short_help="The smallest noise for a floor, or for an epsilon.")
def calibrate_command(
    target_mse: Annotated[float | None, typer.Option(help="Squared error per coordinate that must be kept.")] = None,
    target_error: Annotated[
        float | None, typer.Option(help="The same as an error in data units: the root of --target-mse.")
    ] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(help="In place of a floor: the epsilon that the noise must reach, at --delta and --adjacency."),
    ] = None,
    bound: Annotated[
        str,
        typer.Option(
            help=f"The floor that must keep it: {', '.join(FLOORS)}. theorem1 (unbiased attackers) and lecam (any) "
            "keep it in each coordinate, corners and rate_distortion on average over them."
        ),
    ] = "theorem1",
    noise_multiplier: Found = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    epochs: Epochs = None,
    clip: Clip = None,
    sampler: Sampler = None,
    epsilon: Found = None,
    rdp2: Annotated[float | None, typer.Option("--rdp2", hidden=True)] = None,
    adjacency: Annotated[
        str | None,
        typer.Option(help="Neighbours of --target-epsilon: replace-one (default), or add/remove (as Opacus counts)."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta at which epsilon is told (1e-5).")] = None,
    output_perturbation: Output = False,
    records: Records = None,
    l2: L2 = None,
    noise_std: Found = None,
    data_norm: DataNorm = None,
    loss: Loss = None,
    target_bound: TargetBound = None,
    intercept: Intercept = False,
    dim: Dim = 1,
    low: Low = None,
    high: High = None,
    units: Units = "",
    as_json: Json = False,
) -> None:
    """The smallest noise with which a floor meets a target, or with which epsilon does."""
    given = given_of(locals())
    targets = {"target_mse": target_mse, "target_error": target_error, "target_epsilon": target_epsilon}
    asked = [name for name, value in targets.items() if value is not None]
    for name in ("epsilon", "rdp2"):
        if name in given:
            how = (
                "say --target-epsilon for the noise that reaches it" if name == "epsilon" else "describe the mechanism"
            )
            raise InputError(name, f"has no noise to calibrate: {how}", given[name])
    if not asked:
        raise typer.BadParameter("is missing (or --target-error, or --target-epsilon)", param_hint="--target-mse")
    if len(asked) > 1:
        raise typer.BadParameter(f"does not go with {option(asked[0])}", param_hint=option(asked[1]))
    if adjacency is not None and asked != ["target_epsilon"]:
        raise typer.BadParameter("goes with --target-epsilon alone", param_hint="--adjacency")
    noise = "noise_std" if output_perturbation else "noise_multiplier"
    if noise in given:
        raise InputError(noise, "must be left out: calibrate finds it", given[noise])
    mechanism = mechanism_of({**{k: v for k, v in given.items() if k != "adjacency"}, noise: 1.0}, noise)
    assert isinstance(mechanism, (SampledGaussian, OutputPerturbation))
    report_delta = 1e-5 if delta is None else delta
    space: dict[str, Any] = {"dim": dim, "low": low, "high": high, "units": units}
    data, notes = data_space(dim, low, high, mechanism.radius), notes_of(given)
    if target_epsilon is not None:
        reached = calibrate_epsilon(mechanism, target_epsilon, delta=report_delta, adjacency=adjacency or "replace-one")
        print_epsilon_calibration(
            reached, target_epsilon, report_delta, adjacency, bound, space, data, notes, as_json=as_json
        )
        return
    if target_error is not None:
        target_mse = number("target_error", target_error, above=0.0, at_least=1e-150, at_most=1e150) ** 2
    if bound not in ("lecam", "rate_distortion"):  # these have a limit of their own, below that
        within_range(target_mse, target_error, data)
    try:
        found = calibrate(mechanism, target_mse or 0.0, bound=bound, **space)
    except OutOfReach as error:
        name, most, given_target = "target_mse", error.highest, target_mse
        if target_error is not None:
            name, most, given_target = "target_error", error.highest**0.5, target_error
        given_by = "--low and --high" if data.ball is None else "--data-norm, --low and --high"
        where = f" on data in {data.described()} ({given_by})"
        raise OutOfReach(name, error.bound, most, given_target, where) from None
    if as_json:
        print_json(calibration_dict(found, report_delta, space, data, notes))
    else:
        print_calibration(found, report_delta, space, data, notes)


register(app)


# --- the way in -----------------------------------


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status. Every error is one line on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = command_parser(app)(args=words or ["--help"], prog_name="reconbound", standalone_mode=False) or 0
        return _stopped() if status == STOPPED and not isinstance(status, Told) else int(status)
    except InputError as error:
        message = describe_refused_value(error, app)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _stopped()
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's: a fault of ours, shown in full
            raise
        message = describe_usage_error(error, words)
    print(f"reconbound: {one_line(message)}", file=sys.stderr)
    return 2


def _stopped() -> int:
    print("\nreconbound: stopped", file=sys.stderr)
    return STOPPED


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± and ε shows question marks
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
