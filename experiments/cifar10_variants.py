"""Does another way to train explain the paper's level on CIFAR-10? Accuracies at σ = 2, the grid's noise whose RDP
floor is above MSE = 1 (or at another, --noise), under other readings of the paper's training.

    python experiments/cifar10_variants.py --train --tf32        on a GPU, minutes; adds rows to cifar10_variants.csv
    python experiments/cifar10_variants.py --train --tf32 --long --variants "glorot, standard; torch, standard"
    python experiments/cifar10_variants.py                       the table from the rows

Initial weights: PyTorch's, of standard deviation 1/√(3 inputs); 1/√inputs ("lecun", the default of Flax); √(2/(inputs +
outputs)) with biases of 0.01 ("glorot": the weights of JAX's stax and of Keras); √(2/inputs) ("he"); 5/3/√inputs
("gain", PyTorch's advice for tanh).
Pixels, by a fixed first layer, so that floors stay in units of [0, 1]: as they are ("unit"), 2x − 1 ("symmetric"), or
each channel less its mean over its standard deviation ("standard", constants of CIFAR-10 that everybody uses).
Further: "tanh" after the last layer, as table 2 has it; "hard" clipping; batches of "fixed" size.

Beside the last parameters' accuracy stands that of their running mean (each step's with weight 1/2000), which costs no
privacy; the paper does not speak of one."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _grid import append, given, losses, on_test, options, scaled
from torch import Tensor, nn

from reconbound.auditing.models import cifar10_cnn, lecun_normal, standardised
from reconbound.data import cifar10
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training.settings import Settings

ROWS = Path(__file__).parent / "results" / "cifar10_variants.csv"
NOISE, PAIRS, AT = 2.0, ((8.0, 0.01), (4.0, 0.01), (1.0, 0.03), (2.0, 0.01)), (5000, 12500)
LONG_PAIRS, LONG_AT = ((0.25, 0.1), (2.0, 0.01), (1.0, 0.03)), (12500, 18750, 25000, 31250, 37500)
SCALES = {"unit": (0.0, 1.0), "symmetric": (0.5, 0.5), "standard": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))}
VARIANTS = (
    "lecun, unit", "lecun, standard", "torch, standard", "lecun, symmetric", "glorot, unit", "glorot, symmetric",
    "glorot, standard", "he, standard", "torch, standard, tanh", "glorot, standard, tanh", "torch, standard, hard",
    "torch, standard, fixed",
)  # fmt: skip
MEAN_WEIGHT = 1 / 2000


def network(scale: str, tanh: bool = False) -> nn.Sequential:
    chain = nn.Sequential(*cifar10_cnn(), nn.Tanh()) if tanh else cifar10_cnn()
    return chain if scale == "unit" else standardised(chain, *SCALES[scale])


def glorot(model: nn.Module) -> None:
    for p in model.parameters():
        nn.init.xavier_normal_(p) if p.dim() > 1 else nn.init.normal_(p, std=0.01)


def larger(factor: float) -> Callable[[nn.Module], None]:
    """Weights of standard deviation factor/√inputs, no biases."""

    def start(model: nn.Module) -> None:
        lecun_normal(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)

    return start


STARTS = {"torch": None, "lecun": lecun_normal, "glorot": glorot, "he": larger(2**0.5), "gain": larger(5 / 3)}


def make_fleet(
    variant: str, noise: float, pairs: Sequence[Sequence[float]], x: Tensor, y: Tensor, *, seed: int = 0, **options
) -> Fleet:
    start, scale, *more = variant.split(", ")
    named = {"clip": "hard" if "hard" in more else "smooth", "sampler": "fixed" if "fixed" in more else "poisson"}
    settings = [Settings(noise, c, 0.004, lr=lr, momentum=0.5, budget=1.0, seed=seed, **named) for c, lr in pairs]
    return Fleet(
        lambda: network(scale, "tanh" in more), losses, x, y, settings, method="branches", initialise=STARTS[start],
        **options,
    )  # fmt: skip


class RunningMean:
    """The running mean of a fleet's parameters, and what is found with it in their place."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.mean = fleet, torch.zeros_like(fleet.params)

    def __call__(self, step: int) -> None:
        """Before each step: the parameters that the steps before it have left."""
        weight = MEAN_WEIGHT if step > 1 / MEAN_WEIGHT else 1 / (step + 1)
        self.mean.lerp_(self.fleet.params, weight)

    def found(self, evaluate) -> list[Tensor]:
        last = self.fleet.params.clone()
        self.fleet.params.copy_(self.mean)
        values = [evaluate(model) for model in self.fleet.models]
        self.fleet.params.copy_(last)
        return values


