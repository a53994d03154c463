"""The options of an audit, stored beside its results: an audit continues only with the options it was begun with."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconbound._internal.checks import DataError, InputError
from reconbound._internal.files import (
    CONFIDENTIAL,
    Unreadable,
    is_leftover,
    refuse_links,
    sealed_json,
    unsealed_json,
    write_whole,
)
from reconbound._internal.rng import new_seed
from reconbound.auditing.options import Plan, as_tensor
from reconbound.auditing.release import INPUTS, read_inputs
from reconbound.report.folder import CHECKPOINTS, LEAKAGE, MODEL, PLAN, PUBLIC_REPORT, REPORT, RUN, prepare, read_audit
from reconbound.training.checkpoint import LOCK, NAMES, plain_json
from reconbound.training.state import data_digest

if TYPE_CHECKING:
    from reconbound.data import Dataset

FORMAT = 1
#: Differences that an error names.
TOLD = 3


def open_folder(out: str | os.PathLike[str], *, fresh: bool = False) -> Path:
    """Opens the audit's folder, created if missing. Refuses a folder with other content, because its mode would change.

    Args:
        out: the folder.
        fresh: whether the audit in it is to be forgotten.
    """
    path = Path(out)
    try:
        foreign = path.exists() and not (path / PLAN).exists() and any(_foreign(p.name) for p in path.iterdir())
    except OSError as reason:
        raise InputError("out", f"must be a folder that can be read ({reason.strerror})", str(path)) from None
    if foreign:
        raise InputError("out", "must be a new or empty folder, or that of an audit", str(path))
    refuse_links(path, CHECKPOINTS)
    folder = prepare(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("out", "must be a folder that can be written", str(path))
    if fresh:
        remove(folder)
    return folder


def _foreign(name: str) -> bool:
    """Returns whether a file is neither the lock nor what a killed audit left of a file that it was writing."""
    return name != LOCK and not is_leftover(name)


def remove(folder: Path) -> None:
    """Removes an audit's files from its folder, and nothing else.

    The plan goes last, so that removal can be repeated.
    """
    names = [RUN, LEAKAGE, REPORT, PUBLIC_REPORT, MODEL, INPUTS]
    inside = folder / CHECKPOINTS
    for path in [*(inside / name for name in NAMES), *inside.glob("parameters-*.safetensors"), inside / LOCK]:
        path.unlink(missing_ok=True)
    for name in (*names, PLAN):
        (folder / name).unlink(missing_ok=True)


def settle(folder: Path, dataset: Dataset, plan: Plan) -> Plan:
    """Returns the plan with its seed: the folder's if it was begun with the same options and data, otherwise a new one.

    More runs than before are added to those that are there. Any other difference is refused.

    Args:
        folder: the audit's folder.
        dataset: the data of the audit.
        plan: the options that are asked for.
    """
    wanted, before = _wanted(dataset, plan), refuse_other(folder, dataset, plan)
    seed = int(before["seed"]) if before is not None else new_seed() if plan.seed is None else plan.seed
    if before is None or before["plan"] != wanted["plan"]:
        content = {"format": FORMAT, "confidential": "the seed is as secret as the data", "seed": seed, **wanted}
        write_whole(folder / PLAN, sealed_json(content), mode=CONFIDENTIAL)
    return replace(plan, seed=seed)


def refuse_other(folder: str | os.PathLike[str], dataset: Dataset, plan: Plan) -> dict[str, Any] | None:
    """Returns the content of the folder's plan file, None if there is none. Refuses that of another audit.

    A plan of which nothing was done yet (its model was refused, for example) is ignored.

    Args:
        folder: the audit's folder.
        dataset: the data of the audit.
        plan: the options that are asked for.

    Raises:
        InputError: the plan file is another audit's; names the first differences.
    """
    path = Path(folder) / PLAN
    done = [Path(folder) / CHECKPOINTS / name for name in NAMES] + [Path(folder) / RUN]
    if not path.exists() or not any(p.exists() for p in done):
        return None
    before, wanted = _read(path), _wanted(dataset, plan)
    if before["data"]["name"] != wanted["data"]["name"]:
        raise DataError(f"{folder} holds an audit of {before['data']['name']}; choose another --out")
    told = [*_differences(before["plan"], wanted["plan"]), *_differences(before["data"], wanted["data"])]
    if told:
        more = f"; and {len(told) - TOLD} more" if len(told) > TOLD else ""
        raise InputError(
            "out",
            "must be another folder, or --fresh be given to start over: its audit was begun with other options "
            f"({'; '.join(told[:TOLD])}{more})",
            str(folder),
        )
    return before


def finished(folder: str | os.PathLike[str], dataset: Dataset, plan: Plan, *, publish_accuracy: bool = False) -> bool:
    """Returns whether the folder holds exactly this audit, with all its runs and files.

    An audit is not finished if its accuracy is published and should not be, or the other way round.

    Args:
        folder: the audit's folder.
        dataset: the data of the audit.
        plan: the options that are asked for.
        publish_accuracy: whether the accuracy is to be published.

    Raises:
        InputError: the folder holds another audit.
    """
    place = Path(folder)
    before = refuse_other(place, dataset, plan)
    if before is None or before["plan"] != _wanted(dataset, plan)["plan"]:
        return False
    if not all((place / name).exists() for name in (RUN, LEAKAGE, REPORT, PUBLIC_REPORT, MODEL, INPUTS)):
        return False
    try:
        run, _ = read_audit(place)
        read_inputs(place)
    except Unreadable:  # damaged files are made again from the checkpoint
        return False
    return run.mechanism.get("runs") == plan.runs and (run.accuracy is not None) == publish_accuracy


def _wanted(dataset: Dataset, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = plain_json({"plan": asdict(plan), "data": about(dataset)})
    return found


def about(dataset: Dataset) -> dict[str, Any]:
    """Returns a few facts that distinguish one data set from another."""
    target = dataset.target
    found: dict[str, Any] = {"name": dataset.name, "records": len(dataset.inputs), "shape": list(dataset.shape)}
    found |= {"task": dataset.task, "target": None if target is None else target.name}
    if dataset.kind == "table":
        found["private"] = [f.name for f in dataset.private_features]
        found["ranges"] = {f.name: [f.low, f.high] for f in dataset.private_features}
        found["units"] = {f.name: f.unit for f in dataset.private_features}
    found["digest"] = data_digest(
        [as_tensor(dataset.inputs), as_tensor(dataset.test_inputs)],
        [as_tensor(dataset.targets), as_tensor(dataset.test_targets)],
    )
    return found


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    told = []
    for name in [*now, *(n for n in before if n not in now)]:
        was, is_ = before.get(name), now.get(name)
        if was == is_ or (name == "runs" and isinstance(was, int) and isinstance(is_, int) and is_ > was):
            continue
        if isinstance(was, dict) and isinstance(is_, dict):
            told += [f"{name} of {part}" for part in _differences(was, is_)]
        elif name == "seed":
            told.append("seed differs")  # its value is not shown: it is as secret as the data
        elif name != "digest":
            told.append(f"{name} was {_said(was)} and is {_said(is_)}")
        elif not told:  # ranges and similar options change the inputs too
            told.append("the data have changed")
    return told


def _said(value: Any) -> str:
    """Formats the value of an option, shortened where it is long."""
    text = "not given" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(path: Path) -> dict[str, Any]:
    try:
        content = unsealed_json(path)
        if content["format"] != FORMAT or not {"seed", "plan", "data"} <= set(content):
            raise ValueError("another format")
        return content
    except (OSError, ValueError, KeyError, TypeError) as reason:
        why = str(reason) if isinstance(reason, Unreadable) else f"{path} is not a file of reconbound's ({reason})"
        raise Unreadable(f"{why}: bring it back from a copy, or start over with --fresh") from None
