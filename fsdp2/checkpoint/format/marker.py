"""A manifest as the bytes of a rank's marker.

Two lines of JSON, and numbers: offsets and checksums of all groups. The second line holds the
checksum of these, so that a damaged manifest is detected too. Behind them are the values
of the rank that are not tensors, with a separate checksum: the rank that commits does not read
them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, BinaryIO

from ...dtensor.boxes import Box
from ..errors import CorruptCheckpoint
from .header import MAX_HEADER_BYTES, TensorInfo, frame, info_of, parse_json
from .manifest import BLOCK_BYTES, Group, Manifest, SetOfFiles, kind_of
from .ranges import parsed_ranges
from .small_state import MAX_MANIFEST_BYTES, listed_small_files, parsed_small_files
from .strict import Check, converted, opened_small
from .version1 import sets_of_version_1

VERSION = 2


def dump(manifest: Manifest, values: bytes = b"") -> bytes:
    """Encode a manifest as the bytes of a marker file.

    Args:
        values: the small file that is to stand at its end.
    """
    content = {
        "format": "fsdp2-checkpoint",
        "version": VERSION,
        "nonce": manifest.nonce,
        "name": manifest.name,
        "rank": manifest.rank,
        "ranks": manifest.ranks.listed(),
        "sets": [_listed(files) for files in manifest.sets],
        "aliases": manifest.aliases,
        "small_files": listed_small_files(manifest.small_files),
        "writer": manifest.writer,
        "optimizer_names": manifest.optimizer_names,
    }
    line = json.dumps(content, separators=(",", ":")).encode()
    numbers = b"".join(group.offsets + group.checksums for group in manifest.groups)
    return signed(line, numbers) + values


def signed(line: bytes, numbers: bytes = b"") -> bytes:
    """The bytes of a marker whose first line is ``line``."""
    second = f'{{"sha256":"{_digest(line, numbers)}","numbers":{len(numbers)}}}'
    return b"".join((line, b"\n", second.encode(), b"\n", numbers))


def read_marker(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a marker, without the values behind the manifest.

    Raises:
        FileNotFoundError: if there is none.
        CorruptCheckpoint: if it is not a file, or too large.
    """
    with opened_small(path, MAX_MANIFEST_BYTES) as file:
        return manifest_in(file)


def manifest_in(file: BinaryIO) -> bytes:
    """The same of an open marker."""
    line, second = file.readline(), file.readline()
    found = re.search(rb'"numbers":(\d{1,18})\}$', second.rstrip())
    size = os.fstat(file.fileno()).st_size  # not of more: memory is taken before it is read
    return line + second + file.read(min(int(found[1]), size) if found else -1)


def _digest(line: bytes, numbers: bytes) -> str:
    digest = hashlib.sha256(line)
    digest.update(numbers)
    return digest.hexdigest()


def _listed(files: SetOfFiles) -> dict[str, Any]:
    return {
        "ranks": files.ranks.listed(),
        "files": files.files,
        "whole": files.whole,
        "digest": files.digest,
        "headers": files.headers,
        "tensors": [[where, *info] for where, info in files.tensors],
        "groups": [
            [g.file, g.dtype, g.shape, g.box.start, g.box.shape, g.tensors.listed()]
            for g in files.groups
        ],
    }


def load(data: bytes, file: str) -> Manifest:
    """The inverse of `dump`. The values may be missing.

    Raises:
        CorruptCheckpoint: if ``data`` is not what `dump` returned.
    """
    line, _, rest = data.partition(b"\n")
    second, _, behind = rest.partition(b"\n")
    check = Check(f"{file}: not a manifest")
    signature = check.table(parse_json(second, f"{check.what}: it"), "the checksum")
    numbers = behind[: check.number(signature.get("numbers", len(behind)), "numbers")]
    if signature.get("sha256") != _digest(line, numbers):
        raise CorruptCheckpoint(f"{file}: the checksum of the manifest is wrong")
    content = check.table(parse_json(line, f"{check.what}: it"), "the content")
    kind, version = content.get("format"), content.get("version")
    if kind != "fsdp2-checkpoint" or type(version) is not int or version > VERSION:
        raise CorruptCheckpoint(
            f"{file}: format {str(kind)[:40]!r} version {str(version)[:40]}: this fsdp2 reads up "
            f"to version {VERSION}"
        )
    # The checksum reveals damage. An attacker's is right: so the kind of every value is checked.
    return converted(check.what, lambda: _parsed(content, numbers, check))


