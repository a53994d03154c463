"""Keeps the parameters of a few random steps, so that records can be measured afterwards, feature by feature.

The most exposed records are measured closely, and all records where they are few.

A run is cut into blocks of L steps; in each, the parameters before one uniformly random step are kept. Measured there
with weight L·q, a record's diagonal is an unbiased estimate of the run's (docs/theory/accounting.md, the third way).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from reconbound._internal.files import CONFIDENTIAL, PUBLIC, Unreadable, json_digest, sealed, unsealed, write_whole
from reconbound._internal.rng import derive, numbers_of, torch_stream
from reconbound.accounting.accountant import FisherAccountant
from reconbound.auditing.models import score
from reconbound.auditing.options import ADVICE
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Callback

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


class Snapshots(Callback):
    """Keeps the released parameters, snapshots of all runs, and a history of the first run.

    Args:
        dataset: for the accuracy on its test data.
        folder: for the snapshots (confidential: the runs that only measure are not released).
        released: the file for the parameters at the end of the first run.
    """

    def __init__(self, dataset: Dataset, folder: Path, released: Path) -> None:
        self.dataset, self.folder, self.released = dataset, folder, released

    def on_step(self, learner: PrivateSGD) -> dict[str, float] | None:
        """Writes a snapshot where one is due. Returns accuracy and leakage so far at some steps of the first run."""
        if learner.step in dict(snapshot_steps(learner, learner.run)):
            facts = {"audit": owner(learner), "run": learner.run, "step": learner.step}
            content = sealed(learner.model.state_dict(), facts)
            write_whole(self.path(learner.run, learner.step), content, mode=CONFIDENTIAL)
        every = max(1, learner.steps // POINTS)
        due = learner.step == learner.steps or (learner.step and learner.step % every == 0)
        if learner.run > 0 or not due or learner.accountant is None:
            return None
        dfil = learner.accountant.dfil()
        top = {"largest": dfil.max(), "high": torch.quantile(dfil, 0.99), "median": dfil.median()}
        found = {name: float(value) for name, value in top.items()}
        accuracy = score(self.dataset, learner.model, None if learner.step == learner.steps else FEW)
        return {**found, "accuracy": accuracy} if math.isfinite(accuracy) else found

    def on_run_end(self, learner: PrivateSGD) -> None:
        """Writes the parameters of the first run: they are released."""
        if learner.run == 0:
            self.release(learner.model)

    def release(self, model: nn.Module) -> None:
        """Writes the released parameters, and nothing else that depends on the data, unless they exist."""
        from safetensors.torch import save

        own = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
        content = save(own, {"reconbound": "the released model"})
        if not self.released.exists() or self.released.read_bytes() != content:
            write_whole(self.released, content, mode=PUBLIC)

    def path(self, run: int, step: int) -> Path:
        """Returns the file for the parameters before a step of a run.

        Args:
            run: the number of the run.
            step: the number of the step.
        """
        return self.folder / f"parameters-{run}-{step}.safetensors"


def snapshot_steps(learner: PrivateSGD, run: int) -> list[tuple[int, int]]:
    """Returns (step, length of its block) of each block of a run; a function of the seed.

    Args:
        learner: gives the seed and the length of a run.
        run: the number of the run.
    """
    count = min(SNAPSHOTS, learner.steps)
    ends = [k * learner.steps // count for k in range(count + 1)]
    rng = numbers_of(derive(learner.seed, "run", run), "snapshot", 0)
    return [(int(rng.integers(a, b)), b - a) for a, b in pairwise(ends)]


def owner(learner: PrivateSGD) -> str:
    """Returns a digest that names an audit in its snapshots: another seed, other data or settings give another one."""
    return json_digest([learner.identity, learner.seed])


class SnapshotMeasurements:
    """Measures records at the snapshots of a finished training.

    Args:
        learner: the trained learner.
        snapshots: its snapshots.
    """

    def __init__(self, learner: PrivateSGD, snapshots: Snapshots) -> None:
        self.learner, self.snapshots = learner, snapshots

    def look(
        self, records: Tensor | None, runs: int, *, probes: int, looks: int = SNAPSHOTS, each: bool = True
    ) -> FisherAccountant:
        """Returns a ledger of these records only, each measured `looks` times in a run.

        A run's blocks are joined into `looks` parts. In each, a record is measured at the snapshot of one of the part's
        m blocks, drawn uniformly and independently: at a given step of a block of L with probability 1/(mL), so with
        weight mLq (docs/theory/accounting.md).

        Args:
            records: the records to measure; None for all, which then share probes.
            runs: the number of runs.
            probes: probes for each measurement.
            looks: measurements of each record in a run; at every snapshot when left out.
            each: whether to keep the diagonal of each record, or only the average one.
        """
        name, at_once = ("all", _TOGETHER) if records is None else ("close", max(1, _AT_ONCE // probes))
        records = torch.arange(self.learner.records) if records is None else records
        learner, whole = self.learner, self.learner.accountant
        assert whole is not None
        account = replace(whole.account, records=len(records), rules=whole.account.rules[:1])
        ledger = FisherAccountant(account, diagonal="all" if each else "average", device=learner.device)
        ledger.caveats = whole.caveats
        measurer = copy(learner.measurer)
        measurer.settings = replace(learner.settings, probes=probes)
        measurer.diagonal, measurer.spectral = True, False
        own = {name: value.clone() for name, value in learner.model.state_dict().items()}
        try:
            for run in range(runs):
                ledger.begin_run(whole.fingerprints[run])
                seed = derive(learner.seed, "run", run)
                for step, weight, places in self._visits(run, looks, len(records)):
                    self._put_back(run, step)
                    for k, part in enumerate(places.split(at_once)):
                        probe = torch_stream(seed, f"{name} {k}", step, learner.device)
                        found = measurer.information(records[part], probe)
                        ledger.add(part, found, weight=weight * account.sample_rate, stratified=True)
                ledger.finish_run()
        finally:
            learner.model.load_state_dict(own)
        return ledger

    def _visits(self, run: int, looks: int, records: int) -> Iterator[tuple[int, float, Tensor]]:
        """Yields a step, the weight over q of measurements at it, and the places of the records measured there."""
        for k, blocks in enumerate(_parts(snapshot_steps(self.learner, run), looks)):
            rng = numbers_of(derive(self.learner.seed, "run", run), "look", k)
            drawn = torch.from_numpy(rng.integers(0, len(blocks), records))
            for j, (step, length) in enumerate(blocks):
                yield step, float(len(blocks) * length), torch.nonzero(drawn == j).flatten()

    def _put_back(self, run: int, step: int) -> None:
        path = self.snapshots.path(run, step)
        try:
            tensors, facts = unsealed(path)
        except FileNotFoundError:
            raise Unreadable(f"{path} has been removed: {ADVICE}") from None
        except Unreadable as reason:
            raise Unreadable(f"{reason}: {ADVICE}") from None
        if facts != {"audit": owner(self.learner), "run": run, "step": step}:
            raise Unreadable(f"{path} is of another audit, run or step: {ADVICE}")
        try:
            self.learner.model.load_state_dict(tensors)
        except RuntimeError:
            raise Unreadable(f"{path} holds other parameters than the model has: {ADVICE}") from None


def _parts(blocks: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Joins the blocks in order into n parts (at most one per block), of nearly the same number of blocks."""
    ends = [k * len(blocks) // min(count, len(blocks)) for k in range(min(count, len(blocks)) + 1)]
    return [blocks[a:b] for a, b in pairwise(ends)]
