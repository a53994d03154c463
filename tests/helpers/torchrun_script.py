"""A training as a user writes it for torchrun; tests/training/test_torchrun.py kills its ranks.

Arguments: a folder, and the number of steps.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from rank_run import made


def weight(model: Any) -> dict[str, float]:
    return {"weight": model[0].weight.abs().sum().item()}


def slow_weight(model: Any) -> dict[str, float]:
    time.sleep(0.01)  # so that kills fall all over the run
    return weight(model)


def learner(folder: Path | None, evaluate: Any = weight) -> Any:
    return made(
        "everything",
        whole_at=(),
        shards=2,
        checkpoint=folder,
        every=3,
        evaluate=evaluate,
        evaluate_every=1,
        optimizer=lambda p: Adam(p, lr=0.05),
        schedule=lambda o: StepLR(o, 25, 0.5),
    )


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    one = learner(folder / "checkpoints", slow_weight).fit(steps)
    if rank == 0:
        one.accountant.save(folder / "ledger.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
