"""Optimizers written in unusual ways: base classes, where they keep state, what they depend on."""

from __future__ import annotations

import abc
import copy
import io
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import fully_shard, shard_model
from fsdp2.optim import local_step, whole_step
from harness import cpu_only, distributed
from models import MLP, TRANSFORMER
from optimizers import OwnOptimizer, assert_same_training, close, feed, train, trainable
from reference import pair, run_both

T = TypeVar("T")


# ------------------------------------------------------------------------------------- bases


class Abstract(abc.ABC):
    @abc.abstractmethod
    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None: ...


class Slots:
    __slots__ = ()


class Fields:
    __slots__ = ("note",)


class Meta(abc.ABCMeta): ...


class OfABC(Abstract, OwnOptimizer):
    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None: ...


class OfGeneric(Generic[T], OwnOptimizer): ...


class OfEmptySlots(Slots, OwnOptimizer): ...


class OfSlots(Fields, OwnOptimizer): ...


class OfAll(Slots, Fields, Abstract, Generic[T], OwnOptimizer, metaclass=Meta):
    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None: ...


BASES: list[type[OwnOptimizer]] = [OfABC, OfGeneric, OfEmptySlots, OfSlots, OfAll]


@pytest.mark.parametrize("wrap", [local_step, whole_step])
@pytest.mark.parametrize("kind", BASES)
@distributed(2)
def test_optimizers_with_other_bases(kind: type[OwnOptimizer], wrap: Callable[..., Any]) -> None:
    model, plain, optimizer, reference = train(MLP, lambda p: wrap(kind(p)), kind, steps=2)
    assert_same_training(model, plain, optimizer, reference)
    assert isinstance(optimizer, kind)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


class OwnSubclasses(OwnOptimizer):
    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


class WithKey(OwnSubclasses, key="a"): ...


@pytest.mark.parametrize("wrap", [local_step, whole_step])
@distributed(1)
def test_a_class_that_takes_no_subclass_stays_as_it_was(wrap: Callable[..., Any]) -> None:
    model, _ = pair(MLP)
    optimizer = WithKey(trainable(model))
    before = dict(vars(optimizer))
    with pytest.raises(TypeError, match="WithKey cannot be extended"):
        wrap(optimizer)
    assert type(optimizer) is WithKey
    assert vars(optimizer) == before


@pytest.mark.parametrize("wrap", [local_step, whole_step])
@distributed(2)
def test_copies_and_pickles_go_on_like_the_original(wrap: Callable[..., Any]) -> None:
    """Pickles are of plain parameters: DTensors have their meshes to take along."""
    params = [nn.Parameter(torch.arange(6.0).reshape(3, 2))]
    original = wrap(torch.optim.AdamW(params, lr=0.1))
    params[0].grad = torch.ones(3, 2)
    original.step()
    for other in (
        copy.deepcopy(original),
        pickle.loads(pickle.dumps(original)),
        torch.load(_saved(original), weights_only=False),
    ):
        assert type(other) is type(original)
        copied = other.param_groups[0]["params"][0]
        copied.grad = torch.ones(3, 2)
        other.step()
        expected = copy.deepcopy(original)
        expected.param_groups[0]["params"][0].grad = torch.ones(3, 2)
        expected.step()
        assert torch.equal(copied, expected.param_groups[0]["params"][0])
        assert other.state[copied]["step"] == 2


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


# ----------------------------------------------------------------- what is kept in the groups


class Counting(OwnOptimizer):
    """Counts steps in its groups in several ways, and on itself."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().step(closure)

    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None:
        group["k"] = group.get("k", 0) + 1
        group["seen"] = [*group.get("seen", []), float(group["k"])][-3:]
        if "count" in group:
            group["count"] += 1
        else:
            group["count"] = torch.tensor(1.0)
        group["done"] = group["k"] > 2

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        norm = p.norm() + grad.norm()  # not elementwise
        return grad * norm / (group["k"] + group["count"] + self.calls)


@distributed(2, long=(3,))
def test_counters_in_groups_and_on_the_optimizer_advance_once_a_step() -> None:
    """Also those of a group without gradients, as in one process."""

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
        return [
            {"params": params[:1]},
            {"params": params[1:], "lr": 0.01},
            {"params": [idle], "lr": 0.2},
        ]

    model, plain, optimizer, reference = train(
        TRANSFORMER,
        lambda p: whole_step(Counting(groups(p)), batch_bytes=2000),
        lambda p: Counting(groups(p)),
    )
    assert_same_training(model, plain, optimizer, reference)
    for group, expected in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }
    assert optimizer.calls == reference.calls == 5  # type: ignore[attr-defined]
    assert optimizer.param_groups[2]["k"] == 5


class Last(OwnOptimizer):
    """Leaves a number of its last parameter in the group, and never reads it."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        group["norm"] = grad.norm()
        return grad / (1 + group["norm"])


