"""A checkpoint of many ranks, made by one process. What the benchmarks know of the format is here.

One rank saves for real, as that rank of a `fake` group of n. From its manifest follow those of all
others: its parts are moved to their rows, and the package's own functions plan, encode and write.
All values are zeros. So the data files need no blocks on the disk, and checksums are those of
zeros: the checkpoint can be committed, opened, verified and loaded like any other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed import fake_pg  # registers the backend

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer, agreement, checkpointer
from fsdp2.checkpoint.format.checksum import crc32
from fsdp2.checkpoint.format.disk import Disk
from fsdp2.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FOLDER,
    Manifest,
    TensorPart,
    marker_name,
)
from fsdp2.checkpoint.loading.training import Loaded
from fsdp2.checkpoint.saving.attempt import Attempt
from fsdp2.checkpoint.saving.capture import Captured
from fsdp2.checkpoint.saving.job import SaveJob, SaveOptions, write_small_files
from fsdp2.checkpoint.saving.training import capture_training
from fsdp2.checkpoint.saving.writing import SavePlan, plan_save
from fsdp2.dtensor.boxes import Box
from fsdp2.dtensor.placement import box_of

assert fake_pg
STEP = 1
NAME = f"step-{STEP:06d}"
NONCE = f"{'0' * 20}{'a' * 16}-1"
LLAMA_8B = 291  # tensors
COLUMNS = 16
Optimizer = torch.optim.Optimizer


# -- a model, and one rank of n -----------------------------------------------------------------


def shapes_of(num_tensors: int, n: int) -> dict[str, tuple[int, ...]]:
    """A model with the names of Llama's. With 291 tensors, Llama 3 8B; else so narrow that its data
    counts for little, and each of n ranks has rows of every tensor, as many as every other."""
    hidden, kv, ffn, vocab = 2 * n, n, 4 * n, 8 * n
    columns: dict[int, int] = {}
    if num_tensors == LLAMA_8B:
        hidden, kv, ffn, vocab = 4096, 1024, 14336, 128256
        columns = {size: size for size in (hidden, ffn)}
    wide, inner = columns.get(hidden, COLUMNS), columns.get(ffn, COLUMNS)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (hidden, wide),
        "self_attn.k_proj": (kv, wide),
        "self_attn.v_proj": (kv, wide),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (ffn, wide),
        "mlp.up_proj": (ffn, wide),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = (
        (f"model.layers.{i}.{name}.weight", shape)
        for i in itertools.count()
        for name, shape in layer.items()
    )
    return {
        "model.embed_tokens.weight": (vocab, wide),
        **dict(itertools.islice(layers, num_tensors - 3)),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, wide),
    }


@contextmanager
def rank_of(n: int, rank: int) -> Iterator[None]:
    """This process is one of n ranks; there are no others. The same rank to the end: meshes and
    what is known of them outlive their group."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=n)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(num_tensors: int) -> tuple[nn.Module, Optimizer]:
    """What this rank has of the model, and an optimizer that has not stepped yet."""
    n = dist.get_world_size()
    model = nn.Module()
    for name, shape in shapes_of(num_tensors, n).items():
        path, _, last = name.rpartition(".")
        module = model
        for part in path.split("."):
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty(shape, device="meta")))
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, torch.optim.AdamW(model.parameters())


