"""A seeded share of the draws of fuzz_models.py, and by name what attacks on the clipped sums have found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fuzz_checks
from fuzz_models import Turned, make_draw
from measuring import measure, sum_clipped
from reconbound.accounting.amplification import poisson_factors
from reconbound.fisher import Private, SumOptions, clipped_gradient_sum, sensitivity
from reconbound.fisher.passes import by_layer
from reconbound.fisher.passes.products import GramSquares, gram_squares_above
from reconbound.fisher.sums import Method, covering_method
from reconbound.training.settings import Settings
from reconbound.training.step import Measurer
from small_models import cross_entropy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_models_have_clipped_sums_and_true_traces(first: int) -> None:
    tally, faults = fuzz_checks.Tally(), []
    for seed in range(first, first + 10):
        faults += [f"seed {seed}: {fault}" for fault in fuzz_checks.check_draw(make_draw(seed), tally)]
    assert not faults
    assert tally.counts["contributions"] >= 10


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_models_with_parameters_of_their_own_have_clipped_sums_and_true_traces(first: int) -> None:
    tally, faults = fuzz_checks.Tally(), []
    for seed in range(first, first + 10):
        draw = make_draw(seed, parameters=True)
        faults += [f"seed {seed}: {fault}" for fault in fuzz_checks.check_draw(draw, tally)]
    assert not faults
    assert tally.counts["contributions"] >= 10
    assert tally.counts["choices of mixed"] >= 3


@pytest.mark.parametrize("seed", [810033, 812427, 801089, 806189, 707001, 902466, 914684, 1102474])
def test_draws_in_which_large_runs_found_a_violation(seed: int) -> None:
    """Checks the draws again.

    812427: the first record of a micro-batched call has no gradient, and the records that are mixed come later.
    1102474: the first batch has no gradients at all, and counted as one in which the records were seen to be apart.
    902466: losses near 0, of outputs that are not, were taken for jumps.
    """
    assert not [*fuzz_checks.check_draw(make_draw(seed), fuzz_checks.Tally())]


@pytest.mark.parametrize("seed", [1700932])
def test_draws_with_parameters_of_their_own_in_which_large_runs_found_a_violation(seed: int) -> None:
    """1700932: alone in its micro-batch a record was rounded otherwise, because its input was contiguous only there."""
    assert not [*fuzz_checks.check_draw(make_draw(seed, parameters=True), fuzz_checks.Tally())]


def test_a_norm_that_is_too_large_gives_no_less_information() -> None:
    """What counts as across g in place of along it is made up for by the factors at the larger norm."""
    for q in (1e-4, 0.01, 0.3, 0.9):
        m = torch.logspace(-2, 0.7, 30, dtype=torch.float64)
        _, along = poisson_factors(m, q)
        for rho in (1.001, 1.1, 2.0, 10.0):
            across_then, along_then = poisson_factors(rho * m, q)
            assert bool((along_then / rho**2 + (1 - 1 / rho**2) * across_then >= along * (1 - 1e-12)).all())


class Weighted(nn.Module):
    """A layer on every place, and a sum over places whose weights are in the data."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, outputs, bias=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self.layer(x) * weight[..., None]).sum(1)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.flatten(1).sum(1) * targets


@pytest.mark.parametrize("measured", [False, True], ids=["sum", "information"])
def test_records_that_cancel_do_not_round_each_other(measured: bool) -> None:
    """One product over all rounded each record by what was added before: one of 0.02 C moved the sum by 0.30 C.

    With 32,768 records it was 0.86 C, and it grows with the square root of their number.
    """
    generator = torch.Generator().manual_seed(0)
    records, places = 4096, 3
    x = torch.randn(records, 1, 32, generator=generator).expand(-1, places, -1).clone()
    weight = torch.randn(records, places, generator=generator, dtype=torch.float64)
    weight = (weight - weight.mean(1, keepdim=True)).float()
    y = torch.full((records,), 1e12)
    torch.manual_seed(0)
    model = Weighted(32, 24)

    def summed(rows: slice) -> Tensor:
        batch = ((x[rows], weight[rows]), y[rows])
        options: dict[str, Any] = {"max_grad_norm": 1.0, "clip": "hard"}
        if not measured:
            return sum_clipped(model, total, *batch, **options).gradient_sum["layer.weight"].double()
        found = measure(
            model, total, *batch, noise_multiplier=1.0, private=Private("input", 0), checked=True, **options
        )
        return found.gradient_sum["layer.weight"].double()

    moved = (summed(slice(0, None)) - summed(slice(1, None))).norm()
    assert moved <= summed(slice(0, 1)).norm() + 1e-3


