"""The norm of gradients on any mix of meshes, and clipping by it.

Every rank sums over the elements it holds; then the sums are reduced over ranks. The placements say
over which: a mesh dim that shards a tensor splits its elements into disjoint parts, a dim that
replicates it does not, and plain tensors are whole on every rank. So tensors are grouped by (mesh,
mesh dims that shard them); a model has only a handful of groups. Each group's sum is reduced along
its mesh dims one after the other. Sums over the same ranks share one all-reduce: FSDP alone needs
one all-reduce, FSDP with tensor parallelism two.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ..common.failures import explained
from ..common.memory import current_device
from ..dtensor.parts import local_part, uncompiled, without_partial_sums

# CPU tensors below this size are measured together: a call for each costs more than a copy.
SMALL_NUMEL = 4096
# Elements that are copied together, or cast, at a time.
TOGETHER_NUMEL = 1 << 20
# Elements that are summed at a time in float32.
BLOCK_NUMEL = 1 << 14

# Norms of tensors of these dtypes are returned in float64, all others in float32.
DOUBLE = {torch.float64, torch.complex128}

Groups = tuple[dist.ProcessGroup, ...]
Sorted = dict[tuple[torch.device, torch.dtype], list[Tensor]]


@uncompiled
@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute the norm of all tensors as if they were one vector; a collective.

    Like the function of this name in `torch.nn.utils`, for any mix of plain tensors and DTensors:
    on several meshes, sharded in any way (``_StridedShard`` included), replicated, or partial sums,
    which are reduced first. Each element counts once: a plain tensor is taken to be equal on all
    ranks, and a replicated one on all ranks of the mesh dim.

    All ranks of a mesh must pass tensors of the same meshes in the same order.

    Args:
        tensors: of any shapes, floating or complex dtypes and devices; None is not allowed.
        norm_type: the order of the norm: a number, ``math.inf`` or ``"inf"``, ``-math.inf``. 0
            gives the number of tensors with a nonzero element, as in torch.
        error_if_nonfinite: raise if the norm is NaN or infinite (makes the host wait).
        foreach: True: multi-tensor kernels; False: one call per tensor; None: whichever is
            faster.
        pp_mesh: a 1-D mesh, or process group, whose ranks hold different parts of the model:
            pipeline stages. The norm is over all of them. A tensor that two stages hold, such
            as a tied embedding, counts twice.

    Returns:
        A plain 0-dim tensor, the same on all ranks, on the device of the first tensor; float64 if
        any tensor is of double precision, else float32. 0 without tensors.

    Raises:
        RuntimeError: if the norm is not finite with ``error_if_nonfinite``, or if ``foreach=True``
            is not supported on a device.
        ValueError: if ``pp_mesh`` has several dims.

    Example:
        >>> gradients = [p.grad for p in model.parameters() if p.grad is not None]
        >>> norm = fsdp2.optim.get_total_norm(gradients)
    """
    _refuse_module("get_total_norm", tensors, "[p.grad for p in model.parameters()]")
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    collected = Collection(found, found)
    return collected.total(float(norm_type), error_if_nonfinite, foreach, group_of(pp_mesh))


