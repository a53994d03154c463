"""Jumps and kinks of the private part: jumps are refused, kinks get a caveat, look-alikes pass in silence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measuring import measure
from reconbound import PrivateSGD, Settings
from reconbound.fisher import Private
from reconbound.validate import KinkWarning, ModelError, check_batch, math_attention

per_record = nn.CrossEntropyLoss(reduction="none")
WIDTH, INPUTS, CLASSES = 8, 6, 3
BOUNDARIES = torch.tensor([-0.5, 0.0, 0.5])


class Middle(nn.Module):
    """A linear layer, a function beside an identity, a linear layer: derivatives flow, whatever the function does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.function(h)
        return self.last(torch.tanh(h) + 0.3 * found.to(h.dtype))


def batch(records: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(records, INPUTS, generator=generator), torch.arange(records) % CLASSES


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).float()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- jumps -----------------------------------------------------------------------------------------------------------


def _numpy_step(h: Tensor) -> Tensor:
    return torch.from_numpy((h.detach().numpy() > 0).astype(np.float32 if h.dtype == torch.float32 else np.float64))


def _branch(h: Tensor) -> Tensor:
    return torch.stack([row.sin() if float(row.sum().detach()) > 0 else row.cos() + 1 for row in h])


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "comparison as a number": lambda h: (h > 0.1).float(),
    "comparison as a number, double": lambda h: (h <= 0.1).double(),
    "comparison by type_as": lambda h: h.ge(0.1).type_as(h),
    "where on a comparison": lambda h: torch.where(h > 0.1, 1.0, -1.0),
    "where on a comparison of two values": lambda h: torch.where(h > h.roll(1, 1), h.sin(), h.cos()),
    "where on a combined mask": lambda h: torch.where((h > 0.1) & (h < 0.8) | (h < -1), 1.0, 0.0),
    "multiplied mask away from zero": lambda h: h * (h > 0.5),
    "masked_fill": lambda h: h.masked_fill(h < 0.2, 3.0),
    "boolean index": lambda h: torch.stack([row[row > 0.3].sum() for row in h])[:, None].expand(-1, WIDTH),
    "masked_select": lambda h: torch.stack([row.masked_select(row > 0.3).sum() for row in h])[:, None].expand_as(h),
    "in-place masked fill of a copy": lambda h: torch.zeros_like(h).masked_fill_(h > 0.1, 1.0),
    "index_put": lambda h: torch.zeros_like(h).index_put((h > 0.1,), torch.ones((), dtype=h.dtype)),
    "long": lambda h: (4 * h).long(),
    "int": lambda h: (4 * h).int(),
    "to int16": lambda h: (4 * h).to(torch.int16),
    "to uint8": lambda h: (4 * h.abs()).to(torch.uint8),
    "to bool": lambda h: torch.relu(h).bool(),
    "round": torch.round,
    "round to decimals": lambda h: torch.round(h, decimals=1),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": lambda h: (3 * h).trunc(),
    "sign": torch.sign,
    "sgn": torch.sgn,
    "heaviside": lambda h: torch.heaviside(h, torch.ones((), dtype=h.dtype)),
    "signbit": torch.signbit,
    "copysign": lambda h: torch.copysign(torch.ones_like(h), h),
    "floor_divide": lambda h: torch.floor_divide(h, 0.3),
    "division rounded": lambda h: torch.div(h, 0.3, rounding_mode="trunc"),
    "remainder": lambda h: h.remainder(0.7),
    "remainder operator": lambda h: h % 0.7,
    "fmod": lambda h: torch.fmod(h, 0.3),
    "frac": lambda h: (3 * h).frac(),
    "argmax and one-hot": lambda h: F.one_hot(h.argmax(1), WIDTH),
    "argmin and one-hot": lambda h: F.one_hot(h.argmin(1), WIDTH),
    "argmax and gather of another": lambda h: h.roll(1, 1).gather(1, h.argmax(1, keepdim=True)).expand_as(h),
    "argsort": lambda h: h.argsort(1),
    "topk's indices": lambda h: torch.zeros_like(h).scatter(1, h.topk(2, 1).indices, 1.0),
    "max's indices": lambda h: h.max(1).indices[:, None].expand_as(h),
    "searchsorted": lambda h: torch.searchsorted(BOUNDARIES.to(h.dtype), h.contiguous()),
    "bucketize": lambda h: torch.bucketize(h, BOUNDARIES.to(h.dtype)),
    "bins looked up": lambda h: F.embedding((h > 0).long(), torch.tensor([[0.0], [1.0]])).squeeze(-1),
    "rounding straight through": lambda h: h + (h.round() - h).detach(),
    "sign straight through": lambda h: h.tanh() + (h.sign() - h.tanh()).detach(),
    "hardshrink": lambda h: F.hardshrink(h, 0.4),
    "threshold": lambda h: F.threshold(h, 0.2, -1.0),
    "counting": lambda h: (h > 0).sum(1, keepdim=True).expand_as(h),
    "nonzero": lambda h: torch.stack([torch.nonzero(row > 0).sum() for row in h])[:, None].expand_as(h),
    "equality": lambda h: (h == h.max(1, keepdim=True).values).float(),
    "fake quantisation": lambda h: torch.fake_quantize_per_tensor_affine(h.float(), 0.25, 0, -128, 127),
    "scatter by bins": lambda h: torch.zeros_like(h).scatter_add(1, (h.sigmoid() * 7).long(), torch.ones_like(h)),
    "top-k mask": lambda h: h * (h >= h.topk(3, 1).values[:, -1:]),
    "histogram": lambda h: torch.stack([torch.histc(row.detach(), WIDTH, -2, 2) for row in h]),
    "nearest pixel": lambda h: (
        F.grid_sample(
            torch.arange(16.0, dtype=h.dtype).reshape(1, 1, 4, 4).expand(len(h), -1, -1, -1),
            h.tanh().reshape(len(h), 1, 4, 2),
            mode="nearest",
            align_corners=False,
        )
        .reshape(len(h), 4)
        .repeat(1, 2)
    ),
    "bits": lambda h: (h.detach().float().view(torch.int32) >> 20) / 2000,
    "NumPy": _numpy_step,
    "if-statement": _branch,
    "if-statement on item": lambda h: torch.stack([row * (1 if row[0].item() > 0 else 2) for row in h]),
}


