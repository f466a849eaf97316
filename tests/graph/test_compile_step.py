"""A compiled step has the losses, gradients and buffers of eager, bitwise with ``aot_eager``.

Ranks of these tests communicate as eager steps on the CPU do. What a graph has on devices, torch's
functional collectives, runs here over gloo, which adds in another order where more than two ranks
add.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import llama
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp2.checkpoint import Checkpointer
from fsdp2.graph import compile_step, lending
from fsdp2.graph.capture import LABEL
from fsdp2.graph.host_collectives import GATHER, SCATTER
from harness import DEVICE, cached_mesh, cpu_only, distributed, ours_only
from models import BY_NAME, MLP, RECURRENT, TRANSFORMER, Case
from reference import shard_case

pytestmark = ours_only("a compiled step of its own")

Pair = tuple[Any, Any]


def twins(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> Pair:
    """The same sharded model twice."""
    torch.manual_seed(0)
    plain = case.build().to(dtype)
    first, second = (shard_case(case, copy.deepcopy(plain), **options) for _ in range(2))
    return first, second


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_equal_state(eager: nn.Module, graph: nn.Module, *, bitwise: bool) -> None:
    """Parameters, gradients and buffers."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {}
    ours, others = dict(graph.named_parameters()), dict(eager.named_parameters())
    assert list(ours) == list(others)
    for name, param in ours.items():
        theirs = others[name]
        torch.testing.assert_close(local(param), local(theirs), **tolerance, msg=name)
        assert (param.grad is None) == (theirs.grad is None), name
        if param.grad is not None:
            assert type(param.grad) is type(theirs.grad)
            found, expected = local(param.grad), local(theirs.grad)
            torch.testing.assert_close(found, expected, **tolerance, msg=f"gradient of {name}")
    for (name, buffer), theirs in zip(graph.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, theirs, **tolerance, msg=name)


def train_both(
    models: Pair,
    loss_of: Callable[..., Any],
    batch_of: Callable[[int], tuple[Any, ...]],
    *,
    steps: int = 3,
    accumulate: int = 1,
    backend: Any = "aot_eager",
    bitwise: bool = True,
) -> Any:
    """Trains one model eagerly and the other by a compiled step, and compares after each."""
    eager, graph = models
    # One parameter at a time: on devices torch's default takes plain ones and DTensors together.
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
    optimizers = [sgd(model.parameters()) for model in models]
    step = compile_step(graph, loss_of, backend=backend)
    for i in range(steps):
        for j in range(accumulate):
            batch = batch_of(i * accumulate + j)
            expected = loss_of(eager, *batch)
            expected.backward()
            found = step(*batch)
            assert not found.requires_grad
            tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {}
            torch.testing.assert_close(found, expected.detach(), **tolerance)
            assert_equal_state(eager, graph, bitwise=bitwise)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return step


def batches(case: Case, dtype: torch.dtype = torch.float64) -> Callable[[int], tuple[Any, ...]]:
    return lambda step: case.batch(step, dist.get_rank(), dtype)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@distributed(2, long=(1, 3))
def test_models(name: str) -> None:
    """Uneven dims, tied, frozen, nested, reused and unused parameters, and running statistics."""
    case = BY_NAME[name]
    # Eager reduces a unit that runs many times after each of its backwards.
    bitwise = case is not RECURRENT
    train_both(twins(case), case.loss, batches(case), accumulate=2, steps=2, bitwise=bitwise)


def as_on_a_device() -> Any:
    """Context in which graphs are captured with functional collectives."""
    return mock.patch.object(lending, "device_module", return_value=torch.cuda)


@pytest.mark.parametrize("name", ["cnn", "lora", "mlp", "transformer"])
@distributed(2, long=(3,))
def test_functional_collectives(name: str) -> None:
    case, bitwise = BY_NAME[name], dist.get_world_size() == 2
    with as_on_a_device():
        train_both(twins(case), case.loss, batches(case), accumulate=2, steps=2, bitwise=bitwise)


@distributed(4)
def test_functional_collectives_of_replicas() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    with as_on_a_device():
        train_both(twins(TRANSFORMER, mesh=mesh), TRANSFORMER.loss, batches(TRANSFORMER))


POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "own": MixedPrecisionPolicy(torch.bfloat16),
}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@distributed(2)
def test_mixed_precision(policy: str) -> None:
    models = twins(TRANSFORMER, torch.float32, mp_policy=POLICIES[policy])
    train_both(models, TRANSFORMER.loss, batches(TRANSFORMER, torch.float32), accumulate=2)


@pytest.mark.parametrize("name", ["mlp", "lora"])
@distributed(2)
def test_parameters_that_stay_gathered(name: str) -> None:
    case = BY_NAME[name]
    train_both(twins(case, reshard_after_forward=False), case.loss, batches(case))


@pytest.mark.parametrize("functional", [False, True])
@distributed(2, 3)
def test_shards_of_other_dims(functional: bool) -> None:
    """Even and uneven ones, and parameters that every rank holds whole."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6))
            self.other = nn.Parameter(torch.randn(5, 7))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight * self.scale).sum() + (x @ self.other).square().sum()

    case = Case("scaled", lambda: nn.Sequential(Scaled()), lambda m: list(m.children()), MLP.batch)
    models = twins(case, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
    batch_of = random_batches(3, 5)
    bitwise = not functional or dist.get_world_size() == 2
    with as_on_a_device() if functional else nullcontext():
        train_both(models, lambda model, x: model(x), batch_of, bitwise=bitwise)


class Experts(nn.Module):
    """A mixture of experts in which each has room for so many tokens: its shapes are fixed."""

    def __init__(self, width: int, num_experts: int, room: int) -> None:
        super().__init__()
        self.room = room
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        is_chosen = torch.zeros_like(scores).scatter(-1, chosen, weights)
        place = (is_chosen > 0).cumsum(0) - 1
        has_room = (is_chosen > 0) & (place < self.room)
        places = F.one_hot(place.clamp(0, self.room - 1), self.room).to(x.dtype)
        dispatch = places * has_room.unsqueeze(-1)
        rows = torch.einsum("tec,td->ecd", dispatch, x)
        made = torch.bmm(torch.bmm(rows, self.up).relu(), self.down)
        return x + torch.einsum("tec,ecd->td", dispatch * is_chosen.unsqueeze(-1), made)


@distributed(2, long=(3,))
def test_a_mixture_of_experts() -> None:
    models = twins(simple(lambda: nn.Sequential(*(Experts(6, 5, 4) for _ in range(2)))))
    train_both(models, square, random_batches(9, 6))


class Residual(nn.Module):
    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(given, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


@distributed(2)
def test_a_residual_network() -> None:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 3))
    models = twins(simple(lambda: nn.Sequential(Residual(3, 5, 1), Residual(5, 7, 2), *pooled)))
    train_both(models, square, random_batches(4, 3, 8, 8))


@distributed(2)
def test_a_llama() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        mesh = cached_mesh(2, names=("dp",))
        models.append(llama.shard_units(fully_shard, llama.Llama(llama.ODD).double(), mesh=mesh))
    train_both(
        (models[0], models[1]),
        llama.loss_of,
        lambda step: (llama.token_batch(step, dist.get_rank(), llama.ODD),),
    )


@distributed(2)
def test_checkpoints_between_eager_and_compiled_steps(tmp_path: Path) -> None:
    """Saved in eager, resumed in the graph, and back: as if all steps were eager."""
    case = TRANSFORMER

    def trained(model: Any, optimizer: Any, steps: range, *, compiled: bool) -> None:
        step = compile_step(model, case.loss, backend="aot_eager") if compiled else None
        for i in steps:
            batch = batches(case)(i)
            if step is None:
                case.loss(model, *batch).backward()
            else:
                step(*batch)
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = shard_case(case, case.build().double())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    expected, optimizer = made(0)
    trained(expected, optimizer, range(6), compiled=False)
    model, optimizer = made(0)
    for number, compiled in enumerate((False, True, False)):
        if number:
            model, optimizer = made(number)
            Checkpointer(tmp_path).load(model=model, optimizer=optimizer)
        trained(model, optimizer, range(2 * number, 2 * number + 2), compiled=compiled)
        Checkpointer(tmp_path).save(number, model=model, optimizer=optimizer)
    assert_equal_state(expected, model, bitwise=True)


class Recurrences(nn.Module):
    """Recurrent layers have a list of their weights besides their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@distributed(2)
