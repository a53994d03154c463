"""What private and accounted steps cost on a vision transformer of base size, beside Opacus, in one process.

    python benchmarks/vision_transformer.py --device cuda --out experiments/results/vision_transformer_h200.json
    python benchmarks/vision_transformer.py                     # a tiny one on the CPU: the table, not its figures

86 million parameters, 3 × 224 × 224, batches of 16, TF32 on a GPU. The class token and the position embedding are
plain parameters (in a small module of their own, since Opacus takes them only there). Rows, each with time and peak
memory above what stood before (of a graph: the memory that it keeps):

    plain            the gradient of the batch
    sum              our clipped sum; with micro-batches of 8
    probe            the same with one probe of information; with micro-batches of 8
    ..., frozen      with the token and the positions frozen: what the plain parameters cost is the difference
    ..., generic     the generic way, for the whole model
    opacus hooks, opacus ghost

With --device cuda, "in a graph" are our steps captured in a CUDA graph and replayed, with PyTorch's memory in segments
that can grow (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, unless it is set). Opacus's steps take very different
times from one model to the next: both are measured five times in turns, and the table has the median and both ends.
Then bfloat16 autocast inside the model: the largest contribution of a record in units of C, and how far the information
is from that in float32 with the same probe. The last lines are the ratios that the project aims at."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconbound.fisher import (
    ProbeOptions,
    StepOptions,
    SumOptions,
    clipped_gradient_sum,
    sensitivity,
    step_information,
)

CLIP, NOISE = 1.0, 1.0
SIZES = {  # image, patch, width, depth, heads, batch, micro-batch
    "base": (224, 16, 768, 12, 12, 16, 8),
    "small": (64, 8, 192, 6, 4, 8, 2),
    "tiny": (32, 8, 32, 2, 4, 8, 2),
}


class Places(nn.Module):
    """Puts a class token before the patches and adds the position embedding."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, count + 1, width))
        nn.init.normal_(self.places, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, image: int, patch: int, width: int, depth: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = Places((image // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.half = False  # bfloat16 autocast

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half):
            x = self.blocks(self.places(self.patches(images).flatten(2).transpose(1, 2)))
            return self.head(self.norm(x[:, 0])).float()


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cost(work: Callable[[], Any], device: str, repeats: int) -> dict[str, Any]:
    """Median time of a call, and on a GPU how far its memory rises above where it stood."""
    work()
    work()
    gc.collect()
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else None
    return {"milliseconds": 1e3 * statistics.median(taken), "peak_gib": peak}


def replayed(work: Callable[[], Any]) -> tuple[Callable[[], None], float]:
    """Returns a CUDA graph's replay, and the memory that the graph keeps for itself, in GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # of what the calls before the capture took
    return graph.replay, (torch.cuda.memory_reserved() - before) / 2**30


class Ours:
    """Our steps on one model and batch."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, clip: float = CLIP) -> None:
        self.model, self.x, self.y, self.clip = model, x, y, clip

    def plain(self) -> None:
        params = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(losses(self.model(self.x), self.y).sum(), params)

    def sum(self, micro_batch: int | None = None, method: Any = "auto", rows: slice = slice(None)) -> Any:
        how = SumOptions(micro_batch=micro_batch, method=method, checked=True)
        batch = self.x[rows], self.y[rows]
        return clipped_gradient_sum(self.model, losses, *batch, max_grad_norm=self.clip, options=how)

    def probe(self, micro_batch: int | None = None, method: Any = "auto", direction: Tensor | None = None) -> Any:
        direction = torch.ones_like(self.x[0]) if direction is None else direction
        probes = ProbeOptions(space="inputs", directions=[direction], error="bound")  # drawn outside of a graph
        how = StepOptions(micro_batch=micro_batch, method=method, checked=True, probes=probes)
        step: Any = {"max_grad_norm": self.clip, "noise_multiplier": NOISE, "options": how}
        return step_information(self.model, losses, self.x, self.y, **step)


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, *, ghost: bool) -> Callable[[], None]:
    """Returns a plain DP-SGD step of Opacus's, by hooks or by ghost clipping."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    params = [p for p in model.parameters() if p.requires_grad]
    inner = torch.optim.SGD(params, lr=1e-6)
    kwargs: dict[str, Any] = {
        "noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": len(x), "loss_reduction": "sum"
    }  # fmt: skip
    if not ghost:
        wrapped, optimizer = GradSampleModule(model, loss_reduction="sum"), DPOptimizer(inner, **kwargs)

        def step() -> None:
            optimizer.zero_grad()
            losses(wrapped(x), y).sum().backward()
            optimizer.step()

        return step
    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, loss_reduction="sum")
    fast = DPOptimizerFastGradientClipping(inner, **kwargs)
    criterion = DPLossFastGradientClipping(module, fast, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")

    def ghostly() -> None:
        fast.zero_grad()
        criterion(module(x), y).backward()
        fast.step()

    return ghostly


def tried(name: str, row: Callable[[], dict[str, Any]], table: dict[str, Any]) -> None:
    """Adds a row, or why there is none."""
    try:
        table[name] = row()
    except Exception as error:
        table[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    found = table[name]
    memory = f"{found['peak_gib']:7.2f} GiB" if found.get("peak_gib") is not None else ""
    print(f"{name:28}", f"{found['milliseconds']:9.2f} ms {memory}" if "milliseconds" in found else found, flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(make: Callable[[], nn.Module], x: Tensor, y: Tensor, micro: int, repeats: int) -> dict[str, Any]:
    """Returns all rows. Every row starts from a fresh model."""
    device, table = x.device.type, {}
    graphs = device == "cuda"

    def row(work: Callable[[Ours], Any], frozen: bool = False, graph: bool = False) -> dict[str, Any]:
        model = make()
        if frozen:
            model.places.requires_grad_(False)  # type: ignore[union-attr]
        ours = Ours(model, x, y)
        call = lambda: work(ours)  # noqa: E731
        if not graph:
            return cost(call, device, repeats)
        replay, own = replayed(call)
        return {**cost(replay, device, repeats), "peak_gib": own}

    tried("plain", lambda: row(Ours.plain), table)
    for name, step in (("sum", Ours.sum), ("probe", Ours.probe)):
        tried(name, lambda step=step: row(step), table)  # type: ignore[misc]
        tried(f"{name}, micro-batches", lambda step=step: row(lambda o: step(o, micro)), table)  # type: ignore[misc]
        tried(f"{name}, frozen", lambda step=step: row(step, frozen=True), table)  # type: ignore[misc]
        if graphs:
            tried(f"{name}, in a graph", lambda step=step: row(step, graph=True), table)  # type: ignore[misc]
            call = lambda o, step=step: step(o, micro)  # type: ignore[misc]  # noqa: E731
            tried(f"{name}, micro-batches, in a graph", lambda call=call: row(call, graph=True), table)  # type: ignore[misc]
            frozen = lambda step=step: row(step, frozen=True, graph=True)  # type: ignore[misc]  # noqa: E731
            tried(f"{name}, frozen, in a graph", frozen, table)
        tried(f"{name}, generic", lambda step=step: row(lambda o: step(o, None, "generic")), table)  # type: ignore[misc]
    ways = {"opacus hooks": False, "opacus ghost": True}
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for turn in range(5):
        for name in [*ways][:: -1 if turn % 2 else 1]:
            taken[name].append(cost(opacus_step(make(), x, y, ghost=ways[name]), device, repeats))
    for name, found in taken.items():
        tried(name, lambda found=found: middle(found), table)  # type: ignore[misc]
    return table


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of the median time, with the shortest and the longest."""
    rows = sorted(found, key=lambda row: float(row["milliseconds"]))
    return {**rows[len(rows) // 2], "from": rows[0]["milliseconds"], "to": rows[-1]["milliseconds"]}


def half_precision(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, float]:
    """Compares bfloat16 autocast with float32: the clip bound, and the information with the same probe.

    C is the median norm, so that some records are clipped and some are not.
    """
    direction = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x)
    clip = float(Ours(make(), x, y).sum().norm.median())
    infos, largest = {}, 0.0
    for half in (False, True):
        model = make()
        model.half = half  # type: ignore[assignment]
        ours = Ours(model, x, y, clip)
        infos[half] = ours.probe(direction=direction)
        for i in range(len(x)):
            sums = ours.sum(rows=slice(i, i + 1)).gradient_sum.values()
            largest = max(largest, float(torch.stack([v.double().norm() for v in sums]).norm()))
    found = {"clip": clip, "largest contribution / (sensitivity C)": largest / (sensitivity("smooth") * clip)}
    for name in ("norm", "along", "across", "trace"):
        off = (getattr(infos[True], name) / getattr(infos[False], name) - 1).abs()
        found |= {f"{name}, largest relative change": float(off.max()), f"{name}, median": float(off.median())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", choices=SIZES, help="base on a GPU, tiny on the CPU, if it is not given")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="write the table here as JSON")
    options = parser.parse_args()
    size = options.size or ("base" if options.device == "cuda" else "tiny")
    image, patch, width, depth, heads, batch, micro = SIZES[size]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Transformer(image, patch, width, depth, heads).to(options.device)

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, image, image, generator=draw).to(options.device)
    y = torch.randint(0, 1000, (batch,), generator=draw).to(options.device)
    table: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "size": size,
        "parameters": sum(p.numel() for p in make().parameters()),
        "batch": batch,
        "micro_batch": micro,
    }
    table["rows"] = rows = measure(make, x, y, micro, options.repeats)
    try:
        table["bfloat16 autocast"] = half_precision(make, x, y)
    except RuntimeError as error:
        table["bfloat16 autocast"] = {"failed": str(error).splitlines()[0]}
    print(json.dumps(table["bfloat16 autocast"], indent=1))
    took = lambda name: rows[name].get("milliseconds", float("nan"))  # noqa: E731
    table["ratios"] = {}
    for kind in ("", ", in a graph") if options.device == "cuda" else ("",):  # PrivateSGD's steps are in a graph there
        table["ratios"] |= {
            f"a plain parameter adds to a sum{kind}": took(f"sum{kind}") / took(f"sum, frozen{kind}") - 1,
            f"a plain parameter adds to a probe{kind}": took(f"probe{kind}") / took(f"probe, frozen{kind}") - 1,
            f"micro-batches add to a sum{kind}": took(f"sum, micro-batches{kind}") / took(f"sum{kind}") - 1,
            f"micro-batches add to a probe{kind}": took(f"probe, micro-batches{kind}") / took(f"probe{kind}") - 1,
            f"a probe against Opacus's ghost step{kind}": took(f"probe{kind}") / took("opacus ghost"),
            f"a sum against Opacus's hooks{kind}": took(f"sum{kind}") / took("opacus hooks"),
        }
    print(json.dumps(table["ratios"], indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
