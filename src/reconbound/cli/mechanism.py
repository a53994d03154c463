"""From the options of bound and calibrate to the one mechanism that they describe. torch is not imported here."""

from __future__ import annotations

import math
from typing import Any

import typer

from reconbound._internal.checks import number, rounded_up
from reconbound.cli.options import epochs_as_steps, option
from reconbound.mechanisms import DP, Mechanism, OutputPerturbation, RenyiDP, SampledGaussian
from reconbound.mechanisms.sampled_gaussian import fewest_batches

#: What `reconbound bound` without a mechanism speaks of.
DEFAULT = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # trigger -> needed, allowed
    "noise_multiplier": (("noise_multiplier", "sample_rate", "steps"), ("clip", "sampler", "epochs")),
    "epsilon": (("epsilon",), ("adjacency",)),
    "rdp2": (("rdp2",), ("adjacency",)),
    "output_perturbation": (("loss", "records", "l2", "noise_std"), ("data_norm", "target_bound", "intercept")),
}
_MECHANISM_OPTIONS = {name for needed, allowed in _KINDS.values() for name in (*needed, *allowed)} | set(_KINDS)
#: Said where an epsilon came without its delta.
NO_DELTA = (
    "you gave no δ with ε: it was taken as 0, a guarantee without exception, which Gaussian noise never gives. An ε "
    "from Opacus, TF Privacy and most libraries for private SGD holds at a δ, and these floors do not follow "
    "from it: say --delta, or better describe the mechanism."
)
#: Said where nothing was said of how batches are drawn.
NO_SAMPLER = (
    "you did not say how batches are drawn: Poisson sampling was taken, in which each record is in each batch by the "
    "toss of a coin. A loader that shuffles (torch's DataLoader with shuffle=True) protects less: say --sampler "
    "shuffle, or --sampler fixed for uniform batches of one size."
)


def given_of(options: dict[str, Any]) -> dict[str, Any]:
    """The mechanism options that the user gave (and delta)."""
    return {
        k: v for k, v in options.items() if k in _MECHANISM_OPTIONS | {"delta"} and v is not None and v is not False
    }


def notes_of(given: dict[str, Any]) -> tuple[str, ...]:
    """Returns the assumptions that the options leave open.

    Args:
        given: as `given_of` returns it.
    """
    said = []
    if "epsilon" in given and "delta" not in given:
        said.append(NO_DELTA)
    sampled = "sampler" not in given and float(given.get("sample_rate", DEFAULT["sample_rate"])) < 1
    if sampled and not {"epsilon", "rdp2", "output_perturbation"} & set(given):
        said.append(NO_SAMPLER)
    if given.get("sampler") == "shuffle" and "steps" in given and "sample_rate" in given:
        batches = fewest_batches(given["sample_rate"])
        epochs = math.ceil(given["steps"] / batches)
        said.append(
            f"{given['steps']:,} steps of shuffled batches were counted as {epochs:,} epochs of {batches:,} batches, "
            "as of a loader that drops its last batch, so that no loader takes more. Give --epochs if you know them."
        )
    return tuple(said)


def mechanism_of(given: dict[str, Any], found: str | None = None) -> Mechanism:
    """The one mechanism that the options describe; a clear line about what is missing or too much.

    Args:
        given: the options that the user gave, by name.
        found: the noise's name where calibrate looks for it, so that the user never gave it.
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
    _check_needed(chosen, needed, kind, found)
    if kind == "epsilon":
        return DP(chosen["epsilon"], given.get("delta", 0.0), chosen.get("adjacency"))
    if kind == "rdp2":
        return RenyiDP(number("rdp2", chosen["rdp2"], at_least=0.0), 2.0, chosen.get("adjacency"))
    if kind == "output_perturbation":
        return _output_perturbation(chosen)
    return _private_sgd(chosen)


def _check_needed(chosen: dict[str, Any], needed: tuple[str, ...], kind: str, found: str | None) -> None:
    for name in needed:
        if name not in chosen:
            need = "" if name == kind or found == kind else f": {option(kind)} needs it"
            if name in ("sample_rate", "steps") and found == kind:
                need = ": private SGD needs it (or say --output-perturbation, --loss, --records and --l2)"
            either = " (or --epochs)" if name == "steps" else " (logistic, softmax or squared)" * (name == "loss")
            raise typer.BadParameter(f"is missing{either}{need}", param_hint=option(name))


def _output_perturbation(chosen: dict[str, Any]) -> OutputPerturbation:
    if chosen["loss"] == "squared" and "target_bound" not in chosen:
        raise typer.BadParameter("is missing: --loss squared needs it", param_hint="--target-bound")
    return OutputPerturbation(**{k: v for k, v in chosen.items() if k != "output_perturbation"})


def _private_sgd(chosen: dict[str, Any]) -> SampledGaussian:
    """T steps, or so many epochs: of shuffled ones a record takes part once in each, whatever the batches' size."""
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
