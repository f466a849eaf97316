"""What a user may do with `.grad`, and with backward, without disturbing the next one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import FSDPModule, fully_shard
from fsdp2.sharding import gradients as gradients_of_buckets
from fsdp2.sharding.gradients import GradientStore
from harness import cpu_only, distributed, ours_only
from models import BY_NAME, EVEN_MLP, MLP, RECURRENT, TRANSFORMER, Case, no_units, normal_batch
from reference import (
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    average_over_ranks,
    gradients,
    pair,
    run_both,
    whole,
)


def local_gradients(model: nn.Module) -> list[Tensor]:
    """The gradient tensors themselves, as a user would keep them."""
    kept = [p.grad for p in model.parameters()]
    assert all(isinstance(grad, DTensor) for grad in kept)
    return [grad for grad in kept if grad is not None]


@pytest.mark.parametrize("name", ["mlp", "even_mlp", "transformer"])
@distributed(3, long=(1, 2, 4))
def test_full_tensors_of_parameters_and_gradients(name: str) -> None:
    model, plain = pair(BY_NAME[name])
    run_both(BY_NAME[name], model, plain, 0)
    for (path, sharded), parameter in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(whole(sharded), parameter), path
        assert sharded.grad is not None
        assert parameter.grad is not None
        assert_same(whole(sharded.grad), parameter.grad, path)


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(1, 2, 3)
def test_zero_grad_forgets_the_last_step(set_to_none: bool) -> None:
    model, plain = pair(EVEN_MLP)
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        plain.zero_grad(set_to_none=set_to_none)
        run_both(EVEN_MLP, model, plain, step)
        assert_same_gradients(model, plain)


def gradient_bytes(model: Any) -> int:
    """Bytes of memory of the sharded gradients that the library holds, attached or not."""
    stores = [bucket.grads for unit in model._units(True) for bucket in unit.buckets]
    return sum(store.storage.size() for store in stores if store is not None)


# Gradients that are as small as those of the test models would keep their memory.
FREE_SMALL = mock.patch("fsdp2.sharding.gradients.FREE_MIN_BYTES", 0)


@pytest.mark.parametrize("way", ["optimizer", "model", "subclass"])
@ours_only("memory of gradients")
@distributed(2)
@FREE_SMALL
def test_zero_grad_frees_the_memory(way: str) -> None:
    """Of what it drops: not of another model's, nor of a gradient that a user holds."""

    class Doubled(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=set_to_none)

    model, plain = pair(EVEN_MLP)
    other, other_plain = pair(EVEN_MLP)
    make = Doubled if way == "subclass" else torch.optim.SGD
    optimizers = [make(net.parameters(), lr=0.1) for net in (model, plain)]
    for step in range(3):
        run_both(EVEN_MLP, model, plain, step)
        run_both(EVEN_MLP, other, other_plain, step)
        whole_bytes = gradient_bytes(model)
        assert whole_bytes > 0
        for each in optimizers:
            each.step()
        optimizers[0].zero_grad(set_to_none=False)
        assert gradient_bytes(model) == whole_bytes
        kept = local_of(local_gradients(model)[0]) if step == 2 else None
        model.zero_grad() if way == "model" else optimizers[0].zero_grad()
        plain.zero_grad()
        assert gradient_bytes(model) == 0
        assert kept is None or not kept.any()
        assert gradient_bytes(other) == whole_bytes
        assert_same_gradients(other, other_plain)
        other.zero_grad()
        other_plain.zero_grad()


@ours_only("memory of gradients")
@distributed(2)
@FREE_SMALL
def test_an_optimizer_in_backward_frees_the_memory() -> None:
    model, plain = pair(EVEN_MLP)
    for each in model.parameters():
        optimizer = torch.optim.SGD([each], lr=0.1)

        def step_and_drop(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        each.register_post_accumulate_grad_hook(step_and_drop)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        run_both(EVEN_MLP, model, plain, step)
        reference.step()
        reference.zero_grad()
        assert gradient_bytes(model) == 0
    for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(whole(sharded), parameter, "parameter")


@ours_only("memory of gradients")
@distributed(2)
@FREE_SMALL
def test_gradients_dropped_by_hand_are_freed_by_the_next_forward() -> None:
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    for parameter in model.parameters():
        parameter.grad = None
    model(EVEN_MLP.batch(1, dist.get_rank(), torch.float64)[0])
    assert gradient_bytes(model) == 0


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func.name())
        return func(*args, **(kwargs or {}))


