"""The report of a ledger beside Opacus: the same folder and pages as an audit's."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from reconbound import __version__
from reconbound._internal.checks import InputError, file_path
from reconbound._internal.files import is_leftover, remove_leftovers
from reconbound._internal.rng import random_states_kept
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.spec import Account
from reconbound.auditing.leakage import CONFIDENCE, chosen, divergences_of
from reconbound.auditing.priors import dataset_facts, guess_of
from reconbound.auditing.run import data_facts
from reconbound.data import Dataset, Feature
from reconbound.data.dataset import Pixels
from reconbound.fisher.worlds import REMOVED
from reconbound.mechanisms.guarantee import guarantee
from reconbound.report import build
from reconbound.report import folder as files
from reconbound.report.headline import public_headline

PADDED = (
    "batches are padded to the longest record: the ledger holds only where padding changes nothing of a record's loss, "
    "as with a mask; otherwise a long record moves others' gradients, which no clip bounds"
)
_UNKNOWN = (
    "What was made of the data before the training is not known here. The numbers hold where it used nothing of them: "
    "no mean, range or vocabulary that was read off the data without noise of its own."
)
_PADDING = "Where batches are padded to the longest record, padding must change nothing of a record's loss."


def write_report(
    folder: str | os.PathLike[str],
    ledger: FisherAccountant,
    dataset: Dataset,
    training: dict[str, Any],
    statements: Sequence[str],
) -> Path:
    """Writes the folder and the two pages of a finished ledger.

    Args:
        folder: a new or empty folder, or that of an earlier report of a training with Opacus.
        ledger: with a finished run or more.
        dataset: the records, in the order of the ledger's.
        training: what else is known of the training, for run.json.
        statements: what the numbers rest on; published, so that no record may have a part in them.

    Returns:
        The page for the data's owner.
    """
    if len(dataset.inputs) != ledger.account.records:
        raise InputError("dataset", f"must have the ledger's {ledger.account.records} records", len(dataset.inputs))
    path = Path(file_path("folder", folder))
    _check_folder(path)
    files.prepare(path)
    remove_leftovers(path)
    run, leakage = _run_of(ledger, dataset, training, statements), _leakage_of(ledger, dataset)
    leakage = replace(leakage, facts={**leakage.facts, "run": files.run_digest(run)})
    for name in (files.RUN, files.REPORT, files.PUBLIC_REPORT):  # from here on the folder is unfinished
        (path / name).unlink(missing_ok=True)
    files.write_leakage(path, leakage)
    files.write_run(path, run)
    return build(path)[0]


def _check_folder(path: Path) -> None:
    """Refuses a folder with files that no earlier report wrote: they would be replaced, or closed to others."""
    there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if files.PLAN in there:
        raise InputError("folder", "must not be the folder of an audit", str(path))
    there = {name for name in there if not is_leftover(name)}
    if there - {files.LEAKAGE, files.RUN, files.REPORT, files.PUBLIC_REPORT} or (there and files.LEAKAGE not in there):
        raise InputError("folder", "must be a new or empty folder, or that of an earlier report", str(path))


def _run_of(
    ledger: FisherAccountant, dataset: Dataset, training: dict[str, Any], statements: Sequence[str]
) -> files.Run:
    """Returns the public facts: nothing in them depends on a record. The longest text is left out for that reason."""
    account = ledger.account
    names = ("noise_multiplier", "max_grad_norm", "sample_rate", "steps", "clip", "sampler")
    floors = guarantee(account.mechanism(), dim=max(1, len(dataset.scale)), low=0.0, high=1.0)
    about = {**data_facts(dataset), "inferred_ranges": False}
    run = files.Run(
        data={name: fact for name, fact in about.items() if name != "shape" or dataset.kind == "image"},
        mechanism={**{name: getattr(account, name) for name in names}, "runs": ledger.runs},
        training=training,
        guarantee=floors.to_dict(),
        software={
            "reconbound": __version__,
            "opacus": opacus.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        caveats={"data": _UNKNOWN, "model": f"These must hold: {'; '.join(statements)}.", "padding": _PADDING},
    )
    return replace(run, headline=public_headline(run))


def _leakage_of(ledger: FisherAccountant, dataset: Dataset) -> files.Leakage:
    nats = divergences_of(ledger.divergences)
    measured = nats["nats_measured"][0]
    kept, most = chosen(nats["nats"][0], measured)
    none = torch.zeros((0, len(measured)), dtype=torch.float64)
    kept_worlds = ledger.divergences.worlds
    facts: dict[str, Any] = {
        **dataset_facts(dataset, kept_worlds),
        "rules": [],  # floors in the data's units are read from the ledger
        "worlds": [
            {"name": name, "kind": "removed" if name == REMOVED else "column", "reference": ""} for name in kept_worlds
        ],
        "most": most,
        "confidence": CONFIDENCE,
        "inferred_ranges": False,  # the training knows nothing of these ranges
        "mean_nats": [float(ledger.divergences.towards(name).mean()[0]) for name in kept_worlds],
    }
    return files.Leakage(
        dfil=none,
        error=none,
        measured=measured,
        targets=torch.from_numpy(np.array(dataset.targets)),
        kept=kept,
        kept_inputs=torch.from_numpy(np.array(dataset.inputs[kept.numpy()])),
        history_step=torch.zeros(0, dtype=torch.int64),
        history=torch.zeros((0, 3), dtype=torch.float64),
        accuracy_step=torch.zeros(0, dtype=torch.int64),
        accuracy=torch.zeros(0, dtype=torch.float64),
        guess=torch.from_numpy(guess_of(dataset)),
        facts=facts,
        **nats,
    )


# --- the records of a loader ---------------------------------------------------------------


@random_states_kept()
def records_of(loader: DataLoader[Any], name: str) -> Dataset:
    """Returns the records of a loader's data set for a report: images, texts of tokens, or tables of numbers.

    Of each record the first part is the input, the second the target. Their ranges are those of the data: they are
    for the owner's page, and are not published.

    Args:
        loader: of the training.
        name: of the data, for the pages.
    """
    records = [loader.dataset[i] for i in range(len(loader.dataset))]  # type: ignore[arg-type]
    pairs = [r if isinstance(r, tuple | list) and len(r) > 1 else (r, 0) for r in records]
    inputs, targets = ([np.asarray(pair[k]) for pair in pairs] for k in (0, 1))
    ranks, kinds = {x.ndim for x in inputs}, {x.dtype.kind for x in inputs}
    shapes = {x.shape for x in inputs}
    if ranks == {1} and kinds <= set("iu"):
        return _texts(name, inputs, targets)
    if len(shapes) != 1 or not kinds <= set("fiub"):
        why = "must be given: the records of the loader are neither images, nor token sequences, nor rows of numbers"
        raise InputError("dataset", why, f"a {type(pairs[0][0]).__name__} first, inputs of {len(shapes)} shapes")
    x = np.nan_to_num(np.stack(inputs).astype(np.float64))
    image = x.ndim == 4 and x.shape[1] in (1, 3, 4)
    rows = x if image else x.reshape(len(x), -1)
    low, high = (rows.min(), rows.max()) if image else (rows.min(0), rows.max(0))
    if image and low >= 0 and high <= 1:
        low, high = np.float64(0), np.float64(1)
    width = np.where(high > low, high - low, 1.0)
    scaled = ((rows - low) / width).astype(np.float32)
    if image:
        return _dataset(name, "image", scaled, Pixels(scaled.shape[1:], 1.0, ""), targets)
    ends = zip(low.tolist(), (low + width).tolist(), strict=True)
    features = [Feature(f"input {k}", "", a, b, declared=False) for k, (a, b) in enumerate(ends)]
    return _dataset(name, "table", scaled, features, targets)


def _texts(name: str, inputs: list[np.ndarray], targets: list[np.ndarray]) -> Dataset:
    """Returns texts, the shorter ones filled up with token 0."""
    length = max(len(x) for x in inputs)
    tokens = np.zeros((len(inputs), max(1, length)), dtype=np.int64)
    for row, x in zip(tokens, inputs, strict=True):
        row[: len(x)] = x
    features = [Feature(f"token {k}", declared=False, category=True) for k in range(tokens.shape[1])]
    return _dataset(name, "tokens", tokens, features, targets)


def _dataset(name: str, kind: str, x: np.ndarray, features: Sequence[Feature], targets: list[np.ndarray]) -> Dataset:
    none = x[:0]
    if {t.size for t in targets} != {1}:  # a target for each token: not shown
        y, names = np.zeros(len(x), dtype=np.int64), ("all",)
        return Dataset(name, kind, x, y, none, y[:0], features, class_names=names)
    flat = np.array([t.reshape(()) for t in targets])
    if flat.dtype.kind in "iub":
        labels, codes = np.unique(flat, return_inverse=True)
        y = codes.reshape(-1).astype(np.int64)
        return Dataset(name, kind, x, y, none, y[:0], features, class_names=tuple(map(str, labels.tolist())))
    low, high = float(flat.min()), float(flat.max())
    width = high - low if high > low else 1.0
    y = ((flat - low) / width).astype(np.float32)
    target = Feature("target", "", low, low + width, declared=False, private=False)
    return Dataset(name, kind, x, y, none, y[:0], features, task="number", target=target)


def describe_parameters(optimizer: Any, bounds: Sequence[float]) -> dict[str, Any]:
    """Returns what run.json says of a training with Opacus, beside its mechanism.

    Args:
        optimizer: Opacus's.
        bounds: the smallest and the largest clip norm.
    """
    parameters: list[Tensor] = list(optimizer.params)
    inner = type(optimizer.original_optimizer).__name__
    changed = {"clip_norms": f"from {bounds[0]:g} to {bounds[1]:g}"} if len(set(bounds)) > 1 else {}
    return {
        **changed,
        "model": f"trained by Opacus with {inner}",
        "parameters": sum(p.numel() for p in parameters),
        "clipping": type(optimizer).__name__,
        "expected_batch_size": (optimizer.expected_batch_size or 0) * getattr(optimizer, "world_size", 1) or None,
        "loss_reduction": optimizer.loss_reduction,
        "seed_from": files.SECURE_NOISE if optimizer.secure_mode else files.TORCH_NOISE,
    }


def describe_training(optimizer: Any, account: Account, bounds: Sequence[float] = ()) -> tuple[str, ...]:
    """Returns what the numbers of a ledger rest on, in sentences.

    Args:
        optimizer: Opacus's.
        account: of the ledger.
        bounds: the smallest and the largest clip norm so far.
    """
    clipped, deviation = f"C = {account.max_grad_norm:g}", f"{account.noise:g}"
    if len(set(bounds)) > 1:
        clipped = f"the clip norm C of the step, from {bounds[0]:g} to {bounds[1]:g}"
        deviation = f"{account.noise_multiplier:g} C"
    divided, ranks = "is not divided", getattr(optimizer, "world_size", 1)
    where = "noise on the sum" if ranks == 1 else "one noise, that of rank 0, on the sum over all ranks"
    if optimizer.loss_reduction == "mean":
        divided = f"is divided by the expected batch size {optimizer.expected_batch_size * ranks:g}, whoever was drawn"
    noise = "from Opacus's secure generator (secure_mode=True)"
    if not optimizer.secure_mode:
        noise = (
            "from torch's generator (secure_mode=False): whoever finds its seed or state subtracts the noise, and what "
            "rounding of the noise shows is not covered"
        )
    return (
        f"hard clipping: a record moves the sum by at most {clipped}",
        f"{where}: standard deviation σC = {deviation}; the noisy sum {divided}",
        f"noise {noise}",
        f"each record is drawn with chance q = {account.sample_rate:.6g}, independently at each step",
        "loss and model treat each record separately",
    )
