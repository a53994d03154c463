"""Lower bounds of the dependencies: each has one, and it is above the last version with a fault that matters here."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

requirements = pytest.importorskip("packaging.requirements")
versions = pytest.importorskip("packaging.version")

toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

FACTS = toml.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
#: The first version without a published fault in what reads files, renders pages or talks to a server.
MENDED = {
    "jinja2": ("3.1.6", "CVE-2025-27516: templates leave the sandbox"),
    "pillow": ("12.3.0", "CVE-2026-59197 to 59200, CVE-2026-55798: memory faults in images"),
    "psycopg2-binary": ("2.9.11", "CVE-2025-1094: quoting by the libpq of earlier wheels"),
    "pyarrow": ("14.0.1", "CVE-2023-47248: code is run by a file"),
    "scikit-learn": ("1.5.0", "CVE-2024-5206: data are kept in a model"),
    "setuptools": ("78.1.1", "CVE-2025-47273: files are written elsewhere"),
    "torch": ("2.6.0", "CVE-2025-32434: code is run by a file of weights"),
}


def listed() -> list:
    """Every requirement of the build, the package and its extras."""
    project = FACTS["project"]
    texts = [*FACTS["build-system"]["requires"], *project["dependencies"]]
    texts += [text for extra in project["optional-dependencies"].values() for text in extra]
    return [requirements.Requirement(text) for text in texts]


def lowest(requirement):
    return [versions.Version(part.version) for part in requirement.specifier if part.operator == ">="]


def test_every_dependency_has_a_lower_bound() -> None:
    found = listed()
    assert {"numpy", "torch", "pillow", "setuptools", "mkdocs", "pytest"} <= {one.name for one in found}
    assert [str(one) for one in found if len(lowest(one)) != 1] == []


@pytest.mark.parametrize("name", MENDED)
def test_lower_bounds_are_above_known_faults(name) -> None:
    found = [one for one in listed() if one.name == name]
    assert found, name
    least, fault = MENDED[name]
    for one in found:
        assert lowest(one)[0] >= versions.Version(least), f"{one}: {fault}"


def test_installed_versions_are_within_the_bounds() -> None:
    for one in listed():
        try:
            installed = version(one.name)
        except PackageNotFoundError:  # of an extra
            continue
        if one.name != "setuptools":  # of the build, which has its own environment
            assert one.specifier.contains(installed, prereleases=True), f"{one}: {installed} is installed"
