"""What a save contains of a model and its optimizers, and who writes it.

Works for any model whose tensors are DTensors or plain: sharded by this package, by torch's FSDP2,
or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...common.modules import own_state, plain_modules
from ...dtensor.boxes import Box
from ...dtensor.placement import Balance, Holding, RankBoxes, holding, own_box, ranks_of
from ...dtensor.subclasses import is_subclass
from ..errors import CheckpointError, some
from ..format.inner import entries_of
from ..format.manifest import TensorPart
from ..format.state_layout import layout_of
from ..format.tensors import describe, local_of
from ..format.values import encode

RankLocal = Callable[[str], bool]


@dataclass
class CapturedTensor:
    """A tensor with a name in the checkpoint.

    Attributes:
        per_rank: a buffer whose values may differ between ranks.
    """

    kind: str
    name: str
    tensor: Tensor
    holding: Holding
    per_rank: bool = False


@dataclass
class Captured:
    """Everything that this rank saves.

    Attributes:
        parts: what goes into the checkpoint's files; ``locals``: the tensors that this rank writes.
        own: whole tensors that only this rank has, or that may differ between ranks.
        aliases: other names of tied tensors.
        values: everything that is not a tensor, as JSON.
        plans: what was worked out for ``parts``; shared by the captures that have the same ones.
    """

    parts: list[TensorPart] = field(default_factory=list)
    locals: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    plans: dict[object, Any] = field(default_factory=dict)

    def resolve(self) -> None:
        """Replace what was found in the model and optimizers by this rank's part of it."""
        self.locals = {key: values_of(tensor) for key, tensor in self.locals.items()}
        self.own = {name: values_of(tensor) for name, tensor in self.own.items()}


@dataclass
class ModelTensors:
    """The tensors of a model by name, each once.

    Attributes:
        tensors: parameters and persistent buffers, sharded ones as DTensors.
        aliases: other names of the same tensors.
        buffers: the names among them that are plain buffers.
        extra: what the modules' ``get_extra_state`` returned.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    buffers: set[str]
    extra: dict[str, Any]


def tensors_of(model: nn.Module) -> ModelTensors:
    """Find the tensors of ``model``, in the order of its ``state_dict``."""
    first_name: dict[int, str] = {}
    found = ModelTensors({}, {}, set(), {})
    state = own_state(model)
    buffers: set[str] = set()
    if any(not isinstance(value, DTensor) for value in state.values()):
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, value in state.items():
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            found.extra[name] = value
            continue
        first = first_name.setdefault(id(value), name)
        if first != name:
            found.aliases[name] = first
            continue
        found.tensors[name] = value
        if name in buffers and not isinstance(value, DTensor):
            found.buffers.add(name)
    return found


def ranks_of_model(tensors: Iterable[Tensor], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that hold the same model as this one, as far as this rank can tell.

    All ranks that share any DTensor with this one; without DTensors all of ``ranks``.
    """
    members: set[int] = set()
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            members.update(ranks_of(tensor.device_mesh))
    return tuple(sorted(members)) or ranks


def model_entries(
    found: ModelTensors,
    ranks: tuple[int, ...],
    rank: int,
    rank_local: RankLocal | None = None,
) -> list[CapturedTensor]:
    """Describe the tensors of a model as seen from ``rank``."""
    together = ranks_of_model(found.tensors.values(), ranks)
    held_part = Holdings(rank)
    entries = []
    for name, tensor in found.tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"'{name}' is on the meta device: it has no values to save")
        mine = rank_local is not None and rank_local(name)
        if mine:
            members = (rank,) if not isinstance(tensor, DTensor) else ranks_of(tensor.device_mesh)
        else:
            members = together
        held = held_part(tensor, name, members)
        entries.append(
            CapturedTensor("model", name, tensor, held, name in found.buffers and not mine)
        )
    return entries