def give_state(model: nn.Module, optimizer: Optimizer) -> None:
    """Give the optimizer the state that it has in training, of zeros."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()


# -- saving -------------------------------------------------------------------------------------


@dataclass
class OwnSave:
    """What one rank saved for real."""

    captured: Captured
    manifest: Manifest


def save(
    model: nn.Module, optimizer: Optimizer, root: Path, layout: str, name: str = NAME
) -> OwnSave:
    """Save as this rank, without the agreement of ranks that precedes a save."""
    n, rank = dist.get_world_size(), dist.get_rank()
    ranks = tuple(range(n))
    captured = capture_training(model, optimizer, None, {"position": 0}, ranks, rank)
    job = SaveJob(root, name, NONCE, rank, ranks, captured, SaveOptions(layout=layout))
    job.begin()
    with mock.patch.object(job.attempt, "mark", wraps=job.attempt.mark) as mark:
        job.write()
    return OwnSave(captured, mark.call_args.args[0])


class _Unsynced(Disk):
    """Thousands of ranks on one disk would wait for it, and need not."""

    def sync(self, fd: int, name: str) -> None:
        pass


class _Ranks(tuple[int, ...]):
    """All ranks. A plan hashes and compares them for every tensor, and here for every rank."""

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        if "hash" not in self.__dict__:
            self.__dict__["hash"] = tuple.__hash__(self)
        return self.__dict__["hash"]


def synthesise(root: Path, own: OwnSave, layout: str) -> None:
    """Write what all ranks write in a save, up to their markers; nothing is committed.

    Raises:
        AssertionError: if the manifest of the rank that saved for real is not the one it wrote.
    """
    ranks = _Ranks(own.manifest.ranks)
    for rank in ranks:
        attempt = attempt_of(root, rank, ranks, _Unsynced())
        if rank == ranks[0]:
            attempt.begin()
        plan = plan_of(own, rank, ranks, layout)
        manifest = manifest_of(own, rank, plan)
        with attempt.folder() as staging, attempt.disk.directory(FOLDER, staging) as folder:
            for files in manifest.sets:
                for file, info in files.files.items():
                    if file in plan.headers or not attempt.disk.exists(file, staging):
                        fd = attempt.disk.create(file, info.size, staging)
                        if file in plan.headers:
                            at, piece = plan.headers[file]
                            attempt.disk.write_at(fd, piece, at, file)
                        os.close(fd)
            small, values = write_small_files(attempt.disk, own.captured, rank, folder)
        manifest = replace(manifest, small_files=small)
        assert rank != own.manifest.rank or manifest == own.manifest
        attempt.mark(manifest, values)


def plan_of(own: OwnSave, rank: int, ranks: tuple[int, ...], layout: str) -> SavePlan:
    """What a rank would have written instead of the one that saved."""
    writers = SaveOptions(layout).writers(len(ranks))
    parts = _parts_of(own.captured, rank, ranks)
    return plan_save(parts, rank, ranks, layout=layout, writers=writers)


def manifest_of(own: OwnSave, rank: int, plan: SavePlan) -> Manifest:
    """What it would have recorded. Its small files aside."""
    sets = plan.recorded(
        _checksums_of_zeros(each.part.box.numel * each.part.tensor.itemsize) for each in plan.chunks
    )
    return replace(own.manifest, rank=rank, sets=sets)


def _parts_of(captured: Captured, rank: int, ranks: tuple[int, ...]) -> list[TensorPart]:
    """The parts of another rank. Scalars are whole on all ranks, and the first writes them."""
    parts = []
    boxes: dict[tuple[int, ...], Box] = {}
    for part in captured.parts:
        shape = part.tensor.shape
        box, writes = part.box, rank == ranks[0]
        if shape:
            box = boxes.get(shape) or box_of(shape, (len(ranks),), (Shard(0),), (rank,))
            boxes[shape], writes = box, True
        parts.append(replace(part, box=box, ranks=ranks, writes=writes))
    return parts


@lru_cache
def _checksums_of_zeros(num_bytes: int) -> tuple[int, ...]:
    whole, rest = divmod(num_bytes, BLOCK_BYTES)
    sizes = [BLOCK_BYTES] * min(1, whole) + [rest] * (rest > 0)
    sums = {size: crc32(bytes(size)) for size in sizes}
    return tuple([sums[BLOCK_BYTES]] * whole if whole else []) + tuple([sums[rest]] * (rest > 0))


def attempt_of(root: Path, rank: int, ranks: tuple[int, ...], disk: Disk | None = None) -> Attempt:
    """A rank's view of the save."""
    return Attempt(disk or Disk(), root, NAME, NONCE, rank, ranks)


@contextmanager
def without_marker_of(root: Path, rank: int, n: int) -> Iterator[None]:
    """As long as this rank is still writing."""
    marker = root / attempt_of(root, rank, tuple(range(n))).staging / FOLDER / marker_name(rank, n)
    aside = root / "marker"
    marker.rename(aside)
    yield
    aside.rename(marker)


def bytes_beside(root: Path) -> float:
    """The size of everything in the committed checkpoint but its data files."""
    return float(sum(path.stat().st_size for path in (root / NAME / FOLDER).iterdir()))


# -- loading ------------------------------------------------------------------------------------


def checkpointer_of(root: Path) -> Checkpointer:
    """This rank's `Checkpointer`, to which all other ranks say what it says itself."""

    def told_by_all(about: str, value: str, ranks: tuple[int, ...], **_: Any) -> list[str]:
        return [value] * len(ranks)

    agreement.told_by_all = told_by_all
    checkpointer.check_shared = lambda *_: None
    return Checkpointer(root)


def load(checkpoints: Checkpointer, model: nn.Module, optimizer: Optimizer) -> Loaded:
    """Load on as many ranks as saved, with everything that a run needs to resume."""
    return checkpoints.load(STEP, model=model, optimizer=optimizer)
