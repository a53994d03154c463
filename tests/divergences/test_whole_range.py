"""Divergences and overlaps over the whole range of their arguments: finite, ordered, monotone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_renyi import RATES, SHIFTS

from approximate import TENS
from reconbound import divergences as renyi
from reconbound._internal.checks import InputError

# --- the whole range -----------------------------------


def in_order(values):
    """Non-decreasing up to rounding, finite, non-negative."""
    values = np.asarray(values)
    assert np.all(np.isfinite(values))
    assert np.all(values >= 0)
    assert np.all(np.diff(values) >= -1e-11 * values[1:] - 1e-300), values


PER_STEP = {
    "poisson": renyi.order2_poisson,
    "closed": lambda m, q: renyi.order2_poisson(m, q, method="closed"),
    "wang": renyi.order2_fixed,
    "convexity": lambda m, q: renyi.order2_fixed(m, q, method="convexity"),
    "paper": renyi.order2_paper,
    "kl_poisson": renyi.kl_poisson,
    "kl_fixed": renyi.kl_fixed,
}


@pytest.mark.parametrize("name", PER_STEP)
@given(SHIFTS, st.floats(0, 2), RATES, st.floats(0, 2))
@settings(max_examples=80, deadline=None)
def test_divergences_are_finite_and_grow_with_m_and_q(name, m, wider, q, more):
    f = PER_STEP[name]
    in_order([f(m, q), f(m * 10**wider, q)])
    if name != "closed":  # the closed form passes the whole batch's value near q = 1
        in_order([f(m, q), f(m, min(q * 10**more, 1.0))])


@given(TENS, st.floats(0, 3))
@settings(max_examples=200, deadline=None)
def test_pure_divergences_are_finite_ordered_and_grow(eps, more):
    larger = eps * 10**more
    in_order([renyi.order2_pure(eps), renyi.order2_pure(larger)])
    in_order([renyi.kl_pure(eps), renyi.kl_pure(larger), larger])
    in_order([renyi.kl_pure(eps), renyi.order2_pure(eps), eps])


@given(SHIFTS, RATES)
@settings(max_examples=150, deadline=None)
def test_divergences_are_ordered(m, q):
    in_order([renyi.kl_poisson(m, q), renyi.order2_paper(m, q), renyi.order2_poisson(m, q)])
    if q < 1:
        in_order([renyi.order2_poisson(m, q), min(renyi.order2_poisson(m, q, method="closed"), 4 * m * m)])
    in_order([renyi.order2_poisson(m, q), renyi.order2_fixed(m, q)])


@given(SHIFTS, st.floats(0, 2), RATES, st.floats(0, 2), st.floats(0, 6), st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_overlap_is_a_share_and_falls(m, wider, q, more, log_steps, longer):
    steps = int(10**log_steps)
    base = renyi.overlap_poisson(m, q, steps)
    assert 0 <= base <= 1
    larger = (
        renyi.overlap_poisson(m * 10**wider, q, steps),
        renyi.overlap_poisson(m, min(q * 10**more, 1.0), steps),
        renyi.overlap_poisson(m, q, int(steps * 10**longer)),
    )
    for value in larger:
        assert 0 <= value <= base * (1 + 1e-9) + 2e-13
    fixed = renyi.overlap_fixed(m, q, steps, order2=steps * renyi.order2_fixed(m, q))
    assert 0 <= fixed <= 1
    # both are rigorous floors of the Poisson overlap too: order 2, and order ½ by joint concavity
    if (order2 := steps * renyi.order2_poisson(m, q)) < 700:
        assert base >= 2 / (1 + math.exp(order2)) * (1 - 1e-9)
    assert base >= (1 + q * math.expm1(-m * m / 2)) ** (2 * steps) * (1 - 1e-7) - 2e-13


def test_limits():
    for f in PER_STEP.values():
        assert f(0.0, 0.5) == 0.0
    assert renyi.order2_pure(math.inf) == math.inf
    assert renyi.kl_pure(math.inf) == math.inf
    assert renyi.order2_pure(0.0) == renyi.kl_pure(0.0) == 0.0
    assert renyi.overlap_poisson(1.0, 0.5, 0) == 1.0
    assert renyi.overlap_poisson(0.0, 0.5, 10) == 1.0
    assert renyi.overlap_poisson(1e150, 1.0, 10**12) == 0.0
    assert renyi.overlap_fixed(1e150, 1.0, 10**12, order2=math.inf) == 0.0


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: renyi.order2_poisson(-1.0, 0.5), "m", "-1.0"),
        (lambda: renyi.order2_poisson(math.nan, 0.5), "m", "nan"),
        (lambda: renyi.order2_poisson(10**400, 0.5), "m", "1000"),
        (lambda: renyi.order2_poisson(1.0, 0.0), "sample_rate", "0.0"),
        (lambda: renyi.order2_poisson(1.0, 1.5), "sample_rate", "1.5"),
        (lambda: renyi.order2_poisson(1.0, 0.5, method="best"), "method", "best"),
        (lambda: renyi.order2_fixed(1.0, "x"), "sample_rate", "x"),
        (lambda: renyi.order2_fixed(1.0, 0.5, method="exact"), "method", "exact"),
        (lambda: renyi.order2_pure(-0.1), "epsilon", "-0.1"),
        (lambda: renyi.kl_pure(math.nan), "epsilon", "nan"),
        (lambda: renyi.kl_poisson(1.0, -0.5), "sample_rate", "-0.5"),
        (lambda: renyi.kl_fixed(math.inf, 0.5), "m", "inf"),
        (lambda: renyi.overlap_poisson(1.0, 0.5, 1.5), "steps", "1.5"),
        (lambda: renyi.overlap_poisson(1.0, 0.5, -1), "steps", "-1"),
        (lambda: renyi.overlap_fixed(1.0, 0.5, 1, order2=-1.0), "epsilon", "-1.0"),
        (lambda: renyi.sensitivity("soft"), "clip", "soft"),
        (lambda: renyi.output_perturbation_shift(0, 1.0, 1.0), "records", "0"),
        (lambda: renyi.output_perturbation_shift(10, -1.0, 1.0), "l2", "-1.0"),
        (lambda: renyi.output_perturbation_shift(10, 1.0, 0.0), "noise_std", "0.0"),
        (lambda: renyi.output_perturbation_shift(10, 1.0, 1.0, -2.0), "data_norm", "-2.0"),
        (lambda: renyi.output_perturbation_shift(1, 1e-200, 1e-200), "noise_std", "1e-200"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.name == name
    assert str(caught.value).startswith(name + " ")
    assert value in str(caught.value)
