"""On a GPU machine, in one call: everything that only a GPU can show, then the table of training_speed.py.

Information equals that on the CPU in float64, eager and in a CUDA graph; noise has the cipher's bits; PrivateSGD's
graphs give the eager sums, information and ledgers, a stopped training goes on to the same end, what cannot be captured
is computed eagerly; one rank of NCCL trains as a process without ranks; audit and sweep run on the GPU. A check that
fails does not stop the others.

    python benchmarks/cuda_smoke.py [--only replayed noise] [--no-table] [words for training_speed.py]
"""

import argparse
import math
import os
import sys
import tempfile
import time
import traceback
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for sums that are the same to the last bit

import torch
import training_speed
from cuda_trainings import fleets, losses, not_captured, private_sgd, ranks, replayed, replayed_worlds
from torch import nn

from reconbound._internal import chacha
from reconbound._internal.rng import fresh_generator, random_states_kept
from reconbound.accounting.amplification import PoissonTable, poisson_factors
from reconbound.auditing import models as networks
from reconbound.fisher import ProbeOptions, StepOptions, SumOptions, clipped_gradient_sum, step_information
from reconbound.training.noise import by_cipher, draw, draw_for, draw_without_waiting


def sampled_probes(cases) -> None:
    """Probes in the private part, drawn on the GPU, average to what the CPU computes with other draws."""
    for name, model, x in cases[:2]:
        model, x = model.cpu().double(), x.cpu().double()
        y = torch.randint(0, 10, (len(x),))
        found = []
        for device in ("cpu", "cuda"):
            work = (model.to(device), losses, x.to(device), y.to(device))
            found.append(
                step_information(
                    *work,
                    max_grad_norm=1.0,
                    noise_multiplier=0.5,
                    options=StepOptions(probes=ProbeOptions(count=64, error="spread")),
                )
            )
        gap = (found[0].across - found[1].across.cpu()).abs()
        limit = 6 * (found[0].across_error.square() + found[1].across_error.cpu().square()).sqrt()
        assert bool((gap <= limit).all()), (name, gap, limit)
        print(name, "ok: sampled probes agree within their errors")


def noise() -> None:
    """The kernels' bits are those of torch on the CPU; normal numbers agree to rounding, and are standard normal."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    kernels = chacha.kernels_for(cuda)
    assert kernels is not None
    keys = {place: chacha.key_words(bytes(range(32)), place) for place in (cpu, cuda)}
    for blocks in (1, 3, 1000, 300_001):
        for counter in (7, 2**32 - 2):
            here = chacha.paired(chacha.keystream(keys[cpu], counter, blocks))
            assert torch.equal(kernels.paired_keystream(keys[cuda], counter, blocks).cpu(), here), blocks
        assert torch.equal(chacha.keystream(keys[cuda], 7, blocks).cpu(), chacha.keystream(keys[cpu], 7, blocks))
    point = torch.arange(4, dtype=torch.int32)
    derived = kernels.derived_key(keys[cuda], point.cuda()).cpu()
    assert torch.equal(derived, chacha.derived_key(keys[cpu], point))
    for size in (1, 2, 255, 256, 257, 26_010, 2**20 + 3):
        total = torch.randn(size)
        words = total.view(torch.int32)
        hashed = kernels.keyed_hash(words.cuda(), keys[cuda]).cpu()
        assert torch.equal(hashed, chacha.keyed_hash(words, keys[cpu])), size
        x, here = draw_for(total.cuda(), 2**200, 5), draw_without_waiting(total, 2**200, 5)
        assert x.device.type == "cuda"
        torch.testing.assert_close(x.cpu(), here, rtol=1e-9, atol=1e-11)
        assert torch.equal(x, draw_for(total.cuda(), 2**200, 5)), size
        torch.testing.assert_close(draw(2**200, size, cuda).cpu(), by_cipher(_key(2**200), size), rtol=1e-9, atol=1e-11)
    x = draw(7, 10**8, cuda)
    for power, mean, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10_170)):
        assert abs(float((x**power).mean()) - mean) < 5 * (spread / len(x)) ** 0.5, power
    for cut in (2.0, 3.0, 4.0, 5.0):
        expected = math.erfc(cut / 2**0.5) * len(x)
        assert abs(float((x.abs() > cut).sum()) - expected) < 5 * expected**0.5, cut
    print("noise ok: the kernels have the cipher's bits; 1e8 numbers have a normal's moments and tails")


def _key(secret: int) -> torch.Tensor:
    return chacha.key_words(secret.to_bytes(32, "little"), torch.device("cpu"))


def generators() -> None:
    """Measuring leaves the GPU's global generator as it was, and probes are not drawn from it."""
    model, x, y = networks.mnist_cnn().cuda(), torch.rand(5, 1, 28, 28).cuda(), torch.randint(0, 10, (5,)).cuda()
    torch.cuda.manual_seed_all(4)
    before = torch.cuda.get_rng_state()
    step_information(model, losses, x, y, max_grad_norm=1.0, noise_multiplier=0.5, options=StepOptions(spectral=True))
    networks.mnist_cnn()
    with random_states_kept(3):
        torch.randn(4, device="cuda")
    with random_states_kept():
        torch.randn(4, device="cuda")
    torch.randn(4, device="cuda", generator=fresh_generator("cuda"))
    assert torch.equal(before, torch.cuda.get_rng_state())
    print("generators ok: measuring leaves CUDA's global generator alone")


