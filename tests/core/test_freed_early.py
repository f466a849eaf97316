"""Parameters that were freed before the rest of their unit, and are needed after all.

After forward the root keeps its parameters for backward, but for an embedding's weight, which
backward does not read. Until the unit is gathered again a stand-in takes its place in the module,
where others may find it: a loss outside of the model's forward, recomputation, another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp2 import FSDPModule
from fsdp2.features.early_free.freed_params import FreedParameterProxy
from harness import distributed, ours_only
from models import Case, Residual, children, token_batches, token_loss
from reference import assert_same, assert_same_gradients, average_gradients, pair, run_both

VOCABULARY, DIM = 2048, 64  # 1 MiB in fp64

batch = token_batches(VOCABULARY, sequences=2, length=5)

pytestmark = ours_only("torch keeps all parameters of a root")


class Saving(torch.autograd.Function):
    """Logits, by a function that autograd hands the weight itself, as fused losses are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


Logits = Callable[[Tensor, Tensor], Tensor]
LOGITS: dict[str, Logits] = {
    "linear": F.linear,
    "T": lambda x, weight: x @ weight.T,
    "mT": lambda x, weight: x @ weight.mT,
    "data": lambda x, weight: x @ weight.data.t(),
    "function": lambda x, weight: Saving.apply(x, weight),  # type: ignore[return-value]
}


class Model(nn.Module):
    """Maps tokens to hidden states, or to logits by ``logits``, recomputed in backward if there are
    options for that, or by a tied head."""

    def __init__(self, logits: Logits | None = None, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(*(Residual(DIM) for _ in range(2)))
        self.logits, self.options = logits, options
        if tied:
            self.head = nn.Linear(DIM, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens))
        if hasattr(self, "head"):
            result = self.head(x)
            assert isinstance(result, Tensor)
            return result
        if self.logits is None:
            return x
        if not self.options:
            return self.logits(x, self.embedding.weight)
        result = checkpoint(lambda x: self.logits(x, self.embedding.weight), x, **self.options)
        assert isinstance(result, Tensor)
        return result


def models(*args: Any, **options: Any) -> tuple[Case, list[Any]]:
    """The case, and a sharded and a plain model."""

    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        return list(model.get_submodule("blocks").children())

    case = Case("freed early", lambda: Model(*args, **options), blocks, batch, token_loss)
    return case, list(pair(case))


def is_freed(model: Any) -> bool:
    weight = model.embedding.weight
    if type(weight) is not FreedParameterProxy:
        return False
    assert weight._param.unsharded is not None
    return weight._param.unsharded.untyped_storage().size() == 0


@pytest.mark.parametrize("how", list(LOGITS))
@distributed(2)
def test_a_loss_outside_of_the_forward_uses_the_weight(how: str) -> None:
    case, (model, plain) = models()
    for step in range(2):
        tokens, targets = case.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            hidden = network(tokens)
            if network is model and step == 0:  # later it is kept, since it was needed
                assert is_freed(model)
            logits = LOGITS[how](hidden, network.embedding.weight)
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", list(LOGITS))
@distributed(2)
def test_recomputation_uses_the_weight(how: str, reentrant: bool) -> None:
    case, (model, plain) = models(LOGITS[how], use_reentrant=reentrant)
    for step in range(2):
        data = case.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            value = case.loss(network, *data)
            if network is model and step == 0:
                assert is_freed(model)
            value.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_selective_checkpointing_does_not_see_the_gather() -> None:
    def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    case, (model, plain) = models(
        LOGITS["linear"],
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(save_all),
    )
    data = case.batch(0, dist.get_rank(), torch.float64)
    for network in (plain, model):
        case.loss(network, *data).backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


@distributed(2)
def test_backward_is_asked_for_the_weight_alone() -> None:
    case, (model, plain) = models()
    tokens, _ = case.batch(0, dist.get_rank(), torch.float64)
    for network in (plain, model):
        value = network(tokens).square().mean()
        if network is model:
            assert is_freed(model)
        value.backward(inputs=[network.embedding.weight])
    average_gradients(plain)
    assert_same_gradients(model, plain)


