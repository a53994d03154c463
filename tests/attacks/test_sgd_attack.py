"""An attack on private SGD, from the parameters after each step: what it sees, and that it meets the floors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import Kept, losses
from reconbound._internal.checks import InputError
from reconbound.accounting.amplification import poisson_factors
from reconbound.attacks import SGDKnowledge, SGDTrials, Training, Transcript, simulate_sgd, transcript_of
from reconbound.attacks.trainings import clipped_sums, sgd_step, with_clean_sums
from reconbound.divergences import poisson_kl, poisson_pair_kl
from reconbound.fisher import dense_information
from reconbound.fisher.worlds import Replacement, step_distances
from reconbound.training.settings import Settings
from reconbound.training.trajectory import Recorder, Trajectory

RECORD, STEPS = 4, 6
ONE = slice(RECORD, RECORD + 1)


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


def recorded(own: Settings, steps: int = STEPS) -> tuple[Kept, Trajectory]:
    """Trains by PrivateSGD; returns the learner, which keeps noise and sums, and its trajectory."""
    model, x, y = problem()
    recorder = Recorder()
    learner = Kept(model, losses, x, y, own, progress=False, check=False, callbacks=[recorder])
    learner.fit(steps)
    return learner, recorder.trajectory()


def seen_by_attacker(own: Settings, participation: bool = False) -> tuple[SGDKnowledge, Transcript, Tensor]:
    model, x, y = problem()
    known = SGDKnowledge(model, losses, own, y[ONE], x[others()].mean(0, keepdim=True))
    released = with_clean_sums(recorded(own)[1], model, losses, (x, y), own)
    return known, transcript_of(released, known, RECORD, x[RECORD], participation=participation), x[RECORD]


def others() -> list[int]:
    return [i for i in range(12) if i != RECORD]


@pytest.mark.parametrize("clip", ["smooth", "hard"])
def test_attacker_sees_noise_and_gradient_of_drawn_record(clip: str) -> None:
    own = settings(clip=clip)
    learner, _ = recorded(own)
    known, seen, z = seen_by_attacker(own)
    u, took = known.gradients(z[None], seen.params)[0], []
    for step in range(STEPS):
        took.append(RECORD in learner.batches[step])
        noise = learner.drawn[step]
        assert torch.allclose(seen.left[0, step], took[-1] * u[step] + 0.7 * 0.5 * noise, rtol=0, atol=1e-9)
    assert 0 < sum(took) < STEPS


def test_attacker_who_knows_participation_sees_those_steps_only() -> None:
    known, seen, z = seen_by_attacker(settings(), participation=True)
    _, hidden, _ = seen_by_attacker(settings())
    took = recorded(settings())[1].took_part(RECORD)[0]
    assert seen.present is not None
    assert int(seen.present.sum()) == int(took.sum()) == seen.left.shape[1]
    assert torch.equal(seen.left[0], hidden.left[0, took])
    assert torch.equal(seen.params[0], hidden.params[0, took])
    u = known.gradients(z[None], seen.params)[0]
    expected = ((seen.left[0] * u).sum() - u.square().sum() / 2) / seen.scale**2
    assert float(known.log_ratio(seen, z)[0]) == pytest.approx(float(expected), rel=1e-12)
    assert torch.equal(known.log_ratio(seen, known.gradients_at(seen.params, z)), known.log_ratio(seen, z))


def test_sums_before_noise_are_the_learners() -> None:
    model, x, y = problem()
    learner, trajectory = recorded(settings())
    clean = with_clean_sums(trajectory, model, losses, (x, y), settings()).clean
    assert clean is not None
    assert torch.allclose(clean[0], torch.stack(learner.sums), rtol=1e-12, atol=1e-14)
    noisy = torch.stack(learner.sums) + 0.7 * 0.5 * torch.stack(learner.drawn)
    assert torch.allclose(trajectory.sums[0], noisy, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("clip", ["smooth", "hard"])
def test_many_trainings_take_the_steps_of_private_sgd(clip: str) -> None:
    """The fleet's gradients and updates with PrivateSGD's batches and noise, several trainings side by side."""
    own = settings(clip=clip)
    parts = [recorded(replaced) for replaced in (own, settings(clip=clip, seed=9))]
    model, x, y = problem()
    training = Training(model, losses, x, y, own, STEPS)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    w, velocity = start.repeat(2, 1), torch.zeros(2, len(start), dtype=torch.float64)
    for step in range(STEPS):
        took = torch.stack([trajectory.took[0, step] for _, trajectory in parts])
        noise = torch.stack([learner.drawn[step] for learner, _ in parts])
        noisy = clipped_sums(training, w, took) + own.noise * noise
        for k, (_, trajectory) in enumerate(parts):
            assert torch.allclose(w[k], trajectory.params[0, step], rtol=1e-11, atol=1e-13)
            assert torch.allclose(noisy[k], trajectory.sums[0, step], rtol=1e-11, atol=1e-12)
        w, velocity = sgd_step(own, w, velocity, noisy / training.sampler.divisor)
    assert torch.allclose(w[0], torch.cat([p.detach().flatten() for p in parts[0][0].model.parameters()]), rtol=1e-11)


def test_likelihood_and_slope_match_mixture() -> None:
    known, seen, z = seen_by_attacker(settings())
    u, left = known.gradients(z[None], seen.params)[0].numpy(), seen.left[0].numpy()

    def density(away: np.ndarray) -> np.ndarray:
        return np.exp(-np.square(away).sum(1) / (2 * seen.scale**2))

    expected = np.log((0.5 * density(left) + 0.5 * density(left - u)) / density(left)).sum()
    assert known.log_ratio(seen, z).item() == pytest.approx(expected, rel=1e-10)
    moved = (z + 0.3).requires_grad_()
    (slope,) = torch.autograd.grad(known.log_ratio(seen, moved).sum(), moved)
    scale = torch.full((1,), seen.scale, dtype=torch.float64)
    value, found, bend = known.likelihood(seen, moved.detach()[None], torch.eye(3, dtype=torch.float64), scale)
    assert value.item() == pytest.approx(-known.log_ratio(seen, z + 0.3).item(), rel=1e-12)
    assert torch.allclose(found[0], slope, rtol=1e-8)
    assert bool((torch.linalg.eigvalsh(bend[0]) > 0).all())


@pytest.mark.parametrize("participation", [False, True])
def test_information_matches_dense_jacobians(participation: bool) -> None:
    model, x, y = problem()
    known, seen, z = seen_by_attacker(settings(), participation)
    names, expected = [name for name, _ in model.named_parameters()], 0.0
    sizes = [p.numel() for p in model.parameters()]
    for flat in seen.params[0]:
        pieces = dict(zip(names, flat.split(sizes), strict=True))
        model.load_state_dict({name: v.reshape(model.state_dict()[name].shape) for name, v in pieces.items()})
        dense = dense_information(model, losses, x[ONE], y[ONE], max_grad_norm=0.5, noise_multiplier=0.7)
        norm = float(known.gradients(z[None], flat[None, None])[0, 0].norm())
        across, along = (1.0, 1.0) if participation else poisson_factors(norm / seen.scale, 0.5)
        rate = 1.0 if participation else 0.5
        expected += rate * (across * dense.across[0] + along * dense.along[0])
    assert float(known.information(seen, z).trace()) == pytest.approx(float(expected), rel=1e-9)


def test_information_does_not_depend_on_how_steps_are_divided(monkeypatch) -> None:
    known, seen, z = seen_by_attacker(settings())
    whole = known.information(seen, z), known.nats(seen, z), known.log_ratio(seen, z)
    monkeypatch.setattr("reconbound.attacks.knowledge.FLOATS", 60)
    assert len(list(known.steps_of(seen, 3))) == STEPS
    for a, b in zip(whole, (known.information(seen, z), known.nats(seen, z), known.log_ratio(seen, z)), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_nats_are_those_of_the_ledgers_distances() -> None:
    model, x, y = problem()
    known, seen, z = seen_by_attacker(settings())
    world = Replacement([0.5, 0.5, 0.5])
    sizes, removed, replaced = [p.numel() for p in model.parameters()], 0.0, 0.0
    for flat in seen.params[0]:
        nn.utils.vector_to_parameters(torch.cat(flat.split(sizes)), model.parameters())
        found = step_distances(copy.deepcopy(model), losses, x[ONE], y[ONE], {"grey": world}, max_grad_norm=0.5)
        a, b, apart = (v.double() / seen.scale for v in (found.clipped_norm, found.other_norm["grey"], 0 * x[ONE, 0]))
        apart = found.squared_distance["grey"].double() / seen.scale**2
        removed += float(poisson_kl(float(a), 0.5))
        inner = (a.square() + b.square() - apart) / 2
        replaced += float(poisson_pair_kl(a, b, inner, 0.5, squared_distance=apart))
    assert float(known.nats(seen, z)) == pytest.approx(removed, rel=1e-9)
    grey = torch.full((3,), 0.5, dtype=torch.float64)
    assert float(known.nats(seen, z, grey)) == pytest.approx(replaced, rel=1e-6)


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
    found = simulate_sgd(model, losses, x, y, own, RECORD, SGDTrials(10, 20))
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
    found = simulate_sgd(model, losses, x, y, settings(sample_rate=0.01, seed=1), RECORD, SGDTrials(2, 2))
    assert np.isfinite(found.answers).all()
    assert np.isfinite(found.mse)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"sampler": "fixed"}, {}, "settings.sampler must be poisson"),
        ({}, {"record": 12}, "record must be below 12"),
        ({}, {"trials": 1}, "trials"),
        ({}, {"steps": 2_000_000}, "model must be smaller"),
        ({}, {"start": torch.zeros(4)}, "start must have 3 numbers"),
    ],
)
def test_unsupported_attack_raises(changes, options, message) -> None:
    model, x, y = problem()
    given = {"record": RECORD, "steps": 2, "trials": 2} | options
    with pytest.raises(InputError, match=message):
        simulate_sgd(model, losses, x, y, settings(**changes), given.pop("record"), SGDTrials(**given))
