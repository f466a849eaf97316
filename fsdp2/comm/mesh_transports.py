"""The transports of one data-parallel mesh: who gathers and reduces over which group.

A unit has one `MeshTransports` per mesh of its parameters: usually one, or two if
`shard_placement_fn` puts some parameters (for example experts) on a separate mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..custom import AllGather, ReduceScatter
from ..sharding.bucket import Bucket
from ..sharding.gathered import SecondarySource
from ..sharding.mesh import DataParallelMesh
from ..sharding.process_groups import connect_group
from .transports import Transport, check_backend, make_transport, separate_group


@dataclass(frozen=True)
class CommOptions:
    """The user's choices of how a unit communicates.

    Attributes:
        all_gather, reduce_scatter: replace the collective and the memory it works on.
        separate_reduce_group: reduce-scatter on a separate group; None: where that helps.
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
    policy: Any = None

    @property
    def gathers_flat(self) -> bool:
        """Whether a gather of a bucket is one message, however many parameters are direct."""
        return not (self.all_gather is self.memory is self.policy is None)


Use = Literal["all-gather", "reduce-scatter", "all-reduce", "secondary all-gather"]


# Applies a user's `CommOptions`: returns the given transport for this use, or one made from it.
_Wrap = Callable[[Transport, Use, "MeshTransports"], Transport]
# The groups of a reduction over shards, each with its purpose; none: the usual one.
_Groups = Callable[
    [DataParallelMesh, torch.device, CommOptions], list[tuple[str, dist.ProcessGroup]]
]
_USUAL = CommOptions()  # with these, no wrapper is asked
wrappers: list[_Wrap] = []
_reduce_groups: list[_Groups] = []


def register_wrapper(wrap: _Wrap, reduce_groups: _Groups | None = None) -> None:
    """Ask ``wrap`` about every transport, after those that were registered before."""
    wrappers.append(wrap)
    if reduce_groups is not None:
        _reduce_groups.append(reduce_groups)


class Resharder(Protocol):
    """The part for ``reshard_after_forward=int``: frees units to groups of ``size`` ranks."""

    def groups(
        self, mesh: DataParallelMesh, size: int
    ) -> Iterable[tuple[str, dist.ProcessGroup]]: ...

    def plan(self, bucket: Bucket, transports: MeshTransports, size: int) -> SecondarySource | None:
        """The source of ``bucket``'s gather in backward; None: the shards of all ranks."""

    def follow(self, bucket: Bucket, transports: MeshTransports) -> None:
        """``bucket``, which has a `SecondarySource`, will be gathered by ``transports``."""


resharders: list[Resharder] = []  # the last of them is used


def resharder(size: int) -> Resharder:
    """
    Raises:
        ValueError: if there is none.
    """
    if not resharders:
        raise ValueError(
            f"reshard_after_forward={size} keeps secondary shards after forward, and the part of "
            "fsdp2 that does (features/secondary_shards.py) is not registered (see "
            "fsdp2/parts.py). Pass True or False"
        )
    return resharders[-1]


class MeshTransports:
    """Transports over the groups of ``mesh``; None over a group of one rank.

    Attributes:
        gather, scatter: over the ranks that share each parameter.
        replicate: over the ranks that hold the same shard.
        secondary_gather: from a `SecondarySource`, if there is one; that part makes it.
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
        self.allocating: Callable[[], AbstractContextManager[None]] | None = None
        sum_only = options.sum_only
        if mesh.shard_group is not None and mesh.num_shards > 1:
            group = mesh.shard_group
            self.gather = self.wrapped(self.make(group, device), "all-gather")
            # Backward gathers the next unit while it reduces this one. On one communicator the two
            # would take turns.
            group = separate_group(group, device, options.separate_reduce_group)
            self.scatter = self.wrapped(
                self.make(group, device, sum_only=sum_only), "reduce-scatter"
            )
        if mesh.replicate_group is not None and mesh.num_replicas > 1:
            self.replicate = self.wrapped(
                self.make(mesh.replicate_group, device, sum_only=sum_only), "all-reduce"
            )

    def wrapped(self, transport: Transport, use: Use) -> Transport:
        """``transport``, or what the user's choices put in its place."""
        for wrap in wrappers if self.options != _USUAL else ():
            transport = wrap(transport, use, self)
        return transport

    def connect(self) -> None:
        """Connect transports that have their own connections; all ranks of the mesh call this."""
        for transport in (self.gather, self.scatter, self.replicate, self.secondary_gather):
            if transport is not None:
                transport.connect()


def make_groups(
    meshes: Iterable[DataParallelMesh],
    device: torch.device,
    options: CommOptions,
    reshard_to: bool | int | None,
) -> None:
    """Make the process groups of `MeshTransports` over ``meshes``, and all communicators.

    Collective over the ranks of each mesh, at the first call for it.

    Args:
        reshard_to: as of `fully_shard`'s ``reshard_after_forward``.

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
        for _, group in groups_of(mesh, device, options, reshard_to):
            connect_group(group, device)


def groups_of(
    mesh: DataParallelMesh,
    device: torch.device,
    options: CommOptions,
    reshard_to: bool | int | None,
) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """The groups over which `MeshTransports` of ``mesh`` communicate; see `make_groups`."""
    if mesh.shard_group is not None and mesh.num_shards > 1:
        yield "all-gather", mesh.shard_group
        group = separate_group(mesh.shard_group, device, options.separate_reduce_group)
        finds = _reduce_groups if options != _USUAL else ()
        found = [each for find in finds for each in find(mesh, device, options)]
        yield from found or [("reduce-scatter", group)]
    if mesh.replicate_group is not None and mesh.num_replicas > 1:
        yield "all-reduce", mesh.replicate_group
    if type(reshard_to) is int:
        yield from resharder(reshard_to).groups(mesh, reshard_to)
