"""The Bound, one error floor with everything that is needed to quote it, and the data space on which it holds.

A data space, where records can lie, is a box, or a ball and the box in it (docs/theory/any_attacker.md 6.6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from reconbound._internal.checks import LARGEST, InputError, number, numbers, whole
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
        values = np.asarray(self.value)
        found = values <= VACUOUS_SHARE * (self.guess or 0.0) if self.measure == "error" else values >= 1
        return found if values.ndim else bool(found)

    @property
    def above_guess(self) -> Any:
        """Returns True where such an attacker does worse than a plain guess (None when no guess is known)."""
        if self.guess is None or self.measure != "error":
            return None
        found = np.asarray(self.value) >= self.guess
        return found if np.ndim(found) else bool(found)

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


@dataclass(frozen=True)
class Box:
    """A data space that is a box with side lengths w_i.

    Attributes:
        dim: d, the number of coordinates.
        lengths: the side lengths; one number where all are equal, so that ten million equal sides cost nothing.
        sides: the different lengths, rising.
        counts: the number of coordinates that have each.
        guess: the squared error per coordinate of guessing the middle, at worst: Σ wᵢ²/(4d).
        each: which coordinates Σ wᵢ² x/d bounds, where wᵢ² x bounds coordinate i: "each" for equal sides.
    """

    dim: int
    lengths: np.ndarray
    sides: np.ndarray
    counts: np.ndarray
    guess: float
    each: Coordinates


def box(widths: Any, dim: int | None = None) -> Box:
    """Returns the box with these side lengths; one number and `dim` stand for `dim` equal sides.

    Args:
        widths: one number, or one per coordinate.
        dim: the number of coordinates when `widths` is one number.
    """
    array = numbers("widths", widths, above=0.0)
    if np.any(array > 1e100):
        raise InputError("widths", "must be at most 1e100", float(array.max()))
    if array.ndim > 0 and dim not in (None, array.size):
        raise InputError("dim", f"must equal the number of widths, {array.size}", dim)
    d, lengths = array.size if array.ndim > 0 else whole("dim", 1 if dim is None else dim), array.ravel()
    if np.all(lengths == lengths[0]):
        side = float(lengths[0])
        return Box(d, np.array(side), np.array([side]), np.array([float(d)]), guess=side**2 / 4, each="each")
    sides, counts = np.unique(lengths, return_counts=True)
    return Box(d, lengths, sides, counts.astype(float), guess=float(np.mean(lengths**2)) / 4, each="average")


@dataclass(frozen=True)
class DataSpace:
    """A box of equal sides whose corners the floors use, and the ball that records are known to lie in.

    Attributes:
        dim: d, the number of coordinates.
        low: the lower end of every coordinate in the box.
        high: the upper end of every coordinate in the box.
        ball: the radius of the ball around 0 that holds all records and the box; None where there is only the box.
        cut: the ends that were given, where the box was cut to fit into the ball; None where it was not.
        whole_ball: the radius where the ball itself is the data space: no ends were given.
    """

    dim: int
    low: float
    high: float
    ball: float | None = None
    cut: tuple[float, float] | None = None
    whole_ball: float | None = None

    @property
    def place(self) -> str:
        """Returns the data space in two words, for a sentence about a record of it."""
        if self.whole_ball is not None:
            return "the ball"
        return "the box" if self.cut is None else "the range within the ball"

    @property
    def widest(self) -> float:
        """Returns the largest root-mean-square difference over the coordinates of two records."""
        if self.cut is None:
            return self.high - self.low
        return min(self.cut[1] - self.cut[0], 2 * (self.ball or 0.0) / math.sqrt(self.dim))

    def describe(self, units: str = "") -> str:
        """Describes the data space in words."""
        unit = f" {units}" if units else ""
        if self.whole_ball is not None:
            return f"the ball of radius {end(self.whole_ball)}{unit} around 0"
        if self.cut is not None:
            low, high = self.cut
            return f"[{end(low)}, {end(high)}]{unit} and in the ball of radius {end(self.ball or 0.0)} around 0"
        return f"[{end(self.low)}, {end(self.high)}]{unit}"

    def notes(self) -> tuple[str, ...]:
        """States what the floors use of a ball."""
        if self.cut is None and self.whole_ball is None:  # all records lie in the box
            return ()
        uniform = "" if self.whole_ball is None else ", rate_distortion's of the ball itself where that is higher"
        inside = f"[{end(self.low)}, {end(self.high)}]"
        return (
            f"Records lie in the ball of radius {end(self.ball or 0.0)} around 0. The floors are those of the box "
            f"{inside} inside it{uniform}: those for any attacker are below what every guess, that of 0 included, errs "
            "by on some record.",
        )

    def adapt(self, bound: Bound) -> Bound:
        """Returns the bound of the box, as a statement about the data space.

        The guess is that of the middle of the range or of 0, whichever errs less. In a ball, `theorem1` holds at every
        record on average over the coordinates only (docs/theory/any_attacker.md 6.6).
        """
        if self.cut is None and self.whole_ball is None:  # all records lie in the box
            return bound
        worst = f"{WORST_CASE} over {self.place}: through the box inside it"
        changes = {"every record of the box": f"every record of {self.place}"}
        changes["corners of the box"] = "corners of the box inside the ball"
        assumes = [worst if one.startswith(WORST_CASE) else one for one in bound.assumes]
        for old, new in changes.items():
            assumes = [one.replace(old, new) for one in assumes]
        given = self.cut or (self.low, self.high)
        guess = min((given[1] - given[0]) ** 2 / 4, (self.ball or 0.0) ** 2 / self.dim)
        average = bound.name in ("theorem1", "theorem1_paper") and self.dim > 1
        mean = "average" if average else bound.coordinates
        return replace(bound, assumes=tuple(assumes), guess=guess, coordinates=mean)

    def to_dict(self) -> dict[str, Any]:
        """Returns a plain dictionary for JSON: "space" in words, and "low" and "high" of the box of the floors."""
        ends = {"low": self.low, "high": self.high, "ball": self.ball, "cut_from": self.cut}
        return {"dim": self.dim, "space": self.describe(), **ends}


def data_space(dim: int, low: float | None = None, high: float | None = None, radius: float | None = None) -> DataSpace:
    """Returns the data space with these ends, this ball, or both.

    Args:
        dim: the number of coordinates.
        low: their smallest value; 0 if left out, unless only the ball is given.
        high: their largest value; 1 if left out, unless only the ball is given.
        radius: of the ball around 0 that holds all records; None or math.inf: there is none.

    >>> data_space(4, radius=1.0).high, data_space(4, 0.0, 1.0, 1.0).high, data_space(4, 0.0, 1.0, 2.0).high
    (0.5, 0.5, 1.0)
    """
    d = whole("dim", dim)
    no_ball = radius is None or (isinstance(radius, float) and radius == math.inf)
    ball = math.inf if no_ball else number("radius", radius, above=0.0, at_least=1e-100, at_most=1e100)
    half = ball / math.sqrt(d)
    while d * half * half > ball * ball:  # rounding: the box must not stick out
        half = math.nextafter(half, 0.0)
    if not no_ball and low is None and high is None:
        return DataSpace(d, -half, half, ball, whole_ball=ball)
    low, high = 0.0 if low is None else low, 1.0 if high is None else high
    given = number("low", low), number("high", high)
    if given[0] >= given[1]:
        raise InputError("low", f"must be less than high ({given[1]:g})", low)
    if not 1e-100 <= given[1] - given[0] <= 1e100:
        raise InputError("high", f"must be between 1e-100 and 1e100 above low ({given[0]:g})", high)
    if no_ball:
        return DataSpace(d, *given)
    inside = (max(given[0], -half), min(given[1], half))
    if inside == given:
        return DataSpace(d, *given, ball)
    if not inside[1] - inside[0] >= 1e-100:
        must = f"must leave records within the ball of radius {ball:g}: a coordinate between {-half:g} and {half:g}"
        raise InputError(*(("low", must, given[0]) if given[0] > 0 else ("high", must, given[1])))
    return DataSpace(d, *inside, ball, cut=given)


def end(x: float) -> str:
    """Formats an end of the data's range, as it was given."""
    return f"{x:,.0f}" if 1e3 <= abs(x) < 1e15 and x == int(x) else f"{x:g}"
