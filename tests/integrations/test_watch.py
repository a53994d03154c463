"""The ledger beside Opacus: that of PrivateSGD, and exact sums over the batches that the data themselves name."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from opacus.schedulers import LambdaGradClip
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from beside_opacus import RECORDS, Training, data, exact_divergence, frozen_network, measured, network, private
from reconbound import PrivateSGD, Settings
from reconbound._internal.checks import InputError
from reconbound.integrations import clipped_norms
from reconbound.training.settings import Callback

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")
MODES = ("hooks", "functorch", "ew", "ghost")


class SameSteps(Callback):
    """Gives PrivateSGD the parameters and the batches of another training."""

    name, divisor, steps_per_epoch = "poisson", 12.0, 5.0

    def __init__(self, other: Training, rate: float) -> None:
        self.other, self.sample_rate, self.records = other, rate, RECORDS

    def batch(self, seed: int, step: int) -> Tensor:
        return self.other.batches[step]

    def on_step(self, learner: PrivateSGD) -> None:
        if learner.step < learner.steps:
            learner.model.load_state_dict(self.other.parameters[learner.step])


def divergence_of_private_sgd(made: Training, rate: float) -> Tensor:
    """Returns D of PrivateSGD's ledger on the same batches, parameters and clip."""
    x, y = data()
    settings = Settings(0.8, 1.0, rate, clip="hard", rules=None, seed=1)
    same = SameSteps(made, rate)
    loss = nn.CrossEntropyLoss(reduction="none")
    learner = PrivateSGD(network(), loss, x, y, settings, callbacks=[same], check=False, progress=False)
    learner.sampler = same  # type: ignore[assignment]
    learner.fit(len(made.batches))
    assert learner.accountant is not None
    return learner.accountant.divergence()


# --- the ledger is right -----------------------------------------------------------------


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_ledger_is_that_of_private_sgd(mode: str, wrap: bool) -> None:
    if mode == "ew" and not wrap:
        pytest.skip("Opacus has no ew mode without its wrapper")
    made = private(mode, wrap_model=wrap)
    ledger = made.watch()
    made.train(3)
    assert len(made.batches) == ledger.steps == 15
    rate = ledger.accountant.account.sample_rate
    assert rate == pytest.approx(0.2, rel=1e-6)
    assert float(ledger.divergence().max()) > 0
    torch.testing.assert_close(ledger.divergence(), divergence_of_private_sgd(made, rate), rtol=1e-6, atol=0)


@pytest.mark.parametrize("virtual", [None, 5])
@pytest.mark.parametrize("mode", MODES)
def test_ledger_is_the_exact_sum(mode: str, virtual: int | None) -> None:
    made = private(mode)
    ledger = made.watch()
    made.train(virtual=virtual)
    found, account = ledger.finish(), ledger.accountant.account
    assert account.steps == ledger.steps == len(made.batches) == 10
    assert (account.noise, account.clip, account.records) == (0.8, "hard", RECORDS)
    exact = exact_divergence(made, account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)
    assert float(found.divergence().max()) <= found.divergences.cap("removed")


