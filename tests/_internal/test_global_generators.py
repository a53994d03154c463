"""Measuring never draws from a global generator: what is trained is the same with and without it, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import auditing
from learning import FEATURES, RECORDS, data, learner, losses, network
from measuring import measure, sum_clipped
from reconbound import PrivateLogisticRegression, PrivateRidge
from reconbound._internal.rng import random_states_kept
from reconbound.accounting.accountant import Account, Chosen, FisherAccountant
from reconbound.attacks import SGDTrials, simulate_sgd
from reconbound.auditing.models import check_model as check_audited_model
from reconbound.auditing.models import make_model, score
from reconbound.fisher import CoordinateOptions, dense_information
from reconbound.fisher.reference import coordinate_information
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training.settings import Settings
from reconbound.validate import check_batch, check_model

MECHANISM: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}


def states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), kind, keys.tolist(), rest, random.getstate()


@contextmanager
def untouched() -> Iterator[None]:
    torch.manual_seed(5)
    np.random.seed(6)  # noqa: NPY002
    random.seed(7)
    before = states()
    yield
    assert states() == before


class Drawing(nn.Module):
    """Draws from every global generator at each call, and does nothing with what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found + 0 * (float(torch.rand(())) + np.random.rand() + random.random())  # noqa: NPY002


def ledger() -> FisherAccountant:
    found = FisherAccountant(Account(1.0, 1.0, 1.0, records=RECORDS, features=FEATURES, steps=2), diagonal=Chosen(2, 2))
    x, y = data()
    for _ in range(3):
        for _ in range(2):
            found.add(torch.arange(RECORDS), measure(network(), losses, x, y, **MECHANISM, diagonal=True))
        found.finish_run()
    found.mse_floor()
    found.most_exposed(3)
    found.upper(warn=False)
    found.summary()
    return found


def fleet() -> None:
    settings = [Settings(1.0, 1.0, 0.3, seed=3, budget=1.0) for _ in range(2)]
    list(Fleet(network, losses, *data(), settings, at=[2]).run(0, evaluate=lambda model: 0.0))


def linear(kind: Any) -> Callable[[], Any]:
    x, y = data()
    options = {"data_norm": 1.0, "noise_std": 0.1} | ({"target_bound": 1.0} if kind is PrivateRidge else {})

    def work() -> None:
        model = kind(**options).fit(x.numpy(), y.numpy().clip(0, 1))
        model.leakage(x.numpy(), y.numpy().clip(0, 1))

    return work


def attack() -> None:
    x, y = data(records=5)
    settings = Settings(1.0, 1.0, 0.5, rules=None)
    simulate_sgd(network(), losses, x, y, settings, 1, SGDTrials(2, 2, progress=False))


WORK: dict[str, Callable[[], Any]] = {
    "information": lambda: measure(network(), losses, *data(), **MECHANISM),
    "probes in weights": lambda: measure(network(), losses, *data(), **MECHANISM, probe="weights", probes=3),
    "power iteration": lambda: measure(network(), losses, *data(), **MECHANISM, spectral=True),
    "diagonal": lambda: measure(network(), losses, *data(), **MECHANISM, diagonal=True),
    "deflated": lambda: measure(network(), losses, *data(), **MECHANISM, deflate=3),
    "generic": lambda: measure(network(), losses, *data(), **MECHANISM, method="generic"),
    "a model that draws": lambda: measure(Drawing(), losses, *data(), **MECHANISM, checked=True),
    "dense, a model that draws": lambda: dense_information(Drawing(), losses, *data(), **MECHANISM),
    "dense": lambda: dense_information(network(), losses, *data(), **MECHANISM),
    "coordinates": lambda: coordinate_information(
        network(), losses, *data(), **MECHANISM, coordinates=CoordinateOptions(count=2)
    ),
    "sum": lambda: sum_clipped(network(), losses, *data(), max_grad_norm=1.0),
    "check_model": lambda: check_model(network()),
    "check_batch": lambda: check_batch(network(), losses, *data()),
    "check_batch, a model that draws": lambda: check_batch(Drawing(), losses, *data()),
    "ledger": ledger,
    "learner, checked": lambda: learner(check=True),
    "learner": lambda: learner(check=True, spectral=True, diagonal=Chosen(2, 2)).repeat(3, 3),
    "every batch": lambda: learner(budget="every", probes=2).fit(3),
    "a learner of a model that draws": lambda: learner(Drawing(), rules=()),
    "some losses": lambda: learner(Drawing()).measurer.some_losses(),
    "fleet": fleet,
    "logistic": linear(PrivateLogisticRegression),
    "ridge": linear(PrivateRidge),
    "attack": attack,
    "audit's check_model": lambda: check_audited_model(auditing.people(), "linear"),
    "score": lambda: score(auditing.people(), make_model(auditing.people(), "mlp", seed=1)),
}


