"""Checkpoints: whole or not there, sealed, for one process at a time, and never a pickle."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR, StepLR

import reconbound
from learning import data, learner, losses, network, same_state, settings
from reconbound._internal import files as _files
from reconbound._internal.checks import InputError
from reconbound.accounting.accountant import Chosen
from reconbound.auditing.options import AuditOptions
from reconbound.sweep.run import Sweep
from reconbound.training import checkpoint
from reconbound.training.checkpoint import (
    LOCK,
    NAMES,
    Checkpoint,
    CheckpointError,
    data_digest,
    load,
    lock_folder,
    save,
)
from reconbound.training.private_sgd import PrivateSGD, TrainingError
from sealing import sealed

MINE = {"configuration": {"lr": 0.1, "rules": ["exact"]}, "data": {"records": 3, "digest": "ab"}}


def state(step: int, **belongs) -> Checkpoint:
    return Checkpoint(
        {"w": torch.full((3,), float(step)), "empty": torch.zeros(0)}, {**MINE, "order": step, "step": step, **belongs}
    )


def test_newest_checkpoint_is_loaded_and_older_overwritten(tmp_path) -> None:
    assert load(tmp_path, MINE) is None
    for step in range(5):
        save(tmp_path, state(step), turn=step)
        found = load(tmp_path, MINE)
        assert found is not None
        assert found[0].facts["step"] == step
        assert found[0].tensors["w"].tolist() == [step] * 3
        assert found[1] == step % 2
    assert sorted(os.listdir(tmp_path)) == sorted(NAMES)
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in NAMES)


def test_new_folder_is_private_to_its_owner(tmp_path) -> None:
    before = os.umask(0)
    try:
        with lock_folder(tmp_path / "run"):
            save(tmp_path / "run", state(0), turn=0)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


@pytest.mark.parametrize("where", ["cut", "half", "first", "facts", "tensor", "empty", "pickle"])
def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, where: str) -> None:
    save(tmp_path, state(1), turn=0)
    save(tmp_path, state(2), turn=1)
    path = tmp_path / NAMES[1]
    good = path.read_bytes()
    flip = {"first": 0, "facts": good.index(b"order"), "tensor": len(good) - 2}
    if where in flip:
        k = flip[where]
        path.write_bytes(good[:k] + bytes([good[k] ^ 1]) + good[k + 1 :])
    else:
        path.write_bytes(
            {"cut": good[:-1], "half": good[: len(good) // 2], "empty": b"", "pickle": b"\x80\x04N."}[where]
        )
    with pytest.warns(UserWarning, match=r"checkpoint-1\.safetensors is cut off.*going on from the other one, step 1"):
        found = load(tmp_path, MINE)
    assert found is not None
    assert found[0].facts["step"] == 1
    (tmp_path / NAMES[0]).unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint is there"):
        load(tmp_path, MINE)


def test_every_flipped_bit_is_detected(tmp_path) -> None:
    save(tmp_path, state(1), turn=0)
    path = tmp_path / NAMES[0]
    good = path.read_bytes()
    for k in range(len(good)):
        path.write_bytes(good[:k] + bytes([good[k] ^ (1 << k % 8)]) + good[k + 1 :])
        with pytest.raises(CheckpointError):
            load(tmp_path, MINE)


def test_checkpoint_of_another_run_is_refused(tmp_path) -> None:
    save(tmp_path, state(1), turn=0)
    other = {**MINE, "configuration": {"lr": 0.2, "rules": ("exact",)}}
    with pytest.raises(CheckpointError, match=r"configuration differs \(lr was 0.1 and is 0.2\)"):
        load(tmp_path, other)
    save(tmp_path, state(2, **other), turn=1)
    with pytest.warns(UserWarning, match="belongs to another run"):
        found = load(tmp_path, MINE)  # the newer one is foreign: the older, its own, is used
    assert found is not None
    assert found[0].facts["step"] == 1


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_full_disk_keeps_the_last_good_state(tmp_path, monkeypatch, call: str) -> None:
    save(tmp_path, state(1), turn=0)
    save(tmp_path, state(2), turn=1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(_files.os, call, full)
        with pytest.raises(CheckpointError, match=r"step 3: no checkpoint could be written .*No space left"):
            save(tmp_path, state(3), turn=2)
    found = load(tmp_path, MINE)
    assert found is not None
    assert found[0].facts["step"] == 2
    assert sorted(os.listdir(tmp_path)) == sorted(NAMES)  # no leftovers


def test_full_disk_on_a_real_device() -> None:
    """/dev/full cannot hold a rename, but it can fail a write as a disk does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb") as file:
        file.write(sealed({"w": torch.ones(3)}, {}))


