"""A sweep on digits by four workers that are killed at random, on SQLite and on PostgreSQL: is every setting finished
exactly once, with the rows of a single worker?

The workers know of each other only through the storage, as on four machines. A trigger in the database itself counts
how often a trial becomes COMPLETE. PostgreSQL is a server of our own in a temporary folder; it is left out, and that is
said, where none is installed."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sweep"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from test_sweep_kills import count_finishes, finishes, holders

import postgres_server
from reconbound.sweep import Sweep, database, frontier, parse_grid, sweep
from reconbound.sweep.run import begin, make_trainer, open_queue
from reconbound.sweep.workers import PRELOAD

GRID = ["noise_multiplier=0.3,0.5,1,2,5,10", "lr=0.2,0.5,1,2"]
STEPS, RUNS, LIMIT, GRACE, WORKERS = (20, 40, 80), 2, 200, 3, 4


def config(out: Path, url: str | None) -> Sweep:
    options = {"limit": LIMIT}
    return Sweep(
        "digits", out, parse_grid(GRID), STEPS, RUNS, load=options, plan={"model": "linear"}, storage=url, seed=11,
        grace=GRACE,
    )  # fmt: skip


def allow_trigger() -> None:
    """A sweep refuses databases with triggers, and the count of `count_finishes` is one."""
    database._refuse_programs = lambda connection: None


def join(out: str, url: str) -> None:
    allow_trigger()
    sweep(config(Path(out), url), show=False)


def start(out: Path, url: str) -> multiprocessing.Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=join, args=(str(out), url), daemon=True)
    process.start()
    return process


def disturbed(url: str, folder: Path, kills: int, rng: random.Random) -> tuple[list[dict], dict[str, int]]:
    """The rows of a sweep whose workers are killed, and what happened."""
    out = folder / "out"
    settings = config(out, url)
    allow_trigger()
    out.mkdir(mode=0o700)
    queue = open_queue(settings)
    begin(queue, settings, make_trainer(settings))
    count_finishes(url)
    workers, killed = [start(out, url) for _ in range(WORKERS)], 0
    while not all(slot.is_over for slot in queue.slots()):
        time.sleep(rng.uniform(0.0, 4.0))
        at_work = [worker for worker in workers if worker.pid in holders(queue)]
        if killed < kills and at_work:
            victim = rng.choice(at_work)
            victim.kill()
            victim.join()
            killed += 1
        workers = [worker if worker.is_alive() else start(out, url) for worker in workers]
    for worker in workers:
        worker.join(120)
    slots = queue.slots()
    again = [len(slot.attempts) - 1 for slot in slots]
    happened = {
        "settings": len(slots),
        "complete": sum(slot.complete is not None for slot in slots),
        "finishes": len(finishes(url)),
        "finished twice": len(finishes(url)) - len(set(finishes(url))),
        "kills": killed,
        "taken over": sum(again),
        "in settings": sum(count > 0 for count in again),
    }
    queue.dispose()
    return sweep(settings, show=False), happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        wanted = sweep(config(folder / "alone", None), show=False)
        print(f"one worker: {len(wanted)} rows of {len(wanted) // len(STEPS)} settings, {_since(began)}", flush=True)
        report("SQLite", f"sqlite:///{folder / 'shared.db'}", folder / "sqlite", wanted, chosen)
        reason = postgres_server.missing()
        if reason:
            print(f"PostgreSQL left out: {reason}")
            return
        with postgres_server.server() as url:
            report("PostgreSQL", url, folder / "postgres", wanted, chosen)


def report(name: str, url: str, folder: Path, wanted: list[dict], chosen: argparse.Namespace) -> None:
    folder.mkdir()
    began = time.perf_counter()
    rows, happened = disturbed(url, folder, chosen.kills, random.Random(chosen.seed))
    told = ", ".join(f"{what} {n}" for what, n in happened.items())
    same = "equal to the single worker's" if frontier.table(rows) == frontier.table(wanted) else "DIFFERENT"
    print(f"{name}: {told}; rows and fronts {same}; {_since(began)}", flush=True)
    once = happened["settings"] == happened["complete"] == happened["finishes"] and not happened["finished twice"]
    if not once or rows != wanted:
        raise SystemExit(f"{name}: a setting was lost, counted twice or came out differently")


def _since(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"


if __name__ == "__main__":
    main()
