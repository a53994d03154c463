"""What the ledger beside Opacus refuses, and what it accounts for as what it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from opacus.schedulers import LambdaGradClip, LambdaNoise
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from beside_opacus import RECORDS, Training, data, frozen_network, loader_of, private
from reconbound._internal.checks import InputError

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")
MODES = ("hooks", "functorch", "ew", "ghost")


class Numbers(Dataset[Any]):
    """Records of two numbers, as lists of random length."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Any:
        return torch.arange(1 + i % 4, dtype=torch.float64), i % 3, i


def by_length(records: list[Any]) -> Any:
    """Pads and sorts by length, as for packed sequences: the rows are not those of the records any more."""
    ordered = sorted(records, key=lambda record: -len(record[0]))
    x = nn.utils.rnn.pad_sequence([record[0] for record in ordered], batch_first=True)
    return x, torch.tensor([record[1] for record in ordered]), torch.tensor([record[2] for record in ordered])


def in_order(records: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([record[0] for record in records], batch_first=True)
    return x, torch.tensor([record[1] for record in records]), torch.tensor([record[2] for record in records])


def test_loader_that_reorders_its_records_is_refused() -> None:
    with pytest.raises(InputError, match=r"data_loader must keep the order .* got 'by_length'"):
        private(loader=DataLoader(Numbers(), batch_size=12, collate_fn=by_length)).watch()
    with pytest.warns(UserWarning, match="batches are padded to the longest record"):
        ledger = private(loader=DataLoader(Numbers(), batch_size=12, collate_fn=in_order)).watch()
    assert any("padded" in statement for statement in ledger.statements)


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "weighted", "plain"])
def test_loaders_without_poisson_batches_are_refused(kind: str) -> None:
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(60), 60)
    options = {"shuffle": {"shuffle": True}, "weighted": {"sampler": weighted}}.get(kind, {})
    made = private(loader=loader_of(**options), poisson_sampling=kind == "plain")
    if kind == "plain":  # the loader as it was before make_private
        made.loader = loader_of()
    name = {"shuffle": "RandomSampler", "weighted": "WeightedRandomSampler"}.get(kind, "SequentialSampler")
    with pytest.raises(InputError, match=f"data_loader must draw Poisson batches .* got '{name}'"):
        made.watch()


def test_weighted_sampler_that_opacus_drops_is_accounted_as_poisson() -> None:
    """make_private drops it in silence: what is then drawn is uniform, and that is what counts."""
    weighted = torch.utils.data.WeightedRandomSampler(torch.linspace(0.001, 1, 60), 60)
    made = private(loader=loader_of(sampler=weighted, drop_last=True))
    ledger = made.watch()
    made.train(60)
    times = ledger.finish().divergences.times("removed").double()
    expected = 300 * 0.2
    assert float((times - expected).abs().max()) < 5 * (expected * 0.8) ** 0.5


def test_rate_is_that_of_the_loader_where_its_length_is_another() -> None:
    """930 records in batches of 10: 93 batches, but Opacus's loader has 92 and its engine accounts 1/92."""
    x, y = data(930)
    made = private(dataset=TensorDataset(x, y, torch.arange(930)), batch_size=10)
    assert len(made.loader) == 92
    account = made.watch().accountant.account
    assert account.sample_rate == pytest.approx(1 / 93, rel=1e-5)
    assert account.sample_rate >= 1 / 93


@pytest.mark.parametrize("rate", [1 / 93, 0.0123, 1e-5, 3e-7, 1.0])
def test_drawn_rate_counts_the_numbers_that_torch_can_draw(rate: float) -> None:
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    from reconbound.integrations.loaders import drawn_rate

    sampler = UniformWithReplacementSampler(num_samples=5, sample_rate=rate)
    share = float((torch.arange(2**24, dtype=torch.float64).div(2**24).float() < rate).double().mean())
    assert drawn_rate(sampler) == max(rate, share)
    numbers = torch.rand(10_000) * 2**24
    assert torch.equal(numbers, numbers.round())


def test_lower_rate_in_opacus_accountant_is_told() -> None:
    made = private()
    made.optimizer.attach_step_hook(made.engine.accountant.get_optimizer_hook_fn(sample_rate=0.1))
    with pytest.warns(UserWarning, match=r"Opacus accounts for the sample rate 0.1, but the loader draws with 0.2"):
        ledger = made.watch()
    made.train(2)
    assert ledger.get_epsilon(1e-5) > 1.2 * made.engine.get_epsilon(1e-5)


def test_epsilon_is_opacus_where_the_rate_is() -> None:
    made = private()
    ledger = made.watch()
    assert ledger.get_epsilon(1e-5) == 0
    made.train(3)
    own = made.engine.get_epsilon(1e-5)
    made.engine.accountant = ledger
    assert made.engine.get_epsilon(1e-5) == pytest.approx(own, abs=0.02)
    assert len(made.engine.accountant) == 15
    assert made.engine.accountant.mechanism() == "reconbound"


