"""The scripts of docs/guides/scale.md, run by its own commands on two ranks; what rank 0 prints stands under them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

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
    (tmp_path / name).write_text(script)
    words = command.split()
    assert words[0] == "torchrun"
    assert words[-1] == name
    with (tmp_path / "errors.txt").open("w") as errors:
        job = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            found, _ = job.communicate(timeout=240)
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)  # torchrun ends its ranks
                with suppress(subprocess.TimeoutExpired):
                    job.wait(40)
                job.kill()
    errors = (tmp_path / "errors.txt").read_text()
    assert found == printed, errors
    assert job.returncode == 0, errors
