"""After an exception in forward or backward the next step works, with nothing reset by hand."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.runtime.unit import unit_of
from fsdp2.sharding.bucket import Bucket
from fsdp2.sharding.gathered import GatheredStorage
from harness import cached_mesh, cpu_only, distributed, ours_only
from models import Case, normal_batch
from reference import (
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    pair,
    run_both,
    whole,
)


class PlannedError(Exception):
    """What the tests raise."""


class RaiseInBackward(torch.autograd.Function):
    """The identity; its backward raises when told to."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, broken: bool) -> Tensor:
        vars(ctx)["broken"] = broken
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        if vars(ctx)["broken"]:
            raise PlannedError("in backward")
        return grads[0], None


class Fragile(nn.Module):
    """A linear layer that raises in its forward, or in the backward of its output or input.

    The input of the first layer needs no gradient: nothing raises there late in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "before forward":
            raise PlannedError("in forward")
        x = RaiseInBackward.apply(x, self.fault == "late in backward")
        x = self.linear(x).tanh()
        if self.fault == "after forward":
            raise PlannedError("in forward")
        return RaiseInBackward.apply(x, self.fault == "early in backward")


def build_fragile() -> nn.Module:
    return nn.Sequential(*[Fragile() for _ in range(4)], nn.Linear(6, 2))


FRAGILE = Case(
    "fragile",
    build_fragile,
    lambda m: [child for child in m.children() if isinstance(child, Fragile)],
    normal_batch(3, 6),
)
FORWARD_FAULTS = ["before forward", "after forward"]
BACKWARD_FAULTS = ["early in backward", "late in backward"]
IN_BACKWARD = [
    pytest.param(fault, marks=ours_only("the next step after an exception in backward"))
    for fault in BACKWARD_FAULTS
]
every_fault = pytest.mark.parametrize("fault", FORWARD_FAULTS + IN_BACKWARD)


def set_fault(model: nn.Module, index: int, fault: str) -> None:
    layer = model.get_submodule(str(index))
    assert isinstance(layer, Fragile)
    layer.fault = fault


def fail_once(model: nn.Module, index: int, fault: str) -> None:
    """One step in which the layer of this index raises."""
    set_fault(model, index, fault)
    with pytest.raises(PlannedError):
        FRAGILE.loss(model, *FRAGILE.batch(8, dist.get_rank(), torch.float64)).backward()
    set_fault(model, index, "")


@pytest.mark.parametrize("mode", [True, False])
@every_fault
@distributed(3, long=(1, 2))
def test_the_next_step_is_right(fault: str, mode: bool) -> None:
    model, plain = pair(FRAGILE, reshard_after_forward=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step, index in enumerate([1 if fault == "late in backward" else 0, 2, 3]):
        run_both(FRAGILE, model, plain, 2 * step)
        assert_same_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        fail_once(model, index, fault)
        model.zero_grad()
        run_both(FRAGILE, model, plain, 2 * step + 1)
        assert_sharded(model)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("reads", [True, False])
@ours_only("how ranks exchange data")
@cpu_only("on a device, streams wait and not the host")
@distributed(2)
def test_the_step_after_ctrl_c_in_any_wait_is_right(reads: bool) -> None:
    """What still comes in is waited for, before its memory is freed."""
    import fsdp2.transports.host.exchange as exchange
    import fsdp2.transports.host.links as host_links
    import fsdp2.transports.host.messages as messages

    waits = (host_links.PendingExchange, "wait") if reads else (messages, "wait_for")
    links = host_links.host_links if reads else lambda _: None
    wait, calls, stops_at = getattr(*waits), 0, -1

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == stops_at:
            raise KeyboardInterrupt
        if calls == stops_at and dist.get_rank() == 1:
            time.sleep(0.02)  # the other one is interrupted before this one has come
        wait(*args)

    with mock.patch.object(exchange, "host_links", links), mock.patch.object(*waits, interrupted):
        model, plain = pair(FRAGILE, mesh=cached_mesh(2))
        run_both(FRAGILE, model, plain, 0)
        calls = 0
        run_both(FRAGILE, model, plain, 0)
        num_waits = calls
        assert num_waits > 10
        for number in range(num_waits):
            model.zero_grad()
            plain.zero_grad()
            if dist.get_rank() == 1:
                time.sleep(0.02)
            calls, stops_at = 0, number
            with pytest.raises(KeyboardInterrupt):
                FRAGILE.loss(model, *FRAGILE.batch(8, dist.get_rank(), torch.float64)).backward()
            model.zero_grad()
            stops_at = -1
            run_both(FRAGILE, model, plain, number)
            assert_sharded(model)
            assert_same_gradients(model, plain)


@every_fault
@distributed(2)
def test_the_first_step_fails(fault: str) -> None:
    """Before any order has been recorded or any buffer was used."""
    model, plain = pair(FRAGILE)
    fail_once(model, 2, fault)
    model.zero_grad()
    run_both(FRAGILE, model, plain, 0)
    assert_sharded(model)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
@distributed(2)
def test_gradients_there_before_a_failing_forward_are_kept(fault: str) -> None:
    model, plain = pair(FRAGILE)
    run_both(FRAGILE, model, plain, 0)
    fail_once(model, 1, fault)
    run_both(FRAGILE, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(2, 3)
def test_state_dict_and_evaluation_after_a_failure() -> None:
    model, plain = pair(FRAGILE)
    fail_once(model, 2, "after forward")
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert list(full) == list(plain.state_dict())
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    with torch.no_grad():
        (inputs,) = FRAGILE.batch(0, dist.get_rank(), torch.float64)
        assert torch.equal(model(inputs), plain(inputs))


@ours_only("the next step after an exception in backward")
@distributed(2)
def test_a_failure_in_a_micro_batch_without_communication() -> None:
    """The micro-batches are run again from the start."""
    model, plain = pair(FRAGILE)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    fail_once(model, 1, "late in backward")
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    run_both(FRAGILE, model, plain, 1)
    assert_sharded(model)


@ours_only("gradients of earlier micro-batches")
@distributed(2)
def test_a_backward_that_raises_in_an_accumulation_is_not_silent() -> None:
    """What it has added to the sums of earlier micro-batches cannot be told from these."""
    text = "in the middle of an accumulation .* earlier micro-batches had left in the units .*'2'"
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}):
        model, plain = pair(FRAGILE, **options)
        assert isinstance(model, FSDPModule)
        for fault in BACKWARD_FAULTS:
            with model.no_sync():
                run_both(FRAGILE, model, plain, 0, average=False)
                fail_once(model, 1, fault)
                with pytest.raises(RuntimeError, match=text):
                    model(*FRAGILE.batch(1, dist.get_rank(), torch.float64))
                plain.zero_grad()
                run_both(FRAGILE, model, plain, 0, average=False)  # all micro-batches again
            run_both(FRAGILE, model, plain, 1)
            check_gradients(model, plain, options)

            with model.no_sync():  # the iteration is skipped
                run_both(FRAGILE, model, plain, 0, average=False)
                fail_once(model, 1, fault)
                model.reset_iter_state()
            plain.zero_grad()
            run_both(FRAGILE, model, plain, 1)
            check_gradients(model, plain, options)


def in_flight_on_streams(model: FSDPModule) -> bool:
    runtime = model._fsdp2_unit.runtime
    return runtime.streams.stream_ordered and len(runtime.reductions) > 0


@ours_only("gradients of earlier backwards")
@pytest.mark.parametrize("reset", ["", "drop", "zero", "optimizer", "by hand"])
@distributed(1, 2)
def test_a_backward_that_raises_after_it_has_added_to_gradients_is_not_silent(reset: str) -> None:
    """Of a backward that was reduced before. Users who reset gradients have lost nothing."""
    text = r"in the middle of an accumulation .* had left in the units .*'[13]'"
    model, plain = pair(FRAGILE)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # reductions of later layers are complete then
            module.set_reduce_scatter_max_input_buffers(1)
    for step in range(2):
        run_both(FRAGILE, model, plain, 2 * step)
        fail_once(model, 0, "early in backward")
        if reset == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        elif reset in ("drop", "zero"):
            model.zero_grad(set_to_none=reset == "drop")
        elif reset == "by hand":
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.zero_()
        # Written by hand, they may have been written before the last parts came.
        if not reset or (reset == "by hand" and in_flight_on_streams(model)):
            with pytest.raises(RuntimeError, match=text):
                model(*FRAGILE.batch(1, dist.get_rank(), torch.float64))
            model.zero_grad()
        plain.zero_grad()
        run_both(FRAGILE, model, plain, 2 * step + 1)
        check_gradients(model, plain, {})


def check_gradients(model: nn.Module, plain: nn.Module, options: object) -> None:
    if options:  # sums are in float32
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-4, atol=1e-6)
    else:
        assert_same_gradients(model, plain)
    assert_sharded(model)
    model.zero_grad()
    plain.zero_grad()


@ours_only("zero_grad() does not reset what micro-batches have accumulated")
@distributed(2)
def test_gradients_that_were_accumulated_are_reset_by_hand() -> None:
    model, plain = pair(FRAGILE)
    assert isinstance(model, FSDPModule)
    with model.no_sync():
        run_both(FRAGILE, model, plain, 0)
    model.zero_grad()
    plain.zero_grad()
    run_both(FRAGILE, model, plain, 1)
    assert_same_gradients(model, plain)


@ours_only("a backward after one that raised")
@distributed(2)
def test_the_next_backward_needs_no_forward_before_it() -> None:
    """Two graphs; the backward of one raises, then that of the other runs."""
    for mode in (True, False):
        for fault in BACKWARD_FAULTS:
            model, plain = pair(FRAGILE, reshard_after_forward=mode)
            batches = [FRAGILE.batch(step, dist.get_rank(), torch.float64) for step in range(2)]
            set_fault(model, 1, fault)
            broken = FRAGILE.loss(model, *batches[0])
            set_fault(model, 1, "")
            loss = FRAGILE.loss(model, *batches[1])
            with pytest.raises(PlannedError):
                broken.backward()
            loss.backward()
            FRAGILE.loss(plain, *batches[1]).backward()
            average_gradients(plain)
            assert_same_gradients(model, plain)
            assert_sharded(model)


@pytest.mark.parametrize("kind", ["no reduction", "no all-reduce", "reduced"])
@distributed(4)
def test_reset_by_hand_drops_what_micro_batches_have_accumulated(kind: str) -> None:
    """As documented from torch 2.15 on: those that were reduced and attached, too."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(FRAGILE, mesh=mesh)
    assert isinstance(model, FSDPModule)
    if kind == "no reduction":
        model.set_requires_gradient_sync(False)
    if kind == "no all-reduce":
        model.set_requires_all_reduce(False)
    run_both(FRAGILE, model, plain, 0)
    plain.zero_grad()
    fail_once(model, 2, "after forward")
    model.reset_iter_state()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    run_both(FRAGILE, model, plain, 1)
    assert_same_gradients(model, plain)


