"""Awkward modules: sums equal those of plain autograd, record by record, or a clear refusal before training starts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from measuring import measure, sum_clipped
from reconbound import PrivateSGD, Settings
from reconbound.fisher import Private, dense_information
from reconbound.validate import ModelError, check_batch

RECORDS = 7
pytestmark = [
    pytest.mark.filterwarnings("ignore:floors do not cover all"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # PyTorch's, of nn.Bilinear
    pytest.mark.filterwarnings("ignore:the attention kernel of"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def losses(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(1)[:, :3], y, reduction="none")


def labels() -> Tensor:
    return torch.arange(RECORDS) % 3


def autograd_sum(model: nn.Module, x: Tensor, y: Tensor, clip_norm: float) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        own = torch.autograd.grad(losses(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in own))
        for name, g in zip(names, own, strict=True):
            total[name] += g * min(1.0, clip_norm / norm)
    return total


class Shaped(nn.Module):
    """A body on records of another shape; the first output of several."""

    def __init__(self, body: nn.Module, *shape: int) -> None:
        super().__init__()
        self.body, self.shape, self.head = body, shape, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x.reshape(len(x), *self.shape))
        return self.head(torch.tanh(found[0] if isinstance(found, tuple) else found).flatten(1))


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.first, self.layer = batch_first, nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        out = self.layer(x, x, x)[0]
        return out if self.first else out.transpose(0, 1)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :6], x[:, 6:])


MODELS: dict[str, Any] = {
    "ConvTranspose1d": lambda: Shaped(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), 2, 6),
    "ConvTranspose1d, padded beyond": lambda: Shaped(nn.ConvTranspose1d(2, 3, 2, stride=3, output_padding=2), 2, 6),
    "ConvTranspose1d, dilated": lambda: Shaped(
        nn.ConvTranspose1d(2, 4, 3, padding=2, output_padding=1, dilation=2, groups=2), 2, 6
    ),
    "ConvTranspose2d": lambda: Shaped(
        nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=(1, 0), groups=2), 2, 2, 3
    ),
    "ConvTranspose2d, no bias": lambda: Shaped(
        nn.ConvTranspose2d(2, 4, 2, stride=2, output_padding=1, bias=False), 2, 2, 3
    ),
    "ConvTranspose2d, dilated": lambda: Shaped(nn.ConvTranspose2d(2, 4, 2, dilation=2, groups=2), 2, 2, 3),
    "ConvTranspose3d": lambda: Shaped(nn.ConvTranspose3d(2, 2, 2, stride=2, output_padding=1), 2, 1, 2, 3),
    "attention": lambda: Shaped(Attention(True), 3, 4),
    "attention, batch second": lambda: Shaped(Attention(False), 3, 4),
    "Bilinear": lambda: Shaped(Pairs(), 12),
    "weight_norm": lambda: Shaped(weight_norm(nn.Linear(12, 8)), 12),
    "spectral_norm": lambda: Shaped(spectral_norm(nn.Linear(12, 8)), 12).eval(),
    "transformer layer": lambda: Shaped(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True), 3, 4
    ),
    "transformer layer, eval": lambda: Shaped(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, activation="gelu", batch_first=True), 3, 4
    ).eval(),
}


def check_all(model: nn.Module, x: Tensor, private: Private | None) -> None:
    model, y = model.double(), labels()
    with torch.no_grad():
        model(x)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    for clip_norm in (0.5, 1e6):
        step: dict[str, Any] = {"max_grad_norm": clip_norm, "clip": "hard"}
        want = autograd_sum(model, x, y, clip_norm)
        sums = sum_clipped(model, losses, x, y, **step).gradient_sum
        found = measure(
            model, losses, x, y, noise_multiplier=1.0, private=private, probes=20, **step, diagonal=True, spectral=3
        )
        for name, value in want.items():
            torch.testing.assert_close(sums[name], value, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found.gradient_sum[name], value, rtol=1e-9, atol=1e-12)
    dense = dense_information(model, losses, x, y, noise_multiplier=1.0, private=private, **step)
    torch.testing.assert_close(found.along, dense.along, rtol=1e-6, atol=1e-10)
    assert float((found.trace / dense.trace).mean()) == pytest.approx(1.0, rel=0.6)
    settings = Settings(1.0, 1.0, 0.5, lr=0.1, seed=0)
    PrivateSGD(model, losses, x, y, settings, private=private, progress=False).fit(2)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.slow
def test_sums_are_those_of_autograd(kind: str) -> None:
    model = MODELS[kind]()
    with torch.no_grad():
        model(torch.randn(2, 12))
    check_all(model, torch.randn(RECORDS, 12, dtype=torch.float64), None)


class Bag(nn.Module):
    def __init__(self, mode: str, *, weighted: bool = False, offsets: str = "", padding_idx: int | None = None) -> None:
        super().__init__()
        self.weighted, self.offsets = weighted, offsets
        self.bag = nn.EmbeddingBag(10, 5, mode=mode, include_last_offset=offsets == "last", padding_idx=padding_idx)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = torch.linspace(1, 2, tokens.shape[1], dtype=self.head.weight.dtype).expand(tokens.shape)
        more = {"per_sample_weights": weights.flatten() if self.offsets else weights} if self.weighted else {}
        if not self.offsets:
            return self.head(torch.tanh(self.bag(tokens, **more)))
        end = tokens.numel() + (self.offsets == "last")
        offsets = torch.arange(0, end, tokens.shape[1])
        return self.head(torch.tanh(self.bag(tokens.flatten(), offsets, **more)))


@pytest.mark.parametrize("offsets", ["", "first", "last"])
@pytest.mark.parametrize(
    ("mode", "weighted", "padding_idx"),
    [
        ("sum", False, None),
        ("mean", False, None),
        ("max", False, None),
        ("sum", True, None),
        ("mean", False, 0),
        ("max", False, 0),
        ("sum", True, -1),
    ],
)
@pytest.mark.slow
def test_bags_of_embeddings(mode: str, weighted: bool, padding_idx: int | None, offsets: str) -> None:
    model = Bag(mode, weighted=weighted, offsets=offsets, padding_idx=padding_idx)
    tokens = torch.randint(0, 10, (RECORDS, 4))
    tokens[0] = 0 if padding_idx == 0 else 9  # a bag of padding alone
    model.double()
    inner = torch.tanh(model.bag(tokens))
    assert inner.shape == (RECORDS, 5)
    check_all(model, tokens, Private("module", "bag"))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, first: bool) -> None:
        super().__init__()
        self.reentrant, self.first = reentrant, first
        self.before, self.body = nn.Linear(12, 8), nn.Sequential(nn.Linear(12 if first else 8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.first else torch.tanh(self.before(x))
        return self.head(checkpoint(self.body, h, use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_refused(reentrant: bool, first: bool) -> None:
    model, x, y = Checkpointed(reentrant, first), torch.randn(RECORDS, 12), labels()
    step: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    settings = Settings(1.0, 1.0, 0.5, lr=0.1, seed=0)
    with pytest.raises(ModelError, match=r"uses gradient checkpointing .* turn it off"):
        check_batch(model, losses, x, y)
    with pytest.raises(ModelError, match=r"uses gradient checkpointing .* turn it off"):
        PrivateSGD(model, losses, x, y, settings, progress=False)
    with pytest.raises(ValueError, match=r"uses gradient checkpointing .* turn it off"):
        measure(model, losses, x, y, **step)
    if not (reentrant and first):  # PyTorch itself warns then: there is no gradient at all
        with pytest.raises(ValueError, match=r"uses gradient checkpointing .* turn it off"):
            sum_clipped(model, losses, x, y, max_grad_norm=1.0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_in_the_loss_is_refused(reentrant: bool) -> None:
    """`check_batch` and the learner passed PyTorch's own kind of error on."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        found: Tensor = checkpoint(losses, out, target, use_reentrant=reentrant)
        return found

    model, x, y = nn.Linear(12, 3), torch.randn(RECORDS, 12), labels()
    with pytest.raises(ModelError, match=r"uses gradient checkpointing .* turn it off"):
        check_batch(model, loss, x, y)
    with pytest.raises(ModelError, match=r"uses gradient checkpointing .* turn it off"):
        PrivateSGD(model, loss, x, y, Settings(1.0, 1.0, 0.5, lr=0.1, seed=0), progress=False)


