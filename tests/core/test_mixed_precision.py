"""Low-precision compute with reductions in fp32, against the same casts written by hand.

The reference casts fp32 parameters and inputs, runs forward and backward in the low precision,
casts each rank's gradient to the dtype of the reduction, sums in rank order and divides. Losses
are bitwise equal as long as the parameters are; gradients are at world sizes 1 and 2.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, EVEN_MLP, MLP, TRANSFORMER, Case
from reference import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    feed_gradients,
    one_order_only,
    pair,
    shard_case,
)

LOW = torch.bfloat16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def cast_floating(values: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Casts the floating-point tensors among these."""
    return tuple(
        v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
    )


class Low(nn.Module):
    """Runs a plain fp32 model in a lower precision; its gradients arrive in fp32."""

    def __init__(self, plain: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain = plain
        self.dtype = dtype

    def forward(self, *inputs: Any) -> Tensor:
        low = {name: p.to(self.dtype) for name, p in self.plain.named_parameters()}
        return functional_call(self.plain, low, cast_floating(inputs, self.dtype))


def run_low(
    case: Case,
    model: nn.Module,
    plain: nn.Module,
    step: int,
    *,
    dtype: torch.dtype = LOW,
    reduce_dtype: torch.dtype | None = None,
    average: bool = True,
) -> None:
    """One forward and backward of both; the losses must be bitwise equal."""
    batch = case.batch(step, dist.get_rank(), torch.float32)
    expected = case.loss(Low(plain, dtype), *batch)
    expected.backward()
    if average:
        average_gradients(plain, reduce_dtype=reduce_dtype)
    loss = case.loss(model, *batch)
    assert_same(loss, expected, f"loss of step {step}", bitwise=True)
    loss.backward()


def train_low(case: Case, dtype: torch.dtype = LOW, **options: Any) -> None:
    """Trains both; the optimizer is fed the reference gradients, so that parameters stay equal."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model, plain = pair(case, dtype=torch.float32, mp_policy=policy, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    plain_optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    for step in range(4):
        run_low(case, model, plain, step, dtype=dtype)
        assert_same_gradients(model, plain, bitwise=one_order_only())
        feed_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_same_parameters(model, plain, bitwise=True)


@pytest.mark.parametrize("name", ["mlp", "even_mlp", "transformer", "recurrent", "nested", "lora"])
@distributed(2, 3, long=(1, 4))
def test_bf16_compute_with_fp32_reduction(name: str) -> None:
    train_low(BY_NAME[name])


@distributed(2, 3)
def test_fp16_compute_with_fp32_reduction() -> None:
    train_low(MLP, torch.float16)


@pytest.mark.parametrize("mode", [False, 2])
@distributed(4)
def test_reshard_modes(mode: bool | int) -> None:
    train_low(TRANSFORMER, reshard_after_forward=mode)


@distributed(4)
def test_hybrid_sharding() -> None:
    train_low(TRANSFORMER, mesh=cached_mesh(2, 2, names=("replicate", "shard")))


@distributed(1, 2, 3)
def test_reduction_in_bf16() -> None:
    """Within a few roundings to bf16: whether partial sums are rounded is left open."""
    for policy in (
        MixedPrecisionPolicy(param_dtype=LOW),
        MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW),
    ):
        model, plain = pair(EVEN_MLP, dtype=torch.float32, mp_policy=policy)
        run_low(EVEN_MLP, model, plain, 0)
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert isinstance(parameter.grad, DTensor)
            assert expected is not None
            assert parameter.grad.dtype == torch.float32
            difference = (parameter.grad.full_tensor() - expected).abs().max()
            assert difference <= 2**-7 * expected.abs().max(), name


@distributed(2, 3)
def test_reduction_in_fp64_of_fp32_gradients() -> None:
    """Only the reduction is wider; its result comes back in the dtype of the parameters."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model, plain = pair(MLP, dtype=torch.float32, mp_policy=policy)
    batch = MLP.batch(0, dist.get_rank(), torch.float32)
    for network in (plain, model):
        MLP.loss(network, *batch).backward()
    average_gradients(plain, reduce_dtype=torch.float64)
    # The sum is exact, or nearly, in fp64: one rounding remains, and it is the same one.
    assert_same_gradients(model, plain, bitwise=True)


@distributed(1, 2, 3)
def test_parameters_and_gradients_outside_are_fp32() -> None:
    model, plain = pair(TRANSFORMER, dtype=torch.float32, mp_policy=BF16)
    for _ in range(2):
        run_low(TRANSFORMER, model, plain, 0)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            assert parameter.to_local().dtype == parameter.grad.to_local().dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())


