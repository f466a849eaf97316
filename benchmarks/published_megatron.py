"""GPT as Megatron-LM runs it, in tensor-parallel stages; large ones for the meta device only.

After "Megatron-LM" (arXiv 1909.08053), "Efficient Large-Scale Language Model Training" (2104.04473)
and "Reducing Activation Recomputation" (2205.05198), written down from memory. Tensors are
(sequence, batch, width). What those run as one kernel is written so that it is one here: the scale
of scores is that of the multiplication, the causal mask is part of the softmax (so it is left out),
the bias of the first linear layer is added by its multiplication.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import register_cost

# Width, blocks and heads of models of "Reducing Activation Recomputation", table 3.
SIZES_OF_MEGATRON = {"Megatron 22B": (6144, 48, 64), "Megatron 175B": (12288, 96, 96)}

# -- collectives of tensor parallelism -------------------------------------------------------------


def _gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The parts of the sequence of all ranks; returns before it has come."""
    return torch.ops._c10d_functional.all_gather_into_tensor(
        x.contiguous(), mesh.size(), mesh.get_group().group_name
    )


def _scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks, of a part of the sequence; returns before it has come."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(
        x.contiguous(), "sum", mesh.size(), mesh.get_group().group_name
    )


def _sum(x: Tensor, mesh: DeviceMesh, op: str = "sum") -> Tensor:
    """The sum over ranks; returns before it has come."""
    return torch.ops._c10d_functional.all_reduce(x, op, mesh.get_group().group_name)


_wait = collectives.wait_tensor


class _ToColumns(torch.autograd.Function):
    """A linear layer of which each rank has some outputs.

    With parts of sequences, these are gathered before it, and again in backward: what is kept is
    the own part. That gather goes on beside the gradient of the input, whose sum goes on beside
    that of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: DeviceMesh, parts: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.parts, ctx.has_bias = mesh, parts, bias is not None
        return F.linear(_wait(_gather(x, mesh)) if parts else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        come = _gather(x, ctx.mesh) if ctx.parts else x
        of_input = (_scatter if ctx.parts else _sum)(grad @ weight, ctx.mesh)
        rows = grad.flatten(0, 1)
        whole = _wait(come) if ctx.parts else come
        of_weight = rows.t() @ whole.flatten(0, 1)
        of_bias = rows.sum(0) if ctx.has_bias else None
        return _wait(of_input), of_weight, of_bias, None, None


class _Summed(torch.autograd.Function):
    """The sum over ranks: all of it, or a part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, parts: bool) -> Tensor:
        ctx.mesh, ctx.parts = mesh, parts
        return _wait((_scatter if parts else _sum)(x, mesh))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return (_wait(_gather(grad, ctx.mesh)) if ctx.parts else grad), None, None


class _CrossEntropy(torch.autograd.Function):
    """Of each token, from logits of which each rank has some words: softmax is kept in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: DeviceMesh | None) -> Tensor:
        def over_ranks(x: Tensor, op: str) -> Tensor:
            return x if mesh is None else _wait(_sum(x, mesh, op))

        words = logits.shape[-1]
        first = 0 if mesh is None else mesh.get_local_rank() * words
        scores = logits.float()
        scores -= over_ranks(scores.amax(-1), "max").unsqueeze(-1)
        own = targets - first
        elsewhere = (own < 0) | (own >= words)
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        chosen = scores.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)
        total = over_ranks(scores.exp_().sum(-1), "sum")
        losses = total.log() - over_ranks(chosen, "sum")
        scores /= total.unsqueeze(-1)
        ctx.save_for_backward(scores, own, elsewhere)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, own, elsewhere = ctx.saved_tensors
        ones = torch.where(elsewhere, 0.0, -1.0).to(softmax.dtype).unsqueeze(-1)
        grad = softmax.scatter_add(-1, own, ones)
        grad *= grads[0].unsqueeze(-1)
        return grad.to(ctx.dtype), None, None


# -- one kernel ------------------------------------------------------------------------------------


@torch.library.custom_op("published::bias_dropout_add", mutates_args=())
def bias_dropout_add(x: Tensor, bias: Tensor, before: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """``before + dropout(x + bias)``, and what was kept of it, one byte each."""
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    return before + (x + bias) * kept / (1 - p), kept


@bias_dropout_add.register_fake
def _(x: Tensor, bias: Tensor, before: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@torch.library.custom_op("published::dropped", mutates_args=())
def dropped(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    """The gradient of what dropout gets."""
    return grad * kept / (1 - p)


@dropped.register_fake
def _(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.p = inputs[3]


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
    (kept,) = ctx.saved_tensors
    of_x = dropped(grad, kept, ctx.p)
    return of_x, of_x.flatten(0, 1).sum(0), grad, None


bias_dropout_add.register_autograd(_backward, setup_context=_keep)
for _name in ("published::bias_dropout_add", "published::dropped"):
    register_cost(_name)  # each reads and writes its tensors once


# -- modules that know over which ranks they are ---------------------------------------------------


class Parallel(nn.Module):
    """A module that `parallelize` distributes.

    Attributes:
        mesh: of the ranks that share it; None: one has all of it.
        parts: whether each rank has a part of the sequence before and after it.
        dim: of its weight, of which each rank has a part.
    """

    dim = 0

    def __init__(self) -> None:
        super().__init__()
        self.mesh: DeviceMesh | None = None
        self.parts = False

    def distribute(self, mesh: DeviceMesh, parts: bool) -> None:
        """Keep the part of this rank."""
        self.mesh, self.parts = mesh, parts
        for name, param in list(self.named_parameters(recurse=False)):
            placed = distribute_tensor(param.detach(), mesh, [Shard(self.dim)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(placed))


def _own(param: Any) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


class ColumnLinear(Parallel):
    """A linear layer of whose outputs each rank has some."""

    def __init__(self, width: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5)
        self.register_parameter("bias", nn.Parameter(torch.zeros(out)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _own(self.weight), _own(self.bias)
        if self.mesh is None:
            return F.linear(x, weight, bias)
        return _ToColumns.apply(x, weight, bias, self.mesh, self.parts)


class RowLinear(Parallel):
    """A linear layer of whose inputs each rank has some; without its bias."""

    dim = 1

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        made = F.linear(x, _own(self.weight))
        return made if self.mesh is None else _Summed.apply(made, self.mesh, self.parts)


class Embedding(Parallel):
    """Vectors of tokens and positions, of whose words each rank has some."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        weight, own = _own(self.weight), tokens.t()
        if self.mesh is None:
            return F.embedding(own, weight)
        own = own - self.mesh.get_local_rank() * len(weight)
        elsewhere = (own < 0) | (own >= len(weight))
        made = F.embedding(own.masked_fill(elsewhere, 0), weight)
        made = made.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return _Summed.apply(made, self.mesh, self.parts)


