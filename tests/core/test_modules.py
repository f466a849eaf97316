"""Kinds of modules that do something of their own with parameters, inputs or outputs."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import weakref
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.transports.host.exchange import Exchange
from harness import distributed, ours_only
from models import EVEN_MLP, Case, children, no_units, normal_batch, token_batch
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    check_training,
    pair,
    run_both,
    whole,
)

both_modes = pytest.mark.parametrize("mode", [True, False])


# ------------------------------------------------------------- modules of torch with habits


class Sequence(nn.Module):
    """A recurrent layer of torch, which keeps a list of its weights, and a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(3, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


@both_modes
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@distributed(1, 2, 3)
def test_recurrent_layers_of_torch(kind: type[nn.RNNBase], mode: bool) -> None:
    case = Case("sequence", lambda: Sequence(kind), children, normal_batch(2, 4, 3))
    check_training(case, Training(steps=3), reshard_after_forward=mode)


@both_modes
@distributed(1, 2, 3)
def test_transformer_layers_of_torch(mode: bool) -> None:
    """Their evaluation has a fast path that takes the weights themselves."""

    def build() -> nn.Module:
        layers = [nn.TransformerEncoderLayer(6, 2, 10, 0.0, batch_first=True) for _ in range(2)]
        for layer in layers:  # gradients of key biases are noise
            layer.self_attn.in_proj_bias.requires_grad_(False)
        return nn.Sequential(*layers)

    case = Case("encoder", build, children, normal_batch(2, 4, 6))
    model, plain = pair(case, reshard_after_forward=mode)
    for step in range(3):
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        batch = case.batch(10 + step, dist.get_rank(), torch.float64)
        for network in (model, plain):
            network.eval()
        with torch.no_grad():
            assert_same(model(*batch), plain(*batch), "evaluation")
        for network in (model, plain):
            network.train()


@distributed(1, 2, 3)
def test_weight_norm() -> None:
    """The weight is computed from two parameters when it is asked for."""

    def build() -> nn.Module:
        return nn.Sequential(weight_norm(nn.Linear(3, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 2)))

    check_training(Case("weight_norm", build, children, normal_batch(4, 3)), Training(steps=3))


class Lists(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(3), torch.randn(3, 3)])
        self.named = nn.ParameterDict({"a": torch.randn(3), "b": torch.randn(1, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.many[0]) @ self.many[1]
        return x * self.named["a"] + self.named["b"]


@distributed(1, 2, 3)
def test_parameter_lists_and_dicts() -> None:
    case = Case("lists", lambda: nn.Sequential(Lists(), Lists()), children, normal_batch(4, 3))
    check_training(case, Training(steps=3))


@ours_only("sparse gradients")
@distributed(1, 2, 3)
def test_sparse_gradients_are_reduced_as_dense_ones() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(29, 5, sparse=True), nn.Linear(5, 3))

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens).sin().mean()

    case = Case("sparse", build, children, token_batch, loss)
    model, plain = pair(case)
    batch = token_batch(0, dist.get_rank(), torch.float64)
    for network in (model, plain):
        loss(network, *batch).backward()
    weight = plain.get_parameter("0.weight")
    assert weight.grad is not None
    assert weight.grad.is_sparse
    weight.grad = weight.grad.to_dense()
    average_gradients(plain)
    grad = model.get_parameter("0.weight").grad
    assert grad is not None
    assert_same(whole(grad), weight.grad, "gradient")


def build_not_contiguous() -> nn.Module:
    """A transposed matrix, and a convolution whose weight has its channels last."""
    linear = nn.Linear(6, 4)
    linear.weight = nn.Parameter(torch.randn(6, 4).t())
    conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), linear)


@ours_only("parameters that are not contiguous")
@distributed(1, 2, 3)
def test_parameters_that_are_not_contiguous() -> None:
    case = Case("strided", build_not_contiguous, children, normal_batch(2, 2, 4, 4))
    check_training(case, Training(steps=3, bitwise=False))


@ours_only("complex parameters")
@distributed(1, 2)
def test_complex_parameters() -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).abs()

    torch.manual_seed(0)
    plain = Phase()
    model = copy.deepcopy(plain)
    fully_shard(model)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    for network in (plain, model):
        network(x).sum().backward()
    average_gradients(plain)
    grad, expected = model.weight.grad, plain.weight.grad
    assert grad is not None
    assert expected is not None
    torch.testing.assert_close(whole(grad), expected, rtol=1e-12, atol=1e-12)
    model.zero_grad()
    model.weight.requires_grad_(False)  # after the first gather
    model(x.requires_grad_()).sum().backward()
    assert model.weight.grad is None


# ------------------------------------------------------------------- inputs of many kinds


@dataclasses.dataclass(frozen=True)
class Frozen:
    """An input that must not be changed, only rebuilt."""

    x: Tensor
    label: str
    more: list[Any]


