"""The audit: trains privately on a data set, accounts for every record, and writes the folder that reports need.

All runs of the plan are trained from fresh parameters. The FIRST is the release: its parameters are in
model.safetensors, and its accuracy is the one reported. The others only measure and are never released. With them,
leakage is an average over the randomness of training, and has confidence limits.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from reconbound import __version__
from reconbound._internal.checks import InputError
from reconbound._internal.files import file_digest, is_leftover
from reconbound._internal.progress import progress_bar
from reconbound._internal.rng import random_states_kept
from reconbound.accounting.spec import Account
from reconbound.auditing.leakage import LEAST, MOST, PROBES, SAMPLE, leakage_of, snapshot_counts
from reconbound.auditing.models import check_model, describe_model, model_kind
from reconbound.auditing.options import AuditOptions, make_learner, open_folder, settle
from reconbound.auditing.release import write_inputs
from reconbound.auditing.snapshots import SNAPSHOTS, SnapshotMeasurements, Snapshots
from reconbound.mechanisms.guarantee import Guarantee, guarantee
from reconbound.report.folder import (
    CHECKPOINTS,
    CHOSEN_SEED,
    MODEL,
    PUBLIC_REPORT,
    REPORT,
    RUN,
    Run,
    run_digest,
    write_leakage,
    write_run,
)
from reconbound.training.checkpoint import held
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.sampling import Sampler, batches_per_epoch, make_sampler

if TYPE_CHECKING:
    from reconbound.data import Dataset


#: Decimals of an accuracy that is published: it is that of held-out records, whom no noise protects.
PUBLISHED_DIGITS = 2


@random_states_kept()
def audit(
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
        out: a new or empty folder, or that of an audit with the same plan and data (more runs are added to it).
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
    if publish_accuracy:
        check_publishable(dataset)
    caveats = check_model(dataset, options.model)
    folder = open_folder(out)
    with held(folder):
        for leftover in (*folder.glob(".*.part"), *(folder / CHECKPOINTS).glob(".*.part")):
            if is_leftover(leftover.name):
                leftover.unlink(missing_ok=True)
        if fresh:
            open_folder(folder, fresh=True)
        settled = settle(folder, dataset, options)
        measurements = trained(dataset, settled, folder, show=show)
        write_inputs(folder, dataset, model_kind(dataset, options.model))
        leakage = leakage_of(dataset, settled, measurements)
        for name in (RUN, REPORT, PUBLIC_REPORT):  # of fewer runs; an audit killed from here on is unfinished
            (folder / name).unlink(missing_ok=True)
        seed = "the operating system" if options.settings.seed is None else CHOSEN_SEED
        run = facts_of(dataset, settled, measurements.learner, seed_from=seed, publish_accuracy=publish_accuracy)
        from reconbound.report import build
        from reconbound.report.headline import public_headline

        run = replace(run, headline=public_headline(run), caveats=caveats)
        belongs = {"run": run_digest(run), "model": file_digest(folder / MODEL)}  # here: run.json knows no record
        write_leakage(folder, replace(leakage, facts={**leakage.facts, **belongs}))
        write_run(folder, run)
        build(folder)
    return folder


def check_publishable(dataset: Dataset) -> None:
    """Refuses to publish the accuracy of a model that predicts a number."""
    if dataset.task == "number":
        why = "must be left out where the target is a number: R² tells the held-out values, which no noise protects"
        raise InputError("publish_accuracy", why, None)


def trained(dataset: Dataset, options: AuditOptions, folder: Path, *, show: bool = False) -> SnapshotMeasurements:
    """Trains all runs of the plan, from the folder's last good state on.

    Args:
        dataset: the data to train on.
        options: the options of the audit.
        folder: the audit's folder.
        show: whether to show a progress bar.

    Returns:
        The learner with its snapshots.
    """
    inside = folder / CHECKPOINTS
    inside.mkdir(mode=0o700, exist_ok=True)
    bar: Callable[[int], None] | None = None
    before, stack = 0, ExitStack()

    def advance(done: int) -> None:
        nonlocal bar, before
        if bar is None:  # only now is it known at which step the training continues
            what = f"training, {options.runs} run{'s' if options.runs > 1 else ''}"
            bar, before = stack.enter_context(progress_bar(options.runs * options.steps, done, show, what)), done
        bar(done - before)
        before = done

    with stack:
        snapshots = Snapshots(dataset, inside, folder / MODEL, advance)
        learner = make_learner(dataset, options, inside, callbacks=[snapshots], progress=False)
        learner.repeat(options.runs, options.steps)
    snapshots.release(learner.model)  # somebody may have removed or changed it after the first run
    return SnapshotMeasurements(learner, snapshots)


def facts_of(
    dataset: Dataset, options: AuditOptions, learner: PrivateSGD, *, seed_from: str, publish_accuracy: bool = False
) -> Run:
    """Collects the public facts: what was asked and what the mechanism guarantees whatever the data.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
        learner: after training.
        seed_from: who chose the seed.
        publish_accuracy: whether the accuracy is included.
    """
    last = [h for h in learner.history if h["run"] == 0 and "accuracy" in h]
    accuracy = round(float(last[-1]["accuracy"]), PUBLISHED_DIGITS) if publish_accuracy and last else None
    assert learner.accountant is not None
    return Run(
        data=_data_facts(dataset),
        mechanism={
            "noise_multiplier": options.settings.noise_multiplier,
            "max_grad_norm": options.settings.max_grad_norm,
            "sample_rate": learner.sampler.sample_rate,
            "steps": options.steps,
            "clip": options.settings.clip,
            "sampler": options.settings.sampler,
            "runs": options.runs,
        },
        training={
            "model": describe_model(dataset, options.model),
            "lr": options.settings.lr,
            "momentum": options.settings.momentum,
            "epochs": round(options.steps / learner.sampler.steps_per_epoch, 2),
            "accounting_budget": options.settings.budget,
            "probes": options.settings.probes,
            "parameters": sum(p.numel() for p in learner.params.values()),
            "seed_from": seed_from,
        },
        guarantee=learner.accountant.guarantee(low=0.0, high=1.0).to_dict(),
        accuracy=accuracy,
        software={"reconbound": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _data_facts(dataset: Dataset) -> dict[str, Any]:
    """Describes the data.

    For a table only names and declared ranges: categories and ranges read off the data are left out.
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
    private = dataset.private_features
    found["private"] = [f.name for f in private]
    found["public"] = list(dict.fromkeys(name.partition(" = ")[0] for name in dataset.columns[1]))  # no categories
    found["ranges"] = {f.name: [f.low, f.high] for f in private if f.declared}
    found["units"] = {f.name: f.unit for f in private if f.unit}
    return found


