"""Floors of models in half precision carry how far such floors were off, however the ledger is fed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from measuring import measure, sum_clipped
from reconbound import PrivateSGD, Settings
from reconbound.validate import check_batch
from small_models import VisionTransformer, fresh

loss_fn = nn.CrossEntropyLoss(reduction="none")


class Mixed(nn.Module):
    """float32 parameters, and products by autocast in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float()


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator).to(dtype), torch.arange(8) % 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_caveat_of_half_precision_travels_with_the_floors(dtype: torch.dtype) -> None:
    short = dtype in (torch.bfloat16, torch.float16)
    said = f"computed in {str(dtype).removeprefix('torch.')}: beside float64"
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x, y = batch(dtype)
    info = measure(model, loss_fn, x, y, max_grad_norm=1.0, noise_multiplier=1.0)
    assert any(c.startswith(said) for c in info.caveats) == short
    assert any(c.startswith(said) for c in check_batch(model, loss_fn, x, y)) == short
    again = measure(model, loss_fn, x, y, max_grad_norm=1.0, noise_multiplier=1.0)
    assert any(c.startswith(said) for c in again.caveats) == short
    learner = PrivateSGD(model, loss_fn, x, y, Settings(1.0, 1.0, 0.5, budget="every"), progress=False)
    learner.fit(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one run: floors are coarse
        floors = learner.accountant.mse_floor()
    assert (said in str(floors)) == short
    assert any(c.startswith(said) for c in floors.assumes) == short


def test_autocast_inside_the_model_is_seen() -> None:
    x, y = batch(torch.float32)
    model = Mixed()
    assert any(c.startswith("computed in bfloat16") for c in check_batch(model, loss_fn, x, y))
    info = measure(model, loss_fn, x, y, max_grad_norm=1.0, noise_multiplier=1.0)
    assert any(c.startswith("computed in bfloat16") for c in info.caveats)
    assert not check_batch(model.layers, loss_fn, x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"deflate": 0}, {"deflate": 3}, {"probe": "weights"}])
def test_probes_of_every_kind_measure_models_in_half_precision(dtype: torch.dtype, more: dict[str, Any]) -> None:
    """Probes of the inputs, the default of a training, ended in an error of dtypes. 400 probes, against float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x, y = batch(dtype)
    settings: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "probes": 400, "error": "spread"}
    generator = torch.Generator().manual_seed(1)
    found = measure(model, loss_fn, x, y, generator=generator, **settings, **more)
    wide = copy.deepcopy(model).double()
    exact = measure(wide, loss_fn, x.double(), y, generator=torch.Generator().manual_seed(2), **settings)
    far = (found.trace.double() - exact.trace).abs()
    assert bool((far <= 5 * (found.across_error.double() + exact.across_error) + 0.02 * exact.trace).all())


class Half(nn.Module):
    """A vision transformer under autocast, with a class token, positions and scales that are plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.half = fresh(VisionTransformer()), True

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return self.body(images).float()


def test_autocast_with_plain_parameters_is_clipped_and_close_to_float32() -> None:
    """(The generic way cannot take this model: its attention meets two precisions in the backward pass.)"""
    torch.manual_seed(0)
    model, x, y = Half(), torch.randn(8, 2, 4, 4), torch.arange(8) % 3
    clip = 0.5 * float(measure(model, loss_fn, x, y, max_grad_norm=1.0, noise_multiplier=1.0).norm.median())
    for i in range(len(x)):
        one = sum_clipped(model, loss_fn, x[i : i + 1], y[i : i + 1], max_grad_norm=clip, clip="hard")
        size = torch.cat([v.double().flatten() for v in one.gradient_sum.values()]).norm()
        assert size <= clip * (1 + 1e-5)
    step: dict[str, Any] = {"max_grad_norm": 1e3, "noise_multiplier": 1e-3, "clip": "hard"}
    axes = list(torch.eye(32).reshape(32, 2, 4, 4) * 32**0.5)
    step |= {"probe": "inputs", "deflate": 0, "directions": axes, "error": "bound"}
    short = measure(model, loss_fn, x, y, **step)
    model.half = False
    exact = measure(model, loss_fn, x, y, **step)
    for part in ("norm", "trace"):
        assert float((getattr(short, part) / getattr(exact, part) - 1).abs().max()) < 0.1
