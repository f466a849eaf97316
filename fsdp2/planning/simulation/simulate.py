"""A step with times: kernels, collectives and the optimizer on one kind of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...common.garbage import one_collection
from ...policy import CPUOffloadPolicy
from ..hardware.hardware import HOST, OPTIMIZER, Hardware
from ..replay.device import Collective, Copy, StreamLaunch
from ..replay.pipeline import Action, RankStage, replay_rank
from ..replay.replay import Replay, params_on_host, placed_optimizer, replay
from ..replay.setups import Setup
from ..trace.account import Peak
from ..trace.events import Compute, StepTrace
from ..trace.optimizers import OptimizerCost, PagedState, PlacedOptimizer, sum_of_placed
from .costs import Cost, compute_s, copy_cost, in_step_s, measured_s, stragglers_s, transfer_cost
from .schedule import Span, Task, schedule


def optimizer_s(optimizer: PlacedOptimizer, hardware: Hardware, speed: float = 1.0) -> float:
    """Seconds of an optimizer step.

    Args:
        speed: speed of the rank's kernels, as in `Hardware.speeds`.

    Raises:
        ValueError: if state is in files, and the hardware has no speed of the disk.
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
    """Seconds of the parts of `offload_optimizer`. Copies on one stream, and reads and writes of
    files by one thread each, run in parallel to the steps of other parts."""
    read, write = hardware.disk_read_bandwidth, hardware.disk_write_bandwidth
    if paged.in_files and not (read and write):
        raise ValueError(
            f"Hardware '{hardware.name}' does not say how fast its disk is, but optimizer state "
            "is in files: give disk_read_bandwidth and disk_write_bandwidth"
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
            if paged.in_files:  # there are at most four buffers
                add("read", number, "reads", part.away / read, ("write", number - 4))
            add("bring", number, "copies", copied[number] / link, ("read", number))

    bring(0)
    for number, part in enumerate(paged.parts):
        bring(number + 1)
        # The host begins a step after it has waited for the copy of the next part.
        waits = (("bring", number), ("read", number + 1))
        add("step", number, "compute", step_s * part.traffic / traffic, *waits)
        add("send", number, "copies", copied[number] / link, ("step", number))
        if paged.in_files:
            add("write", number, "writes", part.away / write, ("send", number))
    return max(span.end for span in schedule(tasks))


STREAMS = (
    *("compute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all"),
    *("tensor parallel", "context parallel"),
)
_GROUPS = (
    *("shard", "secondary", "replicate", "all", "within", "across"),
    *("experts", "expert shard", "tensor", "context"),
)


@dataclass(frozen=True)
class SimulatedStep:
    """The predicted training step.

    Attributes:
        seconds: duration of forward, backward and optimizer.
        compute_s: seconds of the model's kernels, including ``contention_s``.
        contention_s: seconds that kernels lose to concurrent collectives.
        stragglers_s: seconds that the mean rank waits for the slowest; part of ``exposed_s``.
        host_s: seconds that the host needs for all launches. If this is more than ``compute_s``,
            compute waits for the host in ``exposed_s``.
        optimizer_s: seconds of the optimizer.
        stream_s: seconds that each stream is busy. If the host does everything in order, seconds of
            the work that a GPU would have on that stream.
        exposed_s: seconds that compute waits for communication.
        bubble_s: seconds that a rank of a pipeline waits for other stages; part of ``exposed_s``.
        peak: the memory peak of live tensors.
        reserved: bytes that the allocator holds for them.
        libraries: bytes that CUDA, cuBLAS and NCCL hold.
        flops: FLOPs of the kernels, including recomputation.
        launches, spans: the work and its times, for pictures.
        samples: (number of launches so far, bytes by category) at every change.
        host_bytes: offloaded bytes, by category.
    """

    seconds: float
    compute_s: float
    contention_s: float
    stragglers_s: float
    host_s: float
    optimizer_s: float
    stream_s: dict[str, float]
    exposed_s: float
    peak: Peak
    reserved: int
    libraries: int
    flops: int
    launches: Sequence[StreamLaunch]
    spans: Sequence[Span]
    samples: list[tuple[int, dict[str, int]]]
    host_bytes: dict[str, int] = field(default_factory=dict)
    bubble_s: float = 0.0

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
        self._optimizer: dict[object, PlacedOptimizer] = {}
        self._of_shards: dict[object, OptimizerCost] = {}

    def on(self, hardware: Hardware) -> Simulator:
        """The simulator for other hardware; it shares the cached costs of optimizers."""
        made = Simulator(hardware, self.optimizer)
        made._optimizer, made._of_shards = self._optimizer, self._of_shards
        return made

    def run(
        self, trace: StepTrace, setup: Setup, *, speed: float = 1.0, keep_samples: bool = False
    ) -> SimulatedStep:
        """Simulate one step of ``trace``, sharded as in ``setup``, on rank 0, the fullest rank.

        Args:
            speed: speed of the rank's kernels, as in `Hardware.speeds`; links keep theirs.
        """
        with one_collection():
            made = self.replay_step(trace, setup, keep_samples=keep_samples)
            return self.time_stages(made, speed=speed)

    def replay_step(self, trace: StepTrace, setup: Setup, *, keep_samples: bool = False) -> Replay:
        """The replay to which `run` adds times."""
        with one_collection():
            setup = self._on_hardware(setup)
            cost = self._cost_of_optimizer(trace, setup)
            options = self._replay_options
            return replay(trace, setup, optimizer=cost, keep_samples=keep_samples, **options)

    def replay_stages(
        self, parts: Sequence[RankStage], actions: Sequence[Action], **options: bool
    ) -> Replay:
        """The replay of one rank of a pipeline, without waits for other ranks and without times.

        Args:
            options: of `replay_rank`.
        """
        with one_collection():
            parts = [part._replace(setup=self._on_hardware(part.setup)) for part in parts]
            cost = sum_of_placed([self._cost_of_optimizer(p.trace, p.setup) for p in parts])
            options |= self._replay_options
            return replay_rank(parts, actions, optimizer=cost, **options)

    def time_stages(self, made: Replay, *, speed: float = 1.0) -> SimulatedStep:
        """The simulated step of a replay, with the times of this hardware."""
        with one_collection():
            costs, host = self._costs(made, speed), self._host_costs(made)
            spans = schedule(_tasks(made, costs, host))[len(host) :]
            of_kernels = zip(costs, made.launches, strict=True)
            kernels_s = sum(each.fixed_s for each, it in of_kernels if it.lane == "compute")
            host_s = sum(each.fixed_s for each in host)
            return self._summary(made, spans, speed, kernels_s, host_s)

    def send_s(self, nbytes: int, setup: Setup) -> float:
        """The time in which a stage sends ``nbytes`` to the next."""
        ring = self._on_hardware(setup).topology.ring("pipeline")
        work = Collective("send", "pipeline", nbytes, nbytes, 1, "")
        return transfer_cost(work, ring, self.hardware).total_s

    def _on_hardware(self, setup: Setup) -> Setup:
        hardware = self.hardware
        kind = hardware.device_type if hardware.host_ordered else setup.device_type
        return replace(setup, device_type=kind, ranks_per_node=hardware.ranks_per_node)

    @property
    def _replay_options(self) -> dict[str, bool]:
        return {"reserves": self.hardware.caches_memory, "in_order": self.hardware.host_ordered}

    def _host_costs(self, made: Replay) -> list[Cost]:
        """The host's time for each launch; empty if it takes no time."""
        hardware = self.hardware
        if hardware.host_ordered or (not hardware.launch_s and not hardware.call_host_s):
            return []
        factor = hardware.step_factor(HOST)
        return [
            Cost(
                factor * hardware.launch_s * len(launch.work.operations)
                if isinstance(launch.work, Compute)
                else factor * hardware.call_host_s
            )
            for launch in made.launches
        ]

    def _costs(self, made: Replay, speed: float) -> list[Cost]:
        setup = made.setup
        topology = replace(setup.topology, ranks_per_node=self.hardware.ranks_per_node)
        rings = {group: topology.ring(group, made.num_secondary) for group in _GROUPS}
        costs = []
        slowed_by = self.hardware.taken_by_collectives
        for launch in made.launches:
            work = launch.work
            if isinstance(work, Compute):
                cost = Cost(self._seconds(work) / speed, slowed_by=slowed_by)
            elif isinstance(work, Collective):
                cost = transfer_cost(work, rings[work.group], self.hardware)
                if self.hardware.host_ordered:
                    left = 1 - self.hardware.overlap
                    cost = replace(cost, shared_s=left * cost.shared_s)
            else:
                assert isinstance(work, Copy)
                cost = copy_cost(work, self.hardware)
            costs.append(cost)
        return costs

    def _seconds(self, compute: Compute) -> float:
        known = self._compute_s.get(id(compute))
        if known is None:  # keep the object, so that its id is not reused
            seconds = compute_s(compute, self.hardware)
            if self.hardware.host_ordered:  # nothing hides the time of the host
                factor = self.hardware.step_factor(HOST)
                seconds += factor * self.hardware.launch_s * len(compute.operations)
                seconds += factor * self.hardware.recompute_s * compute.num_recomputed
            known = self._compute_s[id(compute)] = (compute, seconds)
        return known[1]

    def _cost_of_optimizer(self, trace: StepTrace, setup: Setup) -> PlacedOptimizer:
        key = (
            (id(trace.params[0]), len(trace.params)),
            (setup.num_shards, setup.num_expert_shards, setup.sharding.replicate_below),
            setup.workload.offload_optimizer,
            isinstance(setup.sharding.offload_policy, CPUOffloadPolicy)
            and params_on_host(trace, setup),
        )
        if key not in self._optimizer:
            self._optimizer[key] = placed_optimizer(trace, setup, self.optimizer, self._of_shards)
        return self._optimizer[key]

    def _summary(
        self, made: Replay, spans: list[Span], speed: float, kernels_s: float, host_s: float
    ) -> SimulatedStep:
        hardware = self.hardware
        stream_s: dict[str, float] = {}
        for launch, span in zip(made.launches, spans, strict=True):
            busy = span.end - span.begin
            stream_s[launch.lane] = stream_s.get(launch.lane, 0.0) + busy
        step_s = optimizer_s(made.optimizer, hardware, speed)
        end = max((span.end for span in spans), default=0.0)
        compute = stream_s.get("compute", 0.0)
        reserved = made.account.reserved
        setup = made.setup
        waiting_s = stragglers_s(kernels_s, setup.num_all_ranks, hardware)
        groups = {transfer.group for transfer in made.transfers}
        if setup.workload.pipeline_ranks > 1:
            groups.add("pipeline")  # what stages send is in no replay of one rank
        return SimulatedStep(
            seconds=end + waiting_s + step_s,
            compute_s=compute,
            contention_s=max(0.0, compute - kernels_s),
            stragglers_s=waiting_s,
            host_s=host_s,
            optimizer_s=step_s,
            stream_s=stream_s,
            exposed_s=end - compute + waiting_s,
            peak=made.account.peak,
            reserved=made.account.peak.total if reserved is None else reserved,
            libraries=hardware.library_bytes(len(groups)),
            flops=made.flops,
            launches=made.launches,
            spans=spans,
            samples=made.account.samples or [],
            host_bytes={name: n for name, n in made.account.host.items() if n},
        )


def _tasks(made: Replay, costs: Sequence[Cost], host: Sequence[Cost]) -> list[Task]:
    """The tasks on the host (``host``: one per launch, or none), then the tasks on the streams.

    A kernel begins after the host has launched the kernels before it; the first of several begins
    when the host begins to launch them. A collective begins after the host has called it.
    """
    tasks = [Task("host", cost) for cost in host]
    first = len(tasks)
    for i, (launch, cost) in enumerate(zip(made.launches, costs, strict=True)):
        after = tuple(first + other for other in launch.after)
        if host:
            launched = i - 1 if isinstance(launch.work, Compute) else i
            after += (launched,) if launched >= 0 else ()
        tasks.append(Task(launch.stream, cost, after))
    return tasks
