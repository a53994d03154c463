"""The state of a learner as tensors and plain facts, and back: the content of a checkpoint, and what it belongs to.

Optimizers and schedules keep numbers, tensors, and lists and dictionaries of them: `pack` takes the tensors out and
leaves JSON, `unpack` puts them back. Nothing is ever pickled. A value that JSON cannot hold is an error for an
optimizer (its state would be lost). For a schedule it is left as it was created (functions, counters: they are
configuration).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconbound._internal.checks import InputError
from reconbound._internal.fingerprints import digest
from reconbound._internal.rng import seeded
from reconbound.accounting.accountant import joined
from reconbound.fisher import Private
from reconbound.training.checkpoint import Checkpoint, CheckpointError, plain_json
from reconbound.training.step import record_count
from reconbound.validate.private import Problem

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD

_LEFT_OUT = object()
#: Of checkpoints; 2 since noise is bound to the release.
FORMAT = 2
#: What decides only how a run is measured. Apart from it, all that distinguishes a run decides its noise and batches.
_MEASURING = ("rules", "budget", "probes", "private", "diagonal", "spectral", "feature_scale")


def pack(value: Any, tensors: dict[str, Tensor], name: str, *, strict: bool = True) -> Any:
    """Returns the value as JSON, its tensors put into `tensors` under names that begin with `name`.

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


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
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


def identity(learner: PrivateSGD) -> dict[str, Any]:
    """Returns the facts that a checkpoint must match: settings, model, optimizer and schedule as created, data."""
    asked = {**asdict(learner.settings), "steps": learner.steps, "kind": learner.kind}
    asked.pop("seed")
    asked["private"] = _told(learner.private)
    asked["diagonal"], asked["spectral"] = _told(learner.diagonal), bool(learner.spectral)
    asked["feature_scale"] = _told(learner.feature_scale)
    model = {
        "parameters": {n: [list(p.shape), str(p.dtype), p.requires_grad] for n, p in learner.model.named_parameters()},
        "modules": {n: type(m).__name__ for n, m in learner.model.named_modules()},
    }
    data = {"records": learner.records, "digest": data_digest(learner.inputs, learner.targets)}
    found: dict[str, Any] = {"format": FORMAT, "configuration": asked, "model": model, "data": data}
    found |= {"optimizer": made(learner), "schedule": scheduled(learner)}
    plain: dict[str, Any] = plain_json(found)
    return plain


def release_context(learner: PrivateSGD, belongs: dict[str, Any]) -> bytes:
    """Returns a digest of everything that distinguishes the release of the run that begins: 32 bytes.

    It covers data, settings, length, model (structure, device, present parameters and buffers), optimizer and schedule,
    and the loss as far as the losses of some records show it. The way the run is measured is left out, unless batches
    are measured in the pass that computes their sum, because that pass rounds differently.

    Args:
        learner: at the start of a run.
        belongs: its `identity`.
    """
    configuration = {k: v for k, v in belongs["configuration"].items() if k not in _MEASURING}
    budget = learner.settings.budget
    facts = {
        **belongs,
        "configuration": configuration,
        "in the pass": None if learner.settings.rules is None or isinstance(budget, float) else budget,
        "device": learner.device.type,
        "start": model_facts(learner.model),
        "losses": some_losses(learner),
    }
    return context_digest(facts)


def model_facts(model: nn.Module) -> list[str]:
    """Returns facts that identify a model as it is now: each module's class and options, and a digest of its state."""
    modules = [f"{type(m).__module__}.{type(m).__qualname__} {m.extra_repr()}" for m in model.modules()]
    return [*modules, digest({k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)})]


def context_digest(facts: dict[str, Any]) -> bytes:
    """Returns the digest of plain facts, 32 bytes; numbers enter with all their digits."""
    return hashlib.sha256(json.dumps(plain_json(facts), sort_keys=True).encode()).digest()


def made(learner: PrivateSGD) -> dict[str, Any]:
    """Returns the optimizer as it was created, before any step: its class and the hyper-parameters of each group."""
    found: dict[str, Any] = {"class": type(learner.optimizer).__name__}
    for i, group in enumerate(learner.optimizer.param_groups):
        # a schedule changes lr at once, and keeps the original in initial_lr
        own = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        found |= {f"group {i} {k}": _number(v) for k, v in own.items() if k not in ("params", "initial_lr")}
        found[f"group {i} parameters"] = len(group["params"])
    return found


