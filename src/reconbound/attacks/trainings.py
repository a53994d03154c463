"""Many private trainings at once, for attacks: the mechanism of PrivateSGD with Poisson batches and torch's SGD.

Every training has its own batches and noise, so that all are independent. On a GPU they fill it; on a CPU they save
Python's overhead. For research, not for release: the noise is from the device's own generator, which is not a
cryptographic one. A test compares the steps with PrivateSGD's, number by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from reconbound._internal.checks import InputError, whole
from reconbound._internal.rng import derive, random_states_kept, torch_stream
from reconbound.attacks.knowledge import LossFn
from reconbound.fisher import clipping
from reconbound.training.sampling import Sampler, make_sampler
from reconbound.training.settings import Settings
from reconbound.training.trajectory import Trajectory
from reconbound.validate.private import Private, Problem

#: Floats in the gradients of one step of all trainings, and in the trajectories of trainings that are held at once.
FLOATS = 40_000_000
#: Floats in gradients that are computed at once, even where FLOATS is more.
GRADIENTS = 1_000_000_000


@dataclass(frozen=True, repr=False)
class Training:
    """A training that is repeated many times, from the model's parameters or from fresh ones.

    Attributes:
        model: that is trained, on the device on which it is trained; it is not changed.
        loss_fn: (outputs, targets) → one loss per record.
        inputs: of all records, a tensor on the same device.
        targets: of all records, likewise.
        settings: with Poisson batches; the optimizer is torch's SGD with their lr, momentum and weight_decay.
        steps: T.
        initialise: gives a model fresh parameters, from torch's generator; None: all begin with the model's.
    """

    model: nn.Module
    loss_fn: LossFn
    inputs: Tensor
    targets: Tensor
    settings: Settings
    steps: int
    initialise: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        if self.settings.sampler != "poisson":
            must = "must be poisson: the attack weighs whether the record took part"
            raise InputError("settings.sampler", must, self.settings.sampler)
        for name in ("inputs", "targets"):
            if not isinstance(getattr(self, name), Tensor):
                raise InputError(name, "must be a tensor, one row per record", type(getattr(self, name)).__name__)
        if len(self.inputs) != len(self.targets):
            raise InputError(
                "inputs", "and targets must have one row per record", (len(self.inputs), len(self.targets))
            )
        object.__setattr__(self, "steps", whole("steps", self.steps))

    @property
    def sampler(self) -> Sampler:
        """Returns the sampler of the batches."""
        return make_sampler("poisson", len(self.inputs), self.settings.sample_rate)

    @property
    def size(self) -> int:
        """Returns p, the number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def at_once(self) -> int:
        """Returns the number of trainings whose gradients and trajectories are held at once."""
        batch = self.settings.sample_rate * len(self.inputs)
        widest = batch + 6 * math.sqrt(batch) + 1
        return max(1, int(FLOATS / (self.size * max(3.0 * self.steps, widest))))

    def starts(self, trials: int, seed: int) -> Tensor:
        """Returns the parameters with which trainings begin, (M, p)."""
        if self.initialise is None:
            return _flat(self.model).expand(trials, -1).clone()
        import copy

        fresh, found = copy.deepcopy(self.model), []
        for trial in range(trials):
            with random_states_kept(derive(seed, "initial", trial)):
                self.initialise(fresh)
            found.append(_flat(fresh))
        return torch.stack(found)


@dataclass(frozen=True)
class Changed:
    """Another world of one record, or of another record in each training.

    Attributes:
        record: its index.
        inputs: what it has in place of its own input, (1, …) or (M, …) for each training; None: it is left out.
        where: the trainings in which this is so, a mask (M,); None: all.
    """

    record: int
    inputs: Tensor | None = None
    where: Tensor | None = None

    def of(self, trainings: slice) -> Changed:
        """Returns the same for some of the trainings.

        Args:
            trainings: their slice.
        """
        inputs = self.inputs if self.inputs is None or len(self.inputs) == 1 else self.inputs[trainings]
        return Changed(self.record, inputs, None if self.where is None else self.where[trainings])


def train_many(
    training: Training,
    trials: int,
    seed: int,
    *,
    records: Any = None,
    world: Changed | Sequence[Changed] | None = None,
) -> Iterator[Trajectory]:
    """Trains many times; yields trajectories of a part of the trainings at a time, with the sums before noise.

    Args:
        training: what is trained.
        trials: the number of trainings, M.
        seed: decides starts, batches and noise; secret like the data if these are.
        records: indices of the records whose participation is kept; all when None.
        world: another world of a record, or of several records; None: the real one.
    """
    changed = (world,) if isinstance(world, Changed) else tuple(world or ())
    count, at_once = whole("trials", trials), training.at_once
    chosen = torch.arange(len(training.inputs)) if records is None else torch.as_tensor(records)
    for part, at in enumerate(range(0, count, at_once)):
        some = min(at_once, count - at)
        own = [one.of(slice(at, at + some)) for one in changed]
        yield _train(training, some, derive(seed, "trainings", part), chosen, own)


