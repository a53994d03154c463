"""The paper's grids trained by fleets on one GPU: rows out after every fleet, and only what is missing is trained."""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from reconbound.auditing.models import lecun_normal
from reconbound.sweep.fleet.trainer import Fleet, Snapshot
from reconbound.training.settings import Settings

QUANTILES = {"max": 1.0, "p999": 0.999, "p99": 0.99, "p90": 0.9, "median": 0.5, "p10": 0.1, "min": 0.0}
KEY = ("sampler", "noise_multiplier", "max_grad_norm", "lr")
RESULTS = Path(__file__).resolve().parent / "results"
Training = tuple[str, float, float, float]  # KEY


@dataclass(frozen=True)
class Grid:
    """One data set's grid: what every training shares, and the trainings in the order in which they are done."""

    make_model: Callable[[], nn.Module]
    load: Callable[[bool], tuple[np.ndarray, np.ndarray]]  # train? → images (N, ...) uint8 and labels
    rate: float
    momentum: float
    at: tuple[int, ...]
    budgets: tuple[float, ...]
    trainings: tuple[Training, ...]
    fleet: int  # trainings at once


def combinations(sampler: str, *axes: Sequence[float]) -> tuple[Training, ...]:
    """All settings of the axes (noise multiplier, clip norm, step size), dealt so that every fleet spans the grid."""
    every = [(sampler, *values) for values in itertools.product(*axes)]
    order = np.random.default_rng(0).permutation(len(every))
    return tuple(every[i] for i in order)  # type: ignore[misc]


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def scaled(images: np.ndarray) -> Tensor:
    """Pixels in [0, 1], float32, with a channel."""
    x = torch.from_numpy(images.copy())
    return (x.unsqueeze(1) if x.dim() == 3 else x).float() / 255


def on_test(load: Callable[..., tuple[np.ndarray, np.ndarray]], device: str) -> Callable[[nn.Module], Tensor]:
    """What gives a model's accuracy on the test set; load takes train=."""
    images, labels = load(train=False)
    x, y = scaled(images).to(device), torch.from_numpy(labels).to(device)

    def accuracy(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(part).argmax(1) for part in x.split(2500)]).eq(y).double().mean()

    return accuracy


def summary(dfil: Tensor) -> dict[str, Tensor]:
    """The quantiles over records, (K,) each."""
    ordered = dfil.sort(dim=1).values
    last = ordered.shape[1] - 1
    return {name: ordered[:, round(q * last)].cpu() for name, q in QUANTILES.items()}


def rows_of(shots: Sequence[Snapshot], seconds: float, accounted: bool = True) -> list[dict[str, object]]:
    """Rows of one step count: each run's own, and the mean over runs (accuracies averaged, ledgers averaged first)."""
    own = "exact" if shots[0].settings[0].sampler == "poisson" else "fixed"
    rows: list[dict[str, object]] = []
    names = [*range(len(shots)), "mean"] if len(shots) > 1 else [0]
    for name in names:
        chosen = shots if name == "mean" else [shots[int(name)]]
        found = {r: torch.stack([s.dfil(r) for s in chosen]).mean(0) for r in (own, "paper")}
        numbers = {rule: summary(values) for rule, values in found.items()}
        for k, s in enumerate(shots[0].settings):
            row: dict[str, object] = dict(zip(KEY, (s.sampler, s.noise_multiplier, s.max_grad_norm, s.lr), strict=True))
            row |= {
                "steps": shots[0].step,
                "run": name,
                "accuracy": float(np.mean([float(x.found[k]) for x in chosen])),
            }
            row["finite"] = int(all(bool(x.finite[k]) for x in chosen))
            for rule, label in ((own, "own"), ("paper", "paper")) if accounted else ():
                row |= {f"dfil_{label}_{q}": f"{float(v[k]):.6g}" for q, v in numbers[rule].items()}
                row[f"dfil_{label}_cross"] = f"{crossed(shots, rule, k):.6g}" if name == "mean" else ""
            row["seconds"] = round(seconds, 2)
            rows.append(row)
    return rows


def crossed(shots: Sequence[Snapshot], rule: str, k: int) -> float:
    """What one run says of the record that another says is the most exposed: from below, where the maximum of noisy
    numbers is from above."""
    a, b = (shots[i].dfil(rule)[k] for i in (0, 1))
    return float((a[b.argmax()] + b[a.argmax()]) / 2)


