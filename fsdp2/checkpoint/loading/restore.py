"""Matches a checkpoint with models and optimizers, by name.

Nothing in the model changes here: `fill` changes it, once all names, shapes and dtypes fit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...dtensor.subclasses import is_subclass
from ..errors import CheckpointError, CheckpointMismatch, some
from ..format.manifest import FOLDER, state_name
from ..format.small_state import parse_state
from ..format.state_layout import empty_state, is_laid_out
from ..format.strict import UNFIT, converted
from ..format.tensors import NAMES
from ..format.values import decode
from ..saving.capture import ModelTensors, OwnParts, optimizer_names
from .fill import Wanted
from .pieces import Piece, empty_like_saved, names_of, pieces_in, wanted_of
from .source import Source, Stored

# Options that schedulers add to param groups.
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
NameMap = Mapping[str, str] | Callable[[str], str] | None


@dataclass
class LoadReport:
    """What a load found.

    Attributes:
        missing: names of the model that the checkpoint does not have (only with strict=False).
        unexpected: names of the checkpoint that the model does not have (only with strict=False).
        verified: whether checksums were compared; checkpoints of other libraries have none.
        bytes_read: how many bytes this rank read, from the disk or its cache.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    verified: bool = False
    bytes_read: int = 0


def match_model(
    source: Source,
    found: ModelTensors,
    *,
    strict: bool,
    cast: bool,
    names: NameMap = None,
) -> tuple[list[Wanted], LoadReport]:
    """Find each tensor of the model in the checkpoint, and check that it fits.

    Raises:
        CheckpointMismatch: with all names that are missing, unexpected, or of another shape or
            dtype.
    """
    saved_as = SavedNames(names, found)
    wanted: list[Wanted] = []
    own_part = OwnParts()
    missing = []
    used: set[str] = set()
    pieces = pieces_in(source, source.tensors)
    for name, tensor in found.tensors.items():
        stored, shards = None, None
        for candidate in saved_as.any_of(name):
            other = source.aliases.get(candidate, candidate)
            used.update((candidate, other))
            stored = stored or source.tensors.get(candidate) or source.tensors.get(other)
            shards = shards or pieces.get(candidate) or pieces.get(other)
        if stored is None and shards is None:
            missing.append(name)
            continue
        box = own_part(tensor, name)
        if stored is None:
            assert shards is not None
            used |= names_of(shards)
            wanted += wanted_of(name, tensor, shards, box)
        elif is_subclass(tensor):
            raise _not_plain(source, name, tensor)
        else:
            wanted.append(Wanted(name, tensor, stored, box))
    unexpected = sorted(source.tensors.keys() - used)
    if strict and (missing or unexpected):
        problems = []
        if missing:
            names_there = some(map(saved_as.translate, missing))
            problems.append(f"missing in the checkpoint: [{names_there}]")
        if unexpected:
            problems.append(f"unexpected, not in the model: [{some(unexpected)}]")
        raise CheckpointMismatch(
            f"{source.given} does not fit the model: {'; '.join(problems)}. "
            f"{_renamed(missing, unexpected)}Pass strict=False to load what is in both, or "
            "names= to translate names"
        )
    check_fit(source, wanted, cast=cast)
    return wanted, LoadReport(missing, unexpected)


