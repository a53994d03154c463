"""Where the real data sets lie: the folder that RECONBOUND_DATA names, else shared/data beside the repository."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("RECONBOUND_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def needs(name: str) -> pytest.MarkDecorator:
    """Skip, with the reason, where the set is not there."""
    return pytest.mark.skipif(not (FOLDER / name).is_dir(), reason=f"no {name}/ under {FOLDER}: set RECONBOUND_DATA")
