"""The test device shows what it is for, and bodies of other test files run on it.

All of `pytest --device testdev` is more than fits into the default run; this is a choice of it, at
least one body for each way that data takes between streams, the host and other ranks.
"""

from __future__ import annotations

import importlib
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import testdev
from fsdp2 import clip_grad_norm_, fully_shard
from harness import cached_mesh, run_on

pytestmark = pytest.mark.skipif(testdev.why_not() is not None, reason=testdev.why_not() or "")

SEEDS = range(20)


def on_device(*world_sizes: int) -> Callable[[Callable[[], None]], Callable[[int], None]]:
    """`distributed`, on the test device."""

    def decorate(body: Callable[[], None]) -> Callable[[int], None]:
        def test(world_size: int) -> None:
            run_on(world_size, body, device=testdev.NAME)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        test.__module__ = body.__module__
        vars(test)["body"] = body
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


# ---------------------------------------------------------------------------- the device itself


def _device() -> Any:
    """``torch.testdev``."""
    return torch.get_device_module(testdev.NAME)


def _streams() -> tuple[Any, Any]:
    return _device().Stream(), _device().Stream()


def _written_then_read(wait: bool) -> int:
    """How often in 20 runs another stream reads what was not written yet."""
    wrong = 0
    for seed in SEEDS:
        testdev.native().set_delays(seed=seed, probability=0.5, max_us=500)
        writer, reader = _streams()
        value = torch.zeros(64)
        _device().synchronize()
        with _device().stream(writer):
            for _ in range(4):
                value.add_(1)
        if wait:
            reader.wait_stream(writer)
        with _device().stream(reader):
            seen = value.clone()
        _device().synchronize()
        wrong += not bool((seen == 4).all())
    return wrong


@on_device(1)
def test_a_wait_that_is_missing_is_seen() -> None:
    assert _written_then_read(wait=True) == 0
    assert _written_then_read(wait=False) > len(SEEDS) // 2


def _freed_while_read(record: bool) -> int:
    """How often in 20 runs memory that was freed on one stream is poisoned under another."""
    wrong = 0
    for seed in SEEDS:
        testdev.native().set_delays(seed=seed, probability=0.5, max_us=500)
        owner, reader = _streams()
        with _device().stream(owner):
            value = torch.ones(64)
        reader.wait_stream(owner)
        with _device().stream(reader):
            for _ in range(3):
                torch.zeros(8).add_(1)  # keeps the reader busy
            seen = value + 0
        if record:
            value.record_stream(reader)
        del value
        _device().synchronize()
        wrong += not bool((seen == 1).all())
    return wrong


@on_device(1)
def test_memory_freed_too_early_is_poisoned() -> None:
    assert _freed_while_read(record=True) == 0
    assert _freed_while_read(record=False) > len(SEEDS) // 4


@on_device(1)
def test_fresh_memory_holds_nans() -> None:
    assert torch.empty(5).isnan().all()
    memory = torch.ones(1000)
    address = memory.data_ptr()
    del memory
    again = torch.empty(1000)
    assert again.data_ptr() == address, "the allocator gives a freed block out at once"
    assert again.isnan().all()


@on_device(1)
def test_pinned_memory_is_read_when_the_stream_is_there() -> None:
    source = torch.ones(64, device="cpu", pin_memory=True)
    testdev.native().set_delays(seed=1, probability=1, max_us=20_000)
    copied = source.to("testdev", non_blocking=True)
    source.fill_(2)
    assert (copied == 2).all(), "a copy that does not block is asynchronous"
    copied = source.to("testdev")
    source.fill_(3)
    assert (copied == 2).all()


@on_device(1)
def test_host_waits_are_counted() -> None:
    waits = testdev.native().host_waits
    value = torch.ones(4) * 2
    before = waits()
    total = (value @ value).relu().sum()
    assert waits() == before
    assert total.item() == 16
    assert waits() == before + 1
    value[[0, 2]]
    assert waits() > before + 1, "indices that come from the host make it wait"


@on_device(2, 3)
def test_collectives_are_ordered_by_streams() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = cached_mesh(size).get_group()
    _device().synchronize()
    before = testdev.native().host_waits()
    results: list[tuple[Tensor, Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.full((4,), rank + 1).to(dtype)
        gathered = torch.empty(4 * size, dtype=dtype)
        dist.all_gather_into_tensor(gathered, mine, group)
        expected = torch.arange(1, size + 1, device="cpu").to(dtype).repeat_interleave(4)
        results.append((gathered, expected))
        summed = torch.empty(4, dtype=dtype)
        work = dist.reduce_scatter_tensor(summed, gathered, group=group, async_op=True)
        assert work is not None
        work.wait()
        results.append((summed, torch.full((4,), size * (rank + 1), device="cpu").to(dtype)))
        mean = mine.double()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group)
        results.append((mean, torch.full((4,), (size + 1) / 2, device="cpu").double()))
    assert testdev.native().host_waits() == before, "the host waits for no collective"
    for actual, expected in results:
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def test_memory_of_the_device_cannot_be_touched_by_the_host() -> None:
    program = (
        "import ctypes, testdev, torch; testdev.start(); "
        "ctypes.string_at(torch.ones(4, device='testdev').data_ptr(), 4)"
    )
    here = Path(__file__).parents[1] / "support"
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr.decode()


# ------------------------------------------------------------------------------------- a step


@on_device(2)
def test_the_host_does_not_wait_in_a_step() -> None:
    mesh = cached_mesh(2)
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 301), nn.Linear(301, 2))
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    native = testdev.native()
    for step in range(4):
        batch = torch.randn(4, 8)
        _device().synchronize()
        before = native.host_waits(), native.synchronous_operators()
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        after = native.host_waits(), native.synchronous_operators()
        assert step == 0 or after == before, (before, after)


