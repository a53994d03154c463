"""Data of other kinds than the model's: NumPy arrays are taken, everything else is named with how to convert it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from measuring import measure, sum_clipped
from reconbound import PrivateSGD, Settings
from reconbound.fisher.options import explain_dtype_error
from reconbound.training.private_sgd import TrainingError
from reconbound.validate import check_batch

SETTINGS = Settings(1.0, 1.0, 0.25, lr=0.1, seed=3)
LOSS = nn.CrossEntropyLoss(reduction="none")


def network(kind: str = "linear") -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3))
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.uniform(0, 255, (12, 16)).round(), numbers.integers(0, 3, 12)


def learner(inputs: Any, targets: Any, model: nn.Module | None = None, **options: Any) -> PrivateSGD:
    return PrivateSGD(model or network(), LOSS, inputs, targets, SETTINGS, progress=False, **options)


def locked(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "turn",
    [
        lambda x, y: (x, y),
        lambda x, y: (x.astype("float32"), y.astype("int32")),
        lambda x, y: (x.astype("float16"), y.astype("int8")),
        lambda x, y: (locked(x), locked(y)),
        lambda x, y: (x[::-1].copy()[::-1], y[::-1].copy()[::-1]),
        lambda x, y: (torch.tensor(x).float(), y),
        lambda x, y: (x.astype(">f4"), y.astype(">i2")),
        lambda x, y: (x.astype(np.longdouble), y.astype("uint16")),
        lambda x, y: (x, y.astype("uint64")),
    ],
    ids=["float64", "float32", "float16", "read-only", "reversed", "tensor and array", "swapped bytes", "long", "uint"],
)
def test_numpy_arrays_train_as_their_tensors_do(turn: Any, recwarn: pytest.WarningsRecorder) -> None:
    x, y = data()  # whole numbers up to 255: the same in all these kinds
    given = learner(*turn(x, y)).fit(4)
    plain = learner(torch.tensor(x, dtype=torch.float32), torch.tensor(y)).fit(4)
    assert all(torch.equal(a, b) for a, b in zip(given.model.parameters(), plain.model.parameters(), strict=True))
    assert given.accountant is not None
    assert plain.accountant is not None
    assert torch.equal(given.accountant.trace(), plain.accountant.trace())
    assert not [w for w in recwarn.list if "can be guessed" not in str(w.message)]  # of the seed of this test


def test_numpy_arrays_in_the_papers_way_and_in_a_dictionary() -> None:
    x, y = data()
    settings = Settings.paper(3, len(x), noise_multiplier=1.0, max_grad_norm=1.0, lr=0.1)
    assert PrivateSGD(network(), LOSS, x, y, settings).fit(2).step == 2
    named = learner({"input": x}, y)
    assert named.inputs["input"].dtype == torch.float32
    assert learner((x,), y).inputs[0].dtype == torch.float32
    double = learner(x, y, network().double())
    assert double.inputs.dtype == torch.float64


CASES = [
    (torch.float64, r"inputs is torch\.float64, the model torch\.float32: convert it, inputs\.to\(torch\.float32\)"),
    (torch.float16, r"inputs is torch\.float16, the model torch\.float32"),
    (torch.uint8, r"inputs is torch\.uint8, the model torch\.float32: .*divide by 255"),
    (torch.int64, r"inputs is torch\.int64, the model torch\.float32: .*divide by 255"),
]


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(("dtype", "text"), CASES, ids=lambda x: str(x)[:14])
def test_inputs_of_another_dtype_are_named(dtype: torch.dtype, text: str, kind: str) -> None:
    x, y = data()
    inputs, targets, model = torch.tensor(x).to(dtype), torch.tensor(y), network(kind)
    with pytest.raises(ValueError, match=text):
        learner(inputs, targets, model)
    with pytest.raises(ValueError, match=text):
        check_batch(model, LOSS, inputs, targets)
    with pytest.raises(ValueError, match=text):
        sum_clipped(model, LOSS, inputs, targets, max_grad_norm=1.0)
    private = text if dtype.is_floating_point else r"must be a floating-point tensor, got torch\.u?int.*\.float\(\)"
    for method in ("auto", "generic"):
        with pytest.raises(ValueError, match=private):
            measure(model, LOSS, inputs, targets, max_grad_norm=1.0, noise_multiplier=1.0, method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_targets_that_the_loss_does_not_take_are_named(dtype: torch.dtype) -> None:
    x, y = data()
    inputs, targets = torch.tensor(x).float(), torch.tensor(y).to(dtype)
    text = rf"targets is {dtype}, which loss_fn does not take .*targets\.long\(\)"
    with pytest.raises(ValueError, match=text):
        learner(inputs, targets)
    with pytest.raises(ValueError, match=text):
        measure(network(), LOSS, inputs, targets, max_grad_norm=1.0, noise_multiplier=1.0)


def test_other_things_are_refused_by_name() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=r"inputs must be a tensor or a NumPy array .*got 'a list without one'"):
        learner(x.tolist(), y)
    with pytest.raises(ValueError, match=r"targets must be a tensor or a NumPy array .*got 'a list without one'"):
        learner(x, y.tolist())
    with pytest.raises(ValueError, match="targets must hold numbers, got 'an array of object'"):
        learner(x, y.astype(object))
    with pytest.raises(ValueError, match="inputs is a NumPy array"):
        check_batch(network(), LOSS, x, torch.tensor(y))


class Scaled(nn.Module):
    """A model that takes whole numbers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.inside(x * scale.float())


def test_self_converting_model_is_unchanged() -> None:
    x, y = data()
    inputs = (torch.tensor(x).float() / 255, torch.ones(12, 1, dtype=torch.uint8))
    assert learner(inputs, torch.tensor(y), Scaled()).fit(2).step == 2


def test_evaluation_errors_are_reported() -> None:
    x, y = data()
    for evaluate, kind, text in (
        (lambda m: {"a": m(torch.tensor(x)).sum()}, TrainingError, r"evaluate gave the model data .*torch\.float32"),
        (lambda m: {"step": 1.0}, ValueError, "evaluate must not return a number of this name, .* got 'step'"),
        (lambda m: 0.5, ValueError, "evaluate must return a dictionary of numbers, by name, got 'a float'"),
        (lambda m: {"a": torch.ones(3)}, ValueError, r"evaluate's 'a' must be one number, got 'a tensor of shape \(3"),
    ):
        made = learner(x, y, evaluate=evaluate)
        with pytest.raises(kind, match=text):
            made.fit(2)

    def broken(model: nn.Module) -> dict[str, float]:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        learner(x, y, evaluate=broken).fit(2)


@pytest.mark.parametrize(
    "text",
    [
        "expected target dtype to be Long or Byte, but got Int",
        "expected scalar type Long but found Int",
        "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
    ],
)
def test_target_messages_of_other_versions(text: str) -> None:
    found = explain_dtype_error(RuntimeError(text), network(), torch.ones(2, 16), torch.ones(2, dtype=torch.int32))
    assert str(found).startswith(f"targets is torch.int32, which loss_fn does not take ({text})")
    assert explain_dtype_error(RuntimeError("out of memory"), network(), torch.ones(2, 16), torch.ones(2)) is None
    assert explain_dtype_error(RuntimeError(text), network(), torch.ones(2, 16), None) is None
