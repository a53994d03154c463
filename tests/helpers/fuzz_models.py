"""Random small models and data from one whole number, for the checks of fuzz_checks.py.

python tests/helpers/fuzz_models.py --draws 2000 --seed 0     counts by kind, the worst ratios, and every violation
python tests/helpers/fuzz_models.py --draws 1 --seed 1234     one draw again, printed in full
python tests/helpers/fuzz_models.py --draws 500 --parameters  with blocks that have parameters outside known layers
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz_blocks import BLOCKS, OWN_PARAMETERS, WIDTH

DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Draw:
    """A model, a batch and the arguments of a call, all from one seed."""

    seed: int
    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Tensor
    dtype: torch.dtype
    max_grad_norm: float
    clip: str
    method: str
    micro_batch: int | None
    mask: Tensor | None
    tags: list[str] = field(default_factory=list)
    private: Any = None  # what the information is about; "none": nothing can be measured (tokens alone)

    def __str__(self) -> str:
        what = {k: getattr(self, k) for k in ("dtype", "max_grad_norm", "clip", "method", "micro_batch", "private")}
        return f"seed {self.seed}: {' '.join(self.tags)}; {what}; mask {self.mask}; {self.model}"


STEMS = ("vectors", "places", "line", "image", "volume", "tokens", "pair", "named")
POOLS = ("mean", "difference", "weighted", "all", "last")


class Body(nn.Module):
    """A stem that makes vectors of the input, blocks, a sum over places, and a last layer.

    more: draws one or two blocks with parameters outside known layers, at any place.
    """

    def __init__(self, rng: random.Random, stem: str, more: random.Random | None = None) -> None:
        super().__init__()
        self.stem, self.pool = stem, rng.choice(POOLS)
        self.outputs = rng.choice([1, 3])
        self.table = nn.Embedding(7, WIDTH, padding_idx=rng.choice([None, 0])) if stem in ("tokens", "named") else None
        self.enter: nn.Module = nn.Identity()
        groups = rng.choice([1, 2])
        if stem == "line":
            self.enter = nn.Conv1d(2, WIDTH, 3, padding=1, padding_mode=rng.choice(["zeros", "circular"]))
        elif stem == "image":
            self.enter = nn.Conv2d(2, WIDTH, (2, 3), stride=rng.choice([1, 2]), padding=1, groups=groups)
        elif stem == "volume":
            self.enter = nn.Conv3d(
                2, WIDTH, 2, padding=rng.choice([0, 1]), dilation=rng.choice([1, 1, 2]), groups=groups
            )
        elif stem in ("vectors", "places", "pair") and rng.random() < 0.7:
            self.enter = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        self.blocks = nn.ModuleList(rng.choice(BLOCKS)(rng) for _ in range(rng.choice([0, 1, 1, 2, 3])))
        for _ in range(0 if more is None else more.choice([1, 1, 2])):
            self.blocks.insert(more.randint(0, len(self.blocks)), more.choice(OWN_PARAMETERS)(more))
        self.last: nn.Module | None = nn.LazyLinear(self.outputs) if rng.random() < 0.7 else None
        if self.table is not None and rng.random() < 0.4:  # the table reads the result out
            self.last = nn.Linear(WIDTH, 7, bias=False)
            self.last.weight = self.table.weight
            self.pool = "mean" if self.pool == "all" else self.pool

    def forward(self, x: Tensor, tokens: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        if self.stem == "tokens":
            x = self.table(x)
        elif self.stem == "named":
            x = x + self.table(tokens)
        elif self.stem in ("line", "image", "volume"):
            x = self.enter(x).flatten(2).transpose(1, 2)
        else:
            x = self.enter(x)
        if x.dim() == 2:
            x = x[:, None]
        for block in self.blocks:
            x = block(x)
        x = self.pooled(x, tokens if self.stem == "pair" else None)
        return x if self.last is None else self.last(x)

    def pooled(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            return (x[:, : weight.shape[1]] * weight[:, : x.shape[1], None]).sum(1)
        if self.pool == "difference":
            return (x * (1 - 2 * (torch.arange(x.shape[1]) % 2)).to(x)[:, None]).sum(1)
        if self.pool == "weighted":
            return (x * torch.arange(1, x.shape[1] + 1).to(x)[:, None]).sum(1)
        return x.mean(1) if self.pool == "mean" else x[:, -1] if self.pool == "last" else x.flatten(1)


def _linear(scale: float) -> Callable[[Any, Any], Tensor]:
    return lambda out, target: (out.flatten(1) * target[:, None]).sum(1) * scale


def _squares(scale: float) -> Callable[[Any, Any], Tensor]:
    return lambda out, target: (out.flatten(1) - target[:, None]).square().sum(1) * scale


def _entropy(scale: float) -> Callable[[Any, Any], Tensor]:
    return lambda out, target: F.cross_entropy(out.flatten(1), target, reduction="none") * scale


LOSSES = {"linear": _linear, "squares": _squares, "entropy": _entropy, "soft": _entropy}


def power(rng: random.Random, widest: float) -> float:
    """10 to the power of a number between ±widest; in half of the draws between ±widest/8."""
    wide = widest if rng.random() < 0.5 else widest / 8
    return 10 ** rng.uniform(-wide, wide)


def values(rng: random.Random, generator: torch.Generator, shape: tuple[int, ...], tags: list[str]) -> Tensor:
    """Numbers of some scale: apart, nearly equal from place to place, equal, zero, or with one far away."""
    draw = torch.randn(shape, generator=generator, dtype=torch.float64)
    how = rng.choice(["apart", "apart", "near", "near", "same", "copies", "zero", "outlier"])
    tags.append(how)
    if how in ("near", "same"):
        gap = 0.0 if how == "same" else 10 ** rng.uniform(-8, 0)
        draw = (draw[:, :1] if len(shape) > 1 else draw[:1]) + gap * draw
    elif how == "copies":
        draw = draw[:1].expand(shape).clone()
    elif how == "zero":
        draw[0] = 0
    elif how == "outlier":
        draw.view(-1)[rng.randrange(draw.numel())] *= 10 ** rng.uniform(2, 8)
    return draw * power(rng, 8)


def make_draw(seed: int, *, parameters: bool = False) -> Draw:
    """Returns the draw of that seed. Nothing else decides it, and torch's global generator is left alone.

    parameters: with blocks that have parameters outside known layers. (They are drawn apart, so that the draws without
    them, some of which once failed, stay what they are.)
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state = torch.get_rng_state()
    dtype, stem = rng.choice(DTYPES), rng.choice(STEMS)
    records, places = rng.choice([1, 2, 3, 4, 5]), rng.choice([1, 2, 2, 3, 5])
    tags: list[str] = [str(dtype).removeprefix("torch."), stem]
    shapes = {
        "vectors": (WIDTH,),
        "line": (2, places + 2),
        "image": (2, rng.choice([2, 3]), 3),
        "volume": (2, 3, 3, 2 + places % 2 + 1),
    }
    model = Body(rng, stem, random.Random(f"{seed} parameters") if parameters else None)
    x = values(rng, generator, (records, *shapes.get(stem, (places, WIDTH))), tags)
    tokens = torch.randint(0, 7, (records, places), generator=generator)
    inputs: Any = x.to(dtype)
    if stem == "tokens":
        inputs = tokens
    elif stem == "named":
        inputs = {"x": x.to(dtype), "tokens": tokens}
    elif stem == "pair":
        inputs = (x.to(dtype), values(rng, generator, (records, places), tags).to(dtype))
    with torch.no_grad():
        model.double()
        twice = inputs.double() if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs
        if isinstance(inputs, dict):
            twice = {"x": x.to(dtype).double(), "tokens": tokens}
        elif isinstance(inputs, tuple):
            twice = tuple(t.double() for t in inputs)
        out = model(**twice) if isinstance(twice, dict) else model(*(twice if isinstance(twice, tuple) else (twice,)))
        size = power(rng, 3)
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * size * rng.choice([1, 1, 1, 0.01]))
    torch.set_rng_state(state)
    loss = rng.choice(list(LOSSES) if out.flatten(1).shape[1] > 1 else ["linear", "squares"])
    classes = out.flatten(1).shape[1]
    if loss == "entropy":
        targets = torch.randint(0, classes, (records,), generator=generator)
    elif loss == "soft":
        targets = torch.softmax(torch.randn(records, classes, generator=generator, dtype=torch.float64), 1).to(dtype)
    else:
        targets = torch.randn(records, generator=generator, dtype=torch.float64).to(dtype)
    tags += [loss, model.pool, *(type(b).__name__ for b in model.blocks)]
    tags += (
        ["tied-table"] if model.table is not None and getattr(model.last, "weight", None) is model.table.weight else []
    )
    mask = torch.randint(0, 2, (records,), generator=generator) if rng.random() < 0.3 else None
    private: Any = None
    if stem == "tokens":
        from reconbound.fisher import Private

        private = Private("module", "table")
    elif stem == "pair":
        from reconbound.fisher import Private

        private = Private("input", 0)
    elif stem == "vectors" and rng.random() < 0.3:
        private = [0, 2]
    if loss in ("squares", "soft") and rng.random() < 0.2:
        private = "target"
    return Draw(
        seed,
        model.to(dtype),
        LOSSES[loss](power(rng, 8) if dtype != torch.float16 else power(rng, 3)),
        inputs,
        targets,
        dtype,
        power(rng, 6),
        rng.choice(["smooth", "hard"]),
        rng.choice(["auto", "auto", "auto", "generic"]),
        rng.choice([None, None, 1, 2]),
        mask,
        tags,
        private,
    )


def main() -> None:
    import argparse

    import fuzz_checks

    parser = argparse.ArgumentParser(description="Checks random models; prints counts and every violation.")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; the others follow")
    parser.add_argument("--parameters", action="store_true", help="with parameters outside known layers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tally = fuzz_checks.Tally()
    for seed in range(arguments.seed, arguments.seed + arguments.draws):
        draw = make_draw(seed, parameters=arguments.parameters)
        if arguments.draws == 1:
            print(draw)
        for fault in fuzz_checks.check_draw(draw, tally):
            print(f"VIOLATION {fault}\n  {draw.seed}: {' '.join(draw.tags)}", flush=True)
    print(tally)


if __name__ == "__main__":
    main()


class Turned(nn.Module):
    """Turns the order of the records before its second layer and back after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).flip(0)).flip(0)
