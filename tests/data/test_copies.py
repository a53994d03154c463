"""Several rows of one person: they are found, and floors for a group of rows hold against a dense computation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor, nn

import auditing
from reconbound import Account, FisherAccountant, PrivateSGD, Settings, guarantee
from reconbound._internal.checks import InputError
from reconbound.auditing.run import run_audit
from reconbound.data.dataset import find_copies
from reconbound.fisher import step_information
from reconbound.mechanisms import DP, OutputPerturbation, RenyiDP, SampledGaussian
from reconbound.report.folder import REPORT, read_leakage

SETTING: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 0.8, "clip": "hard"}


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square() / 2


def one_weight() -> nn.Module:
    """One parameter: the release of a step is one number, whose density can be integrated."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.6)
    return model


def dense_information(x: float, y: float, copies: int, rate: float, noise: float) -> float:
    """Information about x of K f(x) + noise, K ~ Binomial(copies, rate), f the clipped gradient, by quadrature."""

    def shift(at: float) -> float:
        gradient = (0.6 * at - y) * at
        return gradient * min(1.0, 1.0 / abs(gradient))

    h = 1e-6
    f, slope = shift(x), (shift(x + h) - shift(x - h)) / (2 * h)
    grid = np.linspace(-30 * noise - 3 * copies, 30 * noise + 3 * copies, 400_001)
    density, score = np.zeros_like(grid), np.zeros_like(grid)
    for k in range(copies + 1):
        part = binom.pmf(k, copies, rate) * norm.pdf(grid, k * f, noise)
        density += part
        score += part * (grid - k * f) / noise**2 * k * slope
    where = density > 1e-300
    return float(np.trapezoid(score[where] ** 2 / density[where], grid[where]))


@pytest.mark.parametrize("copies", [1, 2, 3, 6])
@pytest.mark.parametrize(("rate", "noise"), [(1.0, 0.8), (0.5, 0.8), (0.1, 0.3), (0.02, 2.0)])
def test_the_floor_of_a_group_holds_against_its_own_information(copies: int, rate: float, noise: float) -> None:
    """Copies of one row: the floor never exceeds 1/I of the group, and equals it where nothing is sampled."""
    x, y = 0.7, -0.2
    setting = {**SETTING, "noise_multiplier": noise}
    rows, targets = torch.full((copies, 1), x, dtype=torch.float64), torch.full((copies,), y, dtype=torch.float64)
    found = step_information(one_weight(), squares, rows, targets, **setting)
    ledger = FisherAccountant(Account(records=copies, features=1, steps=1, sample_rate=rate, **setting))
    ledger.add(torch.arange(copies), found, weight=rate)
    ledger.finish_run()
    exact = dense_information(x, y, copies, rate, noise)
    floor = float(ledger.group_floor(range(copies)).value)
    assert floor <= (1 + 1e-6) / exact
    if rate == 1 or copies == 1:
        assert floor == pytest.approx(1 / exact, rel=1e-5)
    single = float(ledger.mse_floor().value[0])
    assert floor == pytest.approx(single / copies**2)
    if copies > 1 and rate == 1:
        assert single > (1 + 1e-6) / exact  # the floor of one row does not hold for its owner


def test_rows_that_differ_in_what_is_public_are_bounded_too() -> None:
    """Two rows share the private number and have other targets: E‖s₁ + s₂‖² ≤ 2(E‖s₁‖² + E‖s₂‖²)."""
    x = torch.full((2, 1), 0.7, dtype=torch.float64)
    y = torch.tensor([-0.2, 0.9], dtype=torch.float64)
    found = step_information(one_weight(), squares, x, y, **SETTING)
    ledger = FisherAccountant(Account(records=2, features=1, steps=1, sample_rate=1.0, **SETTING))
    ledger.add(torch.arange(2), found)
    ledger.finish_run()
    slopes = [(2 * 0.6 * 0.7 - t) for t in y.tolist()]  # of the gradients, none of which is clipped
    assert bool((found.factor == 1).all())
    exact = sum(slopes) ** 2 / 0.8**2
    assert float(ledger.group_floor([0, 1]).value) <= 1 / exact


