"""`step_in_backward`: parameters are stepped while backward goes on, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import harness
from fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    full_state_dict,
    fully_shard,
    offload_optimizer,
)
from fsdp2.common.steppers import registered
from fsdp2.optim import clip_grad_norm_, flat_step, local_step, step_in_backward
from fsdp2.optim.in_backward import _STEPS
from fsdp2.runtime.unit import unit_of
from harness import cached_mesh, cpu_only, distributed, ours_only

pytestmark = ours_only("torch has no such optimizer")
HOST = CPUOffloadPolicy()


class Model(nn.Module):
    """A frozen layer, one that has a gradient in every second step only, one that runs twice, and
    parameters of the root beside the blocks; no dim is divided evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(37))
        self.blocks = nn.ModuleList(nn.Linear(37, 37) for _ in range(6))
        self.twice = nn.Linear(37, 37)
        self.rare = nn.Linear(37, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = self.twice(x * self.scale).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        x = self.twice(self.frozen(x))
        return self.rare(x) if rare else x


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    options.setdefault("mesh", cached_mesh(dist.get_world_size()))
    options.setdefault("offload_policy", HOST)
    for block in (*model.blocks, model.twice, model.rare, model.frozen):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def loss_of(model: nn.Module, step: int, **inputs: Any) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(5, 37, generator=generator, device="cpu")
    return model(x.to(torch.get_default_device()), **inputs).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        loss_of(model, step, rare=step % 2 == 1).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def local(tensor: Any) -> Any:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu() if isinstance(found, Tensor) else found


def assert_same(model: nn.Module, optimizer: Any, other: nn.Module, right: Any) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name
        assert list(optimizer.state[a]) == list(right.state[b])
        for key, value in right.state[b].items():
            assert torch.equal(local(optimizer.state[a][key]), local(value)), (name, key)


def parts_of(optimizer: Any) -> list[Any]:
    steps = vars(optimizer).get("_fsdp2_backward_steps")
    return [] if steps is None else steps._parts


def stepped(optimizer: Any) -> list[str]:
    """Names of the parameters that are being stepped now, in their order."""
    return [begun.name for part in parts_of(optimizer) for begun in part.begun]


def both(make: Any = adam, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model with a step in backward, and an equal one with an ordinary step."""
    model, right_model = sharded(**options), sharded(**options)
    return model, step_in_backward(make(model)), right_model, make(right_model)


def in_the_middle(model: Any, call: Any) -> None:
    """Calls ``call`` in each backward when it leaves the first block."""

    def watch(module: nn.Module, args: Any) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: call())

    model.blocks[0].register_forward_pre_hook(watch)


@pytest.mark.parametrize("kind", ["adam", "fused", "sgd"])
@distributed(1, 2, 3)
def test_results_are_those_of_an_ordinary_step(kind: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return adam(model, fused=kind == "fused", amsgrad=True)

    model, optimizer, right_model, right = both(make)
    assert type(optimizer).__name__.startswith("InBackward")
    train(right_model, right, range(7))
    train(model, optimizer, range(7))
    assert_same(model, optimizer, right_model, right)


@pytest.mark.parametrize("options", ["mixed", "kept", "gathered", "int", "budget", "by hand"])
@distributed(4)
def test_results_with_other_settings(options: str) -> None:
    given: dict[str, Any] = {
        "mixed": {
            "mesh": cached_mesh(2, 2, names=("replicate", "shard")),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
        },
        "int": {"reshard_after_forward": 2},
    }.get(options, {})
    model, optimizer, right_model, right = both(**given)
    if options in ("kept", "gathered"):
        for each in (model, right_model):
            each.set_reshard_after_backward(options == "gathered")
            each.set_reshard_after_forward(False)
    for each in (model, right_model):
        if options == "budget":
            each.set_max_gathered_bytes(40_000)
        if options == "by hand":
            for block in each.blocks:
                block.set_modules_to_backward_prefetch(list(each.blocks))
    train(right_model, right, range(4))
    train(model, optimizer, range(4))
    assert_same(model, optimizer, right_model, right)


@distributed(2)
def test_parameters_are_stepped_while_backward_goes_on() -> None:
    model = sharded()
    optimizer = step_in_backward(adam(model, fused=True))
    seen: list[list[str]] = []
    before = after = torch.empty(0)

    def look() -> None:
        nonlocal after
        seen.append(stepped(optimizer))
        for part in parts_of(optimizer):
            part.future.result(timeout=60)
        after = local(model.blocks[5].weight).clone()

    train(model, optimizer, range(2))
    in_the_middle(model, look)
    before = local(model.blocks[5].weight).clone()
    loss_of(model, 2).backward()
    # Two units' gradients may be in flight.
    assert seen[0][:2] == ["blocks.5.weight", "blocks.5.bias"]
    # Twice in forward: its gradient is complete at the very end.
    assert "twice.weight" not in seen[0]
    assert not torch.equal(before, after)
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert set(stepped(optimizer)) == trained
    optimizer.step()
    assert stepped(optimizer) == []
    assert torch.equal(local(model.blocks[5].weight), after)
    # As after any step.
    assert all(dict(model.named_parameters())[name].grad is not None for name in trained)


@distributed(1)
def test_shards_that_compute_are_left_to_the_step() -> None:
    """On one rank of the CPU nothing is gathered: backward may still read what it computes with."""
    model, optimizer, right_model, right = both()
    train(right_model, right, range(3))
    train(model, optimizer, range(3))
    loss_of(model, 3).backward()
    if torch.get_default_device().type == "cpu":
        assert stepped(optimizer) == []
    optimizer.step()
    loss_of(right_model, 3).backward()
    right.step()
    assert_same(model, optimizer, right_model, right)


@pytest.mark.parametrize("how", ["sync", "sharded", "last", "manual"])
@distributed(2)
def test_accumulation(how: str) -> None:
    model, optimizer, right_model, right = both()
    for each in (model, right_model):
        each.set_manual_backward_finalization(how == "manual")
        each.set_accumulate_sharded(how == "sharded")
    for step in range(4):
        for each, stepping in ((model, optimizer), (right_model, right)):
            for micro in range(3):
                if how in ("sync", "sharded"):
                    each.set_requires_gradient_sync(micro == 2)
                elif how == "last":
                    each.set_is_last_backward(micro == 2)
                loss_of(each, 3 * step + micro, rare=micro < 2).backward()
                if each is model and micro < 2:
                    assert step == 0 or stepped(optimizer) == []
            if how == "manual":
                each.finalize_backward()
            if each is model and how == "manual":
                assert stepped(optimizer) == []  # no backward is going on
            elif each is model and step > 1:
                # What the last backward does not use is left to the step.
                assert "blocks.2.weight" in stepped(optimizer)
                assert ("rare.weight" in stepped(optimizer)) == (how == "sync")
            stepping.step()
            stepping.zero_grad()
    assert_same(model, optimizer, right_model, right)


@distributed(2)
def test_two_backwards_of_two_forwards() -> None:
    """Which is the last one tells what is still to come: no setting."""
    model, optimizer, right_model, right = both()
    for step in range(4):
        for each, stepping in ((model, optimizer), (right_model, right)):
            losses = [loss_of(each, 2 * step + i) for i in range(2)]
            losses[0].backward()
            if each is model:
                assert stepped(optimizer) == []
            losses[1].backward()
            if each is model and step > 1:
                assert "blocks.2.weight" in stepped(optimizer)
            stepping.step()
            stepping.zero_grad()
    assert_same(model, optimizer, right_model, right)


@distributed(4)
def test_sums_that_wait_for_an_all_reduce() -> None:
    """Beside gradients of the step before, which nothing has dropped."""
    model, optimizer, right_model, right = both(
        mesh=cached_mesh(2, 2, names=("replicate", "shard"))
    )
    for step in range(4):
        for each, stepping in ((model, optimizer), (right_model, right)):
            for micro in range(2):
                each.set_requires_all_reduce(micro == 1)
                loss_of(each, 2 * step + micro).backward()
                if each is model and micro == 0:
                    assert stepped(optimizer) == []
            stepping.step()
    assert stepped(optimizer) == []
    assert_same(model, optimizer, right_model, right)


class Norm(nn.Module):
    """A norm of parts of a sequence, whose gradient is summed when backward is over."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        weight = distribute_tensor(torch.randn(8), mesh, [Replicate()])
        self.norm.weight = nn.Parameter(weight)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        parts = distribute_tensor(x, self.mesh, [Replicate()]).redistribute(self.mesh, [Shard(1)])
        return self.norm(parts).full_tensor()


@cpu_only("DTensors of the CPU")
@distributed(4)
def test_gradients_that_tensor_parallelism_sums_last() -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    made: list[tuple[nn.Module, Any]] = []
    for change in (step_in_backward, local_step):
        torch.manual_seed(0)
        model = fully_shard(Norm(mesh["tensor"]), mesh=mesh["data"])
        made.append((model, change(torch.optim.Adam(model.parameters(), lr=0.1))))
    for step in range(4):
        generator = torch.Generator().manual_seed(2 * step + mesh.get_local_rank("data"))
        x = torch.randn(2, 4, 8, generator=generator)
        for model, optimizer in made:
            model(x).square().mul(torch.arange(8.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*made[0], *made[1])


@distributed(2)
def test_second_derivatives_are_left_to_the_step() -> None:
    model, optimizer, right_model, right = both()
    for step in range(4):
        for each, stepping in ((model, optimizer), (right_model, right)):
            loss_of(each, step).backward(create_graph=step == 3)
            if each is model and step > 1:
                assert bool(stepped(optimizer)) == (step == 2)
            stepping.step()
            stepping.zero_grad()
    assert_same(model, optimizer, right_model, right)


@distributed(2)
def test_several_optimizers_plain_parameters_and_closures() -> None:
    def make(model: Any) -> list[torch.optim.Optimizer]:
        own = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        extra = nn.Parameter(torch.ones(3, device="cpu"))
        extra.grad = torch.ones(3, device="cpu")
        weights = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        return [
            torch.optim.Adam(own, lr=0.01),
            torch.optim.SGD([*weights, extra], lr=0.01, momentum=0.5),
        ]

    model, right_model = sharded(), sharded()
    optimizers = [step_in_backward(each) for each in make(model)]
    rights = make(right_model)
    for step in range(4):
        for each, (first, second) in ((model, optimizers), (right_model, rights)):

            def closure(each: Any = each, step: int = step) -> Tensor:
                loss = loss_of(each, step)
                loss.backward()
                return loss

            loss = first.step(closure)
            assert isinstance(loss, Tensor)
            if each is model and step > 1:
                assert stepped(first) == []
                assert stepped(second)[0] == "blocks.5.weight"
            second.step()
    for optimizer, right in zip(optimizers, rights, strict=True):
        for group, other in zip(optimizer.param_groups, right.param_groups, strict=True):
            for a, b in zip(group["params"], other["params"], strict=True):
                assert torch.equal(local(a), local(b))


@distributed(2)
def test_state_dicts_are_those_of_an_ordinary_step() -> None:
    model, optimizer, right_model, right = both()
    train(right_model, right, range(3))
    train(model, optimizer, range(3))
    assert list(map(id, optimizer.state)) == [
        id(p) for g in optimizer.param_groups for p in g["params"] if p in optimizer.state
    ]
    saved = copy.deepcopy(optimizer.state_dict())
    # Loaded by an optimizer of the other kind, both ways, and by a copy.
    optimizer.load_state_dict(copy.deepcopy(right.state_dict()))
    right.load_state_dict(saved)
    train(right_model, right, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert_same(model, optimizer, right_model, right)
    copied = copy.deepcopy([model, optimizer])
    train(copied[0], copied[1], range(6, 9))
    train(right_model, right, range(6, 9))
    assert_same(copied[0], copied[1], right_model, right)


# -- gradients that are freed ------------------------------------------------------------------


def freeing() -> tuple[Any, Any, Any, Any]:
    """As `both`; the first optimizer frees gradients."""
    model, right_model = sharded(), sharded()
    optimizer = step_in_backward(adam(model), free_gradients=True)
    return model, optimizer, right_model, adam(right_model)


def freed_gradients(model: Any) -> set[str]:
    """Names of parameters without memory for a reduced gradient, though they have had some."""
    buckets = [b for m in model.modules() if hasattr(m, "unshard") for b in unit_of(m).buckets]
    freed = [b for b in buckets if b.grads is not None and b.grads.is_free]
    return {param.fqn for bucket in freed for param in bucket.params}


def wait_for_steps(optimizer: Any) -> None:
    for part in parts_of(optimizer):
        part.future.result(timeout=60)


@distributed(2)
def test_gradients_are_freed_when_their_step_is_over() -> None:
    model, optimizer, right_model, right = freeing()
    train(model, optimizer, range(2))
    train(right_model, right, range(2))
    over: list[str] = []
    go_on = threading.Event()

    def wait() -> None:
        wait_for_steps(optimizer)
        over.extend(stepped(optimizer))
        # Whether later ones are over when backward is would be chance: none is.
        vars(optimizer)[_STEPS]._worker.submit(go_on.wait)

    in_the_middle(model, wait)
    loss_of(model, 2).backward()
    loss_of(right_model, 2).backward()
    freed, later = freed_gradients(model), stepped(optimizer)[len(over) :]
    go_on.set()
    assert over
    assert later
    assert freed - freed_gradients(right_model) == set(over)
    optimizer.step()
    right.step()
    assert all(p.grad is None for p in model.parameters())
    assert_same(model, optimizer, right_model, right)


@distributed(2, 3)
def test_training_that_frees_gradients_is_the_same() -> None:
    model, optimizer, right_model, right = freeing()
    train(right_model, right, range(6))
    for step in range(6):  # without `zero_grad`
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.9**step
        loss_of(model, step, rare=step % 2 == 1).backward()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    for a, b in zip(model.parameters(), right_model.parameters(), strict=True):
        assert torch.equal(local(a), local(b))


@distributed(2)
def test_a_gradient_that_somebody_keeps_is_not_freed() -> None:
    model, optimizer, right_model, right = freeing()
    kept: list[Any] = []
    for step in range(5):
        if step == 3:
            weight = model.blocks[3].weight
            handle = weight.register_post_accumulate_grad_hook(
                lambda p: kept.append(p.grad.to_local()[1:])
            )
        for each, stepping in ((model, optimizer), (right_model, right)):
            loss_of(each, step).backward()
            stepping.step()
            if step == 3 and each is right_model:
                wanted = local(right_model.blocks[3].weight.grad)[1:].clone()
            stepping.zero_grad()
        if step == 3:
            handle.remove()
    assert torch.equal(kept[0].cpu(), wanted)
    assert_same(model, optimizer, right_model, right)


# -- what comes too late ----------------------------------------------------------------------


def _clip(model: Any) -> None:
    clip_grad_norm_(model.parameters(), 1e-3)


def _torch_clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)


def _clip_values(model: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def _unscale(model: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), device="cpu"))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


def _norm(model: Any) -> None:
    torch.linalg.vector_norm(model.blocks[1].bias.grad)


def _zero(model: Any) -> None:
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)


@pytest.mark.parametrize("use", [_clip, _torch_clip, _clip_values, _unscale, _norm, _zero])
@distributed(2)
def test_a_gradient_is_not_used_while_its_parameter_is_stepped(use: Any) -> None:
    model, optimizer, right_model, right = both()
    for step in range(4):
        for each, stepping in ((model, optimizer), (right_model, right)):
            loss_of(each, step).backward()
            if each is model and step > 1:
                with pytest.raises(RuntimeError, match="step in backward uses already"):
                    use(model)
                assert repr(model.blocks[1].bias.grad) == "SteppedGradient('blocks.1.bias')"
            stepping.step()
        for (name, p), other in zip(
            model.named_parameters(), right_model.parameters(), strict=True
        ):
            assert (p.grad is None) == (other.grad is None), name
            assert p.grad is None or torch.equal(local(p.grad), local(other.grad)), name
        optimizer.zero_grad()
        right.zero_grad()
    assert_same(model, optimizer, right_model, right)


def _rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _write(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model.blocks[2].weight.mul_(0.5)


def _write_locally(model: Any, optimizer: Any) -> None:
    model.blocks[2].weight.to_local().detach().mul_(0.5)


def _drop(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def _replace(model: Any, optimizer: Any) -> None:
    model.blocks[2].weight.grad = torch.zeros_like(model.blocks[2].weight)


def _scale(model: Any, optimizer: Any) -> None:
    optimizer.grad_scale = torch.ones(())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_rate, "^lr of AdamW was changed"),
        (_write, "'blocks.2.weight' .* value was changed"),
        (_write_locally, "'blocks.2.weight' .* value was changed"),
        (_drop, "gradient was replaced"),
        (_replace, "'blocks.2.weight' .* gradient was replaced"),
        (_scale, "gradient scale"),
    ],
)
@distributed(2)
def test_what_is_changed_after_the_step_began_is_an_error(change: Any, what: str) -> None:
    model = sharded()
    optimizer = step_in_backward(adam(model))
    train(model, optimizer, range(2))
    loss_of(model, 2).backward()
    change(model, optimizer)
    with pytest.raises(RuntimeError, match=what):
        optimizer.step()
    if change in (_rate, _write):  # gradients can be read again
        assert all(type(p.grad) in (DTensor, type(None)) for p in model.parameters())
    optimizer.zero_grad()
    vars(optimizer).pop("grad_scale", None)
    train(model, optimizer, range(3, 5))  # said once