@distributed(2)
def test_what_parameters_write_differently_is_that_of_the_last() -> None:
    model, plain, optimizer, reference = train(MLP, lambda p: whole_step(Last(p)), Last)
    assert_same_training(model, plain, optimizer, reference)
    norm = optimizer.param_groups[0]["norm"]
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm, reference.param_groups[0]["norm"])


# ------------------------------------------------------------------- what depends on what


class GlobalNorm(OwnOptimizer):
    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad.norm() for p in params if p.grad is not None]
        self.scale = 1.0 if not grads else 1.0 / max(1.0, float(torch.stack(grads).norm()))

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad * self.scale


class Estimate(OwnOptimizer):
    """Adds up something over all parameters, for the next step."""

    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None:
        group["scale"] = group.get("next", 1.0)
        group["next"] = 1.0

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        group["next"] += float(grad.abs().mean())
        return grad * group["scale"]


class Noise(OwnOptimizer):
    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(grad)


class Decays(OwnOptimizer):
    """Also what has no gradient."""

    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in group["params"]:
            p.mul_(0.9)


class OnItself(OwnOptimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.sums: dict[int, float] = {}

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        self.sums[id(p)] = self.sums.get(id(p), 0.0) + 1
        return grad / self.sums[id(p)]


COUPLED: dict[type[OwnOptimizer], str] = {
    GlobalNorm: "steps a parameter differently when it also sees the others",
    Estimate: "differently|depend on all parameters",
    Noise: "draws random numbers",
    Decays: "changes parameters that have no gradient",
    OnItself: "its attribute 'sums'",
}


@pytest.mark.parametrize("kind", COUPLED)
@distributed(2)
def test_steps_that_depend_on_other_parameters_are_refused(kind: type[OwnOptimizer]) -> None:
    model, _ = pair(MLP)
    optimizer = kind(trainable(model))
    numbers = torch.get_rng_state()
    options = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    with pytest.raises(TypeError, match=COUPLED[kind]):
        whole_step(optimizer)
    assert type(optimizer) is kind
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), numbers)
    assert options == {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


class RowMean(OwnOptimizer):
    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad - grad.mean(0, keepdim=True)


class Clips(OwnOptimizer):
    """Only large gradients."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad / max(1.0, float(grad.norm()) / 500)


class Blocks(OwnOptimizer):
    """Only of large parameters, as 8-bit optimizers do."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad if p.numel() < 4096 else grad / grad.abs().max()


@pytest.mark.parametrize("kind", [RowMean, Clips, Blocks, GlobalNorm, Counting, Last, Noise])
@distributed(1)
def test_steps_that_are_not_elementwise_are_refused(kind: type[OwnOptimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(96, 96))])
    with pytest.raises(TypeError, match=f"{kind.__name__} is not elementwise.*fsdp2.optim.whole"):
        local_step(optimizer)
    assert type(optimizer) is kind


class Queue(OwnOptimizer):
    """Elementwise until its queue is full."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        queue = state.setdefault("queue", deque(maxlen=group["keep"]))
        queue.append(grad.clone())
        return grad if len(queue) < group["keep"] else grad / queue[0].abs().max()


@pytest.mark.parametrize("keep", [3, 12, 40])
@cpu_only("a maximum of nothing is an error at the call, which threads raise later")
@distributed(1)
def test_what_happens_only_after_many_steps_is_found_out(keep: int) -> None:
    with pytest.raises(TypeError, match="Queue is not elementwise"):
        local_step(Queue([nn.Parameter(torch.ones(4, 3))], keep=keep))


class Ready(OwnOptimizer):
    """Refuses to step until it is told that training begins; then elementwise, or not."""

    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not group["training"]:
            raise RuntimeError("call train() first")

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad / p.norm() if group["whole"] else grad


@distributed(2)
def test_an_optimizer_that_is_not_ready_is_tried_out_in_its_first_step() -> None:
    model, _ = pair(MLP)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = local_step(Ready(model.parameters(), training=False, whole=False))
    with pytest.raises(TypeError, match=r"could not be determined.*call train"):
        optimizer.step()
    optimizer.param_groups[0]["training"] = True
    optimizer.step()
    optimizer.param_groups[0]["whole"] = True  # other options: tried out again
    with pytest.raises(TypeError, match="Ready is not elementwise"):
        optimizer.step()


# ------------------------------------------------------------------- closures and wrappers


class Twice(OwnOptimizer):
    """Calls its closure a second time, after a step, as sharpness-aware optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return None if closure is None else closure()


