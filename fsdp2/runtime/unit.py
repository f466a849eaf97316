"""One communication unit: the parameters that are gathered and reduced together.

`states` defines its states. Which parameters are *registered* in the modules is independent of the
state: a unit may keep its gathered storage while users see the sharded parameters (after forward,
or in ``state_dict``). `param_group` has the contents of a unit, `unit_grads` its unreduced
gradients, and `unit_config` its settings.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.mesh_transports import MeshTransports
from ..comm.streams import Event, Streams
from ..comm.transports import Finish, Transport, done
from ..common.failures import reraise
from ..sharding.bucket import Bucket
from ..sharding.gathered import GatherBatch, GatheredStorage, GatherPlan
from ..sharding.mesh import DataParallelMesh
from ..sharding.param import ShardedParam, managed_as
from .param_group import ParamGroup
from .registration import Registration
from .states import GATHERED, RESHARDED, TRANSITIONS, State
from .unit_config import UnitConfig
from .unit_grads import UnitGrads

_KEY = "_fsdp2_unit"  # of a module's `__dict__`
# By original parameter. Sharding removes the original from the modules it reaches. So an entry
# survives only if another module still holds the original, that is, if the parameter is tied across
# units.
ORIGINS: MutableMapping[torch.Tensor, tuple[Unit, ShardedParam]] = WeakTensorKeyDictionary()


class GatherEvents:
    """The events of a unit's gathers: a part of `events.TreePart`."""

    def before_compute(self, unit: Unit) -> None:
        """A forward or a recomputation is next. Unlike all other events, this is called inside the
        torch modes and transforms of the caller."""

    def gather_requested(self, unit: Unit) -> None:
        """Before anything else of a gather."""

    def before_planning(self, unit: Unit) -> None:
        """Storages of ``unit`` are about to be made; this briefly takes their memory."""

    def planned(self, unit: Unit) -> None:
        """``unit`` has new storages or unsharded parameters, or other parameters are frozen now.
        When the tree is built, this is called for its root alone."""

    def before_gather(self, unit: Unit) -> None:
        """``unit`` is planned, and its gathered storage is about to get memory."""

    def gather_started(self, unit: Unit) -> None:
        """The all-gathers of ``unit`` are launched."""

    def before_wait(self, unit: Unit) -> None:
        """Compute is about to wait for them."""

    def gathered(self, unit: Unit) -> None:
        """Compute may use the gathered parameters."""

    def before_reshard(self, unit: Unit, to_secondary: bool) -> None:
        """The gathered parameters of ``unit``, if any, are about to be freed.

        Args:
            to_secondary: larger shards stay (`AfterForward.FREE_TO_SECONDARY`).
        """

    def resharded(self, unit: Unit) -> None:
        """``unit`` is not gathered, whether it was before or not; its modules may still hold
        unsharded parameters. The state may become `State.SECONDARY` next."""

    def first_gathered(self, unit: Unit) -> None:
        """The first gather into new storages was launched."""


class TreeRuntime(Protocol):
    """The parts of `runtime.Runtime` that a unit needs; `runtime` imports this file."""

    in_backward: bool
    units: list[Unit]

    @property
    def on(self) -> GatherEvents: ...

    def wait_unshard(self, unit: Unit) -> None: ...

    def before_zero_grad(self) -> None: ...

    def release_gradients(self) -> None: ...


class AccumulationHooks(Protocol):
    """The parts of `hooks.UnitHooks` that the runtime needs."""

    def notice_accumulation(self) -> None: ...

    def follow_state_dicts(self) -> None: ...


class Forward:
    """One forward of ``unit``.

    Attributes:
        previous: the forward that ended before this one in the same pass; its graph may be gone.
        noted: whether it has ended.
        entered: whether backward has reached it.
        outermost: the unit in whose forward this one ran, directly or not; None until it has ended.
        number: how many such forwards had begun.
        num_plans: of the parameters that it computed with: see `ParamGroup`.
    """

    __slots__ = (
        "__weakref__", "entered", "noted", "num_plans", "number", "outermost", "previous", "unit",
    )  # fmt: skip

    def __init__(self, unit: Unit, *, entered: bool = False) -> None:
        self.unit = unit
        self.entered = entered
        self.noted = False
        self.previous: Forward | None = None
        self.outermost: Unit | None = None
        self.number = 0
        self.num_plans = unit.param_group.num_plans

    def unit_before(self) -> Unit | None:
        """The unit that backward will reach after this one; None if that is not known."""
        # Backward need not follow the order of forwards. Where it has been already, a gather would
        # go unused.
        before = self.previous
        return None if before is None or before.entered else before.unit

    def is_inside(self, unit: Unit) -> bool:
        """Whether this forward ran inside one of ``unit``, which encloses this one's unit."""
        return self.outermost is unit or self.outermost in unit.enclosing

    def follows(self, unit: Unit) -> bool:
        """Whether ``unit`` ran before in this pass, and backward has not reached that forward."""
        before = self.previous
        while before is not None and (before.unit is not unit or before.entered):
            before = before.previous
        return before is not None


