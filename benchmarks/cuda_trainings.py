"""The checks of cuda_smoke.py that train: graphs, one rank of NCCL, stopped trainings and fleets on a GPU."""

import contextlib
import tempfile
import warnings
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from reconbound._internal.rng import derive
from reconbound.auditing import models as networks
from reconbound.fisher.worlds import Replacement
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training.noise import draw
from reconbound.training.private_sgd import PrivateSGD
from reconbound.training.ranks import Ranks, _group_of_cpu, _time_limit
from reconbound.training.settings import Settings


def losses(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none")


def _stop_at_17(model):
    raise KeyboardInterrupt


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
            same = [one.measurer.information_and_sum(batch, draw) for one, draw in zip(both, draws, strict=True)]
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
