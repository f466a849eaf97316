"""The modules of one unit that run between its first and its last.

A unit of many modules (`merge_units`) is gathered by the first of them, freed by the last, and
reduced when backward leaves the first. The hooks of those between have nothing to do, as long as
the program runs in the order of its last forward. But each of these modules can be called alone,
and backward may enter at its output, so each call is looked at, and has marks that notice if the
unit is not gathered. They are hooks on the tensors that pass anyway, one set of them for all
modules of a pass: no node in the graph, no object per module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ..common.pytree import tensors_in
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.states import State
from ..runtime.torch_modes import is_transformed
from ..runtime.unit import Forward, Unit


class Borders(Protocol):
    """What is needed of the hooks of a unit: of `hooks.UnitHooks`."""

    unit: Unit

    def enter_backward(self, forward: Forward, grad: object) -> None: ...

    def watch_second_backward(self, grads: Iterable[torch.Tensor | None]) -> None: ...


class Middle:
    """One pass over the modules of a unit, from its first to its last.

    `Runtime` drops it whenever anything else happens in the tree: forward of another unit, a call
    that is not skipped, backward.

    Attributes:
        unit: the unit that is gathered for this pass.
        graph: whether backward may reach it.
    """

    __slots__ = ("_inputs", "_order", "_outputs", "_ran", "graph", "unit")

    def __init__(self, hooks: Borders, forward: Forward | None) -> None:
        """
        Args:
            forward: of the first module, which stands for all of the pass; None without a graph.
        """
        self.unit = hooks.unit
        runtime = runtime_of(self.unit)
        # Both are of this forward of the tree, and a `Middle` does not outlive it.
        self._order, self._ran = runtime.forward_order, runtime.this_forward
        self.graph = forward is not None
        self._outputs: dict[int, Callable[..., None]] = {}
        self._inputs: dict[int, Callable[..., None]] = {}
        if forward is not None:
            self._outputs[0] = partial(_enter, self.unit, runtime, hooks, forward)
            self._inputs[0] = partial(_left, hooks)

    @staticmethod
    def begin(hooks: Borders, forward: Forward, *, differentiable: bool) -> None:
        """A forward of the unit has ended, with all its hooks: the next may do with less.

        Decided by what all ranks know, like everything that follows from it.
        """
        unit = hooks.unit
        runtime = runtime_of(unit)
        # What backward recomputes is in no order. Units around others are freed in parts, and with
        # a budget each module may have to make room: there all hooks of all modules run.
        if runtime.in_backward or unit.encloses or runtime.budget is not None:
            return
        if unit.running:
            return  # inside another module of the unit, whose marks have to belong to one forward
        graph = torch.is_grad_enabled()
        # What is frozen changes in the middle of a unit, too. And a forward that backward repeats
        # has to be noted once per module, since backward enters each of them by itself.
        if graph is not differentiable or (not graph and unit.recomputes_all):
            return
        # (Two more: the last of them is not in the middle. And one that is not predicted finds the
        # unit freed.)
        order, place = runtime.forward_order, len(runtime.this_forward)
        if runtime.predicted and order[place : place + 2] == [unit, unit]:
            runtime.middle = Middle(hooks, forward if graph else None)

    def skips_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Begin the forward of ``module`` without its hooks; False if they have to run."""
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
        if registration.overrides:
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
        unit.running += 1
        return True

    def skips_post_forward(self, inputs: object, output: object) -> bool:
        """End a forward that `skips_pre_forward` began; False if the hooks have to end it."""
        if self.graph:
            marks = self._outputs
            for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
                if tensor.requires_grad:
                    _mark(tensor, marks)
                    if tensor._base is not None:
                        watch_base(tensor._base, inputs, marks[0])
        elif torch.is_grad_enabled():
            return False  # the module turned gradients on
        self.unit.running -= 1
        return True


def _enter(unit: Unit, runtime: Runtime, hooks: Borders, forward: Forward, grad: object) -> None:
    """Backward reached the output of a module in the middle."""
    # An earlier backward that raised has left the first two as they are.
    if not (unit.backward_began and unit.state is State.UNSHARDED and runtime.will_end_backward):
        hooks.enter_backward(forward, grad)


def _left(hooks: Borders, grad: torch.Tensor) -> None:
    """Backward left a module in the middle by its input, and ``grad`` is complete."""
    if torch.is_grad_enabled():  # with create_graph=True
        hooks.watch_second_backward((grad,))


def _mark(tensor: torch.Tensor, hooks: dict[int, Callable[..., None]]) -> None:
    """``tensor.register_hook`` of all ``hooks``, of which many tensors share one dictionary."""
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        for hook in hooks.values():
            tensor.register_hook(hook)
        return
    # As `register_hook` does it, without a dictionary and a handle for each tensor. Then off the
    # tensor: its user's own hooks would end up in ours. The node keeps them.
    tensor._backward_hooks = hooks  # type: ignore[assignment]
    node._register_hook_dict(tensor)
    tensor._backward_hooks = None


def watch_base(base: torch.Tensor, inputs: object, enter: Callable[..., None]) -> None:
    """Watch the node that made ``base``, of which an output is a view.

    Changing the view in place rewrites its history, and the hook on it is lost.
    """
    # If the base is an input, another module made it, and backward gets there after this unit.
    given = any(t is base or t._base is base for t in tensors_in(inputs))
    if base.grad_fn is not None and not given:
        base.grad_fn.register_prehook(enter)