def is_awaited(ref: weakref.ref[Forward]) -> Forward | None:
    """The forward, if backward may still reach it."""
    forward = ref()
    return None if forward is None or forward.entered else forward


class Gather:
    """The gathers of a unit; the attributes describe the last one, which may be in flight.

    Attributes:
        num_plans: `ParamGroup.num_plans` of the storages that it filled.
        versions: `ParamGroup.versions` of the shards when it began. For a gather in backward, they
            count only if the unit stays gathered after it.
    """

    def __init__(self, param_group: ParamGroup, describe: Callable[[], str]) -> None:
        """
        Args:
            describe: returns a description of the gather, for errors.
        """
        self._param_group = param_group
        self._describe = describe
        self.num_plans = 0
        self.versions = (0, 0)
        self._finishes: list[Finish] = []
        self._event: Event = None
        self._is_needed = False  # whether something was not cached
        self._packed: list[GatheredStorage] = []  # with separate memory for their packs

    def launch(self, streams: Streams) -> None:
        """Allocate, and start the all-gathers of all buckets that are not cached."""
        indices, self._packed = [], []
        for index, bucket in enumerate(self._param_group.buckets):
            if not bucket.cache_valid:
                indices.append(index)
                if bucket.gathered is not None and bucket.gathered.has_own_pack:
                    self._packed.append(bucket.gathered)
        self._is_needed = bool(indices)
        if indices:
            if streams.stream_ordered:
                with streams.gathering():
                    self._issue(indices)
                    # The copies out of the packs are queued already, and memory that is freed on
                    # this stream goes to nothing that could overtake them.
                    for gathered in self._packed:
                        gathered.free_pack()
                    self._event = streams.gathered(self._event)
            else:
                self._issue(indices)

    def _issue(self, indices: Sequence[int]) -> None:
        """Start the all-gathers of the buckets with these indices: those over the same ranks in one
        call, where the transport can."""
        param_group = self._param_group
        to_gather: dict[Transport, list[tuple[GatherPlan, int]]] = {}
        group, is_prepared = param_group.mesh.shard_group, False
        try:
            for index in indices:
                transports = param_group.transports[index]
                group = transports.mesh.shard_group
                transport, plan = self._prepare(param_group.buckets[index], transports)
                if transport is not None:
                    assert plan is not None
                    tagged = (plan, param_group.gather_tags[index])
                    to_gather.setdefault(transport, []).append(tagged)
            is_prepared = True
            for transport, plans in to_gather.items():
                group = transport.group
                gathers: Sequence[tuple[GatherPlan | GatherBatch, int]] = plans
                if transport.coalesces and len(plans) > 1:
                    gathers = [(param_group.gather_batch([p for p, _ in plans]), plans[0][1])]
                for gather, tag in gathers:
                    finish = transport.all_gather(gather, tag)
                    if finish is not done:
                        self._finishes.append(finish)
        except BaseException as error:
            # Launched gathers still write into memory that the next gather reads, and would be
            # waited for in place of the next one.
            self.abandon()
            if not is_prepared:  # no memory; later, messages that nobody waits for may write there
                self._free(indices)
            if isinstance(error, RuntimeError):
                reraise(error, self._describe(), group)
            raise
        # The copies of offloaded shards are dropped now: their readers are enqueued, on the stream
        # that owns their memory.
        for index in indices:
            bucket = param_group.buckets[index]
            bucket.cache_valid = bucket.cached  # not where a launch raised: it has to be gathered
            if bucket.gathered is not None and bucket.gathered.offload_buffer is not None:
                bucket.gathered.free_offload_buffer()

    def _free(self, indices: Sequence[int]) -> None:
        """Free what `_prepare` has allocated for these buckets."""
        for bucket in (self._param_group.buckets[index] for index in indices):
            bucket.free()
            if bucket.gathered is not None:
                bucket.gathered.free_offload_buffer()

    def _prepare(
        self, bucket: Bucket, transports: MeshTransports
    ) -> tuple[Transport | None, GatherPlan | None]:
        """Allocate for the gather of a bucket and fill what it reads.

        Returns:
            The transport and the plan of the gather; None twice if there is nothing to gather.
        """
        gathered = bucket.gathered
        if gathered is None or not bucket.layout.gathered_numel:
            return None, None
        if transports.allocating is None:
            gathered.allocate()
        else:
            with transports.allocating():
                gathered.allocate()
        secondary = gathered.secondary
        if secondary is not None and secondary.saved:
            return transports.secondary_gather, secondary.plan
        if gathered.fills_own_slices:
            gathered.fill_own_slices()
        return transports.gather, gathered.plan

    def wait(self, streams: Streams) -> None:
        """Let compute use what is gathered.

        Raises:
            RuntimeError: if a collective failed; nothing is in flight then.
        """
        launched = bool(self._finishes)
        try:
            while self._finishes:
                # Forgotten once it is over, and not before: after Ctrl-C in the middle of it,
                # recovery must wait for the rest of the messages.
                self._finishes[0]()
                del self._finishes[0]
        except RuntimeError as error:
            del self._finishes[0]
            self.abandon()  # the other messages still write to the memory that is freed next
            reraise(error, self._describe(), self._param_group.mesh.shard_group)
        if launched:
            for gathered in self._packed:
                gathered.free_pack()
        self._packed = []  # a later plan has other storages
        # If all was cached, nothing was launched, and the event belongs to an earlier gather.
        if self._is_needed and streams.stream_ordered:
            streams.use_gathered(self._event)

    def abandon(self) -> None:
        """Wait for all that was launched, whatever comes of it, and forget it."""
        while self._finishes:
            with suppress(RuntimeError):  # each once: a second wait would write again
                self._finishes.pop(0)()


