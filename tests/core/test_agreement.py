"""Ranks that differ get an error that names them, where training would hang or drift apart."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import (
    MixedPrecisionPolicy,
    RanksDisagreeError,
    check_ranks_agree,
    fully_shard,
    replicate,
    watch_ranks,
)
from fsdp2.guards.rank_agreement.store_exchange import differences, name_ranks
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, CONDITIONAL, MLP, TRANSFORMER
from reference import assert_same_gradients, assert_sharded, pair, run_both

pytestmark = ours_only("checks of its own")


def mlp(width: int = 6, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)).to(dtype)


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def error_of(action: Callable[[], Any]) -> str:
    """The message, which has to be the same on all ranks."""
    with pytest.raises(RanksDisagreeError) as caught:
        action()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


@pytest.mark.parametrize("name", ["transformer", "nested", "lora", "conditional"])
@distributed(2, long=(4,))
def test_ranks_that_agree(name: str) -> None:
    """Before the first forward and after steps; and training is as it was."""
    case = BY_NAME[name]
    model, plain = pair(case)
    for step in range(2):
        check_ranks_agree(model)
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    check_ranks_agree(model)
    with watch_ranks(model):
        run_both(case, model, plain, 2)
    assert_same_gradients(model, plain)


@distributed(4)
def test_replicas_and_parts_on_other_meshes() -> None:
    model, plain = pair(MLP, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    check_ranks_agree(model)
    halves = cached_mesh(2, 2, names=("replicate", "shard"))["shard"]
    torch.manual_seed(dist.get_rank() // 2)  # two models, each over two ranks
    check_ranks_agree(sharded(mlp(), mesh=halves))
    with watch_ranks(model):
        run_both(MLP, model, plain, 0)


def _frozen(model: nn.Sequential) -> nn.Sequential:
    model[2].bias.requires_grad_(False)
    return model


def _without_units(model: nn.Sequential) -> nn.Sequential:
    return fully_shard(model)


def _replicated(model: nn.Sequential) -> nn.Sequential:
    replicate(model[0])
    return replicate(model)


def _bias_first(model: nn.Sequential) -> nn.Sequential:
    model[0]._parameters = dict(reversed(model[0]._parameters.items()))
    return model


def _after(model: nn.Sequential, change: Callable[[Any], None]) -> nn.Sequential:
    sharded(model)
    change(model)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# What rank 1 makes, and what the message says; the others make `sharded(mlp())`.
ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "number of units": (lambda: _without_units(mlp()), r"units: '\(root\)', '0' .*, '\(root\)' "),
    "shape": (lambda: sharded(mlp(7)), r"shape of '0.weight': \(6, 4\) .*, \(7, 4\) "),
    "dtype": (
        lambda: sharded(mlp(dtype=torch.float64)),
        r"dtype of '0.weight': torch.float32 .*, torch.float64 ",
    ),
    "requires_grad": (
        lambda: _frozen(sharded(mlp())),
        r"requires_grad of '2.bias': True .*, False ",
    ),
    "mixed precision": (lambda: sharded(mlp(), mp_policy=BF16), r"mp_policy of '0': .*bfloat16"),
    "resharding": (
        lambda: sharded(mlp(), reshard_after_forward=False),
        r"reshard_after_forward of '0': None .*, False ",
    ),
    "gradient sync": (
        lambda: _after(mlp(), lambda m: m.set_requires_gradient_sync(False)),
        r"sync_grads of '0': True .*, False ",
    ),
    "prefetching": (
        lambda: _after(mlp(), lambda m: m.set_modules_to_forward_prefetch([m[0]])),
        r"forward_prefetch of '\(root\)': \[\] .*, \['0'\] ",
    ),
    "a hook": (
        lambda: _after(mlp(), lambda m: m.set_all_reduce_hook(len)),
        r"all_reduce_hook of '\(root\)': None .*, len ",
    ),
    "mesh": (
        lambda: _replicated(mlp()),
        r"mesh of '\(root\)': 1 x 3 .*, 3 x 1 ",
    ),
    "order of parameters": (
        lambda: sharded(_bias_first(mlp())),
        r"parameter 0 of '0': '0.weight' .*, '0.bias' ",
    ),
    "names": (
        lambda: sharded(nn.Sequential(*mlp(), nn.Linear(4, 4))),
        r"unit of '3.weight': nothing .*, '\(root\)' ",
    ),
}


@pytest.mark.parametrize("what", ODD)
@distributed(3)
def test_one_rank_made_something_else(what: str) -> None:
    make, expected = ODD[what]
    model = make() if dist.get_rank() == 1 else sharded(mlp())
    text = error_of(lambda: check_ranks_agree(model))
    assert re.search(expected, text), text
    assert "(ranks 0, 2)" in text, text
    assert "(rank 1)" in text, text


@pytest.mark.parametrize("what", ["requires_grad", "order of parameters"])
@distributed(3, restart=True)
def test_a_first_forward_of_something_else_is_an_error_without_being_asked_for(what: str) -> None:
    """Again and again. (Ranks that made different units are of no use for others: `restart`.)"""
    make, expected = ODD[what]
    model = make() if dist.get_rank() == 1 else sharded(mlp())
    for action in (lambda: check_ranks_agree(model), lambda: model(torch.ones(2, 4))) * 2:
        text = error_of(action)
        assert re.search(expected, text), text
        assert "(ranks 0, 2)" in text, text
        assert "(rank 1)" in text, text
    assert_sharded(model)


@distributed(2)
def test_the_order_of_the_last_forward() -> None:
    torch.manual_seed(0)
    model = CONDITIONAL.build()
    for unit in CONDITIONAL.units(model):
        replicate(unit)  # nothing is gathered, so that forward alone does not hang
    replicate(model)
    with torch.no_grad():
        model(torch.ones(2, 5), dist.get_rank())
    text = error_of(lambda: check_ranks_agree(model))
    assert "order of units in the last forward of '(root)'" in text
    assert re.search(r"first, even, last \(rank 0\), .*first, odd, last \(rank 1\)", text), text


@distributed(4)
def test_replicas_that_have_drifted_apart() -> None:
    """One bit of one parameter, on one of the two ranks that hold it."""
    model, _ = pair(MLP, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    if dist.get_rank() == 3:
        weight = model.get_parameter("2.weight").detach()
        weight.to_local()[0, 0] *= 1 + 2**-52  # type: ignore[attr-defined]
    text = error_of(lambda: check_ranks_agree(model))
    assert re.search(r"values of '2\.weight' \(shard 1 of mesh dim 1\): ", text), text
    assert "(rank 1)" in text
    assert "(rank 3)" in text
    assert text.count("values of") == 1
    check_ranks_agree(model, values=False)


@distributed(2)
def test_replicated_units_that_have_drifted_apart() -> None:
    model = mlp()
    replicate(model[0])
    fully_shard(model)
    check_ranks_agree(model)
    with torch.no_grad():
        model[0].bias.to_local()[2] += dist.get_rank()
    assert "values of '0.bias': checksum" in error_of(lambda: check_ranks_agree(model))


class Branching(nn.Module):
    """Runs one of two units, or uses one of two parameters of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.scale, self.shift = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: Tensor, branch: str, used: str) -> Tensor:
        x = getattr(self, branch)(self.first(x))
        return x * self.scale if used == "scale" else x + self.shift


