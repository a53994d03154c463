"""Progress of a sweep: on a terminal a bar over the steps of all its trials, elsewhere a line for each that ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reconbound.sweep.space import PARAMETERS, described
from reconbound.sweep.store import Store
from reconbound.sweep.words import setting_told, value_told

if TYPE_CHECKING:
    from reconbound.sweep.run import Sweep


def plan_lines(store: Store, config: Sweep, train: Any, workers: int) -> list[str]:
    """Describes what the sweep will do: trainings, settings, workers, the place, and what is done already.

    Args:
        store: the sweep's storage.
        config: the sweep.
        train: its training.
        workers: the number of workers.
    """
    grid = "; ".join(
        f"{name} {', '.join(map(value_told, values)) if isinstance(values, list) else values}"
        for name, values in described(config.space).items()
    )
    _, finished, failed, total = look(store, train.steps)
    kind = "every combination of" if config.search == "grid" else "chosen by Optuna from"
    runs = f" {config.runs} times" if config.runs > 1 else ""
    at = ", ".join(f"{steps:,}" for steps in config.steps)
    done = f"{finished - failed} of them are trained already. " if finished > failed else ""
    time_left = "The expected time is told when the first training has ended. " if finished < total else ""
    dataset = getattr(train, "dataset", None)
    many = "" if config.together is None else f", each with {config.together} settings at once"
    return [
        *([dataset.summary()] if dataset is not None else []),
        f"{total} setting{'s' if total != 1 else ''}: {kind} {grid}.",
        f"Each is trained{runs} for {config.steps[-1]:,} steps and looked at after {at}; {workers} "
        f"worker{'s' if workers > 1 else ''} here{many}.",
        f"{done}{time_left}Writes in {config.out} (confidential).",
    ]


@contextmanager
def progress(store: Store, steps: int, show: bool) -> Iterator[None]:
    """Shows on standard error how far the whole sweep is, others' work included, with the time that remains.

    Args:
        store: the sweep's storage.
        steps: of a whole trial.
        show: whether to show anything.
    """
    if not show:
        yield
        return
    if not sys.stderr.isatty():
        with _watched(Lines(store, steps).look):
            yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=1800) as bar:
        task = bar.add_task("trials", total=1)

        def draw() -> None:
            done, finished, failed, total = look(store, steps)
            told = f"{finished} of {total} trials{f', {failed} failed' if failed else ''}"
            bar.update(task, total=steps * total, completed=done, description=told)

        with _watched(draw):
            yield


@contextmanager
def _watched(act: Callable[[], None]) -> Iterator[None]:
    """Calls a function every second in its own thread, and once more at the end."""
    stop = threading.Event()

    def watch() -> None:
        while True:
            ended = stop.wait(1.0)
            with suppress(Exception):  # the storage is busy: the next attempt may succeed
                act()
            if ended:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Lines:
    """Prints a plain line for each training that ends, with its setting and the time that remains."""

    def __init__(self, store: Store, steps: int) -> None:
        self.store, self.steps, self.begun = store, steps, time.monotonic()
        self.told = {trial.number for trial in store.trials() if trial.state.is_finished()}
        self.before = look(store, steps)[0]

    def look(self) -> None:
        trials = self.store.trials()
        ended = [trial for trial in trials if trial.state.is_finished() and trial.number not in self.told]
        for trial in ended:
            self.told.add(trial.number)
            setting = trial.user_attrs.get("setting", trial.params)
            named = setting_told(setting, PARAMETERS)
            how = "failed" if trial.state.name == "FAIL" else "trained"
            left = f"; {self._left()}" if len(self.told) < len(trials) else ""
            print(f"{len(self.told)} of {len(trials)} {how}: {named}{left}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """Returns the time that remains, estimated from the steps done since this process began."""
        done, _, _, total = look(self.store, self.steps)
        if done <= self.before:
            return "time left unknown"
        seconds = (time.monotonic() - self.begun) * (total * self.steps - done) / (done - self.before)
        return f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Formats a duration in one unit.

    >>> duration(0.2), duration(300), duration(7200)
    ('1 s', '5 min', '2.0 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def look(store: Store, steps: int) -> tuple[int, int, int, int]:
    """Returns the steps done over all trials, and the numbers of finished, of failed and of all trials.

    Args:
        store: the sweep's storage.
        steps: of a whole trial.
    """
    trials, leases = store.trials(), store.leases()
    done = finished = failed = 0
    for trial in trials:
        over = trial.state.is_finished()
        failed += trial.state.name == "FAIL"
        finished += over
        lease = leases.get(trial._trial_id)
        done += steps if over else 0 if lease is None else min(steps, lease.done)
    return done, finished, failed, len(trials)
