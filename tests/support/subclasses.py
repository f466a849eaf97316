"""Tensor subclasses for tests: torch's `TwoTensor` with the two methods, and one with every way
that a ``fsdp_post_all_gather`` may do its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only


def pre_all_gather(self: Any, mesh: Any) -> Any:
    return (self.a, self.b), None


def post_all_gather(
    self: Any, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    """As in torch's tests: inner tensors are what was gathered, or a cast of it."""
    a, b = outputs
    if out is None:
        made = TwoTensor(a.to(param_dtype), b.to(param_dtype))
        return made, ((a, b) if a.dtype == param_dtype else (made.a, made.b))
    out = getattr(out, "_local_tensor", out)
    if a.dtype == param_dtype:
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
        assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
    else:
        out.a.copy_(a)
        out.b.copy_(b)
    return None


@contextlib.contextmanager
def two_tensor_methods() -> Iterator[None]:
    """`TwoTensor` has the two methods inside."""
    TwoTensor.fsdp_pre_all_gather = pre_all_gather
    TwoTensor.fsdp_post_all_gather = post_all_gather
    try:
        yield
    finally:
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


def with_two_tensors(model: nn.Module, names: tuple[str, ...] = ("weight", "bias")) -> nn.Module:
    """The parameters of all linear layers become `TwoTensor`s of two copies."""
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        for name in names:
            data = getattr(layer, name).detach()
            setattr(layer, name, nn.Parameter(TwoTensor(data, data.clone())))
    return model


class Scaled(torch.Tensor):
    """``data / scale``, where ``scale`` is another one in every gather: exact powers of two.

    A stale scale or stale data would compute something else; the right ones compute what the plain
    parameter does, bit for bit.
    """

    KEEP = ("detach", "clone", "slice", "copy_", "new_zeros", "empty_like", "view", "split",
            "zero_", "_to_copy", "as_strided", "add_", "sub_", "mul_", "addcdiv_",
            "lerp_")  # fmt: skip
    data_: Tensor
    scale_: Tensor

    @staticmethod
    def __new__(cls, data_: Tensor, scale_: Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data_.shape, strides=data_.stride(), dtype=data_.dtype, device=data_.device
        )
        made.data_, made.scale_ = data_, scale_
        return made

    def __init__(self, data_: Tensor, scale_: Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> Any:
        return ["data_", "scale_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["data_"], inner["scale_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name not in cls.KEEP:
            args, kwargs = tree_map_only(Scaled, lambda t: t.data_ / t.scale_, (args, kwargs))
            return func(*args, **kwargs)
        first = args[0]
        if name.endswith("_") and not isinstance(first, Scaled):
            return func(first, args[1].data_ / args[1].scale_, *args[2:], **kwargs)
        plain, kwargs = tree_map_only(Scaled, lambda t: t.data_, (args, kwargs))
        out = func(*plain, **kwargs)
        if name.endswith("_"):
            return first
        return tree_map_only(Tensor, lambda t: type(first)(t, first.scale_), out)

    # -- what the methods do, by class attributes --------------------------------------------

    style = ""
    pads = False
    calls = 0

    def _travelling(self) -> Any:
        type(self).calls += 1
        scale = torch.tensor(2.0 ** (type(self).calls % 5), dtype=self.dtype)
        return self.data_ * scale, scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        data = outputs[0]
        scale = outputs[1][:1].reshape(()).clone() if metadata is None else metadata
        kind = type(self)
        if out is not None and out.shape != data.shape:
            assert kind.pads, (out.shape, data.shape)
        if kind.style == "replaces an attribute":
            if out is None:
                return kind(data, scale), (data,)
            assert out.data_.data_ptr() == data.data_ptr()
            out.scale_ = scale
        elif kind.style == "writes into inner tensors":
            if out is None:
                made = kind(data.clone(), scale.clone())
                return made, (made.data_, made.scale_)
            out.data_.copy_(data[: out.shape[0]])
            out.scale_.copy_(scale)
        elif kind.style == "returns new objects":  # also with out
            made = kind(data.clone(), scale.clone())
            return made, (made.data_, made.scale_)
        elif kind.style == "returns plain copies":
            if out is None:
                made = data / scale
                return made, (made,)
            out.copy_((data / scale)[: out.shape[0]])
        else:
            assert kind.style == "returns views"
            data.div_(scale)
            if out is None:
                return data.view(-1).view(data.shape), outputs
        return None


STYLES = (
    "replaces an attribute",
    "writes into inner tensors",
    "returns new objects",
    "returns plain copies",
    "returns views",
)


class OfMesh(Scaled):
    """The first protocol: the mesh only; a scale as metadata."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        data, scale = self._travelling()
        return (data,), scale


class OfModule(Scaled):
    """The second protocol: sizes, module and policy; the scale is gathered, as a 0-dim tensor."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        data, scale = self._travelling()
        assert isinstance(module, nn.Linear)
        assert outer_stride == (outer_size[1], 1)
        return (data, scale), None


class Padding(OfModule):
    """Pads to equal rows itself, as torch asks for."""

    pads = True

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        (data, scale), _ = super().fsdp_pre_all_gather(
            mesh, outer_size, outer_stride, module, mp_policy
        )
        rows = -(-outer_size[0] // mesh.size())
        missing = rows - data.shape[0]
        data = torch.cat([data, data.new_full((missing, *data.shape[1:]), torch.nan)])
        return (data, scale), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        world = outputs[1].shape[0]
        assert outputs[0].shape[0] % world == 0, "not all rows, with padding"
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)


def with_scaled(model: nn.Module, kind: type[Scaled], style: str) -> nn.Module:
    """The weights of all linear layers become ``kind``, whose post hook does as ``style`` says."""
    kind = type(kind.__name__, (kind,), {"style": style})
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        data = layer.weight.detach()
        layer.weight = nn.Parameter(kind(data.clone(), torch.ones((), dtype=data.dtype)))
    return model


def plain_values(local: Tensor) -> Tensor:
    """What a shard stands for."""
    if isinstance(local, TwoTensor):
        assert torch.equal(local.a, local.b)
        return local.a
    return local.data_ / local.scale_ if isinstance(local, Scaled) else local


class Nested(OfModule):
    """A `Scaled` whose data is a `TwoTensor`: a subclass with another one inside."""

    data_: TwoTensor  # type: ignore[assignment]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        data, scale = self._travelling()
        return (data.a, scale, data.b), None  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        a, scales, b = outputs
        scale = scales[:1].reshape(()).clone()
        if out is None:
            return type(self)(TwoTensor(a, b), scale), (a, b)
        assert out.data_.a.data_ptr() == a.data_ptr()
        out.scale_ = scale
        return None


def with_nested(model: nn.Module) -> nn.Module:
    """The weights of all linear layers become `Nested`."""
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        data = layer.weight.detach()
        two = TwoTensor(data.clone(), data.clone())
        layer.weight = nn.Parameter(Nested(two, torch.ones((), dtype=data.dtype)))
    return model
