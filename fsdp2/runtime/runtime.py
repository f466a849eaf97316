"""The order of things in one tree of units: who is gathered, freed and reduced when.

A `Runtime` belongs to a root, the outermost sharded module. The hooks call it at four points of
every unit (before and after forward and backward) and autograd calls it at the end of backward.
It records the order in which units ran: the order of the last forward predicts what to gather next
in this one, and the reverse of this forward what to gather next in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import nn
from torch.autograd import Variable

from ..comm.streams import Event, Streams, streams_for
from ..common.failures import accumulation_lost, parameters_are_gone
from ..common.steppers import registered as registered_steppers
from ..features.finalization import Finalization
from ..features.frozen_cache import choose_cached
from ..features.functional_call import in_functional_call
from ..features.gather_budget import MAX_AHEAD, GatherBudget, units_before
from ..features.partial_gradients import run_deferred
from ..features.steps_in_backward import EarlySteps
from ..guards.rank_agreement.first_forward import FirstForward
from ..guards.unwritten import warn_of_unwritten
from .forwards import Forwards, Pass, modules_being_called
from .param_group import requires_grad_of
from .reduction import ReductionsInFlight
from .registration import ModulesChanged, put
from .states import GATHERED, RESHARDED, AfterForward, State
from .torch_modes import NOT_TRACED, autograd_is_running, outside_torch_modes
from .unit import Forward, Unit

# How many units' worth of gradients may be on their way before compute waits for the oldest.
# On host-ordered devices little overlaps, and memory counts more.
UNITS_IN_FLIGHT = 2
UNITS_IN_FLIGHT_ON_HOST = 1


class Runtime:
    """State shared by the units of one tree.

    Attributes:
        units: all units, in the order of the module tree; ``root`` is the outermost.
        streams: the streams and the order between them.
        reductions: reductions that were launched and are not complete.
        creates_graph: whether the last backward was called with ``create_graph=True``: a second one
            may go through it, and reads the weights again.
        is_last_backward: whether the end of the next backward waits for the reductions.
        finalization: whether the caller ends the iteration instead.
        first_forward: what ranks compare before the first forward; None: nothing (any more).
        forwards: forwards that backward may still reach.
        budget: the limit on gathered bytes, if there is one.
        computed_on: the stream of the last backward, on which it ends; of devices that have some.
        early_steps: what was stepped in backward; None where no optimizer does that.
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
        self.finalization = Finalization(root.config.manual_finalization)
        self.early_steps: EarlySteps | None = None
        self.first_forward: FirstForward | None = None
        self.optimizer_event: Event = None
        # Forward: the unit whose forward is the outermost now, and the order of units' forwards.
        self.forward_root: Unit | None = None
        self.orders: dict[Unit, list[Unit]] = {}  # by the outermost unit
        self.forward_order: list[Unit] = []
        self.this_forward: list[Unit] = []
        self.predicted = False
        self._leads_to_backward = False
        self.in_backward = False
        self._adds_to_reductions = False
        self.computed_on = self.streams.compute
        self._accumulates = False  # whether this backward accumulates gradients of any unit
        self._end: weakref.ref[object] = weakref.ref(self)  # dead once a backward is over or raised
        self.creates_graph = False
        self._num_forwards = self.num_backwards = 0
        self.forwards = Forwards()
        self._carried_unit: Unit | None = None
        self._kept_unit: Unit | None = None  # as it was expected to run again at once
        self._entered: Forward | None = None  # that backward reached last; with a budget
        self.limit_gathered(root.config.max_gathered_bytes)
        self._borrows = False  # whether this forward is inside `torch.func.functional_call`
        # Of the unit between two of whose modules forward is. Whatever happens here ends it.
        self.middle: Pass | None = None

    # -- forward ----------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, module: nn.Module | None = None) -> None:
        """Gather ``unit``, and start the gather of the unit that is expected next.

        Args:
            module: the module that is called, if ``unit`` has several.

        Raises:
            ModulesChanged: if another runtime has to be built first.
        """
        self.middle = None
        # Autograd calls nothing at the end of a backward that raised, so the first moment at which
        # that can be seen is now.
        backward_raised = self.in_backward and not autograd_is_running()
        if self.in_backward and not backward_raised:  # recomputation of activations
            if unit.registration.overrides:
                unit.registration.forget_overrides()
            unit.unshard(self.streams)
            unit.recomputed = True
            if not unit.backward_began and not unit.has_graph:
                unit.recomputes_all = True
            return
        begins = self.forward_root is None or self.forward_root not in unit.enclosing
        if begins or backward_raised:
            self._begin_forward(unit)
        if self._kept_unit is not None:
            self._free_kept(beside=unit)
        order, position = self.forward_order, len(self.this_forward)
        follows = position > 0 and self.this_forward[-1] is unit
        unit.registration.check(module if follows else None)
        unit.unshard(self.streams)
        unit.running += 1
        self.this_forward.append(unit)
        by_hand = unit.forward_prefetch
        if by_hand:
            self._prefetch(by_hand)
            return
        if self.predicted:
            if position < len(order) and order[position] is unit:
                self._prefetch(order[position + 1 : position + 1 + self._ahead])
            else:
                self.predicted = False

    def _begin_forward(self, unit: Unit) -> None:
        self._borrows = in_functional_call()
        if self._borrows:
            # Before anything registers parameters, as `reset` does.
            for other in self.units:
                other.registration.note_lent()
        if self.in_backward:  # of a backward that raised
            self.reset()
        if self.finalization.pending is not None:
            self.finalization.check_forward()
        if torch.jit.is_tracing():
            raise RuntimeError(NOT_TRACED.format("torch.jit.trace"))
        if self.forward_root is not None:
            self.reset()
        if not self._borrows and not all(u.registration.is_current() for u in self.units):
            raise ModulesChanged
        if self.early_steps is not None:
            self.early_steps.check_forward()
        # Before anything is gathered: ranks with different models would hang in the first gather,
        # and could not say why.
        if self.first_forward is not None and self.first_forward.is_due():
            self.first_forward.compare()
            self.first_forward = None
        self.forward_root = unit
        self.forwards.begin(unit)
        self._leads_to_backward = torch.is_grad_enabled()
        self.streams.before_gathers(self.optimizer_event)
        # It marks one optimizer step and no later write: the next forward waits for all of compute.
        self.optimizer_event = None
        self.forward_order = self.orders.get(unit, [])
        self.predicted = bool(self.forward_order)
        self.this_forward = []
        for other in self.units:
            if other.state is not State.SHARDED or other.config.keep_frozen is not None:
                self.free_written(other)
        for other in self.units:
            if other.weight_grads_deferred:
                self.take_weight_gradients(other)
        self.release_gradients()
        # Who writes to gathered parameters does so in every step. Looking takes a tenth of a
        # microsecond per parameter: it is done before forwards 1, 2, 4, 8 and so on.
        self._num_forwards += 1
        if self._num_forwards.bit_count() == 1:
            for other in self.units:
                other.look_for_lost_writes()

    def release_gradients(self) -> None:
        """Free the memory of gradients that were dropped.

        `zero_grad` of modules and optimizers calls it; a forward does for what was dropped by hand.
        """
        for unit in self.units:
            for bucket in unit.param_group.buckets:
                if bucket.grads is not None and not bucket.grads.is_free:
                    bucket.release_gradients()

    def before_zero_grad(self) -> None:
        """Let compute wait for what a backward that raised still adds to gradients: users may write
        them next."""
        if self.in_backward and self.streams.stream_ordered and not autograd_is_running():
            with self.streams.ending(self.computed_on):
                self.reductions.abandon(self.streams)

    def free_written(self, unit: Unit) -> None:
        """Free what was gathered before its shards were written: it has to be gathered again.

        So does what was frozen or thawed while it was gathered: gathers look at that.
        """
        if unit.state is not State.SHARDED and (
            unit.param_group.take_freezing() or unit.is_stale()
        ):
            unit.reshard(self.streams)
        if unit.config.keep_frozen is not None:
            written = [b for b in unit.buckets if b.cache_valid and not b.cache_is_current()]
            if written:
                unit.reshard(self.streams)
                unit.drop_cache(self.streams, written)

    def post_forward(
        self, unit: Unit, *, differentiable: bool, forward: Forward | None = None
    ) -> None:
        """Free ``unit``, as far as its policy says, and note that this forward has ended.

        Args:
            differentiable: whether backward may reach this forward.
            forward: the object that the hooks on its outputs hold.
        """
        self.middle = None
        if self.in_backward:
            return
        unit.running = max(0, unit.running - 1)
        if unit.running:
            # A module of the unit inside another one, or inside itself; or one has raised, and its
            # caller went on. This one is still on the stack.
            called = modules_being_called()
            unit.running = max(0, sum(called[module] for module in unit.modules) - 1)
        unit.has_graph = differentiable
        if differentiable or (unit.recomputes_all and self._leads_to_backward):
            self.forwards.note(unit, forward if differentiable else None)
        outermost = self.forward_root is unit and not unit.running
        order, position = self.forward_order, len(self.this_forward)
        runs_next = self.predicted and position < len(order) and order[position] is unit
        runs_next = runs_next or unit.running > 0
        if unit.registration.check_is_due and not runs_next:
            unit.registration.check()
        after = unit.after_forward(
            differentiable=differentiable,
            runs_next=runs_next,
            ends_forward=self.predicted
            and not outermost
            and position == len(order)
            and self.this_forward[-1] is unit,
        )
        if unit.registration.overrides:
            # torch puts back the tensors that it found: they must not be without memory then.
            after = _AS_FOUND.get(unit.registration.registered_before, after)
        if after is AfterForward.KEEP:
            if runs_next and unit.reshard_after_forward is not False:
                self._kept_unit = unit
            config = unit.config
            only_for_backward = (
                config.reshard_after_forward is None and config.reshard_after_backward
            )
            if unit.encloses and differentiable and only_for_backward:
                unit.free_embeddings_early(self.streams)
            if self.budget is not None and not outermost:
                self._show_shards(unit)
        elif after is AfterForward.CARRY:
            self._carried_unit = unit
            unit.register_sharded()
        else:
            secondary = after is AfterForward.FREE_TO_SECONDARY
            unit.reshard(self.streams, to_secondary=secondary)
        if unit.registration.overrides:
            unit.registration.put_back_overrides()
        if self.budget is not None and self.predicted and not unit.forward_prefetch:
            # What did not fit when this unit began may fit now.
            self._prefetch(order[position : position + self._ahead])
        if outermost:
            self._end_forward()
            if not differentiable and self._offloads:
                self.streams.synchronize()  # else backward does; then the host may write shards

    def _free_kept(self, *, beside: Unit | None = None) -> None:
        """Free the unit that was kept to run again, if it does not: another one runs, or none."""
        unit, self._kept_unit = self._kept_unit, None
        if unit is not None and unit is not beside and not unit.running:
            unit.reshard(self.streams)

    def _end_forward(self) -> None:
        if self._kept_unit is not None:
            self._free_kept()
        for unit in self.units:
            unit.running = 0  # more where a forward raised, and its caller went on
            if unit.state is State.GATHERING:  # prefetched, but did not run
                unit.reshard(self.streams)
        if self._borrows:
            for unit in self.units:
                unit.registration.forget_lent()
        assert self.forward_root is not None
        self.orders[self.forward_root] = self.this_forward
        self.forward_root = None

    def _prefetch(self, units: Iterable[Unit]) -> None:
        if self.budget is not None:
            self.budget.gather_ahead(units, self.streams)
            return
        for unit in units:
            if unit.state in RESHARDED:
                unit.start_unshard(self.streams)

    # -- backward ---------------------------------------------------------------------------

    def pre_backward(
        self, unit: Unit, forward: Forward | None = None, *, accumulates: bool | None = True
    ) -> None:
        """Gather ``unit`` and start the gather of the one that ran before it in forward.

        Args:
            forward: the forward that backward has reached.
            accumulates: whether this run of autograd accumulates gradients of the unit's
                parameters. If not (``autograd.grad``), another run may compute them, and the user
                assign them: zero-bubble pipelines do. No hook is called there. None: none are
                trained.
        """
        if self.in_backward and self._end() is None:
            self.reset()  # an earlier backward raised, and no forward ran since
        group = unit.param_group
        if forward is not None and (group.dirty or forward.num_plans != group.num_plans):
            # What its graph has saved is memory that no gather fills any more, and its gradients
            # would go to parameters that nothing reduces.
            raise parameters_are_gone(unit.name)
        self.begin_backward()
        config = unit.config
        entered = self.forwards.enter(unit, forward)
        before = None if entered is None else entered.unit_before()
        if unit.backward_began:
            if unit.state not in GATHERED and config.unshard_in_backward:
                unit.unshard(self.streams)
            return
        unit.backward_began, unit.entered_in = True, self.num_backwards
        if accumulates is False:
            unit.weight_grads_deferred = True
        elif self.ends_iteration:
            unit.weight_grads_deferred = False
        self._accumulates |= bool(accumulates)
        if not config.reduce_grads or unit.gradients.sums:
            unit.gradients.sum_in_reduce_dtype(wanted=not config.reduce_grads)
        if unit is self._carried_unit:
            self._carried_unit = None
            if unit.is_rewritten():
                unit.reshard(self.streams)
        # If some were freed early, all that backward reads is there still.
        if unit.state is not State.PARTLY_FREED and config.unshard_in_backward:
            unit.unshard(self.streams)
        if unit.backward_prefetch:
            if entered is not None:
                # Not those that have been through backward already: their gathers would go
                # unused, and an optimizer in backward may be writing their shards.
                self._prefetch(filter(entered.follows, unit.backward_prefetch))
        elif self.budget is not None:
            self._entered = entered
            self._prefetch(units_before(entered))
        elif before is not None and before.config.unshard_in_backward:
            self._prefetch((before,))
        unit.next_in_backward = before
        for parent in unit.enclosing:
            if parent.param_group.params:
                if parent.state in RESHARDED and parent.entered_in != self.num_backwards:
                    self._gather_passed(parent, entered or forward)
                self._reduce_early(parent)

    def _gather_passed(self, parent: Unit, forward: Forward | None) -> None:
        """A loss of an output inside of ``parent``: backward comes to what it computed before."""
        if forward is not None and forward.is_inside(parent) and parent.config.unshard_in_backward:
            parent.unshard(self.streams)

    def begin_backward(self) -> None:
        """A run of autograd has reached this tree: the end of that run ends this backward."""
        if self.in_backward:
            return
        if self.forward_root is not None:
            self._notice_failed_forward()
        if registered_steppers:
            self.early_steps = self.early_steps or EarlySteps()
            self.early_steps.begin_backward()
        self.in_backward = True
        self.middle = None
        for unit in self.units:  # what users have frozen since the forward
            # (Compared here, as `follow_freezing` does: a call per unit would cost more than that.)
            group = unit.param_group
            if tuple(map(requires_grad_of, group.shown)) != group.trains:
                group.follow_freezing(midway=True)
        # Those of earlier backwards of the iteration cannot be told from this one's any more.
        self._adds_to_reductions = bool(self.reductions)
        self._accumulates = False
        self.computed_on = self.streams.compute
        self.creates_graph = torch.is_grad_enabled()  # autograd sets it so for hooks
        self.finalization.active = True
        self.num_backwards += 1
        # Autograd forgets it when the backward is over, also when that raises.
        end = partial(self.end_backward)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    @property
    def will_end_backward(self) -> bool:
        """Whether autograd is going to call `end_backward`."""
        return self._end() is not None

    def _notice_failed_forward(self) -> None:
        """A forward has begun and not ended: it called this backward, or it has raised.

        Units that were running in one that raised are to be freed like all others. The stack tells
        the two apart; it is looked at in this rare case only.
        """
        running = modules_being_called()
        for unit in self.units:
            if not any(module in running for module in unit.modules):
                unit.running = 0
        if self.forward_root is not None and not self.forward_root.running:
            self.forward_root = None

    def post_backward(self, unit: Unit) -> None:
        """The gradients of one forward of ``unit`` are done: reduce them and free the unit."""
        unit.backward_began = False
        if unit.input_nodes and not unit.running:
            # Of a recomputation that ended early, by an exception: what is before the unit in the
            # same module would keep its activations until backward is over.
            unit.input_nodes.clear()
        runs_next = unit.next_in_backward is unit
        if runs_next and len(unit.modules) > 1:
            return  # another module of the group: their gradients are reduced together
        self.reduce(unit)
        if not runs_next and not unit.running:
            if self._frees(unit):
                unit.reshard(self.streams)
            elif self.budget is not None:
                self._show_shards(unit)
        if self._entered is not None:
            self._prefetch(units_before(self._entered))

    def _frees(self, unit: Unit) -> bool:
        """Whether backward frees ``unit``: not if a second backward is to go through it."""
        return unit.config.reshard_after_backward and not self.creates_graph

    def reduce(self, unit: Unit, *, direct_only: bool = False, final: bool = False) -> None:
        """Start the reduction of the gradients that ``unit`` has."""
        config, gradients = unit.config, unit.gradients
        if not config.reduce_grads:
            gradients.keep_as_sums()
            return
        # Even if there turns out to be nothing to reduce: with `reduce_unused` the end of backward
        # reduces each unit that was not, and all ranks must agree on which.
        unit.reduced = True
        # Before freeing: it tells which gradients are complete, and only parameters of those may be
        # freed while backward goes on.
        taken = gradients.take(direct_only=direct_only, may_defer=self.ends_iteration)
        if unit.encloses and self.in_backward and self._frees(unit):
            unit.free_reduced_early(taken, self.streams)
        reductions = gradients.make_reductions(taken, final=final)
        if reductions:
            early = self.early_steps
            self.reductions.launch(
                reductions,
                self.streams,
                unit_name=unit.name,
                max_units=config.max_input_buffers,
                completed=None if early is None else early.follow(self, unit),
            )

    def _reduce_early(self, parent: Unit) -> None:
        """Reduce large gradients of an enclosing unit that are already complete.

        The head of a language model belongs to the root, and its gradient is done when backward
        enters the last block. Otherwise it would be held until the embedding's is done, too.
        """
        config = parent.config
        if not (parent.backward_began and config.reduce_grads) or parent.gradients.holds_earlier:
            return
        if config.reduce_unused:
            return  # which gradients are complete by now differs from rank to rank
        self.reduce(parent, direct_only=True)

    @property
    def ends_iteration(self) -> bool:
        """Whether the reductions that start now are the last ones before users look at ``.grad``:
        those of the last backward, or of a manual finalization."""
        if self.finalization.manual:
            return self.finalization.reducing
        return self.is_last_backward

    def end_backward(self) -> None:
        """Reduce what is left, and free all units; after the last backward, wait for everything."""
        # [Note: the end of backward]
        # Reductions first: their gradients are on the unsharded parameters, and the collectives
        # run while units are freed where the iteration does not end here. Completion comes before
        # `free_units`, which ends with the wait of the host: with offload, optimizers read
        # `.grad` on the host, so the copies that completion depends on must be behind that wait.
        # `in_backward` is last: if anything above raises, the next forward finds it set, with
        # no autograd running, and resets the tree.
        with self.streams.ending(self.computed_on):
            self.reduce_left()
            if self.ends_iteration:
                self.complete_iteration()
            self.free_units()
        self._carried_unit = self._entered = None
        self.forwards.end_pass()
        self.in_backward = False

    def reduce_left(self) -> None:
        """Reduce what no hook has reduced, or accumulate it if this backward does not sync.

        With manual finalization it is left to the finalization: how many backwards are to come is
        not known, and ranks must agree on the number of reductions.
        """
        if self.ends_iteration:
            # What waits for an all-reduce is known only when sums over shards are there.
            self.reductions.start_all_reduces(self.streams)
        leaves_sync = self.finalization.manual and not self.finalization.reducing
        # In the order of the tree, and not of autograd: what no hook has seen has no order of its
        # own that all ranks would know.
        for unit in reversed(self.units):
            config, gradients = unit.config, unit.gradients
            leave = leaves_sync and config.sync_grads
            if leave:
                gradients.keep_as_sums()
            else:
                if gradients.are_left() or (config.reduce_unused and not unit.reduced):
                    group = unit.param_group
                    if unit.state in RESHARDED and (group.dirty or not group.materialized):
                        unit.plan_anew(self.streams)  # no forward of it has, since a change
                    self.reduce(unit, final=True)
                unit.reduced = False
            if config.reduce_unused and (self.ends_iteration or not self._accumulates):
                # Ranks come to other units, and must agree on what may be freed.
                unit.weight_grads_deferred = not self._accumulates
                if not self._accumulates and unit.state is State.UNSHARDED:
                    unit.register_unsharded()
            unit.backward_began = False
            gradients.holds_earlier = leave or not config.reduce_grads
            if config.reduce_unused:
                gradients.note_trained()
            gradients.holds_partial_sums = not config.all_reduce_grads

    def complete_iteration(self) -> None:
        """Wait for the reductions. Afterwards users may look at ``.grad``."""
        self.reductions.complete(self.streams)
        deferred = [unit.gradients.deferred for unit in self.units]
        if any(of_unit.groups for of_unit in deferred):
            run_deferred(deferred)
        if self.creates_graph:
            for unit in self.units:
                unit.gradients.refuse_graph()
        self.reductions.attached.clear()
        self.reductions.added.clear()
        if self.early_steps is not None:
            self.early_steps.end_iteration()
        self.forwards.end_iteration()
        self.finalization.end()

    def free_units(self) -> None:
        for unit in self.units:
            if unit.running:
                continue  # backward ran inside of its forward, which goes on
            if unit.input_nodes:
                # Recomputation ends a forward by an exception. What its node leads to would stay.
                unit.input_nodes.clear()
            if unit.state is not State.SHARDED and self._frees(unit):
                unit.reshard(self.streams)
            elif unit.state is not State.SHARDED:
                if unit.state is State.GATHERING:
                    unit.wait_unshard(self.streams)  # or the optimizer would overtake it
                if self.budget is not None:
                    self._show_shards(unit)
            if self.creates_graph and unit.config.reshard_after_backward and not unit.running:
                unit.register_sharded()
        self.synchronize()

    def synchronize(self) -> None:
        """Let the host wait for all streams: users may read and write what is offloaded."""
        if self._offloads:
            self.streams.synchronize()

    # -- with a budget ----------------------------------------------------------------------

    def limit_gathered(self, max_bytes: int | None) -> None:
        """Set how many bytes of gathered parameters there may be; None: any number."""
        budget = None if max_bytes is None else GatherBudget(max_bytes, self, self.units)
        if budget is not None:
            budget.shrink(self.streams)
        self.budget = budget
        self._ahead = 1 if budget is None else MAX_AHEAD

    def _show_shards(self, unit: Unit) -> None:
        """Let the modules of ``unit``, which stays gathered, hold shards: see `gather_budget`."""
        if not (unit.running or unit.weight_grads_deferred or self.creates_graph):
            unit.register_sharded()

    # -- outside of a step --------------------------------------------------------------------

    def take_weight_gradients(self, unit: Unit) -> None:
        """Reduce, or add up in the dtype of the reduction, what no hook has seen."""
        if not (unit.weight_grads_deferred and unit.gradients.has_whole()):
            return
        if unit.config.reduce_unused:
            # Other ranks may have none: they meet at the end of the next backward with a reduction.
            unit.gradients.keep_as_sums()
        else:
            self.reduce(unit)

    def wait_unshard(self, unit: Unit) -> None:
        outside_torch_modes(unit.unshard, self.streams)

    def look_for_unwritten(self) -> None:
        """Before the first gather after ``to_empty``: warn of tensors that nothing has written."""
        marks = [mark for unit in self.units for mark in unit.param_group.unwritten]
        for unit in self.units:
            unit.param_group.unwritten = []
        warn_of_unwritten(self.root.modules[0], marks)

    def reshard(self, unit: Unit) -> None:
        """Free ``unit``, including its cached buckets. What users put into modules stays there."""
        given = unit.registration.given_by_others()
        unit.reshard(self.streams)
        unit.drop_cache(self.streams)
        put(given)

    def choose_cached(self) -> None:
        """Choose again which frozen parameters stay gathered."""
        chosen = choose_cached((unit.config.keep_frozen, unit.buckets) for unit in self.units)
        for unit in self.units:
            if unit.config.keep_frozen is not None:
                unit.keep(chosen, self.streams)
        if self.budget is not None:
            self.budget.follow_cached()

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
        stepped: RuntimeError | None = None
        if self.in_backward or discard:
            if self.early_steps is not None:
                stepped = self.early_steps.abandon()
            lost = [
                unit.name
                for unit in self.units
                if not discard
                and (self._adds_to_reductions or unit.gradients.earlier_are_left())
                and unit.param_group.params
            ]
            with self.streams.ending(self.computed_on):
                mixed = self.reductions.discard(self.streams)
            if not discard:
                of = {param: unit.name for unit in self.units for param in unit.params}
                lost += dict.fromkeys(of[param] for param in mixed if of[param] not in lost)
            for unit in self.units:
                unit.gradients.drop()
        if discard:
            for param in (param for unit in self.units for param in unit.params):
                param.sharded.grad = None
        # After a failed forward: what is in flight is of earlier backwards, which were good.
        self.reductions.complete(self.streams)
        for unit in self.units:
            if unit.state is not State.SHARDED:
                unit.param_group.take_freezing()  # done since, to what is gathered
            unit.reshard(self.streams)
            unit.drop_cache(self.streams)
            unit.backward_began = False
            unit.forwards.clear()
            unit.running = 0
        self.synchronize()
        self.forwards.end_iteration()
        self.forwards.end_pass()
        self._carried_unit = self._kept_unit = self._entered = self.middle = None
        self.in_backward = False
        self.finalization.end()
        self.forward_root = None
        # Last: a caller that goes on without these gradients finds a tree that works.
        if stepped is not None:
            raise stepped
        if lost:
            raise accumulation_lost(lost)


# After a forward with others, by what of its own parameters `torch.func.functional_call` found.
_AS_FOUND = {"unsharded": AfterForward.KEEP, "secondary": AfterForward.FREE_TO_SECONDARY}


def runtime_of(unit: Unit) -> Runtime:
    """The runtime of the tree that ``unit`` is in; it exists from the first forward on."""
    return unit.runtime  # type: ignore[return-value]


def last_order(root: Unit) -> list[Unit]:
    """The units in the order of the last forward of ``root``; repeats in a row count once."""
    orders = {} if root.runtime is None else root.runtime.orders
    return [unit for unit, _ in groupby(orders.get(root, ()))]


def _largest_bytes(unit: Unit) -> int:
    """The larger of what a unit gathers and what it reduces: replicated units gather nothing."""
    reduced = sum(
        slot.full_numel * bucket.gather_dtype.itemsize
        for bucket in unit.buckets
        for slot in bucket.layout.slots
    )
    return max(unit.gathered_bytes, reduced)
