"""docs/theory/index.md maps formulas to functions and tests, and SECURITY.md promises to tests: each must exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "docs" / "theory" / "index.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in MAP.splitlines()
    if line.startswith("| ") and "`tests/" in line
]


def defined(test_file: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", test_file.read_text(encoding="utf-8"), re.MULTILINE))


def test_map_has_every_part() -> None:
    assert len(ROWS) >= 40
    assert {row[2].split(".")[0] for row in ROWS} >= {
        f"`{package}"
        for package in ("bounds", "divergences", "mechanisms", "fisher", "accounting", "linear", "attacks")
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].strip("`"))
def test_row_names_a_function_and_a_test_that_exist(row: list[str]) -> None:
    _, _, function, _, test = row
    path = function.strip("`").split(".")
    depth = next(k for k in range(len(path), 0, -1) if is_module(path[:k]))
    assert depth < len(path), "names a module, not a function"
    thing = import_module(".".join(["reconbound", *path[:depth]]))
    for name in path[depth:]:
        thing = getattr(thing, name)
    assert callable(thing)
    file, name = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)` \|", test).groups()
    assert name in defined(ROOT / file)


def is_module(path: list[str]) -> bool:
    place = ROOT.joinpath("src", "reconbound", *path)
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def test_security_promises_name_tests_that_exist() -> None:
    files = {file.name: defined(file) for file in (ROOT / "tests").rglob("test_*.py")}
    everywhere = set().union(*files.values())
    promised = re.findall(r"`(test_\w+(?:\.py)?)(?:::(test_\w+))?`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(promised) > 30
    for first, second in promised:
        if first.endswith(".py"):
            assert first in files, first
            assert not second or second in files[first], f"{first}::{second}"
        else:
            assert first in everywhere, first
