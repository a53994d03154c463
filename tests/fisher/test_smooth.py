"""LayerNorm, softmax and GELU as passes compute them: derivatives, up to the third; few operations; no lost path."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from measuring import measure, sum_clipped
from reconbound.fisher import dense_information
from reconbound.fisher.passes import curve_kernels, smooth
from reconbound.fisher.passes.smooth import gelu, group_norm, layer_norm, softmax

Function = Callable[[Tensor], Tensor]
loss_fn = nn.CrossEntropyLoss(reduction="none")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def nearly_constant() -> Tensor:
    """Rows that are constant up to 1e-4, 1e-12 and 0, about 3."""
    return 3 + drawn(3, 5) * torch.tensor([[1e-4], [1e-12], [0.0]], dtype=torch.float64)


def plain(x: Tensor, dims: int, eps: float) -> Tensor:
    """LayerNorm written out. (PyTorch's own third derivatives, such as that of P(v) in x, leave out the statistics.)"""
    at = tuple(range(-dims, 0))
    centred = x - x.mean(at, keepdim=True)
    return centred / (centred.square().mean(at, keepdim=True) + eps).sqrt()


PAIRS: dict[str, tuple[Function, Function, Tensor]] = {
    "layer norm": (lambda x: layer_norm(x, (5,), 1e-5), lambda x: plain(x, 1, 1e-5), drawn(3, 4, 5)),
    "layer norm, large eps": (lambda x: layer_norm(x, [5], 0.3), lambda x: plain(x, 1, 0.3), drawn(3, 5)),
    "layer norm, two dimensions": (
        lambda x: layer_norm(x, torch.Size((4, 5)), 1e-3),
        lambda x: plain(x, 2, 1e-3),
        drawn(2, 3, 4, 5),
    ),
    "layer norm, one row": (lambda x: layer_norm(x, (7,), 1e-5), lambda x: plain(x, 1, 1e-5), drawn(7)),
    "layer norm, one number": (lambda x: layer_norm(x, (1,), 1e-5), lambda x: plain(x, 1, 1e-5), drawn(4, 1)),
    "layer norm, turned": (
        lambda x: layer_norm(x.transpose(0, 2), (3,), 1e-5),
        lambda x: plain(x.transpose(0, 2), 1, 1e-5),
        drawn(3, 4, 5),
    ),
    "layer norm, constant rows": (
        lambda x: layer_norm(x, (5,), 1e-5),
        lambda x: plain(x, 1, 1e-5),
        nearly_constant(),
    ),
    "group norm": (
        lambda x: group_norm(x, 2, 1e-5),
        lambda x: plain(x.unflatten(1, (2, 2)), 2, 1e-5).flatten(1, 2),
        drawn(3, 4, 5),
    ),
    "group norm, turned": (
        lambda x: group_norm(x.transpose(0, 3), 1, 0.1),
        lambda x: plain(x.transpose(0, 3), 3, 0.1),
        drawn(3, 4, 2, 2),
    ),
    "softmax": (lambda x: softmax(x, -1), lambda x: torch.softmax(x, -1), 2 * drawn(3, 4, 5)),
    "softmax, another dimension": (lambda x: softmax(x, 1), lambda x: torch.softmax(x, 1), 2 * drawn(3, 4, 5)),
    "softmax, masked": (
        lambda x: softmax(x + torch.full((5, 5), -torch.inf).triu(1), 2),
        lambda x: torch.softmax(x + torch.full((5, 5), -torch.inf).triu(1), 2),
        drawn(2, 5, 5),
    ),
    "gelu": (gelu, F.gelu, 3 * drawn(4, 5)),
    "gelu, tanh": (lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), 3 * drawn(4, 5)),
    "gelu, turned": (lambda x: gelu(x.T), lambda x: F.gelu(x.T), 3 * drawn(4, 5)),
}
cases = pytest.mark.parametrize("name", PAIRS)


