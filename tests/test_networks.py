"""Networks behind a fixed layer that standardises the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reconbound.fisher import dense_information, step_information
from reconbound.networks import standardised

MEAN, STD = (0.5, 0.25, 0.375), (0.5, 0.25, 2.0)
SETTING = {"max_grad_norm": 0.7, "noise_multiplier": 1.3}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()


def test_information_is_about_the_input_as_it_was() -> None:
    """By the chain rule a feature's information is that of the standardised one over std²; compared in full."""
    x, y = torch.rand(5, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    mean, std = (torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (MEAN, STD))
    model = standardised(small(), MEAN, STD).double()
    with torch.no_grad():
        torch.testing.assert_close(model(x), small()((x - mean) / std), rtol=1e-12, atol=1e-12)
    before = dense_information(model, losses, x, y, **SETTING)
    inner = dense_information(small(), losses, (x - mean) / std, y, **SETTING)
    assert model[0].std.dtype == torch.float64
    torch.testing.assert_close(
        before.diagonal, (inner.diagonal.reshape(x.shape) / std**2).flatten(1), rtol=1e-9, atol=0
    )


def test_layer_rules_cover_it() -> None:
    x, y = torch.rand(4, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    model = standardised(small(), MEAN, STD).double()
    found = step_information(model, losses, x, y, **SETTING, probes=400, method="layers")
    exact = dense_information(model, losses, x, y, **SETTING)
    torch.testing.assert_close(found.along, exact.along, rtol=1e-9, atol=0)
    assert ((found.across - exact.across).abs() < 5 * found.across_error).all()
