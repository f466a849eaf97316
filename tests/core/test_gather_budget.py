"""`max_gathered_bytes`: what is gathered never exceeds it, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_activation_checkpoint import PLACES, case_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from by_keywords import make_setup, trace_step
from fsdp2 import (
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RanksDisagreeError,
    explain,
    fully_shard,
    shard_model,
)
from fsdp2.features.gather_budget import GatherBudget, GatherBudgetError
from fsdp2.planning.replay.replay import replay
from fsdp2.runtime.runtime import runtime_of
from fsdp2.sharding import gathered
from fsdp2.wrap import units_of
from gathers import bytes_held, counting
from harness import cached_mesh, distributed, ours_only
from models import (
    CONDITIONAL,
    EVEN_MLP,
    LORA,
    MLP,
    NESTED,
    RECURRENT,
    TRANSFORMER,
    Block,
    Case,
    normal_batch,
)
from reference import assert_same_gradients, gradients, pair, run_both, shard_case, whole

pytestmark = ours_only("torch has no limit on what is gathered")
STEPS = 3


@contextmanager
def watching(model: Any, max_bytes: int) -> Iterator[list[int]]:
    """Check the bytes of all gathered storages whenever any storage of a bucket changes its size.

    Yields:
        The bytes at each of these moments.
    """
    real, seen = gathered.resize, []

    def resize(storage: Any, nbytes: int) -> None:
        real(storage, nbytes)
        seen.append(bytes_held(model))
        assert seen[-1] <= max_bytes, (seen[-1], max_bytes)

    with mock.patch.object(gathered, "resize", resize):
        yield seen


def train(case: Case, model: Any, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Any:
    """Steps with an evaluation in between and micro-batches; losses and gradients of each."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found: list[Tensor] = []
    for step in range(steps):
        if step == 1:
            with torch.no_grad():
                found.append(case.loss(model, *case.batch(7, dist.get_rank(), dtype)))
        micro_batches = 2 if step == 2 else 1
        # Both forwards before the backwards.
        losses = [
            case.loss(model, *case.batch(step + 10 * i, dist.get_rank(), dtype))
            for i in range(micro_batches)
        ]
        for i, loss in enumerate(losses):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            loss.backward()
        found += [loss.detach() for loss in losses]
        found += [whole(grad) for grad in gradients(model).values() if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def least_budget(run: Callable[[], Any], model: Any) -> int:
    """The least budget with which ``run`` does not raise, as errors say it."""
    budget = 1
    for _ in range(20):
        model.set_max_gathered_bytes(budget)
        try:
            run()
        except GatherBudgetError as error:
            least = error.least_bytes
        else:
            return budget
        assert least > budget
        budget = least
        model.reset_iter_state()
    raise AssertionError("errors name budgets that do not work")


def check(case: Case, num_budgets: int = 10, dtype: torch.dtype = torch.float64, **options: Any):
    """Train at budgets from the least to that of everything; results are those without one."""
    torch.manual_seed(0)
    plain = case.build().to(dtype)

    def make() -> Any:
        return shard_case(case, copy.deepcopy(plain), **options)

    model = make()
    expected = train(case, model, dtype=dtype)
    total = sum(unit.gathered_bytes for unit in model._units(True))
    model = make()
    least = least_budget(lambda: train(case, model, dtype=dtype), model)
    assert least <= total
    peaks = []
    for i in range(num_budgets):
        budget = least + (total - least) * i // max(1, num_budgets - 1)
        model = make()
        model.set_max_gathered_bytes(budget)
        with watching(model, budget) as seen:
            found = train(case, model, dtype=dtype)
        peaks.append(max(seen))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert bytes_held(model) <= budget
    return least, total, peaks


class Tower(nn.Module):
    """Units that run twice, out of the order of the module, some of them inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.own = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.a(x).tanh())
        return self.b(self.a(x + self.own).tanh()) + self.c(x)


def tower_units(model: nn.Module) -> list[nn.Module]:
    return [u for t in model.children() if isinstance(t, Tower) for u in (t.a, t.b, t.c, t)]


REUSED = Case(
    "reused",
    lambda: nn.Sequential(nn.Linear(5, 6), Tower(), Tower(), nn.Linear(6, 3)),
    tower_units,
    normal_batch(4, 5),
)
CASES = {c.name: c for c in (EVEN_MLP, TRANSFORMER, NESTED, RECURRENT, LORA, CONDITIONAL, REUSED)}
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", ["nested", "transformer"])
@distributed(2)
def test_the_budget_holds_and_results_are_the_same(name: str) -> None:
    least, total, peaks = check(CASES[name], 4)
    assert peaks[-1] > peaks[0] or least == total


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@distributed(2, 3, 4)
def test_the_budget_holds_for_all_models(name: str) -> None:
    check(CASES[name])


@distributed(2)
def test_the_budget_holds_for_units_that_run_twice_and_frozen_ones() -> None:
    check(REUSED, 3)
    check(LORA, 3)


@pytest.mark.long
@pytest.mark.parametrize("kept", ["nothing freed", "kept between micro-batches", "bf16", "uneven"])
@distributed(2, long=(3,))
def test_the_budget_holds_whatever_is_kept(kept: str) -> None:
    if kept == "bf16":
        check(TRANSFORMER, 4, torch.float32, mp_policy=BF16)
    elif kept == "uneven":
        check(MLP, 4, direct_min_bytes=10**9)
    else:
        check(NESTED, 4, reshard_after_forward=False)
        check(REUSED, 4, reshard_after_forward=False)


@distributed(2)
def test_the_budget_holds_for_units_that_are_kept() -> None:
    check(NESTED, 3, reshard_after_forward=False)


@distributed(2)
def test_the_budget_holds_when_two_units_are_recomputed_at_once() -> None:
    check(case_of("around two units", False, deep=True), 3, reshard_after_forward=True)


class Recomputed(nn.Module):
    """Four equal layers, three of which are recomputed together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def three(x: Tensor) -> Tensor:
            for layer in list(self.layers)[:3]:
                x = layer(x).tanh()
            return x

        made: Tensor = self.layers[3](checkpoint(three, x, use_reentrant=False))
        return made


@distributed(2)
def test_what_was_recomputed_gives_way() -> None:
    """Backward reads the layer that was recomputed last; the others are gathered again."""
    case = Case("recomputed", Recomputed, lambda m: [*m.layers], normal_batch(4, 6))
    least, total, _ = check(case, 3)
    assert least == total // 4


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", PLACES)
@distributed(2)
def test_the_budget_holds_in_recomputation(place: str, reentrant: bool) -> None:
    check(case_of(place, reentrant, deep=True), 3, reshard_after_forward=True)


@pytest.mark.long
@distributed(4)
def test_the_budget_holds_with_replicas_smaller_groups_and_offload() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    check(NESTED, 4, mesh=mesh)
    check(NESTED, 4, reshard_after_forward=2)
    check(NESTED, 4, offload_policy=CPUOffloadPolicy())


# -- settings ------------------------------------------------------------------------------------


def sizes(model: Any) -> dict[str, int]:
    return {unit.name: unit.gathered_bytes for unit in model._units(True)}


@distributed(2)
def test_errors_name_the_unit_and_a_budget_that_works() -> None:
    model, plain = pair(NESTED)
    run_both(NESTED, model, plain, 0)
    size = sizes(model)
    root, block, inner = size["(root)"], size["1"], size["1.inner1"]
    model.set_max_gathered_bytes(root + block + inner - 1)
    with pytest.raises(GatherBudgetError) as caught:
        run_both(NESTED, model, plain, 1)
    least = caught.value.least_bytes
    assert least == root + block + max(inner, size["1.inner2"])
    for part in (
        f"'1.inner1' of {inner} bytes cannot be gathered in forward",
        f"'(root)' ({root} bytes, its forward is running)",
        f"'1' ({block} bytes, its forward is running)",
        f"The least budget that works is {least} bytes",
    ):
        assert part in str(caught.value)
    plain.zero_grad()
    model.zero_grad()
    model.set_max_gathered_bytes(least)
    with watching(model, least):
        run_both(NESTED, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(2)
def test_what_users_gathered_by_hand_stays() -> None:
    model: Any = pair(EVEN_MLP)[0]
    inner = [m for m in model if hasattr(m, "unshard")]
    x = EVEN_MLP.batch(0, dist.get_rank(), torch.float64)[0]
    model(x).sum().backward()
    size = sum(sizes(model).values())
    model.set_max_gathered_bytes(size - 1)
    for module in inner[:-1]:
        module.unshard()
    with pytest.raises(GatherBudgetError, match="its modules hold gathered parameters"):
        inner[-1].unshard()
    inner[0].reshard()
    inner[-1].unshard()
    with pytest.raises(GatherBudgetError, match="between steps, after reshard"):
        model.set_max_gathered_bytes(1)
    # A gather that nobody has waited for yet is one ahead: it gives way, and the wait brings it.
    for module in inner:
        module.reshard()
    handles = [module.unshard(async_op=True) for module in inner]
    model.set_max_gathered_bytes(max(sizes(model).values()))
    for module, handle in zip(inner, handles, strict=True):
        handle.wait()
        assert not isinstance(module.weight, DTensor)
        assert module.weight.isfinite().all()
        module.reshard()


@distributed(2)
def test_units_are_gathered_ahead_as_deep_as_they_fit() -> None:
    case = Case(
        "chain",
        lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))),
        lambda model: list(model.children()),
        normal_batch(4, 6),
    )
    model, plain = pair(case, reshard_after_forward=True)
    run_both(case, model, plain, 0)
    one = sizes(model)["0"]
    for ahead in (0, 1, 3, 7):
        model.set_max_gathered_bytes((1 + ahead) * one)
        with counting(model) as gathers:
            run_both(case, model, plain, 1)
        # (When a gather begins, its own storage is counted.)
        assert gathers.peak_units == 1 + ahead
        assert set(gathers.forward.values()) == {1}
    model.set_max_gathered_bytes(None)
    with counting(model) as gathers:
        run_both(case, model, plain, 1)
    assert gathers.peak_units == 2


