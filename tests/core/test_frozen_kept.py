"""Frozen parameters cost no gradients, may be stored in the dtype of computation, and may stay
gathered within a number of bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.runtime.reduction import Reduction
from fsdp2.runtime.unit import units_in
from gathers import bytes_held, counting
from harness import cached_mesh, distributed, ours_only
from models import Case, LoraLinear, children, normal_batch
from reference import (
    Training,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    check_training,
    feed_gradients,
    pair,
    run_both,
)

pytestmark = ours_only("torch gathers frozen parameters every time")
FROZEN_BYTES = 8 * (9 * 5 + 9 + 9 * 9 + 9 + 9 * 9 + 9)  # of the blocks, in fp64


def build_adapters() -> nn.Module:
    """Two mixed units, a frozen one between them, and a trained one."""
    frozen = nn.Linear(9, 9).requires_grad_(False)
    tanh = nn.Tanh
    return nn.Sequential(
        LoraLinear(5, 9), tanh(), frozen, tanh(), LoraLinear(9, 9), nn.Linear(9, 3)
    )


ADAPTERS = Case("adapters", build_adapters, children, normal_batch(4, 5))
FROZEN = ["0.base.weight", "0.base.bias", "2.weight", "2.bias", "4.base.weight", "4.base.bias"]


def train(model: Any, plain: nn.Module, steps: range, case: Case = ADAPTERS) -> None:
    """Steps that compare losses and gradients."""
    for step in steps:
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        feed_gradients(model, plain)
        for each in (model, plain):
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
            each.zero_grad()


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_min_bytes", [0, 10**9])
@pytest.mark.parametrize("freezes_late", [False, True])
@distributed(2)
def test_nothing_of_frozen_parameters_is_stored_or_reduced(
    direct_min_bytes: int, freezes_late: bool
) -> None:
    """Also if they are frozen after sharding, before the first forward."""
    reduced: list[int] = []
    launch = Reduction.launch

    def counted(self: Reduction, streams: Any) -> None:
        reduced.append(sum(self.bucket.layout.slots[i].full_numel for i in self.plan.covered))
        launch(self, streams)

    case = ADAPTERS
    if freezes_late:
        case = Case("late", lambda: build_adapters().requires_grad_(True), children, case.batch)
    model, plain = pair(case, direct_min_bytes=direct_min_bytes)
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(name not in FROZEN)
    with mock.patch.object(Reduction, "launch", counted):
        train(model, plain, range(2))
    stores = [bucket.grads for unit in model._units(True) for bucket in unit.buckets]  # type: ignore[operator]
    stored = sum(store.flat.numel() for store in stores if store is not None)
    trained = [p for p in plain.parameters() if p.requires_grad]
    # Of what is sent and stored, a part is padding: a row per parameter and rank at most, and as
    # many bytes as make slices begin at multiples of 16.
    padding = sum(p.numel() // len(p) + 2 for p in trained)
    assert sum(reduced) <= 2 * sum(p.numel() for p in trained) + 4 * padding
    assert stored <= sum(p.numel() for p in trained) / 2 + 2 * padding
    assert stored < sum(p.numel() for p in plain.parameters()) / 2


# -- storage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
@distributed(2)
def test_frozen_parameters_stored_in_the_dtype_of_computation(offload: bool) -> None:
    models, losses = [], []
    for cast in (False, True):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_frozen_params=cast)
        place = CPUOffloadPolicy() if offload else OffloadPolicy()
        model, _ = pair(ADAPTERS, dtype=torch.float32, mp_policy=policy, offload_policy=place)
        models.append(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for step in range(3):
            batch = ADAPTERS.batch(step, dist.get_rank(), torch.float32)
            losses.append(ADAPTERS.loss(model, *batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    for name, parameter in models[1].named_parameters():
        wanted = torch.bfloat16 if name in FROZEN else torch.float32
        assert parameter.dtype == models[1].state_dict()[name].dtype == wanted, name
        assert parameter.to_local().dtype == wanted, name  # type: ignore[attr-defined]
    state = models[0].state_dict()  # in fp32: loading casts
    models[1].load_state_dict(state)
    for name, parameter in models[1].named_parameters():
        whole, other = parameter.full_tensor(), state[name].full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(whole, other.to(whole.dtype)), name


# -- keeping -------------------------------------------------------------------------------------


def kept(max_bytes: int | None, case: Case = ADAPTERS, **options: Any) -> tuple[Any, nn.Module]:
    model, plain = pair(case, **options)
    model.set_keep_frozen_gathered(max_bytes)  # type: ignore[operator]
    return model, plain


@pytest.mark.parametrize("mode", [True, False, None])
@distributed(2)
def test_what_is_frozen_is_gathered_once(mode: bool | None) -> None:
    model, plain = kept(None, reshard_after_forward=mode)
    with counting(model) as gathers:
        train(model, plain, range(1))
        assert {name: gathers.forward[name] for name in FROZEN} == dict.fromkeys(FROZEN, 1)
        gathers.clear()
        for step in range(1, 4):
            model.set_requires_gradient_sync(step == 3)
            run_both(ADAPTERS, model, plain, step, average=step == 3)
    assert_same_gradients(model, plain)
    assert not set(FROZEN) & (set(gathers.forward) | set(gathers.backward))
    assert gathers.forward["0.up"] == 3
    # Shards that are no multiple of 16 bytes are there once more, in the pack.
    assert FROZEN_BYTES <= bytes_held(model) < 2.7 * FROZEN_BYTES
    assert all(isinstance(p, DTensor) for p in model.parameters())


@distributed(2)
def test_what_fits_is_chosen_in_the_order_of_the_modules() -> None:
    """The first and the third fit; the second would be too much beside the first."""
    model, plain = kept(None)
    train(model, plain, range(1))
    sizes = [sum(b.gathered_bytes for b in unit.buckets if b.cached) for unit in model._units(True)]
    _, first, second, third, _ = sizes
    assert second == third > first
    for budget, wanted in [(0, ()), (first, (0,)), (first + second, (0, 2)), (second, (0,))]:
        model.set_keep_frozen_gathered(budget)
        train(model, plain, range(1, 2))
        with counting(model) as gathers:
            train(model, plain, range(2, 3))
        assert bytes_held(model) <= budget
        again = {name.split(".")[0] for name in FROZEN if gathers.forward[name]}
        assert again == {"0", "2", "4"} - {str(i) for i in wanted}


@pytest.mark.parametrize("by", ["copy", "load", "assign", "data and reshard", "cast", "rows"])
@distributed(2)
def test_changes_are_seen(by: str) -> None:
    model, plain = kept(None)
    train(model, plain, range(2))
    for each in (model, plain):
        weight = each[2].weight
        state = {name: value.detach().clone() for name, value in each.state_dict().items()}
        state["2.weight"].mul_(-1)
        with torch.no_grad():
            if by == "copy":
                weight.copy_(state["2.weight"])
            elif by == "rows":  # of all ranks
                getattr(weight, "_local_tensor", weight).mul_(-1)
            elif by == "data and reshard":
                getattr(weight, "_local_tensor", weight).data.mul_(-1)
                if each is model:
                    model[2].reshard()
            elif by == "cast":
                weight.mul_(-1)
                each.float().double()
            else:
                each.load_state_dict(state, assign=by == "assign")
                each[3].requires_grad_(False)
    if by == "assign":
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name not in FROZEN)
    with counting(model) as gathers:
        train(model, plain, range(2, 5))
    assert gathers.forward["2.weight"] == 1
    assert gathers.backward["2.weight"] == 0


@distributed(2)
def test_shards_written_between_forward_and_backward() -> None:
    """Backward reads what is there then, as without keeping."""
    model, plain = kept(None, reshard_after_forward=True)
    train(model, plain, range(2))
    grads = []
    for _ in range(2):
        (x,) = ADAPTERS.batch(0, dist.get_rank(), torch.float64)
        loss = ADAPTERS.loss(model, x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        loss.backward()
        grads.append(model[0].up.grad.full_tensor())
        model.zero_grad()
        with torch.no_grad():
            model[2].weight.div_(2)
        model.set_keep_frozen_gathered(0)
    assert torch.equal(*grads)


@distributed(2)
def test_parameters_are_thawed_and_frozen_again() -> None:
    model, plain = kept(None)
    train(model, plain, range(2))
    for trained in (True, False):
        for each in (model, plain):
            each[2].requires_grad_(trained)
        with counting(model) as gathers:
            train(model, plain, range(2, 5))
        assert gathers.forward["2.weight"] == (3 if trained else 1)
        assert gathers.forward["0.base.weight"] == 0
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("kind", ["hsdp", "two ranks after forward"])
@distributed(4)
def test_meshes(kind: str) -> None:
    options: dict[str, Any] = {"reshard_after_forward": 2}
    if kind == "hsdp":
        options = {"mesh": cached_mesh(2, 2, names=("replicate", "shard"))}
    model, plain = kept(None, **options)
    train(model, plain, range(2))
    with counting(model) as gathers:
        train(model, plain, range(2, 4))
    assert not set(FROZEN) & (set(gathers.forward) | set(gathers.backward))
    assert gathers.forward["0.up"] == 2


@distributed(4)
def test_parameters_between_forward_and_backward() -> None:
    """Where larger shards are kept of the others, of what is kept whole the sharded ones show."""
    model, plain = kept(None, reshard_after_forward=2)
    train(model, plain, range(1))
    for budget in (None, 0, None):
        model.set_keep_frozen_gathered(budget)
        for _ in range(2):
            loss = ADAPTERS.loss(model, *ADAPTERS.batch(0, dist.get_rank(), torch.float64))
            placements = set()
            for name, parameter in model[:5].named_parameters():
                assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), name
                if name in FROZEN:
                    placements.add(parameter.placements)
            num_dims = 2 if budget == 0 else 1
            assert {len(each) for each in placements} == {num_dims}
            loss.backward()
            model.zero_grad()


@pytest.mark.parametrize("mode", [True, False, 2])
@distributed(4)
def test_another_choice_between_forward_and_backward(mode: bool | int) -> None:
    model, plain = kept(None, reshard_after_forward=mode)
    train(model, plain, range(2))
    for budget in (0, None, 0):
        batch = ADAPTERS.batch(3, dist.get_rank(), torch.float64)
        ADAPTERS.loss(plain, *batch).backward()
        loss = ADAPTERS.loss(model, *batch)
        model.set_keep_frozen_gathered(budget)
        loss.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert bytes_held(model) == 0


@distributed(2)
def test_offloaded_and_low_precision() -> None:
    results = []
    for budget in (0, None):
        model, _ = kept(
            budget,
            dtype=torch.float32,
            offload_policy=CPUOffloadPolicy(),
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        )
        with counting(model) as gathers:
            for step in range(3):
                batch = ADAPTERS.batch(step, dist.get_rank(), torch.float32)
                ADAPTERS.loss(model, *batch).backward()
        results.append([p.grad.full_tensor() for p in model.parameters() if p.grad is not None])
    assert gathers.forward["2.weight"] == 1
    assert all(map(torch.equal, *results))


@distributed(2)
def test_an_exception_in_forward() -> None:
    """The next steps are right, and keep again."""

    def fail(module: nn.Module, inputs: Any) -> None:
        raise KeyError

    model, plain = kept(None)
    train(model, plain, range(1))
    handle = model[4].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        ADAPTERS.loss(model, *ADAPTERS.batch(1, dist.get_rank(), torch.float64))
    handle.remove()
    train(model, plain, range(1, 2))
    with counting(model) as gathers:
        train(model, plain, range(2, 3))
    assert not set(FROZEN) & set(gathers.forward)


@distributed(2)
def test_a_frozen_embedding_of_the_root_and_a_whole_frozen_model() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6).requires_grad_(False)
            self.block = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False).requires_grad_(False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.block(self.embedding(tokens)).tanh())

    def tokens(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(step + 10 * rank)
        return (torch.randint(0, 11, (4,), generator=generator),)

    case = Case("encoder", Encoder, lambda m: [m.get_submodule("block")], tokens)
    with mock.patch("fsdp2.sharding.gathered.OWN_PIECE_MIN_BYTES", 16):
        model, plain = kept(None, case, direct_min_bytes=0)
        train(model, plain, range(2), case)
        with counting(model) as gathers:
            train(model, plain, range(2, 4), case)
        assert set(gathers.forward) == {"block.weight", "block.bias"}
        model.requires_grad_(False)
        with torch.no_grad(), counting(model) as gathers:
            for step in range(3):
                model(*tokens(step, 0, torch.float64))
    assert gathers.forward["block.weight"] <= 1
    assert gathers.forward["head.weight"] == 0


@distributed(2)
def test_training_at_every_setting() -> None:
    for mode in (True, 2):
        check_training(ADAPTERS, Training(steps=2), reshard_after_forward=mode)


def test_a_negative_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="max_bytes must not be negative, got -1"):
        FSDPModule.set_keep_frozen_gathered(nn.Linear(2, 2), -1)  # type: ignore[arg-type]


@distributed(2)
def test_what_a_gather_that_raised_has_not_gathered_is_not_kept() -> None:
    """A user who catches the error and goes on gets what a gather brings, and not new memory."""
    model, plain = pair(ADAPTERS)
    model.set_keep_frozen_gathered(10**6)
    train(model, plain, range(1))
    frozen: Any = model.get_submodule("2")
    frozen.reshard()
    (transports,) = units_in(frozen)[0].param_group.transports
    failing = mock.patch.object(transports.gather, "all_gather", side_effect=RuntimeError("down"))
    with failing, pytest.raises(RuntimeError, match="down"):
        frozen.unshard()
    train(model, plain, range(1, 3))
