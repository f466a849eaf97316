"""Checks that ranks do the same, for when a training hangs or replicas drift apart.

All ranks of a mesh have to build the same units, run them in the same order and reduce the same
gradients; one that does not leaves the others waiting in a collective, for ever. What is here is
called by hand: without it, training does nothing of this.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .meeting import Meeting, RanksDisagreeError, differences, name_ranks
from .param import ShardedParam
from .unit import Unit, units_in


def check_ranks_agree(model: nn.Module, *, values: bool = True, timeout_s: float = 60.0) -> None:
    """Check that all ranks that share a model have made the same of it.

    Compared are the units, their parameters (names, shapes, dtypes, placements, whether they are
    trained), what was chosen for them (mixed precision, resharding, offload, gradient sync), the
    order in which the last forward ran them, and, where several ranks hold the same rows, their
    bits. To be called by every rank of the model's mesh, between steps; through the store of the
    default process group, without collectives.

    Args:
        model: sharded, or with sharded modules inside.
        values: whether to compare parameters that several ranks hold (replicas of a 2-D mesh,
            replicated units, 0-dim parameters) by checksums, for which they are read once.
        timeout_s: how long to wait for the slowest rank, in seconds.

    Raises:
        RanksDisagreeError: (a RuntimeError) on every rank, with what differs between which ranks,
            or which ranks did not come.

    Example:
        >>> check_ranks_agree(model)
        RanksDisagreeError: Ranks disagree about the model:
        requires_grad of 'layers.3.bias': True (ranks 0, 1, 3), False (rank 2)
    """
    names = {module: name for name, module in model.named_modules()}
    by_ranks: dict[tuple[int, ...], list[Unit]] = {}
    for unit in units_in(model):
        by_ranks.setdefault(_ranks_of(unit), []).append(unit)
    for ranks, units in by_ranks.items():
        meeting = Meeting("agree", ranks, timeout_s)
        _compare(meeting, _describe(units, names), by_part=None)
        if values:
            held, by_part = _held(units, names)
            _compare(meeting, held, by_part)


def _compare(meeting: Meeting, mine: Mapping[str, str], by_part: Mapping[str, str] | None) -> None:
    """Checksums first: ranks seldom differ, and then in little.

    Args:
        by_part: for what not all ranks have: checksums of the parts that they share. None: all
            have to have the same.
    """
    summary = {"": _checksum(repr(mine).encode())} if by_part is None else by_part
    if not meeting.ask(summary, differences):
        return
    missing = "nothing" if by_part is None else None

    def judge(said: Mapping[int, Mapping[str, str]]) -> str:
        return "\n".join(differences(said, missing=missing))

    raise RanksDisagreeError("Ranks disagree about the model:\n" + meeting.ask(mine, judge))


@contextmanager
def watch_ranks(model: nn.Module, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Inside, ranks meet before each gather and reduction, and compare what comes next.

    A rank that runs another module, reduces other gradients or stops early is then an error that
    names it, where it was a hang. Each step costs a message to the store of the default process
    group per unit and rank: to find a fault, not to train with.

    Args:
        model: sharded, or with sharded modules inside.
        timeout_s: how long to wait for the slowest rank, in seconds.

    Raises:
        RanksDisagreeError: (a RuntimeError) in forward or backward, on every rank that came.

    Example:
        >>> with watch_ranks(model):
        ...     model(batch).sum().backward()
        RanksDisagreeError: Ranks do different things next: gather 'layers.1' in forward
        (ranks 0, 1), gather 'layers.2' in forward (rank 2)
    """
    names = {module: name for name, module in model.named_modules()}
    units = units_in(model)
    try:
        for unit in units:
            _watch(unit, _name_of(unit, names), Meeting("watch", _ranks_of(unit), timeout_s))
        yield
    finally:
        for unit in units:
            vars(unit).pop("launch_gather", None)
            vars(unit.gradients).pop("make_reductions", None)


