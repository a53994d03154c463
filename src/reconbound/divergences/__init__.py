"""Divergences between releases whose data differ in one record: order 2, Kullback–Leibler and the overlap 1 − LC.

Everything here is a function of m, the largest norm of one record's clipped gradient over the noise's standard
deviation on the sum (m = sensitivity/noise_multiplier), of the sampling rate q and of the number of steps. All results
are in nats, in float64 and computed in log space: nothing overflows. docs/theory/divergences.md has the proofs.
"""

from reconbound.divergences.fixed_size import fixed_size_delta
from reconbound.divergences.kl import kl_fixed, kl_pure
from reconbound.divergences.order2 import order2_fixed, order2_gaussian, order2_paper, order2_poisson, order2_pure
from reconbound.divergences.overlap import overlap_fixed, overlap_poisson
from reconbound.divergences.poisson_kl import pair_kl_bound, poisson_kl, poisson_pair_kl
from reconbound.divergences.sensitivity import SMOOTH_SENSITIVITY, output_perturbation_shift, sensitivity

__all__ = [
    "SMOOTH_SENSITIVITY",
    "fixed_size_delta",
    "kl_fixed",
    "kl_pure",
    "order2_fixed",
    "order2_gaussian",
    "order2_paper",
    "order2_poisson",
    "order2_pure",
    "output_perturbation_shift",
    "overlap_fixed",
    "overlap_poisson",
    "pair_kl_bound",
    "poisson_kl",
    "poisson_pair_kl",
    "sensitivity",
]
