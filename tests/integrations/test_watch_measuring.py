"""Worlds and Fisher information beside Opacus: the ledger of PrivateSGD on the same batches, parameters and plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from opacus.schedulers import LambdaGradClip
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from beside_opacus import RECORDS, Training, data, gradients, private
from reconbound import FisherAccountant, PrivateSGD, Replacement, Settings
from reconbound._internal.checks import InputError
from reconbound.accounting.measurement_plan import Plans
from reconbound.divergences import poisson_pair_kl
from reconbound.integrations import measuring
from reconbound.integrations.measuring import losses_of
from reconbound.integrations.opacus import Measuring, OpacusLedger
from reconbound.report.folder import read_audit
from reconbound.training.settings import Callback
from reconbound.training.step import Measurer

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")
MODES = ("hooks", "functorch", "ew", "ghost")
WORLDS: dict[str, Any] = {"first": Replacement([0.5], [0]), "all": lambda x, y: (torch.zeros_like(x), y)}


def smooth() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class SameSteps(Callback):
    """Gives PrivateSGD the parameters, the batches and the seed of another training."""

    name, divisor, steps_per_epoch = "poisson", 12.0, 5.0

    def __init__(self, other: Training, ledger: OpacusLedger) -> None:
        self.other, self.sample_rate, self.records = other, ledger.accountant.account.sample_rate, RECORDS
        assert ledger._blocks is not None
        self.seed, self.plans = ledger._blocks.seed, None
        if ledger._blocks.group != 12:  # not that of PrivateSGD
            self.plans = Plans(ledger._blocks._information, ledger._blocks._distances)

    def batch(self, seed: int, step: int) -> Tensor:
        return self.other.batches[step]

    def on_step(self, learner: PrivateSGD) -> None:
        learner.run_seed, learner.plans = self.seed, self.plans or learner.plans
        if learner.step < learner.steps:
            learner.model.load_state_dict(self.other.parameters[learner.step])


def ledger_of_private_sgd(made: Training, ledger: OpacusLedger, rules: Any, budget: float) -> FisherAccountant:
    x, y = data()
    same = SameSteps(made, ledger)
    settings = Settings(0.8, 1.0, same.sample_rate, clip="hard", rules=rules, seed=1, budget=budget)
    loss, more = nn.CrossEntropyLoss(reduction="none"), {"check": False, "progress": False}
    learner = PrivateSGD(smooth(), loss, x, y, settings, callbacks=[same], worlds=WORLDS, **more)  # type: ignore[arg-type]
    learner.sampler = same  # type: ignore[assignment]
    learner.fit(len(made.batches))
    assert learner.accountant is not None
    return learner.accountant


def watched(mode: str = "hooks", batch_size: int = 12, **options: Any) -> tuple[Training, OpacusLedger]:
    made = private(mode, network=smooth(), batch_size=batch_size)
    chosen: dict[str, Any] = {"epochs": 3, "worlds": WORLDS, "budget": 2.0, **options}
    return made, made.watch(measure=Measuring(made.model, **chosen))


@pytest.mark.parametrize(("mode", "batch_size", "group"), [*((mode, 12, 12) for mode in MODES), ("hooks", 1, 3)])
def test_both_ledgers_are_those_of_private_sgd(mode: str, batch_size: int, group: int) -> None:
    made, ledger = watched(mode, batch_size, information=True)
    assert ledger._blocks is not None
    assert ledger._blocks.group == group
    made.train(3, virtual=5)
    found, other = ledger.finish(), ledger_of_private_sgd(made, ledger, (), 2.0)
    for world in ("removed", "first", "all"):
        ours, theirs = (one.divergences.estimates(world) for one in (found, other))
        assert torch.equal(ours.measured, theirs.measured)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.error, theirs.error, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found.dfil(), other.dfil(), rtol=1e-6, atol=0)
    assert float(found.dfil().min()) > 0
    assert torch.equal(found.measured(), other.measured())
    assert found.caveats[-1] == "loss and model treat each record separately"


def test_worlds_need_no_derivative_and_measure_each_record(tmp_path: Any) -> None:
    made = private()  # with a ReLU
    ledger = made.watch(measure=Measuring(made.network, epochs=3, worlds=WORLDS))
    made.train(3)
    assert int(ledger.finish().divergences.times("first").min()) == 1
    assert bool((ledger.divergence("all") > 0).all())
    assert "σC" in " ".join(ledger.max_success(0.1, "first").assumes)
    ledger.report(tmp_path / "out")
    _, leakage = read_audit(tmp_path / "out")
    assert [row["name"] for row in leakage.facts["worlds"]] == ["removed", "first", "all"]
    assert [row["kind"] for row in leakage.facts["worlds"]] == ["removed", "column", "column"]


def test_a_training_that_stops_early_counts_the_steps_it_took(monkeypatch: Any) -> None:
    """Weights stay those of the plan: over many plans the mean is that of the steps that were taken."""
    found = []
    for seed in range(40):
        monkeypatch.setattr(measuring, "new_seed", lambda seed=seed: seed)
        made, ledger = watched(epochs=6, worlds={"all": WORLDS["all"]}, budget=1.0)
        made.train(2)
        kept = ledger.finish()
        assert kept.account.steps == 10
        found.append(kept.divergences.estimates("all").mean)
    made, ledger = watched(epochs=2, worlds={"all": WORLDS["all"]}, budget=100.0)  # each record at each step
    made.train(2)
    exact = ledger.finish().divergences.estimates("all").mean.mean()
    means = torch.stack(found).mean(1)  # over the records
    assert abs(float(means.mean() - exact)) < 4 * float(means.std()) / 40**0.5


def exact_distances(made: Training, rate: float) -> Tensor:
    """Returns Σ_t k_q(a_t, b_t) of each record to the world of zeros, from gradients formed by torch.func."""
    (x, y), total = data(), torch.zeros(RECORDS, dtype=torch.float64)
    for parameters in made.parameters:
        each = (gradients(made.plain, parameters, inputs, y) for inputs in (x, torch.zeros_like(x)))
        real, other = (torch.cat(list(found.values()), 1) for found in each)
        a, b = ((g * (1 / g.norm(dim=1, keepdim=True)).clamp(max=1)) / 0.8 for g in (real, other))
        total += poisson_pair_kl(a.norm(dim=1), b.norm(dim=1), (a * b).sum(1), rate)
    return total


@pytest.mark.slow
def test_groups_of_several_batches_are_unbiased_and_their_standard_errors_cover(monkeypatch: Any) -> None:
    """Many plans on one training: 20 groups of 3 records, each measured at one of 30 steps in each of two blocks."""
    found, seeds = [], 40
    for seed in range(seeds):
        monkeypatch.setattr(measuring, "new_seed", lambda seed=seed: seed)
        made, ledger = watched(batch_size=1, epochs=1, worlds={"all": WORLDS["all"]}, budget=4.0)
        made.train(1)
        assert ledger._blocks is not None
        assert ledger._blocks.group == 3
        found.append(ledger.finish().divergences.estimates("all"))
    assert {int(times) for one in found for times in one.measured} == {2}
    rate = ledger.accountant.account.sample_rate
    off = torch.stack([one.mean for one in found]) - exact_distances(made, rate)
    errors = torch.stack([one.error for one in found])
    assert float((off.mean(0) / off.std(0)).abs().max()) < 4.5 / seeds**0.5  # of each record
    over_records = off.mean(1)
    assert abs(float(over_records.mean())) < 4 * float(over_records.std()) / seeds**0.5
    assert 0.8 < float(errors.square().mean() / off.square().mean()) < 4.0
    each = errors.square().mean(0) / off.square().mean(0)  # estimated from 40 plans: to a quarter or so
    assert float(each.min()) > 0.5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(5, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


@pytest.mark.parametrize(
    ("network", "batches"),
    [
        (nn.Linear(5, 3), 4),  # as many as leave 16 groups
        (nn.Sequential(nn.Linear(5, 6000), nn.Linear(6000, 3)), 2),  # 66,011 numbers a record, 2 · 30 of them
        (nn.Sequential(nn.Linear(5, 30_000), nn.Linear(30_000, 3)), 1),
        (Scaled(), 1),  # with copies of a parameter for each record
    ],
)
def test_as_many_batches_are_measured_together_as_take_little(network: nn.Module, batches: int) -> None:
    settings = Settings(1.0, 1.0, 0.015, clip="hard", rules=None)
    measurer = Measurer(network.double(), nn.CrossEntropyLoss(reduction="none"), data(2000), settings, None)
    assert measuring.batches_together(measurer, 30) == batches


@pytest.mark.parametrize("mode", MODES)
def test_measuring_changes_nothing_that_is_trained(mode: str) -> None:
    made, _ = watched(mode, information=True)
    drawn = [made.train(2, virtual=5), torch.get_rng_state()][1]
    plain = private(mode, network=smooth())
    plain.train(2, virtual=5)
    assert all(torch.equal(a, b) for a, b in zip(made.network.parameters(), plain.network.parameters(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())  # type: ignore[arg-type]


def test_state_continues_the_plan() -> None:
    made, ledger = watched(information=True)
    made.train(1)
    state = copy.deepcopy(ledger.state_dict())
    again, other = watched(information=True)
    again.network.load_state_dict(made.network.state_dict())
    other.load_state_dict(state)
    for one in (made, again):
        torch.manual_seed(4)
        one.train(2)
    a, b = ledger.finish(), other.finish()
    assert torch.equal(a.dfil(), b.dfil())
    assert torch.equal(a.divergence("all"), b.divergence("all"))
    _, third = watched(information=True, epochs=4)
    with pytest.raises(InputError, match="state must be of the same training"):
        third.load_state_dict(state)
    state["mark"]["group"] = 24  # other records would then be measured at each step
    with pytest.raises(InputError, match="state must be of the same training"):
        watched(information=True)[1].load_state_dict(state)


def test_a_longer_training_and_another_clip_norm_are_refused() -> None:
    made, ledger = watched(epochs=1)
    made.train(1)
    with pytest.raises(InputError, match="measurements were planned over 5 steps"):
        made.train(1)
    assert ledger.steps == 5
    made, ledger = watched()
    made.train(1)
    LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 0.5)
    with pytest.raises(InputError, match="max_grad_norm must stay 1"):
        made.train(1)


class Noisy(Dataset[Any]):
    """Adds noise to each record when it is read."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Any:
        x, y = data()
        return x[i] + torch.randn(5), y[i], i