def _renamed(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Advice for a message, if the names on one side are those on the other with a prefix."""
    here, there = (missing or [""])[0], set(unexpected)
    longer = next((name for name in unexpected if name.endswith(f".{here}")), None)
    if here and longer is not None:
        prefix = longer.removesuffix(here)
        function = f"lambda name: '{prefix}' + name"
        return f"Names in the checkpoint begin with '{prefix}': names={function}. "
    parts = here.split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[i:]) in there:
            prefix = ".".join(parts[:i]) + "."
            function = f"lambda name: name.removeprefix('{prefix}')"
            return f"Names in the model begin with '{prefix}': names={function}. "
    return ""


def _not_plain(source: Source, name: str, tensor: Tensor) -> CheckpointMismatch:
    kind = type(getattr(tensor, "_local_tensor", tensor)).__name__
    return CheckpointMismatch(
        f"{source.path}: '{name}' is a plain tensor in the checkpoint and a {kind} here: load it "
        "into the plain model, and convert that"
    )


class SavedNames:
    """What the names of a model are in a checkpoint.

    Args:
        names: translates the one to the other; see `load_model`.
        found: of the model.
    """

    def __init__(self, names: NameMap, found: ModelTensors | None) -> None:
        self._aliases: dict[str, list[str]] = {}
        for alias, first in found.aliases.items() if found is not None else ():
            self._aliases.setdefault(first, []).append(alias)
        if names is None or callable(names):
            self.translate = names or str
        else:
            table = dict(names)
            self.translate = lambda name: table.get(name, name)

    def any_of(self, name: str) -> list[str]:
        """The names that a tensor may have there, by its first name in the model."""
        # A checkpoint holds a tied tensor under one name, not necessarily this model's first.
        return [self.translate(each) for each in (name, *self._aliases.get(name, ()))]

    def in_table(self, name: str, table: Container[str]) -> str:
        """The first of `any_of` that is in ``table``, or the first of all."""
        candidates = self.any_of(name)
        return next((each for each in candidates if each in table), candidates[0])


def check_fit(source: Source, wanted: Iterable[Wanted], *, cast: bool) -> None:
    """Compare shapes and dtypes. Shapes are never coerced.

    Raises:
        CheckpointMismatch: listing what differs.
    """
    shapes, dtypes = [], []
    for w in wanted:
        info = w.stored.info
        if info.shape != tuple(w.tensor.shape) and not w.is_part:
            shapes.append(
                f"'{w.name}': {info.shape} in the checkpoint, {tuple(w.tensor.shape)} here"
            )
        elif not cast and info.dtype != NAMES.get(w.tensor.dtype):
            dtypes.append(f"'{w.name}': {info.dtype} in the checkpoint, {w.tensor.dtype} here")
    if shapes:
        raise CheckpointMismatch(f"{source.path}: shapes differ: {'; '.join(shapes[:8])}")
    if dtypes:
        raise CheckpointMismatch(
            f"{source.path}: dtypes differ: {'; '.join(dtypes[:8])}. Pass cast=True to convert "
            "while loading"
        )


# -- optimizers ---------------------------------------------------------------------------------


@dataclass
class OptimizerLoad:
    """What the optimizers get once everything has been checked and read.

    Attributes:
        names: of their parameters in the checkpoint.
    """

    state: list[tuple[torch.optim.Optimizer, Tensor, dict[str, Any] | None]]
    wanted: list[Wanted]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    pieces: dict[str, list[Piece]]
    names: set[str]
    own_part: OwnParts = field(default_factory=OwnParts)

    def apply(self) -> None:
        """Put state and options into the optimizers."""
        for optimizer, param, state in self.state:
            if state is None:
                optimizer.state.pop(param, None)
            else:
                optimizer.state[param] = state
        for group, options in self.groups:
            for key, value in options.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    with torch.no_grad():
                        group[key].copy_(value)
                else:
                    group[key] = value


def match_optimizers(
    source: Source,
    optimizers: Sequence[torch.optim.Optimizer],
    found: ModelTensors,
    values: dict[str, Any],
    own: dict[str, Tensor],
    saved_as: SavedNames,
    *,
    same_ranks: bool,
) -> OptimizerLoad:
    """Create the state tensors that the checkpoint has, to be filled, and find the options.

    Args:
        values: the small state in the checkpoint.
        own: tensors that only this rank had.
        saved_as: what the model's names are in the checkpoint.
        same_ranks: whether as many ranks load as saved.

    Raises:
        CheckpointMismatch: if the checkpoint has no state for a parameter, or state that cannot
            be resharded.
    """
    if "optimizers" not in values:
        raise CheckpointMismatch(f"{source.path} was saved without an optimizer")
    here = optimizer_names(optimizers, found)
    saved = {
        name: group
        for groups in values["optimizers"]
        for group in groups
        for name in group["params"]
    }
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    wanted = {
        id(p): saved_as.in_table(here[id(p)], saved) for _, group in groups for p in group["params"]
    }
    missing = [name for name in wanted.values() if name not in saved]
    if missing:
        raise CheckpointMismatch(f"{source.path} has no optimizer state of {some(missing)}")
    load = OptimizerLoad([], [], [], pieces_in(source, source.optimizer), set(wanted.values()))
    own = own if same_ranks else {}
    for optimizer, group in groups:
        in_group = [wanted[id(p)] for p in group["params"]]
        options = _options_of(source, optimizer, group, in_group, saved)
        if options is not None:
            load.groups.append((group, options))
        for param, name in zip(group["params"], in_group, strict=True):
            entry = values["optimizer_state"].get(name)
            if entry is None:  # the parameter never had a gradient
                load.state.append((optimizer, param, None))
                continue
            place = _Place(optimizer, group, param, name)
            reader = _StateReader(source, load, entry, place, own)
            load.state.append((optimizer, param, reader.state()))
    return load


def _options_of(
    source: Source,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    names: Sequence[str],
    saved: dict[str, dict[str, Any]],
) -> dict[str, Any] | None:
    """The options that the parameters of a group were saved with; None for an empty group.

    Args:
        names: names of the parameters.
        saved: for the name of each parameter, the group that it was saved in.

    Raises:
        CheckpointMismatch: if they differ, or belong to another kind of optimizer.
    """
    for name in names:
        _check_kind(source, optimizer, group, saved[name].get("optimizer"), saved[name]["options"])
    if any(saved[name]["options"] != saved[names[0]]["options"] for name in names):
        raise CheckpointMismatch(
            f"{source.path}: parameters of one group of {type(optimizer).__name__} were "
            f"saved in groups with different options: {some(names)}"
        )
    if not names:
        return None
    encoded = saved[names[0]]["options"]
    what = f"{source.path}: options of {type(optimizer).__name__}"
    options = converted(what, lambda: {key: decode(value) for key, value in encoded.items()})
    for key, value in options.items():
        old = group.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and value.shape != old.shape:
            raise CheckpointMismatch(
                f"{what}: '{key}' has shape {tuple(value.shape)}, {tuple(old.shape)} here"
            )
    return options


def _check_kind(
    source: Source,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    kind: str | None,
    options: dict[str, Any],
) -> None:
    """Refuse the state of another kind of optimizer. Adam and AdamW count as the same kind.

    Raises:
        CheckpointMismatch: if both the class names and the names of options differ.
    """
    other = (options.keys() - group.keys()) | (optimizer.defaults.keys() - options.keys())
    if kind not in (None, type(optimizer).__name__) and other - OF_SCHEDULERS:
        raise CheckpointMismatch(
            f"{source.path} was saved with {kind}, and {type(optimizer).__name__} is to be "
            f"loaded: only one of them has the options {some(sorted(other - OF_SCHEDULERS))}"
        )


@dataclass
class _Place:
    """Where state belongs: to the parameter of this name in the checkpoint, of a group."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    param: Tensor
    name: str


@dataclass
class _StateReader:
    """Builds the state of one parameter; its tensors are filled later.

    Attributes:
        entry: what was saved of that state except tensors.
        own: tensors that only this rank had, if the same ranks load.
    """

    source: Source
    load: OptimizerLoad
    entry: dict[str, Any]
    place: _Place
    own: dict[str, Tensor]

    def state(self) -> dict[Any, Any]:
        """
        Raises:
            CheckpointMismatch: if a tensor is missing, or cannot be laid out.
        """
        old = self.place.optimizer.state.get(self.place.param, {})
        values = self.entry["values"]
        state: dict[Any, Any] = {}
        what = f"{self.source.path}: a key of the state of '{self.place.name}'"
        for key in converted(what, lambda: list(dict.fromkeys(map(decode, self.entry["keys"])))):
            if str(key) in values:
                state[key] = self._decode(values[str(key)], key)
            else:
                state[key] = self._tensor(str(key), old.get(key))
        return state

    def _decode(self, value: Any, key: Any) -> Any:
        try:
            # Tensors in containers are always new: the old ones stay until everything is read.
            return decode(value, lambda inside: self._tensor(inside, None))
        except CheckpointError:
            raise
        except UNFIT as error:
            raise CheckpointMismatch(
                f"{self.source.path}: 'optim.{key}.{self.place.name}' cannot be read: {error}"
            ) from error

    def _tensor(self, key: str, old: Any) -> Tensor:
        """
        Args:
            key: the key of the state; inside containers with the place, ``key[0]['m']``.
            old: what the optimizer has under this key.
        """
        param = self.place.param
        full_name = f"optim.{key}.{self.place.name}"
        stored = self.source.optimizer.get(full_name)
        if stored is None:
            return self._without_whole(full_name, old)
        noted = self.entry.get("layouts", {}).get(key)
        tensor = _like_before(old, stored)
        is_new = tensor is None or not is_laid_out(tensor, param, noted)
        if tensor is None or is_new:
            tensor = empty_state(stored.info, noted, param, self.place.group)
        box = self.load.own_part(tensor, full_name)
        self.load.wanted.append(Wanted(full_name, tensor, stored, box, new=is_new))
        return tensor

    def _without_whole(self, full_name: str, old: Any) -> Tensor:
        """A state tensor that is not stored whole: a tensor subclass, or this rank's own."""
        param = self.place.param
        shards = self.load.pieces.get(full_name)
        if shards is not None:
            box = self.load.own_part(param, full_name)
            has_one = isinstance(old, Tensor) and is_subclass(old)
            state = old if has_one else empty_like_saved(full_name, param, shards, box)
            for part in wanted_of(full_name, state, shards, box) if is_subclass(state) else ():
                self.load.wanted.append(replace(part, new=not has_one))
            return state
        if full_name in self.own:
            return self.own[full_name].to(param.device)
        raise CheckpointMismatch(
            f"{self.source.path}: '{full_name}' does not follow the sharding of its parameter, so "
            "it was saved per rank, and can be loaded only by the same ranks in the same places"
        )


def _like_before(old: Any, stored: Stored) -> Tensor | None:
    """The tensor that the optimizer already has, if the plain tensor ``stored`` fits into it."""
    if not isinstance(old, Tensor) or tuple(old.shape) != stored.info.shape or is_subclass(old):
        return None
    return old if NAMES.get(old.dtype) == stored.info.dtype else None


def extra_state_in(source: Source, values: dict[str, Any]) -> dict[str, Any]:
    """What the modules' ``get_extra_state`` returned when they were saved, by name."""
    return {
        name: converted(f"{source.path}: '{name}'", partial(decode, value))
        for name, value in values.get("extra_state", {}).items()
    }


def set_extra_state(model: nn.Module, extra_state: dict[str, Any], saved_as: SavedNames) -> None:
    """Pass to modules what `extra_state_in` found."""
    if not extra_state:
        return
    # torch's checkpoint_wrapper leaves itself out of names in state dicts. What is inside comes
    # last, and takes the name.
    modules = {
        ".".join(part for part in path.split(".") if part != "_checkpoint_wrapped_module"): module
        for path, module in model.named_modules()
    }
    for path, module in modules.items():
        name = saved_as.translate(f"{path}._extra_state" if path else "_extra_state")
        if name in extra_state:
            with passing_on(f"'{name}'"):
                module.set_extra_state(extra_state[name])


@contextmanager
def passing_on(what: str) -> Iterator[None]:
    """Wraps code of others that gets saved state, after all else has been loaded.

    Raises:
        CheckpointMismatch: if that code does not accept the state.
    """
    try:
        yield
    except Exception as error:
        refused = CheckpointMismatch(
            f"{what} does not accept what was saved: {type(error).__name__}: {error}"
        )
        refused.add_note(
            "What was loaded into holds the checkpoint now, except for this and what comes after it"
        )
        raise refused from error


def values_of_rank(source: Source, rank: int) -> dict[str, Any]:
    """The small state that a rank saved, still encoded."""
    name = state_name(rank)
    return parse_state(source.small_file(rank, name), f"{source.path}/{FOLDER}/{name}")
