"""Sweeps: many trainings, one frontier of accuracy against every floor. Optuna searches and stores."""

from reconbound.sweep.frontier import best, floors_in, pareto, rows_of, table, write_table
from reconbound.sweep.run import Sweep, sweep
from reconbound.sweep.space import Choices, Range, parse_grid, parse_steps

__all__ = [
    "Choices",
    "Range",
    "Sweep",
    "best",
    "floors_in",
    "pareto",
    "parse_grid",
    "parse_steps",
    "rows_of",
    "sweep",
    "table",
    "write_table",
]
