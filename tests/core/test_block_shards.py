"""`shard_granularity`: shards that consist of whole blocks of rows."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
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
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp2 import (
    CPUOffloadPolicy,
    checkpoint,
    clip_grad_norm_,
    explain,
    full_state_dict,
    fully_shard,
    init_on_whole_tensors,
    merge_units,
    shard_model,
)
from fsdp2.dtensor.block_shard import block_shard, granularity_of
from fsdp2.dtensor.placement import own_box
from fsdp2.optim import flat_step, local_step, whole_step
from harness import cached_mesh, distributed, ours_only, run_on
from models import BY_NAME, MLP
from reference import Training, check_training

pytestmark = ours_only("shard_granularity")
ROWS = 13  # in blocks of 4: 2 ranks have 8 and 5, `torch.chunk` would give 7 and 6


def columns(param: Tensor) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


def linear(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def sharded(*sizes: int, granularity: Any = 4, **options: Any) -> nn.Module:
    model = linear(*sizes)
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, shard_granularity=granularity, **options)
    return fully_shard(model, shard_granularity=granularity, **options)


def train(model: nn.Module, optimizer: Any, steps: int = 2, clip: Any = None) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, model[0].in_features, generator=generator)  # type: ignore[index,call-overload]
        model(x).square().mean().backward()
        if clip is not None:
            clip(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def assert_same_state(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


# -- layouts ---------------------------------------------------------------------------------------


@distributed(2, 3, 4)
def test_ranks_hold_whole_blocks() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = {2: (8, 5), 3: (8, 5, 0), 4: (4, 4, 4, 1)}[world_size]
    model = sharded(6, ROWS, 8 * world_size)
    weight, plain = model[0].weight, linear(6, ROWS, 1)[0].weight  # type: ignore[index]
    start = sum(rows[:rank])
    assert torch.equal(weight.to_local(), plain[start : start + rows[rank]])
    assert own_box(weight, "").start[0] == start
    # `torch.chunk` would give the same here, if blocks are whole then anyway.
    assert [granularity_of(p.placements[0]) for p in model.parameters()] == (
        [4, 4, 1, 1] if world_size < 4 else [1, 1, 1, 1]
    )


@distributed(3)
def test_rows_per_block_of_each_parameter() -> None:
    model = sharded(6, ROWS, granularity=lambda p: 6 if p.ndim == 2 else 1)
    weight, bias = model.parameters()
    assert weight.placements == (block_shard(0, 6),)
    assert str(weight.placements[0]) == "BlockShard(dim=0, granularity=6)"
    assert bias.placements == (Shard(0),)
    assert weight.to_local().shape[0] == (6, 6, 1)[dist.get_rank()]
    (unit,) = [unit for unit in explain(model).units if unit.params]
    assert unit.params[0].placements == ("BlockShard(0, granularity=6)",)
    assert unit.padding_bytes >= 4 * 6 * (18 - ROWS)


@distributed(2)
def test_much_padding_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'weight' of shape \(16, 64\), 2 ranks have room for"):
        fully_shard(nn.Linear(64, 16, bias=False), shard_granularity=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(nn.Linear(64, 24, bias=False), shard_granularity=16)


@distributed(2)
def test_what_makes_no_sense_is_refused_before_anything_changes() -> None:
    for value, words in (
        (0, "at least 1"),
        (True, "a number of rows, got True"),
        (2.0, "a number of rows, got 2.0"),
        (lambda p: None, "of parameter 'weight' must return a number of rows, got None"),
        (lambda p: -1, "of parameter 'weight' must return a number of rows, at least 1"),
    ):
        layer = nn.Linear(4, 7)
        with pytest.raises((TypeError, ValueError), match=words):
            fully_shard(layer, shard_granularity=value)  # type: ignore[arg-type]
        assert type(layer) is nn.Linear
        assert not isinstance(layer.weight, DTensor)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(2, 3, long=(1, 4))
def test_training_is_that_of_one_process(name: str) -> None:
    for granularity in (2, 3, 5):
        for nbytes in (0, 10**9):
            options: dict[str, Any] = {"direct_min_bytes": nbytes}
            check_training(
                BY_NAME[name], Training(steps=2), shard_granularity=granularity, **options
            )


@distributed(2, long=(3,))
def test_training_on_another_dim_and_offloaded() -> None:
    check_training(MLP, Training(steps=2), shard_granularity=3, shard_placement_fn=columns)
    check_training(MLP, Training(steps=2), shard_granularity=3, offload_policy=CPUOffloadPolicy())


@distributed(4)
def test_training_of_replicas_and_with_larger_shards_after_forward() -> None:
    check_training(MLP, Training(steps=2), shard_granularity=3, mesh=cached_mesh(2, 2))
    check_training(MLP, Training(steps=2), shard_granularity=3, reshard_after_forward=2)


def tensor_parallel(sizes: tuple[int, ...], mesh: Any) -> nn.Module:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(linear(*sizes), mesh["tp"], plan)


@distributed(4)
def test_beside_tensor_parallelism() -> None:
    """On another dim than that of tensor parallelism, and on the same one where blocks fit."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    plain, model = linear(6, 16, 9), tensor_parallel((6, 16, 9), mesh)
    with pytest.raises(ValueError, match=r"'0.weight' of shape \(16, 6\).* cuts dim 0 as well"):
        fully_shard(model, mesh=mesh["dp"], shard_granularity=3)
    assert type(model) is nn.Sequential
    fully_shard(model, mesh=mesh["dp"], shard_granularity=4)
    first, _, second, _ = model.parameters()
    assert granularity_of(first.placements[0]) == 1
    assert str(second.placements[0]) == "BlockShard(dim=0, granularity=4)"
    for both in (plain, model):
        train(both, torch.optim.AdamW(both.parameters(), lr=0.1))
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), wanted)
        box = own_box(ours, "")
        part = wanted[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
        torch.testing.assert_close(ours.to_local(), part)


@distributed(2, 3)
def test_initial_values_do_not_depend_on_blocks() -> None:
    found = []
    for granularity in (None, 4):
        model = sharded(6, ROWS, 9, granularity=granularity)
        with init_on_whole_tensors(1):
            for layer in model:  # type: ignore[attr-defined]
                layer.reset_parameters()
        found.append(full_state_dict(model, ranks=range(dist.get_world_size())))
    assert_same_state(*found)


@distributed(3)
def test_ranks_without_rows_do_not_disagree_about_initial_values() -> None:
    model = sharded(6, ROWS, 9)
    assert not model[0].weight.to_local().numel() or dist.get_rank() < 2  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 6))


