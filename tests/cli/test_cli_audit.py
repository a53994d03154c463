"""reconbound audit, report and show, as a user types them."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from calling import QUICK, write_people
from reconbound._internal.formatting import format_floor
from reconbound.auditing.options import AuditOptions
from reconbound.auditing.run import floors_of
from reconbound.cli.app import run
from reconbound.cli.audit import describe_audit
from reconbound.data import load_dataset
from reconbound.report import confidential_page
from reconbound.report.folder import MODEL, PLAN, PUBLIC_REPORT, REPORT, RUN, read_leakage, read_run
from reconbound.report.view import View

MILD = {"noise_multiplier": 2.0, "steps": 4, "sample_rate": 0.1}


def test_a_table_becomes_a_report(table_audit, capsys) -> None:
    found, leakage = read_run(table_audit), read_leakage(table_audit)
    assert found.data["private"] == ["age", "hours"]
    assert found.data["ranges"] == {"age": [0.0, 120.0]}
    assert found.mechanism["steps"] == 4
    assert leakage.facts["units"] == ["years", ""]
    assert leakage.facts["scale"][0] == 120.0
    assert leakage.facts["class_names"] == ["high", "low"]
    assert set(leakage.facts["public_names"]) == {"job = clerk", "job = cook"}
    for name in (REPORT, PUBLIC_REPORT):
        assert "<b>pay</b>" not in (table_audit / name).read_text()


def test_inferred_ranges_get_notes(tmp_path, capsys) -> None:
    table = write_people(tmp_path / "people.csv")
    words = [
        "audit",
        str(table),
        "--target",
        "<b>pay</b>",
        "--range",
        "age=0:120",
        *QUICK,
        "--out",
        str(tmp_path / "a"),
    ]
    assert run([*words, "--range", "hours=0:100"]) == 0
    assert "--range" not in capsys.readouterr().err
    assert run([*words, "--fresh"]) == 0
    message = capsys.readouterr()
    assert "hours: no range was given" in message.err
    assert "by --range COLUMN=LOWEST:HIGHEST, once for each column" in message.err
    assert "(only with declared ranges: see the notes above)" in message.out
    assert message.out.startswith(
        "people.csv: a table of 3 columns beside the target (2 private, 1 public); 48 records"
    )


def test_modes(table_audit) -> None:
    public = {RUN, MODEL, PUBLIC_REPORT}
    for path in [table_audit, *table_audit.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o644 if path.name in public else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_output_begins_with_the_options_and_ends_with_the_path(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["audit", "wine", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("wine: a table")
    assert "linear; 2 runs of 4 steps" in lines[1]
    assert "noise multiplier 0.7" in lines[2]
    assert "of a column's range: theorem1 ±" in lines[3]
    assert "an attacker unbiased for every record there could be" in lines[3]
    assert lines[4].startswith("Expected time: about ")
    assert any("errs by at least" in line for line in lines[6:])
    assert lines[-1] == "audit-wine/report.html"
    assert Path(lines[-1]).exists()
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in Path("audit-wine").rglob("*") if p.is_file()}
    assert run(["audit", "wine", *QUICK, "--json"]) == 0
    message = capsys.readouterr()
    found = json.loads(message.out)
    assert found["report"] == "audit-wine/report.html"
    assert found["records"] == 142
    assert "keep it as secret as the data" in message.err
    assert "Finished already: the audit in audit-wine has these data and options; nothing was done." in message.err
    assert "Expected time" not in message.err + message.out
    assert run(["audit", "wine", *QUICK]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("Finished already")
    assert again[1:] == lines[6:]  # the verdict and the path, as at the end of the audit
    assert run(["audit", "wine", *QUICK, "--quiet"]) == 0
    assert capsys.readouterr().out == "audit-wine/report.html\n"
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in Path("audit-wine").rglob("*") if p.is_file()}


def test_printed_floors_are_in_the_reports_units(digits_audit) -> None:
    dataset = load_dataset("digits", limit=60)
    message = describe_audit(
        dataset, AuditOptions().with_changes(**{**MILD, "model": "linear"}), Path("nowhere"), fresh=True
    )[3]
    found = floors_of(dataset, AuditOptions().with_changes(**MILD))
    assert View(read_run(digits_audit), read_leakage(digits_audit)).of_range == "on the 0–16 pixel scale"
    assert f"on the 0–16 pixel scale: theorem1 ±{format_floor(16 * found['theorem1'].rmse)} (" in message
    assert f"lecam ±{format_floor(16 * found['lecam'].rmse)} (any attacker" in message


def test_finished_audit_has_everything_asked_for(digits_audit, capsys) -> None:
    words = ["audit", "--limit", "60", *QUICK, "--out", str(digits_audit)]
    (digits_audit / REPORT).unlink()
    assert run(words) == 0  # a page is missing: it is made again
    assert "Goes on in" in capsys.readouterr().out
    assert (digits_audit / REPORT).exists()
    assert run([*words, "--publish-accuracy"]) == 0
    assert "Goes on in" in capsys.readouterr().out
    assert read_run(digits_audit).accuracy is not None
    assert run([*words, "--publish-accuracy"]) == 0
    assert "Finished already" in capsys.readouterr().out
    assert run(words) == 0  # and taken back
    assert read_run(digits_audit).accuracy is None
    more = [*words]
    more[more.index("--runs") + 1] = "3"
    assert run(more) == 0
    assert "3 runs of 4 steps" in capsys.readouterr().out
    assert read_run(digits_audit).mechanism["runs"] == 3
    assert run(words) == 2
    assert "runs was 3 and is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.csv"], "nowhere.csv"),
        (["--model", "forest"], "--model must be one of auto, linear, mlp, cnn, package.module:factory, got forest"),
        (
            ["--model", "no.such:thing"],
            "--model must name a factory to be called as factory(shape, outputs) (ModuleNotFoundError: ",
        ),
        (["--model", "json:loads"], "--model must name a factory"),
        (["wine", "--model", "cnn"], "--model must be linear or mlp for records of shape (13,), got cnn"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "x"], "must be a whole number, got x"),
        (["--noise-multiplier", "-1"], "--noise-multiplier must be greater than 0"),
        (["--sample-rate", "2"], "--sample-rate must be at most 1"),
        (["--budget", "lots"], "--budget must be a number greater than 0, or every, got lots"),
        (["wine", "--budget", "-1"], "--budget must be a number greater than 0, or every, got -1"),
        (["wine", "--noise-multiplier", "-1"], "--noise-multiplier must be greater than 0"),
        (["--sampler", "odd"], "--sampler must be one of poisson, fixed, shuffle, got odd"),
        (["--steps", "3", "--epochs", "1"], "--epochs does not go with --steps"),
        (["wine", "--epochs", "1e308"], "--epochs must be at most 1e+15, got 1e+308"),
        (["wine", "--epochs", "1", "--sample-rate", "1e-300"], "--steps must be at most 1e+15"),
        (["wine", "--lr", "1e300"], "--lr must be at most 1e+30, got 1e+300"),
        (["wine", "--range", "alcohol"], "--range must be"),
        (["wine", "--private", "colour"], "--private must name columns"),
        (["wine", "--private", "alcohol", "--private", "ash2"], "did you mean 'ash'?, got ash2"),
        (["wine", "--private", ""], "--private must name at least one column"),
        (["--private", "age"], "--private is for tables"),
        (["wine", "--size", "9"], "--size is for folders of images, got 9"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, monkeypatch, capsys, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["audit", *words, "--out", "out"]) == 2
    error = capsys.readouterr().err.splitlines()  # no notes on the data before it
    assert len(error) == 1
    assert error[0].startswith("reconbound: ")
    assert message in error[0]
    assert not (tmp_path / "out" / PLAN).exists()


def test_other_options_in_the_same_folder_are_refused(digits_audit, capsys) -> None:
    before = (digits_audit / REPORT).read_bytes()
    assert (
        run(["audit", "--limit", "60", *QUICK, "--noise-multiplier", "3", "--out", str(digits_audit), "--quiet"]) == 2
    )
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "noise_multiplier was 0.7 and is 3.0" in error
    assert "--fresh" in error
    assert run(["audit", "--limit", "60", *QUICK, "--momentum", "0.5", "--out", str(digits_audit), "--quiet"]) == 2
    assert "momentum was 0.0 and is 0.5" in capsys.readouterr().err  # 0 is a value
    assert (digits_audit / REPORT).read_bytes() == before


def test_folder_of_other_data_is_refused(digits_audit, capsys) -> None:
    before = (digits_audit / REPORT).read_bytes()
    assert run(["audit", "wine", *QUICK, "--out", str(digits_audit)]) == 2
    assert capsys.readouterr().err == f"reconbound: {digits_audit} holds an audit of digits; choose another --out\n"
    many = ["--lr", "0.01", "--momentum", "0.9", "--clip", "hard", "--max-grad-norm", "7", "--noise-multiplier", "3"]
    assert run(["audit", "--limit", "60", *QUICK, *many, "--out", str(digits_audit)]) == 2
    error = capsys.readouterr().err
    assert error.count(" and is ") == 3
    assert re.search(r"; and [23] more\), got ", error)
    assert (digits_audit / REPORT).read_bytes() == before


def test_folders_that_cannot_be_used(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path, tmp_path / "file", tmp_path / "file" / "inside"):
        assert run(["audit", *QUICK, "--out", str(out), "--quiet"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("reconbound: --out must be a")
        assert error.count("\n") == 1
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        assert run(["audit", *QUICK, "--out", str(tmp_path / "locked" / "a"), "--quiet"]) == 2


FACTORIES = """
from torch import nn
def small(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(13, 4), nn.Tanh(), nn.Linear(4, outputs))
def relu(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(13, 4), nn.ReLU(), nn.Linear(4, outputs))
def norm(shape, outputs):
    return nn.Sequential(nn.Linear(13, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))
