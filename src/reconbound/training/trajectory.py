"""Trajectories: all that trainings release step by step, in memory or on disk as PrivateSGD goes on.

A trajectory is more than what an attacker sees: it also says who took part. It is as confidential as the data. Files
have mode 0600 and are safetensors, never a pickle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, file_path, whole
from reconbound._internal.files import Unreadable, refuse_special_files, unsealed
from reconbound._internal.large_files import write_sealed
from reconbound.training.settings import Callback

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD

KIND, FORMAT = "trajectory", 1
#: Floats that a recorder holds before it writes a part: 64 MiB in float32.
FLOATS = 2**24
_PART = re.compile(r"run-(\d+)-step-(\d+)\.safetensors")


@dataclass(frozen=True, repr=False)
class Trajectory:
    """Noisy sums of M trainings of T steps each, and what only the curator knows of them. Confidential.

    Attributes:
        params: the trained parameters before each step, one after another, (M, T, p).
        sums: the noisy sums of clipped gradients, (M, T, p).
        took: who took part, (M, T, R).
        records: the records that `took` is about, (R,).
        clean: the sums before noise, (M, T, p); None where they were not kept.
    """

    params: Tensor
    sums: Tensor
    took: Tensor
    records: Tensor
    clean: Tensor | None = None

    def __repr__(self) -> str:
        """Returns only sizes: the values are secret, and long."""
        trainings, steps, size = self.params.shape
        return f"Trajectory({trainings} trainings of {steps} steps, {size:,} parameters; confidential)"

    def of(self, trainings: Any) -> Trajectory:
        """Returns the trajectories of some of the trainings.

        Args:
            trainings: their indices, a slice, or a mask.
        """
        clean = None if self.clean is None else self.clean[trainings]
        return Trajectory(self.params[trainings], self.sums[trainings], self.took[trainings], self.records, clean)

    def took_part(self, record: int) -> Tensor:
        """Returns in which steps a record took part, (M, T).

        Args:
            record: its index.
        """
        place = torch.nonzero(self.records == record).flatten()
        if len(place) != 1:
            raise InputError("record", "must be one whose participation was kept", record)
        return self.took[:, :, int(place[0])]


class Recorder(Callback):
    """Records what a training by PrivateSGD releases: a callback.

    A training that was stopped and goes on from its checkpoint is recorded without a gap: whatever is in memory is
    written whenever a checkpoint is due.

    Args:
        folder: where parts are written, for trainings that are long or have checkpoints; None to keep all in memory.
            Made for its owner only (mode 0700).
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(file_path("folder", folder))
        self._steps: dict[int, dict[int, dict[str, Tensor]]] = {}  # of each run: what is not on disk
        self._last = (-1, -1)  # run and step that were announced last

    def on_step(self, learner: PrivateSGD) -> None:
        """Notes the parameters, and the noisy sum and the batch that led to them."""
        if self.folder is None and learner.folder is not None:
            raise InputError("folder", "must be given where the training has checkpoints: it may go on elsewhere", None)
        known = self._steps.setdefault(learner.run, {})
        parts = [p.detach().flatten() for p in learner.params.values()]
        now: dict[str, Tensor] = {"params": torch.cat(parts).clone()}
        gradients = [p.grad for p in learner.params.values()]
        follows = self._last == (learner.run, learner.step - 1)  # otherwise gradients are none, or of another step
        self._last = (learner.run, learner.step)
        if follows and all(g is not None for g in gradients):
            flat = torch.cat([g.detach().flatten() for g in gradients if g is not None])
            took = torch.zeros(learner.records, dtype=torch.bool)
            took[learner.sampler.batch(learner.run_seed, learner.step - 1)] = True
            now |= {"sum": flat * learner.sampler.divisor, "took": took}
        elif learner.step:
            now = known.get(learner.step, now)  # announced again: the sum was recorded before
        known[learner.step] = {name: value.cpu() for name, value in now.items()}
        if self.folder is None:
            return
        held = len(known) * (2 * len(known[learner.step]["params"]) + learner.records // 4)
        saved = learner.folder is not None and learner.step % learner.every == 0
        if held >= FLOATS or saved or learner.step == learner.steps:
            self._write(learner.run)

    def _write(self, run: int) -> None:
        """Writes what is in memory of a run as one part, and keeps nothing of it."""
        assert self.folder is not None
        steps = self._steps.pop(run, {})
        full = {step: found for step, found in steps.items() if step == 0 or "sum" in found}
        if not full:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_special_files(self.folder)
        tensors = {"step": torch.tensor(sorted(full)), "params": torch.stack([full[s]["params"] for s in sorted(full)])}
        summed = [s for s in sorted(full) if s]
        if summed:
            tensors |= {name: torch.stack([full[s][name] for s in summed]) for name in ("sum", "took")}
        path = self.folder / f"run-{run:04d}-step-{min(full):08d}.safetensors"
        write_sealed(path, tensors, {"kind": KIND, "format": FORMAT, "run": run})

    def trajectory(self, run: int = 0) -> Trajectory:
        """Returns what was recorded of a run, as a trajectory of one training.

        Args:
            run: its number, from 0.
        """
        if self.folder is not None:
            return read_trajectory(self.folder, run)
        return _joined(self._steps.get(run, {}), f"run {run}")


def read_trajectory(folder: str | os.PathLike[str], run: int = 0) -> Trajectory:
    """Reads what a Recorder wrote of a run.

    Args:
        folder: the recorder's.
        run: its number, from 0.

    Raises:
        Unreadable: a part is damaged or missing; gives the reason.
    """
    place, number = Path(file_path("folder", folder)), whole("run", run, at_least=0)
    refuse_special_files(place)
    found: dict[int, dict[str, Tensor]] = {}
    for path in sorted(place.glob("run-*-step-*.safetensors")):
        name = _PART.fullmatch(path.name)
        if name is not None and int(name[1]) == number:
            tensors, facts = unsealed(path)
            _check_part(path, tensors, facts, number)
            summed = iter(zip(tensors.get("sum", ()), tensors.get("took", ()), strict=True))
            for step, params in zip(tensors["step"].tolist(), tensors["params"], strict=True):
                more = dict(zip(("sum", "took"), next(summed), strict=True)) if step else {}
                found[step] = {"params": params, **more}
    return _joined(found, f"run {number} of {place}")


def _check_part(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], run: int) -> None:
    """Refuses a file that is no part of a trajectory, whatever its digest says."""
    steps, params = tensors.get("step"), tensors.get("params")
    good = (facts.get("kind"), facts.get("format"), facts.get("run")) == (KIND, FORMAT, run)
    good = good and steps is not None and steps.dtype == torch.int64 and steps.dim() == 1 and bool((steps >= 0).all())
    good = good and params is not None and params.is_floating_point() and params.dim() == 2
    if good and steps is not None and params is not None:
        count = int((steps > 0).sum())
        sums, took = tensors.get("sum", params[:0]), tensors.get("took", torch.zeros(0, 1, dtype=torch.bool))
        good = len(steps) == len(params) and sums.shape == (count, params.shape[1]) and sums.is_floating_point()
        good = good and took.dim() == 2 and len(took) == count and took.dtype == torch.bool
    if not good:
        raise Unreadable(f"{path} is no part of a trajectory of run {run} that this version of reconbound wrote")