@pytest.mark.parametrize("function", list(JUMPS.values()), ids=list(JUMPS))
def test_jump_in_the_model_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ModelError):
        check_batch(Middle(function), per_record, *batch())


@pytest.mark.parametrize(
    ("function", "name"),
    [("long", r"a cast to torch\.int64"), ("argsort", "sort"), ("bucketize", "bucketize"), ("frac", "frac")],
)
def test_refusal_names_operation_and_module(function: str, name: str) -> None:
    class Inner(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.tanh() + 0.1 * JUMPS[function](h)

    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), Inner(), nn.Linear(WIDTH, CLASSES))
    with pytest.raises(ModelError, match=rf"module '1' \(Inner\) uses {name}, .*flat between jumps"):
        check_batch(model, per_record, *batch())


LOSS_JUMPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights by correctness": lambda out, y: per_record(out, y) * (1 + (out.argmax(1) == y).float()),
    "confident records left out": lambda out, y: per_record(out, y) * (out.softmax(1).amax(1) < 0.4),
    "rounded": lambda out, y: (out.round() - one_hot(y)).square().sum(1) + out.square().sum(1),
    "zero-one beside": lambda out, y: per_record(out, y) + (out[:, 0] > 0).float() * out[:, 1],
    "median's index": lambda out, y: per_record(out, y) + out.gather(1, (out.median(1).indices[:, None] + 1) % 3)[:, 0],
}


@pytest.mark.parametrize("loss_fn", list(LOSS_JUMPS.values()), ids=list(LOSS_JUMPS))
def test_jump_in_the_loss_is_refused(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="loss_fn"):
        check_batch(network(), loss_fn, *batch())


# --- kinks -----------------------------------------------------------------------------------------------------------

KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda h: h.clamp(-1, 1),
    "clip": lambda h: torch.clip(h, -0.5, 0.7),
    "clamp by tensors": lambda h: torch.clamp(h, h.new_tensor(-0.5), h.new_tensor(0.4)),
    "clamp_min": lambda h: h.clamp_min(0.3),
    "clamp_max": lambda h: torch.clamp_max(h, 0.3),
    "relu by where": lambda h: torch.where(h > 0, h, 0.0),
    "relu by a mask": lambda h: h * (h > 0),
    "relu by masked_fill": lambda h: h.masked_fill(h < 0, 0.0),
    "relu by boolean index": lambda h: torch.stack([row[row > 0].sum() for row in h])[:, None].expand_as(h),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "softshrink": F.softshrink,
    "leaky relu": F.leaky_relu,
    "glu of a relu": lambda h: F.glu(torch.relu(h), 1).repeat(1, 2),
    "abs": torch.abs,
    "max": lambda h: h.max(1, keepdim=True).values.expand_as(h),
    "min": lambda h: h.min(1, keepdim=True).values.expand_as(h),
    "amax": lambda h: h.amax(1, keepdim=True).expand_as(h),
    "amin": lambda h: h.amin(1, keepdim=True).expand_as(h),
    "aminmax": lambda h: (h.aminmax(dim=1, keepdim=True).max).expand_as(h),
    "maximum": lambda h: torch.maximum(h, h.roll(1, 1)),
    "median": lambda h: h.median(1, keepdim=True).values.expand_as(h),
    "nanmedian": lambda h: h.nanmedian(1, keepdim=True).values.expand_as(h),
    "quantile": lambda h: h.quantile(0.3, 1, keepdim=True).expand_as(h),
    "kthvalue": lambda h: h.kthvalue(2, 1, keepdim=True).values.expand_as(h),
    "topk": lambda h: h.topk(WIDTH // 2, 1).values.repeat(1, 2),
    "sort": lambda h: h.sort(1).values,
    "cummax": lambda h: h.cummax(1).values,
    "cummin": lambda h: h.cummin(1).values,
    "argmax and gather": lambda h: h.gather(1, h.argmax(1, keepdim=True)).expand_as(h),
    "max pooling": lambda h: F.max_pool1d(h[:, None], 2).squeeze(1).repeat(1, 2),
    "adaptive max pooling": lambda h: F.adaptive_max_pool1d(h[:, None], 4).squeeze(1).repeat(1, 2),
    "largest absolute value": lambda h: torch.linalg.vector_norm(h, ord=float("inf"), dim=1, keepdim=True).expand_as(h),
    "sum of absolute values": lambda h: h.norm(p=1, dim=1, keepdim=True).expand_as(h),
    "triangle wave": lambda h: (h.remainder(1.0) - 0.5).abs(),
    "piecewise linear table": lambda h: h * torch.bucketize(h, h.new_tensor([0.0])),
}


@pytest.mark.parametrize("function", list(KINKS.values()), ids=list(KINKS))
def test_kink_in_the_model_gets_a_caveat(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.warns(KinkWarning, match="kinks in the model's own forward"):
        caveats = check_batch(Middle(function), per_record, *batch())
    assert caveats[0].startswith("not proved: the model has kinks")


LOSS_KINKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hard labels of itself, the least of smooth functions": lambda out, y: per_record(out, out.argmax(1)),
    "hinge": lambda out, y: (1 - out * (2 * one_hot(y) - 1)).clamp(min=0).sum(1),
    "hinge by relu": lambda out, y: torch.relu(1 - out * (2 * one_hot(y) - 1)).sum(1),
    "margin_ranking_loss": lambda out, y: F.margin_ranking_loss(
        out[:, 0], out[:, 1], (2 * (y > 0) - 1).to(out), margin=0.5, reduction="none"
    ),
    "hinge_embedding_loss": lambda out, y: F.hinge_embedding_loss(out, 2 * one_hot(y) - 1, reduction="none").sum(1),
    "cosine_embedding_loss": lambda out, y: F.cosine_embedding_loss(
        out, out.roll(1, 1), (2 * (y > 0) - 1).to(out), reduction="none"
    ),
    "triplet_margin_loss": lambda out, y: F.triplet_margin_loss(
        out, out.roll(1, 1), one_hot(y).to(out), reduction="none"
    ),
    "l1_loss": lambda out, y: F.l1_loss(out, one_hot(y).to(out), reduction="none").sum(1),
}


@pytest.mark.parametrize("loss_fn", list(LOSS_KINKS.values()), ids=list(LOSS_KINKS))
def test_kink_in_the_loss_gets_a_caveat(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.warns(KinkWarning, match="kinks in loss_fn"):
        assert check_batch(network(), loss_fn, *batch())


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, y: F.multi_margin_loss(out, y, reduction="none"),
        lambda out, y: F.multilabel_margin_loss(out, F.pad(y[:, None], (0, 2), value=-1), reduction="none"),
        lambda out, y: per_record(F.hardsigmoid(out), y),
    ],
)
def test_kinks_without_a_second_derivative_in_pytorch_are_refused(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="cannot be differentiated twice"):
        check_batch(network(), loss_fn, *batch())


