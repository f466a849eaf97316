"""Simulates a training step on given hardware: the launches of a replay, with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..estimation.account import Peak
from ..estimation.device import Copy, Launch, Transfer
from ..estimation.estimating import shard_optimizer_cost
from ..estimation.events import Compute, StepTrace
from ..estimation.optimizers import OptimizerCost
from ..estimation.replay import Replay, Setup, replay
from ..policy import CPUOffloadPolicy
from .costs import Cost, compute_s, copy_cost, transfer_cost
from .hardware import Hardware
from .schedule import Span, Task, schedule

STREAMS = ("compute", "all-gather", "reduce-scatter", "all-reduce")


@dataclass(frozen=True)
class SimulatedStep:
    """The predicted training step.

    Attributes:
        seconds: time of forward, backward and optimizer.
        compute_s: time of the model's kernels.
        optimizer_s: time of the optimizer.
        stream_s: how long each stream is busy.
        exposed_s: how long compute waits for communication.
        peak: the memory peak of live tensors.
        reserved: bytes that the allocator holds for them.
        libraries: bytes that CUDA, cuBLAS and NCCL hold besides.
        flops: FLOPs of the kernels, including recomputation.
        launches, spans: what runs when, for pictures.
        samples: (number of launches so far, bytes by category) at every change.
    """

    seconds: float
    compute_s: float
    optimizer_s: float
    stream_s: dict[str, float]
    exposed_s: float
    peak: Peak
    reserved: int
    libraries: int
    flops: int
    launches: Sequence[Launch]
    spans: Sequence[Span]
    samples: list[tuple[int, dict[str, int]]]

    @property
    def needed_bytes(self) -> int:
        """Memory that a GPU needs to run it."""
        return self.reserved + self.libraries

    @property
    def num_events(self) -> int:
        """Number of launches; does not depend on the number of ranks."""
        return len(self.launches)


class Simulator:
    """Simulates traced steps on one kind of hardware; caches the cost of kernels.

    Args:
        optimizer: as in `estimate`.
    """

    def __init__(self, hardware: Hardware, optimizer: object = "adamw") -> None:
        self.hardware = hardware
        self.optimizer = optimizer
        self._compute_s: dict[int, tuple[Compute, float]] = {}
        self._optimizer: dict[object, OptimizerCost] = {}

    def run(
        self,
        trace: StepTrace,
        setup: Setup,
        *,
        speed: float = 1.0,
        keep_samples: bool = False,
    ) -> SimulatedStep:
        """Simulate one step of ``trace``, sharded as in ``setup``, on rank 0, the fullest rank.

        Args:
            speed: of the rank's kernels, as in `Hardware.speeds`; links have theirs.
        """
        cost = self._cost_of_optimizer(trace, setup)
        made = replay(
            trace,
            setup,
            optimizer=cost,
            keep_samples=keep_samples,
            reserves=self.hardware.caches_memory,
        )
        spans = schedule(self._tasks(made, speed))
        offloaded = isinstance(setup.offload_policy, CPUOffloadPolicy)
        return self._summary(trace, made, spans, cost, offloaded, speed)

    def _tasks(self, made: Replay, speed: float) -> list[Task]:
        setup = made.setup
        topology = replace(setup.topology, ranks_per_node=self.hardware.ranks_per_node)
        secondary = [
            b.secondary.layout.num_shards for u in made.units for b in u.buckets if b.secondary
        ]
        rings = {
            group: topology.ring(group, secondary[0] if secondary else 1)
            for group in ("shard", "secondary", "replicate", "all", "within", "across")
        }
        tasks = []
        for launch in made.launches:
            work = launch.work
            if isinstance(work, Compute):
                cost = Cost(self._seconds(work) / speed)
            elif isinstance(work, Transfer):
                cost = transfer_cost(work, rings[work.group], self.hardware)
            else:
                assert isinstance(work, Copy)
                cost = copy_cost(work, self.hardware)
            tasks.append(Task(launch.stream, cost, launch.after))
        return tasks

    def _seconds(self, compute: Compute) -> float:
        known = self._compute_s.get(id(compute))
        if known is None:  # keep the object, so that its id is not reused
            known = self._compute_s[id(compute)] = (compute, compute_s(compute, self.hardware))
        return known[1]

    def _cost_of_optimizer(self, trace: StepTrace, setup: Setup) -> OptimizerCost:
        offloaded = isinstance(setup.offload_policy, CPUOffloadPolicy)
        key = (id(trace.params[0]), len(trace.params), setup.num_shards, offloaded)
        if key not in self._optimizer:
            self._optimizer[key] = shard_optimizer_cost(trace, setup, self.optimizer)
        return self._optimizer[key]

    def _summary(
        self,
        trace: StepTrace,
        made: Replay,
        spans: list[Span],
        cost: OptimizerCost,
        offloaded: bool,
        speed: float,
    ) -> SimulatedStep:
        hardware = self.hardware
        stream_s: dict[str, float] = {}
        for launch, span in zip(made.launches, spans, strict=True):
            busy = span.end - span.begin
            stream_s[launch.stream] = stream_s.get(launch.stream, 0.0) + busy
        bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
        optimizer_s = cost.traffic / (hardware.host_bandwidth if offloaded else bandwidth) / speed
        end = max((span.end for span in spans), default=0.0)
        compute = stream_s.get("compute", 0.0)
        reserved = made.account.reserved
        return SimulatedStep(
            seconds=end + optimizer_s,
            compute_s=compute,
            optimizer_s=optimizer_s,
            stream_s=stream_s,
            exposed_s=end - compute,
            peak=made.account.peak,
            reserved=made.account.peak.total if reserved is None else reserved,
            libraries=hardware.library_bytes(len({t.group for t in made.transfers})),
            flops=trace.flops * made.setup.micro_batches,
            launches=made.launches,
            spans=spans,
            samples=made.account.samples or [],
        )
