"""Loading all that a training run needs to resume."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..errors import CheckpointError, CheckpointMismatch
from ..format.manifest import FOLDER, own_name
from ..format.strict import converted
from ..format.tensors import tensors_in
from ..format.values import decode
from ..saving.capture import ModelTensors, tensors_of
from ..saving.random_state import checked_random_states, set_random_states
from ..saving.training import Optimizers, as_list
from .fill import Wanted, check_meta, fill
from .opening import open_source
from .restore import (
    LoadReport,
    NameMap,
    OptimizerLoad,
    SavedNames,
    check_fit,
    extra_state_in,
    match_model,
    match_optimizers,
    passing_on,
    set_extra_state,
    values_of_rank,
)
from .source import Source


@dataclass
class Loaded(LoadReport):
    """What `Checkpointer.load` found.

    Attributes:
        step: the step that was loaded.
        extra: what this rank passed to `save` as ``extra``, or the first rank's if this rank did
            not take part.
        extra_of_ranks: the ``extra`` of every rank that saved. Values of other ranks are read at
            the first access, so the checkpoint must still exist then.
        unread: which of "model", "optimizer" and "scheduler" were saved but not loaded in full,
            because they were not passed. "optimizer" is also listed if a parameter of the model was
            in an optimizer when saving, and is in none here.
        same_ranks: whether the number of ranks is the same as when saving. If not, random number
            generators are not restored, and buffers that differed between ranks take the first
            rank's values.
    """

    step: int = 0
    extra: Any = None
    extra_of_ranks: Mapping[int, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    same_ranks: bool = True


def load_training(
    source: Source,
    step: int,
    rank: int,
    ranks: tuple[int, ...],
    model: nn.Module | None,
    optimizer: Optimizers,
    scheduler: Any,
    *,
    strict: bool = True,
    cast: bool = False,
    verify_checksums: bool = True,
    keep_on_error: bool = True,
    random_state: bool = True,
    names: NameMap = None,
    device: torch.device | str | None = None,
    before_change: Callable[[], object],
) -> Loaded:
    """Load an open checkpoint of a training run; arguments as for `Checkpointer.load`.

    Args:
        step: the step of the checkpoint.
        rank, ranks: this rank and all that load.
        before_change: called after all checks, and after all reads that are possible before the
            first change.
    """
    loaded = Loaded(step=step)
    optimizers, schedulers = as_list(optimizer), as_list(scheduler)
    loaded.same_ranks = len(source.ranks) == len(ranks)
    mine = rank if rank in source.ranks and loaded.same_ranks else source.ranks[0]
    # In the order in which they count: ranks whose optimizers have other names.
    values = {rank: values_of_rank(source, rank) for rank in (mine, *source.speakers)}
    own = _own_tensors(source, mine) if loaded.same_ranks else {}
    loaded.extra_of_ranks = Extras(source, values)
    loaded.extra = loaded.extra_of_ranks[mine]
    states = _scheduler_states(source, values[mine], schedulers)
    extra_state = extra_state_in(source, values[mine])
    randoms = None
    if random_state and loaded.same_ranks and "random" in values[mine]:
        what = f"{source.path}: the state of random numbers"
        randoms = converted(what, lambda: checked_random_states(values[mine]["random"]))
    wanted: list[Wanted] = []
    found = tensors_of(model) if model is not None else None
    saved_as = SavedNames(names, found)
    if found is not None:
        wanted, report = match_model(source, found, strict=strict, cast=cast, names=names)
        loaded.missing, loaded.unexpected = report.missing, report.unexpected
        assert model is not None
        if check_meta(found, model, {w.name for w in wanted}) and optimizers:
            raise CheckpointError(
                "The model is on the meta device and has an optimizer: call "
                "fsdp2.materialize(model) first, then make the optimizer"
            )
    load_optimizers, merged = None, _merged(values)
    if optimizers:
        if found is None:
            raise ValueError("To load an optimizer, pass the model whose parameters it has")
        load_optimizers = match_optimizers(
            source, optimizers, found, merged, own, saved_as,
            same_ranks=loaded.same_ranks,
        )  # fmt: skip
        check_fit(source, load_optimizers.wanted, cast=cast)
        wanted = [*wanted, *load_optimizers.wanted]
    loaded.unread = _unread(merged, found, saved_as, load_optimizers)
    if states and not schedulers:
        loaded.unread.append("scheduler")
    own_buffers = _own_buffers(source, found, own, saved_as, cast=cast)
    loaded.verified = fill(
        source, wanted, model, found, verify_checksums=verify_checksums,
        keep_on_error=keep_on_error, device=device, before_change=before_change,
    )  # fmt: skip
    if load_optimizers is not None:
        load_optimizers.apply()
    if model is not None:
        _put_in(model, own_buffers)
        set_extra_state(model, extra_state, saved_as)
    if randoms is not None:
        set_random_states(randoms)
    for scheduler, state in zip(schedulers, states, strict=False):
        with passing_on(f"{source.path}: the scheduler {type(scheduler).__name__}"):
            scheduler.load_state_dict(state)
    loaded.bytes_read = source.bytes_read
    if random_state and not loaded.same_ranks and "random" in values[mine] and rank == ranks[0]:
        warnings.warn(
            f"{source.path}: random state is not restored: {len(source.ranks)} ranks saved it, "
            f"{len(ranks)} load it. Seed each rank anew, and pass random_state=False",
            stacklevel=3,
        )
    return loaded


def _unread(
    merged: dict[str, Any],
    found: ModelTensors | None,
    saved_as: SavedNames,
    load: OptimizerLoad | None,
) -> list[str]:
    """Which of "model" and "optimizer" were saved but are not loaded in full."""
    groups = [group for groups in merged.get("optimizers", ()) for group in groups]
    left = {name for group in groups for name in group["params"]}
    if found is None:
        return ["model", "optimizer"] if left else ["model"]
    # Of a model in parts, as in stages of a pipeline, other ranks load the rest.
    left &= {saved_as.in_table(name, left) for name in found.tensors}
    return ["optimizer"] if left - (load.names if load is not None else set()) else []


def _put_in(model: nn.Module, own: dict[str, Tensor]) -> None:
    """Restore the buffers that only this rank has."""
    found = tensors_of(model)
    with torch.no_grad():
        for name, saved in own.items():
            found.tensors[name].copy_(saved)


def _own_buffers(
    source: Source,
    found: ModelTensors | None,
    own: dict[str, Tensor],
    saved_as: SavedNames,
    *,
    cast: bool,
) -> dict[str, Tensor]:
    """The values of the buffers that only this rank has, by the model's names.

    Raises:
        CheckpointMismatch: if one does not fit.
    """
    if found is None:
        return {}
    there = {name: saved_as.in_table(name, own) for name in sorted(found.buffers)}
    values = {name: own[other] for name, other in there.items() if other in own}
    for name, saved in values.items():
        here = found.tensors[name]
        if saved.shape != here.shape or not (cast or saved.dtype == here.dtype):
            raise CheckpointMismatch(
                f"{source.path}: '{name}' of this rank: {saved.dtype} {tuple(saved.shape)} in the "
                f"checkpoint, {here.dtype} {tuple(here.shape)} here"
            )
    return values


def _scheduler_states(source: Source, values: dict[str, Any], schedulers: list[Any]) -> list[Any]:
    """
    Raises:
        CheckpointMismatch: if their number differs from the number of schedulers to load.
    """
    what = f"{source.path}: the state of the schedulers"
    states = converted(what, lambda: [decode(state) for state in values.get("schedulers", [])])
    if schedulers and len(states) != len(schedulers):
        raise CheckpointMismatch(
            f"{source.path} has {len(states) or 'no'} schedulers, {len(schedulers)} are to be "
            "loaded"
        )
    return states


class Extras(Mapping[int, Any]):
    """What each rank passed to `save` as ``extra``, read at the first access.

    Args:
        values: the small state of the ranks for which it has been read already.
    """

    def __init__(self, source: Source, values: dict[int, dict[str, Any]]) -> None:
        self._path = Path(os.path.abspath(source.path))
        self._ranks = source.ranks
        self._nonce = None if source.index is None else source.index.nonce
        if source.index is None:  # of all were read the manifests: as in memory, it may be gone
            values = {rank: values_of_rank(source, rank) for rank in source.ranks}
        self._known = {rank: self._decoded(rank, each) for rank, each in values.items()}

    @override
    def __getitem__(self, rank: int) -> Any:
        if rank not in self._known:
            if rank not in self._ranks:
                raise KeyError(rank)
            with open_source(self._path) as source:
                if source.index is None or source.index.nonce != self._nonce:
                    raise CheckpointError(
                        f"{self._path} was saved again: the extra of rank {rank} belongs to "
                        "another save. Read it before saving again"
                    )
                self._known[rank] = self._decoded(rank, values_of_rank(source, rank))
        return self._known[rank]

    def _decoded(self, rank: int, values: dict[str, Any]) -> Any:
        what = f"{self._path}: the extra of rank {rank}"
        return converted(what, partial(decode, values.get("extra")))

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    @override
    def __len__(self) -> int:
        return len(self._ranks)


def _own_tensors(source: Source, rank: int) -> dict[str, Tensor]:
    name = own_name(rank)
    if name not in source.small_files(rank):
        return {}
    return tensors_in(source.small_file(rank, name), f"{source.path}/{FOLDER}/{name}")


def _merged(values: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Optimizer values of the first rank, plus those under names that only others have."""
    if "optimizers" not in next(iter(values.values())):
        return {}
    groups: list[Any] = []
    state: dict[str, Any] = {}
    for each in values.values():
        groups += each.get("optimizers", [])
        for name, entry in each.get("optimizer_state", {}).items():
            state.setdefault(name, entry)
    return {"optimizers": groups[::-1], "optimizer_state": state}
