"""Gradient accumulation: without communication, with it every time, and mixtures of both."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPModule
from harness import cached_mesh, distributed, ours_only, start_accounts, stop_accounts
from models import BY_NAME, CONDITIONAL, MLP, TRANSFORMER, Case, run_backward
from reference import (
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    pair,
    run_both,
    whole,
)

some_models = pytest.mark.parametrize("name", ["mlp", "transformer", "cnn", "recurrent", "lora"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train_without_communication(
    case: Case, num_steps: int, num_micro_batches: int, **options: Any
) -> None:
    """Accumulates locally; the last micro-batch reduces the sum."""
    model, plain = pair(case, **options)
    assert isinstance(model, FSDPModule)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for step in range(num_steps):
        for micro in range(num_micro_batches):
            last = micro == num_micro_batches - 1
            model.set_requires_gradient_sync(last)
            run_both(case, model, plain, num_micro_batches * step + micro, average=last)
        assert_sharded(model)
        assert_same_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_same_parameters(model, plain)


@some_models
@distributed(2, 3, long=(1, 4))
def test_without_communication(name: str) -> None:
    train_without_communication(BY_NAME[name], num_steps=2, num_micro_batches=3)


@pytest.mark.parametrize("forward_inside", [True, False])
@ours_only("torch has no such context for it")
@distributed(2)
def test_a_context_without_communication(forward_inside: bool) -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    with warnings.catch_warnings(action="error"):
        for micro in range(3):
            batch = MLP.batch(micro, dist.get_rank(), torch.float64)
            MLP.loss(plain, *batch).backward()
            loss = None if forward_inside else MLP.loss(model, *batch)
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                (MLP.loss(model, *batch) if loss is None else loss).backward()
            if micro < 2:
                assert all(p.grad is None for p in model.parameters())
    average_gradients(plain)
    assert_same_gradients(model, plain)


@ours_only("torch has no such context for it")
@distributed(2)
def test_the_context_says_when_it_is_misused() -> None:
    model, _ = pair(MLP)
    assert isinstance(model, FSDPModule)
    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    with pytest.warns(UserWarning, match="No backward ran inside no_sync"), model.no_sync():
        loss = MLP.loss(model, *batch)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with (
        pytest.raises(RuntimeError, match=r"'0', which is part of the sharded '\(root\)'"),
        model[0].no_sync(),  # type: ignore[index]
    ):
        pass
    model.set_requires_gradient_sync(False)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    model.zero_grad()
    MLP.loss(model, *batch).backward()  # what was chosen before is so again
    assert all(p.grad is None for p in model.parameters())


@distributed(2, 3)
def test_no_sharded_gradient_appears_before_the_reduction() -> None:
    """And none changes: what is reduced early would be reduced again."""
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    run_both(MLP, model, plain, 0, average=False)
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)
    before = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    model.set_requires_gradient_sync(False)
    run_both(MLP, model, plain, 2, average=False)
    after = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(before) == len(after) == len(list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@ours_only("a choice of fsdp2")
@some_models
@distributed(2, 3)
def test_accumulation_of_shards(name: str) -> None:
    """Every micro-batch is reduced into the sharded gradients, also where sync is switched off."""
    case = BY_NAME[name]
    model, plain = pair(case)
    assert isinstance(model, FSDPModule)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    model.set_accumulate_sharded(True)
    for step in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            run_both(case, model, plain, 3 * step + micro)
            assert_sharded(model)
            assert_same_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    model.set_accumulate_sharded(False)
    model.set_requires_gradient_sync(False)
    run_both(case, model, plain, 7, average=False)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", [False, 2])
@distributed(4)
def test_without_communication_in_other_reshard_modes(mode: bool | int) -> None:
    train_without_communication(TRANSFORMER, 2, 2, reshard_after_forward=mode)


@distributed(2, 3)
def test_without_communication_and_parameters_kept_gathered() -> None:
    """No gather and no reduction between micro-batches: all of it waits for the last one."""
    model, plain = pair(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
            run_both(TRANSFORMER, model, plain, 3 * step + micro, average=last)
        assert_sharded(model)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@some_models
@distributed(1, 2, 3)
def test_with_communication_every_time(name: str) -> None:
    model, plain = pair(BY_NAME[name])
    for step in range(3):
        run_both(BY_NAME[name], model, plain, step)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_is_last_backward_only_for_the_last() -> None:
    model, plain = pair(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        for micro in range(3):
            model.set_is_last_backward(micro == 2)
            run_both(TRANSFORMER, model, plain, 3 * step + micro)
        assert_sharded(model)
        assert_same_gradients(model, plain)


@ours_only("torch's zero_grad leaves what is being reduced")
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2, 3)
def test_zero_grad_drops_what_is_still_being_reduced(set_to_none: bool) -> None:
    model, plain = pair(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(False)
    run_both(TRANSFORMER, model, plain, 0)
    model.set_is_last_backward(True)
    for each in (model, plain):
        each.zero_grad(set_to_none=set_to_none)
    run_both(TRANSFORMER, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_local_sums_join_gradients_that_are_already_there() -> None:
    """Reduce, then accumulate locally, then reduce again, without zero_grad in between."""
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    run_both(MLP, model, plain, 0)
    reduced = [p.grad for p in plain.parameters()]
    plain.zero_grad()
    for step in (1, 2, 3):
        model.set_requires_gradient_sync(step == 3)
        run_both(MLP, model, plain, step, average=step == 3)
    for parameter, earlier in zip(plain.parameters(), reduced, strict=True):
        assert parameter.grad is not None
        assert earlier is not None
        parameter.grad += earlier
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_one_unit_waits_while_the_others_reduce() -> None:
    """The switch of one module, not of those inside it."""
    model, plain = pair(MLP)
    layer = model[2]
    assert isinstance(layer, FSDPModule)
    layer.set_requires_gradient_sync(False, recurse=False)
    run_both(MLP, model, plain, 0)
    layer.set_requires_gradient_sync(True, recurse=False)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_a_unit_used_in_a_later_micro_batch_only(mode: bool) -> None:
    """Even micro-batches use one branch, odd ones the other."""
    train_without_communication(CONDITIONAL, 2, 2, reshard_after_forward=mode)


@distributed(2, 3)
def test_a_unit_used_only_in_a_micro_batch_that_does_not_reduce() -> None:
    """The reduction at the end of the last backward includes what earlier ones left."""
    model, plain = pair(CONDITIONAL)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        run_both(CONDITIONAL, model, plain, step, average=step == 1)
    assert plain.get_parameter("even.weight").grad is not None
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_evaluation_between_micro_batches() -> None:
    model, plain = pair(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        with torch.no_grad():
            tokens, _ = TRANSFORMER.batch(9, dist.get_rank(), torch.float64)
            assert torch.equal(model(tokens), plain(tokens))
        model.set_requires_gradient_sync(step == 2)
        run_both(TRANSFORMER, model, plain, step, average=step == 2)
    assert_same_gradients(model, plain)


@contextlib.contextmanager
def unaccounted() -> Iterator[None]:
    """Accounts of gradients would raise in such a step."""
    stop_accounts()
    try:
        yield
    finally:
        start_accounts()


@ours_only("a warning of fsdp2")
@pytest.mark.parametrize("way", ["sync", "all-reduce"])
@distributed(2)
def test_a_step_that_gradients_do_not_reach_warns_once(way: str) -> None:
    mesh = cached_mesh(2, 1, names=("replicate", "shard"))
    model, _ = pair(MLP, **({"mesh": mesh} if way == "all-reduce" else {}))
    assert isinstance(model, FSDPModule)
    if way == "sync":
        model.set_requires_gradient_sync(False)
    else:
        model.set_requires_all_reduce(False)
    before = [whole(param).clone() for param in model.parameters()]
    optimizer, other = sgd(model), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with unaccounted(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            run_backward(MLP, model, step)
            other.step()
            optimizer.step()
    found = [str(w.message) for w in said if "does not change" in str(w.message)]
    assert len(found) == 1, found
    assert re.match(r"This step of SGD does not change '.*' and \d more: gradients", found[0])
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(param), value)
    model.reset_iter_state()


@ours_only("a warning of fsdp2")
@distributed(2)
def test_a_step_of_what_is_reduced_is_not_warned_of() -> None:
    """While a micro-batch of the next iteration waits, and of one unit while another waits."""
    model, _ = pair(MLP)
    assert isinstance(model, FSDPModule)
    first = next(module for module in model.children() if isinstance(module, FSDPModule))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05)
    with unaccounted(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run_backward(MLP, model, 0)
        model.set_requires_gradient_sync(False)
        run_backward(MLP, model, 1)
        optimizer.step()
    model.reset_iter_state()