def skip_first(made: Training) -> None:
    for k, batch in enumerate(made.loader):
        if k:
            made.epoch([batch])


def skip_empty(made: Training) -> None:
    for batch in made.loader:
        if len(batch[0]):
            made.epoch([batch])


def other_loader(made: Training) -> None:
    made.epoch(loader_of())


def peek(made: Training) -> None:
    for batch in made.loader:
        made.epoch([batch])
        next(iter(made.loader))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (skip_first, "data_loader must give each batch to one step"),
        (skip_empty, "data_loader must give each batch to one step, as it was drawn, also an empty one"),
        (other_loader, "data_loader must be the loader that the training iterates over"),
        (peek, "data_loader must be iterated over once at a time"),
    ],
)
def test_steps_with_other_records_are_refused(way: Any, message: str) -> None:
    made = private(batch_size=2 if way is skip_empty else 12)
    ledger = made.watch()
    with pytest.raises(InputError, match=message):
        way(made)
    before = copy.deepcopy(list(made.network.parameters()))
    assert ledger.steps == len(made.batches)  # the step that was refused was not taken
    assert all(torch.equal(a, b) for a, b in zip(before, made.network.parameters(), strict=True))


def test_noise_schedules_are_refused_at_the_step() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    LambdaNoise(made.optimizer, noise_lambda=lambda epoch: 0.5)
    with pytest.raises(InputError, match=r"noise_multiplier must stay 0.8: schedules of the noise are not accounted"):
        made.train(1)
    assert ledger.steps == 5


@pytest.mark.parametrize("mode", ["ghost", "per_layer"])
def test_clip_schedules_that_move_the_noise_only_are_refused(mode: str) -> None:
    """The noise follows optimizer.max_grad_norm; ghost and per-layer clipping go on clipping to other norms."""
    options: dict[str, Any] = {"clipping": "per_layer", "max_grad_norm": [0.5] * 4} if mode == "per_layer" else {}
    made = private("ghost" if mode == "ghost" else "hooks", **options)
    made.watch()
    made.train(1)
    schedule = LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 0.5**epoch)
    schedule.step()
    with pytest.raises(InputError, match="max_grad_norm must be"):
        made.train(1)


def test_ghost_clipping_must_see_all_parameters() -> None:
    made = private("ghost", network=frozen_network())
    made.watch()
    made.train(1)
    made.network[0].weight.requires_grad_(True)
    made.network[0].weight.summed_grad, made.network[0].weight._forward_counter = None, 0
    made.optimizer.param_groups[0]["params"].append(made.network[0].weight)
    with pytest.raises(InputError, match="optimizer must have no parameters that became trainable"):
        made.train(1)


def test_ghost_clipping_needs_its_criterion() -> None:
    made = private("ghost")
    made.criterion = nn.CrossEntropyLoss()
    with pytest.raises(InputError, match="loss_fn must be the criterion that make_private returned"):
        made.watch()


def test_adaptive_clipping_is_refused() -> None:
    options = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0}
    made = private(clipping="adaptive", min_clipbound=0.1, unclipped_num_std=1.0, **options)
    with pytest.raises(InputError, match=r"true size of the batch, which no noise covers"):
        made.watch()


def test_what_is_no_training_of_opacus_is_refused() -> None:
    made = private()
    plain = torch.optim.SGD(made.network.parameters(), lr=0.1)
    for name, value in (("optimizer", plain), ("loader", [1, 2]), ("criterion", None)):
        other = copy.copy(made)
        setattr(other, name, value)
        named = {"loader": "data_loader", "criterion": "loss_fn"}.get(name, name)
        with pytest.raises(InputError, match=f"^{named} must be the"):
            other.watch()
    made.optimizer.noise_multiplier = 0.0
    with pytest.raises(InputError, match="noise_multiplier must be greater than 0"):
        made.watch()


def test_made_up_records_in_empty_batches_are_refused() -> None:
    with pytest.raises(InputError, match="data_loader must leave empty batches empty"):
        private(rand_on_empty=True).watch()


def test_class_weights_that_divide_by_the_batch_are_refused() -> None:
    made = private()
    made.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    with pytest.raises(InputError, match="loss_fn must not have class weights"):
        made.watch()


def test_a_training_is_watched_once() -> None:
    made = private()
    ledger = made.watch()
    other = private()
    for name, watched in (("optimizer", replace(other, optimizer=made.optimizer)), ("data_loader", other)):
        if name == "data_loader":
            watched.loader = made.loader
        with pytest.raises(InputError, match=f"{name} must not be watched already: finish the first ledger"):
            watched.watch()
    with pytest.raises(InputError, match="ledger must have seen a step"):
        ledger.finish()


def test_norm_that_is_not_finite_is_refused_before_the_noise() -> None:
    x, y = data()
    x[7] = torch.inf
    made = private(dataset=TensorDataset(x, y, torch.arange(60)), batch_size=60)
    made.watch()
    with pytest.raises(InputError, match="of record 7"):
        made.train(1)
    assert all(bool(p.isfinite().all()) for p in made.network.parameters())
