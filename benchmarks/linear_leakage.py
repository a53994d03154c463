"""Exact leakage of all 12,665 MNIST digits 0 and 1: closed forms against forming each record's dense Jacobian.

Both in this run, on the same solved model; trace, diagonal and spectral norm agree to 1e-8. Needs RECONBOUND_DATA (or
../shared/data beside the repository). Single runs: --records says for how many the usual way is measured."""

import argparse
import os
import resource
import time
from pathlib import Path

import numpy as np

from reconbound.data import mnist
from reconbound.linear import Logistic, leakage, minimise

L2, NOISE, CHUNK = 1e-2, 1e-2, 16
TARGET_RATIO, TARGET_SECONDS, TARGET_GB = 50, 5.0, 1.0


def data() -> tuple[np.ndarray, np.ndarray]:
    folder = os.environ.get("RECONBOUND_DATA", str(Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
    x, y = mnist(folder)
    keep = y < 2
    return x[keep].reshape(-1, 784) / 255.0, y[keep].astype(float)


def usual_way(o, records):
    """Dense Jacobians −H⁻¹(ℓ'' x θᵀ + ℓ' I) in chunks, then trace, diagonal and spectral norm of each JᵀJ."""
    trace, diagonal, norm = [], [], []
    for i in range(0, len(records), CHUNK):
        part = records[i : i + CHUNK]
        mixed = o.curvatures[part, None, None] * o.rows[part, :, None] * o.weights[0, None, None, :]
        mixed[:, np.arange(784), np.arange(784)] += o.slopes[part]
        jacobian = -o.inverse_hessian @ mixed
        information = jacobian.transpose(0, 2, 1) @ jacobian / NOISE**2
        diagonal.append(np.einsum("njj->nj", information))
        trace.append(diagonal[-1].sum(axis=1))
        norm.append(np.linalg.eigvalsh(information)[:, -1])
    return np.concatenate(trace), np.concatenate(diagonal), np.concatenate(norm)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=64, help="records for which the usual way is measured")
    count = parser.parse_args().records
    x, y = data()
    o = minimise(x, y, Logistic(), l2=L2, intercept=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    times = []
    for _ in range(3):
        fresh = type(o)(o.loss, o.rows, o.y, o.l2, o.intercept, o.weights, o.gradient_norm)  # nothing cached
        start = time.perf_counter()
        found = leakage(fresh, NOISE)
        times.append(time.perf_counter() - start)
    ours, peak = min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    chosen = np.random.default_rng(0).choice(len(x), size=count, replace=False)
    _ = o.inverse_hessian
    start = time.perf_counter()
    trace, diagonal, norm = usual_way(o, chosen)
    theirs = (time.perf_counter() - start) / count * len(x)
    for name, a, b in (
        ("trace", found.trace[chosen], trace),
        ("diagonal", found.diagonal[chosen], diagonal),
        ("norm", found.spectral_norm[chosen], norm),
    ):
        worst = float(np.max(np.abs(a / b - 1)))
        assert worst < 1e-8, (name, worst)
        print(f"{name}: largest relative difference {worst:.1e}")
    print(
        f"closed forms, {len(x):,} × 784, Hessian and its inverse included: {ours:.2f} s (target {TARGET_SECONDS:g} s)"
    )
    print(f"peak memory of the process {peak:.2f} GB (target {TARGET_GB:g}), {before:.2f} before it was asked for")
    print(f"dense Jacobians in chunks of {CHUNK}: {theirs:.0f} s for all, from {count} records")
    print(f"ratio: {theirs / ours:.0f} (target {TARGET_RATIO})")


if __name__ == "__main__":
    main()
