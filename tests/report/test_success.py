"""The chances of success that lead a report: numbers, sentences, page, JSON and terminal say the same."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import auditing
from reconbound._internal.formatting import format_percent
from reconbound.accounting.divergence_queries import largest_divergence, mechanism_success, mechanism_successes
from reconbound.auditing.run import run_audit
from reconbound.bounds import success_from_kl
from reconbound.cli.app import run as command
from reconbound.report import record_facts
from reconbound.report.folder import REPORT, account_of, read_audit
from reconbound.report.formats import chance
from reconbound.report.headline import headline
from reconbound.report.pages import confidential_page
from reconbound.report.success import BASELINES, Success
from reconbound.report.text import success_notes
from reconbound.report.view import View

#: People's income has no declared range.
INFERRED = "Suppose that an attacker knows the column ranges that were taken from the data, and correctly guesses the "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of people, two columns of which are private."""
    out = tmp_path_factory.mktemp("audit") / "a"
    return run_audit(auditing.people(), auditing.options(runs=3, noise_multiplier=1.0, budget=6.0), out, show=False)


def seen(folder: Path) -> Success:
    return View(*read_audit(folder)).success


def test_chances_are_those_of_the_divergences(folder: Path) -> None:
    found = seen(folder)
    account = account_of(found.run)
    assert [w.kind for w in found.worlds] == ["removed", "column", "column", "private"]
    for world in found.worlds:
        removed = world.kind == "removed"
        for baseline in BASELINES:
            best = mechanism_success(account, baseline, removed=removed)
            expected = np.minimum(success_from_kl(baseline, world.divergences.nats), best)
            np.testing.assert_array_equal(world.divergences.max_success(baseline).value, expected)
            row = world.row(baseline)
            assert (expected <= row["max"]).all()
            assert np.mean(expected <= row["median"]) >= 0.5
            assert np.mean(expected <= row["p99"]) >= 0.99
            assert baseline <= row["median"] <= row["p99"] <= row["max"] <= best
        np.testing.assert_array_equal(world.chances, world.divergences.max_success(0.1).value)
        assert (world.divergences.nats <= largest_divergence(account, removed=removed)).all()


