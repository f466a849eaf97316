"""A stand-in for a parameter whose memory was given back while its unit computes.

Backward does not need it any more, as far as autograd knows. But activations may be recomputed
in backward, by code that uses the parameter again. So until the unit is freed, the module holds
a `FreedParameterProxy`: any operation on it first gathers the unit again and then runs on the
unsharded parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.pytree import map_tensors


class FreedParameterProxy(torch.Tensor):
    """Stands for ``unsharded``; calls ``recall`` before the first operation on it."""

    _is_param = True
    _unsharded: nn.Parameter
    _recall: Callable[[], None]

    @staticmethod
    def make(unsharded: nn.Parameter, recall: Callable[[], None]) -> FreedParameterProxy:
        """A stand-in with the metadata of ``unsharded`` and no memory."""
        stand_in = torch.Tensor._make_wrapper_subclass(
            FreedParameterProxy,
            unsharded.shape,
            dtype=unsharded.dtype,
            device=unsharded.device,
            requires_grad=unsharded.requires_grad,
        )
        stand_in._unsharded = unsharded
        stand_in._recall = recall
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Looking at attributes (shape, dtype, grad) needs no data.
        needs_data = getattr(func, "__name__", "") not in ("__get__", "__set__")

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, FreedParameterProxy):
                return tensor
            if needs_data:
                tensor._recall()
            return tensor._unsharded

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = map_tensors(replace, (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a released parameter")
