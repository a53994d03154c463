"""On a GPU machine, in one call: everything that only a GPU can show, then the table of training_speed.py.

Information equals that on the CPU in float64, eager and in a CUDA graph; noise has the cipher's bits; PrivateSGD's
graphs give the eager sums, information and ledgers, a stopped training goes on to the same end, what cannot be captured
is computed eagerly; one rank of NCCL trains as a process without ranks; audit and sweep run on the GPU. A check that
fails does not stop the others.

    python benchmarks/cuda_smoke.py [--only replayed noise] [--no-table] [words for training_speed.py]
"""

import argparse
import contextlib
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for sums that are the same to the last bit

import torch
import torch.distributed as dist
import training_speed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from reconbound._internal import chacha
from reconbound._internal.rng import derive, fresh_generator, random_states_kept, seeded
from reconbound.accounting.amplification import PoissonTable, poisson_factors
from reconbound.auditing import models as networks
from reconbound.fisher import ProbeOptions, StepOptions, SumOptions, clipped_gradient_sum, step_information
from reconbound.fisher.worlds import Replacement
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training.noise import by_cipher, draw, draw_for, draw_without_waiting
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.ranks import Ranks, _group_of_cpu, _time_limit
from reconbound.training.settings import Settings


def losses(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none")


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
    with seeded(3):
        torch.randn(4, device="cuda")
    with random_states_kept():
        torch.randn(4, device="cuda")
    torch.randn(4, device="cuda", generator=fresh_generator("cuda"))
    assert torch.equal(before, torch.cuda.get_rng_state())
    print("generators ok: measuring leaves CUDA's global generator alone")


def private_sgd() -> None:
    """A short private training on the GPU: the ledger fills, and a stopped run goes on to the same end.

    Noise depends on the bits of the sum, so that kernels must be deterministic for it."""
    torch.use_deterministic_algorithms(True)

    torch.manual_seed(1)
    x, y = torch.rand(500, 1, 28, 28), torch.randint(0, 10, (500,))
    start = networks.mnist_cnn().state_dict()
    settings = Settings(0.5, 4.0, 0.1, lr=0.1, momentum=0.5, rules=("exact", "paper"), budget=0.5, seed=3)

    def learner(folder):
        model = networks.mnist_cnn().cuda()
        model.load_state_dict(start)
        return PrivateSGD(model, losses, x, y, settings, checkpoint=folder, every=5, progress=False)

    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        whole = learner(a).fit(30)
        stopped = learner(b)
        stopped.evaluate, stopped.evaluate_every = _stop_at_17, 17
        with contextlib.suppress(KeyboardInterrupt):
            stopped.fit(30)
        resumed = learner(b).fit(30)
        pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
        gap = max(float((p - q).detach().abs().max()) for p, q in pairs)
        assert gap < 1e-4, gap
        exact, paper = whole.accountant.dfil("exact"), whole.accountant.dfil("paper")
        assert bool((exact <= paper).all())
        print(f"private SGD ok on {whole.device}: resumed within {gap:.1e}, exact below the paper's at every record")


def learner_of(network, x, y, settings, *, fixed=True, kind=PrivateSGD, **options):
    """A learner on the GPU, from the same start; fixed: as it is there by default, otherwise computed eagerly."""
    torch.manual_seed(1)
    one = kind(network().cuda().to(x.dtype), losses, x, y, settings, progress=False, **options)
    if not fixed:
        one.measurer.static = None
    return one


class SameNoise(PrivateSGD):
    """Noise from the seed and step alone: to compare trainings whose sums are rounded otherwise."""

    def _noise(self, total):
        return draw(derive(self.seed, "noise", self.step), len(total), total.device)


def replayed() -> None:
    """Sums and information from graphs are the eager ones to 1e-5; ledgers agree after 200 steps."""
    cases = {
        "mnist": (networks.mnist_cnn, (1, 28, 28), 4_000, 0.05),
        "cifar10": (networks.cifar10_cnn, (3, 32, 32), 1_000, 0.05),
    }
    for name, (network, shape, records, rate) in cases.items():
        x, y = torch.rand(records, *shape).cuda(), torch.randint(0, 10, (records,)).cuda()
        settings = Settings(0.7, 1.0, rate, lr=0.05, momentum=0.5, budget="every", seed=2**100)
        both = [learner_of(network, x, y, settings, fixed=fixed) for fixed in (True, False)]
        for step in range(4):
            batch = both[0].sampler.batch(7, step)
            sums = [one.measurer.gradient_sum(batch)[0] for one in both]
            draws = [torch.Generator("cuda").manual_seed(step) for _ in both]
            same = [one.measurer.information(batch, draw) for one, draw in zip(both, draws, strict=True)]
            found = [each for each, _ in same]
            pairs = {"sum": sums, "sum of the same pass": [summed.total for _, summed in same]}
            for field in ("norm", "across", "along", "clipped_norm", "trace"):
                pairs[field] = [getattr(each, field) for each in found]
            for what, (a, b) in pairs.items():
                gap = float((a.double() - b.double()).abs().max() / b.double().abs().max())
                assert gap < 1e-5, (name, what, gap)
        assert not both[0].measurer.static._sums.eager
        assert not both[0].measurer.static._informed.eager
        print(f"{name}: sums and information from a graph equal the eager ones to 1e-5 in float32")
        kinds = ((torch.float64, "every", 1e-9), (torch.float64, 0.15, 1e-9), (torch.float32, 0.15, None))
        for dtype, budget, limit in kinds:
            own, chosen = x.to(dtype), replace(settings, budget=budget)
            trained = [learner_of(network, own, y, chosen, fixed=f, kind=SameNoise).fit(STEPS) for f in (True, False)]
            dfils = [one.accountant.dfil() for one in trained]
            nats = [one.accountant.divergence() for one in trained]
            gaps = [float((a / b - 1).abs().nan_to_num(0.0).max()) for a, b in (dfils, nats)]
            assert torch.equal(*(one.accountant.measured() for one in trained)), (name, dtype)
            assert limit is None or max(gaps) < limit, (name, dtype, budget, gaps)
            print(f"{name}, {dtype}, budget {budget}: ledgers of 200 steps differ by {gaps[0]:.1e} and {gaps[1]:.1e}")


STEPS = 200


class CountedAsSeveral(int):
    """One, where "is it one?" is answered by no: a rank by itself then sends all that several send each other."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return True


def ranks(backend: str = "nccl", device: str = "cuda") -> None:
    """One rank of NCCL trains as a process without torch.distributed, bit for bit; so does a model on the CPU.

    In one shard, where a rank by itself sends nothing, and in four, sending all that several ranks send. It needs one
    GPU only: on two, start docs/guides/scale.md's train.py with torchrun."""
    torch.use_deterministic_algorithms(True)
    x, y = torch.rand(500, 1, 28, 28), torch.randint(0, 10, (500,))
    settings = Settings(0.7, 1.0, 0.1, lr=0.05, momentum=0.5, budget=0.5, seed=2**100)

    def end(place, shards):
        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            how = {"shards": shards, "checkpoint": folder, "every": 5, "progress": False}
            one = PrivateSGD(networks.mnist_cnn().to(place), losses, x, y, settings, **how).fit(20)
        return {**one.accountant.state(), **{name: p.detach() for name, p in one.model.named_parameters()}}

    cases = [(device, 1, False), (device, 4, True), ("cpu", 4, True)]
    without = [end(place, shards) for place, shards, _ in cases]
    limit = timedelta(seconds=77)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
        try:
            for (place, shards, several), alone in zip(cases, without, strict=True):
                size = CountedAsSeveral(1) if several else 1
                with mock.patch.object(Ranks, "present", return_value=Ranks(0, size)):
                    found = end(place, shards)
                for name, value in alone.items():
                    assert torch.equal(found[name], value), (place, shards, name)
                print(f"{backend}, model on {place}, {shards} shards, sent: {several}; the same bit for bit")
            beside = _group_of_cpu()
            assert beside is not None, "objects went through NCCL"
            assert _time_limit(dist.group.WORLD) == _time_limit(beside) == limit
        finally:
            dist.destroy_process_group()


def replayed_worlds() -> None:
    """Worlds, a diagonal, micro-batches, Adam with a schedule, data in main memory: as computed eagerly."""
    x, y = torch.rand(900, 8, dtype=torch.float64), torch.randint(0, 3, (900,))
    network = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))  # noqa: E731
    ways = {
        "worlds": {"worlds": {"blank": Replacement(0.0), "two": Replacement([0.5], [2])}},
        "diagonal": {"diagonal": "all"},
        "Adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01), "schedule": lambda o: StepLR(o, 5)},
    }
    for name, options in ways.items():
        settings = Settings(1.0, 1.0, 0.1, lr=0.1, budget=1.0, seed=2**100, micro_batch=16 if name == "Adam" else None)
        both = [learner_of(network, x, y, settings, fixed=f, kind=SameNoise, **options).fit(60) for f in (True, False)]
        a, b = (torch.cat([p.detach().flatten() for p in one.model.parameters()]) for one in both)
        assert float((a - b).abs().max()) < 1e-9, name
        states = [one.accountant.state() for one in both]
        for key, value in states[1].items():
            if value.is_floating_point() and value.numel() and bool(value.isfinite().all()):
                gap = float((states[0][key].double() - value.double()).abs().max())
                assert gap <= 1e-6 * float(value.double().abs().max()), (name, key, gap)
        print(f"{name}: the same parameters and ledger at fixed shapes, from data in main memory")