class UsesLoss(OwnOptimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.loss = float(closure())
        return super().step()

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad * self.loss / (1 + grad.norm())


@distributed(2)
def test_the_loss_of_a_closure_reaches_the_step_of_every_parameter() -> None:
    model, plain = pair(MLP)
    optimizers = whole_step(UsesLoss(model.parameters())), UsesLoss(plain.parameters())
    for step in range(2):
        run_both(MLP, model, plain, step)
        feed(model, plain)
        for each in optimizers:
            assert each.step(lambda: torch.tensor(0.25)) == (
                0.25 if each is optimizers[0] else None
            )
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q, name, 1e-12)


@distributed(2)
def test_a_closure_called_twice_is_an_error() -> None:
    model, _ = pair(MLP)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = whole_step(Twice(model.parameters()))
    with pytest.raises((TypeError, RuntimeError), match="its closure more than once"):
        optimizer.step(lambda: torch.ones(()))


class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


class Duck:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.base = inner


@pytest.mark.parametrize("wrap", [local_step, whole_step])
@distributed(1)
def test_wrappers_and_demanded_closures_are_refused_with_words(wrap: Callable[..., Any]) -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"wraps another optimizer .SGD, its attribute 'inner'"):
        wrap(Wrapper(inner))
    with pytest.raises(TypeError, match=r"expects a torch.optim.Optimizer, but Duck is not one"):
        wrap(Duck(inner))
    with pytest.raises(TypeError, match=r"LBFGS.step\(\) requires a closure"):
        wrap(torch.optim.LBFGS(inner.param_groups[0]["params"]))


def with_lbfgs(model: nn.Module, **options: Any) -> None:
    """The same batches on all ranks."""
    optimizer = torch.optim.LBFGS(trainable(model), lr=0.5, max_iter=5, **options)
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = (model(torch.full((3, 12), 0.1 * step + 0.1).double()) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@distributed(2, long=(3,))
def test_lbfgs_over_dtensors_is_right_or_says_what_to_do() -> None:
    """Where shards are of equal size, and where nothing is sharded, torch's own is right."""

    def build(hidden: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, hidden), nn.Tanh(), nn.Linear(hidden, 6)).double()

    def shard_evenly(p: nn.Parameter) -> Shard | Replicate:
        return Replicate() if p.shape[0] % dist.get_world_size() else Shard(0)

    for options in ({}, {"line_search_fn": "strong_wolfe"}):
        for hidden, shard in (
            (18, fully_shard),
            (7, lambda model: shard_model(model, strategy="none")),
            (7, lambda model: fully_shard(model, shard_placement_fn=shard_evenly)),
        ):
            plain, model = build(hidden), build(hidden)
            shard(model)
            with_lbfgs(plain, **options)
            with_lbfgs(model, **options)
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                close(p, q, name, 1e-9)
        model = fully_shard(build(7))
        with pytest.raises(
            RuntimeError, match=r"LBFGS makes one vector.*'0.weight' of shape \(7, 12"
        ):
            with_lbfgs(model, **options)


# ---------------------------------------------------------------- state in containers


class InContainers(OwnOptimizer):
    """Elementwise; keeps its tensors in dicts, lists and queues."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        momenta = state.setdefault("momenta", {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)})
        for beta, momentum in momenta.items():
            momentum.mul_(beta).add_(grad)
        queue = state.setdefault("queue", deque())
        queue.append(grad.clone())
        if len(queue) > 2:
            queue.popleft()
        return sum(momenta.values()) + sum(queue)  # type: ignore[return-value]


@distributed(2, long=(3,))
def test_local_steps_keep_dtensors_in_containers() -> None:
    model, plain, optimizer, reference = train(
        MLP, lambda p: local_step(InContainers(p)), InContainers
    )
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p, q, "parameter", 1e-12)
        state, expected = optimizer.state[p], reference.state[q]
        for actual, wanted in (
            *zip(state["queue"], expected["queue"], strict=True),
            *((state["momenta"][beta], expected["momenta"][beta]) for beta in (0.5, 0.9)),
        ):
            close(actual, wanted, "state", 1e-12)
    fresh = local_step(InContainers(model.parameters()))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run_both(MLP, model, plain, 7)
    feed(model, plain)
    fresh.step()
    reference.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p, q, "parameter", 1e-12)