@pytest.mark.parametrize("change", [_write, _write_locally])
@distributed(2)
def test_what_is_changed_before_the_thread_comes_to_it_is_an_error(change: Any) -> None:
    """Whether a rank's thread is fast makes no difference."""
    model = sharded()
    optimizer = step_in_backward(adam(model))
    train(model, optimizer, range(3))
    go_on = threading.Event()
    vars(optimizer)[_STEPS]._worker.submit(go_on.wait)
    loss_of(model, 3).backward()
    change(model, optimizer)
    go_on.set()
    with pytest.raises(RuntimeError, match=r"'blocks.2.weight' .* value was changed"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))


class Gated(torch.optim.SGD):
    """Its threads end a step, with all that it writes, when they may go on."""

    began, may_go_on = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            assert self.may_go_on.wait(60)
        return result


@pytest.mark.parametrize("locally", [False, True])
@distributed(2)
def test_what_is_changed_while_it_is_stepped_is_an_error(locally: bool) -> None:
    Gated.may_go_on.set()
    model = sharded()
    optimizer = step_in_backward(Gated(model.parameters(), lr=0.01, momentum=0.9))
    train(model, optimizer, range(3))
    Gated.began.clear()
    Gated.may_go_on.clear()
    loss_of(model, 3).backward()
    assert Gated.began.wait(60)
    stepping = vars(optimizer)[_STEPS]._parts[0].begun[0]
    with torch.no_grad():
        (stepping.param.to_local() if locally else stepping.param).mul_(0.5)
    Gated.may_go_on.set()
    with pytest.raises(RuntimeError, match=f"'{stepping.name}' .* value was changed"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))


