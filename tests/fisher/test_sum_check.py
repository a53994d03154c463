"""The test that a training makes of its own gradient sums before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_clipped_contributions import Difference, models, near_copies, output
from torch import Tensor, nn

from fuzz_models import Turned
from measuring import sum_clipped
from reconbound import PrivateSGD, Settings
from reconbound.fisher.passes import by_layer as gradients
from reconbound.fisher.passes import mixed, recorder
from reconbound.fisher.sums import check_sums
from reconbound.validate import ModelError


def losses(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, reduction="none")


def batch(records: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(records, 5) * torch.logspace(-2, 2, records)[:, None], torch.arange(records) % 3


def test_records_in_another_order_inside_the_model_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses do not mix, but the layers' norms belong to different records: a record was let through above C."""
    torch.manual_seed(0)
    model, (x, y) = Turned(), batch()
    options: Any = {"max_grad_norm": 1.0, "clip": "hard"}
    with pytest.raises(ValueError, match=r"no layer rule covers .*: the input of second\.weight has other values"):
        sum_clipped(model, losses, x, y, method="layers", **options)
    found, one = (sum_clipped(model, losses, x, y, method=how, **options) for how in ("auto", "generic"))
    torch.testing.assert_close(found.norm, one.norm, rtol=1e-4, atol=0)  # both from above
    monkeypatch.setattr(gradients, "check_order", lambda sites, losses, alone: None)
    monkeypatch.setattr(gradients, "check_rows_own", lambda losses, sites, deltas: None)
    with pytest.raises(ModelError, match=r"has gradient norm .* by itself"):
        check_sums(model, losses, x, y, max_grad_norm=1.0)
    check_sums(model, losses, x, y, max_grad_norm=1.0, method="generic")


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4, 5], [3, 4, 5, 0, 1, 2], [0, 2, 1, 3, 4, 5]])
def test_any_other_order_is_found_before_training(order: list[int]) -> None:
    """The last one leaves the two records that are looked at in place: the sums' own test finds it."""

    class Mixed(Turned):
        def forward(self, x: Tensor) -> Tensor:
            there = [i for i in order if i < len(x)]
            back = sorted(range(len(there)), key=there.__getitem__)
            return self.second(torch.tanh(self.first(x))[there])[back]

    x, y = batch()
    learner = PrivateSGD(Mixed(), losses, x, y, Settings(1.0, 1.0, 0.5, seed=1), progress=False)
    assert set(learner.measurer.methods) == {"mixed"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", range(4))
def test_sound_models_pass(which: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = batch()
    check_sums(models()[which].to(dtype), losses, x.to(dtype), y, max_grad_norm=0.1, clip="hard")


def test_gradients_that_cancel_to_rounding_are_no_fault() -> None:
    """Autograd's own sum is off by as much in float32; in float64 both agree."""
    for gap in (1e-4, 1e-6, 1e-7):
        x = near_copies(1000.0, gap).float()
        check_sums(Difference(), output, x, torch.full((len(x),), 100.0), max_grad_norm=1.0)


def test_a_lost_share_of_a_parameter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder without its refusal of a parameter in two roles: the class of fault that the test is for."""
    for module in (recorder, mixed):
        monkeypatch.setattr(module, "in_two_roles", lambda sites: set())
    x, y = batch()
    torch.manual_seed(0)
    for model in (models()[0], models()[1]):
        for p in model.parameters():
            nn.init.normal_(p)
        with pytest.raises(ModelError, match=r"gradient sum of the parameter .* is off by"):
            check_sums(model, losses, x, y, max_grad_norm=0.1)


def test_a_sum_that_is_not_clipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: Any = gradients.LayerPass.norms
    monkeypatch.setattr(gradients.LayerPass, "norms", lambda work: norms(work) * 0.9)
    x, y = batch()
    with pytest.raises(ModelError, match=r"contributes 1\.11.* times max_grad_norm"):
        check_sums(nn.Linear(5, 3), losses, x, y, max_grad_norm=1e-3, clip="hard")


def test_the_test_changes_nothing() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), batch()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    check_sums(model, losses, x, y, max_grad_norm=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_autocast_outside_refused_inside_clipped() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv1d(1, 4, 2), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.last(torch.tanh(self.conv(x[:, None])).flatten(1)).float()

    x, y = batch()
    torch.manual_seed(0)
    model = Mixed()
    check_sums(model, losses, x, y, max_grad_norm=0.01, clip="hard")
    found = sum_clipped(model, losses, x[:1], y[:1], max_grad_norm=0.01, clip="hard")
    size = torch.cat([s.double().flatten() for s in found.gradient_sum.values()]).norm()
    assert 0.0099 < size <= 0.01 * (1 + 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast is on for cpu"):
        sum_clipped(model, losses, x, y, max_grad_norm=1.0)


def test_gradients_that_rounding_decides_are_refused() -> None:
    """A record alone has another gradient than beside others, in float32 only: a removal moves the others' shares."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            lost = 0.5 if x.dtype == torch.float32 and len(x) == 1 else 0.0
            return super().forward(x * (1 - lost * torch.tensor([1.0, 1, 0, 0, 0], dtype=x.dtype)))

    x, y = batch()
    torch.manual_seed(0)
    check_sums(Rounded(5, 3).double(), losses, x.double(), y, max_grad_norm=0.1)
    with pytest.raises(ModelError, match=r"record \d of the batch differs by \d.*% .*use float64"):
        check_sums(Rounded(5, 3), losses, x, y, max_grad_norm=0.1)
    learner = PrivateSGD(Rounded(5, 3), losses, x, y, Settings(1.0, 1.0, 0.5, seed=1), progress=False)
    assert set(learner.measurer.methods) == {"mixed"}  # takes each record by itself, always
