"""Activation checkpointing: how often units are gathered, and what recomputation may look like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_activation_checkpoint import PLACES, case_of
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from gathers import bytes_held, counting, gathered_bytes
from harness import cached_mesh, distributed, ours_only
from models import TRANSFORMER, Case, normal_batch
from reference import (
    Training,
    assert_same_gradients,
    average_gradients,
    check_training,
    pair,
    run_both,
)

both_kinds = pytest.mark.parametrize("reentrant", [False, True])
mm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
Run = Callable[[Any, Tensor], Tensor]


class Chain(nn.Module):
    """Linear layers, run by a function in groups of so many."""

    def __init__(self, run: Run, group: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.run, self.group = run, group
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 6))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        blocks = list(self.blocks)
        for start in range(0, len(blocks), self.group):
            x = self.run(nn.Sequential(*blocks[start : start + self.group]), x)
        return x


def chain(run: Run, group: int = 1, **options: Any) -> Case:
    def units(model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())

    return Case("chain", lambda: Chain(run, group, **options), units, normal_batch(4, 5))


# -- gathers -------------------------------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "deep": {},
}


@ours_only("counts gathers of this library")
@both_kinds
@pytest.mark.parametrize("place", PLACES)
@distributed(2)
def test_no_unit_is_gathered_twice_in_a_backward(place: str, reentrant: bool) -> None:
    """Nor in forward, and nothing is left when backward is over. (pytorch#105635)"""
    for name, settings in SETTINGS.items():
        case = case_of(place, reentrant, deep=name == "deep")
        dtype = torch.float32 if name == "bf16" else torch.float64
        model: Any = pair(case, dtype=dtype, reshard_after_forward=True, **settings)[0]
        names = {parameter for parameter, _ in model.named_parameters()}
        with counting(model) as gathers:
            for step in range(3):
                gathers.clear()
                model.set_requires_gradient_sync(step > 0)
                case.loss(model, *case.batch(step, dist.get_rank(), dtype)).backward()
                assert gathers.forward == dict.fromkeys(names, 1), name
                assert gathers.most_often == 1, name
                assert bytes_held(model) == 0, name
            # At most what one region of recomputation holds, what is prefetched, and the root.
            region = {"around two units": 2}.get(place, 1) * (3 if name == "deep" else 1)
            assert gathers.peak_units <= region + 2, name


@ours_only("counts gathers of this library")
@both_kinds
@distributed(4)
def test_with_replicas_no_unit_is_gathered_twice(reentrant: bool) -> None:
    case = case_of("around two units", reentrant)
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(case, mesh=mesh, reshard_after_forward=True)
    with counting(model) as gathers:
        for step in range(2):
            gathers.clear()
            run_both(case, model, plain, step)
            assert gathers.most_often == 1
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()
    assert bytes_held(model) == 0


@ours_only("torch gathers when the recomputation begins")
@both_kinds
@distributed(2)
def test_gathers_for_recomputation_begin_before_it(reentrant: bool) -> None:
    """While the unit after it runs backward; of reentrant checkpoints from the second step on,
    when it is known that their units go backward."""
    early: list[bool] = []

    def run(block: Any, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                early.append(gathered_bytes(vars(block[0]).get("_fsdp2_unit", Nothing)) > 0)
            return block(x)

        return checkpoint(body, x, use_reentrant=reentrant)  # type: ignore[return-value]

    class Nothing:
        buckets = ()

    case = chain(run)
    model, _ = pair(case, reshard_after_forward=True)
    for step in range(3):
        early.clear()
        case.loss(model, *case.batch(step, dist.get_rank(), torch.float64)).backward()
        if step or not reentrant:
            assert early == [True, True, True, True]
    # Should it be run without gradients altogether, nothing is gathered for nothing.
    with torch.no_grad():
        model(*case.batch(0, 0, torch.float64))
    case.loss(model, *case.batch(0, dist.get_rank(), torch.float64)).backward()
    assert bytes_held(model) == 0


# -- kinds of checkpoints ------------------------------------------------------------------------


def policy_of(kind: str) -> Callable[..., CheckpointPolicy]:
    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = {"nothing": False, "all": True}.get(kind, operation in mm)
        if kind == "all but products":
            saves = not saves
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@ours_only("where several units are in one region, torch's gradients are wrong")
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind", ["nothing", "products", "all but products", "all"])
@distributed(2)
def test_selective_checkpoints(kind: str, group: int) -> None:
    """What is saved must not be what a gather does."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_of(kind))

    def run(block: Any, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    for direct_min_bytes in (0, 10**9):
        training = Training(steps=3)
        check_training(
            chain(run, group),
            training,
            reshard_after_forward=True,
            direct_min_bytes=direct_min_bytes,
        )


@both_kinds
@pytest.mark.parametrize("where", ["wrapper inside", "wrapper outside", "composable"])
@distributed(2)
def test_wrappers(where: str, reentrant: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def build() -> nn.Module:
        model = TRANSFORMER.build()
        blocks = model.get_submodule("blocks")
        for name, block in blocks.named_children():
            if where == "composable":
                composable_checkpoint(block)
            else:
                setattr(blocks, name, checkpoint_wrapper(block, checkpoint_impl=kind))
        return model

    def units(model: nn.Module) -> list[nn.Module]:
        blocks = list(model.get_submodule("blocks").children())
        if where == "wrapper outside":
            return [block.get_submodule("_checkpoint_wrapped_module") for block in blocks]
        return blocks

    case = Case("wrapped", build, units, TRANSFORMER.batch, TRANSFORMER.loss)
    check_training(case, Training(steps=5))


@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("debug", [True, False])
@distributed(2)
def test_early_stop_and_debug(stops_early: bool, debug: bool) -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(stops_early):
            return checkpoint(block, x, use_reentrant=False, debug=debug)  # type: ignore[return-value]

    check_training(chain(run, 2), Training(steps=5), reshard_after_forward=True)


@both_kinds
@pytest.mark.parametrize("preserves", [True, False])
@distributed(2)
def test_dropout(preserves: bool, reentrant: bool) -> None:
    """Recomputation draws the same numbers, or in both models the same others."""

    def run(block: Any, x: Tensor) -> Tensor:
        return checkpoint(  # type: ignore[return-value]
            block, x, use_reentrant=reentrant, preserve_rng_state=preserves
        )

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        result = model(x).square().mean()
        torch.manual_seed(6)
        return result

    base = chain(run, dropout=0.5)
    case = Case("dropout", base.build, base.units, base.batch, loss)
    model, plain = pair(case, reshard_after_forward=True)
    for step in range(2):
        batch = case.batch(step, dist.get_rank(), torch.float64)
        for each in (plain, model):
            case.loss(each, *batch).backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@both_kinds
@distributed(2)
def test_inputs_that_need_no_gradient(reentrant: bool) -> None:
    """A reentrant checkpoint has no gradients then, and says so; the others have all."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x + self.blocks[0](x)

    case = Case("first", First, lambda m: list(m.get_submodule("blocks")), normal_batch(4, 5))
    expected: Any = pytest.warns(UserWarning, match="None of the inputs have requires_grad")
    with expected if reentrant else nullcontext():
        check_training(case, Training(steps=3, bitwise=False), reshard_after_forward=True)


@ours_only("units stay gathered after a reentrant checkpoint in torch")
@both_kinds
@distributed(2)
def test_a_recomputation_that_raises(reentrant: bool) -> None:
    fails = [False]

    def fail(module: nn.Module, inputs: Any) -> None:
        if fails[0] and torch._C._current_graph_task_id() != -1:
            raise KeyError

    def run(block: Any, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[return-value]

    case = chain(run)
    model, plain = pair(case, reshard_after_forward=True)
    model.get_submodule("blocks.2.1").register_forward_pre_hook(fail)
    for step in range(3):
        fails[0] = step == 1
        batch = case.batch(step, dist.get_rank(), torch.float64)
        if fails[0]:
            with pytest.raises(KeyError):
                case.loss(model, *batch).backward()
            continue
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


class Region(nn.Module):
    """What is recomputed as a whole: two units, in the second of which recomputation ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.made: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.made.append(StorageWeakRef(hidden.untyped_storage()))
        return x + self.last(hidden)


@ours_only("torch's hooks hold no nodes of inputs")
@distributed(2)
def test_recomputed_activations_are_freed_when_backward_leaves_the_unit_they_end_in() -> None:
    """Not at the end of backward: the mark on the input of that unit leads to all before it."""
    left: list[bool] = []

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.regions = nn.Linear(6, 6), nn.ModuleList([Region(), Region()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.start(x)
            for region in self.regions:
                between, x = x, checkpoint(region, x, use_reentrant=False)
            between.register_hook(lambda _: left.append(not region.made[-1].expired()))
            return x

    model = Root()
    for unit in [*(unit for region in model.regions for unit in region.children()), model]:
        fully_shard(unit, mesh=cached_mesh(2))
    for step in range(2):
        model(torch.randn(3, 6)).sum().backward()
        assert len(model.regions[1].made) == 2 * (step + 1)
    assert left == [False, False]
