"""Many private trainings at once on one device: the same data, batches and measured records, other hyper-parameters.

A small network leaves a GPU idle and Python busy. A fleet holds K trainings side by side: each step's gradients of all
of them are one CUDA graph with a branch for each, on several streams, and the updates and ledgers of all are a few
operations on (K, ...) tensors. Batches and the records measured are those of PrivateSGD with the same seed; they are
shared by the fleet, which leaves each training's own distribution as it is. On a CPU the same code runs without graphs.

For research: noise comes from the device's own generator in the model's precision, and nothing is checkpointed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ._check import InputError, number, whole
from ._random import derive, torch_stream
from .amplification import PoissonTable, paper_delta, paper_kappa
from .budget import Blocks
from .fisher import Private, clipping, covering_method, step_information
from .fisher.private import Problem
from .fisher.sums import open_pass
from .learner_state import reset_parameters
from .renyi import sensitivity
from .sampling import Sampler, make_sampler
from .settings import Settings

LossFn = Callable[[Any, Any], Tensor]
NoiseFn = Callable[[int], Tensor]  # step → standard normal numbers, (K, p)
_OWN = {"poisson": "exact", "fixed": "fixed"}


@dataclass(frozen=True)
class Snapshot:
    """The fleet after so many steps of a run.

    Attributes:
        step: steps taken. settings: of each training.
        own: Σ over steps of the information under the sampler's own rule, Tr I, (K, N) in float64: "exact" for Poisson
            batches, "fixed" for fixed-size ones. raw: the same with factor 1.
        features: d. finite: whether each training's parameters are, (K,).
        found: what `evaluate` said of each training.
    """

    step: int
    settings: tuple[Settings, ...]
    own: Tensor
    raw: Tensor
    features: int
    finite: Tensor
    found: tuple[Any, ...]

    def dfil(self, rule: str = "") -> Tensor:
        """Tr I/d of each training and record, (K, N): the sampler's own rule, "none", or "paper" (κ with δ = 1/(N T)).

        Guarantee: as FisherAccountant.dfil of one run of `step` steps. "paper" and "none" are for comparison.
        """
        own = _OWN[self.settings[0].sampler]
        if rule in ("", own):
            return self.own / self.features
        if rule == "none":
            return self.raw / self.features
        if rule != "paper":
            raise InputError("rule", f"must be {own}, paper or none", rule)
        delta = paper_delta(self.raw.shape[1], self.step)
        kappas = [_kappa(s, delta) for s in self.settings]
        return self.raw * torch.tensor(kappas, dtype=torch.float64, device=self.raw.device)[:, None] / self.features


class Fleet:
    """K private trainings in step, each with its own noise multiplier, clip norm, step size and momentum.

    Args:
        make_model: makes one training's model; all start a run from the same fresh parameters.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs, targets: the training data, one tensor each, whose private part is the whole input.
        settings: of each training. Sampler ("poisson" or "fixed"), sample_rate, clip, probes and seed must be the same
            for all; noise, rules and micro_batch are not used.
        at: the step counts at which a run is looked at, increasing; the last is its length.
        budgets: records measured over records trained on, for each stretch between two of `at`; default: the first
            settings' budget for all. Blocks of a plan end where a stretch ends, so every snapshot is unbiased.
        device: where to train. streams: branches that may run side by side on a GPU.

    Guarantee: each training is PrivateSGD's mechanism with those settings, and each snapshot's ledger an unbiased
    estimate of what its steps tell about each record; trainings of one fleet are not independent of each other, for
    they share batches. On a GPU the noise is float32 from the device's generator: for research, not for release.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        loss_fn: LossFn,
        inputs: Tensor,
        targets: Tensor,
        settings: Sequence[Settings],
        *,
        at: Sequence[int],
        budgets: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
        streams: int = 8,
    ) -> None:
        self.settings, self.at = tuple(settings), _checked_counts(at)
        first = _checked_fleet(self.settings)
        self.loss_fn, self.device = loss_fn, torch.device(device)
        self.inputs, self.targets = inputs.to(self.device), targets.to(self.device)
        self.make_model, self.records, self.features = make_model, len(inputs), inputs[0].numel()
        self.sampler = make_sampler(first.sampler, self.records, first.sample_rate)
        self.budgets = _checked_budgets(budgets, first, len(self.at))
        self.models = [make_model().to(self.device) for _ in self.settings]
        self.params, self.sums = _flattened(self.models)
        self.velocity = torch.zeros_like(self.params)
        self.noise = torch.zeros_like(self.params)
        column = lambda values: torch.tensor(list(values), dtype=self.params.dtype, device=self.device)[:, None]  # noqa: E731
        self.scale = column(s.noise_multiplier * s.max_grad_norm for s in self.settings)
        self.lr, self.momentum = column(s.lr for s in self.settings), column(s.momentum for s in self.settings)
        self.decay = column(s.weight_decay for s in self.settings)
        self.ledger = torch.zeros(2, len(self.settings), self.records, dtype=torch.float64, device=self.device)
        self.table = PoissonTable(self.sampler.sample_rate).prepare(self.device, torch.float64)
        self.streams = min(whole("streams", streams), len(self.settings))
        few = self.inputs[:3], self.targets[:3]
        self.methods = [covering_method(self.models[0], loss_fn, *few, p) for p in (Private("nothing"), Private())]
        self._levels = _levels(self.sampler)
        self._training: dict[int, _Work] = {}
        self._measuring: dict[int, _Work] = {}

    def run(
        self, number: int, *, evaluate: Callable[[nn.Module], Any] | None = None, noise: NoiseFn | None = None
    ) -> Iterator[Snapshot]:
        """Train run `number` from fresh parameters; yields a Snapshot at each of `at`.

        evaluate: called on each training's model at each snapshot. noise: these numbers in place of the generator's."""
        base = self.settings[0].seed
        assert base is not None
        seed = derive(base, "run", number)
        self._start(derive(base, "initial", number))
        batches = _batches(self.sampler, seed, self.at[-1])
        generator = torch_stream(seed, "fleet noise", 0, self.device)
        done = 0
        for stretch, end in enumerate(self.at):
            plan_seed = derive(seed, "stretch", stretch) if stretch else seed
            plan = Blocks(
                self.records,
                self.sampler.sample_rate,
                end - done,
                self.budgets[stretch],
                max(1, round(self.sampler.divisor)),
            )
            for step in range(done, end):
                for part, group in enumerate(plan.at(plan_seed, step - done)):
                    self._measure(group, plan.weight(step - done), seed, step, part)
                if noise is None:
                    self.noise.normal_(generator=generator)
                else:
                    self.noise.copy_(noise(step))
                self._train(batches[step])
            done = end
            yield self._snapshot(end, evaluate)

    def _start(self, seed: int) -> None:
        model = self.make_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            reset_parameters(model)
        self.params.copy_(torch.cat([p.detach().flatten() for p in model.parameters()]).to(self.params))
        self.velocity.zero_()
        self.ledger.zero_()

    def _train(self, batch: Tensor) -> None:
        """One step of every training on this batch, with the noise that lies ready."""
        size = next((level for level in self._levels if level >= len(batch)), len(batch))
        if size not in self._training:
            self._training[size] = _Work(self, size, self._gradient_sum)
        self._training[size](batch)
        gradient = torch.addcmul(self.sums, self.scale, self.noise).div_(self.sampler.divisor)
        gradient.addcmul_(self.params, self.decay)
        self.velocity.mul_(self.momentum).add_(gradient)
        self.params.addcmul_(self.velocity, self.lr, value=-1)

    def _measure(self, group: Tensor, weight: float, seed: int, step: int, part: int) -> None:
        """Add what this step tells about these records to every training's ledger."""
        size = max(len(group), round(self.sampler.divisor))
        if size not in self._measuring:
            self._measuring[size] = _Work(self, size, self._information)
        work = self._measuring[size]
        probes = torch_stream(seed, f"probe {part + 1}", step, self.device)
        for omega in work.omegas:
            omega.normal_(generator=probes)
        work(group)
        norm, across, along = work.found.double()
        m = norm / self.scale.double()
        if self.sampler.name == "poisson":
            k_across, k_along = self.table(m)
        else:
            reach = torch.tensor([[_reach(s)] for s in self.settings], dtype=torch.float64, device=self.device)
            k_across = k_along = self.table.largest(m + reach)
        values = weight * torch.stack([k_across * across + k_along * along, across + along])
        self.ledger.index_add_(2, work.index, values)

    def _gradient_sum(self, k: int, work: _Work) -> None:
        """Σ c g of training k over the work's records, into its row of sums."""
        s, problem = self.settings[k], Problem(self.models[k], self.loss_fn, Private("nothing"))
        batch = (work.mask, work.inputs, work.targets)
        opened = open_pass(problem, batch, self.methods[0], "reverse", check=False, measured=False)
        norms = opened.squared_norms().clamp(min=0).sqrt()
        sums = opened.weighted_sum(clipping(norms, s.max_grad_norm, s.clip).factor * work.mask)
        torch.cat([v.flatten() for v in sums.values()], out=self.sums[k])

    def _information(self, k: int, work: _Work) -> None:
        """Clipped norm, across and along of training k for the work's records, into its rows of found."""
        s = self.settings[k]
        info = step_information(
            self.models[k],
            self.loss_fn,
            work.inputs,
            work.targets,
            max_grad_norm=s.max_grad_norm,
            noise_multiplier=s.noise_multiplier,
            clip=s.clip,
            probe="inputs",
            directions=work.omegas,
            error="bound",
            mask=work.mask,
            method=self.methods[1],
            checked=True,
        )
        torch.stack([info.clipped_norm, info.across, info.along], out=work.found[:, k])

    def _snapshot(self, step: int, evaluate: Callable[[nn.Module], Any] | None) -> Snapshot:
        found = tuple(None if evaluate is None else evaluate(model) for model in self.models)
        own, raw = self.ledger.clone()
        return Snapshot(step, self.settings, own, raw, self.features, torch.isfinite(self.params).all(1).cpu(), found)


