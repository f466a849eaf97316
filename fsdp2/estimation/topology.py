"""Which ranks of a group are on the same node: pure arithmetic.

Ranks are numbered node by node. The ranks that share a parameter are consecutive; those that hold
the same shard are ``num_shards`` apart, as in `init_device_mesh` for (replicas, shards).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """A ring over a group of ranks that passes through each node once.

    Attributes:
        size: number of ranks.
        per_node: number of these ranks on each node.
        groups_per_node: number of such rings that share the links of a node.
    """

    size: int
    per_node: int
    groups_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.per_node)


@dataclass(frozen=True)
class Topology:
    """The placement of a mesh's ranks on nodes.

    Attributes:
        hop: ranks of the first of two hops of a reduction; 1: it has one.
    """

    num_shards: int
    num_replicas: int
    ranks_per_node: int
    hop: int = 1

    def ring(self, group: str, secondary_size: int = 0) -> Ring:
        """The ring over "shard", "secondary" (of ``secondary_size``), "replicate", "all", "within"
        or "across": the hops of a reduction."""
        node = min(self.ranks_per_node, self.num_shards * self.num_replicas)
        if group == "replicate":
            per_node = max(1, min(node // self.num_shards, self.num_replicas))
            return Ring(self.num_replicas, per_node, max(1, node // per_node))
        if group == "all":
            return Ring(self.num_shards * self.num_replicas, node, 1)
        if group == "across":
            size = max(self.num_shards // self.hop, 1)
            per_node = max(1, min(node // self.hop, size))
            return Ring(size, per_node, max(1, node // per_node))
        size = {"secondary": secondary_size, "within": self.hop}.get(group, self.num_shards)
        per_node = min(node, size)
        return Ring(size, per_node, max(1, node // per_node))


def split_by_link(nbytes: int, ring: Ring, *, to_all: bool = False) -> tuple[int, int]:
    """Split the bytes that a rank sends into those within its node and those to other nodes.

    One of the ``per_node`` ranks of a node sends to the next node; the result is the average over
    these ranks. In an all-to-all (``to_all``) every rank sends to each rank of every other node.
    """
    if ring.num_nodes == 1:
        return nbytes, 0
    if to_all:
        between = nbytes * (ring.size - ring.per_node) // (ring.size - 1)
        return nbytes - between, between
    between = nbytes // ring.per_node
    return nbytes - between, between
