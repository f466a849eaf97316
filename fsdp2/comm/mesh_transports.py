"""The transports of one data-parallel mesh: who gathers and reduces over which group.

A unit has one `MeshTransports` per mesh of its parameters: usually one, two where
`shard_placement_fn` puts some parameters (experts, say) on a mesh of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..custom import AllGather, ReduceScatter
from ..policy import CommPolicy
from ..sharding.bucket import SecondaryShards
from ..sharding.mesh import DataParallelMesh, subgroup_mesh
from ..sharding.process_groups import connect_group
from .transports import Transport, check_backend, make_transport, separate_group


@dataclass(frozen=True)
class CommOptions:
    """The user's choices of how a unit communicates.

    Attributes:
        all_gather, reduce_scatter: replace the collective and the memory it works on.
        separate_reduce_group: reduce-scatter on a group of its own; None: where that helps.
        sum_only: reduce with SUM only, and divide afterwards.
        policy: send fewer bytes; see `CommPolicy`.
        memory: "group": flat buffers of collectives are from the process group's allocator;
            "symmetric": gathered storage is symmetric memory; None: neither.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    separate_reduce_group: bool | None = None
    sum_only: bool = False
    memory: str | None = None
    policy: CommPolicy | None = None

    @property
    def gathers_flat(self) -> bool:
        """Whether a gather of a bucket is one message, however many parameters are direct."""
        return not (self.all_gather is self.memory is self.policy is None)


Use = Literal["all-gather", "reduce-scatter", "all-reduce", "secondary all-gather"]


# What users choose in `CommOptions`: a transport for this use, which is given or made from that.
_Wrap = Callable[[Transport, Use, "MeshTransports"], Transport]
# The groups of a reduction over shards, each with its purpose; none: the usual one.
_Groups = Callable[
    [DataParallelMesh, torch.device, CommOptions], list[tuple[str, dist.ProcessGroup]]
]
_USUAL = CommOptions()  # nobody is asked
wrappers: list[_Wrap] = []
_reduce_groups: list[_Groups] = []


def register_wrapper(wrap: _Wrap, reduce_groups: _Groups | None = None) -> None:
    """Ask ``wrap`` about every transport, after those that were registered before."""
    wrappers.append(wrap)
    if reduce_groups is not None:
        _reduce_groups.append(reduce_groups)


class MeshTransports:
    """Transports over the groups of ``mesh``; None over a group of one rank.

    Attributes:
        gather, scatter: over the ranks that share each parameter.
        replicate: over the ranks that hold the same shard.
        secondary_gather: within the groups of ``reshard_after_forward=int``; see `make_secondary`.
        narrow: makes of larger shards what is kept in their place, of this dtype; None: themselves.
        allocating: makes the contexts in which gathered storage gets its memory; None: any memory.
    """

    make = staticmethod(make_transport)  # `fsdp2.testing` has one that records

    def __init__(self, mesh: DataParallelMesh, device: torch.device, options: CommOptions) -> None:
        self.mesh = mesh
        self.device = device
        self.options = options
        self.gather: Transport | None = None
        self.scatter: Transport | None = None
        self.replicate: Transport | None = None
        self.secondary_gather: Transport | None = None
        self.secondary_mesh: DeviceMesh | None = None
        self.narrow: Callable[[SecondaryShards, torch.dtype], SecondaryShards] | None = None
        self.allocating: Callable[[], AbstractContextManager[None]] | None = None
        sum_only = options.sum_only
        if mesh.shard_group is not None and mesh.num_shards > 1:
            group = mesh.shard_group
            self.gather = self._wrapped(self.make(group, device), "all-gather")
            # Backward gathers the next unit while it reduces this one. On one communicator the two
            # would take turns.
            group = separate_group(group, device, options.separate_reduce_group)
            self.scatter = self._wrapped(
                self.make(group, device, sum_only=sum_only), "reduce-scatter"
            )
        if mesh.replicate_group is not None and mesh.num_replicas > 1:
            self.replicate = self._wrapped(
                self.make(mesh.replicate_group, device, sum_only=sum_only), "all-reduce"
            )

    def _wrapped(self, transport: Transport, use: Use) -> Transport:
        for wrap in wrappers if self.options != _USUAL else ():
            transport = wrap(transport, use, self)
        return transport

    def connect(self) -> None:
        """Connect transports that connect by themselves; all ranks of the mesh call this."""
        for transport in (self.gather, self.scatter, self.replicate, self.secondary_gather):
            if transport is not None:
                transport.connect()

    def make_secondary(self, size: bool | int) -> int | None:
        """Make the transport within groups of ``size`` ranks, if ``size`` divides the ranks.

        Returns:
            ``size``, or None if parameters on this mesh are not kept in larger shards.
        """
        chosen = _secondary_size(self.mesh, size)
        if chosen is None:
            return None
        # The mesh was made when the module was sharded (`make_groups`). This only looks it up,
        # unless the setting was changed since; then all ranks make it here.
        if self.secondary_gather is None or self.secondary_gather.group.size() != chosen:
            self.secondary_mesh = subgroup_mesh(self.mesh, chosen)
            transport = self.make(self.secondary_mesh.get_group(1), self.device)
            self.secondary_gather = self._wrapped(transport, "secondary all-gather")
        return chosen


def _secondary_size(mesh: DataParallelMesh, size: bool | int | None) -> int | None:
    """``size`` if that is a number of ranks, which divides those of ``mesh``."""
    # The type and not ``isinstance``: True and False are settings of their own, and ints in Python.
    # All ranks and more is no smaller group: then nothing is kept between forward and backward.
    if type(size) is int and size < mesh.num_shards and mesh.num_shards % size == 0:
        return size
    return None


def make_groups(
    meshes: Iterable[DataParallelMesh],
    device: torch.device,
    options: CommOptions,
    secondary_size: bool | int | None,
) -> None:
    """Make the process groups of `MeshTransports` over ``meshes``, and all communicators.

    Collective over the ranks of each mesh, at the first call for it.

    Args:
        secondary_size: as of `MeshTransports.make_secondary`.

    Raises:
        ValueError: a group of a mesh does not serve ``device``.
    """
    # Called when a module is sharded, and not left to the first forward: memory is scarce then, and
    # ranks are in the middle of other collectives. (Every mesh once and in order, on all ranks
    # alike.)
    for mesh in dict.fromkeys(meshes):
        for of_mesh in (mesh.shard_group, mesh.replicate_group):
            if of_mesh is not None:
                check_backend(of_mesh, device)
        for _, group in groups_of(mesh, device, options, secondary_size):
            connect_group(group, device)


def groups_of(
    mesh: DataParallelMesh,
    device: torch.device,
    options: CommOptions,
    secondary_size: bool | int | None,
) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """What `MeshTransports` over ``mesh`` send, and over which groups; see `make_groups`."""
    if mesh.shard_group is not None and mesh.num_shards > 1:
        yield "all-gather", mesh.shard_group
        group = separate_group(mesh.shard_group, device, options.separate_reduce_group)
        finds = _reduce_groups if options != _USUAL else ()
        found = [each for find in finds for each in find(mesh, device, options)]
        yield from found or [("reduce-scatter", group)]
    if mesh.replicate_group is not None and mesh.num_replicas > 1:
        yield "all-reduce", mesh.replicate_group
    size = _secondary_size(mesh, secondary_size)
    if size is not None:
        yield f"all-gather within {size} ranks", subgroup_mesh(mesh, size).get_group(1)
