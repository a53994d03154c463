"""Records that are read when they are needed: a torch Dataset and mapped arrays give what tensors give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from learning import RECORDS, data, flat, learner, losses, network, same_state, settings
from reconbound import PrivateSGD
from reconbound._internal.checks import InputError
from reconbound.training import checkpoint, rows
from reconbound.training.checkpoint import CheckpointError
from reconbound.training.rows import DatasetRows


class Items(Dataset[Any]):
    """Pairs of float64 arrays and whole numbers, as a data set in files would give them; counts what is read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.read = x.double().numpy(), y.tolist(), list[int]()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.x[index], self.y[index]


@pytest.fixture
def same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a Dataset and tensors with the same records have the same noise and batches."""
    monkeypatch.setattr(checkpoint, "data_digest", lambda inputs, targets: "the same")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"budget": "every", "rules": None}, {"sampler": "fixed"}])
def test_a_dataset_gives_the_training_and_the_ledger_of_its_tensors(
    same_data: None, workers: int, options: dict[str, Any]
) -> None:
    x, y = data()
    whole = learner(records=(x, y), **options).repeat(2, 5)
    before = torch.random.get_rng_state()
    read = learner(records=(DatasetRows(Items(x, y), workers=workers), None), **options).repeat(2, 5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert same_state(whole, read)
    plain = learner(records=(TensorDataset(x, y), None), **options).repeat(2, 5)
    assert same_state(whole, plain)


def test_inputs_and_targets_may_be_trees(same_data: None) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, a: Tensor, b: tuple[Tensor]) -> Tensor:
            found: Tensor = self.net(torch.cat([a, b[0]], 1))
            return found

    class Pairs(Items):
        def __getitem__(self, index: int) -> Any:
            row = self.x[index]
            return {"a": row[:1], "b": (row[1:],)}, (self.y[index],)

    def loss(outputs: Tensor, targets: tuple[Tensor]) -> Tensor:
        return losses(outputs, targets[0])

    x, y = data()
    trees = {"a": x[:, :1], "b": (x[:, 1:],)}, (y,)
    options: dict[str, Any] = {"settings": settings(rules=None), "progress": False}
    one = PrivateSGD(Two(), loss, *trees, initialise=lambda m: None, **options)
    two = PrivateSGD(Two(), loss, DatasetRows(Pairs(x, y), workers=1), None, initialise=lambda m: None, **options)
    two.model.load_state_dict(one.model.state_dict())
    assert torch.equal(flat(one.fit(4).model), flat(two.fit(4).model))


def test_only_what_a_step_needs_is_read() -> None:
    x, y = data()
    items = Items(x, y)
    one = learner(records=(items, None), rules=None, worlds={}, sample_rate=0.1, callbacks=[])
    items.read.clear()
    one.fit(1)  # all are read once for the digest; then the batch, and eight for the losses at the start
    assert len(items.read) <= RECORDS + 8 + int(one.sampler.batch(one.run_seed, 0).numel())


def test_copies_and_other_data_are_found(tmp_path: Path) -> None:
    x, y = data()
    x[5], y[5] = x[2], y[2]
    one = learner(records=(Items(x, y), None), checkpoint=tmp_path, check=True).fit(4)
    assert one.accountant is not None
    assert any("2 of 24 records have exact copies" in caveat for caveat in one.accountant.caveats)
    again = learner(records=(DatasetRows(Items(x, y), workers=1), None), checkpoint=tmp_path, check=True)
    assert same_state(one, again.fit(4))
    x[7, 0] += 1
    with pytest.raises(CheckpointError, match="data"):
        learner(records=(Items(x, y), None), checkpoint=tmp_path).fit(4)


def test_the_digest_does_not_depend_on_how_records_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    found = DatasetRows(Items(x, y), workers=2).digest
    assert found == DatasetRows(Items(x, y)).digest
    y[3] += 1
    assert found != DatasetRows(Items(x, y)).digest
    assert DatasetRows(Items(*data())).copies.records == 0


class Noisy(Items):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] + np.random.default_rng().normal(size=4), self.y[index]


class Single(Items):
    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class Words(Items):
    def __getitem__(self, index: int) -> Any:
        return "words", self.y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x, y: Noisy(x, y), "the same whenever they are read"),
        (lambda x, y: Single(x, y), "pairs"),
        (lambda x, y: Words(x, y), "numbers, arrays and tensors"),
        (lambda x, y: Stream(), "map-style"),
        (lambda x, y: Items(x[:0], y[:0]), "must have a record"),
        (lambda x, y: [(x, y)], "map-style"),
    ],
)
def test_other_data_sets_are_refused(make: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        DatasetRows(make(*data()))


def test_targets_beside_a_dataset_are_refused() -> None:
    x, y = data()
    with pytest.raises(InputError, match="must be None"):
        learner(records=(Items(x, y), y))


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_mapped_arrays_are_not_copied(tmp_path: Path, mode: Any, same_data: None) -> None:
    x, y = data()
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", y.numpy().astype(np.int32))
    inputs, targets = (np.load(tmp_path / f"{name}.npy", mmap_mode=mode) for name in "xy")
    one = learner(records=(inputs, targets))
    assert one.inputs.data_ptr() == inputs.ctypes.data
    assert one.targets.dtype == torch.int64
    assert same_state(one.fit(4), learner(records=(x, y)).fit(4))
    assert np.array_equal(np.load(tmp_path / "x.npy"), x.numpy())


def test_large_mapped_arrays_of_another_dtype_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    np.save(tmp_path / "x.npy", x.double().numpy())
    inputs = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert learner(records=(inputs, y)).inputs.dtype == torch.float32
    monkeypatch.setattr(rows, "MOST_COPIED", 100)
    with pytest.raises(InputError, match=r"must be of torch\.float32"):
        learner(records=(inputs, y))


def test_parts_of_a_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    x[9], y[9] = x[1], y[1]
    monkeypatch.setattr(rows, "_TOGETHER", 5)
    found = DatasetRows(Items(x, y))
    assert found.copies.largest.tolist() == [1, 9]


@pytest.mark.parametrize(
    ("collate", "match"),
    [
        (int, "collate must make a pair .* but failed"),
        (len, "collate must make a pair .*, got 'one that returns a int'"),
    ],
)
def test_a_function_that_does_not_make_batches_is_named(collate: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        DatasetRows(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), collate=collate)


@pytest.mark.parametrize("shards", [np.int64(2), torch.tensor(2)])
def test_a_number_of_shards_of_another_library_is_taken(shards: Any) -> None:
    one = learner(records=data(0, 20), shards=shards).fit(2)
    assert len(one.shards) == 2
