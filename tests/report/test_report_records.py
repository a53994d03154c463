"""Single records and columns in a report."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from pages import Elements, hostile, meaningful, page_of, view_of
from reconbound import report
from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_limit
from reconbound.report import advice, charts, columns, records, thumbnails, verdicts, words
from reconbound.report.figures import for_plotly, plus_minus
from reconbound.report.folder import read_leakage, read_run
from reconbound.report.view import View


def test_thumbnails_are_the_records_pixels() -> None:
    from io import BytesIO

    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    for shape in ((5, 7), (4, 6, 3), (3, 2, 4)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        np.testing.assert_array_equal(np.asarray(image.open(BytesIO(thumbnails.png(pixels)))), pixels)
    colour = rng.random((3, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(thumbnails.picture(colour)[1, 2], np.round(255 * colour[:, 1, 2].astype(float)))


def test_leakage_maps_are_bright_at_most_information() -> None:
    information = np.array([[[1e-3, 1.0], [1e3, 0.0]]])
    ends = thumbnails.heat_range(information)
    colours = thumbnails.heat(information[0], ends).astype(int)
    light = colours[..., :3].sum(-1)
    assert light[1, 0] > light[0, 1] > light[0, 0] == light[1, 1]
    part = thumbnails.pixel_information(np.array([[4.0, 2.0]]), (2, 1, 2), np.array([0, 2]))
    np.testing.assert_array_equal(part, [[[3.0, np.nan]]])
    assert thumbnails.heat(part[0], (0.0, 1.0))[0, 1, 3] == 0


def test_record_facts_are_the_leakage_files(people: Path) -> None:
    run, leakage = read_run(people), read_leakage(people)
    record = int(leakage.kept[1])
    found = report.record_facts(leakage, run, record)
    dfil = float(leakage.dfil[0, record])
    assert found["floor_estimate"] == pytest.approx(dfil**-0.5, rel=1e-12)
    assert found["rank"] == 2
    assert found["floor_lower_limit"] is None
    age = next(c for c in found["columns"] if c["name"] == "age")
    assert age["value"] == pytest.approx(120 * float(leakage.kept_inputs[1, 0]), rel=1e-6)
    assert age["floor_estimate"] == pytest.approx(120 / math.sqrt(float(leakage.kept_diagonal[1, 0])), rel=1e-6)
    json.dumps(found, allow_nan=False)
    assert "columns" not in report.record_facts(leakage, run, int(leakage.dfil[0].argsort()[100]))
    for bad in (-1, 200, 1.5, "x"):
        with pytest.raises(InputError, match="record"):
            report.record_facts(leakage, run, bad)


def test_record_table_shows_markup_as_text(people: Path) -> None:
    run, leakage = hostile(people)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.record_table(report.record_facts(leakage, run, int(leakage.kept[0]))))
    told = console.export_text()
    console.file.close()
    assert "[red]" in told
    assert "errs by about" in told
    assert "an estimate, more often too high" in told
    unseen = replace(leakage, measured=torch.zeros_like(leakage.measured))
    console = Console(width=100)
    with console.capture() as drawn:
        console.print(report.record_table(report.record_facts(unseen, run, 3)))
    assert "never measured" in drawn.get()


def test_cards_are_the_records_kept_in_order(digits: Path) -> None:
    view = view_of(digits)
    found = records.cards(view)
    assert [card["record"] for card in found["most"] + found["least"]] == view.leakage.kept.tolist()
    floors = view.floor[[card["record"] for card in found["most"]]]
    assert floors.tolist() == sorted(view.floor)[:6]
    none = replace(view.leakage, upper=torch.full_like(view.leakage.upper, torch.inf))
    assert records.cards(View(view.run, none))["most"][0]["kind"] == "estimate, no confidence limit"
    card, worst = found["most"][0], int(view.leakage.kept[0])
    assert (card["kind"], card["floor"]) == ("at 95 % confidence", plus_minus(float(view.upper_floor[worst])))
    assert card["estimate"] == f"estimate {plus_minus(float(view.floor[worst]))}, "


def test_columns_are_counted_over_all_records_on_the_page(people: Path) -> None:
    view = view_of(people)
    rng = np.random.default_rng(0)
    information = torch.from_numpy(rng.uniform(0.2, 5, (view.records, 6)) / view.leakage.guess.numpy()).float()
    information[:7, 1] = torch.nan
    found = View(view.run, replace(view.leakage, diagonal=information))
    best = information.double()
    best[view.leakage.kept] = view.leakage.kept_diagonal
    floors = view.scale / np.sqrt(best.numpy())
    page = Elements(report.confidential_page(found.run, found.leakage).decode()).text
    for j, c in enumerate(columns.counts(found)):
        below, of = int((floors[:, j] < view.guess_each[j]).sum()), int(np.isfinite(floors[:, j]).sum())
        assert (c["below"], c["of"]) == (below, of)
        assert 0 < below < of
        assert f"{below} of {'the ' if j == 1 else ''}{of} records" in columns.sentence(c)
        assert columns.sentence(c) in page
    figure_ = charts.by_feature(found).figure
    told = " ".join(text for trace in figure_["data"] for text in trace["hovertext"])
    assert for_plotly(columns.sentence(columns.counts(found)[0]), 160) in told
    assert "of all records" in columns.note(found)


def test_one_column_is_spoken_of_as_one(people: Path) -> None:
    view = view_of(people)
    facts = {
        n: v[:1] if n in ("scale", "offset", "units", "feature_names", "private") else v for n, v in view.facts.items()
    }
    own = {"kept_diagonal": view.leakage.kept_diagonal[:, :1], "average_diagonal": view.leakage.average_diagonal[:1]}
    one = View(view.run, replace(view.leakage, guess=view.leakage.guess[:1], facts=facts, **own))
    told = " ".join([*verdicts.verdict(one), *advice.for_records(one), *(text for _, text in words.assumptions(one))])
    assert "private columns" not in told
    assert "all columns together" not in told
    assert "single column" not in told
    two = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    two.kept_diagonal[view.places[view.worst], 0] = 1e4
    told = advice.for_records(View(meaningful(view.run), two))[0]
    assert "To lift the one column of some records that lies below a guess to the error of a guess" in told


def test_single_columns_below_a_guess_are_not_passed_over(people: Path) -> None:
    """The whole record may be safe on average and one of its columns not: the verdict says so."""
    view = view_of(people)
    protected = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    run = meaningful(view.run)
    none = verdicts.verdict(View(run, protected))
    assert none[1].startswith(
        "By estimates, an unbiased attacker’s floor is above the error of a guess in every column"
    )
    assert none[2].startswith(
        "On every one of the 200 records an unbiased attacker errs by at least as much as a guess"
    )
    place = view.places[view.worst]
    diagonal = protected.kept_diagonal.clone()
    diagonal[place, :2] = 1e4  # ±1 % of the range
    exposed = verdicts.verdict(View(run, replace(protected, kept_diagonal=diagonal)))
    assert "at least one column lies below the error of a guess for 1 of the 8 records looked at (12 %)" in exposed[1]
    assert exposed[1].endswith("more about it than a guess does: age 1, education-num 1.")
    assert "a mean that hides the columns which are exposed" in exposed[2]
    tiles = {t["title"]: t for t in records.glance(View(view.run, replace(protected, kept_diagonal=diagonal)))}
    assert tiles["Unbiased floor below a guess on at least one column"]["below"] == "1 of 8 records looked at"
    assert tiles["Unbiased floor below a guess over all columns"]["below"] == "0 of 200 records"
    assert "±1.2 years on age" in exposed[0]
    told = advice.for_records(View(run, replace(protected, kept_diagonal=diagonal)))[0]
    ratio = max(math.sqrt(float(g)) for g in view.leakage.guess[:2]) / 0.01
    assert f"try a noise multiplier of about {format_limit(3 * ratio)} (now 3): an estimate" in told
    assert "for unbiased attackers is above the error of a guess" in advice.for_records(View(run, protected))[0]
    assert advice.for_records(view)[0].startswith("First of all more noise")  # the mechanism guarantees little


def test_floors_beyond_range_and_units_shown_once(people: Path) -> None:
    view = view_of(people)
    diagonal = view.leakage.kept_diagonal.clone()
    diagonal[:, 4] = 0.39  # ±160 of 100 hours
    facts = {**view.facts, "feature_names": ["age (years)", *view.facts["feature_names"][1:]]}
    wide = View(view.run, replace(view.leakage, kept_diagonal=diagonal, facts=facts))
    hours = columns.counts(wide)[4]
    assert "±160 hours (record" in columns.sentence(hours)
    assert columns.sentence(hours).endswith("more than the whole range")
    card = {row["name"]: row for row in records.cards(wide)["most"][0]["columns"]}
    assert (card["hours-per-week"]["beyond"], card["hours-per-week"]["unit"]) == (True, "hours")
    assert (card["age (years)"]["beyond"], card["age (years)"]["unit"]) == (False, "")
    page = Elements(page_of(wide.run, wide.leakage)).text
    assert page.count("over the range") >= 5
    console = Console(width=200)
    with console.capture() as told:
        console.print(report.record_table(report.record_facts(wide.leakage, wide.run, int(wide.leakage.kept[0]))))
    assert "more than the whole range" in told.get()
    first = verdicts.verdict(View(view.run, replace(view.leakage, kept_diagonal=diagonal * 0 + 0.39)))[1]
    assert first.count("more than the whole range") == 1  # of all that are named: once
    diagonal[:, 0] = 1e4
    few = verdicts.verdict(View(view.run, replace(view.leakage, kept_diagonal=diagonal * (diagonal > 1e3) + 0.39)))[1]
    assert few.count("; more than the whole range)") == 2  # of those of which it is so


def test_harmonic_mean_is_named(people: Path) -> None:
    """d/Tr I ≤ mean of 1/I_jj: a record's floor is no more than the root mean square of its columns'."""
    view = view_of(people)
    for record in view.leakage.kept.tolist():
        shares = view.feature_floors(record) / view.scale
        trace = float(view.looked_at[1][view.looked_rows[record]].sum())
        assert (view.features / trace) ** 0.5 <= np.sqrt(np.square(shares).mean())
    told = dict(words.assumptions(view))["What a floor is"]
    assert "harmonic mean of their squares 1/I_jj" in told
