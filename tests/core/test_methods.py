"""Methods of sharded modules that change what happens in a step: each by its effect."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_hook

from fsdp2 import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp2.api.arguments import backward_reads_parameters
from harness import cached_mesh, cpu_only, distributed, ours_only
from models import BY_NAME, MLP, TRANSFORMER, normal_batch, square_loss
from reference import (
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    gathering,
    pair,
    run_both,
    shard_case,
    whole,
)


@contextlib.contextmanager
def calls_of(owner: type, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """The calls of a method of the library, while they go on as before."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    setattr(owner, name, recording)
    try:
        yield calls
    finally:
        setattr(owner, name, original)


# ------------------------------------------------------------------------- forward methods


class Encoder(nn.Module):
    """Computes with its parameters in three methods, one of which calls forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale

    def generate(self, x: Tensor, num_steps: int) -> Tensor:
        for _ in range(num_steps):
            x = self(x) + self.outer.weight.sum()
        return x


def sharded_encoder(**options: Any) -> tuple[Any, Encoder]:
    torch.manual_seed(0)
    plain = Encoder().double()
    model = Encoder().double()
    model.load_state_dict(plain.state_dict())
    fully_shard(model.inner, **options)
    return fully_shard(model, **options), plain


@distributed(2, 3)
def test_a_registered_method_computes_and_has_gradients() -> None:
    for options in ({}, {"reshard_after_forward": True}):
        model, plain = sharded_encoder(**options)
        register_fsdp_forward_method(model, "encode")
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        out, expected = model.encode(x, scale=2.0), plain.encode(x, scale=2.0)
        assert_same(out, expected, "output")
        out.square().sum().backward()
        expected.square().sum().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        assert_sharded(model)


@distributed(2)
def test_a_registered_method_may_call_forward() -> None:
    """What is gathered for the method stays until its end."""
    for options in ({}, {"reshard_after_forward": True}):
        model, plain = sharded_encoder(**options)
        register_fsdp_forward_method(model, "generate")
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert_same(model.generate(x, 3), plain.generate(x, 3), "output without gradients")
        out, expected = model.generate(x, 3), plain.generate(x, 3)
        assert_same(out, expected, "output")
        out.sum().backward()
        expected.sum().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)


@ours_only("torch's wraps it again")
@distributed(2)
def test_a_method_is_registered_once() -> None:
    """A program that registers it before every evaluation would nest it deeper each time."""
    model, plain = sharded_encoder()
    register_fsdp_forward_method(model, "encode")
    for each in (model, copy.deepcopy(model)):
        first = each.encode.__func__
        for _ in range(3):
            register_fsdp_forward_method(each, "encode")
        assert each.encode.__func__ is first
        register_fsdp_forward_method(each, "generate")
        x = torch.ones(2, 6, dtype=torch.float64)
        assert_same(each.encode(x), plain.encode(x), "output")
        # What somebody puts around it is another method.
        each.encode = MethodType(around(each.encode), each)
        register_fsdp_forward_method(each, "encode")
        assert_same(each.encode(x), plain.encode(x) + plain.outer.weight.sum(), "output")


def around(method: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    # (`functools.wraps` copies all that `method` has in its ``__dict__``.)
    return functools.wraps(method)(lambda self, x: method(x) + self.outer.weight.sum())


@distributed(2)
def test_a_registered_method_that_raises_can_be_called_again() -> None:
    model, plain = sharded_encoder()
    register_fsdp_forward_method(model, "generate")
    with pytest.raises(TypeError):
        model.generate(torch.ones(2, 6, dtype=torch.float64), "three")
    x = torch.ones(2, 6, dtype=torch.float64)
    assert_same(model.generate(x, 2), plain.generate(x, 2), "output")


@distributed(1)
def test_registering_methods_of_modules_that_are_not_sharded_or_do_not_have_them() -> None:
    plain = Encoder()
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    with pytest.raises(ValueError, match="does not have a method decode"):
        register_fsdp_forward_method(fully_shard(Encoder()), "decode")


class Streaming(Encoder):
    """Methods that return before they compute."""

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            x = self(x) + self.outer.weight.sum()
            yield x

    async def arrive(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.outer(x) + self(x)

    async def arrive_in_parts(self, x: Tensor) -> AsyncIterator[Tensor]:
        for part in self.stream(x):
            await asyncio.sleep(0)
            yield part


def collected(model: Any, method: str, x: Tensor) -> Tensor:
    async def collect() -> list[Tensor]:
        if method == "arrive":
            return [await model.arrive(x)]
        return [part async for part in model.arrive_in_parts(x)]

    parts = [*model.stream(x)] if method == "stream" else asyncio.run(collect())
    return torch.stack(parts).square().sum()


@pytest.mark.parametrize("method", ["stream", "arrive", "arrive_in_parts"])
@distributed(2)
def test_methods_that_return_before_they_compute(method: str) -> None:
    torch.manual_seed(0)
    plain = Streaming().double()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.inner)
    fully_shard(model)
    register_fsdp_forward_method(model, method)
    x = torch.ones(2, 6, dtype=torch.float64)
    for grad in (True, False, True):
        model.zero_grad()
        plain.zero_grad()
        with torch.set_grad_enabled(grad):
            losses = [collected(each, method, x) for each in (plain, model)]
        assert_same(losses[1], losses[0], "loss")
        if grad:
            for loss in losses:
                loss.backward()
            assert_same_gradients(model, plain)
        else:
            assert isinstance(model.outer.weight, DTensor)


# -------------------------------------------------------------------------------- backward


@distributed(2)
def test_units_that_backward_need_not_gather() -> None:
    """An embedding's backward does not read the weight: one gather less, the same gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    for layer in model:
        fully_shard(layer, **gathering())
    fully_shard(model, **gathering())
    tokens = torch.arange(6)
    counts = {}
    for gather in (None, True, False):
        if gather is not None:
            model[0].set_unshard_in_backward(gather)
        for _ in range(2):  # the second has predictions
            with calls_of(model[0]._fsdp2_unit.__class__, "start_unshard") as calls:
                model(tokens).square().sum().backward()
            counts[gather] = sum(args[0] is model[0]._fsdp2_unit for args in calls)
            plain.zero_grad()
            plain(tokens).square().sum().backward()
            assert_same_gradients(model, plain)
            model.zero_grad()
    assert counts == {None: 1, True: 2, False: 1}