class Pieces(nn.Module):
    """Reentrant checkpoints: runs of autograd of their own, each of which adds to gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(37, 37)
        self.outer = nn.Linear(37, 37)

    def forward(self, x: Tensor, pieces: int) -> Tensor:
        x = self.outer(x)
        for _ in range(pieces):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def in_pieces() -> Any:
    torch.manual_seed(0)
    model, mesh = Pieces(), cached_mesh(dist.get_world_size())
    for each in (model.inner, model):
        fully_shard(each, mesh=mesh, offload_policy=HOST)
    return model


@distributed(2)
def test_a_gradient_that_comes_in_pieces_is_waited_for() -> None:
    model, right_model = in_pieces(), in_pieces()
    optimizer, right = step_in_backward(adam(model)), adam(right_model)
    for step in range(4):
        for each, stepping in ((model, optimizer), (right_model, right)):
            loss_of(each, step, pieces=3).backward()
            if each is model and step > 1:
                assert stepped(optimizer)[:2] == ["inner.weight", "inner.bias"]
            stepping.step()
            stepping.zero_grad()
    assert_same(model, optimizer, right_model, right)


@distributed(2)
def test_a_gradient_that_comes_in_more_pieces_than_ever_is_an_error() -> None:
    model = in_pieces()
    optimizer = step_in_backward(adam(model))
    for step in range(2):
        loss_of(model, step, pieces=2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="second one in the same backward"):
        loss_of(model, 2, pieces=5).backward()
    with pytest.raises(RuntimeError, match="one step ahead"):
        loss_of(model, 3, pieces=2)


@cpu_only("elsewhere a thread of autograd raises, while another launches collectives")
@distributed(2)
def test_a_gradient_of_the_shard_itself_that_comes_later_is_an_error() -> None:
    model = sharded()
    optimizer = step_in_backward(adam(model))
    train(model, optimizer, range(2))
    # Before forward, so backward comes to it last.
    penalty = model.blocks[5].weight.sum().full_tensor()
    with pytest.raises(RuntimeError, match="step in backward uses already"):
        (loss_of(model, 2) + penalty.to(torch.get_default_device())).backward()


@distributed(2)
def test_a_backward_without_a_step_is_an_error() -> None:
    model, optimizer, right_model, right = both()
    train(model, optimizer, range(2))
    train(right_model, right, range(2))
    loss = loss_of(model, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^A forward ran between"):
        loss_of(model, 3)
    for call in (
        lambda: loss.backward(retain_graph=True),
        lambda: model.blocks[1].unshard(),
        model.state_dict,
        lambda: full_state_dict(model),
        lambda: copy.deepcopy(model),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
    ):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"optimizer.step\(\), which has yet to"):
                call()
    optimizer.step()
    loss_of(right_model, 2).backward()
    right.step()
    for each in (model, right_model):
        each.zero_grad()
    train(model, optimizer, range(3, 5))
    train(right_model, right, range(3, 5))
    assert_same(model, optimizer, right_model, right)


# -- failures ---------------------------------------------------------------------------------


def fails_in_the_middle(model: Any, step: int) -> None:
    """A backward that raises when it leaves the first block; later ones do not."""
    errors = [ArithmeticError("planned")]

    def fail() -> None:
        if errors:
            raise errors.pop()

    in_the_middle(model, fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, step).backward()


@pytest.mark.parametrize("then", ["forward", "reset", "step"])
@distributed(2)
def test_a_backward_that_raises_says_what_it_has_stepped(then: str) -> None:
    model, optimizer, right_model, right = both()
    train(model, optimizer, range(3))
    train(right_model, right, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    harness.stop_accounts()  # which raise in the step that comes after a lost gradient
    try:
        fails_in_the_middle(model, 3)
        call = {
            "forward": lambda: loss_of(model, 3),
            "reset": model.reset_iter_state,
            "step": optimizer.step,
        }[then]
        with pytest.raises(RuntimeError, match=r"blocks.5.weight.*one step ahead"):
            call()
    finally:
        harness.start_accounts()
    # Once; with what was loaded everything is as if nothing had been.
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    train(model, optimizer, range(3, 6))
    train(right_model, right, range(3, 6))
    assert_same(model, optimizer, right_model, right)


@pytest.mark.parametrize("model_first", [True, False])
@distributed(2)
def test_a_checkpoint_may_be_loaded_at_once_after_a_failure(model_first: bool) -> None:
    model, optimizer, right_model, right = both()
    train(model, optimizer, range(3))
    train(right_model, right, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fails_in_the_middle(model, 3)
    loads = [
        lambda: model.load_state_dict(saved[0]),
        lambda: optimizer.load_state_dict(saved[1]),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    train(model, optimizer, range(3, 6))
    train(right_model, right, range(3, 6))
    assert_same(model, optimizer, right_model, right)


@distributed(2)
def test_an_optimizer_without_state_has_nothing_to_load() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer, right_model, right = both(make)
    train(model, optimizer, range(3))
    train(right_model, right, range(3))
    saved = copy.deepcopy(model.state_dict())
    fails_in_the_middle(model, 3)
    model.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(right_model, right, range(3, 6))
    for a, b in zip(model.parameters(), right_model.parameters(), strict=True):
        assert torch.equal(local(a), local(b))


@distributed(2)
def test_a_unit_that_was_stepped_is_not_gathered_again() -> None:
    """Backward would go on with the parameters of the next step."""
    model = sharded()
    optimizer = step_in_backward(adam(model))
    train(model, optimizer, range(2))
    in_the_middle(model, lambda: model.blocks[5].unshard())
    with pytest.raises(RuntimeError, match=r"Unit 'blocks.5' was gathered between"):
        loss_of(model, 2).backward()


@distributed(2)
def test_an_error_of_the_thread_is_raised_by_the_step() -> None:
    class Failing(torch.optim.SGD):
        calls = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                raise ArithmeticError("planned")
            return super().step(closure)

    model = sharded()
    optimizer = step_in_backward(Failing(model.parameters(), lr=0.1), elementwise=True)
    train(model, optimizer, range(2))
    loss_of(model, 2).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()


@distributed(2)
def test_a_step_that_was_interrupted_can_be_called_again() -> None:
    model, optimizer, right_model, right = both()
    train(model, optimizer, range(3))
    train(right_model, right, range(3))
    loss_of(model, 3).backward()
    interrupted = mock.patch.object(Future, "exception", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    loss_of(right_model, 3).backward()
    right.step()
    assert_same(model, optimizer, right_model, right)


def threads() -> int:
    return sum("step-in-backward" in thread.name for thread in threading.enumerate())


@distributed(2)
def test_the_thread_ends_with_the_optimizer() -> None:
    model = sharded()
    optimizer = step_in_backward(adam(model))
    before = threads()
    train(model, optimizer, range(2))
    assert threads() == before  # not before it is needed
    train(model, optimizer, range(2, 4))
    assert threads() == before + 1
    number = len(registered)
    (thread,) = vars(optimizer)["_fsdp2_backward_steps"]._worker._threads
    del optimizer
    gc.collect()  # schedulers and step() refer to each other
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(registered) == number - 1


# -- what is refused --------------------------------------------------------------------------


class Clipping(torch.optim.SGD):
    """Writes to gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1, 1)
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Remembers something outside of its state."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class Warming(torch.optim.SGD):
    """Writes to its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Clipping, "writes to gradients"), (Counting, r"\(count\)"), (Warming, r"\(number\)")],
)
@distributed(2)
def test_optimizers_that_cannot_be_stepped_in_parts_say_so_in_their_first_step(
    kind: Any, what: str
) -> None:
    model = sharded()
    optimizer = step_in_backward(kind(model.parameters(), lr=0.1), elementwise=True)
    loss_of(model, 0).backward()
    with pytest.raises(TypeError, match=what):
        optimizer.step()


@distributed(2)
def test_what_cannot_be_stepped_in_backward_is_refused() -> None:
    model = sharded()
    params = list(model.parameters())
    with pytest.raises(TypeError, match="not elementwise"):
        step_in_backward(torch.optim.Adafactor(params))
    with pytest.raises(TypeError, match="requires a closure"):
        step_in_backward(torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match="differentiable"):
        step_in_backward(torch.optim.SGD(params, differentiable=True))
    for other, advice in (
        (local_step, "build it anew for"),
        (flat_step, "in one call, with fused=True or foreach=True: leave out flat_step"),
        (offload_optimizer, "in host memory is there anyway, so leave out offload_optimizer"),
    ):
        for first, second in ((other, step_in_backward), (step_in_backward, other)):
            made: Any = first(torch.optim.SGD(params))
            with pytest.raises(
                ValueError, match=f"by {first.__name__}, and {second.__name__} .* {advice}"
            ):
                second(made)
    optimizer = step_in_backward(torch.optim.SGD(params))
    assert step_in_backward(optimizer) is optimizer
