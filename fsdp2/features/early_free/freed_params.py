"""A stand-in for a parameter whose memory is freed while its unit still computes.

According to autograd, backward does not need it any more. But a loss may use it outside of forward,
and code that recomputes activations in backward may use it again. So until the unit is freed, the
module holds a `FreedParameterProxy`: any operation on it first gathers the unit again and then runs
on the unsharded parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from ...common.pytree import map_tensors
from ...sharding.param import ShardedParam

# Attributes that lead to the data; the others (shape, dtype, grad) do not need it.
_POINTER = "__cuda_array_interface__"
_VIEWS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag", _POINTER))


def _needs_data(func: Any) -> bool:
    if getattr(func, "__name__", "") not in ("__get__", "__set__"):
        return True
    # (a property, as the pointer is, has no name before Python 3.13)
    return getattr(func.__self__, "__name__", _POINTER) in _VIEWS


class FreedParameterProxy(torch.Tensor):
    """Stands for the unsharded parameter; calls ``recall`` before the first operation on it.

    It does not refer to that tensor, whose references are counted.
    """

    # isinstance(proxy, nn.Parameter) reads it: a user's code may look for parameters between
    # forward and backward.
    _is_param = True
    stands_in = True  # see `Registration.register_stand_in`
    _param: ShardedParam
    _recall: Callable[[], None]

    @staticmethod
    def make(param: ShardedParam, recall: Callable[[], None]) -> FreedParameterProxy:
        """A stand-in for ``param.unsharded``, with its metadata and no memory."""
        with torch.enable_grad():
            proxy = _Passing.apply(param.unsharded)
        proxy._param = param
        proxy._recall = recall
        return proxy

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Here and not in `__torch_dispatch__`, which runs below autograd: the graph must have the
        # unsharded parameter, whose gradient accumulates, and save it only when it has memory.
        needs_data = _needs_data(func)

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, FreedParameterProxy):
                return tensor
            if needs_data:
                tensor._recall()
            assert tensor._param.unsharded is not None
            return tensor._param.unsharded

        args, kwargs = map_tensors(replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Wrapper subclasses must have it. Only code that switches `__torch_function__` off comes
        # here, and would read memory that is not there.
        raise NotImplementedError(f"{func} on a parameter that was freed early")


class _Passing(torch.autograd.Function):
    """The stand-in as autograd sees it: its gradient goes to ``unsharded``.

    Operators never see the stand-in, but ``autograd.Function.apply`` does not call
    ``__torch_function__``: its node takes the stand-in itself as its input.
    """

    @staticmethod
    @override
    def forward(ctx: Any, unsharded: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(
            FreedParameterProxy, unsharded.shape, dtype=unsharded.dtype, device=unsharded.device
        )

    @staticmethod
    @override
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
