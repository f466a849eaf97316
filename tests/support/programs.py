"""Random training programs, run by a sharded model and by the plain one beside it."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    replicate,
)
from harness import cached_mesh
from program_operations import Run
from program_pair import Operation
from random_models import Layer, Node, build, nodes
from reference import (
    TOLERANCE,
    assert_all_same,
    assert_same_parameters,
    buffers,
)

# With a `CommPolicy`, for what comes to nearly nothing in a sum, too: it shows what is lost. (In
# three of 2,000 programs, what bfloat16 gathers round off came to over a quarter.)
NARROW = 0.5


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, how it is sharded, and what is done with it."""

    model: Layer
    world_size: int
    replicas: int
    options: dict[str, Any]
    placement: str
    operations: tuple[Operation, ...]
    first: tuple[str, str] = ("sgd", "plain")  # the optimizer before the first forward
    shards: int = 1  # into how many parts a mesh of three dims cuts the shards
    deterministic: bool = False  # new memory is filled with NaN then
    on_meta: bool = False  # the model has no memory when it is sharded


def run(program: Program) -> None:
    """The body of the test, on every rank."""
    torch.manual_seed(0)
    plain = build(program.model)
    tolerances: dict[torch.dtype, float] = {}
    if any(p.dtype == torch.float32 for p in plain.parameters()):
        tolerances = dict.fromkeys(TOLERANCE, 1e-4)  # of sums over ranks, which reaches the rest
    if program.options.get("mp_policy", MixedPrecisionPolicy()) != MixedPrecisionPolicy():
        tolerances = dict.fromkeys(TOLERANCE, 1e-3)
    if program.options.get("comm_policy") is not None:
        tolerances = dict.fromkeys(TOLERANCE, NARROW)
    with mock.patch.dict(TOLERANCE, tolerances), mock.patch.dict(os.environ):
        if program.deterministic:
            fsdp2.deterministic()
        go_through(program, plain)


def go_through(program: Program, plain: Node) -> None:
    policy = program.options.get("comm_policy")
    model = on_meta(program, plain) if program.on_meta else shard(program, copy.deepcopy(plain))
    this = Run(model, plain, program.first, has_comm_policy=policy is not None)
    for number, (name, *arguments) in enumerate(program.operations):
        try:
            getattr(this, name)(*arguments)
        except BaseException as error:
            error.add_note(f"in operation {number}: {name}{tuple(arguments)}")
            raise
    this.step("reduce")
    with this.sharded_shown():
        assert_same_parameters(this.model, this.plain)
        assert_all_same(buffers(this.model), buffers(this.plain), "buffer")
        assert_equal_replicas(this.model)


@torch.no_grad()
def _zeros(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()


def on_meta(program: Program, plain: Node) -> Node:
    """A model that gets memory and weights once it is sharded."""
    with torch.device("meta"):
        model = shard(program, build(program.model))
    fsdp2.materialize(model, init=_zeros)
    fsdp2.load_full_state_dict(model, plain.state_dict())
    return model


def assert_equal_replicas(model: nn.Module) -> None:
    """What every rank holds whole has the same bits on all of them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if all(isinstance(placement, Replicate) for placement in parameter.placements):
            own = parameter.to_local().detach().contiguous()
            found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(found, own)
            assert all(torch.equal(each, own) for each in found), name


# ------------------------------------------------------------------------------- sharding


def shard(program: Program, model: Node) -> Node:
    shape = (program.replicas, program.world_size // program.replicas)
    if program.replicas > 1:
        mesh = cached_mesh(*shape, names=("replicate", "shard"))
    else:
        mesh = cached_mesh(program.world_size)
    over: dict[str, Any] = {"mesh": mesh}
    whole_over = over
    if program.shards > 1:
        names = ("replicate", "outer", "inner")
        mesh = cached_mesh(shape[0], program.shards, shape[1] // program.shards, names=names)
        dims = DataParallelMeshDims(names[1:], names[0] if program.replicas > 1 else None)
        over = {"mesh": mesh, "dp_mesh_dims": dims}
        whole_over = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate=names)}
    options = {**over, **program.options}
    # Only the root's output goes to a loss: what others return is computed with in their dtype.
    inner = dict(options)
    if "mp_policy" in options:
        inner["mp_policy"] = dataclasses.replace(options["mp_policy"], output_dtype=None)
        whole_over = {**whole_over, "mp_policy": inner["mp_policy"]}

    def place(parameter: nn.Parameter) -> Any:
        if program.placement == "last dim" and parameter.ndim > 1:
            return Shard(parameter.ndim - 1)
        if program.placement == "small whole" and parameter.numel() < 10:
            return Replicate()
        return None

    # A module that several units contain needs a unit of its own.
    holders = Counter(id(node.own) for node in [*nodes(model), model])
    for node in nodes(model):
        if holders[id(node.own)] > 1 and not isinstance(node.own, FSDPModule):
            fully_shard(node.own, shard_placement_fn=place, **inner)
    for node in [*nodes(model), model]:
        if node.own.kind == "table" and node.layer.unit not in ("", "replicated"):
            fully_shard(node.own.table, shard_placement_fn=place, **inner)
    done: set[Node] = set()
    for group in groups(model):
        if done.intersection(group):
            continue
        done.update(group)
        layer = group[0].layer
        if layer.unit == "replicated":
            replicate(group[0], **whole_over)
            continue
        reshard = layer.reshard
        if type(reshard) is int and shape[1] % reshard:
            reshard = True
        target = group[0] if len(group) == 1 else group
        fully_shard(target, reshard_after_forward=reshard, shard_placement_fn=place, **inner)
    sharded = fully_shard(model, shard_placement_fn=place, **options)
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    for node in [*nodes(model), model]:
        if isinstance(node, FSDPModule) and policy.cast_forward_inputs:
            node.input_dtype = policy.param_dtype
    return sharded


def groups(model: Node) -> Iterator[list[Node]]:
    """The nodes that become units, inner ones first; those of one unit together."""
    for node in [*nodes(model), model]:
        siblings = list(node.parts())
        for number, part in enumerate(siblings):
            if part.layer.unit == "with the next":
                yield siblings[number : number + 2]
            elif part.layer.unit:
                yield [part]
