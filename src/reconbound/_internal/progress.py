"""A progress bar on a terminal, silence anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, done: int, wanted: bool, what: str) -> Iterator[Callable[[int], None]]:
    """A function to call with every step done; it draws only if wanted, and only on a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda n: None
        return
    from reconbound._internal.rng import random_states_kept

    with random_states_kept():  # when it is loaded, rich draws from Python's generator
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda n: progress.advance(task, n)
