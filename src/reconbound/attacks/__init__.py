"""Attacks that rebuild training records from what was released and what the attacker knows.

Every attack has one form: `attack(released, known)` returns `Guesses` (form.py).
"""

from reconbound.attacks.form import Attack, Guesses
from reconbound.attacks.glm import AttackerKnowledge, AttackReport, GLMAttack, reconstruct, simulate
from reconbound.attacks.knowledge import SGDKnowledge, Transcript, transcript_of
from reconbound.attacks.likelihood import LikeliestGLMRecord, most_likely
from reconbound.attacks.private_sgd import Inversion, LikeliestRecord, Membership, OneOf, with_expectation
from reconbound.attacks.trainings import Changed, Training, train_many
from reconbound.attacks.trials import SGDAttackReport, SGDTrials, simulate_sgd

__all__ = [
    "Attack",
    "AttackReport",
    "AttackerKnowledge",
    "Changed",
    "GLMAttack",
    "Guesses",
    "Inversion",
    "LikeliestGLMRecord",
    "LikeliestRecord",
    "Membership",
    "OneOf",
    "SGDAttackReport",
    "SGDKnowledge",
    "SGDTrials",
    "Training",
    "Transcript",
    "most_likely",
    "reconstruct",
    "simulate",
    "simulate_sgd",
    "train_many",
    "transcript_of",
    "with_expectation",
]
