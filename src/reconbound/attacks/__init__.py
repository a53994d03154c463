"""Attacks that rebuild training records from what was released and what the attacker knows."""

from reconbound.attacks.glm import reconstruct, simulate
from reconbound.attacks.likelihood import most_likely
from reconbound.attacks.private_sgd import SGDAttackReport, simulate_sgd
from reconbound.attacks.summary import AttackReport

__all__ = ["AttackReport", "SGDAttackReport", "most_likely", "reconstruct", "simulate", "simulate_sgd"]