def test_recurrent_layers(dtype: torch.dtype) -> None:
    """Eager has oneDNN's kernels in float32, a graph has not."""
    models, bitwise = twins(simple(Recurrences), dtype), dtype is torch.float64
    batch_of = random_batches(3, 4, 5)
    train_both(models, square, lambda i: (batch_of(i)[0].to(dtype),), bitwise=bitwise)


@distributed(4)
def test_replicas() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    train_both(twins(TRANSFORMER, mesh=mesh), TRANSFORMER.loss, batches(TRANSFORMER))


@pytest.mark.parametrize("recompute", [False, True])
@distributed(4)
def test_tensor_parallel(recompute: bool) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = llama.Llama(llama.ODD).double()
        llama.tensor_parallel(model, mesh["tp"], sharded_logits=False, local_hidden=False)
        if recompute:
            llama.recompute_activations(model)
        models.append(llama.shard_units(fully_shard, model, mesh=mesh["dp"]))
    train_both(
        (models[0], models[1]),
        llama.loss_of,
        lambda step: (llama.token_batch(step, mesh["dp"].get_local_rank(), llama.ODD),),
        bitwise=False,  # tensor-parallel partial sums of gradients are added at other moments
    )


class Recomputed(nn.Module):
    """A block that is checkpointed, with dropout."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.dropout = nn.Dropout(probability)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.dropout(self.linear(x).tanh()), x, use_reentrant=False)


def build_recomputed(probability: float) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), *(Recomputed(probability) for _ in range(2)))


def random_batches(*shape: int) -> Callable[[int], tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return lambda _: (torch.randn(*shape, generator=generator, dtype=torch.float64),)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def simple(build: Callable[[], nn.Module]) -> Case:
    return Case("simple", build, lambda model: list(model.children()), MLP.batch)


@distributed(2)
def test_activation_checkpointing() -> None:
    models = twins(simple(lambda: build_recomputed(0.0)))
    train_both(models, square, random_batches(3, 5))


@distributed(2)
def test_random_numbers() -> None:
    """Those of forward are eager's; a recomputation would draw others, so that is refused."""
    build = lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 3))  # noqa: E731

    eager, graph = twins(simple(build))
    step = compile_step(graph, square, backend="aot_eager")
    batch = random_batches(3, 5)(0)
    for _ in range(3):
        torch.manual_seed(7)
        expected = square(eager, *batch)
        expected.backward()
        torch.manual_seed(7)
        assert torch.equal(step(*batch), expected.detach())
        assert_equal_state(eager, graph, bitwise=True)
    model = twins(simple(lambda: build_recomputed(0.5)))[0]
    with pytest.raises(RuntimeError, match=r"(bernoulli|dropout).*recomputes activations"):
        compile_step(model, square, backend="aot_eager")(*batch)


@distributed(2)
def test_steps_in_turns() -> None:
    """Eager and compiled steps, other shapes, frozen parameters, evaluation, clipping."""
    eager, graph = twins(BY_NAME["cnn"])
    case = BY_NAME["cnn"]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (eager, graph)]
    step = compile_step(graph, case.loss, backend="aot_eager")

    def both(i: int, *, compiled: bool = True, size: int = 4) -> None:
        batch = tuple(x[:size] for x in case.batch(i, dist.get_rank(), torch.float64))
        expected = case.loss(eager, *batch)
        expected.backward()
        found = step(*batch) if compiled else case.loss(graph, *batch)
        assert torch.equal(found.detach(), expected.detach())
        if not compiled:
            found.backward()
        assert_equal_state(eager, graph, bitwise=True)

    both(0)
    both(1, compiled=False)  # adds to the gradients of a compiled step
    both(2)
    both(3, size=3)
    assert step.num_graphs == 2
    for model in (eager, graph):
        clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert_equal_state(eager, graph, bitwise=True)
    both(4)
    for model in (eager, graph):
        model.zero_grad()
        model.eval()
    both(5)
    assert step.num_graphs == 3
    for model in (eager, graph):
        model.zero_grad()
        model[0][0].weight.requires_grad_(False)
    both(6)
    assert graph[0][0].weight.grad is None
    for model in (eager, graph):
        model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})
    both(7)


