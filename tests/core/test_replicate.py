"""Units and parameters that every rank holds whole, in one model with sharded ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.transport import pretended_hosts
from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    replicate,
)
from fsdp2.checkpoint import Checkpointer
from fsdp2.transports.host.exchange import Exchange
from fsdp2.transports.host.links import HostLinks
from fsdp2.transports.host.messages import Messages
from fsdp2.transports.host.reads import SPREAD
from harness import cached_mesh, cpu_only, distributed, ours_only, shared_folder
from models import BY_NAME, EVEN_MLP, LORA, MLP, NESTED, PARITY_CASES, TRANSFORMER, Case
from reference import (
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    buffers,
    gathering,
    parameters,
    run_both,
    whole,
)

pytestmark = ours_only("torch's replicate is private")

Choice = Callable[[int, int], bool]  # (index of a unit, number of units), the root last
CHOICES: dict[str, Choice] = {
    "all": lambda i, n: True,
    "some": lambda i, n: i % 2 == 0,
    "root": lambda i, n: i == n - 1,
    "units": lambda i, n: i < n - 1,
}


def build(
    case: Case,
    choice: str,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """The chosen units replicated and the others sharded, and the plain model."""
    torch.manual_seed(0)
    plain = case.build().to(dtype)
    model = copy.deepcopy(plain)
    units = [*case.units(model), model]
    for i, unit in enumerate(units):
        if CHOICES[choice](i, len(units)):
            replicate(unit, mesh=mesh, **options)
        else:
            fully_shard(unit, mesh=mesh, **gathering(), **options)
    return model, plain


def train(case: Case, choice: str, *, steps: int = 5, **options: Any) -> None:
    model, plain = build(case, choice, **options)
    assert isinstance(model, FSDPModule)
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.05)
        for each in (model, plain)
    ]
    assert_same_parameters(model, plain, bitwise=True)
    for step in range(steps):
        run_both(case, model, plain, step, bitwise_loss=step == 0)
        assert_same_gradients(model, plain)
        assert_all_same(buffers(model), buffers(plain), "buffer")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("choice", CHOICES)
@distributed(2, long=(3,))
def test_training(choice: str) -> None:
    for case in PARITY_CASES if choice in ("all", "some") else (TRANSFORMER, NESTED, LORA):
        train(case, choice, steps=5 if case is TRANSFORMER else 2)


@distributed(4)
def test_training_on_a_mesh_of_replicas_and_shards() -> None:
    """There all-reduces go over both dims."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    for case, choice in ((TRANSFORMER, "some"), (NESTED, "units"), (LORA, "all")):
        train(case, choice, mesh=mesh)
    train(MLP, "some", mesh=cached_mesh(2, 2))


@distributed(2)
def test_offload() -> None:
    for choice in ("all", "some"):
        train(MLP, choice, offload_policy=CPUOffloadPolicy())


# ---------------------------------------------------------------------------------------- layout


@distributed(4)
def test_parameters_are_on_the_mesh_of_the_sharded_ones() -> None:
    for mesh in (cached_mesh(4, names=("dp",)), cached_mesh(2, 2, names=("replicate", "shard"))):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        first = replicate(model[0], mesh=mesh)
        assert first is model[0]
        fully_shard(model, mesh=mesh)
        for parameter in first.parameters():
            assert parameter.device_mesh == mesh
            assert parameter.placements == (Replicate(),) * mesh.ndim
            assert parameter.to_local().shape == parameter.shape
        assert model[1].weight.device_mesh == mesh
        assert model[1].weight.placements[-1] == Shard(0)
        model(torch.ones(1, 6)).sum().backward()
        assert first.weight.grad.placements == first.weight.placements


@distributed(2)
def test_several_modules_as_one_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    both = [model[0], model[2]]
    assert replicate(both) is both
    assert fully_shard.state(model[0]) is fully_shard.state(model[2])


@distributed(4)
def test_named_dims() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    layer = nn.Linear(3, 2)
    replicate(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))
    layer(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    ranks = [r for r in range(4) if r % 2 == dist.get_rank() % 2]
    assert whole(layer.weight.grad).eq(sum(1.0 + r for r in ranks) / 2).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["shards", "replicas"])
@distributed(4)
def test_small_parameters_of_a_unit(shape: tuple[int, ...]) -> None:
    """Chosen by the placement function: matrices are sharded, the rest is not."""
    mesh = cached_mesh(*shape)

    def place(parameter: nn.Parameter) -> Replicate | ShardPlacementResult | None:
        if parameter.ndim > 1:
            return None
        return Replicate() if parameter.shape[0] > 5 else ShardPlacementResult(Replicate())

    torch.manual_seed(0)
    plain = TRANSFORMER.build().double()
    model = copy.deepcopy(plain)
    for unit in [*TRANSFORMER.units(model), model]:
        fully_shard(unit, mesh=mesh, shard_placement_fn=place)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        wanted = Shard(0) if parameter.ndim > 1 else Replicate()
        assert parameter.placements == (*[Replicate()] * (len(shape) - 1), wanted)
        assert parameter.device_mesh == mesh
    for step in range(5):
        run_both(TRANSFORMER, model, plain, step)
        assert_same_gradients(model, plain)
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.05).step()
            each.zero_grad()


