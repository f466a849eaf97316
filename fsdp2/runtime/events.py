"""The events of a tree of units, through which the kernel calls optional parts of the library.

A part is a class that overrides the methods of the events it needs. The kernel does not depend on
which parts exist: each method of `UnitEvents` and `TreeEvents` calls the same method of every part
that overrides it, in the order of `parts.py`. An event without listeners costs a hook 50 ns.

There are two kinds of parts. A `UnitPart` is one object per process. It gets the events of units
from their creation on, and keeps its data about a unit in `Unit.of_parts`. (A weak dictionary would
not do: its values lead to parameters, their modules and the unit, and would keep it alive.)

A `TreePart` is made with the runtime of a tree, and gets the events of its steps. Events of a step
pass no unsharded parameters: a reference would keep memory alive, and references to them are
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from ..comm.mesh_transports import wrappers
from ..sharding.param import ShardedParam
from .reduction import Reduction
from .unit import Forward, GatherEvents, Unit
from .unit_grads import Taken

Runtime = Any  # of `runtime`, which imports this file: parts name the class


class UnitPart:
    """A part with events of all units of this process. It overrides those it needs."""

    def before_taking(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        """``unit`` is about to take ``params``; nothing has changed yet, so this may raise."""

    def before_sharding(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        """``params`` are still whole, and ``unit`` is about to shard them."""

    def sharded(self, unit: Unit) -> None:
        """`fully_shard` has made ``unit``, with its hooks."""

    def before_apply(self, unit: Unit, fn: object, modules: Iterable[nn.Module]) -> None:
        """``Module._apply`` is about to call ``fn`` on all tensors of ``modules``, of ``unit``."""

    def after_apply(self, unit: Unit) -> None:
        """``Module._apply`` has called it."""

    def merged(self, unit: Unit, former: Sequence[Unit]) -> None:
        """``unit`` has taken the places of ``former``."""

    def before_tree(self, root_module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        """``units`` are about to get a runtime; nothing has changed yet, so this may raise."""

    def modules_differ(self, root_module: nn.Module, units: Sequence[Unit]) -> None:
        """Modules of ``root_module`` may hold other parameters than ``units`` gave them. Each must
        move to the unit that gathers it wherever it is used. All ``units`` are sharded now."""

    def params_assigned(self, unit: Unit, keep_objects: bool) -> None:
        """A user may have put parameters into modules of ``unit``.

        Args:
            keep_objects: an optimizer may hold the unit's parameters, so take over only the data.
        """

    def before_materialize(self, units: Sequence[Unit]) -> None:
        """The order and parameters of ``units`` are settled, and nothing was gathered yet."""

    def before_setting(self, unit: Unit, name: str, value: object) -> None:
        """A setting of ``unit`` is about to change; this may raise."""

    def setting_changed(self, units: Sequence[Unit], name: str, value: object) -> None:
        """A setting that schedules change before each backward is now ``value`` for ``units``."""


class TreePart(GatherEvents):
    """A part of the runtime of one tree. It overrides the events that it needs."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        """The part for a tree whose runtime was just made; None if it is not needed there."""
        return cls(runtime)

    def before_root_forward(self) -> None:
        """A root's forward was called; nothing has changed yet, so this may raise."""

    def root_forward_begins(self) -> None:
        """Nothing is in flight, and nothing was gathered for it yet."""

    def before_reuse(self, unit: Unit) -> None:
        """A forward or a user is about to use the gathered parameters of ``unit`` again."""

    def forward_begins(self, unit: Unit) -> None:
        """``unit`` is about to be gathered, or stays gathered, for a forward of one of its modules,
        or for its recomputation (`Runtime.in_backward`)."""

    def forward_computed(self, unit: Unit) -> None:
        """A module of ``unit`` has its output, and nothing was freed yet. With a listener, all
        modules of a unit call their hooks; without, those between the first and last may not."""

    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        """``unit`` was freed, or kept, after ``forward``; None: a forward without a graph."""

    def unit_kept(self, unit: Unit, forward: Forward | None) -> None:
        """``unit`` stays gathered and registered after ``forward``, which has a graph; None: after
        a forward without one, after the unit's backward, or after the whole backward."""

    def backward_begins(self) -> None:
        """A run of autograd has reached the tree; nothing has changed yet, so this may raise."""

    def backward_enters(
        self, unit: Unit, forward: Forward | None, accumulates: bool | None
    ) -> None:
        """Backward has reached an output of ``forward``, of ``unit``, which is about to be gathered
        unless it has reached another one before (`StepState.backward_began`).

        Args:
            accumulates: as of `Runtime.pre_backward`.
        """

    def gradients_apart(self, unit: Unit, accumulates: bool | None) -> None:
        """Backward has entered ``unit`` and does not accumulate its gradients, or gathered
        parameters are read without a hook (`StepState.is_read_outside`)."""

    def backward_enters_inside(self, unit: Unit) -> None:
        """Backward has entered a unit inside of ``unit``, possibly before ``unit`` itself."""

    def backward_leaves(self, unit: Unit) -> None:
        """The gradients of one forward of ``unit`` are done, and it was freed if it should be."""

    def left_with_graph(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        """A backward with ``create_graph=True`` has left ``unit`` with ``grads`` for its inputs."""

    def before_reduce(self, unit: Unit) -> None:
        """Gradients of ``unit`` are about to be reduced, or to be kept in place as sums."""

    def gradients_taken(self, unit: Unit, taken: Taken) -> None:
        """``taken`` are complete, and off the parameters; ``unit`` may be gathered still."""

    def reductions_launched(self, unit: Unit, reductions: Sequence[Reduction]) -> None:
        """``reductions`` of ``unit`` are about to start. A part may replace their ``scatter`` and
        ``replicate`` by other transports, this time only."""

    def after_reduce(self, unit: Unit, direct_only: bool) -> None:
        """The reductions have started, if there was anything to reduce, or sums were kept.

        Args:
            direct_only: as of `Runtime.reduce`.
        """

    def before_completion(self, unit: Unit, reduction: Reduction) -> None:
        """Compute is about to wait for ``reduction`` of ``unit``; ``.grad`` is set next."""

    def reduction_completed(self, unit: Unit, reduction: Reduction) -> None:
        """``.grad`` has the result, unless this waits for an all-reduce."""

    def gradients_dropped(self, unit: Unit) -> None:
        """A caller has dropped the gradients of ``unit`` that were in no ``.grad`` yet."""

    def backward_reduced(self) -> None:
        """All reductions of this backward were launched; kept parameters were not freed yet."""

    def iteration_ends(self) -> None:
        """All ``.grad`` are complete."""

    def graph_created(self) -> None:
        """An iteration has ended whose backward was called with ``create_graph=True``."""

    def backward_ends(self) -> None:
        """Backward is over, and all units are freed that should be."""

    def backward_abandoned(self, errors: list[RuntimeError]) -> None:
        """A backward raised, or was dropped; ``errors`` are raised when the tree is reset."""

    def tree_reset(self) -> None:
        """The tree was reset: the last iteration is forgotten."""

    def before_shards_read(self, unit: Unit, what: str) -> None:
        """The shards are about to be ``what``, "saved" or "copied"; this may raise."""

    def before_shards_written(self, unit: Unit) -> None:
        """Values are about to be loaded into the shards; this may raise."""

    def gathered_for_user(self, unit: Unit) -> None:
        """A user has called ``unshard`` and may now read and write gathered parameters."""

    def before_user_reshards(self, unit: Unit) -> None:
        """A user has called ``reshard``; ``unit`` may be gathered still."""


_Part = TypeVar("_Part", bound=TreePart)


# An event without listeners: it accepts any arguments and does nothing. (In C: a function in Python
# costs a frame, and hooks call many events.)
UNHEARD: Callable[..., Any] = type.__prepare__


class _Telling:
    """Events of one kind: each method of ``base`` calls it on all parts that override it."""

    base: ClassVar[type]

    def __init__(self, parts: Sequence[object]) -> None:
        base = self.base
        for name in (name for name in dir(base) if not name.startswith("_") and name != "of"):
            heard = [p for p in parts if getattr(type(p), name) is not getattr(base, name)]
            methods = [getattr(part, name) for part in heard]
            one = methods[0] if methods else UNHEARD
            setattr(self, name, one if len(methods) < 2 else partial(_call_all, methods))


def _call_all(methods: Sequence[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        method(*args)


class UnitEvents(_Telling, UnitPart):
    """The events of all units."""

    base = UnitPart


class TreeEvents(_Telling, TreePart):
    """The events of one tree."""

    base = TreePart


class Registry:
    """The parts of this process, in the order of `parts.py` once that has called `arrange`.

    Attributes:
        on: the events of all units.
        trees: the runtimes that these parts follow.
    """

    def __init__(self, *kinds: type[TreePart]) -> None:
        self.tree_parts = list(kinds)
        self.trees: WeakSet[Runtime] = WeakSet()
        self.unit_parts: list[UnitPart] = []
        self.on = UnitEvents(())

    def add(self, part: type[TreePart] | UnitPart) -> None:
        """Register a part; trees that have run already do not get a new `TreePart`."""
        if isinstance(part, UnitPart):
            self.unit_parts.append(part)
            self.on = UnitEvents(self.unit_parts)
        else:
            self.tree_parts.append(part)

    def require(self, part: object, method: str) -> None:
        """Reject ``method`` if ``part`` is not registered, as it would have no effect.

        Raises:
            RuntimeError: if ``part``, of either kind or a wrapper of transports, is not registered.
        """
        if part not in (*self.tree_parts, *self.unit_parts, *wrappers):
            raise RuntimeError(
                f"{method} needs the part {part.__module__}, which is not registered: import "
                "fsdp2.parts, which registers all parts, before the model is sharded"
            )

    def arrange(self, modules: Sequence[str]) -> None:
        """Sort parts by the order of the modules that define them."""
        self.tree_parts.sort(key=lambda part: modules.index(part.__module__))
        self.unit_parts.sort(key=lambda part: modules.index(type(part).__module__))
        self.on = UnitEvents(self.unit_parts)

    def place_of(self, part: TreePart) -> int:
        """The place of ``part`` among the parts of a tree."""
        kinds = self.tree_parts
        return next((i for i, kind in enumerate(kinds) if isinstance(part, kind)), len(kinds))


registry = Registry()


class Followed:
    """A tree that parts follow: the base of `runtime.Runtime`.

    Attributes:
        registry: of the parts that may follow it.
        on: the events for the parts that follow it.
    """

    registry: Registry = registry
    on: TreeEvents
    _parts: list[TreePart]

    def part(self, kind: type[_Part]) -> _Part | None:
        """The part of this class, if it follows this tree."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def add(self, part: TreePart) -> None:
        """Give ``part`` the events of this tree from now on, at its place in the registry."""
        self._parts = sorted([*self._parts, part], key=self.registry.place_of)
        self.on = TreeEvents(self._parts)

    def remove(self, part: TreePart) -> None:
        """Stop calling ``part``."""
        self._parts = [each for each in self._parts if each is not part]
        self.on = TreeEvents(self._parts)
