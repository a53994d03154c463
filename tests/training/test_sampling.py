"""Who is drawn when, and who is measured when."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from reconbound._internal.checks import InputError
from reconbound._internal.rng import checked_seed, derive, new_seed, numbers_of, torch_stream
from reconbound.accounting.measurement_plan import Blocks, Segments, batch_weight, checked_budget
from reconbound.training.sampling import FixedSize, Poisson, ShuffledEpochs, make_plans, make_sampler, with_gaps
from reconbound.training.settings import Settings
from reconbound.validate.model import ReconboundWarning

SAMPLERS = [Poisson(40, 0.2), Poisson(40, 0.2, by_gaps=True), FixedSize(40, 8), ShuffledEpochs(40, 7)]


def drawn(sampler, steps: int, seed: int = 0) -> np.ndarray:
    """(steps, records) of zeros and ones."""
    found = np.zeros((steps, sampler.records))
    for t in range(steps):
        found[t, sampler.batch(seed, t).numpy()] += 1
    return found


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.name)
def test_batches_are_functions_of_seed_and_step(sampler) -> None:
    batches = [sampler.batch(3, t) for t in range(30)]
    assert all(torch.equal(b, sampler.batch(3, t)) for t, b in enumerate(batches))
    assert not all(torch.equal(b, sampler.batch(4, t)) for t, b in enumerate(batches))
    assert len({tuple(b.tolist()) for b in batches}) > 25
    assert all(b.dtype == torch.int64 and b.unique().numel() == b.numel() for b in batches)


@pytest.mark.parametrize("sampler", [*SAMPLERS, Poisson(1001, 0.3), Poisson(300, 0.3, by_gaps=True)])
@pytest.mark.parametrize("ends", [[0, 40], [0, 7, 20, 33, 40], [0, 1, 2, 3, 4, 5, 40], [0, 13, 13, 40]])
def test_ranges_of_records_draw_the_parts_of_the_whole_batch(sampler, ends: list[int]) -> None:
    """Whether a record takes part is a function of seed, step and record: how records are shared changes nothing."""
    ends = [*ends[:-1], sampler.records]
    for t in range(20):
        whole = sampler.batch(5, t)
        parts = [sampler.batch(5, t, span) for span in pairwise(ends)]
        for (first, end), part in zip(pairwise(ends), parts, strict=True):
            assert torch.equal(part, whole[(whole >= first) & (whole < end)])
        assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())


@pytest.mark.parametrize("by_gaps", [False, True])
def test_poisson_records_are_drawn_independently_at_the_rate(by_gaps: bool) -> None:
    steps, q = 4000, 0.2
    found = drawn(Poisson(30, q, by_gaps), steps)
    error = math.sqrt(q * (1 - q) / steps)
    assert np.abs(found.mean(0) - q).max() < 4.5 * error  # 30 records: 4.5 standard errors
    sizes = found.sum(1)
    expected = stats.binom.pmf(np.arange(31), 30, q) * steps
    kept = expected > 5
    observed = np.bincount(sizes.astype(int), minlength=31)[kept]
    statistic = ((observed - expected[kept]) ** 2 / expected[kept]).sum()
    assert stats.chi2.sf(statistic, kept.sum() - 1) > 1e-4
    centred = (found - q) / math.sqrt(q * (1 - q))
    between = centred.T @ centred / steps - np.eye(30)
    assert np.abs(between[~np.eye(30, dtype=bool)]).max() < 5 / math.sqrt(steps)  # records
    after = (centred[1:] * centred[:-1]).mean(0)
    assert np.abs(after).max() < 4.5 / math.sqrt(steps)  # successive steps


@pytest.mark.parametrize("by_gaps", [False, True])
def test_poisson_at_a_tiny_rate(by_gaps: bool) -> None:
    n, q, steps = 1_000_000, 2e-6, 300
    count = sum(len(Poisson(n, q, by_gaps).batch(1, t)) for t in range(steps))
    mean = n * q * steps
    assert abs(count - mean) < 5 * math.sqrt(mean)
    assert sum(len(Poisson(n, 1e-12, by_gaps).batch(1, t)) for t in range(50)) == 0


def test_fixed_size_sets_are_uniform() -> None:
    steps = 6000
    counts: dict[tuple[int, ...], int] = {}
    for t in range(steps):
        batch = tuple(FixedSize(5, 2).batch(0, t).tolist())
        counts[batch] = counts.get(batch, 0) + 1
    assert len(counts) == 10
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("apart", [1, 2, 5])
def test_fixed_size_sets_are_drawn_afresh(apart: int) -> None:
    """Two sets of B of N records share H records, which is hypergeometric. Successive sets of an epoch share none."""
    n, size, steps = 12, 4, 4000
    batches = [set(FixedSize(n, size).batch(2, t).tolist()) for t in range(0, apart * steps, apart)]
    shared = np.bincount([len(a & b) for a, b in pairwise(batches)], minlength=size + 1)
    expected = stats.hypergeom.pmf(np.arange(size + 1), n, size, size) * (steps - 1)
    assert stats.chisquare(shared, expected).pvalue > 1e-4


def test_shuffled_epochs_see_every_record_once() -> None:
    sampler = ShuffledEpochs(10, 4)
    assert sampler.steps_per_epoch == 3
    assert sampler.divisor == 4
    for epoch in range(4):
        seen = [i for t in range(3) for i in sampler.batch(0, 3 * epoch + t).tolist()]
        assert sorted(seen) == list(range(10))


def test_divisors_do_not_depend_on_the_batch() -> None:
    assert Poisson(50, 0.13).divisor == 50 * 0.13
    assert FixedSize(50, 7).divisor == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(0, 0.1),
        lambda: Poisson(5, 0.0),
        lambda: Poisson(5, 1.1),
        lambda: FixedSize(5, 6),
        lambda: make_sampler("sorted", 5, 0.5),
    ],
)
def test_impossible_samplers_are_refused(make) -> None:
    with pytest.raises(InputError):
        make()


# --- streams -----------------------------------------------------------------------------


def test_streams_differ_in_seed_purpose_and_step() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**64, 2**128 - 1]
    found = {derive(s, p, t) for s in seeds for p in ("batch", "noise", "probe 1", "probe 11") for t in range(20)}
    assert len(found) == len(seeds) * 4 * 20
    assert len({derive(s, "batch", 0) % 2**128 for s in seeds}) == len(seeds)


def test_more_than_32_bits_of_the_seed_reach_the_numbers() -> None:
    """torch's own CPU generator drops all but 32; noise and batches must not rest on it."""
    one, other = (torch.randn(4, generator=torch.Generator().manual_seed(5 + k * 2**40)) for k in (0, 1))
    if not torch.equal(one, other):
        pytest.skip("this torch keeps the whole seed")
    a, b = numbers_of(5, "noise", 0), numbers_of(5 + 2**40, "noise", 0)
    assert not np.array_equal(a.random(8), b.random(8))
    assert a.bit_generator.state["state"]["key"].max() > 2**32


