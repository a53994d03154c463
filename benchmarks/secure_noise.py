"""What noise from a cryptographic generator costs beside Philox, alone and as a share of a private step."""

import time

import torch

from reconbound.fisher import clipped_gradient_sum
from reconbound.networks import mnist_cnn
from reconbound.noise import draw

SIZES = {"MNIST network": 26_010, "CIFAR-10 network": 550_570}
REPEATS = 7


def seconds(call) -> float:
    """The best of a few calls, after one to warm up."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    cpu, ratio = torch.device("cpu"), 0.0
    for name, size in SIZES.items():
        fast, secure = (
            seconds(lambda source=source, size=size: draw(source, 1, 0, size, cpu)) for source in ("philox", "secure")
        )
        ratio = secure / fast
        print(f"{name}, {size:,} numbers: Philox {1e3 * fast:.2f} ms, secure {1e3 * secure:.2f} ms, {ratio:.0f} times")
        if size == SIZES["MNIST network"]:
            model, x, y = mnist_cnn(), torch.randn(600, 1, 28, 28), torch.randint(0, 10, (600,))
            loss = lambda out, target: torch.nn.functional.cross_entropy(out, target, reduction="none")  # noqa: E731
            step = seconds(lambda: clipped_gradient_sum(model, loss, x, y, max_grad_norm=8.0))  # noqa: B023
            print(
                f"    of a step on 600 records ({1e3 * step:.0f} ms, {torch.get_num_threads()} threads): "
                f"{secure / step:.1%}"
            )
    print(f"secure noise over Philox noise, {size:,} numbers: {ratio:.1f} times")


if __name__ == "__main__":
    main()
