"""The README and the calculator's guide as a newcomer uses them: code runs, commands print what is shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from reconbound import cli
from reconbound.commands.errors import options_of

HOME = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/guide-calculator.md"]


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (HOME / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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
        exec(block.replace("random_state=0", f"random_state={seed}").replace("print(", "str("), names)
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
        assert shown <= options_of(cli.app, command), command


@pytest.mark.parametrize("page", PAGES)
def test_what_is_shown_under_a_command_is_what_it_prints(page: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seen = 0
    for block in blocks(page, ""):
        for command, shown in re.findall(r"^\$ reconbound (.*)\n((?:(?!\$ ).+\n)*)", block, re.MULTILINE):
            assert cli.run(shlex.split(command)) == 0
            told = capsys.readouterr()
            assert told.err == ""
            assert told.out.startswith(shown)
            seen += bool(shown)
    assert seen
