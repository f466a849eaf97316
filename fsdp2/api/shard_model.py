"""Sharding strategies by name, and `shard_model`, which applies one to a whole model.

The table lists the costs of one step with one micro-batch, for P parameters and N ranks. Memory is
in units of P elements in the parameters' dtype (S: optimizer state, 2 for Adam). It does not count
the one or two units that every strategy has in flight. Traffic is the number of elements that one
rank sends:

=========== ============================ ================ ===================================
strategy    memory between steps         more in a step   traffic
=========== ============================ ================ ===================================
none        1 + 1 + S                    0                2 P (N-1)/N  all-reduce
optimizer   (1 + 1 + S) / N              1, and 1 without 2 P (N-1)/N  however many
                                         gradient sync    micro-batches there are
grad        (1 + 1 + S) / N              1                2 P (N-1)/N  per micro-batch
full        (1 + 1 + S) / N              a unit or two    3 P (N-1)/N  per micro-batch
hybrid      (1 + 1 + S) / G              a unit or two    3 P (G-1)/G in a node of G ranks, and
                                                          2 P/G (R-1)/R across its R replicas
=========== ============================ ================ ===================================

``optimizer``, ``grad`` and ``full`` are stages 1, 2 and 3 of ZeRO (arXiv 1910.02054). Its tables
give (2 + 2 + K) P / N bytes for stage 3: 2 bytes of parameters, 2 of gradients and K = 12 of
optimizer state in mixed precision. With parameters stored in float32, these are the
(4 + 4 + 8) P / N bytes of the table above. Two things differ. Stages 1 and 2 gather whole
parameters for the duration of a step instead of keeping them. And all strategies reduce gradients
as backward produces them, so stage 1 holds whole gradients only while it accumulates them. Traffic
matches the FSDP paper (arXiv 2304.11277): 2 M for replication, 3 M for full sharding, and 2 M/G
between nodes for hybrid sharding. (A node of G ranks sends G times as much: 2 M, and up to 3 M with
full sharding.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from ..common.checks import check_bytes, check_kind, check_number
from ..common.suggestions import did_you_mean
from ..features.gather_budget import checked_budget
from ..policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    adopt_offload_policy,
)
from ..runtime.unit import unit_of
from ..sharding.bucket import Bucket
from ..sharding.mesh import default_mesh, resolve_mesh
from ..transports.compressed.policy import CommPolicy
from ..wrap import UnitDescription, units_of
from .arguments import Granularity, PlacementFn
from .fully_shard import fully_shard
from .module import FSDPModule
from .replicate import replicate

M = TypeVar("M", bound=nn.Module)
ReshardChoice = bool | int | Callable[[UnitDescription], bool | int | None] | None


@dataclass(frozen=True)
class Strategy:
    """The settings behind a strategy name.

    Attributes:
        sharded: False: every rank holds all parameters.
        hybrid: sharded over one mesh dim and replicated over another.
        reshard_after_forward: as in `fully_shard`.
        gathered_once: parameters stay gathered between micro-batches without gradient sync.
    """

    name: str
    sharded: bool = True
    hybrid: bool = False
    reshard_after_forward: bool | None = None
    gathered_once: bool = False


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("full"),
        Strategy("grad", reshard_after_forward=False),
        Strategy("optimizer", reshard_after_forward=False, gathered_once=True),
        Strategy("none", sharded=False),
        Strategy("hybrid", hybrid=True),
    )
}


# What others call them: ZeRO, DeepSpeed, torch's `ShardingStrategy`.
_OTHER_NAMES = {
    **dict.fromkeys(("fsdp", "fsdp2", "fullshard", "zero", "zero3"), "full"),
    **dict.fromkeys(("shardgradop", "zero2"), "grad"),
    "zero1": "optimizer",
    **dict.fromkeys(("ddp", "noshard", "replicate", "zero0"), "none"),
    **dict.fromkeys(("hsdp", "hybridshard"), "hybrid"),
}


def find_strategy(name: str) -> Strategy:
    """Return the strategy called ``name``.

    Raises:
        ValueError: if there is none.
    """
    strategy = STRATEGIES.get(name)
    if strategy is None:
        known = ", ".join(f"'{each}'" for each in STRATEGIES)
        plain = str(name).rpartition(".")[2].lower().replace("-", "").replace("_", "")
        hint = did_you_mean(_OTHER_NAMES.get(plain, str(name)), STRATEGIES)
        raise ValueError(f"There is no strategy {name!r}: choose one of {known}{hint}")
    return strategy


@dataclass(frozen=True)
class Sharding:
    """How to shard a model: for `shard_model`, `estimate`, `predict` and `plan`.

    The functions that take a Sharding check its values: many depend on the model or the mesh.

    Attributes:
        strategy: what is sharded over the ranks:

            - ``"full"``: parameters, gradients and optimizer state (ZeRO-3);
            - ``"grad"``: the same, but parameters stay gathered between forward and backward
              (ZeRO-2);
            - ``"optimizer"``: as ``"grad"``, and parameters also stay gathered from one
              micro-batch to the next, until the backward that reduces the gradients (ZeRO-1);
              call ``model.set_requires_gradient_sync(False)`` for all micro-batches but the last;
            - ``"none"``: nothing; gradients are all-reduced;
            - ``"hybrid"``: as ``"full"`` within a node, replicated across nodes.

        wrap: which modules become units; see `units_of`.
        mp_policy, offload_policy: as in `fully_shard`, for all units.
        replicate_below: parameters with fewer bytes (whole, in their stored dtype) are kept whole
            on every rank, and their gradients are all-reduced. This saves one message per gather
            and costs only the memory of small parameters.
        reshard_after_forward: overrides the strategy's setting: a value for all units except the
            root, or a function that takes a `UnitDescription` and returns the value for that unit.
        prefetch: how many units to gather ahead of the one that computes. 1 gathers the unit that
            ran next in the last step; a larger number gathers the next units in model order.
        direct_min_bytes, comm_policy, shard_granularity: as in `fully_shard`, for all units.
        max_gathered_bytes: limit on the bytes of gathered parameters. The limit then decides how
            many units are gathered ahead; see `FSDPModule.set_max_gathered_bytes`. None: no limit.
        max_device_bytes: with `CPUOffloadPolicy`, how many bytes of shards and their gradients stay
            on the device, per rank. Going from the first unit to the last, each unit that still
            fits is not offloaded. The optimizer state of these units also stays on the device and
            does not count. None: 0.

    Example:
        >>> sharding = Sharding("grad", wrap=Block, prefetch=2)
        >>> print(estimate(Workload(model, tokens, loss_fn=loss), sharding, 64))
        >>> model = shard_model(model, sharding=sharding)
    """

    strategy: str = "full"
    wrap: Any = "auto"
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    replicate_below: int = 0
    reshard_after_forward: ReshardChoice = None
    prefetch: int = 1
    direct_min_bytes: int | None = None
    comm_policy: CommPolicy | None = None
    max_gathered_bytes: int | None = None
    shard_granularity: Granularity = None
    max_device_bytes: int | None = None


def with_fields(given: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass with other values of some fields.

    Raises:
        TypeError: for a field that it does not have.
    """
    known = [each.name for each in dataclass_fields(given)]
    for name in fields:
        if name not in known:
            raise TypeError(
                f"{type(given).__name__} has no field '{name}'{did_you_mean(name, known)}"
            )
    return replace(given, **fields)


