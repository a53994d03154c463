"""The other worlds of an audit: what is replaced, by what, and what the leakage file says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import auditing
from reconbound._internal.checks import InputError
from reconbound.accounting.confidence import FEWEST, upper_limit
from reconbound.auditing.leakage import CONFIDENCE, leakage_of
from reconbound.auditing.options import AuditOptions, default_options, make_learner, open_folder, settle
from reconbound.auditing.priors import MOST_INPUTS, prior_variance
from reconbound.auditing.run import train
from reconbound.auditing.worlds import MOST_WORLDS, worlds_of
from reconbound.data import Dataset, Feature, Pixels, load_dataset
from reconbound.report.folder import Leakage, read_leakage, write_leakage

pytestmark = pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")


def leakage(dataset: Dataset, options: AuditOptions, folder: Path) -> Leakage:
    settled = settle(open_folder(folder), dataset, options)
    return leakage_of(dataset, settled, train(dataset, settled, folder))


def changed(dataset: Dataset, world: str) -> np.ndarray:
    """Which flat columns a world changes, after a check that it puts 0.5 there."""
    inputs = torch.from_numpy(dataset.inputs)
    other, targets = worlds_of(dataset)[world].world(inputs, torch.from_numpy(dataset.targets))
    assert torch.equal(targets, torch.from_numpy(dataset.targets))
    where = (other != inputs).any(0).flatten()
    assert bool((other.flatten(1)[:, where] == 0.5).all())
    return np.flatnonzero(where.numpy())


def numbers(names: list[str], records: int = 40) -> Dataset:
    rng = np.random.default_rng(2)
    inputs = rng.random((records, len(names))).astype(np.float32)
    targets = (inputs.sum(1) > len(names) / 2).astype(np.int64)
    features = tuple(Feature(name) for name in names)
    return Dataset("numbers", "table", inputs, targets, inputs[:0], targets[:0], features)


def test_worlds_of_a_table() -> None:
    people = auditing.people()
    found = worlds_of(people)
    assert [(name, w.kind, w.reference) for name, w in found.items()] == [
        ("age", "column", "60 years"),
        ("income", "column", "50,000 $"),
        ("private", "private", "all of these"),
    ]
    assert {name: changed(people, name).tolist() for name in found} == {"age": [0], "income": [1], "private": [0, 1]}
    one = replace(people, features=(people.features[0], *(replace(f, private=False) for f in people.features[1:])))
    assert list(worlds_of(one)) == ["age"]
    none = replace(people, features=tuple(replace(f, private=False) for f in people.features))
    with pytest.raises(InputError, match=r"private must name a column.*people"):
        worlds_of(none)


def test_the_mark_of_a_missing_number_stays() -> None:
    ages = [20.0, None, 57.0, 38.5, None, 60.0]
    frame = pd.DataFrame({"age": ages, "pay": range(6), "y": list("abbaab")})
    ranges = {"age": (17, 60), "pay": (0, 1e5)}
    found = load_dataset(frame, target="y", ranges=ranges, units={"age": "years"}, test_share=0.0)
    assert [f.name for f in found.features] == ["age", "age (missing)", "pay"]
    assert [worlds_of(found)[name].reference for name in ("age", "pay")] == ["38.5 years", "50,000"]
    assert changed(found, "age").tolist() == [0]
    assert changed(found, "private").tolist() == [0, 2]


def test_images_have_one_world() -> None:
    pictures = auditing.pictures(planes=3)
    found = worlds_of(pictures)
    assert [(name, w.kind, w.reference) for name, w in found.items()] == [("private", "private", "mid-grey")]
    assert len(changed(pictures, "private")) == 108


def test_reserved_names_and_many_columns(tmp_path: Path) -> None:
    assert list(worlds_of(numbers(["removed", "private", "age"]))) == [
        "column 'removed'", "column 'private'", "age", "private",
    ]  # fmt: skip
    assert len(set(worlds_of(numbers(["private", "column 'private'", "b"])))) == 4
    wide = numbers([f"c{k}" for k in range(MOST_WORLDS + 2)])
    found = worlds_of(wide)
    assert list(found) == [*(f"c{k}" for k in range(MOST_WORLDS)), "private"]
    assert len(changed(wide, "private")) == MOST_WORLDS + 2
    notes = leakage(wide, auditing.options(steps=2, runs=1), tmp_path / "a").facts["notes"]
    assert notes[-1].startswith("only the first 40 of 42 private columns have a world of their own")


def test_default_budget_measures_every_world_for_limits() -> None:
    for dataset in (auditing.people(60), auditing.people(2000), load_dataset("wine")):
        options = default_options(dataset, model="linear")
        learner = make_learner(dataset, options, progress=False).repeat(1, options.steps)
        divergences = learner.accountant.divergences
        assert divergences.worlds == ("removed", *worlds_of(dataset))
        for world in worlds_of(dataset):
            assert 5 * int(divergences.times(world).min()) >= FEWEST
        options = default_options(dataset, worlds=False)
        assert options.settings.budget == 1.0
    assert default_options(auditing.people(10**6)).settings.budget < 20  # 5 million measurements a run are enough
    assert default_options(auditing.people(60), budget=0.5).settings.budget == 0.5


@pytest.mark.parametrize("sampler", ["poisson", "fixed", "shuffle"])
def test_leakage_holds_the_divergences(tmp_path: Path, sampler: str) -> None:
    people, options = auditing.people(), auditing.options(sampler=sampler, budget=8.0, runs=3)
    found = leakage(people, options, tmp_path / "a")
    ledger = make_learner(people, options).repeat(options.runs, options.steps).accountant.divergences
    names = ["removed", "age", "income", "private"][sampler != "poisson" :]
    assert [world["name"] for world in found.facts["worlds"]] == names == list(ledger.worlds)
    if sampler == "poisson":
        assert found.facts["worlds"][0] == {"name": "removed", "kind": "removed", "reference": ""}
    assert found.facts["worlds"][-3] == {"name": "age", "kind": "column", "reference": "60 years"}
    for k, world in enumerate(names):
        assert torch.equal(found.nats[k], ledger.divergence(world))
        assert torch.equal(found.nats_measured[k], ledger.times(world))
        limit = upper_limit(ledger.estimates(world), CONFIDENCE)
        assert bool((found.nats_upper[k] <= ledger.cap(world))[limit.isfinite()].all())
        assert torch.equal(found.nats_upper[k].isinf(), limit.isinf())
        assert bool((found.nats_upper[k] >= found.nats[k]).all())
    assert found.nats.shape == (len(names), 40)
    assert found.nats_measured.dtype == torch.int64
    assert bool((found.nats > 0).any(1).all())
    write_leakage(tmp_path, found)
    again = read_leakage(tmp_path)
    assert torch.equal(again.nats, found.nats)
    assert torch.equal(again.nats_upper, found.nats_upper)
    assert again.facts["worlds"] == found.facts["worlds"]


def test_no_distance_to_what_is_there_already(tmp_path: Path) -> None:
    """Whose income is the reference is no further from that world; one run has no limits."""
    people = auditing.people()
    inputs = people.inputs.copy()
    inputs[:7, 1] = 0.5
    found = leakage(replace(people, inputs=inputs), auditing.options(runs=1), tmp_path / "a")
    names = [world["name"] for world in found.facts["worlds"]]
    nats = dict(zip(names, found.nats, strict=True))
    assert bool((nats["income"][:7] == 0).all())
    assert bool((nats["income"][7:] > 0).all())
    assert bool((nats["age"] > 0).all())
    torch.testing.assert_close(nats["private"][:7], nats["age"][:7])
    assert found.nats_upper is None


# --- what is known of a number without the model --------------------------------------------


def residual(dataset: Dataset, column: int, rows: slice | np.ndarray = slice(None)) -> float:
    """The variance that numpy's least squares leaves of a flat column."""
    flat = dataset.inputs.reshape(len(dataset.inputs), -1)[rows].astype(np.float64)
    targets = dataset.targets[rows]
    aims = np.eye(targets.max() + 1)[targets] if dataset.task == "classes" else targets[:, None]
    design = np.concatenate([np.ones((len(flat), 1)), np.delete(flat, column, axis=1), aims], axis=1)
    left = flat[:, column] - design @ np.linalg.lstsq(design, flat[:, column], rcond=None)[0]
    return float(left.var())


