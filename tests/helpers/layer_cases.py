"""Small models with one kind of layer each: the first part of the table in cases.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconbound.fisher import Private
from small_models import (
    RECORDS,
    TRANSFORMER,
    VisionTransformer,
    attention,
    classes,
    cross_entropy,
    distance_bias,
    fresh,
    frozen,
    fused_attention,
    masked_attention,
    multihead,
    normal,
    plain,
    recurrent,
    residual,
    wrap,
)


@dataclass(frozen=True)
class Case:
    """One row: build() gives (model, inputs, targets); layers says whether the rules should cover it, mixed whether
    they should with copies of parameters, forward_mode whether PyTorch has forward-mode derivatives for it."""

    name: str
    build: Callable[[], tuple[nn.Module, Any, Any]]
    layers: bool = True
    mixed: bool = True
    forward_mode: bool = True
    loss: Callable[[Any, Any], Tensor] = cross_entropy
    private: Private | Tensor | str | None = None

    def make(self) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(7)
        model, inputs, targets = self.build()
        return model.double(), inputs, targets


LINEAR3 = {"head": lambda: nn.Linear(3, 3)}

LAYERS = [
    Case("softmax regression", plain((5,), nn.Linear(5, 3))),
    Case("mlp", plain((5,), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 3))),
    Case("mlp without bias", plain((5,), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))),
    Case("wide linear on tokens", plain((9, 2), nn.Linear(2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))),
    Case("linear, two middle dims", plain((2, 2, 3), nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))),
    Case(
        "conv1d",
        plain((2, 9), nn.Conv1d(2, 3, 3, stride=2, dilation=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
    ),
    Case(
        "conv1d same",
        plain((2, 6), nn.Conv1d(2, 4, 4, padding="same", groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
    ),
    Case("conv1d valid", plain((6, 5), nn.Conv1d(6, 4, 2, padding="valid"), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))),
    Case(
        "conv2d", plain((1, 5, 6), nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    ),
    Case(
        "conv2d odd",
        plain(
            (4, 6, 5),
            nn.Conv2d(4, 2, (3, 2), (2, 1), (1, 2), (1, 2), groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(42, 3),
        ),
    ),
    Case(
        "conv2d many channels",
        plain((5, 3, 3), nn.Conv2d(5, 6, 2, bias=False), nn.Tanh(), nn.Conv2d(6, 5, 2), nn.Flatten(), nn.Linear(5, 3)),
    ),
    Case(
        "conv2d circular",
        plain(
            (2, 4, 4),
            nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
    ),
    Case(
        "conv2d reflect",
        plain(
            (1, 4, 4),
            nn.Conv2d(1, 2, 3, padding=(1, 2), padding_mode="reflect"),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(48, 3),
        ),
    ),
    Case(
        "conv2d replicate, same",
        plain(
            (1, 3, 4),
            nn.Conv2d(1, 2, 2, padding="same", padding_mode="replicate"),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
    ),
    Case(
        "conv2d depthwise, average pool",
        plain(
            (3, 5, 5),
            nn.Conv2d(3, 6, 2, groups=3),
            nn.Tanh(),
            nn.AvgPool2d(2, 1),
            nn.Conv2d(6, 2, 1),
            nn.Flatten(),
            nn.Linear(18, 3),
        ),
    ),
    Case(
        "conv3d",
        plain(
            (2, 3, 4, 3),
            nn.Conv3d(2, 2, (2, 3, 1), (1, 2, 1), (0, 1, 1), groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(40, 3),
        ),
    ),
    Case(
        "conv3d dilated",
        plain(
            (1, 3, 3, 5),
            nn.Conv3d(1, 2, 2, dilation=(1, 2, 3), padding=(1, 0, 0)),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
    ),
    Case(
        "layer norm",
        plain((3, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.LayerNorm([3, 3]), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)),
    ),
    Case("layer norm, no bias", plain((4,), nn.Linear(4, 4), nn.LayerNorm(4, bias=False), nn.Tanh(), nn.Linear(4, 3))),
    Case(
        "group norm",
        plain(
            (2, 4, 4),
            nn.Conv2d(2, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
            nn.GroupNorm(1, 3),
        ),
    ),
    Case(
        "instance norm, no parameters",
        plain(
            (2, 3, 3), nn.Conv2d(2, 2, 2), nn.GroupNorm(2, 2, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
        ),
    ),
    Case(
        "residual, convolutional",
        wrap(
            (2, 4, 4),
            residual,
            first=lambda: nn.Conv2d(2, 2, 3, padding=1),
            second=lambda: nn.Conv2d(2, 2, 3, padding=1),
            head=lambda: nn.Linear(32, 3),
        ),
    ),
    Case(
        "recurrent",
        wrap((4, 2), recurrent, inward=lambda: nn.Linear(2, 3), loop=lambda: nn.Linear(3, 3, bias=False), **LINEAR3),
    ),
    Case("transformer block", wrap((3, 4), attention, **TRANSFORMER)),
    Case(
        "multihead attention",
        wrap(
            (3, 4),
            multihead,
            attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            head=lambda: nn.Linear(4, 3),
        ),
    ),
    Case(
        "scaled dot product attention",
        wrap((3, 4), fused_attention, qkv=lambda: nn.Linear(4, 12), head=lambda: nn.Linear(4, 3)),
    ),
    Case(
        "encoder layer",
        wrap(
            (2, 4),
            lambda m, x: m.head(m.layer(x).mean(1)),
            layer=lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True, activation="gelu"),
            head=lambda: nn.Linear(4, 3),
        ),
    ),
    Case(
        "multihead attention, weights wanted, masked",
        wrap(
            lambda: (normal(3, 4), torch.arange(RECORDS * 3).reshape(RECORDS, 3) % 7 == 1),
            masked_attention,
            attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            head=lambda: nn.Linear(4, 3),
        ),
        private=Private("input", 0),
    ),
    Case(
        "attention to other places",
        wrap(
            (4, 4),
            lambda m, x: m.head(m.attention(x[:, :2], x, x)[0].flatten(1)),
            attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            head=lambda: nn.Linear(8, 3),
        ),
        layers=False,
    ),
    Case("vision transformer", lambda: (fresh(VisionTransformer()), normal(2, 4, 4), classes()), layers=False),
    Case(
        "gates and scales",
        wrap(
            (3, 4),
            lambda m, x: m.head((x + torch.sigmoid(m.gate) * torch.tanh(m.a(x)) * m.scale).mean(1) / m.temperature),
            a=lambda: nn.Linear(4, 4),
            gate=lambda: nn.Parameter(torch.ones(())),
            scale=lambda: nn.Parameter(torch.ones(4)),
            temperature=lambda: nn.Parameter(torch.ones(1)),
            head=lambda: nn.Linear(4, 3),
        ),
        layers=False,
    ),
    Case(
        "positions, as many as records",
        wrap(
            (RECORDS, 3),
            lambda m, x: m.head(torch.tanh(m.a(x + m.places)).mean(1)),
            a=lambda: nn.Linear(3, 3),
            places=lambda: nn.Parameter(torch.ones(RECORDS, 3)),
            **LINEAR3,
        ),
        layers=False,
    ),
    Case(
        "a layer's weight also as a scale",
        wrap(
            (4,),
            lambda m, x: m.head(torch.tanh(m.a(x)) * m.a.weight.mean(1)),
            a=lambda: nn.Linear(4, 3),
            **LINEAR3,
        ),
        layers=False,
    ),
    Case(
        "a layer's bias added once more",
        wrap((4,), lambda m, x: m.head(torch.tanh(m.a(x)) + m.a.bias), a=lambda: nn.Linear(4, 3), **LINEAR3),
        layers=False,
    ),
    Case(
        "low-rank change of a frozen layer",
        frozen(
            "a.weight",
            "a.bias",
            make=wrap(
                (4,),
                lambda m, x: m.head(torch.tanh(m.a(x) + x @ m.down @ m.up)),
                a=lambda: nn.Linear(4, 3),
                down=lambda: nn.Parameter(torch.ones(4, 2)),
                up=lambda: nn.Parameter(torch.ones(2, 3)),
                **LINEAR3,
            ),
        ),
        layers=False,
    ),
    Case(
        "adapter beside a frozen layer",
        frozen(
            "a.weight",
            "a.bias",
            make=wrap(
                (4,),
                lambda m, x: m.head(torch.tanh(m.a(x) + m.up(m.down(x)))),
                a=lambda: nn.Linear(4, 3),
                down=lambda: nn.Linear(4, 2, bias=False),
                up=lambda: nn.Linear(2, 3, bias=False),
                **LINEAR3,
            ),
        ),
    ),
    Case(
        "bias by distance, from a table",
        wrap((3, 4), distance_bias, table=lambda: nn.Parameter(torch.ones(5)), **TRANSFORMER),
        layers=False,
    ),
    Case(
        "learnt slope of an activation",
        plain((4,), nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3)),
        layers=False,
        forward_mode=False,
    ),
    Case(
        "transposed convolution",
        plain((2, 3), nn.Conv1d(2, 3, 2), nn.Tanh(), nn.ConvTranspose1d(3, 2, 2), nn.Flatten(), nn.Linear(6, 3)),
        layers=False,
    ),
]
