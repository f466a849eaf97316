"""`shard_granularity` on meshes of several dims, and on more ranks than there are blocks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_block_shards import ROWS, linear, sharded, train, trained_and_saved
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp2 import clip_grad_norm_, full_state_dict, fully_shard
from fsdp2.dtensor.placement import own_box
from fsdp2.optim import block_rows, flat_step, local_step, whole_step
from harness import cached_mesh, distributed, ours_only, run_on
from models import MLP
from reference import Training, check_training
from subclasses import two_tensor_methods, with_two_tensors

pytestmark = ours_only("shard_granularity")
# Of 13 and 9 rows: blocks of 4 for all of 4 ranks, of 7 and 20 for only some of them.
GRANULARITIES = (4, 7, 20)


def mesh_of(kind: str) -> Any:
    """The ranks in one dim, or as two replicas."""
    num = dist.get_world_size()
    return cached_mesh(2, num // 2) if kind == "replicas" else cached_mesh(num)


def in_blocks(kind: str, granularity: int | None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*leave some ranks without any")
        return sharded(6, ROWS, 9, granularity=granularity, mesh=mesh_of(kind))


def tensor_parallel(sizes: tuple[int, ...], mesh: Any) -> nn.Module:
    # DTensors in between, since layers of torch take plain parts for even ones.
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    return parallelize_module(linear(*sizes), mesh["tp"], plan)


def on_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def assert_those_of(model: nn.Module, plain: nn.Module) -> None:
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), wanted)  # type: ignore[operator]
        box = own_box(ours, "")
        part = wanted[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
        torch.testing.assert_close(ours.to_local(), part)  # type: ignore[operator]


# -- tensor parallelism ----------------------------------------------------------------------------


@distributed(4)
def test_all_ranks_refuse_blocks_that_tensor_parallelism_cuts() -> None:
    """Also those for whose own part blocks would do: else they wait for the others."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    # Of parts of 7 and 6 rows, 5 and 4, or 9 and 8, blocks fit one. They fit both parts of 5 rows,
    # but the second begins inside a block.
    for rows, granularity in ((13, 3), (13, 4), (9, 3), (17, 4), (10, 3)):
        model = tensor_parallel((6, rows, 9), mesh)
        with pytest.raises(ValueError, match=rf"'0.weight' of shape \({rows}, 6\) cannot have"):
            fully_shard(model, mesh=mesh["dp"], shard_granularity=granularity)
        assert type(model) is nn.Sequential
    fully_shard(
        tensor_parallel((6, 12, 9), mesh),
        mesh=mesh["dp"],
        shard_granularity=lambda p: 3 if p.shape[0] == 12 else 1,
    )


