"""`measure`: the speeds of the hardware that this job runs on, as a `Hardware` and as a file."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..common.host import memory_bytes
from ..common.versions import __version__
from ..doctor.speed import SLOW_PART, measure_flops
from ..estimation.events import Compute, Operation
from ..estimation.tracing import trace_step
from .collective_times import collective_tables, overlap, ranks_per_node, wait_for
from .costs import compute_s
from .hardware import PRESETS, Hardware
from .timed import OperatorTimes, Timed, tables, two_constants
from .workloads import CPU, CUDA, QUICK, Step, workloads

_SECONDS = 0.03  # at least, for each workload
_MOST_STEPS = 12
_KERNELS = 50
_DISK_BYTES = 64 * 2**20


def measure(
    *,
    quick: bool = False,
    folder: str | os.PathLike[str] | None = None,
    name: str = "measured",
    progress: Callable[[str], None] | None = None,
) -> Hardware:
    """Measure this job's hardware. All ranks call this, at the same time; it takes 1 to 2 minutes.

    What is measured: FLOP/s of multiplications, convolutions and attention by arithmetic intensity;
    the time of other operators by bytes; what a host needs for an operator; gathers and
    reductions by size, over all ranks and over the dims of a mesh of nodes; whether they go on
    while the host computes; and the disk. All ranks compute at the same time, as in a
    step: what they share (cores, memory, links) is shared here, too.

    Args:
        quick: a few small sizes only, in seconds: to try it out.
        folder: for checkpoints: its disk is measured; None: no disk is.
        name: of the result.
        progress: called with what is done now.

    Returns:
        The same on every rank.

    Raises:
        OSError: for a folder that cannot be written.

    Example:
        >>> from fsdp2.planner import measure
        >>> ours = measure(quick=True)
        >>> ours.name, len(ours.operator_s) > 0
        ('measured', True)
    """
    tell = progress or (lambda what: None)
    device = _device()
    tell("operators")
    timed = _operators(device, quick)
    kernel_s = _kernel_s(device)
    operator_s, operator_flops = tables(timed, kernel_s)
    sizes = (2**12, 2**16) if quick else tuple(2**i for i in range(12, 28, 3))
    collective_s, message_s = (
        collective_tables(device.type, sizes, tell) if _is_job() else ({}, 0.0)
    )
    tell("links and disk")
    on_host = device.type == "cpu"
    disk = _disk(Path(folder), 2**20 if quick else _DISK_BYTES) if folder is not None else (0, 0)
    made = replace(
        PRESETS["cpu"] if on_host else PRESETS["h100"],
        name=name,
        **_speeds(operator_s, operator_flops, quick),
        kernel_s=kernel_s,
        kernels_range=(1.0, 1.0),  # they are known now
        links_range=(1.0, 1.0),
        operator_s=operator_s,
        operator_flops=operator_flops,
        collective_s=collective_s,
        message_s=message_s,
        host_ordered=on_host,
        overlap=overlap(device.type, sizes[-1]) if on_host and _is_job() else 0.0,
        **_links(collective_s),
        **_machine(device),
        disk_write_bandwidth=disk[0],
        disk_read_bandwidth=disk[1],
    )
    made = replace(made, launch_s=_launch_s(device, made))
    return _agreed(made)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    torch.cuda.set_device(device)
    return device


def _is_job() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _together() -> None:
    if _is_job():
        dist.barrier()


def _operators(device: torch.device, quick: bool) -> list[Timed]:
    """Of all workloads; of all ranks the median."""
    sizes = QUICK if quick else (CPU if device.type == "cpu" else CUDA)
    times = OperatorTimes(device)
    for dtype in (torch.float32, torch.bfloat16):
        for step in workloads(sizes, device, dtype):
            _together()
            _run(step, times, 2 if quick else _MOST_STEPS)
    found = times.found()
    if not _is_job():
        return found
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return medians(every)


def medians(every: list[list[Timed]]) -> list[Timed]:
    """Of what each rank has timed: of each operation the median of those that have run it.

    Ranks with different devices may have chosen different kernels.
    """
    seconds: dict[Operation, list[float]] = {}
    for each in chain.from_iterable(every):
        seconds.setdefault(each.operation, []).append(each.seconds)
    return [Timed(operation, median(times)) for operation, times in seconds.items()]


def _run(step: Step, times: OperatorTimes, most: int) -> None:
    """A few steps, of which the first is not counted."""
    times.take = False
    with times:
        step()
    times.take = True
    start = time.perf_counter()
    with times:
        for i in range(most):
            step()
            if i >= 2 and time.perf_counter() - start > _SECONDS:
                break


def _kernel_s(device: torch.device) -> float:
    """The time of a kernel that has next to nothing to do."""
    x = torch.ones(16, device=device)
    found = []
    for _ in range(20):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(_KERNELS):
            x.mul_(1.0)
        wait_for(device)
        found.append((time.perf_counter() - start) / _KERNELS)
    return median(found)


def _speeds(operator_s: Any, operator_flops: Any, quick: bool) -> dict[str, Any]:
    """The numbers for what is not in the tables, from the tables."""
    rates = {}
    halves = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        points = operator_flops.get(f"aten::mm {str(dtype)[6:]}")
        if points:
            rates[dtype], half = two_constants(points)
            halves.append(half)
    attention = [r for n, p in operator_flops.items() if n.startswith("attention ") for _, r in p]
    nbytes, seconds = operator_s["aten::add float32"][-1]
    speeds: list[float] = []
    if _is_job() and not quick:
        own = measure_flops(int(os.environ.get("LOCAL_RANK", 0)))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        speeds = [round(each / max(every), 2) for each in every]
    return {
        "matmul_flops": rates,
        "matmul_efficiency": 1.0,
        "half_intensity": max(halves),
        "attention_flops": max(attention, default=max(rates.values())),
        "memory_bandwidth": nbytes / seconds,
        "memory_efficiency": 1.0,
        "speeds": speeds if speeds and min(speeds) < SLOW_PART else (),
    }


def _links(collective_s: Any) -> dict[str, Any]:
    """The bandwidth of rings, for groups that are not in the table."""
    found = {}
    for name, points in collective_s.items():
        kind, _, group = name.partition(" ")
        size, _, nodes = group.partition(" on ")
        if kind == "all_gather":
            nbytes, seconds = points[-1]
            moved = nbytes * (int(size) - 1) / int(size)
            found["network_bandwidth" if nodes else "node_bandwidth"] = moved / seconds
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    node = min(ranks_per_node(), dist.get_world_size()) if dist.is_initialized() else 1
    if device.type == "cpu":
        return {"memory_bytes": max(1, memory_bytes()[0]) / node, "ranks_per_node": node}
    told = torch.cuda.get_device_properties(device)
    return {
        "memory_bytes": told.total_memory,
        "multiprocessors": told.multi_processor_count,
        "ranks_per_node": node,
    }


class _Chain(nn.Module):
    """Many operators that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def _launch_s(device: torch.device, hardware: Hardware) -> float:
    """What the host needs for an operator of a module, beyond what the operator takes by itself.

    On a GPU, all that the host needs: the operator takes its own time.
    """
    model = _Chain()
    trace = trace_step(model, torch.randn(8, 8), [""], device_type=device.type)
    computes = [event for event in trace.events if isinstance(event, Compute)]
    number = sum(len(each.operations) for each in computes)
    known_s = sum(compute_s(each, hardware) for each in computes) if device.type == "cpu" else 0.0
    model.to(device)
    x = torch.randn(8, 8, device=device)
    found = []
    for _ in range(30):
        model.zero_grad()
        wait_for(device)
        start = time.perf_counter()
        model(x).backward()
        found.append(time.perf_counter() - start)
    return max(0.0, (median(found) - known_s) / number)