class CoreAttention(nn.Module):
    """Scores, softmax, dropout, and the mean of values: what is recomputed in "selective"."""

    def __init__(self, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, mixed: Tensor) -> Tensor:
        length, batch, width = mixed.shape
        head = width // self.num_heads // 3
        split = mixed.view(length, batch * self.num_heads, 3 * head)
        q, k, v = (t.transpose(0, 1) for t in split.chunk(3, -1))
        empty = q.new_empty(len(q), length, length)
        scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=head**-0.5)
        weights = F.dropout(F.softmax(scores, -1), self.dropout, self.training)
        made = torch.bmm(weights, v).transpose(0, 1)
        return made.reshape(length, batch, self.num_heads * head)


class MegatronBlock(nn.Module):
    """Norms, attention written out, GELU; biases of the second layers are added with dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = ColumnLinear(width, 3 * width)
        self.core = CoreAttention(num_heads, dropout)
        self.proj = RowLinear(width, width)
        self.up = ColumnLinear(width, 4 * width)
        self.down = RowLinear(4 * width, width)
        self.bias1 = nn.Parameter(torch.zeros(width))
        self.bias2 = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        made = self.proj(self.core(self.qkv(self.norm1(x))))
        x = bias_dropout_add(made, self.bias1, x, self.dropout)[0]
        made = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return bias_dropout_add(made, self.bias2, x, self.dropout)[0]


class MegatronGPT(nn.Module):
    """Token ids (batch, length) to the loss of each token (length, batch), against id 0.

    Args:
        vocab: of embedding and head, which share no weight here.
        width, num_layers, num_heads, length, dropout: as in papers.
    """

    def __init__(
        self,
        width: int,
        num_layers: int,
        num_heads: int,
        vocab: int = 51200,
        length: int = 2048,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = Embedding(vocab, width)
        self.positions = nn.Parameter(torch.randn(length, 1, width) * 0.02)
        self.layers = nn.ModuleList(
            MegatronBlock(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = ColumnLinear(width, vocab, bias=False)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return MegatronStage(self, 0, len(self.layers))(tokens)


class MegatronStage(nn.Module):
    """Some blocks of the model; the first stage embeds, the last one computes the losses."""

    def __init__(self, model: MegatronGPT, first: int, last: int) -> None:
        super().__init__()
        begins, ends = first == 0, last == len(model.layers)
        self.words = model.words if begins else None
        self.positions = model.positions if begins else None
        self.layers = model.layers[first:last]
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None and self.positions is not None:
            positions = self.positions[: x.shape[1]]
            x = self.words(x)
            if len(x) < len(positions):  # this rank has a part of the sequence
                assert self.words.mesh is not None
                positions = positions.chunk(self.words.mesh.size())[
                    self.words.mesh.get_local_rank()
                ]
            x = F.dropout(x + positions, self.dropout, self.training)
        for block in self.layers:
            x = block(x)
        if self.head is None or self.norm is None:
            return x
        logits = self.head(self.norm(x))
        targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
        return _CrossEntropy.apply(logits, targets, self.head.mesh)


def split_megatron(model: MegatronGPT, num_stages: int) -> list[MegatronStage]:
    """Stages of equally many blocks."""
    per_stage, rest = divmod(len(model.layers), num_stages)
    if rest:
        raise ValueError(f"{len(model.layers)} blocks cannot be divided into {num_stages} stages")
    bounds = range(0, len(model.layers) + 1, per_stage)
    return [MegatronStage(model, *ends) for ends in pairwise(bounds)]


def parallelize_megatron(model: Any, mesh: DeviceMesh, *, parts: bool = True) -> None:
    """Tensor parallelism of ``model``: all of it, or a stage.

    Args:
        parts: whether what is between the linear layers is of a part of the sequence on each rank
            ("sequence parallelism"); otherwise of all of it.
    """
    for module in list(model.modules()):
        if isinstance(module, Parallel):
            module.distribute(mesh, parts)
        elif isinstance(module, CoreAttention):
            module.num_heads //= mesh.size()


def cores_of(num_layers: int) -> list[str]:
    """The names of what "selective" recomputes, of as many blocks."""
    return [f"layers.{i}.core" for i in range(num_layers)]