test_reset_by_hand_drops_what_micro_batches_have_accumulated = ours_only("keeps what it drops")(
    test_reset_by_hand_drops_what_micro_batches_have_accumulated
)


class Tries(nn.Module):
    """Calls each layer wrongly first, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                layer(x[:, :2])
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("together", [False, True])
@distributed(1, 2)
def test_a_layer_that_raised_in_a_forward_that_went_on(together: bool) -> None:
    """Its unit is freed after backward: else its modules show no gradients."""

    def units(model: nn.Module) -> list[Any]:
        layers = list(model.get_submodule("layers").children())
        return [layers] if together else layers

    case = Case("tries", Tries, units, normal_batch(4, 6))
    model, plain = pair(case)
    for step in range(3):
        run_both(case, model, plain, step)
        assert_sharded(model)
        assert_same_gradients(model, plain)


class Driver(nn.Module):
    """A module that is no part of the model and whose forward trains it, as trainers may do."""

    def forward(self, train: Any) -> None:
        train()


@distributed(1, 2)
def test_a_backward_after_a_forward_that_raised_inside_of_another_module() -> None:
    """Modules are being called then, and none of the model's."""
    model, plain = pair(FRAGILE)
    batch = FRAGILE.batch(0, dist.get_rank(), torch.float64)
    earlier = FRAGILE.loss(model, *batch)
    FRAGILE.loss(plain, *batch).backward()

    def train() -> None:
        set_fault(model, 2, "before forward")
        with pytest.raises(PlannedError):
            model(*batch)
        set_fault(model, 2, "")
        earlier.backward()

    Driver()(train)
    average_gradients(plain)
    assert_sharded(model)
    assert_same_gradients(model, plain)
    for step in range(1, 3):
        run_both(FRAGILE, model, plain, step)
        assert_sharded(model)
        assert_same_gradients(model, plain)


