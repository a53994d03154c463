"""Steps that no operation names: by rounding in the model's precision, by NumPy, by branches; in one's own loop too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_jumps import JUMPS, Middle, batch, per_record, squared
from torch import Tensor, nn

from measuring import measure
from reconbound import PrivateSGD, Settings
from reconbound.validate import ModelError, check_batch

MAGIC = 1.5 * 2.0**23  # float32 has no fractions beyond it
STEP = {"max_grad_norm": 1.0, "noise_multiplier": 0.05}

FRACTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda h: 16 * h - ((16 * h + MAGIC) - MAGIC),
    "bfloat16": lambda h: 16 * h - ((16 * h).bfloat16() + 256 - 256).to(h.dtype),
    "a cast to float32": lambda h: 16 * h - ((16 * h).float() + MAGIC - MAGIC).to(h.dtype),
}


class Sawtooth(nn.Module):
    """The input, faintly, and a fraction of it that is there in the precision of some step only."""

    def __init__(self, fraction: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fraction, self.layer = fraction, nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([0.02 * x, self.fraction(x)], 1))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", list(FRACTIONS))
def test_steps_that_only_rounding_makes_are_refused(kind: str) -> None:
    """In float64 the fraction is 0, and its derivative too: a floor of ±2.6 on [0, 1] was met by an error of 0.003."""
    dtype = torch.float64 if kind == "a cast to float32" else torch.float32
    model = Sawtooth(FRACTIONS[kind]).to(dtype)
    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = torch.full((64,), 2.0, dtype=dtype)
    assert float(model.fraction(x).abs().max()) > 0.4
    hidden = measure(model, squared, x, y, checked=True, probes=64, clip="hard", **STEP).trace
    assert float(hidden.median()) < 1
    settings = Settings(0.05, 1.0, 0.5, lr=0.1, seed=0)
    for attempt in (
        lambda: check_batch(model, squared, x, y),
        lambda: PrivateSGD(model, squared, x, y, settings, progress=False),
        lambda: measure(model, squared, x, y, **STEP),
    ):
        with pytest.raises(ModelError, match=r"differs by \d.*% from the one in float64: .* rounding decides over it"):
            attempt()


def test_large_values_are_refused_where_they_cancel() -> None:
    x, y = batch()
    check_batch(Middle(lambda h: 1e4 * torch.tanh(1e-4 * h)), per_record, x, y)
    with pytest.raises(ModelError, match="in float32 rounding decides"):
        check_batch(Middle(lambda h: (torch.tanh(h) + 1e8) - 1e8), per_record, x, y)
    check_batch(Middle(lambda h: (torch.tanh(h) + 1e8) - 1e8).double(), per_record, x.double(), y)


@pytest.mark.parametrize("kind", ["NumPy", "if-statement", "if-statement on item", "bits", "equal to itself"])
def test_steps_that_no_operation_shows_are_refused_in_an_own_loop(kind: str) -> None:
    """`step_information` looked at operations alone: these got floors, marked as not checked."""
    equal: Callable[[Tensor], Tensor] = lambda h: h / h.square().sqrt()  # noqa: E731
    model = Middle(JUMPS.get(kind, equal))
    with pytest.raises(ModelError, match="jumps with the private part"):
        measure(model, per_record, *batch(), **STEP)
    measure(Middle(torch.sin), per_record, *batch(), **STEP)