@distributed(2)
def test_kept_frozen_parameters_give_way() -> None:
    model, plain = pair(LORA)
    model.set_keep_frozen_gathered()
    for step in range(2):
        run_both(LORA, model, plain, step)
    kept = bytes_held(model)
    assert kept
    least = least_budget(lambda: train(LORA, model), model)
    assert least < kept + max(sizes(model).values())
    model, plain = pair(LORA)
    model.set_keep_frozen_gathered()
    model.set_max_gathered_bytes(least)
    with watching(model, least):
        for step in range(3):
            run_both(LORA, model, plain, step)
            assert_same_gradients(model, plain)


@distributed(2)
def test_a_second_backward_keeps_what_it_reads() -> None:
    model: Any = pair(EVEN_MLP, reshard_after_forward=True)[0]
    x = EVEN_MLP.batch(0, dist.get_rank(), torch.float64)[0].requires_grad_()

    def penalty() -> Tensor:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = grad.square().sum()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    expected = penalty()
    least = least_budget(penalty, model)
    with watching(model, least):
        assert torch.equal(penalty(), expected)


class Both(nn.ModuleList):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self]


def without_weights(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    return args[0] * 2 if getattr(module, "is_absent", False) else None


@pytest.mark.parametrize("last", ["one layer", "one layer's weights", "inputs of one layer"])
@distributed(2)
def test_ranks_that_used_other_modules_free_the_same(last: str) -> None:
    model: Any = Both(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
    for layer in model:
        layer.register_forward_hook(without_weights)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_max_gathered_bytes(10**6)
    x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
    if last != "inputs of one layer":
        # Gradients of the layers' weights might be computed later.
        torch.autograd.grad(sum(model(x)).sum(), x)
    model.set_reduce_scatter_unused_params(True)
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    model[other].is_absent = last == "one layer's weights"
    outputs = model(x)
    if last == "one layer's weights":
        sum(outputs).sum().backward()
    elif last == "one layer":
        outputs[mine].sum().backward()
    else:
        torch.autograd.grad(outputs[mine].sum(), x)
    model[other].is_absent = False
    model.set_reduce_scatter_unused_params(False)

    model.set_reshard_after_forward(True)
    given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, given, (x,))
    states = [None, None]
    dist.all_gather_object(states, [layer._fsdp2_unit.state for layer in model])
    assert states[0] == states[1]
    sum(model(x)).sum().backward()


@pytest.mark.parametrize("before", ["", "gradients of inputs"])
@distributed(2)
def test_no_rank_reduces_alone_what_only_it_has_accumulated(before: str) -> None:
    """It might be taken for gradients of weights that the user has computed."""
    model: Any = Both(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
    plain = copy.deepcopy(model)
    for layer in model:
        layer.register_forward_hook(without_weights)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=False)
    x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
    other = 1 - dist.get_rank()
    model.set_reduce_scatter_unused_params(True)
    with model.no_sync():
        if before:
            torch.autograd.grad(sum(model(x)).sum(), x)
        model[other].is_absent = True
        sum(model(x)).sum().backward()
    model.set_accumulate_sharded(True)
    model.set_requires_gradient_sync(False)
    sum(model(x)).sum().backward()
    model.set_accumulate_sharded(False)
    model.set_requires_gradient_sync(True)
    sum(model(x)).sum().backward()
    # Three of each rank, whose mean is that of the ranks' single ones.
    sum(plain(x)).sum().mul(3 / 2).backward()
    assert_same_gradients(model, plain)


@distributed(2)
def test_where_and_what_a_budget_may_be() -> None:
    model, plain = pair(NESTED)
    with pytest.raises(TypeError, match="max_bytes must be an int or None, got '1 GB'"):
        model.set_max_gathered_bytes("1 GB")
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        model.set_max_gathered_bytes(0)
    model[1].set_max_gathered_bytes(100)
    with pytest.raises(RuntimeError, match="must be called on the root FSDP module"):
        run_both(NESTED, model, plain, 0)
    model[1].set_max_gathered_bytes(None)
    plain.zero_grad()
    run_both(NESTED, model, plain, 0)
    with pytest.raises(RuntimeError, match="must be called on the root FSDP module"):
        model[1].set_max_gathered_bytes(100)
    model.set_max_gathered_bytes(10**6)
    with pytest.raises(RuntimeError, match="use one of the two"):
        model.set_keep_unsharded_storage(True)
    model.set_max_gathered_bytes(None)
    model.set_keep_unsharded_storage(True)
    with pytest.raises(RuntimeError, match="use one of the two"):
        model.set_max_gathered_bytes(10**6)


@distributed(2)
def test_a_copy_and_a_table_know_the_budget() -> None:
    model = shard_model(TRANSFORMER.build(), max_gathered_bytes=20_000)
    assert explain(model).max_gathered_bytes == 20_000
    assert "at most 19.5 KiB" in str(explain(model))
    copied: Any = copy.deepcopy(model)
    batch = TRANSFORMER.batch(0, dist.get_rank(), torch.float32)
    TRANSFORMER.loss(copied, *batch).backward()
    budget = runtime_of(copied._units(True)[0]).part(GatherBudget)
    assert budget is not None
    assert budget.max_bytes == 20_000


@distributed(2)
def test_ranks_with_other_budgets_raise() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    model.set_max_gathered_bytes(1000 + dist.get_rank())  # type: ignore[operator]
    with pytest.raises(RanksDisagreeError, match="max_gathered_bytes"):
        model(torch.randn(2, 4))


@distributed(2)
def test_a_replay_gathers_the_same_bytes() -> None:
    """What `estimate` and `plan` count, at ten budgets."""
    torch.manual_seed(0)
    plain = TRANSFORMER.build()
    batch = TRANSFORMER.batch(0, dist.get_rank(), torch.float32)
    units = tuple(units_of(plain, Block))
    names = [name for unit in units for name in unit.modules]
    trace = trace_step(plain, (batch[0],), names, loss_fn=lambda out: out.sum(), device_type="cpu")

    def predicted(budget: int) -> int:
        setup = make_setup(units, 2, device_type="cpu", max_gathered_bytes=budget)
        samples = replay(trace, replace(setup, rank=dist.get_rank()), keep_samples=True)
        return max(parts["gathered parameters"] for _, parts in samples.account.samples or ())

    with pytest.raises(GatherBudgetError) as caught:
        predicted(1)
    least = caught.value.least_bytes
    for i in range(10):
        budget = least + i * least // 8
        model: Any = shard_model(copy.deepcopy(plain), wrap=Block, max_gathered_bytes=budget)
        for _ in range(2):  # the first step learns the order
            with watching(model, budget) as seen:
                model(batch[0]).sum().backward()
        assert max(seen) == predicted(budget)


POLICIES = {
    "bf16": CommPolicy(gather=torch.bfloat16, reduce=torch.bfloat16),
    "int8": CommPolicy(gather=torch.int8, reduce=torch.int8, block=16, error_feedback=True),
    "hops": CommPolicy(gather=torch.float8_e4m3fn, reduce=torch.int8, block=16, ranks_per_node=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n == "bf16")) for n in POLICIES]
)
@distributed(4)
def test_with_fewer_bytes_on_the_wire(name: str) -> None:
    """What is gathered counts as it lies in memory; a unit that waits for its turn rounds alike."""
    options: dict[str, Any] = {"comm_policy": POLICIES[name], "direct_min_bytes": 0}
    if name == "hops":  # backward gathers larger shards, in other numbers
        options |= {
            "comm_policy": replace(POLICIES[name], secondary=torch.int8),
            "reshard_after_forward": 2,
        }
    for case in (NESTED, TRANSFORMER) if name == "int8" else (NESTED,):
        least, total, peaks = check(case, 2, torch.float32, **options)
        assert least < total
        assert max(peaks) > least  # the last budget was used


@distributed(4)
def test_replicas_with_fewer_bytes_on_the_wire() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    check(MLP, 3, torch.float32, comm_policy=POLICIES["int8"], direct_min_bytes=0, mesh=mesh)
