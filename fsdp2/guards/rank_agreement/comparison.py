"""Descriptions of a model's units that ranks exchange: equal text for equal units.

The text has topics. All ranks that have a topic must have the same text for it. A rank need not
have every topic (it does not hold the shards of others).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...runtime.runtime import runtime_of
from ...runtime.unit import Unit
from ...sharding.param import ShardedParam, TensorSpec
from ..samples import Samples
from .initial_values import initial_of
from .store_exchange import name_ranks

Names = Mapping[nn.Module, str]


def by_ranks(units: Iterable[Unit]) -> dict[tuple[int, ...], list[Unit]]:
    """The units by the ranks that share them: the ranks of the mesh of their parameters.

    These are the data-parallel ranks, and the ranks that compute on parts of the same parameters
    (tensor parallelism). Stages of a pipeline are separate, as they have other models.
    """
    found: dict[tuple[int, ...], list[Unit]] = {}
    for unit in units:
        # A tensor-parallel parameter is on the unit's mesh and more dims, so the largest mesh has
        # all ranks that have any part of the unit.
        meshes = [p.sharded_spec.mesh for p in unit.params if p.tensor_parallel is not None]
        mesh = max([unit.mesh.mesh, *meshes], key=lambda mesh: mesh.size())
        found.setdefault(tuple(mesh.mesh.flatten().tolist()), []).append(unit)
    return found


def name_of(unit: Unit, names: Names) -> str:
    """The name of the unit in a model whose modules have these names."""
    return ", ".join(names.get(module) or "(root)" for module in unit.modules)


def full_name(param: ShardedParam, names: Names) -> str:
    """The name of the parameter in a model whose modules have these names."""
    module, name = param.owners[0]
    prefix = names.get(module, "")
    return f"{prefix}.{name}" if prefix else name


# The fields of `UnitConfig` that decide what a unit communicates, when, and how it uses the result.
# The others decide what a rank keeps in memory, waits for or shows.
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
    "all_reduce_hook",  # it changes gradients, may communicate, and takes away a late sum
    "unshard_in_backward",
    "reduce_unused",
    "keep_frozen",
    "max_gathered_bytes",
    "gathered_once",
    "manual_finalization",
    "comm_options",
)


def describe(units: Sequence[Unit], names: Names) -> dict[str, str]:
    """Units and parameters, their settings, and the order of both."""
    unit_names = {unit: name_of(unit, names) for unit in units}
    found = {"units": ", ".join(f"'{name}'" for name in unit_names.values())}
    # Kept apart and put last: one parameter more or less shifts all positions after it, and only
    # the first few differences are shown.
    order: dict[str, str] = {}
    for unit, name in unit_names.items():
        found[f"mesh of '{name}'"] = f"{unit.mesh.num_replicas} x {unit.mesh.num_shards}"
        for key in _SETTINGS:
            found[f"{key} of '{name}'"] = _as_text(getattr(unit.config, key), names)
        found[f"forward_prefetch of '{name}'"] = _as_text(unit.forward_prefetch, names)
        found[f"backward_prefetch of '{name}'"] = _as_text(unit.backward_prefetch, names)
        for i, param in enumerate(unit.params):
            its_name = full_name(param, names)
            found[f"unit of '{its_name}'"] = f"'{name}'"
            spec = param.sharded_spec
            found[f"shape of '{its_name}'"] = str(tuple(spec.shape))
            found[f"dtype of '{its_name}'"] = str(param.local.dtype)
            found[f"dtype of computation of '{its_name}'"] = str(param.compute_dtype)
            found[f"placements of '{its_name}'"] = str(spec.placements)
            found[f"requires_grad of '{its_name}'"] = str(param.sharded.requires_grad)
            # Hooks of tensor-parallel parameters decide when partial gradients are summed: see
            # `partial_gradients`. Hooks on others change nothing that is communicated.
            if param.is_tensor_parallel:
                hooks = param.sharded._post_accumulate_grad_hooks, param.sharded._backward_hooks
                found[f"hooks on '{its_name}'"] = str(any(hooks))
            order[f"parameter {i} of '{name}'"] = f"'{its_name}'"
    return found | order


def _as_text(value: object, names: Names) -> str:
    """A setting as text without addresses of objects, which differ between processes."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_as_text(getattr(value, f.name), names)}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, Unit):
        return f"'{name_of(value, names)}'"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_text(item, names) for item in value)}]"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def last_order(units: Iterable[Unit], names: Names) -> dict[str, str]:
    """The order in which the last forward of each root ran the units."""
    found = {}
    for runtime in dict.fromkeys(runtime_of(unit) for unit in units if unit.runtime is not None):
        for root, order in runtime.schedule.orders.items():
            key = f"order of units in the last forward of '{name_of(root, names)}'"
            found[key] = ", ".join(name_of(unit, names) for unit in order)
    return found


