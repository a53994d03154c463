"""The options of bound and calibrate that describe a mechanism, and the mechanism that they describe.

torch is not imported here.
"""

from __future__ import annotations

import math
from typing import Any

import typer

from reconbound._internal.checks import number, rounded_up
from reconbound.cli.options import Options, count, epochs_as_steps, option, ratio
from reconbound.mechanisms import DP, Mechanism, OutputPerturbation, RenyiDP, SampledGaussian
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
    "noise_multiplier": (
        float,
        "Noise std on the SUM of clipped gradients over the clip norm, as in Opacus; the clip norm itself does not "
        "matter.",
    ),
    "sample_rate": (ratio, "Chance of a record to be in a batch: 0.01, or 256/50000."),
    "steps": (count, "Number of steps: epochs over the sample rate."),
    "epochs": (float, "The same as passes over the data: epochs over the sample rate are the steps, rounded up."),
    "clip": (str, "smooth (the paper's GELU clip; default) or hard (as in Opacus)."),
    "sampler": (
        str,
        "poisson (default), fixed (fixed size without replacement), or shuffle (shuffled epochs, from which no "
        "protection is counted).",
    ),
    "epsilon": (float, "Of the mechanism only this epsilon is known."),
    "rdp2": (float, "Only its order-2 Renyi divergence is known; see --adjacency."),
    "adjacency": (
        str,
        "Neighbours of --epsilon or --rdp2: replace-one (assumed, with a note, when left out), or add/remove (as "
        "Opacus, TF Privacy and most libraries for private SGD report it, and the safe choice).",
    ),
    "delta": (float, "Delta at which epsilon is reported (1e-5), or that of --epsilon (0)."),
    "output_perturbation": (bool, "Noise on the minimiser of a linear model."),
    "records": (count, "Output perturbation: number of records."),
    "l2": (float, "Output perturbation: regularisation, as in mean loss + l2/2 |w|^2."),
    "noise_std": (float, "Output perturbation: noise std per coefficient."),
    "data_norm": (
        float,
        "Output perturbation: norm to which rows are clipped, a constant feature not counted (1). Records lie in the "
        "ball of this radius, and the floors are for it.",
    ),
    "loss": (str, "Output perturbation: the loss: logistic (two classes), softmax, or squared (ridge)."),
    "target_bound": (float, "Output perturbation with squared loss: targets are clipped to this size."),
    "intercept": (bool, "Output perturbation: rows have a constant feature 1 beside."),
}

#: The mechanism of `reconbound bound` without options.
DEFAULT = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # trigger -> needed, allowed
    "noise_multiplier": (("noise_multiplier", "sample_rate", "steps"), ("clip", "sampler", "epochs")),
    "epsilon": (("epsilon",), ("adjacency",)),
    "rdp2": (("rdp2",), ("adjacency",)),
    "output_perturbation": (("loss", "records", "l2", "noise_std"), ("data_norm", "target_bound", "intercept")),
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


def assumption_notes(given: dict[str, Any]) -> tuple[str, ...]:
    """Returns the assumptions that the options leave open.

    Args:
        given: the options that describe the mechanism, and delta.
    """
    notes = []
    if "epsilon" in given and "delta" not in given:
        notes.append(NO_DELTA)
    sampled = "sampler" not in given and float(given.get("sample_rate", DEFAULT["sample_rate"])) < 1
    if sampled and not {"epsilon", "rdp2", "output_perturbation"} & set(given):
        notes.append(NO_SAMPLER)
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
    kind: str = next((k for k in ("output_perturbation", "epsilon", "rdp2") if k in chosen), "noise_multiplier")
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
    if kind == "epsilon":
        return DP(chosen["epsilon"], given.get("delta", 0.0), chosen.get("adjacency"))
    if kind == "rdp2":
        return RenyiDP(number("rdp2", chosen["rdp2"], at_least=0.0), 2.0, chosen.get("adjacency"))
    if kind == "output_perturbation":
        return _output_perturbation(chosen)
    return _private_sgd(chosen)


def _check_needed(chosen: dict[str, Any], needed: tuple[str, ...], kind: str, searched: str | None) -> None:
    """Refuses a missing option."""
    for name in needed:
        if name not in chosen:
            need = "" if name == kind or searched == kind else f": {option(kind)} needs it"
            if name in ("sample_rate", "steps") and searched == kind:
                need = ": private SGD needs it (or give --output-perturbation, --loss, --records and --l2)"
            either = " (or --epochs)" if name == "steps" else " (logistic, softmax or squared)" * (name == "loss")
            raise typer.BadParameter(f"is missing{either}{need}", param_hint=option(name))


def _output_perturbation(chosen: dict[str, Any]) -> OutputPerturbation:
    if chosen["loss"] == "squared" and "target_bound" not in chosen:
        raise typer.BadParameter("is missing: --loss squared needs it", param_hint="--target-bound")
    return OutputPerturbation(**{k: v for k, v in chosen.items() if k != "output_perturbation"})


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
