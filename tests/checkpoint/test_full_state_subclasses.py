"""`full_state_dict` and `load_full_state_dict` of parameters that are tensor subclasses."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_subclass_checkpoints import Table
from test_tensor_subclasses import adam, batch, layers, shard
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import CPUOffloadPolicy, full_state_dict, fully_shard, load_full_state_dict
from harness import cached_mesh, distributed
from subclasses import two_tensor_methods, with_two_tensors


def inner(tensor: Any) -> dict[str, Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def assert_alike(found: Any, wanted: Any) -> None:
    """Class, shape, and every inner tensor: bit for bit."""
    assert type(found) is type(wanted)
    assert (found.shape, found.stride(), found.dtype) == (
        wanted.shape,
        wanted.stride(),
        wanted.dtype,
    )
    if not hasattr(found, "__tensor_flatten__"):
        assert torch.equal(found, wanted)
        return
    assert str(found.__tensor_flatten__()[1]) == str(wanted.__tensor_flatten__()[1])
    for name, value in inner(wanted).items():
        assert torch.equal(inner(found)[name], value), name


def step(model: nn.Module, optimizer: Any) -> None:
    (model(batch(3, 0)) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@distributed(2, 3, long=(1,))
def test_whole_two_tensors_from_their_shards_and_back() -> None:
    """Rows that the ranks divide and rows that they do not; into a model with other weights."""
    with two_tensor_methods():
        for hidden in (12, 7):
            whole = with_two_tensors(layers(hidden))
            model = shard(copy.deepcopy(whole), offload_policy=CPUOffloadPolicy())
            states = full_state_dict(model, ranks=(0, dist.get_world_size() - 1))
            if dist.get_rank() in (0, dist.get_world_size() - 1):
                for name, value in whole.state_dict().items():
                    assert_alike(states[name], value)
                whole.load_state_dict(states)  # one process takes it
            else:
                assert not states
            step(model, adam(model))
            trained = full_state_dict(model)
            other = shard(with_two_tensors(layers(hidden)))
            load_full_state_dict(other, trained if dist.get_rank() == 0 else None)
            assert torch.equal(other(batch(0, 0)).a, model(batch(0, 0)).a)
            step(other, adam(other))  # it trains from there


@distributed(4)
def test_replicas_get_theirs_and_give_one() -> None:
    with two_tensor_methods():
        whole = with_two_tensors(layers(7))
        hybrid = cached_mesh(2, 2, names=("replicate", "shard"))
        model = shard(copy.deepcopy(whole), mesh=hybrid)
        states = full_state_dict(model, ranks=(3,))
        if dist.get_rank() == 3:
            for name, value in whole.state_dict().items():
                assert_alike(states[name], value)
                inner(states[name])["b"].mul_(2)
        load_full_state_dict(model, states, source=3)
        for name, param in model.named_parameters():
            local: Any = param.to_local()  # type: ignore[operator]
            assert torch.equal(local.a * 2, local.b), name


def tables(rows: int) -> nn.Module:
    layer = nn.Linear(3, rows)
    weight = torch.arange(rows * 3.0).view(rows, 3)
    layer.weight = nn.Parameter(Table.of(weight), requires_grad=False)
    return nn.Sequential(layer)


@distributed(2, 3)
def test_blocks_of_rows_and_a_table_for_all() -> None:
    model = fully_shard(tables(12))
    states = full_state_dict(model)
    if dist.get_rank() == 0:
        assert_alike(states["0.weight"], tables(12)[0].weight.detach())
        local: Any = model[0].weight._local_tensor
        states["0.weight"].table_.mul_(2)
        assert not torch.equal(states["0.weight"].table_, local.table_)  # no memory of the model
        states["0.weight"].data_.add_(1)
    load_full_state_dict(model, states)
    again = full_state_dict(model, ranks=range(dist.get_world_size()))["0.weight"]
    assert torch.equal(again.data_, tables(12)[0].weight.data_ + 1)  # type: ignore[operator]
    assert again.table_.tolist() == [1, 0.5, 0.25]


@distributed(2)
def test_shards_that_are_parts_of_no_tensor_are_refused_on_every_rank() -> None:
    model = fully_shard(tables(12))
    model[0].weight._local_tensor.table_ *= 1 + dist.get_rank()
    with pytest.raises(
        ValueError, match=r"'0\.weight' do not make one .* 'table_' is not the same"
    ):
        full_state_dict(model)

    def refusing(cls: type, function: Any, *args: Any) -> Any:
        raise NotImplementedError(function)

    model = fully_shard(tables(12))
    with (
        mock.patch.object(Table, "__torch_dispatch__", classmethod(refusing)),
        pytest.raises(NotImplementedError, match=r"'0\.weight'.*does not show.*'scale_'"),
    ):
        full_state_dict(model)


@distributed(2)
def test_a_state_of_another_class_is_refused_before_anything_is_written() -> None:
    with two_tensor_methods():
        model = shard(with_two_tensors(layers()))
        before = {n: p._local_tensor.a.clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined,union-attr]
        plain = {name: torch.zeros_like(value) for name, value in layers().state_dict().items()}
        kind = r"torch\.testing\._internal\.two_tensor\.TwoTensor"
        with pytest.raises(RuntimeError, match=rf"'0\.weight' is a plain tensor, .* a {kind}"):
            load_full_state_dict(model, plain if dist.get_rank() == 0 else None)
        for name, param in model.named_parameters():
            assert torch.equal(param._local_tensor.a, before[name])  # type: ignore[attr-defined,union-attr]
        whole = shard(layers())
        states = with_two_tensors(layers()).state_dict()
        with pytest.raises(RuntimeError, match=rf"'0\.weight' is a {kind}, .* a plain tensor"):
            load_full_state_dict(whole, states)


@distributed(2)
def test_ignored_parameters_and_a_model_on_the_meta_device() -> None:
    with two_tensor_methods():
        whole = with_two_tensors(layers())
        model = copy.deepcopy(whole)
        fully_shard(model, ignored_params={model[0].weight})  # type: ignore[index]
        states = full_state_dict(model)
        if dist.get_rank() == 0:
            assert_alike(states["0.weight"], whole[0].weight.detach())  # type: ignore[index]
            inner(states["0.weight"])["b"].add_(1)
        load_full_state_dict(model, states)
        (weight,) = [p for n, p in model.named_parameters() if n == "0.weight"]
        assert not isinstance(weight, DTensor)
        assert torch.equal(weight.a + 1, weight.b)  # type: ignore[attr-defined]

        with torch.device("meta"):
            empty = with_two_tensors(layers())
        fully_shard(empty)
        with pytest.raises(NotImplementedError, match=r"'0\.weight' .* model\.to_empty\(device"):
            load_full_state_dict(empty, states)
        empty.to_empty(device="cpu")
        load_full_state_dict(empty, states)
        local = empty[0].weight.to_local()  # type: ignore[index,union-attr,operator]
        assert isinstance(local, TwoTensor)
        assert torch.equal(local.a + 1, local.b)  # type: ignore[attr-defined]