@uncompiled
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; a collective.

    Like the function of this name in `torch.nn.utils`, for any mix of meshes. `get_total_norm`
    describes which elements count, and the other arguments. Its time is linear in the number of
    parameters, including the first call.

    All ranks of a mesh must pass its parameters in the same order. Gradients may be missing on some
    ranks or on all.

    Args:
        parameters: one or more parameters; the gradient of a parameter given twice counts once.
        max_norm: upper limit for the norm.
        norm_type, error_if_nonfinite, foreach, pp_mesh: as in `get_total_norm`.

    Returns:
        The norm before clipping: a plain 0-dim tensor, the same on all ranks.

    Raises:
        RuntimeError, ValueError: as `get_total_norm`; the gradients are then unchanged.

    Example:
        >>> loss.backward()
        >>> norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> optimizer.step()
    """
    params = unique(parameters)
    collected = Collection([p.grad for p in params], params)
    group = group_of(pp_mesh)
    total = collected.total(float(norm_type), error_if_nonfinite, foreach, group)
    collected.scale(float(max_norm), total, foreach)
    return total


@uncompiled
@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by ``max_norm / (total_norm + 1e-6)`` if that is below 1.

    Args:
        parameters: one or more parameters.
        max_norm: upper limit for the norm.
        total_norm: the norm of the gradients, a plain 0-dim tensor as `get_total_norm` returns it.
        foreach: as in `get_total_norm`.

    Example:
        >>> params = list(model.parameters())
        >>> norm = fsdp2.optim.get_total_norm(p.grad for p in params)
        >>> fsdp2.optim.clip_grads_with_norm_(params, max_norm=1.0, total_norm=norm)
    """
    grads = [p.grad for p in unique(parameters) if p.grad is not None]
    plain = [local_part(grad) for grad in grads]
    Collection(plain, plain).scale(float(max_norm), total_norm, foreach)


def _refuse_module(call: str, given: object, instead: str) -> None:
    if isinstance(given, nn.Module):
        raise TypeError(f"{call} got the module {type(given).__name__}: pass {instead}")


