"""Modules in the middle of a merged unit, which skip hooks, in programs that change.

Each program runs on units of one module, which have all hooks, and on merged ones: first steps like
any others, after which hooks are skipped, then steps that differ, then one as at first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, merge_units
from fsdp2.features.middle import Middle
from fsdp2.runtime import runtime as runtime_file
from fsdp2.runtime.unit import unit_of
from gathers import bytes_held, counting
from harness import cached_mesh, distributed, ours_only
from merged_chain import NUM, build, outputs, plain
from merged_programs import (
    PROGRAMS,
    UNFIT,
    going_on,
    loss_of_the_middle,
    losses_of_the_middle_and_of_the_end,
    recomputed,
)

pytestmark = ours_only("torch does not merge units")


def train(model: Any, program: Callable[[Any, Tensor], list[Tensor]]) -> list[Tensor]:
    """Results of steps, and this rank's gradients and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step, run in enumerate((plain, plain, program, program, plain)):
        torch.manual_seed(100 * step + dist.get_rank())
        found += [each.detach() for each in run(model, torch.randn(4, 6, dtype=torch.float64))]
        for unit in model._units(True):
            assert unit.step.running == 0
            assert unit.runtime.schedule.root is None
        params = [param for param in model.parameters() if param.requires_grad]
        grads = [param.grad for param in params if param.grad is not None]
        if run is plain:
            assert len(grads) == len(params)
        found += [grad.to_local().clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
        found += [param.detach().to_local().clone() for param in params]
    return found


def check(name: str, **options: Any) -> None:
    expected = train(build(merged=False, **options), PROGRAMS[name])
    found = train(build(merged=True, **options), PROGRAMS[name])
    assert len(found) == len(expected), name
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            one, other, rtol=1e-9, atol=1e-12, msg=lambda m, i=i: f"{name}, {i}: {m}"
        )


def check_all(special: str = "", **options: Any) -> None:
    for name in PROGRAMS:
        if name not in UNFIT.get(special, ()):
            check(name, **options)


@distributed(2)
def test_programs_that_change() -> None:
    check_all(reshard_after_forward=True)


@pytest.mark.long
@pytest.mark.parametrize("change", ["tied", "frozen", "frozen first"])
@distributed(2)
def test_programs_that_change_with_other_parameters(change: str) -> None:
    check_all(change, change=change)


@pytest.mark.long
@pytest.mark.parametrize("special", ["kept", "secondary", "offload", "hsdp"])
@distributed(4)
def test_programs_that_change_with_other_settings(special: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "kept": {"reshard_after_forward": False},
        "secondary": {"reshard_after_forward": 2},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "hsdp": {"mesh": cached_mesh(2, 2, names=("replicate", "shard"))},
    }
    check_all(special, **options[special])


@distributed(2)
def test_casts_are_not_skipped() -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
    for program in ("plain", "loss of the middle", "with keywords"):
        check(program, mp_policy=policy)


@distributed(2)
def test_what_is_skipped_is_gathered_and_reduced_once() -> None:
    model = build(merged=True, reshard_after_forward=True)
    skipped: list[bool] = []
    entered = 0
    skips = Middle.skips_post_forward

    def noted(self: Middle, args: tuple, output: Any) -> bool:
        skipped.append(skips(self, args, output))
        return skipped[-1]

    def counted(run: Any) -> tuple[int, int, int]:
        """Gathers of the unit in forward and backward, and its reductions."""
        nonlocal entered
        unit: Any = unit_of(model.layers[2])
        enter = unit.runtime.pre_backward

        def noted_enter(of: Any, *args: Any, **options: Any) -> None:
            nonlocal entered
            entered += of is unit
            enter(of, *args, **options)

        reduced: list[Any] = []
        reduce = unit.runtime.reduce

        def noted_reduce(of: Any, **options: Any) -> None:
            reduced.append(of)
            reduce(of, **options)

        entered = 0
        skipped.clear()
        with pytest.MonkeyPatch.context() as patch, counting(model) as gathers:
            patch.setattr(Middle, "skips_post_forward", noted)
            patch.setattr(unit.runtime, "reduce", noted_reduce)
            patch.setattr(unit.runtime, "pre_backward", noted_enter)
            patch.delattr(runtime_file, "modules_being_called")  # no look at the stack
            run(model, x)
        name = "layers.2.weight"
        return gathers.forward[name], gathers.backward[name], reduced.count(unit)

    x = torch.ones(4, 6, dtype=torch.float64)
    plain(model, x)
    for _ in range(2):
        assert counted(plain) == (1, 1, 1)
        assert skipped == [True] * (NUM - 2)
        assert entered == 3  # at the last module, at the first after it, and at the first one
    assert counted(loss_of_the_middle) == (1, 1, 1)
    # As many times as backward comes to it by itself.
    assert counted(losses_of_the_middle_and_of_the_end)[:2] <= (1, 5)
    assert counted(plain) == (1, 1, 1)
    assert skipped == [True] * (NUM - 2)
    everywhere = recomputed(range(NUM), reentrant=True)
    everywhere(model, x)
    assert counted(everywhere) == (1, 1, 1)
    model = copy.deepcopy(model)
    plain(model, x)
    assert counted(plain) == (1, 1, 1)
    assert skipped == [True] * (NUM - 2)


@distributed(2)
def test_a_forward_that_is_left_in_the_middle_is_over() -> None:
    """What is gathered for it is not what modules compute with after the next optimizer step."""
    x = torch.ones(4, 6, dtype=torch.float64)
    model = build(merged=True, reshard_after_forward=False)
    for _ in range(2):
        model(x, outputs)
        with torch.no_grad():
            model(x, lambda model, x: outputs(model, x)[:0])
    with torch.no_grad():
        model(x, lambda model, x: model.layers[1](model.layers[0](model.before(x))))
        for param in model.parameters():
            param.zero_()
        assert not model.layers[2](x).any()


@distributed(2)
def test_a_unit_in_whose_forward_a_module_raised_is_freed_after_the_last() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    model = build(merged=True, reshard_after_forward=True)
    with torch.no_grad():
        for _ in range(3):
            model(x, going_on)
            assert not bytes_held(model)


@distributed(2)
def test_units_with_dropped_outputs_can_be_merged_again() -> None:
    model = build(merged=True)
    x = torch.ones(4, 6, dtype=torch.float64)
    plain(model, x)
    kept = model(x, outputs)[3]
    with pytest.raises(RuntimeError, match="between forward and backward of unit"):
        merge_units(model, min_bytes=10**6)
    del kept
    merge_units(model, min_bytes=10**6)
    plain(model, x)


@distributed(2)
def test_no_hooks_stay_on_leaves_that_modules_in_the_middle_take() -> None:
    model = build(merged=True)
    learned = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)

    def body(model: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate([model.before, *model.layers, model.after]):
            x = layer(learned if i == 4 else x)
        return x

    for _ in range(4):
        model(learned.detach(), body).sum().backward()
    assert not learned._backward_hooks
