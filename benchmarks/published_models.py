"""The models of published tables, as their authors ran them: for the meta device only.

Written after the descriptions in the sources, from memory; each says what of it decides the time.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2.experts import TokenExchange, local_experts

# -- Llama 3, as torchtitan has it -----------------------------------------------------------------


class LlamaBlock(nn.Module):
    """Grouped-query attention by a fused kernel, rotary embedding in complex fp32, SwiGLU."""

    def __init__(self, width: int, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        head = width // num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.wq = nn.Linear(width, num_heads * head, bias=False)
        self.wk = nn.Linear(width, num_kv_heads * head, bias=False)
        self.wv = nn.Linear(width, num_kv_heads * head, bias=False)
        self.wo = nn.Linear(num_heads * head, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        y = self.attention_norm(x)
        batch, length, _ = y.shape
        q = _rotate(self.wq(y).view(batch, length, self.num_heads, -1), rotation)
        k = _rotate(self.wk(y).view(batch, length, self.num_kv_heads, -1), rotation)
        v = self.wv(y).view(batch, length, self.num_kv_heads, -1)
        times = self.num_heads // self.num_kv_heads
        k, v = (_repeat(t, times) for t in (k, v))
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.wo(a.transpose(1, 2).contiguous().view(batch, length, -1))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(3).type_as(x)


def _repeat(x: Tensor, times: int) -> Tensor:
    batch, length, heads, width = x.shape
    wide = x[:, :, :, None, :].expand(batch, length, heads, times, width)
    return wide.reshape(batch, length, heads * times, width)


class Llama(nn.Module):
    """Token ids (batch, length) to logits. The default is Llama 3 8B."""

    def __init__(
        self,
        vocab: int = 128256,
        width: int = 4096,
        hidden: int = 14336,
        num_layers: int = 32,
        num_heads: int = 32,
        num_kv_heads: int = 8,
        length: int = 8192,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        half = width // num_heads // 2
        rotation = torch.empty(length, half, dtype=torch.complex64)
        self.register_buffer("rotation", rotation, persistent=False)
        self.layers = nn.ModuleList(
            LlamaBlock(width, hidden, num_heads, num_kv_heads) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        rotation = self.rotation[None, : tokens.shape[1], None, :]
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))


def llama_128k() -> Llama:
    """Llama 3.1 8B, whose sequences have 131,072 tokens."""
    return Llama(length=131072)


def llama_405b() -> Llama:
    """Llama 3.1 405B (arXiv 2407.21783)."""
    return Llama(width=16384, hidden=53248, num_layers=126, num_heads=128)


def parallelize_llama(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism with norms and residuals on parts of the sequence, as in torchtitan.

    ``model``: all of it, or a stage.
    """
    model.sequence_parts = mesh.size()
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    columns = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), ColwiseParallel())
    rows = dict.fromkeys(("wo", "w2"), RowwiseParallel(output_layouts=Shard(1)))
    norms = dict.fromkeys(("attention_norm", "ffn_norm"), SequenceParallel())
    whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    for block in model.layers:
        assert isinstance(block, LlamaBlock)
        parallelize_module(block, mesh, {**columns, **rows, **norms})
        for norm in (block.attention_norm, block.ffn_norm):  # once for all that read it
            parallelize_module(norm, mesh, whole)
        block.num_heads //= mesh.size()
        block.num_kv_heads //= mesh.size()


