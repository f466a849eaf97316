"""Whole tensors from a sharded model and back: values, who gets them, errors, memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import fsdp2
import fsdp2.api.full_state
from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.api.p2p import P2PBatch
from harness import cached_mesh, cpu_only, distributed, ours_only
from models import BY_NAME, CNN, MLP, TRANSFORMER, Case
from reference import (
    assert_all_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    buffers,
    pair,
    run_both,
    shard_case,
    whole,
)

pytestmark = ours_only("full_state_dict and load_full_state_dict")


def assert_states(states: dict[str, Any], plain: nn.Module) -> None:
    """Equal to the plain model's on this rank."""
    expected = plain.state_dict()
    assert list(states) == list(expected)
    for name, value in states.items():
        assert type(value) is Tensor, name
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value.cpu(), expected[name].cpu()), name


def other_weights(plain: nn.Module) -> nn.Module:
    """The same model with other weights and buffers, the same on all ranks."""
    other = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(7)
    for value in dict.fromkeys(other.state_dict(keep_vars=True).values()):
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        value.data = (10 * noise).to(value.dtype)
    return other


@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn", "lora"])
@distributed(3, long=(1, 2))
def test_round_trip(name: str) -> None:
    """Uneven, tied, frozen, buffers; and training goes on from what was loaded."""
    case = BY_NAME[name]
    model, plain = pair(case)
    states = fsdp2.full_state_dict(model)
    if dist.get_rank() == 0:
        assert_states(states, plain)
    else:
        assert states == {}
    other = other_weights(plain)
    given = other.state_dict() if dist.get_rank() == 0 else None
    run_both(case, model, plain, 0)
    plain.load_state_dict(other.state_dict())
    result = fsdp2.load_full_state_dict(model, given)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_sharded(model)
    assert_same_parameters(model, plain, bitwise=True)
    assert_all_same(buffers(model), buffers(plain), "buffer", bitwise=True)
    for network in (model, plain):
        network.zero_grad()
    run_both(case, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(3)
def test_who_gets_it_where_and_in_which_dtype() -> None:
    model, plain = pair(TRANSFORMER)
    states = fsdp2.full_state_dict(model, ranks=(2, 0), dtype=torch.bfloat16, device=None)
    if dist.get_rank() == 1:
        assert states == {}
    else:
        assert_states(states, copy.deepcopy(plain).bfloat16())
        assert states["head.weight"] is states["embedding.weight"]
        states["norm.weight"].fill_(9.0)  # memory of its own
    assert_same_parameters(model, plain, bitwise=True)


@distributed(2)
def test_one_by_one_and_of_a_state_dict() -> None:
    model, plain = pair(CNN)
    expected = plain.state_dict()
    for states in (model, model.state_dict()):
        names = []
        for name, value in fsdp2.iter_full_tensors(states, ranks=(1,)):
            names.append(name)
            assert (value is None) == (dist.get_rank() == 0)
            assert value is None or torch.equal(value.cpu(), expected[name].cpu())
        assert names == list(expected)


@distributed(2)
def test_buffers_and_ignored_parameters_are_those_of_the_rank_that_gets_or_gives_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    own = model[1].weight
    fully_shard(model, ignored_params={own})
    with torch.no_grad():
        own.fill_(dist.get_rank())
    model[1].running_mean.fill_(10.0 + dist.get_rank())
    states = fsdp2.full_state_dict(model, ranks=(0, 1))
    assert torch.equal(states["1.weight"], own.cpu())
    assert torch.equal(states["1.running_mean"], model[1].running_mean.cpu())
    fsdp2.load_full_state_dict(model, states, source=1)
    assert torch.equal(own, torch.ones(3))
    assert torch.equal(model[1].running_mean, torch.full((3,), 11.0))
    assert own is model[1].weight


@pytest.mark.parametrize("between", [False, True])
@distributed(2)
def test_at_any_time(between: bool) -> None:
    """Between forward and backward, and gathered by hand; loading is seen by the next forward."""
    model, plain = pair(TRANSFORMER, reshard_after_forward=False)
    if between:
        loss = TRANSFORMER.loss(model, *TRANSFORMER.batch(0, dist.get_rank(), torch.float64))
    else:
        model.blocks[0].unshard()
    full = fsdp2.full_state_dict(model)
    if dist.get_rank() == 0:
        assert_states(full, plain)
    if between:
        loss.backward()
        model.zero_grad()
    other = other_weights(plain)
    model.blocks[1].unshard()
    fsdp2.load_full_state_dict(model, other.state_dict())
    run_both(TRANSFORMER, model, other, 1)
    assert_same_gradients(model, other)


@distributed(2)
def test_offloaded_shards_and_shards_of_another_dim() -> None:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    options = {"offload_policy": CPUOffloadPolicy(), "shard_placement_fn": place}
    model, plain = pair(MLP, **options)
    full = fsdp2.full_state_dict(model, ranks=(0, 1))
    assert_states(full, plain)
    other = other_weights(plain)
    fsdp2.load_full_state_dict(model, other.state_dict(), source=1)
    run_both(MLP, model, other, 0)
    assert_same_gradients(model, other)


@distributed(3)
def test_into_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = shard_case(TRANSFORMER, TRANSFORMER.build().double())
    _, plain = pair(TRANSFORMER)
    fsdp2.load_full_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else None)
    run_both(TRANSFORMER, model, plain, 0)
    assert_same_gradients(model, plain)
    assert model.head.weight is model.embedding.weight


