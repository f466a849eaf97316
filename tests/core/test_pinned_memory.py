"""Page-locked memory of offloaded shards and of checkpoints: how much is taken, what is in it."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import testdev
from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.checkpoint.format.manifest import TensorPart
from fsdp2.checkpoint.format.tensors import describe
from fsdp2.checkpoint.saving.staging import Staging
from fsdp2.dtensor.boxes import Box
from harness import cached_mesh, ours_only, run_on

pytestmark = [
    ours_only("looks at memory that this package takes"),
    pytest.mark.skipif(
        testdev.why_not() is not None, reason=testdev.why_not() or "the test device is there"
    ),
]
MIB = 1 << 20


def _offloaded() -> None:
    native = testdev.native()
    before = native.pinned_bytes()
    size, layers = 300, 11  # 180,600 bytes each: a power of two for each is 1.45 times that
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(size, size) for _ in range(layers)))
    model = copy.deepcopy(plain)
    for layer in (*model, model):
        fully_shard(layer, mesh=cached_mesh(2), offload_policy=CPUOffloadPolicy())
    needed = sum(p.nbytes for p in plain.parameters())  # half of them, and of the gradients
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, size)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert p.to_local().is_pinned()
        rows = expected.detach().chunk(2)[dist.get_rank()]
        torch.testing.assert_close(p.to_local(), rows.cpu())
    taken = native.pinned_bytes() - before
    assert needed <= taken < 1.1 * needed, f"{taken} bytes for {needed}"


def test_shards_and_gradients_take_little_more_than_they_are() -> None:
    run_on(2, _offloaded, device=testdev.NAME, restart=True)


def _given_back() -> None:
    """Memory of a model that is gone is the next one's."""
    native = testdev.native()
    taken = []
    for _ in range(3):
        model = fully_shard(
            nn.Linear(300, 300), mesh=cached_mesh(1), offload_policy=CPUOffloadPolicy()
        )
        model(torch.randn(4, 300)).sum().backward()
        del model
        torch.get_device_module(testdev.NAME).synchronize()
        gc.collect()
        taken.append(native.pinned_bytes())
    assert taken[0] == taken[1] == taken[2], taken


def test_memory_of_a_model_that_is_gone_is_used_again() -> None:
    run_on(1, _given_back, device=testdev.NAME, restart=True)


def _staged() -> None:
    native = testdev.native()
    before = native.pinned_bytes()
    tensors = {
        "a": torch.randn(5 * MIB // 4 + 3),
        "b": torch.randn(3, MIB // 4).t(),
        "c": torch.randn(7 * MIB // 16).to(torch.complex64),
        "d": torch.tensor(2.5),
        "e": torch.empty(0, 3),
    }
    staging = Staging()
    with mock.patch("fsdp2.common.pinned.CHUNK_BYTES", 4 * MIB):
        for _ in range(2):  # the second time it is there
            captured: Any = SimpleNamespace(
                locals={("model", name): tensor for name, tensor in tensors.items()},
                own={},
                plans={},
            )
            read = staging.fill(captured)()
            needed = sum(tensor.nbytes for tensor in tensors.values())
            taken = native.pinned_bytes() - before
            assert needed <= taken < needed + MIB, f"{taken} bytes for {needed}"
    for name, tensor in tensors.items():
        info = describe(name, tensor)
        box = Box.whole(info.shape)
        part = TensorPart("model", info, box, box, (0,), True)
        expected = tensor.cpu().contiguous()
        found = bytearray(read(part, 0, expected.nbytes))
        if found:
            flat = torch.frombuffer(found, dtype=expected.dtype)
            assert torch.equal(flat, expected.reshape(-1)), name
    staging.clear()
    del read
    assert native.pinned_bytes() == before


def test_an_asynchronous_save_takes_little_more_than_it_writes() -> None:
    run_on(1, _staged, device=testdev.NAME)
