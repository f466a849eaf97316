"""When parameters are gathered and freed: reshard modes, `unshard` and `reshard` by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import FSDPModule, UnshardHandle, fully_shard
from fsdp2.runtime.states import GATHERED, RESHARDED, TRANSITIONS, State
from fsdp2.runtime.unit import unit_of
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, EVEN_MLP, MLP, TRANSFORMER
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    assert_unsharded,
    average_gradients,
    check_training,
    gathering,
    pair,
    run_both,
    whole,
)

three_models = pytest.mark.parametrize("name", ["mlp", "transformer", "nested"])


def units_of(model: nn.Module) -> list[FSDPModule]:
    """The sharded modules in the order of the module tree, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Sometimes(nn.Module):
    """A layer is called again, or another of its unit, in some steps only."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        first, second, last = (nn.Linear(6, 6).double() for _ in range(3))
        self.first, self.second, self.last = first, first if shared else second, last

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x).tanh()
        if both:
            x = self.second(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("with_last", [True, False])
@ours_only("torch has no order that it expects")
@distributed(2)
def test_a_unit_that_was_expected_again_is_freed_when_it_does_not_run(
    shared: bool, with_last: bool
) -> None:
    """Gathered for one more use, it would stay so after an evaluation."""
    model = Sometimes(shared=shared)
    if not with_last:  # then nothing comes after it
        model.last = nn.Identity()  # type: ignore[assignment]
    else:
        fully_shard(model.last)
    fully_shard([model.first] if shared else [model.first, model.second])  # type: ignore[arg-type]
    fully_shard(model)
    x = torch.ones(2, 6, dtype=torch.float64)
    unit = unit_of(model.first)
    held = []
    if with_last:
        model.last.register_forward_pre_hook(lambda *_: held.append(unit.state))
    with torch.no_grad():
        for both in (True, False, True):
            model(x, both)
            assert unit.state is State.SHARDED, both
    assert set(held) <= {State.SHARDED}
    model(x, True).sum().backward()
    model(x, False).sum().backward()
    assert_sharded(model)


@three_models
@distributed(4)
def test_parameters_are_kept_on_two_ranks_after_forward(name: str) -> None:
    check_training(BY_NAME[name], Training(steps=3), reshard_after_forward=2)


@pytest.mark.parametrize("dim", [0, 1])
@distributed(4)
def test_the_registered_parameters_are_those_kept_on_two_ranks(dim: int) -> None:
    """Between forward and backward: DTensors over groups of two, of the shape of the parameter."""
    for size in (8, 5, 1):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)).double()
        model = copy.deepcopy(plain)
        for unit in (model[1], model):
            fully_shard(
                unit,
                reshard_after_forward=2,
                shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)),
                **gathering(),
            )
        x = torch.ones(2, 8, dtype=torch.float64)
        for _ in range(2):
            loss, expected = model(x).sum(), plain(x).sum()
            for (name, parameter), reference in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                assert isinstance(parameter, DTensor), name
                assert parameter.shape == reference.shape, name
                assert torch.equal(parameter.full_tensor(), reference), name
                if dim == 0:
                    assert parameter.placements == (Replicate(), Shard(0)), name
                    assert parameter.device_mesh.shape == (2, 2), name
            loss.backward()
            expected.backward()
            assert_same_gradients(model, plain)
            assert_sharded(model)
            model.zero_grad()
            plain.zero_grad()


test_the_registered_parameters_are_those_kept_on_two_ranks = ours_only("torch wants even shards")(
    test_the_registered_parameters_are_those_kept_on_two_ranks
)


@ours_only("what was kept for a backward that did not come is used after the write too")
@pytest.mark.parametrize("backward", ["none", "of the first unit"])
@distributed(4)
def test_what_two_ranks_keep_for_backward_is_not_used_after_a_write(backward: str) -> None:
    model, plain = pair(MLP, reshard_after_forward=2)
    parameters = {network: list(network.parameters()) for network in (model, plain)}
    (inputs,) = MLP.batch(9, dist.get_rank(), torch.float64)
    for _ in range(2):
        for network in (model, plain):
            outputs: list[Tensor] = []
            keep = lambda module, args, output: outputs.append(output)  # noqa: B023, E731
            handle = network.get_submodule("0").register_forward_hook(keep)
            network(inputs)
            handle.remove()
            if backward != "none":
                outputs[0].mean().backward()
                now = list(network.parameters())
                assert all(a is b for a, b in zip(now, parameters[network], strict=True))
            with torch.no_grad():
                for parameter in parameters[network]:
                    parameter.mul_(1.5)
        assert_same(model(inputs), plain(inputs), "after the write")


@distributed(4)
def test_resharding_to_all_ranks_or_to_one_by_an_integer() -> None:
    check_training(TRANSFORMER, Training(steps=2), reshard_after_forward=4)
    check_training(TRANSFORMER, Training(steps=2), reshard_after_forward=1)


@distributed(1, 2, 3)
def test_by_default_all_but_the_root_are_resharded_after_forward() -> None:
    model, _ = pair(TRANSFORMER)
    tokens, _ = TRANSFORMER.batch(0, dist.get_rank(), torch.float64)
    loss = model(tokens).sum()
    for block in model.get_submodule("blocks").children():
        assert_sharded(block)
    assert not isinstance(model.get_parameter("embedding.weight"), DTensor)
    loss.backward()
    assert_sharded(model)


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_state_after_forward_and_backward(mode: bool) -> None:
    model, _ = pair(MLP, reshard_after_forward=mode)
    (inputs,) = MLP.batch(0, dist.get_rank(), torch.float64)
    output = model(inputs)
    for linear in (model[0], model[2], model[4]):
        if mode:
            assert_sharded(linear)
        else:
            assert_unsharded(linear)
    output.sum().backward()
    assert_sharded(model)


@distributed(2, 3)
def test_reshard_after_forward_can_change_between_steps() -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    for step, mode in enumerate([True, False, False, True]):
        model.set_reshard_after_forward(mode)
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
    model.set_reshard_after_forward(True)
    model[2].set_reshard_after_forward(False, recurse=False)
    loss = model(MLP.batch(0, 0, torch.float64)[0]).sum()
    assert_sharded(model[0])
    assert_unsharded(model[2])
    loss.backward()
    assert_sharded(model)


@distributed(2, 3)
def test_parameters_stay_gathered_after_backward_until_resharded_by_hand() -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    for step in range(2):
        run_both(MLP, model, plain, step)
        for linear in (model[0], model[2], model[4]):
            assert_unsharded(linear)
    for unit in units_of(model):
        unit.reshard()
    assert_sharded(model)
    assert_same_gradients(model, plain)
    model.set_reshard_after_backward(True)
    run_both(MLP, model, plain, 2)
    assert_sharded(model)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("async_op", [True, False])
@distributed(1, 2, 3, 4)
def test_unshard_and_reshard_by_hand(async_op: bool) -> None:
    model, plain = pair(MLP)
    linear, expected = model[0], plain[0].weight
    assert isinstance(linear, FSDPModule)
    for _ in range(2):
        handle = linear.unshard(async_op=async_op)
        if async_op:
            assert isinstance(handle, UnshardHandle)
            handle.wait()
        else:
            assert handle is None
        assert_unsharded(linear)
        assert_sharded(model[2])
        assert torch.equal(linear.weight, expected)
        linear.reshard()
        assert_sharded(linear)
        assert torch.equal(whole(linear.weight), expected)


@distributed(2, 3)
def test_several_asynchronous_unshards_in_flight() -> None:
    model, plain = pair(MLP)
    layers = [model[0], model[2], model[4]]
    handles = [layer.unshard(async_op=True) for layer in layers]
    for layer, handle, reference in zip(
        layers, handles, [plain[0], plain[2], plain[4]], strict=True
    ):
        handle.wait()
        assert torch.equal(layer.weight, reference.weight)
        assert torch.equal(layer.bias, reference.bias)
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@ours_only("gathers nothing between forward and backward")
@distributed(2)
def test_ranks_that_keep_an_output_gather_no_more_than_others() -> None:
    """As zero-bubble pipelines do: before backward, to compute gradients of weights later."""
    model, _ = pair(MLP, reshard_after_forward=True)
    (x,) = MLP.batch(0, dist.get_rank(), torch.float64)
    model.set_is_last_backward(False)
    kept = model(x)  # of the iteration before, and never used
    model(x).sum().backward()
    model.set_is_last_backward(True)
    model(x).sum().backward()
    if dist.get_rank():
        del kept
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    assert {unit_of(unit).state for unit in units_of(model)} <= set(RESHARDED)
    model.set_reshard_after_backward(True)
    model.set_is_last_backward(True)
    losses = [model(x).sum(), model(x).sum()]
    losses[0].backward()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    assert all(unit_of(unit).registration.registered == "unsharded" for unit in units_of(model))
    losses[1].backward()


@distributed(2, 3)
def test_repeated_unshard_and_reshard_change_nothing() -> None:
    model, plain = pair(MLP)
    for unit in units_of(model):
        unit.unshard()
        unit.unshard()
    for _ in range(2):
        for unit in units_of(model):
            unit.reshard()
    assert_sharded(model)
    assert_same_parameters(model, plain, bitwise=True)


@distributed(2, 3)
def test_a_forward_after_unshard_by_hand() -> None:
    model, plain = pair(MLP)
    for step in range(3):
        for unit in units_of(model):
            unit.unshard(async_op=step == 1)  # in step 1 nobody waits before the forward does
        run_both(MLP, model, plain, step, bitwise_loss=True)
        assert_sharded(model)
        assert_same_gradients(model, plain)


@distributed(2, 3)
def test_unshard_sees_what_the_optimizer_wrote() -> None:
    model, plain = pair(EVEN_MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        run_both(EVEN_MLP, model, plain, step)
        optimizer.step()
        plain_optimizer.step()
        handle = model[2].unshard(async_op=True)
        handle.wait()
        torch.testing.assert_close(model[2].weight, plain[2].weight, rtol=1e-12, atol=1e-12)
        model[2].reshard()


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_reshard_by_hand_between_forward_and_backward(mode: bool) -> None:
    model, plain = pair(MLP, reshard_after_forward=mode)
    for step in range(2):
        batch = MLP.batch(step, dist.get_rank(), torch.float64)
        loss = MLP.loss(model, *batch)
        for unit in units_of(model):
            unit.reshard()
        assert_sharded(model)
        loss.backward()
        run_both(MLP, model, plain, step)
        for parameter in plain.parameters():  # the sharded model had this batch twice
            assert parameter.grad is not None
            parameter.grad *= 2
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(1, 2, 3)
def test_parameters_changed_between_forward_and_backward_are_gathered_anew() -> None:
    """Backward of a resharded unit computes with what its shards hold by then."""
    model, plain = pair(MLP, reshard_after_forward=True)
    for step in range(3):
        batch = MLP.batch(step, dist.get_rank(), torch.float64)
        losses = [MLP.loss(network, *batch) for network in (model, plain)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
            for parameter in plain.parameters():
                parameter.data.mul_(1.5)  # unnoticed by autograd, which would refuse
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@ours_only("parameters that an evaluation left gathered are used after the step too")
@pytest.mark.parametrize("mode", [None, True, False])
@distributed(1, 3, long=(2,))
def test_an_optimizer_step_after_an_evaluation(mode: bool | None) -> None:
    """Evaluation between backward and step must not leave old parameters gathered."""
    model, plain = pair(TRANSFORMER, reshard_after_forward=mode)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, plain)]
    for step in range(3):
        run_both(TRANSFORMER, model, plain, step)
        tokens, _ = TRANSFORMER.batch(9, dist.get_rank(), torch.float64)
        with torch.no_grad():
            assert_same(model(tokens), plain(tokens), "evaluation")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert_same(model(tokens), plain(tokens), "evaluation")


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda parameter: parameter.mul_(1.5),
    "data": lambda parameter: parameter.data.mul_(1.5),
    "detach": lambda parameter: parameter.detach().mul_(1.5),
    "local": lambda parameter: local(parameter).mul_(1.5),
    "local data": lambda parameter: local(parameter).data.mul_(1.5),
    "foreach": lambda parameter: torch._foreach_mul_([parameter], 1.5),
}


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@ours_only("parameters that an evaluation left gathered are used after the step too")
@pytest.mark.parametrize("write", list(WRITES))
@distributed(1, 2)
def test_parameters_written_in_any_way_after_an_evaluation(write: str) -> None:
    model, plain = pair(TRANSFORMER)
    parameters = {network: list(network.parameters()) for network in (model, plain)}
    tokens, _ = TRANSFORMER.batch(9, dist.get_rank(), torch.float64)
    with torch.no_grad():
        for _ in range(3):
            assert_same(model(tokens), plain(tokens), "evaluation")
            for network in (model, plain):
                for parameter in parameters[network]:
                    WRITES[write](parameter)
        assert_same(model(tokens), plain(tokens), "evaluation")


@ours_only("looks at states inside")
@distributed(4)
def test_any_order_of_gathers_and_frees_by_hand() -> None:
    """Random walks over the states: there is memory, and the parameters are right and registered,
    where the state says so."""
    model, plain = pair(MLP, reshard_after_forward=2)
    (inputs,) = MLP.batch(9, dist.get_rank(), torch.float64)
    model(inputs)
    unit, weight = unit_of(model[0]), plain.get_parameter("0.weight")
    (bucket,), streams = unit.buckets, unit.runtime.streams
    generator = random.Random(0)  # the same on every rank
    seen = set()
    for _ in range(150):
        allowed = {event for state, event in TRANSITIONS if state is unit.state}
        if unit.state is State.UNSHARDED:
            allowed.add("reshard after forward")
        event = generator.choice([*sorted(allowed - {"keep_secondary"}), "forward", "write"])
        seen.add((unit.state, event))
        if event == "start_unshard":
            unit.start_unshard(streams)
        elif event == "wait_unshard":
            unit.wait_unshard(streams)
        elif event == "reshard after forward":
            unit.reshard(streams, after_forward=True)
        elif event in ("reshard", "drop_secondary"):
            unit.reshard(streams)
        elif event == "free_early":
            unit.transition("free_early")  # (nothing here is large enough)
        elif event == "forward":
            assert_same(model(inputs), plain(inputs), "forward")
        else:
            unit.runtime.reshard(unit)  # what is gathered by hand is not looked at again
            with torch.no_grad():
                weight.add_(1)
                unit.params[0].sharded.add_(1)
            streams.before_gathers(None)  # as before gathers that a user or a forward starts
        gathered = unit.state is State.GATHERING or unit.state in GATHERED
        assert bucket.allocated_bytes == (unit.gathered_bytes if gathered else 0)
        if unit.state is not State.GATHERING:  # which may read them
            assert bucket.gathered.secondary.saved == (unit.state is State.SECONDARY)
        if unit.state in RESHARDED:
            kind = "secondary" if unit.state is State.SECONDARY else "sharded"
            assert unit.registration.registered == kind
            assert_sharded(model[0])
        elif unit.state in GATHERED:
            assert_same(unit.params[0].unsharded, weight, "weight")
    assert len(seen) > 12, seen
    assert State.SECONDARY in {state for state, _ in seen}


@distributed(4)
def test_units_share_the_groups_that_they_reshard_to() -> None:
    """Every process group has threads, on NCCL device memory: one pair for all units of a mesh."""
    mesh = cached_mesh(4, names=("shard",))
    check_training(TRANSFORMER, Training(steps=1), mesh=mesh, reshard_after_forward=2)
    before = len(c10d._world.pg_map)
    check_training(TRANSFORMER, Training(steps=1), mesh=mesh, reshard_after_forward=2)
    assert len(c10d._world.pg_map) == before


test_units_share_the_groups_that_they_reshard_to = ours_only("torch makes new ones per unit")(
    test_units_share_the_groups_that_they_reshard_to
)
