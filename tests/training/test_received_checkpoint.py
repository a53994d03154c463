"""Checkpoints with a right digest whose content is not as reconbound wrote it: a digest does not say who made them."""

from __future__ import annotations

import math

import pytest

from learning import learner
from reconbound._internal.files import unsealed
from reconbound.training.checkpoint import NAMES, CheckpointError
from sealing import sealed

IMPOSSIBLE = [("step", math.inf), ("step", math.nan), ("step", -1), ("step", 10**9), ("step", "x"), ("run", math.inf),
              ("run", -1), ("history", [{}]), ("history", 3), ("state", None)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=str)
def test_a_checkpoint_of_an_impossible_place_is_refused(tmp_path, name: str, value: object) -> None:
    """With a right digest: JSON as Python reads it holds an infinite step."""
    learner(checkpoint=tmp_path, every=1).fit(6)
    for path in (tmp_path / one for one in NAMES):
        tensors, facts = unsealed(path)
        path.write_bytes(sealed(tensors, {**facts, name: value}))
    with pytest.raises(CheckpointError, match="is not as reconbound wrote it") as reason:
        learner(checkpoint=tmp_path, every=1).fit(6)
    assert "\n" not in str(reason.value)


@pytest.mark.parametrize("spoil", ["one missing", "all missing", "another shape"])
def test_a_checkpoint_without_its_released_parameters_is_refused(tmp_path, spoil: str) -> None:
    learner(checkpoint=tmp_path, every=1).repeat(2, 3)
    for path in (tmp_path / one for one in NAMES):
        tensors, facts = unsealed(path)
        names = sorted(name for name in tensors if name.startswith("released/"))
        assert names
        for name in names[: None if spoil == "all missing" else 1]:
            tensors[name] = tensors[name][..., :1].clone()
            if spoil != "another shape":
                del tensors[name]
        path.write_bytes(sealed(tensors, facts))
    with pytest.raises(CheckpointError, match="its released parameters have other names or shapes"):
        learner(checkpoint=tmp_path, every=1).repeat(2, 3)