# --- look-alikes -----------------------------------------------------------------------------------------------------


class Metric(Middle):
    """Keeps its accuracy, its largest value and whether all was finite; none of them reaches the loss."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.most = out.argmax(1).float().mean() + out.abs().amax() + (out > 0).sum()
        assert torch.isfinite(out).all()
        return out


def _safe_softmax(h: Tensor) -> Tensor:
    top = h.max(1, keepdim=True).values.detach()
    return (h - top).exp() / (h - top).exp().sum(1, keepdim=True)


def _attention(h: Tensor) -> Tensor:
    q = h.reshape(len(h), 1, 2, 4)
    mask = torch.ones(2, 2, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).flatten(1)


SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda h: h,
    "elu": F.elu,
    "celu": lambda h: F.celu(h, 2.0),
    "softplus": F.softplus,
    "silu": F.silu,
    "mish": F.mish,
    "softmax": lambda h: h.softmax(1),
    "softmax by hand": _safe_softmax,
    "logsumexp": lambda h: h.logsumexp(1, keepdim=True).expand_as(h),
    "log_softmax": lambda h: h.log_softmax(1),
    "layer norm": lambda h: F.layer_norm(h, (WIDTH,)),
    "attention with a public mask": _attention,
    "where on public positions": lambda h: torch.where(torch.arange(WIDTH) > 3, h, h.sin()),
    "public integers": lambda h: h * torch.arange(WIDTH).float().div(3).floor(),
    "soft comparison": lambda h: torch.sigmoid(20 * (h - 0.1)),
    "steep soft comparison": lambda h: torch.sigmoid(2000 * (h - 0.1)),
    "gather at public places": lambda h: h.gather(1, torch.zeros(len(h), WIDTH, dtype=torch.long)),
    "euclidean norm": lambda h: h.norm(dim=1, keepdim=True).expand_as(h),
    "check for finite values": lambda h: h if bool(torch.isfinite(h).all()) else h.nan_to_num(),
}


@pytest.mark.parametrize("function", list(SMOOTH.values()), ids=list(SMOOTH))
def test_look_alikes_do_not_warn(function: Callable[[Tensor], Tensor]) -> None:
    with math_attention():
        assert check_batch(Middle(function), per_record, *batch()) == ()
        assert check_batch(Metric(function), per_record, *batch()) == ()


SMOOTH_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label smoothing": lambda out, y: F.cross_entropy(out, y, reduction="none", label_smoothing=0.1),
    "ignored class": lambda out, y: F.cross_entropy(out, y, reduction="none", ignore_index=2),
    "huber": lambda out, y: F.huber_loss(out, one_hot(y).to(out), reduction="none").sum(1),
    "smooth_l1": lambda out, y: F.smooth_l1_loss(out, one_hot(y).to(out), reduction="none").sum(1),
    "soft margin": lambda out, y: F.soft_margin_loss(out, 2 * one_hot(y).to(out) - 1, reduction="none").sum(1),
    "mask from public labels": lambda out, y: per_record(out, y) * (y > 0) + out.square().sum(1),
    "a metric beside": lambda out, y: (per_record(out, y), (out.argmax(1) == y).float())[0],
}


@pytest.mark.parametrize("loss_fn", list(SMOOTH_LOSSES.values()), ids=list(SMOOTH_LOSSES))
def test_smooth_losses_do_not_warn(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert check_batch(network(), loss_fn, *batch()) == ()


def test_small_jump_of_losses_near_zero_is_found() -> None:
    """The last digits of a confident record's loss are those of its outputs, and no jump; what is above them is one."""
    x, _ = batch()
    y = torch.zeros(len(x), dtype=torch.long)
    model = nn.Linear(INPUTS, CLASSES).double()
    with torch.no_grad():
        model.weight.mul_(0.1)
        model.bias.copy_(torch.tensor([20.0, 0.0, 0.0]))
    assert check_batch(model, per_record, x.double(), y) == ()

    def stepped(out: Tensor, y: Tensor) -> Tensor:
        return per_record(out, y) + 1e-9 * _numpy_step(out[:, 1:2])[:, 0]

    with pytest.raises(ModelError, match="jumps with the private part"):
        check_batch(model, stepped, x.double(), y)


