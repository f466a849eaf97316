"""A unit's gradients on their way from the tensors autograd made to ``.grad`` of the shards.

A `Reduction` processes the gradients of one bucket. It has one function per transition::

    launch()   -> reduce-scatter started     gradients, sum buffer and output are held
    advance()  -> (HSDP) all-reduce started  the reduce-scatter is done, its inputs are freed
    complete() -> .grad attached             everything but the sharded gradient is released

[Note: the same steps on two kinds of devices]
All devices run the same steps (``reduce-scatter, (HSDP) all-reduce, scale, hooks, write back``),
but at different times.

- *Stream-ordered*: `launch` enqueues all of them, since streams keep their order without the host.
  `complete` makes compute wait for one event. Until then gradients, sums and partial sums are held
  here: `record_stream` is not used, so memory that is dropped earlier goes to the next allocation
  of its stream while another stream still reads it (see `comm.streams`).
- *Host-ordered*: each message is waited for on the host, so the step after it runs only when the
  host calls it. `advance` is that call between reduce-scatter and all-reduce. The runtime makes it
  for older reductions when it launches a newer one, so that all-reduces overlap with backward.
  Hooks and write-back wait for `complete`, when no message of this reduction is under way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from operator import attrgetter, is_
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.mesh_transports import MeshTransports
from ..comm.streams import Event, Streams
from ..comm.transports import Finish, done
from ..common.failures import reraise
from ..dtensor.from_local import local_of
from ..dtensor.memory import with_own_storage
from ..sharding.bucket import Bucket
from ..sharding.gradients import ReducePlan, ReductionOutput
from ..sharding.param import ShardedParam, shard_of
from .unit_config import UnitConfig

# With `map` in place of generators, which cost a frame per item: these run in every backward.
_nbytes_of, _replicate_of = attrgetter("nbytes"), attrgetter("replicate")


# A parameter, its gradient, and the gradient's write counter after the addition. Users may drop the
# gradient before the iteration ends, so the reference is weak and its memory can be freed.
Added = tuple[ShardedParam, weakref.ref[torch.Tensor], int]


# Called with this rank's part of a reduced gradient whose parameter has hooks, before it is added
# to ``.grad``; returns its replacement. The last one is used.
result_hooks: list[Callable[[ShardedParam, torch.Tensor], torch.Tensor]] = []


class Reduction:
    """The gradients of one bucket on their way to the shards.

    Args:
        grads: for each parameter the local gradient, contiguous, or None. All None: nothing new,
            only the sums that earlier reductions over shards have left in ``bucket.partial``.
        transports: over the ranks that share the parameters (none with one shard), and over the
            ranks that hold the same shard, if any. With neither, nothing is communicated.
        config: the unit's settings, read now: users may change them before `complete`. Without
            ``all_reduce_grads``, the result is added to ``bucket.partial`` and waits there for a
            later reduction. The ``all_reduce_hook`` is called with each contiguous part of the
            result, 1-D, before it is written to the sharded gradients.
        tag: the first of the message tags that this reduction uses.
    """

    output_type: type[ReductionOutput] = ReductionOutput  # `fsdp2.planning` has one that counts

    def __init__(
        self,
        bucket: Bucket,
        plan: ReducePlan,
        grads: Sequence[torch.Tensor | None],
        transports: MeshTransports,
        config: UnitConfig,
        *,
        tag: int,
    ) -> None:
        self.bucket = bucket
        self.plan = plan
        self.grads = grads
        self.scatter = transports.scatter
        self.replicate = transports.replicate
        self.is_local = self.scatter is None and self.replicate is None
        self.waits = self.replicate is not None and not config.all_reduce_grads
        self.factor = config.divide_factor
        self.hook = config.all_reduce_hook
        self.hook_stream = config.all_reduce_stream
        self.tag = tag
        self.nbytes = plan.numel * bucket.gather_dtype.itemsize
        # None before it is chosen and after the release, where nothing reads it.
        self.output: ReductionOutput = None  # type: ignore[assignment]
        self.dtensors: Sequence[torch.Tensor] | dict[int, torch.Tensor] = ()
        self._fresh: Collection[int] = ()  # their results are in `dtensors`, not added to ``.grad``
        self._finish: Finish = done
        self._event: Event = None
        self._advanced = False
        self._attached: list[nn.Parameter] = []
        self.added: list[Added] = []

    def collides(self) -> bool:
        """Whether an earlier reduction that writes the same slices is not complete yet."""
        return bool(self.bucket.in_flight & self.plan.covered)

    # -- transitions ------------------------------------------------------------------------

    def launch(self, streams: Streams) -> None:
        """Start the reduce-scatter; on stream-ordered devices also the steps after it."""
        if self.is_local:
            # Adopted by `complete`, not here: a backward that fails first drops them like any other
            # gradients, and ``.grad`` is attached in the order of launches.
            self.bucket.in_flight |= self.plan.covered
            self._event = streams.reduced()
            return
        # On compute's stream, which owns the memory of gradients; and before `in_flight` counts
        # this reduction, which would hide references of users (see `referenced_outside`).
        try:
            self._choose_output()
        except BaseException:  # out of memory: nothing was sent that `discard` would wait for
            self._event, self._advanced = streams.reduced(), True
            raise
        self.bucket.in_flight |= self.plan.covered
        with streams.reducing():
            try:
                self._start()
            except BaseException:
                # For `discard`: kernels that were enqueued still read and write; and an all-reduce
                # must not follow, which other ranks would wait for.
                self._event, self._advanced = streams.reduced(), True
                raise
        if streams.stream_ordered:
            self._advance_on_stream(streams)
        elif self.scatter is None:
            self.advance()  # there is nothing to wait for before the all-reduce

    def advance(self) -> None:
        """Host-ordered devices: finish the reduce-scatter and start the all-reduce, if any."""
        if self._advanced:
            return
        try:
            self._run_finish()
        finally:
            self._advanced = self._finish is done
        # Messages have read the gradients until now. The all-reduce does not need them.
        self.grads = ()
        if self.replicate is not None:
            self._reduce_over_replicas()

    def _advance_on_stream(self, streams: Streams) -> None:
        """Stream-ordered devices: enqueue all steps after the reduce-scatter."""
        # Without an all-reduce now, these steps stay on the stream of the reduce-scatter, or
        # continue on the user's. With one, its separate stream lets the next reduce-scatter start
        # meanwhile.
        if self.replicate is None or self.waits:
            context = streams.reducing(then_on=self.hook_stream)
        else:
            context = streams.all_reducing()
        with context:
            try:
                self._reduce_over_replicas()
                self._conclude()
            finally:
                # Last: `.grad` is not there before the write-back. Also where a user's hook raised,
                # for `discard`.
                self._event = streams.reduced()

    def complete(self, streams: Streams) -> list[nn.Parameter]:
        """Attach ``.grad``. Afterwards compute may use it, and nothing else is held.

        Returns:
            The sharded parameters that had no gradient and have one now.
        """
        if self.is_local:
            self._adopt()
        else:
            self._wait(streams)
            if not streams.stream_ordered:
                self._conclude()
        params = self.bucket.params
        if self.bucket.shard_device != self.bucket.device and any(
            params[i].sharded._post_accumulate_grad_hooks for i in self.plan.present
        ):
            self.wait_on_host(streams)  # an optimizer in backward steps on the host
        called_hooks = not self.waits and self._attach()
        self._release()
        if called_hooks:  # an optimizer in backward may have dropped the gradients again
            self.bucket.release_gradients()
        return self._attached

    def discard(self, streams: Streams) -> None:
        """Like `complete`, for a backward that failed: wait, but attach nothing.

        Without the wait, peers' messages would be written into freed memory, and the next use of
        the group would receive these messages.
        """
        self._wait(streams)
        self._release()
        for param in self._attached:  # before a hook of the user's raised
            param.grad = None

    def wait_on_host(self, streams: Streams) -> None:
        """After `complete`, with offloaded gradients: wait until they are in host memory."""
        streams.wait_on_host(self._event)

    def _wait(self, streams: Streams) -> None:
        """Let compute use the result."""
        if streams.stream_ordered:
            streams.use_reduced(self._event)
        elif not self.is_local:
            self.advance()
            if self.replicate is not None:
                self._run_finish()  # the all-reduce

    def _release(self) -> None:
        self.grads = ()
        self.output = None  # type: ignore[assignment]
        self.bucket.in_flight -= self.plan.covered

    def _conclude(self) -> None:
        # Hooks after the scaling, to see what ``.grad`` gets; before the write-back, since in a sum
        # with an earlier ``.grad`` they could not tell the new gradient apart.
        if not self.waits:
            num_ranks = self.bucket.mesh.size
            if self.factor is not None and self.factor != num_ranks:
                # From the mean over all ranks, which transports give, to sum / factor.
                self.output.scale(self.plan, num_ranks / self.factor)
            if self.hook is not None:
                # On the CPU streams only have names, which a hook may ask for.
                with torch.cpu.stream(self.hook_stream):
                    for part in self.output.ranges(self.plan):
                        self.hook(part)
            if result_hooks:
                self._call_result_hooks()
            self._write_back()

    # -- steps ------------------------------------------------------------------------------

    def _choose_output(self) -> None:
        """Write straight into the gradient storage where no gradient is attached yet."""
        # A collective overwrites whole spans. So one attached gradient is enough to send all of
        # them through a temporary output, from which each is copied or added.
        bucket, covered, detached = self.bucket, self.plan.covered, None
        if bucket.has_gradients():
            detached = [i for i in covered if bucket.params[i].sharded.grad is None]
        store = bucket.gradient_store(detached)
        transport = self.scatter or self.replicate
        assert transport is not None
        dtype = transport.out_dtype(bucket)
        in_place = (
            dtype == bucket.grad_dtype
            and bucket.shard_device == bucket.device
            and not self.waits
            and (detached is None or len(detached) == len(covered))
        )
        if self.waits:
            bucket.partial.allocate(dtype)
        self.output = self.output_type(store, dtype, in_place=in_place)
        # Made once, with the store: wrapping gradients in DTensors in every backward would cost
        # more than the launch of their collective.
        self.dtensors = store.dtensors

    def _start(self) -> None:
        """Allocate the output, and start to fill it."""
        if all(map(is_, self.grads, repeat(None))):
            # Zeros, to which partial sums are added: hooks and write-back are as for others.
            self.output.allocate(self.plan, self.bucket.device)
            for part in self.output.ranges(self.plan):  # none: only parameters without elements
                part.zero_()
        elif self.scatter is None:
            self.output.allocate(self.plan, self.bucket.device)
            self.output.copy_from(self.grads, self.plan, self.bucket.layout)
        elif self.plan.spans:  # none: only parameters without elements
            # Memory of the reduce-scatter stream, which may reuse it as soon as it is dropped:
            # `_release` comes after `use_reduced`, where that stream waits for the all-reduce, too.
            self.output.allocate(self.plan, self.bucket.device)
            self._finish = self.scatter.reduce_scatter(
                self.bucket, self.plan, self.grads, self.output.views, self.tag
            )

    def _reduce_over_replicas(self) -> None:
        """Start the all-reduce of the sums over shards, or leave it to a later backward."""
        if self.waits:
            self.bucket.partial.add(self.output.flat, self.plan)
        elif self.replicate is not None:
            # Compute, on whose stream it was allocated, does not read it last: see `use_reduced`.
            self.output.added = self.bucket.partial.move_to(self.output.flat, self.plan)
            self._finish = self.replicate.all_reduce(self._parts(), self.tag)

    def _adopt(self) -> None:
        """One rank: the gradients are the sharded gradients, without a copy."""
        dtensors: dict[int, torch.Tensor] = {}
        for i in self.plan.present:
            param, grad = self.bucket.params[i], self.grads[i]
            assert grad is not None
            if self.factor is not None:
                grad.div_(self.factor)
            if self.hook is not None:
                with torch.cpu.stream(self.hook_stream):
                    self.hook(grad.view(-1))
            # Blocking, as it runs on compute's stream: neither the event of `launch` nor the wait
            # of the host at the end of backward covers that.
            grad = grad.to(self.bucket.shard_device, self.bucket.grad_dtype)
            if result_hooks and param.sharded._backward_hooks:
                grad = result_hooks[-1](param, grad)
            if grad.storage_offset():  # autograd may make several gradients in one storage
                grad = with_own_storage(grad)
            if param.sharded.grad is None:
                dtensors[i] = param.sharded_spec.wrap(grad)
            else:
                self._add_to_grad(param, grad)
        self.dtensors = dtensors
        self._fresh = dtensors.keys()

    def _run_finish(self) -> None:
        try:
            self._finish()
        except RuntimeError:
            self._finish = done  # `discard` waits again after Ctrl-C only
            raise
        self._finish = done  # a second wait for a message would write its data again

    def _parts(self) -> list[torch.Tensor]:
        """The tensors to all-reduce: merged neighbours, or one per parameter if it needs these."""
        cut = getattr(self.replicate, "cut", None)
        output = self.output
        return output.ranges(self.plan) if cut is None else cut(self.bucket, self.plan, output.flat)

    def _call_result_hooks(self) -> None:
        """Call users' hooks, which may change the values before they are added to ``.grad``."""
        bucket, output = self.bucket, self.output
        for i in self.plan.present:
            param = bucket.params[i]
            if param.sharded._backward_hooks:
                result = output.store.locals[i]
                if not output.in_place:
                    result = shard_of(output.flat, bucket.layout.slots[i], bucket.rank)
                given = result.to(bucket.shard_device, bucket.grad_dtype)
                result.copy_(result_hooks[-1](param, given))

    def _write_back(self) -> None:
        """Copy the temporary output into the gradient storage, or add it to ``.grad``."""
        output = self.output
        if output.in_place:
            self._fresh = self.plan.covered
            return
        fresh: set[int] = set()
        self._fresh = fresh
        params, slots, rank = self.bucket.params, self.bucket.layout.slots, self.bucket.rank
        for i in self.plan.present:
            value = shard_of(output.flat, slots[i], rank)
            grad = params[i].sharded.grad
            if grad is None:
                fresh.add(i)
                # Offloaded: the host waits once for all copies, in `Runtime.synchronize`, or in
                # `complete` where a hook is to read this one.
                output.store.locals[i].copy_(value, non_blocking=True)
            else:
                # An offloaded ``.grad`` is added to by the host, now: this copy has to block.
                self._add_to_grad(params[i], value.to(local_of(grad).device))

    def _add_to_grad(self, param: ShardedParam, value: torch.Tensor) -> None:
        """Add to the ``.grad`` of earlier backwards, and record it."""
        grad = param.sharded.grad
        assert grad is not None
        local_of(grad).add_(value)
        self.added.append((param, weakref.ref(grad), _writes_to(grad)))

    def _attach(self) -> bool:
        """Attach ``.grad``; returns whether this called users' hooks."""
        params, called_hooks = self.bucket.params, False
        for i in self.plan.present:
            sharded = params[i].sharded
            if i in self._fresh:
                if sharded.grad is None:
                    self._attached.append(sharded)
                else:  # autograd left one meanwhile, from a use of the shard itself
                    _add(sharded.grad, to=self.dtensors[i])
                sharded.grad = self.dtensors[i]
            hooks = sharded._post_accumulate_grad_hooks
            if hooks:  # as autograd would call them
                called_hooks = True
                for hook in tuple(hooks.values()):
                    hook(sharded)
        return called_hooks


