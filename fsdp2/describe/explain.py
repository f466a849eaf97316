"""`explain`: reports a model's settings, its units' memory, and the traffic of a step.

For a sharded model, the numbers are read from its units; for an unsharded one, they come from the
same arithmetic on the layouts that its units would have. Nothing is communicated and no memory is
allocated, so both work on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ..api.arguments import backward_reads_parameters, meant_reshard
from ..api.merging import last_order
from ..api.shard_model import Sharding, Strategy, find_strategy, reshard_of, sharding_of
from ..comm.mesh_transports import groups_of
from ..comm.transports import backend_name
from ..policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    adopt_offload_policy,
    check_comm_policy,
    param_dtype_of,
)
from ..runtime.unit import Unit, units_in
from ..transports.compressed.policy import CommPolicy
from ..transports.host.exchange import EXCHANGE_MAX_RANKS
from ..transports.host.links import places_of
from ..transports.host.topology import Topology
from ..wrap import UnitDescription, units_of
from .bucket_bytes import BucketFacts, ParameterFacts, buckets_of, stored_dtype_of
from .explanation import Explanation, ParameterReport, Totals, UnitReport


def explain(
    model: nn.Module,
    mesh_shape: int | tuple[int, int] | None = None,
    sharding: Sharding | None = None,
    *,
    ignored_params: Collection[nn.Parameter] = (),
    device_type: str = "cuda",
    ranks_per_node: int | None = None,
    **fields: Any,
) -> Explanation:
    """Report a model's units, their memory, and the traffic of a step.

    Args:
        model: a model sharded by `fully_shard` or `shard_model`, before or after its first forward;
            or an unsharded model, with ``mesh_shape``. May be on the meta device.
        mesh_shape: the mesh to shard over: a number of ranks, or (replicas, shards). No processes
            are needed.
        sharding, ignored_params: as in `shard_model`; only with ``mesh_shape``.
        device_type: with ``mesh_shape``, the device type, which determines the transport;
            ``"cpu"`` uses gloo.
        ranks_per_node: with ``mesh_shape``, the number of ranks on each host. Ranks are numbered
            host by host. None: one host. The report then includes the bytes that go to other hosts.
            For a sharded model over gloo, hosts are known after its first forward.
        fields: fields of `Sharding`, by name; they override ``sharding``.

    Returns:
        The numbers; print them for a table.

    Raises:
        ValueError: if the model is unsharded and ``mesh_shape`` is missing, or sharded and
            ``mesh_shape`` is given; for arguments that `shard_model` would reject; or for
            ``max_device_bytes`` or ``shard_granularity`` of a model that is not sharded yet.
        TypeError: for arguments of the wrong type, or unknown ones.

    Example:
        >>> print(explain(model))
        >>> with torch.device("meta"):
        ...     print(explain(Llama(), (8, 8), strategy="hybrid"))
    """
    how = sharding_of(sharding, fields)
    units = units_in(model)
    if (mesh_shape is None) == (not units):
        raise ValueError(
            "The model is already sharded: call explain(model) without mesh_shape, which is for "
            "unsharded models"
            if units
            else "The model is not sharded: call shard_model(model) or fully_shard(model) first, "
            "or pass mesh_shape=... to explain an unsharded model"
        )
    if mesh_shape is None:
        return _explain_sharded(model, units)
    for name in ("max_device_bytes", "shard_granularity"):
        if getattr(how, name) is not None:
            raise ValueError(f"{name} shows in the sharded model only: call explain(model) on that")
    check_comm_policy(how.comm_policy)
    config = _Settings(
        how,
        find_strategy(how.strategy),
        1 if isinstance(mesh_shape, int) else 2,
        isinstance(adopt_offload_policy(how.offload_policy), CPUOffloadPolicy),
        device_type,
        ranks_per_node,
    )
    num_replicas, num_shards = _checked_shape(mesh_shape, config.strategy.hybrid)
    if not config.strategy.sharded:
        num_replicas, num_shards = num_replicas * num_shards, 1
    described = _in_model_order(model, units_of(model, how.wrap, ignored_params=ignored_params))
    drafts = [_draft(model, unit, config, num_shards, num_replicas) for unit in described]
    return _finish(how.strategy, drafts, ())


# -- models that are not sharded ------------------------------------------------------------------


def _checked_shape(shape: Any, hybrid: bool) -> tuple[int, int]:
    parts = (1, shape) if isinstance(shape, int) else tuple(shape)
    if len(parts) != 2 or not all(isinstance(n, int) and n > 0 for n in parts):
        raise ValueError(f"mesh_shape must be a number of ranks or (replicas, shards), got {shape}")
    if hybrid and isinstance(shape, int):
        raise ValueError("Strategy 'hybrid' needs a mesh_shape of (replicas, shards)")
    return parts[0], parts[1]


def _in_model_order(model: nn.Module, units: list[UnitDescription]) -> list[UnitDescription]:
    """The root first, then in the order of their first modules in the model."""
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(units, key=lambda unit: min(order[name] for name in unit.modules))


def _parameter_facts(
    name: str,
    param: nn.Parameter,
    replicate_below: int,
    policy: MixedPrecisionPolicy,
    *,
    sharded: bool,
) -> ParameterFacts:
    local = getattr(param, "_local_tensor", param)
    whole = not sharded or local.nbytes < replicate_below
    param_dtype = param_dtype_of(policy, param)
    dtype = stored_dtype_of(policy, param, param_dtype)
    return ParameterFacts(name, tuple(local.shape), dtype, param.requires_grad, whole, param_dtype)


def _placements(param: ParameterFacts, num_dims: int) -> tuple[str, ...]:
    whole = param.replicated or not param.shape
    return ("Replicate()",) * (num_dims - 1) + ("Replicate()" if whole else "Shard(0)",)


@dataclass(frozen=True)
class _Settings:
    """The arguments of `shard_model`, and the mesh."""

    sharding: Sharding
    strategy: Strategy
    num_dims: int  # of the mesh
    offload: bool
    device_type: str
    ranks_per_node: int | None


def _draft(
    model: nn.Module, unit: UnitDescription, to: _Settings, num_shards: int, num_replicas: int
) -> _Draft:
    """Describe the unit that `shard_model` would make."""
    modules = [model.get_submodule(name) for name in unit.modules]
    params = [
        _parameter_facts(
            name,
            model.get_parameter(name),
            to.sharding.replicate_below,
            to.sharding.mp_policy,
            sharded=to.strategy.sharded,
        )
        for name in unit.params
    ]
    topology = _topology(to, num_shards, num_replicas)
    num_hosts: int | None = 1 if topology is None else topology.ring("shard").num_nodes
    if to.device_type == "cpu" or to.sharding.comm_policy is not None:
        num_hosts = None  # as `ParamGroup.make_buckets`
    few = max(num_shards, num_replicas) <= EXCHANGE_MAX_RANKS
    buckets = buckets_of(
        params,
        num_shards,
        num_replicas,
        reduce_dtype=to.sharding.mp_policy.reduce_dtype,
        direct_min_bytes=to.sharding.direct_min_bytes,
        num_hosts=num_hosts,
        exchanged=to.device_type == "cpu" and few,
        offloaded=to.offload and to.device_type != "cpu",
        comm_policy=to.sharding.comm_policy,
        topology=topology,
    )
    reshard = None
    if to.strategy.sharded:
        reshard = reshard_of(unit, to.strategy, to.sharding.reshard_after_forward)
        reshard = meant_reshard(reshard, num_shards)
    return _Draft(
        unit.name,
        unit.modules,
        unit.is_root,
        buckets,
        placements={p.name: _placements(p, to.num_dims) for p in params},
        num_shards=num_shards,
        num_replicas=num_replicas,
        reshard=(not unit.is_root) if reshard is None else reshard,
        unshard_in_backward=backward_reads_parameters(modules),
        offload=to.offload,
        comm_policy=to.sharding.comm_policy,
    )


def _topology(to: _Settings, num_shards: int, num_replicas: int) -> Topology | None:
    if to.ranks_per_node is None:
        return None
    return Topology(num_shards, num_replicas, to.ranks_per_node)


# -- sharded models -------------------------------------------------------------------------------


def _explain_sharded(model: nn.Module, units: list[Unit]) -> Explanation:
    names = {module: name for name, module in model.named_modules()}
    members = {unit: {m for top in unit.modules for m in top.modules()} for unit in units}

    drafts = []
    for unit in units:
        inside = any(unit.modules[0] in members[other] for other in units if other is not unit)
        config = unit.config
        policy = config.reshard_after_forward
        fqns = [_qualified(names, p.owners[0]) for p in unit.params]
        placements = [tuple(map(_show_placement, p.sharded.placements)) for p in unit.params]  # type: ignore[attr-defined]
        drafts.append(
            _Draft(
                unit_name(unit, names),
                tuple(names.get(m, "?") for m in unit.modules),
                not inside,
                [facts_of(unit, bucket, names) for bucket in unit.buckets],
                placements=dict(zip(fqns, placements, strict=True)),
                num_shards=unit.mesh.num_shards,
                num_replicas=unit.mesh.num_replicas,
                reshard=inside if policy is None else policy,
                unshard_in_backward=config.unshard_in_backward,
                offload=config.offload,
                comm_policy=config.comm_options.policy,
                reshard_after_backward=config.reshard_after_backward,
                forward_prefetch=_unit_names(unit.forward_prefetch, names) or None,
                backward_prefetch=_unit_names(unit.backward_prefetch, names) or None,
            )
        )
    root = units[0]
    order = _unit_names(last_order(root), names)
    found = _finish(units[0].config.strategy, drafts, order)
    limit = units[0].config.max_gathered_bytes
    return replace(found, communicators=_communicators(units), max_gathered_bytes=limit)


def _communicators(units: Sequence[Unit]) -> tuple[str, ...]:
    """The purpose of each process group on accelerators; on the CPU, sharing one costs nothing."""
    purposes: dict[Any, dict[str, None]] = {}
    for unit in units if units[0].device.type != "cpu" else ():
        options, reshard_to = unit.config.comm_options, unit.config.reshard_after_forward
        for mesh in dict.fromkeys(bucket.mesh for bucket in unit.buckets):
            for purpose, group in groups_of(mesh, unit.device, options, reshard_to):
                purposes.setdefault(group, {})[purpose] = None
    return tuple(" + ".join(of_one) for of_one in purposes.values())


def unit_name(unit: Unit, names: dict[nn.Module, str]) -> str:
    """The name of a unit in a model whose modules have these qualified names."""
    return ", ".join(names.get(m, "?") or "(root)" for m in unit.modules)


def _unit_names(units: Sequence[Unit], names: dict[nn.Module, str]) -> tuple[str, ...]:
    return tuple(unit_name(unit, names) for unit in units)


def facts_of(unit: Unit, bucket: Any, names: dict[nn.Module, str]) -> BucketFacts:
    """The bytes a bucket of a sharded model holds and sends; ``names``: the model's modules."""
    mesh = bucket.mesh
    group = mesh.shard_group or mesh.replicate_group
    sizes = (mesh.num_shards, mesh.num_replicas)
    gloo = group is not None and backend_name(group, unit.device) == "gloo"
    return BucketFacts(
        names=tuple(_qualified(names, p.owners[0]) for p in bucket.params),
        trained=tuple(p.sharded.requires_grad for p in bucket.params),
        layout=bucket.layout,
        orig_dtype=bucket.orig_dtype,
        gather_dtype=bucket.gather_dtype,
        reduce_dtype=bucket.reduce_dtype,
        num_shards=mesh.num_shards,
        num_replicas=mesh.num_replicas,
        aliased=bucket.aliases_shards,
        kept=bucket.cached,
        exchanged=gloo and max(sizes) <= EXCHANGE_MAX_RANKS,
        policy=unit.config.comm_options.policy,
        shard_places=None if mesh.shard_group is None else places_of(mesh.shard_group),
        replica_places=None if mesh.replicate_group is None else places_of(mesh.replicate_group),
    )


