"""The likelihood attack on trainings: its likelihoods against plain sums, its releases, and what it may not reach."""

from __future__ import annotations

import csv
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from reconbound.bounds import success_from_kl
from reconbound.fisher import clipped_gradient_sum
from reconbound.fisher.worlds import REMOVED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import divergence_attack as attack

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "attacks.md"
WORLDS = (REMOVED, attack.REPLACED)
GIVEN = attack.problem()


def library_gradients(world: str | None, w: Tensor) -> Tensor:
    """Each record's clipped gradient in a world by the library, (N, 13)."""
    x, y = GIVEN.x.clone(), GIVEN.y
    if world == attack.REPLACED:
        x[0] = torch.tensor([0.0, 0.5])
    model, found = attack.network(w), []
    for k in range(len(x)):
        one = (model, attack.losses, x[k : k + 1], y[k : k + 1])
        sums = clipped_gradient_sum(*one, max_grad_norm=attack.CLIP, clip="hard").gradient_sum
        found.append(torch.cat([part.flatten() for part in sums.values()]))
    rows = torch.stack(found)
    return torch.cat([0 * rows[:1], rows[1:]]) if world == REMOVED else rows


@pytest.mark.parametrize("world", [None, *WORLDS])
def test_gradients_are_the_librarys(world: str | None) -> None:
    w = 2 * torch.randn(5, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = attack.in_world(world, w, GIVEN)
    assert 0 < float((found.norm(dim=2) > 0.999).double().mean()) < 1  # some are clipped
    for k in range(len(w)):
        torch.testing.assert_close(found[k], library_gradients(world, w[k]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_log_ratios_are_sums_over_all_who_may_have_taken_part(world: str) -> None:
    release = next(attack.simulate(GIVEN, None, 3, torch.Generator().manual_seed(5)))
    found = attack.log_ratios(release, world, GIVEN)
    sigma, last = attack.NOISE * attack.CLIP, 2
    expected = dict.fromkeys(attack.ATTACKERS, 0.0)
    for t in range(attack.STEPS):
        noisy, took = release.sums[last, t].numpy(), release.took[last, t].numpy()
        density = {}
        for which in (None, world):
            g = library_gradients(which, release.weights[last, t]).numpy()
            for name in attack.ATTACKERS:
                total = 0.0
                for drawn in itertools.product((0, 1), repeat=len(g)):
                    if name == "knows" and list(drawn[1:]) != took[1:].tolist():
                        continue
                    chance = math.prod(attack.RATE if one else 1 - attack.RATE for one in drawn)
                    total += chance * multivariate_normal.pdf(noisy, np.array(drawn) @ g, sigma**2)
                density[which, name] = math.log(total)
        for name in attack.ATTACKERS:
            expected[name] += density[None, name] - density[world, name]
    for name in attack.ATTACKERS:
        assert float(found[name][last]) == pytest.approx(expected[name], rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("world", [None, REMOVED])
def test_recorded_sums_are_those_of_the_batches_and_noise(world: str | None) -> None:
    releases, ledger = attack.train(GIVEN, world, 8, 7)
    assert (ledger is None) == (world is not None)
    assert torch.equal(releases.weights[:, 0], GIVEN.start.expand(8, -1))
    assert float(releases.took[..., 0].mean()) == (0 if world == REMOVED else pytest.approx(0.5, abs=0.16))
    clean = torch.stack([
        torch.einsum("mn,mnp->mp", releases.took[:, t], attack.in_world(world, releases.weights[:, t], GIVEN))
        for t in range(attack.STEPS)
    ])  # fmt: skip
    noise = ((releases.sums.transpose(0, 1) - clean) / (attack.NOISE * attack.CLIP)).flatten()
    error = 1 / math.sqrt(len(noise))
    assert abs(float(noise.mean())) < 4 * error
    assert abs(float(noise.square().mean()) - 1) < 4 * math.sqrt(2) * error  # sums divided by N − 1 would show


def test_attacks_stay_below_the_largest_chance_and_beat_half_the_ledger() -> None:
    count = 2_500
    for real, other, nats in attack.simulated_ratios(GIVEN, count).values():
        d, d_error = attack.mean(nats)
        for name, sign in (("knows", 0), ("sees", 1)):
            ratio, error = attack.mean(real[name])
            assert ratio <= d + 4 * math.hypot(error, d_error)
            assert ratio >= d - 4 * math.hypot(error, d_error) - sign * 0.3 * d
            assert float((-real[name]).exp().mean()) == pytest.approx(1, abs=0.2)  # ∫ dQ
            for kappa in attack.KAPPAS:
                hit = float((real[name] > other[name].quantile(1 - kappa)).double().mean())
                assert hit <= success_from_kl(kappa, d)
        thresholds = {
            name: [float(each.quantile(1 - kappa)) for kappa in attack.KAPPAS] for name, each in other.items()
        }
        row = {name: str(v) for name, v in attack.rows_of("", "", (real, other), (d, d_error), thresholds)[2].items()}
        assert row["kappa"] == "0.1"
        assert attack.limits(row)["beaten"]
        assert not attack.limits({**row, "nats": str(2 * d)})["beaten"]  # the whole ledger is not


def test_intervals_are_clopper_and_pearsons() -> None:
    assert attack.interval(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-5)  # their table
    assert attack.interval(0, 10) == pytest.approx((0, 0.30850), abs=1e-5)
    assert attack.interval(10, 10) == pytest.approx((0.69150, 1), abs=1e-5)


def test_committed_rows_hold_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(attack.ROWS.read_text().splitlines()))
    chances = [r for r in rows if r["trained"] == "PrivateSGD"]
    assert {(r["world"], r["attacker"], float(r["kappa"])) for r in chances} == set(
        itertools.product(WORLDS, attack.ATTACKERS, attack.KAPPAS)
    )
    for r in rows:
        nats, error, ratio, spread = (float(r[name]) for name in attack.NAMES[-4:])
        assert int(r["trainings"]) >= 2_000
        score = (ratio - nats) / math.hypot(error, spread)
        assert score < 4
        assert r["attacker"] == "sees" or score > -4  # equality for whoever knows the others, or a record alone
        if r["kappa"]:
            assert float(r["chance"]) <= attack.limits(r)["largest"]
        if r["stated"]:
            assert float(r["chance"]) <= float(r["stated"])
        if r["kappa"] == "0.1" and r["attacker"] == "knows":
            assert attack.limits(r)["beaten"]
    attack.tables(rows)
    page = PAGE.read_text(encoding="utf-8")
    assert [line for line in capsys.readouterr().out.splitlines() if line and line not in page] == []
