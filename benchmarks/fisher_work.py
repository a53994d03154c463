"""How much arithmetic one accounted step takes, ours and the paper's way, whatever the machine: multiplications of
matrices and convolutions, in forward passes of the network on the same batch.

    python benchmarks/fisher_work.py [--out table.json]          seconds, on a CPU

Counted by watching what PyTorch is asked to do (the formulas are PyTorch's own, torch.utils.flop_counter). The times of
fisher_step.py divided by these show how well each side uses the machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from reconbound.auditing import models as networks
from reconbound.fisher import (
    CoordinateOptions,
    ProbeOptions,
    StepOptions,
    clipped_gradient_sum,
    coordinate_information,
    step_information,
)

SETTING = {"max_grad_norm": 4.0, "noise_multiplier": 0.5, "clip": "smooth"}


class Work(TorchDispatchMode):
    """Sums the multiplications and additions of all matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = flop_registry.get(func._overloadpacket)
        self.total += rule(*args, **(kwargs or {}), out_val=out) if rule else 0
        return out


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def count(work: Callable[[], Any]) -> int:
    with Work() as counted:
        work()
    return counted.total


def row(name: str, batch: int = 8) -> dict[str, float]:
    torch.manual_seed(0)
    model = networks.mnist_cnn() if name == "mnist" else networks.cifar10_cnn()
    x = torch.rand(batch, 1, 28, 28) if name == "mnist" else torch.rand(batch, 3, 32, 32)
    problem = (model, losses, x, torch.randint(0, 10, (batch,)))
    forward = count(lambda: model(x))
    found = {"forward pass, MFLOP a record": forward / batch / 1e6}
    found["batch gradient"] = count(
        lambda: torch.autograd.grad(losses(model(x), problem[3]).sum(), [*model.parameters()])
    )
    found["clipped gradient sum"] = count(lambda: clipped_gradient_sum(*problem, max_grad_norm=4.0))
    for at_once in (1, 25):
        paper = count(
            lambda k=at_once: coordinate_information(
                *problem, **SETTING, coordinates=CoordinateOptions(count=k, at_once=k)
            )
        )
        found[f"50 coordinates, {at_once} at once"] = 50 * paper / at_once
    for probes in (1, 2, 3):
        ours = count(
            lambda k=probes: step_information(
                *problem, **SETTING, options=StepOptions(probes=ProbeOptions(count=k, error="bound"))
            )
        )
        found[f"ours, {probes} probe(s)"] = ours
    return {key: value if "MFLOP" in key else round(value / forward, 2) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the table here as JSON")
    asked = parser.parse_args()
    table = {name: row(name) for name in ("mnist", "cifar10")}
    for name, found in table.items():
        print(f"{name}: a forward pass is {found['forward pass, MFLOP a record']:.2f} MFLOP a record; in such passes")
        for key, value in list(found.items())[1:]:
            print(f"  {key:30} {value:8.1f}")
    if asked.out:
        Path(asked.out).write_text(
            json.dumps({"command": "python benchmarks/fisher_work.py", **table}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
