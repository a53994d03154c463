"""The learner of an audit: it keeps the parameters of a few random steps, so that records can be looked at afterwards,
feature by feature: closely those that turn out to be most exposed, and all of them where they are few.

A run is cut into blocks of L steps; in each, the parameters before one uniformly random step are kept. Measured there
with weight L·q, a record's diagonal is an unbiased estimate of the run's (docs/theory/accounting.md, the third way)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from reconbound._internal.files import CONFIDENTIAL, PUBLIC, Unreadable, json_digest, sealed, unsealed, write_whole
from reconbound._internal.rng import derive, numbers_of, torch_stream
from reconbound.accounting.accountant import FisherAccountant
from reconbound.auditing.options import score
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.step import Measurer

if TYPE_CHECKING:
    from reconbound.data import Dataset

#: Parameters kept in each run, and points at which accuracy and leakage are looked at in the first.
SNAPSHOTS, POINTS = 12, 20
#: Test records for the accuracy on the way; at the end it is that on all of them.
FEW = 2000
#: Record-probe pairs measured in one go.
_AT_ONCE = 4096
#: Records that share their probes when all are looked at.
_TOGETHER = 512
_ADVICE = "bring it back from a copy, or start over with --fresh"
#: Which records (their places in the ledger) are measured at the snapshot before a step, with which weight over q.
Visit = tuple[int, float, Tensor]


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
        self._release()  # somebody may have removed or changed it after the first run
        return self

    def _release(self) -> None:
        content = _plain_file(self.model)
        if not self.released.exists() or self.released.read_bytes() != content:
            write_whole(self.released, content, mode=PUBLIC)

    @cached_property
    def _owner(self) -> str:
        """Names this audit in its snapshots: those of another seed, other data or settings are not its own."""
        return json_digest([self._identity, self.seed])

    def _after_step(self) -> None:
        if self.step in dict(self.snapshot_steps(self.run)):
            facts = {"audit": self._owner, "run": self.run, "step": self.step}
            write_whole(self.snapshot(self.run, self.step), sealed(self.model.state_dict(), facts), mode=CONFIDENTIAL)
        if self.run == 0 and self.step == self.steps:
            self._release()
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
        everyone = torch.arange(len(records))

        def visits(run: int) -> list[Visit]:
            return [(step, float(length), everyone) for step, length in self.snapshot_steps(run)]

        at_once = max(1, _AT_ONCE // probes)
        return self._measured_at(records, runs, visits, "close", probes=probes, each=each, at_once=at_once)

    def look_at_all(self, runs: int, *, looks: int, probes: int) -> FisherAccountant:
        """A ledger with the diagonals of all records, each measured so many times in a run.

        A run's blocks are joined into `looks` parts. In each, a record is measured at the snapshot of one of the part's
        m blocks, drawn uniformly and by itself: at a given step of a block of L with the chance 1/(mL), so with weight
        mLq (docs/theory/accounting.md)."""

        def visits(run: int) -> list[Visit]:
            found = []
            for k, blocks in enumerate(_parts(self.snapshot_steps(run), looks)):
                rng = numbers_of(derive(self.seed, "run", run), "look", k)
                drawn = torch.from_numpy(rng.integers(0, len(blocks), self.records))
                for j, (step, length) in enumerate(blocks):
                    found.append((step, float(len(blocks) * length), torch.nonzero(drawn == j).flatten()))
            return found

        everyone = torch.arange(self.records)
        return self._measured_at(everyone, runs, visits, "all", probes=probes, each=True, at_once=_TOGETHER)

    def _measured_at(
        self,
        records: Tensor,
        runs: int,
        visits: Callable[[int], list[Visit]],
        name: str,
        *,
        probes: int,
        each: bool,
        at_once: int,
    ) -> FisherAccountant:
        assert self.accountant is not None
        account = replace(self.accountant.account, records=len(records), rules=self.accountant.account.rules[:1])
        ledger = FisherAccountant(account, diagonal="all" if each else "average", device=self.device)
        ledger.caveats = self.accountant.caveats
        more, data = replace(self.settings, probes=probes), (self.inputs, self.targets)
        measurer = Measurer(
            self.model, self.loss_fn, *data, more, self.private, diagonal=True, spectral=False, check=False
        )
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            for run in range(runs):
                ledger.begin_run(self.accountant.fingerprints[run])
                seed = derive(self.seed, "run", run)
                for step, weight, places in visits(run):
                    self._put_back(run, step)
                    for k, part in enumerate(places.split(at_once)):
                        probe = torch_stream(seed, f"{name} {k}", step, self.device)
                        found = measurer.information(records[part], probe)
                        ledger.add(part, found, weight=weight * account.sample_rate, stratified=True)
                ledger.finish_run()
        finally:
            self.model.load_state_dict(own)
        return ledger

    def _put_back(self, run: int, step: int) -> None:
        path = self.snapshot(run, step)
        try:
            tensors, facts = unsealed(path)
        except FileNotFoundError:
            raise Unreadable(f"{path} has been removed: {_ADVICE}") from None
        except Unreadable as reason:
            raise Unreadable(f"{reason}: {_ADVICE}") from None
        if facts != {"audit": self._owner, "run": run, "step": step}:
            raise Unreadable(f"{path} is of another audit, run or step: {_ADVICE}")
        self.model.load_state_dict(tensors)


def _parts(blocks: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """The blocks in order, joined into so many parts (at most one a block), of nearly the same number of blocks."""
    ends = [k * len(blocks) // min(count, len(blocks)) for k in range(min(count, len(blocks)) + 1)]
    return [blocks[a:b] for a, b in pairwise(ends)]


def _plain_file(model: nn.Module) -> bytes:
    """The parameters as safetensors, without anything that depends on the data beyond them."""
    from safetensors.torch import save

    own = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    return save(own, {"reconbound": "the released model"})
