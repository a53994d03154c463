"""Schedules of private SGD from files, and what Opacus recorded of a training. torch is not imported here."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from reconbound._internal.checks import InputError, choice, file_path, number, rounded_up, whole
from reconbound._internal.files import Unreadable
from reconbound._internal.torch_files import read_plain
from reconbound.mechanisms.composition import Composition
from reconbound.mechanisms.sampled_gaussian import SampledGaussian, fewest_batches

_LARGEST_JSON = 2**26
#: Stretches of a schedule at most: each takes some milliseconds.
_MOST_STRETCHES = 100_000
_NOISE = "noise_multiplier, or noise_std and max_grad_norm"
_STRETCH = {"noise_multiplier", "noise_std", "max_grad_norm", "sample_rate", "steps", "epochs", "clip", "sampler"}


def schedule(stretches: Any) -> SampledGaussian | Composition:
    """Returns a training whose noise, clipping, rate or sampler changes, as a list of stretches says.

    Args:
        stretches: a list of dictionaries, or a dictionary with it under "stretches" and a common "clip" and "sampler".
            Each has noise_multiplier, or noise_std (on the sum of clipped gradients) and max_grad_norm, which may be
            lists with one number for each layer; sample_rate; steps or epochs; and clip and sampler where they are not
            SampledGaussian's.

    >>> print(schedule([{"noise_std": 3.0, "max_grad_norm": 1.5, "sample_rate": 0.01, "epochs": 2}]))
    SampledGaussian: noise multiplier 2, sample rate 0.01, steps 200, clip smooth, sampler poisson
    """
    common: dict[str, Any] = {}
    if isinstance(stretches, Mapping):
        common = {k: v for k, v in stretches.items() if k != "stretches"}
        _refuse_others(common, {"clip", "sampler"}, "schedule")
        stretches = stretches.get("stretches")
    if not isinstance(stretches, Sequence) or isinstance(stretches, str | bytes) or not stretches:
        raise InputError("schedule", "must be a list of one stretch or more", stretches)
    return _composed("schedule", [{**common, **one} if isinstance(one, Mapping) else one for one in stretches])


def read_schedule(path: Any) -> SampledGaussian | Composition:
    """Reads a schedule from a JSON file.

    Args:
        path: the file; see `schedule` for what it holds.
    """
    return schedule(_read_json("schedule", _plain_file("schedule", path)))


def from_opacus(given: Any, *, sampler: str = "poisson", clip: str = "hard") -> SampledGaussian | Composition:
    """Returns the mechanism of a training with Opacus from what its accountant recorded: noise, rate and steps.

    The record does not say how batches were drawn, nor whether the noise was drawn as recorded. Opacus counts Poisson
    batches whatever the loader does (poisson_sampling=False): say "shuffle" or "fixed" where that is so.

    Args:
        given: a PrivacyEngine, its accountant, their state_dict(), a checkpoint of save_checkpoint() in memory, or the
            list of (noise multiplier, sample rate, steps).
        sampler: "poisson"; "shuffle" for loaders that shuffle; "fixed" for uniform batches of one size.
        clip: "hard", as Opacus clips, flat or per layer; "smooth" if you clip by yourself.

    >>> from_opacus([(1.0, 0.01, 500), (2.0, 0.01, 500)]).mechanisms[1].noise_multiplier
    2.0
    """
    choice("sampler", sampler, ("poisson", "fixed", "shuffle"))
    history = given
    for name in ("accountant", "history"):
        history = getattr(history, name, history)
    if isinstance(history, Mapping):
        history = history.get("privacy_accountant_state_dict", history)
    if isinstance(history, Mapping):
        history = history.get("history")
    if not isinstance(history, Sequence) or isinstance(history, str | bytes):
        what = "must be a PrivacyEngine of Opacus, its accountant or its state, or a list of (noise, rate, steps)"
        raise InputError("opacus_state", what, type(given).__name__)
    if not history:
        raise InputError("opacus_state", "must hold one step or more: nothing was trained", "an empty history")
    keys = ("noise_multiplier", "sample_rate", "steps")
    for one in history:
        values = one if isinstance(one, Sequence) and not isinstance(one, str | bytes) else ()
        if len(values) != len(keys) or any(isinstance(value, str | bytes | Sequence | Mapping) for value in values):
            # its text may be endless: a small file can hold lists within each other that double at each level
            what = "must be a list of (noise multiplier, sample rate, steps), three numbers each"
            raise InputError("opacus_state", what, f"a {type(one).__name__} among them")
    stretches = [{**dict(zip(keys, one, strict=True)), "clip": clip, "sampler": sampler} for one in history]
    return _composed("opacus_state", stretches)


def read_opacus_state(path: Any, *, sampler: str = "poisson", clip: str = "hard") -> SampledGaussian | Composition:
    """Reads what Opacus recorded from a file; see `from_opacus`.

    Args:
        path: JSON (`json.dump(engine.accountant.state_dict(), file)`), or a file of torch.save: the state, or a
            checkpoint of `engine.save_checkpoint`. Plain values are read; no class is looked up and no tensor is made.
        sampler: as in `from_opacus`.
        clip: as in `from_opacus`.
    """
    file = _plain_file("opacus_state", path)
    with file.open("rb") as opened:
        torch_file = opened.read(1) in (b"P", b"\x80")  # a zip file, or torch's old form
    if not torch_file:
        return from_opacus(_read_json("opacus_state", file), sampler=sampler, clip=clip)
    try:
        found = read_plain(file)
    except Unreadable as reason:
        what = f"must be JSON, or a file of torch.save with nothing in it but tensors and plain numbers ({reason})"
        raise InputError("opacus_state", what, file.name) from None
    return from_opacus(found, sampler=sampler, clip=clip)


def _plain_file(name: str, path: Any) -> Path:
    """Returns the path of a file; refuses a pipe, which may never end, a device or a folder."""
    file = Path(file_path(name, path))
    if not stat.S_ISREG(file.stat().st_mode):
        raise InputError(name, "must be a file: this is a folder, a pipe or a device", str(file))
    return file


def _read_json(name: str, file: Path) -> Any:
    """Reads a JSON file of limited size."""
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_JSON + 1)
    if len(content) > _LARGEST_JSON:
        raise InputError(name, f"must be a file of at most {_LARGEST_JSON // 2**20} MiB", file.name)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as reason:
        raise InputError(name, f"must be a JSON file ({reason})"[:300], file.name) from None


def _composed(name: str, stretches: Sequence[Any]) -> SampledGaussian | Composition:
    """Returns the composition of the stretches, or the one stretch; an error names the stretch."""
    if len(stretches) > _MOST_STRETCHES:
        raise InputError(name, f"must have at most {_MOST_STRETCHES:,} stretches", f"{len(stretches):,}")
    made = []
    for i, one in enumerate(stretches, 1):
        try:
            made.append(_stretch(one))
        except InputError as error:
            raise InputError(name, f"stretch {i:,}: {error.name} {error.requirement}", error.value) from None
    return made[0] if len(made) == 1 else Composition(tuple(made))


def _refuse_others(given: Mapping[str, Any], allowed: set[str], name: str) -> None:
    for key in given:
        if key not in allowed:
            raise InputError(name, f"must have no keys but {', '.join(sorted(allowed))}", key)


def _stretch(given: Any) -> SampledGaussian:
    """Returns one stretch."""
    if not isinstance(given, Mapping):
        raise InputError("it", "must be a dictionary", given)
    _refuse_others(given, _STRETCH, "it")
    noise = _noise_multiplier(given)
    rate = number("sample_rate", given.get("sample_rate"), above=0.0, at_most=1.0)
    if ("steps" in given) == ("epochs" in given):
        raise InputError("steps", "must be given, or epochs, and not both", given.get("steps"))
    sampler, clip = given.get("sampler", "poisson"), given.get("clip", "smooth")
    if "epochs" in given:
        epochs = number("epochs", given["epochs"], above=0.0, at_most=1e12)
        if sampler == "shuffle":
            return SampledGaussian(noise, 1.0, rounded_up(epochs), clip, sampler)
        steps = steps_of_epochs(epochs, rate)
    else:
        steps = whole("steps", given["steps"])
    if sampler == "shuffle":
        return SampledGaussian.shuffled(noise, fewest_batches(rate), steps, clip)
    return SampledGaussian(noise, rate, steps, clip, sampler)


def steps_of_epochs(epochs: float, sample_rate: float) -> int:
    """Returns T = epochs/q, rounded up: one step too few would raise a floor.

    Args:
        epochs: passes over the data.
        sample_rate: q.
    """
    return rounded_up(Fraction(epochs) / Fraction(sample_rate))


def _noise_multiplier(given: Mapping[str, Any]) -> float:
    """Returns σ of a stretch, from its noise multiplier or from its noise and clip norms."""
    if "noise_multiplier" in given:
        if "noise_std" in given or "max_grad_norm" in given:
            raise InputError("noise_multiplier", f"must not be given twice: {_NOISE}", given["noise_multiplier"])
        return number("noise_multiplier", given["noise_multiplier"], above=0.0)
    if "noise_std" not in given or "max_grad_norm" not in given:
        raise InputError("noise_multiplier", f"must be given: {_NOISE}", None)
    noise, norm = given["noise_std"], given["max_grad_norm"]
    if isinstance(noise, Sequence) or isinstance(norm, Sequence):
        return SampledGaussian.per_layer(noise, norm).noise_multiplier
    return number("noise_std", noise, above=0.0) / number("max_grad_norm", norm, above=0.0)
