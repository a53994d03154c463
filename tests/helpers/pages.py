"""Pages taken apart for the tests of the reports, and text that must not be taken for markup."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from reconbound import report
from reconbound.report.folder import Leakage, Run, packed_names, read_leakage, read_run, recomputed
from reconbound.report.text import certainty
from reconbound.report.view import View

HOSTILE = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=2">&amp;<b>bold</b>\u2028[red]%{x}$'


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.in_script = tag in ("script", "style")
        self.text += " " if tag in ("td", "th", "p", "div", "dd", "dt", "li") else ""

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if not self.in_script:
            self.text += data


def view_of(folder: Path) -> View:
    return View(read_run(folder), read_leakage(folder))


def meaningful(run: Run) -> Run:
    """The same run with the guarantee of a mechanism that guarantees something."""
    mechanism = {**run.mechanism, "noise_multiplier": 3.0, "sample_rate": 0.1, "steps": 20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the guarantee was another mechanism's
        return recomputed(replace(run, mechanism=mechanism), "")


def certainty_text(view: View) -> str:
    return " ".join(text for _, text in certainty(view))


def page_of(run: Run, leakage: Leakage) -> str:
    return report.confidential_page(run, leakage).decode()


def data_of(page: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


def hostile(folder: Path) -> tuple[Run, Leakage]:
    run, leakage = read_run(folder), read_leakage(folder)
    d = leakage.guess.numel()
    facts = {
        **leakage.facts, "class_names": [f"{HOSTILE}{k}" for k in range(10)], "feature_names": [HOSTILE] * d,
        "units": [HOSTILE] * d, "target_name": HOSTILE,
        "public_names": [HOSTILE] * 3, "rules": [HOSTILE, "paper"],
    }  # fmt: skip
    data = {**run.data, "name": HOSTILE, "private": [HOSTILE], "public": [HOSTILE], "ranges": {HOSTILE: [0, 1]},
            "units": {HOSTILE: HOSTILE}}  # fmt: skip
    software = {HOSTILE: HOSTILE}
    training = {HOSTILE: HOSTILE, "model": HOSTILE}
    names = packed_names([HOSTILE] * len(leakage.targets))
    return replace(run, data=data, training=training, software=software), replace(leakage, facts=facts, names=names)
