"""The figures' scripts as a newcomer calls them: --help, small runs, no data; committed results stay as they are."""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = {
    "figure2_linear": ["--records", "60"],
    "figure3_glm": ["--records", "60", "--trials", "20"],
    "figure4_reconstructions": ["--records", "60", "--trials", "20"],
    "adult_linear": ["--records", "60"],
}


def idx(array: np.ndarray) -> bytes:
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small data folder in the two data sets' formats: 80 pictures of 0 and 1 among 100, 80 people."""
    rng, root = np.random.default_rng(0), tmp_path / "data"
    (root / "mnist").mkdir(parents=True)
    labels = np.tile(np.array([0, 1, 0, 1, 7], dtype=np.uint8), 20)
    for part in ("train", "t10k"):
        pictures = rng.integers(0, 256, (100, 28, 28), dtype=np.uint8)
        (root / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(idx(pictures))
        (root / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    (root / "adult").mkdir()
    for name in ("adult.data", "adult.test"):
        people = [["x"] * 15 for _ in range(80)]
        for i, person in enumerate(people):
            for k, top in ((0, 90), (4, 16), (10, 20_000), (11, 2_500), (12, 99)):
                person[k] = str(rng.integers(1, top))
            person[14] = ">50K" if i % 3 == 0 else "<=50K"
        (root / "adult" / name).write_text("\n".join(", ".join(person) for person in people) + "\n")
    monkeypatch.setenv("RECONBOUND_DATA", str(root))
    return root


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module(request.param)


def committed() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (EXPERIMENTS / "results").iterdir()}


@pytest.mark.filterwarnings("ignore:the noise:reconbound.linear.NoiseWarning")  # 60 people are too few for ε = 1
@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_small_run_writes_only_to_its_folder(script, data: Path, tmp_path: Path, capsys) -> None:
    name, before, out = script.__name__, committed(), tmp_path / "new" / "out"
    script.main([*SCRIPTS[name], "--out", str(out)])
    ending = ".csv.gz" if name == "figure3_glm" else ".csv"
    assert {path.name for path in out.iterdir()} == {f"{name}{end}" for end in (ending, ".pdf", ".png", "_table.csv")}
    assert "| | paper | ours |" in capsys.readouterr().out
    assert committed() == before


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_a_small_run_is_refused_where_the_committed_results_are(script, capsys) -> None:
    before, sizes = committed(), SCRIPTS[script.__name__]
    for words in (sizes, sizes[-2:], [*sizes, "--out", str(EXPERIMENTS / "results" / ".." / "results")]):
        with pytest.raises(SystemExit) as stopped:
            script.main(words)
        assert stopped.value.code == 2
        assert f"{words[0]} {words[1]}" in (reported := capsys.readouterr()).err
        assert reported.err.endswith("give another folder by --out FOLDER\n")
        assert reported.out == ""
    assert committed() == before


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_help_and_wrong_sizes(script, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    assert "--out FOLDER" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    for words, why in (
        (["--records", "15"], "at least 16"),
        (["--records", "many"], "at least 16"),
        (["--out", str(tmp_path / "file")], "File exists"),
    ):
        with pytest.raises(SystemExit):
            script.main(words)
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["not there", "empty"])
@pytest.mark.parametrize("script", [*SCRIPTS, "adult_csv"], indirect=True)
def test_without_data_one_line(script, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, where = f"{script.__name__}.py", tmp_path / "data"
    if folder == "empty":
        where.mkdir()
    monkeypatch.setenv("RECONBOUND_DATA", str(where))
    given = [str(tmp_path / "a.csv")] if name == "adult_csv.py" else ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(SystemExit, match=rf"\A{name}: [^\n]*does not exist\Z"):
        runpy.run_path(str(EXPERIMENTS / name), run_name="__main__")


def test_without_data_no_traceback(tmp_path: Path) -> None:
    """The same once more as a process, with no folder named and none beside the repository."""
    home = tmp_path / "repository"
    shutil.copytree(EXPERIMENTS, home / "experiments", ignore=shutil.ignore_patterns("results", "__pycache__"))
    clean = {name: value for name, value in os.environ.items() if name != "RECONBOUND_DATA"}
    words = [sys.executable, str(home / "experiments" / "figure2_linear.py")]
    done = subprocess.run(words, capture_output=True, text=True, env=clean)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("figure2_linear.py: no data: set the variable RECONBOUND_DATA")
    assert done.stderr.count("\n") == 1


def test_more_records_than_there_are(data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    figure2 = importlib.import_module("figure2_linear")
    with pytest.raises(ValueError, match="--records 81: there are 80"):
        figure2.main(["--records", "81", "--out", str(tmp_path)])


def test_figure3_is_redrawn_with_its_number_of_trials(data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    figure3 = importlib.import_module("figure3_glm")
    with pytest.raises(FileNotFoundError, match="without --draw first"):
        figure3.main(["--draw", "--out", str(tmp_path)])
    figure3.main([*SCRIPTS["figure3_glm"], "--out", str(tmp_path)])
    columns, trials, guess = figure3.kept(tmp_path)
    assert (trials, len(columns["ratio_floor"])) == (20, 60)
    assert guess == pytest.approx(1 / 12, rel=0.1)  # pixels drawn evenly from [0, 1]
    (tmp_path / "figure3_glm.png").unlink()
    figure3.main(["--draw", "--out", str(tmp_path)])
    assert (tmp_path / "figure3_glm.png").exists()
    assert figure3.kept(EXPERIMENTS / "results")[1] == figure3.TRIALS
