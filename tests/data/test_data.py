"""The loaders read what they should, plain and compressed, and refuse damaged files with the reason."""

import gzip
import lzma
import struct

import numpy as np
import pytest

from reconbound import data


def idx(array):
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize(("ending", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_mnist_is_read_plain_and_compressed(tmp_path, ending, pack):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, 5, dtype=np.uint8)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"train-images-idx3-ubyte{ending}").write_bytes(pack(idx(images)))
    (tmp_path / "mnist" / f"train-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    x, y = data.mnist(tmp_path)
    assert np.array_equal(x, images)
    assert np.array_equal(y, labels)
    assert y.dtype == np.int64


def test_cifar10_is_read_in_planes(tmp_path):
    rng = np.random.default_rng(1)
    records = rng.integers(0, 10, (4, 3073), dtype=np.uint8)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test_batch.bin.xz").write_bytes(lzma.compress(records.tobytes()))
    x, y = data.cifar10(tmp_path, train=False)
    assert np.array_equal(y, records[:, 0])
    assert np.array_equal(x[2, 1, 3], records[2, 1 + 1024 + 3 * 32 : 1 + 1024 + 4 * 32])


def test_damaged_files_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "a.idx"
    for content, text in [
        (b"hello", "not an IDX file"),
        (b"\x00\x00\x08\x02\x00\x00", "header ends after 6 of 12"),
        (idx(np.zeros((2, 2), np.uint8))[:-1], "3 values, but its header says 2x2"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=text):
            data.read_idx(path)
    cut = tmp_path / "b.gz"
    cut.write_bytes(gzip.compress(bytes(1000))[:-9])
    with pytest.raises(ValueError, match="damaged or cut off"):
        data.read_idx(cut)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test_batch.bin").write_bytes(bytes(3072))
    with pytest.raises(ValueError, match="3072 bytes is not a whole number of records"):
        data.cifar10(tmp_path, train=False)


def test_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("RECONBOUND_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="RECONBOUND_DATA"):
        data.mnist()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.mnist(tmp_path / "nowhere")
    (tmp_path / "mnist").mkdir()
    with pytest.raises(FileNotFoundError, match="train-images"):
        data.mnist(tmp_path)
