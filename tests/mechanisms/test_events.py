"""dp-accounting's events and distributions wherever a mechanism is: leaves, compositions, refusals."""

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.integrate import quad
from scipy.stats import binom

from reconbound import divergences
from reconbound._internal.checks import InputError
from reconbound.bounds import rate_distortion
from reconbound.mechanisms import Event, SampledGaussian, as_mechanism
from reconbound.mechanisms.events import event_releases as leaves
from reconbound.mechanisms.guarantee import floor, guarantee

G, L, R = dp.GaussianDpEvent, dp.LaplaceDpEvent, dp.RandomizedResponseDpEvent
Poisson, Times, Both = dp.PoissonSampledDpEvent, dp.SelfComposedDpEvent, dp.ComposedDpEvent
REPLACE, ADD = "replace-one", "add/remove"


def fixed(size, n, event):
    return dp.SampledWithoutReplacementDpEvent(n, size, event)


@pytest.mark.parametrize(
    ("event", "same"),
    [
        (G(2.0), SampledGaussian(2.0, clip="hard")),
        (Times(G(2.0), 7), SampledGaussian(2.0, 1.0, 7, clip="hard")),
        (Poisson(0.1, G(2.0)), SampledGaussian(2.0, 0.1, clip="hard")),
        (Times(Times(Poisson(0.1, G(2.0)), 3), 5), SampledGaussian(2.0, 0.1, 15, clip="hard")),
        (Times(fixed(10, 100, G(2.0)), 4), SampledGaussian(2.0, 0.1, 4, clip="hard", sampler="fixed")),
    ],
)
def test_equal_gaussian_steps_become_private_sgd(event, same):
    assert as_mechanism(event) == same
    general = Event(event)
    assert general.order2() == pytest.approx(same.order2())
    assert general.kl() == pytest.approx(same.kl())
    assert general.overlap() <= same.overlap() * (1 + 1e-3)
    assert general.membership_advantage() == pytest.approx(same.membership_advantage(), rel=1e-2) or "fixed" in str(
        same
    )
    assert guarantee(event).to_dict() == guarantee(same).to_dict()


@pytest.mark.parametrize("b", [0.3, 1.0, 10.0, 300.0])
def test_laplace_leaf_by_integration(b):
    """Replace-one shifts by 2, the release without the record by 1."""
    ((leaf, count),) = leaves(L(b))
    assert count == 1

    def ratio(shift, f):
        def integrand(x):
            loss = (abs(x - shift) - abs(x)) / b
            return math.exp(-abs(x) / b) / (2 * b) * f(loss)

        return quad(integrand, -60 * b, 0)[0] + quad(integrand, 0, shift)[0] + quad(integrand, shift, 60 * b)[0]

    assert leaf.order2 == pytest.approx(math.log(ratio(2.0, math.exp)), rel=1e-6, abs=1e-12)
    assert leaf.kl == pytest.approx(ratio(1.0, lambda x: x), rel=1e-6, abs=1e-12)
    assert math.log(ratio(2.0, lambda x: math.exp(x))) <= leaf.order2 * (1 + 1e-6) + 1e-12


def test_laplace_in_several_dimensions_is_no_worse():
    """ℓ₁ sensitivity spread over coordinates adds up to less than in one."""
    ((whole, _),), ((half, _),) = leaves(L(1.0)), leaves(L(2.0))
    assert 2 * half.order2 <= whole.order2
    assert 2 * half.kl <= whole.kl


@pytest.mark.parametrize("k", [2, 3, 10])
@pytest.mark.parametrize("p", [1e-300, 1e-3, 0.5, 0.99])
def test_response_leaf(p, k):
    ((leaf, _),) = leaves(R(p, k))
    high, low = 1 - p + p / k, p / k
    log_ratio = math.log(high) - math.log(low)
    log_square = np.logaddexp.reduce(
        [2 * math.log(high) - math.log(low), 2 * math.log(low) - math.log(high), math.log(max((k - 2) * low, 1e-320))]
    )
    assert leaf.order2 >= log_square * (1 - 1e-9) - 1e-15
    assert leaf.kl >= (high - low) * log_ratio * (1 - 1e-9)
    if k == 2:
        assert leaf.order2 == pytest.approx(log_square, rel=1e-9)
        assert leaf.kl == pytest.approx((high - low) * log_ratio, rel=1e-9)


