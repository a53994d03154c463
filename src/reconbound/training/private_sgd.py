"""Private SGD with a Fisher accountant (Algorithm 1 of the paper, and its exact Poisson version).

Each step draws a batch, clips each record's gradient, adds Gaussian noise to the SUM, divides by the fixed qN and
passes the result to any torch optimizer. Beside it, the accountant measures what the steps reveal about each record.
All randomness is a function of the seed, of what distinguishes the run (state.release_context) and of the step; the
noise is also a function of the sum to which it is added. So a run that was killed continues bit for bit as if it had
not been, and two runs that differ in anything share neither noise nor batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, file_path, flag, warn_user, whole
from reconbound._internal.fingerprints import digest, of_run
from reconbound._internal.progress import progress_bar
from reconbound._internal.rng import GUESSABLE, derive, new_seed, seed_warning, seeded
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.measurement_plan import Blocks, Segments
from reconbound.fisher import Private
from reconbound.training import checkpoint as checkpoints
from reconbound.training import measuring, words
from reconbound.training import noise as noises
from reconbound.training import state as states
from reconbound.training.callbacks import Callback
from reconbound.training.sampling import make_sampler, steps_of
from reconbound.training.settings import Settings
from reconbound.training.step import Fault, LossFn, Measurer, as_tensors, evaluated, record_count, row_counts
from reconbound.validate.structure import ReconboundWarning


class TrainingError(RuntimeError):
    """Training cannot continue; the last good state is in the checkpoint."""


class NoLedger(TrainingError, AttributeError):
    """The ledger was requested before it existed."""


class PrivateSGD:
    """A private learner whose ledger says how well each training record is protected.

    Args:
        model: any torch model that treats each record independently; it is trained in place.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs: the training inputs, tensors or NumPy arrays (or a tuple or dictionary of them) with one row per record.
            Arrays of floats get the model's dtype; tensors must have it.
        targets: the training targets, in the same forms.
        settings: the run's Settings.
        optimizer: parameters → torch optimizer; default SGD with the settings' lr, momentum and weight_decay. Whatever
            it does with the noisy gradient is post-processing.
        schedule: optimizer → learning-rate scheduler, stepped once per step.
        initialise: called on the model before each run of `repeat`; default: reset_parameters of every module that has
            a trainable parameter. It must restore pretrained parameters: lambda m: m.load_state_dict(start).
        private: the private part of a record, as in `step_information`.
        diagonal: which diagonals the ledger keeps, as in FisherAccountant. Records that the first runs of `repeat` have
            chosen are measured at every step of the runs after them, outside the budget.
        spectral: whether the ledger keeps spectral norms, as in FisherAccountant.
        feature_scale: the scale of each feature, as in FisherAccountant.
        checkpoint: a folder for checkpoints, used by one process at a time; None for no checkpoints.
        every: the number of steps between two checkpoints.
        evaluate: model → dictionary of numbers, called every `evaluate_every` steps and at the end.
        evaluate_every: the number of steps between two evaluations.
        callbacks: run during the training, see Callback.
        whole_at: step counts, ascending, at which the ledger is that of a run which ends there.
        progress: whether to show a progress bar, if output is a terminal.
        check: whether to check model and data before training starts.

    Guarantee: the released noisy sums are T adaptive steps of the Gaussian mechanism named by the settings (`mechanism`
    of the ledger's account); the divisor (qN for Poisson batches) does not depend on who took part.
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
    ) -> None:
        words.check_settings(settings)
        words.check_functions(model, loss_fn, initialise, evaluate)
        for name, given in (("spectral", spectral), ("progress", progress), ("check", check)):
            flag(name, given)
        inputs, targets = as_tensors(model, "inputs", inputs), as_tensors(model, "targets", targets)
        self.model, self.loss_fn, self.inputs, self.targets, self.settings = model, loss_fn, inputs, targets, settings
        self.records = record_count(inputs, targets)
        self.sampler = make_sampler(settings.sampler, self.records, settings.sample_rate)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.params:
            raise InputError("model", "must have a parameter that requires grad", type(model).__name__)
        self.device = next(iter(self.params.values())).device
        self.seed = new_seed() if settings.seed is None else int(settings.seed)
        if self.seed < GUESSABLE:
            self._say(seed_warning("seed"))
        self.private, self.diagonal, self.spectral, self.feature_scale = private, diagonal, spectral, feature_scale
        words.check_maker("optimizer", optimizer, torch.optim.Optimizer)
        words.check_maker("schedule", schedule, torch.optim.lr_scheduler.LRScheduler)
        self.make_optimizer, self.make_schedule = self._sgd if optimizer is None else optimizer, schedule
        self.initialise = states.reset_parameters if initialise is None else initialise
        self.folder = None if checkpoint is None else file_path("checkpoint", checkpoint)
        self.every = whole("every", every)
        self.evaluate, self.evaluate_every = evaluate, whole("evaluate_every", evaluate_every, at_least=0)
        self.callbacks = words.checked_callbacks(callbacks)
        self.whole_at = words.checked_counts(whole_at)
        self.progress = progress
        self.measurer = Measurer(
            model,
            loss_fn,
            inputs,
            targets,
            settings,
            private,
            diagonal=self.diagonal_kept,
            spectral=spectral,
            check=check,
        )
        self.features = self.measurer.features
        self._ledger: FisherAccountant | None = None
        self.plan: Blocks | Segments | None = None
        self.history: list[dict[str, float]] = []
        self.kind, self.run, self.step, self.steps = "", 0, 0, 0
        self.run_seed = 0  # of the present run: from the seed and everything that distinguishes its release
        self.first_parameters: dict[str, Tensor] = {}
        self._turn, self._saved, self._midway = 0, -1, False
        self._versions = self._parameter_versions()
        self.identity: dict[str, Any] = {}
        self.restart()

    @classmethod
    def paper(
        cls,
        model: nn.Module,
        loss_fn: LossFn,
        inputs: Any,
        targets: Any,
        *,
        batch_size: int,
        noise_multiplier: float,
        max_grad_norm: float,
        lr: float,
        momentum: float = 0.5,
        probes: int = 1,
        seed: int | None = None,
        **options: Any,
    ) -> PrivateSGD:
        """Creates a learner for the paper's Algorithm 1.

        Batches have a fixed size, the clip is smooth, all steps are measured, and δ of the factor κ is split over the
        steps.

        The ledger also keeps the fixed-size factor, which is proved. κ is kept for comparison.

        Args:
            model: as in PrivateSGD.
            loss_fn: as in PrivateSGD.
            inputs: as in PrivateSGD.
            targets: as in PrivateSGD.
            batch_size: records in a batch.
            noise_multiplier: standard deviation of the noise on the sum over max_grad_norm.
            max_grad_norm: the clip norm C.
            lr: the learning rate.
            momentum: the optimizer's momentum.
            probes: Gaussian probes for each measurement.
            seed: as in Settings.
            options: other arguments of PrivateSGD.
        """
        words.check_model(model)
        inputs, targets = as_tensors(model, "inputs", inputs), as_tensors(model, "targets", targets)
        settings = Settings(
            noise_multiplier,
            max_grad_norm,
            whole("batch_size", batch_size) / record_count(inputs, targets),
            sampler="fixed",
            lr=lr,
            momentum=momentum,
            rules=("paper", "fixed"),
            budget="every",
            probes=probes,
            seed=seed,
        )
        return cls(model, loss_fn, inputs, targets, settings, **options)

    @property
    def accountant(self) -> FisherAccountant | None:
        """Returns the ledger, from the first call of fit or repeat on; None without accounting."""
        if self._ledger is None and self.settings.rules is not None:
            raise NoLedger(words.NO_LEDGER)
        return self._ledger

    def __repr__(self) -> str:
        return words.described(self)

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
        done = self._done(1)
        with self._opened("fit", steps, epochs):
            self._warn_if(done)
            self._train_run()
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
        done, changed = self._done(count), self._parameter_versions() != self._versions
        with self._opened("repeat", steps, epochs):
            self._warn_if(done)
            if changed:
                self._warn_of_lost_parameters()
            while self.run < count:
                if self.step == 0:
                    with seeded(derive(self.seed, "initial", self.run)):
                        self.initialise(self.model)
                    self.restart()
                self._train_run()
                if self.run + 1 == count:
                    break
                self.run, self.step = self.run + 1, 0
            self._leave_first_parameters()
        return self

    def _leave_first_parameters(self) -> None:
        if self.first_parameters:
            self.model.load_state_dict(self.first_parameters)
            return
        self._say(words.NO_FIRST_RUN)

    def _parameter_versions(self) -> list[int]:
        return [p._version for p in self.model.parameters()]

    def _warn_of_lost_parameters(self) -> None:
        if self.order == 0 and self.initialise is states.reset_parameters:
            self._say(words.LOST_PARAMETERS)

    def _done(self, runs: int) -> bool:
        """Returns whether this learner, not an earlier one in the same folder, has trained n runs."""
        return self.steps > 0 and self.step == self.steps and self.run + 1 >= runs

    def _warn_if(self, done: bool) -> None:
        if done:
            self._say(words.done_already(self.kind, self.steps))

    def _say(self, what: str) -> None:
        warn_user(what, ReconboundWarning)

    @property
    def order(self) -> int:
        """Returns the steps taken over all runs, plus one per finished run. A later state has the larger number."""
        return self.run * (self.steps + 1) + self.step

    def _begin_run(self) -> None:
        context = states.release_context(self, self.identity)
        self.run_seed = derive(self.seed, "run", self.run, context)
        if self.accountant is not None:
            self.accountant.begin_run(of_run(self.run_seed))

    def _train_run(self) -> None:
        if self.step == 0:
            self._begin_run()
        self._after_step()
        with progress_bar(self.steps, self.step, self.progress, f"run {self.run + 1}") as advance:
            while self.step < self.steps:
                self._train_step()
                self._after_step()
                advance(1)

    def _after_step(self) -> None:
        """Evaluates and saves where that is due. Nothing happens twice, so it can be called again after an error."""
        if self.kind == "repeat" and self.run == 0 and self.step == self.steps and not self.first_parameters:
            self.first_parameters = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        found: list[Mapping[str, float] | None] = []
        with states.modes_kept(self.model), self._placed():
            if self.evaluate is not None and self._evaluation_is_due():
                found.append(evaluated(self.evaluate, self.model))
            for callback in self.callbacks:
                found.append(callback.on_step(self))
                if self.step == self.steps:
                    callback.on_run_end(self)
        numbers = {name: value for each in found if each is not None for name, value in each.items()}
        if any(each is not None for each in found) and not self._in_history():
            self.history.append({"run": self.run, "step": self.step, **numbers})
        if self.folder is None or self.order <= self._saved:
            return
        if self.step % self.every == 0 or self.step == self.steps:
            checkpoints.save(self.folder, states.snapshot(self, self.identity), self._turn + 1)
            self._turn, self._saved = self._turn + 1, self.order

    def _in_history(self) -> bool:
        return bool(self.history) and (self.history[-1]["run"], self.history[-1]["step"]) == (self.run, self.step)

    def _evaluation_is_due(self) -> bool:
        often = self.evaluate_every
        due = self.step == self.steps or (often > 0 and self.step > 0 and self.step % often == 0)
        return due and not self._in_history()

    def _train_step(self) -> None:
        s, seed = self.settings, self.run_seed
        sizes = row_counts(self.inputs, self.targets)
        if sizes != {self.records}:
            self._fail(f"the data had {self.records} records and have {sorted(sizes)} now")
        chosen = self.sampler.batch(seed, self.step)
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.records:
            self._fail(f"a record from {int(chosen.min())} to {int(chosen.max())} was drawn: index out of range")
        with self._placed():
            measured, kept = measuring.measured_groups(self, seed), measuring.followed(self, seed)
            total = measuring.gradient_sum(self, chosen, seed, measured)
        flat = total.double() + s.noise_multiplier * s.max_grad_norm * self._noise(total)
        flat /= self.sampler.divisor
        for p, piece in zip(self.params.values(), flat.split([p.numel() for p in self.params.values()]), strict=True):
            p.grad = piece.reshape(p.shape).to(p.dtype)
        self._midway = True
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        for name, p in self.params.items():
            if not bool(torch.isfinite(p.detach()).all()):
                self._fail(f"the parameter {name} is not finite after it: the model has exploded; lower lr")
        if self.accountant is not None:
            for indices, found, weight, stratified in measured:
                self.accountant.add(indices, found, weight=weight, stratified=stratified)
            if kept is not None:
                self.accountant.follow(kept)
            if self.step + 1 == self.steps:
                self.accountant.finish_run()
        self.step += 1
        self._midway = False

    def _noise(self, total: Tensor) -> Tensor:
        """Returns standard normal numbers for this sum: equal only for the same bits, at this step of this release."""
        bits = bytes.fromhex(digest({"sum": total}))
        return noises.draw(derive(self.run_seed, "noise", self.step, bits), len(total), total.device)

    # --- errors --------------------------------------------------------------------------

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Adds the run and the step to the message of an error about a record or the model."""
        try:
            yield
        except Fault as reason:
            self._fail(str(reason))

    def _fail(self, what: str) -> NoReturn:
        saved = "" if self.folder is None else f"; the last good state is in {os.fspath(self.folder)}"
        raise TrainingError(f"run {self.run}, step {self.step}: {what}{saved}")

    # --- state ---------------------------------------------------------------------------

    @contextmanager
    def _opened(self, kind: str, steps: int | None, epochs: float | None) -> Iterator[None]:
        """Creates the ledger for runs of this length, holds the checkpoint folder and loads its last good state."""
        length = self._length(steps, epochs)
        words.check_length(kind, length, self.kind, self.steps)
        if self._midway and self.folder is None:
            raise TrainingError("the learner was interrupted in the middle of a step: make a new one")
        if not self.steps:
            self.kind, self.steps = kind, length
            self._make_ledger()
            self.identity = states.identity(self)
        if self.folder is None:
            yield
            return
        with checkpoints.held(self.folder):
            checkpoints.warn_if_open(self.folder)
            self._resume()
            yield

    def _length(self, steps: int | None, epochs: float | None) -> int:
        if (steps is None) == (epochs is None):
            raise InputError("steps", "or epochs must be given, and not both", steps)
        if steps is not None:
            return whole("steps", steps)
        assert epochs is not None
        return steps_of(self.sampler, epochs)

    def _make_ledger(self) -> None:
        counts = sorted({*self.whole_at, self.steps})
        if counts[-1] > self.steps:
            raise InputError("whole_at", f"must be at most the run's {self.steps} steps", counts[-1])
        self._ledger, plan = measuring.ledger_and_plan(self)
        self.plan = Segments.of(plan, counts) if plan is not None and self.whole_at else plan

    def _resume(self) -> None:
        assert self.folder is not None
        belongs = dict(self.identity)
        if self.settings.seed is not None:
            belongs["seed"] = self.seed
        found = checkpoints.load(self.folder, belongs)
        if found is not None:
            saved, self._turn = found
            states.reinstate(self, saved)
            self._saved, self._midway = self.order, False
        elif self._saved >= 0 or self._midway:
            raise checkpoints.CheckpointError(f"the checkpoints of {os.fspath(self.folder)} have been removed")

    def restart(self) -> None:
        """Creates a new optimizer and schedule, as at the start of a run."""
        self.optimizer = words.made("optimizer", self.make_optimizer, list(self.params.values()))
        self.schedule = None
        if self.make_schedule is not None:
            self.schedule = words.made("schedule", self.make_schedule, self.optimizer)

    def _sgd(self, parameters: Any) -> torch.optim.Optimizer:
        s = self.settings
        return torch.optim.SGD(parameters, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)

    @property
    def diagonal_kept(self) -> bool:
        """Returns whether the ledger keeps information about single features."""
        return not (isinstance(self.diagonal, str) and self.diagonal == "none")


__all__ = ["PrivateSGD", "Settings", "TrainingError"]