def test_training_resumes_after_a_full_disk(tmp_path, monkeypatch) -> None:
    whole = learner().fit(12)
    first = learner(checkpoint=tmp_path, every=4)
    written = 0
    original = _files.write_whole

    def fails_later(*args, **kwargs):
        nonlocal written
        written += 1
        if written > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(_files, "write_whole", fails_later)
        with pytest.raises(CheckpointError, match="step 8: no checkpoint"):
            first.fit(12)
    assert same_state(first.fit(12), whole)  # the same learner, once there is room again
    again = learner(checkpoint=tmp_path, every=4).fit(12)
    assert same_state(again, whole)


def test_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        learner(checkpoint=tmp_path / "file" / "run").fit(3)
    place = tmp_path / "locked"
    place.mkdir(mode=0o500)
    one = learner(checkpoint=place)
    if os.geteuid() == 0:  # root may write anywhere: let the system refuse it

        def refuse(*args, **kwargs):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(checkpoint.os, "open", refuse)
    with pytest.raises(CheckpointError, match="cannot be written"):
        one.fit(3)
    assert one.step == 0


# --- one process at a time -----------------------------------------------------------------------

HOLD = """
import sys, time
from reconbound.training.checkpoint import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_on_one_folder(tmp_path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"is in use by process {holder.pid} on "):
            learner(checkpoint=tmp_path).fit(3)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert (tmp_path / LOCK).exists()
    learner(checkpoint=tmp_path).fit(3)  # the dead process let go


def test_leftovers_of_a_killed_process_are_removed(tmp_path) -> None:
    leftover = tmp_path / ".checkpoint-0.safetensors.0badcafe.part"
    leftover.write_bytes(b"half")
    with lock_folder(tmp_path):
        assert not leftover.exists()


# --- whose it is -----------------------------------------------------------------------------------


def attempt(folder: Path, model=None, records=None, loss=losses, **options) -> PrivateSGD:
    names = ("lr", "noise_multiplier", "seed", "budget", "rules", "clip")
    chosen = {k: options.pop(k) for k in list(options) if k in names}
    steps = options.pop("steps", 6)
    x, y = data() if records is None else records
    one = PrivateSGD(model or network(), loss, x, y, settings(**chosen), checkpoint=folder, check=False, **options)
    return one.fit(steps)


def changed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[3, 1] += 1e-6
    return x


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("configuration differs .lr was", {"lr": 0.2}),
        ("configuration differs .noise_multiplier was", {"noise_multiplier": 1.1}),
        ("configuration differs .steps was 6 and is 7", {"steps": 7}),
        ("configuration differs .budget", {"budget": ("steps", 0.5)}),
        ("configuration differs .rules", {"rules": ("exact", "paper")}),
        ("configuration differs .diagonal", {"diagonal": "all"}),
        ("configuration differs .private", {"private": torch.tensor([0, 1])}),
        ("seed differs", {"seed": 8}),
        ("data differs .records was 24 and is 23", {"records": tuple(t[:23] for t in data())}),
        ("data differs .digest", {"records": (changed(data()[0]), data()[1])}),
        ("model differs", {"model": torch.nn.Sequential(network()[0], torch.nn.Sigmoid(), network()[2])}),
        ("optimizer differs .class was 'SGD' and is 'Adam'.;", {"optimizer": torch.optim.Adam}),
        (
            "optimizer differs .group 0 momentum was 0.0 and is 0.1, group 0 nesterov was False and is True.;",
            {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.1)},
        ),
        (
            "optimizer differs .group 0 parameters was 4 and is 3.;",
            {"optimizer": lambda p: torch.optim.SGD(p[1:], lr=0.1)},
        ),
        ("schedule differs .class was None and is 'StepLR'.;", {"schedule": lambda o: StepLR(o, 2)}),
        ("configuration differs .diagonal was 'none' and is .*'most': 3", {"diagonal": Chosen(3, 2)}),
        ("configuration differs .diagonal was 'none' and is ..top', 3", {"diagonal": ("top", 3)}),
        (r"configuration differs .whole_at was \[\] and is \[2.0, 6.0\]", {"whole_at": [2]}),
    ],
)
def test_another_configuration_or_data_set_is_refused(tmp_path, what: str, change: dict) -> None:
    attempt(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in NAMES}
    with pytest.raises(CheckpointError, match=f"belongs to another run: the {what}"):
        attempt(tmp_path, **change)
    assert files == {name: (tmp_path / name).read_bytes() for name in NAMES}  # the last good state is intact
    attempt(tmp_path)


def test_other_step_counts_of_a_whole_ledger_are_refused(tmp_path) -> None:
    """The ledger keeps one row for each count: under other counts, the rows of step 4 would be given for step 2."""
    kept = attempt(tmp_path, whole_at=[4], every=1)
    assert kept.accountant is not None
    for other in ([2], [2, 4], []):
        with pytest.raises(CheckpointError, match=r"differs .whole_at was \[4.0, 6.0\] and is "):
            attempt(tmp_path, whole_at=other)
    again = attempt(tmp_path, whole_at=[4, 6])  # the last count is always the run's end
    assert same_state(again, kept)
    plain = attempt(None)  # how a run is measured does not change what it releases
    assert all(torch.equal(a, b) for a, b in zip(kept.model.parameters(), plain.model.parameters(), strict=True))


def rises(factor: float):
    return lambda t: 1 + factor * t


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (lambda o: StepLR(o, 2, 0.5), lambda o: StepLR(o, 2, 0.9), "gamma was 0.5 and is 0.9.;"),
        (lambda o: StepLR(o, 2, 0.5), lambda o: StepLR(o, 3, 0.5), "step_size was 2 and is 3.;"),
        (lambda o: CosineAnnealingLR(o, 6), lambda o: CosineAnnealingLR(o, 9), "T_max was 6 and is 9"),
        (lambda o: StepLR(o, 2), None, "class was 'StepLR' and is None"),
        (lambda o: StepLR(o, 2), lambda o: LambdaLR(o, rises(0.2)), "class was 'StepLR' and is 'LambdaLR'"),
        (
            lambda o: SequentialLR(o, [StepLR(o, 1, 0.5), StepLR(o, 1)], [2]),
            lambda o: SequentialLR(o, [StepLR(o, 1, 0.6), StepLR(o, 1)], [2]),
            "_schedulers was .*0.5.* and is .*0.6",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step|.*epoch parameter")  # SequentialLR's own
def test_another_schedule_is_refused(tmp_path, before, after, what: str) -> None:
    attempt(tmp_path, schedule=before)
    files = {name: (tmp_path / name).read_bytes() for name in NAMES}
    with pytest.raises(CheckpointError, match=f"the schedule differs .{what}"):
        attempt(tmp_path, schedule=after)
    assert files == {name: (tmp_path / name).read_bytes() for name in NAMES}
    attempt(tmp_path, schedule=before)  # its own is taken


def test_training_resumes_from_the_previous_checkpoint(tmp_path) -> None:
    whole = learner().fit(12)
    learner(checkpoint=tmp_path, every=4).fit(12)
    newest = max((tmp_path / name for name in NAMES), key=lambda p: p.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="going on from the other one, run 0, step 8"):
        again = learner(checkpoint=tmp_path, every=4).fit(12)
    assert same_state(again, whole)


def test_no_module_pickles() -> None:
    paths = sorted(Path(reconbound.__file__).parent.rglob("*.py"))
    assert len(paths) > 100  # of the whole package, not of the folder of one module
    for path in paths:
        code = path.read_text()
        for word in ("import pickle", "torch.save(", "torch.load(", "import dill", "joblib", "allow_pickle=True"):
            assert word not in code, f"{path.name}: {word}"


# --- secrets -------------------------------------------------------------------------------------

SECRET = 294263246810135724680


def test_messages_show_neither_seeds_nor_digests(tmp_path) -> None:
    one = learner(seed=SECRET, checkpoint=tmp_path, evaluate=lambda model: {"x": 1.0}).fit(steps=4)
    found = [
        repr(one),
        repr(one.settings),
        str(one.history),
        repr(one.accountant.account),
        str(one.accountant.summary()),
    ]
    digest = data_digest(one.inputs, one.targets)
    for change in ({"seed": SECRET + 1}, {"seed": SECRET, "records": (changed(data()[0]), data()[1])}):
        with pytest.raises(CheckpointError, match="differs") as refused:
            learner(checkpoint=tmp_path, **change).fit(steps=4)
        found.append(str(refused.value))
    assert digest[:6] in found[-1]
    for bad in (-SECRET, float(SECRET), str(SECRET)):
        with pytest.raises(InputError, match="seed") as refused:
            settings(seed=bad)
        found.append(str(refused.value))
    for message in found:
        assert str(SECRET)[:8] not in message
        assert f"{float(SECRET)}"[:6] not in message
        assert digest[:7] not in message
    one._midway, one.folder = True, None
    with pytest.raises(TrainingError) as stopped:
        one.fit(steps=4)
    assert str(SECRET)[:8] not in str(stopped.value)
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in NAMES)  # the seed is in them


def test_options_and_sweeps_do_not_print_their_seed(tmp_path) -> None:
    assert str(SECRET) not in repr(AuditOptions().with_changes(seed=SECRET))
    assert str(SECRET) not in repr(Sweep("digits", tmp_path / "s", space={"lr": [0.1]}, steps=(3,), seed=SECRET))


# --- loss, advice, folder --------------------------------------------------------------------------


def other_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 1.01 * losses(outputs, targets)


def test_another_loss_is_refused_by_its_name(tmp_path) -> None:
    attempt(tmp_path)
    with pytest.raises(CheckpointError, match=r"the loss differs .it was 'losses' and is 'other_losses'"):
        attempt(tmp_path, loss=other_losses)
    attempt(tmp_path)


def test_losses_of_the_noise_context_keep_buffers(tmp_path) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls.add_(1)
            return self.inner(x)

    one = learner(Counts())
    before = one.model.calls.clone()
    assert one.measurer.some_losses() is not None
    assert torch.equal(one.model.calls, before)
    kept, plain = attempt(tmp_path, model=Counts(), every=1), attempt(None, model=Counts())
    assert same_state(kept, plain)
    assert torch.equal(kept.model.calls, plain.model.calls)


def test_two_damaged_checkpoints_are_refused_with_advice(tmp_path) -> None:
    attempt(tmp_path, every=1)
    for name in NAMES:
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="no other checkpoint is there: bring the files back from a copy, or rem"):
        attempt(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_folder_open_to_others_gives_a_warning(tmp_path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o755)
    with pytest.warns(UserWarning, match="others may enter the checkpoint folder .*open: chmod 700"):
        attempt(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o755  # left as it was


@pytest.mark.parametrize("records", [3, 1000, 2**24 + 4, 2**25 + 3])
def test_losses_use_existing_records(records: int) -> None:
    """Above 2²⁴ records a float32 index would round beyond the last."""
    asked: list[torch.Tensor] = []
    measurer = learner().measurer

    def rows(indices):
        asked.append(indices)
        return data(records=len(indices))

    measurer.records = records
    measurer.rows = rows  # type: ignore[method-assign]
    assert measurer.some_losses() is not None
    assert asked[0].min() == 0
    assert records - 3 <= asked[0].max() < records
    assert len(asked[0].unique()) == min(8, records)


def test_a_checkpoint_is_written_from_the_ledger_itself() -> None:
    """A copy of a ledger of many records took as much memory again."""
    one = learner(records=data()).fit(3)
    assert one.accountant is not None
    written = checkpoint.snapshot(one).tensors
    for name, value in one.accountant.tensors().items():
        assert written[f"ledger/{name}"].data_ptr() == value.data_ptr() or name == "fingerprints"
