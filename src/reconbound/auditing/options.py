"""The options of a private training on a data set, with defaults for each set; its model, loss and learner."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, choice, number, whole
from reconbound._internal.rng import seeded
from reconbound.accounting.measurement_plan import Budget, checked_budget
from reconbound.auditing import models as networks
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Settings

if TYPE_CHECKING:
    from reconbound.data import Dataset

MODELS = ("auto", "linear", "mlp", "cnn")
#: Rules under which the ledger is kept, by sampler: the first is proved, "paper" is for comparison.
RULES = {"poisson": ("exact", "paper"), "fixed": ("fixed", "paper"), "shuffle": ("none",)}


@dataclass(frozen=True)
class Plan:
    """Everything that determines an audit's training, apart from the data.

    Attributes:
        model: "auto", "linear", "mlp", "cnn", or "package.module:factory", called as factory(shape, outputs).
        noise_multiplier: as in Settings.
        max_grad_norm: as in Settings.
        sample_rate: as in Settings.
        steps: the number of steps of one run.
        runs: the number of independent runs; the first is released, the others only measure.
        clip: as in Settings.
        sampler: as in Settings.
        lr: as in Settings.
        momentum: as in Settings.
        budget: as in Settings.
        probes: as in Settings.
        seed: as in Settings. A seed that others can guess reveals the noise; None takes one from the operating system.
    """

    model: str = "auto"
    noise_multiplier: float = 0.7
    max_grad_norm: float = 1.0
    sample_rate: float = 0.05
    steps: int = 300
    runs: int = 5
    lr: float = 1.0
    momentum: float = 0.0
    clip: str = "smooth"
    sampler: str = "poisson"
    budget: Budget = 1.0
    probes: int = 1
    seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if ":" not in self.model:
            choice("model", self.model, (*MODELS, "package.module:factory"))
        whole("steps", self.steps)
        whole("runs", self.runs)
        number("lr", self.lr, above=0.0, at_most=1e30)  # within the range of float32
        number("momentum", self.momentum, at_least=0.0, below=1.0)
        object.__setattr__(self, "budget", checked_budget(self.budget))
        self.settings()

    def settings(self) -> Settings:
        """Returns the learner's settings."""
        choice("sampler", self.sampler, tuple(RULES))
        return Settings(
            self.noise_multiplier,
            self.max_grad_norm,
            self.sample_rate,
            sampler=self.sampler,
            clip=self.clip,  # type: ignore[arg-type]
            lr=self.lr,
            momentum=self.momentum,
            rules=RULES[self.sampler],
            budget=self.budget,
            probes=self.probes,
            seed=self.seed,
        )


_OWN: dict[str, dict[str, Any]] = {
    "digits": {"sample_rate": 0.05, "steps": 300},
    "breast_cancer": {"sample_rate": 0.1, "steps": 150},
    "wine": {"sample_rate": 0.2, "steps": 100},
    "diabetes": {"sample_rate": 0.1, "steps": 150, "lr": 0.3},
    "mnist": {
        "sample_rate": 0.005,
        "steps": 400,
        "lr": 3.0,
        "budget": 1.0,
    },  # takes minutes; limits need --runs 10 --budget 3
    # cifar10: one training each by this plan, accuracy on 2,000 test images after 200 steps: pixels from −1 to 1 and
    # lr 1.0: 38.1 %; pixels from 0 to 1: 34.4 % at lr 1.0 (40.4 % after 400 steps of another run), 36.6 % at 2.0,
    # 27.7 % at 0.5, and nothing learned (12 % after 50) at 3.0.
    "cifar10": {"sample_rate": 0.005, "steps": 400, "lr": 1.0, "budget": 1.0},
}


#: Training records of the known sets, for which their defaults are meant; and epochs of a smaller part of one.
_WHOLE = {"digits": 1438, "breast_cancer": 456, "wine": 142, "diabetes": 354, "mnist": 60_000, "cifar10": 50_000}
_EPOCHS = 15


