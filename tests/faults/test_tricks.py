"""Tricks of somebody who makes a file for others to open: each was tried, and what worked then is refused now."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import random
import re
import shutil
import sqlite3
import struct
import zipfile
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reconbound as rb
import small_folders
from injecting import ended
from reconbound._internal.checks import DataError, InputError
from reconbound._internal.files import Unreadable, json_digest, unsealed
from reconbound.cli.options import LONGEST, print_table, terminal
from reconbound.data import csv as csv_files
from reconbound.data import load_dataset
from reconbound.sweep.queue import seal_of
from sealing import sealed
from wrong_values import _ledger

pytestmark = pytest.mark.slow

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n WHERE i < 0"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    return small_folders.make(tmp_path_factory.mktemp("done"))


@pytest.fixture
def base(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "base"))


def refused(words: list[str], said: str) -> None:
    found = ended(words)
    assert (found.status, found.clear) == (2, True), found
    assert said in found.err, found.err


# --- databases -----------------------------------------------------------------------------------


def journal_that_names(victim: Path, database: bytes) -> bytes:
    """A journal of no pages, at whose end a super-journal is named, as SQLite's file format has it."""
    magic, page = bytes.fromhex("d9d505f920a163d7"), struct.unpack(">H", database[16:18])[0]
    head = magic + struct.pack(">IIIII", 0, 0, len(database) // page, 512, page)
    name = str(victim).encode()
    end = struct.pack(">I", 0x40000000 // page + 1) + name
    end += struct.pack(">II", len(name), sum(struct.unpack(f"{len(name)}b", name)) & 0xFFFFFFFF)
    return head.ljust(512, b"\0") + end + magic


def test_a_journal_that_names_another_file_removes_nothing(base) -> None:
    """SQLite itself removes the file: the first lines show that the journal is a right one."""
    victim, path = base / "precious.txt", base / "sweep" / "sweep.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    journal = journal_that_names(victim, path.read_bytes())
    own = Path(shutil.copy(path, base / "own.db"))
    victim.write_text("all my work\n")
    own.with_name("own.db-journal").write_bytes(journal)
    with closing(sqlite3.connect(own)) as connection:
        connection.execute("SELECT count(*) FROM trials").fetchone()
    assert not victim.exists()
    victim.write_text("all my work\n")
    path.with_name("sweep.db-journal").write_bytes(journal)
    for words in (small_folders.sweep_words(base, "sweep"), ["frontier", str(base / "sweep")]):
        refused(words, "sweep.db-journal names another file")
        assert victim.read_text() == "all my work\n"
    path.with_name("sweep.db-journal").write_bytes(journal[:512])  # what a killed process leaves is taken back
    assert ended(small_folders.sweep_words(base, "sweep")).status == 0


@pytest.mark.parametrize("name", ["sweep.db", "sweep.db-wal", "sweep.db-shm"])
def test_a_hard_link_in_place_of_a_database_is_not_written_through(base, name) -> None:
    other = base / "other.db"
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE precious (x)")
    before = other.read_bytes()
    (base / "sweep" / name).unlink(missing_ok=True)
    os.link(other, base / "sweep" / name)
    for words in (small_folders.sweep_words(base, "sweep"), ["frontier", str(base / "sweep")]):
        refused(words, f"{name} is a hard link")
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        (f"CREATE TRIGGER t AFTER UPDATE ON trials BEGIN DELETE FROM trial_values WHERE trial_id IN ({ENDLESS}); END",
         "a trigger, 't'"),
        (f"CREATE VIEW more AS {ENDLESS}", "a view, 'more'"),
        ("CREATE VIRTUAL TABLE more USING fts5(x)", "a virtual, 'more'"),
    ],
    ids=["trigger", "view", "virtual table"],
)  # fmt: skip
def test_a_database_with_more_than_tables_is_refused(base, statement, kind) -> None:
    """A trigger or view may have no end, and SQLite does not stop for a signal: this test would hang."""
    with closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection, connection:
        connection.execute("UPDATE trials SET state = 'WAITING' WHERE number = 1")
        connection.execute(statement)
    for words in (small_folders.sweep_words(base, "sweep"), ["frontier", str(base / "sweep")]):
        refused(words, f"it holds {kind}")


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_of_the_table_is_a_formula(base, first) -> None:
    evil = f'{first}HYPERLINK("http://evil/","x")'
    with closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection, connection:
        for trial, slot in connection.execute("SELECT trial_id, number FROM trials").fetchall():
            get = "SELECT value_json FROM trial_user_attributes WHERE trial_id = ? AND key = ?"
            setting, rows = (json.loads(connection.execute(get, (trial, k)).fetchone()[0]) for k in ("setting", "rows"))
            setting["model"] = evil
            put = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?"
            connection.execute(put, (json.dumps(setting), trial, "setting"))
            connection.execute(put, (json.dumps(seal_of(slot, setting, rows)), trial, "sha256"))
    assert ended(["frontier", str(base / "sweep")]).status == 0
    rows = list(csv.DictReader(io.StringIO((base / "sweep" / "sweep.csv").read_text())))
    assert rows
    assert all("HYPERLINK" in row["model"] and row["model"][0] in "'?" for row in rows)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 3000, "NaN", "1e999", "9" * 5000, "null", "[]"], ids=range(7)
)
@pytest.mark.parametrize("table", ["trial_user_attributes", "trial_system_attributes", "study_user_attributes"])
def test_attributes_that_are_no_facts_are_one_line(base, table, text) -> None:
    """Optuna reads them as JSON of any depth."""
    with closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection, connection:
        connection.execute(f"UPDATE {table} SET value_json = ?", (text,))
    shown = [word for word in small_folders.sweep_words(base, "sweep") if word != "--quiet"]
    for words in (["frontier", str(base / "sweep")], small_folders.sweep_words(base, "sweep"), shown):
        found = ended(words)
        assert found.clear, (words[0], found)