@distributed(2)
def test_functional_call_between_forward_and_backward() -> None:
    """As with a teacher's weights: they compute, and not those of the model."""
    case, (model, plain) = models()
    tokens, _ = case.batch(0, dist.get_rank(), torch.float64)
    teacher = {name: 2 * p.detach() for name, p in plain.named_parameters()}
    sharded_teacher = {name: 2 * p.detach() for name, p in model.named_parameters()}
    outputs = []
    for network, given in ((plain, teacher), (model, sharded_teacher)):
        value = network(tokens).square().mean()
        if network is model:
            assert is_freed(model)
        with torch.no_grad():
            outputs.append(functional_call(network, given, (tokens,)))
        value.backward()
    assert_same(outputs[1], outputs[0], "output of the teacher")
    average_gradients(plain)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("how", ["head", "linear", "function"])
@distributed(2)
def test_a_tied_weight_is_freed_when_backward_has_left_the_head(how: str) -> None:
    """Its gradient is not complete until the embedding's backward, which does not read it."""
    case, (model, plain) = models(tied=True) if how == "head" else models(LOGITS[how])
    freed = []

    def look(block: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: freed.append(is_freed(model)))

    model.blocks[0].register_forward_hook(look)
    for step in range(2):
        data = case.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            case.loss(network, *data).backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert freed == [True, True]


class Tables(nn.Module):
    """Two embedding tables, and a layer on the sum of their rows.

    Args:
        left: called with the second table when backward comes to the first.
    """

    def __init__(self, left: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = (nn.Embedding(VOCABULARY, DIM) for _ in range(2))
        self.top = nn.Linear(DIM, VOCABULARY)
        self.left = left

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.first(tokens)
        first.register_hook(lambda _: self.left(self.second))
        result = self.top(first + self.second(tokens))
        assert isinstance(result, Tensor)
        return result


@pytest.mark.parametrize("keep", [False, True])
@distributed(2, 3)
def test_a_table_that_stays_gathered_is_freed_with_its_gradient(keep: bool) -> None:
    """No hook tells that backward has left it, but that reads only indices."""
    nbytes: list[int] = []

    def left(table: Any) -> None:
        if isinstance(model, FSDPModule) and table is model.get_submodule("second"):
            unit = table._fsdp2_unit
            nbytes.append(sum(param.unsharded.untyped_storage().nbytes() for param in unit.params))

    case = Case("tables", lambda: Tables(left), children, batch, token_loss)
    model, plain = pair(case, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(not keep)
    for step in range(3):
        run_both(case, model, plain, step)
        for module in (model, *model.children()):
            module.reshard()
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert len(nbytes) == 3
    assert all(nbytes) if keep else not any(nbytes)


class Reused(nn.Module):
    """A table of which a loss uses the weight, too, before it is looked up once more."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(VOCABULARY, DIM), Residual(DIM)
        self.use = use

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(self.table(tokens))
        logits = F.linear(hidden, self.use(self.table.weight))
        again = self.table(logits.argmax(-1))
        return logits + self.block(again) @ self.use(self.table.weight).t()


class UsedBefore(Reused):
    """A layer before the lookup computes with the weight, and needs it after its gradient."""

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.table, FSDPModule):
            self.table.unshard()
        weight = self.use(self.table.weight)
        hidden = self.block(torch.ones(*tokens.shape, DIM, dtype=weight.dtype))
        return torch.tanh(hidden @ weight.t()) @ weight * self.table(tokens) @ weight.t()


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("kind", [Reused, UsedBefore])
@distributed(2, 3)
def test_the_weight_of_a_table_that_stays_gathered_is_used_elsewhere(
    kind: type[Reused], detached: bool
) -> None:
    def use(weight: Tensor) -> Tensor:
        return weight.detach() if detached else weight

    case = Case("reused", lambda: kind(use), children, batch, token_loss)
    model, plain = pair(case, reshard_after_forward=False)
    for step in range(2):
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
