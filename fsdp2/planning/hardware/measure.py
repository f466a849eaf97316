"""`measure`: measures the speeds of this job's hardware, as a `Hardware` and as a file."""

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
from torch.distributed.device_mesh import init_device_mesh

from ...common.host import memory_bytes, num_cores
from ...common.versions import __version__
from ...doctor.speed import SLOW_PART, measure_flops
from ..trace.events import Operation
from .collective_times import collective_tables, ranks_per_node
from .curves import Points
from .hardware import PRESETS, Hardware
from .in_steps import launch_s, optimizer_launch_s, wait_for
from .meeting import failing_together, together
from .reference_steps import ReferenceStep, averaged, measured_steps, references_of, step_factors
from .timed import OperatorTimes, Timed, tables, two_constants
from .workloads import CPU, CUDA, QUICK, Step, workloads

_SECONDS = 0.02  # minimum for each workload
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
    """Measure this job's hardware. Call it on all ranks at the same time; it takes 1 to 2 minutes.

    It measures:

    - FLOP/s of multiplications, convolutions and attention by arithmetic intensity;
    - the time of other operators by bytes, and the host's time per operator;
    - gathers and reductions by size, over all ranks and over the dims of a mesh of nodes, and
      whether they overlap with compute;
    - the disk.

    All ranks compute at the same time, so they share cores, memory and links as in a training step.

    Args:
        quick: measure only a few small sizes, within seconds, for a trial.
        folder: a folder for checkpoints, whose disk is measured; None: no disk is measured.
        name: name of the result.
        progress: called with the current task.

    Returns:
        The hardware, the same on every rank.

    Raises:
        OSError: for a folder that cannot be written.
        RuntimeError: if another rank has failed; the message has its error. The default process
            group may then still wait for that rank.

    Example:
        >>> from fsdp2.planning import measure
        >>> ours = measure(quick=True)
        >>> ours.name, len(ours.operator_s) > 0
        ('measured', True)
    """
    with failing_together():
        return _measured(quick, folder, name, progress or (lambda what: None))


def _measured(
    quick: bool, folder: str | os.PathLike[str] | None, name: str, tell: Callable[[str], None]
) -> Hardware:
    device = _device()
    # First, because the state of memory is then as in a new training process.
    steps = _steps(device, quick, tell)
    tell("operators")
    kernel_s = _kernel_s(device)
    times = OperatorTimes(device, _overhead_s(device, kernel_s), _threads_per_core())
    timed = _operators(times, quick)
    tell("the host")
    host = _host(times)
    operator_s, operator_flops = tables(timed, kernel_s)
    sizes = [2**i for i in ((14, 22) if quick else (12, 15, 18, 21, 23, 25))]
    if not quick and device.type != "cpu":
        sizes.append(2**28)
    collective_s: dict[str, Points] = {}
    calls: dict[str, Any] = {}
    if _is_job():
        together()
        collective_s, calls = collective_tables(device.type, sizes, tell, quick=quick)
    tell("links and disk")
    on_host = device.type == "cpu"
    disk = _disk(Path(folder), 2**20 if quick else _DISK_BYTES) if folder is not None else (0, 0)
    if not quick:
        steps = averaged(steps, _steps(device, quick, tell))
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
        host_ordered=on_host,
        **calls,
        **host,
        **_links(collective_s),
        **_machine(device),
        disk_write_bandwidth=disk[0],
        disk_read_bandwidth=disk[1],
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        made = _with_factors(made, steps)
    return _agreed(made)


def _steps(device: torch.device, quick: bool, tell: Callable[[str], None]) -> list[ReferenceStep]:
    return measured_steps(references_of(device, quick=quick), device, tell, *([1] * quick))


def _with_factors(hardware: Hardware, steps: list[ReferenceStep]) -> Hardware:
    """Add the step factors; the source states how close predictions of steps then are."""
    made = replace(hardware, step_factors=step_factors(steps, hardware))
    errors = [abs(sum(step.predict(made)) / sum(step.seconds) - 1) for step in steps]
    told = f"median error {median(errors):.0%}, at most {max(errors):.0%}"
    return replace(made, source=f"fsdp2 measure; {len(steps)} steps of models: {told}")


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    torch.cuda.set_device(device)
    return device


