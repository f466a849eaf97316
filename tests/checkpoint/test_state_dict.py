"""`state_dict` and `load_state_dict` at any time; `.to` and `.double` of sharded models."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import FSDPModule, MixedPrecisionPolicy
from harness import distributed, ours_only
from models import BY_NAME, CNN, EVEN_MLP, MLP, TRANSFORMER, Case, children, normal_batch
from reference import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    pair,
    run_both,
    shard_case,
    whole,
)


def assert_state_dict(states: Mapping[str, Any], plain: nn.Module) -> None:
    """The same names and values as the plain model's; parameters are DTensors."""
    expected = plain.state_dict()
    assert list(states) == list(expected)
    parameters = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    for name, value in states.items():
        if name in parameters:
            assert isinstance(value, DTensor), name
            assert value.placements == (Shard(0),), name
        assert torch.equal(whole(value), expected[name]), name


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def spoil(model: nn.Module) -> None:
    """Overwrites all parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


def other_weights(case: Case, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """A sharded and a plain model of this case, with weights that no other test has."""
    torch.manual_seed(99)
    plain = case.build().to(dtype)
    torch.manual_seed(99)
    return shard_case(case, case.build().to(dtype)), plain


@pytest.mark.parametrize("name", list(BY_NAME))
@distributed(3, long=(1, 2))
def test_state_dict_before_the_first_forward_and_after_a_step(name: str) -> None:
    case = BY_NAME[name]
    model, plain = pair(case)
    assert_state_dict(model.state_dict(), plain)
    run_both(case, model, plain, 0)
    assert_state_dict(model.state_dict(), plain)


@pytest.mark.parametrize("mode", [None, True, False])
@distributed(2, long=(1, 3))
def test_state_dict_between_forward_and_backward(mode: bool | None) -> None:
    for case in (MLP, TRANSFORMER):
        model, plain = pair(case, reshard_after_forward=mode)
        for step in range(2):
            batch = case.batch(step, dist.get_rank(), torch.float64)
            loss = case.loss(model, *batch)
            assert_state_dict(model.state_dict(), plain)
            loss.backward()
            model.zero_grad()
        run_both(case, model, plain, 2)
        assert_same_gradients(model, plain)


@distributed(1, 2, 3)
def test_state_dict_while_unsharded_by_hand_and_during_accumulation() -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    model[2].unshard()
    assert_state_dict(model.state_dict(), plain)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    run_both(MLP, model, plain, 0, average=False)
    assert_state_dict(model.state_dict(), plain)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)
    assert_state_dict(model.state_dict(), plain)


@distributed(1, 2, 3)
def test_state_dict_of_one_unit_and_of_a_module_inside_one() -> None:
    model, plain = pair(TRANSFORMER)
    for path in ("blocks.1", "blocks.0.mlp", "norm"):
        assert_state_dict(model.get_submodule(path).state_dict(), plain.get_submodule(path))
    run_both(TRANSFORMER, model, plain, 0)
    for path in ("blocks.1", "blocks.0.mlp"):
        assert_state_dict(model.get_submodule(path).state_dict(), plain.get_submodule(path))


@pytest.mark.parametrize("assign", [False, True])
@distributed(1, 3, long=(2,))
def test_load_state_dict(assign: bool) -> None:
    """Another model's state; then training goes on from there."""
    for case in (MLP, TRANSFORMER, CNN):
        model, _ = pair(case)
        run_both(case, model, pair(case)[1], 0)
        model.zero_grad()
        source, plain = other_weights(case)
        result = model.load_state_dict(source.state_dict(), strict=True, assign=assign)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_sharded(model)
        assert_state_dict(model.state_dict(), plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        for step in range(2):
            run_both(case, model, plain, step)
            assert_same_gradients(model, plain)
            for each in (optimizer, plain_optimizer):
                each.step()
                each.zero_grad()
        assert_same_parameters(model, plain)


@distributed(2)
def test_loaded_values_are_copies() -> None:
    model, _ = pair(MLP)
    source, plain = other_weights(MLP)
    model.load_state_dict(source.state_dict())
    spoil(source)
    assert_state_dict(model.state_dict(), plain)


@distributed(1, 2, 3)
def test_a_state_dict_loads_into_the_model_that_it_came_from() -> None:
    model, plain = pair(MLP)
    saved = snapshot(model)
    spoil(model)
    model.load_state_dict(saved)
    assert_state_dict(model.state_dict(), plain)
    model.load_state_dict(model.state_dict())
    assert_state_dict(model.state_dict(), plain)


@distributed(2)
def test_strict_loading_complains() -> None:
    model, _ = pair(MLP)
    states = dict(model.state_dict())
    del states["2.weight"]
    with pytest.raises(RuntimeError, match=r"2\.weight"):
        model.load_state_dict(states)
    states = {**model.state_dict(), "more": torch.ones(1)}
    with pytest.raises(RuntimeError, match="more"):
        model.load_state_dict(states)
    result = model.load_state_dict(states, strict=False)
    assert result.unexpected_keys == ["more"]


@distributed(1, 2)
def test_loading_under_mixed_precision_is_seen_by_the_next_forward() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = pair(EVEN_MLP, dtype=torch.float32, mp_policy=policy)
    (inputs,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float32)
    with torch.no_grad():
        model(inputs)
    source, plain = other_weights(EVEN_MLP, torch.float32)
    model.load_state_dict(source.state_dict())
    with torch.no_grad():
        assert torch.equal(model(inputs), plain.bfloat16()(inputs.bfloat16()))


@distributed(1, 2, 3)
def test_changes_to_parameters_in_place_are_seen_by_the_next_forward() -> None:
    """By the user, between steps: an init function, or an average of weights."""
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    for network in (model, plain):
        network.zero_grad()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(0.5).add_(0.25)
    assert_state_dict(model.state_dict(), plain)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


def build_wide() -> nn.Module:
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])


