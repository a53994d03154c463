"""The estimators: unbiased, with honest standard errors; masks, private parts, zero gradients, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from measuring import measure
from reconbound.fisher import (
    CoordinateOptions,
    Private,
    StepInformation,
    coordinate_information,
    dense_information,
    draw_probes,
)
from small_models import RECORDS, Wrap, classes, cross_entropy, normal, squared, tokens

SEEDS = 400
STEP: dict[str, Any] = {"max_grad_norm": 0.8, "noise_multiplier": 0.7}
torch.set_num_threads(1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(seed: int = 1, bias: bool = True) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 4, bias=bias)).double()
    return model, normal(6), classes(4)


def step(model: nn.Module, inputs: Any, targets: Any, loss: Any = cross_entropy, **kw: Any) -> StepInformation:
    return measure(model, loss, inputs, targets, **(STEP | kw))


def over_seeds(probes: int, error: str, seeds: int = SEEDS) -> dict[str, Tensor]:
    """Each estimate and its standard error, stacked over the seeds."""
    model, x, y = small()
    kw: dict[str, Any] = {"probes": probes, "error": error, "diagonal": True, "checked": True}
    runs = [step(model, x, y, generator=generator(s), **kw) for s in range(seeds)]
    names = ("along", "across", "across_error", "trace", "diagonal", "diagonal_across", "diagonal_error")
    return {name: torch.stack([getattr(r, name) for r in runs]) for name in names}


@pytest.mark.parametrize(
    ("probes", "error", "seeds"), [(1, "product", 1000), (2, "spread", 1000), (2, "product", 400), (8, "spread", 400)]
)
@pytest.mark.slow
def test_unbiased_with_honest_errors(probes: int, error: str, seeds: int) -> None:
    """The mean over the seeds lies within 3 of its standard errors of the exact value, for trace, both parts and the
    diagonal; the reported standard error (root mean square over the seeds: it is its square that is unbiased) lies
    within 15 % of the observed spread, for EVERY record and every entry of the diagonal.

    The spread over N seeds is itself uncertain, by √((κ − 1)/4N) for a kurtosis κ: one probe's diagonal entry is a
    χ²₁ (κ = 15), 9 % at 400 seeds and 6 % at 1000, hence more seeds where there are few probes."""
    exact = dense_information(small()[0], cross_entropy, *small()[1:], **STEP)
    got = over_seeds(probes, error, seeds)
    assert torch.allclose(got["along"], exact.along.expand(seeds, -1), rtol=1e-10)
    for name, want in (("across", exact.across), ("trace", exact.trace), ("diagonal", exact.diagonal)):
        spread = got[name].std(0)
        assert ((got[name].mean(0) - want).abs() <= 3 * spread / seeds**0.5).all(), name
    for estimate, reported in (("across", "across_error"), ("diagonal_across", "diagonal_error")):
        ratio = got[reported].square().mean(0).sqrt() / got[estimate].std(0)
        assert ratio.mean().item() == pytest.approx(1, abs=0.05), estimate
        assert (ratio - 1).abs().max() < 0.15, (estimate, ratio)


def test_the_bound_is_above_every_spread() -> None:
    got = over_seeds(1, "bound")
    assert (got["across_error"].square().mean(0).sqrt() > got["across"].std(0)).all()


def test_error_shrinks_with_more_probes() -> None:
    model, x, y = small()
    exact = dense_information(model, cross_entropy, x, y, **STEP).across
    rms = {}
    for probes in (1, 16, 256):
        errors = [
            step(model, x, y, probes=probes, error="bound", generator=generator(s)).across - exact for s in range(12)
        ]
        rms[probes] = (torch.stack(errors) / exact).square().mean().sqrt().item()
    assert rms[1] / rms[16] == pytest.approx(4, rel=0.35)
    assert rms[16] / rms[256] == pytest.approx(4, rel=0.35)


def test_all_directions_give_the_exact_value() -> None:
    """Probes √p e_k for every parameter: their mean is the trace itself, without any error."""
    model, x, y = small()
    exact = dense_information(model, cross_entropy, x, y, **STEP)
    params = dict(model.named_parameters())
    size = sum(p.numel() for p in params.values())
    directions = []
    for row in torch.eye(size, dtype=torch.float64) * size**0.5:
        pieces = row.split([p.numel() for p in params.values()])
        directions.append({name: v.reshape(p.shape) for (name, p), v in zip(params.items(), pieces, strict=True)})
    got = step(model, x, y, directions=directions, diagonal=True)
    assert torch.allclose(got.across, exact.across, rtol=1e-10)
    assert got.diagonal is not None
    assert torch.allclose(got.diagonal, exact.diagonal, rtol=1e-10)


@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
@pytest.mark.slow
def test_spectral_norm_by_power_iteration(method: Any) -> None:
    model, x, y = small()
    far = [("smooth", 0.05), ("smooth", 100.0)] if method == "layers" else []
    for clip, norm in [("smooth", 0.8), ("hard", 0.8), *far]:
        want = dense_information(model, cross_entropy, x, y, max_grad_norm=norm, noise_multiplier=0.7, clip=clip)
        got = step(model, x, y, max_grad_norm=norm, clip=clip, spectral=200, method=method, generator=generator())
        assert got.spectral is not None
        assert got.spectral_bound is not None
        assert (got.spectral <= want.spectral * (1 + 1e-12)).all()
        assert torch.allclose(got.spectral, want.spectral, rtol=1e-7)
        assert (got.spectral_bound >= want.spectral).all()
        assert (got.spectral_bound < 1.1 * want.spectral).all()


@pytest.mark.slow
def test_paper_estimator_is_unbiased() -> None:
    model, x, y = small()
    exact = dense_information(model, cross_entropy, x, y, **STEP).trace
    value, error = coordinate_information(model, cross_entropy, x, y, **STEP, coordinates=CoordinateOptions(count=99))
    assert torch.allclose(value, exact, rtol=1e-10)
    assert (error == 0).all()
    together = coordinate_information(
        model, cross_entropy, x, y, **STEP, coordinates=CoordinateOptions(count=5, at_once=2, generator=generator())
    )
    alone = coordinate_information(
        model, cross_entropy, x, y, **STEP, coordinates=CoordinateOptions(count=5, generator=generator())
    )
    assert torch.allclose(together[0], alone[0], rtol=1e-12)
    runs = [
        coordinate_information(
            model,
            cross_entropy,
            x,
            y,
            **STEP,
            coordinates=CoordinateOptions(count=3, at_once=3, generator=generator(s)),
        )
        for s in range(200)
    ]
    values, errors = torch.stack([r[0] for r in runs]), torch.stack([r[1] for r in runs])
    assert ((values.mean(0) - exact).abs() <= 3.5 * values.std(0) / 200**0.5).all()
    ratio = errors.square().mean(0).sqrt() / values.std(0)
    assert ((ratio - 1).abs() < 0.15).all()


@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
def test_micro_batches_change_nothing(method: Any) -> None:
    model, x, y = small()
    kw: dict[str, Any] = {"probes": 3, "diagonal": True, "spectral": 3, "method": method}
    whole = step(model, x, y, generator=generator(), **kw)
    for size in (1, 3, 7, 100):
        parts = step(model, x, y, generator=generator(), micro_batch=size, **kw)
        for name in (
            "loss",
            "norm",
            "along",
            "across",
            "across_error",
            "diagonal_along",
            "diagonal_across",
            "spectral",
        ):
            assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=0), name
        for name, total in whole.gradient_sum.items():
            assert torch.allclose(parts.gradient_sum[name], total, rtol=1e-12)


@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
def test_masked_records_are_padding(method: Any) -> None:
    model, x, y = small()
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1])
    kw: dict[str, Any] = {"diagonal": True, "spectral": 5, "method": method}
    got = step(model, x, y, mask=mask, generator=generator(), micro_batch=3, **kw)
    kept = mask.bool()
    want = step(model, x[kept], y[kept], generator=generator(), **kw)
    for name in ("along", "across", "across_error", "diagonal_along", "diagonal_across", "spectral"):
        assert torch.allclose(getattr(got, name)[kept], getattr(want, name), rtol=1e-12)
        assert (getattr(got, name)[~kept] == 0).all()
    for name, total in want.gradient_sum.items():
        assert torch.allclose(got.gradient_sum[name], total, rtol=1e-12)


@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.slow
def test_a_record_with_zero_gradient(method: Any, clip: Any) -> None:
    model, x, _ = small()
    for layer in (model[0], model[2]):  # type: ignore[index]
        nn.init.zeros_(layer.bias)
    x[0], y = 0, normal(4)
    y[0] = 0
    exact = dense_information(model, squared, x, y, clip=clip, **STEP)
    assert exact.norm[0] == 0
    assert exact.along[0] == 0
    assert exact.across[0] > 0
    got = step(
        model, x, y, squared, clip=clip, diagonal=True, spectral=200, probes=100, method=method, generator=generator()
    )
    assert got.norm[0] == 0
    assert got.along[0] == 0
    assert got.diagonal is not None
    assert got.spectral is not None
    assert torch.isfinite(got.diagonal).all()
    assert (got.across[0] - exact.across[0]).abs() < 4 * got.across_error[0]
    assert torch.allclose(got.spectral, exact.spectral, rtol=1e-6)


def test_tiny_and_huge_gradients_in_float32() -> None:
    model, x, y = small()
    model, x = model.float(), x.float()
    for scale in (1e-30, 1e-15, 1e15):
        got = step(model, x, y, lambda o, t, s=scale: cross_entropy(o, t) * s)
        for name in ("norm", "factor", "clipped_norm", "along", "across", "across_error"):
            assert torch.isfinite(getattr(got, name)).all(), (scale, name)


def test_private_features_count_and_are_a_block_of_the_whole() -> None:
    model, x, y = small()
    chosen = torch.tensor([0, 2, 5])
    whole = step(model, x, y, diagonal=True, generator=generator())
    some = step(model, x, y, diagonal=True, private=chosen, generator=generator())
    assert whole.features == 6
    assert some.features == 3
    assert whole.diagonal is not None
    assert some.diagonal is not None
    assert torch.allclose(some.diagonal[:, chosen], whole.diagonal[:, chosen], rtol=1e-12)
    assert torch.allclose(some.trace, whole.diagonal[:, chosen].sum(1), rtol=1e-12)
    assert (some.diagonal[:, [1, 3, 4]] == 0).all()


def test_the_gradient_sum_is_that_of_clipped_gradients() -> None:
    model, x, y = small()
    got = step(model, x, y, clip="hard")
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(RECORDS):
        grads = torch.autograd.grad(cross_entropy(model(x[i : i + 1]), y[i : i + 1])[0], list(model.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(totals, grads, strict=True):
            totals[name] += g * min(1.0, STEP["max_grad_norm"] / norm.item())
    for name, total in totals.items():
        assert torch.allclose(got.gradient_sum[name], total, rtol=1e-10)
        assert not got.gradient_sum[name].requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_model_and_inputs_unchanged_without_grad_mode() -> None:
    model, x, y = small()
    with torch.no_grad():
        inside = step(model, x, y, generator=generator())
    outside = step(model, x, y, generator=generator())
    assert torch.equal(inside.across, outside.across)
    assert not x.requires_grad
    assert not outside.across.requires_grad


def test_probes_are_a_prefix_of_more_probes() -> None:
    params = dict(small()[0].named_parameters())
    one, three = draw_probes(params, 1, generator()), draw_probes(params, 3, generator())
    assert all(torch.equal(one[0][name], three[0][name]) for name in params)


def test_one_record_and_one_feature() -> None:
    model = nn.Linear(1, 2).double()
    got = step(model, torch.ones(1, 1).double(), torch.tensor([0]), spectral=20, diagonal=True)
    assert got.diagonal is not None
    assert got.spectral is not None
    assert got.trace.shape == (1,)
    assert torch.allclose(got.diagonal.sum(1), got.trace)


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 0.0}, "max_grad_norm must be greater than 0, got 0.0"),
    ({"noise_multiplier": 0.0}, "noise_multiplier must be greater than 0"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier must be a finite number"),
    ({"clip": "soft"}, "clip must be"),
    ({"probes": 0}, "count must be at least 1, got 0"),
    ({"micro_batch": 0}, "micro_batch must be at least 1, got 0"),
    ({"method": "fast"}, "method must be one of"),
    ({"error": "spread"}, "for one probe"),
    ({"mask": torch.ones(3)}, "mask must have one entry per record"),
    ({"private": torch.ones(4, dtype=torch.bool)}, "must be a mask of a record's 6 features, got '4 entries'"),
    ({"private": "labels"}, "private must be"),
    ({"private": "target"}, "must be a floating-point tensor"),
    ({"private": Private("module", "nowhere")}, "no module named 'nowhere'"),
]


@pytest.mark.parametrize(("arguments", "message"), MESSAGES, ids=lambda v: v if isinstance(v, str) else "")
def test_messages(arguments: dict[str, Any], message: str) -> None:
    model, x, y = small()
    with pytest.raises(ValueError, match=message):
        step(model, x, y, **arguments)


def test_a_reduced_loss_is_refused() -> None:
    model, x, y = small()
    with pytest.raises(ValueError, match="one loss per record"):
        step(model, x, y, nn.functional.cross_entropy)


def test_a_penalty_inside_the_loss_is_refused() -> None:
    model, x, y = small()
    with pytest.raises(ValueError, match="by another way than calling the model"):
        step(model, x, y, lambda o, t: cross_entropy(o, t) + model[0].weight.square().sum())  # type: ignore[index]


def test_a_fused_recurrent_layer_is_refused() -> None:
    model = Wrap(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=nn.GRU(2, 3, batch_first=True), head=nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"cell \(GRU\)"):
        step(model.double(), normal(4, 2), classes())


def test_a_compiled_model_is_refused() -> None:
    model, x, y = small()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="is compiled"):
        step(model, x, y)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model, x, y = small()
    with pytest.raises(ValueError, match="no trainable parameters"):
        step(model.requires_grad_(False), x, y)


def test_an_empty_batch_tells_nothing() -> None:
    model, x, y = small()
    got = step(model, x[:0], y[:0])
    assert got.trace.shape == (0,)
    assert got.features == 6
    assert all((total == 0).all() and not total.requires_grad for total in got.gradient_sum.values())


def test_rows_that_do_not_match_are_refused() -> None:
    model, x, y = small()
    with pytest.raises(ValueError, match="targets must have 8 rows"):
        step(model, x, y[:5])


def test_several_float_inputs_need_private_choice() -> None:
    model = Wrap(lambda m, a, b: m.head(a * b), head=nn.Linear(3, 3)).double()
    with pytest.raises(ValueError, match="say which is private"):
        step(model, (normal(3), normal(3)), classes())


def test_tokens_need_a_private_module() -> None:
    model = Wrap(lambda m, w: m.head(m.embed(w).mean(1)), embed=nn.Embedding(4, 3), head=nn.Linear(3, 3)).double()
    with pytest.raises(ValueError, match="for tokens use"):
        step(model, tokens(4, 2), classes())


def test_a_private_module_called_twice_is_refused() -> None:
    model = Wrap(
        lambda m, w: m.head(m.embed(w).mean(1) * m.embed(w).sum(1)), embed=nn.Embedding(4, 3), head=nn.Linear(3, 3)
    )
    with pytest.raises(ValueError, match="called once"):
        step(model.double(), tokens(4, 2), classes(), private=Private("module", "embed"))
