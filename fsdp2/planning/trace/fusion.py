"""Decides which operators of a graph a compiler fuses, by a simpler rule than TorchInductor's.

The graph has aten operators without autograd, forward or backward, as AOTAutograd passes it to a
compiler. There are four kinds of operators: pointwise ones (which torch marks with
``torch.Tag.pointwise``, and those that only move elements, `_MOVES`), reductions (`_REDUCTIONS`),
views, and all others. Each of the others is a separate kernel: multiplications, attention,
operators of other libraries, operators on complex numbers (for which TorchInductor generates no
code), and operators that write in place.

1. *What is in memory.* A pointwise operator is computed wherever its result is read. The result is
   in memory only if the caller gets it or one of the other operators reads it; if several operators
   read it and it depends on more than `_READS` tensors in memory; or if it depends on more than
   `_MOST_READS`. (These are TorchInductor's ``realize_reads_threshold`` and
   ``realize_acc_reads_threshold``.) Results of reductions are in memory.
2. *What is one kernel.* Each result in memory after 1. has a loop, over the elements of a pointwise
   result, or over the elements that a reduction reads. Loops are candidates to join if one reads
   the result of the other or both read the same tensor, and nothing must run in between. They join
   if they have equally many elements, or if a pointwise loop has as many as a reduction makes (its
   root in a norm). Two reductions join only if they are over the same dims.
3. *What is moved.* A kernel reads each tensor once, and writes the results that other kernels read
   or the caller gets. Results that only the kernel itself reads are not in memory after all.

Not modelled: results of multiplications that their kernels change at once (templates of
max-autotune), tiles, and limits on the size of a kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch.fx import Graph, Node

from .op_costs import has_no_kernel, nbytes_of, operator_name, reads_selected_rows

_READS, _MOST_READS = 4, 8
# What a loop reads: tensors in memory, each with its views and bytes.
_Reads = dict[tuple[Node, ...], int]

_MOVES = frozenset(
    (
        *("clone", "_to_copy", "cat", "stack", "constant_pad_nd", "index", "_unsafe_index"),
        *("gather", "embedding", "index_select", "flip", "roll", "repeat", "arange", "full"),
        *("full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_full"),
        *("scalar_tensor", "slice_scatter", "select_scatter", "slice_backward", "tril", "triu"),
        *("select_backward", "rand", "rand_like", "randn", "randn_like", "native_dropout"),
        *("bernoulli", "where", "glu", "glu_backward", "convert_element_type", "iota"),
    )
)
_REDUCTIONS = frozenset(
    (
        *("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin"),
        *("var", "std", "var_mean", "std_mean", "logsumexp", "linalg_vector_norm", "_softmax"),
        *("_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm"),
    )
)
# They make views, but their schemas do not show it.
_VIEWS = frozenset(("aten::_unsafe_view", "aten::detach", "aten::alias", "aten::lift_fresh"))


@dataclass(eq=False)
class Kernel:
    """Operators that run as one kernel.

    Attributes:
        nodes: the nodes of the graph that it computes, and views of them.
        fused: whether it consists of pointwise operators and reductions.
        reads: the nodes that it reads.
        made: if fused, the nodes whose results are in memory afterwards.
        nbytes: if fused, bytes that it reads and writes.
        dtype: dtype of its inputs.
    """

    nodes: list[Node]
    fused: bool = False
    reads: list[Node] = field(default_factory=list)
    made: list[Node] = field(default_factory=list)
    nbytes: int = 0
    dtype: torch.dtype = torch.float32
    _loop: _Loop | None = None


@dataclass
class _Loop:
    points: int  # elements
    rows: tuple[int, bool] | None  # of a reduction: elements made, and whether over the last dim
    reads: _Reads


def kernels_of(graph: Graph) -> list[Kernel]:
    """The kernels of ``graph``, in an order in which they can run."""
    owner: dict[Node, Kernel] = {}  # of what is in memory
    inlined: dict[Node, _Reads] = {}  # of what is not
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        home = _maker(node)
        if home is not node and (home in owner or home in inlined):
            if home in owner:
                owner[node] = owner[home]
                owner[node].nodes.append(node)
            continue
        loop = _loop_of(node, inlined)
        if loop is None:
            owner[node] = Kernel([node], reads=list(node.all_input_nodes))
        elif loop.rows is None and not _is_in_memory(node, loop.reads):
            inlined[node] = loop.reads
        else:
            kernel = owner[node] = Kernel([node], True, _loop=loop)
            _join_others(kernel, owner)
    place = {node: i for i, node in enumerate(graph.nodes)}
    ordered = _in_order(list(dict.fromkeys(owner.values())), owner, place)
    [output] = [node for node in graph.nodes if node.op == "output"]
    shown = {home_of(node) for node in output.all_input_nodes}
    for kernel in ordered:
        shown |= {home_of(node) for node in _read_by(kernel) if owner.get(node) is not kernel}
    for kernel in ordered:
        kernel.nodes.sort(key=place.__getitem__)
        if kernel.fused:
            _measure(kernel, owner, shown)
    return ordered


def home_of(node: Node) -> Node:
    """The node that makes the memory of ``node``: itself, unless that is a view."""
    while _is_view(node):
        made_by = node.all_input_nodes[0]
        if node.target is operator.getitem and not _is_view(made_by):
            return node  # one of several results
        node = made_by
    return node


def values_of(node: Node) -> list[torch.Tensor]:
    """The (fake) results of a node."""
    value = node.meta.get("val")
    found = value if isinstance(value, tuple | list) else (value,)
    return [v for v in found if isinstance(v, torch.Tensor)]


def _maker(node: Node) -> Node:
    """The operator that a node belongs to: if it is a view, the maker of the result."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if operator_name(node.target) in _VIEWS:
        return True
    returns = node.target._schema.returns
    aliases = bool(returns) and all(r.alias_info is not None for r in returns)
    return aliases and has_no_kernel(node.target)


