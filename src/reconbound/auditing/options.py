"""The options of an audit: their defaults for each data set, the learner that they describe, and their file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import torch

from reconbound._internal import files
from reconbound._internal.checks import DataError, InputError, choice, number, whole
from reconbound._internal.rng import new_seed
from reconbound.auditing.models import MODELS, as_tensor, make_loss, make_model, start_afresh
from reconbound.auditing.release import INPUTS, read_inputs
from reconbound.auditing.worlds import worlds_of
from reconbound.data import Dataset
from reconbound.report.folder import (
    ATTACK,
    CHECKPOINTS,
    LEAKAGE,
    LEDGER,
    MODEL,
    PLAN,
    PUBLIC_REPORT,
    REPORT,
    RUN,
    prepare,
    read_audit,
)
from reconbound.training.checkpoint import LOCK, NAMES, data_digest, plain_json
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Settings

#: Rules under which the ledger is kept, by sampler: the first is proved, "paper" is for comparison.
RULES = {"poisson": ("exact", "paper"), "fixed": ("fixed", "paper"), "shuffle": ("none",)}
#: Of plan.json; 2 since it has all settings.
FORMAT = 2
ADVICE = "bring it back from a copy, or start over with --fresh"
#: Differences that an error names.
NAMED = 3


@dataclass(frozen=True)
class AuditOptions:
    """Everything that determines an audit's training, apart from the data.

    Attributes:
        settings: of the learner. Its `rules`, unless None, are replaced by those that the report of this sampler has. A
            seed that others can guess reveals the noise; None takes one from the operating system.
        model: "auto", "linear", "mlp", "cnn", or "package.module:factory", called as factory(shape, outputs).
        steps: the number of steps of one run.
        runs: the number of independent runs; the first is released, the others only measure.
    """

    settings: Settings = field(default_factory=lambda: Settings(0.7, 1.0, 0.05, lr=1.0, budget=1.0))
    model: str = "auto"
    steps: int = 300
    runs: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Settings):
            raise InputError("settings", "must be Settings", f"a {type(self.settings).__name__}")
        if ":" not in self.model:
            choice("model", self.model, (*MODELS, "package.module:factory"))
        whole("steps", self.steps)
        whole("runs", self.runs)
        number("lr", self.settings.lr, above=0.0, at_most=1e30)  # within the range of float32
        number("momentum", self.settings.momentum, at_least=0.0, below=1.0)
        rules = None if self.settings.rules is None else RULES[self.settings.sampler]
        object.__setattr__(self, "settings", replace(self.settings, rules=rules))

    def with_changes(self, **changes: Any) -> AuditOptions:
        """Returns the options with some of them, or of their settings, changed.

        Args:
            changes: fields of AuditOptions and of Settings, by name.

        >>> AuditOptions().with_changes(runs=2, lr=0.5).settings.lr
        0.5
        """
        own = {name: changes.pop(name) for name in ("settings", "model", "steps", "runs") if name in changes}
        unknown = sorted(set(changes) - {f.name for f in fields(Settings)})
        if unknown:
            raise InputError("options", "must be fields of AuditOptions or of Settings", unknown[0])
        if changes:
            own["settings"] = replace(own.get("settings", self.settings), **changes)
        return replace(self, **own)

    def to_dict(self) -> dict[str, Any]:
        """Returns all options that can be chosen by name, those of the settings among them; JSON."""
        options = {"model": self.model, "steps": self.steps, "runs": self.runs, **asdict(self.settings)}
        del options["rules"]
        return dict(plain_json(options))


#: Defaults of the known sets, and the number of training records that they are for. MNIST takes minutes, and needs
#: --runs 10 --budget 3 for limits. CIFAR-10: one training each, accuracy on 2,000 test images after 200 steps:
#: pixels from −1 to 1 and lr 1.0: 38.1 %; pixels from 0 to 1: 34.4 % at lr 1.0 (40.4 % after 400 steps of another run),
#: 36.6 % at 2.0, 27.7 % at 0.5, and nothing learned (12 % after 50) at 3.0.
KNOWN: dict[str, Any] = json.loads((package_files("reconbound.auditing") / "defaults.json").read_text(encoding="utf-8"))
#: Measurements of each record in each world and run, for limits from five runs.
LOOKS = 5
#: Records that are measured in a run, each time counted, for the sake of such limits.
MOST_MEASURED = 5_000_000
#: Epochs of a smaller part of a known set.
_EPOCHS = 15


def default_options(dataset: Dataset, *, worlds: bool = True, **changes: Any) -> AuditOptions:
    """Returns the defaults for a data set, with some options changed. For an unknown set they depend on its size.

    For a part of a known set (--limit) below nine tenths of it: batches of the same size, at most a quarter of the
    records or 32, for as many steps, at most 15 epochs or 50 steps. The ratio of noise to batch then stays the same.

    For an unknown set of N records: batches of 5 % of them, at least 32 and at most 512, for 15 epochs and at most 800
    steps. Five runs and 25 measurements of each record, which is enough for confidence limits; of tables and
    tokens in every other world too, unless that is too much work.

    Args:
        dataset: the data of the audit.
        worlds: whether divergences to replaced worlds are measured, which need a larger budget.
        changes: options to change, as in AuditOptions.with_changes.
    """
    own, records = dict(KNOWN.get(dataset.name, {})), len(dataset.inputs)
    whole_set = own.pop("records", 0)
    if records < 0.9 * whole_set:
        batch = min(own["sample_rate"] * whole_set, max(32, records / 4), records)
        rate = batch / records
        steps = max(min(50, own["steps"]), min(own["steps"], round(_EPOCHS / rate)))
        own |= {"sample_rate": rate, "steps": steps}
    if not own:
        batch = min(records, max(32, min(512, round(0.05 * records))))
        own = {"sample_rate": batch / records, "steps": min(800, max(50, round(15 * records / batch)))}
        own["lr"] = 1.0 if dataset.task == "classes" else 0.3
        own["budget"] = max(1.0, 6 / (own["steps"] * own["sample_rate"]))  # for the largest sets: six blocks per run
    if worlds and dataset.kind != "image":
        # each record is measured 25 times in every world over five runs; less often where the data are many
        epochs, measured = own["steps"] * own["sample_rate"], (1 + len(worlds_of(dataset))) * LOOKS
        own["budget"] = max(own.get("budget", 1.0), min(measured, MOST_MEASURED / records) / float(epochs))
    return AuditOptions().with_changes(**{**own, **changes})


def without_derivative(options: AuditOptions, caveats: Mapping[str, str]) -> AuditOptions:
    """Returns the options of an audit that keeps only divergences where the model has no derivative.

    Args:
        options: the options of the audit.
        caveats: of `check_model`.
    """
    return options.with_changes(rules=None) if "derivative" in caveats else options


def make_learner(
    dataset: Dataset,
    options: AuditOptions,
    folder: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | None = None,
    **more: Any,
) -> PrivateSGD:
    """Creates a private learner of the data set; `repeat(options.runs, options.steps)` trains and accounts.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
        folder: for checkpoints; None for none.
        device: when None, a GPU where there is one.
        more: arguments of PrivateSGD (evaluate, diagonal, every, …).
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = make_model(dataset, options.model, seed=0).to(place)  # repeat starts each run from its own parameters
    settings = options.settings
    if len(dataset.scale) == 0:  # no private numbers: nothing to take a derivative by
        settings = replace(settings, rules=None)
    chosen: dict[str, Any] = {
        "initialise": partial(start_afresh, dataset, options.model),
        "worlds": {name: one.world for name, one in worlds_of(dataset).items()},
        "checkpoint": None if folder is None else Path(folder),
        "every": max(1, options.steps // (30 if len(dataset.inputs) <= MANY else 3)),
        **more,
    }
    if settings.rules is not None:
        scale = dataset.scale
        chosen["private"] = None if dataset.private is None else as_tensor(dataset.private)
        chosen["feature_scale"] = float(scale[0]) if (scale == scale[0]).all() else scale.tolist()
    inputs, targets = as_tensor(dataset.inputs), as_tensor(dataset.targets)
    return PrivateSGD(model, make_loss(dataset), inputs, targets, settings, **chosen)


#: Records above which a report is about some of them, and a checkpoint, which holds the ledger, is written less often.
MANY = 2**20
#: Files of a finished audit.
FILES = (RUN, LEAKAGE, REPORT, PUBLIC_REPORT, MODEL, INPUTS)


def open_folder(out: str | os.PathLike[str]) -> Path:
    """Opens the audit's folder, created if missing. Refuses a folder with other content, because its mode would change.

    The lock, and what a killed audit left of a file that it was writing, are no other content.
    """
    path = Path(out)
    try:
        others = path.exists() and not (path / PLAN).exists() and {p.name for p in path.iterdir()} - {LOCK}
    except OSError as reason:
        raise InputError("out", f"must be a folder that can be read ({reason.strerror})", str(path)) from None
    if others and not all(map(files.is_leftover, others)):
        raise InputError("out", "must be a new or empty folder, or that of an audit", str(path))
    files.refuse_special_files(path, CHECKPOINTS)
    folder = prepare(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("out", "must be a folder that can be written", str(path))
    return folder


def remove(folder: Path) -> None:
    """Removes an audit's files from its folder, and nothing else.

    The plan goes last, so that removal can be repeated.
    """
    inside = folder / CHECKPOINTS
    kept = [*(inside / name for name in (*NAMES, LOCK)), *inside.glob("parameters-*.safetensors")]
    for path in [*kept, *(folder / name for name in (*FILES, ATTACK, LEDGER, PLAN))]:
        path.unlink(missing_ok=True)


def settle(folder: Path, dataset: Dataset, options: AuditOptions) -> AuditOptions:
    """Returns the options with a seed: that of the folder, if its options and data are the same, otherwise a new one.

    More runs than before are added to those that are there. Any other difference is refused.

    Args:
        folder: the audit's folder.
        dataset: the data of the audit.
        options: the options that are asked for.
    """
    before, seed = refuse_other(folder, dataset, options), options.settings.seed
    if before is not None:
        seed = int(before["seed"])
    elif seed is None:
        seed = new_seed()
    if before is None or before["options"] != options.to_dict():
        content = {"format": FORMAT, "confidential": "the seed is as secret as the data", "seed": seed}
        content |= {"options": options.to_dict(), "data": about(dataset)}
        files.write_whole(folder / PLAN, files.sealed_json(content), mode=files.CONFIDENTIAL)
    return options.with_changes(seed=seed)


def refuse_other(folder: str | os.PathLike[str], dataset: Dataset, options: AuditOptions) -> dict[str, Any] | None:
    """Returns the content of the folder's plan file, None if there is none. Refuses that of another audit.

    A plan of which nothing was done yet (its model was refused, for example) is ignored.

    Args:
        folder: the audit's folder.
        dataset: the data of the audit.
        options: the options that are asked for.

    Raises:
        InputError: the plan file is another audit's; names the first differences.
    """
    files.refuse_special_files(folder, CHECKPOINTS)
    path = Path(folder) / PLAN
    done = [Path(folder) / CHECKPOINTS / name for name in NAMES] + [Path(folder) / RUN]
    if not path.exists() or not any(p.exists() for p in done):
        return None
    before, data = _read(path), about(dataset)
    if before["data"]["name"] != dataset.name:
        raise DataError(f"{folder} holds an audit of {before['data']['name']}; choose another --out")
    differences = [*_differences(before["options"], options.to_dict()), *_differences(before["data"], data)]
    if differences:
        more = [f"and {len(differences) - NAMED} more"] if len(differences) > NAMED else []
        what = "must be another folder, or --fresh be given to start over: its audit was begun with other options"
        raise InputError("out", f"{what} ({'; '.join(differences[:NAMED] + more)})", str(folder))
    return before


def finished(
    folder: str | os.PathLike[str], dataset: Dataset, options: AuditOptions, *, publish_accuracy: bool = False
) -> bool:
    """Returns whether the folder holds exactly this audit, with all its runs and files.

    An audit is not finished if its accuracy is published and should not be, or the other way round.

    Args:
        folder: the audit's folder.
        dataset: the data of the audit.
        options: the options that are asked for.
        publish_accuracy: whether the accuracy is to be published.

    Raises:
        InputError: the folder holds another audit.
    """
    place = Path(folder)
    before = refuse_other(place, dataset, options)
    same = before is not None and before["options"] == options.to_dict()
    if not same or not all((place / name).exists() for name in FILES):
        return False
    try:
        run, _ = read_audit(place)
        read_inputs(place)
    except files.Unreadable:  # damaged files are made again from the checkpoint
        return False
    return run.mechanism.get("runs") == options.runs and (run.accuracy is not None) == publish_accuracy


def about(dataset: Dataset) -> dict[str, Any]:
    """Returns a few facts that distinguish one data set from another."""
    target = dataset.target
    found: dict[str, Any] = {"name": dataset.name, "records": len(dataset.inputs), "shape": dataset.shape}
    found |= {"task": dataset.task, "target": None if target is None else target.name}
    if dataset.kind == "table":
        found["private"] = list(dataset.columns[0])
        found["ranges"] = {f.name: [f.low, f.high] for f in dataset.private_features}
        found["units"] = {f.name: f.unit for f in dataset.private_features}
    if dataset.kind == "tokens":
        found["vocabulary"] = dataset.vocabulary
    found["digest"] = data_digest(
        [as_tensor(dataset.inputs), as_tensor(dataset.test_inputs)],
        [as_tensor(dataset.targets), as_tensor(dataset.test_targets)],
    )
    return dict(plain_json(found))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    differences = []
    for name in [*now, *(n for n in before if n not in now)]:
        was, is_ = before.get(name), now.get(name)
        if was == is_ or (name == "runs" and isinstance(was, int) and isinstance(is_, int) and is_ > was):
            continue
        if isinstance(was, dict) and isinstance(is_, dict):
            differences += [f"{name} of {part}" for part in _differences(was, is_)]
        elif name == "seed":
            differences.append("seed differs")  # its value is not shown: it is as secret as the data
        elif name != "digest":
            differences.append(f"{name} was {_format_option(was)} and is {_format_option(is_)}")
        elif not differences:  # ranges and similar options change the inputs too
            differences.append("the data have changed")
    return differences


def _format_option(value: Any) -> str:
    """Formats the value of an option, shortened where it is long."""
    text = "not given" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_options(folder: str | os.PathLike[str]) -> tuple[AuditOptions, str]:
    """Returns the options of the audit in a folder, without its seed, and the name of its data.

    Args:
        folder: the audit's.

    Raises:
        Unreadable: there is no plan, or it is damaged; gives the reason.
    """
    files.refuse_special_files(folder, CHECKPOINTS)
    content = _read(Path(folder) / PLAN)
    try:
        return AuditOptions().with_changes(**content["options"] | {"seed": None}), content["data"]["name"]
    except (InputError, TypeError) as reason:
        raise files.Unreadable(f"{Path(folder) / PLAN} has options that cannot be ({reason}): {ADVICE}") from None


def refuse_other_data(folder: str | os.PathLike[str], dataset: Dataset) -> None:
    """Refuses data that are not those of the audit in a folder.

    Args:
        folder: the audit's.
        dataset: the data.

    Raises:
        InputError: names the first differences.
    """
    before = _read(Path(folder) / PLAN)["data"]
    differences = _differences(before, about(dataset))
    if differences:
        more = [f"and {len(differences) - NAMED} more"] if len(differences) > NAMED else []
        what = f"must be those of the audit, read with the same options ({'; '.join(differences[:NAMED] + more)})"
        raise InputError("data", what, dataset.name)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = files.unsealed_json(path)
    except (OSError, files.Unreadable) as reason:
        raise files.Unreadable(f"{reason}: {ADVICE}") from None
    kinds = {"seed": int, "options": dict, "data": dict}
    whole = all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    if content.get("format") != FORMAT or not whole or not isinstance(content["data"].get("name"), str):
        raise files.Unreadable(f"{path} is not a file of reconbound's (another format): {ADVICE}")
    return content
