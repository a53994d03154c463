"""Privacy losses, and what holds for every mechanism."""

import json
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.integrate import quad
from scipy.stats import norm
from test_mechanisms import ADD, KAPPAS, REPLACE, check_sound, chi2, kl, overlap, response

from reconbound._internal.checks import InputError
from reconbound.mechanisms import (
    DP,
    PLD,
    Event,
    OutputPerturbation,
    RenyiDP,
    SampledGaussian,
    as_mechanism,
)
from reconbound.mechanisms.guarantee import floor

# --- PLDs -----------------------------------


def gaussian_pld(m, relation, grid=1e-3):
    return privacy_loss_distribution.from_gaussian_mechanism(
        1 / m, value_discretization_interval=grid, neighboring_relation=relation
    )


def test_pld_agrees_with_the_mechanism_it_describes():
    exact = SampledGaussian(1.0, clip="hard")
    m = PLD(gaussian_pld(1.0, dp.NeighboringRelation.REPLACE_ONE), REPLACE)
    assert m.overlap() == pytest.approx(exact.overlap(), rel=1e-4)
    assert m.overlap() <= exact.overlap()
    assert m.membership_advantage() == pytest.approx(exact.membership_advantage(), rel=1e-4)
    assert m.epsilon_at(1e-5) == pytest.approx(exact.epsilon_at(1e-5), rel=1e-3)
    assert m.epsilon_at(1e-5, ADD) is None
    assert (m.order2(), m.kl()) == (math.inf, math.inf)  # its tail was cut: nothing finite is proved


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_pld_without_a_cut_tail_has_every_divergence(epsilon):
    p, q = response(epsilon)
    noise = 2 / (math.exp(epsilon) + 1)
    pld = privacy_loss_distribution.from_randomized_response(noise, 2, value_discretization_interval=1e-5)
    m = PLD(pld, REPLACE)
    check_sound(m, p, q)
    assert m.order2() == pytest.approx(math.log1p(chi2(p, q)), rel=1e-4)
    assert m.kl() == pytest.approx(kl(p, q), rel=1e-4)
    assert m.overlap() == pytest.approx(overlap(p, q), rel=1e-4)


def test_empty_bins_at_enormous_losses_are_not_taken_for_privacy():
    """0 · e^800 is no number, and max(0, NaN) is 0: the floor would be 1e308."""
    pld = privacy_loss_distribution.from_randomized_response(1e-320, 2, value_discretization_interval=0.5)
    assert PLD(pld, REPLACE).order2() == pytest.approx(math.log(2) + 320 * math.log(10), rel=1e-2)
    assert floor("theorem1", PLD(pld, REPLACE)).value < 1e-300


def test_a_pld_of_unknown_neighbours_is_taken_for_add_remove():
    """dp-accounting's default. What is called replace-one must then hold for the doubled shift."""
    exact = SampledGaussian(1.0, clip="hard")
    for given in (
        PLD(gaussian_pld(1.0, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)),
        as_mechanism(gaussian_pld(1.0, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)),
    ):
        assert given.adjacency == ADD
        assert given.order2() == math.inf
        assert 0 < given.overlap() <= exact.overlap()
        assert exact.membership_advantage() <= given.membership_advantage() <= 1
        assert given.epsilon_at(1e-5) is None
        assert given.epsilon_at(1e-5, ADD) == pytest.approx(exact.epsilon_at(1e-5, ADD), rel=1e-3)
        np.testing.assert_allclose(given.rero(KAPPAS), exact.rero(KAPPAS), rtol=1e-3)
    assert as_mechanism(gaussian_pld(1.0, dp.NeighboringRelation.REPLACE_ONE), REPLACE).overlap() == pytest.approx(
        exact.overlap(), rel=1e-4
    )


def test_the_root_of_lecam_is_a_metric():
    """The overlap of a PLD relies on √LC(p, r) ≤ √LC(p, q) + √LC(q, r)."""
    rng = np.random.default_rng(4)
    for _ in range(500):
        p, q, r = rng.dirichlet(np.full(3, rng.choice([0.1, 1.0, 20.0])), size=3) + 1e-9
        p, q, r = p / p.sum(), q / q.sum(), r / r.sum()
        root = {
            name: math.sqrt(max(1 - overlap(*pair), 0))
            for name, pair in {"pq": (p, q), "qr": (q, r), "pr": (p, r)}.items()
        }
        assert root["pr"] <= root["pq"] + root["qr"] + 1e-9


# --- all of them -----------------------------------

