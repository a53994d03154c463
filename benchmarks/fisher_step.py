"""What one accounted step costs: our estimator against the paper's, on the paper's own networks, in one run.

    python benchmarks/fisher_step.py                          # two CPU cores, MNIST network, Opacus beside it
    python benchmarks/fisher_step.py --device cuda --networks mnist cifar10 --out table.json

The state is that after 300 private steps (noise 0.5, clip 4, step size 0.1, momentum 0.5). For each network it measures

    variance  of one coordinate (the paper's way) and of one deflated probe (ours), relative to the squared trace,
              median over records; hence how many probes reach the standard error of 50 coordinates
    time      of 50 coordinates and of that many probes; both also in a captured CUDA graph on a GPU

and, on a CPU, the accounted step against a plain DP-SGD step of Opacus (time and peak memory, each in its own process)
and how cost grows with batch, parameters, probes and micro-batch. The last lines are the ratios."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reconbound import data, networks
from reconbound.fisher import clipped_gradient_sum, coordinate_information, step_information

STEPS, NOISE, CLIP, RATE, MOMENTUM, COORDINATES = 300, 0.5, 4.0, 0.1, 0.5, 50
BATCH = {"mnist": 600, "cifar10": 200}
SETTING = {"max_grad_norm": CLIP, "noise_multiplier": NOISE, "clip": "smooth"}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def load(network: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    folder = os.environ.get("RECONBOUND_DATA") or Path(__file__).parents[2] / "shared" / "data"
    images, labels = data.mnist(folder) if network == "mnist" else data.cifar10(folder, batches=1)
    x = torch.tensor(images, device=device, dtype=torch.float32) / 255
    x = x[:, None] if network == "mnist" else x
    torch.manual_seed(0)
    model = networks.mnist_cnn() if network == "mnist" else networks.cifar10_cnn()
    return model.to(device), x, torch.tensor(labels, device=device)


def trained(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Run the private steps; the batch on which everything is measured."""
    params = dict(model.named_parameters())
    speed = {name: torch.zeros_like(p) for name, p in params.items()}
    for _ in range(STEPS):
        chosen = torch.randperm(len(x), device=x.device)[:batch]
        step = clipped_gradient_sum(model, losses, x[chosen], y[chosen], max_grad_norm=CLIP)
        with torch.no_grad():
            for name, p in params.items():
                noisy = step.gradient_sum[name] + torch.randn_like(p) * NOISE * CLIP
                speed[name].mul_(MOMENTUM).add_(noisy / batch)
                p.sub_(RATE * speed[name])
    chosen = torch.randperm(len(x), device=x.device)[:batch]
    return x[chosen], y[chosen]


OURS: dict[str, dict[str, Any]] = {  # the forms of our probe; the cheapest way to the target counts
    "weights": {"probe": "weights"},
    "inputs, 2 directions": {"probe": "inputs", "deflate": 2},
    "inputs, 3 directions": {"probe": "inputs", "deflate": 3},
}


def relative_variances(model: nn.Module, x: Tensor, y: Tensor, draws: int = 400) -> tuple[float, dict[str, float]]:
    """Of one coordinate and of one probe in each form, relative to the squared trace; medians over some records.

    That of a coordinate is from all of them but one, for few draws of so heavy a tail give too little; their mean is
    the trace. That of a probe is from many draws."""
    x, y = x[:60], y[:60]
    d = x[0].numel()
    trace, error = coordinate_information(model, losses, x, y, **SETTING, coordinates=d - 1, at_once=16)
    spread = error * math.sqrt(d * (d - 1))  # error² = spread²/(d − 1) · (1 − (d − 1)/d)
    setting = {**SETTING, "error": "bound"}
    relative = {}
    for form, options in OURS.items():
        values = [step_information(model, losses, x, y, **setting, **options).trace for _ in range(draws)]
        relative[form] = (torch.stack(values).var(0) / trace**2).median().item()
    return (spread**2 / trace**2).median().item(), relative


