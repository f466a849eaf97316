"""`shard_granularity` of tensor subclasses, whose blocks shards then do not cut.

The matrix of docs/subclasses.md trains and resumes the classes of libraries in blocks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_block_shards import ROWS, linear, train
from test_subclass_checkpoints import Table
from torch import Tensor, nn

from fsdp2 import full_state_dict, fully_shard, load_full_state_dict
from fsdp2.checkpoint import Checkpointer
from fsdp2.dtensor.block_shard import block_shard
from harness import cached_mesh, distributed, ours_only, run_on
from subclasses import two_tensor_methods, with_two_tensors

pytestmark = ours_only("shard_granularity")
PAIRED = 14  # 2 ranks have 8 and 6 rows, 3 have 6, 6 and 2; `torch.chunk` would cut a pair


class Pairs(Table):
    """Another scale for each pair of rows, which is gathered beside the rows."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.data_, self.scale_), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        rows, pairs = outputs
        assert len(rows) == 2 * len(pairs) == PAIRED
        made = rows / pairs.repeat_interleave(2)[:, None]
        if out is None:
            return made, (made,)
        out.copy_(made)
        return None


def in_pairs(weight: Tensor) -> nn.Parameter:
    scale = 2.0 ** torch.arange(len(weight) // 2)
    data = weight * scale.repeat_interleave(2)[:, None]
    return nn.Parameter(Pairs.made(data, scale), requires_grad=False)


def paired_and_plain() -> tuple[nn.Module, nn.Module]:
    """Two layers with a frozen weight, of which the one is made of pairs."""
    plain: Any = linear(3, PAIRED, 3)
    plain[0].weight.requires_grad_(False)
    model: Any = copy.deepcopy(plain)
    model[0].weight = in_pairs(plain[0].weight)
    return model, plain


def sharded_in_pairs(**options: Any) -> tuple[Any, Any]:
    model, plain = paired_and_plain()
    fully_shard(model[0], shard_granularity=2, **options)  # type: ignore[index]
    return fully_shard(model, **options), plain


@distributed(2, 3)
def test_blocks_with_a_scale_each_are_gathered_whole() -> None:
    num = dist.get_world_size()
    with pytest.raises(ValueError, match=r"'0.weight'.*not where a pair of rows begins"):
        fully_shard(paired_and_plain()[0])
    model, plain = sharded_in_pairs()
    local = model[0].weight.to_local()
    rows = {2: (8, 6), 3: (6, 6, 2)}[num][dist.get_rank()]
    assert (len(local.data_), len(local.scale_)) == (rows, rows // 2)
    assert model[0].weight.placements == (block_shard(0, 2),)
    for both in (model, plain):
        train(both, torch.optim.Adam([p for p in both.parameters() if p.requires_grad], lr=0.1))
    x = torch.linspace(-1, 1, 6).view(2, 3)
    # Means of three equal gradients are rounded, on some processors to other numbers.
    torch.testing.assert_close(model(x), plain(x))


@distributed(4)
def test_replicas_hold_the_same_blocks() -> None:
    model, plain = sharded_in_pairs(mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    assert len(model[0].weight.to_local().scale_) == (3 if dist.get_rank() % 2 else 4)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(model(x), plain(x))


@distributed(2, 3)
def test_whole_tensors_are_made_of_blocks_and_cut_into_them() -> None:
    model, plain = sharded_in_pairs()
    states = full_state_dict(model)
    if dist.get_rank() == 0:
        wanted: Any = in_pairs(plain[0].weight)
        assert torch.equal(states["0.weight"].data_, wanted.data_)
        assert torch.equal(states["0.weight"].scale_, wanted.scale_)
        states["0.weight"].scale_.div_(2)
    load_full_state_dict(model, states)
    plain[0].weight.mul_(2)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(model(x), plain(x))


def save_in_pairs(folder: str) -> None:
    Checkpointer(folder).save(1, model=sharded_in_pairs()[0]).wait()


def load_in_pairs(folder: str) -> None:
    model, plain = sharded_in_pairs()
    model[0].weight._local_tensor.data_.zero_()
    model[0].weight._local_tensor.scale_.zero_()
    Checkpointer(folder).load(model=model)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_checkpoints_in_blocks_are_loaded_by_other_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    run_on(before, save_in_pairs, str(tmp_path))
    run_on(after, load_in_pairs, str(tmp_path))


@distributed(2, 3)
def test_two_tensors_train_in_blocks() -> None:
    plain = linear(6, ROWS)
    with two_tensor_methods():
        model = with_two_tensors(copy.deepcopy(plain))
        fully_shard(model, shard_granularity=4)
        for both in (plain, model):
            train(both, torch.optim.SGD(both.parameters(), lr=0.1))
        x = torch.ones(2, 6)
        torch.testing.assert_close(model(x).a, plain(x))


@distributed(2)
def test_rows_that_belong_to_no_block_are_refused_on_every_rank() -> None:
    class Short(Pairs):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self.data_, self.scale_[: 1 + mesh.get_local_rank()]), None

    model, _ = paired_and_plain()
    weight: Any = model[0].weight  # type: ignore[index]
    short = Short.made(weight.data_, weight.scale_)
    model[0].weight = nn.Parameter(short, requires_grad=False)  # type: ignore[index,operator]
    fully_shard(model, shard_granularity=2)
    with pytest.raises(ValueError, match=r"'0.weight'.*\[1, 2\] rows.*\[8, 6\] rows"):
        model(torch.ones(2, 3))
