"""The divergence ledger against exact sums over all records and steps, computed from gradients formed by autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import CLASSES, FEATURES, RECORDS, data, learner, losses, network
from reconbound import FisherAccountant, PrivateSGD, Settings
from reconbound.accounting.spec import Account
from reconbound.bounds import membership_from_kl, success_from_kl
from reconbound.divergences import poisson_kl, poisson_pair_kl, sensitivity
from reconbound.fisher.worlds import Replacement, StepDistances
from reconbound.training.settings import Callback
from two_worlds import WORLDS, Stop, clipped_gradients


class ExactSums(Callback):
    """Adds up, over the steps of a run, the exact divergence of every record towards every world."""

    def __init__(self, x: Tensor, y: Tensor, worlds: dict[str, Any]) -> None:
        self.x, self.y, self.worlds = x, y, worlds
        self.runs: list[dict[str, Tensor]] = []
        self.now: dict[str, Tensor] = {}

    def on_step(self, learner: PrivateSGD) -> None:
        if learner.step == 0:
            self.now = {}
        if learner.step == learner.steps:
            self.runs.append(self.now)
            return
        s = learner.settings
        seen = [(self.x, self.y), *(world(self.x, self.y) for world in self.worlds.values())]
        x, y = (torch.cat(parts) for parts in zip(*seen, strict=True))
        real, *others = (clipped_gradients(learner.model, x, y, s.max_grad_norm, s.clip) / s.noise).split(len(self.x))
        found = {"removed": poisson_kl(real.norm(dim=1), s.sample_rate)} if s.sampler == "poisson" else {}
        for name, other in zip(self.worlds, others, strict=True):
            d2 = (real - other).square().sum(1)
            if s.sampler == "poisson":
                norms = (real.norm(dim=1), other.norm(dim=1), (real * other).sum(1))
                found[name] = poisson_pair_kl(*norms, s.sample_rate, squared_distance=d2)
            else:  # a shuffled epoch of four steps has the record in one of them
                found[name] = (0.25 if s.sampler == "shuffle" else s.sample_rate) * d2 / 2
        self.now = {name: self.now.get(name, 0) + value for name, value in found.items()}


def trained(runs: int, steps: int, **options: Any) -> tuple[PrivateSGD, ExactSums]:
    x, y = data()
    model = options.pop("model", None) or network()
    sums = ExactSums(x, y, WORLDS)
    # a start that saturates nothing, the same in each run
    start = {name: value.clone() for name, value in model.state_dict().items()}
    chosen: dict[str, Any] = {"worlds": WORLDS, "rules": None, "callbacks": [sums], "lr": 0.5, **options}
    one = learner(model, initialise=lambda m: m.load_state_dict(start), progress=False, **chosen)
    return one.repeat(runs, steps), sums


@pytest.mark.parametrize("clip", ["hard", "smooth"])
@pytest.mark.parametrize("sampler", ["poisson", "fixed", "shuffle"])
def test_every_record_at_every_step_gives_the_exact_sum(sampler: str, clip: str) -> None:
    one, sums = trained(1, 4, sampler=sampler, sample_rate=1.0, budget="every", clip=clip, max_grad_norm=0.7)
    assert one.accountant is not None
    assert one.accountant.divergences.worlds == (("removed",) if sampler == "poisson" else ()) + tuple(WORLDS)
    factor = 4.0 if sampler == "shuffle" else 1.0
    for world in one.accountant.divergences.worlds:
        exact = sums.runs[0][world] * factor
        torch.testing.assert_close(one.accountant.divergence(world), exact, rtol=1e-4, atol=1e-12)
        assert one.accountant.divergences.times(world).tolist() == [4] * RECORDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "budget"),
    [("poisson", 0.5), ("poisson", "every"), ("poisson", ("steps", 0.4)), ("fixed", 0.5), ("shuffle", 0.6)],
)
def test_measurements_are_unbiased(sampler: str, budget: Any) -> None:
    """The mean over runs of estimate minus exact sum is 0 to four standard errors, for every record and world."""
    runs, steps = 50 if isinstance(budget, tuple) else 30, 6  # draws of steps spread more
    one, sums = trained(runs, steps, sampler=sampler, sample_rate=0.25, budget=budget, whole_at=())
    ledger = one.accountant
    assert ledger is not None
    for k, world in enumerate(ledger.divergences.worlds):
        exact = torch.stack([run[world] for run in sums.runs]).mean(0)
        estimate = ledger.divergences.estimates(world)
        score = (estimate.mean - exact) / estimate.error
        assert float(score.abs().max()) < 5, (world, k)
        assert abs(float(score.mean())) < 4 / math.sqrt(RECORDS), world
        assert float((estimate.error / exact).median()) < 0.25  # half the ledger would be noticed


def test_composition_adds_steps_and_averages_runs() -> None:
    one, sums = trained(3, 5, sample_rate=1.0, budget="every")
    assert one.accountant is not None
    exact = torch.stack([run["first"] for run in sums.runs]).mean(0)
    torch.testing.assert_close(one.accountant.divergence("first"), exact, rtol=1e-4, atol=1e-12)
    spread = torch.stack([run["first"] for run in sums.runs]).std(0) / math.sqrt(3)
    torch.testing.assert_close(one.accountant.divergences.estimates("first").error, spread, rtol=1e-4, atol=1e-10)


def test_caps() -> None:
    """D is never above T steps with the largest clipped gradients, and that for a record that was never measured."""
    one, _ = trained(1, 6, sample_rate=0.05, max_grad_norm=1e-3, clip="hard")  # all gradients are clipped
    ledger = one.accountant
    assert ledger is not None
    cap = ledger.divergences.cap("removed")
    assert cap == pytest.approx(6 * poisson_kl(1.0, 0.05), rel=1e-12)
    assert float(ledger.divergence().max()) <= cap
    uncapped = ledger.divergences.estimates("removed")
    assert float(uncapped.mean.max()) > cap  # counting batches: a record drawn twice in six steps
    unseen = uncapped.measured == 0
    assert bool(unseen.any())
    assert bool((ledger.divergence()[unseen] == cap).all())
    opposite = 6 * poisson_pair_kl(1.0, 1.0, -1.0, 0.05)
    assert opposite < ledger.divergences.cap("all") < 3 * opposite


def test_removed_is_kept_without_being_asked_for_and_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("reconbound.training.step.step_distances", lambda *a, **k: calls.append(a))
    one = learner(progress=False).fit(3)
    assert one.accountant is not None
    assert one.accountant.divergences.worlds == ("removed",)
    assert bool((one.accountant.divergence() > 0).any())
    assert not calls
    fixed = learner(sampler="fixed", progress=False).fit(3)
    assert fixed.accountant is not None
    with pytest.raises(ValueError, match=r"cannot be 'removed'.*Poisson batches only, got 'fixed batches'"):
        fixed.accountant.divergence()


class Kinked(nn.Module):
    """Tokens, an embedding that is trained, ReLU and a maximum: nothing of it has a derivative by the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.words(x)).amax(1))


