"""Common mistakes with step_information: each gives a message that names it, and none gives a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from measuring import measure, sum_clipped
from reconbound import PrivateSGD, Settings
from reconbound._internal.checks import InputError
from reconbound.fisher import Private, dense_information
from reconbound.validate import ModelError
from small_models import RECORDS, Wrap, classes, cross_entropy, normal

STEP: dict[str, Any] = {"max_grad_norm": 0.8, "noise_multiplier": 0.7}


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(), normal(6), classes(4)


def refused(match: str, *args: Any, kind: type[Exception] = ValueError, **kw: Any) -> None:
    with pytest.raises(kind, match=match):
        measure(*args, **(STEP | kw))


def with_layer(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(8), r"module '1' \(BatchNorm1d\) mixes the records of a batch.*nn.GroupNorm"),
        (nn.Dropout(0.1), r"module '1' \(Dropout\) drops values at random: call .eval\(\)"),
    ],
)
def test_layers_that_mix_or_drop(layer: nn.Module, message: str) -> None:
    _, x, y = small()
    model = with_layer(layer)
    refused(message, model, cross_entropy, x, y, kind=ModelError)
    with pytest.raises(ModelError, match=message):
        sum_clipped(model, cross_entropy, x, y, max_grad_norm=0.8)
    measure(model.eval(), cross_entropy, x, y, **STEP)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float) -> None:
    model, x, y = small()
    x[3, 4] = value
    refused(rf"inputs\[3, 4\] is {value}, one of 1 values that are not finite", model, cross_entropy, x, y)
    with pytest.raises(ValueError, match=rf"inputs\[3, 4\] is {value}"):
        sum_clipped(model, cross_entropy, x, y, max_grad_norm=0.8)
    soft = torch.full((RECORDS, 4), 0.25).double()
    soft[0, 0] = value
    refused(rf"targets\[0, 0\] is {value}", model, cross_entropy, normal(6), soft)
    model[0].weight.data[0, 0] = value  # type: ignore[index]
    refused("parameter '0.weight' is not finite", model, cross_entropy, normal(6), y, kind=ModelError)


def test_what_was_checked_before_is_not_read_again() -> None:
    """checked=True: for loops that have had the batch checked; the values pass through as they are."""
    model, x, y = small()
    x[3, 4] = float("nan")
    got = measure(model, cross_entropy, x, y, checked=True, error="bound", **STEP)
    assert torch.isnan(got.trace).tolist() == [i == 3 for i in range(RECORDS)]


def test_numpy_and_plain_lists() -> None:
    model, x, y = small()
    refused(
        r"inputs is a NumPy array.*torch.as_tensor\(inputs, dtype=torch.float64\)", model, cross_entropy, x.numpy(), y
    )
    refused("targets is a NumPy array", model, cross_entropy, x, y.numpy())
    refused(r"inputs\['a'\] is a NumPy array", model, cross_entropy, {"a": np.zeros(3)}, y)
    refused("targets must be a tensor with one row per record.*got list", model, cross_entropy, x, y.tolist())
    refused("inputs must be a tensor .*got list", model, cross_entropy, x.tolist(), y)
    refused("inputs must be a tensor .*got NoneType", model, cross_entropy, None, y)
    refused("mask must be a tensor of 0 and 1", model, cross_entropy, x, y, mask=[1] * RECORDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_grad_norm": "1.0"}, "max_grad_norm must be a number, got '1.0'"),
        ({"noise_multiplier": "0.7"}, "noise_multiplier must be a number, got '0.7'"),
        ({"noise_multiplier": None}, "noise_multiplier must be a number, got None"),
        ({"probes": "2"}, "count must be a number, got '2'"),
        ({"probes": 1.5}, "count must be a whole number, got 1.5"),
        ({"micro_batch": "all"}, "micro_batch must be a number, got 'all'"),
        ({"generator": 0}, "generator must be a torch.Generator, got 0"),
    ],
)
def test_numbers_of_the_wrong_kind(arguments: dict[str, Any], message: str) -> None:
    refused(message, small()[0], cross_entropy, *small()[1:], kind=InputError, **arguments)


def test_model_and_loss_of_the_wrong_kind() -> None:
    model, x, y = small()
    refused("model must be a torch.nn.Module, got 'function'", lambda x: x, cross_entropy, x, y)
    refused("loss_fn must be a function", model, "cross_entropy", x, y)


def test_losses_that_are_not_one_per_record() -> None:
    model, x, y = small()
    single = (
        r'one loss per record, shape \(B,\), got a single number: it was reduced over the batch, use reduction="none"'
    )
    for loss in (nn.CrossEntropyLoss(), lambda o, t: cross_entropy(o, t).mean().reshape(1)):
        for method in ("layers", "mixed", "generic"):
            refused(single, model, loss, x, y, method=method)
    refused(single, model, nn.CrossEntropyLoss(), x[:1], y[:1])
    refused(r"shape \(B,\), got \(B, 4\): sum or average it over each record", model, lambda o, t: o.square(), x, y)
    refused("loss_fn must return a floating-point tensor .*got float", model, lambda o, t: 1.0, x, y)
    refused("loss_fn must return a floating-point tensor .*got torch.int64", model, lambda o, t: o.argmax(1), x, y)


@pytest.mark.parametrize("method", ["auto", "mixed", "generic"])
def test_gradients_that_do_not_depend_on_the_private_part(method: Any) -> None:
    _, x, y = small()
    message = r"the gradient does not depend on the private part \(input\): look for detach\(\)"
    cut = Wrap(lambda m, x: m.head(x.detach()), head=nn.Linear(6, 4)).double()
    refused(message, cut, cross_entropy, x, y, method=method)
    constant = Wrap(lambda m, x: m.head(torch.ones_like(x)), head=nn.Linear(6, 4)).double()
    refused(message, constant, cross_entropy, x, y, method=method)
    got = measure(constant, cross_entropy, x, y, method=method, checked=True, **STEP)
    assert (got.trace == 0).all()  # and rightly so: nothing of x is in it
    idle = Wrap(lambda m, x: x[:, :4] * 1.0, head=nn.Linear(6, 4)).double()
    refused("the loss does not depend on any trainable parameter", idle, cross_entropy, x, y, method=method)


def test_devices_and_precisions() -> None:
    model, x, y = small()
    refused(r"inputs is on meta, the model on cpu: use inputs.to\('cpu'\)", model, cross_entropy, x.to("meta"), y)
    refused("targets is on meta, the model on cpu", model, cross_entropy, x, y.to("meta"))
    refused("inputs is torch.float64, the model torch.float32: convert it", model.float(), cross_entropy, x, y)


def test_private_features_that_a_record_does_not_have() -> None:
    model, x, y = small()
    refused(
        "private must name features from 0 to 5, got '2 to 6'", model, cross_entropy, x, y, private=torch.tensor([2, 6])
    )


def test_an_empty_batch_is_no_mistake() -> None:
    """A Poisson batch may be empty: nothing is told, the sum is zero; chosen features are still counted."""
    model, x, y = small()
    chosen = Private(features=torch.tensor([0, 2]))
    for kw in ({}, {"diagonal": True}, {"micro_batch": 3}, {"private": chosen}):
        got = measure(model, cross_entropy, x[:0], y[:0], **STEP, **kw)  # type: ignore[arg-type]
        assert got.trace.shape == (0,)
        assert got.features == (2 if "private" in kw else 6)
    total = sum_clipped(model, cross_entropy, x[:0], y[:0], max_grad_norm=0.8).gradient_sum
    assert all((t == 0).all() for t in total.values())


def test_the_result_shows_sizes_and_no_value() -> None:
    model, x, y = small()
    assert repr(measure(model, cross_entropy, x, y, **STEP)) == (
        "StepInformation(8 records, 6 private features, 1 probe)"
    )
    more = measure(model, cross_entropy, x, y, diagonal=True, spectral=2, probes=2, **STEP)
    assert repr(more) == "StepInformation(8 records, 6 private features, 2 probes, with diagonal and spectral)"


# --- what is private: a number to be predicted, features by a list -------------------------------


def _regression() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return model, torch.rand(6, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - targets).square()


@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
@pytest.mark.parametrize("more", [{}, {"diagonal": True}, {"probes": 3}])
def test_private_target_needs_no_second_dimension(method: Any, more: dict[str, Any]) -> None:
    """I = ‖∂g̃/∂y‖²/(σC)², with the Jacobian of each record's clipped gradient taken by autograd."""
    model, x, y = _regression()
    weights = list(model.parameters())

    def clipped(i: int, target: Tensor) -> Tensor:
        loss = _squared(model(x[i : i + 1]), target[None])[0]
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, create_graph=True)])
        return gradient * (0.3 / gradient.norm()).clamp(max=1.0)

    jacobians = [torch.autograd.functional.jacobian(lambda t, i=i: clipped(i, t), y[i]) for i in range(6)]
    wanted = torch.stack([j.square().sum() for j in jacobians]) / (2.0 * 0.3) ** 2
    setting: dict[str, Any] = {"max_grad_norm": 0.3, "noise_multiplier": 2.0, "clip": "hard", "private": "target"}
    found = measure(model, _squared, x, y, **setting, method=method, **more)
    torch.testing.assert_close(found.trace, wanted)
    assert found.features == 1


