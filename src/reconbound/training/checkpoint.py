"""Checkpoints of a training run: written completely or not at all, never a pickle, readable by their owner only.

Two files are written in turn, so that the previous good state remains when a newer one is damaged. A checkpoint names
the training that it belongs to, and carries a digest of all its bytes. One process at a time holds a folder. The lock
is the operating system's, so a process that dies releases it.

The second half of this module describes a training in plain facts (JSON): a checkpoint and the noise belong to them.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconbound._internal import files
from reconbound._internal.checks import warn_user
from reconbound._internal.large_files import SealedFile, write_sealed
from reconbound.fisher.worlds import Replacement
from reconbound.training.rows import DatasetRows

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD

#: Of checkpoints; 5 since they name the values of replaced worlds.
FORMAT = 5
NAMES = ("checkpoint-0.safetensors", "checkpoint-1.safetensors")
LOCK = "lock"
_OTHER_RUN = "give the new run a folder of its own, or go on with what this one began with"
_DAMAGED = "bring the files back from a copy, or remove them to begin anew (with another seed, where one is given)"


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A state of a training: tensors by name, and plain facts.

    The facts contain "order" (larger for a later state), "step", and what the checkpoint belongs to.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Returns the tensors whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


def save(folder: str | os.PathLike[str], checkpoint: Checkpoint, turn: int) -> None:
    """Writes a checkpoint over the older of the two in the folder. If writing fails, both old ones remain.

    Args:
        folder: the folder of checkpoints.
        checkpoint: the state to write.
        turn: the number of this checkpoint; even and odd ones have a file each.
    """
    place = Path(folder)
    try:
        write_sealed(place / NAMES[turn % 2], checkpoint.tensors, checkpoint.facts)
    except OSError as reason:
        raise CheckpointError(
            f"step {checkpoint.facts.get('step')}: no checkpoint could be written into {place} ({reason.strerror}); "
            "the one before is intact"
        ) from reason


def load(folder: str | os.PathLike[str], belongs: Mapping[str, Any]) -> tuple[Checkpoint, int] | None:
    """Loads the newest good checkpoint of a folder.

    A checkpoint that is damaged or belongs to another run is skipped, with a warning that says why, and the other one
    is used.

    Args:
        folder: the folder of checkpoints.
        belongs: facts that must be equal ("configuration", "data", …).

    Returns:
        The checkpoint and the turn it was written in; None if the folder has no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    wanted = plain_json(belongs)
    found: list[tuple[int, int, SealedFile]] = []
    refused: list[Exception] = []
    with ExitStack() as stack:
        for turn, path in enumerate(Path(folder) / name for name in NAMES):
            try:
                file = stack.enter_context(SealedFile(path))
                _check_belongs(path, file.facts, wanted)
                if not isinstance(file.facts.get("order"), int):
                    raise files.Unreadable(f"{path} is no checkpoint of reconbound's")
                found.append((file.facts["order"], turn, file))
            except FileNotFoundError:
                continue
            except (OSError, files.Unreadable, CheckpointError) as reason:
                refused.append(reason)
        why = "; ".join(map(str, refused))
        if not found and not refused:
            return None
        if not found:
            foreign = any(isinstance(reason, CheckpointError) for reason in refused)
            raise CheckpointError(f"{why}; no other checkpoint is there: {_OTHER_RUN if foreign else _DAMAGED}")
        _, turn, newest = max(found, key=lambda item: item[0])
        checkpoint = Checkpoint({name: newest.read(name) for name in newest.names}, newest.facts)
    if refused:
        at = ", ".join(f"{name} {checkpoint.facts[name]}" for name in ("run", "step") if name in checkpoint.facts)
        warn_user(f"{why}: going on from the other one, {at}", UserWarning)
    return checkpoint, turn


def foreign_checkpoint(folder: str | os.PathLike[str], turn: int, reason: Exception) -> CheckpointError:
    """Returns the error for a checkpoint whose digest is right and whose content does not fit the training.

    Args:
        folder: the folder of checkpoints.
        turn: as `load` returned it.
        reason: what does not fit.
    """
    why = f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
    return CheckpointError(f"{Path(folder) / NAMES[turn % 2]} is not as reconbound wrote it ({why}): {_DAMAGED}")


