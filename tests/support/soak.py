"""One model, kept for thousands of operations of random programs, and more that come in between."""

from __future__ import annotations

import copy
import random
from collections import Counter

import torch
import torch.distributed as dist

import fsdp2
from draws import one_of
from fsdp2 import FSDPModule
from leaks import count, fill_records
from program_grammar import OPERATIONS
from programs import Operation, Program, Run, shard
from random_models import Layer, build
from reference import assert_all_same, assert_same_parameters, buffers

# All kinds of layers, units and ties; recomputed, frozen, reused and skipped ones among them.
MODEL = Layer(
    "linear",
    size=7,
    inside=(
        Layer("linear", size=5, unit="sharded"),
        Layer("norm", unit="with the next"),
        Layer("batchnorm"),
        Layer(
            "deep",
            size=4,
            unit="sharded",
            reshard=2,
            recomputed=True,
            inside=(Layer("scalar"), Layer("linear", size=3, unit="sharded", frozen=True)),
        ),
        Layer("table", size=8, unit="sharded", reshard=False),
        Layer("same weight", size=1),
        Layer("linear", size=11, unit="replicated", skipped=1),
        Layer("linear", size=13, unit="sharded", repeats=2, container="dict"),
    ),
)
# What only a new model undoes; a copy, which is one: the model of the first steps is to stay; and
# a forward that raises in one model of the two, after its running statistics were updated.
LEFT_OUT = (
    *("merge", "copy", "cast", "custom", "lookup", "forward_hook"),
    *("reduced_by_hook", "replaced", "compiled"),
)
# Once, among the first: after `compile` torch keeps guards and metrics, of a plain model as well; a
# forward method stays registered, of each module once; a second group for reductions is kept.
ONCE: tuple[Operation, ...] = (
    *(("copy",), ("compile",)),
    ("setting", "set_separate_reduce_scatter_group", True),
    *(("alone", number, "encode") for number in range(12)),
)
MORE: tuple[Operation, ...] = (("load",), ("watch",))


class Soak(Run):
    """A run whose state can be brought to where it began."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(0)
        plain = build(program.model)
        super().__init__(shard(program, copy.deepcopy(plain)), plain)
        self.trained = [p.requires_grad for p in plain.parameters()]

    def load(self) -> None:
        """Weights of the plain model: rounding that has grown is gone, too."""
        self.free()
        fsdp2.load_full_state_dict(self.model, dict(self.plain.named_parameters()), strict=False)
        self.look("sharded")

    def watch(self) -> None:
        with fsdp2.watch_ranks(self.model), fsdp2.watch_hangs(self.model, after_s=60):
            self.step("reduce")

    def compile(self) -> None:
        """Two steps with the root's own layer compiled."""
        self.model.own.compile(backend="eager")
        self.step("reduce")
        del self.model.own._compiled_call_impl
        torch._dynamo.reset()

    def rest(self) -> None:
        """Settings as at any other rest, and two steps."""
        for each in self.both():
            for parameter, trained in zip(each.parameters(), self.trained, strict=True):
                parameter.requires_grad_(trained)
        assert isinstance(self.model, FSDPModule)
        self.model.set_reshard_after_forward(True)
        self.model.set_reshard_after_backward(True)
        self.model.set_reduce_scatter_max_input_buffers(2)
        self.model.set_keep_frozen_gathered(0)
        self.model.set_max_gathered_bytes(None)
        self.model.set_keep_unsharded_storage(False)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_forward_prefetch([])
                module.set_modules_to_backward_prefetch([])
        self.keeps = self.keeps_storage = self.limited = False
        self.free()
        self.move()  # buckets are planned anew, by what is trained now
        self.load()
        self.optimizer("sgd", "plain")
        self.count += self.count % 2
        self.step("reduce")
        self.step("reduce")


def operations(num: int) -> list[Operation]:
    """So many of random programs, in a fixed order; each kind is among the first hundred."""
    chosen = random.Random(0)
    drawn = [one_of(OPERATIONS)(chosen) for _ in range(num)]
    found = [each for each in drawn if each[0] not in LEFT_OUT]
    kinds = list({each[0]: each for each in found}.values())
    rest = [chosen.choice(MORE) if chosen.random() < 0.1 else each for each in found]
    while len(rest) < num:
        rest += rest
    return [*kinds, *ONCE, *MORE, *rest][:num]


def soak(program: Program, todo: list[Operation], start: int) -> tuple[Counter[str], Counter[str]]:
    """What a rank holds after the first ``start`` operations, and after all of them."""
    this = Soak(program)
    before: Counter[str] = Counter()
    for number, (name, *arguments) in enumerate(todo):
        if number == start:
            fill_records()
            before = this_count(this)
        try:
            getattr(this, name)(*arguments)
        except BaseException as error:
            error.add_note(f"in operation {number}: {name}{tuple(arguments)}")
            raise
    after = this_count(this)
    assert_same_parameters(this.model, this.plain)
    assert_all_same(buffers(this.model), buffers(this.plain), "buffer")
    return before, after


def this_count(this: Soak) -> Counter[str]:
    this.rest()
    dist.barrier()
    count()
    return count()
