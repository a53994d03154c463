"""E log dP/dQ of simulated trainings against the sum of step divergences; a simulator of its own, in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import logsumexp

from approximate import close
from reconbound import bounds
from reconbound.divergences import poisson_kl, poisson_pair_kl

RATE, NOISE, STEPS, LEARNING_RATE = 0.3, 1.0, 12, 0.4


def clipped_gradients(w, x, y):
    """Returns the gradients of squared errors at every w, clipped to norm 1, (trials, records, features)."""
    g = (w @ x.T - y)[..., None] * x
    return g / np.maximum(np.linalg.norm(g, axis=-1, keepdims=True), 1.0)


def simulate(x, y, other, trials, seed):
    """Returns ln dP/dQ and the divergences' sum of each training on (x, y); in Q record 0 has the gradient of `other`.

    The likelihood of a step sums over every set of records that may have taken part.
    """
    rng = np.random.default_rng(seed)
    n = len(y)
    sets = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(float)
    log_chance = sets.sum(1) * math.log(RATE) + (n - sets.sum(1)) * math.log1p(-RATE)
    w = np.zeros((trials, x.shape[1]))
    ratio, ledger = np.zeros(trials), np.zeros(trials)
    for _ in range(STEPS):
        g = clipped_gradients(w, x, y)
        in_q = g.copy()
        in_q[:, :1] = 0.0 if other is None else clipped_gradients(w, *other)
        drawn = rng.random((trials, n)) < RATE
        release = np.einsum("tn,tnf->tf", drawn, g) + NOISE * rng.normal(size=w.shape)

        def log_density(gradients, release=release):
            sums = np.einsum("sn,tnf->tsf", sets, gradients)
            square = ((release[:, None] - sums) ** 2).sum(-1)
            return logsumexp(log_chance - square / (2 * NOISE**2), axis=1)

        ratio += log_density(g) - log_density(in_q)
        a, b = g[:, 0] / NOISE, in_q[:, 0] / NOISE
        norms, inner = (np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)), (a * b).sum(1)
        if other is None:
            ledger += poisson_kl(norms[0], RATE)
        else:
            ledger += poisson_pair_kl(*norms, inner, RATE, squared_distance=((a - b) ** 2).sum(1))
        w = w - LEARNING_RATE * release / max(n * RATE, 1)
    return ratio, ledger


def records(n):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 2))
    x[0] = (1.5, -1.0)
    y = np.concatenate([[2.5], rng.normal(size=n - 1)])
    return x, y


OTHERS = {"removed": None, "replaced": (np.array([[0.2, -1.0]]), np.array([2.5]))}


@pytest.mark.parametrize("world", OTHERS)
def test_one_record_by_itself_meets_the_ledger(world):
    ratio, ledger = simulate(*records(1), OTHERS[world], trials=20_000, seed=1)
    error = np.std(ratio - ledger) / math.sqrt(len(ratio))
    assert np.mean(ratio) == close(np.mean(ledger), rel=0, abs=4 * error)
    assert np.mean(ratio) > 40 * error / 4  # half the ledger would be noticed


@pytest.mark.parametrize("world", OTHERS)
def test_trajectories_stay_below_the_ledger(world):
    ratio, ledger = simulate(*records(5), OTHERS[world], trials=6_000, seed=2)
    error = np.std(ratio - ledger) / math.sqrt(len(ratio))
    assert np.mean(ratio) <= np.mean(ledger) + 4 * error
    assert np.mean(ratio) > 0.5 * np.mean(ledger)  # a ledger halved would be caught
    assert np.mean(ratio) - 4 * error > 0


def test_the_likelihood_attacker_stays_below_the_largest_chance():
    """Thresholds of ln dP/dQ, the most powerful tests: the chance in Q follows from that in P by E_P e^{−L}."""
    ratio, ledger = simulate(*records(5), None, trials=6_000, seed=4)
    nats = float(np.mean(ledger))
    for share in (0.02, 0.1, 0.3, 0.6):
        hit = ratio >= np.quantile(ratio, 1 - share)
        weights = hit * np.exp(-ratio)
        kappa = float(np.mean(weights)) + 4 * float(np.std(weights)) / math.sqrt(len(ratio))
        assert np.mean(hit) <= bounds.success_from_kl(min(kappa, 1.0), nats)