def test_torch_streams_reproduce() -> None:
    draws = [torch.randn(3, generator=torch_stream(1, "probe 0", t)) for t in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("seed", [-1, 2**256, 1.5, True, "a"])
def test_impossible_seeds_are_refused(seed) -> None:
    with pytest.raises(InputError, match="seed"):
        checked_seed(seed)


def test_large_seeds_keep_all_their_bits() -> None:
    assert checked_seed(2**128 - 1) == 2**128 - 1
    assert new_seed() != new_seed()


# --- budgets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "q", "steps", "budget", "group"),
    [
        (30, 0.1, 100, 1.0, 3),
        (7, 0.3, 11, 0.5, 2),
        (5, 0.5, 3, 100.0, 5),
        (20, 0.01, 50, 0.15, 1),
        (9, 0.2, 25, 0.7, 4),
    ],
)
def test_blocks_measure_each_record_once_a_block_with_weight_lq(records, q, steps, budget, group) -> None:
    plan = Blocks(records, q, steps, budget, group)
    seen: dict[int, list[int]] = {}
    total = np.zeros(records)
    for t in range(steps):
        block, start, length = plan.block(t)
        assert start <= t < start + length
        for some in plan.at(3, t):
            seen.setdefault(block, []).extend(some.tolist())
            total[some.numpy()] += plan.weight(t)
    assert len(seen) == plan.blocks
    assert all(sorted(of) == list(range(records)) for of in seen.values())
    np.testing.assert_allclose(total, steps * q)  # the weights of a record add up to its expected draws
    assert plan.blocks == 1 or plan.blocks <= steps * q * budget + 1e-9  # never above the budget


def test_blocks_choose_the_step_uniformly() -> None:
    plan, runs = Blocks(6, 0.25, 8, 0.5, 2), 3000
    at = np.zeros((6, 8))
    for seed in range(runs):
        for t in range(8):
            for some in plan.at(seed, t):
                at[some.numpy(), t] += 1
    assert np.abs(at / runs - 1 / 8).max() < 4.5 * math.sqrt(1 / 8 * 7 / 8 / runs)


