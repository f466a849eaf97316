"""How many bytes a step copies beside what its collectives move.

The bytes are counted by a dispatch mode: it sees every copying operation of forward and backward
with the tensors that it writes. What an exchange moves inside itself (a rank's own slice, the
local sum) happens under the profiler range `fsdp2::exchange`, counts as communication, and is
listed apart. What gloo copies within its own collectives is in no case visible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from harness import cached_mesh, distributed, ours_only

COPIES = {
    "aten::_chunk_cat",
    "aten::_foreach_copy",
    "aten::_foreach_copy_",
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::copy",
    "aten::copy_",
    "aten::index_select",
    "aten::narrow_copy",
    "aten::slice_copy",
    "aten::split_copy",
    "aten::split_with_sizes_copy",
    "aten::stack",
    # What torch's FSDP2 calls:
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
}
EXCHANGE = "fsdp2::exchange"


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def arguments_written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes into, by its schema: in place, or `out`."""
    schema = func._schema
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    values.update(kwargs)
    writes = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return [values[name] for name in writes if values.get(name) is not None]


class CopyCounter(TorchDispatchMode):
    """Adds up the bytes that copying operations write, inside and outside of exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[str, int] = {}
        self.inside: dict[str, int] = {}
        self._ranges: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if name == "profiler::_record_function_enter_new":
            self._ranges.append(args[0])
        elif name == "profiler::_record_function_exit":
            self._ranges.pop()
        result = func(*args, **kwargs)
        if name in COPIES:
            written = arguments_written(func, args, kwargs) or [result]
            num_bytes = sum(t.numel() * t.element_size() for t in tensors_in(written))
            counts = self.inside if EXCHANGE in self._ranges else self.outside
            counts[name] = counts.get(name, 0) + num_bytes
        return result


def linear_stack(bias: bool = False, width: int = 512) -> nn.Module:
    """Four matrices of 1 MiB in fp32; without biases nothing is small."""
    layers = [nn.Linear(width, width, bias=bias) for _ in range(4)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


def shard(library: ModuleType, model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            library.fully_shard(layer, **options)
    return library.fully_shard(model, **options)


def count_step(model: nn.Module, dtype: torch.dtype = torch.float32) -> CopyCounter:
    """Counts one forward and backward, after two others in which plans are made."""
    inputs = torch.randn(4, 512, dtype=dtype)

    def step() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    for _ in range(2):
        step()
    with CopyCounter() as counter:
        step()
    return counter


def total_bytes(model: nn.Module, element_size: int = 4) -> int:
    return sum(p.numel() for p in model.parameters()) * element_size


@distributed(1)
def test_the_counter_counts() -> None:
    a, b = torch.ones(100), torch.zeros(100)
    with CopyCounter() as counter:
        b.copy_(a)
        torch.cat([a, b])
        torch.cat([a, b], out=torch.empty(200))
        a.double()
        torch._foreach_copy_([a, b], [b, a])
        with torch.profiler.record_function(EXCHANGE):
            a.clone()
        a.view(10, 10).t().contiguous()
        a + b
    expected = {"copy_": 400, "cat": 1600, "_to_copy": 800, "_foreach_copy_": 800, "clone": 400}
    assert counter.outside == {f"aten::{name}": count for name, count in expected.items()}
    assert counter.inside == {"aten::clone": 400}


@distributed(2)
def test_the_peer_copies_and_a_plain_model_does_not() -> None:
    """So that zero means something below."""
    plain = linear_stack()
    assert count_step(plain).outside == {}
    model = shard(torch_fsdp, copy.deepcopy(plain))
    copied = sum(count_step(model).outside.values())
    assert copied >= 2 * total_bytes(plain)


@ours_only("no copies")
@pytest.mark.parametrize("mode", [None, True, False])
@distributed(2, 4)
def test_large_parameters_are_not_copied(mode: bool | None) -> None:
    plain = linear_stack()
    model = shard(fsdp2, copy.deepcopy(plain), reshard_after_forward=mode)
    counter = count_step(model)
    assert counter.outside == {}, counter.outside
    # Own slices in two gathers, and what a local sum needs: less than all parameters twice.
    assert sum(counter.inside.values()) <= 2 * total_bytes(plain)


@ours_only("no copies")
@distributed(4)
def test_hybrid_sharding_copies_nothing() -> None:
    plain = linear_stack()
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    counter = count_step(shard(fsdp2, copy.deepcopy(plain), mesh=mesh))
    assert counter.outside == {}, counter.outside


@ours_only("no copies")
@distributed(1)
def test_one_rank_copies_nothing_at_all() -> None:
    counter = count_step(shard(fsdp2, linear_stack()))
    assert counter.outside == {}, counter.outside
    assert counter.inside == {}, counter.inside


@ours_only("no copies")
@distributed(2)
def test_low_precision_costs_one_pass() -> None:
    """The cast of the shards; gradients travel as they are."""
    plain = linear_stack()
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    counter = count_step(shard(fsdp2, copy.deepcopy(plain), mp_policy=policy), torch.bfloat16)
    assert 0 < sum(counter.outside.values()) <= total_bytes(plain, element_size=2)


def of_the_peer(build: Callable[[], nn.Module]) -> tuple[int, int]:
    """Bytes copied outside of exchanges: ours and torch's."""
    plain = build()
    counts = [
        sum(count_step(shard(library, copy.deepcopy(plain))).outside.values())
        for library in (fsdp2, torch_fsdp)
    ]
    return counts[0], counts[1]


@ours_only("no copies")
@distributed(2)
def test_biases_are_packed_and_cost_little() -> None:
    """Small parameters are copied; all together that is at most a twentieth of torch's bytes."""
    ours, theirs = of_the_peer(lambda: linear_stack(bias=True))
    assert 0 < ours <= 0.05 * theirs


def tensor_parallel_stack(mesh: DeviceMesh) -> nn.Module:
    """Matrices by columns and by rows in turn: what a rank has of each is 512 KiB."""
    model = linear_stack()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, ParallelStyle] = {"0": columns, "2": rows, "4": columns, "6": rows}
    return parallelize_module(model, mesh, plan)


@ours_only("no copies")
@distributed(4)
def test_tensor_parallel_shards_are_not_copied() -> None:
    """A local tensor-parallel shard is gathered in place as any other parameter is."""
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    plain = tensor_parallel_stack(mesh["tensor"])
    without = count_step(plain)
    counter = count_step(shard(fsdp2, tensor_parallel_stack(mesh["tensor"]), mesh=mesh["data"]))
    assert counter.outside == without.outside, (counter.outside, without.outside)
    local_bytes = total_bytes(plain) // 2
    assert 0 < sum(counter.inside.values()) <= 2 * local_bytes
    peer = count_step(shard(torch_fsdp, tensor_parallel_stack(mesh["tensor"]), mesh=mesh["data"]))
    copied = sum(peer.outside.values()) - sum(without.outside.values())
    assert copied >= 2 * local_bytes  # so that nothing means something
