"""The released model predicts from records in their own units what the audit's own inputs give."""

from __future__ import annotations

import csv
import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

import auditing
from reconbound import load_release
from reconbound._internal.checks import InputError
from reconbound._internal.files import Unreadable, sealed_json
from reconbound.auditing.models import mlp
from reconbound.auditing.options import default_options
from reconbound.auditing.release import INPUTS
from reconbound.auditing.run import run_audit
from reconbound.data import DataWarning, load_dataset
from reconbound.report.folder import MODEL, RUN

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "audit.md"
QUICK = {"steps": 3, "runs": 1, "sample_rate": 0.5, "seed": 1}


def people_csv(path: Path, records: int = 60) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "hours", "job", "pay", "score"])
        for k in range(records):
            age = "" if k % 9 == 0 else f"{rng.integers(18, 90)}"
            job = ["nurse", "clerk", "", "cook, chef"][k % 4]
            writer.writerow([age, f"{rng.uniform(0, 140):.2f}", job, "lh"[k % 2], f"{rng.uniform(-5, 5):.3f}"])
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return people_csv(tmp_path_factory.mktemp("data") / "people.csv")


def rows_of(path: Path, names: tuple[str, ...]) -> list[dict[str, str]]:
    """The file's rows of those names, as a user would read them."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [rows[int(name.split()[1]) - 2] for name in names]


@pytest.fixture(scope="module")
def classes(table, tmp_path_factory):
    """An audit with a number that has gaps, one beyond its range, one of a range off the data, and categories."""
    with pytest.warns(DataWarning):
        dataset = load_dataset(table, target="pay", ranges={"age": (0, 120), "hours": (0, 100)})
    return dataset, run_audit(
        dataset, default_options(dataset, **QUICK), tmp_path_factory.mktemp("a") / "out", show=False
    )


def test_records_are_encoded_as_in_the_audit(classes, table) -> None:
    dataset, folder = classes
    release = load_release(folder)
    assert release.columns == ["age", "hours", "job", "score"]
    rows = rows_of(table, dataset.record_names)
    found = release.inputs(rows)
    torch.testing.assert_close(found, torch.from_numpy(dataset.inputs), rtol=0, atol=1e-6)
    by_column = {name: [row[name] for row in rows] for name in release.columns}
    assert torch.equal(release.inputs(by_column), found)
    given = [{**row, "age": float(row["age"]) if row["age"] else None} for row in rows]
    assert torch.equal(release.inputs(given), found)  # numbers and None as well as cells


def test_predictions_are_those_of_the_parameters(classes, table) -> None:
    dataset, folder = classes
    release = load_release(folder)
    rows = rows_of(table, dataset.record_names)
    own = mlp(dataset.shape, 2)
    from safetensors.torch import load_file

    own.load_state_dict(load_file(folder / MODEL))
    outputs = own(torch.from_numpy(dataset.inputs)).detach()
    names = np.array(dataset.class_names)[outputs.argmax(1).numpy()]
    assert release.predict(rows).tolist() == names.tolist()
    np.testing.assert_allclose(release.predict_proba(rows), outputs.softmax(1).numpy(), atol=1e-6)


def test_facts_read_off_the_data_are_not_public(classes) -> None:
    _, folder = classes
    assert stat.S_IMODE(os.stat(folder / INPUTS).st_mode) == 0o600
    facts = json.loads((folder / INPUTS).read_text())
    assert "confidential" in facts
    assert facts["read_off_the_data"] == [
        "the classes of the target",
        "that age has missing values",
        "the categories of job",
        "the range of score",
    ]
    public = (folder / RUN).read_text() + (folder / MODEL).read_bytes().decode("latin-1")
    score = next(part for part in facts["inputs"] if part["column"] == "score")
    for secret in ("cook, chef", "clerk", repr(score["low"]), repr(score["high"])):
        assert secret in json.dumps(facts)
        assert secret not in public


def test_predicted_number_has_its_own_unit(table, tmp_path) -> None:
    ranges = {"age": (0, 120), "hours": (0, 140), "score": (-5, 5)}
    dataset = load_dataset(table, target="score", ranges=ranges)
    folder = run_audit(dataset, default_options(dataset, **QUICK), tmp_path / "out", show=False)
    release = load_release(folder)
    rows = rows_of(table, dataset.record_names)
    with torch.no_grad():
        scaled = release.model(torch.from_numpy(dataset.inputs))[:, 0].numpy()
    np.testing.assert_allclose(release.predict(rows), 10 * scaled - 5, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="is for classes"):
        release.predict_proba(rows)


def test_images_are_given_in_grey_levels(tmp_path) -> None:
    pictures = auditing.pictures()
    folder = run_audit(pictures, auditing.options(steps=2, runs=1), tmp_path / "out", show=False)
    release = load_release(folder)
    grey = pictures.inputs.astype(np.float64) * 255
    torch.testing.assert_close(release.inputs(grey), torch.from_numpy(pictures.inputs))
    assert torch.equal(release.inputs(grey[:, 0]), release.inputs(grey))
    assert set(release.predict(grey)) <= {"a", "b", "c"}
    with pytest.raises(InputError, match="must be images of shape"):
        release.inputs(grey[:, :, 1:])


def test_unusable_records_are_refused(classes, tmp_path) -> None:
    _, folder = classes
    release = load_release(folder)
    assert repr(release) == "Release(mlp: 4 columns -> 2 classes)"  # no ranges, categories or parameters
    with pytest.raises(InputError, match=r"records must be {column: values}, a data frame or a list .*, got 5"):
        release.predict(5)
    good = {"age": 40, "hours": 38, "job": "nurse", "score": 1}
    for changes, text in (
        ({"job": "pilot"}, "job of record 0 must be one of '', 'clerk'"),
        ({"age": "old"}, "age must be a number, got 'old'"),
    ):
        with pytest.raises(InputError, match=re.escape(text)):
            release.predict([{**good, **changes}])
    with pytest.raises(InputError, match="must have the columns age, hours, job, score, got 'no job'"):
        release.predict([{"age": 1, "hours": 2, "score": 1}])
    with pytest.raises(Unreadable, match="does not exist"):
        load_release(tmp_path)
    for content, text in (("{}", "was changed or damaged"), ("[]", "not a file of reconbound's"), ("{", "is damaged")):
        (tmp_path / INPUTS).write_text(content)
        with pytest.raises(Unreadable, match=text):
            load_release(tmp_path)
    (tmp_path / INPUTS).write_bytes(sealed_json({"format": 1}))
    with pytest.raises(Unreadable, match="not a file of reconbound's"):
        load_release(tmp_path)


def test_no_code_is_run_because_a_file_names_it(classes, tmp_path, monkeypatch) -> None:
    dataset, folder = classes
    facts = json.loads((folder / INPUTS).read_text())
    (tmp_path / INPUTS).write_bytes(sealed_json({**facts, "model": "evil:factory"}))
    (tmp_path / MODEL).write_bytes((folder / MODEL).read_bytes())
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="model must be given: this audit's was made by evil:factory"):
        load_release(tmp_path)
    release = load_release(tmp_path, model=mlp(dataset.shape, 2))
    row = {"age": 40, "hours": 38, "job": "nurse", "score": 1}
    assert release.predict([row]) == load_release(folder).predict([row])


def test_code_of_the_guide_runs(table, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    ranges = {"age": (0, 120), "hours": (0, 140)}
    dataset = load_dataset(table, target="pay", ranges=ranges, drop="score")
    run_audit(dataset, default_options(dataset, **QUICK), tmp_path / "audit-people", show=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ours = [block for block in blocks if "audit-people" in block]
    assert len(ours) == 2
    for block in ours:
        exec(block, {})
    reported = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\['[lh]' '[lh]'\]", reported[0])
    assert reported[1].startswith("[('row ")


def test_category_called_none_is_not_missing(tmp_path) -> None:
    path = tmp_path / "table.csv"
    lines = [f"{k % 7},{('none', 'some', '')[k % 3]},{'ab'[k % 2]}" for k in range(40)]
    path.write_text("\n".join(["age,level,y", *lines]) + "\n")
    dataset = load_dataset(path, target="y", ranges={"age": (0, 10)})
    release = load_release(run_audit(dataset, default_options(dataset, **QUICK), tmp_path / "out", show=False))
    names = [f.name for f in dataset.features]
    for given, meant in (("none", "none"), ("None", None), ("", "(missing)"), (None, "(missing)")):
        if meant is None:  # as the data's reader tells them apart
            with pytest.raises(InputError, match="must be one of '', 'none', 'some', got 'None'"):
                release.inputs([{"age": 1, "level": given}])
            continue
        found = release.inputs([{"age": 1, "level": given}])[0]
        assert found[names.index(f"level = {meant}")] == 1, given
        assert found[1:].sum() == 1
