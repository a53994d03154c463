"""Queries of the divergence ledger against simulated attackers that are as good as can be, and against formulas.

One number of each record decides its clipped gradient, so that the ledger's D is exact and the best attacker's
posterior can be computed on a grid.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, xlogy
from test_accountant import account, info

from reconbound import FisherAccountant
from reconbound.accounting.divergence_queries import KNOWS, WorldDivergences
from reconbound.accounting.spec import Account
from reconbound.bounds import membership_from_kl, success_from_kl
from reconbound.divergences import poisson_kl, poisson_pair_kl
from reconbound.fisher import StepInformation
from reconbound.fisher.worlds import StepDistances

RATE, STEPS, DRAWS = 0.4, 4, 40_000
MECHANISM: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": RATE, "clip": "hard",
                             "features": 1, "steps": STEPS, "rules": None}  # fmt: skip


def ledger_of(real: np.ndarray, other: np.ndarray, *, runs: int = 1, **changes: Any) -> FisherAccountant:
    """Returns the ledger of records whose clipped gradients are these numbers in both worlds, at every step."""
    own = Account(**{**MECHANISM, "records": len(real), **changes})
    ledger = FisherAccountant(own, worlds=["age"])
    a, b = torch.from_numpy(real), torch.from_numpy(other)
    found = StepDistances(
        torch.zeros(len(a)), a.abs(), {"age": b.abs()}, {"age": (a - b).square()}, own.max_grad_norm, own.clip
    )
    for _ in range(runs):
        for _ in range(own.steps):
            ledger.add_distances(range(len(a)), found, weight=own.sample_rate, stratified=own.sampler != "shuffle")
        ledger.finish_run()
    return ledger


def release(gradient: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the noisy sums of all steps without the other records, (draws, STEPS)."""
    drawn = rng.random((len(gradient), STEPS)) < RATE
    return np.asarray(drawn * gradient[:, None] + rng.standard_normal(drawn.shape))


