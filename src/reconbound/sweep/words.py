"""The floors of a sweep in words for its pages and the terminal: their names, whom they bind and how exact they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reconbound.accounting.precision import how_far_off
from reconbound.bounds.bound import NOT_PROVED

WORDS = {
    "max": "most exposed record (estimate)",
    "q99": "record at the 99 % quantile (estimate)",
    "median": "median record (estimate)",
    "crossed": "crossed",
    "exact": "exact factor",
    "fixed": "fixed-size factor",
    "none": "no amplification",
    "paper": "the paper's κ (not proved, no guarantee)",
    "theorem1": "Theorem 1",
    "theorem1_paper": "Theorem 1 as in the paper (not proved, no guarantee)",
    "corners": "all corners",
    "lecam": "any attacker, Le Cam",
    "rate_distortion": "any attacker, rate-distortion",
}
#: A storage as it must be written: without its driver, SQLAlchemy looks for another than reconbound[postgres] brings.
POSTGRES = "postgresql+psycopg2://user@host/name"
#: What the two numbers of the most exposed record mean.
CROSSED = (
    "The floor of the most exposed record comes from the largest of many noisy dFIL, which is too large on average, so "
    "it leans low; “crossed”, what each run says of the record that the other runs find most exposed, has a dFIL that "
    "is too small on average, so its floor leans high: on average the largest dFIL lies between the two."
)
ASSUMPTIONS = (
    ("exact, fixed, none", "1/dFIL of a record by the Fisher accountant (Theorem 2): unbiased attackers who know all "
     "other records and see every noisy step. exact: Poisson batches; fixed: fixed-size batches; none: shuffled "
     "epochs. An estimate, averaged over the runs."),
    ("paper", "the same with the paper's κ, whose δ is split over the steps: to compare, not proved, no guarantee."),
    ("theorem1, corners", "of the mechanism whatever the data, unbiased attackers, replace-one neighbours; theorem1 in "
     "each feature, corners on average over them. theorem1_paper is the paper's: not proved, no guarantee."),
    ("lecam, rate_distortion", "of the mechanism whatever the data: for each attacker there is some conceivable record "
     "on which it errs by as much, and on others it may err by less. "
     "lecam by replace-one neighbours, rate_distortion by leaving the record out (add/remove, or zeroed). These and "
     "those above are all for the sampler of the setting."),
)  # fmt: skip


def told(name: str) -> str:
    """Returns a floor, or another column, in words.

    >>> told("exact_max"), told("lecam"), told("epsilon")
    ('exact factor, most exposed record (estimate)', 'any attacker, Le Cam', 'epsilon')
    """
    if name in WORDS:
        return WORDS[name]
    rule, _, place = name.partition("_")
    return f"{WORDS[rule]}, {WORDS[place]}" if rule in WORDS and place in WORDS else name.replace("_", " ")


def attacker(floor: str) -> tuple[str, str]:
    """Returns whom a floor binds, and where."""
    if floor in ("lecam", "rate_distortion"):
        return "any attacker", "on some conceivable record, not on each"
    place = floor.rpartition("_")[2]
    where = f"on the {WORDS.get(place, '').removesuffix(' (estimate)')}"
    return "an unbiased attacker", where if place in ("max", "q99", "median") else "on every record"


def proved(floor: str) -> bool:
    """Returns whether a floor is a guarantee at all.

    >>> proved("exact_max"), proved("paper_max"), proved("theorem1_paper")
    (True, False, False)
    """
    return NOT_PROVED not in told(floor)


def whom(floor: str) -> str:
    """Returns whom a floor binds, to follow its name; "" where the name says it, or that there is no guarantee.

    >>> whom("exact_max"), whom("lecam"), whom("paper_max")
    (', for unbiased attackers', '', '')
    """
    said = told(floor)
    return "" if "any attacker" in said or not proved(floor) else ", for unbiased attackers"


def precision(floor: str, runs: int | None, measured: float | None = None) -> str:
    """Returns how exact a floor is, in words; "" for floors of the mechanism, which are computed, and where unknown.

    Args:
        floor: its name.
        runs: the number of runs over which it was averaged.
        measured: how often each record was measured over all runs (median), where it is known.

    >>> precision("exact_max", 3), precision("lecam", 1)
    ('mean of 3 runs: an estimate, more often too high than too low', '')
    """
    if runs is None or not floor.endswith(("_max", "_q99", "_median")):
        return ""
    if runs > 1:
        return f"mean of {runs:,} runs: an estimate, more often too high than too low"
    return f"from one run: an estimate; {how_far_off(0.0 if measured is None else measured)}"


def majority(guesses: Mapping[str, Any] | None) -> list[str]:
    """Returns a sentence on the accuracy that needs no model; empty where it is not known."""
    plain = (guesses or {}).get("accuracy")
    return [] if plain is None else [f"Majority class: {100 * plain:.1f} %."]


def setting_told(setting: Mapping[str, Any], names: Iterable[str]) -> str:
    """Formats a setting in one line, with six digits of numbers that Optuna chose.

    Args:
        setting: a value for each name.
        names: the names to show, in order.

    >>> setting_told({"lr": 0.3763947732035219, "clip": "hard"}, ("lr", "clip", "model"))
    'lr 0.376395, clip hard'
    """
    return ", ".join(f"{name} {value_told(setting[name])}" for name in names if name in setting)


def value_told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
