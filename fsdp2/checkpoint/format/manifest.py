"""What each rank records about its part of a checkpoint.

A manifest is also the rank's marker: once it exists under its name, everything it lists is durable.
It is two lines of JSON. The second holds the checksum of the first, so that a damaged manifest is
detected too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ...dtensor.boxes import Box
from ..errors import CorruptCheckpoint
from .header import ITEM_BITS, TensorInfo, bytes_of, fits, parse_json
from .ranks import Ranks, parsed_ranks
from .strict import Check, converted, is_file_name

VERSION = 2  # of 1, ranks are lists and not ranges
FOLDER = ".fsdp2"
FAILED = "failed-*"  # every `failed_name`
ANY_FAILED = "failed"  # is there if any of them is
BLOCK_BYTES = 1 << 20  # of data per checksum
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of a tensor, and whether it is the one that writes it.

    Attributes:
        kind: "model" or "optim": which files it belongs to.
        box: this rank's part. ``typical``: the first rank's, from which the layout of the files
            is chosen, so that all ranks choose the same.
        ranks: all ranks that hold a part.
        writes: whether this rank writes it; a replica does not.
    """

    kind: str
    tensor: TensorInfo
    box: Box
    typical: Box
    ranks: tuple[int, ...]
    writes: bool


class Chunk(NamedTuple):
    """A box of one tensor that one rank wrote.

    Attributes:
        tensor: the whole tensor.
        file: its name in the checkpoint's folder.
        box: which part of the tensor.
        offset: None in a file of whole tensors, where the header says where the box is; in a file
            of one rank the first byte of the box, which is contiguous there.
        checksums: CRC32 of every block of 1 MiB of the box's bytes in row-major order.
    """

    tensor: TensorInfo
    file: str
    box: Box
    offset: int | None
    checksums: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return bytes_of(self.tensor.dtype, self.box.shape)


@dataclass(frozen=True)
class SetOfFiles:
    """Files that a set of ranks writes together.

    Attributes:
        ranks: the ranks that share the tensors in them.
        sizes: bytes of each file.
        whole: whether the files hold whole tensors; otherwise each holds boxes of one rank.
        digest: of names, headers and sizes; equal on all ranks of the set.
        headers: header of each file; only in the manifest of the set's first rank.
    """

    ranks: Ranks
    sizes: dict[str, int]
    whole: bool
    digest: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a checkpoint.

    Attributes:
        nonce: identifies the attempt; manifests of different attempts never belong together.
        rank, ranks: this rank and all ranks of the save, as global ranks.
        aliases: other names of tied tensors.
        small_files: SHA-256 of this rank's files of small state.
        writer: who wrote it: versions, host, time.
        optimizer_names: a digest of the names in this rank's optimizers; None in old manifests.
    """

    nonce: str
    name: str
    rank: int
    ranks: Ranks
    sets: tuple[SetOfFiles, ...]
    chunks: tuple[Chunk, ...]
    aliases: dict[str, str]
    small_files: dict[str, str]
    writer: dict[str, Any]
    optimizer_names: str | None = None


def kind_of(file: str) -> str:
    """Whether the tensors of a data file are of the "model" or of its optimizer, "optim"."""
    return "optim" if file.startswith("optim") else "model"


def marker_name(rank: int, num_ranks: int) -> str:
    """The file name of the manifest of ``rank`` in `FOLDER`."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.json"


def failed_name(rank: int) -> str:
    """The file by which ``rank`` says that it gave up this attempt."""
    return f"failed-{rank:05d}"


def state_name(rank: int) -> str:
    """The file of a rank's values that are not tensors."""
    return f"state-{rank:05d}.json"


def own_name(rank: int) -> str:
    """The file of tensors that only this rank has: buffers, and state that is not sharded."""
    return f"own-{rank:05d}.safetensors"


def parse_marker_name(name: str) -> tuple[int, int] | None:
    """Rank and number of ranks of a marker's file name; None for any other file."""
    match = re.fullmatch(r"rank-(\d{5,})-of-(\d{5,})\.json", name)
    return (int(match[1]), int(match[2])) if match else None


