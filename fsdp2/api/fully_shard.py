"""`fully_shard`: check arguments, find parameters, make the unit, install hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Unpack, cast, overload
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from ..comm.mesh_transports import CommOptions
from ..common.classes import class_for
from ..policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    WirePolicy,
    adopt_offload_policy,
    check_comm_policy,
    check_dtypes,
)
from ..runtime.building import made_types, name_units
from ..runtime.events import registry
from ..runtime.hooks import UnitHooks
from ..runtime.unit import ORIGINS, Unit, set_unit, units_in
from ..runtime.unit_config import UnitConfig
from ..sharding.mesh import DataParallelMesh, resolve_mesh
from ..sharding.param import ShardedParam
from .arguments import (
    Granularity,
    PlacementFn,
    ShardOptions,
    backward_reads_parameters,
    check_direct_min_bytes,
    check_modules_are_free,
    check_parameter,
    check_whole_blocks,
    checked_device,
    checked_granularity,
    checked_ignored,
    checked_modules,
    checked_placement,
    checked_reshard,
    is_taken,
    warn_of_other_meshes,
    warn_of_padding,
)
from .deepcopy import refuse_own_deepcopy
from .module import FSDPModule
from .torch_compat import TorchFSDPModule, is_replicated, publish_state, state_of


# The object that comes back is the one that was passed, and an instance of both its own class and
# `FSDPModule`. No type expresses both: as in torch, checkers see the latter.
@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardOptions]) -> FSDPModule: ...
@overload
def fully_shard(
    module: Collection[nn.Module], **options: Unpack[ShardOptions]
) -> list[FSDPModule]: ...
def fully_shard(
    module: nn.Module | Collection[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 (has no state)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    direct_min_bytes: int | None = None,
    comm_policy: WirePolicy | None = None,
    shard_granularity: Granularity = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    All parameters that no earlier call on a submodule has taken become one unit. They are
    gathered together before the forward and the backward of ``module``, and their gradients are
    reduced together.

    Call it bottom-up: on the blocks of a model first, then on the model. A parameter that is
    tied across units moves to the unit of the module that contains both.

    Args:
        module: the module, or several modules that form one unit.
        mesh: 1-D: shard over it. 2-D: replicate over dim 0, shard over dim 1 (HSDP). None: all
            ranks of the default process group.
        reshard_after_forward: True frees the gathered parameters after forward and gathers them
            again in backward; False keeps them; None means False for the root and True otherwise.
            An int that divides the number of shards reshards to larger shards within groups of
            that many consecutive ranks. The gather in backward then stays within a group.
        shard_placement_fn: called with each parameter. Return ``Shard(dim)`` to shard it on a dim
            other than 0; ``Replicate()`` to keep it whole on every rank of the mesh; a
            `ShardPlacementResult` to shard it over another mesh; or None for the default.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the
            CPU. None means ``OffloadPolicy()``. Both policies may also be torch's classes.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: names the data-parallel dims of a ``mesh`` that also has other dims.
            Parameters may be DTensors on that whole mesh, replicated over its data-parallel dims.
        direct_min_bytes: a parameter whose shard has at least this many bytes (in the compute
            dtype) is gathered directly into its final storage. Smaller ones are packed into one
            message, which costs a copy. 0 gathers every eligible parameter directly, a huge number
            none; at most the 128 largest parameters of a bucket are gathered directly. None means
            64 KiB. Accelerators then also pack the smallest 1/16 of a unit's bytes, and between
            hosts the whole unit where that is faster (docs/developers/streams.md, "Batches").
        comm_policy: a `CommPolicy` sends weights and gradients in fewer bytes. None: uncompressed.
        shard_granularity: rows (entries along the sharded dim) per block, or a function that
            returns this number for a parameter. Each rank's shard consists of whole blocks; only
            the last block of a parameter may be shorter. Padding grows: every rank's storage has
            room for the rows of the first rank, and ranks beyond the last block hold no rows.
            None: 1, which splits like `torch.chunk`.

    Returns:
        ``module`` itself, as an instance of a subclass of `FSDPModule`; parameter names stay the
        same. Type checkers see an `FSDPModule`; the variable that was passed keeps its type.

    Raises:
        ValueError: for an unsuitable mesh; for a module or parameter that is already sharded
            (also by torch's ``fully_shard``); for a module without a forward; or for a
            ``reshard_after_forward`` that does not fit the mesh.
        TypeError: for arguments of the wrong type. After either error nothing has changed.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block)
        >>> fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())  # after sharding
    """
    modules = checked_modules(module)
    ignored = checked_ignored(ignored_params)
    check_direct_min_bytes(direct_min_bytes)
    granularity = checked_granularity(shard_granularity)
    dp_mesh = resolve_mesh(mesh, dp_mesh_dims)
    reshard = checked_reshard(reshard_after_forward, dp_mesh)
    make_unit(
        modules,
        dp_mesh,
        ignored,
        shard_placement_fn,
        granularity,
        UnitConfig(
            mp_policy,
            adopt_offload_policy(offload_policy),
            direct_min_bytes=direct_min_bytes,
            reshard_after_forward=reshard,
            comm_options=CommOptions(policy=comm_policy),
        ),
    )
    return cast(FSDPModule, module)


