"""Adds to the site what is not written by hand: a page for each public name, and the figures of the experiments."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import reconbound

ROOT = Path(__file__).resolve().parents[1]
#: A figure outside docs/, as the pages link it so that the same link works in the repository.
FIGURE = re.compile(r"\]\((?:\.\./)+(experiments/results/[\w.]+\.png)\)")


def public_names() -> list[str]:
    """Returns what `reconbound` exports, without its version."""
    return sorted((name for name in reconbound.__all__ if name != "__version__"), key=str.lower)


def page_path(name: str) -> str:
    """Returns where a public name's page is; `Guarantee` and `guarantee` must not be one file where case is ignored."""
    return f"{'classes' if inspect.isclass(getattr(reconbound, name)) else 'functions'}/{name}.md"


def page_of(name: str) -> str:
    """Returns the markdown of a public name's page."""
    thing = getattr(reconbound, name)
    return f"::: {thing.__module__}.{thing.__qualname__}\n"


def index_page() -> str:
    """Returns the markdown of the list of public names."""
    lines = ["# Public names", "", "All can be imported from `reconbound` itself.", "", "| name | |", "| --- | --- |"]
    for name in public_names():
        first = (inspect.getdoc(getattr(reconbound, name)) or "").split("\n\n")[0]
        lines.append(f"| [`{name}`]({page_path(name)}) | {' '.join(first.split()).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def on_config(config: Any) -> Any:
    """Puts the pages of the public names into the navigation."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.extend({name: f"reference/{page_path(name)}"} for name in public_names())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, and each figure that a page links."""
    files.append(File.generated(config, "reference/index.md", content=index_page()))
    for name in public_names():
        files.append(File.generated(config, f"reference/{page_path(name)}", content=page_of(name)))
    linked = {path for page in files.documentation_pages() for path in FIGURE.findall(page.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links figures where the site has them."""
    up = "../" * page.file.src_uri.count("/")
    return FIGURE.sub(rf"]({up}\1)", markdown)