class LlamaStage(nn.Module):
    """Some blocks of the model; the first stage has the embedding, the last norm and head."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        self.tok_embeddings = model.tok_embeddings if first == 0 else None
        self.layers = model.layers[first:last]
        ends = last == len(model.layers)
        self.norm, self.output = (model.norm, model.output) if ends else (None, None)
        self.register_buffer("rotation", model.rotation, persistent=False)
        self.sequence_parts = 1  # a rank has one of them between its blocks

    def forward(self, x: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        rotation = self.rotation[None, : x.shape[1] * self.sequence_parts, None, :]
        for block in self.layers:
            x = block(x, rotation)
        return x if self.output is None else self.output(self.norm(x))


def split_llama(model: Llama, num_stages: int) -> list[LlamaStage]:
    """Stages of as many blocks, where that is possible; the first ones have one more otherwise."""
    return [LlamaStage(model, *ends) for ends in _parts_of(len(model.layers), num_stages)]


def _parts_of(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    few, more = divmod(num_layers, num_stages)
    return list(pairwise(i * few + min(i, more) for i in range(num_stages + 1)))


# -- GPT, as minGPT has it -------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """Attention written out (no fused kernel), dropout, the tanh form of GELU written out."""

    def __init__(self, width: int, num_heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.ones(1, 1, length, length, dtype=torch.bool).tril())
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (
            t.view(split).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(split[-1]))
        mask: Any = self.bias
        a = a.masked_fill(mask[:, :, :length, :length].logical_not(), float("-inf"))
        a = self.attn_dropout(F.softmax(a, dim=-1)) @ v
        x = x + self.resid_dropout(self.c_proj(a.transpose(1, 2).contiguous().view(x.shape)))
        y = self.c_fc(self.ln_2(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y.pow(3.0))))
        return x + self.dropout(self.c_proj2(y))


class GPT(nn.Module):
    """Token ids to logits. The default is GPT-3 175B."""

    def __init__(
        self,
        vocab: int = 50000,
        width: int = 12288,
        num_layers: int = 96,
        num_heads: int = 96,
        length: int = 2048,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            GPTBlock(width, num_heads, length, dropout) for _ in range(num_layers)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(places))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# -- T5 --------------------------------------------------------------------------------------------


class T5Norm(nn.Module):
    """RMS norm written out, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class T5Attention(nn.Module):
    """Attention written out, with a bias added to the scores; heads wider than the model."""

    def __init__(self, width: int, num_heads: int, head: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, num_heads * head, bias=False)
        self.k = nn.Linear(width, num_heads * head, bias=False)
        self.v = nn.Linear(width, num_heads * head, bias=False)
        self.o = nn.Linear(num_heads * head, width, bias=False)

    def forward(self, x: Tensor, other: Tensor, bias: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k(other).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = self.v(other).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        scores = q @ k.transpose(3, 2) + bias
        weights = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.1, self.training)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    """Self-attention, cross-attention in the decoder, two linears with ReLU."""

    def __init__(self, width: int, hidden: int, num_heads: int, head: int, decoder: bool) -> None:
        super().__init__()
        self.norm1, self.attention = T5Norm(width), T5Attention(width, num_heads, head)
        self.decoder = decoder
        if decoder:
            self.norm2, self.cross = T5Norm(width), T5Attention(width, num_heads, head)
        self.norm3 = T5Norm(width)
        self.wi = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + F.dropout(self.attention(y, y, bias), 0.1, self.training)
        if self.decoder:
            y = self.norm2(x)
            x = x + F.dropout(self.cross(y, memory, bias), 0.1, self.training)
        y = F.dropout(F.relu(self.wi(self.norm3(x))), 0.1, self.training)
        return x + F.dropout(self.wo(y), 0.1, self.training)


class T5(nn.Module):
    """Ids of source and target to logits. The default is T5 11B."""

    def __init__(
        self,
        vocab: int = 32128,
        width: int = 1024,
        hidden: int = 65536,
        num_layers: int = 24,
        num_heads: int = 128,
        head: int = 128,
        length: int = 512,
    ) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.register_buffer("bias", torch.zeros(1, num_heads, length, length))
        sizes = (width, hidden, num_heads, head)
        self.encoder = nn.ModuleList(T5Block(*sizes, decoder=False) for _ in range(num_layers))
        self.decoder = nn.ModuleList(T5Block(*sizes, decoder=True) for _ in range(num_layers))
        self.norm = T5Norm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        bias: Any = self.bias
        bias = bias.to(self.lm_head.weight.dtype)
        memory = self.shared(source)
        for block in self.encoder:
            memory = block(memory, memory, bias)
        x = self.shared(target)
        for block in self.decoder:
            x = block(x, memory, bias)
        return self.lm_head(self.norm(x))


# -- DeepSeek-V3 -----------------------------------------------------------------------------------


