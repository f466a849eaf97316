"""The arguments of `fully_shard` and `replicate`: types, and checks before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.nn.parameter import is_lazy

from ..comm.transports import check_backend
from ..common.classes import original_class
from ..dtensor.boxes import entries_per_part
from ..dtensor.placement import boxes_of
from ..policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    WirePolicy,
)
from ..runtime.unit import Unit, unit_holding, unit_of, units_in
from ..sharding.mesh import DataParallelMesh, device_of, replicated, resolve_mesh
from ..sharding.param import ShardedParam, managed_as
from .module import FSDPModule
from .torch_compat import TorchFSDPModule

_BOTTOM_UP = "Call it bottom-up: on the blocks of a model first, then on the model"
_SCRIPTED = "torch.jit fixes the parameters of the module that it was made from"


PlacementFn = Callable[[nn.Parameter], Shard | Replicate | ShardPlacementResult | None]
Granularity = int | Callable[[nn.Parameter], int] | None


class ShardOptions(TypedDict, total=False):
    """The keyword arguments of `fully_shard`."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    direct_min_bytes: int | None
    comm_policy: WirePolicy | None
    shard_granularity: Granularity


def checked_modules(module: Any, caller: str = "fully_shard") -> tuple[nn.Module, ...]:
    """The modules of the new unit, without those nested in another module of the list."""
    # (Modules that are containers can be iterated over, too.)
    several = isinstance(module, Collection) and not isinstance(module, nn.Module | str)
    modules = tuple(module) if several else (module,)
    if not modules:
        raise ValueError(f"{caller} got an empty list of modules")
    for item in modules:
        if not isinstance(item, nn.Module):
            raise TypeError(f"{caller} expects a module or a list, got {type(item).__name__}")
        if isinstance(item, torch.jit.ScriptModule):
            raise ValueError(
                f"{caller} cannot shard a {type(item).__name__}: {_SCRIPTED}. Shard that, and use "
                "torch.compile"
            )
        if isinstance(item, FSDPModule):
            done = "replicated" if unit_of(item).mesh.shard_group is None else "sharded"
            raise ValueError(
                f"{original_class(type(item)).__name__} is already {done}: {caller} can only be "
                "applied to a module once. Call it on submodules first and on their parents later"
            )
        has_no_forward = type(item).forward in (
            nn.Module.forward,
            getattr(nn.ModuleList, "forward", None),
        )
        if isinstance(item, nn.ModuleList | nn.ModuleDict) and has_no_forward:
            raise ValueError(
                f"{caller} does not support containers that do not implement forward: "
                f"{type(item).__name__}. Call it on each of their elements"
            )
    inside = {m for top in modules for m in top.modules() if m is not top}
    return tuple(m for m in modules if m not in inside) if len(modules) > 1 else modules


def checked_device(mesh: DataParallelMesh) -> torch.device:
    """The device that a unit on ``mesh`` computes on."""
    kind = mesh.device_type
    if kind != "cpu":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != kind:
            have = accelerator.type if accelerator is not None else "cpu"
            raise ValueError(
                f"The mesh is of device type '{kind}', but this process computes on '{have}'. Make "
                f"the mesh with init_device_mesh('{have}', ...)"
            )
    device = device_of(mesh)
    group = mesh.shard_group or mesh.replicate_group
    assert group is not None
    check_backend(group, device)
    return device


