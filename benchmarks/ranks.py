"""Starts the ranks of a measure, runs one function on each, brings back what rank 0 returns."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

# A rank that waits longer than this for another one has lost it.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)


def run_ranks(
    function: Callable[..., dict[str, Any]],
    world_size: int,
    arguments: dict[str, Any],
    fake: bool = False,
) -> dict[str, Any]:
    """Calls `function(**arguments)` on `world_size` ranks and returns rank 0's answer.

    Args:
        function: Defined at the top of a module; its answer must be writable as JSON.
        world_size: How many ranks; each is a process with one thread, over gloo.
        arguments: Keyword arguments, picklable.
        fake: One process only, rank 0 of a `fake` group of that size, which communicates nothing.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; its traceback is the text.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a rank imports torch
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines about the profiler's start and end
    # A server that has imported everything once makes a rank start in a fraction of a second.
    # FSDP imports torch._dynamo at its first use, which alone takes seconds.
    multiprocessing.set_forkserver_preload(["torch._dynamo", f"{__package__}.variants"])
    # As torchrun has it: the store is a server, and no rank's.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        start_processes(
            _rank_main,
            args=(function, world_size, arguments, fake, folder, store.port),
            nprocs=1 if fake else world_size,
            start_method="forkserver",
        )
        return json.loads((Path(folder) / "answer.json").read_text())


def _rank_main(
    rank: int,
    function: Callable[..., dict[str, Any]],
    world_size: int,
    arguments: dict[str, Any],
    fake: bool,
    folder: str,
    port: int,
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    else:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    try:
        answer = function(**arguments)
        if rank == 0:
            (Path(folder) / "answer.json").write_text(json.dumps(answer))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def progress(message: str) -> None:
    """Writes one line of progress to stderr, from rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)
