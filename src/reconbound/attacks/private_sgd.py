"""Attacks on one record of private SGD, from what its attacker sees of every step (knowledge.py).

The likeliest record maximises Σ_t log(1 − q + q e^{a_t}), a_t = (2⟨r_t, u_t⟩ − ‖u_t‖²)/(2σ²C²). The exact Poisson
factor is about this attacker: where its answers are not biased, their variance is at least d/Tr I per feature. One who
expects a record from a Gaussian prior takes the most probable record: biased, so that no unbiased floor binds it.
A test between candidates, or for membership, that compares likelihoods is the best there is (Neyman and Pearson).

Reconstructions are for small models only: Jacobians of every step are formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, whole
from reconbound.attacks.climb import climb
from reconbound.attacks.form import Guesses
from reconbound.attacks.knowledge import SGDKnowledge, Transcript, floats_at_once

FAR = 1e3  # answers are at most this many lengths of a record
#: Floats in the Jacobian of one step, at most.
MOST_FLOATS = 50_000_000
#: Of a prior: directions at most, and the share of the mean variance that every direction has at least.
DIRECTIONS, RIDGE = 24, 1e-2


@dataclass(frozen=True)
class LikeliestRecord:
    """Finds the likeliest record; with outside knowledge, the most probable one (MAP).

    At small noise and far from the record, no step seems to contain it. So the search first assumes larger noise, as
    large as what is left of the sums beside their noise, and then less and less.

    Attributes:
        rounds: steps of the search at most.
        inside: the lowest and the largest value that an answer may have; answers are moved there. None: anywhere.
    """

    rounds: int = 60
    inside: tuple[float, float] | None = None

    def __call__(self, released: Transcript, known: SGDKnowledge) -> Guesses:
        """Returns an answer for each training.

        Args:
            released: what the attacker saw of M trainings.
            known: what it knows of the record. Where `known.root` is given, answers are the most probable records.
        """
        check_size(released, known)
        columns = known.features if known.root is None else known.root.shape[1]
        parts = max(1, floats_at_once(released.left) // max(1, released.left[0].numel() * columns))
        found = [
            self._search(released.of(slice(at, at + parts)), known, known.start)[0]
            for at in range(0, len(released), parts)
        ]
        return Guesses(self._placed(torch.cat(found)))

    def _placed(self, answers: Tensor) -> np.ndarray:
        found = answers.double().cpu().numpy()
        return found if self.inside is None else np.clip(found, *self.inside)

    def _search(self, seen: Transcript, known: SGDKnowledge, start: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the private features found, (M, d), and −ln of their likelihood or posterior density, (M,)."""
        begin, like = start.to(seen.left), known.like
        root = torch.eye(known.features).to(begin) if known.root is None else known.root.to(begin)
        place = begin.new_zeros(len(seen), root.shape[1])
        far = FAR * max(1.0, float(like.norm()), float(begin.norm()))
        p = seen.left.shape[2]
        noise = (p + 3 * math.sqrt(2 * p)) * seen.scale**2  # what of ‖r‖² may well be noise
        scale = (seen.left.square().sum(2).amax(dim=1) - noise).clamp(min=seen.scale**2).sqrt()
        hidden = seen.present is None and seen.rate < 1
        while hidden and bool((scale > 2 * seen.scale).any()):
            place, _ = climb(partial(_posterior, seen, known, begin, root, scale), place, far=far, rounds=3)
            scale = (scale / 3).clamp(min=seen.scale)
        last = torch.full_like(scale, seen.scale)
        place, value = climb(partial(_posterior, seen, known, begin, root, last), place, far=far, rounds=self.rounds)
        return begin + place @ root.T, value


