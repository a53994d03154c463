"""The audit: what its folder holds, what its numbers are, who may read them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import auditing
from reconbound._internal import files as _files
from reconbound._internal.checks import InputError
from reconbound._internal.rng import derive, numbers_of
from reconbound.auditing import leakage as audit_leakage
from reconbound.auditing.leakage import chosen, leakage_of
from reconbound.auditing.models import score
from reconbound.auditing.options import make_learner, open_folder, settle
from reconbound.auditing.release import INPUTS
from reconbound.auditing.run import facts_of, run_audit, train
from reconbound.report.folder import (
    LEAKAGE,
    MODEL,
    PLAN,
    PUBLIC_REPORT,
    REPORT,
    RUN,
    floors,
    read_leakage,
    read_run,
    record_names,
)
from reconbound.report.text import columns_scope
from reconbound.report.view import View

pytestmark = pytest.mark.slow


def test_only_public_files_are_world_readable(audited) -> None:
    public = {RUN, MODEL, PUBLIC_REPORT}
    assert auditing.mode(audited) == 0o700
    for path in audited.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o644 if path.name in public else 0o600
        assert auditing.mode(path) == expected, path
    assert {p.name for p in audited.iterdir()} == {*public, LEAKAGE, REPORT, PLAN, INPUTS, "checkpoints", "lock"}


def test_the_ledger_is_in_the_leakage_file(audited, tmp_path) -> None:
    """The same options by hand: PrivateSGD's own ledger."""
    people, options = auditing.people(), auditing.options(runs=3)
    ledger = make_learner(people, options).repeat(options.runs, options.steps).accountant
    found = read_leakage(audited)
    for k, rule in enumerate(("exact", "paper")):
        torch.testing.assert_close(found.dfil[k], ledger.dfil(rule), rtol=0, atol=0)
        torch.testing.assert_close(found.error[k], ledger.standard_error(rule), rtol=0, atol=0)
        torch.testing.assert_close(found.upper[k], ledger.upper(rule), rtol=0, atol=0)
    assert found.facts["rules"] == ["exact", "paper"]
    assert torch.equal(found.measured, ledger.measured())
    for rule in (None, "exact", "paper"):
        torch.testing.assert_close(floors(found, rule), 1 / ledger.dfil(rule))
    assert bool((floors(found, "paper") != floors(found)).all())
    unseen = replace(found, measured=found.measured.clone().index_fill_(0, torch.tensor([3]), 0))
    assert floors(unseen).eq(0).nonzero().flatten().tolist() == [3]
    with pytest.raises(InputError, match="rule must be one of exact, paper"):
        floors(found, "fixed")
    order = torch.argsort(ledger.dfil(), descending=True)
    assert found.kept.tolist() == [*order[:12].tolist(), *order[-6:].tolist()]
    assert found.facts["most"] == 12
    assert record_names(found.names) == [f"row {i}" for i in range(40)]
    torch.testing.assert_close(found.kept_inputs, torch.from_numpy(people.inputs)[found.kept])
    np.testing.assert_allclose(found.guess, people.inputs[:, :2].var(axis=0), rtol=1e-5)
    assert found.facts["scale"] == [120.0, 1e5]
    assert found.facts["private"] == [0, 1]
    assert found.facts["inferred_ranges"]


def test_the_first_run_is_the_release(audited) -> None:
    people, options = auditing.people(), auditing.options(runs=3)
    single = make_learner(people, options).repeat(1, options.steps)
    released = load_file(audited / MODEL)
    assert released.keys() == single.model.state_dict().keys()
    for name, value in single.model.state_dict().items():
        assert torch.equal(released[name], value)
    found = read_leakage(audited)
    assert found.accuracy_step.tolist() == list(range(1, 13))
    assert found.accuracy[-1] == pytest.approx(score(people, single.model))
    assert found.history_step[-1] == 12
    assert found.history[-1, 0] == pytest.approx(float(single.accountant.dfil().max()))
    assert found.history[-1, 2] == pytest.approx(float(single.accountant.dfil().median()))
    assert bool((found.history[1:] >= found.history[:-1] - 1e-12).all())


