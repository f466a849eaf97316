"""`fsdp2.testing.account_gradients`, which is on in all ranks: planted losses are found by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harness
from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.features.early_free.early_free import EarlyFree
from fsdp2.runtime.events import registry
from fsdp2.runtime.reduction import Reduction, ReductionsInFlight
from fsdp2.runtime.runtime import Runtime
from fsdp2.runtime.unit import unit_of
from fsdp2.runtime.unit_grads import UnitGrads
from fsdp2.sharding.bucket import Bucket
from fsdp2.testing import GradientLostError, account_gradients
from harness import cached_mesh, distributed, ours_only
from models import MLP
from reference import pair, shard_case
from subclasses import two_tensor_methods, with_two_tensors

pytestmark = [ours_only("torch has no such accounts")]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def backward(model: nn.Module, step: int = 0) -> None:
    MLP.loss(model, *MLP.batch(step, dist.get_rank(), next(model.parameters()).dtype)).backward()


def accumulate_and_sync(model: nn.Module) -> None:
    """Three micro-batches, of which the last one reduces."""
    assert isinstance(model, FSDPModule)
    with model.no_sync():
        backward(model, 0)
        backward(model, 1)
    backward(model, 2)


def of_unit(gradients: UnitGrads, name: str) -> bool:
    return gradients._param_group._registration.unit_name == name


def take_and_forget() -> Any:
    """What `take` returns lacks a parameter."""
    take = UnitGrads.take

    def forgetful(self: UnitGrads, **kwargs: Any) -> Any:
        taken = take(self, **kwargs)
        if of_unit(self, "2") and taken[0]:
            taken[0].pop(0)
        return taken

    return mock.patch.object(UnitGrads, "take", forgetful)


def forget_to_take() -> Any:
    """No reduction ever sees the gradients of one unit, and nobody looks for them."""
    take, left = UnitGrads.take, UnitGrads.has_unreduced

    def blind(self: UnitGrads, **kwargs: Any) -> Any:
        return (
            [{} for _ in self._param_group.buckets] if of_unit(self, "2") else take(self, **kwargs)
        )

    def nothing_left(self: UnitGrads) -> bool:
        return False if of_unit(self, "2") else left(self)

    both = contextlib.ExitStack()
    both.enter_context(mock.patch.object(UnitGrads, "take", blind))
    both.enter_context(mock.patch.object(UnitGrads, "has_unreduced", nothing_left))
    return both


def drop_instead_of_accumulating() -> Any:
    keep = UnitGrads.keep_as_sums

    def dropping(self: UnitGrads) -> None:
        keep(self)
        for param in self._param_group.params if of_unit(self, "2") else ():
            param.unsharded.grad = None  # type: ignore[union-attr]

    return mock.patch.object(UnitGrads, "keep_as_sums", dropping)


def reset_on_the_unsharded_parameter() -> Any:
    """As units are freed at the end of backward. (Later, users may do so themselves.)"""
    free = Runtime.free_units

    def resetting(self: Runtime) -> None:
        free(self)
        for unit in self.units:
            for param in unit.params if unit.name == "2" else ():
                param.unsharded.grad = None  # type: ignore[union-attr]

    return mock.patch.object(Runtime, "free_units", resetting)


def never_complete() -> Any:
    return mock.patch.object(ReductionsInFlight, "complete")


def not_attached() -> Any:
    attach = Reduction._attach

    def forgetful(self: Reduction) -> Any:
        attached = attach(self)
        for i in self.plan.present:
            if self.bucket.params[i].fqn == "2.bias":
                self.bucket.params[i].sharded.grad = None
        return attached

    return mock.patch.object(Reduction, "_attach", forgetful)


def end_goes_unnoticed() -> Any:
    """Nothing is called at the end of backward."""
    begin, callbacks = Runtime.begin_backward, []

    def without_callback(self: Runtime) -> None:
        engine = SimpleNamespace(queue_callback=callbacks.append)
        with mock.patch(
            "fsdp2.runtime.runtime.Variable", SimpleNamespace(_execution_engine=engine)
        ):
            begin(self)

    return mock.patch.object(Runtime, "begin_backward", without_callback)


@contextlib.contextmanager
def planted(mutation: Callable[[], Any]) -> Iterator[None]:
    """Break the code below what counts."""
    harness.stop_accounts()
    try:
        with mutation(), account_gradients():
            yield
    finally:
        harness.start_accounts()


PLANTED: list[tuple[Any, dict[str, Any], str]] = [
    (take_and_forget, {}, r"'2', parameter '2\.weight', micro-batch 0: it was removed from the"),
    (forget_to_take, {}, r"'2', parameter '2\.weight', micro-batch 0: it is still on the unsh"),
    (forget_to_take, {}, r"'2', parameter '2\.bias', micro-batch 2: it is still on the unsh"),
    (drop_instead_of_accumulating, {"mp_policy": BF16}, r"'2\.weight', micro-batch 0: it was remo"),
    (reset_on_the_unsharded_parameter, {}, r"'2\.weight', micro-batch 0: it was removed from"),
    (never_complete, {}, r"micro-batch 2: its reduction was never completed"),
    (not_attached, {}, r"'2\.bias', micro-batch 2: it was reduced, but not attached"),
]


@pytest.mark.parametrize("number", range(len(PLANTED)))
@distributed(2)
def test_a_planted_loss_is_named(number: int) -> None:
    """By unit, parameter and micro-batch."""
    mutation, options, text = PLANTED[number]
    dtype = torch.float32 if options else torch.float64
    model, _ = pair(MLP, dtype=dtype, **options)
    optimizer = torch.optim.SGD(model.parameters())
    accumulate_and_sync(model)  # without it, all is well
    optimizer.step()
    optimizer.zero_grad()
    with planted(mutation), pytest.raises(GradientLostError, match=text):
        accumulate_and_sync(model)
    unit_of(model).runtime.reset(discard=True)


@distributed(2)
def test_a_planted_loss_of_a_tensor_subclass_is_named() -> None:
    with two_tensor_methods():
        for mutation, text in (
            (forget_to_take, r"'2\.weight', micro-batch 0: it is still on the unsh"),
            (not_attached, r"'2\.bias', micro-batch 2: it was reduced, but not attached"),
        ):
            torch.manual_seed(0)
            model = shard_case(MLP, with_two_tensors(MLP.build()))
            accumulate_and_sync(model)
            model.zero_grad()
            with planted(mutation), pytest.raises(GradientLostError, match=text):
                accumulate_and_sync(model)
            unit_of(model).runtime.reset(discard=True)


@distributed(2)
def test_a_backward_whose_end_goes_unnoticed_is_found_by_the_step() -> None:
    model, _ = pair(MLP)
    optimizer = torch.optim.SGD(model.parameters())
    backward(model)
    optimizer.zero_grad()
    with planted(end_goes_unnoticed):
        backward(model)
        with pytest.raises(GradientLostError, match=r"'0\.weight', micro-batch 0: its reduction "):
            optimizer.step()
    unit_of(model).runtime.reset(discard=True)


@distributed(2)
def test_a_step_without_a_backward_with_sync() -> None:
    """Micro-batches are accumulated, and the last one is too: nothing was reduced."""
    model, _ = pair(MLP)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters())
    with model.no_sync():
        backward(model)
    text = r"'4\.bias', micro-batch 0: .* the optimizer steps now"
    with pytest.raises(GradientLostError, match=text):
        optimizer.step()
    model.reset_iter_state()


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The last micro-batch, and the step."""
    backward(model, 2)
    optimizer.step()
    optimizer.zero_grad()


