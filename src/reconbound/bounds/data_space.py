"""The data space, where records can lie: a box, or a ball and the box in it (docs/theory/any_attacker.md 6.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound.bounds.bound import WORST_CASE, Bound, Coordinates


@dataclass(frozen=True)
class Box:
    """A data space that is a box with side lengths w_i.

    `unequal` is None when all sides are equal, so that ten million equal sides cost nothing.
    """

    dim: int
    side: float
    unequal: np.ndarray | None = None

    @property
    def guess(self) -> float:
        """Returns the squared error per coordinate of guessing the middle, at worst: Σ wᵢ²/(4d)."""
        return (self.side**2 if self.unequal is None else float(np.mean(self.unequal**2))) / 4

    @property
    def each(self) -> Coordinates:
        """Returns which coordinates Σ wᵢ² x/d bounds, where wᵢ² x bounds coordinate i: "each" for equal sides."""
        return "each" if self.unequal is None else "average"

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns distinct side lengths and the number of coordinates that have each."""
        if self.unequal is None:
            return np.array([self.side]), np.array([float(self.dim)])
        sides, counts = np.unique(self.unequal, return_counts=True)
        return sides, counts.astype(float)


def box(widths: Any, dim: int | None = None) -> Box:
    """Returns the box with these side lengths; one number and `dim` stand for `dim` equal sides.

    Args:
        widths: one number, or one per coordinate.
        dim: the number of coordinates when `widths` is one number.
    """
    array = numbers("widths", widths, above=0.0)
    if np.any(array > 1e100):
        raise InputError("widths", "must be at most 1e100", float(array.max()))
    if array.size > 1 or array.ndim > 0:
        flat = array.ravel()
        if dim is not None and dim != flat.size:
            raise InputError("dim", f"must equal the number of widths, {flat.size}", dim)
        equal = bool(np.all(flat == flat[0]))
        return Box(flat.size, float(flat[0]), None if equal else flat)
    return Box(whole("dim", 1 if dim is None else dim), float(array))


def _check_ends(low: float, high: float) -> None:
    """Refuses ends of a box that are not in order, or too near or too far apart."""
    lo, hi = number("low", low), number("high", high)
    if lo >= hi:
        raise InputError("low", f"must be less than high ({hi:g})", low)
    if not 1e-100 <= hi - lo <= 1e100:
        raise InputError("high", f"must be between 1e-100 and 1e100 above low ({lo:g})", high)


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
    def side(self) -> float:
        """Returns the box's side length."""
        return self.high - self.low

    @property
    def _other(self) -> bool:
        """Returns whether records may lie outside of the box."""
        return self.whole_ball is not None or self.cut is not None

    @property
    def place(self) -> str:
        """Returns the data space in two words, for a sentence about a record of it."""
        if not self._other:
            return "the box"
        return "the ball" if self.whole_ball is not None else "the range within the ball"

    @property
    def widest(self) -> float:
        """Returns the largest root-mean-square difference over the coordinates of two records."""
        if self.cut is None:
            return self.side
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
        if not self._other:
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
        if not self._other:
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
    if radius is None or (isinstance(radius, float) and radius == math.inf):
        low, high = 0.0 if low is None else low, 1.0 if high is None else high
        _check_ends(low, high)
        return DataSpace(d, float(low), float(high))
    ball = number("radius", radius, above=0.0, at_least=1e-100, at_most=1e100)
    half = ball / math.sqrt(d)
    while d * half * half > ball * ball:  # rounding: the box must not stick out
        half = math.nextafter(half, 0.0)
    if low is None and high is None:
        return DataSpace(d, -half, half, ball, whole_ball=ball)
    given = (0.0 if low is None else number("low", low), 1.0 if high is None else number("high", high))
    _check_ends(*given)
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
