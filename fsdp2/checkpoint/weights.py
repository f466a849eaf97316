"""`save_model` and `load_model`: weights only, for sharded and plain modules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dtensor.placement import all_ranks, this_rank
from .agreement import check_shared
from .format.disk import Disk, make_folder
from .loading.fill import check_meta, fill
from .loading.opening import open_source
from .loading.restore import (
    LoadReport,
    NameMap,
    SavedNames,
    extra_state_in,
    match_model,
    set_extra_state,
    values_of_rank,
)
from .loading.source import Source
from .saving.capture import RankLocal, capture, check_model, tensors_of
from .saving.job import SaveHandle, SaveJob, SaveOptions
from .saving.roll_call import RollCall


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    layout: str = "auto",
    max_file_bytes: int = 5_000_000_000,
    files_per_host: int | None = None,
    ranks: Sequence[int] | None = None,
    rank_local: RankLocal | None = None,
    timeout: float | None = 600.0,
) -> SaveHandle:
    """Save the weights of ``model`` as an ordinary safetensors checkpoint in the folder ``path``.

    Every rank writes its own byte ranges into the final files, without communication. The complete
    folder appears when the last rank is done. It has the layout of Hugging Face's
    ``save_pretrained`` (without the configuration, which the caller adds), and ``from_pretrained``
    and ``safetensors.torch.load_file`` can read it.

    Args:
        model: a module sharded by this package or torch's FSDP2, tensor-parallel, or plain.
            Tied parameters are saved once.
        path: a folder that does not exist yet; its parents are created.
        layout: "shared": final files of whole tensors; "per-rank": files of shards, one per rank
            (for object stores; ``fsdp2 ckpt export`` converts them to final files); "auto": shared
            unless a rank would write many tiny ranges.
        max_file_bytes: maximum size of one file of whole tensors.
        files_per_host: how many files of shards the ranks of a host write, if these shards are not
            in shared files. It must divide the number of ranks of a host (``LOCAL_WORLD_SIZE``,
            which torchrun sets; otherwise all ranks). By default each rank writes its own file.
            With layout "auto" on more than 512 ranks, consecutive ranks share files, so that there
            are at most 512.
        ranks: the global ranks that call this; all of them by default. Pass ``[0]`` if rank 0 alone
            saves a whole model.
        rank_local: a function that gets the name of a tensor. It returns True if only this rank has
            this plain tensor (an expert, for example), or only the ranks of its mesh have this
            DTensor. By default plain tensors are equal on all ranks, and DTensors on a slice of a
            mesh are equal on every slice (data parallel combined with tensor parallel).
        timeout: seconds to wait for the other ranks; None: forever.

    Returns:
        A handle on the committed checkpoint.

    Raises:
        CheckpointExists: if ``path`` exists.
        CheckpointError: if the parent cannot be created or written to, or ranks disagree.
        TimeoutError: after ``timeout`` seconds; names the ranks that have not called this or have
            not finished.
        OSError: if the disk is full or broken; then nothing appears under ``path``.
        ValueError: if ``layout``, ``files_per_host`` or ``ranks`` has a wrong value.

    Example::

        fully_shard(model)
        save_model(model, "weights")
        model = AutoModelForCausalLM.from_pretrained("weights")  # after config.save_pretrained
    """
    check_model(model)
    members = tuple(sorted(ranks)) if ranks is not None else all_ranks()
    if this_rank() not in members:
        raise ValueError(f"Rank {this_rank()} called save_model but is not in ranks={members}")
    target = Path(os.path.abspath(path))
    call = RollCall(target, this_rank(), members)
    with call.called():
        captured = capture(model, (), members, this_rank(), rank_local)
        # Per-rank buffers are useful only to the training run that made them.
        captured.own.clear()
        make_folder(target.parent)
        check_shared(target.parent, members)
        job = SaveJob(
            target.parent,
            target.name,
            call.nonce,
            this_rank(),
            members,
            captured,
            SaveOptions(layout, max_file_bytes, files_per_host=files_per_host),
            Disk(),
        )
        job.begin()
    handle = SaveHandle(job, None, call)
    handle._run()
    return handle.wait_committed(timeout)


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
    """Load weights into ``model``; each rank reads only the bytes of its shards.

    Args:
        model: as for `save_model`, sharded over any number of ranks. Parameters and buffers on
            the meta device get memory first.
        path: a folder, index or safetensors file: from `save_model`, a step of a `Checkpointer`,
            or any safetensors checkpoint in Hugging Face's layout.
        strict: raise if a name is missing from the model or the checkpoint.
        cast: convert dtypes that differ instead of raising.
        verify_checksums: compare every block with its saved checksum. Checkpoints of other
            libraries have none.
        keep_on_error: leave the model unchanged if a block turns out to be damaged. If the model
            holds values and there are more than 32 MiB, bytes are then read twice: first to verify
            them, then into place. With False they are read once, and after an error the model
            holds part of the checkpoint; that is fine if its values are meaningless, as after
            ``to_empty()``. For a model on the meta device, bytes are always read once, and an error
            leaves it unchanged.
        names: translates the model's names to the checkpoint's: a dict (other names stay) or a
            function.
        device: the device for tensors that are on the meta device. By default parameters go to the
            device of their mesh, buffers to the device of the parameters' mesh, and plain models to
            the CPU.

    Returns:
        A report: missing and unexpected names, and whether checksums were compared.

    Raises:
        CheckpointNotFound: if there is nothing at ``path``.
        CorruptCheckpoint: if a file is damaged; the model is unchanged (see ``keep_on_error``).
        CheckpointMismatch: if names, shapes or dtypes do not fit; the model is unchanged.
        CheckpointError: if ``path`` is a pickled file (``.pt``), or this user may not read it.

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
        wanted, report = match_model(source, found, strict=strict, cast=cast, names=names)
        check_meta(found, model, {w.name for w in wanted})
        extra_state = _extra_state_in(source, this_rank())
        report.verified = fill(
            source, wanted, model, found, verify_checksums=verify_checksums,
            keep_on_error=keep_on_error, device=device,
        )  # fmt: skip
        set_extra_state(model, extra_state, SavedNames(names, found))
        report.bytes_read = source.bytes_read
    return report


def _extra_state_in(source: Source, rank: int) -> dict[str, Any]:
    """The extra state of this rank, or of the first if this one did not take part."""
    if not source.ranks:
        return {}
    saved_by = rank if rank in source.ranks else source.ranks[0]
    return extra_state_in(source, values_of_rank(source, saved_by))