def test_what_is_done_to_public_features_or_inputs_does_not_matter() -> None:
    x, y = batch()

    class Sex(nn.Module):
        """The first feature is public, and binned."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(INPUTS, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.cat([(x[:, :1] > 0).to(x.dtype), x[:, 1:].tanh()], 1))

    with pytest.raises(ModelError, match="uses gt"):
        check_batch(Sex(), per_record, x, y)
    assert check_batch(Sex(), per_record, x, y, private=list(range(1, INPUTS))) == ()
    with pytest.raises(ModelError, match="uses gt"):
        check_batch(Sex(), per_record, x, y, private=[0, 3])

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(INPUTS, CLASSES)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x * (mask > 0.5))

    mask = torch.rand(len(x), INPUTS)
    assert check_batch(Masked(), per_record, (x, mask), y, private=Private("input", 0)) == ()
    assert check_batch(Masked(), per_record, {"x": x, "mask": mask}, y, private=Private("input", "x")) == ()
    with pytest.raises(ModelError, match="uses gt"):
        check_batch(Masked(), per_record, (x, mask), y, private=Private("input", 1))


def test_jump_behind_zeros_of_the_last_layer_is_found() -> None:
    model = Middle(JUMPS["comparison as a number"])
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)
    with pytest.raises(ModelError, match="uses gt"):
        check_batch(model, per_record, *batch())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_to_fewer_digits_is_no_jump(dtype: torch.dtype) -> None:
    x, y = batch()
    own = lambda out, y: per_record(out.float(), y)  # noqa: E731
    short = "computed in bfloat16"
    caveats = [check_batch(Middle(lambda h: h.to(dtype).to(h.dtype)), per_record, x, y)]
    caveats.append(check_batch(network().to(dtype), own, x.to(dtype), y))
    assert [tuple(c[: len(short)] for c in some) for some in caveats] == [
        (short,) if dtype == torch.bfloat16 else ()
    ] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert [c[: len(short)] for c in check_batch(network(), own, x, y)] == [short]


# --- the attack ------------------------------------------------------------------------------------------------------


class Binned(nn.Module):
    """Each input as it is, faintly, and as the bins it lies in."""

    def __init__(self, bins: int = 16) -> None:
        super().__init__()
        self.register_buffer("thresholds", torch.linspace(0, 1, bins + 1)[1:-1])
        self.layer = nn.Linear(bins, 1)

    def forward(self, x: Tensor) -> Tensor:
        bins = (x[:, :, None] > self.thresholds).to(x.dtype).flatten(1)
        return self.layer(torch.cat([0.02 * x, bins], 1))


def squared(out: Tensor, target: Tensor) -> Tensor:
    return (out[:, 0] - target).square() / 2


def test_input_binning_model_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(64, 1, generator=generator), torch.full((64,), 2.0)
    model, step = Binned(), {"max_grad_norm": 1.0, "noise_multiplier": 0.05}
    settings = Settings(0.05, 1.0, 0.5, lr=0.1, seed=0)
    for attempt in (
        lambda: check_batch(model, squared, x, y),
        lambda: PrivateSGD(model, squared, x, y, settings, progress=False),
        lambda: measure(model, squared, x, y, **step),
    ):
        with pytest.raises(ModelError, match="uses gt"):
            attempt()
    # what would have been stated, and the error of a guess at the middle of the likeliest bin
    found = measure(model, squared, x, y, clip="hard", checked=True, probes=64, generator=generator, **step)
    floor = 1 / found.trace.double()
    grid = torch.linspace(0, 1, 801)[:, None]
    clipped = lambda z: _clipped_gradients(model, z, torch.full((len(z),), 2.0))  # noqa: E731
    seen = clipped(x) + 0.05 * torch.randn(len(x), 16, generator=generator)
    likely = torch.cdist(seen, clipped(grid)).square() / (2 * 0.05**2)
    guess = (torch.softmax(-likely, 1) @ grid)[:, 0]
    error = (guess - x[:, 0]).square().mean()
    assert float(floor.median()) / float(error) > 10


def _clipped_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = []
    for i in range(len(x)):
        own = torch.autograd.grad(squared(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        g = torch.cat([p.flatten() for p in own])
        rows.append(g / g.norm().clamp(min=1.0))
    return torch.stack(rows)[:, :16]
