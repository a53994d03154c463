"""Private SGD with a Fisher accountant (Algorithm 1 of the paper, and its exact Poisson version).

At every step: draw a batch, clip each record's gradient, add Gaussian noise to the SUM, divide by the fixed qN, hand
the result to any torch optimizer. Beside it the accountant measures what the steps tell about each record. All
randomness is a function of (seed, run, step), so a run that was killed goes on bit for bit as if it had not been."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from . import checkpoint as checkpoints
from . import noise as noises
from ._check import InputError, choice, number, whole
from .accountant import Account, FisherAccountant
from .fisher import Clip, StepInformation, clipped_gradient_sum, step_information
from .sampling import MeasureBlocks, make_sampler, stream
from .validate import check_batch

LossFn = Callable[[Any, Any], Tensor]


class TrainingError(RuntimeError):
    """Training cannot go on; the last good state is in the checkpoint."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run does, apart from the model and the data.

    Attributes:
        noise_multiplier: standard deviation of the noise on the sum over max_grad_norm. max_grad_norm: the clip norm C.
        sample_rate: q. sampler: "poisson", "fixed" or "shuffle". clip: "smooth" or "hard".
        lr, momentum, weight_decay: of the default optimizer, torch's SGD.
        rules: subsampling factors to keep ledgers for (see Account); None to train without accounting.
        budget: records measured over records trained on, each once in a block of 1/(q·budget) steps; "every": measure
        the
            batch itself at every step, in the same pass.
        probes: Gaussian probes for each measurement.
        noise: "torch" or "secure". seed: from the operating system when None.
        micro_batch: records at a time, for memory; None for all.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    sampler: str = "poisson"
    clip: Clip = "smooth"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    rules: tuple[str, ...] | None = ()
    budget: float | str = 0.15
    probes: int = 1
    noise: str = "torch"
    seed: int | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        number("noise_multiplier", self.noise_multiplier, above=0.0)
        number("max_grad_norm", self.max_grad_norm, above=0.0)
        number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        choice("sampler", self.sampler, ("poisson", "fixed", "shuffle"))
        choice("clip", self.clip, ("smooth", "hard"))
        choice("noise", self.noise, tuple(noises.SOURCES))
        if self.budget != "every":
            number("budget", self.budget, above=0.0)
        whole("probes", self.probes)
        if self.micro_batch is not None:
            whole("micro_batch", self.micro_batch)


