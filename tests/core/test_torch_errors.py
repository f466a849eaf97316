"""Errors that torch raises about parameters say what to call; what worked works as before."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import fully_shard
from harness import cached_mesh, distributed, ours_only
from reference import assert_sharded

pytestmark = ours_only("words around torch's own")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def sharded_mlp() -> Any:
    model = mlp()
    fully_shard(model[0])
    return fully_shard(model)


def told(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"


# ------------------------------------------------------------------ whole tensors and shards


@distributed(2, 3)
def test_a_whole_tensor_is_written_as_the_error_says() -> None:
    model = sharded_mlp()
    param, whole = model[0].weight, torch.arange(24.0).view(6, 4)
    before = param.full_tensor().clone()
    with torch.no_grad():
        for write in (
            lambda: param.copy_(whole),
            lambda: param.copy_(whole, non_blocking=True),
            lambda: param.__setitem__((slice(None), 1), whole[:, 1]),
        ):
            with pytest.raises(RuntimeError) as caught:
                write()
            told(caught, "aten.copy_.default got mixed torch.Tensor and DTensor")
            told(caught, "'0.weight'", "model.load_state_dict({'0.weight': whole}, strict=False)")
            told(caught, ".copy_(distribute_tensor(whole, param.device_mesh, param.placements))")
        with pytest.raises(RuntimeError) as caught:
            param.data.copy_(whole)
        told(caught, "This is a DTensor, which holds this rank's part", "copy_(distribute_tensor(")
        assert torch.equal(param.full_tensor(), before)
        assert param.copy_(distribute_tensor(whole, param.device_mesh, param.placements)) is param
        assert torch.equal(param.full_tensor(), whole)
        param.to_local().copy_(param.to_local() + 1)
        assert torch.equal(param.full_tensor(), whole + 1)
        with pytest.raises(RuntimeError) as caught:
            param.copy_(distribute_tensor(torch.ones(5), param.device_mesh, param.placements))
        assert "whole tensor" not in str(caught.value)  # another error of torch
    model.load_state_dict({"0.weight": whole}, strict=False)
    assert torch.equal(param.full_tensor(), whole)


@distributed(2, 3)
def test_items_that_torch_writes_to_a_copy_are_refused() -> None:
    """On the dim that is sharded; on others they are written as ever."""
    model = sharded_mlp()
    param = model[0].weight
    whole = param.full_tensor().clone()
    with torch.no_grad():
        for index in (0, -1, slice(1, 3), (0, 1), (None, 0)):
            with pytest.raises(RuntimeError) as caught:
                param[index] = 7.0
            told(caught, "'0.weight'", "no shard", "whole = param.full_tensor()")
            told(caught, "model.load_state_dict({'0.weight': whole}, strict=False)")
            with pytest.raises(RuntimeError, match="This is a DTensor"):
                param.data[index] = 7.0
        assert torch.equal(param.full_tensor(), whole)
        for index in ((slice(None), 0), ..., slice(None), True):
            param[index] = whole[index] = 5.0
            assert torch.equal(param.full_tensor(), whole)
            whole.copy_(torch.arange(24).view(6, 4))
            model.load_state_dict({"0.weight": whole}, strict=False)
        param[param > 3] = 0.0
        whole[whole > 3] = 0.0
        assert torch.equal(param.full_tensor(), whole)


@distributed(1)
def test_items_of_a_parameter_that_one_rank_has_whole() -> None:
    param = sharded_mlp()[0].weight
    with torch.no_grad():
        param[0] = 7.0
    assert torch.equal(param.full_tensor()[0], torch.full((4,), 7.0))


@distributed(2)
def test_numpy_and_lists_of_a_sharded_parameter() -> None:
    param = sharded_mlp()[0].weight
    for read, first in (
        (param.numpy, ".numpy() is not supported for tensor subclasses"),
        (lambda: numpy.asarray(param), ".numpy() is not supported for tensor subclasses"),
        (param.tolist, ".tolist() is not supported for tensor subclasses"),
    ):
        with pytest.raises(RuntimeError) as caught:
            read()
        told(caught, first, "'0.weight'", ".full_tensor().detach().cpu()", "on all ranks")
    with pytest.raises(RuntimeError) as caught:
        param.detach().numpy()
    told(caught, "This is a DTensor", ".full_tensor()")
    assert param.full_tensor().detach().cpu().numpy().shape == (6, 4)


class Looks(nn.Module):
    """Reads an attribute of its parameter inside of forward."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        assert not hasattr(self.weight, "full_tensor")
        assert getattr(self.weight, "device_mesh", None) is None
        return x @ (getattr(self.weight, self.name)() if self.name else self.weight)


