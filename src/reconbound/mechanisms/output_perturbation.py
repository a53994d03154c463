"""Gaussian noise on the minimiser of a linear model, and the effect of one record on that minimiser.

The suprema of the losses' slopes and weights are defined only here, for the calculator and for `reconbound.linear`.
Proofs: docs/theory/linear.md, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from scipy.special import lambertw

from reconbound import divergences as renyi
from reconbound._internal.checks import InputError, choice, flag, number, whole
from reconbound.bounds import rero_from_gdp
from reconbound.bounds.parts import Parts, parts_gaussian
from reconbound.bounds.trade_off import GaussianTradeOff, TradeOff
from reconbound.mechanisms.base import ADD_OR_ZERO, ADJACENCIES, REPLACE_ONE, Mechanism
from reconbound.mechanisms.epsilons import gaussian_epsilon

LOSSES = ("logistic", "softmax", "squared")


def largest_slope(loss: str, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """Returns the largest norm of ∂ℓ/∂s at any minimiser, for rows (constant feature included) of norm ≤ `row_norm`.

        logistic 1,   softmax √2,   squared Y(1 + R/(2√λ)),   as ‖θ*‖ ≤ Y/(2√λ)

    Args:
        loss: "logistic", "softmax" or "squared".
        row_norm: R, the largest norm of a row, the constant feature included.
        l2: λ.
        target_bound: Y, for squared loss.
    """
    if loss == "squared":
        assert target_bound is not None
        return target_bound * (1 + row_norm / (2 * math.sqrt(l2)))
    return 1.0 if loss == "logistic" else math.sqrt(2.0)


def largest_weights(loss: str, classes: int, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """Returns the largest norm of the minimiser, for any data.

        nλ‖W‖² = −Σ ∂ℓ/∂s·s   and   nλ‖W‖ ≤ Σ‖∂ℓ/∂s‖‖x̃‖

    −∂ℓ/∂s·s is at most Y²/4 for squared loss and Lambert's W((K − 1)/e) for softmax, logistic loss being K = 2.

    Args:
        loss: "logistic", "softmax" or "squared".
        classes: K, for softmax.
        row_norm: R, the largest norm of a row, the constant feature included.
        l2: λ.
        target_bound: Y, for squared loss.
    """
    if loss == "squared":
        assert target_bound is not None
        most = target_bound**2 / 4
    else:
        most = float(lambertw((max(classes, 2) - 1) / math.e).real)
    return min(math.sqrt(most / l2), largest_slope(loss, row_norm, l2, target_bound) * row_norm / l2)


def largest_curvature(loss: str) -> float:
    """Returns the largest eigenvalue of ∂²ℓ/∂s²: 1/4 logistic, 1/2 softmax, 1 squared."""
    return {"logistic": 0.25, "softmax": 0.5, "squared": 1.0}[loss]


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
    kl_neighbours = ADD_OR_ZERO
    randomness = "the noise on the minimiser"

    def __post_init__(self) -> None:
        choice("loss", self.loss, LOSSES)
        if self.loss == "squared":
            if self.target_bound is None:
                raise InputError("target_bound", "must be given with squared loss: the largest |y|", None)
            self._set(target_bound=number("target_bound", self.target_bound, above=0.0))
        elif self.target_bound is not None:
            raise InputError("target_bound", "belongs to squared loss only", self.target_bound)
        renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.data_norm)  # checks all four
        self._set(records=int(self.records), l2=float(self.l2), noise_std=float(self.noise_std))
        self._set(data_norm=float(self.data_norm), intercept=flag("intercept", self.intercept))
        _ = self.m  # refuses numbers that overflow together

    @property
    def row_norm(self) -> float:
        """Returns R, the largest norm of a row, the constant feature included."""
        return math.hypot(self.data_norm, 1.0) if self.intercept else self.data_norm

    @property
    def radius(self) -> float:  # type: ignore[override]
        """Returns the radius of the ball around 0 to which rows are clipped."""
        return self.data_norm

    @property
    def gradient_norm(self) -> float:
        """Returns L = sup‖∂ℓ/∂s‖ R, the largest gradient of one record's loss at any minimiser."""
        return largest_slope(self.loss, self.row_norm, self.l2, self.target_bound) * self.row_norm

    @property
    def gradient_difference(self) -> float:
        """Returns the largest difference of two records' gradients at any minimiser.

            2L,   but R²‖θ‖ + 2YR for squared loss

        There it is (xxᵀ − x'x'ᵀ)θ − yx + y'x', and xxᵀ − x'x'ᵀ has its eigenvalues in [−R², R²].
        """
        if self.target_bound is None:
            return 2 * self.gradient_norm
        return self.row_norm * (self.row_norm * self.largest_weights() + 2 * self.target_bound)

    def largest_weights(self, classes: int = 2) -> float:
        """Returns the largest norm of the minimiser, for any data.

        Args:
            classes: K, for softmax.
        """
        return largest_weights(self.loss, classes, self.row_norm, self.l2, self.target_bound)

    @property
    def m(self) -> float:
        """Returns the largest distance by which one record moves the minimiser, over the noise's standard deviation."""
        return renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.gradient_norm)

    @property
    def replace_one_shift(self) -> float:
        """Returns the same as `m` when a record is replaced by another."""
        return self.m * (self.gradient_difference / self.gradient_norm)

    def for_group(self, copies: int) -> OutputPerturbation:
        """Returns the mechanism with the group as one record: k rows move the minimiser k times as far at most.

        Args:
            copies: k, the number of rows.
        """
        return replace(self, noise_std=self.noise_std / whole("copies", copies))

    def order2(self) -> float:
        return renyi.order2_gaussian(self.replace_one_shift / 2)

    def order2_both_ends(self) -> float:
        """Returns 4R², R the radius of the smallest ball around three minimisers: at most m, and s/√3 (Jung)."""
        return renyi.order2_gaussian(min(self.m, self.replace_one_shift / math.sqrt(3) * (1 + 1e-15)))

    def order2_paper(self) -> float:
        """Returns the paper's value: its gradients have norm 1, whatever the rows."""
        return renyi.order2_gaussian(self.m / self.gradient_norm)

    def kl(self) -> float:
        return self.m**2 / 2

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        return (*super().parts(), parts_gaussian(self.m, self.kl_neighbours))

    def overlap(self) -> float:
        return renyi.overlap_poisson(self.replace_one_shift / 2, 1.0)

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff:
        replaced = choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE
        return GaussianTradeOff(self.replace_one_shift if replaced else self.m)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        replaced = choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE
        return gaussian_epsilon(self.replace_one_shift if replaced else self.m, delta)

    def membership_advantage(self) -> float:
        return math.erf(self.replace_one_shift / math.sqrt(8))

    def rero(self, kappa: Any) -> Any:
        return rero_from_gdp(kappa, self.m)

    def assumes(self) -> tuple[str, ...]:
        beside = f" (norm {self.row_norm:.6g} with the constant feature)" if self.intercept else ""
        targets = f", targets to ±{self.target_bound:g}" if self.target_bound is not None else ""
        rows = f"{self.loss} loss, rows clipped to norm {self.data_norm:g}{beside}{targets}"
        return (f"{rows}, gradients of norm {self.gradient_norm:.6g} at most, solved to the minimum; nλ is fixed",)

    def notes(self) -> tuple[str, ...]:
        return (f"Holds for this only: {self.assumes()[0]}.",)