WIDE = Case("wide", build_wide, lambda model: [], normal_batch(4, 128))


def size_of(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@distributed(1, 2)
def test_saving_one_parameter_writes_only_its_own_bytes() -> None:
    """Although a unit may hold its parameters in one storage; before and after a step."""
    model, plain = pair(WIDE, dtype=torch.float32)
    own_bytes = 128 * 128 * 4 // dist.get_world_size()
    overhead_bytes = 16 * 1024
    for _ in range(2):
        value = model.state_dict()["2.weight"]
        assert size_of(value) < own_bytes + overhead_bytes
        assert size_of(value.to_local()) < own_bytes + overhead_bytes
        states = {"a": value, "b": model.state_dict()["4.bias"]}
        assert size_of(states) < own_bytes + 2 * overhead_bytes
        run_both(WIDE, model, plain, 0, dtype=torch.float32)


@distributed(1, 2, 3)
def test_saving_and_loading_with_torch_save() -> None:
    model, plain = pair(TRANSFORMER)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    spoil(model)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    assert_state_dict(model.state_dict(), plain)


@distributed(1, 2, 3)
def test_full_state_dict_of_the_checkpoint_module() -> None:
    model, plain = pair(TRANSFORMER)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    for name, value in plain.state_dict().items():
        assert torch.equal(full[name], value), name
    _, others = other_weights(TRANSFORMER)
    set_model_state_dict(model, others.state_dict(), options=options)
    assert_state_dict(model.state_dict(), others)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else {}, options=options)
    assert_state_dict(model.state_dict(), plain)


@distributed(2)
def test_distributed_checkpoint_of_model_and_optimizer() -> None:
    """Saved by torch's own checkpoint module, loaded into a fresh model and optimizer."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    trained, _ = pair(MLP)
    fresh, _ = other_weights(MLP)
    optimizers = {}
    for model in (trained, fresh):
        optimizers[model] = torch.optim.AdamW(model.parameters(), lr=0.05)

    def train(model: nn.Module, steps: range) -> None:
        for step in steps:
            MLP.loss(model, *MLP.batch(step, dist.get_rank(), torch.float64)).backward()
            optimizers[model].step()
            optimizers[model].zero_grad()

    def states_of(model: nn.Module) -> dict[str, Any]:
        optimizer_states = get_optimizer_state_dict(model, optimizers[model])
        return {"model": get_model_state_dict(model), "optimizer": optimizer_states}

    train(trained, range(2))
    dcp.save(states_of(trained), checkpoint_id=folder[0])
    states = states_of(fresh)
    dcp.load(states, checkpoint_id=folder[0])
    set_state_dict(
        fresh,
        optimizers[fresh],
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    for model in (trained, fresh):
        train(model, range(2, 4))
    for name, value in trained.state_dict().items():
        assert torch.equal(whole(fresh.state_dict()[name]), whole(value)), name


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.float64),
    "to a dtype and a device": lambda model: model.to("cpu", torch.float64),
}


@pytest.mark.parametrize("cast", list(CASTS))
@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn"])
@distributed(3, long=(1, 2))
def test_casts_after_sharding(name: str, cast: str) -> None:
    """The Parameter objects stay, for optimizers hold them."""
    case = BY_NAME[name]
    torch.manual_seed(0)
    plain = case.build()
    model, _ = pair(case, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = list(model.parameters())
    CASTS[cast](model)
    plain.double()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    after = list(model.parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert_sharded(model)
    for step in range(2):
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_same_parameters(model, plain)


@ours_only("a cast after the first forward")
@distributed(1, 2, 3)
def test_casts_between_steps() -> None:
    """There and back, of the whole model and of one unit; gathers and gradients follow."""
    model, plain = pair(MLP, dtype=torch.float32)
    for step, dtype in enumerate([torch.float32, torch.float64, torch.float32]):
        for network in (model, plain):
            network.to(dtype)
        run_both(MLP, model, plain, step, dtype=dtype)
        assert_same_gradients(model, plain)
        for network in (model, plain):
            network.zero_grad()
    for network in (model, plain):
        network[2].double()
    assert model.get_parameter("2.weight").dtype == torch.float64
    assert model.get_parameter("0.weight").dtype == torch.float32
    assert_same_parameters(model, plain)


@ours_only("a cast after the first forward")
@distributed(2)
def test_casts_with_gradients_in_place() -> None:
    """Module.to converts the gradients too."""
    model, plain = pair(MLP, dtype=torch.float32)
    run_both(MLP, model, plain, 0, dtype=torch.float32)
    for network in (model, plain):
        network.double()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float64, name
    run_both(MLP, model, plain, 1)
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert parameter.grad is not None
        assert expected is not None
        # The first of the two gradients is an fp32 one.
        assert_same(parameter.grad.float(), expected.float(), name)


@distributed(1, 2)
def test_moving_to_the_device_where_it_is_changes_nothing() -> None:
    model, plain = pair(MLP)
    before = list(model.parameters())
    model.to("cpu")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@distributed(2)
def test_a_part_of_the_parameters_is_loaded_by_assignment() -> None:
    """Some parameters of a unit are replaced by new objects and some stay."""
    model, plain = pair(Case("one", MLP.build, children, MLP.batch))
    source, others = other_weights(MLP)
    part = {name: value for name, value in source.state_dict().items() if "weight" in name}
    model.load_state_dict(part, strict=False, assign=True)
    plain.load_state_dict({n: v for n, v in others.state_dict().items() if n in part}, strict=False)
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)
    assert_same_parameters(model, plain, bitwise=True)
