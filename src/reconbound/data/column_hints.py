"""Columns of a CSV file that may not be what they seem: identifiers among numbers, dates and numbers among text."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from reconbound.data.tables import MOST_CATEGORIES, Column

#: Fewer values than this tell nothing of a column.
FEWEST = 10
#: From this share of the values on, a column of text is taken for one of dates.
MOSTLY = 0.9
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d.*)?", re.ASCII)
#: How a date becomes a number.
AS_NUMBER = "a year, days since a day"
_IDENTIFIER = ("id", "index", "nr", "number")
_MONEY = r"(?:[$€£¥₹]|USD|EUR|GBP|CHF|JPY)"
_DRESSED = re.compile(
    rf"(?P<minus>[-−(])?\s?{_MONEY}?\s?(?P<sign>[+-])?(?P<whole>\d{{1,3}}(?:[,.' _\u00a0\u202f]\d{{3}})+|\d+)"
    rf"(?P<rest>[.,]\d+)?\s?(?:{_MONEY}|%)?\s?\)?",
    re.IGNORECASE | re.ASCII,
)
_MEASURE = re.compile(r"[+-]?\d+(?:[.,]\d+)?\s?([^\W\d_]{1,12})\.?")


def describe_column(column: Column) -> str | None:
    """Returns what the owner should know of a column that was not asked for by name; None where nothing is odd."""
    if column.numeric:
        return _describe_identifier(column)
    return _describe_dates(column) or _describe_measures(column)


def strip_signs(text: str) -> str | None:
    """Returns the number in a cell with a sign of money, a percent sign or marks of thousands; None for others.

    >>> strip_signs("$45,887.48"), strip_signs("12 %"), strip_signs("(3,000)"), strip_signs("1-2")
    ('45887.48', '12', '-3000', None)
    """
    found = _DRESSED.fullmatch(text)
    if found is None:
        return None
    minus = "-" if found["minus"] or found["sign"] == "-" else ""
    return minus + re.sub(r"\D", "", found["whole"]) + (found["rest"] or "").replace(",", ".")


def _describe_identifier(column: Column) -> str | None:
    """Describes whole numbers, all different, that have no gap or a name like an identifier."""
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


def _describe_dates(column: Column) -> str | None:
    """Describes text that looks like dates: taken as categories, or left out where there are too many."""
    known = Counter(text for text in column.values if text)
    if not known or sum(n for text, n in known.items() if _DATE.fullmatch(text)) < MOSTLY * known.total():
        return None
    if len(set(column.values)) > MOST_CATEGORIES:
        return f"{column.name}: text that looks like dates; to use and protect it write it as a number ({AS_NUMBER})"
    return (
        f"{column.name}: text that looks like dates, taken as categories, which are public: the attacker is taken to "
        f"know them. To protect it write it as a number ({AS_NUMBER}), or leave it out by --drop "
        f"{column.name!r}"
    )


def _describe_measures(column: Column) -> str | None:
    """Describes numbers with the same word after them, few enough to be taken as categories."""
    known = Counter(text for text in column.values if text)
    if known.total() < FEWEST or not FEWEST < len(set(column.values)) <= MOST_CATEGORIES:
        return None
    words: Counter[str] = Counter()
    for text, count in known.items():
        if found := _MEASURE.fullmatch(text):
            words[found[1]] += count
    word, often = words.most_common(1)[0] if words else ("", 0)
    if often < MOSTLY * known.total():
        return None
    return (
        f"{column.name}: numbers with {word!r} after them, taken as categories, which are public: the attacker is "
        f"taken to know them. To protect it leave the word away (--unit {column.name}={word}), or leave the column out "
        f"by --drop {column.name!r}"
    )
