"""What the page says in sentences. Plain text: the templates escape it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .figures import clean, count, percent, plus_minus
from .view import NOTHING, View

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
    return [_first(view, worst), _second(view)]


def _first(view: View, worst: int) -> str:
    if view.image:
        return (
            "An attacker who knows everything but one image’s pixels and is not biased errs by at least "
            f"{plus_minus(float(view.floor[worst]))} {view.of_range} per pixel on the most exposed image; guessing the "
            f"average image errs by {plus_minus(view.guess)}."
        )
    place = view.place(worst)
    floors = None if place is None else view.feature_floors(place)
    if floors is None:
        return (
            "An attacker who knows everything but one record’s private columns and is not biased errs by at least "
            f"{plus_minus(float(view.floor[worst]))} {view.of_range} on the most exposed record (root mean square over "
            f"its private columns); guessing the average errs by {plus_minus(view.guess)}."
        )
    named = most_exposed_columns(view, floors, NAMED)
    said = [
        f"{plus_minus(float(floors[j]), view.feature_unit(j), float(view.scale[j]))} on {view.feature_name(j)}"
        for j in named
    ]
    guesses = [plus_minus(float(view.guess_each[j]), view.feature_unit(j)) for j in named]
    return (
        "An attacker who knows everything but one record’s private columns and is not biased errs by at least "
        f"{_listed(said)} for the most exposed record; guessing the average errs by {_listed(guesses)}."
    )


def most_exposed_columns(view: View, floors: np.ndarray, most: int) -> list[int]:
    """The columns whose floor is lowest beside the error of a guess."""
    order = np.argsort(floors / np.maximum(view.guess_each, np.finfo(float).tiny), kind="stable")
    return [int(j) for j in order[:most]]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _second(view: View) -> str:
    below, all_of = view.below(view.guess), count(view.records, view.noun)
    upper = view.upper_floor
    unsure = upper is None or bool((upper < view.guess).any())
    estimate = "By this estimate, such" if unsure else "Such"
    exposed = view.parts_below_guess()
    if below == 0 and exposed:
        return (
            f"Over all {view.part}s together {estimate[0].lower()}{estimate[1:]} an attacker does better by guessing, "
            f"for every one of the {all_of}; but on {exposed:,} of {view.features:,} single {view.part}s of the most "
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
    share = f"{below:,} of the {all_of} ({percent(below, view.records)})"
    return (
        f"For {share} the floor lies below the error of that guess, and the release may tell more than a guess does; "
        "for all others such an attacker does better by guessing."
    )


def sureness(view: View) -> list[str]:
    """How far the verdict can be relied on: confidence limits or standard errors, records never measured."""
    found = [_confidence(view)] if view.worst is not None else []
    if view.unknown:
        were = "was" if view.unknown == 1 else "were"
        found.append(
            f"{count(view.unknown, view.noun)} of {view.records:,} {were} never measured: nothing is known about "
            "them, and they count as unprotected (floor 0) below."
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
        size = f"of {error:.2g}" if error is not None else "of more than half of it"
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
        were = "was" if rare == 1 else "were"
        said += f"{count(rare, view.noun)} {were} measured too rarely for a limit. "
    short = int((limited & (upper < view.guess) & (view.floor >= view.guess)).sum())
    if short:
        said += (
            f"For {count(short, view.noun)} the floor lies above a guess by the estimate but not at that confidence: "
            "more runs would tell. "
        )
    return said + "The limits are checked by simulation, not proved: docs/theory-accounting.md."


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
    parts = "pixels" if view.image else "private columns"
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
            f"The floors bind attackers whose guess is right on average at this {noun} (Theorem 2 of Guo et al., 2022: "
            "the Cramér–Rao bound, squared error ≥ 1/dFIL). A biased attacker can err less; the floors for any "
            "attacker bind it too, and hold in the worst case over the data space.",
        ),
        (
            "What a floor is",
            f"The root mean square error over one {noun}’s {parts}, and over the noise. Single {parts} can be known "
            "better than the average: the maps above show which.",
        ),
        (
            "Neighbours",
            f"The per-record floors compare the run with runs in which this one {noun}’s {parts} are slightly "
            "different (all else equal). The calculator’s lines say their own neighbours: Theorem 1 and Le Cam replace "
            "one record, rate–distortion adds or removes one.",
        ),
        ("Sampler", SAMPLERS.get(str(m.get("sampler")), f"Batches: {m.get('sampler')}.")),
        ("Sampling gain", RULES.get(_rule(view), _rule(view))),
        ("Clip", CLIPS.get(str(m.get("clip")), f"Clip: {m.get('clip')}.")),
        (
            "Noise",
            f"Gaussian, with standard deviation {m.get('noise_multiplier'):g} × {m.get('max_grad_norm'):g} on the sum "
            "of clipped gradients, fresh at every step and from a seed that nobody else knows. Whoever learns the seed "
            "can subtract the noise.",
        ),
        (
            "Estimate",
            "Leakage is an average over the randomness of training, estimated from "
            f"{count(int(m.get('runs', 1)), 'run')}, of which one is released. Leakage of the released run by itself "
            "can differ from it.",
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
        found.append(("Ranges", "Some were read off the data before training; the floors do not account for that."))
    return found


def _rule(view: View) -> str:
    return str((view.facts.get("rules") or ["exact"])[0])


ORDER = (
    "noise_multiplier", "max_grad_norm", "sample_rate", "steps", "clip", "sampler", "runs", "model", "parameters", "lr",
    "momentum",
)  # fmt: skip
TITLES = {"max_grad_norm": "clip norm C", "sample_rate": "sample rate q", "lr": "learning rate"}


def settings(run: Any) -> list[tuple[str, str]]:
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