def _qualified(names: dict[nn.Module, str], owner: tuple[nn.Module, str]) -> str:
    prefix = names.get(owner[0], "?")
    return f"{prefix}.{owner[1]}" if prefix else owner[1]


def _show_placement(placement: Any) -> str:
    return repr(placement).replace("dim=", "")


# -- both -----------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """A unit, as long as the last unit of forward is unknown."""

    name: str
    modules: tuple[str, ...]
    is_root: bool
    buckets: list[BucketFacts]
    placements: dict[str, tuple[str, ...]]
    num_shards: int
    num_replicas: int
    reshard: bool | int
    unshard_in_backward: bool
    offload: bool
    comm_policy: CommPolicy | None = None
    reshard_after_backward: bool = True
    forward_prefetch: tuple[str, ...] | None = None
    backward_prefetch: tuple[str, ...] | None = None

    def report(self, *, gathered_in_backward: bool) -> UnitReport:
        gathering = [b for b in self.buckets if b.num_shards > 1 and not b.kept]
        gathers = [b.gather() for b in gathering]
        if gathered_in_backward:
            again = self.reshard if type(self.reshard) is int else self.num_shards
            gathers += [b.regather(again) for b in gathering]
        reduces = [b.reduce() for b in self.buckets]
        all_reduces = [b.all_reduce() for b in self.buckets]
        known = all(b.knows_places for b in self.buckets)
        between = sum(sent.between for sent in (*gathers, *reduces, *all_reduces))
        return UnitReport(
            name=self.name,
            modules=self.modules,
            is_root=self.is_root,
            params=self._params(),
            numel=sum(b.numel for b in self.buckets),
            trained_numel=sum(b.trained_numel for b in self.buckets),
            stored_dtypes=_dtypes(b.orig_dtype for b in self.buckets),
            compute_dtypes=_dtypes(b.gather_dtype for b in self.buckets),
            reduce_dtypes=_dtypes(b.reduce_dtype for b in self.buckets),
            num_shards=self.num_shards,
            num_replicas=self.num_replicas,
            sharded_bytes=sum(b.shard_bytes for b in self.buckets),
            padding_bytes=sum(b.padding_bytes for b in self.buckets),
            gathered_bytes=sum(b.gathered_bytes for b in self.buckets),
            reshard_after_forward=self.reshard,
            reshard_after_backward=self.reshard_after_backward,
            offload=self.offload,
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            num_gathers=(1 + gathered_in_backward) if gathering else 0,
            sent_by_gathers=sum(sent.total for sent in gathers),
            sent_by_reduction=sum(sent.total for sent in reduces),
            sent_by_all_reduction=sum(sent.total for sent in all_reduces),
            comm_policy=_show_policy(self.comm_policy),
            residual_bytes=sum(b.residual_bytes for b in self.buckets),
            sent_between_hosts=between if known else None,
        )

    def _params(self) -> tuple[ParameterReport, ...]:
        found = {}
        for bucket in self.buckets:
            for name, slot, trained in zip(
                bucket.names, bucket.layout.slots, bucket.trained, strict=True
            ):
                found[name] = ParameterReport(
                    name=name,
                    shape=slot.shape,
                    dtype=_dtype(bucket.orig_dtype),
                    placements=self.placements[name],
                    trained=trained,
                    direct=slot.direct if bucket.num_shards > 1 else None,
                )
        return tuple(found[name] for name in self.placements)


