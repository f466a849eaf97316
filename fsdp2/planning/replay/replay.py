"""Replays a traced step through the library's own runtime, for any mesh and any policy.

As in a run, `runtime.Runtime` decides what is prefetched, what stays gathered and which reductions
may be in flight. Its units come from `stand_ins`, so the result is bytes and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ...api.shard_model import offload_beyond
from ...comm.mesh_transports import CommOptions
from ...comm.streams import DeviceStreams, Streams
from ...features.deferred_weight_grads import DeferredWeightGrads
from ...features.finalization import Finalization
from ...features.gather_budget import GatherBudget
from ...policy import CPUOffloadPolicy
from ...runtime.events import Registry
from ...runtime.runtime import Runtime
from ...runtime.schedule import Backward
from ...runtime.unit import Forward
from ...runtime.unit_config import UnitConfig
from ...sharding.mesh import DataParallelMesh
from ...wrap import UnitDescription
from ..trace import events
from ..trace.account import Account
from ..trace.allocator import Allocator, Block
from ..trace.optimizers import (
    NOTHING,
    OptimizerCost,
    PlacedOptimizer,
    optimizer_cost,
    paged_state,
    param_costs,
)
from .device import Collective, LaunchDevice, ReplayState, StreamLaunch
from .schedules import Action
from .setups import Setup, shard_shape
from .stand_ins import CountedBucket, CountedEarlyFree, CountedReshardToGroups, CountedUnit


@dataclass
class Replay:
    """The result of replaying a step on one rank.

    Attributes:
        account: bytes; its phases are "forward", "backward" and "optimizer".
        transfers: the collectives of a step, in order.
        launches: the work on each stream; empty on host-ordered devices unless requested.
        units: the units, with their layouts.
        optimizer: the optimizer of all stages of the rank.
        flops: FLOPs of the step.
        actions: the computing actions of a rank of a pipeline.
        starts, ends: the numbers of launches after which each action starts and ends.
    """

    setup: Setup
    account: Account
    transfers: list[Collective]
    launches: list[StreamLaunch]
    units: list[CountedUnit]
    optimizer: PlacedOptimizer
    flops: int
    actions: Sequence[Action] = ()
    starts: Sequence[int] = ()
    ends: Sequence[int] = ()

    @property
    def num_secondary(self) -> int:
        """Ranks that share the larger shards of ``reshard_after_forward=int``; 1 without them."""
        gathered = (bucket.gathered for unit in self.units for bucket in unit.buckets)
        sources = (each.secondary for each in gathered if each is not None)
        return next((each.layout.num_shards for each in sources if each is not None), 1)


def replay(
    trace: events.StepTrace,
    setup: Setup,
    *,
    optimizer: PlacedOptimizer = NOTHING,
    warm_up: bool = True,
    **options: bool,
) -> Replay:
    """Run a step of ``trace``, sharded as in ``setup``.

    Args:
        optimizer: the optimizer of this rank.
        warm_up: run a step first, from which the runtime learns the order of units.
        options: of `new_state`.
    """
    replay = new_state(setup, **options)
    player = Player(trace, setup, replay)
    return play([player], player.step, optimizer, warm_up=warm_up)


def new_state(
    setup: Setup, *, keep_samples: bool = False, reserves: bool = True, in_order: bool = False
) -> ReplayState:
    """The state of a replay that has not begun.

    Args:
        keep_samples: record the bytes at every change.
        reserves: count the memory that torch's allocator reserves, except on the CPU.
        in_order: record launches on the CPU, too, all on one stream in host order.
    """
    ordered = setup.device_type == "cpu"
    device = LaunchDevice() if in_order or not ordered else None
    memory = Allocator() if reserves and not ordered else None
    account = Account(keep_samples=keep_samples, memory=memory)
    if device is not None:
        account.stream = lambda: device.current_stream().name
    return ReplayState(account, device, setup.topology)


def play(
    players: Sequence[Player],
    step: Callable[[], None],
    optimizer: PlacedOptimizer,
    *,
    warm_up: bool = True,
    micro_batches: int = 1,
) -> Replay:
    """Run ``step``, a step of models on one rank; arguments as in `replay`.

    Args:
        players: the players of these models, with the same state.
        micro_batches: number of micro-batches whose inputs are in memory at the same time.
    """
    setup, replay = players[0].setup, players[0].replay
    account, device = replay.account, replay.device
    units = [unit for player in players for unit in player.units]
    ordered = setup.device_type == "cpu"
    offloaded = isinstance(setup.sharding.offload_policy, CPUOffloadPolicy) and not ordered
    buckets = [bucket for unit in units for bucket in _buckets(unit)]
    on_host = [b for b in buckets if b.shard_device != b.device]
    on_device = [b for b in buckets if b.shard_device == b.device]
    if offloaded:
        account.host["parameters"] = sum(bucket.shard_bytes for bucket in on_host)
    if on_device or not offloaded:
        account.now["parameters"] = sum(bucket.shard_bytes for bucket in on_device)
        account.now["optimizer state"] = sum(optimizer.device_tensors)
    optimizer.count_away(account, offloaded=offloaded)
    if host_bytes := sum(player.trace.host_bytes for player in players):
        account.host["activations"] = host_bytes
    account.now["buffers"] = sum(player.trace.buffer_bytes for player in players)
    account.now["inputs"] = micro_batches * sum(player.trace.input_bytes for player in players)
    account.total = sum(account.now.values())
    for name in ("buffers", "inputs"):
        account.allocate(account.now[name])
    for bucket in on_device:
        account.allocate(bucket.shard_bytes)
    if warm_up:
        step()
        optimizer.make_state(account)  # now, in the memory that the first step has freed
        for player in players:
            player.drop_gradients()
        replay.transfers.clear()
        if device is not None:
            _start_anew(device)
    # Tensors that a step leaves behind (caches of functions) must not count twice.
    account.add("activations", -account.now.get("activations", 0))
    account.clock = 0
    account.phase = "forward"
    account.forget_peaks()
    step()
    account.phase = "optimizer"
    optimizer.step(account, ordered=ordered)
    launches = device.launches if device is not None else []
    flops = sum(each.trace.flops * each.setup.workload.micro_batches for each in players)
    return Replay(setup, account, replay.transfers, launches, units, optimizer, flops)


def _start_anew(device: LaunchDevice) -> None:
    device.launches.clear()
    for stream in device.streams:
        stream.last = None
        stream.waits.clear()


def _buckets(unit: CountedUnit) -> list[CountedBucket]:
    return [bucket for bucket in unit.buckets if isinstance(bucket, CountedBucket)]


def _mesh(group: str, rank: int, num_shards: int, num_replicas: int = 1) -> DataParallelMesh:
    """A mesh without processes, whose groups are names."""
    shard: Any = group if num_shards > 1 else None
    replicate: Any = "replicate" if num_replicas > 1 else None
    mesh: Any = None
    return DataParallelMesh(mesh, shard, rank, num_shards, replicate, num_replicas=num_replicas)


def make_units(trace: events.StepTrace, setup: Setup, replay: ReplayState) -> list[CountedUnit]:
    """The units of ``setup``, the root first, planned as `build_runtime` plans real ones."""
    device = torch.device(setup.device_type)
    mesh = _mesh("shard", setup.rank, setup.num_shards, setup.num_replicas)
    expert_mesh = _mesh("expert shard", setup.expert_shard_rank, setup.num_expert_shards)
    sharding = setup.sharding
    policy = offload_beyond(sharding.offload_policy, sharding.max_device_bytes)
    made = {}
    descriptions = sorted(setup.units, key=lambda unit: not unit.is_root)
    for description in setup.units:  # the order in which `shard_model` makes them
        choose = setup.reshard_after_forward
        own = [trace.params[i] for i in trace.indices(description.params)]
        experts = bool(own) and all(param.num_experts is not None for param in own)
        unit = made[description.name] = CountedUnit(
            replay,
            description.name,
            len(description.modules),
            expert_mesh if experts else mesh,
            device,
            UnitConfig(
                sharding.mp_policy,
                policy,
                direct_min_bytes=sharding.direct_min_bytes,
                reshard_after_forward=None if choose is None else choose(description),
                gathered_once=setup.gathered_once,
                comm_options=CommOptions(policy=sharding.comm_policy),
                max_gathered_bytes=sharding.max_gathered_bytes if description.is_root else None,
                # As in `shard_model`: the backward of an embedding reads only the indices.
                unshard_in_backward=not trace.embeddings.issuperset(description.modules),
            ),
        )
        unit.take(own, setup)
    units = [made[description.name] for description in descriptions]
    _nest(units, descriptions)
    for unit, described in zip(units, descriptions, strict=True):
        unit.choose_reshard(is_root=described.is_root)
    for unit in units:
        unit.materialize(Streams())
    _set_prefetch(units[1:], descriptions[1:], trace, sharding.prefetch)
    return units


def params_on_host(trace: events.StepTrace, setup: Setup) -> frozenset[str]:
    """Names of the parameters whose shards are in host memory although there is a device."""
    offloads = isinstance(setup.sharding.offload_policy, CPUOffloadPolicy)
    if not offloads or setup.device_type == "cpu":
        return frozenset()
    if setup.sharding.max_device_bytes is None:
        return frozenset(param.name for param in trace.params)
    units = make_units(trace, setup, ReplayState(Account(), None, setup.topology))
    return frozenset(
        param.fqn
        for unit in units
        for bucket in unit.buckets
        if bucket.shard_device != bucket.device
        for param in bucket.params
    )


def placed_optimizer(
    trace: events.StepTrace,
    setup: Setup,
    optimizer: Any,
    known: dict[Any, OptimizerCost] | None = None,
) -> PlacedOptimizer:
    """The cost of the optimizer for this rank's shards, on device or host; ``known`` as in
    `optimizer_cost`."""
    trained = trace.trained  # an optimizer skips parameters without a gradient
    on_host = params_on_host(trace, setup)
    shards: dict[bool, list[Any]] = {False: [], True: []}
    for param in trace.params:
        if param.name in trained:
            shards[param.name in on_host].append((shard_shape(param, setup), param.dtype))
    # (On the CPU all is counted as the device's.)
    device = optimizer_cost(shards[False], optimizer, setup.device_type, known)
    host = optimizer_cost(shards[True], optimizer, "cpu")
    paged = None
    if (offload := setup.workload.offload_optimizer) is not None:
        costs = {
            here: iter(param_costs(shards[here], optimizer, "cpu" if here else setup.device_type))
            for here in shards
        }
        params = [
            replace(next(costs[p.name in on_host]), on_host=p.name in on_host)
            for p in trace.params
            if p.name in trained
        ]
        paged = paged_state(params, offload, is_cpu=setup.device_type == "cpu")
    return PlacedOptimizer(device, host, paged)


def _nest(units: Sequence[CountedUnit], descriptions: Sequence[UnitDescription]) -> None:
    """Mark the units that are inside others; the root is the first one."""
    root, unit_of = units[0], {}
    for unit, described in zip(units[1:], descriptions[1:], strict=True):
        unit_of.update(dict.fromkeys(described.modules, unit))
    for unit, described in zip(units[1:], descriptions[1:], strict=True):
        parts = described.modules[0].split(".")
        outer = {unit_of.get(".".join(parts[:n])) for n in range(1, len(parts))} - {None, unit}
        unit.enclosing = (root, *(u for u in units[1:] if u in outer)) if outer else (root,)
        for each in unit.enclosing:
            each.encloses = True


def _set_prefetch(
    units: Sequence[CountedUnit],
    descriptions: Sequence[UnitDescription],
    trace: events.StepTrace,
    depth: int,
) -> None:
    """Prefetch more than one unit ahead in module order, as `shard_model` does."""
    if depth < 2:
        return
    place = {name: i for i, name in enumerate(trace.module_order)}
    order = sorted(range(len(units)), key=lambda i: place[descriptions[i].modules[0]])
    ordered = [units[i] for i in order]
    for i, unit in enumerate(ordered):
        unit.forward_prefetch = [*ordered[i + 1 : i + 1 + depth]]
        unit.backward_prefetch = [*ordered[max(0, i - depth) : i][::-1]]


class _ReplayRuntime(Runtime):
    """The runtime, driven without autograd."""

    registry = Registry(
        *(CountedReshardToGroups, CountedEarlyFree, DeferredWeightGrads, Finalization, GatherBudget)
    )

    @override
    def begin_backward(self) -> None:
        if not self.in_backward:
            self.backward = Backward(self.streams.compute, number=self.backward.number + 1)
        self.in_backward = True
        self.schedule.root = None

    @override
    def pre_forward(self, unit: Any, module: nn.Module | None = None) -> None:
        if self.in_backward:  # recomputation
            unit.unshard(self.streams)
            unit.step.recomputed = True
            if not unit.step.backward_began and not unit.has_graph:  # a reentrant checkpoint
                unit.recomputes_all = True
            return
        super().pre_forward(unit)


class Player:
    """Feeds the events of a trace to a runtime.

    Args:
        streams: streams of other players on the same rank; None: new ones.
    """

    def __init__(
        self,
        trace: events.StepTrace,
        setup: Setup,
        replay: ReplayState,
        streams: Streams | None = None,
    ) -> None:
        self.trace = trace
        self.setup = setup
        self.replay = replay
        self.units = make_units(trace, setup, replay)
        device = self.units[0].device
        if streams is None:
            streams = Streams() if device.type == "cpu" else DeviceStreams(device, replay.device)
        self.streams = self.units[0].config.shared_streams = streams
        self.runtime = _ReplayRuntime(self.units[0], self.units, device)
        by_name = {unit.name: unit for unit in self.units}
        self._of_module: dict[int, CountedUnit] = {}
        self._of_param: dict[int, tuple[CountedUnit, Any]] = {}
        self._open: list[tuple[CountedUnit, bool]] = []  # entered, by depth; whether in backward
        self._blocks: dict[int, Block | None] = {}  # of the trace's storages
        for description in setup.units:
            unit = by_name[description.name]
            unit.runtime = self.runtime
            unit.config.set_accumulate_sharded(setup.workload.accumulation == "sharded")
            for name in description.modules:
                self._of_module[trace.modules.index(name)] = unit
            for i, param in zip(trace.indices(description.params), unit.params, strict=True):
                self._of_param[i] = (unit, param)

    def step(self) -> None:
        """Run all micro-batches of one step."""
        workload = self.setup.workload
        for i in range(workload.micro_batches):
            last = i == workload.micro_batches - 1
            if workload.accumulation != "every":
                for unit in self.units:  # as `FSDPModule.set_requires_gradient_sync` does
                    unit.config.set_sync(last)
            self._micro_batch()

    def drop_gradients(self) -> None:
        """Drop gradients, as ``optimizer.zero_grad`` does."""
        for unit in self.units:
            for param in unit.params:
                param.sharded.grad = None
        self.runtime.release_gradients()

    def _micro_batch(self) -> None:
        self._play(self.trace.events)
        self.runtime.end_backward()

    def _play(self, played: Sequence[events.Event]) -> None:
        self._enter_phase("forward")
        self._open.clear()
        self.replay.inside = ""
        for event in played:
            if isinstance(event, events.Compute):
                self._compute(event)
            elif isinstance(event, events.Call):
                self._call(event)
            elif isinstance(event, events.Gradient):
                self._gradient(event)
            elif isinstance(event, events.ModelExchange):
                self._exchange(event)
            elif isinstance(event, events.ExchangeEnd):
                self.replay.end_exchange(event)
            elif isinstance(event, events.HostCopy | events.CopyEnd):
                self.replay.host_copy(event)
            else:
                assert isinstance(event, events.StartOfBackward)
                self._enter_phase("backward")

    def _enter_phase(self, name: str) -> None:
        self.replay.account.phase = name
        if self.replay.device is not None:
            self.replay.device.phase = name

    def _compute(self, event: events.Compute) -> None:
        account = self.replay.account
        if self.replay.device is not None and event.operations:
            self.replay.device.launch(event, self.replay.inside)
            account.clock = len(self.replay.device.launches)
        account.touch("activations", event.peak, allocates=False)
        if event.memory and account.memory is not None:
            # Without the account's methods, because most calls of a plan would be these.
            allocate, free, stream = account.memory.allocate, account.memory.free, account.stream()
            blocks = self._blocks
            for number, nbytes in event.memory:
                if number in blocks:  # freed; or a leftover of an earlier micro-batch, made again
                    free(blocks.pop(number))
                if nbytes:
                    blocks[number] = allocate(nbytes, stream)
        account.add("activations", event.net)

    def _exchange(self, event: events.ModelExchange) -> None:
        sent = event.nbytes * (event.ranks - 1) // event.ranks
        if event.kind == "all_reduce":
            sent *= 2
        elif event.kind == "send":
            sent = event.nbytes
        work = Collective(event.kind, event.group, event.nbytes, sent, 1, self.replay.inside)
        self.replay.exchange(work, event.number)

    def _call(self, event: events.Call) -> None:
        unit = self._of_module.get(event.module)
        if unit is None:
            return
        self._enter_or_leave(unit, event.kind)
        if event.kind is events.CallKind.ENTER:
            unit.watching = not event.flag
            self.runtime.pre_forward(unit)
        elif event.kind is events.CallKind.LEAVE:
            forward = self._ended(unit) if event.flag else None
            self.runtime.post_forward(unit, differentiable=event.flag, forward=forward)
        elif event.kind is events.CallKind.BACKWARD_ENTER:
            if not unit.step.backward_began:
                unit.num_accumulated = 0
            self.runtime.pre_backward(unit, self._reached(unit), accumulates=self._accumulates())
        else:
            self.runtime.post_backward(unit)

    def _accumulates(self) -> bool:
        """Whether backward makes gradients of parameters."""
        return True

    def _ended(self, unit: CountedUnit) -> Forward | None:
        """The forward that ends; None: backward reaches the last one first."""
        return None

    def _reached(self, unit: CountedUnit) -> Forward | None:
        """The forward that backward has reached; None: the last one."""
        return None

    def _enter_or_leave(self, unit: CountedUnit, kind: events.CallKind) -> None:
        """Keep track of the computing unit: the innermost one that was entered and not left.

        As in `profiling.events.exclusive`: backward may report a unit before its enclosing unit,
        and leaves a unit whose inputs need no gradient only at the end.
        """
        if kind in (events.CallKind.ENTER, events.CallKind.BACKWARD_ENTER):
            self._open.append((unit, kind is events.CallKind.BACKWARD_ENTER))
            self._open.sort(key=lambda each: len(each[0].enclosing))  # stable
        elif (entered := (unit, kind is events.CallKind.BACKWARD_LEAVE)) in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(entered)]
        self.replay.inside = self._open[-1][0].name if self._open else ""

    def _gradient(self, event: events.Gradient) -> None:
        if event.param not in self._of_param:
            return
        unit, param = self._of_param[event.param]
        account = self.replay.account
        # The same memory: it counted as an activation and is now a gradient.
        account.now["activations"] = account.now.get("activations", 0) - event.nbytes
        account.total -= event.nbytes
        block = self._blocks.pop(event.storage, None)
        unit.gradient(param, event.nbytes, event.dtype, block)
        unit.num_accumulated += 1
        if unit.watching and unit.num_accumulated >= unit.num_trained:
            self.runtime.reduce(unit)
