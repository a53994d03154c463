"""No noise and no batches twice: whatever differs between two releases of one seed, both are drawn afresh."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import CLASSES, FEATURES, Kept, data, losses, network, settings
from reconbound.training.private_sgd import PrivateSGD

STEPS = 6


def recorded(
    model: nn.Module | None = None, *, loss: Any = losses, records: Any = None, steps: int = STEPS, **options: Any
) -> Kept:
    names = settings().__dataclass_fields__
    chosen = {name: options.pop(name) for name in list(options) if name in names}
    x, y = records or data()
    model = network(1) if model is None else model
    one = Kept(model, loss, x, y, settings(**{"rules": None, **chosen}), check=False, **options)
    one.fit(steps)
    return one


def wider() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def changed_record() -> tuple[Tensor, Tensor]:
    x, y = data()
    x[3, 1] += 1e-6
    return x, y


def changed_label() -> tuple[Tensor, Tensor]:
    x, y = data()
    y[3] = (y[3] + 1) % CLASSES
    return x, y


def continued() -> Kept:
    return recorded(recorded().model)


def by_hand() -> Kept:
    model = network(1)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    return recorded(model)


def one_later(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < STEPS - 1 else 0.5)


def frozen() -> nn.Module:
    model = network(1)
    model[0].bias.requires_grad_(False)
    return model


CASES: dict[str, Callable[[], Kept]] = {
    "noise multiplier": lambda: recorded(noise_multiplier=1.5),
    "learning rate": lambda: recorded(lr=0.2),
    "momentum": lambda: recorded(momentum=0.5),
    "weight decay": lambda: recorded(weight_decay=0.1),
    "model width": lambda: recorded(wider()),
    "activation": lambda: recorded(nn.Sequential(network(1)[0], nn.GELU(), network(1)[2])),
    "start": lambda: recorded(network(2)),
    "start by hand": by_hand,
    "frozen bias": lambda: recorded(frozen()),
    "double precision": lambda: recorded(network(1).double(), records=(data()[0].double(), data()[1])),
    "optimizer": lambda: recorded(optimizer=lambda p: torch.optim.Adam(p, lr=0.1)),
    "optimizer's betas": lambda: recorded(optimizer=lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99))),
    "schedule": lambda: recorded(schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)),
    "schedule's end": lambda: recorded(schedule=one_later),
    "clip norm": lambda: recorded(max_grad_norm=0.5),
    "clip kind": lambda: recorded(clip="hard"),
    "sample rate": lambda: recorded(sample_rate=0.3),
    "sampler": lambda: recorded(sampler="fixed"),
    "one record": lambda: recorded(records=changed_record()),
    "one label": lambda: recorded(records=changed_label()),
    "loss": lambda: recorded(loss=lambda o, t: losses(o, t) * 1.01),
    "continued": continued,
    "steps": lambda: recorded(steps=STEPS + 1),
    "micro-batch": lambda: recorded(micro_batch=2),
    "measured in the pass": lambda: recorded(rules=(), budget="every"),
}


@pytest.mark.parametrize("case", CASES)
def test_two_releases_share_neither_noise_nor_batches(case: str) -> None:
    """At every pair of steps the noise vectors are as good as orthogonal; batches agree no more than by chance."""
    one, other = recorded(), CASES[case]()
    for a in one.drawn:
        for b in other.drawn:
            size = min(len(a), len(b))
            assert not bool((a[:size] == b[:size]).any())
            assert abs(float(torch.corrcoef(torch.stack([a[:size], b[:size]]))[0, 1])) < 5 / size**0.5
    alike = sum(a == b for a, b in zip(one.batches, other.batches, strict=False))
    assert alike <= 1, (one.batches, other.batches)


def test_another_loss_gets_other_noise_once_a_sum_differs() -> None:
    """The second loss differs from the first only away from the start: no probe of it can see that."""

    class Later:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return losses(outputs, targets) * (1.5 if self.calls > 4 else 1.0)

    one, other = recorded(), recorded(loss=Later())
    same = [bool(torch.equal(a, b)) for a, b in zip(one.drawn, other.drawn, strict=True)]
    assert not same[-1]
    assert same == sorted(same, reverse=True)  # once apart, apart for good
    for step in range(same.index(False), STEPS):
        assert not bool((one.drawn[step] == other.drawn[step]).any())


def test_starts_that_few_records_show_share_nothing() -> None:
    """Column 0 is 0 in all records but one; the weights that meet it change no loss that the run looks at."""
    x, y = data()
    x[:, 0] = 0.0
    x[5, 0] = 1.0
    other = network(1)
    with torch.no_grad():
        other[0].weight[:, 0] += 0.5
    models = (network(1), other)
    learners = [PrivateSGD(model, losses, x, y, settings(rules=None), check=False) for model in models]
    assert learners[0].measurer.some_losses() == learners[1].measurer.some_losses()
    runs = [recorded(model, records=(x, y)) for model in models]
    assert runs[0].run_seed != runs[1].run_seed
    assert sum(a == b for a, b in zip(runs[0].batches, runs[1].batches, strict=True)) <= 1


def test_accounting_does_not_change_the_release() -> None:
    one = recorded()
    for other in (recorded(), recorded(rules=()), recorded(rules=("exact", "paper"), probes=3, private=[0, 1])):
        assert all(torch.equal(a, b) for a, b in zip(one.drawn, other.drawn, strict=True))
        assert one.batches == other.batches
        assert all(torch.equal(p, q) for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_two_runs_do_not_reveal_the_clipped_sum() -> None:
    """The attack of the issue: from two noise multipliers, (y₁/σ₁ − y₂/σ₂)/(1/σ₁ − 1/σ₂) was the first step's sum."""
    x, y = data()
    released = []
    for sigma in (1.0, 2.0):
        model = network(1)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().double()
        chosen = settings(noise_multiplier=sigma, sample_rate=1.0, lr=1.0, rules=None)
        PrivateSGD(model, losses, x, y, chosen, check=False).fit(1)
        after = nn.utils.parameters_to_vector(model.parameters()).detach().double()
        released.append((before - after) * len(x))
    guess = (released[0] / 1.0 - released[1] / 2.0) / (1 / 1.0 - 1 / 2.0)
    from reconbound.fisher import clipped_gradient_sum

    sums = clipped_gradient_sum(network(1), losses, x, y, max_grad_norm=1.0).gradient_sum
    true = torch.cat([v.flatten() for v in sums.values()]).double()
    assert float((guess - true).norm() / len(true) ** 0.5) > 0.5  # it was 1e-5


def test_noise_key_depends_on_seed_release_step_and_sum() -> None:
    """By hand: SHAKE-256 and Box–Muller in NumPy under HMAC-SHA-256 keys."""
    one = recorded()
    for step, (total, drawn) in enumerate(zip(one.sums, one.drawn, strict=True)):
        about = f"sum|torch.float32|({len(total)},)|".encode() + total.numpy().tobytes()
        fields = b"noise".ljust(16, b"\0") + step.to_bytes(8, "little") + hashlib.sha256(about).digest()
        key = hmac.new(one.run_seed.to_bytes(32, "little"), b"reconbound" + fields, hashlib.sha256).digest()
        pairs = (len(total) + 1) // 2
        raw = hashlib.shake_256(b"reconbound noise" + key + bytes(8)).digest(64 * pairs)
        bits = np.frombuffer(raw, dtype="<u8").reshape(2, 4, pairs) >> np.uint64(11)
        u = (bits.astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(u[0])), 2 * np.pi * u[1]
        normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).sum(0) / 2
        np.testing.assert_allclose(drawn.numpy(), normal[: len(total)], rtol=1e-12, atol=1e-14)
    assert one.run_seed != one.seed
