"""Trainings that go wrong in Opacus or in the loop: the ledger is right, or refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from opacus.schedulers import LambdaGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn

from beside_opacus import Training, exact_divergence, measured, network, private, quiet
from reconbound._internal.checks import InputError
from reconbound.integrations.loaders import DrawnBatches

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")


# --- the same noise twice ------------------------------------------------------------------


def test_seed_that_is_set_again_is_refused() -> None:
    """As in a loop that sets the seed at the start of each epoch: batches and noise are those of the first one."""
    made = private()
    ledger = made.watch()
    for _ in range(2):
        torch.manual_seed(0)
        if ledger.steps:
            break
        made.train(1)
    with pytest.raises(InputError, match="seed must not be set again during a training"):
        made.train(1)
    assert ledger.steps == 5


def test_another_seed_that_gives_the_same_numbers_is_refused() -> None:
    """Torch's generator on the CPU uses the lower 32 bits of a seed."""
    made = private()
    made.watch()
    torch.manual_seed(1)
    made.train(1)
    torch.manual_seed(1 + 2**32)
    with pytest.raises(InputError, match="seed must not be set again during a training"):
        made.train(1)


@pytest.mark.parametrize("restarted", [False, True])
def test_seed_that_is_set_again_before_other_numbers_of_dropout_is_refused(restarted: bool) -> None:
    """The noise would be that of the first epoch, moved by as many numbers as the batches differ in."""
    made = private()
    ledger = made.watch()
    drawing(made, 5)
    torch.manual_seed(1)
    made.train(1)
    state = ledger.state_dict()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        list(made.loader)  # a look at the data
    made.train(1)
    if restarted:
        made = private()
        made.watch().load_state_dict(state)
        drawing(made, 1)
    torch.manual_seed(1)
    with pytest.raises(InputError, match="seed must not be set again during a training"):
        made.train(1)


def drawing(made: Training, first: int) -> None:
    """Makes a model draw random numbers: so many at first, and then one each time."""
    counts = iter([first])

    def draw(*_: Any) -> None:
        torch.rand(next(counts, 1))

    made.network.register_forward_pre_hook(draw)


def test_seed_that_is_set_again_after_a_restart_is_refused() -> None:
    made = private()
    ledger = made.watch()
    torch.manual_seed(0)
    made.train(1)
    state = ledger.state_dict()
    again = private()
    other = again.watch()
    other.load_state_dict(state)
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"seed must not be set again .* nor after a restart"):
        again.train(1)
    with pytest.raises(InputError, match="state must have its noise states"):
        private().watch().load_state_dict({**state, "noise_digests": None})
    for bounds in ([], None, 3):
        with pytest.raises(InputError, match="state must have the smallest and the largest clip norm"):
            private().watch().load_state_dict({**state, "bounds": bounds})


def test_noise_generator_of_ones_own_is_watched_too() -> None:
    generator = torch.Generator()
    made = private(noise_generator=generator.manual_seed(5))
    made.watch()
    made.train(1)
    generator.manual_seed(5)
    with pytest.raises(InputError, match="seed must not be set again"):
        made.train(1)


def test_one_training_that_is_run_again_is_no_second_run() -> None:
    """Trainings with the same seed agree in everything: as two runs they would give narrow limits."""
    ledgers = []
    for _ in range(2):
        made = private(seed=8)
        ledgers.append(made.watch())
        made.train(1)
    with pytest.raises(InputError, match="1 of its runs is in this ledger already"):
        ledgers[0].finish().merge(ledgers[1].finish())


# --- steps and batches that do not belong together -----------------------------------------


def virtual_steps(made: Training, count: int) -> Any:
    """Takes some physical steps and returns the iteration, in the middle of a batch."""
    limited = BatchMemoryManager(data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer)
    with limited as loader:
        batches = iter(loader)
        for _ in range(count):
            x, y, _ = next(batches)
            made.optimizer.zero_grad()
            made.criterion(made.model(x), y).backward()
            made.optimizer.step()
    return batches


@pytest.mark.parametrize("fetched", [0, 1])
def test_batches_that_were_left_halfway_are_refused(fetched: int) -> None:
    """As after an error of memory in a part of a batch: the parts before it are in the sum of the next step."""
    made = private()
    ledger = made.watch()
    batches = virtual_steps(made, 1 - fetched)
    for _ in range(fetched):
        next(batches)  # and no step
    with pytest.raises(InputError, match="data_loader must be left between two steps, not in the middle of a batch"):
        made.train(1, virtual=4)
    assert ledger.steps == 0


