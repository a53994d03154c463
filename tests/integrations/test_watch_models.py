"""Models, data and reports beside Opacus that are easily got wrong: the ledger is right, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.schedulers import LambdaGradClip
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from beside_opacus import data, exact_divergence, loader_of, measured, network, private, quiet
from reconbound._internal.checks import InputError
from reconbound.integrations.opacus import watch
from reconbound.report.folder import read_audit

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")


class Packed(nn.Module):
    """Packs sequences by length, which Opacus's gradients then are ordered by."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = DPLSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + x.argmax(1)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0][-1])


def test_packed_sequences_are_refused() -> None:
    x, y = data()
    dataset = TensorDataset(x.float(), y, torch.arange(60))
    made = private(network=Packed(), dataset=dataset)
    ledger = made.watch()
    with pytest.raises(InputError, match="model must have padded sequences, not packed ones"):
        made.train(1)
    made.network.eval()
    made.model(x.float())
    made.network.train()
    with torch.no_grad():
        made.model(x.float())
    ledger._detach()
    made.train(1)


class Tied(nn.Module):
    """Uses one weight for tokens and for outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))


def test_tied_parameters_are_exact() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Tied().double()
    x, y = torch.arange(240).reshape(60, 4) % 7 % 3, torch.arange(60) % 3
    made = private(network=model, dataset=TensorDataset(x, y, torch.arange(60)))
    ledger = made.watch()
    made.train()
    found = ledger.finish().divergences.estimates("removed").mean
    assert int((found > 0).sum()) > 50
    exact = exact_divergence(made, ledger.accountant.account.sample_rate, of=(x, y))
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_summed_losses_are_exact(mode: str) -> None:
    made = private(mode, loss_reduction="sum", criterion=nn.CrossEntropyLoss(reduction="sum"))
    ledger = made.watch()
    assert "the noisy sum is not divided" in ledger.statements[1]
    made.train()
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


def test_workers_that_persist_are_exact() -> None:
    made = private(loader=loader_of(num_workers=1, persistent_workers=True))
    ledger = made.watch()
    made.train()
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    x, y = data()
    made = private(network=network().to(dtype), dataset=TensorDataset(x.to(dtype), y, torch.arange(60)))
    made.watch()
    with pytest.raises(InputError, match="model must have gradients in float32 or float64"):
        made.train(1)


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_target_epsilon_is_that_of_the_ledger() -> None:
    inner, x = network(), data()
    with quiet():
        model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
            module=inner, optimizer=torch.optim.SGD(inner.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*x, torch.arange(60)), batch_size=12), target_epsilon=4.0,
            target_delta=1e-5, epochs=3, max_grad_norm=1.0,
        )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    ledger = watch(optimizer, loader, criterion)
    for _ in range(3):
        for inputs, targets, _ in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    assert ledger.get_epsilon(1e-5) == pytest.approx(4.0, abs=0.05)


class Named(Dataset[Any]):
    """Records as dictionaries, as many libraries give them."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x, y = data()
        return {"inputs": x[i], "labels": y[i], "number": torch.tensor(i)}


def test_records_that_are_dictionaries_are_exact(tmp_path: Path) -> None:
    made = private(loader=DataLoader(Named(), batch_size=12))
    ledger = made.watch()
    for batch in made.loader:
        made.epoch([batch.values()])
    exact = exact_divergence(made, ledger.accountant.account.sample_rate)
    torch.testing.assert_close(measured(ledger), exact, rtol=1e-6, atol=0)
    with pytest.raises(InputError, match=r"dataset must be given: .* got 'a dict first"):
        ledger.report(tmp_path / "out")


def sorted_by_size(records: list[Any]) -> Any:
    return torch.utils.data.default_collate(sorted(records, key=lambda record: float(record[0].sum()) > 4))


def test_loader_that_moves_few_records_is_refused() -> None:
    x, _ = data()
    assert 0 < int((x.sum(1) > 4).sum()) < 20
    with pytest.raises(InputError, match=r"data_loader must keep the order .* got 'sorted_by_size'"):
        private(loader=loader_of(collate_fn=sorted_by_size)).watch()


class Stream(IterableDataset[Any]):
    """Records without numbers."""

    def __iter__(self) -> Any:
        return iter([])


def test_streams_are_refused() -> None:
    made = private()
    made.loader = DataLoader(Stream())
    with pytest.raises(InputError, match="data_loader must have a data set whose records have numbers"):
        made.watch()


# --- reports along the way -----------------------------------------------------------------


def test_report_of_each_epoch_has_its_steps(tmp_path: Path) -> None:
    made = private(noise_multiplier=2.0)
    ledger = made.watch()
    for epoch in range(1, 3):
        made.train(1)
        ledger.report(tmp_path / "out")
        run, leakage = read_audit(tmp_path / "out")
        assert run.mechanism["steps"] == 5 * epoch
        assert leakage.nats is not None
        assert torch.equal(leakage.nats[0], ledger.divergence())
    assert ledger.finish().account.steps == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["divided by the fixed number 12.", "clipped to norm C by the hard clip"]),
        ({"loss_reduction": "sum", "criterion": nn.CrossEntropyLoss(reduction="sum")}, ["The sum is not divided."]),
        ({"clipping": "per_layer", "max_grad_norm": [0.5] * 4}, ["for each tensor of parameters to a norm of its own"]),
    ],
)
def test_pages_name_the_divisor_and_the_clip(changes: dict[str, Any], said: list[str], tmp_path: Path) -> None:
    made = private(noise_multiplier=2.0, **changes)
    ledger = made.watch()
    made.train(1)
    ledger.report(tmp_path / "out")
    for name in ("report.html", "report-public.html"):
        text = " ".join((tmp_path / "out" / name).read_text().split())
        for sentence in said:
            assert sentence in text
        assert "number qN" not in text


def test_pages_say_that_the_clip_norm_changed(tmp_path: Path) -> None:
    made = private(noise_multiplier=2.0)
    ledger = made.watch()
    schedule = LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 0.5**epoch)
    for _ in range(2):
        made.train(1)
        schedule.step()
    ledger.report(tmp_path / "out")
    for name in ("report.html", "report-public.html"):
        text = " ".join((tmp_path / "out" / name).read_text().split())
        assert "C changed during the training, from 0.5 to 1; the noise was the same multiple" in text
        assert "2 × 1 on the sum" not in text
    assert "standard deviation 2 × C on the sum" in (tmp_path / "out" / "report.html").read_text()
