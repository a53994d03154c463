"""The learner of an audit: it keeps the parameters of a few random steps, so that the records that turn out to be most
exposed can be looked at closely afterwards, feature by feature.

A run is cut into blocks of L steps; in each, the parameters before one uniformly random step are kept. Measured there
with weight L·q, a record's diagonal is an unbiased estimate of the run's (docs/theory-accounting.md, the third way)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._files import CONFIDENTIAL, PUBLIC, Unreadable, sealed, unsealed, write_whole
from ._random import derive, numbers_of, torch_stream
from .accountant import FisherAccountant
from .measure import Measurer
from .plan import score
from .sgd import PrivateSGD

if TYPE_CHECKING:
    from .data import Dataset

#: Parameters kept in each run, and points at which accuracy and leakage are looked at in the first.
SNAPSHOTS, POINTS = 12, 20
#: Test records for the accuracy on the way; at the end it is that on all of them.
FEW = 2000
#: Record-probe pairs measured in one go.
_AT_ONCE = 4096


class AuditLearner(PrivateSGD):
    """PrivateSGD that keeps the released parameters, snapshots of all runs, and a history of the first.

    Args:
        tested_on: for the accuracy on its test data.
        snapshots: folder for the snapshots (confidential: the runs that only measure are not released).
        released: where the parameters at the end of the first run go.
        advance: called with the steps done, over all runs.
    """

    def __init__(
        self,
        *given: Any,
        tested_on: Dataset,
        snapshots: Path,
        released: Path,
        advance: Callable[[int], None],
        **options: Any,
    ) -> None:
        super().__init__(*given, **options)
        self.tested_on, self.snapshots, self.released, self.advance = tested_on, snapshots, released, advance
        self.evaluate = self._look

    def repeat(self, runs: int, steps: int | None = None, *, epochs: float | None = None) -> AuditLearner:
        self.evaluate_every = max(1, self._length(steps, epochs) // POINTS)
        super().repeat(runs, steps, epochs=epochs)
        return self

    def _after_step(self) -> None:
        if self.step in dict(self.snapshot_steps(self.run)):
            write_whole(self.snapshot(self.run, self.step), sealed(self.model.state_dict(), {}), mode=CONFIDENTIAL)
        if self.run == 0 and self.step == self.steps:
            write_whole(self.released, _plain_file(self.model), mode=PUBLIC)
        super()._after_step()
        self.advance(self.run * self.steps + self.step)

    def _look(self, model: nn.Module) -> dict[str, float]:
        """Accuracy and leakage so far, in the first run: it is the released one."""
        if self.run > 0 or self.accountant is None:
            return {}
        dfil = self.accountant.dfil()
        top = {"largest": dfil.max(), "high": torch.quantile(dfil, 0.99), "median": dfil.median()}
        found = {name: float(value) for name, value in top.items()}
        accuracy = score(self.tested_on, model, None if self.step == self.steps else FEW)
        return {**found, "accuracy": accuracy} if math.isfinite(accuracy) else found

    def snapshot(self, run: int, step: int) -> Path:
        return self.snapshots / f"parameters-{run}-{step}.safetensors"

    def snapshot_steps(self, run: int) -> list[tuple[int, int]]:
        """(step, length of its block) of each block of a run; a function of the seed."""
        count = min(SNAPSHOTS, self.steps)
        ends = [k * self.steps // count for k in range(count + 1)]
        rng = numbers_of(derive(self.seed, "run", run), "snapshot", 0)
        return [(int(rng.integers(a, b)), b - a) for a, b in pairwise(ends)]

    def look_closely(self, records: Tensor, runs: int, *, probes: int, each: bool) -> FisherAccountant:
        """A ledger of these records alone, from the snapshots of all runs, with their diagonals or the average one."""
        assert self.accountant is not None
        account = replace(self.accountant.account, records=len(records), rules=self.accountant.account.rules[:1])
        ledger = FisherAccountant(account, diagonal="all" if each else "average", device=self.device)
        more, data = replace(self.settings, probes=probes), (self.inputs, self.targets)
        measurer = Measurer(
            self.model, self.loss_fn, *data, more, self.private, diagonal=True, spectral=False, check=False
        )
        parts = torch.arange(len(records)).split(max(1, _AT_ONCE // probes))
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            for run in range(runs):
                for step, length in self.snapshot_steps(run):
                    self._put_back(run, step)
                    for k, part in enumerate(parts):
                        seed = derive(self.seed, "run", run)
                        found = measurer.information(records[part], torch_stream(seed, f"close {k}", step, self.device))
                        ledger.add(part, found, weight=length * account.sample_rate, stratified=True)
                ledger.finish_run()
        finally:
            self.model.load_state_dict(own)
        return ledger

    def _put_back(self, run: int, step: int) -> None:
        path = self.snapshot(run, step)
        try:
            self.model.load_state_dict(unsealed(path)[0])
        except FileNotFoundError:
            raise Unreadable(f"{path} has been removed: start over with --fresh") from None


def _plain_file(model: nn.Module) -> bytes:
    """The parameters as safetensors, without anything that depends on the data beyond them."""
    from safetensors.torch import save

    own = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    return save(own, {"reconbound": "the released model"})