def _joined(found: Mapping[int, Mapping[str, Tensor]], where: str) -> Trajectory:
    """Returns the trajectory of a training from what was noted at each step; refuses one with gaps."""
    steps = max(found, default=0)
    missing = [step for step in range(steps + 1) if step not in found]
    if steps == 0 or missing:
        raise Unreadable(f"the trajectory of {where} lacks step {missing[0] if missing else 1}")
    sizes = {(part["params"].shape, part["sum"].shape if k else None) for k, part in found.items()}
    if len({shape for shape, _ in sizes}) > 1 or len({part["took"].shape for k, part in found.items() if k}) > 1:
        raise Unreadable(f"the trajectory of {where} is of models or data of different sizes")
    params = torch.stack([found[step]["params"] for step in range(steps)])
    sums, took = (torch.stack([found[step][name] for step in range(1, steps + 1)]) for name in ("sum", "took"))
    return Trajectory(params[None], sums[None], took[None], torch.arange(took.shape[1]))


def join_trajectories(parts: list[Trajectory]) -> Trajectory:
    """Returns several trainings of the same length, model and data as one trajectory.

    Args:
        parts: at least one.
    """
    clean = None if parts[0].clean is None else torch.cat([part.clean for part in parts if part.clean is not None])
    both = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("params", "sums", "took")}
    return Trajectory(**both, records=parts[0].records, clean=clean)
