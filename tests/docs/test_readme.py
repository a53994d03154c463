"""The README and the calculator's guide as a newcomer uses them: code runs, commands print what is shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from reconbound import DP, SampledGaussian, guarantee
from reconbound._internal.formatting import format_floor
from reconbound.cli import app as cli
from reconbound.cli.options import option_names

pytestmark = pytest.mark.slow

HOME = Path(__file__).resolve().parents[2]
CALCULATOR = "docs/tutorials/calculator.md"
PAGES = ["README.md", CALCULATOR]


def blocks(page: str, kind: str) -> list[str]:
    """The page's blocks of one kind; all kinds are matched, so that no block's end is taken for another's beginning."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (HOME / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for own, block in found if own == kind]


def run_script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "blocks.py"
    script.write_text(code, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def assert_shown(shown: str, printed: str) -> None:
    """Asserts that the lines shown were printed, in this order; "..." stands for any number of lines."""
    place = 0
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        found = printed.find(part, place)
        assert found >= 0, part
        place = found + len(part)


def test_calculator_blocks_run_in_order(tmp_path: Path) -> None:
    found = blocks(CALCULATOR, "python")
    assert len(found) >= 2
    done = run_script("\n".join(found), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reconbound" not in done.stderr  # no warning of ours


def test_readme_calculator_prints_what_is_shown(tmp_path: Path) -> None:
    first, _ = blocks("README.md", "python")
    done = run_script(first, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == blocks("README.md", "text")[0]


def test_readme_loop_beside_opacus_is_that_of_the_tutorial() -> None:
    """Compares with docs/tutorials/opacus.md, which test_guide.py runs from its beginning."""
    _, loop = blocks("README.md", "python")
    _, shown = blocks("README.md", "text")
    tutorial = "docs/tutorials/opacus.md"
    assert loop in blocks(tutorial, "python")
    printed = blocks(tutorial, "text")[0]
    assert_shown(shown, printed)
    half, every = re.findall(r"(\d+)%", blocks(tutorial, "text")[1])
    words = " ".join((HOME / "README.md").read_text("utf-8").split())
    assert f"at most {half} % (the better-protected half) or {every} % (all)" in words


def test_readme_audit_prints_what_is_shown(tmp_path: Path, capsys, monkeypatch) -> None:
    """Compares the form of the lines: the noise decides the numbers, and which columns come first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("RECONBOUND_SEED", str(2**100))
    block = next(one for one in blocks("README.md", "") if "reconbound audit wine" in one)
    command, shown = re.fullmatch(r"\$ reconbound (.*)\n((?:.*\n)*)", block).groups()
    assert cli.run(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    column = re.compile(
        r"^  [\w/ ]+: \d+ of 142 records are below a guess \(±\S+.*\); lowest ±\S+.* \(record \d+\)$", re.M
    )
    assert len(column.findall(shown)) == 1 < len(column.findall(printed))
    chance = re.compile(
        r"Suppose that an attacker correctly guesses the [\w/ ]+ of a record with a chance of 10% from a model trained "
        r"on the same data, but with \S+.* in its place\. With the real model the chance is at most [\d.]+% for half "
        r"of the records, [\d.]+% for 99 of 100 and [\d.]+% for the most exposed one, whatever the method of attack; "
        r"these limits are estimates from 3 trainings"
    )
    assert chance.search(" ".join(shown.split()))
    assert chance.search(" ".join(printed.split()))
    accuracy = re.compile(r"^Test accuracy ([\d.]+) % \(majority class: 38\.9 %\)\.\naudit-wine/report\.html$", re.M)
    (stated,), (found,) = accuracy.findall(shown), accuracy.findall(printed)
    assert abs(float(stated) - float(found)) < 20  # 36 test records
    assert (tmp_path / "audit-wine" / "report-public.html").exists()


def test_readme_has_exactly_two_make_commands() -> None:
    """Both exist, and do everything on a fresh machine."""
    lines = [line for block in blocks("README.md", "") for line in block.splitlines() if line.startswith("make ")]
    assert [line.split("#")[0].split() for line in lines] == [["make", "demo"], ["make", "test"]]
    targets = re.findall(r"^(\w+): \$\(READY\)$", (HOME / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test", "docs"} <= set(targets)


def test_readme_is_short() -> None:
    assert len((HOME / "README.md").read_text(encoding="utf-8").split()) <= 650


def command_lines(page: str) -> list[list[str]]:
    """Every `reconbound ...` of the plain blocks, without its comment and prompt."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    plain = [line.removeprefix("$ ").split("  #")[0].strip() for line in lines]
    return [shlex.split(line)[1:] for line in plain if line.startswith("reconbound ")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_are_shown(page: str) -> None:
    found = command_lines(page)
    assert found
    for command, *words in found:
        shown = {word.split("=")[0] for word in words if word.startswith("--")}
        assert shown <= option_names(cli.app, command), command


@pytest.mark.parametrize(("page", "least"), [("README.md", 1), (CALCULATOR, 3)])
def test_command_prints_what_is_shown_under_it(page: str, least: int, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seen = 0
    for block in blocks(page, ""):
        for command, shown in re.findall(r"^\$ reconbound (.*)\n((?:(?!\$ ).+\n)*)", block, re.MULTILINE):
            if command.startswith("audit "):
                continue  # test_readme_audit_prints_what_is_shown
            assert cli.run(shlex.split(command)) == 0
            printed = capsys.readouterr()
            assert printed.err == ""
            assert trimmed(printed.out).startswith(trimmed(shown))
            seen += bool(shown)
    assert seen >= least


def trimmed(text: str) -> str:
    """Without the blanks with which a terminal's lines are filled up."""
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_no_block_shows_what_a_program_prints_without_the_command(page: str) -> None:
    """Otherwise nothing would run it."""
    for block in blocks(page, ""):
        assert block.startswith(("$ reconbound ", "reconbound ", "make ")), block.splitlines()[0]


def test_notes_on_epsilon_and_opacus_sample_rate() -> None:
    def floor(mechanism) -> str:
        return f"±{format_floor(guarantee(mechanism, high=16)['lecam'].rmse)}"

    known = SampledGaussian(1.0, 1 / 29, 300, clip="hard")
    spent = known.epsilon_at(1e-5, adjacency="add/remove")
    single = floor(DP(round(spent, 3), 1e-5, "add/remove"))
    text = (HOME / CALCULATOR).read_text(encoding="utf-8")
    assert all(word in text for word in (floor(known), f"ε = {spent:.3f}", single, "1/len(loader)"))
    wrong = SampledGaussian(1.0, 64 / 1797, 300, clip="hard").epsilon_at(1e-5, adjacency="add/remove")
    assert f"64/1797 would give {wrong:.3f}" in text


def test_floors_of_an_epsilon() -> None:
    """The floors that the README and the calculator's page state for ε = 3.897 at δ = 1e-5 on [0, 16]."""
    known, only = SampledGaussian(1.0, 1 / 29, 300, clip="hard"), DP(3.897, 1e-5, "add/remove")
    page = (HOME / CALCULATOR).read_text(encoding="utf-8")
    rows = {}
    for mechanism in (known, only):
        floors = [guarantee(mechanism, dim=dim, high=16)["rate_distortion"].rmse for dim in (10, 64, 784)]
        rows[mechanism] = [f"±{format_floor(floor)}" for floor in floors]
    assert f"| the mechanism | ±6.75 | {' | '.join(rows[known])} |" in page
    assert f"| only its ε | ±0.324 | {' | '.join(rows[only])} |" in page
    first, second, third = rows[only]
    words = " ".join((HOME / "README.md").read_text(encoding="utf-8").split())
    assert f"any attacker errs by at least {first}, {second} or {third} (a guess: ±8)" in words


@pytest.mark.filterwarnings("ignore")
def test_opacus_samples_and_divides_as_documented() -> None:
    opacus = pytest.importorskip("opacus")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(1797, 2), torch.zeros(1797)), batch_size=64)
    model, engine = torch.nn.Linear(2, 1), opacus.PrivacyEngine()
    kind = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data_loader": loader}
    _, optimizer, private = engine.make_private(**kind, noise_multiplier=1.0, max_grad_norm=1.0)
    assert private.sample_rate == 1 / len(loader) == 1 / 29
    assert optimizer.expected_batch_size == int(1797 / 29) == 61


def test_the_pages_sweeps_do_not_share_a_folder() -> None:
    """A folder holds one sweep: another with other settings is refused, and a reader may run both."""
    seen: dict[str, list[str]] = {}
    for page in ("README.md", "docs/guides/sweep.md"):
        text = (HOME / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:    )?reconbound sweep (.*)", text, re.MULTILINE):
            words = shlex.split(line)
            out = next((words[i + 1] for i, word in enumerate(words) if word in ("-o", "--out")), f"sweep-{words[0]}")
            assert seen.setdefault(out, words) == words, out
    assert {"sweep-twice", "search-digits"} <= set(seen)
