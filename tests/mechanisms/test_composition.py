"""Compositions of different releases, against sums over all outcomes, closed forms and simulation."""

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from reconbound._internal.checks import InputError
from reconbound.mechanisms import DP, Composition, SampledGaussian, as_mechanism
from reconbound.mechanisms.events import event_releases
from reconbound.mechanisms.guarantee import guarantee
from reconbound.mechanisms.pure_releases import response_pld
from reconbound.mechanisms.releases import GaussianRelease, composed_pld, merged

REPLACE, ADD = "replace-one", "add/remove"
KAPPAS = np.array([1e-6, 1e-3, 0.1, 0.5])
D = dp.dp_event


def hard(noise, rate=1.0, steps=1, sampler="poisson"):
    return SampledGaussian(noise, rate, steps, clip="hard", sampler=sampler)


def hockey_stick(p, q, epsilon):
    """Returns the worse direction of two discrete distributions."""
    return max(np.sum(np.maximum(a - math.exp(epsilon) * b, 0)) for a, b in ((p, q), (q, p)))


def cells(edges, cdf, sf):
    """Returns the masses of cells, from whichever tail does not cancel."""
    return np.where(edges[1:] < 0, np.diff(cdf(edges)), -np.diff(sf(edges)))


def gaussian_cells(edges, shift, noise):
    return cells(edges - shift, lambda x: norm.cdf(x / noise), lambda x: norm.sf(x / noise))


def laplace_cells(edges, shift, b):
    def tail(x):
        return np.where(x > 0, np.exp(-np.maximum(x, 0) / b) / 2, 1 - np.exp(np.minimum(x, 0) / b) / 2)

    return cells(edges - shift, lambda x: tail(-x), tail)


def grid_of(noise, rate, signs, points=4000, reach=9.0):
    """Returns probabilities of Poisson-sampled Gaussian steps on cells: the exact masses, not densities."""
    edges = np.linspace(-reach * noise - 1, reach * noise + 1, points)
    return [(1 - rate) * gaussian_cells(edges, 0, noise) + rate * gaussian_cells(edges, s, noise) for s in signs]


def test_a_schedule_in_equal_stretches_is_the_whole():
    whole, split = hard(1.3, 0.02, 600), Composition([hard(1.3, 0.02, 200)] * 3)
    assert split.order2() == pytest.approx(whole.order2(), rel=1e-12)
    assert split.kl() == pytest.approx(whole.kl(), rel=1e-12)
    assert split.overlap() == pytest.approx(whole.overlap(), rel=1e-4)
    assert split.overlap() <= whole.overlap()
    assert split.never_drawn == pytest.approx(whole.never_drawn)
    for adjacency in (REPLACE, ADD):
        assert split.epsilon_at(1e-5, adjacency) == pytest.approx(whole.epsilon_at(1e-5, adjacency), rel=1e-5)
    np.testing.assert_allclose(split.rero(KAPPAS), whole.rero(KAPPAS), rtol=1e-5)
    assert split.membership_advantage() == pytest.approx(whole.membership_advantage(), rel=1e-5)
    assert (split.kl_neighbours, split.sampler, round(split.order2_paper(), 12)) == (
        ADD,
        "poisson",
        round(whole.order2_paper(), 12),
    )


