"""The sandwich: for each of some records the floors that an audit states, and real attacks on fresh trainings.

Both games of the paper's figure 1 are played. Membership: trainings with the record and without it, told apart by the
ratio of likelihoods. Reconstruction: trainings with the record, and with a public value in its place, from which an
attacker rebuilds it. The attacker knows all other records and who of them took part, sees every step, and does not know
whether the record took part. An attack that beats what binds it shows a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from scipy.stats import norm, t
from torch import Tensor

from reconbound._internal.checks import InputError, whole
from reconbound._internal.rng import derive, numbers_of
from reconbound.attacks.knowledge import SGDKnowledge, transcript_of
from reconbound.attacks.limits import (
    Distinguished,
    Reconstruction,
    chance_limits,
    distinguish,
    mean_limits,
    reconstruction_of,
)
from reconbound.attacks.private_sgd import DIRECTIONS, LikeliestRecord, with_expectation
from reconbound.attacks.trainings import Changed, Training, train_many
from reconbound.bounds import success_from_kl, two_point_floor
from reconbound.training.trajectory import Trajectory

#: Of one record: as it is, left out, and with the reference in its place.
WORLDS = ("real", "removed", "replaced")
#: Floats in the Jacobians of one training: above it no likeliest record is sought, and the prior has fewer directions.
FLOATS = 50_000_000
#: Answers of each record that are kept, records of its class that a prior needs, steps of a search.
EXAMPLES, ALIKE, ROUNDS = 3, 10, 30
#: Trainings in which the Fisher information is computed.
INFORMED = 10
#: Standard errors by which a variance must be below a floor to be a fault; more where they are from few trainings.
BEYOND = 4.0
#: An answer counts as close where its error is at most this share of that of a guess, in squares.
CLOSE = 0.25


@dataclass(frozen=True)
class Stated:
    """Holds what an audit states of one record; None where it states nothing.

    Attributes:
        floor: 1/dFIL, under the variance of every unbiased attacker, per feature.
        removed: D towards the world without the record, in nats.
        replaced: D towards the world with the reference in its place.
    """

    floor: float | None = None
    removed: float | None = None
    replaced: float | None = None


@dataclass(frozen=True, repr=False)
class Target:
    """A record that is attacked.

    Attributes:
        record: its index.
        stated: what the audit states of it.
        group: why it was chosen.
    """

    record: int
    stated: Stated = Stated()
    group: str = ""


@dataclass(frozen=True, repr=False)
class Sandwich:
    """Floors and attacks of one record; squared errors per feature, in input units. Confidential.

    Attributes:
        target: the record, and what is stated of it.
        truth: its private features, (d,).
        reference: the public values in their place in the other world, (d,).
        membership: what trainings with and without the record prove; None where that was not tried.
        replaced: what trainings with the record and with the reference prove; None likewise.
        nats: D in these trainings, towards the world without the record and that with the reference, with standard
            errors: ((D, error), (D, error)).
        floor: 1/dFIL in INFORMED of these trainings; None where the model has no derivative or is too large.
        cramer_rao: Tr(I⁻¹)/d in the same ones, infinite where I is singular; None likewise.
        likeliest: the likelihood attacker, who has no outside knowledge; None likewise, and where it could not do
            better than a guess.
        probable: the attacker who expects a record like the others (MAP); None likewise.
        guess: squared error of what that attacker expects before any training; None likewise.
        both: of an attacker who knows that the record is itself or the reference, and answers with the mean of what it
            may be: the mean of its squared errors at both, and the confidence limits of that; None likewise.
        close: trainings in which `probable` was close to the record, with the record and with the reference.
        examples: first answers of `probable`, (EXAMPLES, d).
        confidence: of all limits of this record, each kind by itself.
    """

    target: Target
    truth: np.ndarray
    reference: np.ndarray
    membership: Distinguished | None
    replaced: Distinguished | None
    nats: tuple[tuple[float, float], tuple[float, float]]
    floor: float | None
    cramer_rao: float | None
    likeliest: Reconstruction | None
    probable: Reconstruction | None
    guess: float | None
    both: tuple[float, float, float] | None
    close: tuple[int, int] | None
    examples: np.ndarray | None
    confidence: float = 0.95

    @property
    def two_point(self) -> float | None:
        """Returns the floor of the mean error at the record and at the reference, of any attacker: (‖Δ‖²/4d) e^{−D}."""
        if self.target.stated.replaced is None:
            return None
        gap = float(np.sqrt(np.square(self.truth - self.reference).mean()))
        return float(two_point_floor(gap, self.target.stated.replaced).value)

    @property
    def close_chances(self) -> tuple[tuple[float, float], tuple[float, float], float | None] | None:
        """Returns limits of the chance to be close, with the record and without, and p_max at the upper one without."""
        if self.close is None or self.probable is None:
            return None
        here, there = (chance_limits(count, self.probable.trials, self.confidence) for count in self.close)
        stated = self.target.stated.replaced
        return here, there, None if stated is None else float(success_from_kl(there[1], stated))

    @property
    def faults(self) -> list[str]:
        """Returns what an attack beat that should have bound it; empty where floors and attacks agree."""
        stated, found = self.target.stated, []
        for tried, nats, what in (
            (self.membership, stated.removed, "leaving the record out"),
            (self.replaced, stated.replaced, "putting the reference in its place"),
        ):
            if tried is not None and nats is not None and tried.nats > nats:
                found.append(f"the attack learns at least {tried.nats:.3g} nats of {what}; {nats:.3g} are stated")
        close = self.close_chances
        if close is not None and close[2] is not None and close[0][0] > close[2]:
            found.append(f"the attack is close with a chance of at least {close[0][0]:.3g}; p_max is {close[2]:.3g}")
        if self.both is not None and self.two_point is not None and self.both[2] < self.two_point:
            found.append(
                f"the mean error at two values is at most {self.both[2]:.3g}; the floor is {self.two_point:.3g}"
            )
        likeliest, floor = self.likeliest, stated.floor
        if likeliest is None or floor is None or likeliest.biased:
            return found
        beyond = float(t.isf(norm.sf(BEYOND), likeliest.trials - 1))  # as rare as BEYOND of a known standard error
        if likeliest.variance + beyond * likeliest.variance_error < floor:
            what = f"the likeliest record varies by {likeliest.variance:.3g} without visible bias"
            found.append(f"{what}; the floor is {floor:.3g}")
        return found


@dataclass(frozen=True)
class Plan:
    """Says how records are attacked.

    Attributes:
        trials: trainings in each world, at least 2; on average, where records are attacked together.
        seed: of the trainings.
        reference: public values in the place of a record's private features in the other world, (d,).
        private: flat indices of the private features; None for all.
        rebuild: trainings in each world from which records are rebuilt, which takes most of the time and needs a model
            with derivatives; None: all; 0: none; otherwise at least 2.
        inside: the lowest and the largest value of a feature: answers of the informed attacker are moved there.
        confidence: of the limits of each record.
        together: whether every training draws the world of each attacked record anew; see `attack_records`.
        advance: called with a number of finished pieces of work; see `pieces_of`.
    """

    trials: int
    seed: int
    reference: Tensor
    private: Tensor | None = None
    rebuild: int | None = None
    inside: tuple[float, float] = (0.0, 1.0)
    confidence: float = 0.95
    together: bool = False
    advance: Callable[[int], None] = lambda n: None


def pieces_of(trials: int, records: int) -> int:
    """Returns the pieces of work of `attack_records`: one for each training, world and record."""
    return 3 * trials * records


def attack_records(training: Training, targets: Sequence[Target], plan: Plan) -> Iterator[Sandwich]:
    """Attacks records in fresh trainings: in the real world, in that without each, and in that with a reference.

    One record after the other: the trainings in the real world are the same for all records and done at once; the
    others are each record's own, done as the results are asked for. k records take trials × (1 + 2k) trainings.

    Together: trials × 3 trainings for any number of records. Each draws the world of each record, independently and
    with chance 1/3 each. The attacker of a record knows the worlds of all others. For whoever looks at one record the
    trainings are independent and equally distributed in each of its worlds, so that all limits hold. But the other
    records are not exactly those of the data: the attacked ones among them may be left out or replaced. What is stated
    is about the data as they are, so together is for few records among many; `Sandwich.nats` is right in any case.

    Args:
        training: what is trained.
        targets: the records, with what is stated of them.
        plan: how they are attacked.

    Yields:
        What was found of each record, in their order.
    """
    whole("trials", plan.trials, at_least=2)
    if plan.rebuild is not None and plan.rebuild != 0:
        whole("rebuild", plan.rebuild, at_least=2)
    chosen = [target.record for target in targets]
    if not chosen or min(chosen) < 0 or max(chosen) >= len(training.inputs):
        raise InputError("records", f"must be some indices from 0 to {len(training.inputs) - 1}", chosen[:5])
    attackers = [_Attacker(training, target, plan) for target in targets]
    return _attacked_together(training, attackers, plan) if plan.together else _attacked(training, attackers, plan)


def _attacked(training: Training, attackers: Sequence[_Attacker], plan: Plan) -> Iterator[Sandwich]:
    """Attacks one record after the other."""
    chosen = [one.target.record for one in attackers]
    for part in train_many(training, plan.trials, derive(plan.seed, "real"), records=chosen):
        for one in attackers:
            one.attack_trainings(part, "real")
    for one in attackers:
        i = one.target.record
        for world in WORLDS[1:]:
            seed = derive(plan.seed, world, i)
            for part in train_many(training, plan.trials, seed, records=[i], world=one.changed(world)):
                one.attack_trainings(part, world)
        yield one.finish()


def _attacked_together(training: Training, attackers: Sequence[_Attacker], plan: Plan) -> Iterator[Sandwich]:
    """Attacks all records in the same trainings, in each of which every record is in a world of its own."""
    chosen, number, at = [one.target.record for one in attackers], 3 * plan.trials, 0
    drawn = torch.from_numpy(numbers_of(plan.seed, "worlds", 0).integers(3, size=(number, len(chosen))))
    if len(set(chosen)) < len(chosen):
        raise InputError("records", "must be different ones, to be attacked together", chosen)
    if min(int((drawn == world).sum(0).min()) for world in range(3)) < 2:
        raise InputError("trials", "must be larger: some record is in one of its worlds less than twice", plan.trials)
    drawn = drawn.to(training.inputs.device)
    worlds = [
        replace(one.changed(world), where=drawn[:, k] == WORLDS.index(world))
        for k, one in enumerate(attackers)
        for world in WORLDS[1:]
    ]
    for part in train_many(training, number, derive(plan.seed, "together"), records=chosen, world=worlds):
        own = drawn[at : at + len(part.params)]
        at += len(own)
        for k, one in enumerate(attackers):
            for world in WORLDS:
                one.attack_trainings(part.of(own[:, k] == WORLDS.index(world)), world)
            if at == number:
                yield one.finish()


class _Attacker:
    """Collects what an attacker finds about one record in one world after the other."""

    def __init__(self, training: Training, target: Target, plan: Plan) -> None:
        self.training, self.target, self.plan, i = training, target, plan, target.record
        x, y = training.inputs, training.targets
        base = SGDKnowledge(
            training.model, training.loss_fn, training.settings, y[i : i + 1], x[i : i + 1], plan.private
        )
        self.truth = base.private_part(x[i : i + 1])[0]
        self.reference = plan.reference.to(self.truth)
        if self.reference.shape != self.truth.shape:
            raise InputError("reference", f"must have {len(self.truth)} numbers", tuple(self.reference.shape))
        others = torch.arange(len(x), device=x.device) != i
        alike = others & (y == y[i]) if not y.is_floating_point() else others
        pool = base.private_part(x[alike if int(alike.sum()) >= ALIKE else others])
        each = training.steps * training.size
        columns = min(DIRECTIONS, base.features, max(2, FLOATS // each))
        self.known = base
        self.rebuild = plan.trials if plan.rebuild is None else min(plan.rebuild, plan.trials)
        if self.rebuild:
            self.known = with_expectation(base, pool, most=columns)
        self.full = self.rebuild > 0 and each * base.features <= FLOATS  # the Jacobians of all steps fit into memory
        self.scores: dict[str, list[np.ndarray]] = {}
        self.answers: dict[str, list[np.ndarray]] = {"likeliest": [], "real": [], "replaced": []}
        self.nats: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.information: list[tuple[Tensor, int]] = []

    def attack_trainings(self, part: Trajectory, world: str) -> None:
        """Attacks some trainings of a world: "real", "removed" or "replaced"."""
        known, plan = self.known, self.plan
        if not len(part.params):
            return
        truth = known.gradients_at(part.params, self.truth)  # once: most of the time goes into gradients
        other = truth if world == "removed" else known.gradients_at(part.params, self.reference)
        own = {"real": truth, "removed": None, "replaced": other}[world]
        seen = transcript_of(part, known, self.target.record, own)
        scores = known.log_ratio(seen, truth).double()
        if world != "replaced":
            self._keep(f"removed: {world}", scores)
        if world != "removed":
            self._keep(f"replaced: {world}", scores - known.log_ratio(seen, other).double())
        done = sum(len(part) for part in self.answers.get(world, ()))
        some = seen.of(slice(0, self.rebuild - done))
        if len(some) and world != "removed":
            attack = LikeliestRecord(ROUNDS, inside=plan.inside)
            self.answers[world].append(np.asarray(attack(some, known).answers))
        if world == "real":
            self.nats[0].append(known.nats(seen, truth))
            self.nats[1].append(known.nats(seen, truth, other))
            if self.full and sum(count for _, count in self.information) < INFORMED:
                few = seen.of(slice(0, INFORMED))
                self.information.append((known.information(few, self.truth).cpu(), len(few)))
            if self.full and len(some) and self.can_beat_guess:
                found = LikeliestRecord(ROUNDS)(some, known.without_prior()).answers
                self.answers["likeliest"].append(np.asarray(found))
        plan.advance(len(seen))

    @property
    def guess(self) -> float:
        """Returns the squared error per feature of what the informed attacker expects before any training."""
        return float((self.known.start - self.truth).double().square().mean())

    @cached_property
    def can_beat_guess(self) -> bool:
        """Returns whether an attacker without outside knowledge could err by less than a guess."""
        first = self.information[0][0]  # of the first trainings
        return self.guess * float(first.trace()) / len(first) >= 1

    def _keep(self, name: str, scores: Tensor) -> None:
        self.scores.setdefault(name, []).append(scores.cpu().numpy())

    def changed(self, world: str) -> Changed:
        """Returns what is changed in a world: "removed" or "replaced"."""
        i, x = self.target.record, self.training.inputs
        if world == "removed":
            return Changed(i)
        own = x[i].flatten().clone()
        own[slice(None) if self.plan.private is None else self.plan.private] = self.reference.to(x)
        return Changed(i, own.reshape(x[i : i + 1].shape))

    def finish(self) -> Sandwich:
        """Compares what was found in the three worlds."""
        plan = self.plan
        scores = {name: np.concatenate(parts) for name, parts in self.scores.items()}
        tried = {
            name: distinguish(scores[f"{name}: real"], scores[f"{name}: {name}"], confidence=plan.confidence)
            for name in ("removed", "replaced")
        }
        return Sandwich(
            target=self.target,
            truth=self.truth.double().cpu().numpy(),
            reference=self.reference.double().cpu().numpy(),
            membership=tried["removed"],
            replaced=tried["replaced"],
            nats=(_mean(self.nats[0]), _mean(self.nats[1])),
            both=self._between(scores["replaced: real"], scores["replaced: replaced"]),
            confidence=plan.confidence,
            **self._rebuilt(),
        )

    def _between(self, real: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
        """Returns the mean squared error of the best attacker who knows two values, at both, and its limits.

        It answers π z + (1 − π) z', π the chance of z given what it saw.
        """
        gap, pairs = float((self.truth - self.reference).double().square().mean()), min(len(real), len(other))
        shares = (np.square(expit(-real[:pairs])) + np.square(expit(other[:pairs]))) / 2  # of the squared gap
        low, high = mean_limits(shares, self.plan.confidence)
        return gap * float(shares.mean()), gap * low, gap * high

    def _rebuilt(self) -> dict[str, Any]:
        """Returns the fields of a Sandwich about reconstructions; None where there were none."""
        names = ("floor", "cramer_rao", "likeliest", "probable", "guess", "close", "examples")
        found: dict[str, Any] = dict.fromkeys(names)
        if not self.rebuild:
            return found
        truth = self.truth.double().cpu().numpy()
        here, there = (np.concatenate(self.answers[world]) for world in ("real", "replaced"))
        trials = min(len(here), len(there))
        here, there = here[:trials], there[:trials]
        guess = self.guess
        found |= {"probable": reconstruction_of(here, truth), "guess": guess, "examples": here[:EXAMPLES]}
        counts = [int((np.square(a - truth).mean(axis=1) <= CLOSE * guess).sum()) for a in (here, there)]
        found["close"] = (counts[0], counts[1])
        if self.full:
            if self.answers["likeliest"]:
                found["likeliest"] = reconstruction_of(np.concatenate(self.answers["likeliest"]), truth)
            trainings = sum(count for _, count in self.information)
            total = torch.stack([count * one.double() for one, count in self.information]).sum(0) / trainings
            found["floor"], found["cramer_rao"] = floors_of_information(total.numpy())
        return found


def floors_of_information(information: np.ndarray) -> tuple[float, float]:
    """Returns d/Tr I and Tr(I⁻¹)/d of a Fisher information; infinite where it is 0, or singular.

    Args:
        information: (d, d), symmetric.
    """
    values = np.linalg.eigvalsh(information)
    total = float(values.sum())
    whole = values[0] > 1e-12 * values[-1]
    return len(values) / total if total > 0 else np.inf, float((1 / values).mean()) if whole else np.inf


def _mean(parts: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the mean of some numbers and its standard error."""
    values = torch.cat(list(parts)).double().cpu()
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def with_family_confidence(plan: Plan, records: int, confidence: float = 0.95) -> Plan:
    """Returns the plan with a confidence that holds for all records together.

    Args:
        plan: how records are attacked.
        records: their number.
        confidence: of all records' limits of one kind together.
    """
    return replace(plan, confidence=1 - (1 - confidence) / whole("records", records))
