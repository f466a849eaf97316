"""Hooks that users register on parameters: carried to the sharded form, called once per reduction.

Autograd accumulates into the unsharded parameters, so it never calls hooks on the sharded ones.
`Reduction` calls them. A tensor hook (``register_hook``) gets the reduced sharded gradient before
it is added to ``.grad``, and may return another one. A post-accumulate hook gets the parameter
after that. Both see the gradient of the whole batch, as in a single-process run, but as a DTensor.

A step without tensor hooks must not look for them at every parameter. So every sharded parameter
has a dictionary of hooks from the beginning, one that notes when something is put into it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..dtensor.from_local import local_of
from ..runtime.reduction import result_hooks
from ..sharding.param import ShardedParam, carriers


class TensorHooks(OrderedDict):
    """The dictionary of hooks that ``register_hook`` of one sharded parameter fills."""

    def __init__(self, param: ShardedParam) -> None:
        super().__init__()
        # Weak: the garbage collector does not see what a tensor's hooks hold, so a cycle through
        # them (parameter, its hooks, parameter) would keep the shards of a deleted model for ever.
        self._param = weakref.ref(param)

    @override
    def __setitem__(self, key: Any, hook: Callable[[torch.Tensor], Any]) -> None:
        param = self._param()
        if getattr(hook, "__module__", None) == "torch.autograd.graph":
            # Its hook counts the tensors that autograd has reached. Called by a reduction instead,
            # it would count wrong, and fire too late or never.
            raise RuntimeError(
                f"register_multi_grad_hook on the sharded parameter '{param and param.fqn}': it "
                "waits for autograd to come to all of its tensors, and autograd never comes to "
                "sharded parameters. Use register_post_accumulate_grad_hook on each of them, or "
                "set_all_reduce_hook on the module"
            )
        _call_from_now_on()
        super().__setitem__(key, hook)


def carry_hooks(given: nn.Parameter, sharded: nn.Parameter, param: ShardedParam) -> None:
    """Move the hooks of ``given`` to ``sharded``, the sharded form of ``param``."""
    # The dictionaries themselves: the handles that users got refer to them, and must still work.
    with torch._C.DisableTorchFunctionSubclass():
        on_tensor, after = given._backward_hooks, given._post_accumulate_grad_hooks
    if on_tensor:
        _call_from_now_on()
        sharded._backward_hooks = on_tensor
    elif not sharded._backward_hooks:
        sharded._backward_hooks = TensorHooks(param)
    if after:
        sharded._post_accumulate_grad_hooks = after


def _call_from_now_on() -> None:
    """Start to look for tensor hooks: some sharded parameter of this process has one."""
    if call_tensor_hooks not in result_hooks:
        result_hooks.append(call_tensor_hooks)


def call_tensor_hooks(param: ShardedParam, local: torch.Tensor) -> torch.Tensor:
    """``local``, this rank's part of the reduced gradient, or the result of its tensor hooks."""
    grad = param.sharded_spec.wrap(local)
    made = _call_hooks(param, grad)
    return local if made is grad else local_of(made).clone().contiguous()


def _call_hooks(param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
    """``grad``, or the result of the sharded parameter's tensor hooks.

    Args:
        grad: laid out like the sharded parameter.

    Raises:
        TypeError: if a hook returns something else than a DTensor of that shape, or None.
    """
    sharded = param.sharded
    # A copy of the hooks, since one may remove itself while it runs.
    for hook in tuple((sharded._backward_hooks or {}).values()):
        result = hook(grad)
        if result is None:
            continue
        if not isinstance(result, DTensor) or result.shape != grad.shape:
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ""
            raise TypeError(
                f"A hook on parameter '{param.fqn}' (register_hook) returned a "
                f"{type(result).__name__} {shape}: it is given the reduced gradient, a DTensor of "
                f"shape {tuple(grad.shape)} sharded like the parameter, and must return one or "
                "None. "
                "distribute_tensor(whole, grad.device_mesh, grad.placements) makes one"
            )
        assert isinstance(grad, DTensor)
        # Operators in hooks may leave another layout (``Partial``, ``Replicate``), whose local
        # tensor would not fit the shard.
        grad = result.detach()
        grad = grad.redistribute(placements=sharded.placements)  # type: ignore[attr-defined]
    return grad


carriers.append(carry_hooks)
