"""Inputs that a forward changes in place: backward leaves by another node than that of the input.

A change in place takes the node of the view that stands for the input out of the graph, and with
it the hook that says that backward has left the unit: gradients would be reduced, and parameters
freed, at the end of backward only. The node in its place is known when the forward has ended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..common.pytree import tensors_in
from ..runtime.hooks import Crossing, Grads, UnitHooks
from ..runtime.unit_grads import will_run


def follow_inputs(hooks: UnitHooks, args: tuple, kwargs: dict) -> None:
    """Watch inputs that the forward has changed in place where they are now in the graph."""
    # (Those that are not found were replaced by a hook of the user's, or by torch for full
    # backward hooks: nobody can have changed these views.)
    marks = hooks.unit.step.input_nodes
    found = marks.pop(id(args[0]), None) if args else None
    if found is not None and args[0].grad_fn is not found[0]:
        _follow(hooks, args[0], *found)
    for tensor in tensors_in((args, kwargs)) if marks else ():
        found = marks.pop(id(tensor), None)
        if found is not None and tensor.grad_fn is not found[0]:
            _follow(hooks, tensor, *found)


def _follow(
    hooks: UnitHooks, tensor: torch.Tensor, node: Any, watch: RemovableHandle | Crossing
) -> None:
    base = tensor._base
    if base is None or base.grad_fn is None:
        return
    if isinstance(watch, Crossing):
        crossing = watch
    else:
        watch.remove()
        crossing = hooks.crossing()
        crossing.watch(node)

    def changed(grads: Grads) -> None:
        # The node from before the change is in the graph only if something used the input by then.
        crossing.crossed(grads, 1 if will_run(node) else 2)

    # The history of the base goes on with what changed it.
    crossing.watch(base.grad_fn, changed)


UnitHooks.input_followers.append(follow_inputs)
