"""`torch.func.functional_call` of sharded modules: a forward with other parameters than their own.

The peer computes with its own, without a word (and puts them into the dictionary it was given).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, stack_module_state
from torch.utils.checkpoint import checkpoint

import harness
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, replicate
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, LORA, MLP, TRANSFORMER, Case, normal_batch
from reference import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    own_part,
    pair,
    run_both,
    shard_case,
)

pytestmark = ours_only("torch's ignores other parameters")


class Called(nn.Module):
    """A loss computes with a model of this class as with any other."""

    def __init__(self, model: nn.Module, given: dict[str, Any]) -> None:
        super().__init__()
        self.call = lambda *args: functional_call(model, given, args)

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def other_weights(plain: nn.Module) -> nn.Module:
    """A plain model with weights of its own."""
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5).add_(0.1)
    return other


def given_as(kind: str, model: nn.Module, other: nn.Module) -> dict[str, Tensor]:
    """The weights of ``other`` as a user has them: sharded, or whole, or of another model."""
    if kind == "whole":
        return {name: p.detach() for name, p in other.named_parameters()}
    if kind == "model":  # an average of weights, for example
        twin = copy.deepcopy(model)
        twin.load_state_dict(other.state_dict())
        return dict(twin.named_parameters())
    given = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        value = other.get_parameter(name).detach()
        given[name] = param.detach().clone()
        given[name].to_local().copy_(own_part(value, param))
    return given


def assert_unharmed(
    case: Case, model: nn.Module, plain: nn.Module, given: dict[str, Tensor], before: dict
) -> None:
    """The module computes with its own parameters again, and the dictionary holds what it held."""
    assert given.keys() == before.keys()
    assert all(given[name] is value for name, value in before.items())
    assert_sharded(model)
    assert_same_parameters(model, plain, bitwise=True)
    run_both(case, model, plain, 7)
    assert_same_gradients(model, plain)
    model.zero_grad()
    plain.zero_grad()


KINDS = ["sharded", "whole", "model"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


EVALUATIONS = [
    *((name, kind, "plain") for name in ("mlp", "transformer") for kind in KINDS),
    *((name, "sharded", "plain") for name in ("nested", "lora", "recurrent")),
    *(("transformer", "sharded", options) for options in ("kept", "offload")),
]


@pytest.mark.parametrize(("name", "kind", "options"), EVALUATIONS)
@distributed(2, long=(3, 4))
def test_evaluation_with_other_weights(name: str, kind: str, options: str) -> None:
    """Before the first forward, after one, and between a forward and its backward."""
    case = BY_NAME[name]
    model, plain = pair(case, **OPTIONS[options])
    other = other_weights(plain)
    given = given_as(kind, model, other)
    before = dict(given)
    batch = case.batch(3, dist.get_rank(), torch.float64)
    for _ in range(2):
        with torch.no_grad():
            loss = case.loss(Called(model, given), *batch)
            assert_same(loss, case.loss(other, *batch), "loss")
        assert_unharmed(case, model, plain, given, before)
    waiting = case.loss(model, *batch)
    with torch.no_grad():
        assert_same(case.loss(Called(model, given), *batch), case.loss(other, *batch), "loss")
    waiting.backward()
    case.loss(plain, *batch).backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


def move(model: nn.Module) -> None:
    model.to(harness.DEVICE)


def write(model: nn.Module) -> None:
    """What is kept gathered is out of date."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1)


def load(model: nn.Module) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def leave_a_failed_forward(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.zeros(2, 3, dtype=torch.float64))


