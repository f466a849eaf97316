"""Optimizers that quantize their state, over DTensors: do shards get the whole parameters' state?

Such an optimizer (torchao's) decides by the number of elements that it sees whether to quantize,
and gives every block of them a scale. Over DTensors it sees shards. The state is the same as on one
process only if all shards are quantized when the parameter would be, and if they begin and end
where blocks do.

No list of names: the optimizer's own step runs on meta tensors of the shapes of the parameter and
of all its shards. Every rank has these shapes, so all find the same without communication.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm, prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..dtensor.boxes import Box, run_numel, run_offsets
from ..dtensor.placement import boxes_of
from ..dtensor.subclasses import inner_of
from .exchange import cut_of
from .probe import quietly
from .stepping import isolated, original_name, raw_step
from .values import copied, map_tensors

Shape = tuple[int, ...]
_compared: WeakSet[Optimizer] = WeakSet()


@dataclass(frozen=True)
class Quantized:
    """How one tensor of the state is quantized.

    Attributes:
        numels: number of elements of each inner tensor, by name.
    """

    numels: dict[str, int]


State = dict[Any, Quantized]  # what is quantized, by key


def may_quantize(kind: type[Optimizer]) -> bool:
    """Whether the module of the class, or of one of its bases, has a tensor subclass."""
    return any(
        _is_wrapper(value)
        for name in {base.__module__ for base in kind.__mro__ if issubclass(base, Optimizer)}
        if not name.startswith(("torch.", "fsdp2."))
        for value in tuple(vars(sys.modules[name]).values() if name in sys.modules else ())
    )


def _is_wrapper(value: Any) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, Tensor)
        and hasattr(value, "__tensor_flatten__")
        and not value.__module__.startswith("torch.")
    )


def block_rows(block_numel: int, min_numel: int = 0) -> Callable[[nn.Parameter], int]:
    """A ``shard_granularity`` with which quantized state does not depend on the number of ranks.

    Use it for optimizers that quantize a parameter's state in blocks of elements, if the parameter
    has enough elements and blocks divide it. Every shard is then quantized in the same blocks as
    the parameter on one process.

    Args:
        block_numel: elements per block.
        min_numel: parameters of fewer elements are not quantized.

    Returns:
        A function of a parameter, for `fully_shard` and `shard_model`. It finds the fewest rows
        with which shards on dim 0 consist of whole blocks and have at least ``min_numel`` elements.
        A parameter that blocks do not divide is not quantized on one process, so one rank gets all
        of its rows. Each part of a tensor-parallel parameter counts as a parameter.

    Raises:
        ValueError: if ``block_numel`` is below 1 or ``min_numel`` is negative.

    Example:
        >>> # For torchao.optim.AdamW8bit with its default block_size:
        >>> shard_model(model, shard_granularity=block_rows(256, min_numel=4096))
    """
    if block_numel < 1 or min_numel < 0:
        raise ValueError(f"There are no blocks of {block_numel} of at least {min_numel} elements")

    def rows_per_block(param: nn.Parameter) -> int:
        # Of the parts of all ranks of tensor parallelism, since the number must be the same on all.
        sizes = {
            (shape[0], prod(shape[1:]))
            for shape in map(torch.Size, _local_shapes(param))
            if shape and shape.numel() >= max(min_numel, 1)
        }
        most = max((size for size, _ in sizes), default=1)
        step = lcm(*(block_numel // gcd(block_numel, row) for _, row in sizes))
        return next(
            (
                rows
                for rows in range(step, most, step)
                if all(_fits(rows, *size, block_numel, min_numel) for size in sizes)
            ),
            most,
        )

    return rows_per_block


def _local_shapes(param: Tensor) -> set[Shape]:
    """The shapes of the parts of ``param`` that the ranks of its mesh have; its own without one."""
    if not isinstance(param, DTensor):
        return {tuple(param.shape)}
    boxes = boxes_of(tuple(param.shape), tuple(param.device_mesh.shape), tuple(param.placements))
    return {box.shape for box in boxes}


def _fits(rows: int, size: int, row: int, block_numel: int, min_numel: int) -> bool:
    """Whether ``size`` rows of ``row`` elements may be cut into shards of ``rows``."""
    if rows >= size:
        return True
    # The last shard has the rows that are left over, and perhaps some blocks.
    rest = size % rows
    return (
        size * row % block_numel == 0
        and rows * row >= min_numel
        and (not rest or rest * row >= min_numel)
    )


def warn_of_differences(
    known: Callable[[Tensor], Any], optimizer: Optimizer, *given: object
) -> None:
    """Warn, once, of parameters whose state is not quantized as on one process.

    Args:
        known: what is known of a sharded parameter, with its name as ``fqn``; None for others.
        optimizer: its step is tried on meta tensors; otherwise it is left as it is.
        given: what the step was given.
    """
    if optimizer in _compared:
        return
    _compared.add(optimizer)
    # The functions of fsdp2.optim replace the class, and have tried the optimizer out.
    if hasattr(type(optimizer), "_runner") or not may_quantize(type(optimizer)):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named = [(found.fqn, param) for param in params if (found := known(param)) is not None]
    message = _describe(optimizer, named)
    if message is not None:
        warnings.warn(message, stacklevel=4)


def _describe(optimizer: Optimizer, params: Iterable[tuple[str, Any]]) -> str | None:
    trials = Trials(optimizer)
    found = [(name, p, why) for name, p in params if (why := trials.why_different(p))]
    if not found:
        return None
    name, param, why = found[0]
    others = f" (and {len(found) - 1} more parameters differ)" if len(found) > 1 else ""
    return (
        f"{original_name(optimizer)} over DTensors decides shard by shard how to quantize its "
        f"state, so its steps are not the same as on one process: for '{name}' of shape "
        f"{tuple(param.shape)}, {why}{others}. fsdp2.optim.whole_step(optimizer) quantizes as one "
        "process does, and so do DTensors that are sharded with a shard_granularity: see "
        "block_rows in docs/optimizers.md"
    )


class Trials:
    """Steps of an optimizer on meta tensors; each combination of group, shape and dtype once."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {
            id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._states: dict[tuple[int, Shape, torch.dtype], State | None] = {}

    def why_different(self, param: DTensor) -> str | None:
        """Why the shards' state differs from the whole parameter's; None if it does not."""
        shape, mesh_shape = tuple(param.shape), tuple(param.device_mesh.shape)
        boxes = cut_of(shape, mesh_shape, tuple(param.placements)).boxes
        whole = self._state(param, shape)
        parts = {box.shape: self._state(param, box.shape) for box in boxes}
        if whole is None or any(part is None for part in parts.values()):
            return None  # it cannot step on meta tensors: nothing is known
        return _compare(shape, whole, [(box, parts[box.shape] or {}) for box in boxes])

    def _state(self, param: DTensor, shape: Shape) -> State | None:
        key = self._groups[id(param)], shape, param.dtype
        if key not in self._states:
            self._states[key] = self._try(*key)
        return self._states[key]

    def _try(self, group: int, shape: Shape, dtype: torch.dtype) -> State | None:
        plain = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        plain.grad = torch.empty_like(plain)
        options: dict[str, Any] = {
            key: map_tensors(copied(value), Tensor.cpu)
            for key, value in self._optimizer.param_groups[group].items()
            if key not in ("params", "param_names")
        }
        state: defaultdict[Any, Any] = defaultdict(dict)
        with isolated(self._optimizer, [{**options, "params": [plain]}], state), quietly():
            try:
                # For numbers that a step makes: a GPU's do not mix with meta tensors.
                with torch.device("cpu"):
                    raw_step(type(self._optimizer))(self._optimizer)
            except Exception:
                return None
        return {
            key: Quantized({n: t.numel() for n, t in inner_of(value).items()})
            for key, value in state[plain].items()
            if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)
        }