def test_group_floor_checks_its_rows_and_carries_caveats() -> None:
    ledger = FisherAccountant(Account(records=4, features=1, steps=1, sample_rate=1.0, **SETTING))
    x, y = torch.rand(3, 1, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    ledger.add(torch.arange(3), step_information(one_weight(), squares, x, y, **SETTING))
    ledger.finish_run()
    for wrong in ([], [0, 0], [4], [-1], [0.5]):
        with pytest.raises(InputError, match="rows"):
            ledger.group_floor(wrong)
    bound = ledger.group_floor([0, 2])
    assert "2 rows" in str(bound)
    assert set(ledger.caveats) <= set(bound.notes)
    assert float(ledger.group_floor([0, 3]).value) == 0.0  # one was never measured


def test_limits_of_a_group_are_below_its_estimate() -> None:
    ledger = FisherAccountant(Account(records=4, features=1, steps=1, sample_rate=1.0, **SETTING))
    x, y = torch.rand(4, 1, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    for w in (0.6, 0.61, 0.62, 0.6, 0.59):
        model = one_weight()
        nn.init.constant_(model.weight, w)  # type: ignore[arg-type]
        ledger.add(torch.arange(4), step_information(model, squares, x, y, **SETTING))
        ledger.finish_run()
    limit, estimate = ledger.group_floor([0, 1], confidence=0.95), ledger.group_floor([0, 1])
    assert 0 < float(limit.value) < float(estimate.value)
    assert estimate.estimate
    assert not limit.estimate


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (2.0, 0.5), (4.0, 1.0), (1.5, 0.01)])
def test_the_mechanism_for_a_group_dominates_the_exact_mixture(copies: int, noise: float, rate: float) -> None:
    """One step: the number of the group's rows in the batch is binomial; order 2 and δ(ε), both ways, by quadrature."""
    one = SampledGaussian(noise, rate, 1, clip="hard")
    group = one.for_group(copies)
    m = 1 / noise
    weights = [binom.pmf(k, copies, rate) for k in range(copies + 1)]
    # adding or removing the group: KL to the release without it
    grid = np.linspace(-12, 12 + copies * m, 200_001)
    without = norm.pdf(grid)
    with_it = sum(w * norm.pdf(grid, k * m) for k, w in enumerate(weights))
    assert float(np.trapezoid(with_it * np.log(with_it / without), grid)) <= group.kl() * (1 + 1e-6) + 1e-12
    # replacing it: order 2 between opposite gradients of norm C
    other = sum(w * norm.pdf(grid, -k * m) for k, w in enumerate(weights))
    wide = np.linspace(-15 - 4 * copies * m, 15 + 4 * copies * m, 400_001)
    p = sum(w * norm.pdf(wide, k * m) for k, w in enumerate(weights))
    q = sum(w * norm.pdf(wide, -k * m) for k, w in enumerate(weights))
    keep = q > 1e-290
    assert math.log(float(np.trapezoid(p[keep] ** 2 / q[keep], wide[keep]))) <= group.order2() * (1 + 1e-6) + 1e-12
    for delta in (1e-3, 1e-5):
        for adjacency, (a, b) in {"add/remove": (with_it, without), "replace-one": (with_it, other)}.items():
            epsilon = group.epsilon_at(delta, adjacency)
            assert epsilon is not None
            for left, right in ((a, b), (b, a)):
                apart = float(np.trapezoid(np.maximum(left - math.exp(min(epsilon, 700.0)) * right, 0), grid))
                assert apart <= delta * 1.001 + 1e-9


