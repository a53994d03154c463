"""Hooks on gradients are refused before training; forward hooks and parametrizations are part of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from measuring import measure, sum_clipped
from reconbound import PrivateSGD, Settings
from reconbound.validate import ModelError, check_batch


def _scaled(*arguments: object) -> object:
    """A backward hook that returns the gradients it is given last, tripled."""
    last = arguments[-1] if len(arguments) == 2 else arguments[1]
    return tuple(None if g is None else 3 * g for g in last)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (lambda m: m[0].weight.register_hook(lambda g: 0 * g), r"parameter '0.weight' has a hook .*\(register_hook\)"),
        (
            lambda m: m[2].bias.register_post_accumulate_grad_hook(lambda p: p.grad.zero_()),
            r"parameter '2.bias' has a hook .*\(register_post_accumulate_grad_hook\)",
        ),
        (lambda m: m[2].register_full_backward_hook(_scaled), r"module '2' \(Linear\) has a hook"),
        (lambda m: m[0].register_full_backward_pre_hook(_scaled), r"module '0' \(Linear\) .*full_backward_pre_hook"),
        (lambda m: m.register_full_backward_hook(_scaled), r"the model's own forward \(Sequential\) has a hook"),
        (
            lambda m: nn.modules.module.register_module_full_backward_hook(_scaled),
            r"every module .*register_module_full_backward_hook",
        ),
    ],
)
def test_hooks_on_gradients_are_refused_before_training(register, text) -> None:
    """Training would run them, and the sums and the information did not: not a word was said."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    loss = nn.CrossEntropyLoss(reduction="none")
    calls = (
        lambda: check_batch(model, loss, x, y),
        lambda: sum_clipped(model, loss, x, y, max_grad_norm=1.0),
        lambda: measure(model, loss, x, y, max_grad_norm=1.0, noise_multiplier=1.0),
        lambda: PrivateSGD(model, loss, x, y, Settings(1.0, 1.0, 0.5)),
    )
    for call in calls[:3]:
        call()
    handle = register(model)
    try:
        for call in calls:
            with pytest.raises(ModelError, match=text):
                call()
    finally:
        handle.remove()
    for call in calls[:3]:
        call()


def test_forward_hooks_and_parametrizations_are_part_of_the_model() -> None:
    """They are run, and the sums are autograd's; a hook on a frozen parameter's gradient is nobody's business."""
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    loss = nn.CrossEntropyLoss(reduction="none")
    for change in (
        lambda m: m[2].register_forward_hook(lambda module, args, out: 2 * out),
        lambda m: m[0].register_forward_hook(lambda module, args, out: out.sin()),
        lambda m: m[0].register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        lambda m: nn.utils.parametrizations.weight_norm(m[0]),
        lambda m: nn.utils.parametrizations.spectral_norm(m[0]).eval(),
        lambda m: (m[0].weight.register_hook(lambda g: 0 * g), m[0].requires_grad_(False)),
    ):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        change(model)
        check_batch(model, loss, x, y)
        found = sum_clipped(model, loss, x, y, max_grad_norm=1e30, clip="hard").gradient_sum
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        plain = torch.autograd.grad(loss(model(x), y).sum(), list(params.values()))
        for name, gradient in zip(params, plain, strict=True):
            torch.testing.assert_close(found[name], gradient)
