"""The gather and the reduction of a bucket as pure functions of tensors.

They read the flat sharded storage of a bucket and return one laid out alike. So a step has one
input and one output for each bucket, however many parameters there are. All operators are
functional: a tracer sees one collective each way, and plain views and copies around it. On devices
these are torch's functional collectives, which its passes support; on the CPU they are the
transports of eager steps (`host_collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..comm.means import Mean, as_real, mean_over
from ..comm.mesh_transports import MeshTransports
from ..comm.transports import backend_name
from ..sharding.bucket import Bucket
from ..sharding.layout import Slot
from ..sharding.process_groups import num_hosts
from .host_collectives import ALL_REDUCE, GATHER, SCATTER, HostCollectives

_OPERATIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


def gather(bucket: Bucket, shards: Tensor, host: HostCollectives | None) -> list[Tensor]:
    """The whole parameters of ``bucket``, in the dtype of computation.

    Args:
        shards: shape (shard_numel,), laid out as ``bucket.shards``.
        host: if the host orders collectives.
    """
    mesh, layout = bucket.mesh, bucket.layout
    if host is not None and mesh.num_shards > 1:
        flat = host.call(GATHER, [shards])
        return [
            flat[slot.full_offset : slot.full_offset + prod(slot.shape)].view(slot.shape)
            for slot in layout.slots
        ]
    flat = shards.to(bucket.gather_dtype)
    if mesh.shard_group is not None and mesh.num_shards > 1:
        name = mesh.shard_group.group_name
        operators = torch.ops._c10d_functional
        flat = operators.all_gather_into_tensor(_as_sent(flat), mesh.num_shards, name)
        flat = operators.wait_tensor(flat).view(bucket.gather_dtype)
    rows = flat.view(mesh.num_shards, layout.shard_numel)
    return [_whole(rows, slot) for slot in layout.slots]


def reduce(
    bucket: Bucket,
    grads: Sequence[Tensor | None],
    transports: MeshTransports,
    host: HostCollectives | None,
    divide_factor: float | None = None,
) -> Tensor:
    """This rank's rows of the mean of gradients over all ranks.

    Args:
        grads: of the whole parameters; None counts as zeros.
        transports: of the bucket, for their groups.
        host: if the host orders collectives.
        divide_factor: divides the sum in the place of the number of ranks.

    Returns:
        Shape (shard_numel,), laid out as ``bucket.shards``, in the dtype of ``.grad``.
    """
    scatters, replicates = transports.scatter is not None, transports.replicate is not None
    if host is not None and (scatters or replicates):
        means = host.call(SCATTER, grads) if scatters else _stage(bucket, grads).view(-1)
        means = host.call(ALL_REDUCE, [means]) if replicates else means
    else:
        means = _reduce_on_device(bucket, grads, transports)
    num_ranks = bucket.mesh.size
    if divide_factor is not None and divide_factor != num_ranks:
        means = means * (num_ranks / divide_factor)
    return means.to(bucket.grad_dtype)


def _reduce_on_device(
    bucket: Bucket, grads: Sequence[Tensor | None], transports: MeshTransports
) -> Tensor:
    operators, dtype = torch.ops._c10d_functional, bucket.reduce_dtype
    sums = _stage(bucket, grads)
    if transports.scatter is not None:
        group = transports.scatter.group
        mean = _mean_over(group, bucket, transports)
        terms = as_real(_divided(sums, mean.before).view(-1))
        operation = _OPERATIONS[mean.operation]
        made = operators.reduce_scatter_tensor(terms, operation, group.size(), group.group_name)
        sums = _divided(_as_complex(operators.wait_tensor(made), dtype), mean.after)
    if transports.replicate is not None:
        group = transports.replicate.group
        mean = _mean_over(group, bucket, transports)
        terms = as_real(_divided(sums, mean.before).view(-1))
        made = operators.all_reduce(terms, _OPERATIONS[mean.operation], group.group_name)
        sums = _divided(_as_complex(operators.wait_tensor(made), dtype), mean.after)
    return sums.view(-1)


def _as_sent(flat: Tensor) -> Tensor:
    """A view whose dtype all backends support."""
    known = flat.dtype.is_floating_point and flat.dtype.itemsize > 1
    return flat if known else flat.view(torch.uint8)


def _mean_over(group: dist.ProcessGroup, bucket: Bucket, transports: MeshTransports) -> Mean:
    is_nccl = backend_name(group, bucket.device) == "nccl"
    return mean_over(
        group.size(),
        bucket.reduce_dtype,
        # Where the library or gloo sums, the sum is divided.
        sum_only=transports.options.sum_only or not is_nccl,
        num_hosts=num_hosts(group) if is_nccl else None,
    )


def _divided(tensor: Tensor, by: float) -> Tensor:
    return tensor if by == 1 else tensor / by


def _as_complex(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(tensor.view(-1, 2)) if dtype.is_complex else tensor


def _is_even(slot: Slot) -> bool:
    """Whether no rank has padding, whatever the sharded dim."""
    return prod(slot.shape) == slot.full_numel


def _whole(rows: Tensor, slot: Slot) -> Tensor:
    """A parameter out of what is gathered.

    Args:
        rows: shape (num_shards, shard_numel of the bucket).
    """
    num_shards, numel = len(rows), prod(slot.shape)
    own = rows[:, slot.shard_offset : slot.shard_offset + slot.shard_numel]
    if slot.dim is None:
        return own[0].view(slot.shape)
    if slot.dim == 0:
        return own.reshape(-1)[:numel].view(slot.shape)
    if _is_even(slot):
        parts = own.reshape(num_shards, *slot.local_shape(0))
        return parts.movedim(0, slot.dim).reshape(slot.shape)
    return torch.cat(
        [
            own[rank, : slot.local_numel(rank)].view(slot.local_shape(rank))
            for rank in range(num_shards)
        ],
        slot.dim,
    )


def _stage(bucket: Bucket, grads: Sequence[Tensor | None]) -> Tensor:
    """What is scattered: row r is what rank r will own. Shape (num_shards, shard_numel)."""
    num_shards, layout, end = bucket.mesh.num_shards, bucket.layout, 0
    zeros = partial(torch.zeros, dtype=bucket.reduce_dtype, device=bucket.device)
    parts: list[Tensor] = []
    pairs = sorted(zip(layout.slots, grads, strict=True), key=lambda x: x[0].shard_offset)
    for slot, grad in pairs:
        missing = slot.shard_offset - end
        if missing:
            parts.append(zeros(num_shards, missing))
        if grad is None:
            parts.append(zeros(num_shards, slot.shard_numel))
        elif slot.shard_numel:
            parts.append(_rows(grad, slot, num_shards).to(bucket.reduce_dtype))
        end = slot.shard_offset + slot.shard_numel
    if layout.shard_numel > end:
        parts.append(zeros(num_shards, layout.shard_numel - end))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _rows(grad: Tensor, slot: Slot, num_shards: int) -> Tensor:
    """A gradient with what each rank gets in a row. Shape (num_shards, shard_numel of ``slot``)."""
    if slot.dim is None:
        return grad.reshape(1, -1).expand(num_shards, -1)
    if slot.dim == 0:
        flat = grad.reshape(-1)
        missing = num_shards * slot.shard_numel - flat.numel()
        return (pad(flat, (0, missing)) if missing else flat).view(num_shards, slot.shard_numel)
    if _is_even(slot):
        cut = grad.unflatten(slot.dim, (num_shards, slot.local_shape(0)[slot.dim]))
        return cut.movedim(slot.dim, 0).reshape(num_shards, slot.shard_numel)
    rows = []
    for rank in range(num_shards):
        start, stop = slot.span(rank)
        own = grad.narrow(slot.dim, start, stop - start).reshape(-1)
        rows.append(pad(own, (0, slot.shard_numel - own.numel())))
    return torch.stack(rows)
