"""From the options of bound and calibrate to the one mechanism that they describe. torch is not imported here."""

from __future__ import annotations

import math
from typing import Any

import typer

from .._check import number
from ..mechanisms import DP, Mechanism, OutputPerturbation, RenyiDP, SampledGaussian
from .options import epochs_as_steps, option

#: What `reconbound bound` without a mechanism speaks of.
DEFAULT = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # trigger -> needed, allowed
    "noise_multiplier": (("noise_multiplier", "sample_rate", "steps"), ("clip", "sampler", "epochs")),
    "epsilon": (("epsilon",), ("adjacency",)),
    "rdp2": (("rdp2",), ()),
    "output_perturbation": (("records", "l2", "noise_std"), ("data_norm",)),
}
_MECHANISM_OPTIONS = {name for needed, allowed in _KINDS.values() for name in (*needed, *allowed)} | set(_KINDS)


def given_of(options: dict[str, Any]) -> dict[str, Any]:
    """The mechanism options that the user gave (and delta)."""
    return {
        k: v for k, v in options.items() if k in _MECHANISM_OPTIONS | {"delta"} and v is not None and v is not False
    }


def mechanism_of(given: dict[str, Any], found: str | None = None) -> Mechanism:
    """The one mechanism that the options describe; a clear line about what is missing or too much.

    Args:
        found: the noise's name where calibrate looks for it, so that the user never gave it."""
    delta = given.get("delta", 0.0)
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
        if "sample_rate" in chosen:
            chosen["steps"] = epochs_as_steps(chosen["epochs"], chosen["sample_rate"])
        del chosen["epochs"]
        needed = tuple(name for name in needed if name != "steps")
    for name in needed:
        if name not in chosen:
            need = "" if name == kind or found == kind else f": {option(kind)} needs it"
            if name in ("sample_rate", "steps") and found == kind:
                need = ": private SGD needs it (or say --output-perturbation, --records and --l2)"
            either = " (or --epochs)" if name == "steps" else ""
            raise typer.BadParameter(f"is missing{either}{need}", param_hint=option(name))
    values = {k: v for k, v in chosen.items() if k != "output_perturbation"}
    if kind == "epsilon":
        return DP(values["epsilon"], delta, values.get("adjacency", "replace-one"))
    if kind == "rdp2":
        return RenyiDP(number("rdp2", values["rdp2"], at_least=0.0))
    if values.get("sampler") == "shuffle":
        rate = number("sample_rate", values["sample_rate"], above=0.0, at_most=1.0)
        batches = math.ceil(1 / rate * (1 - 1e-12))  # ⌈N/B⌉ of an epoch
        return SampledGaussian.shuffled(
            values["noise_multiplier"], batches, values["steps"], values.get("clip") or "smooth"
        )
    return SampledGaussian(**values) if kind == "noise_multiplier" else OutputPerturbation(**values)
