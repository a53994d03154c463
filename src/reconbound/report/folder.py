"""The folder of an audit: public facts, and confidential leakage beside them.

    run.json               public facts: mechanism, data-independent floors. Nothing that depends on a record
    leakage.safetensors    per-record leakage, sealed and confidential (mode 0600)
    ledger.safetensors     the ledger of all records, where the leakage file is about some of very many (confidential)
    plan.json              what was asked, and the seed (confidential)
    checkpoints/           of the training (confidential)
    model.safetensors      the released parameters: those of the first run
    attack.safetensors     what `reconbound attack` found (confidential), where it was run
    inputs.json            how a record enters the model (confidential)
    report.html            the page for the data's owner (confidential)
    report-public.html     the page that may be shown

The folder itself is for its owner only (mode 0700).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal import files
from reconbound._internal.checks import InputError, number, numbers, warn_user, whole
from reconbound._internal.large_files import write_sealed
from reconbound.mechanisms.guarantee import guarantee
from reconbound.report.checks import REMOVED, check_leakage
from reconbound.report.formats import pixel_scale

if TYPE_CHECKING:
    from reconbound.accounting.spec import Account

#: The guarantee of an audit, computed once for its pages, its comparison and its table.
_guarantee = lru_cache(maxsize=16)(guarantee)

FORMAT = 1
RUN, LEAKAGE, CHECKPOINTS = "run.json", "leakage.safetensors", "checkpoints"
REPORT, PUBLIC_REPORT = "report.html", "report-public.html"
PLAN, MODEL, ATTACK = "plan.json", "model.safetensors", "attack.safetensors"
#: The ledger of every record, in the folder of an audit of so many that the leakage file is about some of them.
LEDGER = "ledger.safetensors"
#: Where the seed of a run is from that was not made up by the operating system.
CHOSEN_SEED = "--seed: not for a release"
#: Where the noise of a run is from that Opacus trained.
TORCH_NOISE, SECURE_NOISE = "torch's generator (Opacus, secure_mode=False)", "Opacus's secure generator"


@dataclass(frozen=True)
class Run:
    """Facts of a run that do not depend on any record beyond what was released: all of run.json.

    Attributes:
        data: name, kind ("image" or "table"), records, features (private numbers of a record), shape (of an image),
            private and public (names of columns; of a table), ranges ({column: [low, high]}, only those that were
            declared, never those read off the data), inferred_ranges (whether any range was), unit, range (of a pixel).
        mechanism: noise_multiplier, max_grad_norm, sample_rate, steps, clip, sampler, runs (for confidence limits; one
            of them is released).
        training: model (in words), parameters, lr, momentum, seed_from (CHOSEN_SEED, TORCH_NOISE, SECURE_NOISE, or who
            generated it) and everything else that determines the training.
        guarantee: the calculator's answer, `Guarantee.to_dict()`.
        headline: its meaning in sentences, with the conditions that it rests on: those of the public page.
        accuracy: of the released model on test data, only where its owner chose to publish it.
        software: versions.
        caveats: what the floors do not cover of this model: "kinks" (floors of single records are not proved), "model";
            empty where the check found nothing, None in folders from before it was kept.
    """

    data: Mapping[str, Any]
    mechanism: Mapping[str, Any]
    training: Mapping[str, Any]
    guarantee: Mapping[str, Any]
    accuracy: float | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    headline: Sequence[str] = ()
    caveats: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Leakage:
    """The leakage of each record in the runs: confidential. N records, d private features, k records kept whole.

    Everything is in the model's input units; facts["scale"] and facts["offset"] convert to the data's own:

        value = offset + scale · input

    Attributes:
        dfil: (rules, N), Tr I/d.
        error: (rules, N), its standard error.
        upper: (rules, N), its upper confidence limit, or None after a single run.
        measured: (N,), how often each record was measured.
        targets: (N,), the class or number of each record.
        kept: (k,), records kept whole: the most exposed first in order, then the least exposed (the least last).
        kept_inputs: (k, *shape), their inputs.
        kept_diagonal: (k, d), information about each private feature, at the level of dfil (its mean over the features
            is dfil under the first rule).
        average_diagonal: (d,), the same for the average record.
        diagonal: (n, d), the same, less exactly, for all records (n = N) or for those of diagonal_of; NaN where a
            record's value is missing.
        diagonal_of: (n,), records that were drawn at random.
        names: of all records, as UTF-8 separated by newlines (`record_names`); None where they have none.
        nats: (worlds, N), D of each record to the worlds of facts["worlds"], never above the mechanism's cap.
        nats_upper: (worlds, N), its upper confidence limit, infinite where there is none; None after a single run.
        nats_measured: (worlds, N), how often each record was measured in each world.
        history_step: (h,), step counts of the first run.
        history: (h, 3), largest, 99 % quantile and median dFIL after these steps, under the first rule.
        accuracy_step: (a,), step counts of the first run.
        accuracy: (a,), accuracy on test data (R² for a number) after these steps.
        guess: (d,), mean square error of guessing each private feature's average over the records that have one.
        nats: (W, N), the divergence in nats of each record's release to that in each of facts["worlds"].
        nats_upper: (W, N), its upper confidence limit, infinite where there is none; None after a single run.
        nats_measured: (W, N), how often each record was measured in each world.
        facts: rules, class_names, feature_names, units, scale, offset (lists of d, or one number for all), private
            (flat columns of the inputs, or None for all), target_name, confidence, task ("classes" or "number"),
            inferred_ranges (whether any range was read off the data), diagonal_measured and diagonal_probes (how often
            each record of `diagonal` was measured, over all runs, and with how many probes), accuracy_baseline (on the
            test data, of always predicting the most frequent class or the mean), copies (how many records have exact
            copies and the largest group: auditing.priors.copies_of), shown_of (the number of all records, where N of
            them are here: drawn at random, and the most exposed), and everything else that the page needs.
    """

    dfil: Tensor
    error: Tensor
    measured: Tensor
    targets: Tensor
    kept: Tensor
    kept_inputs: Tensor
    history_step: Tensor
    history: Tensor
    accuracy_step: Tensor
    accuracy: Tensor
    guess: Tensor
    upper: Tensor | None = None
    kept_diagonal: Tensor | None = None
    average_diagonal: Tensor | None = None
    diagonal: Tensor | None = None
    diagonal_of: Tensor | None = None
    names: Tensor | None = None
    nats: Tensor | None = None
    nats_upper: Tensor | None = None
    nats_measured: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def packed_names(names: Sequence[str]) -> Tensor:
    """Packs names of records into one tensor of bytes.

    >>> record_names(packed_names(["row 2", "Zoë.png"]))
    ['row 2', 'Zoë.png']
    """
    joined = "\n".join(name.replace("\n", " ") for name in names)
    return torch.from_numpy(np.frombuffer(joined.encode("utf-8", "replace"), dtype=np.uint8).copy())


def record_names(packed: Tensor | None) -> list[str]:
    """Returns the names that `packed_names` packed; empty for None."""
    return [] if packed is None else packed.numpy().tobytes().decode("utf-8", "replace").split("\n")


def prepare(folder: str | os.PathLike[str]) -> Path:
    """Creates the folder if it is missing, for its owner only, and returns it."""
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as reason:
        raise InputError(
            "out", f"must be a folder that can be made and written ({reason.strerror})", str(path)
        ) from reason
    return path


def write_run(folder: str | os.PathLike[str], run: Run) -> None:
    """Writes run.json completely or not at all, with a digest of its content.

    Args:
        folder: the audit's.
        run: the public facts.
    """
    files.write_whole(Path(folder) / RUN, files.sealed_json({"format": FORMAT, **vars(run)}), mode=files.PUBLIC)


def run_digest(run: Run) -> str:
    """Returns the digest by which a leakage file names the run that it belongs to."""
    return files.json_digest({"format": FORMAT, **vars(run)})


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads the facts of run.json. Raises Unreadable, with the reason, where there are none or they were changed."""
    path = Path(folder) / RUN
    try:
        content = files.unsealed_json(path)
        if content.pop("format") != FORMAT:
            raise files.Unreadable(f"{path} is of another version of reconbound")
        run = Run(**content)
        _check_run(run)
        return run
    except FileNotFoundError:
        raise files.Unreadable(unfinished(folder, path)) from None
    except (ValueError, TypeError, KeyError, AttributeError) as reason:
        if isinstance(reason, files.Unreadable):
            raise
        raise files.Unreadable(f"{path} is not a file of reconbound's ({reason})") from None


