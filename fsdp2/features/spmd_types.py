"""Annotations of the package ``spmd_types`` on parameters, and its checker, which hooks bypass.

torchtitan's default tensor parallelism computes on plain tensors. A parameter holds this rank's
part, and an annotation describes for every mesh axis how the parts make up the whole:

- ``S(dim)``: the parts are slices, and so are the gradients.
- ``I``: all ranks hold the same values and the same gradient, which the model has already summed.
- ``R``: all ranks hold the same values, and each has its own contribution to the gradient, which
  remains to be summed.

So an annotated parameter is tensor-parallel: its sharded form is a DTensor on all axes. But forward
and backward use a plain tensor, whose gradient is plain too.

Source: https://github.com/meta-pytorch/spmd_types/blob/main/docs/local_spmd_types.md
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement

from ..common.pytree import tensors_in
from ..dtensor.boxes import strides
from ..dtensor.from_local import local_of
from ..runtime.torch_modes import function_modes
from ..sharding.mesh import DataParallelMesh
from ..sharding.param import Annotations, TensorSpec, annotation_readers

# The attributes under which `spmd_types` keeps annotations. By name, since `ShardedParam` does not
# copy them to the sharded form: for that DTensor they would be wrong.
_TYPES, _SPEC = "_local_type", "_partition_spec"


def read_annotations(param: torch.Tensor, mesh: DataParallelMesh, name: str) -> Annotations | None:
    """The annotations of ``param``; None if it has none.

    Raises:
        ValueError: if they contradict ``mesh``, or do not cover all of its dims.
    """
    # Not imported here: a parameter can only have been annotated by a program that imported it.
    spmd: Any = sys.modules.get("spmd_types")
    own = spmd.get_local_type(param) if spmd is not None else None
    if not own:
        return None
    spec = spmd.get_partition_spec(param)
    types = dict(own)
    if spec is not None:  # for slices `own` is only "varying"; the spec has the dim
        types.update(spmd.types.partition_spec_to_shard_types(spec))
    # Axes are matched by the ranks they consist of, not by name: programs name, split and flatten
    # their data-parallel dims as they like.
    axes = _MeshAxes(spmd, mesh)
    others: dict[Any, tuple[Placement, Placement]] = {}
    for axis, its_type in types.items():
        if axes.is_data_parallel(axis):
            # S would mean that the model slices the parameter there itself, and I that it sums the
            # gradient itself: the reduction would then average a gradient that is summed already.
            if its_type is not spmd.R:
                raise ValueError(
                    f"Expected spmd.R on FSDP DP axis {axis} for parameter '{name}' but got "
                    f"{its_type}. FSDP requires DP parameters to be R since it handles the DP "
                    "gradient reduction"
                )
        elif axis in axes.of_dims:
            others[axis] = _placements(spmd, its_type, name)
        else:
            raise ValueError(
                f"Parameter '{name}' has spmd_types annotation on axis {axis}, which is "
                "neither a non-FSDP storage-mesh axis nor contained in the FSDP DP mesh, of "
                f"{axes.mesh}. spmd_types parameters require fully_shard() to be called with both "
                "mesh=<all dims> and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
            )
    attributes = {_TYPES: axes.completed(own, types), _SPEC: spec}
    if mesh.full_mesh is None:
        return Annotations(None, (), is_summed=False, attributes=attributes)
    both: list[tuple[Placement, Placement]] = []
    for dim, axis in enumerate(axes.of_dims):
        if dim in mesh.full_mesh_dims:
            # Partial: `TensorSpec.of_gradient` leaves it as it is, for the reduction to average.
            both.append((Replicate(), Partial()))
        elif axis in others:
            both.append(others[axis])
        elif mesh.full_mesh.size(dim) == 1:
            # One rank has all of it, whatever the annotation is; programs leave such dims out.
            both.append((Replicate(), Replicate()))
        else:
            raise ValueError(
                f"Parameter '{name}' has incomplete spmd_types annotations for FSDP storage on "
                f"{mesh.full_mesh}: {types}. Missing non-FSDP storage axes: ({axis},)"
            )
    is_summed = any(placement.is_partial() for _, placement in others.values())
    placements, grad_placements = zip(*both, strict=True)
    shape = _whole_shape(local_of(param).shape, placements, mesh.full_mesh.shape)
    spec = TensorSpec(mesh.full_mesh, placements, shape, strides(shape), mesh.full_mesh_dims)
    return Annotations(spec, grad_placements, is_summed, attributes)


def _whole_shape(
    local: torch.Size, placements: tuple[Placement, ...], sizes: tuple[int, ...]
) -> torch.Size:
    """The whole shape of a parameter with the part ``local`` on each rank of ``sizes``."""
    # Annotations have no sizes, and asking other ranks would be a collective while sharding. So
    # slices count as equal, as the tensor parallelism that makes annotations cuts them.
    whole = list(local)
    for size, placement in zip(sizes, placements, strict=True):
        if isinstance(placement, Shard):
            whole[placement.dim] *= size
    return torch.Size(whole)


class _MeshAxes:
    """The dims of a mesh as ``spmd_types`` identifies them: by the ranks they consist of."""

    def __init__(self, spmd: Any, mesh: DataParallelMesh) -> None:
        self._spmd = spmd
        self.mesh = mesh.full_mesh or mesh.mesh
        self.of_dims = [spmd.MeshAxis.of(self.mesh.get_group(dim)) for dim in range(self.mesh.ndim)]
        chosen = mesh.full_mesh_dims if mesh.full_mesh is not None else range(self.mesh.ndim)
        self._data_parallel = _joined([self.of_dims[dim] for dim in chosen])

    def is_data_parallel(self, axis: Any) -> bool:
        """Whether ``axis`` is a data-parallel dim, several of them, or a part of one."""
        return axis <= self._data_parallel

    def completed(self, own: dict[Any, Any], types: dict[Any, Any]) -> dict[Any, Any]:
        """The annotations of the unsharded tensor, with R on the axes that ``own`` leaves out."""
        # The program's current mesh defines the axes of the computation, which may differ from the
        # axes of the mesh given to `fully_shard`. The parameter's axes are used if they cover its
        # ranks.
        compute = list(types)
        if _joined(compute) != _joined(self.of_dims):
            compute = [*(self._spmd.current_mesh() or own)]
        return {axis: own.get(axis, self._spmd.R) for axis in compute}


def _joined(axes: list[Any]) -> Any:
    """One axis over all ranks of ``axes``."""
    # Imported here: the package may not be installed, and then nothing calls this.
    from spmd_types._mesh_axis import flatten_axes

    return flatten_axes(tuple(axes))


def _placements(spmd: Any, its_type: Any, name: str) -> tuple[Placement, Placement]:
    """The placements of a parameter and of its gradient along one axis."""
    if its_type is spmd.R:
        return Replicate(), Partial()
    if its_type is spmd.I:
        return Replicate(), Replicate()
    if isinstance(its_type, spmd.S):
        return Shard(its_type.dim), Shard(its_type.dim)
    raise ValueError(
        f"Parameter '{name}': Cannot convert plain {'Varying' if its_type is spmd.V else its_type} "
        "to a DTensor placement. Use S(dim) to specify which tensor dimension is sharded"
    )


class _TypeChecks:
    """The checker of the types of operands: a `FunctionMode`."""

    def __init__(self, spmd: Any) -> None:
        self._spmd = spmd

    def unseen(self) -> AbstractContextManager[None]:
        return self._spmd.no_typecheck()

    def replaced(self, given: Any, made: Any) -> None:
        """Give each tensor in ``made`` the types of the one in ``given``."""
        for old, new in zip(tensors_in(given), tensors_in(made), strict=True):
            if new is not old:
                self._spmd.assert_type_like(new, old)


def _type_checks() -> _TypeChecks | None:
    """The checker, while it is active on this thread."""
    spmd = sys.modules.get("spmd_types")
    return _TypeChecks(spmd) if spmd is not None and spmd.is_type_checking() else None


annotation_readers.append(read_annotations)
function_modes.append(_type_checks)
