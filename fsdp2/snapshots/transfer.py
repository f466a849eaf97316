"""Parts of snapshots from host to host, by TCP.

Not by a process group: training's collectives keep their order, nothing waits for a training step,
and a rank that is killed in the middle of a message takes no communicator with it.

Each rank has a server, and connects to the servers of others. A message is its length in four
bytes, a JSON object, and as many raw bytes as the object states. The first message has the secret
of this session, which the ranks agreed on in the process group's store; a server accepts no
connection without it.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.format.disk import read_exactly
from ..common.threads import work_in_turns
from .choice import Generation, PartName
from .folder import Folder

PIECE_BYTES = 1 << 20
TIMEOUT_S = 60.0  # without a byte
MAX_PEERS = 16  # of a thread
Address = tuple[str, int]  # and port
_LENGTH = struct.Struct(">I")
_LONGEST = 16 << 20  # of a message's JSON
_LONGEST_HELLO = 4096  # from anyone who reaches the port
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class TransferError(CheckpointError):
    """The other side did not answer, or could not do what it was asked for."""


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, longest: int = _LONGEST) -> dict[str, Any] | None:
    """The next message; None at the end of the connection."""
    head = bytearray(_LENGTH.size)
    if not _fill(sock, memoryview(head)):
        return None
    (length,) = _LENGTH.unpack(head)
    if length > longest:
        raise TransferError(f"a message of {length} bytes")
    data = bytearray(length)
    if not _fill(sock, memoryview(data)):
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TransferError(f"a message that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise TransferError("a message that is no object")
    return message


def _fill(sock: socket.socket, out: memoryview) -> bool:
    """Receive exactly as many bytes; False if the connection ended before."""
    while len(out):
        num = sock.recv_into(out)
        if num == 0:
            return False
        out = out[num:]
    return True


def _part_of(message: dict[str, Any]) -> PartName:
    part = PartName.parse(str(message["generation"]), str(message["part"]))
    if part is None:
        raise TransferError(f"no such part: {message['generation']}/{message['part']}")
    return part


def _asking(op: str, part: PartName, **more: Any) -> dict[str, Any]:
    return {"op": op, "generation": part.generation.name, "part": part.name, **more}


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise TransferError(f"no name of a file: {name!r}")
    return name


class Server:
    """Takes in copies of parts for other ranks, and gives out those that this host has.

    Args:
        folder: where they are.
        address: to listen at.
        secret: which the other ranks have too.
    """

    def __init__(self, folder: Folder, address: str, secret: str = "") -> None:
        self.folder = folder
        self.secret = secret  # set before others learn the port
        try:
            self._socket = socket.create_server((address, 0), backlog=128)
        except OSError as error:
            raise CheckpointError(
                f"Cannot listen at {address}: {error.strerror}. Pass address=, one of this host's "
                "by which the other hosts reach it"
            ) from error
        self.address, self.port = address, self._socket.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._closed = False
        self._guard = threading.Lock()
        self._thread = work_in_turns("fsdp2-snapshots", self._accept)

    def close(self) -> None:
        """Stop, also in the middle of what is being served."""
        with self._guard:
            self._closed = True
            serving = list(self._open)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for sock in serving:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> bool:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            if not self._closed:
                time.sleep(0.1)  # no descriptors left, say
            return not self._closed
        with self._guard:
            if self._closed:
                sock.close()
                return False
            self._open.add(sock)
        serving = threading.Thread(
            target=self._serve, args=(sock,), name="fsdp2-snapshots-serve", daemon=True
        )
        try:
            serving.start()
        except BaseException:  # no memory for a thread, say: the other side need not wait
            self._drop(sock)
            raise
        return True

    def _drop(self, sock: socket.socket) -> None:
        with self._guard:
            self._open.discard(sock)
        sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(TIMEOUT_S)
            hello = _receive(sock, _LONGEST_HELLO)
            told = str(hello.get("secret")) if hello else ""
            if not hmac.compare_digest(told.encode(), self.secret.encode()):
                return
            while (message := _receive(sock)) is not None:
                try:
                    if message.get("op") == "put":
                        self._take(sock, message)
                    else:
                        self._give(sock, message)
                except _Ended:
                    return
                except (OSError, CheckpointError, LookupError, TypeError, ValueError) as error:
                    if isinstance(error, TimeoutError | ConnectionError):
                        return
                    # What else was on its way cannot be told from the next message: an answer,
                    # and the end.
                    _send(sock, {"error": f"{type(error).__name__}: {error}"})
                    return
        except (OSError, ValueError, CheckpointError):
            pass  # The other side has gone, or is none of ours.
        finally:
            self._drop(sock)

    def _take(self, sock: socket.socket, message: dict[str, Any]) -> None:
        part = _part_of(message)
        files = [(_file_name(name), int(size)) for name, size in message["files"]]
        keep = {g for name in message["keep"] if (g := Generation.parse(str(name))) is not None}
        self.folder.remove(keep, older_parts(self.folder, part))
        with self.folder.incoming(part) as path:
            for name, size in files:
                fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    self._take_file(sock, fd, size, name)
                finally:
                    os.close(fd)
            # What TCP lets through, and a file that changed while it was sent, is found here and
            # not when there is no other copy any more.
            self.folder.verify(part, path)
        _send(sock, {"ok": True})

    def _take_file(self, sock: socket.socket, fd: int, size: int, name: str) -> None:
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
        done = 0
        while done < size:
            piece = buffer[: min(len(buffer), size - done)]
            if not _fill(sock, piece):
                raise _Ended
            self.folder.disk.write_at(fd, piece, done, name)
            done += len(piece)

    def _give(self, sock: socket.socket, message: dict[str, Any]) -> None:
        part, offset = _part_of(message), int(message["offset"])
        fd = os.open(
            self.folder.path_of(part) / _file_name(message["file"]),
            os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW,
        )
        try:
            size = max(0, os.fstat(fd).st_size - offset)
            if message["size"] is not None:
                size = min(size, int(message["size"]))
            _send(sock, {"size": size})
            buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
            done = 0
            while done < size:
                piece = buffer[: min(len(buffer), size - done)]
                if read_exactly(fd, piece, offset + done) != len(piece):
                    raise _Ended  # it was cut: the other side sees the connection end
                sock.sendall(piece)
                done += len(piece)
        finally:
            os.close(fd)


def older_parts(folder: Folder, part: PartName) -> list[PartName]:
    """What there is of its rank and session: what is of other sessions may still be needed."""
    new = part.generation
    return [
        old
        for old in folder.parts()
        if old.rank == part.rank
        and (old.generation.session, old.generation.nonce) == (new.session, new.nonce)
    ]


class _Ended(Exception):
    """The connection is over, or must end."""


class Peer:
    """A connection to another rank's server; for one thread at a time.

    Raises:
        TransferError: if it does not answer, here and in all methods.
    """

    def __init__(
        self, address: str, port: int, secret: str, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.shown = f"{address}:{port}"
        try:
            self._socket = socket.create_connection((address, port), timeout=timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send(self._socket, {"secret": secret})
        except OSError as error:
            raise TransferError(f"{self.shown} cannot be reached: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(
        self,
        folder: Folder,
        part: PartName,
        keep: Sequence[Generation],
        bytes_per_s: float | None = None,
    ) -> int:
        """Give a copy of a part of ``folder``; returns when it is in its place there.

        Args:
            keep: of the older parts of this rank; the rest is removed there.
            bytes_per_s: to send on average at most; None: no limit.

        Returns:
            The number of bytes sent.
        """
        path = folder.path_of(part)
        sizes = [(name, (path / name).stat().st_size) for name in sorted(os.listdir(path))]
        pace = _Pace(bytes_per_s)
        try:
            _send(self._socket, _asking("put", part, files=sizes, keep=[g.name for g in keep]))
            buffer = memoryview(bytearray(PIECE_BYTES))
            for name, size in sizes:
                fd = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for offset in range(0, size, PIECE_BYTES):
                        piece = buffer[: min(PIECE_BYTES, size - offset)]
                        if read_exactly(fd, piece, offset) != len(piece):
                            raise TransferError(f"{path / name} was cut while it was sent")
                        self._socket.sendall(piece)
                        pace.sent(len(piece))
                finally:
                    os.close(fd)
        except (ConnectionError, TimeoutError) as error:
            # It may have said why before it closed: no space, say.
            raise TransferError(self._reason() or f"{self.shown}: {error!r}") from error
        self._answer()
        return sum(size for _, size in sizes)

    def get(self, part: PartName, file: str) -> bytes:
        """A whole file of a part, a small one."""
        self._request(part, file, 0, None)
        data = bytearray(int(self._answer()["size"]))
        self._bytes(memoryview(data))
        return bytes(data)

    def get_into(self, part: PartName, file: str, out: memoryview, offset: int) -> int:
        """Fill ``out`` from byte ``offset`` of a file; returns how many bytes there were."""
        self._request(part, file, offset, len(out))
        size = int(self._answer()["size"])
        if size > len(out):
            raise TransferError(f"{self.shown} sends more than it was asked for")
        self._bytes(out[:size])
        return size

    def _request(self, part: PartName, file: str, offset: int, size: int | None) -> None:
        try:
            _send(self._socket, _asking("get", part, file=file, offset=offset, size=size))
        except OSError as error:
            raise TransferError(f"{self.shown}: {error!r}") from error

    def _bytes(self, out: memoryview) -> None:
        try:
            if _fill(self._socket, out):
                return
        except OSError as error:
            raise TransferError(f"{self.shown}: {error!r}") from error
        raise TransferError(f"{self.shown} ended in the middle of a file")

    def _answer(self) -> dict[str, Any]:
        try:
            answer = _receive(self._socket)
        except (OSError, ValueError) as error:
            raise TransferError(f"{self.shown} did not answer: {error!r}") from error
        if answer is None:
            raise TransferError(f"{self.shown} closed the connection")
        if "error" in answer:
            raise TransferError(f"{self.shown}: {answer['error']}")
        return answer

    def _reason(self) -> str:
        try:
            self._socket.settimeout(1.0)
            self._answer()
        except TransferError as error:
            return str(error)
        return ""


class Peers:
    """Connections to servers, one per address and thread that uses it; of each thread the last few.

    There are as many servers as ranks, and each has a thread for every connection.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._mine = threading.local()
        self._all: set[Peer] = set()

    def to(self, address: Address) -> Peer:
        """The connection of this thread to the server at ``address``."""
        mine = self._by_address()
        if address not in mine:
            if len(mine) == MAX_PEERS:
                self.forget(next(iter(mine)))
            mine[address] = Peer(*address, self._secret)
            self._all.add(mine[address])
        return mine[address]

    def _by_address(self) -> dict[Address, Peer]:
        found: dict[Address, Peer] = self._mine.__dict__.setdefault("peers", {})
        return found

    def forget(self, address: Address) -> None:
        """Do not use this thread's connection to ``address`` again: it failed."""
        peer = self._by_address().pop(address, None)
        if peer is not None:
            peer.close()
            self._all.discard(peer)

    def close(self) -> None:
        for peer in list(self._all):
            peer.close()


class _Pace:
    """Sleeps, so that no more bytes are sent per second than allowed."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._began = time.monotonic()
        self._sent = 0

    def sent(self, num: int) -> None:
        self._sent += num
        if self._bytes_per_s is not None:
            ahead_s = self._sent / self._bytes_per_s - (time.monotonic() - self._began)
            if ahead_s > 0:
                time.sleep(ahead_s)
