"""Many trainings at once: each is PrivateSGD's, step by step, and its ledger the accountant's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import losses
from reconbound._internal.checks import InputError
from reconbound._internal.rng import derive
from reconbound.accounting.amplification import paper_delta, paper_kappa, poisson_factors
from reconbound.auditing.models import lecun_normal
from reconbound.fisher import dense_information
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training.noise import draw
from reconbound.training.private_sgd import PrivateSGD, Settings
from reconbound.training.sampling import FixedSize, Poisson

CPU = torch.device("cpu")
RECORDS, STEPS, SEED = 40, 8, 3
CHOICES = ((0.7, 0.5, 0.3, 0.5), (2.0, 0.1, 0.1, 0.0), (0.3, 3.0, 0.2, 0.9))  # σ, C, lr, momentum


def conv() -> nn.Sequential:
    """Convolution, pooling and a hidden layer, as the paper's networks have them."""
    layers = [nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Tanh(), nn.AvgPool2d(2, stride=1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def images(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(RECORDS, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (RECORDS,), generator=generator)


def chosen(**changes: Any) -> list[Settings]:
    fields = {"sample_rate": 0.2, "sampler": "poisson", "budget": 0.9, "seed": SEED, "rules": ("exact", "paper")}
    fields |= changes
    return [Settings(s, c, lr=lr, momentum=m, **fields) for s, c, lr, m in CHOICES]


def noise_at(run: int, step: int, size: int) -> Tensor:
    return draw(derive(SEED, "test", 1000 * run + step), size, CPU)


def noise_of(run: int, size: int) -> Any:
    """The same noise for every training of the fleet, and for `Beside`."""
    return lambda step: noise_at(run, step, size).expand(len(CHOICES), -1)


class Beside(PrivateSGD):
    """PrivateSGD with a fleet's batches and probes and the noise above."""

    fleet: Fleet

    def _begin_run(self) -> None:
        self.run_seed = self.fleet.run_seeds[self.run]

    def _noise(self, total: Tensor) -> Tensor:
        return noise_at(self.run, self.step, len(total))


def beside(fleet: Fleet, chosen: Settings, model: nn.Module | None = None, **options: Any) -> PrivateSGD:
    options = {"whole_at": fleet.at, **options}
    one = Beside(model or conv(), losses, *images(), chosen, progress=False, check=False, **options)
    one.fleet = fleet
    return one


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("method", ["stacked", "branches"])
@pytest.mark.parametrize(("sampler", "clip"), [("poisson", "smooth"), ("poisson", "hard"), ("fixed", "smooth")])
@pytest.mark.slow
def test_equals_private_sgd_in_parameters_and_ledger(sampler: str, clip: str, method: str) -> None:
    """Same batches, noise and probes: parameters and every rule's ledger agree to rounding, for all trainings."""
    rules = ("exact" if sampler == "poisson" else "fixed", "paper", "none")
    settings = chosen(sampler=sampler, clip=clip, rules=rules, probes=2)
    fleet = Fleet(conv, losses, *images(), settings, at=[STEPS], method=method)
    ends = []
    for run in (0, 1):
        (found,) = fleet.run(run, noise=noise_of(run, size_of(conv())))
        ends.append(fleet.params.clone())
    for k, s in enumerate(settings):
        one = beside(fleet, s)
        one.repeat(2, STEPS)
        single = torch.cat([p.detach().flatten() for p in one.model.parameters()])
        assert torch.allclose(ends[0][k], single, rtol=1e-9, atol=1e-12)  # the first run's is the one that is kept
        assert not torch.allclose(ends[1][k], single, rtol=1e-3, atol=1e-3)
        assert one.accountant is not None
        for rule in rules:
            second = one.accountant.traces.dfil_of_runs(STEPS, rule)[1]
            assert torch.allclose(found.dfil(rule)[k], second, rtol=1e-7, atol=1e-12), (rule, k)
        assert torch.equal(fleet.ledger.measured_in_runs(STEPS), one.accountant.measured())
        if sampler == "poisson":
            removed, drawn = (one.accountant.divergences.kept_at(n, STEPS)[1, 0] for n in ("nats", "nats_times"))
            assert found.nats is not None
            assert float(removed.max()) > 0
            assert torch.allclose(found.nats[k], removed, rtol=1e-7, atol=1e-12)
            assert torch.equal(found.drawn, drawn)
        else:
            assert found.nats is found.drawn is None
    assert found.step == STEPS
    assert bool(found.finite.all())


@pytest.mark.parametrize(
    ("rate", "steps", "budget"), [(1e-5, 8, 0.9), (1e-5, 16, 0.25), (1e-5, 3, 1e5), (1e-3, 12, 0.15), (1e-9, 8, 0.15)]
)
@pytest.mark.slow
def test_equals_private_sgd_with_empty_batches(rate: float, steps: int, budget: float) -> None:
    """Steps fewer than 1/q, one block or a block a step, noise over qN ≪ 1 that drives parameters to 10⁸: the ledgers'
    entries are the same, though they lie tens of orders of magnitude apart."""
    settings = chosen(sample_rate=rate, budget=budget, rules=("exact", "none"))
    fleets = [Fleet(conv, losses, *images(), settings, at=[steps], method=method) for method in ("stacked", "branches")]
    found = [next(fleet.run(0, noise=noise_of(0, size_of(conv())))) for fleet in fleets]
    first = fleets[0]
    assert sum(len(first.sampler.batch(first.run_seeds[0], t)) for t in range(steps)) <= 4
    for k, s in enumerate(settings):
        one = beside(first, s).repeat(1, steps)
        single = torch.cat([p.detach().flatten() for p in one.model.parameters()])
        assert one.accountant is not None
        for fleet, ledger in zip(fleets, found, strict=True):
            assert torch.allclose(fleet.params[k], single, rtol=1e-9)
            for rule in ("exact", "none"):
                assert torch.allclose(ledger.dfil(rule)[k], one.accountant.dfil(rule), rtol=1e-6, atol=1e-30), (rule, k)
        assert bool((one.accountant.measured() == (steps if budget > 1e3 else 1)).all())


@pytest.mark.parametrize("method", ["stacked", "branches"])
def test_padding_adds_nothing_and_large_batches_fit(method: str) -> None:
    """Batches of every size, from none to all records, pass through padded buffers; sums are the plain ones."""
    settings = chosen()
    fleet = Fleet(conv, losses, *images(), settings, at=[1], method=method)
    x, y = images()
    assert fleet._levels[0] < RECORDS
    for size in (0, 1, fleet._levels[0], fleet._levels[0] + 1, RECORDS):
        batch = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(size))[:size]
        before = fleet.params.clone()
        fleet.velocity.zero_()
        fleet.noise.zero_()
        fleet._train(batch)
        for k, s in enumerate(settings):
            model = conv()
            nn.utils.vector_to_parameters(before[k], model.parameters())
            total = torch.zeros_like(before[k])
            if size:
                dense = dense_information(
                    model, losses, x[batch], y[batch], max_grad_norm=s.max_grad_norm, noise_multiplier=1
                )
                total = torch.cat([v.flatten() for v in dense.gradient_sum.values()])
            want = before[k] - s.lr * total / fleet.sampler.divisor
            assert torch.allclose(fleet.params[k], want, rtol=1e-9, atol=1e-12), (size, k)


@pytest.mark.slow
def test_ledger_is_unbiased_against_dense_jacobians() -> None:
    """Over many plans at fixed parameters: mean of the ledger = T q f, f from dense Jacobians and factors."""
    rate, steps, plans = 0.2, 6, 100
    settings = [Settings(s, c, rate, budget=0.7, seed=SEED) for s, c, _, _ in CHOICES]
    x, y = images()
    fleet = Fleet(conv, losses, x, y, settings, at=[2, steps], budgets=[2.0, 0.5])
    fleet._start = lambda seed: _same_start(fleet)  # type: ignore[method-assign]
    fleet._train = lambda batch: None  # type: ignore[method-assign]
    totals = [torch.stack([shot.dfil("exact") for shot in fleet.run(run)]) for run in range(plans)]
    values = torch.stack(totals)  # plans, snapshots, K, N
    mean, error = values.mean(0), values.std(0) / plans**0.5
    for k, s in enumerate(settings):
        model = conv()
        nn.utils.vector_to_parameters(fleet.params[k], model.parameters())
        dense = dense_information(
            model, losses, x, y, max_grad_norm=s.max_grad_norm, noise_multiplier=s.noise_multiplier
        )
        clipped = torch.stack([_clipped_norm(n, s) for n in dense.norm])
        across, along = poisson_factors((clipped / (s.noise_multiplier * s.max_grad_norm)).numpy(), rate)
        per_step = rate * (torch.from_numpy(across) * dense.across + torch.from_numpy(along) * dense.along) / 25
        for i, t in enumerate((2, steps)):
            gap = (mean[i, k] - t * per_step).abs()
            assert bool((gap <= 5 * error[i, k] + 1e-9 * per_step).all()), (k, t)
            assert float((mean[i, k].sum() / (t * per_step.sum())).log().abs()) < 0.03


def _same_start(fleet: Fleet) -> None:
    generator = torch.Generator().manual_seed(1)
    fleet.params.copy_(torch.randn(1, fleet.params.shape[1], generator=generator, dtype=torch.float64) * 0.5)
    fleet.velocity.zero_()
    fleet.ledger.clear_run()


def _clipped_norm(n: Tensor, s: Settings) -> Tensor:
    x = n / s.max_grad_norm - 1
    return n / (x * (1 + torch.erf(x / 2**0.5)) / 2 + 1)


def test_snapshots_are_prefixes_and_kappa_follows_their_length() -> None:
    """Looking at a run halfway does not change where it ends; the paper's κ takes δ = 1/(N T) of each snapshot."""
    settings = chosen(rules=("exact", "paper", "none"))
    noise = noise_of(0, size_of(conv()))
    both = list(Fleet(conv, losses, *images(), settings, at=[5, STEPS]).run(0, noise=noise))
    whole = Fleet(conv, losses, *images(), settings, at=[STEPS])
    half = Fleet(conv, losses, *images(), settings, at=[5])
    (_,), (early,) = whole.run(0, noise=noise), half.run(0, noise=noise)
    assert torch.allclose(both[0].dfil(), early.dfil(), rtol=1e-10)
    again = Fleet(conv, losses, *images(), settings, at=[5, STEPS])
    last = list(again.run(0, noise=noise))[-1]
    assert torch.equal(again.params, whole.params) or torch.allclose(again.params, whole.params, rtol=1e-12)
    assert bool((last.dfil() >= both[0].dfil()).all())
    assert torch.allclose(both[0].nats, early.nats, rtol=1e-10)
    assert torch.allclose(both[1].nats, last.nats, rtol=1e-10)
    assert torch.equal(both[0].drawn, early.drawn)
    for shot in both:
        for k, s in enumerate(settings):
            kappa = paper_kappa(s.noise_multiplier, 0.2, paper_delta(RECORDS, shot.step))
            assert torch.allclose(shot.dfil("paper")[k], kappa * shot.dfil("none")[k], rtol=1e-12)


def test_runs_repeat_themselves_and_differ_from_each_other() -> None:
    """Without injected noise a run repeats itself, another run does not; evaluate is asked of every training."""
    for sampler in (Poisson(RECORDS, 0.2), FixedSize(RECORDS, 8)):
        settings = chosen(sampler=sampler.name, rules=())
        fleet = Fleet(conv, losses, *images(), settings, at=[3])
        asked = lambda model: float(next(model.parameters()).detach().sum())  # noqa: E731
        (a,), (b,), (c,) = (fleet.run(r, evaluate=asked) for r in (0, 0, 1))
        assert a.found == b.found != c.found
        assert len(a.found) == len(CHOICES)
        assert torch.equal(a.dfil(), b.dfil())
        assert not torch.equal(a.dfil(), c.dfil())


def test_weight_decay_is_that_of_private_sgd() -> None:
    settings = chosen(weight_decay=0.3)
    fleet = Fleet(conv, losses, *images(), settings, at=[3])
    list(fleet.run(0, noise=noise_of(0, size_of(conv()))))
    for k, s in enumerate(settings):
        one = beside(fleet, s).repeat(1, 3)
        single = torch.cat([p.detach().flatten() for p in one.model.parameters()])
        assert torch.allclose(fleet.params[k], single, rtol=1e-9, atol=1e-12)


def test_each_segment_has_its_own_plan() -> None:
    """Every record once in each segment of ten steps; not in the same order, which would measure it at like places."""
    fleet = Fleet(conv, losses, *images(), chosen(budget=0.5), at=[10, 20])
    seen: list[list[int]] = [[], []]
    fleet._measure = lambda group, weight, seed, step, part: seen[step // 10].extend(group.tolist())  # type: ignore
    list(fleet.run(0))
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(RECORDS))
    assert seen[0] != seen[1]


def test_initialise_is_that_of_private_sgd() -> None:
    """Given initial parameters lead to PrivateSGD's end with the same; without them the end is another."""
    ends = []
    for start in (None, lecun_normal):
        fleet = Fleet(conv, losses, *images(), chosen(rules=()), at=[3], initialise=start)
        list(fleet.run(0, noise=noise_of(0, size_of(conv()))))
        ends.insert(0, fleet.params.clone())
    one = beside(fleet, chosen()[0], initialise=lecun_normal)
    one.repeat(1, 3)
    single = torch.cat([p.detach().flatten() for p in one.model.parameters()])
    assert torch.allclose(ends[0][0], single, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(ends[1][0], single, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["stacked", "branches"])
def test_seeded_training_is_independent_of_others(method: str) -> None:
    def found(of: list[int], number: int = 0) -> dict[int, tuple[Any, Any]]:
        settings = [Settings(0.5 + k, 1.0, 0.2, lr=0.1 * (k + 1), budget=1.0, seed=1) for k in of]
        fleet = Fleet(conv, losses, *images(), settings, at=[3], method=method)
        steps: list[int] = []
        (shot,) = fleet.run(number, seeds=[100 + k for k in of], report=steps.append)
        assert steps == [0, 1, 2]
        return {k: (fleet.params[i].clone(), shot.dfil()[i]) for i, k in enumerate(of)}

    three, one, again, other = found([0, 1, 2]), found([1]), found([2, 1]), found([1], number=1)
    for k, few in ((1, one), (1, again), (2, again)):
        for a, b in zip(three[k], few[k], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(one[1][0], other[1][0])
    noise = [100.0] * 2  # all of it: the same seed for two trainings gives the same noise, another seed another
    settings = [Settings(s, 1.0, 0.2, lr=0.1, budget=1.0, seed=1) for s in noise]
    fleet = Fleet(conv, losses, *images(), settings, at=[1], method=method)
    list(fleet.run(0, seeds=[5, 5]))
    assert torch.equal(fleet.noise[0], fleet.noise[1])
    list(fleet.run(0, seeds=[5, 6]))
    assert not torch.allclose(fleet.noise[0], fleet.noise[1])
    with pytest.raises(InputError, match="seeds"):
        list(fleet.run(0, seeds=[5]))


def test_noise_differs_between_runs_and_steps() -> None:
    fleet = Fleet(conv, losses, *images(), chosen(), at=[1, 2])
    seen = [fleet.noise.clone() for run in (0, 1, 0) for _ in fleet.run(run, seeds=[5, 6, 7])]
    assert torch.equal(seen[1], seen[5])
    rows = torch.cat(seen[:4])
    assert len(rows.unique(dim=0)) == len(rows)
    assert rows.std().item() == pytest.approx(1, abs=0.1)


def test_diverged_trainings_are_reported() -> None:
    settings = [Settings(99.0, 1.0, 0.2, lr=lr, budget=1.0, seed=1) for lr in (0.1, 1e308)]
    (found,) = Fleet(conv, losses, *images(), settings, at=[3]).run(0)
    assert found.finite.tolist() == [True, False]
    assert np.isfinite(found.dfil()[0].numpy()).all()


@pytest.mark.parametrize(
    ("changes", "options", "name"),
    [
        ({"seed": None}, {}, "settings.seed"),
        ({"rules": None}, {}, "settings.rules"),
        ({"sampler": "shuffle", "budget": "every"}, {}, "settings.sampler"),
        ({}, {"at": [3, 3]}, "at"),
        ({}, {"at": []}, "at"),
        ({}, {"budgets": [1.0, 2.0]}, "budgets"),
        ({"budget": "every"}, {}, "budgets"),
    ],
)
def test_bad_input_raises(changes: dict[str, Any], options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=name):
        Fleet(conv, losses, *images(), chosen(**{"rules": (), **changes}), **{"at": [3], **options})


def test_mixed_settings_raise() -> None:
    mixed = [Settings(1.0, 1.0, rate, budget=1.0, seed=1) for rate in (0.1, 0.2)]
    with pytest.raises(InputError, match="sample_rate"):
        Fleet(conv, losses, *images(), mixed, at=[3])
