"""The cost of operators: FLOPs by operator, and bytes read and written by their arguments.

Every operator costs the bytes that it reads and writes, so a memory-bound operator needs no entry.
A compute-bound operator needs a formula: torch's (``torch.utils.flop_counter``), one from the table
below, or one from `register_cost`. An operator without a formula that is not known to be
memory-bound has no cost: `OpCost.known` is False, and its bytes are listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .events import Operation

Formula = Callable[..., int]

# Operators without a kernel.
FREE = frozenset(
    (
        *("detach", "_unsafe_view", "device", "lift_fresh", "alias", "empty", "empty_like"),
        *("new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
    )
)
_VIEWS_OR_COPIES = frozenset(
    overload
    for packet in (torch.ops.aten.to, torch.ops.aten.contiguous, torch.ops.aten.reshape)
    for overload in (getattr(packet, name) for name in packet.overloads())
)
# Operators that read only selected rows.
_LOOKUPS = frozenset(("embedding", "index_select", "gather", "index", "_unsafe_index"))
# In place, without reading what was there.
_OVERWRITES = frozenset(
    ("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_")
)
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
# Namespaces whose operators are memory-bound, except those with a word below in their names.
_OF_TORCH = frozenset(("aten", "prims", "prim", "_c10d_functional", "c10d", "inductor"))
# Parts of names between underscores: "relu_", "sqrt" and "cummax" are none of them.
_ARITHMETIC = re.compile(
    r"\w*bmm|(add|ssp?add|hsp|s)?mm|(add)?mv|v?dot|conv(olution)?(\d[dD])?|attention|flex|matmul"
    r"|linear|linalg|lstm|gru|rnn|fft|cdist|pdist|cholesky|triangular|svd|eigh?|eigvals\w*|solve"
    r"|lu|qr|geqrf|or[gm]qr|inverse|trilinear|bilinear|einsum|tensordot|householder|exp2d"
)


@dataclass(frozen=True)
class OpCost:
    """The cost of one call.

    Attributes:
        operation: the FLOPs are 0 if they are unknown.
        known: whether it has a formula, or is memory-bound.
    """

    operation: Operation
    known: bool


@dataclass(frozen=True)
class _Entry:
    flops: Formula
    nbytes: Formula | None = None


_registered: dict[str, _Entry] = {}


def register_cost(
    operator: Any, flops: int | Formula = 0, nbytes: int | Formula | None = None
) -> None:
    """Register the cost of a custom operator, for `estimate`, `predict` and `plan`.

    The cost of library operators, with kernels in CUDA or Triton, is unknown. Results list such
    operators; if they make up more than 1 % of the bytes of a step, an error is raised. Forward and
    backward are two operators, and each needs its cost. Formulas registered with torch
    (``torch.utils.flop_counter.register_flop_formula``) are used, too.

    Args:
        operator: the operator, ``torch.ops.library.name``, or its name, "library::name"; all
            overloads have the same cost.
        flops: FLOPs of a call (two per multiply-add): a number, or a function of the operator's
            arguments that gets the result as the keyword argument ``out``. 0: it is memory-bound.
        nbytes: bytes that a call reads and writes, in the same form. None: the bytes of all its
            tensors.

    Raises:
        TypeError: if ``operator`` is neither an operator nor a name with a namespace.
        ValueError: for a negative number.

    Example:
        >>> import fsdp2
        >>> def scan_flops(x, gate, *, out):
        ...     return 3 * x.numel()
        >>> fsdp2.planning.register_cost("mamba::selective_scan", scan_flops)
        >>> fsdp2.planning.register_cost("mamba::pack_sequences")  # only moves bytes
    """
    name = _name_of(operator)
    if name is None:
        raise TypeError(
            "register_cost needs an operator (torch.ops.library.name) or its name "
            f"('library::name'), got {operator!r}"
        )
    _registered[name] = _Entry(
        _as_formula(name, "flops", flops),
        None if nbytes is None else _as_formula(name, "nbytes", nbytes),
    )


def _as_formula(name: str, what: str, given: Any) -> Formula:
    if callable(given):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{what} of {name} must be a number or a function, got {given!r}")
    if not given >= 0:
        raise ValueError(f"{what} of {name} must not be negative, got {given}")
    number = int(given)
    return lambda *args, **kwargs: number


def _name_of(operator: Any) -> str | None:
    if isinstance(operator, str):
        name = operator.partition(".")[0]
        return name if re.fullmatch(r"\w+::\w+", name) else None
    if callable(getattr(operator, "overloads", None)):  # a packet: torch.ops.library.name
        return str(operator).replace(".", "::")
    return operator_name(operator) if callable(getattr(operator, "name", None)) else None


def operator_name(func: Any) -> str:
    """The operator as "namespace::name", without its overload."""
    name = func.name().partition(".")[0]
    return name if "::" in name else f"higher_order::{name}"


def has_no_kernel(func: Any) -> bool:
    """Whether an operator only makes a view or allocates."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    returns = () if schema is None else schema.returns
    views = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return views or operator_name(func).partition("::")[2] in FREE