def _parsed(content: dict[str, Any], numbers: bytes, check: Check) -> Manifest:
    if content["version"] == 1:
        sets = sets_of_version_1(content, check)
    else:
        sets = _parsed_sets(content, numbers, check)
    names = content.get("optimizer_names")
    return Manifest(
        nonce=check.text(content["nonce"], "nonce"),
        name=check.text(content["name"], "name"),
        rank=check.number(content["rank"], "rank"),
        ranks=parsed_ranges(content["ranks"], "ranks", check),
        sets=sets,
        aliases=check.texts(content["aliases"], "aliases"),
        small_files=parsed_small_files(content["small_files"], check),
        writer={
            key: value if isinstance(value, str | int | float) else f"a {type(value).__name__}"
            for key, value in check.table(content["writer"], "writer").items()
        },
        optimizer_names=None if names is None else check.text(names, "optimizer_names"),
    )


class _Numbers:
    """The offsets and checksums of all groups, one after the other."""

    def __init__(self, data: bytes, check: Check) -> None:
        self._data = data
        self._check = check
        self._at = 0

    def next(self, num_bytes: int) -> bytes:
        begin = self._at
        self._at += num_bytes
        if self._at > len(self._data):
            raise self._check.bad("numbers", f"{len(self._data)} bytes")
        return self._data[begin : self._at]

    def check_all_read(self) -> None:
        if self._at != len(self._data):
            raise self._check.bad("numbers", f"{len(self._data)} bytes")


def _parsed_sets(content: dict[str, Any], data: bytes, check: Check) -> tuple[SetOfFiles, ...]:
    numbers = _Numbers(data, check)
    rank = check.number(content["rank"], "rank")
    values = check.items(content["sets"], "sets")
    sets = tuple([_parsed_set(value, rank, numbers, check) for value in values])
    numbers.check_all_read()
    if len({files.ranks for files in sets}) < len(sets):
        raise check.bad("sets", "two of the same ranks")
    return sets


def _parsed_set(value: Any, rank: int, numbers: _Numbers, check: Check) -> SetOfFiles:
    value = check.table(value, "a set of files")
    files = check.files(value["files"])
    headers = check.texts(value["headers"], "headers")
    if not headers.keys() <= files.keys():
        raise check.bad("headers", "of other files")
    for file, header in headers.items():
        if len(header) > MAX_HEADER_BYTES or files[file] != info_of(
            files[file].size, frame(header)
        ):
            raise check.bad(f"the header of {file!r}", "another than its digest is of")
    whole = value["whole"]
    if type(whole) is not bool:
        raise check.bad("whole", whole)
    places = files.keys() if whole else {"model", "optim"}
    rows = check.items(value["tensors"], "tensors")
    groups = check.items(value["groups"], "groups")
    ranks = parsed_ranges(value["ranks"], "ranks of a set", check)
    if (headers or rows) and rank != ranks[0]:
        raise check.bad("the rank that describes a set", rank)
    tensors = tuple([_parsed_tensor(row, places, check) for row in rows])
    if len({(kind_of(where), info.name) for where, info in tensors}) < len(tensors):
        raise check.bad("tensors", "two of one name")
    return SetOfFiles(
        ranks=ranks,
        files=files,
        whole=whole,
        digest=check.text(value["digest"], "digest"),
        headers=headers,
        tensors=tensors,
        groups=tuple([_parsed_group(g, {""} if whole else files, numbers, check) for g in groups]),
    )


def _parsed_tensor(row: Any, places: Any, check: Check) -> tuple[str, TensorInfo]:
    where, name, dtype, shape = check.items(row, "a tensor")
    if where not in places:
        raise check.bad(f"the file of {name!r}", where)
    return where, check.tensor(name, dtype, shape)


def _parsed_group(row: Any, files: Any, numbers: _Numbers, check: Check) -> Group:
    file, dtype, shape, start, box_shape, tensors = check.items(row, "a group")
    if file not in files:
        raise check.bad("the file of a group", file)
    info = check.tensor("a group", dtype, shape)
    box = Box(check.numbers(start, "start of a box"), check.numbers(box_shape, "shape of a box"))
    if not box.within(info.shape) or not box.numel:
        raise check.bad("a box of a group", f"{box} in {info.shape}")
    positions = parsed_ranges(tensors, "the tensors of a group", check)
    num_blocks = -(-box.numel * info.itemsize // BLOCK_BYTES)
    offsets = numbers.next(8 * len(positions) if file else 0)
    checksums = numbers.next(4 * len(positions) * num_blocks)
    return Group(file, dtype, info.shape, box, positions, offsets, checksums)
