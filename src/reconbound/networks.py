"""The paper's two networks (its tables 1 and 2): tanh and average pooling, so that the loss is smooth in the input.

The tables list a tanh after the last layer too; as in Papernot et al. (2020), whom they follow, the logits have none
here."""

from __future__ import annotations

from torch import nn


def mnist_cnn() -> nn.Sequential:
    """Table 1: 26,010 parameters, inputs (B, 1, 28, 28).

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
    """Table 2: 550,570 parameters, inputs (B, 3, 32, 32).

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
