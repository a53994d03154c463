"""Checks of what a leakage file says, before anything is made of it: a right digest does not say who made the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, number, numbers, whole

#: Worlds of a folder at most (an audit has 42 or fewer): each takes time in every table.
MOST_WORLDS = 64
REMOVED = "removed"
KINDS = (REMOVED, "column", "category", "token", "private")
#: The axes of each tensor. N records, d private numbers, k records kept whole; "…" for any more.
_SHAPES = {
    "measured": ("N",), "targets": ("N",), "guess": ("d",), "dfil": ("rules", "N"), "error": ("rules", "N"),
    "upper": ("rules", "N"), "nats": ("worlds", "N"), "nats_upper": ("worlds", "N"), "nats_measured": ("worlds", "N"),
    "kept": ("k",), "kept_inputs": ("k", "…"), "kept_diagonal": ("k", "d"), "average_diagonal": ("d",),
    "diagonal_of": ("n",), "diagonal": ("n", "d"), "names": ("bytes",), "history_step": ("h",), "history": ("h", "3"),
    "accuracy_step": ("a",), "accuracy": ("a",),
}  # fmt: skip
#: Tensors of whole numbers, and of either kind; all others are of floating-point numbers.
_WHOLE = ("measured", "nats_measured", "kept", "diagonal_of", "names", "history_step", "accuracy_step")
_EITHER = ("targets", "kept_inputs")
#: Facts that are numbers, and lists of them, where they are there.
_NUMBERS = (
    "accuracy_baseline", "confidence", "diagonal_measured", "diagonal_probes", "most", "target_offset", "target_scale",
)  # fmt: skip
_LISTS = ("mean_nats", "offset", "private", "scale")
#: The smallest variance beside 0 whose inverse is a number.
_LEAST_VARIANCE = 1e-300


def check_leakage(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Refuses tensors and facts of a leakage file that do not fit together, or that no audit writes.

    Args:
        tensors: the parts of a `Leakage`, by name.
        facts: its facts.

    Raises:
        InputError: names the tensor or the fact.
    """
    for name in (name for name in _NUMBERS if facts.get(name) is not None):
        number(name, facts[name])
    for name in (name for name in _LISTS if facts.get(name) not in (None, [])):
        numbers(name, facts[name])
    for name in ("copies", "category_entropy", "category_columns"):
        if not isinstance(facts.get(name) or {}, Mapping):
            raise InputError(name, "must be an object", facts[name])
    for name in ("rules", "worlds"):
        if not isinstance(facts.get(name) or [], list):
            raise InputError(name, "must be a list", facts[name])
    worlds, means = facts.get("worlds") or [], facts.get("mean_nats") or []
    _check_worlds(worlds)
    _check_tensors(tensors, facts)
    if means and numbers("mean_nats", means).shape != (len(worlds),):
        raise InputError("mean_nats", f"must be {len(worlds)} numbers", means)
    _check_priors(facts, tensors["guess"].numel())


def _check_worlds(worlds: list[Any]) -> None:
    """Refuses worlds without a name of their own, or so many that a small file takes hours."""
    if len(worlds) > MOST_WORLDS:
        raise InputError("worlds", f"must be at most {MOST_WORLDS}", len(worlds))
    names = set()
    for world in worlds:
        if not isinstance(world, Mapping) or not all(isinstance(world.get(n), str) for n in ("name", "reference")):
            raise InputError("worlds", "must have a name, a kind and a reference each", world)
        kind, name = choice("worlds.kind", world.get("kind"), KINDS), world["name"]
        if name in names or (kind == REMOVED) != (name == REMOVED):
            raise InputError("worlds.name", f"must be another for each world, and {REMOVED!r} for that kind only", name)
        names.add(name)


def _check_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    sizes = {"3": 3, "rules": len(facts.get("rules") or ()), "worlds": len(facts.get("worlds") or ())}
    for name, axes in ((name, axes) for name, axes in _SHAPES.items() if name in tensors):
        given = tensors[name]
        plain = [axis for axis in axes if axis != "…"]
        if given.dim() < len(axes) or (given.dim() > len(axes) and axes == tuple(plain)):
            raise InputError(name, f"must have {len(plain)} axes{'' if axes == tuple(plain) else ' and more'}",
                             tuple(given.shape))  # fmt: skip
        for axis, length in zip(plain, given.shape, strict=False):
            if sizes.setdefault(axis, length) != length:
                raise InputError(name, f"must have {sizes[axis]} in place of {length}", tuple(given.shape))
        real = given.dtype in (torch.float32, torch.float64)
        natural = not given.is_floating_point() and not given.is_complex() and given.dtype != torch.bool
        if given.numel() and not (natural if name in _WHOLE else real or (natural and name in _EITHER)):
            what = "whole" if name in _WHOLE else "floating-point"
            raise InputError(name, f"must be of {what} numbers", str(given.dtype))
    if facts.get("shown_of") is not None:
        whole("shown_of", facts["shown_of"], at_least=sizes["N"])
    if sizes["worlds"] and not {"nats", "nats_measured"} <= set(tensors):
        raise InputError("worlds", "must be of a file with nats and nats_measured", sorted(tensors))
    for name in (name for name in ("kept", "diagonal_of") if name in tensors):
        given = tensors[name]
        if given.numel() and not (given.min() >= 0 and given.max() < sizes["N"]):
            raise InputError(name, f"must be records below {sizes['N']}", [int(given.min()), int(given.max())])
    for name in (name for name in ("measured", "nats_measured", "nats", "nats_upper") if name in tensors):
        given = tensors[name]
        if not bool((given >= 0).all()):  # NaN is not
            raise InputError(name, "must not be negative, nor NaN", float(given.min()))


def _check_priors(facts: Mapping[str, Any], features: int) -> None:
    """Refuses what is known without the model, where it is of other columns or no number."""
    if facts.get("prior_variance") not in (None, []):
        found = numbers("prior_variance", facts["prior_variance"], at_least=0.0)
        if found.shape != (features,):
            raise InputError("prior_variance", f"must be {features} numbers", found.shape)
        if ((found > 0) & (found < _LEAST_VARIANCE)).any():
            raise InputError("prior_variance", f"must be 0 or at least {_LEAST_VARIANCE}", float(found.min()))
    for name, entropy in (facts.get("category_entropy") or {}).items():
        number(f"category_entropy.{name}", entropy, at_least=0.0)
    for name, about in (facts.get("category_columns") or {}).items():
        columns, names = (about.get(part) if isinstance(about, Mapping) else None for part in ("columns", "names"))
        if not isinstance(columns, list) or not isinstance(names, list) or len(columns) != len(names):
            raise InputError(f"category_columns.{name}", "must have as many columns as names", about)
        for column in columns:
            whole(f"category_columns.{name}", column, at_least=0)
        if not all(isinstance(text, str) for text in names):
            raise InputError(f"category_columns.{name}", "must have names of text", names)
