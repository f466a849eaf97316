"""Training of tensor subclasses: what computes is what the last gather brought.

Every model here is compared with the plain one, whole on every rank, for some steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard, optim
from harness import DEVICE, cached_mesh, distributed
from reference import assert_same, average_gradients, own_part
from subclasses import (
    STYLES,
    OfMesh,
    OfModule,
    Padding,
    Scaled,
    plain_values,
    two_tensor_methods,
    with_scaled,
    with_two_tensors,
)

Make = Callable[[nn.Module], nn.Module]
STEPS = 3


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def layers(hidden: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 6)
    ).double()


def batch(step: int, part: int) -> Tensor:
    values = torch.arange(24, dtype=torch.float64).view(4, 6)
    return (values * 0.1 + 0.7 * step + 0.31 * part + dist.get_rank()).sin()


def a_loss(out: Tensor) -> Tensor:
    loss = (out - 1).square().mean()
    return loss.a if isinstance(loss, TwoTensor) else loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)


def train_beside_plain(
    model: nn.Module,
    plain: nn.Module,
    *,
    make_optimizer: Callable[[nn.Module], Any] = adam,
    micro_batches: int = 1,
) -> None:
    """Train both, with losses, gradients and parameters compared in every step."""
    optimizers = make_optimizer(model), adam(plain)
    for step in range(STEPS):
        for part in range(micro_batches):
            model.set_requires_gradient_sync(part == micro_batches - 1)  # type: ignore[operator]
            x = batch(step, part)
            out, expected = model(x), plain(x)
            assert_same(a_loss(out), a_loss(expected), f"loss of step {step}")
            loss = (out - 1).square().mean()
            loss.backward()
            (expected - 1).square().mean().backward()
        average_gradients(plain)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if mine.requires_grad:
                assert_same(mine.grad, theirs.grad, f"gradient of {name}")  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            values = plain_values(mine._local_tensor)  # type: ignore[attr-defined]
            assert_same(values, own_part(theirs.detach(), mine), name)  # type: ignore[arg-type]


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@distributed(1, 2, 3)
def test_two_tensor_trains_as_the_plain_parameter_does() -> None:
    """Rows that the ranks divide, and rows that they do not."""
    with two_tensor_methods():
        for hidden in (12, 7):
            plain = layers(hidden)
            model = shard(with_two_tensors(copy.deepcopy(plain)))
            assert isinstance(model[0].weight.to_local(), TwoTensor)
            train_beside_plain(model, plain)


@distributed(2)
def test_two_tensor_steps_on_local_tensors() -> None:
    def local(model: nn.Module) -> Any:
        return optim.local_step(adam(model))  # type: ignore[type-var]

    with two_tensor_methods():
        plain = layers()
        model = shard(with_two_tensors(copy.deepcopy(plain)))
        model[0].weight.learning_rate = 0.1
        train_beside_plain(model, plain, make_optimizer=local)


@pytest.mark.parametrize("style", STYLES)
@distributed(2, long=(1, 3))
def test_every_way_to_make_the_parameter_computes_with_the_last_gather(style: str) -> None:
    """Another scale in every gather: after forward, in backward, in the next step."""
    for kind in (OfMesh, OfModule):
        for reshard in (True, False):
            plain = layers()
            model = with_scaled(copy.deepcopy(plain), kind, style)
            train_beside_plain(shard(model, reshard_after_forward=reshard), plain)


@pytest.mark.parametrize("style", STYLES[1:])
@distributed(3, long=(1, 2))
def test_rows_that_the_class_pads_itself_and_rows_that_it_does_not(style: str) -> None:
    for kind in (OfModule, Padding):
        plain = layers(7)
        train_beside_plain(shard(with_scaled(copy.deepcopy(plain), kind, style)), plain)


@distributed(4)
def test_replicas_smaller_groups_accumulation_and_recomputation() -> None:
    hybrid = cached_mesh(2, 2, names=("replicate", "shard"))
    with two_tensor_methods():
        for make in (with_two_tensors, as_replaced):
            for options in ({"mesh": hybrid}, {"reshard_after_forward": 2}):
                plain = layers(7 if make is with_two_tensors else 8)
                model = make(copy.deepcopy(plain))
                model[2] = Recomputed(model[2])
                model = shard(model, **options)
                train_beside_plain(model, plain, micro_batches=2)


def as_replaced(model: nn.Module) -> nn.Module:
    return with_scaled(model, OfModule, STYLES[0])


@distributed(2)
def test_subclasses_beside_plain_and_frozen_parameters_in_one_unit() -> None:
    with two_tensor_methods():
        plain = layers()
        model = with_two_tensors(copy.deepcopy(plain), ("weight",))
        model[4] = copy.deepcopy(plain[4])  # type: ignore[index,operator]
        for side in (model, plain):
            side[0].weight.requires_grad_(False)  # type: ignore[index]
        train_beside_plain(fully_shard(model), plain)


@distributed(2)
def test_writes_to_the_inner_tensors_of_a_cached_frozen_parameter_are_seen() -> None:
    with two_tensor_methods():
        plain = layers()
        model = with_two_tensors(copy.deepcopy(plain), ("weight",))
        for side in (model, plain):
            side[0].weight.requires_grad_(False)  # type: ignore[index]
        shard(model)
        model.set_keep_frozen_gathered(None)  # type: ignore[operator]
        for _ in range(2):
            train_beside_plain(model, plain)
            with torch.no_grad():
                local = model[0].weight._local_tensor  # type: ignore[index]
                for inner in (local.a, local.b):
                    inner.mul_(-1)
                plain[0].weight.mul_(-1)  # type: ignore[index]


@distributed(2)
def test_a_user_s_attributes_are_carried_and_those_of_the_class_are_not() -> None:
    with two_tensor_methods():
        model = with_two_tensors(layers(), ("weight",))
        for layer in (model[0], model[2], model[4]):  # type: ignore[index]
            for param in layer.parameters():
                param.sequence_parallel = True
                param.scale_of_lr = torch.ones(2)
        seen: list[Any] = []
        model[0].register_forward_pre_hook(lambda m, args: seen.append(m.weight))  # type: ignore[index,operator]
        shard(model)
        model(batch(0, 0))
        for param in (*model.parameters(), *seen):
            assert param.sequence_parallel
            assert param.scale_of_lr.tolist() == [1, 1]
        (computing,) = seen
        assert not {"a", "b"} & vars(model[0].weight).keys()  # type: ignore[index]
        assert computing.a.shape == (12, 6)


@distributed(2)
def test_methods_that_are_patched_onto_the_class_after_sharding() -> None:
    plain = layers()
    model = shard(with_two_tensors(copy.deepcopy(plain)))
    with pytest.raises(ValueError, match=r"'0\.weight' is a TwoTensor.*Define fsdp_pre_all_gather"):
        model(batch(0, 0))
    with two_tensor_methods():
        train_beside_plain(model, plain)


@distributed(2)
def test_a_model_made_on_the_meta_device() -> None:
    with two_tensor_methods():
        plain = layers(7)
        with torch.device("meta"):
            model = with_two_tensors(layers(7))
        shard(model)
        model.to_empty(device=DEVICE)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                part = own_part(theirs, mine)  # type: ignore[arg-type]
                mine.to_local().copy_(TwoTensor(part, part))  # type: ignore[operator]
        train_beside_plain(model, plain)


@distributed(2)
def test_param_dtype_casts_before_or_after_the_gather() -> None:
    """Parameters are rounded to bfloat16 when they compute, and only then."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with two_tensor_methods():
        plain = layers().float()
        reference = shard(copy.deepcopy(plain), mp_policy=policy)
        model = shard(with_two_tensors(plain), mp_policy=policy)
        for each in (reference, model):
            optimizer = adam(each)
            for step in range(STEPS):
                out = each(batch(step, 0).float())
                assert out.dtype == torch.bfloat16
                out.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(plain_values(mine._local_tensor), theirs.to_local())  # type: ignore[attr-defined]


