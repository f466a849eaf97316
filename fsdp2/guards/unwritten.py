"""Tensors that ``to_empty`` made and nothing wrote: found at the first forward.

``to_empty`` gives a model from the meta device memory without values. If a part of it is never
written (a checkpoint has no rotary buffers, an init skips a parameter), the model runs and computes
nonsense. So a few elements of each such tensor get a bit pattern, which is checked before the first
forward: a tensor that still has all of it was never written.

Version counters would not do: they miss writes through ``.data``, from NumPy or from a file. A few
elements are enough: nothing writes only the rest of a tensor, and reading 16 of each takes one
transfer from the device for the whole model. Later steps do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..runtime.events import TreePart, UnitPart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Unit
from ..sharding.param import ShardedParam
from .samples import bits_of

# Quiet NaNs with a payload in the floating-point types; far from any count or index in integers.
_PATTERNS = {1: -91, 2: -27, 4: -1727067, 8: -948991719791195}  # by the size of an element
# What torch's to_empty hands to _apply; a test notices if that changes.
_TO_EMPTY = nn.Module.to_empty.__qualname__ + ".<locals>.<lambda>"


@dataclass
class Marked:
    """A tensor with the pattern: a sharded parameter, or a module's tensor by name."""

    param: ShardedParam | None = None
    module: nn.Module | None = None
    name: str = ""

    def tensor(self) -> torch.Tensor | None:
        """The present tensor."""
        # By name and not by reference: moves, casts and loads replace buffers and local tensors.
        if self.param is not None:
            return self.param.local
        for table in (self.module._parameters, self.module._buffers):  # type: ignore[union-attr]
            if self.name in table:
                return table[self.name]
        return None

    def full_name(self, names: dict[nn.Module, str]) -> str:
        """The name in the model whose modules ``names`` lists."""
        module, name = self.module, self.name
        if self.param is not None:
            module, name = self.param.owners[0]
        assert module is not None
        prefix = names.get(module, "")
        return f"{prefix}.{name}" if prefix else name


def to_be_made(
    fn: object, modules: Iterable[nn.Module], params: Iterable[ShardedParam]
) -> list[Marked]:
    """The tensors that ``fn``, an argument of ``Module._apply``, will make without values.

    Args:
        fn: the function of torch's ``to_empty``, or one with an attribute ``makes_empty``, which
            leaves tensors with values alone.
        modules: the modules of one unit, without modules of inner units.
        params: of the unit.
    """
    # ``_apply`` also serves ``.to`` and ``.half``, whose results have values. Only its function
    # distinguishes them.
    only_meta = getattr(fn, "makes_empty", False)
    if not only_meta and getattr(fn, "__qualname__", "") != _TO_EMPTY:
        return []
    members = set(modules)
    marks = [Marked(param=p) for p in params if any(module in members for module, _ in p.owners)]
    for module in members:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not isinstance(tensor, DTensor):
                marks.append(Marked(module=module, name=name))
    return [m for m in marks if not only_meta or m.tensor().is_meta]  # type: ignore[union-attr]


def write_pattern(marks: Iterable[Marked]) -> list[Marked]:
    """Write the pattern into new tensors; returns the marks that can be checked."""
    made = []
    with torch.no_grad():
        for mark in marks:
            found = _samples(mark.tensor())
            if found is not None:
                bits, index, pattern = found
                bits[index] = pattern
                made.append(mark)
    return made


def never_written(marks: Iterable[Marked]) -> list[Marked]:
    """The marks whose tensor still has the pattern."""
    asked: dict[torch.device, list[tuple[Marked, torch.Tensor]]] = {}
    # Results are collected per device and read at once: each separate read waits for the device.
    with torch.no_grad():
        for mark in marks:
            found = _samples(mark.tensor())
            if found is not None:
                bits, index, pattern = found
                same = (bits[index] == pattern).all()
                asked.setdefault(same.device, []).append((mark, same))
        return [
            mark
            for pairs in asked.values()
            for (mark, _), unwritten in zip(
                pairs, torch.stack([same for _, same in pairs]).tolist(), strict=True
            )
            if unwritten
        ]