def test_two_sampled_steps_against_all_outcomes():
    """One step at σ = 1, q = 0.3 and one at σ = 0.7, q = 0.1, on 1,500² cells. Cells tell no more than the release, so
    the bounds may not be below them; fine cells tell nearly all, so they may not be far above."""
    found = Composition([hard(1.0, 0.3), hard(0.7, 0.1)])
    for adjacency, signs in ((REPLACE, (1, -1)), (ADD, (1, 0))):
        (p1, q1), (p2, q2) = grid_of(1.0, 0.3, signs, 1500), grid_of(0.7, 0.1, signs, 1500)
        p, q = np.outer(p1, p2).ravel(), np.outer(q1, q2).ravel()
        pairs = [(p, q)] if adjacency == REPLACE else [(p, q), (q, p)]
        for epsilon in (0.1, 0.5, 1.0):
            exact = max(np.sum(np.maximum(a - math.exp(epsilon) * b, 0)) for a, b in pairs)
            bound = found.epsilon_at(exact, adjacency)
            assert epsilon * (1 - 1e-9) <= bound <= epsilon * (1 + 2e-3)
        if adjacency == REPLACE:
            advantage, overlap = np.abs(p - q).sum() / 2, np.sum(2 * p * q / (p + q))
            assert advantage * (1 - 1e-9) <= found.membership_advantage() <= advantage * (1 + 1e-3)
            assert overlap * (1 - 1e-3) <= found.overlap() <= overlap * (1 + 1e-9)
            assert math.log(np.sum(p * p / q)) <= found.order2() * (1 + 1e-9)
            assert found.order2() <= math.log(np.sum(p * p / q)) * (1 + 1e-2)
        else:
            nats = np.sum(p * np.log(p / q))
            assert nats * (1 - 1e-9) <= found.kl() <= nats * (1 + 1e-2)
            for kappa in (0.01, 0.2):  # Neyman–Pearson, in both directions
                best = max(_power(a, b, kappa) for a, b in pairs)
                assert best * (1 - 1e-6) <= found.rero(kappa) <= best * (1 + 1e-2)


def _power(p, q, level):
    order = np.argsort(-(p / q), kind="stable")
    return float(np.interp(level, np.append(0, np.cumsum(q[order])), np.append(0, np.cumsum(p[order]))))


def test_epsilon_of_many_stretches_by_simulation():
    """A decaying noise and a rising rate: δ of the dominating pair at the bound's ε, from 400,000 runs of T steps.

    The losses are drawn directly: L = Σ ln P/Q, and δ(ε) = E(1 − e^{ε−L})₊.
    """
    noises, rates, steps = (3.0, 2.0, 1.5, 1.2), (0.01, 0.02, 0.03, 0.05), (50, 40, 30, 20)
    found = Composition([hard(*one) for one in zip(noises, rates, steps, strict=True)])
    delta = 1e-2
    epsilon = found.epsilon_at(delta, ADD)
    rng, runs = np.random.default_rng(3), 400_000
    loss = np.zeros(runs)
    for noise, rate, count in zip(noises, rates, steps, strict=True):
        m = 1 / noise
        for _ in range(count):
            x = rng.standard_normal(runs) + m * (rng.random(runs) < rate)
            loss += np.log1p(rate * np.expm1(m * x - m * m / 2))
    samples = np.maximum(-np.expm1(epsilon - loss), 0)
    error = samples.std() / math.sqrt(runs)
    assert samples.mean() == pytest.approx(delta, abs=5 * error)
    assert error < 0.02 * delta


def test_trade_off_of_two_steps_against_all_outcomes():
    (p1, q1), (p2, q2) = grid_of(1.0, 0.3, (1, -1), 1200), grid_of(0.7, 0.1, (1, -1), 1200)
    p, q = np.outer(p1, p2).ravel(), np.outer(q1, q2).ravel()
    curve = Composition([hard(1.0, 0.3), hard(0.7, 0.1)]).trade_off(REPLACE)
    for rate in (1e-4, 0.01, 0.2):
        best = _power(p, q, rate)
        assert best * (1 - 1e-6) <= float(curve.tpr(rate)) <= best * (1 + 2e-2)


def test_order_does_not_matter_and_nested_ones_are_flat():
    a, b, c = hard(1.0, 0.01, 10), hard(2.0, 0.5, 3), hard(5.0)
    one, other = Composition([a, b, c]), Composition([Composition([c, a]), b])
    assert one.order2() == pytest.approx(other.order2(), rel=1e-14)
    assert one.epsilon_at(1e-5) == pytest.approx(other.epsilon_at(1e-5), rel=1e-9)
    assert other.mechanisms == (c, a, b)


