"""Attacks around an audit: fresh trainings with its data and options; for some records floors below, attacks above.

What it finds is about single records: it is as confidential as the data, and so is its file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from reconbound import __version__
from reconbound._internal.checks import InputError, choice, whole
from reconbound._internal.formatting import progress_bar
from reconbound._internal.rng import new_seed, numbers_of, random_states_kept
from reconbound.attacks.sandwich import Plan, Stated, Target, attack_records, pieces_of, with_family_confidence
from reconbound.attacks.trainings import Training
from reconbound.auditing.models import as_tensor, check_model, make_loss, make_model, start_afresh
from reconbound.auditing.options import AuditOptions, read_options, refuse_other_data
from reconbound.auditing.worlds import PRIVATE, AuditWorld, worlds_of
from reconbound.data import Dataset, load_dataset
from reconbound.fisher.worlds import REMOVED
from reconbound.report import build
from reconbound.report.attack import Attacked, write_attack
from reconbound.report.folder import Leakage, Run, read_audit
from reconbound.report.view import View

GROUPS = ("most-exposed", "least-exposed", "random")
RECORDS, TRIALS = "most-exposed:8,least-exposed:8,random:8", 100
CONFIDENCE = 0.95


@random_states_kept()
def attack_audit(
    folder: str | os.PathLike[str],
    dataset: Dataset | None = None,
    *,
    records: str | Mapping[str, int] = RECORDS,
    trials: int = TRIALS,
    seed: int | None = None,
    show: bool = True,
) -> Attacked:
    """Attacks some records of an audit in fresh trainings, and adds a section to its report.

    Every training begins with parameters of its own, as those of the audit do. It costs trials × (1 + 2 × records)
    trainings, which run side by side, on a GPU where there is one.

    Args:
        folder: of a finished audit.
        dataset: the audit's data; None for a built-in set that was audited whole.
        records: how many of which groups, such as "most-exposed:8,random:4"; a record is attacked once.
        trials: trainings in each world, at least 2.
        seed: of the trainings; from the operating system when None.
        show: whether to show a progress bar, on a terminal.

    Returns:
        What the attacks found; it is also in the folder, in attack.safetensors.

    Raises:
        InputError: names the argument that cannot be used, and why.
    """
    counts, number = read_groups(records), whole("trials", trials, at_least=2)
    run, leakage = read_audit(folder)
    options, name = read_options(folder)
    data = load_dataset(name) if dataset is None else dataset
    refuse_other_data(folder, data)
    caveats = check_model(data, options.model)
    world = _check_attackable(data, options)
    view, first = View(run, leakage), new_seed() if seed is None else seed
    targets = choose_records(view, counts, first)
    if not targets:
        raise InputError("records", "must name at least one record", records)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = training_of(data, options, device)
    private, reference = _replaced(data, world)
    floors = private is None or (data.private is not None and len(private) == len(data.private))
    stated = [
        replace(t, stated=_stated(view, run, leakage, t.record) if floors else _without_floor(view, t)) for t in targets
    ]
    plan = Plan(number, first, reference, None if private is None else private.to(device))
    plan = with_family_confidence(
        replace(plan, rebuild=0 if "derivative" in caveats else None), len(stated), CONFIDENCE
    )
    with progress_bar(pieces_of(number, len(stated)), 0, show, "attacks") as advance:
        found = list(attack_records(training, stated, replace(plan, advance=advance)))
    facts = {"trials": number, "confidence": CONFIDENCE, "reference": world.reference, "version": __version__}
    inputs = as_tensor(data.inputs)[[t.record for t in targets]]
    attacked = Attacked(tuple(found), inputs.double(), facts)
    write_attack(folder, attacked, str(leakage.facts.get("run")))
    build(folder)
    return attacked


def read_groups(given: str | Mapping[str, int]) -> dict[str, int]:
    """Returns the number of records of each group.

    Args:
        given: a mapping, or text such as "most-exposed:8,random:4".

    >>> read_groups("most-exposed:8, random:4")
    {'most-exposed': 8, 'random': 4}
    """
    found: dict[str, int] = {}
    parts = given.items() if isinstance(given, Mapping) else (part.partition(":")[::2] for part in given.split(","))
    for name, count in parts:
        group = choice("records", name.strip(), GROUPS)
        text = str(count).strip()
        if not text.isdecimal():
            raise InputError("records", "must be groups with their numbers, as in random:8", given)
        found[group] = found.get(group, 0) + int(text)
    return found


def choose_records(view: View, counts: Mapping[str, int], seed: int) -> list[Target]:
    """Returns records of the groups, each once, the most exposed first.

    Args:
        view: the audit.
        counts: records of each group.
        seed: of the random ones.
    """
    lead = next((w for w in view.success.worlds if w.kind == REMOVED), None)
    exposed = -view.floor if view.unbiased else None if lead is None else lead.divergences.nats
    known = view.measured if view.unbiased else np.ones(view.records, dtype=bool)
    if exposed is None:
        raise InputError("records", "must be those of an audit that measured something", view.records)
    order = [int(i) for i in np.argsort(-exposed, kind="stable") if known[i]]
    drawn = [int(i) for i in numbers_of(seed, "attacked", 0).permutation(view.records)]
    found: dict[int, Target] = {}
    for group, ranked in zip(GROUPS, (order, order[::-1], drawn), strict=True):
        free = [i for i in ranked if i not in found]
        for i in free[: counts.get(group, 0)]:
            found[i] = Target(i, group=group)
    return list(found.values())


def training_of(dataset: Dataset, options: AuditOptions, device: torch.device) -> Training:
    """Returns the audit's training, in float64, with fresh parameters for each.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
        device: where to train.
    """
    model = make_model(dataset, options.model, seed=0).double().to(device)
    inputs = as_tensor(dataset.inputs).double().to(device)
    targets = as_tensor(dataset.targets).to(device)
    targets = targets.double() if targets.is_floating_point() else targets
    fresh = partial(start_afresh, dataset, options.model)
    return Training(model, make_loss(dataset), inputs, targets, options.settings, options.steps, fresh)


def _check_attackable(dataset: Dataset, options: AuditOptions) -> AuditWorld:
    """Returns the world in which all that is private is replaced; refuses audits that cannot be attacked."""
    if options.settings.sampler != "poisson":
        must = "must be that of an audit with Poisson batches: the attack weighs whether the record took part"
        raise InputError("folder", must, options.settings.sampler)
    if dataset.kind == "tokens":
        raise InputError("folder", "must be that of an audit of images or a table, for these attacks", dataset.kind)
    worlds = worlds_of(dataset)
    return worlds[PRIVATE] if PRIVATE in worlds else next(iter(worlds.values()))


def _replaced(dataset: Dataset, world: AuditWorld) -> tuple[Tensor | None, Tensor]:
    """Returns the flat columns that a world replaces, None for all, and the values in their place."""
    size = int(np.prod(dataset.shape))
    columns = None if world.world.features is None else torch.tensor(sorted(world.world.features))
    whole_record = torch.zeros(1, size, dtype=torch.float64)
    filled = world.world(whole_record, None)[0][0]
    return columns, filled if columns is None else filled[columns]


def _stated(view: View, run: Run, leakage: Leakage, record: int) -> Stated:
    """Returns what the audit states of a record: at confidence limits where there are any."""
    floor = None
    if view.unbiased and view.measured[record]:
        dfil = float(leakage.dfil[0, record])
        if leakage.upper is not None and bool(torch.isfinite(leakage.upper[0, record])):
            dfil = float(leakage.upper[0, record])
        floor = 1 / dfil if dfil > 0 else None
    return replace(_without_floor(view, Target(record)), floor=floor)


def _without_floor(view: View, target: Target) -> Stated:
    """Returns what the audit states of a record's divergences."""
    found: dict[str, float] = {}
    for world in view.success.worlds:
        nats = float(world.divergences.nats[target.record])
        if world.kind == REMOVED:
            found["removed"] = nats
        elif world.kind == PRIVATE or len(view.success.worlds) == 2:
            found["replaced"] = nats
    return Stated(**found)
