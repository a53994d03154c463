"""The paper's logistic regression, where the data folder is given: the claims of figures 2 and 3 in small."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from reconbound import OutputPerturbation
from reconbound.attacks import simulate
from reconbound.data import mnist
from reconbound.linear import Logistic, leakage, minimise
from where import FOLDER, needs


def digits(train):
    x, y = mnist(FOLDER, train=train)
    keep = y < 2
    return x[keep].reshape(-1, 784) / 255.0, y[keep].astype(float)


@needs("mnist")
def test_figures_2_and_3_in_small():
    x, y = digits(True)
    assert len(x) == 12_665
    o = minimise(x, y, Logistic(), l2=1e-2, intercept=False)
    assert o.gradient_norm < 1e-9  # noise in gradient units at σ = 1e-5: 0.036
    found = leakage(o, 1e-2)
    assert found.floor.value.min() > 1
    assert found.floor.value.min() == pytest.approx(1.7996, abs=1e-3)
    for record in (int(found.trace.argmax()), 5):
        j = o.jacobian(record)
        dense = np.linalg.eigvalsh(j.T @ j / 1e-2**2)
        # both are raised by the rounding error of H⁻¹ (docs/theory/linear.md 6), here by less than 1e-6 of them
        assert dense[-1] * (1 - 1e-12) <= found.spectral_norm[record] <= dense[-1] * (1 + 1e-6)
        assert dense.sum() * (1 - 1e-12) <= found.trace[record] <= dense.sum() * (1 + 1e-6)
    x_test, y_test = digits(False)
    released = o.weights + 1e-2 * np.random.default_rng(0).standard_normal((10, 784))
    assert np.mean((x_test @ released.T > 0) == (y_test[:, None] > 0)) >= 0.999
    assert round(OutputPerturbation(len(x), 1e-2, 1e-2).order2(), 2) == 2.49
    assert round(OutputPerturbation(len(x), 1e-2, 1e-2, data_norm=math.sqrt(784)).order2()) == 1955

    floor = found.floor.value * 1e-6  # σ = 1e-5
    low = np.flatnonzero(floor <= 1)[::20]
    attack = simulate(o, 1e-5, 500, branch="given", records=low, random_state=0)
    assert np.all(attack.mse >= floor[low])
    assert spearmanr(floor[low], attack.median).statistic > 0.99
