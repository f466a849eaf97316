"""Process groups that sharding makes: who has to come, what they inherit, when they connect."""

from __future__ import annotations

import contextlib
import copy
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import harness
import testdev
from fsdp2 import explain, fully_shard, replicate
from harness import cached_mesh, distributed, ours_only, run_on

needs_device = pytest.mark.skipif(
    testdev.why_not() is not None, reason=testdev.why_not() or "the test device is there"
)
needs_options = pytest.mark.skipif(
    torch.__version__ < "2.14",
    reason="torch 2.13 does not show a plug-in's options, which are copied when its groups split",
)
pytestmark = ours_only("about groups inside")


@contextlib.contextmanager
def bound_to_device() -> Iterator[None]:
    """As after ``init_process_group(device_id=...)``: new groups are split from the default one."""
    default = dist.group.WORLD
    assert default is not None
    dist.all_reduce(torch.zeros(1))
    default.bound_device_id = torch.device(testdev.NAME, 0)
    try:
        yield
    finally:
        default.bound_device_id = None


def train(model: nn.Module, rows: int = 4) -> None:
    for _ in range(2):
        model(torch.randn(rows, 8)).square().mean().backward()
        model.zero_grad()


def links_of(model: Any) -> Any:
    return model._fsdp2_unit.param_group.transports[0]


def groups_of(model: nn.Module) -> set[Any]:
    """The groups that the units of ``model`` communicate over."""
    found = set()
    for module in model.modules():
        for links in (
            module._fsdp2_unit.param_group.transports if hasattr(module, "_fsdp2_unit") else ()
        ):
            transports = (links.gather, links.scatter, links.replicate, links.secondary_gather)
            found |= {transport.group for transport in transports if transport is not None}
    return found


# ------------------------------------------------------------------------------- who has to come


def _one_stage_only() -> None:
    with bound_to_device():
        mesh = init_device_mesh(testdev.NAME, (2, 2), mesh_dim_names=("stage", "shard"))
        if mesh.get_local_rank("stage") == 1:
            return
        model: Any = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
        model.set_separate_reduce_scatter_group(True)
        train(model)
        assert links_of(model).scatter.group is not mesh["shard"].get_group()


@needs_device
@needs_options
def test_a_stage_needs_no_rank_of_another_one() -> None:
    """The default group is bound to a device: a group split from it would need all ranks."""
    run_on(4, _one_stage_only, device=testdev.NAME, restart=True)


def _smaller_groups_of_some_ranks() -> None:
    with bound_to_device():
        mesh = DeviceMesh(testdev.NAME, torch.arange(4, device="cpu"))
        if dist.get_rank() == 4:
            return
        model: Any = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
        train(nn.Sequential(model, nn.Linear(8, 8)))
        assert links_of(model).secondary_gather.group.size() == 2


@needs_device
@needs_options
@pytest.mark.long
def test_smaller_groups_need_no_rank_outside_of_the_mesh() -> None:
    run_on(5, _smaller_groups_of_some_ranks, device=testdev.NAME, restart=True)


@distributed(3)
def test_groups_of_some_ranks_do_not_confuse_later_ones() -> None:
    """torch numbers groups by a counter that all ranks have to advance together."""
    pair = DeviceMesh(harness.DEVICE, torch.arange(2, device="cpu"))
    if dist.get_rank() < 2:
        model: Any = fully_shard(nn.Linear(8, 8), mesh=pair)
        model.set_separate_reduce_scatter_group(True)
        train(model)
        assert links_of(model).scatter.group is not links_of(model).gather.group
    later = dist.new_group(timeout=datetime.timedelta(seconds=5))
    total = torch.ones(1)
    dist.all_reduce(total, group=later)
    assert total == 3


# ----------------------------------------------------------------------------- what serves a device


