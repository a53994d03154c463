"""The steps of the random models of fuzz_models.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 4  # of the hidden vectors


class Block(nn.Module):
    """One step of a body, (B, T, WIDTH) → (B, T', WIDTH): the subclasses are the kinds that are drawn from."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.act = rng.choice([torch.tanh, torch.sigmoid, F.softplus, F.gelu, F.silu, lambda x: x])
        self.make(rng)

    def make(self, rng: random.Random) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class Plain(Block):
    pass


class Residual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.layer(x))


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.act(self.layer(x)))


class Transposed(Block):
    """The weight once as it is and once transposed, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.act(self.layer(x)), self.layer.weight.T)


class Frozen(Block):
    def make(self, rng: random.Random) -> None:
        super().make(rng)
        self.layer.requires_grad_(False)


class Flattened(Block):
    """Records and places in one dimension while the layer is applied."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x.reshape(-1, WIDTH))).reshape(x.shape)


class Turned(Block):
    """Records in the other order while the layer is applied."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x.flip(0)).flip(0))


class PlacesFirst(Block):
    """(T, B, WIDTH), as recurrent layers have it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x.transpose(0, 1)).transpose(0, 1))


class TiedBias(Block):
    def make(self, rng: random.Random) -> None:
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.bias = self.layer.bias
        if rng.random() < 0.5:
            self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.act(self.layer(x)))


class WeightAsBias(Block):
    def make(self, rng: random.Random) -> None:
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.norm.weight = self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.layer(x)))


class ByHand(Block):
    """Parameters that no layer holds: a scale, an einsum, a sum."""

    def make(self, rng: random.Random) -> None:
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(()))
        self.mix = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.how = rng.choice(["scale", "einsum", "matmul"])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "scale":
            return self.act(x * self.scale + self.shift)
        return self.act(torch.einsum("btk,ok->bto", x, self.mix) if self.how == "einsum" else x @ self.mix) * self.shift


class Parametrized(Block):
    def make(self, rng: random.Random) -> None:
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Mixed(Block):
    """Autocast inside the model."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if x.dtype == torch.float32 else nullcontext():
            return self.act(self.layer(x)).to(x.dtype)


class Normed(Block):
    def make(self, rng: random.Random) -> None:
        self.shape = rng.choice(["layer", "group", "layer"])
        kinds: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(WIDTH, bias=rng.random() < 0.7),
            "group": lambda: nn.GroupNorm(rng.choice([1, 2]), WIDTH),
        }
        self.layer = kinds[self.shape]()

    def forward(self, x: Tensor) -> Tensor:
        if self.shape == "group":
            return self.act(self.layer(x.transpose(1, 2)).transpose(1, 2))
        return self.act(self.layer(x))


class NormedPlaces(Block):
    """LayerNorm over places and features; needs to know how many places there are."""

    def make(self, rng: random.Random) -> None:
        self.layer = nn.LayerNorm([WIDTH // 2, 2])

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x.unflatten(2, (WIDTH // 2, 2))).flatten(2))


class Convolved(Block):
    def make(self, rng: random.Random) -> None:
        same = rng.random() < 0.4
        self.layer = nn.Conv1d(
            WIDTH,
            WIDTH,
            rng.choice([1, 2, 3]),
            stride=1 if same else rng.choice([1, 2]),
            padding="same" if same else rng.choice([1, 2, 3]),
            dilation=1 if same else rng.choice([1, 1, 2]),
            groups=rng.choice([1, 1, 2, 4]),
            bias=rng.random() < 0.7,
            padding_mode=rng.choice(["zeros", "zeros", "replicate"]) if not same else "zeros",
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        reach = (self.layer.kernel_size[0] - 1) * self.layer.dilation[0] + 1
        return self.act(self.layer(F.pad(x, (0, max(0, reach - x.shape[2])))).transpose(1, 2))


class Attention(Block):
    def make(self, rng: random.Random) -> None:
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        return x + torch.softmax(scores, -1) @ self.value(x)


class Heads(Block):
    def make(self, rng: random.Random) -> None:
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=rng.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x, x, x, need_weights=False)[0]


class Token(Block):
    """A learnt vector at a place of its own, as a class token or a prompt."""

    def make(self, rng: random.Random) -> None:
        self.token, self.repeated = nn.Parameter(torch.ones(1, 1, WIDTH)), rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.repeat(len(x), 2, 1) if self.repeated else self.token.expand(len(x), -1, -1)
        return torch.cat([token, x], 1)


class Places(Block):
    def make(self, rng: random.Random) -> None:
        self.places, self.sliced = nn.Parameter(torch.ones(1, 6, WIDTH)), rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        if self.sliced and count <= 6:
            return self.act(x + self.places[:, :count])
        return self.act(x + self.places[0, torch.arange(count) % 6])


class Scaled(Block):
    def make(self, rng: random.Random) -> None:
        super().make(rng)
        self.scale, self.last = nn.Parameter(torch.ones(WIDTH)), rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.act(self.layer(x)) if self.last else self.act(self.layer(x * self.scale))


class Gated(Block):
    """A gate that is one number, (), or one for each record's batch, (1, 1, 1)."""

    def make(self, rng: random.Random) -> None:
        super().make(rng)
        self.gate = nn.Parameter(torch.ones(rng.choice([(), (1,), (1, 1, 1)])))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate)
        return gate * x + (1 - gate) * self.act(self.layer(x))


class Reused(Block):
    """A layer whose weight or bias is used once more by hand."""

    def make(self, rng: random.Random) -> None:
        self.layer, self.which = nn.Linear(WIDTH, WIDTH), rng.choice(["weight", "bias", "both"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.layer(x))
        x = x * self.layer.weight.mean(1) if self.which != "bias" else x
        return x + self.layer.bias if self.which != "weight" else x


class LowRank(Block):
    """A frozen layer with a trained change of rank one or two."""

    def make(self, rng: random.Random) -> None:
        super().make(rng)
        self.layer.requires_grad_(False)
        self.down, self.up = (nn.Parameter(torch.ones(s)) for s in ((WIDTH, rng.choice([1, 2])), (1, WIDTH)))
        self.merged = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        up = self.up.expand(self.down.shape[1], -1)
        if self.merged:
            return self.act(F.linear(x, self.layer.weight + (self.down @ up).T, self.layer.bias))
        return self.act(self.layer(x) + x @ self.down @ up)


class Distances(Block):
    """Attention whose scores get a learnt number for each distance."""

    def make(self, rng: random.Random) -> None:
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        scores = x @ x.transpose(1, 2) / WIDTH + self.table[(places[:, None] - places[None]) % 5]
        return x + torch.softmax(scores, -1) @ self.layer(x)


BLOCKS = (Plain, Residual, Twice, Transposed, Frozen, Flattened, Turned, PlacesFirst, TiedBias, WeightAsBias, ByHand)
BLOCKS += (Parametrized, Mixed, Normed, NormedPlaces, Convolved, Attention, Heads)
OWN_PARAMETERS = (Token, Places, Scaled, Gated, Reused, LowRank, Distances, ByHand, Parametrized)