def test_leaves_without_noise_or_without_a_release():
    nothing = [dp.NoOpDpEvent(), R(1.0, 5), R(0.0, 1), Poisson(0.0, G(1.0)), fixed(0, 10, G(1.0)), Times(G(0.0), 0)]
    everything = [dp.NonPrivateDpEvent(), G(0.0), L(0.0), R(0.0, 2), Poisson(0.5, G(0.0)), fixed(1, 2, G(0.0))]
    for event in nothing:
        m = as_mechanism(event)
        assert (m.order2(), m.kl()) == (0.0, 0.0)
        assert (m.overlap(), m.membership_advantage(), m.rero(0.25)) == (1.0, 0.0, 0.25)
        assert floor("lecam", event).value == 0.25
    for event, beside in itertools.product(everything, [None, G(100.0), R(0.9, 2), Poisson(0.01, G(1.0))]):
        m = as_mechanism(event if beside is None else Both([beside, event]))
        assert (m.order2(), m.kl()) == (math.inf, math.inf)
        assert m.overlap() == 0.0
        assert m.membership_advantage() == 1.0
        assert m.rero(1e-6) == 1.0
        assert m.epsilon_at(1e-5) is None
        assert m.epsilon_at(1e-5, ADD) is None
        assert all(bound.value == 0 and bound.vacuous for bound in guarantee(m).bounds)


@pytest.mark.parametrize("count", [1, 2, 30])
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_composed_randomised_response_against_the_binomial(count, p):
    m = as_mechanism(Times(R(p, 2), count))
    a, b = binom.pmf(np.arange(count + 1), count, 1 - p / 2), binom.pmf(np.arange(count + 1), count, p / 2)
    exact = {"overlap": np.sum(2 * a * b / (a + b)), "advantage": np.sum(np.abs(a - b)) / 2}
    assert m.order2() == pytest.approx(math.log(np.sum(a**2 / b)), rel=1e-6)
    assert m.kl() == pytest.approx(np.sum(a * np.log(a / b)), rel=1e-6)
    assert m.overlap() <= exact["overlap"] * (1 + 1e-9)
    assert m.overlap() == pytest.approx(exact["overlap"], rel=1e-2, abs=1e-9)
    assert exact["advantage"] <= m.membership_advantage() * (1 + 1e-9)
    assert m.membership_advantage() == pytest.approx(exact["advantage"], rel=1e-2)
    eps = m.epsilon_at(0.01)
    assert np.sum(np.maximum(a - math.exp(eps) * b, 0)) <= 0.01 * (1 + 1e-6)


def test_compositions_add_up_leaf_by_leaf():
    parts = [G(2.0), Times(L(3.0), 4), Poisson(0.1, G(1.5)), fixed(5, 100, G(2.5)), R(0.5, 4)]
    whole = as_mechanism(Both(parts))
    assert isinstance(whole, Event)
    each = [as_mechanism(part) for part in parts]
    assert whole.order2() == pytest.approx(sum(m.order2() for m in each))
    assert whole.kl() == pytest.approx(sum(m.kl() for m in each))
    assert whole.overlap() < min(m.overlap() for m in each)
    assert whole.membership_advantage() > max(m.membership_advantage() for m in each)
    assert as_mechanism(Times(Both(parts), 3)).order2() == pytest.approx(3 * whole.order2())
    assert [bound.name for bound in guarantee(whole).bounds] == [
        "theorem1",
        "corners",
        "lecam_unbiased",
        "lecam",
        "rate_distortion",
    ]


def test_two_gaussians_are_one():
    """1/σ² adds up: the PLD of the composition against the closed form."""
    m, same = as_mechanism(Both([G(2.0), G(3.0)])), SampledGaussian(1 / math.hypot(1 / 2, 1 / 3), clip="hard")
    assert m.order2() == pytest.approx(same.order2())
    assert m.overlap() == pytest.approx(same.overlap(), rel=1e-3)
    assert m.overlap() <= same.overlap()
    for adjacency in (REPLACE, ADD):
        assert m.epsilon_at(1e-5, adjacency) == pytest.approx(same.epsilon_at(1e-5, adjacency), rel=2e-3)
    assert m.rero(0.01) == pytest.approx(same.rero(0.01), rel=2e-3)


def test_sampling_a_composition_of_gaussians_samples_them_together():
    event = Poisson(0.1, Both([Times(G(2.0), 3), G(1.0)]))
    assert as_mechanism(event).order2() == pytest.approx(
        SampledGaussian(1 / math.sqrt(3 / 4 + 1), 0.1, clip="hard").order2()
    )


def test_fixed_batch_composition_is_bounded_by_convexity():
    """Its parts may depend on each other's results; our forms are proved for one Gaussian alone."""
    ((one, _),), ((both, _),) = leaves(fixed(1, 100, G(2.0))), leaves(fixed(1, 100, Times(G(4.0), 4)))
    assert one.order2 == divergences.order2_fixed(0.5, 0.01)
    assert both.order2 == pytest.approx(divergences.order2_fixed(0.5, 0.01, method="wang"))
    assert one.order2 < both.order2
    assert both.kl == pytest.approx(0.01 * 0.5**2 / 2)
    assert one.kl < both.kl


