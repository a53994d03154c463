"""What accounting costs: private training with the default budget against the same training without a ledger.

The paper's MNIST network, batch rate 0.01 (600 of 60,000 records), random images (time does not depend on them).
    python benchmarks/accounting_cost.py [steps]"""

import sys
import time
from contextlib import suppress

import torch

from reconbound.auditing.models import mnist_cnn
from reconbound.training.private_sgd import PrivateSGD, Settings

RECORDS, RATE, STEPS, TARGET = 60_000, 0.01, 1000, 1.5


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def seconds(x: torch.Tensor, y: torch.Tensor, steps: int, part: int, **options) -> float:
    """Time of `part` steps of a run of `steps`: blocks of measurement are those of the whole run."""
    torch.manual_seed(0)
    chosen = Settings(0.5, 8.0, RATE, lr=0.03, momentum=0.5, seed=0, **options)
    learner = PrivateSGD(mnist_cnn(), losses, x, y, chosen, check=False, progress=False)

    class Enough(Exception):
        pass

    def stop(model: torch.nn.Module) -> dict[str, float]:
        raise Enough

    if part < steps:
        learner.evaluate, learner.evaluate_every = stop, part
    start = time.perf_counter()
    with suppress(Enough):
        learner.fit(steps)
    return time.perf_counter() - start


def main() -> None:
    part = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    x, y = torch.rand(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    seconds(x, y, STEPS, 3, rules=None)  # warm up
    without = seconds(x, y, STEPS, part, rules=None)
    with_ledger = seconds(x, y, STEPS, part)
    print(f"{part} of {STEPS} steps, {torch.get_num_threads()} threads")
    print(f"without accounting: {without:.1f} s, {1e3 * without / part:.0f} ms a step")
    print(
        f"default budget ({Settings(1, 1, RATE).budget}): {with_ledger:.1f} s, {1e3 * with_ledger / part:.0f} ms a step"
    )
    print(f"with accounting over without: {with_ledger / without:.2f} times (target: at most {TARGET:g})")


if __name__ == "__main__":
    main()
