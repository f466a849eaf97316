"""Features that people use together, drawn at random: options of `fully_shard`, and what is done
to a model between steps and micro-batches, beside one process that only trains."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.func import functional_call
from torch.optim import SGD, Optimizer

import fsdp2
from fsdp2 import CPUOffloadPolicy, check_ranks_agree, explain
from fsdp2.checkpoint import Checkpointer
from harness import cached_mesh, distributed, ours_only, shared_folder
from models import BY_NAME, Case
from reference import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    run_both,
    shard_case,
)

pytestmark = ours_only("much of this")

CASES = ["mlp", "mlp_root_only", "transformer", "nested", "lora", "recurrent", "conditional"]


@dataclasses.dataclass
class Run:
    """A sharded model beside a plain one, and their optimizers."""

    case: Case
    options: dict[str, Any]
    local: bool
    model: Any
    plain: nn.Module
    optimizers: list[Optimizer]
    folder: str
    saved: int = 0

    def fresh(self) -> Any:
        """Another sharded model of this kind, with other weights."""
        torch.manual_seed(dist.get_rank())
        return shard_case(self.case, self.case.build().double(), **self.options)

    def take_over(self, model: Any) -> None:
        """Go on with another model; momentum starts anew on both sides."""
        self.model = model
        self.optimizers = [
            make_optimizer(model, self.local),
            make_optimizer(self.plain, False),
        ]


def make_optimizer(model: nn.Module, local: bool) -> Optimizer:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.03, momentum=0.5)
    return fsdp2.optim.local_step(optimizer) if local else optimizer


def options_of(draw: random.Random, size: int) -> dict[str, Any]:
    meshes: list[tuple[int, ...]] = [(size,), (size,), (2, size // 2), (1, size)]
    shape = draw.choice(meshes)
    options: dict[str, Any] = {"mesh": cached_mesh(*shape, names=("r", "s")[-len(shape) :])}
    reshards: list[bool | int | None] = [None, None, True, False]
    if shape[-1] == 4:
        reshards.append(2)
    options["reshard_after_forward"] = draw.choice(reshards)
    if draw.random() < 0.3:
        options["offload_policy"] = CPUOffloadPolicy()
    if draw.random() < 0.3:
        options["shard_placement_fn"] = lambda p: Replicate() if p.numel() < 30 else None
    return options


# -- what is done between --------------------------------------------------------------------------


def evaluate(run: Run) -> None:
    with torch.no_grad():
        batch = run.case.batch(90, dist.get_rank(), torch.float64)
        assert_same(run.case.loss(run.model, *batch), run.case.loss(run.plain, *batch), "loss")


def evaluate_with_other_weights(run: Run) -> None:
    other = copy.deepcopy(run.plain)
    twin = copy.deepcopy(run.model)
    with torch.no_grad():
        for param in [*other.parameters(), *twin.parameters()]:
            param.mul_(0.5)
    batch = run.case.batch(91, dist.get_rank(), torch.float64)
    given = dict(twin.named_parameters())

    class Called(nn.Module):
        def forward(self, *args: Any) -> Any:
            return functional_call(run.model, given, args)

    with torch.no_grad():
        loss = run.case.loss(Called(), *batch)
        assert_same(loss, run.case.loss(other, *batch), "loss with other weights")


def gather_by_hand(run: Run) -> None:
    run.model.unshard()
    run.model.reshard()


def fail(run: Run) -> None:
    """In forward, inside of the last unit."""
    handle = [*run.model.modules()][-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.case.loss(run.model, *run.case.batch(92, dist.get_rank(), torch.float64))
    handle.remove()


def look(run: Run) -> None:
    explain(run.model)
    check_ranks_agree(run.model)


def go_on_with_a_copy(run: Run) -> None:
    run.take_over(copy.deepcopy(run.model))


def load(run: Run) -> None:
    fresh = run.fresh()
    fresh.load_state_dict(run.model.state_dict())
    run.take_over(fresh)


def load_by_assignment(run: Run) -> None:
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def load_whole(run: Run) -> None:
    whole = fsdp2.full_state_dict(run.model)
    fresh = run.fresh()
    fsdp2.load_full_state_dict(fresh, whole)
    run.take_over(fresh)


def load_files(run: Run) -> None:
    """With the optimizer's state."""
    checkpointer = Checkpointer(run.folder)
    run.saved += 1
    checkpointer.save(run.saved, model=run.model, optimizer=run.optimizers[0])
    fresh = run.fresh()
    optimizer = make_optimizer(fresh, run.local)
    checkpointer.load(run.saved, model=fresh, optimizer=optimizer)
    run.model, run.optimizers[0] = fresh, optimizer


BETWEEN_MICRO_BATCHES: list[Callable[[Run], None]] = [
    evaluate,
    evaluate_with_other_weights,
    gather_by_hand,
    fail,
    look,
]
BETWEEN_STEPS = [
    *BETWEEN_MICRO_BATCHES,
    go_on_with_a_copy,
    load,
    load_by_assignment,
    load_whole,
    load_files,
]


def train(seed: int, folder: str) -> None:
    draw = random.Random(seed)
    size = dist.get_world_size()
    case = BY_NAME[draw.choice(CASES)]
    options = options_of(draw, size)
    local = draw.random() < 0.5
    torch.manual_seed(0)
    plain = case.build().double()
    model: Any = shard_case(case, copy.deepcopy(plain), **options)
    optimizers = [make_optimizer(model, local), make_optimizer(plain, False)]
    run = Run(case, options, local, model, plain, optimizers, folder)
    keep = draw.random() < 0.3
    accumulates = draw.choice(["unsharded", "sharded", "reduce_scatter"])
    micro = 0
    done = [f"seed {seed}: {case.name}, {options}, local {local}, {accumulates}"]
    try:
        for _ in range(3):
            if keep:
                run.model.set_keep_frozen_gathered()
            num_micros = draw.choice([1, 2, 3])
            run.model.set_accumulate_sharded(accumulates == "sharded")
            for index in range(num_micros):
                last = index == num_micros - 1
                if accumulates == "reduce_scatter":
                    run.model.set_requires_all_reduce(last)
                else:
                    run.model.set_requires_gradient_sync(last)
                done.append(f"micro-batch {micro}")
                run_both(case, run.model, plain, micro, average=False)
                micro += 1
                if not last and draw.random() < 0.5:
                    action = draw.choice(BETWEEN_MICRO_BATCHES)
                    done.append(action.__name__)
                    action(run)
            average_gradients(plain)
            assert_sharded(run.model)
            assert_same_gradients(run.model, plain)
            if draw.random() < 0.5:
                done.append("clip")
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                norm = fsdp2.clip_grad_norm_(run.model.parameters(), 0.1)
                assert_same(norm, expected, "norm")
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            action = draw.choice(BETWEEN_STEPS)
            done.append(action.__name__)
            action(run)
        assert_same_parameters(run.model, plain)
    except Exception as error:
        error.add_note("\n".join(done))
        raise


@distributed(4, long=(2,))
def test_trainings() -> None:
    with shared_folder() as folder:
        for seed in range(5):
            train(seed, f"{folder}/{seed}")


@pytest.mark.long
@pytest.mark.parametrize("first", range(5, 125, 10))
@distributed(2, 4, timeout_s=600)
def test_many_trainings(first: int) -> None:
    with shared_folder() as folder:
        for seed in range(first, first + 10):
            train(seed, f"{folder}/{seed}")
