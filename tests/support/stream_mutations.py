"""Faults, each a small change of the runtime: a wait, an event or a lifetime that is wrong.

`MUTATIONS` says for each what it breaks, how the checker must see it, and on which plans. A kind of
None means that it is harmless: the reason stands with it, and no plan may show anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from fsdp2.comm import streams as streams_module
from fsdp2.comm.streams import DeviceStreams
from fsdp2.comm.transports import GroupTransport, done
from fsdp2.features.deferred_weight_grads import DeferredWeightGrads
from fsdp2.features.early_free.early_free import EarlyFree
from fsdp2.features.early_free.references import References
from fsdp2.features.frozen_cache import FrozenCache
from fsdp2.features.secondary_shards import SecondaryShards, shards_of
from fsdp2.runtime.hooks import UnitHooks
from fsdp2.runtime.reduction import Reduction, ReductionsInFlight
from fsdp2.runtime.runtime import Runtime
from fsdp2.runtime.states import State
from fsdp2.runtime.unit import Forward, Gather, Unit
from fsdp2.sharding.bucket import Bucket
from fsdp2.sharding.gathered import GatheredStorage, GatherPlan
from fsdp2.sharding.gradients import GradientStore
from fsdp2.testing import Kind
from fsdp2.transports.host import messages
from stream_schedules import Layer, Micro, Plan, Step, used_once

Patch = AbstractContextManager[Any]

# -- plans ---------------------------------------------------------------------------------------


def _keeping(meddles: str | None) -> Plan:
    """The last layers are frozen altogether: nothing is freed there that makes gathers wait."""
    return Plan(
        layers=(Layer(lora=True), Layer(frozen=True), Layer(frozen=True)),
        keep_frozen=10**9,
        steps=(Step(), Step((Micro(meddles=meddles),)), Step()),
    )


_PLANS: dict[str, Plan] = {
    "plain": Plan(),
    "event": Plan(steps=(Step(event=True), Step(event=True), Step())),
    "packed": Plan(direct_min_bytes=10**9),
    "low": Plan(precision="low"),
    "hsdp": Plan(mesh=(2, 2), precision="low"),
    "hsdp_later": Plan(
        mesh=(2, 2), precision="mixed", steps=(Step((Micro(all_reduce=False), Micro())), Step())
    ),
    "accumulates": Plan(steps=(Step((Micro(), Micro())), Step())),
    "keeps_a_gradient": Plan(steps=(Step(keep_gradient=True), Step(), Step())),
    # Layer 1 is prefetched and not used, and no later gather makes compute wait for this one.
    "mispredicts": Plan(steps=(Step(), Step((Micro(), Micro(order=(0,), evaluates=True))), Step())),
    "rewrites": Plan(steps=(Step((Micro(rewrites=True),)), Step())),
    "wastes": Plan(prefetch="b", steps=(Step((Micro(), Micro(order=(1,), wastes=True))), Step())),
    "goes_on": Plan(max_buffers=9, steps=(Step((Micro(last=False), Micro())), Step())),
    "fails": Plan(steps=(Step((Micro(fails="backward"), Micro())), Step())),
    "offload": Plan(offload=True),
    "offload_fails": Plan(offload=True, steps=(Step((Micro(fails="backward"), Micro())), Step())),
    "offload_evaluates": Plan(offload=True, steps=(Step((Micro(), Micro(evaluates=True))), Step())),
    "offload_in_backward": Plan(offload=True, in_backward=True),
    "in_backward": used_once(
        Plan(in_backward=True, prefetch="b", distance=3, steps=(Step((Micro(order=(2, 1, 0)),)),))
    ),
    "large_root_reads_again": Plan(
        tokens=True, head_is_embedding=True, own_pieces=True, direct_min_bytes=0
    ),
    "large_root": Plan(tokens=True, own_pieces=True, direct_min_bytes=0),
    "lora": Plan(
        layers=(Layer(), Layer(unit=False, lora=True)), freezes_scale=True, direct_min_bytes=0
    ),
    "keeps_frozen": _keeping(None),
    "writes_what_is_kept": _keeping("writes"),
    "keeps_no_more": _keeping("unkeeps"),
    "keeps_an_embedding": Plan(
        layers=(Layer(lora=True),),
        tokens=True,
        freezes_embedding=True,
        keep_frozen=10**9,
        own_pieces=True,
        direct_min_bytes=0,
    ),
    "moves": Plan(steps=(Step(), Step(moves=True))),
    "regroups": Plan(mesh=(4,), reshard=2, steps=(Step((Micro(looks=True),)), Step())),
    "hook": Plan(hook="stream"),
    "elsewhere": Plan(steps=(Step((Micro(elsewhere=True),)), Step())),
    "host": Plan(host="group"),
    "host_exchange": Plan(host="exchange"),
    # Stages of zero-bubble pipelines; from the second micro-batch on the gradients of weights are
    # known to be computed apart.
    "pipeline": Plan(
        reshard=True, steps=(Step(pipeline="FIWFIW"), Step(pipeline="FFIIWW"), Step())
    ),
    "pipeline_of_shards": Plan(
        accumulates_sharded=True,
        precision="mixed",
        steps=(Step(pipeline="FIWFIW"), Step(pipeline="FIWFFIIWW"), Step()),
    ),
}
PLANS = {name: dataclasses.replace(plan) for name, plan in _PLANS.items()}

# -- ways to break something ----------------------------------------------------------------------


def replace(cls: Any, name: str, value: Any) -> Patch:
    return mock.patch.object(cls, name, value, create=isinstance(value, _Never))


def nothing(cls: Any, name: str) -> Patch:
    return replace(cls, name, lambda *_, **__: None)


def after(cls: Any, name: str, extra: Callable[..., Any]) -> Patch:
    """The method, and then ``extra`` with its arguments."""
    original = getattr(cls, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        extra(*args, **kwargs)
        return result

    return replace(cls, name, changed)


def before(cls: Any, name: str, extra: Callable[..., Any]) -> Patch:
    original = getattr(cls, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        extra(*args, **kwargs)
        return original(*args, **kwargs)

    return replace(cls, name, changed)


@contextmanager
def inside(cls: Any, name: str, patch: Callable[[], Patch]) -> Iterator[None]:
    """While the method runs, something else is patched."""
    original = getattr(cls, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        with patch():
            return original(*args, **kwargs)

    with replace(cls, name, changed):
        yield


def _compute(module: Any) -> Any:
    """The user's stream, wherever this is called: of the recorder, or of a real device."""
    return module.compute if hasattr(module, "compute") else module.default_stream()


