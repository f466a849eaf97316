"""Which stream's memory things are in, and that steps find their memory where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.testing import Recorder, recording
from fsdp2.testing.order import Allocate
from harness import ours_only

pytestmark = ours_only("looks at memory inside")


def blocks(num: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num)))


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# ------------------------------------------------------------------------------ gathered storage


def streams_of_blocks(recorder: Recorder, nbytes: int) -> set[str]:
    """The streams on which blocks of this size were allocated."""
    allocated = [e for e in recorder.events if isinstance(e, Allocate)]
    return {event.stream for event in allocated if event.nbytes == nbytes}


@pytest.mark.parametrize("offload", [False, True])
def test_gathered_storage_is_of_the_gathers_stream_from_the_start(offload: bool) -> None:
    """Else compute's pool would keep a block for each plan that no gather can use."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        with recording(offload=offload) as recorder:
            model = shard(blocks(3, 10), mesh=mesh, **options)
            for step in range(2):
                if step:
                    model.load_state_dict(dict(model.state_dict()), assign=True)  # plans anew
                model(torch.ones(2, 10)).sum().backward()
                model.zero_grad()
        buckets = [bucket for unit in model._units(True) for bucket in unit.buckets]  # type: ignore[operator]
        (gathered,) = {bucket.gathered_bytes for bucket in buckets}
        assert streams_of_blocks(recorder, gathered) == {"gather"}
        if offload:
            (copied,) = {bucket.shards.nbytes for bucket in buckets}
            assert "compute" not in streams_of_blocks(recorder, copied)
    finally:
        dist.destroy_process_group()