def _train(training: Training, trials: int, seed: int, records: Tensor, world: Sequence[Changed]) -> Trajectory:
    """Trains some at once."""
    s, x = training.settings, training.inputs
    generator = torch_stream(seed, "trainings", 0, x.device)
    w = training.starts(trials, seed).to(x.device)
    velocity, chosen = torch.zeros_like(w), records.to(x.device)
    params, sums, clean = (w.new_empty(trials, training.steps, training.size) for _ in range(3))
    kept = torch.empty(trials, training.steps, len(chosen), dtype=torch.bool, device=x.device)
    for t in range(training.steps):
        draw = torch.rand(trials, len(x), generator=generator, device=x.device, dtype=torch.float64)
        took = draw < s.sample_rate
        for one in world:
            if one.inputs is None:
                took[slice(None) if one.where is None else one.where, one.record] = False
        clean[:, t] = clipped_sums(training, w, took, world)
        noise = torch.randn(w.shape, generator=generator, device=x.device, dtype=torch.float64)
        params[:, t], kept[:, t] = w, took[:, chosen]
        sums[:, t] = clean[:, t].double() + s.noise * noise
        w, velocity = sgd_step(s, w, velocity, sums[:, t] / training.sampler.divisor)
    return Trajectory(params, sums, kept, records, clean)


def sgd_step(settings: Settings, w: Tensor, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns parameters and velocity after a step of torch's SGD.

    Args:
        settings: lr, momentum and weight_decay.
        w: the parameters before.
        velocity: before, 0 at the start.
        gradient: the noisy sum over qN.
    """
    velocity = settings.momentum * velocity + gradient + settings.weight_decay * w
    return w - settings.lr * velocity, velocity


def clipped_sums(training: Training, w: Tensor, took: Tensor, world: Sequence[Changed] = ()) -> Tensor:
    """Returns each training's sum of the clipped gradients of those who took part in a step, (M, p).

    Args:
        training: what is trained.
        w: the parameters of each training, (M, p).
        took: who took part, (M, N).
        world: other worlds of records.
    """
    most = int(took.sum(1).max())
    if most == 0:
        return torch.zeros_like(w)
    trial, record = took.nonzero(as_tuple=True)
    place = (took.cumsum(1) - 1)[trial, record]
    index = torch.zeros(len(w), most, dtype=torch.int64, device=w.device)
    index[trial, place] = record
    mask = torch.zeros(len(w), most, dtype=w.dtype, device=w.device)
    mask[trial, place] = 1
    inputs = training.inputs[index]
    for one in world:
        if one.inputs is not None:
            here = index == one.record if one.where is None else (index == one.record) & one.where[:, None]
            own, column = here.nonzero(as_tuple=True)
            inputs[own, column] = one.inputs.to(inputs).expand(len(w), *inputs.shape[2:])[own]
    gradients = vmap(vmap(_record_gradient(training), in_dims=(None, 0, 0)))
    total, size = torch.zeros_like(w), max(1, min(FLOATS, GRADIENTS) // (len(w) * training.size))
    for at in range(0, most, size):
        rows = slice(at, at + size)
        g = gradients(w, inputs[:, rows], training.targets[index[:, rows]])
        norms = torch.linalg.vector_norm(g, dim=2)
        factor = clipping(norms, training.settings.max_grad_norm, training.settings.clip).factor * mask[:, rows]
        total += torch.einsum("mb,mbp->mp", factor, g)
    return total


def _record_gradient(training: Training) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the function (parameters (p,), input, target) → gradient of one record, (p,)."""
    problem = Problem(training.model, training.loss_fn, Private("nothing"))
    shapes = [(name, p.shape) for name, p in training.model.named_parameters() if p.requires_grad]

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = w.split([math.prod(shape) for _, shape in shapes])
        params = {name: piece.reshape(shape) for (name, shape), piece in zip(shapes, pieces, strict=True)}
        return problem.losses(x.new_zeros(1), x[None], y[None], params)[0]

    found: Callable[[Tensor, Tensor, Tensor], Tensor] = grad(loss)
    return found


def with_clean_sums(
    released: Trajectory, model: nn.Module, loss_fn: LossFn, data: tuple[Tensor, Tensor], settings: Settings
) -> Trajectory:
    """Returns a recorded trajectory with the sums before noise, computed from the data and from who took part.

    Args:
        released: with the participation of all records.
        model: that was trained.
        loss_fn: as PrivateSGD takes it.
        data: inputs and targets.
        settings: of the training.
    """
    training = Training(model, loss_fn, *data, settings, released.params.shape[1])
    if not torch.equal(released.records, torch.arange(len(data[0]))):
        raise InputError("released", "must have the participation of all records", len(released.records))
    steps = range(training.steps)
    clean = [clipped_sums(training, released.params[:, t], released.took[:, t]) for t in steps]
    return replace(released, clean=torch.stack(clean, dim=1))


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
