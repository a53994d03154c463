"""What cryptographic noise costs: beside Philox, which it replaced, as a share of a private step; and the hash."""

import time

import numpy as np
import torch

from reconbound._internal.chacha import key_words, keystream
from reconbound._internal.files import tensor_digest
from reconbound.auditing.models import mnist_cnn
from reconbound.fisher import clipped_gradient_sum
from reconbound.training.noise import draw, draw_for

SIZES = {"MNIST network": 26_010, "CIFAR-10 network": 550_570, "a million": 1_000_000}
REPEATS = 7


def seconds(call, device: str) -> float:
    """The best of a few calls, after one to warm up."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def philox(size: int, device: torch.device) -> torch.Tensor:
    """Normal numbers from a generator that is not cryptographic."""
    if device.type == "cpu":
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=1)).standard_normal(size))
    return torch.randn(size, device=device, dtype=torch.float64, generator=torch.Generator(device).manual_seed(1))


def main() -> None:
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        place = torch.device(device)
        model, x = mnist_cnn().to(place), torch.randn(600, 1, 28, 28, device=place)
        y = torch.randint(0, 10, (600,), device=place)
        loss = lambda out, target: torch.nn.functional.cross_entropy(out, target, reduction="none")  # noqa: E731
        step = seconds(lambda: clipped_gradient_sum(model, loss, x, y, max_grad_norm=8.0), device)  # noqa: B023
        print(f"{device}, {torch.get_num_threads()} threads; a step of the MNIST network on 600 records: {step:.3f} s")
        for name, size in SIZES.items():
            total = torch.randn(size, device=place)
            work = {
                "Philox": lambda: philox(size, place),  # noqa: B023
                "ours": lambda: draw(1, size, place),  # noqa: B023
                "ours, bound to a sum": lambda: draw_for(total, 1, 0),  # noqa: B023
                "SHA-256 of the sum": lambda: tensor_digest({"": total}),  # noqa: B023
                "ChaCha20 in torch": lambda: keystream(key_words(bytes(32), place), 0, (size + 1) // 2),  # noqa: B023
            }
            taken = {what: seconds(call, device) for what, call in work.items()}
            told = ", ".join(f"{what} {1e3 * t:.2f} ms" for what, t in taken.items())
            share = taken["ours, bound to a sum"] / step
            print(f"    {name}, {size:,} numbers: {told}" + (f"; {share:.1%} of the step" if size == 26_010 else ""))


if __name__ == "__main__":
    main()
