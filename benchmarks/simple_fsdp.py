"""SimpleFSDP, written after its paper (arXiv 2411.00284), to compare with.

Parameters are DTensors sharded on dim-0. Reading one gathers it: it is redistributed to all ranks,
so that autograd makes the reduce-scatter of its gradient. Backward gathers it again, by selective
checkpointing of that redistribution. `torch.compile` of the whole model makes graphs of forward and
backward in which all collectives are nodes.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard every parameter of ``model`` in place over the 1-D ``mesh``; gradients are means."""
    for module in model.modules():
        names = [name for name, param in module._parameters.items() if param is not None]
        for name in names:
            sharded = distribute_tensor(module._parameters[name].detach(), mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(sharded)
        if names:
            module.__class__ = _class_that_gathers(type(module), tuple(names))
    return model


@cache
def _class_that_gathers(of: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    reads: dict[str, Any] = {name: property(partial(_read, name=name)) for name in names}
    return type(f"Gathering{of.__name__}", (of,), reads)


def _read(module: nn.Module, name: str) -> Tensor:
    param = module._parameters[name]
    contexts = partial(create_selective_checkpoint_contexts, _recompute)
    return checkpoint(_gathered, param, use_reentrant=False, context_fn=contexts)


def _gathered(param: DTensor) -> Tensor:
    return param.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _recompute(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator.namespace == "_c10d_functional":
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def compiled(model: nn.Module, backend: str) -> Any:
    """``model`` as one graph for forward and one for backward."""
    return torch.compile(model, backend=backend, fullgraph=True)
