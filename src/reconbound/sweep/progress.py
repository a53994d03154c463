"""How far a sweep is: a bar over the steps of all its trials, with the time that remains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .store import Store


@contextmanager
def progress(store: Store, steps: int, show: bool) -> Iterator[None]:
    """A bar over the steps of the whole sweep, others' work included, with the time that remains."""
    if not show or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    stop = threading.Event()
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=1800) as bar:
        task = bar.add_task("trials", total=1)

        def draw() -> None:
            while True:
                with suppress(Exception):
                    done, finished, failed, total = look(store, steps)
                    told = f"{finished} of {total} trials{f', {failed} failed' if failed else ''}"
                    bar.update(task, total=steps * total, completed=done, description=told)
                if stop.wait(1.0):
                    return

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def look(store: Store, steps: int) -> tuple[int, int, int, int]:
    """Steps done over all trials, and how many trials are finished, failed, and there are."""
    trials, leases = store.trials(), store.leases()
    done = finished = failed = 0
    for trial in trials:
        over = trial.state.is_finished()
        failed += trial.state.name == "FAIL"
        finished += over
        lease = leases.get(trial._trial_id)
        done += steps if over else 0 if lease is None else min(steps, lease.done)
    return done, finished, failed, len(trials)
