"""Reads manifests of version 1, which earlier releases wrote: a row for each box of each tensor.

Each manifest describes the tensors of its rows. The rank that led the save wrote the headers of all
files, so manifests have these as text.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ...dtensor.boxes import Box
from .header import TensorInfo, frame, info_of
from .manifest import BLOCK_BYTES, Group, SetOfFiles, kind_of
from .ranges import Ranges, parsed_ranges
from .strict import Check


class _Row(NamedTuple):
    tensor: TensorInfo
    file: str
    box: Box
    offset: int | None
    checksums: bytes


def sets_of_version_1(content: dict[str, Any], check: Check) -> tuple[SetOfFiles, ...]:
    """What `Manifest.sets` are in the content of such a manifest."""
    tensors = {
        name: check.tensor(name, *check.items(row, name))
        for name, row in check.table(content["tensors"], "tensors").items()
    }
    rows = [_parsed_row(row, tensors, check) for row in check.items(content["chunks"], "chunks")]
    sets, known = [], set[str]()
    for value in check.items(content["sets"], "sets"):
        sets.append(_parsed_set(value, rows, known, check))
        known |= sets[-1].files.keys()
    for row in rows:
        if row.file not in known:
            raise check.bad(f"the file of {row.tensor.name!r}", row.file)
    return tuple(sets)


def _parsed_set(value: Any, rows: list[_Row], known: set[str], check: Check) -> SetOfFiles:
    """One set, with what the rank wrote to its files, unless ``known`` sets have them too."""
    value = check.table(value, "a set of files")
    headers = check.texts(value["headers"], "headers")
    files = {}
    for file, size in check.table(value["sizes"], "sizes").items():
        header = frame(headers[file]) if file in headers else b""
        check.file_name(file, "sizes")
        files[file] = info_of(check.number(size, f"the size of {file!r}"), header)
    if not headers.keys() <= files.keys():
        raise check.bad("headers", "of other files than sizes")
    whole = value["whole"]
    if type(whole) is not bool:
        raise check.bad("whole", whole)
    table: list[tuple[str, TensorInfo]] = []
    groups = []
    for tensor, file, box, offset, checksums in rows:
        if file not in files or file in known:
            continue
        if (offset is None) != whole:
            raise check.bad(f"the offset of {tensor.name!r}", offset)
        groups.append(
            Group(
                file="" if whole else file,
                dtype=tensor.dtype,
                shape=tensor.shape,
                box=box,
                tensors=Ranges.of([len(table)]),
                offsets=b"" if offset is None else struct.pack("<Q", offset),
                checksums=checksums,
            )
        )
        table.append((file if whole else kind_of(file), tensor))
    ranks = parsed_ranges(value["ranks"], "ranks of a set", check)
    digest = check.text(value["digest"], "digest")
    headers = headers if whole else {}
    return SetOfFiles(ranks, files, whole, digest, headers, tuple(table), tuple(groups))


def _parsed_row(value: Any, tensors: dict[str, TensorInfo], check: Check) -> _Row:
    name, file, start, shape, offset, text = check.items(value, "a chunk")
    tensor = tensors[name]
    box = Box(check.numbers(start, "start of a box"), check.numbers(shape, "shape of a box"))
    if not box.within(tensor.shape) or not box.numel:
        raise check.bad(f"a box of {name!r}", f"{box} in {tensor.shape}")
    checksums = b"".join(
        int.to_bytes(int(text[at : at + 8], 16), 4, "little")
        for at in range(0, len(_hexadecimal(text)), 8)
    )
    if len(checksums) != 4 * -(-box.numel * tensor.itemsize // BLOCK_BYTES):
        raise check.bad(f"the checksums of {name!r}", text)
    if offset is not None:
        check.number(offset, f"the offset of {name!r}")
    file = check.file_name(file, f"the file of {name!r}")
    return _Row(tensor, file, box, offset, checksums)


def _hexadecimal(text: str) -> str:
    # `int` takes signs and spaces, too.
    if text and not (text.isascii() and text.isalnum()):
        raise ValueError("checksums are no hexadecimal digits")
    return text
