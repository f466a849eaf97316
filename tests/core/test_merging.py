"""`merge_units`: small neighbours become one unit, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_activation_checkpoint import case_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard, merge_units, register_fsdp_forward_method
from fsdp2.runtime import schedule
from fsdp2.runtime.unit import units_in
from gathers import bytes_held, counting
from harness import distributed, ours_only
from models import LORA, NESTED, RECURRENT, TRANSFORMER, Case, normal_batch
from reference import gradients, shard_case, whole

pytestmark = ours_only("torch does not merge units")


class Shuffled(nn.Module):
    """Layers in an order that a step chooses; some are left out, some run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        order = torch.randperm(6, generator=generator)[: 3 + step % 4].tolist()
        for i in [*order, order[0]]:
            x = x + self.layers[i](x).tanh()
        return x


def layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("layers").children())


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (*normal_batch(4, 6)(step, rank, dtype), step)


SHUFFLED = Case("shuffled", Shuffled, layers, batch)


def chain(num: int = 6) -> Case:
    return Case(
        "chain",
        lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(num))),
        lambda model: list(model.children()),
        normal_batch(4, 6),
    )


def train(case: Case, model: Any, steps: range, optimizer: Any = None) -> list[Tensor]:
    """Losses, gradients and parameters of steps, one with two micro-batches."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    found: list[Tensor] = []
    for step in steps:
        for i in range(2 if step == 2 else 1):
            model.set_requires_gradient_sync(step != 2 or i == 1)
            loss = case.loss(model, *case.batch(step + 10 * i, dist.get_rank(), torch.float64))
            loss.backward()
            found.append(loss.detach())
        found += [whole(grad) for grad in gradients(model).values() if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [whole(param).clone() for param in model.parameters()]
    return found


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def check(case: Case, min_bytes: int, *, merged: int | None = None, **options: Any) -> None:
    """Merge before the first forward, and after two steps: the same results as without."""
    torch.manual_seed(0)
    plain = case.build().to(torch.float64)
    expected = train(case, shard_case(case, copy.deepcopy(plain), **options), range(4))
    for first in (0, 2):
        model: Any = shard_case(case, copy.deepcopy(plain), **options)
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params, lr=0.05)
        found = train(case, model, range(first), optimizer)
        made = merge_units(model, min_bytes=min_bytes)
        if merged is not None:
            assert len(made.merged) == merged, made
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert_equal(found + train(case, model, range(first, 4), optimizer), expected)


@distributed(2, long=(1, 3, 4))
def test_merged_units_train_alike() -> None:
    # By the bytes of a whole unit, which has padding: on 4 ranks two are enough, else three.
    check(chain(10), 700, merged={1: 0, 4: 5}.get(dist.get_world_size(), 3))


@distributed(2)
def test_what_is_too_small_at_the_end_joins_its_neighbours() -> None:
    case = chain(10)
    made = merge_units(shard_case(case, case.build().to(torch.float64)), min_bytes=1000)
    assert made.merged == (("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8", "9"))
    assert not made.left


@pytest.mark.parametrize("min_bytes", [700, 10**6])
@distributed(2, long=(3, 4))
def test_modules_that_run_in_another_order_or_not_at_all(min_bytes: int) -> None:
    check(SHUFFLED, min_bytes)


@pytest.mark.long
@distributed(2, 3)
def test_units_around_each_other_frozen_reused_and_tied_ones() -> None:
    for case in (NESTED, LORA, RECURRENT, TRANSFORMER):
        check(case, 10**6)


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["inside units", "around units", "around two units"])
@distributed(2)
def test_merged_units_are_recomputed(place: str, reentrant: bool) -> None:
    check(case_of(place, reentrant), 10**6, reshard_after_forward=True)


@distributed(2)
def test_merged_units_that_are_recomputed_or_kept() -> None:
    check(chain(), 700, reshard_after_forward=False)
    check(case_of("around two units", False), 10**6, reshard_after_forward=True)


@distributed(2)
def test_a_merged_unit_is_gathered_and_reduced_once() -> None:
    case = chain()
    model: Any = shard_case(case, case.build().to(torch.float64), reshard_after_forward=True)
    train(case, model, range(1))
    made = merge_units(model, min_bytes=10**6)
    assert made.merged == (("0", "1", "2", "3", "4", "5"),)
    assert "6 units are one: 0 .. 5" in str(made)
    train(case, model, range(1))
    with counting(model) as gathers:
        train(case, model, range(1))
    # (The only unit is the last of forward, and kept for backward.)
    assert set(gathers.forward.values()) == {1}
    assert not gathers.backward
    assert bytes_held(model) == 0
    state = {name: whole(value) for name, value in model.state_dict().items()}
    model.load_state_dict(model.state_dict())
    copied: Any = copy.deepcopy(model)
    for name, value in copied.state_dict().items():
        assert torch.equal(whole(value), state[name])
    assert_equal(train(case, copied, range(2)), train(case, model, range(2)))


@distributed(2)
def test_what_is_left_says_why() -> None:
    low = MixedPrecisionPolicy(torch.bfloat16)
    model: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    for i, layer in enumerate(model):
        fully_shard(layer, mp_policy=low if i == 2 else MixedPrecisionPolicy())
    fully_shard(model)
    register_fsdp_forward_method(model[4], "extra_repr")
    made = merge_units(model, min_bytes=1000)
    assert made.merged == (("0", "1"),)
    assert made.left == {
        "4": "has registered methods",
        "2": "no neighbour with the same settings",
        "3": "no neighbour with the same settings",
    }
    assert "Left as they were (no neighbour with the same settings): 2, 3" in str(made)
    assert str(merge_units(model, min_bytes=1)) == "No units were merged"


@distributed(2)
def test_when_units_cannot_be_merged() -> None:
    case = chain()
    model: Any = shard_case(case, case.build().to(torch.float64))
    x = case.batch(0, dist.get_rank(), torch.float64)[0]
    with pytest.raises(TypeError, match="min_bytes must be an int"):
        merge_units(model, min_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_bytes must be positive, got 0"):
        merge_units(model, min_bytes=0)
    with pytest.raises(ValueError, match="The model is not sharded"):
        merge_units(nn.Linear(2, 2), min_bytes=1)
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match="between forward and backward of unit"):
        merge_units(model, min_bytes=1000)
    with model.no_sync():
        loss.backward()
    with pytest.raises(RuntimeError, match="holds gradients of micro-batches"):
        merge_units(model, min_bytes=1000)


@pytest.mark.parametrize("in_cycle", [False, True])
@distributed(2)
def test_units_are_merged_after_a_forward_whose_outputs_were_dropped(in_cycle: bool) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    output = model(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="between forward and backward of unit"):
        merge_units(model, min_bytes=1000)
    if in_cycle:  # as compiled code and exceptions leave graphs
        cycle: list[Any] = [output]
        cycle.append(cycle)
        del cycle
    del output
    assert merge_units(model, min_bytes=1000).merged == (("0", "1", "2"),)


@distributed(2)
def test_units_are_merged_after_a_frozen_one_was_not_recomputed() -> None:
    """It was recomputed in the step before, so the library expects it again."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].requires_grad_(False)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    output = checkpoint(model, torch.randn(2, 4), use_reentrant=False)
    output.sum().backward()
    checkpoint(model[0], torch.randn(2, 4), use_reentrant=False)
    assert merge_units(model, min_bytes=1000).merged == (("0", "1", "2"),)


