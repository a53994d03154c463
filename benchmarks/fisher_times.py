"""Times of `step_information` and `clipped_gradient_sum` in one version: what fisher_step.py --before runs in turns.

    python benchmarks/fisher_times.py [--device cuda] [--threads 2]

The work: the networks and settings of fisher_step.py, and two models whose gradients are not formed, a wide network
and tokens that share their layers. Each call is timed as a training makes it (checked=True), with all checks ("single
call"), and on a GPU in a captured CUDA graph, as fisher_step.py times it. Data are random: times do not depend on them.
It also runs on versions before the options were grouped. It prints one JSON object: the median seconds of each."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reconbound import fisher

try:
    from reconbound.auditing import models as networks
except ImportError:  # before the packages were ordered
    from reconbound import networks  # type: ignore[attr-defined, no-redef]

REPEATS = 15
SETTING: dict[str, Any] = {"max_grad_norm": 4.0, "clip": "smooth"}  # fisher_step.py's


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def cases(device: str) -> dict[str, tuple[nn.Module, Tensor]]:
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


def sum_options(checked: bool) -> dict[str, Any]:
    """The keyword arguments of `clipped_gradient_sum` in this version."""
    return {"options": fisher.SumOptions(checked=checked)} if hasattr(fisher, "SumOptions") else {"checked": checked}


def information_options(checked: bool, **probes: Any) -> dict[str, Any]:
    """The keyword arguments of `step_information` in this version."""
    if hasattr(fisher, "StepOptions"):
        return {"options": fisher.StepOptions(checked=checked, probes=fisher.ProbeOptions(**probes))}
    old = {"space": "probe", "count": "probes"}
    return {"checked": checked, **{old.get(name, name): value for name, value in probes.items()}}


def work_on(model: nn.Module, x: Tensor, checked: bool) -> dict[str, Callable[[], Any]]:
    y = torch.arange(len(x), device=x.device) % 10
    probes = {"space": "inputs", "error": "bound", "directions": [torch.ones_like(x[0])]}
    return {
        "sum": lambda: fisher.clipped_gradient_sum(model, losses, x, y, **SETTING, **sum_options(checked)),
        "information": lambda: fisher.step_information(
            model, losses, x, y, noise_multiplier=0.5, **SETTING, **information_options(checked, **probes)
        ),
    }


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same work, captured once and replayed."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--only", nargs="+", help="these models only")
    options = parser.parse_args()
    print(f"reconbound of {Path(fisher.__file__).parents[2]}", file=sys.stderr, flush=True)
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, float] = {}
    for name, (model, x) in cases(options.device).items():
        if options.only and name not in options.only:
            continue
        for what, call in work_on(model, x, checked=True).items():
            found[f"{name}, {what}"] = median_seconds(call, options.device)
            if options.device == "cuda":
                found[f"{name}, {what}, in a CUDA graph"] = median_seconds(captured(call), options.device)
        for what, call in work_on(model, x, checked=False).items():
            found[f"{name}, {what}, single call with all checks"] = median_seconds(call, options.device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
