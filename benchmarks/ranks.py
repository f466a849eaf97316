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

# What lets NCCL serve several ranks on one GPU. It refuses two ranks with the same host and GPU; a
# host is what NCCL_HOSTID says. Ranks on several "hosts" send over sockets, here of the loopback
# interface. Processes take turns on a GPU, a few milliseconds each, and a collective waits for all
# of them: few channels and the simplest protocol, no memory or threads for what is not there.
_SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MAX_CTAS": "2",
    "NCCL_BUFFSIZE": str(1 << 20),
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # whoever started the ranks ends those that hang
}


def shared_gpu_environment(rank: int) -> dict[str, str]:
    """Variables for a rank that shares its GPU with others; what is set already stays.

    To be set before the rank's first NCCL group is made. Every call, group, dtype and number is
    NCCL's own then; speed is not: about 10 ms for a collective.
    """
    wanted = {**_SHARED_GPU, "NCCL_HOSTID": f"fsdp2-rank-{rank}"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def run_ranks(
    function: Callable[..., dict[str, Any]],
    world_size: int,
    arguments: dict[str, Any],
    fake: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Calls `function(**arguments)` on `world_size` ranks and returns rank 0's answer.

    Args:
        function: Defined at the top of a module; its answer must be writable as JSON.
        world_size: How many ranks; each is a process with one thread.
        arguments: Keyword arguments, picklable.
        device: "cpu": over gloo; "cuda": over NCCL, on the GPUs that there are, which ranks share
            if there are fewer (`shared_gpu_environment`).
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
            args=(function, world_size, arguments, fake, device, folder, store.port),
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
    device: str,
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
        if device == "cuda":
            if world_size > torch.cuda.device_count():
                os.environ.update(shared_gpu_environment(rank))
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
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
