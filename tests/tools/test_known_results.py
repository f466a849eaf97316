"""Results that traces make anew are those that torch makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from by_keywords import trace_step
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning.trace.events import StepTrace
from fsdp2.planning.trace.known_results import KnownResults

aten = torch.ops.aten


@torch.library.custom_op("fsdp2_tests::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    return x * 2


@_twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice = torch.ops.fsdp2_tests.twice.default


def _given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


# What is called, and whether its result is remembered.
CALLS: dict[str, tuple[Callable[[], tuple], bool]] = {
    "new": (lambda: (aten.mul.Tensor, _given(3, 4), 2), True),
    "promoted": (lambda: (aten.mul.Tensor, _given(3, dtype=torch.long), 2.5), True),
    "not promoted": (lambda: (aten.mul.Tensor, _given(3, dtype=torch.long), 2), True),
    "a flag": (lambda: (aten.sum.dim_IntList, _given(3, 4), [1], True), True),
    "a number": (lambda: (aten.sum.dim_IntList, _given(3, 4), [1], False), True),
    "view": (lambda: (aten.view.default, _given(3, 4), [2, 6]), True),
    "view of a view": (lambda: (aten.slice.Tensor, _given(8, 3)[2:], 0, 1, 3), True),
    "transposed": (lambda: (aten.t.default, _given(3, 4)), True),
    "expanded": (lambda: (aten.expand.default, _given(3, 1), [3, 5]), True),
    "strides of the argument": (lambda: (aten.neg.default, _given(3, 4).t()), True),
    "a view of another dtype": (
        lambda: (aten.view_as_real.default, _given(3, dtype=torch.complex64)),
        True,
    ),
    "in place": (lambda: (aten.add_.Tensor, _given(3), _given(3)), True),
    "several": (
        lambda: (aten.native_layer_norm.default, _given(2, 4), [4], None, None, 1e-5),
        True,
    ),
    "a list": (lambda: (aten.cat.default, [_given(2, 3), _given(1, 3)]), True),
    "views, in a list": (lambda: (aten.split.Tensor, _given(5, 2), 2), True),
    "a dtype": (lambda: (aten._to_copy.default, _given(3), {"dtype": torch.bfloat16}), True),
    "nothing": (lambda: (aten._foreach_mul_.Scalar, [_given(3), _given(2)], 2.0), True),
    "metadata in place": (lambda: (aten.t_.default, _given(3, 4)), False),
    "a size in place": (lambda: (aten.resize_.default, _given(3, 4), [2]), False),
    "conjugate": (lambda: (aten._conj.default, _given(3, dtype=torch.complex64)), False),
    "what data decides": (lambda: (aten.nonzero.default, _given(3)), False),
    "no tensor given": (lambda: (aten.ones.default, [3]), False),
    "resized": (lambda: (aten.add.out, _given(3), _given(3), {"out": _given(0)}), False),
    "of another library": (lambda: (twice, _given(3)), False),
    "a constant": (lambda: (aten.add.Tensor, torch.tensor(3.0), 1), False),
    "sparse": (lambda: (aten.to_sparse.default, _given(3, 4)), False),
}  # fmt: skip


def _looks(result: Any, args: tuple) -> Any:
    """All that can be seen of a result, and of what it shares with arguments."""
    if isinstance(result, tuple | list):
        return type(result), [_looks(each, args) for each in result]
    if not isinstance(result, Tensor):
        return result
    storages = [_storage(a) for a in args if isinstance(a, Tensor)]
    storage = _storage(result)
    return (
        type(result), result.shape, result.stride(), result.storage_offset(), result.dtype,
        result.device, result.is_conj(), result.untyped_storage().nbytes(), result.requires_grad,
        [storage == each for each in storages], [result is each for each in args],
    )  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _call(make: Callable[[], tuple]) -> tuple[Any, tuple, dict]:
    func, *args = make()
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return func, tuple(args), kwargs


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_torch(name: str) -> None:
    make, remembered = CALLS[name]
    known = KnownResults()
    with FakeTensorMode():
        func, args, kwargs = _call(make)
        call = known.call_of(func, args, kwargs)
        assert call is None or known.find(call) is None
        try:
            real = func(*args, **kwargs)
        except torch._subclasses.fake_tensor.DynamicOutputShapeException:
            real = None
        if call is not None:
            known.keep(call, real, None)
        func, args, kwargs = _call(make)  # other tensors of the same metadata
        call = known.call_of(func, args, kwargs)
        found = None if call is None else known.find(call)
        assert (found is not None) == remembered
        if found is not None and call is not None:
            made = found.make(call.tensors)
            again = func(*_call(make)[1], **kwargs)
            assert type(made) is type(again)
            looks = _looks(made, args)
            func, args, kwargs = _call(make)
            assert looks == _looks(func(*args, **kwargs), args)


def test_what_differs_in_anything_is_another_call() -> None:
    known = KnownResults()
    with FakeTensorMode():
        base = _given(4, 4)
        calls: list[tuple] = [
            (aten.mul.Tensor, base, 1),
            (aten.mul.Tensor, base, 1.0),
            (aten.mul.Tensor, base, True),
            (aten.mul.Tensor, base.t(), 1),
            (aten.mul.Tensor, base[:2], 1),
            (aten.mul.Tensor, base[2:], 1),
            (aten.mul.Tensor, torch._neg_view(base), 1),
            (aten.mul.Tensor, base.cfloat(), 1),
            (aten.mul.Tensor, base.cfloat().conj(), 1),
            (aten.mul.Tensor, _given(8, 4)[::2], 1),
            (aten.mul.Tensor, base.bfloat16(), 1),
            (aten.mul.Tensor, base, base),
            (aten.div.Tensor, base, 1),
        ]
        keys = [known.call_of(func, tuple(args), {}) for func, *args in calls]
        keys += [known.call_of(aten.sum.default, (base,), {"dtype": d}) for d in (None, base.dtype)]
        torch.set_default_dtype(torch.float64)
        try:
            keys.append(known.call_of(aten.mul.Tensor, (base, 1), {}))
        finally:
            torch.set_default_dtype(torch.float32)
        assert None not in keys
        assert len({call.key for call in keys if call is not None}) == len(keys)


def test_constants_are_left_to_torch() -> None:
    # It computes with them: an item() of what it knows is no error.
    known = KnownResults()
    with FakeTensorMode():
        call = known.call_of(aten.add.Tensor, (_given(), 1), {})
        assert call is not None
        known.keep(call, aten.add.Tensor(*call.args), None)
        assert known.find(call) is not None
        assert known.call_of(aten.add.Tensor, (torch.tensor(3.0), 1), {}) is None


def test_a_part_of_something_larger_is_not_made_anew() -> None:
    known = KnownResults()
    with FakeTensorMode():
        for part in (slice(0, 2), slice(2, 5)):
            call = known.call_of(aten.neg.default, (_given(part.stop),), {})
            assert call is not None
            known.keep(call, _given(5)[part], None)
            assert known.find(call) is None


# -- whole traces ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Rotation by complex numbers, dropout, tied weights, a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.register_buffer("rotation", torch.ones(8, 2, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.table(tokens)
        for block in self.blocks:
            q, k, v = block(x).view(*x.shape[:2], 4, 12).transpose(1, 2).chunk(3, dim=-1)
            pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], 2, 2))
            q = torch.view_as_real(pairs * self.rotation.conj()).flatten(3).type_as(q)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
            x = x + F.dropout(y.transpose(1, 2).flatten(2), 0.2, self.training)
        x = self.norm(x.flatten(0, 1))
        return F.linear(x, self.table.weight)


def _images() -> nn.Module:
    block = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Conv2d(3, 4, 3), *block, *block, nn.Flatten(), nn.LazyLinear(3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x.cumsum(1)[:, ::2].sort(dim=-1).values


def _made_images() -> nn.Module:
    made = _images()
    made(torch.zeros(2, 3, 8, 8))
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "attention": (Attention, torch.zeros(2, 8, dtype=torch.long), "blocks.1"),
    "images": (_made_images, torch.zeros(2, 3, 8, 8), "1"),
    "recurrent": (Recurrent, torch.zeros(2, 6, 8), "layers.1"),
}


def _told(trace: StepTrace) -> Any:
    def fields_of(event: Any) -> tuple:
        return type(event), *(getattr(event, f.name) for f in fields(event))

    events = [fields_of(event) for event in trace.events]
    return events, trace.nbytes, trace.uncosted, trace.buffer_bytes, trace.outputs


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_traces_are_those_without_memory(
    name: str, device_type: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sample, block = MODELS[name]
    model = make()

    def trace() -> Any:
        return _told(
            trace_step(
                model, sample, [block], device_type=device_type,
                mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
                activation_checkpointing=mode,
                checkpoint_modules=() if mode == "none" else (block,),
            )
        )  # fmt: skip

    found = []
    real = KnownResults.find

    def find(self: KnownResults, call: Any) -> Any:
        found.append(real(self, call))
        return found[-1]

    monkeypatch.setattr(KnownResults, "find", find)
    remembered = trace()
    hits = sum(1 for each in found if each is not None)
    assert hits > len(found) / 4, "nearly all are asked anew"
    monkeypatch.setattr(KnownResults, "find", lambda self, call: None)
    assert remembered == trace()