@pytest.mark.parametrize(("steps", "snapshots"), [(4, 12), (7, 3)])
def test_diagonals_from_snapshots_are_those_of_their_steps(tmp_path, monkeypatch, steps: int, snapshots: int) -> None:
    """Compared with exact Jacobians at each; with as many snapshots as steps they are the whole run's."""
    monkeypatch.setattr(audit_leakage, "SNAPSHOTS", snapshots)
    people, options, probes = auditing.people(), auditing.options(runs=2, steps=steps), 300
    measured = train(people, settle(open_folder(tmp_path / "a"), people, options), tmp_path / "a")
    records, taken = torch.tensor([3, 17]), min(steps, snapshots)
    found = measured.look(records, 2, probes=probes, each=True)
    expected = sum(run_diagonal(measured, people, run, records) for run in range(2)) / 2
    error = (
        5 * (2 / probes / (2 * taken)) ** 0.5
    )  # so many measurements, each entry's relative spread at most √(2/probes)
    torch.testing.assert_close(found.state()["diagonal_mean"].double(), expected, rtol=error, atol=0)
    torch.testing.assert_close(found.dfil(), found.state()["diagonal_mean"].double().mean(1), rtol=1e-5, atol=0)
    average = measured.look(records, 2, probes=probes, each=False).state()["average_mean"][0]
    torch.testing.assert_close(average, found.state()["diagonal_mean"].double().mean(0), rtol=1e-5, atol=0)


def test_snapshots_fall_anywhere_in_their_blocks() -> None:
    """Uniformly, in each run anew: with the weight L q the expected sum is that over all steps."""
    steps, runs = 29, 2000
    taken, weight = np.zeros(steps), np.zeros(steps)
    for run in range(runs):
        found = audit_leakage.snapshot_steps(SimpleNamespace(steps=steps, seed=5), run)  # type: ignore[arg-type]
        assert len(found) == audit_leakage.SNAPSHOTS == 12
        for t, length in found:
            taken[t] += 1
            weight[t] += length
    spread = np.sqrt(2.0 / runs)  # of L times a draw of chance 1/L: √(L − 1), L ≤ 3
    assert np.abs(weight / runs - 1).max() < 4.5 * spread
    assert taken.sum() == 12 * runs


@pytest.mark.parametrize(("steps", "looks"), [(12, 12), (14, 5), (12, 2), (3, 12)])
def test_diagonals_match_drawn_snapshots(tmp_path, steps: int, looks: int) -> None:
    """Compared with exact Jacobians at the snapshots at which a record was measured, times the blocks of the part."""
    people, options, probes = auditing.people(), auditing.options(runs=2, steps=steps), 200
    measured = train(people, settle(open_folder(tmp_path / "a"), people, options), tmp_path / "a")
    ledger = measured.look(None, 2, looks=looks, probes=probes)
    found, times = ledger.state()["diagonal_mean"].double(), min(looks, steps)
    assert ledger.measured().tolist() == [2 * times] * 40  # once in each part of each run
    records = torch.tensor([3, 17, 39])
    expected = (
        sum(run_diagonal(measured, people, run, records, drawn(measured.learner, run, looks)) for run in range(2)) / 2
    )
    error = 5 * (2 / probes / (2 * times)) ** 0.5 * (1 if looks == 12 else 1.6)  # unequal weights
    torch.testing.assert_close(found[records], expected, rtol=error, atol=0)


