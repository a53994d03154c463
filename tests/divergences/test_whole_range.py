"""Divergences and overlaps over the whole range of their arguments: finite, ordered, monotone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order2 import RATES, SHIFTS

from approximate import TENS
from reconbound import divergences
from reconbound._internal.checks import InputError

# --- the whole range -----------------------------------


def in_order(values):
    """Non-decreasing up to rounding, finite, non-negative."""
    values = np.asarray(values)
    assert np.all(np.isfinite(values))
    assert np.all(values >= 0)
    assert np.all(np.diff(values) >= -1e-11 * values[1:] - 1e-300), values


PER_STEP = {
    "poisson": divergences.order2_poisson,
    "closed": lambda m, q: divergences.order2_poisson(m, q, method="closed"),
    "wang": lambda m, q: divergences.order2_fixed(m, q, method="wang"),
    "convexity": divergences.order2_fixed,
    "paper": divergences.order2_paper,
    "poisson_kl": divergences.poisson_kl,
    "kl_fixed": divergences.kl_fixed,
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
    in_order([divergences.order2_pure(eps), divergences.order2_pure(larger)])
    in_order([divergences.kl_pure(eps), divergences.kl_pure(larger), larger])
    in_order([divergences.kl_pure(eps), divergences.order2_pure(eps), eps])


@given(SHIFTS, RATES)
@settings(max_examples=150, deadline=None)
def test_divergences_are_ordered(m, q):
    in_order([divergences.poisson_kl(m, q), divergences.order2_paper(m, q), divergences.order2_poisson(m, q)])
    if q < 1:
        in_order([divergences.order2_poisson(m, q), min(divergences.order2_poisson(m, q, method="closed"), 4 * m * m)])
    in_order([divergences.order2_poisson(m, q), divergences.order2_fixed(m, q)])


@given(SHIFTS, st.floats(0, 2), RATES, st.floats(0, 2), st.floats(0, 6), st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_overlap_is_a_share_and_falls(m, wider, q, more, log_steps, longer):
    steps = int(10**log_steps)
    base = divergences.overlap_poisson(m, q, steps)
    assert 0 <= base <= 1
    larger = (
        divergences.overlap_poisson(m * 10**wider, q, steps),
        divergences.overlap_poisson(m, min(q * 10**more, 1.0), steps),
        divergences.overlap_poisson(m, q, int(steps * 10**longer)),
    )
    for value in larger:
        assert 0 <= value <= base * (1 + 1e-9) + 2e-13
    fixed = divergences.overlap_fixed(m, q, steps, order2=steps * divergences.order2_fixed(m, q))
    assert 0 <= fixed <= 1
    # both are rigorous floors of the Poisson overlap too: order 2, and order ½ by joint concavity
    if (order2 := steps * divergences.order2_poisson(m, q)) < 700:
        assert base >= 2 / (1 + math.exp(order2)) * (1 - 1e-9)
    assert base >= (1 + q * math.expm1(-m * m / 2)) ** (2 * steps) * (1 - 1e-7) - 2e-13


def test_limits():
    for f in PER_STEP.values():
        assert f(0.0, 0.5) == 0.0
    assert divergences.order2_pure(math.inf) == math.inf
    assert divergences.kl_pure(math.inf) == math.inf
    assert divergences.order2_pure(0.0) == divergences.kl_pure(0.0) == 0.0
    assert divergences.overlap_poisson(1.0, 0.5, 0) == 1.0
    assert divergences.overlap_poisson(0.0, 0.5, 10) == 1.0
    assert divergences.overlap_poisson(1e150, 1.0, 10**12) == 0.0
    assert divergences.overlap_fixed(1e150, 1.0, 10**12, order2=math.inf) == 0.0


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: divergences.order2_poisson(-1.0, 0.5), "m", "-1.0"),
        (lambda: divergences.order2_poisson(math.nan, 0.5), "m", "nan"),
        (lambda: divergences.order2_poisson(10**400, 0.5), "m", "1000"),
        (lambda: divergences.order2_poisson(1.0, 0.0), "sample_rate", "0.0"),
        (lambda: divergences.order2_poisson(1.0, 1.5), "sample_rate", "1.5"),
        (lambda: divergences.order2_poisson(1.0, 0.5, method="best"), "method", "best"),
        (lambda: divergences.order2_fixed(1.0, "x"), "sample_rate", "x"),
        (lambda: divergences.order2_fixed(1.0, 0.5, method="exact"), "method", "exact"),
        (lambda: divergences.order2_pure(-0.1), "epsilon", "-0.1"),
        (lambda: divergences.kl_pure(math.nan), "epsilon", "nan"),
        (lambda: divergences.poisson_kl(1.0, -0.5), "sample_rate", "-0.5"),
        (lambda: divergences.kl_fixed(math.inf, 0.5), "m", "inf"),
        (lambda: divergences.overlap_poisson(1.0, 0.5, 1.5), "steps", "1.5"),
        (lambda: divergences.overlap_poisson(1.0, 0.5, -1), "steps", "-1"),
        (lambda: divergences.overlap_fixed(1.0, 0.5, 1, order2=-1.0), "epsilon", "-1.0"),
        (lambda: divergences.sensitivity("soft"), "clip", "soft"),
        (lambda: divergences.output_perturbation_shift(0, 1.0, 1.0), "records", "0"),
        (lambda: divergences.output_perturbation_shift(10, -1.0, 1.0), "l2", "-1.0"),
        (lambda: divergences.output_perturbation_shift(10, 1.0, 0.0), "noise_std", "0.0"),
        (lambda: divergences.output_perturbation_shift(10, 1.0, 1.0, -2.0), "data_norm", "-2.0"),
        (lambda: divergences.output_perturbation_shift(1, 1e-200, 1e-200), "noise_std", "1e-200"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.name == name
    assert str(caught.value).startswith(name + " ")
    assert value in str(caught.value)
