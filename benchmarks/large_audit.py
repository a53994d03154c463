"""The memory and the time of `reconbound audit` on a Parquet table of very many rows, which is made first.

The table has a private number (age), three public columns and a class to predict. Batches are measured in a few steps
of one run: what grows with the rows is reading, checking and the ledger, not the number of steps.

    python benchmarks/large_audit.py [--rows 20000000] [--folder .]"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: Rows that are made, and kept in a row group, together.
GROUP = 500_000
OPTIONS = (
    "--target", "moved", "--private", "age", "--range", "age=0:120", "--range", "hours=0:100", "--range", "score=-5:5",
    "--model", "linear", "--runs", "1", "--budget", "every", "--noise-multiplier", "1", "--clip", "smooth",
)  # fmt: skip


def make_table(path: Path, rows: int) -> None:
    """Writes the table, in parts."""
    rng = np.random.default_rng(0)
    jobs = pa.array(["clerk", "cook", "driver", "nurse"])
    writer = None
    for at in range(0, rows, GROUP):
        size = min(GROUP, rows - at)
        age, job = rng.integers(18, 95, size), rng.integers(0, 4, size).astype(np.int8)
        score = rng.normal(size=size)
        moved = np.where(score + (age - 50) / 30 + rng.normal(size=size) > 0, "yes", "no")
        part = pa.table({
            "age": pa.array(age),
            "hours": pa.array(rng.normal(40, 8, size)),
            "score": pa.array(score),
            "job": pa.DictionaryArray.from_arrays(pa.array(job), jobs).dictionary_decode(),
            "moved": pa.array(moved),
        })  # fmt: skip
        writer = pq.ParquetWriter(path, part.schema) if writer is None else writer
        writer.write_table(part)
    assert writer is not None
    writer.close()


def main(rows: int, steps: int, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path, start = Path(place) / "people.parquet", time.perf_counter()
        make_table(path, rows)
        print(f"{rows:,} rows, {path.stat().st_size / 1e9:.2f} GB: made in {time.perf_counter() - start:.0f} s")
        asked = (*OPTIONS, "--steps", str(steps), "--sample-rate", f"{2000 / rows:g}", "--out", f"{place}/audit")
        start = time.perf_counter()
        command = [sys.executable, "-W", "ignore", "-m", "reconbound", "audit", str(path), *asked]
        subprocess.run(command, check=True, env={**os.environ, "TMPDIR": place})
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"audit: {time.perf_counter() - start:.0f} s ({used.ru_utime + used.ru_stime:.0f} s of a core)")
        for file in sorted(Path(place, "audit").rglob("*.*")):
            print(f"  {file.name}: {file.stat().st_size / 1e6:.1f} MB")
        print(f"peak memory {used.ru_maxrss * 1024 / 1e9:.2f} GB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("."))
    arguments = parser.parse_args()
    main(arguments.rows, arguments.steps, arguments.folder)
