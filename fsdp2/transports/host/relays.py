"""The parts of an exchange over several hosts: reads within each, and messages between them.

What crosses the link between two hosts is as little as can be. A shard comes to each other host
once, as a message to one rank there, its *partner*; the others of that host read it in the
partner's memory. Of a sum, each host adds up what its own ranks have, and sends the result once,
from the owner's partner. A rank with number i on its host has partners with number i (modulo their
number) on the others, so all ranks of a host send and receive alike. (Hierarchical collectives of
MPI libraries do this through one leader per host, whose memory everything would pass.)

Sums are added in rank order within a host, and then host by host, in the order of their first
ranks. So they are the same on all replicas and in every run with the same ranks on each host. With
other ranks on each host, they may differ in the last bits. `ORDER` asks for rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.profiler import record_function

from ...comm.streams import Finish, wait_for
from ...sharding.gathered import GatherPlan
from ...sharding.gathered import Messages as Listed
from .cross_memory import Ranges
from .followers import Step, follow
from .links import HostLinks, Posts
from .messages import Messages, RowGather, buffers
from .reads import GATHER, SCATTER, SPREAD, SUM, add_up, key, ranges_of
from .sums import WHOLE_BYTES, cut, mean_in_order

Message = tuple[list[torch.Tensor], int, int]  # as ``send`` takes it

_RELAYED = 4  # added to the use of a tag: the second exchange within the host


class HostRelays:
    """Exchanges by reads of memory within hosts and by messages between them.

    Args:
        group: of gloo.
        links: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, links: HostLinks) -> None:
        self.group, self._links = group, links
        self._messages = Messages(group)
        self._partners = links.places.partners
        # Of each rank of this host: the ranks of others whose partner it is here.
        self._served = links.places.served_by

    def gather(self, plan: GatherPlan | RowGather, tag: int) -> Finish:
        """Start to fill the slices of the others in the outputs of ``plan``."""
        me = self._links.rank
        own = [t[: rows[me]] for t, rows in zip(plan.inputs, plan.rows, strict=True)]
        if plan.messages is None:
            plan.messages = self._listed(own, lambda rank: _slices(plan, rank), tag)
        return self._spread(
            ranges_of(own), lambda rank: _places(plan, rank), plan.messages, tag, GATHER
        )

    def _listed(
        self,
        mine: Sequence[torch.Tensor],
        slices: Callable[[int], Sequence[torch.Tensor]],
        tag: int,
    ) -> tuple[Listed, Listed]:
        """Messages with ``mine`` to partners, and those that come here from other hosts."""
        sends: Listed = [
            ([part], peer, tag + i)
            for peer in self._partners for i, part in enumerate(mine) if len(part)
        ]  # fmt: skip
        receives: Listed = [
            ([part], peer, tag + i)
            for peer in self._served[self._links.rank]
            for i, part in enumerate(slices(peer)) if len(part)
        ]  # fmt: skip
        return sends, receives

    def _spread(
        self,
        mine: Ranges,
        places: Callable[[int], Ranges],
        messages: tuple[Listed, Listed],
        tag: int,
        use: int,
    ) -> Finish:
        """Start to bring what each rank has to all others.

        Args:
            mine: where this rank's data lies.
            places: for a rank: where its data belongs in this process.
        """
        links, group = self._links, self.group
        sends, receives = messages
        received = [group.recv(*message) for message in receives]
        sent = [self._send(message, use) for message in sends]

        def read_own(posts: Posts) -> None:
            for peer in links.peers:
                links.read(peer, places(peer), posts[peer])

        def read_relayed(posts: Posts) -> None:
            for peer in links.peers:
                links.read(peer, self._relayed(peer, places), posts[peer])

        def relay() -> None:
            relayed = self._relayed(links.rank, places)
            links.post(key(tag, use + _RELAYED), dict.fromkeys(links.peers, relayed))

        reading = links.begin(key(tag, use), dict.fromkeys(links.peers, mine), read_own)
        relaying = None
        if links.peers:
            relaying = links.begin(key(tag, use + _RELAYED), None, read_relayed)
            # Ranks of a host wait for what one of them receives, and that one may be busy, or wait
            # for another exchange.
            follow(links, "relay", self._breaking(received, relay), group)

        def finish() -> None:
            reading.wait()
            if relaying is None:
                wait_for(received)
            else:  # which has waited for what is received here
                relaying.wait()
            wait_for(sent)

        return finish

    def _breaking(
        self, received: list[dist.Work], then: Callable[[], Finish | None]
    ) -> Callable[[], Finish | None]:
        """Wait for messages, and do what follows; an error is one of all ranks of the host."""

        def job() -> Finish | None:
            try:
                wait_for(received)
                return then()
            except Exception as error:
                # Raised by who waits for the exchange, here and on the others of the host.
                with suppress(dist.DistNetworkError):
                    self._links.fail(f"what another host sends did not come: {error}")
                raise

        return job

    def _send(self, message: Message, use: int) -> dist.Work:
        """Start a message to another host. (``use`` is for code that counts messages.)"""
        return self.group.send(*message)

    def _relayed(self, rank: int, places: Callable[[int], Ranges]) -> Ranges:
        """Where that belongs in this process which ``rank`` receives from other hosts."""
        return [n for peer in self._served[rank] for n in places(peer)]

    def scatter(
        self, parts: Sequence[Sequence[torch.Tensor]], outs: Sequence[torch.Tensor], tag: int
    ) -> Finish:
        """Start to write into ``outs`` the means over ranks of what they have for this one.

        Args:
            parts: for each of ``outs``, the contiguous 1-D tensors for each rank.
        """
        if self._links.in_rank_order:
            return self._messages.scatter(parts, outs, tag)
        return self._scatter(parts, outs, tag)

    def _scatter(
        self,
        parts: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        tag: int,
        then: Callable[[], Finish] | None = None,
    ) -> Finish:
        """`scatter`, and what is to begin as soon as ``outs`` are there, in a thread."""
        links, group = self._links, self.group
        own = [part[links.rank] for part in parts]
        dtypes = [out.dtype for out in outs]
        alone = not links.peers
        use = SCATTER if then is None else SUM
        received = self._partial_buffers(own, outs)
        receives = [
            group.recv([part], peer, tag + i)
            for peer, made in received.items() for i, part in enumerate(made) if len(part)
        ]  # fmt: skip
        sends: list[dist.Work] = []
        sums = [own]  # of this host
        steps: list[Step] = []

        def add_hosts() -> Finish | None:
            with record_function("fsdp2::exchange"):
                self._add_hosts(sums[0], received, outs)
            received.clear()
            sums.clear()
            return None if then is None else then()

        def read_all(posts: Posts) -> None:
            # What others wait for goes first.
            done = 0
            with record_function("fsdp2::exchange"):
                for rank in (*self._served[links.rank], links.rank):
                    terms = [part[rank] for part in parts]
                    if not alone:
                        numels = [len(term) for term in terms]
                        made = outs if rank == links.rank else buffers(numels, dtypes)
                        num = 2 * sum(numel > 0 for numel in numels)
                        chosen = {peer: theirs[done : done + num] for peer, theirs in posts.items()}
                        add_up(links, terms, made, chosen, divide_by=1)
                        terms = [out[:numel] for out, numel in zip(made, numels, strict=True)]
                        done += num
                    if rank == links.rank:
                        sums[0] = terms
                        continue
                    for i, term in enumerate(terms):
                        if len(term):
                            sends.append(self._send(([term], rank, tag + i), use))
            if then is not None:
                steps.append(follow(links, "sum", self._breaking(receives, add_hosts), group))

        operation = links.begin(key(tag, use), self._terms(parts), read_all)
        held = list(parts)  # until the others have read them

        def finish() -> None:
            operation.wait()
            if steps:
                steps[0].wait()
            else:
                wait_for(receives)
                add_hosts()
            wait_for(sends)
            held.clear()

        return finish

    def _terms(self, parts: Sequence[Sequence[torch.Tensor]]) -> Posts:
        """What each rank of this host adds up: for those that it serves, and for itself."""
        return {
            peer: ranges_of([part[r] for r in (*self._served[peer], peer) for part in parts])
            for peer in self._links.peers
        }

    def _partial_buffers(
        self, own: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> dict[int, list[torch.Tensor]]:
        """For the sums of other hosts, by who sends them."""
        alone = {host[0] for host in self._links.hosts if len(host) == 1}
        numels = [len(term) for term in own]
        return {
            # A rank that has nothing to add up sends what it has.
            peer: buffers(numels, [t.dtype for t in (own if peer in alone else outs)])
            for peer in self._partners
        }

    def _add_hosts(
        self,
        mine: Sequence[torch.Tensor],
        received: dict[int, list[torch.Tensor]],
        outs: Sequence[torch.Tensor],
    ) -> None:
        """Write means over the group, of the sums of this host and of the others, in order."""
        links = self._links
        place = next(n for n, host in enumerate(links.hosts) if host is links.members)
        for i, (part, out) in enumerate(zip(mine, outs, strict=True)):
            ordered = [made[i] for made in received.values()]
            ordered.insert(place, part)
            out = out[: len(part)]
            # The first addition may write over what it reads, if it needs no cast.
            safe = place == 0 or (place == 1 and ordered[0].dtype == part.dtype)
            if out.data_ptr() != part.data_ptr() or safe:
                mean_in_order(ordered, out, links.size)
            else:
                total = torch.empty_like(out)
                mean_in_order(ordered, total, links.size)
                out.copy_(total)

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        """Start to replace 1-D ``tensors`` by their means over ranks."""
        if sum(tensor.nbytes for tensor in tensors) < WHOLE_BYTES:
            return self._messages.in_one(tensors, tag)
        parts = [cut(tensor, self._links.size) for tensor in tensors]
        own = [part[self._links.rank] for part in parts]

        def slices(rank: int) -> list[torch.Tensor]:
            return [part[rank] for part in parts]

        def spread() -> Finish:
            # The tags again: between two ranks messages of one tag arrive in order. (What is
            # overwritten here, others have read: the sums that overwrite it are made of it.)
            messages = self._listed(own, slices, tag)
            return self._spread(
                ranges_of(own), lambda rank: ranges_of(slices(rank)), messages, tag, SPREAD
            )

        if not self._links.in_rank_order:
            return self._scatter(parts, own, tag, spread)
        sum_own = self._messages.scatter(parts, own, tag)

        def add_up() -> Finish:
            sum_own()
            return spread()

        return follow(self._links, "sum", self._breaking([], add_up), self.group).wait


def _slices(plan: GatherPlan | RowGather, rank: int) -> list[torch.Tensor]:
    """Where what ``rank`` has belongs in the outputs of ``plan``, without padding."""
    found = []
    for output, rows in zip(plan.outputs, plan.rows, strict=True):
        start = output.numel() // len(rows) * rank
        found.append(output[start : start + rows[rank]])
    return found


def _places(plan: GatherPlan | RowGather, rank: int) -> Ranges:
    """`_slices` as addresses."""
    found = []
    for output, rows in zip(plan.outputs, plan.rows, strict=True):
        if rows[rank]:
            start = output.data_ptr() + output.nbytes // len(rows) * rank
            found += [start, rows[rank] * output.itemsize]
    return found
