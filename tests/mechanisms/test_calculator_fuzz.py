"""Random calls of the calculator, beside independent formulas, monotonicity, and what comes back from calibrate.

`python tests/test_calculator_fuzz.py 0 3000` draws so many; the suite takes a small, seeded share."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from reconbound import floor, guarantee
from reconbound._internal.checks import InputError
from reconbound.mechanisms import DP, Mechanism, OutputPerturbation, RenyiDP, SampledGaussian
from reconbound.mechanisms.calibrate import OutOfReach, calibrate, calibrate_epsilon
from reconbound.mechanisms.guarantee import FLOORS

ANY = ("lecam", "rate_distortion")


def drawn(draw: random.Random) -> Mechanism:
    """A mechanism with parameters over many decades, and with values at the ends of their ranges."""
    noise = draw.choice([10 ** draw.uniform(-2, 3), 10 ** draw.uniform(-8, 8), 1e-100, 1e100, 1.0])
    rate = draw.choice([10 ** draw.uniform(-3, 0), 10 ** draw.uniform(-300, 0), 1.0, 1 - 1e-16, 5e-324])
    steps = draw.choice([1, draw.randint(1, 100), round(10 ** draw.uniform(0, 6)), 10**15])
    kind = draw.randrange(10)
    if kind < 5:
        return SampledGaussian(noise, rate, steps, draw.choice(["hard", "smooth"]), draw.choice(["poisson", "fixed"]))
    if kind == 5:
        return SampledGaussian(noise, 1.0, steps, "hard", "shuffle")
    if kind < 8:
        loss = draw.choice(["logistic", "softmax", "squared"])
        targets = 10 ** draw.uniform(-3, 3) if loss == "squared" else None
        made: tuple[Any, ...] = (draw.randint(1, 10**7), 10 ** draw.uniform(-5, 3), 10 ** draw.uniform(-5, 5))
        return OutputPerturbation(*made, 10 ** draw.uniform(-3, 3), loss, targets, draw.random() < 0.5)
    adjacency = draw.choice([None, "replace-one", "add/remove"])
    epsilon = draw.choice([0.0, -0.0, 10 ** draw.uniform(-10, 3), 1e300, 5e-324])
    if kind == 8:
        return DP(epsilon, draw.choice([0.0, 10 ** draw.uniform(-300, -0.01), 5e-324]), adjacency)
    return RenyiDP(epsilon, draw.choice([0.5, 1.0, 1.5, 2.0, 4.0, 1e300]), adjacency)


def space_of(draw: random.Random) -> dict[str, Any]:
    dim = draw.choice([1, 2, draw.randint(1, 1000), 10**7])
    ends = draw.choice([{}, {"low": -draw.random(), "high": 10 ** draw.uniform(-3, 3)}])
    return {"dim": dim, **ends, **draw.choice([{}, {"radius": 10 ** draw.uniform(-2, 3)}])}


def gaussian_delta(shift: float, epsilon: float) -> float:
    """δ(ε) of two unit Gaussians so far apart."""
    if shift == 0:
        return 0.0
    a, b = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
    return float(norm.cdf(a) - math.exp(min(epsilon + norm.logcdf(b), 0.0)))


def check_values(found: Any) -> None:
    """Every number is finite, chances are chances, and no guess within the space beats a floor for any attacker."""
    reported = found.to_dict()
    json.dumps(reported, allow_nan=False)
    for bound in found.bounds:
        assert 0 <= bound.value < math.inf
        if bound.name in ANY:
            assert bound.value <= bound.guess * (1 + 1e-12)
            if found.space.ball is not None:
                assert bound.value <= found.space.ball**2 / found.dim * (1 + 1e-12)
    assert 0 <= found.membership_advantage <= 1
    for kappa, success in found.rero:
        assert kappa * (1 - 1e-9) <= success <= 1
    both = (found.epsilon_add_remove, found.epsilon)
    if None not in both:
        assert both[0] <= both[1] * (1 + 1e-2) + 1e-6
    for epsilon in both:
        assert epsilon is None or 0 <= epsilon < math.inf


def check_formulas(mechanism: Mechanism) -> None:
    """Closed forms of what is one Gaussian release, and quadrature of one sampled step."""
    if isinstance(mechanism, SampledGaussian) and mechanism.sample_rate == 1 and mechanism.sampler != "fixed":
        shift = 2 * mechanism.m * math.sqrt(mechanism.steps)
    elif isinstance(mechanism, OutputPerturbation):
        shift = mechanism.replace_one_shift
        assert mechanism.m <= shift <= 2 * mechanism.m * (1 + 1e-12)
    else:
        if isinstance(mechanism, SampledGaussian) and mechanism.sampler == "poisson" and mechanism.steps == 1:
            check_sampled_step(mechanism)
        return
    assert mechanism.order2() == pytest.approx(shift**2, rel=1e-9)
    if 1e-3 < shift < 30:
        for delta in (1e-8, 1e-3, 0.3):
            epsilon = mechanism.epsilon_at(delta)
            assert epsilon is not None
            assert gaussian_delta(shift, epsilon) <= delta * (1 + 1e-6) + 1e-15
        advantage = 2 * norm.cdf(shift / 2) - 1
        assert mechanism.membership_advantage() >= advantage * (1 - 1e-9)
        x = np.linspace(-10, shift + 10, 100_001)
        both = norm.pdf(x), norm.pdf(x - shift)
        exact = float(np.sum(2 * both[0] * both[1] / (both[0] + both[1])) * (x[1] - x[0]))
        assert mechanism.overlap() <= exact * (1 + 1e-8) + 1e-12


def check_sampled_step(mechanism: SampledGaussian) -> None:
    """χ², LC and the hockey-stick of q N(±m) + (1 − q) N(0), by quadrature."""
    m, q = mechanism.m, mechanism.sample_rate
    if not (0.01 < m < 6 and q > 1e-4):
        return
    x = np.linspace(-m - 12, 2 * m + 12, 40_001)

    def density(at: float) -> np.ndarray:
        return np.asarray((1 - q) * norm.pdf(x) + q * norm.pdf(x - at))

    p, other = density(m), density(-m)
    weight = x[1] - x[0]
    chi2 = max(float(np.sum((a - b) ** 2 / b) * weight) for a, b in ((p, other), (other, p)))
    if m < 4:
        assert math.expm1(mechanism.order2()) >= chi2 * (1 - 1e-6)
    assert mechanism.overlap() <= float(np.sum(2 * p * other / (p + other)) * weight) * (1 + 1e-9) + 1e-9
    for delta in (1e-6, 1e-2):
        epsilon = mechanism.epsilon_at(delta)
        assert epsilon is not None
        reached = float(np.sum(np.maximum(p - math.exp(min(epsilon, 700)) * other, 0)) * weight)
        assert reached <= delta * (1 + 1e-3) + 1e-12
        epsilon = mechanism.epsilon_at(delta, "add/remove")
        assert epsilon is not None
        for a, b in ((p, norm.pdf(x)), (norm.pdf(x), p)):
            assert (
                float(np.sum(np.maximum(a - math.exp(min(epsilon, 700)) * b, 0)) * weight) <= delta * (1 + 1e-3) + 1e-12
            )


def check_noise(mechanism: Mechanism, space: dict[str, Any], draw: random.Random) -> None:
    """More noise never lowers a floor; what calibrate returns meets the target when it is fed back."""
    if not isinstance(mechanism, (SampledGaussian, OutputPerturbation)):
        return
    field = mechanism.noise_field
    noise = getattr(mechanism, field)
    more = replace(mechanism, **{field: min(noise * 10 ** draw.uniform(0, 2), 1e100)})
    for name in FLOORS:
        before, after = (floor(name, one, **space) for one in (mechanism, more))
        assert before is not None
        assert after is not None
        assert after.value >= before.value * (1 - 1e-9) - 1e-300, name
    name = draw.choice(list(FLOORS))
    guess = floor(name, mechanism, **space)
    assert guess is not None
    target = (guess.guess or 1.0) * draw.choice([draw.random(), 1e-9, 0.999999, 10 ** draw.uniform(-12, 0)])
    if target > 0:
        try:
            found = calibrate(mechanism, target, bound=name, **space)
        except OutOfReach:
            return
        again = floor(name, replace(mechanism, **{field: float(repr(found.noise))}), **space)
        assert again is not None
        assert again.value >= target
        assert (
            float(str(found).split(f"{field} ")[1].split(":")[0]) >= found.noise
            if found.without_noise is None
            else True
        )


def check_epsilon(mechanism: Mechanism, draw: random.Random) -> None:
    """calibrate_epsilon's noise keeps the target when it is fed back."""
    if not isinstance(mechanism, (SampledGaussian, OutputPerturbation)) or getattr(mechanism, "steps", 1) > 10**6:
        return
    target, delta = 10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-8, -2)
    adjacency = draw.choice(["replace-one", "add/remove"])
    try:
        found = calibrate_epsilon(mechanism, target, delta=delta, adjacency=adjacency)
    except InputError as reason:
        assert reason.name in ("adjacency", "target_epsilon")  # noqa: PT017
        return
    epsilon = found.epsilon_at(delta, adjacency)
    assert epsilon is not None
    assert epsilon <= target