EVERY = [
    SampledGaussian(1.0, 0.01, 100),
    SampledGaussian(1.0, 0.01, 100, sampler="fixed"),
    DP(1.0),
    DP(1.0, 1e-5),
    DP(1.0, adjacency=ADD),
    RenyiDP(1.0),
    RenyiDP(1.0, order=1.2),
    OutputPerturbation(1000, 0.01, 0.1),
    PLD(gaussian_pld(1.0, dp.NeighboringRelation.REPLACE_ONE), REPLACE),
    Event(dp.ComposedDpEvent([dp.GaussianDpEvent(3.0), dp.LaplaceDpEvent(5.0)])),
]


@pytest.mark.parametrize("mechanism", EVERY, ids=str)
def test_every_mechanism_answers_everything(mechanism):
    assert as_mechanism(mechanism) is mechanism
    assert 0 <= mechanism.kl() <= max(mechanism.order2(), mechanism.kl())
    assert 0 <= mechanism.overlap() <= 1
    assert 0 <= mechanism.membership_advantage() <= 1
    assert mechanism.overlap() >= (1 - mechanism.membership_advantage()) ** 2 - 1e-9 or mechanism.order2() == math.inf
    successes = mechanism.rero(KAPPAS)
    assert np.all((successes >= KAPPAS * (1 - 1e-9)) & (successes <= 1))
    assert np.all(np.diff(successes) >= 0)
    assert isinstance(float(mechanism.rero(0.1)), float)
    json.dumps(mechanism.to_dict(), allow_nan=False)
    assert all(isinstance(text, str) for text in mechanism.assumes())
    assert str(mechanism)
    assert hash(mechanism) is not None if not isinstance(mechanism, Event) else True


@pytest.mark.parametrize("mechanism", EVERY[:8], ids=str)
def test_delta_and_adjacency_are_checked(mechanism):
    if not isinstance(mechanism, DP):
        for bad in (0.0, 1.0, -1.0, math.nan):
            with pytest.raises(InputError, match="delta"):
                mechanism.epsilon_at(bad)
    with pytest.raises(InputError, match="adjacency"):
        mechanism.epsilon_at(1e-5, "neighbours")


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (SampledGaussian, {"noise_multiplier": 0.0}, "noise_multiplier"),
        (SampledGaussian, {"noise_multiplier": -1.0}, "noise_multiplier"),
        (SampledGaussian, {"noise_multiplier": math.nan}, "noise_multiplier"),
        (SampledGaussian, {"noise_multiplier": math.inf}, "noise_multiplier"),
        (SampledGaussian, {"noise_multiplier": 1e-200}, "noise_multiplier"),
        (SampledGaussian, {"noise_multiplier": "a"}, "noise_multiplier"),
        (SampledGaussian, {"noise_multiplier": 1.0, "sample_rate": 1.1}, "sample_rate"),
        (SampledGaussian, {"noise_multiplier": 1.0, "sample_rate": 0.0}, "sample_rate"),
        (SampledGaussian, {"noise_multiplier": 1.0, "steps": 0}, "steps"),
        (SampledGaussian, {"noise_multiplier": 1.0, "steps": 1.5}, "steps"),
        (SampledGaussian, {"noise_multiplier": 1.0, "steps": 10**400}, "steps"),
        (SampledGaussian, {"noise_multiplier": 1.0, "clip": "soft"}, "clip"),
        (SampledGaussian, {"noise_multiplier": 1.0, "sampler": "shuffled"}, "sampler"),
        (SampledGaussian, {"noise_multiplier": 1.0, "sampler": "shuffle", "sample_rate": 0.5}, "sample_rate"),
        (DP, {"epsilon": -1.0}, "epsilon"),
        (DP, {"epsilon": 1.0, "delta": 1.0}, "delta"),
        (DP, {"epsilon": 1.0, "adjacency": "x"}, "adjacency"),
        (RenyiDP, {"epsilon": -1.0}, "epsilon"),
        (RenyiDP, {"epsilon": 1.0, "order": 0.4}, "order"),
        (OutputPerturbation, {"records": 0, "l2": 1.0, "noise_std": 1.0}, "records"),
        (OutputPerturbation, {"records": 1, "l2": 0.0, "noise_std": 1.0}, "l2"),
        (OutputPerturbation, {"records": 1, "l2": 1.0, "noise_std": -1.0}, "noise_std"),
        (OutputPerturbation, {"records": 1, "l2": 1.0, "noise_std": 1.0, "data_norm": 0.0}, "data_norm"),
        (OutputPerturbation, {"records": 1, "l2": 1e-200, "noise_std": 1e-200}, "noise_std"),
        (PLD, {"pld": None, "adjacency": "x"}, "pld"),
    ],
)
def test_wrong_values_are_named(kind, arguments, named):
    with pytest.raises(InputError, match=named) as caught:
        kind(**arguments)
    assert caught.value.name == named
    assert "got" in str(caught.value)


