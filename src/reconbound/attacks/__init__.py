"""Attacks that rebuild training records from what was released and what the attacker knows."""

from reconbound.attacks.glm import AttackerKnowledge, AttackReport, reconstruct, simulate
from reconbound.attacks.likelihood import most_likely
from reconbound.attacks.private_sgd import SGDAttackReport, SGDTrials, simulate_sgd

__all__ = [
    "AttackReport",
    "AttackerKnowledge",
    "SGDAttackReport",
    "SGDTrials",
    "most_likely",
    "reconstruct",
    "simulate",
    "simulate_sgd",
]
