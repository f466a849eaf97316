"""The parts of an exchange on one host: each rank reads what it needs where the others have it.

The counterpart of `messages`, for the groups that have `HostLinks`. Nothing is received into a
buffer: what is gathered is read straight into place, and of a sum one block of a term at a time,
which stays in the cache until it is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.profiler import record_function

from ...comm.streams import Finish
from ...sharding.gathered import GatherPlan
from .cross_memory import Ranges
from .links import USES_OF_TAG, HostLinks, PendingExchange, Posts
from .messages import RowGather
from .sums import BLOCK_NUMEL, cut, mean_in_order

GATHER, SCATTER, SUM, SPREAD = range(4)  # what a tag is used for, by each of these once


class HostReads:
    """Exchanges by reads of memory.

    Args:
        links: of the group.
    """

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def gather(self, plan: GatherPlan | RowGather, tag: int) -> Finish:
        """Start to fill the slices of the others in the outputs of ``plan``."""
        links = self._links
        itemsize = plan.outputs[0].itemsize if plan.outputs else 1
        mine = []
        for tensor, numels in zip(plan.inputs, plan.rows, strict=True):
            # Padding is not sent.
            if numels[links.rank]:
                mine += [tensor.data_ptr(), numels[links.rank] * itemsize]

        def read_all(posts: Posts) -> None:
            starts = [output.data_ptr() for output in plan.outputs]
            steps = [output.nbytes // links.size for output in plan.outputs]
            for peer in links.peers:
                into = []
                for start, step, numels in zip(starts, steps, plan.rows, strict=True):
                    if numels[peer]:
                        into += [start + peer * step, numels[peer] * itemsize]
                links.read(peer, into, posts[peer])

        return links.begin(key(tag, GATHER), dict.fromkeys(links.peers, mine), read_all).wait

    def scatter(
        self, parts: Sequence[Sequence[torch.Tensor]], outs: Sequence[torch.Tensor], tag: int
    ) -> Finish:
        """Start to write into ``outs`` the means over ranks of what they have for this one.

        Args:
            parts: for each of ``outs``, the contiguous 1-D tensors for each rank.
        """
        links = self._links
        posts = {peer: ranges_of([part[peer] for part in parts]) for peer in links.peers}

        def read_all(posts: Posts) -> None:
            own = [part[links.rank] for part in parts]
            with record_function("fsdp2::exchange"):
                add_up(links, own, outs, posts)

        operation = links.begin(key(tag, SCATTER), posts, read_all)

        def finish() -> None:
            operation.wait()
            held.clear()

        held = list(parts)  # until the others have read them
        return finish

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        """Start to replace 1-D ``tensors`` by their means over ranks."""
        # Each rank adds up one part of each tensor, in place: nobody else reads that part of its
        # tensors. Then each reads the parts of the others, whose second posts show that they have
        # read the same part here.
        links = self._links
        parts = [cut(tensor, links.size) for tensor in tensors]
        own = [part[links.rank] for part in parts]
        others = {peer: ranges_of([part[peer] for part in parts]) for peer in links.peers}

        def spread(posts: Posts) -> None:
            for peer in links.peers:
                links.read(peer, others[peer], posts[peer])

        def sum_own(posts: Posts) -> None:
            with record_function("fsdp2::exchange"):
                add_up(links, own, own, posts)
            everyone = dict.fromkeys(links.peers, ranges_of(own))
            begun.append(links.begin(key(tag, SPREAD), everyone, spread))

        begun: list[PendingExchange] = []
        begun.append(links.begin(key(tag, SUM), others, sum_own, is_acknowledged=False))

        def finish() -> None:
            for operation in begun:  # the first one appends the second
                operation.wait()
            own.clear()  # until here, their memory is read

        return finish


def add_up(
    links: HostLinks,
    own: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    posts: Posts,
    divide_by: int = 0,
) -> None:
    """Write means over the host in rank order, block by block. All outputs may be the own terms.

    Args:
        divide_by: what sums are divided by, if not by the number of the host's ranks.
    """
    sizes = [tensor.nbytes for tensor in own if len(tensor)]
    for peer in links.peers:
        links.check_sizes(peer, sizes, posts[peer])
    in_place = len(own) > 0 and own[0] is outs[0]
    # In the order of the ranks, and not of the reads.
    places = {rank: place for place, rank in enumerate(links.members)}
    nums_before = 0
    for term, out in zip(own, outs, strict=True):
        if not len(term):
            continue
        buffer = term.new_empty((len(places), min(len(term), BLOCK_NUMEL)))
        for begin in range(0, len(term), BLOCK_NUMEL):
            mine = term[begin : begin + BLOCK_NUMEL]
            into = out[begin : begin + len(mine)]  # it may end with padding
            terms = [block[: len(mine)] for block in buffer]
            for peer in links.peers:
                start = posts[peer][nums_before] + begin * term.itemsize
                links.read(
                    peer, [terms[places[peer]].data_ptr(), mine.nbytes], [start, mine.nbytes]
                )
            terms[places[links.rank]] = mine
            if in_place and places[links.rank] > 1:  # it would be overwritten before it is added
                mean_in_order(terms, terms[0], divide_by)
                into.copy_(terms[0])
            else:
                mean_in_order(terms, into, divide_by)
        nums_before += 2


def ranges_of(tensors: Sequence[torch.Tensor]) -> Ranges:
    """Where tensors lie; of empty ones nothing is said, on both sides alike."""
    return [n for tensor in tensors if len(tensor) for n in (tensor.data_ptr(), tensor.nbytes)]


def key(tag: int, use: int) -> int:
    return USES_OF_TAG * tag + use
