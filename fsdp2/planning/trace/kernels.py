"""The kernels of an accelerator, in a step that is traced on fake tensors of the CPU.

torch chooses kernels by device. Without an accelerator, only CPU kernels are available: fake CUDA
tensors have no backward on a build or a machine without CUDA. So operators that CUDA runs as one
kernel, and the CPU as several, are replaced while a step is traced: attention, RMS norm and
dropout. Each replacement saves the same tensors for backward as the CUDA kernel, and costs one
kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from typing_extensions import override

from .attention import KINDS, AttentionKernels, ContextParallel
from .flex import flex_kernels
from .meter import StorageMeter


@dataclass(frozen=True)
class Kernels:
    """The kernels that a step runs, for `estimate`, `predict` and `plan`.

    Attributes:
        device: "cuda": the fused kernels of accelerators; "cpu": CPU kernels.
        attention: the kernel of ``scaled_dot_product_attention``: "flash", "efficient", "cudnn" or
            "math" (scores in memory). "auto" chooses as torch does on CUDA: flash if possible, then
            efficient, then math, without kernels that ``torch.nn.attention.sdpa_kernel`` disables.
        fused_norms: whether RMS norms are one kernel, as on CUDA if input and weight have the same
            dtype.

    Raises:
        ValueError: for an unknown device or attention kernel.

    Example:
        >>> from fsdp2.planning import Kernels
        >>> Kernels(attention="math").attention
        'math'
    """

    device: str = "cuda"
    attention: str = "auto"
    fused_norms: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("device", ("cuda", "cpu")), ("attention", ("auto", *KINDS))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")


def kernels_of(kernels: Kernels | None, device_type: str) -> Kernels:
    """``kernels``, or the device's kernels if it is None.

    Raises:
        TypeError: for anything else.
    """
    if kernels is None:
        return Kernels(device="cpu" if device_type == "cpu" else "cuda")
    if not isinstance(kernels, Kernels):
        raise TypeError(f"kernels must be fsdp2.planning.Kernels or None, got {kernels!r}")
    return kernels


@contextmanager
def traced_kernels(
    kernels: Kernels, meter: StorageMeter, notes: list[str], context: ContextParallel | None = None
) -> Iterator[None]:
    """Context in which fake tensors of the CPU run the operators of ``kernels``.

    Args:
        meter: what counts the operations.
        notes: receives sentences about the chosen kernels when the context ends.
        context: the ranks that divide sequences; None: each rank has whole sequences.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            # Compiled code cannot be traced; the same operators run without it.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if kernels.device == "cuda":
            attention = AttentionKernels(kernels.attention, context)
            made: dict[str, Callable] = {
                "scaled_dot_product_attention": attention,
                "dropout": _dropout,
            }
            if kernels.fused_norms:
                made["rms_norm"] = lambda *args, **kwargs: _rms_norm(meter, *args, **kwargs)
            # In a traced graph, Python caches the kernel that an operator was dispatched to. The
            # cache is cleared at both ends, since kernels have been added or removed.
            replaced = [getattr(torch.ops.aten, name).default for name in made]
            stack.callback(_forget_dispatch, replaced)  # once the library is gone
            library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
            for (name, replacement), original in zip(made.items(), replaced, strict=True):
                # In every thread, until the context ends, so real tensors are dispatched as before;
                # also tensors of graphs that are traced for a compiler, which fuses norms itself.
                kinds = (FakeTensor,) if name == "rms_norm" else (FakeTensor, FunctionalTensor)
                library.impl(name, _for_fakes(replacement, original, kinds), "AutogradCPU")
            _forget_dispatch(replaced)
            if context is not None:
                stack.enter_context(context.active())
            stack.enter_context(flex_kernels(meter, notes, context))
            stack.callback(lambda: notes.extend(attention.notes()))
        yield


def _forget_dispatch(operators: Iterable[Any]) -> None:
    for operator in operators:
        operator._uncache_dispatch(torch._C.DispatchKey.AutogradCPU)


def _for_fakes(replacement: Callable, original: Any, kinds: tuple[type, ...]) -> Callable:
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, kinds):
            return original.decompose(first, *args, **kwargs)
        result = replacement(first, *args, **kwargs)
        return original.decompose(first, *args, **kwargs) if result is None else result

    return call


# -- dropout ---------------------------------------------------------------------------------------


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor | None:
    """One kernel that keeps a mask of one byte per element; the CPU keeps one of x's dtype."""
    if not train or not 0 < p < 1 or not x.numel():
        return None
    return torch.native_dropout(x, p, True)[0]


# -- RMS norm --------------------------------------------------------------------------------------


def _rms_norm(
    meter: StorageMeter,
    x: torch.Tensor,
    shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor | None:
    if weight is not None and weight.dtype != x.dtype:
        return None  # as on CUDA: the fused kernel takes one dtype
    return _FusedRMSNorm.apply(x, weight, len(shape), meter)


class _FusedRMSNorm(torch.autograd.Function):
    """Reads, writes and keeps as ``aten::_fused_rms_norm`` does: x and one number per row."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, num_dims: int, meter: StorageMeter
    ) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = (*x.shape[: x.dim() - num_dims], *(1,) * num_dims)
        scale = x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        ctx.meter = meter
        meter.count_tensors([x, weight], [out, scale])
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        grad_weight = torch.empty_like(weight) if weight is not None and needs_weight else None
        ctx.meter.count_tensors([grads[0], x, weight, scale], [grad_x, grad_weight])
        return grad_x, grad_weight, None, None