def commands() -> None:
    """audit and sweep, also --together, as a user calls them: on this GPU without being asked to."""
    from reconbound.__main__ import main as command

    with tempfile.TemporaryDirectory() as folder:
        calls = [
            ["audit", "digits", "--steps", "120", "--runs", "2", "--quiet", "--out", f"{folder}/audit"],
            ["sweep", "wine", "--grid", "lr=0.1,0.3", "--steps", "40,80", "--out", f"{folder}/sweep"],
            ["sweep", "digits", "--grid", "lr=0.1,0.3", "--steps", "40", "--together", "2", "--out", f"{folder}/both"],
        ]
        for words in calls:
            before, begun = torch.cuda.memory_stats()["allocation.all.allocated"], time.perf_counter()
            with mock.patch.object(sys, "argv", ["reconbound", *words]):
                try:
                    command()
                except SystemExit as end:
                    if end.code:
                        raise RuntimeError(f"{words} ended with {end.code}") from end
            own, what = torch.cuda.memory_stats()["allocation.all.allocated"] - before, " ".join(words[:2])
            print(f"{what}: {time.perf_counter() - begun:.1f} s, {own} allocations on the GPU in this process")
            assert own > 0 or words[0] == "sweep", words  # workers of a sweep are processes of their own


PRECISIONS = [(dtype, None) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
PRECISIONS += [(torch.float32, mixed) for mixed in (torch.bfloat16, torch.float16)]  # by autocast inside the model


class Cancelling(nn.Module):
    """One layer on every place, and a loss on their signed sum; mixed: in half precision by autocast."""

    def __init__(self, layer: nn.Module, mixed: torch.dtype | None = None) -> None:
        super().__init__()
        self.layer, self.mixed = layer, mixed

    def forward(self, x):
        signs = 1 - 2 * (torch.arange(x.shape[-1], device=x.device) % 2)
        with torch.autocast("cuda", dtype=self.mixed or torch.bfloat16, enabled=self.mixed is not None):
            out = self.layer(x) if isinstance(self.layer, nn.Conv2d) else self.layer(x.transpose(1, 2)).transpose(1, 2)
            return (out * signs[: out.shape[-1]]).float().flatten(1).sum(1)


def clipped_in_every_precision() -> None:
    """No single record contributes more than C: TF32 on and off, half precisions, autocast, places that cancel."""
    worst: dict[str, float] = {}
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [f.allow_tf32 for f in flags]
    for tf32 in (False, True):
        for flag in flags:
            flag.allow_tf32 = tf32
        for dtype, mixed in PRECISIONS:
            for layer, shape in ((nn.Linear(256, 192), (256, 16)), (nn.Conv2d(64, 64, 3), (64, 6, 6))):
                model = Cancelling(layer, mixed).cuda().to(dtype)
                for gap in (1.0, 1e-2, 1e-4):
                    start = torch.randn(6, *shape[:1], *(1,) * (len(shape) - 1))
                    x = ((start + gap * torch.randn(6, *shape)) * 30).cuda().to(dtype)
                    y = torch.full((6,), 100.0, device="cuda")
                    loss = lambda out, target: out * target  # noqa: E731
                    for i in range(6):
                        one = clipped_gradient_sum(
                            model,
                            loss,
                            x[i : i + 1],
                            y[i : i + 1],
                            max_grad_norm=1.0,
                            clip="hard",
                            # checked: the losses cancel too, and of another batch size they are rounded otherwise
                            options=SumOptions(method="layers", checked=True),
                        )
                        size = torch.stack([v.double().norm() for v in one.gradient_sum.values()]).norm()
                        name = f"{dtype}, autocast {mixed}, TF32 {tf32}".replace("torch.", "")
                        worst[name] = max(worst.get(name, 0.0), float(size))
    for flag, value in zip(flags, before, strict=True):
        flag.allow_tf32 = value
    for name, size in worst.items():
        assert size <= 1 + 1e-4, (name, size)
        print(f"{name}: largest contribution {size:.6f} C")


def information() -> None:
    """Information on the GPU, eager and in a graph, is that of the CPU to 1e-9 in float64."""
    normed = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Flatten(), nn.LayerNorm(7200), nn.Linear(7200, 10)
    )
    cases = [
        ("mnist", networks.mnist_cnn(), torch.rand(7, 1, 28, 28)),
        ("cifar10", networks.cifar10_cnn(), torch.rand(5, 3, 32, 32)),
        ("norms", normed, torch.rand(5, 3, 32, 32)),
    ]
    setting = {"max_grad_norm": 1.0, "noise_multiplier": 0.5}
    for name, model, x in cases:
        model, x = model.double(), x.double()
        y = torch.randint(0, 10, (len(x),))
        directions = [{n: torch.randn_like(p) for n, p in model.named_parameters()}]
        here = step_information(
            model,
            losses,
            x,
            y,
            **setting,
            options=StepOptions(diagonal=True, probes=ProbeOptions(directions=directions)),
        )
        model, x, y = model.cuda(), x.cuda(), y.cuda()
        directions = [{n: u.cuda() for n, u in directions[0].items()}]
        options = StepOptions(diagonal=True, probes=ProbeOptions(directions=directions, error="bound"))
        work = lambda: step_information(model, losses, x, y, **setting, options=options)  # noqa: E731, B023
        there = work()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work()
        graph.replay()
        torch.cuda.synchronize()
        for field in ("norm", "along", "across", "diagonal"):
            a = getattr(here, field)
            for b in (getattr(there, field), getattr(captured, field)):
                error = float(((a - b.cpu()).abs().max() / (here.trace.max() if field != "norm" else a.max())).item())
                assert error < 1e-9, (name, field, error)
        plain = clipped_gradient_sum(model, losses, x, y, max_grad_norm=1.0).gradient_sum
        for n, v in plain.items():
            assert torch.allclose(v, there.gradient_sum[n], rtol=1e-9, atol=1e-12), (name, n)
        print(name, "ok: CPU, CUDA and CUDA graph agree to 1e-9")
    sampled_probes(cases)


