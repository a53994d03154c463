"""MNIST with the paper's network and setting: accuracy, and floors under the exact factor and the paper's κ.

RECONBOUND_DATA=FOLDER python experiments/mnist_private_sgd.py [--steps 1000] [--budget 1.0] [--checkpoint FOLDER]"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from reconbound._internal.files import PUBLIC, write_whole
from reconbound.auditing.models import mnist_cnn
from reconbound.data import mnist
from reconbound.training.private_sgd import PrivateSGD, Settings

RATE, NOISE, CLIP, LR, MOMENTUM, STEPS, SEED = 0.01, 0.5, 8.0, 0.03, 0.5, 1000, 0
RESULTS = Path(__file__).parent / "results" / "mnist_private_sgd.json"


def load(folder: str | None, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = mnist(folder, train=train)
    return torch.from_numpy(images.copy()).float().unsqueeze(1) / 255, torch.from_numpy(labels)


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return right / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--budget", type=float, default=1.0, help="records measured over records trained on")
    parser.add_argument("--checkpoint", default=None, help="a folder to stop in and go on from")
    parser.add_argument("--out", default=str(RESULTS))
    asked = parser.parse_args()
    beside = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    folder = os.environ.get("RECONBOUND_DATA") or str(beside)
    (x, y), (test_x, test_y) = load(folder, True), load(folder, False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    model = mnist_cnn().to(device)
    settings = Settings(
        NOISE, CLIP, RATE, lr=LR, momentum=MOMENTUM, rules=("exact", "paper"), budget=asked.budget, seed=SEED
    )
    test = lambda m: {"accuracy": accuracy(m, test_x.to(device), test_y.to(device))}  # noqa: E731
    learner = PrivateSGD(
        model, losses, x, y, settings, evaluate=test, evaluate_every=250, checkpoint=asked.checkpoint, every=50
    )
    start = time.perf_counter()
    learner.fit(asked.steps)
    seconds = time.perf_counter() - start
    ledger = learner.accountant
    assert ledger is not None
    floors = {rule: ledger.mse_floor(rule).value for rule in ledger.account.rules}
    found = {
        "setting": {
            "sample_rate": RATE,
            "noise_multiplier": NOISE,
            "max_grad_norm": CLIP,
            "lr": LR,
            "momentum": MOMENTUM,
            "steps": asked.steps,
            "budget": asked.budget,
            "records": len(y),
            "device": device,
            "threads": torch.get_num_threads(),
        },
        "test_accuracy": learner.history[-1]["accuracy"],
        "floors": {
            rule: {"lowest": float(v.min()), "median": float(np.median(v)), "highest": float(v.max())}
            for rule, v in floors.items()
        },
        "exact_higher_at_every_record": bool((floors["exact"] > floors["paper"]).all()),
        "smallest_ratio_exact_over_paper": float((floors["exact"] / floors["paper"]).min()),
        "median_ratio_exact_over_paper": float(np.median(floors["exact"] / floors["paper"])),
        "measured_per_record": ledger.summary()["measured_per_record"],
        "relative_standard_error_median": ledger.summary()["relative_standard_error_median"],
        "seconds": round(seconds, 1),
    }
    print(f"test accuracy {found['test_accuracy']:.2%} after {asked.steps} steps, {seconds:.0f} s on {device}")
    print("MSE floor, pixels in [0, 1]   lowest     median     highest")
    for rule, v in floors.items():
        print(f"{rule:27} {v.min():9.3g}  {np.median(v):9.3g}  {v.max():9.3g}")
    print(f"exact above paper at every record: {found['exact_higher_at_every_record']}")
    out = Path(asked.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, (json.dumps(found, indent=1) + "\n").encode(), mode=PUBLIC)


if __name__ == "__main__":
    main()
