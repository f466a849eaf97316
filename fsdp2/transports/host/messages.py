"""The parts of an exchange as messages of a gloo group, received straight into place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.profiler import record_function

from ...comm.streams import Finish, wait_for
from ...sharding.gathered import GatherPlan
from ...sharding.gathered import Messages as Listed
from .followers import follow
from .sums import cut, mean_in_order, whole_bytes


class RowGather:
    """A gather of one tensor of each rank, all of one length, for exchanges.

    Args:
        rows: of shape (ranks, length); this rank's row is left to the caller.
        mine: this rank's tensor.
    """

    def __init__(self, rows: torch.Tensor, mine: torch.Tensor) -> None:
        self.inputs, self.outputs = [mine], [rows.view(-1)]
        self.rows = [[len(mine)] * len(rows)]
        self.messages: tuple[Listed, Listed] | None = None


class Messages:
    """Exchanges by messages.

    Args:
        group: of gloo.
        one_host: whether all its ranks are on one host.

    Attributes:
        whole_bytes: up to which an all-reduce is one exchange of the whole.
    """

    def __init__(self, group: dist.ProcessGroup, *, one_host: bool = False) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        # As ``send`` and ``recv`` of a group count them: by number in the group, not by global
        # rank.
        self.peers = [r for r in range(self.size) if r != self.rank]
        self.whole_bytes = whole_bytes(self.size, one_host=one_host)

    def gather(self, plan: GatherPlan | RowGather, tag: int) -> Finish:
        """Start to fill the slices of the others in the outputs of ``plan``."""
        if plan.messages is None:
            plan.messages = self._gather_messages(plan, tag)
        return self._start(*plan.messages)

    def _gather_messages(self, plan: GatherPlan | RowGather, tag: int) -> tuple[Listed, Listed]:
        sends: Listed = []
        receives: Listed = []
        for i, (mine, output, rows) in enumerate(
            zip(plan.inputs, plan.outputs, plan.rows, strict=True)
        ):
            numel = output.numel() // self.size
            for peer in self.peers:
                # Padding is not sent: of empty slices there is no message, on both sides alike.
                if rows[peer]:
                    theirs = output[peer * numel : peer * numel + rows[peer]]
                    receives.append(([theirs], peer, tag + i))
                if rows[self.rank]:
                    sends.append(([mine[: rows[self.rank]]], peer, tag + i))
        return sends, receives

    def scatter(
        self, parts: Sequence[Sequence[torch.Tensor]], outs: Sequence[torch.Tensor], tag: int
    ) -> Finish:
        """Start to write into ``outs`` the means over ranks of what they have for this one.

        Args:
            parts: for each of ``outs``, the contiguous 1-D tensors for each rank.
        """
        own = [part[self.rank] for part in parts]
        numels, dtypes = [len(term) for term in own], [term.dtype for term in own]
        received = {peer: buffers(numels, dtypes) for peer in self.peers}
        wait = self._start(
            [([part[p]], p, tag + i) for i, part in enumerate(parts) for p in self.peers
             if len(part[p])],
            [([received[p][i]], p, tag + i) for i, term in enumerate(own) for p in self.peers
             if len(term)],
        )  # fmt: skip

        def finish() -> None:
            wait()
            with record_function("fsdp2::exchange"):
                for i, (term, out) in enumerate(zip(own, outs, strict=True)):
                    ordered = [term if r == self.rank else received[r][i] for r in range(self.size)]
                    self._add_up(ordered, out)
            own.clear()
            received.clear()

        return finish

    def _add_up(self, ordered: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        # In rank order, or replicas would differ in the last bits. The first addition reads the
        # terms of ranks 0 and 1 and may write over either. Any later term must still be there when
        # it is added, so the sum goes elsewhere.
        if self.rank > 1 and out.data_ptr() == ordered[self.rank].data_ptr():
            mean_in_order(ordered, ordered[0])
            out.copy_(ordered[0])
        else:
            mean_in_order(ordered, out[: len(ordered[0])])

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        """Start to replace 1-D ``tensors`` by their means over ranks."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.size == 2 or nbytes <= self.whole_bytes:
            return self.in_one(tensors, tag)
        return self.in_two_phases(tensors, tag)

    def in_one(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        """An all-reduce in one exchange: each rank gets the whole of all others, and adds it up."""
        return self.scatter([[tensor] * self.size for tensor in tensors], tensors, tag)

    def in_two_phases(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        """An all-reduce in which each rank adds up one part of each tensor, and sends the sums."""
        parts = [cut(tensor, self.size) for tensor in tensors]
        own = [part[self.rank] for part in parts]
        add_up = self.scatter(parts, own, tag)

        def spread() -> Finish:
            add_up()
            # The tags again: between two ranks messages of one tag arrive in order. (What is
            # received over it was sent: the sums that come are made of it.)
            return self._start(
                [([term], p, tag + i) for i, term in enumerate(own) for p in self.peers
                 if len(term)],
                [([part[p]], p, tag + i) for i, part in enumerate(parts) for p in self.peers
                 if len(part[p])],
            )  # fmt: skip

        # In a thread: the sums go out while this rank computes.
        return follow(self.group, "sum", spread, self.group).wait

    def _start(self, sends: Listed, receives: Listed) -> Finish:
        group = self.group
        works = [group.recv(*message) for message in receives]
        works += [group.send(*message) for message in sends]
        return lambda: wait_for(works)


def buffers(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """1-D buffers, say for the terms of one peer; one allocation for each dtype."""
    # One allocation instead of one per gradient. (On "cpu", whatever default device a user has
    # set.)
    made: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, each in enumerate(dtypes) if each == dtype]
        lengths = [numels[i] for i in chosen]
        flat = torch.empty(sum(lengths), dtype=dtype, device="cpu")
        made.update(zip(chosen, flat.split(lengths), strict=True))
    return [made[i] for i in range(len(numels))]
