"""Which parameters of a group make one flat tensor, and the state of that tensor.

A unit keeps the shards of its parameters side by side in one storage, and its gradients likewise.
A *run* is a list of parameters that lie side by side in both, and whose state agrees: the same keys
and dtypes, and equal numbers for a whole parameter (such as ``step``). An elementwise optimizer may
see a run as one parameter. Nothing here asks a unit how its storage is laid out: addresses tell, so
runs end where there is padding, where a gradient is missing, and where a user has put other memory.

Outside of the step, state is one DTensor per parameter, a slice of the state of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import attrgetter, is_, sub
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dtensor.memory import at_address, with_own_storage
from ..dtensor.parts import laid_out_like, local_part, placed_like
from .local import not_elementwise
from .values import NUMBERS, is_container, map_tensors

State = dict[Tensor, Any]
Signature = tuple[Any, ...]
CONSTANTS = (*NUMBERS, type(None), str)


class Piece:
    """A parameter with a gradient, as a part of a run that is to be found."""

    __slots__ = ("address", "grad", "grad_dtype", "local", "numel", "param", "signature")

    def __init__(self, param: DTensor, grad: Tensor, signature: Signature) -> None:
        self.param = param
        self.local = param._local_tensor
        self.numel = self.local.numel()
        self.address = self.local.data_ptr()
        self.grad = grad.data_ptr()
        self.grad_dtype = grad.dtype
        attached = tuple(
            (name, id(value)) for name, value in vars(param).items() if name not in _OWN
        )
        kind = (self.local.device, self.local.dtype, grad.dtype, param.requires_grad, attached)
        self.signature = (kind, signature)

    def follows(self, other: Piece) -> bool:
        """Whether it lies right behind another piece, with its gradient."""
        ends = (
            other.address + other.local.nbytes,
            other.grad + other.numel * other.grad_dtype.itemsize,
        )
        return (self.address, self.grad) == ends and self.signature == other.signature


_spec_of, _local_of = attrgetter("_spec"), attrgetter("_local_tensor")
# What torch keeps in the ``__dict__`` of a DTensor.
_OWN = {"_local_tensor", "_spec"}


@dataclass(eq=False)
class Run:
    """Parameters that an optimizer sees as one.

    Attributes:
        params, sources: the DTensors and their local tensors; those without elements come last.
        num_solid: how many have elements.
        offsets: where each begins in ``plain``.
        plain: the flat parameter.
        seen: its state, as it was given to the optimizer.
        grad: the flat gradient, over memory that the gradients own, and its address.
    """

    params: list[DTensor]
    sources: list[Tensor]
    num_solid: int
    offsets: list[int]
    plain: nn.Parameter
    grad_dtype: torch.dtype
    seen: dict[Any, Any] = field(default_factory=dict)
    grad: Tensor | None = None
    grad_address: int = -1

    @classmethod
    def of(cls, solid: Sequence[Piece], empty: Sequence[Piece]) -> Run:
        pieces = [*solid, *empty]
        ends = list(accumulate(piece.numel for piece in pieces))
        first = pieces[0]
        if solid:
            flat = at_address(first.address, ends[-1], first.local)
        else:
            flat = first.local.new_empty(0)
        plain = nn.Parameter(flat, requires_grad=first.param.requires_grad)
        own = vars(plain)
        own.update((k, v) for k, v in vars(first.param).items() if k not in own and k not in _OWN)
        return cls(
            [piece.param for piece in pieces],
            [piece.local for piece in pieces],
            len(solid),
            [0, *ends[:-1]],
            plain,
            first.grad_dtype,
        )

    def show_gradient(self, address: int) -> None:
        """Give ``plain`` its gradient, which begins at ``address``."""
        if self.grad is None or self.grad_address != address:
            numel, like = self.plain.numel(), self.plain.detach()
            # Nothing may refer to gradients between steps: code that reuses their memory counts.
            like = like.new_empty(0, dtype=self.grad_dtype)
            self.grad = at_address(address, numel, like) if numel else like
            self.grad_address = address
        self.plain.grad = self.grad

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
        solid = parts[: self.num_solid]
        if not solid:
            return None
        size, start = solid[0].itemsize, solid[0].data_ptr()
        for part, offset in zip(solid, self.offsets, strict=False):
            if not part.is_contiguous() or part.data_ptr() != start + offset * size:
                return None
        return at_address(start, self.plain.numel(), solid[0])

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
        if address in (self.plain.data_ptr(), self.grad_address):
            return tensor.clone()
        return tensor.contiguous()


def _replaces(known: Any, value: Any) -> bool:
    """Whether a new tensor can be copied to the former one."""
    if not isinstance(known, Tensor) or not isinstance(value, Tensor):
        return False
    alike = (known.shape, known.dtype, known.device) == (value.shape, value.dtype, value.device)
    return alike and type(value) is Tensor


class Numbers:
    """One entry of the state that is a 0-dim tensor, such as ``step``, for several runs.

    Each run has one, which the optimizer writes; each parameter has one, which users see. All of a
    kind lie in a vector, so that one copy brings the latter up to date.
    """

    def __init__(self, key: Any, runs: Sequence[Run], state: State) -> None:
        first = [state[run.params[0]][key] for run in runs]
        counts = torch.tensor([len(run.params) for run in runs])
        self.of_runs = torch.stack(first)
        self.index = torch.arange(len(runs)).repeat_interleave(counts).to(first[0].device)
        self.of_params = self.of_runs.index_select(0, self.index)
        for i, run in enumerate(runs):
            run.seen[key] = self.of_runs[i]
        for i, param in enumerate(chain.from_iterable(run.params for run in runs)):
            state[param][key] = self.of_params[i]
        self.note()

    def note(self) -> None:
        self.versions = self.of_runs._version, self.of_params._version

    def is_current(self) -> bool:
        """Whether only the optimizer has written since."""
        return self.of_params._version == self.versions[1]

    def update(self) -> None:
        """Give the parameters the numbers of their runs."""
        if self.of_runs._version != self.versions[0]:
            torch.index_select(self.of_runs, 0, self.index, out=self.of_params)
            self.note()


class Plan:
    """How the parameters of a group are shown: those in runs, and the others one by one.

    Attributes:
        others: not in a run: without a gradient, plain, or alone.
        stale: the state has got other entries since it was read.
    """

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: State
    ) -> None:
        self.all = list(params)
        self.missing = [grad is None for grad in grads]
        pieces = find_pieces(params, grads, state)
        self.runs = find_runs(pieces)
        in_runs = {id(param) for run in self.runs for param in run.params}
        self.others = [param for param in params if id(param) not in in_runs]
        # Where gradients lie anew in each step, none may have been side by side by chance.
        self._may_join = len(pieces) - len(in_runs) > 1
        self._uses = 0
        self.stale = False
        self._params = [param for run in self.runs for param in run.params]
        self.sources = [source for run in self.runs for source in run.sources]
        self._note_gradients(params)
        for run in self.runs:
            run.read(state)
        self._numbers = _numbers(self.runs, state)
        self.note_state(state)
        found = self._find_gradients(grads)
        assert found

    def _note_gradients(self, params: Sequence[Tensor]) -> None:
        index = {id(param): i for i, param in enumerate(params)}
        self._order = [index[id(param)] for param in self._params]
        self._solid = [index[id(p)] for run in self.runs for p in run.params[: run.num_solid]]
        self._specs: list[Any] = [p.grad._spec for p in self._params]  # type: ignore[union-attr]
        self._offsets: list[int] = []
        self._spans: list[tuple[int, int]] = []
        for run in self.runs:
            start = len(self._offsets)
            size = run.grad_dtype.itemsize
            self._offsets += [size * offset for offset in run.offsets[: run.num_solid]]
            self._spans.append((start, len(self._offsets)))

    def note_state(self, state: State) -> None:
        """Remember the state outside as it is now."""
        self._dicts = list(map(state.get, self._params))
        self._values = _values(self._dicts)
        # Whatever users do to a local tensor, the memory of the flat tensors stays.
        locals_ = [value._local_tensor for value in self._values if isinstance(value, DTensor)]
        self._storages = [local.untyped_storage() for local in (*locals_, *self.sources)]

    def is_current(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: State
    ) -> bool:
        """Whether the runs are still runs. Nothing here is done in Python per parameter."""
        self._uses += 1
        again = self._may_join and not self._uses & (self._uses - 1)  # less and less often
        if self.stale or again or not _all_same(params, self.all):
            return False
        if [grad is None for grad in grads] != self.missing:
            return False
        if not all(map(is_, map(_local_of, self._params), self.sources)):
            return False
        return self._state_is_current(state) and self._find_gradients(grads)

    def _state_is_current(self, state: State) -> bool:
        return (
            all(map(is_, map(state.get, self._params), self._dicts))
            and _all_same(_values(self._dicts), self._values)
            and all(numbers.is_current() for numbers in self._numbers)
        )

    def _find_gradients(self, grads: Sequence[Any]) -> bool:
        """Show the gradients to the runs, if they lie side by side as before."""
        # All loops are in C: this is most of what a step costs beyond the optimizer's own work.
        try:
            if not all(map(is_, map(_spec_of, map(grads.__getitem__, self._order)), self._specs)):
                return False
        except AttributeError:  # a user's own, not a DTensor
            return False
        parts = list(map(_local_of, map(grads.__getitem__, self._solid)))
        if set(map(type, parts)) - {Tensor} or not all(map(Tensor.is_contiguous, parts)):
            return False
        begins = list(map(sub, map(Tensor.data_ptr, parts), self._offsets))
        for run, (start, stop) in zip(self.runs, self._spans, strict=True):
            if start == stop:
                run.show_gradient(0)
            elif begins[start:stop].count(begins[start]) != stop - start:
                return False
            else:
                run.show_gradient(begins[start])
        return True

    def take_over(self, inner: Any, state: State, who: str) -> None:
        """Bring the state outside up to date after a step."""
        replaced = False
        for run in self.runs:
            run.plain.grad = None
            seen = inner.get(run.plain)
            if seen is None and not run.seen:
                continue
            changed = run.take_over(seen or {}, state, who)
            self.stale |= changed is None
            replaced |= changed is True
        for numbers in self._numbers:
            numbers.update()
        if replaced and not self.stale:
            self.note_state(state)


def find_pieces(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], state: State
) -> list[Piece]:
    """The parameters that may be part of a run."""
    chosen = [
        (param, grad)
        for param, grad in zip(params, grads, strict=True)
        if isinstance(param, DTensor) and isinstance(grad, DTensor)
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
            pieces.append(Piece(param, part, signature))
    return pieces


def _is_simple(tensor: Tensor) -> bool:
    strided = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return strided and tensor.is_contiguous()


def find_runs(pieces: Sequence[Piece]) -> list[Run]:
    """The runs of at least two parameters."""
    chains: list[list[Piece]] = []
    for piece in sorted((p for p in pieces if p.numel), key=lambda p: p.address):
        if chains and piece.follows(chains[-1][-1]):
            chains[-1].append(piece)
        else:
            chains.append([piece])
    # Parameters of which this rank has nothing lie nowhere: they join any run that agrees.
    empty: dict[Signature, list[Piece]] = {}
    for piece in pieces:
        if not piece.numel:
            empty.setdefault(piece.signature, []).append(piece)
    found = [(solid, empty.pop(solid[0].signature, [])) for solid in chains]
    found += [([], rest) for rest in empty.values()]
    return [Run.of(solid, rest) for solid, rest in found if len(solid) + len(rest) > 1]


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


def _numbers(runs: Sequence[Run], state: State) -> list[Numbers]:
    kinds: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        for key, value in run.seen.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                kinds.setdefault((key, value.dtype, value.device), []).append(run)
    return [Numbers(key, members, state) for (key, *_), members in kinds.items()]


def _values(dicts: Iterable[dict[Any, Any] | None]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, dicts))))


def _all_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
