"""Models for a data set: the paper's two networks (its tables 1 and 2) and some others, their loss, score and checks.

They have tanh and average pooling, so that the loss is smooth in the input. The tables list a tanh after the last layer
too. Here the logits have none, as in Papernot et al. (2020), whom the tables follow.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reconbound import validate
from reconbound._internal.checks import InputError, choice
from reconbound._internal.rng import random_states_kept
from reconbound.auditing.worlds import made_up_records
from reconbound.data import Dataset
from reconbound.training.settings import reset_module

MODELS = ("auto", "linear", "mlp", "cnn")
#: What "auto" means for tokens.
EMBEDDING = "embedding"


def mnist_cnn() -> nn.Sequential:
    """Creates the network of table 1: 26,010 parameters, inputs (B, 1, 28, 28).

    >>> sum(p.numel() for p in mnist_cnn().parameters())
    26010
    """
    first = (nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.AvgPool2d(2, stride=1))
    second = (nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.AvgPool2d(2, stride=1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


def cifar10_cnn() -> nn.Sequential:
    """Creates the network of table 2: 550,570 parameters, inputs (B, 3, 32, 32).

    >>> sum(p.numel() for p in cifar10_cnn().parameters())
    550570
    """
    blocks: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            blocks += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            channels = width
        blocks.append(nn.AvgPool2d(2))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))


class _Standardise(nn.Module):
    """A layer that computes (x − mean)/std of each channel, with constants that do not come from the private data."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        for name, value, above in (("mean", mean, -math.inf), ("std", std, 0.0)):
            try:
                tensor = torch.as_tensor(value, dtype=torch.get_default_dtype()).clone()
            except (TypeError, ValueError):
                tensor = torch.empty(0)
            if tensor.numel() == 0 or not bool(((tensor > above) & tensor.isfinite()).all()):
                raise InputError(name, "must be finite (std: above 0), one number or one for each channel", value)
            self.register_buffer(name, tensor.reshape(-1, 1, 1) if tensor.dim() else tensor)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def standardised(model: nn.Sequential, mean: float | Sequence[float], std: float | Sequence[float]) -> nn.Sequential:
    """Puts a fixed layer, (x − mean)/std, in front of a network.

    The private input stays x, so floors stay in its units. The constants must be public: if they were computed from the
    private data, that release is not accounted for.

    Args:
        model: the network.
        mean: one number, or one for each channel of an image.
        std: one number, or one for each channel of an image.

    >>> model = standardised(nn.Sequential(nn.Identity()), 0.5, 0.25)
    >>> model(torch.tensor([0.0, 1.0]))
    tensor([-2.,  2.])
    """
    return nn.Sequential(_Standardise(mean, std), *model)


