"""FlexAttention on fake tensors: one kernel forward and one backward, as compiled on CUDA.

torch refuses its backward on the CPU, so the operator below ``flex_attention`` is replaced while a
step is traced. The kernel skips blocks of scores that the mask leaves out entirely. Their number is
read from the mask. If the mask is made on fake tensors, inside the model, its function is evaluated
at points of every block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from ...common.pytree import tensors_in
from .attention import ContextParallel
from .meter import StorageMeter
from .op_costs import repeated_heads

_MODULE = "torch.nn.attention.flex_attention"
_NO_OP_BLOCK = 1 << 30  # the block size of the mask that torch makes if there is none
_MAX_POINTS = 1 << 24  # at which a mask is evaluated


@contextmanager
def flex_kernels(
    meter: StorageMeter, notes: list[str], context: ContextParallel | None = None
) -> Iterator[None]:
    """Context in which ``flex_attention`` takes fake tensors of the CPU that need gradients."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:  # nobody has imported it
        yield
        return
    original, validate = module.flex_attention_hop, module._validate_device
    kernel = _Flex(meter, notes, original, context)

    def validated(query: Any, key: Any, value: Any) -> None:
        if not isinstance(query, FakeTensor):
            validate(query, key, value)

    module.flex_attention_hop, module._validate_device = kernel, validated
    try:
        yield
    finally:
        module.flex_attention_hop, module._validate_device = original, validate


class _Flex:
    """Takes the place of the operator of higher order."""

    def __init__(
        self,
        meter: StorageMeter,
        notes: list[str],
        original: Callable,
        context: ContextParallel | None,
    ) -> None:
        self._meter, self._notes, self._original = meter, notes, original
        self._context = context
        self._densities: dict[Any, tuple[Any, float]] = {}

    def __call__(
        self, q: Any, k: Any, v: Any, score_mod: Any, block_mask: tuple, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(q, FakeTensor):
            return self._original(q, k, v, score_mod, block_mask, *args, **kwargs)
        if self._context is not None:
            raise self._context.refused("flex_attention (which it splits through another function)")
        density = self._density(block_mask, q.shape[-2], k.shape[-2])
        captured = self._captured(score_mod, q)
        made = _FlexAttention.apply(self._meter, density, q, k, v, *captured)
        out, logsumexp = made
        return out, logsumexp, logsumexp.new_empty(0)

    def _density(self, block_mask: tuple, num_queries: int, num_keys: int) -> float:
        """The part of the scores that is computed."""
        mask = block_mask[-1]
        key = (id(mask), num_queries, num_keys)
        if key not in self._densities:  # the mask is kept, so that its id is not reused
            self._densities[key] = (mask, self._measure(block_mask, num_queries, num_keys))
        return self._densities[key][1]

    def _captured(self, score_mod: Any, query: torch.Tensor) -> list[torch.Tensor]:
        """Tensors that a score_mod uses and that need gradients (a trained bias).

        They are found by calling it, as it may reach them through a module, a list or another
        function. Gradients are off, so its intermediate results are not found.
        """
        with self._meter.paused(), torch.no_grad(), _Trained() as trained:
            score = query.new_empty(1)
            places = [score.new_zeros(1, dtype=torch.int) for _ in range(4)]
            try:  # on tensors without dimensions, as torch calls it
                torch.vmap(score_mod)(score, *places)
            except Exception as error:  # of the user's function
                self._notes.append(
                    "FlexAttention: gradients of what its score_mod uses may be missing, as it "
                    f"could not be evaluated ({type(error).__name__}: {error})"
                )
        return list(trained.found.values())

    def _measure(self, block_mask: tuple, num_queries: int, num_keys: int) -> float:
        partial, full = block_mask[2], block_mask[4]
        block_q, block_k, mask = block_mask[-3:]
        if block_q >= _NO_OP_BLOCK:
            return 1.0
        rows, columns = -(-num_queries // block_q), -(-num_keys // block_k)
        with self._meter.paused(), unset_fake_temporarily(), torch.no_grad():
            if not isinstance(partial, FakeTensor):
                computed = partial.sum() + (0 if full is None else full.sum())
                masks = partial.numel() // rows  # one for each sample and head that differ
                return float(computed) / (masks * rows * columns)
            try:
                return _sampled(mask, (num_queries, num_keys), (block_q, block_k))
            except Exception as error:  # of the user's function
                self._notes.append(
                    "FlexAttention: all blocks are counted, as the mask could not be evaluated "
                    f"({type(error).__name__}: {error})"
                )
                return 1.0


def _sampled(mask: Callable, sizes: tuple[int, int], blocks: tuple[int, int]) -> float:
    """The part of blocks in which ``mask`` is true somewhere, of the first sample and head.

    It is evaluated at both ends of a block and at points between them.
    """
    num_blocks = [-(-size // block) for size, block in zip(sizes, blocks, strict=True)]
    points = 8
    while points > 2 and num_blocks[0] * num_blocks[1] * points * points > _MAX_POINTS:
        points //= 2
    places = []
    for size, block, count in zip(sizes, blocks, num_blocks, strict=True):
        starts = torch.arange(count)[:, None] * block
        inside = torch.linspace(0, block - 1, points).long()
        places.append((starts + inside).clamp(max=size - 1).flatten())
    zero = torch.zeros((), dtype=torch.long)
    seen = mask(zero, zero, places[0][:, None], places[1][None, :])
    seen = seen.expand(len(places[0]), len(places[1]))
    by_block = seen.unflatten(1, (-1, points)).unflatten(0, (-1, points))
    return float(by_block.any(3).any(1).float().mean())


class _Trained(TorchFunctionMode):
    """Collects the tensors that need gradients among the arguments of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.found |= {id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad}
        return func(*args, **(kwargs or {}))


class _FlexAttention(torch.autograd.Function):
    """The tensors that the kernels read, write and keep: out, and one number per query."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        meter: StorageMeter,
        density: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *captured: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*q.shape[:-1], v.shape[-1])
        out = torch.empty_like(q) if shape == q.shape else q.new_empty(shape)
        logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, logsumexp, *captured)
        ctx.meter, ctx.density = meter, density
        ctx.set_materialize_grads(False)
        flops = sdpa_flop_count(q.shape, repeated_heads(q, k), repeated_heads(q, v))
        meter.count_tensors(
            [q, k, v, *captured], [out, logsumexp], flops=int(flops * density), attention=True
        )
        return out, logsumexp

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        q, k, v, out, logsumexp, *captured = ctx.saved_tensors
        made = [
            torch.empty_like(t) if needs else None
            for t, needs in zip((q, k, v, *captured), ctx.needs_input_grad[2:], strict=True)
        ]
        # First the products of rows of out and of its gradient, then one kernel.
        rows = torch.empty_like(logsumexp)
        ctx.meter.count_tensors([out, grads[0]], [rows])
        flops = sdpa_backward_flop_count(
            out.shape, q.shape, repeated_heads(q, k), repeated_heads(q, v)
        )
        ctx.meter.count_tensors(
            [grads[0], q, k, v, logsumexp, rows, *captured],
            made,
            flops=int(flops * ctx.density),
            attention=True,
        )
        return (None, None, *made)
