"""A model that nobody holds any more is freed, whatever was done with it before.

Hooks lead from tensors to units and back, partly through memory of C++, where the garbage
collector of Python does not look. One reference of that kind, and every model that ever ran stays.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed
from models import LORA, MLP, NESTED, TRANSFORMER, Case
from reference import shard_case


def step(case: Case, model: nn.Module) -> None:
    case.loss(model, *case.batch(0, 0, torch.float32)).backward()


def forward_only(case: Case, model: nn.Module) -> None:
    case.loss(model, *case.batch(0, 0, torch.float32))


def evaluate(case: Case, model: nn.Module) -> None:
    with torch.no_grad():
        forward_only(case, model)


def train(case: Case, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        step(case, model)
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accumulate(case: Case, model: nn.Module) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    step(case, model)


def fail(case: Case, model: nn.Module) -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    handle = next(iter(model.children())).register_forward_pre_hook(stop)
    with contextlib.suppress(Stop):
        step(case, model)
    handle.remove()


def copied(case: Case, model: nn.Module) -> None:
    step(case, model)
    step(case, copy.deepcopy(model))


def profiled(case: Case, model: nn.Module) -> None:
    with fsdp2.profile(model):
        step(case, model)


def watched(case: Case, model: nn.Module) -> None:
    with fsdp2.watch_ranks(model):
        step(case, model)


def called_with_others(case: Case, model: nn.Module) -> None:
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, case.batch(0, 0, torch.float32)[:1])


def recomputed(case: Case, model: nn.Module) -> None:
    (x,) = case.batch(0, 0, torch.float32)
    checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()


def prefetched(case: Case, model: nn.Module) -> None:
    first, second = [m for m in model.children() if isinstance(m, FSDPModule)][:2]
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    step(case, model)


def used_otherwise(case: Case, model: nn.Module) -> None:
    assert isinstance(model, FSDPModule)
    model.unshard()
    model.reshard()
    model.load_state_dict(model.state_dict())
    model.double().float()
    step(case, model)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
USES: dict[str, tuple[Case, Callable[[Case, nn.Module], None], dict[str, Any]]] = {
    "not at all": (MLP, lambda case, model: None, {}),
    "forward": (MLP, forward_only, {}),
    "forward of tokens": (TRANSFORMER, forward_only, {}),
    "evaluation": (TRANSFORMER, evaluate, {}),
    "backward": (MLP, step, {}),
    "training": (TRANSFORMER, train, {}),
    "training, kept gathered": (TRANSFORMER, train, {"reshard_after_forward": False}),
    "training, larger shards": (TRANSFORMER, train, {"reshard_after_forward": 2}),
    "training, bf16": (TRANSFORMER, train, {"mp_policy": BF16}),
    "training, offloaded": (TRANSFORMER, train, {"offload_policy": CPUOffloadPolicy()}),
    "nested": (NESTED, train, {}),
    "frozen": (LORA, train, {}),
    "accumulation": (TRANSFORMER, accumulate, {}),
    "a failure": (MLP, fail, {}),
    "a copy": (TRANSFORMER, copied, {}),
    "a profile": (TRANSFORMER, profiled, {}),
    "watched": (TRANSFORMER, watched, {}),
    "other parameters": (MLP, called_with_others, {}),
    "recomputation": (MLP, recomputed, {}),
    "prefetch": (MLP, prefetched, {}),
    "moves": (MLP, used_otherwise, {}),
}


@pytest.mark.parametrize("use", USES)
@distributed(4)
def test_a_model_is_freed(use: str) -> None:
    case, act, options = USES[use]
    mesh = cached_mesh(4)
    model = shard_case(case, case.build(), mesh=mesh, **options)
    act(case, model)
    units = [vars(m)["_fsdp2_unit"] for m in model.modules() if isinstance(m, FSDPModule)]
    left = {
        "model": weakref.ref(model),
        **{f"unit {i}": weakref.ref(unit) for i, unit in enumerate(units)},
        **{f"parameter {name}": weakref.ref(p) for name, p in model.named_parameters()},
        **{
            f"gathered {param.fqn}": weakref.ref(param.unsharded)
            for unit in units
            for param in unit.params
            if param.unsharded is not None
        },
    }
    del model, units
    gc.collect()
    assert not [name for name, there in left.items() if there() is not None]


@distributed(2)
def test_replicated_units_are_freed() -> None:
    mesh = cached_mesh(2)
    model = TRANSFORMER.build()
    fsdp2.replicate(next(m for m in TRANSFORMER.units(model)), mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(TRANSFORMER, model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