def test_groups_of_other_mechanisms() -> None:
    assert OutputPerturbation(1000, 0.1, 0.3).for_group(3).noise_std == pytest.approx(0.1)
    assert DP(1.0).for_group(3).epsilon == 3.0
    two = DP(1.0, 1e-5).for_group(2)
    assert (two.epsilon, two.delta) == (2.0, pytest.approx(1e-5 * (1 + math.e)))
    fixed = SampledGaussian(1.0, 0.1, 10, sampler="fixed").for_group(2)
    assert (fixed.noise_multiplier, fixed.sample_rate) == (0.5, 1.0)
    shuffled = SampledGaussian.shuffled(2.0, 5, 10).for_group(4)
    assert (shuffled.noise_multiplier, shuffled.steps) == (0.5, 2)
    assert SampledGaussian(1.0, 0.1).for_group(1) == SampledGaussian(1.0, 0.1)
    with pytest.raises(InputError, match="copies"):
        RenyiDP(1.0).for_group(2)
    with pytest.raises(InputError, match="copies"):
        DP(1.0).for_group(0)


def test_guarantee_for_copies_is_weaker() -> None:
    ledger = FisherAccountant(Account(records=40, features=2, steps=50, sample_rate=0.1, **SETTING))
    one, three = ledger.guarantee(), ledger.guarantee(copies=3)
    assert three.epsilon is not None
    assert one.epsilon is not None
    assert three.epsilon > one.epsilon
    assert dict(three.rero)[0.01] > dict(one.rero)[0.01]
    assert three["theorem1"].value < one["theorem1"].value
    assert dict(guarantee(ledger.account.mechanism().for_group(3), dim=2).rero) == dict(three.rero)


def test_copies_are_found_by_value() -> None:
    inputs = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [0.0, 4.0], [-0.0, 4.0], [1.0, 2.0]])
    targets = np.array([0, 1, 0, 1, 1, 1])

    def found(*parts: Any) -> tuple[int, list[int]]:
        copies = find_copies(*parts)
        return copies.records, copies.largest.tolist()

    assert found(inputs) == (5, [0, 2, 5])
    assert found(inputs, targets) == (4, [0, 2])
    assert found(torch.tensor(inputs), torch.tensor(targets)) == (4, [0, 2])
    assert found(inputs[:, 1:]) == (6, [0, 2, 5])
    assert found({"a": torch.arange(3), "b": torch.zeros(3)}) == (0, [])
    assert found(np.zeros((0, 2))) == (0, [])


def test_learner_counts_copied_rows() -> None:
    x = torch.rand(10, 2)
    x[7], x[9] = x[3], x[3]
    y = torch.arange(10) % 2
    y[7], y[9] = y[3], y[3]
    settings = Settings(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, seed=1, budget="every")

    def losses(out: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, t, reduction="none")

    learner = PrivateSGD(nn.Linear(2, 2), losses, x, y, settings, progress=False)
    learner.fit(3)
    assert learner.accountant is not None
    text = " ".join(learner.accountant.caveats)
    assert "3 of 10 records have exact copies (at most 3 of one)" in text
    assert "group_floor" in text
    distinct = PrivateSGD(nn.Linear(2, 2), losses, torch.rand(10, 2), y, settings, progress=False)
    assert not any("copies" in caveat for caveat in distinct.measurer.caveats)


def test_report_counts_copies_and_their_floor(tmp_path: Path) -> None:
    people = auditing.people()
    people.inputs[[5, 9, 11]] = people.inputs[2]
    people.targets[[5, 9, 11]] = people.targets[2]
    folder = run_audit(people, auditing.options(runs=1, steps=6), tmp_path / "a", show=False)
    found = read_leakage(folder).facts["copies"]
    assert found["records"] == 4
    assert found["largest"] == [2, 5, 9, 11]
    page = (folder / REPORT).read_text()
    assert "4 of 40 records have exact copies (at most 4 of one)" in page
    dfil = read_leakage(folder).dfil[0]
    floor = 1 / math.sqrt(4 * float(dfil[[2, 5, 9, 11]].sum()))
    from reconbound.report.formats import plus_minus

    assert f"{plus_minus(floor)} of a column’s range" in page[page.index("have exact copies") :][:700]
    clean = run_audit(auditing.people(), auditing.options(runs=1, steps=6), tmp_path / "b", show=False)
    assert "No record has an exact copy" in (clean / REPORT).read_text()
