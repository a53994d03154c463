"""The form of every attack: what was released and what the attacker knows go in, guesses come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, repr=False)
class Guesses:
    """The guesses of an attack, one for each of M releases. Confidential, as the records are.

    Attributes:
        answers: the records that are guessed, flat, (M, d); None for an attack that only says yes or no.
        scores: the logarithm of how likely each candidate is, up to a constant, (M, k); None without candidates. Of a
            test for membership k is 1: ln of the likelihood with the record over that without it.
    """

    answers: np.ndarray | None = None
    scores: np.ndarray | None = None

    def __repr__(self) -> str:
        """Returns only sizes: the guesses are secret, and long."""
        shapes = [
            f"{name} {v.shape}" for name, v in (("answers", self.answers), ("scores", self.scores)) if v is not None
        ]
        return f"Guesses({', '.join(shapes)}; confidential)"

    @property
    def choice(self) -> np.ndarray:
        """Returns the likeliest candidate of each release, (M,); of a membership test whether the record took part."""
        if self.scores is None:
            raise ValueError("these guesses are answers: they chose among no candidates")
        one = self.scores.shape[1] == 1
        return (self.scores[:, 0] > 0).astype(np.int64) if one else np.argmax(self.scores, axis=1)


class Attack(Protocol):
    """An attack.

    Two attacks on the same release take the same `known`. Neither holds the record itself: whoever simulates an attack
    compares the guesses with it afterwards.
    """

    def __call__(self, released: Any, known: Any) -> Guesses:
        """Returns a guess for each release.

        Args:
            released: M releases: weights of linear models, or a `Transcript` of private SGD.
            known: everything else that the attacker knows: `AttackerKnowledge` or `SGDKnowledge`.
        """
