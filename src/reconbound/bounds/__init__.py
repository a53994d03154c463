"""Error floors: numbers in, a `Bound` out. NumPy and SciPy only, float64.

Unbiased attackers: `theorem1`, `by_position`, `corners` (order-2 Rényi DP); `lecam_unbiased` (overlap); `theorem2`,
`from_trace`, `from_spectral_norm`, `per_feature`, `per_group` (Fisher information).
Any attacker: `van_trees`, `van_trees_trace`, `box_minimax` (Fisher information); `lecam` with `overlap_from_…`;
`rate_distortion`, `corners_floor`, `uniform_floor`, `ball_floor`, `gaussian_floor` (KL; `Parts`); `layer_cake`;
`success_from_kl`, `membership_from_kl`, `two_point_floor`, `entropy_power_floor`, `wrong_category_floor`,
`mean_van_trees` (the ledgers); `success_estimate` is no bound.
"""

from reconbound.bounds.any_attacker import (
    box_minimax,
    lecam,
    overlap_from_losses,
    overlap_from_order2,
    overlap_from_pure,
    overlap_from_renyi,
    van_trees,
    van_trees_trace,
)
from reconbound.bounds.bound import Bound
from reconbound.bounds.divergence_success import (
    entropy_power_floor,
    mean_van_trees,
    membership_from_kl,
    success_estimate,
    success_from_kl,
    two_point_floor,
    wrong_category_floor,
)
from reconbound.bounds.parts import Parts, parts_by_draws, parts_from_dp, parts_from_losses, parts_gaussian
from reconbound.bounds.rate_distortion import ball_floor, corners_floor, gaussian_floor, rate_distortion, uniform_floor
from reconbound.bounds.success import (
    layer_cake,
    membership_from_gdp,
    membership_from_pure,
    prior_from_records,
    rero_from_curve,
    rero_from_gdp,
    rero_from_order2,
    rero_from_pure,
)
from reconbound.bounds.unbiased import (
    by_position,
    corners,
    from_spectral_norm,
    from_trace,
    lecam_unbiased,
    per_feature,
    per_group,
    theorem1,
    theorem2,
)

__all__ = [
    "Bound",
    "Parts",
    "ball_floor",
    "box_minimax",
    "by_position",
    "corners",
    "corners_floor",
    "entropy_power_floor",
    "from_spectral_norm",
    "from_trace",
    "gaussian_floor",
    "layer_cake",
    "lecam",
    "lecam_unbiased",
    "mean_van_trees",
    "membership_from_gdp",
    "membership_from_kl",
    "membership_from_pure",
    "overlap_from_losses",
    "overlap_from_order2",
    "overlap_from_pure",
    "overlap_from_renyi",
    "parts_by_draws",
    "parts_from_dp",
    "parts_from_losses",
    "parts_gaussian",
    "per_feature",
    "per_group",
    "prior_from_records",
    "rate_distortion",
    "rero_from_curve",
    "rero_from_gdp",
    "rero_from_order2",
    "rero_from_pure",
    "success_estimate",
    "success_from_kl",
    "theorem1",
    "theorem2",
    "two_point_floor",
    "uniform_floor",
    "van_trees",
    "van_trees_trace",
    "wrong_category_floor",
]
