"""What happens in a tree of units, for the parts of the library that the kernel does not know.

A part is a class with the events that it wants to hear. The kernel tells them without asking what
is on: each method of `UnitEvents` and `TreeEvents` calls those of the parts that override it, in
the order of `parts.py`. To tell an event that nobody hears costs a hook 50 nanoseconds.

There are two kinds. A `UnitPart` is one object per process, and hears of units from their making
on, and keeps what it knows of one in `Unit.of_parts`: in a weak dictionary, values that lead to
parameters, their modules and so to the unit would keep it alive. A `TreePart` is made with the
runtime of a tree, and hears of its steps. Events of a step pass no unsharded parameters: a
reference would keep memory alive, and references to them are counted.
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
    """A part that hears of all units of this process. It overrides the events that it wants."""

    def before_taking(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        """`fully_shard` is about to make ``params`` those of ``unit``; nothing has changed yet, so
        this may refuse."""

    def before_sharding(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        """``params`` are whole, and about to become those of ``unit``."""

    def sharded(self, unit: Unit) -> None:
        """`fully_shard` has made ``unit``, with its hooks."""

    def before_apply(self, unit: Unit, fn: object, modules: Iterable[nn.Module]) -> None:
        """``Module._apply`` is about to call ``fn`` on all tensors of ``modules``, of ``unit``."""

    def after_apply(self, unit: Unit) -> None:
        """It has."""

    def merged(self, unit: Unit, former: Sequence[Unit]) -> None:
        """``unit`` has taken the places of ``former``."""

    def before_tree(self, root_module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        """``units`` are about to get a runtime; nothing has changed yet, so this may refuse."""

    def modules_differ(self, root_module: nn.Module, units: Sequence[Unit]) -> None:
        """Modules of ``root_module`` may hold other parameters than ``units``, all of them sharded,
        gave them: each has to come to the unit that gathers it wherever it is used."""

    def params_assigned(self, unit: Unit, keep_objects: bool) -> None:
        """A user may have put parameters into modules of ``unit``.

        Args:
            keep_objects: an optimizer may hold those of the unit, so only data is to be taken.
        """

    def before_materialize(self, units: Sequence[Unit]) -> None:
        """``units`` know their order and parameters, and nothing has gathered them yet."""

    def before_setting(self, unit: Unit, name: str, value: object) -> None:
        """A setting of ``unit`` is about to change; this may refuse."""

    def setting_changed(self, units: Sequence[Unit], name: str, value: object) -> None:
        """A setting that schedules change before each backward is ``value`` for ``units`` now."""


class TreePart(GatherEvents):
    """A part of the runtime of one tree. It overrides the events that it wants to hear."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        """The part for a tree whose runtime was just made; None: it has nothing to do there."""
        return cls(runtime)

    def before_root_forward(self) -> None:
        """A root's forward was called; nothing has changed yet, so this may refuse."""

    def root_forward_begins(self) -> None:
        """Nothing is in flight, and nothing was gathered for it yet."""

    def before_reuse(self, unit: Unit) -> None:
        """What of ``unit`` is gathered is about to be used again, by a forward or a user."""

    def forward_begins(self, unit: Unit) -> None:
        """``unit`` is about to be gathered, or to go on, for a forward of one of its modules, or
        for a recomputation of one (`Runtime.in_backward`)."""

    def forward_computed(self, unit: Unit) -> None:
        """A module of ``unit`` has its output, and nothing was freed yet. Who hears this hears of
        all modules of a unit: else those between its first and last may leave out their hooks."""

    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        """It was freed, or kept, after ``forward``; None: one without a graph."""

    def unit_kept(self, unit: Unit, forward: Forward | None) -> None:
        """``unit`` stays gathered and registered after ``forward``, which has a graph; None: after
        another one, after its backward or the end of all of it."""

    def backward_begins(self) -> None:
        """A run of autograd has come to the tree; nothing has changed yet, so this may refuse."""

    def backward_enters(
        self, unit: Unit, forward: Forward | None, accumulates: bool | None
    ) -> None:
        """Backward has reached an output of ``forward``, of ``unit``, which is about to be gathered
        unless it has reached another one before (`StepState.backward_began`).

        Args:
            accumulates: as of `Runtime.pre_backward`.
        """

    def gradients_apart(self, unit: Unit, accumulates: bool | None) -> None:
        """Backward has entered ``unit`` and does not accumulate its gradients, or what is gathered
        is read where no hook is called (`StepState.is_read_outside`)."""

    def backward_enters_inside(self, unit: Unit) -> None:
        """Backward has entered a unit inside of ``unit``, which it may not have reached itself."""

    def backward_leaves(self, unit: Unit) -> None:
        """The gradients of one forward of ``unit`` are done, and it was freed if it is to be."""

    def left_with_graph(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        """A backward with ``create_graph=True`` has left ``unit`` with ``grads`` for its inputs."""

    def before_reduce(self, unit: Unit) -> None:
        """Gradients of ``unit`` are about to be reduced, or to be kept as sums where they are."""

    def gradients_taken(self, unit: Unit, taken: Taken) -> None:
        """``taken`` are complete, and off the parameters; ``unit`` may be gathered still."""

    def reductions_launched(self, unit: Unit, reductions: Sequence[Reduction]) -> None:
        """``reductions`` of ``unit`` are about to start. A hearer may put other transports in the
        places of their ``scatter`` and ``replicate``, for this once."""

    def after_reduce(self, unit: Unit, direct_only: bool) -> None:
        """The reductions have started, if there was anything to reduce, or sums were kept.

        Args:
            direct_only: as of `Runtime.reduce`.
        """

    def before_completion(self, unit: Unit, reduction: Reduction) -> None:
        """Compute is about to wait for ``reduction``, of ``unit``, whose ``.grad`` is next."""

    def reduction_completed(self, unit: Unit, reduction: Reduction) -> None:
        """``.grad`` has what it reduced, unless it waits for an all-reduce."""

    def gradients_dropped(self, unit: Unit) -> None:
        """Gradients of ``unit`` that were in no ``.grad`` yet are gone, as a caller wanted."""

    def backward_reduced(self) -> None:
        """All reductions of this backward were launched; nothing that is kept was freed yet."""

    def iteration_ends(self) -> None:
        """All ``.grad`` are complete."""

    def graph_created(self) -> None:
        """An iteration has ended whose backward was called with ``create_graph=True``."""

    def backward_ends(self) -> None:
        """It is over: all units are freed that are to be."""

    def backward_abandoned(self, errors: list[RuntimeError]) -> None:
        """A backward raised, or was dropped; ``errors`` are raised when the tree is reset."""

    def tree_reset(self) -> None:
        """Whatever the last iteration was about is over."""

    def before_shards_read(self, unit: Unit, what: str) -> None:
        """The shards are about to be ``what``, "saved" or "copied"; this may refuse."""

    def before_shards_written(self, unit: Unit) -> None:
        """Values are about to be loaded into the shards; this may refuse."""

    def gathered_for_user(self, unit: Unit) -> None:
        """A user has called ``unshard`` and may now read and write what is gathered."""

    def before_user_reshards(self, unit: Unit) -> None:
        """A user has called ``reshard``; ``unit`` may be gathered still."""


_Part = TypeVar("_Part", bound=TreePart)


# An event that nobody hears: it does nothing, whatever it is told. (In C: a function in Python
# costs a frame, and hooks tell of many events.)
UNHEARD: Callable[..., Any] = type.__prepare__


class _Telling:
    """Events of one kind: a method of ``base`` calls those of parts, in turn, that override it."""

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
    """What happens to all units."""

    base = UnitPart


class TreeEvents(_Telling, TreePart):
    """What happens in one tree."""

    base = TreePart


class Registry:
    """The parts of this process, in the order of `parts.py` once that has called `arrange`.

    Attributes:
        on: what those that hear of all units hear.
        trees: the runtimes that these parts follow.
    """

    def __init__(self, *kinds: type[TreePart]) -> None:
        self.tree_parts = list(kinds)
        self.trees: WeakSet[Runtime] = WeakSet()
        self.unit_parts: list[UnitPart] = []
        self.on = UnitEvents(())

    def add(self, part: type[TreePart] | UnitPart) -> None:
        """Register a part; trees that have run already do without a `TreePart`."""
        if isinstance(part, UnitPart):
            self.unit_parts.append(part)
            self.on = UnitEvents(self.unit_parts)
        else:
            self.tree_parts.append(part)

    def require(self, part: object, method: str) -> None:
        """Refuse ``method``, which would do nothing without ``part``.

        Raises:
            RuntimeError: if ``part``, of either kind or a wrapper of transports, is not registered.
        """
        if part not in (*self.tree_parts, *self.unit_parts, *wrappers):
            raise RuntimeError(
                f"{method} needs the part {part.__module__}, which is not registered: import "
                "fsdp2.parts, which registers all parts, before the model is sharded"
            )

    def arrange(self, modules: Sequence[str]) -> None:
        """Let parts hear in the order of the modules that define them, whichever came first."""
        self.tree_parts.sort(key=lambda part: modules.index(part.__module__))
        self.unit_parts.sort(key=lambda part: modules.index(type(part).__module__))
        self.on = UnitEvents(self.unit_parts)

    def place_of(self, part: TreePart) -> int:
        """The place of ``part`` among those that hear of a tree."""
        kinds = self.tree_parts
        return next((i for i, kind in enumerate(kinds) if isinstance(part, kind)), len(kinds))


registry = Registry()


class Followed:
    """A tree that parts follow: the base of `runtime.Runtime`.

    Attributes:
        registry: of the parts that may follow it.
        on: what those hear that do.
    """

    registry: Registry = registry
    on: TreeEvents
    _parts: list[TreePart]

    def part(self, kind: type[_Part]) -> _Part | None:
        """The part of this class, if it follows this tree."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def add(self, part: TreePart) -> None:
        """Let ``part`` hear of this tree from the next event on, at its place in the registry."""
        self._parts = sorted([*self._parts, part], key=self.registry.place_of)
        self.on = TreeEvents(self._parts)

    def remove(self, part: TreePart) -> None:
        """Tell ``part`` nothing any more."""
        self._parts = [each for each in self._parts if each is not part]
        self.on = TreeEvents(self._parts)