def scheduled(learner: PrivateSGD) -> dict[str, Any]:
    """Returns the schedule as it was created: its class, its hyper-parameters, and a digest of its effect over the run.

    Functions (of LambdaLR) cannot be read, so a fresh schedule is stepped through the run and everything that it sets
    is compared; in runs of more than 100,000 steps, through the first 100,000.
    """
    if learner.make_schedule is None:
        return {"class": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the optimizer has not been stepped
        optimizer = learner.make_optimizer(list(learner.params.values()))
        schedule = learner.make_schedule(optimizer)
        state = pack(schedule.state_dict(), {}, "schedule", strict=False)
        told = {str(k): v for k, v in state["dict"] if not str(k).startswith("_") and k != "last_epoch"}
        sha = hashlib.sha256()
        for _ in range(min(learner.steps, 100_000)):
            rates = [[repr(v) for k, v in g.items() if k != "params"] for g in optimizer.param_groups]
            sha.update(repr(rates).encode())
            schedule.step()
    return {"class": type(schedule).__name__, **told, "what it sets over the run": sha.hexdigest()[:16]}


def data_digest(inputs: Any, targets: Any) -> str:
    leaves = tree_leaves((inputs, targets))
    return digest({f"{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})


def snapshot(learner: PrivateSGD, belongs: dict[str, Any]) -> Checkpoint:
    """Returns the learner's state at the end of its last step.

    Args:
        learner: at the end of a step.
        belongs: its `identity`.
    """
    tensors = {f"model/{name}": value for name, value in learner.model.state_dict().items()}
    optimizer = learner.optimizer.state_dict()
    facts: dict[str, Any] = {
        **belongs,
        "losses": some_losses(learner),
        "seed": learner.seed,
        "run": learner.run,
        "run_seed": learner.run_seed,
        "step": learner.step,
        "order": learner.order,
        "history": learner.history,
        "state": pack(optimizer["state"], tensors, "optimizer"),
        "groups": pack(optimizer["param_groups"], tensors, "groups"),
    }
    if learner.schedule is not None:
        facts["schedule_state"] = pack(learner.schedule.state_dict(), tensors, "schedule", strict=False)
    tensors |= {f"released/{name}": value for name, value in learner.first_parameters.items()}
    if learner.accountant is not None:
        facts["runs"], facts["caveats"] = learner.accountant.runs, list(learner.accountant.caveats)
        tensors |= {f"ledger/{name}": value for name, value in learner.accountant.state().items()}
    return Checkpoint(tensors, facts)


def reinstate(learner: PrivateSGD, saved: Checkpoint) -> None:
    """Puts a learner into the state of a checkpoint that belongs to it.

    Args:
        learner: changed in place.
        saved: its checkpoint.
    """
    tensors, facts = dict(saved.tensors), saved.facts
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    learner.model.load_state_dict(_under("model/", tensors))
    try:
        _check_losses(learner, facts.get("losses"))
    except CheckpointError:
        learner.model.load_state_dict(before)
        raise
    learner.first_parameters = _under("released/", tensors)
    learner.restart()
    learner.optimizer.load_state_dict(
        {"state": unpack(facts["state"], tensors), "param_groups": unpack(facts["groups"], tensors)}
    )
    if learner.schedule is not None:
        learner.schedule.load_state_dict(unpack(facts["schedule_state"], tensors))
    if learner.accountant is not None:
        learner.accountant.restore(_under("ledger/", tensors), facts["runs"])
        learner.accountant.caveats = joined(learner.accountant.caveats, facts.get("caveats", ()))
    learner.seed, learner.run, learner.step = int(facts["seed"]), int(facts["run"]), int(facts["step"])
    learner.run_seed = int(facts["run_seed"])
    learner.history[:] = facts["history"]


def some_losses(learner: PrivateSGD) -> list[float] | None:
    """Returns the losses of eight records at the present parameters, to distinguish loss functions.

    Returns None where they cannot be computed or are not finite. Buffers and random numbers are not changed.
    """
    last = learner.records - 1
    some = torch.linspace(0, last, min(8, learner.records)).long().clamp(max=last)  # above 2²⁴ floats round up too
    return losses_of(learner.model, learner.loss_fn, *learner.measurer.rows(some))


def losses_of(model: nn.Module, loss_fn: Any, inputs: Any, targets: Any) -> list[float] | None:
    """Returns the losses of these records, or None, as in `some_losses`.

    Args:
        model: at its present parameters.
        loss_fn: (outputs, targets) → one loss per record.
        inputs: of these records.
        targets: of these records.
    """
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    problem = Problem(model, loss_fn, Private("nothing"))
    try:
        with torch.no_grad(), seeded(0):
            losses = problem.losses(torch.zeros(record_count(inputs, targets)), inputs, targets, own)
    except Exception:  # errors of the loss or of a record are reported when it is trained on, not here
        return None
    return losses.double().cpu().tolist() if bool(torch.isfinite(losses).all()) else None


def _check_losses(learner: PrivateSGD, before: list[float] | None) -> None:
    """Refuses another loss function: within rounding, eight records must have the same losses as before."""
    now = some_losses(learner)
    if before is None or now is None:
        return
    short = any(p.dtype in (torch.float16, torch.bfloat16) for p in learner.model.parameters())
    was, is_, share = torch.tensor(before), torch.tensor(now), 0.05 if short else 1e-3
    if not torch.allclose(was, is_, rtol=share, atol=share * float(was.abs().max())):
        raise CheckpointError(
            "the checkpoint belongs to another run: the loss differs (its parameters give eight of the records other "
            "losses than before): go on with the loss function and model that it began with, or take another folder"
        )


def reset_parameters(model: nn.Module) -> None:
    """Calls reset_parameters of every module that has a trainable parameter.

    An error names a parameter that none resets.

    Frozen parameters and buffers (of a pretrained part) stay as they are.
    """
    reset: set[int] = set()
    for module in model.modules():
        own = getattr(module, "reset_parameters", None)
        mine = list(module.parameters(recurse=False))
        if not callable(own) or not any(p.requires_grad for p in mine):
            continue
        kept = [(t, t.detach().clone()) for t in (*mine, *module.buffers(recurse=False))]
        own()
        with torch.no_grad():
            for t, before in kept:
                if not t.requires_grad:
                    t.copy_(before)
        reset |= {id(p) for p in mine}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in reset:
            raise InputError("initialise", "must be given: no module resets the parameter", name)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the training and evaluation modes of all modules at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _number(value: Any) -> Any:
    """Returns a number as it is, so that 0 equals 0.0, and anything else as text."""
    return value if type(value) in (bool, int, float) else repr(value)


def _told(value: Any) -> Any:
    """Returns a short plain form of an option that may be a tensor, a Private, a sequence or a word."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        return digest({"": value})
    if hasattr(value, "features") and hasattr(value, "part"):
        return [value.part, value.name, None if value.features is None else digest({"": value.features})]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    plain = value is None or isinstance(value, (str, bool, int, float))
    return value if plain else [v if isinstance(v, str) else float(v) for v in value]