def train(asked: argparse.Namespace, out: Path) -> None:
    begun = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = asked.tf32
    images, labels = cifar10(train=True)
    x, y = scaled(images), torch.from_numpy(labels)
    accuracy = on_test(cifar10, asked.device)
    pairs, at = (LONG_PAIRS, LONG_AT) if asked.long else (PAIRS, AT)
    if asked.pairs:
        pairs = tuple(tuple(map(float, pair.split(","))) for pair in asked.pairs.split(";"))
    at = tuple(t // (asked.short or 1) for t in at if not asked.until or t <= asked.until)
    longest = 0.0
    for variant in [v.strip() for v in asked.variants.split(";")] if asked.variants else VARIANTS:
        first = time.perf_counter()
        if first - begun + longest > asked.seconds:
            print("no time for", variant, flush=True)
            continue
        fleet = make_fleet(
            variant, asked.noise, pairs, x, y, at=at, budgets=(1e-3,) * len(at), device=asked.device, seed=asked.seed
        )
        for run in range(asked.first, asked.first + asked.runs):
            mean = RunningMean(fleet)
            for shot in fleet.run(run, evaluate=accuracy, report=mean):
                rows = [
                    {"variant": variant, "noise_multiplier": s.noise_multiplier, "max_grad_norm": s.max_grad_norm,
                     "lr": s.lr, "steps": shot.step, "run": run, "accuracy": f"{float(found):.4f}",
                     "averaged": f"{float(other):.4f}"}
                    for s, found, other in zip(shot.settings, shot.found, mean.found(accuracy), strict=True)
                ]  # fmt: skip
                append(out, rows)
                found = (f"{row['accuracy']} ({row['averaged']})" for row in rows)
                print(f"{time.perf_counter() - begun:.0f} s", variant, shot.step, *found, flush=True)
        longest = max(longest, time.perf_counter() - first)


def table(rows: list[dict[str, str]]) -> None:
    print("CIFAR-10: accuracy after so many steps, by (C, step size); in brackets that of the running mean\n")
    pairs = list(dict.fromkeys((r["max_grad_norm"], r["lr"]) for r in rows))
    print("| start, pixels | σ | steps | run |", " | ".join(f"{float(c):g}, {lr}" for c, lr in pairs), "|")
    print("| --- " * (4 + len(pairs)) + "|")
    cells: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for r in rows:
        averaged = f" ({float(r['averaged']):.1%})" if r["averaged"] else ""
        key = tuple(r[name] for name in ("variant", "noise_multiplier", "steps", "run"))
        cells.setdefault(key, {})[r["max_grad_norm"], r["lr"]] = f"{float(r['accuracy']):.1%}{averaged}"
    for key in sorted(cells, key=lambda key: (-float(key[1]), int(key[2]))):
        print(f"| {' | '.join(key)} |", " | ".join(cells[key].get(pair, "") for pair in pairs), "|")


def main() -> None:
    parser = options(__doc__, runs=1, rows=ROWS)
    parser.add_argument("--long", action="store_true", help="to the paper's step counts, other pairs of C and step")
    parser.add_argument("--variants", default="", help="these, with ; between them, in place of all")
    parser.add_argument("--noise", type=float, default=NOISE, help="σ")
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--pairs", default="", help="C,step;... in place of the usual ones")
    asked = given(parser)
    if asked.train:
        train(asked, Path(asked.rows))
    else:
        table(list(csv.DictReader(Path(asked.rows).read_text().splitlines())))


if __name__ == "__main__":
    main()