def sharding_of(given: Sharding | None, fields: Mapping[str, Any]) -> Sharding:
    """``sharding`` with the fields that are also given by name, which take precedence.

    Raises:
        TypeError: for something else than a Sharding, or a field that it does not have.
    """
    given = Sharding() if given is None else given
    check_kind("sharding", given, Sharding, 'Sharding("full")')
    return with_fields(given, fields)


def shard_model(
    model: M,
    mesh: DeviceMesh | None = None,
    sharding: Sharding | None = None,
    *,
    shard_placement_fn: PlacementFn | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **fields: Any,
) -> M:
    """Shard a whole model in place with a named strategy: one call instead of one per unit.

    Equivalent to calling `fully_shard` (for ``"none"``: `replicate`) on every unit that `units_of`
    returns and then on the model. `explain` shows the result.

    Args:
        model: the model; may be on the meta device.
        mesh: as in `fully_shard`. None: all ranks. With ``"hybrid"``, None shards over the ranks of
            a node (``LOCAL_WORLD_SIZE``, which torchrun sets) and replicates across nodes.
        sharding: the settings. None: ``Sharding()``.
        shard_placement_fn, ignored_params, dp_mesh_dims: as in `fully_shard`, for all units.
        fields: fields of `Sharding` by name; they override ``sharding``.

    Returns:
        ``model``.

    Raises:
        ValueError: for an unknown strategy; for a mesh that does not fit it; for a ``wrap`` that
            does not fit the model; or for ``max_device_bytes`` without `CPUOffloadPolicy`.
        TypeError: for unknown arguments, or arguments of the wrong type.

    Example:
        >>> model = shard_model(model, strategy="full", wrap=Block)
        >>> optimizer = torch.optim.AdamW(model.parameters())  # after sharding
        >>> print(explain(model))
    """
    how = sharding_of(sharding, fields)
    chosen = find_strategy(how.strategy)
    check_number("replicate_below", how.replicate_below, 0)
    check_number("prefetch", how.prefetch)
    if how.max_gathered_bytes is not None:
        checked_budget("max_gathered_bytes", how.max_gathered_bytes)
    offload_policy = offload_beyond(how.offload_policy, how.max_device_bytes)
    units = units_of(model, how.wrap, ignored_params=ignored_params or ())
    mesh = _mesh_for(chosen, mesh, dp_mesh_dims)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": how.mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "dp_mesh_dims": dp_mesh_dims,
        "comm_policy": how.comm_policy,
    }
    if chosen.sharded:
        options["shard_placement_fn"] = _placement(shard_placement_fn, how.replicate_below)
        options["direct_min_bytes"] = how.direct_min_bytes
        options["shard_granularity"] = how.shard_granularity
    modules = dict(model.named_modules())
    for unit in units:
        members = [modules[name] for name in unit.modules]
        whole: Any = members if len(members) > 1 else members[0]
        if not chosen.sharded:
            replicate(whole, **options)
        else:
            reshard = reshard_of(unit, chosen, how.reshard_after_forward)
            fully_shard(whole, reshard_after_forward=reshard, **options)
        config = unit_of(members[0]).config
        config.strategy = chosen.name
        config.gathered_once = chosen.gathered_once
    if how.prefetch > 1:
        _set_prefetch(units, modules, how.prefetch)
    unit_of(model).config.max_gathered_bytes = how.max_gathered_bytes
    return model