def train(grid: Grid, asked: argparse.Namespace) -> None:
    """Train what is not in the rows yet, fleet by fleet, until the time is up."""
    start, out = time.perf_counter(), Path(asked.rows)
    if out.exists() and ("dfil_own_max" not in out.read_text().split("\n", 1)[0]) != asked.scout:
        raise SystemExit(f"{out} has rows of the other kind, with --scout or without: give another file by --rows FILE")
    done = finished([out, *map(Path, asked.done)], grid.at)
    todo = [t for t in grid.trainings if t not in done]
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = asked.tf32
    images, labels = grid.load(True)
    x, y = scaled(images), torch.from_numpy(labels)
    accuracy = on_test(lambda train: grid.load(train), asked.device)
    print(f"{len(done)} trainings done before, {len(todo)} to do", flush=True)

    longest = 0.0
    for first in range(0, len(todo), asked.fleet or grid.fleet):
        begun = time.perf_counter()
        if begun - start + longest > asked.seconds:
            print("no time for another fleet", flush=True)
            break
        part = todo[first : first + (asked.fleet or grid.fleet)]
        settings = [
            Settings(
                s,
                c,
                grid.rate,
                sampler=name,
                lr=lr,
                momentum=grid.momentum,
                budget=1.0,
                seed=asked.seed,
                rules=("exact" if name == "poisson" else "fixed", "paper"),
            )
            for name, s, c, lr in part
        ]
        budgets = (1e-3,) * len(grid.at) if asked.scout else grid.budgets
        options = {"at": grid.at, "budgets": budgets, "device": asked.device, "method": asked.method}
        options["initialise"] = lecun_normal if asked.start == "lecun" else None
        fleet = Fleet(grid.make_model, losses, x, y, settings, **options)
        runs: list[list[Snapshot]] = []
        for r in range(asked.runs):
            runs.append([])
            for shot in fleet.run(r, evaluate=accuracy):
                runs[-1].append(shot)
                if asked.runs == 1:  # what a long training has so far is not lost with it
                    append(out, rows_of([shot], (time.perf_counter() - begun) / len(part), not asked.scout))
        if asked.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        longest = max(longest, seconds)
        if asked.runs > 1:
            append(
                out,
                [
                    row
                    for shots in zip(*runs, strict=True)
                    for row in rows_of(shots, seconds / len(part), not asked.scout)
                ],
            )
        if asked.exposed and not Path(asked.exposed).exists():
            keep_exposed(Path(asked.exposed), [shots[-1] for shots in runs])
        steps = len(part) * asked.runs * grid.at[-1]
        print(f"{len(part)} trainings x {asked.runs} runs in {seconds:.1f} s, {1e3 * seconds / steps:.3f} ms a step, "
              f"{time.perf_counter() - start:.0f} s in all", flush=True)  # fmt: skip
        del fleet, runs
        gc.collect()  # a fleet and its work hold each other
        if asked.device == "cuda":
            torch.cuda.empty_cache()


def keep_exposed(path: Path, shots: Sequence[Snapshot], count: int = 12) -> None:
    """The most and least exposed records of the fleet's first training, by the mean ledger: indices and dFIL."""
    dfil = torch.stack([s.dfil()[0] for s in shots]).mean(0)
    order = dfil.argsort(descending=True)
    s = shots[0].settings[0]
    about = {"steps": shots[0].step, "noise_multiplier": s.noise_multiplier, "max_grad_norm": s.max_grad_norm}
    about |= {"lr": s.lr, "runs": len(shots), "accuracy": float(np.mean([float(shot.found[0]) for shot in shots]))}
    for name, chosen in (("most", order[:count]), ("least", order.flip(0)[:count])):
        about[name] = [[int(i), float(dfil[i])] for i in chosen]
    path.write_text(json.dumps(about, indent=1) + "\n")


def append(path: Path, rows: list[dict[str, object]]) -> None:
    new = not path.exists()
    there = _there(path)
    rows = [row for row in rows if _key(row) not in there]
    if not rows:
        return
    names = list(rows[0]) if new else path.read_text().split("\n", 1)[0].split(",")  # floors may have been put in
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


def _key(row: Mapping[str, object]) -> tuple[str, ...]:
    """What a row is of; numbers as text, whatever they were written as."""
    text = (row.get(name, "") for name in (*KEY, "variant", "steps", "run"))
    return tuple(f"{float(v):g}" if str(v).replace(".", "", 1).isdigit() else str(v) for v in text)  # type: ignore[arg-type]


def _there(path: Path) -> set[tuple[str, ...]]:
    return {_key(row) for row in csv.DictReader(path.read_text().splitlines())} if path.exists() else set()


def finished(paths: Sequence[Path], at: Sequence[int]) -> set[Training]:
    """The trainings whose rows are all there."""
    seen: dict[Training, set[int]] = {}
    for path in paths:
        if path.exists():
            for row in csv.DictReader(path.read_text().splitlines()):
                key = (row["sampler"], *(float(row[name]) for name in KEY[1:]))
                seen.setdefault(key, set()).add(int(row["steps"]))  # type: ignore[arg-type]
    return {key for key, steps in seen.items() if steps >= set(at)}


def options(doc: str | None, *, runs: int, rows: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train what the rows do not have yet")
    parser.add_argument("--rows", default=str(rows), help="CSV file that rows are added to")
    parser.add_argument("--done", nargs="*", default=[], help="more files of rows that need not be trained again")
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no fleet that would end later")
    parser.add_argument("--fleet", type=int, default=0, help="trainings at once")
    parser.add_argument("--method", default="auto", help="stacked or branches")
    parser.add_argument("--start", default="torch", choices=("torch", "lecun"), help="initial parameters")
    parser.add_argument("--scale", default="unit", help="of the pixels: unit, symmetric or standard")
    parser.add_argument("--scout", action="store_true", help="accuracies alone: hardly measured, in half the time")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--exposed", default="", help="JSON file for the first training's most exposed records")
    parser.add_argument("--only", default="", help="trainings as sampler,sigma,C,lr;... in place of the grid")
    parser.add_argument("--until", type=int, default=0, help="leave out the step counts above this")
    parser.add_argument("--short", type=int, default=0, help="divide all step counts by this, to try the script")
    return parser


def given(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options given. Rows of shortened or hardly measured trainings do not go where the committed ones are."""
    asked = parser.parse_args(words)
    other = [f"--{name}" for name in ("short", "scout") if getattr(asked, name)]
    if asked.train and other and (asked.rows == "." or Path(asked.rows).resolve().parent == RESULTS):
        parser.error(f"{' '.join(other)} would add to the full-size results: give another file by --rows FILE")
    return asked