def log_likelihood(sums: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Returns the log density of the sums if the gradient were each of these, (draws, gradients), up to a constant."""
    total = np.zeros((len(sums), len(gradients)))
    for column in sums.T:
        exponent = column[:, None] * gradients - gradients**2 / 2
        total += np.log1p(RATE * np.expm1(exponent))
    return total


def too_small(found: WorldDivergences, factor: float) -> WorldDivergences:
    """Returns the divergences of a ledger that was made too small on purpose."""
    return replace(found, nats=found.nats / factor, mean_nats=np.asarray(found.mean_nats) / factor)


# --- two values of a number ---------------------------------------------------------------


def bayes_risk(pair: tuple[float, float], gap: float) -> tuple[float, float]:
    """Returns the mean of the squared errors at both values, of the best attacker, and its standard error."""
    rng = np.random.default_rng(5)
    sums = np.concatenate([release(np.full(DRAWS, g), rng) for g in pair])
    log = log_likelihood(sums, np.array(pair))
    p = np.exp(log[:, 0] - logsumexp(log, axis=1))
    risk = gap**2 * p * (1 - p)
    return float(risk.mean()), float(risk.std()) / math.sqrt(len(risk))


def test_two_point_floor_lies_below_the_best_attacker_and_a_ledger_too_small_does_not() -> None:
    pair, gap = (0.9, -0.5), 20.0
    found = ledger_of(np.full(1, pair[0]), np.full(1, pair[1])).divergences.towards("age")
    nats = STEPS * float(poisson_pair_kl(0.9, 0.5, -0.45, RATE))
    risk, error = bayes_risk(pair, gap)
    bound = found.two_point_floor(gap)
    mechanism = found.account.mechanism().overlap() * gap**2 / 4  # of opposite gradients, as large as can be
    assert bound.value.item() == pytest.approx(max(gap**2 / 4 * math.exp(-nats), mechanism), rel=1e-9)
    assert gap**2 / 4 * math.exp(-nats) < risk + 4 * error
    assert mechanism < risk + 4 * error
    assert too_small(found, 4).two_point_floor(gap).value.item() > risk + 4 * error
    assert bound.attacker == "any"
    assert "in the place of age" in bound.adjacency
    assert bound.condition.startswith("on average over the record's value")


def test_two_point_floor_is_the_ledgers_where_gradients_are_small_and_the_mechanisms_where_they_are_large() -> None:
    real, gaps = np.array([0.05, 1.0, -0.2]), np.array([1.0, 2.0, 0.0])
    found = ledger_of(real, -real).divergences.towards("age")
    value = found.two_point_floor(gaps).value
    overlap = found.account.mechanism().overlap()
    assert math.exp(-found.nats[0]) > overlap > math.exp(-found.nats[1])
    np.testing.assert_allclose(value, [math.exp(-found.nats[0]) / 4, overlap, 0.0], rtol=1e-12)
    risk, error = bayes_risk((1.0, -1.0), 2.0)  # the pair that the mechanism's overlap is that of
    assert value[1] == pytest.approx(risk, abs=4 * error)
    assert found.two_point_floor(gaps).guess is None
    assert found.two_point_floor(3.0).guess == 2.25


# --- the average record -----------------------------------------------------------------


def gaussian_case() -> tuple[float, float, FisherAccountant]:
    """Returns the error of the best attacker on a Gaussian number with known prior, its error, and the ledger."""
    rng, spread, slope = np.random.default_rng(6), 3.0, 0.35
    z = spread * rng.standard_normal(DRAWS // 4)
    gradient = lambda x: np.clip(slope * x, -1.0, 1.0)  # noqa: E731
    grid = np.linspace(-5 * spread, 5 * spread, 201)
    weight = log_likelihood(release(gradient(z), rng), gradient(grid)) - (grid / spread) ** 2 / 2
    posterior = np.exp(weight - logsumexp(weight, axis=1, keepdims=True))
    squares = (posterior @ grid - z) ** 2
    return (
        float(squares.mean()),
        float(squares.std()) / math.sqrt(len(z)),
        ledger_of(gradient(z)[:2000], np.zeros(2000)),
    )


def test_mean_error_floor_lies_below_the_best_attacker_and_a_ledger_too_small_does_not() -> None:
    risk, error, ledger = gaussian_case()
    found = ledger.divergences.towards("age")
    bound = found.mean_error_floor(9.0)
    assert bound.value.shape == (1,)
    assert bound.value.item() == pytest.approx(9 * math.exp(-2 * float(ledger.divergence("age").mean())), rel=1e-9)
    assert 0.4 * 9 < bound.value.item() < risk + 4 * error < 9
    assert too_small(found, 4).mean_error_floor(9.0).value.item() > risk + 4 * error


def test_mean_error_floor_is_the_mechanisms_where_the_ledger_has_more() -> None:
    """KL to the release without the record is smaller than the cap on the divergence to another value."""
    real = np.full(5, 1.0)
    found = ledger_of(real, -real).divergences.towards("age")
    without = STEPS * float(poisson_kl(1.0, RATE))
    assert float(found.mean()[0]) > without
    value = found.mean_error_floor(4.0, dim=2).value.item()
    assert value == pytest.approx(4 * math.exp(-without), rel=1e-12)


SHARES = np.array([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(
    ("shares", "gradients", "caught"),
    [
        (SHARES, np.array([0.9, -0.9, 0.3, 0.0]), False),
        (np.array([0.5, 0.5]), np.array([0.9, -0.9]), True),
        (np.full(4, 0.25), np.array([1.0, -1.0, 0.3, -0.3]), True),
    ],
)
def test_category_success_lies_above_the_best_attacker_and_a_ledger_too_small_does_not(
    shares: np.ndarray, gradients: np.ndarray, caught: bool
) -> None:
    rng = np.random.default_rng(7)
    truth = rng.choice(len(shares), DRAWS, p=shares)
    best = (log_likelihood(release(gradients[truth], rng), gradients) + np.log(shares)).argmax(1)
    right, error = float((best == truth).mean()), 0.5 / math.sqrt(DRAWS)
    real = np.repeat(gradients, np.round(100 * shares).astype(int))
    found = ledger_of(real, np.zeros(len(real))).divergences.towards("age")
    bound = found.mean_category_success(shares)
    assert shares.max() + 4 * error < right < bound.value.item() + 4 * error < 1
    assert (too_small(found, 4).mean_category_success(shares).value.item() < right - 4 * error) is caught
    assert bound.guess == shares.max()
    assert bound.measure == "chance"


def test_category_success_is_the_least_of_three() -> None:
    found = ledger_of(np.full(6, 0.05), np.zeros(6)).divergences.towards("age")
    nats = float(found.mean()[0])
    for shares in (SHARES, np.full(12, 1 / 12), np.array([0.97, 0.03])):
        k, guess, entropy = len(shares), shares.max(), -np.sum(xlogy(shares, shares))
        wrong = np.linspace(0, 1 - 1 / k, 400_001)
        enough = -xlogy(wrong, wrong) - xlogy(1 - wrong, 1 - wrong) + wrong * math.log(k - 1) >= entropy - nats
        fano, chance = 1 - wrong[enough.argmax()], float(success_from_kl(guess, nats))
        value = found.mean_category_success(shares).value.item()
        assert value == pytest.approx(min(fano, chance, found.account.mechanism().rero(guess)), abs=1e-5)
        assert value >= guess
    assert found.mean_category_success([1.0, 0.0]).value.item() == 1.0
    possible = found.mean_category_success([0.5, 0.5]).value
    np.testing.assert_array_equal(found.mean_category_success([0.5, 0.5, 0.0]).value, possible)
    large = np.full(4, 1.0)
    loud = ledger_of(large, -large, noise_multiplier=0.3).divergences.towards("age")
    assert loud.mean_category_success([0.6, 0.4]).value.item() == pytest.approx(
        float(loud.account.mechanism().rero(0.6)), rel=1e-12
    )


def test_groups_have_their_own_means() -> None:
    real = np.array([0.8, 0.1, 0.8, 0.1, 0.1])
    found = ledger_of(real, np.zeros(5)).divergences.towards("age")
    groups = [2, 0, 2, 0, 0]  # nobody is in group 1
    nats = STEPS * np.asarray(poisson_kl(np.array([0.1, 0.8]), RATE))
    np.testing.assert_allclose(found.mean(groups), [nats[0], found.cap, nats[1]], rtol=1e-9)
    np.testing.assert_allclose(found.mean(), [(3 * nats[0] + 2 * nats[1]) / 5], rtol=1e-9)
    least = min(found.cap, STEPS * float(poisson_kl(1.0, RATE)))
    floors = found.mean_error_floor(1.0, groups=groups).value
    np.testing.assert_allclose(floors, np.exp(-2 * np.array([nats[0], least, nats[1]])), rtol=1e-9)
    rows = [[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]]
    by_group = found.mean_category_success(rows, groups)
    assert by_group.value.shape == (3,)
    assert by_group.guess is None
    assert by_group.value[2] == found.mean_category_success([0.9, 0.1], groups).value[2]
    assert "groups are defined by public facts" in by_group.assumes


# --- confidence, and what is said -------------------------------------------------------


def spread_ledger(runs: int) -> FisherAccountant:
    """Returns a ledger of runs that differ."""
    ledger = FisherAccountant(Account(**{**MECHANISM, "records": 6, "steps": 40}), worlds=["age"])
    norms, none = torch.linspace(0.05, 0.2, 6).double(), torch.zeros(6)
    for run in range(runs):
        for step in range(40):
            size = norms * (1 + 0.1 * math.sin(run + step))
            found = StepDistances(none, size, {"age": none.double()}, {"age": size.square()}, 1.0, "hard")
            ledger.add_distances(range(6), found, weight=RATE, stratified=True)
        ledger.finish_run()
    return ledger


def test_limits_make_every_statement_weaker() -> None:
    own = spread_ledger(5).divergences
    found, sure = own.towards("age"), own.towards("age", 0.95)
    np.testing.assert_array_equal(sure.nats, own.divergence("age", 0.95).numpy())
    assert (sure.nats > found.nats).all()
    assert sure.mean()[0] == pytest.approx(sure.nats.mean())
    assert (sure.two_point_floor(1.0).value < found.two_point_floor(1.0).value).all()
    assert sure.mean_error_floor(1.0).value < found.mean_error_floor(1.0).value
    assert sure.mean_success(0.1).value > found.mean_success(0.1).value
    assert sure.mean_category_success(SHARES).value > found.mean_category_success(SHARES).value
    assert (sure.membership().value > found.membership().value).all()
    np.testing.assert_allclose(found.membership().value, membership_from_kl(found.nats))


def test_every_statement_says_its_attacker_neighbours_sampler_and_randomness() -> None:
    own = spread_ledger(2).divergences
    for found in (own.towards("age"), own.towards("age", 0.9)):
        asked = (found.max_success(0.1), found.membership(), found.two_point_floor(2.0), found.mean_success(0.1),
                 found.mean_error_floor(1.0), found.mean_category_success([0.5, 0.5]))  # fmt: skip
        for bound in asked:
            assert (bound.attacker, bound.sampler) == ("any", "poisson")
            assert bound.adjacency == "the record with the public value in the place of age"
            assert KNOWS in bound.assumes
            assert any("the noise of all steps and the draw of their batches" in text for text in bound.assumes)
            assert bound.notes[0] in str(bound)
            assert bound.to_dict()["estimate"] is True
    assert "by an estimate any attacker errs by at least" in str(own.towards("age").two_point_floor(2.0))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda d: d.towards("hours"), "world must be one of"),
        (lambda d: d.towards().two_point_floor(1.0), "world must be one in which a number has another value"),
        (lambda d: d.towards("age").two_point_floor(-1.0), "gap must be finite and at least 0"),
        (lambda d: d.towards("age").two_point_floor([1.0, 2.0]), "gap must be one number, or 6 of them"),
        (lambda d: d.towards("age").mean_error_floor(-1.0), "entropy_power must be at least 0"),
        (lambda d: d.towards("age").mean_error_floor(1.0, dim=0), "dim"),
        (lambda d: d.towards("age").mean(groups=[0, 0, 0, 0, 0, 6]), "groups must be 6 whole numbers from 0 to 5"),
        (lambda d: d.towards("age").mean(groups=[0.5] * 6), "groups must be 6 whole numbers"),
        (lambda d: d.towards("age").mean_category_success([0.5, 0.6]), "shares must add up to 1"),
        (lambda d: d.towards("age").mean_category_success([1.0]), "shares must be the chances of two or more"),
        (lambda d: d.towards("age").mean_category_success([[0.5, 0.5]] * 2), "one row or 1 of them"),
        (lambda d: d.towards("age").mean_category_success([1.5, -0.5]), "shares"),
        (lambda d: d.towards("age", 2.0), "confidence"),
    ],
)
def test_bad_questions_are_refused(ask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(spread_ledger(2).divergences)


# --- Fisher information of the average record ---------------------------------------------


def linear_ledger(slope: float, records: int, **changes: Any) -> FisherAccountant:
    """Returns the ledger of records in every batch, whose gradient is the slope times their one private number."""
    options = {**MECHANISM, "noise_multiplier": 0.1, "max_grad_norm": 10.0, "sample_rate": 1.0, "rules": ("exact",)}
    own = Account(**{**options, "records": records, **changes})
    ledger, n = FisherAccountant(own), torch.ones(records, dtype=torch.float64)
    along = slope**2 / own.noise**2 * n
    found = StepInformation(n, n, n, n, along, 0 * n, 0 * n, {}, 1, 1)
    for _ in range(own.steps):
        ledger.add(range(records), found)
    ledger.finish_run()
    return ledger


def test_mean_feature_floor_is_the_best_attackers_error_on_a_gaussian_number() -> None:
    slope, variance, records = 0.7, 2.0, 50
    rng = np.random.default_rng(8)
    z = math.sqrt(variance) * rng.standard_normal(400_000)
    mean = slope * z + rng.standard_normal(len(z)) / math.sqrt(STEPS)  # of the noisy sums, without the other records
    best = mean * slope / (slope**2 + 1 / (STEPS * variance))
    risk, error = float(np.mean((best - z) ** 2)), float(np.std((best - z) ** 2)) / math.sqrt(len(z))
    floor = linear_ledger(slope, records).mean_feature_floors(variance)
    assert floor.value.shape == (1, 1)
    assert floor.value.item() == pytest.approx(risk, abs=4 * error)
    assert linear_ledger(slope / math.sqrt(2), records).mean_feature_floors(variance).value.item() > risk + 4 * error
    assert floor.attacker == "any"
    assert floor.estimate


@pytest.mark.filterwarnings("ignore:a run was measured over about")
def test_mean_feature_floors_of_groups_features_and_units() -> None:
    scale, generator = torch.tensor([10.0, 1.0, 0.5], dtype=torch.float64), torch.Generator().manual_seed(0)
    own = account(records=6, sample_rate=0.25, steps=10)
    ledger = FisherAccountant(own, diagonal="all", feature_scale=scale)
    average = FisherAccountant(own, diagonal="average", feature_scale=scale)
    for one in (ledger, average):
        generator.manual_seed(0)
        for _ in range(10):
            found = info(*torch.rand(2, 6, generator=generator))
            one.add(torch.arange(6), found, weight=0.25, stratified=True)
        one.finish_run()
    each = 1 / ledger.feature_floors().value  # in data units
    variance = np.array([30.0, 2.0, 1.0])
    groups = np.array([0, 0, 1, 1, 1, 0])
    expected = np.array([1 / (each[groups == k].mean(0) + 1 / variance) for k in (0, 1)])
    least = variance * math.exp(-2 * own.mechanism().kl())
    assert (expected > least).any()
    np.testing.assert_allclose(
        ledger.mean_feature_floors(variance, groups).value, np.maximum(expected, least), rtol=1e-6
    )
    whole = np.maximum(1 / (each.mean(0) + 1 / variance), least)
    for one in (ledger, average):
        np.testing.assert_allclose(one.mean_feature_floors(variance).value, whole[None], rtol=1e-6)
    loud = 1e6 * found.diagonal_across, 1e6 * found.diagonal_along
    ledger.add(torch.arange(6), replace(found, diagonal_across=loud[0], diagonal_along=loud[1]), weight=0.25)
    ledger.finish_run()
    np.testing.assert_allclose(ledger.mean_feature_floors(variance).value, least[None], rtol=1e-12)  # the mechanism's
    with pytest.raises(ValueError, match='groups need diagonal="all"'):
        average.mean_feature_floors(variance, groups)


def test_mean_feature_floors_of_a_ledger_that_knows_nothing_are_the_mechanisms() -> None:
    fresh = FisherAccountant(account(), diagonal="average")
    value = fresh.mean_feature_floors(3.0).value
    np.testing.assert_allclose(value, np.full((1, 3), 3 * math.exp(-2 * fresh.account.mechanism().kl())), rtol=1e-12)
    one = linear_ledger(0.3, 4, noise_multiplier=3.0, max_grad_norm=1.0)
    groups = [0, 0, 3, 3]  # nobody is in groups 1 and 2
    value = one.mean_feature_floors(3.0, groups).value[:, 0]
    least = 3 * math.exp(-2 * one.account.mechanism().kl())
    assert value[1] == value[2] == pytest.approx(least)
    assert value[0] == value[3] > least
    for bad, message in ((0.0, "variance must be greater than 0"), ([1.0, 2.0], "one number, or 3 of them")):
        with pytest.raises(ValueError, match=message):
            fresh.mean_feature_floors(bad)
    with pytest.raises(ValueError, match="diagonal must have been kept"):
        FisherAccountant(account()).mean_feature_floors(1.0)