def mixing(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Scales each loss by the batch when it is reduced."""
    found = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return found if reduction == "none" else (found * found.detach() / found.detach().max()).mean()


def test_what_is_not_the_training_is_refused() -> None:
    made = private(dataset=Noisy())
    with pytest.raises(InputError, match="data_loader must give the same record each time"):
        made.watch(measure=Measuring(made.model, epochs=1, worlds=WORLDS))
    made = private(max_grad_norm=100.0)
    made.criterion = mixing
    made.watch(measure=Measuring(made.model, epochs=1, worlds=WORLDS))
    with pytest.raises(InputError, match="loss_fn must be the loss of the training"):
        made.train(1)
    made = private()
    with pytest.raises(InputError, match="model must be the network whose trainable parameters"):
        made.watch(measure=Measuring(smooth(), epochs=1, worlds=WORLDS))
    made = private(clipping="per_layer", max_grad_norm=[0.5] * 4)
    with pytest.raises(InputError, match="measure must be None with per-layer clipping"):
        made.watch(measure=Measuring(made.model, epochs=1, worlds=WORLDS))
    with pytest.raises(InputError, match="measure must be a Measuring"):
        made.watch(measure=WORLDS)
    with pytest.raises(InputError, match="worlds or information must be given"):
        Measuring(made.model, epochs=1)
    with pytest.raises(InputError, match="model must be the network"):
        Measuring(made.optimizer, epochs=1, information=True)


def test_batches_are_split_as_asked() -> None:
    x, y = data()
    made = private(dataset=TensorDataset(y, x, torch.arange(60)), network=smooth())
    chosen = Measuring(made.model, epochs=1, worlds=WORLDS, split=lambda batch: (batch[1], batch[0]))
    ledger = made.watch(measure=chosen)
    for y_, x_, numbers in made.loader:
        made.epoch([(x_, y_, numbers)])
    assert ledger.steps == 5
    made = private()
    with pytest.raises(InputError, match="split must return inputs and targets"):
        made.watch(measure=Measuring(made.model, epochs=1, worlds=WORLDS, split=lambda batch: batch))


def test_losses_of_each_record() -> None:
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    expected = nn.functional.cross_entropy(outputs, targets, reduction="none")
    own = nn.CrossEntropyLoss()
    for loss in (own, nn.functional.cross_entropy, nn.CrossEntropyLoss(reduction="none"), lambda o, t: expected):
        assert torch.equal(losses_of(loss)(outputs, targets), expected)
    assert own.reduction == "mean"
