"""The kernel without its optional parts, without each of them, and with any two at work.

Three steps each, on two ranks, bit for bit those of the plain model: parts meet in the kernel
alone, so a pair that works together in one order of events has to do so in all.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import SGD, Optimizer

import fsdp2
import harness
from fsdp2 import CPUOffloadPolicy
from harness import distributed, ours_only
from models import TRANSFORMER
from reference import (
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    run_both,
    shard_case,
)

pytestmark = ours_only("parts of this package")

# A power of two: neither a fused multiplication nor another order rounds otherwise.
LR = 0.0625
STEPS = 3


def registry() -> Any:
    from fsdp2.runtime.events import registry  # torch's shim has none

    return registry


def name_of(part: Any) -> str:
    return getattr(part, "__qualname__", None) or type(part).__name__


def registries() -> list[list[Any]]:
    """Where parts of the library are registered."""
    from fsdp2.api import fully_shard
    from fsdp2.comm import mesh_transports
    from fsdp2.runtime import hooks, param_group, reduction, registration, torch_modes
    from fsdp2.sharding import param

    return [
        *(registry().unit_parts, registry().tree_parts, hooks.UnitHooks.kinds),
        *(registration.write_guards, registration.lenders, reduction.result_hooks),
        *(param_group.own_buckets, param.carriers, param.annotation_readers),
        *(hooks.UnitHooks.input_followers, hooks.marks_in_transforms),
        *(mesh_transports.wrappers, mesh_transports._reduce_groups, mesh_transports.resharders),
        *(fully_shard.class_adapters, torch_modes.function_modes),
    ]


def all_parts() -> list[Any]:
    return [part for parts in registries() for part in parts]


@contextmanager
def with_parts(parts: Sequence[Any]) -> Iterator[None]:
    """These parts, and no others, hear of models that are sharded inside."""
    from fsdp2.runtime.events import UnitEvents

    before = [list(registered) for registered in registries()]

    def register(chosen: Sequence[Sequence[Any]]) -> None:
        for registered, of_kind in zip(registries(), chosen, strict=True):
            registered[:] = of_kind
        registry().on = UnitEvents(registry().unit_parts)

    register([[part for part in registered if part in parts] for registered in before])
    try:
        yield
    finally:
        register(before)


class Setting:
    """What turns one part on, in a model and in a step."""

    def __init__(
        self,
        model: Callable[[Any], None] = lambda model: None,
        *,
        optimizer: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
        end_step: Callable[[Any], None] = lambda model: None,
        **options: Any,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.end_step, self.options = end_step, options


SETTINGS = {
    "a limit on gathered bytes": Setting(lambda model: model.set_max_gathered_bytes(100_000)),
    "frozen parameters stay gathered": Setting(lambda model: model.set_keep_frozen_gathered()),
    "the caller ends iterations": Setting(
        lambda model: model.set_manual_backward_finalization(True),
        end_step=lambda model: model.finalize_backward(),
    ),
    "steps in backward": Setting(optimizer=fsdp2.optim.step_in_backward),
    "flat steps": Setting(optimizer=fsdp2.optim.flat_step),
    "merged units": Setting(lambda model: fsdp2.merge_units(model, min_bytes=10_000)),
    "offloaded shards": Setting(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "gathered memory stays": Setting(lambda model: model.set_keep_unsharded_storage(True)),
    "unused parameters as zeros": Setting(
        lambda model: model.set_reduce_scatter_unused_params(True)
    ),
    "units stay gathered after forward": Setting(reshard_after_forward=False),
}
EXCLUDE_EACH_OTHER = {
    frozenset(("a limit on gathered bytes", "gathered memory stays")),
    frozenset(("steps in backward", "flat steps")),
}


def train(settings: Sequence[Setting] = ()) -> None:
    """Three steps of two micro-batches beside the plain model."""
    torch.manual_seed(0)
    plain = TRANSFORMER.build().double()
    TRANSFORMER.units(plain)[0].requires_grad_(False)
    options = {key: value for each in settings for key, value in each.options.items()}
    with mock.patch("fsdp2.sharding.gathered.OWN_PIECE_MIN_BYTES", 64):
        model: Any = shard_case(TRANSFORMER, copy.deepcopy(plain), **options)
        for setting in settings:
            setting.model(model)
        optimizer: Optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        for setting in settings:
            optimizer = setting.optimizer(optimizer)
        right = SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)
        for step in range(STEPS):
            run_both(TRANSFORMER, model, plain, step, bitwise_loss=True)
            for setting in settings:
                setting.end_step(model)
            assert_sharded(model)
            stepped = any(s.optimizer is fsdp2.optim.step_in_backward for s in settings)
            if not stepped:  # else gradients may be those of parameters that have moved on
                assert_same_gradients(model, plain, bitwise=True)
            for each in (optimizer, right):
                each.step()
                each.zero_grad()
            assert_same_parameters(model, plain, bitwise=True)


def test_the_kernel_trains_alone(tmp_path: Path) -> None:
    """No file of a part is imported."""
    support = Path(__file__).parents[1] / "support"
    paths = [str(support.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(support / "bare_kernel.py"), str(tmp_path)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=harness.JOB_TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stderr


@distributed(2)
def test_the_kernel_trains_without_any_part() -> None:
    with with_parts(()):
        train()


@distributed(2)
def test_the_kernel_trains_without_each_part() -> None:
    for part in all_parts():
        with with_parts([other for other in all_parts() if other is not part]):
            try:
                train()
            except Exception as error:
                error.add_note(f"without {name_of(part)}")
                raise


@distributed(4)
def test_what_needs_a_part_that_is_not_registered_says_so() -> None:
    with with_parts(()):
        plain = TRANSFORMER.build()
        before = dict(plain.named_parameters())
        with pytest.raises(
            ValueError, match=r"reshard_after_forward=2 .*features/secondary_shards\.py"
        ):
            shard_case(TRANSFORMER, plain, reshard_after_forward=2)
        assert all(param is before[name] for name, param in plain.named_parameters())


@pytest.mark.parametrize("first", list(SETTINGS)[:-1])
@distributed(2)
def test_any_two_parts_work_together(first: str) -> None:
    for pair in combinations(SETTINGS, 2):
        if pair[0] == first and frozenset(pair) not in EXCLUDE_EACH_OTHER:
            try:
                train([SETTINGS[name] for name in pair])
            except Exception as error:
                error.add_note(" and ".join(pair))
                raise


# By method: the part that it belongs to, and arguments. The others set what the kernel does.
METHODS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "set_custom_all_gather": ("transports.custom", (None,)),
    "set_custom_reduce_scatter": ("transports.custom", (None,)),
    "set_allocate_memory_from_process_group_for_comm": ("transports.custom", (True,)),
    "set_symm_mem_for_comm": ("transports.custom", ()),
    "set_comm_policy": ("transports.compressed.transports", (None,)),
    "set_max_gathered_bytes": ("features.gather_budget", (100_000,)),
    "set_keep_frozen_gathered": ("features.frozen_cache", ()),
    "set_manual_backward_finalization": ("features.finalization", (True,)),
    "finalize_backward": ("features.finalization", ()),
    "set_reduce_scatter_unused_params": ("features.unused_parameters", (True,)),
}
OF_KERNEL = {
    "set_all_reduce_hook",
    "load_state_dict",  # with a hint in its errors
    "no_sync",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
}


@distributed(1, 2)
def test_a_method_says_which_part_it_needs_that_is_not_registered() -> None:
    """It would do nothing."""
    from fsdp2.parts import PartMethods

    names = {name for name in vars(PartMethods) if not name.startswith("_")}
    assert names == METHODS.keys() | OF_KERNEL
    with with_parts(()):
        model: Any = shard_case(TRANSFORMER, TRANSFORMER.build())
        for name, (part, arguments) in METHODS.items():
            with pytest.raises(RuntimeError, match=rf"^{name} needs the part fsdp2\.{part}, which"):
                getattr(model, name)(*arguments)
        optimizer = fsdp2.optim.step_in_backward(SGD(model.parameters(), lr=LR))
        with pytest.raises(RuntimeError, match=r"^step_in_backward needs the part fsdp2\.features"):
            optimizer.step()


def test_parts_hear_in_the_order_of_their_list() -> None:
    """Whatever was imported first."""
    from fsdp2.parts import PARTS

    place = {module.__name__: i for i, module in enumerate(PARTS)}
    for parts in (registry().unit_parts, registry().tree_parts):
        places = [place[(p if isinstance(p, type) else type(p)).__module__] for p in parts]
        assert places == sorted(places)
