"""Run folders to make reports of: a short real training on scikit-learn's digits, and a table with people's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from reconbound import PrivateSGD, Settings
from reconbound.report.folder import Leakage, Run, prepare, write_leakage, write_run

SETTINGS = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1}


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _trained(
    inputs: torch.Tensor, targets: torch.Tensor, classes: int, steps: int, runs: int, noise: float, private: Any = None
) -> tuple[Any, PrivateSGD, list[list[float]]]:
    """A linear model trained privately; its ledger, and the ledger's growth over the steps of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), classes))
    settings = Settings(**{**SETTINGS, "noise_multiplier": noise}, lr=0.5, rules=("exact", "paper"), budget=3.0, seed=3)
    learner = PrivateSGD(
        model, _loss, inputs, targets, settings, private=private, diagonal="all", progress=False, check=False
    )
    grown: list[list[float]] = []

    def evaluate(_: nn.Module) -> dict[str, float]:
        found = learner.accountant
        if found is not None and found.runs == 0:
            dfil = found.dfil().double()
            grown.append([learner.step, *(float(dfil.quantile(q)) for q in (1.0, 0.99, 0.5))])
        right = (model(inputs).argmax(1) == targets).double().mean()
        return {"accuracy": float(right)}

    learner.evaluate, learner.evaluate_every = evaluate, max(steps // 10, 1)
    learner.repeat(runs, steps) if runs > 1 else learner.fit(steps)
    return learner.accountant, learner, grown


def _leakage(ledger: Any, learner: PrivateSGD, grown: list[list[float]], k: int, facts: dict[str, Any]) -> Leakage:
    order = ledger.dfil().argsort(descending=True)
    kept = torch.cat([order[:k], order[-k:]])
    rules = ledger.account.rules
    flat = learner.inputs.flatten(1)
    private = facts.get("private")
    own = flat if private is None else flat[:, private]
    diagonal = ledger.state()["diagonal_mean"].double()
    history = torch.tensor(grown, dtype=torch.float64).reshape(-1, 4)
    first = [found for found in learner.history if found["run"] == 0]
    return Leakage(
        dfil=torch.stack([ledger.dfil(rule) for rule in rules]),
        error=torch.stack([ledger.standard_error(rule) for rule in rules]),
        upper=torch.stack([ledger.upper(rule) for rule in rules]) if ledger.runs > 1 else None,
        measured=ledger.measured(),
        targets=learner.targets,
        kept=kept,
        kept_inputs=learner.inputs[kept],
        kept_diagonal=diagonal[kept],
        average_diagonal=diagonal.mean(0),
        history_step=history[:, 0].long(),
        history=history[:, 1:],
        accuracy_step=torch.tensor([found["step"] for found in first]).long(),
        accuracy=torch.tensor([found["accuracy"] for found in first], dtype=torch.float64),
        guess=own.double().var(0, unbiased=False),
        facts={"rules": list(rules), "confidence": 0.95, "task": "classes", "most": k, **facts},
    )


def _run(ledger: Any, data: dict[str, Any], steps: int, runs: int, noise: float, accuracy: float | None) -> Run:
    found = ledger.guarantee(low=0.0, high=1.0)
    mechanism = {
        **SETTINGS,
        "noise_multiplier": noise,
        "steps": steps,
        "clip": "smooth",
        "sampler": "poisson",
        "runs": runs,
    }
    training = {"model": "linear", "parameters": 650, "lr": 0.5, "momentum": 0.0}
    return Run(data, mechanism, training, found.to_dict(), accuracy, {"reconbound": "0.1", "torch": "2.13"})


def digits_folder(
    folder: Path, *, runs: int = 3, steps: int = 30, records: int = 400, noise: float = 0.13, **changes: Any
) -> Path:
    """An audit of digits, really trained; `changes` are facts to put in place of the plain ones."""
    found = load_digits()
    inputs = torch.tensor(found.images[:records, None] / 16, dtype=torch.float32)
    targets = torch.tensor(found.target[:records])
    ledger, learner, grown = _trained(inputs, targets, 10, steps, runs, noise)
    facts = {
        "class_names": [str(k) for k in range(10)], "feature_names": [f"pixel ({i // 8}, {i % 8})" for i in range(64)],
        "units": [""] * 64, "scale": 1.0, "offset": 0.0, "private": None, "target_name": "digit",
        "inferred_ranges": False,
    }  # fmt: skip
    data = {"name": "digits", "kind": "image", "records": records, "features": 64, "shape": [1, 8, 8], "unit": ""}
    prepare(folder)
    write_run(
        folder, _run(ledger, {**data, **changes.pop("data", {})}, steps, runs, noise, changes.pop("accuracy", None))
    )
    write_leakage(folder, _leakage(ledger, learner, grown, 6, {**facts, **changes}))
    return folder


COLUMNS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week", "fnlwgt")
UNITS = ("years", "years", "dollars", "dollars", "hours", "people")
RANGES = ((0.0, 120.0), (1.0, 16.0), (0.0, 100_000.0), (0.0, 5_000.0), (0.0, 100.0), (0.0, 1_500_000.0))


def people_folder(
    folder: Path, *, runs: int = 1, steps: int = 30, records: int = 500, noise: float = 0.15, **changes: Any
) -> Path:
    """An audit of made-up people: six private columns in their units, three public one-hot ones; one run."""
    rng = np.random.default_rng(5)
    share = np.clip(rng.beta((3, 6, 0.15, 0.15, 6, 1.5), (6, 4, 6, 6, 9, 9), size=(records, 6)), 0, 1)
    share[:, 2:4] *= rng.random((records, 2)) < 0.15  # most have no capital gains or losses
    low, wide = np.array([a for a, _ in RANGES]), np.array([b - a for a, b in RANGES])
    share = (np.round(low + wide * share) - low) / wide  # whole years, dollars, hours
    work = np.eye(3)[rng.integers(0, 3, records)]
    rich = (share[:, 0] + share[:, 1] + share[:, 4] + 0.2 * rng.standard_normal(records) > 1.35).astype(int)
    inputs = torch.tensor(np.concatenate([share, work], 1), dtype=torch.float32)
    ledger, learner, grown = _trained(inputs, torch.tensor(rich), 2, steps, runs, noise, torch.arange(6))
    facts = {
        "class_names": ["up to 50K", "over 50K"], "feature_names": list(COLUMNS), "units": list(UNITS),
        "scale": [b - a for a, b in RANGES], "offset": [a for a, _ in RANGES], "private": list(range(6)),
        "public_names": ["work: private", "work: state", "work: own"], "target_name": "income",
        "inferred_ranges": False,
    }  # fmt: skip
    data = {
        "name": "people", "kind": "table", "records": records, "features": 6, "private": list(COLUMNS),
        "public": ["work"], "ranges": {c: list(r) for c, r in zip(COLUMNS, RANGES, strict=True)},
        "units": dict(zip(COLUMNS, UNITS, strict=True)),
    }  # fmt: skip
    prepare(folder)
    write_run(
        folder, _run(ledger, {**data, **changes.pop("data", {})}, steps, runs, noise, changes.pop("accuracy", None))
    )
    write_leakage(folder, _leakage(ledger, learner, grown, 4, {**facts, **changes}))
    return folder
