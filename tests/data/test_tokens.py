"""Texts of tokens: read from an .npz file, trained on by embeddings, every token private."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import auditing
from reconbound._internal.checks import InputError
from reconbound.auditing.leakage import leakage_of
from reconbound.auditing.models import check_model, describe_model, make_model, model_kind
from reconbound.auditing.options import about, default_options, make_learner, open_folder, settle
from reconbound.auditing.release import load_release, write_inputs
from reconbound.auditing.run import expected_seconds, facts_of, train
from reconbound.auditing.worlds import worlds_of
from reconbound.data import DataError, Dataset, DataWarning, Feature, load_dataset
from reconbound.report.folder import read_leakage, write_leakage

VOCABULARY = 30


def arrays(records: int = 50, length: int = 6, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, VOCABULARY - 4, (records, length)).astype(np.uint16)
    np.fill_diagonal(tokens, 0)
    tokens[-1] = VOCABULARY - 5
    labels = (tokens.mean(1) > 12).astype(int)
    found = {"tokens": tokens, "y": labels, "vocabulary": np.array(VOCABULARY), **changes}
    return {name: value for name, value in found.items() if value is not None}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(**changes: Any) -> Path:
        np.savez(tmp_path / "texts.npz", **arrays(**changes))
        return tmp_path / "texts.npz"

    return written


def test_tokens_are_read(write: Any) -> None:
    found = load_dataset(write(class_names=["good", "bad"]), test_share=0.0)
    assert (found.kind, found.shape, found.vocabulary, found.task) == ("tokens", (6,), VOCABULARY, "classes")
    assert found.inputs.dtype == np.int64
    np.testing.assert_array_equal(found.inputs, arrays()["tokens"])
    np.testing.assert_array_equal(found.targets, arrays()["y"])
    assert found.class_names == ("good", "bad")
    assert [f.name for f in found.features] == [f"token {k}" for k in range(6)]
    assert all(f.private and f.category for f in found.features)
    assert found.private.tolist() == []
    assert found.scale.shape == (0,)
    assert not found.inferred_ranges
    assert found.notes == ()
    assert "texts of 6 tokens, out of 30; 50 records to train on" in found.summary()


def test_a_vocabulary_read_off_the_data_is_noted(write: Any) -> None:
    path = write(vocabulary=None)
    with pytest.warns(DataWarning, match=r"26 different tokens was read off the data; the size of the released model"):
        found = load_dataset(path)
    assert found.vocabulary == 26
    assert found.inferred_ranges


def test_tests_of_their_own_and_limits(write: Any) -> None:
    own = arrays(records=8)
    path = write(tokens=None, y=None, tokens_train=arrays()["tokens"], y_train=arrays()["y"],
                 tokens_test=own["tokens"], y_test=own["y"])  # fmt: skip
    found = load_dataset(path, limit=20)
    assert len(found.inputs) == 20
    np.testing.assert_array_equal(found.test_inputs, own["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.ones((50, 3))}, r"array tokens: must hold whole numbers, \(records, length\), not float64"),
        ({"tokens": np.ones((50, 3, 2), dtype=int)}, r"must hold whole numbers, .* of shape \(50, 3, 2\)"),
        ({"tokens": -np.ones((50, 3), dtype=int)}, r"tokens from -1 to -1; they must be from 0"),
        ({"tokens": np.full((50, 3), 2**40)}, r"they must be from 0 to at most 1,048,575"),
        ({"vocabulary": np.array(20)}, r"array vocabulary: must be above every token .* got 20 for tokens up to 25"),
        ({"vocabulary": np.array([3, 4])}, r"array vocabulary: must be one whole number, not int64 of \(2,\)"),
        ({"vocabulary": np.array(30.5)}, r"array vocabulary: must be one whole number, not float64"),
        ({"y": np.linspace(0, 1, 50)}, r"the targets of images and of tokens must be classes"),
        ({"y": np.zeros(50)}, r"1 classes; there must be 2"),
    ],
)
def test_wrong_tokens_are_refused(write: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset(write(**changes))


def test_options_for_columns_are_refused(write: Any) -> None:
    for wrong in ({"private": ["token 0"]}, {"ranges": {"token 0": (0, 1)}}, {"units": {"a": "b"}}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} is for tables; .* and of a text every token"):
            load_dataset(write(), **wrong)


def texts(length: int = 6) -> Dataset:
    found = arrays(records=60, length=length)
    tokens, features = (
        found["tokens"].astype(np.int64),
        tuple(Feature(f"token {k}", category=True) for k in range(length)),
    )
    parts = (tokens[:50], found["y"][:50], tokens[50:], found["y"][50:])
    return Dataset("texts", "tokens", *parts, features, class_names=("a", "b"), vocabulary=VOCABULARY)


def test_a_dataset_of_tokens_is_checked() -> None:
    found = texts()
    assert replace(found, vocabulary=None).vocabulary == 26
    for name, wrong in (
        ("inputs", {"inputs": found.inputs.astype(np.int32)}),
        ("inputs", {"inputs": -found.inputs}),
        ("vocabulary", {"vocabulary": 20}),
        ("features", {"features": tuple(Feature(f"token {k}") for k in range(6))}),
    ):
        with pytest.raises(InputError, match=f"^{name} must"):
            replace(found, **wrong)
    with pytest.raises(InputError, match="vocabulary must be None for kind 'table'"):
        replace(auditing.people(), vocabulary=3)


def test_the_worlds_of_tokens() -> None:
    found = worlds_of(texts())
    assert list(found) == [*(f"token {k}" for k in range(6)), "private"]
    assert {w.reference for w in found.values()} == {"token number 0"}
    assert [found[name].kind for name in ("token 0", "private")] == ["token", "private"]
    inputs = torch.from_numpy(texts().inputs)
    one, _ = found["token 2"].world(inputs, None)
    assert bool((one[:, 2] == 0).all())
    assert torch.equal(one[:, [0, 1, 3, 4, 5]], inputs[:, [0, 1, 3, 4, 5]])
    every, _ = found["private"].world(inputs, None)
    assert not every.any()
    assert every.dtype == torch.int64
    assert len(worlds_of(texts(16))) == 17
    assert list(worlds_of(texts(17))) == list(worlds_of(texts(1))) == ["private"]


def test_the_model_of_tokens() -> None:
    model = make_model(texts(), seed=0)
    assert model_kind(texts(), "auto") == "embedding"
    assert [p.shape[0] for p in model.parameters()] == [VOCABULARY, 2, 2]
    x = torch.from_numpy(texts().inputs[:3])
    expected = model[2](torch.stack([model[0].weight[row].mean(0) for row in x]))
    torch.testing.assert_close(model(x), expected)
    assert "embeddings" in describe_model(texts(), "auto")
    assert check_model(texts(), "auto") == check_model(texts(), "test_tokens:own") == {}
    for kind in ("linear", "mlp", "cnn"):
        with pytest.raises(InputError, match=r"model must be auto or package\.module:factory for tokens"):
            make_model(texts(), kind)


def own(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Flatten(), nn.ReLU(), nn.Linear(3 * shape[0], outputs))


@pytest.mark.parametrize("model", ["auto", "test_tokens:own"])
def test_an_audit_of_tokens(tmp_path: Path, model: str) -> None:
    dataset = texts()
    options = settle(open_folder(tmp_path / "a"), dataset, auditing.options(model=model, budget=8.0))
    assert 0 < expected_seconds(dataset, options) < 60
    measured = train(dataset, options, tmp_path / "a")
    found = leakage_of(dataset, options, measured)
    names = [world["name"] for world in found.facts["worlds"]]
    assert names == ["removed", *worlds_of(dataset)]
    assert found.dfil.shape == (0, 50)
    assert found.guess.shape == (0,)
    assert found.facts["prior_variance"] == []
    assert torch.equal(found.kept_inputs, torch.from_numpy(dataset.inputs)[found.kept])
    nats = dict(zip(names, found.nats, strict=True))
    zero = torch.from_numpy(dataset.inputs == 0)
    assert zero.any(0).all()
    for k in range(6):  # whose token is 0 already is no further from that world
        assert bool((nats[f"token {k}"][zero[:, k]] == 0).all())
        assert bool((nats[f"token {k}"][~zero[:, k]] > 0).all())
    assert bool((nats["private"] > 0).all())
    write_leakage(tmp_path, found)
    assert torch.equal(read_leakage(tmp_path).nats, found.nats)
    run = facts_of(dataset, options, measured.learner, seed_from="")
    assert (run.data["kind"], run.data["shape"], run.data["features"]) == ("tokens", [6], 0)
    assert str(VOCABULARY) not in str(run.data)
    write_inputs(tmp_path / "a", dataset, model_kind(dataset, model))
    release = load_release(tmp_path / "a", None if model == "auto" else own((6,), 2))
    trained = measured.learner.model
    torch.testing.assert_close(release.outputs(dataset.inputs[:5]), trained(torch.from_numpy(dataset.inputs[:5])))
    assert "6 tokens -> 2 classes" in repr(release)
    assert release.columns == []
    for wrong in (dataset.inputs[:, :5], dataset.inputs + VOCABULARY, dataset.inputs.astype(float)):
        with pytest.raises(InputError, match="records must be"):
            release.inputs(wrong)


def test_other_tokens_are_another_audit() -> None:
    assert about(texts())["vocabulary"] == VOCABULARY
    assert about(texts()) != about(replace(texts(), vocabulary=40))
    options = default_options(texts())
    learner = make_learner(texts(), options, progress=False).repeat(1, options.steps)
    assert 5 * int(learner.accountant.divergences.times("token 3").min()) >= 25
