"""How the collectives of a unit are batched: what is direct, what is packed, in how many calls."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2.comm.transports
import fsdp2.sharding.layout
import fsdp2.transports.host.exchange
import testdev
from benchmarks import batches, nccl_model
from benchmarks.machine import REPOSITORY
from fsdp2 import CommPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.comm.transports import GroupTransport
from fsdp2.runtime.unit import unit_of
from fsdp2.sharding.layout import MAX_DIRECT
from fsdp2.sharding.process_groups import num_hosts, own_group
from harness import cached_mesh, distributed, ours_only, run_on
from reference import average_gradients

pytestmark = ours_only("how collectives are batched")

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """128 experts, a module each: 384 matrices, of which some come out uneven on 3 ranks."""

    def __init__(self, width: int = 8, hidden: int = 24, num_experts: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        made = [expert(y) * weights[:, i : i + 1] for i, expert in enumerate(self.experts)]
        return x + torch.stack(made).sum(0)


@contextmanager
def no_exchange() -> Iterator[None]:
    """On the CPU too, the collectives of the group, as on other devices."""
    with mock.patch.object(fsdp2.transports.host.exchange, "EXCHANGE_MAX_RANKS", 0):
        yield


def train_mixture(policy: MixedPrecisionPolicy, direct_min_bytes: int) -> tuple[int, list[Any]]:
    """How many matrices are direct, and the losses of two steps."""
    torch.manual_seed(0)
    block = Mixture()
    mesh = cached_mesh(dist.get_world_size())
    fully_shard(block, mesh=mesh, mp_policy=policy, direct_min_bytes=direct_min_bytes)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = block(torch.randn(3, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (bucket,) = unit_of(block).buckets
    return len(bucket.layout.direct), losses


@pytest.mark.parametrize("reduce_dtype", ["float32", pytest.param(None, marks=pytest.mark.long)])
@distributed(2, 3)
def test_losses_do_not_depend_on_what_is_direct(reduce_dtype: str | None) -> None:
    policy = MixedPrecisionPolicy() if reduce_dtype is None else BF16
    capped, losses = train_mixture(policy, 0)
    with mock.patch.object(fsdp2.sharding.layout, "MAX_DIRECT", 10**9):
        everything, without_cap = train_mixture(policy, 0)
    assert capped == MAX_DIRECT
    assert everything > 380
    assert losses == without_cap


class Mixed(nn.Module):
    """Trained and frozen layers in bfloat16, and a norm in float32: three buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.frozen = nn.Linear(24, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x.to(self.up.weight.dtype))
        return self.frozen(self.norm(y.to(self.norm.weight.dtype)).to(y.dtype))


def keep_norms(param: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if param.shape == (24,) and bool((param == 1).all()) else None


@distributed(2, 3)
def test_one_call_gathers_all_buckets_of_a_mesh() -> None:
    torch.manual_seed(0)
    plain = Mixed()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=keep_norms)
    for direct_min_bytes in (0, 10**9):
        model = copy.deepcopy(plain)
        mesh = cached_mesh(dist.get_world_size())
        fully_shard(model, mesh=mesh, mp_policy=policy, direct_min_bytes=direct_min_bytes)
        real, calls = GroupTransport.all_gather, []

        def all_gather(self: Any, plan: Any, tag: int, real: Any = real, to: Any = calls) -> Any:
            to.append(plan)
            return real(self, plan, tag)

        with no_exchange(), mock.patch.object(GroupTransport, "all_gather", all_gather):
            for num_gathers in (1, 2):
                model.unshard()
                assert len(unit_of(model).buckets) == 3
                assert len(calls) == num_gathers
                for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine, whole.to(mine.dtype))
                model.reshard()
        assert calls[0] is calls[1], "it is made once"


@distributed(2, 3)
def test_gradients_that_are_cast_are_one_entry() -> None:
    """Cast gradients are copied anyway: then all into one buffer, sent at once."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 12))
    model = copy.deepcopy(plain)
    size = dist.get_world_size()
    fully_shard(model, mesh=cached_mesh(size), mp_policy=BF16, direct_min_bytes=0)
    real, entries = GroupTransport.reduce_scatter, []

    def reduce_scatter(self: Any, bucket: Any, plan: Any, grads: Any, outs: Any, tag: int) -> Any:
        entries.append(len(outs))
        return real(self, bucket, plan, grads, outs, tag)

    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 8)
    low = copy.deepcopy(plain).bfloat16()
    with no_exchange(), mock.patch.object(GroupTransport, "reduce_scatter", reduce_scatter):
        model(x).float().square().mean().backward()
    assert entries == [1]
    low(x.bfloat16()).float().square().mean().backward()
    for p, q in zip(plain.parameters(), low.parameters(), strict=True):
        assert q.grad is not None
        p.grad = q.grad.float()
    average_gradients(plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@distributed(2, 3)
def test_a_large_pack_is_given_back_after_the_gather() -> None:
    """Otherwise packed parameters would be held twice for as long as their unit is gathered."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(512, 520), nn.Linear(520, 500))
    for exchange in (True, False):
        model = copy.deepcopy(plain)
        mesh = cached_mesh(dist.get_world_size())
        fully_shard(model, mesh=mesh, direct_min_bytes=10**9)
        (bucket,) = unit_of(model).buckets
        whole = sum(p.nbytes for p in plain.parameters())
        with nullcontext() if exchange else no_exchange():
            for _ in range(2):
                model.unshard()
                assert bucket.gathered_bytes > 1.9 * whole
                assert whole <= bucket.allocated_bytes < 1.1 * whole
                for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine, other)
                model.reshard()
                assert bucket.allocated_bytes == 0