def reads_selected_rows(func: Any) -> bool:
    """Whether an operator reads only as much of its first argument as it makes."""
    return operator_name(func).partition("::")[2] in _LOOKUPS


def may_copy(func: Any) -> bool:
    """Whether an operator is composite and returns a view or a copy.

    A dispatch mode sees such operators only inside a tensor subclass; elsewhere it sees the
    operators that they are composed of.
    """
    return func in _VIEWS_OR_COPIES


def cost_of(func: Any, args: tuple, kwargs: dict, result: Any) -> OpCost | None:
    """The cost of a call; None if no tensor takes part."""
    full_name = operator_name(func)
    namespace, _, name = full_name.partition("::")
    written = _written(func, args, kwargs, result)
    read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    if name in _OVERWRITES:
        read = read[1:]
    if not read and not written:
        return None
    dtype = next((t.dtype for t in read if t.is_floating_point()), torch.float32)
    num_written = sum(map(nbytes_of, written))
    num_read = num_written if name in _LOOKUPS else sum(map(nbytes_of, read))
    nbytes, known = num_read + num_written, True
    entry = _registered.get(full_name)
    if entry is not None:
        flops = int(entry.flops(*args, **kwargs, out=result))
        if entry.nbytes is not None:
            nbytes = int(entry.nbytes(*args, **kwargs, out=result))
    else:
        formula = _formula(func, full_name, name)
        flops = 0 if formula is None else int(formula(func, args, kwargs, result))
        known = formula is not None or _is_memory_bound(namespace, name)
    attention = name.startswith(_ATTENTION)
    if attention and _causal(func, args, kwargs):
        full_name += "_causal"  # reaches other FLOP/s: kernels skip less than what counts as 0
    return OpCost(Operation(flops, nbytes, dtype, attention, full_name), known)


def _written(func: Any, args: tuple, kwargs: dict, result: Any) -> list[torch.Tensor]:
    """The results, and the arguments that are changed: a fused optimizer returns nothing."""
    made = {id(t): t for t in tree_iter(result) if isinstance(t, torch.Tensor)}
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.is_mutable:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                made |= {id(t): t for t in tree_iter(value) if isinstance(t, torch.Tensor)}
    return list(made.values())


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of memory that reading all of ``tensor`` touches: expanded dims are read once."""
    if not tensor.numel():
        return 0
    reach = 1 + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    return min(tensor.numel(), reach) * tensor.itemsize


def _is_memory_bound(namespace: str, name: str) -> bool:
    return namespace in _OF_TORCH and not any(map(_ARITHMETIC.fullmatch, name.split("_")))


# -- formulas --------------------------------------------------------------------------------------


def _formula(func: Any, full_name: str, name: str) -> Any:
    """A function of (operator, args, kwargs, result), or None."""
    if name.startswith("_scaled_dot_product"):
        return _attention
    if full_name in _TABLE:
        return _TABLE[full_name]
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return None
    return lambda func, args, kwargs, out: formula(*args, **kwargs, out_val=out)


def _attention(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """By torch's formulas. Causal attention counts half, as kernels skip the rest."""
    if operator_name(func).endswith("_backward"):
        grad, q, k, v = args[:4]
        flops = sdpa_backward_flop_count(
            grad.shape, q.shape, repeated_heads(q, k), repeated_heads(q, v)
        )
    else:
        q, k, v = args[:3]
        flops = sdpa_flop_count(q.shape, repeated_heads(q, k), repeated_heads(q, v))
    return flops // 2 if _causal(func, args, kwargs) else flops


