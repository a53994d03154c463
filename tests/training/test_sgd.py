"""The learner: Algorithm 1 step by step, any optimizer, any input, and errors that say what happened."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, SequentialLR, StepLR

from learning import CLASSES, FEATURES, RECORDS, Kept, SameNoise, data, learner, losses, network, same_state, settings
from reconbound._internal.checks import InputError
from reconbound._internal.rng import derive, seeded, torch_stream
from reconbound.accounting.accountant import Account, FisherAccountant
from reconbound.accounting.amplification import fixed_size_factor, paper_delta, paper_kappa
from reconbound.fisher import Private, ProbeOptions, StepOptions, dense_information, step_information
from reconbound.training import private_sgd as sgd_module
from reconbound.training.private_sgd import NoLedger, PrivateSGD, Settings, TrainingError
from reconbound.training.sampling import FixedSize, Poisson, ShuffledEpochs
from reconbound.training.settings import reset_parameters
from reconbound.validate import ReconboundWarning
from where import FOLDER, needs

CPU = torch.device("cpu")


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
    x, y = data()
    q, sizes = 0.02, set()
    for seed in range(25):
        model = network()
        before = flat(model)
        one = Kept(model, losses, x, y, settings(sample_rate=q, seed=seed, lr=1.0), check=False).fit(1)
        batch = Poisson(RECORDS, q).batch(one.run_seed, 0)
        sizes.add(len(batch))
        total = torch.zeros(len(before), dtype=torch.float64)
        if len(batch):
            found = dense_information(network(), losses, x[batch], y[batch], max_grad_norm=1.0, noise_multiplier=1.0)
            total = torch.cat([v.flatten() for v in found.gradient_sum.values()])
        expected = before - (total + one.drawn[0]) / (q * RECORDS)
        torch.testing.assert_close(flat(model), expected.float(), rtol=1e-4, atol=1e-5)
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


# --- optimizers and schedules ----------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Keeps numbers, words, None and lists as its state, as some optimizers do."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "pair": (1, 2)})

    def step(self, closure=None):
        for group in self.param_groups:
            assert isinstance(group["pair"], tuple)
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["past"] = [*state.get("past", [])[-2:], p.grad.clone()]
                state["note"], state["none"] = "word", None
                with torch.no_grad():
                    p -= group["lr"] / state["count"] * torch.stack(state["past"]).mean(0)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "counting": Counting,
    "groups": lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.5}, {"params": p[2:]}], lr=0.1, momentum=0.5),
}
SCHEDULES = {
    "none": None,
    "step": lambda o: StepLR(o, 3, 0.5),
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
    "milestones": lambda o: MultiStepLR(o, [2, 5], 0.1),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "sequence": lambda o: SequentialLR(o, [StepLR(o, 1, 0.9), CosineAnnealingLR(o, 6)], milestones=[4]),
}


class Stop(Exception):
    pass


def stopped(folder: Path, **options) -> PrivateSGD:
    """A learner whose run is stopped after step 5 with a checkpoint there, and gone on with by a new one."""

    def stop(model: nn.Module) -> dict[str, float]:
        if first.step == 6:
            raise Stop
        return {}

    first = learner(checkpoint=folder, every=5, evaluate=stop, evaluate_every=1, **options)
    with pytest.raises(Stop):
        first.fit(9)
    return learner(network(seed=99), checkpoint=folder, every=5, **options).fit(9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_survives_a_stop(tmp_path, name: str) -> None:
    options = {"optimizer": OPTIMIZERS[name]}
    assert same_state(stopped(tmp_path, **options), learner(**options).fit(9))


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_survives_a_stop(tmp_path, name: str) -> None:
    options = {"schedule": SCHEDULES[name], "lr": 0.5, "momentum": 0.5}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*|.*epoch parameter.*")  # SequentialLR's own
        whole, other = learner(**options).fit(9), stopped(tmp_path, **options)
    assert same_state(other, whole)
    assert other.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_weight_decay_is_outside_the_private_sum() -> None:
    """p ← p − lr (noisy mean + λ p): the mechanism is the same."""
    plain, decayed = learner(kind=SameNoise, lr=0.1), learner(kind=SameNoise, lr=0.1, weight_decay=0.5)
    start = flat(plain.model)
    plain.fit(1)
    decayed.fit(1)
    torch.testing.assert_close(flat(decayed.model), flat(plain.model) - 0.05 * start, rtol=1e-5, atol=1e-6)


def test_optimizers_that_need_a_pickle_are_refused(tmp_path) -> None:
    class Strange(Counting):
        def step(self, closure=None):
            super().step()
            self.state[self.param_groups[0]["params"][0]]["odd"] = {1, 2}

    with pytest.raises(ValueError, match="without a pickle"):
        learner(optimizer=Strange, checkpoint=tmp_path, every=1).fit(2)


# --- models and data ---------------------------------------------------------------------------


def test_micro_batches_change_memory_not_results() -> None:
    whole, parts = learner(kind=SameNoise).fit(5), learner(kind=SameNoise, micro_batch=2).fit(5)
    torch.testing.assert_close(flat(whole.model), flat(parts.model), rtol=1e-4, atol=1e-6)
    assert whole.accountant is not None
    assert parts.accountant is not None
    torch.testing.assert_close(whole.accountant.trace(), parts.accountant.trace(), rtol=1e-3, atol=1e-6)


class Two(nn.Module):
    """Two inputs, by position or by name; the first through an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(6, 3), nn.Linear(3 + FEATURES, CLASSES)

    def forward(self, token: Tensor, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.words(token), x], dim=1).tanh())


