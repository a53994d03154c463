"""The leakage of each record in an audit's runs: whole records from the ledger, single features from snapshots.

A run is cut into blocks of L steps; in each, the parameters before one uniformly random step are kept, a snapshot.
Measured there with weight L·q, a record's diagonal is an unbiased estimate of the run's (docs/theory/accounting.md, the
third way). The most exposed records are measured closely, and all records where they are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.files import PUBLIC, Unreadable, json_digest, unsealed, write_whole
from reconbound._internal.large_files import write_sealed
from reconbound._internal.rng import derive, numbers_of, torch_stream
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.compact import extremes
from reconbound.accounting.confidence import upper_limit
from reconbound.accounting.divergence_ledger import DivergenceLedger
from reconbound.auditing.models import score
from reconbound.auditing.options import ADVICE, MANY, AuditOptions
from reconbound.auditing.priors import dataset_facts, guess_of, missing_of
from reconbound.data import Dataset
from reconbound.report.folder import Leakage, packed_names
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Callback
from reconbound.training.step import Kept

#: Parameters kept in each run, and points at which accuracy and leakage are looked at in the first.
SNAPSHOTS, POINTS = 12, 20
#: Test records for the accuracy on the way; at the end it is that on all of them.
FEW = 2000
#: Record-probe pairs measured in one go.
_AT_ONCE = 4096
#: Records that share their probes when all are looked at.
_TOGETHER = 512
#: The file with the parameters before a step of a run.
SNAPSHOT = "parameters-{run}-{step}.safetensors"


@dataclass(frozen=True, eq=False)
class Snapshots(Callback):
    """Keeps the released parameters, snapshots of all runs, and a history of the first run.

    Attributes:
        dataset: for the accuracy on its test data.
        folder: for the snapshots (confidential: the runs that only measure are not released).
        released: the file for the parameters at the end of the first run.
    """

    dataset: Dataset
    folder: Path
    released: Path

    def on_step(self, learner: PrivateSGD) -> dict[str, float] | None:
        """Writes a snapshot where one is due. Returns accuracy and leakage so far at some steps of the first run."""
        informed = learner.settings.rules is not None  # otherwise nothing is measured at snapshots
        if informed and learner.step in dict(snapshot_steps(learner, learner.run)):
            facts = {"audit": owner(learner), "run": learner.run, "step": learner.step}
            write_sealed(self.folder / SNAPSHOT.format(**facts), learner.model.state_dict(), facts)
        every = max(1, learner.steps // POINTS)
        due = learner.step == learner.steps or (learner.step and learner.step % every == 0)
        if learner.run > 0 or not due or learner.accountant is None:
            return None
        found: dict[str, float] = {}
        if learner.accountant.account.kept_rules:
            apart = learner.records // SHOWN if learner.records > MANY else 1  # about SHOWN of the records
            dfil = learner.accountant.estimates(at=slice(None, None, apart)).mean
            found = {
                "largest": float(dfil.max()),
                "high": float(torch.quantile(dfil, 0.99)),
                "median": float(dfil.median()),
            }
        accuracy = score(self.dataset, learner.model, None if learner.step == learner.steps else FEW)
        return {**found, "accuracy": accuracy} if math.isfinite(accuracy) else found or None

    def on_run_end(self, learner: PrivateSGD) -> None:
        """Writes the released parameters, those of the first run, and nothing else that depends on the data.

        Nothing is written where they are in their file already.
        """
        from safetensors.torch import save

        own = {name: value.detach().cpu().contiguous().clone() for name, value in learner.first_parameters.items()}
        content = save(own, {"reconbound": "the released model"})
        if not self.released.exists() or self.released.read_bytes() != content:
            write_whole(self.released, content, mode=PUBLIC)


def snapshot_steps(learner: PrivateSGD, run: int) -> list[tuple[int, int]]:
    """Returns (step, length of its block) of each block of a run; a function of the seed.

    Args:
        learner: gives the seed and the length of a run.
        run: the number of the run.
    """
    count = min(SNAPSHOTS, learner.steps)
    ends = [k * learner.steps // count for k in range(count + 1)]
    rng = numbers_of(derive(learner.seed, "run", run), "snapshot", 0)
    return [(int(rng.integers(a, b)), b - a) for a, b in pairwise(ends)]


def owner(learner: PrivateSGD) -> str:
    """Returns a digest that names an audit in its snapshots: another seed, other data or settings give another one."""
    return json_digest([learner.identity, learner.seed])


@dataclass(frozen=True, eq=False)
class SnapshotMeasurements:
    """Measures records at the snapshots of a finished training.

    Attributes:
        learner: the trained learner.
        snapshots: its snapshots.
    """

    learner: PrivateSGD
    snapshots: Snapshots

    def look(
        self, records: Tensor | None, runs: int, *, probes: int, looks: int = SNAPSHOTS, each: bool = True
    ) -> FisherAccountant:
        """Returns a ledger of these records only, each measured `looks` times in a run.

        A run's blocks are joined into `looks` parts. In each, a record is measured at the snapshot of one of the part's
        m blocks, drawn uniformly and independently: at a given step of a block of L with probability 1/(mL), so with
        weight mLq (docs/theory/accounting.md).

        Args:
            records: the records to measure; None for all, which then share probes.
            runs: the number of runs.
            probes: probes for each measurement.
            looks: measurements of each record in a run; at every snapshot when left out.
            each: whether to keep the diagonal of each record, or only the average one.
        """
        name, at_once = ("all", _TOGETHER) if records is None else ("close", max(1, _AT_ONCE // probes))
        records = torch.arange(self.learner.records) if records is None else records
        learner, whole = self.learner, self.learner.accountant
        assert whole is not None
        account = replace(whole.account, records=len(records), rules=whole.account.kept_rules[:1] or None)
        kept = "all" if each else "average"
        ledger = FisherAccountant(account, diagonal=kept, worlds=None, device=learner.device)
        ledger.caveats = whole.caveats
        measurer = learner.measurer.apart_from_training(replace(learner.settings, probes=probes), Kept(diagonal=True))
        own = {name: value.clone() for name, value in learner.model.state_dict().items()}
        try:
            for run in range(runs):
                ledger.begin_run(whole.fingerprints[run])
                seed = derive(learner.seed, "run", run)
                for step, weight, places in self._planned_measurements(run, looks, len(records)):
                    self._put_back(run, step)
                    for k, part in enumerate(places.split(at_once)):
                        probe = torch_stream(seed, f"{name} {k}", step, learner.device)
                        found, _ = measurer.information(records[part], probe)
                        ledger.add(part, found, weight=weight * account.sample_rate, stratified=True)
                ledger.finish_run()
        finally:
            learner.model.load_state_dict(own)
        return ledger

    def _planned_measurements(self, run: int, looks: int, records: int) -> Iterator[tuple[int, float, Tensor]]:
        """Yields a step, the weight over q of measurements at it, and the places of the records measured there.

        The blocks are joined in order into `looks` parts (at most one per block), of nearly the same number of blocks.
        """
        found = snapshot_steps(self.learner, run)
        count = min(looks, len(found))
        for k in range(count):
            blocks = found[k * len(found) // count : (k + 1) * len(found) // count]
            rng = numbers_of(derive(self.learner.seed, "run", run), "look", k)
            drawn = torch.from_numpy(rng.integers(0, len(blocks), records))
            for j, (step, length) in enumerate(blocks):
                yield step, float(len(blocks) * length), torch.nonzero(drawn == j).flatten()

    def _put_back(self, run: int, step: int) -> None:
        """Loads the parameters before a step into the model; refuses those of another audit, run or step."""
        expected = {"audit": owner(self.learner), "run": run, "step": step}
        path = self.snapshots.folder / SNAPSHOT.format(**expected)
        try:
            tensors, facts = unsealed(path)
        except FileNotFoundError:
            raise Unreadable(f"{path} has been removed: {ADVICE}") from None
        except Unreadable as reason:
            raise Unreadable(f"{reason}: {ADVICE}") from None
        if facts != expected:
            raise Unreadable(f"{path} is of another audit, run or step: {ADVICE}")
        try:
            self.learner.model.load_state_dict(tensors)
        except RuntimeError:
            raise Unreadable(f"{path} holds other parameters than the model has: {ADVICE}") from None


#: Most and least exposed records that are kept whole, with probes for each of their measurements; records over which
#: the average diagonal is taken where not all are measured.
MOST, LEAST, PROBES, SAMPLE = 12, 6, 16, 500
#: Records that a report is about where there are more than MANY: drawn at random, beside the most exposed ones.
SHOWN = 2**16
#: The diagonals of all records are kept where they are so many numbers at most (4 bytes each).
NUMBERS = 2_000_000
CONFIDENCE = 0.95
#: Of dFIL over the records, in the history of a run.
_QUANTILES = ("largest", "high", "median")


def leakage_of(dataset: Dataset, options: AuditOptions, measurements: SnapshotMeasurements) -> Leakage:
    """Computes the leakage of each record, in more detail for the most and the least exposed.

    Args:
        dataset: the data of the audit.
        options: the options of the audit.
        measurements: the trained learner with its snapshots.
    """
    learner = measurements.learner
    ledger = learner.accountant
    assert ledger is not None
    rules, worlds = ledger.account.kept_rules, ledger.divergences.worlds
    if rules:
        kept, most = chosen(ledger.traces.mean("trace")[0], ledger.measured())
    else:
        kept, most = chosen(ledger.divergence(worlds[0]), ledger.divergences.times(worlds[0]))
    diagonals: dict[str, Any] = {}
    if rules and options.settings.sampler != "shuffle":
        diagonals = _measure_diagonals(dataset, options, measurements, kept)
    rows = shown_records(ledger, kept, diagonals.get("diagonal_of")) if learner.records > MANY else None
    first = _history_of(learner)
    known, scored = ([h for h in first if name in h] for name in (_QUANTILES[0], "accuracy"))
    facts = {**dataset_facts(dataset, worlds, whole=rows is None), "confidence": CONFIDENCE}
    facts["mean_nats"] = [ledger.divergences.mean_divergence(world) for world in worlds]
    names: Sequence[str] | None = dataset.record_names
    at: Any = slice(None) if rows is None else rows
    if rows is not None:
        facts["shown_of"] = learner.records
        names = [f"record {i}" if names is None else names[i] for i in rows.tolist()]
        kept, diagonals = _places(kept, rows), dict(diagonals)
        if diagonals.get("diagonal_of") is not None:
            diagonals["diagonal_of"] = _places(diagonals["diagonal_of"], rows)
    nats, estimates = divergences_of(ledger.divergences, at), [ledger.estimates(rule, at) for rule in rules]
    pairs = zip(rules, estimates, strict=True) if ledger.runs > 1 else ()
    upper = [upper_limit(found, CONFIDENCE, ledger.spread(rule)) for rule, found in pairs]
    records = learner.records if rows is None else len(rows)
    return Leakage(
        dfil=_stacked([e.mean for e in estimates], records),
        error=_stacked([e.error for e in estimates], records),
        upper=_stacked(upper) if upper else None,
        measured=ledger.measured()[at].cpu() if rules else nats["nats_measured"][0],
        targets=torch.from_numpy(np.array(dataset.targets[at])),
        kept=kept,
        kept_inputs=torch.from_numpy(np.array(dataset.inputs[(kept if rows is None else rows[kept]).numpy()])),
        names=None if names is None else packed_names(names),
        history_step=torch.tensor([int(h["step"]) for h in known], dtype=torch.int64),
        history=torch.tensor([[h[name] for name in _QUANTILES] for h in known]).double().reshape(-1, 3),
        accuracy_step=torch.tensor([int(h["step"]) for h in scored]),
        accuracy=torch.tensor([h["accuracy"] for h in scored]).double(),
        guess=torch.from_numpy(guess_of(dataset)),
        facts={**facts, "rules": list(rules), "most": most, **diagonals.pop("facts", {})},
        **nats,
        **diagonals,
    )


def shown_records(ledger: FisherAccountant, *others: Tensor | None) -> Tensor:
    """Returns the records that the report is about where they are more than MANY, in order.

    They are drawn at random, and the most exposed ones of each world.

    Args:
        ledger: of the runs.
        *others: records that must be among them.
    """
    drawn = np.random.default_rng(0).choice(
        ledger.account.records, SHOWN, replace=False, shuffle=False
    )  # it is no secret
    most = [torch.tensor([i for i, _ in ledger.divergences.most_exposed(MOST, w)]) for w in ledger.divergences.worlds]
    known = [one.long().cpu() for one in (*most, *others) if one is not None]
    found: Tensor = torch.cat([torch.from_numpy(drawn), *known]).unique()
    return found


def _places(records: Tensor, rows: Tensor) -> Tensor:
    """Returns the places of records among those that are shown, in order."""
    return torch.searchsorted(rows, records)


def divergences_of(ledger: DivergenceLedger, at: Any = slice(None)) -> dict[str, Any]:
    """Returns D of records to every world, its upper limits, and how often they were measured; (worlds, N) each.

    Args:
        ledger: of the runs.
        at: which records.
    """
    found = {
        "nats": _stacked([ledger.divergence_of(world, at) for world in ledger.worlds]),
        "nats_measured": _stacked([ledger.times(world)[at] for world in ledger.worlds]),
    }
    if ledger.runs > 1:  # at most the mechanism's cap, but infinite where there is no limit
        limits = [
            (upper_limit(ledger.estimates(world, at), CONFIDENCE, ledger.spread(world)), ledger.cap(world))
            for world in ledger.worlds
        ]
        found["nats_upper"] = _stacked([torch.where(x.isinf(), x, x.clamp(max=cap)) for x, cap in limits])
    return found


def _history_of(learner: PrivateSGD) -> list[dict[str, float]]:
    """Returns the history of the first run. It may come from a checkpoint that somebody changed."""
    first = [entry for entry in learner.history if entry["run"] == 0]
    absent = 0 if learner.settings.rules is not None else len(_QUANTILES)
    for entry in first:
        missing = len(set(_QUANTILES) - set(entry))  # all of them without Fisher information
        if missing not in (0, absent) or not all(isinstance(value, int | float) for value in entry.values()):
            raise Unreadable(f"the history in the checkpoints is not an audit's: {ADVICE}")
    return first


def _measure_diagonals(
    dataset: Dataset, options: AuditOptions, measurements: SnapshotMeasurements, kept: Tensor
) -> dict[str, Any]:
    """Measures diagonals at the snapshots and scales them to the ledger's level.

    Records that are kept whole are measured closely. All records are measured where that is not too much work,
    otherwise a sample (for images only its average). Shuffled epochs are left out: their parameters depend on who was
    seen before.
    """
    learner = measurements.learner
    assert learner.accountant is not None
    closer = measurements.look(kept, options.runs, probes=PROBES).state()["diagonal_mean"]
    found: dict[str, Any] = {"kept_diagonal": scale_to_ledger(closer, learner.accountant, kept), "diagonal_of": None}
    times, probes = snapshot_counts(options, learner.records, learner.records * learner.features)
    if times:
        each = measurements.look(None, options.runs, looks=times, probes=probes).state()["diagonal_mean"]
    else:
        generator = torch.Generator().manual_seed(0)  # membership of the sample is no secret
        sample = torch.randperm(learner.records, generator=generator)[:SAMPLE].sort().values
        table = dataset.kind == "table"
        ledger = measurements.look(sample, options.runs, probes=probes, each=table)
        if not table:
            average = ledger.state()["average_mean"].double()
            mean = scale_to_ledger(ledger.trace()[:, None], learner.accountant, sample).mean()
            return {**found, "average_diagonal": (_shares(average.cpu()) * mean)[0]}
        each, found["diagonal_of"], times = ledger.state()["diagonal_mean"], sample, SNAPSHOTS
    rows = torch.arange(learner.records) if found["diagonal_of"] is None else found["diagonal_of"]
    each = scale_to_ledger(each, learner.accountant, rows)
    for j, missing in missing_of(dataset).items():
        each[torch.from_numpy(missing[rows.numpy()]), j] = torch.nan
    found["facts"] = {"diagonal_measured": options.runs * min(times, options.steps), "diagonal_probes": probes}
    average = torch.nan_to_num(each.nanmean(0))
    return {**found, "diagonal": each if learner.features == 1 else each.float(), "average_diagonal": average}


def scale_to_ledger(diagonal: Tensor, ledger: FisherAccountant, records: Tensor) -> Tensor:
    """Scales diagonals to the ledger's trace: the snapshots only say how it is shared among the features.

        Î_jj = d · dFIL · I_jj/Σ_k I_kk      (main rule; even shares where the snapshots measured nothing)

    For d = 1 this is exactly the ledger's dFIL. A record that the ledger never measured keeps its own diagonal.

    Args:
        diagonal: from the snapshots, (n, d).
        ledger: the ledger of whole records.
        records: the records of the rows, (n,).

    Returns:
        Shape (n, d), float64.
    """
    own, at = diagonal.double().cpu(), records.to(ledger.device)
    trace = ledger.traces.trace_mean(0, at).cpu()
    known = (ledger.measured()[at].cpu() > 0) & trace.isfinite()
    return torch.where(known[:, None], _shares(own) * trace[:, None], own)


def _shares(diagonal: Tensor) -> Tensor:
    total = diagonal.sum(1, keepdim=True)
    even = torch.full_like(diagonal, 1 / diagonal.shape[1])
    return torch.where(total > 0, diagonal / total, even)


def snapshot_counts(options: AuditOptions, records: int, numbers: int) -> tuple[int, int]:
    """Returns how often a run's snapshots are measured for each record (0 if not for all), and with how many probes.

    The number of measurements is that of the sample, or a quarter of the ledger's, at most four per record; at least
    two.

    Args:
        options: the options of the audit.
        records: the number of records.
        numbers: the number of private numbers in all records.

    >>> options = AuditOptions().with_changes(sample_rate=0.05, steps=300)
    >>> [snapshot_counts(options, n, numbers) for n, numbers in ((240, 1440), (1438, 92032), (48000, 37632000))]
    [(12, 1), (4, 1), (0, 1)]
    >>> snapshot_counts(options.with_changes(sample_rate=0.0016, steps=800, budget=4.8), 320_000, 1_920_000)
    (2, 2)
    """
    if numbers > NUMBERS:
        return 0, 1
    budget = options.settings.budget
    share = budget if isinstance(budget, float) else 1.0 if budget == "every" else float(budget[1])
    measured = options.steps * options.settings.sample_rate * share  # measurements of each record in a run
    times = min(SNAPSHOTS, max(2, SNAPSHOTS * SAMPLE // records, min(4, round(measured / 4))))
    return times, 1 if times >= 4 else 2


def chosen(dfil: Tensor, measured: Tensor) -> tuple[Tensor, int]:
    """Chooses records to keep whole among those measured: the most exposed, then the least exposed (the least last).

    Args:
        dfil: dFIL of each record, (N,), or what it grows with.
        measured: how often each record was measured, (N,).

    Returns:
        The records, and how many of them are the most exposed.
    """
    count = int((measured > 0).sum())
    most = min(MOST, (count + 1) // 2)
    return extremes(dfil, lambda part: measured[part] > 0, most, min(LEAST, count - most)), most


def _stacked(rows: list[Tensor], records: int = 0) -> Tensor:
    """Returns the rows as one tensor on the CPU; of no rows one of shape (0, records)."""
    return torch.stack(rows).cpu() if rows else torch.zeros((0, records), dtype=torch.float64)
