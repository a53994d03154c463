"""Attacks that rebuild training records: what was released and what the attacker knows in, reconstructions out."""

from .glm import AttackReport, reconstruct, simulate

__all__ = ["AttackReport", "reconstruct", "simulate"]
