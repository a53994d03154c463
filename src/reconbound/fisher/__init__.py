"""What one noisy gradient tells about each record: the Fisher information of a clipped, noisy step."""

from reconbound.fisher.clipped import ClippedSum, clipped_gradient_sum
from reconbound.fisher.clipping import Clip, Clipping, clipping, sensitivity
from reconbound.fisher.information import StepInformation, draw_probes, step_information
from reconbound.fisher.private import Private
from reconbound.fisher.reference import DenseInformation, coordinate_information, dense_information

__all__ = [
    "Clip",
    "ClippedSum",
    "Clipping",
    "clipped_gradient_sum",
    "DenseInformation",
    "Private",
    "StepInformation",
    "clipping",
    "coordinate_information",
    "dense_information",
    "draw_probes",
    "sensitivity",
    "step_information",
]
