"""Parameters of tensor subclasses that decide what travels in an all-gather."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from reference import assert_same_gradients, average_gradients, whole


class Wrapped(torch.Tensor):
    """Stores ``data``; all operations but views, copies and the like give plain tensors."""

    inner: Tensor
    KEEP = ("detach", "clone", "slice", "narrow", "copy_", "new_zeros", "empty_like", "view",
            "split", "zero_", "_to_copy", "as_strided", "add_", "sub_", "mul_")  # fmt: skip

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        tensor.inner = inner
        return tensor

    def __init__(self, inner: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        name = func.overloadpacket.__name__
        if name not in cls.KEEP:
            return out
        if name.endswith("_") and isinstance(args[0], Wrapped):
            return args[0]
        return tree_map_only(Tensor, lambda t: cls(t), out)


class Halved(Wrapped):
    """Travels in half precision, computes in the dtype of computation."""

    metadata: Any = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner.to(torch.float16),), (mesh.size(), "hello")

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == (dist.get_world_size(), "hello")
        (gathered,) = outputs
        assert gathered.dtype == torch.float16
        if out is not None:
            out.copy_(gathered)
            return None
        result = gathered.to(param_dtype)
        return result, (result,)


class Quantized(Wrapped):
    """Travels as one byte per element and a scale per row."""

    seen: Any = None

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        type(self).seen = (tuple(outer_size), outer_stride, type(module).__name__, mp_policy)
        largest = self.inner.abs().amax(dim=1, keepdim=True).clamp_min(1e-9)
        return ((self.inner / largest * 127).round().to(torch.int8), largest), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        small, largest = outputs
        result = (small.to(param_dtype) / 127) * largest.to(param_dtype)
        if out is not None:
            out.copy_(result)
            return None
        return result, (result,)


def on_the_way(kind: type[Wrapped], weight: Tensor) -> Tensor:
    """What is computed with, by hand."""
    if kind is Halved:
        return weight.half().to(weight.dtype)
    largest = weight.abs().amax(dim=1, keepdim=True)
    return (weight / largest * 127).round().to(torch.int8).to(weight.dtype) / 127 * largest


def build(kind: type[Wrapped], rows: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, 6)).to(dtype)
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model, plain


def through(kind: type[Wrapped], plain: nn.Module, x: Tensor) -> Tensor:
    """Forward of the reference: a weight counts as the one that arrives, and has its gradient."""
    for layer in (plain[0], plain[2]):  # type: ignore[index]
        weight = layer.weight
        arrived = weight + (on_the_way(kind, weight) - weight).detach()
        x = torch.nn.functional.linear(x, arrived, layer.bias)
        x = torch.tanh(x) if layer is plain[0] else x  # type: ignore[index]
    return x


@pytest.mark.parametrize("kind", [Halved, Quantized])
@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_training(kind: type[Wrapped], mode: bool) -> None:
    """Rows that the ranks divide, and rows that they do not."""
    for rows in (12, 7):
        model, plain = build(kind, rows, torch.float64)
        for layer in (model[0], model[2]):
            fully_shard(layer, reshard_after_forward=mode)
        fully_shard(model)
        assert isinstance(model[0].weight, DTensor)
        assert isinstance(model[0].weight.to_local(), kind)
        for step in range(3):
            x = torch.full((4, 6), 0.3 * step + dist.get_rank(), dtype=torch.float64).sin()
            expected = through(kind, plain, x)
            out = model(x)
            assert torch.allclose(out, expected, rtol=1e-9, atol=1e-12)
            out.square().sum().backward()
            expected.square().sum().backward()
            average_gradients(plain)
            assert_same_gradients(model, plain)
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    mine.to_local().sub_(mine.grad.to_local(), alpha=0.1)
                    theirs.sub_(theirs.grad, alpha=0.1)
            model.zero_grad()
            plain.zero_grad()
        assert torch.allclose(whole(model[0].bias), plain[0].bias)


@distributed(2)
def test_what_it_is_told() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, _ = build(Quantized, 8, torch.float32)
    fully_shard(model, mp_policy=policy)
    out = model(torch.ones(2, 6))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert Quantized.seen == ((6, 8), (8, 1), "Linear", policy)
    assert model[0].weight.grad.dtype == torch.float32


@distributed(4)
def test_replicas_offload_and_accumulation() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))

    class OnTwo(Quantized):
        pass

    model, plain = build(OnTwo, 7, torch.float64)
    fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
        x = torch.full((4, 6), 0.3 * step + dist.get_rank(), dtype=torch.float64).sin()
        model(x).square().sum().backward()
        through(OnTwo, plain, x).square().sum().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


class Unpadded(Halved):
    """Raises on ranks with fewer rows than the first has, or sends more tensors than others."""

    fault = ""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        inputs, _ = super().fsdp_pre_all_gather(mesh)
        if self.fault and self.inner.shape[0] < 4:
            if self.fault == "raises":
                raise KeyError("no padding")
            inputs *= 2
        return inputs, (mesh.size(), "hello")


@ours_only("others wait in the gather")
@distributed(3)
def test_what_raises_on_some_ranks_in_the_first_gather_is_an_error_on_all() -> None:
    model, plain = build(Unpadded, 10, torch.float64)  # 4, 4 and 2 rows
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(4, 6, dtype=torch.float64)
    try:
        Unpadded.fault = "raises"
        error = KeyError if dist.get_rank() == 2 else RuntimeError
        match = "no padding"
        if dist.get_rank() < 2:
            match = "of parameter '0.weight' raised an error on rank 2, which says what is wrong"
        with pytest.raises(error, match=match):
            model(x)
        Unpadded.fault = "sends more"
        with pytest.raises(ValueError, match=r"returned \[1, 1, 2\] tensors on the ranks"):
            model(x)
    finally:
        Unpadded.fault = ""
    assert torch.allclose(model(x), through(Halved, plain, x))  # (corrected)


@distributed(1)
def test_half_an_extension() -> None:
    class Half(Wrapped):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self.inner,), None

    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(Half(layer.weight.detach()))
    with pytest.raises(ValueError, match=r"'weight' \(Half\) defines fsdp_pre_all_gather only"):
        fully_shard(layer)