def unique(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The parameters without duplicates.

    Raises:
        TypeError: for a module.
    """
    _refuse_module("Clipping", parameters, "model.parameters()")
    if isinstance(parameters, Tensor):
        return [parameters]
    params = list({id(p): p for p in parameters}.values())
    if not params and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=5
        )
    return params


def group_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group of a 1-D mesh."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f'pp_mesh must have one dim: slice it, as in mesh["pp"]; got {mesh}')
        return mesh.get_group()
    if mesh is not None and not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(
            f"pp_mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}"
        )
    return mesh


class Collection:
    """Tensors sorted by the process groups over which they are sharded.

    Attributes:
        first_device: device of the first tensor, or of its stand-in; None without tensors.
        dtype: dtype of the norm: float64 if any tensor is of double precision, else float32.
    """

    def __init__(self, tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> None:
        """Sort ``tensors``; if one is missing, its ``like`` shows how it would be sharded.

        So ranks without some gradients, or without any, still take part in the same reductions.
        """
        self._tensors, self._like = tensors, like
        # An entry is a set of tensors that are sharded alike. For each of them:
        self._groups: list[Groups] = []  # the process groups to reduce over
        self._parts: list[list[Tensor]] = []  # local tensors to measure and scale
        self._copies: list[list[Tensor]] = []  # local tensors to measure only
        self._apart: list[Tensor] = []  # local tensors of all entries, to scale only
        self._entries: dict[object, int] = {}  # (mesh, dims that shard) -> entry
        missing: list[torch.dtype] = []
        self._missing_on: set[torch.device] = set()
        # (mesh, placements) -> the list for local tensors. As little as possible is done for each
        # tensor: there may be thousands.
        known: dict[object, list[Tensor]] = {}
        for tensor, other in zip(tensors, like, strict=True):
            if tensor is None:
                self._entry(other)
                missing.append(other.dtype)
                self._missing_on.add(local_part(other).device)
            elif isinstance(tensor, DTensor):
                key = (id(tensor.device_mesh), tensor.placements)
                parts = known.get(key)
                if parts is not None:
                    parts.append(local_part(tensor))
                    continue
                self._add(tensor)
                if not any(placement.is_partial() for placement in tensor.placements):
                    known[key] = self._parts[self._entry(tensor)]
            else:
                self._add(tensor)
        self._sorted = [sort(parts) for parts in self._parts]
        self._measured = [
            [*each.items(), *sort(copies).items()]
            for each, copies in zip(self._sorted, self._copies, strict=True)
        ]
        dtypes = {dtype for each in self._measured for (_, dtype), _ in each}
        self.dtype = torch.float64 if DOUBLE & (dtypes | set(missing)) else torch.float32
        self.first_device: torch.device | None = None
        if like:
            first = like[0] if tensors[0] is None else tensors[0]
            self.first_device = local_part(first).device

    def _add(self, tensor: Tensor) -> None:
        """Add any tensor: a sparse one too, or partial sums, which are reduced here."""
        entry, part, measured = self._entry(tensor), local_part(tensor), measurable(tensor)
        if measured is part:
            self._parts[entry].append(part)
        else:
            self._copies[entry].append(measured)
            self._apart.append(part)

    def _entry(self, tensor: Tensor) -> int:
        """The entry that ``tensor`` belongs to, once its partial sums are reduced."""
        key: object = None
        groups: Groups = ()
        if isinstance(tensor, DTensor):
            placements, mesh = tensor.placements, tensor.device_mesh
            # Inner dims first: their ranks are usually on one node.
            dims = [
                d
                for d in reversed(range(mesh.ndim))
                if not (placements[d].is_replicate() or placements[d].is_partial())
                and mesh.size(d) > 1
            ]
            if dims:
                key = (mesh, tuple(dims))
                groups = tuple(mesh.get_group(d) for d in dims)
        if key not in self._entries:
            self._entries[key] = len(self._groups)
            self._groups.append(groups)
            self._parts.append([])
            self._copies.append([])
        return self._entries[key]

    def total(
        self,
        order: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
        pipeline: dist.ProcessGroup | None,
    ) -> Tensor:
        """The norm of everything, as described at `get_total_norm`."""
        device = self._device()
        if order == 0:
            values = self._counts(device)
            entry_of = [
                self._entry(other if tensor is None else tensor)
                for tensor, other in zip(self._tensors, self._like, strict=True)
            ]
        else:
            norms = [joint_norm(each, order, foreach, device) for each in self._measured]
            values = torch.stack(norms) if norms else torch.zeros(0, device=device)
            entry_of = list(range(len(norms)))
        total = reduce_all(values, entry_of, self._groups, order, pipeline)
        total = total.to(device=self.first_device or device, dtype=self.dtype)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, "
                "so it cannot be clipped. To disable this error and scale the gradients by the "
                "non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return total

    def _counts(self, device: torch.device) -> Tensor:
        """The number of elements that are not 0, for each tensor."""
        counts = torch.zeros(len(self._tensors), dtype=wide(device), device=device)
        for i, tensor in enumerate(self._tensors):
            if tensor is not None:
                counts[i] = measurable(tensor).count_nonzero()
        return counts

    def _device(self) -> torch.device:
        """Where sums are added up: on an accelerator if any tensor is on one.

        The same on all ranks, whichever gradients they have: a group may have a backend for each
        kind of device, and all its ranks must use the same one.
        """
        devices = [device for each in self._measured for (device, _), _ in each]
        devices += self._missing_on
        if not devices:
            return torch.device("cpu")
        return next((d for d in devices if d.type != "cpu"), devices[0])

    def scale(self, max_norm: float, total: Tensor, foreach: bool | None) -> None:
        """Multiply the tensors by ``max_norm / (total + 1e-6)`` if that is below 1."""
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        # Only for CPU tensors: reading another device's value would make the host wait.
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        for tensor in self._apart:
            tensor.mul_(factor.to(tensor.device))
        for parts in self._sorted:
            for (device, _), tensors in parts.items():
                by = factor.to(device)
                if use_foreach(foreach, device, default=True):
                    torch._foreach_mul_(tensors, by)
                else:
                    for tensor in tensors:
                        tensor.mul_(by)


def measurable(tensor: Tensor) -> Tensor:
    """This rank's elements; partial sums are reduced first, which is a collective."""
    if isinstance(tensor, DTensor):
        tensor = without_partial_sums(tensor)
    part = local_part(tensor)
    return part if part.layout == torch.strided else part.coalesce().values()


def sort(tensors: list[Tensor]) -> Sorted:
    """Plain tensors by device and dtype."""
    if not tensors:
        return {}
    found = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    return {key: chosen for key, ([chosen], _) in found.items()}  # type: ignore[misc]


def reduce_all(
    values: Tensor,
    entry_of: Sequence[int],
    groups: Sequence[Groups],
    order: float,
    pipeline: dist.ProcessGroup | None,
) -> Tensor:
    """From the norms that this rank holds to the norm of all that all ranks hold.

    Args:
        values: 1-D; norms of this rank's parts (``order`` 0: numbers of elements that are not 0,
            for each tensor).
        entry_of: for each of them, the entry whose groups to reduce it over.
        groups: of each entry.
        order: of the norm.
        pipeline: over which the total is reduced at last.

    Returns:
        A 0-dim tensor.
    """
    values = to_terms(values, order)
    for group, entries in reductions(groups):
        chosen = [entry in entries for entry in entry_of]
        if all(chosen):
            values = all_reduce(values, order, group)
            continue
        parts = [values[..., run] for run in runs(chosen)]
        reduced = all_reduce(torch.cat(parts, -1), order, group)
        for part, new in zip(parts, reduced.split([p.shape[-1] for p in parts], -1), strict=True):
            part.copy_(new)
    if order == 0:
        values = (values > 0).to(values.dtype)
    if not math.isinf(order):
        total = values.sum(-1)
    elif values.shape[-1]:
        total = values.amax(-1)
    else:
        total = values.new_zeros(2)
        total[0] = -math.inf
    if pipeline is not None and pipeline.size() > 1:
        total = all_reduce(total, order, pipeline)
    return from_terms(total, order)


def runs(chosen: Sequence[bool]) -> list[slice]:
    """Where ``chosen`` is true. (With a list of indices the host would wait for the device.)"""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *chosen, False])) if a != b]
    return [slice(*run) for run in zip(edges[::2], edges[1::2], strict=True)]


