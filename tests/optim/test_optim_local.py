"""Optimizer steps on local tensors: results of plain steps, with DTensors outside the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import lr_scheduler

from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.optim import local_step
from harness import cached_mesh, distributed
from models import BY_NAME, EVEN_MLP, LORA, MLP, TRANSFORMER
from optimizers import Lion, all_dtensors, assert_same_training, feed, train, trainable
from reference import (
    assert_same,
    assert_same_parameters,
    average_gradients,
    pair,
    run_both,
    whole,
)

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2, 3)
def test_steps_are_those_of_one_process(name: str) -> None:
    make, options = OPTIMIZERS[name]
    assert_same_training(
        *train(MLP, lambda p: local_step(make(p, **options)), lambda p: make(p, **options))
    )


@pytest.mark.parametrize(
    "name", ["sgd momentum", "adamw", "adamw foreach", "adamw fused", "adagrad"]
)
@distributed(2, 3)
def test_torch_over_dtensors_gives_the_same(name: str) -> None:
    make, options = OPTIMIZERS[name]
    trained = train(MLP, lambda p: make(p, **options), lambda p: make(p, **options))
    assert_same_training(*trained)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("local", [True, False])
@distributed(2)
def test_schedulers(name: str, local: bool) -> None:
    def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=0.01)
        return local_step(optimizer) if local else optimizer

    trained = train(MLP, ours, lambda p: torch.optim.AdamW(p, lr=0.01), scheduler=SCHEDULERS[name])
    assert_same_training(*trained)


@distributed(2)
def test_a_scheduler_made_before_goes_on_counting() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    local_step(optimizer)
    optimizer.step()
    scheduler.step()  # warns, which is an error in the tests, if it saw no step
    assert optimizer._opt_called
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    reference.step()
    assert_same_parameters(model, plain)


@distributed(2)
def test_groups_with_their_own_options_and_frozen_parameters() -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.03},
        ]

    for case in (LORA, TRANSFORMER):
        trained = train(
            case,
            lambda p: local_step(torch.optim.AdamW(groups(p), lr=0.01)),
            lambda p: torch.optim.AdamW(groups(p), lr=0.01),
            choose=lambda model: list(model.parameters()),
        )
        assert_same_training(*trained)


@distributed(2)
def test_some_parameters_have_gradients_in_some_steps_only() -> None:
    case = BY_NAME["conditional"]
    trained = train(
        case, lambda p: local_step(torch.optim.AdamW(p)), lambda p: torch.optim.AdamW(p)
    )
    assert_same_training(*trained)


@distributed(2, 4)
def test_replicas_and_offload() -> None:
    shape = (2, 1) if dist.get_world_size() == 2 else (2, 2)
    mesh = cached_mesh(*shape, names=("replicate", "shard"))
    for options in ({"mesh": mesh}, {"offload_policy": CPUOffloadPolicy()}):
        assert_same_training(
            *train(
                MLP,
                lambda p: local_step(torch.optim.AdamW(p)),
                lambda p: torch.optim.AdamW(p),
                **options,
            )
        )


@distributed(4)
def test_tensor_parallel_parameters() -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 18), nn.Tanh(), nn.Linear(18, 8)).double()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizers = [torch.optim.AdamW(network.parameters()) for network in (plain, model)]
    local_step(optimizers[1])
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("data"))
        inputs = torch.randn(3, 8, generator=generator, dtype=torch.float64)
        for network in (plain, model):
            network(inputs).square().mean().backward()
        average_gradients(plain, group=mesh.get_group("data"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name)
        torch.testing.assert_close(whole(parameter), expected.detach(), rtol=1e-8, atol=1e-10)


@distributed(2)
def test_everything_is_dtensors_outside_of_the_step() -> None:
    """For hooks and closures too; the gradients' memory is not held on to."""
    model, plain = pair(MLP)
    optimizer = local_step(torch.optim.AdamW(model.parameters()))
    seen: list[str] = []

    def look(what: str) -> None:
        seen.append(what)
        for p in model.parameters():
            assert isinstance(p, DTensor)
            assert any(p is q for q in optimizer.param_groups[0]["params"])
            assert all_dtensors(optimizer.state.get(p, {}).values())
            assert p.grad is None or isinstance(p.grad, DTensor)

    optimizer.register_step_pre_hook(lambda *_: look("pre"))
    optimizer.register_step_post_hook(lambda *_: look("post"))

    def closure() -> Tensor:
        look("closure")
        optimizer.zero_grad()
        loss = MLP.loss(model, *MLP.batch(0, dist.get_rank(), torch.float64))
        loss.backward()
        return loss

    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    expected = MLP.loss(plain, *batch)
    assert_same(optimizer.step(closure), expected, "loss")  # type: ignore[arg-type]
    assert seen == ["pre", "closure", "post"]
    expected.backward()
    average_gradients(plain)
    torch.optim.AdamW(plain.parameters()).step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-8, atol=1e-8)
    assert len(optimizer.state) == len(list(model.parameters()))
    stands = optimizer._local_view._stands.values()  # type: ignore[attr-defined]
    assert all(stand.plain.grad is None for stand in stands)


@distributed(2)
def test_an_exception_in_a_closure_or_step_leaves_everything_in_place() -> None:
    model, _ = pair(MLP)
    optimizer = local_step(torch.optim.SGD(model.parameters(), lr=0.1))

    def closure() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    params = optimizer.param_groups[0]["params"]
    assert all(isinstance(p, DTensor) for p in params)
    MLP.loss(model, *MLP.batch(0, 0, torch.float64)).backward()
    optimizer.step()


