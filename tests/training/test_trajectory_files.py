"""Trajectories of PrivateSGD: in memory and on disk, across restarts, confidential, and refused where damaged."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learning import Kept, data, losses, network, settings
from reconbound._internal.checks import InputError
from reconbound._internal.files import Unreadable
from reconbound.training import trajectory as module
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Callback
from reconbound.training.trajectory import Recorder, Trajectory, join_trajectories, read_trajectory
from sealing import sealed

STEPS = 7


class StopOnce(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, learner: PrivateSGD) -> None:
        if learner.step == self.at:
            self.at = -1
            raise KeyboardInterrupt


def learner(recorder: Recorder, *more: Callback, kind: type[PrivateSGD] = Kept, **options: Any) -> Any:
    x, y = data()
    options = {"progress": False, "check": False, "worlds": None, **options}
    return kind(network(), losses, x, y, settings(rules=None), callbacks=[recorder, *more], **options)


def same(a: Trajectory, b: Trajectory) -> bool:
    parts = ("params", "sums", "took", "records")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in parts)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_trajectory_has_parameters_noisy_sums_and_batches() -> None:
    recorder = Recorder()
    trained = learner(recorder).fit(STEPS)
    found = recorder.trajectory()
    assert found.params.shape == found.sums.shape == (1, STEPS, flat(trained.model).numel())
    assert torch.equal(found.params[0, 0], flat(network()))
    assert found.took.shape == (1, STEPS, trained.records)
    assert [torch.nonzero(took).flatten().tolist() for took in found.took[0]] == trained.batches
    noisy = torch.stack(trained.sums).double() + trained.settings.noise * torch.stack(trained.drawn)
    assert torch.allclose(found.sums[0].double(), noisy, rtol=1e-5, atol=1e-5)  # what is released has float32
    assert torch.equal(found.took_part(3), found.took[:, :, 3])
    assert "confidential" in repr(found)


def test_files_hold_the_same_and_only_their_owner_reads_them(tmp_path: Path, monkeypatch) -> None:
    kept = Recorder()
    learner(kept).fit(STEPS)
    monkeypatch.setattr(module, "FLOATS", 200)
    written = Recorder(tmp_path / "parts")
    learner(written).fit(STEPS)
    paths = sorted((tmp_path / "parts").iterdir())
    assert len(paths) > 2
    assert same(kept.trajectory(), written.trajectory())
    assert same(kept.trajectory(), read_trajectory(tmp_path / "parts"))
    assert stat.S_IMODE((tmp_path / "parts").stat().st_mode) == 0o700
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"keep it secret" in path.read_bytes()
    assert not written._steps.get(0)


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("stop_at", [0, 1, 3, 5, STEPS])
def test_restart_leaves_no_gap(tmp_path: Path, stop_at: int, every: int) -> None:
    whole = Recorder()
    learner(whole, kind=PrivateSGD).fit(STEPS)
    options = {"kind": PrivateSGD, "checkpoint": tmp_path / "checkpoints", "every": every}
    with pytest.raises(KeyboardInterrupt):
        learner(Recorder(tmp_path / "parts"), StopOnce(stop_at), **options).fit(STEPS)
    learner(Recorder(tmp_path / "parts"), **options).fit(STEPS)
    assert same(whole.trajectory(), read_trajectory(tmp_path / "parts"))


@pytest.mark.parametrize("before", [True, False])
def test_training_that_goes_on_in_the_same_process(tmp_path: Path, before: bool) -> None:
    """The learner still has a gradient, of a later step, when it goes back to its checkpoint."""
    whole, parts = Recorder(), Recorder(tmp_path / "parts")
    learner(whole, kind=PrivateSGD).fit(STEPS)
    x, y = data()
    callbacks = [StopOnce(5), parts] if before else [parts, StopOnce(5)]
    options = {"progress": False, "check": False, "worlds": None, "checkpoint": tmp_path / "own", "every": 2}
    stopped = PrivateSGD(network(), losses, x, y, settings(rules=None), callbacks=callbacks, **options)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(STEPS)
    stopped.fit(STEPS)
    assert same(whole.trajectory(), parts.trajectory())


def test_runs_of_repeat_are_apart(tmp_path: Path) -> None:
    kept, written = Recorder(), Recorder(tmp_path)
    for recorder in (kept, written):
        learner(recorder, initialise=lambda model: None).repeat(2, STEPS)
    for run in range(2):
        assert same(kept.trajectory(run), read_trajectory(tmp_path, run))
    both = join_trajectories([kept.trajectory(0), kept.trajectory(1)])
    assert both.params.shape[:2] == (2, STEPS)
    assert not torch.equal(both.sums[0], both.sums[1])


def test_a_recorder_in_memory_refuses_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder must be given where the training has checkpoints"):
        learner(Recorder(), checkpoint=tmp_path).fit(STEPS)


def test_damaged_missing_and_foreign_parts_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "FLOATS", 200)
    learner(Recorder(tmp_path)).fit(STEPS)
    paths = sorted(tmp_path.iterdir())
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Unreadable, match="damaged"):
        read_trajectory(tmp_path)
    paths[1].unlink()
    with pytest.raises(Unreadable, match="lacks step"):
        read_trajectory(tmp_path)
    paths[1].write_bytes(sealed({"step": torch.tensor([1])}, {"kind": "trajectory", "format": 1, "run": 0}))
    with pytest.raises(Unreadable, match="no part of a trajectory"):
        read_trajectory(tmp_path)
    with pytest.raises(Unreadable, match="lacks step"):
        read_trajectory(tmp_path, 3)
    paths[1].unlink()
    paths[1].symlink_to(paths[0])
    with pytest.raises(Unreadable, match="symbolic link"):
        read_trajectory(tmp_path)
