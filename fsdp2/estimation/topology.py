"""Which ranks of a group are in one node: pure arithmetic.

Ranks are numbered node by node. The ranks that share a parameter are consecutive; those that hold
the same shard are ``num_shards`` apart. That is what `init_device_mesh` gives for (replicas,
shards).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """A ring over a group of ranks that passes through each node once.

    Attributes:
        size: ranks.
        per_node: how many of them are in a node.
        groups_per_node: rings like this one that use the links of a node at the same time.
    """

    size: int
    per_node: int
    groups_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.per_node)


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a mesh are."""

    num_shards: int
    num_replicas: int
    ranks_per_node: int

    def ring(self, group: str, secondary_size: int = 0) -> Ring:
        """The ring over "shard", "secondary" (of ``secondary_size``), "replicate" or "all"."""
        node = min(self.ranks_per_node, self.num_shards * self.num_replicas)
        if group == "replicate":
            per_node = max(1, min(node // self.num_shards, self.num_replicas))
            return Ring(self.num_replicas, per_node, max(1, node // per_node))
        if group == "all":
            return Ring(self.num_shards * self.num_replicas, node, 1)
        size = secondary_size if group == "secondary" else self.num_shards
        per_node = min(node, size)
        return Ring(size, per_node, max(1, node // per_node))


def split_by_link(nbytes: int, ring: Ring) -> tuple[int, int]:
    """Bytes that a rank sends, split into those within its node and those to another.

    Of the ``per_node`` ranks of a node one sends to the next node; many rings that take turns make
    that an average.
    """
    if ring.num_nodes == 1:
        return nbytes, 0
    between = nbytes // ring.per_node
    return nbytes - between, between