# -- loops ---------------------------------------------------------------------------------------


def _loop_of(node: Node, inlined: dict[Node, _Reads]) -> _Loop | None:
    """The loop of a pointwise operator or a reduction; None for all others."""
    target, made = node.target, values_of(node)
    tensors = [v for n in (node, *node.all_input_nodes) for v in values_of(n)]
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if _is_view(node) or not made or any(t.is_complex() for t in tensors):
        return None
    namespace, _, name = operator_name(target).partition("::")
    if namespace not in ("aten", "prims"):
        return None
    points, rows = max(t.numel() for t in made), None
    if name in _REDUCTIONS:
        read = max((t for n in node.all_input_nodes for t in values_of(n)), key=torch.numel)
        rows = (points, _reduces_last(node, read.dim()))
        points = read.numel()
    elif name not in _MOVES and torch.Tag.pointwise not in target.tags:
        return None
    return _Loop(points, rows, _reads_of(node, inlined))


def _reads_of(node: Node, inlined: dict[Node, _Reads]) -> _Reads:
    """The reads from memory for a node, also through operators computed on the way."""
    reads: _Reads = {}
    for source in node.all_input_nodes:
        if not values_of(source):
            continue
        selected = reads_selected_rows(node.target) and source is node.all_input_nodes[0]
        seen = sum(map(nbytes_of, values_of(node if selected else source)))
        earlier = inlined.get(_maker(source))
        if earlier is None:
            reads[source,] = max(seen, reads.get((source,), 0))
            continue
        whole = sum(map(nbytes_of, values_of(home_of(source))))
        part = min(1.0, seen / whole) if whole else 1.0  # of a view of a part, or a look-up
        for path, nbytes in earlier.items():
            longer = path if part == 1.0 else (*path, source)
            reads[longer] = max(int(part * nbytes), reads.get(longer, 0))
    return reads


def _is_in_memory(node: Node, reads: _Reads) -> bool:
    """Whether the result of a pointwise operator is in memory."""
    num_reads = len({home_of(path[0]) for path in reads})
    left, num_readers = [node], 0
    while left:
        for user in left.pop().users:
            if user.op == "output":
                return True
            if _is_view(user):
                left.append(user)
            else:
                num_readers += 1
                if _loop_of(user, {}) is None:
                    return True
    return num_reads > (_READS if num_readers > 1 else _MOST_READS)


