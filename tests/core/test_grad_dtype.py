"""``grad_dtype`` of parameters decides the dtype of gradients and of their sums; as in torch 2.15.

All values are small integers, so that every sum is exact in every dtype but where it is meant not
to be.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only

pytestmark = [
    ours_only("compared with torch's in the test"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch without grad_dtype"),
]

LOW, FULL = torch.bfloat16, torch.float32
UNSET = "unset"


class WideGradient(torch.autograd.Function):
    """A matrix product whose weight gradient is in float32, as of fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].float().t() @ x.float()


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False, dtype=dtype)
        self.wide = nn.Parameter(torch.ones(4, 5, dtype=dtype))
        self.last = nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = WideGradient.apply(self.first(x.to(self.first.weight.dtype)), self.wide)
        return self.last(x.to(self.last.weight.dtype))


def build(dtype: torch.dtype) -> Net:
    net = Net(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % (i + 2) - 1)
    return net


def gradients(library: Any, net: Net, policy: Any, micro_batches: int) -> dict[str, Tensor]:
    model: Any = library.fully_shard(net, mp_policy=policy)
    for micro in range(micro_batches):
        model.set_requires_gradient_sync(micro == micro_batches - 1)
        x = torch.full((2, 3), 1.0 + dist.get_rank() + micro)
        model(x).sum().backward()
    # On the host before the model goes: torch's gradients belong to another stream, and a device
    # that poisons what is freed shows that they are still being read.
    return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 has these rules")
@distributed(2)
def test_dtypes_and_values_are_those_of_torch() -> None:
    """All parameters have the same setting; dtypes of parameters, computation, reduction vary."""
    choices: Any = itertools.product(
        (LOW, FULL), (None, LOW), (None, LOW, FULL), (UNSET, LOW, FULL, None), (1, 2)
    )
    for dtype, compute, reduce, grad_dtype, micro_batches in choices:
        found = []
        for library in (torch_fsdp, fsdp2):
            net = build(dtype)
            if grad_dtype != UNSET:
                for parameter in net.parameters():
                    parameter.grad_dtype = grad_dtype
            policy = library.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
            found.append(gradients(library, net, policy, micro_batches))
        what = f"{dtype}, {compute}, {reduce}, {grad_dtype}, {micro_batches}"
        for name, expected in found[0].items():
            if grad_dtype is None and reduce is None:
                # There torch reduces all in the widest dtype that a gradient has, we each by
                # itself: values only.
                assert torch.equal(found[1][name].float(), expected.float()), f"{what}: {name}"
                continue
            assert found[1][name].dtype == expected.dtype, f"{what}: {name}"
            assert torch.equal(found[1][name], expected), f"{what}: {name}"


@distributed(2, long=(1, 3))
def test_float32_gradients_of_low_precision_parameters_add_up() -> None:
    """Three hundred and one ones, in micro-batches with and without sync: bf16 stops at 256."""
    for sync in (False, True):
        layer = nn.Linear(2, 5, bias=False, dtype=LOW)
        layer.weight.grad_dtype = FULL
        model = fully_shard(layer)
        assert isinstance(model, FSDPModule)
        for micro in range(301):
            model.set_requires_gradient_sync(sync or micro == 300)
            model(torch.ones(1, 2, dtype=LOW)).sum().backward()
        assert model.weight.dtype == LOW
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((5, 2), 301.0))
        assert model.weight.grad_dtype == FULL


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 has this rule")
@distributed(2)
def test_a_narrow_dtype_that_was_set_rounds_the_sum_and_not_each_micro_batch() -> None:
    """Three times 1 + 2^-8, which bfloat16 rounds to 1: the sum is 3.0156 there."""
    for compute, narrow in itertools.product((None, LOW), (False, True)):
        found = []
        for library in (torch_fsdp, fsdp2):
            layer = nn.Linear(2, 4, bias=False)
            if narrow:
                layer.weight.grad_dtype = LOW
            policy = library.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=FULL)
            model: Any = library.fully_shard(layer, mp_policy=policy)
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model(torch.ones(1, 2)).float().mul(1 + 2**-8).sum().backward()
            found.append(layer.weight.grad.full_tensor())
        assert torch.equal(*found), f"{compute}, {narrow}"
        if compute is None:
            expected = 3.015625 if narrow else 3 * (1 + 2**-8)
            assert torch.equal(found[1].float(), torch.full((4, 2), expected))


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 shows them")
@pytest.mark.parametrize("reduce", [LOW, FULL, None], ids=str)
@distributed(2)
def test_sums_of_micro_batches_are_in_the_gradients_of_gathered_parameters(reduce: Any) -> None:
    """In the dtype of the reduction, while sync is off; users may read, scale and drop them."""
    seen: dict[str, list[Tensor]] = {"torch": [], "fsdp2": []}
    for name, library in (("torch", torch_fsdp), ("fsdp2", fsdp2)):
        net = build(FULL)
        policy = library.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=reduce)
        model: Any = library.fully_shard(net, mp_policy=policy)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        for micro in range(4):
            model(torch.full((2, 3), 1.0 + dist.get_rank() + micro)).sum().backward()
            seen[name] += [p.grad.clone() for p in model.parameters()]
            if micro == 1:
                with torch.no_grad():
                    for p in model.parameters():
                        p.grad.mul_(2)
            if micro == 2:
                model.last.weight.grad = None
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 3)).sum().backward()
        seen[name] += [p.grad.full_tensor() for p in model.parameters()]
    for ours, theirs in zip(seen["fsdp2"], seen["torch"], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@distributed(2)
def test_any_dtype() -> None:
    """``grad_dtype=None``: gradients stay what autograd makes, also a wider one."""
    net = build(LOW)
    for parameter in net.parameters():
        parameter.grad_dtype = None
    found = gradients(fsdp2, net, MixedPrecisionPolicy(), 1)
    assert found["first.weight"].dtype in (LOW, FULL)
    assert found["wide"].dtype == FULL


@distributed(2)
def test_a_wider_gradient_makes_another_plan() -> None:
    """What is cast anyway goes through the buffer: which is asked anew where the dtype is."""
    model = fully_shard(nn.Linear(2, 4))
    model(torch.ones(1, 2)).sum().backward()
    group = vars(model)["_fsdp2_unit"].param_group
    bucket, asked = group.buckets[0], []
    with pytest.MonkeyPatch.context() as patch:
        scatter = group.transports[0].scatter
        patch.setattr(scatter, "casts", lambda bucket: asked.append(bucket.reduce_dtype))
        group.reduce_plans.clear()
        for wide in (FULL, torch.float64):
            bucket.widen([torch.zeros(1, dtype=wide)])
            plan = group.reduce_plan(0, [0, 1], sums=False)
            assert group.reduce_plan(0, [0, 1], sums=False) is plan
    assert asked == [FULL, torch.float64]


@distributed(4)
def test_replicas() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    layer = nn.Linear(2, 5, bias=False, dtype=LOW)
    layer.weight.grad_dtype = FULL
    model: Any = fully_shard(layer, mesh=mesh)
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        # 1 + 2**-9 is not there in bf16
        model(torch.full((1, 2), 1.0 + 2**-7 * (dist.get_rank() == 0), dtype=LOW)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((5, 2), 2 + 2**-8))


@distributed(2)
def test_it_outlives_casts_and_loading_and_copies() -> None:
    """And may be set until the first forward."""
    model: Any = fully_shard(nn.Linear(2, 4, bias=False, dtype=torch.float64))
    model.weight.grad_dtype = FULL
    model.to(LOW)
    assert (model.weight.dtype, model.weight.grad_dtype) == (LOW, FULL)
    other = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for each in (model, other):
        each(torch.ones(1, 2, dtype=LOW)).sum().backward()
        assert each.weight.grad.dtype == FULL
        assert torch.equal(each.weight.grad.full_tensor(), torch.ones(4, 2))
    model.to(FULL)
    assert model.weight.grad.dtype == FULL
    model.to(LOW)  # a cast of parameters is not one of gradients that were asked for in float32
    assert model.weight.dtype == LOW
    assert model.weight.grad.dtype == FULL


@distributed(2)
def test_unused_parameters_of_any_dtype_cannot_be_reduced() -> None:
    layer = nn.Linear(2, 4, bias=False)
    layer.weight.grad_dtype = None
    model: Any = fully_shard(layer)
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ValueError, match=r"Reducing unused parameters.*weight"):
        model(torch.ones(1, 2)).sum().backward()


