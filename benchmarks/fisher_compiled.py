"""Does compiling the accounted step help? Traced to its operations, fused by torch's compiler, in a CUDA graph.

python benchmarks/fisher_compiled.py --device cuda --networks mnist cifar10 --out table.json"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fisher_step import BATCH, SETTING, batch_gradient, graphed, load, losses, seconds, trained
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from reconbound.fisher import ProbeOptions, StepOptions, step_information
from reconbound.fisher.passes import convolutions

_copied, _added = convolutions.patches, convolutions.added_patches


@torch.library.custom_op("reconbound_bench::patches", mutates_args=())
def _patches(a: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return _copied(a, tuple(kernel), tuple(stride), tuple(padding))  # type: ignore[arg-type]


@_patches.register_fake
def _(a: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    n, m, *size = a.shape
    places = convolutions.places(size, kernel, stride, padding)  # type: ignore[arg-type]
    return a.new_empty(n, *kernel, m, *places)


@torch.library.custom_op("reconbound_bench::added_patches", mutates_args=())
def _added_patches(a: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return _added(a, tuple(shape), tuple(kernel), tuple(stride), tuple(padding))  # type: ignore[arg-type]


@_added_patches.register_fake
def _(a: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return a.new_empty(shape)


def cleaned(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Without the detachings that tracing leaves, and what nothing needs."""
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and str(node.target) in ("aten.detach.default", "aten.alias.default"):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


PROBES = {"mnist": 2, "cifar10": 3}  # that reach the standard error of 50 coordinates (fisher_step.py)


def compare(network: str, device: str, modes: list[str]) -> dict[str, Any]:
    model, images, labels = load(network, device)
    x, y = trained(model, images, labels, BATCH[network])
    omegas = [torch.randn(x.shape[1:], device=device) for _ in range(PROBES[network])]

    def step(x: Tensor, y: Tensor, *omegas: Tensor) -> list[Tensor]:
        probes = ProbeOptions(space="inputs", directions=list(omegas), error="bound")
        i = step_information(model, losses, x, y, **SETTING, options=StepOptions(probes=probes, checked=True))
        return [i.norm, i.along, i.across, *i.gradient_sum.values()]

    def milliseconds(work: Callable[[], Any]) -> float:
        cuda = device == "cuda"
        return 1e3 * seconds(graphed(work) if cuda else work, 20 if cuda else 5, device)

    row: dict[str, Any] = {"network": network, "probes": len(omegas)}
    row["batch_gradient_ms"] = milliseconds(lambda: batch_gradient(model, x, y))
    row["plain_ms"] = milliseconds(lambda: step(x, y, *omegas))
    begun = time.perf_counter()
    convolutions.patches, convolutions.added_patches = _patches, _added_patches  # seen by the tracing
    traced = cleaned(make_fx(step, tracing_mode="real")(x, y, *omegas))
    convolutions.patches, convolutions.added_patches = _copied, _added
    row["operations"] = sum(n.op == "call_function" for n in traced.graph.nodes)
    other, others = torch.rand_like(x), [o.flip(0) for o in omegas]  # nothing of the traced call may be left in it
    wanted = step(other, y, *others)
    with torch.no_grad():
        row["traced_ms"] = milliseconds(lambda: traced(x, y, *omegas))
        for mode in modes:
            torch._dynamo.reset()
            compiled = torch.compile(traced, mode=mode)
            found = compiled(other, y, *others)
            row[mode] = {
                "compile_s": time.perf_counter() - begun,
                "ms": milliseconds(lambda compiled=compiled: compiled(x, y, *omegas)),  # type: ignore[misc]
                "difference": max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)),
            }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--networks", nargs="+", default=["mnist"], choices=tuple(BATCH))
    parser.add_argument("--modes", nargs="+", default=["default"], help="of torch.compile")
    parser.add_argument("--out")
    asked = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    command = " ".join(["python", "benchmarks/fisher_compiled.py", *sys.argv[1:]]).partition(" --out")[0]
    rows = []
    for network in asked.networks:
        rows.append(compare(network, asked.device, asked.modes))
        print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        Path(asked.out).write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