def check_model(model: Any) -> None:
    """Check that ``model`` is a module.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be an nn.Module, not of type {type(model).__name__}")


def optimizer_names(
    optimizers: Sequence[torch.optim.Optimizer], found: ModelTensors
) -> dict[int, str]:
    """The name of every parameter of the optimizers, by id.

    Raises:
        CheckpointError: if an optimizer has a parameter that is not in the model.
        TypeError: if an argument is not an optimizer.
    """
    names = {id(tensor): name for name, tensor in found.tensors.items()}
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
            kind = optimizer if isinstance(optimizer, type) else type(optimizer)
            what = "the class" if isinstance(optimizer, type) else "an object of"
            raise TypeError(f"Optimizer {number} must be an optimizer, got {what} {kind.__name__}")
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in names:
                    raise CheckpointError(
                        f"Parameter {position} of group {index} of optimizer {number} "
                        f"({type(optimizer).__name__}), of shape {tuple(param.shape)}, is not a "
                        "parameter of this model: make the optimizer after sharding, "
                        "and pass the model that it trains. (If a state_dict hook of the model "
                        "replaces the parameter, its state has no name: leave the optimizer out)"
                    )
    return names


def optimizer_entries(
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[int, str],
    holdings: dict[str, Holding],
    captured: Captured,
    rank: int,
) -> list[CapturedTensor]:
    """Describe the state of optimizers; non-tensors and per-rank tensors go to ``captured``."""
    entries: list[CapturedTensor] = []
    held_part = Holdings(rank)
    values = {}
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            if not isinstance(param, Tensor):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps state under {param!r}, not a parameter"
                )
            name = names[id(param)]
            taking = _StateOf(param, name, holdings[name], held_part, entries, captured)
            values[name] = taking.take(state)
    captured.values["optimizer_state"] = values
    return entries


def options_of(
    optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
) -> list[list[dict[str, Any]]]:
    """The parameter groups of each optimizer, as JSON."""
    return [
        [_group(group, names, type(optimizer).__name__) for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


@dataclass
class _StateOf:
    """Separates the tensors in the state of one parameter from the rest.

    Attributes:
        entries, captured: where its tensors go.
        layouts: layouts of its tensors that do not follow from the parameter.
    """

    param: Tensor
    name: str
    holding: Holding
    held_part: Holdings
    entries: list[CapturedTensor]
    captured: Captured
    layouts: dict[str, Any] = field(default_factory=dict)

    def take(self, state: dict[Any, Any]) -> dict[str, Any]:
        """Collect the tensors of ``state``; returns the rest as JSON."""
        others: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                self._tensor(value, str(key))
            else:
                others[str(key)] = self._encode(value, str(key))
        keys = [encode(key, f"a key of the state of {self.name}") for key in state]
        return {"keys": keys, "values": others, "layouts": self.layouts}

    def _encode(self, value: Any, key: str) -> Any:
        where = f"optim.{key}.{self.name}"

        def save(tensor: Tensor, place: str) -> str:
            inside = key + place.removeprefix(where)  # key[0]['m']
            self._tensor(tensor, inside)
            return inside

        return encode(value, where, save)

    def _tensor(self, value: Tensor, key: str) -> None:
        full_name = f"optim.{key}.{self.name}"
        shared = value.ndim == 0 or (
            not isinstance(self.param, DTensor) and value.shape == self.param.shape
        )
        if not isinstance(value, DTensor) and not shared:  # other ranks may lack it
            self.captured.own[full_name] = value
            return
        held = self.held_part(value, full_name, self.holding.ranks)
        self.entries.append(CapturedTensor("optim", full_name, value, held))
        layout = layout_of(value, self.param)
        if layout is not None:
            self.layouts[key] = layout


def _group(group: dict[str, Any], names: dict[int, str], kind: str) -> dict[str, Any]:
    content = {k: encode(v, f"param_groups[{k!r}]") for k, v in group.items() if k != "params"}
    params = [names[id(p)] for p in group["params"]]
    return {"params": params, "options": content, "optimizer": kind}


class Holdings:
    """`holding` with checkpoint errors, found once for all tensors of one layout.

    The layers of a model repeat a few layouts, and its optimizer's state repeats those. Training
    waits for this in every save. To be made anew for each: meshes are told apart by identity.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[tuple[object, ...], Holding] = {}

    def __call__(self, tensor: Tensor, name: str, ranks: tuple[int, ...]) -> Holding:
        """
        Raises:
            CheckpointError: if this rank's part of ``tensor`` is not a box.
        """
        key = (tensor.shape, ranks, *_layout_key(tensor))
        known = self._known.get(key)
        if known is None:
            try:
                known = self._known[key] = holding(tensor, name, ranks, self._rank)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
        return known


