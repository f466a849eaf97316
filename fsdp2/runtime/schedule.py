"""What ran in a tree of units, what is expected next, and where backward may still come to. Also
the policies that follow from it: what to gather ahead, and what stays gathered.

The order of the last forward predicts the next one. Backward may run at any time and in pieces:
inside the loss, inside another forward, for inputs now and for weights later, for one micro-batch
while others wait. So the number of backwards does not show how much is left. Every forward of a
unit makes a `Forward`. It is held by the hooks on its outputs, by the forwards that ended after it,
and by the schedule until the pass ends. So it lives as long as backward may reach one of these.

Nothing here imports torch. All ranks must gather alike, so gathers follow from program order, which
ranks share, and from where backward has been. They do not depend on whether a graph still exists:
this may differ between ranks, for example if only one rank keeps a loss to print it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.streams import Streams
from .states import RESHARDED, AfterForward
from .unit import Forward, Unit, is_awaited

# Forwards without a graph that are remembered; more of them are never recomputed.
MAX_UNGRAPHED = 4096
MIN_FORWARDS = 8  # of a unit, before completed ones are searched for


class Schedule:
    """The forwards of one tree of units.

    Attributes:
        root: the unit whose forward is the outermost now; None: no forward runs.
        orders: the units of the last forward, by the outermost one.
        expected: the units of the last forward of ``root``.
        ran: the units of this forward so far.
        predicted: whether ``expected`` starts with ``ran``.
        leads_to_backward: whether this forward began with gradients enabled.
        repeats: the unit that stays gathered, as it is expected to run again at once.
        begins_backward: the unit that stays gathered, as backward is expected to begin with it.
        outstanding: the numbers of outermost forwards of this iteration with a graph that backward
            has not reached.
    """

    def __init__(self) -> None:
        self.root: Unit | None = None
        self.orders: dict[Unit, list[Unit]] = {}
        self.expected: list[Unit] = []
        self.ran: list[Unit] = []
        self.predicted = self.leads_to_backward = False
        self.repeats: Unit | None = None
        self.begins_backward: Unit | None = None
        self.outstanding: set[int] = set()
        # Of the last one, the last that made a graph, and the last that backward has reached.
        self._number = self._left_graph = self._reached = 0
        self._outermost: Unit | None = None
        self._last: Forward | None = None
        self._began: set[Unit] = set()
        self._ungraphed: list[Forward] = []

    # -- forward ----------------------------------------------------------------------------

    def begin_root(self, unit: Unit, *, leads_to_backward: bool) -> None:
        """An outermost forward, of ``unit``, begins.

        If the unit had one before in this pass, this is another pass over the model. (A pass may
        have several outermost forwards, for layers that are called one by one.)
        """
        if unit in self._began:
            self.end_pass()
        self._began.add(unit)
        self.root = self._outermost = unit
        self._number += 1
        self.expected = self.orders.get(unit, [])
        self.predicted = bool(self.expected)
        self.ran = []
        self.leads_to_backward = leads_to_backward

    def begin(self, unit: Unit) -> None:
        """A forward of ``unit`` begins, inside of ``root`` or of ``root`` itself."""
        order, position = self.expected, len(self.ran)
        if self.predicted and not unit.forward_prefetch:  # (with it, the user sets the next ones)
            self.predicted = position < len(order) and order[position] is unit
        self.ran.append(unit)

    def next(self, num: int) -> Sequence[Unit]:
        """The units of the next forwards, at most ``num``; none if they are not known."""
        position = len(self.ran)
        return self.expected[position : position + num] if self.predicted else ()

    def is_last(self, unit: Unit) -> bool:
        """Whether the forward of ``unit`` was the last one inside of ``root``."""
        return self.predicted and len(self.ran) == len(self.expected) and self.ran[-1] is unit

    def end_root(self) -> None:
        """The outermost forward has ended."""
        assert self.root is not None
        self.orders[self.root] = self.ran
        self.root = None

    def end_pass(self) -> None:
        """A backward is over: another pass follows."""
        self._began.clear()
        # Each forward holds the one before it. Without this cut, a loss that is never freed would
        # hold the forwards of all earlier steps.
        self._last = None

    def end_iteration(self) -> None:
        """A backward that ends an iteration is over: stop waiting for graphs of forwards before the
        last one that it reached."""
        if self.outstanding:
            self.outstanding = {number for number in self.outstanding if number > self._reached}
        if self._ungraphed:
            self.forget_ungraphed()

    def drop_held(self) -> None:
        """Stop holding forwards of earlier passes: then only graphs keep them alive."""
        self.end_pass()
        # Backward recomputes these on its way to a graph. If there is no graph, this cannot happen;
        # if there is one, the recomputation is not recognized, which costs a prefetch.
        self._ungraphed.clear()

    def end(self, unit: Unit, forward: Forward | None) -> None:
        """A forward of ``unit`` has ended that backward may reach.

        Args:
            forward: None for one that has no graph and is recomputed in backward.
        """
        if forward is None:
            forward = Forward(unit)
            if len(self._ungraphed) >= MAX_UNGRAPHED:
                self.forget_ungraphed()
            self._ungraphed.append(forward)
        elif self._left_graph != self._number:
            self._left_graph = self._number
            self.outstanding.add(self._number)
        forward.noted = True
        forward.outermost, forward.number = self._outermost, self._number
        forward.previous, self._last = self._last, forward
        # References to dropped graphs are removed here: evaluations without `no_grad` leave one per
        # call. Not in every forward: the list is as long as the unit has modules.
        step = unit.step
        if len(step.forwards) >= unit.max_forwards:
            step.forwards = [ref for ref in step.forwards if is_awaited(ref)]
            unit.max_forwards = 2 * len(step.forwards) + MIN_FORWARDS
        step.forwards.append(weakref.ref(forward))

    def enter(self, unit: Unit, forward: Forward | None) -> Forward | None:
        """Backward has reached ``forward``, or the forward that this one recomputes.

        Returns:
            The forward, if it is known and backward reaches it for the first time.
        """
        # One that is not noted ran inside backward: it recomputes activations. It repeats the last
        # forward of the unit that backward has not reached.
        if forward is None or not (forward.noted or forward.entered):
            # (The ones after it are over for good and need no further search.)
            forward = None
            forwards = unit.step.forwards
            while forwards and (forward := is_awaited(forwards[-1])) is None:
                forwards.pop()
        if forward is None or forward.entered:
            return None
        forward.entered = True
        self._reached = forward.number
        if forward.number in self.outstanding:
            self.outstanding.remove(forward.number)
        return forward

    def forget_ungraphed(self) -> None:
        """Backward is over: forwards it did not recompute will not be recomputed."""
        for forward in self._ungraphed:
            if not forward.entered:
                forward.unit.recomputes_all = False
        self._ungraphed.clear()


@dataclass(slots=True)
class Backward:
    """One run of autograd that has reached a tree of units.

    Attributes:
        stream: the stream that it runs and ends on, on devices that have streams.
        number: how many runs there have been, including it.
        in_iteration: whether its iteration continues.
        creates_graph: whether it was called with ``create_graph=True``: a second one may go through
            it, and reads the weights again.
        adds_to_reductions: whether it began with other reductions in flight, whose gradients can no
            longer be distinguished from its own.
        end: returns None once it is over or has raised.
    """

    stream: Any
    number: int = 0
    in_iteration: bool = False
    creates_graph: bool = False
    adds_to_reductions: bool = False
    end: Callable[[], object] = object


class Residency:
    """Decides what happens to gathered parameters when a forward or a backward leaves their unit.

    It depends only on settings and on the order of the last forward, which all ranks share: ranks
    that decided differently would hang at the next gather.
    """

    def after_forward(
        self, unit: Unit, *, differentiable: bool, runs_next: bool, ends_forward: bool
    ) -> AfterForward:
        """A forward of ``unit`` has ended.

        Args:
            differentiable: whether backward may reach this forward.
            runs_next: whether the unit is expected to run again at once.
            ends_forward: whether this is expected to be the last unit inside the root.
        """
        policy = unit.reshard_after_forward
        if not differentiable and unit.config.reshard_after_forward is None:
            policy = True  # the root is kept for backward, and none will come
        if runs_next and unit.reshard_after_forward is not False:
            return AfterForward.KEEP_TO_REPEAT
        if policy is False or runs_next:
            return AfterForward.KEEP
        if ends_forward and differentiable and policy is True:
            # The last unit of forward is the first of backward: freeing it would save nothing.
            # With an int the user asked for secondary shards instead.
            return AfterForward.KEEP_FOR_BACKWARD
        # Secondary shards only make the gather in backward cheaper. Without one they are waste.
        if type(policy) is int and differentiable and unit.config.unshard_in_backward:
            return AfterForward.FREE_TO_SECONDARY
        return AfterForward.FREE

    def frees_after_backward(self, unit: Unit, backward: Backward) -> bool:
        """Whether ``backward`` frees ``unit``: not if a second one may go through it."""
        return unit.config.reshard_after_backward and not backward.creates_graph


class Lookahead:
    """One unit ahead, in the order of the last forward and in the reverse of this one's.

    All ranks must gather alike, so the choice follows from program order and settings.

    Attributes:
        depth: how many units of the expected order a forward offers to `gather`.
    """

    depth = 1

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def gather(self, units: Iterable[Unit]) -> None:
        """Start the gathers of ``units``, which are expected in this order."""
        for unit in units:
            if unit.state in RESHARDED:
                unit.start_unshard(self._streams)

    def in_backward(self, entered: Forward | None, before: Unit | None) -> None:
        """Backward has reached ``entered`` for the first time; None: an unknown forward.

        Args:
            before: the unit that it is expected to reach next.
        """
        if before is not None and before.config.unshard_in_backward:
            self.gather((before,))
