"""Mechanisms: frozen descriptions of a release, and what each guarantees between neighbours.

A mechanism gives five answers, each conservatively: its order-2 Rényi divergence (replace-one), its KL divergence
to a release that does not depend on the record, its overlap 1 − LC (replace-one), its (ε, δ), and the
largest chance of a membership test or a reconstruction to succeed. `as_mechanism` turns a dp-accounting DpEvent or PLD
into one.
"""

from reconbound.mechanisms.additive import DiscreteGaussian, Laplace
from reconbound.mechanisms.base import ADD_OR_ZERO, ADD_REMOVE, ADJACENCIES, REPLACE_ONE, ZERO_OUT, Mechanism
from reconbound.mechanisms.composition import Composition
from reconbound.mechanisms.dp_accounting import PLD, Event, as_mechanism
from reconbound.mechanisms.output_perturbation import OutputPerturbation
from reconbound.mechanisms.reported import DP, RenyiDP
from reconbound.mechanisms.sampled_gaussian import SampledGaussian
from reconbound.mechanisms.schedules import from_opacus, read_opacus_state, read_schedule, schedule
from reconbound.mechanisms.statements import GDP, ZCDP

__all__ = [
    "ADD_OR_ZERO",
    "ADD_REMOVE",
    "ADJACENCIES",
    "DP",
    "GDP",
    "PLD",
    "REPLACE_ONE",
    "ZCDP",
    "ZERO_OUT",
    "Composition",
    "DiscreteGaussian",
    "Event",
    "Laplace",
    "Mechanism",
    "OutputPerturbation",
    "RenyiDP",
    "SampledGaussian",
    "as_mechanism",
    "from_opacus",
    "read_opacus_state",
    "read_schedule",
    "schedule",
]
