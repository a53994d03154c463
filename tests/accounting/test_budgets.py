"""Budgets of measurement: unbiased, and with standard errors that cover."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_accountant import account, info

from learning import SameNoise, learner
from reconbound._internal.checks import InputError
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.confidence import FEWEST
from reconbound.accounting.measurement_plan import Blocks

# --- budgets ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def budgets() -> dict:
    """Runs with the same seeds, so the same trajectories, measured in four ways: (runs, records) each."""
    runs, steps, found = 30, 12, {}
    for name, budget in {"all": 1e6, "every": "every", "steps": ("steps", 0.5), "blocks": 1.0}.items():
        traces, errors, final = [], [], []
        for seed in range(runs):
            probes = 3 if name == "all" else 1
            one = learner(kind=SameNoise, budget=budget, seed=seed, probes=probes, lr=0.5).fit(steps)
            assert one.accountant is not None
            traces.append(one.accountant.dfil())
            errors.append(one.accountant.standard_error())
            final.append(torch.cat([p.detach().flatten() for p in one.model.parameters()]))
        found[name] = (torch.stack(traces), torch.stack(errors), torch.stack(final))
    return found


@pytest.mark.slow
def test_measuring_does_not_change_training(budgets: dict) -> None:
    assert torch.equal(budgets["all"][2], budgets["blocks"][2])
    torch.testing.assert_close(budgets["all"][2], budgets["every"][2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["every", "steps", "blocks"])
@pytest.mark.slow
def test_budgets_are_unbiased(budgets: dict, name: str) -> None:
    """Against every record measured at every step, times q, on the same trajectories."""
    difference = budgets[name][0] - budgets["all"][0]
    error = difference.std(0) / len(difference) ** 0.5
    assert float((difference.mean(0) / error).abs().max()) < 4.5
    over_records = difference.mean(1)
    assert abs(float(over_records.mean())) < 4 * float(over_records.std()) / len(over_records) ** 0.5
    assert float(over_records.std()) / len(over_records) ** 0.5 < 0.08 * float(budgets["all"][0].mean())  # it can tell


@pytest.mark.parametrize("name", ["every", "steps", "blocks"])
@pytest.mark.slow
def test_standard_error_of_one_run_covers_budget(budgets: dict, name: str) -> None:
    squares = (budgets[name][0] - budgets["all"][0]).square().mean()
    error = budgets[name][1]
    claimed = error.masked_fill(error.isinf(), 0.0).square().mean()  # never measured: nothing to estimate it from
    assert 0.8 < float(claimed / squares) < 4.0
    far = (budgets[name][0] - budgets["all"][0]).abs() > 3 * budgets[name][1] + 0.5 * budgets["all"][0].mean()
    assert float(far.double().mean()) < 0.05


@pytest.mark.slow
def test_blocks_cost_less_variance_than_draws(budgets: dict) -> None:
    spread = {
        name: float((budgets[name][0] - budgets["all"][0]).square().mean()) for name in ("every", "steps", "blocks")
    }
    assert spread["blocks"] < spread["every"] < spread["steps"]


def simulated(f: np.ndarray, q: float, budget: str, runs: int, copies: int, seed: int) -> FisherAccountant:
    """A ledger of many records that all have the information f[t] at step t, each drawn and probed on its own."""
    rng, steps = np.random.default_rng(seed), len(f)
    ledger = FisherAccountant(account(copies, 1, steps=steps, sample_rate=q, rules=("none",)))
    for _ in range(runs):
        plan = Blocks(copies, q, steps, 0.5, 1)
        at = rng.permuted(np.tile(np.arange(steps), (copies, 1)), axis=1)  # of a block: a random step for each record
        for t in range(steps):
            if budget == "blocks":
                _, start, length = plan.block(t)
                rows = np.nonzero(at[:, start] % length == t - start)[0] if length > 1 else np.arange(copies)
                weight = plan.weight(t)
            else:
                rows, weight = np.nonzero(rng.random(copies) < q)[0], 1.0
                if budget == "steps":
                    keep = rng.random(len(rows)) < 0.8
                    rows, weight = rows[keep], 1.25
            probe = rng.chisquare(5, len(rows)) / 5  # a relative variance of 0.4, above what deflated probes have
            across = torch.from_numpy(f[t] * probe)
            ledger.add(
                torch.from_numpy(rows),
                info(across, torch.zeros(len(rows)), features=1, error=1.4),
                weight=weight,
                stratified=budget == "blocks",
            )
        ledger.finish_run()
    return ledger


@pytest.mark.parametrize("budget", ["every", "steps", "blocks"])
def test_upper_limits_cover_with_ten_runs(budget: str) -> None:
    """Information that falls hundredfold as training goes on, rare draws, one probe: skewed sums as they occur."""
    q, steps = 0.05, 120
    f = 10 ** np.linspace(0, -2, steps) + 0.05
    truth = q * f.sum()
    ledger = simulated(f, q, budget, runs=10, copies=1500, seed=1)
    trace = ledger.trace().numpy()
    assert abs(trace.mean() - truth) < 4 * trace.std() / len(trace) ** 0.5  # unbiased here too
    covered = float((ledger.upper() >= truth).double().mean())
    assert covered >= 0.95, covered
    assert float(torch.isfinite(ledger.upper()).double().mean()) > 0.5  # not for free


def test_no_limit_is_given_where_draws_are_too_few_to_cover() -> None:
    q, f = 0.01, np.full(100, 1.0)
    ledger = simulated(f, q, "every", runs=10, copies=1500, seed=2)
    assert bool(torch.isinf(ledger.upper()[ledger.measured() < FEWEST]).all())
    assert float((ledger.upper() >= 1.0).double().mean()) >= 0.95


def test_standard_error_of_rare_draws_is_the_formula() -> None:
    """Σ (1−π) x² + π e², π = q/weight; entries x, probe errors e = 0.3 x."""
    for weight, chance in ((1.0, 0.25), (2.0, 0.125), (0.25, 1.0)):
        ledger = FisherAccountant(account(rules=("none",)))
        for value in (1.0, 2.5):
            ledger.add(torch.tensor([2]), info(torch.tensor([value]), torch.zeros(1), error=0.3), weight=weight)
        x = weight * np.array([1.0, 2.5])
        expected = np.sqrt(np.sum((1 - chance) * x**2 + chance * (0.3 * x) ** 2)) / 3
        assert float(ledger.standard_error()[2]) == pytest.approx(expected)
        assert bool(torch.isinf(ledger.standard_error()[[0, 1, 3, 4, 5]]).all())


def test_standard_error_of_blocks_is_the_formula() -> None:
    """Half the squared differences of successive blocks, times B/(B−1); of one block x² as for a rare draw."""
    ledger, x = FisherAccountant(account(rules=("none",))), 2.0 * np.array([1.0, 4.0, 3.5, 7.0])
    for k, value in enumerate(x / 2):
        ledger.add(torch.tensor([1]), info(torch.tensor([value]), torch.zeros(1)), weight=2.0, stratified=True)
        expected = 0.875 * x[0] ** 2 + 0.125 * (0.1 * x[0]) ** 2
        if k:
            expected = np.sum(np.diff(x[: k + 1]) ** 2) / 2 * (k + 1) / k
        assert float(ledger.standard_error()[1]) == pytest.approx(expected**0.5 / 3)


@pytest.mark.parametrize(("weight", "stratified", "given"), [(1.0, False, 0), (2.5, True, 0), (0.25, True, 6)])
def test_blocks_are_sampled_too_unless_every_step_is_measured(weight: float, stratified: bool, given: int) -> None:
    ledger = FisherAccountant(account(rules=("none",)))
    for scale in (1.0, 1.1, 0.9):
        ledger.add(torch.arange(6), info(scale * torch.ones(6), torch.zeros(6)), weight=weight, stratified=stratified)
        ledger.finish_run()
    assert int(torch.isfinite(ledger.upper()).sum()) == given
    assert ledger.summary()["without_limit"] == 6 - given


def test_upper_needs_two_runs() -> None:
    with pytest.raises(InputError, match="runs"):
        FisherAccountant(account()).upper()


def covered_in_groups(f: np.ndarray, q: float, group: int, ledgers: int) -> float:
    """Returns how often limits cover, of records that are measured in groups with one step and one probe."""
    records, steps, covered = 160, len(f), []
    for seed in range(ledgers):
        rng = np.random.default_rng(seed)
        ledger = FisherAccountant(account(records, 1, steps=steps, sample_rate=q, rules=("none",)))
        for run in range(10):
            plan = Blocks(records, q, steps, 0.5, group)
            for t in range(steps):
                for rows in plan.at(1000 * seed + run, t):
                    across = torch.full((group,), f[t] * rng.chisquare(5) / 5)
                    found = info(across, torch.zeros(group), features=1, error=1.4)
                    ledger.add(rows, found, weight=plan.weight(t), stratified=True)
            ledger.finish_run()
        covered.append(float((ledger.upper() >= q * f.sum()).double().mean()))
    return float(np.mean(covered))


@pytest.mark.slow
def test_upper_limits_cover_with_sixteen_groups_in_a_block() -> None:
    """As beside Opacus, where several batches are measured together. With one group they do not cover."""
    q, steps = 0.05, 120
    assert covered_in_groups(10 ** np.linspace(0, -2, steps) + 0.05, q, 10, ledgers=10) >= 0.95
    assert covered_in_groups(np.where(np.arange(steps) < 6, 1.0, 0.01), q, 160, ledgers=20) < 0.8