def checked_reshard(value: Any, mesh: DataParallelMesh) -> bool | int | None:
    """``reshard_after_forward`` as `meant_reshard` returns it, after a check against the mesh."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value!r}"
        )
    if value < 1 or value > mesh.num_shards or mesh.num_shards % value != 0:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{mesh.num_shards}, not {value}"
        )
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means resharding to one rank, which frees nothing: "
            "the same as False. For resharding to all ranks pass True",
            stacklevel=3,
        )
    return meant_reshard(value, mesh.num_shards)


def meant_reshard(value: Any, num_shards: int) -> Any:
    """``reshard_after_forward``, with False and True in place of the equivalent numbers."""
    if type(value) is int and value in (1, num_shards):
        return value != 1
    return value


def backward_reads_parameters(modules: Iterable[nn.Module]) -> bool:
    """Whether backward reads the parameters of ``modules``: a lookup's reads only indices.

    If something else computes with the weight of an embedding, see `lookups`.
    """
    return not all(
        type(module) is nn.Embedding
        and [name for name, _ in module.named_parameters()] == ["weight"]
        and type(module.weight) in (nn.Parameter, DTensor)
        for module in modules
    )


def checked_ignored(ignored: Any) -> set[nn.Parameter]:
    """``ignored_params`` as a set."""
    items: Any = [ignored] if isinstance(ignored, str | torch.Tensor) else ignored
    items = list(items) if isinstance(items, Iterable) else [] if items is None else [items]
    wrong = [item for item in items if not isinstance(item, torch.Tensor)]
    if isinstance(ignored, torch.Tensor):
        raise TypeError("ignored_params must be a set of parameters, got one: put it in a set")
    if wrong:
        advice = ""
        if isinstance(wrong[0], str):
            advice = f". To look it up by name, use model.get_parameter({wrong[0]!r})"
        raise TypeError(
            f"ignored_params must be a set of parameters, but {wrong[0]!r} is not one{advice}"
        )
    return set(items)


def check_direct_min_bytes(value: Any) -> None:
    """Check that it is None or a number of bytes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"direct_min_bytes must be a number of bytes or None, got {value!r}")
    if not value >= 0:
        raise ValueError(
            f"direct_min_bytes must not be negative, got {value}: 0 gathers every parameter "
            "straight into place, a huge number gathers none that way"
        )


def checked_granularity(value: Any) -> Callable[[nn.Parameter, str], int]:
    """``shard_granularity`` as a function of a parameter and its name."""
    if value is None or not callable(value):
        rows = 1 if value is None else _checked_rows(value, "shard_granularity must be")
        return lambda param, name: rows
    return lambda param, name: _checked_rows(
        value(param), f"shard_granularity of parameter '{name}' must return"
    )


def checked_placement(
    function: PlacementFn | None, param: nn.Parameter, name: str, mesh: DataParallelMesh
) -> tuple[DataParallelMesh, int]:
    """The mesh and the dim to shard ``param`` on."""
    placement: Any = function(param) if function is not None else None
    # By its fields and not its class: programs pass torch's `ShardPlacementResult` as well.
    if hasattr(placement, "placement"):
        own = getattr(placement, "mesh", None)
        if own is None:
            own = getattr(placement, "mesh_info", None)  # of torch's
        if own is not None:
            mesh = _checked_mesh_of(own, name, mesh)
        placement = placement.placement
    if placement is None:
        return mesh, 0
    if isinstance(placement, Replicate):
        return replicated(mesh), 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"Invalid shard_placement_fn result {placement!r} for parameter '{name}': expected "
            "Shard(dim), Replicate(), a ShardPlacementResult or None"
        )
    return mesh, placement.dim


def _checked_mesh_of(own: Any, name: str, default: DataParallelMesh) -> DataParallelMesh:
    # torch's `mesh_info` also records the larger mesh if it was given dp_mesh_dims.
    dims, full_mesh = getattr(own, "dp_mesh_dims", None), getattr(own, "spmd_mesh", None)
    if dims is not None and full_mesh is not None:
        mesh = resolve_mesh(full_mesh, dims)
    else:
        mesh = resolve_mesh(own if isinstance(own, DeviceMesh) else getattr(own, "mesh", own))
    # A unit has one device, where all of its buckets are.
    if mesh.device_type != default.device_type:
        raise ValueError(
            f"shard_placement_fn gave parameter '{name}' a mesh of device type "
            f"'{mesh.device_type}', but the mesh of fully_shard is on '{default.device_type}'"
        )
    return default if mesh == default else mesh