# -- optimizers ------------------------------------------------------------------------------------


@distributed(2, 3)
def test_optimizers_step_as_on_one_process() -> None:
    for wrap in (lambda optimizer: optimizer, local_step, flat_step, whole_step):
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            plain, model = linear(6, ROWS, 9), sharded(6, ROWS, 9)
            train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, **options))
            train(model, wrap(torch.optim.AdamW(model.parameters(), lr=0.1, **options)))
            for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.full_tensor(), wanted)


@distributed(2, 3)
def test_gradients_are_clipped_as_on_one_process() -> None:
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        plain, model = linear(6, ROWS, 9), sharded(6, ROWS, 9)
        train(plain, torch.optim.SGD(plain.parameters(), lr=1.0), clip=nn.utils.clip_grad_norm_)
        train(model, torch.optim.SGD(model.parameters(), lr=1.0), clip=clip)
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), wanted)


def scales(weight: Tensor, block: int) -> Tensor:
    """The largest magnitude of each block of rows and columns: DeepSeek's scales of float8."""
    rows = weight.split(block)
    return torch.stack(
        [torch.stack([part.abs().amax() for part in row.split(block, 1)]) for row in rows]
    )


@distributed(2, 3)
def test_blocks_of_shards_are_blocks_of_the_whole() -> None:
    """Quantized on its own, every shard has the scales that the whole weight has there."""
    whole = linear(40, 83)[0].weight.detach()  # type: ignore[index]
    model = sharded(40, 83, granularity=16)
    local = model[0].weight.to_local()  # type: ignore[index]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, scales(local, 16) if local.numel() else None)
    assert torch.equal(torch.cat([part for part in found if part is not None]), scales(whole, 16))


# -- checkpoints and copies ------------------------------------------------------------------------


def trained_and_saved(folder: str, load: bool, model: nn.Module, optimizer: Any) -> None:
    """Train and save; with ``load``, load what was saved so."""
    checkpoints = checkpoint.Checkpointer(folder)
    if load:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        checkpoints.load(model=model, optimizer=optimizer)
    else:
        train(model, optimizer)
        checkpoints.save(1, model=model, optimizer=optimizer)


def save_or_load(folder: str, load: bool, granularity: int | None) -> Any:
    model = sharded(6, ROWS, 9, granularity=granularity)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained_and_saved(folder, load, model, optimizer)
    moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return moments, weights


@pytest.mark.parametrize("blocks", [(4, None), (None, 4), (4, 5)], ids=str)
def test_checkpoints_load_with_other_blocks_on_other_ranks(
    tmp_path: Path, blocks: tuple[int | None, int | None]
) -> None:
    saved = run_on(2, save_or_load, str(tmp_path), False, blocks[0])[0]
    loaded = run_on(3, save_or_load, str(tmp_path), True, blocks[1])[0]
    for before, now in zip(saved, loaded, strict=True):
        assert all(map(torch.equal, before, now))