@distributed(2)
def test_parameters_inside_forward_are_bf16() -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend([x.dtype, self.weight.dtype])
            assert not isinstance(self.weight, DTensor)
            assert self.weight.shape == (self.out_features, self.in_features)
            return super().forward(x)

    model = fully_shard(nn.Sequential(Spy(4, 5), Spy(5, 3)), mp_policy=BF16)
    assert model(torch.randn(2, 4)).dtype == LOW
    assert seen == [LOW] * 4


@pytest.mark.parametrize("every_time", [True, False])
@distributed(1, 2, 3)
def test_accumulation(every_time: bool) -> None:
    """Local sums are kept in fp32, so that small micro-batch gradients are not lost."""
    model, plain = pair(MLP, dtype=torch.float32, mp_policy=BF16)
    assert isinstance(model, FSDPModule)
    for step in range(4):
        reduce = every_time or step == 3
        model.set_requires_gradient_sync(reduce)
        run_low(MLP, model, plain, step, average=reduce)
    assert_same_gradients(model, plain, bitwise=one_order_only() and not every_time)


@distributed(4)
def test_accumulation_with_reduce_scatter_only() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(MLP, dtype=torch.float32, mp_policy=BF16, mesh=mesh)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        run_low(MLP, model, plain, step, average=step == 2)
    assert_same_gradients(model, plain)


@distributed(1, 2, 3)
def test_output_dtype_of_the_root() -> None:
    torch.manual_seed(0)
    plain = EVEN_MLP.build()
    model = copy.deepcopy(plain)
    for unit in EVEN_MLP.units(model):
        fully_shard(unit, mp_policy=BF16)
    policy = MixedPrecisionPolicy(LOW, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    (inputs,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float32)
    output, expected = model(inputs), Low(plain, LOW)(inputs).float()
    assert_same(output, expected, "output", bitwise=True)
    output.square().mean().backward()
    expected.square().mean().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain, bitwise=one_order_only())


@distributed(1, 2)
def test_inputs_are_left_alone_on_request() -> None:
    policy = MixedPrecisionPolicy(LOW, torch.float32, cast_forward_inputs=False)
    torch.manual_seed(0)
    plain = EVEN_MLP.build()
    model = shard_case(EVEN_MLP, copy.deepcopy(plain), mp_policy=policy)
    (inputs,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        model(inputs)  # fp32 inputs meet bf16 weights
    model = shard_case(EVEN_MLP, copy.deepcopy(plain), mp_policy=policy)
    assert_same(model(inputs.to(LOW)), Low(plain, LOW)(inputs), "output", bitwise=True)


class ThreeKinds(nn.Module):
    """Inputs of several dtypes, positional and by keyword; only floating ones are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, ids: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        self.dtypes = [x.dtype, ids.dtype, more["double"].dtype, more["mask"].dtype]
        return self.linear(x)


@distributed(2)
def test_which_inputs_are_cast() -> None:
    model = ThreeKinds()
    fully_shard(model, mp_policy=BF16)
    ids, mask = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    model(torch.randn(3, 4), ids, more={"double": torch.randn(3).double(), "mask": mask})
    assert model.dtypes == [LOW, torch.int64, LOW, torch.bool]


@distributed(1, 2, 3)
def test_a_unit_in_fp32_between_units_in_bf16() -> None:
    """The cast happens at each unit's inputs, by the policy of that unit."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    fully_shard(model[0], mp_policy=BF16)
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model[2], mp_policy=BF16)
    fully_shard(model)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    output = model(x)
    expected = Low(plain[2], LOW)(plain[1](Low(plain[0], LOW)(x).float()))
    assert_same(output, expected, "output", bitwise=True)
    output.square().mean().backward()
    expected.square().mean().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain, bitwise=one_order_only())


@distributed(1, 2, 3)
def test_parameters_that_are_bf16_themselves() -> None:
    """Reduced in fp32, stored in bf16."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model, plain = pair(EVEN_MLP, dtype=LOW, mp_policy=policy)
    batch = EVEN_MLP.batch(0, dist.get_rank(), LOW)
    for network in (plain, model):
        EVEN_MLP.loss(network, *batch).backward()
    average_gradients(plain, reduce_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert isinstance(parameter.grad, DTensor)
        assert expected is not None
        assert parameter.grad.dtype == LOW
        # The order of the fp32 sum may turn one rounding to bf16 the other way.
        full = parameter.grad.full_tensor()
        torch.testing.assert_close(full, expected, rtol=2**-7, atol=1e-6)
        if one_order_only():
            assert torch.equal(full, expected), name


# ------------------------------------------------------------------- dtypes of single parameters


class Normed(nn.Module):
    """A norm that computes in the dtype of its weight, among layers in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {p.dtype for p in self.norm.parameters()}
        y = self.up(x)
        return self.down(self.norm(y.to(self.norm.weight.dtype)).to(y.dtype))


