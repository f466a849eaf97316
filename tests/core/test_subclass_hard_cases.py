"""What tensor subclasses meet besides steps: other dims, groups of one rank, modes, copies.

`test_tensor_subclasses` has the forms of the two methods, docs/subclasses.md the settings.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_tensor_subclasses import adam, batch, layers, shard, train_beside_plain
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import CPUOffloadPolicy, fully_shard, optim, shard_model
from harness import cached_mesh, distributed
from subclasses import (
    STYLES,
    OfMesh,
    OfModule,
    Padding,
    two_tensor_methods,
    with_nested,
    with_scaled,
    with_two_tensors,
)


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


@distributed(2, long=(1, 3))
def test_shards_of_columns_are_joined_as_columns() -> None:
    """The rows of all ranks' columns, one below the other, have as many elements."""
    kept: dict[str, Any] = {"reshard_after_forward": False, "offload_policy": CPUOffloadPolicy()}
    for make, options in ((with_two_tensors, {}), (with_nested, kept), (as_copies, kept)):
        with two_tensor_methods():
            plain = layers(6)  # square, and as wide as the input: nothing else would notice
            model = make(copy.deepcopy(plain))
            shard(model, shard_placement_fn=columns, **options)
            assert model[0].weight.placements == (Shard(1),)  # type: ignore[index,union-attr]
            train_beside_plain(model, plain)


def as_copies(model: nn.Module) -> nn.Module:
    return with_scaled(model, OfModule, "returns plain copies")


@distributed(3)
def test_columns_that_the_ranks_do_not_divide_are_refused_on_every_rank() -> None:
    with (
        two_tensor_methods(),
        pytest.raises(ValueError, match=r"uneven sharding on dim 1.*'weight' \(TwoT"),
    ):
        shard(with_two_tensors(layers(7)), shard_placement_fn=columns)


class InBlocks(TwoTensor):
    """Rounds where it is split, as classes of blocks do, and refuses other cuts."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "split":
            args = (args[0], -(-args[1] // 4) * 4, *args[2:])
        if name in ("slice", "narrow") and args[3] % 4:
            raise NotImplementedError(f"{args[3]} rows")
        return super().__torch_dispatch__(func, types, args, kwargs)


@distributed(3, long=(2,))
def test_a_class_that_splits_elsewhere_is_refused_on_every_rank() -> None:
    """NF4 gives 2 parts of 40 rows where 3 ranks hold 27, 27 and 26 of 80."""
    for rows, words in ((6, "torch.chunk gave"), (4 * dist.get_world_size() - 1, "rows")):
        layer = nn.Linear(3, rows)
        layer.weight = nn.Parameter(InBlocks(layer.weight.detach(), layer.weight.detach().clone()))
        with (
            two_tensor_methods(),
            pytest.raises(ValueError, match=rf"'weight' of shape .* cannot be split.*{words}"),
        ):
            fully_shard(layer)


@distributed(2)
def test_whole_parameters_on_every_rank_are_gathered_from_one() -> None:
    """Classes go by the size of the mesh they are given: NF4 multiplies its rows by it."""
    hybrid = cached_mesh(2, 1, names=("replicate", "shard"))
    for make in (with_two_tensors, as_padding):
        for how in ("none", "hybrid"):
            with two_tensor_methods():
                plain = layers()
                model = make(copy.deepcopy(plain))
                mesh = hybrid if how == "hybrid" else None
                shard_model(model, mesh, strategy=how, wrap=[nn.Linear])
                train_beside_plain(model, plain)


def as_padding(model: nn.Module) -> nn.Module:
    return with_scaled(model, Padding, STYLES[1])


@distributed(2)
def test_an_evaluation_in_inference_mode_comes_first() -> None:
    for make in (with_two_tensors, with_nested, as_padding):
        for reshard in (True, False):
            with two_tensor_methods():
                plain = layers()
                model = shard(make(copy.deepcopy(plain)), reshard_after_forward=reshard)
                with torch.inference_mode():
                    model(batch(0, 0))
                for layer in (model[0], model[2], model[4]):  # the optimizer needs shards
                    layer.reshard()
                train_beside_plain(model, plain)


class BecomesPlain(OfMesh):
    """As NF4: a plain tensor in another dtype."""

    KEEP = tuple(name for name in OfMesh.KEEP if name != "_to_copy")


@distributed(1)
def test_a_model_converted_after_sharding_that_is_a_subclass_no_more() -> None:
    model = shard(with_scaled(layers(), BecomesPlain, STYLES[0]))
    model.float()
    with pytest.raises(ValueError, match=r"'0.weight' was sharded as a tensor subclass and is a p"):
        model(batch(0, 0).float())


@distributed(2, long=(3,))
def test_more_ranks_than_rows() -> None:
    for make in (with_two_tensors, with_nested, as_padding):
        with two_tensor_methods():
            plain = layers(1)
            train_beside_plain(shard(make(copy.deepcopy(plain))), plain)


class Tied(nn.Sequential):
    """The second layer computes with the weight of the first, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@distributed(2)
def test_tied_weights_and_a_module_that_runs_twice() -> None:
    for make in (with_two_tensors, with_nested, as_copies):
        for reshard in (True, False):
            with two_tensor_methods():
                plain = Tied(*layers(6))
                model = make(copy.deepcopy(plain))
                for side in (model, plain):
                    side[2].weight = side[0].weight  # type: ignore[index]
                train_beside_plain(fully_shard(model, reshard_after_forward=reshard), plain)


@distributed(2)
def test_every_way_to_step() -> None:
    for make in (with_two_tensors, with_nested, as_copies):
        for way in (optim.local_step, optim.flat_step, optim.whole_step):
            with two_tensor_methods():
                plain = layers()
                model = shard(make(copy.deepcopy(plain)))
                train_beside_plain(model, plain, make_optimizer=lambda m, way=way: way(adam(m)))


@distributed(2)
def test_loading_replaces_what_was_gathered_before() -> None:
    for make in (with_two_tensors, with_nested, as_copies):
        for assign in (False, True):
            with two_tensor_methods():
                plain = layers()
                state = copy.deepcopy(shard(make(copy.deepcopy(plain))).state_dict())
                other = copy.deepcopy(plain)
                with torch.no_grad():
                    for param in other.parameters():
                        param.neg_()
                model = shard(make(other), reshard_after_forward=False)
                model(batch(0, 0))
                model.load_state_dict(state, assign=assign)
                assert isinstance(model[0].weight, DTensor)
                train_beside_plain(model, plain)