@distributed(2)
def test_state_that_was_saved_elsewhere_is_used() -> None:
    """Through torch's state dicts, of an optimizer that steps over DTensors and back."""
    model, plain = pair(MLP)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        if step % 2 == 1:
            state = copy.deepcopy(optimizer.state_dict())
            assert all(all_dtensors(each.values()) for each in state["state"].values())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if step % 4 == 1:
                local_step(optimizer)
                # Makes state, and stand-ins for it, that the loaded one has to replace.
                optimizer.param_groups[0]["lr"] = 0.0
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.load_state_dict(state)
        run_both(MLP, model, plain, step)
        feed(model, plain)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_training(model, plain, optimizer, reference)


FULL = StateDictOptions(full_state_dict=True)


@distributed(2)
def test_state_dicts_of_the_checkpoint_module() -> None:
    make, options = OPTIMIZERS["adamw"]
    model, plain, optimizer, reference = train(
        MLP, lambda p: local_step(make(p, **options)), lambda p: make(p, **options)
    )
    full = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    fresh = local_step(make(model.parameters(), **options))
    set_optimizer_state_dict(model, fresh, full, options=FULL)
    run_both(MLP, model, plain, 7)
    feed(model, plain)
    for each in (fresh, reference):
        each.step()
    assert_same_training(model, plain, fresh, reference)


@distributed(2)
def test_parameters_that_move_between_steps() -> None:
    """Their local tensors are others then."""
    model, plain = pair(MLP, dtype=torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    local_step(optimizers[0])
    for step, dtype in enumerate([torch.float32, torch.float64]):
        for network in (model, plain):
            network.to(dtype)
        run_both(MLP, model, plain, step, dtype=dtype)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@distributed(2)
def test_a_gradient_scaler_skips_the_step_on_every_rank(local: bool, fused: bool) -> None:
    """fp16 gradients of a model in fp16; one rank finds an infinite one."""
    model, _ = pair(MLP, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    if local:
        local_step(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = whole(model.get_parameter("0.weight"))
    for broken in (True, False):
        batch = MLP.batch(0, 0, torch.float32)
        with torch.autocast("cpu", torch.float16):
            output = model(*batch)
        scaler.scale((output.float() - 1).square().mean()).backward()
        weight = model.get_parameter("0.weight")
        assert isinstance(weight.grad, DTensor)
        if broken and dist.get_rank() == 1:
            weight.grad.to_local().fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        assert torch.equal(whole(weight), before) == broken


@pytest.mark.parametrize("local", [True, False])
@distributed(2)
def test_the_optimizer_steps_inside_backward(local: bool) -> None:
    model, plain = pair(MLP)
    optimizers = {}
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.01)
        optimizers[parameter] = local_step(optimizer) if local else optimizer

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        run_both(MLP, model, plain, step)
        assert all(p.grad is None for p in model.parameters())
        reference.step()
        reference.zero_grad()
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).detach()
        torch.testing.assert_close(whole(parameter), expected, rtol=1e-8, atol=1e-8)


@distributed(2)
def test_an_optimizer_of_a_users_own() -> None:
    trained = train(
        MLP, lambda p: local_step(Lion(p, lr=0.01), elementwise=True), lambda p: Lion(p, lr=0.01)
    )
    assert_same_training(*trained)


class Rows(Lion):
    """Not elementwise: its momentum is one number per row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.grad.flatten(1).mean(1) if p.ndim > 1 else p.grad


@distributed(2)
def test_what_is_refused() -> None:
    model, _ = pair(MLP)
    params = trainable(model)
    for optimizer, message in (
        (torch.optim.Adafactor(params), "Adafactor is not elementwise.*whole_step"),
        (torch.optim.LBFGS(params), "requires a closure"),
        (Rows(params, 0.1), "Rows is not elementwise: it keeps a different 'rows'"),
    ):
        kind = type(optimizer)
        with pytest.raises(TypeError, match=message):
            local_step(optimizer)
        assert type(optimizer) is kind
    with pytest.raises(ValueError, match="differentiable"):
        local_step(torch.optim.SGD(params, lr=0.1, differentiable=True))
    replaced = torch.optim.SGD(params, lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match="has already been replaced"):
        local_step(replaced)
    twice = local_step(torch.optim.SGD(params, lr=0.1))
    assert local_step(twice) is twice
    MLP.loss(model, *MLP.batch(0, 0, torch.float64)).backward()
    rows = local_step(Rows(params, 0.1), elementwise=True)
    with pytest.raises(RuntimeError, match="Rows keeps 'rows' of shape"):
        rows.step()


@distributed(2)
def test_copies_of_an_optimizer() -> None:
    model, _, optimizer, _ = train(
        EVEN_MLP, lambda p: local_step(torch.optim.SGD(p, momentum=0.9)), torch.optim.SGD, steps=1
    )
    other = copy.deepcopy(optimizer)
    assert isinstance(other, torch.optim.SGD)
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    before = whole(model.get_parameter("0.weight"))
    other.step()
    assert torch.equal(whole(model.get_parameter("0.weight")), before)
    changed = other.param_groups[0]["params"][0]
    assert not torch.equal(whole(changed), before)
