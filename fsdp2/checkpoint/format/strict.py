"""What a checkpoint's JSON may hold: checked before anything uses it.

A checkpoint may be damaged, or made by an attacker: its checksums can be right all the same. So the
kind of every value is checked where it is read, and what is not as it should be is a
`CorruptCheckpoint` that names the file. The code behind works with values that fit.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar

from ..errors import CorruptCheckpoint
from .header import ITEM_BITS, MAX_HEADER_BYTES, FileInfo, TensorInfo, check_text, fits

T = TypeVar("T")
# Of a file of JSON. Parsed, JSON takes up to about 25 times its bytes: an index that is larger than
# the largest header is none of a real model; manifests and small state grow with ranks and blocks.
MAX_INDEX_BYTES = 100_000_000
MAX_SMALL_BYTES = 1 << 30
MAX_OWN_BYTES = 64 << 30  # tensors of one rank, next to the manifests
# What data that is not as it should be raises in code that converts it.
UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def converted(what: str, convert: Callable[[], T]) -> T:
    """What ``convert`` makes of data in a file.

    Args:
        what: the file and what of it, for the message.

    Raises:
        CorruptCheckpoint: if it cannot.
    """
    try:
        return convert()
    except CorruptCheckpoint:
        raise
    except UNFIT as error:
        why = f"{type(error).__name__}: {error}"[:300]
        raise CorruptCheckpoint(f"{what}: {why}") from error


class Check:
    """Checks values of one file; every method returns the value, or raises `CorruptCheckpoint`.

    Args:
        what: the file, and what it should be: "step/.fsdp2/x.json: not a manifest".
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def bad(self, name: str, value: Any) -> CorruptCheckpoint:
        """The error for a value that cannot be."""
        shown = repr(value) if isinstance(value, str | int | float) else f"a {_kind(value)}"
        return CorruptCheckpoint(f"{self.what}: {name} cannot be {shown[:100]}")

    def text(self, value: Any, name: str) -> str:
        if not isinstance(value, str) or not check_text(value):
            raise self.bad(name, value)
        return value

    def number(self, value: Any, name: str) -> int:
        """A whole number of at least 0 that fits into 63 bits. `True` is an int in Python."""
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.bad(name, value)
        return value

    def numbers(self, value: Any, name: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise self.bad(name, value)
        for each in value:
            if type(each) is not int or not 0 <= each < 2**63:
                raise self.bad(f"a number of {name}", each)
        return tuple(value)

    def table(self, value: Any, name: str) -> dict[str, Any]:
        """An object; its keys are text that can be encoded."""
        if not isinstance(value, dict):
            raise self.bad(name, value)
        for key in value:
            if not check_text(key):
                raise self.bad(f"a key of {name}", key)
        return value

    def texts(self, value: Any, name: str) -> dict[str, str]:
        """An object with text for each key."""
        return {k: self.text(v, f"{name}[{k!r}]") for k, v in self.table(value, name).items()}

    def items(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.bad(name, value)
        return value

    def file_name(self, value: Any, name: str) -> str:
        """The name of a file in the checkpoint's own folder."""
        if not isinstance(value, str) or not is_file_name(value):
            raise self.bad(name, value)
        return value

    def files(self, value: Any) -> dict[str, FileInfo]:
        """Data files, by name."""
        found = {}
        for name, info in self.table(value, "files").items():
            size, header_bytes, digest = self.items(info, f"what is said of {name!r}")
            size = self.number(size, f"the size of {name!r}")
            longest = min(size, MAX_HEADER_BYTES + 8)
            if self.number(header_bytes, f"the header of {name!r}") > longest:
                raise self.bad(f"the header of {name!r}", header_bytes)
            digest = self.text(digest, f"the digest of {name!r}")
            found[self.file_name(name, "files")] = FileInfo(size, header_bytes, digest)
        return found

    def tensor(self, name: Any, dtype: Any, shape: Any) -> TensorInfo:
        """A tensor that there can be."""
        name = self.text(name, "a name")
        shape = self.numbers(shape, f"the shape of {name!r}")
        if dtype not in ITEM_BITS or not fits(shape, ITEM_BITS[dtype] // 8):
            raise self.bad(f"the dtype and shape of {name!r}", f"{dtype} {list(shape)}")
        return TensorInfo(name, dtype, shape)


def small_limit(name: str) -> int:
    """The largest size in bytes of a file next to the manifests; also for saving."""
    return MAX_OWN_BYTES if name.endswith(".safetensors") else MAX_SMALL_BYTES


def is_file_name(name: str) -> bool:
    """Whether ``name`` can only name a file in the folder at hand."""
    return (
        name not in ("", ".", "..")
        and os.path.basename(name) == name
        and "\0" not in name
        and check_text(name)
    )


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "list", type(None): "null", bool: "boolean"}
    return kinds.get(type(value), type(value).__name__)


def open_regular(path: str | os.PathLike[str], *, links: bool = False) -> int:
    """A descriptor of a file, for reading.

    Args:
        links: whether it may be a symbolic link.

    Raises:
        FileNotFoundError: if there is none.
        CorruptCheckpoint: if it is a link, a pipe or a device.
    """
    folder, name = os.path.split(path)
    status = os.stat(path) if links else os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise CorruptCheckpoint(
            f"{folder}: {name} is a symbolic link, which this checkpoint never had"
        )
    # Before it is opened: to open a pipe blocks, and to open a device may set it off.
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpoint(f"{folder}: {name} is not a file")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    return os.open(path, flags)


@contextmanager
def opened_small(
    path: str | os.PathLike[str], limit: int, *, links: bool = False
) -> Iterator[BinaryIO]:
    """A small file, open for reading.

    Args:
        limit: its largest size in bytes.
        links: whether it may be a symbolic link.

    Raises:
        FileNotFoundError: if there is none.
        CorruptCheckpoint: if it is a link, a pipe or a device, or too large.
    """
    with open(open_regular(path, links=links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptCheckpoint(f"{path} has {size} bytes: more than {limit}, the limit")
        try:
            yield file
        except MemoryError:
            raise CorruptCheckpoint(f"{path}: its {size} bytes do not fit into memory") from None


def read_small(path: str | os.PathLike[str], limit: int, *, links: bool = False) -> bytes:
    """Read a small file whole; as `opened_small`."""
    with opened_small(path, limit, links=links) as file:
        return file.read()
