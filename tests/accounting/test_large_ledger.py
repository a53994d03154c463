"""Ledgers of very many records: narrow numbers are never smaller, passes in parts change nothing, memory is bounded."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from killing import start_reporting
from learning import RECORDS, data, learner, network
from reconbound import FisherAccountant
from reconbound._internal.checks import InputError
from reconbound.accounting import compact
from reconbound.accounting.compact import add_at, extremes, largest, order_statistics, rounded_up
from reconbound.accounting.spec import Account
from reconbound.fisher.worlds import Replacement

ROOT = Path(__file__).parents[2]
WORLDS = {"first": Replacement([0.0], [0])}


def trained(runs: int, seed: int = 2**90, **options: Any) -> FisherAccountant:
    """Returns the ledger of a small training with every kind of number in it."""
    chosen = {"budget": 2.0, "diagonal": ("top", 3), "spectral": True, "worlds": WORLDS, "seed": seed, **options}
    if runs == 1 and "diagonal" not in options:
        chosen["diagonal"] = "average"  # records are chosen by one run and measured in the next
    one = learner(network(), progress=False, **chosen).repeat(runs, 6)
    assert one.accountant is not None
    return one.accountant


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [3, 1000])
def test_order_statistics_are_those_of_sorted_numbers(part: int) -> None:
    rng = np.random.default_rng(5)
    special = [0.0, -0.0, 5e-324, 1e-310, np.inf, np.inf, np.finfo(float).max, 1.0, 1.0, np.nextafter(1.0, 2)]
    for size in (1, 2, 10, 257):
        values = np.concatenate([rng.lognormal(0, 20, size), special])[rng.permutation(size + len(special))][:size]
        ranks = sorted({0, size // 3, size // 2, size - 1})
        found = order_statistics(
            lambda v=values: (v[at : at + part] for at in range(0, len(v), part)), lambda count, r=ranks: r
        )
        assert found == [float(x) for x in np.sort(values)[ranks]], size
    assert order_statistics(lambda: iter([np.empty(0), np.empty(0)]), lambda count: [count - 1]) == []


def test_largest_and_extremes_are_those_of_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "PART", 7)
    generator = torch.Generator().manual_seed(3)
    for trial in range(30):
        values = torch.randint(0, 1 + trial, (50,), generator=generator).double()
        known = torch.rand(50, generator=generator) < 0.8
        order = torch.argsort(values, descending=True, stable=True)
        best, rows = largest(lambda part, v=values: v[part], 50, 9)
        assert rows.tolist() == order[:9].tolist()
        assert best.tolist() == values[rows].tolist()
        own = order[known[order]]
        for most, least in ((4, 3), (0, 5), (6, 0), (60, 2), (45, 45)):
            m = min(most, len(own))
            wanted = torch.cat([own[:m], own[len(own) - min(least, len(own) - m) :]])
            found = extremes(values, lambda part, k=known: k[part], most, least)
            assert found.tolist() == wanted.tolist(), (trial, most, least)


def test_rounding_up_is_never_below_and_never_infinite() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.exp(torch.randn(100_000, generator=generator, dtype=torch.float64) * 30)
    values = torch.cat([values, torch.tensor([0.0, 1e-300, 5e-324, 1e39, 1e308], dtype=torch.float64)])
    found = rounded_up(values, torch.float32)
    finite = values < float(torch.finfo(torch.float32).max)
    assert bool((found.double() >= values)[finite].all())
    assert bool(found.isfinite().all())
    normal = finite & (values > 1e-37)
    assert float((found.double() / values - 1)[normal].max()) < 2**-23
    assert math.isinf(float(rounded_up(torch.tensor([math.inf], dtype=torch.float64), torch.float32)[0]))
    assert rounded_up(values, torch.float64) is values


def test_narrow_sums_of_repeated_indices_are_never_below() -> None:
    generator = torch.Generator().manual_seed(2)
    narrow, wide = torch.zeros(2, 20), torch.zeros(2, 20, dtype=torch.float64)
    for _ in range(200):
        index = torch.randint(0, 20, (15,), generator=generator)
        value = torch.rand(2, 15, generator=generator, dtype=torch.float64) * 1e-9
        add_at(narrow, index, value)
        add_at(wide, index, value)
    assert bool((narrow.double() >= wide).all())
    torch.testing.assert_close(narrow.double(), wide, rtol=200 * 2**-23, atol=0)


# --- ledgers ---------------------------------------------------------------------------------


def answers(ledger: FisherAccountant) -> dict[str, Any]:
    """Returns what a user reads from a ledger."""
    found = {
        "dfil": ledger.dfil(),
        "error": ledger.standard_error(),
        "floors": torch.from_numpy(ledger.mse_floor().value),
        "most": torch.tensor([[e.record, e.estimate, e.lower_limit or 0] for e in ledger.most_exposed(7)]),
        "features": torch.from_numpy(ledger.feature_floors(average=ledger.runs == 1).value),
        "spectral": ledger.traces.spectral_bound(),
        "measured": ledger.measured(),
    }
    if ledger.runs > 1:
        found["upper"] = ledger.upper(confidence=0.9)
    for world in ledger.divergences.worlds:
        found[world] = ledger.divergence(world)
        found[f"most {world}"] = torch.tensor(ledger.divergences.most_exposed(7, world))
        if ledger.runs > 1:
            found[f"upper {world}"] = ledger.divergence(world, 0.9)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("runs", [1, 3])
def test_parts_change_no_number(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    whole = trained(runs, budget="every" if runs == 3 else 2.0)
    before, said = answers(whole), whole.summary()
    for part in (7, RECORDS - 1):  # with a last part of several records, and of one
        monkeypatch.setattr(compact, "PART", part)
        ledger = trained(runs, budget="every" if runs == 3 else 2.0)
        for name, value in answers(ledger).items():
            assert torch.equal(value, before[name]), name
        assert ledger.summary() == said
    assert whole.summary() == said
    assert ledger.no_limit_because() == whole.no_limit_because()
    assert str(ledger.mse_floor()) == str(whole.mse_floor())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("runs", [1, 3])
def test_narrow_ledgers_are_close_and_never_below(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    wide = trained(runs)
    monkeypatch.setattr(compact, "LARGE", 0)
    narrow = trained(runs)
    assert narrow.state()["trace"].dtype == narrow.state()["nats_mean"].dtype == torch.float32
    assert narrow.state()["nats_times"].dtype == narrow.state()["measured_all"].dtype == torch.int32
    for name, value in narrow.state().items():
        if name.endswith("_mean") and value.dtype == torch.float32:
            assert bool((value.double() >= wide.state()[name]).all()), name
            torch.testing.assert_close(value.double(), wide.state()[name], rtol=1e-5, atol=1e-30, msg=name)
        if "times" in name or "measured" in name:
            assert value.tolist() == wide.state()[name].tolist(), name
    theirs = answers(wide)
    for name, value in answers(narrow).items():
        if not name.startswith("most"):  # equal exposures may change places
            torch.testing.assert_close(value.double(), theirs[name].double(), rtol=1e-5, atol=1e-12, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (1, 3), (0, 2)])
def test_merging_a_file_is_merging_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow: bool, ours: int, theirs: int
) -> None:
    monkeypatch.setattr(compact, "PART", 7)
    if narrow:
        monkeypatch.setattr(compact, "LARGE", 0)
    options = {"diagonal": "average"}
    other = trained(theirs, 2**91, **options)
    other.save(tmp_path / "other")
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
    if ours:
        one = trained(ours, **options)
    else:
        one = FisherAccountant(other.account, worlds=tuple(WORLDS), spectral=True, diagonal="average")
    two = copy.deepcopy(one)
    one.divergences.from_batches = two.divergences.from_batches = True
    one.merge(other)
    two.merge(tmp_path / "other")
    assert one.runs == two.runs == ours + theirs
    assert one.fingerprints == two.fingerprints
    for name, value in one.state().items():
        assert torch.equal(value, two.state()[name]), name
    with pytest.raises(InputError, match="other runs"):
        two.merge(str(tmp_path / "other"))


@pytest.mark.filterwarnings("ignore")
def test_a_file_with_impossible_numbers_is_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = trained(1, 2**91, diagonal="none")
    other.divergences.state["nats_times_all"][0, 3] = -1
    other.save(tmp_path / "other")
    monkeypatch.setattr(compact, "PART", 7)
    with pytest.raises(InputError, match="nats_times_all"):
        trained(1, diagonal="none").merge(tmp_path / "other")
    (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes()[:-1])
    with pytest.raises(InputError, match="cut off"):
        trained(1, diagonal="none").merge(tmp_path / "other")


@pytest.mark.filterwarnings("ignore")
def test_saved_narrow_ledgers_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "LARGE", 0)
    ledger = trained(2)
    ledger.save(tmp_path / "ledger")
    again = FisherAccountant.load(tmp_path / "ledger")
    assert all(torch.equal(value, again.state()[name]) for name, value in ledger.state().items())
    monkeypatch.setattr(compact, "LARGE", 2**22)
    with pytest.raises(InputError, match=r"torch\.float64"):
        FisherAccountant.load(tmp_path / "ledger")


def test_a_ledger_without_information_has_a_summary() -> None:
    x, _ = data()
    ledger = trained(2, rules=None, spectral=False, diagonal="none")
    found = ledger.summary()
    assert set(found) == {"confidential", "runs", "caveats", "divergences"}
    own = found["divergences"]["removed"]
    nats = ledger.divergence("removed").sort().values
    at = [nats[math.ceil(share * len(x)) - 1] for share in (0.5, 0.99, 0.9999, 1.0)]
    assert list(own["estimate"]["nats"].values()) == [float(n) for n in at]
    limits = ledger.divergence("removed", 0.95)
    assert own["upper_limit"]["nats"]["highest"] == float(limits.max())
    chances = ledger.divergences.towards("removed", 0.95).max_success(0.1).value
    assert own["upper_limit"]["max_success at 0.1"]["highest"] == float(chances.max())
    first = int(ledger.divergences.estimates("removed").mean.argmax())  # before the cap
    assert ledger.divergences.most_exposed(1) == [(first, float(nats[-1]))]


def peak() -> int:
    """Returns the most memory that this process has had, in kB; getrusage counts that of who started it as well."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


def memory_of_a_new_ledger(records: int, pipe: Any) -> None:
    pipe.send("ready")
    before = peak()
    ledger = FisherAccountant(Account(1.0, 1.0, 1e-3, records=records, features=10, steps=10), worlds=("a",))
    pipe.send(peak() - before)
    del ledger


def test_a_new_ledger_of_a_hundred_million_records_takes_no_memory() -> None:
    process, pipe = start_reporting(memory_of_a_new_ledger, 10**8)
    assert pipe.recv() < 50_000  # kB
    process.join()


@pytest.mark.slow
def test_the_benchmark_of_a_large_ledger_stays_within_its_memory(tmp_path: Path) -> None:
    """In a process of its own: 34 bytes a record, and 0.6 GB for Python, torch and the parts of a pass."""
    records = 4 * compact.PART + 1  # passes in parts take 0.69 GB of 0.74, others 1.01
    assert records > compact.LARGE
    asked = ["--records", str(records), "--updated", "100000", "--folder", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "large_ledger.py"), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = float(done.stdout.rsplit("peak memory ", 1)[1].split()[0])
    assert peak < 0.6 + 34e-9 * records, done.stdout