def test_tokens_and_kinks_without_fisher_information() -> None:
    torch.manual_seed(0)
    x, y = torch.randint(1, 6, (RECORDS, 3)), torch.arange(RECORDS) % CLASSES
    settings = Settings(1.0, 1.0, 0.25, clip="hard", rules=None, seed=2**100)
    worlds = {"first token": Replacement(0, [0])}
    one = PrivateSGD(Kinked(), losses, x, y, settings, worlds=worlds, progress=False).fit(8)
    ledger = one.accountant
    assert ledger is not None
    assert bool((ledger.divergence("first token") > 0).any())
    assert not ledger.caveats or not any("kink" in c for c in ledger.caveats)
    for read in (ledger.mse_floor, ledger.dfil, ledger.most_exposed):
        with pytest.raises(ValueError, match="keeps no Fisher information"):
            read()


def test_success_is_the_smaller_of_ledger_and_mechanism() -> None:
    one, _ = trained(2, 6)
    ledger = one.accountant
    assert ledger is not None
    for world in ledger.divergences.worlds:
        bound, best = ledger.max_success(0.1, world), ledger.divergences.towards(world).mechanism_success(0.1)
        nats = ledger.divergence(world).numpy()
        assert bound.value.shape == (RECORDS,)
        np.testing.assert_allclose(bound.value, np.minimum(success_from_kl(0.1, nats), best))
        assert bound.attacker == "any"
        assert bound.estimate
        assert (bound.value >= 0.1).all()
        upper = ledger.max_success(0.1, world, confidence=0.9)
        assert (upper.value >= bound.value).all()
        assert (upper.value <= best).all()
        advantage = ledger.divergences.towards(world).membership().value
        assert (advantage <= membership_from_kl(nats)).all()
        assert "in the other world does so with at most" in str(bound)
        assert "MSE" not in str(bound)
    mean = ledger.divergences.towards("all").mean_success(0.1, groups=[i % 2 for i in range(RECORDS)])
    assert mean.value.shape == (2,)
    even = float(ledger.divergence("all")[::2].mean())
    assert mean.value[0] == pytest.approx(min(success_from_kl(0.1, even), best), rel=1e-9)
    with pytest.raises(AttributeError, match="bounds the chance of an attack"):
        _ = mean.rmse