@pytest.mark.parametrize("at_once", [1, 100, 100_000])
def test_many_rows_are_those_of_single_baselines(folder: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconbound.report.success._AT_ONCE", at_once)  # for 40 records: 1, 2 and all baselines
    found, baselines = seen(folder), np.geomspace(1e-4, 0.999, 7)
    for world in found.worlds:
        account, removed = world.divergences.account, world.divergences.removed
        best = mechanism_successes(account, baselines, removed=removed)
        expected = [world.divergences.mechanism_success(float(k)) for k in baselines]
        np.testing.assert_allclose(best, expected, rtol=1e-14)
        for row, k in zip(world.rows_at(baselines, best), baselines, strict=True):
            one = world.row(float(k))
            numbers = [name for name, value in one.items() if type(value) is float]
            assert [row[name] for name in numbers] == pytest.approx([one[name] for name in numbers], rel=1e-14)
            assert {**row, **dict.fromkeys(numbers)} == {**one, **dict.fromkeys(numbers)}


def test_limits_come_before_estimates_and_unmeasured_records_have_the_mechanisms(folder: Path) -> None:
    run, leakage = read_audit(folder)
    assert leakage.nats is not None
    assert leakage.nats_measured is not None
    leakage = replace(leakage, nats=0.1 * leakage.nats)  # far from what the mechanism allows
    upper = torch.full_like(leakage.nats, torch.inf)
    upper[1, :30] = 2 * leakage.nats[1, :30]
    times = leakage.nats_measured.clone()
    times[1, 39] = 0
    found = Success(run, replace(leakage, nats_upper=upper, nats_measured=times))
    age = found.worlds[1]
    top = largest_divergence(account_of(run), removed=False)
    expected = np.minimum(np.where(np.arange(40) < 30, 2, 1) * leakage.nats[1].numpy(), top)
    expected[39] = top
    np.testing.assert_array_equal(age.divergences.nats, expected)
    assert age.limited.mean() > 0.5
    assert age.row()["basis"] == "upper limits"
    assert not found.worlds[0].limited.any()
    assert found.worlds[0].row()["basis"] == "estimates"
    assert (age.row()["without_limit"], found.worlds[0].row()["without_limit"]) == (9, 40)
    worlds = [{**w, "kind": "private"} if w["name"] == "income" else w for w in leakage.facts["worlds"]]  # age leads
    told = replace(leakage, nats_upper=upper, nats_measured=times, facts={**leakage.facts, "worlds": worlds})
    assert headline(View(run, told))[-2].endswith(
        ", at 95 % confidence for each record, except for 9 records with an estimate only."
    )
    upper[1] = leakage.nats[1]
    assert headline(View(run, told))[-2].endswith("at 95 % confidence for each record.")


def test_the_first_sentence_says_what_the_table_and_the_json_say(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = View(*read_audit(folder))
    found = view.success
    lead = found.leading
    assert lead is not None
    assert float(lead.chances.max()) == max(float(w.chances.max()) for w in found.worlds[1:3])
    row = lead.row()
    median, p99, most = (format_percent(row[name]) for name in ("median", "p99", "max"))
    first, second, third = headline(view)[-3:]
    assert first == (
        f"{INFERRED}{lead.name} of a record with a chance of 10% from a model trained on the same data, but with "
        f"{lead.reference} in its place."
    )
    assert p99 == most  # of 40 records
    assert second.startswith(
        f"With the real model the chance is at most {median} for half of the records and {most} for "
    )
    assert third.startswith(f"Averaged over the records, a guess of {lead.name} errs by at least ±")
    page = html.unescape((folder / REPORT).read_text())
    assert first in page
    assert page.index(first) < page.index('id="success"') < page.index('id="unbiased"') < page.index('id="floors"')
    table = page[page.index('id="success"') : page.index('id="unbiased"')]
    assert f'<td>{lead.name}<div class="unit">in its place: {lead.reference}</div></td>' in table
    assert '<td>anything about the record<div class="unit">without the record</div></td>' in table
    assert most in table
    assert command(["show", str(folder), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["verdict"] == headline(view)
    rows = {(r["world"], r["baseline"]): r for r in reported["success"]}
    assert len(rows) == 4 * len(found.worlds)
    assert rows[lead.name, 0.1] == row
    assert command(["show", str(folder), "--record", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    own = chance(float(lead.chances[3]), estimate=bool(lead.estimated[3]))
    assert f"{lead.name} at most {own} where 10% without" in shown


def test_average_floors_are_the_best_of_three(folder: Path) -> None:
    """Van Trees, the mean divergence to the column's own world, and what the mechanism allows to be told."""
    found = seen(folder)
    assert found.leakage.average_diagonal is not None
    assert found.leakage.nats is not None
    variance, info = found.leakage.facts["prior_variance"], found.leakage.average_diagonal.flatten().tolist()
    nats, kl = found.leakage.facts["mean_nats"], account_of(found.run).mechanism().kl()
    floors = found.average_floors()
    assert list(floors) == ["age", "income"] == [world.name for world in found.worlds[1:3]]
    for j, (with_it, without) in enumerate(floors.values()):
        assert nats[j + 1] >= float(found.leakage.nats[j + 1].mean()) * (1 - 1e-12)  # those are capped one by one
        width, v = found.leakage.facts["scale"][j], variance[j]
        three = [1 / (info[j] + 1 / v), v * np.exp(-2 * min(nats[j + 1], kl)), v * np.exp(-2 * kl)]
        assert without == pytest.approx(width * v**0.5)
        assert with_it == pytest.approx(width * max(three) ** 0.5)
        assert with_it < without
    large = replace(found.leakage, average_diagonal=1e9 * found.leakage.average_diagonal)
    less = Success(found.run, large).average_floors()
    told = Success(found.run, replace(large, facts={**large.facts, "mean_nats": [1e9] * 4})).average_floors()
    older = {name: fact for name, fact in large.facts.items() if name != "mean_nats"}
    for j, name in enumerate(floors):
        assert less[name][0] == pytest.approx(floors[name][1] * np.exp(-min(nats[j + 1], kl)))
        assert told[name][0] == pytest.approx(floors[name][1] * np.exp(-kl))
    for given in (
        older,
        {**older, "mean_nats": []},
        {**older, "mean_nats": [[1e9] * 2] * 2},
        {**older, "mean_nats": 1e9},
    ):
        assert Success(found.run, replace(large, facts=given)).average_floors() == told


def test_average_floors_of_a_model_with_caveats_rest_on_divergences(folder: Path) -> None:
    """Fisher information misses what jumps; divergences do not."""
    run, leakage = read_audit(folder)
    told = headline(View(run, leakage))
    assert "with this model (an estimate) and by" in told[-1]
    assert leakage.average_diagonal is not None
    small = replace(leakage, average_diagonal=1e-9 * leakage.average_diagonal)
    kinked = replace(run, caveats={"kinks": "The floors are not proved."})
    nothing = Success(run, replace(leakage, average_diagonal=None)).average_floors()
    assert Success(kinked, small).average_floors() == nothing != Success(run, small).average_floors()
    assert "with this model (an estimate) and by" in headline(View(kinked, small))[-1]


def test_little_protection_is_said_first(folder: Path) -> None:
    """Of the most exposed record, of most records, or of all: where the largest chance from 10 % is 90 % or more."""
    run, leakage = read_audit(folder)
    assert leakage.nats is not None
    for nats, others, said in (
        (4.0, 0.0, "Almost no protection of the most exposed record can be shown."),
        (4.0, 1.2, "Little protection of most records can be shown, and almost no protection of the most exposed"),
        (4.0, 4.0, "Almost no protection of any record can be shown."),
        (0.5, 0.5, "Suppose that"),
    ):
        each = torch.full_like(leakage.nats, others)
        each[:, 5] = nats
        weaker = replace(run, mechanism={**run.mechanism, "noise_multiplier": 0.45})  # allows that much
        view = View(weaker, replace(leakage, nats=each, nats_upper=None))
        first = [s for s in headline(view) if not s.startswith("No meaningful")]
        assert first[0].startswith(said), (nats, others, first, view.protection)


def test_the_largest_chance_leads_where_there_are_no_columns(folder: Path) -> None:
    """Of tokens and images: whatever is worst is said first, be it one token, all of them or the whole record."""
    run, leakage = read_audit(folder)
    kinds = ("removed", "token", "token", "private")
    worlds = [{"name": f"token {k}", "kind": kind, "reference": ""} for k, kind in enumerate(kinds)]
    found = Success(run, replace(leakage, facts={**leakage.facts, "worlds": worlds}))
    assert found.leading is not None
    assert float(found.leading.chances.max()) == max(float(w.chances.max()) for w in found.worlds)


def test_notes_name_the_other_world_and_what_is_not_said(folder: Path) -> None:
    view = View(*read_audit(folder))
    notes = dict(success_notes(view))
    assert view.success.leading is not None
    assert view.success.leading.reference in notes["The 10%"]
    assert notes["The 10%"].startswith("An example, not a finding.")
    assert "with twice the noise" in notes["More noise"]
    assert "How well those are protected is not measured here." in notes["The attacker"]
    assert "estimate" in notes["Most likely"]
    assert (
        notes["Several records"]
        == "A person with several records in the data is protected less than these numbers say."
    )
    above = int((view.success.leading.chances > 0.5).sum())
    assert notes["How many"].startswith(f"From 10%, {above} of 40 records can exceed 50 % in ")
    assert notes["Ranges"].startswith("Some columns’ ranges were read off the data, and so were their middles.")
    declared = {**view.facts, "inferred_ranges": False}
    assert "Ranges" not in dict(success_notes(View(view.run, replace(view.leakage, facts=declared))))


def test_chances_that_the_noise_decides_are_called_proved(folder: Path) -> None:
    """Neither estimates nor limits over runs: nothing that was measured enters them, and nobody is most exposed."""
    run, leakage = read_audit(folder)
    assert leakage.nats is not None
    view = View(run, replace(leakage, nats=torch.full_like(leakage.nats, 1e3), nats_upper=None))
    lead = view.success.leading
    assert lead is not None
    row = lead.row()
    assert row["basis"] == "mechanism"
    assert row["median"] == row["max"] == lead.divergences.mechanism_success(0.1)
    said = " ".join(headline(view))
    assert "for half of" not in said
    assert "whatever the method of attack and the data: the noise allows no more, and measuring found no lower" in said
    assert lead.most_exposed() == []
    assert lead.with_twice_the_noise() < lead.divergences.mechanism_success(0.1)


def test_a_weak_guarantee_comes_first(tmp_path: Path) -> None:
    weak = run_audit(auditing.people(), auditing.options(noise_multiplier=0.01, runs=1), tmp_path / "a", show=False)
    assert headline(View(*read_audit(weak)))[0].startswith("No meaningful guarantee")


def test_without_fisher_information_the_page_has_the_chances_only(folder: Path) -> None:
    run, leakage = read_audit(folder)
    nothing = torch.zeros(0, leakage.dfil.shape[1], dtype=torch.float64)
    facts = {**leakage.facts, "rules": []}
    none = {"kept_diagonal": None, "average_diagonal": None, "diagonal": None, "diagonal_of": None, "upper": None}
    bare = replace(leakage, dfil=nothing, error=nothing, facts=facts, guess=torch.zeros(0), **none)
    page = confidential_page(run, bare).decode()
    assert 'id="success"' in page
    for part in ("unbiased", "floors", "certainty", "records", "features", "threshold", "growth"):
        assert f'id="{part}"' not in page
    assert "unbiased attacker errs" not in page
    first = headline(View(run, bare))
    assert first[-3].startswith(INFERRED)
    assert first[-1].startswith("Averaged over the records, a guess of ")  # by divergences


def table_rows(page: str) -> list[list[str]]:
    """Returns the numbers in each row of the table of chances."""
    table = page[page.index('<section id="success">') :]
    rows = table[: table.index("</table>")].split("<tr>")[2:]
    return [re.findall(r'<td class="n">([^<]*)</td>', row) for row in rows]


def test_numbers_without_a_limit_say_estimate_themselves(folder: Path) -> None:
    """On the page, in lists and in facts of a record; no number at a limit, or that the mechanism allows, does."""
    run, leakage = read_audit(folder)
    assert leakage.nats is not None
    small = 1e-3 * leakage.nats  # far from what the mechanism allows
    once = replace(leakage, nats=small, nats_upper=None)
    page = confidential_page(run, once).decode()
    rows = table_rows(page)
    assert len(rows) == 4
    assert all(cell.endswith("% (estimate)") for row in rows for cell in row)
    most = re.findall(r"<li>[^<]*: ([^<]*)</li>", page[page.index('id="success-most"') :].partition("</ul>")[0])
    assert len(most) == 10
    assert all(text.endswith("% (estimate)") for text in most)
    assert "most exposed, estimate</div>" in page
    assert record_facts(once, run, 3)["success_estimates"] == [w.name for w in View(run, once).success.worlds]

    upper = 2 * small
    sure = replace(once, nats_upper=upper)
    assert "(estimate)" not in str(table_rows(confidential_page(run, sure).decode()))
    assert record_facts(sure, run, 3)["success_estimates"] == []

    upper = upper.clone()
    upper[1, 7], small[1, 7] = torch.inf, 10 * upper[1].max()  # age of one record has an estimate, the largest of all
    some = replace(once, nats=small, nats_upper=upper)
    page = confidential_page(run, some).decode()
    assert [["(estimate)" in cell for cell in row] for row in table_rows(page)] == [
        [False] * 3, [False, True, True], [False] * 3, [False] * 3,
    ]  # fmt: skip
    small[1, 7] = 0.0  # below all others: the half of the records with the lowest limits is named, not this one
    found = Success(run, replace(some, nats=small))
    row, age = found.worlds[1].row(), np.sort(found.worlds[1].chances)
    assert row["median"] == age[20] > age[19]
    assert row["estimates"] == ["p99", "max"]


def test_half_of_the_records_is_an_estimate_where_fewer_have_a_limit(folder: Path) -> None:
    run, leakage = read_audit(folder)
    assert leakage.nats is not None
    upper = 1e-3 * leakage.nats.clone()
    upper[1, :21] = torch.inf  # 19 of 40 have limits
    found = Success(run, replace(leakage, nats=1e-3 * leakage.nats, nats_upper=upper))
    assert found.worlds[1].row()["estimates"] == ["median", "p99", "max"]
    whole = Success(run, replace(leakage, nats=torch.full_like(leakage.nats, 1e3), nats_upper=None))
    assert whole.worlds[1].row()["estimates"] == []  # the mechanism's own


def test_floors_of_columns_say_estimate_themselves(folder: Path) -> None:
    page = (folder / REPORT).read_text()
    table = page[page.index('<section id="features">') :]
    cells = re.findall(r'<td class="n">(±.*?)</td>', table[: table.index("</table>")])
    assert len(cells) == 6  # average record, most exposed record, guess; of two columns
    said = [cell.split("</div>")[0].endswith('<div class="unit">estimate') for cell in cells]
    assert said == [True, True, False] * 2