def _watch(unit: Unit, name: str, meeting: Meeting) -> None:
    """Put methods of its own before those of the class; not there, they cost nothing."""
    launch_gather, make_reductions = unit.launch_gather, unit.gradients.make_reductions

    def gather(streams: Any) -> None:
        phase = "backward" if unit.runtime.in_backward else "forward"
        _meet(meeting, f"gather '{name}' in {phase}")
        launch_gather(streams)

    def reduce(taken: Any, **options: Any) -> Any:
        reductions = make_reductions(taken, **options)
        if reductions:
            grads = [
                param.fqn.rsplit(".", 1)[-1]
                for reduction in reductions
                for param, grad in zip(reduction.bucket.params, reduction.grads, strict=True)
                if grad is not None
            ]
            _meet(meeting, f"reduce '{name}' ({', '.join(grads)})")
        return reductions

    vars(unit)["launch_gather"] = gather
    vars(unit.gradients)["make_reductions"] = reduce


def _meet(meeting: Meeting, what: str) -> None:
    found = meeting.ask({"next": what}, differences)
    if found:
        raise RanksDisagreeError(f"Ranks do different things {found[0]}")


# -- what is compared ----------------------------------------------------------------------------


def _ranks_of(unit: Unit) -> tuple[int, ...]:
    return tuple(unit.mesh.mesh.mesh.flatten().tolist())


def _name_of(unit: Unit, names: Mapping[nn.Module, str]) -> str:
    return ", ".join(names.get(module) or "(root)" for module in unit.modules)


def _full_name(param: ShardedParam, names: Mapping[nn.Module, str]) -> str:
    module, name = param.owners[0]
    prefix = names.get(module, "")
    return f"{prefix}.{name}" if prefix else name


# What is chosen for a unit and decides what it communicates.
_SETTINGS = (
    "mp_policy",
    "offload_policy",
    "reshard_after_forward",
    "reshard_after_backward",
    "direct_min_bytes",
    "sync_grads",
    "accumulate_sharded",
    "all_reduce_grads",
    "divide_factor",
    "unshard_in_backward",
    "reduce_unused",
)


def _describe(units: list[Unit], names: Mapping[nn.Module, str]) -> dict[str, str]:
    found = {"units": ", ".join(f"'{_name_of(unit, names)}'" for unit in units)}
    for unit in units:
        name = _name_of(unit, names)
        for key in _SETTINGS:
            value = getattr(unit.settings, key)
            if getattr(value, "param_dtype_override_fn", None) is not None:
                value = replace(value, param_dtype_override_fn=None)  # its results: below
            found[f"{key} of '{name}'"] = str(value)
        for param in unit.params:
            full_name = _full_name(param, names)
            found[f"unit of '{full_name}'"] = f"'{name}'"
            spec = param.sharded_spec
            found[f"shape of '{full_name}'"] = str(tuple(spec.shape))
            found[f"dtype of '{full_name}'"] = str(param.local.dtype)
            found[f"dtype of computation of '{full_name}'"] = str(param.compute_dtype)
            found[f"placements of '{full_name}'"] = str(spec.placements)
            found[f"requires_grad of '{full_name}'"] = str(param.sharded.requires_grad)
    for runtime in dict.fromkeys(unit.runtime for unit in units if unit.runtime is not None):
        for root, order in runtime._orders.items():
            key = f"order of units in the last forward of '{_name_of(root, names)}'"
            found[key] = ", ".join(_name_of(unit, names) or "(root)" for unit in order)
    return found


def _held(
    units: list[Unit], names: Mapping[nn.Module, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Checksums by parameter and by which part of it this is, and those of all of a part."""
    found: dict[str, str] = {}
    by_part: dict[str, str] = {}
    for unit in units:
        for param in unit.params:
            sharded = param.sharded
            assert isinstance(sharded, DTensor)
            place = sharded.device_mesh.get_coordinate() or ()
            cuts = [i for i, p in enumerate(sharded.placements) if not p.is_replicate()]
            part = ", ".join(f"{place[i]} of mesh dim {i}" for i in cuts)
            if sharded.device_mesh != unit.mesh.mesh:
                part += " over " + name_ranks(sharded.device_mesh.mesh.flatten().tolist())
            key = f"values of '{_full_name(param, names)}'" + (f" (shard {part})" if part else "")
            local = param.local.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            found[key] = f"checksum {_checksum(local.numpy())}"
            by_part[part] = _checksum((by_part.get(part, "") + found[key]).encode())
    return found, by_part


def _checksum(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"
