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
from reconbound.cli.errors import option_names

HOME = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/guide-calculator.md"]


def blocks(page: str, kind: str) -> list[str]:
    """The page's blocks of one kind; all kinds are matched, so that no block's end is taken for another's beginning."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (HOME / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for own, block in found if own == kind]


@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("docs/guide-calculator.md", 2)])
def test_python_blocks_run_in_order_from_nothing(page: str, least: int, tmp_path: Path) -> None:
    found = blocks(page, "python")
    assert len(found) >= least
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(found), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "reconbound" not in done.stderr  # no warning of ours
    shown = blocks(page, "text")
    assert all(one in done.stdout for one in shown)
    assert shown or page != "README.md"


def test_the_readme_s_linear_model_is_useful_whatever_the_seed() -> None:
    """What the README says of 20 seeds, and that its model is no coin."""
    page = (HOME / "README.md").read_text(encoding="utf-8")
    block = next(one for one in blocks("README.md", "python") if "PrivateLogisticRegression" in one)
    scores = []
    for seed in range(20):
        names: dict = {}
        exec(block.replace("random_state=2**100", f"random_state={seed}").replace("print(", "str("), names)
        scores.append(names["model"].score(names["X"], names["y"]))
    assert f"seeds the accuracy is {min(scores):.2f} to {max(scores):.2f}" in page
    assert min(scores) > 0.7


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


@pytest.mark.parametrize(("page", "least"), [("README.md", 1), ("docs/guide-calculator.md", 3)])
def test_what_is_shown_under_a_command_is_what_it_prints(page: str, least: int, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seen = 0
    for block in blocks(page, ""):
        for command, shown in re.findall(r"^\$ reconbound (.*)\n((?:(?!\$ ).+\n)*)", block, re.MULTILINE):
            assert cli.run(shlex.split(command)) == 0
            told = capsys.readouterr()
            assert told.err == ""
            assert trimmed(told.out).startswith(trimmed(shown))
            seen += bool(shown)
    assert seen >= least


def trimmed(text: str) -> str:
    """Without the blanks with which a terminal's lines are filled up."""
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_no_block_shows_what_a_program_prints_without_the_command(page: str) -> None:
    """Else nothing would run it."""
    for block in blocks(page, ""):
        assert block.startswith(("$ reconbound ", "reconbound ", "make ")), block.splitlines()[0]


def test_what_is_said_of_epsilon_alone_and_of_opacus_sample_rate() -> None:
    def floor(mechanism) -> str:
        return f"±{format_floor(guarantee(mechanism, high=16)['lecam'].rmse)}"

    known = SampledGaussian(1.0, 1 / 29, 300, clip="hard")
    spent = known.epsilon_at(1e-5, adjacency="add/remove")
    alone = floor(DP(round(spent, 3), 1e-5, "add/remove"))
    for page in PAGES:
        text = (HOME / page).read_text(encoding="utf-8")
        assert all(word in text for word in (floor(known), f"ε = {spent:.3f}", alone, "1/len(loader)")), page
    wrong = SampledGaussian(1.0, 64 / 1797, 300, clip="hard").epsilon_at(1e-5, adjacency="add/remove")
    assert f"64/1797 would give {wrong:.3f}" in text


@pytest.mark.filterwarnings("ignore")
def test_opacus_samples_and_divides_as_the_guide_says() -> None:
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
    for page in ("README.md", "docs/guide-sweep.md"):
        text = (HOME / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:    )?reconbound sweep (.*)", text, re.MULTILINE):
            words = shlex.split(line)
            out = next((words[i + 1] for i, word in enumerate(words) if word in ("-o", "--out")), f"sweep-{words[0]}")
            assert seen.setdefault(out, words) == words, out
    assert {"sweep-digits", "sweep-twice"} <= set(seen)