@distributed(2)
def test_a_gradient_of_two_different_tensors_is_refused_and_not_halved() -> None:
    with two_tensor_methods():
        model = with_two_tensors(layers())
        with torch.no_grad():
            model[0].weight.b.mul_(2)  # type: ignore[index,union-attr]
        shard(model)
        loss = (model(batch(0, 0)) - 1).square().mean()
        with pytest.raises(NotImplementedError, match=r"'4\.weight' is a TwoTensor of 2 different"):
            loss.backward()


@distributed(2)
def test_a_copy_has_shards_of_its_own() -> None:
    with two_tensor_methods():
        plain = layers()
        model = shard(with_two_tensors(copy.deepcopy(plain)))
        model(batch(0, 0)).square().mean().backward()
        copied = copy.deepcopy(model)
        adam(model).step()
        train_beside_plain(copied, plain)


class Bad(Scaled):
    def __tensor_flatten__(self) -> Any:
        return ["data_", "scale_"], None

    returns: Any = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self.returns


@pytest.mark.parametrize(
    "returns",
    [torch.ones(1), (torch.ones(1),), (torch.ones(2), None), ((), None), ((1.0,), None)],
    ids=["a tensor", "no metadata", "not a tuple", "nothing", "a number"],
)
@distributed(1)
def test_what_a_method_returns_is_checked(returns: Any) -> None:
    class Returning(Bad):
        pass

    Returning.returns = returns
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(Returning(layer.weight.detach(), torch.ones(())))
    fully_shard(layer)
    with pytest.raises(ValueError, match=r"'weight' \(Returning\) must return \(tens"):
        layer(torch.ones(1, 2))


@distributed(2)
def test_sharded_parameters_are_dtensors_over_the_class() -> None:
    with two_tensor_methods():
        model = shard(with_two_tensors(layers(7)))
        for param in model.parameters():
            assert isinstance(param, DTensor)
            local = param._local_tensor
            assert isinstance(local, TwoTensor)
            assert local.a.untyped_storage().nbytes() <= 8 * 4 * 7  # not the whole parameter