def _ordered_by_work_alone() -> None:
    """A backend that uses a stream of its own whatever it is asked, and returns a Work."""
    native = testdev.native()
    wrong = []
    for seed, shape in enumerate([(4,), (2, 2), (4,), (2, 2)]):
        native.set_delays(seed=seed, probability=0.3, max_us=2000)
        native.set_ignores_async_op(True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plain = copy.deepcopy(model)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=cached_mesh(*shape))
        for step in range(2):
            torch.manual_seed(10 + step)  # the same batch on all ranks: so are the gradients
            x = torch.randn(4, 8)
            for each in (model, plain):
                each(x).square().mean().backward()
            grads = [
                g.full_tensor() for p in model.parameters() if isinstance(g := p.grad, DTensor)
            ]
            expected = [p.grad for p in plain.parameters()]
            wrong += [not torch.allclose(a, b) for a, b in zip(grads, expected, strict=True)]
            model.zero_grad()
            plain.zero_grad()
    native.set_ignores_async_op(False)
    assert not any(wrong), f"{sum(wrong)} of {len(wrong)} gradients are wrong"


@needs_device
def test_the_work_that_a_backend_returns_is_waited_for() -> None:
    run_on(4, _ordered_by_work_alone, device=testdev.NAME, restart=True)


def _served_by_gloo() -> None:
    device = testdev.NAME
    for backend, named in ((f"cpu:gloo,{device}:gloo", "'gloo'"), ("cpu:gloo", "'no backend'")):
        group: Any = dist.new_group(backend=backend)
        mesh = DeviceMesh.from_group(group, device)
        model = nn.Linear(8, 8)
        with pytest.raises(ValueError, match=f"{named} serves it .*cpu:gloo,{device}:testccl"):
            fully_shard(model, mesh=mesh)
        assert type(model) is nn.Linear
        assert type(model.weight) is nn.Parameter


@needs_device
def test_a_device_that_gloo_serves_is_refused() -> None:
    run_on(2, _served_by_gloo, device=testdev.NAME)


# ------------------------------------------------------------------------------ what they inherit


def _inherits() -> None:
    timeout = datetime.timedelta(seconds=77)
    backend = f"{testdev.NAME}:{testdev.BACKEND}"
    for bound in (False, True):
        with bound_to_device() if bound else contextlib.nullcontext():
            options = testdev.native().Options()
            options.high_priority = True
            beside: Any = dist.new_group(timeout=timeout, backend=backend, pg_options=options)
            mesh = DeviceMesh.from_group(beside, testdev.NAME)
            model: Any = fully_shard(nn.Linear(8, 8), mesh=mesh)
            train(model)
        group = links_of(model).scatter.group
        assert group is not beside
        made = group._get_backend(torch.device(testdev.NAME))
        assert made.name() == testdev.BACKEND
        assert made.options._timeout == timeout
        assert made.options.high_priority
        assert dist.get_process_group_ranks(group) == [0, 1]


@needs_device
@needs_options
def test_timeout_options_and_backend_are_those_of_the_mesh() -> None:
    run_on(2, _inherits, device=testdev.NAME)


# --------------------------------------------------------------------- when they connect, how many


def _one_dim() -> Any:
    return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh(testdev.NAME, (4,)))


def _hybrid() -> Any:
    return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh(testdev.NAME, (2, 2)))


def _hybrid_and_replicated() -> Any:
    mesh = init_device_mesh(testdev.NAME, (2, 2))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    replicate(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _to_two_ranks() -> Any:
    mesh = init_device_mesh(testdev.NAME, (4,))
    return fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)


def _one_of_two_dims() -> Any:
    mesh = init_device_mesh(testdev.NAME, (2, 2), mesh_dim_names=("shard", "tensor"))
    return fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])


# As docs/developers/streams.md has them, the mesh's own among them.
NUM_COMMUNICATORS: list[tuple[Callable[[], Any], int]] = [
    (_one_dim, 2),
    (_one_of_two_dims, 2),
    (_hybrid, 3),
    (_hybrid_and_replicated, 4),
    (_to_two_ranks, 3),
]


def _connects_when_sharded() -> None:
    native = testdev.native()
    for bound in (False, True):
        for make, expected in NUM_COMMUNICATORS:
            with bound_to_device() if bound else contextlib.nullcontext():
                model = make()
                before = native.num_communicators()
                train(model)
            made = native.num_communicators() - before
            assert made == 0, f"{make.__name__}: {made} communicators were made in a step"
            assert len(groups_of(model)) == expected, make.__name__
            assert len(explain(model).communicators) == expected, make.__name__


@needs_device
@needs_options
def test_communicators_are_made_when_a_module_is_sharded() -> None:
    run_on(4, _connects_when_sharded, device=testdev.NAME)
