"""Renders templates into one self-contained file: the page makes no request, and runs no script except ours.

The page's Content-Security-Policy names every script by its digest, so that text which was taken for markup by mistake
could still run nothing and fetch nothing. The same folder gives the same bytes: no clock, no random id.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from reconbound.report import figures


def as_json(content: Any) -> Markup:
    """Returns JSON for a script element: nothing in it can end the element or start another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _shown(given: Any) -> Any:
    """Returns a value for a page: text is cleaned of control characters, whatever its source."""
    return figures.clean(given, len(given)) if isinstance(given, str) and not isinstance(given, Markup) else given


def breaks(name: str) -> Markup:
    """Returns a name that may be broken after each underscore, rather than within a word.

    >>> breaks("hours_per_<week>")
    Markup('hours_<wbr>per_<wbr>&lt;week&gt;')
    """
    return Markup("_<wbr>").join(figures.clean(name, len(name)).split("_"))


@cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("reconbound.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    found.filters["breaks"] = breaks
    found.filters["clean"] = figures.clean
    found.filters["amount"] = figures.amount
    return found


def own(name: str) -> str:
    """Reads one of the files beside the templates."""
    return (files("reconbound.report") / "templates" / name).read_text(encoding="utf-8")


def digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def render(template: str, context: Mapping[str, Any], charts: Mapping[str, Any] | None, data: Any = None) -> bytes:
    """Renders a page from a template; with charts, also plotly, our script and their data.

    Args:
        template: the name of the template.
        context: its variables.
        charts: figures by id; None for a page without scripts.
        data: for our script.
    """
    scripts = [] if charts is None else [plotly_js(), own("report.js")]
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "script-src " + (" ".join(f"'{digest(script)}'" for script in scripts) or "'none'")
    )
    content = None if charts is None else as_json({"charts": charts, **(data or {})})
    told = _environment().get_template(template).render(
        **context,
        policy=policy,
        style=Markup(own("style.css")),
        scripts=[Markup(script) for script in scripts],
        content=content,
    )  # fmt: skip
    return told.encode("utf-8", "replace")
