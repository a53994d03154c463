"""Does the audit by attacks find faults in the accountant? It plants three, one at a time, and says what was found.

    python benchmarks/planted_faults.py            a minute of one core

A linear classifier of twelve points of the plane, 16 steps, each record with chance 1/2 in a batch. PrivateSGD keeps
its ledger, with the fault in its accounting; the trainings themselves are right. Then `attack_records` trains afresh
and holds its attacks against what the ledger states of one number of one record, whose gradient grows with it:

noise: the accountant takes the noise to be four times as large as it is.
clip slope: the accountant takes the clip factor to be constant, c in place of c + c'n along the gradient.
halved: the ledger says half of all information and half of all divergences.

At small noise an attack that has no outside knowledge must meet the floor of a single number, 1/I: a variance below it
shows that too little is accounted for, one above it by more than a quarter that too much is. At larger noise the
likelihood ratio must learn what the ledger says, D nats. Each is compared at four standard errors, beside `faults`, the
rigorous comparisons that every `reconbound attack` makes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from reconbound import PrivateSGD, Settings
from reconbound.accounting.spec import Account
from reconbound.attacks.sandwich import Plan, Sandwich, Stated, Target, attack_records
from reconbound.attacks.trainings import Training
from reconbound.fisher import step_information
from reconbound.fisher.clipping import Clipping
from reconbound.fisher.worlds import Replacement

FAULTS = ("none", "noise", "clip slope", "halved")
#: Noise multipliers: for the floor, and for the divergences.
SMALL, LARGE = 0.02, 0.5
RECORD, STEPS, RUNS, TRIALS, TIGHT, ERRORS = 3, 16, 20, 200, 1.25, 4.0
PRIVATE, GREY = [0], 0.5


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def problem(noise: float) -> Training:
    """The training; the gradient of record 3 is many times the clip norm, and grows with its first number."""
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(12, 2, generator=generator, dtype=torch.float64)
    x[RECORD] = torch.tensor([3.0, 0.2], dtype=torch.float64)
    y = torch.arange(12) % 2
    y[RECORD] = 0
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Linear(2, 2).double()
    settings = Settings(noise, 0.05, 0.5, lr=0.3, budget="every", rules=("exact",), seed=2**100 + 1)
    return Training(model, losses, x, y, settings, STEPS)


class ConstantFactor(Clipping):
    """The clip as an accountant takes it that forgets c'."""

    @property
    def radial(self) -> Tensor:  # type: ignore[override]
        """Returns c, as if it did not depend on the gradient."""
        return self.factor


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plants a fault in PrivateSGD's accounting for the block; "halved" is planted in what the ledger says."""
    louder = property(lambda account: 4 * account.noise_multiplier * account.max_grad_norm)

    def informed(*given: Any, **options: Any) -> Any:
        found = step_information(*given, **options)
        return replace(found, across=found.across / 16, along=found.along / 16)

    if fault == "noise":
        with (
            mock.patch.object(Account, "noise", louder, create=True),
            mock.patch("reconbound.training.step.fisher.step_information", informed),
        ):
            yield
    elif fault == "clip slope":
        with mock.patch("reconbound.fisher.step.Clipping", ConstantFactor):
            yield
    else:
        yield


def stated_of(training: Training, fault: str) -> tuple[Stated, float]:
    """What PrivateSGD's ledger states of the record, with a fault in it, and the standard error of D."""
    start = {name: value.clone() for name, value in training.model.state_dict().items()}
    keep: Callable[[nn.Module], Any] = lambda model: model.load_state_dict(start)  # noqa: E731
    with planted(fault):
        learner = PrivateSGD(
            training.model, losses, training.inputs, training.targets, training.settings, private=PRIVATE,
            worlds={"grey": Replacement([GREY], PRIVATE)}, initialise=keep, progress=False, check=False,
        ).repeat(RUNS, STEPS)  # fmt: skip
        ledger = learner.accountant
        assert ledger is not None
        dfil = float(ledger.dfil()[RECORD])
        nats = [float(ledger.divergence(world)[RECORD]) for world in ("removed", "grey")]
        error = float(ledger.divergences.estimates("removed").error[RECORD])
    keep(training.model)
    share = 0.5 if fault == "halved" else 1.0
    return Stated(1 / (share * dfil), *(share * d for d in nats)), share * error


@dataclass(frozen=True)
class Verdict:
    """What the audit says of an accountant: how far attacks are from what the ledger states, and faults found.

    Attributes:
        fault: that was planted.
        ratio: the variance of the attack at small noise over the stated floor; 1 where both are right.
        ratio_error: its standard error.
        learned: nats that the attack learned at larger noise.
        stated: nats that the ledger states.
        away: their difference in standard errors.
        faults: rigorous ones, of every `reconbound attack`.
    """

    fault: str
    ratio: float
    ratio_error: float
    learned: float
    stated: float
    away: float
    faults: tuple[str, ...]

    @property
    def found(self) -> list[str]:
        """Returns what is wrong, in words; empty for an accountant without a visible fault."""
        beyond = ERRORS * self.ratio_error
        said = ["the attack varies less than the floor"] if self.ratio + beyond < 1 else []
        said += [f"it varies by more than {TIGHT} floors"] if self.ratio - beyond > TIGHT else []
        said += ["it learns other nats than stated"] if abs(self.away) > ERRORS else []
        return [*said, *self.faults]


def examine(fault: str, trials: int = TRIALS) -> Verdict:
    """Plants a fault, and audits by attacks."""
    results: list[tuple[Sandwich, float]] = []
    for noise in (SMALL, LARGE):
        training = problem(noise)
        stated, error = stated_of(training, fault)
        plan = Plan(trials, 11, torch.tensor([GREY], dtype=torch.float64), torch.tensor(PRIVATE), inside=(0.0, 4.0))
        results.append((next(attack_records(training, [Target(RECORD, stated)], plan)), error))
    (small, _), (large, error) = results
    likeliest, floor, tried = small.likeliest, small.target.stated.floor, large.membership
    nats = large.target.stated.removed
    assert likeliest is not None
    assert floor is not None
    assert tried is not None
    assert nats is not None
    away = (tried.learned - nats) / math.hypot(tried.learned_error, error)
    ratio, spread = likeliest.variance / floor, likeliest.variance_error / floor
    return Verdict(fault, ratio, spread, tried.learned, nats, away, (*small.faults, *large.faults))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS, help="trainings of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| planted | variance over floor | learned | D stated | standard errors | found |\n" + "| --- " * 6 + "|")
    for fault in FAULTS:
        one = examine(fault, asked.trials)
        cells = [fault, f"{one.ratio:.2f} ± {one.ratio_error:.2f}", f"{one.learned:.3g}", f"{one.stated:.3g}"]
        print(f"| {' | '.join([*cells, f'{one.away:+.1f}', '; '.join(one.found) or 'nothing'])} |", flush=True)


if __name__ == "__main__":
    main()
