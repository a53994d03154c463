"""Shows doctests of docstrings as examples on the site. Without a heading they would become quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: Doctests at the end of a docstring: from the first prompt of a paragraph to the end.
DOCTESTS = re.compile(r"(?<=\n\n)(>>> .*)\Z", re.DOTALL)


class Doctests(griffe.Extension):
    """Puts the doctests of each docstring under `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of one object."""
        if obj.docstring and "Examples:" not in obj.docstring.value:
            obj.docstring.value = DOCTESTS.sub(
                lambda found: "Examples:\n" + re.sub(r"^(?=.)", "    ", found[1], flags=re.MULTILINE),
                obj.docstring.value,
            )
