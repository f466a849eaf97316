"""Copies of sharded models: `copy.deepcopy`, averages of weights over time, pickling."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    load_full_state_dict,
    register_fsdp_forward_method,
)
from fsdp2.runtime.unit import Unit
from fsdp2.runtime.unit_config import UnitConfig
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, MLP, NESTED, TRANSFORMER, Case
from reference import (
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    buffers,
    pair,
    parameters,
    run_both,
    shard_case,
)

pytestmark = ours_only("copy.deepcopy of sharded modules")


def train_both(case: Case, model: nn.Module, plain: nn.Module, steps: range) -> None:
    """Steps of SGD on both, compared at each."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (model, plain)]
    for step in steps:
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)
    assert_all_same(buffers(model), buffers(plain), "buffer")


def assert_independent(model: nn.Module, other: nn.Module) -> None:
    """No Parameter, no memory and no module of one is the other's."""

    def memory(network: nn.Module) -> set[int]:
        pointers = {
            (p.to_local() if isinstance(p, DTensor) else p).data_ptr()
            for p in [*network.parameters(), *network.buffers()]
        }
        return pointers - {0}

    assert not {*map(id, model.modules())} & {*map(id, other.modules())}
    assert not {*map(id, model.parameters())} & {*map(id, other.parameters())}
    assert not memory(model) & memory(other)


IN_EVERY_RUN = ("transformer", "cnn", "nested", "lora")
NAMES = [
    name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long) for name in BY_NAME
]


@pytest.mark.parametrize("name", NAMES)
@distributed(2, long=(1, 3))
def test_the_copy_and_the_original_train_on(name: str) -> None:
    """Copied before the first forward and after two steps; each goes its own way."""
    case = BY_NAME[name]
    model, plain = pair(case)
    early, plain_early = copy.deepcopy(model), copy.deepcopy(plain)
    assert_independent(model, early)
    assert type(early) is type(model)
    assert list(early.state_dict()) == list(plain.state_dict())
    train_both(case, model, plain, range(2))
    late, plain_late = copy.deepcopy(model), copy.deepcopy(plain)
    assert_sharded(late)
    assert_same_parameters(late, plain_late, bitwise=False)
    train_both(case, early, plain_early, range(5, 8))
    train_both(case, late, plain_late, range(3, 5))
    train_both(case, model, plain, range(2, 4))


@pytest.mark.parametrize("mode", [None, True, False])
@distributed(2, long=(4,))
def test_a_copy_between_forward_and_backward(mode: bool | None) -> None:
    """With parameters gathered; the backward that is due is not disturbed."""
    model, plain = pair(TRANSFORMER, reshard_after_forward=mode)
    train_both(TRANSFORMER, model, plain, range(1))
    batch = TRANSFORMER.batch(1, dist.get_rank(), torch.float64)
    loss = TRANSFORMER.loss(model, *batch)
    shown = {name: type(p) for name, p in model.named_parameters()}
    model_copy, plain_copy = copy.deepcopy(model), copy.deepcopy(plain)
    assert {name: type(p) for name, p in model.named_parameters()} == shown
    assert_sharded(model_copy)
    train_both(TRANSFORMER, model_copy, plain_copy, range(3, 5))
    loss.backward()
    model.zero_grad()
    train_both(TRANSFORMER, model, plain, range(1, 3))


@distributed(2)
def test_whole_parameters_are_not_copied() -> None:
    """Nor is anything gathered for a copy."""

    def refuse(self: nn.Parameter, memo: dict) -> None:
        raise AssertionError("a whole parameter was copied")

    model, _ = pair(TRANSFORMER, reshard_after_forward=False)
    loss = TRANSFORMER.loss(model, *TRANSFORMER.batch(0, dist.get_rank(), torch.float64))
    assert not isinstance(model.norm.weight, DTensor)
    original = nn.Parameter.__deepcopy__
    nn.Parameter.__deepcopy__ = refuse
    try:
        copy.deepcopy(model)
    finally:
        nn.Parameter.__deepcopy__ = original
    loss.backward()