def _finish(strategy: str | None, drafts: list[_Draft], order: Sequence[str]) -> Explanation:
    by_name = {draft.name: draft for draft in drafts}
    inner = [by_name[name] for name in order if name in by_name] or drafts
    # The last unit of forward is the first of backward and is not freed in between.
    kept = inner[-1] if inner[-1].reshard is True and not inner[-1].is_root else None
    reports = []
    gradients_flow = False
    for draft in drafts:
        # Units that run before the first trained parameter have no backward.
        gradients_flow |= any(any(b.trained) for b in draft.buckets)
        again = draft.reshard is not False and draft.unshard_in_backward and gradients_flow
        reports.append(draft.report(gathered_in_backward=again and draft is not kept))

    def total(field: str) -> Any:
        found = [getattr(report, field) for report in reports]
        return None if None in found else sum(found)

    fields = [f for f in Totals.__dataclass_fields__ if f != "num_ranks"]
    first = drafts[0]
    totals = Totals(first.num_shards * first.num_replicas, **{f: total(f) for f in fields})
    return Explanation(strategy, tuple(reports), tuple(order), totals)


def _show_policy(policy: CommPolicy | None) -> str | None:
    """Those settings of ``policy`` that are not its defaults."""
    if policy is None:
        return None
    chosen = [
        f"{field.name}={getattr(policy, field.name)}".replace("torch.", "")
        for field in fields(policy)
        if getattr(policy, field.name) != field.default
    ]
    return ", ".join(chosen) or "nothing"


def _dtypes(dtypes: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_dtype, dtypes)))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
