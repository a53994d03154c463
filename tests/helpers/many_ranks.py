"""Processes that train together: ranks of a gloo group, forked, with a time limit and none left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run

from killing import start

#: Seconds until a test gives its ranks up, and until a rank gives another one up.
LIMIT, PATIENCE = 180, 90


def _for_gpus_only(*given: Any) -> Any:
    return dist.ProcessGroupGloo(*given)


#: Takes tensors on a GPU only, as NCCL does: one on the CPU is refused ("No backend type associated with device type").
dist.Backend.register_backend("gpus_only", _for_gpus_only, devices=["cuda"])


def _rank(target: Callable[..., Any], args: Sequence[Any], group: dict[str, Any], place: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of workers: another server of forks would load all anew
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(place, group["world_size"])  # no port that another test might have
    dist.init_process_group(store=store, timeout=timedelta(seconds=PATIENCE), **group)
    try:
        found = ("returned", target(*args))
    except BaseException as reason:
        found = ("raised", f"{type(reason).__name__}: {reason}\n{traceback.format_exc()}")
    pipe.send(found)
    pipe.recv()  # until all have ended: a rank that leaves first would disturb the others
    dist.destroy_process_group()


def ends_of_ranks(size: int, target: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[tuple[str, Any]]:
    """Calls target(*args) on each rank; how each ended: ("returned", value), ("raised", text) or ("died", None).

    Values must be pickled without torch: NumPy's arrays.
    """
    with tempfile.TemporaryDirectory() as folder:
        place, ranks = str(Path(folder) / "store"), []
        context_of = []
        try:
            for rank in range(size):
                group = {"backend": backend, "rank": rank, "world_size": size}
                ours, theirs = _pipe()
                ranks.append(start(_rank, target, args, group, place, theirs, daemon=False))
                theirs.close()
                context_of.append(ours)
            ends, until = [], time.monotonic() + LIMIT
            for pipe in context_of:
                try:
                    assert pipe.poll(max(0.0, until - time.monotonic())), "a rank hangs"
                    ends.append(pipe.recv())
                except EOFError:
                    ends.append(("died", None))
            for pipe in context_of:
                try:
                    pipe.send(None)
                except OSError:
                    continue
            for process in ranks:
                process.join(20)
            return ends
        finally:
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()


def on_ranks(size: int, target: Callable[..., Any], *args: Any, **options: str) -> list[Any]:
    """Returns what target(*args) returns on each rank."""
    ends = ends_of_ranks(size, target, *args, **options)
    for kind, value in ends:
        assert kind == "returned", value
    return [value for _, value in ends]


def start_torchrun(words: Sequence[str], folder: Path, *, fork: bool) -> Any:
    """Starts torchrun in this folder, in a process that has loaded what its ranks need.

    Its output is in output.txt, its errors and those of its ranks in errors.txt.

    Args:
        words: its command line.
        folder: the folder.
        fork: fork the ranks from it, which saves seconds; the script's path must then be absolute, and torch's global
            generators start from one seed on all ranks.
    """
    forked = ["--run-path", "--start-method=fork"] if fork else []
    return start(_torchrun, [*forked, *words], str(folder), daemon=False)


def _torchrun(words: Sequence[str], folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    for descriptor, name in ((1, "output.txt"), (2, "errors.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # a store that torchrun keeps from one attempt to the next still has the addresses of ranks that have ended
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torch.distributed.run.main(words)


def stop_torchrun(job: Any, pids: Callable[[], list[int]] = list) -> None:
    """Ends torchrun and its ranks, if they are still there.

    Args:
        job: what `start_torchrun` returns.
        pids: gives the ranks' processes.
    """
    job.terminate()  # torchrun ends its ranks
    job.join(40)
    for pid in [*pids(), job.pid] if job.exitcode is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.join()


def _pipe() -> tuple[Any, Any]:
    return multiprocessing.get_context("forkserver").Pipe()