@dataclass
class _Launched:
    """The reductions of one unit that are launched together."""

    unit_name: str
    tell: Callable[[Reduction, bool], None] | None = None
    nbytes: int = 0
    reductions: list[Reduction] = field(default_factory=list)

    def reraise(self, error: RuntimeError, reduction: Reduction) -> NoReturn:
        present, params = reduction.plan.present, reduction.bucket.params
        names = [params[i].fqn for i in present[:3]] + (["..."] if len(present) > 3 else [])
        what = f"the reduction of gradients of unit '{self.unit_name}' ({', '.join(names)})"
        transport = reduction.scatter or reduction.replicate
        reraise(error, what, transport and transport.group)


class ReductionsInFlight:
    """The reductions of a tree that were launched and are not complete, by unit, oldest first.

    Attributes:
        max_bytes: bytes of gradients that may be in flight before compute waits for the oldest.
        attached: the sharded parameters that had no ``.grad`` until this iteration.
        added: the additions of this iteration to the ``.grad`` of other parameters.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.attached: list[nn.Parameter] = []
        self.added: list[Added] = []
        self._launched: deque[_Launched] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def __bool__(self) -> bool:
        """Whether any are in flight, or have attached a ``.grad`` in this iteration."""
        return bool(self._launched or self.attached)

    def launch(
        self,
        reductions: Sequence[Reduction],
        streams: Streams,
        *,
        unit_name: str,
        max_units: int | None,
        tell: Callable[[Reduction, bool], None] | None = None,
    ) -> None:
        """Launch the reductions of one unit, after making room for them.

        Args:
            max_units: how many units may be in flight; None: ``max_bytes`` limits them.
            tell: called before and after each is completed, with False and True.
        """
        # [Note: the order of launches]
        # 1. Room is made before the launch, which allocates: the other way round the limit on
        #    bytes in flight would be exceeded by one unit.
        # 2. A reduction that collides writes the same slices of the sharded gradients as an earlier
        #    one (a unit that ran twice). Nothing but its completion orders the two.
        # 3. Host-ordered devices have no queue behind a reduce-scatter: the host has to finish it
        #    and start the all-reduce. It does so for all but the newest, which has just begun:
        #    finishing that too would leave nothing to overlap with compute.
        new = _Launched(unit_name, tell)
        for reduction in reductions:
            new.nbytes += reduction.nbytes
        if self._launched:
            self._make_room(new.nbytes, max_units, streams)
        for reduction in reductions:
            if reduction.collides():
                self.complete(streams)
        # Before the launches: if one of them raises, it is discarded with the rest, as a stream may
        # be at work on its memory.
        # Reductions of one unit are of different buckets, and do not collide with each other.
        self._launched.append(new)
        for reduction in reductions:
            new.reductions.append(reduction)
            try:
                reduction.launch(streams)
            except RuntimeError as error:
                new.reraise(error, reduction)
        if not streams.stream_ordered:
            if len(self._launched) > 1 and any(map(_replicate_of, reductions)):
                self._advance(islice(self._launched, len(self._launched) - 1))
            if new.nbytes > self.max_bytes and max_units is None:
                self.complete(streams)

    def _make_room(self, nbytes: int, max_units: int | None, streams: Streams) -> None:
        """Complete older reductions until ``nbytes`` more may be in flight."""
        if max_units is not None:
            while len(self._launched) >= max_units:
                self._complete_oldest(streams)
            return
        in_flight = sum(map(_nbytes_of, self._launched))
        while self._launched and in_flight + nbytes > self.max_bytes:
            in_flight -= self._launched[0].nbytes
            self._complete_oldest(streams)

    def start_all_reduces(self, streams: Streams) -> None:
        """Host-ordered devices: start the all-reduces behind all reduce-scatters in flight."""
        if not streams.stream_ordered:
            self._advance(
                launched
                for launched in self._launched
                if any(reduction.replicate is not None for reduction in launched.reductions)
            )

    def _advance(self, in_flight: Iterable[_Launched]) -> None:
        for launched in in_flight:
            for reduction in launched.reductions:
                try:
                    reduction.advance()
                except RuntimeError as error:
                    launched.reraise(error, reduction)

    def complete(self, streams: Streams) -> None:
        """Complete all reductions."""
        while self._launched:
            self._complete_oldest(streams)

    def _complete_oldest(self, streams: Streams) -> None:
        launched = self._launched[0]
        while launched.reductions:
            # It stays until it is complete: where a user's hook raises, it and those behind it are
            # discarded.
            reduction = launched.reductions[0]
            if launched.tell is not None:
                launched.tell(reduction, False)
            try:
                self.attached += reduction.complete(streams)
            except RuntimeError as error:
                launched.reraise(error, reduction)
            self.added += reduction.added
            del launched.reductions[0]
            if launched.tell is not None:
                launched.tell(reduction, True)
        self._launched.popleft()

    def abandon(self, streams: Streams) -> None:
        """Wait for the reductions of a failed backward, and attach no gradients."""
        for launched in self._launched:
            for reduction in launched.reductions:
                reduction.discard(streams)
                self.added += reduction.added  # on streams, at the launch
        self._launched.clear()

    def discard(self, streams: Streams) -> list[ShardedParam]:
        """Drop the gradients of a failed backward; earlier gradients stay.

        Returns:
            The parameters whose earlier ``.grad`` includes a part of this backward, and was
            therefore dropped too (unless users have dropped or written it since).
        """
        num_waited = len(self.added)
        self.abandon(streams)
        for param in self.attached:
            param.grad = None
        mixed = []
        for i, (each, into, num_writes) in enumerate(self.added):
            grad = each.sharded.grad
            if grad is None or grad is not into():
                continue
            # Compute may have overtaken reductions it has not waited for: then a write proves
            # nothing.
            if i >= num_waited or _writes_to(grad) == num_writes:
                each.sharded.grad = None
                mixed.append(each)
        self.attached.clear()
        self.added.clear()
        return mixed


def _writes_to(grad: torch.Tensor) -> int:
    # Operators on a DTensor do not count as writes to its local tensor, nor the other way round.
    return grad._version + local_of(grad)._version


def _add(grad: torch.Tensor, *, to: torch.Tensor) -> None:
    if isinstance(grad, DTensor) and isinstance(to, DTensor):
        grad = grad.redistribute(placements=to.placements)
    local_of(to).add_(local_of(grad))
