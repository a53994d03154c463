"""Linear models and fleets: noise is bound to the release there too; seeds that can be guessed are told of."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learning import data, learner, losses, network
from reconbound import PrivateLogisticRegression, PrivateRidge
from reconbound._internal.rng import GUESSABLE, new_seed
from reconbound.sweep.fleet.trainer import Fleet
from reconbound.training import noise
from reconbound.training.settings import Settings
from reconbound.validate import ReconboundWarning

GUESSED = "can be guessed"


def table(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(60, 8)) / 4, rng.integers(0, 2, 60)


def noise_of(kind: Any, x: np.ndarray, y: np.ndarray, **changes: Any) -> np.ndarray:
    options: dict[str, Any] = {"l2": 0.1, "noise_std": 0.5, "data_norm": 1.0, "random_state": 3}
    options |= {"target_bound": 1.0} if kind is PrivateRidge else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(**(options | changes)).fit(x, y)
    left = model._released() - model.solve(x, y).weights
    return np.ravel(left / model.noise_std_)


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateRidge])
def test_a_linear_release_shares_its_noise_with_no_other(kind: Any) -> None:
    x, y = table()
    other, flipped = x.copy(), y.copy()
    other[5, 2] += 1e-9
    flipped[5] = 1 - y[5]
    first = noise_of(kind, x, y)
    np.testing.assert_allclose(noise_of(kind, x, y), first, atol=1e-6)  # the same release again
    cases = {
        "l2": noise_of(kind, x, y, l2=0.1001),
        "noise": noise_of(kind, x, y, noise_std=0.5001),
        "data_norm": noise_of(kind, x, y, data_norm=1.0001),
        "random_state": noise_of(kind, x, y, random_state=4),
        "one entry": noise_of(kind, other, y),
        "one label": noise_of(kind, x, flipped),
        "intercept": noise_of(kind, x, y, fit_intercept=False),
        "fewer": noise_of(kind, x[:-1], y[:-1]),
        "order": noise_of(kind, x[::-1].copy(), y[::-1].copy()),
        "generator": noise_of(kind, x, y, random_state=np.random.RandomState(3)),
    }
    for name, found in cases.items():
        apart = np.abs(found[:8] - first[:8])
        assert apart.min() > 1e-4, (name, apart)  # was at most 1e-9 where only l2, the data or σ differed
    assert abs(float(np.mean(first))) < 4 / 3


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateRidge])
def test_linear_noise_is_of_the_cryptographic_generator(kind: Any, monkeypatch) -> None:
    """`noise.draw`, which tests/training/test_noise.py compares with SHAKE-256, under a key of 256 bits."""
    drawn: list[tuple[int, np.ndarray]] = []
    own = noise.draw

    def spied(key: int, size: int, device: torch.device) -> torch.Tensor:
        found = own(key, size, device)
        drawn.append((key, found.numpy()))
        return found

    monkeypatch.setattr(noise, "draw", spied)
    found = noise_of(kind, *table())
    ((key, wanted),) = drawn
    assert 2**128 < key < 2**256
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_linear_noise_is_standard_normal_and_none_is_fresh() -> None:
    x, y = table()
    found = np.concatenate([noise_of(PrivateRidge, x, y, random_state=k) for k in range(200)])
    assert abs(found.mean()) < 4 / len(found) ** 0.5
    assert abs(found.var() - 1) < 4 * (2 / len(found)) ** 0.5
    assert np.abs(noise_of(PrivateRidge, x, y, random_state=None) - noise_of(PrivateRidge, x, y)).min() > 1e-6
    state = np.random.RandomState(1)
    one, other = (noise_of(PrivateRidge, x, y, random_state=state) for _ in range(2))
    assert np.abs(one - other).min() > 1e-6  # a generator goes on, as scikit-learn has it


def fleet_noise(
    *, settings: Any = None, records: Any = None, seeds: Any = None, loss: Any = losses, model: Any = network
):
    chosen = settings or [
        Settings(1.0, 1.0, 0.3, lr=0.1, seed=3, budget=1.0),
        Settings(2.0, 1.0, 0.3, seed=3, budget=1.0),
    ]
    fleet = Fleet(model, loss, *(records or data()), chosen, at=[3])
    drawn = []
    for _ in fleet.run(0, seeds=seeds, report=lambda step: drawn.append(fleet.noise.clone())):
        pass
    drawn.append(fleet.noise.clone())
    batches = [fleet.sampler.batch(fleet.run_seeds[0], step).tolist() for step in range(3)]
    return torch.stack(drawn[1:]), batches


def test_fleets_share_noise_with_no_other_release() -> None:
    x, y = data()
    changed = x.clone()
    changed[0, 0] += 1e-6
    base = [Settings(1.0, 1.0, 0.3, lr=0.1, seed=3, budget=1.0), Settings(2.0, 1.0, 0.3, seed=3, budget=1.0)]
    for seeds in (None, [11, 12]):
        first, batches = fleet_noise(settings=base, seeds=seeds)
        again, _ = fleet_noise(settings=base, seeds=seeds)
        assert torch.equal(first, again)
        for change in ("noise_multiplier", "lr", "max_grad_norm", "momentum", "weight_decay"):
            other = [Settings(**{**vars(s), change: 0.7}) for s in base]
            found, same = fleet_noise(settings=other, seeds=seeds)
            assert not bool((found == first).any()), change
            assert same == batches  # which the trainings of a sweep share
        for found, own in (
            fleet_noise(settings=base, seeds=seeds, records=(changed, y)),
            fleet_noise(settings=base, seeds=seeds, loss=lambda o, t: 1.01 * losses(o, t)),
        ):
            assert not bool((found == first).any())
            assert own != batches
    single, _ = fleet_noise(settings=base[:1], seeds=[11])
    torch.testing.assert_close(single[:, 0], first[:, 0], rtol=0, atol=0)  # whoever is beside it
    (shot,) = Fleet(network, losses, x, y, base, at=[1]).run(0)
    assert "not for release" in shot.caveats[0]


@pytest.mark.parametrize("seed", [0, 7, 2**32, GUESSABLE - 1])
@pytest.mark.filterwarnings("default")
def test_guessable_seeds_warn(seed: int) -> None:
    with pytest.warns(ReconboundWarning, match="seed can be guessed.*subtract the noise"):
        learner(seed=seed)
    x, y = table()
    if seed < 2**32:
        with pytest.warns(ReconboundWarning, match="random_state can be guessed"):
            PrivateRidge(noise_std=0.01, data_norm=1.0, target_bound=1.0, random_state=seed).fit(x, y)


@pytest.mark.filterwarnings("error")
def test_unguessable_seeds_do_not_warn() -> None:
    for seed in (None, new_seed() | 2**127, GUESSABLE):
        learner(seed=seed).fit(2)
    x, y = table()
    PrivateRidge(noise_std=0.01, data_norm=1.0, target_bound=1.0).fit(x, y)


@pytest.mark.filterwarnings("always")
def test_learner_warns_once() -> None:
    with pytest.warns(ReconboundWarning, match=GUESSED) as reported:
        learner().repeat(2, 3)
    assert len([one for one in reported if GUESSED in str(one.message)]) == 1


WORDS = {
    "audit": ["audit", "t.csv", "--target", "y", "--range", "a=0:7", "--range", "b=0:11", "--model", "linear"],
    "sweep": ["sweep", "wine", "--grid", "lr=0.5", "--model", "linear"],
}
SHORT = ["--steps", "2", "--runs", "1"]


def write_table(folder: Path) -> None:
    """Writes a table for a training that is as small as may be."""
    rows = [f"{k % 7},{3 * k % 11},{'uv'[k % 2]}\n" for k in range(30)]
    (folder / "t.csv").write_text("".join(["a,b,y\n", *rows]))


def check_note(text: str, count: int) -> None:
    lines = [line for line in text.splitlines() if "guess" in line and "seed" in line]
    assert len(lines) == count, text
    assert all(line.startswith("Note: ") for line in lines)
    assert "Warning" not in text


@pytest.mark.parametrize("command", ["audit", "sweep"])
@pytest.mark.slow
def test_commands_print_one_line(tmp_path, command: str, run, monkeypatch) -> None:
    write_table(tmp_path)
    monkeypatch.chdir(tmp_path)
    for seed, count in (["--seed", "3"], 1), ([], 0):
        with warnings.catch_warnings(record=True) as reported:  # a process would print them
            warnings.simplefilter("default")
            status, _, err = run(*WORDS[command], *SHORT, *seed, "--out", tmp_path / f"{count}")
        assert status == 0, err
        check_note(err + "".join(f"{one.category.__name__}: {one.message}\n" for one in reported), count)


@pytest.mark.slow
def test_process_prints_one_line(tmp_path) -> None:
    """In a process of its own, with Python's filters of warnings."""
    write_table(tmp_path)
    call = [sys.executable, "-m", "reconbound", *WORDS["audit"], *SHORT, "--seed", "3", "--out", "a"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_note(done.stdout + done.stderr, 1)