class Sometimes(nn.Module):
    """Uses its layers or not; the output needs a gradient in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, used: bool) -> Tensor:
        return self.layers[1](self.layers[0](x)) if used else x * 2


@pytest.mark.parametrize("unused", [False, True])
@distributed(2)
def test_sums_of_one_rank_meet_single_gradients_of_another(unused: bool) -> None:
    """Rank 0 has accumulated in float32; rank 1 has bf16 of one micro-batch, or nothing."""
    model: Any = Sometimes()
    for layer in model.layers:
        nn.init.eye_(layer.weight)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(LOW, FULL))
    model.set_reduce_scatter_unused_params(unused)
    first = dist.get_rank() == 0
    x = torch.ones(3, 4, requires_grad=True)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(x, first or (last and not unused)).sum().backward()
    expected = (6.0 if unused else 9.0) / 2
    for parameter in model.parameters():
        assert torch.equal(parameter.grad.full_tensor(), torch.full((4, 4), expected))


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 has these rules")
@distributed(2)
def test_units_with_several_dtypes_of_gradients() -> None:
    """Each parameter has its gradient in its own; they are reduced in the widest."""
    found = []
    for library in (torch_fsdp, fsdp2):
        net: Any = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
        for layer in net:
            nn.init.ones_(layer.weight)
        net[0].weight.grad_dtype = LOW
        policy = library.MixedPrecisionPolicy(param_dtype=LOW)
        model: Any = library.fully_shard(net, mp_policy=policy)
        for micro, value in enumerate((4.0, 2.0, 1.0)):
            model.set_requires_gradient_sync(micro == 2)
            model(torch.full((1, 2), value)).sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, expected in found[0].items():
        assert found[1][name].dtype == expected.dtype == (LOW if name[0] == "0" else FULL), name
        assert torch.equal(found[1][name], expected), name


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "_has_grad_dtype_override"),
    reason="before 2.15, torch rounds gradients to the dtype of computation",
)
@distributed(2)
def test_gradients_that_autograd_makes_in_float32_are_not_rounded() -> None:
    """That of a norm's weight on the CPU; as torch, bit for bit, with and without accumulation."""
    for micro_batches in (1, 3):
        found = []
        for library in (fsdp2, torch_fsdp):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 4))
            policy = library.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=FULL)
            library.fully_shard(net, mp_policy=policy)
            for part in range(micro_batches):
                net.set_requires_gradient_sync(part == micro_batches - 1)
                x = (torch.arange(128.0).view(8, 16) + 5 * part + dist.get_rank()).sin()
                net(x).float().square().sum().backward()
            found.append({name: p.grad.to_local() for name, p in net.named_parameters()})
        mine, theirs = found
        for name, grad in mine.items():
            assert grad.dtype == FULL
            assert torch.equal(grad, theirs[name]), (micro_batches, name)
        assert not torch.equal(mine["1.weight"], mine["1.weight"].to(LOW).to(FULL))
