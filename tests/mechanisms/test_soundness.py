"""Careless use of the calculator: what is not said is asked for or said, what is not sound is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from reconbound import floor, guarantee
from reconbound._internal.checks import InputError
from reconbound.bounds import ball_floor
from reconbound.bounds.bound import data_space
from reconbound.cli import app as cli
from reconbound.linear import Softmax, minimise
from reconbound.mechanisms import DP, PLD, OutputPerturbation, RenyiDP, SampledGaussian, as_mechanism
from reconbound.mechanisms.calibrate import calibrate
from reconbound.mechanisms.guarantee import FLOORS

# --- optimistic privacy loss distributions -----------------------------------------------------------------------


def optimistic():
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as p

    poor = p.from_gaussian_mechanism(1.0, pessimistic_estimate=False, use_connect_dots=False)
    good = p.from_gaussian_mechanism(1.0)
    sparse = pld_pmf.SparsePLDPmf({0: 1.0}, 1e-4, 0.0, False)
    yield poor
    yield poor.self_compose(5)
    yield poor.compose(poor)
    yield p.from_laplace_mechanism(1.0, pessimistic_estimate=False, use_connect_dots=False)
    yield p.from_gaussian_mechanism(1.0, pessimistic_estimate=False, use_connect_dots=False, sampling_prob=0.1)
    yield p.PrivacyLossDistribution(good._pmf_remove, poor._pmf_add)
    yield p.PrivacyLossDistribution(poor._pmf_remove, good._pmf_add)
    yield p.PrivacyLossDistribution(sparse)


def test_optimistic_distributions_are_refused() -> None:
    count = 0
    for pld in optimistic():
        count += 1
        for made in (PLD, lambda x: PLD(x, "replace-one"), as_mechanism, guarantee, lambda x: floor("lecam", x)):
            with pytest.raises(InputError, match="pld must be a pessimistic estimate"):
                made(pld)
    assert count == 8


def test_missing_probability_counts_as_lost() -> None:
    """Masses that add up to 0.9 hid a tenth of all outcomes: δ at ε = 20 was 0."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as p

    short = p.PrivacyLossDistribution(pld_pmf.SparsePLDPmf({0: 0.9}, 1e-2, 0.0, True))
    mechanism = PLD(short, "replace-one")
    assert mechanism.membership_advantage() >= 0.1 - 1e-12
    assert mechanism.epsilon_at(0.05) is None
    assert mechanism.overlap() <= 0.9 + 1e-12
    assert mechanism.rero(0.01) >= 0.1 - 1e-12


# --- output perturbation: which loss, and the ball that rows are clipped to ---------------------------------------


def test_output_perturbation_asks_for_the_loss(run, answer) -> None:
    words = ["bound", "--output-perturbation", "--records", 1000, "--l2", 0.1, "--noise-std", 0.1]
    status, _, err = run(*words)
    assert status == 2
    assert "--loss is missing (logistic, softmax or squared)" in err
    status, _, err = run(*words, "--loss", "squared")
    assert status == 2
    assert "--target-bound is missing" in err
    assert run(*words, "--loss", "hinge")[0] == 2
    assert run(*words, "--loss", "softmax", "--target-bound", 2)[0] == 2
    logistic, softmax = (answer(*words, "--loss", loss) for loss in ("logistic", "softmax"))
    assert softmax["mechanism"]["loss"] == "softmax"
    assert any("softmax loss" in note for note in softmax["notes"])
    order2 = [math.log1p(4 / found["bounds"][0]["mse"]) for found in (logistic, softmax)]  # (2R)²/(e^ε₂ − 1) in d = 1
    assert order2[1] == pytest.approx(2 * order2[0], rel=1e-9)


@pytest.mark.parametrize(("loss", "factor"), [("logistic", 1.0), ("softmax", math.sqrt(2))])
def test_order2_follows_the_losses_gradient(loss: str, factor: float) -> None:
    """(2L/(nλσ))² with L = R for logistic loss and √2·R for softmax: twice the ε₂."""
    for norm_bound, intercept in ((1.0, False), (3.0, True)):
        row = math.hypot(norm_bound, 1.0) if intercept else norm_bound
        found = OutputPerturbation(500, 0.02, 0.3, norm_bound, loss, intercept=intercept)
        assert found.order2() == pytest.approx((2 * factor * row / (500 * 0.02 * 0.3)) ** 2)
    ridge = OutputPerturbation(500, 0.02, 0.3, 2.0, "squared", 5.0)
    reach = 5.0 / (2 * math.sqrt(0.02))
    assert ridge.order2() == pytest.approx(((4 * reach + 2 * 5 * 2) / (500 * 0.02 * 0.3)) ** 2)
    assert ridge.m == pytest.approx(2 * (5 + 2 * reach) / (500 * 0.02 * 0.3))


