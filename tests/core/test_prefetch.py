"""Explicit prefetching changes when parameters are gathered, never what is computed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from harness import distributed
from models import TRANSFORMER, Case, no_units, normal_batch
from reference import assert_same_gradients, assert_sharded, check_training, pair, run_both


class Stack(nn.Module):
    """Layers that are called in a given order, so that predictions can be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x


def stack_batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4], [1, 1, 3, 1], [0, 1, 2, 3, 4]]
    return normal_batch(3, 6)(step, rank, dtype)[0], orders[step % len(orders)]


STACK = Case("stack", Stack, lambda m: list(m.get_submodule("layers").children()), stack_batch)


def layers_of(model: nn.Module) -> list[FSDPModule]:
    return [m for m in model.get_submodule("layers").children() if isinstance(m, FSDPModule)]


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_the_order_of_units_changes_every_step(mode: bool) -> None:
    check_training(STACK, reshard_after_forward=mode)


@pytest.mark.parametrize("depth", [1, 2, 4])
@distributed(2, 3)
def test_lists_in_the_order_of_use(depth: int) -> None:
    model, plain = pair(STACK)
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + depth])
        before = layers[max(0, index - depth) : index]
        layer.set_modules_to_backward_prefetch(before[::-1])
    for step in (0, 0, 4):
        run_both(STACK, model, plain, step)
        assert_sharded(model)
        assert_same_gradients(model, plain)


@distributed(2, 3)
def test_lists_that_predict_wrongly() -> None:
    model, plain = pair(STACK)
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch([layers[index - 1], layers[index - 2]])
        layer.set_modules_to_backward_prefetch([layers[(index + 1) % 5], layers[(index + 2) % 5]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        run_both(STACK, model, plain, step)
        for unit in [*layers, model]:
            unit.reshard()  # what was gathered in vain
        assert_sharded(model)
        assert_same_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()


@distributed(2)
def test_lists_can_be_taken_back() -> None:
    model, plain = pair(TRANSFORMER)
    first, second = model.get_submodule("blocks").children()
    assert isinstance(first, FSDPModule)
    assert isinstance(second, FSDPModule)
    for step, wanted in enumerate([[second], [], [second]]):
        first.set_modules_to_forward_prefetch(wanted)
        run_both(TRANSFORMER, model, plain, step)
        assert_same_gradients(model, plain)


@distributed(2, 3)
def test_the_root_prefetches_the_first_unit() -> None:
    model, plain = pair(TRANSFORMER)
    first, second = model.get_submodule("blocks").children()
    assert isinstance(model, FSDPModule)
    model.set_modules_to_forward_prefetch([first, second])
    model.set_modules_to_backward_prefetch([second, first])
    for step in range(3):
        run_both(TRANSFORMER, model, plain, step)
        assert_same_gradients(model, plain)


@distributed(2, 3)
def test_evaluation_between_steps_does_not_disturb_the_recorded_order() -> None:
    model, plain = pair(STACK)
    for step in range(3):
        run_both(STACK, model, plain, 0)
        with torch.no_grad():
            inputs, _ = STACK.batch(7, dist.get_rank(), torch.float64)
            order = [3, 1] if step == 1 else [4, 0, 2]
            assert torch.equal(model(inputs, order), plain(inputs, order))
        assert_same_gradients(model, plain)


@distributed(2, 3)
def test_a_part_of_the_model_runs_on_its_own() -> None:
    model, plain = pair(STACK)
    run_both(STACK, model, plain, 0)
    inputs, _ = STACK.batch(3, dist.get_rank(), torch.float64)
    layers, plain_layers = model.get_submodule("layers"), plain.get_submodule("layers")
    with torch.no_grad():
        assert torch.equal(layers[3](inputs), plain_layers[3](inputs))
    run_both(STACK, model, plain, 0)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_two_models_of_separate_roots_take_turns() -> None:
    first, plain_first = pair(STACK)
    second, plain_second = pair(TRANSFORMER)
    for step in range(3):
        run_both(STACK, first, plain_first, step)
        run_both(TRANSFORMER, second, plain_second, step)
    assert_same_gradients(first, plain_first)
    assert_same_gradients(second, plain_second)


@distributed(2, 3)
def test_the_output_of_one_root_is_the_input_of_another() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = copy.deepcopy(plain)
    for child in (model[0], model[2]):
        fully_shard(child)  # and not `model`, which stays a plain module
    case = Case("two_roots", lambda: plain, no_units, normal_batch(5, 4))
    for step in range(3):
        run_both(case, model, plain, step)
        assert_sharded(model)
    assert_same_gradients(model, plain)
