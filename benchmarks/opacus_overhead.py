"""What a ledger beside Opacus costs: trainings with and without `watch`, in turns and in both orders, and their memory.

Removed: `watch` as it is; it reads Opacus's norms and the sampler's records, so there is no form with record numbers.
Both: worlds and Fisher information too, at the default budget (`Measuring(..., information=True)`), and one replaced
part. The networks are that of the paper for MNIST (600 of 60,000 random images a step) and one with tanh on 108 columns
(266 of 26,561 random records); the time does not depend on the values. CPU time is that of all threads of the process;
beside other work only it says something. Measurements are at random steps of 1,000, so short stretches of the small
network differ: by default all of it is timed. Each peak of memory is of a process of its own, less that of a process
which has only loaded the data and the model.

    OMP_NUM_THREADS=1 python benchmarks/opacus_overhead.py [--steps N] [--rounds 3] [--problems images table]"""

import argparse
import copy
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from reconbound.auditing.models import mnist_cnn
from reconbound.fisher.worlds import Replacement
from reconbound.integrations.opacus import Measuring, watch

warnings.filterwarnings("ignore", "Secure RNG turned off|Full backward hook")
#: Steps that are not timed: the first ones check the model.
FIRST = 10
RATE, EPOCHS = 0.01, 10
#: Steps that are timed.
STEPS = {"images": 100, "table": round(EPOCHS / RATE) - FIRST}
#: The largest ratio to Opacus alone that is wanted, of time and of memory.
TARGETS = {"removed": (1.02, 1.5), "both": (1.5, 1.5)}


def table_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(108, 32), nn.Tanh(), nn.Linear(32, 2))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], int]] = {
    "images": (mnist_cnn, 60_000, (1, 28, 28), 10),
    "table": (table_network, 26_561, (108,), 2),
}


def prepared(problem: str) -> tuple[nn.Module, TensorDataset]:
    make, records, shape, classes = PROBLEMS[problem]
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.rand(records, *shape, generator=generator),
        torch.randint(0, classes, (records,), generator=generator),
    )
    torch.manual_seed(0)
    return make(), TensorDataset(x, y)


def training(network: nn.Module, data: TensorDataset, way: str) -> Callable[[], None]:
    """Returns a function that takes one step of a training with Opacus, watched in this way."""
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=round(RATE * len(data))),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    if way == "removed":
        watch(optimizer, loader, criterion)
    elif way == "both":
        worlds: dict[str, Any] = {"part": Replacement(0.5, range(3))}
        watch(optimizer, loader, criterion, measure=Measuring(model, EPOCHS, worlds=worlds, information=True))
    batches = chain.from_iterable(repeat(loader))

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return step


def peak_memory(problem: str, way: str, steps: int) -> int:
    """Returns the peak memory of a process that trains in this way, in kilobytes; "nothing": of one that does not."""
    if way == "nothing":
        prepared(problem)
    else:
        step = training(*prepared(problem), way)
        for _ in range(FIRST + steps):
            step()
    # not getrusage: its peak counts the process that started this one
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak)


def in_child(problem: str, way: str, steps: int) -> int:
    command = [sys.executable, __file__, "--child", problem, way, "--steps", str(steps)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def taken_in_turns(problem: str, steps: int) -> dict[str, tuple[float, float]]:
    """Returns the CPU time and the time that each way of training takes for these steps, in turns."""
    network, data = prepared(problem)  # the same data for all: where they are in memory makes a difference
    ways = {way: training(copy.deepcopy(network), data, way) for way in ("alone", *TARGETS)}
    taken = dict.fromkeys(ways, (0.0, 0.0))
    for number in range(FIRST + steps):
        for way in [*ways][:: 1 if number % 2 else -1]:
            start = time.process_time(), time.perf_counter()
            ways[way]()
            if number >= FIRST:
                cpu, wall = taken[way]
                taken[way] = cpu + time.process_time() - start[0], wall + time.perf_counter() - start[1]
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(peak_memory(*asked.child, asked.steps))
        return
    print(f"{torch.get_num_threads()} threads, {asked.rounds} rounds, in turns step by step")
    for problem in asked.problems:
        steps = asked.steps or STEPS[problem]
        rounds = [taken_in_turns(problem, steps) for _ in range(asked.rounds)]
        nothing, plain = (in_child(problem, way, steps) for way in ("nothing", "alone"))
        alone, wall = (1e3 * median(taken["alone"][k] for taken in rounds) / steps for k in range(2))
        print(f"{problem}, {steps} steps: Opacus alone {alone:.2f} ms CPU ({wall:.2f} ms) a step, ", end="")
        print(f"{(plain - nothing) / 1024:.0f} MB")
        for way, (time_target, memory_target) in TARGETS.items():
            memory = (in_child(problem, way, steps) - nothing) / (plain - nothing)
            cpu, passed = ([taken[way][k] / taken["alone"][k] for taken in rounds] for k in range(2))
            print(
                f"    {way}: {median(cpu):.3f} times the CPU time ({min(cpu):.3f} to {max(cpu):.3f}), "
                f"{median(passed):.3f} times the time ({min(passed):.3f} to {max(passed):.3f}; target "
                f"{time_target:g}), memory {memory:.2f} times (target {memory_target:g})",
                flush=True,
            )


if __name__ == "__main__":
    main()
