"""Columns of a CSV file that may not be what they are taken for: identifiers among numbers, dates among text."""

from __future__ import annotations

import re

import numpy as np

from .tables import MOST_CATEGORIES, Column

#: Fewer values than this tell nothing of a column.
FEWEST = 10
#: From this share of the values on, a column of text is taken for one of dates.
MOSTLY = 0.9
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d.*)?", re.ASCII)
_IDENTIFIER = ("id", "index", "nr", "number")


def tell_tale(column: Column) -> str | None:
    """What the owner should know of a column that was not asked for by name; None where nothing is odd about it."""
    if column.numeric:
        return _identifier(column)
    return _dates(column)


def _identifier(column: Column) -> str | None:
    """Whole numbers, all different, that count on without a gap or are named like an identifier."""
    known = np.sort(column.values[~np.isnan(column.values)])
    if len(known) < FEWEST or not np.all(known == np.round(known)) or np.any(known[1:] == known[:-1]):
        return None
    consecutive = bool(np.all(np.diff(known) == 1))
    if not consecutive and not column.name.lower().endswith(_IDENTIFIER):
        return None
    which = "all different and without a gap" if consecutive else "all different"
    return (
        f"{column.name}: {len(known):,} whole numbers, {which}, as of an identifier, yet taken as a number that enters "
        f"the model; leave it out by --drop {column.name!r}"
    )


def _dates(column: Column) -> str | None:
    """Text that looks like dates, few enough to be taken as categories."""
    known = [str(text) for text in column.values if text]
    if not known or len(set(column.values)) > MOST_CATEGORIES:
        return None
    if sum(1 for text in known if _DATE.fullmatch(text)) < MOSTLY * len(known):
        return None
    return (
        f"{column.name}: text that looks like dates, taken as categories, which are public: the attacker is taken to "
        f"know them. To protect it write it as a number (a year, days since a day), or leave it out by --drop "
        f"{column.name!r}"
    )
