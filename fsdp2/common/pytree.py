"""Tensors in the arguments and results of forward: find them, replace them.

Containers: tuple (named ones too), list, dict and its subclasses, dataclass instances; anything
else is left as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in ``tree``, depth first."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name, None))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``function(tensor)``.

    Containers in which nothing changed are returned as the same objects.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return _map_dict(function, tree)
    if isinstance(tree, list | tuple):
        values = [map_tensors(function, value) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*values)
        return type(tree)(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(function, tree)
    return tree


def _map_dict(function: Callable[[torch.Tensor], torch.Tensor], tree: dict) -> dict:
    values = {key: map_tensors(function, value) for key, value in tree.items()}
    if all(values[key] is tree[key] for key in values):
        return tree
    if type(tree) is dict:
        return values
    result = copy.copy(tree)  # keeps the type and other attributes
    for key, value in values.items():
        result[key] = value
    return result


def _map_dataclass(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    result = tree
    for field in dataclasses.fields(tree):
        old = getattr(tree, field.name, None)
        new = map_tensors(function, old)
        if new is not old:
            result = copy.copy(tree) if result is tree else result
            object.__setattr__(result, field.name, new)
    return result


def cast_floating(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that casts floating-point tensors to ``dtype`` and leaves others."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return cast
