"""A table of small models: every layer rule, and every way in which a rule could be silently wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from layer_cases import LAYERS, Case
from reconbound.fisher import Private
from small_models import (
    RECORDS,
    TRANSFORMER,
    Doubled,
    Squared,
    frozen,
    functional_weight,
    hooked,
    inner_gradient,
    inner_tangent,
    inner_vmap,
    normal,
    normed_weight,
    plain,
    public_branch,
    sequence_first,
    soft_targets,
    squared,
    tied_embedding,
    tied_layers,
    tokens,
    with_tokens,
    wrap,
)

LINEAR3 = {"head": lambda: nn.Linear(3, 3)}

CASES = [
    *LAYERS,
    Case("shared weight", tied_layers),
    Case(
        "module called twice",
        wrap((3,), lambda m, x: m.head(torch.tanh(m.a(torch.tanh(m.a(x))))), a=lambda: nn.Linear(3, 3), **LINEAR3),
    ),
    Case(
        "convolution called twice",
        wrap(
            (2, 4, 4),
            lambda m, x: m.head(torch.tanh(m.a(torch.tanh(m.a(x)))).flatten(1)),
            a=lambda: nn.Conv2d(2, 2, 2, groups=2),
            head=lambda: nn.Linear(8, 3),
        ),
    ),
    Case("tied embedding", tied_embedding),
    Case(
        "frozen first layer",
        frozen(
            "0.weight", "0.bias", make=plain((2, 4, 4), nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
        ),
    ),
    Case("frozen last weight", frozen("2.weight", make=plain((4,), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))),
    Case(
        "frozen convolution bias",
        frozen("0.bias", make=plain((1, 3, 3), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))),
    ),
    Case(
        "raw parameter",
        wrap(
            (4,),
            lambda m, x: m.head(torch.tanh(x @ m.matrix) * m.gain),
            matrix=lambda: nn.Parameter(torch.ones(4, 3)),
            gain=lambda: nn.Parameter(torch.ones(3)),
            **LINEAR3,
        ),
        layers=False,
    ),
    Case(
        "raw parameter in F.linear",
        wrap(
            (4,),
            lambda m, x: m.head(torch.tanh(F.linear(x, m.matrix))),
            matrix=lambda: nn.Parameter(torch.ones(3, 4)),
            **LINEAR3,
        ),
    ),
    Case(
        "subclass, own forward", wrap((4,), lambda m, x: m.head(torch.tanh(m.a(x))), a=lambda: Doubled(4, 3), **LINEAR3)
    ),
    Case(
        "subclass, squared weight",
        wrap((4,), lambda m, x: m.head(torch.tanh(m.a(x))), a=lambda: Squared(4, 3), **LINEAR3),
        layers=False,
    ),
    Case("parametrized weight", normed_weight, layers=False, forward_mode=False),
    Case("forward hook", hooked),
    Case("weight used by hand", wrap((3,), functional_weight, first=lambda: nn.Linear(3, 3), **LINEAR3), layers=False),
    Case("in place", plain((2, 3, 3), nn.Conv2d(2, 3, 2), nn.SiLU(inplace=True), nn.Flatten(), nn.Linear(12, 3))),
    Case(
        "sequence first, as long as the batch",
        wrap((RECORDS, 2), sequence_first, first=lambda: nn.Linear(2, 3), **LINEAR3),
        layers=False,
    ),
    Case(
        "records folded into positions",
        wrap(
            (3, 2),
            lambda m, x: m.head(torch.tanh(m.a(x.reshape(-1, 2))).reshape(-1, 9)),
            a=lambda: nn.Linear(2, 3),
            head=lambda: nn.Linear(9, 3),
        ),
        layers=False,
    ),
    Case(
        "positions embedded",
        wrap(
            (3, 2),
            lambda m, x: m.head((x + m.places(torch.arange(3))).tanh().flatten(1)),
            places=lambda: nn.Embedding(3, 2),
            head=lambda: nn.Linear(6, 3),
        ),
        layers=False,
    ),
    Case(
        "unused layer",
        wrap(
            (4,),
            lambda m, x: m.head(torch.tanh(m.a(x))),
            a=lambda: nn.Linear(4, 3),
            idle=lambda: nn.Linear(2, 2),
            **LINEAR3,
        ),
    ),
    Case(
        "two inputs, one public",
        wrap(
            lambda: (normal(3), normal(1, 3, 3)),
            public_branch,
            conv=lambda: nn.Conv2d(1, 2, 2),
            side=lambda: nn.Linear(8, 3),
            first=lambda: nn.Linear(3, 3),
            **LINEAR3,
        ),
        private=Private("input", 0),
    ),
    Case(
        "inputs by name, the image private",
        wrap(
            lambda: {"x": normal(3), "image": normal(1, 3, 3)},
            public_branch,
            conv=lambda: nn.Conv2d(1, 2, 2),
            side=lambda: nn.Linear(8, 3),
            first=lambda: nn.Linear(3, 3),
            **LINEAR3,
        ),
        private=Private("input", "image"),
    ),
    Case(
        "embedding with padding, public tokens",
        wrap(
            lambda: {"x": normal(3), "words": tokens(4, 5)},
            lambda m, x, words: m.head(torch.tanh(m.a(x)) * m.embed(words).tanh().mean(1)),
            a=lambda: nn.Linear(3, 3),
            embed=lambda: nn.Embedding(4, 3, padding_idx=1),
            **LINEAR3,
        ),
        forward_mode=False,
    ),
    Case(
        "embedding called twice",
        wrap(
            lambda: (normal(3), tokens(4, 2)),
            lambda m, x, words: m.head(x * m.embed(words[:, 0]) + torch.tanh(m.embed(words[:, 1]))),
            embed=lambda: nn.Embedding(4, 3),
            **LINEAR3,
        ),
    ),
    Case(
        "embedded tokens private",
        wrap(lambda: tokens(5, 3), with_tokens, embed=lambda: nn.Embedding(5, 4), **TRANSFORMER),
        private=Private("module", "embed"),
    ),
    Case(
        "gradient inside the model",
        wrap((3,), inner_gradient, first=lambda: nn.Linear(3, 3), **LINEAR3),
        layers=False,
        mixed=False,
    ),
    Case(
        "tangent inside the model",
        wrap((3,), inner_tangent, first=lambda: nn.Linear(3, 3), **LINEAR3),
        layers=False,
        mixed=False,
    ),
    Case(
        "vmap inside the model",
        wrap((2, 3), inner_vmap, first=lambda: nn.Linear(3, 3), **LINEAR3),
        layers=False,
        mixed=False,
    ),
    Case("label private", soft_targets, private="target"),
    Case(
        "some features, mask",
        plain((5,), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        private=torch.tensor([True, False, True, True, False]),
    ),
    Case(
        "some features, indices",
        plain((1, 3, 3), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
        private=torch.tensor([0, 4]),
    ),
    Case(
        "regression", lambda: (*plain((4,), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))()[:2], normal(2)), loss=squared
    ),
]
