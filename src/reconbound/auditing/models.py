"""The paper's two networks (its tables 1 and 2) and some for other data, all with a loss smooth in the input.

Activations are tanh, and pooling takes averages.

The tables list a tanh after the last layer too. Here the logits have none, as in Papernot et al. (2020), whom the
tables follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError


def mnist_cnn() -> nn.Sequential:
    """Creates the network of table 1: 26,010 parameters, inputs (B, 1, 28, 28).

    >>> sum(p.numel() for p in mnist_cnn().parameters())
    26010
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


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
        for name, value in (("mean", mean), ("std", std)):
            tensor = _constants(name, value)
            self.register_buffer(name, tensor.reshape(-1, 1, 1) if tensor.dim() else tensor)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def _constants(name: str, value: float | Sequence[float]) -> Tensor:
    try:
        tensor = torch.as_tensor(value, dtype=torch.get_default_dtype()).clone()
    except (TypeError, ValueError):
        tensor = torch.empty(0)
    good = tensor > 0 if name == "std" else tensor == tensor
    if tensor.numel() == 0 or not bool((good & tensor.isfinite()).all()):
        kind = "positive number" if name == "std" else "number"
        raise InputError(name, f"must be a finite {kind}, or one for each channel", value)
    return tensor


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
        own = dict(module.named_parameters(recurse=False))
        learned = {name: p for name, p in own.items() if p.requires_grad}
        scales = [name for name, p in learned.items() if p.dim() < 2 and "bias" not in name]
        if scales:
            _reset_scales(module, scales[0], [p for p in own.values() if not p.requires_grad])
        for name, p in learned.items():
            if p.dim() > 1:
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
            elif "bias" in name:
                nn.init.zeros_(p)


def _reset_scales(module: nn.Module, name: str, frozen: list[nn.Parameter]) -> None:
    reset, kept = getattr(module, "reset_parameters", None), [p.detach().clone() for p in frozen]
    if not callable(reset):
        raise InputError("initialise", f"must be another: no reset_parameters for {name!r} of", type(module).__name__)
    reset()
    with torch.no_grad():
        for p, before in zip(frozen, kept, strict=True):
            p.copy_(before)