@pytest.mark.parametrize("events", [[G(0.001), G(1.0)], [G(0.03), G(2.0)], [L(1e-6), L(1.0)], [Poisson(1e-9, G(0.02))],
                                    [Times(Poisson(0.01, G(1.0)), 10**6), G(2.0)], [Times(R(0.9, 2), 10**6), G(5.0)],
                                    [G(1e-200), G(1e-200)], [G(1e200), G(1e200)], [L(1e200), G(1e200)]])  # fmt: skip
def test_extreme_compositions_neither_hang_nor_overflow(events):
    found = guarantee(Both(events)).to_dict()
    numbers = [found["membership_advantage"], *(b["mse"] for b in found["bounds"])]
    numbers += [pair["success"] for pair in found["rero"]]
    assert all(math.isfinite(x) and x >= 0 for x in numbers)


@pytest.mark.parametrize(
    "event",
    [
        dp.UnsupportedDpEvent(),
        dp.dp_event.DiscreteLaplaceDpEvent(1.0, 1.5),
        dp.dp_event.SampledWithReplacementDpEvent(100, 10, G(1.0)),
        dp.dp_event.RepeatAndSelectDpEvent(G(1.0), 10, 1),
        dp.dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0], [0.5]),
        dp.dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, -1.0], [0.5, 0.5]),
        dp.dp_event.ZCDpEvent(-1.0),
        Poisson(0.1, Both([G(1.0), L(1.0)])),
        fixed(1, 10, R(0.5, 2)),
        dp.SingleEpochTreeAggregationDpEvent(1.0, 4),
        Times(G(1.0), -1),
        Both([Times(G(1.0), -5), G(1.0)]),
        Poisson(1.5, G(1.0)),
        Poisson(-0.5, G(1.0)),
        R(1.5, 2),
        R(-0.5, 2),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(event):
    with pytest.raises(InputError, match="must"):
        as_mechanism(event)


@pytest.mark.parametrize("given", [1.0, None, "gaussian", {"sigma": 1}])
def test_other_things_are_refused(given):
    for accepts in (as_mechanism, guarantee, lambda g: floor("lecam", g)):
        with pytest.raises(InputError, match="mechanism must be"):
            accepts(given)


def test_a_pld_is_accepted_wherever_a_mechanism_is():
    pld = privacy_loss_distribution.from_laplace_mechanism(2.0, value_discretization_interval=1e-4)
    found = guarantee(pld, dim=10)
    assert found.epsilon is None
    assert 0.4 < found.epsilon_add_remove <= 0.5
    assert found["theorem1"].value == 0.0  # nothing of order 2 is known about replacing
    assert found.mechanism.kl() == math.inf  # 6e-17 at infinity
    exact = rate_distortion(0.5 + math.expm1(-0.5), dim=10).value  # KL of Laplace laws half a scale apart
    assert exact * (1 - 1e-4) < found["rate_distortion"].value <= exact
    x = np.linspace(-60, 60, 100_001)  # two records, Laplace noise of scale 2 around ±1
    p, q = np.exp(-np.abs(x - 1) / 2), np.exp(-np.abs(x + 1) / 2)
    assert 0 < found["lecam"].value <= 0.25 * np.sum(2 * p * q / (p + q)) / np.sum(p)
    assert floor("lecam", pld, dim=10).value == found["lecam"].value


def test_replace_one_by_way_of_the_release_without_the_record():
    """A mixture is known under add/remove only: replacing is removing and adding. Its advantage was 0.401."""
    rate, noise, steps = 0.05, 1.0, 10
    mixture = as_mechanism(Times(dp.dp_event.MixtureOfGaussiansDpEvent(noise, [0.0, 1.0], [1 - rate, rate]), steps))
    same = as_mechanism(Times(Poisson(rate, G(noise)), steps))
    assert isinstance(mixture, Event)
    found, exact = mixture.trade_off(), same.trade_off()
    epsilons = np.linspace(-3, 6, 91)
    assert np.all(found.delta(epsilons) >= exact.delta(epsilons) * (1 - 1e-9))
    assert exact.advantage <= found.advantage <= 0.147
    assert exact.advantage <= mixture.membership_advantage() <= 0.147
    assert same.epsilon_at(1e-3) <= mixture.epsilon_at(1e-3) <= 2.5 * same.epsilon_at(1e-3)
    assert 0.8 < mixture.overlap() <= same.overlap()