def sampler_of(dataset: Dataset, options: AuditOptions) -> Sampler:
    """Returns the plan's sampler. For batches of a fixed size its own rate is that of whole batches.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
    """
    return make_sampler(options.settings.sampler, len(dataset.inputs), options.settings.sample_rate)


def floors_of(dataset: Dataset, options: AuditOptions) -> Guarantee:
    """Computes what the plan's mechanism guarantees whatever the data, per feature in units of its range.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
    """
    sampler = sampler_of(dataset, options)
    account = Account.of(
        options.settings,
        sample_rate=sampler.sample_rate,
        records=len(dataset.inputs),
        features=len(dataset.scale),
        steps=options.steps,
        batches_per_epoch=batches_per_epoch(sampler),
    )
    return guarantee(account.mechanism(), dim=account.features)


def expected_seconds(dataset: Dataset, options: AuditOptions) -> float:
    """Estimates the duration of the audit, to a factor of two, from a few timed steps with and without measuring.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
    """
    plain, measuring = (_step_seconds(dataset, options, with_it) for with_it in (False, True))
    per_run = options.steps * plain
    budget = options.settings.budget
    if isinstance(budget, float):
        blocks = max(1, min(options.steps, math.floor(options.steps * options.settings.sample_rate * budget + 1e-9)))
        per_run += blocks / options.settings.sample_rate * measuring
    else:
        share = 1.0 if budget == "every" else float(budget[1])
        per_run += share * options.steps * (measuring - plain)
    records = len(dataset.inputs)
    times, probes = snapshot_counts(options, records, records * len(dataset.scale))
    all_of = times * records * (3 + probes) / 4 if times else SNAPSHOTS * min(SAMPLE, records)
    closer = (all_of + SNAPSHOTS * (MOST + LEAST) * PROBES / 4) / (options.settings.sample_rate * records)
    return options.runs * (per_run + closer * measuring)


def _step_seconds(dataset: Dataset, options: AuditOptions, measuring: bool, steps: int = 3) -> float:
    times: list[float] = []

    def stamp(model: Any) -> dict[str, float]:
        times.append(time.perf_counter())
        return {}

    tried = options.with_changes(budget="every")
    learner = make_learner(dataset, tried, check=False, progress=False, evaluate=stamp, evaluate_every=1)
    if not measuring:
        learner.settings = replace(learner.settings, rules=None)
    learner.fit(steps)
    return median(b - a for a, b in pairwise(times))


__all__ = ["audit", "expected_seconds", "floors_of", "trained"]
