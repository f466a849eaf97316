"""Which ranks share a parameter, which replicate it, and which dims serve other parallelisms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..common.failures import says_how_to_start
from ..common.memory import current_device
from ..policy import DataParallelMeshDims
from .process_groups import own_group


@dataclass(frozen=True)
class DataParallelMesh:
    """The data-parallel part of a mesh, as one rank sees it.

    Attributes:
        mesh: 1-D (shard), or 2-D (replicate x shard); without ``shard_group``, all replicate.
        shard_group, shard_rank, num_shards: the ranks that together hold each parameter. With
            ``shard_group`` None, nothing is sharded (replicated data parallel).
        replicate_group, replicate_rank, num_replicas: the ranks that hold the same shard; None, 0
            and 1 without.
        full_mesh, full_mesh_dims: the larger mesh, if `DataParallelMeshDims` named some of its
            dims, and the dims that are data parallel.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup | None
    shard_rank: int
    num_shards: int
    replicate_group: dist.ProcessGroup | None = None
    replicate_rank: int = 0
    num_replicas: int = 1
    full_mesh: DeviceMesh | None = None
    full_mesh_dims: tuple[int, ...] = ()

    @cached_property
    def size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.num_shards * self.num_replicas

    @property
    def device_type(self) -> str:
        return self.mesh.device_type


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over the default process group, which is made if there is none."""
    # As torch's `fully_shard`: torchrun's environment has everything that is needed.
    if not dist.is_initialized():
        with says_how_to_start():
            dist.init_process_group()
    device_type = _device_type_of_default_group()
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_type_of_default_group() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # gloo cannot send from a device in the order of its streams: a program that chose it on a
    # machine with GPUs means to train on the CPU.
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type


def resolve_mesh(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None
) -> DataParallelMesh:
    """Find the shard and replicate dims of ``mesh``.

    Args:
        mesh: 1-D: shard. 2-D: replicate x shard. More dims only with ``dims``.
        dims: names of the data-parallel dims of a mesh that also has other dims.

    Raises:
        TypeError: if ``mesh`` is not a DeviceMesh.
        ValueError: if the dims of ``mesh`` have no meaning as data parallelism, a name is
            missing, or this rank is not part of the mesh.
    """
    if mesh is None:
        if dims is not None:
            raise ValueError("dp_mesh_dims names dims of a mesh: pass that mesh as mesh=...")
        mesh = default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
    if dims is not None:
        return _from_named_dims(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Slice the data-parallel "
            'dims out of a larger mesh, as in mesh["dp"], or name them with dp_mesh_dims=...'
        )
    # Such a rank has no groups of the mesh. Torch would fail at the first of them, without a hint.
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Rank {dist.get_rank()} is not part of {mesh}: call fully_shard only on its ranks"
        )
    if mesh.ndim == 1:
        return _make(mesh, shard_dim=0, replicate_dim=None)
    return _make(mesh, shard_dim=1, replicate_dim=0)


def _from_named_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    shard_dim: int | None = 0
    replicate_dim: int | None = None
    # A mesh with shards comes last: `_sharded_spec` puts ``Shard`` on the last data-parallel dim.
    if not dims.shard_names:
        data_parallel, shard_dim, replicate_dim = _flat(mesh, dims.replicate_names), None, 0
    elif not dims.replicate_names:
        data_parallel = _flat(mesh, dims.shard_names)
    else:
        data_parallel = concatenate(
            _flat(mesh, dims.replicate_names), _flat(mesh, dims.shard_names)
        )
        shard_dim, replicate_dim = 1, 0
    named = tuple(names.index(name) for name in (*dims.replicate_names, *dims.shard_names))
    made = _make(data_parallel, shard_dim=shard_dim, replicate_dim=replicate_dim)
    return replace(made, full_mesh=mesh, full_mesh_dims=named)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    # (A separate name for each set of dims: the mesh keeps the result under it, so that all calls
    # for the same dims share one group.)
    return mesh[names]._flatten("_".join(names))


def replicated(mesh: DataParallelMesh) -> DataParallelMesh:
    """The same ranks, but all hold parameters whole: gradients are averaged over all.

    Collective over the ranks of an HSDP mesh at the first call, which makes a group over both dims.
    """
    shards = mesh.shard_group
    if shards is None:
        return mesh
    group, rank = shards, mesh.shard_rank
    if mesh.replicate_group is not None:
        # One group over both dims: an all-reduce over each in turn would send everything twice.
        if shards not in _whole_groups:
            ranks = mesh.mesh.mesh.flatten().tolist()
            _whole_groups[shards] = own_group(shards, device_of(mesh), "fsdp2_replicate", ranks)
        group, rank = _whole_groups[shards], mesh.replicate_rank * mesh.num_shards + rank
    return replace(
        mesh,
        shard_group=None,
        shard_rank=0,
        num_shards=1,
        replicate_group=group,
        replicate_rank=rank,
        num_replicas=mesh.size,
    )


# By process group, as a mesh equals another one whose groups were destroyed; weak, since a group
# that the program destroys must not be kept alive by a cache.
_whole_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def concatenate(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with all dims of ``meshes``, which are slices of one larger mesh.

    Raises:
        ValueError: if the meshes are not slices of one mesh.
    """
    # The error that torch raises for meshes that do not belong together depends on its version, and
    # on the first problem that it finds.
    try:
        return DeviceMesh._concatenate(list(meshes))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise ValueError(
            "FSDP requires the DP and model parallel TP/EP mesh to be slices of one mesh, as in "
            'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")); mesh["dp"], mesh["tp"]; '
            f"got {', '.join(map(str, meshes))}"
        ) from error


def _make(
    mesh: DeviceMesh,
    *,
    shard_dim: int | None,
    replicate_dim: int | None,
) -> DataParallelMesh:
    def of(dim: int | None) -> tuple[dist.ProcessGroup | None, int, int]:
        if dim is None:
            return None, 0, 1
        return mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim)

    return DataParallelMesh(mesh, *of(shard_dim), *of(replicate_dim))


def device_of(mesh: DataParallelMesh) -> torch.device:
    """The device of this rank that the mesh computes on."""
    return current_device(mesh.device_type)