class Pair(NamedTuple):
    x: Tensor
    other: Any


class Batch(collections.OrderedDict):
    """As libraries define them: a dict with attributes."""

    @property
    def x(self) -> Tensor:
        return self["x"]


class Opaque:
    """Not a container that anyone could know."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Inspecting(nn.Module):
    """Notes the types of what it gets, and uses some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kinds: list[type] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.kinds = [type(value) for value in (*args, *kwargs.values())]
        total = torch.zeros(())
        for value in (*args, *kwargs.values()):
            if hasattr(value, "x"):
                total = total + self.linear(value.x).sum()
        return total


@pytest.mark.parametrize("low", [False, True])
@distributed(2)
def test_containers_of_inputs_keep_their_types(low: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    model = Inspecting()
    fully_shard(model, mp_policy=policy)
    x = torch.randn(2, 3, requires_grad=True)
    opaque, a_set = Opaque(torch.ones(1)), {1, 2}
    output = model(Pair(x, None), Frozen(x, "text", [x]), Batch(x=x), opaque, some=a_set)
    assert model.kinds == [Pair, Frozen, Batch, Opaque, set]
    output.backward()
    assert x.grad is not None
    assert_sharded(model)


@distributed(2)
def test_an_empty_batch_on_one_rank() -> None:
    def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor]:
        (x,) = normal_batch(3, 4)(step, rank, dtype)
        return (x[:0] if rank == step % 2 else x,)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    check_training(Case("empty", build, children, batch, loss), Training(steps=3))


# ------------------------------------------------------------- what a forward may do


class InPlaceFirst(nn.Module):
    """Changes its input in place before anything else, as pre-activation blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.leaky_relu_(x, 0.1))


@ours_only("a unit may change its input in place")
@both_modes
@distributed(1, 2, 3)
def test_a_unit_changes_its_input_in_place(mode: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), InPlaceFirst(), InPlaceFirst(), nn.Linear(4, 2))

    case = Case("in_place", build, children, normal_batch(3, 3))
    check_training(case, Training(steps=3), reshard_after_forward=mode)


class InPlaceOf(nn.Module):
    """Changes inputs in place, some of which it has used before.

    With ``how`` "keyword", the input has a name; with "two" and "one of two", there are two that
    need gradients; "late" uses its input before and after; "part" changes a part of it.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        before = x + self.linear.bias if self.how == "late" else 0
        changed = x[:, :2] if self.how == "part" else x
        changed.mul_(0.5)
        if other is None or self.how == "two, one unused":
            return self.linear(x) + before
        if self.how == "two":
            other.mul_(0.5)
        return self.linear(x * other) + other


