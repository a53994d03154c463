"""What a step of private training takes: PrivateSGD by how it accounts, beside Opacus in the same process.

Opacus trains as its users do, with the loader of `make_private` (of a TensorDataset in main memory, without workers),
and by hooks and by ghost clipping without its loader's cost: batches are then Poisson samples of tensors on the device,
drawn by one call. Its noise is from torch's generator. PrivateSGD draws batches and noise from its own secret seed, by
ChaCha20 on a GPU, and checks its graphs against eager steps from time to time; all of that is in its times. Accounting:
none; "removed", the divergence of each record's release to that without it; the default budget; every batch.

    python benchmarks/training_speed.py [--problems mnist cifar10] [--rounds 3] [--out FOLDER] [--profile] [--small]

Images are random: times do not depend on them. Rounds take turns; the table has the median of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reconbound.auditing.models import cifar10_cnn, mnist_cnn
from reconbound.training.noise import draw_for
from reconbound.training.private_sgd import PrivateSGD, Settings
from reconbound.training.settings import Callback

#: network, shape of a record, records, sample rate, steps of a run (its blocks of measurement), of which not timed
PROBLEMS = {
    "mnist": (mnist_cnn, (1, 28, 28), 60_000, 0.01, 1340, 280),
    "cifar10": (cifar10_cnn, (3, 32, 32), 50_000, 0.004, 1670, 280),
}
SMALL = {name: (make, shape, 400, 0.05, 30, 10) for name, (make, shape, *_) in PROBLEMS.items()}
WAYS: dict[str, dict[str, Any]] = {
    "without accounting": {"rules": None, "worlds": None},
    "removed": {"rules": None},
    "default budget": {},
    "every batch": {"budget": "every"},
}
SIGMA, CLIP, LR = 1.0, 1.0, 0.1


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


class Clock(Callback):
    """Measures the time from one step to the last of a run."""

    def __init__(self, first: int, device: torch.device) -> None:
        self.first, self.device, self.begun, self.taken = first, device, 0.0, 0.0

    def on_step(self, learner: PrivateSGD) -> None:
        if learner.step in (self.first, learner.steps):
            wait(self.device)
            now = time.perf_counter()
            if learner.step == self.first:
                self.begun = now
            else:
                self.taken = (now - self.begun) / (learner.steps - self.first)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_ours(problem: tuple[Any, ...], way: str, data: tuple[Tensor, Tensor]) -> float:
    """Seconds of a step of PrivateSGD."""
    make, _, _, rate, steps, first = problem
    chosen = dict(WAYS[way])
    worlds = {"worlds": chosen.pop("worlds")} if "worlds" in chosen else {}
    torch.manual_seed(0)
    clock = Clock(first, data[0].device)
    settings = Settings(SIGMA, CLIP, rate, lr=LR, clip="hard", **chosen)
    model = make().to(data[0].device)
    learner = PrivateSGD(model, losses, *data, settings, callbacks=[clock], progress=False, **worlds)
    learner.fit(steps)
    static = learner.measurer.static
    assert data[0].device.type == "cpu" or (static is not None and not static._sums.eager)
    return clock.taken


def of_opacus(problem: tuple[Any, ...], mode: str, data: tuple[Tensor, Tensor]) -> float:
    """Seconds of a step of Opacus, in its default mode ("hooks") or with ghost clipping."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    make, _, records, rate, steps, first = problem
    torch.manual_seed(0)
    network, (x, y) = make().to(data[0].device), data
    inner = torch.optim.SGD(network.parameters(), lr=LR)
    how: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": rate * records}
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "ghost":
        model: nn.Module = GradSampleModuleFastGradientClipping(network, max_grad_norm=CLIP, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(inner, **how)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion, loss_reduction="mean")
    else:
        model, optimizer = GradSampleModule(network), DPOptimizer(inner, **how)
    steps, begun = min(steps, first + 300), 0.0
    for step in range(steps):
        if step == first:
            wait(x.device)
            begun = time.perf_counter()
        drawn = (torch.rand(records, device=x.device) < rate).nonzero().flatten()
        optimizer.zero_grad()
        criterion(model(x[drawn]), y[drawn]).backward()
        optimizer.step()
    wait(x.device)
    return (time.perf_counter() - begun) / (steps - first)


