"""Ghost clipping, which sums more than it measured where the loss or the model does what its norms do not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beside_opacus import network, private, quiet
from reconbound._internal.checks import InputError

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")


class Twice(nn.Module):
    """Uses the weight of a layer outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 10 * nn.functional.linear(x, self.inner[0].weight)[:, :3]


class Column(nn.MSELoss):
    """The squared error of outputs of shape (B, 1), as in a regression."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs[:, :1], targets[:, None].double())


def test_ghost_losses_that_opacus_does_not_clip_are_refused() -> None:
    """Factors (B,) times losses (B, 1) are a (B, B) matrix: each record is summed with the factors of all."""
    made = private("ghost", criterion=Column())
    made.watch()
    with pytest.raises(
        InputError, match=r"loss_fn must give one loss per record, of shape \(\d+,\): Opacus multiplies"
    ):
        made.train(1)


def test_ghost_gradients_past_the_layers_are_refused() -> None:
    made = private("ghost", network=Twice().double())
    made.watch()
    with pytest.raises(InputError, match="loss_fn must depend on the parameters through the layers of the model only"):
        made.train(1)


def test_ghost_penalty_is_refused() -> None:
    made = private("ghost")
    ledger = made.watch()
    own = made.criterion
    made.criterion = lambda outputs, targets: (  # type: ignore[assignment]
        own(outputs, targets) + 5 * sum(p.square().sum() for p in made.network.parameters())
    )
    with pytest.raises(InputError, match="no penalty on the parameters"):
        made.train(1)
    assert ledger.steps == 0


def test_ghost_gradients_of_another_loss_are_refused() -> None:
    made = private("ghost")
    made.watch()
    made.train(1)
    made.criterion = nn.CrossEntropyLoss()  # not clipped; Opacus keeps the norms of the last batch
    with pytest.raises(InputError, match=r"loss_fn must be what backward\(\) is called on, by itself"):
        made.train(1)


def add_another_loss(model: nn.Module) -> None:
    torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()


def scale_by_their_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("change", [add_another_loss, scale_by_their_norm])
def test_ghost_gradients_that_change_before_the_step_are_refused(change: Any) -> None:
    made = private("ghost")
    made.watch()
    x, y, _ = next(iter(made.loader))
    made.criterion(made.model(x), y).backward()
    change(made.network)
    with pytest.raises(InputError, match="nothing else may change the gradients before the step"):
        made.optimizer.step()


def test_ghost_adaptive_clipping_is_refused() -> None:
    from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping

    with quiet():
        made = private("ghost", engine=PrivacyEngineAdaptiveClipping())
    with pytest.raises(InputError, match=r"loss_fn cannot be accounted for \(adaptive clipping"):
        made.watch()
