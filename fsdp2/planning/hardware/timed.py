"""Times every operator that runs inside a context, and makes tables of the times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ..trace.events import Operation
from ..trace.op_costs import cost_of, has_no_kernel
from .curves import Points, curve, rising

# On a GPU, a kernel is shorter than its launch, so several are timed together.
_REPEATS = 10


@dataclass(frozen=True)
class Timed:
    """One kind of call.

    Attributes:
        seconds: the median of its calls.
    """

    operation: Operation
    seconds: float


class OperatorTimes(TorchDispatchMode):
    """Times the operators that run inside the context, and counts their bytes as a trace does.

    Args:
        device: the device of the operators.
        overhead_s: this mode's own part of each operator's time, which is subtracted.
        most_stretch: threads of the ranks on this host per core. A larger stretch is due to other
            programs, which may not run during training.

    Attributes:
        take: whether to keep the times.
        total_s: sum of all kept times.
        number: number of kept operators.
        clock: on the CPU, the CPU time of this thread. It does not advance while an operator is
            interrupted, because there are more ranks than cores.
        stretch: factor by which interruptions by other ranks lengthen all operators.
    """

    def __init__(
        self, device: torch.device, overhead_s: float = 0.0, most_stretch: float = 1.0
    ) -> None:
        super().__init__()
        self.device = device
        self.overhead_s = overhead_s
        self.most_stretch = max(1.0, most_stretch)
        self.take = True
        self.total_s, self.number = 0.0, 0
        self.clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self._stretches: list[float] = []
        self._seconds: dict[Operation, list[float]] = defaultdict(list)
        self._free: dict[Any, bool] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._free:
            self._free[func] = has_no_kernel(func)
        if self._free[func] or not self.take:
            return func(*args, **kwargs)
        if self.device.type == "cpu":
            start = time.thread_time()
            result = func(*args, **kwargs)
            seconds = time.thread_time() - start
        else:
            seconds, result = self._on_device(lambda: func(*args, **kwargs))
        cost = cost_of(func, args, kwargs, result)
        if cost is not None:
            seconds = max(seconds - self.overhead_s, seconds / 4)
            self._seconds[cost.operation].append(seconds)
            self.total_s += seconds
            self.number += 1
        return result

    def _on_device(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a call, from events before and after several calls on a busy stream.

        In-place operators run several times; the values do not matter.
        """
        module = torch.get_device_module(self.device)
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        result = call()
        begin.record()
        for _ in range(_REPEATS):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _REPEATS, result

    @contextmanager
    def stretching(self) -> Iterator[None]:
        """Context that measures the fraction of its time in which this thread computes."""
        wall, own = time.perf_counter(), self.clock()
        yield
        wall, own = time.perf_counter() - wall, self.clock() - own
        if own > 0:
            self._stretches.append(wall / own)

    @property
    def stretch(self) -> float:
        found = median(self._stretches) if self._stretches else 1.0
        return min(max(1.0, found), self.most_stretch)

    def found(self) -> list[Timed]:
        """The times so far."""
        by = self.stretch
        return [Timed(operation, by * median(each)) for operation, each in self._seconds.items()]


def tables(timed: list[Timed], kernel_s: float) -> tuple[dict[str, Points], dict[str, Points]]:
    """`Hardware.operator_s` and `Hardware.operator_flops`.

    Args:
        kernel_s: the fixed time of every kernel; subtracted for multiplications.
    """
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    flops: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in timed:
        operation = each.operation
        dtype = str(operation.dtype).removeprefix("torch.")
        name = f"{operation.operator} {dtype}"
        if not operation.nbytes:
            continue
        if not operation.flops:
            seconds[name].append((float(operation.nbytes), each.seconds))
            continue
        passed = max(each.seconds - kernel_s, each.seconds / 10)
        point = (operation.flops / operation.nbytes, operation.flops / passed)
        flops[name].append(point)
        if operation.attention:
            flops[f"attention {dtype}"].append(point)
    return (
        {name: rising(curve(points, per_octave=1)) for name, points in sorted(seconds.items())},
        {name: curve(points) for name, points in sorted(flops.items())},
    )


def two_constants(points: Points) -> tuple[float, float]:
    """FLOP/s of large multiplications, and the intensity at which half of that is reached.

    They are the constants in ``e * AI / (AI + c)``: ``e`` is the highest measured rate, and ``c``
    the median of the values for the points.

    Example:
        >>> two_constants(((1.0, 1e9), (9.0, 5e9), (1e6, 1e10)))
        (10000000000.0, 9.0)
    """
    most = max(rate for _, rate in points)
    halves = [ai * (most / rate - 1) for ai, rate in points if rate < most]
    return most, max(0.0, median(halves)) if halves else 0.0
