"""Does the tanh that the paper's table 1 lists after the last layer explain its RDP line on MNIST? Accuracy with it.

RECONBOUND_DATA=FOLDER python experiments/tanh_logits.py [C ...]    (σ = 2, step 0.1, T to 5,000; no accounting)"""

import sys

from mnist_private_sgd import accuracy, load, losses
from torch import nn

from reconbound.networks import mnist_cnn
from reconbound.sgd import PrivateSGD, Settings


def main() -> None:
    (x, y), (test_x, test_y) = load(None, True), load(None, False)
    for clip in [float(given) for given in sys.argv[1:]] or [4.0]:
        settings = Settings(2.0, clip, 0.01, lr=0.1, momentum=0.5, rules=None, seed=1)
        model = nn.Sequential(*mnist_cnn(), nn.Tanh())
        test = lambda m: {"accuracy": accuracy(m, test_x, test_y)}  # noqa: E731
        learner = PrivateSGD(model, losses, x, y, settings, evaluate=test, evaluate_every=1000).fit(5000)
        for row in learner.history:
            print(f"C = {clip:g}, T = {row['step']}: {row['accuracy']:.2%}")


if __name__ == "__main__":
    main()