@pytest.mark.parametrize("value", ["NULL", "9e999", "'x'"])
def test_values_that_optuna_cannot_read_are_one_line(base, value) -> None:
    with closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection, connection:
        connection.execute(f"UPDATE trial_values SET value = {value}")
    for words in (["frontier", str(base / "sweep")], small_folders.sweep_words(base, "sweep")):
        found = ended(words)
        assert found.clear, (words[0], found)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "x", [], {}], ids=range(6))
def test_a_trial_whose_rows_are_no_numbers_is_trained_again(done, base, value) -> None:
    """What is kept in a trial's folder for a worker that is killed before it stores it."""
    with closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection, connection:
        connection.execute("UPDATE trials SET state = 'WAITING' WHERE number = 1")
    path = base / "sweep" / "trials" / "00001" / "trial.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    content["rows"][1]["accuracy"] = value
    path.write_text(json.dumps({**content, "sha256": json_digest(content)}))
    found = ended(small_folders.sweep_words(base, "sweep"))
    assert found.status == 0, found
    assert (base / "sweep" / "sweep.csv").read_bytes() == (done / "sweep" / "sweep.csv").read_bytes()


@pytest.mark.parametrize("name", ["slot", "setting", "done", "owner", "rows", "sha256", "error", "final"])
@pytest.mark.parametrize("text", ["1e999", '"x"', "[1]"])
def test_a_fact_of_a_trial_of_another_kind_is_one_line(base, name, text) -> None:
    with closing(sqlite3.connect(base / "sweep" / "sweep.db")) as connection, connection:
        own = "trial_id = 1 AND key = ?"
        connection.execute(f"DELETE FROM trial_user_attributes WHERE {own}", (name,))
        put = "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (1, ?, ?)"
        connection.execute(put, (name, text))
        connection.execute("UPDATE trials SET state = 'WAITING' WHERE trial_id = 1")
    shown = [word for word in small_folders.sweep_words(base, "sweep") if word != "--quiet"]
    for words in (["frontier", str(base / "sweep")], shown):
        found = ended(words)
        assert found.clear or (found.status == 1 and "failed" in found.err), (words[0], found)