def seconds(work: Callable[[], Any], repeats: int, device: str) -> float:
    """Median wall time of one call."""
    work()
    taken = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """The same work, captured once and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def batch_gradient(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(losses(model(x), y).sum(), list(model.parameters()))


def compare(network: str, device: str) -> dict[str, Any]:
    batch = BATCH[network]
    model, images, labels = load(network, device)
    x, y = trained(model, images, labels, batch)
    d = x[0].numel()
    v_coordinate, v_probe = relative_variances(model, x, y)
    target = v_coordinate / COORDINATES * (1 - COORDINATES / d)
    needed = {form: max(1, math.ceil(v / target - 1e-9)) for form, v in v_probe.items()}

    def paper(coordinates: int, at_once: int) -> Callable[[], Any]:
        return lambda: coordinate_information(model, losses, x, y, **SETTING, coordinates=coordinates, at_once=at_once)

    def ours(count: int, **options: Any) -> Callable[[], Any]:
        return lambda: step_information(model, losses, x, y, **SETTING, probes=count, error="bound", **options)

    row: dict[str, Any] = {
        "network": network,
        "batch": batch,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "tf32": torch.backends.cudnn.allow_tf32,
        "variance_of_a_coordinate": v_coordinate,
        "variance_of_a_probe": v_probe,
        "target_variance": target,
    }
    wrap = graphed if device == "cuda" else lambda work: work
    repeats = 20 if device == "cuda" else 5
    row["batch_gradient_s"] = seconds(wrap(lambda: batch_gradient(model, x, y)), repeats, device)
    forms = {}
    for at_once in (1, 5, 10, 25) if device == "cuda" else (1, 2):
        forms[at_once] = seconds(wrap(paper(at_once, at_once)), 5 if device == "cuda" else 2, device) / at_once
    best = min(forms, key=lambda k: forms[k])
    row["one_coordinate_s"], row["coordinates_at_once"] = forms[best], best
    row["fifty_coordinates_s"] = (
        COORDINATES * forms[best] if device == "cuda" else seconds(paper(COORDINATES, best), 1, device)
    )
    times = {form: seconds(wrap(ours(needed[form], **OURS[form])), repeats, device) for form in OURS}
    form = min(times, key=lambda f: times[f])
    probes = needed[form]
    row["ours"] = {f: {"probes": needed[f], "seconds": times[f]} for f in OURS}
    row["probe"], row["probes_for_the_same_error"], row["ours_s"] = form, probes, times[form]
    row["one_probe_s"] = seconds(wrap(ours(1)), repeats, device)
    row["eight_probes_s"] = seconds(wrap(ours(8)), repeats, device)
    row["ours_with_standard_error_s"] = seconds(
        wrap(lambda: step_information(model, losses, x, y, **SETTING, probes=probes, error="product")), repeats, device
    )
    if device == "cuda":
        row["ours_eager_s"] = seconds(ours(probes, **OURS[form]), repeats, device)
    row["ratio"] = row["fifty_coordinates_s"] / row["ours_s"]
    row["ratio_of_one_probe"] = row["fifty_coordinates_s"] / row["one_probe_s"]
    return row


# --- beside Opacus, each in a process of its own -----------------------------------


def child(side: str) -> dict[str, float]:
    """Time and peak memory beyond the start of one DP-SGD step: Opacus' own, or ours with one probe."""
    model, images, labels = load("mnist", "cpu")
    x, y = images[:600].clone(), labels[:600].clone()
    del images, labels
    if side == "opacus":
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        wrapped = GradSampleModule(model, loss_reduction="sum")
        inner = torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=MOMENTUM)
        optimizer = DPOptimizer(
            inner, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=600, loss_reduction="sum"
        )

        def step() -> None:
            optimizer.zero_grad()
            losses(wrapped(x), y).sum().backward()
            optimizer.step()

    else:
        params = dict(model.named_parameters())
        inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

        def step() -> None:
            found = step_information(model, losses, x, y, **SETTING, error="bound")
            with torch.no_grad():
                for name, p in params.items():
                    p.grad = (found.gradient_sum[name] + torch.randn_like(p) * NOISE * CLIP) / 600
            inner.step()

    return cost(step, 9)


