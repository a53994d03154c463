"""A run counts once: ledgers know the runs that they hold, and refuse them a second time."""

from __future__ import annotations

import copy

import pytest
import torch

from learning import FEATURES, RECORDS, data, learner, losses, network
from reconbound._internal.checks import InputError
from reconbound.accounting.accountant import Account, FisherAccountant
from reconbound.fisher import step_information

DOUBLE = "must hold other runs: 1 of its runs is in this ledger already"


def ledger_of(seed: int, runs: int = 1) -> FisherAccountant:
    found = learner(seed=seed, budget="every").repeat(runs, 4).accountant
    assert found is not None
    return found


def by_hand(seed: int, ledger: FisherAccountant | None = None, *, finish: bool = True) -> FisherAccountant:
    """One run of one step, beside a loop of one's own."""
    account = Account(1.0, 1.0, 1.0, records=RECORDS, features=FEATURES, steps=1)
    ledger = FisherAccountant(account) if ledger is None else ledger
    x, y = data(seed)
    ledger.add(torch.arange(RECORDS), step_information(network(), losses, x, y, max_grad_norm=1.0, noise_multiplier=1))
    if finish:
        ledger.finish_run()
    return ledger


def copied(ledger: FisherAccountant, tmp_path, how: str) -> FisherAccountant:
    if how == "deepcopy":
        return copy.deepcopy(ledger)
    if how == "state":
        other = FisherAccountant(ledger.account)
        other.restore(ledger.state(), ledger.runs)
        return other
    ledger.save(tmp_path / "ledger")
    return FisherAccountant.load(tmp_path / "ledger")


@pytest.mark.parametrize("how", ["deepcopy", "state", "file"])
@pytest.mark.parametrize("make", [ledger_of, by_hand])
def test_a_copy_is_refused_and_nothing_is_changed(tmp_path, make, how: str) -> None:
    one = make(1)
    before = {name: value.clone() for name, value in one.state().items()}
    with pytest.raises(InputError, match=DOUBLE):
        one.merge(copied(one, tmp_path, how))
    assert one.runs == 1
    assert all(torch.equal(value, before[name]) for name, value in one.state().items())
    one.merge(copied(make(2), tmp_path, how))
    assert one.runs == 2


def test_merges_that_share_a_run_are_refused(tmp_path) -> None:
    first, second, third = (by_hand(k) for k in range(3))
    left, right = (FisherAccountant(first.account) for _ in range(2))
    for ledger in (first, second):
        left.merge(ledger)
    for ledger in (second, third):
        right.merge(ledger)
    right = copied(right, tmp_path, "file")
    with pytest.raises(InputError, match=DOUBLE):
        left.merge(right)
    with pytest.raises(InputError, match=DOUBLE):
        right.merge(left)
    with pytest.raises(InputError, match="2 of its runs are"):
        left.merge(copy.deepcopy(left))
    left.merge(third)
    assert left.runs == 3
    all_three = copied(left, tmp_path, "file")
    for ledger in (first, second, third, right):
        with pytest.raises(InputError, match="already"):
            all_three.merge(ledger)


def test_the_same_training_twice_is_one_run() -> None:
    """Same seed, data and settings: the second ledger holds the very same runs, however it was measured."""
    one, again, other = ledger_of(5, 2), ledger_of(5, 2), ledger_of(6, 2)
    with pytest.raises(InputError, match="2 of its runs are"):
        one.merge(again)
    more = ledger_of(5, 3)
    with pytest.raises(InputError, match="2 of its runs are"):
        more.merge(one)
    one.merge(other)
    assert one.runs == 4
    coarse, fine = (learner(seed=5, budget=b, probes=p).repeat(1, 4).accountant for b, p in ((0.5, 1), (1.0, 4)))
    assert coarse is not None
    assert fine is not None
    with pytest.raises(InputError, match=DOUBLE):
        coarse.merge(fine)


def test_what_differs_in_training_is_another_run() -> None:
    """The accounts are equal, the runs are not: other data, another step size, continued training."""
    one = ledger_of(5)
    first = learner(seed=5, budget="every").fit(4)
    changed = data()[0].clone()
    changed[0, 0] += 1e-5
    others = [
        learner(seed=5, budget="every", lr=0.2).repeat(1, 4),
        learner(seed=5, budget="every", records=(changed, data()[1])).repeat(1, 4),
        first,
        learner(first.model, seed=5, budget="every").fit(4),
    ]
    for other in others:
        assert other.accountant is not None
        one.merge(other.accountant)
    assert one.runs == 5


def test_resumed_runs_keep_their_marks(tmp_path) -> None:
    """A learner that goes on from a checkpoint holds the runs of one that was never stopped."""

    class Stop(Exception):
        pass

    def stop(model) -> dict[str, float]:
        raise Stop

    options = {"seed": 3, "budget": "every", "checkpoint": tmp_path / "c", "every": 1}
    with pytest.raises(Stop):
        learner(**options, evaluate=stop, evaluate_every=3).repeat(2, 4)
    resumed, whole = learner(**options).repeat(2, 4).accountant, ledger_of(3, 2)
    assert resumed is not None
    with pytest.raises(InputError, match="2 of its runs are"):
        resumed.merge(whole)


def test_a_run_under_way_is_not_finished_twice(tmp_path) -> None:
    """Two copies of a ledger in the middle of a run: both finish it, and it is the same run."""
    one = by_hand(0, finish=False)
    for how in ("deepcopy", "state", "file"):
        other = copied(one, tmp_path, how)
        other.finish_run()
        with pytest.raises(InputError, match=DOUBLE):
            one.merge(other)  # this one would finish it later
    one.finish_run()
    with pytest.raises(InputError, match=DOUBLE):
        one.merge(other)
    by_hand(1, one)
    assert one.runs == 2


def test_copies_of_an_empty_ledger_hold_runs_of_their_own() -> None:
    empty = FisherAccountant(Account(1.0, 1.0, 1.0, records=RECORDS, features=FEATURES, steps=1))
    one, other = (by_hand(k, copy.deepcopy(empty)) for k in range(2))
    one.merge(other)
    assert one.runs == 2


def test_learner_refuses_run_already_in_ledger() -> None:
    one, other = learner(seed=4, budget="every").repeat(1, 4), learner(seed=4, budget="every").repeat(2, 4)
    assert one.accountant is not None
    assert other.accountant is not None
    second = FisherAccountant(other.accountant.account)
    second.merge(other.accountant)
    one.accountant.fingerprints.append(second.fingerprints[1])
    with pytest.raises(InputError, match="is in the ledger already"):
        one.repeat(2, 4)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(1, 16), torch.zeros(1, 8)])
def test_marks_that_do_not_fit_are_refused(wrong) -> None:
    one = by_hand(1)
    with pytest.raises(InputError, match="fingerprints"):
        FisherAccountant(one.account).restore({**one.state(), "fingerprints": wrong}, 1)


def test_fingerprints_have_128_bits_and_hide_the_seed() -> None:
    one = learner(seed=2**200 + 12345, budget="every").repeat(1, 2)
    assert one.accountant is not None
    (mark,) = one.accountant.fingerprints
    assert len(bytes.fromhex(mark)) == 16
    for secret in (one.seed, one.run_seed):
        assert int(mark, 16) not in (secret % 2**128, secret >> 128)
