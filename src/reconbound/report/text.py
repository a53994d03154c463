"""The sentences of the reports below the first paragraph, and advice on noise. Plain text: the templates escape it.

The first paragraph is in `headline`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_limit, format_noise, format_percent
from reconbound.accounting.confidence import describe_one_run
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.base import BLIND, Protection
from reconbound.mechanisms.calibrate import calibrate
from reconbound.mechanisms.group import group_of
from reconbound.report.folder import CHOSEN_SEED, SECURE_NOISE, TORCH_NOISE, Run
from reconbound.report.formats import amount, count, paragraphs, plain, plus_minus, rough
from reconbound.report.headline import BEYOND, WEAK_EPSILON, any_attacker_sentences, model_caveats
from reconbound.report.success import SHOWN
from reconbound.report.view import NO_LIMIT, View

#: Fewer training records than this get a warning.
FEW = 30

CHOSEN = "from a seed that was chosen by hand. Whoever guesses the seed can subtract the noise: no floor binds them."
TORCH = (
    "drawn by Opacus from torch’s generator (secure_mode=False). Whoever finds the generator’s seed or state can "
    "subtract the noise: no floor binds them."
)
#: What is said of the noise, by where its seed is from.
SEEDS = {CHOSEN_SEED: CHOSEN, TORCH_NOISE: TORCH, SECURE_NOISE: "drawn by Opacus from a secure generator."}
INFERRED = (
    "Some columns’ ranges were read off the data before training. Another record could then change all inputs; ε and "
    "the floors do not account for that. Declare ranges by --range COLUMN=LOWEST:HIGHEST."
)
SMOOTH = "The floors need a gradient that is smooth in a record’s values: no ReLU, no max pooling. "
CHECKED = "The check before training, on three records, found no kinks."
UNCHECKED = "This folder does not say whether the model was checked for it."


def success_notes(view: View) -> list[tuple[str, str]]:
    """Returns what the chances of success mean and what they do not: (topic, text).

    Args:
        view: the audit.
    """
    return _entries("success-notes.txt", view.run, view=view, shown=SHOWN)


# --- how sure it is ------------------------------------------------------------------------


def certainty(view: View) -> list[tuple[str, str]]:
    """Returns how far the first paragraph can be relied on: (topic, text).

    Args:
        view: the audit.
    """
    error = None if view.worst is None else view.floor_error(view.worst)
    short = int((view.limited & (view.shown < view.guess) & (view.floor >= view.guess)).sum())
    return _entries(
        "certainty.txt",
        view.run,
        view=view,
        error="more than half of it" if error is None else rough(error),
        one_run=describe_one_run(float(view.leakage.measured.double().median()), squared=False),
        no_limit=NO_LIMIT,
        short=short,
        weak=weaknesses(view.records, view.protection, view.noun),
        inferred=INFERRED,
        floors=any_attacker_sentences(view.run) if view.protection.meaningful else [],
    )


def weaknesses(records: int, protection: Protection, noun: str) -> list[str]:
    """Returns warnings: too few records for a share of them to mean much, an ε that guarantees little.

    Args:
        records: the number of records.
        protection: what the mechanism guarantees.
        noun: the name of a record.
    """
    epsilon = amount(protection.epsilon, side="up") if (protection.epsilon or 0.0) > WEAK_EPSILON else ""
    return paragraphs("weaknesses.txt", records=records, few=FEW, noun=noun, epsilon=epsilon)


# --- single columns ------------------------------------------------------------------------


def column_sentence(column: dict[str, Any]) -> str:
    """Formats one entry of `View.columns`.

    >>> column_sentence({"name": "age", "unit": "years", "guess": 9.6, "below": 31, "of": 240, "missing": 0})
    'age: 31 of 240 records are below a guess (±9.6 years)'
    >>> column_sentence({"name": "pay", "unit": "", "guess": 5.0, "below": 1, "of": 20, "missing": 3, "lowest": 4.0,
    ...                  "width": 10.0, "record_name": "row 18"})
    'pay: 1 of 20 records with a value is below a guess (±5); lowest ±4 (row 18)'
    """
    return paragraphs("column.txt", c=column, more=BEYOND)[0]


def columns_scope(view: View) -> str:
    """Returns for which records single columns are known."""
    records, n = view.column_information[0], view.records
    if len(records) == n:
        return "all records"
    if view.leakage.diagonal_of is None:
        return f"only the {count(len(records), 'record')} measured closely (the most and the least exposed) of {n:,}"
    return f"{len(records):,} of {n:,} records: {len(view.leakage.diagonal_of):,} drawn at random, and those kept whole"


def columns_note(view: View) -> str:
    """Explains the counts of `View.columns`, and how exact they are."""
    if not view.columns:
        return ""
    probes, times = int(view.facts.get("diagonal_probes") or 0), int(view.facts.get("diagonal_measured") or 0)
    error = f"{0.5 * math.sqrt(2 / (times * probes)):.0%}" if probes else ""
    missing, scope = any(c["missing"] for c in view.columns), columns_scope(view)
    return " ".join(
        paragraphs("columns-note.txt", scope=scope, probes=probes, times=times, error=error, missing=missing)
    )


# --- assumptions ---------------------------------------------------------------------------


def _entries(template: str, run: Run, **context: Any) -> list[tuple[str, str]]:
    """Returns the entries of a template of plain text, (topic, text): they are set apart by blank lines."""
    seed = "from a seed that nobody else knows. Whoever learns the seed can subtract the noise."
    seed = SEEDS.get(str(run.training.get("seed_from")), seed)
    mechanism = {"sampler": None, "clip": None, "runs": 1, **run.mechanism}
    training = {**dict.fromkeys(("loss_reduction", "expected_batch_size", "clipping", "clip_norms")), **run.training}
    shown = paragraphs(template, m=mechanism, training=training, seed=seed, **context)
    return [(topic, text.strip()) for topic, _, text in (entry.partition(": ") for entry in shown)]


def assumptions(view: View) -> list[tuple[str, str]]:
    """Lists every assumption of the per-record floors: (topic, text).

    Args:
        view: the audit.
    """
    return _entries("assumptions.txt", view.run, view=view, model=describe_smoothness(view.run.caveats))


def describe_smoothness(caveats: Mapping[str, str] | None) -> list[str]:
    """Returns what the floors do not cover of a model, or that it was checked; None: not known."""
    return model_caveats(caveats) or [SMOOTH + (UNCHECKED if caveats is None else CHECKED)]


def public_assumptions(run: Run, noun: str, part: str) -> list[tuple[str, str]]:
    """Lists the assumptions of the mechanism's own floors: (topic, text).

    Args:
        run: the public facts.
        noun: the name of a record.
        part: the name of a private number of a record.
    """
    mechanism, rates = run_mechanism(run), []
    if mechanism is not None:  # what it guarantees to somebody who has several rows
        chances = [(k, format_percent(chance)) for k, chance in _chances_of_groups(mechanism)]
        rates = [f"at most {chance} with {k} {noun}s" for k, chance in chances if chance != "100%"]
        rates += [f"not bounded with {k} {noun}s or more" for k, chance in chances if chance == "100%"][:1]
    facts = {"model": model_caveats(run.caveats), "rates": rates, "blind": format_percent(BLIND), "noise": ""}
    return _entries("assumptions-public.txt", run, noun=noun, part=part, **facts)


@lru_cache(maxsize=64)
def _chances_of_groups(mechanism: SampledGaussian) -> tuple[tuple[int, float], ...]:
    """Returns for some numbers of rows the largest chance to rebuild the record of somebody who has so many."""
    return tuple((k, float(group_of(mechanism, k).rero(BLIND))) for k in (2, 5, 10))


def growth_note(view: View) -> str:
    """Explains the chart of floors over training."""
    known = view.leakage.measured.double()
    often = float(known.mean()) / max(1, int(view.run.mechanism.get("runs", 1))) if known.numel() else 0.0
    times = f"{often:.0f} times" if often >= 1.5 else "once or less"
    return (
        f"First run. Each {view.noun} is measured {times} in a run on average, and a drop shows when it was measured. "
        "Only the right end is the run’s estimate."
    )


# --- settings ------------------------------------------------------------------------------

ORDER = (
    "noise_multiplier", "max_grad_norm", "sample_rate", "steps", "clip", "sampler", "runs", "model", "parameters", "lr",
    "momentum",
)  # fmt: skip
TITLES = {"max_grad_norm": "clip norm C", "sample_rate": "sample rate q", "lr": "learning rate"}


def settings(run: Run) -> list[tuple[str, str]]:
    """Returns mechanism, training and versions as rows: (name, value)."""
    rows = []
    for part in (run.mechanism, run.training):
        known = [name for name in ORDER if name in part]
        for name in (*known, *sorted(set(part) - set(known))):
            rows.append((TITLES.get(name, str(name).replace("_", " ")), plain(part[name])))
    return rows + [(str(name), str(version)) for name, version in sorted(run.software.items())]


# --- advice ---------------------------------------------------------------------------------

#: Computed once for both pages.
_calibrated = lru_cache(maxsize=64)(calibrate)
#: Targets, as shares of the range: (± error, floor, attacker in words).
TARGETS = (
    (0.25, "lecam", "any attacker, on some conceivable {noun}, each {part}"),
    (0.4, "lecam", "any attacker, on some conceivable {noun}, each {part}"),
    (0.45, "rate_distortion", "any attacker, on some conceivable {noun}, average over the {part}s"),
    (0.5, "theorem1", "attacker unbiased for every {noun}, each {part}"),
)


def run_mechanism(run: Run) -> SampledGaussian | None:
    """Returns the mechanism of the run; None where no noise can be found for it."""
    facts = dict(run.guarantee.get("mechanism", {}))
    if facts.pop("type", None) != "SampledGaussian":
        return None
    try:
        return SampledGaussian(**facts)
    except (InputError, TypeError):
        return None


def targets(run: Run, noun: str, part: str, unit: float = 1.0) -> tuple[list[dict[str, Any]], str]:
    """Returns the smallest noise multiplier for some floors that hold whatever the data are.

    Args:
        run: the public facts.
        noun: the name of a record.
        part: the name of a private number of a record.
        unit: errors are shown in units of the data's range times this.

    Returns:
        A row for each target that needs noise, and a note about those that do not, for which no noise follows.
    """
    mechanism = run_mechanism(run)
    rows: list[dict[str, Any]] = []
    met: list[str] = []
    if mechanism is None:
        return rows, ""
    dim = int(run.guarantee.get("data", {}).get("dim", 1))
    for error, name, who in TARGETS:
        who, target = who.format(noun=noun, part=part), plus_minus(error * unit)
        try:
            reached = _calibrated(replace(mechanism, noise_multiplier=1.0), error**2, bound=name, dim=dim)
        except InputError:  # no noise is enough
            continue
        if reached.without_noise is not None:
            met.append(f"{target} ({who})")
            continue
        protection = reached.mechanism.protection()
        rows.append({
            "target": target, "who": who, "noise": format_noise(reached.noise, 3),
            "success": "–" if protection.success is None else format_percent(protection.success),
            "meaningful": protection.meaningful,
            "enough": reached.noise <= mechanism.noise_multiplier and protection.meaningful,
        })  # fmt: skip
    if not met:
        return rows, ""
    never = format_percent(mechanism.never_drawn, 2, "near")
    return rows, (
        f"{' and '.join(met)} {'is' if len(met) == 1 else 'are'} met without noise, because a record is never drawn "
        f"with chance {never}. That protects no record that is drawn, so no noise follows from it."
    )


def next_steps(view: View) -> list[str]:
    """Returns what more noise would do to the chances of success and to the per-record floors.

    The noise wanted lifts the most exposed record to a guess, and its pixels, or the columns of all records, as well.
    """
    noise, single, wanted = float(view.run.mechanism.get("noise_multiplier", 0.0)), 0, None
    known = view.worst is not None and view.guess > 0
    if known:
        if view.features > 1:  # pixels of the most exposed image, or columns of any record, below a guess
            single = view.parts_below_guess() if view.image else sum(c["below"] > 0 for c in view.columns)
        factor = view.guess / view.lowest if view.lowest > 0 else math.inf
        floors = view.feature_floors(view.worst) if view.image else view.lowest_by_column
        if floors is not None:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                each = np.nan_to_num(view.guess_each / floors, nan=0.0, posinf=np.inf)
            factor = max(factor, float(each.max()))
        wanted = format_limit(noise * factor) if noise > 0 and math.isfinite(noise * factor) else None
    return paragraphs("next-steps.txt", view=view, known=known, single=single, noise=noise, wanted=wanted)
