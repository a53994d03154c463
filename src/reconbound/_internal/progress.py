"""A progress bar on a terminal, and no output anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, done: int, wanted: bool, what: str) -> Iterator[Callable[[int], None]]:
    """Provides a function to call at every step; it draws only if wanted, and only on a terminal.

    Args:
        total: the number of steps.
        done: the number of steps done already.
        wanted: whether to draw.
        what: the label of the bar.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda n: None
        return
    from reconbound._internal.rng import random_states_kept

    with random_states_kept():  # loading rich draws from Python's generator
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda n: progress.advance(task, n)
