"""Steps at fixed shapes: padded batches give the sums and the ledger of the eager steps; padding adds nothing."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from learning import CLASSES, FEATURES, SameNoise, data, learner, network, same_state
from reconbound.fisher.worlds import Replacement
from reconbound.training import noise, settings, static
from reconbound.training.feed import joined_measurements
from reconbound.training.private_sgd import PrivateSGD, TrainingError
from reconbound.training.sampling import FixedSize, Poisson, ShuffledEpochs, padded_sizes
from reconbound.training.settings import Callback, FiniteChecks
from reconbound.training.static import Rows, StaticWork, differ
from reconbound.training.static_step import StaticStep
from reconbound.training.step import Measured
from reconbound.validate.model import ReconboundWarning

STEPS = 13


def wide(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = data(seed, 60)
    return x.double(), y


def at_fixed_shapes(one: PrivateSGD, sizes: tuple[int, ...] = ()) -> PrivateSGD:
    one.measurer.replay(sizes or padded_sizes(one.sampler))
    return one


def convolutions() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
        return nn.Sequential(*layers).double()


class Own(nn.Module):
    """Uses a parameter outside of layers, so that the generic way is taken."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.weight)


CASES: dict[str, dict[str, Any]] = {
    "default budget": {"budget": 0.15},
    "blocks": {"budget": 2.0},
    "every batch": {"budget": "every"},
    "some steps": {"budget": ("steps", 0.5)},
    "two rules": {"rules": ("exact", "paper")},
    "probes": {"probes": 3},
    "no information": {"rules": None},
    "fixed size": {"sampler": "fixed", "budget": "every"},
    "shuffled": {"sampler": "shuffle"},
    "hard clip": {"clip": "hard", "max_grad_norm": 0.5},
    "micro-batches": {"micro_batch": 4, "budget": "every"},
    "diagonal": {"diagonal": "all"},
    "diagonal of a few": {"diagonal": [1, 5]},
    "spectral": {"spectral": True},
    "two features": {"private": [0, 2]},
    "target": {"private": "target"},
    "worlds": {"worlds": {"blank": Replacement(0.0), "one": Replacement([1.0], [2])}, "budget": 1.0},
    "worlds of batches": {"worlds": {"blank": Replacement(0.0)}, "budget": "every"},
    "Adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.05)},
    "schedule": {"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 3), "momentum": 0.5},
    "convolutions": {"model": convolutions},
    "generic": {"model": lambda: Own().double()},
}


def trained(case: str, fixed: bool, **changes: Any) -> PrivateSGD:
    options = {**CASES[case], **changes}
    if case == "target":
        soft = torch.nn.functional.one_hot(wide()[1], CLASSES).double()
        options["records"] = (wide()[0], soft)
    options.setdefault("records", wide())
    model = options.pop("model", lambda: network().double())()
    one = learner(model, kind=SameNoise, **options)
    return (at_fixed_shapes(one) if fixed else one).fit(STEPS)


@pytest.mark.parametrize("case", CASES)
def test_padded_steps_give_the_eager_parameters_and_ledger(case: str) -> None:
    eager, fixed = trained(case, False), trained(case, True)
    for p, q in zip(eager.model.parameters(), fixed.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    assert fixed.measurer.static is not None
    works = (fixed.measurer.static._sums, fixed.measurer.static._informed, fixed.measurer.static._apart)
    assert not any(work.eager for work in works if work is not None)
    ran = [work._calls for work in works if work is not None]
    assert sum(ran) > 0, "nothing was computed at fixed shapes"
    if eager.accountant is None:
        assert fixed.accountant is None
        return
    assert fixed.accountant is not None
    pairs = zip(eager.accountant.state().items(), fixed.accountant.state().items(), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other
        if name == "fingerprints":
            continue
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-9 if a.dtype == torch.float64 else 1e-5, atol=1e-300)
        else:
            assert torch.equal(a, b), name  # counts of measurements: padding is none


def test_padding_adds_exactly_nothing() -> None:
    """The same records with other padding, other data outside the batch, and a record elsewhere that is not finite."""
    records, found = torch.tensor([3, 7, 8]), []
    for fill in (0.0, 5.0, math.nan):
        x, y = wide()
        others = torch.ones(len(x), dtype=torch.bool)
        others[records] = False
        x[others] = x[others] * 0 + fill if fill else x[others]
        one = at_fixed_shapes(learner(network().double(), records=(x, y)), (8,))
        sums, norms = one.measurer.gradient_sum(records)
        found.append((sums, norms))
        assert norms.shape == (3,)
    for total, norms in found[1:]:
        assert torch.equal(total, found[0][0])
        assert torch.equal(norms, found[0][1])


def test_rows_repeat_the_first_record_under_a_mask() -> None:
    x, y = wide()
    rows = Rows(({"a": x, "b": (y, None)}, y), 5, torch.device("cpu"))
    for records in ([4, 9], [11, 0, 2, 59, 7], [1]):
        rows.fill(torch.tensor(records))
        padded = records + [records[0]] * (5 - len(records))
        assert rows.index.tolist() == padded
        assert rows.mask.tolist() == [1.0] * len(records) + [0.0] * (5 - len(records))
        assert torch.equal(rows.inputs["a"], x[padded])
        assert torch.equal(rows.inputs["b"][0], y[padded])
        assert rows.inputs["b"][1] is None
        assert torch.equal(rows.targets, y[padded])


@pytest.mark.parametrize(("records", "rate"), [(60_000, 0.01), (5_000, 0.04), (100, 0.1), (1_000_000, 1e-5), (50, 1.0)])
def test_a_poisson_batch_exceeds_the_largest_size_with_a_chance_below_a_billionth(records: int, rate: float) -> None:
    sizes = padded_sizes(Poisson(records, rate))
    assert list(sizes) == sorted(set(sizes))
    assert stats.binom.sf(sizes[-1], records, rate) < 1e-9
    assert sizes[-1] <= records or rate < 1
    assert sizes[-1] < records * rate + 8 * math.sqrt(records * rate) + 24  # and it is no waste
    assert padded_sizes(FixedSize(10, 3)) == padded_sizes(ShuffledEpochs(10, 3)) == (3,)


def test_a_batch_beyond_the_largest_size_is_computed_eagerly() -> None:
    eager = trained("every batch", False)
    one = learner(network().double(), kind=SameNoise, records=wide(), budget="every")
    fixed = at_fixed_shapes(one, (8, 16)).fit(STEPS)
    sizes = [len(fixed.sampler.batch(fixed.run_seed, step)) for step in range(STEPS)]
    assert min(sizes) <= 16 < max(sizes)
    assert fixed.measurer.static is not None
    assert fixed.measurer.static._informed is not None
    assert fixed.measurer.static._informed._calls == sum(0 < size <= 16 for size in sizes)
    assert eager.accountant is not None
    assert fixed.accountant is not None
    torch.testing.assert_close(fixed.accountant.dfil(), eager.accountant.dfil(), rtol=1e-9, atol=0)


def test_a_stopped_run_at_fixed_shapes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(model: nn.Module) -> dict[str, float]:
        raise Stop

    def made(folder: str, **options: Any) -> PrivateSGD:
        return at_fixed_shapes(learner(records=data(0, 60), checkpoint=tmp_path / folder, every=4, **options))

    whole = made("a").fit(STEPS)
    with pytest.raises(Stop):
        made("b", evaluate=stop, evaluate_every=7).fit(STEPS)
    resumed = made("b").fit(STEPS)
    assert same_state(whole, resumed)


class Counting(nn.Module):
    """Multiplies its outputs by a number that Python changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = network().double(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.factor
        return out


def frozen(work: StaticWork) -> None:
    """Makes a work return what it computed first for each size and records, as a graph would with frozen Python."""
    own, kept = work.function, {}

    def function(rows: Rows) -> dict[str, Tensor]:
        model = work.model
        assert isinstance(model, Counting)
        if rows.size not in work.sizes:
            return own(rows)
        now, model.factor = model.factor, kept.setdefault("factor", model.factor)
        found = own(rows)
        model.factor = now
        return found

    work.function = function


def test_what_a_graph_cannot_follow_is_noticed_and_computed_eagerly() -> None:
    model = Counting()
    one = at_fixed_shapes(learner(model, records=wide(), rules=None), (16,))
    work = one.measurer.static._sums  # type: ignore[union-attr]
    frozen(work)
    records = torch.arange(11)
    for call in range(1, 9):
        model.factor = 1.0 if call < 6 else 2.0
        before = work._calls
        if call == 8:
            with pytest.warns(ReconboundWarning, match="a CUDA graph cannot follow: it is computed eagerly"):
                _, norms = one.measurer.gradient_sum(records)
        else:
            _, norms = one.measurer.gradient_sum(records)
        assert work._calls == before + 1
    assert work.eager
    eager = learner(model, records=wide(), rules=None)
    assert torch.equal(norms, eager.measurer.gradient_sum(records)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.measurer.gradient_sum(records)  # says it once


def test_work_that_cannot_be_captured_is_computed_eagerly_and_says_so_once(monkeypatch) -> None:
    one = at_fixed_shapes(learner(network().double(), records=wide(), rules=None))
    work = one.measurer.static._sums  # type: ignore[union-attr]

    def fails(function: Any, device: Any, pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(static, "capture", fails)
    work.graphs = True
    records = torch.arange(9)
    with pytest.warns(ReconboundWarning, match="not permitted when stream is capturing"):
        sums, _ = one.measurer.gradient_sum(records)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = one.measurer.gradient_sum(records)
    expected, _ = learner(network().double(), records=wide(), rules=None).measurer.gradient_sum(records)
    assert torch.equal(sums, expected)
    assert torch.equal(again, expected)


class Replaying:
    """Stands in for a CUDA graph: a replay writes into the tensors of the capture, which nothing else may rely on."""

    replays = 0

    def __init__(self, function: Any) -> None:
        self.function, self.found = function, {k: v.clone() for k, v in function().items()}
        self.spoil()

    def spoil(self) -> None:
        for value in self.found.values():
            value.fill_(0 if value.dtype == torch.bool else torch.nan)

    def replay(self) -> None:
        Replaying.replays += 1
        everywhere = [graph for graph in Replaying.made if graph is not self]
        for graph in everywhere:  # they share memory
            graph.spoil()
        for name, value in self.function().items():
            self.found[name].copy_(value)

    made: list[Replaying] = []  # noqa: RUF012


def stand_in(function: Any, device: Any, pool: Any = None) -> tuple[Any, dict[str, Tensor]]:
    for _ in range(2):
        function()
    graph = Replaying(function)
    Replaying.made.append(graph)
    return graph, graph.found


@pytest.mark.parametrize("case", ["default budget", "every batch", "worlds", "diagonal", "micro-batches", "probes"])
def test_replays_into_shared_memory_give_the_eager_parameters_and_ledger(case: str, monkeypatch) -> None:
    monkeypatch.setattr(static, "capture", stand_in)
    monkeypatch.setattr(Replaying, "made", [])
    monkeypatch.setattr(Replaying, "replays", 0)
    eager = trained(case, False)
    one = at_fixed_shapes(learner(network().double(), kind=SameNoise, **{"records": wide(), **CASES[case]}))
    assert one.measurer.static is not None
    for work in (one.measurer.static._sums, one.measurer.static._informed, one.measurer.static._apart):
        if work is not None:
            work.graphs = True
    one.measurer.checks = FiniteChecks(5)
    one.fit(STEPS)
    assert Replaying.replays >= STEPS - 1
    for p, q in zip(eager.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    assert eager.accountant is not None
    assert one.accountant is not None
    torch.testing.assert_close(one.accountant.dfil(), eager.accountant.dfil(), rtol=1e-9, atol=0)
    for world in eager.accountant.divergences.worlds:
        own, other = (each.divergences.mean("nats") for each in (one.accountant, eager.accountant))
        torch.testing.assert_close(own, other, rtol=1e-9, atol=0, msg=world)


@pytest.mark.parametrize("case", ["default budget", "every batch", "some steps", "worlds"])
def test_a_ledger_that_is_fed_some_steps_later_is_the_same(case: str) -> None:
    options: dict[str, Any] = {"records": wide(), **CASES[case]}
    at_once, later, watched = (learner(network().double(), kind=SameNoise, **options) for _ in range(3))
    looks: list[float] = []

    class Look(Callback):
        def on_step(self, one: PrivateSGD) -> None:
            looks.append(float(one.accountant.state()["trace"].sum()))  # type: ignore[union-attr]

    later.measurer.static = watched.measurer.static = StaticStep(later.measurer, ())  # without sizes: eager steps
    watched.callbacks = (Look(),)
    fed = [one.fit(STEPS).accountant for one in (at_once, later, watched)]
    assert fed[0] is not None
    assert (at_once._feed.steps, later._feed.steps) == (1, 32)  # type: ignore[union-attr]
    for name, value in fed[0].state().items():
        for other in fed[1:] if name != "fingerprints" else ():  # SameNoise gives runs none
            assert other is not None
            torch.testing.assert_close(other.state()[name], value, rtol=1e-12, atol=1e-15, msg=name)
    assert looks[:-1] == sorted(looks[:-1])  # the last is an empty run
    assert looks[STEPS // 2] > 0  # who looks sees what was measured until then


def test_only_measurements_of_distinct_records_in_blocks_are_joined() -> None:
    one = learner(network().double(), records=wide())
    groups = [torch.tensor(own) for own in ([0, 1], [2, 5, 3], [1, 4], [6])]
    found = [one.measurer.information(own, torch.Generator().manual_seed(1))[0] for own in groups]
    parts = [Measured(own, each, 2.0, True) for own, each in zip(groups, found, strict=True)]
    (joined,) = joined_measurements(parts[:2])
    assert joined.records.tolist() == [0, 1, 2, 5, 3]
    assert torch.equal(joined.found.across, torch.cat([found[0].across, found[1].across]))
    assert joined.how == parts[0].how
    assert joined_measurements(parts) == parts  # record 1 is there twice: of two blocks
    apart = [*parts[:2], parts[2]._replace(weight=3.0), parts[3]._replace(weight=3.0, stratified=False)]
    assert [one.records.tolist() for one in joined_measurements(apart)] == [[0, 1, 2, 5, 3], [1, 4], [6]]
    drawn = [part._replace(stratified=False) for part in parts]
    assert joined_measurements(drawn)[0].records.tolist() == [0, 1, 2, 5, 3, 1, 4, 6]


def releasing(case: str, monkeypatch: pytest.MonkeyPatch, kind: type[noise.Release] = noise.Release) -> list[Any]:
    """Trains by graphs that release; returns of each step the run's seed, the step, the sum and what is released."""
    monkeypatch.setattr(static, "capture", stand_in)
    monkeypatch.setattr(Replaying, "made", [])
    monkeypatch.setattr(noise, "draw_for", noise.draw_without_waiting)  # as on a GPU
    one = learner(network().double(), **{"records": wide(), **CASES[case]})
    one.measurer.replay(padded_sizes(one.sampler), kind(one.settings.noise, one.sampler.divisor, torch.float64))
    assert one.measurer.static is not None
    for work in (one.measurer.static._sums, one.measurer.static._informed):
        if work is not None:
            work.graphs = True
    compute, set_gradients, found = one._compute, settings.set_gradients, list[Any]()

    def computed(shard: Any) -> Any:
        work = compute(shard)
        found.append([one.run_seed, one.step, work.total.clone(), None, work.released is not None])
        return work

    def taken(params: Any, flat: torch.Tensor) -> None:
        found[-1][3] = flat.clone()
        set_gradients(params, flat)

    with monkeypatch.context() as patch:
        patch.setattr(one, "_compute", computed)
        patch.setattr(settings, "set_gradients", taken)
        one.fit(STEPS)
    for run_seed, step, total, flat, _ in found:
        noisy = total + one.settings.noise * noise.draw_without_waiting(total, run_seed, step)
        assert torch.equal(flat, noisy / one.sampler.divisor), step
    return found


@pytest.mark.parametrize("case", ["no information", "default budget", "every batch", "micro-batches"])
def test_what_a_graph_releases_is_its_sum_with_the_noise_of_the_step(case: str, monkeypatch) -> None:
    found = releasing(case, monkeypatch)
    assert sum(in_graph for *_, in_graph in found) >= STEPS - 1  # the keys need the kind of the sum, which one shows
    noises = [flat for *_, flat, _ in found]
    assert len({tuple(flat.tolist()) for flat in noises}) == STEPS


def test_a_graph_that_does_not_follow_the_keys_is_found_and_left(monkeypatch) -> None:
    class Frozen(noise.Release):
        def __call__(self, total: Tensor, words: Tensor) -> Tensor:
            in_rows = words.untyped_storage().nbytes() > 64
            return super().__call__(total, torch.zeros_like(words) if in_rows else words)

    with pytest.warns(UserWarning, match="does not give the cipher's noise"):
        found = releasing("no information", monkeypatch, Frozen)
    assert not any(in_graph for *_, in_graph in found)


def test_a_model_that_moves_in_memory_is_computed_where_it_is() -> None:
    one = at_fixed_shapes(learner(network().double(), records=wide(), rules=None))
    work, records = one.measurer.static._sums, torch.arange(9)  # type: ignore[union-attr]
    for call in range(5):
        for p in one.model.parameters():
            p.data = p.data * 1.1  # elsewhere
        sums, _ = one.measurer.gradient_sum(records)
        assert work._moves == call
    own, _ = learner(one.model, records=wide(), rules=None).measurer.gradient_sum(records)
    torch.testing.assert_close(sums, own, rtol=1e-12, atol=1e-14)
    one.model.eval()
    with pytest.warns(ReconboundWarning, match="replaced again and again"):
        one.measurer.gradient_sum(records)


def test_data_on_another_device_follow_changes_and_stay_where_they_do_not_fit(monkeypatch) -> None:
    """The device "meta" stands in for a GPU: it holds shapes only."""
    x, y = wide()
    other, room = torch.device("meta"), 4 * (60 * FEATURES * 8 + 60 * 8)
    monkeypatch.setattr(static, "free_memory", lambda device: room - 1)
    assert static.Near((x, y), other).data[0] is x
    monkeypatch.setattr(static, "free_memory", lambda device: room)
    near, copied = static.Near((x, y), other), []
    assert near.data[0].device == near.data[1].device == other
    own = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, new, *rest: copied.append(new) or own(self, new, *rest))
    near.refresh()
    assert not copied
    x[3] = 1.0
    near.refresh()
    near.refresh()
    assert len(copied) == 2
    assert static.Near((x, y), torch.device("cpu")).data[0] is x


def test_differences_beyond_rounding_are_found() -> None:
    own = {"norm": torch.rand(100) + 0.5, "total": torch.randn(40)}
    assert not differ(own, {k: v * 1.001 for k, v in own.items()})
    assert differ({**own, "norm": own["norm"] * 1.5}, own)
    assert differ({**own, "total": own["total"] * 1.5}, own)
    few = own["norm"].clone()
    few[:3] *= 4  # clipped further, as a graph does
    assert not differ({**own, "norm": few}, own)


def with_nan() -> tuple[Tensor, Tensor]:
    x, y = wide()
    x[17, 2] = math.nan
    return x, y


@pytest.mark.parametrize("steps", [0, 3, 100])
def test_a_fault_that_is_found_later_names_its_step_and_record(steps: int) -> None:
    """As on a GPU, whose results are looked at some steps later, or at the end; on a CPU at once."""

    def made() -> PrivateSGD:
        one = at_fixed_shapes(learner(network().double(), records=with_nan(), rules=None))
        one.measurer.checks = FiniteChecks(steps)
        return one

    one = made()
    with pytest.raises(TrainingError, match="record 17 has loss nan") as caught:
        one.fit(STEPS)
    drawn = [17 in one.sampler.batch(one.run_seed, step) for step in range(STEPS)]
    first = drawn.index(True)
    assert first > 0
    assert f"run 0, step {first}:" in str(caught.value)
    assert first <= one.step <= min(first + steps, STEPS)
    if one.step > first:
        with pytest.raises(TrainingError, match="interrupted in the middle of a step"):
            one.fit(STEPS)


def test_no_checkpoint_is_written_after_a_fault(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"checkpoint": tmp_path, "every": 1, "records": with_nan(), "rules": None}
    one = at_fixed_shapes(learner(network().double(), **chosen))
    one.measurer.checks = FiniteChecks(100)
    with pytest.raises(TrainingError, match="record 17"):
        one.fit(STEPS)
    again = learner(network().double(), **chosen)
    with pytest.raises(TrainingError):
        again.fit(STEPS)  # it goes on from the last good state, and ends at the same record
    first = [17 in again.sampler.batch(again.run_seed, step) for step in range(STEPS)].index(True)
    assert again.step == first
    assert all(bool(np.isfinite(p.detach().numpy()).all()) for p in again.model.parameters())