def test_a_ledger_of_private_numbers_to_be_predicted() -> None:
    model, x, y = _regression()
    settings = Settings(1.0, 1.0, 0.5, budget=2.0, seed=1)
    learner = PrivateSGD(model, _squared, x, y, settings, private="target", progress=False).fit(10)
    assert learner.features == 1
    assert learner.accountant is not None
    assert (learner.accountant.mse_floor().value > 0).all()


def test_private_features_may_be_a_list_or_an_array() -> None:
    model, x, y = _regression()
    setting: dict[str, Any] = {"max_grad_norm": 0.3, "noise_multiplier": 2.0}
    wanted = dense_information(model, _squared, x, y, **setting, private=torch.tensor([0, 2]))
    for private in ([0, 2], np.array([0, 2]), [True, False, True, False], Private(features=[0, 2])):  # type: ignore[arg-type]
        found = dense_information(model, _squared, x, y, **setting, private=private)  # type: ignore[arg-type]
        torch.testing.assert_close(found.matrix, wanted.matrix)
        assert measure(model, _squared, x, y, **setting, private=private).features == 2  # type: ignore[arg-type]
    for wrong in (["age"], [0.5], [[1], [2, 3]]):
        with pytest.raises(InputError, match="private must be None, a tensor or list of features"):
            measure(model, _squared, x, y, **setting, private=wrong)  # type: ignore[arg-type]


