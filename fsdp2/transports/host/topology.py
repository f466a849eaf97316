"""Which ranks of a group are on the same node, and what crosses the links: pure arithmetic.

`Places` describe a group that exists or is planned, as `relays` uses them. `Topology` and `Ring`
describe a planned mesh. There, ranks are numbered node by node. The ranks that share a parameter
are consecutive; those that hold the same shard are ``num_shards`` apart, as in `init_device_mesh`
for (replicas, shards). (A node is a host.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from .sums import WHOLE_BYTES, whole_bytes


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends.

    Attributes:
        within: to ranks of its host, or read by them from its memory.
        between: to other hosts.
    """

    within: int
    between: int

    @property
    def total(self) -> int:
        return self.within + self.between

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.within + other.within, self.between + other.between)


@dataclass(frozen=True)
class Places:
    """Where the ranks of a group are, seen from one of them.

    Attributes:
        hosts: the ranks of each host in order, hosts by their first rank; a rank whose memory is
            not read counts as a separate host.
        rank: of the group.
        in_rank_order: whether gradients travel to each owner from each rank (``FSDP2_SUM_ORDER``).
        machines: of each rank, a number of the host that it is on after all, if it only may not
            read or be read; empty: as ``hosts``.
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int
    in_rank_order: bool = False
    machines: tuple[int, ...] = ()

    @cached_property
    def near(self) -> frozenset[int]:
        """The ranks to which no link between hosts leads, this one among them."""
        if not self.machines:
            return frozenset(self.members)
        mine = self.machines[self.rank]
        return frozenset(r for r, machine in enumerate(self.machines) if machine == mine)

    @property
    def one_host(self) -> bool:
        return len(self.near) == self.size

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @cached_property
    def others(self) -> int:
        """The number of other hosts."""
        return len(self.hosts) - 1

    @cached_property
    def partners(self) -> list[int]:
        """The rank on each other host that gets what this one sends there."""
        number = self.members.index(self.rank)
        return [host[number % len(host)] for host in self.hosts if host is not self.members]

    @cached_property
    def served_by(self) -> dict[int, list[int]]:
        """Of each rank of this host: the ranks of others whose partner it is here."""
        here = self.members
        found: dict[int, list[int]] = {rank: [] for rank in here}
        for host in self.hosts:
            for number, rank in enumerate(host):
                if host is not here:
                    found[here[number % len(here)]].append(rank)
        return found

    @property
    def served(self) -> list[int]:
        return self.served_by[self.rank]

    def among(self, ranks: Sequence[int]) -> Places:
        """The places of a group of some of these ranks, this one among them."""
        number = {rank: i for i, rank in enumerate(ranks)}
        found = [tuple(number[r] for r in host if r in number) for host in self.hosts]
        hosts = sorted(host for host in found if host)
        machines = tuple(self.machines[rank] for rank in ranks) if self.machines else ()
        return Places(tuple(hosts), number[self.rank], self.in_rank_order, machines)

    def gather(self, nbytes: int) -> Sent:
        """By relays: this rank's ``nbytes`` are to come to all others."""
        # What comes here from other hosts is read by all of this one.
        readers = len(self.members) - 1
        read = readers * (1 + len(self.served)) * nbytes
        return self._sent(dict.fromkeys(self.partners, nbytes), read)

    def gather_rows(self, nbytes: int) -> Sent:
        """`gather` under a `CommPolicy`: where no two ranks read, in a ring of gloo."""
        if len(self.hosts) < self.size:
            return self.gather(nbytes)
        sent = (self.size - 1) * nbytes
        return Sent(sent - self.ring(sent), self.ring(sent))

    def _sent(self, messages: dict[int, int], read: int) -> Sent:
        """Bytes of messages by receiver, and those that others of this host read."""
        between = sum(nbytes for rank, nbytes in messages.items() if rank not in self.near)
        return Sent(read + sum(messages.values()) - between, between)

    def scatter(self, part: int, summed: int) -> Sent:
        """By relays: ``part`` bytes are for each rank; the sum of a host takes ``summed``."""
        return self.scatter_parts([part] * self.size, [summed] * self.size)

    def scatter_parts(self, parts: Sequence[int], summed: Sequence[int]) -> Sent:
        """The same, of so many bytes for each rank."""
        alone = len(self.members) == 1  # there is nothing to add up
        if alone or (self.in_rank_order and self.others):
            peers = self.served if alone and not self.in_rank_order else range(self.size)
            return self._sent({rank: parts[rank] for rank in peers if rank != self.rank}, 0)
        read = sum(parts) - parts[self.rank] - sum(parts[rank] for rank in self.served)
        return self._sent({rank: summed[rank] for rank in self.served}, read)

    def all_reduce(self, nbytes: int) -> Sent:
        """By relays: a reduce-scatter and an all-gather; of few bytes, one exchange of all."""
        here, size = len(self.near), self.size
        if self.is_whole(nbytes):
            return Sent((here - 1) * nbytes, (size - here) * nbytes)
        parts, sums = self.scatter(1, 1), self.gather(1)
        within = (parts.within + sums.within) * nbytes // size
        return Sent(within, (parts.between + sums.between) * nbytes // size)

    def received(self, part: int, summed: int) -> int:
        """Bytes of the buffers that messages of a `scatter` are received into."""
        if self.in_rank_order and self.others:
            return (self.size - 1) * part
        alone = sum(len(host) == 1 for host in self.hosts if host is not self.members)
        return alone * part + (self.others - alone) * summed

    def added_up(self, summed: int) -> int:
        """Bytes of the sums that a `scatter` makes for ranks of other hosts."""
        if len(self.members) == 1 or (self.in_rank_order and self.others):
            return 0
        return len(self.served) * summed

    def is_whole(self, nbytes: int) -> bool:
        """Whether an all-reduce of so many bytes is one exchange of the whole."""
        if not self.others:
            return False
        if len(self.hosts) < self.size:
            return nbytes < WHOLE_BYTES
        return self.size == 2 or nbytes <= whole_bytes(self.size, one_host=self.one_host)

    def ring(self, nbytes: int) -> int:
        """Of what a rank sends around a ring through each host once: bytes between hosts.

        One rank of a host sends to the next one; the result is the average over these ranks.
        """
        return 0 if self.one_host else nbytes // len(self.near)

    def pairs(self, nbytes: int) -> int:
        """The same of what it sends to all others, as much to each."""
        return nbytes * (self.size - len(self.near)) // max(self.size - 1, 1)


@dataclass(frozen=True)
class Ring:
    """A ring over a group of ranks that passes through each node once.

    Attributes:
        size: number of ranks.
        per_node: number of these ranks on each node.
        groups_per_node: number of such rings that share the links of a node.
        stride: nodes from one of its nodes to the next; as many rings are interleaved.
        all_nodes: of the job; 0: as far as it reaches.
    """

    size: int
    per_node: int
    groups_per_node: int
    stride: int = field(default=1, compare=False)
    all_nodes: int = field(default=0, compare=False)

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.per_node)

    def places(self, rank: int) -> Places:
        """Of its ranks, node by node."""
        return _consecutive(self.size, self.per_node, rank)


@lru_cache
def _consecutive(size: int, per_node: int, rank: int) -> Places:
    starts = range(0, size, per_node)
    return Places(tuple(tuple(range(n, min(n + per_node, size))) for n in starts), rank)


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
        node = min(self.ranks_per_node, ranks := self.num_shards * self.num_replicas)
        size, apart = {  # its ranks, and how far each is from the next
            "replicate": (self.num_replicas, self.num_shards),
            "all": (ranks, 1),
            "across": (max(self.num_shards // self.hop, 1), self.hop),
            "within": (self.hop, 1),
            "secondary": (secondary_size, 1),
        }.get(group, (self.num_shards, 1))
        per_node = max(1, min(node // apart, size))
        shared, stride = max(1, node // per_node), max(1, apart // node)
        return Ring(size, per_node, shared, stride, -(-ranks // node))


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
