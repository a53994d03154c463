"""Whole trainings with Opacus, each with a report: its own examples with three lines more, and three others."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from beside_opacus import quiet
from opacus_examples import CIFAR10, example, run_example
from reconbound.divergences import poisson_kl
from reconbound.integrations.opacus import OpacusLedger, watch
from reconbound.report.folder import read_audit

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")

NOISE, BOUND = 0.9, 0.7


#: Of each example of Opacus: its options, and the lines after which `watch` and `report` stand.
EXAMPLES: dict[str, tuple[list[str], dict[str, str]]] = {
    "mnist": (
        ["--device", "cpu", "-n", "2", "-b", "8"],
        {
            "                max_grad_norm=args.max_per_sample_grad_norm,\n            )\n": (
                "            ledger = watch(optimizer, train_loader, nn.CrossEntropyLoss())\n"
            ),
            "        run_results.append(test(model, device, test_loader))\n": '        ledger.report("report")\n',
        },
    ),
    "cifar10": (
        ["--device", "cpu", "--epochs", "2", "--batch-size", "8", "-j", "1"],
        CIFAR10,
    ),
    "char-lstm-classification": (
        ["--device", "cpu", "--epochs", "2", "-b", "8", "--data-root", "names", "--hidden-size", "4"],
        {
            "            max_grad_norm=args.max_per_sample_grad_norm,\n        )\n": (
                "        ledger = watch(optimizer, train_loader, criterion)\n"
            ),
            "    mean_acc = test(model, test_loader, privacy_engine, args.delta, device=device)\n": (
                '    ledger.report("report")\n'
            ),
        },
    ),
}


@pytest.mark.filterwarnings("ignore:.*pin_memory", "ignore:.*pinned memory", "ignore:Converting a tensor")
@pytest.mark.filterwarnings("ignore:batches are padded")
@pytest.mark.parametrize("name", EXAMPLES)
def test_opacus_own_examples_with_three_lines_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not example(name).exists():
        pytest.skip("this Opacus came without its examples")
    (tmp_path / "names").mkdir()
    for language in ("one", "two"):
        (tmp_path / "names" / language).write_text("".join(f"{'name' * (1 + k % 3)}\n" for k in range(30)))
    monkeypatch.chdir(tmp_path)
    run_example(name, *EXAMPLES[name])
    run, leakage = read_audit(tmp_path / "report")
    kind = "tokens" if "lstm" in name else "image"
    assert (run.data["kind"], run.data["records"], run.mechanism["steps"]) == (kind, 48, 12)
    assert leakage.nats is not None
    assert float(leakage.nats.max()) > 0


class Exact:
    """Adds up the divergences of a training from gradients that autograd forms record by record."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, rate: float) -> None:
        self.model, self.x, self.y, self.rate = copy.deepcopy(model), x, y, rate
        self.nats = torch.zeros(len(x), dtype=torch.float64)

    def step(self, records: list[int], model: nn.Module) -> None:
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for i in records:
            loss = nn.functional.cross_entropy(self.model(self.x[i : i + 1]), self.y[i : i + 1])
            norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]).double().norm()
            self.nats[i] += float(poisson_kl(norm.clamp(max=BOUND) / (NOISE * BOUND), self.rate)) / self.rate


def train(
    model: nn.Module, x: Tensor, y: Tensor, virtual: int | None = None, mode: str = "hooks"
) -> tuple[OpacusLedger, Exact]:
    """Trains two epochs with Adam; the ledger and the exact sums."""
    torch.manual_seed(0)
    plain = copy.deepcopy(model)
    numbers = torch.arange(len(x))
    trained = [p for p in model.parameters() if p.requires_grad]
    with quiet():
        wrapped, optimizer, *ghost, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.Adam(trained, lr=0.01), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(x, y, numbers), batch_size=8), noise_multiplier=NOISE,
            max_grad_norm=BOUND, grad_sample_mode=mode,
        )  # fmt: skip
    criterion = ghost[0] if ghost else nn.CrossEntropyLoss()
    ledger = watch(optimizer, loader, criterion)
    exact = Exact(plain, x, y, ledger.accountant.account.sample_rate)
    records: list[int] = []
    for _ in range(2):
        limit = BatchMemoryManager(data_loader=loader, max_physical_batch_size=virtual or 10**6, optimizer=optimizer)
        with limit as physical:
            for inputs, targets, drawn in physical:
                records += drawn.long().tolist()
                optimizer.zero_grad()
                criterion(wrapped(inputs), targets).backward()
                before = copy.deepcopy([p.detach() for p in model.parameters()])
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    after = copy.deepcopy([p.detach() for p in model.parameters()])
                    for p, value in zip(model.parameters(), before, strict=True):
                        p.data.copy_(value)
                    exact.step(records, model)
                    for p, value in zip(model.parameters(), after, strict=True):
                        p.data.copy_(value)
                    records = []
    return ledger, exact


def check(ledger: OpacusLedger, exact: Exact, folder: Path, kind: str) -> None:
    found = ledger.finish().divergences.estimates("removed").mean
    torch.testing.assert_close(found, exact.nats, rtol=1e-6, atol=0)
    ledger.report(folder)
    run, leakage = read_audit(folder)
    assert run.data["kind"] == kind
    assert leakage.nats is not None
    assert float(leakage.nats.max()) > 0


def test_convolutions_with_group_norm_virtual_batches_and_adam(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(*first, nn.Conv2d(4, 6, 2), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    x, y = torch.rand(40, 1, 8, 8, dtype=torch.float64), torch.arange(40) % 3
    ledger, exact = train(model.double(), x, y, virtual=3)
    check(ledger, exact, tmp_path / "out", "image")


class Recurrent(nn.Module):
    """A character-level recurrent model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(20, 4), DPLSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(x))[0][:, -1])


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_recurrent_model_with_private_tokens(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    x, y = torch.randint(0, 20, (40, 6)), torch.arange(40) % 3
    ledger, exact = train(Recurrent().double(), x, y, mode=mode)
    check(ledger, exact, tmp_path / "out", "tokens")


class Adapted(nn.Module):
    """A small frozen transformer, with an adapter of low rank and a head that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.mixed = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        for p in self.parameters():
            p.requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, -1)
        hidden = hidden + self.mixed(nn.functional.scaled_dot_product_attention(q, k, v))
        return self.head((hidden + self.up(torch.relu(self.down(hidden)))).mean(1))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_frozen_transformer_with_adapters(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    x, y = torch.randint(0, 20, (40, 6)), torch.arange(40) % 3
    ledger, exact = train(Adapted().double(), x, y, virtual=5, mode=mode)
    check(ledger, exact, tmp_path / "out", "tokens")