@distributed(1, 2)
def test_attributes_of_dtensors_that_a_gathered_parameter_lacks() -> None:
    for name in ("full_tensor", "to_local"):
        with pytest.raises(AttributeError) as caught:
            fully_shard(Looks(name))(torch.ones(2, 4))
        told(caught, f"'Parameter' object has no attribute '{name}'", "'weight' is gathered now")
        assert (caught.value.name, type(caught.value)) == (name, AttributeError)
    model = sharded_mlp()
    model.unshard()
    for name in ("full_tensor", "device_mesh", "placements", "redistribute"):
        with pytest.raises(AttributeError, match=r"'1.weight' is gathered now .* reshard\(\)"):
            getattr(model[1].weight, name)
    model.reshard()
    assert model[1].weight.full_tensor().shape == (4, 6)
    plain = nn.Parameter(torch.ones(2))
    with pytest.raises(AttributeError, match=r"has no attribute 'full_tensor'$"):
        plain.full_tensor()  # type: ignore[operator]
    assert not hasattr(nn.Parameter, "full_tensor")
    plain.placements = "a user's"  # type: ignore[attr-defined]
    assert plain.placements == "a user's"  # type: ignore[attr-defined]


@pytest.mark.long
@distributed(1)
def test_compiled_forwards_that_look_for_the_attributes() -> None:
    model = fully_shard(Looks())
    model.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 4.0))


@distributed(2)
def test_tensor_parallel_parameters_have_the_attributes_also_when_gathered() -> None:
    mesh = cached_mesh(1, 2, names=("dp", "tp"))
    model = nn.Linear(4, 4)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    whole = model.weight.full_tensor().clone()  # type: ignore[operator]
    sharded = fully_shard(model, mesh=mesh["dp"])
    sharded.unshard()  # type: ignore[operator]
    assert isinstance(model.weight, DTensor)
    assert torch.equal(model.weight.full_tensor(), whole)


# ------------------------------------------------------- torch's fully_shard around or inside ours


@distributed(1, 2)
def test_torchs_fully_shard_of_what_is_sharded_already() -> None:
    inner = nn.Sequential(mlp())
    fully_shard(inner)
    child, both = mlp(), mlp()
    fully_shard(child[0])
    for layer in both:
        fully_shard(layer)
    for module, name in (
        (inner[0], "0.weight"),
        (inner[0][1], "weight"),
        (child, "0.weight"),
        (both, "0.weight"),
    ):
        classes = [type(m) for m in module.modules()]
        with pytest.raises(ValueError) as caught:
            torch_fsdp.fully_shard(module)
        told(caught, f"'{name}' is in its unit", "fsdp2.fully_shard", "imported from torch")
        assert [type(m) for m in module.modules()] == classes
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        torch_fsdp.fully_shard(inner)
    inner(torch.ones(1, 4)).sum().backward()
    assert_sharded(inner)


@distributed(2)
def test_torchs_fully_shard_beside_ours() -> None:
    """Parts of a model that have nothing to do with each other, and parameters that torch is told
    to leave alone."""
    ours, torchs = fully_shard(mlp()), torch_fsdp.fully_shard(mlp())
    around = mlp()
    fully_shard(around[0])
    torch_fsdp.fully_shard(around, ignored_params=set(around[0].parameters()))
    for model in (ours, torchs, around):
        model(torch.ones(1, 4)).sum().backward()
        assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@distributed(2)
def test_torchs_clipping_over_several_meshes() -> None:
    model = mlp()
    fully_shard(model[0], mesh=cached_mesh(2))
    fully_shard(model[1], mesh=cached_mesh(1, 2, names=("replicate", "shard")))
    model[1](model[0](torch.ones(2, 4))).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    told(caught, "must have the same mesh", "call fsdp2.clip_grad_norm_")
    assert len(str(caught.value).splitlines()) == 2
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)


def test_a_start_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK expected, but not set\. Start .* by torchrun \("):
        fully_shard(nn.Linear(2, 2))