@pytest.mark.parametrize(
    "private", [None, Private("input", "x"), Private("module", "words"), Private("input", "x", torch.tensor([0, 2]))]
)
@pytest.mark.filterwarnings("ignore:floors do not cover all")
def test_named_inputs_with_private_part(private) -> None:
    x, y = data()
    tokens = torch.randint(0, 6, (RECORDS,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    one = PrivateSGD(Two(), losses, {"token": tokens, "x": x}, y, settings(), private=private, diagonal="all").fit(4)
    assert one.accountant is not None
    features = {None: FEATURES}.get(private) or (
        3 if private.part == "module" else 2 if private.features is not None else FEATURES
    )
    assert one.features == features
    assert one.accountant.feature_floors().value.shape == (RECORDS, features)
    by_feature = (1 / one.accountant.feature_floors().value).sum(1)
    np.testing.assert_allclose(by_feature, one.accountant.trace().numpy(), rtol=1e-4)
    torch.manual_seed(0)
    place = None if private is None else Private("input", 1, private.features) if private.part == "input" else private
    other = PrivateSGD(Two(), losses, (tokens, x), y, settings(), private=place, diagonal="all").fit(4)
    assert torch.equal(flat(one.model), flat(other.model))
    assert other.accountant is not None
    torch.testing.assert_close(one.accountant.trace(), other.accountant.trace())


def test_private_labels() -> None:
    x, y = data()
    soft = nn.functional.one_hot(y, CLASSES).float()
    soft_loss = lambda out, target: -(target * out.log_softmax(1)).sum(1)  # noqa: E731
    one = PrivateSGD(network(), soft_loss, x, soft, settings(), private="target").fit(4)
    assert one.features == CLASSES
    assert one.accountant is not None
    assert float(one.accountant.trace().min()) > 0


def test_frozen_parameters_do_not_change() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    learner(model, momentum=0.5, weight_decay=0.1).fit(4)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    bias = model[0].bias.clone()
    learner(model).repeat(2, steps=3)  # fresh parameters for each run, and the pretrained ones as they were
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[0].bias, bias)


def test_repeat_needs_initialise_for_custom_parameters() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(FEATURES, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    with pytest.raises(InputError, match="initialise"):
        learner(Own()).repeat(2, steps=2)
    learner(Own(), initialise=lambda m: nn.init.normal_(m.w)).repeat(2, steps=2)


def test_evaluation_does_not_change_the_model() -> None:
    seen: list[int] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(one.step)
        model.eval()
        return {"loss": torch.tensor(1.5)}  # type: ignore[dict-item]

    one = learner(evaluate=evaluate, evaluate_every=3)
    one.fit(7)
    assert seen == [3, 6, 7]
    assert one.model.training
    assert one.history[-1] == {"run": 0, "step": 7, "loss": 1.5}


def test_ledger_before_fit_raises() -> None:
    one = learner()
    with pytest.raises(NoLedger, match="has no ledger yet: call fit or repeat first"):
        one.accountant.mse_floor()
    assert isinstance(one.fit(3).accountant, FisherAccountant)
    assert learner(rules=None).accountant is None  # none is kept, as asked


def test_repr_shows_no_secrets() -> None:
    one = learner(seed=123456789)
    assert repr(one).endswith("not trained yet)")
    one.repeat(2, 3)
    assert f"{RECORDS} records of {FEATURES} features" in repr(one)
    assert repr(one).endswith("step 3 of 3 of run 2)")
    assert repr(one.accountant).endswith("3 steps, rules exact, diagonal 'none', 2 runs finished)")
    for said in (repr(one), repr(one.accountant), repr(one.settings)):
        assert "123456789" not in said
        assert len(said) < 300


def test_settings_of_another_type_are_refused() -> None:
    x, y = data()
    with pytest.raises(InputError, match=r"settings must be a Settings.*, got 'a dict'"):
        PrivateSGD(network(), losses, x, y, {"noise_multiplier": 1.0})  # type: ignore[arg-type]
    for name in ("lr", "momentum", "weight_decay"):
        with pytest.raises(InputError, match=f"{name} must be at least 0, got -1"):
            settings(**{name: -1})


def test_without_accounting() -> None:
    one = learner(rules=None).fit(3)
    assert one.accountant is None
    assert torch.equal(flat(one.model), flat(learner().fit(3).model))


def test_epochs_are_passes_through_the_data() -> None:
    assert learner(sample_rate=0.25).fit(epochs=1.5).steps == 6
    for wrong in ({}, {"steps": 2, "epochs": 1.0}, {"steps": 0}, {"steps": 2.5}):
        with pytest.raises(InputError, match="steps"):
            learner().fit(**wrong)
    done = learner().fit(3)
    with pytest.raises(InputError, match=r"steps must stay 3, as fit began with: .* make a new PrivateSGD, .*, got 4"):
        done.fit(4)
    with pytest.raises(InputError, match=r"repeat cannot follow fit .*make a new .*repeat\(3 steps\) after fit"):
        done.repeat(2, 3)
    with pytest.warns(ReconboundWarning, match="fit has done its 3 steps already and trains nothing more: to"):
        done.fit(3)
    many = learner().repeat(2, 3)
    with pytest.warns(ReconboundWarning, match="repeat has done"):
        many.repeat(2, 3)
    assert many.repeat(3, 3).accountant.runs == 3


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("budget", [100.0, "every"])
def test_infinite_loss_names_its_record(tmp_path, value: float, budget) -> None:
    x, y = data()
    good = learner(budget=budget, checkpoint=tmp_path, every=2).fit(20)
    x[17, 2] = value
    bad = learner(budget=budget, records=(x, y))
    with pytest.raises(TrainingError, match=r"run 0, step \d+: record 17 has (loss|gradient norm) (nan|inf)"):
        bad.fit(20)
    assert bool(torch.isfinite(flat(bad.model)).all())
    assert same_state(good, learner(budget=budget, checkpoint=tmp_path, every=2).fit(20))


def test_exploding_model_raises_and_keeps_the_last_good_state(tmp_path) -> None:
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1e38, momentum=0.9), "checkpoint": tmp_path, "every": 1}
    with pytest.raises(TrainingError, match=r"exploded|largest parameter .*the last good state is in"):
        learner(**options).fit(40)
    newest = learner(**options)
    with pytest.raises(TrainingError):
        newest.fit(40)
    files = list(tmp_path.glob("checkpoint-*.safetensors"))
    from reconbound._internal.files import unsealed

    for path in files:
        tensors, _ = unsealed(path)
        assert all(bool(torch.isfinite(v).all()) for name, v in tensors.items() if name.startswith("model/"))


