"""KL divergences of a Poisson-sampled step between two worlds for one record, against many digits."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy.special import entr

from approximate import close
from reconbound._internal.checks import InputError
from reconbound.accounting.amplification import poisson_factors
from reconbound.divergences import pair_kl_bound, poisson_kl, poisson_pair_kl
from reconbound.divergences.poisson_kl import _polynomials

# --- references -----------------------------------


def mp_trapezoid(f, low, high, step):
    """Returns ∫f for a function that falls like a Gaussian at both ends."""
    count = int(mp.ceil((high - low) / step))
    step = mp.mpf(high - low) / count
    return step * mp.fsum(f(low + step * j) for j in range(count + 1))


def mp_line_mean(f, mean, largest):
    """Returns E f(y), y ~ N(mean, 1)."""
    density = lambda y: mp.exp(-((y - mean) ** 2) / 2) / mp.sqrt(2 * mp.pi)  # noqa: E731
    return mp_trapezoid(lambda y: f(y) * density(y), mean - 15, mean + 15, mp.mpf(1) / (7 * max(1, largest)))


def mp_pair(a, b, q):
    """Returns k_q(a, b) as a difference of plain means along a and along b, with the digits that this costs."""
    a, b = [mp.mpf(x) for x in a], [mp.mpf(x) for x in b]
    q = mp.mpf(q)

    def mean_log(along, of):
        """Returns E log(P_along/φ₀) under P_of."""
        norm = mp.sqrt(mp.fsum(x * x for x in along))
        if norm == 0:
            return mp.mpf(0)
        centre = mp.fsum(x * y for x, y in zip(along, of, strict=True)) / norm
        log_r = lambda y: mp.log(1 - q + q * mp.exp(norm * y - norm * norm / 2))  # noqa: E731
        return (1 - q) * mp_line_mean(log_r, 0, norm) + q * mp_line_mean(log_r, centre, norm)

    return mean_log(a, a) - mean_log(b, a)


def mp_plane(a, b, q):
    """Returns k_q(a, b) as the integral over the plane that its definition names."""
    a, b, q = [mp.mpf(x) for x in a], [mp.mpf(x) for x in b], mp.mpf(q)

    def integrand(x, y):
        r_a = 1 - q + q * mp.exp(a[0] * x + a[1] * y - (a[0] ** 2 + a[1] ** 2) / 2)
        r_b = 1 - q + q * mp.exp(b[0] * x + b[1] * y - (b[0] ** 2 + b[1] ** 2) / 2)
        return r_a * mp.log(r_a / r_b) * mp.exp(-(x * x + y * y) / 2) / (2 * mp.pi)

    step = mp.mpf("0.2")
    return mp_trapezoid(lambda x: mp_trapezoid(lambda y: integrand(x, y), -11, 12, step), -11, 12, step)


def pair(a, b, q, **options):
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    exact = float(np.sum((a - b) ** 2))
    return poisson_pair_kl(
        float(np.linalg.norm(a)), float(np.linalg.norm(b)), float(a @ b), q, squared_distance=exact, **options
    )


# --- removed -----------------------------------


@pytest.mark.parametrize(
    ("q", "m", "value"),
    [
        (0.01, 1.0, 8.381220765e-5),
        (0.01, 0.1, 5.024579481e-7),
        (0.1, 2.0, 0.05797959363),
        (0.5, 3.0, 1.723222693),
        (1e-4, 0.5, 1.420082935e-9),
        (0.01, 4.0, 0.03245465622),
    ],
)
def test_reference_values_removed(q, m, value):
    assert poisson_kl(m, q) == close(value, rel=5e-10)
    assert poisson_kl(np.array([m]), q) == close(value, rel=5e-10)


@pytest.mark.parametrize("q", [1e-30, 1e-9, 1e-3, 0.3, 0.99])
def test_table_is_the_integral(q):
    m = np.concatenate([10.0 ** np.arange(-9, 0), np.linspace(0.01, 39.9, 160)])
    exact = np.array([poisson_kl(float(x), q) for x in m])
    assert poisson_kl(m, q) == close(exact, rel=1e-11)


@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.3, 0.99])
def test_slope_is_the_fisher_factor(q):
    """k_q'(m) = q m k⊥(m), with the factor that another module integrates: Simpson's rule from 0 to m."""
    for m in (0.3, 1.7, 6.0, 12.0):
        t = np.linspace(0, m, 2001)
        weights = np.where(np.arange(2001) % 2 == 1, 4.0, 2.0)
        weights[[0, -1]] = 1.0
        slope = q * t * poisson_factors(t, q)[0]
        assert poisson_kl(m, q) == close(float(weights @ slope) * m / 6000, rel=1e-9)


def test_far_away_only_the_entropy_of_taking_part_is_missing():
    for q in (1e-9, 0.01, 0.5):
        for m in (35.0, 41.0, 200.0):
            exact = q * m * m / 2 - float(entr(q)) + (1 - q) * math.log1p(-q)
            assert poisson_kl(m, q) == close(exact, rel=1e-11)
            assert poisson_kl(np.array([m]), q) == close(exact, rel=1e-11)


# --- pairs -----------------------------------


@pytest.mark.parametrize(
    ("a", "b", "q", "value"),
    [
        ((1, 0), (0.8, 0.3), 0.01, 1.6235456e-5),
        ((0.5, 0), (0, 0.5), 0.01, 2.8272422e-5),
        ((2, 0), (1.5, 0), 0.1, 6.2535086e-3),
        ((1, 0), (-1, 0), 0.05, 5.2630836e-3),
    ],
)
def test_reference_values_replaced(a, b, q, value):
    assert pair(a, b, q) == close(value, rel=5e-8)


@pytest.mark.parametrize(
    ("a", "b", "q"), [((1, 0), (0.8, 0.3), 0.01), ((0.5, 1.0), (-0.7, 0.4), 0.3), ((0.2, 0.9), (0.3, 0.9), 1e-3)]
)
def test_pair_is_the_integral_over_the_plane(a, b, q):
    with mp.workdps(30):
        assert pair(a, b, q) == close(float(mp_plane(a, b, q)), rel=1e-10)


def random_pairs(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        q = float(10 ** rng.uniform(-9, 0)) if rng.random() < 0.7 else float(rng.uniform(0.05, 0.999))
        a = 10 ** rng.uniform(-3, 1.0) * (v := rng.normal(size=2)) / np.linalg.norm(v)
        if rng.random() < 0.5:
            b = 10 ** rng.uniform(-3, 1.0) * (v := rng.normal(size=2)) / np.linalg.norm(v)
        else:
            b = a + np.linalg.norm(a) * 10 ** rng.uniform(-5, 0) * rng.normal(size=2)
        yield a, b, q


@pytest.mark.parametrize("seed", range(4))
def test_pair_against_fifty_digits(seed):
    """Near a = b the rounding of the two norms themselves moves the direction of a − b: by 1e-16‖a‖/‖a−b‖."""
    for a, b, q in random_pairs(6, seed):
        with mp.workdps(60):
            exact = mp_pair(a, b, q)
        slack = 1e-9 + 1e-14 * float(np.linalg.norm(a) / np.linalg.norm(a - b))
        assert pair(a, b, q) == close(float(exact), rel=slack), (a, b, q)


def test_pairs_that_are_nearly_equal_keep_their_digits():
    """k_q(a, b) → (q/2)(k⊥ across² + k∥ along²) as b → a, the Fisher factors of another module."""
    m, q = 1.3, 0.02
    across, along = (float(k) for k in poisson_factors(m, q))
    for gap in (1e-5, 1e-8, 1e-12):
        turned = poisson_pair_kl(m, m, m * m * math.cos(gap / m), q, squared_distance=gap * gap)
        assert turned == close(q / 2 * across * gap * gap, rel=1e-9 + 10 * gap)
    for gap in (1e-4, 1e-6):
        longer = poisson_pair_kl(m, m + gap, m * (m + gap), q, squared_distance=gap * gap)
        assert longer == close(q / 2 * along * gap * gap, rel=10 * gap)


def test_pair_with_nothing_is_the_record_left_out():
    m = np.array([0.0, 1e-6, 0.7, 3.0, 25.0])
    for q in (1e-9, 0.01, 0.6):
        assert poisson_pair_kl(m, 0.0, 0.0, q) == close(poisson_kl(m, q), rel=1e-11)
    assert poisson_pair_kl(2.0, 1.5, 3.0, 1.0) == 0.125  # the whole batch: no sampling


def test_bounds_hold_and_meet_at_small_rates():
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 400, 3)) * 10 ** rng.uniform(-2, 0.7, size=(2, 400, 1))
    gap = ((a - b) ** 2).sum(1)
    given = (np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1), (a * b).sum(1))
    for q in (1e-6, 0.01, 0.5):
        exact = poisson_pair_kl(*given, q, squared_distance=gap)
        closed = pair_kl_bound(*given, q, squared_distance=gap)
        plain = pair_kl_bound(*given, q, squared_distance=gap, sampler="any")
        assert np.all(exact <= closed)
        assert np.all(closed <= plain)
        assert plain == close(q * gap / 2, rel=1e-12)
    small = np.maximum(given[0], given[1]) < 1
    exact, closed = (f(*given, 1e-9, squared_distance=gap)[small] for f in (poisson_pair_kl, pair_kl_bound))
    assert closed == close(2 * exact, rel=1e-7)


def test_closed_bound_against_many_digits():
    with mp.workdps(60):
        for a, b, q in random_pairs(40, seed=11):
            ma, mb, mq = mp.matrix(a.tolist()), mp.matrix(b.tolist()), mp.mpf(q)
            dot = lambda x, y: (x.T * y)[0]  # noqa: E731
            bracket = mp.exp(dot(ma, ma)) + mp.exp(dot(mb, mb)) - 2 * mp.exp(dot(ma, mb))
            exact = min(mp.log(1 + mq**2 / (1 - mq) * bracket), mq * dot(ma - mb, ma - mb) / 2)
            norms = float(np.linalg.norm(a)), float(np.linalg.norm(b)), float(a @ b)
            found = pair_kl_bound(*norms, q, squared_distance=float(np.sum((a - b) ** 2)))
            assert found == close(float(exact), rel=1e-10)


# --- numbers, arrays, tensors -----------------------------------


def test_every_kind_comes_back_as_it_went_in():
    m, b, c = [0.0, 0.4, 2.0, 50.0], [0.3, 0.4, 1.0, 1.0], [0.0, 0.16, -1.0, 3.0]
    arrays, tensors = [np.array(x) for x in (m, b, c)], [torch.tensor(x, dtype=torch.float64) for x in (m, b, c)]
    for q in (1e-3, 1.0):
        found = poisson_kl(tensors[0], q)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.float64
        assert found.numpy() == close(poisson_kl(arrays[0], q), rel=1e-14)
        for function in (poisson_pair_kl, pair_kl_bound):
            array, tensor = function(*arrays, q), function(*tensors, q)
            assert isinstance(array, np.ndarray)
            assert isinstance(tensor, torch.Tensor)
            assert tensor.numpy() == close(array, rel=1e-12)
            one = function(m[1], b[0], 0.1, q)
            assert isinstance(one, float)
    assert isinstance(poisson_kl(1.0, 0.5), float)
    assert poisson_kl(torch.tensor(1.0), 0.01).dtype == torch.float64  # a float32 norm
    assert poisson_kl(torch.empty(0), 0.01).shape == poisson_pair_kl(*(torch.empty(0),) * 3, 0.01).shape == (0,)


def test_a_bound_on_the_norms_changes_nothing_below_it():
    rng = np.random.default_rng(2)
    a, b = rng.uniform(0, 2.0, (2, 200))
    c = a * b * rng.uniform(-1, 1, 200)
    for q in (1e-9, 1e-3, 0.7):
        free = poisson_pair_kl(*map(torch.from_numpy, (a, b, c)), q)
        held = poisson_pair_kl(*map(torch.from_numpy, (a, b, c)), q, largest_norm=2.0)
        assert held.numpy() == close(free.numpy(), rel=1e-11)
        lower = poisson_pair_kl(a, b, c, q, largest_norm=1.0)
        beyond = np.maximum(a, b) > 1
        assert lower[beyond] == close(pair_kl_bound(a, b, c, q, sampler="any")[beyond], rel=1e-14)


@pytest.mark.parametrize("top", [0.3, 1.0, 1.1153, 1.7])
def test_polynomials_are_the_integrals(top):
    """With a bound on the norms: never below the integral, above it by no more than rounding up; also where a ≈ b."""
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0, top, (2, 700))
    b[::2] = np.minimum(a[::2] * (1 + 10 ** rng.uniform(-9, 0, 350)), top)
    angle = np.where(np.arange(700) % 4 < 2, 10 ** rng.uniform(-9, 0, 700), rng.uniform(0, math.pi, 700))
    b[5::50], angle[7::50] = 0.0, 0.0
    apart = (a - b) ** 2 + 4 * a * b * np.sin(angle / 2) ** 2
    given = [torch.from_numpy(x) for x in (a, b, a * b * np.cos(angle), apart)]
    for q in (1e-9, 1e-3, 0.01, 0.3, 0.9):
        assert _polynomials(q, top) is not None
        free = poisson_pair_kl(*given[:3], q, squared_distance=given[3])
        held = poisson_pair_kl(*given[:3], q, squared_distance=given[3], largest_norm=top)
        assert held.numpy() == close(free.numpy(), rel=2e-11)
        assert (held >= free * (1 - 2e-12)).all()
        for some in (slice(0, 1), slice(3, 80), slice(5, None)):
            part = [x[some].contiguous() for x in given]
            alone = poisson_pair_kl(*part[:3], q, squared_distance=part[3], largest_norm=top)
            assert alone.numpy() == close(held[some].numpy(), rel=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "q", "value"),
    [
        ((1, 0), (0.8, 0.3), 0.01, 1.6235456e-5),
        ((0.5, 0), (0, 0.5), 0.01, 2.8272422e-5),
        ((1, 0), (-1, 0), 0.05, 5.2630836e-3),
    ],
)
def test_reference_values_with_a_bound_on_the_norms(a, b, q, value):
    a, b = np.array(a, float), np.array(b, float)
    norms = np.linalg.norm(a), np.linalg.norm(b), a @ b
    assert _polynomials(q, 1.0) is not None
    assert poisson_pair_kl(*norms, q, squared_distance=((a - b) ** 2).sum(), largest_norm=1.0) == close(value, rel=5e-8)
    with mp.workdps(60):
        exact = float(mp_pair(a.tolist(), b.tolist(), q))
    found = poisson_pair_kl(*norms, q, squared_distance=((a - b) ** 2).sum(), largest_norm=1.0)
    assert exact * (1 - 1e-15) <= found <= exact * (1 + 1e-9)


def test_what_a_tensor_holds_is_made_harmless():
    odd = torch.tensor([math.nan, math.inf, -1.0, 0.0], dtype=torch.float64)
    found = poisson_kl(odd, 0.01)
    assert found.tolist() == [math.inf, math.inf, poisson_kl(torch.tensor([1.0]), 0.01).item(), 0.0]
    pairs = poisson_pair_kl(odd, torch.ones(4), torch.zeros(4), 0.01)
    assert not pairs.isnan().any()
    assert pairs[:2].tolist() == [math.inf, math.inf]
    assert (pairs >= 0).all()


def test_never_negative_and_monotone_over_the_whole_range():
    for q in (1e-30, 1e-12, 1e-9, 1e-4, 0.05, 0.9, 1 - 1e-12, 1.0):
        m = np.concatenate([[0.0], np.geomspace(1e-12, 1e12, 2001)])
        k = poisson_kl(m, q)
        assert np.all(np.isfinite(k))
        assert np.all(np.diff(k) >= -1e-12 * k[1:])
        assert np.all((k >= 0) & (k <= q * m * m / 2))
        a, b, cosine = (x.ravel() for x in np.meshgrid(m[::40], m[::50], [-1, -0.3, 0, 0.8, 1]))
        pairs = poisson_pair_kl(a, b, a * b * cosine, q)
        assert np.all(np.isfinite(pairs))
        assert np.all(pairs >= 0)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: poisson_kl(np.array([-1.0]), 0.1), "norm"),
        (lambda: poisson_kl(np.array([math.nan]), 0.1), "norm"),
        (lambda: poisson_kl(1.0, 0.0), "sample_rate"),
        (lambda: poisson_pair_kl(1.0, -1.0, 0.0, 0.1), "norm_b"),
        (lambda: poisson_pair_kl(1.0, 1.0, math.nan, 0.1), "inner"),
        (lambda: poisson_pair_kl(1.0, 1.0, 1.0, 0.1, squared_distance=-1.0), "squared_distance"),
        (lambda: poisson_pair_kl(1.0, 1.0, 1.0, 0.1, largest_norm=-1.0), "largest_norm"),
        (lambda: pair_kl_bound(1.0, 1.0, 1.0, 0.1, sampler="shuffled"), "sampler"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(InputError, match=f"^{name} "):
        call()