# --------------------------------------------------------------------------------- communication


@contextmanager
def events_of(model: nn.Sequential) -> Iterator[list[str]]:
    """What happens in what order: gathers, all-reduces and their ends, backwards of layers."""
    events: list[str] = []
    gather, all_reduce = Exchange.all_gather, Exchange.all_reduce

    def noted_gather(self: Exchange, *args: Any) -> Any:
        events.append("gather")
        return gather(self, *args)

    def noted_all_reduce(self: Exchange, *args: Any) -> Any:
        number = sum(event.startswith("all-reduce") for event in events)
        events.append(f"all-reduce {number}")
        finish = all_reduce(self, *args)

        def noted_finish() -> None:
            events.append(f"done {number}")
            assert finish is not None
            finish()

        return noted_finish

    handles = [
        layer.register_full_backward_hook(lambda *_, i=i: events.append(f"backward {i}"))
        for i, layer in enumerate(model)
        if isinstance(layer, nn.Linear)
    ]
    Exchange.all_gather, Exchange.all_reduce = noted_gather, noted_all_reduce  # type: ignore[method-assign,assignment]
    try:
        yield events
    finally:
        Exchange.all_gather, Exchange.all_reduce = gather, all_reduce  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


@cpu_only("events are noted at the exchange")
@distributed(2)
def test_nothing_is_gathered_and_all_reduces_run_beside_backward() -> None:
    model, _ = build(EVEN_MLP, "all", dtype=torch.float32)
    assert isinstance(model, nn.Sequential)
    (inputs,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float32)
    model(inputs).sum().backward()
    inputs.requires_grad_()
    with events_of(model) as events:
        model(inputs).sum().backward()
    assert "gather" not in events
    assert [e for e in events if e.startswith("all-reduce")] == [
        f"all-reduce {i}" for i in range(3)
    ]
    for i, below in enumerate((2, 0)):
        # That of a layer begins before the backward of the one below it, and ends after it.
        order = [f"all-reduce {i}", f"backward {below}", f"done {i}"]
        assert [event for event in events if event in order] == order, events


class _WaitInBackward(torch.autograd.Function):
    """Identity whose backward waits until something was seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: threading.Event) -> torch.Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert ctx.seen.wait(60), "the sums were not sent while backward ran"
        return grad, None


@contextmanager
def second_phase(seen: threading.Event) -> Iterator[list[str]]:
    """Tells when this rank has begun to give others the sums of an all-reduce."""
    kinds: list[str] = []
    begin, start = HostLinks.begin, Messages._start

    def noted_begin(self: HostLinks, key: int, *args: Any, **kwargs: Any) -> Any:
        made = begin(self, key, *args, **kwargs)
        if key % 8 == SPREAD:
            kinds.append("reads")
            seen.set()
        return made

    def noted_start(self: Messages, sends: Any, receives: Any) -> Any:
        made = start(self, sends, receives)
        kinds.append("messages")
        if kinds.count("messages") == 2:  # the terms before, and now the sums
            seen.set()
        return made

    with (
        mock.patch.object(HostLinks, "begin", noted_begin),
        mock.patch.object(Messages, "_start", noted_start),
    ):
        yield kinds


@cpu_only("the exchanges of gloo")
@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
@distributed(4)
def test_both_phases_of_an_all_reduce_begin_while_backward_runs(places: list[int]) -> None:
    """Backward of the lower layer waits until the sums of the upper one are on their way: on one
    host, by relays, and by messages."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(192, 192), nn.Linear(192, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(_WaitInBackward.apply(self.low(x), seen))

    seen = threading.Event()
    torch.manual_seed(0)
    plain = Layers()
    model = copy.deepcopy(plain)
    with pretended_hosts(places):
        for layer in (model.low, model.high):
            replicate(layer)
        replicate(model)
        for step in range(2):
            batch = torch.randn(4, 192, generator=torch.Generator().manual_seed(dist.get_rank()))
            seen.clear()
            if step == 0:  # the first forward finds out how ranks exchange data
                seen.set()
            with second_phase(seen) as kinds:
                model(batch).square().sum().backward()
            if step == 0:
                model.zero_grad()
    # (Messages everywhere, where ranks may not read each other's memory.)
    assert kinds.count("reads") == 2 or kinds.count("messages") == 4
    seen.set()
    plain(batch).square().sum().backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        grad: Any = model.get_parameter(name).grad
        torch.testing.assert_close(grad.to_local(), param.grad)


@cpu_only("events are noted at the exchange")
@distributed(2)
def test_only_sharded_units_are_gathered() -> None:
    model, _ = build(EVEN_MLP, "units", dtype=torch.float32)
    assert isinstance(model, nn.Sequential)
    fully_shard(last := nn.Linear(12, 4))
    model.append(last)
    (inputs,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float32)
    model(inputs).sum().backward()
    with events_of(model) as events:
        model(inputs).sum().backward()
    assert events.count("gather") == 1  # the last unit keeps its memory for backward


