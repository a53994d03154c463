"""Private linear models in scikit-learn's form, with what they tell about each record in closed form.

`PrivateLogisticRegression` and `PrivateRidge` fit and release; their `leakage(X, y)` says how exposed every training
record and feature is. `minimise` and `leakage` are the same as plain functions. Derivations: docs/theory-linear.md."""

from ._base import DataNormWarning, NoiseWarning, ShortenedWarning
from .estimators import PrivateLogisticRegression, PrivateRidge
from .information import Leakage, leakage
from .losses import Logistic, Softmax, Squared
from .solver import NotConverged, Optimum, minimise

__all__ = [
    "DataNormWarning",
    "Leakage",
    "Logistic",
    "NoiseWarning",
    "NotConverged",
    "Optimum",
    "PrivateLogisticRegression",
    "PrivateRidge",
    "ShortenedWarning",
    "Softmax",
    "Squared",
    "leakage",
    "minimise",
]