@contextmanager
def lock_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a folder against other processes, and removes what a killed one left there.

    It warns if other users may enter the folder. Its mode is not changed, because it may be shared on purpose; the
    files in it have mode 0600.

    Args:
        folder: the folder; created with mode 0700 if missing.
    """
    place = Path(folder)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.refuse_special_files(place)
        handle = files.open_lock(place / LOCK)
    except OSError as reason:
        raise CheckpointError(f"the checkpoint folder {place} cannot be written ({reason.strerror})") from reason
    if os.name == "posix" and place.stat().st_mode & 0o077:
        warn_user(f"others may enter the checkpoint folder {place}: chmod 700 it", UserWarning)
    try:
        _lock(handle, place)
        for leftover in place.glob(".checkpoint-*.part"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)  # releases the lock; the file stays, because removing it would be a race


def _lock(handle: int, place: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: the user must ensure that one process uses a folder
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another learner"
        raise CheckpointError(
            f"the checkpoint folder {place} is in use by {holder}: give each run a folder of its own, or wait"
        ) from None
    except OSError as reason:  # some network file systems have no locks
        warn_user(f"{place} cannot be locked ({reason.strerror}): mind that only one run uses it")
        return
    with suppress(OSError):  # for people only; a full disk is reported where something would be lost
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _check_belongs(path: Path, facts: Mapping[str, Any], belongs: Mapping[str, Any]) -> None:
    for name, wanted in belongs.items():
        has = facts.get(name)
        if has == wanted:
            continue
        if isinstance(wanted, Mapping) and isinstance(has, Mapping):
            keys = [k for k in {**wanted, **has} if wanted.get(k) != has.get(k)]
            keys = ["class"] if "class" in keys else keys  # another class has other hyper-parameters anyway
            why = ", ".join(f"{k} was {_shown(has.get(k))} and is {_shown(wanted.get(k))}" for k in keys)
        elif name == "format":
            why = "another version of reconbound wrote it: finish the run with that one, or begin anew"
        elif name == "seed":
            why = "neither is shown, for it is as secret as the data"
        else:
            why = f"it was {_shown(has)} and is {_shown(wanted)}"
        raise CheckpointError(f"{path} belongs to another run: the {name} differs ({why})")


def _shown(value: Any) -> str:
    """Formats a value, with digests of data shortened to a few digits.

    A whole digest would confirm a guess of the data.
    """
    return re.sub(r"[0-9a-f]{16,}", lambda digits: digits.group()[:6] + "…", repr(value))


def plain_json(value: Any) -> Any:
    """Returns the value as it would come back from JSON: tuples as lists, for example."""
    return json.loads(json.dumps(value, default=lambda number: number.item()))  # NumPy's numbers


#: Stands for a value that `pack` leaves out.
_LEFT_OUT = object()


def pack(value: Any, tensors: dict[str, Tensor], name: str, *, strict: bool = True) -> Any:
    """Returns the value as JSON, its tensors put into `tensors` under names that begin with `name`.

    Optimizers and schedules keep numbers, tensors, and lists and dictionaries of them. A value that JSON cannot hold is
    an error for an optimizer, whose state would be lost. For a schedule it is left out, as functions are: they are
    configuration.

    Args:
        value: a number, a tensor, or a list or dictionary of them.
        tensors: filled with the tensors, by name.
        name: the prefix of the names.
        strict: whether a value that JSON cannot hold is an error.

    >>> tensors = {}
    >>> packed = pack({"step": 3, "betas": (0.9, 0.99), 0: torch.ones(2)}, tensors, "optimizer")
    >>> sorted(tensors), unpack(packed, tensors)["betas"], unpack(packed, tensors)[0].tolist()
    (['optimizer/0'], (0.9, 0.99), [1.0, 1.0])
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        packed = [pack(v, tensors, f"{name}/{i}", strict=strict) for i, v in enumerate(value)]
        if any(v is _LEFT_OUT for v in packed):
            return _LEFT_OUT
        return {"tuple": packed} if type(value) is tuple else packed
    if isinstance(value, dict) and (strict or type(value) is dict):
        pairs = [[pack(k, tensors, name), pack(v, tensors, f"{name}/{k}", strict=strict)] for k, v in value.items()]
        return {"dict": [pair for pair in pairs if pair[1] is not _LEFT_OUT]}
    if not strict:
        return _LEFT_OUT
    raise CheckpointError(f"{name} is a {type(value).__name__}, which no checkpoint can hold without a pickle")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that was given to `pack`.

    Args:
        packed: the result of `pack`.
        tensors: as `pack` filled it.
    """
    if isinstance(packed, list):
        return [unpack(v, tensors) for v in packed]
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return tensors[packed["tensor"]].clone()
    if "tuple" in packed:
        return tuple(unpack(v, tensors) for v in packed["tuple"])
    return {unpack(k, tensors): unpack(v, tensors) for k, v in packed["dict"]}


def pack_optimizer(optimizer: torch.optim.Optimizer, schedule: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the state of an optimizer and of its schedule (or None) as JSON, its tensors put into `tensors`."""
    state = optimizer.state_dict()
    return {
        "optimizer": pack(state["state"], tensors, "optimizer"),
        "groups": pack(state["param_groups"], tensors, "groups"),
        "schedule": None if schedule is None else pack(schedule.state_dict(), tensors, "schedule", strict=False),
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, schedule: Any, packed: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Puts an optimizer and its schedule into the state that `pack_optimizer` returned."""
    groups = unpack(packed["groups"], tensors)
    optimizer.load_state_dict({"state": unpack(packed["optimizer"], tensors), "param_groups": groups})
    if schedule is not None:
        schedule.load_state_dict(unpack(packed["schedule"], tensors))


def snapshot(learner: PrivateSGD) -> Checkpoint:
    """Returns the state of a learner at the end of the last step, to be saved before the next: nothing is copied."""
    tensors = {f"model/{name}": value for name, value in learner.model.state_dict().items()}
    tensors |= {f"released/{name}": value for name, value in learner.first_parameters.items()}
    facts: dict[str, Any] = {
        **learner.identity,
        **{name: getattr(learner, name) for name in ("seed", "run", "run_seed", "step", "order", "history")},
        "state": pack_optimizer(learner.optimizer, learner.schedule, tensors),
        "shards": len(learner.shards),
    }
    if learner.accountant is not None:
        facts["runs"], facts["caveats"] = learner.accountant.runs, list(learner.accountant.caveats)
        tensors |= {f"ledger/{name}": value.cpu() for name, value in learner.accountant.tensors().items()}
    return Checkpoint(tensors, facts)


def check_state(
    facts: Mapping[str, Any], steps: int, model: nn.Module, saved: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
) -> None:
    """Refuses a state that is not one of this training.

    Args:
        facts: of the checkpoint.
        steps: of a run.
        model: the model of the training.
        saved: the present and the released state of the model in the checkpoint; the latter may be empty in run 0.
    """
    run, step = int(facts["run"]), int(facts["step"])
    if run < 0 or not 0 <= step <= steps or not all({"run", "step"} <= set(h) for h in facts["history"]):
        raise ValueError("its run, step or history cannot be")
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    present, released = ({name: value.shape for name, value in state.items()} for state in saved)
    if shapes != present:
        raise ValueError("its parameters have other names or shapes than the model's")
    if (released or run) and shapes != released:
        raise ValueError("its released parameters have other names or shapes than the model's")


#: What a learner was asked for beside its settings.
_OPTIONS = ("steps", "kind", "spectral", "private", "diagonal", "feature_scale", "whole_at", "worlds")


def identify(learner: PrivateSGD) -> dict[str, Any]:
    """Returns the facts that a checkpoint must match, as JSON.

    Args:
        learner: before its first step. Its loss enters by its name; the seed is left out.
    """
    model, loss = learner.model, learner.loss_fn
    options = {**asdict(learner.settings), **{name: getattr(learner, name) for name in _OPTIONS}}
    facts = {
        "format": FORMAT,
        "configuration": {name: _describe(value) for name, value in options.items() if name != "seed"},
        "model": {
            "parameters": {n: [list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()},
            "modules": {n: type(m).__name__ for n, m in model.named_modules()},
        },
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "data": {"records": learner.records, "digest": data_digest(learner.inputs, learner.targets)},
        "optimizer": _describe_optimizer(learner.optimizer),
        "schedule": {"class": None},
    }
    if learner.schedule is not None:
        # functions (of LambdaLR) are not in its state: two schedules that differ in one only may share batches, but
        # never noise, which is bound to the sum as well
        state = pack(learner.schedule.state_dict(), {}, "schedule", strict=False)["dict"]
        facts["schedule"] = {"class": type(learner.schedule).__name__, **{str(name): value for name, value in state}}
    return dict(plain_json(facts))


def data_digest(inputs: Any, targets: Any) -> str:
    """Returns the SHA-256 of all tensors of a data set."""
    if isinstance(inputs, DatasetRows):
        return inputs.digest
    leaves = tree_leaves((inputs, targets))
    return files.tensor_digest({f"{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})


def model_digest(model: nn.Module) -> str:
    """Returns the SHA-256 of all parameters and buffers of a model."""
    return files.tensor_digest({k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)})


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's class and the hyper-parameters of each group, as it was created."""
    facts: dict[str, Any] = {"class": type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups):
        # a schedule changes lr at once, and keeps the original in initial_lr
        own = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        for name, value in own.items():
            if name not in ("params", "initial_lr"):  # numbers stay numbers, so that 0 equals 0.0
                facts[f"group {i} {name}"] = value if type(value) in (bool, int, float) else repr(value)
        facts[f"group {i} parameters"] = len(group["params"])
    return facts


def _describe(value: Any) -> Any:
    """Returns a short plain form of an option that may be a tensor, a Private, worlds, a sequence or a word."""
    if isinstance(value, Tensor):
        return files.tensor_digest({"": value})
    if hasattr(value, "features") and hasattr(value, "part"):
        return [value.part, value.name, None if value.features is None else files.tensor_digest({"": value.features})]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):  # worlds: the values of a Replacement, the names of functions
        replaced = {name: repr(world) for name, world in value.items() if isinstance(world, Replacement)}
        return {name: getattr(world, "__qualname__", type(world).__name__) for name, world in value.items()} | replaced
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return [v if isinstance(v, str) else float(v) for v in value]
