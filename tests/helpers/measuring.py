"""`step_information` and `clipped_gradient_sum` with all options as plain arguments, for tables of tests."""

from typing import Any

from reconbound.fisher import (
    ClippedSum,
    ProbeOptions,
    StepInformation,
    StepOptions,
    SumOptions,
    clipped_gradient_sum,
    step_information,
)

_MECHANISM = ("max_grad_norm", "noise_multiplier", "clip")
_PROBES = {"probes": "count", "probe": "space"}
_PROBES |= {name: name for name in ("deflate", "directions", "error", "generator")}


def measure(*problem: Any, **arguments: Any) -> StepInformation:
    """Calls `step_information`. "probes" is ProbeOptions.count and "probe" is ProbeOptions.space."""
    mechanism = {name: arguments.pop(name) for name in _MECHANISM if name in arguments}
    probes = {field: arguments.pop(name) for name, field in _PROBES.items() if name in arguments}
    return step_information(*problem, **mechanism, options=StepOptions(**arguments, probes=ProbeOptions(**probes)))


def sum_clipped(*problem: Any, **arguments: Any) -> ClippedSum:
    """Calls `clipped_gradient_sum`."""
    mechanism = {name: arguments.pop(name) for name in _MECHANISM if name in arguments}
    return clipped_gradient_sum(*problem, **mechanism, options=SumOptions(**arguments))
