"""What the page says in sentences. Plain text: the templates escape it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..run_folder import CHOSEN_SEED, Run
from .figures import clean, count, percent, plus_minus, rough
from .view import NO_LIMIT, NOTHING, View

CHOSEN = "from a seed that was chosen by hand. Whoever guesses it can subtract the noise, and no floor here binds them."
INFERRED = (
    "Some columns’ ranges were read off the data before training. Another record could then change the inputs of all, "
    "and neither ε nor the floors account for that."
)
SMOOTH = "The floors need a gradient that is smooth in a record’s values: no ReLU, no max pooling. "
CHECKED = "The check before training, on three records, found no kinks."
UNCHECKED = "This folder does not say whether the model was checked for it."
#: How many columns the verdict names.
NAMED = 3


def verdict(view: View) -> list[str]:
    """Two sentences: the floor at the most exposed record beside a guess, and what that means for all records."""
    worst = view.worst
    if worst is None:
        return [
            f"None of the {count(view.records, view.noun)} was ever measured, so nothing can be said about them.",
            "Audit with more steps or a larger accounting budget.",
        ]
    return [*caveats(view.run), _first(view, worst), _second(view)]


def _first(view: View, worst: int) -> str:
    if view.image:
        return (
            "An attacker who knows everything but one image’s pixels and is not biased errs by at least "
            f"{plus_minus(float(view.floor[worst]))} {view.of_range} per pixel on the most exposed image; guessing the "
            f"average image errs by {plus_minus(view.guess)}."
        )
    floors = view.feature_floors(worst)
    if floors is None or np.isnan(floors).all():
        return (
            f"An attacker who knows everything but one record’s {view.private_parts} and is not biased errs by at "
            f"least {plus_minus(float(view.floor[worst]))} {view.of_range} on the most exposed record (root mean "
            f"square over its {view.private_parts}); guessing the average errs by {plus_minus(view.guess)}."
        )
    named = [j for j in most_exposed_columns(view, floors, NAMED) if not np.isnan(floors[j])]
    said = [
        f"{plus_minus(float(floors[j]), view.feature_unit(j), float(view.scale[j]))} on {view.feature_name(j)}"
        for j in named
    ]
    guesses = [plus_minus(float(view.guess_each[j]), view.feature_unit(j)) for j in named]
    return (
        f"An attacker who knows everything but one record’s {view.private_parts} and is not biased errs by at least "
        f"{_listed(said)} for the most exposed record; guessing the average errs by {_listed(guesses)}."
    )


def most_exposed_columns(view: View, floors: np.ndarray, most: int) -> list[int]:
    """The columns whose floor is lowest beside the error of a guess."""
    with np.errstate(over="ignore"):  # a column whose every value is the same: no floor is low beside that guess
        ratio = floors / np.maximum(view.guess_each, np.finfo(float).tiny)
    return [int(j) for j in np.argsort(ratio, kind="stable")[:most]]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _second(view: View) -> str:
    below, all_of, unknown = view.below(view.guess), count(view.records, view.noun), view.unknown
    upper = view.upper_floor
    unsure = upper is None or bool((upper < view.guess).any())
    estimate = "By this estimate, such" if unsure else "Such"
    exposed = view.parts_below_guess() if view.features > 1 else 0
    if unknown and below <= unknown:
        return (
            f"{unknown:,} of the {all_of} {_were(unknown)} never measured: nothing is known about them, and they count "
            f"as unprotected. {estimate} an attacker does better by guessing for all others."
        )
    if below == 0 and exposed:
        return (
            f"{estimate} an attacker does better by guessing over all {view.part}s together, for every one of the "
            f"{all_of}; but on {exposed:,} of {view.features:,} single {view.part}s of the most "
            f"exposed {view.noun} the floor lies below a guess, and the release may tell more."
        )
    if below == 0:
        return (
            f"{estimate} an attacker does better by guessing than by relying on the release, for every one of the "
            f"{all_of}: on its own the release hardly helps it."
        )
    if below == view.records:
        return (
            f"For all of the {all_of} the floor lies below that guess: the release may tell such an attacker more than "
            "a guess does, and more noise is called for."
        )
    share = f"{below:,} of the {all_of} ({percent(below, view.records)}"
    share += f", {unknown:,} of them never measured)" if unknown else ")"
    single = (
        f" Single {view.part}s can be known better than that: at the most exposed {view.noun}, {exposed:,} of "
        f"{view.features:,} {_have(exposed)} a floor below a guess."
        if exposed
        else ""
    )
    floor, guess = ("the floor", "a guess")
    if view.features > 1:
        floor, guess = f"the floor over all {view.part}s together", "a guess of them"
    return (
        f"For {share} {floor} lies below the error of {guess}, and the "
        f"release may tell more than a guess does; for all others such an attacker does better by guessing.{single}"
    )


def sureness(view: View) -> list[str]:
    """How far the verdict can be relied on: confidence limits or standard errors, records never measured."""
    found = [_confidence(view)] if view.worst is not None else []
    if view.unknown:
        found.append(
            f"{count(view.unknown, view.noun)} of {view.records:,} {_were(view.unknown)} never measured: nothing is "
            "known about them, and they count as unprotected (floor 0) below."
        )
    if view.facts.get("inferred_ranges"):
        found.append(
            "Some columns’ ranges were read off the data. Their units rest on it, and the training did too: declare "
            "ranges (--range) to rule this out."
        )
    found.append(
        "A biased attacker, such as one who mixes the release with what it knows about "
        f"{'pictures' if view.image else 'people'} in general, is not bound by these floors. " + _any_attacker(view)
    )
    return found


def _confidence(view: View) -> str:
    worst, upper = view.worst, view.upper_floor
    assert worst is not None
    if upper is None:
        error = view.floor_error(worst)
        size = f"of {rough(error)}" if error is not None else "of more than half of it"
        return (
            f"These are estimates from one run. The floor of the most exposed {view.noun} has a standard error {size} "
            "from measuring alone; another run would differ by more. Audit with --runs 10 for confidence limits."
        )
    level = f"{100 * float(view.facts.get('confidence', 0.95)):g} %"
    runs = int(view.run.mechanism.get("runs", 2))
    limited = upper > 0
    rare = int((view.measured & ~limited).sum())
    said = f"Average of {runs:,} runs. "
    if upper[worst] > 0:
        own, lowest = float(upper[worst]), float(upper[limited].min())
        said += f"At {level} confidence the floor of the most exposed {view.noun} is at least {plus_minus(own)}"
        said += f", and that of any {view.noun} at least {plus_minus(lowest)}" if lowest < own else ""
        said += f" ({view.of_range}). "
    if rare:
        said += f"{count(rare, view.noun)} {_have(rare)} no limit: {NO_LIMIT}. "
    short = int((limited & (upper < view.guess) & (view.floor >= view.guess)).sum())
    if short:
        said += (
            f"For {count(short, view.noun)} the floor lies above a guess by the estimate but not at that confidence: "
            "more runs would tell. "
        )
    return said + (
        f"Floors of single {view.part}s are estimates without a limit. The limits are checked by simulation, not "
        "proved: docs/theory-accounting.md."
    )


def _were(n: int) -> str:
    return "was" if n == 1 else "were"


def _have(n: int) -> str:
    return "has" if n == 1 else "have"


def _any_attacker(view: View) -> str:
    each, mean = (view.line(name) or 0.0 for name in ("lecam", "rate_distortion"))
    said = []
    if each >= NOTHING * view.unit:
        said.append(f"{plus_minus(each)} on each {view.part}")
    if mean >= max(NOTHING * view.unit, each):
        said.append(f"{plus_minus(mean)} on average over the {view.part}s")
    if not said:
        return "The noise by itself gives no floor worth naming for it."
    return (
        f"Any attacker, biased or not, errs by at least {' and '.join(said)} ({view.of_range}) in the worst case over "
        f"all {view.noun}s there could be: that is what the noise by itself guarantees, whatever the data."
    )


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


def assumptions(view: View) -> list[tuple[str, str]]:
    """Every assumption that the per-record floors rest on: (about what, in words)."""
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
        (
            "Unbiased",
            f"The floors bind attackers whose guess is right on average at this {noun} and next to it (Theorem "
            "2 of Guo et al., 2022: the Cramér–Rao bound, squared error ≥ 1/dFIL). A biased attacker can err less; the "
            "floors for any attacker bind it too, and hold in the worst case over the data space.",
        ),
        ("Two demands", two_demands(noun)),
        (
            "What a floor is",
            f"The root mean square error over one {noun}’s {parts}, and over the noise.{single}",
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
            f"by looking at results), and {noun}s that occur more than once.",
        ),
    ]
    found += [("Data", clean(note, 400)) for note in view.facts.get("notes") or ()]
    if view.facts.get("inferred_ranges"):
        found.append(("Ranges", INFERRED))
    return found


def seed(run: Run) -> str:
    """Where the noise is from, as the end of a sentence."""
    if run.training.get("seed_from") == CHOSEN_SEED:
        return f"fresh at every step, but {CHOSEN}"
    return "fresh at every step and from a seed that nobody else knows. Whoever learns the seed can subtract the noise."


def release(run: Run) -> str:
    """What is released of the runs."""
    runs = int(run.mechanism.get("runs", 1))
    which = "The one run" if runs == 1 else f"The first of {runs:,} runs, fixed beforehand; the others only measure"
    return (
        f"{which}. Nothing here covers the release of two or more models from these data, measuring runs included: "
        "each adds its own leakage, and the information of all of them adds up."
    )


def caveats(run: Run) -> list[str]:
    """What the floors do not cover of this model, as the audit's check found it: said first."""
    return [clean(said, 600) for said in (run.caveats or {}).values()]


def growth_note(view: View) -> str:
    """What the chart of floors over training shows: mostly when records were measured, if that is seldom."""
    known = view.leakage.measured.double()
    often = float(known.mean()) / max(1, int(view.run.mechanism.get("runs", 1))) if known.numel() else 0.0
    times = f"{often:.0f} times" if often >= 1.5 else "once or less"
    return (
        f"Every step tells a little more. Each {view.noun} is measured {times} in a run on average: the drops show "
        "when records happened to be measured more than when they leaked, and only the right end is the run’s "
        "estimate. First run."
    )


def two_demands(noun: str) -> str:
    """What the unbiased floors of single records and those whatever the data ask of the attacker, and which to report.

    docs/theory.md 5: Theorem 2 needs its mean to move with the record at the record; Theorem 1 and corners need it
    right at the record and at the far walls, or all corners, of the data space."""
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
    """Mechanism, training and versions as rows: (name, value)."""
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
