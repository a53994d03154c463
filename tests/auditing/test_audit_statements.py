"""Statements of an audit's pages: numbers against exact Jacobians, missing guarantees, and what is secret."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_audit import run_diagonal

import auditing
from pages import certainty_text, view_of
from reconbound import report
from reconbound._internal.formatting import format_limit
from reconbound.auditing.options import settle
from reconbound.auditing.priors import baseline_of
from reconbound.auditing.run import floors_of, run_audit, train
from reconbound.cli.app import run as command
from reconbound.cli.audit import describe_audit
from reconbound.cli.options import one_line
from reconbound.data import load_dataset
from reconbound.mechanisms.base import Protection
from reconbound.report import records, text
from reconbound.report.folder import CHOSEN_SEED, PUBLIC_REPORT, REPORT, Run, read_leakage, read_run
from reconbound.report.formats import guess_error, plus_minus
from reconbound.report.headline import (
    accuracy_sentence,
    any_attacker_sentences,
    conditional,
    headline,
    public_headline,
    unbiased_finding,
)
from reconbound.report.view import View

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statements") / "people"
    return run_audit(auditing.people(), PLAN, folder, show=False)


PLAN = auditing.options(runs=8, steps=4, budget=4.0)  # every step is measured, and every step's parameters are kept


def test_floors_match_dense_jacobians_of_the_trajectory(done: Path) -> None:
    """Dense Jacobians at the kept parameters of all steps of all runs, with the exact factors, against what is told."""
    people, leakage = auditing.people(), read_leakage(done)
    measured = train(people, settle(done, people, PLAN), done)
    records = torch.cat([leakage.kept[:1], torch.tensor([3, 17]), leakage.kept[-1:]])
    exact = sum(run_diagonal(measured, people, run, records) for run in range(8)) / 8
    dfil, error = leakage.dfil[0, records], leakage.error[0, records]
    assert bool(((dfil - exact.mean(1)).abs() < 5 * error).all())
    assert bool((error < 0.2 * dfil).all())
    floors = np.array([120.0, 1e5]) / exact[0].sqrt().numpy()
    page = (done / REPORT).read_text()
    shown = {"age": r"age: .*?lowest ±([\d,.]+) years", "income": r"income: .*?lowest ±([\d,.]+) \$"}
    for floor, pattern in zip(floors, shown.values(), strict=True):
        found = re.search(pattern, page)
        assert found is not None
        assert float(found.group(1).replace(",", "")) == pytest.approx(floor, rel=5 * 0.5 * (2 / (16 * 32)) ** 0.5)
    guess = float(view_of(done).guess_each[0])
    assert guess == pytest.approx(120 * float(people.inputs[:, 0].std()), rel=1e-5)
    assert f"below a guess (±{format_limit(guess)} years)" in page
    view = View(read_run(done), leakage)
    assert view.floor[int(leakage.kept[0])] == pytest.approx(float(dfil[0]) ** -0.5)


def test_public_page_names_what_voids_the_guarantee(done: Path, tmp_path: Path) -> None:
    """A range read off the data (the income's), a seed that somebody chose."""
    found, page = read_run(done), (done / PUBLIC_REPORT).read_text()
    assert found.data["inferred_ranges"] is True
    assert found.training["seed_from"] == CHOSEN_SEED
    assert 'id="caveats"' in page
    assert text.INFERRED in page
    condition = "If every range were known without the data (here income was read off it): who can rebuild a record"
    assert found.headline[0].startswith(condition)  # run.json
    assert f'<p class="verdict">{condition}' in page
    assert "a seed that nobody else knows" not in page + (done / REPORT).read_text()
    people = auditing.people()
    sound = replace(people, features=tuple(replace(f, declared=True) for f in people.features))
    clean = run_audit(sound, PLAN.with_changes(seed=None, runs=1, steps=2), tmp_path / "a", show=False)
    page = (clean / PUBLIC_REPORT).read_text()
    assert read_run(clean).data["inferred_ranges"] is False
    assert read_run(clean).training["seed_from"] == "the operating system"
    assert 'id="caveats"' not in page
    assert list(read_run(clean).headline) == public_headline(read_run(clean))
    assert read_run(clean).headline[0].startswith("Who can rebuild a record")
    assert "--range" not in page
    assert "a seed that nobody else knows" in page


def test_headline_names_inferred_ranges(done: Path) -> None:
    """Public columns and the target are not named."""
    found = read_run(done)

    def changed(**changes: object) -> Run:
        return replace(found, data={**found.data, **changes})

    declared = {"age": [0, 1], "income": [0, 1]}
    assert "(here some were read off it)" in public_headline(changed(ranges=declared))[0]
    assert "(here age, income were read off it)" in public_headline(changed(ranges={}))[0]
    assert "(here a, b, c and 2 more were" in public_headline(changed(private=list("abcde"), ranges={}))[0]
    assert " on the private column; on other records" in any_attacker_sentences(changed(features=1))[0]
    floors = conditional(found, any_attacker_sentences(found))
    assert floors[0].startswith("If every range were known without the data (here income was read off it): for every")
    bounds = [b for b in found.guarantee["bounds"] if b["name"] == "rate_distortion"]
    average = replace(found, guarantee={**found.guarantee, "bounds": [{**bounds[0], "rmse": 0.3}]})
    assert any_attacker_sentences(average) == [
        "For every attacker there is some conceivable record on which it errs by at least ±0.3 of the range on average "
        "over the columns; on other records, those trained on included, it may err by less."
    ]


def topic(pairs: list[tuple[str, str]], name: str) -> str:
    return next(sentence for about, sentence in pairs if about == name)


def test_report_states_release_public_data_and_record_choice(done: Path) -> None:
    found = read_run(done)
    public = text.public_assumptions(found, "record", "column")
    own = text.assumptions(View(found, read_leakage(done)))
    for pairs in (public, own):
        assert topic(pairs, "Release").startswith("The first of 8 runs, fixed beforehand")
        assert "two or more models" in topic(pairs, "Release")
    assert "How many records" in topic(public, "Taken as public")
    assert "each image’s class" in topic(text.public_assumptions(found, "image", "pixel"), "Taken as public")
    assert "chosen by looking at results" in topic(public, "Not covered")
    assert "settings that were chosen by looking at results" in topic(own, "Not covered")
    assert "were picked by these estimates" in topic(own, "Estimate")
    assert topic(own, "What a floor is").count("the tables above show which.") == 1
    whole = View(found, replace(read_leakage(done), kept_diagonal=None, average_diagonal=None))
    assert topic(text.assumptions(whole), "What a floor is").count("not measured with this sampler.") == 1
    one = Run(found.data, {**found.mechanism, "runs": 1}, found.training, found.guarantee)
    assert topic(text.public_assumptions(one, "record", "column"), "Release").startswith("The one run.")


def test_unmeasured_records_are_named(done: Path) -> None:
    view = View(read_run(done), read_leakage(done))
    measured = view.leakage.measured.clone()
    measured[:7] = 0
    safe = replace(view.leakage, dfil=view.leakage.dfil / 1e6, upper=None, measured=measured)
    sentence = unbiased_finding(View(view.run, safe))[-1]
    assert sentence.startswith(
        "These are estimates; 7 of 40 records were never measured, and nothing is known about them"
    )
    bad = safe.dfil.clone()
    bad[:, 10:12] = 1e6
    together = dict(text.certainty(View(view.run, replace(safe, dfil=bad))))
    assert "is below a guess for 9 of 40 records (22 %)" in together["All columns together"]
    assert together["Never measured"].startswith("7 records of 40 were never measured.")
    whole = replace(safe, dfil=bad, kept_diagonal=None, diagonal=None)  # single columns are unknown
    assert "9 of 40 records (22 %), the release may tell" in unbiased_finding(View(view.run, whole))[0]
    assert "7 of them were never measured" in unbiased_finding(View(view.run, whole))[0]
    none = replace(whole, guess=torch.zeros(2))  # a guess that never errs: nobody is below it
    assert unbiased_finding(View(view.run, none))[0].startswith("7 of 40 records were never measured")


def test_one_private_column_has_one_floor_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger's: in verdict, cards, columns, counts, terminal and JSON, in the column's own unit."""
    people = auditing.people()
    one = replace(people, features=(people.features[0], *(replace(f, private=False) for f in people.features[1:])))
    folder = run_audit(one, auditing.options(runs=5, noise_multiplier=0.3, budget=4.0), tmp_path / "a", show=False)
    run, leakage = read_run(folder), read_leakage(folder)
    view = View(run, leakage)
    assert bool((leakage.measured > 0).all())
    assert torch.equal(leakage.diagonal[:, 0], leakage.dfil[0])
    assert torch.equal(leakage.kept_diagonal[:, 0], leakage.dfil[0, leakage.kept])
    assert view.of_range == "years"
    for i in range(40):
        facts = report.record_facts(leakage, run, i)
        assert (
            facts["floor_estimate"]
            == facts["columns"][0]["floor_estimate"]
            == pytest.approx(120 / float(leakage.dfil[0, i]) ** 0.5)
        )
        assert facts["unit"] == "± years"
        assert facts["guess"] == facts["columns"][0]["guess"]
        assert facts["floor_below_guess"] == ((facts["floor_lower_limit"] or facts["floor_estimate"]) < facts["guess"])
    below, worst = view.below(view.guess), int(leakage.kept[0])
    [age] = view.columns
    assert 0 < below <= 40
    estimated = int((view.floor < view.guess).sum())
    assert (age["below"], age["record"], age["lowest"]) == (estimated, worst, float(view.floor[worst]))
    shown, limit = plus_minus(float(view.floor[worst])), plus_minus(float(view.upper_floor[worst]))
    first, second = unbiased_finding(view)[-2:]
    assert first.startswith(f"For {below} of 40 records")
    assert f"On the most exposed record it errs by at least {limit} years, at 95 % confidence" in second
    assert f"guessing the average errs by {guess_error(view.guess)}" in second
    assert f"row {worst}: floor at least {limit} years at 95 % confidence (estimate {shown})" in certainty_text(view)
    card = records.cards(view)["most"][0]
    assert (card["floor"], card["columns"][0]["floor"]) == (limit, shown)
    assert command(["show", str(folder), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["floors_estimate"]["lowest"] == reported["columns"][0]["lowest"]
    assert reported["most_exposed"][0]["floor_estimate"] == reported["columns"][0]["lowest"]
    assert reported["floors_lower_limit"]["lowest"] <= reported["most_exposed"][0]["floor_lower_limit"]
    assert (reported["below_guess"], reported["columns"][0]["below"]) == (below, estimated)
    assert reported["unit"] == "± years"


def test_diagonals_have_the_ledgers_level(done: Path) -> None:
    leakage = read_leakage(done)
    torch.testing.assert_close(leakage.diagonal.double().mean(1), leakage.dfil[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(leakage.kept_diagonal.mean(1), leakage.dfil[0, leakage.kept], rtol=1e-12, atol=0)
    mean = leakage.diagonal.double().mean(0)
    torch.testing.assert_close(leakage.average_diagonal, mean, rtol=1e-6, atol=0)


def test_weak_results_are_named(done: Path, tmp_path: Path) -> None:
    people, view = auditing.people(), View(read_run(done), read_leakage(done))
    share = float((people.test_targets == np.bincount(people.targets).argmax()).mean())
    assert view.facts["accuracy_baseline"] == pytest.approx(share)
    assert f"(majority class: {100 * share:.1f} %)." in accuracy_sentence(view)
    poor = View(view.run, replace(view.leakage, accuracy=torch.tensor([share])))
    assert "no better than that" in accuracy_sentence(poor)
    number = SimpleNamespace(task="number", targets=people.inputs[:, 0], test_targets=people.test_inputs[:, 0])
    miss = np.square(number.test_targets - number.targets.mean()).mean() / number.test_targets.var()
    assert baseline_of(number) == pytest.approx(1 - miss, rel=1e-5)
    assert baseline_of(replace(people, test_inputs=people.inputs[:0], test_targets=people.targets[:0])) is None
    ten, none, much = (Protection(0.5, epsilon=epsilon) for epsilon in (10.0, None, 33.24))
    assert text.weaknesses(30, ten, "record") == text.weaknesses(40, none, "record") == []
    few, epsilon = text.weaknesses(29, much, "record")
    assert few.startswith("Only 29 training records: ")
    assert epsilon.startswith("ε = 33.3 is weak differential privacy")
    for public in (PUBLIC_REPORT, "run.json"):
        assert "baseline" not in (done / public).read_text()
        assert "majority class" not in (done / public).read_text()


def test_missing_values_are_not_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{'' if i % 2 else i + 20},{rng.integers(0, 9)},{'ab'[i % 3 == 0]}" for i in range(20)]
    (tmp_path / "t.csv").write_text("age,hours,kind\n" + "\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="read off"):
        table = load_dataset(tmp_path / "t.csv", target="kind", private="age", ranges={"age": (0, 120)})
    folder = run_audit(table, auditing.options(runs=1, steps=2), tmp_path / "a", show=False)
    run, leakage = read_run(folder), read_leakage(folder)
    assert leakage.facts["public_names"] == ["age (missing)", ""]
    known = table.inputs[table.inputs[:, 1] == 0, 0]  # guessing errs by more than with the missing ones in the middle
    assert float(leakage.guess[0]) == pytest.approx(float(known.var()), rel=1e-5)
    seen = 0
    for record in leakage.kept.tolist():
        age = report.record_facts(leakage, run, record)["columns"][0]["value"]
        missing = table.inputs[record, 1] == 1
        assert (age is None) == missing
        assert missing or age == pytest.approx(120 * float(table.inputs[record, 0]), rel=1e-6)
        seen += missing
    assert 0 < seen < len(leakage.kept)
    missing = torch.from_numpy(table.inputs[:, 1] == 1)
    assert torch.equal(leakage.diagonal.isnan()[:, 0], missing)
    assert bool(leakage.average_diagonal.isfinite().all())
    [age] = View(run, leakage).columns
    assert (age["of"], age["missing"]) == (int((~missing).sum()), int(missing.sum()))
    lacks = int(missing.nonzero()[0])
    assert np.isnan(View(run, leakage).feature_floors(lacks)).all()
    assert "years" not in headline(View(run, leakage))[0]
    assert run.data["public"] == ["hours"]
    assert (folder / PUBLIC_REPORT).read_text().count("hours") == 1  # its name, and no range


def test_show_names_secrecy_and_next_command(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spaced = done.parent / "an audit"
    spaced.symlink_to(done)
    assert command(["show", str(spaced)]) == 0
    reported = capsys.readouterr()
    assert f"reconbound show '{spaced}' --record" in " ".join(reported.out.split())
    assert "keep it as secret as the data" in reported.err


def test_narrow_ascii_terminal(done: Path) -> None:
    record = int(read_leakage(done).kept[0])
    script = f"import sys; sys.argv = ['reconbound', 'show', {str(done)!r}, '--record', '{record}']; "
    script += "from reconbound.__main__ import main; main()"
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {"PATH": "", "PYTHONPATH": source, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "30"}
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment, timeout=120, check=True
    ).stdout.decode("ascii")
    assert "\x1b" not in shown
    assert "..." not in shown
    assert "record" in shown


def test_errors_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line("no\x1b[31m.csv\n does not exist ±") == "no?[31m.csv does not exist ±"
    assert command(["audit", "no\x1b[31m.csv", "--target", "x"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(("sampler", "rate", "real"), [("fixed", 0.001, 1 / 40), ("shuffle", 0.31, 12 / 40)])
def test_printed_rate_is_the_used_rate(tmp_path: Path, sampler: str, rate: float, real: float) -> None:
    """Batches of a fixed size are whole: a rate below one record in N would promise too much."""
    people, options = auditing.people(), auditing.options(sampler=sampler, sample_rate=rate, runs=1, steps=2)
    lines = " ".join(describe_audit(people, options, tmp_path / "a", fresh=False))
    found = read_run(run_audit(people, options, tmp_path / "a", show=False))
    assert found.mechanism["sample_rate"] == pytest.approx(real)
    assert f"sample rate {real:.3g}" in lines
    assert f"ε = {format_limit(found.guarantee['epsilon'])} (replace-one)" in lines
    assert floors_of(people, options).to_dict() == found.guarantee