def check_call(seed: int) -> None:
    draw = random.Random(seed)
    mechanism, space = drawn(draw), space_of(draw)
    try:
        found = guarantee(mechanism, **space, delta=10 ** draw.uniform(-10, -1))
    except InputError as reason:
        assert "ball" in str(reason), (mechanism, space)  # noqa: PT017
        return
    check_values(found)
    check_formulas(mechanism)
    if seed % 3 == 0:
        check_noise(mechanism, space, draw)
    if seed % 20 == 0:
        check_epsilon(mechanism, draw)


@pytest.mark.parametrize("seed", range(0, 4000, 50))
def test_random_calls_hold(seed: int) -> None:
    check_call(seed)


@pytest.mark.parametrize("wrong", [True, False, np.True_, math.nan, math.inf, -math.inf, -1.0, "1", None, 1j])
def test_what_is_no_positive_number_is_refused(wrong: object) -> None:
    for call in (
        lambda: SampledGaussian(wrong),  # type: ignore[arg-type]
        lambda: SampledGaussian(1.0, wrong),  # type: ignore[arg-type]
        lambda: SampledGaussian(1.0, 1.0, wrong),  # type: ignore[arg-type]
        lambda: OutputPerturbation(10, wrong, 1.0),  # type: ignore[arg-type]
        lambda: DP(wrong),  # type: ignore[arg-type]
        lambda: RenyiDP(1.0, wrong),  # type: ignore[arg-type]
        lambda: guarantee(DP(1.0), delta=wrong),  # type: ignore[arg-type]
        lambda: guarantee(DP(1.0), dim=wrong),  # type: ignore[arg-type]
        lambda: calibrate(SampledGaussian(1.0), wrong),  # type: ignore[arg-type]
        lambda: calibrate_epsilon(SampledGaussian(1.0), wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError):
            call()


def test_numpy_scalars_are_numbers() -> None:
    made = SampledGaussian(np.float32(1), np.float64(0.5), np.int64(3))
    assert made == SampledGaussian(1.0, 0.5, 3)
    assert guarantee(made, dim=np.int32(2), high=np.float32(1)).to_dict() == guarantee(made, dim=2).to_dict()


if __name__ == "__main__":
    failed = 0
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            check_call(number)
        except Exception as error:
            failed += 1
            print(
                number,
                type(error).__name__,
                str(error)[:300].replace("\n", " "),
                drawn(random.Random(number)),
                flush=True,
            )
    print("failed", failed)
