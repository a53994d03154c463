"""Small models, inputs, targets and losses for the table of cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from reconbound.fisher.reference import load_forward_mode

RECORDS = 8


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).flatten(1).square().sum(1) / 2


def normal(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, dtype=torch.float64)


def classes(k: int = 3) -> Tensor:
    return torch.arange(RECORDS) % k


def tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (RECORDS, length))


def plain(shape: tuple[int, ...], *modules: nn.Module) -> Callable[[], tuple[nn.Module, Any, Any]]:
    return lambda: (fresh(nn.Sequential(*modules)), normal(*shape), classes())


def fresh(model: nn.Module) -> nn.Module:
    """New weights under make()'s seed, whatever was drawn when the table was built; norms away from their start."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (0.7 if p.dim() > 1 else 0.3) + (1.0 if p.dim() == 1 else 0.0) * 0.2)
    return model


class Wrap(nn.Module):
    """A module from named parts and a function of them: forward(parts, *inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


def wrap(shape: Any, forward: Callable[..., Tensor], **parts: Callable[[], nn.Module | nn.Parameter]) -> Any:
    """shape: of the input, or a function that makes the inputs."""

    def build() -> tuple[nn.Module, Any, Any]:
        model = fresh(Wrap(forward, **{name: part() for name, part in parts.items()}))
        return model, shape() if callable(shape) else normal(*shape), classes()

    return build


def residual(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    h = h + torch.tanh(m.second(h))
    return m.head(h.flatten(1))


def recurrent(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 3)
    for t in range(x.shape[1]):
        h = torch.tanh(m.inward(x[:, t]) + m.loop(h))
    return m.head(h)


def attention(m: Any, h: Tensor) -> Tensor:
    q, k, v = m.qkv(m.norm1(h)).chunk(3, -1)
    h = h + m.out(torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v)
    h = h + m.down(F.gelu(m.up(m.norm2(h))))
    return m.head(h.mean(1))


TRANSFORMER = {
    "norm1": lambda: nn.LayerNorm(4),
    "norm2": lambda: nn.LayerNorm(4),
    "qkv": lambda: nn.Linear(4, 12),
    "out": lambda: nn.Linear(4, 4),
    "up": lambda: nn.Linear(4, 6),
    "down": lambda: nn.Linear(6, 4),
    "head": lambda: nn.Linear(4, 3),
}


def fused_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).reshape(len(x), -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
    return m.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def multihead(m: Any, x: Tensor) -> Tensor:
    return m.head(m.attention(x, x, x)[0].mean(1))


def masked_attention(m: Any, x: Tensor, padding: Tensor) -> Tensor:
    ahead = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 2)
    output, weights = m.attention(x, x, x, key_padding_mask=padding, attn_mask=ahead)
    return m.head((output + weights.sum(2, keepdim=True)).mean(1))


def distance_bias(m: Any, h: Tensor) -> Tensor:
    """Attention whose scores get a learnt number for each distance between two places."""
    q, k, v = m.qkv(m.norm1(h)).chunk(3, -1)
    places = torch.arange(h.shape[1])
    bias = m.table[(places[:, None] - places[None]) + 2]
    return m.head((h + torch.softmax(q @ k.transpose(1, 2) / 2 + bias, -1) @ v).mean(1))


class VisionTransformer(nn.Module):
    """A vision transformer of one block: class token, position embedding and layer scale are plain parameters."""

    def __init__(self, size: int = 4, channels: int = 2, patch: int = 2, width: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        h = self.norms[0](x)
        x = x + self.scales[0] * self.attention(h, h, h, need_weights=False)[0]
        x = x + self.scales[1] * self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x)[:, 0])


def tied_layers() -> tuple[nn.Module, Any, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.b(torch.tanh(m.a(x)))))

    model = Wrap(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 3))
    model.b.weight = model.a.weight
    return fresh(model), normal(4), classes()


def tied_embedding() -> tuple[nn.Module, Any, Any]:
    def forward(m: Any, x: Tensor, words: Tensor) -> Tensor:
        return m.decode(torch.tanh(m.mix(x) * m.embed(words).sum(1)))

    model = Wrap(forward, embed=nn.Embedding(6, 3), mix=nn.Linear(4, 3), decode=nn.Linear(3, 6, bias=False))
    model.decode.weight = model.embed.weight
    return fresh(model), (normal(4), tokens(6, 3)), classes(6)


def frozen(*names: str, make: Callable[[], Any]) -> Callable[[], tuple[nn.Module, Any, Any]]:
    def build() -> tuple[nn.Module, Any, Any]:
        model, inputs, targets = make()
        for name, p in model.named_parameters():
            p.requires_grad_(name not in names)
        return model, inputs, targets

    return build


class Doubled(nn.Linear):
    """A subclass with a forward of its own, which a rule tied to the class would get wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.square(), self.bias)


def normed_weight() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 3))
    return fresh(model), normal(4), classes()


def hooked() -> tuple[nn.Module, Any, Any]:
    model = fresh(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))
    model[0].register_forward_hook(lambda module, args, output: 3 * output)
    return model, normal(4), classes()


def public_branch(m: Any, x: Tensor, image: Tensor) -> Tensor:
    seen = F.silu(m.conv(image), inplace=True).flatten(1)
    return m.head(torch.tanh(m.first(x)) * m.side(seen))


def with_tokens(m: Any, words: Tensor) -> Tensor:
    return attention(m, m.embed(words))


def sequence_first(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x.transpose(0, 1)))  # (T, B, ·) with T = B: a trap
    return m.head(h.mean(0))


def functional_weight(m: Any, x: Tensor) -> Tensor:
    return m.head(F.linear(torch.tanh(m.first(x)), m.first.weight.t()))


def inner_gradient(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.func.grad(lambda v: torch.tanh(m.first(v)).square().sum())(x))


def inner_tangent(m: Any, x: Tensor) -> Tensor:
    load_forward_mode()
    return m.head(torch.func.jvp(lambda v: torch.tanh(m.first(v)), (x,), (torch.ones_like(x),))[1])


def inner_vmap(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.func.vmap(lambda v: torch.tanh(m.first(v)), 1, 1)(x).mean(1))


def soft_targets() -> tuple[nn.Module, Any, Any]:
    model = fresh(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    return model, normal(4), torch.softmax(normal(3), 1)
