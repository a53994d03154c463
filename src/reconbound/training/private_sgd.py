"""Private SGD with a Fisher accountant (Algorithm 1 of the paper, and its exact Poisson version).

Each step draws a batch, clips each record's gradient, adds Gaussian noise to the SUM, divides by the fixed qN and
passes the result to any torch optimizer. Beside it, the accountant measures what the steps reveal about each record.
All randomness is a function of the seed, of what distinguishes the run (`noise.release_context`) and of the step; the
noise is also a function of the sum to which it is added. So a run that was killed continues bit for bit as if it had
not been, and two runs that differ in anything share neither noise nor batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, file_path, warn_user, whole
from reconbound._internal.formatting import progress_bar
from reconbound._internal.rng import GUESSABLE, derive, new_seed, random_states_kept, seed_warning
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.measurement_plan import Plans
from reconbound.accounting.spec import checked_counts
from reconbound.fisher import Private
from reconbound.fisher.worlds import NO_WORLDS, World, check_worlds
from reconbound.training import checkpoint as checkpoints
from reconbound.training import noise as noises
from reconbound.training import settings as given
from reconbound.training.feed import Feed, NoLedger
from reconbound.training.ranks import Ranks, TrainingError, compute_shards, grid_of, make_shards, on_cpu, warn_of_idle
from reconbound.training.rows import DatasetRows, as_rows, record_count, row_counts
from reconbound.training.sampling import (
    Shard,
    make_account,
    make_plans,
    make_sampler,
    padded_sizes,
    run_length,
    with_gaps,
)
from reconbound.training.settings import Callback, Fault, Settings, reset_parameters
from reconbound.training.step import Kept, LossFn, Measurer, StepWork
from reconbound.validate.model import ReconboundWarning


class PrivateSGD:
    """A private learner whose ledger says how well each training record is protected.

    Args:
        model: any torch model that treats each record independently; it is trained in place.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs: the training inputs, tensors or NumPy arrays (or a tuple or dictionary of them) with one row per record.
            Arrays of floats get the model's dtype; tensors must have it. Or a map-style torch Dataset of pairs (input,
            target), or DatasetRows of one, which are read when they are needed; targets is then None.
        targets: the training targets, in the same forms.
        settings: the run's Settings.
        optimizer: parameters → torch optimizer; default SGD with the settings' lr, momentum and weight_decay. Whatever
            it does with the noisy gradient is post-processing.
        schedule: optimizer → learning-rate scheduler, stepped once per step.
        initialise: called on the model before each run of `repeat`; default: reset_parameters of every module that has
            a trainable parameter. It must restore pretrained parameters: lambda m: m.load_state_dict(start).
        private: the private part of a record, as in `step_information`.
        worlds: the worlds in which a part of each record has a public value in place of its own, by name: functions
            (inputs, targets) → those of the other world, such as Replacement. The ledger keeps divergences to them and,
            with Poisson batches, to the world in which the record is left out, "removed". None: no divergences.
        diagonal: which diagonals the ledger keeps, as in FisherAccountant. Records that the first runs of `repeat` have
            chosen are measured at every step of the runs after them, outside the budget.
        spectral: whether the ledger keeps spectral norms, as in FisherAccountant.
        feature_scale: the scale of each feature, as in FisherAccountant.
        checkpoint: a folder for checkpoints, used by one process at a time; None for no checkpoints.
        every: the number of steps between two checkpoints.
        evaluate: model → dictionary of numbers, called every `evaluate_every` steps and at the end.
        evaluate_every: the number of steps between two evaluations.
        callbacks: run during the training, see Callback.
        whole_at: step counts, ascending, at which the ledger is that of a run which ends there, and keeps it for
            `accountant.traces.dfil_of_runs` and `accountant.divergences.at`.
        progress: whether to show a progress bar, if output is a terminal.
        check: whether to check model and data before training starts.
        shards: the number of ranges of records whose gradients are summed by themselves and then added exactly. With a
            seed, a run of so many shards is the same bit for bit on every number of ranks. None: one on each rank.

    Ranks: where torch.distributed is initialised, all its ranks train one model together, and must make the same calls.
    Inputs and targets are given whole on each rank, the same everywhere; a rank reads only the rows of its own shards.
    Rank 0's parameters are everyone's. Evaluation and callbacks run on each rank, and each has the whole ledger; rank 0
    writes the checkpoints.

    Guarantee: the released noisy sums are T adaptive steps of the Gaussian mechanism named by the settings (`mechanism`
    of the ledger's account), on any number of ranks; the divisor (qN for Poisson batches) does not depend on who took
    part.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        inputs: Any,
        targets: Any,
        settings: Settings,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        initialise: Callable[[nn.Module], None] | None = None,
        private: Private | Tensor | Sequence[int] | str | None = None,
        worlds: Mapping[str, World] | None = NO_WORLDS,
        diagonal: Any = "none",
        spectral: bool = False,
        feature_scale: Any = 1.0,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        evaluate_every: int = 0,
        callbacks: Sequence[Callback] = (),
        whole_at: Sequence[int] = (),
        progress: bool = True,
        check: bool = True,
        shards: int | None = None,
    ) -> None:
        functions: dict[str, Any] = {"loss_fn": loss_fn, "initialise": initialise, "evaluate": evaluate}
        functions |= {"optimizer": optimizer, "schedule": schedule}
        flags = {"spectral": spectral, "progress": progress, "check": check}
        given.check_arguments(model, settings, callbacks, functions, flags)
        self.model, self.loss_fn, self.settings, self.ranks = model, loss_fn, settings, Ranks.present()
        self.inputs, self.targets = self.ranks.try_all(lambda: as_rows(model, inputs, targets))
        self.records = record_count(self.inputs, self.targets)
        self.sampler = make_sampler(settings.sampler, self.records, settings.sample_rate)
        self.shards = make_shards(self.records, 1 if shards is None else shards)
        self._shards_given = None if shards is None else len(self.shards)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.params:
            raise InputError("model", "must have a parameter that requires grad", type(model).__name__)
        self.device = next(iter(self.params.values())).device
        self.seed = new_seed() if settings.seed is None else settings.seed
        if self.seed < GUESSABLE and self.ranks.rank == 0:
            warn_user(seed_warning("seed"), ReconboundWarning)
        self.private, self.diagonal, self.spectral, self.feature_scale = private, diagonal, spectral, feature_scale
        sgd = {name: getattr(settings, name) for name in ("lr", "momentum", "weight_decay")}
        self.make_optimizer, self.make_schedule = optimizer or partial(torch.optim.SGD, **sgd), schedule
        self.initialise = reset_parameters if initialise is None else initialise
        self.folder = None if checkpoint is None else file_path("checkpoint", checkpoint)
        self.every = whole("every", every)
        self.evaluate, self.evaluate_every = evaluate, whole("evaluate_every", evaluate_every, at_least=0)
        self.callbacks = tuple(callbacks)
        self.whole_at = checked_counts("whole_at", whole_at)
        self.progress = progress
        self.worlds = None if worlds is None else check_worlds(worlds)
        removed = self.worlds is not None and settings.sampler == "poisson"
        self._has_ledger = settings.rules is not None or removed or bool(self.worlds)
        kept = Kept(not (isinstance(diagonal, str) and diagonal == "none"), spectral, self.worlds or NO_WORLDS)
        data, how = (self.inputs, self.targets), dict[str, Any](kept=kept, check=check)
        self.measurer = self.ranks.try_all(lambda: Measurer(model, loss_fn, data, settings, private, **how))
        self.features = self.measurer.features
        if self.device.type == "cuda" and not isinstance(self.inputs, DatasetRows):
            self.sampler = with_gaps(self.sampler)
            if len(self.shards) == self.ranks.size == 1:
                kinds = {p.dtype for p in self.params.values()}
                kind = kinds.pop() if len(kinds) == 1 else torch.float64
                release = noises.Release(settings.noise, self.sampler.divisor, kind)
                self.measurer.replay(padded_sizes(self.sampler), release)
        self._feed: Feed | None = None
        self.plans = Plans()
        self.history: list[dict[str, float]] = []
        self.kind, self.run, self.step, self.steps = "", 0, 0, 0
        self.run_seed = 0  # of the present run: from the seed and everything that distinguishes its release
        self.first_parameters: dict[str, Tensor] = {}
        self.identity: dict[str, Any] = {}
        self._turn, self._saved, self._midway = 0, -1, False
        self._versions = [p._version for p in model.parameters()]
        self._restart()

    @property
    def accountant(self) -> FisherAccountant | None:
        """Returns the ledger, from the first call of fit or repeat on; None where there is nothing to keep."""
        if self._feed is None:
            if self._has_ledger:
                raise NoLedger(
                    "this PrivateSGD has no ledger yet: call fit or repeat first. reconbound.guarantee says what the "
                    "mechanism guarantees before any training"
                )
            return None
        self._feed.settle()
        return self._feed.ledger

    def __repr__(self) -> str:
        s, run = self.settings, f" of run {self.run + 1}" if self.kind == "repeat" else ""
        place = f"step {self.step:,} of {self.steps:,}{run}" if self.steps else "not trained yet"
        return (
            f"PrivateSGD({type(self.model).__name__}, {self.records:,} records of {self.features:,} features, "
            f"noise_multiplier={s.noise_multiplier:g}, max_grad_norm={s.max_grad_norm:g}, "
            f"sample_rate={s.sample_rate:.4g}, {place})"
        )

    # --- training ----------------------------------------------------------------------

    def fit(self, steps: int | None = None, *, epochs: float | None = None) -> PrivateSGD:
        """Trains one run from the model's present parameters, or continues from the folder's last good checkpoint.

        A run cannot be made longer afterwards: the measurements of each record are planned over all of its steps.

        Args:
            steps: the number of steps; give this or `epochs`.
            epochs: the number of epochs, of 1/q steps each.

        Returns:
            The learner itself.
        """
        with self._opened("fit", 1, steps, epochs) as advance:
            self._train_run(advance)
        return self

    def repeat(self, runs: int, steps: int | None = None, *, epochs: float | None = None) -> PrivateSGD:
        """Trains `runs` independent runs, each from fresh parameters, and averages their ledgers.

        It can be resumed at any run and step, and more runs can be added later.

        Afterwards the model has the parameters of the FIRST run: that one may be released. The others only measure
        (releasing another one of them would leak as much again). `initialise` makes the fresh parameters.

        Args:
            runs: the number of runs, including those already trained.
            steps: the number of steps of each run; give this or `epochs`.
            epochs: the number of epochs of each run, of 1/q steps each.

        Returns:
            The learner itself.
        """
        count = whole("runs", runs)
        changed = [p._version for p in self.model.parameters()] != self._versions
        with self._opened("repeat", count, steps, epochs) as advance:
            if changed and self.order == 0 and self.initialise is reset_parameters:
                given.warn_of_fresh_parameters()
            while self.run < count:
                if self.step == 0:
                    with random_states_kept(derive(self.seed, "initial", self.run)):
                        self.initialise(self.model)
                    self._restart()
                self._train_run(advance)
                if self.run + 1 == count:
                    break
                self.run, self.step = self.run + 1, 0
            self.model.load_state_dict(self.first_parameters)
        return self

    @property
    def order(self) -> int:
        """Returns the steps taken over all runs, plus one per finished run. A later state has the larger number."""
        return self.run * (self.steps + 1) + self.step

    def _begin_run(self) -> None:
        if self.ranks.size > 1:
            start = self.ranks.from_first(lambda: on_cpu(self.model.state_dict()))
            self.model.load_state_dict(start)

        def make() -> int:
            losses = self.measurer.some_losses()
            facts = self.identity | ({"shards": len(self.shards)} if len(self.shards) > 1 else {})
            context = noises.release_context(facts, self.settings, self.model, self.device, losses)
            return derive(self.seed, "run", self.run, context)

        self.run_seed = self.ranks.from_first(make)
        if self._feed is not None:
            name = derive(self.run_seed, "fingerprint").to_bytes(32, "little")[:16]  # reveals nothing of the seed
            self._feed.ledger.begin_run(name.hex())

    def _train_run(self, advance: Callable[[int], None]) -> None:
        if self.step == 0:
            self._begin_run()
        self._after_step()
        while self.step < self.steps:
            self._train_step()
            self._after_step()
            advance(1)

    def _after_step(self) -> None:
        """Evaluates and saves where that is due. Nothing happens twice, so it can be called again after an error."""
        if self.kind == "repeat" and self.run == 0 and self.step == self.steps and not self.first_parameters:
            self.first_parameters = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        now = {"run": self.run, "step": self.step}
        known = bool(self.history) and now.items() <= self.history[-1].items()
        last, often = self.step == self.steps, self.evaluate_every
        due = last or (often > 0 and self.step > 0 and self.step % often == 0)
        saving = self.folder is not None and (last or self.step % self.every == 0)
        numbers: Mapping[str, float] = {}
        if due or saving or self.callbacks:
            with self._placed():
                if due or saving:
                    self.measurer.settle()
                if self.callbacks or (self.evaluate is not None and due):
                    numbers = self.ranks.try_all(lambda: given.observe(self, evaluating=due and not known))
        if numbers and not known:
            self.history.append({**now, **numbers})
        if self.ranks.size > 1 and (last or self.step % self.every == 0):
            self.ranks.check_alike({"parameters after this step": checkpoints.model_digest(self.model)})
        if self.folder is not None and saving and self.order > self._saved:
            place, turn = self.folder, self._turn + 1
            self.ranks.from_first(lambda: checkpoints.save(place, checkpoints.snapshot(self), turn))
            self._turn, self._saved = turn, self.order

    def _train_step(self) -> None:
        sizes = row_counts(self.inputs, self.targets)
        if sizes != {self.records}:
            self._fail(f"the data had {self.records} records and have {sorted(sizes)} now")
        zeros = partial(torch.zeros, sum(p.numel() for p in self.params.values()), device=self.device)
        grid = grid_of(self.settings, self.records) if len(self.shards) > 1 else 1.0
        if len(self.shards) == self.ranks.size == 1:
            work = self._compute(self.shards[0])
        else:
            work = compute_shards(self.shards, self.ranks, zeros, grid, self._compute)

        def release() -> Tensor:
            return (work.total.double() * grid + self.settings.noise * self._noise(work.total)) / self.sampler.divisor

        flat = self.ranks.tensor_from_first(release, zeros) if work.released is None else work.released
        given.set_gradients(self.params, flat)
        self._midway = True
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        with self._placed():
            self.measurer.check_parameters()
        if self._feed is not None:
            self._feed.end_step(work, self.step + 1)
        self.step += 1
        self._midway = False

    def _compute(self, shard: Shard) -> StepWork:
        now = (self.run_seed, self.step)
        batch = self.sampler.batch(*now) if shard.span is None else self.sampler.batch(*now, shard.span)
        with self._placed():
            self.measurer.checks.step = self.step
            ledger = None if self._feed is None else self._feed.ledger
            work = self.measurer.compute_step(batch, *now, ledger, self.plans, shard)
            if shard.count > 1 or self.ranks.size > 1:
                self.measurer.checks.settle()  # whole numbers are never NaN, and other ranks do not wait
            return work

    def _noise(self, total: Tensor) -> Tensor:
        """Returns standard normal numbers for this sum: equal only for the same bits, at this step of this release."""
        return noises.draw_for(total, self.run_seed, self.step)

    # --- errors --------------------------------------------------------------------------

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Adds the run and the step to the message of an error about a record or the model."""
        try:
            yield
        except Fault as reason:
            self._midway = self._midway or reason.step not in (None, self.step)
            self._fail(str(reason), reason.step)

    def _fail(self, what: str, step: int | None = None) -> NoReturn:
        saved = "" if self.folder is None else f"; the last good state is in {os.fspath(self.folder)}"
        raise TrainingError(f"run {self.run}, step {self.step if step is None else step}: {what}{saved}")

    # --- state ---------------------------------------------------------------------------

    @contextmanager
    def _opened(self, kind: str, runs: int, steps: int | None, epochs: float | None) -> Iterator[Callable[[int], None]]:
        """Creates the ledger for runs of this length, holds the checkpoint folder and loads its last good state.

        Yields a function that advances the progress bar.
        """
        length = run_length(self.sampler, steps, epochs)
        given.check_length(kind, length, self.kind, self.steps)
        if self._midway and self.folder is None:
            raise TrainingError("the learner was interrupted in the middle of a step: make a new one")
        done = self.steps > 0 and self.step == self.steps and self.run + 1 >= runs
        if not self.steps:
            self.kind, self.steps = kind, length
            self._make_ledger()
            self.seed = self.ranks.from_first(lambda: self.seed)
            if self._shards_given is None:
                self.shards = make_shards(self.records, min(self.records, self.ranks.size))
            self.identity = self.ranks.try_all(lambda: checkpoints.identify(self))
        here = {name: getattr(self, name) for name in ("every", "evaluate_every", "_shards_given")}
        here |= {"seed": self.settings.seed, "runs": runs, "place": self.order if self.folder is None else None}
        here |= {"evaluate": self.evaluate is None, "callbacks": len(self.callbacks)}
        self.ranks.check_alike({**self.identity, **here})
        with ExitStack() as stack:
            if self.folder is not None:
                place = self.folder
                self.ranks.from_first(lambda: stack.enter_context(checkpoints.lock_folder(place)))
                self._resume(self.folder)
            warn_of_idle(self.shards, self.ranks)
            if done:
                given.warn_of_end(kind, self.steps)
            what = f"training, {runs} run{'s' if runs > 1 else ''}"
            at = self.run * self.steps + self.step
            shown = self.progress and self.ranks.rank == 0
            yield stack.enter_context(progress_bar(runs * self.steps, at, shown, what))

    def _make_ledger(self) -> None:
        """Creates an empty ledger and the plan of measurements."""
        if self.whole_at and self.whole_at[-1] > self.steps:
            raise InputError("whole_at", f"must be at most the run's {self.steps} steps", self.whole_at[-1])
        self.whole_at = tuple(sorted({*self.whole_at, self.steps})) if self.whole_at else ()
        if self._has_ledger:
            account = make_account(self.settings, self.sampler, self.features, self.steps)
            options: dict[str, Any] = {"diagonal": self.diagonal, "spectral": self.spectral, "device": self.device}
            options |= {"feature_scale": self.feature_scale, "keep_runs_at": self.whole_at}
            options["worlds"] = None if self.worlds is None else tuple(self.worlds)
            self._feed = Feed(account, self.measurer, options)
            self.plans = make_plans(self.settings, self.sampler, self.steps, self.whole_at, len(self.worlds or ()))

    def _restart(self) -> None:
        """Creates a new optimizer and schedule, as at the start of a run."""
        self.optimizer = given.make_part("optimizer", self.make_optimizer, list(self.params.values()))
        new = None if self.make_schedule is None else given.make_part("schedule", self.make_schedule, self.optimizer)
        self.schedule = new

    # --- checkpoints ---------------------------------------------------------------------

    def _resume(self, folder: str) -> None:
        """Takes the state of the folder's last good checkpoint, if there is one."""
        asked = {"seed": self.settings.seed, "shards": self._shards_given}
        belongs = self.identity | {name: value for name, value in asked.items() if value is not None}
        loaded = self.ranks.from_first(lambda: checkpoints.load(folder, belongs))
        if loaded is None:
            if self._saved >= 0 or self._midway:
                raise checkpoints.CheckpointError(f"the checkpoints of {folder} have been removed")
            return
        saved, self._turn = loaded
        try:
            self._take_over(saved)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as reason:  # its digest is right
            raise checkpoints.foreign_checkpoint(folder, self._turn, reason) from reason
        self._saved, self._midway = self.order, False

    def _take_over(self, saved: checkpoints.Checkpoint) -> None:
        """Takes the state of a checkpoint. Raises errors of many kinds if it is not one of this learner's."""
        facts, present = saved.facts, saved.under("model/")
        released = saved.under("released/")  # there is one once the first of several runs is over
        place = {name: int(facts[name]) for name in ("seed", "run_seed", "run", "step")}
        checkpoints.check_state(facts, self.steps, self.model, (present, released))
        self.model.load_state_dict(present)
        self.measurer.checks.drop()
        self.first_parameters = released
        self._restart()
        checkpoints.restore_optimizer(self.optimizer, self.schedule, facts["state"], saved.tensors)
        if self._feed is not None:
            self._feed.restore(saved.under("ledger/"), facts["runs"], facts["caveats"])
        self.shards = make_shards(self.records, facts.get("shards", 1))
        self.seed, self.run_seed, self.run, self.step = place.values()
        self.history[:] = facts["history"]


__all__ = ["PrivateSGD", "Settings", "TrainingError"]