def _reduces_last(node: Node, num_dims: int) -> bool:
    """Whether a reduction includes the last of ``num_dims`` dims."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    numbers = [dims] if isinstance(dims, int) else dims
    if not isinstance(numbers, list | tuple) or not numbers:
        return True  # over all
    return any(isinstance(n, int) and n % max(num_dims, 1) == num_dims - 1 for n in numbers)


# -- joining -------------------------------------------------------------------------------------


def _join_others(kernel: Kernel, owner: dict[Node, Kernel]) -> None:
    """Join a new kernel with kernels that it reads from, or that read the same tensors."""
    assert kernel._loop is not None
    sources = [path[0] for path in kernel._loop.reads]
    near = [owner[n] for n in sources if n in owner]
    homes = {home_of(n) for n in sources}
    near += [
        other
        for other in dict.fromkeys(owner.values())
        if other.fused and homes.intersection(map(home_of, _read_by(other)))
    ]
    for other in dict.fromkeys(near):
        if other is not kernel and _fit(kernel, other) and _may_join(kernel, other, owner):
            for node in other.nodes:
                owner[node] = kernel
            kernel.nodes += other.nodes
            kernel._loop = _both(kernel._loop, other._loop)


def _fit(one: Kernel, other: Kernel) -> bool:
    """Whether one loop can compute both."""
    a, b = one._loop, other._loop
    if a is None or b is None:
        return False
    if a.rows is None or b.rows is None:
        reduction, pointwise = (a, b) if b.rows is None else (b, a)
        makes = reduction.rows[0] if reduction.rows is not None else reduction.points
        return pointwise.points in (reduction.points, makes)
    return (a.points, a.rows) == (b.points, b.rows)


def _both(one: Any, other: Any) -> _Loop:
    reads = {
        path: max(one.reads.get(path, 0), other.reads.get(path, 0))
        for path in (*one.reads, *other.reads)
    }
    reductions = [loop for loop in (one, other) if loop.rows is not None]
    first = (reductions or [one])[0]
    return _Loop(first.points, first.rows, reads)


def _may_join(one: Kernel, other: Kernel, owner: dict[Node, Kernel]) -> bool:
    """Whether nothing has to run between the two."""
    return not (_leads_around(one, other, owner) or _leads_around(other, one, owner))


def _leads_around(start: Kernel, end: Kernel, owner: dict[Node, Kernel]) -> bool:
    """Whether ``end`` waits for something else that waits for ``start``."""
    seen: set[Kernel] = {end}
    left = [k for k in _sources(end, owner) if k is not start]
    while left:
        kernel = left.pop()
        if kernel is start:
            return True
        if kernel not in seen:
            seen.add(kernel)
            left += _sources(kernel, owner)
    return False


def _sources(kernel: Kernel, owner: dict[Node, Kernel]) -> Iterator[Kernel]:
    """The kernels that it reads from."""
    for node in _read_by(kernel):
        found = owner.get(node)
        if found is not None and found is not kernel:
            yield found


def _read_by(kernel: Kernel) -> list[Node]:
    loop = kernel._loop
    return kernel.reads if loop is None else [path[0] for path in loop.reads]


def _in_order(
    kernels: Sequence[Kernel], owner: dict[Node, Kernel], place: dict[Node, int]
) -> list[Kernel]:
    """Sort kernels: each after those that it reads from, otherwise by its last operator."""
    rank = {kernel: max(place[node] for node in kernel.nodes) for kernel in kernels}
    numbered = {rank[kernel]: kernel for kernel in kernels}
    waits = {kernel: set(_sources(kernel, owner)) for kernel in kernels}
    readers: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in kernels}
    for kernel, before in waits.items():
        for each in before:
            readers[each].append(kernel)
    ready = [rank[kernel] for kernel in kernels if not waits[kernel]]
    heapify(ready)
    ordered = []
    while ready:
        kernel = numbered[heappop(ready)]
        ordered.append(kernel)
        for reader in readers[kernel]:
            waits[reader].discard(kernel)
            if not waits[reader]:
                heappush(ready, rank[reader])
    assert len(ordered) == len(kernels), "a kernel waits for itself"
    return ordered


def _measure(kernel: Kernel, owner: dict[Node, Kernel], shown: set[Node]) -> None:
    """Compute what a kernel reads and writes; other kernels read the nodes in ``shown``."""
    assert kernel._loop is not None
    of_home: dict[Node, int] = {}
    for path, nbytes in kernel._loop.reads.items():
        if owner.get(path[0]) is not kernel:
            kernel.reads.append(path[0])
            of_home[home_of(path[0])] = of_home.get(home_of(path[0]), 0) + nbytes
            if values_of(path[0])[0].is_floating_point():
                kernel.dtype = values_of(path[0])[0].dtype
    kernel.reads = list(dict.fromkeys(kernel.reads))
    for home, nbytes in of_home.items():
        kernel.nbytes += min(nbytes, sum(map(nbytes_of, values_of(home))))
    kernel.made = [node for node in kernel.nodes if node in shown]
    kernel.nbytes += sum(nbytes_of(t) for node in kernel.made for t in values_of(node))
