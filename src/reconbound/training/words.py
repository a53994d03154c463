"""Messages of a learner about calls that may not do what their caller expects, and what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from reconbound._internal.checks import InputError, function
from reconbound.training.callbacks import Callback
from reconbound.training.settings import Settings

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD

_ANEW = "make a new PrivateSGD, with a checkpoint folder of its own"

LOST_PARAMETERS = (
    "repeat begins each run from fresh parameters: those that the model was given are lost. To start from them, give "
    "PrivateSGD initialise=lambda m: m.load_state_dict(start)"
)
NO_FIRST_RUN = (
    "the checkpoint comes from a version of reconbound that did not keep the first run's parameters: the model has "
    "those of the last run instead. Release them and no other run's"
)
NO_LEDGER = (
    "this PrivateSGD has no ledger yet: call fit or repeat first, whose number of steps it is made for (what the "
    "mechanism guarantees before any training: reconbound.guarantee)"
)


def described(learner: PrivateSGD) -> str:
    """Describes the learner in one line: public facts only, no seed and nothing about single records."""
    s, many = learner.settings, learner.kind == "repeat"
    where = f"step {learner.step:,} of {learner.steps:,}{f' of run {learner.run + 1}' if many else ''}"
    return (
        f"PrivateSGD({type(learner.model).__name__}, {learner.records:,} records of {learner.features:,} features, "
        f"noise_multiplier={s.noise_multiplier:g}, max_grad_norm={s.max_grad_norm:g}, "
        f"sample_rate={s.sample_rate:.4g}, {where if learner.steps else 'not trained yet'})"
    )


def check_settings(given: Any) -> None:
    """Raises an error where the settings are not Settings, but a dictionary for example."""
    if not isinstance(given, Settings):
        what = "must be a Settings(noise_multiplier=..., max_grad_norm=..., sample_rate=..., ...)"
        raise InputError("settings", what, f"a {type(given).__name__}")


def done_already(kind: str, steps: int) -> str:
    """Returns the message that a call to `kind` trains nothing.

    Args:
        kind: "fit" or "repeat".
        steps: the number of steps done.
    """
    return (
        f"{kind} has done its {steps} steps already and trains nothing more: to train longer make a new PrivateSGD "
        "(with a checkpoint folder of its own) and give it all the steps"
    )


def check_length(kind: str, length: int, begun: str, steps: int) -> None:
    """Raises an error where a learner that has begun is asked for another kind of training or another length.

    Args:
        kind: the training that is asked for, "fit" or "repeat".
        length: its number of steps.
        begun: the training that was begun.
        steps: the number of steps that was begun; 0 for none.
    """
    if steps and kind != begun:
        why = f"cannot follow {begun} on one learner, whose ledger is for {begun}: {_ANEW}"
        raise InputError(kind, why, f"{kind}({length} steps) after {begun}({steps} steps)")
    if steps and length != steps:
        why = "which steps measure which record is planned over all steps of a run"
        raise InputError("steps", f"must stay {steps}, as {kind} began with: {why}. For others {_ANEW}", length)


def check_maker(name: str, given: Any, kind: type) -> None:
    """Raises an error where an optimizer or a schedule is given in place of a function that creates one.

    Args:
        name: optimizer or schedule.
        given: the user's argument.
        kind: the class that a maker returns.
    """
    if isinstance(given, kind):
        what = "must be a function that makes one (lambda parameters: Adam(parameters)): each run begins with a new one"
        raise InputError(name, what, f"a {type(given).__name__} that is made already")
    if given is not None:
        function(name, given, "parameters → an optimizer" if name == "optimizer" else "optimizer → a schedule")


def made(name: str, maker: Any, given: Any) -> Any:
    """Returns the optimizer or the schedule that a user's function creates; refuses any other result.

    Args:
        name: optimizer or schedule.
        maker: the function.
        given: the function's argument.
    """
    try:
        found = maker(given)
    except (TypeError, AttributeError) as reason:
        raise InputError(name, f"must be a function that makes one ({reason})", f"{maker!r}"[:200]) from reason
    needed = {"optimizer": ("param_groups", "step", "state_dict"), "schedule": ("step", "state_dict")}[name]
    if not all(hasattr(found, attribute) for attribute in needed):
        raise InputError(name, f"must be a function that returns one of torch's {name}s", f"{found!r}"[:200])
    return found


def check_functions(model: Any, loss_fn: Any, initialise: Any, evaluate: Any) -> None:
    """Refuses a model that is not a torch module, and functions that cannot be called.

    Args:
        model: the user's model.
        loss_fn: the user's loss.
        initialise: the user's function, or None.
        evaluate: the user's function, or None.
    """
    check_model(model)
    function("loss_fn", loss_fn, "outputs, targets → one loss per record")
    if initialise is not None:
        function("initialise", initialise, "model → nothing")
    if evaluate is not None:
        function("evaluate", evaluate, "model → a dictionary of numbers")


def checked_callbacks(given: Any) -> tuple[Callback, ...]:
    """Returns callbacks as a tuple; refuses any other object."""
    if not isinstance(given, list | tuple) or not all(isinstance(one, Callback) for one in given):
        raise InputError("callbacks", "must be a list of reconbound.training.callbacks.Callback", f"{given!r}"[:200])
    return tuple(given)


def check_model(model: Any) -> None:
    """Refuses an object that is not a torch module."""
    if not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch.nn.Module", f"a {type(model).__name__}")
