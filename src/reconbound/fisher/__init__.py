"""Fisher information that one clipped, noisy gradient step gives about each record."""

from reconbound.divergences import sensitivity
from reconbound.fisher.clipping import Clip, Clipping, clipping
from reconbound.fisher.options import ProbeOptions, StepOptions, SumOptions
from reconbound.fisher.probes import draw_probes
from reconbound.fisher.reference import CoordinateOptions, DenseInformation, coordinate_information, dense_information
from reconbound.fisher.step import StepInformation, step_information
from reconbound.fisher.sums import ClippedSum, clipped_gradient_sum, covering_method
from reconbound.validate.private import Private

__all__ = [
    "Clip",
    "ClippedSum",
    "Clipping",
    "CoordinateOptions",
    "DenseInformation",
    "Private",
    "ProbeOptions",
    "StepInformation",
    "StepOptions",
    "SumOptions",
    "clipped_gradient_sum",
    "clipping",
    "coordinate_information",
    "covering_method",
    "dense_information",
    "draw_probes",
    "sensitivity",
    "step_information",
]