def derivatives(f: Function, x: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The value, P(δ), and for v the backward of P in δ and in x; for w the backward of these in v, δ and x.

    dtype: of all numbers that are given, before they are converted to that of x.
    """
    x = x.detach().requires_grad_()
    y = f(x)
    dtype = dtype or y.dtype
    delta, v = (drawn(*t.shape, seed=i, dtype=dtype).to(y).requires_grad_() for i, t in enumerate((y, x), 1))
    u, w = (drawn(*t.shape, seed=i, dtype=dtype).to(y) for i, t in enumerate((y, x), 3))
    (pulled,) = grad(y, x, delta, create_graph=True)
    at_delta, at_x = grad(pulled, (delta, x), v, create_graph=True)
    found = {"value": y, "P": pulled, "in δ": at_delta, "in x": at_x}
    found["pushed"] = grad((at_delta, at_x), v, (u, w), retain_graph=True)[0]
    found["in x, then in δ"] = grad(at_x, delta, w, retain_graph=True)[0]
    found["in δ, then in x"] = grad(at_delta, x, u, retain_graph=True)[0]
    return {name: value.detach() for name, value in found.items()}


@cases
def test_derivatives_are_those_of_autograd(name: str) -> None:
    ours, theirs, x = PAIRS[name]
    got, want = derivatives(ours, x), derivatives(theirs, x)
    for what, value in want.items():
        assert got[what].shape == value.shape
        scale = float(value.abs().max()) + (1e9 if "constant" in name and what not in ("value", "P") else 0.0)
        assert float((got[what] - value).abs().max()) <= 1e-10 * scale, what


@cases
def test_gradients_are_those_of_differences(name: str) -> None:
    ours, _, x = PAIRS[name]
    if "constant" not in name:  # where a step of the differences is larger than the rows' own
        assert gradcheck(ours, x.detach().requires_grad_())
        assert gradgradcheck(ours, x.detach().requires_grad_())


@pytest.mark.parametrize(("name", "number"), [("layer norm", 1e15), ("gelu", 1e30), ("gelu, tanh", 1e9)])
def test_rows_of_equal_and_of_huge_numbers_have_finite_derivatives(name: str, number: float) -> None:
    for x in (torch.zeros(2, 5), torch.full((2, 5), number), torch.full((2, 5), -number)):
        assert all(bool(value.isfinite().all()) for value in derivatives(PAIRS[name][0], x).values())


def check_rounding(got: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    for what, value in exact.items():
        assert got[what].dtype == dtype
        off, allowed = (got[what].double() - value).abs().max(), 64 * torch.finfo(dtype).eps * value.abs().max()
        assert off <= (allowed if dtype == torch.float32 else allowed / 8), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@cases
def test_lower_precision_is_off_by_its_rounding(name: str, dtype: torch.dtype) -> None:
    """Half precision is computed in float32 and rounded once for each derivative."""
    ours, theirs, x = PAIRS[name]
    if "constant" not in name and "masked" not in name:  # the rounding of the input decides, the mask has float32
        x = x.to(dtype)
        check_rounding(derivatives(ours, x), derivatives(theirs, x.double(), dtype), dtype)


@pytest.mark.parametrize("name", ["layer norm", "gelu", "gelu, tanh"])
def test_autocast_gives_the_precision_of_pytorch(name: str) -> None:
    ours, theirs, x = PAIRS[name]
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            got = derivatives(ours, x.to(dtype))
            assert (F.layer_norm(x.to(dtype), (5,)) if "layer" in name else F.gelu(x.to(dtype))).dtype == dtype
        check_rounding(got, derivatives(theirs, x.to(dtype).double(), dtype), dtype)


@pytest.mark.parametrize("name", ["layer norm", "gelu", "gelu, tanh"])
def test_third_derivative_in_x_is_refused(name: str) -> None:
    ours, _, x = PAIRS[name]
    x = x.detach().requires_grad_()
    (pulled,) = grad(ours(x).square().sum(), x, create_graph=True)
    (again,) = grad(pulled.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives"):
        grad(again.sum(), x)


class Operations(TorchDispatchMode):
    """Counts the operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.found[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def pull_and_push(f: Function) -> tuple[int, int]:
    """How many operations a pull-back and a push-forward take; none reads a value."""
    x = drawn(3, 4, 5).requires_grad_()
    y = f(x)
    delta, v = drawn(*y.shape).requires_grad_(), drawn(*x.shape).requires_grad_()
    with Operations() as pulling:
        (pulled,) = grad(y, x, delta, create_graph=True)
        found = grad(pulled, (delta, x), v, create_graph=True)
    along = [torch.ones_like(t) for t in found]
    with Operations() as pushing:
        grad(found, v, along)
    for operations in (pulling, pushing):
        assert not {"_local_scalar_dense", "nonzero"} & operations.found.keys()
    return pulling.found.total(), pushing.found.total()


def test_derivatives_take_few_operations() -> None:
    before = pull_and_push(lambda x: F.layer_norm(x, (5,)))
    pulls, pushes = pull_and_push(PAIRS["layer norm"][0])
    assert pulls <= 19
    assert pushes <= 14
    assert sum(before) >= 2.5 * (pulls + pushes)
    pulls, pushes = pull_and_push(gelu)
    assert pulls <= 10
    assert pushes <= 3


class Net(nn.Module):
    """Normalises with and without parameters, with frozen ones, twice with the same, and over two dimensions."""

    def __init__(self, *, positions: bool, approximate: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.frozen, self.both = nn.LayerNorm(4), nn.LayerNorm(4, eps=0.1), nn.LayerNorm((3, 4))
        self.places = nn.Parameter(0.1 * torch.randn(3, 4), requires_grad=positions)
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(12, 3)
        self.approximate = approximate
        for p in self.parameters():
            nn.init.normal_(p, std=0.7)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2) + self.places
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate=self.approximate))
        x = self.frozen(x) + self.norm(x) * F.relu(F.layer_norm(x, (4,)), inplace=True)
        return self.head(self.both(x).flatten(1))


