"""Trainings that tests/training/test_ranks.py runs on ranks; what they return has no tensors of torch's."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from learning import Kept, data, learner, network
from reconbound import Replacement
from reconbound.training import step
from reconbound.training.ranks import TrainingError
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
    return learner(network().double(), records=(x.double() * 3, y), **options)


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


# --- what goes wrong ---------------------------------------------------------------------


def with_a_bad_record(record: int) -> None:
    """One record, of one rank's shard, has a loss that is not finite."""
    x, y = data()
    x[record] = torch.inf
    learner(network().double(), records=(x.double(), y), progress=False).fit(30)


def with_a_self_test_that_fails_on(bad: int) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise ModelError("the sums of this machine are wrong")

    if rank() == bad:
        step.check_batch = fails  # type: ignore[assignment]
    learner(network().double(), progress=False, check=True, records=(data()[0].double(), data()[1]))


def with_an_evaluation_that_fails_on(bad: int) -> None:
    def evaluate(model: Any) -> dict[str, float]:
        if rank() == bad:
            raise ZeroDivisionError("no test records here")
        return {}

    made(evaluate=evaluate, evaluate_every=3).fit(8)


def with_a_rank_that_dies(bad: int) -> None:
    class Dies(Callback):
        def on_step(self, learner: Any) -> None:
            if learner.step == 3 and rank() == bad:
                os._exit(1)

    made(callbacks=[Dies()]).fit(8)


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