def linear(shape: Sequence[int], outputs: int) -> nn.Sequential:
    """Creates one linear layer on a record's numbers, inputs (B, *shape).

    Args:
        shape: the shape of a record.
        outputs: the number of outputs.

    >>> sum(p.numel() for p in linear((1, 8, 8), 10).parameters())
    650
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: Sequence[int], outputs: int, hidden: int = 32) -> nn.Sequential:
    """Creates a network with one hidden layer and tanh, inputs (B, *shape).

    Args:
        shape: the shape of a record.
        outputs: the number of outputs.
        hidden: the width of the hidden layer.

    >>> sum(p.numel() for p in mlp((4,), 3).parameters())
    259
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def cnn(shape: Sequence[int], outputs: int, hidden: int = 32) -> nn.Sequential:
    """Creates a convolutional network for images (B, C, H, W) of any size from 4x4.

    Each convolution has a tanh and is followed by average pooling by 2 until the image is at most 8 wide and high.

    Args:
        shape: the shape of an image, (C, H, W).
        outputs: the number of outputs.
        hidden: the width of the hidden layer.

    >>> sum(p.numel() for p in cnn((1, 8, 8), 10).parameters())
    21546
    """
    channels, height, width = shape
    if min(height, width) < 4:
        raise ValueError(f"a cnn needs images of at least 4x4, got {height}x{width}: use mlp or linear")
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)]
    channels, height, width = 16, height // 2, width // 2
    while True:
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.Tanh()]
        channels = 32
        if max(height, width) <= 8 or min(height, width) < 2:
            break
        layers.append(nn.AvgPool2d(2))
        height, width = height // 2, width // 2
    flat = channels * height * width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class _Mean(nn.Module):
    """A layer that computes the mean over a text's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def embedding(vocabulary: int, outputs: int, width: int = 32) -> nn.Sequential:
    """Creates a linear layer on the mean of the tokens' embeddings, inputs (B, length) of whole numbers.

    Args:
        vocabulary: the number of different tokens.
        outputs: the number of outputs.
        width: of an embedding.

    >>> sum(p.numel() for p in embedding(100, 2).parameters())
    3266
    """
    return nn.Sequential(nn.Embedding(vocabulary, width), _Mean(), nn.Linear(width, outputs))


def lecun_normal(model: nn.Module) -> None:
    """Sets fresh parameters: weights N(0, 1/inputs), biases 0, so that a deep chain with tanh keeps its signal.

    PyTorch's own have a third of that variance. Eight layers of them leave `cifar10_cnn` with logits that hardly depend
    on the image. Use it as `initialise` of PrivateSGD and Fleet. Scales of one dimension (of GroupNorm) are set by
    their module's reset_parameters; frozen parameters stay.

    Args:
        model: changed in place.

    >>> layer = nn.Linear(10_000, 8)
    >>> lecun_normal(layer)
    >>> round(layer.weight.detach().std().item(), 3), layer.bias.detach().abs().max().item()
    (0.01, 0.0)
    """
    for module in model.modules():
        learned = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        scales = [name for name, p in learned.items() if p.dim() < 2 and "bias" not in name]
        if scales and not reset_module(module):
            what = f"must be another: no reset_parameters for {scales[0]!r} of"
            raise InputError("initialise", what, type(module).__name__)
        for name, p in learned.items():
            if p.dim() > 1:
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
            elif "bias" in name:
                nn.init.zeros_(p)


def outputs_of(dataset: Dataset) -> int:
    """Returns the number of outputs of the model: one per class, or one."""
    if dataset.task == "number":
        return 1
    known = max(int(t.max()) + 1 if len(t) else 0 for t in (dataset.targets, dataset.test_targets))
    return max(2, known, len(dataset.class_names))


def model_kind(dataset: Dataset, spec: str) -> str:
    """Returns the kind of a model.

    "auto" means the paper's networks for mnist and cifar10, a cnn for images, an mlp for tables, the mean of embeddings
    for tokens.

    Args:
        dataset: the data of the audit.
        spec: as AuditOptions.model.
    """
    if spec != "auto":
        return spec
    if dataset.kind == "tokens":
        return EMBEDDING
    return "cnn" if dataset.kind == "image" and min(dataset.shape[1:]) >= 4 else "mlp"


def make_model(dataset: Dataset, spec: str = "auto", seed: int | None = None) -> nn.Module:
    """Creates a smooth model for the data set.

    Args:
        dataset: the data of the audit.
        spec: as AuditOptions.model. A factory is imported, hence run, from Python's path and the current folder.
        seed: for the initial parameters; None uses torch's generator as it is.
    """
    if seed is not None:
        with random_states_kept(seed):
            return make_model(dataset, spec)
    kind, outputs = model_kind(dataset, spec), outputs_of(dataset)
    if ":" not in kind:
        return network(kind, dataset.shape, outputs, image=dataset.kind == "image", vocabulary=dataset.vocabulary)
    module, _, name = kind.partition(":")
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)  # at the end, so that no file there replaces an installed module
    try:
        model = getattr(importlib.import_module(module), name)(dataset.shape, outputs)
    except Exception as error:  # the user's code may raise anything
        what = f"must name a factory to be called as factory(shape, outputs) ({type(error).__name__}: {error})"
        raise InputError("model", what, kind) from error
    finally:
        if added:
            sys.path.remove(here)
    if not isinstance(model, nn.Module):
        what = "must name a factory that returns a torch module"
        raise InputError("model", what, f"{kind} -> {type(model).__name__}")
    return model


def network(
    kind: str, shape: tuple[int, ...], outputs: int, *, image: bool, vocabulary: int | None = None
) -> nn.Module:
    """Creates one of the package's own models.

    Args:
        kind: "linear", "mlp" or "cnn"; "embedding" for tokens.
        shape: the shape of a record.
        outputs: the number of outputs.
        image: whether records are images.
        vocabulary: the number of different tokens; None for other records.
    """
    if vocabulary is not None:
        if kind != EMBEDDING:
            raise InputError("model", "must be auto or package.module:factory for tokens", kind)
        return embedding(vocabulary, outputs)
    if choice("model", kind, MODELS) in ("linear", "mlp"):
        return (linear if kind == "linear" else mlp)(shape, outputs)
    if not image or min(shape[1:]) < 4:
        raise InputError("model", f"must be linear or mlp for records of shape {shape}", kind)
    if shape == (1, 28, 28) and outputs == 10:
        return mnist_cnn()
    if shape == (3, 32, 32) and outputs == 10:
        return standardised(cifar10_cnn(), 0.5, 0.5)  # photographs: centred pixels train better
    return cnn(shape, outputs)


def describe_model(dataset: Dataset, spec: str) -> str:
    """Describes a model in a few words.

    Args:
        dataset: the data of the audit.
        spec: as AuditOptions.model.
    """
    kind = model_kind(dataset, spec)
    if kind != "cnn":
        known = {
            "linear": "linear",
            "mlp": "one hidden layer of 32, tanh",
            EMBEDDING: "mean of embeddings of 32, linear",
        }
        return known.get(kind, kind)
    paper = {(1, 28, 28): "the paper's MNIST network", (3, 32, 32): "the paper's CIFAR-10 network, pixels −1 to 1"}
    ten = len(dataset.class_names) == 10
    return paper[dataset.shape] if ten and dataset.shape in paper else "convolutions, tanh, average pooling"


def make_loss(dataset: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the loss, (outputs, targets) → (B,): cross-entropy for classes, half the squared error for a number."""
    return _cross_entropy if dataset.task == "classes" else _half_square


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1)[:, 0] - targets).square() / 2