def test_overflowing_gradient_raises() -> None:
    """‖g‖² overflows float32 at 1e19, where the clip factor would be 0 and the record's information with it. Norms are
    taken in float64; products with J, in float32, still overflow."""
    x, y = data()
    huge = lambda out, target: losses(out, target) * 1e25  # noqa: E731
    with pytest.raises(TrainingError, match="has information nan"):
        PrivateSGD(network(), huge, x, y, settings(), check=False).fit(3)
    PrivateSGD(network(), huge, x, y, replace(settings(), rules=None), check=False).fit(3)  # clipped as any other


def test_label_out_of_range_names_its_record() -> None:
    x, y = data()
    y[11] = CLASSES
    with pytest.raises(TrainingError, match="record 11 has an index that is out of range"):
        learner(records=(x, y), sample_rate=1.0).fit(3)


def test_data_that_change_size_while_training(tmp_path) -> None:
    x, y = data()
    inputs = {"input": x}
    whole = PrivateSGD(network(), losses, {"input": x}, y, settings(), check=False).fit(6)

    def shrink(model: nn.Module) -> dict[str, float]:
        if one.step == 3:
            inputs["input"] = x[:20]
        return {}

    options = {"checkpoint": tmp_path, "every": 2, "check": False}
    one = PrivateSGD(network(), losses, inputs, y, settings(), evaluate=shrink, evaluate_every=1, **options)
    with pytest.raises(TrainingError, match=r"the data had 24 records and have \[20, 24\] now"):
        one.fit(6)
    again = PrivateSGD(network(), losses, {"input": x}, y, settings(), **options).fit(6)
    assert same_state(again, whole)


