"""Received schedules, and files of what Opacus recorded: a result or one line, whatever they hold; nothing in them is
run, and nothing is written elsewhere. A small seeded share; FUZZ=300 tries so many of each."""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from pickletools import genops
from typing import Any

import pytest
import torch
from torch import nn

from injecting import damage, ended
from reconbound._internal.checks import InputError
from reconbound._internal.torch_files import LARGEST
from reconbound.mechanisms import read_opacus_state, read_schedule
from tampering import VALUES, changed
from waiting import time_limit

SHARE = int(os.environ.get("FUZZ", "0"))
pytestmark = pytest.mark.slow

NUMBERS = [0.0, 1e-320, 1e-9, 1e-3, 0.01, 0.3, 1.0, 1.5, 2.0, 50.0, 1e6, 1e18, 1e308]
STEPS = [0, 1, 2, 500, 10**6, 10**12, 10**18, 2.5]


def random_stretch(rng: random.Random) -> dict[str, Any]:
    """A stretch of a schedule, most often a usual one."""
    usual = rng.random() < 0.7
    pick = (lambda few: rng.choice(few)) if usual else (lambda _: rng.choice(NUMBERS))
    made: dict[str, Any] = {"noise_multiplier": pick([0.7, 1.0, 4.0]), "sample_rate": pick([0.004, 0.01, 0.2, 1.0])}
    if rng.random() < 0.2:
        del made["noise_multiplier"]
        layers = rng.choice([0, 0, 2, 3])
        of = (lambda: [pick([0.5, 2.0]) for _ in range(layers)]) if layers else (lambda: pick([0.5, 2.0]))
        made |= {"noise_std": of(), "max_grad_norm": of()}
    made |= rng.choice([{"steps": pick([1, 40]) if usual else rng.choice(STEPS)}, {"epochs": pick([0.5, 2.0])}])
    if rng.random() < 0.3:
        made["sampler"] = rng.choice(["poisson", "fixed", "shuffle"])
    if rng.random() < 0.3:
        made["clip"] = rng.choice(["hard", "smooth"])
    return made


def random_schedule(rng: random.Random) -> bytes:
    made: Any = [random_stretch(rng) for _ in range(rng.choice([1, 1, 2, 3, 9]))]
    if rng.random() < 0.3:
        made = {"stretches": made, **rng.choice([{}, {"clip": "hard"}, {"sampler": "fixed"}, {"x": 1}])}
    if rng.random() < 0.3:
        made, _ = changed({"": made}, rng)
        made = made.get("", made)
    return json.dumps(made).encode()


def risks(rng: random.Random) -> list[str]:
    """Options of `bound` beside the mechanism."""
    some = [["--json"], ["--group", "2"], ["--fpr", "1e-3"], ["--blind-chance", "1/50257"], ["--dim", "3x3"]]
    return [word for words in rng.sample(some, rng.choice([0, 1, 2])) for word in words]


def check(words: list[str], place: Path, about: object) -> int:
    """Runs a command that writes nothing but the page of --curve; returns whether there was a result."""
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with time_limit(100, (about, words)):
        found = ended(words)
    assert found.clear, (about, words, found)
    assert not {"\x1b", "\u202e"} & {*found.out, *found.err}, (about, words)
    assert "nan" not in found.out.lower().split(), (about, words, found.out)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before, (about, words)
    return int(found.status == 0)


def test_random_schedules(tmp_path) -> None:
    rng, results, count = random.Random(f"schedules {SHARE}"), 0, SHARE or 12
    path = tmp_path / "schedule.json"
    for k in range(count):
        path.write_bytes(random_schedule(rng))
        what = damage(path, rng) if rng.random() < 0.15 else ""
        results += check(["bound", "--schedule", str(path), *risks(rng)], tmp_path, (k, what, path.read_bytes()[:2000]))
    assert 0 < results < count


