"""Gaussian noise: on sampled, clipped gradients, and on the minimiser of a linear model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from reconbound import divergences as renyi
from reconbound._internal.checks import InputError, choice, number, numbers, whole
from reconbound.bounds import rero_from_gdp
from reconbound.mechanisms import plds
from reconbound.mechanisms.base import ADD_OR_ZERO, ADD_REMOVE, ADJACENCIES, REPLACE_ONE, ZERO_OUT, Mechanism, plain
from reconbound.mechanisms.sensitivities import check_loss, gradient_norm, replaced_norm


def fewest_batches(sample_rate: float) -> int:
    """Returns ⌊1/q⌋, the fewest batches that an epoch of a shuffled loader can have.

    A loader that drops the last batch has this number, others ⌈1/q⌉. A value just below a whole number, as 1/(1/49),
    counts as that number.

    Args:
        sample_rate: q.

    >>> fewest_batches(0.9), fewest_batches(0.3), fewest_batches(1 / 49), fewest_batches(64 / 1797)
    (1, 3, 49, 28)
    """
    rate = number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    return max(1, math.floor(1 / Fraction(rate) * (1 + Fraction(1, 2**51))))


@dataclass(frozen=True)
class SampledGaussian(Mechanism):
    """T steps of the Gaussian mechanism on clipped gradients, as in private SGD.

    Attributes:
        noise_multiplier: the noise's standard deviation on the SUM of clipped gradients over the clip norm, σ.
        sample_rate: q, the chance of a record to be in a batch (B/N for fixed-size batches).
        steps: T.
        clip: "smooth" (the paper's GELU clip, norms up to 1.1153 C) or "hard" (norms up to C, as in Opacus).
        sampler: "poisson"; "fixed": uniform batches of fixed size without replacement; "shuffle": batches cut from
            shuffled epochs, which give no amplification: sample_rate must be 1 and steps the number of epochs
            (`shuffled`). Given the shuffles a record is in one step of each epoch; by joint convexity not knowing them
            only helps.

    >>> round(SampledGaussian(1.0, 0.01, clip="hard").order2(), 9)
    0.000457554
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 1
    clip: str = "smooth"
    sampler: str = "poisson"
    noise_field: ClassVar[str] = "noise_multiplier"

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, above=0.0, at_least=1e-100, at_most=1e100)
        rate = number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        plain(self, noise_multiplier=noise, sample_rate=rate, steps=whole("steps", self.steps))
        choice("clip", self.clip, ("smooth", "hard"))
        choice("sampler", self.sampler, ("poisson", "fixed", "shuffle"))
        if self.sampler == "shuffle" and rate != 1:
            raise InputError("sample_rate", "must be 1 with shuffled epochs, and steps count epochs", self.sample_rate)

    @classmethod
    def shuffled(cls, noise_multiplier: float, per_epoch: int, steps: int, clip: str = "smooth") -> SampledGaussian:
        """Returns T steps of shuffled epochs: one step without sampling for each epoch, begun or whole.

        Args:
            noise_multiplier: σ.
            per_epoch: the number of batches of an epoch.
            steps: T.
            clip: "smooth" or "hard".
        """
        epochs = math.ceil(whole("steps", steps) / whole("per_epoch", per_epoch))
        return cls(noise_multiplier, 1.0, epochs, clip, "shuffle")

    @property
    def kl_neighbours(self) -> str:
        return ADD_REMOVE if self.sampler == "poisson" else ZERO_OUT

    @property
    def paper_neighbours(self) -> str:
        return ZERO_OUT if self.sampler == "shuffle" else ADD_REMOVE  # without a record, other batches are cut

    @property
    def m(self) -> float:
        """Returns the largest clipped norm over the noise's standard deviation on the sum."""
        return renyi.sensitivity(self.clip) / self.noise_multiplier

    @property
    def never_drawn(self) -> float:
        """Returns (1 − q)ᵀ, the chance that a record is in no batch: then the release does not depend on it."""
        return math.exp(self.steps * math.log1p(-self.sample_rate)) if self.sample_rate < 1 else 0.0

    def for_group(self, copies: int) -> SampledGaussian:
        """Returns the mechanism with the group's rows as one record.

        The noise multiplier is σ/k, and a batch holds any of them with chance 1 − (1 − q)ᵏ (Poisson); for batches of
        fixed size there is no gain from sampling.

        Args:
            copies: k, the number of rows.
        """
        k = whole("copies", copies)
        if k == 1:
            return self
        rate = (
            -math.expm1(k * math.log1p(-self.sample_rate))
            if self.sampler == "poisson" and self.sample_rate < 1
            else 1.0
        )
        return replace(self, noise_multiplier=self.noise_multiplier / k, sample_rate=rate)

    @property
    def _drawn(self) -> float:
        """Returns 1 − (1 − q)ᵀ without cancellation: a chance that is rounded to 0 would promise too much."""
        return -math.expm1(self.steps * math.log1p(-self.sample_rate)) if self.sample_rate < 1 else 1.0

    def order2(self) -> float:
        step = renyi.order2_poisson if self.sampler != "fixed" else renyi.order2_fixed
        return self.steps * step(self.m, self.sample_rate)

    def order2_paper(self) -> float:
        return self.steps * renyi.order2_paper(self.m, self.sample_rate)

    def kl(self) -> float:
        step = renyi.kl_poisson if self.sampler != "fixed" else renyi.kl_fixed
        return self.steps * step(self.m, self.sample_rate)

    def overlap(self) -> float:
        if self.sampler != "fixed":
            return renyi.overlap_poisson(self.m, self.sample_rate, self.steps)
        return renyi.overlap_fixed(self.m, self.sample_rate, self.steps, order2=self.order2())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        d, simple = number("delta", delta, above=0.0, below=1.0), super().epsilon_at(delta, adjacency)
        if self.sampler == "shuffle" and adjacency != REPLACE_ONE:
            return None  # leaving a record out cuts other batches
        if self.sampler == "fixed":
            better = (
                plds.fixed_size_epsilon(self.m, self.sample_rate, self.steps, d) if adjacency == REPLACE_ONE else None
            )
        else:
            pld = plds.gaussian(self.m, self.sample_rate, self.steps, adjacency)
            better = plds.epsilon(pld, d) if pld is not None else None
        known = [e for e in (simple, better) if e is not None]
        return min(known) if known else None

    def membership_advantage(self) -> float:
        simple = min(super().membership_advantage(), self._drawn)  # docs/theory/any_attacker.md 6.5
        pld = plds.gaussian(self.m, self.sample_rate, self.steps, REPLACE_ONE) if self.sampler != "fixed" else None
        return simple if pld is None else min(simple, plds.delta(pld, 0.0))

    def rero(self, kappa: Any) -> Any:
        drawn = numbers("kappa", kappa) + self._drawn
        simple = np.minimum(super().rero(kappa), drawn)[()]
        pld = plds.gaussian(self.m, self.sample_rate, self.steps, ADD_REMOVE) if self.sampler != "fixed" else None
        return simple if pld is None else np.minimum(simple, plds.rero(pld, kappa))[()]

    def assumes(self) -> tuple[str, ...]:
        sizes = {"poisson": "a fixed divisor qN", "fixed": "uniform batches of fixed size"}
        size = sizes.get(self.sampler, "shuffled epochs, each counted as one step with every record")
        return (f"{self.clip} clipping, {size}", "the attacker sees every noisy step")

    @property
    def randomness(self) -> str:
        if self.sampler == "shuffle":
            return "the noise of all steps; the shuffles may be known to the attacker"
        return "the noise of all steps and the draw of their batches"

    def notes(self) -> tuple[str, ...]:
        if self.sampler != "shuffle":
            return ()
        return ("Shuffled epochs: sampling brings no protection, so each epoch counts as one step with every record.",)


