"""Capturing one training run again and again: what is the same in every save is worked out once.

Training waits for a capture. With many small tensors that took longer than the copy of their bytes:
names, layouts, who writes what. All of it follows from the *form* of what is there: the names in
their order, and the shape, dtype, device and layout of each tensor. So the form of the last save is
kept with what followed from it, and compared. Neither tensors nor addresses are kept: each save
finds every tensor at its place in the model and the optimizers, so it cannot take another's bytes.
What a form does not cover (tensor subclasses, state in containers) is captured as the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..format.values import encode
from .capture import (
    Captured,
    ModelTensors,
    RankLocal,
    capture_found,
    encoded_extra,
    optimizer_names,
    options_of,
    tensors_of,
)

Optimizers = Sequence[torch.optim.Optimizer]
PLAIN_TYPES = {Tensor, nn.Parameter, nn.Buffer}  # others may have inner tensors, or none yet
PLAIN_VALUES = {type(None), bool, int, float, str}
# One look at each tensor: thousands are not in the processor's cache, least of all after a step.
part_of = attrgetter("shape", "dtype", "device", "layout")


class Repeated:
    """`capture`, for one who saves again and again."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def capture(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        ranks: tuple[int, ...],
        rank: int,
        rank_local: RankLocal | None = None,
    ) -> Captured:
        """Everything of ``model`` and ``optimizers`` that this rank saves."""
        found = tensors_of(model)
        names = optimizer_names(optimizers, found)
        present = _Present(found)
        complete = all(present.add_state(optimizer, names) for optimizer in optimizers)
        mine = [rank_local(name) for name in found.tensors] if rank_local is not None else None
        about = (list(found.tensors), found.aliases, found.buffers, ranks, rank, mine)
        form = _Form.of(present, about) if complete else None
        known = self._known
        if form is not None and known is not None and known.form.is_same(form):
            known.form = form  # the next save probably has the same specs
            return known.again(present, found, optimizers, names)
        self._known = None
        captured = capture_found(found, optimizers, names, ranks, rank, rank_local)
        if form is not None:
            self._known = _Known.of(form, present, captured)
        captured.resolve()
        return captured

    def forget(self) -> None:
        """Keep nothing of the last save."""
        self._known = None


class _Present:
    """The tensors of a model and its optimizers, found anew in every save.

    Attributes:
        tensors: each in its place.
        states: the kind of each optimizer, and for each parameter with state its name, the keys,
            and which of them have tensors.
        others: the values of the state that are not tensors, by the name of the parameter.
        has_names: whether the keys are strings. Others may be equal and differ: 1 and True.
    """

    def __init__(self, found: ModelTensors) -> None:
        self.tensors = list(found.tensors.values())
        self.states: list[tuple[object, ...]] = []
        self.others: dict[str, dict[str, Any]] = {}
        self.has_names = True
        self._with_state: set[str] = set()

    @cached_property
    def local(self) -> list[Tensor]:
        """This rank's part of each tensor, once all are added."""
        return [t._local_tensor if isinstance(t, DTensor) else t for t in self.tensors]

    def add_state(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> bool:
        """Whether its state consists of tensors and plain values, under names."""
        self.states.append((type(optimizer),))
        for param, state in optimizer.state.items():
            name, values = names.get(id(param)), list(state.values())
            if name is None or name in self._with_state:  # of two optimizers
                return False
            self._with_state.add(name)
            self.has_names &= {str}.issuperset(map(type, state))
            tensors = [value for value in values if isinstance(value, Tensor)]
            self.tensors += tensors
            if len(tensors) == len(values):
                self.states.append((name, tuple(state)))
                continue
            kinds = tuple(isinstance(value, Tensor) for value in values)
            self.states.append((name, tuple(state), kinds))
            others = {str(k): v for k, v in state.items() if not isinstance(v, Tensor)}
            if not PLAIN_VALUES.issuperset(map(type, others.values())):
                return False
            self.others[name] = {key: encode(value) for key, value in others.items()}
        return True


@dataclass
class _Form:
    """All that what is worked out for a save follows from.

    Attributes:
        values: compared by equality. ``specs``: of DTensors, None for others. They say the shapes
            of whole tensors; their meshes are told apart by identity.
    """

    values: tuple[object, ...]
    specs: list[Any]

    @staticmethod
    def of(present: _Present, about: tuple[object, ...]) -> _Form | None:
        """The form; None if it would not say everything."""
        tensors, local = present.tensors, present.local
        if not PLAIN_TYPES.issuperset(map(type, local)):
            return None
        values = (
            about,
            present.states,
            list(map(type, tensors)),
            list(map(part_of, local)),
        )
        specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
        return _Form(values, specs)

    def is_same(self, other: _Form) -> bool:
        if len(self.specs) != len(other.specs) or self.values != other.values:
            return False
        return all(map(is_, self.specs, other.specs)) or all(
            map(_same_layout, self.specs, other.specs)
        )


def _same_layout(spec: Any, other: Any) -> bool:
    if spec is None or other is None:
        return spec is other
    if spec.mesh is not other.mesh or spec.placements != other.placements:
        return False
    if spec.tensor_meta != other.tensor_meta:
        return False
    # A strided shard is equal to a plain one in some releases of torch.
    return list(map(type, spec.placements)) == list(map(type, other.placements))


@dataclass
class _Known:
    """What followed from a form.

    Attributes:
        parts, aliases, states, plans: as in `Captured`.
        locals, own: for each tensor in these fields of `Captured`, its place in
            `_Present.tensors`.
    """

    form: _Form
    parts: list[Any]
    aliases: dict[str, str]
    states: dict[str, dict[str, Any]] | None
    locals: dict[tuple[str, str], int]
    own: dict[str, int]
    plans: dict[object, Any]

    @staticmethod
    def of(form: _Form, present: _Present, captured: Captured) -> _Known | None:
        """What to keep; None if the form does not tell the places of tensors apart.

        Args:
            captured: with the tensors that were found, not with this rank's parts of them.
        """
        places = {id(tensor): place for place, tensor in enumerate(present.tensors)}
        if len(places) != len(present.tensors):
            return None  # the places that share an object may have several in the next save
        if not present.has_names:
            return None
        return _Known(
            form,
            captured.parts,
            captured.aliases,
            captured.values.get("optimizer_state"),
            {key: places[id(tensor)] for key, tensor in captured.locals.items()},
            {name: places[id(tensor)] for name, tensor in captured.own.items()},
            captured.plans,
        )

    def again(
        self,
        present: _Present,
        found: ModelTensors,
        optimizers: Optimizers,
        names: dict[int, str],
    ) -> Captured:
        """What `capture` finds, as the form is the same."""
        local = [t.detach() if t.requires_grad else t for t in present.local]
        local = [t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t for t in local]
        captured = Captured(self.parts, aliases=self.aliases, plans=self.plans)
        captured.locals = {key: local[place] for key, place in self.locals.items()}
        captured.own = {name: local[place] for name, place in self.own.items()}
        captured.values["extra_state"] = encoded_extra(found)
        if self.states is not None:
            captured.values["optimizers"] = options_of(optimizers, names)
            states = dict(self.states)
            for name, values in present.others.items():
                states[name] = {**states[name], "values": values}
            captured.values["optimizer_state"] = states
        return captured