@distributed(4)
def test_replicas() -> None:
    model, plain = pair(MLP, mesh=cached_mesh(2, 2, names=("full_replicate", "full_shard")))
    full = fsdp2.full_state_dict(model, ranks=(3, 0))
    if dist.get_rank() in (0, 3):
        assert_states(full, plain)
    other = other_weights(plain)
    fsdp2.load_full_state_dict(
        model, other.state_dict() if dist.get_rank() == 2 else None, source=2
    )
    assert_same_parameters(model, other, bitwise=True)


@distributed(4)
def test_only_what_is_needed_travels() -> None:
    """One replica sends, and tied parameters once."""
    mesh = cached_mesh(2, 2, names=("full_replicate", "full_shard"))
    model, _ = pair(TRANSFORMER, mesh=mesh)
    sent = []
    send = P2PBatch.send

    def counting(p2p: P2PBatch, tensor: Tensor, *args: Any) -> None:
        sent.append(tensor.numel())
        send(p2p, tensor, *args)

    P2PBatch.send = counting
    try:
        fsdp2.full_state_dict(model)
    finally:
        P2PBatch.send = send
    shards = [p.to_local().numel() for p in model.parameters()]
    assert sent == (shards if dist.get_rank() == 1 else [])


@distributed(4)
def test_tensor_parallel_parameters() -> None:
    """Strided shards, and norms that are on the data-parallel dim only, once per tensor rank."""
    mesh = cached_mesh(2, 2, names=("full_dp", "full_tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)).double()
    model = copy.deepcopy(plain)
    plan = {"0": ColwiseParallel(output_layouts=Shard(0)), "2": RowwiseParallel()}
    parallelize_module(model, mesh["full_tp"], plan)
    fully_shard(model, mesh=mesh["full_dp"])
    full = fsdp2.full_state_dict(model, ranks=(3,))
    if dist.get_rank() == 3:
        assert_states(full, plain)
    other = other_weights(plain)
    fsdp2.load_full_state_dict(model, other.state_dict() if dist.get_rank() == 0 else None)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), other.get_parameter(name)), name


