"""What one accounted step costs: our estimator against the paper's, on the paper's own networks, in one run.

    python benchmarks/fisher_step.py                          # two CPU cores, MNIST network, Opacus beside it
    python benchmarks/fisher_step.py --device cuda --networks mnist cifar10 --out table.json
    python benchmarks/fisher_step.py --before ../before/src   # speed against another version, on --networks

With --before the two versions take turns, each in a process of its own (fisher_times.py); the last lines are the ratios
of the medians, after over before. Nothing else is measured then. `git worktree add ../before COMMIT` makes the folder.

The state is that after 300 private steps (noise 0.5, clip 4, step size 0.1, momentum 0.5). For each network it measures

    variance  of one coordinate (the paper's way) and of one deflated probe (ours), relative to the squared trace,
              median over records; hence how many probes reach the standard error of 50 coordinates
    time      of 50 coordinates and of that many probes; on a GPU both in a captured CUDA graph

The paper's way is measured in two forms: one coordinate at a time, as the paper does it and as the targets were set,
and the fastest of several at once. Ours too: in its default form, and in the fastest of three, chosen after the fact.
Four ratios, each named. On a GPU cuDNN tries its algorithms first, for both sides (--no-autotune: it guesses, which
makes the paper's way with many at once half as fast and changes ours by a few percent); TF32 is off for both, and
with --tf32-too the default form and the paper's fastest are timed once more with it on for both.

And, on a CPU, the accounted step against a plain DP-SGD step of Opacus (time and peak memory, each in its own process)
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
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reconbound import data
from reconbound.auditing import models as networks
from reconbound.fisher import (
    CoordinateOptions,
    ProbeOptions,
    StepOptions,
    clipped_gradient_sum,
    coordinate_information,
    step_information,
)

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


DEFAULT = "inputs, 2 own directions"  # what step_information does when nothing is said
OURS: dict[str, dict[str, Any]] = {
    "weights": {"space": "weights"},
    DEFAULT: {},
    "inputs, 3 own directions": {"space": "inputs", "deflate": 3},
}


def relative_variances(model: nn.Module, x: Tensor, y: Tensor, draws: int = 400) -> tuple[float, dict[str, float]]:
    """Of one coordinate and of one probe in each form, relative to the squared trace; medians over some records.

    That of a coordinate is from all of them but one, for few draws of so heavy a tail give too little; their mean is
    the trace. That of a probe is from many draws."""
    x, y = x[:60], y[:60]
    d = x[0].numel()
    trace, error = coordinate_information(
        model, losses, x, y, **SETTING, coordinates=CoordinateOptions(count=d - 1, at_once=16)
    )
    spread = error * math.sqrt(d * (d - 1))  # error² = spread²/(d − 1) · (1 − (d − 1)/d)
    relative = {}
    for form, options in OURS.items():
        last: list[Tensor] = []

        def draw(options: dict[str, Any] = options, last: list[Tensor] = last) -> None:
            probes = StepOptions(probes=ProbeOptions(error="bound", generator=draws_on(x), **options))
            last[:] = [step_information(model, losses, x, y, **SETTING, options=probes).trace]

        again = graphed(draw) if x.is_cuda else draw  # a replay draws anew
        values = [(again(), last[0].clone())[1] for _ in range(draws)]  # type: ignore[func-returns-value]
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


@lru_cache
def _generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def draws_on(x: Tensor) -> torch.Generator:
    """The generator of all probes on x's device: a CUDA graph must know it before it is captured."""
    return _generator(x.device.type)


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """The same work, captured once and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(_generator("cuda"))
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def batch_gradient(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(losses(model(x), y).sum(), list(model.parameters()))


def compare(network: str, device: str) -> tuple[dict[str, Any], Callable[[], None]]:
    """The row of a network, and what adds the times with TF32 to it."""
    batch = BATCH[network]
    model, images, labels = load(network, device)
    x, y = trained(model, images, labels, batch)
    d = x[0].numel()
    v_coordinate, v_probe = relative_variances(model, x, y)
    target = v_coordinate / COORDINATES * (1 - COORDINATES / d)
    needed = {form: max(1, math.ceil(v / target - 1e-9)) for form, v in v_probe.items()}

    def paper(coordinates: int, at_once: int) -> Callable[[], Any]:
        chosen = CoordinateOptions(coordinates, at_once, draws_on(x))
        return lambda: coordinate_information(model, losses, x, y, **SETTING, coordinates=chosen)

    def ours(count: int, **options: Any) -> Callable[[], Any]:
        probes = ProbeOptions(**{"count": count, "error": "bound", "generator": draws_on(x), **options})
        return lambda: step_information(model, losses, x, y, **SETTING, options=StepOptions(probes=probes))

    row: dict[str, Any] = {
        "network": network,
        "batch": batch,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_autotune": torch.backends.cudnn.benchmark,
        "variance_of_a_coordinate": v_coordinate,
        "variance_of_a_probe": v_probe,
        "target_variance": target,
    }
    wrap = graphed if device == "cuda" else lambda work: work
    repeats = 20 if device == "cuda" else 5
    row["batch_gradient_s"] = seconds(wrap(lambda: batch_gradient(model, x, y)), repeats, device)
    each = {
        at_once: seconds(wrap(paper(at_once, at_once)), 5 if device == "cuda" else 2, device) / at_once
        for at_once in ((1, 10, 25) if device == "cuda" else (1, 2))
    }
    best = min(each, key=lambda k: each[k])
    row["paper"] = {
        "seconds_of_a_coordinate_by_how_many_at_once": each,
        "one_at_a_time": {"fifty_coordinates_s": COORDINATES * each[1]},
        "best_form": {"at_once": best, "fifty_coordinates_s": COORDINATES * each[best]},
    }
    row["ours"] = {
        form: {"probes": needed[form], "seconds": seconds(wrap(ours(needed[form], **OURS[form])), repeats, device)}
        for form in OURS
    }
    fastest = min(OURS, key=lambda f: row["ours"][f]["seconds"])
    row["ours_default"] = {"form": DEFAULT, **row["ours"][DEFAULT]}
    row["ours_fastest_of_three"] = {"form": fastest, **row["ours"][fastest]}
    row["one_probe_s"] = seconds(wrap(ours(1)), repeats, device)
    row["eight_probes_s"] = seconds(wrap(ours(8)), repeats, device)
    probes = needed[DEFAULT]
    row["ours_with_standard_error_s"] = seconds(wrap(ours(probes, error="product")), repeats, device)
    if device == "cuda":
        row["ours_default_eager_s"] = seconds(ours(probes), repeats, device)
    row["ratios"] = {
        f"{ours_name} against {paper_name}": row["paper"][paper_key]["fifty_coordinates_s"] / row[ours_key]["seconds"]
        for ours_name, ours_key in (("default", "ours_default"), ("fastest of three", "ours_fastest_of_three"))
        for paper_name, paper_key in (("one coordinate at a time", "one_at_a_time"), ("the best form", "best_form"))
    }

    def with_tf32() -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        theirs = COORDINATES / best * seconds(wrap(paper(best, best)), 5, device)
        own = seconds(wrap(ours(probes)), repeats, device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        row["with_tf32_on_both"] = {
            "fifty_coordinates_s": theirs, "ours_default_s": own, "ratio: default against the best form": theirs / own
        }  # fmt: skip

    return row, with_tf32


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
            found = step_information(
                model, losses, x, y, **SETTING, options=StepOptions(probes=ProbeOptions(error="bound"))
            )
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
    options = StepOptions(micro_batch=micro, probes=ProbeOptions(count=probes, error="bound"))
    found = cost(lambda: step_information(model, losses, x, y, **SETTING, options=options), 3)
    return {**found, "parameters": sum(p.numel() for p in model.parameters())}


GROWTH = {
    "batch": (150, 300, 600, 1200),
    "probes": (1, 2, 4, 8),
    "micro_batch": (75, 150, 300, 600),
    "parameters": (128, 512, 1024, 2800),
}


# --- two versions in turns -----------------------------------------------------------


#: glibc returns freed memory to the system or keeps it, as the order of earlier calls has it: 30 or 48 ms for the same
#: call. Here it always keeps it.
_KEEP_MEMORY = {f"MALLOC_{name}_": str(2**32) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}


def in_turns(before: str, device: str, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    """The median times of each piece of work in two versions, and their ratio."""
    sources = {"before": before, "after": str(Path(__file__).parents[1] / "src")}
    for source in sources.values():
        if not (Path(source) / "reconbound").is_dir():
            sys.exit(f"--before: no folder reconbound in {source}")
    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for turn in range(rounds):
        for version in sorted(sources, reverse=turn % 2 == 1):
            path = os.pathsep.join([sources[version], os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(Path(__file__).with_name("fisher_times.py")), "--device", device]
            command += ["--only", *only]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                                  env={**os.environ, **_KEEP_MEMORY, "PYTHONPATH": path})  # fmt: skip
            found[version].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for name in found["before"][0]:
        times = {version: statistics.median(one[name] for one in turns) for version, turns in found.items()}
        ratios = [after[name] / before[name] for before, after in zip(found["before"], found["after"], strict=True)]
        rows.append({"work": name, **times, "ratio": times["after"] / times["before"], "ratio_by_round": ratios})
    return rows


def print_turns(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        times = f"{row['before'] * 1e3:9.2f} ms → {row['after'] * 1e3:9.2f} ms"
        print(f"{row['work']:52} {times}  ratio {row['ratio']:.3f}")


def write(table: dict[str, Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(table, indent=1) + "\n")


def print_ratios(row: dict[str, Any]) -> None:
    alone, best = row["paper"]["one_at_a_time"], row["paper"]["best_form"]
    print(f"{row['network']} on {row['device']}, to the standard error of {COORDINATES} coordinates:")
    print(f"  paper's way one at a time      {alone['fifty_coordinates_s']:9.4g} s")
    print(f"  paper's way in its best form   {best['fifty_coordinates_s']:9.4g} s ({best['at_once']} at once)")
    for name in ("ours_default", "ours_fastest_of_three"):
        own = row[name]
        print(f"  {name.replace('_', ' '):30} {own['seconds']:9.4g} s ({own['form']}, {own['probes']} probe(s))")
    for name, ratio in row["ratios"].items():
        print(f"  {name}: {ratio:.1f} times less")
    if "with_tf32_on_both" in row:
        ratio = row["with_tf32_on_both"]["ratio: default against the best form"]
        print(f"  with TF32 on both sides, default against the best form: {ratio:.1f} times less")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--networks", nargs="+", default=["mnist"], choices=(*BATCH, "wide", "tokens"))
    parser.add_argument("--tf32-too", action="store_true", help="time once more with TF32 on, for both sides")
    parser.add_argument("--no-autotune", action="store_true", help="let cuDNN guess its algorithms, for both sides")
    parser.add_argument("--before", metavar="SRC", help="the source folder of another version: compare speeds only")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each version with --before")
    parser.add_argument("--out", help="write the table here as JSON")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind = options.child[0]
        print(json.dumps(child(kind) if kind in ("opacus", "ours") else grow(kind, int(options.child[1]))))
        return
    if options.before:
        rows = in_turns(options.before, options.device, options.rounds, options.networks)
        device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, 2 threads"
        write({"device": device, "torch": torch.__version__, "rows": rows}, options.out)
        print_turns(rows)
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = not options.no_autotune
    command = " ".join(["python", "benchmarks/fisher_step.py", *sys.argv[1:]]).partition(" --out")[0]
    table: dict[str, Any] = {"command": command, "rows": []}
    more = []
    for network in options.networks:
        row, with_tf32 = compare(network, options.device)
        table["rows"].append(row)
        more.append(with_tf32)
        print(json.dumps(row, indent=1), flush=True)
        write(table, options.out)
    for with_tf32 in more if options.tf32_too else []:
        with_tf32()
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
    write(table, options.out)
    for row in table["rows"]:
        print_ratios(row)
    if "opacus" in table:
        o = table["opacus"]
        print(
            f"accounted step against Opacus: {o['time_ratio']:.2f} times the time, "
            f"{o['memory_ratio']:.2f} times the memory"
        )


if __name__ == "__main__":
    main()