def default_plan(dataset: Dataset, **changes: Any) -> Plan:
    """Returns the defaults for a data set, with some options changed. For an unknown set they depend on its size.

    For a part of a known set (--limit) below nine tenths of it: batches of the same size, at most a quarter of the
    records or 32, for as many steps, at most 15 epochs or 50 steps. The ratio of noise to batch then stays the same.

    For an unknown set of N records: batches of 5 % of them, at least 32 and at most 512, for 15 epochs and at most 800
    steps. Five runs and 25 measurements of each record, which is enough for confidence limits.

    Args:
        dataset: the data of the audit.
        changes: options of Plan to change.
    """
    own, records = _OWN.get(dataset.name), len(dataset.inputs)
    whole_set = _WHOLE.get(dataset.name, 0)
    if own is not None and records < 0.9 * whole_set:
        batch = min(own["sample_rate"] * whole_set, max(32, records / 4), records)
        rate = batch / records
        own = {
            **own,
            "sample_rate": rate,
            "steps": max(min(50, own["steps"]), min(own["steps"], round(_EPOCHS / rate))),
        }
    if own is None:
        batch = min(records, max(32, min(512, round(0.05 * records))))
        own = {"sample_rate": batch / records, "steps": min(800, max(50, round(15 * records / batch)))}
        own["lr"] = 1.0 if dataset.task == "classes" else 0.3
        own["budget"] = max(1.0, 6 / (own["steps"] * own["sample_rate"]))  # for the largest sets: six blocks per run
    plan = Plan(**own)
    return replace(plan, **changes) if changes else plan


def outputs_of(dataset: Dataset) -> int:
    """Returns the number of outputs of the model: one per class, or one."""
    if dataset.task == "number":
        return 1
    known = max(int(t.max()) + 1 if len(t) else 0 for t in (dataset.targets, dataset.test_targets))
    return max(2, known, len(dataset.class_names))


def model_kind(dataset: Dataset, spec: str) -> str:
    """Returns the kind of a model.

    "auto" means the paper's networks for mnist and cifar10, a cnn for images, an mlp for tables.

    Args:
        dataset: the data of the audit.
        spec: as Plan.model.
    """
    if spec != "auto":
        return spec
    return "cnn" if dataset.kind == "image" and min(dataset.shape[1:]) >= 4 else "mlp"


def make_model(dataset: Dataset, spec: str = "auto", seed: int | None = None) -> nn.Module:
    """Creates a smooth model for the data set.

    Args:
        dataset: the data of the audit.
        spec: as Plan.model. A factory is imported, hence run, from Python's path and the current folder.
        seed: for the initial parameters; None uses torch's generator as it is.
    """
    if seed is None:
        return _built(dataset, model_kind(dataset, spec))
    with seeded(seed):
        return _built(dataset, model_kind(dataset, spec))


def _built(dataset: Dataset, kind: str) -> nn.Module:
    shape, outputs = dataset.shape, outputs_of(dataset)
    if ":" in kind:
        made = _called(kind, shape, outputs)
        if not isinstance(made, nn.Module):
            raise InputError(
                "model", "must name a factory that returns a torch module", f"{kind} -> {type(made).__name__}"
            )
        return made
    return network(kind, shape, outputs, image=dataset.kind == "image")


def network(kind: str, shape: tuple[int, ...], outputs: int, *, image: bool) -> nn.Module:
    """Creates one of the package's own models.

    Args:
        kind: "linear", "mlp" or "cnn".
        shape: the shape of a record.
        outputs: the number of outputs.
        image: whether records are images.
    """
    if kind == "linear":
        return networks.linear(shape, outputs)
    if kind == "mlp":
        return networks.mlp(shape, outputs)
    if choice("model", kind, MODELS) == "cnn" and (not image or min(shape[1:]) < 4):
        raise InputError("model", f"must be linear or mlp for records of shape {shape}", kind)
    if shape == (1, 28, 28) and outputs == 10:
        return networks.mnist_cnn()
    if shape == (3, 32, 32) and outputs == 10:
        return networks.standardised(networks.cifar10_cnn(), 0.5, 0.5)  # photographs: centred pixels train better
    return networks.cnn(shape, outputs)


