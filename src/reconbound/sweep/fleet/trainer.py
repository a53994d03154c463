"""Many private trainings at once on one device: the same data, batches and measured records, other hyper-parameters.

A small network leaves a GPU idle and Python busy. A fleet holds K trainings side by side: a step of all of them is one
CUDA graph (engine.py), and their updates and ledgers are a few operations on (K, ...) tensors. Batches and the records
measured are those of PrivateSGD with the same seed; the fleet shares them, which does not change the distribution of
each training. On a CPU the same code runs without graphs.

For research, not for release: noise comes from the device's own generator, which is not a cryptographic one, in the
model's precision, and nothing is checkpointed. It is still bound to the data, the settings, the model and the loss, and
the batches to what the fleet shares of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, choice, number, whole
from reconbound._internal.files import json_digest
from reconbound._internal.rng import derive, random_states_kept, torch_stream
from reconbound.accounting.divergence_ledger import removed_nats
from reconbound.accounting.measurement_plan import Segments
from reconbound.accounting.record_ledger import RecordLedger, Traces
from reconbound.accounting.spec import checked_counts
from reconbound.fisher import Private
from reconbound.sweep.fleet.engine import METHODS, LossFn, Work, make_engine
from reconbound.training.checkpoint import data_digest, plain_json
from reconbound.training.noise import model_facts, record_losses
from reconbound.training.sampling import Sampler, make_account, make_plan, make_sampler, padded_sizes
from reconbound.training.settings import Settings, reset_parameters
from reconbound.validate.private import as_private, feature_mask

NOT_FOR_RELEASE = (
    "not for release: the noise is from a generator that is not cryptographic, in the model's precision; to release a "
    "model, train it with PrivateSGD"
)
#: Batches whose clipped norms are added together.
_BATCHES = 128
NoiseFn = Callable[[int], Tensor]  # step → standard normal numbers, (K, p)


@dataclass(frozen=True)
class Snapshot:
    """The fleet after a number of steps of a run.

    Attributes:
        step: steps taken.
        settings: of each training.
        dfils: dFIL by rule, of each training and record, (K, N), on the CPU; the account's first rule comes first.
        finite: whether each training's parameters and dFIL are finite, (K,).
        found: the result of `evaluate` for each training.
        nats: the sums so far of D towards the world without the record, of each training and record, (K, N), on the
            CPU; None where batches are no Poisson samples.
        drawn: how often each record was in a batch so far, (N,); None likewise.
        caveats: what holds for all of it: it is not for release.
    """

    step: int
    settings: tuple[Settings, ...]
    dfils: Mapping[str, Tensor]
    finite: Tensor
    found: tuple[Any, ...]
    nats: Tensor | None = None
    drawn: Tensor | None = None
    caveats: tuple[str, ...] = (NOT_FOR_RELEASE,)

    def dfil(self, rule: str = "") -> Tensor:
        """Returns Tr I/d of each training and record, (K, N).

        Args:
            rule: one of the settings' rules; "" for the first.

        Guarantee: as FisherAccountant.dfil of one run of `step` steps. "paper" and "none" are for comparison.
        """
        return self.dfils[choice("rule", rule or next(iter(self.dfils)), tuple(self.dfils))]


@dataclass(frozen=True)
class FleetOptions:
    """Says how a fleet is trained and measured.

    Attributes:
        budgets: records measured over records trained on, for each stretch between two of `at`; default: the first
            settings' budget for all. Blocks of a plan end where a stretch ends, so every snapshot is unbiased.
        device: where to train.
        method: "stacked": all trainings in the same operations, for chains of the layers in stacked.py;
            "branches": any model, a branch of the graph for each training. "auto": stacked where possible.
        streams: branches that may run side by side on a GPU.
        initialise: gives a model its fresh parameters, from torch's generator; default: each module's own way.
        private: the features of a record's flattened input that are private, a mask or indices; all of it when None.
    """

    budgets: Sequence[float] | None = None
    device: torch.device | str = "cpu"
    method: str = "auto"
    streams: int = 8
    initialise: Callable[[nn.Module], None] | None = None
    private: Private | Tensor | Sequence[int] | None = None


class Fleet:
    """K private trainings in step, each with its own noise multiplier, clip norm, step size and momentum.

    Args:
        make_model: creates one training's model; all start a run from the same fresh parameters.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs: the training inputs, one tensor.
        targets: the training targets, one tensor.
        settings: of each training. Sampler ("poisson" or "fixed"), sample_rate, clip, rules, probes and seed must be
            the same for all; micro_batch is not used.
        at: the step counts at which a run is evaluated, increasing; the last is its length.
        **options: fields of FleetOptions, by name.

    Guarantee: each training is PrivateSGD's mechanism with those settings, and each snapshot's ledger an unbiased
    estimate of what its steps tell about each record; trainings of one fleet are not independent of each other, for
    they share batches. The noise is from the device's generator, which is not cryptographic: not for release.
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
        **options: Any,
    ) -> None:
        how = FleetOptions(**options)
        self.settings, self.at = tuple(settings), checked_counts("at", at)
        if not self.at:
            raise InputError("at", "must name at least one step count", at)
        first = _checked_fleet(self.settings)
        self.loss_fn, self.device = loss_fn, torch.device(how.device)
        self.initialise = how.initialise or reset_parameters
        self.inputs, self.targets = inputs.to(self.device), targets.to(self.device)
        self.make_model, self.records = make_model, len(inputs)
        self.sampler = make_sampler(first.sampler, self.records, first.sample_rate)
        with random_states_kept(0):  # what the models draw is replaced when a run begins
            self.models = [make_model().to(self.device) for _ in self.settings]
        self._data = data_digest(inputs, targets)
        self.run_seeds: dict[int, int] = {}  # of the runs so far: from the seed and what the fleet shares
        self.params = torch.stack([_trained(model) for model in self.models])  # (K, p), which the models view
        for model, row in zip(self.models, self.params, strict=True):
            nn.utils.vector_to_parameters(row, (p for p in model.parameters() if p.requires_grad))
        self.sums = torch.zeros_like(self.params)
        self.mask = _checked_mask(how.private, self.inputs[:1].to(self.params.dtype))
        self.private = Private() if self.mask is None else Private(features=self.mask.bool())
        self.features = inputs[0].numel() if self.mask is None else self.private.count
        self.velocity = torch.zeros_like(self.params)
        self.noise = torch.zeros_like(self.params)
        names = ("noise", "max_grad_norm", "lr", "momentum", "weight_decay")
        self.scale, self.clip_norm, self.lr, self.momentum, self.decay = map(self._column, names)
        accounts = [make_account(s, self.sampler, self.features, self.at[-1]) for s in self.settings]
        self.ledger = RecordLedger(accounts, self.device, error=False, keep_at=self.at)
        self.plan = _make_plan(first, self.sampler, self.at, how.budgets)
        streams = min(whole("streams", how.streams), len(settings))
        self.engine = make_engine(self, choice("method", how.method, METHODS), streams)
        self._levels = padded_sizes(self.sampler)
        shape = (len(self.settings), self.records)
        self.nats = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.drawn = torch.zeros(self.records, dtype=torch.int64, device=self.device)
        self._norms: list[tuple[Tensor, Tensor]] = []  # records and clipped norms (K, B) of some batches
        self._training: dict[int, Work] = {}
        self._measuring: dict[int, Work] = {}

    def _column(self, name: str) -> Tensor:
        values = [getattr(s, name) for s in self.settings]
        return torch.tensor(values, dtype=self.params.dtype, device=self.device)[:, None]

    def run(
        self,
        number: int,
        *,
        evaluate: Callable[[nn.Module], Any] | None = None,
        noise: NoiseFn | None = None,
        seeds: Sequence[int] | None = None,
        report: Callable[[int], None] | None = None,
    ) -> Iterator[Snapshot]:
        """Trains run `number` from fresh parameters; yields a Snapshot at each of `at`.

        Args:
            number: the number of the run.
            evaluate: called on each training's model at each snapshot.
            noise: replaces the numbers of the generator.
            seeds: one for each training's noise, which then does not depend on the other trainings of the fleet; by
                default one generator creates the noise of all.
            report: called with the number of each step before it is taken; an exception that it raises ends the run.
        """
        base = self.settings[0].seed
        assert base is not None
        self._start(derive(base, "initial", number))
        seed = self.run_seeds[number] = derive(base, "run", number, self._context(()))
        batches: list[Tensor] = _batches(self.sampler, seed, self.at[-1])
        draw = self._drawn(base, seeds, number) if noise is None else lambda step: self.noise.copy_(noise(step))
        for step in range(self.at[-1]):
            if report is not None:
                report(step)
            for part, group in enumerate(self.plan.at(seed, step)):
                self._measure(group, self.plan.weight(step), seed, step, part)
            draw(step)
            self._train(batches[step])
            if step + 1 in self.at:
                yield self._snapshot(step + 1, evaluate)
        self.ledger.finish_run()

    def _drawn(self, seed: int, seeds: Sequence[int] | None, number: int) -> Callable[[int], Any]:
        """Returns a function that writes a step's noise into its buffer."""
        if seeds is None:
            generator = self._generator(seed, number, self.settings)
            return lambda step: self.noise.normal_(generator=generator)
        if len(seeds) != len(self.settings):
            raise InputError("seeds", f"must be {len(self.settings)}, one for each training", f"{len(seeds)} of them")
        own = [self._generator(s, number, (chosen,)) for s, chosen in zip(seeds, self.settings, strict=True)]
        return lambda step: [row.normal_(generator=g) for row, g in zip(self.noise, own, strict=True)]

    def _generator(self, seed: int, number: int, settings: tuple[Settings, ...]) -> torch.Generator:
        """Returns the generator of the noise of run `number` of the trainings with these settings."""
        return torch_stream(derive(seed, "fleet run", number, self._context(settings)), "fleet noise", 0, self.device)

    def _context(self, settings: tuple[Settings, ...]) -> bytes:
        """Returns a digest of what distinguishes the run that begins: data, initial model, loss, sampler, and settings.

        The length of the run is left out: a snapshot is that of a shorter run.
        """
        model, few = self.models[0], (self.inputs[:8].to(self.params.dtype), self.targets[:8])
        kept = ("noise_multiplier", "max_grad_norm", "clip", "lr", "momentum", "weight_decay")
        facts = {
            "data": self._data,
            "sampler": [self.sampler.name, self.sampler.sample_rate],
            "clip": self.settings[0].clip,
            "device": self.device.type,
            "start": model_facts(model),
            "losses": record_losses(model, self.loss_fn, *few),
            "settings": [[getattr(s, name) for name in kept] for s in settings],
        }
        return bytes.fromhex(json_digest(plain_json(facts)))

    def _start(self, seed: int) -> None:
        with random_states_kept(seed):
            model = self.make_model()
            model.load_state_dict(_untrained(self.models[0]), strict=False)
        with random_states_kept(seed):
            self.initialise(model)
        self.params.copy_(_trained(model).to(self.params))
        for own in self.models:
            own.load_state_dict(_untrained(model), strict=False)
        self.velocity.zero_()
        self.ledger.clear_run()
        self._norms = []
        for sums in (self.nats, self.drawn):
            sums.zero_()

    def _train(self, batch: Tensor) -> None:
        """Takes one step of every training on this batch, with the noise in the buffer."""
        size = next((level for level in self._levels if level >= len(batch)), len(batch))
        if size not in self._training:
            self._training[size] = Work(self, size, self.engine.gradient_sums)
        self._training[size](batch)
        if self.sampler.name == "poisson":
            self._norms.append((batch, self._training[size].found[0, :, : len(batch)].clone()))
            if len(self._norms) >= _BATCHES:
                self._settle()
        gradient = torch.addcmul(self.sums, self.scale, self.noise).div_(self.sampler.divisor)
        gradient.addcmul_(self.params, self.decay)
        self.velocity.mul_(self.momentum).add_(gradient)
        self.params.addcmul_(self.velocity, self.lr, value=-1)

    def _settle(self) -> None:
        """Adds to `nats` what is pending: many batches at a time cost little more than one."""
        pending, self._norms = self._norms, []
        if not pending:
            return
        index = torch.cat([batch for batch, _ in pending]).to(self.device)
        factors = self.ledger.factors
        norms = torch.cat([norms for _, norms in pending], 1).double() / factors.noise
        self.nats.index_add_(1, index, removed_nats(norms, factors.reach, self.settings[0].sample_rate))
        self.drawn.index_add_(0, index, torch.ones_like(index))

    def _measure(self, group: Tensor, weight: float, seed: int, step: int, part: int) -> None:
        """Adds what this step reveals about these records to every training's ledger."""
        size = max(len(group), round(self.sampler.divisor))
        if size not in self._measuring:
            self._measuring[size] = Work(self, size, self.engine.information)
        work = self._measuring[size]
        probes = torch_stream(seed, f"probe {part + 1}", step, self.device)
        for omega in work.omegas:
            omega.normal_(generator=probes)
        work(group)
        self.ledger.add(work.index, Traces(*work.found), weight, stratified=True, times=work.mask.long())

    def _snapshot(self, step: int, evaluate: Callable[[nn.Module], Any] | None) -> Snapshot:
        self.ledger.keep_step(step)
        dfils = {rule: self.ledger.dfil_of_runs(step, rule)[-1] for rule in self.ledger.account.kept_rules}
        finite = torch.isfinite(self.params).all(1).cpu() & torch.stack(list(dfils.values())).isfinite().all(2).all(0)
        found = tuple(None if evaluate is None else evaluate(model) for model in self.models)
        self._settle()
        removed = (self.nats.cpu().clone(), self.drawn.cpu().clone()) if self.sampler.name == "poisson" else ()
        return Snapshot(step, self.settings, dfils, finite, found, *removed)


