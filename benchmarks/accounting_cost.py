"""What accounting costs: private training with ledgers against the same training without any, in turns.

Without: no ledger. Removed: the divergence of each record's release to that without it, the default where no Fisher
information is measured. Replaced: that and one replaced part, at the default budget. Information: Fisher information at
the default budget, and removed. The network of the paper for MNIST (600 of 60,000 random images a step) and a network
with ReLU on 108 columns (266 of 26,561 random records); the time does not depend on the values.

Each record is measured once, at a random step: 100 groups in the 1,000 steps. All of the run after its first steps is
timed: a shorter stretch has more groups than its share, or fewer (of the first 200 steps 22 replaced ones, not 20).
Python's garbage collector is asked for first, which otherwise stops one way of training by 0.1 to 0.3 s.

    python benchmarks/accounting_cost.py [--steps 870] [--rounds 3] [--device cpu] [--problems images table]
        [--ways removed replaced information]"""

import argparse
import contextlib
import gc
import time
from statistics import median

import torch
from torch import nn

from reconbound.auditing.models import mnist_cnn
from reconbound.fisher.worlds import Replacement
from reconbound.training.private_sgd import PrivateSGD, Settings

#: Steps of the whole run: blocks of measurement are those of a run of this length.
WHOLE = 1000
#: Steps that are not timed: after 1, 2, 4, ... batches the sums check the model, which a whole run does not notice.
FIRST = 130
RATE = 0.01
TARGETS = {"removed": 1.05, "replaced": 1.2, "information": 1.5}


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def table_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(108, 32), nn.ReLU(), nn.Linear(32, 2))


PROBLEMS = {"images": (mnist_cnn, 60_000, (1, 28, 28), 10), "table": (table_network, 26_561, (108,), 2)}


def learner(problem: str, way: str, device: str) -> PrivateSGD:
    make, records, shape, classes = PROBLEMS[problem]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(records, *shape, generator=generator).to(device)
    y = torch.randint(0, classes, (records,), generator=generator).to(device)
    ways = {
        "without": {"rules": None, "worlds": None},
        "removed": {"rules": None},
        "replaced": {"rules": None, "worlds": {"part": Replacement(0.5, range(3))}},
        "information": {},
    }
    options = dict(ways[way])
    worlds = {"worlds": options.pop("worlds")} if "worlds" in options else {}
    settings = Settings(1.0, 1.0, RATE, lr=0.1, clip="hard", seed=2**100, **options)
    torch.manual_seed(0)
    return PrivateSGD(make().to(device), losses, x, y, settings, check=False, progress=False, **worlds)


class Enough(Exception):
    pass


def seconds(problem: str, way: str, device: str, steps: int) -> float:
    """Returns the time of some steps of a run, after its first 130."""
    one, stamps = learner(problem, way, device), []

    def stamp(model: nn.Module) -> dict[str, float]:
        if device == "cuda":
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        if len(stamps) == (FIRST + steps) // 10:
            raise Enough
        return {}

    one.evaluate, one.evaluate_every = stamp, 10
    gc.collect()
    gc.freeze()
    with contextlib.suppress(Enough):
        one.fit(WHOLE)
    return stamps[-1] - stamps[FIRST // 10 - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=WHOLE - FIRST)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument("--ways", nargs="+", choices=TARGETS, default=[*TARGETS])
    asked = parser.parse_args()
    print(f"{asked.device}, {torch.get_num_threads()} threads, {asked.steps} of {WHOLE} steps, {asked.rounds} rounds")
    for problem in asked.problems:
        times: dict[str, list[float]] = {way: [] for way in ("without", *asked.ways)}
        for _ in range(asked.rounds):
            for way, found in times.items():
                found.append(seconds(problem, way, asked.device, asked.steps))
        plain = median(times["without"])
        print(f"{problem}: without accounting {1e3 * plain / asked.steps:.2f} ms a step")
        for way in asked.ways:
            ratios = [a / b for a, b in zip(times[way], times["without"], strict=True)]
            each = f"{median(ratios):.3f} times that ({min(ratios):.3f} to {max(ratios):.3f}; target: at most "
            print(f"    {way}: {each}{TARGETS[way]:g})", flush=True)


if __name__ == "__main__":
    main()
