"""The Bound: one error floor, with everything that is needed to quote it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reconbound._internal.checks import LARGEST, number
from reconbound._internal.formatting import format_floor, format_limit, format_percent

Attacker = Literal["unbiased", "any"]
Coordinates = Literal["each", "average"]
Measure = Literal["error", "chance", "advantage"]

#: A floor below this share of a plain guess's squared error says nothing in practice.
VACUOUS_SHARE = 1e-6
#: Stated with a number that is no guarantee, wherever it is shown.
NOT_PROVED = "not proved, no guarantee"
#: The start of `assumes` where a floor for any attacker holds on some record only; "over" and the data space follow.
WORST_CASE = "worst case for the attacker"


@dataclass(frozen=True)
class Bound:
    """A floor under the mean squared error E‖ẑ − z‖²/d, per coordinate, of every attacker of one kind.

    Or a limit on such an attacker's chance of success, or on the advantage of a test: `measure` says which.

    Attributes:
        name: the bound's machine name, as in the command line's JSON.
        value: the floor, in squared data units, or the limit (an array for many records or features).
        theorem: where it is proved.
        attacker: "unbiased" (holds at each record, for attackers without bias there) or "any"
            (holds for biased and prior-informed attackers too, in the worst case or on average over the stated prior).
            `condition` says where it does not hold on each record.
        adjacency: the neighbours between which the mechanism's divergence is taken.
        sampler: how batches are drawn.
        assumes: everything else that the statement assumes.
        guess: squared error per coordinate of a plain guess that never sees the release; of a chance, that of the same
            attack in the other world.
        units: the unit of the data, for printing.
        coordinates: "each": no coordinate by itself is known better than this; "average": only the mean over the
            record's coordinates is bounded, and some of them may be known much better.
        notes: those of `assumes` that must be read with the number; printed with it.
        estimate: whether the number itself was measured, so that the true floor may be lower or higher.
        limits: the lower confidence limits of an estimate, in words; printed before it.
        proved: False where it is not proved: a number for comparison, which guarantees nothing. It is never
            printed without saying so.
        measure: what is bounded: the squared "error" from below; the "chance" of success, or the "advantage" of a test
            between two worlds, from above.

    >>> age = Bound("theorem1", 391.3, "Theorem 1", "unbiased", "replace-one", guess=2500.0, units="years",
    ...             coordinates="each")
    >>> print(age)
    theorem1: an unbiased attacker errs by at least ±19.7 years (MSE 391);
    a plain guess errs by ±50 years [Theorem 1; replace-one]
    """

    name: str
    value: Any
    theorem: str
    attacker: Attacker
    adjacency: str
    sampler: str = "any"
    assumes: tuple[str, ...] = ()
    guess: float | None = None
    units: str = ""
    coordinates: Coordinates = "average"
    notes: tuple[str, ...] = ()
    estimate: bool = False
    proved: bool = True
    limits: str = ""
    measure: Measure = "error"

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("a Bound is not indexed itself: its numbers are in .value (squared units) and .rmse (units)")

    @property
    def mse(self) -> Any:
        """Returns the floor itself, under the name that the command line uses."""
        return self.value

    @property
    def rmse(self) -> Any:
        """Returns the floor's square root, in data units; refuses chances, which have none."""
        if self.measure != "error":
            raise AttributeError(f"{self.name} bounds the {self.measure} of an attack: it has a value and no rmse")
        return math.sqrt(self.value) if np.ndim(self.value) == 0 else np.sqrt(self.value)

    @property
    def vacuous(self) -> Any:
        """Returns True where it says nothing: a chance of 1, or an error below a millionth of a guess's square."""
        if self.measure != "error":
            return _plain(np.asarray(self.value) >= 1)
        return _plain(np.asarray(self.value) <= VACUOUS_SHARE * (self.guess or 0.0))

    @property
    def above_guess(self) -> Any:
        """Returns True where such an attacker does worse than a plain guess (None when no guess is known)."""
        return None if self.guess is None or self.measure != "error" else _plain(np.asarray(self.value) >= self.guess)

    @property
    def condition(self) -> str:
        """Returns a clause that says where a floor holds; "" for one that holds on each record.

        >>> worst = ("worst case for the attacker over the box: on average over its corners",)
        >>> Bound("lecam", 1.0, "Le Cam", "any", "replace-one", assumes=worst).condition
        'on some conceivable record of the box, not on each'
        """
        holds = next((a for a in self.assumes if a.startswith((WORST_CASE, "on average"))), "")
        if not holds.startswith(WORST_CASE):
            return holds
        place = holds.removeprefix(f"{WORST_CASE} over ").partition(":")[0]
        return f"on some conceivable record of {place}, not on each"

    def to_dict(self) -> dict[str, Any]:
        """Returns a plain dictionary for JSON."""
        if self.measure == "error":
            first = {"name": self.name, "mse": self.value, "rmse": self.rmse}
        else:
            first = {"name": self.name, "value": self.value, "measure": self.measure, "baseline": self.guess}
        same = ("attacker", "adjacency", "sampler", "theorem", "units", "coordinates", "estimate", "proved")
        last = {"assumes": list(self.assumes), "vacuous": self.vacuous}
        last |= {"guess_mse": self.guess} if self.measure == "error" else {}
        found = {**first, **{name: getattr(self, name) for name in same}, **last}
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in found.items()}

    def _print_chance(self) -> str:
        values = np.atleast_1d(self.value)
        chance = format_percent(self.guess or 0.0)
        what = f"who succeeds with a chance of {chance} in the other world does so with at most"
        if self.measure == "advantage":
            what = "no test tells the two worlds apart with an advantage above"
        many = f" on every record, {format_percent(float(np.median(values)))} on half of {values.size:,}"
        by = "by an estimate " if self.estimate else ""
        text = f"{by}{what} {format_percent(float(values.max()))}{many if values.size > 1 else ''}"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.name}: {text} [{self.theorem}; {self.adjacency}; {self.sampler} batches{notes}]"

    def __str__(self) -> str:
        if self.measure != "error":
            return self._print_chance()
        who = "an unbiased attacker" if self.attacker == "unbiased" else "any attacker"
        who = f"by an estimate {who}" if self.estimate else who
        unit = f" {self.units}" if self.units else ""
        mean = " on average over the coordinates" if self.coordinates == "average" else ""
        mean += f", {self.condition}" if self.condition else ""
        values, roots = np.atleast_1d(self.value), np.atleast_1d(self.rmse)
        without, there = "", values.reshape(len(values), -1).any(axis=1)  # records never measured have the floor 0
        if there.any() and not there.all():
            without = f"; {int((~there).sum()):,} of {len(values):,} have no floor (0)"
            values, roots = values[there], roots[there]
        least = f"±{format_floor(roots.min())}{unit} (MSE {format_floor(values.min())}){mean}"
        if bool(np.all(self.vacuous)):
            floor = f"says nothing about {who} here (MSE {format_floor(values.min())})"
        elif values.ndim == 2:  # records × features, each of its own unit: no figure for all of them
            each = ", ".join(f"±{format_floor(x)}" for x in roots.min(axis=0)[:8])
            more = f" and so on for {values.shape[1]:,} features" if values.shape[1] > 8 else ""
            where = f", on the record most exposed in it of {len(values):,}" if len(values) > 1 else ""
            floor = f"{who} errs by at least {each}{more} (feature by feature, in the unit of each{where})"
        elif values.size == 1:
            floor = f"{who} errs by at least {least}"
        else:
            median = format_floor(float(np.median(roots)))
            floor = f"{who} errs by at least {least}; the median of {values.size:,} values is ±{median}"
        plain = "" if self.guess is None else format_limit(math.sqrt(self.guess))
        guess = f"; a plain guess errs by ±{plain}{unit}" if plain else ""
        sampler = f"; {self.sampler} batches" if self.sampler not in ("any", "none") else ""
        notes = "".join(f"; {note}" for note in self.notes if note != self.limits)
        first = f"{self.limits}; " if self.limits else ""
        if not self.proved:
            floor = f"{NOT_PROVED}; were it proved, {floor}"
        return f"{self.name}: {first}{floor}{without}{guess} [{self.theorem}; {self.adjacency}{sampler}{notes}]"


def _plain(result: np.ndarray) -> Any:
    return bool(result) if result.ndim == 0 else result


def mean_coordinates(dim: int) -> Coordinates:
    """Returns which coordinates an average over `dim` of them bounds: "each" where there is only one."""
    return "each" if dim == 1 else "average"


def log1m(q: float) -> float:
    """Returns ln(1 − q), −inf at q = 1."""
    return math.log1p(-q) if q < 1 else -math.inf


def log_expm1(x: float) -> float:
    """Returns ln(eˣ − 1) for x > 0 without overflow; −inf at 0."""
    if x <= 0:
        return -math.inf
    return math.log(math.expm1(x)) if x < 1 else x + math.log(-math.expm1(-x))


def from_log(log_value: float) -> float:
    """Returns exp, held within the finite floats: 0.0 when it underflows, the largest float when it overflows."""
    if log_value >= math.log(LARGEST):
        return LARGEST
    return math.exp(log_value)


def divergence(name: str, value: Any) -> float:
    """Checks a divergence: a number that is at least 0; infinity stands for no protection and is allowed.

    Args:
        name: the argument's name, for the message.
        value: the number.
    """
    if isinstance(value, (int, float)) and value == math.inf:
        return math.inf
    return number(name, value, at_least=0.0)