@pytest.mark.parametrize("name", batches.UNITS)
def test_the_rule_is_as_fast_as_both_alternatives_in_the_model_of_nccl(name: str) -> None:
    """Time of the gather and of the copies; the alternatives: all large ones direct, all packed."""
    with torch.device("meta"):
        unit = batches.UNITS[name]()
    for num_ranks in (2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024, 4096):
        rule, direct, packed = (
            batches.batch_of(unit, num_ranks, direct_min_bytes=least)
            for least in batches.WAYS.values()
        )
        assert rule.seconds <= 1.002 * direct.seconds
        if rule.links.num_hosts > 1:
            assert rule.seconds <= packed.seconds
        else:
            # Large parameters stay direct: what a ring or two cost more, copies take from what
            # computes beside them, and a pack takes of memory.
            assert rule.seconds <= 1.06 * packed.seconds + rule.links.ring_s
            assert rule.packed_bytes <= direct.packed_bytes + packed.packed_bytes / 16


def test_entries_are_dealt_out_as_nccl_deals_them() -> None:
    links = nccl_model.Links(8, 1, channels=4, bytes_per_s=4e9)
    mib = 1 << 20
    # One entry: a quarter on each channel. Small ones share the first; the next begins there, too.
    assert nccl_model.deal([4 * mib], links) == [[mib]] * 4
    small, rest = nccl_model.deal([mib // 4, mib // 4, 3 * mib + mib // 2], links)[:2]
    assert small == [mib // 4, mib // 4, mib // 2]
    assert rest == [mib]
    # Equal ones that come out even: a channel each.
    assert nccl_model.deal([mib] * 4, links) == [[mib]] * 4
    ring = 8.4e-6 + 7 * 3.4e-6
    assert nccl_model.seconds([mib] * 4, links) == pytest.approx(ring + 7 * mib / 1e9)
    assert nccl_model.seconds([mib // 4] * 16, links) == pytest.approx(4 * ring + 7 * mib / 1e9)


class Two(nn.Module):
    """A weight of 64 KiB per rank of four, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def _on_hosts(hosts: list[int]) -> None:
    """Ranks find out on how many hosts they are, and batch as was predicted for so many."""
    rank, device = dist.get_rank(), torch.device(testdev.NAME)
    os.environ["NCCL_HOSTID"] = f"host {hosts[rank]}"
    world: Any = dist.group.WORLD
    group = own_group(world, device, "hosts")
    assert num_hosts(group) == len(set(hosts))
    mesh = DeviceMesh.from_group(group, testdev.NAME)
    num_direct = 1 if len(set(hosts)) == 1 else 0
    for options, expected in (({}, num_direct), ({"direct_min_bytes": 0}, 2)):
        torch.manual_seed(0)
        plain = Two()
        model: Any = fully_shard(copy.deepcopy(plain), mesh=mesh, **options)
        (bucket,) = unit_of(model).buckets
        assert len(bucket.layout.direct) == expected
        x = torch.randn(3, 256)
        model(x).backward()
        plain(x).backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)
    # Under a policy large parameters are one message: they stay direct, or would not be narrow.
    model = fully_shard(Two(), mesh=mesh, comm_policy=CommPolicy(gather=torch.int8))
    model(x)
    assert len(unit_of(model).buckets[0].layout.direct) == 1


@pytest.mark.skipif(testdev.why_not() is not None, reason=testdev.why_not() or "")
@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]], ids=str)
def test_ranks_batch_by_the_hosts_that_they_are_on(hosts: list[int]) -> None:
    run_on(4, _on_hosts, hosts, device=testdev.NAME, restart=True)


def test_the_table_in_docs_is_what_the_command_prints() -> None:
    page = (REPOSITORY / "docs" / "developers" / "streams.md").read_text()
    begin, end = batches.MARKERS
    assert page.split(begin)[1].split(end)[0].strip() == batches.table()
