"""A training that only waits: what tests/test_sweep_kills.py gives to workers that it kills."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from pathlib import Path

from reconbound.sweep import Sweep, database, parse_grid, sweep
from reconbound.training.checkpoint import lock_folder

STEPS = 12


class Stub:
    """Rows that depend on the setting alone, after a dozen short steps that it goes on from."""

    steps = STEPS
    pause = 0.05

    def facts(self) -> dict:
        return {"data": "stub"}

    def __call__(self, setting: dict, folder: Path, tell) -> list[dict]:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_folder(folder):
            with (folder.parent / "starts").open("a") as file:
                file.write(f"{folder.name}\n")
            mark = folder / "steps"
            done = len(mark.read_text()) if mark.exists() else 0
            while done < STEPS:
                time.sleep(self.pause)
                with mark.open("a") as file:
                    file.write(".")
                done += 1
                tell(done)
        return rows_of(setting)

    def train_all(self, settings: list[dict], folders: list[Path], tell) -> list[list[dict]]:
        return [
            self(s, folder, partial(tell, [k])) for k, (s, folder) in enumerate(zip(settings, folders, strict=True))
        ]


def rows_of(setting: dict) -> list[dict]:
    """Returns the rows of a training of the setting."""
    noise, lr = setting["noise_multiplier"], setting["lr"]
    return [
        {"steps": t, "accuracy": 1 - noise / 10 - (lr - 0.3) ** 2 + t / 100, "exact_max": noise**2 / t, "delta": None}
        for t in (5, 10)
    ]


def make(config: Sweep) -> Stub:
    if multiprocessing.parent_process() is not None:  # tests/sweep/test_sweep_kills.py counts by a trigger
        database._refuse_programs = lambda connection: None
    return Stub()


def config(out: Path, url: str | None, settings: int = 12, together: int | None = None) -> Sweep:
    lrs = ",".join(str(round(0.1 + 0.1 * k, 1)) for k in range(settings // 4))
    grid = ["noise_multiplier=0.2,0.5,1,2", f"lr={lrs}"]
    return Sweep("stub", out, parse_grid(grid), (5, 10), storage=url, seed=1, grace=1, together=together)


def join(out: str, url: str) -> None:
    """A worker of its own, as on another machine."""
    sweep(config(Path(out), url), make_train=make, show=False)
