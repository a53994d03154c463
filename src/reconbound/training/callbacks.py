"""Callbacks: the caller's code that runs during a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD


class Callback:
    """Watches a training without changing it.

    A training that was stopped announces its last step again when it continues. A callback must return the same then.
    """

    def on_step(self, learner: PrivateSGD) -> Mapping[str, float] | None:
        """Runs at the start of a run and after each of its steps, before the state is saved.

        Args:
            learner: at this step (`learner.run`, `learner.step`); a callback must not change it.

        Returns:
            Numbers for `learner.history` at this step, or None.
        """

    def on_run_end(self, learner: PrivateSGD) -> None:
        """Runs after the last step of a run, after `on_step` and before the state is saved.

        Args:
            learner: at the end of the run.
        """