def _samples(tensor: torch.Tensor | None) -> tuple[torch.Tensor, slice, int] | None:
    """The elements of a plain tensor as integers, the ones to check, and the pattern.

    None for tensors without such a view, or too small to be certain.
    """
    found = bits_of(tensor)
    # Fewer than four bytes may equal the pattern by chance. And as integers the patterns are
    # negative, unlike counts and indices: uint8 has no such value.
    if tensor is None or found is None or tensor.nbytes < 4 or tensor.dtype is torch.uint8:
        return None
    bits, index = found
    return bits, index, _PATTERNS[tensor.itemsize]


def warn_of_unwritten(root: nn.Module, marks: Iterable[Marked]) -> None:
    """Warn of tensors that ``to_empty`` made and nothing wrote, each at most once.

    Warns:
        UserWarning: with names and advice.
    """
    left = never_written(marks)
    if not left:
        return
    names = {module: name for name, module in root.named_modules()}
    listed = sorted({mark.full_name(names) for mark in left})
    some = ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")
    warnings.warn(
        f"to_empty() allocated memory that nothing has written since, so the model computes with "
        f"arbitrary values: {some}. Checkpoints do not hold non-persistent buffers, and an "
        "initialization may skip parameters. Call fsdp2.materialize(model) instead of to_empty(), "
        "or model.init_weights() after it, and then load",
        stacklevel=2,
    )


def check_meta_buffers(root: nn.Module) -> None:
    """Check that no buffer is on the meta device when a model is about to compute.

    Raises:
        RuntimeError: naming them.
    """
    left = [name for name, buffer in root.named_buffers() if buffer.is_meta]
    if left:
        raise RuntimeError(
            f"Buffers are still on the meta device, without values: {', '.join(left[:12])}"
            f"{f' and {len(left) - 12} more' if len(left) > 12 else ''}. State dicts and "
            "checkpoints do not hold non-persistent buffers: compute them with "
            "fsdp2.materialize(model, parameters=False), which calls model.init_weights()"
        )


def marks_of(unit: Unit) -> list[Marked]:
    """The tensors that ``to_empty`` made in ``unit``, until the next gather."""
    # A parameter may have left the unit since then.
    return [m for m in unit.of_parts.get(Marked, ()) if m.param is None or m.param in unit.params]


class _Marks(UnitPart):
    """Keeps track of tensors that ``to_empty`` makes."""

    def __init__(self) -> None:
        self._to_be_made: dict[Unit, list[Marked]] = {}  # of modules on the stack of `_apply`

    @override
    def before_apply(self, unit: Unit, fn: object, modules: Iterable[nn.Module]) -> None:
        self._to_be_made[unit] = to_be_made(fn, modules, unit.params)

    @override
    def after_apply(self, unit: Unit) -> None:
        made = write_pattern(self._to_be_made.pop(unit))
        if made:
            unit.of_parts.setdefault(Marked, []).extend(made)
            if unit.runtime is not None and runtime_of(unit).part(Unwritten) is None:
                runtime_of(unit).add(Unwritten(runtime_of(unit)))

    @override
    def merged(self, unit: Unit, former: Sequence[Unit]) -> None:
        if marks := [mark for each in former for mark in each.of_parts.pop(Marked, ())]:
            unit.of_parts[Marked] = marks


class Unwritten(TreePart):
    """Checks the marks before the first gather."""

    runtime: Runtime

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        # An error before any rank waits in a collective.
        check_meta_buffers(runtime.root.modules[0])
        return cls(runtime) if any(Marked in unit.of_parts for unit in runtime.units) else None

    @override
    def before_gather(self, unit: Unit) -> None:
        self.runtime.remove(self)
        units = self.runtime.units
        marks = [mark for each in units for mark in marks_of(each)]
        for each in units:
            each.of_parts.pop(Marked, None)
        warn_of_unwritten(self.runtime.root.modules[0], marks)


registry.add(_Marks())
registry.add(Unwritten)