class LatentAttention(nn.Module):
    """Attention whose keys and values come from a narrow vector per token (DeepSeek-V2)."""

    def __init__(self, width: int, num_heads: int, q_rank: int, kv_rank: int) -> None:
        super().__init__()
        self.num_heads, self.plain, self.rotary, self.value = num_heads, 128, 64, 128
        self.kv_rank = kv_rank
        self.q_down = nn.Linear(width, q_rank, bias=False)
        self.q_norm = nn.RMSNorm(q_rank)
        self.q_up = nn.Linear(q_rank, num_heads * (self.plain + self.rotary), bias=False)
        self.kv_down = nn.Linear(width, kv_rank + self.rotary, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank)
        self.kv_up = nn.Linear(kv_rank, num_heads * (self.plain + self.value), bias=False)
        self.out = nn.Linear(num_heads * self.value, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x)))
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, q_rotary = q.split([self.plain, self.rotary], -1)
        latent, k_rotary = self.kv_down(x).split([self.kv_rank, self.rotary], -1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = kv.split([self.plain, self.value], -1)
        k_rotary = _rotate(k_rotary.unsqueeze(1), rotation).expand(-1, self.num_heads, -1, -1)
        q = torch.cat([q, _rotate(q_rotary, rotation)], -1)
        attended = F.scaled_dot_product_attention(
            q, torch.cat([k, k_rotary], -1), v, is_causal=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class GatedLayer(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GroupedExperts(nn.Module):
    """Such layers with their weights in groups: dim 0 counts experts."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        gate, up, down = map(local_experts, (self.gate, self.up, self.down))
        ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
        hidden = F.silu(torch._grouped_mm(rows, gate, offs=ends))
        hidden = hidden * torch._grouped_mm(rows, up, offs=ends)
        return torch._grouped_mm(hidden, down, offs=ends)


class DeepSeekBlock(nn.Module):
    """Latent attention, and a dense layer or experts of which one is shared by all tokens."""

    def __init__(self, width: int, num_heads: int, hidden: int, num_experts: int = 0) -> None:
        super().__init__()
        self.num_experts, self.choices = num_experts, 8
        self.mesh: DeviceMesh | None = None  # all experts are here
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = LatentAttention(width, num_heads, 1536, 512)
        self.dense = GatedLayer(width, hidden)
        if num_experts:
            self.router = nn.Linear(width, num_experts, bias=False)
            self.experts = GroupedExperts(num_experts, width, hidden)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        y = self.norm(x)
        made = self.dense(y)
        if self.num_experts:
            flat = y.flatten(0, 1)
            weights, chosen = self.router(flat).float().sigmoid().topk(self.choices)
            weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
            exchange = TokenExchange(chosen, self.num_experts, self.mesh)
            rows = self.experts(exchange.dispatch(flat), exchange.counts)
            made = made + exchange.combine(rows, weights).view_as(x)
        return x + made


class DeepSeek(nn.Module):
    """DeepSeek-V3 (arXiv 2412.19437) without multi-token prediction: 671B by default."""

    def __init__(
        self,
        num_layers: int = 61,
        num_dense: int = 3,
        width: int = 7168,
        num_heads: int = 128,
        num_experts: int = 256,
        length: int = 4096,
    ) -> None:
        super().__init__()
        vocab = 129_280
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            DeepSeekBlock(width, num_heads, 18_432)
            if i < num_dense
            else DeepSeekBlock(width, num_heads, 2048, num_experts)
            for i in range(num_layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("rotation", torch.ones(length, 32, dtype=torch.complex64), False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotation = self.rotation[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x))


class DeepSeekStage(nn.Module):
    """Some blocks of the model; the first stage has the embedding, the last norm and head."""

    def __init__(self, model: DeepSeek, first: int, last: int) -> None:
        super().__init__()
        self.embedding = model.embedding if first == 0 else None
        self.layers = model.layers[first:last]
        ends = last == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)
        self.register_buffer("rotation", model.rotation, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = self.rotation[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, rotation)
        return x if self.head is None else self.head(self.norm(x))


def split_deepseek(model: DeepSeek, num_stages: int) -> list[DeepSeekStage]:
    """As `split_llama`: the three dense blocks are in the first stage."""
    return [DeepSeekStage(model, *ends) for ends in _parts_of(len(model.layers), num_stages)]


# -- for the commands ``fsdp2 estimate`` and ``fsdp2 plan`` ----------------------------------------


def llama_batch() -> Tensor:
    """One sequence of the length that Llama 3 is trained with."""
    return torch.zeros(1, 8192, dtype=torch.long)


def llama_128k_batch() -> Tensor:
    """One sequence of 131,072 tokens."""
    return torch.zeros(1, 131072, dtype=torch.long)


def deepseek_batch() -> Tensor:
    """One sequence of the length that DeepSeek-V3 is trained with."""
    return torch.zeros(1, 4096, dtype=torch.long)


def next_token_loss(logits: Tensor) -> Tensor:
    """Cross-entropy in fp32."""
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long))
