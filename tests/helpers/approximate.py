"""Numbers of all sizes for hypothesis, and how close two must be."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

TENS = st.floats(-12, 9).map(lambda x: 10.0**x)
DIMS = st.floats(0, 7).map(lambda x: int(10.0**x))


def close(value, rel=1e-12, abs=0.0):
    """pytest.approx without its default absolute tolerance of 1e-12, which would pass anything small."""
    return pytest.approx(value, rel=rel, abs=abs)
