"""How much speed a change costs: `step_information` and `clipped_gradient_sum` of two versions, in one run.

    git worktree add ../before COMMIT
    python benchmarks/fisher_before_after.py --before ../before/src [--device cuda] [--rounds 5] [--out table.json]

The two versions take turns, each in a process of its own. A version whose interface differs runs its own copy of this
file, benchmarks/fisher_before_after.py beside its src. The work: the paper's networks, and two models whose gradients
are not formed, a wide network and tokens that share their layers. Data are random: times do not depend on them. The
last lines are the ratios of the medians, after over before."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, REPEATS = 5, 15


def cases(device: str) -> dict[str, tuple[Any, Any]]:
    import torch
    from torch import nn

    from reconbound.auditing import models as networks

    torch.manual_seed(0)
    shared = (nn.Linear(64, 384), nn.Tanh(), nn.LayerNorm(384), nn.Linear(384, 384), nn.Tanh())
    tokens = nn.Sequential(*shared, nn.Flatten(), nn.Linear(32 * 384, 10))
    wide = nn.Sequential(nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10))
    shapes = {
        "mnist": (networks.mnist_cnn(), (600, 1, 28, 28)),
        "cifar10": (networks.cifar10_cnn(), (64 if device == "cpu" else 200, 3, 32, 32)),
        "wide": (wide, (256, 784)),
        "tokens": (tokens, (64, 32, 64)),
    }
    return {name: (model.to(device), torch.rand(*shape, device=device)) for name, (model, shape) in shapes.items()}


def child(device: str) -> dict[str, float]:
    """The median time of each piece of work in this process, whichever version it imports."""
    import torch
    from torch.nn.functional import cross_entropy

    from reconbound.fisher import ProbeOptions, StepOptions, SumOptions, clipped_gradient_sum, step_information

    def losses(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs, targets, reduction="none")

    found = {}
    for name, (model, x) in cases(device).items():
        y = torch.arange(len(x), device=device) % 10
        setting: dict[str, Any] = {"max_grad_norm": 1.0, "clip": "smooth"}
        probes = ProbeOptions(space="inputs", directions=[torch.ones_like(x[0])])
        options = StepOptions(checked=True, probes=probes)
        sums = SumOptions(checked=True)
        work: dict[str, Callable[[], Any]] = {
            "sum": lambda m=model, x=x, y=y, s=setting, o=sums: clipped_gradient_sum(m, losses, x, y, **s, options=o),
            "information": lambda m=model, x=x, y=y, s=setting, o=options: step_information(
                m, losses, x, y, noise_multiplier=1.0, **s, options=o
            ),
        }
        for what, call in work.items():
            found[f"{name}, {what}"] = median_seconds(call, device)
            if device == "cuda":
                found[f"{name}, {what}, in a CUDA graph"] = median_seconds(captured(call), device)
    return found


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same work, captured once and replayed."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def median_seconds(call: Callable[[], Any], device: str) -> float:
    import torch

    taken = []
    for i in range(REPEATS + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def in_child(source: str, device: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    own = Path(source).parent / "benchmarks" / Path(__file__).name
    command = [sys.executable, str(own if own.exists() else __file__), "--child", "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", help="the source folder of the version to compare with")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", help="also write the table here, as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.device)))
        return
    if not options.before:
        parser.error("--before is needed: the source folder of the version to compare with")
    sources = {"before": options.before, "after": str(Path(__file__).parents[1] / "src")}
    rounds: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(options.rounds):
        for version, source in sources.items():
            rounds[version].append(in_child(source, options.device))
    rows = []
    for name in rounds["before"][0]:
        times = {version: statistics.median(r[name] for r in found) for version, found in rounds.items()}
        rows.append({"work": name, **times, "ratio": times["after"] / times["before"]})
    if options.out:
        Path(options.out).write_text(json.dumps({"device": options.device, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['work']:40} {row['before'] * 1e3:9.2f} ms → {row['after'] * 1e3:9.2f} ms  ratio {row['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
