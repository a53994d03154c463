"""Downloads against a server on this machine: nothing wrong and nothing partial is kept."""

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading

import numpy as np
import pytest

from reconbound.data import DataError, DataMissing, DataOptions, load_dataset
from reconbound.data import downloads as download


def idx(array):
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


class Server(http.server.ThreadingHTTPServer):
    """Files by path; `cuts` says after how many bytes an answer breaks off, one for each request to a path."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.cuts, self.asked, self.moved = {}, {}, [], {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        if self.path in server.moved:
            self.send_response(302)
            self.send_header("Location", server.moved[self.path])
            self.end_headers()
            return
        if self.path not in server.files:
            self.send_error(404)
            return
        content = server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cuts = server.cuts.get(self.path, [])
        self.wfile.write(content[: cuts.pop(0)] if cuts else content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    with Server() as running:
        monkeypatch.setenv("RECONBOUND_MIRROR", running.url + "/")
        monkeypatch.delenv("http_proxy", raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(download, "RETRIES", 0)
        yield running
        running.shutdown()


@pytest.fixture
def digits(server, monkeypatch):
    """A small MNIST on the server, with its digests in place of the real ones."""
    rng, raws = np.random.default_rng(0), {}
    for part, count in (("train", 40), ("t10k", 20)):
        raws[f"{part}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        raws[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    known = {name: (len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in raws.items()}
    monkeypatch.setitem(download.RAW, "mnist", known)
    server.files = {f"/mnist/{name}.gz": gzip.compress(raw) for name, raw in raws.items()}
    return raws


IMAGES = "/mnist/train-images-idx3-ubyte.gz"


def test_what_is_missing_is_downloaded_and_only_once(server, digits, tmp_path, capsys):
    found = load_dataset("mnist", folder=tmp_path)
    assert found.inputs.shape == (40, 1, 28, 28)
    raw = np.frombuffer(digits["train-images-idx3-ubyte"][16:], np.uint8).reshape(40, 1, 28, 28)
    assert np.array_equal(found.inputs, raw.astype(np.float32) / np.float32(255))
    assert "downloading" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "mnist").iterdir()) == sorted(f"{name}.gz" for name in digits)
    count = len(server.asked)
    load_dataset("mnist", folder=tmp_path)
    assert len(server.asked) == count == 4


def test_a_transfer_that_breaks_off_is_tried_again(server, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "RETRIES", 1)
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.cuts[IMAGES] = [1000]
    assert len(load_dataset("mnist", folder=tmp_path).inputs) == 40
    assert server.asked.count(IMAGES) == 2


def test_what_broke_off_is_not_kept(server, digits, tmp_path):
    server.cuts[IMAGES] = [1000]
    with pytest.raises(DataMissing, match="no connection, or it broke off") as caught:
        load_dataset("mnist", folder=tmp_path)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "mnist").iterdir()) == []
    assert len(load_dataset("mnist", folder=tmp_path).inputs) == 40


def test_the_second_source_serves_where_the_first_is_wrong(server, digits, tmp_path, monkeypatch):
    monkeypatch.delenv("RECONBOUND_MIRROR")
    monkeypatch.setitem(download.SOURCES, "mnist", (f"{server.url}/nowhere/", f"{server.url}/mnist/"))
    assert len(load_dataset("mnist", folder=tmp_path).inputs) == 40


@pytest.mark.parametrize(
    "wrong",
    [
        gzip.compress(idx(np.zeros((40, 28, 28), np.uint8))),
        gzip.compress(bytes(10_000_000)),
        b"<html>not found</html>",
        gzip.compress(bytes(31_376))[:-20],
    ],
    ids=["other digits", "a small file that grows", "a page", "cut off"],
)
def test_wrong_content_is_refused_and_not_kept(server, digits, tmp_path, wrong):
    server.files[IMAGES] = wrong
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: what was downloaded (has not the known|is damaged)"):
        load_dataset("mnist", folder=tmp_path)
    assert list((tmp_path / "mnist").iterdir()) == []


def test_a_file_too_large_is_stopped(server, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MOST", 70_000)
    server.files[IMAGES] = bytes(1_000_000)
    with pytest.raises(DataError, match="more than 70,000 bytes"):
        load_dataset("mnist", folder=tmp_path)


def test_missing_data_is_one_line_with_advice(server, tmp_path):
    with pytest.raises(DataMissing) as caught:
        load_dataset("mnist", folder=tmp_path)
    text = str(caught.value)
    assert "404" in text
    assert "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz" in text
    assert str(tmp_path / "mnist") in text
    assert "RECONBOUND_DATA" in text
    assert "\n" not in text


def test_only_https_and_this_machine(server, digits, tmp_path, monkeypatch):
    for url in ("http://example.org", "ftp://example.org", "file:///etc", "http://127.0.0.1.example.org", "nonsense"):
        monkeypatch.setenv("RECONBOUND_MIRROR", url)
        with pytest.raises(DataError, match="only over https"):
            load_dataset("mnist", folder=tmp_path)
    monkeypatch.setenv("RECONBOUND_MIRROR", server.url)
    server.moved[IMAGES] = "http://example.org/elsewhere"
    with pytest.raises(DataError, match=r"example\.org/elsewhere.*only over https"):
        load_dataset("mnist", folder=tmp_path)


def test_the_usual_sources_are_https():
    for sources in download.SOURCES.values():
        for source in sources:
            download.check_address(source)


def archive(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def batches(server, monkeypatch):
    rng = np.random.default_rng(1)
    raws = {}
    for name in download.RAW["cifar10"]:
        records = rng.integers(0, 256, (10, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(10)
        raws[name] = records.tobytes()
    known = {name: (len(raw), hashlib.sha1(raw).hexdigest()) for name, raw in raws.items()}
    monkeypatch.setitem(download.RAW, "cifar10", known)
    return raws


def test_cifar10_archive_is_unpacked_by_name(server, batches, tmp_path):
    hostile = {
        "../../outside.bin": b"x",
        "/tmp/absolute.bin": b"x",
        "cifar-10-batches-bin/readme.html": b"x",
        "link": "/etc/passwd",
    }
    inside = {f"cifar-10-batches-bin/{name}": raw for name, raw in batches.items()}
    server.files[f"/cifar10/{download.ARCHIVE}"] = archive({**hostile, **inside})
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    found = load_dataset("cifar10", folder=folder)
    assert found.inputs.shape == (50, 3, 32, 32)
    assert found.class_names[3] == "cat"
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if not p.is_dir())
    assert files == sorted(f"deep/er/cifar10/{name}" for name in batches)


def test_a_wrong_archive_of_cifar10_is_refused(server, batches, tmp_path):
    inside = {f"cifar-10-batches-bin/{name}": raw for name, raw in batches.items()}
    path = f"/cifar10/{download.ARCHIVE}"
    first = next(iter(inside))
    for k, (content, text) in enumerate(
        [
            (archive({**inside, first: inside[first][:-1] + b"\x00"}), "sha1"),
            (archive({**inside, first: "test_batch.bin"}), "holds no data_batch_1.bin"),
            (archive(inside)[:-5000], r"not the archive it should be|is damaged"),
            (b"hello", "not the archive it should be"),
        ]
    ):
        folder = tmp_path / str(k)
        folder.mkdir()
        server.files[path] = content
        with pytest.raises(DataError, match=text):
            load_dataset("cifar10", folder=folder)
        assert not list((folder / "cifar10").glob(".*"))


def test_without_a_folder_the_cache_is_used(server, digits, tmp_path, monkeypatch):
    monkeypatch.delenv("RECONBOUND_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(download.load_official("mnist", DataOptions()).inputs) == 40
    assert (tmp_path / "reconbound" / "mnist").is_dir()
