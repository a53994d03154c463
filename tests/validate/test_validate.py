"""Each check fires on a model made for it, with its message, and stays silent on models that are fine."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconbound.validate import ReconboundWarning, check_batch, check_model
from validating import Inner, Wrapped, batch, network, per_record, says


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- models that are fine --------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return self.layer(torch.cat([x, extra], 1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens).mean(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


@pytest.mark.parametrize("records", [1, 2, 5])
@pytest.mark.parametrize(
    "model",
    [
        network(),
        convolutional(),
        network(nn.LayerNorm(8)),
        network(nn.Dropout(0.5)).eval(),
        network(nn.Dropout(0.0)),
        network(nn.ELU()),
    ],
)
def test_good_models_do_not_warn(model: nn.Module, records: int) -> None:
    check_batch(model, per_record, *batch(records))
    check_batch(copy.deepcopy(model).double(), per_record, batch(records)[0].double(), batch(records)[1])


def test_several_inputs_tokens_and_public_normalisation_pass() -> None:
    x, y = batch()
    extra = torch.ones(5, 2)
    check_batch(Pair(), per_record, (x, extra), y)
    check_batch(Pair(), per_record, {"x": x, "extra": extra}, y)
    check_batch(Tokens(), per_record, torch.arange(20).reshape(5, 4) % 10, y)
    check_batch(network(nn.BatchNorm1d(8)).eval(), per_record, x, y)
    check_model(nn.Sequential(nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3)))


def test_model_batch_and_random_state_are_left_as_they_were() -> None:
    model, (x, y) = network(), batch()
    before, x_before, random_before = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    check_batch(model, per_record, x, y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(x, x_before)
    assert not x.requires_grad
    assert torch.equal(random_before, torch.get_rng_state())
    assert all(p.grad is None and not m._forward_hooks for m in model.modules() for p in m.parameters())
    with torch.no_grad():
        check_batch(model, per_record, x, y)  # needs gradients, and turns them on for itself


# --- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.BatchNorm1d(8), "BatchNorm1d"),
        (nn.BatchNorm2d(8), "BatchNorm2d"),
        (nn.BatchNorm3d(8), "BatchNorm3d"),
        (nn.SyncBatchNorm(8), "SyncBatchNorm"),
        (nn.BatchNorm1d(8, track_running_stats=False).eval(), "BatchNorm1d"),
        (nn.InstanceNorm1d(8, track_running_stats=True), "InstanceNorm1d"),
    ],
)
def test_batch_statistics(layer: nn.Module, name: str) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(6, 8), layer))
    with says(rf"module 'body.1' \({name}\) mixes the records of a batch: .* Use nn.GroupNorm"):
        check_model(model)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.1),
        nn.Dropout2d(0.1),
        nn.AlphaDropout(0.1),
        nn.LSTM(8, 8, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(8, 2, dropout=0.1),
        nn.RReLU(),
    ],
)
def test_dropout_left_on(layer: nn.Module) -> None:
    with says(
        rf"module '1' \({type(layer).__name__}\) drops values at random: call .eval\(\) on it or set its rate to 0"
    ):
        check_model(network(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReconboundWarning)
        check_model(network(layer).eval())


def test_no_trainable_parameter() -> None:
    with says("no parameter of the model requires a gradient: call requires_grad_"):
        check_model(network().requires_grad_(False))


def test_diverged_parameter() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[1, 2] = float("nan")
    with says("parameter '0.weight' is not finite: training has diverged"):
        check_batch(model, per_record, *batch())


@pytest.mark.parametrize(
    "layer",
    [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.PReLU(), nn.Hardtanh(), nn.Hardswish(), nn.SELU(), nn.MaxPool1d(1)],
)
def test_kinks_warn(layer: nn.Module) -> None:
    kind = type(layer).__name__
    message = rf"kinks in module '1' \({kind}\): .*tanh or GELU .*, average pooling for max pooling"
    with pytest.warns(ReconboundWarning, match=message):
        check_model(network(layer))
    with pytest.warns(ReconboundWarning, match=message):
        check_batch(network(layer), per_record, *batch())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (lambda h: F.max_pool1d(h, 1), "max_pool2d_with_indices"),
        (lambda h: h.clamp(min=0), "clamp"),
        (lambda h: F.elu(h, alpha=2.0), "elu"),
        (torch.abs, "abs"),
    ],
)
def test_functional_kinks_warn(function: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.warns(ReconboundWarning, match=rf"kinks in the model's own forward \({name}\)"):
        check_batch(Wrapped(function), per_record, *batch())


def test_kink_in_the_loss_warns() -> None:
    with pytest.warns(ReconboundWarning, match=r"kinks in loss_fn \(abs\)"):
        check_batch(network(), lambda out, y: (out[:, 0] - y).abs(), *batch())


# --- data and loss ---------------------------------------------------------------------------------------------------


def test_non_finite_inputs_name_record_and_feature() -> None:
    x, y = batch()
    x[3, 4], x[4, 0] = float("nan"), float("inf")
    with says(r"^inputs\[3, 4\] is nan, one of 2 values that are not finite: remove those records"):
        check_batch(network(), per_record, x, y)
    image = torch.zeros(4, 1, 5, 5)
    image[2, 0, 1, 3] = float("-inf")
    with says(r"^inputs\['x'\]\[2, 0, 1, 3\] is -inf"):
        check_batch(Pair(), per_record, {"x": image, "extra": torch.ones(4, 2)}, y[:4])
    with says(r"^targets\[1\] is nan"):
        check_batch(network(), per_record, torch.zeros(2, 6), torch.tensor([0.0, float("nan")]))


def test_rows_that_do_not_match() -> None:
    x, y = batch()
    with says(r"targets must have 5 rows, one per record of inputs, got the shape \(4,\)"):
        check_batch(network(), per_record, x, y[:4])
    with says(r"inputs\[1\] must have 5 rows, one per record of inputs, got the shape \(\)"):
        check_batch(Pair(), per_record, (x, torch.tensor(1.0)), y)
    with says("inputs must be a tensor with one row per record, .* got str without a tensor"):
        check_batch(network(), per_record, "text", y)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            nn.CrossEntropyLoss(),
            r'one loss per record, .* got a single number: .* use reduction="none"',
        ),
        (lambda out, y: out.mean(0)[:1], r'got a single number: .* use reduction="none"'),
        (lambda out, y: (out - 1) ** 2, r"got \(B, 3\): .* losses.flatten\(1\).mean\(1\)"),
        (lambda out, y: 0.0, "loss_fn must return a floating-point tensor .* got float"),
        (lambda out, y: out.argmax(1), "loss_fn must return a floating-point tensor .* got torch.int64"),
        (lambda out, y: out.mean(0), r"loss_fn depends on the batch|loss_fn couples the records"),
        (lambda out, y: out[:, 0] / (y - 1), "the loss of record 1 is -?inf: model or loss_fn overflows"),
    ],
)
def test_losses_of_the_wrong_shape(loss_fn: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    with says(message):
        check_batch(network(), loss_fn, *batch())


# --- records coupled, randomness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [1, 2, 5])
def test_coupled_records(records: int) -> None:
    def centred(h: Tensor) -> Tensor:
        return h - h.mean(0)

    x, y = batch(records)
    with says(r"module '1' \(Inner\) couples the records of a batch: one record's loss changes .*nn.GroupNorm"):
        check_batch(network(Inner(centred)), per_record, x, y)
    with says("module 'last' .*couples the records of a batch"):  # the first place where it can be seen
        check_batch(Wrapped(centred), per_record, x, y)
    with says("^loss_fn couples the records of a batch"):
        check_batch(network(), lambda out, y: per_record(out, y) - out.mean(), x, y)


def test_functional_batch_normalisation() -> None:
    with says(r"module '1' \(Inner\) couples the records of a batch"):
        check_batch(network(Inner(lambda h: F.batch_norm(h, None, None, training=True))), per_record, *batch())


def test_division_by_the_batch_size() -> None:
    with says(
        "^loss_fn depends on the batch: a record's loss changes when another record is left out. Do not divide by"
    ):
        check_batch(network(), lambda out, y: per_record(out, y) / len(y), *batch())


def test_coupling_through_the_targets() -> None:
    def balanced(out: Tensor, y: Tensor) -> Tensor:
        return per_record(out, y) * y.bincount(minlength=3).amax()

    with says("^loss_fn depends on the batch"):
        check_batch(network(), balanced, torch.zeros(3, 6), torch.tensor([0, 1, 1]))


def test_functional_randomness() -> None:
    with says(r"module '1' \(Inner\) is random: two runs .* F.dropout\(..., training=False\)"):
        check_batch(network(Inner(lambda h: F.dropout(h, 0.5))), per_record, *batch())
    with says(r"the model's own forward \(Wrapped\) is random"):
        check_batch(Wrapped(lambda h: h + torch.randn_like(h)), per_record, *batch())
    with says("^loss_fn is random"):
        check_batch(network(), lambda out, y: per_record(out, y) * torch.rand(len(y)), *batch())
    counter = iter(range(10))
    with says(r"module '1' \(Inner\) is random"):  # no random operation, but no function of its input either
        check_batch(network(Inner(lambda h: h + next(counter))), per_record, *batch())
