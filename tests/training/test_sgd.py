"""The learner: Algorithm 1 step by step, what repeat leaves, and a loop of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import (
    FEATURES,
    RECORDS,
    Kept,
    data,
    flat,
    learner,
    losses,
    network,
    same_state,
    settings,
)
from reconbound._internal.rng import derive, random_states_kept, torch_stream
from reconbound.accounting.accountant import Account, FisherAccountant
from reconbound.accounting.amplification import fixed_size_factor, paper_delta, paper_kappa
from reconbound.fisher import ProbeOptions, StepOptions, dense_information, step_information
from reconbound.training.private_sgd import PrivateSGD, Settings
from reconbound.training.sampling import FixedSize, Poisson, ShuffledEpochs
from reconbound.training.settings import reset_parameters
from reconbound.validate import ReconboundWarning
from where import FOLDER, needs

# --- the algorithm ---------------------------------------------------------------------------


@pytest.mark.slow
def test_paper_is_algorithm_1_step_by_step() -> None:
    """Against a plain version: dense Jacobians, κ with δ = 1/(N T), fixed-size batches, momentum by hand."""
    x, y = data(records=12)
    x, steps, size, sigma, clip, lr = x.double(), 3, 4, 0.8, 0.7, 0.3
    model = network().double()
    chosen = Settings.paper(size, 12, noise_multiplier=sigma, max_grad_norm=clip, lr=lr, seed=5, probes=2500)
    one = Kept(network().double(), losses, x, y, chosen).fit(steps)
    kappa = paper_kappa(sigma, size / 12, paper_delta(12, steps))
    seed, velocity = one.run_seed, None
    paper, fixed, noise_free = np.zeros(12), np.zeros(12), flat(model)
    for t in range(steps):
        batch = FixedSize(12, size).batch(seed, t)
        found = dense_information(model, losses, x[batch], y[batch], max_grad_norm=clip, noise_multiplier=sigma)
        assert len(batch) == size
        paper[batch.numpy()] += kappa * found.trace.numpy()
        norms = torch.stack([g.norm() for g in found.gradient])
        c = 1 / (nn.functional.gelu(norms / clip - 1) + 1)
        fixed[batch.numpy()] += (
            fixed_size_factor((c * norms).numpy() / (sigma * clip), 1.1153 / sigma, size / 12) * found.trace.numpy()
        )
        total = torch.cat([v.flatten() for v in found.gradient_sum.values()])
        released = (total + sigma * clip * one.drawn[t]) / size
        velocity = released if velocity is None else 0.5 * velocity + released
        moved = flat(model) - lr * velocity
        nn.utils.vector_to_parameters(moved, model.parameters())
    torch.testing.assert_close(flat(one.model), flat(model), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(flat(model), noise_free)
    assert one.accountant is not None
    assert one.accountant.account.rules == ("paper", "fixed")
    assert one.accountant.account.sampler == "fixed"
    np.testing.assert_allclose(one.accountant.trace("paper").numpy(), paper, rtol=0.06)  # 2,500 probes
    np.testing.assert_allclose(one.accountant.trace("fixed").numpy(), fixed, rtol=0.06)
    np.testing.assert_allclose(one.accountant.trace("paper").numpy().sum(), paper.sum(), rtol=0.02)


def test_poisson_divides_by_qn_whatever_was_drawn() -> None:
    """One SGD step at rate 1: the parameters move by (Σ c g + noise)/(qN), also for an empty batch."""
    (x, y), q, sizes = data(), 0.02, set()
    x = x.double()
    for seed in range(25):
        model = network().double()
        before = flat(model)
        one = Kept(model, losses, x, y, settings(sample_rate=q, seed=seed, lr=1.0), check=False).fit(1)
        batch = Poisson(RECORDS, q).batch(one.run_seed, 0)
        sizes.add(len(batch))
        total = torch.zeros(len(before), dtype=torch.float64)
        if len(batch):
            own, here = network().double(), (x[batch], y[batch])
            found = dense_information(own, losses, *here, max_grad_norm=1.0, noise_multiplier=1.0)
            total = torch.cat([v.flatten() for v in found.gradient_sum.values()])
        expected = before - (total + one.drawn[0]) / (q * RECORDS)
        torch.testing.assert_close(flat(model), expected, rtol=1e-9, atol=1e-11)
    assert {0, 1} <= sizes  # empty batches are among them


def test_last_batch_of_an_epoch_has_the_same_divisor() -> None:
    """Ten records in fours: the third batch has two, and moves the parameters by (Σ c g + noise)/4 all the same."""
    x, y = data(records=10)
    x, weights, model, sigma, clip = x.double(), [], network().double(), 0.5, 2.0
    chosen = settings(sampler="shuffle", sample_rate=0.4, noise_multiplier=sigma, max_grad_norm=clip, lr=1.0, seed=2)
    look = lambda m: weights.append(flat(m)) or {}  # noqa: E731
    one = Kept(model, losses, x, y, chosen, evaluate=look, evaluate_every=1, check=False).fit(3)
    batch = ShuffledEpochs(10, 4).batch(one.run_seed, 2)
    assert len(batch) == 2
    nn.utils.vector_to_parameters(weights[1], model.parameters())
    found = dense_information(model, losses, x[batch], y[batch], max_grad_norm=clip, noise_multiplier=sigma)
    total = torch.cat([v.flatten() for v in found.gradient_sum.values()])
    moved = (total + sigma * clip * one.drawn[2]) / 4
    torch.testing.assert_close(weights[2], weights[1] - moved, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.parametrize("sampler", ["poisson", "fixed", "shuffle"])
@pytest.mark.parametrize("budget", [0.5, "every", ("steps", 0.5)])
def test_every_sampler_with_every_budget(sampler: str, budget, clip: str) -> None:
    one, again = (learner(sampler=sampler, budget=budget, clip=clip).fit(12) for _ in range(2))
    assert same_state(one, again)
    assert one.accountant is not None
    if not isinstance(budget, float) and sampler == "shuffle" and budget == "every":
        assert one.accountant.measured().tolist()[0] == 3
    assert bool(torch.isfinite(one.accountant.trace()).all())
    assert float(one.accountant.trace().sum()) > 0


def test_shuffled_epochs_are_measured_in_their_batches() -> None:
    """At a step of an epoch the parameters tell whether a record was seen before: blocks would be biased."""
    assert Settings(1.0, 1.0, 0.1, sampler="shuffle").budget == ("steps", 0.15)
    assert Settings(1.0, 1.0, 0.1, sampler="shuffle", budget=2.0).budget == "every"
    one = learner(sampler="shuffle", budget="every").fit(epochs=2)
    assert one.steps == 8
    assert one.accountant is not None
    assert one.accountant.measured().tolist() == [2] * RECORDS


def test_seeds_reproduce_and_differ() -> None:
    base = learner(seed=1).fit(5)
    assert same_state(base, learner(seed=1).fit(5))
    assert not torch.equal(flat(base.model), flat(learner(seed=2).fit(5).model))
    assert not torch.equal(flat(learner(seed=None).fit(2).model), flat(learner(seed=None).fit(2).model))
    large = learner(seed=2**128 - 1).fit(2)
    assert not torch.equal(flat(large.model), flat(learner(seed=2**128 - 2).fit(2).model))


def test_runs_of_repeat_differ_and_are_averaged() -> None:
    weights: list[Tensor] = []
    one = learner(evaluate=lambda m: weights.append(flat(m)) or {}, budget="every").repeat(3, steps=4)
    assert len(weights) == 3
    assert len({tuple(w.tolist()) for w in weights}) == 3
    assert one.accountant is not None
    assert one.accountant.runs == 3
    assert bool(torch.isfinite(one.accountant.standard_error()).any())
    longer = learner(evaluate=lambda m: {}, budget="every").repeat(2, steps=4).repeat(3, steps=4)
    assert same_state(one, longer)  # more runs may be added later


def test_noise_is_as_fine_as_a_float64_sum() -> None:
    """A float32 noise would leave the last digits of a float64 sum in the open."""
    x, y = data()
    model = network().double()
    before = flat(model)
    PrivateSGD(model, losses, x.double(), y, settings(lr=1.0, seed=3), check=False).fit(1)
    moved = (before - flat(model)) * (0.25 * RECORDS)
    assert moved.dtype == torch.float64
    assert int((moved == moved.float().double()).sum()) < 3


# --- MNIST -----------------------------------------------------------------------------------


@needs("mnist")
def test_mnist_exact_floors_exceed_papers() -> None:
    from reconbound.auditing.models import mnist_cnn
    from reconbound.data import mnist

    images, labels = mnist(FOLDER)
    x, y = torch.from_numpy(images[:600].copy()).float().unsqueeze(1) / 255, torch.from_numpy(labels[:600].copy())
    torch.manual_seed(0)
    chosen = Settings(0.5, 8.0, 0.05, lr=0.03, momentum=0.5, rules=("exact", "paper"), budget=1.0, seed=0)
    one = PrivateSGD(mnist_cnn(), losses, x, y, chosen, check=False).fit(40)
    assert one.accountant is not None
    exact, paper = one.accountant.mse_floor("exact").value, one.accountant.mse_floor("paper").value
    assert bool((exact > paper).all())


# --- which parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [True, False])
def test_repeat_leaves_the_first_runs_model(tmp_path, folder: bool) -> None:
    """It is the one that may be released; also after more runs, and for who comes back to the folder."""
    options = {"checkpoint": tmp_path / "run"} if folder else {}
    first = learner().repeat(1, 4)
    many = learner(**options).repeat(3, 4)
    assert torch.equal(flat(many.model), flat(first.model))
    assert torch.equal(flat(many.repeat(4, 4).model), flat(first.model))
    assert many.accountant.runs == 4
    if folder:
        again = learner(network(5), **options).repeat(4, 4)
        assert torch.equal(flat(again.model), flat(first.model))
        torch.testing.assert_close(again.accountant.trace(), many.accountant.trace(), rtol=0, atol=0)
    one_by_one = learner().repeat(4, 4)
    torch.testing.assert_close(one_by_one.accountant.trace(), many.accountant.trace(), rtol=0, atol=0)


def test_repeat_warns_about_lost_pretrained_parameters() -> None:
    pretrained = network(9).state_dict()
    lost = learner()
    lost.model.load_state_dict(pretrained)
    with pytest.warns(ReconboundWarning, match="fresh parameters.*initialise"):
        lost.repeat(2, 2)
    starts = []

    def initialise(model: nn.Module) -> None:
        model.load_state_dict(pretrained)
        starts.append(flat(model))

    kept = learner(initialise=initialise)
    kept.model.load_state_dict(pretrained)
    kept.repeat(2, 2)  # no warning
    assert len(starts) == 2
    assert all(torch.equal(start, flat(network(9))) for start in starts)


def test_training_without_information_gives_a_warning() -> None:
    """Saturated outputs: gradients are exactly 0, floors the largest number, errors 0."""
    model = network()
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([1e5, 0.0, 0.0]))
    x, _ = data()
    one = learner(model, records=(x, torch.zeros(RECORDS, dtype=torch.int64)), noise_multiplier=1e-6).fit(2)
    with pytest.warns(ReconboundWarning, match="24 of 24 records had zero information at each measurement.*diverged"):
        assert "zero information" in str(one.accountant.mse_floor())


# --- a loop of one's own ---------------------------------------------------------------------


def test_own_loop_gives_the_learners_ledger() -> None:
    """add, finish_run and the divisor qN as the guide has them, on the batches, noise and probes of a learner."""
    x, y = data()
    chosen = settings(budget="every", clip="hard", lr=0.5)
    one = Kept(network(), losses, x, y, chosen, check=False).repeat(2, 6)
    account = Account(
        records=RECORDS,
        features=FEATURES,
        steps=6,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.25,
        clip="hard",
    )
    beside, ends = FisherAccountant(account), []
    for run in range(2):
        model, seed = network(), one.run_seeds[run]
        with random_states_kept(derive(7, "initial", run)):
            reset_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(6):
            batch = Poisson(RECORDS, 0.25).batch(seed, step)
            sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            if len(batch):
                generator = torch_stream(seed, "probe 0", step)
                found = step_information(
                    model,
                    losses,
                    x[batch],
                    y[batch],
                    max_grad_norm=1.0,
                    noise_multiplier=1.0,
                    clip="hard",
                    options=StepOptions(probes=ProbeOptions(generator=generator, error="bound")),
                )
                beside.add(batch, found, weight=1.0)
                sums = found.gradient_sum
            noise = one.drawn[6 * run + step]
            for (name, p), z in zip(
                model.named_parameters(), noise.split([p.numel() for p in model.parameters()]), strict=True
            ):
                p.grad = ((sums[name].double() + z.reshape(p.shape)) / (0.25 * RECORDS)).to(p.dtype)
            optimizer.step()
        beside.finish_run()
        ends.append(flat(model))
    torch.testing.assert_close(ends[0], flat(one.model))
    torch.testing.assert_close(beside.trace(), one.accountant.trace(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(beside.standard_error(), one.accountant.standard_error(), rtol=1e-4, atol=1e-9)
    assert beside.account == one.accountant.account


def test_changes_between_calls_do_not_enter_the_first_run() -> None:
    whole = learner().repeat(2, steps=3)
    one = learner().repeat(1, steps=3)
    with torch.no_grad():
        for p in one.model.parameters():
            p.zero_()
    one.repeat(2, steps=3)
    assert same_state(one, whole)


def test_groups_of_a_step_have_separate_probes(monkeypatch) -> None:
    """Records that shared them would err together, and the average over records would be known less well than said."""
    one, used = learner(budget=4.0, sample_rate=0.25), []
    plain = one.measurer.information

    def seen(rows, probes):
        used.append(probes.initial_seed())
        return plain(rows, probes)

    monkeypatch.setattr(one.measurer, "information", seen)
    one.fit(steps=3)
    assert len(used) == 12  # all records at each step, in groups of six
    assert len(set(used)) == 12