@distributed(4)
def test_a_copy_with_parameters_on_fewer_ranks_after_forward() -> None:
    model, plain = pair(MLP, reshard_after_forward=2)
    loss = MLP.loss(model, *MLP.batch(0, dist.get_rank(), torch.float64))
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    loss.backward()
    model.zero_grad()
    train_both(MLP, other, plain_other, range(2))
    train_both(MLP, model, plain, range(2))


@distributed(2)
def test_a_copy_while_parameters_are_gathered_by_hand() -> None:
    model, plain = pair(MLP)
    model[0].unshard()
    handle = model[2].unshard(async_op=True)
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    assert_sharded(other)
    assert not isinstance(model[0].weight, DTensor)
    handle.wait()
    model[0].reshard()
    model[2].reshard()
    train_both(MLP, other, plain_other, range(2))
    train_both(MLP, model, plain, range(2))


@distributed(2)
def test_gradients_are_not_copied_and_freezing_is() -> None:
    """As `copy.deepcopy` of plain modules has it."""
    model, plain = pair(MLP)
    for network in (model, plain):
        network[2].weight.requires_grad_(False)
    run_both(MLP, model, plain, 0)
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    for network in (other, plain_other):
        assert all(p.grad is None for p in network.parameters())
    assert not other[2].weight.requires_grad
    assert_same_gradients(model, plain)
    for network in (other, plain_other):
        network[2].weight.requires_grad_(True)
    train_both(MLP, other, plain_other, range(2))


@distributed(2)
def test_ties_stay_ties() -> None:
    model, _ = pair(TRANSFORMER)
    other = copy.deepcopy(model)
    assert other.head.weight is other.embedding.weight
    assert other.head.weight is not model.head.weight
    assert len(list(other.parameters())) == len(list(model.parameters()))


class TwoHeads(nn.Module):
    """Two blocks and a head tied to one of them, in units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def six_wide(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(4, 6, generator=generator, dtype=dtype),)


@distributed(2)
def test_a_tie_across_units_that_the_root_will_resolve() -> None:
    """The copy is made before the common parent is sharded; the parent of the copy is then."""
    torch.manual_seed(0)
    plain = TwoHeads().double()
    model = copy.deepcopy(plain)
    fully_shard(model.body[0])
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    assert other.head.weight is not model.head.weight
    case = Case("two heads", TwoHeads, lambda model: [], six_wide)
    for network, reference in ((model, plain), (other, plain_other)):
        train_both(case, fully_shard(network), reference, range(2))
        assert network.head.weight is network.body[0].weight


@distributed(2)
def test_one_unit_of_a_model() -> None:
    """A block alone: its prefetch lists lose what was not copied, and the rest stays."""
    model, plain = pair(NESTED)
    model[1].set_modules_to_forward_prefetch([model[1].inner1, model[2]])
    model[1].set_modules_to_backward_prefetch([model[1].inner2])
    run_both(NESTED, model, plain, 0)
    block, plain_block = copy.deepcopy(model[1]), copy.deepcopy(plain[1])
    unit = vars(block)["_fsdp2_unit"]
    assert [u.modules for u in unit.forward_prefetch] == [(block.inner1,)]
    assert [u.modules for u in unit.backward_prefetch] == [(block.inner2,)]
    case = Case("block", lambda: plain_block, lambda model: [], six_wide)
    train_both(case, block, plain_block, range(3))
    assert_same_gradients(model, plain)


@distributed(2)
def test_a_unit_of_several_modules_and_a_plain_parent() -> None:
    """The parent is not sharded, and one unit lies on two of its children."""
    torch.manual_seed(0)
    plain = BY_NAME["even_mlp"].build().double()
    model = copy.deepcopy(plain)
    fully_shard([model[0], model[2]])
    fully_shard(model[4])
    other = copy.deepcopy(model)
    assert type(other) is nn.Sequential
    assert vars(other[0])["_fsdp2_unit"] is vars(other[2])["_fsdp2_unit"]
    assert vars(other[0])["_fsdp2_unit"].modules == (other[0], other[2])
    assert_independent(model, other)
    train_both(BY_NAME["even_mlp"], other, copy.deepcopy(plain), range(2))
    train_both(BY_NAME["even_mlp"], model, plain, range(2))


class Doubling(nn.Module):
    """Has a method that is registered as a forward, an ignored parameter and a user's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.own = nn.Parameter(torch.ones(6))
        self.num_calls = 0
        self.register_forward_hook(Doubling.count)

    def count(self, args: tuple[Tensor], output: Tensor) -> None:
        self.num_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.own

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