def _compare(shape: Shape, whole: State, parts: Sequence[tuple[Box, State]]) -> str | None:
    found = {part.keys() == whole.keys() for _, part in parts}
    if found != {True}:
        some = "some shards" if len({frozenset(part) for _, part in parts}) > 1 else "shards"
        if whole:
            return f"it keeps the state of {some} in full precision, and one process quantizes it"
        return f"it quantizes the state of {some}, and one process keeps it in full precision"
    for key, of_whole in whole.items():
        for box, part in parts:
            if not _same_blocks(shape, of_whole.numels, box, part[key].numels):
                return f"shards do not begin and end where the blocks of '{key}' do"
    return None


def _same_blocks(shape: Shape, whole: dict[str, int], box: Box, part: dict[str, int]) -> bool:
    """Whether the blocks of a shard are blocks of the whole: each inner tensor has one element for
    so many of the parameter, or is a table, equal in both."""
    if box.numel == prod(shape):
        return True
    for name, num in whole.items():
        if part.get(name) == num > 1:
            continue  # a table
        block, rest = divmod(prod(shape), num) if num else (0, 0)
        if rest or not block or part.get(name, 0) * block != box.numel:
            return False
        run = run_numel(box, shape)
        if run % block or any(first % block for first in run_offsets(box, shape, run)):
            return False
    return True
