"""Mistakes are answered by an error that names what is wrong and says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import FSDPModule, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import MLP, TRANSFORMER
from reference import assert_same_gradients, assert_sharded, pair, run_both, shard_case


class Deep(nn.Module):
    """A root with a parameter of its own and a block two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.stack = nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))})

    def forward(self, x: Tensor) -> Tensor:
        return self.stack["block"](x * self.scale)


def sharded_deep() -> Deep:
    model = Deep()
    fully_shard(model.stack["block"])
    fully_shard(model)
    return model


def message(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    """Every part occurs in the message."""
    text = str(error.value)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


# ------------------------------------------------------------------------- meta parameters


@distributed(1, 2)
def test_forward_of_parameters_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = sharded_deep()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    message(caught, "scale", "meta", "to_empty")


@distributed(2)
def test_forward_of_one_parameter_left_on_the_meta_device() -> None:
    """Only what is still missing is named."""
    with torch.device("meta"):
        model = sharded_deep()
    model.stack["block"].to_empty(device="cpu")
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    message(caught, "scale", "to_empty")
    assert "stack.block.0.weight" not in str(caught.value)


@distributed(2)
def test_forward_of_an_inner_unit_left_on_the_meta_device() -> None:
    model = Deep()
    model.stack["block"].to("meta")
    fully_shard(model.stack["block"])
    fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    message(caught, "stack.block.0.weight", "stack.block.1.bias", "to_empty")


@ours_only("a second first forward fails")
@distributed(2)
def test_a_model_works_after_the_error_about_meta_parameters() -> None:
    with torch.device("meta"):
        model = sharded_deep()
    with pytest.raises(RuntimeError, match="to_empty"):
        model(torch.ones(2, 4))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    output = model(torch.ones(2, 4))
    # 4 x 0.5 x 0.5 + 0.5, and then 6 of those x 0.5, + 0.5
    assert torch.equal(output, torch.full((2, 4), 5.0))


# ------------------------------------------------------------------------------ the mesh


@distributed(2)
def test_a_mesh_of_three_dims_without_names() -> None:
    mesh = cached_mesh(2, 1, 1)
    with pytest.raises(ValueError) as caught:
        fully_shard(nn.Linear(4, 4), mesh=mesh)
    message(caught, "1D or 2D" if "1D or 2D" in str(caught.value) else "3")


@ours_only("torch tells of it later, or not at all")
@distributed(2)
def test_a_mesh_of_another_device_type() -> None:
    mesh = init_device_mesh("xpu", (2,))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fully_shard(nn.Linear(4, 4), mesh=mesh)
    message(caught, "xpu", "cpu")


# ------------------------------------------------------------------- the call of fully_shard


@ours_only("an AssertionError, as if it were torch's own mistake")
@distributed(1, 2)
def test_a_module_sharded_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fully_shard(model[0])
    message(caught, "Linear", "once" if "once" in str(caught.value) else "already")


@distributed(2)
def test_a_container_without_forward() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(ValueError) as caught:
        fully_shard(layers)
    message(caught, "ModuleList", "forward")
    with pytest.raises(ValueError) as caught:
        fully_shard(nn.ModuleDict({"a": nn.Linear(4, 4)}))
    message(caught, "ModuleDict", "forward")


@ours_only("arguments are checked when half of the work is done")
@distributed(2)
def test_a_refused_module_is_left_as_it_was() -> None:
    for bad in ({"reshard_after_forward": 5}, {"mesh": cached_mesh(2, 1, 1)}):
        layer = nn.Linear(4, 4)
        with pytest.raises(ValueError):
            fully_shard(layer, **bad)
        assert not isinstance(layer, FSDPModule)
        fully_shard(layer)
        layer(torch.ones(1, 4)).sum().backward()
        assert_sharded(layer)


@pytest.mark.parametrize("value", ["yes", 3, 8])
@distributed(4)
def test_a_bad_reshard_after_forward(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        fully_shard(nn.Linear(4, 4), reshard_after_forward=value)
    message(caught, "reshard_after_forward", str(value) if isinstance(value, str) else "4")


@distributed(2)
def test_a_reshard_after_forward_of_no_ranks() -> None:
    with pytest.raises(ValueError, match="reshard_after_forward"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=0)


@distributed(1)
def test_what_is_no_module() -> None:
    for wrong in (torch.ones(2), [torch.ones(2)], None):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            fully_shard(wrong)  # pyright: ignore


# ----------------------------------------------------------------- the methods of FSDPModule


@pytest.mark.parametrize("method", ["forward", "backward"])
@distributed(1, 2)
def test_prefetch_of_a_module_that_is_not_sharded(method: str) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ValueError) as caught:
        getattr(model, f"set_modules_to_{method}_prefetch")([model[0]])
    message(caught, "Linear", "FSDPModule")


@distributed(1)
def test_set_reshard_after_forward_takes_a_bool() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="reshard_after_forward"):
        model.set_reshard_after_forward(2)


# --------------------------------------------------- parameters used behind the unit's back


@ours_only("torch complains of mixed tensors, without names")
@distributed(2, 3)
def test_a_call_of_a_plain_module_inside_a_unit_while_it_is_sharded() -> None:
    model, plain = pair(TRANSFORMER)
    run_both(TRANSFORMER, model, plain, 0)
    block = model.get_submodule("blocks.1")
    with pytest.raises(RuntimeError) as caught:
        block.get_submodule("qkv")(torch.ones(2, 12).double())
    message(caught, "blocks.1.qkv.weight", "Block", "unshard()")
    with pytest.raises(RuntimeError) as caught:
        block.get_submodule("mlp")(torch.ones(2, 12).double())
    message(caught, "blocks.1.mlp.0.", "unshard()")
    run_both(TRANSFORMER, model, plain, 1)
    assert_same_gradients(model, plain)


@ours_only("torch complains of mixed tensors, without names")
@distributed(2)
def test_a_call_of_a_plain_module_inside_the_root() -> None:
    model, _ = pair(TRANSFORMER)
    with pytest.raises(RuntimeError) as caught:
        model.get_submodule("norm")(torch.ones(2, 12).double())
    message(caught, "norm.weight", "Transformer", "unshard()")


@distributed(1, 2)
def test_a_call_of_a_plain_module_after_unshard_by_hand() -> None:
    """What the error above advises."""
    model, plain = pair(TRANSFORMER)
    block, reference = model.get_submodule("blocks.1"), plain.get_submodule("blocks.1")
    assert isinstance(block, FSDPModule)
    block.unshard()
    x = torch.ones(2, 12).double()
    assert torch.equal(block.get_submodule("mlp")(x), reference.get_submodule("mlp")(x))
    block.reshard()
    assert_sharded(block)


@ours_only("torch complains of mixed tensors, without names")
@distributed(2)
def test_a_method_that_is_not_forward() -> None:
    class Chat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def generate(self, x: Tensor) -> Tensor:
            return self.body(x).argmax(-1)

    model = Chat()
    fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        model.generate(torch.ones(1, 4))
    message(caught, "body.weight", "Chat", "unshard()")


@distributed(2)
def test_names_in_errors_are_those_of_the_root() -> None:
    """Although a unit only knows its own part of the names."""
    with torch.device("meta"):
        model = shard_case(MLP, MLP.build())
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 7))
    message(caught, "0.weight")
    with torch.device("meta"):
        outer = nn.ModuleDict({"inner": fully_shard(MLP.build())})
    with pytest.raises(RuntimeError) as caught:
        outer["inner"](torch.ones(2, 7))
    message(caught, "4.bias")