def drawn(learner, run: int, looks: int) -> torch.Tensor:
    """Blocks of the part over 1 where a record is measured at a snapshot, else 0, (snapshots, N)."""
    blocks = audit_leakage.snapshot_steps(learner, run)
    chances = np.zeros((len(blocks), learner.records))
    count = min(looks, len(blocks))
    ends = [k * len(blocks) // count for k in range(count + 1)]
    for k, (a, b) in enumerate(pairwise(ends)):
        at = numbers_of(derive(learner.seed, "run", run), "look", k).integers(0, b - a, learner.records)
        chances[a + at, np.arange(learner.records)] = b - a
    return torch.from_numpy(chances)


def test_snapshot_choice_is_uniform_over_each_part() -> None:
    """So that the expected weight of each block is 1: unbiased whatever the number of looks."""
    runs, total = 400, 0.0
    learner = SimpleNamespace(steps=36, seed=5, records=50)
    for run in range(runs):
        total = total + drawn(learner, run, 5)
    twelve = audit_leakage.SnapshotMeasurements(SimpleNamespace(steps=12, seed=5), None)  # type: ignore[arg-type]
    planned = list(twelve._planned_measurements(0, 5, 50))
    assert [step for step, _, _ in planned] == list(range(12))
    assert [weight for _, weight, _ in planned] == [2, 2, 2, 2, 3, 3, 3, 2, 2, 3, 3, 3]  # (0, 1), (2, 3), (4, 5, 6) …
    spread = np.sqrt(2.0 / (50 * runs))  # of m times a draw of chance 1/m: √(m − 1), m ≤ 3
    assert float((total.mean(1) / runs - 1).abs().max()) < 4 * spread


def test_large_tables_are_sampled(tmp_path, monkeypatch) -> None:
    people, options, folder = auditing.people(), auditing.options(runs=2), tmp_path / "a"
    measured = train(people, settle(open_folder(folder), people, options), folder)
    whole = leakage_of(people, settle(folder, people, options), measured)
    assert whole.diagonal_of is None
    assert whole.diagonal.shape == (40, 2)
    assert whole.facts["diagonal_measured"] == 24
    torch.testing.assert_close(whole.average_diagonal, whole.diagonal.double().mean(0))
    for diagonal, of in ((whole.diagonal, torch.arange(40)), (whole.kept_diagonal, whole.kept)):  # the ledger's level
        torch.testing.assert_close(diagonal.double().mean(1), whole.dfil[0, of], rtol=1e-6, atol=0)
    monkeypatch.setattr(audit_leakage, "NUMBERS", 79)
    monkeypatch.setattr(audit_leakage, "SAMPLE", 15)
    some = leakage_of(people, settle(folder, people, options), measured)
    assert some.diagonal.shape == (15, 2)
    assert some.diagonal_of.unique().tolist() == some.diagonal_of.tolist()
    again = measured.look(some.diagonal_of, 2, probes=1, each=True).state()["diagonal_mean"]
    shares = again.double() / again.double().sum(1, keepdim=True)
    torch.testing.assert_close(some.diagonal.double(), 2 * some.dfil[0, some.diagonal_of, None] * shares)
    torch.testing.assert_close(some.average_diagonal, some.diagonal.double().mean(0))
    view = View(facts_of(people, options, measured.learner, seed_from="x"), some)
    both = set(some.diagonal_of.tolist()) | set(some.kept.tolist())
    assert columns_scope(view) == f"{len(both)} of 40 records: 15 drawn at random, and those kept whole"
    assert view.columns[0]["of"] == len(both)
    assert view.feature_floors(int(some.diagonal_of[0])) is not None
    assert any(view.feature_floors(i) is None for i in range(40))
    few = View(view.run, replace(some, diagonal=None, diagonal_of=None))
    assert columns_scope(few) == "only the 18 records measured closely (the most and the least exposed) of 40"
    pictures = auditing.pictures()
    monkeypatch.setattr(audit_leakage, "SAMPLE", 10)
    found = read_leakage(run_audit(pictures, options, tmp_path / "b", show=False))
    assert found.diagonal is None
    assert found.average_diagonal.shape == (36,)
    drawn = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:10]
    assert bool((found.measured[drawn] > 0).all())
    assert float(found.average_diagonal.mean()) == pytest.approx(float(found.dfil[0, drawn].mean()))


def test_unmeasured_records_keep_diagonals_and_zeros_are_shared_evenly() -> None:
    trace = torch.tensor([6.0, 0.0, 4.0, 8.0], dtype=torch.float64)
    ledger = SimpleNamespace(
        traces=SimpleNamespace(trace_mean=lambda k, at: trace[at]),
        measured=lambda: torch.tensor([3, 0, 1, 2]),
        device=torch.device("cpu"),
    )
    own = torch.tensor([[1.0, 2.0], [5.0, 1.0], [0.0, 0.0]])
    found = audit_leakage.scale_to_ledger(own, ledger, torch.tensor([0, 1, 2]))  # type: ignore[arg-type]
    assert found.tolist() == [[2.0, 4.0], [5.0, 1.0], [2.0, 2.0]]
    one = audit_leakage.scale_to_ledger(torch.tensor([[0.3]]), ledger, torch.tensor([3]))  # type: ignore[arg-type]
    assert one.tolist() == [[8.0]]  # exactly


