"""Changes files of reconbound's as somebody does who knows how their digests are made."""

from __future__ import annotations

import json
import math
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from injecting import damage
from reconbound._internal.files import json_digest, unsealed
from reconbound.sweep.queue import seal_of
from sealing import sealed

STEERING = "\x1b[31m\u202e"
#: What may stand in place of any value.
VALUES: list[Any] = [
    None, True, -1, 0, 1, 3, 0.5, 1e308, -1e308, 1e-320, 10**12, 10**30, 10**400, "", "x", "a\nb", STEERING, "é" * 2000,
    "9" * 400, [], {}, [[]], [1, "a", None], [0.0, 1.0], {"a": {}}, {"tensor": "x"}, {"records": "many"},
    "../../evil", "/etc/passwd", "os:system", "poisson", "shuffle", math.nan, math.inf,
]  # fmt: skip
CELLS: list[Any] = [
    None, -1, 0, 7, 10**15, 1e308, "", "x", "[", "NaN", "1e999", STEERING, "[" * 100_000, b"\x00",
    "COMPLETE", "RUNNING", "FAIL", "WAITING"
]  # fmt: skip
KINDS = [torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]


def tamper(path: Path, rng: random.Random) -> str:
    """Changes a file, its digest made anew; what was done."""
    if path.suffix == ".json":
        return _tamper_json(path, rng)
    if path.suffix == ".safetensors" and path.name != "model.safetensors":
        return _tamper_tensors(path, rng)
    return _tamper_database(path, rng) if path.suffix == ".db" else damage(path, rng)


def changed(content: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy of what JSON holds with one to four parts replaced, removed, added or multiplied."""
    content, done = json.loads(json.dumps(content)), []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *above, last = rng.choice(list(_places(content)) or [("content",)])
        inner = content
        for name in above:
            inner = inner[name]
        how, old = rng.choice(["value", "value", "value", "drop", "add", "times"]), None
        if not (isinstance(inner, dict) and last not in inner):
            old = inner[last]
        if how == "drop" and old is not None:
            del inner[last]
        elif how == "add" and isinstance(inner, dict):
            inner[rng.choice(["x", "\x1b", "sha256", "format"])] = rng.choice(VALUES)
        elif how == "times" and type(old) in (int, float):
            inner[last] = old * rng.choice([-1, 2, 1000, 1e6])
        else:
            inner[last] = rng.choice(VALUES)
        done.append(f"{how} {'/'.join(map(str, (*above, last)))}")
    return content, "; ".join(done)


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts."""
    for name, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, name)
        yield from _places(part, (*above, name))


def _tamper_json(path: Path, rng: random.Random) -> str:
    content = json.loads(path.read_bytes())
    content.pop("sha256", None)
    content, what = changed(content, rng)
    content.pop("sha256", None)
    path.write_text(json.dumps({**content, "sha256": json_digest(content)}))
    return what


def _tamper_tensors(path: Path, rng: random.Random) -> str:
    tensors, facts = unsealed(path)
    if rng.random() < 0.5:
        facts, what = changed(facts, rng)
    else:
        what = changed_tensors(tensors, rng)
    if rng.random() < 0.5:  # as if it was not bound to the files beside it
        facts = {name: value for name, value in facts.items() if name not in ("run", "model")}
    path.write_bytes(sealed(tensors, facts))
    return what


def changed_tensors(tensors: dict[str, Tensor], rng: random.Random) -> str:
    """Removes one of the tensors, or puts another in its place; what was done."""
    name = rng.choice(sorted(tensors))
    if rng.random() < 0.15:
        del tensors[name]
    else:
        tensors[name] = _other(tensors[name], rng)
    return f"tensor {name}"


def _other(tensor: Tensor, rng: random.Random) -> Tensor:
    """Another shape, another type, or other values."""
    how = rng.choice(["cut", "flat", "more", "kind", "repeat", "value", "value"])
    if how == "value" and tensor.numel():
        made, value = tensor.clone(), rng.choice([math.nan, math.inf, -1e30, 0.0, 1e30])
        value = value if made.is_floating_point() else rng.choice([0, 1, 100])
        made.view(-1)[rng.randrange(made.numel())] = value
        return made if rng.random() < 0.7 else torch.full_like(made, value)
    changes = {
        "cut": lambda: tensor[..., :0],
        "flat": lambda: tensor.flatten()[: rng.randrange(4)],
        "more": lambda: tensor.unsqueeze(0),
        "kind": lambda: tensor.to(rng.choice(KINDS)),
    }
    return changes.get(how, lambda: tensor.repeat(*[3] * tensor.dim()))()


def _tamper_database(path: Path, rng: random.Random) -> str:
    with closing(sqlite3.connect(path)) as connection, connection:
        if rng.random() < 0.5:
            return _tamper_attribute(connection, rng)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = rng.choice(sorted(tables))
        columns = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
        column, value = rng.choice(columns), rng.choice(CELLS)
        some = f"WHERE rowid = (SELECT rowid FROM {table} ORDER BY rowid LIMIT 1 OFFSET {rng.randrange(4)})"
        statement, given = rng.choice(
            [(f"UPDATE OR IGNORE {table} SET {column} = ? {some}", (value,))] * 3
            + [(f"DELETE FROM {table}", ()), (f"DROP TABLE {table}", ())]
            + [(f"ALTER TABLE {table} DROP COLUMN {column}", ())]
        )
        try:
            connection.execute(statement, given)
        except sqlite3.Error:  # the tables themselves refuse it
            connection.execute(f"DELETE FROM {table}")
        return f"{statement} {str(given)[:40]}"


def _tamper_attribute(connection: sqlite3.Connection, rng: random.Random) -> str:
    """One of the facts of a trial, its rows sealed anew."""
    get = "SELECT trial_id, key, value_json FROM trial_user_attributes ORDER BY trial_id, key"
    trial, name, text = rng.choice(connection.execute(get).fetchall())
    new, what = changed({name: json.loads(text)}, rng)
    own = {key: json.loads(value) for of, key, value in connection.execute(get) if of == trial} | new
    own["sha256"] = seal_of(own.get("slot"), own.get("setting"), _rows(own.get("rows")))
    put = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?"
    for key, value in own.items():
        connection.execute(put, (json.dumps(value), trial, key))
    return what


def _rows(rows: Any) -> list[dict[str, Any]]:
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