class InPlaceChain(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(InPlaceOf(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1
        for block in self.blocks:
            if self.how == "keyword":
                x = block(x=x)
            elif "two" in self.how:
                x = block(x * 1, other=x + 1)
            else:
                x = block(x)
        return x


@ours_only("a unit may change its inputs in place")
@both_modes
@pytest.mark.parametrize(
    "how", ["first", "keyword", "two", "one of two", "two, one unused", "late", "part"]
)
@distributed(1, 2, 3)
def test_units_change_inputs_in_place_and_are_freed_in_backward(how: str, mode: bool) -> None:
    def blocks(model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())

    case = Case("in_place", lambda: InPlaceChain(how), blocks, normal_batch(3, 4))
    model, _ = check_training(case, Training(steps=3), reshard_after_forward=mode)
    freed: list[list[bool]] = []
    first = model.get_submodule("first")

    def note(*_: Any) -> None:
        freed.append([isinstance(block.linear.weight, DTensor) for block in blocks(model)])  # type: ignore[union-attr]

    handle = first.register_forward_hook(lambda _m, _a, output: output.register_hook(note) and None)
    model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    handle.remove()
    # (What has one rank is never gathered, and all the same.)
    assert freed == [[True] * 3]


class PassesThrough(nn.Module):
    """Returns its inputs too, as blocks do with caches and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x * memory) * mask, memory, mask


class ThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(PassesThrough() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory, mask = self.first(x).tanh(), (x > 0).to(x.dtype)
        for block in self.blocks:
            x, memory, mask = block(x, memory, mask)
        return x + memory


@both_modes
@distributed(1, 2, 3)
def test_outputs_that_are_inputs(mode: bool) -> None:
    def units(model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())

    case = Case("through", ThreeTimes, units, normal_batch(3, 4))
    check_training(case, Training(steps=3), reshard_after_forward=mode)


@distributed(1, 2)
def test_a_graph_that_is_dropped_goes_at_once_where_outputs_are_inputs() -> None:
    """A cycle through marks on inputs would keep activations until the garbage collector runs."""
    model = ThreeTimes()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    held: list[Any] = []  # by the graph alone

    def hold(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        thing = nn.Module()
        held.append(weakref.ref(thing))
        output.register_hook(lambda grad: grad if thing else None)

    model.first.register_forward_hook(hold)
    gc.disable()
    try:
        for _ in range(2):
            output = model(torch.ones(3, 4))
            assert held[-1]() is not None
            del output
            assert held[-1]() is None
    finally:
        gc.enable()


class SideBranches(nn.Module):
    """Units in unusual places of the graph.

    `teacher` runs without gradients and then, on other data, with them; the output of `unheard`
    goes nowhere; `cut` gets a detached input and `late` is called last on raw data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4)
        self.unheard = nn.Linear(4, 4)
        self.cut = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        with torch.no_grad():
            target = self.teacher(x)
        self.unheard(y)
        y = self.teacher(y) + self.cut(y.detach())
        return self.late(y).tanh() + self.late(x) - target


@both_modes
@distributed(1, 2, 3)
def test_branches_without_gradients_without_effect_and_cut_off(mode: bool) -> None:
    case = Case("branches", SideBranches, children, normal_batch(3, 4))
    model, plain = check_training(case, Training(steps=3), reshard_after_forward=mode)
    run_both(case, model, plain, 5)
    assert model.get_parameter("unheard.weight").grad is None


class Headless(nn.Module):
    """Its head is called by the user, chunk by chunk, outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x).tanh())


@distributed(1, 2, 3)
def test_a_head_called_in_chunks_outside_of_the_model() -> None:
    """The norm and the head are one unit, of which the model's forward runs only the norm."""
    torch.manual_seed(0)
    plain = Headless().double()
    model = copy.deepcopy(plain)
    fully_shard([model.norm, model.head])
    fully_shard(model)

    def loss(network: nn.Module, x: Tensor) -> Tensor:
        features = network(x)
        return torch.stack([network.head(part).sin().sum() for part in features.chunk(3)]).sum()

    case = Case("headless", Headless, no_units, normal_batch(6, 4), loss)
    for step in range(3):
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_forward_hooks_from_before_sharding_see_gathered_parameters() -> None:
    """Both kinds, as `torch.nn.utils.weight_norm` has one that computes the weight."""
    model = nn.Sequential(nn.Linear(4, 5))
    seen: list[type] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(type(module.weight.data)))
    model[0].register_forward_hook(lambda module, *_: seen.append(type(module.weight.data)))
    fully_shard(model[0])
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert seen == [Tensor] * 4


@distributed(1, 2)
def test_backward_hooks_of_the_user() -> None:
    """Full backward hooks on units and inside them see the same gradients."""
    case = Case(
        "hooked",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh())),
        children,
        normal_batch(3, 4),
    )
    model, plain = pair(case)
    seen: dict[nn.Module, list[Tensor]] = {model: [], plain: []}
    for network, grads in seen.items():

        def note(module: Any, inputs: Any, outputs: Any, grads: list[Tensor] = grads) -> None:
            grads.extend(g for g in (*inputs, *outputs) if g is not None)

        network.get_submodule("1").register_full_backward_hook(note)
        network.get_submodule("1.0").register_full_backward_hook(note)
    for step in range(2):
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
    assert len(seen[model]) == len(seen[plain]) == 8
    for mine, theirs in zip(seen[model], seen[plain], strict=True):
        assert_same(mine, theirs, "gradient seen by a hook", bitwise=False)


@distributed(2, 3)
def test_autocast() -> None:
    """torch.autocast in place of a mixed-precision policy."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            assert output.dtype == torch.bfloat16
        return output.float().square().mean()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))

    case = Case("autocast", build, children, normal_batch(3, 4), loss)
    model, plain = pair(case, dtype=torch.float32)
    for step in range(3):
        run_both(case, model, plain, step, dtype=torch.float32, bitwise_loss=True)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_several_modules_are_a_root() -> None:
    """Nothing is sharded around them."""
    _, plain = pair(EVEN_MLP)
    model: Any = copy.deepcopy(plain)
    fully_shard([m for m in model.modules() if isinstance(m, nn.Linear)])
    for step in range(2):
        run_both(EVEN_MLP, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_a_unit_of_several_modules_is_reduced_once() -> None:
    _, plain = pair(EVEN_MLP)
    grouped: Any = copy.deepcopy(plain)
    real = Exchange.reduce_scatter
    layers = [m for m in grouped.modules() if isinstance(m, nn.Linear)]
    fully_shard(layers[:2])
    fully_shard(layers[2:])
    fully_shard(grouped)
    for step in range(3):
        with mock.patch.object(Exchange, "reduce_scatter", autospec=True) as reduce_scatter:
            reduce_scatter.side_effect = real
            run_both(EVEN_MLP, grouped, plain, step)
        assert_same_gradients(grouped, plain)
        assert reduce_scatter.call_count == 2
