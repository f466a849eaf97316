"""The modules of one unit that run between its first and its last.

A unit of many modules (`merge_units`) is gathered by the first of them, freed by the last, and
reduced when backward leaves the first. The hooks of the modules between have nothing to do, as long
as the program runs in the order of its last forward. But each of these modules can be called alone,
and backward may enter at its output. So each call is checked, and its tensors get marks that detect
backward while the unit is not gathered. The marks are hooks on existing tensors, one set for all
modules of a pass: they need no node in the graph and no object per module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from ..common.pytree import map_tensors, tensors_in
from ..runtime.events import UNHEARD, TreePart, registry
from ..runtime.hooks import UnitHooks, watch_base
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.states import State
from ..runtime.torch_modes import function_mode, is_transformed
from ..runtime.unit import Forward, Unit


class Middle:
    """One pass over the modules of a unit, from its first to its last.

    `Middles` drops it whenever anything else happens in the tree: forward of another unit, a call
    that is not skipped, backward.

    Attributes:
        unit: the unit that is gathered for this pass.
        graph: whether backward may reach it.
    """

    __slots__ = ("_inputs", "_order", "_outputs", "_ran", "graph", "unit")

    def __init__(self, hooks: GroupHooks, forward: Forward | None) -> None:
        """
        Args:
            forward: of the first module, which represents the pass; None without a graph.
        """
        self.unit = hooks.unit
        runtime = runtime_of(self.unit)
        # Both are of this forward of the tree, and a `Middle` does not outlive it.
        self._order, self._ran = runtime.schedule.expected, runtime.schedule.ran
        self.graph = forward is not None
        self._outputs: dict[int, Callable[..., None]] = {}
        self._inputs: dict[int, Callable[..., None]] = {}
        if forward is not None:
            self._outputs[0] = partial(_enter, self.unit, runtime, hooks, forward)
            self._inputs[0] = partial(_left, hooks)

    def skips_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Begin the forward of ``module`` without its hooks; False if they must run."""
        unit, order, next_place = self.unit, self._order, len(self._ran) + 1
        if next_place >= len(order) or order[next_place] is not unit:
            return False  # the last: it ends the pass
        graph = self.graph
        if torch.is_grad_enabled() is not graph:
            return False  # the marks of this pass are for the other case
        registration = unit.registration
        if unit.state is not State.UNSHARDED or registration.registered != "unsharded":
            return False
        if is_transformed():
            return False  # hooks on tensors would be lost
        registration.check(module)
        if unit.runtime.on.before_compute is not UNHEARD:
            return False
        if graph:
            given: Sequence[torch.Tensor] = args
            if len(args) != 1 or kwargs or type(args[0]) is not torch.Tensor:
                given = list(tensors_in((args, kwargs)))
            for tensor in given:
                if tensor.requires_grad:
                    if tensor.grad_fn is None:
                        return False  # a hook on a leaf would stay after this step
                    _mark(tensor, self._inputs)
        self._ran.append(unit)
        unit.step.running += 1
        return True

    def skips_post_forward(self, inputs: object, output: object) -> bool:
        """End a forward that `skips_pre_forward` began; False if the hooks must end it."""
        if self.graph:
            marks = self._outputs
            for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
                if tensor.requires_grad:
                    _mark(tensor, marks)
                    if tensor._base is not None:
                        watch_base(tensor._base, inputs, marks[0])
        elif torch.is_grad_enabled():
            return False  # the module turned gradients on
        self.unit.step.running -= 1
        return True


def _enter(unit: Unit, runtime: Runtime, hooks: GroupHooks, forward: Forward, grad: object) -> None:
    """Backward reached the output of a module in the middle."""
    # An earlier backward that raised has left the first two as they are.
    is_entered = unit.step.backward_began and unit.state is State.UNSHARDED
    if not (is_entered and runtime.will_end_backward):
        hooks.enter_backward(forward, grad)


def _left(hooks: GroupHooks, grad: torch.Tensor) -> None:
    """Backward left a module in the middle by its input, and ``grad`` is complete."""
    if torch.is_grad_enabled():  # with create_graph=True
        hooks.tell_left((grad,))


def _mark(tensor: torch.Tensor, hooks: dict[int, Callable[..., None]]) -> None:
    """``tensor.register_hook`` of all ``hooks``, a dictionary that many tensors share."""
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        for hook in hooks.values():
            tensor.register_hook(hook)
        return
    # Like `register_hook`, but without a dictionary and a handle for each tensor. Then removed from
    # the tensor, or a user's hooks would be added to ours. The node keeps them.
    tensor._backward_hooks = hooks  # type: ignore[assignment]
    node._register_hook_dict(tensor)
    tensor._backward_hooks = None


class Middles(TreePart):
    """Keeps the current pass of forward, and drops it as soon as anything else happens."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.current: Middle | None = None

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if any(map(_is_group, runtime.units)) else None

    @override
    def forward_begins(self, unit: Unit) -> None:
        self.current = None

    @override
    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        hooks = unit.hooks
        self.current = hooks.next_middle(forward) if isinstance(hooks, GroupHooks) else None

    @override
    def backward_begins(self) -> None:
        self.current = None

    @override
    def tree_reset(self) -> None:
        self.current = None


class GroupHooks(UnitHooks):
    """Hooks of a unit of several modules, which do nothing at those in the middle.

    Attributes:
        marks_all: whether every module runs all of its hooks.
    """

    marks_all = False

    def _middle(self) -> Middle | None:
        if self.unit.runtime is None or self.inside_method:
            return None
        of_tree = runtime_of(self.unit).part(Middles)
        middle = None if of_tree is None else of_tree.current
        return middle if middle is not None and middle.unit is self.unit else None

    @override
    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        middle = self._middle()
        if middle is None or not middle.skips_pre_forward(module, args, kwargs):
            return super().pre_forward(module, args, kwargs)
        if self._cast_input is not None:
            args, kwargs = map_tensors(self._cast_input, (args, kwargs))
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        middle = self._middle()
        if middle is not None and middle.skips_post_forward((args, kwargs), output):
            return self._cast(output)
        return super().post_forward(module, args, kwargs, output)

    def next_middle(self, forward: Forward | None) -> Middle | None:
        """After a forward with all hooks: the state for skipping the next ones; None: do not skip.

        The decision only depends on facts that all ranks share.
        """
        unit = self.unit
        runtime = runtime_of(unit)
        if (
            self.marks_all
            or function_mode() is not None
            or runtime.on.forward_computed is not UNHEARD
        ):
            return None
        # Recomputation in backward follows no order. Units around others are freed in parts. And if
        # each module may have to make room, all hooks of all modules must run.
        if runtime.in_backward or unit.encloses or runtime.lookahead.depth > 1:
            return None
        if unit.step.running:
            return None  # inside another module of the unit, whose marks must belong to one forward
        graph = torch.is_grad_enabled()
        # Parameters may also be frozen in the middle of a unit. And a forward that backward repeats
        # must be recorded once per module, since backward enters each of them separately.
        if graph is (forward is None) or (not graph and unit.recomputes_all):
            return None
        # (Two more: the last of them is not in the middle. And one that is not predicted finds the
        # unit freed.)
        goes_on = runtime.schedule.next(2) == [unit, unit]
        return Middle(self, forward) if goes_on else None


def _is_group(unit: Unit) -> bool:
    return len(unit.modules) > 2


registry.add(Middles)
UnitHooks.kinds.append(lambda unit: GroupHooks if _is_group(unit) else None)
