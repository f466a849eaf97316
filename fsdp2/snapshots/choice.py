"""Which snapshot to restore, from what is found where: pure.

No clock is read: sessions (from one start of the processes to the next) are numbered, each one more
than the highest number that any host has seen when it begins. So a host that was away, and comes
back with snapshots of an earlier session, does not override the hosts that continued without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

_NAME = re.compile(r"(\d{6,})-(\d{9,})-([0-9a-f]{8})")
_PART = re.compile(r"rank-(\d{5,})-of-(\d{5,})")


@dataclass(frozen=True, order=True)
class Generation:
    """One snapshot of all ranks. Ordered by session, then by step.

    Attributes:
        nonce: of the session. Hosts that did not see each other may have begun sessions of the same
            number.
    """

    session: int
    step: int
    nonce: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.session:06d}-{self.step:09d}-{self.nonce}"

    @classmethod
    def parse(cls, name: str) -> Generation | None:
        """The inverse of `name`; None for any other name."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


@dataclass(frozen=True, order=True)
class PartName:
    """What one rank, of ``num_ranks``, has put into a snapshot."""

    generation: Generation
    rank: int
    num_ranks: int

    @property
    def name(self) -> str:
        """Of its folder within the generation's."""
        return f"rank-{self.rank:05d}-of-{self.num_ranks:05d}"

    @classmethod
    def parse(cls, generation: str, name: str) -> PartName | None:
        """From the names of two folders; None if they are of anything else."""
        found, match = Generation.parse(generation), _PART.fullmatch(name)
        if found is None or match is None or int(match[1]) >= int(match[2]):
            return None
        return cls(found, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Choice:
    """A snapshot that can be restored.

    Attributes:
        holders: for each part, the folders that have it, in the order in which they were given.
    """

    generation: Generation
    holders: Mapping[PartName, tuple[str, ...]]


def choose(
    inventories: Mapping[str, Iterable[PartName]], bad: Set[tuple[str, PartName]] = frozenset()
) -> Choice | None:
    """The newest snapshot that has every rank's part in some folder; None: there is none.

    Args:
        inventories: the parts in each folder.
        bad: parts in folders that are damaged there, and do not count.
    """
    holders: dict[tuple[Generation, int], dict[PartName, list[str]]] = {}
    for folder, parts in inventories.items():
        for part in set(parts):
            if (folder, part) not in bad:
                found = holders.setdefault((part.generation, part.num_ranks), {})
                found.setdefault(part, []).append(folder)
    whole = [key for key, found in holders.items() if len(found) == key[1]]
    if not whole:
        return None
    newest = max(whole)
    return Choice(newest[0], {part: tuple(at) for part, at in sorted(holders[newest].items())})
