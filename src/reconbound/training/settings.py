"""The arguments of PrivateSGD: settings of a run, callbacks, and functions that are called.

They are checked here, once; the rest of the package takes them as they are. What becomes of their numbers is checked by
`FiniteChecks`: at once on a CPU, some steps later on a GPU, so that no step waits for the device. Nothing is released
or saved in between: a learner settles what is pending before it evaluates, saves or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, flag, function, plain_number, warn_user, whole
from reconbound._internal.rng import checked_seed
from reconbound.accounting.measurement_plan import Budget, checked_budget
from reconbound.accounting.spec import MechanismSpec
from reconbound.training.rows import describe_given
from reconbound.validate.model import ReconboundWarning, check_module, is_about_kinds, model_dtype

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD


@dataclass(frozen=True)
class Settings(MechanismSpec):
    """Everything that decides what a run does, apart from the model, the data and the number of steps.

    The first fields are those of MechanismSpec: noise_multiplier, max_grad_norm, sample_rate, sampler, clip, rules.

    Attributes:
        lr: learning rate of the default optimizer, torch's SGD.
        momentum: of the default optimizer.
        weight_decay: of the default optimizer.
        budget: what accounting may cost (accounting/measurement_plan.py). A number: records measured over records
            trained on, each once in a block of 1/(q·budget) steps (and once in a shorter run, which then costs more).
            "every": the batch itself at every step. ("steps", p): the batch itself at a random share p of the steps.
            With shuffled epochs a number p below 1 means ("steps", p), otherwise "every".
        probes: Gaussian probes for each measurement.
        seed: from the operating system when None. A given one makes a run repeatable and is as secret as the data:
            whoever guesses it subtracts the noise. Do not set it for a real release.
        micro_batch: records at a time, for memory; None for all.
    """

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    budget: Budget = 0.15
    probes: int = 1
    seed: int | None = field(default=None, repr=False)
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "momentum", "weight_decay"):
            object.__setattr__(self, name, plain_number(name, getattr(self, name), at_least=0.0))
        budget = checked_budget(self.budget)
        if self.sampler == "shuffle" and isinstance(budget, float):
            # within an epoch the parameters at a step depend on whether a record was seen: only batches can be measured
            budget = ("steps", budget) if budget < 1 else "every"
        object.__setattr__(self, "budget", budget)
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_seed(self.seed))
        object.__setattr__(self, "probes", whole("probes", self.probes))
        if self.micro_batch is not None:
            object.__setattr__(self, "micro_batch", whole("micro_batch", self.micro_batch))

    @classmethod
    def paper(
        cls, batch_size: int, records: int, *, noise_multiplier: float, max_grad_norm: float, lr: float, **others: Any
    ) -> Settings:
        """Returns the settings of the paper's Algorithm 1.

        Batches have a fixed size, the clip is smooth, all steps are measured, and δ of the factor κ is split over the
        steps. The ledger also keeps the fixed-size factor, which is proved. κ is kept for comparison.

        Args:
            batch_size: records in a batch.
            records: training records.
            noise_multiplier: standard deviation of the noise on the sum over max_grad_norm.
            max_grad_norm: the clip norm C.
            lr: the learning rate.
            others: other fields of Settings; momentum is 0.5 if it is not among them.
        """
        if whole("batch_size", batch_size) > whole("records", records):
            raise InputError("batch_size", f"must be at most the number of records ({records})", batch_size)
        rate = batch_size / records
        kept: dict[str, Any] = {"sampler": "fixed", "rules": ("paper", "fixed"), "budget": "every", "lr": lr}
        return cls(noise_multiplier, max_grad_norm, rate, **{"momentum": 0.5, **kept, **others})


class Callback:
    """Watches a training without changing it.

    A training that was stopped announces its last step again when it continues. A callback must return the same then.
    """

    def on_step(self, learner: PrivateSGD) -> Mapping[str, float] | None:
        """Runs at the start of a run and after each of its steps, before the state is saved.

        Args:
            learner: at this step (`learner.run`, `learner.step`); a callback must not change it.

        Returns:
            Numbers for `learner.history` at this step, or None.
        """

    def on_run_end(self, learner: PrivateSGD) -> None:
        """Runs after the last step of a run, after `on_step` and before the state is saved.

        Args:
            learner: at the end of the run.
        """


class Fault(RuntimeError):
    """A record or a model with which training cannot continue; `step` where it was found later than it happened."""

    step: int | None = None


def evaluate_model(evaluate: Callable[[nn.Module], Any], model: nn.Module) -> dict[str, float]:
    """Returns the numbers that a user's function computes for a model; refuses any other result.

    Args:
        evaluate: model → dictionary of numbers.
        model: the model to evaluate.
    """
    try:
        found = evaluate(model)
    except RuntimeError as reason:
        if not is_about_kinds(reason):
            raise
        why = str(reason).split("\n")[0]
        raise Fault(f"evaluate gave the model data that are not {model_dtype(model)}, as it is: {why}") from reason
    if not isinstance(found, Mapping):
        raise InputError("evaluate", "must return a dictionary of numbers, by name", describe_given(found))
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if str(name) in ("run", "step"):
            raise InputError("evaluate", "must not return a number of this name, which the history has itself", name)
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"evaluate's {name!r}", "must be one number", describe_given(value)) from None
    return numbers


def observe(learner: PrivateSGD, evaluating: bool) -> dict[str, float]:
    """Returns what evaluation and callbacks say at this step.

    Args:
        learner: at this step.
        evaluating: whether an evaluation is due.
    """
    found: list[Mapping[str, float] | None] = []
    with modes_kept(learner.model):
        if learner.evaluate is not None and evaluating:
            found.append(evaluate_model(learner.evaluate, learner.model))
        for callback in learner.callbacks:
            found.append(callback.on_step(learner))
            if learner.step == learner.steps:
                callback.on_run_end(learner)
    return {name: value for numbers in found if numbers is not None for name, value in numbers.items()}


def reset_parameters(model: nn.Module) -> None:
    """Calls reset_parameters of every module that has a trainable parameter.

    Frozen parameters and buffers (of a pretrained part) stay as they are.

    Raises:
        InputError: names a parameter that no module resets.
    """
    reset: set[int] = set()
    for module in model.modules():
        mine = list(module.parameters(recurse=False))
        if any(p.requires_grad for p in mine) and reset_module(module):
            reset |= {id(p) for p in mine}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in reset:
            raise InputError("initialise", "must be given: no module resets the parameter", name)


def reset_module(module: nn.Module) -> bool:
    """Calls the module's reset_parameters, if it has one, and puts back what is frozen. Returns whether it has one."""
    own = getattr(module, "reset_parameters", None)
    if not callable(own):
        return False
    mine = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    kept = [(t, t.detach().clone()) for t in mine if not t.requires_grad]
    own()
    with torch.no_grad():
        for t, before in kept:
            t.copy_(before)
    return True


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the training and evaluation modes of all modules at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:  # setting it takes long
                module.training = training