def torch_checkpoint(folder: str, load: bool, granularity: int | None) -> Any:
    model = sharded(6, ROWS, 9, granularity=granularity)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if not load:
        train(model, optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    if load:
        for value in state["model"].values():
            value.zero_()
        dcp.load(state, checkpoint_id=folder)
    else:
        dcp.save(state, checkpoint_id=folder)
    moments = [m["exp_avg"].full_tensor() for m in state["optimizer"]["state"].values()]
    return [p.full_tensor().detach() for p in state["model"].values()], moments


@pytest.mark.parametrize("blocks", [(4, None), (None, 4)], ids=str)
def test_distributed_checkpoints_of_torch_load_with_other_blocks(
    tmp_path: Path, blocks: tuple[int | None, int | None]
) -> None:
    saved = run_on(3, torch_checkpoint, str(tmp_path), False, blocks[0])[0]
    loaded = run_on(2, torch_checkpoint, str(tmp_path), True, blocks[1])[0]
    for before, now in zip(saved, loaded, strict=True):
        assert all(map(torch.equal, before, now))


@distributed(2, 3)
def test_whole_state_dicts_are_dealt_out() -> None:
    wanted, model = linear(6, ROWS, 9).state_dict(), sharded(6, ROWS, 9)
    for broadcast in (False, True):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        given = wanted if not broadcast or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, {k: v.clone() for k, v in given.items()}, options=options)
        assert_same_state(full_state_dict(model, ranks=range(dist.get_world_size())), wanted)


@distributed(2, 3)
def test_copies_and_merged_units_keep_their_blocks() -> None:
    plain = linear(6, ROWS, 9)
    model = shard_model(linear(6, ROWS, 9), wrap=[nn.Linear], shard_granularity=4)
    merged = copy.deepcopy(model)
    merge_units(merged, min_bytes=10**6)
    assert len([u for u in explain(merged).units if u.params]) == 1
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for made in (model, copy.deepcopy(model), merged):
        if made is not model:
            assert [p.placements for p in made.parameters()] == [
                p.placements for p in model.parameters()
            ]
    for made in (model, merged):
        train(made, torch.optim.SGD(made.parameters(), lr=0.1))
        for ours, wanted in zip(made.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), wanted)


# -- operators of torch ----------------------------------------------------------------------------


def saved_and_loaded(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_place(tensor: Tensor, other: Tensor) -> Tensor:
    tensor = tensor.clone()
    torch._foreach_add_([tensor], [other * 2])
    return tensor.mul_(3).copy_(tensor + other)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda a, b: (a * 2 + b) / 3,
    "in_place": in_place,
    "foreach": lambda a, b: torch._foreach_mul([a, b], 2.0)[0],
    "dtype": lambda a, b: a.bfloat16().float(),
    "zeros_like": lambda a, b: torch.zeros_like(a) + 1,
    "where": lambda a, b: torch.where(a > 3, a, b),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "foreach_norm": lambda a, b: torch._foreach_norm([a])[0],
    "sum": lambda a, b: a.sum(),
    "sum_rows": lambda a, b: a.sum(0),
    "sum_columns": lambda a, b: a.sum(1),
    "mean": lambda a, b: a.mean(),
    "mean_rows": lambda a, b: a.mean(0),
    "variance": lambda a, b: a.var(0),
    "softmax_rows": lambda a, b: a.softmax(0),
    "softmax_columns": lambda a, b: a.softmax(1),
    "sort": lambda a, b: a.sort(0)[0],
    "topk": lambda a, b: a.topk(2, 0)[0],
    "cumsum": lambda a, b: a.cumsum(0),
    "flip": lambda a, b: a.flip(0),
    "tril": lambda a, b: a.tril(),
    "transpose": lambda a, b: a.t(),
    "matmul": lambda a, b: a @ b.t(),
    "matmul_rows": lambda a, b: a.t() @ b,
    "row": lambda a, b: a[3],
    "rows": lambda a, b: a[3:9],
    "some_columns": lambda a, b: a[:, 1:3],
    "cat_rows": lambda a, b: torch.cat([a, b]),
    "cat_columns": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b]),
    "chunk": lambda a, b: a.chunk(2)[0],
    "split": lambda a, b: a.split(5)[1],
    "unsqueeze": lambda a, b: a.unsqueeze(0),
    "expand": lambda a, b: a.unsqueeze(0).expand(2, *a.shape),
    "repeat": lambda a, b: a.repeat(2, 1),
    "flatten": lambda a, b: a.flatten(),
    "unflatten_columns": lambda a, b: a.unflatten(1, (2, 3)),
    "permuted_flatten": lambda a, b: a.unflatten(1, (2, 3)).permute(1, 0, 2).flatten(0, 1),
    "deepcopy": lambda a, b: copy.deepcopy(a),
    "pickle": lambda a, b: saved_and_loaded(a),
}


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def refused(compute: Callable[[], Any]) -> tuple[Any, bool]:
    """The result, and whether it was an error on any rank."""
    failed, result = torch.zeros(1), None
    try:
        result = compute()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        failed += 1
    dist.all_reduce(failed)
    return result, bool(failed)