def _called(spec: str, shape: tuple[int, ...], outputs: int) -> Any:
    factory = _factory(spec)
    try:
        return factory(shape, outputs)
    except Exception as reason:
        said = f"{type(reason).__name__}: {reason}"
        raise InputError(
            "model", f"must name a factory to be called as factory(shape, outputs) ({said})", spec
        ) from reason


def _factory(spec: str) -> Callable[[tuple[int, ...], int], Any]:
    """Returns the function that package.module:factory names. This runs the module: only the user may name one."""
    module, _, name = spec.partition(":")
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)  # at the end, so that no file there replaces an installed module
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as reason:  # the user's code may raise anything
        raise InputError("model", f"must name a module that can be imported ({reason})", spec) from reason
    finally:
        if added:
            sys.path.remove(here)
    if not callable(found):
        raise InputError("model", f"must name a function of {module}", spec)
    return found  # type: ignore[no-any-return]


def make_loss(dataset: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the loss, (outputs, targets) → (B,): cross-entropy for classes, half the squared error for a number."""
    return _cross_entropy if dataset.task == "classes" else _half_square


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1)[:, 0] - targets).square() / 2


def as_tensor(array: np.ndarray) -> Tensor:
    """Returns the array as a tensor; a copy where torch cannot share its memory (read-only, not in order)."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def score(dataset: Dataset, model: nn.Module, most: int | None = None) -> float:
    """Returns the accuracy on the test data, or R² for a number; NaN where there are no test data.

    Args:
        dataset: the data of the audit.
        model: the model to evaluate.
        most: use at most n test records, evenly spread; None for all.
    """
    count = len(dataset.test_inputs)
    if count == 0:
        return float("nan")
    rows = slice(None, None, 1 if most is None else max(1, count // most))
    device = next(model.parameters()).device
    with torch.no_grad():
        parts = as_tensor(dataset.test_inputs[rows]).split(1000)
        found = torch.cat([model(part.to(device)).cpu() for part in parts])
    truth = as_tensor(dataset.test_targets[rows])
    if dataset.task == "classes":
        return float((found.argmax(1) == truth).double().mean())
    rest, spread = (found.flatten(1)[:, 0] - truth).square().mean(), truth.var(unbiased=False)
    return float(1 - rest / spread) if spread > 0 else float("nan")


def starter(dataset: Dataset, spec: str) -> Callable[[nn.Module], None]:
    """Returns a function that gives a model fresh parameters, from torch's generator as it is.

    Args:
        dataset: the data of the audit.
        spec: as Plan.model.
    """

    def initialise(own: nn.Module) -> None:
        own.load_state_dict(make_model(dataset, spec).state_dict())

    return initialise


def make_learner(
    dataset: Dataset,
    plan: Plan,
    folder: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> PrivateSGD:
    """Creates a private learner of the data set by the plan; `repeat(plan.runs, plan.steps)` trains and accounts.

    Args:
        dataset: the data of the audit.
        plan: the options of the audit.
        folder: for checkpoints; None for none.
        device: when None, a GPU where there is one.
        options: arguments of PrivateSGD (evaluate, diagonal, every, …).
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = make_model(dataset, plan.model, seed=0).to(place)  # repeat starts each run from its own parameters

    scale = dataset.scale
    chosen: dict[str, Any] = {
        "initialise": starter(dataset, plan.model),
        "private": None if dataset.private is None else as_tensor(dataset.private),
        "feature_scale": float(scale[0]) if (scale == scale[0]).all() else scale.tolist(),
        "checkpoint": None if folder is None else Path(folder),
        "every": max(1, plan.steps // 30),
        **options,
    }
    inputs, targets = as_tensor(dataset.inputs), as_tensor(dataset.targets)
    return PrivateSGD(model, make_loss(dataset), inputs, targets, plan.settings(), **chosen)


__all__ = [
    "MODELS",
    "Plan",
    "as_tensor",
    "default_plan",
    "make_learner",
    "make_loss",
    "make_model",
    "model_kind",
    "network",
    "outputs_of",
    "score",
    "starter",
]
