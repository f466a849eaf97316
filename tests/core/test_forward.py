"""Ways to call a sharded model: inputs and outputs of all kinds, several forwards, evaluation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import fully_shard
from harness import distributed, ours_only
from models import (
    BY_NAME,
    EVEN_MLP,
    MLP,
    RECURRENT,
    TRANSFORMER,
    Case,
    children,
    normal_batch,
    token_batch,
)
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    check_training,
    pair,
    run_both,
)


@dataclasses.dataclass
class Result:
    """An output that is no tensor, tuple or dict."""

    main: Tensor
    extra: dict[str, Any]


class Named(NamedTuple):
    main: Tensor
    extra: Tensor


def as_dict(main: Tensor, extra: Tensor) -> dict[str, Any]:
    return {"main": main, "nested": [{"extra": extra}, None, "text"], "number": 3}


def as_tuple(main: Tensor, extra: Tensor) -> tuple[Any, ...]:
    return (main, (extra, 1.0), "text")


def as_list(main: Tensor, extra: Tensor) -> list[Any]:
    return [main, [extra]]


def as_named_tuple(main: Tensor, extra: Tensor) -> Named:
    return Named(main, extra)


def as_dataclass(main: Tensor, extra: Tensor) -> Result:
    return Result(main, {"extra": [extra]})


def take_apart(output: Any) -> list[Tensor]:
    """The two tensors of an output of any of the forms above."""
    if isinstance(output, Result):
        return [output.main, output.extra["extra"][0]]
    if isinstance(output, dict):
        return [output["main"], output["nested"][0]["extra"]]
    second = output[1][0] if isinstance(output[1], tuple | list) else output[1]
    return [output[0], second]


class Layer(nn.Module):
    """Takes a tensor and returns two of them in a given form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear1 = nn.Linear(5, 5)
        self.linear2 = nn.Linear(5, 3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        x = self.linear1(x).tanh()
        return self.form(x, self.linear2(x))


class TwoLayers(nn.Module):
    """Both layers and the root itself return that form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer1 = Layer(form)
        self.layer2 = Layer(form)
        self.scale = nn.Parameter(torch.randn(5))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        main, extra = take_apart(self.layer1(x * self.scale))
        second, other = take_apart(self.layer2(main))
        return self.form(second, extra + other)


def form_loss(model: nn.Module, x: Tensor) -> Tensor:
    main, extra = take_apart(model(x))
    return main.square().mean() + extra.sin().mean()


def check_form(form: Callable[[Tensor, Tensor], Any], only_extra: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return take_apart(model(x))[1].sin().mean() if only_extra else form_loss(model, x)

    case = Case("forms", lambda: TwoLayers(form), children, normal_batch(4, 5), loss)
    check_training(case, Training(steps=2), reshard_after_forward=True)


@pytest.mark.parametrize("only_extra", [False, True])
@pytest.mark.parametrize("form", [as_dict, as_tuple, as_list, as_named_tuple])
@distributed(2)
def test_outputs_of_nested_containers(form: Callable[..., Any], only_extra: bool) -> None:
    check_form(form, only_extra)


@pytest.mark.parametrize("only_extra", [False, True])
@distributed(1, 2, 3)
def test_outputs_in_a_dataclass(only_extra: bool) -> None:
    check_form(as_dataclass, only_extra)


class Mixed(nn.Module):
    """Positional and keyword inputs, in containers, some not tensors at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, others: dict[str, Any], flag: bool = False) -> Tensor:
        y = self.linear(x) + self.other(others["list"][0])
        return y * others["number"] if flag else y


class CallsMixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mixed = Mixed()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # Only a keyword input carries a gradient: the positional one is cut off.
        return self.mixed(x.detach(), others={"list": [x.tanh()], "number": 2.0}, flag=True)


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_keyword_inputs_that_carry_the_gradient(mode: bool) -> None:
    case = Case("mixed", CallsMixed, children, normal_batch(3, 4))
    check_training(case, Training(steps=2), reshard_after_forward=mode)


