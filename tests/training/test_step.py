"""Measurements of a step, beside those of the functions that they call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from reconbound.fisher import SumOptions
from reconbound.fisher.worlds import Replacement, step_distances
from reconbound.training import step
from reconbound.training.settings import Settings
from reconbound.training.step import Kept, Measurer
from small_models import cross_entropy

WORLDS = {"first": Replacement(0.0, [0]), "all": Replacement(0.0)}


class Counting(nn.Module):
    """Notes the number of rows of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        found: Tensor = self.layers(x)
        return found


@pytest.mark.parametrize(("few", "micro_batch", "rows"), [(10**9, None, [30]), (1, None, [12, 12, 6]), (1, 7, [21, 9])])
def test_large_passes_to_other_worlds_have_as_many_rows_as_a_step(
    few: int, micro_batch: int | None, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten records in three worlds: in parts of four, so that twelve rows are what a step of ten has, to a part."""
    torch.manual_seed(0)
    model, x, y = Counting().double(), torch.randn(40, 5, dtype=torch.float64), torch.randint(3, (40,))
    settings = Settings(1.0, 0.5, 0.25, clip="hard", rules=None, micro_batch=micro_batch)
    measurer = Measurer(model, cross_entropy, (x, y), settings, None, kept=Kept(worlds=WORLDS))
    assert measurer.numbers_per_record == 5 + 7 + 7 + 3 + sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(step, "FEW_NUMBERS", few)
    model.rows.clear()
    chosen = torch.arange(3, 13)
    found = measurer.distances(chosen)
    assert model.rows == rows
    whole = step_distances(
        model, cross_entropy, x[chosen], y[chosen], WORLDS, max_grad_norm=0.5, clip="hard", options=SumOptions()
    )
    torch.testing.assert_close(found.clipped_norm, whole.clipped_norm)
    for name in WORLDS:
        torch.testing.assert_close(found.other_norm[name], whole.other_norm[name])
        torch.testing.assert_close(found.squared_distance[name], whole.squared_distance[name])
