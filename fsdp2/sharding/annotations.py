"""What the package ``spmd_types`` says about a parameter, read once, when it is sharded.

torchtitan's default tensor parallelism computes on plain tensors. A parameter is this rank's part,
and an annotation tells for every mesh axis how the parts make up the whole:

- ``S(dim)``: they are slices. The gradient is a slice as well.
- ``I``: all ranks have the same, and so is the gradient: whoever computes has summed it already.
- ``R``: all ranks have the same, and each has a contribution to the gradient: it is to be summed.

So a parameter with annotations is a tensor-parallel one: its sharded form is a DTensor on all axes.
But it computes as a plain tensor, and gets plain gradients.

Source: https://github.com/meta-pytorch/spmd_types/blob/main/docs/local_spmd_types.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement

from .mesh import DataParallelMesh


@dataclass(frozen=True)
class Annotations:
    """Of one parameter, on the dims of the mesh that `DataParallelMeshDims` names dims of.

    Attributes:
        placements, grad_placements: of the parameter and of its gradient on each dim of that mesh;
            None: it knows of data parallelism only.
        is_summed: whether gradients have to be summed over ranks that are not data parallel.
        attributes: what the type checker reads from the tensor that computes, by name.
    """

    placements: tuple[Placement, ...] | None
    grad_placements: tuple[Placement, ...]
    is_summed: bool
    attributes: dict[str, Any]

    def shape(self, local: torch.Size, sizes: tuple[int, ...]) -> torch.Size:
        """The shape of the whole parameter, of which each rank has ``local``.

        Args:
            sizes: of the mesh dims.
        """
        whole = list(local)
        for size, placement in zip(sizes, self.placements or (), strict=False):
            if isinstance(placement, Shard):
                whole[placement.dim] *= size
        return torch.Size(whole)


# The attributes of a tensor that hold them.
_TYPES, _SPEC = "_local_type", "_partition_spec"


def read_annotations(param: torch.Tensor, mesh: DataParallelMesh, name: str) -> Annotations | None:
    """The annotations of ``param``; None if it has none.

    Only a program that has imported ``spmd_types`` can have annotated it.

    Raises:
        ValueError: if they contradict what ``mesh`` is, or say too little about one of its dims.
    """
    spmd: Any = sys.modules.get("spmd_types")
    own = spmd.get_local_type(param) if spmd is not None else None
    if not own:
        return None
    spec = spmd.get_partition_spec(param)
    types = dict(own)
    if spec is not None:  # where they are slices, `own` says "varying" only
        types.update(spmd.types.partition_spec_to_shard_types(spec))
    axes = _MeshAxes(spmd, mesh)
    others: dict[Any, tuple[Placement, Placement]] = {}
    for axis, its_type in types.items():
        if axes.is_data_parallel(axis):
            if its_type is not spmd.R:
                raise ValueError(
                    f"Parameter '{name}': expected spmd.R on the data-parallel axis {axis} but got "
                    f"{its_type}: fully_shard itself shards it and sums gradients there"
                )
        elif axis in axes.of_dims:
            others[axis] = _placements(spmd, its_type, name)
        else:
            raise ValueError(
                f"Parameter '{name}' has an annotation of spmd_types on the axis {axis}, which is "
                f"no dim of the mesh of fully_shard, {axes.mesh}. Call fully_shard with mesh=<the "
                "mesh with all dims> and dp_mesh_dims=DataParallelMeshDims(shard=..., "
                "replicate=...), which names those of data parallelism"
            )
    attributes = {_TYPES: axes.completed(own, types), _SPEC: spec}
    if mesh.full_mesh is None:
        return Annotations(None, (), False, attributes)
    both: list[tuple[Placement, Placement]] = []
    for dim, axis in enumerate(axes.of_dims):
        if dim in mesh.full_mesh_dims:
            both.append((Replicate(), Partial()))
        elif axis in others:
            both.append(others[axis])
        elif mesh.full_mesh.size(dim) == 1:
            both.append((Replicate(), Replicate()))
        else:
            raise ValueError(
                f"Parameter '{name}' has incomplete annotations of spmd_types, {types}: they do "
                f"not say what it is on {axis}, a dim of {mesh.full_mesh} that is not data parallel"
            )
    is_summed = any(placement.is_partial() for _, placement in others.values())
    placements, grad_placements = zip(*both, strict=True)
    return Annotations(placements, grad_placements, is_summed, attributes)


class _MeshAxes:
    """The dims of a mesh as ``spmd_types`` knows them: by the ranks that they consist of."""

    def __init__(self, spmd: Any, mesh: DataParallelMesh) -> None:
        self._spmd = spmd
        self.mesh = mesh.full_mesh or mesh.mesh
        self.of_dims = [spmd.MeshAxis.of(self.mesh.get_group(dim)) for dim in range(self.mesh.ndim)]
        chosen = mesh.full_mesh_dims if mesh.full_mesh is not None else range(self.mesh.ndim)
        self._data_parallel = _joined([self.of_dims[dim] for dim in chosen])

    def is_data_parallel(self, axis: Any) -> bool:
        """Whether it is one of the data-parallel dims, several of them, or a part of one."""
        return axis <= self._data_parallel

    def completed(self, own: dict[Any, Any], types: dict[Any, Any]) -> dict[Any, Any]:
        """The annotations for computation. Data-parallel axes may have been left out: there it is
        R. Which axes there are, the program's current mesh says."""
        compute = list(types)
        if _joined(compute) != _joined(self.of_dims):
            compute = [*(self._spmd.current_mesh() or own)]
        return {axis: own.get(axis, self._spmd.R) for axis in compute}


def _joined(axes: list[Any]) -> Any:
    """One axis over all ranks of these."""
    from spmd_types._mesh_axis import flatten_axes

    return flatten_axes(tuple(axes))


def _placements(spmd: Any, its_type: Any, name: str) -> tuple[Placement, Placement]:
    """Of a parameter and of its gradient, along an axis."""
    if its_type is spmd.R:
        return Replicate(), Partial()
    if its_type is spmd.I:
        return Replicate(), Replicate()
    if isinstance(its_type, spmd.S):
        return Shard(its_type.dim), Shard(its_type.dim)
    raise ValueError(
        f"Parameter '{name}' is annotated as {its_type} of spmd_types, which is no layout of a "
        "parameter: R, I and S(dim) are"
    )
