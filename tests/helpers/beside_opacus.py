"""Small trainings with Opacus, whose batches, parameters and exact divergences are written down beside them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from reconbound.divergences import poisson_kl
from reconbound.integrations.opacus import OpacusLedger, watch

RECORDS, FEATURES, CLASSES = 60, 5, 3


def data(records: int = RECORDS) -> tuple[Tensor, Tensor]:
    """Returns inputs, some of them large so that the clip is at work, and targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    x *= torch.rand(records, 1, generator=generator, dtype=torch.float64) * 4
    return x, torch.randint(0, CLASSES, (records,), generator=generator)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES)).double()


def frozen_network() -> nn.Sequential:
    """Returns the network with one parameter that is not trained."""
    found = network()
    found[0].weight.requires_grad_(False)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what Opacus and torch warn of in these small trainings."""
    with warnings.catch_warnings():
        for text in ("Secure RNG", "Full backward hook", "Using a non-full backward"):
            warnings.filterwarnings("ignore", text)
        yield


@dataclass
class Training:
    """A training with Opacus, and what is written down of it.

    Attributes:
        model: as it is called, wrapped or not.
        network: the network in it.
        plain: a copy of it without Opacus's hooks.
        batches: the records of each step.
        parameters: before each step.
        norms: the clip norm of each step.
    """

    model: nn.Module
    network: nn.Module
    plain: nn.Module
    optimizer: Any
    loader: DataLoader[Any]
    criterion: Any
    engine: PrivacyEngine
    batches: list[Tensor] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def watch(self, **options: Any) -> OpacusLedger:
        return watch(self.optimizer, self.loader, self.criterion, **options)

    def train(self, epochs: int = 2, virtual: int | None = None) -> Training:
        """Trains; the data say which records are in a batch, which the ledger does not know."""
        limited = BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=virtual or 1, optimizer=self.optimizer
        )
        for _ in range(epochs):
            with quiet(), limited if virtual else nullcontext(self.loader) as loader:
                self.epoch(loader)
        return self

    def epoch(self, loader: Any) -> None:
        rows: list[Tensor] = []
        for x, y, numbers in loader:
            before = {name: p.detach().clone() for name, p in self.network.named_parameters()}
            rows.append(numbers.long())
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            bound = float(self.optimizer.max_grad_norm)
            self.optimizer.step()
            if not self.optimizer._is_last_step_skipped:
                self.batches.append(torch.cat(rows))
                self.parameters.append(before)
                self.norms.append(bound)
                rows = []


def private(mode: str = "hooks", **changes: Any) -> Training:
    """Makes a training private: options of make_private, and network=, dataset=, loader=, seed= ... of another one."""
    torch.manual_seed(changes.pop("seed", 3))
    inner = changes.pop("network", None) or network()
    x, y = data()
    dataset = changes.pop("dataset", None) or TensorDataset(x, y, torch.arange(len(x)))
    made = changes.pop("optimizer", None) or torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.5)
    loader = changes.pop("loader", None) or DataLoader(dataset, batch_size=changes.pop("batch_size", 12))
    plain = copy.deepcopy(inner)
    with quiet():
        engine = changes.pop("engine", None) or PrivacyEngine()
    criterion = changes.pop("criterion", None) or nn.CrossEntropyLoss()
    chosen = {"noise_multiplier": 0.8, "max_grad_norm": 1.0, "grad_sample_mode": mode, **changes}
    with quiet():
        found = engine.make_private(module=inner, optimizer=made, criterion=criterion, data_loader=loader, **chosen)
    outer, optimizer, *ghost, loader = found
    model = outer if isinstance(outer, nn.Module) else inner
    return Training(model, inner, plain, optimizer, loader, ghost[0] if ghost else criterion, engine)


def gradients(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Returns each record's gradient by parameter name, rows of float64, formed by torch.func."""
    trained = {name: value for name, value in parameters.items() if dict(model.named_parameters())[name].requires_grad}
    frozen = {name: value for name, value in parameters.items() if name not in trained}

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, {**params, **frozen}, x[None])
        return nn.functional.cross_entropy(outputs, y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(trained, x, y)
    return {name: g.flatten(1).double() for name, g in each.items()}


def exact_divergence(made: Training, rate: float, bound: Any = None, noise: float = 0.8, of: Any = None) -> Tensor:
    """Returns Σ_t k_q(‖g̃‖/σC)/q over the steps that a record takes part in, from gradients formed by torch.func."""
    x, y = of or data()
    total = torch.zeros(RECORDS, dtype=torch.float64)
    for batch, parameters, norm in zip(made.batches, made.parameters, made.norms, strict=True):
        if len(batch):
            each = [g.norm(dim=1) for g in gradients(made.plain, parameters, x[batch], y[batch]).values()]
            if bound is None:
                clipped = torch.stack(each).norm(dim=0).clamp(max=norm)
            else:
                clipped = torch.stack([g.clamp(max=c) for g, c in zip(each, bound, strict=True)]).norm(dim=0)
            total[batch] += poisson_kl(clipped / (noise * norm), rate) / rate
    return total


def measured(ledger: OpacusLedger) -> Tensor:
    """Returns D of each record, 0 where it was never drawn, without the mechanism's cap."""
    return ledger.finish().divergences.estimates("removed").mean


def loader_of(**options: Any) -> DataLoader[Any]:
    x, y = data()
    return DataLoader(TensorDataset(x, y, torch.arange(60)), batch_size=12, **options)
