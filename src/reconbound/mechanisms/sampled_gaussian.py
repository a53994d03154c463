"""Gaussian noise on sampled, clipped gradients: private SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from reconbound import divergences as renyi
from reconbound._internal.checks import InputError, choice, number, numbers, whole
from reconbound.bounds.bound import log1m
from reconbound.bounds.parts import Parts, parts_by_draws, parts_from_losses, parts_gaussian, whole_release
from reconbound.bounds.success import rero_from_order2
from reconbound.bounds.trade_off import GaussianTradeOff, TradeOff
from reconbound.mechanisms import fixed_size_loss, privacy_loss
from reconbound.mechanisms.base import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Mechanism,
    advantage_from_order2,
    epsilon_from_order2,
)
from reconbound.mechanisms.epsilons import fixed_size_epsilon
from reconbound.mechanisms.releases import FixedRelease, GaussianRelease, Release


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


#: What differs from Poisson batches: without a record, batches of a fixed size and of a shuffled epoch are others.
_OF_SAMPLER: dict[str, dict[str, str]] = {
    "poisson": {},
    "fixed": {"kl_neighbours": ZERO_OUT},
    "shuffle": {
        "kl_neighbours": ZERO_OUT,
        "paper_neighbours": ZERO_OUT,
        "randomness": "the noise of all steps; the shuffles may be known to the attacker",
    },
}


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
    kl_neighbours = ADD_REMOVE  # these three of Poisson batches: `_OF_SAMPLER` has those of others
    paper_neighbours = ADD_REMOVE
    randomness = "the noise of all steps and the draw of their batches"

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, above=0.0, at_least=1e-100, at_most=1e100)
        rate = number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        self._set(noise_multiplier=noise, sample_rate=rate, steps=whole("steps", self.steps))
        choice("clip", self.clip, ("smooth", "hard"))
        self._set(**_OF_SAMPLER[choice("sampler", self.sampler, tuple(_OF_SAMPLER))])
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

    @classmethod
    def per_layer(
        cls,
        noise_stds: Sequence[float],
        max_grad_norms: Sequence[float],
        sample_rate: float = 1.0,
        steps: int = 1,
        clip: str = "hard",
        sampler: str = "poisson",
    ) -> SampledGaussian:
        """Returns T steps whose gradients are clipped layer by layer, each layer with noise of its own.

            σ = 1/√(Σ (C_l/s_l)²)

        Divided by its noise, each layer's sum has a record's gradient of norm at most C_l/s_l and noise of variance 1
        (docs/theory/compositions.md). Opacus' per_layer clipping has the same noise in each layer, which is its noise
        multiplier times √ΣC_l²: there σ is its noise multiplier.

        Args:
            noise_stds: s_l, the noise's standard deviation on the sum of each layer's gradients.
            max_grad_norms: C_l, the norm to which each layer's gradient is clipped.
            sample_rate: q.
            steps: T.
            clip: "smooth" or "hard".
            sampler: "poisson", "fixed" or "shuffle".

        >>> round(SampledGaussian.per_layer([2.0, 2.0], [1.0, 1.0]).noise_multiplier, 6)
        1.414214
        """
        noises = numbers("noise_stds", noise_stds, above=0.0).ravel()
        clips = numbers("max_grad_norms", max_grad_norms, above=0.0).ravel()
        if len(clips) != len(noises):
            raise InputError("max_grad_norms", f"must be {len(noises)} numbers, as noise_stds", len(clips))
        shift = math.sqrt(math.fsum((clips / noises) ** 2))
        if not 0 < shift < math.inf:
            raise InputError("noise_stds", "must be such that their ratios to max_grad_norms are finite", noise_stds)
        return cls(1 / shift * (1 - 1e-15), sample_rate, steps, clip, sampler)

    @property
    def m(self) -> float:
        """Returns the largest clipped norm over the noise's standard deviation on the sum."""
        return renyi.sensitivity(self.clip) / self.noise_multiplier

    @property
    def never_drawn(self) -> float:
        """Returns (1 − q)ᵀ, the chance that a record is in no batch: then the release does not depend on it."""
        return math.exp(self.steps * log1m(self.sample_rate))

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
        rate = -math.expm1(k * log1m(self.sample_rate)) if self.sampler == "poisson" else 1.0
        return replace(self, noise_multiplier=self.noise_multiplier / k, sample_rate=rate)

    def releases(self) -> tuple[tuple[Release, int], ...]:
        kind = FixedRelease if self.sampler == "fixed" else GaussianRelease
        return ((kind(self.m, self.sample_rate), self.steps),)

    def order2(self) -> float:
        step = renyi.order2_poisson if self.sampler != "fixed" else renyi.order2_fixed
        return self.steps * step(self.m, self.sample_rate)

    def order2_both_ends(self) -> float:
        """Returns that of one step; it is open for adaptive ones, as those of a shuffled epoch with several rows."""
        return (
            renyi.order2_fixed(self.m, self.sample_rate) if self.steps == 1 and self.sampler != "shuffle" else math.inf
        )

    def order2_paper(self) -> float:
        return self.steps * renyi.order2_paper(self.m, self.sample_rate)

    def kl(self) -> float:
        step = renyi.poisson_kl if self.sampler != "fixed" else renyi.kl_fixed
        return self.steps * step(self.m, self.sample_rate)

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        """Returns parts, those of T steps with every record among them: they tell no less than batches do (6.12)."""
        all_steps = whole_release(self.kl(), self.kl_neighbours)
        every = parts_gaussian(self.m * math.sqrt(self.steps), self.kl_neighbours)
        if self.sample_rate == 1:
            return all_steps, every
        drawn = parts_by_draws(self.m, self.sample_rate, self.steps, self.kl_neighbours)
        if quick:
            return all_steps, drawn
        neighbours = ADD_REMOVE if self.sampler == "poisson" else REPLACE_ONE
        pld = self._pld(neighbours)
        if pld is None:
            return all_steps, drawn, every
        (with_record, *_), missing = privacy_loss.directions(pld)
        return all_steps, drawn, every, parts_from_losses(*with_record, neighbours, rounding=missing)

    def overlap(self) -> float:
        if self.sampler != "fixed":
            return renyi.overlap_poisson(self.m, self.sample_rate, self.steps)
        return renyi.overlap_fixed(self.m, self.sample_rate, self.steps, order2=self.order2())

    def _pld(self, adjacency: str) -> Any:
        """Returns the privacy loss distribution of all steps; None where there is none."""
        if self.sampler == "fixed":
            replaced = adjacency == REPLACE_ONE
            return fixed_size_loss.fixed_size(self.m, self.sample_rate, self.steps) if replaced else None
        return privacy_loss.gaussian(self.m, self.sample_rate, self.steps, adjacency)

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        replaced = choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE
        if self.sampler != "poisson" and not replaced:
            return None  # leaving a record out cuts other batches
        if self.sample_rate == 1:  # all steps are one Gaussian release
            shift = self.m * math.sqrt(self.steps) * (1 + 1e-15)
            return GaussianTradeOff(2 * shift if replaced else shift)
        return super().trade_off(adjacency)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        d = number("delta", delta, above=0.0, below=1.0)
        replaced = choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE
        if self.sampler != "poisson" and not replaced:
            return None  # with shuffled epochs, leaving a record out cuts other batches
        pld = self._pld(adjacency)
        found = [None if pld is None else privacy_loss.epsilon(pld, d)]
        if replaced:
            found.append(epsilon_from_order2(self.order2(), d))
        if found[0] is None and self.sampler == "fixed":
            found.append(fixed_size_epsilon(self.m, self.sample_rate, self.steps, d))
        return min((epsilon for epsilon in found if epsilon is not None), default=None)

    def membership_advantage(self) -> float:
        ever_drawn, pld = -math.expm1(self.steps * log1m(self.sample_rate)), self._pld(REPLACE_ONE)
        simple = min(advantage_from_order2(self.order2()), ever_drawn)  # any_attacker.md 6.5
        return simple if pld is None else min(simple, privacy_loss.delta(pld, 0.0))

    def rero(self, kappa: Any, adjacency: str = ADD_REMOVE) -> Any:
        drawn = numbers("kappa", kappa) - math.expm1(self.steps * log1m(self.sample_rate))
        which = REPLACE_ONE if self.sampler == "fixed" else choice("adjacency", adjacency, ADJACENCIES)
        simple, pld = np.minimum(rero_from_order2(kappa, self.order2()), drawn)[()], self._pld(which)
        return simple if pld is None else np.minimum(simple, privacy_loss.trade_off(pld).tpr(kappa))[()]

    def assumes(self) -> tuple[str, ...]:
        sizes = {"poisson": "a fixed divisor qN", "fixed": "uniform batches of fixed size"}
        size = sizes.get(self.sampler, "shuffled epochs, each counted as one step with every record")
        return (f"{self.clip} clipping, {size}", "the attacker sees every noisy step")

    def notes(self) -> tuple[str, ...]:
        if self.sampler != "shuffle":
            return ()
        return ("Shuffled epochs: sampling brings no protection, so each epoch counts as one step with every record.",)
