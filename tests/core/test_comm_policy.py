"""Training with fewer bytes on the wire, beside the same training with all of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import (
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    explain,
    fully_shard,
    replicate,
    shard_model,
)
from fsdp2.features.secondary_shards import shards_of
from fsdp2.runtime.unit import units_in
from harness import DEVICE, cached_mesh, cpu_only, distributed, ours_only
from reference import average_gradients, own_part
from traffic import counting

pytestmark = ours_only("torch's FSDP2 sends everything in full")

INT8, FLOAT8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
# How far an element may be off, in parts of the largest one of its tensor: half a scale.
ERROR = {INT8: 1 / 254, FLOAT8: 1 / 16, BF16: 2**-8}
BLOCK = 64


class Wide(nn.Module):
    """Rows that 2 ranks share evenly and 3 do not, blocks that do not fill up, and packed rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, 100)
        self.norm = nn.LayerNorm(100)
        self.second = nn.Linear(100, 52, bias=False)
        self.head = nn.Linear(52, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(x)).tanh()).tanh())


def build() -> Wide:
    torch.manual_seed(0)
    return Wide()


def shard(model: Wide, **options: Any) -> Any:
    options = {"direct_min_bytes": 500, **options}
    for unit in (model.first, model.second):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def batch(step: int = 0, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 36, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int = 0, rank: int | None = None) -> Tensor:
    return (model(batch(step, rank)) - 1).square().mean()


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that compute, on this rank."""
    units = units_in(model)
    for unit in units:
        unit.modules[0].unshard()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    for unit in units:
        unit.modules[0].reshard()
    return values


def assert_same_on_all_ranks(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), name


def assert_close_gradients(
    model: nn.Module, plain: nn.Module, *, roundings: float = 1, dtype: torch.dtype = INT8
) -> None:
    """Within what rounding every rank's contribution may make of the mean.

    Args:
        plain: with this rank's own gradients.
    """
    largest = {}
    for name, parameter in plain.named_parameters():
        largest[name] = parameter.grad.abs().max()
        dist.all_reduce(largest[name], dist.ReduceOp.MAX)
    average_gradients(plain)
    for name, parameter in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert isinstance(grad, DTensor), name
        error = (grad.to_local() - own_part(parameter.grad, grad)).abs()
        bound = roundings * largest[name] * (ERROR[dtype] + 1e-6)
        assert not error.numel() or error.max() <= bound, (name, error.max(), bound)


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, INT8, FLOAT8])
@distributed(2, 3)
def test_all_ranks_compute_with_the_same_weights(dtype: torch.dtype) -> None:
    plain = build()
    model = shard(copy.deepcopy(plain), comm_policy=CommPolicy(gather=dtype, block=BLOCK))
    loss_of(model).backward()
    values = gathered(model)
    assert_same_on_all_ranks(values)
    in_blocks = 0
    for name, value in plain.named_parameters():
        error = (values[name] - value).abs().max()
        assert error <= value.abs().max() * (ERROR[dtype] + 1e-6), name
        in_blocks += not torch.equal(values[name], value.bfloat16().float())
    assert in_blocks >= 2 or dtype == BF16
    for name, parameter in model.named_parameters():  # the shards are exact
        mine = own_part(plain.get_parameter(name), parameter)
        assert torch.equal(parameter.to_local(), mine)


@pytest.mark.parametrize("again", [True, False])
@distributed(2)
def test_backward_computes_with_the_weights_of_forward(again: bool) -> None:
    """Also where it computes forward anew."""
    seen: list[Tensor] = []

    class Seen(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.run(x)) if not again else self.head(self.checkpointed(x))

        def checkpointed(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=False)

        def run(self, x: Tensor) -> Tensor:
            seen.append(self.first(x).detach().clone())
            return self.second(self.norm(self.first(x)).tanh()).tanh()

    torch.manual_seed(0)
    model = shard(Seen(), comm_policy=CommPolicy(gather=INT8, block=BLOCK))
    loss_of(model).backward()
    assert len(seen) == 1 + again
    assert torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize("kept", [None, BF16, INT8])
@distributed(4)
def test_secondary_shards(kept: torch.dtype | None) -> None:
    """Gathered in a node in the dtype that they are kept in; backward is close to exact."""
    exact = shard(build(), reshard_after_forward=2)
    for gather in (None, BF16):
        policy = CommPolicy(gather=gather, secondary=kept, block=BLOCK)
        model = shard(build(), reshard_after_forward=2, comm_policy=policy)
        for each in (exact, model):
            each.zero_grad()
            loss_of(each).backward()  # the runtime learns the order
            each.zero_grad()
        with counting() as traffic:
            loss = loss_of(model)
            found = [shards_of(b) for u in units_in(model) for b in u.buckets]
            held = [shards for shards in found if shards is not None and shards.saved]
            assert held
            if kept is not None:
                elements = sum(s.layout.shard_numel for s in held)
                nbytes = sum(s.nbytes for s in held)
                assert nbytes < elements * kept.itemsize * 1.5 + 300
            names = [name for name, _ in model.named_parameters()]
            assert names == [name for name, _ in exact.named_parameters()]
            loss.backward()
        told = explain(model).totals
        if DEVICE == "cpu" or (gather and kept):  # in full, bytes are counted at the exchange
            assert told.sent_by_gathers == traffic.gathered
        loss_of(exact).backward()
        if kept is None and gather is None:
            for name, value in whole_gradients(model).items():
                assert torch.equal(value, whole_gradients(exact)[name])
        else:
            assert_close_to(model, exact, 0.03)
        if kept == gather == BF16:  # what is rounded already is not rounded again
            full = shard(
                build(), reshard_after_forward=2, comm_policy=CommPolicy(gather=BF16, block=BLOCK)
            )
            loss_of(full).backward()
            for name, value in whole_gradients(full).items():
                assert torch.equal(value, whole_gradients(model)[name])
        assert_same_on_all_ranks(whole_gradients(model))


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, INT8])
@distributed(2, 3)
def test_gradients_are_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    plain = build()
    model = shard(copy.deepcopy(plain), comm_policy=CommPolicy(reduce=dtype, block=BLOCK))
    for step in range(2):
        expected, loss = loss_of(plain, step), loss_of(model, step)
        assert torch.equal(loss, expected), "weights are gathered in full"
        expected.backward()
        loss.backward()
        # What is packed travels in bfloat16.
        assert_close_gradients(model, plain, dtype=dtype)
        model.zero_grad()
        plain.zero_grad()


@distributed(4, long=(2,))
def test_replicas() -> None:
    """In two phases: all replicas have the same bits."""
    num = dist.get_world_size()
    for mesh in (cached_mesh(2, num // 2, names=("replicate", "shard")), cached_mesh(num)):
        plain = build()
        model = copy.deepcopy(plain)
        policy = CommPolicy(gather=None, reduce=INT8, block=BLOCK)
        if mesh.ndim == 1:
            for unit in (model.first, model.second, model):
                replicate(unit, mesh=mesh, comm_policy=policy)
        else:
            model = shard(model, mesh=mesh, comm_policy=policy)
        loss_of(plain).backward()
        with counting() as traffic:
            loss_of(model).backward()
        if num > 2 or mesh.ndim == 1:
            assert traffic.all_reduced > 0
        told = explain(model).totals
        assert told.sent_by_reduction == traffic.reduced
        assert told.sent_by_all_reduction == traffic.all_reduced
        assert_close_gradients(model, plain, roundings=3)
        assert_same_on_all_ranks(whole_gradients(model))


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.one = nn.Parameter(torch.randn(()))
        self.few = nn.Parameter(torch.randn(3))
        self.odd = nn.Parameter(torch.randn(257, 5))

    def forward(self, x: Tensor) -> Tensor:
        parts = [(p * (x + i)).square().sum() for i, p in enumerate(self.parameters())]
        return torch.stack(parts).sum()


@distributed(2, long=(3,))
def test_replicated_parameters_of_any_size() -> None:
    """Without elements, of one, and of fewer than there are ranks or elements in a block."""
    results = []
    for policy in (CommPolicy(reduce=INT8, error_feedback=True), None):
        model = replicate(Sizes(), comm_policy=policy)
        for _ in range(2):
            model(torch.tensor(float(dist.get_rank()))).backward()
        results.append(model)
    right = whole_gradients(results[1])
    for name, value in whole_gradients(results[0]).items():
        assert value.shape == right[name].shape
        if value.numel():
            assert (value - right[name]).abs().max() <= 0.02 * right[name].abs().max(), name


@distributed(4)
def test_two_hops() -> None:
    """Between nodes, a quarter or so of the bytes."""
    plain = build()
    policy = CommPolicy(reduce=INT8, ranks_per_node=2, block=BLOCK)
    model = shard(copy.deepcopy(plain), comm_policy=policy)
    loss_of(plain).backward()
    with counting() as traffic:
        loss_of(model).backward()
    assert explain(model).totals.sent_by_reduction == traffic.reduced
    assert_close_gradients(model, plain, roundings=2)
    one_hop = copy.deepcopy(model)
    one_hop.set_comm_policy(CommPolicy(reduce=INT8, block=BLOCK))
    # Of 4 ranks in nodes of 2: 2 rows within, 1 across; else 1 row within and 2 across.
    assert explain(one_hop).totals.sent_by_reduction == traffic.reduced


@distributed(4)
def test_nodes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="ranks_per_node=3 of CommPolicy does not divide the 4"):
        shard(build(), comm_policy=CommPolicy(reduce=INT8, ranks_per_node=3))
    shard(build(), comm_policy=CommPolicy(reduce=INT8, ranks_per_node=8))  # one node


@pytest.mark.parametrize("node", [None, 2])
@distributed(4, long=(2,))
def test_error_feedback(node: int | None) -> None:
    """The mean over steps of the same gradient comes closer to it than any step."""
    steps = 8
    exact = shard(build())
    loss_of(exact).backward()
    right = whole_gradients(exact)
    worst = {}
    for feedback in (False, True):
        policy = CommPolicy(reduce=INT8, error_feedback=feedback, ranks_per_node=node, block=BLOCK)
        model = shard(build(), comm_policy=policy)
        total = {name: torch.zeros_like(value) for name, value in right.items()}
        for _ in range(steps):
            model.zero_grad()
            loss_of(model).backward()
            for name, value in whole_gradients(model).items():
                total[name] += value / steps
        name = "second.weight"
        worst[feedback] = (total[name] - right[name]).abs().max()
    assert worst[True] <= worst[False] / (steps / 2)
    told = explain(model)
    (unit,) = (unit for unit in told.units if unit.name == "second")
    world_size = dist.get_world_size()
    rows = world_size + (world_size // node if node and world_size > node else 0)
    assert unit.residual_bytes == rows * model.second.weight.numel() // world_size * 4
    held = {
        id(residual): residual.nbytes
        for u in units_in(model)
        for transports in u.param_group.transports
        for residual in transports.scatter._residuals.values()
    }
    assert sum(held.values()) == told.totals.residual_bytes
    # Copies and replans begin without.
    again = copy.deepcopy(model)
    loss_of(again).backward()
    model.set_comm_policy(policy)
    model.zero_grad()
    loss_of(model).backward()
    first = whole_gradients(again)
    for name, value in whole_gradients(model).items():
        assert torch.equal(value, first[name])
    # Which other parameters have gradients makes no difference to those of one.
    model.first.bias.requires_grad_(False)
    for each in (model, again):
        each.zero_grad()
        loss_of(each).backward()
    second = whole_gradients(again)
    for name, value in whole_gradients(model).items():
        assert torch.equal(value, second[name])
    assert not torch.equal(first["first.weight"], second["first.weight"])
    # Storages that are planned anew begin without, too.
    again._apply(torch.clone)
    again.zero_grad()
    loss_of(again).backward()
    for name, value in whole_gradients(again).items():
        assert torch.equal(value, first[name])


class Scaled(nn.Module):
    """A 0-dim parameter that is packed with others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(torch.ones(8, 36))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.weight.t()


