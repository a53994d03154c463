"""The report of a training with Opacus: the same folder and pages as an audit's, whatever the records are."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from beside_opacus import RECORDS, data, private
from reconbound import Replacement
from reconbound._internal.checks import InputError
from reconbound.data import Dataset as Records
from reconbound.data import Feature
from reconbound.integrations.opacus import Measuring, OpacusLedger
from reconbound.integrations.reports import records_of
from reconbound.report.folder import read_audit
from reconbound.report.view import View

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")


def watched(epochs: int = 2, seed: int = 3) -> OpacusLedger:
    made = private(noise_multiplier=2.0, seed=seed)
    ledger = made.watch()
    made.train(epochs)
    return ledger


def test_report_has_the_ledgers_chances(tmp_path: Path) -> None:
    ledger = watched()
    page = ledger.report(tmp_path / "out", name="a name")
    run, leakage = read_audit(tmp_path / "out")
    account = ledger.accountant.account
    assert run.mechanism["sample_rate"] == account.sample_rate
    assert (run.mechanism["steps"], run.mechanism["clip"], run.mechanism["runs"]) == (10, "hard", 1)
    assert leakage.nats is not None
    assert torch.equal(leakage.nats[0], ledger.divergence())
    lead = View(run, leakage).success.leading
    assert lead is not None
    np.testing.assert_allclose(lead.chances, ledger.max_success(0.1).value)
    assert page == tmp_path / "out" / "report.html"
    assert page.stat().st_mode & 0o777 == 0o600
    for name in ("report.html", "report-public.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "secure_mode=False" in text
        assert "a name" in text
    assert ledger.report(tmp_path / "out") == page  # once more into the same folder
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_public_part_says_nothing_of_single_records(tmp_path: Path) -> None:
    """run.json and the public page of two trainings on data of other values, and other outcomes, are the same."""
    pages = []
    for k in (1.0, 3.0):
        x, y = data()
        made = private(dataset=TensorDataset(k * x, y, torch.arange(60)), noise_multiplier=2.0)
        ledger = made.watch()
        made.train(1)
        ledger.report(tmp_path / str(k))
        pages.append([(tmp_path / str(k) / name).read_bytes() for name in ("run.json", "report-public.html")])
    assert pages[0] == pages[1]


class Texts(Dataset[Any]):
    """Texts of two tokens, but for the last one; each with its class."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.arange(self.last if i == RECORDS - 1 else 2) + i % 3, torch.tensor(i % 3)


def padded(texts: Any) -> tuple[Tensor, Tensor]:
    x, y = zip(*texts, strict=True)
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(y)


class Bag(nn.Module):
    """A table of tokens, of which 0 counts for nothing, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x).sum(1))


def test_public_part_does_not_tell_the_longest_text(tmp_path: Path) -> None:
    """Its length stood in run.json, and that batches are padded, where only one text is longer than the others."""
    pages = []
    for last in (2, 7):
        made = private(
            network=Bag(), loader=DataLoader(Texts(last), batch_size=12, collate_fn=padded), noise_multiplier=2.0
        )
        ledger = made.watch() if last == 2 else _warned(made)
        for x, y in made.loader:
            made.optimizer.zero_grad()
            made.criterion(made.model(x), y).backward()
            made.optimizer.step()
        ledger.report(tmp_path / str(last))
        pages.append([(tmp_path / str(last) / name).read_bytes() for name in ("run.json", "report-public.html")])
        assert b"padded to the longest record" in pages[-1][1]
    assert pages[0] == pages[1]


def _warned(made: Any) -> OpacusLedger:
    with pytest.warns(UserWarning, match="padded to the longest record"):
        return made.watch()  # type: ignore[no-any-return]


@pytest.mark.parametrize("information", [False, True])
def test_public_part_does_not_tell_that_records_are_the_same(information: bool, tmp_path: Path) -> None:
    """How many records have exact copies stood in run.json: one record more or less showed itself in it."""
    pages = []
    for copied in (False, True):
        x, y = data()
        if copied:
            x[-1], y[-1] = x[0], y[0]
        network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        made = private(network=network, dataset=TensorDataset(x, y, torch.arange(60)), noise_multiplier=2.0)
        worlds = {"first": Replacement(0.0, [0])}
        ledger = made.watch(measure=Measuring(network, epochs=1, worlds=worlds, information=information))
        made.train(1)
        ledger.report(tmp_path / str(copied))
        assert any("exact copies" in caveat for caveat in ledger.accountant.caveats) == copied
        pages.append([(tmp_path / str(copied) / name).read_bytes() for name in ("run.json", "report-public.html")])
    assert pages[0] == pages[1]


def test_all_that_must_hold_is_on_the_public_page(tmp_path: Path) -> None:
    """A text of more than 600 characters is cut short on the pages."""
    ledger = watched()
    ledger.report(tmp_path / "out")
    for name in ("report.html", "report-public.html"):
        page = " ".join(html.unescape((tmp_path / "out" / name).read_text()).split())
        for statement in ledger.statements:
            assert statement in page, (name, statement)


def test_limits_come_from_several_trainings(tmp_path: Path) -> None:
    first, *others = [watched(30, seed) for seed in range(3)]
    for other in others:
        first.finish().merge(other.finish())
    first.report(tmp_path / "out")
    run, leakage = read_audit(tmp_path / "out")
    assert run.mechanism["runs"] == 3
    assert leakage.nats_upper is not None
    assert bool(leakage.nats_upper.isfinite().any())


class Ragged(Dataset[Any]):
    """Texts of different lengths, each with a class."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.arange(1 + i % 4), 10 * (i % 3)