@distributed(1, 2, 3)
def test_parameters_that_are_not_cast() -> None:
    """The function is called once with each parameter, when it is sharded."""
    torch.manual_seed(0)
    plain = Normed()
    model = copy.deepcopy(plain)
    norms = set(model.norm.parameters())
    asked = []

    def choose(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return torch.float32 if param in norms else None

    expected_order = list(model.parameters())
    policy = MixedPrecisionPolicy(LOW, torch.float32, param_dtype_override_fn=choose)
    sharded = fully_shard(model, mp_policy=policy)
    for step in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        sharded.zero_grad()
        plain.zero_grad()
        sharded(x).square().mean().backward()
        low = {n: p if "norm" in n else p.to(LOW) for n, p in plain.named_parameters()}
        functional_call(plain, low, (x.to(LOW),)).square().mean().backward()
        average_gradients(plain)
        assert_same_gradients(sharded, plain, bitwise=one_order_only())
        assert model.seen == {torch.float32}
    assert len(asked) == len(expected_order)
    assert set(map(id, asked)) == set(map(id, expected_order))


@distributed(1)
def test_overrides_that_make_no_sense() -> None:
    for returned, message in (("fp32", "must return a torch.dtype or None"), (torch.float64, "")):
        policy = MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda _, r=returned: r)
        with pytest.raises(ValueError, match=message or "parameter's original dtype but got"):
            fully_shard(nn.Linear(2, 2), mp_policy=policy)


@pytest.mark.parametrize("direct_min_bytes", [0, 10**9])
@distributed(2, 3)
def test_sums_of_micro_batches_travel_in_the_dtype_of_the_reduction(direct_min_bytes: int) -> None:
    """Gradients of one backward travel as narrow as they are; rounded so, a sum loses 16 bits."""
    size = 8 * dist.get_world_size()  # shards are whole multiples of 16 bytes: sent by themselves
    torch.manual_seed(0)
    plain = nn.Linear(size, size, bias=False)
    low = copy.deepcopy(plain).to(LOW)
    model: Any = fully_shard(plain, mp_policy=BF16, direct_min_bytes=direct_min_bytes)
    expected = torch.zeros(size, size)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        x = torch.randn(4, size) * 1.7**micro
        for each, given in ((model, x), (low, x.to(LOW))):
            each(given).float().square().sum().backward()
        assert low.weight.grad is not None
        expected += low.weight.grad.float()
        low.weight.grad = None
    dist.all_reduce(expected)
    found = model.weight.grad.full_tensor()
    torch.testing.assert_close(found, expected / dist.get_world_size(), rtol=1e-6, atol=1e-5)


class Quantized(nn.Module):
    """A frozen weight of one byte an element beside a scale per row, as kernels of float8 want."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter((4 * torch.rand(7, 4)).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone())
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).t()


@ours_only("torch casts float8 weights, which its scales then do not fit")
@pytest.mark.parametrize("reshard", [True, 2])
@distributed(2, 4)
def test_weights_of_one_byte_are_gathered_as_they_are(reshard: bool | int) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8):
        plain = Quantized(dtype)
        policies: list[MixedPrecisionPolicy] = [
            BF16,
            MixedPrecisionPolicy(LOW, torch.float32, cast_frozen_params=True),
        ]
        for policy in policies:
            model = nn.Sequential(Quantized(dtype))
            fully_shard(model[0], mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(model, mp_policy=policy)
            x = torch.ones(2, 4) + dist.get_rank()
            output = model(x)
            plain.scale.grad = None
            wanted = functional_call(plain, {"scale": plain.scale.to(LOW)}, (x.to(LOW),))
            assert torch.equal(output, wanted)
            for loss in (output, wanted):
                loss.float().square().sum().backward()
            average_gradients(plain)
            grad = model.get_parameter("0.scale").grad
            assert isinstance(grad, DTensor)
            if dist.get_world_size() == 2:
                assert torch.equal(grad.full_tensor(), plain.scale.grad)
            for seen in model[0].seen:
                assert seen.dtype == dtype
                assert torch.equal(seen.view(torch.uint8), plain.weight.view(torch.uint8))
            weight = model.get_parameter("0.weight")
            assert isinstance(weight, DTensor)
            assert weight.to_local().dtype == dtype


@ours_only("torch casts float8 weights without being asked")
@distributed(2)
def test_weights_of_one_byte_are_cast_on_request() -> None:
    def ask(param: nn.Parameter) -> torch.dtype:
        return LOW

    policy = MixedPrecisionPolicy(LOW, torch.float32, param_dtype_override_fn=ask)
    model = fully_shard(Quantized(torch.float8_e4m3fn), mp_policy=policy)
    model(torch.ones(2, 4))
    assert model.seen[0].dtype == LOW
    assert torch.equal(model.seen[0], Quantized(torch.float8_e4m3fn).weight.to(LOW))