@dataclass(frozen=True)
class OutputPerturbation(Mechanism):
    """Gaussian noise on the minimiser of Σℓ + (nλ/2)‖W‖² of a linear model.

    nλ is a public constant: without a record its loss is left out, and the penalty does not change.

    Attributes:
        records: n.
        l2: λ.
        noise_std: the noise's standard deviation per coordinate of W.
        data_norm: the Euclidean norm to which every row is clipped, the constant feature not counted.
        loss: "logistic" (two classes), "softmax" or "squared" (ridge regression). One record's gradient is at most
            R, √2·R and YR(1 + R/(2√λ)), where R is the norm of a row with its constant feature.
        target_bound: Y, for squared loss: targets are clipped to |y| ≤ Y.
        intercept: whether rows also have a constant feature 1, so that R = √(data_norm² + 1).

    >>> round(OutputPerturbation(12665, 1e-2, 1e-2).order2(), 2)
    2.49
    """

    records: int
    l2: float
    noise_std: float
    data_norm: float = 1.0
    loss: str = "logistic"
    target_bound: float | None = None
    intercept: bool = False
    sampler: ClassVar[str] = "none"  # type: ignore[misc]
    noise_field: ClassVar[str] = "noise_std"

    def __post_init__(self) -> None:
        check_loss(self.loss, self.target_bound)
        if not isinstance(self.intercept, (bool, np.bool_)):
            raise InputError("intercept", "must be True or False", self.intercept)
        renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.data_norm)
        plain(self, records=int(self.records), l2=float(self.l2))
        plain(self, noise_std=float(self.noise_std), data_norm=float(self.data_norm), intercept=bool(self.intercept))
        if self.target_bound is not None:
            plain(self, target_bound=float(self.target_bound))
        renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.gradient_norm)

    @property
    def row_norm(self) -> float:
        """Returns R, the largest norm of a row, the constant feature included."""
        return math.hypot(self.data_norm, 1.0) if self.intercept else self.data_norm

    @property
    def gradient_norm(self) -> float:
        """Returns L, the largest gradient of one record's loss."""
        return gradient_norm(self.loss, self.row_norm, self.l2, self.target_bound)

    @property
    def radius(self) -> float:
        """Returns the radius of the ball around 0 to which rows are clipped."""
        return self.data_norm

    @property
    def kl_neighbours(self) -> str:
        return ADD_OR_ZERO

    @property
    def m(self) -> float:
        """Returns the largest distance by which one record moves the minimiser, over the noise's standard deviation."""
        return renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.gradient_norm)

    def for_group(self, copies: int) -> OutputPerturbation:
        """Returns the mechanism with the group as one record: k rows move the minimiser k times as far at most.

        Args:
            copies: k, the number of rows.
        """
        return replace(self, noise_std=self.noise_std / whole("copies", copies))

    @property
    def replaced(self) -> float:
        """Returns the same as `m` when a record is replaced by another."""
        both = replaced_norm(self.loss, self.row_norm, self.l2, self.target_bound)
        return self.m * (both / self.gradient_norm)

    def order2(self) -> float:
        return renyi.order2_gaussian(self.replaced / 2)

    def order2_paper(self) -> float:
        return renyi.order2_gaussian(
            self.m / self.gradient_norm
        )  # the paper's gradients have norm 1, whatever the rows

    def kl(self) -> float:
        return self.m**2 / 2

    def overlap(self) -> float:
        return renyi.overlap_poisson(self.replaced / 2, 1.0)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        shift = self.replaced if choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE else self.m
        return plds.gaussian_epsilon(shift, delta)

    def membership_advantage(self) -> float:
        return math.erf(self.replaced / math.sqrt(8))

    def rero(self, kappa: Any) -> Any:
        return rero_from_gdp(kappa, self.m)

    @property
    def randomness(self) -> str:
        return "the noise on the minimiser"

    def assumes(self) -> tuple[str, ...]:
        beside = f" (norm {self.row_norm:.6g} with the constant feature)" if self.intercept else ""
        targets = f", targets to ±{self.target_bound:g}" if self.target_bound is not None else ""
        rows = f"{self.loss} loss, rows clipped to norm {self.data_norm:g}{beside}{targets}"
        return (f"{rows}, gradients of norm {self.gradient_norm:.6g} at most, solved to the minimum; nλ is fixed",)

    def notes(self) -> tuple[str, ...]:
        return (f"Holds for this only: {self.assumes()[0]}.",)