@dataclass(slots=True, eq=False)
class StepState:
    """State that forwards and backwards leave in a unit for later ones.

    A reset makes a new one.

    Attributes:
        forwards: those that backward may still come to.
        running: how many forwards have begun and not ended.
        input_nodes: of the running forwards: see `UnitHooks.input_followers`.
        next_in_backward: the unit that backward is expected to reach after this one.
        backward_began: whether backward has reached this unit, and not left it.
        entered_in: the backward that reached it last.
        recomputed: whether it was gathered in backward, to recompute activations.
        is_read_outside: whether gathered parameters are read where no hook is called.
        reduced: whether gradients of the unit were reduced in this backward, or since the iteration
            is held open.
    """

    forwards: list[weakref.ref[Forward]] = field(default_factory=list)
    running: int = 0
    input_nodes: dict[int, Any] = field(default_factory=dict)
    next_in_backward: Unit | None = None
    backward_began: bool = False
    entered_in: object = None
    recomputed: bool = False
    is_read_outside: bool = False
    reduced: bool = False


class Unit:
    """The parameters of one call of `fully_shard` and their state.

    Attributes:
        modules: the modules passed to that call.
        name: their qualified names, as far as sharded modules around them are known.
        config, param_group, gradients: see `unit_config`, `param_group`, `unit_grads`.
        registration: which parameters the modules hold.
        reshard_after_forward: what the setting in ``config`` means here, for a root or another
            unit.
        runtime: the runtime of the unit's tree, None before the first forward. Code above it calls
            `runtime.runtime_of`.
        hooks: the hooks on ``modules``. Code above them calls `hooks.hooks_of`.
        enclosing: units whose modules contain this one's.
        encloses: whether other units are inside this one.
        gather, step: the last gather, and the state of a step.
        forward_prefetch, backward_prefetch: units to gather when forward or backward of this one
            begins, instead of the one that the order of the last forward predicts.
    """

    param_group_type: type[ParamGroup] = ParamGroup
    grads_type: type[UnitGrads] = UnitGrads

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: DataParallelMesh,
        device: torch.device,
        config: UnitConfig,
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.device = device
        self.config = config
        self.name = type(modules[0]).__name__
        self.registration = Registration(modules)
        self.param_group = self.param_group_type(mesh, device, config, self.registration)
        self.gradients = self.grads_type(self.param_group, config)
        self.reshard_after_forward: bool | int = True
        # Its place in the tree.
        self.runtime: TreeRuntime = None  # type: ignore[assignment]
        self.hooks: AccumulationHooks = None  # type: ignore[assignment]
        self.enclosing: tuple[Unit, ...] = ()
        self.encloses = False
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.of_parts: dict[type, Any] = {}  # data that parts of the library keep about it
        # The state.
        self.state = State.SHARDED
        self.gather = Gather(self.param_group, self._describe_gather)
        self.step = StepState()
        # Observations from forwards so far.
        self.max_forwards = 0  # as many are kept before completed ones are dropped
        self.has_graph = False  # of the forward that ended last
        self.recomputes_all = False  # forward without gradients, recomputed whole in backward

    def __deepcopy__(self, memo: dict) -> Registration:
        """Only of a module inside: `deepcopy` puts copies of whole units into ``memo`` before."""
        return copy.deepcopy(self.registration, memo)

    @property
    def params(self) -> list[ShardedParam]:
        return self.param_group.params

    @property
    def buckets(self) -> list[Bucket]:
        return self.param_group.buckets

    def choose_reshard(self, *, is_root: bool) -> None:
        """Decide whether to free after forward, or to how many ranks: as set, or the default."""
        chosen = self.config.reshard_after_forward
        self.reshard_after_forward = (not is_root) if chosen is None else chosen

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph exists through which backward may still reach this unit."""
        return any(map(is_awaited, self.step.forwards))

    def materialize(self, streams: Streams) -> None:
        """Make everything that gathers need, before the first one."""
        group = self.param_group
        group.apply_pending_changes()  # on compute: it may copy shards
        # No kernel runs here. But making views allocates memory, which then stays in the pool of
        # the stream that allocated it: gathers use it next.
        with streams.gathering():
            group.materialize(reshard_to=self.reshard_after_forward, split=self.encloses)

    # -- gathering --------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered storages."""
        return sum(bucket.gathered_bytes for bucket in self.buckets)

    def transition(self, event: str) -> None:
        """Change the state; nothing else may.

        Raises:
            RuntimeError: if `TRANSITIONS` has no such event in this state.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise RuntimeError(
                f"Unit '{self.name}' is {self.state.value}, where {event} is not allowed. This is "
                "a bug in fsdp2: please report it"
            )
        self.state = after

    def start_unshard(self, streams: Streams) -> None:
        """Allocate and start the all-gathers of all buckets."""
        assert self.state in RESHARDED
        param_group, config = self.param_group, self.config
        on = self.runtime.on
        on.gather_requested(self)
        if param_group.dirty or not param_group.materialized:
            self.plan_anew(streams)
        in_backward = self.runtime.in_backward
        if not in_backward and param_group.freezing.adopt():
            param_group.show_freezing()
            self._tell_planned()
        gather, earlier = self.gather, self.gather.versions
        if not in_backward or not config.reshard_after_backward:
            # Parameters freed after backward are gathered again in the next forward, which records
            # them.
            gather.versions = param_group.versions()
        on.before_gather(self)
        if in_backward and streams.stream_ordered and param_group.versions() != earlier:
            # Users have written the shards since the forward, on compute. Only then: a wait in
            # every backward would keep a slow link idle until the loss is there.
            streams.before_gathers()
        gather.launch(streams)
        if gather.num_plans != param_group.num_plans:
            gather.num_plans = param_group.num_plans
            on.first_gathered(self)
        # Last: a unit whose launch raised is where it was, and recovery waits for nothing.
        self.transition("start_unshard")
        on.gather_started(self)

    def plan_anew(self, streams: Streams) -> None:
        """Before the first gather, and after parameters or settings have changed."""
        self.runtime.on.before_planning(self)
        self.drop_cache(streams)
        self.materialize(streams)
        self._tell_planned()
        streams.before_gathers()  # compute has just written the new shards

    def _tell_planned(self) -> None:
        self.runtime.on.planned(self)

    def _describe_gather(self) -> str:
        phase = "backward" if self.runtime.in_backward else "forward"
        return f"the all-gather of unit '{self.name}' in {phase}"

    def wait_unshard(self, streams: Streams) -> None:
        """Let compute use what `start_unshard` gathers."""
        assert self.state is State.GATHERING
        self.runtime.on.before_wait(self)
        try:
            self.gather.wait(streams)
        except RuntimeError:  # to SHARDED, so that a later forward gathers again
            self.drop_cache(streams)
            self.transition("wait_unshard")
            self.reshard(streams)
            raise
        self.transition("wait_unshard")
        if self.param_group.incomplete:
            self.param_group.complete()
            self._tell_planned()
        self.runtime.on.gathered(self)

    def unshard(self, streams: Streams) -> None:
        """From any state to UNSHARDED, with the unsharded parameters registered."""
        if self.state is State.PARTLY_FREED:
            # Everything is gathered again, as ranks may differ in the parameters that have memory.
            self.reshard(streams)
        if self.state in RESHARDED:
            self.start_unshard(streams)
        if self.state is State.GATHERING:
            self.wait_unshard(streams)
        self.register_unsharded()

    def register_unsharded(self) -> None:
        """Register the parameters that compute."""
        if self.registration.registered != "unsharded":
            self.registration.register("unsharded", for_forward=not self.runtime.in_backward)

    def reshard(self, streams: Streams, *, to_secondary: bool = False) -> None:
        """From any state to SHARDED, with the sharded parameters registered; or to SECONDARY.

        Args:
            to_secondary: as of `events.TreePart.before_reshard`.
        """
        self.step.recomputed = False
        # Memory that a gather still writes cannot be freed. And on the host, each message must be
        # waited for exactly once, even if it is not used.
        if self.state is State.GATHERING:
            self.wait_unshard(streams)
        self.runtime.on.before_reshard(self, to_secondary)
        if self.state in GATHERED:
            going = [bucket for bucket in self.param_group.buckets if not bucket.cache_valid]
            if going:
                streams.free(going)
            self.transition("reshard")
        self.runtime.on.resharded(self)
        self.register_sharded()

    def drop_cache(self, streams: Streams, buckets: Iterable[Bucket] | None = None) -> None:
        """Evict cached buckets, ``buckets`` or all of them: at once, or when the unit is freed."""
        held = [b for b in (self.buckets if buckets is None else buckets) if b.cache_valid]
        for bucket in held:
            bucket.cache_valid = False
            # While the unit is gathered, compute may be using them: `reshard` frees them then.
            if self.state in RESHARDED:
                streams.free((bucket,))

    def register_sharded(self) -> None:
        """Register the parameters that users see while the unit is not computing."""
        kind = "secondary" if self.state is State.SECONDARY else "sharded"
        if self.registration.registered != kind:
            self.registration.register(kind)

    def is_stale(self) -> bool:
        """Whether this rank knows of writes to the shards after the last gather began."""
        return self.param_group.versions() != self.gather.versions


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Note that ``module`` is one of the modules of ``unit``."""
    vars(module)[_KEY] = unit


