"""Which parameters of a group make one flat tensor, and the state of that tensor.

A *run* is a list of parameters whose state agrees: the same keys and dtypes, and equal numbers for
a whole parameter (such as ``step``). An elementwise optimizer may see a run as one parameter. It is
one block, whose memory the optimizer then writes, or several small ones. Those are copied to one
tensor before the step and back after it: cheaper than to run every operation for each of them.

Outside of the step, state is one DTensor per parameter, a slice of the state of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dtensor.memory import at_address, packs, with_own_storage
from ..dtensor.parts import laid_out_like, local_part, placed_like
from .flat_blocks import MERGED_BYTES, OWN, FlatBlock, FlatPiece, History, Signature, find_blocks
from .local import not_elementwise
from .values import NUMBERS, is_container, map_tensors

State = dict[Tensor, Any]
CONSTANTS = (*NUMBERS, type(None), str)
# Blocks up to this size are copied together, into tensors of up to `MERGED_BYTES`.
SMALL_BYTES = 32 * 1024


class Copies:
    """Several blocks as one tensor: copied there before a step, and back after it."""

    def __init__(self, blocks: Sequence[FlatBlock], grad_dtype: torch.dtype) -> None:
        self._blocks = blocks
        sizes = [block.numel for block in blocks]
        self._values = [block.values() for block in blocks]
        self.values = torch.cat(self._values)
        self.grads = torch.empty_like(self.values, dtype=grad_dtype)
        self._value_parts = self.values.split(sizes)
        self._grad_parts = self.grads.split(sizes)

    def take(self) -> None:
        """Copy parameters and gradients here."""
        torch._foreach_copy_(self._value_parts, self._values)
        torch._foreach_copy_(self._grad_parts, [block.gradient() for block in self._blocks])

    def give_back(self) -> None:
        """Copy parameters and gradients back."""
        # Gradients too: fused steps divide them by a scale, and do not count that as a write.
        torch._foreach_copy_(self._values, self._value_parts)
        torch._foreach_copy_([block.gradient() for block in self._blocks], self._grad_parts)


@dataclass(eq=False)
class FlatRun:
    """Parameters that an optimizer sees as one.

    Attributes:
        blocks: where they lie.
        params, sources: the DTensors and their local tensors.
        offsets: where each begins in ``plain``.
        plain: the flat parameter.
        copies: if there are several blocks.
        seen: its state, as it was given to the optimizer.
        active: whether there are gradients in this step.
    """

    blocks: list[FlatBlock]
    params: list[DTensor]
    sources: list[Tensor]
    offsets: list[int]
    plain: nn.Parameter
    copies: Copies | None
    seen: dict[Any, Any] = field(default_factory=dict)
    active: bool = True

    @classmethod
    def of(cls, blocks: list[FlatBlock]) -> FlatRun:
        params = [param for block in blocks for param in block.params]
        starts = accumulate((block.numel for block in blocks), initial=0)
        offsets = [
            start + offset
            for start, block in zip(starts, blocks, strict=False)
            for offset in block.offsets
        ]
        copies = Copies(blocks, blocks[0].grad_dtype) if len(blocks) > 1 else None
        flat = copies.values if copies is not None else blocks[0].values()
        plain = nn.Parameter(flat, requires_grad=params[0].requires_grad)
        own = vars(plain)
        own.update((k, v) for k, v in vars(params[0]).items() if k not in own and k not in OWN)
        sources = [source for block in blocks for source in block.sources]
        return cls(blocks, params, sources, offsets, plain, copies)

    def is_split(self) -> bool:
        """Whether only some of the blocks have gradients."""
        missing = [block.grad_address is None for block in self.blocks]
        self.active = not any(missing)
        return not self.active and not all(missing)

    def show(self) -> None:
        """Give ``plain`` its values and gradient, if there is one."""
        if self.copies is not None and self.active:
            self.copies.take()
            self.plain.grad = self.copies.grads
        elif self.active:
            self.plain.grad = self.blocks[0].gradient()

    def hide(self) -> None:
        """Undo `show`; what the step wrote goes to the parameters."""
        if self.active:
            self.plain.grad = None
            if self.copies is not None:
                self.copies.give_back()

    # -- state -------------------------------------------------------------------------------

    def read(self, state: State) -> None:
        """Make the flat tensors of the state, over the memory of the slices where they fit."""
        self.seen = {}
        outer: list[dict[Any, Any]] = [state.get(param) or {} for param in self.params]
        for key, value in outer[0].items():
            if not isinstance(value, DTensor):
                self.seen[key] = value  # numbers: `Numbers` replaces those that are tensors
                continue
            self.seen[key] = self._joined([local_part(each[key]) for each in outer])
            if self.seen[key] is None:
                parts = [local_part(each[key]).reshape(-1) for each in outer]
                self.seen[key] = flat = torch.cat(parts)
                for i, each in enumerate(outer):
                    each[key] = self.slice(flat, i)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The parts as one tensor, if they lie side by side."""
        solid = [(part, i) for part, i in zip(parts, self.offsets, strict=True) if part.numel()]
        if not solid:
            return None
        first = solid[0][0]
        size, start = first.itemsize, first.data_ptr()
        for part, offset in solid:
            if not part.is_contiguous() or part.data_ptr() != start + offset * size:
                return None
        return at_address(start, self.plain.numel(), first)

    def slice(self, flat: Tensor, i: int) -> DTensor:
        """The state of parameter ``i``, as a slice of the run's."""
        source = self.sources[i]
        start = self.offsets[i]
        local = flat[start : start + source.numel()].view(source.shape)
        # An own storage: pickles then have these bytes only. It keeps the whole memory alive.
        local = with_own_storage(local) if local.numel() else flat.new_empty(source.shape)
        return laid_out_like(local, self.params[i])

    def take_over(self, inner: dict[Any, Any], state: State, who: str) -> bool | None:
        """Take over what the step wrote; state that it wrote in place is outside already.

        Returns:
            True if numbers outside were replaced, None if the state has other entries now.
        """
        changed: bool | None = False
        for key, value in inner.items():
            known = self.seen.get(key)
            if value is known and (known is not None or key in self.seen):
                continue
            if _replaces(known, value):
                known.copy_(value)  # type: ignore[union-attr]
                inner[key] = known
            elif key in self.seen and isinstance(value, CONSTANTS) and isinstance(known, CONSTANTS):
                self.seen[key] = value
                for param in self.params:
                    state[param][key] = value
                changed = True if changed is not None else None
            else:
                self._write(key, value, state, who)
                changed = None
        for key in self.seen.keys() - inner.keys():
            for param in self.params:
                state[param].pop(key, None)
            changed = None
        return changed

    def _write(self, key: Any, value: Any, state: State, who: str) -> None:
        """Deal out a new entry of the state."""
        numel = self.plain.numel()
        flats: dict[int, Tensor] = {}

        def deal(i: int, tensor: Tensor) -> Tensor:
            if tensor.ndim == 0:
                return tensor.clone()
            if tensor.shape != (numel,):
                raise not_elementwise(who, key, tensor, self.plain)
            if id(tensor) not in flats:
                flats[id(tensor)] = self._owned(tensor)
            return self.slice(flats[id(tensor)], i)

        for i, param in enumerate(self.params):
            if is_container(value) or isinstance(value, Tensor):
                state[param][key] = map_tensors(value, lambda t, i=i: deal(i, t))
            else:
                state[param][key] = value

    def _owned(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy if it is the flat parameter or gradient, which own no memory."""
        address = tensor.untyped_storage().data_ptr()
        grad = self.copies.grads if self.copies is not None else self.blocks[0].gradient()
        if address in (self.plain.data_ptr(), grad.data_ptr()):
            return tensor.clone()
        return tensor.contiguous()


def _replaces(known: Any, value: Any) -> bool:
    """Whether a new tensor can be copied to the former one."""
    if not isinstance(known, Tensor) or not isinstance(value, Tensor):
        return False
    alike = (known.shape, known.dtype, known.device) == (value.shape, value.dtype, value.device)
    return alike and type(value) is Tensor


def find_pieces(params: Sequence[Tensor], state: State) -> list[FlatPiece]:
    """The parameters that may be part of a run."""
    chosen = [
        (param, param.grad)
        for param in params
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor)
    ]
    # In the order of the parameters, on all ranks: this may communicate.
    for param, _ in chosen:
        for key, value in (state.get(param) or {}).items():
            if isinstance(value, DTensor):
                state[param][key] = placed_like(value, param)
    numbers = _read_numbers(state.get(param) for param, _ in chosen)
    pieces = []
    for param, grad in chosen:
        part, source = grad._local_tensor, param._local_tensor
        if grad.placements != param.placements or not (_is_simple(part) and _is_simple(source)):
            continue
        if part.shape != source.shape or part.device != source.device:
            continue
        signature = _signature(state.get(param), source, numbers)
        if signature is not None:
            pieces.append(FlatPiece(param, grad, signature))
    return pieces


def _is_simple(tensor: Tensor) -> bool:
    strided = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return strided and tensor.is_contiguous()


def find_runs(pieces: Sequence[FlatPiece], history: History) -> list[FlatRun]:
    """The runs of at least two parameters."""
    joined: dict[Signature, list[FlatBlock]] = {}
    found: list[list[FlatBlock]] = []
    small = SMALL_BYTES if history.joins else 0
    for signature, block in find_blocks(pieces, packs(), history):
        if block.nbytes > small or not history.alone.isdisjoint(map(id, block.params)):
            found.append([block])
            continue
        blocks = joined.setdefault(signature, [])
        if sum(b.nbytes for b in blocks) + block.nbytes > MERGED_BYTES:
            found.append(joined[signature])
            blocks = joined[signature] = []
        blocks.append(block)
    found += joined.values()
    return [FlatRun.of(blocks) for blocks in found if sum(len(b.params) for b in blocks) > 1]


def _signature(
    outer: dict[Any, Any] | None, source: Tensor, numbers: dict[int, float]
) -> Signature | None:
    """What must agree between the states of a run; None for a state that cannot be part of one."""
    entries: list[Any] = []
    for key, value in (outer or {}).items():
        if isinstance(value, DTensor):
            local = value._local_tensor
            if not _is_simple(local) or local.shape != source.shape:
                return None
            entries.append((key, local.dtype, local.device))
        elif isinstance(value, Tensor):
            if id(value) not in numbers:
                return None
            entries.append((key, value.dtype, value.device, numbers[id(value)]))
        elif isinstance(value, CONSTANTS):
            entries.append((key, type(value), value))
        else:
            return None
    return tuple(entries)


def _read_numbers(states: Iterable[dict[Any, Any] | None]) -> dict[int, float]:
    """The values of the 0-dim tensors, by id; the host waits once for each kind of them."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for state in states:
        for value in (state or {}).values():
            if type(value) is Tensor and value.ndim == 0 and not value.is_meta:
                kinds.setdefault((value.dtype, value.device), []).append(value)
    return {
        id(tensor): number
        for tensors in kinds.values()
        for tensor, number in zip(tensors, torch.stack(tensors).tolist(), strict=True)
    }
