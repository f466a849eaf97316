"""Runs work on whole tensors, distributed over the ranks that hold their shards.

For optimizers that need whole matrices (Muon, Shampoo, Adafactor, ...): each matrix is assembled
on one rank, its owner, which computes with it; the result is scattered again. Each matrix is
computed once instead of on every rank, and the ranks compute different matrices in parallel.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .exchange import Coordinate, Item, Layout, OwnerExchange

# Of whole tensors that a rank puts together at a time.
BATCH_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class WholeTask:
    """A function of whole tensors, for `run_whole`.

    Attributes:
        inputs: layouts of the tensors that it needs, all on one mesh.
        outputs: layouts of its results, on that mesh.
        read: returns this rank's parts of the inputs; called just before they are sent.
        compute: maps the whole inputs to the whole outputs; called on one rank, or on every rank
            if nothing is sharded. It may modify its arguments.
        write: takes this rank's parts of the outputs; called on every rank.
        cost: how long ``compute`` takes, in any unit; None: like a matrix product.
    """

    inputs: Sequence[Layout]
    outputs: Sequence[Layout]
    read: Callable[[], Sequence[Tensor]]
    compute: Callable[..., Sequence[Tensor]]
    write: Callable[..., object]
    cost: float | None = None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of its inputs and outputs; None if every rank holds them whole."""
        return self.inputs[0].mesh

    @property
    def work(self) -> float:
        """The cost of ``compute``, by which tasks are spread over ranks."""
        return matrix_cost(self.inputs[0].shape) if self.cost is None else self.cost

    @property
    def nbytes(self) -> int:
        """The bytes of its whole inputs and outputs."""
        return sum(prod(t.shape) * t.dtype.itemsize for t in (*self.inputs, *self.outputs))


class HasCost(Protocol):
    """What can be spread over ranks."""

    @property
    def work(self) -> float: ...

    @property
    def nbytes(self) -> int: ...


class WholeTaskLike(HasCost, Protocol):
    """What can be computed on whole tensors: see `WholeTask`."""

    @property
    def inputs(self) -> Sequence[Layout]: ...

    @property
    def outputs(self) -> Sequence[Layout]: ...

    @property
    def read(self) -> Callable[[], Sequence[Tensor]]: ...

    @property
    def compute(self) -> Callable[..., Sequence[Tensor]]: ...

    @property
    def write(self) -> Callable[..., object]: ...


Costed = TypeVar("Costed", bound=HasCost)


def matrix_cost(shape: Sequence[int]) -> float:
    """The cost of multiplying an m x n matrix by its transpose: m * n * min(m, n)."""
    if len(shape) < 2:
        return float(prod(shape))
    return float(prod(shape)) * min(shape[-2:])


@torch.no_grad()
def run_whole(tasks: Iterable[WholeTask], *, batch_bytes: int = BATCH_BYTES) -> None:
    """Run tasks on whole tensors, each on one of the ranks that share its tensors; a collective.

    Tasks are spread by cost, the longest first, over all ranks of a mesh, including replicas and
    tensor-parallel ranks. They run in batches. A batch needs one all-to-all each way for each dtype
    and mesh dim that shards a tensor.

    All ranks of a mesh must pass the same tasks in the same order.

    Args:
        tasks: what to compute.
        batch_bytes: bytes of whole inputs and outputs that a rank handles at a time; a larger task
            runs alone. About three times as much memory is used.

    Example:
        >>> layout = Layout.of(weight)
        >>> task = WholeTask(
        ...     inputs=[layout], outputs=[layout], read=lambda: [weight.grad.to_local()],
        ...     compute=lambda gradient: [orthogonalize(gradient)],
        ...     write=lambda update: weight.to_local().sub_(update, alpha=0.02))
        >>> run_whole([task])
    """
    by_mesh: dict[DeviceMesh | None, list[WholeTask]] = {}
    for task in tasks:
        by_mesh.setdefault(task.mesh, []).append(task)
    for task in by_mesh.pop(None, []):
        task.write(*task.compute(*task.read()))
    for mesh, several in by_mesh.items():
        exchange = OwnerExchange(mesh)  # type: ignore[arg-type]
        for batch in spread(several, mesh, batch_bytes):  # type: ignore[arg-type]
            run_batch(exchange, batch)


def run_batch(
    exchange: OwnerExchange,
    batch: Sequence[tuple[WholeTaskLike, Coordinate]],
    agree: Callable[[], object] | None = None,
) -> None:
    """Gather the inputs, compute the tasks that this rank owns, scatter the results.

    Args:
        batch: tasks with their owners.
        agree: called on every rank when all is computed; from then on ``outputs`` are known.
    """
    items = [Item(layout, owner) for task, owner in batch for layout in task.inputs]
    parts = [part for task, _ in batch for part in task.read()]
    # Offloaded parameters: what was read on the CPU goes back there. Numbers say nothing.
    devices = {part.device for part in parts if part.ndim}
    device = devices.pop() if len(devices) == 1 else exchange.device
    whole = iter(exchange.gather(items, parts))
    del parts
    computed: dict[int, Sequence[Tensor]] = {}
    for i, (task, owner) in enumerate(batch):
        inputs = [next(whole) for _ in task.inputs]
        if owner == exchange.coordinate:
            computed[i] = task.compute(*inputs)
    if agree is not None:
        agree()
    results: list[Tensor | None] = []
    for i, (task, _) in enumerate(batch):
        results += computed.pop(i) if i in computed else [None] * len(task.outputs)
    items = [Item(layout, owner) for task, owner in batch for layout in task.outputs]
    dealt = iter(exchange.scatter(items, results))
    for task, _ in batch:
        task.write(*[next(dealt).to(device) for _ in task.outputs])


def spread(
    tasks: Sequence[Costed], mesh: DeviceMesh, batch_bytes: int
) -> Iterator[list[tuple[Costed, Coordinate]]]:
    """Tasks with their owners, in batches."""
    owners = assign([task.work for task in tasks], mesh.size())
    for batch in batches(tasks, owners, batch_bytes):
        yield [(tasks[i], unravel(owners[i], tuple(mesh.shape))) for i in batch]


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assign tasks to ranks: the most expensive first, each to the rank with the least so far.

    Longest processing time first (Graham, 1969): at most 4/3 of the best possible.
    """
    heap = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        owners[i] = rank
        heapq.heappush(heap, (load + costs[i], rank))
    return owners


def batches(
    tasks: Sequence[HasCost], owners: Sequence[int], batch_bytes: int
) -> Iterator[list[int]]:
    """Indices of tasks that run together: at most ``batch_bytes`` of each owner, but one at least.

    Each rank's longest tasks come first, so that the tasks of a batch take about equally long.
    """
    queues: dict[int, list[int]] = {}
    for i in sorted(range(len(tasks)), key=lambda i: (tasks[i].work, -i)):
        queues.setdefault(owners[i], []).append(i)  # the next one is the last
    while any(queues.values()):
        batch: list[int] = []
        for queue in queues.values():
            left = batch_bytes
            first = True
            while queue and (first or tasks[queue[-1]].nbytes <= left):
                left -= tasks[queue[-1]].nbytes
                batch.append(queue.pop())
                first = False
        yield batch


def unravel(index: int, shape: tuple[int, ...]) -> Coordinate:
    """The coordinate of the rank with this number, row-major."""
    coordinate: list[int] = []
    for size in reversed(shape):
        coordinate.insert(0, index % size)
        index //= size
    return tuple(coordinate)