def random_state(rng: random.Random) -> Any:
    """What an accountant of Opacus keeps, or a checkpoint with it."""
    rows = [(rng.choice([0.7, 1.1, 2.0]), rng.choice([0.01, 0.05]), rng.choice([1, 30, 400])) for _ in range(3)]
    if rng.random() < 0.3:
        rows[0] = tuple(rng.choice([*NUMBERS, *VALUES, torch.ones(()), torch.ones(3)]) for _ in range(3))
    made: Any = {"history": rows[: rng.choice([1, 1, 3, 3, 0])], "mechanism": rng.choice(["rdp", "prv"])}
    if rng.random() < 0.2:
        made["history"] = rng.choice([*VALUES, torch.ones(3), OrderedDict(a=1), {1, 2}])
    if rng.random() < 0.4:
        weights = nn.Linear(3, 2)
        made = {"module_state_dict": weights.state_dict(), "privacy_accountant_state_dict": made, "extra": {3: {1, 2}}}
        made["optimizer_state_dict"] = torch.optim.Adam(weights.parameters()).state_dict()
    return rng.choice([made, made, made, OrderedDict(made), made.get("history", made)])


def write_state(path: Path, state: Any, rng: random.Random) -> str:
    """Writes JSON where it can hold it, otherwise a file of torch.save, and may spoil it."""
    form = rng.choice(["json", "zip", "zip", "zip", "old"])
    if form == "json":
        path.write_text(json.dumps(state, default=str))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    how = rng.choice(["", "", "damage", "inside"])
    if how == "damage":
        form += f" {damage(path, rng)}"
    elif how == "inside" and form == "zip":
        form += f" inside {inside(path, rng)}"
    return form


