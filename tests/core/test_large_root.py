"""A root with large parameters of its own, as language models have: embedding and head.

Parameters of this size may be gathered into memory of their own, given back before the rest of
their unit, and reduced before the rest of it; whether backward still needs them depends on how
the model uses them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, fully_shard
from fsdp2.features.early_free.freed_params import FreedParameterProxy
from harness import cached_mesh, distributed, ours_only
from models import Case, Residual, token_batches, token_loss
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    check_training,
    pair,
    run_both,
)

VOCABULARY, DIM = 2048, 64  # 1 MiB in fp64

batch = token_batches(VOCABULARY, sequences=2, length=5)


@dataclasses.dataclass(frozen=True)
class Use:
    """How the model uses its embedding and its head."""

    tied: bool = False  # the head is the same parameter
    by_hand: bool = False  # the head is the embedding's weight, used by a function
    twice: bool = False  # a second lookup after the blocks
    recomputed: bool = False  # the head runs under a checkpoint
    squared: bool = False  # the weights enter the loss directly
    frozen: bool = False  # the embedding is not trained
    by_function: bool = False  # an autograd function keeps the weight as an attribute of its ctx


class Logits(torch.autograd.Function):
    """Keeps the weight as fused cross-entropies do: a Python reference, and no saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Model(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Residual(DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if use.tied:
            self.head.weight = self.embedding.weight
        if use.by_hand:
            del self.head
        self.embedding.requires_grad_(not use.frozen)

    def logits(self, x: Tensor) -> Tensor:
        if self.use.by_function:
            weight = (self.embedding if self.use.by_hand else self.head).weight
            result = Logits.apply(x, weight)
            assert isinstance(result, Tensor)
            return result
        if self.use.by_hand:
            return F.linear(x, self.embedding.weight)
        return self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.use.twice:
            x = x + self.embedding(tokens.flip(1))
        x = self.norm(x)
        if self.use.recomputed:
            result = checkpoint(self.logits, x, use_reentrant=False)
            assert isinstance(result, Tensor)
        else:
            result = self.logits(x)
        if self.use.squared:
            result = result + self.embedding.weight.square().mean()
        return result


def case_of(use: Use) -> Case:
    return Case(
        "large",
        lambda: Model(use),
        lambda m: list(m.get_submodule("blocks").children()),
        batch,
        token_loss,
    )


USES = {
    "plain": Use(),
    "tied": Use(tied=True),
    "tied by hand": Use(by_hand=True),
    "looked up twice": Use(twice=True),
    "recomputed": Use(recomputed=True),
    "recomputed, tied by hand": Use(recomputed=True, by_hand=True),
    "in the loss": Use(squared=True),
    "frozen": Use(frozen=True),
    "frozen, tied by hand": Use(by_hand=True, frozen=True),
    "by a function": Use(by_function=True),
    "by a function, tied by hand": Use(by_function=True, by_hand=True),
    "recomputed, by a function, tied by hand": Use(by_hand=True, recomputed=True, by_function=True),
}
every_use = pytest.mark.parametrize("use", list(USES))


@every_use
@pytest.mark.parametrize("mode", [None, True])
@distributed(3, long=(1, 2))
def test_training(use: str, mode: bool | None) -> None:
    case = case_of(USES[use])
    check_training(case, Training(steps=3), reshard_after_forward=mode)


@every_use
@distributed(2)
def test_backward_twice_through_a_retained_graph(use: str) -> None:
    case = case_of(USES[use])
    model, plain = pair(case)
    for step in range(2):
        data = case.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            value = case.loss(network, *data)
            value.backward(retain_graph=True)
            value.backward()
        average_gradients(plain)
        assert_sharded(model)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@every_use
@distributed(2)
def test_several_forwards_before_one_backward(use: str) -> None:
    case = case_of(USES[use])
    model, plain = pair(case)
    for _ in range(2):
        for network in (plain, model):
            losses = [
                case.loss(network, *case.batch(i, dist.get_rank(), torch.float64)) for i in range(2)
            ]
            torch.stack(losses).sum().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@every_use
@distributed(2, long=(3,))
def test_accumulation_and_evaluation(use: str) -> None:
    """Without communication but for the last, with an evaluation before every backward."""
    case = case_of(USES[use])
    model, plain = pair(case)
    assert isinstance(model, FSDPModule)
    for step in range(4):
        last = step % 2 == 1
        model.set_requires_gradient_sync(last)
        data = case.batch(step, dist.get_rank(), torch.float64)
        values = {network: case.loss(network, *data) for network in (plain, model)}
        with torch.no_grad():
            tokens, _ = case.batch(9, dist.get_rank(), torch.float64)
            assert_same(model(tokens), plain(tokens), "evaluation")
        for value in values.values():
            value.backward()
        if last:
            average_gradients(plain)
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()


@every_use
@distributed(4)
def test_hybrid_sharding(use: str) -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    check_training(case_of(USES[use]), Training(steps=2), mesh=mesh)


@distributed(2)
def test_backward_of_a_part_of_the_model_only() -> None:
    """The head's gradient is there, the embedding's is not: no input of a block needs one."""
    case = case_of(Use())
    model, plain = pair(case)
    for step in range(2):
        tokens, _ = case.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            network.get_submodule("embedding").requires_grad_(False)
            network.get_submodule("blocks").requires_grad_(step == 1)
            network(tokens).square().mean().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_the_hidden_state_is_kept_and_the_head_called_later() -> None:
    """A second loss computed from the first one's graph, after its backward."""
    case = case_of(Use())
    model, plain = pair(case)
    for network in (plain, model):
        tokens, targets = case.batch(0, dist.get_rank(), torch.float64)
        logits = network(tokens)
        first = logits[:1].square().mean()
        second = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        first.backward(retain_graph=True)
        run = network(tokens)  # another forward before the second backward
        second.backward(retain_graph=True)
        run.sin().mean().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


@ours_only("torch's FSDP2 frees no parameter of a unit early")
@distributed(2)
def test_what_was_freed_early_is_a_parameter_still() -> None:
    """For code that looks for parameters by their class between forward and backward."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM)).double()
    for module in (model[1], model):
        fully_shard(module, mesh=cached_mesh(dist.get_world_size()))
    loss = model(torch.arange(4)).sum()
    weight = model[0].weight
    assert type(weight) is FreedParameterProxy
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.requires_grad) == ((VOCABULARY, DIM), True)
    loss.backward()


class Table(nn.Module):
    """A large parameter beside a unit, for its users to read."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual(DIM)
        self.table = nn.Parameter(torch.ones(VOCABULARY, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@distributed(2)
def test_a_gradient_that_comes_after_backward_has_left_the_root() -> None:
    """Of a use before forward: autograd comes to it last, when the root is sharded again."""
    case = Case("table", Table, lambda m: [m.get_submodule("block")], batch, token_loss)
    model, plain = pair(case)
    for step in range(2):
        for network in (plain, model):
            if isinstance(network, FSDPModule):
                network.unshard()
            earlier = network.get_parameter("table").sum(0)
            torch.manual_seed(2 * step + dist.get_rank())
            x = torch.rand(3, DIM, dtype=torch.float64, requires_grad=True)
            (network(x) * earlier).mean().backward()
        assert_sharded(model)
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_training_goes_on_after_all_that() -> None:
    """Uses one model for evaluation, two backwards and training, in turns."""
    case = case_of(Use(by_hand=True, recomputed=True))
    model, plain = pair(case)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in (model, plain)]
    for step in range(4):
        with torch.no_grad():
            tokens, _ = case.batch(7, dist.get_rank(), torch.float64)
            assert_same(model(tokens), plain(tokens), "evaluation")
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("use", ["plain", "tied by hand", "recomputed", "looked up twice"])
@distributed(2)
def test_a_reference_that_one_rank_alone_holds_changes_no_gather(use: str) -> None:
    """As a debugger or a hook that logs does. Ranks that disagreed on a gather would hang."""
    case = case_of(USES[use])
    model, plain = pair(case)
    held = []
    if dist.get_rank() == 0:
        for name in ("embedding", "head"):
            if hasattr(model, name):
                model.get_submodule(name).register_forward_hook(
                    lambda module, args, output: held.append(module.weight.detach())
                )
    for step in range(3):
        for network in (plain, model):
            losses = [
                case.loss(network, *case.batch(2 * step + i, dist.get_rank(), torch.float64))
                for i in range(2)
            ]
            torch.stack(losses).sum().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
        if step == 1:
            held.clear()
