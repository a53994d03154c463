"""Do the initial weights matter for the paper's CIFAR-10 network? Accuracy as it trains, at σ = 2 without accounting.

RECONBOUND_DATA=FOLDER python experiments/cifar10_start.py torch|lecun [STEPS]    seconds a step on a CPU core"""

import sys

import torch
from _grid import losses, scaled

from reconbound.auditing.models import cifar10_cnn, lecun_normal
from reconbound.data import cifar10
from reconbound.training.private_sgd import PrivateSGD, Settings


def main() -> None:
    start, steps = sys.argv[1], int((sys.argv[2:] or ["800"])[0])
    (x, y), (test_x, test_y) = (
        (scaled(a), torch.from_numpy(b)) for a, b in (cifar10(train=True), cifar10(train=False))
    )

    def accuracy(model: torch.nn.Module) -> dict[str, float]:
        with torch.no_grad():
            right = torch.cat([model(part).argmax(1) for part in test_x[:2000].split(500)]).eq(test_y[:2000])
        print(f"{start}: {float(right.double().mean()):.2%} of 2,000 test images", flush=True)
        return {"accuracy": float(right.double().mean())}

    settings = Settings(2.0, 2.0, 0.004, lr=0.03, momentum=0.5, rules=None, seed=1)
    torch.manual_seed(0)
    model = cifar10_cnn()
    if start == "lecun":
        lecun_normal(model)
    PrivateSGD(model, losses, x, y, settings, evaluate=accuracy, evaluate_every=100).fit(steps)


if __name__ == "__main__":
    main()
