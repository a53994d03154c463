"""Sentences of the page. Plain text: the templates escape it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reconbound.report.figures import clean, count
from reconbound.report.folder import CHOSEN_SEED, Run
from reconbound.report.view import View

CHOSEN = "from a seed that was chosen by hand. Whoever guesses it can subtract the noise, and no floor here binds them."
INFERRED = (
    "Some columns’ ranges were read off the data before training. Another record could then change the inputs of all, "
    "and neither ε nor the floors account for that."
)
SMOOTH = "The floors need a gradient that is smooth in a record’s values: no ReLU, no max pooling. "
CHECKED = "The check before training, on three records, found no kinks."
UNCHECKED = "This folder does not say whether the model was checked for it."

SAMPLERS = {
    "poisson": "Every record is in each batch by the toss of a coin (Poisson sampling), with a fixed divisor qN that "
    "does not tell who took part. The attacker does not know the tosses for the record that it attacks.",
    "fixed": "Every batch is a uniform draw of fixed size without replacement.",
    "shuffle": "Batches are cut from shuffled epochs: sampling brings no protection, and none is counted.",
}

RULES = {
    "exact": "The exact factors for Poisson batches: no failure probability.",
    "fixed": "The factor for batches of fixed size: proved, an upper bound of the leakage.",
    "none": "No gain from sampling is counted: an upper bound of the leakage.",
    "paper": "The κ of Guo et al. (2022): for comparison, guarantees nothing.",
}

CLIPS = {
    "smooth": "Each record’s gradient is clipped by the smooth (GELU) clip, whose clipped norm is at most 1.1153 C.",
    "hard": "Each record’s gradient is clipped to norm C by the hard clip; the information is taken where the clip "
    "has a slope (it has none only at norm exactly C).",
}


def public_columns(run: Run) -> list[tuple[str, str]]:
    """Names the columns that are not protected; empty where there are none."""
    names = [clean(str(name), 80) for name in run.data.get("public") or ()]
    return [("Public", f"Taken as known to the attacker: {', '.join(names)}.")] if names else []


def assumptions(view: View) -> list[tuple[str, str]]:
    """Lists every assumption of the per-record floors: (topic, sentence)."""
    m, noun = view.run.mechanism, view.noun
    parts = view.private_parts
    where = f"the {'maps' if view.image else 'tables'} above show which"
    if view.leakage.kept_diagonal is None:
        where = "which ones is not measured with this sampler"
    single = f" Single {parts} can be known better than the average: {where}." if view.features > 1 else ""
    known = (
        f"this {noun}’s label"
        if view.facts.get("task", "classes") == "classes"
        else f"this {noun}’s {view.target_name}"
    )
    found = [
        (
            "Attacker",
            f"Knows every other record, {known} and everything else about it but its {parts}, the model, the "
            "code and all settings, and sees every noisy step of the training, not only the final model.",
        ),
        *public_columns(view.run),
        (
            "Unbiased",
            f"The floors bind attackers whose guess is right on average at this {noun} and next to it (Theorem "
            "2 of Guo et al., 2022: the Cramér–Rao bound, squared error ≥ 1/dFIL). A biased attacker can err less. The "
            f"floors for any attacker bind it too, but say only that there is some conceivable {noun} on which it errs "
            f"by as much, not that this {noun} is one.",
        ),
        ("Two demands", two_demands(noun)),
        (
            "What a floor is",
            f"The root mean square error over one {noun}’s {parts}, and over the noise.{_means(view)}{single}",
        ),
        (
            "Neighbours",
            f"The per-record floors compare the run with runs in which this one {noun}’s {parts} "
            f"{'are' if view.features > 1 else 'is'} slightly "
            "different (all else equal). The calculator’s lines say their own neighbours: Theorem 1 and Le Cam replace "
            "one record, rate–distortion adds or removes one.",
        ),
        ("Sampler", SAMPLERS.get(str(m.get("sampler")), f"Batches: {m.get('sampler')}.")),
        ("Sampling gain", RULES.get(_rule(view), _rule(view))),
        ("Clip", CLIPS.get(str(m.get("clip")), f"Clip: {m.get('clip')}.")),
        (
            "Noise",
            f"Gaussian, with standard deviation {m.get('noise_multiplier'):g} × {m.get('max_grad_norm'):g} on the sum "
            f"of clipped gradients, {seed(view.run)}",
        ),
        (
            "Estimate",
            "Leakage is an average over the randomness of training, estimated from "
            f"{count(int(m.get('runs', 1)), 'run')}. Leakage of the released run by itself can differ from it. The "
            f"most and the least exposed {noun}s were picked by these estimates: at the most exposed they are rather "
            "too high, at the least exposed rather too low.",
        ),
        ("Release", release(view.run)),
        *(
            ("Model", said)
            for said in caveats(view.run) or [SMOOTH + (CHECKED if view.run.caveats is not None else UNCHECKED)]
        ),
        (
            "Guess",
            f"“Guessing the average” knows the average of all {noun}s and nothing about this one. Somebody who knows "
            f"{known} guesses better.",
        ),
        (
            "Not covered",
            "What else was released from these data (other models, statistics, earlier runs, choices of settings made "
            f"by looking at results), and persons who have more than one {noun}: see what is said of copies.",
        ),
    ]
    found += [("Data", clean(note, 400)) for note in view.facts.get("notes") or ()]
    if view.facts.get("inferred_ranges"):
        found.append(("Ranges", INFERRED))
    return found


def _means(view: View) -> str:
    if view.features == 1:
        return ""
    return (
        f" It is at most the root mean square of the {view.part}s’ own floors (as shares of the range): d/Tr I is the "
        "harmonic mean of their squares 1/I_jj, no more than the arithmetic mean, and equal to it where all "
        f"{view.part}s are exposed alike."
    )


def seed(run: Run) -> str:
    """Says where the noise comes from, as the end of a sentence."""
    if run.training.get("seed_from") == CHOSEN_SEED:
        return f"fresh at every step, but {CHOSEN}"
    return "fresh at every step and from a seed that nobody else knows. Whoever learns the seed can subtract the noise."


def release(run: Run) -> str:
    """Says which of the runs is released."""
    runs = int(run.mechanism.get("runs", 1))
    which = "The one run" if runs == 1 else f"The first of {runs:,} runs, fixed beforehand; the others only measure"
    return (
        f"{which}. Nothing here covers the release of two or more models from these data, measuring runs included: "
        "each adds its own leakage, and the information of all of them adds up."
    )


def caveats(run: Run) -> list[str]:
    """Lists what the floors do not cover of this model, as the audit's check found it. It is shown first."""
    return [clean(said, 600) for said in (run.caveats or {}).values()]