def test_per_layer_clipping_is_the_exact_sum() -> None:
    bounds = [0.3, 0.1, 0.5, 0.2]
    made = private(max_grad_norm=bounds, clipping="per_layer")
    ledger = made.watch()
    made.train(virtual=7)
    exact = exact_divergence(made, ledger.accountant.account.sample_rate, bounds)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_norms_are_formed_here_where_opacus_computes_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    made = private()
    ledger = made.watch()
    monkeypatch.setattr("reconbound.integrations.clipped_norms._SMALL", 1e-3)  # the factors do not fit any more
    made.train()
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)
    assert not ledger._norms._trusted
    assert not ledger._norms._repeats


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_flat_clipping_is_repeated_here_after_a_batch_with_the_same_bits(mode: str) -> None:
    """Opacus's own clipping is not called any more; the first batch may be empty, and have several parts."""
    made = private(mode)
    ledger, calls = made.watch(), []
    norms, original = ledger._norms, ledger._norms._original
    norms._original = lambda: [calls.append(1), original()]
    made.train(2, virtual=5)
    assert norms._repeats
    assert 0 < len(calls) < ledger.steps
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", ["source", "norms", "sums"])
def test_clipping_that_is_another_one_is_not_repeated(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = clipped_norms._flat_sums

    def other(*args: Any) -> tuple[Tensor, list[Tensor]]:
        norms, sums = own(*args)
        off = [norms, *sums][1 if how == "sums" else 0]
        off[..., -1] = torch.nextafter(off[..., -1], torch.tensor(torch.inf))  # by one bit
        return norms, sums

    if how == "source":
        monkeypatch.setattr(clipped_norms, "_REPEATED", "0" * 64)
    else:
        monkeypatch.setattr(clipped_norms, "_flat_sums", other)
    made, plain = private(), private()
    ledger = made.watch()
    torch.manual_seed(3)
    made.train()
    torch.manual_seed(3)
    plain.train()
    assert not ledger._norms._repeats
    assert all(torch.equal(a, b) for a, b in zip(made.network.parameters(), plain.network.parameters(), strict=True))
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("records", [1, 50, 2**16])
def test_steps_are_added_to_the_ledger_together(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 16 of them, or as many as have so many records, and whenever the ledger is read."""
    monkeypatch.setattr("reconbound.integrations.ledger._STEPS", 16)
    monkeypatch.setattr("reconbound.integrations.ledger._RECORDS", records)
    made, waiting = private(), []
    ledger = made.watch()
    for x, y, numbers in chain(made.loader, made.loader, made.loader, made.loader):
        made.epoch([(x, y, numbers)])
        waiting.append(sum(len(norms) for _, norms, _ in ledger._pending))
    assert ledger.steps == 20
    assert records < 2**16 or waiting[14] > waiting[15] == 0
    assert max(waiting) < records
    state = ledger.state_dict()["tensors"]
    assert not ledger._pending
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(state["nats"][0].double(), exact, rtol=1e-6, atol=0)


def test_several_groups_frozen_parameters_and_adam() -> None:
    model = frozen_network()
    groups = [{"params": [model[0].bias], "lr": 0.01}, {"params": list(model[2].parameters())}]
    made = private(network=model, optimizer=torch.optim.Adam(groups, lr=0.05))
    ledger = made.watch()
    made.train()
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_clip_schedules_are_exact() -> None:
    made = private()
    ledger = made.watch()
    schedule = LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 0.5**epoch)
    for _ in range(3):
        made.train(1)
        schedule.step()
    assert len(set(made.norms)) == 3
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_empty_batches_are_steps() -> None:
    made = private(batch_size=1)
    ledger = made.watch()
    made.train(1)
    assert sum(len(batch) == 0 for batch in made.batches) > 5
    assert ledger.steps == len(made.batches) == 60
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_subsets_count_their_own_records() -> None:
    x, y = data()
    kept = torch.arange(59, 9, -1)
    dataset = Subset(TensorDataset(x, y, 59 - torch.arange(60)), kept.tolist())
    made = private(dataset=dataset)
    ledger = made.watch()
    made.train()
    drawn = torch.bincount(torch.cat(made.batches), minlength=50)
    assert torch.equal(ledger.finish().divergences.times("removed"), drawn)


def test_workers_draw_ahead() -> None:
    x, y = data()
    loader = DataLoader(TensorDataset(x, y, torch.arange(60)), batch_size=12, num_workers=2)
    made = private(loader=loader)
    ledger = made.watch()
    made.train(virtual=8)
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_an_epoch_that_is_left_early_does_no_harm() -> None:
    made = private()
    ledger = made.watch()
    next(iter(made.loader))  # a look at a batch
    for x, y, numbers in made.loader:
        made.epoch([(x, y, numbers)])
        if len(made.batches) == 3:
            break
    made.train(1)
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)
    assert ledger.steps == 8


# --- the training is not changed ---------------------------------------------------------


def trained(mode: str, virtual: int | None, watched: bool) -> tuple[Training, list[int]]:
    made = private(mode)
    if watched:
        ledger = made.watch()
        made.train(virtual=virtual)
        assert float(ledger.divergence().max()) > 0
    else:
        made.train(virtual=virtual)
    return made, torch.get_rng_state().tolist()


@pytest.mark.parametrize("virtual", [None, 5])
@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_bit_for_bit(mode: str, virtual: int | None) -> None:
    (one, drawn), (other, drawn_without) = (trained(mode, virtual, watched) for watched in (True, False))
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert drawn == drawn_without


def test_watching_draws_nothing_and_finishing_leaves_everything_as_it_was() -> None:
    made = private()
    kinds, own = (type(made.loader.batch_sampler), type(made.optimizer)), set(vars(made.optimizer))
    before = torch.get_rng_state()
    ledger = made.watch()
    assert torch.equal(before, torch.get_rng_state())
    made.train(1)
    ledger.finish()
    assert (type(made.loader.batch_sampler), type(made.optimizer)) == kinds
    assert set(vars(made.optimizer)) == own
    made.train(1)
    assert ledger.steps == 5
    with pytest.warns(UserWarning, match="10 steps were taken before watch: they are not in this ledger"):
        again = made.watch()
    made.train(1)
    assert again.steps == 5
    assert "10 steps were taken before watch" in " ".join(again.finish().caveats)


def test_step_hooks_stay_and_may_be_added() -> None:
    """There is one slot for a hook, and Opacus's accountant has it."""
    made = private()
    ledger = made.watch()
    seen: list[int] = []
    accounts = made.optimizer.step_hook

    def both(optimizer: Any) -> None:
        accounts(optimizer)
        seen.append(1)

    made.optimizer.attach_step_hook(both)
    made.train()
    assert len(seen) == ledger.steps == made.engine.accountant.history[0][2] == 10


# --- reading and keeping -----------------------------------------------------------------


def test_bound_says_what_it_rests_on() -> None:
    made = private(noise_generator=torch.Generator().manual_seed(1))
    ledger = made.watch()
    made.train(1)
    bound = ledger.max_success(0.1)
    assert bound.sampler == "poisson"
    text = " ".join(bound.assumes)
    for part in ("a run in progress", "at most C = 1", "σC = 0.8", "batch size 12", "secure_mode=False", "q = 0.2"):
        assert part in text
    assert "secure" in ledger.finish().caveats[2]
    assert "5 steps, finished" in repr(ledger)


def test_state_goes_into_checkpoints_of_opacus(tmp_path: Any) -> None:
    whole = private()
    ledger = whole.watch()
    whole.engine.accountant = ledger
    whole.train(1)
    path = tmp_path / "opacus.pt"
    whole.engine.save_checkpoint(path=path, module=whole.model, optimizer=whole.optimizer)
    kept = torch.load(path, weights_only=True)["privacy_accountant_state_dict"]  # nothing in it is run
    private().watch().load_state_dict(kept)
    again = private()
    other = again.watch()
    again.engine.accountant = other
    again.engine.load_checkpoint(path=path, module=again.model, optimizer=again.optimizer)
    for made in (whole, again):
        torch.manual_seed(9)
        made.train(1)
    assert other.steps == ledger.steps == 10
    assert torch.equal(other.finish().divergence(), ledger.finish().divergence())
    with pytest.raises(InputError, match="run"):  # the same run is not counted twice
        ledger.finish().merge(other.finish())
    wrong = private(noise_multiplier=1.1)
    with pytest.raises(InputError, match="state must be of the same training"):
        wrong.watch().load_state_dict(ledger.state_dict())
    with pytest.raises(InputError, match="state must be what state_dict"):
        private().watch().load_state_dict({})


def test_runs_are_merged_for_limits() -> None:
    ledgers = []
    for seed in (1, 2):
        made = private(seed=seed)
        kept = made.watch()
        made.train(2)
        ledgers.append(kept.finish())
    ledgers[0].merge(ledgers[1])
    assert ledgers[0].runs == 2
    assert float(ledgers[0].divergence("removed", 0.9).max()) <= ledgers[0].divergences.cap("removed")
