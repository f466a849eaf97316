"""The methods of `FSDPModule` that set how a unit communicates, and checks of their combinations.

They are functions that the class takes over, not methods of a base class: other libraries find a
sharded module's original class as ``type(module).__mro__[2]``, right after `FSDPModule`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ..comm.mesh_transports import CommOptions
from ..comm.transports import backend_name
from ..policy import check_comm_policy
from ..runtime.events import registry
from ..runtime.param_group import ParamGroup
from ..runtime.runtime import runtime_of
from ..runtime.unit import Unit, unit_of, units_in
from ..transports import custom
from ..transports.compressed import transports as compressed
from ..transports.compressed.checks import check_sent
from ..transports.compressed.policy import CommPolicy
from ..transports.custom import AllGather, ReduceScatter, choose_symmetric_backend


def set_custom_all_gather(self: nn.Module, comm: AllGather) -> None:
    """Gather with ``comm``, into memory that it allocates. Not recursive.

    Parameters are then copied out of one flat buffer. This takes effect at the next gather.

    Args:
        comm: an object with the two methods of `fsdp2.custom.AllGather`; it needs no base class.

    Raises:
        ValueError: if parameters of this module are on different meshes.

    Example:
        >>> class Counted:
        ...     calls = 0
        ...     def allocate(self, size, *, dtype, device):
        ...         return torch.empty(size, dtype=dtype, device=device)
        ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
        ...         self.calls += 1
        ...         return dist.all_gather_into_tensor(
        ...             output_tensor, input_tensor, group=group, async_op=async_op)
        >>> model.layers[0].set_custom_all_gather(Counted())
    """
    unit = unit_of(self)
    options = replace(unit.config.comm_options, all_gather=comm)
    _change(unit, "set_custom_all_gather", options, one_mesh=True)


def set_custom_reduce_scatter(self: nn.Module, comm: ReduceScatter) -> None:
    """Reduce-scatter with ``comm``, in memory that it allocates. Not recursive.

    Args:
        comm: an object with the two methods of `fsdp2.custom.ReduceScatter`.

    Raises:
        ValueError: if parameters of this module are on different meshes.
    """
    unit = unit_of(self)
    options = replace(unit.config.comm_options, reduce_scatter=comm)
    _change(unit, "set_custom_reduce_scatter", options, one_mesh=True)


def set_comm_policy(self: nn.Module, policy: CommPolicy | None, *, recurse: bool = True) -> None:
    """Send fewer bytes from the next gather on; residuals of error feedback start from zero.

    Call this on all ranks. It is collective over the mesh if ``ranks_per_node`` needs new groups.

    Parameters that `fully_shard` packed for the gather stay packed and are sent in bfloat16. On
    accelerators these can be whole units between hosts. To avoid that, pass ``comm_policy`` to
    `fully_shard`, which then does not pack whole units.

    Args:
        policy: the new policy. None: send everything uncompressed again.
        recurse: whether to set it for sharded submodules too.

    Raises:
        TypeError: if it is not a `CommPolicy`.
        ValueError: if a parameter cannot be compressed (tensor subclasses, complex numbers), or if
            there is a custom collective. No unit has been changed then.

    Example:
        >>> model.set_comm_policy(CommPolicy(gather=torch.int8, reduce=torch.int8))
        >>> model.layers[0].set_comm_policy(None)  # this one in full
    """
    check_comm_policy(policy)
    registry.require(compressed.wrap, "set_comm_policy")
    changes = [
        (unit, replace(unit.config.comm_options, policy=policy)) for unit in _units(self, recurse)
    ]
    for unit, options in changes:
        check_sent(unit, unit.params, options)
    for unit, options in changes:
        _change(unit, "set_comm_policy", options)


def set_all_reduce_hook(
    self: nn.Module, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
) -> None:
    """Call ``hook`` on reduced gradients before they are assigned to ``.grad``. Not recursive.

    Args:
        hook: gets contiguous 1-D parts of this rank's gradient shard, in the reduce dtype. It runs
            after the reduce-scatter (and the all-reduce over replicas, if any) and may change
            its argument in place, for example all-reduce it over other ranks. It is called
            once per part; large units of several dtypes have several parts. Set it on all ranks,
            even if it acts on only one of them.
        stream: the stream to run it on, with a 1-D mesh. None: the reduction's stream.

    Raises:
        ValueError: for a ``stream`` with a 2-D mesh, or for parameters on different meshes.
    """
    unit = unit_of(self)
    _check_one_mesh(unit, "set_all_reduce_hook")
    if stream is not None and unit.mesh.replicate_group is not None:
        raise ValueError("stream cannot be set when using native HSDP")
    config = unit.config
    config.all_reduce_hook, config.all_reduce_stream = hook, stream


def set_gradient_divide_factor(self: nn.Module, factor: float) -> None:
    """Divide the gradient sum by ``factor`` instead of by the number of ranks.

    Not recursive. Works on every backend.
    """
    unit_of(self).config.divide_factor = factor


def set_reduce_scatter_divide_factor(self: nn.Module, factor: float) -> None:
    """Deprecated name of `set_gradient_divide_factor`."""
    warnings.warn(
        "set_reduce_scatter_divide_factor is deprecated: use set_gradient_divide_factor",
        DeprecationWarning,
        stacklevel=2,
    )
    set_gradient_divide_factor(self, factor)


def set_force_sum_reduction_for_comms(self: nn.Module, enable: bool) -> None:
    """Set whether to reduce with SUM only and divide afterwards. Not recursive.

    Some implementations (NCCL's zero-copy transfers) support only SUM.
    """
    unit = unit_of(self)
    options = replace(unit.config.comm_options, sum_only=enable)
    _change(unit, "set_force_sum_reduction_for_comms", options)


def set_separate_reduce_scatter_group(
    self: nn.Module, enable: bool = True, *, recurse: bool = True
) -> None:
    """Set whether reduce-scatters have their own process group, and so their own communicator.

    By default they have one on NCCL and similar backends, where they would otherwise queue behind
    all-gathers. It is created when the module is sharded. This call is collective over the ranks
    of the mesh if a group must be created.

    Args:
        enable: True creates a group on any backend; False shares the all-gathers' group.
        recurse: whether to set it for sharded submodules too.
    """
    method = "set_separate_reduce_scatter_group"
    for unit in _units(self, recurse):
        _change(unit, method, replace(unit.config.comm_options, separate_reduce_group=enable))


def set_reduce_scatter_max_input_buffers(
    self: nn.Module, max_input_buffers: int, *, recurse: bool = True
) -> None:
    """Limit how many units' gradients may be in flight before compute waits for the oldest.

    The default limit is in bytes: twice the size of the largest block (on the CPU, once).

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than 1.
    """
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
        raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
    if max_input_buffers < 1:
        raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
    for unit in _units(self, recurse):
        unit.config.max_input_buffers = max_input_buffers


def set_allocate_memory_from_process_group_for_comm(self: nn.Module, enable: bool) -> None:
    """Set whether collectives use flat buffers that the process group allocates (NCCL).

    This lets NCCL reduce in the network where supported. It costs copies into and out of flat
    buffers. Not recursive.

    Raises:
        RuntimeError: without CUDA and NCCL, or with a custom collective.
    """
    method = "set_allocate_memory_from_process_group_for_comm"
    _change_memory(unit_of(self), method, "group", enable)


def set_symm_mem_for_comm(self: nn.Module, backend: str = "NCCL") -> None:
    """Gather into symmetric memory, to which ranks have mutual access. Not recursive.

    Unsharded parameters live in this memory, so nothing is copied out of a buffer. If the
    environment variable ``NCCL_CTA_POLICY`` is 2, NCCL gathers within a node with copy engines,
    which leave the multiprocessors to compute. Otherwise it uses its kernels. Parameters of this
    unit are then freed with the unit and never earlier. Tensor subclasses with their own all-gather
    hooks are gathered as usual.

    After ``set_force_sum_reduction_for_comms(True)``, reduce-scatters use symmetric memory too,
    with buffers and copies. This method has not run on a GPU yet.

    Args:
        backend: of `torch.distributed._symmetric_memory`; for the whole process.

    Raises:
        RuntimeError: without CUDA and NCCL 2.27; with a custom collective; after symmetric memory
            of another backend was allocated; or if captured graphs may use the gathered parameters
            (`set_keep_unsharded_storage`). Call this before the first forward.
        ValueError: for a ``backend`` other than "NCCL".
    """
    if backend != "NCCL":
        raise ValueError(f"set_symm_mem_for_comm supports the backend 'NCCL', not {backend!r}")
    _change_memory(unit_of(self), "set_symm_mem_for_comm", "symmetric", True)


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    return units_in(module) if recurse else [unit_of(module)]


def _change(unit: Unit, method: str, options: CommOptions, *, one_mesh: bool = False) -> None:
    """Change a unit's communication options from the next gather on.

    Args:
        method: the public method that was called, for messages.
        options: the new options.
        one_mesh: whether the option needs all parameters on one mesh.
    """
    if one_mesh:
        registry.require(custom.wrap, method)
        _check_one_mesh(unit, method)
        # Options with `one_mesh` are a user's collectives, which allocate for themselves.
        if unit.config.comm_options.memory is not None:
            raise RuntimeError(
                f"{method} cannot be combined with process-group or symmetric memory, "
                "which has its own collectives"
            )
    check_sent(unit, unit.params, options)
    # Waits for a gather in flight, which started on transports that are about to be dropped.
    if unit.runtime is not None:
        runtime_of(unit).reshard(unit)
    group = unit.param_group
    unit.config.comm_options = options
    # Transports are made with these options. The plans of reductions depend on transports, which
    # decide what must be copied in and cast.
    group.transports.clear()
    group.reduce_plans.clear()
    # Now, while all ranks are in this call: making a group is collective, and in the middle of a
    # forward it would take the buffers of its communicator at peak memory.
    group.make_groups(bucket.mesh for bucket in group.buckets)
    if group.materialized:
        _follow_options(group)


@torch.inference_mode(False)
@torch.no_grad()
def _follow_options(group: ParamGroup) -> None:
    """Make new transports for the gathered parameters; storages and parameters stay."""
    # Graphs refer to the unsharded parameters, which also hold gradients of micro-batches.
    group.make_transports()
    for bucket, transports in zip(group.buckets, group.transports, strict=True):
        if bucket.gathered is None or bucket.gathered.plan is None:
            continue
        bucket.gathered.plan.forget_transports()
        if (secondary := bucket.gathered.secondary) is not None:
            group.resharder(secondary.layout.num_shards).follow(bucket, transports)


def _check_one_mesh(unit: Unit, method: str) -> None:
    """Raise ValueError if the parameters of ``unit`` are on several meshes."""
    meshes = {param.mesh for param in unit.params}
    if len(meshes) > 1:
        raise ValueError(
            f"{method} is not supported with multiple param groups: shard_placement_fn puts "
            f"parameters on {len(meshes)} meshes, and it would be called for each of them"
        )


def _change_memory(unit: Unit, method: str, kind: str, enable: bool) -> None:
    """Communicate on memory of this ``kind``, "group" or "symmetric", or on ordinary memory again.

    Raises:
        RuntimeError: without CUDA and NCCL, or with a custom collective.
    """
    registry.require(custom.wrap, method)
    options = unit.config.comm_options
    if options.all_gather is not None or options.reduce_scatter is not None:
        raise RuntimeError(
            f"{method} cannot be combined with a custom all-gather or reduce-scatter: let "
            "their allocate() give that memory"
        )
    # Switching it off is allowed anywhere, so that one program runs with and without GPUs.
    group = unit.mesh.shard_group or unit.mesh.replicate_group
    backend = backend_name(group, unit.device) if group is not None else "no group"
    if enable and (unit.device.type != "cuda" or backend != "nccl"):
        raise RuntimeError(
            f"{method} needs CUDA and NCCL, but this module is on '{unit.device.type}' with "
            f"'{backend}'"
        )
    if enable and kind == "symmetric":
        if unit.config.keep_unsharded_storage and any(b.allocated_bytes for b in unit.buckets):
            raise RuntimeError(
                f"{method} would move gathered parameters that keep their memory "
                "(set_keep_unsharded_storage): call it before the first forward"
            )
        choose_symmetric_backend(unit.device)
    _change(unit, method, replace(options, memory=kind if enable else None))