def leave_a_failed_backward(model: nn.Module) -> None:
    """It raises when all units have been through it."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("planned")

    x = MLP.batch(4, dist.get_rank(), torch.float64)[0].clone().requires_grad_()
    x.register_hook(fail)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="planned"):
        model(x).sum().backward()


BETWEEN = [move, write, load, leave_a_failed_forward, leave_a_failed_backward]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("between", BETWEEN)
@distributed(2)
def test_units_are_registered_anew_before_they_run(between: Any, kept: bool) -> None:
    """All units, by the gathers of the first ones or by the root."""
    model, plain = pair(MLP, reshard_after_forward=not kept)
    assert isinstance(model, FSDPModule)
    given = given_as("whole", model, other := other_weights(plain))
    batch = MLP.batch(3, dist.get_rank(), torch.float64)
    expected = MLP.loss(other, *batch)
    for _ in range(3):
        model.set_reshard_after_backward(not kept)
        run_both(MLP, model, plain, 7)
        with torch.no_grad():
            between(model)
            assert_same(MLP.loss(Called(model, given), *batch), expected, "loss")
        model.set_reshard_after_backward(True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model.zero_grad()
        plain.zero_grad()
        assert_unharmed(MLP, model, plain, given, dict(given))


class Again(nn.Module):
    """Modules run in another order each time, and some twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.parts[index](x).tanh()
        return x


AGAIN = Case("again", Again, lambda m: list(m.get_submodule("parts")), normal_batch(3, 4))


@pytest.mark.parametrize("budget", [False, True])
@distributed(2)
def test_units_run_twice_and_in_another_order(budget: bool) -> None:
    """What was kept to run again, or gathered ahead, is freed while other units run."""
    model, plain = pair(AGAIN)
    assert isinstance(model, FSDPModule)
    if budget:
        model.set_max_gathered_bytes(700)
    given = given_as("whole", model, other := other_weights(plain))
    batch = AGAIN.batch(3, dist.get_rank(), torch.float64)
    for order in [0, 0, 1, 2], [0, 1, 0, 2], [2, 1, 0, 0], [0, 0, 1, 2], [0, 2, 0, 1], [1, 1, 0, 1]:
        for module in (model, plain, other):
            vars(module)["order"] = order
        with torch.no_grad():
            loss = AGAIN.loss(Called(model, given), *batch)
            assert_same(loss, AGAIN.loss(other, *batch), f"loss in order {order}")
        assert_unharmed(AGAIN, model, plain, given, dict(given))


@pytest.mark.parametrize("options", ["plain", "kept"])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(2, 3, long=(4,))
def test_gradients_of_what_is_given(name: str, options: str) -> None:
    """Averaged over ranks, and sharded like it; the model's own parameters get none."""
    case = BY_NAME[name]
    model, plain = pair(case, **OPTIONS[options])
    other = other_weights(plain)
    given = {n: p.requires_grad_() for n, p in given_as("sharded", model, other).items()}
    before = dict(given)
    batch = case.batch(3, dist.get_rank(), torch.float64)
    for _ in range(2):
        case.loss(Called(model, given), *batch).backward()
        case.loss(other, *batch).backward()
        average_gradients(other)
        for key, value in given.items():
            expected = other.get_parameter(key).grad
            assert value.grad is not None
            assert expected is not None
            assert isinstance(value.grad, DTensor)
            assert value.grad.placements == value.placements  # type: ignore[attr-defined]
            assert_same(value.grad, expected, f"gradient of {key}")
            value.grad = None
        assert all(p.grad is None for p in model.parameters())
        other.zero_grad()
        assert_unharmed(case, model, plain, given, before)


@distributed(2)
def test_some_parameters_are_given() -> None:
    """The others are the module's own, and get their gradients as always."""
    model, plain = pair(MLP)
    names = ["0.weight", "2.bias"]
    given = {n: p.requires_grad_() for n, p in given_as("sharded", model, plain).items()}
    given = {name: given[name] for name in names}
    (x,) = MLP.batch(3, dist.get_rank(), torch.float64)
    functional_call(model, given, (x,)).square().mean().backward()
    plain(x).square().mean().backward()
    average_gradients(plain)
    for name, param in plain.named_parameters():
        grad = given[name].grad if name in names else model.get_parameter(name).grad
        assert grad is not None
        assert param.grad is not None
        assert_same(grad, param.grad, name)
    assert all(model.get_parameter(name).grad is None for name in names)


