"""The memory and the time of a ledger of very many records: created, added to, merged, summarised, ranked, saved.

Each stage prints the largest memory that the process has had so far and its own time. The ledger is FisherAccountant's
default for Poisson batches: Fisher information under one rule, and divergences to the release without each record. A
second ledger of the same size is merged from its file.

    python benchmarks/large_ledger.py [--records 100000000] [--updated 1000000] [--folder .]"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from reconbound import FisherAccountant
from reconbound.accounting.spec import Account
from reconbound.fisher import StepInformation

#: Records that are added at a time.
BATCH = 100_000
STEPS = 10


def memory() -> float:
    """Returns the largest memory of this process so far, in GB; getrusage counts that of who started it as well."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e9


@contextmanager
def stage(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - start:.1f} s, {memory():.2f} GB", flush=True)


def measured(account: Account, size: int, generator: torch.Generator) -> StepInformation:
    """Returns made-up information about `size` records."""
    norm, across, along = torch.rand(3, size, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(size)
    return StepInformation(
        clipped_norm=norm * account.max_grad_norm, across=across, along=along / 10, across_error=across / 10,
        norm=norm, factor=torch.ones(size), loss=zeros, gradient_sum={}, features=account.features, probes=1,
        noise_multiplier=account.noise_multiplier, max_grad_norm=account.max_grad_norm, clip=account.clip,
    )  # fmt: skip


def filled(account: Account, updated: int, seed: int) -> FisherAccountant:
    """Returns a ledger with one finished run, in which this many records were measured at random."""
    ledger, generator = FisherAccountant(account), torch.Generator().manual_seed(seed)
    for at in range(0, updated, BATCH):
        size = min(BATCH, updated - at)
        index = torch.randint(0, account.records, (2 * size,), generator=generator).unique()
        index = index[torch.randperm(len(index), generator=generator)[:size]]
        ledger.add(index, measured(account, len(index), generator))
    ledger.finish_run()
    return ledger


def main(records: int, updated: int, folder: Path) -> None:
    account = Account(1.0, 1.0, updated / STEPS / records, records=records, features=10, steps=STEPS)
    print(f"{records:,} records, {updated:,} of them measured in each run; before: {memory():.2f} GB")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "ledger.safetensors"
        with stage("created, and one run added"):
            ledger = filled(account, updated, 1)
        with stage("saved"):
            ledger.save(path)
        print(f"the file has {path.stat().st_size / 1e9:.2f} GB")
        del ledger
        with stage("another one created, and one run added"):
            ledger = filled(account, updated, 2)
        with stage("merged with the file"):
            ledger.merge(path)
        with stage("summarised"):
            found = ledger.summary()
        with stage("its most exposed found"):
            most = ledger.most_exposed(10), ledger.divergences.most_exposed(10)
        print(found["floor_estimate"]["exact"], found["divergences"]["removed"]["estimate"]["nats"])
        print(most[0][0], most[1][0])
    print(f"peak memory {memory():.2f} GB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--updated", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("."))
    arguments = parser.parse_args()
    main(arguments.records, arguments.updated, arguments.folder)
