"""Filling tensors from a checkpoint, so that a damaged block leaves everything as it was.

How often bytes are read depends on what they overwrite:

| overwritten | bytes are read |
|---|---|
| nothing: meta tensors, new optimizer state | once, into memory that the model gets at the end |
| up to `STAGED_BYTES` | once, into a buffer that is copied at the end |
| more | twice: verified first, then read in place and verified again |
| more, with ``keep_on_error=False`` | once, in place |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...common.memory import device_for, usual_device
from ...common.modules import load_through_hooks, registered_tensors
from ...dtensor.boxes import Box
from ...dtensor.from_local import laid_out_as
from ..errors import CheckpointError, some
from ..format.tensors import DTYPES, local_of
from ..saving.capture import ModelTensors, fsdp_modules
from .reading import Target, read_into, read_verified, verify_boxes
from .source import Source, Stored

logger = logging.getLogger("fsdp2.checkpoint")
STAGED_BYTES = 32 << 20  # with the buffers of the threads, less than 64 MiB


@dataclass
class Wanted:
    """A tensor of this process to fill from ``stored``.

    Attributes:
        new: nothing refers to the tensor yet, so its values may be lost.
        is_part: ``tensor`` holds only ``box`` of an inner tensor; its shape was checked.
    """

    name: str
    tensor: Tensor
    stored: Stored
    box: Box
    new: bool = False
    is_part: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes in the checkpoint."""
        return self.box.numel * self.stored.info.itemsize

    def target(self, tensor: Tensor | None = None) -> Target:
        """The target that fills this tensor, or ``tensor`` in its place."""
        local = local_of(self.tensor if tensor is None else tensor)
        return Target(self.name, self.stored, self.box, local)


def fill(
    source: Source,
    wanted: Sequence[Wanted],
    model: nn.Module | None,
    found: ModelTensors | None,
    *,
    verify_checksums: bool,
    keep_on_error: bool,
    device: torch.device | str | None,
    before_change: Callable[[], object] = lambda: None,
) -> bool:
    """Fill everything in ``wanted``; tensors of the model on the meta device get memory first.

    Args:
        model, found: the model whose tensors are wanted, if any, and its `tensors_of`.
        verify_checksums, keep_on_error, device: as for `load_model`.
        before_change: called before the model or anything else that was there changes.

    Returns:
        Whether checksums were compared.

    Raises:
        CorruptCheckpoint: if a block is damaged. Nothing was changed, unless the error carries a
            note to the contrary.
    """
    for each in wanted:
        each.stored.extents_near(each.box)  # opens the files: all must be there
    verified = verify_checksums and source.verifiable
    if verify_checksums and not verified:
        logger.info("%s was written without checksums: it cannot be verified", source.path)
    read = read_verified if verified else read_into
    real = partial(_real, device=device, usual=usual_device(model))
    made = _make_real(model, wanted, real)
    new = [w.target(made.get(id(w.tensor))) for w in wanted if w.new or w.tensor.is_meta]
    held = [w for w in wanted if not (w.new or w.tensor.is_meta)]
    staged: list[Target] = []
    if verified and keep_on_error:
        if sum(w.nbytes for w in held) <= STAGED_BYTES:
            staged = [w.target(_staging_for(w)) for w in held]
        else:
            verify_boxes(source, ((w.stored, w.box) for w in held))
    # Reading, which may fail, only writes to memory that nothing else refers to yet.
    read(source, [*new, *staged])
    before_change()
    # From here on the model changes.
    if torch.accelerator.is_available():
        # Threads write to it on separate streams. Work enqueued on others may still need the old
        # values: a step, or the copies of an asynchronous save.
        torch.accelerator.synchronize()
    for module in fsdp_modules(model) if model is not None else ():
        module.reshard()  # gathered parameters are about to be out of date
    if staged:
        with torch.no_grad():
            for w, target in zip(held, staged, strict=True):
                if w.nbytes:  # empty shards may be empty in another shape
                    local_of(w.tensor).copy_(target.local)
    elif held:
        # Checksums are compared again on the way: the file may have changed since they were right.
        _read_in_place(source, held, read)
    if model is not None and found is not None and made:
        _install(model, found, made, real)
    elif model is not None and found is not None:
        aliases = {alias: found.tensors[name] for alias, name in found.aliases.items()}
        load_through_hooks(model, {**found.tensors, **aliases})
    return verified