MAY_BE_REFUSED = {"flatten", "permuted_flatten", "unflatten_columns"}


def check_operators(mesh: Any, placements: list[Any], others: list[list[Any]]) -> None:
    whole = torch.arange(float(ROWS * 6)).view(ROWS, 6)
    a = distribute_tensor(whole, mesh, placements)
    for other in others:
        b = distribute_tensor(whole + 1, mesh, other)
        for name, function in OPERATORS.items():
            made, failed = refused(functools.partial(function, a, b))
            message = f"{name} of {placements} and {other}"
            if failed:
                assert name in MAY_BE_REFUSED, message
            else:
                torch.testing.assert_close(full(made), function(whole, whole + 1), msg=message)


@distributed(2, 3)
def test_operators_are_right_or_refused() -> None:
    """Over tensors in blocks, and mixed with such as are sharded otherwise."""
    mesh = cached_mesh(dist.get_world_size())
    for dim, granularity in ((0, 4), (1, 2)):
        mine = [block_shard(dim, granularity)]
        others = (Shard(0), Shard(1), Replicate(), block_shard(0, 3))
        check_operators(mesh, mine, [mine, *([other] for other in others)])


@distributed(4)
def test_operators_on_meshes_of_two_dims_are_right_or_refused() -> None:
    blocks, replicated = block_shard(0, 4), Replicate()
    others: list[list[Any]] = [[replicated, Shard(0)], [Shard(0), replicated], [Shard(1), blocks]]
    for mine in ([replicated, blocks], [blocks, Shard(1)]):
        check_operators(cached_mesh(2, 2), mine, [mine, *others])


@distributed(2, 3)
def test_tensors_are_redistributed_from_and_to_blocks() -> None:
    mesh = cached_mesh(dist.get_world_size())
    whole = torch.arange(float(ROWS * 6)).view(ROWS, 6)
    placements = [Shard(0), Shard(1), Replicate(), block_shard(0, 4), block_shard(1, 2)]
    for start in placements:
        for end in placements:
            made = distribute_tensor(whole, mesh, [start]).redistribute(placements=[end])
            assert made.placements == (end,)
            assert torch.equal(made.full_tensor(), whole)
            wanted = distribute_tensor(whole, mesh, [end], src_data_rank=None).to_local()
            assert torch.equal(made.to_local(), wanted)


@distributed(4)
def test_tensors_are_redistributed_on_meshes_of_two_dims() -> None:
    """Also where both dims cut the same dim of the tensor."""
    mesh = cached_mesh(2, 2)
    whole = torch.arange(float(ROWS * 6)).view(ROWS, 6)
    placements = [Shard(0), Shard(1), Replicate(), block_shard(0, 4)]
    layouts = list(itertools.product(placements, placements))
    in_blocks = [pair for pair in layouts if block_shard(0, 4) in pair]
    pairs = {*itertools.product(in_blocks, layouts), *itertools.product(layouts, in_blocks)}
    for start, end in sorted(pairs, key=str):
        made = distribute_tensor(whole, mesh, start, src_data_rank=None)
        made = made.redistribute(placements=end)
        wanted = distribute_tensor(whole, mesh, end, src_data_rank=None)
        assert torch.equal(made.to_local(), wanted.to_local()), f"from {start} to {end}"


@distributed(2)
def test_views_are_right_or_refused() -> None:
    mesh = cached_mesh(2)
    num_right = 0
    for shape in ((12, 6), (4, 6, 3)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        targets = [(72,), (6, 12), (12, 2, 3), (3, 4, 6), (4, 3, 6), (4, 6, 3), (24, 3), (1, 12, 6)]
        for dim in range(len(shape)):
            for granularity in (2, 4, 5):
                made = distribute_tensor(whole, mesh, [block_shard(dim, granularity)])
                for target in targets:
                    view, failed = refused(functools.partial(made.view, target))
                    num_right += not failed
                    if not failed:
                        assert torch.equal(view.full_tensor(), whole.view(target))
    assert num_right > 20
