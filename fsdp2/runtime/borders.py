"""The marks on inputs and outputs of a unit, by which backward is noticed at its borders.

An input is replaced by a view of itself. The engine reaches the node of that view when the gradient
of the input is complete: after every operator of the unit that uses it. Unlike the result of an
autograd function, a view may be changed in place. That takes the node of the view out of the graph;
the one in its place is known when the forward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from .unit_grads import will_run

Leave = Callable[[Sequence[torch.Tensor | None]], None]
Enter = Callable[[Any], None]


class Backwards(Protocol):
    """What tells one backward from another: of `root.Runtime`."""

    num_backwards: int


class Crossing:
    """Backward leaves a forward by several nodes: by the last of them that runs.

    Refers to none of them. They refer to it, and a cycle in a graph that is dropped without a
    backward would hold all that the graph has saved until the garbage collector runs.
    """

    __slots__ = ("_awaited", "_backward", "_leave", "_num_nodes", "_pass_on", "_runtime")

    def __init__(self, num_nodes: int, runtime: Backwards, leave: Leave, pass_on: Leave) -> None:
        """
        Args:
            leave: called with the gradients at the last node.
            pass_on: called with those at the others.
        """
        self._num_nodes, self._runtime = num_nodes, runtime
        self._leave, self._pass_on = leave, pass_on
        self._awaited = 0
        self._backward = -1

    def expect(self, nodes: Iterable[Any]) -> None:
        """Backward has entered by an output. It comes to those of ``nodes`` that it will run."""
        if self._backward != self._runtime.num_backwards:  # else it has entered by another one
            self._begin(sum(map(will_run, nodes)))

    def crossed(self, grads: Sequence[torch.Tensor | None]) -> None:
        """A prehook of all nodes."""
        if self._backward != self._runtime.num_backwards:
            # It did not enter by an output: the loss is of something inside. If it does not come
            # to all nodes, what is left is done when it ends.
            self._begin(self._num_nodes)
        self._awaited -= 1
        (self._pass_on if self._awaited > 0 else self._leave)(grads)

    def _begin(self, num_nodes: int) -> None:
        self._awaited, self._backward = num_nodes, self._runtime.num_backwards


def mark(nodes: dict[int, Any], tensor: torch.Tensor) -> torch.Tensor:
    """A view of an input that needs a gradient; its node goes to ``nodes``, by its id."""
    marked = tensor.view_as(tensor)
    nodes[id(marked)] = marked.grad_fn
    return marked


def nodes_at(node: Any, marked: torch.Tensor) -> list[Any]:
    """By which nodes backward leaves a forward that got ``marked``, made by ``node``, and ended."""
    base = marked._base
    if marked.grad_fn is node or base is None or base.grad_fn is None:
        return [node]
    # Changed in place: the history of its base goes on with that. Operators that used the view
    # before still lead to its own node.
    return [node, base.grad_fn]


def watch(
    nodes: Sequence[Any], runtime: Backwards, leave: Leave, pass_on: Leave, enter: Enter
) -> Enter:
    """Have ``leave`` called where backward leaves a forward by the last of several ``nodes``.

    Returns:
        What to do when backward enters it, which begins with ``enter``.
    """
    crossing = Crossing(len(nodes), runtime, leave, pass_on)
    for node in nodes:
        node.register_prehook(crossing.crossed)
    return partial(_enter, crossing, nodes, enter)


def _enter(crossing: Crossing, nodes: Sequence[Any], enter: Enter, grad: Any) -> None:
    enter(grad)  # first: it begins the backward that is counted for
    crossing.expect(nodes)


class Border(torch.autograd.Function):
    """Identity on several tensors, with one node; its backward reports and passes gradients.

    For tensors of which a view may not be made.
    """

    @staticmethod
    def forward(ctx: Any, leave: Leave, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # else an input that is not used costs a tensor of zeros
        ctx.leave = leave
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leave(grads)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(t if t is None else t.view_as(t) for t in tangents)


class TransformedBorder(Border):
    """The same in the form that ``torch.func`` transforms want, which takes longer to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(leave: Leave, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.leave = inputs[0]


class Entrance(torch.autograd.Function):
    """Identity on an output of a transformed forward, where hooks on tensors would be lost."""

    generate_vmap_rule = True

    @staticmethod
    def forward(enter: Enter, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.enter = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.enter(grad)
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:
        return Entrance.apply(ctx.enter, tangent.view_as(tangent))
