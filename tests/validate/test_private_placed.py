"""Differences along the private part as it is placed, and what a private module's floors leave out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measuring import measure
from reconbound import PrivateSGD, Settings
from reconbound.fisher import Private, dense_information
from reconbound.validate import KinkWarning, ModelError, ReconboundWarning, check_batch

per_record = nn.CrossEntropyLoss(reduction="none")
CLASSES = 3


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def labels(records: int = 6) -> Tensor:
    return torch.arange(records) % CLASSES


# --- differences along the private part ------------------------------------------------------------------------------


class Words(nn.Module):
    """Tokens, a frozen table, a hidden layer, a head; a function of the table's output on the way."""

    def __init__(self, function: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(20, 4), nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.table.requires_grad_(False)
        self.function, self.activation = function, activation

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.activation(self.hidden(self.function(self.table(tokens)).mean(1))))


DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "a gate": lambda e: e * e.detach().sigmoid(),
    "nearly all": lambda e: e.detach() + 0.1 * (e - e.detach()),
    "no_grad": lambda e: 0.1 * e + _without_grad(e),
    "data": lambda e: 0.1 * e.sin() + e.data,
    "NumPy": lambda e: 0.1 * e + torch.from_numpy(e.detach().numpy().copy()),
    "item": lambda e: e * torch.stack([torch.as_tensor(r.sum().item(), dtype=e.dtype) for r in e])[:, None, None],
    "straight through": lambda e: e + (e.sin() - e).detach(),
}


def _without_grad(e: Tensor) -> Tensor:
    with torch.no_grad():
        return 1.0 * e


@pytest.mark.parametrize("activation", [torch.tanh, torch.relu, F.hardswish], ids=["smooth", "relu", "hardswish"])
@pytest.mark.parametrize("function", list(DETACHED.values()), ids=list(DETACHED))
def test_detached_path_behind_a_private_embedding_is_refused(
    function: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]
) -> None:
    tokens, private = torch.arange(18).reshape(6, 3), Private("module", "table")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)
        check_batch(Words(lambda e: e, activation), per_record, tokens, labels(), private)
        with pytest.raises(ModelError, match="second derivative does not show"):
            check_batch(Words(function, activation), per_record, tokens, labels(), private)
        settings = Settings(1.0, 1.0, 0.5, lr=0.1, seed=0)
        with pytest.raises(ModelError, match="second derivative does not show"):
            PrivateSGD(Words(function, activation), per_record, tokens, labels(), settings, private=private)


def test_what_a_detached_path_hides() -> None:
    """The floor of a private embedding that is nearly all detached is 100 times that of the embedding itself."""
    tokens, private = torch.arange(18).reshape(6, 3), Private("module", "table")
    model = Words(DETACHED["nearly all"], torch.tanh).double()
    step: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "clip": "hard", "checked": True}
    hidden = measure(model, per_record, tokens, labels(), private=private, probes=400, **step).trace
    model.function = lambda e: e
    whole = dense_information(
        model, per_record, tokens, labels(), private=private, max_grad_norm=1.0, noise_multiplier=1.0, clip="hard"
    ).trace
    assert (whole / hidden > 50).all()


def soft(out: Tensor, target: Tensor) -> Tensor:
    return -(target * out.log_softmax(1)).sum(1)


def detached_soft(out: Tensor, target: Tensor) -> Tensor:
    return -((0.1 * target + 0.9 * target.detach()) * out.log_softmax(1)).sum(1)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()])
def test_detached_path_of_a_private_target_is_refused(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, CLASSES))
    x, y = torch.randn(6, 4), torch.rand(6, CLASSES).softmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)
        check_batch(model, soft, x, y, "target")
        check_batch(model, detached_soft, x, y)  # the target is public
        with pytest.raises(ModelError, match="second derivative does not show"):
            check_batch(model, detached_soft, x, y, "target")