@distributed(2, 3)
def test_gradients_that_a_backward_had_attached_before_it_raised_are_dropped() -> None:
    """Where few reductions may be in flight, the first are over when a later layer raises."""
    model, plain = pair(FRAGILE)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_max_input_buffers(1)
    fail_once(model, 1, "late in backward")
    run_both(FRAGILE, model, plain, 0)  # no zero_grad: there is nothing of the failed one
    assert_same_gradients(model, plain)


class Both(nn.Module):
    """The outputs of two layers; the backward of their input raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.is_broken = False

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(RaiseInBackward.apply(x, self.is_broken)) for layer in (self.a, self.b)]


@ours_only("the next step after an exception in backward")
@distributed(2)
def test_unused_parameters_after_a_backward_that_raised() -> None:
    """What the failed backward had reduced counts for nothing: another rank may use it next."""
    torch.manual_seed(0)
    plain = Both().double()
    model: Any = Both().double()
    model.load_state_dict(plain.state_dict())
    for unit in (model.a, model.b, model):
        fully_shard(unit, mesh=cached_mesh(2), reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    model.is_broken = True
    with pytest.raises(PlannedError):
        model(x)[0].sum().backward()
    model.is_broken = False
    used = dist.get_rank()
    model(x)[used].sum().backward()
    plain(x)[used].sum().backward()
    for parameter in plain.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_gradients(plain)
    assert_same_gradients(model, plain)


@ours_only("the next step after an exception in backward")
@distributed(2)
def test_parameters_that_are_gathered_by_hand_after_a_backward_that_raised() -> None:
    """Their gradients are reduced; those through parameters that were gathered before are not."""
    model, plain = pair(FRAGILE)
    assert isinstance(model, FSDPModule)
    layer: Any = model[1]
    x = torch.randn(2, 6, dtype=torch.float64)
    layer.unshard()
    gathered_before = layer.linear(x).sum()
    fail_once(model, 2, "early in backward")
    with pytest.raises(RuntimeError, match=r"call unshard\(\) again"):
        gathered_before.backward()
    layer.unshard()
    layer.linear(x).sum().backward()
    plain[1].linear(x).sum().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


@ours_only("the memory of a unit that is not gathered")
@distributed(2)
def test_a_gather_without_memory_keeps_none() -> None:
    """Whoever catches it, and goes on with less, needs that."""
    model, plain = pair(FRAGILE)
    run_both(FRAGILE, model, plain, 0)
    buckets = unit_of(model[1]).buckets
    allocate = GatheredStorage.allocate

    def fails(gathered: GatheredStorage) -> None:
        allocate(gathered)
        if any(gathered is bucket.gathered for bucket in buckets):
            raise RuntimeError("full")

    failing = mock.patch.object(GatheredStorage, "allocate", fails)
    with failing, pytest.raises(RuntimeError, match="full"):
        model(*FRAGILE.batch(1, dist.get_rank(), torch.float64))
    assert [bucket.allocated_bytes for bucket in buckets] == [0] * len(buckets)
    run_both(FRAGILE, model, plain, 1)
    assert_same_gradients(model, plain)


@ours_only("the next step after an exception in backward")
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=["sharded", "replicas"])
@distributed(2)
def test_the_step_after_a_reduction_without_memory_is_right(shape: tuple[int, ...]) -> None:
    model, plain = pair(FRAGILE, mesh=cached_mesh(*shape))
    failing = mock.patch.object(Bucket, "gradient_store", side_effect=RuntimeError("no memory"))
    with failing, pytest.raises(RuntimeError, match="no memory"):
        FRAGILE.loss(model, *FRAGILE.batch(8, dist.get_rank(), torch.float64)).backward()
    for step in range(2):
        run_both(FRAGILE, model, plain, step)
    assert_same_gradients(model, plain)
    assert_sharded(model)
