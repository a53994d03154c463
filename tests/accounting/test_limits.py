"""Upper limits of a few runs: the formula anew, what each part of it is for, and where no limit is given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from reconbound._internal.checks import InputError
from reconbound.accounting.confidence import WIDEST, Estimates, explain_no_limit, upper_limit

Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]
T = 3.689662  # t of 99.75 % at 9 degrees of freedom, from a table


def limit(
    mean: object, error: object, measured: object = None, runs: int = 10, sampled: bool = True, confidence: float = 0.95
) -> np.ndarray:
    m, e = (torch.as_tensor(part, dtype=torch.float64) for part in (mean, error))
    often = torch.full(m.shape, 99) if measured is None else torch.as_tensor(measured)
    return upper_limit(Estimates(m, e, often, runs, sampled), confidence).numpy()


def test_formula_in_numbers() -> None:
    """Five records: the second has the median spread, 0.2, and the fourth the lower quartile of the means, 2."""
    mean, relative = np.array([1.0, 4.0, 8.0, 2.0, 5.0]), np.array([0.1, 0.2, 0.3, 0.05, 0.25])
    expected = np.array([2, 4, 8 * (1 + 0.1 * T), 2, 5 * (1 + 0.05 * T)]) * np.exp(0.2 * T)
    np.testing.assert_allclose(limit(mean, mean * relative), expected, rtol=1e-6)


@pytest.mark.parametrize(("runs", "confidence"), [(2, 0.9), (5, 0.95), (10, 0.95), (40, 0.5)])
def test_formula_anew_with_numpy(runs: int, confidence: float) -> None:
    """Returns estimates of 101 records, so that quantiles are order statistics. Unmeasured records do not count."""
    rng = np.random.default_rng(runs)
    mean, relative = rng.lognormal(size=101), rng.uniform(0.05, 0.5, 101)
    quantile = student.isf((1 - confidence) / 20, runs - 1)
    middle = np.median(relative)
    beyond = np.where(relative > middle, 1 + quantile * (relative - middle), 1.0)
    expected = np.maximum(mean, np.quantile(mean, 0.25)) * np.exp(quantile * middle) * beyond
    np.testing.assert_allclose(limit(mean, mean * relative, runs=runs, confidence=confidence), expected, rtol=1e-9)
    unseen = np.zeros(60)
    found = limit(
        np.r_[unseen, mean],
        np.r_[unseen + np.inf, mean * relative],
        np.r_[unseen, unseen[0] + np.full(101, 99)].astype(int),
        runs=runs,
        confidence=confidence,
    )
    np.testing.assert_allclose(found, np.r_[unseen + np.inf, expected], rtol=1e-9)


def test_no_limit_is_below_the_t_limit_or_above_a_worse_records() -> None:
    rng = np.random.default_rng(0)
    mean, relative = np.sort(rng.lognormal(size=50)), np.sort(rng.uniform(0.05, 0.5, 50))
    found = limit(mean, mean * relative)
    assert (found >= mean * (1 + T * relative)).all()
    assert (np.diff(found) >= 0).all()  # larger mean and spread, larger limit
    np.testing.assert_allclose(limit(7 * mean, 7 * mean * relative), 7 * found)
    assert (limit(mean, mean * relative, confidence=0.99) > found).all()


# --- refusals -------------------------------------------------------------------------------


def test_records_measured_too_rarely_have_no_limit() -> None:
    mean, measured = np.ones(4), [25, 24, 0, 99]
    given = np.isfinite(limit(mean, 0.1 * mean, measured))
    assert given.tolist() == [True, False, False, True]
    every = np.isfinite(limit(mean, 0.1 * mean, measured, sampled=False))
    assert every.tolist() == [True, True, False, True]
    assert np.isinf(limit(mean, 0.1 * mean, [0, 0, 0, 0])).all()


@pytest.mark.parametrize("sampled", [True, False])
def test_runs_that_differ_too_much_have_no_limits(sampled: bool) -> None:
    """By the median record; one that was never measured does not vote."""
    for middle, given in ((WIDEST - 0.001, 3), (WIDEST + 0.001, 0)):
        relative = np.array([0.01, middle, np.inf, 0.9])
        found = limit(2 * np.ones(4), 2 * relative, [99, 99, 0, 99], sampled=sampled)
        assert int(np.isfinite(found).sum()) == given


def test_nothing_is_not_a_number() -> None:
    """Records without information; a quantile whose exponential overflows."""
    assert limit(np.zeros(3), np.zeros(3)).tolist() == [0, 0, 0]
    found = limit([0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.3, 0.3, 0.3], runs=2, confidence=0.9999)
    assert np.isinf(found[2:]).all()
    assert not np.isnan(found).any()


def test_zero_information_records_do_not_count() -> None:
    """They have no spread, which says nothing of the others'; and their limit is that of the lower quartile."""
    mean, relative = np.array([1.0, 2.0, 4.0, 8.0, 9.0]), np.array([0.1, 0.2, 0.3, 0.1, 0.2])
    zeros = np.zeros(7)
    single, among = limit(mean, mean * relative), limit(np.r_[zeros, mean], np.r_[zeros, mean * relative])
    np.testing.assert_allclose(among[7:], single)
    np.testing.assert_allclose(among[:7], 2 * np.exp(0.2 * T), rtol=1e-6)
    wild = np.r_[zeros, 0.9 * mean]
    assert np.isinf(limit(np.r_[zeros, mean], wild)).all()
    parts = (torch.tensor(np.r_[zeros, mean]), torch.tensor(wild), torch.full((12,), 99))
    assert "differ too much" in str(explain_no_limit(Estimates(*parts, runs=10, sampled=True)))