def _is_job() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _operators(times: OperatorTimes, quick: bool) -> list[Timed]:
    """Times of the operators of all workloads: medians over ranks."""
    device = times.device
    sizes = QUICK if quick else (CPU if device.type == "cpu" else CUDA)
    for dtype in (torch.float32, torch.bfloat16):
        for step in workloads(sizes, device, dtype):
            together()
            _run(step, times, 2 if quick else _MOST_STEPS)
    found = times.found()
    if not _is_job():
        return found
    return medians(_of_all_ranks(found))


def _of_all_ranks(own: Any) -> list[Any]:
    """The values of all ranks."""
    together()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def medians(every: list[list[Timed]]) -> list[Timed]:
    """For each operation, the median over the ranks that have run it.

    Ranks with different devices may use different kernels.
    """
    seconds: dict[Operation, list[float]] = {}
    for each in chain.from_iterable(every):
        seconds.setdefault(each.operation, []).append(each.seconds)
    return [Timed(operation, median(times)) for operation, times in seconds.items()]


def _run(step: Step, times: OperatorTimes, most: int) -> None:
    """Run a few steps; the first one is not counted."""
    times.take = False
    with times:
        step()
    times.take = True
    start = time.perf_counter()
    with times, times.stretching():
        for i in range(most):
            step()
            if i >= 1 and time.perf_counter() - start > _SECONDS:
                break


def _kernel_s(device: torch.device) -> float:
    """The time of a kernel with almost no work."""
    clock = OperatorTimes(device).clock
    x = torch.ones(16, device=device)
    found = []
    for _ in range(20):
        wait_for(device)
        start = clock()
        for _ in range(_KERNELS):
            x.mul_(1.0)
        wait_for(device)
        found.append((clock() - start) / _KERNELS)
    return median(found)


def _overhead_s(device: torch.device, kernel_s: float) -> float:
    """The part of an operator's time that `OperatorTimes` itself takes."""
    x = torch.ones(16, device=device)
    times = OperatorTimes(device)
    with times:
        for _ in range(20 * _KERNELS):
            x.mul_(1.0)
    return max(0.0, times.found()[0].seconds - kernel_s) if device.type == "cpu" else 0.0


def _threads_per_core() -> float:
    """Threads of all ranks on this host, per core."""
    ranks = ranks_per_node() if dist.is_initialized() else 1
    return ranks * torch.get_num_threads() / num_cores()


def _host(times: OperatorTimes) -> dict[str, Any]:
    """Host seconds per operator of a model and of an optimizer."""
    launched_s, again_s = launch_s(times)
    found: dict[str, Any] = {"launch_s": launched_s}
    if times.device.type == "cpu":
        found["recompute_s"] = again_s
    if _is_job() and times.device.type == "cpu":
        together()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        found["optimizer_launch_s"] = optimizer_launch_s(times, mesh)
    return found


def _speeds(operator_s: Any, operator_flops: Any, quick: bool) -> dict[str, Any]:
    """The speeds for operators that are not in the tables, derived from the tables."""
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
        every = _of_all_ranks(measure_flops(int(os.environ.get("LOCAL_RANK", 0))))
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


def _disk(folder: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second that this rank writes to and reads from the disk, while all ranks do."""
    data = os.urandom(2**20) * (nbytes // 2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fsdp2-measure-") as file:
        together()
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # otherwise it would be read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        together()
        start = time.perf_counter()
        file.seek(0)
        file.read()
        read_s = time.perf_counter() - start
    return nbytes / write_s, nbytes / read_s


def _agreed(hardware: Hardware) -> Hardware:
    """The hardware of rank 0, on all ranks."""
    if not _is_job():
        return hardware
    together()
    told = [hardware]
    dist.broadcast_object_list(told)
    return told[0]


# -- file ------------------------------------------------------------------------------------------


def to_dict(hardware: Hardware) -> dict[str, Any]:
    """The contents of a hardware file, ready for JSON."""
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
    """Write a hardware file for ``find_hardware`` and ``Cluster(file, ...)``.

    Call it on one rank. It replaces an existing file atomically.

    Raises:
        ValueError: if the name does not end in ".json", which ``find_hardware`` requires.
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