def warn_of_padding(params: Iterable[ShardedParam]) -> None:
    """Warn if a unit's granularities leave more padding than parameters."""
    wanted = [param for param in params if param.granularity > 1]
    padded = {param: _padded_numel(param) for param in wanted}
    if not wanted or sum(padded.values()) < 2 * sum(prod(param.full_shape) for param in wanted):
        return
    worst = max(wanted, key=lambda param: padded[param] - prod(param.full_shape))
    warnings.warn(
        f"shard_granularity: of parameter '{worst.fqn}' of shape {worst.full_shape}, "
        f"{worst.mesh.num_shards} ranks have room for {padded[worst]:,} elements, since shards of "
        f"{worst.granularity} rows leave some ranks without any. Storages and messages of its unit "
        "are twice as large or more than without: use fewer rows, or replicate the parameter",
        stacklevel=5,
    )


def _padded_numel(param: ShardedParam) -> int:
    """Elements of the shards of all ranks, with their padding."""
    numel = prod(param.full_shape)
    if param.dim is None or not numel:
        return numel
    size, num = param.full_shape[param.dim], param.mesh.num_shards
    return numel // size * num * entries_per_part(size, num, param.granularity)


def _checked_rows(value: Any, wants: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{wants} a number of rows, got {value!r}")
    if not 1 <= value < 2**32:
        raise ValueError(f"{wants} a number of rows, at least 1, got {value}")
    return value


# -- what is already sharded -----------------------------------------------------------------------


def check_modules_are_free(modules: Iterable[nn.Module], names: dict[nn.Module, str]) -> None:
    """Check that torch's `fully_shard` has not sharded any of these modules.

    Args:
        modules: the modules whose parameters the new unit takes.
        names: the modules' qualified names.
    """
    for module in modules:
        if isinstance(module, TorchFSDPModule) and not isinstance(module, FSDPModule):
            raise ValueError(
                f"Module '{names[module] or '(root)'}' ({type(module).__name__}) is already "
                "sharded by torch.distributed.fsdp.fully_shard: shard the whole model with one of "
                "the two. Is `fully_shard` imported from torch in another file?"
            )


def is_taken(param: nn.Parameter, module: nn.Module, tops: Iterable[nn.Module]) -> bool:
    """Whether a unit that does not contain all of ``tops`` holds ``param``, of ``module``, already.

    That unit keeps the parameter. At the first forward, the parameter moves to the unit that is
    gathered wherever it is used.

    Raises:
        ValueError: if the unit contains all of ``tops``.
    """
    unit = unit_holding(module, param) if isinstance(param, DTensor) else None
    if unit is not None and {m for each in unit.modules for m in each.modules()}.issuperset(tops):
        managed = managed_as(param)
        assert managed is not None
        raise ValueError(
            f"Parameter '{managed.fqn}' is already sharded: it belongs to the unit '{unit.name}', "
            f"made by an earlier call of fully_shard on a module around this one. {_BOTTOM_UP}"
        )
    return unit is not None


def check_parameter(
    param: nn.Parameter,
    name: str,
    module: nn.Module,
    mesh: DataParallelMesh,
) -> None:
    """Check that ``param`` can be sharded over ``mesh``.

    Args:
        name: its qualified name.
        module: a module that holds it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"Parameter '{name}' is in a {type(module).__name__}: {_SCRIPTED}. Put that in its "
            "place, or pass the parameters in ignored_params"
        )
    if is_lazy(param):
        raise ValueError(
            f"Parameter '{name}' ({type(module).__name__}) has no shape yet: run the model once, "
            "on a small batch, before fully_shard"
        )
    if not isinstance(param, DTensor):
        return
    own = param.device_mesh
    if own.device_type != mesh.device_type:
        raise ValueError(
            f"Parameter '{name}': Requires DTensor to have mesh of the same type as the FSDP mesh "
            f"but got {own.device_type} for DTensor and {mesh.device_type} for FSDP"
        )
    if mesh.full_mesh is not None and own == mesh.full_mesh:
        return
    if mesh.full_mesh is not None and _ranks(own) == _ranks(mesh.full_mesh):
        raise ValueError(
            f"Parameter '{name}': Expected param's DTensor mesh to be the same mesh passed to "
            f"fully_shard, but got different mesh objects: {own} and {mesh.full_mesh}. Distribute "
            "it on that mesh, or pass the mesh that it is on as mesh=..."
        )
    shared = sorted(_ranks(own) & _ranks(mesh.mesh))
    if len(shared) > 1:
        raise ValueError(
            f"Parameter '{name}' is already a DTensor, {tuple(param.placements)} on {own}, whose "
            f"ranks {shared} are also in the mesh passed to fully_shard ({mesh.mesh}). If "
            "an earlier fully_shard (or torch's) on a module around this one sharded it, "
            f"{_BOTTOM_UP[0].lower()}{_BOTTOM_UP[1:]}. If it is tensor parallel, its mesh and the "
            'one of fully_shard must be different dims of one mesh, like mesh["tp"] and mesh["dp"]'
        )


def _ranks(mesh: Any) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def warn_of_other_meshes(unit: Unit, tops: Iterable[nn.Module]) -> None:
    """Warn about units inside ``tops`` whose mesh leaves out replicas: usually a mistake.

    Units on meshes of other ranks hold experts, and replicated units differ on purpose.
    """
    mesh = unit.mesh
    if mesh.shard_group is None or mesh.num_replicas == 1:
        return
    of_replica = set(torch.distributed.get_process_group_ranks(mesh.shard_group))
    for inner in (found for top in tops for found in units_in(top)):
        other = inner.mesh
        plain = not any(param.tensor_parallel for param in inner.params)
        if other.shard_group is None or other.num_replicas > 1 or not (inner.params and plain):
            continue
        if _ranks(other.mesh) == of_replica:
            what = f"its gradients are not averaged over the {mesh.num_replicas} replicas"
        elif _ranks(other.mesh) == _ranks(mesh.mesh):
            what = "it has no replicas"
        else:
            continue
        warnings.warn(
            f"Unit '{inner.name}' is sharded over {other.mesh}, but the module around it "
            f"('{unit.name}') over {mesh.mesh}: {what}. Pass the same mesh=... to every call of "
            "fully_shard, unless that is intended",
            stacklevel=4,
        )
        return


def check_whole_blocks(param: ShardedParam, granularity: int) -> None:
    """Check that tensor parallelism leaves no rank a part of a block of ``granularity`` rows.

    Raises:
        ValueError: if it does.
    """
    others, dim, num = param.tensor_parallel, param.dim, param.mesh.num_shards
    if others is None or dim is None or param.mesh.shard_group is None:
        return
    # Of all ranks' parts, which may differ in size: an error on some of them only would leave the
    # others waiting.
    boxes = boxes_of(tuple(others.shape), tuple(others.mesh.shape), others.placements)
    parts = {(box.start[dim], box.shape[dim]) for box in boxes if box.shape[dim]}
    if len(parts) < 2 or all(
        start % granularity == 0
        and entries_per_part(size, num, granularity) == entries_per_part(size, num)
        for start, size in parts
    ):
        return
    raise ValueError(
        f"Parameter '{param.fqn}' of shape {tuple(others.shape)} cannot have shards of "
        f"{granularity} rows: tensor parallelism cuts dim {dim} as well, into parts that begin "
        f"at {sorted(start for start, _ in parts)} and do not divide among {num} ranks where "
        "blocks end. Let shard_granularity return 1 for it, or shard_placement_fn another dim"
    )