def test_steps_are_measured_at_their_rate() -> None:
    weights = [batch_weight(("steps", 0.25), 0, t) for t in range(4000)]
    measured = [w for w in weights if w is not None]
    assert set(measured) == {4.0}
    assert abs(len(measured) - 1000) < 4.5 * math.sqrt(4000 * 0.25 * 0.75)


@pytest.mark.parametrize("budget", [0, -1.0, "all", ("steps", 0.0), ("steps", 1.5), ("blocks", 0.5), float("nan")])
def test_impossible_budgets_are_refused(budget) -> None:
    with pytest.raises(InputError, match="budget"):
        checked_budget(budget)


@pytest.mark.parametrize(("n", "q"), [(1, 0.3), (7, 0.999), (40, 0.5), (1000, 1e-3), (100_000, 0.01), (10**9, 1e-30)])
def test_gaps_of_poisson_batches_are_geometric(n: int, q: float) -> None:
    """Chances of the first record and of gaps, and no record twice or out of range; batches of any size end."""
    gaps, firsts, steps = [], [], 400 if n <= 1000 else 20
    for t in range(steps):
        batch = Poisson(n, q, by_gaps=True).batch(5, t).numpy()
        assert len(batch) == 0 or (batch[0] >= 0 and batch[-1] < n)
        assert bool((np.diff(batch) > 0).all())
        gaps.append(np.diff(batch))
        firsts.append(batch[0] if len(batch) else n)
    all_gaps = np.concatenate(gaps)
    if n == 100_000:
        expected = stats.geom.pmf(np.arange(1, 400), q) * len(all_gaps)
        observed = np.bincount(all_gaps, minlength=400)[1:400]
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert stats.chi2.sf(statistic, len(expected)) > 1e-4
    chance = 1 - (1 - q) ** n  # that there is one
    count = sum(first < n for first in firsts)
    assert abs(count - steps * chance) <= 5 * math.sqrt(steps * chance * (1 - chance)) + 1e-9


def plans(
    steps: int, budget: float = 0.15, worlds: int = 0, rules: Any = (), whole_at: Any = (), n: int = 60_000
) -> Any:
    settings = Settings(1.0, 1.0, 0.01, budget=budget, rules=rules)
    return make_plans(settings, Poisson(n, 0.01), steps, whole_at, worlds)


def test_measuring_that_costs_more_than_a_short_run_is_told_beforehand() -> None:
    """100 steps at q = 0.01 draw each record once, and measure each once: 2.5 gradients beside one."""
    with pytest.warns(
        ReconboundWarning, match=r"60,000 records .* about 2.5 times .* 100 steps .*drawn 1 times"
    ) as all_:
        plans(100)
    assert 'budget=("steps", 0.15) measures the batches of 15 % of the steps instead, for about 0.4' in str(
        all_[0].message
    )
    with pytest.warns(ReconboundWarning, match="about 4.5 times"):
        plans(100, worlds=1)
    with pytest.warns(ReconboundWarning, match="about 2.0 times"):
        plans(100, worlds=1, rules=None)
    with pytest.warns(ReconboundWarning, match="about 1.7 times what the 300 steps"):
        plans(300, whole_at=(100, 300))


def test_measuring_that_was_asked_for_or_is_little_is_not_told() -> None:
    plans(250)  # 2.5 gradients of 2.5
    plans(1000)
    plans(100, budget=1.0)  # as often as trained on
    plans(100, n=9_999)
    plans(100, rules=None)
    assert make_plans(Settings(1.0, 1.0, 0.01, budget="every"), Poisson(60_000, 0.01), 100, (), 0) == (None, None)


def test_only_poisson_batches_are_drawn_by_gaps() -> None:
    assert with_gaps(Poisson(40, 0.2)) == Poisson(40, 0.2, by_gaps=True)
    assert with_gaps(FixedSize(40, 8)) == FixedSize(40, 8)
    assert Poisson(40, 1.0, by_gaps=True).batch(1, 0).tolist() == list(range(40))


def test_a_run_that_is_whole_at_its_end_is_measured_as_a_fleet_measures_it() -> None:
    """One stretch has the assignment that fleets and sweeps share; a run without stretches has its own."""
    own, stretch = plans(1000).information, plans(1000, whole_at=(1000,)).information
    assert isinstance(own, Blocks)
    assert isinstance(stretch, Segments)
    assert stretch.weight(5) == own.weight(5)
    assert any(len(stretch.at(1, t)) != len(own.at(1, t)) for t in range(20))
