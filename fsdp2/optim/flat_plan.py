"""How the parameters of a group are shown in a step, as long as nothing changes.

To find runs takes long, so a plan is kept from step to step. `FlatPlan.is_current` compares what it
was made from with what there is now: parameters, local tensors, gradients, and state.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..dtensor.memory import Pack, packs
from .flat_blocks import History, local_of
from .flat_runs import FlatRun, State, find_pieces, find_runs

_grad_of = attrgetter("grad")
_END = object()  # behind the last of several values: comparing it compares their number


class Numbers:
    """One entry of the state that is a 0-dim tensor, such as ``step``, for several runs.

    Each run has one, which the optimizer writes; each parameter has one, which users see. All of a
    kind lie in a vector, so that one copy brings the latter up to date.
    """

    def __init__(self, key: Any, runs: Sequence[FlatRun], state: State) -> None:
        first = [state[run.params[0]][key] for run in runs]
        counts = torch.tensor([len(run.params) for run in runs])
        self.of_runs = torch.stack(first)
        self.index = torch.arange(len(runs)).repeat_interleave(counts).to(first[0].device)
        self.of_params = self.of_runs.index_select(0, self.index)
        for i, run in enumerate(runs):
            run.seen[key] = self.of_runs[i]
        for i, param in enumerate(chain.from_iterable(run.params for run in runs)):
            state[param][key] = self.of_params[i]
        self._version = self.of_params._version

    def is_current(self) -> bool:
        """Whether only the optimizer has written since."""
        return self.of_params._version == self._version

    def update(self) -> None:
        """Give the parameters the numbers of their runs."""
        # In every step: under a dispatch mode, foreach operators do not count as writes.
        torch.index_select(self.of_runs, 0, self.index, out=self.of_params)
        self._version = self.of_params._version


class FlatPlan:
    """How the parameters of a group are shown: those in runs, and the others one by one.

    Attributes:
        others: not in a run: without a gradient when the runs were found, plain, or alone.
        stale: the state has got other entries since it was read.
    """

    def __init__(self, params: Sequence[Tensor], state: State, history: History) -> None:
        self.all = list(params)
        self._history = history
        self.runs = find_runs(find_pieces(params, state), history)
        self._params = [param for run in self.runs for param in run.params]
        in_runs = set(map(id, self._params))
        self.others = [param for param in params if id(param) not in in_runs]
        self._may_join = sum(isinstance(param, DTensor) for param in self.others) > 1
        self.stale = False
        # If all blocks are in packs, for each: the pack, which of its DTensors are the gradients,
        # and where it was at the last look.
        self._packs: list[weakref.ref[Pack]] = []
        self._parts: list[tuple[Callable[[list[Tensor]], Sequence[Tensor]], int]] = []
        self.sources = [source for run in self.runs for source in run.sources]
        for run in self.runs:
            run.read(state)
        self._numbers = _numbers(self.runs, state)
        self.note_state(state)

    def note_state(self, state: State) -> None:
        """Remember the state outside as it is now."""
        self._agreed = True  # with the state at the last comparison
        self._dicts = list(map(state.get, self._params))
        self._values = list(_values(self._dicts))
        # Whatever users do to a local tensor, the memory of the flat tensors stays.
        locals_ = [value._local_tensor for value in self._values if isinstance(value, DTensor)]
        self._storages = [local.untyped_storage() for local in (*locals_, *self.sources)]

    def is_current(self, params: Sequence[Tensor], state: State, untouched: bool) -> bool:
        """Whether the runs are still runs; finds out where their gradients are.

        Args:
            untouched: the state has the same entries, each the same dict, as after the last step.
        """
        # Nothing here but a loop over blocks is done in Python per parameter. What it costs beyond
        # is the memory of the objects that are looked at: as few as possible are.
        history = self._history
        history.uses += 1
        if self._may_join and not history.uses & (history.uses - 1):  # less and less often
            history.apart.clear()
            return False
        return (
            not self.stale
            and _all_same(params, self.all)
            and all(map(is_, map(local_of, self._params), self.sources))
            and self._state_is_current(state, untouched)
            and self.look()
        )

    def _state_is_current(self, state: State, untouched: bool) -> bool:
        known, self._agreed = untouched and self._agreed, False
        self._agreed = (
            (known or all(map(is_, map(state.get, self._params), self._dicts)))
            and all(map(is_, _values(self._dicts), self._values))
            and all(numbers.is_current() for numbers in self._numbers)
        )
        return self._agreed

    def look(self) -> bool:
        """Find out where the gradients are, and remember what that shows about the blocks."""
        if self._packs and self._is_unchanged():
            return True
        self._packs, self._parts = [], []
        grads = list(map(_grad_of, self._params))
        # Ids as plain numbers, not objects that each would be one more place in memory.
        ids = array("Q", map(id, grads))
        start = 0
        for run in self.runs:
            for block in run.blocks:
                stop = start + len(block.params)
                if not block.look(grads[start:stop], ids[start:stop]):
                    if all(grad is not None for grad in grads[start:stop]):
                        self._history.apart.update(map(id, block.params))
                    else:
                        self._history.note_missing(block.params, grads[start:stop])
                    return False
                start = stop
            if run.is_split():
                self._history.alone.update(map(id, run.params))
                return False
        self._note_packs(ids)
        return True

    def _is_unchanged(self) -> bool:
        """Whether all gradients are the same as at the last look, at the same addresses."""
        # Each gradient is looked at: a user may have set the attribute ``.grad`` to anything since
        # backward, without a trace. Counts of references to the gradients that backward left do
        # not show it: they are the same if two parameters have swapped gradients.
        expected = []
        for reference, (part, address) in zip(self._packs, self._parts, strict=True):
            pack = reference()
            if pack is None or pack.storage.data_ptr() != address:
                return False
            expected.append(part(pack.dtensors))
        # Else every look asks the class of the DTensor whether it has a ``__torch_function__``.
        with torch._C.DisableTorchFunctionSubclass():
            return all(map(is_, map(_grad_of, self._params), chain.from_iterable(expected)))

    def _note_packs(self, ids: array[int]) -> None:
        """Remember what makes the next look short, if all blocks are in packs."""
        active = [block for run in self.runs for block in run.blocks if run.active]
        if not all(block.in_pack for block in active):
            # Gradients are not in packs, or in others than before: their owner has made new ones.
            self._history.misses += 1
            if not self._history.misses & (self._history.misses - 1):
                self._find_packs(ids)
        elif len(ids) == sum(len(block.params) for block in active):
            self._packs = [block.pack for block in active if block.pack is not None]
            self._parts = [(block.part_of_pack, block.pack_address) for block in active]

    def _find_packs(self, ids: array[int]) -> None:
        found, start = packs(), 0
        for block in [block for run in self.runs for block in run.blocks]:
            stop = start + len(block.params)
            if block.grad_address is not None:
                block.find_pack(ids[start:stop], found)
            start = stop

    def show(self) -> list[Tensor]:
        """What the optimizer sees in place of the parameters in runs."""
        for run in self.runs:
            run.show()
        return [run.plain for run in self.runs]

    def hide(self) -> None:
        """Undo `show`: the parameters have what the step wrote."""
        for run in self.runs:
            run.hide()
        # Units and autograd tell by it whether the shards were written; the flat tensors have
        # separate counters.
        sources = self.sources
        if not all(run.active for run in self.runs):
            sources = [source for run in self.runs if run.active for source in run.sources]
        torch.autograd.graph.increment_version(sources)

    def take_over(self, inner: Any, state: State, who: str) -> None:
        """Bring the state outside up to date after a step."""
        replaced = False
        for run in self.runs:
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


def _numbers(runs: Sequence[FlatRun], state: State) -> list[Numbers]:
    kinds: dict[tuple[Any, ...], list[FlatRun]] = {}
    for run in runs:
        for key, value in run.seen.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                kinds.setdefault((key, value.dtype, value.device), []).append(run)
    return [Numbers(key, members, state) for (key, *_), members in kinds.items()]


def _values(dicts: Iterable[dict[Any, Any] | None]) -> Iterator[Any]:
    return chain(chain.from_iterable(map(dict.values, filter(None, dicts))), (_END,))


def _all_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