def dump(manifest: Manifest) -> bytes:
    """Encode a manifest as the bytes of a marker file."""
    tensors: dict[str, list[Any]] = {}
    chunks = []
    for chunk in manifest.chunks:
        tensors[chunk.tensor.name] = [chunk.tensor.dtype, list(chunk.tensor.shape)]
        checksums = "".join(f"{crc:08x}" for crc in chunk.checksums)
        box = [list(chunk.box.start), list(chunk.box.shape)]
        chunks.append([chunk.tensor.name, chunk.file, *box, chunk.offset, checksums])
    content = {
        "format": "fsdp2-checkpoint",
        "version": VERSION,
        "nonce": manifest.nonce,
        "name": manifest.name,
        "rank": manifest.rank,
        "ranks": manifest.ranks.listed(),
        "sets": [
            {
                "ranks": s.ranks.listed(),
                "sizes": s.sizes,
                "whole": s.whole,
                "digest": s.digest,
                "headers": s.headers,
            }
            for s in manifest.sets
        ],
        "tensors": tensors,
        "chunks": chunks,
        "aliases": manifest.aliases,
        "small_files": manifest.small_files,
        "writer": manifest.writer,
        "optimizer_names": manifest.optimizer_names,
    }
    line = json.dumps(content, separators=(",", ":")).encode()
    return line + b'\n{"sha256":"' + hashlib.sha256(line).hexdigest().encode() + b'"}\n'


def load(data: bytes, file: str) -> Manifest:
    """The inverse of `dump`.

    Raises:
        CorruptCheckpoint: if ``data`` is not what `dump` returned.
    """
    line, _, rest = data.partition(b"\n")
    check = Check(f"{file}: not a manifest")
    signature = check.table(parse_json(rest, f"{check.what}: it"), "the checksum")
    if signature.get("sha256") != hashlib.sha256(line).hexdigest():
        raise CorruptCheckpoint(f"{file}: the checksum of the manifest is wrong")
    content = check.table(parse_json(line, f"{check.what}: it"), "the content")
    kind, version = content.get("format"), content.get("version")
    if kind != "fsdp2-checkpoint" or type(version) is not int or version > VERSION:
        raise CorruptCheckpoint(
            f"{file}: format {str(kind)[:40]!r} version {str(version)[:40]}: this fsdp2 reads up "
            f"to version {VERSION}"
        )
    # The checksum tells damage. An attacker's is right: so the kind of every value is checked.
    return converted(check.what, lambda: _parsed(content, check))


def _parsed(content: dict[str, Any], check: Check) -> Manifest:
    described = check.table(content["tensors"], "tensors")
    tensors = _tensors_at_once(described)
    if tensors is None:
        tensors = {name: _parsed_tensor(name, each, check) for name, each in described.items()}
    rows = check.items(content["chunks"], "chunks")
    chunks = _chunks_at_once(rows, tensors)
    if chunks is None:
        chunks = tuple(_parsed_chunk(each, tensors, check) for each in rows)
    names = content.get("optimizer_names")
    return Manifest(
        nonce=check.text(content["nonce"], "nonce"),
        name=check.text(content["name"], "name"),
        rank=check.number(content["rank"], "rank"),
        ranks=parsed_ranks(content["ranks"], "ranks", check),
        sets=tuple(_parsed_set(each, check) for each in check.items(content["sets"], "sets")),
        chunks=chunks,
        aliases=check.texts(content["aliases"], "aliases"),
        small_files={
            check.file_name(name, "small_files"): digest
            for name, digest in check.texts(content["small_files"], "small_files").items()
        },
        writer={
            key: value if isinstance(value, str | int | float) else f"a {type(value).__name__}"
            for key, value in check.table(content["writer"], "writer").items()
        },
        optimizer_names=None if names is None else check.text(names, "optimizer_names"),
    )


def _parsed_set(content: Any, check: Check) -> SetOfFiles:
    content = check.table(content, "a set of files")
    sizes = {
        check.file_name(file, "sizes"): check.number(size, f"the size of {file!r}")
        for file, size in check.table(content["sizes"], "sizes").items()
    }
    headers = check.texts(content["headers"], "headers")
    if not headers.keys() <= sizes.keys():
        raise check.bad("headers", "of other files than sizes")
    if type(content["whole"]) is not bool:
        raise check.bad("whole", content["whole"])
    ranks = parsed_ranks(content["ranks"], "ranks of a set", check)
    return SetOfFiles(
        ranks, sizes, content["whole"], check.text(content["digest"], "digest"), headers
    )


# Tensors and chunks are most of a manifest, and nearly always as they should be. So they are first
# checked all at once; if anything is unusual, one by one, for an error that names it.
_INT, _LIST = frozenset((int,)), frozenset((list,))
_INT_OR_NONE = frozenset((int, type(None)))