class _Work:
    """A function of (training, records), done for all trainings: plainly on a CPU, as one CUDA graph on a GPU.

    The graph has a branch for each training; those on different streams may run side by side. Its inputs are the
    buffers here: records (padded, with a mask) and probes; nothing it does depends on how often it was run before."""

    def __init__(self, fleet: Fleet, size: int, function: Callable[[int, _Work], None]) -> None:
        first, dtype = fleet.settings[0], fleet.params.dtype
        self.fleet, self.function = fleet, function
        self.index = torch.zeros(size, dtype=torch.int64, device=fleet.device)
        self.inputs = torch.zeros(size, *fleet.inputs.shape[1:], dtype=dtype, device=fleet.device)
        self.targets = fleet.targets[self.index]
        self.mask = torch.zeros(size, dtype=dtype, device=fleet.device)
        shape, trainings = fleet.inputs.shape[1:], len(fleet.settings)
        self.omegas = [torch.zeros(shape, dtype=dtype, device=fleet.device) for _ in range(first.probes)]
        self.found = torch.zeros(3, trainings, size, dtype=dtype, device=fleet.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, records: Tensor) -> None:
        padded = torch.zeros(len(self.index), dtype=torch.int64)
        padded[: len(records)] = records
        if self.fleet.device.type == "cuda":
            padded = padded.pin_memory()  # or the copy would wait for the device
        self.index.copy_(padded, non_blocking=True)
        self.mask.zero_()[: len(records)] = 1
        torch.index_select(self.fleet.inputs, 0, self.index, out=self.inputs)
        torch.index_select(self.fleet.targets, 0, self.index, out=self.targets)
        if self.fleet.device.type != "cuda":
            for k in range(len(self.fleet.settings)):
                self.function(k, self)
            return
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        streams = [torch.cuda.Stream(self.fleet.device) for _ in range(self.fleet.streams)]
        for _ in range(2):  # cuDNN and cuBLAS choose and allocate before the capture
            self._branches(streams)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._branches(streams)
        return graph

    def _branches(self, streams: list[torch.cuda.Stream]) -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for k in range(len(self.fleet.settings)):
            with torch.cuda.stream(streams[k % len(streams)]):
                self.function(k, self)
        for stream in streams:
            here.wait_stream(stream)


