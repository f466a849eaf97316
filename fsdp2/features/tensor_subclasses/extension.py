"""Tensor subclasses with two methods that define what is sent for a parameter.

``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)`` (or with ``mesh`` only)
returns the tensors to gather in place of the shard, and any metadata.
``fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)`` makes the whole parameter:

- after the first gather without ``out``. It returns the parameter and the tensors that own its
  memory, which is freed with the unit. Forward and backward use this parameter from then on.
- after every later gather with that parameter as ``out``, which has memory again, with undefined
  contents. It writes into ``out``, or replaces its attributes (a scale), and returns None. If it
  returns another tensor instead, that is copied into ``out``: autograd has saved views of it.

torchao's float8, int8 and NF4 weights are such classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh
from typing_extensions import override

from ...common.collectives import sum_over
from ...dtensor.from_local import local_of
from ...dtensor.memory import record_gathered
from ...dtensor.subclasses import inner_tensors, is_wrapper
from ...runtime.param_group import own_buckets
from ...sharding.bucket import Bucket
from ...sharding.gathered import GatheredStorage, GatherPlan, SecondarySource, resize
from ...sharding.mesh import DataParallelMesh, device_of
from ...sharding.param import EXTENSION_METHODS, is_extension
from ...sharding.process_groups import own_group
from .tensor_subclass import contiguous_strides, own_shard, write_into

# Each message needs a separate tag. Tags are reserved before the first gather, but only that gather
# shows how many tensors there are.
MAX_TENSORS = 16
_EXPECTED = "(tensors to gather, metadata)"


class ExtensionPlan(GatherPlan):
    """A gather whose sizes the parameter decides; all bytes, so that dtypes may be mixed."""

    # The class returns different memory each time, but plans hold fixed views. So the tensors are
    # copied into the own slices, as after a cast, and gathered in place.
    cast = True
    pieces = ()  # none that matter to a transport

    def __init__(self, bucket: ExtensionBucket, outputs: list[torch.Tensor]) -> None:
        num_shards, rank = bucket.mesh.num_shards, bucket.rank
        self.outputs = [output.view(-1).view(torch.uint8) for output in outputs]
        numels = [output.numel() // num_shards for output in self.outputs]
        self.own = [
            output[rank * numel : (rank + 1) * numel]
            for output, numel in zip(self.outputs, numels, strict=True)
        ]
        self.inputs = self.source = self.own
        self.rows = [[own.numel()] * num_shards for own in self.own]
        self._bucket = bucket

    @override
    def unpack(self) -> None:
        self._bucket.unpack()

    @override
    def forget_transports(self) -> None:
        pass  # they keep no narrower numbers: only bytes are sent


class ExtensionStorage(GatheredStorage):
    """The gathered tensors, and what the parameter makes of them: empty until the first gather."""

    secondary = None
    offload_buffer = None
    own_pieces: frozenset[int] = frozenset()
    has_own_pack = False
    fills_own_slices = True
    plan: GatherPlan = None  # type: ignore[assignment]

    def __init__(self, bucket: ExtensionBucket) -> None:
        self._bucket = bucket
        self.own([])

    def own(self, storages: list[torch.UntypedStorage]) -> None:
        """Allocate and free ``storages`` from now on."""
        self.storages = storages
        self.sizes = [storage.nbytes() for storage in storages]
        self.nbytes = sum(self.sizes)
        record_gathered(storages)

    def plan_gather(self, outputs: list[torch.Tensor]) -> GatherPlan:
        self.plan = ExtensionPlan(self._bucket, outputs)
        return self.plan

    @override
    def fill_own_slices(self) -> None:
        self._bucket.fill_own_slices()


class ExtensionBucket(Bucket):
    """One such parameter: a bucket whose gathered storage is what the parameter makes of it.

    Its sizes become known in the first gather, when the parameter is first asked what to send.
    """

    max_messages = MAX_TENSORS
    gathered: ExtensionStorage

    @property
    @override
    def aliases_shards(self) -> bool:
        return False

    @override
    def shard_from(self, sources: Sequence[torch.Tensor], *, whole: bool) -> None:
        (param,), (slot,), (source,) = self.params, self.layout.slots, sources
        local = source
        if whole:
            local = own_shard(source, slot, self.rank, self.mesh.num_shards, param.fqn)
        if local.device != self.shard_device and not local.is_meta:
            local = local.to(self.shard_device)
        param.attach(local)
        self.shards = local

    @override
    def materialize(self, *, secondary: SecondarySource | None = None, split: bool = False) -> None:
        """Forget the results of earlier gathers; the next one makes them again."""
        # No unsharded parameter until then: only the class can make it, from gathered tensors.
        self.gathered = ExtensionStorage(self)
        self._outputs: list[torch.Tensor] = []
        self._replaced: list[torch.Tensor] = []
        self._metadata: Any = None
        self.is_made = False
        # The one of an earlier plan holds the gradients of earlier micro-batches until then.
        self._record_unsharded()
        self._check_methods()

    @override
    def versions(self) -> tuple[int, int]:
        # A wrapper's own counter does not see writes to the tensors that it is made of. They are
        # looked up each time: an optimizer or a load may replace them.
        (param,) = self.params
        rows = param.local._version + sum(t._version for t in inner_tensors(param.local))
        return rows, param.sharded._version

    def _check_methods(self) -> None:
        """Check that the methods exist, and with which arguments to call them."""
        # Not when it is sharded: they may be patched onto the class up to the first gather.
        (param,) = self.params
        local: Any = param.local
        if not is_extension(local, param.fqn):
            if not is_wrapper(local):
                raise ValueError(
                    f"Parameter '{param.fqn}' was sharded as a tensor subclass and is a plain "
                    f"{type(local).__name__} of dtype {local.dtype} now. Some classes become plain "
                    "tensors when model.to(dtype) converts them (NF4): convert the model before "
                    "fully_shard"
                )
            raise ValueError(
                f"Parameter '{param.fqn}' is a {type(local).__name__}, a tensor subclass with "
                "inner tensors: only its class knows how they are gathered. Define "
                f"{' and '.join(EXTENSION_METHODS)} on it (see docs/compatibility.md), or use a "
                "plain parameter, or pass it in ignored_params"
            )
        # torch's FSDP2 also checks the number of parameters: older classes take the mesh only.
        num = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if num not in (1, 5):
            raise ValueError(
                f"fsdp_pre_all_gather of parameter '{param.fqn}' ({type(local).__name__}) takes "
                f"{num} arguments; expected (mesh) or (mesh, outer_size, outer_stride, module, "
                "mp_policy)"
            )
        self._takes_mesh_only = num == 1
        self._shard_mesh = _mesh_of_shards(self.mesh)
        release = getattr(
            local, "fsdp_should_release_all_gather_outputs_after_post_all_gather", None
        )
        self._releases_outputs = release is not None and release()

    # -- gathering --------------------------------------------------------------------------

    # The shard requires a gradient, but the tensors it sends must not be in a graph. And tensors
    # made in an evaluation in inference mode, like the unsharded parameter, could never be trained.
    @torch.inference_mode(False)
    @torch.no_grad()
    def fill_own_slices(self) -> None:
        try:
            inputs = self._inputs()
        except Exception:
            if self.gathered.plan is None and self._is_uneven:
                self._exchange_rows([])  # the others wait for it
            raise
        plan = self.gathered.plan
        if plan is None:
            plan = self._plan_gather(inputs)
        elif len(inputs) != len(self._outputs):
            raise self._bad_inputs(f"{len(inputs)} tensors, and {len(self._outputs)} at first")
        for own, given, size in zip(plan.own, inputs, self._chunks, strict=True):
            # Compared in bytes, as peers wait for a fixed number. Sizes that change on this rank
            # alone would cause a hang or shifted parameters; on all ranks, views that no longer
            # fit.
            data = _with_rows(given, size).contiguous().view(-1).view(torch.uint8)
            if own.numel() != data.numel():
                raise self._bad_inputs(f"{data.numel()} bytes, and {own.numel()} at first")
            own.copy_(data)
        if self.mesh.num_shards == 1:
            self.unpack()

    def _bad_inputs(self, found: str) -> ValueError:
        return ValueError(
            f"fsdp_pre_all_gather of parameter '{self.params[0].fqn}' returned {found}: sizes must "
            "not change"
        )

    def _inputs(self) -> list[torch.Tensor]:
        """The tensors this rank sends. 0-dim tensors become 1-D, since a gather concatenates."""
        (param,) = self.params
        local: Any = param.local
        if local.device != self.device:
            local = local.to(self.device, non_blocking=True)
        arguments: tuple[Any, ...] = (self._shard_mesh,)
        if not self._takes_mesh_only:
            size, module = torch.Size(param.full_shape), param.owners[0][0]
            arguments = (*arguments, size, contiguous_strides(size), module, self.mp_policy)
        given = local.fsdp_pre_all_gather(*arguments)
        if (
            not isinstance(given, Sequence)
            or len(given) != 2
            or not isinstance(given[0], Sequence)
            or not 0 < len(given[0]) <= MAX_TENSORS
            or not all(isinstance(t, torch.Tensor) for t in given[0])
        ):
            raise ValueError(
                f"fsdp_pre_all_gather of parameter '{param.fqn}' ({type(local).__name__}) must "
                f"return {_EXPECTED}, with 1 to {MAX_TENSORS} tensors in a tuple"
            )
        self._metadata = given[1]
        return [t.reshape(1) if t.ndim == 0 else t for t in given[0]]

    def _plan_gather(self, inputs: Sequence[torch.Tensor]) -> GatherPlan:
        """In the first gather: allocate for the tensors of every rank."""
        num_shards = self.mesh.num_shards
        rows = [t.shape[0] for t in inputs]
        self._chunks, self._whole_rows = rows, [num_shards * n for n in rows]
        if self._is_uneven:
            self._plan_rows(rows)
        self._outputs = [
            torch.empty((num_shards * size, *t.shape[1:]), dtype=t.dtype, device=self.device)
            for t, size in zip(inputs, self._chunks, strict=True)
        ]
        self._wholes = self._plan_joins(inputs)
        return self.gathered.plan_gather(self._outputs)

    def _plan_joins(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole tensors; most equal the output of the gather."""
        # A gather concatenates the ranks' parts, which gives the whole tensor if it was sharded on
        # dim 0. For a parameter sharded on another dim, tensors with that dim are joined along it,
        # as in torch's FSDP2. Tensors with fewer dims (a scale) stay one per rank.
        dim, num_shards = self.layout.slots[0].dim, self.mesh.num_shards
        self._pieces: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        if not dim or num_shards == 1:
            return self._outputs
        wholes = list(self._outputs)
        for i, (given, output) in enumerate(zip(inputs, self._outputs, strict=True)):
            if given.ndim > dim:
                shape = [n * num_shards if d == dim else n for d, n in enumerate(given.shape)]
                wholes[i] = output.new_empty(shape)
                self._pieces[0].extend(wholes[i].chunk(num_shards, dim))
                self._pieces[1].extend(output.chunk(num_shards))
                self._whole_rows[i] = shape[0]
        return wholes

    def _plan_rows(self, rows: Sequence[int]) -> None:
        """Find out which tensors to pad before sending, as the last ranks have fewer rows."""
        # Tensors whose rows are proportional to the shard's rows are padded, and cut after the
        # gather. If the class pads a tensor (as torch requires), it also cuts it. On a rank with
        # all its rows the two look alike, so ranks exchange their sizes once.
        (slot,) = self.layout.slots
        num_shards = self.mesh.num_shards
        of_shards = [slot.local_shape(rank)[0] for rank in range(num_shards)]
        chunks, whole_rows = [], []
        for sent in zip(*self._exchange_rows(rows), strict=True):
            first = sent[0]  # from a shard with all its rows, which rank 0 always has
            # A row for each row, or for each block of rows; the last block may be shorter.
            if list(sent) == [-(-rows * first // slot.chunk) for rows in of_shards]:
                whole = sum(sent)
            elif len(set(sent)) == 1:
                whole = num_shards * first
            else:
                raise ValueError(
                    f"fsdp_pre_all_gather of parameter '{self.params[0].fqn}' returned a tensor of "
                    f"{list(sent)} rows on the ranks, whose shards have {of_shards} rows: it must "
                    "have one row per row of the shard, or block of rows, or the same number on "
                    "all ranks"
                )
            chunks.append(first)
            whole_rows.append(whole)
        self._chunks, self._whole_rows = chunks, whole_rows

    @property
    def _is_uneven(self) -> bool:
        (slot,) = self.layout.slots
        num_shards = self.mesh.num_shards
        return num_shards > 1 and slot.dim == 0 and slot.shape[0] != num_shards * slot.chunk

    def _exchange_rows(self, rows: Sequence[int]) -> list[list[int]]:
        """For each rank, the number of rows of each tensor that it sends.

        Args:
            rows: of this rank; none if the class has raised an error.

        Raises:
            RuntimeError: if the class has raised an error on other ranks.
            ValueError: if ranks send different numbers of tensors.
        """
        # A sum of tables with one row filled in is an all-gather that any backend can do. (The host
        # waits for it, once.) The width is fixed: the number of others' tensors is not known yet.
        num_shards, group = self.mesh.num_shards, self.mesh.shard_group
        table = torch.zeros(num_shards, 1 + MAX_TENSORS, dtype=torch.int64, device=self.device)
        table[self.rank, : 1 + len(rows)] = torch.tensor([len(rows), *rows], device="cpu")
        assert group is not None
        sum_over(group, table, f"the exchange of row numbers of '{self.params[0].fqn}'")
        nums = table[:, 0].tolist()
        if not rows or len({*nums}) == 1:
            return table[:, 1 : 1 + len(rows)].tolist()
        what = f"fsdp_pre_all_gather of parameter '{self.params[0].fqn}'"
        failed = [rank for rank, num in enumerate(nums) if not num]
        if failed:
            numbers = [str(dist.get_global_rank(group, rank)) for rank in failed]
            raise RuntimeError(
                f"{what} raised an error on rank {', '.join(numbers)}, which says what is wrong"
            )
        raise ValueError(f"{what} returned {nums} tensors on the ranks: it must be the same number")

    # -- after the gather -------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def unpack(self) -> None:
        """Let the class make the whole parameter from the gathered tensors."""
        computing = self.params[0].unsharded
        if self._pieces[0]:
            torch._foreach_copy_(*self._pieces)
        if computing is None or not self.is_made:
            self._make_unsharded()
        else:
            self._make_again(computing)
        self._metadata = None
        if self._releases_outputs and not self.gathered.keeps_memory:
            for output in (*self._outputs, *self._wholes):
                resize(output.untyped_storage(), 0)

    def _make_unsharded(self) -> None:
        (param,) = self.params
        local: Any = param.local
        # Tensors with separate version counters: writes of `fill_own_slices` through the outputs
        # must not look like a change of tensors that autograd has saved.
        self._rows = tuple(
            whole.new_empty(0).set_(whole.untyped_storage(), 0, shape, whole.stride())
            for whole, rows in zip(self._wholes, self._whole_rows, strict=True)
            for shape in [(rows, *whole.shape[1:])]
        )
        made = local.fsdp_post_all_gather(self._rows, self._metadata, self.gather_dtype)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.Tensor):
            raise ValueError(
                f"fsdp_post_all_gather of parameter '{param.fqn}' ({type(local).__name__}) must "
                "return (parameter, tensors that own its memory) when it is called without out"
            )
        whole, owned = made
        whole = self._without_padding(whole)
        # These are freed with the unit: our buffers, and the tensors that the class reports as its
        # own. Never a storage of the shard, which a class may pass through.
        of_shard = {_key(t) for t in inner_tensors(local)}
        buffers = (*self._outputs, *self._wholes, *owned)
        mine = {_key(t): t for given in buffers for t in inner_tensors(given)}
        self.gathered.own([t.untyped_storage() for key, t in mine.items() if key not in of_shard])
        self._written = list(owned)
        param.make_unsharded(whole)
        self.is_made = True
        self._record_unsharded()

    def _without_padding(self, made: torch.Tensor) -> torch.Tensor:
        shape = self.params[0].full_shape
        strides = contiguous_strides(shape)
        if made.shape == shape and made.stride() == strides:
            return made
        # By ``as_strided``, as in torch's FSDP2: an operator that such classes implement.
        return made.as_strided(shape, strides, 0)

    def _make_again(self, computing: torch.Tensor) -> None:
        """Write the gathered values into the parameter that computes."""
        # For autograd it is unchanged, as the gather in backward gives the same values again. So
        # the version counters of everything written are kept: of the wrapper, its inner tensors and
        # the rows.
        local: Any = self.params[0].local
        before = inner_tensors(computing)
        written = {id(t): t for t in (computing, *before, *self._written, *self._rows)}
        with torch.autograd._unsafe_preserve_version_counter(tuple(written.values())):
            made = local.fsdp_post_all_gather(
                self._rows, self._metadata, self.gather_dtype, out=computing
            )
            new = made[0] if isinstance(made, tuple) and made else made
            if isinstance(new, torch.Tensor):
                target = local_of(computing)
                write_into(target, self._without_padding(new))
        # Compute may still read an inner tensor that was replaced (a scale), but its memory belongs
        # to the stream of gathers. So it is held until the next gather, which waits for compute.
        after = {id(t) for t in inner_tensors(computing)}
        self._replaced = [t for t in before if id(t) not in after]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor``, with zeros appended to have ``rows`` rows."""
    if tensor.shape[0] >= rows:
        return tensor
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]].copy_(tensor)
    return padded


def _mesh_of_shards(mesh: DataParallelMesh) -> DeviceMesh:
    """The 1-D mesh of the ranks that together hold each parameter: without sharding, this rank.

    Collective over the ranks of the mesh at the first call where parameters are not sharded.
    """
    if mesh.shard_group is not None:
        if mesh.mesh.ndim == 1 or mesh.mesh.mesh_dim_names is None:
            return mesh.mesh
        return mesh.mesh[mesh.mesh.mesh_dim_names[-1]]
    # No dim of the user's mesh has one rank. Tensor subclasses use this mesh: torchao's NF4
    # multiplies its rows by the size.
    beside = mesh.replicate_group
    assert beside is not None
    if beside not in _single_meshes:
        group = own_group(beside, device_of(mesh), "fsdp2_alone", [dist.get_rank()], connect=False)
        _single_meshes[beside] = DeviceMesh.from_group(group, mesh.device_type)
    return _single_meshes[beside]


_single_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()

own_buckets.append(ExtensionBucket)
