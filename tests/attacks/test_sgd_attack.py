"""An attack on private SGD, from the parameters after each step: what it sees, and that it meets the floors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import Kept, losses
from reconbound._internal.checks import InputError
from reconbound.accounting.amplification import poisson_factors
from reconbound.attacks import private_sgd as attack
from reconbound.attacks import simulate_sgd
from reconbound.attacks.private_sgd import Target, Transcript, observe
from reconbound.fisher import dense_information
from reconbound.training.sampling import make_sampler
from reconbound.training.settings import Settings

RECORD, STEPS = 4, 6


def problem(records: int = 12, d: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(d, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x = torch.rand(records, d, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(0, 2, (records,), generator=generator)


def settings(**changes) -> Settings:
    fields = {"noise_multiplier": 0.7, "max_grad_norm": 0.5, "sample_rate": 0.5, "lr": 0.3, "momentum": 0.5, "seed": 8}
    return Settings(**(fields | {"weight_decay": 0.01, "rules": None} | changes))


def target_of(own: Settings) -> tuple[Target, Transcript, Tensor]:
    model, x, y = problem()
    one = slice(RECORD, RECORD + 1)
    return Target(model, losses, y[one], x[one], own), observe(model, losses, x, y, own, RECORD, steps=STEPS), x[RECORD]


@pytest.mark.parametrize("clip", ["smooth", "hard"])
def test_attacker_sees_noise_and_gradient_of_drawn_record(clip: str, monkeypatch) -> None:
    learners: list[Kept] = []

    def kept(*given, **options) -> Kept:
        learners.append(Kept(*given, **options))
        return learners[-1]

    monkeypatch.setattr(attack, "PrivateSGD", kept)
    own = settings(clip=clip)
    target, seen, z = target_of(own)
    u, took = target.gradients(z, seen.params), []
    for step in range(STEPS):
        took.append(RECORD in make_sampler("poisson", 12, 0.5).batch(learners[0].run_seed, step).tolist())
        noise = learners[0].drawn[step]
        assert torch.allclose(seen.left[step], took[-1] * u[step] + 0.7 * 0.5 * noise, rtol=0, atol=1e-9)
    assert 0 < sum(took) < STEPS


def test_likelihood_and_slope_match_mixture() -> None:
    target, seen, z = target_of(settings())
    u, left = target.gradients(z, seen.params).numpy(), seen.left.numpy()

    def density(away: np.ndarray) -> np.ndarray:
        return np.exp(-np.square(away).sum(1) / (2 * seen.scale**2))

    expected = -np.log((0.5 * density(left) + 0.5 * density(left - u)) / density(left)).sum()
    assert target.loss(seen, z).item() == pytest.approx(expected, rel=1e-10)
    moved = (z + 0.3).requires_grad_()
    (slope,) = torch.autograd.grad(target.loss(seen, moved), moved)
    found, bend = target._slope(seen, moved.detach())
    assert torch.allclose(found, -slope, rtol=1e-8)
    assert bool((torch.linalg.eigvalsh(bend) > 0).all())


def test_information_matches_dense_jacobians() -> None:
    model, x, y = problem()
    target, seen, z = target_of(settings())
    expected = 0.0
    for step in range(STEPS):
        model.load_state_dict({name: v[step] for name, v in seen.params.items()})
        one = slice(RECORD, RECORD + 1)
        dense = dense_information(model, losses, x[one], y[one], max_grad_norm=0.5, noise_multiplier=0.7)
        across, along = poisson_factors(float(target.gradients(z, seen.params)[step].norm()) / seen.scale, 0.5)
        expected += 0.5 * (across * dense.across[0] + along * dense.along[0])
    assert float(target.information(seen, z).trace()) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(("rate", "noise"), [(1.0, 0.02), (0.5, 0.02)])
@pytest.mark.slow
def test_attack_meets_cramer_rao_floor_at_small_noise(rate: float, noise: float) -> None:
    """The search begins at the other records' average; four standard errors of a mean over 20 trainings. With Poisson
    batches the record takes part 5 times of 10 on average, and the error is that of 1/5 or a little more."""
    _, x, y = problem()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 3)).double()
    before = [p.clone() for p in model.parameters()]
    own = settings(sample_rate=rate, noise_multiplier=noise, max_grad_norm=1.0, seed=3)
    found = simulate_sgd(model, losses, x, y, own, RECORD, steps=10, trials=20)
    error = 4 * found.standard_error
    assert found.floor < found.cramer_rao
    assert found.cramer_rao - error < found.mse < (1.0 if rate == 1 else 1.3) * found.cramer_rao + error
    assert error < 2 * found.cramer_rao
    away = found.answers.mean(0) - x[RECORD].numpy()
    assert bool((np.abs(away) < 4 * found.answers.std(0) / np.sqrt(found.trials)).all())  # not biased
    assert found.trimmed <= found.mse
    assert np.square(found.answers - x[RECORD].numpy()).mean() == pytest.approx(found.mse)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "not visibly biased" in repr(found)
    assert "record 4, 20 trainings" in repr(found)


def test_attack_ends_if_record_was_never_drawn() -> None:
    model, x, y = problem()
    found = simulate_sgd(model, losses, x, y, settings(sample_rate=0.01, seed=1), RECORD, steps=2, trials=2)
    assert np.isfinite(found.answers).all()
    assert np.isfinite(found.mse)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"sampler": "fixed"}, {}, "settings.sampler must be poisson"),
        ({}, {"record": 12}, "record must be below 12"),
        ({}, {"trials": 1}, "trials"),
        ({}, {"steps": 2_000_000}, "model must be smaller"),
        ({}, {"start": torch.zeros(4)}, "start must have 3 numbers"),
    ],
)
def test_unsupported_attack_raises(changes, options, said) -> None:
    model, x, y = problem()
    given = {"record": RECORD, "steps": 2, "trials": 2} | options
    with pytest.raises(InputError, match=said):
        simulate_sgd(model, losses, x, y, settings(**changes), given.pop("record"), **given)
