"""Private linear models in scikit-learn's form, with their information about each record in closed form.

`PrivateLogisticRegression` and `PrivateRidge` fit and release; their `leakage(X, y)` measures how exposed every
training record and feature is. `minimise` and `leakage` are the same as plain functions. Derivations:
docs/theory/linear.md.
"""

from reconbound.linear.base import DataNormWarning, NoiseWarning, ShortenedWarning
from reconbound.linear.estimators import PrivateLogisticRegression, PrivateRidge
from reconbound.linear.information import Leakage, leakage
from reconbound.linear.solver import Logistic, NotConverged, Optimum, Softmax, Squared, minimise

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
