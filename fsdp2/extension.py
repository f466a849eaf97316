"""Parameters that decide themselves what travels: tensor subclasses with two methods.

``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)`` (or with ``mesh`` only)
returns the tensors to gather in place of the shard, and any metadata;
``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` makes the whole parameter of
what was gathered, and returns it with the tensors that own its memory; with ``out`` it writes into
the one it made before. torchao's float8 and quantized tensors are such.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .param import own_rows
from .storage import Bucket, resize


class ExtensionPlan:
    """A gather whose sizes the parameter decides; all bytes, so that dtypes may be mixed."""

    cast = True  # the own slices are written first, then gathered in place

    def __init__(self, bucket: ExtensionBucket, outputs: list[torch.Tensor]) -> None:
        num_shards, rank = bucket.mesh.num_shards, bucket.rank
        self.rank = rank
        self.messages: Any = None
        self.outputs = [output.view(-1).view(torch.uint8) for output in outputs]
        numels = [output.numel() // num_shards for output in self.outputs]
        self.own = [
            output[rank * numel : (rank + 1) * numel]
            for output, numel in zip(self.outputs, numels, strict=True)
        ]
        self.inputs = self.source = self.own
        self.rows = [[own.numel()] * num_shards for own in self.own]
        self.unpack = bucket.unpack


class ExtensionBucket(Bucket):
    """One such parameter: a bucket whose gathered storage is what the parameter makes of it."""

    _storages: Sequence[torch.UntypedStorage] = ()

    def shard_from(self, sources: Sequence[torch.Tensor], *, whole: bool) -> None:
        (param,), (slot,), (source,) = self.params, self.layout.slots, sources
        local = own_rows(source, slot, self.rank) if whole else source
        if whole:
            local = local.clone()  # a view would keep the whole parameter in memory
        if local.device != self.shard_device and not local.is_meta:
            local = local.to(self.shard_device)
        param.attach(local)
        self.shards = local
        self.aliases_shards = False

    def materialize(self, *, regroup_to: int | None = None, split: bool = False) -> None:
        """Ask the parameter what it gathers, and let it make the unsharded parameter once."""
        self.staged = None
        self.gathered = None
        self.regrouped = None
        self._references = {}
        self.fills_own_slices = True
        (param,) = self.params
        inputs = self._inputs()
        num_shards = self.mesh.num_shards
        self._outputs = [
            torch.zeros(
                (num_shards * given.shape[0], *given.shape[1:]),
                dtype=given.dtype,
                device=self.device,
            )
            for given in inputs
        ]
        self.plan = ExtensionPlan(self, self._outputs)  # type: ignore[assignment]
        self._fill(inputs)
        whole, owned = self._post(self._gathered_rows(), None)
        self._whole: torch.Tensor = whole
        if self._whole.shape != param.full_shape:
            self._whole = whole.as_strided(param.full_shape, _contiguous(param.full_shape))
        mine = {t.untyped_storage()._cdata: t for t in (*self._outputs, *owned)}
        self._storages = [t.untyped_storage() for t in mine.values()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._written = list(owned)
        param.make_unsharded(self._whole)
        self._note_unsharded()
        self.free()

    # -- memory -----------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def allocated_bytes(self) -> int:
        return sum(storage.size() for storage in self._storages)

    def allocate(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.size() != size:
                resize(storage, size)

    def free(self) -> None:
        if not self.keeps_storage:
            for storage in self._storages:
                resize(storage, 0)

    # -- gathering --------------------------------------------------------------------------

    def fill_own_slices(self) -> None:
        self._fill(self._inputs())
        if self.mesh.num_shards == 1:
            self.unpack()

    def unpack(self) -> None:
        """After the gather: let the parameter make itself of what was gathered."""
        unsharded = self.params[0].unsharded
        assert unsharded is not None
        # Written again with the same values: not a change of what autograd saved.
        changed = tuple({id(t): t for t in (unsharded, self._whole, *self._written)}.values())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(changed):
            self._post(self._gathered_rows(), self._whole)

    def _inputs(self) -> list[torch.Tensor]:
        """What this rank sends: of as many rows as every rank's."""
        (param,), (slot,) = self.params, self.layout.slots
        local: Any = param.local
        if local.device != self.device:
            local = local.to(self.device, non_blocking=True)
        arguments: tuple[Any, ...] = (_shard_mesh(self.mesh.mesh),)
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) > 1:
            module = param.owners[0][0]
            size = torch.Size(param.full_shape)
            arguments = (*arguments, size, _contiguous(param.full_shape), module, self.mp_policy)
        with torch.no_grad():
            inputs, self._metadata = local.fsdp_pre_all_gather(*arguments)
        rows = slot.local_shape(self.rank)[0] if slot.dim == 0 else None
        self._per_row = rows is not None and all(t.ndim and t.shape[0] == rows for t in inputs)
        if self._per_row:
            return [_with_rows(t, slot.chunk) for t in inputs]
        return [t.reshape(1) if t.ndim == 0 else t for t in inputs]

    def _fill(self, inputs: Sequence[torch.Tensor]) -> None:
        for own, given in zip(self.plan.own, inputs, strict=True):
            data = given.contiguous().view(-1).view(torch.uint8)
            if own.numel() != data.numel():
                raise ValueError(
                    f"fsdp_pre_all_gather of parameter '{self.params[0].fqn}' returned "
                    f"{data.numel()} bytes, and {own.numel()} at first: sizes must not change"
                )
            own.copy_(data)

    def _gathered_rows(self) -> tuple[torch.Tensor, ...]:
        """What was gathered, without the rows that the last ranks lack."""
        if not self._per_row:
            return tuple(self._outputs)
        rows = self.params[0].full_shape[0]
        return tuple(output[:rows] for output in self._outputs)

    def _post(self, outputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Any:
        local: Any = self.params[0].local
        dtype = self.gather_dtype
        if out is None:
            return local.fsdp_post_all_gather(outputs, self._metadata, dtype)
        return local.fsdp_post_all_gather(outputs, self._metadata, dtype, out=out)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1 or mesh.mesh_dim_names is None:
        return mesh
    return mesh[mesh.mesh_dim_names[-1]]


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor``, with zeros appended to have ``rows`` rows."""
    if tensor.shape[0] == rows:
        return tensor
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]].copy_(tensor)
    return padded


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