@pytest.mark.filterwarnings("ignore:.*drowns:UserWarning", "ignore:the forward pass:UserWarning")
@pytest.mark.parametrize("name", WORK)
def test_global_generators_are_unchanged(name: str) -> None:
    with untouched():
        WORK[name]()


def test_a_seeded_block_draws_the_same_and_restores_the_generators() -> None:
    drawn = []
    for seed in (3, 3, 2**63 + 3, 4):  # torch takes 63 bits
        with untouched(), random_states_kept(seed):
            drawn.append(torch.randn(2).tolist())
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]


def test_audit_leaves_global_generators(tmp_path) -> None:
    from reconbound.auditing.run import run_audit

    with untouched():
        run_audit(auditing.people(), auditing.options(runs=2, steps=4), tmp_path / "a", show=False)


class Loop:
    """A loop of one's own: dropout and shuffling from torch's generator, noise on the inputs from NumPy's."""

    def __init__(self, *, measured: bool) -> None:
        torch.manual_seed(0)
        np.random.seed(1)  # noqa: NPY002
        random.seed(2)
        x, y = data()
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(len(x))), 6, shuffle=True)
        size = {"records": RECORDS, "features": FEATURES, "steps": 4 * len(loader)}
        kept = FisherAccountant(Account(1.0, 1.0, 0.25, "shuffle", **size))
        for _ in range(4):
            for (batch,) in loader:
                if measured:
                    kept.add(batch, measure(model, losses, x[batch], y[batch], **MECHANISM, spectral=True))
                    check_batch(model, losses, x[batch], y[batch])
                jitter = torch.from_numpy(np.random.normal(size=(len(batch), FEATURES))).float() * random.random()  # noqa: NPY002
                hidden = nn.functional.dropout(model[1](model[0](x[batch] + jitter)), 0.5)
                optimizer.zero_grad()
                losses(model[2](hidden), y[batch]).mean().backward()
                optimizer.step()
        self.parameters = [p.detach().clone() for p in model.parameters()]
        self.ends = states()


def test_measuring_leaves_own_loop_unchanged() -> None:
    plain, measured = Loop(measured=False), Loop(measured=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters, measured.parameters, strict=True))
    assert plain.ends == measured.ends


def test_measuring_leaves_opacus_training_unchanged() -> None:
    opacus = pytest.importorskip("opacus")
    ends = []
    for measured in (False, True):
        torch.manual_seed(3)
        x, y = data()
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
        with pytest.warns(UserWarning, match=".*"):  # of Opacus's own: secure mode is off
            private, optimizer, loader = opacus.PrivacyEngine().make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
                noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
            )  # fmt: skip
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                for a, b in loader:
                    if measured:
                        measure(private, losses, a, b, **MECHANISM)
                        check_batch(private, losses, a, b)
                    optimizer.zero_grad()
                    losses(private(a), b).mean().backward()
                    optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_probes_are_new_each_time_unless_a_generator_is_given() -> None:
    """Seeding torch's global generator has no part in them; passing a generator repeats them."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(measure(network(), losses, *data(), **MECHANISM).across)
    assert not torch.equal(*found)
    again = [
        measure(network(), losses, *data(), **MECHANISM, generator=torch.Generator().manual_seed(1)).across
        for _ in range(2)
    ]
    assert torch.equal(*again)