def test_rows_must_match() -> None:
    x, y = data()
    for inputs, targets in ((x[:5], y), (x[:0], y[:0]), (torch.tensor(1.0), y)):
        with pytest.raises(InputError, match="one row for each record"):
            PrivateSGD(network(), losses, inputs, targets, settings())


def test_models_that_mix_records_are_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        learner(model, check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": 0.0},
        {"sample_rate": 1.5},
        {"max_grad_norm": -1},
        {"clip": "soft"},
        {"probes": 0},
        {"seed": -3},
        {"micro_batch": 0},
        {"budget": 0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        settings(**wrong)


def test_removed_checkpoint_raises(tmp_path) -> None:
    one = learner(checkpoint=tmp_path, every=1).fit(2)
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(ValueError, match="have been removed"):
        one.fit(2)


# --- progress ----------------------------------------------------------------------------------


def test_no_progress_bar_without_terminal(capfd) -> None:
    learner().fit(3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_bar_on_a_terminal_unless_switched_off(monkeypatch, wanted: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sgd_module.progress_bar.__wrapped__.__globals__["sys"], "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    learner(progress=wanted).fit(3)
    assert ("training, 1 run" in terminal.getvalue()) is wanted


# --- MNIST -------------------------------------------------------------------------------------


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


# --- caveats -----------------------------------------------------------------------------------


class FunctionalKinks(nn.Module):
    """A ReLU that no module shows: only the run of check_batch finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)), FunctionalKinks()]
)
def test_floors_of_a_model_with_kinks_have_a_caveat(model, tmp_path) -> None:
    with pytest.warns(ReconboundWarning, match="kinks"):
        one = learner(model, check=True, diagonal="all", checkpoint=tmp_path / "run").fit(steps=4)
    ledger = one.accountant
    assert len(ledger.caveats) == 1
    assert ledger.caveats[0].lower().startswith("not proved: the model has kinks (relu")
    ledger.save(tmp_path / "ledger")
    back = FisherAccountant.load(tmp_path / "ledger")
    other = FisherAccountant(ledger.account, diagonal="all")
    other.merge(back)
    resumed = learner(model, diagonal="all", checkpoint=tmp_path / "run").fit(steps=4).accountant  # check=False
    for found in (ledger, back, other, resumed):
        assert ledger.caveats[0] in found.mse_floor().assumes
        assert ledger.caveats[0] in found.feature_floors().assumes
        assert found.summary()["caveats"] == list(ledger.caveats)


def test_floors_of_a_smooth_model_have_no_caveat() -> None:
    one = learner(check=True).fit(steps=4)
    assert one.accountant.caveats == ()
    assert "not proved" not in " ".join(one.accountant.mse_floor().assumes)


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


def test_optimizer_instance_is_refused() -> None:
    model = network()
    made = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match=r"optimizer must be a function .*a new optimizer, for each run"):
        learner(model, optimizer=made)
    with pytest.raises(InputError, match="schedule must be a function"):
        learner(model, schedule=StepLR(made, 2))


def test_training_without_information_gives_a_warning() -> None:
    """Saturated outputs: gradients are exactly 0, floors the largest number, errors 0."""
    model = network()
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([1e5, 0.0, 0.0]))
    x, _ = data()
    one = learner(model, records=(x, torch.zeros(RECORDS, dtype=torch.int64)), noise_multiplier=1e-6).fit(2)
    with pytest.warns(ReconboundWarning, match="24 of 24 records had zero information at each measurement.*diverged"):
        assert "zero information" in str(one.accountant.mse_floor())


@pytest.mark.parametrize("frozen", [True, False])
def test_floors_of_an_embedding_describe_its_output(tmp_path, frozen: bool) -> None:
    x, y = data()
    model, tokens = Two(), torch.arange(RECORDS) % 6
    model.words.requires_grad_(not frozen)

    def made() -> PrivateSGD:
        return PrivateSGD(model, losses, (tokens, x), y, settings(), private=Private("module", "words"))

    if frozen:
        one = made()
    else:
        with pytest.warns(ReconboundWarning, match="do not cover all that is released.*which rows.*freeze it"):
            one = made()
    said = str(one.fit(4).accountant.mse_floor())
    assert "about the output of module 'words', not about what went into it (tokens)" in said
    assert ("not covered" in said) is not frozen
    one.accountant.save(tmp_path / "ledger")
    for ledger in (one.accountant, FisherAccountant.load(tmp_path / "ledger")):
        with pytest.raises(
            InputError, match="low and high, or radius, must be given: the private part is a module's output"
        ):
            ledger.guarantee(delta=1e-6)
        assert ledger.guarantee(low=-2.0, high=2.0).low == -2.0
        assert ledger.guarantee(radius=2.0).space.ball == 2.0
    assert learner().fit(4).accountant.guarantee().high == 1.0


def test_trained_embedding_reveals_its_rows() -> None:
    """Why it is not covered: the gradient that is released (with noise) is 0 but for the row that was used."""
    torch.manual_seed(0)
    model, x, y = Two(), *data()
    rows = []
    for token in range(6):
        problem = PrivateSGD(model, losses, (torch.full((RECORDS,), token), x), y, settings(), check=False)
        found = problem.measurer.gradient_sum(torch.tensor([0]))["words.weight"]
        rows.append(torch.nonzero(found.abs().sum(1)).flatten().tolist())
    assert rows == [[token] for token in range(6)]


# --- a loop of one's own -----------------------------------------------------------------------


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
        with seeded(derive(7, "initial", run)):
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


def test_inputs_of_wrong_width_name_module_and_shape() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=r"module '0' \(Linear\) does not take .*a record has the shape inputs \(3,\)"):
        learner(records=(x[:, :3], y), check=True)


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
