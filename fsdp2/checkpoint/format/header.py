"""The safetensors header: every rank computes the same bytes; reading is strict.

The format (https://huggingface.co/docs/safetensors): eight bytes of little-endian header length,
a JSON object of ``name: {dtype, shape, data_offsets}``, then the data. It is a pure function of
names, shapes and dtypes, so ranks that agree on these agree on every offset without communication.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from ..errors import CheckpointError, CorruptCheckpoint

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
PICKLED = (
    "a pickled file, not safetensors; these are not read here: use "
    "model.load_state_dict(torch.load(path, weights_only=True)), or save it with "
    "safetensors.torch.save_file first"
)
MAX_DIMS = 64  # what torch can copy
MAX_TENSOR_BYTES = 2**63 - 1
ALIGN_BYTES = 4096  # so that the data of every file starts on a page


@lru_cache(1024)
def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. The results are kept: the layers of a model repeat a few shapes."""
    return prod(shape) * ITEM_BITS[dtype] // 8


class TensorInfo(NamedTuple):
    """A tensor as a file describes it. ``dtype`` is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return ITEM_BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        return bytes_of(self.dtype, self.shape)


class FileInfo(NamedTuple):
    """A data file: its size in bytes, and length and SHA-256 of the header that it begins with."""

    size: int
    header_bytes: int
    header_sha256: str


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file: its header and where each tensor's data starts.

    Attributes:
        header: the JSON text; `frame` turns it into the bytes before the data.
        offsets: first byte of each tensor, counted from the start of the file.
        size: of the whole file in bytes.
    """

    header: str
    tensors: tuple[TensorInfo, ...]
    offsets: dict[str, int]
    size: int

    @property
    def info(self) -> FileInfo:
        return info_of(self.size, frame(self.header))


def info_of(size: int, header: bytes) -> FileInfo:
    """Of a file with this header."""
    return FileInfo(size, len(header), hashlib.sha256(header).hexdigest())


def plan_file(tensors: Sequence[TensorInfo]) -> FilePlan:
    """Lay out one file: widest dtype first, which aligns every tensor; otherwise in given order."""
    ordered = sorted(tensors, key=lambda t: -t.itemsize)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    for tensor in ordered:
        starts[tensor.name] = end
        end += tensor.nbytes
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], end],
        }
    body = json.dumps(table, separators=(",", ":"))
    header = frame(body)
    offsets = {name: len(header) + start for name, start in starts.items()}
    return FilePlan(body, tuple(ordered), offsets, len(header) + end)


def frame(body: str) -> bytes:
    """The bytes of a file before its data: length, JSON, and spaces up to a page boundary."""
    encoded = body.encode()
    length = -(-(len(encoded) + 8) // ALIGN_BYTES) * ALIGN_BYTES - 8
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"A header of {length} bytes is needed; safetensors files have at most "
            f"{MAX_HEADER_BYTES}: lower max_file_bytes"
        )
    return struct.pack("<Q", length) + encoded.ljust(length)


def plan_files(tensors: Sequence[TensorInfo], max_file_bytes: int) -> list[FilePlan]:
    """Spread tensors over files of at most ``max_file_bytes`` each, in the order given.

    A larger tensor gets its own file. There is always at least one file.
    """
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return [plan_file(group) for group in groups]


@dataclass(frozen=True)
class Header:
    """The contents of a file's header. ``offsets`` count from the start of the file."""

    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]
    metadata: dict[str, str]
    data_start: int

    def at(self, offset: int) -> TensorInfo | None:
        """The tensor that has the byte ``offset``."""
        found = bisect_right(self._ordered, (offset, MAX_TENSOR_BYTES, "")) - 1
        return self.tensors[self._ordered[found][2]] if found >= 0 else None

    @cached_property
    def _ordered(self) -> list[tuple[int, int, str]]:
        """Where each tensor begins; at the same place, those with bytes come last."""
        return sorted((self.offsets[t.name], t.nbytes, t.name) for t in self.tensors.values())


def header_length(first_bytes: bytes, file_size: int, file: str) -> int:
    """The length of the JSON from the file's first eight bytes.

    Raises:
        CorruptCheckpoint: if the file cannot have such a header.
    """
    if file_size < 8 or len(first_bytes) < 8:
        raise CorruptCheckpoint(f"{file}: {file_size} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", first_bytes[:8])
    if length == 0:
        raise CorruptCheckpoint(f"{file}: the header has length 0: the file was never completed")
    if length > MAX_HEADER_BYTES:
        if first_bytes[:2] == b"PK" or first_bytes[:1] == b"\x80":
            raise CorruptCheckpoint(f"{file} is {PICKLED}")
        raise CorruptCheckpoint(
            f"{file} is not a safetensors file: header length {length} is over the limit of "
            f"{MAX_HEADER_BYTES} bytes"
        )
    if 8 + length > file_size:
        raise CorruptCheckpoint(
            f"{file}: truncated: the header should end at byte {8 + length}, the file has "
            f"{file_size} bytes"
        )
    return length


