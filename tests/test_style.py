"""Docstrings say what something does: none opens with What, Whether, How or Of; every exported name has one."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import reconbound

ROOT = Path(reconbound.__file__).parent
DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("package", sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()))
def test_docstrings_open_with_a_verb_or_a_name(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DEFINED) else None
            if text and text.split()[0].strip(".,:") in ("What", "Whether", "How", "Of"):
                wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not wrong


@pytest.mark.parametrize("name", sorted(reconbound.__all__))
def test_exported_names_have_docstrings(name: str) -> None:
    exported = getattr(reconbound, name)
    public = [m for m in vars(exported) if not m.startswith("_")] if inspect.isclass(exported) else []
    members = {m: getattr(exported, m) for m in public}
    callables = {m: v for m, v in members.items() if inspect.isroutine(v) or isinstance(v, property)}
    assert inspect.getdoc(exported)
    assert [m for m, v in callables.items() if not inspect.getdoc(v)] == []
