"""Classes of modules that are not laid out as `nn.Module` itself is, and classes that refuse."""

from __future__ import annotations

import abc
import copy
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard
from fsdp2.common.classes import class_for, original_class
from harness import distributed, ours_only
from models import Case, children, normal_batch
from reference import Training, check_training

T = TypeVar("T")


class Saves(abc.ABC):
    @abc.abstractmethod
    def save(self) -> str: ...


class Empty:
    __slots__ = ()


class Slotted:
    __slots__ = ("note",)
    note: str


class Speaks(Protocol):
    def save(self) -> str: ...


class Meta(abc.ABCMeta):
    """A metaclass of a user's own."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def save(self) -> str:
        return "saved"


class WithABC(Saves, Layer):
    def save(self) -> str:
        return "saved"


class WithGeneric(Generic[T], Layer): ...


class WithProtocol(Speaks, Layer):
    def save(self) -> str:
        return "saved"


class WithEmptySlots(Empty, Layer): ...


class WithSlots(Slotted, Layer):
    __slots__ = ("more",)
    more: str


class WithAllOfThem(Empty, Slotted, Saves, Generic[T], Layer, metaclass=Meta):
    __slots__ = ("more",)
    more: str

    def save(self) -> str:
        return "saved"


class WithMetaclass(Layer, metaclass=Meta): ...


class WithABCBehind(Layer, Saves): ...


KINDS: list[type[Layer]] = [
    Layer,
    WithABC,
    WithGeneric,
    WithProtocol,
    WithEmptySlots,
    WithSlots,
    WithAllOfThem,
    WithMetaclass,
    WithABCBehind,
]


@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
def test_modules_with_other_bases_are_sharded_and_train(kind: type[Layer]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(kind(), kind())

    case = Case("bases", build, children, normal_batch(2, 5))
    model, _ = check_training(case, Training(steps=2))
    layer: Any = model[0]  # type: ignore[index]
    assert isinstance(layer, FSDPModule)
    assert isinstance(layer, kind)
    assert type(layer).__mro__.index(FSDPModule) < type(layer).__mro__.index(kind)
    assert layer.save() == "saved"
    other = copy.deepcopy(model)
    assert type(other[0]) is type(layer)  # type: ignore[index]
    x = torch.randn(1, 5, dtype=torch.float64)
    assert torch.equal(other(x), model(x))


@distributed(1)
@ours_only("torch's class knows the original by its place in the order of resolution")
def test_slots_are_kept_by_sharding() -> None:
    module = WithSlots()
    module.note, module.more = "a", "b"
    fully_shard(module)
    assert (module.note, module.more) == ("a", "b")
    assert original_class(type(module)) is WithSlots
    assert type(module)().__class__ is WithSlots


class Registered(Layer):
    """Demands an argument of every subclass."""

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


class Good(Registered, key="good"): ...


@distributed(1)
@ours_only("torch changes parameters first")
def test_a_class_that_cannot_be_extended_is_refused_before_anything_changes() -> None:
    block, other = Good(), Layer()
    before = [*block.parameters(), *other.parameters()]
    with pytest.raises(TypeError, match=r"Good cannot be extended.*missing 1 required.*'key'"):
        fully_shard([other, block])
    after = [*block.parameters(), *other.parameters()]
    assert all(p is q for p, q in zip(before, after, strict=True))
    assert not any(isinstance(p, DTensor) for p in after)
    assert type(other) is Layer
    assert not other._forward_pre_hooks
    fully_shard(other)  # as if nothing had been tried


def test_the_object_itself_is_not_changed() -> None:
    class Plain:
        pass

    instance = Plain()
    made = class_for(instance, "Made", {"answer": 42}, before=(Empty,))
    assert type(instance) is Plain
    instance.__class__ = made
    assert instance.answer == 42  # type: ignore[attr-defined]
    assert original_class(made) is Plain
    assert made.__module__ == __name__