@cpu_only("other allocators give another address by themselves")
@ours_only("memory of gradients")
@distributed(2)
@FREE_SMALL
def test_gradients_follow_their_memory_by_one_operator_each() -> None:
    """Where an allocator gives other memory in each step, and as the same tensor objects."""
    model, plain = pair(EVEN_MLP)
    resize, follow = gradients_of_buckets.resize, GradientStore._follow
    taken: set[int] = set()
    in_the_way: list[Tensor] = []
    moves: list[tuple[int, list[str]]] = []
    ids: list[list[int]] = []

    def resize_elsewhere(storage: torch.UntypedStorage, nbytes: int) -> None:
        resize(storage, nbytes)
        while nbytes and storage.data_ptr() in taken:
            resize(storage, 0)
            in_the_way.append(torch.empty(nbytes, dtype=torch.uint8))
            resize(storage, nbytes)
        taken.add(storage.data_ptr())

    def follow_and_count(store: GradientStore) -> None:
        with Operators() as operators:
            follow(store)
        moves.append((len(store.locals), operators.called))

    with (
        mock.patch.object(gradients_of_buckets, "resize", resize_elsewhere),
        mock.patch.object(GradientStore, "_follow", follow_and_count),
    ):
        for step in range(3):
            run_both(EVEN_MLP, model, plain, step)
            assert_same_gradients(model, plain)
            # Held by the library alone from here on: a gradient that a user holds keeps its memory.
            ids.append([id(each) for each in local_gradients(model)])
            assert ids[-1] == ids[0]
            model.zero_grad()
            plain.zero_grad()
    assert moves
    for num_params, called in moves:
        assert called == ["aten::set_.source_Storage_storage_offset"] * num_params


@pytest.mark.parametrize("dropped_before", [0, 2])
@pytest.mark.parametrize("name", ["mlp", "even_mlp"])
@distributed(1, 2, 3)
def test_gradients_kept_across_zero_grad_stay_as_they_are(name: str, dropped_before: int) -> None:
    case = BY_NAME[name]
    model, plain = pair(case)
    for _ in range(dropped_before):  # their memory is there for others to be written to
        run_both(case, model, plain, 3)
        model.zero_grad()
        plain.zero_grad()
    run_both(case, model, plain, 0)
    kept = local_gradients(model)
    before = [whole(grad) for grad in kept]
    for step in (1, 2):
        model.zero_grad()
        plain.zero_grad()
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
    for grad, former in zip(kept, before, strict=True):
        assert torch.equal(whole(grad), former)


def local_of(grad: Tensor) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.to_local()


# What a user may hold on to.
WAYS_TO_KEEP: dict[str, Callable[[Tensor], Any]] = {
    "local tensor": local_of,
    "detached": lambda grad: local_of(grad.detach()),
    "data": lambda grad: local_of(grad.data),
    "flat view": lambda grad: local_of(grad).view(-1),
    "slice": lambda grad: local_of(grad)[1:],
    "transposed": lambda grad: local_of(grad).t(),
    "numpy": lambda grad: local_of(grad).numpy(),
    "slice of numpy": lambda grad: local_of(grad).numpy()[:1],
}


NUMPY = cpu_only("arrays of numpy are on the host")