def test_numbers_of_any_type_are_kept_plain():
    m = SampledGaussian(np.float32(1.0), np.float64(0.5), np.int64(10))
    assert json.loads(json.dumps(m.to_dict())) == SampledGaussian(1.0, 0.5, 10).to_dict()
    assert type(SampledGaussian(1.0, 0.5, 10.0).steps) is int
    assert SampledGaussian(1.0, 0.01, 10.0).epsilon_at(1e-5) == SampledGaussian(1.0, 0.01, 10).epsilon_at(1e-5)
    json.dumps(OutputPerturbation(np.int32(10), np.float32(1), np.float32(1)).to_dict())
    json.dumps(DP(np.float32(1.0)).to_dict())


def test_laplace_pair_by_integration_bounds_pure_dp():
    """The Laplace mechanism is ε-DP: its own divergences stay below the pure ones."""
    for eps in (0.3, 2.0):
        square = quad(lambda x: 0.5 * math.exp(-2 * abs(x) + abs(x - eps)), -40, 40, points=[0, eps])[0]  # noqa: B023
        assert math.log(square) <= DP(eps).order2()


# --- records that are never drawn -----------------------------------


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
@pytest.mark.parametrize(("q", "steps"), [(0.005, 50), (0.3, 1), (0.01, 1000), (1.0, 3)])
def test_without_noise_only_drawn_records_leak(sampler, q, steps):
    """As the noise goes to 0: advantage 1 − (1 − q)ᵀ, and from 1 − (1 − q)ᵀ(1 − κ) to κ + 1 − (1 − q)ᵀ to rebuild."""
    kappa = np.array([1e-6, 1e-2, 0.5])
    never = (1 - q) ** steps
    last = math.inf
    for noise in (1e-6, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0):
        found = SampledGaussian(noise, q, steps, sampler=sampler)
        advantage = found.membership_advantage()
        assert advantage <= min(1 - never, last) + 1e-9  # never more than the limit, and more noise never tells more
        assert (found.rero(kappa) <= kappa + 1 - never + 1e-12).all()
        last = advantage
        if noise < 0.02:
            assert advantage == pytest.approx(1 - never, abs=1e-12)
            assert (found.rero(kappa) >= 1 - never * (1 - kappa) - 1e-12).all()  # what the best attack reaches


@pytest.mark.parametrize("noise", [1e-6, 0.01, 0.1, 1.0])
def test_one_step_advantage_is_the_closed_form(noise):
    """q (2Φ(m) − 1) between (1 − q)N(0, 1) + qN(±m, 1)."""
    found = SampledGaussian(noise, 0.2, 1, clip="hard")
    exact = 0.2 * math.erf(1 / noise / math.sqrt(2))
    assert exact - 1e-12 <= found.membership_advantage() <= exact + 1e-4


def test_two_steps_without_noise_by_simulation():
    """A release that shows z in every batch with it: the best test between two candidates, counted over draws."""
    rng, q, steps = np.random.default_rng(0), 0.1, 4
    seen = (rng.random((200_000, steps)) < q).any(axis=1)  # then the test is sure, else it says the first candidate
    advantage = seen.mean()
    assert SampledGaussian(1e-9, q, steps).membership_advantage() == pytest.approx(advantage, abs=5e-3)


def test_shuffled_batches_against_every_shuffle():
    """One epoch of four records with gradients ±1 and 0 in two batches of two: the mixture over all shuffles, before
    and after one record is replaced, tells no more than one release with every record in it."""
    from itertools import permutations, product

    sigma = 1.0
    found = SampledGaussian.shuffled(sigma, 2, 2, clip="hard")
    x = np.linspace(-8, 8, 161)
    first, second = np.meshgrid(x, x, indexing="ij")

    def release(gradients):
        sums = {(sum(p[:2]), sum(p[2:])) for p in permutations(gradients)}
        weights = [(sum(p[:2]), sum(p[2:])) for p in permutations(gradients)]
        p = sum(weights.count(s) * norm.pdf(first, s[0], sigma) * norm.pdf(second, s[1], sigma) for s in sums)
        return p / p.sum() + 1e-300

    for others in product((-1, 0, 1), repeat=3):
        p, other = release((*others, 1)), release((*others, -1))
        assert math.log1p(chi2(p.ravel(), other.ravel())) <= found.order2() + 1e-9
        assert 0.5 * np.abs(p - other).sum() <= found.membership_advantage() + 1e-6
