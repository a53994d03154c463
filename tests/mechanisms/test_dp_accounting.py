"""Behaviour of dp-accounting 0.6 that reconbound relies on. A failure here means that dp-accounting changed."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy.stats import norm

REPLACE, ADD = dp.NeighboringRelation.REPLACE_ONE, dp.NeighboringRelation.ADD_OR_REMOVE_ONE


def rdp2(event, relation=REPLACE):
    """Order-2 RDP as RdpAccountant counts it."""
    accountant = dp.rdp.RdpAccountant(orders=[2, 3], neighboring_relation=relation).compose(event)
    return float(accountant._rdp[0])


def hockey_stick(p, q, epsilon, limit, points=400_001):
    """∫ (p − e^ε q)₊ over [−limit, limit] by the trapezoid rule: its kinks cost 1e-9."""
    x = np.linspace(-limit, limit, points)
    return float(np.sum(np.maximum(p(x) - math.exp(epsilon) * q(x), 0.0)) * (x[1] - x[0]))


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_rdp_accountant_uses_add_remove_sensitivity(sigma):
    assert rdp2(dp.GaussianDpEvent(sigma)) == pytest.approx(1 / sigma**2)  # replace-one is 4/σ²
    assert rdp2(dp.GaussianDpEvent(sigma / 2)) == pytest.approx(4 / sigma**2)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_rdp_accountant_uses_add_remove_sensitivity_for_fixed_batches(sigma):
    whole = dp.SampledWithoutReplacementDpEvent(100, 100, dp.GaussianDpEvent(sigma))
    half = dp.SampledWithoutReplacementDpEvent(100, 100, dp.GaussianDpEvent(sigma / 2))
    assert rdp2(whole) == pytest.approx(1 / sigma**2)
    assert rdp2(half) == pytest.approx(4 / sigma**2)


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (2.0, 0.1), (4.0, 0.001)])
def test_rdp_accountant_uses_wang_for_fixed_size_batches(sigma, q):
    event = dp.SampledWithoutReplacementDpEvent(10**6, round(q * 10**6), dp.GaussianDpEvent(sigma / 2))
    d = 4 / sigma**2
    wang = math.log1p(q**2 * min(4 * math.expm1(d), 2 * math.exp(d)))
    assert rdp2(event) == pytest.approx(min(wang, d), rel=1e-6)


def test_rdp_accountant_refuses_poisson_under_replace_one():
    event = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0))
    assert not dp.rdp.RdpAccountant(neighboring_relation=REPLACE).supports(event)
    with pytest.raises(dp.UnsupportedEventError):
        dp.rdp.RdpAccountant(neighboring_relation=REPLACE).compose(event)


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.3), (0.7, 0.05), (2.0, 1.0)])
def test_pld_accountant_handles_poisson_gaussian_under_replace_one(sigma, q):
    m = 1 / sigma

    def mixture(side):
        return lambda x: q * norm.pdf(x - side * m) + (1 - q) * norm.pdf(x)

    accountant = dp.pld.PLDAccountant(REPLACE, value_discretization_interval=1e-3)
    accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)))
    for epsilon in (0.0, 0.1, 1.0):
        truth = hockey_stick(mixture(1), mixture(-1), epsilon, m + 12)
        assert truth - 1e-9 <= accountant.get_delta(epsilon) <= truth * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_pld_accountant_add_remove_takes_the_worse_direction(epsilon):
    q, m = 0.2, 1.0
    found = dp.pld.PLDAccountant(ADD).compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(1.0))).get_delta(epsilon)

    def mixture(x):
        return q * norm.pdf(x - m) + (1 - q) * norm.pdf(x)

    both = [hockey_stick(mixture, norm.pdf, epsilon, 13), hockey_stick(norm.pdf, mixture, epsilon, 13)]
    assert max(both) - 1e-9 <= found <= max(both) * (1 + 1e-3)


def test_plain_pld_is_for_add_remove():
    """Why reconbound takes a PLD of unknown origin for an add/remove one."""
    plain = privacy_loss_distribution.from_gaussian_mechanism(1.0)
    assert plain.get_delta_for_epsilon(0.0) == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-5)
    doubled = privacy_loss_distribution.from_gaussian_mechanism(1.0, neighboring_relation=REPLACE)
    assert doubled.get_delta_for_epsilon(0.0) == pytest.approx(2 * norm.cdf(1.0) - 1, rel=1e-5)


def test_pld_accountant_keeps_what_is_not_private_out_of_its_pld():
    """Why reconbound.mechanisms.dp_accounting builds the distribution itself."""
    accountant = dp.pld.PLDAccountant(REPLACE).compose(dp.GaussianDpEvent(0.0))
    assert accountant.get_delta(0.0) == 1
    assert accountant._pld.get_delta_for_epsilon(0.0) == 0.0


def test_pld_accountant_counts_a_composed_randomised_response_once():
    """An upstream fault (0.6.0) that mechanisms/dp_accounting.py works around; remove that when this fails."""
    one = dp.RandomizedResponseDpEvent(0.5, 2)
    many = dp.SelfComposedDpEvent(one, 100)
    once, often = (dp.pld.PLDAccountant(REPLACE).compose(e).get_delta(0.0) for e in (one, many))
    assert once == often == pytest.approx(0.5, rel=1e-3)


def test_pld_accountant_refuses_unsupported_neighbours():
    assert not dp.pld.PLDAccountant(REPLACE).supports(dp.LaplaceDpEvent(1.0))
    assert dp.pld.PLDAccountant(ADD).supports(dp.LaplaceDpEvent(1.0))
    assert not dp.pld.PLDAccountant(ADD).supports(dp.RandomizedResponseDpEvent(0.5, 2))
    assert not dp.pld.PLDAccountant(REPLACE).supports(
        dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0))
    )


def test_private_attributes_that_we_read():
    pld = dp.pld.PLDAccountant(ADD).compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)))._pld
    assert isinstance(pld, privacy_loss_distribution.PrivacyLossDistribution)
    assert pld._pmf_remove is not pld._pmf_add
    for pmf in (pld._pmf_remove, pld._pmf_add):
        dense = pmf.to_dense_pmf()
        assert isinstance(dense, pld_pmf.DensePLDPmf)
        assert dense.size == len(dense._probs)
        assert isinstance(dense._lower_loss, (int, np.integer))
        assert dense._discretization == 1e-4
        assert 0 <= dense._infinity_mass < 1e-9
        losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
        assert np.sum(dense._probs) + dense._infinity_mass == pytest.approx(1.0, abs=1e-7)
        assert np.sum(dense._probs * np.exp(-losses)) == pytest.approx(1.0, abs=1e-4)  # losses are ln P/Q under P
    symmetric = privacy_loss_distribution.from_gaussian_mechanism(1.0)
    assert symmetric._pmf_remove is symmetric._pmf_add


def test_pessimistic_by_default():
    """Every answer from a PLD is conservative because these distributions dominate."""
    for grid in (1e-1, 1e-2, 1e-3):
        pld = privacy_loss_distribution.from_gaussian_mechanism(1.0, value_discretization_interval=grid)
        for eps in (0.0, 1.0, 1.00037, 3.456789):  # on the grid and off it
            exact = norm.cdf(0.5 - eps) - math.exp(eps) * norm.cdf(-0.5 - eps)
            assert pld.get_delta_for_epsilon(eps) >= exact * (1 - 1e-12)


def test_exact_gaussian_curve():
    eps = dp.get_epsilon_gaussian(1.0, 1e-5)
    assert norm.cdf(0.5 - eps) - math.exp(eps) * norm.cdf(-0.5 - eps) == pytest.approx(1e-5, rel=1e-6)
