"""On a GPU: what a step and a measured group cost each training of a fleet, by engine and precision; equality first.

python benchmarks/fleet.py [--networks mnist cifar10] [--profile]"""

import argparse
import gc
import json
import time
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from reconbound.auditing.models import cifar10_cnn, mnist_cnn
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training.settings import Settings

CASES = {
    "mnist": (mnist_cnn, (1, 28, 28), 60_000, 0.01, (12, 36)),
    "cifar10": (cifar10_cnn, (3, 32, 32), 5_000, 0.04, (4, 12)),
}


def losses(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none")


def chosen(count: int, rate: float) -> list[Settings]:
    return [Settings(0.5 + k, 1.0 + k, rate, lr=0.03, momentum=0.5, budget=1.0, seed=1) for k in range(count)]


def same_on_both() -> None:
    """In float64: three steps and a measured group on the GPU, through graphs, equal those on the CPU."""
    for name, make, shape in (("mnist", mnist_cnn, (1, 28, 28)), ("cifar10", cifar10_cnn, (3, 32, 32))):
        torch.manual_seed(0)
        x, y = torch.rand(60, *shape, dtype=torch.float64), torch.randint(0, 10, (60,))
        noise = torch.randn(3, 3, sum(p.numel() for p in make().parameters()), dtype=torch.float64)
        omega, group = torch.randn(shape, dtype=torch.float64), torch.arange(7)
        found = []
        for device, method in (("cpu", "branches"), ("cuda", "branches"), ("cuda", "stacked")):
            make64 = lambda make=make: make().double()  # noqa: E731
            fleet = Fleet(make64, losses, x, y, chosen(3, 0.2), at=[3], device=device, method=method)
            list(fleet.run(0, noise=noise.__getitem__))
            (work,) = fleet._measuring.values()
            work.omegas[0].copy_(omega)
            work(group)
            found.append((method, fleet.params.cpu(), work.found.cpu()))
        for method, *there in found[1:]:
            for what, a, b in zip(("parameters", "information"), found[0][1:], there, strict=True):
                gap = float((a - b).abs().max() / a.abs().max())
                assert gap < 1e-9, (name, method, what, gap)
                print(f"{name}, {method}: {what} on the GPU equal those on the CPU, gap {gap:.1e}")


def per_training(work, records, trainings: int, repeats: int = 15) -> float:
    for _ in range(3):
        work(records)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work(records)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats / trainings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(CASES))
    parser.add_argument("--tf32", nargs="+", type=int, default=[0, 1], help="0, 1 or both")
    parser.add_argument("--profile", action="store_true", help="the dearest kernels")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    if 0 in asked.tf32:
        same_on_both()
    torch.backends.cudnn.benchmark = True
    for name in asked.networks:
        for tf32 in map(bool, asked.tf32):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
            sizes = CASES[name][4]
            for method, trainings in (*(("branches", k) for k in sizes[:2]), *(("stacked", k) for k in sizes[:2])):
                timed(name, tf32, method, trainings, asked.profile)


def timed(name: str, tf32: bool, method: str, trainings: int, profile: bool) -> None:
    make, shape, records, rate, sizes = CASES[name]
    x, y = torch.rand(records, *shape), torch.randint(0, 10, (records,))
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    settings = chosen(trainings, rate)
    fleet = Fleet(make, losses, x, y, settings, at=[10], device="cuda", method=method, streams=12)
    group = torch.arange(round(rate * records))

    measured = partial(fleet._measure, weight=1.0, seed=1, step=0, part=0)
    fleet._train(group)
    measured(group)
    torch.cuda.synchronize()
    captured = time.perf_counter() - begun
    row = {"network": name, "tf32": tf32, "method": method, "trainings": trainings}
    row["step_ms"] = round(1e3 * per_training(fleet._train, group, trainings), 4)
    row["measure_ms"] = round(1e3 * per_training(measured, group, trainings), 4)
    row |= {"capture_s": round(captured, 1), "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    print(json.dumps(row), flush=True)
    if profile and method == "stacked" and trainings == sizes[1]:
        for what, work in (("step", fleet._train), ("measure", measured)):
            profiled(what, work, group)
    del fleet, measured
    gc.collect()  # a fleet and its work hold each other
    torch.cuda.empty_cache()


def profiled(what: str, work, group: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work(group)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(f"{what}: {total:.0f} us in {sum(e.count for e in rows)} kernels")
    for e in rows[:14]:
        print(f"  {e.self_device_time_total:8.0f} us {e.count:5d} x  {e.key[:110]}")


if __name__ == "__main__":
    main()