class Attention(nn.Module):
    """Attends by PyTorch's function, with and without a mask, and by hand with softmax over each dimension."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Parameter(0.1 * torch.randn(3, 4), requires_grad=positions)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.transpose(1, 2) + self.places).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mask = torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
        found = F.scaled_dot_product_attention(q, k, v) - F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found = found + F.scaled_dot_product_attention(q, k, v, mask) * F.scaled_dot_product_attention(q, v, k, scale=2)
        scores = q @ k.transpose(2, 3)  # (N, 2, 3, 3)
        shares = F.softmax(scores, dim=-1) + scores.softmax(2) + torch.softmax(scores, 1) * F.softmax(scores, dim=-3)
        return self.head((found + shares @ v).transpose(1, 2).flatten(1))


def batch() -> tuple[Tensor, Tensor]:
    x = drawn(5, 4, 3, seed=1)
    x[0] = 0.5  # rows of equal numbers
    return x, torch.arange(5) % 3


class Groups(nn.Module):
    """Normalises groups of channels of images, with parameters, with frozen ones, and without."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Parameter(0.1 * torch.randn(4, 3), requires_grad=positions)
        self.first, self.head = nn.Conv1d(4, 6, 2), nn.Linear(12, 3)
        self.norm, self.frozen = nn.GroupNorm(3, 6), nn.GroupNorm(2, 6, eps=0.1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x + self.places))
        return self.head(torch.tanh(self.frozen(h) - F.group_norm(h.sigmoid(), 1)).flatten(1))


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    for shape, groups in (((2, 3, 4), 2), ((2, 3), 0), ((6,), 3)):
        with pytest.raises((RuntimeError, ValueError, ZeroDivisionError)):
            group_norm(torch.ones(shape), groups, 1e-5)


NETS: dict[str, Callable[..., nn.Module]] = {
    "gelu": Net,
    "tanh": partial(Net, approximate="tanh"),
    "attention": Attention,
    "groups": Groups,
}
nets = pytest.mark.parametrize("net", NETS)


