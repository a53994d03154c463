"""Guarantees of a mechanism against reconstruction, before any data is seen: all floors at once, in data units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from reconbound._internal.checks import InputError, choice, number
from reconbound._internal.formatting import format_floor, format_limit
from reconbound.bounds import Bound, ball_floor, corners, lecam, lecam_unbiased, rate_distortion, theorem1
from reconbound.bounds.bound import DataSpace, data_space
from reconbound.mechanisms import ADD_REMOVE, REPLACE_ONE, Mechanism, as_mechanism
from reconbound.mechanisms.base import BLIND, Protection

#: Chances of a blind guess at which reconstruction robustness is reported.
KAPPAS = (1e-6, 1e-4, BLIND, 1e-1)


@dataclass(frozen=True)
class Guarantee:
    """Every floor of a mechanism, and the chances of attacks. `found["lecam"]` is one floor, `print(found)` all.

    Attributes:
        mechanism: the release.
        space: the data space: a box, or a ball and the box inside it.
        dim: the number of coordinates of that box.
        low: its lower end in every coordinate.
        high: its upper end in every coordinate.
        bounds: the floors, each a `Bound`.
        membership_advantage: of the best test between two candidate records (replace-one); it is right with chance
            (1 + advantage)/2.
        rero: pairs of the chance κ that a blind guess rebuilds the record, and the largest chance with the release.
        epsilon: ε at `delta` under replace-one; None where it is not known.
        epsilon_add_remove: the same under add/remove, as most libraries count.
        delta: the δ of both.
        protection: the largest chance to rebuild a record, and whether the guarantee is meaningful.
    """

    mechanism: Mechanism
    space: DataSpace
    bounds: tuple[Bound, ...]
    membership_advantage: float
    rero: tuple[tuple[float, float], ...]
    epsilon: float | None
    epsilon_add_remove: float | None
    delta: float
    protection: Protection

    def __getitem__(self, name: str) -> Bound:
        for bound in self.bounds:
            if bound.name == name:
                return bound
        raise KeyError(f"{name}: the floors here are {', '.join(bound.name for bound in self.bounds)}")

    @property
    def dim(self) -> int:
        """Returns the number of private coordinates."""
        return self.space.dim

    @property
    def low(self) -> float:
        """Returns the lower end of every coordinate in the box of the floors."""
        return self.space.low

    @property
    def high(self) -> float:
        """Returns the upper end of every coordinate in the box of the floors."""
        return self.space.high

    @property
    def notes(self) -> tuple[str, ...]:
        """Lists what must be read with the numbers: what was assumed, and why floors are vacuous, where known."""
        return (*self.mechanism.notes(), *self.space.notes())

    def to_dict(self) -> dict[str, Any]:
        """Returns a plain dictionary for JSON.

        "meaningful": False where a record that a blind guess rebuilds with chance 1 % may be rebuilt with chance 90 %
        or more whenever it is in a batch; "never_drawn": the chance that a record is in none.
        """
        return {
            "mechanism": {**self.mechanism.to_dict(), "sampler": self.mechanism.sampler},
            "data": self.space.to_dict(),
            "randomness": self.mechanism.randomness,
            "bounds": [bound.to_dict() for bound in self.bounds],
            "membership_advantage": self.membership_advantage,
            "rero": [{"kappa": kappa, "success": success} for kappa, success in self.rero],
            "epsilon": self.epsilon,
            "epsilon_add_remove": self.epsilon_add_remove,
            "delta": self.delta,
            "meaningful": self.protection.meaningful,
            "never_drawn": self.mechanism.never_drawn,
            "notes": list(self.notes),
        }

    @property
    def box(self) -> str:
        """Describes the data space."""
        plural = "s" if self.dim != 1 else ""
        return f"Records of {self.dim:,} private coordinate{plural} in {self.space.describe(self.bounds[0].units)}"

    @property
    def in_short(self) -> str:
        """Summarises the guarantee in two or three sentences, each true by itself.

        They say that the guarantee means little, where it does; how often a record can be rebuilt; and the strongest
        floor that is not vacuous, for any attacker if there is one.
        """
        sentences = (self.protection.warning() or self.protection.sentence(), self._strongest)
        return " ".join(sentence for sentence in sentences if sentence)

    @property
    def _strongest(self) -> str:
        proved = [bound for bound in self.bounds if not bound.vacuous and bound.proved]
        if not proved:
            return "No error floor says anything here."
        bound = max(proved, key=lambda b: (b.attacker == "any", round(b.rmse, 12), b.coordinates == "each"))
        unit = f" {bound.units}" if bound.units else ""
        where = "on average over its coordinates" if bound.coordinates == "average" else "on each coordinate"
        where = f" {where}" if self.dim > 1 else ""
        guess = "" if bound.guess is None else f" (a plain guess: ±{format_limit(bound.guess**0.5)}{unit})"
        errs = f"errs by at least ±{format_floor(bound.rmse)}{unit}{where}{guess}"
        if bound.attacker == "any":
            return (
                "For every attacker, even one who knows every other record, there is some conceivable record in "
                f"{self.space.describe(bound.units)} on which it {errs}; on others it may err by less ({bound.name})."
            )
        place = bound.condition or "at every record"
        return (
            f"An attacker without bias, even one who knows every other record, {errs}, {place}; attackers with "
            f"a bias, who may just guess, are not bound ({bound.name})."
        )

    def __str__(self) -> str:
        pairs = ((self.epsilon, REPLACE_ONE), (self.epsilon_add_remove, ADD_REMOVE))
        epsilons = [f"ε = {format_limit(epsilon, 4)} ({which})" for epsilon, which in pairs if epsilon is not None]
        last = [f"At δ = {format_limit(self.delta, 6)}: {'; '.join(epsilons)}."] if epsilons else []
        last.append(f"{self.mechanism}. Mean errors and chances are over {self.mechanism.randomness}.")
        last += [f"Note: {note}" for note in self.notes]
        first, success = self.protection.warning(), self.protection.sentence()
        lines = [first, f"{self.box}:", *(str(bound) for bound in self.bounds), "" if first else success, *last]
        return "\n".join(line for line in lines if line)


#: The floors of a mechanism, by name.
FLOORS = ("theorem1", "theorem1_paper", "corners", "lecam_unbiased", "lecam", "rate_distortion")


def _in_ball(nats: float, space: DataSpace) -> Bound:
    """Returns the rate–distortion floor on the box inside a ball, or on the ball itself where that is higher."""
    assert space.whole_ball is not None
    found = rate_distortion(nats, widths=space.high - space.low, dim=space.dim)
    ball = ball_floor(nats, space.whole_ball, space.dim)
    return replace(found, value=ball.value, theorem=ball.theorem) if ball.value > found.value else found


def floor_on(
    name: str,
    mechanism: Mechanism,
    space: DataSpace,
    *,
    quick: bool = False,
    baseline: float | None = None,
    units: str = "",
) -> Bound | None:
    """Returns one floor of a mechanism on a data space; None where the mechanism does not have it.

    Args:
        name: as in `floor`.
        mechanism: the release.
        space: the data space.
        quick: leave out loss distributions in `rate_distortion`, which are slow; it may then be lower.
        baseline: as in `floor`.
        units: as in `floor`.
    """
    choice("bound", name, FLOORS)
    if not isinstance(units, str):
        raise InputError("units", "must be text", units)
    sides: dict[str, Any] = {"widths": space.high - space.low, "dim": space.dim}
    if name in ("theorem1", "corners"):
        unbiased = theorem1 if name == "theorem1" else corners
        found = unbiased(mechanism.order2(), both_ends=mechanism.order2_both_ends(), **sides)
    elif name == "lecam_unbiased":
        found = lecam_unbiased(mechanism.overlap(), order2=mechanism.order2(), **sides)
    elif name == "lecam":
        found = lecam(mechanism.overlap(), **sides)
    elif name == "rate_distortion":
        of_nats = partial(rate_distortion, **sides) if space.whole_ball is None else partial(_in_ball, space=space)
        found = max((part.best(of_nats) for part in mechanism.parts(quick=quick)), key=attrgetter("value"))
    else:
        order2 = mechanism.order2_paper()
        if order2 is None:
            return None
        found = theorem1(order2, **sides)
        note = "as the paper computes it (add/remove for SGD, gradients of norm 1 for output perturbation)"
        assumes, theorem = (*found.assumes, note), "Theorem 1, the paper's line (not proved)"
        neighbours = mechanism.paper_neighbours
        found = replace(found, name=name, theorem=theorem, proved=False, adjacency=neighbours, assumes=assumes)
    found = space.adapt(found)
    guess = found.guess if baseline is None else number("baseline", baseline, above=0.0)
    assumes = (*found.assumes, *mechanism.assumes())
    return replace(found, sampler=mechanism.sampler, assumes=assumes, guess=guess, units=units)


def floor(
    name: str,
    mechanism: Any,
    *,
    dim: int = 1,
    low: float | None = None,
    high: float | None = None,
    radius: float | None = None,
    baseline: float | None = None,
    units: str = "",
) -> Bound | None:
    """Returns one floor of a mechanism, by name; None where the mechanism does not have it.

    Args:
        name: theorem1, theorem1_paper, corners, lecam_unbiased, lecam or rate_distortion.
        mechanism: a Mechanism, or a DpEvent or PLD of dp-accounting.
        dim: the number of private coordinates of a record.
        low: smallest value of a coordinate (0 where neither it nor a ball is given).
        high: largest value of a coordinate (1 where neither it nor a ball is given).
        radius: records lie in the ball of this radius around 0. Left out, it is the mechanism's own where it clips rows
            (output perturbation: data_norm); math.inf: low and high are in other units than the rows, or rows longer
            than the clip are meant too.
        baseline: squared error per coordinate of a plain guess on these data. Left out, it is that of guessing the
            middle, for the record farthest from it.
        units: the unit of the data, for printing.

    >>> from reconbound.mechanisms import DP
    >>> print(floor("lecam", DP(1.0, adjacency="replace-one"), high=100.0, units="years"))
    lecam: any attacker errs by at least ±44.3 years (MSE 1,960), on some conceivable record of the box, not on
    each; a plain guess errs by ±50 years [Le Cam; replace-one]
    """
    m = as_mechanism(mechanism)
    space = data_space(dim, low, high, m.radius if radius is None else radius)
    return floor_on(name, m, space, baseline=baseline, units=units)


def guarantee(
    mechanism: Any,
    *,
    dim: int = 1,
    low: float | None = None,
    high: float | None = None,
    radius: float | None = None,
    delta: float = 1e-5,
    baseline: float | None = None,
    units: str = "",
) -> Guarantee:
    """Returns all floors of a mechanism on a data space, its (ε, δ), and the largest chances of attacks.

    Args:
        mechanism: a Mechanism, or a DpEvent or PLD of dp-accounting.
        dim: as in `floor`.
        low: as in `floor`.
        high: as in `floor`.
        radius: as in `floor`.
        delta: the δ at which ε is reported.
        baseline: as in `floor`.
        units: as in `floor`.

    Guarantee: each Bound says its own; all are for an attacker who knows every other record and sees the whole release.

    >>> from reconbound.mechanisms import RenyiDP
    >>> round(guarantee(RenyiDP(2.0), high=100.0)["theorem1"].value, 1)
    391.3
    """
    m = as_mechanism(mechanism)
    d = number("delta", delta, above=0.0, below=1.0)
    space = data_space(dim, low, high, m.radius if radius is None else radius)
    found = [floor_on(name, m, space, baseline=baseline, units=units) for name in FLOORS]
    rero = tuple((kappa, float(success)) for kappa, success in zip(KAPPAS, m.rero(list(KAPPAS)), strict=True))
    epsilon = m.epsilon_at(d, REPLACE_ONE)
    return Guarantee(
        mechanism=m,
        space=space,
        bounds=tuple(bound for bound in found if bound is not None),
        membership_advantage=m.membership_advantage(),
        rero=rero,
        epsilon=epsilon,
        epsilon_add_remove=m.epsilon_at(d, ADD_REMOVE),
        delta=d,
        protection=Protection(dict(rero)[BLIND], m.never_drawn, epsilon, d),
    )
