"""Trainings with Opacus on the ranks of torch.distributed, for tests/integrations/test_watch_ranks.py."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.optimizers import FSDPOptimizerFastGradientClipping
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_examples
from beside_opacus import Training, network, private
from reconbound import Replacement
from reconbound.integrations import measuring, opacus
from reconbound.integrations.loaders import DrawnBatches
from reconbound.integrations.opacus import Measuring

EPOCHS = 3
CASES: dict[str, dict[str, Any]] = {
    "hooks": {},
    "functorch": {"mode": "functorch"},
    "ghost": {"mode": "ghost"},
    "per layer": {"clipping": "per_layer", "max_grad_norm": [0.3, 0.1, 0.5, 0.2]},
    "sums": {"loss_reduction": "sum"},
    "example": {"example": True},
}


def convolutions() -> nn.Sequential:
    """The kind of network of Opacus's CIFAR-10 example, which has a distributed form, for images of 8 × 8 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))
        second = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)))
        return nn.Sequential(first, second, nn.Flatten(start_dim=1), nn.Linear(16, 10)).double()


def made(case: str, wrap: Any, **changes: Any) -> Training:
    """A training of this case. Noise is from a generator of its own, so that it is the same on one rank.

    Args:
        case: of CASES.
        wrap: what is put around the network.
        changes: other options of beside_opacus.private.
    """
    warnings.simplefilter("ignore")
    options = {"batch_size": 30, "noise_generator": torch.Generator().manual_seed(5), **CASES[case], **changes}
    mode = options.pop("mode", "hooks")
    if options.pop("example", False):
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images[:120] / 16).reshape(-1, 1, 8, 8), torch.tensor(labels[:120])
        dataset, inner = TensorDataset(x, y, torch.arange(len(x))), convolutions()
        return private(mode, network=wrap(inner), dataset=dataset, **{**options, "batch_size": 40})
    training = private(mode, network=wrap(network()), **options)
    if options.get("loss_reduction") == "sum":
        training.criterion = nn.CrossEntropyLoss(reduction="sum")
    return training


def outcome(training: Training, ledger: Any) -> dict[str, Any]:
    found = ledger.finish()
    ending = {name: p.detach().numpy() for name, p in training.network.named_parameters()}
    return {
        "parameters": {name.removeprefix("module."): value for name, value in ending.items()},
        "ledger": {name: value.numpy() for name, value in found.state().items() if name != "fingerprints"},
        "fingerprints": found.fingerprints,
        "statements": ledger.statements,
        "batches": [batch.tolist() for batch in training.batches],
        "steps": ledger.steps,
        "account": repr(found.account),
    }


def options_of(training: Training, measure: bool) -> dict[str, Any]:
    if not measure:
        return {}
    return {"measure": Measuring(training.model, EPOCHS, {"zero": Replacement(0.0, [0, 1])}, budget=0.5)}


def watched(case: str, measure: bool = False, virtual: int | None = None, folder: str = "") -> dict[str, Any]:
    training = made(case, DPDDP)
    torch.manual_seed(100 + dist.get_rank())
    measuring.new_seed = lambda: 11 + dist.get_rank()  # type: ignore[assignment]
    ledger = training.watch(**options_of(training, measure))
    training.train(EPOCHS, virtual)
    if folder:
        ledger.report(folder)
    return outcome(training, ledger)


def watched_in_epochs(apart: int) -> dict[str, Any]:
    """Each epoch divides the records otherwise; with apart = 1 each rank in another way."""
    training = made("hooks", DPDDP)
    torch.manual_seed(100 + dist.get_rank())
    ledger = training.watch()
    for epoch in range(EPOCHS):
        training.loader.batch_sampler.set_epoch(epoch + apart * dist.get_rank())
        training.train(1)
    return outcome(training, ledger)


def watched_example(folder: str) -> dict[str, Any]:
    """Opacus's distributed example, cifar10.py, with three lines more; on one rank its form without ranks.

    It sets its group up on GPUs only: `setup` and `cleanup` are ours. Each rank has a seed of its own, as processes
    of torchrun have; the noise is from a generator of its own, so that it is the same on one rank.
    """
    warnings.simplefilter("ignore")
    shared = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    place = Path(folder) / str(rank)
    place.mkdir(parents=True)
    os.chdir(place)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(100 + rank)
    batches: list[list[int]] = []
    kept: list[Any] = []
    take, watch = DrawnBatches.take, opacus.watch

    def noted(self: DrawnBatches, rows: int) -> torch.Tensor:
        records = take(self, rows)
        batches.append(records.tolist())
        return records

    def keep(optimizer: Any, *others: Any) -> Any:
        kept.extend((watch(optimizer, *others), optimizer))
        return kept[0]

    made = partialmethod(PrivacyEngine.make_private, noise_generator=torch.Generator().manual_seed(5))
    options = f"--epochs {EPOCHS} --batch-size 16 -j 0 {f'--local_rank {rank}' if shared else ''}".split()
    ours = {"setup": lambda args: (rank, "cpu", size), "cleanup": lambda: None}
    here = ((PrivacyEngine, "make_private", made), (opacus, "watch", keep), (DrawnBatches, "take", noted))
    with ExitStack() as stack:
        for owner, name, value in here:
            stack.enter_context(patch.object(owner, name, value))
        opacus_examples.run_example("cifar10", options, opacus_examples.CIFAR10, **ours)
    ledger, optimizer = kept
    found = ledger.finish()
    return {
        "parameters": [p.detach().numpy() for p in optimizer.params],
        "ledger": {name: value.numpy() for name, value in found.state().items() if name != "fingerprints"},
        "fingerprints": found.fingerprints,
        "statements": ledger.statements,
        "batches": batches,
        "steps": ledger.steps,
        "account": repr(found.account),
        "report": (place / "report" / "report.html").exists(),
    }


# --- what is refused ---------------------------------------------------------------------


def with_one_seed() -> None:
    training = made("hooks", DPDDP)
    torch.manual_seed(100)
    training.watch()


def with_empty_batches() -> None:
    """Rank 1 draws two numbers only: an empty batch comes soon."""
    training = made("hooks", DPDDP, batch_size=6)
    torch.manual_seed(100 + dist.get_rank())
    training.watch()
    training.train(200)


def with_the_loader_of_one_process() -> None:
    training = made("hooks", DPDDP)
    training.loader = private(loader=DataLoader(training.loader.dataset, batch_size=30)).loader
    training.watch()


def with_the_loader_of_ranks_only() -> None:
    alone = private(batch_size=30)
    alone.loader = made("hooks", DPDDP).loader
    alone.watch()


def with_other_noise() -> None:
    training = made("hooks", DPDDP, noise_multiplier=0.8 + 0.1 * dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())
    training.watch()


def with_sharded_parameters() -> None:
    training = made("ghost", DPDDP)
    sharded = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 15}
    training.optimizer = FSDPOptimizerFastGradientClipping(training.optimizer.original_optimizer, **sharded)
    training.watch()


def with_a_rank_that_stops() -> None:
    training = made("hooks", DPDDP)
    torch.manual_seed(100 + dist.get_rank())
    training.watch()
    training.train(1)
    if dist.get_rank() == 1:
        training.optimizer.noise_multiplier = 0.5
    training.train(1)