test_units_that_backward_need_not_gather = ours_only("counts gathers inside")(
    test_units_that_backward_need_not_gather
)


def similar(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """How similar embeddings are to all others."""
    return output @ module.weight.t()  # type: ignore[operator]


READERS: dict[str, Callable[[nn.Embedding], Any]] = {
    "spectral norm": torch.nn.utils.spectral_norm,
    "forward hook": lambda embedding: embedding.register_forward_hook(similar),
    "forward": lambda embedding: setattr(
        embedding, "forward", lambda tokens: similar(embedding, (), embedding.weight[tokens])
    ),
    "child": lambda embedding: embedding.register_module("scale", nn.Linear(8, 8)),
}


class Scaled(Tensor):
    """A weight whose operators may save it."""


@ours_only("looks inside")
def test_only_plain_weights_that_are_alone_are_looked_up_and_no_more() -> None:
    plain, more, subclass = (nn.Embedding(4, 4) for _ in range(3))
    more.register_parameter("scale", nn.Parameter(torch.ones(4)))
    subclass.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Scaled))
    assert not backward_reads_parameters([plain])
    assert backward_reads_parameters([more])
    assert backward_reads_parameters([subclass])
    assert backward_reads_parameters([plain, nn.Linear(4, 4)])


@ours_only("looks inside")
@distributed(2)
def test_hooks_of_tensor_parallelism_read_no_weights() -> None:
    mesh = cached_mesh(2, 1, names=("shard", "tensor"))
    embedding = nn.Embedding(8, 8)
    parallelize_module(embedding, mesh["tensor"], RowwiseParallel(input_layouts=Replicate()))
    assert embedding._forward_pre_hooks
    fully_shard(embedding, mesh=mesh["shard"])
    unit: Any = embedding._fsdp2_unit
    assert not unit.config.unshard_in_backward


def scaled(module: nn.Module, args: Any) -> Any:
    """Puts the weight into the graph of what follows."""
    module.factor = module.weight.square().sum()  # type: ignore[operator]


