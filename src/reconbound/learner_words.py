"""What a learner says of calls that do not do what their caller may think, and what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._check import InputError
from .settings import Settings

if TYPE_CHECKING:
    from .sgd import PrivateSGD

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
    """The learner in one line: public facts, no seed and nothing about single records."""
    s, many = learner.settings, learner.kind == "repeat"
    where = f"step {learner.step:,} of {learner.steps:,}{f' of run {learner.run + 1}' if many else ''}"
    return (
        f"PrivateSGD({type(learner.model).__name__}, {learner.records:,} records of {learner.features:,} features, "
        f"noise_multiplier={s.noise_multiplier:g}, max_grad_norm={s.max_grad_norm:g}, "
        f"sample_rate={s.sample_rate:.4g}, {where if learner.steps else 'not trained yet'})"
    )


def check_settings(given: Any) -> None:
    """An error where the settings are not Settings, a dictionary say."""
    if not isinstance(given, Settings):
        what = "must be a Settings(noise_multiplier=..., max_grad_norm=..., sample_rate=..., ...)"
        raise InputError("settings", what, f"a {type(given).__name__}")


def done_already(kind: str, steps: int) -> str:
    """That a call to `kind` trains nothing."""
    return (
        f"{kind} has done its {steps} steps already and trains nothing more: to train longer make a new PrivateSGD "
        "(with a checkpoint folder of its own) and give it all the steps"
    )


def check_length(kind: str, length: int, begun: str, steps: int) -> None:
    """An error where another kind of training or another length is asked of a learner that has begun one."""
    if steps and kind != begun:
        why = f"cannot follow {begun} on one learner, whose ledger is for {begun}: {_ANEW}"
        raise InputError(kind, why, f"{kind}({length} steps) after {begun}({steps} steps)")
    if steps and length != steps:
        why = "which steps measure which record is planned over all steps of a run"
        raise InputError("steps", f"must stay {steps}, as {kind} began with: {why}. For others {_ANEW}", length)


def check_maker(name: str, given: Any, kind: type) -> None:
    """An error where an optimizer or a schedule is given in place of a function that makes one."""
    if isinstance(given, kind):
        what = "must be a function that makes one (lambda parameters: Adam(parameters)): each run begins with a new one"
        raise InputError(name, what, f"a {type(given).__name__} that is made already")