def inside(path: Path, rng: random.Random) -> str:
    """Changes the content of a zip file, whose own sums stay right."""
    with zipfile.ZipFile(path) as packed:
        files = {name: bytearray(packed.read(name)) for name in packed.namelist()}
    content = files["archive/data.pkl" if "archive/data.pkl" in files else f"{path.stem}/data.pkl"]
    places = [at for _, _, at in genops(bytes(content))]
    for _ in range(rng.choice([1, 1, 2, 5])):
        content[rng.choice([rng.choice(places), rng.randrange(len(content))])] = rng.choice(
            [rng.randrange(256), ord(rng.choice("cRtu(}]e0.2Qbhqsa"))]
        )
    with zipfile.ZipFile(path, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as packed:
        for name, part in files.items():
            packed.writestr(name, bytes(part))
    return f"{len(content)}"


def test_random_states_of_opacus(tmp_path) -> None:
    rng, results, count = random.Random(f"opacus {SHARE}"), 0, SHARE or 25
    path = tmp_path / "state.pt"
    for k in range(count):
        what = write_state(path, random_state(rng), rng)
        more = rng.choice([[], ["--sampler", "shuffle"], ["--sampler", "fixed"], ["--clip", "smooth"]])
        results += check(["bound", "--opacus-state", str(path), *more, *risks(rng)], tmp_path, (k, what))
    assert 0 < results < count


# --- what was tried by hand --------------------------------------------------------------------


def refused(path: Path, said: str) -> None:
    """Both readers refuse it in one line, and at once."""
    for option in ("--opacus-state", "--schedule"):
        with time_limit(20, option):
            found = ended(["bound", option, str(path)])
        assert (found.status, found.clear) == (2, True), (option, found)
        assert said in found.err or option == "--schedule", found.err


def packed(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("state/data.pkl", content)
        made.writestr("state/version", "3\n")
        made.writestr("state/byteorder", "little")


def state_of(history: bytes) -> bytes:
    """The pickle of {"history": …} with these instructions in its place."""
    return b"\x80\x02}X\x07\x00\x00\x00history" + history + b"s."


#: A pair of a pair of a pair, sixty deep, whose two parts are the same.
TWICE = b"K\x01q\x00" + b"".join(b"h%c\x86q%c" % (k - 1, k) for k in range(1, 61))


def test_a_pipe_a_device_or_a_folder_is_one_line(tmp_path) -> None:
    """A pipe was waited for, and /dev/zero was read until the memory was full."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "."):
        refused(tmp_path / name, "must be a file: this is a folder, a pipe or a device")


def test_lists_within_each_other_are_refused_at_once(tmp_path) -> None:
    """Sixty lists, each twice in the next, are three hundred bytes, and their text never ends."""
    packed(tmp_path / "history.pt", state_of(TWICE))
    packed(tmp_path / "row.pt", state_of(b"](" + TWICE + b"e"))
    packed(tmp_path / "number.pt", state_of(b"]((" + TWICE + b"K\x01K\x01te"))
    for name in ("history", "row", "number"):
        refused(tmp_path / f"{name}.pt", "must be a list of (noise multiplier, sample rate, steps), three numbers each")


def test_keys_of_lists_within_each_other_take_no_time(tmp_path) -> None:
    """The hash of nested tuples is computed anew each time."""
    packed(tmp_path / "keys.pt", b"\x80\x02}" + TWICE + b"K\x01s.")
    refused(tmp_path / "keys.pt", "must be a PrivacyEngine of Opacus")


def test_a_tensor_is_not_made_over_memory_that_it_does_not_have(tmp_path) -> None:
    """It says that it has 2**30 numbers, in four bytes."""
    path = tmp_path / "state.pt"
    torch.save({"history": [torch.ones(1)]}, path)
    with zipfile.ZipFile(path) as made:
        files = {name: made.read(name) for name in made.namelist()}
    name = next(name for name in files if name.endswith("data.pkl"))
    content = files[name].replace(b"K\x01", b"\x8a\x05\x00\x00\x00\x00\x40")
    assert content != files[name]
    files[name] = content
    with zipfile.ZipFile(path, "w") as made:
        for part, inner in files.items():
            made.writestr(part, inner)
    refused(path, "must be a list of (noise multiplier, sample rate, steps), three numbers each")


def test_a_packed_content_of_any_size_is_one_line(tmp_path) -> None:
    packed(tmp_path / "bomb.pt", state_of(b"X" + (40 * LARGEST).to_bytes(4, "little") + b"0" * (40 * LARGEST)))
    assert (tmp_path / "bomb.pt").stat().st_size < LARGEST / 10
    refused(tmp_path / "bomb.pt", "plain values take more than")


@pytest.mark.parametrize("numbers", ["9" * 5000, "[" * 900 + "]" * 900, "[" * 20_000 + "]" * 20_000])
def test_numbers_and_lists_that_cannot_be_shown_are_one_line(numbers, tmp_path) -> None:
    """A whole number of 5,000 digits, or a list in a list in a list: Python refuses to write them down."""
    path = tmp_path / "some.json"
    for content in (numbers, f"[{numbers}]", f'[{{"noise_multiplier": {numbers}}}]', f'{{"history": [{numbers}]}}'):
        path.write_text(content)
        refused(path, "")
        for read in (read_schedule, read_opacus_state):
            with pytest.raises(InputError):
                read(path)


def test_millions_of_stretches_are_refused_before_they_take_hours(tmp_path) -> None:
    row, path = [1.0, 0.01, 1], tmp_path / "some.json"
    stretch = dict(zip(("noise_multiplier", "sample_rate", "steps"), row, strict=True))
    for content in (row, stretch):
        path.write_text(json.dumps([content] * 100_001))
        with time_limit(20, content), pytest.raises(InputError, match="must have at most 100,000 stretches"):
            (read_schedule if content is stretch else read_opacus_state)(path)


class Ran(Exception):
    pass


def run_it() -> None:
    raise Ran


class Hostile:
    def __init__(self, what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what


@pytest.mark.parametrize("form", ["zip", "old"])
def test_no_class_or_function_is_looked_up(form, tmp_path, monkeypatch) -> None:
    """Not even what torch.load allows because the user's own program asked it to."""
    path = tmp_path / "state.pt"
    for what in ((run_it, ()), (os.system, ("exit 3",)), (eval, ("1",)), (io.open, (str(tmp_path / "evil"), "w"))):
        torch.save({"history": [(1.0, 0.01, 5)], "more": Hostile(what)}, path,
                   _use_new_zipfile_serialization=form == "zip")  # fmt: skip
        with torch.serialization.safe_globals([what[0]]):
            refused(path, "nothing in a file is run")
    assert not (tmp_path / "evil").exists()


def test_tensors_and_optimizers_beside_it_are_passed_over(tmp_path) -> None:
    path, model = tmp_path / "state.pt", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Embedding(3, 2))
    adam = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    adam.step()
    own = {"history": [(1.0, 0.01, 5)], "mechanism": "rdp"}
    more = {"module_state_dict": model.state_dict(), "optimizer_state_dict": adam.state_dict(), "model": {1, 2}}
    more |= {"sparse": torch.eye(3).to_sparse(), "dtype": torch.float16, "size": torch.Size([3]), "bytes": b"x"}
    for form in (True, False):
        for state in (own, OrderedDict(own), {**more, "privacy_accountant_state_dict": OrderedDict(own)}):
            if form or state is own:
                torch.save(state, path, _use_new_zipfile_serialization=form)
                assert read_opacus_state(path).steps == 5