def with_records(batches: list[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
    return ((batch, torch.tensor(batch)) for batch in batches)


def test_batches_without_a_step_are_found_at_the_end_of_an_iteration() -> None:
    """Where two batches have the same size, a step with the second one passes for one with the first."""
    sampler = UniformWithReplacementSampler(num_samples=9, sample_rate=0.2)
    batches = DrawnBatches(sampler, lambda: False, ahead=False)
    for k, indices in enumerate(batches.recorded(with_records([[1, 2], [3, 4], [5, 6]]))):
        if k:
            batches.take(len(indices))
    with pytest.raises(InputError, match="an iteration over all of its batches ended with fewer steps, got '1 without"):
        batches.check_complete()
    with pytest.raises(InputError, match="ended with fewer steps"):
        next(batches.recorded(with_records([[1]])))
    looked = DrawnBatches(sampler, lambda: False, ahead=False)
    assert list(looked.recorded(with_records([[1], [2]]))) == [[1], [2]]
    looked.check_complete()  # a look at the data
    ahead = DrawnBatches(sampler, lambda: False, ahead=True)
    for _ in ahead.recorded(with_records([[1], [2]])):
        ahead.take(1) if not ahead._taken else None
    ahead.check_complete()


def test_ledger_whose_records_are_not_known_is_not_finished() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    for k, batch in enumerate(made.loader):
        if k:
            with pytest.raises(InputError, match="data_loader must give each batch to one step"):
                made.epoch([batch])
            break
    with pytest.raises(InputError, match="ledger must not go on after a step that was refused: begin anew"):
        made.train(1)
    assert "data_loader must give each batch" in ledger.refused
    with pytest.raises(InputError, match="ledger must know the records of each step"):
        ledger.finish()


def test_a_refused_step_ends_the_training_but_not_the_ledger() -> None:
    """The parts of its batch would be in the sum of the next one."""
    made = private()
    ledger = made.watch()
    made.train(1, virtual=4)
    made.optimizer.noise_multiplier = 0.4
    with pytest.raises(InputError, match=r"noise_multiplier must stay 0\.8"):
        made.train(1, virtual=4)
    made.optimizer.noise_multiplier = 0.8
    with pytest.raises(InputError, match="not in the middle of a batch"):
        made.train(1)
    ledger._norms.take()
    with pytest.raises(InputError, match="ledger must not go on"):
        made.train(1)
    assert ledger.finish().account.steps == 5


def test_another_training_on_the_same_parameters_is_found() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    with quiet():
        model, optimizer, loader = made.engine.make_private(
            module=made.model,
            optimizer=made.optimizer,
            data_loader=made.loader,
            noise_multiplier=0.8,
            max_grad_norm=1.0,
        )
    before = copy.deepcopy(list(made.network.parameters()))
    other = replace(made, model=model, optimizer=optimizer, loader=loader)
    with pytest.raises(InputError, match="optimizer must be the one that takes all steps while it is watched"):
        other.train(1)
    assert all(torch.equal(a, b) for a, b in zip(before, made.network.parameters(), strict=True))
    ledger.finish()
    other.train(1)


class Outer(torch.optim.Optimizer):
    """Takes the steps of another optimizer, as Lookahead does, and calls no constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.state, self.param_groups = inner, {}, inner.state, inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_optimizers_around_others_are_exact() -> None:
    inner = network()
    made = private(network=inner, optimizer=Outer(torch.optim.SGD(inner.parameters(), lr=0.5)))
    ledger = made.watch()
    made.train()
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_accountant_does_not_count_another_training() -> None:
    made = private()
    ledger = made.watch()
    made.engine.accountant = ledger
    with quiet():
        model, optimizer, loader = made.engine.make_private(
            module=made.model, optimizer=torch.optim.SGD(made.network.parameters(), lr=0.1),
            data_loader=made.loader, noise_multiplier=0.8, max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(InputError, match="ledger must not be the accountant of another training"):
        replace(made, model=model, optimizer=optimizer, loader=loader).train(1)


# --- settings that change ------------------------------------------------------------------


def test_rate_that_changes_is_refused() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    made.loader.batch_sampler.sample_rate = 0.4  # type: ignore[union-attr]
    with pytest.raises(InputError, match="data_loader must draw with the same rate from the same records"):
        made.train(1)
    assert ledger.finish().account.steps == 5


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("expected_batch_size", 13, "expected_batch_size must stay 12: the noisy sum is divided by it"),
        ("loss_reduction", "sum", "loss_reduction must stay 'mean'"),
        ("secure_mode", True, "secure_mode must stay False"),
    ],
)
def test_settings_that_change_are_refused(name: str, value: Any, why: str) -> None:
    made = private()
    made.watch()
    made.train(1)
    setattr(made.optimizer, name, value)
    with pytest.raises(InputError, match=why):
        made.train(1)


def test_clip_norm_that_changes_within_a_batch_is_refused() -> None:
    made = private()
    made.watch()
    batches = virtual_steps(made, 1)
    made.optimizer.max_grad_norm = 0.5
    with pytest.raises(InputError, match="max_grad_norm must not change within a batch, from 1"):
        made.epoch(batches)


def test_statements_name_the_clip_norms_that_were_used() -> None:
    made = private()
    ledger = made.watch()
    schedule = LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 0.5**epoch)
    for _ in range(3):
        made.train(1)
        schedule.step()
    assert "at most the clip norm C of the step, from 0.25 to 1" in ledger.statements[0]
    assert "standard deviation σC = 0.8 C" in ledger.statements[1]
    assert ledger.finish().caveats == ledger.statements
    again = private()
    other = again.watch()
    other.load_state_dict(ledger.state_dict())
    assert other.statements == ledger.statements


@pytest.mark.parametrize(("loss", "told"), [("sum", "mean"), ("mean", "sum")])
def test_losses_that_are_reduced_otherwise_are_refused(loss: str, told: str) -> None:
    made = private(loss_reduction=told, criterion=nn.CrossEntropyLoss(reduction=loss))
    with pytest.raises(InputError, match=f"loss_fn must be reduced by '{told}', as make_private was told"):
        made.watch()