@nets
@pytest.mark.parametrize("positions", [False, True])
def test_step_equals_the_dense_reference(positions: bool, net: str) -> None:
    """With positions, a plain parameter, the model is run in a vmap."""
    model, (x, y) = NETS[net](positions=positions).double(), batch()
    mechanism = {"max_grad_norm": 0.5, "noise_multiplier": 0.7}
    dense = dense_information(model, loss_fn, x, y, **mechanism)
    unit = dense.gradient / dense.norm[:, None]
    across = dense.jacobian - unit[:, :, None] * torch.einsum("bp,bpd->bd", unit, dense.jacobian)[:, None]
    for method in ("auto", "mixed"):
        directions = [drawn(4, 3, seed=s) for s in (3, 4)]
        how: Any = {"method": method, "probe": "inputs", "directions": directions, "deflate": 0}
        info = measure(model, loss_fn, x, y, **mechanism, **how)
        torch.testing.assert_close(info.norm, dense.norm, rtol=1e-7, atol=0)
        torch.testing.assert_close(info.along, dense.along, rtol=1e-6, atol=1e-12)
        moved = [(across @ v.flatten()).square().sum(1) / (0.7 * 0.5) ** 2 for v in directions]
        torch.testing.assert_close(info.across, torch.stack(moved).mean(0), rtol=1e-6, atol=1e-12)
        repeated = measure(model, loss_fn, x, y, **mechanism, method=method, spectral=80)
        torch.testing.assert_close(repeated.spectral, dense.spectral, rtol=1e-6, atol=1e-12)
    for name, value in dense.gradient_sum.items():
        torch.testing.assert_close(info.gradient_sum[name], value, rtol=1e-6, atol=1e-9)