class Two(nn.Module):
    """The part of the second input that goes through a detach is public or private, as one says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        gated = torch.cat([b[:, :2], b[:, 2:] * b[:, 2:].detach()], 1)
        return self.last(torch.relu(self.first(torch.cat([a, gated], 1))))


@pytest.mark.parametrize("kind", ["tuple", "dictionary"])
def test_only_the_private_input_and_features_are_moved(kind: str) -> None:
    a, b, y = torch.randn(6, 4), torch.randn(6, 4), labels()
    inputs = (a, b) if kind == "tuple" else {"a": a, "b": b}
    names = (0, 1) if kind == "tuple" else ("a", "b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)
        check_batch(Two(), per_record, inputs, y, Private("input", names[0]))
        check_batch(Two(), per_record, inputs, y, Private("input", names[1], torch.tensor([0, 1])))
        for private in (None, Private("input", names[1]), Private("input", names[1], torch.tensor([0, 3]))):
            with pytest.raises(ModelError, match="second derivative does not show"):
                check_batch(Two(), per_record, inputs, y, private)


@pytest.mark.parametrize("width", [8, 2000])
@pytest.mark.parametrize("values", ["spread", "zeros"])
def test_kinked_models_are_not_refused(width: int, values: str) -> None:
    """Thousands of kinks near a step of the differences, or exactly at the records."""
    x = torch.randn(6, 1, 8, 8) * (values == "spread")
    body = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, width), nn.ReLU()]
    model = nn.Sequential(*body, nn.Linear(width, CLASSES))
    with pytest.warns(KinkWarning):
        check_batch(model, per_record, x, labels())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width, bias=False), nn.ReLU(), nn.Linear(width, CLASSES))
    with pytest.warns(KinkWarning):
        check_batch(model, per_record, x, labels())


# --- what a private module leaves out --------------------------------------------------------------------------------


class Text(nn.Module):
    """A table, and what else may see its tokens."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.beside = beside
        self.table, self.head = nn.Embedding(12, 4, padding_idx=0), nn.Linear(4, CLASSES)
        self.second, self.scale = nn.Embedding(12, 4), nn.Parameter(torch.ones(12))
        self.places, self.decoder = nn.Embedding(3, 4), nn.Linear(4, 12, bias=False)
        self.same = nn.Identity()
        if beside == "tied":
            self.decoder.weight = self.table.weight
        if beside != "trained":
            self.table.requires_grad_(beside in ("before an identity", "tied"))

    def forward(self, tokens: Tensor) -> Tensor:
        e = self.same(self.table(tokens))
        if self.beside == "second table":
            e = e + self.second(tokens)
        elif self.beside == "one-hot":
            e = e + F.linear((tokens.unsqueeze(-1) == torch.arange(12)).to(e.dtype), self.decoder.weight.T)
        elif self.beside == "by hand":
            e = e * self.scale[tokens].unsqueeze(-1)
        elif self.beside == "places":
            e = e + self.places(torch.arange(3))
        elif self.beside == "padding":
            e = e + self.places((tokens == 0).long())
        elif self.beside == "detached":
            e = e * self.scale.detach()[tokens].unsqueeze(-1)
        elif self.beside == "tied":
            e = e + self.decoder(torch.tanh(e)).mean(-1, keepdim=True)
        return self.head(torch.tanh(e).mean(1))


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 7, 0], [8, 9, 10], [1, 1, 0], [11, 3, 2]])


@pytest.mark.parametrize(
    ("beside", "module", "named"),
    [
        ("second table", "table", ["second.weight", "head.weight"]),
        ("one-hot", "table", ["decoder.weight"]),
        ("by hand", "table", ["scale"]),
        ("before an identity", "same", ["table.weight"]),
        ("tied", "same", ["table.weight"]),
        ("tied", "table", ["parameters of module 'table'"]),
        ("trained", "table", ["parameters of module 'table'"]),
        ("nothing", "table", []),
        ("places", "table", []),
        ("padding", "table", []),
        ("nothing", "same", []),
    ],
)
def test_parameters_that_still_see_the_tokens_are_named(beside: str, module: str, named: list[str]) -> None:
    private, settings = Private("module", module), Settings(1.0, 1.0, 0.5, lr=0.1, seed=0)

    def made() -> PrivateSGD:
        return PrivateSGD(Text(beside), per_record, TOKENS, labels(), settings, private=private, progress=False)

    if named:
        with pytest.warns(ReconboundWarning, match="floors do not cover all that is released"):
            one = made()
    else:
        one = made()
    text = [c for c in one.fit(2).accountant.caveats if c.startswith("not covered")]
    assert (text != []) == (named != [])
    for name in named:
        assert any(name in c for c in text)
        assert name in str(one.accountant.mse_floor())
    assert not any("places" in c for c in text)