def reductions(groups: Sequence[Groups]) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """The all-reduces to make, in order: each with its group and the entries that it reduces.

    Ranks must agree on the order in which the dims of a mesh are reduced, and a group's ranks on
    what they reduce, while each rank sees only its groups. So an entry with several groups keeps
    their order, in separate reductions. An entry with a single group has no order to keep: it joins
    the first reduction over the same ranks. All of these ranks do so, since each has this group for
    the same mesh dims.
    """
    steps: list[tuple[dist.ProcessGroup, list[int]]] = []
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for i, several in enumerate(groups):
        for group in several if len(several) > 1 else ():
            steps.append((group, [i]))
            by_ranks.setdefault(ranks_of(group), steps[-1][1])
    for i, single in enumerate(groups):
        if len(single) == 1:
            ranks = ranks_of(single[0])
            if ranks not in by_ranks:
                by_ranks[ranks] = []
                steps.append((single[0], by_ranks[ranks]))
            by_ranks[ranks].append(i)
    return steps


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def to_terms(norms: Tensor, order: float) -> Tensor:
    """What can be reduced: powers to be added, or for infinite orders two rows, of maxima.

    The second row marks a NaN, which backends' maxima may lose.
    """
    if not math.isinf(order):
        return norms if order == 0 else norms.pow(order)
    is_nan = norms.isnan()
    return torch.stack([torch.where(is_nan, -math.inf, norms * math.copysign(1, order)), is_nan])


def from_terms(total: Tensor, order: float) -> Tensor:
    """The norm that belongs to a reduced term."""
    if not math.isinf(order):
        return total if order == 0 else total.pow(1 / order)
    largest, is_nan = total.unbind()
    # The largest of nothing is -inf here; of a norm it is 0.
    norm = -largest if order < 0 else largest.clamp(min=0)
    return torch.where(is_nan > 0, math.nan, norm)


