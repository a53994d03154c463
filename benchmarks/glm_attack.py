"""The GLM attack on all 12,665 MNIST digits 0 and 1: trials as matrix products against forming every reconstruction.

Both in this run, same releases, same errors to 1e-6. Needs RECONBOUND_DATA (or ../shared/data beside the repository).
The usual way takes time in proportion to its trials, so it is measured on a few."""

import argparse
import resource
import time

import numpy as np
from linear_leakage import data

from reconbound.attacks import simulate
from reconbound.linear import Logistic, minimise
from reconbound.linear.solver import gradient

L2, NOISE = 1e-2, 1e-5
TARGET_RATIO, TARGET_SECONDS, TARGET_GB = 20, 120.0, 4.0


def usual_way(o, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean squared error of the ratio attack, every reconstruction formed: an N×d array per trial.

    Also each record's smallest denominator: below 1e-7 float64 itself does not know the error to 1e-6."""
    d = o.dim
    released = o.weights + NOISE * np.random.default_rng(seed).standard_normal((trials, *o.weights.shape))
    total, smallest = np.zeros(len(o.rows)), np.full(len(o.rows), np.inf)
    for w in released:
        everybody = gradient(o.rows, o.y, o.loss, o.penalty, w)[0]
        own = o.loss.slope(o.rows @ w.T, o.y)
        v = own * o.rows - everybody  # −(the others' gradient + nλθ), a row per record
        reconstruction = v[:, :d] / v[:, d:]
        smallest = np.minimum(smallest, np.abs(v[:, d]))
        total += np.mean((reconstruction - o.rows[:, :d]) ** 2, axis=1)
    return total / trials, smallest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--usual-trials", type=int, default=30)
    given = parser.parse_args()
    x, y = data()
    o = minimise(x, y, Logistic(), l2=L2, intercept=True)
    start = time.perf_counter()
    slow, smallest = usual_way(o, given.usual_trials, 0)
    theirs = (time.perf_counter() - start) / given.usual_trials
    fast = simulate(o, NOISE, given.usual_trials, method="ratio", random_state=0).mse
    known = smallest > 1e-7
    worst = float(np.max(np.abs(fast / slow - 1)[known]))
    assert worst < 1e-6, worst
    assert known.mean() > 0.99
    print(f"largest relative difference of the errors over {given.usual_trials} trials: {worst:.1e}")
    rows = []
    for method in ("ratio", "label"):
        start = time.perf_counter()
        simulate(o, NOISE, given.trials, method=method, random_state=0)
        rows.append(time.perf_counter() - start)
        print(f"{method}: mse, median, trimmed mean, bias, variance, {given.trials:,} trials: {rows[-1]:.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    each = rows[0] / given.trials
    print(f"slowest of these {max(rows):.1f} s (target {TARGET_SECONDS:g} s)")
    print(f"peak memory {peak:.2f} GB (target {TARGET_GB:g})")
    print(f"every reconstruction formed: {theirs * 1000:.0f} ms a trial; by products: {each * 1000:.2f} ms")
    print(f"ratio: {theirs * given.trials / rows[0]:.0f} (target {TARGET_RATIO})")


if __name__ == "__main__":
    main()
