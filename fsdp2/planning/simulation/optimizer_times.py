"""The time of an optimizer's step: on the device, on the host, and with state that is elsewhere."""

from __future__ import annotations

from ..hardware.hardware import HOST, OPTIMIZER, Hardware
from ..trace.optimizers import OptimizerCost
from ..trace.paged_state import PagedState, PlacedOptimizer
from .costs import Cost, in_step_s, measured_s
from .schedule import Task, schedule


def optimizer_s(optimizer: PlacedOptimizer, hardware: Hardware, speed: float = 1.0) -> float:
    """Seconds of a step.

    Args:
        speed: of the rank's kernels, as in `Hardware.speeds`.

    Raises:
        ValueError: if state is in files, and the hardware does not say how fast its disk is.
    """
    step_s = (_on_device_s(optimizer.device, hardware) + _on_host_s(optimizer, hardware)) / speed
    paged = optimizer.paged
    return step_s if paged is None or not paged.away else _in_parts_s(paged, step_s, hardware)


def _on_device_s(cost: OptimizerCost, hardware: Hardware) -> float:
    measured = [measured_s(operation, hardware) for operation in cost.operations]
    if hardware.host_ordered and measured and None not in measured:
        launch_s = hardware.optimizer_launch_s or hardware.launch_s
        operators_s = sum(in_step_s(each or 0.0, OPTIMIZER, hardware) for each in measured)
        return operators_s + hardware.step_factor(HOST) * launch_s * len(measured)
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    return hardware.step_factor(OPTIMIZER) * cost.traffic / bandwidth


def _on_host_s(optimizer: PlacedOptimizer, hardware: Hardware) -> float:
    return optimizer.host.traffic / hardware.host_bandwidth


def _in_parts_s(paged: PagedState, step_s: float, hardware: Hardware) -> float:
    """Of the parts of `offload_optimizer`: copies on one stream, reads and writes of files by one
    thread each, beside the steps of other parts."""
    read, write = hardware.disk_read_bandwidth, hardware.disk_write_bandwidth
    if paged.in_files and not (read and write):
        raise ValueError(
            f"Hardware '{hardware.name}' does not say how fast its disk is, and state of the "
            "optimizer is to be in files: give disk_read_bandwidth and disk_write_bandwidth"
        )
    link = hardware.host_bandwidth
    copied = [0 if hardware.device_type == "cpu" else part.image for part in paged.parts]
    traffic = max(1, sum(part.traffic for part in paged.parts))
    tasks: list[Task] = []
    names: dict[tuple[str, int], int] = {}

    def add(name: str, number: int, stream: str, seconds: float, *after: tuple[str, int]) -> None:
        names[name, number] = len(tasks)
        known = tuple(names[each] for each in after if each in names)
        tasks.append(Task(stream, Cost(seconds), known))

    def bring(number: int) -> None:
        if number < len(copied):
            part = paged.parts[number]
            if paged.in_files:  # there are no more than four buffers
                add("read", number, "reads", part.away / read, ("write", number - 4))
            add("bring", number, "copies", copied[number] / link, ("read", number))

    bring(0)
    for number, part in enumerate(paged.parts):
        bring(number + 1)
        # The host begins a step when it has brought the next part, for which it waits.
        waits = (("bring", number), ("read", number + 1))
        add("step", number, "compute", step_s * part.traffic / traffic, *waits)
        add("send", number, "copies", copied[number] / link, ("step", number))
        if paged.in_files:
            add("write", number, "writes", part.away / write, ("send", number))
    return max(span.end for span in schedule(tasks))
