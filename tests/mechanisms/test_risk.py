"""Risks of mechanisms: known values, exact one-step curves, dp-accounting's own distributions, all mechanisms."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import norm
from test_mechanisms import ADD, REPLACE

from reconbound._internal.checks import InputError
from reconbound.bounds.trade_off import GaussianTradeOff
from reconbound.mechanisms import DP, PLD, OutputPerturbation, RenyiDP, SampledGaussian, as_mechanism
from reconbound.mechanisms.risk import FPRS, known_risks, risks


def hard(noise, rate=1.0, steps=1, sampler="poisson"):
    return SampledGaussian(noise, rate, steps, clip="hard", sampler=sampler)


def test_known_values():
    found = dict(risks(hard(1.0), ADD).tpr)  # dp-accounting's own tests
    assert found[1e-4] == pytest.approx(0.003274, rel=2e-4)
    assert found[1e-6] == pytest.approx(8.7218e-5, rel=1e-5)
    assert found[1e-10] == pytest.approx(4.1303e-8, rel=1e-4)
    assert risks(hard(1.0251, 0.002, 10_000), ADD).advantage == pytest.approx(0.1, abs=5e-5)  # riskcal 1.5.1


def test_where_riskcal_is_below_chance_we_are_within_dp_accountings_bracket():
    mechanism = hard(0.5, 0.002, 10_000)
    found = risks(mechanism, ADD, fprs=[1e-4]).tpr[0][1]
    assert 0.0104 <= found <= 0.0135


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.01), (0.5, 0.002), (2.0, 0.5), (0.7, 1.0)])
def test_one_step_is_the_exact_curve(noise, rate):
    """Neyman and Pearson: the tests are half-lines, in both directions, and between two replaced records too."""
    m, alphas = 1 / noise, np.array([*FPRS, 0.5, 0.9, 0.99, 0.9999])
    t = norm.isf(alphas)
    out = (1 - rate) * alphas + rate * norm.sf(t - m)
    back = [brentq(lambda s, a=a: (1 - rate) * norm.cdf(s) + rate * norm.cdf(s - m) - a, -40, 40) for a in alphas]
    exact = np.maximum(out, norm.cdf(back))
    found = hard(noise, rate).trade_off(ADD).tpr(alphas)
    assert np.all(found >= exact * (1 - 1e-9))
    np.testing.assert_allclose(found, exact, rtol=2e-3)
    np.testing.assert_allclose(1 - found[-4:], 1 - exact[-4:], rtol=2e-3, atol=1e-9)
    ends = [brentq(lambda s, a=a: (1 - rate) * norm.sf(s) + rate * norm.sf(s + m) - a, -40, 40) for a in alphas]
    exact = (1 - rate) * norm.sf(ends) + rate * norm.sf(np.array(ends) - m)
    found = hard(noise, rate).trade_off(REPLACE).tpr(alphas)
    assert np.all(found >= exact * (1 - 1e-9))
    np.testing.assert_allclose(found, exact, rtol=2e-3)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.01, 100), (0.8, 0.05, 30)])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_many_steps_are_between_dp_accountings_distributions(noise, rate, steps, adjacency):
    """Its optimistic and pessimistic ones, made and composed by its own code, evaluated at each ε of its own."""
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE if adjacency == ADD else dp.NeighboringRelation.REPLACE_ONE
    curve = hard(noise, rate, steps).trade_off(adjacency)
    ends = []
    for pessimistic in (False, True):
        one = privacy_loss_distribution.from_gaussian_mechanism(
            noise, value_discretization_interval=1e-3, sampling_prob=rate, neighboring_relation=relation,
            pessimistic_estimate=pessimistic, use_connect_dots=pessimistic,
        )  # fmt: skip
        epsilons = np.linspace(0, 20, 2001)
        deltas = np.array(one.self_compose(steps).get_delta_for_epsilon(epsilons))
        alphas = 10.0 ** -np.arange(1, 9)
        ends.append(np.min(np.exp(epsilons) * alphas[:, None] + deltas, axis=1))
    found = curve.tpr(alphas)
    assert np.all(found >= ends[0])
    assert np.all(found <= ends[1] * (1 + 1e-3) + 1e-11)


def test_simulated_runs_do_not_beat_the_curve():
    """The likelihood ratio of 200,000 trainings in each world, five standard errors below the curve and near it."""
    rng, noise, rate, steps, n = np.random.default_rng(19), 1.0, 0.05, 20, 200_000
    m = 1 / noise

    def ratios(member):
        x = rng.standard_normal((n, steps))
        if member:
            x += m * (rng.random((n, steps)) < rate)
        return np.sum(np.log1p(rate * np.expm1(m * x - m * m / 2)), axis=1)

    absent, there = ratios(False), ratios(True)
    curve = hard(noise, rate, steps).trade_off(ADD)
    for alpha in (0.2, 0.05, 0.01):
        reached = np.mean(there > np.quantile(absent, 1 - alpha))
        error = math.sqrt(curve.tpr(alpha) / n) + 2 * math.sqrt(alpha / n)
        assert reached <= curve.tpr(alpha) + 5 * error
        assert reached >= curve.tpr(alpha) * 0.9 - 5 * error


EVERY = [
    hard(1.0, 0.01, 1000),
    hard(1.0, 0.01, 50, "fixed"),
    SampledGaussian.shuffled(2.0, 10, 35),
    SampledGaussian(30.0, 1e-3, 10**6),
    OutputPerturbation(1000, 0.1, 0.1),
    DP(1.0, adjacency=REPLACE),
    DP(3.897, 1e-5, ADD),
    RenyiDP(0.5, adjacency=REPLACE),
    RenyiDP(0.5, 4, ADD),
    RenyiDP(0.5, 1.5, ADD),
    PLD(privacy_loss_distribution.from_laplace_mechanism(2.0, value_discretization_interval=1e-3), ADD),
    as_mechanism(dp.ComposedDpEvent([dp.GaussianDpEvent(2.0), dp.LaplaceDpEvent(3.0)])),
]


@pytest.mark.parametrize("mechanism", EVERY, ids=str)
def test_every_mechanism_has_risks_that_agree_with_its_other_answers(mechanism):
    found = known_risks(mechanism)
    assert REPLACE in found
    assert (ADD in found) == (mechanism.epsilon_at(1e-5, ADD) is not None or ADD in str(mechanism))
    for adjacency, one in found.items():
        assert one.adjacency == adjacency
        facts = one.to_dict()
        assert facts["adjacency"] == adjacency
        epsilon = mechanism.epsilon_at(1e-5, adjacency)
        if epsilon is not None:  # the curve is never weaker than the ε that is printed beside it
            assert one.curve.delta(epsilon * (1 + 1e-3) + 1e-6) <= 1e-5 * 1.02 + 2e-9
        for rate, tpr in one.tpr:
            assert rate <= tpr <= 1
        for prior, risk in one.bayes_risk:
            assert 0 <= risk <= min(prior, 1 - prior) + 1e-12
        assert one.bayes_risk[0][1] == pytest.approx((1 - one.advantage) / 2, abs=1e-9)
        assert one.success == tuple((k, float(one.curve.tpr(k))) for k, _ in one.success)
        if math.isfinite(one.gdp.mu):
            for rate in (1e-5, 1e-3, 0.1, 0.5):
                assert one.curve.tpr(rate) <= GaussianTradeOff(one.gdp.mu).tpr(rate) * (1 + 1e-12) or (
                    one.curve.fnr(rate) < one.gdp.least_rate
                )
    assert found[REPLACE].advantage <= mechanism.membership_advantage() * (1 + 1e-9) + 1e-9


def test_neighbours_that_a_sampler_does_not_have_are_not_answered():
    assert risks(hard(1.0, 0.01, 50, "fixed"), ADD) is None
    assert risks(SampledGaussian.shuffled(2.0, 10, 35), ADD) is None
    assert risks(DP(1.0, adjacency=REPLACE), ADD) is None


def test_a_baseline_of_one_token_of_a_vocabulary():
    found = risks(hard(1.0, 0.01, 1000), ADD, baselines=1 / 50257).success
    assert found == ((1 / 50257, pytest.approx(1.3233e-4, rel=1e-3)),)


def test_groups_are_the_better_of_two_bounds():
    mechanism = hard(1.0, 0.01, 1000)
    together = mechanism.for_group(2).trade_off(ADD)
    found = risks(mechanism, ADD, group=2)
    np.testing.assert_array_less(found.curve.tpr(FPRS), together.tpr(FPRS))
    # two equal rows: the likelihood ratio of their sum, simulated
    rng, n, rate, steps = np.random.default_rng(3), 20_000, 0.01, 1000
    ratio = np.zeros((2, n))
    for world in (0, 1):
        for _ in range(steps):
            x = rng.standard_normal(n) + world * rng.binomial(2, rate, n)
            ratio[world] += np.log(
                (1 - rate) ** 2 + 2 * rate * (1 - rate) * np.exp(x - 0.5) + rate**2 * np.exp(2 * x - 2)
            )
    for alpha in (0.1, 0.01):
        reached = np.mean(ratio[1] > np.quantile(ratio[0], 1 - alpha))
        assert reached <= found.curve.tpr(alpha) + 5 * math.sqrt(found.curve.tpr(alpha) / n)
        assert reached >= 0.5 * found.curve.tpr(alpha)
    single = risks(hard(2.0), ADD, group=3)
    assert single.gdp.mu == pytest.approx(1.5, abs=2e-4)
    assert risks(DP(1.0, adjacency=REPLACE), group=2).advantage <= math.tanh(1.0)


def test_wrong_values_are_named():
    for call, name in (
        (lambda: risks(hard(1.0), "swap"), "adjacency"),
        (lambda: risks(hard(1.0), fprs=[0.1, 2.0]), "fprs"),
        (lambda: risks(hard(1.0), priors=-1.0), "priors"),
        (lambda: risks(hard(1.0), baselines=float("nan")), "baselines"),
        (lambda: risks(hard(1.0), group=0), "group"),
        (lambda: risks("gaussian"), "mechanism"),
    ):
        with pytest.raises(InputError, match=name):
            call()
