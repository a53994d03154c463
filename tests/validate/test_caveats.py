"""A ledger knows its model's caveats however it is fed, and no floor comes without them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from measuring import measure
from reconbound import Account, FisherAccountant, PrivateSGD, Settings
from reconbound._internal.checks import InputError
from reconbound.fisher import Private
from reconbound.validate import ReconboundWarning, check_batch
from reconbound.validate.model import NOT_CHECKED

SETTING: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "clip": "hard"}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class Tokens(nn.Module):
    """An embedding of tokens, averaged."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.table.weight.requires_grad_(trained)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens).mean(1))
        return out


class Hidden(nn.Module):
    """A kink that no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.relu(self.one(x)))
        return out


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(12, 6, generator=generator), torch.arange(12) % 3


def ledger(features: int = 6, **changes: Any) -> FisherAccountant:
    account = {"records": 12, "features": features, "steps": 1, "sample_rate": 1.0, **SETTING}
    return FisherAccountant(Account(**account), **changes)


def fed(model: nn.Module, private: Any = None, **changes: Any) -> FisherAccountant:
    """One step of a loop of one's own."""
    x, y = data()
    if isinstance(model, Tokens):
        x = torch.arange(36).reshape(12, 3) % 7
    options = {"diagonal": True} if changes.get("diagonal") else {}
    found = measure(model, losses, x, y, private=private, **SETTING, **options)
    kept = ledger(found.features, **changes)
    kept.add(torch.arange(12), found)
    kept.finish_run()
    return kept


def everything(kept: FisherAccountant) -> list[str]:
    """All that comes with a number of the ledger."""
    text = [" ".join(kept.mse_floor().notes), str(kept.mse_floor()), " ".join(kept.most_exposed(3).caveats)]
    text += [str(kept.most_exposed(3)), " ".join(kept.summary()["caveats"])]
    if kept.diagonal != "none":
        text += [" ".join(kept.feature_floors().notes), str(kept.feature_floors())]
    return text


def test_own_loop_has_token_and_table_caveats() -> None:
    kept = fed(Tokens(trained=True), Private("module", "table"), diagonal="all")
    for text in everything(kept):
        assert "not about what went into it (tokens)" in text
        assert "not covered: the parameters of module 'table' are trained" in text
    frozen = fed(Tokens(trained=False), Private("module", "table"))
    for text in everything(frozen):
        assert "(tokens)" in text
        assert "not covered" not in text


def test_own_loop_needs_box_of_embedding() -> None:
    kept = fed(Tokens(trained=False), Private("module", "table"))
    assert kept.needs_range
    with pytest.raises(InputError, match="low"):
        kept.guarantee()
    assert not fed(nn.Linear(6, 3)).needs_range


def test_unchecked_model_is_marked() -> None:
    torch.manual_seed(0)
    x, y = data()
    model = Hidden()
    for text in everything(fed(model, diagonal="all")):
        assert NOT_CHECKED in text
    with pytest.warns(ReconboundWarning, match="kinks"):
        check_batch(model, losses, x, y)
    for text in everything(fed(model)):
        assert NOT_CHECKED not in text
        assert "not proved: the model has kinks" in text
    smooth = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    check_batch(smooth, losses, x, y)
    assert fed(smooth).caveats == ()
    assert NOT_CHECKED in fed(copy.deepcopy(smooth)).caveats  # another model, of which nothing is known


def test_visible_kinks_warn_without_check() -> None:
    kept = fed(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert any("not proved: the model has kinks (ReLU at module '1')" in text for text in kept.caveats)


def test_learner_without_check_warns_too() -> None:
    x, y = data()
    settings = Settings(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, seed=1, budget="every")
    for check in (False, True):
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        learner = PrivateSGD(model, losses, x, y, settings, progress=False, check=check)
        learner.fit(2)
        assert learner.accountant is not None
        assert (NOT_CHECKED in learner.accountant.caveats) == (not check)


def test_caveats_outlive_saving_merging_and_later_steps(tmp_path: Path) -> None:
    kept = fed(Tokens(trained=True), Private("module", "table"))
    kept.save(tmp_path / "ledger")
    assert FisherAccountant.load(tmp_path / "ledger").caveats == kept.caveats
    other = ledger(kept.account.features)
    other.merge(kept)
    assert other.caveats == kept.caveats
    assert other.needs_range
    x = torch.arange(36).reshape(12, 3) % 7
    later = measure(Tokens(trained=False), losses, x, data()[1], private=Private("module", "table"), **SETTING)
    kept.add(torch.arange(12), later)  # what was said once stays
    assert any("not covered" in text for text in kept.caveats)


def test_most_exposed_is_a_list_that_prints_its_caveats() -> None:
    found = fed(Hidden()).most_exposed(2)
    assert len(found) == 2
    assert found[0].estimate <= found[1].estimate
    assert found[0].lower_limit is None  # one run
    assert "(estimate without a confidence limit)" in str(found)
    assert NOT_CHECKED in repr(found)