def growth_note(view: View) -> str:
    """Explains the chart of floors over training: mostly when records were measured, if that is seldom."""
    known = view.leakage.measured.double()
    often = float(known.mean()) / max(1, int(view.run.mechanism.get("runs", 1))) if known.numel() else 0.0
    times = f"{often:.0f} times" if often >= 1.5 else "once or less"
    return (
        f"Every step tells a little more. Each {view.noun} is measured {times} in a run on average: the drops show "
        "when records happened to be measured more than when they leaked, and only the right end is the run’s "
        "estimate. First run."
    )


def for_any_attacker(
    noun: str, part: str, each: float | None, mean: float | None, shown: Callable[[float], str], *, one: bool
) -> list[str]:
    """Says what the floors for any attacker mean, in sentences that are true by themselves.

    They are minimax floors: for each attacker there is a record, of all conceivable ones, on which it errs by as much.

    Args:
        noun: the name of a record.
        part: the name of a private number of it.
        each: the floor for each number by itself (Le Cam); None where it says nothing.
        mean: the floor on average over them (rate–distortion); None where it says nothing.
        shown: formats an error with its unit.
        one: whether a record has one private number only.
    """
    less = f"on other {noun}s, those trained on included, it may err by less"
    if one:
        found = [x for x in (each, mean) if x is not None]
        some = f"For every attacker there is some conceivable {noun} on which it errs by at least"
        return [f"{some} {shown(max(found))} on the private {part}; {less}."] if found else []
    said = []
    if each is not None:
        said.append(
            f"For every attacker and every {part} there is some conceivable {noun} on which it errs by at least "
            f"{shown(each)} in that {part}; {less}."
        )
    if mean is not None and mean > (each or 0.0):
        said.append(
            f"For every attacker there is some conceivable {noun} on which it errs by at least {shown(mean)} on "
            f"average over the {part}s; {less}."
        )
    return said


def two_demands(noun: str) -> str:
    """Explains what two kinds of floors require of the attacker, and which to report.

    They are the unbiased floors of single records, and those that hold whatever the data are.

    docs/theory/floors.md: Theorem 2 needs its mean to move with the record at the record; Theorem 1 and corners need it
    right at the record and at the far walls, or all corners, of the data space.
    """
    return (
        f"A single {noun}’s floor binds an attacker whose guesses are right on average for this {noun} and those next "
        f"to it; Theorem 1 and “all corners” bind only one whose guesses are right on average for every {noun} there "
        "could be, up to the ends of the range. That asks more of the attacker, so they can be far higher and "
        "still agree. Report the lower one: it holds for both."
    )


def _rule(view: View) -> str:
    return str((view.facts.get("rules") or ["exact"])[0])


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
            rows.append((TITLES.get(name, str(name).replace("_", " ")), _plain(part[name])))
    rows += [(str(name), str(version)) for name, version in sorted(run.software.items())]
    return rows


def _plain(given: Any) -> str:
    if isinstance(given, bool) or given is None:
        return {True: "yes", False: "no", None: "–"}[given]
    if isinstance(given, int):
        return f"{given:,}"
    if isinstance(given, float):
        return f"{given:.6g}"
    if isinstance(given, (list, tuple)):
        return ", ".join(_plain(part) for part in given)
    if isinstance(given, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in given.items())
    return str(given)
