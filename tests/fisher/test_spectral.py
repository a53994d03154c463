"""The bound of the spectral norm holds, on spectra where the power iteration from a shared start comes late."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from measuring import measure
from reconbound import Account, FisherAccountant
from reconbound.fisher import StepOptions, dense_information
from reconbound.fisher import step as module

RECORDS = 1280


@dataclass
class Matrices:
    """Stands for a pass: products with given matrices."""

    m: Tensor

    def normal(self, v: Tensor) -> Tensor:
        return torch.einsum("bij,bj->bi", self.m, v)


def bound(m: Tensor, start: Tensor, iterations: int, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
    plan: Any = module._Plan({}, StepOptions(spectral=iterations), [], features, start)
    ones, nothing = torch.ones(len(m), dtype=m.dtype), torch.zeros(m.shape[:2], dtype=m.dtype)
    work: Any = Matrices(m)
    found: tuple[Tensor, Tensor] = module._power(work, plan, nothing, ones, ones)
    return found


def spectra(kind: str, d: int) -> Tensor:
    values = torch.zeros(d, dtype=torch.float64)
    if kind == "clustered":
        values[:] = 1 - 1e-3 * torch.arange(d)
    elif kind == "two alike":
        values[:2] = torch.tensor([1.0, 0.97])
    elif kind == "slow":
        values[:] = 0.99 ** torch.arange(d)
    elif kind == "one":
        values[0] = 1.0
    elif kind == "all":
        values[:] = 1.0
    else:
        values[:] = torch.tensor([1.0, *[0.9] * (d - 1)])
    return values


@pytest.mark.parametrize("kind", ["clustered", "two alike", "slow", "one", "all", "one above many"])
@pytest.mark.parametrize("d", [2, 8, 40])
@pytest.mark.parametrize("iterations", [2, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_bound_is_above_the_largest_eigenvalue(kind: str, d: int, iterations: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(d + iterations)
    turned = torch.linalg.qr(torch.randn(RECORDS, d, d, generator=generator, dtype=torch.float64)).Q
    m = turned @ torch.diag(spectra(kind, d)) @ turned.mT
    start = torch.randn(d, generator=generator, dtype=torch.float64)
    # for some records the leading direction is all but orthogonal to the start that all of them share
    below, above = bound(m.to(dtype), start.to(dtype), iterations)
    tiny = 1e-5 if dtype == torch.float32 else 1e-12
    assert (below <= 1 + tiny).all()
    assert (above >= 1 - tiny).all()
    if iterations == 30:
        assert float(above.median()) < 1.8


def test_bound_holds_for_chosen_features() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.tensor([1.0, 1.0, 1.0] + [0.0] * 17, dtype=torch.float64)
    a = torch.randn(RECORDS, 20, 20, generator=generator, dtype=torch.float64)
    m = a @ a.mT
    top = torch.linalg.eigvalsh(m[:, :3, :3])[:, -1]
    below, above = bound(m, torch.randn(20, generator=generator, dtype=torch.float64), 30, features)
    assert (below <= top * (1 + 1e-12)).all()
    assert (above >= top).all()


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(200, 6, dtype=torch.float64), torch.arange(200) % 3


def losses(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, y, reduction="none")


@pytest.mark.parametrize("seed", range(4))
def test_ledger_keeps_a_bound_of_every_record(seed: int) -> None:
    model, x, y = small()
    step: dict[str, Any] = {"max_grad_norm": 0.5, "noise_multiplier": 0.7, "clip": "hard"}
    want = dense_information(model, losses, x, y, **step).spectral
    found = measure(model, losses, x, y, spectral=2, generator=torch.Generator().manual_seed(seed), **step)
    assert found.spectral is not None
    assert found.spectral_bound is not None
    assert (found.spectral < want).any()
    assert (found.spectral_bound >= want).all()
    account = Account(
        records=200, features=6, steps=1, sample_rate=1.0, noise_multiplier=0.7, max_grad_norm=0.5, clip="hard"
    )
    ledger = FisherAccountant(account, spectral=True)
    ledger.add(torch.arange(200), found)
    assert (ledger.traces.spectral_bound() >= want).all()


# --- masked rows -----------------------------------------------------------------------------------------------------


def test_masked_rows_are_no_measurements() -> None:
    model, x, y = small()
    mask = torch.ones(200, dtype=torch.bool)
    mask[::3] = False
    step: dict[str, Any] = {"max_grad_norm": 0.5, "noise_multiplier": 0.7, "clip": "hard", "diagonal": True}
    account = Account(
        records=200, features=6, steps=2, sample_rate=1.0, noise_multiplier=0.7, max_grad_norm=0.5, clip="hard"
    )
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    masked, plain = (FisherAccountant(account, diagonal="all", spectral=True) for _ in range(2))
    for k in range(2):
        found = [
            measure(model, losses, x, y, mask=m, generator=g, spectral=2, **step)
            for m, g in zip((mask, None), generators, strict=True)
        ]
        kept = torch.nonzero(mask).flatten()
        # padding may repeat an index, or name one that does not exist
        index = torch.where(mask, torch.arange(200), torch.tensor(0 if k else 10**6))
        masked.add(index, found[0])
        plain.add(kept, _rows(found[1], kept))
    assert torch.equal(masked.measured(), plain.measured())
    assert int(masked.measured()[0]) == 0
    assert masked.traces.steps_covered() == pytest.approx(plain.traces.steps_covered())
    for name in ("trace", "trace_error", "spectral", "weights"):
        torch.testing.assert_close(masked.traces.state[name], plain.traces.state[name])
    torch.testing.assert_close(masked.features.state["diagonal"], plain.features.state["diagonal"])
    floors = masked.mse_floor().value
    assert (floors[~mask.numpy()] == 0).all()
    assert (floors[mask.numpy()] > 0).all()
    assert 0 not in [e.record for e in masked.most_exposed(200)]
    assert masked.summary()["never_measured"] == int((~mask).sum())


def test_chosen_records_cannot_be_followed_with_masked_rows() -> None:
    model, x, y = small()
    step: dict[str, Any] = {"max_grad_norm": 0.5, "noise_multiplier": 0.7, "clip": "hard", "diagonal": True}
    account = Account(
        records=200, features=6, steps=1, sample_rate=1.0, noise_multiplier=0.7, max_grad_norm=0.5, clip="hard"
    )
    ledger = FisherAccountant(account, diagonal=("top", 4))
    ledger.add(torch.arange(200), measure(model, losses, x, y, **step))
    ledger.finish_run()
    rows = ledger.rows
    assert rows is not None
    found = measure(model, losses, x[rows], y[rows], mask=torch.tensor([1, 1, 0, 1]), **step)
    with pytest.raises(ValueError, match="found must be about records that took part, not masked ones"):
        ledger.follow(found)


def _rows(found: Any, kept: Tensor) -> Any:
    names = [f for f in found.__dataclass_fields__ if isinstance(getattr(found, f), Tensor)]
    return replace(found, **{name: getattr(found, name)[kept] for name in names})
