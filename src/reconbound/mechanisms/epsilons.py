"""ε of one Gaussian release, exactly, and of batches of fixed size through Rényi orders; both through dp-accounting."""

from __future__ import annotations

import math

from reconbound.mechanisms.privacy_loss import without_overflow_warnings


def gaussian_epsilon(shift: float, target_delta: float) -> float:
    """Returns ε of one Gaussian release whose neighbours are `shift` standard deviations apart (the exact curve).

    Args:
        shift: the distance of neighbours in standard deviations of the noise.
        target_delta: δ.
    """
    import dp_accounting as dp

    if shift > 1e3:
        return shift**2 / 2 + shift * math.sqrt(2 * math.log(1 / target_delta))
    with without_overflow_warnings():
        found = max(float(dp.get_epsilon_gaussian(1 / shift, target_delta)), 0.0)
    return found * (1 + 1e-12) + 2e-12 if found > 0 else 0.0  # its root is known to 1e-12, on either side


def fixed_size_epsilon(m: float, sample_rate: float, steps: int, target_delta: float) -> float | None:
    """Returns ε of T fixed-size Gaussian steps through Rényi orders 2 to 512 (Wang et al.), replace-one.

    dp-accounting 0.6 charges add/remove sensitivity under REPLACE_ONE, so half the noise multiplier is passed;
    tests/mechanisms/test_dp_accounting.py fails when a release changes that.

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.
        steps: T.
        target_delta: δ.
    """
    import dp_accounting as dp

    if m > 30:
        return None
    source = 10**9
    noise = 0.5 / max(m, 1e-6)  # less noise is the safe side; dp-accounting fails beyond it
    event = dp.SampledWithoutReplacementDpEvent(source, math.ceil(sample_rate * source), dp.GaussianDpEvent(noise))
    orders = [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512]
    accountant = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation.REPLACE_ONE)
    with without_overflow_warnings():
        value = float(accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(target_delta))
    return value if math.isfinite(value) else None
