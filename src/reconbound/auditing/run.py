"""The audit: trains privately on a data set, accounts for every record, and writes the folder that reports need.

All runs are trained from fresh parameters. The FIRST is the release: its parameters are in
model.safetensors, and its accuracy is the one reported. The others only measure and are never released. With them,
leakage is an average over the randomness of training, and has confidence limits.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from reconbound import __version__
from reconbound._internal.checks import InputError, file_path, flag
from reconbound._internal.files import file_digest, remove_leftovers
from reconbound._internal.rng import random_states_kept
from reconbound.auditing import leakage as leaks
from reconbound.auditing.models import check_model, describe_model, model_kind
from reconbound.auditing.options import (
    RULES,
    AuditOptions,
    default_options,
    finished,
    make_learner,
    open_folder,
    remove,
    settle,
    without_derivative,
)
from reconbound.auditing.release import write_inputs
from reconbound.auditing.worlds import worlds_of
from reconbound.data import Dataset, load_dataset
from reconbound.mechanisms.guarantee import Guarantee, guarantee
from reconbound.report import folder as files
from reconbound.training.checkpoint import lock_folder
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.ranks import refuse_several
from reconbound.training.sampling import Sampler, make_account, make_sampler

if TYPE_CHECKING:
    from pandas import DataFrame


#: Facts of run.json.
_MECHANISM = ("noise_multiplier", "max_grad_norm", "sample_rate", "steps", "clip", "sampler", "runs")
_TRAINING = ("model", "lr", "momentum", "epochs", "accounting_budget", "probes", "parameters", "seed_from")
#: Decimals of an accuracy that is published: it is that of held-out records, whom no noise protects.
PUBLISHED_DIGITS = 2


@dataclass(frozen=True)
class AuditResult:
    """Says where a finished audit is, and what it found.

    Attributes:
        folder: of the audit; confidential apart from the public report, run.json and model.safetensors.
        report: page for the data's owner.
        public_report: page that can be shown.
        headline: what the mechanism guarantees, in sentences, as on the public page.
    """

    folder: Path
    report: Path
    public_report: Path
    headline: tuple[str, ...]


def audit(
    data: str | os.PathLike[str] | DataFrame | Dataset = "digits",
    *,
    target: str | None = None,
    private: Sequence[str] | str | None = None,
    ranges: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    options: AuditOptions | Mapping[str, Any] | None = None,
    publish_accuracy: bool = False,
    fresh: bool = False,
) -> AuditResult:
    """Trains privately on the data and writes a report on how well each record is protected.

    An audit that was stopped goes on when called again with the same arguments.

    Args:
        data: a path, the name of a built-in data set, a DataFrame, or what `load_dataset` returned.
        target: column to predict.
        private: columns to protect; None for every column of numbers.
        ranges: {column: (lowest, highest)}, known without the data.
        out: folder for the results; "audit-NAME" in the current folder when None.
        options: the whole options of the training, or a mapping of those that differ from the data set's defaults, such
            as {"noise_multiplier": 1.0, "runs": 5}.
        publish_accuracy: puts the accuracy on the test data on the public page; refused where the target is a number.
        fresh: forgets what the folder holds.

    Returns:
        The folder, its reports and the headline.

    Raises:
        InputError: names the argument that cannot be used, and why.
    """
    for name, given in (("publish_accuracy", publish_accuracy), ("fresh", fresh)):
        flag(name, given)
    if options is not None and not isinstance(options, AuditOptions | Mapping):
        raise InputError("options", "must be AuditOptions, or a dictionary of those that differ", f"{options!r}"[:200])
    if isinstance(data, Dataset):
        for name, value in (("target", target), ("private", private), ("ranges", ranges)):
            if value is not None:
                raise InputError(name, "is for data that are still to be read: give it to load_dataset", value)
        dataset = data
    else:
        dataset = load_dataset(data, target=target, private=private, ranges=ranges)
    chosen = options if isinstance(options, AuditOptions) else default_options(dataset, **(options or {}))
    folder = Path(file_path("out", out)) if out is not None else Path(f"audit-{folder_name(dataset.name)}")
    if fresh or not finished(folder, dataset, chosen, publish_accuracy=publish_accuracy):
        folder = run_audit(dataset, chosen, folder, publish_accuracy=publish_accuracy, fresh=fresh)
    from reconbound.report.headline import public_headline

    headline = tuple(
        public_headline(files.read_audit(folder)[0])
    )  # not as run.json has it: somebody may have changed it
    return AuditResult(folder, folder / files.REPORT, folder / files.PUBLIC_REPORT, headline)


def folder_name(name: str) -> str:
    """Returns the name of data as part of a folder's name.

    >>> folder_name("our people.csv")
    'our-people'
    """
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in name.split(".")[0])
    return kept.strip("-")[:60] or "data"


@random_states_kept()
def run_audit(
    dataset: Dataset,
    options: AuditOptions,
    out: str | os.PathLike[str],
    *,
    show: bool = True,
    publish_accuracy: bool = False,
    fresh: bool = False,
) -> Path:
    """Trains, accounts, and writes the run folder and its two reports. Continues where it was stopped.

    Args:
        dataset: the data to train on.
        options: the options of the audit.
        out: a new or empty folder, or that of an audit with the same options and data (more runs are added to it).
        show: whether to show a progress bar with the remaining time, on a terminal.
        publish_accuracy: put the accuracy on the test data into the public facts, rounded to whole percent. No noise
            covers the test data. Refused where the target is a number: R² is a function of the held-out numbers, and
            whoever knows all but one of them could solve for that one.
        fresh: whether to forget what the folder holds.

    Returns:
        The folder.

    Guarantee: as FisherAccountant's, for the release of the first run's noisy steps. The records kept whole are chosen
    by the estimate itself, so the largest is more often too large than too small.
    """
    refuse_several("audit")
    if publish_accuracy:
        check_publishable(dataset)
    caveats = check_model(dataset, options.model)
    options = without_derivative(options, caveats)
    folder = open_folder(out)
    with lock_folder(folder):
        remove_leftovers(folder, folder / files.CHECKPOINTS)
        if fresh:
            remove(folder)
        settled = settle(folder, dataset, options)
        measurements = train(dataset, settled, folder, show=show)
        write_inputs(folder, dataset, model_kind(dataset, options.model))
        leakage = leaks.leakage_of(dataset, settled, measurements)
        if "shown_of" in leakage.facts and measurements.learner.accountant is not None:
            measurements.learner.accountant.save(folder / files.LEDGER)
        for name in (files.RUN, files.REPORT, files.PUBLIC_REPORT):  # of fewer runs: from here on it is unfinished
            (folder / name).unlink(missing_ok=True)
        seed = "the operating system" if options.settings.seed is None else files.CHOSEN_SEED
        run = facts_of(dataset, settled, measurements.learner, seed_from=seed, publish_accuracy=publish_accuracy)
        from reconbound.report import build
        from reconbound.report.headline import public_headline

        run = replace(run, headline=public_headline(run), caveats=caveats)
        # in the leakage file, because run.json knows no record
        belongs = {"run": files.run_digest(run), "model": file_digest(folder / files.MODEL)}
        files.write_leakage(folder, replace(leakage, facts={**leakage.facts, **belongs}))
        files.write_run(folder, run)
        build(folder)
    return folder


def check_publishable(dataset: Dataset) -> None:
    """Refuses to publish the accuracy of a model that predicts a number."""
    if dataset.task == "number":
        why = "must be left out where the target is a number: R² tells the held-out values, which no noise protects"
        raise InputError("publish_accuracy", why, None)


def train(dataset: Dataset, options: AuditOptions, folder: Path, *, show: bool = False) -> leaks.SnapshotMeasurements:
    """Trains all runs, from the folder's last good state on.

    Args:
        dataset: the data to train on.
        options: the options of the audit.
        folder: the audit's folder.
        show: whether to show a progress bar.

    Returns:
        The learner with its snapshots.
    """
    inside = folder / files.CHECKPOINTS
    inside.mkdir(mode=0o700, exist_ok=True)
    snapshots = leaks.Snapshots(dataset, inside, folder / files.MODEL)
    learner = make_learner(dataset, options, inside, callbacks=[snapshots], progress=show)
    learner.repeat(options.runs, options.steps)
    snapshots.on_run_end(learner)  # somebody may have removed or changed the file after the first run
    return leaks.SnapshotMeasurements(learner, snapshots)


def facts_of(
    dataset: Dataset, options: AuditOptions, learner: PrivateSGD, *, seed_from: str, publish_accuracy: bool = False
) -> files.Run:
    """Collects the public facts: what was asked and what the mechanism guarantees whatever the data.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
        learner: after training.
        seed_from: who chose the seed.
        publish_accuracy: whether the accuracy is included.
    """
    last = [h["accuracy"] for h in learner.history if h["run"] == 0 and "accuracy" in h]
    accuracy = round(float(last[-1]), PUBLISHED_DIGITS) if publish_accuracy and last else None
    facts = {**options.to_dict(), "sample_rate": learner.sampler.sample_rate, "seed_from": seed_from}
    facts["model"] = describe_model(dataset, options.model)
    facts["epochs"] = round(options.steps / learner.sampler.steps_per_epoch, 2)
    facts["accounting_budget"] = options.settings.budget
    facts["parameters"] = sum(p.numel() for p in learner.params.values())
    return files.Run(
        data=data_facts(dataset),
        mechanism={name: facts[name] for name in _MECHANISM},
        training={name: facts[name] for name in _TRAINING},
        guarantee=floors_of(dataset, options).to_dict(),
        accuracy=accuracy,
        software={"reconbound": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """Describes the data.

    For a table only names and declared ranges: categories and ranges read off the data are left out. For tokens only
    their number: the vocabulary may be read off the data.
    """
    found: dict[str, Any] = {
        "name": dataset.name,
        "kind": dataset.kind,
        "records": len(dataset.inputs),
        "features": len(dataset.scale),
        "task": dataset.task,
        "inferred_ranges": dataset.inferred_ranges,
    }
    if dataset.kind == "image":
        pixel = dataset.features[0]
        return {**found, "shape": list(dataset.shape), "unit": pixel.unit, "range": [pixel.low, pixel.high]}
    if dataset.kind == "tokens":
        return {**found, "shape": list(dataset.shape), "private": ["tokens"], "public": []}
    private = dataset.private_features
    found["private"] = list(dataset.columns[0])  # of numbers and of categories, by their columns
    found["categories"] = [name for name in found["private"] if name not in {f.name for f in private}]
    found["public"] = list(dict.fromkeys(name.partition(" = ")[0] for name in dataset.columns[1]))  # no categories
    found["ranges"] = {f.name: [f.low, f.high] for f in private if f.declared}
    found["units"] = {f.name: f.unit for f in private if f.unit}
    return found


def sampler_of(dataset: Dataset, options: AuditOptions) -> Sampler:
    """Returns the sampler of the options. For batches of a fixed size its own rate is that of whole batches.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
    """
    return make_sampler(options.settings.sampler, len(dataset.inputs), options.settings.sample_rate)


def floors_of(dataset: Dataset, options: AuditOptions) -> Guarantee:
    """Computes what the mechanism guarantees whatever the data, per feature in units of its range.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
    """
    sampler = sampler_of(dataset, options)
    account = make_account(options.settings, sampler, max(1, len(dataset.scale)), options.steps)
    return guarantee(account.mechanism(), dim=account.features, low=0.0, high=1.0)


def expected_seconds(dataset: Dataset, options: AuditOptions) -> float:
    """Estimates the duration of the audit, to a factor of two, from a few timed steps with and without measuring.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
    """
    informed = options.settings.rules is not None and len(dataset.scale) > 0
    ways: dict[str, Any] = {"plain": (None, {"worlds": {}}), "apart": (None, {})}  # rules of the ledger, and worlds
    if informed:
        ways["measuring"] = RULES[options.settings.sampler], {"worlds": {}}
    stamps: list[float] = []
    seconds = {"measuring": 0.0}

    def stamp(model: Any) -> dict[str, float]:
        stamps.append(time.perf_counter())
        return {}

    for name, (rules, more) in ways.items():
        stamps.clear()
        tried = options.with_changes(budget="every", rules=rules)
        make_learner(dataset, tried, check=False, progress=False, evaluate=stamp, evaluate_every=1, **more).fit(3)
        seconds[name] = median(b - a for a, b in pairwise(stamps))
    plain, measuring, apart = seconds["plain"], seconds["measuring"], seconds["apart"]
    per_run = options.steps * plain
    budget, worlds = options.settings.budget, len(worlds_of(dataset))
    if isinstance(budget, float):
        for each, share in ((measuring, budget), (apart, budget / (1 + worlds))):
            blocks = max(1, min(options.steps, math.floor(options.steps * options.settings.sample_rate * share + 1e-9)))
            per_run += blocks / options.settings.sample_rate * each
    else:
        share = 1.0 if budget == "every" else float(budget[1])
        per_run += share * options.steps * (max(measuring - plain, 0.0) + max(apart - plain, 0.0))
    if not informed:
        return options.runs * per_run
    records = len(dataset.inputs)
    times, probes = leaks.snapshot_counts(options, records, records * len(dataset.scale))
    all_of = times * records * (3 + probes) / 4 if times else leaks.SNAPSHOTS * min(leaks.SAMPLE, records)
    all_of += leaks.SNAPSHOTS * (leaks.MOST + leaks.LEAST) * leaks.PROBES / 4  # those that are measured closely
    closer = all_of / (options.settings.sample_rate * records)
    return options.runs * (per_run + closer * measuring)