def test_rescaled_diagonals_are_nearer_to_all_steps(tmp_path, monkeypatch) -> None:
    """Against exact Jacobians at every step of the same runs: floors are off by less than at the snapshots' level."""
    people, options, records = auditing.people(), auditing.options(runs=2, steps=24, budget=4.0), torch.arange(0, 40, 4)
    monkeypatch.setattr(audit_leakage, "SNAPSHOTS", 24)
    dense = train(people, settle(open_folder(tmp_path / "a"), people, options), tmp_path / "a")
    true = sum(run_diagonal(dense, people, run, records) for run in range(2)) / 2
    monkeypatch.setattr(audit_leakage, "SNAPSHOTS", 12)
    measured = train(people, settle(open_folder(tmp_path / "b"), people, options), tmp_path / "b")
    assert torch.equal(measured.learner.accountant.trace(), dense.learner.accountant.trace())  # the same runs
    for looks in (12, 4, 2):
        plain = measured.look(None, 2, looks=looks, probes=1).state()["diagonal_mean"][records]
        level = audit_leakage.scale_to_ledger(plain, measured.learner.accountant, records)
        off, now = ((true / found).sqrt() - 1 for found in (plain.double(), level))
        assert float(now.square().mean()) < float(off.square().mean())


def unsealed_snapshot(measured, run: int, step: int) -> dict[str, torch.Tensor]:
    return _files.unsealed(measured.snapshots.folder / audit_leakage.SNAPSHOT.format(run=run, step=step))[0]


