"""A process group in one process whose collectives move data and take the time of a link.

All ranks are assumed to hold the same data as this one. An all-gather therefore copies this rank's
data into every slot, as many bytes as a real one would write. A reduction of n equal terms is n
times this rank's data (SUM) or this rank's data (AVG, MIN, MAX). Sharded parameters represent a
model whose rows repeat; with `tile_rows`, an unsharded model has the same losses.

The time of a collective follows the ring model. With n ranks, S bytes of the whole data (gathered,
or to be reduced), bandwidth B and latency L::

    all-gather, reduce-scatter,
    all-to-all                    L +     (n - 1) / n * S / B
    all-reduce                    L + 2 * (n - 1) / n * S / B
    broadcast                     L + S / B
    barrier                       L

from Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009. NCCL's tests convert time to bus bandwidth with the same factors. A coalesced call is one
collective: the latency counts once.

*On the CPU*, one thread per link copies and waits until the time is over; `Work.wait` blocks until
then. *On CUDA*, a spin kernel and then the copies run on the current stream, or on a stream of the
link if the call is asynchronous. Only the order of streams can hide them. A real collective uses
more multiprocessors than a spin kernel of one block, and uses memory bandwidth all the time. The
simulation leaves this out.

*On the host*, a coalesced call creates views and checks arguments in Python: 2.5 to 4 us per
tensor, about what c10d's own call takes (gloo on one rank: 3 us or more). A benchmark of host time
may therefore count it as a backend's time. Caching the views would save 2 us per tensor, but there
is no object to cache them on that lives as long as the caller's list of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from .link import Link, Transfer

BACKEND = "simulated"

# Names of the collectives in a profiler's trace.
ALL_GATHER = "simulated::all_gather"
REDUCE_SCATTER = "simulated::reduce_scatter"
ALL_REDUCE = "simulated::all_reduce"
ALL_TO_ALL = "simulated::all_to_all"
BROADCAST = "simulated::broadcast"
BARRIER = "simulated::barrier"


class SimulatedGroup(dist.ProcessGroup):
    """A process group of ``world_size`` ranks; only this rank exists.

    The group runs all-gather, reduce-scatter, all-reduce (coalesced or not), all-to-all of equal
    parts, broadcast and barrier, on CPU and CUDA tensors. All ranks are assumed to hold the same
    data. An all-gather or reduce-scatter of S bytes takes ``latency + (n - 1) / n * S / bandwidth``
    seconds on n ranks, as in the ring model. Call the group's methods, or use `simulated_mesh`,
    which makes it the default group and yields a mesh for ``fully_shard`` (torch's too).

    Args:
        world_size: number of ranks.
        bandwidth: bytes per second that a rank sends; may be ``math.inf``.
        latency: seconds per collective.
        rank: the rank of this process.
        link: a link shared with other groups, instead of ``bandwidth`` and ``latency``.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> group = SimulatedGroup(world_size=8, bandwidth=50e9, latency=20e-6)
        >>> output = torch.empty(8 * 1024)
        >>> group.all_gather_single(output, torch.ones(1024)).wait()
        True
    """

    def __init__(
        self,
        world_size: int,
        bandwidth: float = math.inf,
        latency: float = 0.0,
        *,
        rank: int = 0,
        link: Link | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
        self.link = link or Link(bandwidth, latency)
        super().__init__(rank, world_size)
        self._rank, self._size, self._name = rank, world_size, ""

    # Methods that c10d requires of a group.

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @override
    def rank(self) -> int:
        return self._rank

    @override
    def size(self) -> int:
        return self._size

    @property
    @override
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @override
    def __repr__(self) -> str:
        return f"SimulatedGroup(world_size={self._size}, rank={self._rank})"

    @contextmanager
    def recording(self) -> Iterator[list[Transfer]]:
        """Context manager that collects the transfers on the link of this group."""
        before, self.link.log = self.link.log, []
        try:
            yield self.link.log
        finally:
            self.link.log = before

    # The collectives. torch 2.13 renamed some of them; both names are provided.

    @override
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy ``inputs[i]`` to every slot (1/n) of ``outputs[i]``."""
        self._check("all-gather", inputs, outputs)
        size = self._size
        pairs = [
            (
                output.view(size, numel),
                (mine if mine.dim() == 1 else mine.view(numel)).expand(size, numel),
            )
            for output, mine in zip(outputs, inputs, strict=True)
            for numel in (mine.numel(),)
        ]
        return self._start(ALL_GATHER, self._share(outputs), pairs, outputs, opts)

    @override
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy this rank's slot of ``inputs[i]``, summed or averaged, to ``outputs[i]``."""
        self._check("reduce-scatter", outputs, inputs)
        rank = self._rank
        pairs = [
            (
                output if output.dim() == 1 else output.view(numel),
                (whole if whole.dim() == 1 else whole.view(-1)).narrow(0, rank * numel, numel),
            )
            for output, whole in zip(outputs, inputs, strict=True)
            for numel in (output.numel(),)
        ]
        factor = self._factor(opts)
        return self._start(REDUCE_SCATTER, self._share(inputs), pairs, outputs, opts, factor)

    @override
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Copy this rank's slot of ``input``, which every rank would send it, to all slots."""
        if output_split_sizes or input_split_sizes:
            raise NotImplementedError("SimulatedGroup sends equal parts to all ranks")
        size, rank = self._size, self._rank
        self._check("all-to-all", [output.view(size, -1)[0]], [input])
        mine = input.view(size, -1)[rank]
        pairs = [(output.view(size, -1), mine.expand(size, mine.numel()))]
        return self._start(ALL_TO_ALL, self._share([input]), pairs, [output], opts)

    @override
    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Replace every tensor by its sum or mean over the ranks, in place."""
        factor = self._factor(opts)
        return self._start(ALL_REDUCE, 2 * self._share(tensors), [], tensors, opts, factor)

    @override
    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Take the time of a broadcast; all ranks hold the same data, so nothing changes."""
        return self._start(BROADCAST, sum(t.nbytes for t in tensors), [], tensors, opts)

    @override
    def barrier(self, opts: Any = None) -> dist.Work:
        """Take the latency, on the link's thread; does not wait for a device."""
        return self.link.start(BARRIER, 0, lambda: None)

    @override
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @override
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @override
    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy ``inputs[i]`` to each of ``outputs[i]``, which has one tensor per rank."""
        pairs = [(out, mine) for outs, mine in zip(outputs, inputs, strict=True) for out in outs]
        flat = [out for outs in outputs for out in outs]
        return self._start(ALL_GATHER, self._share(flat), pairs, flat, opts)

    def _start(
        self,
        name: str,
        wire_bytes: float,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        result: list[torch.Tensor],
        opts: Any,
        factor: int = 1,
    ) -> dist.Work:
        """Copy ``pairs`` (to, from) and multiply ``result`` by ``factor``, in the link's time."""

        def move() -> None:
            # One call each: benchmarks measure host time that includes this.
            with torch.no_grad():
                if pairs:
                    torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
                if factor != 1:
                    torch._foreach_mul_(list(result), factor)

        if result and result[0].is_cuda:
            own = opts is not None and opts.asyncOp
            return self.link.enqueue(name, wire_bytes, move, result, own)
        return self.link.start(name, wire_bytes, move, result)

    def _share(self, wholes: Sequence[torch.Tensor]) -> float:
        """Bytes that a rank sends to gather or reduce-scatter these tensors, by the ring model."""
        return sum(whole.nbytes for whole in wholes) * (self._size - 1) / self._size

    def _factor(self, opts: Any) -> int:
        """The factor by which a reduction multiplies equal terms."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return self._size
        # Not `in`: it swaps the operands, and then they never compare equal.
        if any(op == same for same in (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)):
            return 1
        raise NotImplementedError(f"SimulatedGroup reduces by SUM, AVG, MIN and MAX, not by {op}")

    def _check(
        self, what: str, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]
    ) -> None:
        """Check the requirements of NCCL, so that no mistake passes here and fails there."""
        if len(parts) != len(wholes):
            raise ValueError(f"{what}: {len(parts)} parts for {len(wholes)} wholes")
        size = self._size
        for part, whole in zip(parts, wholes, strict=True):
            if part.numel() * size != whole.numel():
                raise ValueError(
                    f"{what} over {self._size} ranks: a part has {part.numel()} elements and the "
                    f"whole {whole.numel()}; the whole must have {self._size} times as many"
                )
            if part.dtype != whole.dtype or part.device != whole.device:
                raise ValueError(
                    f"{what}: a part is {part.dtype} on {part.device}, but the whole is "
                    f"{whole.dtype} on {whole.device}"
                )
            if not (part.is_contiguous() and whole.is_contiguous()):
                raise ValueError(f"{what}: tensors must be contiguous")


for _alias, _method in {
    "allreduce_coalesced": SimulatedGroup.allreduce,
    "alltoall_base": SimulatedGroup.all_to_all_single,
    "_allgather_base": SimulatedGroup.all_gather_single,
    "_reduce_scatter_base": SimulatedGroup.reduce_scatter_single,
    "allgather_into_tensor_coalesced": SimulatedGroup.all_gather_single_coalesced,
    "reduce_scatter_tensor_coalesced": SimulatedGroup.reduce_scatter_single_coalesced,
}.items():
    setattr(SimulatedGroup, _alias, _method)


def _unsupported(name: str) -> Callable[..., Any]:
    def method(self: SimulatedGroup, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"SimulatedGroup has no {name}: it runs all-gather, reduce-scatter, all-reduce, "
            "all-to-all of equal parts, broadcast and barrier"
        )

    return method


for _name in (
    *("send", "recv", "recv_anysource", "gather", "scatter", "reduce", "reduce_scatter"),
    *("alltoall", "allgather_coalesced"),
):
    setattr(SimulatedGroup, _name, _unsupported(_name))


def tile_rows(tensor: torch.Tensor, num_shards: int) -> torch.Tensor:
    """The parameter that rank 0's shard of ``tensor`` represents in a `SimulatedGroup`.

    Args:
        tensor: a whole parameter, sharded on dim 0 over ``num_shards`` ranks.

    Returns:
        A tensor of the same shape that repeats the rows of the first shard.

    Example:
        >>> tile_rows(torch.tensor([1, 2, 3, 4, 5]), 2)
        tensor([1, 2, 3, 1, 2])
    """
    rows = math.ceil(tensor.shape[0] / num_shards)
    index = torch.arange(tensor.shape[0], device=tensor.device) % max(rows, 1)
    return tensor[index]


# -- as the default group -------------------------------------------------------------------


_links: dict[tuple[int, ...], Link] = {}
_other_link: Link | None = None  # for groups that are not a dim of the mesh


def _create_group(options: Any, backend_options: Any = None) -> SimulatedGroup:
    """Called by c10d for every new group; groups of the same ranks share a link."""
    if _other_link is None:
        raise RuntimeError(f'the backend "{BACKEND}" is for fsdp2.testing.simulated_mesh')
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    link = _links.setdefault(ranks, Link(_other_link.bandwidth, _other_link.latency))
    return SimulatedGroup(options.group_size, rank=options.group_rank, link=link)


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def simulated_mesh(
    shape: int | Sequence[int],
    bandwidth: float | Sequence[float] = math.inf,
    latency: float = 0.0,
    *,
    device_type: str = "cpu",
    mesh_dim_names: Sequence[str] | None = None,
) -> Iterator[DeviceMesh]:
    """A device mesh for ``fully_shard`` with `SimulatedGroup` groups; this process is rank 0.

    This context manager creates the default process group, and destroys it at the end.

    Args:
        shape: number of ranks, or the mesh's shape, such as (2, 4) for 2 replicas of 4 shards.
        bandwidth: bytes per second that a rank sends: one number, or one per mesh dim (for example,
            of InfiniBand and NVLink). Groups over other sets of ranks have the lowest bandwidth.
        latency: seconds per collective.
        device_type: "cpu" or "cuda".
        mesh_dim_names: one per mesh dim.

    Raises:
        RuntimeError: if there is already a default process group.
        ValueError: if a number is out of range.

    Example:
        >>> with simulated_mesh(64, bandwidth=50e9, latency=20e-6, device_type="cuda") as mesh:
        ...     fully_shard(model, mesh=mesh)
        ...     model(x).sum().backward()
    """
    global _other_link
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    bandwidths = [bandwidth] * len(shape) if isinstance(bandwidth, (int, float)) else [*bandwidth]
    if not shape or min(shape) < 1:
        raise ValueError(f"shape must consist of positive numbers, got {shape}")
    if len(bandwidths) != len(shape):
        raise ValueError(f"{len(bandwidths)} bandwidths for a mesh of {len(shape)} dims")
    if dist.is_initialized():
        raise RuntimeError(
            "simulated_mesh creates the default process group, but there already is one"
        )
    transports = {}
    stride = math.prod(shape)
    for size, dim_bandwidth in zip(shape, bandwidths, strict=True):
        stride //= size
        transports[tuple(range(0, size * stride, stride))] = Link(dim_bandwidth, latency)
    _other_link = Link(min(bandwidths), latency)
    _links.update(transports)
    try:
        world_size = math.prod(shape)
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=world_size)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        yield init_device_mesh(device_type, shape, mesh_dim_names=names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for link in _links.values():
            link.close()
        _links.clear()
        _other_link = None