@contextmanager
def on_stream(cls: Any, name: str, which: str) -> Iterator[None]:
    """The method runs on another one of the streams that are in use."""
    original = getattr(cls, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        # (All models share them: those of a real device were made before the patch.)
        kept = (
            streams_module._simulated[-1][1] if streams_module._simulated else streams_module._kept
        )
        if not kept:
            return original(*args, **kwargs)
        streams = next(reversed(kept.values()))
        stream = _compute(streams.module) if which == "compute" else getattr(streams, which)
        with streams.module.stream(stream):
            return original(*args, **kwargs)

    with replace(cls, name, changed):
        yield


@contextmanager
def event_before_unpack() -> Iterator[None]:
    late: list[Callable[[], None]] = []

    def all_gather(self: Any, plan: GatherPlan, tag: int) -> Callable[[], None]:
        self._gather(plan.outputs, plan.inputs, self._gather_options)
        late.append(plan.unpack)
        return done

    def unpack(*_: Any) -> None:
        while late:
            late.pop()()

    late_unpack = after(DeviceStreams, "gathered", unpack)
    with replace(GroupTransport, "all_gather", all_gather), late_unpack:
        yield


def _event_once(self: Any, event: Any) -> Any:
    if event is None:
        event = self.module.Event()
        event.record(self.gather)
    return event


def _event_of_compute(self: Any, event: Any) -> Any:
    event = event or self.module.Event()
    event.record(_compute(self.module))
    return event


def _event_on(which: str) -> Callable[[Any], Any]:
    def reduced(self: Any) -> Any:
        event = self.module.Event()
        event.record(getattr(self, which) if which != "compute" else _compute(self.module))
        return event

    return reduced


def _drop_in_flight(unit: Unit, *_: Any, **__: Any) -> None:
    if unit.state is State.GATHERING:
        unit.gather._finishes.clear()
        unit.state = State.UNSHARDED


def _end_forward_early(runtime: Runtime) -> None:
    runtime.schedule.end_root()


def _forget_gradients(reduction: Reduction, *_: Any) -> None:
    reduction.grads = ()


def _forget_sum(reduction: Reduction, *_: Any) -> None:
    if reduction.output is not None:  # else gradients are adopted: there is no sum
        reduction.output.flat, reduction.output.views = None, []


def _forget_partial(reduction: Reduction) -> None:
    reduction.output.added = None


def _in_place(reduction: Reduction, *_: Any) -> None:
    output = reduction.output
    output.in_place = output.dtype == reduction.bucket.orig_dtype
    output.flat = output.store.flat


def _event_early(self: Reduction, streams: Any) -> None:
    with streams.reducing():
        self._event = streams.reduced()
        self._conclude()


def _release_in_flight(self: Bucket) -> None:
    if self.grads is not None and not self.has_gradients():
        self.grads.free()


def _free_secondary(_: Gather, bucket: Bucket, *__: Any) -> None:
    shards = shards_of(bucket)
    if shards is not None and shards.saved:
        shards.free()


def _finish_twice(self: Unit, streams: Any) -> None:
    for finish in [*self.gather._finishes, *self.gather._finishes]:
        finish()
    self.gather._finishes.clear()
    self.state = State.UNSHARDED


def _finish_never(self: Unit, streams: Any) -> None:
    self.gather._finishes.clear()
    self.state = State.UNSHARDED


def _run_finish_twice(self: Reduction) -> None:
    self._finish()
    self._finish()
    self._finish = done


def _reset_lazily(self: Runtime) -> None:
    self.reductions._launched.clear()
    for unit in self.units:
        unit.gradients.drop()
        for bucket in unit.buckets:
            bucket.in_flight.clear()
        unit.step.backward_began = False
    self.in_backward = False
    self.schedule.root = None


def _free_held_at_once(unit: Unit, streams: Any, buckets: Any = None) -> None:
    for bucket in unit.buckets if buckets is None else buckets:
        if not bucket.cache_valid:
            continue
        bucket.cache_valid = False
        with streams.gathering():
            bucket.free()


def _free_held_while_gathering(unit: Unit, streams: Any, buckets: Any = None) -> None:
    for bucket in unit.buckets if buckets is None else buckets:
        if not bucket.cache_valid:
            continue
        bucket.cache_valid = False
        with streams.gathering():
            streams.before_free()
            bucket.free()


def _wait_for_nothing_kept(unit: Unit, *_: Any) -> None:
    if any(bucket.cached for bucket in unit.buckets):
        unit.gather._is_needed = False


def _free_what_is_held(unit: Unit, streams: Any, **_: Any) -> None:
    for bucket in unit.buckets:
        if bucket.cache_valid and unit.state is State.SHARDED:
            streams.before_free()
            bucket.free()


def _believe_gathered(part: DeferredWeightGrads, unit: Unit) -> None:
    runtime = part.runtime
    if runtime.ends_iteration or runtime.in_backward:
        return
    if unit.state is State.SHARDED:
        unit.state = State.UNSHARDED
    unit.register_unsharded()


class _Never:
    """An attribute that is always False."""

    def __get__(self, *_: Any) -> bool:
        return False

    def __set__(self, *_: Any) -> None: ...


def _free_when_accumulated(hooks: UnitHooks, *_: Any) -> None:
    unit = hooks.unit
    if hooks._watching and hooks._num_accumulated >= len(hooks._watched):
        unit.reshard(unit.runtime.streams)


# -- the table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault; ``kind`` is how it shows on ``plan``. None: harmless, for this ``reason``."""

    plan: str
    kind: Kind | None
    patch: Callable[[], Patch]
    reason: str = ""


READ, WRITE, FREED = Kind.READ_TOO_EARLY, Kind.OVERWRITTEN_IN_USE, Kind.FREED_IN_USE
GONE, HELD, TWICE = Kind.USED_AFTER_FREE, Kind.HELD_LOST, Kind.WAITED_TWICE
D = DeviceStreams


def _null(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


MUTATIONS: dict[str, Mutation] = {
    # waits and events of gathers
    "a gather does not wait for the optimizer's write": Mutation(
        "plain", READ, lambda: nothing(D, "before_gathers")
    ),
    "a gather does not wait for the optimizer's event": Mutation(
        "event",
        READ,
        lambda: replace(
            D,
            "before_gathers",
            lambda self, event=None: event or self.gather.wait_stream(self.compute),
        ),
    ),
    "a gather does not wait for shards made anew": Mutation(
        "moves",
        READ,
        lambda: inside(Unit, "start_unshard", lambda: nothing(D, "before_gathers")),
    ),
    "a gather in backward does not wait for a write since the forward": Mutation(
        "rewrites",
        READ,
        lambda: inside(Unit, "start_unshard", lambda: nothing(D, "before_gathers")),
    ),
    "compute does not wait for the gather": Mutation(
        "plain", READ, lambda: nothing(D, "use_gathered")
    ),
    "the event of the first gather is used for all": Mutation(
        "plain", READ, lambda: replace(D, "gathered", _event_once)
    ),
    "the event of a gather is recorded on compute": Mutation(
        "plain", READ, lambda: replace(D, "gathered", _event_of_compute)
    ),
    "the event of a gather is recorded before small parameters are unpacked": Mutation(
        "packed", READ, event_before_unpack
    ),
    "small parameters are unpacked by compute": Mutation(
        "packed", READ, lambda: on_stream(GatherPlan, "unpack", "compute")
    ),
    # lifetime of gathered storage
    "gathered storage is freed without a wait for compute": Mutation(
        "plain", FREED, lambda: nothing(D, "before_free")
    ),
    "compute waits for the gathers, instead of the other way round, before a free": Mutation(
        "plain",
        FREED,
        lambda: replace(D, "before_free", lambda self: self.compute.wait_stream(self.gather)),
    ),
    "gathered storage is allocated on compute": Mutation(
        "plain",
        Kind.USED_BEFORE_ALLOCATED,
        lambda: on_stream(GatheredStorage, "allocate", "compute"),
    ),
    "gathered storage is not allocated again": Mutation(
        "plain", GONE, lambda: nothing(GatheredStorage, "allocate")
    ),
    "a unit is freed when the last parameter gradient has accumulated": Mutation(
        "lora", GONE, lambda: after(UnitHooks, "_accumulated", _free_when_accumulated)
    ),
    "a parameter is given back early without a wait for compute": Mutation(
        "large_root",
        FREED,
        lambda: inside(EarlyFree, "_free", lambda: nothing(D, "before_free")),
    ),
    "a parameter is given back early though autograd holds it": Mutation(
        "large_root_reads_again",
        GONE,
        lambda: replace(References, "exceed", lambda *_, **__: False),
    ),
    "secondary shards are copied on the gather's stream": Mutation(
        "regroups", READ, lambda: on_stream(SecondaryShards, "save", "gather")
    ),
    # frozen parameters that are kept gathered
    "what is kept is gathered anew without a wait for compute": Mutation(
        "writes_what_is_kept",
        FREED,
        lambda: inside(
            FrozenCache, "before_gather", lambda: replace(Unit, "drop_cache", _free_held_at_once)
        ),
    ),
    "what is no longer kept is freed without a wait for compute": Mutation(
        "keeps_no_more",
        FREED,
        lambda: replace(Unit, "drop_cache", _free_held_at_once),
    ),
    "what is kept is freed inside of the gather's stream": Mutation(
        "writes_what_is_kept",
        FREED,
        lambda: replace(Unit, "drop_cache", _free_held_while_gathering),
    ),
    "compute does not wait for the gather of what is kept": Mutation(
        "keeps_frozen", READ, lambda: before(Unit, "wait_unshard", _wait_for_nothing_kept)
    ),
    "what is kept is freed with its unit": Mutation(
        "keeps_frozen", GONE, lambda: after(Unit, "reshard", _free_what_is_held)
    ),
    "an embedding that is kept is given back early": Mutation(
        "keeps_an_embedding",
        GONE,
        lambda: inside(EarlyFree, "_free_embeddings", lambda: replace(Bucket, "cached", _Never())),
    ),
    # prefetches that nobody uses
    "a mispredicted prefetch still reads when the optimizer writes": Mutation(
        "mispredicts", WRITE, lambda: before(Unit, "reshard", _drop_in_flight)
    ),
    "the end of forward leaves gathers in flight": Mutation(
        "mispredicts", WRITE, lambda: replace(Runtime, "_end_forward", _end_forward_early)
    ),
    "the end of backward does not wait for prefetches that nobody used": Mutation(
        "wastes",
        WRITE,
        lambda: inside(
            Runtime,
            "end_backward",
            lambda: replace(Unit, "reshard", lambda unit, *_, **__: unit.register_sharded()),
        ),
    ),
    "units that have been through backward are prefetched": Mutation(
        "in_backward", WRITE, lambda: replace(Forward, "follows", lambda *_: True)
    ),
    # reductions
    "a reduce-scatter does not wait for the gradients": Mutation(
        "plain",
        READ,
        lambda: replace(D, "reducing", lambda self, **_: self.module.stream(self.reduce)),
    ),
    "an all-reduce does not wait for the reduce-scatter": Mutation(
        "hsdp",
        READ,
        lambda: replace(D, "all_reducing", lambda self: self.module.stream(self.all_reduce)),
    ),
    "a hook's stream does not wait for the reduction": Mutation(
        "hook",
        READ,
        lambda: inside(
            Reduction,
            "_advance_on_stream",
            lambda: replace(D, "reducing", lambda self, then_on=None: self.module.stream(then_on)),
        ),
    ),
    "compute does not wait for the reduction": Mutation(
        "plain",
        READ,
        lambda: replace(D, "use_reduced", lambda self, event: self.reduce.wait_event(event)),
    ),
    "sum buffers are released without a wait for the all-reduce": Mutation(
        "hsdp",
        FREED,
        lambda: replace(D, "use_reduced", lambda self, event: self.compute.wait_event(event)),
    ),
    "the event of an all-reduce is recorded on the reduce-scatter's stream": Mutation(
        "hsdp", READ, lambda: replace(D, "reduced", _event_on("reduce"))
    ),
    "the event of a reduction is recorded on compute": Mutation(
        "plain", READ, lambda: replace(D, "reduced", _event_on("compute"))
    ),
    "the event of a reduction is recorded before the sums are written back": Mutation(
        "low", READ, lambda: replace(Reduction, "_advance_on_stream", _event_early)
    ),
    # backward is called on another stream than forward
    "a backward that was called elsewhere ends there": Mutation(
        "elsewhere", FREED, lambda: replace(D, "ending", _null)
    ),
    "the stream that called backward does not wait for its end": Mutation(
        "elsewhere",
        READ,
        lambda: replace(D, "ending", lambda self, compute: self.module.stream(compute)),
    ),
    # pipelines
    "a stage's gather between forward and backward is not waited for": Mutation(
        "pipeline",
        READ,
        lambda: after(DeferredWeightGrads, "gather", lambda _, unit: _drop_in_flight(unit)),
    ),
    "a stage takes what was freed after forward for gathered": Mutation(
        "pipeline", GONE, lambda: replace(DeferredWeightGrads, "gather", _believe_gathered)
    ),
    "gradients that were computed apart are reduced without a wait for them": Mutation(
        "pipeline_of_shards",
        READ,
        lambda: inside(
            DeferredWeightGrads,
            "reduce",
            lambda: replace(D, "reducing", lambda self, **_: self.module.stream(self.reduce)),
        ),
    ),
    "gradients that were computed apart are freed before they are reduced": Mutation(
        "pipeline_of_shards",
        FREED,
        lambda: inside(
            DeferredWeightGrads,
            "reduce",
            lambda: after(Reduction, "launch", _forget_gradients),
        ),
    ),
    # lifetime of gradients
    "gradients are freed before their reduce-scatter is done": Mutation(
        "plain", FREED, lambda: after(Reduction, "launch", _forget_gradients)
    ),
    "the sum buffer is freed before the all-reduce is done": Mutation(
        "hsdp", FREED, lambda: after(Reduction, "launch", _forget_sum)
    ),
    "sums of earlier backwards are freed while the all-reduce stream adds them": Mutation(
        "hsdp_later", FREED, lambda: after(Reduction, "_reduce_over_replicas", _forget_partial)
    ),
    "a sharded gradient is overwritten by a second backward": Mutation(
        "accumulates", HELD, lambda: after(Reduction, "_choose_output", _in_place)
    ),
    "a sharded gradient is overwritten while an earlier reduction writes it": Mutation(
        "goes_on", HELD, lambda: replace(Reduction, "collides", lambda _: False)
    ),
    "a gradient that the user kept is overwritten": Mutation(
        "keeps_a_gradient",
        HELD,
        lambda: replace(GradientStore, "referenced_outside", lambda *_, **__: False),
    ),
    "sharded gradients are allocated on the reduce-scatter's stream": Mutation(
        "plain", FREED, lambda: on_stream(Bucket, "gradient_store", "reduce")
    ),
    "sharded gradients are given back while a reduction writes them": Mutation(
        "goes_on", FREED, lambda: replace(Bucket, "release_gradients", _release_in_flight)
    ),
    "secondary shards are freed before they are gathered": Mutation(
        "regroups",
        GONE,
        lambda: after(Gather, "_prepare", _free_secondary),
    ),
    # after exceptions
    "a failed backward forgets its reductions": Mutation(
        "fails", FREED, lambda: replace(Runtime, "reset", _reset_lazily)
    ),
    "a failed backward does not wait for its reductions": Mutation(
        "fails", FREED, lambda: inside(Reduction, "discard", lambda: nothing(D, "use_reduced"))
    ),
    "after a failed backward the host does not wait for its copies": Mutation(
        "offload_fails", FREED, lambda: inside(Runtime, "reset", lambda: nothing(D, "synchronize"))
    ),
    # offload
    "the host does not wait for offloaded gradients": Mutation(
        "offload", READ, lambda: nothing(D, "synchronize")
    ),
    "the host does not wait for an evaluation's copies of offloaded shards": Mutation(
        "offload_evaluates",
        WRITE,
        lambda: inside(Runtime, "post_forward", lambda: nothing(D, "synchronize")),
    ),
    "the host does not wait for an offloaded gradient before its hooks": Mutation(
        "offload_in_backward", READ, lambda: nothing(D, "wait_on_host")
    ),
    "the staged copy is freed before it is gathered": Mutation(
        "offload",
        GONE,
        lambda: after(GatheredStorage, "fill_own_slices", lambda g: g.free_offload_buffer()),
    ),
    "the staged copy is made on compute": Mutation(
        "offload", READ, lambda: on_stream(GatheredStorage, "fill_own_slices", "compute")
    ),
    # ordered by the host
    "a double wait for a gather": Mutation(
        "host", TWICE, lambda: replace(Unit, "wait_unshard", _finish_twice)
    ),
    "a double wait for a reduction": Mutation(
        "host", TWICE, lambda: replace(Reduction, "_run_finish", _run_finish_twice)
    ),
    "no wait for a gather": Mutation(
        "host_exchange", READ, lambda: replace(Unit, "wait_unshard", _finish_never)
    ),
    "no wait for a reduction": Mutation(
        "host_exchange",
        Kind.NEVER_WAITED,
        lambda: replace(Reduction, "_run_finish", lambda r: setattr(r, "_finish", done)),
    ),
    "the messages of an exchange are not waited for": Mutation(
        "host_exchange", READ, lambda: replace(messages, "wait_for", lambda works: works.clear())
    ),
    # harmless
    "gathers run on compute": Mutation(
        "",
        None,
        lambda: replace(D, "gathering", _null),
        "everything of a gather is then on one stream: only overlap is lost",
    ),
    "the second entry of the reduce-scatter's stream does not wait for compute": Mutation(
        "",
        None,
        lambda: inside(
            Reduction,
            "_advance_on_stream",
            lambda: replace(D, "reducing", lambda self, then_on=None: _second_entry(self, then_on)),
        ),
        "the first entry, in `launch`, did, and compute has written nothing in between",
    ),
    "the sum buffer is freed at once, without replicas": Mutation(
        "",
        None,
        lambda: after(
            Reduction, "launch", lambda r, *_: None if r.replicate or r.hook else _forget_sum(r)
        ),
        "it belongs to the reduce-scatter's stream, which is the only one to use it",
    ),
    "reductions are not limited in number": Mutation(
        "",
        None,
        lambda: nothing(ReductionsInFlight, "_make_room"),
        "they only hold more memory: what overwrites a sharded gradient completes them first",
    ),
}


def _second_entry(streams: Any, then_on: Any) -> AbstractContextManager[Any]:
    if then_on is not None:
        then_on.wait_stream(streams.reduce)
        return streams.module.stream(then_on)
    return streams.module.stream(streams.reduce)
