"""One managed parameter: where it is registered, and its sharded and unsharded forms.

A parameter has up to three `nn.Parameter` objects, each made once and swapped in the modules
that own it:

- ``sharded``: a DTensor whose local tensor is a slice of the bucket's sharded storage. This is
  what optimizers, ``state_dict`` and users see outside of forward and backward.
- ``unsharded``: the tensor that forward and backward compute with, a slice of the gathered
  storage. A plain tensor, or a DTensor on the tensor-parallel mesh if the original was one.
- ``secondary``: a tensor that a part may show in place of ``sharded`` between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..common.failures import explained
from ..dtensor.block_shard import block_shard
from ..dtensor.boxes import entries_per_part
from ..dtensor.from_local import spec_over
from ..dtensor.memory import with_own_storage
from ..dtensor.subclasses import attach_attributes, is_wrapper, plain_gradient, user_attributes
from ..policy import compute_dtype
from .layout import Slot
from .mesh import DataParallelMesh, concatenate

# Each copies something other than data and attributes from a parameter to its sharded form, and is
# called with both.
carriers: list[Callable[[nn.Parameter, nn.Parameter, ShardedParam], None]] = []
# By id, since tensors compare elementwise; an id that was given out again is found out by identity.
_managed: WeakValueDictionary[int, ShardedParam] = WeakValueDictionary()


@dataclass(frozen=True)
class TensorSpec:
    """How a DTensor is laid out over a mesh: what `DTensor.from_local` needs.

    Attributes:
        data_parallel: dims of ``mesh`` over which computation is data parallel, if any: there
            gradients are this rank's own contributions.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    data_parallel: tuple[int, ...] = ()
    _specs: dict[torch.dtype, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def without_data_parallel(self, name: str) -> TensorSpec | None:
        """The layout over the other dims of the mesh; None if there are none.

        Raises:
            ValueError: if the tensor is not replicated over the data-parallel dims.
        """
        dims = [d for d in range(self.mesh.ndim) if d not in self.data_parallel]
        names = self.mesh.mesh_dim_names
        assert names is not None
        for d in self.data_parallel:
            if not self.placements[d].is_replicate():
                raise ValueError(
                    f"Parameter '{name}': Expected Replicate() on DP dim '{names[d]}' (index {d}) "
                    f"but got {self.placements[d]}: fully_shard is to shard it there itself"
                )
        if not dims:
            return None
        mesh = self.mesh[tuple(names[d] for d in dims)]
        placements = tuple(self.placements[d] for d in dims)
        return TensorSpec(mesh, placements, self.shape, self.stride)

    def of_gradient(self, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """The layout that a gradient with ``placements`` should have."""
        # Over data-parallel dims it stays as it is, ``Partial()`` for a batch that is sharded
        # there. Redistributing it would all-reduce terms that the reduction sums anyway.
        return tuple(
            placements[d] if d in self.data_parallel else wanted
            for d, wanted in enumerate(self.placements)
        )

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor over ``local``, without communication and outside of autograd.

        If users see it, ``local`` should be at offset 0 of its storage (`with_own_storage`):
        torch.compile requires both to have the same offset.
        """
        # Gradients are wrapped in every step, and `DTensor.from_local` costs more than the launch
        # of a collective. So torch's description of the layout is made once per dtype and shared,
        # as operators on DTensors do.
        spec = self._specs.get(local.dtype)
        if spec is None:
            layout = self.mesh, self.placements, self.shape, self.stride
            spec = self._specs[local.dtype] = spec_over(*layout, local.dtype)
        if not local.storage_offset():
            return DTensor(local, spec, requires_grad=False)
        with torch.no_grad():
            # A DTensor copies the storage offset, but has no storage: with another offset than 0 it
            # seems to have data, which `copy.deepcopy` and pickle then look for.
            seen = local.as_strided(local.shape, local.stride(), 0)
            made = DTensor(seen, spec, requires_grad=False)
            made._local_tensor = local.view_as(local)
            return made


@dataclass(frozen=True)
class Annotations:
    """The annotations of a parameter that is a plain tensor, this rank's part of the whole one.

    Attributes:
        spec: the layout of the whole one; None if all dims of the mesh are data parallel.
        grad_placements: of its gradient.
        is_summed: whether gradients must be summed over ranks that are not data parallel.
        attributes: of the unsharded tensor only, by name.
    """

    spec: TensorSpec | None
    grad_placements: tuple[Placement, ...]
    is_summed: bool
    attributes: dict[str, Any]


# Each is asked about a parameter, its mesh and its name, when it is sharded.
annotation_readers: list[Callable[[torch.Tensor, DataParallelMesh, str], Annotations | None]] = []


class ShardedParam:
    """A parameter managed by a unit."""

    def __init__(
        self,
        original: nn.Parameter,
        owners: list[tuple[nn.Module, str]],
        mesh: DataParallelMesh,
        dim: int,
        fqn: str = "",
        granularity: int = 1,
    ) -> None:
        """Describe ``original``; it becomes sharded when `attach` gets its shard.

        Args:
            original: the parameter as the user made it, whole on this rank apart from tensor
                parallelism.
            owners: every (module, name) under which it is registered.
            mesh: the ranks to shard over.
            dim: the dim to shard; ignored for 0-dim parameters, which every rank holds whole.
            fqn: its qualified name, for messages.
            granularity: of how many entries along ``dim`` its shards consist.
        """
        self.owners = owners
        self.mesh = mesh
        self.fqn = fqn or owners[0][1]
        self.tensor_parallel: TensorSpec | None = None
        whole = original.detach()
        if isinstance(whole, DTensor):
            on_full_mesh = mesh.full_mesh is not None and whole.device_mesh == mesh.full_mesh
            self.tensor_parallel = TensorSpec(
                whole.device_mesh,
                tuple(whole.placements),
                whole.shape,
                whole.stride(),
                mesh.full_mesh_dims if on_full_mesh else (),
            )
            whole = whole.to_local()
        found = (read(original, mesh, self.fqn) for read in annotation_readers)
        self.annotations = next(filter(None, found), None)
        if self.annotations is not None and self.annotations.spec is not None:
            self.tensor_parallel = self.annotations.spec
        # A wrapper without the methods counts too: libraries patch them onto its class later, and
        # only the first gather needs them.
        self.extension = is_extension(whole, self.fqn) or is_wrapper(whole)
        self.full_shape = tuple(whole.shape)
        self.dtype = whole.dtype
        self.param_dtype: torch.dtype | None = None  # of the mixed-precision policy
        self.grad_dtype_is_set = False
        self.grad_dtype: torch.dtype | None = None  # if set; None: whatever autograd makes
        self.adopt_grad_dtype(original)
        if whole.ndim and not -whole.ndim <= dim < whole.ndim:
            raise ValueError(
                f"Cannot shard parameter '{self.fqn}' of shape {self.full_shape} on dim {dim}: "
                f"Shard dim {dim} is invalid for {whole.ndim}D tensor"
            )
        self.dim: int | None = dim % whole.ndim if whole.ndim else None
        self.granularity = self._needed_granularity(granularity)
        others = self.tensor_parallel
        if others is not None and others.data_parallel:
            others = others.without_data_parallel(self.fqn)
        shape, stride = original.shape, original.stride()
        if self.tensor_parallel is not None:
            shape, stride = self.tensor_parallel.shape, self.tensor_parallel.stride
        self.sharded_spec = _sharded_spec(shape, stride, others, self)
        self.attributes = user_attributes(original)
        for name in self.annotations.attributes if self.annotations is not None else ():
            self.attributes.pop(name, None)  # true of the unsharded tensor only
        # The check compares values, for which the host waits for the device: in the first step
        # only.
        self.checks_gradient = True
        self.is_sharded = False
        self.sharded: nn.Parameter = original
        self.unsharded: nn.Parameter | None = None
        self.secondary: nn.Parameter | None = None
        self._found_by: set[int] = set()  # keys of `_managed`

    def _needed_granularity(self, granularity: int) -> int:
        """1 if shards are the same without it: placements then equal torch FSDP2's."""
        if self.dim is None or self.mesh.shard_group is None:
            return 1
        size, num = self.full_shape[self.dim], self.mesh.num_shards
        same = entries_per_part(size, num, granularity) == entries_per_part(size, num)
        return 1 if same else granularity

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        return compute_dtype(self.dtype, self.param_dtype)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether it is a DTensor on mesh dims that are not data parallel."""
        others = self.tensor_parallel
        return others is not None and len(others.data_parallel) < others.mesh.ndim

    def adopt_grad_dtype(self, param: torch.Tensor) -> None:
        """Take over ``param.grad_dtype`` if a user set it. It cannot be unset any more."""
        with torch._C.DisableTorchFunctionSubclass():
            if sets_grad_dtype(param):
                self.grad_dtype_is_set = True
                self.grad_dtype = param.grad_dtype

    def set_grad_dtype(self, param: nn.Parameter) -> nn.Parameter:
        """Let ``param``, a form of this parameter, take gradients in the user's dtype."""
        if self.grad_dtype_is_set:
            param.grad_dtype = self.grad_dtype
        return param

    @property
    def local(self) -> torch.Tensor:
        """The local tensor of the sharded parameter."""
        return cast(DTensor, self.sharded)._local_tensor

    def attach(self, local: torch.Tensor) -> None:
        """Make ``local``, a slice of the sharded storage, the data of the sharded parameter."""
        if self.is_sharded:
            # The Parameter object stays, since optimizers hold it. Only what it shows is replaced.
            cast(DTensor, self.sharded)._local_tensor = local
            return
        self.is_sharded = True
        given = self.sharded
        sharded = nn.Parameter(self.sharded_spec.wrap(local), requires_grad=given.requires_grad)
        self.sharded = self.set_grad_dtype(sharded)
        attach_attributes(self.sharded, self.attributes)
        for carry in carriers:
            carry(given, sharded, self)
        self.manage(sharded)

    def make_unsharded(self, full: torch.Tensor) -> None:
        """Make the parameter that computes: ``full`` is a slice of the gathered storage."""
        # Annotated parameters are tensor-parallel too, but their modules compute on plain tensors.
        is_dtensor = self.tensor_parallel is not None and self.annotations is None
        data = self.tensor_parallel.wrap(full) if self.tensor_parallel and is_dtensor else full
        unsharded = nn.Parameter(data, requires_grad=self.sharded.requires_grad)
        before, self.unsharded = self.unsharded, self.set_grad_dtype(unsharded)
        if before is not None and before.grad is not None:
            # A sum of micro-batches continues if the unit is planned again between two of them. Not
            # on both: a graph may still add to the former parameter.
            unsharded.grad_dtype = None
            unsharded.grad, before.grad = before.grad.to(data.device), None
        attach_attributes(self.unsharded, self.attributes)
        if self.annotations is not None:
            attach_attributes(self.unsharded, self.annotations.attributes)
        self.manage(self.unsharded)

    def manage(self, made: nn.Parameter) -> None:
        """Let `managed_param` find this by ``made``, and not by earlier forms."""
        forms = {id(form) for form in (self.sharded, self.unsharded, self.secondary)}
        for number in self._found_by - forms:
            if _managed.get(number) is self:  # not given out again
                del _managed[number]
        self._found_by = {*(self._found_by & forms), id(made)}
        _managed[id(made)] = self

    def gradient_placements(self, grad: torch.Tensor) -> tuple[Placement, ...] | None:
        """The placements of ``grad`` over tensor-parallel ranks; None: the parameter's."""
        if isinstance(grad, DTensor):
            return tuple(grad.placements)
        if self.annotations is not None and self.annotations.is_summed:
            return self.annotations.grad_placements
        return None

    def local_gradient(self, grad: torch.Tensor, *, summed: bool = True) -> torch.Tensor:
        """The gradient of the unsharded parameter as a contiguous dense tensor of this rank.

        Args:
            summed: False leaves a sum over tensor-parallel ranks to be done later.
        """
        has = self.gradient_placements(grad) if summed else None
        if has is not None and self.tensor_parallel is not None:
            wanted = self.tensor_parallel.of_gradient(has)
            if has != wanted:
                if not isinstance(grad, DTensor):  # annotated: the plain gradient is a partial sum
                    grad = replace(self.tensor_parallel, placements=has).wrap(grad.contiguous())
                with explained(f"the sum of the gradient of '{self.fqn}'", None):
                    grad = grad.redistribute(placements=wanted)
        if isinstance(grad, DTensor):
            grad = grad.to_local()
        if hasattr(grad, "wait"):
            # An AsyncCollectiveTensor. It is a wrapper too, but wraps the gradient itself: it needs
            # no copy, only a wait.
            grad = grad.wait()
        if is_wrapper(grad):
            grad = plain_gradient(grad, self.fqn, check=self.checks_gradient)
            self.checks_gradient = False
        # Sparse gradients (``nn.Embedding(sparse=True)``) have other rows on every rank.
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        return grad.contiguous()


def managed_param(tensor: torch.Tensor) -> ShardedParam | None:
    """The parameter whose sharded or secondary form ``tensor`` is; None for other tensors."""
    param = _managed.get(id(tensor))
    if param is None or (tensor is not param.sharded and tensor is not param.secondary):
        return None
    return param


def param_gathered_as(tensor: torch.Tensor) -> ShardedParam | None:
    """The parameter whose unsharded form ``tensor`` is; None for other tensors."""
    param = _managed.get(id(tensor))
    return param if param is not None and param.unsharded is tensor else None


def managed_as(tensor: object) -> ShardedParam | None:
    """The parameter that has ``tensor`` as one of its forms; None for anything else."""
    param = _managed.get(id(tensor))
    forms = () if param is None else (param.sharded, param.unsharded, param.secondary)
    return param if any(form is tensor for form in forms) else None


def sets_grad_dtype(param: torch.Tensor) -> bool:
    """Whether a user chose the dtype of ``param.grad``."""
    if not hasattr(param, "grad_dtype"):
        return False
    # Before torch 2.15, choosing the default dtype cannot be distinguished from no choice.
    is_set = getattr(param, "_has_grad_dtype_override", None)
    return param.grad_dtype != param.dtype if is_set is None else is_set


EXTENSION_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_extension(tensor: torch.Tensor, name: str) -> bool:
    """Whether the class of ``tensor`` has its own hooks for the gather; see `extension`.

    Raises:
        ValueError: if it defines only one of the two methods.
    """
    defined = [method for method in EXTENSION_METHODS if hasattr(tensor, method)]
    if len(defined) == 1:
        raise ValueError(
            f"Parameter '{name}' ({type(tensor).__name__}) defines {defined[0]} only. Both "
            f"{' and '.join(EXTENSION_METHODS)} should be defined"
        )
    return bool(defined)


def own_rows(whole: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """The part of a whole parameter that ``rank`` holds, as a view."""
    if slot.dim is None:
        return whole
    start, stop = slot.span(rank)
    return whole.narrow(slot.dim, start, stop - start)


def shard_of(flat: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's shard of a parameter, as a view of ``flat``."""
    stop = slot.shard_offset + slot.local_numel(rank)
    return flat[slot.shard_offset : stop].view(slot.local_shape(rank))


def slice_with_own_storage(flat: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's shard of a parameter, with a storage of just these bytes of ``flat``."""
    # ``torch.save`` writes whole storages: for a plain view it would write the whole unit.
    shard = shard_of(flat, slot, rank)
    if shard.numel() == 0:
        return flat.new_empty(shard.shape)
    return shard if flat.is_meta else with_own_storage(shard)


def _sharded_spec(
    shape: torch.Size,
    stride: tuple[int, ...],
    tensor_parallel: TensorSpec | None,
    param: ShardedParam,
) -> TensorSpec:
    mesh, dim, granularity = param.mesh, param.dim, param.granularity
    data_parallel: list[Placement] = [Replicate()] * mesh.mesh.ndim
    if mesh.shard_group is not None and dim is not None:
        data_parallel[-1] = Shard(dim) if granularity == 1 else block_shard(dim, granularity)
    if tensor_parallel is None:
        return TensorSpec(mesh.mesh, tuple(data_parallel), shape, stride)
    # Tensor parallelism was applied first. If both shard the same dim, this rank's tensor-parallel
    # part is split again, and its rows are strided in the whole parameter. With a plain ``Shard``,
    # checkpoints and ``full_tensor()`` would put them in other places.
    splits = 1
    for size, placement in zip(tensor_parallel.mesh.shape, tensor_parallel.placements, strict=True):
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            splits *= size
    if splits > 1 and dim is not None and mesh.shard_group is not None:
        data_parallel[-1] = _StridedShard(dim, split_factor=splits)
    return TensorSpec(
        concatenate(mesh.mesh, tensor_parallel.mesh),
        (*data_parallel, *tensor_parallel.placements),
        shape,
        stride,
    )
