"""Weights alone: `save_model` and `load_model`, for sharded and for plain modules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dtensor.placement import all_ranks, this_rank
from .agreement import check_shared
from .errors import CheckpointError
from .format.disk import Disk
from .loading.fill import check_meta, fill
from .loading.restore import LoadReport, NameMap, match_model, set_extra_state, values_of_rank
from .loading.source import Source, open_source
from .saving.capture import RankLocal, capture, check_model, tensors_of
from .saving.job import Options, SaveHandle, SaveJob
from .saving.roll_call import RollCall


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    layout: str = "auto",
    max_file_bytes: int = 5_000_000_000,
    ranks: Sequence[int] | None = None,
    rank_local: RankLocal | None = None,
    timeout: float | None = 600.0,
) -> SaveHandle:
    """Save the weights of ``model`` as an ordinary safetensors checkpoint in the folder ``path``.

    Every rank writes its own byte ranges into the final files, without communication; the folder
    appears, complete, when the last rank is done. With few files or none, ``path`` looks as
    Hugging Face's ``save_pretrained`` leaves it (without the configuration, which is the
    caller's to add) and is read by ``from_pretrained`` and ``safetensors.torch.load_file``.

    Args:
        model: sharded by this package, by torch's FSDP2, tensor-parallel, or a plain module.
            Parameters that several names refer to are saved once.
        path: a folder that does not exist yet; its parent must exist.
        layout: "shared": final files of whole tensors; "per-rank": one file of shards per rank
            (for object stores; ``fsdp2 ckpt export`` makes final files of it); "auto": shared
            unless a rank's ranges would be many and tiny.
        max_file_bytes: of one file.
        ranks: the global ranks that call this; all of them by default. Pass ``[0]`` where only
            rank 0 saves a model that it holds whole.
        rank_local: tells by name which tensors the other ranks of the model do not have: plain
            ones of this rank alone (its experts, say), DTensors of the ranks of their own mesh.
            By default plain tensors are the same on all ranks, and DTensors on a slice of a
            mesh the same on every slice (data parallel beside tensor parallel).
        timeout: seconds to wait for the other ranks; None: for ever.

    Returns:
        A handle on the committed checkpoint.

    Raises:
        CheckpointExists: if ``path`` exists.
        CheckpointError: if the parent is missing or read-only, or ranks disagree.
        TimeoutError: naming the ranks that have not called it, or not finished.
        OSError: if the disk is full or broken; nothing appears under ``path`` then.

    Example::

        fully_shard(model)
        save_model(model, "weights")
        model = AutoModelForCausalLM.from_pretrained("weights")  # after config.save_pretrained
    """
    check_model(model)
    members = tuple(sorted(ranks)) if ranks is not None else all_ranks()
    if this_rank() not in members:
        raise ValueError(f"Rank {this_rank()} calls save_model and is not in ranks={members}")
    target = Path(os.path.abspath(path))
    call = RollCall(target, this_rank(), members)
    with call.called():
        captured = capture(model, (), members, this_rank(), rank_local)
        # Own buffers are of use only to the training that made them.
        captured.own.clear()
        check_parent(target)
        check_shared(target.parent, members)
        job = SaveJob(
            target.parent,
            target.name,
            call.nonce,
            this_rank(),
            members,
            captured,
            Options(layout, max_file_bytes),
            Disk(),
        )
        job.begin()
    handle = SaveHandle(job, None, call)
    handle._run()
    return handle.wait_committed(timeout)


def check_parent(target: Path) -> None:
    """Check that the folder that ``target`` goes to is there.

    Raises:
        CheckpointError: if it is not.
    """
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is no folder: make it before saving")


def load_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
    verify_checksums: bool = True,
    keep_on_error: bool = True,
    names: NameMap = None,
    device: torch.device | str | None = None,
) -> LoadReport:
    """Load weights into ``model``: each rank reads the bytes of its own shards, and no others.

    Args:
        model: as for `save_model`, sharded over any number of ranks. Parameters and buffers on
            the meta device get memory first.
        path: a folder, index or safetensors file: of `save_model`, of a `Checkpointer`'s step, or
            any safetensors checkpoint of the Hugging Face kind.
        strict: names that only one of the two has are an error.
        cast: convert where dtypes differ, instead of refusing.
        verify_checksums: compare every block read with the checksum it was written with.
            Checkpoints of other libraries have none.
        keep_on_error: if a block turns out to be damaged, the model is as it was. For that, the
            bytes of a model that holds values are read twice, once to compare them and once into
            place, unless they are few (32 MiB). With False they are read once, and after an
            error the model holds part of the checkpoint: right where its values are worth
            nothing, as after ``to_empty()``. A model on the meta device needs neither: its
            bytes are read once, and it is as it was after an error.
        names: translates the model's names into the checkpoint's: a dict (other names stay) or a
            function.
        device: for tensors on the meta device; by default that of their mesh, for buffers that of
            the parameters' mesh, for plain models the CPU.

    Returns:
        What was missing, unexpected and verified.

    Raises:
        CheckpointNotFound: if there is nothing at ``path``.
        CorruptCheckpoint: if a file is damaged; the model is as it was (see ``keep_on_error``).
        CheckpointMismatch: if names, shapes or dtypes do not fit; the model is as it was.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        fully_shard(model)
        fsdp2.materialize(model, parameters=False)  # buffers that no file holds
        load_model(model, "Llama-3-8B")
    """
    check_model(model)
    with open_source(path) as source:
        found = tensors_of(model)
        rank = this_rank()
        wanted, report = match_model(source, found, rank, strict=strict, cast=cast, names=names)
        check_meta(found, model, {w.name for w in wanted})
        extra_state = _extra_state_in(source, rank)
        report.verified = fill(
            source, wanted, model, found, verify_checksums=verify_checksums,
            keep_on_error=keep_on_error, device=device,
        )  # fmt: skip
        set_extra_state(model, extra_state)
        report.bytes_read = source.bytes_read
    return report


def _extra_state_in(source: Source, rank: int) -> dict[str, Any]:
    """Of this rank, or of the first if this one did not take part; encoded."""
    if not source.manifests:
        return {}
    saved_by = rank if rank in source.manifests else min(source.manifests)
    return values_of_rank(source, saved_by).get("extra_state", {})
