"""What the processes of the tests need, for the fork server (`conftest`): loaded once, not by each of them."""

from __future__ import annotations

import importlib
import sys

import cheaper

#: The modules whose functions the processes call; what the first audit, the first sweep and the first group of ranks
#: load late.
for name in (
    "auditing",
    "kill_run",
    "many_ranks",
    "opacus_ranks",
    "rank_run",
    "sweep_stub",
    "alembic.command",
    "alembic.migration",
    "dp_accounting.pld.privacy_loss_distribution",
    "optuna.storages._rdb.models",
    "plotly.offline",
    "reconbound.auditing.release",
    "reconbound.cli.app",
    "reconbound.sweep.page",
    "reconbound.sweep.run",
    "reconbound.sweep.together",
    "reconbound.sweep.trial",
    "safetensors.torch",
    "sqlalchemy.dialects.sqlite",
):
    try:
        importlib.import_module(name)
    except ImportError:  # of a library that is not installed: the tests that need it are skipped
        continue

if "pytest" not in sys.modules:  # which looks for doctests here
    for change in (cheaper.short_script(), cheaper.one_target()):
        change.__enter__()  # for good: as in the process of the tests (`conftest`), whose pages are compared with these
