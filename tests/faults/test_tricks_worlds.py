"""Tricks on what audits say of other worlds of a record: each was tried, and what worked then is refused now."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reconbound as rb
import small_folders
from injecting import ended
from reconbound._internal.checks import InputError
from reconbound._internal.files import sealed_json, unsealed
from reconbound.report.checks import MOST_WORLDS
from sealing import sealed
from wrong_values import ledger_with_worlds

pytestmark = pytest.mark.slow

EVIL = "\x1b]0;owned\x07</script><script>alert(1)</script>../../etc\u202e"
DIVERGENCES = ("nats", "nats_upper", "nats_measured")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    return small_folders.make(tmp_path_factory.mktemp("done"), "category")


@pytest.fixture
def base(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "base"))


def change(folder: Path, change_it: Callable[[dict[str, Tensor], dict[str, Any], dict[str, Any]], Any]) -> None:
    """Changes the leakage file and run.json as somebody does who knows how their digests are made."""
    tensors, facts = unsealed(folder / "leakage.safetensors")
    run = {k: v for k, v in json.loads((folder / "run.json").read_text()).items() if k != "sha256"}
    facts.pop("run")
    change_it(tensors, facts, run)
    (folder / "leakage.safetensors").write_bytes(sealed(tensors, facts))
    (folder / "run.json").write_bytes(sealed_json(run))


def refused(folder: Path, said: str) -> None:
    """Every command that reads an audit says the same in one line."""
    for words in (["show"], ["show", "--record", "3"], ["show", "--json"], ["report"]):
        found = ended([words[0], str(folder), *words[1:]])
        assert (found.status, found.clear) == (2, True), (words, found)
        assert said in found.err, (words, found.err)


def other(name: str, made: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    return lambda tensors, facts, run: tensors.update({name: made(tensors[name])})


def repeated(tensors: dict[str, Tensor], facts: dict[str, Any], run: dict[str, Any]) -> None:
    tensors.update({name: tensors[name].repeat(1, 2) for name in DIVERGENCES})


TENSORS: dict[str, tuple[Callable[..., Any], str]] = {
    "NaN": (other("nats", lambda x: torch.full_like(x, math.nan)), "nats must not be negative, nor NaN"),
    "-inf": (other("nats", lambda x: torch.full_like(x, -math.inf)), "nats must not be negative, nor NaN"),
    "negative": (other("nats", lambda x: -1 - x), "nats must not be negative, nor NaN"),
    "one negative": (other("nats", lambda x: torch.cat([x[:, :-1], -x[:, :1] - 1], 1)), "nats must not be negative"),
    "negative limits": (other("nats_upper", lambda x: torch.full_like(x, -5)), "nats_upper must not be negative"),
    "limits NaN": (other("nats_upper", lambda x: torch.full_like(x, math.nan)), "nats_upper must not be negative"),
    "times": (other("nats_measured", lambda x: -1 - x), "nats_measured must not be negative"),
    "times of fractions": (other("nats_measured", lambda x: x / 2), "nats_measured must be of whole numbers"),
    "one record": (other("nats", lambda x: x[:, :1].clone()), "nats must have 48 in place of 1"),
    "no record": (other("nats", lambda x: x[:, :0].clone()), "nats must have 48 in place of 0"),
    "more records": (repeated, "nats must have 48 in place of 96"),
    "one axis": (other("nats", lambda x: x[0].clone()), "nats must have 2 axes"),
    "three axes": (other("nats", lambda x: x[..., None].clone()), "nats must have 2 axes"),
    "fewer worlds": (other("nats_upper", lambda x: x[:1].clone()), "nats_upper must have 4 in place of 1"),
    "complex": (other("nats", lambda x: x.to(torch.complex64)), "nats must be of floating-point numbers"),
    "bool": (other("nats", lambda x: x > 0), "nats must be of floating-point numbers"),
    "bfloat16": (other("nats", lambda x: x.to(torch.bfloat16)), "nats must be of floating-point numbers"),
    "no times": (lambda tensors, facts, run: tensors.pop("nats_measured"), "worlds must be of a file with nats"),
    "no divergences": (lambda tensors, facts, run: tensors.pop("nats"), "worlds must be of a file with nats"),
    "kept": (other("kept", lambda x: x + 48), "kept must be records below 48"),
    "kept of negative": (other("kept", lambda x: -x - 1), "kept must be records below 48"),
    "diagonal": (other("diagonal", lambda x: x[:, :1].clone()), "diagonal must have 2 in place of 1"),
    "targets": (other("targets", lambda x: x[:5].clone()), "targets must have 48 in place of 5"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_divergences_that_no_audit_writes_are_one_line(base, kind) -> None:
    """A negative divergence was reported as a record that no attack gains anything on; other shapes as a report."""
    make, said = TENSORS[kind]
    change(base / "audit", make)
    refused(base / "audit", f"leakage.safetensors is not a file of reconbound's ({said}")


def test_infinite_divergences_are_the_mechanisms_own(base) -> None:
    change(base / "audit", other("nats", lambda x: torch.full_like(x, math.inf)))
    change(base / "category", other("nats_upper", lambda x: torch.full_like(x, math.inf)))
    for name in ("audit", "category"):
        found = ended(["show", str(base / name), "--json"])
        assert found.status == 0, found
        assert all(row["baseline"] <= row["max"] <= 1 for row in json.loads(found.out)["success"])


def world(k: int, **changes: Any) -> Callable[..., None]:
    return lambda tensors, facts, run: facts["worlds"][k].update(changes)


def many(tensors: dict[str, Tensor], facts: dict[str, Any], run: dict[str, Any]) -> None:
    """800 worlds in a file of 700 kB took a minute, and ten times as many ten."""
    count = MOST_WORLDS + 1
    tensors.update({name: tensors[name][1:2].repeat(count, 1) for name in DIVERGENCES})
    facts["worlds"] = [{"name": f"w{k}", "kind": "column", "reference": "0"} for k in range(count)]


def put(name: str, value: Any) -> Callable[..., None]:
    return lambda tensors, facts, run: facts.update({name: value})


FACTS: dict[str, tuple[Callable[..., Any], str]] = {
    "a column as left out": (world(2, kind="removed"), "worlds.name must be another for each world, and 'removed' for"),
    "left out as a column": (world(0, kind="column"), "worlds.name must be another for each world, and 'removed' for"),
    "named removed": (world(2, name="removed"), "worlds.name must be another for each world, and 'removed' for"),
    "the same name": (world(2, name="age"), "worlds.name must be another for each world, and 'removed' for"),
    "no name": (world(2, name=None), "worlds must have a name, a kind and a reference each"),
    "a list as a name": (world(2, name=["age"]), "worlds must have a name, a kind and a reference each"),
    "no reference": (world(2, reference=3), "worlds must have a name, a kind and a reference each"),
    "another kind": (world(2, kind="certain"), "worlds.kind must be one of"),
    "many": (many, f"worlds must be at most {MOST_WORLDS}"),
    "no list": (put("worlds", "removed"), "worlds must be a list"),
    "no worlds": (put("worlds", []), "nats must have 0 in place of 4"),
    "too few": (lambda tensors, facts, run: facts["worlds"].pop(), "nats must have 3 in place of 4"),
    "a variance of almost 0": (put("prior_variance", [1e-320, 1.0]), "prior_variance must be 0 or at least"),
    "a negative variance": (put("prior_variance", [-1.0, 1.0]), "prior_variance[0] must be finite and at least 0"),
    "a variance too few": (put("prior_variance", [1.0]), "prior_variance must be 2 numbers"),
    "a single variance": (put("prior_variance", 1.0), "prior_variance must be 2 numbers"),
    "a mean too few": (put("mean_nats", [0.1]), "mean_nats must be 4 numbers"),
    "means of text": (put("mean_nats", "x"), "mean_nats must be an array of numbers"),
    "entropy": (put("category_entropy", {"job": -1.0}), "category_entropy.job must be at least 0"),
    "entropy of text": (put("category_entropy", {"job": "x"}), "category_entropy.job must be a number"),
    "columns": (put("category_columns", {"job": {"columns": [1], "names": []}}), "category_columns.job must have as"),
    "columns of null": (put("category_columns", {"job": None}), "category_columns.job must have as"),
    "negative columns": (put("category_columns", {"job": {"columns": [-1], "names": ["a"]}}), "must be at least 0"),
    "names": (put("category_columns", {"job": {"columns": [1], "names": [None]}}), "must have names of text"),
}


@pytest.mark.parametrize("kind", FACTS)
def test_worlds_and_facts_that_no_audit_writes_are_one_line(base, kind) -> None:
    """A replaced column that is called left out had the smaller limit of that; equal names hid a world in JSON."""
    make, said = FACTS[kind]
    change(base / "audit", make)
    refused(base / "audit", f"leakage.safetensors is not a file of reconbound's ({said}" if said[0] != "m" else said)


RUNS: dict[str, tuple[Callable[..., Any], str]] = {
    "records": (lambda t, f, run: run["data"].update(records=10**6), "they are of other numbers of records"),
    "no records": (lambda t, f, run: run["data"].pop("records"), "they are of other numbers of records"),
    "sampler": (lambda t, f, run: run["mechanism"].update(sampler="fixed"), "left out need Poisson batches"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_does_not_fit_its_leakage_is_one_line(base, kind) -> None:
    """Neither did any harm but a report of numbers that mean nothing: "left out" is proved for Poisson batches only."""
    make, said = RUNS[kind]
    change(base / "audit", make)
    refused(base / "audit", f"leakage.safetensors do not belong together: {said}" if "left" not in said else said)


IMPOSSIBLE = [
    ("nats", math.nan), ("nats", -1.0), ("nats_times_all", -1), ("nats_mean", math.nan), ("nats_mean", -1.0),
    ("nats_mean", math.inf), ("nats_error", math.nan), ("nats_error", -1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_a_ledger_of_impossible_divergences_is_refused(name, value, tmp_path) -> None:
    """NaN was a chance of NaN, and a negative count a record that was never measured. Means were not looked at."""
    path = tmp_path / "ledger.safetensors"
    ledger_with_worlds().save(path)
    tensors, facts = unsealed(path)
    tensors[name][0, 1] = value
    path.write_bytes(sealed(tensors, facts))
    with pytest.raises(InputError, match=f"path must be a ledger .*{name} must be (finite and not|numbers, and)"):
        rb.FisherAccountant.load(path)


@pytest.mark.parametrize("kind", ["audit", "category"])
def test_names_of_worlds_steer_neither_terminal_nor_page(base, kind) -> None:
    folder = base / kind
    plain = (folder / "report-public.html").read_bytes()

    def name_them(tensors: dict[str, Tensor], facts: dict[str, Any], run: dict[str, Any]) -> None:
        facts["worlds"] = [row | ({} if k == 0 else {"name": f"={k}{EVIL}", "reference": EVIL})
                           for k, row in enumerate(facts["worlds"])]  # fmt: skip

    change(folder, name_them)
    for words in (["show"], ["show", "--record", "3"], ["show", "--json"], ["report"]):
        found = ended([words[0], str(folder), *words[1:]])
        assert found.status == 0, found
        assert not {"\x1b", "\x07", "\u202e"} & {*found.out, *found.err}, words
    page = (folder / "report.html").read_text()
    assert "<script>alert(1)" not in page
    assert not {"\x1b", "\x07", "\u202e"} & {*page}
    assert (folder / "report-public.html").read_bytes() == plain  # it knows no world