def test_steps_without_sampling_are_one_gaussian():
    """1/σ² adds up, also where a clip norm changes: σ is the noise over the clip norm of its stretch."""
    found = Composition([hard(2.0, 1.0, 3), hard(5.0, 1.0, 7)])
    same = hard(1 / math.sqrt(3 / 4 + 7 / 25))
    assert found.order2() == pytest.approx(same.order2())
    for adjacency in (REPLACE, ADD):
        assert found.epsilon_at(1e-6, adjacency) == pytest.approx(same.epsilon_at(1e-6, adjacency), rel=1e-4)
    assert merged(found.releases()) == [(GaussianRelease(pytest.approx(math.sqrt(3 / 4 + 7 / 25))), 1)]


def test_layers_against_all_outcomes():
    """Two layers with clip norms 1 and 0.5 and noise 1.2 and 0.9: the worst pair of gradients, on 1,200² cells."""
    found = SampledGaussian.per_layer([1.2, 0.9], [1.0, 0.5], sample_rate=0.3)
    edges = np.linspace(-9, 9, 1201)
    (a, b), (c, d) = ([gaussian_cells(edges, sign * n, s) for sign in (1, -1)] for n, s in ((1.0, 1.2), (0.5, 0.9)))
    base = np.outer(gaussian_cells(edges, 0, 1.2), gaussian_cells(edges, 0, 0.9)).ravel()
    p, q = (0.7 * base + 0.3 * np.outer(one, two).ravel() for one, two in ((a, c), (b, d)))
    exact = math.log(np.sum(p * p / q))
    assert exact * (1 - 1e-9) <= found.order2() <= exact * (1 + 1e-2)
    exact = np.sum(p * np.log(p / base))
    assert exact * (1 - 1e-9) <= found.kl() <= exact * (1 + 1e-2)
    clips = [1.0, 2.0, 0.3]  # Opacus: one noise for all layers, its noise multiplier times the norm of the clip norms
    same = SampledGaussian.per_layer([1.7 * math.hypot(*clips)] * 3, clips)
    assert same.noise_multiplier == pytest.approx(1.7, rel=1e-12)


@pytest.mark.parametrize(
    ("noises", "clips", "named"),
    [
        ([1.0], [1.0, 2.0], "max_grad_norms"),
        ([0.0], [1.0], "noise_stds"),
        ([1.0], [-1.0], "max_grad_norms"),
        ([], [], "noise_stds"),
        ([1e300], [1e-300], "noise_stds"),
    ],
)
def test_layers_are_checked(noises, clips, named):
    with pytest.raises(InputError, match=named):
        SampledGaussian.per_layer(noises, clips)


def test_many_different_steps_are_rounded_to_the_safe_side():
    rng = np.random.default_rng(0)
    steps = [
        hard(float(s), float(q)) for s, q in zip(rng.uniform(1, 1.3, 400), rng.uniform(0.01, 0.013, 400), strict=True)
    ]
    few = merged(Composition(steps).releases(), most=20)
    assert len(few) <= 20
    assert sum(count for _, count in few) == 400
    exact, rounded = Composition(steps).releases(), few
    for value in ("order2", "kl"):
        true = sum(count * getattr(one, value) for one, count in exact)
        bound = sum(count * getattr(one, value) for one, count in rounded)
        assert true <= bound <= 1.5 * true
    found = Composition(steps)
    low, high = (hard(s, q, 400).epsilon_at(1e-5) for s, q in ((1.3, 0.01), (1.0, 0.013)))
    assert low < found.epsilon_at(1e-5) < high
    assert any("different steps" in note for note in found.notes())


@pytest.mark.parametrize("replace_one", [True, False])
def test_a_larger_shift_or_rate_dominates(replace_one):
    """What `merged` relies on, at every ε: δ grows with m and with q."""

    def delta(m, q):
        pld = composed_pld([(GaussianRelease(m, q), 1)], replace_one)
        return np.array([pld.get_delta_for_epsilon(e) for e in np.linspace(0, 2, 9)])

    for (m, q), (m2, q2) in itertools.pairwise([(0.5, 0.1), (0.7, 0.1), (0.7, 0.3), (1.5, 0.6)]):
        assert np.all(delta(m, q) <= delta(m2, q2) + 1e-9)


