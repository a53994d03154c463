"""Distances between clipped gradients in two worlds, against gradients that autograd forms record by record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconbound.fisher import SumOptions
from reconbound.fisher.clipping import clipping
from reconbound.fisher.passes import convolutions, products
from reconbound.fisher.worlds import Replacement, step_distances
from reconbound.validate import ModelError
from small_models import cross_entropy

RECORDS = 6


class Tokens(nn.Module):
    """An embedding, a norm and a layer that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.words(x)))
        return self.out(torch.tanh(F.linear(hidden, self.words.weight[:4] * 0.3)).amax(1))


class Branching(nn.Module):
    """Uses another layer where the first feature is large: the layers' rules cannot compare such passes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if bool((x[:, 0] < 5).all()) else self.two(x)


def vectors() -> Tensor:
    return torch.randn(RECORDS, 5, dtype=torch.float64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))


def convolution() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(1, 3))
    return nn.Sequential(*first, nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 3))


def tied() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(5, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Replacement]] = {
    "mlp": (mlp, vectors, Replacement([0.5, -1.0], [0, 3])),
    "tied": (tied, vectors, Replacement(0.0)),
    "images": (convolution, lambda: torch.rand(RECORDS, 1, 4, 4, dtype=torch.float64), Replacement(0.5)),
    "positions": (mlp, lambda: torch.randn(RECORDS, 9, 5, dtype=torch.float64), Replacement(0.1, [3, 7, 40])),
    "tokens": (Tokens, lambda: torch.randint(0, 9, (RECORDS, 6)), Replacement(4, [2])),
    "label": (mlp, vectors, Replacement(1, part="target")),
}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() == 3:
        return F.cross_entropy(outputs.mean(1), targets, reduction="none")
    return cross_entropy(outputs, targets)


def problem(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, Replacement]:
    torch.manual_seed(seed)
    make, data, world = CASES[name]
    return make().double(), data(), torch.randint(0, 3, (RECORDS,)), world


def clipped_gradients(model: nn.Module, x: Tensor, y: Tensor, bound: float, clip: str) -> Tensor:
    """Returns each record's clipped gradient as a row, formed by autograd from its own loss."""
    rows = []
    for i in range(len(x)):
        params = list(model.parameters())
        loss = losses(model(x[i : i + 1]), y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, params, materialize_grads=True, allow_unused=True)
        g = torch.cat([part.flatten() for part in found])
        rows.append(g * clipping(g.norm(), bound, clip).factor)  # type: ignore[arg-type]
    return torch.stack(rows)


@pytest.mark.parametrize("method", ["auto", "mixed", "generic"])
@pytest.mark.parametrize("clip", ["hard", "smooth"])
@pytest.mark.parametrize("name", [*CASES])
def test_distances_are_those_of_gradients_formed_by_autograd(name: str, clip: Any, method: Any) -> None:
    model, x, y, world = problem(name)
    bound, options = 0.4, SumOptions(method=method, micro_batch=4)
    real, other = (clipped_gradients(model, *batch, bound, clip) for batch in ((x, y), world(x, y)))
    found = step_distances(model, losses, x, y, {"w": world}, max_grad_norm=bound, clip=clip, options=options)
    torch.testing.assert_close(found.clipped_norm, real.norm(dim=1), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found.other_norm["w"], other.norm(dim=1), rtol=1e-6, atol=1e-12)
    squares = (real - other).square().sum(1)
    assert bool((squares > 1e-6).any())
    torch.testing.assert_close(found.squared_distance["w"], squares, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("name", ["mlp", "images", "positions"])
def test_a_small_move_does_not_cancel(name: str) -> None:
    """Moved by 1e-7 the squared distance is about 1e-14 of the norm's square: a difference of squares would lose it."""
    model, x, y, _ = problem(name)
    moves = {step: lambda a, b, step=step: (a + step * torch.ones_like(a), b) for step in (1e-7, 1e-5)}
    found = {
        step: step_distances(model, losses, x, y, {"w": world}, max_grad_norm=100.0, clip="hard").squared_distance["w"]
        for step, world in moves.items()
    }
    torch.testing.assert_close(found[1e-7] * 1e4, found[1e-5], rtol=1e-2, atol=1e-18)
    assert bool((found[1e-7] > 0).all())


def test_a_model_that_takes_another_way_is_not_measured_wrongly() -> None:
    """Its records depend on each other, and torch.func cannot follow a branch on values: it is refused in words."""
    torch.manual_seed(0)
    model, x, y = Branching().double(), vectors(), torch.randint(0, 3, (RECORDS,))
    with pytest.raises(ModelError, match="data-dependent control flow"):
        step_distances(model, losses, x, y, {"w": Replacement(9.0, [0])}, max_grad_norm=1.0)


def test_padding_and_worlds_that_change_nothing() -> None:
    model, x, y, _ = problem("mlp")
    mask = torch.tensor([1, 1, 0, 1, 0, 1])
    same = {"same": lambda a, b: (a, b)}
    found = step_distances(model, losses, x, y, same, max_grad_norm=1.0, options=SumOptions(mask=mask))
    assert found.mask is not None
    assert found.mask.tolist() == mask.tolist()
    assert not found.squared_distance["same"].any()
    none = step_distances(model, losses, x[:0], y[:0], same, max_grad_norm=1.0, options=SumOptions(checked=True))
    assert none.squared_distance["same"].shape == (0,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Replacement("a"), "values must be a number or a list of numbers"),
        (lambda: Replacement(float("nan")), "values must be a finite number"),
        (lambda: Replacement([1.0, 2.0], [0]), "features must be 2, one for each of the values"),
        (lambda: Replacement(1.0, [0.5]), "features must be a list of whole numbers"),
        (lambda: Replacement(1.0, part="label"), "part must be one of input, target"),
        (lambda: Replacement(1.0, [9])(torch.ones(2, 3), None), "features must lie between 0 and 2"),
        (lambda: Replacement(0.5)(torch.ones(2, 3, dtype=torch.int64), None), "values must fit the data"),
        (lambda: Replacement([1.0, 2.0])(torch.ones(2, 3), None), "values must be one number, or 3 of them"),
        (lambda: Replacement(1.0)((torch.ones(2, 3),), None), "name must say which input is replaced"),
        (lambda: Replacement(1.0, part="target")(torch.ones(2), None), "part must be a tensor"),
    ],
)
def test_bad_replacements_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("worlds", "message"),
    [
        ([1], "worlds must be a dictionary"),
        ({"removed": Replacement(0.0)}, "worlds must not name 'removed'"),
        ({"w": 3}, r"worlds\['w'\] must be a function"),
        ({"w": lambda x, y: x}, r"worlds\['w'\] must return inputs and targets"),
        ({"w": lambda x, y: (x[:2], y)}, r"worlds\['w'\] must keep the shapes and types"),
        ({"w": lambda x, y: (x.float(), y)}, r"worlds\['w'\] must keep the shapes and types"),
    ],
)
def test_bad_worlds_are_refused(worlds: Any, message: str) -> None:
    model, x, y, _ = problem("mlp")
    with pytest.raises(ValueError, match=message):
        step_distances(model, losses, x, y, worlds, max_grad_norm=1.0)


