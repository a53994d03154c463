"""Each package imports only from packages to its left; late and type-only imports count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reconbound

ROOT = Path(reconbound.__file__).parent
ORDER = ("_internal", "data", "bounds", "divergences", "mechanisms", "validate", "fisher", "accounting", "training")
ORDER += ("linear", "attacks", "report", "auditing", "integrations", "sweep", "cli")


def imported_packages(path: Path) -> set[str]:
    """Returns the packages of reconbound that a module imports from, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {p[1] for p in parts if p[0] == "reconbound" and len(p) > 1 and (ROOT / p[1]).is_dir()}
    return found


def test_no_module_stands_loose_at_the_top() -> None:
    assert {p.name for p in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()} <= set(ORDER)


@pytest.mark.parametrize("package", [p for p in ORDER if (ROOT / p).is_dir()])
def test_a_package_imports_only_from_packages_to_its_left(package: str) -> None:
    allowed = set(ORDER[: ORDER.index(package) + 1])
    wrong = {
        str(path.relative_to(ROOT)): sorted(imported_packages(path) - allowed)
        for path in sorted((ROOT / package).rglob("*.py"))
        if imported_packages(path) - allowed
    }
    assert not wrong
