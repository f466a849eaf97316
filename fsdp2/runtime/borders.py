"""The marks on inputs and outputs of a unit, by which backward is noticed at its borders.

An input is replaced by a view of itself. The engine reaches the node of that view when the gradient
of the input is complete: after every operator of the unit that uses it. Unlike the result of an
autograd function, a view may be changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..common.pytree import tensors_in

Grads = Sequence[torch.Tensor | None]
Leave = Callable[[Grads], None]


class Backwards(Protocol):
    """What tells one backward from another: of `runtime.Runtime`."""

    @property
    def backward(self) -> object: ...


class Crossing:
    """Backward leaves a forward by several nodes: by the last of them that runs.

    Holds none of them, since they hold it: a cycle in a graph that is dropped without a backward
    would keep all that the graph has saved until the garbage collector runs. Handles of their hooks
    tell which are still there.
    """

    __slots__ = ("_awaited", "_backward", "_handles", "_leave", "_pass_on", "_runtime")

    def __init__(self, runtime: Backwards, leave: Leave, pass_on: Leave) -> None:
        """
        Args:
            leave: called with the gradients at the last node.
            pass_on: called with those at the others.
        """
        self._runtime, self._leave, self._pass_on = runtime, leave, pass_on
        self._handles: list[RemovableHandle] = []
        self._awaited = 0
        self._backward: object = None

    def watch(self, node: Any, crossed: Leave | None = None) -> None:
        """Watch ``node``, of an input or of what changed one, with a hook that calls `crossed`."""
        self._handles.append(node.register_prehook(crossed or self.crossed))

    def crossed(self, grads: Grads, num_nodes: int = 1) -> None:
        """Backward has come to one node, and will not come to the other ``num_nodes - 1``."""
        if self._backward is not self._runtime.backward:
            # Those of inputs that nothing has used are gone. If backward does not come to one of
            # the others, what is left to do is done when it ends.
            self._backward = self._runtime.backward
            self._awaited = sum(handle.hooks_dict_ref() is not None for handle in self._handles)
        self._awaited -= num_nodes
        (self._pass_on if self._awaited > 0 else self._leave)(grads)


def watch_base(base: torch.Tensor, inputs: object, enter: Callable[..., None]) -> None:
    """Watch the node that made ``base``, of which an output is a view.

    Changing the view in place rewrites its history, and the hook on it is lost.
    """
    # If the base is an input, another module made it, and backward gets there after this unit.
    given = any(t is base or t._base is base for t in tensors_in(inputs))
    if base.grad_fn is not None and not given:
        base.grad_fn.register_prehook(enter)


class Border(torch.autograd.Function):
    """Identity on several tensors, with one node; its backward reports and passes gradients.

    For tensors of which a view may not be made.
    """

    @staticmethod
    @override
    def forward(ctx: Any, leave: Leave, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # else an input that is not used costs a tensor of zeros
        ctx.leave = leave
        return tensors

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leave(grads)
        return (None, *grads)


class Marks(Protocol):
    """Another way to mark inputs and outputs."""

    def mark_inputs(self, leave: Leave, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What takes the places of ``inputs``; backward calls ``leave`` with their gradients."""

    def mark_output(self, enter: Callable[[Any], None], output: torch.Tensor) -> torch.Tensor:
        """What takes the place of ``output``; backward calls ``enter`` with its gradient."""


# Inside a transform of ``torch.func``, where hooks on tensors and their nodes are lost; the last
# one is used.
marks_in_transforms: list[Marks] = []