@pytest.mark.parametrize(
    "body",
    [
        lambda: Shaped(nn.LSTM(4, 3, batch_first=True), 3, 4),
        lambda: Shaped(nn.GRU(4, 3, batch_first=True), 3, 4),
        lambda: Shaped(nn.LSTMCell(12, 3), 12),
        lambda: Shaped(nn.GRUCell(12, 3), 12),
    ],
)
def test_recurrent_layers_are_refused_by_name(body: Any) -> None:
    model, x = body(), torch.randn(RECORDS, 12)
    with torch.no_grad():
        model(x)
    settings = Settings(1.0, 1.0, 0.5, lr=0.1, seed=0)
    with pytest.raises(ValueError, match=r"cannot take body \((LSTM|GRU).*record by record"):
        PrivateSGD(model, losses, x, labels(), settings, progress=False)


class NoProducts(torch.autograd.Function):
    """Has a second derivative, but no rule to be taken record by record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * (1 - torch.tanh(x) ** 2) * weight, (grad * torch.tanh(x)).sum(0)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = NoProducts.apply(x, self.weight)
        return found


def test_model_without_per_record_gradients_is_refused() -> None:
    model, x = Shaped(ByHand(), 12), torch.randn(RECORDS, 12)
    with torch.no_grad():
        model(x)
    settings = Settings(1.0, 1.0, 0.5, lr=0.1, seed=0)
    with pytest.raises(ModelError, match=r"cannot be differentiated: .*setup_context"):
        PrivateSGD(model, losses, x, labels(), settings, progress=False)
