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

    Sharded parameters and the optimizer step keep the original dtype. The cast happens on the
    shard, before the all-gather, so low-precision data is sent.

    Args:
        param_dtype: dtype of the unsharded floating-point parameters, and so of forward and
            backward. ``None`` keeps the original dtype. Integer and bool parameters are never
            cast. float8 is cast only if ``param_dtype_override_fn`` returns ``param_dtype``.
        reduce_dtype: dtype in which gradients are summed over ranks (gradients of complex
            parameters keep their dtype). With float16, part of the division happens before the
            sum. ``None`` means the dtype of the sharded parameters, as in torch since 2.15
            (before, torch used the compute dtype). On gloo, where this library does the sums,
            low-precision gradients are sent as they are and accumulated in float32. A wider
            ``reduce_dtype`` then does not increase traffic. Without gradient sync, gradients
            accumulate in this dtype.
        output_dtype: dtype of floating-point outputs of forward. ``None`` leaves them unchanged.
        cast_forward_inputs: whether to cast floating-point inputs of forward to ``param_dtype``.
        param_dtype_override_fn: called once with each parameter when `fully_shard` takes it.
            Return the parameter's dtype to compute with it uncast; return ``param_dtype`` or None
            to follow ``param_dtype``. The result must be equal on all ranks. Inputs are still cast
            to ``param_dtype``. Keyword-only.
        cast_frozen_params: whether to also store parameters in ``param_dtype`` that are frozen
            when `fully_shard` is called. Nothing updates them, so they do not need the extra
            precision. ``state_dict`` then has that dtype. torch does not have this argument.

    Raises:
        TypeError: if a dtype argument is not a floating-point or complex ``torch.dtype``.

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
    # Keyword-only, as in torch. So `cast_frozen_params`, which existed before, stays the fifth
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
        # torch's class checks nothing when it is made, so `fully_shard` calls this for both.
        # Otherwise a wrong value would only fail at a cast in the first forward.
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
    # Not for integers, which are indices or quantized values, and not for complex numbers, which a
    # real dtype would cut to their real part.
    return param_dtype if param_dtype is not None and dtype.is_floating_point else dtype


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` parameters are summed given ``reduce_dtype``."""
    # A cast of complex gradients to a real dtype drops the imaginary part, with a warning at most.
    if reduce_dtype is None or (dtype.is_complex and not reduce_dtype.is_complex):
        return dtype
    return reduce_dtype


def wire_dtype(compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an exchange sends the gradients of one backward."""
    # The receiver widens the terms of its sums, so widening before sending would only send more
    # bytes. The dtype depends on settings and never on the gradient: the receiver allocates by it,
    # and autograd makes some gradients of low-precision weights in float32 (norms on the CPU).
    return compute_dtype if compute_dtype.itemsize < reduce_dtype.itemsize else reduce_dtype


class WirePolicy:
    """The base of `CommPolicy`; a part of the library compresses messages as it requires."""


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

    Shards are copied to the device before each all-gather, and reduced gradients are copied back
    to the host during backward. The optimizer step runs on the CPU.

    Args:
        pin_memory: whether to page-lock the host memory, so that copies overlap with compute.
            Without an accelerator, nothing can be pinned, and this has no effect.

    Example:
        >>> fully_shard(model, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True


def adopt_offload_policy(policy: object) -> OffloadPolicy:
    """Convert ``policy`` to our classes: torch's of the same names, or None for the default.

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
    """Names the data-parallel dims of a mesh that also has other dims.

    Args:
        shard: name of the mesh dim to shard over, or names of several dims to flatten into one.
        replicate: name of the mesh dim to replicate over, or names of several, as for ``shard``.

    Raises:
        ValueError: if neither is given.

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
    """A placement and a mesh for one parameter, as the result of a ``shard_placement_fn``.

    Args:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh: the mesh for this parameter, 1-D or 2-D as for `fully_shard`. The parameter is
            gathered over its ranks, and its gradient is averaged over them. None: the mesh given to
            `fully_shard`.
        mesh_info: the mesh in torch's form: any object with a ``mesh`` attribute.

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
