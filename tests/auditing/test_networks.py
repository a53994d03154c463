"""Networks behind a fixed layer that standardises the input, and fresh parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reconbound._internal.checks import InputError
from reconbound.auditing.models import lecun_normal, network, standardised
from reconbound.fisher import ProbeOptions, StepOptions, dense_information, step_information

MEAN, STD = (0.5, 0.25, 0.375), (0.5, 0.25, 2.0)
SETTING = {"max_grad_norm": 0.7, "noise_multiplier": 1.3}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()


def test_information_is_about_the_unscaled_input() -> None:
    """By the chain rule a feature's information is that of the standardised one over std²; compared in full."""
    x, y = torch.rand(5, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    mean, std = (torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (MEAN, STD))
    model = standardised(small(), MEAN, np.array(STD)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(model(x), small()((x - mean) / std), rtol=1e-12, atol=1e-12)
    before = dense_information(model, losses, x, y, **SETTING)
    inner = dense_information(small(), losses, (x - mean) / std, y, **SETTING)
    assert model[0].std.dtype == torch.float64
    torch.testing.assert_close(
        before.diagonal, (inner.diagonal.reshape(x.shape) / std**2).flatten(1), rtol=1e-9, atol=0
    )


def test_layer_rules_cover_standardised_networks() -> None:
    x, y = torch.rand(4, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    model = standardised(small(), MEAN, STD).double()
    found = step_information(
        model, losses, x, y, **SETTING, options=StepOptions(method="layers", probes=ProbeOptions(count=400))
    )
    exact = dense_information(model, losses, x, y, **SETTING)
    torch.testing.assert_close(found.along, exact.along, rtol=1e-9, atol=0)
    assert ((found.across - exact.across).abs() < 5 * found.across_error).all()


# --- fresh parameters ----------------------------------------------------------------------------


def test_lecun_normal_keeps_scales_and_what_is_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 100), nn.GroupNorm(2, 100), nn.Tanh(), nn.Linear(100, 50), nn.Linear(50, 2))
    model[4].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    with torch.no_grad():
        model[1].weight.fill_(7.0)
        model[1].bias.fill_(3.0)
    frozen = [p.clone() for p in model[4].parameters()]
    lecun_normal(model)
    assert (model[1].weight == 1).all()  # 0 would cut the network in two
    assert (model[1].bias == 3).all()
    assert (model[0].bias == 0).all()
    assert abs(float(model[0].weight.detach().std()) - 0.05) < 4 * 0.05 / (2 * 40_000) ** 0.5
    assert abs(float(model[3].weight.detach().std()) - 0.1) < 4 * 0.1 / (2 * 5_000) ** 0.5
    assert all(torch.equal(a, b) for a, b in zip(frozen, model[4].parameters(), strict=True))


def test_lecun_normal_refuses_a_scale_without_reset() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    with pytest.raises(InputError, match="no reset_parameters for 'scale' of, got 'Scaled'"):
        lecun_normal(Scaled())


def test_audits_of_photographs_centre_their_pixels() -> None:
    model = network("cnn", (3, 32, 32), 10, image=True)
    grey = model[0](torch.full((1, 3, 32, 32), 0.5))
    assert grey.abs().max() == 0
    assert sum(p.numel() for p in model.parameters()) == 550_570


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [(0.5, 0.0, "std"), (0.5, (1.0, -1.0), "std"), (0.5, (), "std"), (float("nan"), 1.0, "mean"), ("0.5", 1.0, "mean")],
)
def test_wrong_constants_are_refused(mean: object, std: object, text: str) -> None:
    with pytest.raises(InputError, match=f"^{text} must"):
        standardised(small(), mean, std)  # type: ignore[arg-type]
