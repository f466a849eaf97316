"""Models that are made, used and dropped, each kind in another way."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import (
    CommPolicy,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    optim,
)
from fsdp2.checkpoint import Checkpointer, MemorySnapshots, load_model, save_model
from harness import cached_mesh, shared_folder
from models import LORA, MLP, NESTED, TRANSFORMER, Case
from reference import shard_case

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Optimize = Callable[[Any], torch.optim.Optimizer]


def mesh_of(kind: str = "1-D") -> Any:
    size = dist.get_world_size()
    if kind == "HSDP":
        return cached_mesh(2, size // 2, names=("replicate", "shard"))
    return cached_mesh(size)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, number: int = 0
) -> None:
    case.loss(model, *case.batch(number, dist.get_rank(), torch.float32)).backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def train(
    case: Case = TRANSFORMER, optimize: Optimize = adamw, mesh: str = "1-D", **options: Any
) -> nn.Module:
    """Two steps."""
    model = shard_case(case, case.build(), mesh=mesh_of(mesh), **options)
    optimizer = optimize([p for p in model.parameters() if p.requires_grad])
    for number in range(2):
        step(case, model, optimizer, number)
    return model


def muon() -> None:
    def optimize(parameters: list[Any]) -> torch.optim.Optimizer:
        return optim.Muon([p for p in parameters if p.ndim == 2])

    train(MLP, optimize)


def kept_gathered() -> None:
    model: Any = train(LORA)
    model.set_keep_frozen_gathered(10**6)
    step(LORA, model)


def checkpoints() -> None:
    model = train()
    optimizer = adamw(model.parameters())
    step(TRANSFORMER, model, optimizer)
    with shared_folder() as folder:
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, model=model, optimizer=optimizer)
            step(TRANSFORMER, model, optimizer)
            checkpointer.save(2, model=model, optimizer=optimizer).wait()
            checkpointer.load("latest", model=model, optimizer=optimizer)
        save_model(model, f"{folder}/model").wait()
        load_model(model, f"{folder}/model")


def snapshots() -> None:
    model = train(MLP)
    optimizer = adamw(model.parameters())
    with shared_folder() as folder:
        host = f"host{dist.get_rank()}"
        os.mkdir(f"{folder}/{host}")
        taken = MemorySnapshots("soak", every=1, directory=f"{folder}/{host}", host=host)
        for number in (1, 2):
            step(MLP, model, optimizer)
            taken.after_step(number, model=model, optimizer=optimizer)
            assert taken.wait(60)
        taken.close()


def state_dicts() -> None:
    model = train(NESTED)
    whole = fsdp2.full_state_dict(model)
    fsdp2.load_full_state_dict(model, whole)
    model.load_state_dict(model.state_dict())


def merged() -> None:
    model = train(mesh="1-D")
    fsdp2.merge_units(model, min_bytes=5000)
    step(TRANSFORMER, model)


def rewired() -> None:
    """Settings that make a unit plan its buckets anew."""
    model: Any = train(comm_policy=CommPolicy(gather=torch.int8, reduce=torch.int8))
    model.set_comm_policy(CommPolicy(reduce=torch.bfloat16, error_feedback=True))
    step(TRANSFORMER, model)
    model.set_comm_policy(None)
    model.double().float()
    step(TRANSFORMER, model)


def observed() -> None:
    model = train(MLP)
    with fsdp2.profile(model) as profile:
        step(MLP, model)
    assert str(profile)
    assert str(fsdp2.explain(model))
    fsdp2.check_ranks_agree(model)
    with fsdp2.watch_ranks(model), fsdp2.watch_hangs(model, after_s=60):
        step(MLP, model)


def estimated() -> None:
    """Traced on fake tensors."""
    (x,) = MLP.batch(0, 0, torch.float32)
    assert str(
        fsdp2.estimate(fsdp2.planning.Workload(MLP.build(), x), fsdp2.planning.Sharding(), 8)
    )


def interrupted() -> None:
    """By exceptions in forward and in backward, the last time for good."""
    model = train(MLP)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    inner: Any = list(model.children())[-1]
    for register in (
        inner.register_forward_pre_hook,
        inner.register_full_backward_pre_hook,
        inner.register_forward_hook,
    ):
        handle = register(stop)
        try:
            step(MLP, model)
        except KeyboardInterrupt:
            handle.remove()
        else:
            raise AssertionError("the hook did not run")


def copied() -> None:
    model = train()
    other = copy.deepcopy(model)
    step(TRANSFORMER, other, adamw(other.parameters()))


def called_with_others() -> None:
    model = train(MLP)
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, MLP.batch(0, 0, torch.float32)[:1])


def recomputed() -> None:
    model = train(MLP)
    (x,) = MLP.batch(0, 0, torch.float32)
    result = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    assert isinstance(result, Tensor)
    result.sum().backward()


def compiled() -> None:
    model = train(MLP)
    for module in model.children():
        module.compile(backend="eager")
    step(MLP, model)
    torch._dynamo.reset()  # torch keeps graphs, with what they refer to


def left_in_the_middle() -> None:
    """A forward without backward, gradients that are not reduced, units that stay gathered."""
    model: Any = train(MLP)
    model.set_requires_gradient_sync(False)
    step_only = MLP.loss(model, *MLP.batch(0, dist.get_rank(), torch.float32))
    step_only.backward()
    model.unshard()
    MLP.loss(model, *MLP.batch(0, dist.get_rank(), torch.float32))


def of_an_own_class() -> None:
    """A class that is made with the model, and so is an optimizer's."""

    class Own(nn.Linear):
        pass

    class OwnAdamW(torch.optim.AdamW):
        pass

    model: Any = nn.Sequential(Own(3, 5), Own(5, 3))
    fully_shard(model[0], mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())
    optimizer = optim.local_step(OwnAdamW(model.parameters()))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def on_meta() -> None:
    with torch.device("meta"):
        model = MLP.build()
    model = shard_case(MLP, model, mesh=mesh_of())
    fsdp2.materialize(model)
    step(MLP, model)