@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.parametrize("bound", [1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_clip_factors_are_not_rounded_up(bound: float, clip: Any) -> None:
    """A factor below float32's smallest normal number has few digits: 1.19 C was released at a norm of 3e38."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    for size in torch.linspace(1e38, 3.3e38, 60):
        found = sum_clipped(model, total, size.reshape(1, 1), torch.ones(1), max_grad_norm=bound, clip=clip)
        assert found.gradient_sum["weight"].double().norm() <= sensitivity(clip) * bound * (1 + 1e-5)


class Shortened(TorchFunctionMode):
    """Every product of float32 matrices takes its factors 2⁻⁹ too large: bfloat16's rounding at its worst."""

    products = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.mv)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.products:
            args = tuple(t * (1 + 2.0**-9) if t.dtype == torch.float32 else t for t in args)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def medium() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
@pytest.mark.parametrize("places", [1, 2, 40])
def test_products_that_shorten_their_factors_are_clipped(places: int, method: Any) -> None:
    """Sums of gradients that were formed are products too (weights @ gradients): 1.004 C where a CPU has bfloat16."""
    torch.manual_seed(0)
    model, x = Weighted(6, 5), torch.randn(2, places, 6)
    for i in range(2):
        with Shortened():
            found = sum_clipped(
                model,
                total,
                (x[i : i + 1], torch.ones(1, places)),
                torch.full((1,), 100.0),
                max_grad_norm=1.0,
                clip="hard",
                method=method,
            )
        assert 0.97 < found.gradient_sum["layer.weight"].double().norm() <= 1 + 1e-5


def test_the_error_term_counts_every_group() -> None:
    """Σ over groups and pairs of places has g · L² terms, whatever the order of summing: g was left out."""
    groups = 10_000_000
    none, size = torch.zeros(1, groups, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    none[:, :1] = size
    found = float(gram_squares_above([GramSquares.of(none, none, 2, 0.0)])) - 1
    assert found >= groups * 2.0**-53


@pytest.mark.parametrize("records", [2, 3, 5])
def test_another_order_is_found_though_the_records_look_alike(records: int) -> None:
    """Rows that are nearly equal hid the order, and norms were of other records' δ: one moved the sum by 1.41 C."""
    torch.manual_seed(0)
    model, x = Turned(), torch.ones(records, 5) + 1e-3 * torch.randn(records, 5)
    y = torch.logspace(-4, 0, records)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "clip": "hard"}
    whole = sum_clipped(model, total, x, y, **options)
    for i in range(records):
        keep = [j for j in range(records) if j != i]
        others = sum_clipped(model, total, x[keep], y[keep], **options).gradient_sum
        moved = [(v.double() - others[name].double()).norm() for name, v in whole.gradient_sum.items()]
        assert torch.stack(moved).norm() <= 1 + 1e-4
    with pytest.raises(ValueError, match="has other records' gradients in row"):
        sum_clipped(model, total, x, y, method="layers", **options)


class Rolled(nn.Module):
    """Mixes every record with another one, or with all, in batches of more than three."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(5, 8), nn.Linear(8, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(self.mix(h) if len(h) > 3 else h)


@pytest.mark.parametrize("records", [4, 6, 10, 42])
@pytest.mark.parametrize("shift", [1, 3, 9, 21])
@pytest.mark.parametrize("share", [0.5, 1e-3])
def test_mixed_records_are_found_though_they_look_alike(records: int, shift: int, share: float) -> None:
    """Weights that repeat after three records missed a mix with the third next: removal moved the sum by 1.48 C."""
    torch.manual_seed(0)
    x = torch.randn(1, 5).expand(records, 5).clone()  # values cannot tell the records apart
    y = torch.linspace(-1, 1, records)
    mixes = [lambda h: (1 - share) * h + share * h.roll(shift, 0), lambda h: h + share * h.mean(0)]
    for mix in mixes[0 if shift % records else 1 :]:
        assert covering_method(Rolled(mix), total, x, y, Private("nothing")) == "mixed"


def test_training_finds_records_that_mix_in_large_batches_only() -> None:
    """A training tested four records only: with its real batches, removing a record moved the sum by 5.4 C."""
    torch.manual_seed(0)
    x, y = 3 * torch.randn(40, 5), torch.randint(0, 3, (40,))
    settings = Settings(noise_multiplier=1.0, max_grad_norm=0.1, sample_rate=0.9, seed=2**70 + 5)
    model = Rolled(lambda h: h + h.roll(10, 0) if len(h) > 10 else h)
    measurer = Measurer(model, cross_entropy, (x, y), settings, None)
    sums = lambda rows: measurer.gradient_sum(rows)[0]  # noqa: E731
    whole = sums(torch.arange(40))
    for out in range(0, 40, 5):
        without = sums(torch.tensor([i for i in range(40) if i != out]))
        assert (whole - without).double().norm() <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("groups", [2, 3, 19])
def test_generic_sums_are_clipped_though_some_batches_mix(groups: int) -> None:
    """Mixes records only where the batch is a multiple of `groups`: layer rules do not see it in batches
    that are not due for a check (as the docstring says); the generic method runs each record by itself."""
    torch.manual_seed(0)
    x, y = 3 * torch.randn(40, 5), torch.randint(0, 3, (40,))
    model = Rolled(lambda h: h + h.roll(1, 0) if len(h) % groups == 0 else h)

    def total(records: int, method: Method) -> Tensor:
        options = SumOptions(method=method, checked=True)
        found = clipped_gradient_sum(
            model, cross_entropy, x[:records], y[:records], max_grad_norm=0.1, clip="hard", options=options
        )
        return torch.cat([s.flatten() for s in found.gradient_sum.values()]).double()

    moved = {}
    for method in ("auto", "generic"):
        for _ in range(3):  # the first batches, which are checked, are no multiple
            total(next(n for n in (40, 39, 37) if n % groups), method)
        size = 38 if groups != 3 else 36
        moved[method] = float((total(size, method) - total(size - 1, method)).norm()) / 0.1
    assert moved["generic"] <= 1 + 1e-6
    assert moved["auto"] > 1.5  # what the guarantee leaves out


@pytest.mark.parametrize("checked", [False, True])
def test_rows_are_checked_ever_more_rarely_and_when_larger(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(by_layer, "check_rows_own", lambda losses, *_: seen.append(len(losses)))
    model, options = nn.Linear(5, 3), SumOptions(checked=checked)
    for records in (3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 5):
        y = torch.zeros(records, dtype=torch.long)
        clipped_gradient_sum(model, cross_entropy, torch.ones(records, 5), y, max_grad_norm=1.0, options=options)
    assert seen == [3, 3, 3, 3, 4, 4, 5]  # after 0, 1, 2 and 4 batches, a larger one, after 8, a larger one


def test_turned_model_is_found_in_a_batch_of_one() -> None:
    """One record was covered by layer rules and two were not: removing one rounded the other's share differently."""
    torch.manual_seed(0)
    model, x, y = Turned(), torch.randn(1, 5), torch.ones(1)
    assert covering_method(model, total, x, y, Private("nothing")) == "mixed"
    assert covering_method(nn.Linear(5, 3), total, x, y, Private("nothing")) == "auto"


@pytest.mark.parametrize("size", [2e-8, 1e-6, 6e4])
def test_half_precision_method_does_not_depend_on_the_size_of_gradients(size: float) -> None:
    """Weights of 1/8 and 8 on the losses lost digits of small gradients: they seemed to be other records'."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).half()
    x, y = torch.randn(4, 5).half(), torch.full((4,), size).half()
    assert covering_method(model, total, x, y, Private("nothing")) == "auto"


def test_half_precision_method_does_not_depend_on_losses_that_overflow() -> None:
    """A squared error above 65,504 is inf in float16, but its gradient is finite: inf seemed to differ from inf."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1).half(), torch.ones(3, 5).half()
    y = torch.tensor([400.0, 1.0, 1.0]).half()
    squared = lambda outputs, targets: (outputs[:, 0] - targets) ** 2  # noqa: E731
    assert bool(squared(model(x), y)[0].isinf())
    methods = {covering_method(model, squared, x[rows], y[rows], Private("nothing")) for rows in ([0, 1, 2], [1, 2])}
    assert methods == {"auto"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_methods_give_the_same_norms_in_half_precision(dtype: torch.dtype) -> None:
    """The generic norms had an error term of 256 half-precision roundings: 6 % in float16, 41 % in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(4, 5).to(dtype), torch.ones(4).to(dtype)
    norms = [
        sum_clipped(model, total, x, y, max_grad_norm=1.0, clip="hard", method=method).norm
        for method in ("layers", "generic")
    ]
    assert torch.allclose(*norms, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("seed", [93530, 96016, 96372, 92031, 200415, 300402])
def test_draws_that_once_failed_pass(seed: int) -> None:
    assert not fuzz_checks.check_draw(make_draw(seed), fuzz_checks.Tally())


def scaled_by_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return total(outputs, targets) / outputs.detach().abs().max()


def test_batch_dependent_loss_is_taken_per_record() -> None:
    """Every record's gradient changed with the batch: without one record the sum moved by more than C."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(6, 5) * torch.logspace(-1, 1, 6)[:, None], torch.ones(6)
    options: dict[str, Any] = {"max_grad_norm": 5.0, "clip": "hard"}
    whole = sum_clipped(model, scaled_by_batch, x, y, **options).gradient_sum
    for i in range(6):
        keep = [j for j in range(6) if j != i]
        others = sum_clipped(model, scaled_by_batch, x[keep], y[keep], **options).gradient_sum
        assert torch.cat([(whole[k] - others[k]).flatten() for k in whole]).norm() <= 5 * (1 + 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("of", ["outputs", "loss"])
def test_dependence_on_the_number_of_records_is_found_beside_large_losses(of: str, dtype: torch.dtype) -> None:
    """It was looked for relative to the largest loss of the batch: one record moved the sum by 1.018 C."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out * (8 / len(x)) if of == "outputs" else out

    def loss(out: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(out, target, reduction="none")
        return found * (8 / len(out)) if of == "loss" else found

    for seed in range(8):
        torch.manual_seed(seed)
        model = Counting().to(dtype)
        x, y = (torch.randn(8, 6) * torch.logspace(-2, 2, 8)[:, None]).to(dtype), torch.arange(8) % 3
        found = sum_clipped(model, loss, x, y, max_grad_norm=0.01, clip="hard")
        for i in range(8):
            rest = [j for j in range(8) if j != i]
            other = sum_clipped(model, loss, x[rest], y[rest], max_grad_norm=0.01, clip="hard")
            moved = [
                found.gradient_sum[name].double() - other.gradient_sum[name].double() for name in other.gradient_sum
            ]
            assert float(torch.stack([m.norm() for m in moved]).norm()) <= 0.01 * (1 + 1e-5)


def test_what_cannot_be_differentiated_is_refused_in_words() -> None:
    x, y = torch.randn(3, 5), torch.ones(3)

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.w).abs()

    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(1.1)
            return super().forward(x)

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x[:, :2].abs().long().clamp(max=3)).sum(1)

    for model, words in (
        (Complex(), "the trainable parameter w is torch.complex64"),
        (Growing(5, 2), "the parameter weight is changed by calling the model"),
        (Sparse(), "sparse gradients"),
    ):
        with pytest.raises(ValueError, match=words):
            sum_clipped(model, total, x, y, max_grad_norm=1.0)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        sum_clipped(nn.Linear(5, 2), total, x, y, max_grad_norm=1.0)
    with torch.inference_mode():
        made = x.clone()
    with pytest.raises(ValueError, match=r"inputs was made in torch.inference_mode\(\): pass inputs.clone\(\)"):
        sum_clipped(nn.Linear(5, 2), total, made, y, max_grad_norm=1.0)


def test_information_of_strongly_clipped_records_is_not_lost() -> None:
    """(c/σC)² below 1e-38 was rounded to few digits or 0 in float32, and the information with it: floors too high."""
    model = nn.Linear(4, 2).double()
    x, y = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.full((3,), 1e12)
    loss: Any = lambda out, target: (out.square().sum(1) / 2) * target  # noqa: E731
    axes = list(2 * torch.eye(4, dtype=torch.float64))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1e10, "probe": "inputs", "deflate": 0}
    exact = measure(model, loss, x, y.double(), directions=axes, **options)
    found = measure(model.float(), loss, x.float(), y, directions=[a.float() for a in axes], **options)
    torch.testing.assert_close(found.across.double(), exact.across, rtol=1e-4, atol=0)


def test_batches_without_gradients_count_as_no_check() -> None:
    """They show nothing of whose rows a gradient is in: after three of them the fourth batch was not checked."""
    torch.manual_seed(0)
    model, x = Turned(), torch.ones(4, 5) + 1e-3 * torch.randn(4, 5)  # too alike for the inputs to show it
    weighted = lambda out, y: out.square().sum(1) * y  # noqa: E731
    for _ in range(3):
        sum_clipped(model, weighted, x, torch.zeros(4), max_grad_norm=1.0)
    found, exact = (
        sum_clipped(model, weighted, x, torch.arange(1.0, 5.0), max_grad_norm=1.0, method=method)
        for method in ("auto", "generic")
    )
    torch.testing.assert_close(found.norm, exact.norm, rtol=1e-4, atol=0)  # both from above