@dataclass
class _OffloadBeyond(CPUOffloadPolicy):
    """The policy of all units of one `shard_model`, until each has its own.

    Attributes:
        device_bytes: the bytes that are left on the device for the next units.
    """

    device_bytes: int = 0

    def for_unit(self, buckets: Iterable[Bucket]) -> OffloadPolicy:
        """The policy of the next unit, by the bytes of its shards and their gradients."""
        nbytes = sum(
            bucket.layout.shard_numel
            * (
                bucket.orig_dtype.itemsize
                + bucket.grad_dtype.itemsize * bucket.params[0].sharded.requires_grad
            )
            for bucket in buckets
        )
        # From the first unit on: its gradients are the last of backward, so no computation is left
        # to hide their copy to the host. Sizes are the same on all ranks, with padding.
        if nbytes > self.device_bytes:
            return CPUOffloadPolicy(self.pin_memory)
        self.device_bytes -= nbytes
        return OffloadPolicy()


def offload_beyond(policy: Any, max_device_bytes: int | None) -> OffloadPolicy:
    """``policy``, but with up to ``max_device_bytes`` of all units together on the device.

    Raises:
        ValueError: for a policy that offloads nothing, or a negative number.
        TypeError: for a number that is not an int, or something else than a policy.
    """
    policy = adopt_offload_policy(policy)
    if max_device_bytes is None:
        return policy
    check_bytes("max_device_bytes", max_device_bytes)
    if not isinstance(policy, CPUOffloadPolicy):
        raise ValueError(
            "max_device_bytes limits what CPUOffloadPolicy leaves on the device: pass "
            "offload_policy=CPUOffloadPolicy(), or leave it out"
        )
    return _OffloadBeyond(policy.pin_memory, max_device_bytes)