def _disk(folder: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second that this rank writes to the disk, and reads, while all do."""
    data = os.urandom(2**20) * (nbytes // 2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fsdp2-measure-") as file:
        _together()
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # or it would be read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        _together()
        start = time.perf_counter()
        file.seek(0)
        file.read()
        read_s = time.perf_counter() - start
    return nbytes / write_s, nbytes / read_s


def _agreed(hardware: Hardware) -> Hardware:
    """That of rank 0, on all."""
    if not _is_job():
        return hardware
    told = [hardware]
    dist.broadcast_object_list(told)
    return told[0]


# -- file ------------------------------------------------------------------------------------------


def to_dict(hardware: Hardware) -> dict[str, Any]:
    """What a file of hardware holds, ready for JSON."""
    told = {each.name: getattr(hardware, each.name) for each in fields(Hardware)}
    told["matmul_flops"] = {str(k)[6:]: v for k, v in hardware.matmul_flops.items()}
    return {
        **told,
        "speeds": list(hardware.speeds),
        "measured": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "fsdp2": __version__,
            "device": _device_name(hardware),
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "hosts": _num_hosts(),
            "threads": torch.get_num_threads(),
            "nccl": _nccl(hardware),
        },
    }


def _device_name(hardware: Hardware) -> str:
    if hardware.device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _nccl(hardware: Hardware) -> str:
    if hardware.device_type != "cuda" or not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _num_hosts() -> int:
    if not dist.is_initialized():
        return 1
    return -(-dist.get_world_size() // ranks_per_node())


def write_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a file that ``find_hardware``, and so ``plan(hardware=...)``, reads.

    Who reads it meanwhile sees the old file or the new one. One rank calls this.

    Raises:
        ValueError: if the name does not end in ".json": nobody would find it.
        OSError: if it cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"A file of hardware ends in .json, got {str(path)!r}")
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            json.dump(to_dict(hardware), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
