"""Experts on a separate mesh: their units, in a model that is not sharded yet, and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from typing_extensions import override

from ...transports.host.topology import Ring, Topology
from ...wrap import UnitDescription, as_policy


@dataclass(frozen=True)
class InnerTopology(Topology):
    """The placement of ranks if the mesh has one more dim, the last one, of consecutive ranks.

    Attributes:
        experts: number of ranks over which experts are distributed, including tensor-parallel ones.
        tensor: number of tensor-parallel ranks; the other dims count groups of them.
        context: number of context-parallel ranks or groups: consecutive ones among those that
            shard a parameter.
        pipeline: number of pipeline ranks, the first dim of the mesh.
    """

    experts: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @override
    def ring(self, group: str, secondary_size: int = 0) -> Ring:
        """As in `Topology`; also over "tensor", "context", "pipeline", "experts", and "expert
        shard" (ranks with the same experts)."""
        data_ranks = self.num_shards * self.num_replicas
        if group in ("experts", "expert shard"):
            alike = data_ranks * self.tensor // self.experts
            mesh = Topology(self.experts, alike, self.ranks_per_node)
            return mesh.ring("shard" if group == "experts" else "replicate")
        if group == "pipeline":
            stage = Topology(data_ranks * self.tensor, self.pipeline, self.ranks_per_node)
            return stage.ring("replicate")
        if group == "tensor":
            return Topology(self.tensor, data_ranks, self.ranks_per_node).ring("shard")
        if self.tensor > 1:  # a node has fewer ranks of each group, and more groups
            node = min(self.ranks_per_node, data_ranks * self.tensor)
            groups = min(self.tensor, node)
            outer = replace(self, ranks_per_node=max(node // self.tensor, 1), tensor=1)
            found, nodes = outer.ring(group, secondary_size), max(1, self.tensor // node)
            return replace(
                found,
                groups_per_node=found.groups_per_node * groups,
                stride=found.stride * nodes,
                all_nodes=found.all_nodes * nodes,
            )
        if group == "context":
            return Topology(self.context, data_ranks // self.context, self.ranks_per_node).ring(
                "shard"
            )
        return super().ring(group, secondary_size)


def experts_of(model: nn.Module, experts: Any) -> list[str]:
    """The names of the modules that ``experts`` names, as ``wrap`` does; None: there are none.

    Raises:
        ValueError: if there are none with this name or class, or dim 0 of all their parameters is
            not the expert.
    """
    if experts is None:
        return []
    names = [name for group in as_policy(experts)(model) for name in group]
    modules = dict(model.named_modules())
    for name in names:
        sizes = {n: p.shape[0] if p.ndim else 0 for n, p in modules[name].named_parameters()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise ValueError(
                f"Dim 0 of all parameters of the experts '{name}' must be the number of experts, "
                f"got {sizes}: give other parameters (a router, shared experts) to another module"
            )
    if not names:
        raise ValueError(f"experts={experts!r} is no module of the model")
    return names


def with_experts(
    units: Sequence[UnitDescription], experts: Sequence[str]
) -> tuple[UnitDescription, ...]:
    """The units if `shard_experts` is called for ``experts`` before the other units are made."""
    if not experts:
        return tuple(units)
    own: dict[str, list[str]] = {name: [] for name in experts}
    others = []
    for unit in units:
        kept: list[str] = []
        for param in unit.params:
            inside = [name for name in experts if param.startswith(f"{name}.")]
            (own[inside[0]] if inside else kept).append(param)
        modules = tuple(name for name in unit.modules if name not in own)
        if unit.is_root or (kept and modules):
            others.append(replace(unit, modules=modules or unit.modules, params=tuple(kept)))
    made = [UnitDescription((name,), tuple(params), False) for name, params in own.items()]
    return (*made, *others)
