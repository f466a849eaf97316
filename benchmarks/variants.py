"""What is compared: one way of training a model per name, built from the same initial weights.

Only public API of each library is used, so that a variant is what a user would write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp2

from .models import Bf16Compute, Block

BASELINE = "torch FSDP2"
BEST_BASELINE = "torch FSDP2, best settings"
OURS = "fsdp2"
VARIANTS = ("plain", "DDP", "FSDP1", BASELINE, BEST_BASELINE, OURS)


@dataclass
class Variant:
    """A model ready to train.

    Attributes:
        name: One of `VARIANTS`.
        model: What the training loop calls.
        sharded: Whether a `.grad` holds this rank's part of a gradient, not all of it.
        averages: Whether backward averages gradients over the ranks.
    """

    name: str
    model: nn.Module
    sharded: bool
    averages: bool

    def local_parameters(self) -> list[Tensor]:
        """This rank's part of every parameter, as it is between steps."""
        return [local_part(p.detach()) for p in self.model.parameters()]

    def local_gradients(self) -> list[Tensor]:
        """This rank's part of every gradient there is."""
        return [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]


def local_part(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(name: str, make_model: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool) -> Variant:
    """Makes the variant `name` of the model that `make_model` returns.

    Args:
        name: One of `VARIANTS`.
        make_model: Makes the model on the CPU in fp32; the same weights at every call.
        mesh: 1-D mesh of the ranks.
        bf16: Compute in bf16, keep parameters and reduce gradients in fp32.
    """
    model = make_model()
    if name in ("plain", "DDP"):
        model = Bf16Compute(model) if bf16 else model
        if name == "DDP":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Variant(name, model, sharded=False, averages=name == "DDP")
    if name == "FSDP1":
        model = build_fsdp1(model, bf16)
    elif name == OURS:
        policy = mixed_precision(fsdp2.MixedPrecisionPolicy, bf16)
        shard_units(fsdp2.fully_shard, model, mesh, policy)
    elif name in (BASELINE, BEST_BASELINE):
        policy = mixed_precision(torch_fsdp.MixedPrecisionPolicy, bf16)
        shard_units(torch_fsdp.fully_shard, model, mesh, policy)
        if name == BEST_BASELINE:
            use_best_settings(model)
    else:
        raise ValueError(f"no variant {name!r}; there are {', '.join(VARIANTS)}")
    return Variant(name, model, sharded=True, averages=True)


def mixed_precision(policy: Callable[..., object], bf16: bool) -> object:
    """The policy object of one library for the chosen precision."""
    if not bf16:
        return policy()
    return policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard_units(
    fully_shard: Callable[..., object], model: nn.Module, mesh: DeviceMesh, policy: object
) -> None:
    """Shards every block as a unit, then the rest of the model as the root unit."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build_fsdp1(model: nn.Module, bf16: bool) -> nn.Module:
    """Wraps with FSDP1, a unit per block."""
    policy = None
    if bf16:
        policy = torch_fsdp.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
        )
    with warnings.catch_warnings():
        # It warns that it is deprecated and slow without an accelerator; both are known here.
        warnings.simplefilter("ignore")
        return torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=policy,
            device_id=torch.device("cpu"),
        )


def use_best_settings(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (Block,)) -> None:
    """Turns on what torch's FSDP2 offers for speed and this version of torch has.

    Args:
        model: its root unit.
        kinds: classes of its other units, which run in the order of the modules.
    """
    assert isinstance(model, torch_fsdp.FSDPModule)
    blocks: list[Any] = [m for m in model.modules() if isinstance(m, kinds)]
    units: list[Any] = [model, *blocks]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    backward_units = [model, *reversed(blocks)]
    for unit, following in pairwise(backward_units):
        unit.set_modules_to_backward_prefetch([following])
    wrappers = [m for m in model.modules() if isinstance(m, CheckpointWrapper)]
    recomputed = {module for wrapper in wrappers for module in wrapper.modules()}
    for unit in units:
        # As fsdp2 does by itself. A recomputation reads the weight: where it does not stop before
        # it does, torch's FSDP2 raises with this setting.
        if isinstance(unit, nn.Embedding) and unit not in recomputed:
            unit.set_unshard_in_backward(False)
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):
        model.set_reduce_scatter_max_input_buffers(2)


def average_gradients(variant: Variant, group: dist.ProcessGroup | None = None) -> None:
    """Averages the gradients of a replicated model that does not communicate by itself.

    Args:
        variant: Any; nothing happens where backward averages.
        group: The ranks to average over; None: all.
    """
    if variant.averages:
        return
    for gradient in variant.local_gradients():
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
    dist.barrier()  # until its next task, gloo's thread may hold on to the last gradient


def gradient_norm(variant: Variant) -> float:
    """The 2-norm of all gradients together, the same number on every rank."""
    norms = [g.double().square().sum() for g in variant.local_gradients()]
    total = torch.stack(norms).sum()
    if variant.sharded:
        dist.all_reduce(total)
    return total.sqrt().item()