# --- folders of audits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [10**400, -(10**320), math.inf, math.nan, "\ud800", "a\nreconbound: b", 1e-320], ids=range(7)
)
def test_numbers_beyond_all_ranges_are_one_line_or_a_result(base, value) -> None:
    """JSON as Python reads it holds 1e999, NaN and whole numbers of any length. FUZZ=1 tries every fact."""
    folder = base / "audit"
    run = {k: v for k, v in json.loads((folder / "run.json").read_text()).items() if k != "sha256"}
    tensors, facts = unsealed(folder / "leakage.safetensors")
    facts.pop("run")
    (folder / "leakage.safetensors").write_bytes(sealed(tensors, facts))
    names = [(part, name) for part in ("data", "mechanism", "training", "guarantee") for name in run[part]]
    for part, name in names if os.environ.get("FUZZ") else random.Random(repr(value)).sample(names, 12):
        changed = {**run, part: {**run[part], name: value}}
        (folder / "run.json").write_text(json.dumps({**changed, "sha256": json_digest(changed)}))
        found = ended(["show", str(folder)])
        assert found.clear, (part, name, found)
        assert not any(line.startswith("reconbound: b") for line in (found.out + found.err).splitlines())


@pytest.mark.parametrize("command", ["report", "show", "frontier", "audit", "compare"])
def test_a_folders_own_name_does_not_steer_the_terminal(base, command, monkeypatch) -> None:
    monkeypatch.chdir(base)
    name = "a\x1b[31m\nreconbound: all is well"
    shutil.move("sweep" if command == "frontier" else "audit", name)
    words = {"audit": small_folders.audit_words(base, name), "compare": ["report", name, name, "--out", f"{name}.html"]}
    found = ended(words.get(command, [command, name]))
    assert found.status == 0, found
    assert "\x1b" not in found.out + found.err
    assert not any(line.startswith("reconbound: all") for line in (found.out + found.err).splitlines())


