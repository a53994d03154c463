"""States of ledgers beside Opacus that somebody changed, and disks that refuse their report. A small seeded share;
FUZZ=300 tries so many of each."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reconbound as rb
from beside_opacus import private
from injecting import REFUSALS, refusing
from reconbound._internal.checks import InputError
from reconbound._internal.files import unsealed
from reconbound.integrations.opacus import Measuring, OpacusLedger
from tampering import changed, changed_tensors
from waiting import time_limit

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")
SHARE = int(os.environ.get("FUZZ", "0"))


def begun(measured: bool) -> tuple[Any, OpacusLedger]:
    """A training of which nothing has been done, and its ledger."""
    made = private(noise_multiplier=2.0)
    worlds = {"first": rb.Replacement(0.0, [0])}
    return made, made.watch(measure=Measuring(made.network, epochs=4, worlds=worlds) if measured else None)


def refusal(call: Callable[[], Any]) -> str | None:
    """Returns what a call is refused with by the library or the disk; None where it is not."""
    try:
        call()
    except (OSError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("measured", [False, True])
def test_a_changed_state_is_refused_or_a_ledger_of_numbers(measured: bool) -> None:
    made, ledger = begun(measured)
    made.train(1)
    good = ledger.state_dict()
    rng, taken, count = random.Random(f"state {measured} {SHARE}"), 0, SHARE or 25
    for k in range(count):
        state, what = spoilt(good, rng)
        again, fresh = begun(measured)
        with time_limit(60, (k, what)):
            if said := refusal(lambda fresh=fresh, state=state: fresh.load_state_dict(state)):
                assert "\n" not in said, (k, what, said)
                assert "tensor(" not in said, (k, what, said)
                continue
            taken += 1
            torch.manual_seed(1000 + k)  # noise may not come twice
            if not fresh.finished:
                said = refusal(lambda again=again: again.train(1))
                assert said is None or "\n" not in said, (k, what, said)
        for world in fresh.accountant.divergences.worlds:
            nats = fresh.divergence(world)
            assert bool(((nats >= 0) & (nats <= fresh.accountant.divergences.cap(world))).all()), (k, what, nats)
            chances = torch.as_tensor(fresh.max_success(0.1, world).value)
            assert bool(((chances >= 0.1) & (chances <= 1)).all()), (k, what, chances)
        assert 0 <= fresh.get_epsilon(1e-5) < float("inf"), (k, what)
    assert 0 < taken < count


def endless() -> list[Any]:
    """A list that is twice in a list, sixty times: its text, or comparing it with its like, never ends."""
    made: list[Any] = [0]
    for _ in range(60):
        made = [made, made]
    return made


@pytest.mark.parametrize(
    "value", [torch.ones(2), endless(), {"a": torch.ones(3)}, None], ids=["tensor", "endless", "dictionary", "none"]
)
@pytest.mark.parametrize(
    "name",
    ["mark", "noise_multiplier", "worlds", "steps", "finished", "seed", "tensors", "nats", "bounds", "noise_digests"],
)
def test_state_with_something_else_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    """Tensors were compared with numbers, and a state without its seed left a ledger of another training behind."""
    made, ledger = begun(True)
    made.train(1)
    state = ledger.state_dict()
    inner = {"noise_multiplier": state["mark"], "worlds": state["mark"], "nats": state["tensors"]}.get(name, state)
    inner[name] = value
    _, fresh = begun(True)
    before = fresh.accountant.state()
    with time_limit(20, (name, value)), pytest.raises(InputError) as caught:
        fresh.load_state_dict(state)
    assert len(str(caught.value)) < 2000
    assert fresh.steps == 0
    assert all(
        torch.equal(part, before[key]) for key, part in fresh.accountant.state().items() if key != "fingerprints"
    )


def spoilt(good: dict[str, Any], rng: random.Random) -> tuple[Any, str]:
    facts = {name: value for name, value in good.items() if name not in ("tensors", "noise_digests")}
    tensors = {**good["tensors"], "noise_digests": good["noise_digests"]}
    if rng.random() < 0.5:
        facts, what = changed(facts, rng)
    elif rng.random() < 0.9:
        what = changed_tensors(tensors, rng)
    else:
        return {**good, "tensors": rng.choice([None, [], {}, {"nats": 3}, "x"])}, "tensors"
    return {**facts, "noise_digests": tensors.pop("noise_digests", None), "tensors": tensors}, what


def test_a_disk_that_refuses_loses_no_report(tmp_path: Path) -> None:
    made, ledger = begun(True)
    made.train(4)
    ledger.report(tmp_path / "wanted")
    names = ("run.json", "leakage.safetensors", "report.html", "report-public.html")
    rng, stopped = random.Random(f"report {SHARE}"), 0
    for k in range(SHARE or 4):
        folder, number = tmp_path / str(k), rng.choice(REFUSALS)
        with refusing(folder, number, rng.randrange(12), rng.choice([1, float("inf")])):
            said = refusal(lambda folder=folder: ledger.report(folder))
        if said is not None:
            stopped += 1
            assert "\n" not in said
            assert os.strerror(number) in said
        ledger.report(folder)
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)
        for name in names:
            one, other = folder / name, tmp_path / "wanted" / name
            if name == "leakage.safetensors":  # its header may be in any order
                (tensors, facts), (wanted, told) = unsealed(one), unsealed(other)
                assert facts == told
                assert all(torch.equal(tensors[part], wanted[part]) for part in wanted)
            else:
                assert one.read_bytes() == other.read_bytes(), (k, name)
    assert stopped > 0
