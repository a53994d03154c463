"""What a learner says of calls that do not do what their caller may think, and what to do instead."""

from __future__ import annotations

from typing import Any

from ._check import InputError

_ANEW = "make a new PrivateSGD, with a checkpoint folder of its own"

LOST_PARAMETERS = (
    "repeat begins each run from fresh parameters: those that the model was given are lost. To start from them, give "
    "PrivateSGD initialise=lambda m: m.load_state_dict(start)"
)
NO_FIRST_RUN = (
    "the checkpoint comes from a version of reconbound that did not keep the first run's parameters: the model has "
    "those of the last run instead. Release them and no other run's"
)


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