def with_header(content: bytes, change) -> bytes:
    """A sealed file with another header, its digest made anew."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    facts, names = header["__metadata__"], sorted(set(header) - {"__metadata__"})
    change(header, names[0], names[-1])
    facts["sha256"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    made = len(text).to_bytes(8, "little") + text + content[end:]
    return made.replace(b"0" * 64, hashlib.sha256(made).hexdigest().encode(), 1)


HEADERS = {
    "overlap": lambda header, one, other: header[one].update(data_offsets=header[other]["data_offsets"]),
    "beyond the end": lambda header, one, other: header[one].update(data_offsets=[0, 10**15]),
    "backwards": lambda header, one, other: header[one].update(data_offsets=[8, 0]),
    "too large": lambda header, one, other: header[one].update(shape=[2**62, 2**62]),
    "unknown type": lambda header, one, other: header[one].update(dtype="Q7"),
    "no offsets": lambda header, one, other: header[one].pop("data_offsets"),
    "no facts": lambda header, one, other: header["__metadata__"].pop("reconbound"),
    "facts that are a list": lambda header, one, other: header["__metadata__"].update(reconbound="[]"),
    "facts too deep": lambda header, one, other: header["__metadata__"].update(reconbound="[" * 100_000),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_lie_are_one_line(base, tmp_path, kind) -> None:
    ledger = tmp_path / "ledger.safetensors"
    _ledger().save(ledger)
    checkpoints = base / "audit" / "checkpoints"
    paths = [ledger, base / "audit" / "leakage.safetensors", *sorted(checkpoints.glob("*.safetensors"))]
    for path in paths:
        path.write_bytes(with_header(path.read_bytes(), HEADERS[kind]))
        with pytest.raises(Unreadable, match=re.escape(str(path))) as reason:
            unsealed(path)
        assert "\n" not in str(reason.value)
    with pytest.raises(InputError, match="path must be a ledger"):
        rb.FisherAccountant.load(ledger)
    for words in (["report", str(base / "audit")], ["show", str(base / "audit")]):
        refused(words, "is not a file of reconbound's")
    (base / "audit" / "run.json").unlink()
    refused(small_folders.audit_words(base, "audit"), "is not a file of reconbound's")


NOTHINGS = {"long": [0, 2**62], "longer": [0, 2**70], "wide": [0, 2**40, 2**40], "deep": [0] + [1] * 300}


@pytest.mark.parametrize("shape", NOTHINGS.values(), ids=NOTHINGS)
def test_tensors_of_nothing_and_of_any_shape_are_one_line(tmp_path, shape) -> None:
    """They take no bytes, so that their shape fits: torch refused it in a raw error."""
    path, empty = tmp_path / "ledger.safetensors", {"dtype": "F64", "shape": shape, "data_offsets": [0, 0]}
    _ledger().save(path)
    path.write_bytes(with_header(path.read_bytes(), lambda header, one, other: header.update(zero=empty)))
    with pytest.raises(InputError, match="path must be a ledger"):
        rb.FisherAccountant.load(path)
    with pytest.raises(InputError, match="other must be a ledger"):
        _ledger().merge(path)


def test_a_release_is_read_through_no_link(base) -> None:
    folder = base / "audit"
    for name in ("inputs.json", "model.safetensors"):
        shutil.move(folder / name, base / name)
        (folder / name).symlink_to(base / name)
        with pytest.raises(Unreadable, match=f"{name} is a symbolic link"):
            rb.load_release(folder)
        (folder / name).unlink()
        shutil.move(base / name, folder / name)
    assert rb.load_release(folder).columns


def test_a_table_does_not_steer_the_terminal(capsys) -> None:
    evil = "a\x1b[31mb\u202e"
    print_table(terminal(), evil, [evil, "n"], [[evil, "1"]], [evil])
    assert not {"\x1b", "\u202e"} & set(capsys.readouterr().out)


def test_an_error_does_not_steer_the_terminal(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["audit", "no\x1b[31m.csv"], ["show", "no\x1b[31m"], ["frontier", "no\x1b[31m"], ["\x1b[31m"],
                  ["report", "a", "--\x1b[31m"], ["bound", "--steps", "\x1b[31m"]):  # fmt: skip
        found = ended(words)
        assert (found.status, found.clear) == (2, True), found
        assert "\x1b" not in found.err
        assert "[31m" in found.err


# --- data files ----------------------------------------------------------------------------------


def nested_npz(path: Path, parts: int, size: int) -> None:
    """Arrays that are not packed, each of which lies within the one before: parts · size bytes in a file of size."""
    content, entries = bytes(size), []
    for k in reversed(range(parts)):
        head = repr({"descr": "|u1", "fortran_order": False, "shape": (len(content),)}).encode().ljust(117) + b"\n"
        body = np.lib.format.magic(1, 0) + struct.pack("<H", 118) + head + content
        name, crc = f"a{k}.npy".encode(), zlib.crc32(body)
        facts = struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 33, crc, len(body), len(body), len(name), 0)
        content = b"PK\x03\x04" + facts + name + body
        entries.append((name, facts, len(content)))
    table = b"".join(
        b"PK\x01\x02" + struct.pack("<H", 20) + facts + struct.pack("<HHHII", 0, 0, 0, 0, len(content) - end) + name
        for name, facts, end in reversed(entries)
    )
    end = struct.pack("<HHHHIIH", 0, 0, parts, parts, len(table), len(content), 0)
    path.write_bytes(content + table + b"PK\x05\x06" + end)


def test_arrays_within_each_other_are_refused_before_they_are_read(tmp_path, monkeypatch) -> None:
    path = tmp_path / "bomb.npz"
    nested_npz(path, 2, 1000)
    with zipfile.ZipFile(path) as archive, archive.open("a0.npy") as part:
        assert len(np.lib.format.read_array(part)) > 1000  # a right file but for that
    nested_npz(path, 100, 10**5)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("it was read"))
    refused(["audit", str(path), "--out", str(tmp_path / "a")], "its arrays lie within each other")


def test_a_message_is_short_whatever_the_names(tmp_path) -> None:
    np.savez(tmp_path / "n.npz", **{f"{k}\x1b" + "n" * 200: np.zeros(1) for k in range(300)})
    with pytest.raises(DataError) as reason:
        load_dataset(tmp_path / "n.npz")
    assert len(str(reason.value)) < 2000
    (tmp_path / "n.csv").write_text(",".join(f"{k}" + "n" * 100_000 for k in range(9)) + "\n1,2,3,4,5,6,7,8,9\n")
    for name in ("n.npz", "n.csv"):
        found = ended(["audit", str(tmp_path / name), "--target", "z", "--out", str(tmp_path / "a")])
        assert (found.status, found.clear) == (2, True)
        assert len(found.err) < LONGEST + 100
        assert "\x1b" not in found.err


@pytest.mark.parametrize("kind", ["list", "binary", "fixed"])
def test_parquet_columns_that_are_no_numbers_are_not_read(tmp_path, kind, monkeypatch) -> None:
    """A file of a kilobyte holds any number of equal ones: neither its size nor its rows tell."""
    rows, many = 4, 1_000_000
    columns = {
        "list": lambda: pa.ListArray.from_arrays(pa.array([0, many, many, many, many], pa.int32()), np.zeros(many)),
        "binary": lambda: pa.array([bytes(many)] * rows, pa.binary()),
        "fixed": lambda: pa.array([bytes(many)] * rows, pa.binary(many)),
    }
    table = pa.table({"x": columns[kind](), "a": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]})
    pq.write_table(table, tmp_path / "d.parquet", compression="zstd")
    assert (tmp_path / "d.parquet").stat().st_size < 10_000
    monkeypatch.setattr(csv_files, "MOST_UNPACKED", 2**23)
    read: list[list[str]] = []
    own = pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile, "read", lambda self, names, **more: read.append(names) or own(self, names, **more)
    )
    with pytest.raises(DataError, match=r"column 'x': .* is neither a number nor text"):
        load_dataset(tmp_path / "d.parquet", target="y", ranges={"a": (0, 9)})
    assert read == []
    found = load_dataset(tmp_path / "d.parquet", target="y", ranges={"a": (0, 9)}, drop="x")
    assert found.columns == (("a",), ())
    assert read == [["a", "y"]]


def idx(shape: tuple[int, ...], content: bytes | None = None) -> bytes:
    head = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return head + (bytes(math.prod(shape)) if content is None else content)


LABELS = idx((60,), bytes(k % 10 for k in range(60)))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (idx((0, 28, 28)), idx((0,)), "images of shape (0, 28, 28)"),
        (idx((60, 0, 28)), LABELS, "images of shape (60, 0, 28)"),
        (idx((60, 784)), LABELS, "images of shape (60, 784)"),
        (idx(()), idx(()), "an array of 0 axes"),
        (idx((1,) * 254 + (60,)), LABELS, "an array of 255 axes"),
        (gzip.compress(idx((60, 28, 28)) + bytes(2**22)), LABELS, "unpacks to more than 1 MB"),
        (lzma.compress(idx((60, 28, 28)) + bytes(2**22)), LABELS, "unpacks to more than 1 MB"),
    ],
    ids=["empty", "no width", "two axes", "no axes", "255 axes", "gz", "xz"],
)
def test_a_received_folder_of_mnist_is_one_line(tmp_path, images, labels, said, monkeypatch) -> None:
    monkeypatch.setattr(csv_files, "MOST_UNPACKED", 2**20)
    (tmp_path / "mnist").mkdir()
    ending = {b"\x1f\x8b": ".gz", b"\xfd7": ".xz"}.get(images[:2], "")
    for part in ("train", "t10k"):
        (tmp_path / "mnist" / f"{part}-images-idx3-ubyte{ending}").write_bytes(images)
        (tmp_path / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    refused(["audit", "mnist", "--data-folder", str(tmp_path), "--out", str(tmp_path / "a")], said)