def _posterior(
    seen: Transcript, known: SGDKnowledge, begin: Tensor, root: Tensor, scale: Tensor, c: Tensor, which: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns −ln of the density at begin + R c, its negative slope and its curvature."""
    loss, slope, bend = known.likelihood(seen.of(which), begin + c @ root.T, root, scale[which])
    if known.root is None:
        return loss, slope, bend
    eye = torch.eye(c.shape[1], dtype=c.dtype, device=c.device)
    return loss + c.square().sum(1) / 2, slope - c, bend + eye


@dataclass(frozen=True)
class Inversion(LikeliestRecord):
    """Inverts single noisy gradients, as a server of federated learning could: the best of several searches.

    A release is one step, in which the record surely took part. The loss has several minima, so the search begins at
    several places: at what the attacker expects, and around it.

    Attributes:
        starts: number of searches.
        seed: of the places where they begin.
    """

    starts: int = 8
    seed: int = 0

    def __call__(self, released: Transcript, known: SGDKnowledge) -> Guesses:
        """Returns an answer for each gradient.

        Args:
            released: M releases of one step; the attacker knows that the record took part.
            known: what it knows of the record; `known.root` is the spread of the starts, and a prior.
        """
        check_size(released, known)
        if released.left.shape[1] != 1 or released.rate != 1:
            raise InputError("released", "must be single gradients in which the record surely took part", released)
        generator = torch.Generator().manual_seed(self.seed)
        best, lowest = None, None
        for k in range(whole("starts", self.starts)):
            start = known.start.to(released.left)
            if k:
                apart = torch.randn(known.features, generator=generator, dtype=torch.float64).to(start)
                spread = 0.5 if known.root is None else float(known.root.square().sum(1).mean().sqrt())
                start = start + spread * apart
            found, value = self._search(released, known, start)
            if best is None or lowest is None:
                best, lowest = found, value
            better = value < lowest
            best, lowest = torch.where(better[:, None], found, best), torch.minimum(value, lowest)
        assert best is not None
        return Guesses(self._placed(best))


@dataclass(frozen=True)
class OneOf:
    """Finds which of k candidates the record was: the likeliest, which no attack beats where all are as likely.

    Attributes:
        candidates: private features, (k, d).
    """

    candidates: Tensor

    def __call__(self, released: Transcript, known: SGDKnowledge) -> Guesses:
        """Returns the likeliest candidate for each training, and how likely each is.

        Args:
            released: what the attacker saw of M trainings.
            known: what it knows of the record.
        """
        own = self.candidates.to(released.left)
        if own.dim() != 2 or own.shape[1] != known.features:
            raise InputError("candidates", f"must have shape (k, {known.features})", tuple(own.shape))
        scores = torch.stack([known.log_ratio(released, z) for z in own], dim=1).double().cpu().numpy()
        return Guesses(own.double().cpu().numpy()[np.argmax(scores, axis=1)], scores)


@dataclass(frozen=True)
class Membership:
    """Tests whether a record, which the attacker knows, took part in the training at all: by the ratio of likelihoods.

    Attributes:
        record: its private features, (d,).
    """

    record: Tensor

    def __call__(self, released: Transcript, known: SGDKnowledge) -> Guesses:
        """Returns ln of the likelihood with the record over that without it, (M, 1).

        Args:
            released: what the attacker saw of M trainings; it does not know in which steps the record took part.
            known: all else that it knows.
        """
        if released.present is not None:
            raise InputError("released", "must not say in which steps the record took part: that would tell", released)
        return Guesses(scores=OneOf(self.record[None])(released, known).scores)


def check_size(released: Transcript, known: SGDKnowledge) -> None:
    """Refuses a model of which the Jacobian of one step does not fit into memory."""
    columns = known.features if known.root is None else known.root.shape[1]
    floats = released.left.shape[2] * columns
    if floats > MOST_FLOATS:
        what = f"must be smaller: parameters × features must be at most {MOST_FLOATS:,} for this attack"
        raise InputError("model", what, f"{floats:,}")


def with_expectation(known: SGDKnowledge, others: Tensor, *, most: int = DIRECTIONS) -> SGDKnowledge:
    """Returns the knowledge of an attacker who expects a record like others: a Gaussian of their mean and spread.

    The covariance has the directions of the largest variances, and in each at least a share of the mean variance.

    Args:
        known: what the attacker knows.
        others: private features of other records, (n, d), n at least 2.
        most: the number of directions; along all others the attacker keeps to the mean.
    """
    if len(others) < 2:
        raise InputError("others", "must be at least 2 records", len(others))
    own = others.double().cpu()
    mean = own.mean(0)
    values, vectors = torch.linalg.eigh((own - mean).T @ (own - mean) / (len(own) - 1))
    keep = min(whole("most", most), len(values))
    values, vectors = values[-keep:], vectors[:, -keep:]
    root = vectors * (values.clamp(min=0) + RIDGE * values.clamp(min=0).mean()).sqrt()
    like = known.like
    return replace(known, mean=mean.to(like), root=root.to(like))
