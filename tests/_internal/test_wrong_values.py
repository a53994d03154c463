"""Wrong types and values in Python: refused in words that name the argument, or taken; never an error from inside.

A seeded share of all (call, argument, value); WRONG=all tries every one."""

from __future__ import annotations

import inspect
import os
import random

import numpy as np
import pytest
import torch

import reconbound as rb
import wrong_values
from reconbound._internal.checks import InputError

SHARE = 350


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[wrong_values.Case]:
    return list(wrong_values.cases(tmp_path_factory.mktemp("wrong")))


def test_wrong_value_names_its_argument(calls, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a path too
    tries = [(case, argument, value) for case in calls for argument in case.good for value in wrong_values.WRONG]
    chosen = tries if os.environ.get("WRONG") == "all" else random.Random(1).sample(tries, SHARE)
    found = [
        f"{case.name}({argument}={value}): {fault}"
        for case, argument, value in chosen
        if (fault := case.fault(argument, wrong_values.WRONG[value])) is not None
    ]
    assert not found, "\n".join([f"{len(found)} of {len(chosen)}", *found])


NAMED_LATE = [
    ("FisherAccountant.max_success", "baseline", "array"),
    ("FisherAccountant.max_success", "baseline", "tensor"),
    ("FisherAccountant.mean_feature_floors", "groups", "lists of different lengths"),
    ("FisherAccountant.merge", "other", "text"),
    ("FisherAccountant.merge", "other", "empty text"),
]


@pytest.mark.parametrize(("name", "argument", "value"), NAMED_LATE)
def test_values_that_a_large_run_found_are_named(calls, name, argument, value, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (case,) = (case for case in calls if case.name == name)
    assert case.fault(argument, wrong_values.WRONG[value]) is None


def test_every_public_name_and_argument_is_tried(calls) -> None:
    tried: dict[str, set[str]] = {}
    for case in calls:
        tried.setdefault(case.name.partition(",")[0].partition(" ")[0], set()).update(case.good)
    for name in rb.__all__:
        made = getattr(rb, name)
        if not callable(made) or inspect.isabstract(made):
            continue
        assert set(inspect.signature(made).parameters) - tried[name] == set(), name


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64, np.uint8, torch.tensor])
def test_numbers_of_numpy_are_numbers(kind, tmp_path) -> None:
    one = kind(1)
    settings = rb.Settings(one, one, one, lr=one, probes=one, micro_batch=one, seed=np.int64(3))
    plain = rb.Settings(1, 1, 1, lr=1, probes=1, micro_batch=1, seed=3)
    assert settings == plain
    assert all(type(value) in (int, float, str, tuple, type(None)) for value in vars(settings).values())
    account = rb.Account(one, one, one, records=one, features=one, steps=one, batches_per_epoch=one)
    assert account == rb.Account(1, 1, 1, records=1, features=1, steps=1, batches_per_epoch=1)
    ledger = rb.FisherAccountant(account, feature_scale=one)
    ledger.save(tmp_path / "ledger")  # as JSON, where NumPy's numbers used to fail
    assert rb.FisherAccountant.load(tmp_path / "ledger").account == account


def test_text_and_truth_are_no_numbers() -> None:
    for name in ("noise_multiplier", "max_grad_norm", "sample_rate", "lr", "momentum", "weight_decay", "probes"):
        for wrong in ("1", True, None, [1], np.bool_(True), np.array([1.0, 2.0])):
            with pytest.raises(InputError, match=name):
                rb.Settings(**{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, name: wrong})
