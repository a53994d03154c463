"""How long `reconbound bound` takes for one million steps, Python's start included."""

import os
import subprocess
import sys
import time

STEPS, RUNS, TARGET = 1_000_000, 5, 3.0
CASES = {  # noise multiplier, sample rate
    "private SGD on MNIST": (1.0, 0.01),
    "large batches, much noise": (20.0, 0.3),
    "tiny batches": (0.6, 1e-6),
}


def seconds(noise: float, rate: float) -> float:
    """The best of some fresh processes."""
    command = [sys.executable, "-m", "reconbound.cli.app", "bound", "--json", "--steps", str(STEPS)]
    command += ["--noise-multiplier", str(noise), "--sample-rate", str(rate), "--dim", "784"]
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    slowest = 0.0
    for name, (noise, rate) in CASES.items():
        taken = seconds(noise, rate)
        slowest = max(slowest, taken)
        print(f"{name}: noise multiplier {noise:g}, rate {rate:g}, {STEPS:,} steps: {taken:.2f} s")
    print(f"reconbound bound, one million steps, slowest of these: {slowest:.2f} s (target: below {TARGET:g} s)")


if __name__ == "__main__":
    main()
