"""Generated models: any tree of layers, any choice of units, any options, against the reference."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, FSDPModule
from harness import RUNS_ON_TORCH, cached_mesh, ours_only, run_on
from models import Case, normal_batch
from reference import (
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    pair,
    run_both,
    shard_case,
)

if not RUNS_ON_TORCH:
    from fsdp2.optim import local_step, step_in_backward


@dataclasses.dataclass(frozen=True)
class Tree:
    """A module: a layer, and modules inside it that are called one after another.

    `dim` is the width inside; `unit` says whether it is sharded on its own, `repeats` how often
    its body is called in a forward, `recomputed` whether the body is checkpointed, `frozen`
    whether its own layer is trained, `skipped` in which steps (even: 0, odd: 1) it does nothing.
    """

    dim: int
    bias: bool = True
    unit: bool = False
    repeats: int = 1
    recomputed: bool = False
    frozen: bool = False
    skipped: int | None = None
    inside: tuple[Tree, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One generated training."""

    tree: Tree
    world_size: int
    reshard_after_forward: bool | None
    replicas: int
    accumulate: tuple[bool, ...]
    keep_gathered: bool
    direct_min_bytes: int | None


class Node(nn.Module):
    """A `Tree` as a module; inputs and outputs have 3 columns."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.tree = tree
        self.up = nn.Linear(3, tree.dim, bias=tree.bias)
        self.inside = nn.ModuleList(Node(inner) for inner in tree.inside)
        self.down = nn.Parameter(torch.randn(3, tree.dim) / tree.dim**0.5)
        self.up.requires_grad_(not tree.frozen)

    def body(self, x: Tensor, step: int) -> Tensor:
        # A small step each: where gradients grow from layer to layer, so does rounding.
        x = x + self.up(x).tanh() @ self.down.t() / 4
        for module in self.inside:
            x = module(x, step)
        return x

    def forward(self, x: Tensor, step: int) -> Tensor:
        if self.tree.skipped == step % 2:
            return x
        for _ in range(self.tree.repeats):
            if self.tree.recomputed:
                result = checkpoint(self.body, x, step, use_reentrant=False)
                assert isinstance(result, Tensor)
                x = result
            else:
                x = self.body(x, step)
        return x


def nodes(model: nn.Module) -> list[Node]:
    """All nodes below the root, inner ones first."""
    found = [module for module in model.modules() if isinstance(module, Node)]
    return found[:0:-1]


def case_of(tree: Tree) -> Case:
    def units(model: nn.Module) -> list[nn.Module]:
        return [node for node in nodes(model) if node.tree.unit]

    def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
        return (*normal_batch(2, 3)(step, rank, dtype), step)

    return Case("generated", lambda: Node(tree), units, batch)


def train(plan: Plan) -> None:
    """The body of the test, on every rank."""
    case = case_of(plan.tree)
    options: dict[str, Any] = {"reshard_after_forward": plan.reshard_after_forward}
    if not RUNS_ON_TORCH:
        options["direct_min_bytes"] = plan.direct_min_bytes
    if plan.replicas > 1:
        shape = (plan.replicas, plan.world_size // plan.replicas)
        options["mesh"] = cached_mesh(*shape, names=("replicate", "shard"))
    model, plain = pair(case, **options)
    assert isinstance(model, FSDPModule)
    optimizers = [
        torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.02)
        for network in (model, plain)
    ]
    micro = 0
    for reduces in (plan.accumulate, plan.accumulate):
        for reduce in [*reduces, True]:
            model.set_requires_gradient_sync(reduce)
            model.set_reshard_after_backward(reduce or not plan.keep_gathered)
            run_both(case, model, plain, micro, average=reduce)
            micro += 1
        assert_sharded(model)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


def train_with_steps_in_backward(plan: Plan) -> int:
    """Two sharded models, one of which is stepped in backward: bit for bit the same.

    Returns:
        How many parameters were stepped in backward.
    """
    case = case_of(plan.tree)
    options: dict[str, Any] = {
        "reshard_after_forward": plan.reshard_after_forward,
        "direct_min_bytes": plan.direct_min_bytes,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    if plan.replicas > 1:
        shape = (plan.replicas, plan.world_size // plan.replicas)
        options["mesh"] = cached_mesh(*shape, names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = case.build()
    made: list[tuple[Any, Any]] = []
    for change in (step_in_backward, local_step):
        model = shard_case(case, copy.deepcopy(plain), **options)
        params = [p for p in model.parameters() if p.requires_grad]
        made.append((model, change(torch.optim.AdamW(params, lr=0.01))))
    micro = number = 0
    for step in range(4):
        for i, reduce in enumerate([*plan.accumulate, True]):
            for model, _ in made:
                model.set_requires_gradient_sync(reduce or step % 2 == 0)
                model.set_is_last_backward(i == len(plan.accumulate))
                model.set_reshard_after_backward(reduce or not plan.keep_gathered)
                case.loss(model, *case.batch(micro, dist.get_rank(), torch.float32)).backward()
            micro += 1
        for _, optimizer in made:
            parts = getattr(vars(optimizer).get("_fsdp2_backward_steps"), "_parts", ())
            number += sum(len(part.begun) for part in parts)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    return number


def trees(depth: int) -> st.SearchStrategy[Tree]:
    inside = st.lists(trees(depth - 1), max_size=3).map(tuple) if depth else st.just(())
    return st.builds(
        Tree,
        dim=st.integers(1, 9),
        bias=st.booleans(),
        unit=st.booleans(),
        repeats=st.sampled_from([1, 1, 2]),
        recomputed=st.sampled_from([False, False, True]),
        frozen=st.sampled_from([False, False, True]),
        skipped=st.sampled_from([None, None, None, 0, 1]),
        inside=inside,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tree = dataclasses.replace(draw(trees(2)), skipped=None)
    world_size = draw(st.sampled_from([1, 2, 3, 4]))
    divisors = [n for n in (1, 2, 4) if world_size % n == 0]
    accumulate = tuple(draw(st.lists(st.booleans(), max_size=2)))
    return Plan(
        tree=tree,
        world_size=world_size,
        reshard_after_forward=draw(st.sampled_from([None, True, False])),
        replicas=draw(st.sampled_from(divisors)),
        accumulate=accumulate,
        keep_gathered=draw(st.booleans()),
        direct_min_bytes=draw(st.sampled_from([None, 0, 60, 150])),
    )


# Shrinking would take minutes: an example is small as it is.
QUICK = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@QUICK
@given(plans())
def test_generated_training(plan: Plan) -> None:
    run_on(plan.world_size, train, plan)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(QUICK, max_examples=600)
@given(plans())
def test_many_generated_trainings(plan: Plan) -> None:
    run_on(plan.world_size, train, plan)


def stepped_in_backward(examples: int) -> int:
    """How many parameters were stepped in backward, of all examples together."""
    stepped = 0

    @settings(QUICK, max_examples=examples)
    @given(plans())
    def check(plan: Plan) -> None:
        nonlocal stepped
        stepped += sum(run_on(plan.world_size, train_with_steps_in_backward, plan))

    check()
    return stepped


@ours_only("torch has no such optimizer")
def test_generated_training_with_steps_in_backward() -> None:
    assert stepped_in_backward(12) > 50


@pytest.mark.long
@pytest.mark.timeout(1800)
@ours_only("torch has no such optimizer")
def test_many_generated_trainings_with_steps_in_backward() -> None:
    assert stepped_in_backward(200) > 1000