@distributed(4)
def test_a_model_on_a_part_of_the_ranks() -> None:
    """Two models, on two halves of the ranks: each group on its own."""
    pairs = cached_mesh(2, 2, names=("full_part", "full_within"))
    mesh = pairs["full_within"]
    model, plain = pair(MLP, mesh=mesh)
    first = mesh.mesh[0].item()
    full = fsdp2.full_state_dict(model, ranks=(first,), group=mesh.get_group())
    if dist.get_rank() == first:
        assert_states(full, plain)
    other = other_weights(plain)
    given = other.state_dict() if dist.get_rank() == first else None
    fsdp2.load_full_state_dict(model, given, source=first, group=mesh.get_group())
    assert_same_parameters(model, other, bitwise=True)
    with pytest.raises(ValueError, match=r"Rank 9 has no part of '0\.weight'"):
        fsdp2.full_state_dict(model, ranks=(9,), group=mesh.get_group())


@distributed(2)
def test_every_rank_gets_the_error() -> None:
    model, plain = pair(MLP)
    here = dist.get_rank() == 0
    states = dict(plain.state_dict())
    del states["2.weight"]
    states["more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"Missing .*2\.weight; Unexpected .*more"):
        fsdp2.load_full_state_dict(model, states if here else None)
    result = fsdp2.load_full_state_dict(model, states if here else None, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["2.weight"], ["more"])
    states["0.weight"] = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight: \(3, 3\)"):
        fsdp2.load_full_state_dict(model, states if here else None, strict=False)
    with pytest.raises(RuntimeError, match="not a whole tensor"):
        fsdp2.load_full_state_dict(model, model.state_dict())
    with pytest.raises(RuntimeError, match="passed None"):
        fsdp2.load_full_state_dict(model, None)
    assert_same_parameters(model, plain, bitwise=True)


def test_without_a_process_group() -> None:
    plain = nn.Linear(2, 3)
    assert_states(fsdp2.full_state_dict(plain), plain)
    other = nn.Linear(2, 3)
    fsdp2.load_full_state_dict(other, plain.state_dict())
    assert_states(other.state_dict(), plain)


# ------------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """The most bytes of new memory that were alive at once, of tensors of at least 1 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Any = WeakIdKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.nbytes >= 1024:
            storage = result.untyped_storage()
            if storage._cdata not in before:
                self.live[storage] = storage.nbytes()
                self.peak = max(self.peak, sum(self.live.values()))
        return result


NUM_LAYERS = 8
LAYER_BYTES = 256 * 256 * 4
WIDE = Case(
    "wide",
    lambda: nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(NUM_LAYERS)]),
    lambda model: list(model.children()),
    lambda step, rank, dtype: (torch.ones(2, 256, dtype=dtype),),
)


@cpu_only("counts bytes of the host")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@distributed(2)
def test_memory_of_collecting(dtype: torch.dtype | None) -> None:
    """Rank 0: the result and no more. Other ranks: nothing; or the cast of what is on its way."""
    model, _ = pair(WIDE, dtype=torch.float32)
    fsdp2.api.full_state.BATCH_BYTES = 2 * LAYER_BYTES
    try:
        with LiveBytes() as live:
            full = fsdp2.full_state_dict(model, dtype=dtype)
    finally:
        fsdp2.api.full_state.BATCH_BYTES = 32 * 1024 * 1024
    result = sum(value.nbytes for value in full.values())
    assert result == (0 if dist.get_rank() else NUM_LAYERS * LAYER_BYTES // (2 if dtype else 1))
    shards_on_their_way = 0 if dtype is None or dist.get_rank() == 0 else LAYER_BYTES
    assert live.peak == result + shards_on_their_way


@distributed(2)
def test_memory_of_loading() -> None:
    """Parts are sent from the state dict itself and received in the shards."""
    model, plain = pair(WIDE, dtype=torch.float32)
    model(*WIDE.batch(0, 0, torch.float32))  # (the runtime is there)
    other = other_weights(plain)
    with LiveBytes() as live:
        fsdp2.load_full_state_dict(model, other.state_dict() if dist.get_rank() == 0 else None)
    assert live.peak == 0
    assert_same_parameters(model, other, bitwise=True)