fully_shard.state = state_of  # type: ignore[attr-defined]


def make_unit(
    modules: tuple[nn.Module, ...],
    mesh: DataParallelMesh,
    ignored: set[nn.Parameter],
    shard_placement_fn: PlacementFn | None,
    granularity: Callable[[nn.Parameter, str], int],
    config: UnitConfig,
) -> None:
    """Make a unit of the parameters left in ``modules``; install its hooks and methods."""
    # Nothing may change before everything was checked: a program may catch the error and shard the
    # same modules in another way.
    device = checked_device(mesh)
    check_dtypes(config.mp_policy)
    check_comm_policy(config.comm_options.policy)
    classes = [_sharded_class(sharded) for sharded in modules]  # may fail: before anything changes
    config.unshard_in_backward = backward_reads_parameters(modules)
    unit = made_types[-1][0](modules, mesh, device, config)
    tree = _managed_modules(unit.modules)
    with torch.inference_mode(False):  # else the shards could never be trained
        found = _find_parameters(unit, tree, ignored, shard_placement_fn, granularity)
        registry.on.before_taking(unit, [item.managed for item in found])
        # Groups connect now: at the first gather their communicators would take their buffers when
        # memory is at its peak.
        unit.param_group.make_groups(item.managed.mesh for item in found)
        # Nothing has been changed so far.
        params = _take_parameters(unit, found)
        registry.on.before_sharding(unit, params)
        unit.param_group.shard(params)
        _move_to_device((b for m in tree for b in m.buffers(recurse=False)), unit.device)
    hooks = UnitHooks.made_for(unit)
    # On the modules that own parameters, not on the unit's: ``state_dict`` of a submodule alone has
    # to show shards, too.
    hooks.follow_state_dicts()
    hooks.install()
    for sharded, cls in zip(unit.modules, classes, strict=True):
        set_unit(sharded, unit)
        # Past ``__setattr__`` of the module, which some classes override.
        object.__setattr__(sharded, "__class__", cls)
    # For errors before the first forward: the module is the top of the sharded tree so far. A list
    # of modules has none.
    if len(unit.modules) == 1:
        name_units(unit.modules[0], units_in(unit.modules[0]))
    warn_of_other_meshes(unit, modules)
    warn_of_padding(unit.params)
    publish_state(unit)
    registry.on.sharded(unit)


# -- modules ---------------------------------------------------------------------------------

# Each makes attributes (by name) from a class; the class of its sharded modules gets them.
class_adapters: list[Callable[[type], dict[str, Callable[..., Any]]]] = [refuse_own_deepcopy]
# Weak: a class that was made with its model, in a function, goes with it.
_sharded_classes: WeakValueDictionary[type, type] = WeakValueDictionary()