def values_of(kept: Any) -> list[float]:
    return torch.as_tensor(kept).flatten().tolist()


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=NUMPY if "numpy" in way else ()) for way in WAYS_TO_KEEP],
)
@distributed(1, 2)
def test_gradients_kept_in_part_or_by_another_name(way: str) -> None:
    """Whoever owns the storage, nobody overwrites or frees what can still be read."""
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    kept = WAYS_TO_KEEP[way](local_gradients(model)[2])
    before = values_of(kept)
    assert before
    model.zero_grad()
    plain.zero_grad()
    for step in (1, 2):
        run_both(EVEN_MLP, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
        assert values_of(kept) == before


@pytest.mark.parametrize("way", ["local tensor", "flat view", pytest.param("numpy", marks=NUMPY)])
@distributed(1, 2)
def test_gradients_kept_and_dropped_between_forward_and_backward(way: str) -> None:
    """`zero_grad` right before backward, as many training loops have it."""
    model, plain = pair(EVEN_MLP)
    kept: list[tuple[Any, list[float]]] = []
    for step in range(3):
        batch = EVEN_MLP.batch(step, dist.get_rank(), torch.float64)
        losses = {network: EVEN_MLP.loss(network, *batch) for network in (plain, model)}
        if step:
            grad = WAYS_TO_KEEP[way](local_gradients(model)[0])
            kept.append((grad, values_of(grad)))
            del grad
        for network, loss in losses.items():
            network.zero_grad()
            loss.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        for grad, before in kept:
            assert values_of(grad) == before


@distributed(1, 2, 3)
def test_gradients_replaced_by_the_user_are_added_to() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert sharded.grad is not None
        assert parameter.grad is not None
        sharded.grad = sharded.grad * 3
        parameter.grad = parameter.grad * 3
    mine = local_gradients(model)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)
    model.zero_grad()
    plain.zero_grad()
    run_both(MLP, model, plain, 2)
    assert_same_gradients(model, plain)
    assert all(grad.to_local().isfinite().all() for grad in mine if isinstance(grad, DTensor))


@distributed(2, 3)
def test_one_gradient_removed_by_the_user() -> None:
    """Some gradients of a unit are there and some are not when the next backward comes."""
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    for network in (model, plain):
        network.get_parameter("0.weight").grad = None
        network.get_parameter("4.bias").grad = None
    run_both(EVEN_MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("name", ["0.weight", "2.bias", "4.weight"])
@distributed(1, 2, 3)
def test_one_gradient_kept_and_removed_by_the_user(name: str) -> None:
    """It stays as it is, while the others of its unit are added to."""
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    kept = model.get_parameter(name).grad
    assert isinstance(kept, DTensor)
    before = whole(kept)
    for step in (1, 2):
        for network in (model, plain):
            network.get_parameter(name).grad = None
        run_both(EVEN_MLP, model, plain, step)
        assert_same_gradients(model, plain)
        assert torch.equal(whole(kept), before)


@distributed(1, 2, 3)
def test_a_gradient_moved_to_another_parameter() -> None:
    """Swapped between two parameters of one unit and shape, and put back later."""
    case = Case(
        "twins",
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)),
        no_units,
        normal_batch(3, 6),
    )
    model, plain = pair(case)
    for step in range(3):
        run_both(case, model, plain, step)
        for network in (model, plain):
            first, second = network.get_parameter("0.weight"), network.get_parameter("1.weight")
            first.grad, second.grad = second.grad, first.grad
        assert_same_gradients(model, plain)
    model.zero_grad()
    plain.zero_grad()
    run_both(case, model, plain, 3)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_gradients_changed_in_place_between_backwards() -> None:
    model, plain = pair(EVEN_MLP)
    for step in range(3):
        run_both(EVEN_MLP, model, plain, step)
        for network in (model, plain):
            for parameter in network.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
    assert_same_gradients(model, plain)


def backward_twice(case: Case, model: nn.Module, reduce: bool) -> None:
    loss = case.loss(model, *case.batch(0, dist.get_rank(), torch.float64))
    loss.backward(retain_graph=True)
    if reduce:
        average_gradients(model)
    loss.backward()
    if reduce:
        average_gradients(model)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent"])
