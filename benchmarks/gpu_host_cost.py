"""Host time of the calls that a unit makes in a step: `python -m benchmarks.gpu_host_cost`.

Each call is made many times in a row and not waited for; what is told is the median of microseconds
until it returned. Collectives go over NCCL, on a group of one rank and of two that share the GPU:
one call for several entries (`gather x8`) and for a flat one (`gather x1`). Without a GPU the same
over gloo, where a call waits for its result, and without streams.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from . import machine, report
from .ranks import progress, run_ranks

ENTRIES = (1, 2, 4, 8, 16, 32, 128)
ENTRY_NUMEL = 4096
WARM_UP_CALLS = 5


def measure(device: str, entries: Sequence[int], calls: int, rounds: int) -> dict[str, Any]:
    """Microseconds by call."""
    group = dist.group.WORLD
    collectives = _collectives(group, device, entries)
    found = {name: _cost(call, device, calls, rounds) for name, call in collectives.items()}
    if dist.get_rank() == 0:  # no other rank is needed for the rest
        local = _local_calls(device)
        found |= {name: _cost(call, device, calls, rounds) for name, call in local.items()}
    return found


def _collectives(group: Any, device: str, entries: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Coalesced all-gathers and reduce-scatters of so many entries."""
    # torch 2.13 renames them; 2.11 has the former names only.
    gather = getattr(group, "all_gather_single_coalesced", None)
    gather = gather or group.allgather_into_tensor_coalesced
    reduce = getattr(group, "reduce_scatter_single_coalesced", None)
    reduce = reduce or group.reduce_scatter_tensor_coalesced
    gather_options, reduce_options = AllgatherOptions(), ReduceScatterOptions()
    gather_options.asyncOp = reduce_options.asyncOp = device == "cpu"
    reduce_options.reduceOp = dist.ReduceOp.AVG
    calls: dict[str, Callable[[], Any]] = {}
    for num in entries:
        whole = [torch.zeros(group.size() * ENTRY_NUMEL, device=device) for _ in range(num)]
        parts = [torch.ones(ENTRY_NUMEL, device=device) for _ in range(num)]

        def gathers(whole: Any = whole, parts: Any = parts) -> None:
            _finish(gather(whole, parts, gather_options))

        def reduces(whole: Any = whole, parts: Any = parts) -> None:
            _finish(reduce(parts, whole, reduce_options))

        calls[f"gather x{num}"], calls[f"reduce-scatter x{num}"] = gathers, reduces
    return calls


def _finish(work: Any) -> None:
    """NCCL gives no work for calls on the current stream."""
    if work is not None:
        work.wait()


def _local_calls(device: str) -> dict[str, Callable[[], Any]]:
    """What a unit calls besides collectives: casts, storages, and on a GPU streams and events."""
    wide = [torch.ones(1 << 16, device=device) for _ in range(8)]
    narrow = [tensor.bfloat16() for tensor in wide]
    num_bytes = 1 << 26
    storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def free_and_allocate() -> None:
        storage.resize_(0)
        storage.resize_(num_bytes)

    calls: dict[str, Callable[[], Any]] = {
        "cast of 8 tensors": lambda: torch._foreach_copy_(narrow, wide),
        "storage freed and allocated": free_and_allocate,
    }
    if device == "cuda":
        side, compute = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
        event = torch.cuda.Event()
        event.record()

        def enter() -> None:
            with torch.cuda.stream(side):
                pass

        calls |= {
            "wait_stream": lambda: side.wait_stream(compute),
            "event.record": lambda: event.record(side),
            "wait_event": lambda: side.wait_event(event),
            "with stream": enter,
        }
    return calls


def _cost(call: Callable[[], Any], device: str, calls: int, rounds: int) -> float:
    """Median microseconds until ``call`` returns."""
    for _ in range(WARM_UP_CALLS if device == "cuda" else 1):
        call()
    seconds = []
    for _ in range(rounds):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - began) / calls)
    _synchronize(device)
    return round(statistics.median(seconds) * 1e6, 2)


def settings_for(device: str, num_ranks: int) -> dict[str, Any]:
    """What `measure` is called with: less where ranks take turns, about 10 ms for a collective."""
    if device == "cpu":
        return {"device": device, "entries": (1, 8), "calls": 3, "rounds": 2}
    calls, rounds = (300, 7) if num_ranks == 1 else (20, 3)
    return {"device": device, "entries": ENTRIES, "calls": calls, "rounds": rounds}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes `gpu-host-cost.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_host_cost")
    parser.add_argument("--small", action="store_true", help="in small on the CPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() and not options.small else "cpu"
    record: dict[str, Any] = {"name": "gpu-host-cost", **machine.describe(), "microseconds": {}}
    for num_ranks in options.ranks:
        settings = settings_for(device, num_ranks)
        found = run_ranks(measure, num_ranks, settings, device=device)
        record["microseconds"][f"{num_ranks} ranks"] = found
        progress(f"written to {report.write_record(record, options.output)}")
        print(json.dumps({num_ranks: found}), flush=True)


if __name__ == "__main__":
    main()
