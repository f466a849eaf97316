"""`replicate`: units whose parameters every rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DeviceMesh

from ..comm.mesh_transports import CommOptions
from ..policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, adopt_offload_policy
from ..runtime.unit_config import UnitConfig
from ..sharding.mesh import replicated, resolve_mesh
from ..transports.compressed.policy import CommPolicy
from .arguments import checked_ignored, checked_modules
from .fully_shard import make_unit

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 (has no state)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    comm_policy: CommPolicy | None = None,
) -> M:
    """Keep the parameters of ``module`` whole on every rank, and all-reduce their gradients.

    This is data parallelism as in DDP, for units that are better left unsharded. Examples are small
    units, whose gathers cost more than the memory they save, and units that are called very often.
    Replicated and sharded units can be combined in one model, with either one enclosing the other.
    Nothing is gathered. Gradients are all-reduced in backward, overlapped with the computation of
    other units. The parameters are DTensors with ``Replicate()`` on the same mesh as the sharded
    units, so optimizers and gradient clipping see one mesh.

    The name and arguments match ``torch.distributed._composable.replicate_with_fsdp``, where
    ``mesh`` must be 1-D. To replicate single parameters of a sharded unit, return ``Replicate()``
    from its ``shard_placement_fn``.

    Args:
        module: the module, or a list of modules that form one unit.
        mesh: 1-D, or 2-D as for HSDP; gradients are averaged over all of its ranks. None: all
            ranks of the default process group.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters, gradients and optimizer state on
            the CPU.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: names the data-parallel dims of a ``mesh`` that also has other dims.
        comm_policy: a `CommPolicy` sends gradients in fewer bytes. None: uncompressed.

    Returns:
        ``module`` itself, as an instance of a subclass of `FSDPModule`; parameter names stay the
        same.

    Raises:
        ValueError: for an unsuitable mesh; for dims to shard over in ``dp_mesh_dims``; or for a
            module that is already sharded or replicated, or has no forward.
        TypeError: for arguments of the wrong type.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh)
        >>> replicate(model.norm, mesh=mesh)
        >>> fully_shard(model, mesh=mesh)
    """
    if dp_mesh_dims is not None and dp_mesh_dims.shard_names:
        raise ValueError(
            "replicate() with dp_mesh_dims requires replicate-only dims, got shard="
            f"{dp_mesh_dims.shard!r}: name them in replicate=..., or use fully_shard() for sharding"
        )
    modules = checked_modules(module, "replicate")
    ignored = checked_ignored(ignored_params)
    make_unit(
        modules,
        replicated(resolve_mesh(mesh, dp_mesh_dims)),
        ignored,
        None,
        lambda param, name: 1,
        UnitConfig(
            mp_policy,
            adopt_offload_policy(offload_policy),
            comm_options=CommOptions(policy=comm_policy),
        ),
    )
    return module