class Lookup(nn.Module):
    """All inputs are integers, in every unit."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(29, 7)
        self.positions = nn.Embedding(6, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) * self.positions(torch.arange(tokens.shape[1]))


@distributed(1, 2, 3, 4)
def test_inputs_of_integers_only() -> None:
    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return (model(tokens) * targets.unsqueeze(-1)).tanh().mean()

    case = Case("lookup", Lookup, children, token_batch, loss)
    check_training(case, Training(steps=3), reshard_after_forward=True)


class NoInput(nn.Module):
    """A forward without any argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self) -> Tensor:
        return self.weight.sin()


@distributed(1, 2, 3)
def test_no_inputs() -> None:
    def loss(model: nn.Module, factor: Tensor) -> Tensor:
        return (model() * factor).sum()

    case = Case("no_input", NoInput, children, normal_batch(5, 3), loss)
    check_training(case, Training(steps=2), reshard_after_forward=True)


class InPlace(nn.Module):
    """The output of a unit is changed in place by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.mul_(2)
        x = self.second(x)
        x[0].add_(1)
        return x


@distributed(2)
def test_outputs_changed_in_place() -> None:
    case = Case("in_place", InPlace, children, normal_batch(3, 4))
    check_training(case, Training(steps=2), reshard_after_forward=True)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent"])
@distributed(1, 2, 3)
def test_several_forwards_before_one_backward(name: str, mode: bool) -> None:
    case = BY_NAME[name]
    model, plain = pair(case, reshard_after_forward=mode)
    for step in range(2):
        losses = {}
        for network in (plain, model):
            batches = [case.batch(3 * step + i, dist.get_rank(), torch.float64) for i in range(3)]
            losses[network] = sum(case.loss(network, *batch) for batch in batches)
            losses[network].backward()
        average_gradients(plain)
        assert_same(losses[model], losses[plain], "sum of losses")
        assert_sharded(model)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_several_forwards_then_their_backwards_one_by_one(mode: bool) -> None:
    """As a pipeline does it: forward A, forward B, backward A, backward B."""
    model, plain = pair(TRANSFORMER, reshard_after_forward=mode)
    for network in (plain, model):
        batches = [TRANSFORMER.batch(i, dist.get_rank(), torch.float64) for i in range(2)]
        losses = [TRANSFORMER.loss(network, *batch) for batch in batches]
        for loss in losses:
            loss.backward()
            if network is plain:
                average_gradients(plain)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_the_model_calls_a_unit_before_and_after_another() -> None:
    """Weights used again later in the same forward: first, second, first."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.second(self.first(x)).tanh())

    case = Case("again", Again, children, normal_batch(3, 4))
    for mode in (True, False):
        check_training(case, Training(steps=2), reshard_after_forward=mode)


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_evaluation_without_gradients_between_steps(mode: bool) -> None:
    model, plain = pair(BY_NAME["cnn"], reshard_after_forward=mode)
    case = BY_NAME["cnn"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        for network in (model, plain):
            network.eval()
        with torch.no_grad():
            batch = case.batch(10 + step, dist.get_rank(), torch.float64)
            assert_same(model(*batch), plain(*batch), "evaluation", bitwise=step == 0)
        for network in (model, plain):
            network.train()
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_evaluation_between_a_forward_and_its_backward(mode: bool) -> None:
    model, plain = pair(MLP, reshard_after_forward=mode)
    for step in range(2):
        batch = MLP.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            loss = MLP.loss(network, *batch)
            with torch.no_grad():
                network(MLP.batch(7, dist.get_rank(), torch.float64)[0])
            loss.backward()
        average_gradients(plain)
        assert_sharded(model)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(1, 2)
def test_evaluation_in_inference_mode() -> None:
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    batch = EVEN_MLP.batch(1, dist.get_rank(), torch.float64)
    with torch.inference_mode():
        assert_same(model(*batch).clone(), plain(*batch).clone(), "evaluation")
    run_both(EVEN_MLP, model, plain, 2)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("change", ["move", "cast", "freeze", "assign"])
@distributed(1, 2)
def test_an_evaluation_in_inference_mode_plans_anew(change: str) -> None:
    """What it makes can be trained."""
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    for each in (model, plain):
        each.zero_grad()
        if change == "move":
            each.to("cpu")
        elif change == "cast":
            each.float()
            each.double()
        elif change == "freeze":
            next(each.parameters()).requires_grad_(False)
        else:
            state = {name: value.clone() for name, value in each.state_dict().items()}
            each.load_state_dict(state, assign=True)
    batch = EVEN_MLP.batch(1, dist.get_rank(), torch.float64)
    with torch.inference_mode():
        assert_same(model(*batch).clone(), plain(*batch).clone(), "evaluation")
    run_both(EVEN_MLP, model, plain, 2)
    assert_same_gradients(model, plain)
    assert not any(p.is_inference() or p._local_tensor.is_inference() for p in model.parameters())


@distributed(1, 2, 3)
def test_a_forward_whose_graph_is_dropped() -> None:
    model, plain = pair(RECURRENT, reshard_after_forward=False)
    for step in range(3):
        abandoned = RECURRENT.loss(model, *RECURRENT.batch(9, dist.get_rank(), torch.float64))
        del abandoned
        run_both(RECURRENT, model, plain, step)
        assert_same_gradients(model, plain)


@distributed(2)
def test_the_loss_can_be_computed_in_the_root() -> None:
    """The root's output is a scalar; the units' outputs never leave it."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).logsumexp(-1).mean()

    case = Case("loss", WithLoss, lambda m: [m.body[0], m.body[2]], normal_batch(3, 4))
    check_training(case, Training(steps=2), reshard_after_forward=True)


@distributed(1, 2, 3)
def test_several_modules_as_one_unit() -> None:
    """fully_shard takes a list: its modules communicate together, from the first to the last."""
    torch.manual_seed(0)
    case = MLP
    plain = case.build().double()
    model = copy.deepcopy(plain)
    together = [model[2], model[4]]
    assert fully_shard(together) is together
    fully_shard(model)
    for step in range(3):
        run_both(case, model, plain, step)
        assert_sharded(model)
        assert_same_gradients(model, plain)


class Nested(nn.Module):
    """Modules that call another one, or themselves, between two uses of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.inside = (nn.Linear(6, 6) for _ in range(3))
        self.others: list[Nested] = []  # not in a `ModuleList`: beside this one in the tree

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        x = self.first(x).tanh()
        for other in self.others:
            x = other(x).sin()
        if depth:
            x = self(x, depth - 1).sin()
        return self.last(x) + self.inside(x)


def nested(*calls: tuple[int, int]) -> nn.Sequential:
    model = nn.Sequential(*(Nested() for _ in range(4)))
    for outer, inner in calls:
        model[outer].others.append(model[inner])
    return model


@pytest.mark.parametrize("calls", [((0, 1),), ((1, 2), (2, 3)), ((3, 0), (2, 0))])
@pytest.mark.parametrize("mode", [True, False])
@distributed(2)
def test_modules_of_one_unit_that_call_each_other(
    calls: tuple[tuple[int, int], ...], mode: bool
) -> None:
    """The unit stays gathered until the outer one has ended."""
    case = Case("calls", lambda: nested(*calls), lambda m: [list(m)], normal_batch(4, 6))
    check_training(case, Training(steps=4), reshard_after_forward=mode)


@pytest.mark.parametrize("root", [False, True])
@distributed(2)
def test_a_module_that_calls_itself(root: bool) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return (model if root else model[0])(x, 2).square().mean()

    build = Nested if root else nested
    units: Callable[[Any], Any] = (lambda m: []) if root else children
    check_training(Case("itself", build, units, normal_batch(4, 6), loss), Training(steps=3))


for _test in (test_modules_of_one_unit_that_call_each_other, test_a_module_that_calls_itself):
    globals()[_test.__name__] = ours_only("torch frees it when the inner one ends")(_test)