def _flattened(models: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """All parameters as one tensor (K, p), of which each model's are views; and room for their gradient sums."""
    rows = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    flat = torch.stack(rows)
    for model, row in zip(models, flat, strict=True):
        sizes = [p.numel() for p in model.parameters()]
        for p, piece in zip(model.parameters(), row.split(sizes), strict=True):
            p.data = piece.view(p.shape)
    return flat, torch.zeros_like(flat)


def _levels(sampler: Sampler) -> tuple[int, ...]:
    """Sizes to which batches are padded, so that few graphs are needed; a larger batch gets a graph of its own."""
    if sampler.name != "poisson":
        return (int(sampler.divisor),)
    mean = sampler.divisor
    spread = math.sqrt(mean * (1 - sampler.sample_rate))
    return tuple(min(sampler.records, math.ceil((mean + z * spread) / 8) * 8) for z in (1.0, 6.0))


@lru_cache(maxsize=4)
def _batches(sampler: Sampler, seed: int, steps: int) -> list[Tensor]:
    """The batches of a run, drawn beforehand: fleets with the same seed share them."""
    return [sampler.batch(seed, step) for step in range(steps)]


def _kappa(s: Settings, delta: float) -> float:
    bound = 1.115 if s.clip == "smooth" else 1.0
    return paper_kappa(s.noise_multiplier, s.sample_rate, delta, clip_bound=bound)


def _reach(s: Settings) -> float:
    return sensitivity(s.clip) / s.noise_multiplier


def _checked_counts(at: Sequence[int]) -> tuple[int, ...]:
    counts = tuple(whole("at", count) for count in at)
    if not counts or any(b <= a for a, b in zip(counts, counts[1:], strict=False)):
        raise InputError("at", "must be increasing step counts", at)
    return counts


def _checked_fleet(settings: tuple[Settings, ...]) -> Settings:
    """The first of the settings, with which all others must agree in what a fleet shares."""
    if not settings:
        raise InputError("settings", "must name at least one training", settings)
    first = settings[0]
    for name in ("sampler", "sample_rate", "clip", "probes", "seed"):
        values = {getattr(s, name) for s in settings}
        if len(values) > 1:
            raise InputError(f"settings.{name}", "must be the same for all trainings of a fleet", sorted(values))
    if first.sampler not in _OWN:
        raise InputError("settings.sampler", f"must be one of {', '.join(_OWN)}", first.sampler)
    if first.seed is None:
        raise InputError("settings.seed", "must be given: the fleet shares it", None)
    return first


def _checked_budgets(budgets: Sequence[float] | None, first: Settings, stretches: int) -> tuple[float, ...]:
    chosen = (first.budget,) * stretches if budgets is None else tuple(budgets)
    if len(chosen) != stretches:
        raise InputError("budgets", f"must be {stretches}, one for each stretch", budgets)
    return tuple(number("budgets", b, above=0.0) for b in chosen)


__all__ = ["Fleet", "Snapshot"]
