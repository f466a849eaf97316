"""A snapshot as one checkpoint folder, for the reader that also reads those on disk.

Parts that are on this host are linked. Of other parts, only the small files are fetched. Their data
files are sparse files with the header, so that they take up no memory; bytes are fetched when a
rank reads them. So each rank receives the bytes of its shards only, at any number of ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..checkpoint.format.manifest import FOLDER, Manifest, marker_name
from ..checkpoint.format.marker import load
from ..checkpoint.loading.opening import open_source
from ..checkpoint.loading.source import Source
from .choice import Choice, PartName
from .folder import Folder, checked
from .transfer import Address, Peer, Peers, TransferError

T = TypeVar("T")
# The servers to ask for each part, one after the other; none: this host has it.
Origins = Mapping[PartName, Sequence[Address]]


@contextmanager
def assembled(folder: Folder, choice: Choice, origins: Origins, secret: str) -> Iterator[Source]:
    """The snapshot as an open checkpoint; removed on exit.

    Raises:
        TransferError: if a part cannot be had from where it is.
        CorruptCheckpoint: if parts do not fit together.
    """
    path = folder.path / f".restore-{choice.generation.name}-{secrets.token_hex(4)}"
    peers = Peers(secret)
    path.mkdir(mode=0o700)
    (path / FOLDER).mkdir()
    try:
        fetch: dict[str, Callable[[memoryview, int], int]] = {}
        for part, addresses in origins.items():
            if not addresses:
                _link(folder.path_of(part), path, folder.manifest(part))
                continue
            remote = _Remote(part, addresses, peers)
            for file in _outline(remote, path):
                fetch[file] = partial(remote.get_into, file)
        with open_source(path) as source:
            source.fetch.update(fetch)
            yield source
    finally:
        peers.close()
        with folder.disk.directory(folder.path) as root:
            folder.disk.remove_tree(path.name, root)


def _link(part: Path, path: Path, manifest: Manifest) -> None:
    data = {file for files in manifest.sets for file in files.files}
    for name in os.listdir(part):
        os.link(part / name, path / name if name in data else path / FOLDER / name)


def _outline(remote: _Remote, path: Path) -> list[str]:
    """Make the files of a part that is elsewhere, without their data; returns the data files."""
    part = remote.part
    marker = marker_name(part.rank, part.num_ranks)
    text = remote.get(marker)
    manifest = checked(load(text, marker), part, f"the manifest of {part}")
    (path / FOLDER / marker).write_bytes(text)
    for name, small in manifest.small_files.items():
        if small.num_bytes is None:
            (path / FOLDER / os.path.basename(name)).write_bytes(remote.get(name))
    files = {os.path.basename(f): info for s in manifest.sets for f, info in s.files.items()}
    for file, info in files.items():
        header = memoryview(bytearray(info.header_bytes))
        remote.get_into(file, header, 0)
        with open(path / file, "xb") as out:
            out.write(header)
            out.truncate(info.size)
    return list(files)


class _Remote:
    """A part on other hosts.

    Args:
        addresses: of servers that have it. If one fails, the next is asked.
    """

    def __init__(self, part: PartName, addresses: Sequence[Address], peers: Peers) -> None:
        self.part = part
        self._addresses = addresses
        self._peers = peers

    def get(self, file: str) -> bytes:
        return self._asked(lambda peer: peer.get(self.part, file))

    def get_into(self, file: str, out: memoryview, offset: int) -> int:
        return self._asked(lambda peer: peer.get_into(self.part, file, out, offset))

    def _asked(self, ask: Callable[[Peer], T]) -> T:
        failed: list[str] = []
        for address in self._addresses:
            try:
                return ask(self._peers.to(address))
            except TransferError as error:
                self._peers.forget(address)
                failed.append(str(error))
        raise TransferError(f"{self.part} cannot be fetched: {'; '.join(failed)}")
