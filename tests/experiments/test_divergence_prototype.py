"""The prototype's figures measured anew: data as the prototype had them, the rows of a small run, and the pairs."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import divergence_prototype as script

from reconbound import Settings
from reconbound.divergences import pair_kl_bound, poisson_kl, poisson_pair_kl
from reconbound.fisher.worlds import Replacement


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with 600 people, of whom 40 are held out."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(script, "TESTED", 40)
    (tmp_path / "data" / "adult").mkdir(parents=True)
    people = [["ab"[rng.integers(2)]] * 15 for _ in range(600)]
    for i, person in enumerate(people):
        for k, top in ((0, 90), (2, 100_000), (4, 17), (10, 20_000), (11, 2_500), (12, 99)):
            person[k] = str(rng.integers(1, top))
        person[14] = ">50K" if i % 3 == 0 else "<=50K"
    text = "\n".join(", ".join(person) for person in people) + "\n"
    (tmp_path / "data" / "adult" / "adult.data").write_text(text)
    return tmp_path / "data"


def test_a_small_run_has_rows_of_every_world(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(folder), "--part", "adult", "--limit", "500", "--steps", "12", "--runs", "2"]
    script.main([*words, "--out", str(tmp_path)])
    assert "500 records, 2 x 12 steps" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "divergence_prototype_adult.csv").read_text().splitlines()))
    worlds = ["removed", "age = 38.5", "hours-per-week = 40.4", "education-num = 10.08"]
    assert [(r["world"], r["kind"]) for r in rows] == [(w, k) for w in worlds for k in ("counted", "capped")]
    assert float(rows[0]["cap"]) == pytest.approx(12 * poisson_kl(1.0, 0.01), rel=1e-5)
    for r in rows:
        assert 0 < float(r["mean"]) <= float(r["max"])
        assert r["kind"] == "counted" or float(r["max"]) <= float(r["cap"])
        assert (r["world"] == "removed") == (r["closed over exact"] == "")
    assert all(1.9 < float(r["closed over exact"]) < 2.3 for r in rows[2:])


def test_records_are_scaled_as_the_prototypes(folder: Path) -> None:
    x, y, tested, _ = script.read_adult(folder)
    assert (x.shape, tested.shape) == ((560, 6 + 2 * 8), (40, 22))
    people = [line.split(", ") for line in (folder / "adult" / "adult.data").read_text().splitlines()]
    person = people[int(torch.randperm(600, generator=torch.Generator().manual_seed(0))[0])]
    spans = ((0, 0, 100), (2, 0, 1.5e6), (4, 0, 16), (10, 0, 1e5), (11, 0, 5e3), (12, 0, 100))
    expected = [(float(person[k]) - low) / (high - low) for k, low, high in spans]
    assert x[0, :6].tolist() == pytest.approx(expected)
    assert x[0, 6:8].tolist() == [float(person[1] == "a"), float(person[1] == "b")]
    assert int(y[0]) == (person[14] == ">50K")


def test_pairs_add_up_both_forms_on_the_same_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(30, 3, generator=generator), torch.randint(0, 2, (30,), generator=generator)
    worlds = {"first": Replacement([0.5], [0])}
    settings = Settings(0.8, 0.6, 0.05, clip="hard", rules=None, seed=2**200)
    model = script.adult_network(3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    pairs = script.Pairs(x, y, worlds, settings, "cpu")
    script.PrivateSGD(model, script.losses, x, y, settings, worlds=worlds, callbacks=[pairs], progress=False).fit(3)

    def loss(parameters: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (a[None],)), b[None])

    def clipped(a: torch.Tensor) -> torch.Tensor:
        parts = vmap(grad(loss), in_dims=(None, 0, 0))(start, a, y)
        rows = torch.cat([part.flatten(1) for part in parts.values()], dim=1).double()
        return rows * (0.6 / rows.norm(dim=1, keepdim=True)).clamp(max=1) / (0.8 * 0.6)

    a, b = clipped(x), clipped(worlds["first"](x, y)[0])
    given = (a.norm(dim=1), b.norm(dim=1), (a * b).sum(1), 0.05)
    exact, closed = float(poisson_pair_kl(*given).sum()), float(pair_kl_bound(*given).sum())
    assert pairs.sums["first"] == pytest.approx([exact, closed], rel=1e-4)
    assert float(pairs.ratio("first")) == pytest.approx(closed / exact, rel=1e-3)
    assert pairs.ratio("removed") == ""


def test_the_kinked_network_has_the_papers_shapes() -> None:
    model = script.mnist_relu()
    assert sum(p.numel() for p in model.parameters()) == 26_010
    kinds = [type(layer) for layer in model]
    assert (kinds.count(nn.ReLU), kinds.count(nn.MaxPool2d)) == (3, 2)
    assert nn.Tanh not in kinds
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_small_runs_are_kept_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--steps", "5"], ["--limit", "5"], ["--runs", "0"]):
        with pytest.raises(SystemExit):
            script.main(["--data", str(folder), *words])
        assert "would replace the full-size results" in capsys.readouterr().err
