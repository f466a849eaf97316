"""torch.distributed.checkpoint beside it: its ``.metadata``, and what its ranks tell one of them.

- DCP save: what the coordinator does alone. It gathers the plans of all ranks, makes a global plan
  of them, sends each rank its own, and writes ``.metadata``.
- DCP load: what every rank does: it reads all of ``.metadata`` and plans what it needs; the
  coordinator gathers these plans, too.

One rank plans for real, as a rank of a `fake` group of n, and its plan is moved to the rows of the
others. What is gathered is the size of that one pickled plan, times n: by arithmetic.
"""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2.dtensor.boxes import split_evenly

from .counting import counting, isolated
from .curves import Counted, Curves
from .synthesis import build, give_state, rank_of

OF_A_TENSOR = 1600  # bytes of a file of `torch.save` besides the tensor's


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a program passes to ``dcp.save`` and ``dcp.load``."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def plan_of(state: dict[str, Any]) -> SavePlan:
    """The plan that this rank sends to the coordinator in a save."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, dist.get_rank() == 0)
    return planner.create_local_plan()


def moved(plan: SavePlan, rank: int, n: int) -> SavePlan:
    """What another rank would have planned."""
    return replace(plan, items=[_moved(item, rank, n) for item in plan.items])


def _moved(item: WriteItem, rank: int, n: int) -> WriteItem:
    if item.type != WriteItemType.SHARD:
        return item
    tensor = item.tensor_data
    assert tensor is not None
    start, num = split_evenly(tensor.size[0], n, rank)
    offsets = torch.Size([start, *tensor.chunk.offsets[1:]])
    chunk = ChunkStorageMetadata(offsets, torch.Size([num, *tensor.chunk.sizes[1:]]))
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, offsets),
        tensor_data=replace(tensor, chunk=chunk),
    )


def results_of_all(plans: list[SavePlan]) -> list[list[WriteResult]]:
    """What the ranks report after they wrote what the global plan told them to."""
    return [_written_by(plan, rank) for rank, plan in enumerate(plans)]


def _written_by(plan: SavePlan, rank: int) -> list[WriteResult]:
    results, end, file = [], 0, f"__{rank}_0.distcp"
    for item in plan.items:
        length = OF_A_TENSOR
        if item.tensor_data is not None:
            tensor = item.tensor_data
            length += tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize
        # A copy, as gathered: a pickle writes each of these names, and not once for all ranks.
        index = replace(item.index, fqn=item.index.fqn.encode().decode())
        results.append(WriteResult(index, length, _StorageInfo(file, end, length)))
        end += length
    return results


def plans_of_all(own: SavePlan, n: int) -> list[SavePlan]:
    """What the coordinator gathers, if this rank's plan is ``own``."""
    other = pickle.loads(pickle.dumps(own))  # with names of its own, as after the gather
    return [moved(other if rank else own, rank, n) for rank in range(n)]


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """What the coordinator makes of it."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, True)
    return planner.create_global_plan(plans)


def write_metadata(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """What the coordinator does when all ranks have reported."""
    folder.mkdir(exist_ok=True)
    FileSystemWriter(folder).finish(metadata, results)


@lru_cache
def measured(n: int, tensors: int) -> dict[str, Counted]:
    """Both counts of one point: what the load reads, the save has written."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-scale-") as folder:
        saved = isolated(_save, Path(folder), n, tensors)
        return {"save": saved, "load": isolated(_load, Path(folder), n, tensors)}


def _save(folder: Path, n: int, tensors: int) -> Counted:
    counted: Counted = {}
    with rank_of(n, n // 2):
        model, optimizer = build(tensors)
        give_state(model, optimizer)
        own = plan_of(state_of(model, optimizer))
    plans = plans_of_all(own, n)
    planning: Counted = {}
    with counting(planning):
        plans, metadata = global_plan(plans)
    results = results_of_all(plans)
    with counting(counted):
        write_metadata(folder, metadata, results)
    counted["cpu s of the global plan"] = planning["cpu s"]
    return counted | _gathered(own, n)


def _load(folder: Path, n: int, tensors: int) -> Counted:
    counted: Counted = {}
    with rank_of(n, n // 2):
        model, optimizer = build(tensors)
        give_state(model, optimizer)
        state = state_of(model, optimizer)
        reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
        with counting(counted):
            metadata = reader.read_metadata()
            planner.set_up_planner(state, metadata, False)
            reader.set_up_storage_reader(metadata, False)
            plan = planner.create_local_plan()
    assert {item.storage_index.fqn for item in plan.items} == metadata.state_dict_metadata.keys()
    counted["bytes read, all ranks"] = n * counted["bytes read"]
    return counted | _gathered(plan, n)


def _gathered(plan: object, n: int) -> Counted:
    size = len(pickle.dumps(plan))
    return {"bytes of one rank's plan": size, "bytes gathered on one rank": n * size}


def _point(which: str, n: int, tensors: int = 30) -> Counted:
    return measured(n, tensors)[which]


CURVES: Curves = {"DCP save": partial(_point, "save"), "DCP load": partial(_point, "load")}