def cost(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median time of a step, and how far memory rises above where it stood before the first."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading the data
    before = _memory("VmRSS")
    taken = seconds(step, repeats, "cpu")
    return {"seconds": taken, "peak_bytes": _memory("VmHWM") - before}


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def in_child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def beside_opacus() -> dict[str, Any]:
    opacus, ours = in_child("opacus"), in_child("ours")
    return {
        "opacus": opacus,
        "ours": ours,
        "time_ratio": ours["seconds"] / opacus["seconds"],
        "memory_ratio": ours["peak_bytes"] / opacus["peak_bytes"],
    }


# --- how cost grows ------------------------------------------------------------------


def grow(kind: str, size: int) -> dict[str, float]:
    """One row of the growth table, in a process of its own: the time and peak memory of a step."""
    batch, probes, micro, width = 600, 1, None, 0
    if kind == "batch":
        batch = size
    elif kind == "probes":
        probes = size
    elif kind == "micro_batch":
        batch, micro = 1200, size
    elif kind == "parameters":
        batch, width = 64, size
    model, images, labels = load("mnist", "cpu")
    if width:
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                              nn.Linear(width, 10))  # fmt: skip
    x, y = images[:batch].clone(), labels[:batch].clone()
    del images, labels
    setting = {**SETTING, "probes": probes, "micro_batch": micro, "error": "bound"}
    found = cost(lambda: step_information(model, losses, x, y, **setting), 3)
    return {**found, "parameters": sum(p.numel() for p in model.parameters())}


GROWTH = {
    "batch": (150, 300, 600, 1200),
    "probes": (1, 2, 4, 8),
    "micro_batch": (75, 150, 300, 600),
    "parameters": (128, 512, 1024, 2800),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--networks", nargs="+", default=["mnist"], choices=tuple(BATCH))
    parser.add_argument("--tf32", action="store_true", help="allow TF32 on CUDA, for both sides")
    parser.add_argument("--out", help="write the table here as JSON")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind = options.child[0]
        print(json.dumps(child(kind) if kind in ("opacus", "ours") else grow(kind, int(options.child[1]))))
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = options.tf32
    table: dict[str, Any] = {"command": " ".join(["python", *sys.argv]).partition(" --out")[0], "rows": []}
    for network in options.networks:
        row = compare(network, options.device)
        table["rows"].append(row)
        print(json.dumps(row, indent=1), flush=True)
    if options.device == "cpu":
        table["opacus"] = beside_opacus()
        table["growth"] = [
            {"kind": kind, "size": size, **in_child(kind, str(size))}
            for kind, sizes in GROWTH.items()
            for size in sizes
        ]
        for row in table["growth"]:
            cost = f"{row['seconds'] * 1e3:8.1f} ms  {row['peak_bytes'] / 2**20:8.0f} MiB"
            print(f"{row['kind']:12} {row['size']:>6}  {cost}  {row['parameters']:>10,} parameters")
    if options.out:
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n")
    for row in table["rows"]:
        print(f"{row['network']} on {row['device']}: {COORDINATES} coordinates {row['fifty_coordinates_s']:.4g} s, "
              f"{row['probes_for_the_same_error']} probe(s) ({row['probe']}) {row['ours_s']:.4g} s: "
              f"{row['ratio']:.1f} times less")  # fmt: skip
    if "opacus" in table:
        o = table["opacus"]
        print(
            f"accounted step against Opacus: {o['time_ratio']:.2f} times the time, "
            f"{o['memory_ratio']:.2f} times the memory"
        )


if __name__ == "__main__":
    main()