class Waiting(nn.Module):
    """Reads a value in its forward pass, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x):
        return self.inner(x) * (1.0 if float(x.detach().abs().sum()) >= 0 else 2.0)


def not_captured() -> None:
    """A model that reads values is trained eagerly and says so; torch's generator and other graphs work afterwards."""
    x, y = torch.rand(300, 8), torch.randint(0, 3, (300,))
    settings = Settings(1.0, 1.0, 0.1, lr=0.1, budget="every", seed=2**100)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        one = learner_of(Waiting, x, y, settings).fit(20)
    said = [str(w.message) for w in told if "computed eagerly" in str(w.message)]
    assert 1 <= len(said) <= 2, said  # sums, and information
    assert one.measurer.static._informed.eager
    assert bool(torch.isfinite(torch.randn(5, device="cuda")).all())
    learner_of(lambda: Waiting().inner, x, y, settings).fit(5)
    print(f"not captured ok: {said[0][:160]}")


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


def _stop_at_17(model):
    raise KeyboardInterrupt


def fleets(device: str) -> None:
    """A training of a fleet, with noise of its own, is the same whoever is beside it."""
    torch.manual_seed(0)
    x, y = torch.rand(40, 1, 28, 28), torch.randint(0, 10, (40,))
    for method in ("stacked", "branches"):
        found = {}
        for of in ((0, 1, 2), (2, 0)):
            private = torch.arange(784) % 3 > 0  # the others are public
            chosen = [Settings(0.5 + k, 1.0, 0.2, lr=0.1 + k / 10, budget=1.0, seed=1) for k in of]
            fleet = Fleet(
                networks.mnist_cnn, losses, x, y, chosen, at=[4], device=device, method=method, private=private
            )
            (shot,) = fleet.run(0, seeds=[10 + k for k in of])
            found[of] = {k: (fleet.params[i].clone(), shot.dfil()[i].float()) for i, k in enumerate(of)}
        for k in (0, 2):
            for a, b in zip(*(each[k] for each in found.values()), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    print("fleets ok: a training with its own seed does not depend on the others")


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
