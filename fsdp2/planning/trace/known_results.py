"""A cache of the results of operators on fake tensors.

Blocks of a model call the same operators on tensors of the same shapes, hundreds of times. The
metadata of fake tensors determine the result of an operator, and its cost. torch has a cache, too
(`FakeTensorMode.cache`), but its keys take longer to form than everything here. With this cache, a
trace takes half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from .op_costs import OpCost

# Arguments that are identified by type and value: 1, 1.0 and True are equal.
_PLAIN = {
    bool, int, float, complex, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
# Operators whose results, or changed arguments, do not follow from metadata.
_UNKNOWN_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}

# Makes a result from the tensors among the arguments, in their order.
_Make = Callable[[Sequence[FakeTensor]], Any]


class _UnknownError(Exception):
    """A value that its metadata does not determine."""


@dataclass(frozen=True)
class KnownResult:
    """The result of a call.

    Attributes:
        make: makes the result from the tensors among the arguments.
        cost: the cost; None if there is no kernel.
    """

    make: _Make
    cost: OpCost | None


class KnownResults:
    """The memory of one trace.

    Example:
        >>> import torch
        >>> from torch._subclasses import FakeTensorMode
        >>> known, func = KnownResults(), torch.ops.aten.neg.default
        >>> with FakeTensorMode():
        ...     call = known.call_of(func, (torch.ones(2, 3),), {})
        ...     known.keep(call, func(*call.args), cost=None)
        ...     other = known.call_of(func, (torch.zeros(2, 3),), {})
        ...     known.find(other).make(other.tensors).shape
        torch.Size([2, 3])
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, KnownResult | None] = {}

    def call_of(self, func: Any, args: tuple, kwargs: dict) -> OpCall | None:
        """The identity of a call; None if its arguments do not determine the result.

        Args:
            func: any operator; only torch's operators are cached.
            args: arguments with fake tensors, also in lists and tuples.
        """
        if type(func) is not OpOverload:  # an operator of higher order
            return None
        tensors: list[FakeTensor] = []
        try:
            key = _identity(func, args, kwargs, tensors)
        except _UnknownError:
            return None
        return OpCall(key, func, args, kwargs, tensors) if tensors else None

    def find(self, call: OpCall) -> KnownResult | None:
        """The result of an equal call; None if it is not cached."""
        return self._results.get(call.key)

    def keep(self, call: OpCall, result: Any, cost: OpCost | None) -> None:
        """Cache ``result``, if it can be made again."""
        if call.key in self._results:
            return
        self._results[call.key] = None
        if call.func.namespace not in ("aten", "prims") or _UNKNOWN_TAGS & {*call.func.tags}:
            return
        try:
            if _identity(call.func, call.args, call.kwargs, []) == call.key:  # no argument resized
                self._results[call.key] = KnownResult(_recipe(result, call.tensors), cost)
        except _UnknownError:
            pass


@dataclass(frozen=True, eq=False)
class OpCall:
    """A call of an operator: what identifies it, and the tensors among its arguments."""

    key: tuple
    func: OpOverload
    args: tuple
    kwargs: dict
    tensors: list[FakeTensor]


def _identity(func: Any, args: tuple, kwargs: dict, tensors: list[FakeTensor]) -> tuple:
    named = [(name, _key(value, tensors)) for name, value in kwargs.items()]
    return (func, torch.get_default_dtype(), _key(args, tensors), *named)


def _key(value: Any, tensors: list[FakeTensor]) -> Hashable:
    """All of ``value`` that results depend on; its tensors are added to ``tensors``."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:  # torch computes with its value
            raise _UnknownError
        tensors.append(value)
        return (
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.fake_device,
            value.is_conj(),
            value.is_neg(),
        )
    if kind in _PLAIN:
        return kind, value
    if kind is tuple or kind is list:
        return tuple([_key(each, tensors) for each in value])
    if kind is torch.Size:
        return tuple(value)
    raise _UnknownError


# -- recipes ---------------------------------------------------------------------------------------


def _recipe(result: Any, tensors: Sequence[FakeTensor]) -> _Make:
    kind = type(result)
    if kind is FakeTensor:
        return _tensor_recipe(result, tensors)
    if kind in _PLAIN:
        return lambda _: result
    if kind is tuple or kind is list:
        parts = [_recipe(each, tensors) for each in result]
        return lambda given: kind([make(given) for make in parts])
    raise _UnknownError


def _tensor_recipe(result: FakeTensor, tensors: Sequence[FakeTensor]) -> _Make:
    """A tensor that was given, a view of one, or a new one."""
    for i, tensor in enumerate(tensors):
        if tensor is result:
            return itemgetter(i)
    if result.layout is not torch.strided or result.is_conj() or result.is_neg():
        raise _UnknownError
    looks = _Looks(
        result.shape,
        result.stride(),
        int(result.storage_offset()),
        result.dtype,
        result.fake_device,
    )
    storage = result.untyped_storage()
    for i, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage._cdata:
            return partial(looks.view, i)
    if looks.offset or storage.nbytes() != looks.new(tensors).untyped_storage().nbytes():
        raise _UnknownError  # a part of something larger
    return looks.new


@dataclass(frozen=True, slots=True)
class _Looks:
    """The metadata of a result."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def new(self, given: Sequence[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(given[0].fake_mode, made, self.device)

    def view(self, i: int, given: Sequence[FakeTensor]) -> FakeTensor:
        """A view of the tensor that was given as number ``i``."""
        storage: Any = given[i].untyped_storage()
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided((), (), dtype=self.dtype, device="meta")
            made.set_(storage, self.offset, self.shape, self.stride)
        return FakeTensor(given[i].fake_mode, made, self.device)