@on_device(4)
def test_the_host_does_not_wait_for_norms_on_several_meshes() -> None:
    """Parameters cut by one mesh dim and by two, in turn: their sums travel in several groups."""
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for i, layer in enumerate(model):
        if i % 3:
            plan = ColwiseParallel() if i % 3 == 1 else RowwiseParallel()
            parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    native = testdev.native()
    for step, norm_type in enumerate((2.0, 2.0, math.inf, 1.0, 0.0)):
        batch = torch.randn(4, 8)
        _device().synchronize()
        counts = [(native.host_waits(), native.synchronous_operators())]
        model(batch).square().mean().backward()
        counts.append((native.host_waits(), native.synchronous_operators()))
        clip_grad_norm_(model.parameters(), 1.0, norm_type)
        counts.append((native.host_waits(), native.synchronous_operators()))
        optimizer.step()
        optimizer.zero_grad()
        counts.append((native.host_waits(), native.synchronous_operators()))
        assert step == 0 or counts == counts[:1] * 4, norm_type


# ------------------------------------------------------- bodies of other files, on the device

BODIES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "test_offload.test_training", {"name": "mlp"}),
    (2, "test_offload.test_shards_and_gradients_are_on_the_cpu", {}),
    (2, "test_offload.test_accumulation", {"mode": True}),
    (2, "test_offload.test_with_mixed_precision_it_changes_nothing", {}),
    (2, "test_mixed_precision.test_parameters_and_gradients_outside_are_fp32", {}),
    (2, "test_gradients.test_backward_of_a_part_of_the_loss", {}),
    (3, "test_batches.test_one_call_gathers_all_buckets_of_a_mesh", {}),
    (3, "test_batches.test_gradients_that_are_cast_are_one_entry", {}),
    (2, "test_batches.test_a_large_pack_is_given_back_after_the_gather", {}),
    (2, "test_gradients.test_zero_grad_forgets_the_last_step", {"set_to_none": True}),
    (2, "test_full_state.test_round_trip", {"name": "transformer"}),
    (2, "test_checkpoint_elastic.test_forward_after_a_load_uses_what_was_loaded", {}),
    (2, "test_activation_checkpoint.test_dropout_is_recomputed_with_the_same_mask", {}),
    (2, "test_recovery.test_state_dict_and_evaluation_after_a_failure", {}),
    (2, "test_recovery.test_the_next_backward_needs_no_forward_before_it", {}),
    (2, "test_extensions.test_what_it_is_told", {}),
    (2, "test_optim_local.test_groups_with_their_own_options_and_frozen_parameters", {}),
    (2, "test_optim_whole.test_whole_steps_go_on_from_a_saved_state", {}),
    (
        3,
        "test_one_rank_alone.test_a_checkpoint_without_rows_for_a_rank",
        {"kind": "frozen and kept"},
    ),
    (2, "test_one_rank_alone.test_one_rank_writes_between_forward_and_backward", {}),
    (
        2,
        "test_checkpoint_elastic.test_buffers_of_a_model_on_the_meta_device_come_to_its_mesh",
        {},
    ),
    (4, "test_clip.test_any_mix_of_meshes_and_placements", {"order": 2.0}),
    (4, "test_clip.test_pipeline_stages", {"order": 2.0}),
    (4, "test_hsdp.test_training", {"name": "mlp"}),
    (4, "test_hsdp.test_accumulation_with_reduce_scatter_only", {"name": "mlp"}),
    (4, "test_tensor_parallel.test_sequence_parallel_norms", {}),
    (4, "test_parallel_2d.test_accumulation", {"every_time": True}),
    (4, "test_experts.test_a_dense_part_with_replicas", {}),
    (4, "test_pipelines.test_training", {"kind": Schedule1F1B, "mode": None}),
    (4, "test_pipelines.test_frozen_parameters", {"kind": ScheduleInterleavedZeroBubble}),
    (4, "test_full_state.test_replicas", {}),
    (4, "test_offload.test_hybrid_sharding", {}),
]


def _short(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("world_size", "name", "arguments"),
    BODIES,
    ids=["-".join([name, *map(_short, arguments.values())]) for _, name, arguments in BODIES],
)
def test_body(world_size: int, name: str, arguments: dict[str, Any]) -> None:
    file, function = name.split(".")
    body = getattr(importlib.import_module(file), function)
    run_on(world_size, getattr(body, "body", body), device=testdev.NAME, **arguments)