def test_prior_variance_is_what_a_regression_leaves() -> None:
    people = auditing.people(300)
    assert prior_variance(people) == pytest.approx([residual(people, 0), residual(people, 1)], rel=1e-4)
    assert prior_variance(people)[0] < 0.9 * people.inputs[:, 0].var()  # the target tells of it
    of_number = replace(people, task="number", targets=people.inputs[:, 1] / 2,
                        test_targets=people.test_inputs[:, 1] / 2, class_names=())  # fmt: skip
    found = prior_variance(of_number)
    assert found[0] == pytest.approx(residual(of_number, 0), rel=1e-4)
    assert 0 <= found[1] < 1e-6  # the target gives it away
    pictures = auditing.pictures(200)
    assert prior_variance(pictures) == pytest.approx([residual(pictures, k) for k in range(36)], rel=1e-3)


def test_prior_variance_of_missing_constant_and_many_columns() -> None:
    rng = np.random.default_rng(1)
    ages = rng.uniform(20, 60, 200)
    frame = pd.DataFrame({"age": ages, "pay": 3 * ages + rng.normal(0, 5, 200), "one": 1.0, "y": ["a", "b"] * 100})
    frame.loc[::5, "age"] = np.nan
    ranges = {"age": (0, 100), "pay": (0, 300), "one": (0, 3)}
    found = load_dataset(frame, target="y", ranges=ranges, test_share=0.0)
    has = found.inputs[:, 1] == 0
    assert 150 < has.sum() < 170
    age, pay, one = prior_variance(found)
    assert age == pytest.approx(residual(found, 0, has), rel=1e-3)
    assert pay == pytest.approx(residual(found, 2), rel=1e-3)
    assert one == 0.0
    wide = np.zeros((3, 1, 65, 65), dtype=np.float32)
    large = Dataset("large", "image", wide, np.array([0, 1, 0]), wide[:0], np.zeros(0, dtype=np.int64),
                    Pixels((1, 65, 65)))  # fmt: skip
    assert wide[0].size > MOST_INPUTS
    assert prior_variance(large) is None