def global_hook(network: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return similar(module, args, output) if module is network[0] else None

    return register_module_forward_hook(hook)


def forward_method(network: Any) -> None:
    """The layer behind the embedding calls another of its methods."""
    embedding = network[0]
    embedding.attend = MethodType(lambda self, x: similar(self, (), x), embedding)
    register_fsdp_forward_method(embedding, "attend")
    network[1].register_forward_pre_hook(lambda module, args: embedding.attend(args[0]))


LATE_READERS: dict[str, Callable[[Any], Any]] = {
    "pre-hook": lambda network: network[0].register_forward_pre_hook(scaled),
    "forward hook": lambda network: network[0].register_forward_hook(similar, prepend=True),
    "forward": lambda network: READERS["forward"](network[0]),
    "method": forward_method,
    "global hook": global_hook,
}


def assert_trains_as_plain(plain: Any, model: Any) -> None:
    plain.zero_grad()
    model.zero_grad()
    for network in (plain, model):
        output = network(torch.arange(6)).square().sum()
        (output * getattr(network[0], "factor", 1)).backward()
    assert_same_gradients(model, plain)


def sharded_by_layer(model: Any) -> Any:
    for layer in model:
        fully_shard(layer, **gathering())
    return fully_shard(model, **gathering())


@pytest.mark.parametrize("reader", list(READERS))
@distributed(2)
def test_an_embedding_whose_weight_something_else_reads(reader: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 8)
        READERS[reader](embedding)
        if reader == "child":
            embedding.register_forward_hook(lambda m, args, output: m.scale(output))
        return nn.Sequential(embedding, nn.Linear(8, 8), nn.Linear(8, 3)).double()

    plain, model = make(), sharded_by_layer(make())
    for _ in range(2):
        assert_trains_as_plain(plain, model)


@pytest.mark.parametrize("reader", list(LATE_READERS))
@distributed(2)
def test_an_embedding_whose_weight_something_reads_later(reader: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)).double()

    plain, model = make(), sharded_by_layer(make())
    assert_trains_as_plain(plain, model)
    handles = [LATE_READERS[reader](network) for network in (plain, model)]
    for _ in range(2):
        assert_trains_as_plain(plain, model)
    if reader == "global hook":
        for handle in handles:
            handle.remove()


