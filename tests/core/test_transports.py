"""The collectives of the group itself, which gloo uses above 32 ranks and NCCL always.

Small gloo groups exchange messages instead; here that is turned off, so that the batched calls
and the padding they need are held against the same reference.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2.comm.transports
import fsdp2.transports.host.exchange
from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, EVEN_MLP, MLP, TRANSFORMER
from reference import Training, average_gradients, check_training, pair, run_both


@contextmanager
def no_exchange() -> Iterator[None]:
    before = fsdp2.transports.host.exchange.EXCHANGE_MAX_RANKS
    fsdp2.transports.host.exchange.EXCHANGE_MAX_RANKS = 0
    try:
        yield
    finally:
        fsdp2.transports.host.exchange.EXCHANGE_MAX_RANKS = before


@pytest.mark.parametrize("direct_min_bytes", [0, pytest.param(200, marks=pytest.mark.long), 10**9])
@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent", "conditional", "lora"])
@distributed(3, long=(2,))
def test_training(name: str, direct_min_bytes: int) -> None:
    training = Training(steps=2, bitwise=False)
    with no_exchange():
        check_training(BY_NAME[name], training, direct_min_bytes=direct_min_bytes)


@distributed(4)
def test_hybrid_sharding_and_regrouping() -> None:
    training = Training(steps=2, bitwise=False)
    with no_exchange():
        mesh = cached_mesh(2, 2, names=("replicate", "shard"))
        check_training(MLP, training, mesh=mesh)
        check_training(TRANSFORMER, training, reshard_after_forward=2)


@pytest.mark.parametrize("direct_min_bytes", [0, 10**9])
@distributed(2)
def test_mixed_precision_is_that_of_an_exchange(direct_min_bytes: int) -> None:
    """bf16 gradients widened before a float32 reduce-scatter, or sent as they are and widened
    before they are added: the same sums."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy, "direct_min_bytes": direct_min_bytes}
    found = []
    for exchange in (True, False):
        model, plain = pair(EVEN_MLP, dtype=torch.float32, **options)
        if exchange:
            loss = EVEN_MLP.loss(model, *EVEN_MLP.batch(0, 0, torch.float32))
        else:
            with no_exchange():
                loss = EVEN_MLP.loss(model, *EVEN_MLP.batch(0, 0, torch.float32))
        loss.backward()
        assert isinstance(model, FSDPModule)
        found.append([p.grad.to_local().clone() for p in model.parameters()])
        del plain
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@distributed(2)
def test_means_are_divided_only_by_what_is_left() -> None:
    """Collectives give means where an exchange gives sums."""
    mesh = cached_mesh(1, 2, names=("replicate", "shard"))
    for factor in (None, 3.0):
        with no_exchange():
            model, plain = pair(EVEN_MLP, mesh=mesh, direct_min_bytes=0)
            assert isinstance(model, FSDPModule)
            if factor is not None:
                for unit in model.modules():
                    if isinstance(unit, FSDPModule):
                        unit.set_gradient_divide_factor(factor)
            run_both(EVEN_MLP, model, plain, 0)
        scale = 1.0 if factor is None else 2 / factor
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert q.grad is not None
            torch.testing.assert_close(p.grad.full_tensor(), q.grad * scale)


class Weighted(nn.Module):
    """The gradient of its weight is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 4))
        self.small = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + (self.small * x[0, 0]).sum()


@pytest.mark.parametrize("direct_min_bytes", [0, 10**9])
@pytest.mark.parametrize("replicas", [1, 2])
@distributed(2)
def test_sums_in_float16_do_not_overflow(replicas: int, direct_min_bytes: int) -> None:
    """A sum over ranks that float16 cannot hold has a mean that it can."""
    mesh = cached_mesh(replicas, 2 // replicas, names=("replicate", "shard"))
    for param_dtype in (None, torch.float16):
        for value in (40_000.0, 6e-5):
            with no_exchange():
                model = Weighted()
                policy = MixedPrecisionPolicy(param_dtype, torch.float16)
                fully_shard(model, mesh=mesh, mp_policy=policy, direct_min_bytes=direct_min_bytes)
                model(torch.full((12, 4), value)).backward()
            for param in model.parameters():
                grad = param.grad.full_tensor()
                expected = torch.full_like(grad, value).half().float()
                torch.testing.assert_close(grad.float(), expected, rtol=2e-3, atol=0)


class EightRanks:
    """A group whose all-reduce adds as if all had the same, and notes what it is asked for."""

    def __init__(self) -> None:
        self.operations: list[Any] = []

    def size(self) -> int:
        return 8

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self.operations.append(options.reduceOp.op)
        if options.reduceOp == dist.ReduceOp.SUM:
            torch._foreach_mul_(tensors, 8)

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = None


@ours_only("asks its transports")
@pytest.mark.parametrize(
    ("backend", "hosts", "operation"),
    [("nccl", 1, "SUM"), ("nccl", 2, "SUM"), ("nccl", 8, "AVG"), ("testccl", 1, "AVG")],
)
def test_nccl_adds_where_ranks_share_a_host(backend: str, hosts: int, operation: str) -> None:
    group: Any = EightRanks()
    with (
        mock.patch.object(fsdp2.comm.transports, "backend_name", return_value=backend),
        mock.patch.object(fsdp2.comm.transports, "num_hosts", return_value=hosts),
    ):
        transport = fsdp2.comm.transports.make_transport(group, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.arange(5).to(dtype)
        transport.all_reduce([tensor], 0)()  # type: ignore[misc]
        assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert group.operations == [getattr(dist.ReduceOp.RedOpType, operation)] * 3


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.randn(12, 4, dtype=torch.complex64))
        self.uneven = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return sum((p * (i + x)).abs().sum() for i, p in enumerate(self.parameters()))


@distributed(2, 3)
def test_complex_numbers_reach_no_backend() -> None:
    """NCCL has no dtype for them; a sum of two real numbers each is the same."""
    real = fsdp2.comm.transports._either
    calls: list[int] = []

    def either(group: dist.ProcessGroup, *names: str) -> Any:
        function = real(group, *names)

        def call(outputs: Any, inputs: Any, options: Any) -> Any:
            calls.append(len(outputs))
            assert not any(tensor.is_complex() for tensor in (*outputs, *inputs))
            return function(outputs, inputs, options)

        return call

    torch.manual_seed(0)
    plain = Phases()
    x = torch.tensor(1 + 2j) * (1 + dist.get_rank())
    plain(x).backward()
    average_gradients(plain)
    for exchange in (True, False):
        for reduce_dtype in (None, torch.float32, torch.float64):
            model = copy.deepcopy(plain)
            model.zero_grad()
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            fully_shard(
                model, mesh=cached_mesh(dist.get_world_size()), mp_policy=policy, direct_min_bytes=0
            )
            way = nullcontext() if exchange else no_exchange()
            with way, mock.patch.object(fsdp2.comm.transports, "_either", either):
                model(x).backward()
            assert exchange or len(calls) > 1
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