_TAKES = {
    "loss_fn": "outputs, targets → one loss per record",
    "initialise": "model → nothing",
    "evaluate": "model → a dictionary of numbers",
    "optimizer": "parameters → a new optimizer, for each run",
    "schedule": "optimizer → a new schedule, for each run",
}


def check_arguments(
    model: Any, settings: Any, callbacks: Any, functions: Mapping[str, Any], flags: Mapping[str, Any]
) -> None:
    """Refuses arguments of PrivateSGD that are of another type.

    Args:
        model: must be a module.
        settings: must be Settings.
        callbacks: must be a list of callbacks.
        functions: by name; None where one was left out.
        flags: by name.
    """
    if not isinstance(settings, Settings):
        what = "must be a Settings(noise_multiplier=..., max_grad_norm=..., sample_rate=..., ...)"
        raise InputError("settings", what, f"a {type(settings).__name__}")
    check_module(model)
    if not isinstance(callbacks, list | tuple) or not all(isinstance(c, Callback) for c in callbacks):
        what = "must be a list of reconbound.training.settings.Callback"
        raise InputError("callbacks", what, f"{callbacks!r}"[:200])
    for name, value in functions.items():
        if value is not None or name == "loss_fn":
            function(name, value, _TAKES[name])
    for name, value in flags.items():
        flag(name, value)


def make_part(name: str, maker: Callable[[Any], Any], given: Any) -> Any:
    """Returns the optimizer or the schedule that a user's function creates; refuses any other result.

    Args:
        name: optimizer or schedule.
        maker: the function.
        given: the function's argument.
    """
    try:
        part = maker(given)
    except (TypeError, AttributeError) as error:
        raise InputError(name, f"must be a function that makes one ({error})", f"{maker!r}"[:200]) from error
    needed = {"optimizer": ("param_groups", "step", "state_dict"), "schedule": ("step", "state_dict")}[name]
    if not all(hasattr(part, attribute) for attribute in needed):
        raise InputError(name, f"must be a function that returns one of torch's {name}s", f"{part!r}"[:200])
    return part