def test_samplers_together():
    """Leaving a record out cuts other batches where they are shuffled or of fixed size: ε is for replace-one only."""
    poisson, fixed, shuffled = (
        hard(1.0, 0.01, 100),
        hard(2.0, 0.01, 100, "fixed"),
        SampledGaussian.shuffled(5.0, 10, 30),
    )
    both = Composition([poisson, shuffled])
    assert both.epsilon_at(1e-5, ADD) is None
    assert both.trade_off(ADD) is None
    assert both.epsilon_at(1e-5) > max(poisson.epsilon_at(1e-5), shuffled.epsilon_at(1e-5))
    assert (both.sampler, both.kl_neighbours) == ("several", "add/remove or zero-out")
    mixed = Composition([poisson, fixed])
    assert mixed.epsilon_at(1e-5, ADD) is None
    assert mixed.epsilon_at(1e-5) >= poisson.epsilon_at(1e-5)
    assert mixed.order2() == pytest.approx(poisson.order2() + fixed.order2())
    assert mixed.kl() == pytest.approx(poisson.kl() + fixed.kl())
    assert guarantee(mixed).to_dict()["mechanism"]["type"] == "Composition"


def test_groups_are_composed():
    found = Composition([hard(2.0, 0.01, 10), hard(3.0, 0.02, 5)]).for_group(3)
    assert found.order2() == pytest.approx(
        sum(hard(*a).for_group(3).order2() for a in ((2.0, 0.01, 10), (3.0, 0.02, 5)))
    )


@pytest.mark.parametrize("given", [(), None, [1.0], [DP(1.0)], "ab", [hard(1.0), DP(1.0)]])
def test_what_cannot_be_composed_is_refused(given):
    with pytest.raises(InputError, match="mechanisms must be"):
        Composition(given)


# --- events ----------------------------------------------------------------------


@pytest.mark.parametrize("b", [0.4, 2.0])
def test_laplace_has_a_distribution_for_replace_one(b):
    """Closed form: δ(ε) = 1 − e^{(ε − t)/2} at shift t = 2/b (replace-one) and 1/b."""
    found = as_mechanism(dp.LaplaceDpEvent(b))
    for adjacency, t in ((REPLACE, 2 / b), (ADD, 1 / b)):
        for share in (0.1, 0.5, 0.9):
            epsilon = share * t
            exact = -math.expm1((epsilon - t) / 2)
            assert epsilon * (1 - 1e-9) <= found.epsilon_at(exact, adjacency) <= epsilon + 1e-3 * t
    assert found.membership_advantage() == pytest.approx(-math.expm1(-1 / b), rel=1e-3)


def laplace_delta(shift, epsilon):
    """Returns δ of one number that moves by `shift` under Laplace noise of scale 1, at any real ε."""
    if epsilon >= shift:
        return 0.0
    if epsilon < 0:
        return -math.expm1(epsilon) + math.exp(epsilon) * laplace_delta(shift, -epsilon)
    return -math.expm1((epsilon - shift) / 2)


def two_laplace_delta(a, b, epsilon):
    """The same of two numbers. The first's loss is a with chance ½, −a with e^{−a}/2, else a − 2x, density e^{−x}/2."""
    middle = quad(lambda x: math.exp(-x) / 2 * laplace_delta(b, epsilon - a + 2 * x), 0, a, limit=200)[0]
    return laplace_delta(b, epsilon - a) / 2 + math.exp(-a) / 2 * laplace_delta(b, epsilon + a) + middle


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (0.2, 1.3), (2.0, 1.0), (1.0, 1.0)])
def test_one_laplace_number_dominates_several(a, b):
    """Shifts a and b of two numbers tell no more than a shift a + b of one (docs/theory/compositions.md), at all ε."""
    epsilons = np.linspace(-a - b, a + b, 15)
    one, two = (
        np.array([f(e) for e in epsilons])
        for f in (lambda e: laplace_delta(a + b, e), lambda e: two_laplace_delta(a, b, e))
    )
    assert np.all(two <= one + 1e-9)
    assert np.any(two < one - 1e-3)


