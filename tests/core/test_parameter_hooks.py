"""Hooks that users register on parameters, before sharding and after, beside a plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from fsdp2.features.parameter_hooks import TensorHooks
from harness import cached_mesh, distributed, ours_only
from models import MLP, run_backward
from reference import assert_same, assert_same_gradients, average_gradients, shard_case, whole

pytestmark = [ours_only("torch's FSDP2 drops these hooks without a word")]

LIMIT = 0.01


def clamped(grad: Tensor) -> Tensor:
    return grad.clamp(-LIMIT, LIMIT)


def build() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = MLP.build().double()
    return copy.deepcopy(plain), plain


def averaged(plain: nn.Module, *steps: int) -> dict[str, Tensor]:
    """The gradients of the whole batch, added up over ``steps``, without hooks."""
    plain.zero_grad()
    for step in steps:
        run_backward(MLP, plain, step)
    average_gradients(plain)
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def check(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert_same(param.grad, expected[name], f"gradient of {name}")


OPTIONS: list[Any] = [
    {},
    {"offload": True},
    pytest.param({"reshard_after_forward": False}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("options", OPTIONS)
@distributed(2, long=(1, 3))
def test_hooks_registered_before_sharding_are_called_with_sharded_gradients(
    options: dict[str, Any],
) -> None:
    """Once per backward, as the documentation says of those registered after it."""
    if options.get("offload"):
        options = {"offload_policy": CPUOffloadPolicy()}
    model, plain = build()
    calls: list[tuple[str, bool]] = []
    grads_seen: dict[str, Tensor] = {}
    after, sharded = {}, {}
    for name, param in model.named_parameters():

        def accumulated(p: Tensor, name: str = name) -> None:
            assert isinstance(p, DTensor)
            assert isinstance(p.grad, DTensor)
            grads_seen[name] = whole(p.grad)
            calls.append((name, p is sharded[name]))

        after[name] = param.register_post_accumulate_grad_hook(accumulated)
    clamp = model.get_parameter("2.weight").register_hook(clamped)
    shard_case(MLP, model, **options)
    sharded.update(model.named_parameters())

    run_backward(MLP, model, 0)
    first = averaged(plain, 0)
    first["2.weight"] = clamped(first["2.weight"])
    assert sorted(calls) == sorted((name, True) for name in first)
    check(model, first)
    for name in first:
        assert_same(grads_seen[name], first[name], f"what the hook of {name} saw")

    run_backward(MLP, model, 1)  # is added to what is there, after the hook
    both = {name: grad + first[name] for name, grad in averaged(plain, 1).items()}
    both["2.weight"] = first["2.weight"] + clamped(averaged(plain, 1)["2.weight"])
    assert len(calls) == 2 * len(first)
    check(model, both)

    copied = copy.deepcopy(model)
    for handle in (clamp, *after.values()):
        handle.remove()
    model.zero_grad()
    run_backward(MLP, model, 2)
    assert len(calls) == 2 * len(first)
    check(model, averaged(plain, 2))
    run_backward(MLP, copied, 2)  # hooks are not copied, as of plain modules
    assert len(calls) == 2 * len(first)
    assert_same_gradients(copied, plain)


@distributed(2, long=(1,))
def test_tensor_hooks_on_sharded_parameters() -> None:
    model, plain = build()
    assert isinstance(shard_case(MLP, model), FSDPModule)
    run_backward(MLP, model, 0)  # the runtime is there, and storages of gradients are
    model.zero_grad()
    weight, bias = model.get_parameter("2.weight"), model.get_parameter("4.bias")
    seen: list[Tensor] = []
    handles = [
        weight.register_hook(lambda grad: grad * 3),
        weight.register_hook(clamped),
        bias.register_hook(seen.append),
    ]
    with model.no_sync():  # type: ignore[operator]
        run_backward(MLP, model, 1)
    assert not seen
    run_backward(MLP, model, 2)
    expected = averaged(plain, 1, 2)
    expected["2.weight"] = clamped(expected["2.weight"] * 3)
    check(model, expected)
    (kept,) = seen
    assert_same(kept, expected["4.bias"], "what the hook saw")
    model.zero_grad()
    run_backward(MLP, model, 3)
    assert_same(kept, expected["4.bias"], "what the hook has kept")

    for handle in handles:
        handle.remove()
    model.zero_grad()
    wrong = weight.register_hook(lambda grad: torch.zeros(13, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"'2\.weight' \(register_hook\) returned a Tensor \(13, 5"):
        run_backward(MLP, model, 4)
    wrong.remove()
    with pytest.raises(RuntimeError, match=r"register_multi_grad_hook on .* '2\.weight'"):
        torch.autograd.graph.register_multi_grad_hook([weight, bias], seen.append)
    model.zero_grad()
    run_backward(MLP, model, 5)
    check(model, averaged(plain, 5))


@distributed(4)
def test_tensor_hooks_run_once_over_all_replicas() -> None:
    """After the all-reduce, on the sum of what micro-batches have left."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    bf16 = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model, plain = build()
    calls: list[Tensor] = []
    model.get_parameter("0.weight").register_hook(calls.append)
    model.get_parameter("2.weight").register_hook(clamped)
    model = shard_case(MLP, model, mesh=mesh, mp_policy=bf16)
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    run_backward(MLP, model, 0)
    assert not calls
    model.set_requires_all_reduce(True)
    run_backward(MLP, model, 1)
    expected = averaged(plain, 0, 1)
    expected["2.weight"] = clamped(expected["2.weight"])
    check(model, expected)
    assert len(calls) == 1
    assert dist.get_world_size() == 4


def test_a_parameter_without_hooks_costs_nothing() -> None:
    """Reductions look for tensor hooks only where some parameter has ever had one."""
    from fsdp2.runtime.reduction import result_hooks  # torch's shim has none

    before = list(result_hooks)
    result_hooks.clear()
    try:

        class Named:
            fqn = "weight"

        param = nn.Parameter(torch.zeros(2))
        owner = Named()
        param._backward_hooks = TensorHooks(owner)
        assert not result_hooks
        handle = param.register_hook(lambda grad: grad * 2)
        assert len(result_hooks) == 1
        param.sum().backward()
        assert param.grad is not None
        assert param.grad.tolist() == [2, 2]
        handle.remove()
        param.sum().backward()
        assert param.grad.tolist() == [3, 3]
    finally:
        result_hooks[:] = before