def grouped(keep: bool) -> Any:
    """Four layers as one unit, after the step that learns that they follow each other."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    fully_shard(list(model), reshard_after_forward=not keep)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    return model


@pytest.mark.parametrize("what", ["an earlier layer", "a later layer", "the last layer", "a write"])
@distributed(2)
def test_a_parameter_that_is_replaced_between_the_layers_of_a_unit_is_found(what: str) -> None:
    place = {"an earlier layer": 0, "a later layer": 2, "the last layer": 3}
    for keep in (False, True):
        model = grouped(keep)
        sharded = model[0].weight

        def replace(*_: Any, model: Any = model, sharded: Any = sharded) -> None:
            if what == "a write":
                sharded.data = sharded.data.clone()
            else:
                model[place[what]].weight = nn.Parameter(torch.zeros(6, 6))

        handle = model[1].register_forward_hook(replace)
        match = "'0.weight' .*was written by" if what == "a write" else "was replaced in its FSDPL"
        with pytest.raises(RuntimeError, match=match):
            model(torch.ones(2, 6))
        handle.remove()
        # Nothing of it stays: the parameters are what they were.
        model(torch.ones(2, 6)).sum().backward()
        assert model[0].weight is sharded


@distributed(2)
def test_a_parameter_that_is_replaced_before_a_layer_raises_is_found_afterwards() -> None:
    model = grouped(keep=False)
    sharded = model[0].weight

    def replace(*_: Any) -> None:
        model[0].weight = nn.Parameter(torch.zeros(6, 6))
        raise ZeroDivisionError

    handle = model[1].register_forward_hook(replace)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 6))
    handle.remove()
    with pytest.raises(RuntimeError, match=r"'0.weight' .*was replaced in its FSDPL"):
        model(torch.ones(2, 6))
    model(torch.ones(2, 6)).sum().backward()
    assert model[0].weight is sharded


@distributed(2)
def test_what_a_unit_looks_at_does_not_grow_with_the_square_of_its_modules() -> None:
    model = grouped(keep=False)
    unit = units_in(model)[-1]
    looks: list[str] = []
    (guard,) = unit.registration._write_guards
    check, awaited = guard.check, schedule.is_awaited
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "check", lambda n: looks.append(n) or check(n))
        patch.setattr(schedule, "is_awaited", lambda ref: looks.append("ref") or awaited(ref))
        for _ in range(10):
            model(torch.ones(2, 6)).sum().backward()
    refs = looks.count("ref")
    assert len(looks) - refs == 20  # before the first module of a forward and after the last
    # Each forward is dropped once; those of the last step and a few before it are still there.
    assert refs <= 10 * 4 + 8, refs
