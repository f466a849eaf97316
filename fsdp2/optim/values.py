"""What optimizers remember, as data: nested values, separated from their structure.

A state is a tree of dicts, lists, tuples and deques. Its leaves are tensors, numbers and constants
(None, strings, dtypes). `take_apart` separates a tree into its structure, which is small,
comparable and picklable, and its tensors and numbers, which change in every step. `put_together`
is the reverse.

A tensor that consists of others (quantized state) cannot be cut into shards: only its class can cut
it, and refuses most cuts. Between steps a dict of its inner tensors stands for it, each of them a
tensor like any other; `as_subclasses` makes it anew.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..dtensor.subclasses import is_subclass

NUMBERS = (bool, int, float)
CONSTANTS = (type(None), str, torch.dtype, torch.device, torch.memory_format)
EXACT = 2**53  # integers up to here are exact as float64
PLAIN = (Tensor, nn.Parameter, DTensor)
# State of one number for a whole parameter; it stays plain, as with DTensors in torch.
SCALARS = {"step", "eta", "mu", "mu_product"}
# Key of the class in a dict that stands for a tensor subclass.
SUBCLASS = "tensor subclass"


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor. ``on_host``: it is 0-dim and on the CPU, wherever the parameter is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@dataclass(frozen=True)
class NumberLeaf:
    kind: type


@dataclass(frozen=True)
class ConstantLeaf:
    value: Any


@dataclass(frozen=True)
class Branch:
    """A container: its type, the keys of a dict, the structures of its items."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]
    maxlen: int | None = None


Structure = TensorLeaf | NumberLeaf | ConstantLeaf | Branch


@dataclass
class Taken:
    """The tensors and numbers of trees, in the order of `take_apart`."""

    tensors: list[Tensor] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)


def take_apart(value: Any, taken: Taken, name: str = "") -> Structure:
    """The structure of a value; its tensors and numbers are appended to ``taken``.

    Raises:
        TypeError: for a type of value that the module's docstring does not name.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        if kind not in PLAIN and is_traceable_wrapper_subclass(value):
            return take_apart(_as_dict(value), taken, name)
        if is_subclass(value):
            raise TypeError(
                f"'{name}' was quantized shard by shard, by steps over DTensors; whole_step steps "
                "whole parameters. Apply it before the first step, and load state of such steps"
            )
        if kind not in PLAIN:
            raise TypeError(
                f"whole_step moves state between ranks; '{name}' is a tensor subclass "
                f"({kind.__name__}), which it cannot take apart"
            )
        taken.tensors.append(value)
        on_host = value.ndim == 0 and value.device.type == "cpu"
        return TensorLeaf(tuple(value.shape), value.dtype, on_host)
    if kind in NUMBERS and (kind is not int or abs(value) <= EXACT):
        taken.numbers.append(float(value))
        return NumberLeaf(kind)
    if kind in NUMBERS or isinstance(value, CONSTANTS):
        return ConstantLeaf(value)
    if isinstance(value, dict):
        items = tuple(take_apart(v, taken, f"{name}.{k}") for k, v in value.items())
        return Branch(dict, tuple(value), items)
    if kind in (list, tuple, deque, torch.Size):
        items = tuple(take_apart(v, taken, f"{name}[{i}]") for i, v in enumerate(value))
        return Branch(kind, (), items, value.maxlen if kind is deque else None)
    raise TypeError(
        "whole_step moves state between ranks, and can move tensors, numbers, strings and "
        f"containers of these; '{name}' is of type {kind.__name__}"
    )


def put_together(structure: Structure, tensors: Iterator[Any], numbers: Iterator[float]) -> Any:
    """The reverse of `take_apart`, with tensors and numbers from the iterators."""
    if isinstance(structure, TensorLeaf):
        return next(tensors)
    if isinstance(structure, NumberLeaf):
        return structure.kind(next(numbers))
    if isinstance(structure, ConstantLeaf):
        return structure.value
    items = [put_together(item, tensors, numbers) for item in structure.items]
    if structure.kind is dict:
        return dict(zip(structure.keys, items, strict=True))
    if structure.kind is deque:
        return deque(items, structure.maxlen)
    return structure.kind(items)


def _as_dict(value: Any) -> dict[str, Any]:
    """A tensor subclass as the dict that stands for it."""
    names, context = value.__tensor_flatten__()
    kind = type(value)
    return {
        SUBCLASS: f"{kind.__module__}:{kind.__qualname__}",
        "shape": tuple(value.shape),
        "context": context,
        "tensors": {name: getattr(value, name) for name in names},
    }


def as_subclasses(value: Any) -> Any:
    """The same tree with tensor subclasses in place of the dicts that stand for them."""
    if isinstance(value, dict):
        items = {key: as_subclasses(item) for key, item in value.items()}
        return _as_subclass(items) if SUBCLASS in items else items
    if isinstance(value, deque):
        return deque(map(as_subclasses, value), value.maxlen)
    return type(value)(map(as_subclasses, value)) if type(value) in (list, tuple) else value


def _as_subclass(found: dict[str, Any]) -> Tensor:
    module, _, names = found[SUBCLASS].partition(":")
    # Only a class that the program has imported: a checkpoint must not cause an import.
    kind: Any = sys.modules.get(module)
    for name in names.split("."):
        kind = getattr(kind, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise TypeError(f"State is of {module}.{names}, which is not an imported class of tensors")
    shape = torch.Size(found["shape"])
    strides = torch.empty(shape, device="meta").stride()
    unflatten = kind.__tensor_unflatten__  # type: ignore[attr-defined]
    return unflatten(found["tensors"], found["context"], shape, strides)


def tensor_leaves(structure: Structure) -> Iterator[TensorLeaf]:
    """The tensors of a structure, in the order of `take_apart`."""
    if isinstance(structure, TensorLeaf):
        yield structure
    elif isinstance(structure, Branch):
        for item in structure.items:
            yield from tensor_leaves(item)


def num_numbers(structure: Structure) -> int:
    if isinstance(structure, Branch):
        return sum(map(num_numbers, structure.items))
    return int(isinstance(structure, NumberLeaf))


def map_tensors(value: Any, function: Any) -> Any:
    """New containers of the same kind, with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {k: map_tensors(v, function) for k, v in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, items)
        return items
    if isinstance(value, deque):
        return deque((map_tensors(v, function) for v in value), value.maxlen)
    if type(value) in (list, tuple, set):
        return type(value)(map_tensors(v, function) for v in value)
    return value


def is_container(value: Any) -> bool:
    return isinstance(value, dict | deque) or type(value) in (list, tuple, set)


def copied(value: Any) -> Any:
    """A copy that may be changed without changing the original; parameters and objects are shared.

    For what an optimizer keeps next to its state: options, counters, small tensors, generators.
    """
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return map_tensors(value, _copied_tensor)


def _copied_tensor(tensor: Tensor) -> Tensor:
    shared = isinstance(tensor, nn.Parameter | DTensor) or tensor.requires_grad
    return tensor if shared else tensor.clone()


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal; NaN equals NaN among floats."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    try:
        return bool(a == b)
    except Exception:
        return False
