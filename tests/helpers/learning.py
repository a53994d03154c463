"""A small problem for the tests of the learner: three classes, four features, one hidden layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reconbound._internal.rng import derive
from reconbound.training.noise import draw
from reconbound.training.private_sgd import PrivateSGD, Settings

RECORDS, FEATURES, CLASSES = 24, 4, 3


def data(seed: int = 0, records: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (records,), generator=generator)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def flat(model: nn.Module) -> Tensor:
    """Returns all parameters of a model in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def settings(**changes: Any) -> Settings:
    chosen: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.25,
        "seed": 7,
        "budget": 1.0,
    }
    return Settings(**{**chosen, **changes})


def learner(
    model: nn.Module | None = None, *, records: Any = None, kind: type[PrivateSGD] = PrivateSGD, **options: Any
) -> PrivateSGD:
    """A learner on the small problem: settings by their names, everything else as options of PrivateSGD."""
    names = Settings.__dataclass_fields__
    chosen = {name: options.pop(name) for name in list(options) if name in names}
    options.setdefault("check", False)
    x, y = data() if records is None else records
    return kind(model or network(), losses, x, y, settings(**chosen), **options)


class SameNoise(PrivateSGD):
    """Draws noise and batches from the seed, run and step alone: to compare settings, never to release anything."""

    def _begin_run(self) -> None:
        self.run_seed = derive(self.seed, "run", self.run)

    def _noise(self, total: Tensor) -> Tensor:
        return draw(derive(self.run_seed, "noise", self.step), len(total), total.device)


class Kept(PrivateSGD):
    """Keeps the seed of each run, and of each step the noise and the batch."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.run_seeds: list[int] = []
        self.drawn: list[Tensor] = []
        self.sums: list[Tensor] = []

    def _begin_run(self) -> None:
        super()._begin_run()
        self.run_seeds.append(self.run_seed)

    def _noise(self, total: Tensor) -> Tensor:
        self.sums.append(total)
        self.drawn.append(super()._noise(total))
        return self.drawn[-1]

    @property
    def batches(self) -> list[list[int]]:
        """Returns the batches of all steps of all runs."""
        return [self.sampler.batch(seed, step).tolist() for seed in self.run_seeds for step in range(self.steps)]


def same_state(a: PrivateSGD, b: PrivateSGD) -> bool:
    """Parameters, optimizer's place and ledger equal bit for bit."""
    models = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    equal = all(torch.equal(x, y) for x, y in models) and (a.run, a.step) == (b.run, b.step)
    if a.accountant is None or b.accountant is None:
        return equal and a.accountant is b.accountant
    ledgers = zip(a.accountant.state().items(), b.accountant.state().items(), strict=True)
    return equal and all(m == n and torch.equal(x, y) for (m, x), (n, y) in ledgers)