def factors() -> None:
    """Subsampling factors on the GPU are those of the quadrature."""
    table = PoissonTable(0.01).prepare("cuda", torch.float64)
    m = torch.linspace(0, 30, 1000, dtype=torch.float64, device="cuda")
    across, along = table(m)
    exact = poisson_factors(m.cpu().numpy(), 0.01)
    assert abs(across.cpu().numpy() / exact[0] - 1).max() < 1e-9
    assert abs(along.cpu().numpy() / exact[1] - 1).max() < 1e-9
    print("factors ok")


CHECKS = {
    "noise": noise,
    "replayed": replayed,
    "replayed_worlds": replayed_worlds,
    "not_captured": not_captured,
    "private_sgd": private_sgd,
    "ranks": ranks,
    "commands": commands,
    "information": information,
    "generators": generators,
    "fleets": lambda: fleets("cuda"),
    "factors": factors,
    "clipped": clipped_in_every_precision,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[*CHECKS])
    parser.add_argument("--no-table", action="store_true", help="without training_speed.py, to which other words go")
    asked, others = parser.parse_known_args()
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    failed = []
    for name in asked.only:
        torch.manual_seed(0)
        begun = time.perf_counter()
        try:
            CHECKS[name]()
        except Exception:  # the others are wanted all the same: time on a GPU is short
            failed.append(name)
            traceback.print_exc()
        torch.use_deterministic_algorithms(False)
        print(f"--- {name}: {'FAILED' if name in failed else 'ok'}, {time.perf_counter() - begun:.0f} s", flush=True)
    if not asked.no_table:
        training_speed.main(others)
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
