"""Comparison of printed output with a page, where noise decides the numbers.

The noise of a release is bound to the bits of what it covers. Another processor rounds the last bit otherwise, and then
draws other noise, whatever the seed: such numbers can only be compared roughly.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def assert_alike(shown: str, printed: str, *, share: float = 0.35) -> None:
    """Asserts that two texts differ in numbers only, and in these by at most a share of the larger, or 1 unit in the
    last digit.
    """
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for one, other in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        a, b = (float(text.replace(",", "")) for text in (one, other))
        unit = 10.0 ** -len(one.partition(".")[2])
        assert abs(a - b) <= max(share * max(a, b), 1.001 * unit), f"{other} in place of {one}"