@ours_only("looks inside")
@distributed(2)
def test_the_memory_of_an_embedding_is_kept_while_something_reads_it() -> None:
    torch.manual_seed(0)
    model: Any = sharded_by_layer(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
    handle = model[0].register_forward_hook(similar, prepend=True)
    held = []
    for _ in range(2):
        loss = model(torch.arange(6)).sum()
        (bucket,) = model[0]._fsdp2_unit.buckets
        held.append(bucket.allocated_bytes > 0)
        loss.backward()
        handle.remove()
    assert held == [True, False]


class Either(nn.Module):
    """Ranks use different parameters; the last layer runs everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first[dist.get_rank() % 2](x)))


@pytest.mark.parametrize("grad_input", [True, False])
@distributed(2, 3)
def test_ranks_that_use_different_parameters_of_a_unit(grad_input: bool) -> None:
    torch.manual_seed(0)
    plain = Either().double()
    model: Any = Either().double()
    model.load_state_dict(plain.state_dict())
    fully_shard(model.last, **gathering())
    fully_shard(model, **gathering())
    model.set_reduce_scatter_unused_params(True)
    for step in range(2):
        x = torch.full((3, 5), 0.1 * (step + 1), dtype=torch.float64, requires_grad=grad_input)
        model(x).sum().backward()
        plain(x).sum().backward()
        for parameter in plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_gradients(plain)
        assert_same_gradients(model, plain)
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        plain.zero_grad()


def to_float32(model: Any) -> None:
    model.float()


def to_other_transports(model: Any) -> None:
    model.set_separate_reduce_scatter_group(True)


@pytest.mark.parametrize("change", [None, to_float32, to_other_transports])
@distributed(2)
def test_units_that_did_not_run_take_part_with_zeros(change: Callable[[Any], None] | None) -> None:
    """Also where they did not run since something has changed."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).double()

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    model: Any = Chooses()
    model.load_state_dict(plain.state_dict())
    for unit in (model.a, model.b):
        fully_shard(unit)
    fully_shard(model)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert model.b.weight.grad is None
    model.zero_grad()
    model.b.set_reduce_scatter_unused_params(True)
    if change is not None:
        change(model)
    model(torch.ones(2, 4, dtype=model.a.weight.dtype)).sum().backward()
    assert model.b.weight.grad.dtype == model.b.weight.dtype
    assert not whole(model.b.weight.grad).any()
    assert whole(model.a.weight.grad).any()


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@distributed(2)
def test_how_many_reductions_may_be_on_their_way(num_buffers: int) -> None:
    model, plain = pair(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_max_input_buffers(num_buffers)
    runtime_of: Callable[[], Any] = lambda: model._fsdp2_unit.runtime  # noqa: E731
    run_both(TRANSFORMER, model, plain, 0)
    most = 0
    reduce = type(runtime_of()).reduce

    def counted(runtime: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal most
        reduce(runtime, *args, **kwargs)
        most = max(most, len(runtime.reductions))

    runtime_of().reduce = counted.__get__(runtime_of())
    model.zero_grad()
    plain.zero_grad()
    run_both(TRANSFORMER, model, plain, 1)
    assert_same_gradients(model, plain)
    assert most == min(num_buffers, 3)


test_how_many_reductions_may_be_on_their_way = ours_only("counts inside")(
    test_how_many_reductions_may_be_on_their_way
)


@distributed(1)
def test_numbers_of_buffers_that_make_no_sense() -> None:
    model = fully_shard(nn.Linear(2, 2))
    for wrong in (True, 1.5, "2"):
        with pytest.raises(TypeError, match="max_input_buffers must be an int"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="positive int"):
        model.set_reduce_scatter_max_input_buffers(0)


# ------------------------------------------------------------------------------ reductions


@distributed(2, 4)
def test_the_hook_sees_and_changes_reduced_gradients() -> None:
    model, plain = pair(MLP)
    seen: list[Tensor] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(2)

    for unit in [*MLP.units(model), model]:
        unit.set_all_reduce_hook(double)
    run_both(MLP, model, plain, 0)
    for parameter in plain.parameters():
        parameter.grad.mul_(2)
    assert_same_gradients(model, plain)
    assert all(part.ndim == 1 for part in seen)
    assert sum(part.numel() for part in seen) >= sum(
        p.to_local().numel() for p in model.parameters()
    )


@ours_only("rows are padded in other ways")
@distributed(3)
def test_the_hook_sees_zeros_in_the_padding() -> None:
    """A hook that looks for infinite values must not find those of memory that was freed."""
    seen: list[Tensor] = []
    # Seven rows on three ranks: one lacks two. Sums in float32 go to a temporary.
    model: Any = nn.Linear(8, 7, bias=False, dtype=torch.bfloat16)
    fully_shard(model, direct_min_bytes=0)
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.clone()))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaNs
    try:
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    (reduced,) = seen
    assert reduced.numel() == 3 * 8
    rows = model.weight.to_local().shape[0]
    assert reduced.view(3, 8)[:rows].eq(2).all()
    assert not reduced.view(3, 8)[rows:].any()


@distributed(4)
def test_the_hook_all_reduces_over_other_ranks() -> None:
    """Replication by hand: shards over two ranks, and the hook averages over pairs of them."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(MLP, mesh=mesh["shard"])

    def average(reduced: Tensor) -> None:
        dist.all_reduce(reduced, group=mesh.get_group("replicate"))
        reduced.div_(2)

    for unit in [*MLP.units(model), model]:
        unit.set_all_reduce_hook(average)
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@distributed(4)
def test_the_hook_runs_after_the_all_reduce_over_replicas() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(MLP, mesh=mesh)
    calls = 0

    def negate(reduced: Tensor) -> None:
        nonlocal calls
        calls += 1
        reduced.neg_()

    for unit in [*MLP.units(model), model]:
        unit.set_all_reduce_hook(negate)
    run_both(MLP, model, plain, 0)
    for parameter in plain.parameters():
        parameter.grad.neg_()
    assert_same_gradients(model, plain)
    assert calls >= 3
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(negate, stream=torch.Stream(device="cpu"))  # type: ignore[operator]


@cpu_only("streams of the CPU")
@distributed(1, 2)
def test_the_hook_finds_the_stream_that_it_was_given() -> None:
    stream = torch.cpu.Stream()
    seen: list[Any] = []
    model, plain = pair(MLP)
    for unit in [*MLP.units(model), model]:
        unit.set_all_reduce_hook(
            lambda reduced: seen.append(torch.cpu.current_stream()), stream=stream
        )
    run_both(MLP, model, plain, 0)
    assert seen
    assert all(each is stream for each in seen)
    assert torch.cpu.current_stream() is not stream


@distributed(1)
def test_the_hook_on_one_rank() -> None:
    model, plain = pair(MLP)
    for unit in [*MLP.units(model), model]:
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(3))
    run_both(MLP, model, plain, 0)
    for parameter in plain.parameters():
        parameter.grad.mul_(3)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("replicas", [1, 2])
@distributed(4, long=(8,))
def test_sums_only(replicas: int) -> None:
    """The collectives get SUM, and the gradients are the same as with AVG."""
    world_size = dist.get_world_size()
    if replicas == 1:
        mesh = cached_mesh(world_size, names=("shard",))
    else:
        mesh = cached_mesh(replicas, world_size // replicas, names=("replicate", "shard"))
    model, plain = pair(MLP, mesh=mesh)
    for unit in [*MLP.units(model), model]:
        unit.set_force_sum_reduction_for_comms(True)
    for step in range(2):
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    for unit in MLP.units(model):
        links = unit._fsdp2_unit.param_group.transports[0]
        for transport in (links.scatter, links.replicate):
            options = vars(transport) if transport is not None else {}
            for name in ("_reduce_options", "_all_reduce_options"):
                if name in options:
                    assert options[name].reduceOp == dist.ReduceOp.SUM


test_sums_only = ours_only("looks at the operation inside")(test_sums_only)


@distributed(2)
def test_a_group_of_its_own_for_reductions() -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)

    def groups() -> set[tuple[bool, str]]:
        links = [unit._fsdp2_unit.param_group.transports[0] for unit in MLP.units(model)]
        return {(a.scatter.group is a.gather.group, a.scatter.group.group_name) for a in links}

    run_both(MLP, model, plain, 0)
    ((shared, _),) = groups()  # gloo has no communicator that could be busy
    assert shared
    model.set_separate_reduce_scatter_group(True)
    model.zero_grad()
    plain.zero_grad()
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)
    ((shared, _),) = groups()  # and all units use the same one
    assert not shared
    model.set_separate_reduce_scatter_group(False)
    model.zero_grad()
    plain.zero_grad()
    run_both(MLP, model, plain, 2)
    assert_same_gradients(model, plain)
    ((shared, _),) = groups()
    assert shared


test_a_group_of_its_own_for_reductions = ours_only("looks at groups inside")(
    test_a_group_of_its_own_for_reductions
)


@distributed(2)
def test_the_former_name_of_the_divide_factor() -> None:
    model, plain = pair(MLP)
    for unit in [*MLP.units(model), model]:
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            unit.set_reduce_scatter_divide_factor(1.0)
    run_both(MLP, model, plain, 0)
    for parameter in plain.parameters():
        parameter.grad.mul_(dist.get_world_size())
    assert_same_gradients(model, plain)


# --------------------------------------------------------------------------- several roots


@distributed(2)
def test_sharing_streams() -> None:
    """Before and after the first step; the models compute as before."""
    case = BY_NAME["mlp"]
    torch.manual_seed(0)
    models = [shard_case(case, case.build().double()) for _ in range(3)]
    case.loss(models[0], *case.batch(0, 0, torch.float64)).backward()
    share_comm_ctx(models)  # type: ignore[arg-type]
    for model in models:
        case.loss(model, *case.batch(0, 0, torch.float64)).backward()
    streams = [model._fsdp2_unit.runtime.streams for model in models]  # type: ignore[union-attr]
    assert all(each is streams[0] for each in streams)
    share_comm_ctx([])
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        share_comm_ctx([models[0], nn.Linear(2, 2)])  # type: ignore[list-item]


test_sharing_streams = ours_only("looks at streams inside")(test_sharing_streams)


@distributed(2)
def test_reset_is_for_the_root() -> None:
    model, _ = pair(MLP)
    assert isinstance(model, FSDPModule)
    square_loss(model, *normal_batch(6, 7)(0, 0, torch.float64)).backward()
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="must be called on the root FSDP module"):
        MLP.units(model)[0].reset_iter_state()


# ----------------------------------------------------------------- only where CUDA and NCCL are


@distributed(1)
def test_memory_of_the_group_needs_cuda() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="needs CUDA and NCCL, but this module is on 'cpu'"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(RuntimeError, match="needs CUDA and NCCL, but this module is on 'cpu'"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="'NVSHMEM'"):
        model.set_symm_mem_for_comm("NVSHMEM")
    model.set_allocate_memory_from_process_group_for_comm(False)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