def parse_header(body: bytes, file_size: int, file: str) -> Header:
    """Read and check the JSON part of a header.

    Args:
        body: the bytes between the length and the data.
        file_size: of the whole file.
        file: its name, for messages.

    Raises:
        CorruptCheckpoint: unless every byte of data belongs to exactly one tensor.
    """
    table = parse_json(body, f"{file}: the header")
    if not isinstance(table, dict):
        raise CorruptCheckpoint(f"{file}: the header is a {type(table).__name__}, not an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CorruptCheckpoint(f"{file}: __metadata__ is a {type(metadata).__name__}")
    data_start = 8 + len(body)
    tensors, ranges = {}, []
    known: dict[tuple[Any, ...], int] = {}
    for name, entry in table.items():
        found = _entry_like(known, name, entry)
        if found is None:
            found = _parse_entry(name, entry, file)
            known[found[0][1:]] = found[0].nbytes
        info, begin, end = found
        tensors[name] = info
        ranges.append((begin, end, name))
    ranges.sort()
    expected = 0
    for begin, end, name in ranges:
        if begin != expected:
            what = "overlaps the one before" if begin < expected else "leaves a gap"
            raise CorruptCheckpoint(
                f"{file}: tensor {name!r} {what}: it starts at data byte {begin}, expected "
                f"{expected}"
            )
        expected = end
    if data_start + expected != file_size:
        raise CorruptCheckpoint(
            f"{file}: expected {data_start + expected} bytes, the file has {file_size}: it is "
            f"{'truncated' if file_size < data_start + expected else 'too long'}"
        )
    offsets = {name: data_start + begin for begin, _, name in ranges}
    return Header(tensors, offsets, metadata, data_start)


def parse_json(data: bytes, what: str) -> Any:
    """Parse JSON; an object must not have the same key twice.

    Raises:
        CorruptCheckpoint: with a message that starts with ``what``.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{what} is not valid JSON: {str(error)[:300]}") from error
    except MemoryError:
        raise CorruptCheckpoint(f"{what}: its JSON does not fit into memory") from None


def check_text(text: str) -> bool:
    """Whether ``text`` can be written: JSON can also spell halves of characters."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def fits(shape: Sequence[int], itemsize: int) -> bool:
    """Whether there can be a tensor of this shape, whose entries are at least 0.

    Sizes of 0 do not make the others harmless: strides are computed from these.
    """
    if len(shape) > MAX_DIMS:
        return False
    nbytes = itemsize
    for size in shape:
        nbytes *= size or 1
        if nbytes > MAX_TENSOR_BYTES:  # at once: a product of all could take minutes
            return False
    return True


_INT = frozenset((int,))  # `True` is an int in Python, but its type is another


def _entry_like(
    known: dict[tuple[Any, ...], int], name: str, entry: object
) -> tuple[TensorInfo, int, int] | None:
    """What `_parse_entry` finds, if it has found another of the same dtype and shape; else None.

    Args:
        known: dtype and shape of those that are right, with their bytes.
    """
    if type(entry) is not dict or len(entry) != 3 or not name.isascii():
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list:
        return None
    if len(offsets) != 2 or not _INT.issuperset(map(type, (*shape, *offsets))):
        return None
    begin, end = offsets
    info = TensorInfo(name, dtype, tuple(shape))
    if begin < 0 or end > MAX_TENSOR_BYTES or known.get(info[1:]) != end - begin:
        return None
    return info, begin, end


def _parse_entry(name: str, entry: object, file: str) -> tuple[TensorInfo, int, int]:
    def bad(why: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{file}: tensor {name[:200]!r}: {why}")

    if not check_text(name):
        raise bad("the name is no text")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad("expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise bad(f"unknown dtype {_short(dtype)}")
    for value in (shape, offsets):
        # `True` is an int in Python.
        if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
            raise bad(f"{_short(value)} is not a list of sizes")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"data_offsets {_short(offsets)} are not a range")
    info = TensorInfo(name, dtype, tuple(shape))
    if not fits(info.shape, info.itemsize) or offsets[1] > MAX_TENSOR_BYTES:
        raise bad(f"shape {_short(shape)} or data_offsets {_short(offsets)} are too large")
    if offsets[1] - offsets[0] != info.nbytes:
        raise bad(
            f"data_offsets {offsets!r} hold {offsets[1] - offsets[0]} bytes, but shape {shape} in "
            f"{dtype} has {info.nbytes}"
        )
    return info, *offsets


def _short(value: object) -> str:
    """For messages: an attacker's list may be as long as the header."""
    text = repr(value[:20] if isinstance(value, list) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:200]!r} occurs twice")
            seen.add(key)
    return result