def of_make_private(problem: tuple[Any, ...], data: tuple[Tensor, Tensor]) -> float:
    """Seconds of a step of Opacus as its tutorials write it, with the loader of `make_private`."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    make, _, records, rate, steps, first = problem
    torch.manual_seed(0)
    network, device = make().to(data[0].device), data[0].device
    loader = DataLoader(TensorDataset(data[0].cpu(), data[1].cpu()), batch_size=round(rate * records))
    inner, criterion = torch.optim.SGD(network.parameters(), lr=LR), nn.CrossEntropyLoss()
    how: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP}
    model, optimizer, loader = PrivacyEngine().make_private(
        module=network, optimizer=inner, data_loader=loader, **how
    )  # fmt: skip
    first, step, begun = first // 4, 0, 0.0
    steps = min(steps, first + 150)
    while step < steps:
        for x, y in loader:
            if step == first:
                wait(device)
                begun = time.perf_counter()
            if step == steps:
                break
            optimizer.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            step += 1
    wait(device)
    return (time.perf_counter() - begun) / (steps - first)


def of_noise(size: int, device: torch.device) -> float:
    """Seconds of drawing the noise for a sum, alone: the hash of the sum and the normal numbers."""
    total = torch.randn(size, device=device)
    for _ in range(5):
        draw_for(total, 2**200, 0)
    wait(device)
    begun = time.perf_counter()
    for step in range(100):
        draw_for(total, 2**200, step)
    wait(device)
    return (time.perf_counter() - begun) / 100


def measured(name: str, problem: tuple[Any, ...], rounds: int, device: torch.device) -> dict[str, Any]:
    """Returns the milliseconds of a step in each way, in all rounds."""
    make, shape, records, _, _, _ = problem
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(records, *shape, generator=generator).to(device)
    y = torch.randint(0, 10, (records,), generator=generator).to(device)
    work: dict[str, Callable[[], float]] = {"Opacus, make_private": lambda: of_make_private(problem, (x, y))}
    for mode in ("hooks", "ghost"):
        work[f"Opacus, {mode}"] = lambda mode=mode: of_opacus(problem, mode, (x, y))
    for way in WAYS:
        work[f"PrivateSGD, {way}"] = lambda way=way: of_ours(problem, way, (x, y))
    taken: dict[str, list[float]] = {what: [] for what in work}
    for _ in range(rounds):
        for what, call in work.items():
            try:
                taken[what].append(1e3 * call())
            except ImportError as reason:
                print(f"{what}: left out ({reason})")
            gc.collect()
    size = sum(p.numel() for p in make().parameters())
    found = {what: each for what, each in taken.items() if each}
    return {"problem": name, "parameters": size, "milliseconds": found, "noise": 1e3 * of_noise(size, device)}


def show(row: dict[str, Any]) -> None:
    """Prints the table of a problem."""
    middle = {what: median(each) for what, each in row["milliseconds"].items()}
    alone, loaded = middle.get("Opacus, hooks"), middle.get("Opacus, make_private")
    print(f"\n{row['problem']}, {row['parameters']:,} parameters")
    for what, value in middle.items():
        each = row["milliseconds"][what]
        ratio = ""
        if alone is not None and loaded is not None:
            ratio = f"   {loaded / value:6.2f} times faster than Opacus with its loader, {alone / value:6.2f} without"
        print(f"    {what:32s} {value:9.3f} ms ({min(each):.3f} to {max(each):.3f}){ratio}")
    share = row["noise"] / middle["PrivateSGD, default budget"]
    print(f"    noise alone, not overlapped with anything: {row['noise']:.3f} ms, {share:.1%} of a step by default")


def profiled(problem: tuple[Any, ...], way: str, device: torch.device) -> None:
    """Prints what 50 steps do on the GPU and in Python."""
    make, shape, records, rate, steps, _ = problem
    x, y = torch.rand(records, *shape, device=device), torch.randint(0, 10, (records,), device=device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=kinds)

    class Watch(Callback):
        def on_step(self, learner: PrivateSGD) -> None:
            if learner.step == steps - 51:
                profiler.start()
            if learner.step == steps - 1:
                wait(device)
                profiler.stop()

    chosen = {name: value for name, value in WAYS[way].items() if name != "worlds"}
    settings = Settings(SIGMA, CLIP, rate, lr=LR, clip="hard", **chosen)
    PrivateSGD(make().to(device), losses, x, y, settings, callbacks=[Watch()], progress=False).fit(steps)
    for order in ("self_cuda_time_total", "self_cpu_time_total"):
        print(profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--problems", nargs="+", default=[*PROBLEMS], choices=PROBLEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="few records and steps, to try it: no measurement")
    parser.add_argument("--profile", action="store_true", help="of the default budget and of every batch")
    parser.add_argument("--out", type=Path, help="a folder for training_speed.json")
    asked = parser.parse_args(words)
    device = torch.device(asked.device)
    small = asked.small or device.type == "cpu"  # `make bench` runs it on a CPU
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", "Using a non-full backward hook|Full backward hook")
    warnings.filterwarnings("ignore", ".*at least once costs about")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, float32 without TF32{', a trial of few records' if small else ''}")
    rows = []
    for name in asked.problems:
        problem = (SMALL if small else PROBLEMS)[name]
        rows.append(measured(name, problem, 1 if small else asked.rounds, device))
        show(rows[-1])
        for way in ("default budget", "every batch") if asked.profile else ():
            profiled(problem, way, device)
        if asked.out is not None:  # after each, should the machine be taken away
            asked.out.mkdir(parents=True, exist_ok=True)
            about = {"device": where, "torch": torch.__version__, "trial": small, "rows": rows}
            (asked.out / "training_speed.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
