"""Arguments of `fully_shard` as dataclasses: precision, offload, mesh, placement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes for a module's computation, gradient reduction and outputs.

    The sharded parameters keep their original dtype, and so does the optimizer step. The cast
    happens on the shard, before the all-gather, so that the low-precision bytes travel.

    Args:
        param_dtype: dtype of the unsharded floating-point parameters and therefore of forward and
            backward. ``None`` keeps the original dtype. Integer and bool parameters are never
            cast, nor is float8, unless ``param_dtype_override_fn`` asks for it.
        reduce_dtype: dtype in which gradients are summed over ranks (complex parameters use their
            own). With float16, part of the division happens before the sum. ``None`` means the
            dtype of the sharded parameters, whatever the compute dtype (as in torch since 2.15;
            before that, the compute dtype). On backends where this library does the summing
            itself (gloo), low-precision sums are accumulated in float32, and a wider
            ``reduce_dtype`` does not increase traffic: the low-precision gradients are sent and
            widened before they are added. With gradient sync turned off, gradients accumulate in
            this dtype.
        output_dtype: dtype to cast the floating-point outputs of forward to; ``None`` leaves them.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
        param_dtype_override_fn: called once with each parameter when `fully_shard` takes it.
            Returns the parameter's own dtype to compute with it uncast, or ``param_dtype`` or
            None to follow ``param_dtype``. It must return the same on every rank. Inputs are
            still cast to ``param_dtype``. Keyword-only.
        cast_frozen_params: whether parameters that are frozen when `fully_shard` is called are
            also stored in ``param_dtype``: nothing updates them, so they do not need the extra
            precision. ``state_dict`` then has that dtype. Not in torch.

    Raises:
        TypeError: if a value is not a dtype, or not a floating-point one.

    Example:
        >>> bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> fully_shard(block, mp_policy=bf16)
        >>> norms = set(model.norm.parameters())
        >>> keep_norms = MixedPrecisionPolicy(
        ...     torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p in norms else None
        ... )
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    # Keyword-only, as in torch. It came after `cast_frozen_params`, which by that stays the fifth
    # positional argument.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )
    cast_frozen_params: bool = False

    def __post_init__(self) -> None:
        check_dtypes(self)


def check_dtypes(policy: MixedPrecisionPolicy) -> None:
    """Check that ``policy``, ours or torch's, names dtypes that forward can compute in.

    Raises:
        TypeError: if it is no policy, or a dtype is neither None nor a floating-point or complex
            ``torch.dtype``.
    """
    dtypes = ("param_dtype", "reduce_dtype", "output_dtype")
    if not all(hasattr(policy, name) for name in (*dtypes, "cast_forward_inputs")):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {policy!r}")
    for name in dtypes:
        # torch's class checks nothing when it is made, so `fully_shard` calls this for both: a
        # wrong value would show as an error of a cast in the first forward, far from where it was
        # set.
        value = getattr(policy, name)
        if value is None:
            continue
        if not isinstance(value, torch.dtype):
            raise TypeError(
                f"{name} must be a torch.dtype, like torch.bfloat16, or None, got {value!r}"
            )
        if not (value.is_floating_point or value.is_complex):
            raise TypeError(f"{name} must be a floating-point dtype, got {value}")


def param_dtype_of(policy: MixedPrecisionPolicy, param: nn.Parameter) -> torch.dtype | None:
    """The ``param_dtype`` that ``policy``, ours or torch's, gives one parameter.

    Raises:
        ValueError: if its ``param_dtype_override_fn`` returns a value that is not allowed.
    """
    choose = getattr(policy, "param_dtype_override_fn", None)  # torch's policy has it since 2.15
    chosen = None if choose is None else choose(param)
    if chosen is None:
        # One byte per element (float8) is storage, not arithmetic: kernels read it with its scales.
        return policy.param_dtype if param.dtype.itemsize > 1 else None
    if not isinstance(chosen, torch.dtype):
        raise ValueError(
            f"param_dtype_override_fn must return a torch.dtype or None but got {type(chosen)}"
        )
    if chosen not in (policy.param_dtype, param.dtype):
        raise ValueError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original "
            f"dtype but got {chosen} for a parameter with dtype {param.dtype} and param_dtype "
            f"{policy.param_dtype}"
        )
    return chosen


def compute_dtype(dtype: torch.dtype, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the unsharded form of a parameter of ``dtype``."""
    # Neither integers, which are indices or quantized values, nor complex numbers, which a real
    # dtype would cut to their real part, count as floating point here.
    return param_dtype if param_dtype is not None and dtype.is_floating_point else dtype


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` parameters are summed given ``reduce_dtype``."""
    # A cast of complex gradients to a real dtype drops the imaginary part, with a warning at most.
    if reduce_dtype is None or (dtype.is_complex and not reduce_dtype.is_complex):
        return dtype
    return reduce_dtype


def wire_dtype(compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an exchange sends the gradients of one backward."""
    # The receiver widens what it adds, so to widen before sending would only send more bytes. This
    # follows from settings and never from the gradient at hand: the receiver allocates by it, and
    # autograd makes some gradients of low-precision weights in float32 (norms on the CPU).
    return compute_dtype if compute_dtype.itemsize < reduce_dtype.itemsize else reduce_dtype


class WirePolicy:
    """Another form of what is sent, for a part of the library to make: the base of `CommPolicy`."""


def check_comm_policy(policy: object) -> None:
    """Check that it is a `CommPolicy` or None; raises TypeError."""
    if policy is not None and not isinstance(policy, WirePolicy):
        raise TypeError(f"comm_policy must be a CommPolicy or None, got {policy!r}")


@dataclass
class OffloadPolicy:
    """Sharded parameters stay on the compute device (the default)."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and therefore optimizer state live in host memory.

    Shards are copied to the device before each all-gather, and reduced gradients back to the
    host during backward; the optimizer step runs on the CPU.

    Args:
        pin_memory: whether to page-lock the host memory, so that copies overlap with compute.
            Has no effect on machines without an accelerator, where nothing can be pinned.

    Example:
        >>> fully_shard(model, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True


def adopt_offload_policy(policy: object) -> OffloadPolicy:
    """``policy`` as one of ours: torch's of the same names are converted, None is the default.

    Raises:
        TypeError: if it is something else.
    """
    if policy is None:  # torch accepts it, and several trainers pass it
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    # An instance of one of torch's classes can only exist once their module has been imported.
    theirs = sys.modules.get("torch.distributed.fsdp")
    if theirs is not None and isinstance(policy, theirs.CPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)
    if theirs is not None and isinstance(policy, theirs.OffloadPolicy):
        return OffloadPolicy()
    raise TypeError(
        f"offload_policy must be an OffloadPolicy or None, got {policy!r}: "
        "CPUOffloadPolicy() keeps shards, gradients and optimizer state in host memory"
    )


@dataclass
class DataParallelMeshDims:
    """Names the data-parallel dims of a mesh that has other dims as well.

    Args:
        shard: name of the mesh dim to shard over, or names of several to flatten into one.
        replicate: name of the mesh dim to replicate over, or names of several, as for ``shard``.

    Raises:
        ValueError: when neither is given.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4, 8), mesh_dim_names=("rep", "shard", "tp"))
        >>> fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("shard", "rep"))
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """``shard`` as a tuple of names of mesh dims."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """``replicate`` as a tuple of names of mesh dims."""
        return _as_names(self.replicate)


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a ``shard_placement_fn`` may return: where to shard, and over which mesh.

    Args:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh: the mesh for this parameter, 1-D or 2-D as for `fully_shard`; None: the one given to
            `fully_shard`. The parameter is gathered and its gradient averaged over its ranks.
        mesh_info: the same in the form of torch's type of this name: any object with a ``mesh``.

    Example:
        >>> def place(param):
        ...     return ShardPlacementResult(Shard(0), expert_mesh) if param in experts else None
        >>> fully_shard(block, mesh=mesh, shard_placement_fn=place)
    """

    placement: Any = None
    mesh: Any = None
    mesh_info: Any = None


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