def test_saving_merging_and_resuming_keep_divergences(tmp_path: Any) -> None:
    options: dict[str, Any] = {"worlds": WORLDS, "rules": ("exact",), "progress": False}
    whole = learner(**options).repeat(2, 5)
    ledger = whole.accountant
    assert ledger is not None
    ledger.save(tmp_path / "ledger")
    again = FisherAccountant.load(tmp_path / "ledger")
    assert again.divergences.worlds == ledger.divergences.worlds
    assert again.divergences.from_batches
    assert all(torch.equal(again.state()[name], value) for name, value in ledger.state().items())
    other = learner(**options, seed=2**90).repeat(3, 5).accountant
    assert other is not None
    both = {world: (2 * ledger.divergences.estimates(world).mean + 3 * other.divergences.estimates(world).mean) / 5
            for world in ledger.divergences.worlds}  # fmt: skip
    ledger.merge(other)
    for world, mean in both.items():
        torch.testing.assert_close(ledger.divergences.estimates(world).mean, mean)
    with pytest.raises(ValueError, match="must be a ledger of the same account, with the same parts"):
        ledger.merge(learner(progress=False).repeat(1, 5).accountant)  # type: ignore[arg-type]


def test_a_stopped_training_has_the_ledger_of_a_whole_one(tmp_path: Any) -> None:
    options: dict[str, Any] = {"worlds": WORLDS, "rules": None, "progress": False}
    whole = learner(**options).fit(9).accountant
    with pytest.raises(KeyboardInterrupt):
        learner(**options, checkpoint=tmp_path, every=2, callbacks=[Stop(5)]).fit(9)
    resumed = learner(**options, checkpoint=tmp_path, every=2).fit(9).accountant
    assert whole is not None
    assert resumed is not None
    assert all(torch.equal(resumed.state()[name], value) for name, value in whole.state().items() if name[0] == "n")
    with pytest.raises(ValueError, match="worlds"):
        learner(**{**options, "worlds": {"all": Replacement(1.0)}}, checkpoint=tmp_path).fit(9)
    (name, *_), others = WORLDS, dict(list(WORLDS.items())[1:])
    with pytest.raises(ValueError, match=r"worlds was .*0\.375"):  # the same name with another value
        learner(**{**options, "worlds": {name: Replacement(0.375), **others}}, checkpoint=tmp_path).fit(9)


def account(**changes: Any) -> Account:
    return Account(**{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "clip": "hard", "records": 3,
                      "features": FEATURES, "steps": 2, **changes})  # fmt: skip


def test_beside_a_loop_of_ones_own() -> None:
    ledger = FisherAccountant(account(rules=None), worlds=["w"])
    half, none = torch.full((2,), 0.5), torch.zeros(2)
    for _ in range(2):
        ledger.add_norms([0, 2], half)
        ledger.add_distances([0, 2], StepDistances(none, half, {"w": none}, {"w": half**2}, 1.0, "hard"))
    ledger.finish_run()
    assert ledger.divergence()[0] == pytest.approx(2 * poisson_kl(0.5, 0.5) / 0.5, rel=1e-9)
    assert ledger.divergence("w")[2] == pytest.approx(2 * poisson_kl(0.5, 0.5) / 0.5, rel=1e-9)  # removed, by its norm
    assert ledger.divergence("w")[1] == ledger.divergences.cap("w")