class PrivateSGD:
    """A private learner whose ledger says how well each training record is protected.

    Args:
        model: any torch model that treats records alone; it is trained in place.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs, targets: the training data, tensors (or a tuple or dictionary of them) with one row per record.
        settings: the run's Settings.
        optimizer: parameters → torch optimizer; default SGD with the settings' lr, momentum and weight_decay.
        Whatever it does
            with the noisy gradient is post-processing.
        schedule: optimizer → learning-rate scheduler, stepped once a step.
        initialise: called on the model before each run of `repeat`; default: every module's own reset_parameters.
        private: the private part of a record, as in `step_information`.
        diagonal, spectral, feature_scale: what else the ledger keeps, as in FisherAccountant.
        checkpoint: a folder for checkpoints; None for none. every: steps between two.
        evaluate: model → dictionary of numbers, called every `evaluate_every` steps and at the end.
        progress: show a progress bar, if output is a terminal.
        check: check model and data before training starts.

    Guarantee: the released noisy sums are T adaptive steps of the Gaussian mechanism named by the settings
    (`mechanism` of the ledger's account); the divisor qN does not depend on who took part.
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
        private: Any = None,
        diagonal: Any = "none",
        spectral: bool = False,
        feature_scale: Any = 1.0,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        evaluate_every: int = 0,
        progress: bool = True,
        check: bool = True,
    ) -> None:
        self.model, self.loss_fn, self.inputs, self.targets, self.settings = model, loss_fn, inputs, targets, settings
        self.records = _records(inputs, targets)
        self.sampler = make_sampler(settings.sampler, self.records, settings.sample_rate)
        self.device = next(model.parameters()).device
        self.seed = noises.new_seed() if settings.seed is None else int(settings.seed)
        self.private, self.diagonal, self.spectral, self.feature_scale = private, diagonal, spectral, feature_scale
        self.make_optimizer, self.make_schedule = optimizer or self._sgd, schedule
        self.initialise = initialise or reset_parameters
        self.folder, self.every = checkpoint, whole("every", every)
        self.evaluate, self.evaluate_every = evaluate, whole("evaluate_every", evaluate_every, at_least=0)
        self.progress = progress
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.params:
            raise InputError("model", "must have a parameter that requires grad", type(model).__name__)
        if check:
            few = tree_map(lambda t: t[: min(3, self.records)].to(self.device), (inputs, targets))
            check_batch(model, loss_fn, *few)
        self.features = self._count_features()
        self.accountant: FisherAccountant | None = None
        self.history: list[dict[str, float]] = []
        self.run, self.step, self.steps = 0, 0, 0
        self._turn = 0
        self._data: str | None = None
        self._restart()

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
        seed: int | None = None,
        **options: Any,
    ) -> PrivateSGD:
        """Algorithm 1 as the paper has it: fixed-size batches, smooth clip, all steps measured, κ, δ split over steps.

        The ledger also keeps the fixed-size factor, which is proved; κ is for comparison."""
        settings = Settings(
            noise_multiplier,
            max_grad_norm,
            whole("batch_size", batch_size) / _records(inputs, targets),
            sampler="fixed",
            lr=lr,
            momentum=momentum,
            rules=("paper", "fixed"),
            budget="every",
            seed=seed,
        )
        return cls(model, loss_fn, inputs, targets, settings, **options)

    # --- training ----------------------------------------------------------------------

    def fit(self, steps: int | None = None, *, epochs: float | None = None) -> PrivateSGD:
        """Train one run of so many steps, or epochs of 1/q steps; goes on from the checkpoint folder's last good
        state."""
        self._open(self._length(steps, epochs))
        if self.run > 0:
            raise InputError("runs", "are done with repeat: this folder holds several", self.run)
        self._train_run()
        return self

    def repeat(self, runs: int, steps: int | None = None, *, epochs: float | None = None) -> PrivateSGD:
        """Train `runs` independent runs, each from fresh parameters, and average their ledgers; resumable run by
        run."""
        count = whole("runs", runs)
        self._open(self._length(steps, epochs))
        while self.run < count:
            if self.step == 0:
                with _seeded(self._run_seed("initial")):
                    self.initialise(self.model)
                self._restart()
            self._train_run()
            if self.run + 1 == count:
                break
            self.run, self.step = self.run + 1, 0
        return self

    def _train_run(self) -> None:
        if self.step >= self.steps:
            return
        with _progress_bar(self.steps, self.step, self.progress, f"run {self.run + 1}") as advance:
            while self.step < self.steps:
                self._train_step()
                advance(1)
                due = self.evaluate_every and self.step % self.evaluate_every == 0
                if self.evaluate is not None and (due or self.step == self.steps):
                    self.history.append({"run": self.run, "step": self.step, **self.evaluate(self.model)})
                if self.step == self.steps and self.accountant is not None:
                    self.accountant.finish_run()
                if self.folder is not None and (self.step % self.every == 0 or self.step == self.steps):
                    self._save()

    def _train_step(self) -> None:
        s, seed = self.settings, self._run_seed("run")
        chosen = self.sampler.batch(seed, self.step)
        self._measure_groups(seed)
        total = self._gradient_sum(chosen, seed)
        flat = torch.cat([total[name].flatten() for name in self.params])
        if not bool(torch.isfinite(flat).all()):
            self._explain(chosen)
        flat = flat + s.noise_multiplier * s.max_grad_norm * noises.draw(
            s.noise, seed, self.step, flat.numel(), flat.device
        )
        flat = flat / (s.sample_rate * self.records if s.sampler == "poisson" else max(len(chosen), 1))
        pieces = flat.split([p.numel() for p in self.params.values()])
        for p, piece in zip(self.params.values(), pieces, strict=True):
            p.grad = piece.reshape(p.shape).to(p.dtype)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.step += 1

    def _gradient_sum(self, chosen: Tensor, seed: int) -> dict[str, Tensor]:
        if len(chosen) == 0:
            return {name: torch.zeros_like(p) for name, p in self.params.items()}
        if self.accountant is not None and self.settings.budget == "every":
            found = self._information(chosen, seed, 0)
            self.accountant.add(chosen, found)
            return found.gradient_sum
        s = self.settings
        return clipped_gradient_sum(
            self.model,
            self.loss_fn,
            *self._rows(chosen),
            max_grad_norm=s.max_grad_norm,
            clip=s.clip,
            micro_batch=s.micro_batch,
        ).gradient_sum

    def _measure_groups(self, seed: int) -> None:
        """Measure the records whose turn it is, at the parameters before this step."""
        if self.accountant is None or self.settings.budget == "every":
            return
        for k, group in enumerate(self.plan.at(seed, self.step)):
            self.accountant.add(group, self._information(group, seed, k + 1), weight=self.plan.weight(self.step))

    def _information(self, indices: Tensor, seed: int, part: int) -> StepInformation:
        s = self.settings
        probe = stream(seed, "probe", 4096 * self.step + part, self.device)
        found = step_information(
            self.model,
            self.loss_fn,
            *self._rows(indices),
            max_grad_norm=s.max_grad_norm,
            noise_multiplier=s.noise_multiplier,
            clip=s.clip,
            probes=s.probes,
            diagonal=self.diagonal_kept,
            spectral=self.spectral,
            error="bound",
            generator=probe,
            micro_batch=s.micro_batch,
            private=self.private,
        )
        if not bool(torch.isfinite(found.trace).all()):
            self._explain(indices)
        return found

    def _explain(self, indices: Tensor) -> None:
        """Raise an error that names the record with which the numbers left the reals."""
        with torch.no_grad():
            losses = self.loss_fn(_call(self.model, self._rows(indices)[0]), self._rows(indices)[1])
        bad = torch.nonzero(~torch.isfinite(losses.detach().cpu())).flatten()
        saved = "" if self.folder is None else f"; the last good state is in {os.fspath(self.folder)}"
        if len(bad):
            record, value = int(indices[bad[0]]), float(losses[bad[0]])
            raise TrainingError(f"step {self.step}: record {record} has loss {value}{saved}")
        large = max(float(p.detach().abs().max()) for p in self.params.values())
        why = f"a gradient is not finite (largest parameter {large:.3g}): the model has exploded; lower lr"
        raise TrainingError(f"step {self.step}: {why}{saved}")

    # --- state ---------------------------------------------------------------------------

    def _length(self, steps: int | None, epochs: float | None) -> int:
        if (steps is None) == (epochs is None):
            raise InputError("steps", "or epochs must be given, and not both", steps)
        if steps is not None:
            return whole("steps", steps)
        return max(1, round(number("epochs", epochs, above=0.0) / self.sampler.sample_rate))

    def _open(self, steps: int) -> None:
        """Make the ledger for runs of this length, and go on from the checkpoint folder if it has a good state."""
        if self.steps and steps != self.steps:
            raise InputError("steps", f"must stay {self.steps}: the ledger is for runs of that length", steps)
        if self.steps:
            return
        s = self.settings
        self.steps = steps
        if s.rules is not None:
            rate = self.sampler.sample_rate
            account = Account(
                self.records,
                self.features,
                steps,
                s.noise_multiplier,
                s.max_grad_norm,
                rate,
                s.sampler,
                s.clip,
                s.rules,
            )
            self.accountant = FisherAccountant(account, diagonal=self.diagonal, spectral=self.spectral,
                                               feature_scale=self.feature_scale, device=self.device)  # fmt: skip
            if s.budget != "every":
                group = max(1, min(self.records, round(rate * self.records)))
                self.plan = MeasureBlocks(self.records, rate, steps, float(s.budget), group)
        if self.folder is not None:
            self._resume()

    @property
    def diagonal_kept(self) -> bool:
        return not (isinstance(self.diagonal, str) and self.diagonal == "none")

    def _restart(self) -> None:
        self.optimizer = self.make_optimizer(list(self.params.values()))
        self.schedule = None if self.make_schedule is None else self.make_schedule(self.optimizer)

    def _sgd(self, parameters: Any) -> torch.optim.Optimizer:
        s = self.settings
        return torch.optim.SGD(parameters, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)

    def _run_seed(self, purpose: str) -> int:
        words = np.random.SeedSequence((self.seed, 0 if purpose == "run" else 1, self.run)).generate_state(2, np.uint64)
        return int(words[0]) | int(words[1]) << 64

    def _belongs(self) -> dict[str, Any]:
        if self._data is None:
            leaves = {
                f"{i}": t for i, t in enumerate(tree_leaves((self.inputs, self.targets))) if isinstance(t, Tensor)
            }
            self._data = checkpoints.digest(leaves)
        shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        asked = {**asdict(self.settings), "steps": self.steps, "optimizer": type(self.optimizer).__name__}
        asked.pop("seed")
        asked["rules"] = None if self.settings.rules is None else list(self.settings.rules)
        return {"configuration": asked, "parameters": shapes, "data": {"digest": self._data, "records": self.records}}

    def _save(self) -> None:
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        state = self.optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for key, values in state["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{key}/{name}"] = value
                else:
                    plain.setdefault(str(key), {})[name] = value
        if self.accountant is not None:
            tensors |= {f"ledger/{name}": value for name, value in self.accountant.state().items()}
        bad = [
            name
            for name, value in tensors.items()
            if value.is_floating_point() and not bool(torch.isfinite(value).all())
        ]
        if bad:
            raise TrainingError(f"step {self.step}: {bad[0]} is not finite: nothing was saved over the last good state")
        facts = {
            **self._belongs(),
            "seed": self.seed,
            "run": self.run,
            "step": self.step,
            "order": self.run * (self.steps + 1) + self.step,
            "runs": 0 if self.accountant is None else self.accountant.runs,
            "history": self.history,
            "optimizer_plain": plain,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
            "schedule": None if self.schedule is None else _plain(self.schedule.state_dict()),
        }
        assert self.folder is not None
        checkpoints.save(self.folder, checkpoints.Checkpoint(tensors, facts), self._turn + 1)
        self._turn += 1

    def _resume(self) -> None:
        assert self.folder is not None
        belongs = self._belongs()
        if self.settings.seed is not None:
            belongs["seed"] = self.seed
        found = checkpoints.load(self.folder, belongs)
        if found is None:
            return
        saved, self._turn = found
        facts = saved.facts
        model = {
            name.removeprefix("model/"): value for name, value in saved.tensors.items() if name.startswith("model/")
        }
        self.model.load_state_dict(model)
        self.seed, self.run, self.step, self.history = (
            facts["seed"],
            facts["run"],
            facts["step"],
            list(facts["history"]),
        )
        state: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in facts["optimizer_plain"].items()}
        for name, value in saved.tensors.items():
            if name.startswith("optimizer/"):
                _, key, entry = name.split("/")
                state.setdefault(int(key), {})[entry] = value.clone()
        own = self.optimizer.state_dict()["param_groups"]
        groups = [{**mine, **theirs} for mine, theirs in zip(own, facts["groups"], strict=True)]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if self.schedule is not None:
            self.schedule.load_state_dict(facts["schedule"])
        if self.accountant is not None:
            ledger = {
                name.removeprefix("ledger/"): v for name, v in saved.tensors.items() if name.startswith("ledger/")
            }
            self.accountant.restore(ledger, facts["runs"])

    # --- data -------------------------------------------------------------------------------

    def _rows(self, indices: Tensor) -> tuple[Any, Any]:
        def pick(t: Any) -> Any:
            return t[indices.to(t.device)].to(self.device) if isinstance(t, Tensor) else t

        return tree_map(pick, self.inputs), tree_map(pick, self.targets)

    def _count_features(self) -> int:
        from .fisher.private import Problem, as_private, private_part

        private = as_private(self.private)
        one = private_part(Problem(self.model, self.loss_fn, private), *self._rows(torch.tensor([0])))
        if private.features is not None:
            chosen = private.features
            return int(chosen.sum()) if chosen.dtype == torch.bool else int(chosen.unique().numel())
        return one[0].numel()


def reset_parameters(model: nn.Module) -> None:
    """Every module's own reset_parameters; an error names a parameter that belongs to none."""
    reset: set[int] = set()
    for module in model.modules():
        own = getattr(module, "reset_parameters", None)
        if callable(own):
            own()
            reset |= {id(p) for p in module.parameters(recurse=False)}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in reset:
            raise InputError("initialise", "must be given: no module resets the parameter", name)


def _records(inputs: Any, targets: Any) -> int:
    sizes = {len(t) for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor) and t.dim() > 0}
    if len(sizes) != 1:
        raise InputError("inputs", "and targets must have one row for each record", sorted(sizes))
    return sizes.pop()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of a scheduler's state (bound methods and the optimizer are not state)."""
    kept = (bool, int, float, str, type(None), list)
    return {k: v for k, v in state.items() if isinstance(v, kept)}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        torch.manual_seed(seed % 2**63)
        yield


@contextmanager
def _progress_bar(total: int, done: int, wanted: bool, what: str) -> Iterator[Callable[[int], None]]:
    if not wanted or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda n: progress.advance(task, n)


__all__ = ["PrivateSGD", "Settings", "TrainingError", "reset_parameters"]