def repeated_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Size:
    """The shape of keys or values repeated for all heads of the queries (grouped attention)."""
    return torch.Size((*q.shape[:-2], *k.shape[-2:]))


def _causal(func: Any, args: tuple, kwargs: dict) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return False


def _rnn(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Input and hidden projections of every step; twice that in backward."""
    tokens = args[0].numel() // args[0].shape[-1]
    found = (w for w in tree_iter(args[1:3]) if isinstance(w, torch.Tensor))  # cuDNN has a list
    weights = sum(w.numel() for w in found if w.dim() > 1)
    return (4 if operator_name(func).endswith("backward") else 2) * tokens * weights


def _grouped_mm(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Experts one after the other are one multiplication of all tokens, however distributed.

    Tokens (T, K) by (E, K, N), or the gradient of the weights, (K, T) by (T, N): each token takes
    part once. Two operands with a dim of experts are a batch.
    """
    a, b = args[0].shape, args[1].shape
    return 2 * prod(a) * b[-1]


def _product(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """The product of a matrix and a matrix or vector: each element of the result is a sum."""
    first = args["add" in operator_name(func)]  # after what is added
    return 2 * out.numel() * first.shape[-1]


def _fft(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """5 N log2 N, as FFTW counts a complex transform; half of it if one side is real."""
    whole = max((args[0], out), key=lambda t: t.numel())
    dims = args[1]
    length = prod(whole.shape[d] for d in dims)
    flops = 5 * whole.numel() * max(1, (length - 1).bit_length())
    return flops if args[0].is_complex() and out.is_complex() else flops // 2


def _distances(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    return 3 * out.numel() * args[0].shape[-1]


def _per_matrix(times: float) -> Any:
    """FLOPs of a factorization: ``times`` the cube of its side, for every matrix of the batch."""

    def flops(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
        matrices = args[0]
        side = min(matrices.shape[-2:])
        return int(times * matrices.numel() * side)

    return flops


def _triangular(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    a, b = args[:2]
    return prod(b.shape) * a.shape[-1]


def _as(names: Iterable[str], formula: Any) -> dict[str, Any]:
    return {f"aten::{name}": formula for name in names}


# Sources: two FLOPs for a multiply-add; factorizations: Golub and Van Loan, Matrix Computations
# (Cholesky n^3 / 3, LU 2 n^3 / 3, an inverse 2 n^3, QR 4 n^3 / 3 of a square matrix).
_TABLE: dict[str, Any] = {
    **_as(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn"), _rnn),
    **_as(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped_mm),
    **_as(("_scaled_mm", "_scaled_mm_v2", "_int_mm", "linear", "mkldnn_linear"), _product),
    **_as(("mv", "addmv", "_addmm_activation"), _product),
    **_as(("dot", "vdot"), lambda func, args, kwargs, out: 2 * args[0].numel()),
    **_as(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _fft),
    **_as(("_cdist_forward", "_cdist_backward"), _distances),
    **_as(("_linalg_check_errors", "linalg_vector_norm", "linalg_cross"), lambda *given: 0),
    **_as(("linalg_cholesky_ex", "cholesky"), _per_matrix(1 / 3)),
    **_as(("linalg_lu_factor_ex", "_linalg_solve_ex", "_linalg_det"), _per_matrix(2 / 3)),
    **_as(("linalg_qr",), _per_matrix(4 / 3)),
    **_as(("linalg_inv_ex",), _per_matrix(2)),
    **_as(("linalg_solve_triangular", "triangular_solve", "cholesky_solve"), _triangular),
}
