"""Layers over tensor-parallel ranks, with as much memory and traffic as those of Megatron-LM.

After "Megatron-LM" (arXiv 1909.08053) and "Reducing Activation Recomputation" (2205.05198), written
down from memory; for published_megatron.py and published_llama.py. Tensors are (sequence, batch,
width). Between linear layers each rank has all of them, or a part of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# -- collectives of tensor parallelism -------------------------------------------------------------


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The parts of the sequence of all ranks; returns before it has come."""
    return torch.ops._c10d_functional.all_gather_into_tensor(
        x.contiguous(), mesh.size(), mesh.get_group().group_name
    )


def scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks, of a part of the sequence; returns before it has come."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(
        x.contiguous(), "sum", mesh.size(), mesh.get_group().group_name
    )


def sum_of(x: Tensor, mesh: DeviceMesh, op: str = "sum") -> Tensor:
    """The sum over ranks; returns before it has come."""
    return torch.ops._c10d_functional.all_reduce(x, op, mesh.get_group().group_name)


wait = collectives.wait_tensor


def reduced(x: Tensor, mesh: DeviceMesh, parts: bool) -> Tensor:
    """The sum over ranks: all of it, or a part of the sequence."""
    return wait((scatter if parts else sum_of)(x, mesh))


def of_reduced(grad: Tensor, mesh: DeviceMesh, parts: bool) -> Tensor:
    """The gradient of what `reduced` gets."""
    return wait(gather(grad, mesh)) if parts else grad


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
        return F.linear(wait(gather(x, mesh)) if parts else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        come = gather(x, ctx.mesh) if ctx.parts else x
        of_input = (scatter if ctx.parts else sum_of)(grad @ weight, ctx.mesh)
        rows = grad.flatten(0, 1)
        whole = wait(come) if ctx.parts else come
        of_weight = rows.t() @ whole.flatten(0, 1)
        of_bias = rows.sum(0) if ctx.has_bias else None
        return wait(of_input), of_weight, of_bias, None, None


class _Summed(torch.autograd.Function):
    """What is `reduced`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, parts: bool) -> Tensor:
        ctx.mesh, ctx.parts = mesh, parts
        return reduced(x, mesh, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return of_reduced(grads[0], ctx.mesh, ctx.parts), None, None


class _OwnPart(torch.autograd.Function):
    """The own part of a sequence that all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.chunk(mesh.size())[mesh.get_local_rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return wait(gather(grads[0], ctx.mesh)), None


class _AllParts(torch.autograd.Function):
    """A sequence that all ranks get, of the parts that each has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return wait(gather(x, mesh))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].chunk(ctx.mesh.size())[ctx.mesh.get_local_rank()].clone(), None


def sent(x: Tensor, layer: Parallel) -> Tensor:
    """What a rank sends to the next stage: its part, which others of that stage put together.

    "Scatter/gather" of 2104.04473: the network between nodes is slower than the links within.
    """
    return x if layer.mesh is None or layer.parts else _OwnPart.apply(x, layer.mesh)


def received(x: Tensor, layer: Parallel) -> Tensor:
    """What the other stage `sent`, as this one needs it."""
    return x if layer.mesh is None or layer.parts else _AllParts.apply(x, layer.mesh)


class CrossEntropy(torch.autograd.Function):
    """Of each token, from logits of which each rank has some words: softmax is kept in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: DeviceMesh | None) -> Tensor:
        def over_ranks(x: Tensor, op: str) -> Tensor:
            return x if mesh is None else wait(sum_of(x, mesh, op))

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


def losses_of(logits: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The loss of each token, against id 0."""
    targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    return CrossEntropy.apply(logits, targets, mesh)


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


def own_part(param: Any) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


class ColumnLinear(Parallel):
    """A linear layer of whose outputs each rank has some."""

    def __init__(self, width: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5)
        self.register_parameter("bias", nn.Parameter(torch.zeros(out)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = own_part(self.weight), own_part(self.bias)
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
        made = F.linear(x, own_part(self.weight))
        return made if self.mesh is None else _Summed.apply(made, self.mesh, self.parts)


class Embedding(Parallel):
    """Vectors of tokens and positions, of whose words each rank has some."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        weight, own = own_part(self.weight), tokens.t()
        if self.mesh is None:
            return F.embedding(own, weight)
        own = own - self.mesh.get_local_rank() * len(weight)
        elsewhere = (own < 0) | (own >= len(weight))
        made = F.embedding(own.masked_fill(elsewhere, 0), weight)
        made = made.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return _Summed.apply(made, self.mesh, self.parts)