@distributed(2)
def test_other_results_and_arguments() -> None:
    """A tuple of results, keyword arguments, constants, autocast, and a gradient scale."""
    eager, graph = twins(BY_NAME["even_mlp"], torch.float32)

    def loss_fn(model: nn.Module, x: Tensor, *, scale: Tensor, power: int) -> Any:
        output = model(x)
        return (output.pow(power).sum() * scale, {"mean": output.mean(), "power": power})

    step = compile_step(graph, loss_fn, backend="aot_eager")
    for power in (2, 4):
        for scale in (1.0, 8.0):
            x = BY_NAME["even_mlp"].batch(power, dist.get_rank(), torch.float32)[0]
            with torch.autocast("cpu", enabled=power == 4):
                loss, others = loss_fn(eager, x, scale=torch.tensor(scale), power=power)
                loss.backward()
                found, mine = step(x, scale=torch.tensor(scale), power=power)
            assert torch.equal(found, loss.detach())
            assert torch.equal(mine["mean"], others["mean"].detach())
            assert mine["power"] == power
            assert not mine["mean"].requires_grad
            assert_equal_state(eager, graph, bitwise=True)
    assert step.num_graphs == 2


class Holder(nn.Module):
    """Parameters that no unit manages beside units, and a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.linear = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum())
        return self.linear(x * self.own + self.frozen)


@distributed(2)
def test_parameters_without_a_unit() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(Holder(), nn.Linear(5, 2)).double()
        fully_shard(model[1])
        ignored = {model[0].own, model[0].frozen}
        models.append(fully_shard(model, ignored_params=ignored))
    train_both((models[0], models[1]), square, random_batches(3, 5), accumulate=2)


# ------------------------------------------------------------------------ what is in the graph


def targets_of(model: Any, case: Case) -> list[tuple[Any, str]]:
    """The nodes of the graph that runs, in order, with the names of their operators."""
    graphs: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    compile_step(model, case.loss, backend=keep)(*batches(case)(0))
    return [(node, str(node.target)) for node in graphs[0].graph.nodes]


START, WAIT = "fsdp2_graph.start.default", "fsdp2_graph.wait.default"


@cpu_only("its operators of the host are counted too")
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_collectives(reshard: bool, functional: bool) -> None:
    """One gather of each unit in forward; one in backward of those that are freed, but for the last
    one, with which backward begins; and one reduction."""
    model = twins(TRANSFORMER, reshard_after_forward=reshard)[0]
    num = len(TRANSFORMER.units(model)) + 1
    with as_on_a_device() if functional else nullcontext():
        found = targets_of(model, TRANSFORMER)
    names = [node.args[1] if name == START else name for node, name in found]
    gathers, reductions = (
        sum(use in name for name in names)
        for use in (("all_gather", "reduce_scatter") if functional else (GATHER, SCATTER))
    )
    assert reductions == num
    assert gathers == num + (num - 1 if reshard else 0)
    waits = sum("wait_tensor" in name or name == WAIT for name in names)
    assert waits == gathers + reductions


@cpu_only("compilers keep the order of operators of the host")
@distributed(2)
def test_the_order_of_communication() -> None:
    """A gather is in flight while the unit ahead of it computes, and no more than one is. Those for
    backward begin with it. Compilers keep that order: nodes need what comes before them."""
    model = twins(TRANSFORMER)[0]
    num_units = len(TRANSFORMER.units(model)) + 1
    in_flight: list[Any] = []
    most = {GATHER: 0, SCATTER: 0}
    num_gathers, has_products = 0, False
    for node, name in targets_of(model, TRANSFORMER):
        if name in (START, WAIT):
            assert ("after" in node.kwargs) == has_products
        if "mm.default" in name:
            has_products = True
            assert num_gathers <= num_units or node.meta[LABEL].part == "backward"
        if name == START:
            in_flight.append(node)
            use = node.args[1]
            num_gathers += use == GATHER
            most[use] = max(most[use], sum(other.args[1] == use for other in in_flight))
        elif name == WAIT:
            in_flight.remove(node.args[0])
    assert not in_flight
    assert num_gathers > num_units
    assert most == {GATHER: 2, SCATTER: 1}


# --------------------------------------------------------------------------------- CUDA graphs


@pytest.mark.skipif(DEVICE == "testdev", reason="this device has no graphs of its own")
@distributed(1, 2)
def test_a_captured_step_replays_eager_steps() -> None:
    """A CUDA graph of a compiled step, over NCCL; on the CPU a replay is a call."""
    case = TRANSFORMER
    eager, graph = twins(case, torch.float32)
    step = compile_step(graph, case.loss, backend="aot_eager")
    data = batches(case, torch.float32)
    given = data(0)
    side = torch.cuda.Stream() if DEVICE == "cuda" else None
    with nullcontext() if side is None else torch.cuda.stream(side):
        for _ in range(3):
            step(*given)
            graph.zero_grad()
    results: list[Tensor] = []

    def whole() -> None:
        graph.zero_grad()
        results[:] = [step(*given)]

    replay = whole
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            whole()
        replay = captured.replay
    for i in range(1, 4):
        for mine, new in zip(given, data(i), strict=True):
            mine.copy_(new)
        replay()
        eager.zero_grad()
        expected = case.loss(eager, *data(i))
        expected.backward()
        assert torch.equal(results[0], expected.detach())
        assert_equal_state(eager, graph, bitwise=True)


# ------------------------------------------------------------------------------------ mistakes


def linear(**options: Any) -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(fully_shard(nn.Linear(5, 5), **options)), **options)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        return self.linear(x)


@distributed(2)
def test_mistakes() -> None:
    x = torch.randn(3, 5)
    outside = torch.randn(3, 5)
    with pytest.raises(TypeError, match="Linear is not: call fully_shard"):
        compile_step(nn.Linear(5, 5), square)
    for loss_fn, error, match in (
        (lambda m, x: m(x), ValueError, r"shape is \(3, 5\)"),
        (lambda m, x: x.sum(), ValueError, "requires_grad is False"),
        (lambda m, x: None, TypeError, "returned NoneType"),
        (lambda m, x: m(x).sum() * m(x).sum().item(), RuntimeError, "depends on data"),
        (lambda m, x: m(x[x > 0].view(-1, 1).expand(-1, 5)).sum(), RuntimeError, "depends on data"),
        (lambda m, x: m(x).sum() if x.sum() > 0 else m(-x).sum(), RuntimeError, "depends on data"),
        (lambda m, x: (m(x) * outside).sum(), RuntimeError, "pass it as an argument"),
    ):
        model = linear()
        with pytest.raises(error, match=match):
            compile_step(model, loss_fn, backend="aot_eager")(x)
        square(model, x).backward()  # the model is as before
        assert isinstance(model[0].weight, DTensor)
    model = fully_shard(Replaces())
    with pytest.raises(RuntimeError, match=r"mean of .*Replaces.*use copy_"):
        compile_step(model, square, backend="aot_eager")(x)
    assert torch.equal(model.mean, torch.zeros(5))
    model = linear()
    step = compile_step(model, square, backend="aot_eager")
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match=r"gradient sync of unit .* is off"):
        step(x)
    square(model, x).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="run the last micro-batch eagerly"):
        step(x)
    square(model, x).backward()
    step(x)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    step.reset()
    with pytest.raises(ValueError, match=r"hooks on the gradient of '0.weight'"):
        step(x)


@distributed(2)
def test_settings_that_a_graph_does_not_have() -> None:
    model = linear(offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match="which has an offload policy"):
        compile_step(model, square, backend="aot_eager")(torch.randn(3, 5))
    model = linear()
    for param in model.parameters():
        param.grad_dtype = None
    with pytest.raises(ValueError, match="which has parameters whose grad_dtype is None"):
        compile_step(model, square, backend="aot_eager")(torch.randn(3, 5))


@cpu_only("gloo")
@distributed(2)
def test_inductor_with_functional_collectives_over_gloo_is_refused() -> None:
    step = compile_step(linear(), square)
    with as_on_a_device(), pytest.raises(ValueError, match="corrupts memory with torch"):
        step(torch.randn(3, 5))


@pytest.mark.skipif(DEVICE == "testdev", reason="inductor does not know this device")
@pytest.mark.long  # with nothing cached it compiles C++ for a minute or more
@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(2, timeout_s=270)
def test_inductor(name: str) -> None:
    case = BY_NAME[name]
    models, data = twins(case, torch.float32), batches(case, torch.float32)
    train_both(models, case.loss, data, backend="inductor", bitwise=False)


@distributed(2)
def test_a_factor_divides_gradients() -> None:
    eager, graph = twins(MLP)
    for model in (eager, graph):
        model.set_gradient_divide_factor(4.0)
    train_both((eager, graph), MLP.loss, batches(MLP))