def test_softmax_moves_by_more_than_the_logistic_formula_allows() -> None:
    """The minimiser of three classes moves by 1.09 of what was claimed for every loss, and by less than is claimed now:
    one record of the wrong class changes side beside many that stretch the weights."""
    for records, claimed in ((1000, 1.05), (10_000, 1.09)):
        x, y = np.zeros((records, 2)), np.zeros(records, dtype=int)
        x[:, 0], y[0] = 10.0, 1
        one, other = x.copy(), x.copy()
        one[0], other[0] = 10 * np.array([math.cos(1), math.sin(1)]), 10 * np.array([math.cos(1), -math.sin(1)])
        ends = [minimise(rows, y, Softmax(), l2=0.3, intercept=False, classes=3).weights for rows in (one, other)]
        moved = float(np.linalg.norm(ends[0] - ends[1]))
        assert moved > claimed * OutputPerturbation(records, 0.3, 1.0, 10.0, "logistic").replace_one_shift
        assert moved <= OutputPerturbation(records, 0.3, 1.0, 10.0, "softmax").replace_one_shift


def test_guess_of_zero_never_undercuts_a_floor_for_any_attacker() -> None:
    """Rows of norm 1 in 784 dimensions: guessing 0 errs by 1/784 in MSE at most, where 0.25 was printed."""
    for dim in (1, 2, 10, 784):
        for radius in (0.1, 1.0, 28.0):
            for low, high in ((None, None), (0.0, 1.0), (-1.0, 1.0), (None, 2.0)):
                for noise in (1e-3, 0.1, 1e3, 1e9):
                    found = guarantee(OutputPerturbation(1000, 0.1, noise, radius), dim=dim, low=low, high=high)
                    for name in ("lecam", "rate_distortion"):
                        assert found[name].value <= radius**2 / dim * (1 + 1e-12)
                    assert found["lecam"].guess <= radius**2 / dim * (1 + 1e-12)
                    assert dim * max(found.low**2, found.high**2) <= radius**2 * (1 + 1e-12)
                    other = found.space.cut is not None or found.space.whole_ball is not None
                    assert ("ball" in str(found)) == other
                    assert any("The floors are those of the box" in note for note in found.notes) == other


def test_box_that_lies_in_the_ball_stays_as_it_was() -> None:
    mechanism = OutputPerturbation(1000, 0.1, 0.1, 28.0)
    for name in FLOORS:
        inside, plain = (floor(name, mechanism, dim=784, low=0.0, high=1.0, radius=r) for r in (None, math.inf))
        assert inside == plain
    with pytest.raises(InputError, match="low must leave records within the ball of radius 28"):
        floor("lecam", mechanism, dim=784, low=1.5, high=2.0)


@pytest.mark.parametrize(("dim", "noise"), [(1, 0.2), (1, 0.7), (1, 2.0), (1, 10.0), (2, 0.7), (2, 10.0)])
def test_ball_floors_are_below_the_bayes_risk(noise: float, dim: int) -> None:
    """z uniform in the ball, or on the inscribed box's corners, and released with Gaussian noise: the Bayes risk by
    quadrature is at least the floor of that release, whose KL to N(0, s²) is at most R²/(2s²)."""
    radius = 1.0
    kl = radius**2 / (2 * noise**2)
    side = np.linspace(-radius, radius, 61)
    grid = np.stack(np.meshgrid(*[side] * dim, indexing="ij"), -1).reshape(-1, dim)
    prior = grid[np.linalg.norm(grid, axis=1) <= radius]
    reach = np.linspace(-radius - 6 * noise, radius + 6 * noise, 121 if dim == 2 else 2001)
    weight = (reach[1] - reach[0]) ** dim

    def risk(points: np.ndarray) -> float:
        likelihood = np.ones((1, len(points)))
        for j in range(dim):  # a product of one factor for each coordinate
            factor = norm.pdf(reach[:, None], points[:, j], noise)
            likelihood = (likelihood[:, None] * factor).reshape(-1, len(points))
        total = likelihood.sum(1, keepdims=True)
        mean = likelihood @ points / np.maximum(total, 1e-300)
        square = likelihood @ np.sum(points**2, axis=1, keepdims=True) / np.maximum(total, 1e-300)
        posterior = square[:, 0] - np.sum(mean**2, axis=1)
        return float(np.sum(posterior * total[:, 0]) * weight / len(points) / dim)

    assert ball_floor(kl, radius, dim).value <= risk(prior) * (1 + 1e-2)
    half = radius / math.sqrt(dim)
    corners = np.stack(np.meshgrid(*[[-half, half]] * dim, indexing="ij"), -1).reshape(-1, dim)
    space = data_space(dim, radius=radius)
    # neighbours z, z' of the ball are 2R/s apart at most, as antipodal gradients of norm m = R/s are
    release = SampledGaussian(noise / radius, 1.0, 1, "hard")
    lecam = floor("lecam", release, dim=dim, radius=radius)
    assert lecam.value <= risk(corners) * (1 + 1e-6)
    assert lecam.value <= floor("lecam", release, dim=dim, low=space.low, high=space.high).value
    best = floor("rate_distortion", release, dim=dim, radius=radius)
    assert best.value <= max(risk(corners), risk(prior)) * (1 + 1e-2)


