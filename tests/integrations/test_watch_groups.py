"""Steps that a ledger keeps and adds later: nothing that the loop does in between changes or loses them."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from beside_opacus import RECORDS, Training, data, exact_divergence, measured, private
from reconbound._internal import opacus_hooks
from reconbound._internal.checks import InputError
from reconbound.divergences import poisson_kl
from reconbound.integrations import loaders
from reconbound.integrations.opacus import OpacusLedger

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")


def assert_exact(made: Training, ledger: OpacusLedger) -> None:
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_a_ledger_may_be_read_at_every_step() -> None:
    made = private()
    ledger = made.watch()
    for k, batch in enumerate(chain(made.loader, made.loader), 1):
        made.epoch([batch])
        so_far = exact_divergence(made, ledger.accountant.account.sample_rate)
        read = ledger.accountant.divergences
        torch.testing.assert_close(read.state["nats"][0], so_far, rtol=1e-6, atol=0)
        assert int(read.state["nats_times"].sum()) == sum(map(len, made.batches))
        assert ledger.accountant.account.steps == ledger.steps == k
    assert_exact(made, ledger)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_what_is_kept_is_no_tensor_of_anybody_else(mode: str) -> None:
    """All that a loop can reach is overwritten after each step, and after each backward pass what is not used again."""
    made = private(mode)
    ledger, model = made.watch(), cast(Any, made.model)
    for batch in chain(made.loader, made.loader):
        made.epoch([batch])
        for p in made.optimizer.params:
            for found in (p.grad_sample, p.summed_grad, p.grad) if mode == "hooks" else (p.grad,):
                found.fill_(3.0)
        if mode == "ghost":
            model.per_sample_gradient_norms.zero_()
    assert_exact(made, ledger)


class Emptied(Dataset[Any]):
    """Reads a whole batch at once, and takes the numbers out of the sampler's list."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Any:
        x, y = data()
        return x[i], y[i], i

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[numbers.pop(0)] for _ in range(len(numbers))]


@pytest.mark.parametrize("known", [False, True])
def test_a_data_set_may_change_the_list_of_its_batch(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(loaders, "_REPEATED", "another")
    made = private(loader=DataLoader(Emptied(), batch_size=12))
    ledger = made.watch()
    made.train()
    assert_exact(made, ledger)


def test_the_sampler_is_repeated_only_where_its_source_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version draws by its own code; both draw the same batches."""
    found = []
    for digest in (loaders._REPEATED, "another"):
        monkeypatch.setattr(loaders, "_REPEATED", digest)
        made = private()
        made.watch()
        torch.manual_seed(5)
        found.append(list(cast(Any, made.loader.batch_sampler)))
    made = private()
    torch.manual_seed(5)
    assert found[0] == found[1] == list(cast(Any, made.loader.batch_sampler))
    assert opacus_hooks.source_digest(len) == ""


def test_gradients_that_are_cleared_before_the_step_take_no_step() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    batches = iter(made.loader)
    x, y, _ = next(batches)
    made.optimizer.zero_grad()
    made.criterion(made.model(x), y).backward()
    made.optimizer.zero_grad()
    before = copy.deepcopy(list(made.network.parameters()))
    with pytest.raises(ValueError, match="Per sample gradient"):
        made.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, made.network.parameters(), strict=True))
    assert ledger.steps == 5
    made.train(1)  # a new iteration forgets the batch
    assert_exact(made, ledger)


def test_gradients_that_a_step_was_taken_with_are_refused_as_by_opacus() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    with pytest.raises(ValueError, match="Gradients haven't been cleared"):
        made.optimizer.step()
    assert ledger.steps == 5


def test_an_error_between_noise_and_update_counts_the_step() -> None:
    """Its noisy sum may have been seen: the divergence is that of a training with this step."""
    made = private()
    ledger = made.watch()
    made.train(1)
    hook = made.optimizer.step_hook

    def broken(optimizer: Any) -> None:
        raise MemoryError("in the middle")

    made.optimizer.attach_step_hook(broken)
    with pytest.raises(MemoryError):
        made.train(1)
    made.optimizer.attach_step_hook(hook)
    assert ledger.steps == 6
    made.train(1)
    assert ledger.finish().account.steps == 11


def test_an_error_while_noise_is_drawn_counts_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    with monkeypatch.context() as patched:
        patched.setattr("opacus.optimizers.optimizer._generate_noise", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.train(1)
    assert ledger.steps == 6
    made.train(1)
    assert ledger.finish().account.steps == 11


def test_a_state_in_the_middle_is_not_loaded_into_a_ledger_with_steps() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    state = ledger.state_dict()
    made.train(1)
    with pytest.raises(InputError, match="state must be loaded before the first step, got '10 steps'"):
        ledger.load_state_dict(state)
    assert_exact(made, ledger)


def test_a_training_that_is_interrupted_within_a_group_goes_on_with_its_ledger() -> None:
    made = private()
    ledger = made.watch()
    made.train(1)
    assert ledger._pending
    state = ledger.state_dict()
    again = private(network=copy.deepcopy(made.plain), seed=9)
    again.network.load_state_dict(made.network.state_dict())
    other = again.watch()
    other.load_state_dict(state)
    again.train(1)
    again.batches, again.parameters, again.norms = (
        made.batches + again.batches,
        made.parameters + again.parameters,
        made.norms + again.norms,
    )
    assert other.steps == 10
    assert_exact(again, other)


def test_clip_norms_that_change_within_a_group_are_each_for_their_steps() -> None:
    made = private()
    ledger = made.watch()
    for k, batch in enumerate(chain(made.loader, made.loader)):
        made.optimizer.max_grad_norm = [1.0, 0.5, 0.7][k % 3]
        made.epoch([batch])
    assert len(ledger._pending) == 10
    assert_exact(made, ledger)


def test_another_optimizer_state_is_loaded_and_the_ledger_stays() -> None:
    """Opacus loads its state into the inner optimizer: what was clipped is not in it."""
    made = private()
    ledger = made.watch()
    made.train(1)
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.train(1)
    assert_exact(made, ledger)


@pytest.mark.parametrize("rate", [0.5, 0.01, 1e-9])
def test_part_of_the_table_gives_the_same_bits(rate: float) -> None:
    norms = torch.linspace(0, 3, 1000, dtype=torch.float64)
    whole = poisson_kl(norms, rate)
    assert torch.equal(poisson_kl(norms, rate, largest_norm=3.0), whole)
    part = poisson_kl(norms, rate, largest_norm=1.5)
    assert torch.equal(part[norms < 2], whole[norms < 2])
    assert bool((part >= whole * (1 - 2e-12)).all())  # by which all results are rounded up


def test_a_wrapper_around_the_clip_put_there_after_watch_stays() -> None:
    """The clip is repeated from the second batch on, but not in place of what the user put around it."""
    made = private()
    ledger = made.watch()
    inner, calls = made.optimizer.clip_and_accumulate, []

    def counted() -> None:
        calls.append(1)
        inner()

    made.optimizer.clip_and_accumulate = counted  # type: ignore[method-assign]
    for batch in chain(made.loader, made.loader):
        made.epoch([batch])
    assert len(calls) == ledger.steps > 2
    assert_exact(made, ledger)
