"""Trainings that tests/training/test_ranks.py runs on ranks; what they return has no tensors of torch's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from learning import Kept, data, learner, network
from reconbound import DatasetRows, Replacement
from reconbound.training import ranks, step
from reconbound.training.ranks import Ranks, TrainingError
from reconbound.training.settings import Callback
from reconbound.validate import ModelError

torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # loads torch's compiler, a second: before the fork

CASES: dict[str, dict[str, Any]] = {
    "everything": {"rules": ("exact", "paper"), "diagonal": "all", "spectral": True, "whole_at": [4],
                   "worlds": {"zero": Replacement(0.0, [0])}},
    "batches": {"budget": "every", "momentum": 0.5},
    "fixed size": {"sampler": "fixed", "budget": 0.5},
    "some steps of shuffled epochs": {"sampler": "shuffle", "budget": ("steps", 0.5)},
    "nothing but divergences": {"rules": None},
    "micro-batches": {"micro_batch": 2},
}  # fmt: skip


def made(case: str = "everything", **changes: Any) -> Any:
    """A learner in float64, with records that the clip changes."""
    x, y = data()
    options: dict[str, Any] = {"shards": 4, "kind": Kept, "progress": False, **CASES[case], **changes}
    return learner(network().double(), **{"records": (x.double() * 3, y), **options})


def outcome(one: Any) -> dict[str, Any]:
    """Returns all that must be the same on any number of ranks."""
    found = {f"model {name}": value.numpy() for name, value in one.model.state_dict().items()}
    found |= {f"ledger {name}": value.numpy() for name, value in one.accountant.state().items()}
    return {**found, "history": one.history, "shards": len(one.shards), "caveats": one.accountant.caveats}


def trained(case: str, steps: int = 8, **changes: Any) -> dict[str, Any]:
    return outcome(made(case, **changes).fit(steps))


def trained_with_warnings(case: str, shards: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(case, shards=shards)
    return {**found, "warnings": [str(one.message) for one in caught]}


def repeated(**changes: Any) -> dict[str, Any]:
    return outcome(made("everything", **{"diagonal": ("top", 3), "spectral": False, **changes}).repeat(3, 5))


def rank() -> int:
    return torch.distributed.get_rank()


def defaults(steps: int = 4) -> dict[str, Any]:
    """A training that says nothing of ranks, in float32, from another start on each rank."""
    with torch.random.fork_rng():
        torch.manual_seed(rank())
        model = network(rank())
    one = learner(model, kind=Kept, progress=False, check=True).fit(steps)
    return {**outcome(one), "drawn": len(one.drawn)}


class Releases(Callback):
    """Keeps what every step released."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_step(self, learner: Any) -> None:
        if learner.step:
            flat = torch.cat([p.grad.flatten() for p in learner.params.values()])
            self.kept.append((flat * learner.sampler.divisor).numpy())


def released(steps: int) -> dict[str, Any]:
    """The noisy sums of a model that stays what it is, and the clipped sums without noise, summed in one batch."""
    seen = Releases()
    one = made("nothing but divergences", lr=0.0, callbacks=[seen], shards=None, noise_multiplier=0.7).fit(steps)
    sums = []
    for batch in (one.sampler.batch(one.run_seed, t) for t in range(steps)):
        nothing = torch.zeros(sum(p.numel() for p in one.params.values()))
        sums.append((one.measurer.gradient_sum(batch)[0] if len(batch) else nothing).numpy())
    return {"released": seen.kept, "sums": sums, "drawn": len(one.drawn)}


# --- a Dataset ---------------------------------------------------------------------------


class Items(Dataset[Any]):
    """The records of `made`; counts how often each was read, also by workers, and fails when it is told to."""

    def __init__(self) -> None:
        x, y = data()
        self.x, self.y = x.double() * 3, y.tolist()
        self.reads = torch.zeros(len(y), dtype=torch.int64).share_memory_()
        self.bad = torch.full((1,), -1).share_memory_()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        if index == self.bad:
            raise OSError(f"item {index} is gone")
        return self.x[index], self.y[index]


def made_of_items(workers: int = 0, **changes: Any) -> tuple[Items, Any]:
    items = Items()
    return items, made("everything", records=(DatasetRows(items, workers=workers), None), **changes)


def trained_on_items(workers: int) -> dict[str, Any]:
    items, one = made_of_items(workers)
    items.reads.zero_()
    return {**outcome(one.fit(8)), "reads": items.reads.numpy()}


def items_on_ranks(folder: str) -> dict[str, Any]:
    """Everything that a test asks of two ranks with a Dataset: starting them takes longer than training."""
    found: dict[str, Any] = {f"workers {count}": trained_on_items(count) for count in (0, 1)}
    found["stopped"] = stopped_on_items(folder)
    found["errors"] = [error_of_items(0, early=True), error_of_items(1, early=False)]
    return found