def distances(**changes: Any) -> StepDistances:
    one = torch.ones(1)
    made: dict[str, Any] = {"loss": one, "clipped_norm": one, "other_norm": {"w": one}, "squared_distance": {"w": one},
                            "max_grad_norm": 1.0, "clip": "hard", **changes}  # fmt: skip
    return StepDistances(**made)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda a: a.add_norms([0], torch.tensor([1.5])),
            "clipped_norm must be norms after clipping, from 0 to 1.0001",
        ),
        (lambda a: a.add_norms([0], torch.tensor([math.nan])), "clipped_norm must be norms after clipping"),
        (lambda a: a.add_norms([0], [0.5]), "clipped_norm must be a tensor of norms"),
        (lambda a: a.add_norms([0, 0], torch.ones(2)), "indices must name each record at most once"),
        (lambda a: a.add_norms([3], torch.ones(1)), "indices must lie between 0 and 2"),
        (lambda a: a.add_norms([0], torch.ones(1), weight=0.1), "weight must be at least the sample rate"),
        (lambda a: a.add_distances([0], distances(squared_distance={})), "found must have the world 'w'"),
        (lambda a: a.add_distances([0], distances(clip="smooth")), "the account's clip, 'hard'"),
        (lambda a: a.add_distances([0], distances(other_norm={"w": 9 * torch.ones(1)})), "norms after clipping"),
        (
            lambda a: a.add_distances([0], distances(squared_distance={"w": torch.tensor([math.nan])})),
            "finite distances to the world 'w'",
        ),
        (lambda a: a.add_distances([0], None), "found must be what step_distances returns"),
        (lambda a: a.divergence("age"), "world must be one of"),
        (lambda a: a.max_success(1.5), "baseline must be at most 1"),
        (lambda a: a.divergences.towards("w").mean(groups=[0]), "groups must be 3 whole numbers"),
        (
            lambda a: FisherAccountant(a.account, worlds=["removed"]),
            "worlds must name each world once, and not 'removed'",
        ),
    ],
)
def test_bad_input_is_refused(use: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(FisherAccountant(account(rules=None), worlds=["w"]))


def test_norms_beside_information_would_count_twice() -> None:
    one = learner(progress=False)
    one.fit(1)
    ledger = FisherAccountant(account(records=RECORDS, clip="smooth", max_grad_norm=1.0))
    found, _ = one.measurer.information(torch.arange(2), torch.Generator().manual_seed(0))
    ledger.account = account(records=RECORDS, clip="smooth")
    ledger.add([0, 1], found)
    assert bool((ledger.divergence()[:2] > 0).all())
    with pytest.raises(ValueError, match="must not be added beside information"):
        ledger.add_norms([2], torch.tensor([0.5]))


def test_reach_is_that_of_the_clip() -> None:
    ledger = FisherAccountant(account(clip="smooth", noise_multiplier=2.0))
    assert ledger.divergences.reach == sensitivity("smooth") / 2


def test_a_record_measured_in_the_run_under_way_only_has_the_cap() -> None:
    ledger, half = FisherAccountant(account(rules=None)), torch.full((1,), 0.5)
    ledger.add_norms([0], half)
    assert "a run in progress" in str(ledger.max_success(0.1))
    ledger.finish_run()
    ledger.add_norms([2], half)
    assert ledger.divergence()[2] == ledger.divergences.cap("removed")
    assert ledger.divergences.times("removed").tolist() == [1, 0, 1]
    assert "a run in progress" not in str(ledger.max_success(0.1))


def test_the_mean_is_not_lowered_by_the_caps_of_single_records() -> None:
    """Every gradient is as large as it can be, so that D of every record is the cap."""
    records, steps, rate = 2000, 50, 0.2
    ledger = FisherAccountant(account(rules=None, records=records, steps=steps, sample_rate=rate))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.nonzero(torch.rand(records, generator=generator) < rate).flatten()
        ledger.add_norms(batch, torch.ones(len(batch)))
    ledger.finish_run()
    cap, error = ledger.divergences.cap("removed"), math.sqrt((1 - rate) / (steps * rate * records))
    found = ledger.divergences.towards()
    for mean in (*found.mean(), *found.mean(groups=[0] * records)):
        assert cap * (1 - 5 * error) < mean <= cap  # capped one by one: 11 % below


@pytest.mark.parametrize("changes", [{"sampler": "fixed"}, {"sampler": "shuffle"}])
def test_norms_are_refused_at_once_where_removed_is_not_kept(changes: Any) -> None:
    ledger = FisherAccountant(account(rules=None, **changes), worlds=["w"])
    with pytest.raises(ValueError, match="cannot be 'removed'"):
        ledger.add_norms([0], torch.full((1,), 0.5))
    ledger.finish_run()


def test_a_run_that_was_measured_in_part_is_named() -> None:
    ledger, batch = FisherAccountant(account(rules=None, steps=400), worlds=["w"]), [0, 1]
    half, none = torch.full((2,), 0.5), torch.zeros(2)
    found = StepDistances(none, half, {"w": none}, {"w": half**2}, 1.0, "hard")
    for step in range(300):
        ledger.add_norms(batch, half)
        if step < 100:
            ledger.add_distances(batch, found)
    with pytest.warns(UserWarning, match=r"not measured over all of its 400 steps: divergences to 'w' are wrong"):
        ledger.finish_run()
    assert "not measured over all" in str(ledger.max_success(0.1, "w"))
    assert "not measured over all" not in str(ledger.max_success(0.1))
    for _ in range(300):
        ledger.add_distances(batch, found)
    again = FisherAccountant(account(rules=None, steps=400), worlds=["w"])
    again.restore(ledger.state(), 1)
    with pytest.warns(UserWarning, match=r"divergences to 'removed' are wrong"):  # a run without it counts as 0
        again.finish_run()
    assert "not measured over all" in str(again.max_success(0.1))


def test_merging_runs_without_measurements_of_a_world_is_named() -> None:
    whole, without = (FisherAccountant(account(rules=None, sample_rate=1.0, steps=1)) for _ in range(2))
    whole.add_norms([0, 1, 2], torch.ones(3))
    for ledger in (whole, without):
        ledger.finish_run()
    assert "not measured over all" not in str(whole.max_success(0.1))
    whole.merge(without)
    assert "not measured over all" in str(whole.max_success(0.1))
