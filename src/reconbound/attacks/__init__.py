"""Attacks that rebuild training records: what was released and what the attacker knows in, reconstructions out."""

from ._report import AttackReport
from .glm import reconstruct, simulate
from .likelihood import most_likely
from .sgd import SGDAttackReport, simulate_sgd

__all__ = ["AttackReport", "SGDAttackReport", "most_likely", "reconstruct", "simulate", "simulate_sgd"]
