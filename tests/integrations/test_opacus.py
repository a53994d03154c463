"""Models that Opacus has wrapped: measured as they are, their hooks put back as they were."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from measuring import measure, sum_clipped
from own_loop import SETTING, data, losses, network
from reconbound import PrivateSGD, Settings
from reconbound._internal.checks import InputError
from reconbound.fisher import dense_information
from reconbound.validate import check_batch
from reconbound.validate.model import NOT_CHECKED


def wrapped(mode: str) -> tuple[nn.Module, nn.Module, Any]:
    """Opacus's model, the network in it, and its optimizer."""
    opacus = pytest.importorskip("opacus")
    inner = network()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    private = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, _ = opacus.PrivacyEngine().make_private(
            module=inner, optimizer=optimizer, data_loader=loader, **private
        )
    return model, inner, optimizer


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("which", ["wrapped", "inner"])
@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
def test_opacus_models_are_measured_as_they_are(mode: str, which: str, method: str) -> None:
    model, inner, optimizer = wrapped(mode)
    x, y = data()
    omega = [torch.ones(6)]
    plain = measure(network(), losses, x, y, **SETTING, directions=omega, probe="inputs", checked=True)
    chosen = model if which == "wrapped" else inner
    found = measure(chosen, losses, x, y, **SETTING, directions=omega, probe="inputs", method=method)
    torch.testing.assert_close(found.trace, plain.trace, rtol=1e-4, atol=1e-8)  # norms have room for rounding
    optimizer.zero_grad()
    losses(model(x), y).mean().backward()  # Opacus's hooks are back, and kept nothing of our passes
    samples = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)
    factor = (1 / samples.norm(dim=1)).clamp(max=1)
    ours = torch.cat([g.flatten() for g in found.gradient_sum.values()])
    torch.testing.assert_close(factor @ samples, ours, rtol=1e-4, atol=1e-5)


def test_all_that_takes_a_model_takes_an_opacus_one() -> None:
    model, _, _ = wrapped("hooks")
    x, y = data(5)
    exact = dense_information(model, losses, x, y, **SETTING)
    torch.testing.assert_close(exact.trace, dense_information(network(), losses, x, y, **SETTING).trace)
    sum_clipped(model, losses, x, y, max_grad_norm=1.0)
    assert check_batch(model, losses, x, y) == ()
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._backward_hooks.values())]
    assert len(hooks) == 4


def test_caveats_are_those_of_the_network_in_the_wrapper() -> None:
    """Beside Opacus nothing was said of kinks, of tokens, nor that nobody had looked."""
    x, y = data()
    model, inner, _ = wrapped("hooks")
    assert measure(model, losses, x, y, **SETTING).caveats == (NOT_CHECKED,)
    check_batch(inner, losses, x, y)
    assert measure(model, losses, x, y, **SETTING).caveats == ()
    again, network_in_it, _ = wrapped("hooks")
    check_batch(again, losses, x, y)
    assert measure(network_in_it, losses, x, y, **SETTING).caveats == ()
    kinked, _, _ = wrapped("hooks")
    kinked._module[1] = nn.ReLU()
    assert measure(kinked, losses, x, y, **SETTING).caveats[0].startswith("not proved: the model has kinks (ReLU at ")


def test_hooks_are_back_after_an_error() -> None:
    model, inner, _ = wrapped("hooks")
    with pytest.raises(ValueError, match="inputs"):
        measure(model, losses, torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.int64), **SETTING)
    assert len(inner[0]._forward_hooks) == 1


def test_hooks_are_back_in_their_order() -> None:
    model, inner, _ = wrapped("hooks")
    x, y = data(5)
    seen: list[int] = []
    inner[0].register_forward_hook(lambda *_: seen.append(1))
    before = list(inner[0]._forward_hooks.items())
    measure(model, losses, x, y, **SETTING)
    assert list(inner[0]._forward_hooks.items()) == before
    assert seen  # one's own is called by our passes, as by any other


def test_wrappers_that_cannot_be_used_are_named() -> None:
    x, y = data()
    model, _, _ = wrapped("ew")
    with pytest.raises(InputError, match=r"model\._module"):
        measure(model, losses, x, y, **SETTING)
    model, _, _ = wrapped("hooks")
    with pytest.raises(InputError, match="make_private"):
        PrivateSGD(model, losses, x, y, Settings(1.0, 1.0, 0.1))


@pytest.mark.filterwarnings("ignore")
def test_a_model_for_ghost_clipping_is_measured_as_it_is() -> None:
    opacus = pytest.importorskip("opacus")
    x, y = data()
    inner = network()
    model, optimizer, criterion, _ = opacus.PrivacyEngine().make_private(
        module=inner,
        optimizer=torch.optim.SGD(inner.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    found = measure(model, losses, x, y, **SETTING, directions=[torch.ones(6)], probe="inputs")
    plain = measure(network(), losses, x, y, **SETTING, directions=[torch.ones(6)], probe="inputs")
    torch.testing.assert_close(found.trace, plain.trace)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    theirs, ours = (
        torch.cat([g.flatten() for g in gs])
        for gs in ((p.grad for p in inner.parameters()), found.gradient_sum.values())
    )
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_subclasses_of_opacus_models_are_measured_too() -> None:
    opacus = pytest.importorskip("opacus")

    class Own(opacus.GradSampleModule):  # type: ignore[misc, name-defined]
        pass

    x, y = data(5)
    model = Own(network())
    found = measure(model, losses, x, y, **SETTING, directions=[torch.ones(6)], probe="inputs")
    plain = measure(network(), losses, x, y, **SETTING, directions=[torch.ones(6)], probe="inputs")
    torch.testing.assert_close(found.trace, plain.trace)
    assert len(model._module[0]._forward_hooks) == 1
    with pytest.raises(InputError, match="make_private"):
        PrivateSGD(model, losses, x, y, Settings(1.0, 1.0, 0.1))