@distributed(4)
def test_blocks_of_uneven_tensor_parallel_parts_are_the_same_on_all_ranks() -> None:
    """The parts have 4 and 3 columns: 2 and 8 rows are blocks of 8 elements."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    plain, model = linear(6, 7, 24), tensor_parallel((6, 7, 24), mesh)
    blocks = block_rows(8)
    fully_shard(
        model, mesh=mesh["dp"], shard_granularity=lambda p: blocks(p) if p.shape == (24, 7) else 1
    )
    weight: Any = model[1].weight  # type: ignore[index]
    assert {str(p) for p in on_all_ranks(str(weight.placements[0]))} == {
        "BlockShard(dim=0, granularity=8)"
    }
    assert weight.to_local().numel() % 8 == 0
    for both in (plain, model):
        train(both, torch.optim.AdamW(both.parameters(), lr=0.1), clip=None)
    assert_those_of(model, plain)


# -- replicas, and more ranks than blocks ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["one dim", "replicas"])
@distributed(4)
def test_training_with_fewer_blocks_than_ranks(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*leave some ranks without any")
        for granularity in (7, 20):
            for nbytes in (0, 10**9):
                options: dict[str, Any] = {"direct_min_bytes": nbytes, "mesh": mesh_of(kind)}
                check_training(MLP, Training(steps=2), shard_granularity=granularity, **options)


@pytest.mark.parametrize("kind", ["one dim", "replicas"])
@distributed(4)
def test_optimizers_step_as_on_one_process(kind: str) -> None:
    plain = linear(6, ROWS, 9)
    right = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, right, clip=nn.utils.clip_grad_norm_)
    for granularity in GRANULARITIES:
        for wrap in (lambda optimizer: optimizer, local_step, flat_step, whole_step):
            model = in_blocks(kind, granularity)
            train(model, wrap(torch.optim.AdamW(model.parameters(), lr=0.1)), clip=clip_grad_norm_)
            assert_those_of(model, plain)


@distributed(4)
def test_tensor_subclasses_train_in_blocks_on_replicas() -> None:
    mesh = cached_mesh(2, 2)
    for rows in (ROWS, 16):
        plain, model = linear(6, rows), with_two_tensors(linear(6, rows))
        with two_tensor_methods():
            fully_shard(model, mesh=mesh, shard_granularity=4)
            for both in (plain, model):
                train(both, torch.optim.SGD(both.parameters(), lr=0.1))
            x = torch.ones(2, 6)
            torch.testing.assert_close(model(x), plain(x))


@distributed(2, 4)
def test_lbfgs_says_that_it_cannot_flatten_blocks() -> None:
    model = fully_shard(linear(6, 16), shard_granularity=lambda p: 12)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 6)).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="Cannot flatten unevenly sharded tensor: LBFGS"):
        optimizer.step(closure)


# -- checkpoints -----------------------------------------------------------------------------------


class RowScales(torch.optim.Optimizer):
    """Over plain DTensors; keeps one number for each row of a matrix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            squares = param.grad.square()
            mean = squares.mean(1, keepdim=True) if param.ndim == 2 else squares
            state = self.state[param]
            state["scale"] = state["scale"] / 2 + mean if state else mean
            param.sub_(0.1 * param.grad / (state["scale"].sqrt() + 1))


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rows": RowScales,
    "whole": lambda params: whole_step(torch.optim.Adafactor(params)),
}
Job = tuple[int, str, int | None]  # ranks, their mesh, rows per block


def saved_or_loaded(folder: str, load: bool, name: str, job: Job) -> Any:
    """State and weights, weights after one more step, and how state is laid out."""
    model = in_blocks(job[1], job[2])
    optimizer = OPTIMIZERS[name](model.parameters())
    trained_and_saved(folder, load, model, optimizer)
    params = list(model.parameters())
    tensors = [t for p in params for t in optimizer.state[p].values() if isinstance(t, DTensor)]
    before = [t.full_tensor().detach().clone() for t in (*params, *tensors)]
    layouts = [str(t.placements[-1]) for t in tensors]
    train(model, optimizer, 1)
    after = full_state_dict(model, ranks=range(dist.get_world_size()))
    return before, list(after.values()), layouts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_load_on_any_mesh_with_any_blocks(tmp_path: Path, name: str) -> None:
    jobs: dict[Job, list[Job]] = {
        (4, "replicas", 4): [(4, "one dim", 7), (3, "one dim", 4)],
        (4, "one dim", 7): [(4, "replicas", 5), (2, "one dim", None)],
    }
    for number, (first, others) in enumerate(jobs.items()):
        folder = str(tmp_path / str(number))
        before, after, _ = run_on(first[0], saved_or_loaded, folder, False, name, first)[0]
        for job in others:
            now, then, layouts = run_on(job[0], saved_or_loaded, folder, True, name, job)[0]
            assert all(map(torch.equal, before, now)), job
            for a, b in zip(after, then, strict=True):
                torch.testing.assert_close(a, b, msg=f"{first} -> {job}")
            if name == "rows" and job[2] == 7:
                # As the optimizer would make it there: no step has to move it.
                assert layouts[0] == "BlockShard(dim=0, granularity=7)"