def _trained(model: nn.Module) -> Tensor:
    """Returns the parameters that are trained, in one row, (p,)."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def _untrained(model: nn.Module) -> dict[str, Any]:
    """Returns buffers and frozen parameters."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name not in trained}


@lru_cache(maxsize=4)
def _batches(sampler: Any, seed: int, steps: int) -> list[Tensor]:
    """Draws the batches of a run in advance: fleets with the same seed share them."""
    return [sampler.batch(seed, step) for step in range(steps)]


def _checked_mask(private: Any, record: Tensor) -> Tensor | None:
    """Returns the private features as 0/1 of one record's shape, or None for all."""
    found = as_private(private)
    if found.part != "input" or found.name is not None:
        raise InputError("private", "must be features of the input for a fleet, or None for all of it", private)
    mask = feature_mask(found, record)
    if mask is not None and not bool(mask.any()):
        raise InputError("private", "must name one feature at least", private)
    return mask


def _checked_fleet(settings: tuple[Settings, ...]) -> Settings:
    """Returns the first of the settings; refuses others that differ in what a fleet shares."""
    if not settings:
        raise InputError("settings", "must name at least one training", settings)
    first = settings[0]
    for name in ("sampler", "sample_rate", "clip", "rules", "probes", "seed"):
        values = {getattr(s, name) for s in settings}
        if len(values) > 1:
            shown = f"{len(values)} of them" if name == "seed" else sorted(values)
            raise InputError(f"settings.{name}", "must be the same for all trainings of a fleet", shown)
    choice("settings.sampler", first.sampler, ("poisson", "fixed"))
    if first.seed is None:
        raise InputError("settings.seed", "must be given: the fleet shares it", None)
    if first.rules is None:
        raise InputError("settings.rules", "must not be None: a fleet keeps ledgers", None)
    return first


def _make_plan(first: Settings, sampler: Sampler, at: tuple[int, ...], budgets: Sequence[float] | None) -> Segments:
    """Returns PrivateSGD's plan for ledgers that are whole at these step counts."""
    chosen = (first.budget,) * len(at) if budgets is None else tuple(budgets)
    if len(chosen) != len(at):
        raise InputError("budgets", f"must be {len(at)}, one for each step count", budgets)
    numbers = [number("budgets", b, above=0.0) for b in chosen]
    return Segments.of(make_plan(numbers[0], sampler, at[-1]), at, numbers)