def all_reduce(values: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """The sum, or largest of each, over the ranks; on the device of ``values``."""
    op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
    reduced = values.contiguous().to(device_for(group, values.device), copy=True)
    with explained("a norm's all-reduce (clip_grad_norm_ or get_total_norm)", group):
        dist.all_reduce(reduced, op, group)
    return reduced.to(values.device)


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """``device`` if the group communicates from there; else (offload with NCCL) where it does."""
    supported = group._device_types
    if device.type in {d.type for d in supported} or not supported:
        return device
    return current_device(supported[0].type)


def joint_norm(
    tensors: Iterable[tuple[tuple[torch.device, torch.dtype], list[Tensor]]],
    order: float,
    foreach: bool | None,
    device: torch.device,
) -> Tensor:
    """The norm of all elements of plain tensors, sorted by device and dtype.

    Returns:
        A 0-dim tensor, in `wide` precision on ``device``.
    """
    norms: list[Tensor] = []
    for (where, dtype), alike in tensors:
        if use_foreach(foreach, where, default=where.type != "cpu"):
            filled = [t for t in alike if t.numel()]
            # A rank without rows has nothing to measure, and the kernel takes no empty list.
            found = [*torch._foreach_norm(filled, order, dtype=accurate(dtype))] if filled else []
        elif where.type == "cpu":
            flat = joined(alike) if foreach is None else [t.reshape(-1) for t in alike]
            found = [norm for t in flat for norm in block_norms(t, order)]
        else:
            filled = [t for t in alike if t.numel()]
            found = [torch.linalg.vector_norm(t, order, dtype=accurate(dtype)) for t in filled]
        if found:
            together = torch.cat([norm.view(-1) for norm in found]).to(wide(where))
            one = torch.linalg.vector_norm(together, order)
            norms.append(one.to(device=device, dtype=wide(device), non_blocking=True))
    if not norms:
        nothing = math.inf if order < 0 else 0.0
        return torch.full((), nothing, dtype=wide(device), device=device)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def joined(tensors: list[Tensor]) -> list[Tensor]:
    """The same elements in fewer 1-D tensors: small tensors are copied into one."""
    result: list[Tensor] = []
    chosen: list[Tensor] = []
    numel = 0
    for tensor in tensors:
        if tensor.numel() >= SMALL_NUMEL:
            result.append(tensor.reshape(-1))
            continue
        chosen.append(tensor)
        numel += tensor.numel()
        if numel >= TOGETHER_NUMEL:
            result.append(_flatten_dense_tensors(chosen))
            chosen, numel = [], 0
    return [*result, _flatten_dense_tensors(chosen)] if chosen else result


def block_norms(flat: Tensor, order: float) -> Iterator[Tensor]:
    """Norms of blocks of a 1-D CPU tensor, several at a time.

    torch's norm of 20 million float32 numbers is off by 0.1 %, because its sums are float32 too; in
    float64 it takes 20 times as long. The norm of a small block is accurate.
    """
    for part in flat.split(TOGETHER_NUMEL):
        part = part.to(accurate(part.dtype))
        even = part.numel() - part.numel() % BLOCK_NUMEL
        if even:
            yield torch.linalg.vector_norm(part[:even].view(-1, BLOCK_NUMEL), order, dim=1)
        if even < part.numel():
            yield torch.linalg.vector_norm(part[even:], order)


def use_foreach(foreach: bool | None, device: torch.device, *, default: bool) -> bool:
    """Whether to use multi-tensor calls on a device."""
    if foreach and device.type in ("meta", "mps"):
        raise RuntimeError(
            f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
        )
    return default if foreach is None else foreach


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms of a dtype are computed: at least float32."""
    if dtype.itemsize < 4:
        return torch.float32
    return dtype


def wide(device: torch.device) -> torch.dtype:
    """The dtype in which norms are combined: their powers may leave the range of float32."""
    return torch.float32 if device.type == "mps" else torch.float64