# ------------------------------------------------------------------ accumulation, clipping, dtypes


@pytest.mark.parametrize("without", ["sync", "all-reduce", "zero_grad"])
@distributed(2)
def test_accumulation(without: str) -> None:
    model, plain = build(TRANSFORMER, "some")
    assert isinstance(model, FSDPModule)
    for step in range(3):
        communicates = without == "zero_grad" or step == 2
        if without == "sync":
            model.set_requires_gradient_sync(communicates)
        elif without == "all-reduce":
            model.set_requires_all_reduce(communicates)
        run_both(TRANSFORMER, model, plain, step, average=communicates)
    assert_same_gradients(model, plain)


@distributed(2, 4)
def test_clipping() -> None:
    """The norm is that of all gradients, of both kinds; each counts once."""
    model, plain = build(TRANSFORMER, "some")
    for step, limit in enumerate([1e-3, 1e3]):
        run_both(TRANSFORMER, model, plain, step)
        norms = [
            whole(torch.nn.utils.clip_grad_norm_(each.parameters(), limit))
            for each in (model, plain)
        ]
        assert_same(norms[0], norms[1], "norm")
        assert_same_gradients(model, plain)


@distributed(2)
def test_mixed_precision() -> None:
    """Low-precision gradients, averaged in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = build(EVEN_MLP, "all", dtype=torch.float32, mp_policy=policy)
    (inputs,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float32)
    low = copy.deepcopy(plain).bfloat16()
    for each in (model, low):
        each(inputs.bfloat16()).float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), low.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.float32
        parts = [torch.empty_like(theirs.grad) for _ in range(2)]
        dist.all_gather(parts, theirs.grad)
        expected = (parts[0].float() + parts[1].float()) / 2
        assert torch.equal(whole(ours.grad), expected)


@distributed(4)
def test_tensor_parallel_units() -> None:
    """Norms of a tensor-parallel model, whose gradients are partial sums over the other dim."""
    import llama

    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    plain = llama.Llama().double()
    model = copy.deepcopy(plain)
    llama.tensor_parallel(model, mesh["tensor"])
    for layer in model.layers:
        replicate([layer.attention_norm, layer.ffn_norm], mesh=mesh["data"])
        fully_shard(layer, mesh=mesh["data"])
    replicate(model.norm, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    assert model.norm.weight.placements == (Replicate(), Replicate())
    for step in range(3):
        batch = llama.token_batch(step, mesh.get_local_rank("data"))
        expected = llama.loss_of(plain, batch)
        expected.backward()
        average_gradients(plain, group=mesh.get_group("data"))
        with llama.losses_in_parallel(True):
            loss = llama.loss_of(model, batch)
            loss.backward()
        assert_same(whole(loss), expected, "loss")
        for name, parameter in model.named_parameters():
            wanted = plain.get_parameter(name).grad
            assert wanted is not None
            assert parameter.grad is not None
            assert_same(whole(parameter.grad), wanted, name)
        model.zero_grad()
        plain.zero_grad()


# ------------------------------------------------------------------------- states, wrong arguments


@pytest.mark.parametrize("choices", [("some", "root"), ("all", "some")], ids="-".join)
@distributed(2)
def test_checkpoints_load_into_models_that_are_sharded_otherwise(choices: tuple[str, str]) -> None:
    case = BY_NAME["transformer"]
    model, plain = build(case, choices[0])
    other, _ = build(case, choices[1])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, other)]
    run_both(case, model, plain, 0)
    optimizers[0].step()
    with shared_folder() as folder:
        Checkpointer(folder).save(1, model=model, optimizer=optimizers[0])
        Checkpointer(folder).load(model=other, optimizer=optimizers[1])
    assert_all_same(parameters(other), parameters(model), "parameter", bitwise=True)
    moments: list[list[Tensor]] = [
        [whole(optimizer.state[p]["exp_avg"]) for p in each.parameters()]
        for each, optimizer in zip((model, other), optimizers, strict=True)
    ]
    assert all(map(torch.equal, *moments))


@distributed(2)
def test_state_dicts() -> None:
    model, plain = build(MLP, "some")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert_same_parameters(model, plain, bitwise=True)


@distributed(2)
def test_wrong_arguments() -> None:
    layer = replicate(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="already replicated: replicate can only be applied"):
        replicate(layer)
    with pytest.raises(ValueError, match="already replicated: fully_shard can only be applied"):
        fully_shard(layer)
    with pytest.raises(ValueError, match="already sharded: replicate can only be applied"):
        replicate(fully_shard(nn.Linear(2, 2)))
    mesh = cached_mesh(2, names=("dp",))
    with pytest.raises(ValueError, match="replicate-only dims, got shard='dp'"):
        replicate(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(TypeError, match=r"replicate expects a module or a list"):
        replicate(3)
    with pytest.raises(ValueError, match="replicate does not support containers"):
        replicate(nn.ModuleList([nn.Linear(2, 2)]))
