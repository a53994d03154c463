"""Does another way to start or to scale the pixels explain the paper's level on CIFAR-10? The best accuracy at σ = 2,
the grid's noise whose RDP floor is above MSE = 1, under other readings of the paper's training.

    python experiments/cifar10_variants.py --train --tf32      on a GPU, minutes; adds rows to cifar10_variants.csv
    python experiments/cifar10_variants.py                     the table from the rows

Starts: PyTorch's initial weights, or those of standard deviation 1/√(inputs) without biases ("lecun", usual in JAX).
Pixels, by a fixed first layer, so that floors stay in units of [0, 1]: as they are, 2x − 1, or each channel less its
mean over its standard deviation (constants of CIFAR-10 that everybody uses)."""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import torch
from _grid import append, given, losses, on_test, options, scaled
from torch import nn

from reconbound.data import cifar10
from reconbound.fleet import Fleet
from reconbound.networks import cifar10_cnn, lecun_normal, standardised
from reconbound.settings import Settings

ROWS = Path(__file__).parent / "results" / "cifar10_variants.csv"
NOISE, PAIRS, AT = 2.0, ((8.0, 0.01), (4.0, 0.01), (1.0, 0.03), (2.0, 0.01)), (5000, 12500)
SCALES = {"unit": (0.0, 1.0), "symmetric": (0.5, 0.5), "standard": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))}
VARIANTS = (("lecun", "unit"), ("lecun", "standard"), ("torch", "standard"), ("lecun", "symmetric"))


def network(scale: str) -> nn.Sequential:
    return cifar10_cnn() if scale == "unit" else standardised(cifar10_cnn(), *SCALES[scale])


def train(asked: argparse.Namespace, out: Path) -> None:
    begun = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = asked.tf32
    images, labels = cifar10(train=True)
    x, y = scaled(images), torch.from_numpy(labels)
    accuracy = on_test(cifar10, asked.device)
    at = tuple(t // (asked.short or 1) for t in AT)
    for start, scale in VARIANTS:
        if time.perf_counter() - begun > asked.seconds:
            break
        settings = [Settings(NOISE, c, 0.004, lr=lr, momentum=0.5, budget=1.0, seed=asked.seed) for c, lr in PAIRS]
        fleet = Fleet(
            lambda scale=scale: network(scale), losses, x, y, settings, at=at, budgets=(1e-3,) * len(at),
            device=asked.device, method="branches", initialise=lecun_normal if start == "lecun" else None,
        )  # fmt: skip
        for shot in fleet.run(0, evaluate=accuracy):
            rows = [
                {"variant": f"{start}, {scale}", "max_grad_norm": s.max_grad_norm, "lr": s.lr, "steps": shot.step,
                 "run": 0, "accuracy": f"{float(found):.4f}"}
                for s, found in zip(shot.settings, shot.found, strict=True)
            ]  # fmt: skip
            append(out, rows)
            seconds = time.perf_counter() - begun
            print(f"{seconds:.0f} s", start, scale, shot.step, *(r["accuracy"] for r in rows), flush=True)


def main() -> None:
    asked = given(options(__doc__, runs=1, rows=ROWS))
    if asked.train:
        train(asked, Path(asked.rows))
        return
    rows = list(csv.DictReader(Path(asked.rows).read_text().splitlines()))
    print("CIFAR-10, σ = 2: accuracy after so many steps, by (C, step size)\n")
    pairs = list(dict.fromkeys((r["max_grad_norm"], r["lr"]) for r in rows))
    print("| start, pixels | steps |", " | ".join(f"{float(c):g}, {lr}" for c, lr in pairs), "|")
    print("| --- " * (2 + len(pairs)) + "|")
    for variant, steps in dict.fromkeys((r["variant"], r["steps"]) for r in rows):
        found = {(r["max_grad_norm"], r["lr"]): float(r["accuracy"]) for r in rows
                 if (r["variant"], r["steps"]) == (variant, steps)}  # fmt: skip
        print(f"| {variant} | {steps} |", " | ".join(f"{found[p]:.1%}" for p in pairs), "|")


if __name__ == "__main__":
    main()
