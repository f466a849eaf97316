"""Determines what an operation of torch reads and writes, from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# In-place operations that do not read the old contents.
_OVERWRITES = {
    "aten::copy_",
    "aten::fill_",
    "aten::zero_",
    "aten::normal_",
    "aten::uniform_",
    "aten::random_",
    "aten::bernoulli_",
    "aten::_foreach_copy_",
    "aten::_foreach_zero_",
}
# Operations whose results are uninitialized memory.
_UNFILLED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
# Operations that use the shape of a tensor but not its data.
_SHAPE_ONLY = _UNFILLED | {
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::is_same_size",
    "aten::set_",
    "aten::resize_",
    "aten::resize_as_",
}
# Collectives, whose schemas do not declare their writes: (read, written) positions.
_COLLECTIVES = {
    "c10d::_allgather_base_": ((1,), (0,)),
    "c10d::allgather_": ((1,), (0,)),
    "c10d::allgather_into_tensor_coalesced_": ((1,), (0,)),
    "c10d::all_gather_single_coalesced_": ((1,), (0,)),
    "c10d::_reduce_scatter_base_": ((1,), (0,)),
    "c10d::reduce_scatter_tensor_coalesced_": ((1,), (0,)),
    "c10d::reduce_scatter_single_coalesced_": ((1,), (0,)),
    "c10d::alltoall_base_": ((1,), (0,)),
    "c10d::all_to_all_single_": ((1,), (0,)),
    "c10d::allreduce_": ((0,), (0,)),
    "c10d::allreduce_coalesced_": ((0,), (0,)),
    "c10d::broadcast_": ((0,), (0,)),
    "c10d::send": ((0,), ()),
    "c10d::recv_": ((), (0,)),
    "c10d::barrier": ((), ()),
}


@dataclass(frozen=True)
class Effects:
    """The effects of one operation.

    Attributes:
        reads, writes: (position, name) of arguments that are tensors or lists of them.
        is_view: the results share memory with the arguments, and no data is touched.
        makes: whether the results are new memory; ``fills``: whether it is written.
        pads: whether the data read may contain padding, which collectives and batched copies
            include.
    """

    reads: tuple[tuple[int, str], ...]
    writes: tuple[tuple[int, str], ...]
    is_view: bool
    makes: bool
    fills: bool
    pads: bool = False


@cache
def effects_of(operation: Any) -> Effects:
    """The effects of an ``OpOverload``.

    Raises:
        NotImplementedError: for an unknown collective.
    """
    schema = operation._schema
    names = [(i, argument.name) for i, argument in enumerate(schema.arguments)]
    if schema.name.startswith("c10d::"):
        if schema.name not in _COLLECTIVES:
            raise NotImplementedError(f"Unknown collective {schema}")
        read, written = _COLLECTIVES[schema.name]
        return Effects(
            tuple(names[i] for i in read),
            tuple(names[i] for i in written),
            is_view=False,
            makes=False,
            fills=False,
            pads=True,
        )
    reads, writes = [], []
    for place, argument in zip(names, schema.arguments, strict=True):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed and schema.name != "aten::set_":
            writes.append(place)
        if schema.name in _SHAPE_ONLY:
            continue
        if not changed or not (argument.kwarg_only or schema.name in _OVERWRITES):
            reads.append(place)
    aliases = [result.alias_info for result in schema.returns]
    is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
    makes = any(a is None for a in aliases)
    fills, pads = schema.name not in _UNFILLED, schema.name == "aten::_foreach_copy_"
    return Effects(tuple(reads), tuple(writes), is_view, makes, fills, pads)


def argument(place: tuple[int, str], args: tuple, kwargs: dict) -> Any:
    """The argument at a place of `Effects`, or None."""
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with data in an argument or result: a tensor, or (nested) lists of them."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor) or is_traceable_wrapper_subclass(value) or value.is_meta:
            return
        if value.layout == torch.strided and value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of a tensor in its storage."""
    if tensor.is_contiguous():
        numel = tensor.numel()
    else:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        numel = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + int(numel) * tensor.itemsize