class Odd(Ragged):
    """Images of different sizes."""

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(1, 3, 3 + i % 2), 0


def test_records_are_images_texts_or_rows() -> None:
    x, y = data()
    kinds = {
        "image": TensorDataset(x[:, :4].reshape(-1, 1, 2, 2), y),
        "tokens": Ragged(),
        "table": TensorDataset(x, x[:, 0]),
        "unlabelled": TensorDataset(x),
    }
    found = {kind: records_of(DataLoader(dataset), "data") for kind, dataset in kinds.items()}
    assert [f.kind for f in found.values()] == ["image", "tokens", "table", "table"]
    assert all(len(f.inputs) == RECORDS for f in found.values())
    assert float(found["image"].inputs.min()) == 0
    assert float(found["image"].inputs.max()) == 1
    assert found["tokens"].inputs[2].tolist() == [0, 1, 2, 0]
    assert found["tokens"].class_names == ("0", "10", "20")
    assert found["table"].task == "number"
    rows = found["table"]
    np.testing.assert_allclose(rows.offset + rows.scale * rows.inputs, x.numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="dataset must be given"):
        records_of(DataLoader(Odd()), "data")


def test_owners_names_and_ranges_are_taken(tmp_path: Path) -> None:
    x, y = data()
    flat = x.float().numpy()
    features = [Feature(f"length {k}", "cm", -20.0, 20.0) for k in range(5)]
    own = Records("lengths", "table", flat, y.numpy(), flat[:0], y.numpy()[:0], features, class_names=("a", "b", "c"))
    ledger = watched()
    ledger.report(tmp_path / "out", dataset=own)
    assert read_audit(tmp_path / "out")[0].data["ranges"]["length 0"] == [-20.0, 20.0]
    few = Records("lengths", "table", flat[:9], y.numpy()[:9], flat[:0], y.numpy()[:0], features, class_names=("a",))
    with pytest.raises(InputError, match="dataset must have the ledger's 60 records, got 9"):
        ledger.report(tmp_path / "out", dataset=few)
    with pytest.raises(InputError, match="dataset must be what load_dataset returns"):
        ledger.report(tmp_path / "out", dataset=flat)  # type: ignore[arg-type]


def test_folder_of_an_audit_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="folder must not be the folder of an audit"):
        watched().report(tmp_path)


@pytest.mark.parametrize("name", ["report.html", "run.json", "notes.txt", "model.safetensors"])
def test_folder_with_something_else_is_left_alone(name: str, tmp_path: Path) -> None:
    """A report.html of somebody's own was removed, and the folder closed to others."""
    (tmp_path / name).write_text("all my work")
    tmp_path.chmod(0o755)
    with pytest.raises(InputError, match="folder must be a new or empty folder, or that of an earlier report"):
        watched().report(tmp_path)
    assert (tmp_path / name).read_text() == "all my work"
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_report_needs_a_step(tmp_path: Path) -> None:
    made = private(network=nn.Sequential(nn.Linear(5, 3)).double())
    with pytest.raises(InputError, match="ledger must have seen a step"):
        made.watch().report(tmp_path)
