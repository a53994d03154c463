"""Models of one's own in a fleet: frozen parts, a forward of their own, hooks; and rates of whole batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_fleet import STEPS, beside, chosen, conv, images, noise_of
from torch import Tensor, nn

from learning import losses
from reconbound._internal.checks import InputError
from reconbound.sweep.fleet.engine import Branches, Stacked
from reconbound.sweep.fleet.trainer import Fleet


def made(*layers: nn.Module, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(*layers).double()


def frozen() -> nn.Sequential:
    """Its first layer is a pretrained one: random, but the same in all models."""
    model = made(nn.Flatten(), nn.Linear(25, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for k, p in enumerate(model[1].parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=p.dtype))
            p.requires_grad_(False)
    return model


class Sharper(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def sharper() -> nn.Sequential:
    return made(nn.Flatten(), nn.Linear(25, 3), kind=Sharper)


class Bounded(nn.Sequential):
    """Differs from its layers where outputs are large alone."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.tanh(super().forward(x) / 2e3) * 1e3


def bounded() -> nn.Sequential:
    return made(nn.Flatten(), nn.Linear(25, 3), kind=Bounded)


def hooked() -> nn.Sequential:
    model = made(nn.Flatten(), nn.Linear(25, 3))
    model.register_forward_hook(lambda module, inputs, output: 3 * output)
    return model


def rows_first() -> nn.Sequential:
    """A linear layer on each row of the image, as no stack has it."""
    return made(nn.Linear(5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3))


@pytest.mark.parametrize("make", [frozen, sharper, bounded, hooked, rows_first])
def test_any_model_is_trained_as_private_sgd_trains_it(make: Callable[[], nn.Sequential]) -> None:
    settings = chosen()
    fleet = Fleet(make, losses, *images(), settings, at=[STEPS])
    assert isinstance(fleet.engine, Branches)
    trained = [p for p in make().parameters() if p.requires_grad]
    (found,) = fleet.run(0, noise=noise_of(0, sum(p.numel() for p in trained)))
    for k, s in enumerate(settings):
        one = beside(fleet, s, make())
        one.repeat(1, STEPS)
        assert one.accountant is not None
        for own, other in zip(one.model.parameters(), fleet.models[k].parameters(), strict=True):
            assert torch.allclose(own, other, rtol=1e-9, atol=1e-12)
        assert torch.allclose(found.dfil()[k], one.accountant.dfil("exact"), rtol=1e-7, atol=1e-12)
    with pytest.raises(InputError, match="method must be branches for this model"):
        Fleet(make, losses, *images(), settings, at=[STEPS], method="stacked")


def test_what_is_not_trained_comes_from_initialise_too() -> None:
    """As PrivateSGD has it: all trainings of a run have the same frozen parts, those of another run others."""

    def initialise(model: nn.Module) -> None:
        model.load_state_dict({name: torch.randn_like(v) for name, v in model.state_dict().items()})

    fleet = Fleet(frozen, losses, *images(), chosen(), at=[1], initialise=initialise)
    seen = []
    for run in (0, 1):
        list(fleet.run(run))
        parts = torch.stack([model[1].weight.detach().clone() for model in fleet.models])
        assert torch.equal(parts[0], parts[2])
        seen.append(parts[0])
    assert not torch.equal(*seen)
    assert not torch.equal(seen[0], frozen()[1].weight)


def test_frozen_parts_stay_the_first_models() -> None:
    def make() -> nn.Sequential:
        model = made(nn.Flatten(), nn.Linear(25, 6), nn.Tanh(), nn.Linear(6, 3))
        model[1].requires_grad_(False)
        return model

    fleet = Fleet(make, losses, *images(), chosen(), at=[1])
    first = fleet.models[0][1].weight.detach().clone()
    for run in (0, 1):
        list(fleet.run(run))
        assert all(torch.equal(model[1].weight, first) for model in fleet.models)


def test_tied_weights_begin_every_run_as_the_factory_makes_them() -> None:
    """One layer used twice is trained under both of its names, and no frozen part under the second."""

    def make() -> nn.Sequential:
        torch.manual_seed(5)
        twice = nn.Linear(25, 25)
        return made(nn.Flatten(), twice, nn.Tanh(), twice, nn.Linear(25, 3))

    fleet = Fleet(make, losses, *images(), chosen(), at=[1], initialise=lambda model: None)
    list(fleet.run(0))
    assert not torch.equal(fleet.models[0][1].weight, make()[1].weight)
    fleet._start(1)
    for model in fleet.models:
        assert torch.equal(model[1].weight, make()[1].weight)
        assert model[1].weight is model[3].weight


def test_plain_chains_are_stacked() -> None:
    assert isinstance(Fleet(conv, losses, *images(), chosen(), at=[1]).engine, Stacked)


def test_zero_initialised_model_is_not_mistaken() -> None:
    """Where all outputs are 0, three times them are too. The check leaves parameters as they are."""

    class Twofold(nn.Sequential):
        __call__ = lambda self, x: 2 * super().__call__(x)  # noqa: E731

    def make(kind: type[nn.Sequential]) -> nn.Sequential:
        model = made(nn.Flatten(), nn.Linear(25, 3), kind=kind)
        nn.init.zeros_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        return model

    for kind in (Sharper, Twofold):
        assert isinstance(Fleet(lambda kind=kind: make(kind), losses, *images(), chosen(), at=[1]).engine, Branches)
    plain = Fleet(lambda: make(nn.Sequential), losses, *images(), chosen(), at=[1])
    assert isinstance(plain.engine, Stacked)
    assert not plain.params.any()


def test_kappa_is_of_the_batches_that_are_drawn() -> None:
    """0.165 of 40 records are batches of 7, a rate of 0.175."""
    asked, drawn = (
        Fleet(
            conv, losses, *images(), chosen(sampler="fixed", sample_rate=rate, rules=("fixed", "paper", "none")), at=[2]
        )
        for rate in (0.165, 0.175)
    )
    ((one,), (other,)) = (list(fleet.run(0)) for fleet in (asked, drawn))
    for rule in ("fixed", "paper", "none"):
        assert torch.equal(one.dfil(rule), other.dfil(rule)), rule


@pytest.mark.parametrize("method", ["stacked", "branches"])
@pytest.mark.parametrize("private", [[3, 7, 8], torch.arange(25) % 3 == 0])
def test_some_features_are_private(method: str, private: list[int] | Tensor) -> None:
    """Parameters as before; the ledger is PrivateSGD's with the same features, over as many."""
    settings = chosen()
    fleet = Fleet(conv, losses, *images(), settings, at=[STEPS], method=method, private=private)
    (found,) = fleet.run(0, noise=noise_of(0, fleet.params.shape[1]))
    assert fleet.features == (3 if isinstance(private, list) else 9)
    for k, s in enumerate(settings):
        one = beside(fleet, s, private=private)
        ledger = one.repeat(1, STEPS).accountant
        assert ledger is not None
        for rule in ("exact", "paper"):
            assert torch.allclose(found.dfil(rule)[k], ledger.dfil(rule), rtol=1e-7, atol=1e-12)
        own = torch.cat([p.detach().flatten() for p in one.model.parameters()])
        assert torch.allclose(fleet.params[k], own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("private", "text"),
    [
        ("target", "must be features of the input"),
        (torch.zeros(25, dtype=torch.bool), "one feature"),
        ([25], "0 to 24"),
        ([True, False], "2 entries"),
    ],
)
def test_private_features_that_are_none_are_refused(private: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Fleet(conv, losses, *images(), chosen(), at=[STEPS], private=private)  # type: ignore[arg-type]
