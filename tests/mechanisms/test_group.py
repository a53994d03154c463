"""Groups of rows: against exact releases of several rows."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import norm
from test_mechanisms import ADD, REPLACE
from test_risk import EVERY, hard

from reconbound.mechanisms import DP, RenyiDP, SampledGaussian
from reconbound.mechanisms.group import GroupOf, group_of
from reconbound.mechanisms.guarantee import guarantee


def responses(epsilon, rows):
    """Returns the laws of the answers of several rows, all 1 against all 0."""
    high = math.exp(epsilon) / (1 + math.exp(epsilon))
    ones = np.array(list(itertools.product([0, 1], repeat=rows))).sum(axis=1)
    p = high**ones * (1 - high) ** (rows - ones)
    return p, p[::-1]


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_several_answers_of_one_person_are_within_every_bound(epsilon, rows):
    p, q = responses(epsilon, rows)
    mechanism = group_of(DP(epsilon, adjacency=REPLACE), rows)
    assert mechanism.order2() >= math.log(np.sum(p**2 / q)) - 1e-12
    assert mechanism.overlap() <= np.sum(2 * p * q / (p + q)) + 1e-12
    assert mechanism.membership_advantage() >= np.abs(p - q).sum() / 2 - 1e-12
    assert mechanism.kl() >= np.sum(p * np.log(p / q)) - 1e-12
    curve = mechanism.trade_off(REPLACE)
    for at in np.linspace(-6, 6, 49):
        assert curve.delta(at) >= np.clip(p - math.exp(at) * q, 0, None).sum() - 1e-12
    epsilon_found = mechanism.epsilon_at(0.01)
    assert np.clip(p - math.exp(epsilon_found) * q, 0, None).sum() <= 0.01


def test_gaussian_rows_are_exact():
    mechanism = group_of(hard(1.0), 3)
    assert mechanism.trade_off(ADD).tpr(0.01) == pytest.approx(norm.cdf(norm.ppf(0.01) + 3), rel=1e-9)
    assert mechanism.membership_advantage() == pytest.approx(2 * norm.cdf(3) - 1, rel=1e-9)


def test_sampled_rows_are_far_better_protected_than_as_one_record():
    """Counted as one record, two rows have a noise multiplier of half and are drawn twice as often: 85 %."""
    mechanism = SampledGaussian(1.0, 0.01, 1000)
    assert mechanism.for_group(2).rero(0.01) > 0.8
    assert group_of(mechanism, 2).rero(0.01) == pytest.approx(0.0977, abs=2e-3)
    assert group_of(mechanism, 2).epsilon_at(1e-5, ADD) < 0.75 * mechanism.for_group(2).epsilon_at(1e-5, ADD)


@pytest.mark.parametrize("mechanism", EVERY, ids=str)
def test_groups_of_every_mechanism(mechanism):
    assert group_of(mechanism, 1) is mechanism
    two, four = group_of(mechanism, 2), group_of(mechanism, 4)
    assert two.for_group(2) == four
    for larger, smaller in ((mechanism, two), (two, four)):
        assert larger.overlap() >= smaller.overlap() - 1e-12
        assert larger.membership_advantage() <= smaller.membership_advantage() + 1e-6
        assert larger.rero(0.01) <= smaller.rero(0.01) * (1 + 1e-3) + 1e-6
        for adjacency in (ADD, REPLACE):
            found = larger.epsilon_at(1e-5, adjacency), smaller.epsilon_at(1e-5, adjacency)
            if None not in found:
                assert found[0] <= found[1] * (1 + 1e-3) + 1e-6
    found = guarantee(two, high=10.0)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["mechanism"]["group"] == 2
    assert "2 rows" in str(found)
    assert isinstance(two, GroupOf)


def test_a_mechanism_without_groups_of_its_own_has_them_by_steps():
    one = RenyiDP(0.01, adjacency=REPLACE)
    two = group_of(one, 2)
    assert two.overlap() == pytest.approx(1 - 4 * (1 - one.overlap()), rel=1e-9)
    assert one.membership_advantage() < two.membership_advantage() <= 2 * one.membership_advantage() * (1 + 1e-3)
