"""Audits of very many records: the report is about some of them and the most exposed, with their own numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import auditing
from reconbound import FisherAccountant
from reconbound._internal.files import Unreadable, unsealed
from reconbound.auditing import leakage as leaks
from reconbound.auditing.options import finished
from reconbound.auditing.priors import guess_of, prior_variance
from reconbound.auditing.run import run_audit
from reconbound.data import load_dataset, streaming
from reconbound.report.folder import LEAKAGE, LEDGER, REPORT, read_audit, record_names
from reconbound.report.headline import headline
from reconbound.report.records import record_facts
from reconbound.report.view import View
from sealing import sealed

RECORDS, SHOWN = 60, 20


def audited(folder: Path, records: int = RECORDS, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_audit(auditing.people(records), auditing.options(**options), folder, show=False)


@pytest.mark.parametrize("rules", [(), None])
def test_a_report_on_some_records_has_their_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: Any
) -> None:
    whole = read_audit(audited(tmp_path / "whole", rules=rules))[1]
    monkeypatch.setattr(leaks, "SHOWN", SHOWN)
    monkeypatch.setattr(leaks, "MANY", SHOWN)
    run, some = read_audit(audited(tmp_path / "some", rules=rules))
    names = record_names(some.names)
    rows = [int(name.removeprefix("row ")) for name in names]
    assert rows == sorted(set(rows))
    assert SHOWN <= len(rows) < RECORDS
    assert run.data["records"] == some.facts["shown_of"] == RECORDS
    for name in ("dfil", "error", "upper", "nats", "nats_upper", "nats_measured", "measured", "targets"):
        own, all_of = getattr(some, name), getattr(whole, name)
        assert (own is None) == (all_of is None)
        if own is not None:
            assert torch.equal(own, all_of[..., rows]), name
    assert whole.nats is not None
    assert some.nats is not None
    for k in range(len(whole.nats)):
        assert float(some.nats[k].max()) == float(whole.nats[k].max())
    assert [rows[i] for i in some.kept.tolist()] == whole.kept.tolist()
    assert torch.equal(some.kept_inputs, whole.kept_inputs)
    assert torch.equal(some.guess, whole.guess)
    for name in ("mean_nats", "prior_variance", "worlds", "most"):
        assert some.facts[name] == whole.facts[name], name
    if rules is not None:
        assert some.history_step.tolist() == whole.history_step.tolist()
        assert some.kept_diagonal is not None
        assert whole.kept_diagonal is not None
        assert torch.equal(some.kept_diagonal, whole.kept_diagonal)


def test_its_pages_say_so_and_its_ledger_has_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SHOWN", SHOWN)
    monkeypatch.setattr(leaks, "MANY", SHOWN)
    folder = audited(tmp_path / "audit")
    run, found = read_audit(folder)
    view = View(run, found)
    said = f"This report is about {view.records} of the {RECORDS} records, drawn at random, and the most exposed of all"
    assert said in headline(view)[-1]
    assert said in (folder / REPORT).read_text()
    assert f"{RECORDS} training records" in (folder / REPORT).read_text()
    assert (folder / LEDGER).stat().st_mode & 0o777 == 0o600
    ledger = FisherAccountant.load(folder / LEDGER)
    assert ledger.account.records == RECORDS
    row = int(record_names(found.names)[5].removeprefix("row "))
    assert record_facts(found, run, 5)["dfil"]["exact"] == float(ledger.dfil()[row])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert finished(folder, auditing.people(RECORDS), auditing.options())
    tensors, facts = unsealed(folder / LEAKAGE)
    for wrong in (RECORDS + 1, 3, "many"):  # of another audit, fewer than shown, no number
        (folder / LEAKAGE).write_bytes(sealed(tensors, {**facts, "shown_of": wrong}))
        with pytest.raises(Unreadable):
            read_audit(folder)


def test_few_records_are_all_shown(tmp_path: Path) -> None:
    folder = audited(tmp_path / "audit")
    _, found = read_audit(folder)
    assert len(found.measured) == RECORDS
    assert "shown_of" not in found.facts
    assert not (folder / LEDGER).exists()


def test_facts_of_the_data_do_not_depend_on_the_parts_they_are_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from reconbound.auditing import priors

    dataset = auditing.people(500)
    variance, guess = prior_variance(dataset), guess_of(dataset)
    flat = dataset.inputs.astype(np.float64)
    np.testing.assert_allclose(guess, flat[:, :2].var(0), rtol=1e-12)
    monkeypatch.setattr(priors, "_CHUNK", 7)
    np.testing.assert_allclose(guess_of(dataset), guess, rtol=1e-12)
    assert variance is not None
    np.testing.assert_allclose(prior_variance(dataset), variance, rtol=1e-9)
    aims = dataset.targets[:, None] == np.arange(2)
    others = np.concatenate([flat[:, 1:], aims[:, :1], np.ones((500, 1))], axis=1)
    left = flat[:, 0] - others @ np.linalg.lstsq(others, flat[:, 0], rcond=None)[0]
    np.testing.assert_allclose(variance[0], left.var(), rtol=1e-4)  # a small ridge apart


def test_an_audit_of_a_table_in_batches_is_that_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    age = rng.integers(18, 90, 300)
    frame = pd.DataFrame({"age": age, "job": rng.choice(["a", "b"], 300), "y": np.where(age > 50, "old", "young")})
    frame.to_parquet(tmp_path / "people.parquet")
    asked: dict[str, Any] = {"target": "y", "ranges": {"age": (0, 120)}}
    pages = []
    for name in ("whole", "batches"):
        dataset = load_dataset(tmp_path / "people.parquet", **asked)
        assert isinstance(dataset.inputs, np.memmap) == (name == "batches")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = run_audit(dataset, auditing.options(), tmp_path / name, show=False)
        pages.append(unsealed(folder / LEAKAGE)[0])
        monkeypatch.setattr(streaming, "MOST_CELLS", 0)
        monkeypatch.setattr(streaming, "BATCH", 50)
    assert pages[0].keys() == pages[1].keys()
    assert all(torch.equal(value, pages[1][name]) for name, value in pages[0].items())