def test_unbiased_floors_hold_all_over_the_ball() -> None:
    """z + N(0, s²) is unbiased everywhere: its error s² is at least theorem1 and corners of the ball, which know only
    ε₂ = (2R/s)²; and an attacker that is unbiased on the ball errs at least that much at its edge too."""
    for dim in (1, 3, 50):
        for s in (0.3, 1.0, 5.0, 100.0):
            release = RenyiDP((2 * 1.0 / s) ** 2, adjacency="replace-one")
            found = guarantee(release, dim=dim, radius=1.0)
            assert found["theorem1"].value <= s**2 * (1 + 1e-12)
            assert found["corners"].value <= s**2 * (1 + 1e-12)
            if dim > 1:
                assert found["theorem1"].coordinates == "average"
            # a release of z₁ only: nothing binds an attacker on a coordinate along which the ball has no width
    assert floor("lecam", release, dim=50, radius=1.0).coordinates == "each"


# --- theorem1_paper -----------------------------------------------------------------------------------------------


def test_theorem1_paper_is_never_shown_as_a_guarantee(run, answer) -> None:
    mark = "not proved, no guarantee"
    for mechanism in (SampledGaussian(1.0, 0.01, 1000), DP(1.0), RenyiDP(1.0), OutputPerturbation(1000, 0.1, 0.1)):
        found = guarantee(mechanism)
        (line,) = [line for line in str(found).splitlines() if line.startswith("theorem1_paper:")]
        assert line.startswith(f"theorem1_paper: {mark}")
        assert [bound.proved for bound in found.bounds] == [True, False, True, True, True, True]
        assert [b["proved"] for b in found.to_dict()["bounds"]] == [True, False, True, True, True, True]
        assert mark in str(floor("theorem1_paper", mechanism))
        assert "theorem1_paper" not in found.in_short
    sgd = ["--sample-rate", 0.01, "--steps", 1000]
    made = calibrate(SampledGaussian(1.0, 0.01, 1000), 0.04, bound="theorem1_paper")
    assert str(made).startswith(f"theorem1_paper is {mark}")
    reported = answer("calibrate", "--bound", "theorem1_paper", "--target-error", 0.2, *sgd)
    assert reported["proved"] is False
    assert reported["bound"]["proved"] is False
    assert mark in reported["notes"][0]
    out = run("calibrate", "--bound", "theorem1_paper", "--target-error", 0.2, *sgd)[1]
    assert out.startswith(f"theorem1_paper is {mark}")
    assert mark in run("calibrate", "--bound", "theorem1_paper", "--target-epsilon", 3, *sgd)[1]
    assert answer("calibrate", "--target-error", 0.2, *sgd)["proved"] is True
    table = " ".join(run("bound", "--noise-multiplier", 1, *sgd)[1].split()).replace("│ ", "")
    assert "not proved" in table.partition("Telling two candidate")[0]


# --- neighbours, sampler, randomness ------------------------------------------------------------------------------