@distributed(2)
def test_registered_methods_ignored_parameters_and_hooks_of_the_user() -> None:
    torch.manual_seed(0)
    plain = Doubling().double()
    model = copy.deepcopy(plain)
    fully_shard(model, ignored_params={model.own})
    register_fsdp_forward_method(model, "doubled")
    model.listed = [model.linear.weight]
    other = copy.deepcopy(model)
    assert other.listed[0] is other.linear.weight
    assert not isinstance(other.own, DTensor)
    assert other.own is not model.own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (x,) = six_wide(0, dist.get_rank(), torch.float64)
    with torch.no_grad():
        assert torch.equal(other(x), plain(x))
        assert torch.equal(other.doubled(x), plain.doubled(x))
        assert torch.equal(model.doubled(x), torch.zeros_like(x))
    assert (other.num_calls, model.num_calls) == (1, 0)


POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    },
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("policy", list(POLICIES))
@distributed(2)
def test_policies(policy: str) -> None:
    """The copy computes the very same losses and gradients as the original."""
    model, _ = pair(MLP, dtype=torch.float32, **POLICIES[policy])
    other = copy.deepcopy(model)
    units = [vars(network[2])["_fsdp2_unit"] for network in (model, other)]
    assert units[0].config.offload == units[1].config.offload == (policy == "offload")
    for step in range(2):
        batch = MLP.batch(step, dist.get_rank(), torch.float32)
        losses = [MLP.loss(network, *batch) for network in (model, other)]
        assert losses[0].dtype == losses[1].dtype
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local())


@distributed(4)
def test_replicas_and_parameters_on_two_meshes() -> None:
    mesh = cached_mesh(2, 2, names=("copy_replicate", "copy_shard"))

    def place(parameter: nn.Parameter) -> Any:
        own = mesh["copy_shard"] if parameter.ndim == 1 else None
        return ShardPlacementResult(Shard(0), own)

    model, _ = pair(MLP, mesh=mesh, shard_placement_fn=place)
    other = copy.deepcopy(model)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.placements == b.placements
        assert a.device_mesh == b.device_mesh
    for step in range(2):
        batch = MLP.batch(step, dist.get_rank(), torch.float64)
        for network in (model, other):
            MLP.loss(network, *batch).backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local())


@distributed(4)
def test_tensor_parallel_parameters() -> None:
    mesh = cached_mesh(2, 2, names=("copy_dp", "copy_tp"))
    torch.manual_seed(0)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["copy_tp"], plan)
    fully_shard(model, mesh=mesh["copy_dp"])
    other = copy.deepcopy(model)
    (x,) = six_wide(0, mesh.get_local_rank("copy_dp"), torch.float64)
    for network in (model, other, plain):
        network(x).square().mean().backward()
    average_gradients(plain, group=mesh.get_group("copy_dp"))
    assert_same_gradients(other, plain)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@distributed(2)
