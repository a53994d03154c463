"""How far traces, and so floors, of models in bfloat16 and float16 are off beside the same models in float64.

Nine small networks with random weights of two sizes, and inputs of two sizes, each with the same probes in both
precisions. Ratios above 1 are floors that are too high. docs/guides/gpu.md has what it prints.

    python benchmarks/half_precision.py
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from reconbound.fisher import ProbeOptions, StepOptions, step_information

RECORDS, SEEDS = 64, 4
loss_fn = nn.CrossEntropyLoss(reduction="none")


class Residual(nn.Module):
    """Six residual blocks with layer norms."""

    def __init__(self, width: int = 16, blocks: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(blocks)])
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(torch.tanh(norm(x)))
        return self.last(x)


class Attention(nn.Module):
    """One attention layer with a layer norm, and the mean over the places."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)
        return self.last(self.norm(x + weights @ self.value(x)).mean(1))


def dense(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def networks() -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    yield "linear", dense(20, 5), (20,)
    yield "3 layers, tanh", dense(20, 32, 32, 5), (20,)
    yield "8 layers, tanh", dense(20, *[32] * 7, 5), (20,)
    yield "2 layers, width 512", dense(64, 512, 5), (64,)
    yield "3 layers, GELU", dense(20, 64, 64, 5, activation=nn.GELU), (20,)
    yield "3 layers, sigmoid", dense(20, 64, 64, 5, activation=nn.Sigmoid), (20,)
    front = [nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), nn.Tanh()]
    yield "convolutions", nn.Sequential(*front, nn.Flatten(), nn.Linear(8, 5)), (1, 8, 8)
    yield "residual", Residual(), (16,)
    yield "attention", Attention(), (6, 8)


def too_high(network: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float) -> Tensor:
    """Returns float64's trace over the short one's, for each record with one."""
    torch.manual_seed(seed)
    model = copy.deepcopy(network)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn_like(p) * (1 + seed % 2) / p[0].numel() ** 0.5)
    model = model.to(dtype)
    x, y = (torch.randn(RECORDS, *shape) * scale).to(dtype), torch.randint(0, 5, (RECORDS,))
    probes = [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(4)]
    settings: dict[str, float] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    try:
        short = step_information(
            model, loss_fn, x, y, **settings, options=StepOptions(probes=ProbeOptions(directions=probes))
        ).trace.double()
    except ValueError:  # float16 overflows, and says so
        return torch.ones(0, dtype=torch.float64)
    wide = [{name: u.double() for name, u in probe.items()} for probe in probes]
    exact = step_information(
        copy.deepcopy(model).double(),
        loss_fn,
        x.double(),
        y,
        **settings,
        options=StepOptions(probes=ProbeOptions(directions=wide)),
    ).trace
    kept = (exact > 1e-10 * exact.max()) & (short > 0)
    return (exact / short)[kept]


def main() -> None:
    warnings.simplefilter("ignore")
    print("| network | dtype | records | median off | 5 % of floors too high by | largest |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name, network, shape in networks():
        for dtype in (torch.bfloat16, torch.float16):
            found = [too_high(network, shape, dtype, seed, scale) for seed in range(SEEDS) for scale in (0.3, 3.0)]
            ratios = torch.cat(found)
            most, often = float(ratios.max()), float(torch.quantile(ratios, 0.95)) - 1
            middle = float((ratios - 1).abs().median())
            kind = str(dtype).removeprefix("torch.")
            print(f"| {name} | {kind} | {len(ratios)} | {middle:.2%} | {often:.1%} | × {most:.2f} |")


if __name__ == "__main__":
    main()
