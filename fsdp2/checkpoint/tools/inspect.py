"""Finds, describes, verifies and streams checkpoints without a model.

Nothing is printed here, and no whole tensor is ever in memory. `export` and `compare` build on
this module; the command line (``fsdp2 ckpt``) shows the results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...dtensor.boxes import Box
from ..checkpointer import STEP, steps_in
from ..errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint
from ..format.header import Header, TensorInfo
from ..format.manifest import FOLDER, INDEX
from ..format.tensors import DTYPES
from ..loading.opening import open_source
from ..loading.reading import Target, read_into, verify_boxes
from ..loading.source import Extent, Source, Stored

PIECE_BYTES = 4 << 20  # of a tensor in memory at a time
OnBytes = Callable[[int], None] | None


# -- finding ------------------------------------------------------------------------------------


def find_checkpoint(
    path: str | os.PathLike[str], step: int | None = None
) -> tuple[Path, list[int]]:
    """The checkpoint that ``path`` refers to, and the steps to choose from.

    Args:
        path: a checkpoint's folder, an index, a safetensors file, or a `Checkpointer`'s folder.
        step: a step in a `Checkpointer`'s folder; the latest by default.

    Returns:
        What `open_source` opens, and the committed steps if ``path`` is a `Checkpointer`'s folder.

    Raises:
        CheckpointNotFound: if there is no such step.
        CheckpointError: if a step is asked for and ``path`` has none.
    """
    given = Path(path)
    steps = [] if (given / FOLDER).is_dir() else steps_in(given)
    if not steps:
        if step is not None:
            raise CheckpointError(f"{given} has no steps to choose from")
        return given, []
    number = steps[-1] if step is None else step
    if number not in steps:
        known = ", ".join(map(str, steps[-8:]))
        raise CheckpointNotFound(f"{given} has no committed step {number}; the last ones: {known}")
    return given / f"step-{number:06d}", steps


def open_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Source:
    """Open what `find_checkpoint` finds.

    Raises:
        CheckpointNotFound, CheckpointError: if there is none.
        CorruptCheckpoint: if what is there is damaged or incomplete.
    """
    return open_source(find_checkpoint(path, step)[0], by_manifests=True)


# -- streaming ----------------------------------------------------------------------------------


def stream(source: Source, stored: Stored, piece_numel: int) -> Iterator[Tensor]:
    """All elements of a tensor in row-major order, however many ranks wrote it.

    Args:
        piece_numel: maximum number of elements of a piece.

    Yields:
        1-dim CPU tensors, each with its own memory.

    Raises:
        CorruptCheckpoint: if a file is truncated meanwhile.
    """
    info = stored.info
    if not info.nbytes:
        return
    for box in Box.whole(info.shape).pieces(piece_numel, info.shape):
        piece = torch.empty(box.shape, dtype=DTYPES[info.dtype], device="cpu")
        read_into(source, [Target(info.name, stored, box, piece)])
        yield piece.view(-1)


# -- describing ---------------------------------------------------------------------------------


@dataclass
class Tally:
    """Numbers of tensors, elements and bytes."""

    num_tensors: int = 0
    num_elements: int = 0
    nbytes: int = 0

    def add(self, info: TensorInfo) -> None:
        self.num_tensors += 1
        self.num_elements += info.nbytes // info.itemsize
        self.nbytes += info.nbytes


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, and the files that hold its parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    files: list[str]


@dataclass
class Summary:
    """A summary of a checkpoint.

    Attributes:
        format: "fsdp2", or "safetensors" if another library wrote it.
        step: the step of a `Checkpointer`; None for weights alone.
        steps: the committed steps next to it.
        files: bytes of each file, by its path in the folder.
        model: tensors of the model, counting tied ones once; ``dtypes``: the same by dtype.
        optimizer: tensors of the optimizer, by kind of state.
        aliases: other names of tied tensors.
        layout: "shared", "per-rank" or "mixed"; None if another library wrote it.
        ranks: the ranks that wrote it.
        writers: the distinct values that ranks recorded for versions, host, time, ...
        verifiable: whether there are checksums.
        metadata: metadata in the header of a single file.
    """

    path: str
    format: str
    step: int | None
    steps: list[int]
    total_bytes: int
    files: dict[str, int]
    model: Tally = field(default_factory=Tally)
    dtypes: dict[str, Tally] = field(default_factory=dict)
    optimizer: dict[str, Tally] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    layout: str | None = None
    ranks: list[int] = field(default_factory=list)
    writers: dict[str, list[str]] = field(default_factory=dict)
    verifiable: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


def describe(source: Source, steps: list[int] | None = None) -> Summary:
    """Summarize an open checkpoint; reads no data."""
    files = _all_files(source)
    summary = Summary(
        path=str(source.path),
        format="fsdp2" if source.manifests else "safetensors",
        step=None,
        steps=steps or [],
        total_bytes=sum(files.values()),
        files=files,
        aliases=dict(sorted(source.aliases.items())),
        verifiable=source.verifiable,
        metadata=source.metadata,
    )
    for stored in source.tensors.values():
        summary.model.add(stored.info)
        summary.dtypes.setdefault(stored.info.dtype, Tally()).add(stored.info)
    for name, stored in source.optimizer.items():
        state = name.split(".")[1]
        summary.optimizer.setdefault(state, Tally()).add(stored.info)
    if source.manifests:
        manifests = list(source.manifests.values())
        match = STEP.fullmatch(manifests[0].name)
        summary.step = int(match[1]) if match else None
        whole = {files.whole for m in manifests for files in m.sets if files.groups}
        summary.layout = "mixed" if len(whole) > 1 else "per-rank" if False in whole else "shared"
        summary.ranks = list(manifests[0].ranks)
        for key in dict.fromkeys(key for m in manifests for key in m.writer):
            answers = {str(m.writer[key]) for m in manifests if key in m.writer}
            summary.writers[key] = sorted(answers)
    return summary


def entries(source: Source) -> list[TensorEntry]:
    """Every tensor, of the model first, by name."""
    found = []
    for table in (source.tensors, source.optimizer):
        for name, stored in sorted(table.items()):
            info = stored.info
            files = sorted({extent.file for extent in stored.extents})
            found.append(TensorEntry(name, info.dtype, info.shape, info.nbytes, files))
    return found


def _all_files(source: Source) -> dict[str, int]:
    """Data files, the index, and the files next to the manifests."""
    files = dict(sorted(source.files.items()))
    if not source.path.is_dir():
        return files
    others = [source.path / INDEX] if source.manifests or len(files) > 1 else []
    if source.manifests:
        others += sorted((source.path / FOLDER).iterdir())
    for path in others:
        if path.is_file():
            files[str(path.relative_to(source.path))] = path.stat().st_size
    return files


# -- verifying ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """What `check` compared.

    Attributes:
        checksums: whether there were any; if not, only the structure was checked.
        nbytes: bytes that were read; ``num_blocks``: blocks, each with a checksum.
    """

    checksums: bool
    num_tensors: int
    num_blocks: int
    num_files: int
    nbytes: int
    seconds: float


def bytes_to_check(source: Source) -> int:
    """How many bytes `check` will report to ``on_bytes``."""
    return sum(group.nbytes for m in source.manifests.values() for group in m.groups)


def check(source: Source, on_bytes: OnBytes = None) -> Verified:
    """Compare every byte of data and of small files with its checksum.

    Opening has checked the rest: manifests, headers, the index, and sizes. Without checksums there
    is nothing left to do.

    Args:
        source: an open checkpoint, preferably one that was just opened.
        on_bytes: called with the number of further bytes of data that are right.

    Raises:
        CorruptCheckpoint: naming the file, and the tensor and block if it is data.
    """
    start = time.monotonic()
    num_tensors = len(source.tensors) + len(source.optimizer)
    if not source.verifiable:
        return Verified(False, num_tensors, 0, len(source.files), 0, time.monotonic() - start)
    small = [(rank, name) for rank, m in source.manifests.items() for name in m.small_files]
    num_bytes = sum(len(source.small_file(rank, name)) for rank, name in small)
    num_bytes += verify_boxes(source, _every_chunk(source), on_bytes=on_bytes)
    return Verified(
        checksums=True,
        num_tensors=num_tensors,
        num_blocks=sum(
            len(group.checksums) // 4 for m in source.manifests.values() for group in m.groups
        ),
        num_files=len(_all_files(source)),
        nbytes=num_bytes,
        seconds=time.monotonic() - start,
    )


def _every_chunk(source: Source) -> Iterator[tuple[Stored, Box]]:
    """Each chunk as a separate tensor, including chunks with the same contents as others."""
    headers: dict[str, Header] = {}
    for _, chunk in source.chunks():
        if chunk.file not in headers:
            headers[chunk.file] = source.read_header(chunk.file)
        offset = chunk.place_in(headers[chunk.file])
        if offset is None:
            raise CorruptCheckpoint(
                f"{source.path}/{chunk.file}: tensor '{chunk.tensor.name}' is missing"
            )
        box = Box.whole(chunk.tensor.shape) if chunk.offset is None else chunk.box
        yield Stored(chunk.tensor, [Extent(chunk.file, box, offset)], [chunk]), chunk.box