def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"part must be one of input, target, module.*got 'modul'"):
        Private("modul", "0")  # type: ignore[arg-type]


class _Scaled(nn.Module):
    """A module that answers one number a record, (B,), and a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.alone, self.scale = nn.Linear(4, 1), nn.Flatten(0), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alone(self.first(x)) * self.scale).square()


@pytest.mark.parametrize("private", [None, Private("module", "alone")])
def test_scalar_outputs_and_scalar_parameters(private: Private | None) -> None:
    """As dense Jacobians have it, and those as autograd has them; the sum is of the clipped gradients."""
    torch.manual_seed(0)
    model, x, y = _Scaled().double(), torch.rand(6, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    setting: dict[str, Any] = {"max_grad_norm": 0.1, "noise_multiplier": 2.0}
    dense = dense_information(model, _squared, x, y, **setting, private=private)
    found = measure(model, _squared, x, y, **setting, private=private, probe="inputs", probes=4)
    assert found.features == (4 if private is None else 1)
    if private is not None:  # with one feature a probe in it is exact
        torch.testing.assert_close(found.trace, dense.across + dense.along)
    torch.testing.assert_close(found.norm, dense.norm)
    torch.testing.assert_close(found.along, dense.along)
    sums = sum_clipped(model, _squared, x, y, max_grad_norm=0.1).gradient_sum
    for name, wanted in dense.gradient_sum.items():
        torch.testing.assert_close(sums[name], wanted)
    hidden = model.first(x).detach()[:, 0]  # by hand: ∇_w loss of the module's answer h alone, d/dh of it

    def gradient(h: Tensor, i: int) -> Tensor:
        out = torch.tanh(h * model.scale).square()
        (slope,) = torch.autograd.grad((out - y[i]).square(), h, create_graph=True)
        (scale,) = torch.autograd.grad((out - y[i]).square(), model.scale, create_graph=True)
        flat = torch.cat([slope * x[i], slope[None], scale[None]])  # of first.weight, first.bias, scale
        ratio = flat.norm() / 0.1 - 1
        return flat / (ratio * (1 + torch.erf(ratio / 2**0.5)) / 2 + 1)

    if private is not None:
        for i in range(6):
            own = torch.autograd.functional.jacobian(lambda h, i=i: gradient(h, i), hidden[i].requires_grad_())
            torch.testing.assert_close(found.trace[i], own.square().sum() / (2.0 * 0.1) ** 2)


def test_a_feature_named_twice_is_refused() -> None:
    """A mask of whole numbers, 1 0 1 0, would be the features 0 and 1 and not 0 and 2."""
    model, x, y = _regression()
    refused("must name each feature once.*mask", model, _squared, x, y, private=[1, 0, 1, 0])
    refused("must name each feature once.*mask", model, _squared, x, y, private=[-1, x[0].numel() - 1])