def branching() -> nn.Module:
    torch.manual_seed(0)
    model = Branching()
    for unit in (model.first, model.left, model.right):
        fully_shard(unit)
    return fully_shard(model)


@distributed(3, restart=True)
def test_ranks_that_run_different_modules() -> None:
    """Before anything hangs, forward raises on all ranks; they can go on."""
    model = branching()
    odd = dist.get_rank() == 2
    x = torch.ones(2, 4)

    def step(branch: str, used: str) -> None:
        with watch_ranks(model, timeout_s=20):
            model(x, branch, used).sum().backward()

    step("left", "scale")
    text = error_of(lambda: step("right" if odd else "left", "scale"))
    # 'left' was expected after the last forward, and gathered ahead by all.
    assert text == (
        "Ranks do different things next: gather 'first' in backward (ranks 0, 1), "
        "gather 'right' in forward (rank 2)"
    )
    model.reset_iter_state()  # type: ignore[operator]
    model.zero_grad()
    step("left", "scale")
    text = error_of(lambda: step("left", "shift" if odd else "scale"))
    assert re.search(r"reduce '\(root\)' \(scale\) \(ranks 0, 1\), .*\(shift\) \(rank 2\)", text)


@distributed(2, restart=True)
def test_a_rank_that_stops_early() -> None:
    model = branching()
    x = torch.ones(2, 4)
    with watch_ranks(model, timeout_s=2):
        model(x, "left", "scale").sum().backward()
        if dist.get_rank() == 0:
            with pytest.raises(
                RanksDisagreeError,
                match=r"Rank 0 is about to gather '\(root\)' in forward, .*, but rank 1 did not "
                r"come within 2 s\. Another rank failed",
            ):
                model(x, "left", "scale")
    unit = vars(model)["_fsdp2_unit"]
    assert "start_unshard" not in vars(unit)
    assert "make_reductions" not in vars(unit.gradients)


@distributed(2)
def test_a_model_is_copied_while_it_is_watched() -> None:
    model, _ = pair(TRANSFORMER)
    with watch_ranks(model):
        copied = copy.deepcopy(model)
        model(*TRANSFORMER.batch(0, dist.get_rank(), torch.float64)[:1])
    copied(*TRANSFORMER.batch(0, dist.get_rank(), torch.float64)[:1])


def test_texts() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(72)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 64 more"
    said = {(0,): {"a": "1", "b": "2"}, (1,): {"a": "1"}, (2,): {"a": "3", "b": "2"}}
    assert differences(said) == ["a: 1 (ranks 0, 1), 3 (rank 2)"]
    assert differences(said, missing="nothing")[1] == "b: 2 (ranks 0, 2), nothing (rank 1)"
    many = {(r,): {str(i): str(r) for i in range(9)} for r in range(2)}
    assert differences(many, most=2)[2:] == ["and 7 more"]