def _staging_for(wanted: Wanted) -> Tensor:
    return torch.empty(wanted.box.shape, dtype=DTYPES[wanted.stored.info.dtype], device="cpu")


def _read_in_place(source: Source, held: Sequence[Wanted], read: Any) -> None:
    try:
        read(source, [w.target() for w in held])
    except BaseException as error:
        error.add_note(
            "What was loaded into holds part of the checkpoint now: do not use it before another "
            "load succeeds"
        )
        raise


# -- the meta device ----------------------------------------------------------------------------


def check_meta(found: ModelTensors, model: nn.Module, to_be_filled: set[str]) -> bool:
    """Whether there are tensors on the meta device; checks that all of them will be filled.

    Raises:
        CheckpointError: naming tensors on the meta device that the checkpoint does not fill.
    """
    # During forward and backward, a sharded model registers other parameters under these names.
    any_meta = any(t.is_meta for t in found.tensors.values())
    # Names cost more than all else that is done for a tensor, and most models need none here.
    if not any(tensor.is_meta for tensor in registered_tensors(model)):
        return any_meta
    tensors = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta}
    left = [n for n in tensors if found.aliases.get(n, n) not in to_be_filled]
    if left:
        raise CheckpointError(
            f"Not in the checkpoint, and on the meta device without values: {some(left)}. Buffers "
            "that are not saved have to be computed: fsdp2.materialize(model, parameters=False) "
            "does it by model.init_weights(); give parameters values, or leave them out"
        )
    return any_meta


def _make_real(
    model: nn.Module | None, wanted: Sequence[Wanted], real: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Allocate a tensor for each one on the meta device, by its id; the model gets them later.

    Raises:
        CheckpointError: for tensors that ``state_dict`` returns but the model does not have.
    """
    meta = [w for w in wanted if w.tensor.is_meta]
    if not meta or model is None:
        return {}
    registered = {id(tensor) for tensor in registered_tensors(model)}
    derived = [w.name for w in meta if id(w.tensor) not in registered]
    if derived:
        raise CheckpointError(
            f"state_dict() makes tensors on the meta device that are not parameters or buffers of "
            f"the model: {some(derived)}. Call model.to_empty(device=...) before loading"
        )
    with torch.no_grad():
        return {id(w.tensor): real(w.tensor) for w in meta}


def _real(tensor: Tensor, *, device: torch.device | str | None, usual: torch.device) -> Tensor:
    """The same with memory: on ``device``, else on the device of its mesh, else on ``usual``."""
    own = device or (device_for(tensor) if isinstance(tensor, DTensor) else usual)
    local = local_of(tensor)
    if isinstance(tensor, DTensor) and type(local) is Tensor:
        # Not ``empty_like`` of the DTensor, which takes three times as long; nor of a meta tensor
        # where it can be avoided, because torch computes its strides in Python.
        if local.is_contiguous():
            return laid_out_as(tensor, torch.empty(local.shape, dtype=local.dtype, device=own))
        return laid_out_as(tensor, torch.empty_like(local, device=own))
    return torch.empty_like(tensor, device=own)


def _install(
    model: nn.Module,
    found: ModelTensors,
    made: dict[int, Tensor],
    real: Callable[[Tensor], Tensor],
) -> None:
    """Replace the model's tensors on the meta device by those that were allocated."""

    def install(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        value = made.get(id(tensor))
        return real(tensor) if value is None else value  # gradients

    model._apply(install)
    for alias, first in found.aliases.items():  # plain modules lose ties in `_apply`
        _set_tensor(model, alias, _get_tensor(model, first))


def _get_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    table: dict[str, Any] = module._parameters if last in module._parameters else module._buffers
    if table.get(last) is not tensor:
        setattr(module, last, tensor)