def run_diagonal(measured, people, run: int, records: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
    """Σ L q diag(J̃ᵀ [k⊥(I − ĝĝᵀ) + k∥ĝĝᵀ] J̃)/(σC)² with dense Jacobians, over a run's blocks of L steps, (k, 2).

    times: by which each snapshot's share of each record's sum is multiplied, (snapshots, N)."""
    from reconbound.accounting.amplification import PoissonTable

    learner = measured.learner
    s = learner.settings
    steps = audit_leakage.snapshot_steps(learner, run)
    starts = [0, *accumulate(length for _, length in steps)]  # blocks without a gap, one snapshot in each
    assert starts[-1] == learner.steps
    assert all(a <= t < b for (t, _), (a, b) in zip(steps, pairwise(starts), strict=True))
    noise = s.noise_multiplier * s.max_grad_norm
    table = PoissonTable(s.sample_rate).prepare(torch.device("cpu"), torch.float64)
    total = torch.zeros(len(records), 2, dtype=torch.float64)
    for k, (t, length) in enumerate(steps):
        parameters = {n: v.double() for n, v in unsealed_snapshot(measured, run, t).items()}
        for row, i in enumerate(records.tolist()):
            x, y = torch.from_numpy(people.inputs[i]).double(), torch.from_numpy(people.targets)[i : i + 1]
            flat, jacobian = clipped_jacobian(learner, parameters, x, y)
            unit = flat / flat.norm()
            k_across, k_along = (float(k) for k in table(flat.norm()[None] / noise))
            along = unit @ jacobian
            squares = k_across * (jacobian.square().sum(0) - along.square()) + k_along * along.square()
            share = 1.0 if times is None else float(times[k, i])
            total[row] += share * length * s.sample_rate * squares[:2] / noise**2
    return total


def clipped_jacobian(learner, parameters, x, y):
    from torch.func import functional_call, grad, jacrev

    model = copy.deepcopy(learner.model).double()

    def clipped(z):
        def loss(p):
            return learner.loss_fn(functional_call(model, p, (z[None],)), y)[0]

        g = torch.cat([v.flatten() for v in grad(loss)(parameters).values()])
        return g / (nn.functional.gelu(g.norm() / learner.settings.max_grad_norm - 1) + 1)

    return clipped(x), jacrev(clipped)(x)


def test_public_files_hold_no_number_of_a_record(audited) -> None:
    text = (audited / RUN).read_text()
    found = read_leakage(audited)
    values = [found.dfil, found.error, found.upper, found.kept_diagonal, found.average_diagonal, floors(found),
              floors(found).sqrt(), found.history, found.guess, found.guess.sqrt(), found.kept_inputs]  # fmt: skip
    for value in values:
        for x in value.flatten().tolist():
            assert x in (0.0, 1.0, float("inf")) or f"{x:.5g}" not in text
    text += (audited / PUBLIC_REPORT).read_text()
    assert "row " not in text
    assert "sex = f" not in text  # the column's name alone
    assert "100000" not in text  # a range that was read off the data
    assert "100,000" not in text
    run = json.loads((audited / RUN).read_text())
    assert run["data"]["ranges"] == {"age": [0.0, 120.0]}
    assert run["accuracy"] is None
    assert "seed" not in run["mechanism"] | run["training"]


def test_public_files_are_the_same_for_other_people(audited, tmp_path) -> None:
    """Nothing in them depends on a record: other records give the same bytes."""
    others = run_audit(auditing.people(seed=8), auditing.options(runs=3), tmp_path / "a", show=False)
    for name in (RUN, PUBLIC_REPORT):
        assert (others / name).read_bytes() == (audited / name).read_bytes(), name
    assert (others / REPORT).read_bytes() != (audited / REPORT).read_bytes()


def test_accuracy_is_published_only_on_request(tmp_path) -> None:
    people, options = auditing.people(), auditing.options(runs=1)
    folder = run_audit(people, options, tmp_path / "a", show=False, publish_accuracy=True)
    assert read_run(folder).accuracy == pytest.approx(float(read_leakage(folder).accuracy[-1]))
    assert read_leakage(folder).upper is None
    run_audit(people, options, folder, show=False)
    assert read_run(folder).accuracy is None


@pytest.mark.parametrize("sampler", ["fixed", "shuffle"])
def test_other_samplers(tmp_path, sampler: str) -> None:
    people = auditing.people()
    folder = run_audit(people, auditing.options(sampler=sampler), tmp_path / "a", show=False)
    found = read_leakage(folder)
    assert found.facts["rules"] == {"fixed": ["fixed", "paper"], "shuffle": ["none"]}[sampler]
    assert (found.kept_diagonal is None) == (sampler == "shuffle")


@pytest.mark.parametrize(("planes", "model"), [(1, "auto"), (3, "cnn"), (3, "mlp")])
def test_images(tmp_path, planes: int, model: str) -> None:
    pictures = auditing.pictures(planes=planes)
    folder = run_audit(pictures, auditing.options(model=model, steps=4), tmp_path / "a", show=False)
    found = read_leakage(folder)
    assert found.kept_diagonal.shape == (len(found.kept), 36 * planes)
    assert found.facts["scale"][0] == 255.0
    assert read_run(folder).data["shape"] == [planes, 6, 6]


def test_no_test_data_and_numbers_as_targets(tmp_path) -> None:
    people = auditing.people()
    numbers = replace(
        people, task="number", targets=people.inputs[:, 0].copy(), test_targets=people.test_inputs[:, 0].copy(),
        class_names=(),
    )  # fmt: skip
    found = read_leakage(run_audit(numbers, auditing.options(), tmp_path / "a", show=False))
    assert found.accuracy[-1] <= 1
    none = replace(people, test_inputs=people.test_inputs[:0], test_targets=people.test_targets[:0])
    found = read_leakage(run_audit(none, auditing.options(), tmp_path / "b", show=False, publish_accuracy=True))
    assert found.accuracy.numel() == 0


def test_chosen_records_are_distinct_and_in_order() -> None:
    dfil = torch.arange(30.0)
    kept, most = chosen(dfil, torch.ones(30))
    assert kept.tolist() == [*range(29, 17, -1), *range(5, -1, -1)]
    assert most == 12
    kept, most = chosen(dfil[:3], torch.tensor([1, 0, 1]))
    assert (kept.tolist(), most) == ([2, 0], 1)
    assert chosen(dfil[:1], torch.ones(1))[0].tolist() == [0]


def test_leakage_of_a_learner_that_never_measured_a_record(tmp_path) -> None:
    """Batches measured when drawn: a record that was not has floor 0 and is not shown."""
    people, options = auditing.people(), auditing.options(budget="every", steps=1, sample_rate=0.1)
    folder = open_folder(tmp_path / "a")
    measured = train(people, settle(folder, people, options), folder)
    found = leakage_of(people, options, measured)
    unseen = found.measured == 0
    assert bool(unseen.any())
    assert bool((floors(found)[unseen] == 0).all())
    assert not set(found.kept.tolist()) & set(torch.nonzero(unseen).flatten().tolist())