# -- values ----------------------------------------------------------------------------------------


def all_values(units: Iterable[Unit], names: Names) -> dict[str, dict[str, str]]:
    """Checksums of all shards of this rank, by part of a parameter."""
    found: dict[str, dict[str, str]] = {}
    for unit in units:
        for param in unit.params:
            # As bytes: NaNs count as equal if their bits are, and NumPy has no bfloat16.
            local = param.local.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            part = _part(param.sharded_spec, unit.mesh.mesh)
            found.setdefault(part, {})[_values_key(param, part, names)] = _checksum(local.numpy())
    return found


def sampled_values(units: Iterable[Unit], names: Names) -> dict[str, dict[str, str]]:
    """Checksums of samples, for shards that other ranks also hold."""
    held = [(unit, param) for unit in units for param in unit.params if _has_replicas(param)]
    samples = Samples([param.local for _, param in held]).read()
    found: dict[str, dict[str, str]] = {}
    for (unit, param), sample in zip(held, samples, strict=True):
        if sample:
            part = _part(param.sharded_spec, unit.mesh.mesh)
            found.setdefault(part, {})[_values_key(param, part, names)] = _checksum(sample)
    return found


def initial_values(units: Iterable[Unit], names: Names) -> dict[str, dict[str, str]]:
    """Checksums of samples of the whole parameters that `fully_shard` got, by tensor-parallel part.

    Parameters whose shards have been written since then are left out.
    """
    found: dict[str, dict[str, str]] = {}
    for unit in units:
        taken = initial_of(unit)
        for param, sample in taken.unwritten() if taken is not None else ():
            part = _part(param.tensor_parallel)
            found.setdefault(part, {})[f"'{full_name(param, names)}'"] = _checksum(sample)
    return found


def _has_replicas(param: ShardedParam) -> bool:
    spec = param.sharded_spec
    return any(
        placement.is_replicate() and spec.mesh.size(dim) > 1
        for dim, placement in enumerate(spec.placements)
    )


def _part(spec: TensorSpec | None, usual: DeviceMesh | None = None) -> str:
    """The part of a tensor that this rank has: "1 of mesh dim 0"; empty: all of it.

    Args:
        usual: the mesh that the text does not mention; None: mention each mesh, but not its ranks.
    """
    if spec is None:
        return ""
    place = spec.mesh.get_coordinate() or ()
    cuts = [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]
    part = ", ".join(f"{place[dim]} of mesh dim {dim}" for dim in cuts)
    if spec.mesh == usual:
        return part
    # Ranks compare per topic. The same coordinate in another mesh is a part of other ranks, even if
    # both meshes have the same ranks (experts together with tensor parallelism).
    part += f" in {spec.mesh.mesh_dim_names} = {tuple(spec.mesh.shape)}"
    return part if usual is None else f"{part} over {name_ranks(spec.mesh.mesh.flatten().tolist())}"


def _values_key(param: ShardedParam, part: str, names: Names) -> str:
    return f"values of '{full_name(param, names)}'" + (f" (shard {part})" if part else "")


def _checksum(data: Any) -> str:
    return f"checksum {zlib.crc32(data):08x}"
