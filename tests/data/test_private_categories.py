"""Categories can be private: they are asked for by name, protected as a whole, and never shown in public."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import auditing
from reconbound._internal.checks import DataShown, InputError
from reconbound.auditing.leakage import leakage_of
from reconbound.auditing.options import about, default_options, open_folder, settle
from reconbound.auditing.priors import category_facts, copies_of
from reconbound.auditing.release import load_release, write_inputs
from reconbound.auditing.run import facts_of, train
from reconbound.auditing.worlds import worlds_of
from reconbound.data import DataError, Dataset, DataWarning, load_dataset
from reconbound.report.folder import read_leakage, write_leakage, write_run

pytestmark = pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")
JOBS = ("nurse", "clerk", None, "nurse")


def workers(**changes: object) -> pd.DataFrame:
    rng = np.random.default_rng(4)
    frame = {"age": rng.uniform(20, 60, 60), "job": [JOBS[k % 4] for k in range(60)], "town": list("xyz") * 20}
    return pd.DataFrame({**frame, "pay": ["low" if k % 3 else "high" for k in range(60)], **changes})


def loaded(**changes: object) -> Dataset:
    options = {"target": "pay", "private": ["age", "job"], "ranges": {"age": (0, 100)}, "test_share": 0.0}
    return load_dataset(workers(), **{**options, **changes})


def test_a_named_text_column_is_a_private_category() -> None:
    found = loaded()
    assert found.columns == (("age", "job"), ("town",))
    assert [f.name for f in found.features if f.private] == ["age", "job = (missing)", "job = clerk", "job = nurse"]
    assert [f.category for f in found.features if f.private] == [False, True, True, True]
    assert {f.source for f in found.features} == {"age", "job", "town"}
    assert found.private.tolist() == [0]
    assert [f.name for f in found.private_features] == ["age"]
    assert (found.scale.tolist(), found.offset.tolist()) == ([100.0], [0.0])
    assert {name: places.tolist() for name, places in found.private_columns.items()} == {"age": [0], "job": [1, 2, 3]}
    assert "3 columns beside the target (2 private, 1 public)" in found.summary()
    assert loaded(private=None).columns == (("age",), ("job", "town"))
    numbers = load_dataset(workers(), target="pay", private=["age"], categories=["age"], drop="job,town", limit=40)
    assert numbers.private.tolist() == []
    np.testing.assert_array_equal(found.inputs, loaded(private=None).inputs)


def test_what_cannot_be_a_private_category() -> None:
    many = workers(job=[f"j{k}" for k in range(60)], age=[f"a{k % 2}" for k in range(60)])
    many = pd.concat([many, many.assign(job=[f"k{k}" for k in range(60)])])
    with pytest.raises(DataError, match="column 'job': 120 different texts, more than 100: too many for a private"):
        load_dataset(many, target="pay", private="job")
    words = [*map(str, range(40)), *["x"] * 20]
    with pytest.raises(DataShown, match=r"'x' is not a number, and the column is private: mend .* --category 'job'"):
        load_dataset(workers(job=words), target="pay", private="job")
    with pytest.raises(DataShown, match="'x' is not a number, and the column has a range"):
        load_dataset(workers(job=words[::-1]), target="pay", private="job", ranges={"job": (0, 40)})
    assert load_dataset(workers(job=words), target="pay", private="job", categories="job").private.tolist() == []
    with pytest.raises(InputError, match="category must not name a column with a range"):
        loaded(private="age", categories="age")


def test_notes_say_what_was_asked_for() -> None:
    ages = [f"{20 + k % 30} years" for k in range(60)]
    with pytest.warns(DataWarning, match="age: numbers with 'years' after them, protected as a category"):
        load_dataset(workers(age=ages), target="pay", private="age")
    twos = {"private": ["age"], "ranges": {"age": (0, 3)}}
    with pytest.warns(DataWarning, match="--category 'age' makes it a private category"):
        load_dataset(workers(age=[1.0, 2.0] * 30), target="pay", **twos)


def test_the_world_without_a_category() -> None:
    found = worlds_of(loaded())
    assert [(name, w.kind, w.reference) for name, w in found.items()] == [
        ("age", "column", "50"),
        ("job", "category", "an empty cell"),
        ("private", "private", "all of these"),
    ]
    inputs = torch.from_numpy(loaded().inputs)
    without, _ = found["job"].world(inputs, None)
    assert bool((without[:, 1:4] == 0).all())
    assert torch.equal(without[:, [0, 4, 5, 6]], inputs[:, [0, 4, 5, 6]])
    nothing, _ = found["private"].world(inputs, None)
    assert bool((nothing[:, 0] == 0.5).all())
    assert bool((nothing[:, 1:4] == 0).all())
    assert torch.equal(nothing[:, 4:], inputs[:, 4:])
    assert list(worlds_of(loaded(private="job"))) == ["job"]


def test_what_is_known_of_a_category_without_the_model() -> None:
    found = category_facts(loaded())
    assert found["category_entropy"] == {"job": pytest.approx(0.5 * np.log(2) + 0.5 * np.log(4))}
    assert found["category_columns"] == {"job": {"columns": [1, 2, 3], "names": ["(missing)", "clerk", "nurse"]}}
    assert category_facts(loaded(private="age")) == {}
    same = copies_of(loaded(private="job"))
    assert same["private"]["records"] == 60  # by job and pay alone
    assert same["records"] == 0


@pytest.mark.parametrize("private", [("age", "job"), ("job",)])
def test_an_audit_of_private_categories(tmp_path: Path, private: tuple[str, ...]) -> None:
    dataset = loaded(private=list(private))
    options = settle(open_folder(tmp_path / "a"), dataset, auditing.options(budget=8.0, model="mlp"))
    measured = train(dataset, options, tmp_path / "a")
    found = leakage_of(dataset, options, measured)
    names = [world["name"] for world in found.facts["worlds"]]
    assert names == (["removed", "job"] if len(private) == 1 else ["removed", "age", "job", "private"])
    assert found.nats.shape == (len(names), 60)
    assert bool((found.nats[names.index("job")] > 0).all())
    if len(private) == 1:
        assert found.dfil.shape == found.error.shape == (0, 60)
        assert found.upper is found.diagonal is found.kept_diagonal is None
        assert found.history.shape == (0, 3)
        assert found.guess.shape == (0,)
        assert torch.equal(found.measured, found.nats_measured[0])
        assert found.kept[0] == found.nats[0].argmax()
        assert found.facts["rules"] == found.facts["prior_variance"] == found.facts["scale"] == []
    else:
        assert found.dfil.shape == (2, 60)
        assert bool((found.dfil[0] > 0).all())
        assert found.guess.shape == (1,)
    write_leakage(tmp_path, found)
    assert torch.equal(read_leakage(tmp_path).dfil, found.dfil)
    write_inputs(tmp_path / "a", dataset, "mlp")
    release = load_release(tmp_path / "a")
    assert release.columns == ["age", "job", "town"]
    shown = release.inputs([{"age": 41, "job": "nurse", "town": "x"}])
    np.testing.assert_allclose(shown.numpy(), [[0.41, *dataset.inputs[0, 1:]]], rtol=1e-6)


@pytest.mark.parametrize("private", [("age", "job"), ("job",)])
def test_public_facts_show_no_category_and_no_range_read_off(tmp_path: Path, private: tuple[str, ...]) -> None:
    dataset = loaded(private=list(private), ranges={})
    options = settle(open_folder(tmp_path / "a"), dataset, auditing.options(steps=2, runs=1))
    run = facts_of(dataset, options, train(dataset, options, tmp_path / "a").learner, seed_from="")
    assert run.data["private"] == list(private)
    assert "job" not in run.data["public"]
    assert run.data["features"] == len(private) - 1
    assert run.data["ranges"] == {}
    write_run(tmp_path, run)
    shown = (tmp_path / "run.json").read_text()
    low, high = dataset.features[0].low, dataset.features[0].high
    for hidden in ("nurse", "clerk", "(missing)", "= x", repr(low), repr(high), f"{low:.4g}", f"{high:.4g}"):
        assert hidden not in shown
    assert json.loads(json.dumps(about(dataset)))["private"] == list(private)
    assert default_options(dataset).settings.rules is not None