def unit_of(module: nn.Module) -> Unit:
    """The unit of ``module``, which is sharded."""
    return vars(module)[_KEY]


def units_in(module: nn.Module) -> list[Unit]:
    """All units in the tree of ``module``, in the order of the tree, each once."""
    found: dict[Unit, None] = {}
    # Not by ``getattr``: wrappers, such as torch.compile's, forward attributes of what they wrap.
    for submodule in module.modules():
        unit = vars(submodule).get(_KEY)
        if unit is not None:
            found[unit] = None
    return list(found)


def units_holding(modules: Iterable[nn.Module]) -> list[Unit]:
    """The units that own parameters of ``modules``, each once."""
    # Modules inside a unit have no attribute of ours; what `StateDictHooks` installed names it.
    hooks = (hook for module in modules for hook in module._state_dict_pre_hooks.values())
    found = (getattr(getattr(hook, "__self__", None), "unit", None) for hook in hooks)
    return [unit for unit in dict.fromkeys(found) if isinstance(unit, Unit)]


def unit_holding(module: nn.Module, param: nn.Parameter) -> Unit | None:
    """The unit of the parameter ``param`` that ``module`` holds, if any."""
    holding = units_holding([module])
    return next((unit for unit in holding if managed_as(param) in unit.params), None)


def own_modules(module: nn.Module, recurse: bool = True) -> Iterator[nn.Module]:
    """``module`` and the modules under it, except sharded modules and their submodules."""
    yield module
    for child in module.children() if recurse else ():
        if _KEY not in vars(child):
            yield from own_modules(child)