def _check_run(run: Run) -> None:
    """Raises an InputError that names a field which is not as `write_run` writes it: a digest does not say who did."""
    objects = {name: getattr(run, name) for name in ("data", "mechanism", "training", "guarantee", "software")}
    objects |= {"caveats": run.caveats or {}}
    for name, part in objects.items():
        if not isinstance(part, Mapping):
            raise InputError(name, "must be an object", part)
    whole("mechanism.runs", run.mechanism.get("runs", 1))
    if run.accuracy is not None:
        number("accuracy", run.accuracy)
    for name in ("private", "public"):
        listed = run.data.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(column, str) for column in listed):
            raise InputError(f"data.{name}", "must be names of columns", listed)
    ranges = run.data.get("ranges") or {}
    if not isinstance(ranges, Mapping):
        raise InputError("data.ranges", "must be an object", ranges)
    for name, ends in {**ranges, **({"": run.data["range"]} if run.data.get("range") else {})}.items():
        where = f"data.ranges.{name}" if name else "data.range"
        if numbers(where, ends).shape != (2,):
            raise InputError(where, "must be two numbers", ends)


def read_audit(folder: str | os.PathLike[str]) -> tuple[Run, Leakage]:
    """Reads the facts and the leakage of a finished audit, for a report.

    It checks that the two belong together and to the released model. ε and the floors of the mechanism are computed
    again from the mechanism.

    Args:
        folder: the audit's.
    """
    files.refuse_special_files(folder, CHECKPOINTS)
    run, leakage = read_run(folder), read_leakage(folder)
    named = leakage.facts.get("run")
    if named is not None and named != run_digest(run):
        raise files.Unreadable(f"{Path(folder) / RUN} and {LEAKAGE} are of different audits, or one was changed")
    removed = any(world["kind"] == REMOVED for world in leakage.facts.get("worlds") or ())
    fits = leakage.facts.get("shown_of", len(leakage.measured)) == run.data.get("records")
    if not fits or (removed and run.mechanism.get("sampler") != "poisson"):
        why = "records that are left out need Poisson batches" if fits else "they are of other numbers of records"
        raise files.Unreadable(f"{Path(folder) / RUN} and {LEAKAGE} do not belong together: {why}")
    check_model(folder, leakage.facts.get("model"))
    return recomputed(run, folder), leakage


