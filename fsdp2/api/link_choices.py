"""Changes how an existing unit communicates, and rejects settings that exclude each other."""

from __future__ import annotations

from typing import Any

from ..comm.transports import backend_name
from ..runtime.unit import Unit


def change_links(unit: Unit, method: str, *, one_mesh: bool = False, **options: Any) -> None:
    """Change a unit's communication options from the next gather on.

    Args:
        method: the public method that was called, for messages.
        one_mesh: whether the option needs all parameters on one mesh.
        options: fields of `CommOptions`.
    """
    if one_mesh:
        check_one_mesh(unit, method)
        if unit.config.comm_options.memory is not None:
            raise RuntimeError(
                f"{method} cannot be combined with process-group or symmetric memory, "
                "which has collectives of its own"
            )
    if unit.runtime is not None:
        unit.runtime.reshard(unit)
    unit.param_group.change_links(**options)


def check_one_mesh(unit: Unit, method: str) -> None:
    """Raise ValueError if the parameters of ``unit`` are on several meshes."""
    meshes = {param.mesh for param in unit.params}
    if len(meshes) > 1:
        raise ValueError(
            f"{method} is not supported where shard_placement_fn puts parameters on "
            f"different meshes: it would be called for each of {len(meshes)}"
        )


def change_memory(unit: Unit, method: str, kind: str, enable: bool) -> None:
    """Communicate on memory of this ``kind``, "group" or "symmetric", or on ordinary memory again.

    Raises:
        RuntimeError: without CUDA and NCCL, or with a custom collective.
    """
    options = unit.config.comm_options
    if options.all_gather is not None or options.reduce_scatter is not None:
        raise RuntimeError(
            f"{method} cannot be combined with a custom all-gather or reduce-scatter: let "
            "their allocate() give that memory"
        )
    group = unit.mesh.shard_group or unit.mesh.replicate_group
    backend = backend_name(group, unit.device) if group is not None else "no group"
    if enable and (unit.device.type != "cuda" or backend != "nccl"):
        raise RuntimeError(
            f"{method} needs CUDA and NCCL, but this module is on '{unit.device.type}' with "
            f"'{backend}'"
        )
    change_links(unit, method, memory=kind if enable else None)