def test_results_state_assumptions(answer, run) -> None:
    for words, message in (
        (["--rdp2", 2], "came without its neighbours: it was taken as replace-one"),
        (["--epsilon", 2, "--delta", 1e-5], "came without its neighbours: it was taken as replace-one"),
        (["--epsilon", 2], "no δ was given with ε"),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 10], "Poisson sampling was assumed"),
        ([], "Poisson sampling was assumed"),
    ):
        found = answer("bound", *words)
        assert any(message in note for note in found["notes"])
        assert message in " ".join(run("bound", *words)[1].split())
        assert found["randomness"]
        assert found["mechanism"]["sampler"]
        assert all(bound["adjacency"] for bound in found["bounds"])
    for words in (
        ["--rdp2", 2, "--adjacency", "replace-one"],
        ["--epsilon", 2, "--delta", 1e-5, "--adjacency", "add/remove"],
        ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 10, "--sampler", "poisson"],
    ):
        notes = " ".join(answer("bound", *words)["notes"])
        assert "came without" not in notes
        assert "was assumed" not in notes
    for mechanism in (DP(1.0), DP(1.0, 1e-6), RenyiDP(1.0)):
        text = str(guarantee(mechanism))
        assert "it was taken as replace-one" in text
        assert guarantee(mechanism).to_dict()["mechanism"]["adjacency_assumed"] is True
        assert any("assumed" in message for message in guarantee(mechanism)["lecam"].assumes)
    assert "taken as" not in str(guarantee(DP(1.0, adjacency="replace-one")))
    found = answer("calibrate", "--target-epsilon", 3, "--sample-rate", 0.1, "--steps", 10)
    assert any("Poisson sampling was assumed" in note for note in found["notes"])


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return float(np.log(np.sum(p**order * q ** (1 - order))) / (order - 1))


def test_add_remove_divergences_are_converted_for_replace_one() -> None:
    """P — without the record — Q: random triples of distributions, each divergence to the middle at most ε."""
    rng = np.random.default_rng(6)
    for order in (2.0, 3.0, 4.0, 8.0):
        for _ in range(60):
            k = int(rng.integers(2, 5))
            p, middle, q = (rng.dirichlet(np.full(k, 2.0)) + 1e-9 for _ in range(3))
            p, middle, q = (x / x.sum() for x in (p, middle, q))
            pairs = ((p, middle), (middle, p), (q, middle), (middle, q))
            epsilon = max(renyi(a, b, order) for a, b in pairs)
            claimed = RenyiDP(epsilon, order, "add/remove")
            assert renyi(p, q, 2.0) <= claimed.order2() * (1 + 1e-9)
            assert claimed.overlap() <= float(np.sum(2 * p * q / (p + q))) * (1 + 1e-9)
            assert float(np.abs(p - q).sum() / 2) <= claimed.membership_advantage() * (1 + 1e-9)
            assert float(np.sum(p * np.log(p / middle))) <= claimed.kl() * (1 + 1e-9)
            for d in (1e-3, 0.1):
                eps = claimed.epsilon_at(d, "add/remove")
                assert eps is not None
                assert float(np.maximum(p - math.exp(eps) * middle, 0).sum()) <= d * (1 + 1e-9)
                eps = claimed.epsilon_at(d)
                assert eps is not None
                assert float(np.maximum(p - math.exp(eps) * q, 0).sum()) <= d * (1 + 1e-9)
    assert RenyiDP(1.0, 2.0, "add/remove").order2() == math.inf
    assert floor("theorem1", RenyiDP(1.0, 2.0, "add/remove")).value == 0


def test_group_privacy_of_a_huge_epsilon_keeps_its_delta() -> None:
    """e^800 · 1e-310 is beyond 1, not 1e-6."""
    assert DP(800.0, 1e-310, "add/remove")._replace_one() == (1600.0, 1.0)
    eps, delta = DP(1.0, 1e-5, "add/remove")._replace_one()
    assert eps == 2.0
    assert 1e-5 * (1 + math.e) <= delta <= 1e-5 * (1 + math.e) * (1 + 1e-9)


def test_paper_rule_of_a_ledger_is_marked() -> None:
    from reconbound import Account, FisherAccountant

    ledger = FisherAccountant(Account(1.0, 1.0, 0.5, records=3, features=2, steps=1, rules=("exact", "paper")))
    assert ledger.mse_floor("exact").proved
    assert not ledger.mse_floor("paper").proved
    assert "not proved" in str(ledger.mse_floor("paper"))
    assert json.dumps(ledger.mse_floor("paper").to_dict()["proved"]) == "false"


def test_command_line_of_an_unknown_loss_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bound", "--output-perturbation", "--records", "5", "--l2", "1", "--noise-std", "1", "--loss", "ridge"]
    assert cli.run(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