class OwnParts:
    """`own_part_of`, found once for all tensors of one layout, as `Holdings`."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Box, object]] = {}

    def __call__(self, tensor: Tensor, name: str) -> Box:
        """
        Raises:
            CheckpointError: if this rank's part of ``tensor`` is not a box.
        """
        if not isinstance(tensor, DTensor):
            return own_part_of(tensor, name)
        key = (tensor.shape, *_layout_key(tensor))
        known = self._known.get(key)
        if known is None:
            # With its mesh, whose id another could get: a load lets go of what it replaces.
            known = self._known[key] = own_part_of(tensor, name), tensor.device_mesh
        return known[0]


def _layout_key(tensor: Tensor) -> tuple[object, ...]:
    """What decides, together with the shape, who holds which part, while the mesh is kept."""
    if not isinstance(tensor, DTensor):
        return ()
    placements = tensor.placements
    # A strided shard is equal to a plain one in some releases of torch.
    return (id(tensor.device_mesh), placements, tuple(map(type, placements)))


def own_part_of(tensor: Tensor, name: str) -> Box:
    """`own_box`, with checkpoint errors.

    Raises:
        CheckpointError: if this rank's part of ``tensor`` is not a box.
    """
    try:
        return own_box(tensor, name)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def add_parts(captured: Captured, entries: Sequence[CapturedTensor], rank: int) -> None:
    """Decide who writes which entry, and add the parts and tensors of this rank."""
    balance = Balance()
    known: dict[int, _Shares] = {}  # by id of the boxes, which many tensors share
    for entry in entries:
        held, info = entry.holding, describe(entry.name, entry.tensor)
        shares = known.get(id(held.boxes))
        if shares is None:
            shares = known[id(held.boxes)] = _Shares(held.boxes)
        # The first rank's bytes, on all ranks: each has to find the same owners.
        nbytes = shares.first_box.numel * info.itemsize
        # If a buffer may differ between ranks, the first rank's goes into the model's file.
        owner = 0 if entry.per_rank else balance.owner(held, nbytes)
        writes = held.replica == owner
        if is_subclass(entry.tensor):
            if writes:
                _add_inner(captured, entry, rank)
            continue
        if entry.per_rank and not writes:
            captured.own[entry.name] = entry.tensor
        written_by = partial(shares.written_by, owner)
        part = TensorPart(
            entry.kind, info, held.box, shares.first_box, held.ranks, writes, written_by
        )
        captured.parts.append(part)
        if writes:
            captured.locals[entry.kind, entry.name] = entry.tensor


class _Shares:
    """What the ranks write of tensors that are cut alike."""

    def __init__(self, boxes: RankBoxes) -> None:
        self.first_box = boxes.first_box
        self._held_by = lru_cache(None)(boxes.held_by)

    def written_by(self, owner: int, rank: int) -> int:
        """How many elements ``rank`` writes if ``owner`` does so among the replicas."""
        box, replica = self._held_by(rank)
        return box.numel if replica == owner else 0


def _add_inner(captured: Captured, entry: CapturedTensor, rank: int) -> None:
    """Add the inner tensors of a tensor subclass, which only this rank writes."""
    for name, inner in entries_of(entry.name, entry.tensor, entry.holding.box).items():
        info, box = describe(name, inner), Box.whole(tuple(inner.shape))
        captured.parts.append(TensorPart(entry.kind, info, box, box, (rank,), True))
        captured.locals[entry.kind, name] = inner


def values_of(tensor: Tensor) -> Tensor:
    """The local tensor; lazy conjugation and negation (flags of torch) are carried out."""
    return local_of(tensor).resolve_conj().resolve_neg()


def capture(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    ranks: tuple[int, ...],
    rank: int,
    rank_local: RankLocal | None = None,
) -> Captured:
    """Everything of ``model`` and ``optimizers`` that this rank saves."""
    found = tensors_of(model)
    names = optimizer_names(optimizers, found)
    captured = capture_found(found, optimizers, names, ranks, rank, rank_local)
    captured.resolve()
    return captured


def capture_found(
    found: ModelTensors,
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[int, str],
    ranks: tuple[int, ...],
    rank: int,
    rank_local: RankLocal | None = None,
) -> Captured:
    """The same, with the model's and optimizers' tensors themselves: see `Captured.resolve`."""
    captured = Captured(aliases=found.aliases)
    entries = model_entries(found, ranks, rank, rank_local)
    captured.values["extra_state"] = encoded_extra(found)
    if optimizers:
        captured.values["optimizers"] = options_of(optimizers, names)
        holdings = {entry.name: entry.holding for entry in entries}
        entries += optimizer_entries(optimizers, names, holdings, captured, rank)
    _refuse_double_names(entries)
    add_parts(captured, entries, rank)
    return captured


def encoded_extra(found: ModelTensors) -> dict[str, Any]:
    """What ``get_extra_state`` of the modules returned, as JSON."""
    return {name: encode(value, name) for name, value in found.extra.items()}


def _refuse_double_names(entries: Sequence[CapturedTensor]) -> None:
    count = Counter((entry.kind, entry.name) for entry in entries)
    double = [name for (_, name), num in count.items() if num > 1]
    if double:
        raise CheckpointError(f"Two optimizers keep state of the same name: {some(double)}")


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """Modules that gather their parameters, of this package or of torch's."""
    gathers: dict[type, bool] = {}  # asked of the class: thousands of modules lack these names
    for module in plain_modules(model) or model.modules():
        kind = type(module)
        if kind not in gathers:
            names = ("unshard", "reshard")
            gathers[kind] = all(callable(getattr(kind, name, None)) for name in names)
        if gathers[kind]:
            yield module
