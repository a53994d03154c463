"""reconbound: how well is each training record protected against reconstruction?

Names are imported when first used, so that the calculator never loads torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # nothing is imported here, so that the command line starts at once
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0.dev0"

_HOME = {
    "Account": "accounting.spec",
    "DatasetRows": "training.rows",
    "FisherAccountant": "accounting.accountant",
    "Private": "fisher",
    "PrivateSGD": "training.private_sgd",
    "ProbeOptions": "fisher",
    "Settings": "training.settings",
    "StepInformation": "fisher",
    "StepOptions": "fisher",
    "SumOptions": "fisher",
    "Bound": "bounds",
    "Composition": "mechanisms",
    "schedule": "mechanisms",
    "from_opacus": "mechanisms",
    "ZCDP": "mechanisms",
    "Laplace": "mechanisms",
    "GDP": "mechanisms",
    "DiscreteGaussian": "mechanisms",
    "Guarantee": "mechanisms.guarantee",
    "audit": "auditing.run",
    "check_batch": "validate",
    "check_model": "validate",
    "clipped_gradient_sum": "fisher",
    "Risks": "mechanisms.risk",
    "floor": "mechanisms.guarantee",
    "risks": "mechanisms.risk",
    "guarantee": "mechanisms.guarantee",
    "DP": "mechanisms",
    "PrivateLogisticRegression": "linear",
    "PrivateRidge": "linear",
    "Mechanism": "mechanisms",
    "OutputPerturbation": "mechanisms",
    "load_dataset": "data",
    "load_release": "auditing.release",
    "PLD": "mechanisms",
    "RenyiDP": "mechanisms",
    "Replacement": "fisher.worlds",
    "SampledGaussian": "mechanisms",
    "StepDistances": "fisher.worlds",
    "step_distances": "fisher.worlds",
    "step_information": "fisher",
}

__all__ = [
    "DP",
    "GDP",
    "PLD",
    "ZCDP",
    "Account",
    "Bound",
    "Composition",
    "DatasetRows",
    "DiscreteGaussian",
    "FisherAccountant",
    "Guarantee",
    "Laplace",
    "Mechanism",
    "OutputPerturbation",
    "Private",
    "PrivateLogisticRegression",
    "PrivateRidge",
    "PrivateSGD",
    "ProbeOptions",
    "RenyiDP",
    "Replacement",
    "Risks",
    "SampledGaussian",
    "Settings",
    "StepDistances",
    "StepInformation",
    "StepOptions",
    "SumOptions",
    "__version__",
    "audit",
    "check_batch",
    "check_model",
    "clipped_gradient_sum",
    "floor",
    "from_opacus",
    "guarantee",
    "load_dataset",
    "load_release",
    "risks",
    "schedule",
    "step_distances",
    "step_information",
]

if TYPE_CHECKING:
    from reconbound.accounting.accountant import Account, FisherAccountant
    from reconbound.auditing.release import load_release
    from reconbound.auditing.run import audit
    from reconbound.bounds import Bound
    from reconbound.data import load_dataset
    from reconbound.fisher import (
        Private,
        ProbeOptions,
        StepInformation,
        StepOptions,
        SumOptions,
        clipped_gradient_sum,
        step_information,
    )
    from reconbound.fisher.worlds import Replacement, StepDistances, step_distances
    from reconbound.linear import PrivateLogisticRegression, PrivateRidge
    from reconbound.mechanisms import (
        DP,
        GDP,
        PLD,
        ZCDP,
        Composition,
        DiscreteGaussian,
        Laplace,
        Mechanism,
        OutputPerturbation,
        RenyiDP,
        SampledGaussian,
        from_opacus,
        schedule,
    )
    from reconbound.mechanisms.guarantee import Guarantee, floor, guarantee
    from reconbound.mechanisms.risk import Risks, risks
    from reconbound.training.private_sgd import PrivateSGD, Settings
    from reconbound.training.rows import DatasetRows
    from reconbound.validate import check_batch, check_model


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'reconbound' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