@pytest.mark.parametrize(("b", "q"), [(1.0, 0.2), (0.3, 0.01), (3.0, 0.7)])
def test_sampled_laplace_against_cells(b, q):
    """One number: (1−q)L(0) + qL(±1), on 40,000 cells with the kinks on their edges."""
    found = as_mechanism(dp.PoissonSampledDpEvent(q, dp.LaplaceDpEvent(b)))
    edges = np.unique(np.append(np.linspace(-40 * b - 1, 40 * b + 1, 40_000), [-1.0, 0.0, 1.0]))

    base, up, down = (laplace_cells(edges, s, b) for s in (0.0, 1.0, -1.0))
    p, r = (1 - q) * base + q * up, (1 - q) * base + q * down
    assert math.log(np.sum(p * p / r)) <= found.order2() * (1 + 1e-9)
    assert max(np.sum(a * np.log(a / c)) for a, c in ((p, base), (base, p))) <= found.kl() * (1 + 1e-9)
    for epsilon in (0.01, 0.05):
        for adjacency, other in ((REPLACE, r), (ADD, base)):
            delta = hockey_stick(p, other, epsilon)
            if delta > 1e-7:
                assert found.epsilon_at(delta, adjacency) >= epsilon * (1 - 1e-6)
    delta = hockey_stick(p, base, 0.05)
    if delta > 1e-7:
        assert found.epsilon_at(delta, ADD) == pytest.approx(0.05, rel=2e-2)
    assert found.never_drawn == pytest.approx(1 - q)


@pytest.mark.parametrize(("a", "sensitivity", "count"), [(0.5, 1, 1), (0.2, 3, 2), (1.5, 2, 3)])
def test_discrete_laplace_against_all_outcomes(a, sensitivity, count):
    found = as_mechanism(dp.SelfComposedDpEvent(D.DiscreteLaplaceDpEvent(a, sensitivity), count))
    x = np.arange(-150, 151)
    pmf = np.exp(-a * np.abs(x))

    def of(shift):
        one = np.exp(-a * np.abs(x - shift)) / pmf.sum()
        return one

    for adjacency, shift in ((REPLACE, 2 * sensitivity), (ADD, sensitivity)):
        p, q = of(0), of(shift)
        loss = np.rint(np.abs(x - shift) - np.abs(x)).astype(int)  # in units of a: add up the losses' distribution
        mass = np.bincount(loss + shift, weights=p, minlength=2 * shift + 1)
        total = mass
        for _ in range(count - 1):
            total = np.convolve(total, mass)
        losses = a * (np.arange(len(total)) - shift * count)
        for epsilon in np.array([0.3, 0.9]) * shift * a * count:
            delta = np.sum(total * np.maximum(-np.expm1(epsilon - losses), 0))
            bound = found.epsilon_at(delta, adjacency)
            assert epsilon * (1 - 1e-6) <= bound <= epsilon + 5e-3 * shift * a * count
        if adjacency == REPLACE:
            assert count * math.log(np.sum(p * p / q)) <= found.order2() * (1 + 1e-6)
        else:
            assert count * np.sum(p * np.log(p / q)) <= found.kl() * (1 + 1e-6)


def test_mixture_of_gaussians_against_cells():
    sigma, shifts, chances = 0.8, (0.0, 0.5, 2.0), (0.6, 0.3, 0.1)
    found = as_mechanism(D.MixtureOfGaussiansDpEvent(sigma, shifts, chances))
    edges = np.linspace(-10, 10, 20_001)
    base = gaussian_cells(edges, 0, sigma)
    up, down = (
        sum(p * gaussian_cells(edges, sign * c, sigma) for c, p in zip(shifts, chances, strict=True))
        for sign in (1, -1)
    )
    delta = hockey_stick(up, base, 0.5)
    assert 0.5 <= found.epsilon_at(delta, ADD) <= 0.5 * (1 + 1e-2)
    assert math.log(np.sum(up * up / down)) <= found.order2()
    assert np.sum(up * np.log(up / base)) <= found.kl()
    assert hockey_stick(up, down, found.epsilon_at(1e-3)) <= 1e-3
    assert found.never_drawn == pytest.approx(0.6)
    gaussian = as_mechanism(dp.GaussianDpEvent(0.5))
    single = as_mechanism(D.MixtureOfGaussiansDpEvent(0.5, (1.0,), (1.0,)))
    assert (single.order2(), single.kl()) == (pytest.approx(gaussian.order2()), pytest.approx(gaussian.kl()))
    assert as_mechanism(D.MixtureOfGaussiansDpEvent(1.0, (0.0,), (1.0,))).order2() == 0