def _sharded_class(module: nn.Module) -> type:
    """The subclass of `FSDPModule` for the class of ``module``; our methods come first.

    torch's class of the same name is the last one: see `torch_compat`.
    """
    # One for all modules of a class, so that two layers are still of the same type.
    cls = type(module)
    made = _sharded_classes.get(cls)
    if made is None:
        made = _sharded_classes[cls] = class_for(
            module,
            f"FSDP{cls.__name__}",
            {name: method for adapt in class_adapters for name, method in adapt(cls).items()},
            before=(FSDPModule,),
            after=(TorchFSDPModule,),
        )
    return made


def _move_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move buffers in place; meta tensors stay."""
    # Through ``.data``: whatever else refers to a buffer sees it move. Meta tensors get memory when
    # the model is materialized, which knows the device.
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)


# -- parameters ----------------------------------------------------------------------------------


def _managed_modules(tops: tuple[nn.Module, ...]) -> list[nn.Module]:
    """Modules whose parameters no earlier call took, in tree order, each once."""
    found: dict[nn.Module, None] = {}
    left = [*reversed(tops)]
    # Not `nn.Module.modules`, which would continue below a sharded module: the modules there belong
    # to that unit.
    while left:
        module = left.pop()
        if not (module in found or isinstance(module, FSDPModule) or is_replicated(module)):
            found[module] = None
            left += reversed([*module.children()])
    return list(found)


@dataclass
class _Found:
    """A parameter to take and, if it is tied to an inner unit, the unit that gives it up."""

    original: nn.Parameter
    managed: ShardedParam
    earlier: tuple[Unit, ShardedParam] | None


def _find_parameters(
    unit: Unit,
    tree: list[nn.Module],
    ignored: set[nn.Parameter],
    shard_placement_fn: PlacementFn | None,
    granularity: Callable[[nn.Parameter, str], int],
) -> list[_Found]:
    """The parameters of the modules in ``tree``, including those shared with inner units.

    Checks all of them and changes nothing.
    """
    # Reversed: of a module that is in several of the list, the name in the first one stays.
    names = {m: name for top in reversed(unit.modules) for name, m in top.named_modules()}
    order = {module: i for i, module in enumerate(names)}
    check_modules_are_free(tree, names)
    managed_here = set(tree)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in names:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            # In inner units, only parameters tied to another unit are still the user's own.
            mine = module in managed_here or param in ORIGINS
            if mine and not is_taken(param, module, unit.modules):
                owners.setdefault(param, []).append((module, name))
    found = []
    for param, places in owners.items():
        earlier = ORIGINS.get(param)
        if earlier is not None:
            theirs = earlier[1]
            if not all(module in names for module, _ in theirs.owners):
                continue  # tied to a sibling unit: a common parent will take both
            # Its first place in the tree names it, as in ``named_parameters``, whichever of the
            # tied modules was sharded first.
            places = sorted(places + theirs.owners, key=lambda place: order[place[0]])
        module, name = places[0]
        fqn = f"{names[module]}.{name}" if names[module] else name
        mesh, dim = checked_placement(shard_placement_fn, param, fqn, unit.mesh)
        check_parameter(param, fqn, module, mesh)
        rows = granularity(param, fqn)
        managed = ShardedParam(param, places, mesh, dim, fqn, rows)
        if rows > 1:
            check_whole_blocks(managed, rows)
        found.append(_Found(param, managed, earlier))
    return found


def _take_parameters(unit: Unit, found: list[_Found]) -> list[ShardedParam]:
    for item in found:
        # The inner unit plans its storage without the parameter before this one takes it over.
        if item.earlier is not None:
            other, theirs = item.earlier
            other.param_group.give_up(theirs)
        ORIGINS[item.original] = (unit, item.managed)
    return [item.managed for item in found]