def check_model(folder: str | os.PathLike[str], digest: str | None) -> None:
    """Refuses a model.safetensors that has another digest. A missing one is accepted.

    Args:
        folder: the audit's.
        digest: of the released model.
    """
    path = Path(folder) / MODEL
    if digest is not None and path.exists() and files.file_digest(path) != digest:
        raise files.Unreadable(
            f"{path} was changed or damaged: it is not the model that was trained here; reconbound audit with the same "
            "data and options restores it from the checkpoint"
        )


def recomputed(run: Run, folder: str | os.PathLike[str]) -> Run:
    """Returns the run with ε and floors computed from its mechanism; a warning says where run.json had another ε.

    Args:
        run: the public facts.
        folder: the audit's, for the warning.
    """
    try:
        account, delta = account_of(run), run.guarantee.get("delta")
        options = {} if delta is None else {"delta": delta}
        found = _guarantee(account.mechanism(), dim=account.features, low=0.0, high=1.0, **options).to_dict()
    except (KeyError, TypeError, ValueError) as reason:
        raise files.Unreadable(f"{Path(folder) / RUN} names no mechanism that can be computed ({reason})") from None
    stored, computed = run.guarantee.get("epsilon"), found.get("epsilon")
    close = isinstance(stored, float) and isinstance(computed, float) and math.isclose(stored, computed, rel_tol=1e-6)
    if stored != computed and not close:
        text = f"{Path(folder) / RUN} says ε = {stored}; its mechanism has ε = {computed}, which is reported"
        warn_user(text, UserWarning)
    return replace(run, guarantee=found)


def account_of(run: Run) -> Account:
    """Returns the account that run.json describes. Raises errors of several kinds where it does not fit."""
    from reconbound.accounting.spec import Account
    from reconbound.training.sampling import batches_per_epoch, make_sampler

    names = ("steps", "noise_multiplier", "max_grad_norm", "sample_rate", "sampler", "clip")
    given = {name: run.mechanism[name] for name in names}
    records, features = run.data["records"], run.data["features"]
    per_epoch = batches_per_epoch(make_sampler(given["sampler"], records, given["sample_rate"]))
    return Account(records=records, features=max(1, features), batches_per_epoch=per_epoch, **given)