@nets
@pytest.mark.parametrize("positions", [False, True])
def test_sums_without_a_clip_are_the_gradients_of_autograd(positions: bool, net: str) -> None:
    model, (x, y) = NETS[net](positions=positions).double(), batch()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    want = grad(loss_fn(model(x), y).sum(), [*params.values()])
    got = sum_clipped(model, loss_fn, x, y, max_grad_norm=1e6, clip="hard").gradient_sum
    assert got.keys() == params.keys()
    for name, value in zip(params, want, strict=True):
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["layers", "mixed"])
@pytest.mark.parametrize("function", [lambda x: F.layer_norm(x, (4,)), F.gelu], ids=["layer norm", "gelu"])
def test_input_changed_in_place_after_its_use_is_refused(method: Any, function: Function) -> None:
    """Its gradient would be taken at other values."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = 1.0 * self.first(x)
            found = function(h)
            h += 1.0
            return self.head(found)

    x, y = drawn(5, 4, dtype=torch.float32), torch.arange(5) % 3
    with pytest.raises((RuntimeError, ValueError), match=r"in.?place"):
        sum_clipped(Changed(), loss_fn, x, y, max_grad_norm=1.0, method=method)


def test_parameter_that_is_normalised_by_hand_is_seen() -> None:
    """A parameter goes through both functions by itself: its path must not be lost."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w, self.v = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.first(x)) @ F.layer_norm(self.w, (4,)).T + F.gelu(self.v)

    model, x, y = Normalised().double(), drawn(5, 4), torch.arange(5) % 3
    with pytest.raises(ValueError, match="outside the known layers"):
        sum_clipped(model, loss_fn, x, y, max_grad_norm=1.0, method="layers")
    dense = dense_information(model, loss_fn, x, y, max_grad_norm=0.5, noise_multiplier=1.0)
    got = sum_clipped(model, loss_fn, x, y, max_grad_norm=0.5)
    torch.testing.assert_close(got.norm, dense.norm, rtol=1e-7, atol=0)
    for name, value in dense.gradient_sum.items():
        torch.testing.assert_close(got.gradient_sum[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch's CUDA builds alone")
def test_triton_kernels_in_the_interpreter() -> None:
    """They equal autograd's derivatives in float64, by Triton's own interpreter, where it is installed."""
    code = """
import torch, torch.nn.functional as F
from torch.autograd import grad
from reconbound.fisher.passes import curve_kernels as kernels
torch.manual_seed(0)

def second(f, x, v, delta):
    x = x.double().requires_grad_()
    return grad(grad(f(x), x, delta.double(), create_graph=True)[0], x, v.double())[0]

def close(got, want):
    assert got.shape == want.shape and (got - want).abs().max() <= 3e-6 * want.abs().max(), (got - want).abs().max()

for shape, dims in ((3, 4, 5), (5,)), ((6, 197), (197,)), ((2, 3, 8, 8), (8, 8)):
    x, v, delta = (torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1) for _ in range(3))
    _, mean, r = torch.native_layer_norm(x, dims, None, None, 1e-3)
    got = kernels.curve_norm(v, delta, x, mean, r, torch.Size(dims).numel())
    close(got, second(lambda x: F.layer_norm(x, dims, eps=1e-3), x, v, delta))
    close(kernels.curve_softmax(v, delta, x.softmax(-1)), second(lambda x: x.softmax(-1), x, v, delta))
    for form in ("none", "tanh"):
        got = kernels.curve_gelu(3 * x, delta, tanh=form == "tanh") * v
        close(got, second(lambda x: F.gelu(x, approximate=form), 3 * x, v, delta))
        far = kernels.curve_gelu(torch.tensor([0.0, 1e30, -1e30]), torch.ones(3), tanh=form == "tanh")
        assert far.isfinite().all() and not far[1:].any()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


SIGNATURES = {
    "_curve_norm": ({**dict.fromkeys(("v", "delta", "x", "mean", "r", "out"), "*fp32"), "n": "i32"}, {"block": 1024}),
    "_curve_softmax": ({**dict.fromkeys(("v", "delta", "share", "out"), "*fp32"), "n": "i32"}, {"block": 256}),
    "_curve_gelu": ({**dict.fromkeys(("x", "delta", "out"), "*fp32"), "total": "i64"}, {"tanh": True, "block": 1024}),
}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch's CUDA builds alone")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", SIGNATURES)
def test_triton_kernels_compile_for_a_gpu(name: str) -> None:
    """To machine code of an H100 or H200, which needs no GPU."""
    triton, kernels = (importlib.import_module(m) for m in ("triton", "reconbound.fisher.passes.curve_kernels"))
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    signature, fixed = SIGNATURES[name]
    source = triton.compiler.ASTSource(
        fn=getattr(kernels, name), signature={**signature, **dict.fromkeys(fixed, "constexpr")}, constexprs=fixed
    )
    assert len(triton.compile(source, target=target).asm["cubin"]) > 1000


def test_kernels_serve_only_where_they_give_pytorchs_derivatives(monkeypatch) -> None:
    """PyTorch's operations stand in for the kernels, which a CPU does not run."""
    cpu = torch.device("cpu")

    def norm(v: Tensor, delta: Tensor, x: Tensor, mean: Tensor, r: Tensor, row: int) -> Tensor:
        rows = smooth._Rows(x, mean, r, (row,))
        return rows.curve(v, delta, rows.terms(delta))

    def soft(v: Tensor, delta: Tensor, share: Tensor) -> Tensor:
        shares = smooth._Shares(share, share, 1)
        return shares.curve(v, delta, shares.terms(delta))

    def bend(x: Tensor, delta: Tensor, *, tanh: bool) -> Tensor:
        return smooth._Activation(x, "tanh" if tanh else "none").terms(delta)

    right = {"curve_norm": norm, "curve_softmax": soft, "curve_gelu": bend}
    for name, function in right.items():
        monkeypatch.setattr(curve_kernels, name, function)
    monkeypatch.setattr(curve_kernels, "_RIGHT", {})
    assert curve_kernels.are_right(cpu)
    for name, function in right.items():
        for wrong in (lambda *a, f=function, **k: f(*a, **k) * 1.01, lambda *a, **k: 1 / 0):
            with monkeypatch.context() as patch:
                patch.setattr(curve_kernels, name, wrong)
                patch.setattr(curve_kernels, "_RIGHT", {})
                with pytest.warns(match="computed by PyTorch, more slowly"):
                    assert not curve_kernels.are_right(cpu)
                assert not curve_kernels.are_right(cpu)  # found once, said once
