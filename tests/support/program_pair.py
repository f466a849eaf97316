"""A sharded model and the plain one beside it, and how they are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule
from fsdp2.runtime.unit import unit_of, units_in
from random_models import WIDTH, Node, nodes
from reference import (
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
)

Operation = tuple[Any, ...]  # the name of a method of `Run`, and its arguments


class Pair:
    """Both models in the middle of a program."""

    optimizers: list[torch.optim.Optimizer]

    def __init__(self, model: Node, plain: Node) -> None:
        self.model, self.plain = model, plain
        self.count = 0
        self.keeps = False  # what is gathered, after backward
        self.had_backward = False
        self.keeps_storage = False  # of what is gathered, when it is freed
        self.limited = False  # in what may be gathered

    def both(self) -> tuple[Node, Node]:
        return self.plain, self.model

    def batch(self) -> tuple[Tensor, int]:
        """Another one for each forward; step numbers say which layers are skipped."""
        self.count += 1
        generator = torch.Generator().manual_seed(1000 * self.count + dist.get_rank())
        return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64), self.count

    def forward(self, *batch: Any, **same: Any) -> tuple[Tensor, Tensor]:
        """The losses of the plain and the sharded model."""
        expected, loss = ((each(*batch) - 1).square().mean() for each in self.both())
        assert_same(loss, expected, "loss")
        assert loss.requires_grad == expected.requires_grad
        return expected, loss

    def after_backward(self) -> None:
        average_gradients(self.plain)
        # What is kept after forward is freed in backward only.
        if not (self.keeps or not self.had_backward):
            assert_sharded(self.model)
        with self.sharded_shown():
            assert_same_gradients(self.model, self.plain)

    @contextlib.contextmanager
    def sharded_shown(self) -> Iterator[None]:
        """Context in which units that are gathered show their shards, as to a state dict.

        They stay gathered: a step from there is a case of its own.
        """
        with contextlib.ExitStack() as stack:
            for unit in units_in(self.model):
                stack.enter_context(unit.registration.showing_sharded())
            yield

    def zero(self, *, to_none: bool = True) -> None:
        for each in self.both():
            each.zero_grad(set_to_none=to_none)

    def free(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def node(self, number: int, *, units: bool = False) -> tuple[Node, Node]:
        """The same node of both, a unit if ``units``."""
        chosen = ([*nodes(each), each] for each in self.both())
        plain, model = (
            [n for n in mine if n.layer.unit or n is mine[-1] or not units] for mine in chosen
        )
        return plain[number % len(plain)], model[number % len(model)]

    def backward(self, *losses: Tensor) -> None:
        """That of the plain and of the sharded one, if anything in them is trained."""
        self.had_backward = losses[0].requires_grad
        if self.had_backward:
            for loss in losses:
                loss.backward()

    def do(self, what: Operation) -> None:
        name, *arguments = what
        getattr(self, name)(*arguments)


def has_one_mesh(module: nn.Module) -> bool:
    """Whether all parameters of a unit are over the same ranks: some settings need that."""
    return len({parameter.mesh for parameter in unit_of(module).params}) <= 1