def by_strategy() -> None:
    model = fsdp2.shard_model(TRANSFORMER.build(), strategy="full", mesh=mesh_of())
    step(TRANSFORMER, model, adamw(model.parameters()))


def replicated() -> None:
    model = fsdp2.replicate(MLP.build(), mesh=mesh_of())
    step(MLP, model)


def by_hand() -> None:
    """Prefetching, methods that run a forward, and gathers by the user."""
    model: Any = train(MLP)
    first, second = [m for m in model.children() if isinstance(m, FSDPModule)][:2]
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    fsdp2.register_fsdp_forward_method(model, "extra_repr")
    step(MLP, model)
    model.unshard(async_op=True).wait()
    model.reshard()


RECIPES: dict[str, Callable[[], Any]] = {
    "AdamW": train,
    "flat_step": lambda: train(optimize=lambda p: optim.flat_step(adamw(p))),
    "local_step": lambda: train(optimize=lambda p: optim.local_step(adamw(p))),
    "whole_step": lambda: train(MLP, lambda p: optim.whole_step(adamw(p))),
    "Muon": muon,
    "bf16": lambda: train(mp_policy=BF16),
    "HSDP": lambda: train(mesh="HSDP"),
    "kept gathered": lambda: train(reshard_after_forward=False),
    "larger shards": lambda: train(reshard_after_forward=2),
    "offloaded": lambda: train(offload_policy=CPUOffloadPolicy()),
    "frozen, kept gathered": kept_gathered,
    "fewer bytes": rewired,
    "merged": merged,
    "checkpoints": checkpoints,
    "snapshots": snapshots,
    "state dicts": state_dicts,
    "observed": observed,
    "estimated": estimated,
    "interrupted": interrupted,
    "copied": copied,
    "functional_call": called_with_others,
    "recomputed": recomputed,
    "compiled": compiled,
    "left in the middle": left_in_the_middle,
    "an own class": of_an_own_class,
    "meta": on_meta,
    "by strategy": by_strategy,
    "replicated": replicated,
    "by hand": by_hand,
}


def make_and_drop(names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            try:
                RECIPES[name]()
            except BaseException as error:
                error.add_note(f"of {name!r}")
                raise