@distributed(4)
def test_replicas() -> None:
    case = BY_NAME["mlp"]
    model, plain = pair(case, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    other = other_weights(plain)
    given = {n: p.requires_grad_() for n, p in given_as("sharded", model, other).items()}
    batch = case.batch(3, dist.get_rank(), torch.float64)
    case.loss(Called(model, given), *batch).backward()
    case.loss(other, *batch).backward()
    average_gradients(other)
    for key, value in given.items():
        expected = other.get_parameter(key).grad
        assert value.grad is not None
        assert expected is not None
        assert_same(value.grad, expected, f"gradient of {key}")
    assert_unharmed(case, model, plain, given, dict(given))


@distributed(2)
def test_replicated_units_and_smaller_groups() -> None:
    case = BY_NAME["mlp"]
    model, plain = pair(case, reshard_after_forward=1)
    units = copy.deepcopy(plain)
    for unit in case.units(units):
        replicate(unit)
    replicate(units)
    other = other_weights(plain)
    batch = case.batch(3, dist.get_rank(), torch.float64)
    for sharded in (model, units):
        given = given_as("sharded", sharded, other)
        before = dict(given)
        with torch.no_grad():
            loss = case.loss(Called(sharded, given), *batch)
        assert_same(loss, case.loss(other, *batch), "loss")
        assert_unharmed(case, sharded, copy.deepcopy(plain), given, before)


@distributed(2)
def test_mixed_precision() -> None:
    """What is given is cast as the module's own parameters are."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain = MLP.build()
    model = shard_case(MLP, copy.deepcopy(plain), mp_policy=policy)
    other = other_weights(plain)
    twin = shard_case(MLP, copy.deepcopy(other), mp_policy=policy)
    (x,) = MLP.batch(3, dist.get_rank(), torch.float32)
    expected = twin(x)
    for kind in ("sharded", "whole"):
        given = {n: p.requires_grad_() for n, p in given_as(kind, model, other).items()}
        output = functional_call(model, given, (x,))
        assert torch.equal(output, expected)
        output.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in given.values())


@distributed(2)
def test_after_a_forward_that_failed() -> None:
    model, plain = pair(MLP)
    other = other_weights(plain)
    given = given_as("sharded", model, other)
    (x,) = MLP.batch(3, dist.get_rank(), torch.float64)
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            functional_call(model, given, (x,))
    handle.remove()
    with torch.no_grad():
        assert_same(functional_call(model, given, (x,)), other(x), "output")
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(2)
def test_a_forward_fails_before_the_backward_of_an_earlier_one() -> None:
    """Which recomputes its activations, with the module's own parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    model = copy.deepcopy(plain)
    inner = nn.Sequential(model[0], model[1], model[2])
    fully_shard(inner)

    def loss(x: Tensor) -> Tensor:
        result = checkpoint(inner, x, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result.square().mean()

    given = {name: p.detach() * 2 for name, p in inner.named_parameters()}
    x = torch.randn(3, 4, dtype=torch.float64)
    waiting = loss(x)
    handle = inner[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        functional_call(inner, given, (x,))
    handle.remove()
    waiting.backward()
    plain(x).square().mean().backward()
    average_gradients(plain)
    assert_same_gradients(inner, plain)


@distributed(2)
def test_evaluation_with_other_weights_right_after_a_move() -> None:
    """Units are planned anew inside of the call, which registers parameters of theirs."""
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    model._apply(torch.clone)
    given = given_as("whole", model, other := other_weights(plain))
    (x,) = MLP.batch(3, dist.get_rank(), torch.float64)
    with torch.no_grad():
        assert_same(functional_call(model, given, (x,)), other(x), "output")
        assert_same(model(x), plain(x), "output")


@distributed(2)
def test_units_that_stay_gathered_go_on_as_before() -> None:
    """They hold what they held, so that the next forward does not build their tree anew."""
    from fsdp2.runtime.unit import units_in  # torch's shim has none

    model, plain = pair(MLP, reshard_after_forward=False)
    run_both(MLP, model, plain, 0)
    runtimes = {unit: unit.runtime for unit in units_in(model)}
    given = given_as("whole", model, other := other_weights(plain))
    (x,) = MLP.batch(3, dist.get_rank(), torch.float64)
    with torch.no_grad():
        assert_same(functional_call(model, given, (x,)), other(x), "output")
        assert_same(model(x), plain(x), "output")
    assert all(unit.runtime is runtime for unit, runtime in runtimes.items())


class CallsInside(nn.Module):
    """Its forward computes with one of its layers as it is, then with other parameters of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.given: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = functional_call(self.first, self.given, (x,)) if self.given else self.first(x)
        assert isinstance(x, Tensor)
        return self.last(x.tanh())


INSIDE = Case("inside", CallsInside, lambda m: [m.get_submodule("first")], normal_batch(3, 4))


@pytest.mark.parametrize("options", ["plain", "kept"])
@distributed(2)
def test_a_call_inside_of_the_outermost_forward(options: str) -> None:
    """The layer's own parameters get the gradients of its own computation alone."""
    model, plain = pair(INSIDE, **OPTIONS[options])
    (x,) = INSIDE.batch(3, dist.get_rank(), torch.float64)
    for _ in range(2):
        for module in (model, plain):
            other = {"weight": torch.eye(4, dtype=torch.float64), "bias": x[0].detach()}
            vars(module)["given"] = other
        run_both(INSIDE, model, plain, 1)
        assert_same_gradients(model, plain)
        for module in (model, plain):
            vars(module)["given"] = {}
        run_both(INSIDE, model, plain, 2)
        assert_same_gradients(model, plain)
        for module in (model, plain):
            module.zero_grad()


@distributed(2)
def test_tied_parameters_have_one_value() -> None:
    model, plain = pair(TRANSFORMER)
    given = given_as("sharded", model, other_weights(plain))
    tokens, _ = TRANSFORMER.batch(1, dist.get_rank(), torch.float64)
    several = {**given, "head.weight": given["embedding.weight"].clone()}
    with pytest.raises((RuntimeError, ValueError), match=r"tied|same one under each name"):
        functional_call(model, several, (tokens,), tie_weights=False)


@distributed(2)
def test_transforms_of_whole_parameters() -> None:
    """An ensemble of plain models, computed by the hooks of a sharded one; gradients of them."""
    model, plain = pair(MLP)
    others = [plain, other_weights(plain)]
    stacked, _ = stack_module_state(others)
    (x,) = MLP.batch(3, dist.get_rank(), torch.float64)

    def loss(parameters: Any) -> Tensor:
        return functional_call(model, parameters, (x,)).square().mean()

    losses = torch.vmap(loss)({name: value.detach() for name, value in stacked.items()})
    for other, actual in zip(others, losses, strict=True):
        expected = other(x).square().mean()
        assert_same(actual, expected, "loss")
        expected.backward()
        found = grad(loss)({name: p.detach() for name, p in other.named_parameters()})
        for name, param in other.named_parameters():
            assert param.grad is not None
            assert_same(found[name], param.grad, name)
    other.zero_grad()
    plain.zero_grad()
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(2)
def test_frozen_parameters_kept_gathered() -> None:
    model, plain = pair(LORA)
    model.set_keep_frozen_gathered()  # type: ignore[operator]
    run_both(LORA, model, plain, 0)
    model.zero_grad()
    plain.zero_grad()
    other = other_weights(plain)
    given = given_as("sharded", model, other)
    batch = LORA.batch(3, dist.get_rank(), torch.float64)
    with torch.no_grad():
        assert_same(LORA.loss(Called(model, given), *batch), LORA.loss(other, *batch), "loss")
    assert_unharmed(LORA, model, plain, given, dict(given))


@pytest.mark.parametrize("mode", [None, False])
@distributed(2)
def test_the_first_forward_finds_a_unit_that_is_still_gathered(mode: bool | None) -> None:
    """By a forward of its own; the whole model would compute with its weights, not those given."""
    model, plain = pair(MLP, reshard_after_forward=mode)
    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    unit = MLP.units(model)[0]
    assert isinstance(unit, FSDPModule)
    unit(torch.randn(2, next(plain.parameters()).shape[1]).double())
    other = other_weights(plain)
    given = given_as("whole", model, other)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"still gathered .* Call reshard\(\)"):
            torch.func.functional_call(model, given, batch)
        unit.reshard()
        assert torch.equal(torch.func.functional_call(model, given, batch), other(*batch))
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)
