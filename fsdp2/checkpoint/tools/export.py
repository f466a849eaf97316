"""Exports any checkpoint as ordinary safetensors files of whole tensors, as a stream.

A few MiB are in memory at a time, whatever the size of the tensors. The result appears under its
name by one rename, once all of it is durable.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...common.memory import memory_of
from ...dtensor.boxes import Box
from ..errors import CheckpointError, CheckpointExists
from ..format.disk import Disk, make_folder
from ..format.header import FilePlan, TensorInfo, frame, plan_file, plan_files
from ..format.manifest import INDEX
from ..format.tensors import DTYPES
from ..loading.reading import verify_boxes
from ..loading.source import Source, Stored
from ..saving.writing import MAX_FILE_BYTES
from .inspect import PIECE_BYTES, OnBytes, stream

GROUP_BYTES = 64 << 20
EXPORT_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass
class Exported:
    """What `export` wrote.

    Attributes:
        files: bytes of each file.
        nbytes: bytes of the tensors that were read.
        verified: whether they were compared with their checksums.
        not_finite: how many finite values of a tensor became infinite in the new dtype.
    """

    path: Path
    files: dict[str, int] = field(default_factory=dict)
    num_tensors: int = 0
    nbytes: int = 0
    verified: bool = False
    not_finite: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def bytes_to_export(source: Source, *, with_optimizer: bool = False) -> int:
    """How many bytes `export` will report to ``on_bytes``."""
    tables = (source.tensors, source.optimizer) if with_optimizer else (source.tensors,)
    return sum(stored.info.nbytes for table in tables for stored in table.values())


def export(
    source: Source,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    single: bool = False,
    verify: bool = True,
    with_optimizer: bool = False,
    on_bytes: OnBytes = None,
) -> Exported:
    """Write the model's tensors as Hugging Face's libraries expect them.

    Args:
        source: an open checkpoint of any layout, of any number of ranks. Other names of tied
            tensors are left out, as these libraries do.
        out: a folder to be created, or a file if it ends in ".safetensors".
        dtype: "bf16", "fp16" or "fp32": converts the model's floating point tensors.
        max_file_bytes: largest amount of data in one file; a larger tensor gets its own file.
        single: write one file, however large.
        verify: compare each tensor with its checksums, if there are any, before it is written.
        with_optimizer: write the optimizer's tensors too, unconverted, to separate files.
        on_bytes: called with the number of further bytes of the source that were written.

    Raises:
        CheckpointExists: if ``out`` exists.
        CheckpointError: if its parent cannot be made or written to, or the options
            contradict each other.
        CorruptCheckpoint: if a checksum is wrong; then nothing appears under ``out``.
        OSError: if the disk is full or broken; then nothing appears under ``out``.
    """
    start = time.monotonic()
    target = Path(os.path.abspath(out))
    to_file = target.name.endswith(".safetensors")
    if to_file and with_optimizer:
        raise CheckpointError(
            f"{target.name} is one file, of the model alone: the optimizer needs a folder"
        )
    make_folder(target.parent)
    plans = _plan(source, dtype, None if single or to_file else max_file_bytes, with_optimizer)
    result = Exported(target, verified=verify and source.verifiable)
    job = _Export(source, Disk(), result, on_bytes)
    with job.disk.directory(target.parent) as parent:
        _refuse_existing(job.disk, target, parent)
        # Named like the staging folder of a save: if this process dies, a later save removes it.
        staging = f".{target.name}.{secrets.token_hex(8)}-1.tmp"
        try:
            _make_staging(job.disk, staging, target, parent)
            with job.disk.directory(staging, parent) as folder:
                for file, plan in plans.items():
                    job.write_file(file, plan, folder)
                _write_index(job.disk, plans, folder)
                job.disk.sync(folder, staging)
            _refuse_existing(job.disk, target, parent)
            if to_file:
                (file,) = plans
                job.disk.rename(f"{staging}/{file}", target.name, parent)
                job.disk.remove_tree(staging, parent)
                result.files = {target.name: result.files[file]}
            else:
                job.disk.rename(staging, target.name, parent)
        except BaseException:
            job.disk.remove_tree(staging, parent)
            raise
        job.disk.sync(parent, str(target.parent))
    result.seconds = time.monotonic() - start
    return result


def _make_staging(disk: Disk, staging: str, target: Path, parent: int) -> None:
    try:
        disk.make_directory(staging, parent)
    except OSError as error:
        message = f"{target.parent} cannot be written to: {error.strerror}"
        raise CheckpointError(message) from error


def _refuse_existing(disk: Disk, target: Path, parent: int) -> None:
    if disk.exists(target.name, parent):
        raise CheckpointExists(f"{target} exists already: choose another name, or remove it first")


def _plan(
    source: Source, dtype: str | None, max_file_bytes: int | None, with_optimizer: bool
) -> dict[str, FilePlan]:
    """The files to write, by name."""
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype must be one of {[*EXPORT_DTYPES]}, got {dtype!r}")
    kinds = {"model": [_converted(s.info, dtype) for s in source.tensors.values()]}
    if with_optimizer and source.optimizer:
        kinds["optim"] = [s.info for s in source.optimizer.values()]
    files = {}
    for kind, tensors in kinds.items():
        if max_file_bytes is None:
            plans = [plan_file(tensors)]
        else:
            plans = plan_files(tensors, max_file_bytes)
        for i, plan in enumerate(plans):
            number = f"-{i + 1:05d}-of-{len(plans):05d}" if len(plans) > 1 else ""
            files[f"{kind}{number}.safetensors"] = plan
    return files


def _converted(info: TensorInfo, dtype: str | None) -> TensorInfo:
    if dtype is None or not DTYPES[info.dtype].is_floating_point:
        return info
    return info._replace(dtype=EXPORT_DTYPES[dtype])


def _write_index(disk: Disk, plans: dict[str, FilePlan], folder: int) -> None:
    """Hugging Face's index, if the model is in several files."""
    models = {file: plan for file, plan in plans.items() if file.startswith("model")}
    if len(models) < 2:
        return
    weight_map = {t.name: file for file, plan in models.items() for t in plan.tensors}
    total_bytes = sum(t.nbytes for plan in models.values() for t in plan.tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    disk.write_file(INDEX, text.encode(), folder, unique="index")


def _groups(tensors: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Groups to be verified, then written: few enough bytes to be read again from the cache."""
    group: list[TensorInfo] = []
    filled = 0
    for tensor in tensors:
        group.append(tensor)
        filled += tensor.nbytes
        if filled >= GROUP_BYTES:
            yield group
            group, filled = [], 0
    yield group


@dataclass
class _Export:
    source: Source
    disk: Disk
    result: Exported
    on_bytes: OnBytes

    def write_file(self, file: str, plan: FilePlan, folder: int) -> None:
        """Write the data, then, once it is durable, the header that makes the file readable."""
        table = self.source.optimizer if file.startswith("optim") else self.source.tensors
        fd = self.disk.create(file, plan.size, folder)
        try:
            for group in _groups(plan.tensors):
                if self.result.verified:
                    verify_boxes(self.source, ((table[t.name], Box.whole(t.shape)) for t in group))
                for info in group:
                    self._write_tensor(fd, file, table[info.name], info, plan.offsets[info.name])
            self.disk.sync(fd, file)
            self.disk.write_at(fd, frame(plan.header), 0, file)
            self.disk.sync(fd, file)
        finally:
            self.disk.close(fd)
        self.result.files[file] = plan.size

    def _write_tensor(
        self, fd: int, file: str, stored: Stored, info: TensorInfo, offset: int
    ) -> None:
        piece_numel = max(1, PIECE_BYTES // max(stored.info.itemsize, info.itemsize))
        for piece in stream(self.source, stored, piece_numel):
            values = piece
            if info.dtype != stored.info.dtype:
                values = piece.to(DTYPES[info.dtype])
                self._count_not_finite(info, piece, values)
            memory = memory_of(values)
            self.disk.write_at(fd, memory, offset, file)
            offset += len(memory)
            if self.on_bytes is not None:
                self.on_bytes(piece.numel() * piece.element_size())
        self.result.num_tensors += 1
        self.result.nbytes += stored.info.nbytes

    def _count_not_finite(self, info: TensorInfo, before: Tensor, after: Tensor) -> None:
        if bool(after.isfinite().all()):
            return
        if before.element_size() == 1:
            before = before.float()  # older versions of torch have no `isfinite` for 8-bit floats
        num = int(torch.count_nonzero(before.isfinite() & ~after.isfinite()))
        if num:
            self.result.not_finite[info.name] = self.result.not_finite.get(info.name, 0) + num