def _tensors_at_once(described: dict[str, Any]) -> dict[str, TensorInfo] | None:
    """What `_parsed_tensor` returns for each; None unless all are known to be right."""
    try:
        dtypes, shapes = zip(*described.values(), strict=True)
        if not _LIST.issuperset(map(type, chain(described.values(), shapes))):
            return None
        if not _INT.issuperset(map(type, chain.from_iterable(shapes))):
            return None
        found = {
            name: TensorInfo(name, dtype, tuple(shape))
            for name, dtype, shape in zip(described, dtypes, shapes, strict=True)
        }
        for dtype, shape in {info[1:] for info in found.values()}:
            if min(shape, default=0) < 0 or not fits(shape, ITEM_BITS[dtype] // 8):
                return None
    except (KeyError, TypeError, ValueError):
        return None
    return found


def _chunks_at_once(rows: list[Any], tensors: dict[str, TensorInfo]) -> tuple[Chunk, ...] | None:
    """What `_parsed_chunk` returns for each; None unless all are known to be right.

    Equal boxes are one object.
    """
    try:
        _, files, starts, shapes, offsets, _ = zip(*rows, strict=True)
        right = (
            _LIST.issuperset(map(type, chain(rows, starts, shapes)))
            and _INT.issuperset(map(type, chain.from_iterable(chain(starts, shapes))))
            and _INT_OR_NONE.issuperset(map(type, offsets))
            and all(map(is_file_name, set(files)))
            and all(0 <= offset < 2**63 for offset in set(offsets) - {None})
        )
        if not right:
            return None
        boxes: dict[object, Box] = {}
        chunks = []
        for name, file, start, shape, offset, text in rows:
            tensor = tensors[name]
            key = (tensor.shape, tuple(start), tuple(shape))
            box = boxes.get(key)
            if box is None:
                box = boxes[key] = Box(key[1], key[2])
                if not box.within(tensor.shape):
                    return None
            chunks.append(Chunk(tensor, file, box, offset, _checksums(text)))
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(chunks)


def _checksums(text: str) -> tuple[int, ...]:
    # `int` takes signs and spaces, too.
    if text and not (str.isascii(text) and str.isalnum(text)):
        raise ValueError("checksums are no hexadecimal digits")
    return tuple([int(text[i : i + 8], 16) for i in range(0, len(text), 8)])


def _parsed_tensor(name: str, content: Any, check: Check) -> TensorInfo:
    dtype, shape = check.items(content, name)
    shape = check.numbers(shape, f"the shape of {name!r}")
    if dtype not in ITEM_BITS or not fits(shape, ITEM_BITS[dtype] // 8):
        raise check.bad(f"the dtype and shape of {name!r}", f"{dtype} {list(shape)}")
    return TensorInfo(name, dtype, shape)


def _parsed_chunk(content: Any, tensors: dict[str, TensorInfo], check: Check) -> Chunk:
    name, file, start, shape, offset, checksums = check.items(content, "a chunk")
    box = Box(check.numbers(start, "start of a box"), check.numbers(shape, "shape of a box"))
    if not box.within(tensors[name].shape):
        raise check.bad(f"a box of {name!r}", f"{box} in {tensors[name].shape}")
    return Chunk(
        tensors[name],
        check.file_name(file, f"the file of {name!r}"),
        box,
        None if offset is None else check.number(offset, f"the offset of {name!r}"),
        _checksums(checksums),
    )


def hf_index_bytes(sets: Iterable[SetOfFiles]) -> bytes | None:
    """Hugging Face's index of the model's files, as it is written; None if there is one file.

    Files of single ranks are not in it, because readers of an index expect whole tensors.
    """
    files_of = [
        (file, header)
        for files in sets
        for file, header in files.headers.items()
        if files.whole and file.startswith("model")
    ]
    if len({file for file, _ in files_of}) <= 1:
        return None
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for file, header in files_of:
        for name, entry in json.loads(header).items():
            # Ranks that share no files may have written the same tensor: the first counts.
            if name != "__metadata__" and weight_map.setdefault(name, file) == file:
                total_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
    if len(set(weight_map.values())) <= 1:
        return None
    index: dict[str, Any] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def digest_of_hf_index(index: Any) -> str:
    """The SHA-256 of Hugging Face's index, however its JSON is written."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