def begins_later(model: FSDPModule, optimizer: torch.optim.Optimizer) -> None:
    finish(model, optimizer)
    with account_gradients():
        accumulate_and_sync(model)
        finish(model, optimizer)


def begins_after_forward(model: FSDPModule, optimizer: torch.optim.Optimizer) -> None:
    loss = MLP.loss(model, *MLP.batch(0, dist.get_rank(), next(model.parameters()).dtype))
    with account_gradients():
        loss.backward()
        finish(model, optimizer)


def begins_inside_backward(model: FSDPModule, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.ExitStack() as accounts:

        def begin(*_: Any) -> None:
            accounts.enter_context(account_gradients())
            handle.remove()

        handle = model[2].register_full_backward_pre_hook(begin)  # type: ignore[index]
        finish(model, optimizer)
        finish(model, optimizer)


def begins_between_micro_batches(model: FSDPModule, optimizer: torch.optim.Optimizer) -> None:
    with model.no_sync():
        backward(model, 0)
    with account_gradients():
        accumulate_and_sync(model)
        finish(model, optimizer)


def ends_and_begins_again(model: FSDPModule, optimizer: torch.optim.Optimizer) -> None:
    with account_gradients():
        finish(model, optimizer)
    finish(model, optimizer)
    with account_gradients():
        finish(model, optimizer)


def ends_between_micro_batches(model: FSDPModule, optimizer: torch.optim.Optimizer) -> None:
    with account_gradients(), model.no_sync():
        backward(model, 0)
    finish(model, optimizer)
    with account_gradients():
        finish(model, optimizer)


def hooks_of_accounts(model: nn.Module) -> list[Any]:
    """What is left of them on the parameters that compute."""
    params: list[Any] = [p.unsharded for u in unit_of(model).runtime.units for p in u.params]
    hooks = [hook for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return [hook for hook in hooks if hook.__module__.startswith("fsdp2.testing")]


ANYWHERE = [
    begins_later,
    begins_after_forward,
    begins_inside_backward,
    begins_between_micro_batches,
    ends_and_begins_again,
    ends_between_micro_batches,
]


@pytest.mark.parametrize("number", range(len(ANYWHERE)))
@distributed(2)
def test_accounts_begin_and_end_anywhere(number: int) -> None:
    """Nothing is lost in any of these, and nothing is reported."""
    harness.stop_accounts()
    try:
        for reshard, policy in ((True, None), (False, None), (True, BF16)):
            options = {"dtype": torch.float32, "mp_policy": policy} if policy else {}
            model, _ = pair(MLP, reshard_after_forward=reshard, **options)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(model.parameters())
            ANYWHERE[number](model, optimizer)  # type: ignore[arg-type]
            assert not hooks_of_accounts(model)
    finally:
        harness.start_accounts()


@distributed(2)
def test_accounts_that_begin_after_forward_find_losses_too() -> None:
    """Also of units that stay gathered, which nothing opened an account for."""
    model, _ = pair(MLP, reshard_after_forward=False)
    harness.stop_accounts()
    loss = MLP.loss(model, *MLP.batch(0, dist.get_rank(), torch.float64))
    text = r"'2\.bias', micro-batch 0: it was reduced, but not attached"
    with planted(not_attached), pytest.raises(GradientLostError, match=text):
        loss.backward()
    unit_of(model).runtime.reset(discard=True)


@distributed(2)
@mock.patch("fsdp2.sharding.gathered.OWN_PIECE_MIN_BYTES", 64)
def test_an_account_does_not_hold_what_is_given_back_early() -> None:
    """The first and the last layer have memory of their own in the root, and nothing refers to
    them once their gradients are complete."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1], mesh=cached_mesh(dist.get_world_size()))
    fully_shard(model, mesh=cached_mesh(dist.get_world_size()), direct_min_bytes=0)
    freed: set[str] = set()
    free = EarlyFree.free

    def noting(part: EarlyFree, bucket: Bucket, i: int) -> None:
        free(part, bucket, i)
        if not bucket.gathered.own_piece(i).nbytes():
            freed.add(bucket.params[i].fqn)

    with mock.patch.object(EarlyFree, "free", noting):
        model(torch.arange(8)).square().mean().backward()
    assert freed == {"0.weight", "2.weight"}


def test_the_context_is_not_nested() -> None:
    before = list(registry.tree_parts)
    with account_gradients():
        with pytest.raises(RuntimeError, match="already active"), account_gradients():
            pass
        assert [kind for kind in registry.tree_parts if kind not in before]
    assert registry.tree_parts == before  # off: nothing is left of it


class Passing(nn.Module):
    """Returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@distributed(2)
def test_a_unit_that_used_no_parameter_has_lost_nothing() -> None:
    """Backward enters it by its output, as that of a pipeline that leaves out weight gradients."""
    model = nn.Sequential(nn.Linear(3, 3), Passing(), nn.Linear(3, 3))
    fully_shard(model[1])
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        model.finalize_backward()
        assert model[0].weight.grad is not None
        assert model[1].weight.grad is None


class _WithoutGradient(torch.autograd.Function):
    """Adds a weight, and returns no gradient for it, as compiled graphs may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Untrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WithoutGradient.apply(self.linear(x), self.weight)  # type: ignore[no-untyped-call]


@distributed(2)
def test_a_backward_that_returns_no_gradient_has_lost_none() -> None:
    """torch calls hooks for accumulated gradients all the same."""
    model = fully_shard(_Untrained(), mesh=cached_mesh(2))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is None
    assert model.linear.weight.grad is not None
