"""Moves the communication of a traced step to where eager would do it.

As traced, all gathers come first and all reductions last. Here

1. buckets of units that are freed after forward are gathered again for backward;
2. each gather is started before the one ahead of it is used, those for backward not before backward
   begins, and waited for at its own first use;
3. each reduction is started when its gradients are there, and waited for when the next one starts.

The graph's own code runs nodes in their order, and other backends start from it. Inductor orders
anew, by what nodes need: so on the CPU communication needs the product that comes before it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem as _getitem

import torch
from torch.fx import Graph, GraphModule, Node

from .capture import LABEL

_aten = torch.ops.aten
_HOST = torch.ops.fsdp2_graph
_WAITS = (torch.ops._c10d_functional.wait_tensor.default, _HOST.wait.default)
_PRODUCTS = frozenset(
    (
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
        _aten.convolution.default,
    )
)  # fmt: skip
# What backward may compute again from a gathered parameter, since it costs nothing, or as little as
# a cast: saved from forward it would keep the parameter's memory.
_CHEAP = frozenset(
    (
        _aten.detach.default, _aten.alias.default, _aten.t.default, _aten.transpose.int,
        _aten.permute.default, _aten.view.default, _aten._unsafe_view.default,
        _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default, _aten.select.int,
        _aten.slice.Tensor, _aten.split.Tensor, _aten.unbind.int, _aten._to_copy.default,
    )
)  # fmt: skip


@dataclass
class _Gather:
    """The nodes of a gather in order, and the first one that uses it."""

    nodes: list[Node]
    first_use: Node


def schedule(module: GraphModule, freed: Mapping[int, int]) -> None:
    """Reorder the graph of ``module`` in place.

    Args:
        freed: buckets that are freed after forward, each with the number of its unit.
    """
    graph = module.graph
    gathers = _find_gathers(graph, freed)
    _sink(gathers, next(filter(_is_late, graph.nodes)))
    _hoist(graph)
    _hold_back(graph)
    graph.lint()
    module.recompile()


def _positions(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _nodes_of(graph: Graph, part: str) -> dict[int, list[Node]]:
    """By bucket, in the order of the graph."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        label = node.meta.get(LABEL)
        if label is not None and label.part == part:
            found.setdefault(label.bucket, []).append(node)
    return found


def _is_late(node: Node) -> bool:
    """Whether it runs after forward."""
    label = node.meta.get(LABEL)
    return node.op == "output" or (label is not None and label.part in ("backward", "reduce"))


# -------------------------------------------------------------------------------------- gathers


def _find_gathers(graph: Graph, freed: Mapping[int, int]) -> list[_Gather]:
    """All gathers, those for backward included, in the order of their first uses."""
    position = _positions(graph)
    nodes_of = _nodes_of(graph, "gather")
    derived = {bucket: _derived(nodes, position) for bucket, nodes in nodes_of.items()}
    early: dict[int, list[Node]] = {}
    late: dict[int, list[Node]] = {}
    for bucket, made in derived.items():
        own = {*nodes_of[bucket]}
        all_users = dict.fromkeys(u for node in made for u in node.users if u not in own)
        early[bucket] = [user for user in all_users if not _is_late(user)]
        late[bucket] = [user for user in all_users if _is_late(user)]
    # Backward begins with the unit that ran last: it is needed again at once.
    last_use = {b: max(map(position.__getitem__, users), default=-1) for b, users in early.items()}
    last_unit = freed.get(max(freed, key=last_use.__getitem__, default=-1))
    gathers = []
    for bucket, nodes in nodes_of.items():
        users = early[bucket] + late[bucket]
        if late[bucket] and bucket in freed and freed[bucket] != last_unit:
            first = min(late[bucket], key=position.__getitem__)
            copies = _copy(graph, derived[bucket], late[bucket], first)
            gathers.append(_Gather(copies, first))
            users = early[bucket]
        if users:
            gathers.append(_Gather(nodes, min(users, key=position.__getitem__)))
    return sorted(gathers, key=lambda gather: position[gather.first_use])