@distributed(1, 2, 3)
def test_backward_twice_through_a_retained_graph(name: str, mode: bool) -> None:
    case = BY_NAME[name]
    model, plain = pair(case, reshard_after_forward=mode)
    backward_twice(case, plain, reduce=True)
    backward_twice(case, model, reduce=False)
    assert_sharded(model)
    assert_same_gradients(model, plain)
    run_both(case, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(1, 2, 3)
def test_gradient_of_the_input() -> None:
    model, plain = pair(MLP)
    (inputs,) = MLP.batch(0, dist.get_rank(), torch.float64)
    mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    MLP.loss(model, mine).backward()
    MLP.loss(plain, theirs).backward()
    average_gradients(plain)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert_same(mine.grad, theirs.grad, "gradient of the input", bitwise=True)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_gradient_of_the_input_alone_by_autograd_grad() -> None:
    """torch.autograd.grad accumulates nothing; the parameters go back to their shards."""
    model, plain = pair(MLP)
    (inputs,) = MLP.batch(0, dist.get_rank(), torch.float64)
    inputs.requires_grad_()
    (mine,) = torch.autograd.grad(MLP.loss(model, inputs), inputs)
    (theirs,) = torch.autograd.grad(MLP.loss(plain, inputs), inputs)
    assert_same(mine, theirs, "gradient of the input", bitwise=True)
    assert all(p.grad is None for p in model.parameters())
    run_both(MLP, model, plain, 1)
    assert_sharded(model)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_hooks_on_the_sharded_parameters_see_the_reduced_gradient() -> None:
    model, plain = pair(EVEN_MLP)
    seen: list[Tensor] = []
    weight = model.get_parameter("2.weight")
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
    run_both(EVEN_MLP, model, plain, 0)
    expected = plain.get_parameter("2.weight").grad
    assert expected is not None
    assert len(seen) == 1
    assert_same(seen[0], expected, "gradient that the hook saw")


class Spread(nn.Module):
    """Gradients that are not laid out as their parameters: transposed, expanded, sliced, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 4))
        self.row = nn.Parameter(torch.randn(4))
        self.left = nn.Parameter(torch.randn(3, 5))
        self.right = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left, self.right])
        y = x @ self.matrix.t().contiguous().t().t() + (joined.sum() + self.row[::2].sum())
        return y + self.row.sum() * joined[2:6, 1:2].sum()


@pytest.mark.parametrize("sync", [True, False])
@distributed(1, 2, 3, 4)
def test_gradients_of_unusual_layout(sync: bool) -> None:
    def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor]:
        return (torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(rank)),)

    case = Case("spread", Spread, lambda model: [], batch)
    model, plain = pair(case)
    for step in range(3):
        last = sync or step == 2
        cast(FSDPModule, model).set_requires_gradient_sync(last)
        run_both(case, model, plain, step, average=last)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_gradients_of_the_reference_are_averages() -> None:
    """The reference itself, against numbers written by hand."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mean = average_over_ranks(torch.tensor([1.0 * rank, 2.0]))
    assert mean.tolist() == [(world_size - 1) / 2, 2.0]
    plain = nn.Linear(1, 1, bias=False)
    (plain(torch.tensor([[float(rank)]])) * 1.0).sum().backward()
    average_gradients(plain)
    grad = gradients(plain)["weight"]
    assert grad is not None
    assert grad.item() == (world_size - 1) / 2


@distributed(2)
def test_backward_of_a_part_of_the_loss() -> None:
    """Two losses of one forward, one backward after the other."""
    for case in (TRANSFORMER, RECURRENT):
        model, plain = pair(case)
        batch = case.batch(0, dist.get_rank(), torch.float64)
        for network in (plain, model):
            output = network(batch[0])
            output[0].square().mean().backward(retain_graph=True)
            if network is plain:
                average_gradients(plain)
            output[1:].sin().mean().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)


@distributed(1, 2)
def test_a_gradient_penalty() -> None:
    """The gradient of a gradient: the graph of a backward needs parameters after it."""
    for case in (EVEN_MLP, MLP):
        model, plain = pair(case, reshard_after_forward=False)
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_backward(False)
        for step in range(2):
            (inputs,) = case.batch(step, dist.get_rank(), torch.float64)
            for network in (plain, model):
                x = inputs.clone().requires_grad_()
                (slope,) = torch.autograd.grad(case.loss(network, x), x, create_graph=True)
                slope.square().sum().backward()
            average_gradients(plain)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()


@ours_only("units get new unsharded parameters at the first forward of a root")
@pytest.mark.parametrize("sums", [1, 2])
@distributed(1, 2)
def test_a_weight_used_before_the_first_forward_of_the_root_gets_its_gradient(sums: int) -> None:
    """The root makes new unsharded parameters; the loss has one of those from before."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model[1])
    fully_shard(model)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(sums):
        model[1].unshard()
        for each in (plain, model):
            weight = each[1].weight
            loss = weight.sum() * 2 + each(x).square().mean()
            loss.backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)
