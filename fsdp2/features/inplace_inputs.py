"""Inputs that a forward changes in place: backward then leaves by another node than the input's.

A view stands for the input, and a hook on its node reports that backward has left the unit. A
change in place removes this node from the graph, and the hook with it. Gradients would only be
reduced, and parameters freed, at the end of backward. So this part hooks the new node, which is
known when the forward has ended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..common.pytree import tensors_in
from ..runtime.hooks import Crossing, Grads, UnitHooks
from ..runtime.unit_grads import will_run


def follow_inputs(hooks: UnitHooks, args: tuple, kwargs: dict) -> None:
    """Watch inputs that the forward has changed in place, at their new node in the graph."""
    # (Views that are not found were replaced by a user's hook, or by torch for full backward hooks:
    # nothing can have changed them.)
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

    # The history of the base continues with the operation that changed it.
    crossing.watch(base.grad_fn, changed)


UnitHooks.input_followers.append(follow_inputs)