def unfinished(folder: str | os.PathLike[str], path: Path) -> str:
    """Explains why a folder has no results: there is no audit in it, or one that was begun and can continue.

    Args:
        folder: the audit's.
        path: the file that is missing.
    """
    if not (Path(folder) / PLAN).exists():
        return f"{path} does not exist: {folder} holds no finished audit"
    try:
        data = str(json.loads((Path(folder) / PLAN).read_text())["data"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        data = "DATA"
    return (
        f"{folder} holds an audit of {data} that was begun and is not finished: run the same command again, reconbound "
        f"audit with the same data and options and --out {folder}, to go on"
    )


def write_leakage(folder: str | os.PathLike[str], leakage: Leakage) -> None:
    """Writes the leakage file, confidential, completely or not at all.

    Args:
        folder: the audit's.
        leakage: the leakage of each record.
    """
    parts = {f.name: getattr(leakage, f.name) for f in fields(leakage) if f.name != "facts"}
    tensors = {name: part for name, part in parts.items() if part is not None}
    write_sealed(Path(folder) / LEAKAGE, tensors, {"format": FORMAT, "kind": "leakage", **leakage.facts})


def read_leakage(folder: str | os.PathLike[str]) -> Leakage:
    """Reads the leakage file. Raises Unreadable, with the reason, if it is missing, damaged or something else."""
    path = Path(folder) / LEAKAGE
    try:
        tensors, facts = files.unsealed(path)
    except FileNotFoundError:
        raise files.Unreadable(unfinished(folder, path)) from None
    if facts.pop("kind", None) != "leakage" or facts.pop("format", None) != FORMAT:
        raise files.Unreadable(f"{path} is no leakage file of this version of reconbound")
    names = {f.name for f in fields(Leakage)} - {"facts"}
    needed = {f.name for f in fields(Leakage) if f.default is MISSING and f.default_factory is MISSING}
    unknown, missing = set(tensors) - names, needed - set(tensors)
    if unknown or missing:
        raise files.Unreadable(f"{path} has other parts than a leakage file: {sorted(unknown | missing)}")
    try:
        check_leakage(tensors, facts)
    except InputError as reason:
        raise files.Unreadable(f"{path} is not a file of reconbound's ({reason})") from None
    return Leakage(**tensors, facts=facts)


def floors(leakage: Leakage, rule: str | None = None) -> Tensor:
    """Returns 1/dFIL of each record, (N,), in the model's input units squared: Theorem 2.

    It is 0 for a record never measured.

    Args:
        leakage: the leakage of each record.
        rule: the subsampling factor; the first rule when None.
    """
    rules = list(leakage.facts["rules"])
    if rule is not None and rule not in rules:
        raise InputError("rule", f"must be one of {', '.join(rules)}", rule)
    dfil = leakage.dfil[0 if rule is None else rules.index(rule)]
    floor = 1 / dfil.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(leakage.measured > 0, floor, torch.zeros_like(floor))


# --- public facts in the units of the page ----------------------------------------------------


def terms(run: Run) -> tuple[str, str, float, str]:
    """Returns the names of a record and of one of its private numbers, and the unit of the public page's errors.

    The unit is an image's range, otherwise shares of a column's range: (noun, part, unit, the unit in words).
    """
    image, ends = run.data.get("kind") == "image", run.data.get("range")
    noun, part = ("image", "pixel") if image else ("record", "column")
    if not image or not ends:
        return noun, part, 1.0, "of the range"
    low, high = float(ends[0]), float(ends[1])
    return noun, part, high - low, pixel_scale(low, high)


def line(run: Run, name: str, unit: float = 1.0) -> float | None:
    """Returns the ± error of one of the calculator's floors, in units of the data's range times `unit`.

    Args:
        run: the public facts.
        name: the name of the floor.
        unit: the factor on the data's range.
    """
    space = run.guarantee.get("data", {})
    width = float(space.get("high", 1.0)) - float(space.get("low", 0.0))
    for bound in run.guarantee.get("bounds", ()):
        if bound["name"] == name and isinstance(bound["rmse"], (int, float)):
            return float(bound["rmse"]) / width * unit
    return None
