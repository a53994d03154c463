"""Finds the most likely record behind a private training, for an attacker who sees every step.

The attacker has the parameters after each step, and so every noisy sum. It knows all other records and which of them
took part, the label and the settings, but not whether the record took part. After subtracting the other records'
clipped gradients,

    r_t = b_t u_t(z) + σC ξ_t,      u_t(z) = c g(z; w_t),   b_t ~ Bernoulli(q),   ξ_t ~ N(0, I)

and the most likely z maximises Σ_t log(1 − q + q e^{a_t}), a_t = (2⟨r_t, u_t⟩ − ‖u_t‖²)/(2σ²C²). The exact Poisson
factor is about this attacker: where its answers are not biased, their variance is at least d/Tr I per feature. For
small models only: the Jacobian of every step is held.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, vmap

from reconbound._internal.checks import InputError, whole
from reconbound._internal.formatting import format_floor, format_number
from reconbound._internal.progress import progress_bar
from reconbound._internal.rng import derive, new_seed
from reconbound.accounting.amplification import poisson_factors
from reconbound.attacks.glm import BIASED
from reconbound.fisher import clipped_gradient_sum, clipping
from reconbound.fisher.reference import load_forward_mode
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.settings import Settings
from reconbound.validate.private import Private, Problem

#: Gauss–Newton steps at most, and floats in the Jacobians of one training.
ROUNDS, FLOATS = 60, 50_000_000
FAR = 1e3  # answers are at most this many lengths of a record
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Transcript:
    """The attacker's view of one training.

    Attributes:
        params: before each step, by name, (T, ...).
        left: the noisy sums minus the other records' clipped gradients, (T, p).
        scale: σC.
        rate: q.
    """

    params: dict[str, Tensor]
    left: Tensor
    scale: float
    rate: float


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
    target = Target(model, loss_fn, y[record : record + 1], x[record : record + 1], settings)
    answers, information = [], torch.zeros(x[0].numel(), x[0].numel(), dtype=x.dtype)
    with progress_bar(trials, 0, plan.progress, "trainings") as advance:
        for trial in range(trials):
            own = replace(settings, seed=derive(first, "attack", trial), rules=None)
            seen = observe(model, loss_fn, x, y, own, record, steps=count)
            answers.append(target.likeliest(seen, begin.reshape(x[0].shape)).flatten())
            information += target.information(seen, x[record]) / trials
            advance(1)
    return _report(record, torch.stack(answers).numpy(), x[record].flatten().numpy(), information.numpy())


def observe(
    model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor, settings: Settings, record: int, *, steps: int
) -> Transcript:
    """Trains a copy of the model, and derives the attacker's view from the parameters after each step.

    Args:
        model: as PrivateSGD takes it.
        loss_fn: as PrivateSGD takes it.
        x: the inputs of all records.
        y: the targets of all records.
        settings: of the training.
        record: the index of the attacked record.
        steps: the number of steps.
    """
    trained = copy.deepcopy(model)
    seen = [_state(trained)]

    def keep_state(model: nn.Module) -> dict[str, float]:
        seen.append(_state(model))
        return {}

    learner = PrivateSGD(
        trained, loss_fn, x, y, settings, evaluate=keep_state, evaluate_every=1, progress=False, check=False
    ).fit(steps)
    flat = torch.stack([torch.cat([v.flatten() for v in state.values()]) for state in seen])
    velocity = (flat[:-1] - flat[1:]) / settings.lr
    before = torch.cat([torch.zeros_like(velocity[:1]), velocity[:-1]])
    sums = (velocity - settings.momentum * before - settings.weight_decay * flat[:-1]) * learner.sampler.divisor
    for step in range(steps):
        batch = learner.sampler.batch(learner.run_seed, step)
        batch = batch[batch != record]
        if len(batch):
            trained.load_state_dict(seen[step], strict=False)
            options = {"max_grad_norm": settings.max_grad_norm, "clip": settings.clip}
            others = clipped_gradient_sum(trained, loss_fn, x[batch], y[batch], **options).gradient_sum  # type: ignore[arg-type]
            sums[step] -= torch.cat([others[name].flatten() for name in seen[step]])
    params = {name: torch.stack([state[name] for state in seen[:-1]]) for name in seen[0]}
    return Transcript(params, sums, settings.noise_multiplier * settings.max_grad_norm, learner.sampler.sample_rate)


class Target:
    """The attacked record as a function of its input: its clipped gradient at each step's parameters."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, label: Tensor, like: Tensor, settings: Settings) -> None:
        load_forward_mode()
        problem = Problem(model, loss_fn, Private())

        def clipped(z: Tensor, params: dict[str, Tensor]) -> Tensor:
            g = grad(lambda w: problem.losses(z.unsqueeze(0), like, label, w)[0])(params)
            g = torch.cat([v.flatten() for v in g.values()])
            return clipping(torch.linalg.vector_norm(g), settings.max_grad_norm, settings.clip).factor * g

        self.far = FAR * max(1.0, float(like.norm()))
        self.gradients = vmap(clipped, in_dims=(None, 0))
        self.jacobians = vmap(jacfwd(clipped), in_dims=(None, 0))

    def loss(self, seen: Transcript, z: Tensor) -> Tensor:
        """Computes −Σ_t log(1 − q + q e^{a_t}).

        Args:
            seen: the attacker's view of one training.
            z: the record's input.
        """
        return -torch.logaddexp(*self._terms(seen, self.gradients(z, seen.params))).sum()

    @staticmethod
    def _terms(seen: Transcript, u: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log(1 − q), and log q + a_t of each step, (T,)."""
        a = ((seen.left * u).sum(1) - u.square().sum(1) / 2) / seen.scale**2
        rate = torch.tensor(seen.rate, dtype=u.dtype)
        return torch.log1p(-rate).expand_as(a), rate.log() + a

    def likeliest(self, seen: Transcript, start: Tensor) -> Tensor:
        """Finds the z that maximises the likelihood near the start.

        At small noise and far from the record, no step seems to contain it. So the search first assumes larger noise,
        as large as what is left of the sums, and then less and less.

        Args:
            seen: the attacker's view of one training.
            start: where the search begins.
        """
        z, scale = start, seen.left.norm(dim=1).max().item()
        while scale > 2 * seen.scale and seen.rate < 1:
            z = self._climb(replace(seen, scale=scale), z, 3)
            scale /= 3
        return self._climb(seen, z, ROUNDS)

    def _climb(self, seen: Transcript, z: Tensor, rounds: int) -> Tensor:
        """Takes Gauss–Newton steps, damped where they do not help."""
        damping, error = 1e-3, self.loss(seen, z)
        for _ in range(rounds):
            slope, bend = self._slope(seen, z)
            own = damping
            while own < 1e12:
                step = torch.linalg.lstsq(bend + own * bend.diagonal().mean() * torch.eye(len(bend)).to(bend), slope)[0]
                tried = z + step.reshape(z.shape)
                tried = tried * min(1.0, self.far / max(float(tried.norm()), 1e-300))
                new = self.loss(seen, tried)
                if new < error:
                    break
                own *= 10
            else:
                break
            z, error, damping = tried, new, max(own / 10, 1e-12)
            if step.norm() <= 1e-9 * (1 + z.norm()):
                break
        return z

    def _slope(self, seen: Transcript, z: Tensor) -> tuple[Tensor, Tensor]:
        """Computes Σ_t π_t Jᵀ(r − u)/(σC)² and Σ_t π_t JᵀJ/(σC)².

        π_t is the chance that the record took part, given what is seen.
        """
        u, jacobian = self.gradients(z, seen.params), self.jacobians(z, seen.params).flatten(2)
        out, taken = self._terms(seen, u)
        weight = torch.sigmoid(taken - out)[:, None] / seen.scale**2
        slope = ((weight * (seen.left - u))[:, None] @ jacobian).sum((0, 1))
        return slope, (weight[:, :, None] * jacobian).flatten(0, 1).T @ jacobian.flatten(0, 1)

    def information(self, seen: Transcript, z: Tensor) -> Tensor:
        """Computes Σ_t q/(σC)² Jᵀ[k⊥(1 − ûûᵀ) + k∥ûûᵀ]J of these steps, (d, d).

        Args:
            seen: the attacker's view of one training.
            z: the record's input.
        """
        u, jacobian = self.gradients(z, seen.params), self.jacobians(z, seen.params).flatten(2)
        norm = torch.linalg.vector_norm(u, dim=1)
        across, along = (
            torch.from_numpy(np.asarray(k)) * seen.rate / seen.scale**2
            for k in poisson_factors((norm / seen.scale).numpy(), seen.rate)
        )
        h = (torch.where(norm > 0, 1 / norm, 0)[:, None, None] * u[:, None] @ jacobian)[:, 0]
        total: Tensor = (across[:, None, None] * jacobian).flatten(0, 1).T @ jacobian.flatten(0, 1)
        total += ((along - across)[:, None] * h).T @ h
        return total


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


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