def reshard_of(
    unit: UnitDescription, strategy: Strategy, choice: ReshardChoice
) -> bool | int | None:
    """The ``reshard_after_forward`` of a unit; None is `fully_shard`'s default."""
    if callable(choice):
        return choice(unit)
    if choice is not None and not unit.is_root:
        return choice
    return strategy.reshard_after_forward


def _mesh_for(
    strategy: Strategy, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None
) -> DeviceMesh:
    if mesh is None:
        if dims is not None:
            raise ValueError("dp_mesh_dims needs the mesh whose dims it names: pass it as mesh=...")
        return _mesh_of_nodes() if strategy.hybrid else default_mesh()
    found = resolve_mesh(mesh, dims)
    if strategy.hybrid and (found.shard_group is None or found.replicate_group is None):
        raise ValueError(
            f"Strategy 'hybrid' needs a mesh of two dims, replicate x shard, but got {mesh}: make "
            "one with init_device_mesh(device_type, (num_nodes, ranks_per_node)), or pass none"
        )
    if strategy.sharded and found.shard_group is None:
        raise ValueError(
            f"Strategy '{strategy.name}' shards, but dp_mesh_dims names no dim to shard over: name "
            "one in shard=..., or use the strategy 'none'"
        )
    return mesh


def _mesh_of_nodes() -> DeviceMesh:
    """A mesh whose replicas are nodes and whose shards are the ranks of a node."""
    flat = default_mesh()
    num_ranks = dist.get_world_size()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal() or int(local) < 1 or num_ranks % int(local):
        raise ValueError(
            "Strategy 'hybrid' without a mesh needs the number of ranks per node, a divisor of "
            f"{num_ranks}, in the variable LOCAL_WORLD_SIZE, but it is {local or 'not set'}: "
            "start with torchrun, or pass mesh=init_device_mesh(device_type, (num_nodes, "
            "ranks_per_node))"
        )
    shape = (num_ranks // int(local), int(local))
    return init_device_mesh(flat.device_type, shape, mesh_dim_names=("replicate", "shard"))


def _placement(function: PlacementFn | None, replicate_below: int) -> PlacementFn | None:
    if not replicate_below:
        return function

    def place(param: nn.Parameter) -> Any:
        placement = None if function is None else function(param)
        own = getattr(param, "_local_tensor", param)  # of a DTensor: this rank's part
        return Replicate() if placement is None and own.nbytes < replicate_below else placement

    return place


def _set_prefetch(units: list[UnitDescription], modules: dict[str, nn.Module], depth: int) -> None:
    """Prefetch up to ``depth`` units, in model order for forward and reversed for backward."""
    order = {name: i for i, name in enumerate(modules)}
    inner = sorted((u for u in units if not u.is_root), key=lambda u: order[u.modules[0]])
    tops = [unit_of(modules[unit.modules[0]]).modules[0] for unit in inner]
    for i, top in enumerate(tops):
        assert isinstance(top, FSDPModule)
        top.set_modules_to_forward_prefetch(tops[i + 1 : i + 1 + depth])
        earlier = tops[max(0, i - depth) : i]
        top.set_modules_to_backward_prefetch(earlier[::-1])
