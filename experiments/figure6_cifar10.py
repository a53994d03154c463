"""Figure 6 of the paper: the most and least exposed CIFAR-10 training images, T = 5,000, σ = 0.5, step 0.1, C = 1.

The records are those that `figure5_cifar10.py --train --exposed FILE` found (results/figure6_cifar10.json): a ledger by
the exact factor, one run, each record measured at two random steps. CIFAR-10 is public; of your own data such indices
are as secret as the data."""

import json
from collections import Counter

import numpy as np
from _common import RESULTS, folder, plt, save

from reconbound.data import cifar10

SHOWN = 10
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def main() -> None:
    found = json.loads((RESULTS / "figure6_cifar10.json").read_text())
    images, labels = cifar10(folder())
    figure, axes = plt.subplots(2, SHOWN, figsize=(1.15 * SHOWN, 3.3))
    for row, which in zip(axes, ("most", "least"), strict=True):
        for axis, (record, dfil) in zip(row, found[which], strict=False):
            axis.imshow(np.moveaxis(images[record], 0, 2), interpolation="nearest")
            axis.set_title(f"η̄ = {dfil**0.5:.2g}\n{NAMES[labels[record]]}", fontsize=8)
            axis.axis("off")
    setting = (
        f"T = {found['steps']:,}, σ = {found['noise_multiplier']}, step {found['lr']}, C = {found['max_grad_norm']:g}"
    )
    figure.suptitle(f"CIFAR-10, {setting}: the most (above) and least (below) exposed training images", fontsize=10)
    save(figure, "figure6_cifar10")
    for which in ("most", "least"):
        counts = Counter(NAMES[labels[record]] for record, _ in found[which])
        low, high = (f(v for _, v in found[which]) for f in (min, max))
        print(f"{which} exposed: dFIL {low:.2g} to {high:.2g}; {dict(counts)}")


if __name__ == "__main__":
    main()