def test_two_runs_at_least() -> None:
    with pytest.raises(InputError, match="runs"):
        limit(np.ones(3), np.ones(3), runs=1)


# --- coverage -------------------------------------------------------------------------------

RECORDS, GROUPS, RUNS = 40, 1000, 10


@pytest.fixture(scope="module")
def sums() -> tuple[np.ndarray, np.ndarray]:
    """Sums of ten runs in groups, (R, G, N), and their expectations: skewed, with a factor that a run's records share.
    The least exposed quarter has 60 % of its information in a burst that one run in five sees."""
    rng, truth, chance = np.random.default_rng(5), np.exp(np.linspace(-2, 2, RECORDS)), 0.2
    x = rng.lognormal(-0.045, 0.3, (RUNS, GROUPS, 1)) * rng.lognormal(-0.66125, 1.15, (RUNS, GROUPS, RECORDS))
    bursts = 0.4 + 0.6 * (rng.random((RUNS, GROUPS, RECORDS // 4)) < chance) / chance
    x[:, :, : RECORDS // 4] *= bursts
    return x * truth, truth


def least_covered(sums: tuple[np.ndarray, np.ndarray], rule: Rule) -> float:
    """Share of groups in which a record is covered, where a limit is given, of the record with the smallest one."""
    x, truth = sums
    mean, error = x.mean(0), x.std(0, ddof=1) / RUNS**0.5
    given = [g for g in range(GROUPS) if np.isfinite(limit(mean[g], error[g])).all()]
    assert len(given) > 0.3 * GROUPS
    return float(np.mean([rule(mean[g], error[g]) >= truth for g in given], axis=0).min())


def test_every_record_is_covered(sums: tuple[np.ndarray, np.ndarray]) -> None:
    assert least_covered(sums, limit) >= 0.95 + 2 * (0.95 * 0.05 / (0.3 * GROUPS)) ** 0.5


def low(mean: np.ndarray) -> np.ndarray:
    return np.maximum(mean, np.quantile(mean, 0.25))


def tangent(relative: np.ndarray, at: np.ndarray | float) -> np.ndarray:
    """exp(T r) at r = at, and its tangent beyond."""
    return np.exp(T * at) * (1 + T * np.maximum(relative - at, 0))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(lambda m, e: m + student.ppf(0.95, RUNS - 1) * e, id="plain t of 95 %"),
        pytest.param(lambda m, e: m + student.ppf(0.999, RUNS - 1) * e, id="plain t of 99.9 %"),
        pytest.param(lambda m, e: low(m) * (1 + T * np.maximum(e / m, np.median(e / m))), id="without the log scale"),
        pytest.param(lambda m, e: low(m) * tangent(e / m, 0.0), id="with the record's own spread alone"),
        pytest.param(lambda m, e: low(m) * np.exp(T * e / m), id="the same, on the log scale"),
        pytest.param(lambda m, e: m * tangent(e / m, np.median(e / m)), id="with the record's own mean alone"),
    ],
)
def test_no_part_of_the_rule_can_be_spared(sums: tuple[np.ndarray, np.ndarray], rule: Rule) -> None:
    assert least_covered(sums, rule) < 0.95
