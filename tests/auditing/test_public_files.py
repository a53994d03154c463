"""What audits of every kind publish is the same for other records, and what they do not is for its owner only."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import auditing
from reconbound.auditing.run import run_audit
from reconbound.data import Dataset, Feature
from reconbound.report.folder import LEAKAGE, MODEL, PUBLIC_REPORT, REPORT, RUN

pytestmark = pytest.mark.filterwarnings("ignore::reconbound.validate.KinkWarning")
PUBLIC = (RUN, PUBLIC_REPORT, MODEL)


def with_category(seed: int) -> Dataset:
    """Age, a public mark, and which of two jobs a person has, which is private."""
    people = auditing.people(seed=seed)
    other = [np.column_stack([x, 1 - x[:, 2]]) for x in (people.inputs, people.test_inputs)]
    job = {"column": "job", "category": True}
    features = (people.features[0], people.features[2], Feature("job = cook", **job), Feature("job = clerk", **job))
    train, test = (x[:, [0, 2, 2, 3]] for x in other)
    return replace(people, inputs=train, test_inputs=test, features=features)


def texts(seed: int) -> Dataset:
    tokens = np.random.default_rng(seed).integers(0, 9, (50, 3))
    targets = (tokens[:, 0] > 4).astype(np.int64)
    features = tuple(Feature(f"token {k}", category=True) for k in range(3))
    return Dataset(
        "texts", "tokens", tokens[:40], targets[:40], tokens[40:], targets[40:], features, class_names=("no", "yes"),
        target=Feature("class", private=False), vocabulary=9,
    )  # fmt: skip


KINDS = {
    "numbers": (auditing.people, "linear"),
    "category": (with_category, "linear"),
    "tokens": (texts, "auto"),
    "jumps": (auditing.people, "auditing:binned"),
    "rounding": (auditing.people, "auditing:far"),
    "kinks": (auditing.people, "auditing:kinked"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_public_files_of_every_kind_are_the_same_for_other_people(kind, tmp_path) -> None:
    """How far rounding changed the loss of the first records stood in them."""
    make, model = KINDS[kind]
    options = auditing.options(steps=4, model=model)
    one, other = (run_audit(make(seed=seed), options, tmp_path / str(seed), show=False) for seed in (0, 8))
    for name in (RUN, PUBLIC_REPORT):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert (one / LEAKAGE).read_bytes() != (other / LEAKAGE).read_bytes()
    assert (one / REPORT).read_bytes() != (other / REPORT).read_bytes()


@pytest.mark.parametrize("kind", ["category", "tokens", "jumps"])
@pytest.mark.parametrize("mask", [0, 0o077])
def test_all_but_the_public_files_are_for_their_owner(kind, mask, tmp_path) -> None:
    make, model = KINDS[kind]
    own = os.umask(mask)
    try:
        folder = run_audit(make(seed=0), auditing.options(steps=2, runs=1, model=model), tmp_path / "a", show=False)
    finally:
        os.umask(own)
    assert auditing.mode(folder) == 0o700
    modes = {path.relative_to(folder): auditing.mode(path) for path in folder.rglob("*") if path.is_file()}
    assert {mode for path, mode in modes.items() if path.name not in PUBLIC} == {0o600}
    assert {modes[Path(name)] for name in PUBLIC} == {0o644}