def test_truncated_batches_are_dp_accountings():
    event = D.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 12, 1.0)
    found = as_mechanism(dp.SelfComposedDpEvent(event, 20))
    for adjacency, relation in ((REPLACE, "REPLACE_ONE"), (ADD, "ADD_OR_REMOVE_ONE")):
        theirs = dp.pld.PLDAccountant(dp.NeighboringRelation[relation], 1e-3).compose(event, 20).get_epsilon(1e-5)
        assert found.epsilon_at(1e-5, adjacency) == pytest.approx(theirs, rel=1e-2)
    assert found.order2() >= SampledGaussian(1.0, 0.01, 20, clip="hard").order2()


def test_truncated_batches_against_every_draw():
    """Three records with q = ½, batches cut to 1: replace-one neighbours of one step, over all draws and cuts."""
    q, sigma = 0.5, 0.9
    found = as_mechanism(D.TruncatedSubsampledGaussianDpEvent(3, q, 1, sigma))
    edges = np.linspace(-9, 9, 4001)

    def release(z, others):
        total = np.zeros(len(edges) - 1)
        for drawn in itertools.product((0, 1), repeat=3):
            weight = q ** sum(drawn) * (1 - q) ** (3 - sum(drawn))
            chosen = [v for v, there in zip((z, *others), drawn, strict=True) if there] or [0.0]
            for v in chosen:
                total += weight / len(chosen) * gaussian_cells(edges, v, sigma)
        return total

    for others in itertools.product((-1.0, 0.0, 1.0), repeat=2):
        p, r, without = release(1.0, others), release(-1.0, others), release(0.0, others)
        assert math.log(np.sum(p * p / r)) <= found.order2() + 1e-9
        assert np.sum(p * np.log(p / without)) <= found.kl() + 1e-9
        for epsilon in (0.2, 0.6):
            delta = hockey_stick(p, r, epsilon)
            assert delta <= 1e-12 or found.epsilon_at(delta) >= epsilon * (1 - 1e-6)


def test_zcdp_events_add_up_and_have_no_distribution():
    gaussian = dp.GaussianDpEvent(3.0)  # ρ = 1/18 under add/remove
    found = as_mechanism(dp.ComposedDpEvent([D.ZCDpEvent(1 / 18), D.ZCDpEvent(1 / 18)]))
    exact = as_mechanism(dp.SelfComposedDpEvent(gaussian, 2))
    assert found.order2() == pytest.approx(exact.order2())  # 8ρ = 4/σ²
    assert found.kl() == pytest.approx(exact.kl())
    assert found.epsilon_at(1e-5, ADD) is None
    assert found.epsilon_at(1e-5) >= exact.epsilon_at(1e-5)


@pytest.mark.parametrize("epsilon", [1e-3, 0.4, 3.0, 60.0])
def test_response_distribution_dominates_and_is_close(epsilon):
    pld = response_pld(epsilon, epsilon / 1000)
    for share in (0.0, 0.5, 0.9):
        exact = -math.expm1((share - 1) * epsilon) / (1 + math.exp(-epsilon))
        assert exact * (1 - 1e-9) <= pld.get_delta_for_epsilon(share * epsilon) <= exact * (1 + 3e-2)
    coarse = response_pld(epsilon, epsilon * 0.7)
    assert coarse.get_delta_for_epsilon(epsilon) > 0  # rounded up


def test_what_is_refused_says_why():
    with pytest.raises(InputError, match="only its Renyi divergences are known"):
        event_releases(D.RepeatAndSelectDpEvent(dp.GaussianDpEvent(1.0), 10, 1))
    with pytest.raises(InputError, match="more than once"):
        event_releases(D.SampledWithReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0)))