def test_replacement_of_one_of_several_inputs() -> None:
    both = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 2)}
    changed, _ = Replacement([1.0], [1], name="b")(both, None)
    assert changed["b"].tolist() == [[0, 1], [0, 1]]
    assert not changed["a"].any()
    assert not both["b"].any()
    pair, _ = Replacement(2.0, name=0)((torch.zeros(1, 1), torch.zeros(1, 1)), None)
    assert [part.item() for part in pair] == [2, 0]


@pytest.mark.parametrize("method", ["auto", "mixed", "generic"])
def test_a_world_that_writes_into_its_batch_changes_no_other(method: Any) -> None:
    """Without copies the distances to it and to later worlds were several times too small."""
    model, x, y, _ = problem("mlp")

    def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.index_fill(1, torch.tensor([0]), 3.0), y

    def writing(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x[:, 0] = 3.0
        return x, y

    before, options = x.clone(), SumOptions(method=method)
    found = step_distances(model, losses, x, y, {"w": writing, "a": apart}, max_grad_norm=1.0, options=options)
    expected = step_distances(model, losses, x, y, {"a": apart}, max_grad_norm=1.0, options=options)
    assert bool((expected.squared_distance["a"] > 0).all())
    for name in ("w", "a"):
        assert torch.equal(found.squared_distance[name], expected.squared_distance["a"])
    assert torch.equal(x, before)


@pytest.mark.parametrize("part", [1, 50, 2**20])
def test_squared_differences_of_a_few_records_at_a_time_are_those_of_all(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the plain formula; a difference far below the rounding of the squares themselves is not lost."""
    monkeypatch.setattr(convolutions, "_PART", part)
    gradients = [torch.randn(RECORDS, 3, 4, dtype=torch.float64), torch.randn(RECORDS, 5, dtype=torch.float64)]
    others = [g + 1e-11 * torch.randn_like(g) if k else torch.randn_like(g) for k, g in enumerate(gradients)]
    w, v = torch.rand(2, RECORDS, dtype=torch.float64)
    for these, those in ((gradients, others), (gradients[1:], others[1:])):
        plain = [
            (w[i] * g[i] - v[i] * h[i]).square().sum()
            for i in range(RECORDS)
            for g, h in zip(these, those, strict=True)
        ]
        wanted = torch.stack(plain).reshape(RECORDS, -1).sum(1)
        torch.testing.assert_close(products.squared_differences(w, these, v, those), wanted, rtol=1e-12, atol=0)
    near = products.squared_differences(w, gradients[1:], w, others[1:])
    exact = torch.stack([(w[i] * (gradients[1][i] - others[1][i])).square().sum() for i in range(RECORDS)])
    torch.testing.assert_close(near, exact, rtol=1e-3, atol=0)
    assert products.squared_differences(w[:0], [g[:0] for g in gradients], v[:0], [h[:0] for h in others]).shape == (0,)
