"""The scripts of docs/guides/scale.md, run by its own commands on two ranks; what rank 0 prints stands under them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from many_ranks import start_torchrun, stop_torchrun

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
SCRIPT = re.compile(
    r'^```python title="(.*?)"\n(.*?)^```$.*?^```bash\n(.*?)^```$.*?^```text\n(.*?)^```$', re.MULTILINE | re.DOTALL
)


def test_page_has_its_scripts() -> None:
    assert [name for name, *_ in SCRIPT.findall(PAGE)] == ["train.py", "with_opacus.py"]


def test_ledgers_of_a_loop_of_ones_own_are_joined(capsys) -> None:
    ((code, printed),) = re.findall(r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "scale.md", "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("name", "script", "command", "printed"), SCRIPT.findall(PAGE), ids=lambda text: text[:12])
def test_script_runs_on_two_ranks(name: str, script: str, command: str, printed: str, tmp_path) -> None:
    """The command of the page; Opacus's ranks need a seed of their own, as new processes have it."""
    (tmp_path / name).write_text(script)
    words = command.split()
    assert words[0] == "torchrun"
    assert words[-1] == name
    job = start_torchrun([*words[1:-1], str(tmp_path / name)], tmp_path, fork=name != "with_opacus.py")
    try:
        job.join(240)
    finally:
        stop_torchrun(job)
    errors = (tmp_path / "errors.txt").read_text()
    assert (tmp_path / "output.txt").read_text() == printed, errors
    assert job.exitcode == 0, errors
