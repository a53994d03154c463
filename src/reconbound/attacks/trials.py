"""Attacks on trainings by PrivateSGD, one after another: the slow and plain way, and its report."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, whole
from reconbound._internal.formatting import format_floor, format_number, progress_bar
from reconbound._internal.rng import derive, new_seed
from reconbound.attacks.glm import BIASED
from reconbound.attacks.knowledge import LossFn, SGDKnowledge, transcript_of
from reconbound.attacks.private_sgd import LikeliestRecord
from reconbound.attacks.trainings import with_clean_sums
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Settings
from reconbound.training.trajectory import Recorder, Trajectory

#: Floats in the Jacobians of one training.
FLOATS = 50_000_000


@dataclass(frozen=True)
class SGDTrials:
    """The trainings on which the attack is tried: their number and their length.

    Attributes:
        steps: the number of steps of a training.
        trials: the number of trainings.
        start: where the search begins, a record's input; the other records' average when None.
        progress: whether to show a progress bar, if output is a terminal.
    """

    steps: int
    trials: int
    start: Tensor | None = None
    progress: bool = True


@dataclass(frozen=True, repr=False)
class SGDAttackReport:
    """Errors of the attack on one record over many trainings, and the floors beside them; squared errors per feature.

    Attributes:
        record: the index of the record.
        trials: the number of trainings.
        mse: mean of ‖ẑ − z‖²/d over the trainings.
        standard_error: the standard error of `mse`.
        median: of ‖ẑ − z‖²/d.
        trimmed: trimmed mean of ‖ẑ − z‖²/d; it leaves out the largest 1 %, one training at least.
        bias: ‖E ẑ − z‖²/d, estimated without bias (so it may be slightly negative).
        variance: mse − bias.
        floor: 1/dFIL = d/Tr I, Theorem 2 with the exact Poisson factor: under the variance of every unbiased attacker.
        cramer_rao: Tr(I⁻¹)/d, which is higher; infinite where I is singular. I is the mean over the trainings.
        answers: ẑ of each training, (trials, d).
    """

    record: int
    trials: int
    mse: float
    standard_error: float
    median: float
    trimmed: float
    bias: float
    variance: float
    floor: float
    cramer_rao: float
    answers: np.ndarray

    def __repr__(self) -> str:
        biased = self.bias > BIASED * self.mse
        verdict = "biased, so no unbiased floor binds it" if biased else "not visibly biased"
        lines = [
            f"SGDAttackReport of record {self.record}, {self.trials:,} trainings; squared errors per feature",
            f"  of the attack:             {format_number(self.mse)} (standard error "
            f"{format_number(self.standard_error)}), {verdict}",
            f"  its median over trainings: {format_number(self.median)}",
            f"  its variance:              {format_number(self.variance)}",
            f"  floor 1/dFIL:              {format_floor(self.floor)}",
            f"  Cramér–Rao floor Tr I⁻¹/d: {format_floor(self.cramer_rao)}",
            "  Not private: for the curator",
        ]
        return "\n".join(lines)


def simulate_sgd(
    model: nn.Module, loss_fn: LossFn, inputs: Tensor, targets: Tensor, settings: Settings, record: int, plan: SGDTrials
) -> SGDAttackReport:
    """Trains n times with PrivateSGD from the model's parameters, and attacks one record in the steps of each training.

    Args:
        model: as PrivateSGD takes it. Everything is computed on the CPU in float64, on copies.
        loss_fn: as PrivateSGD takes it.
        inputs: a tensor, as PrivateSGD takes it.
        targets: a tensor, as PrivateSGD takes it.
        settings: with Poisson batches and torch's SGD; the seed is that of the first training (random where None).
        record: the index of the record whose input is to be rebuilt.
        plan: the number of trainings, and of their steps.

    Guarantee: none about other attackers. Where the answers are not biased their variance is at least `floor`, but for
    the sampling error of both; floors for unbiased attackers do not bind biased answers, as at large noise. A training
    that never drew the record tells nothing of it: an answer may then lie anywhere (`median`, `trimmed`).
    """
    if settings.sampler != "poisson":
        raise InputError(
            "settings.sampler", "must be poisson: the attack weighs whether the record took part", settings.sampler
        )
    count, trials = whole("steps", plan.steps), whole("trials", plan.trials, at_least=2)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise InputError("inputs", "and targets must be tensors, one row per record", type(inputs).__name__)
    if not 0 <= whole("record", record, at_least=0) < len(inputs):
        raise InputError("record", f"must be below {len(inputs)}, the number of records", record)
    model, x = copy.deepcopy(model).cpu().double(), inputs.cpu().double()
    y = targets.cpu().double() if targets.is_floating_point() else targets.cpu()
    floats = count * x[0].numel() * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if floats > FLOATS:
        what = f"must be smaller: steps × parameters × features must be at most {FLOATS:,} for this attack"
        raise InputError("model", what, f"{floats:,}")
    others = torch.arange(len(x)) != record
    begin = x[others].mean(0) if plan.start is None else torch.as_tensor(plan.start).to(x)
    if begin.numel() != x[0].numel():
        raise InputError("start", f"must have {x[0].numel()} numbers, as a record's input has", tuple(begin.shape))
    first = new_seed() if settings.seed is None else settings.seed
    one = slice(record, record + 1)
    known = SGDKnowledge(model, loss_fn, settings, y[one], x[one], mean=begin.flatten())
    attack, truth = LikeliestRecord(), x[record].flatten()
    answers, information = [], torch.zeros(len(truth), len(truth), dtype=x.dtype)
    with progress_bar(trials, 0, plan.progress, "trainings") as advance:
        for trial in range(trials):
            own = replace(settings, seed=derive(first, "attack", trial), rules=None)
            seen = transcript_of(train_once(model, loss_fn, (x, y), own, count), known, record, truth)
            answers.append(np.asarray(attack(seen, known).answers)[0])
            information += known.information(seen, truth) / trials
            advance(1)
    return _report(record, np.stack(answers), truth.numpy(), information.numpy())


def train_once(
    model: nn.Module, loss_fn: LossFn, data: tuple[Tensor, Tensor], settings: Settings, steps: int
) -> Trajectory:
    """Trains a copy of the model with PrivateSGD; returns its trajectory with the sums before noise.

    Args:
        model: at the start of the training.
        loss_fn: as PrivateSGD takes it.
        data: inputs and targets.
        settings: of the training.
        steps: the number of steps.
    """
    recorder = Recorder()
    options = {"progress": False, "check": False, "worlds": None, "callbacks": [recorder]}
    PrivateSGD(copy.deepcopy(model), loss_fn, *data, settings, **options).fit(steps)  # type: ignore[arg-type]
    return with_clean_sums(recorder.trajectory(), model, loss_fn, data, settings)


def _report(record: int, answers: np.ndarray, truth: np.ndarray, information: np.ndarray) -> SGDAttackReport:
    trials, d = answers.shape
    errors = np.square(answers - truth).mean(1)
    mse, spread = float(errors.mean()), float(answers.var(0, ddof=1).mean())
    bias = float(np.square(answers.mean(0) - truth).mean()) - spread / trials
    values = np.linalg.eigvalsh(information)
    whole = values[0] > 1e-12 * values[-1]
    return SGDAttackReport(
        record,
        trials,
        mse,
        float(errors.std(ddof=1) / np.sqrt(trials)),
        float(np.median(errors)),
        float(np.sort(errors)[: -max(1, trials // 100)].mean()),
        bias,
        mse - bias,
        d / float(values.sum()) if values.sum() > 0 else np.inf,
        float((1 / values).mean()) if whole else np.inf,
        answers,
    )
