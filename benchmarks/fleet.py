"""On a GPU: what a step and a measured group cost each training of a fleet, by streams and precision; equality first.

python benchmarks/fleet.py [--networks mnist cifar10] [--profile]"""

import argparse
import json
import time

import torch
from torch.nn.functional import cross_entropy

from reconbound.fleet import Fleet
from reconbound.networks import cifar10_cnn, mnist_cnn
from reconbound.settings import Settings

CASES = {
    "mnist": (mnist_cnn, (1, 28, 28), 60_000, 0.01, 12, (1, 4, 12)),
    "cifar10": (cifar10_cnn, (3, 32, 32), 5_000, 0.04, 6, (1, 3, 6)),
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
        for device in ("cpu", "cuda"):
            fleet = Fleet(lambda make=make: make().double(), losses, x, y, chosen(3, 0.2), at=[3], device=device)
            list(fleet.run(0, noise=lambda t: noise[t]))
            (work,) = fleet._measuring.values()
            work.omegas[0].copy_(omega)
            work(group)
            found.append((fleet.params.cpu(), work.found.cpu()))
        for what, a, b in zip(("parameters", "information"), *found, strict=True):
            gap = float((a - b).abs().max() / a.abs().max())
            assert gap < 1e-9, (name, what, gap)
            print(f"{name}: {what} on the GPU equal those on the CPU, gap {gap:.1e}")


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
    parser.add_argument("--profile", action="store_true", help="the dearest kernels")
    asked = parser.parse_args()
    same_on_both()
    torch.backends.cudnn.benchmark = True
    for name in asked.networks:
        make, shape, records, rate, trainings, all_streams = CASES[name]
        x, y = torch.rand(records, *shape), torch.randint(0, 10, (records,))
        for tf32 in (False, True):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
            for streams in all_streams:
                begun = time.perf_counter()
                settings = chosen(trainings, rate)
                fleet = Fleet(make, losses, x, y, settings, at=[10], device="cuda", streams=streams)
                group = torch.arange(round(rate * records))
                fleet._train(group)
                fleet._measure(group, 1.0, 1, 0, 0)
                torch.cuda.synchronize()
                captured = time.perf_counter() - begun
                step = per_training(fleet._train, group, trainings)
                measure = per_training(lambda g: fleet._measure(g, 1.0, 1, 0, 0), group, trainings)  # noqa: B023
                row = {"network": name, "tf32": tf32, "streams": streams, "trainings": trainings}
                row |= {"step_ms": round(step * 1e3, 4), "measure_ms": round(measure * 1e3, 4)}
                row |= {"capture_s": round(captured, 1), "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
                print(json.dumps(row), flush=True)
                if asked.profile and streams == 1:
                    profiled(fleet, group)
                del fleet
                torch.cuda.empty_cache()


def profiled(fleet: Fleet, group: torch.Tensor) -> None:
    for what, work in (("step", fleet._train), ("measure", lambda g: fleet._measure(g, 1.0, 1, 0, 0))):
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
