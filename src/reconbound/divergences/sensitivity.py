"""m, the largest shift of a release by one record: of clipped gradients and of output perturbation.

m is the largest norm of one record's clipped gradient over the noise's standard deviation on the sum, that is
sensitivity/noise_multiplier.
"""

from __future__ import annotations

from reconbound._internal.checks import InputError, choice, number, whole

#: sup ‖g̃‖/C of the clip c = 1/(GELU(n/C − 1) + 1), rounded up (1.11522 for the erf GELU, 1.11524 for the tanh form).
SMOOTH_SENSITIVITY = 1.1153


def sensitivity(clip: str) -> float:
    """Returns the largest norm that a clipped gradient can have, in units of the clip norm.

    sup_n c(n) n / C  ≤  1 (hard),  1.1153 (smooth: the supremum is 1.11522)

    Args:
        clip: "hard" or "smooth".

    Guarantee: adding or removing one record moves the sum of clipped gradients by at most this times C, for every
    model, loss and record.

    >>> sensitivity("hard"), sensitivity("smooth")
    (1.0, 1.1153)
    """
    return 1.0 if choice("clip", clip, ("smooth", "hard")) == "hard" else SMOOTH_SENSITIVITY


def output_perturbation_shift(records: int, l2: float, noise_std: float, data_norm: float = 1.0) -> float:
    """Returns m of output perturbation: how far one record can move the minimiser, over the noise's standard deviation.

        m = L/(nλσ),   L = sup‖∇ℓ‖ = data_norm for logistic loss;   replace-one: ε₂ = (2m)²

    Args:
        records: n.
        l2: λ of the objective Σℓ + (nλ/2)‖θ‖².
        noise_std: σ, the noise's standard deviation per coordinate of θ.
        data_norm: a bound on the rows' Euclidean norm, to which rows must be clipped; a constant feature (intercept)
            belongs to the row, so that pixels clipped to 1 together with it have norm √2.

    >>> round(4 * output_perturbation_shift(12665, 1e-2, 1e-2) ** 2, 2)      # the paper's order-2 divergence
    2.49
    """
    n, strength = whole("records", records), number("l2", l2, above=0.0)
    noise, norm = number("noise_std", noise_std, above=0.0), number("data_norm", data_norm, above=0.0)
    m = norm / n / strength / noise  # one division at a time: the product may underflow
    if m > 1e100:
        raise InputError("noise_std", "must be large enough for data_norm/(records l2 noise_std) ≤ 1e100", noise_std)
    return m


def checked_shift(m: float) -> float:
    """Returns m; refuses a negative one, and one whose square is too large for a float."""
    return number("m", m, at_least=0.0, at_most=1e150)


def checked_rate(q: float) -> float:
    """Returns a sampling rate; refuses one outside (0, 1]."""
    return number("sample_rate", q, above=0.0, at_most=1.0)