def set_gradients(params: Mapping[str, Tensor], flat: Tensor) -> None:
    """Sets the gradient of each parameter from all of them in one vector, in float64, rounded once.

    Args:
        params: by name.
        flat: in the order of `params`.
    """
    kinds = {p.dtype for p in params.values()}
    flat = flat.to(kinds.pop()) if len(kinds) == 1 else flat
    for p, piece in zip(params.values(), flat.split([p.numel() for p in params.values()]), strict=True):
        p.grad = piece.view(p.shape).to(p.dtype)


def check_length(kind: str, length: int, begun: str, steps: int) -> None:
    """Refuses another kind of training or another length than a learner has begun with.

    Args:
        kind: the training that is asked for, "fit" or "repeat".
        length: its number of steps.
        begun: the training that was begun.
        steps: the number of steps that was begun; 0 for none.
    """
    anew = "make a new PrivateSGD, with a checkpoint folder of its own"
    if steps and kind != begun:
        why = f"cannot follow {begun} on one learner, whose ledger is for {begun}: {anew}"
        raise InputError(kind, why, f"{kind}({length} steps) after {begun}({steps} steps)")
    if steps and length != steps:
        why = "which steps measure which record is planned over all steps of a run"
        raise InputError("steps", f"must stay {steps}, as {kind} began with: {why}. For others {anew}", length)


def warn_of_end(kind: str, steps: int) -> None:
    """Warns that a training has ended, and says how to train longer.

    Args:
        kind: "fit" or "repeat".
        steps: of one run.
    """
    warn_user(
        f"{kind} has done its {steps} steps already and trains nothing more: to train longer make a new PrivateSGD "
        "(with a checkpoint folder of its own) and give it all the steps",
        ReconboundWarning,
    )


def warn_of_fresh_parameters() -> None:
    """Warns that `repeat` does not start from the parameters that the model was given."""
    warn_user(
        "repeat begins each run from fresh parameters: those that the model was given are lost. To start from them, "
        "give PrivateSGD initialise=lambda m: m.load_state_dict(start)",
        ReconboundWarning,
    )


#: Steps between two looks at a GPU's results.
STEPS = 64


class FiniteChecks:
    """Keeps results of checks until they are looked at.

    Args:
        steps: the number of steps after which they are looked at; 0 for at once.

    Attributes:
        step: the present step, named by the errors that are found later.
    """

    def __init__(self, steps: int = 0) -> None:
        self.steps, self.step = steps, 0
        self._pending: list[tuple[int, Tensor, Callable[[], Fault]]] = []

    def add(self, finite: Tensor, explain: Callable[[], Fault]) -> None:
        """Adds a result; raises a Fault if it is looked at and is False.

        Args:
            finite: a bool of no dimension, on any device.
            explain: returns the fault that there is if it is False.
        """
        due = self.is_due
        self._pending.append((self.step, finite, explain))
        if due:
            self.settle()

    @property
    def is_due(self) -> bool:
        """Returns whether the next result that is added is looked at, with all that are pending."""
        return self.steps == 0 or (bool(self._pending) and self.step - self._pending[0][0] >= self.steps)

    def settle(self) -> None:
        """Looks at all results; raises the Fault of the first that is False, with its step."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        results = torch.stack([finite for _, finite, _ in pending]).tolist()
        for (step, _, explain), finite in zip(pending, results, strict=True):
            if not finite:
                fault = explain()
                fault.step = step
                raise fault

    def drop(self) -> None:
        """Forgets what is pending: of a state that is given up."""
        self._pending = []


def all_finite(*values: Tensor) -> Tensor:
    """Returns whether all numbers are finite, as a bool of no dimension on their device.

    Their largest size says so, found at once: on a GPU a check of each tensor by itself takes longer than a step's sum.
    """
    flat = torch.cat([value.detach().flatten() for value in values])
    if flat.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=flat.device)
    size: Tensor = torch.linalg.vector_norm(flat, float("inf"))
    return size.isfinite()


def largest_parameter(params: Mapping[str, Tensor]) -> Tensor:
    """Returns the largest absolute value of all parameters; NaN where one is."""
    norms = torch._foreach_norm([p.detach() for p in params.values()], float("inf"))
    return torch.stack([norm.double() for norm in norms]).max()