@pytest.mark.parametrize("way", ["one hop", "two hops", "replicas", "by itself"])
@pytest.mark.parametrize("feedback", [False, True])
@distributed(4)
def test_what_all_ranks_hold_is_the_same_on_all(feedback: bool, way: str) -> None:
    """Each rank's own part of the sum was exact, and that of the others rounded."""
    node = 2 if way == "two hops" else None
    policy = CommPolicy(reduce=BF16, error_feedback=feedback, ranks_per_node=node, block=BLOCK)
    options: dict[str, Any] = {"direct_min_bytes": 0} if way == "by itself" else {}
    if way == "replicas":
        options["mesh"] = cached_mesh(2, 2, names=("replicate", "shard"))
    model: Any = fully_shard(Scaled(), comm_policy=policy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(found, model.scale.to_local().detach())
    assert len({value.item() for value in found}) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feedback", [False, True])
@distributed(2)
def test_what_is_not_finite_is_seen(bad: float, feedback: bool) -> None:
    """On whichever rank it was, and in that step only."""
    for dtype in (BF16, INT8):
        policy = CommPolicy(reduce=dtype, error_feedback=feedback, block=BLOCK)
        model = shard(build(), comm_policy=policy)
        for step in range(3):
            model.zero_grad()
            loss = loss_of(model, step)
            (loss * (bad if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
            finite = all(g.isfinite().all() for g in whole_gradients(model).values())
            assert finite == (step != 1)


# -- bytes -----------------------------------------------------------------------------------------

POLICIES = {
    "nothing": CommPolicy(),
    "bf16": CommPolicy(gather=BF16, reduce=BF16),
    "int8": CommPolicy(gather=INT8, reduce=INT8),
    "float8": CommPolicy(gather=FLOAT8, reduce=INT8, block=100),
    "gather": CommPolicy(gather=INT8),
    "reduce": CommPolicy(reduce=INT8, error_feedback=True),
}


@cpu_only("bytes in full are counted at the exchange")
@pytest.mark.parametrize("mixed", [False, True])
@distributed(2, 3)
def test_bytes_on_the_wire_are_those_that_explain_tells(mixed: bool) -> None:
    precision = MixedPrecisionPolicy(*((BF16, torch.float32) if mixed else ()))
    in_full = None
    for name, policy in POLICIES.items():
        model = shard_model(
            build(), wrap=nn.Linear, mp_policy=precision, direct_min_bytes=500, comm_policy=policy
        )
        before = explain(model).totals
        for step in range(2):
            with counting() as traffic:
                loss_of(model, step).backward()
            model.zero_grad()
        told = explain(model).totals
        # Where ranks are is known from the first forward on.
        between = told.sent_between_hosts
        assert between in (0, told.sent_bytes), name
        assert told == replace(before, sent_between_hosts=between), name
        assert told.sent_by_gathers == traffic.gathered, name
        assert told.sent_by_reduction == traffic.reduced, name
        without = explain(
            build(),
            dist.get_world_size(),
            wrap=nn.Linear,
            mp_policy=precision,
            direct_min_bytes=500,
            comm_policy=policy,
            device_type="cpu",
            ranks_per_node=dist.get_world_size(),
        ).totals
        assert replace(without, sent_between_hosts=between) == told, name
        in_full = in_full or told
        if policy.gather and (policy.gather.itemsize == 1 or not mixed):
            assert told.sent_by_gathers < 0.62 * in_full.sent_by_gathers, name
        if policy.reduce == INT8 and not mixed:
            assert told.sent_by_reduction < 0.35 * in_full.sent_by_reduction, name


def up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@distributed(2)
def test_rows_are_as_long_as_the_arithmetic_says() -> None:
    """By hand: a weight of 100 x 36 in blocks of 64, and a bias of 100, on 2 ranks."""
    model = fully_shard(
        nn.Linear(36, 100),
        direct_min_bytes=500,
        comm_policy=CommPolicy(gather=INT8, reduce=BF16, block=64),
    )
    with counting() as traffic:
        model(torch.ones(1, 36)).sum().backward()
    # 50 x 36 bytes, and 29 scales; a bias of 50, whose shard is rounded up, in bfloat16.
    assert traffic.gathered == up(50 * 36) + up(4 * 29) + up(2 * 52)
    assert traffic.reduced == up(2 * 50 * 36) + up(2 * 52)
    assert traffic.narrow == traffic.total


@cpu_only("bytes in full are counted at the exchange")
@distributed(2)
def test_off_by_default() -> None:
    model = shard(build())
    with counting() as traffic:
        loss_of(model).backward()
    assert traffic.total > 0
    assert traffic.narrow == 0
    model.set_comm_policy(CommPolicy(gather=INT8, reduce=INT8))
    with counting() as traffic:
        loss_of(model).backward()
    assert traffic.narrow == traffic.total > 0
    model.set_comm_policy(None)
    with counting() as traffic:
        loss_of(model).backward()
    assert traffic.narrow == 0
    model.first.set_comm_policy(CommPolicy(reduce=INT8))
    model.set_comm_policy(CommPolicy(), recurse=False)
    with counting() as traffic:
        loss_of(model).backward()
    assert 0 < traffic.narrow < traffic.reduced


# -- together with other settings ------------------------------------------------------------------

INT8_BOTH = CommPolicy(gather=INT8, reduce=INT8, block=BLOCK)
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)},
    "bf16 reduced too": {"mp_policy": MixedPrecisionPolicy(BF16, BF16)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept": {"reshard_after_forward": False},
    "packed": {"direct_min_bytes": 10**9},
    "direct": {"direct_min_bytes": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
@distributed(2, long=(3,))
def test_settings(name: str) -> None:
    options = SETTINGS[name]
    model = shard(build(), comm_policy=INT8_BOTH, **options)
    exact = shard(build(), **options)
    for each in (model, exact):
        for step in range(3):
            if step == 1:  # a micro-batch without sync
                each.set_requires_gradient_sync(False)
            loss_of(each, step).backward()
            each.set_requires_gradient_sync(True)
        each.set_gradient_divide_factor(3.0)
        loss_of(each, 3).backward()
    assert_close_to(model, exact, 0.04)


def assert_close_to(model: nn.Module, exact: nn.Module, distance: float) -> None:
    right = whole_gradients(exact)
    assert whole_gradients(model).keys() == right.keys()
    for name, value in whole_gradients(model).items():
        error = (value - right[name]).norm() / right[name].norm()
        assert error < distance, (name, error)


@distributed(2)
def test_frozen_unused_and_other_dtypes() -> None:
    def make(**options: Any) -> Any:
        model = build()
        model.first.weight.requires_grad_(False)
        model.second.double()
        model.head.register_parameter("unused", nn.Parameter(torch.ones(64, 8)))
        model.second.register_parameter(
            "number", nn.Parameter(torch.arange(512).view(64, 8), requires_grad=False)
        )
        return shard(model, **options)

    def loss_with(model: Any) -> Tensor:
        hidden = model.norm(model.first(batch())).tanh()
        return model.head(model.second(hidden.double()).tanh().float()).square().mean()

    model, exact = make(comm_policy=INT8_BOTH), make()
    for each in (model, exact):
        each.forward = lambda _, each=each: loss_with(each)
        for _ in range(2):
            each(batch()).backward()
    assert model.first.weight.grad is None
    assert_close_to(model, exact, 0.05)
    assert torch.equal(gathered(model)["second.number"], gathered(exact)["second.number"])


@distributed(4)
def test_tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    results = []
    for policy in (INT8_BOTH, None):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=mesh["data"], comm_policy=policy, direct_min_bytes=0)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(mesh.get_local_rank("data")))
        model(x).square().mean().backward()
        results.append(whole_gradients(model))
    for name, value in results[0].items():
        assert (value - results[1][name]).norm() / results[1][name].norm() < 0.05, name


@distributed(2)
def test_shards_of_other_dims() -> None:
    from torch.distributed.tensor import Shard

    results = []
    for policy in (INT8_BOTH, None):
        model = shard(
            build(),
            comm_policy=policy,
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None,
        )
        loss_of(model).backward()
        results.append(model)
    assert_close_to(*results, 0.05)


# -- what it refuses -------------------------------------------------------------------------------


@distributed(2)
def test_refusals_name_what_is_in_the_way() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    subclass = build()
    weight = subclass.first.weight.detach()
    subclass.first.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    with pytest.raises(ValueError, match="'weight' is a TwoTensor, a tensor subclass"):
        shard(subclass, comm_policy=INT8_BOTH)
    number = build()
    number.second.weight = nn.Parameter(torch.zeros(52, 100, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        fully_shard(number.second, comm_policy=INT8_BOTH)
    fully_shard(number.second)
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        number.second.set_comm_policy(INT8_BOTH)
    model = shard(build(), comm_policy=INT8_BOTH)
    with pytest.raises(ValueError, match="has a CommPolicy and a custom all-gather"):
        model.set_custom_all_gather(object())
    with pytest.raises(TypeError, match="comm_policy must be a CommPolicy or None"):
        model.set_comm_policy("int8")
    with pytest.raises(TypeError, match="comm_policy must be a CommPolicy or None"):
        shard(build(), comm_policy="int8")
    loss_of(model).backward()


def test_arguments() -> None:
    with pytest.raises(ValueError, match="gather of CommPolicy must be None or one of"):
        CommPolicy(gather=torch.float16)
    with pytest.raises(ValueError, match="reduce of CommPolicy must be None or one of"):
        CommPolicy(reduce=FLOAT8)
    with pytest.raises(TypeError, match=r"gather must be a torch\.dtype"):
        CommPolicy(gather="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error_feedback is about how gradients are sent"):
        CommPolicy(error_feedback=True)
    with pytest.raises(ValueError, match="block must be at least 16"):
        CommPolicy(block=1)
    with pytest.raises(TypeError, match="block of CommPolicy must be an int"):
        CommPolicy(block=16.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks_per_node must be at least 2"):
        CommPolicy(reduce=INT8, ranks_per_node=1)
    with pytest.raises(AttributeError):
        CommPolicy().gather = INT8  # type: ignore[misc]


# -- training --------------------------------------------------------------------------------------


def train(policy: CommPolicy | None, steps: int) -> list[float]:
    """Losses of a regression on random features that a teacher labels."""
    torch.manual_seed(1)
    teacher = Wide()
    model = shard(build(), comm_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x = batch(step)
        loss = (model(x) - 3 * teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    together = torch.stack(losses)
    dist.all_reduce(together)
    return (together / dist.get_world_size()).tolist()


TRAINED = {
    "bf16": POLICIES["bf16"],
    "int8": INT8_BOTH,
    "float8": CommPolicy(gather=FLOAT8, reduce=INT8, block=BLOCK),
    "feedback": CommPolicy(reduce=INT8, error_feedback=True, block=BLOCK),
}


@cpu_only("it is about numbers, not about streams")
@distributed(2)
def test_twenty_steps_of_training() -> None:
    assert_same_training(20, 0.01)


@cpu_only("it is about numbers, not about streams")
@pytest.mark.long
@distributed(2, 3)
def test_three_hundred_steps_of_training() -> None:
    assert_same_training(300, 0.03)


def assert_same_training(steps: int, distance: float) -> None:
    """The mean loss of the last tenth is within ``distance`` of that of exact training."""
    exact = train(None, steps)
    last = steps // 10
    right = sum(exact[-last:]) / last
    assert right < 0.9 * exact[0]
    for name, policy in TRAINED.items():
        losses = train(policy, steps)
        mean = sum(losses[-last:]) / last
        assert abs(mean - right) <= distance * right, (name, mean, right)