def as_tensor(array: np.ndarray) -> Tensor:
    """Returns the array as a tensor; a copy where torch cannot share its memory (read-only, not in order)."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def score(dataset: Dataset, model: nn.Module, most: int | None = None) -> float:
    """Returns the accuracy on the test data, or R² for a number; NaN where there are no test data.

    Args:
        dataset: the data of the audit.
        model: the model to evaluate.
        most: use at most n test records, evenly spread; None for all.
    """
    count = len(dataset.test_inputs)
    if count == 0:
        return float("nan")
    rows = slice(None, None, 1 if most is None else max(1, count // most))
    device = next(model.parameters()).device
    with torch.no_grad():
        parts = as_tensor(dataset.test_inputs[rows]).split(1000)
        found = torch.cat([model(part.to(device)).cpu() for part in parts])
    truth = as_tensor(dataset.test_targets[rows])
    if dataset.task == "classes":
        return float((found.argmax(1) == truth).double().mean())
    rest, spread = (found.flatten(1)[:, 0] - truth).square().mean(), truth.var(unbiased=False)
    return float(1 - rest / spread) if spread > 0 else float("nan")


def start_afresh(dataset: Dataset, spec: str, model: nn.Module) -> None:
    """Gives a model fresh parameters, from torch's generator as it is.

    Args:
        dataset: the data of the audit.
        spec: as AuditOptions.model.
        model: the model of that kind.
    """
    model.load_state_dict(make_model(dataset, spec).state_dict())


def check_model(dataset: Dataset, spec: str) -> dict[str, str]:
    """Checks on three records that a model can be trained and accounted for, and on three that are made up.

    What it returns is published, so it comes from the records that are made up.

    Args:
        dataset: the data of the audit.
        spec: as AuditOptions.model.

    Returns:
        What the floors do not cover; empty for a smooth model. "kinks": floors of single records are not proved.
        "derivative": why there are none, where the model has no derivative by the private numbers. "model": other
        warnings.

    Raises:
        InputError: the factory is missing or raises, returns no module, or its model does not accept the records or
            returns too few numbers for them.
        ModelError: as `reconbound.validate.check_clipping`; or there are caveats only with the data's own records.
    """
    model = make_model(dataset, spec, seed=0)
    own = _caveats(dataset, spec, model, dataset.inputs[:3], dataset.targets[:3])
    caveats = _caveats(dataset, spec, model, *made_up_records(dataset, outputs_of(dataset)))
    covered = {*caveats, *(["kinks"] if "derivative" in caveats else [])}  # no floors, and none to be unproved
    for name in (name for name in own if name not in covered):
        why = (
            "what an audit publishes of a model must not depend on a record, and this shows on the data's records only"
        )
        raise validate.ModelError(f"{f'the model of {spec}: ' if ':' in spec else ''}{why}: {own[name]}")
    return caveats


def _caveats(dataset: Dataset, spec: str, model: nn.Module, inputs: np.ndarray, targets: np.ndarray) -> dict[str, str]:
    """Returns the caveats of a model that these records show. Raises the errors of `check_model`."""
    few, loss, reason = (as_tensor(inputs), as_tensor(targets)), make_loss(dataset), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            validate.check_model(model)
            _check_outputs(dataset, spec, model, few[0])
            validate.check_clipping(model, loss, *few)
        except validate.ModelError as error:
            raise validate.ModelError(f"the model of {spec}: {error}" if ":" in spec else str(error)) from error
        if len(dataset.scale):  # otherwise there are no private numbers
            private = None if dataset.private is None else as_tensor(dataset.private)
            try:
                validate.check_batch(model, loss, *few, private=private)
            except validate.ModelError as error:
                reason = str(error)  # the Fisher information of the private numbers is not defined
    messages = [w.message for w in caught if isinstance(w.message, validate.ReconboundWarning)]
    kinks = [message for message in messages if isinstance(message, validate.KinkWarning)]
    others = "; ".join(dict.fromkeys(str(message) for message in messages if message not in kinks))
    caveats = {}
    if reason:
        caveats["derivative"] = f"No unbiased floors: {reason}"
    elif kinks and len(dataset.scale):
        caveats["kinks"] = (
            f"The floors of single records are not proved for this model: it has kinks, in {kinks[-1].places}, where "
            "the gradient jumps with the input, and the Fisher information does not count the jumps. Tanh or GELU and "
            "average pooling have none. What holds whatever the data (Theorem 1, corners, Le Cam, rate–distortion, ε) "
            "needs no smooth model."
        )
    if others:
        caveats["model"] = others
    return caveats


def _check_outputs(dataset: Dataset, spec: str, model: nn.Module, inputs: Tensor) -> None:
    """Checks that the model returns one row per record, with a number for each class, or one number."""
    classes, wanted, count = dataset.task == "classes", outputs_of(dataset), len(inputs)
    must = "must name a factory whose model" if ":" in spec else "must be a model that"
    try:
        with torch.no_grad():
            outputs: Any = model(inputs)
    except Exception as error:  # the user's code may raise anything
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise InputError("model", f"{must} takes records of shape {dataset.shape} ({why})", spec) from error
    if not isinstance(outputs, Tensor):
        raise InputError("model", f"{must} returns a tensor", f"{spec} -> {type(outputs).__name__}")
    shape, given = tuple(outputs.shape), f"{spec} -> shape {tuple(outputs.shape)} for {count} records"
    if classes and (len(shape) != 2 or shape[0] != count or shape[1] < wanted):
        what = f"{must} gives {wanted} outputs for each record, one for each of the {wanted} classes"
        raise InputError("model", what, given)
    if not classes and (len(shape) < 2 or shape[0] != count or outputs.numel() != count):
        raise InputError("model", f"{must} gives one output for each record, (B, 1)", given)
