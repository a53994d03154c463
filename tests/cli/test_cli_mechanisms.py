"""reconbound bound with a schedule, what Opacus recorded, and statements of Gaussian DP and zCDP."""

import json

import pytest
import torch

from calling import check_refused
from reconbound.cli.bound import NO_SAMPLER, NO_STRETCH_SAMPLER
from reconbound.mechanisms import GDP, ZCDP, Composition, SampledGaussian
from reconbound.mechanisms.guarantee import guarantee

STRETCHES = [
    {"noise_multiplier": 1.5, "sample_rate": 0.01, "steps": 100},
    {"noise_multiplier": 3.0, "sample_rate": 0.02, "steps": 50},
]
HISTORY = [(1.5, 0.01, 100), (3.0, 0.02, 50)]


def both(clip, sampler="poisson"):
    return Composition(tuple(SampledGaussian(*one, clip=clip, sampler=sampler) for one in HISTORY))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schedule.json").write_text(json.dumps(STRETCHES))
    (tmp_path / "state.json").write_text(json.dumps({"history": HISTORY, "mechanism": "prv"}))
    torch.save({"history": HISTORY, "mechanism": "prv"}, tmp_path / "state.pt")
    (tmp_path / "bad.json").write_text("{")


@pytest.mark.parametrize(
    ("options", "mechanism", "note"),
    [
        (["--mu", 0.5, "--adjacency", "add/remove"], GDP(0.5, "add/remove"), None),
        (["--rho", 0.1], ZCDP(0.1), None),
        (["--schedule", "schedule.json", "--dim", 5], both("smooth"), NO_STRETCH_SAMPLER),
        (["--opacus-state", "state.json"], both("hard"), NO_SAMPLER),
        (["--opacus-state", "state.pt", "--sampler", "poisson"], both("hard"), None),
        (["--opacus-state", "state.pt", "--sampler", "fixed", "--clip", "smooth"], both("smooth", "fixed"), None),
    ],
)
def test_bound_matches_the_library(answer, files, options, mechanism, note):
    found = answer("bound", *options)
    space = {"dim": 5} if "--dim" in options else {}
    expected = json.loads(json.dumps(guarantee(mechanism, **space).to_dict()))
    assert found["bounds"] == expected["bounds"]
    assert found["mechanism"] == expected["mechanism"]
    assert found["notes"] == [*([note] if note else []), *expected["notes"]]


def test_the_schedule_is_printed(run, files):
    code, out, _ = run("bound", "--schedule", "schedule.json")
    assert code == 0
    assert "Composition of SampledGaussian: noise multiplier 1.5" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--schedule", "schedule.json", "--steps", 5], "--steps does not go with --schedule"),
        (["--schedule", "schedule.json", "--sampler", "fixed"], "--sampler does not go with --schedule"),
        (["--mu", 1, "--rho", 1], "does not go with --mu"),
        (["--mu", -1], "--mu must be at least 0, got -1.0"),
        (["--rho", "nan"], "--rho must be a finite number"),
        (["--schedule", "bad.json"], "--schedule must be a JSON file"),
        (["--opacus-state", "bad.json"], "--opacus-state must be a JSON file"),
        (
            ["--opacus-state", "schedule.json"],
            "--opacus-state must be a list of (noise multiplier",
        ),
        (["--opacus-state", "missing.pt"], "missing.pt"),
        (["--schedule", "missing.json"], "missing.json"),
    ],
)
def test_wrong_options_are_named(run, files, options, says):
    status, out, error = run("bound", *options)
    check_refused(status, out, error)
    assert says in error


def test_calibrate_refuses_them_by_name(run, files):
    for option, value in (
        ("--mu", "1"),
        ("--rho", "1"),
        ("--schedule", "schedule.json"),
        ("--opacus-state", "state.pt"),
    ):
        code, _, error = run("calibrate", "--target-epsilon", "1", option, value)
        assert code == 2
        assert option in error
