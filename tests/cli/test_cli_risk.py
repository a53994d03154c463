"""Risks on the command line: reconbound bound's table, JSON and curve."""

import json
import re
import subprocess
import sys

import pytest

from calling import check_refused
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.group import group_of
from reconbound.mechanisms.risk import risks

SGD = ["--sample-rate", 0.01, "--steps", 1000, "--clip", "hard", "--sampler", "poisson"]
ADD, REPLACE = "add/remove", "replace-one"


def test_bound_prints_and_lists_the_risks(answer, run):
    mechanism = SampledGaussian(1.0, 0.01, 1000, clip="hard")
    found = answer("bound", "--noise-multiplier", 1, *SGD)["risks"]
    assert list(found) == [ADD, REPLACE]
    for adjacency, facts in found.items():
        same = risks(mechanism, adjacency)
        assert {name: value for name, value in facts.items() if name != "curve"} == same.to_dict()
        assert facts["curve"]["fpr"][0] == 1e-10
        assert len(facts["curve"]["tpr"]) == 101
        assert facts["tpr"][-1]["fpr"] == 1e-10
    status, out, err = run("bound", "--noise-multiplier", 1, *SGD)
    assert (status, err) == (0, "")
    text = " ".join(re.sub("[│┃]", " ", out).split())
    assert "The most that any attacker can reach, by neighbours" in text
    assert "advantage of a test 16.2% 26.5%" in text  # 0.16102 and 0.26437, rounded up
    assert "TPR at FPR 1% 2.92% 4.96%" in text
    assert "0.475 (0.014) 0.688 (0.0024)" in text


def test_bound_takes_a_rate_a_chance_and_a_group(answer, run):
    options = ["--noise-multiplier", 1, *SGD, "--fpr", "1/1000", "--blind-chance", "1/50257", "--group", 2]
    mechanism = group_of(SampledGaussian(1.0, 0.01, 1000, clip="hard"), 2)
    found = answer("bound", *options)
    assert found["mechanism"]["group"] == 2
    assert found["epsilon"] == mechanism.epsilon_at(1e-5)
    success = found["risks"][ADD]["success"][-1]
    assert success == {"baseline": 1 / 50257, "success": mechanism.trade_off(ADD).tpr(1 / 50257)}
    out = run("bound", *options)[1]
    assert "for 2 rows of one person" in " ".join(out.split())
    assert "TPR at FPR 0.1%" in " ".join(re.sub("[│┃]", " ", out).split())
    assert "rebuilt, blindly 0.00199%" in out


def test_only_known_neighbours_have_a_column(answer, run):
    assert list(answer("bound", "--noise-multiplier", 1, *SGD[:-1], "fixed")["risks"]) == [REPLACE]
    assert list(answer("bound", "--epsilon", 1, "--adjacency", ADD)["risks"]) == [ADD, REPLACE]
    assert list(answer("bound", "--epsilon", 1, "--adjacency", REPLACE)["risks"]) == [REPLACE]
    shown = run("bound", "--epsilon", 900, "--adjacency", REPLACE)[1]
    assert re.search(r"μ of Gaussian DP.* none", shown)


def test_curve_is_a_page_that_needs_no_network(run, tmp_path):
    page = tmp_path / "curve.html"
    status, out, err = run("bound", "--noise-multiplier", 1, *SGD, "--curve", page)
    assert (status, err) == (0, "")
    assert str(page) in out.replace("\n", "")
    text = page.read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', text)
    figure = json.loads(re.search(r'"curve",\s*(\[\{.*?\}\]),\s*\{"', text, re.DOTALL)[1])
    assert [line["name"].partition(":")[0] for line in figure] == [ADD, REPLACE, "a guess"]
    curve = SampledGaussian(1.0, 0.01, 1000, clip="hard").trade_off(ADD)
    assert figure[0]["x"][0] == 1e-10
    assert figure[0]["y"] == pytest.approx([curve.tpr(x) for x in figure[0]["x"]])
    assert run("bound", "--noise-multiplier", 2, *SGD, "--curve", page)[0] == 0  # its own page is written anew
    page.write_text("notes")
    check_refused(*run("bound", "--noise-multiplier", 1, *SGD, "--curve", page))
    assert page.read_text() == "notes"
    check_refused(*run("bound", "--noise-multiplier", 1, *SGD, "--curve", tmp_path))


def test_a_million_steps_without_torch():
    """The loss distributions of a million steps, the table and JSON, without torch."""
    code = (
        "import sys; from reconbound.cli.app import run\n"
        "assert run(['bound', '--noise-multiplier', '20', '--sample-rate', '0.001', '--steps', '1e6']) == 0\n"
        "assert 'torch' not in sys.modules and 'plotly' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