def test_recurrent_layers_of_torch(kind: type[nn.RNNBase]) -> None:
    """They keep a second list of their weights."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[None])[0]

    case = Case("recurrent", Recurrent, lambda model: [model.layer], six_wide)
    model, plain = pair(case)
    train_both(case, model, plain, range(1))
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    train_both(case, other, plain_other, range(2))
    train_both(case, model, plain, range(1, 2))


@distributed(2)
def test_frozen_parameters_that_are_kept_gathered() -> None:
    """Are gathered by the copy for itself; loading whole tensors is noticed."""
    case = BY_NAME["lora"]
    model, plain = pair(case)
    model.set_keep_frozen_gathered()
    run_both(case, model, plain, 0)
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    for network in (model, plain):
        network.zero_grad()
        network.load_state_dict({name: p + 1 for name, p in plain.state_dict().items()})
    run_both(case, other, plain_other, 1)
    assert_same_gradients(other, plain_other)
    run_both(case, model, plain, 1)
    assert_same_gradients(model, plain)
    given = plain_other.state_dict() if dist.get_rank() == 0 else None
    load_full_state_dict(model, given)
    model.zero_grad()
    run_both(case, model, plain_other, 1)
    plain_other.zero_grad()
    model.zero_grad()
    run_both(case, model, plain_other, 2)
    assert_same_gradients(model, plain_other)


@distributed(2)
def test_compiled_models() -> None:
    """A copy of what ``torch.compile`` returns is compiled, and so is that of compiled blocks."""
    model, plain = pair(MLP)
    for block in model:
        block.compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    train_both(MLP, compiled, torch.compile(plain, backend="eager"), range(1))
    other = copy.deepcopy(compiled)
    assert type(other) is type(compiled)
    assert list(other.state_dict()) == list(compiled.state_dict())
    assert_independent(compiled, other)
    train_both(MLP, other, torch.compile(copy.deepcopy(plain), backend="eager"), range(1, 3))
    train_both(MLP, compiled, torch.compile(plain, backend="eager"), range(1, 2))


@distributed(2)
def test_a_list_of_modules_the_inner_one_first() -> None:
    model, plain = pair(MLP)
    inner, whole_model = copy.deepcopy([model[0], model])
    assert whole_model[0] is inner
    train_both(MLP, whole_model, plain, range(2))


@distributed(2)
def test_on_the_meta_device_and_after_a_cast() -> None:
    with torch.device("meta"):
        model = shard_case(MLP, MLP.build().double())
    other = copy.deepcopy(model)
    assert all(p.is_meta for p in other.parameters())
    _, plain = pair(MLP)
    for network in (other, model):
        network.load_state_dict(plain.state_dict(), assign=True)
        train_both(MLP, network, copy.deepcopy(plain), range(2))
    model.float()
    cast = copy.deepcopy(model)
    assert all(p.dtype == torch.float32 for p in cast.parameters())
    cast.double()
    model.double()
    assert_all_same(parameters(cast), parameters(model), "cast", bitwise=True)


@distributed(2)
def test_a_copy_made_in_inference_mode_can_be_trained() -> None:
    model, plain = pair(MLP)
    with torch.inference_mode():
        other = copy.deepcopy(model)
    train_both(MLP, other, copy.deepcopy(plain), range(2))


def test_what_a_copied_unit_keeps_and_what_is_made_anew() -> None:
    """A new attribute has to be put on one of these lists, or, if it is a choice of a user's, to be
    a field of `UnitConfig`."""
    kept = {"mesh", "device", "config", "name"}
    mapped = {"forward_prefetch", "backward_prefetch"}  # to units of the copy
    anew = {
        "modules", "param_group", "gradients", "registration", "reshard_after_forward",
        "runtime", "hooks", "encloses", "enclosing", "of_parts",
        # the state, and one iteration
        "state",
        "gather", "step", "max_forwards", "recomputes_all", "has_graph",
    }  # fmt: skip
    planned = {
        "params", "buckets", "transports", "gather_tags", "reduce_tags", "unsharded", "freezing",
        "dirty", "materialized", "num_plans", "incomplete", "generation", "reduce_plans",
        "_gather_batches",
        "_reserved_tags", "_sharded", "_versioned",
    }  # fmt: skip
    given = {"mesh", "device", "_config", "_registration"}
    mesh: Any = None
    unit = Unit((nn.Linear(1, 1),), mesh, torch.device("cpu"), UnitConfig())
    assert vars(unit).keys() == kept | mapped | anew
    assert vars(unit.param_group).keys() == planned | given
    gradients = {
        "local_gradient", "_param_group", "_config",
        "sums", "holds_earlier", "holds_partial_sums",
    }  # fmt: skip
    assert vars(unit.gradients).keys() == gradients


def test_every_setting_is_copied() -> None:
    """A new field of `UnitConfig` is copied by itself; what can be changed in place must not be."""
    names = {field.name for field in fields(UnitConfig)}
    chosen = UnitConfig()
    for name in names:
        assert not isinstance(getattr(chosen, name), list | dict | set)
        setattr(chosen, name, object())
    copied = replace(chosen)
    assert all(getattr(copied, name) is getattr(chosen, name) for name in names)
    assert vars(chosen).keys() == names


@distributed(2)
def test_what_cannot_be_copied_or_pickled() -> None:
    model, plain = pair(TRANSFORMER)
    train_both(TRANSFORMER, model, plain, range(1))
    with pytest.raises(NotImplementedError, match=r"unit 'blocks\.0' \(Block\) around it"):
        copy.deepcopy(model.blocks[0].mlp)
    with pytest.raises(pickle.PicklingError, match="sharded Transformer cannot be pickled"):
        torch.save(model, io.BytesIO())
    with pytest.raises(pickle.PicklingError, match=r"save model\.state_dict"):
        copy.copy(model)

    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict) -> Own:
            return Own(6, 6)

    with pytest.raises(NotImplementedError, match="Own has its own __deepcopy__"):
        copy.deepcopy(fully_shard(Own(6, 6)))
    train_both(TRANSFORMER, model, plain, range(1, 2))


# ------------------------------------------------------------------- averages over time


@pytest.mark.parametrize("use_buffers", [False, True])
@distributed(2)
def test_averaged_model_of_torch(use_buffers: bool) -> None:
    """Exponential averages; both are evaluated and trained in turns, and the state goes round."""
    case = BY_NAME["cnn"]
    model, plain = pair(case)
    # With buffers not the one that takes lists: it would get DTensors and tensors in one list.
    function = (
        {"avg_fn": get_ema_avg_fn(0.5)}
        if use_buffers
        else {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    )
    averages = [
        AveragedModel(network, use_buffers=use_buffers, **function) for network in (model, plain)
    ]
    for step in range(3):
        train_both(case, model, plain, range(step, step + 1))
        for average, network in zip(averages, (model, plain), strict=True):
            average.update_parameters(network)
        assert_same_parameters(averages[0], averages[1])
        assert_all_same(buffers(averages[0]), buffers(averages[1]), "buffer")
        batch = case.batch(10, dist.get_rank(), torch.float64)
        with torch.no_grad():
            outputs = [average.eval()(*batch) for average in averages]
        assert_same(outputs[0], outputs[1], "output of the average")
    states = averages[0].state_dict()
    assert list(states) == list(averages[1].state_dict())
    fresh = AveragedModel(pair(case)[0], use_buffers=use_buffers)
    fresh.load_state_dict(states)
    assert_same_parameters(fresh, averages[1])
    assert fresh.n_averaged == 3


@distributed(2)
def test_averages_by_hand() -> None:
    model, plain = pair(TRANSFORMER)
    train_both(TRANSFORMER, model, plain, range(1))
    pairs = [(network, copy.deepcopy(network)) for network in (model, plain)]
    for _, average in pairs:
        average.requires_grad_(False)
    for step in range(1, 3):
        train_both(TRANSFORMER, model, plain, range(step, step + 1))
        for network, average in pairs:
            with torch.no_grad():
                for ours, theirs in zip(average.parameters(), network.parameters(), strict=True):
                    ours.lerp_(theirs, 0.25)
        batch = TRANSFORMER.batch(step, dist.get_rank(), torch.float64)
        with torch.no_grad():
            losses = [TRANSFORMER.loss(average, *batch) for _, average in pairs]
        assert_same(losses[0], losses[1], "loss of the average")
    model.load_state_dict(pairs[0][1].state_dict())  # training goes on from the average
    plain.load_state_dict(pairs[1][1].state_dict())
    train_both(TRANSFORMER, model, plain, range(3, 5))
