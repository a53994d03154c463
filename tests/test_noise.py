"""Noise: standard normal, a function of seed and step, never the same twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from reconbound._check import InputError
from reconbound.noise import SOURCES, draw

CPU = torch.device("cpu")
sources = pytest.mark.parametrize("source", SOURCES)


@sources
def test_standard_normal(source: str) -> None:
    x = draw(source, 11, 0, 200_000, CPU)
    assert x.dtype == torch.float64  # on a grid as fine as the sum's, see noise.py
    n = len(x)
    assert abs(float(x.mean())) < 4 / n**0.5
    assert abs(float(x.var()) - 1) < 4 * (2 / n) ** 0.5
    assert abs(float((x**3).mean())) < 4 * (15 / n) ** 0.5
    assert abs(float((x**4).mean()) - 3) < 4 * (96 / n) ** 0.5
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-3
    for lag in (1, n // 2):  # Box–Muller's two halves among them
        assert abs(float((x[:-lag] * x[lag:]).mean())) < 4 / (n - lag) ** 0.5
        assert abs(float((x[:-lag] ** 2 * x[lag:] ** 2).mean()) - 1) < 4 * (8 / (n - lag)) ** 0.5


@sources
def test_tails(source: str) -> None:
    x = draw(source, 5, 1, 400_000, CPU).numpy()
    for cut in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(cut) * len(x)
        assert abs((np.abs(x) > cut).sum() - expected) < 4.5 * expected**0.5


@sources
def test_reproduces_and_never_repeats(source: str) -> None:
    assert torch.equal(draw(source, 1, 2, 9, CPU), draw(source, 1, 2, 9, CPU))
    seeds, steps = (0, 1, 2**32, 2**32 + 1, 2**127), range(200)
    found = {tuple(draw(source, seed, t, 2, CPU).tolist()) for seed in seeds for t in steps}
    assert len(found) == len(seeds) * len(steps)


@sources
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_any_size(source: str, size: int) -> None:
    assert draw(source, 1, 0, size, CPU).shape == (size,)


def test_sources_differ_and_others_are_refused() -> None:
    assert not torch.equal(draw("philox", 1, 0, 4, CPU), draw("secure", 1, 0, 4, CPU))
    with pytest.raises(InputError, match="noise"):
        draw("dice", 1, 0, 4, CPU)
