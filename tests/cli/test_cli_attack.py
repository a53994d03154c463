"""reconbound attack: a small audit attacked from the command line, its file, its section, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calling import QUICK, check_refused, write_people
from reconbound._internal.files import Unreadable, unsealed
from reconbound.auditing import attack as auditing
from reconbound.cli import app as cli
from reconbound.data import load_dataset
from reconbound.report import build
from reconbound.report.attack import attack_section, read_attack, sandwich_chart
from reconbound.report.folder import ATTACK, read_audit
from reconbound.report.view import View
from sealing import sealed

WORDS = ["--limit", "60", "--records", "most-exposed:1,random:1", "--trials", "3"]
AUDIT = ["--limit", "60", *QUICK, "--noise-multiplier", "0.05"]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> tuple[Path, dict]:
    """The folder of an audit of digits that was attacked, and what was printed as JSON."""
    folder = tmp_path_factory.mktemp("attacked") / "out"
    assert cli.run(["audit", *AUDIT, "--out", str(folder), "--quiet"]) == 0
    found = auditing.attack_audit(
        folder, load_dataset("digits", limit=60), records=WORDS[3], trials=3, seed=1, show=False
    )
    from reconbound.cli.attack import result

    return folder, json.loads(json.dumps(result(View(*read_audit(folder)), found), allow_nan=False))


def test_result_and_file(attacked) -> None:
    folder, found = attacked
    assert found["trials"] == 3
    assert [row["group"] for row in found["records"]] == ["most-exposed", "random"]
    assert len({row["record"] for row in found["records"]}) == 2
    for row in found["records"]:
        assert row["faults"] == []
        assert row["membership"]["trials"] == 3
        assert row["probable"]["mse"] > 0
        assert row["stated"]["floor"] > 0
        assert row["stated"]["removed"] > 0
        assert row["two_point"] <= row["both"][2]
    path = folder / ATTACK
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"keep it secret" in path.read_bytes()
    assert str(found["records"][0]["membership"]["learned"])[:6] not in (folder / "run.json").read_text()


def test_what_is_read_is_what_was_written(attacked) -> None:
    folder, found = attacked
    run, leakage = read_audit(folder)
    read = read_attack(folder, leakage)
    assert read is not None
    from reconbound.cli.attack import result

    assert json.loads(json.dumps(result(View(run, leakage), read))) == {
        k: v for k, v in found.items() if k != "version"
    }


def test_estimates_of_the_audit_are_called_estimates(attacked) -> None:
    folder, _ = attacked
    run, leakage = read_audit(folder)
    found = read_attack(folder, leakage)
    assert found is not None
    assert leakage.nats is not None
    for upper, nats_upper, count in (
        (torch.full_like(leakage.dfil, 9.0), torch.full_like(leakage.nats, 0.1), 0),
        (None, torch.full_like(leakage.nats, 0.1), 2),
        (torch.full_like(leakage.dfil, 9.0).index_fill(1, torch.tensor([found.records[0].target.record]), math.inf),
         torch.full_like(leakage.nats, 0.1), 1),
    ):  # fmt: skip
        view = View(run, replace(leakage, upper=upper, nats_upper=nats_upper))
        assert attack_section(view, found)["estimates"] == count
    low = replace(leakage, upper=torch.full_like(leakage.dfil, 9.0), nats=torch.full_like(leakage.nats, 0.01))
    assert attack_section(View(run, replace(low, nats_upper=None)), found)["estimates"] == 2


def test_a_page_says_where_the_audit_has_estimates_only(attacked, monkeypatch) -> None:
    folder, _ = attacked
    for count in (2, 0):
        monkeypatch.setattr("reconbound.report.attack._estimated", lambda view, one, count=count: count > 0)
        page = build(folder)[0].read_text()
        assert ("Of 2 of these images the audit’s floors, nats or p_max are estimates" in page) == (count > 0)
    monkeypatch.undo()
    build(folder)


def test_section_of_the_report(attacked) -> None:
    folder, found = attacked
    page = (folder / "report.html").read_text()
    assert 'id="attack-verdict"' in page
    section = page[page.index('<section id="attack">') :]
    section = section[: section.index("</section>")]
    assert "No attack beat a floor that binds it: 2 images, 3 fresh trainings of each kind." in section
    assert section.count('src="data:image/png;base64,') == 2 * 4  # the original and three reconstructions
    for row in found["records"]:
        assert row["name"] in section
    assert '"chart-attack"' in page
    assert "attack-verdict" not in (folder / "report-public.html").read_text()
    before = (folder / "report.html").read_bytes()
    build(folder)
    assert (folder / "report.html").read_bytes() == before


def test_faults_lead_the_section(attacked) -> None:
    folder, _ = attacked
    run, leakage = read_audit(folder)
    found = read_attack(folder, leakage)
    assert found is not None
    from dataclasses import replace

    from reconbound.attacks.sandwich import Stated, Target

    wrong = replace(found.records[0], target=Target(found.records[0].target.record, Stated(1e9, 0.0, 0.0)))
    wrong = replace(wrong, both=(0.0, 0.0, 0.0))
    view = View(run, leakage)
    section = attack_section(view, replace(found, records=(wrong, found.records[1])))
    assert section["faults"]
    assert section["rows"][0]["fault"]
    assert not section["rows"][1]["fault"]
    assert sandwich_chart(view, found) is not None


def test_command_prints_a_table_or_the_path(attacked, run, tmp_path) -> None:
    folder = Path(shutil.copytree(attacked[0], tmp_path / "out"))
    status, out, err = run("attack", folder, *WORDS)
    assert status == 0
    assert "No attack beat a floor that binds it: 2 images" in out
    assert out.strip().endswith(str(folder / "report.html").replace("\n", ""))
    assert "keep it as secret as the data" in err
    status, out, err = run("attack", folder, "--limit", 60, "--records", "random:1", "--trials", 2, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["confidential"] is True
    assert [row["group"] for row in found["records"]] == ["random"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--records", "best:3"], "--records must be one of most-exposed, least-exposed, random"),
        (["--records", "random"], "--records must be groups with their numbers"),
        (["--records", "random:0"], "--records must name at least one record"),
        (["--trials", "1"], "--trials must be at least 2"),
        (["--limit", "50"], "records was 60 and is 50"),
    ],
)
def test_wrong_options_are_refused(attacked, run, words, message: str) -> None:
    given = dict(zip(WORDS[::2], WORDS[1::2], strict=True)) | dict(zip(words[::2], words[1::2], strict=True))
    status, out, err = run("attack", attacked[0], *(word for pair in given.items() for word in pair))
    check_refused(status, out, err)
    assert message in err


def test_folders_that_cannot_be_attacked_are_refused(run, tmp_path) -> None:
    check_refused(*run("attack", tmp_path))
    fixed = tmp_path / "fixed"
    assert run("audit", *AUDIT, "--sampler", "fixed", "--out", fixed, "--quiet")[0] == 0
    status, out, err = run("attack", fixed, *WORDS)
    check_refused(status, out, err)
    assert "Poisson batches" in err


def test_a_table_with_a_private_category(run, tmp_path) -> None:
    """The floor is about numbers, the worlds replace the category too: nothing is stated of what is attacked."""
    table, folder = write_people(tmp_path / "people.csv"), tmp_path / "out"
    reading = ["--target", "<b>pay</b>", "--range", "age=0:120", "--range", "hours=0:100", "--private", "age,job"]
    assert run("audit", table, *reading, *QUICK, "--out", folder, "--quiet")[0] == 0
    words = ["--data", table, *reading, "--records", "random:1", "--trials", 2, "--json"]
    status, out, _ = run("attack", folder, *words)
    assert status == 0
    (row,) = json.loads(out)["records"]
    assert row["stated"]["floor"] is None
    assert row["stated"]["replaced"] > 0
    tensors, _ = unsealed(folder / ATTACK)
    assert tensors["truth"].shape == (1, 3)  # age, clerk, cook
    assert "attack-pictures" not in (folder / "report.html").read_text()


def test_result_of_another_audit_is_not_shown(attacked, tmp_path) -> None:
    folder = Path(shutil.copytree(attacked[0], tmp_path / "out"))
    tensors, facts = unsealed(folder / ATTACK)
    (folder / ATTACK).write_bytes(sealed(tensors, {**facts, "run": "0" * 64}))
    build(folder)
    assert "attack-verdict" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors, facts: facts["records"][0].update(record=10**6),
        lambda tensors, facts: facts["records"][0].update(group="<b>"),
        lambda tensors, facts: facts["records"][0].update(membership={"trials": 3}),
        lambda tensors, facts: facts["records"][0].update(nats=[1.0]),
        lambda tensors, facts: facts["records"][0].update(both=["a", "b", "c"]),
        lambda tensors, facts: facts["records"].pop(),
        lambda tensors, facts: facts.update(trials=-1),
        lambda tensors, facts: facts.update(kind="leakage"),
        lambda tensors, facts: facts.pop("reference"),
        lambda tensors, facts: tensors["truth"].fill_(torch.nan),
        lambda tensors, facts: tensors.update(examples=torch.zeros(2, 3, 5)),
        lambda tensors, facts: tensors.pop("inputs"),
    ],
)
def test_other_files_are_refused_in_one_line(attacked, tmp_path, spoil) -> None:
    folder = Path(shutil.copytree(attacked[0], tmp_path / "out"))
    tensors, facts = unsealed(folder / ATTACK)
    spoil(tensors, facts)
    (folder / ATTACK).write_bytes(sealed(tensors, facts))
    with pytest.raises(Unreadable, match=re.escape(str(folder / ATTACK))):
        build(folder)


def test_groups() -> None:
    assert auditing.read_groups({"random": 2}) == {"random": 2}
    assert auditing.read_groups("random:2,random:3") == {"random": 5}


def test_every_record_is_chosen_once(attacked) -> None:
    view = View(*read_audit(attacked[0]))
    counts = {"most-exposed": 30, "least-exposed": 20, "random": 20}
    chosen = auditing.choose_records(view, counts, 3)
    assert len({target.record for target in chosen}) == len(chosen) == 60
    most = [t.record for t in chosen if t.group == "most-exposed"]
    least = [t.record for t in chosen if t.group == "least-exposed"]
    assert view.floor[most].max() <= view.floor[least].min()