def few(shape, outputs):
    return nn.Linear(13, 2)
def wide(shape, outputs):
    return nn.Linear(14, outputs)
def broken(shape, outputs):
    raise KeyError('x')
def nothing(shape, outputs):
    return None
"""
REFUSED = {
    "norm": "the model of mine:norm: module '1' (BatchNorm1d) mixes the records of a batch",
    "few": "--model must name a factory whose model gives 3 outputs for each record, one for each of the 3 classes, "
    "got mine:few -> shape (3, 2) for 3 records",
    "wide": "--model must name a factory whose model takes records of shape (13,) (RuntimeError: mat1 and mat2",
    "broken": "--model must name a factory to be called as factory(shape, outputs) (KeyError: 'x'), got mine:broken",
    "nothing": "--model must name a factory that returns a torch module, got mine:nothing -> NoneType",
    "missing": "--model must name a factory to be called as factory(shape, outputs) (AttributeError: module 'mine' has",
}


def test_user_factory(mine, tmp_path, capsys) -> None:
    assert run(["audit", "wine", *QUICK, "--model", "mine:small", "--out", "a", "--quiet"]) == 0
    assert read_run("a").training["model"] == "mine:small"
    assert read_run("a").training["parameters"] == 71
    assert read_run("a").caveats == {}
    assert "found no kinks" in Path("a", REPORT).read_text()
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("bad", REFUSED)
@pytest.mark.parametrize("form", [["--quiet"], []])
def test_bad_factory_is_one_line(mine, capsys, bad: str, form: list[str]) -> None:
    assert run(["audit", "wine", *QUICK, "--model", f"mine:{bad}", "--out", "b", *form]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Note:")]
    assert len(error) == 1
    assert error[0].startswith(f"reconbound: {REFUSED[bad]}")
    assert not Path("b", PLAN).exists()


def test_kinks_are_named_everywhere(mine, capsys) -> None:
    message = "The floors of single records are not proved for this model: it has kinks, in module '2' (ReLU)"
    assert run(["audit", "wine", *QUICK, "--model", "mine:relu", "--out", "a"]) == 0
    reported = capsys.readouterr()
    assert message in reported.err.replace("\n", " ")  # before training
    assert message in reported.out  # before the floors that it is about
    assert "UserWarning" not in reported.err
    found = read_run("a")
    assert found.caveats is not None
    assert found.caveats["kinks"].startswith(message)
    assert json.loads(Path("a", RUN).read_text())["caveats"]["kinks"].startswith(message)
    own, public = (html.unescape(Path("a", name).read_text()) for name in (REPORT, PUBLIC_REPORT))
    verdict, second = own[own.index('id="verdict"') :], own[own.index('id="unbiased"') :]
    assert message not in verdict[: verdict.index("</div>")]  # the chances there hold for every model
    assert message in second[: second.index("</section>")]
    for page in (own, public):
        assert f"<dt>Model</dt><dd>{message}" in page
    assert message not in public[: public.index('id="assumptions"')]  # its floors need no smooth model
    assert "found no kinks" not in own
    for words in (["show", "a"], ["show", "a", "--record", "0"]):
        assert run(words) == 0
        assert message in " ".join(capsys.readouterr().out.split())
    assert run(["show", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caveats"]["kinks"].startswith(message)
    before = replace(found, caveats=None)  # a folder from before it was kept claims nothing
    assert "does not say whether" in confidential_page(before, read_leakage("a")).decode()


def test_epochs_and_publishing(tmp_path) -> None:
    words = ["audit", "wine", "--epochs", "1", "--runs", "1", "--sample-rate", "1/4", "--publish-accuracy", "--fresh"]
    assert run([*words, "--model", "linear", "--out", str(tmp_path / "a"), "--quiet"]) == 0
    found = read_run(tmp_path / "a")
    assert found.mechanism["steps"] == 4
    assert 0 <= found.accuracy <= 1


def _listen_to_the_keyboard() -> None:
    """Makes a new process hear SIGINT, also where these tests were started in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_stopping_from_the_keyboard(tmp_path) -> None:
    """SIGINT while it trains: one line, status 130, and the same command goes on."""
    words = [sys.executable, "-m", "reconbound", "audit", "--limit", "60", *QUICK, "--quiet", "--out", "out"]
    words[words.index("4")] = "100000"
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=_listen_to_the_keyboard
    ) as started:
        try:
            for _ in range(600):
                if list((tmp_path / "out" / "checkpoints").glob("checkpoint-*.safetensors")):
                    break
                time.sleep(0.1)
            time.sleep(0.2)
            started.send_signal(signal.SIGINT)
            _, error = started.communicate(timeout=60)
        finally:
            started.kill()
    assert started.returncode == 130
    assert error.strip() == "reconbound: stopped; run the same command again to go on"
    assert (tmp_path / "out" / PLAN).exists()


@pytest.mark.parametrize("words", [["bound"], ["audit", "--limit", "60", *QUICK, "--quiet", "--out", "out"]])
@pytest.mark.slow
def test_stopping_early_is_one_line(tmp_path, words: list[str]) -> None:
    """SIGINT at several moments from the first lines of ours on, while modules are imported."""
    source = Path(__file__).resolve().parents[2] / "src"
    script = "import sys; print('here', flush=True); from reconbound.__main__ import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    seen = 0
    for wait in (0.05, 0.2, 0.5, 0.9):
        started = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=_listen_to_the_keyboard,
        )  # fmt: skip
        assert started.stdout.readline() == "here\n"
        time.sleep(wait)
        started.send_signal(signal.SIGINT)
        _, error = started.communicate(timeout=60)
        if started.returncode == 0:
            break  # done before the signal
        assert started.returncode == 130, error
        assert error.strip().splitlines()[-1].startswith("reconbound: stopped")
        assert len([line for line in error.splitlines() if line.strip()]) == 1
        seen += 1
    assert seen >= 2


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from reconbound.cli.app import run; status = run(['audit', '--help']); "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'plotly', 'sklearn')], file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert "--noise-multiplier" in done.stdout