def trained_beside_gpus() -> dict[str, Any]:
    """A training whose default group takes tensors on GPUs only, and what is sent through which group."""
    about = [*errors_of([lambda: dist.all_reduce(torch.ones(1))]), str(ranks._time_limit(ranks._group_of_cpu()))]
    return {**trained("batches"), "sent": sent_by_default(), "about": about}


def sent_by_default() -> list[tuple[str, bool]]:
    """Which tensors go through the default group; tensors without values stand for those on a GPU."""
    sent = []

    def send(tensor: Any, *, group: Any, **_: Any) -> None:
        sent.append((tensor.device.type, group is None))

    both = Ranks.present()
    with mock.patch.multiple(dist, all_reduce=send, broadcast=send):
        for device in ("meta", "cpu"):
            zeros = partial(torch.zeros, 3, device=device)
            both.sum_whole(zeros(dtype=torch.int64))
            both.tensor_from_first(partial(zeros, dtype=torch.float64), zeros)
    return sent


def stopped_on_items(folder: str) -> str:
    try:
        made_of_items(1, checkpoint=folder, every=2, callbacks=[StopsAt(5)])[1].fit(8)
    except (ZeroDivisionError, TrainingError) as reason:
        return str(reason)
    return "not stopped"


def resumed_on_items(folder: str) -> dict[str, Any]:
    return outcome(made_of_items(0, checkpoint=folder, every=2, callbacks=[StopsAt(-1)])[1].fit(8))


def error_of_items(workers: int, *, early: bool) -> str:
    """Rank 1 cannot read an item: in the pass over all of them, or in a step."""
    items = Items()
    rows = DatasetRows(items, workers=workers)

    class Breaks(Callback):
        def on_step(self, learner: Any) -> None:
            items.bad[:] = 20 if rank() == 1 else -1

    if early:
        Breaks().on_step(None)
    try:
        made("everything", records=(rows, None), callbacks=[Breaks()]).fit(30)
    except (OSError, TrainingError) as reason:
        return f"{type(reason).__name__}: {reason}"
    return "no error"


# --- what goes wrong ---------------------------------------------------------------------


def errors_of(calls: Sequence[Callable[[], None]]) -> list[str]:
    """Returns the first line of the error with which each call ends, one after the other on the same ranks."""
    found = []
    for call in calls:
        try:
            call()
        except Exception as reason:
            found.append(f"{type(reason).__name__}: {reason}".splitlines()[0])
        else:
            found.append("no error")
    return found


def with_a_bad_record(record: int) -> None:
    """One record, of one rank's shard, has a loss that is not finite."""
    x, y = data()
    x[record] = torch.inf
    learner(network().double(), records=(x.double(), y), progress=False).fit(30)


def with_a_self_test_that_fails_on(bad: int) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise ModelError("the sums of this machine are wrong")

    with mock.patch.object(step, "check_batch", fails if rank() == bad else step.check_batch):
        learner(network().double(), progress=False, check=True, records=(data()[0].double(), data()[1]))


def with_an_evaluation_that_fails_on(bad: int) -> None:
    def evaluate(model: Any) -> dict[str, float]:
        if rank() == bad:
            raise ZeroDivisionError("no test records here")
        return {}

    made(evaluate=evaluate, evaluate_every=3).fit(8)


def with_a_rank_that_dies(bad: int) -> None:
    """Its DataLoader worker lives on for some seconds, with the connections that it has inherited."""

    class Dies(Callback):
        def on_step(self, learner: Any) -> None:
            if learner.step == 3 and rank() == bad:
                os._exit(1)

    made_of_items(1, callbacks=[Dies()])[1].fit(8)


def with_only_its_own_records() -> None:
    x, y = data()
    learner(network(), records=(x[rank() :: 2], y[rank() :: 2]), progress=False).fit(3)


def with_other_settings() -> None:
    learner(noise_multiplier=1.0 + rank(), progress=False).fit(3)


def with_another_seed() -> None:
    learner(seed=2**100 + rank(), progress=False).fit(3)


# --- checkpoints -------------------------------------------------------------------------


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, learner: Any) -> None:
        if learner.step == self.step:
            raise ZeroDivisionError("stopped")


def stopped(folder: str, step: int, **changes: Any) -> str:
    try:
        made(checkpoint=folder, every=2, callbacks=[StopsAt(step)], **changes).fit(8)
    except (ZeroDivisionError, TrainingError) as reason:
        return str(reason)
    return "not stopped"


def resumed(folder: str, **changes: Any) -> dict[str, Any]:
    return outcome(made(checkpoint=folder, every=2, callbacks=[StopsAt(-1)], **changes).fit(8))
