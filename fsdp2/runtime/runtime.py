"""The order of things in one tree of units: who is gathered, freed and reduced when.

A `Runtime` belongs to a root, the outermost sharded module. The hooks call it at four points of
every unit (before and after forward and backward) and autograd calls it at the end of backward.
It records the order in which units ran. In forward, the order of the last forward predicts the next
gather; in backward, the reverse order of this forward does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable

from ..comm.streams import Event, Streams, streams_for
from ..common.failures import accumulation_lost, backward_not_over, parameters_are_gone
from .events import UNHEARD, Followed, TreeEvents
from .param_group import requires_grad_of
from .reduction import Reduction, ReductionsInFlight
from .registration import ModulesChanged, put
from .schedule import Backward, Lookahead, Residency, Schedule
from .states import GATHERED, RESHARDED, AfterForward, State
from .torch_modes import (
    NOT_TRACED,
    autograd_is_running,
    modules_being_called,
    outside_torch_modes,
)
from .unit import Forward, StepState, Unit

# How many units' worth of gradients may be on their way before compute waits for the oldest.
# On host-ordered devices little overlaps, and memory counts more.
UNITS_IN_FLIGHT = 2
UNITS_IN_FLIGHT_ON_HOST = 1


class Runtime(Followed):
    """State shared by the units of one tree.

    Attributes:
        units: all units, in the order of the module tree; ``root`` is the outermost.
        streams: the streams and the order between them.
        reductions: reductions that were launched and are not complete.
        backward: the last run of autograd that has reached the tree.
        in_backward: whether it is still running.
        is_last_backward: whether the end of the next backward waits for the reductions.
        held_open: whether an iteration continues after its backwards: gradients that no hook has
            reduced stay where they are.
        schedule: what ran, what is expected, and where backward may still come to.
        lookahead: decides what is gathered before it is needed.
        residency: decides what stays gathered after forward and backward.
        on: the events of this tree, for parts of the library.
    """

    def __init__(self, root: Unit, units: Sequence[Unit], device: torch.device) -> None:
        self.root = root
        self.units = list(units)
        shared = (unit.config.shared_streams for unit in units)
        before = (runtime_of(unit).streams for unit in units if unit.runtime is not None)
        given = next(filter(None, (*shared, *before)), None)
        self.streams: Streams = given or streams_for(device)
        num_units = UNITS_IN_FLIGHT if self.streams.stream_ordered else UNITS_IN_FLIGHT_ON_HOST
        blocks = [_largest_bytes(unit) for unit in self.units if not unit.encloses]
        self.reductions = ReductionsInFlight(num_units * max(blocks, default=_largest_bytes(root)))
        self._offloads = any(unit.config.offload for unit in units)
        self.is_last_backward = True
        self.held_open = False
        self.optimizer_event: Event = None
        self.schedule = Schedule()
        self.in_backward = False
        self.backward = Backward(self.streams.compute)
        self.lookahead = Lookahead(self.streams)
        self.residency = Residency()
        self.registry.trees.add(self)
        made = (kind.of(self) for kind in self.registry.tree_parts)
        self._parts = [part for part in made if part is not None]
        self.on = TreeEvents(self._parts)

    # -- forward ----------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, module: nn.Module | None = None) -> None:
        """Gather ``unit``, and start the gather of the unit that is expected next.

        Args:
            module: the module that is called, if ``unit`` has several.

        Raises:
            ModulesChanged: if another runtime has to be built first.
        """
        # Autograd calls nothing at the end of a backward that raised, so this is the first moment
        # to detect it.
        backward_raised = self.in_backward and not autograd_is_running()
        schedule = self.schedule
        # (None, where no root's forward has begun, encloses nothing.)
        if backward_raised or (schedule.root not in unit.enclosing and not self.in_backward):
            self._begin_forward(unit)
        self.on.forward_begins(unit)
        step = unit.step  # a reset makes a new one
        if self.in_backward:  # recomputation of activations
            unit.unshard(self.streams)
            step.recomputed = True
            if not step.backward_began and not unit.has_graph:
                unit.recomputes_all = True
            return
        if schedule.repeats is not None:
            self._free_repeated(unless=unit)
        follows = schedule.ran and schedule.ran[-1] is unit
        unit.registration.check(module if follows else None)
        unit.unshard(self.streams)
        step.running += 1
        schedule.begin(unit)
        self.lookahead.gather(unit.forward_prefetch or schedule.next(self.lookahead.depth))

    def _begin_forward(self, unit: Unit) -> None:
        self.on.before_root_forward()
        if self.in_backward:  # of a backward that raised
            self.reset()
        if torch.jit.is_tracing():
            raise RuntimeError(NOT_TRACED.format("torch.jit.trace"))
        if self.schedule.root is not None:
            self.reset()
        if not all(u.registration.is_current() for u in self.units):
            raise ModulesChanged
        self.on.root_forward_begins()
        self.schedule.begin_root(unit, leads_to_backward=torch.is_grad_enabled())
        self.streams.before_gathers(self.optimizer_event)
        # It marks one optimizer step and no later write: the next forward waits for all of compute.
        self.optimizer_event = None
        is_asked = self.on.before_reuse is not UNHEARD
        for other in self.units:
            if other.state is not State.SHARDED or is_asked:
                self.free_written(other)
        self.release_gradients()

    def release_gradients(self) -> None:
        """Free the memory of gradients that were dropped.

        `zero_grad` of modules and optimizers calls it. A forward calls it for gradients that were
        dropped by hand.
        """
        for unit in self.units:
            for bucket in unit.param_group.buckets:
                if bucket.grads is not None and not bucket.grads.is_free:
                    bucket.release_gradients()

    def before_zero_grad(self) -> None:
        """Let compute wait for the additions to gradients of a backward that raised: users may
        write the gradients next."""
        if self.in_backward and self.streams.stream_ordered and not autograd_is_running():
            with self.streams.ending(self.backward.stream):
                self.reductions.abandon(self.streams)

    def free_written(self, unit: Unit) -> None:
        """Free parameters that were gathered before their shards were written: they are outdated.

        Also if parameters were frozen or unfrozen while it was gathered, which changes a gather.
        """
        if unit.state is not State.SHARDED and (
            unit.param_group.freezing.adopt() or unit.is_stale()
        ):
            unit.reshard(self.streams)
        self.on.before_reuse(unit)

    def post_forward(
        self, unit: Unit, *, differentiable: bool, forward: Forward | None = None
    ) -> None:
        """Free ``unit`` as its policy requires, and note that this forward has ended.

        Args:
            differentiable: whether backward may reach this forward.
            forward: the object that the hooks on its outputs hold.
        """
        self.on.forward_computed(unit)
        if self.in_backward:
            return
        step = unit.step
        step.running = max(0, step.running - 1)
        if step.running:
            # A module of the unit inside another one, or inside itself; or one has raised, and its
            # caller continued. This one is still on the stack.
            called = modules_being_called()
            step.running = max(0, sum(called[module] for module in unit.modules) - 1)
        unit.has_graph = differentiable
        schedule, left = self.schedule, forward if differentiable else None
        if differentiable or (unit.recomputes_all and schedule.leads_to_backward):
            schedule.end(unit, left)
        outermost = schedule.root is unit and not step.running
        runs_next = step.running > 0 or unit in schedule.next(1)
        if unit.registration.check_is_due and not runs_next:
            unit.registration.check()
        after = self.residency.after_forward(
            unit,
            differentiable=differentiable,
            runs_next=runs_next,
            ends_forward=not outermost and schedule.is_last(unit),
        )
        if after is AfterForward.KEEP_FOR_BACKWARD:
            schedule.begins_backward = unit
            unit.register_sharded()
        elif after is AfterForward.KEEP or after is AfterForward.KEEP_TO_REPEAT:
            if after is AfterForward.KEEP_TO_REPEAT:
                schedule.repeats = unit
            self.on.unit_kept(unit, left)
        else:
            unit.reshard(self.streams, to_secondary=after is AfterForward.FREE_TO_SECONDARY)
        self.on.forward_ends(unit, left)
        if outermost:
            self._end_forward()
            if not differentiable:
                self.synchronize()  # else backward does

    def _free_repeated(self, *, unless: Unit | None = None) -> None:
        """Free the unit that was kept to run again, if it does not: another one runs, or none."""
        unit, self.schedule.repeats = self.schedule.repeats, None
        if unit is not None and unit is not unless and not unit.step.running:
            unit.reshard(self.streams)

    def _end_forward(self) -> None:
        if self.schedule.repeats is not None:
            self._free_repeated()
        for unit in self.units:
            unit.step.running = 0  # more if a forward raised and its caller continued
            if unit.state is State.GATHERING:  # prefetched, but did not run
                unit.reshard(self.streams)
        self.schedule.end_root()

    # -- backward ---------------------------------------------------------------------------

    def pre_backward(
        self, unit: Unit, forward: Forward | None = None, *, accumulates: bool | None = True
    ) -> None:
        """Gather ``unit`` and start the gather of the one that ran before it in forward.

        Args:
            forward: the forward that backward has reached.
            accumulates: whether this run of autograd accumulates gradients of the unit's
                parameters: ``autograd.grad`` does not. None: none are trained.
        """
        if self.in_backward and self.backward.end() is None:
            self.reset()  # an earlier backward raised, and no forward ran since
        group = unit.param_group
        if forward is not None and (group.dirty or forward.num_plans != group.num_plans):
            # Its graph refers to memory that no gather fills any more, and its gradients would go
            # to parameters that nothing reduces.
            raise parameters_are_gone(unit.name)
        self.begin_backward()
        self.on.backward_enters(unit, forward, accumulates)
        config, step = unit.config, unit.step
        entered = self.schedule.enter(unit, forward)
        if step.backward_began:
            if unit.state not in GATHERED and config.unshard_in_backward:
                unit.unshard(self.streams)
            return
        step.backward_began, step.entered_in = True, self.backward
        if accumulates is False or step.is_read_outside:
            self.on.gradients_apart(unit, accumulates)
        if not config.reduce_grads or unit.gradients.sums:
            unit.gradients.sum_in_reduce_dtype(wanted=not config.reduce_grads)
        if unit is self.schedule.begins_backward:
            self.schedule.begins_backward = None
            # Writes that happen on all ranks: those by operators on the DTensors.
            if group.versions()[1] != unit.gather.versions[1]:
                unit.reshard(self.streams)
        # If some were freed early, all that backward reads is there still.
        if unit.state is not State.PARTLY_FREED and config.unshard_in_backward:
            unit.unshard(self.streams)
        step.next_in_backward = None if entered is None else entered.unit_before()
        if unit.backward_prefetch:
            if entered is not None:
                # Not those that have been through backward already: their gathers would go
                # unused, and an optimizer in backward may be writing their shards.
                self.lookahead.gather(filter(entered.follows, unit.backward_prefetch))
        else:
            self.lookahead.in_backward(entered, step.next_in_backward)
        for parent in unit.enclosing:
            if parent.param_group.params:
                if parent.state in RESHARDED and parent.step.entered_in is not self.backward:
                    self._gather_passed(parent, entered or forward)
                self.on.backward_enters_inside(parent)

    def _gather_passed(self, parent: Unit, forward: Forward | None) -> None:
        """For a loss on an output inside ``parent``: backward reaches its earlier computations."""
        if forward is not None and forward.is_inside(parent) and parent.config.unshard_in_backward:
            parent.unshard(self.streams)

    def begin_backward(self) -> None:
        """A run of autograd has reached this tree: the end of that run ends this backward."""
        if self.in_backward:
            if self.backward.end() is None:
                # The failed one may have left gradients that no reset could tell from this one's.
                raise backward_not_over()
            return
        if self.schedule.root is not None:
            self._notice_failed_forward()
        self.on.backward_begins()
        self.in_backward = True
        for unit in self.units:  # users may have frozen parameters since the forward
            # (Compared here, as `Freezing.adopt` does: a call per unit would cost more than that.)
            freezing = unit.param_group.freezing
            if tuple(map(requires_grad_of, freezing.shown)) != freezing.trains:
                freezing.adopt()
                unit.param_group.show_freezing(midway=True)
        # Autograd forgets it when the backward is over, also when that raises.
        end = partial(self.end_backward)
        self.backward = Backward(
            self.streams.compute,
            number=self.backward.number + 1,
            in_iteration=True,
            creates_graph=torch.is_grad_enabled(),  # autograd sets it so for hooks
            adds_to_reductions=bool(self.reductions),
            end=weakref.ref(end),
        )
        Variable._execution_engine.queue_callback(end)

    @property
    def will_end_backward(self) -> bool:
        """Whether autograd is going to call `end_backward`."""
        return self.backward.end() is not None

    def _notice_failed_forward(self) -> None:
        """A forward has begun and not ended: it called this backward, or it has raised.

        If it raised, its running units must be freed like all others. The stack distinguishes the
        two cases; it is inspected in this rare case only.
        """
        running = modules_being_called()
        for unit in self.units:
            if not any(module in running for module in unit.modules):
                unit.step.running = 0
        if self.schedule.root is not None and not self.schedule.root.step.running:
            self.schedule.root = None

    def post_backward(self, unit: Unit) -> None:
        """The gradients of one forward of ``unit`` are done: reduce them and free the unit."""
        step = unit.step
        step.backward_began = False
        if step.input_nodes and not step.running:
            # From a recomputation that an exception ended early: the layers before the unit in the
            # same module would keep their activations until backward is over.
            step.input_nodes.clear()
        runs_next = step.next_in_backward is unit
        if runs_next and len(unit.modules) > 1:
            return  # another module of the group: their gradients are reduced together
        self.reduce(unit)
        if not runs_next and not step.running:
            if self.residency.frees_after_backward(unit, self.backward):
                unit.reshard(self.streams)
            else:
                self.on.unit_kept(unit, None)
        self.on.backward_leaves(unit)

    def reduce(
        self, unit: Unit, *, direct_only: bool = False, final: bool = False, keep: bool = False
    ) -> None:
        """Start the reduction of the gradients that ``unit`` has.

        Args:
            direct_only: only of parameters that are not packed; backward continues in ``unit``.
            keep: leave them to a later reduction, as without gradient sync.
        """
        config, gradients, on = unit.config, unit.gradients, self.on
        on.before_reduce(unit)
        if keep or not config.reduce_grads:
            gradients.keep_as_sums()
        else:
            # Even if there turns out to be nothing to reduce: with `reduce_unused` the end of
            # backward reduces all remaining units, and ranks must agree on which these are.
            unit.step.reduced = True
            taken = gradients.take(direct_only=direct_only)
            on.gradients_taken(unit, taken)
            reductions = gradients.make_reductions(taken, final=final)
            if reductions:
                on.reductions_launched(unit, reductions)
                told = not (on.before_completion is on.reduction_completed is UNHEARD)
                self.reductions.launch(
                    reductions,
                    self.streams,
                    unit_name=unit.name,
                    max_units=config.max_input_buffers,
                    tell=partial(self._tell_completion, unit) if told else None,
                )
        on.after_reduce(unit, direct_only)

    def _tell_completion(self, unit: Unit, reduction: Reduction, complete: bool) -> None:
        tell = self.on.reduction_completed if complete else self.on.before_completion
        tell(unit, reduction)

    @property
    def ends_iteration(self) -> bool:
        """Whether reductions that start now are the last before users read ``.grad``."""
        return self.is_last_backward and not self.held_open

    def end_backward(self) -> None:
        """Reduce what is left, and free all units; after the last backward, wait for everything."""
        # [Note: the end of backward]
        # Reductions first: their gradients are on the unsharded parameters, and the collectives
        # run while units are freed where the iteration does not end here. Completion comes before
        # `free_units`, which ends with the wait of the host: with offload, optimizers read
        # `.grad` on the host, so the copies that completion depends on must be behind that wait.
        # `in_backward` comes after: if anything above raises, the next forward finds it set, with
        # no autograd running, and resets the tree.
        with self.streams.ending(self.backward.stream):
            self.reduce_left()
            if self.ends_iteration:
                self.complete_iteration()
            self.free_units()
        self.schedule.begins_backward = None
        self.schedule.end_pass()
        self.in_backward = False
        self.on.backward_ends()

    def reduce_left(self) -> None:
        """Reduce what no hook has reduced, or accumulate it if this backward does not sync.

        Not while the iteration is held open: the number of further backwards is unknown, and ranks
        must agree on the number of reductions.
        """
        if self.ends_iteration:
            # Sums over shards must exist before it is known what waits for an all-reduce.
            self.reductions.start_all_reduces(self.streams)
        # In reverse tree order, not in autograd's order: gradients that no hook has seen have no
        # order that all ranks share.
        for unit in reversed(self.units):
            config, gradients, step = unit.config, unit.gradients, unit.step
            leave = self.held_open and config.sync_grads
            if leave:
                self.reduce(unit, keep=True)
            else:
                if gradients.has_unreduced() or (config.reduce_unused and not step.reduced):
                    group = unit.param_group
                    if unit.state in RESHARDED and (group.dirty or not group.materialized):
                        unit.plan_anew(self.streams)  # no forward has done so since a change
                    self.reduce(unit, final=True)
                step.reduced = False
            step.backward_began = False
            gradients.holds_earlier = leave or not config.reduce_grads
            gradients.holds_partial_sums = not config.all_reduce_grads
        self.on.backward_reduced()

    def complete_reductions(self) -> None:
        """Wait for the reductions in flight, and attach ``.grad``."""
        try:
            self.reductions.complete(self.streams)
        except Exception:
            self.give_up()
            raise

    def give_up(self) -> None:
        """A reduction or a user's hook has failed: treat the tree as after a backward that raised.

        The next use resets it. Waiting again would attach gradients that were not reduced.
        """
        self.in_backward = True

    def complete_iteration(self) -> None:
        """Wait for the reductions. Afterwards users may read ``.grad``."""
        self.complete_reductions()
        self.on.iteration_ends()  # if this raises, all of these gradients count as incomplete
        self.reductions.attached.clear()
        self.reductions.added.clear()
        self.backward.in_iteration = False
        if self.backward.creates_graph:
            self.on.graph_created()
        self.schedule.end_iteration()

    def free_units(self) -> None:
        backward, frees = self.backward, self.residency.frees_after_backward
        for unit in self.units:
            if unit.step.running:
                continue  # backward ran inside of its forward, which continues
            if unit.step.input_nodes:
                # Recomputation ends a forward by an exception, and its graph would stay alive.
                unit.step.input_nodes.clear()
            if unit.state is not State.SHARDED and frees(unit, backward):
                unit.reshard(self.streams)
            elif unit.state is not State.SHARDED:
                if unit.state is State.GATHERING:
                    unit.wait_unshard(self.streams)  # or the optimizer would overtake it
                self.on.unit_kept(unit, None)
            if backward.creates_graph and unit.config.reshard_after_backward:
                unit.register_sharded()
        self.synchronize()

    def synchronize(self) -> None:
        """Let the host wait for all streams: users may read and write offloaded tensors."""
        if self._offloads:
            self.streams.synchronize()

    def drop_gradients(self, unit: Unit) -> None:
        """Drop every gradient of ``unit`` that is in no ``.grad`` of a sharded parameter yet."""
        unit.gradients.drop()
        self.on.gradients_dropped(unit)

    # -- outside of a step --------------------------------------------------------------------

    def unshard_for_user(self, unit: Unit) -> None:
        """Start a gather that the user called for."""
        if self.in_backward and not autograd_is_running():
            self.reset()  # after a backward that raised: the next one starts fresh
        self.streams.before_gathers(self.optimizer_event)
        if unit.state in RESHARDED:
            self.free_written(unit)
            unit.start_unshard(self.streams)
        unit.hooks.notice_accumulation()  # parameters may be used without a forward of the unit

    def wait_unshard(self, unit: Unit) -> None:
        outside_torch_modes(unit.unshard, self.streams)

    def reshard(self, unit: Unit) -> None:
        """Free ``unit``, including its cached buckets. Tensors that users put into modules stay."""
        given = unit.registration.given_by_others()
        unit.reshard(self.streams)
        unit.drop_cache(self.streams)
        put(given)

    def check_root(self, unit: Unit, method: str) -> None:
        """
        Raises:
            RuntimeError: if ``unit``, on which ``method`` was called, is not the root.
        """
        if self.root is not unit:
            raise RuntimeError(
                f"{method} must be called on the root FSDP module '{self.root.name}', not on "
                f"'{unit.name}'"
            )

    # -- recovery ---------------------------------------------------------------------------

    def reset(self, *, discard: bool = False) -> None:
        """Finish what is in flight, free every unit and forget the failed iteration.

        Args:
            discard: also drop the gradients of micro-batches before the failed one.

        Raises:
            RuntimeError: after all that, if gradients of such micro-batches are lost, since a
                backward that raised has added to them.
        """
        lost: list[str] = []
        errors: list[RuntimeError] = []
        if self.in_backward or discard:
            self.on.backward_abandoned(errors)
            lost = [
                unit.name
                for unit in self.units
                if not discard
                and (self.backward.adds_to_reductions or unit.gradients.has_unreduced_from_before())
                and unit.param_group.params
            ]
            with self.streams.ending(self.backward.stream):
                mixed = self.reductions.discard(self.streams)
            if not discard:
                of = {param: unit.name for unit in self.units for param in unit.params}
                lost += dict.fromkeys(of[param] for param in mixed if of[param] not in lost)
            for unit in self.units:
                self.drop_gradients(unit)
        if discard:
            for param in (param for unit in self.units for param in unit.params):
                param.sharded.grad = None
        # After a failed forward: reductions in flight belong to earlier, successful backwards.
        self.complete_reductions()
        for unit in self.units:
            if unit.state is not State.SHARDED:
                unit.param_group.freezing.adopt()  # done since, to what is gathered
            unit.reshard(self.streams)
            unit.drop_cache(self.streams)
            unit.step = StepState(is_read_outside=unit.step.is_read_outside)
        self.synchronize()
        self.schedule.end_iteration()
        self.schedule.end_pass()
        self.schedule.repeats = self.schedule.begins_backward = None
        self.in_backward = self.backward.in_iteration = False
        self.schedule.root = None
        self.on.tree_reset()
        # Last: a caller that continues without these gradients finds a working tree.
        for error in errors:
            raise error
        if lost:
            raise accumulation_lost(lost)


def runtime_of(unit: Unit) -> Runtime:
    """The runtime of the tree that ``unit`` is in; it exists from the first forward on."""
    return unit.runtime  # type: ignore[return-value]


def _largest_bytes(unit: Unit) -> int:
    """The larger of what a unit gathers and what it reduces: replicated units gather nothing."""
    reduced = sum(
        slot.full_numel * bucket.gather_dtype.itemsize
        for bucket in unit.buckets
        for slot in bucket.layout.slots
    )
    return max(unit.gathered_bytes, reduced)
