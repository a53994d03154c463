"""Files are short, docstrings open with a verb, exported names have one, public functions take few parameters."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import reconbound

ROOT = Path(reconbound.__file__).parent
DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


LONGEST = 450  # lines of a file


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert len(lines) > 150
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


@pytest.mark.parametrize("package", sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()))
def test_docstrings_open_with_a_verb_or_a_name(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DEFINED) else None
            if text and text.split()[0].strip(".,:") in ("What", "Whether", "How", "Of"):
                wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not wrong


def public_members(kind: type) -> list[str]:
    """Returns the names of a class's public members, those of its bases in reconbound among them."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("reconbound.")]
    return sorted({name for base in own for name in vars(base) if not name.startswith("_")})


@pytest.mark.parametrize("name", sorted(reconbound.__all__))
def test_exported_names_have_docstrings(name: str) -> None:
    exported = getattr(reconbound, name)
    public = public_members(exported) if inspect.isclass(exported) else []
    members = {m: getattr(exported, m) for m in public}
    callables = {m: v for m, v in members.items() if inspect.isroutine(v) or isinstance(v, property)}
    assert inspect.getdoc(exported)
    assert [m for m, v in callables.items() if not inspect.getdoc(v)] == []


EXCEPTED = ("PrivateSGD",)  # and the commands: each of their parameters is an option
METHODS = (types.FunctionType, types.MethodType)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the functions that packages export, and the public methods of the classes that they export."""
    packages = [info.name for info in pkgutil.walk_packages(reconbound.__path__, "reconbound.") if info.ispkg]
    for package in ("reconbound", *(name for name in packages if "cli" not in name.split("."))):
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            exported = getattr(module, name)
            if inspect.isfunction(exported):
                yield name, exported
            elif inspect.isclass(exported) and name not in EXCEPTED:
                methods = {m: getattr(exported, m) for m in public_members(exported)}
                yield from ((f"{name}.{m}", method) for m, method in methods.items() if isinstance(method, METHODS))


def test_public_functions_take_at_most_eight_parameters() -> None:
    counts = {
        name: len([p for p in inspect.signature(function).parameters if p != "self"])
        for name, function in public_functions()
    }
    assert len(counts) > 60
    assert {name: count for name, count in counts.items() if count > 8} == {}
