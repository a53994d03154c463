"""The divergence ledger after some of a run's steps: that of a run which ends there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_divergence_ledger import account

from learning import RECORDS, data, learner
from reconbound import FisherAccountant, PrivateSGD
from reconbound.accounting.spec import Account
from reconbound.divergences import poisson_kl, poisson_pair_kl
from reconbound.training.settings import Callback
from two_worlds import WORLDS, Stop, clipped_gradients


class SumsSoFar(Callback):
    """Keeps each run's sums after some steps: "removed" over the batches that were drawn, worlds over all records."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts, self.sums, self.times = counts, [], []

    def on_step(self, learner: PrivateSGD) -> None:
        s, (x, y) = learner.settings, data()
        if learner.step == 0:
            self.now, self.drawn = torch.zeros(3, len(x), dtype=torch.float64), torch.zeros(len(x))
        if learner.step in self.counts:
            self.sums.append(self.now.clone())
            self.times.append(self.drawn.clone())
        if learner.step == learner.steps:
            return
        batch = learner.sampler.batch(learner.run_seed, learner.step)
        real = clipped_gradients(learner.model, x, y, s.max_grad_norm, s.clip) / s.noise
        self.now[0, batch] += poisson_kl(real.norm(dim=1), s.sample_rate)[batch] / s.sample_rate
        self.drawn[batch] += 1
        for k, world in enumerate(WORLDS.values(), 1):
            other = clipped_gradients(learner.model, *world(x, y), s.max_grad_norm, s.clip) / s.noise
            norms = (real.norm(dim=1), other.norm(dim=1), (real * other).sum(1))
            self.now[k] += poisson_pair_kl(*norms, s.sample_rate, squared_distance=(real - other).square().sum(1))


def test_a_shorter_run_has_the_sums_up_to_its_end(tmp_path: Any) -> None:
    """Over three runs, at two step counts: means, errors, counts, limits and caps are those of runs that end there."""
    counts, runs = (4, 9), 3
    seen = SumsSoFar(counts)
    options = {"worlds": WORLDS, "rules": None, "progress": False, "whole_at": counts, "budget": 1e3}
    ledger = learner(callbacks=[seen], **options).repeat(runs, counts[-1]).accountant
    assert ledger is not None
    ledger.save(tmp_path / "ledger")
    for own in (ledger.divergences, FisherAccountant.load(tmp_path / "ledger").divergences):
        for k, count in enumerate(counts):
            found, sums = own.at(count), torch.stack(seen.sums[k::2])
            assert found.runs == len(sums) == runs
            for row, world in enumerate(("removed", *WORLDS)):
                estimates = found.estimates(world)
                torch.testing.assert_close(estimates.mean, sums[:, row].mean(0), rtol=1e-4, atol=1e-9)
                torch.testing.assert_close(estimates.error, sums[:, row].std(0) / runs**0.5, rtol=1e-3, atol=1e-7)
                mechanism = Account(**{**vars(ledger.account), "steps": count}).mechanism()
                cap = count * poisson_kl(mechanism.m, ledger.account.sample_rate)
                assert found.cap(world) == pytest.approx(cap) if row == 0 else found.cap(world) > cap
            assert found.times("removed").tolist() == torch.stack(seen.times[k::2]).sum(0).tolist()
            assert found.times("all").tolist() == [runs * count] * RECORDS
            assert found.estimates("removed").sampled
            assert found.towards().mechanism_success(0.1) <= own.towards().mechanism_success(0.1)
        whole = own.at(counts[-1])
        for world in own.worlds:
            torch.testing.assert_close(whole.divergence(world), own.divergence(world), rtol=1e-12, atol=0)
            torch.testing.assert_close(whole.divergence(world, 0.95), own.divergence(world, 0.95), rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match=r"step must be one of keep_runs_at, \[4, 9\]"):
        ledger.divergences.at(5)


def test_sums_of_single_runs_are_stopped_resumed_and_merged(tmp_path: Any) -> None:
    options: dict[str, Any] = {"worlds": WORLDS, "rules": None, "progress": False, "whole_at": (4, 9)}
    whole = learner(**options).repeat(2, 9).accountant
    with pytest.raises(KeyboardInterrupt):
        learner(**options, checkpoint=tmp_path, every=2, callbacks=[Stop(5)]).repeat(2, 9)
    resumed = learner(**options, checkpoint=tmp_path, every=2).repeat(2, 9).accountant
    other = learner(**options, seed=2**90).repeat(1, 9).accountant
    assert whole is not None and resumed is not None and other is not None  # noqa: PT018
    first = whole.divergences.at(4).estimates("removed").mean
    assert torch.equal(first, resumed.divergences.at(4).estimates("removed").mean)
    alone = other.divergences.at(4)
    assert bool(torch.isinf(alone.estimates("removed").error).all())  # of one run nothing is known
    with pytest.raises(ValueError, match="runs must be at least 2"):
        alone.divergence("removed", 0.95)
    whole.merge(other)
    both = whole.divergences.at(4)
    assert both.runs == 3
    torch.testing.assert_close(both.estimates("removed").mean, (2 * first + alone.estimates("removed").mean) / 3)


def test_a_ledger_that_kept_no_single_run_has_no_shorter_one() -> None:
    ledger = FisherAccountant(account(rules=None), worlds=["w"], keep_runs_at=[1, 2])
    with pytest.raises(ValueError, match="must be kept in a finished run: keep_step must be called after each step"):
        ledger.divergences.at(1)