def _derived(nodes: Sequence[Node], position: Mapping[Node, int]) -> list[Node]:
    """``nodes``, and what forward makes of them alone by cheap operators; in order."""
    found = set(nodes)
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            is_cheap = user.target in _CHEAP or user.target is _getitem
            if user in found or not is_cheap or _is_late(user):
                continue
            if all(given in found for given in user.all_input_nodes):
                found.add(user)
                todo.append(user)
    return sorted(found, key=position.__getitem__)


def _copy(graph: Graph, derived: Sequence[Node], users: Iterable[Node], before: Node) -> list[Node]:
    """Compute ``derived`` a second time, for ``users``, as far as they need it."""
    users, inside = list(users), {*derived}
    needed: set[Node] = set()
    todo = [given for user in users for given in user.all_input_nodes if given in inside]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [given for given in node.all_input_nodes if given in inside]
    copies: dict[Node, Node] = {}
    with graph.inserting_before(before):
        for node in derived:
            if node in needed:
                copies[node] = graph.node_copy(node, lambda given: copies.get(given, given))
    for user in users:
        for given in user.all_input_nodes:
            if given in copies:
                user.replace_input_with(given, copies[given])
    return list(copies.values())


def _sink(gathers: Sequence[_Gather], backward: Node) -> None:
    """Move each gather to its first use, and its start before the use of the one ahead of it.

    Args:
        backward: its first node.
    """
    ahead: Node | None = None
    was_late = False
    for gather in gathers:
        is_late = _is_late(gather.first_use)
        if ahead is not None and is_late and not was_late:
            ahead = backward
        was_late = is_late
        started, *rest = _segments(gather.nodes)
        for node in (node for segment in rest for node in segment):
            gather.first_use.prepend(node)
        if not rest:  # nothing is communicated
            ahead = None
        first = rest[0][0] if rest else gather.first_use
        for node in started:
            (ahead or first).prepend(node)
        ahead = first if rest else ahead


# ----------------------------------------------------------------------------------- reductions


def _hoist(graph: Graph) -> None:
    """Start each reduction when its gradients are there, and continue those before it."""
    position, in_order = _positions(graph), list(graph.nodes)
    reductions = []
    for nodes in _nodes_of(graph, "reduce").values():
        own = {*nodes}
        given = [g for node in nodes for g in node.all_input_nodes if g not in own]
        reductions.append((max(map(position.__getitem__, given)), nodes))
    reductions.sort(key=lambda pair: pair[0])
    waiting: list[list[list[Node]]] = []  # what is left of those that were started
    at, after = -1, in_order[0]
    for ready, nodes in reductions:
        if ready != at:
            at, after = ready, in_order[ready]
        started, *rest = _segments(nodes)
        due = [node for segments in waiting for node in segments.pop(0)]
        for node in (*due, *started):
            after.append(node)
            after = node
        waiting = [segments for segments in (*waiting, rest) if segments]
    output = next(iter(reversed(graph.nodes)))
    for node in (node for segments in waiting for segment in segments for node in segment):
        output.prepend(node)


# ------------------------------------------------------------------------------------ both kinds


def _hold_back(graph: Graph) -> None:
    """Make collectives of the host depend on the product that was computed last before them."""
    # Products are in memory whatever a compiler fuses.
    product = None
    for node in graph.nodes:
        if node.target in _PRODUCTS:
            product = node
        elif product is not None and node.target in (_HOST.start.default, _HOST.wait.default):
            node.kwargs = {**node.kwargs, "after": product}


def _segments(nodes: Sequence[Node]) -> list[list[Node]]:
    """``nodes``, cut before each that waits."""
    found: list[list[Node]] = [[]]
    for node in nodes:
        if node.target in _WAITS:
            found.append([])
        found[-1].append(node)
    return found
