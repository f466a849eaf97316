"""Random training programs, run by a sharded model and by the plain one beside it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    optim,
    replicate,
)
from fsdp2.checkpoint import Checkpointer, load_model, save_model
from fsdp2.runtime.gather_budget import GatherBudgetError
from fsdp2.runtime.unit import units_in
from harness import cached_mesh, shared_folder
from random_models import (
    HOOK_FAULTS,
    WIDTH,
    Layer,
    Node,
    PlannedError,
    add_faulty_hook,
    build,
    nodes,
)
from reference import (
    TOLERANCE,
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    buffers,
    whole,
)

# With a `CommPolicy`, for what comes to nearly nothing in a sum, too: it shows what is lost.
NARROW = 0.25
Operation = tuple[Any, ...]  # the name of a method of `Run`, and its arguments


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, how it is sharded, and what is done with it."""

    model: Layer
    world_size: int
    replicas: int
    options: dict[str, Any]
    placement: str
    operations: tuple[Operation, ...]
    first: tuple[str, str] = ("sgd", "plain")  # the optimizer before the first forward
    shards: int = 1  # into how many parts a mesh of three dims cuts the shards
    deterministic: bool = False  # new memory is filled with NaN then


def run(program: Program) -> None:
    """The body of the test, on every rank."""
    torch.manual_seed(0)
    plain = build(program.model)
    tolerances: dict[torch.dtype, float] = {}
    if any(p.dtype == torch.float32 for p in plain.parameters()):
        tolerances = dict.fromkeys(TOLERANCE, 1e-4)  # of sums over ranks, which reaches the rest
    if program.options.get("mp_policy", MixedPrecisionPolicy()) != MixedPrecisionPolicy():
        tolerances = dict.fromkeys(TOLERANCE, 1e-4)
    if program.options.get("comm_policy") is not None:
        tolerances = dict.fromkeys(TOLERANCE, NARROW)
    with mock.patch.dict(TOLERANCE, tolerances), mock.patch.dict(os.environ):
        if program.deterministic:
            fsdp2.deterministic()
        go_through(program, plain)


def go_through(program: Program, plain: Node) -> None:
    this = Run(shard(program, copy.deepcopy(plain)), plain, program.first)
    for number, (name, *arguments) in enumerate(program.operations):
        try:
            getattr(this, name)(*arguments)
        except BaseException as error:
            error.add_note(f"in operation {number}: {name}{tuple(arguments)}")
            raise
    this.step("reduce")
    with this.sharded_shown():
        assert_same_parameters(this.model, this.plain)
        assert_all_same(buffers(this.model), buffers(this.plain), "buffer")
        assert_equal_replicas(this.model)


def assert_equal_replicas(model: nn.Module) -> None:
    """What every rank holds whole has the same bits on all of them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if all(isinstance(placement, Replicate) for placement in parameter.placements):
            own = parameter.to_local().detach().contiguous()
            found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(found, own)
            assert all(torch.equal(each, own) for each in found), name


# ------------------------------------------------------------------------------- sharding


def shard(program: Program, model: Node) -> Node:
    shape = (program.replicas, program.world_size // program.replicas)
    if program.replicas > 1:
        mesh = cached_mesh(*shape, names=("replicate", "shard"))
    else:
        mesh = cached_mesh(program.world_size)
    over: dict[str, Any] = {"mesh": mesh}
    whole_over = over
    if program.shards > 1:
        names = ("replicate", "outer", "inner")
        mesh = cached_mesh(shape[0], program.shards, shape[1] // program.shards, names=names)
        dims = DataParallelMeshDims(names[1:], names[0] if program.replicas > 1 else None)
        over = {"mesh": mesh, "dp_mesh_dims": dims}
        whole_over = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate=names)}
    options = {**over, **program.options}
    # Only the root's output goes to a loss: what others return is computed with in their dtype.
    inner = dict(options)
    if "mp_policy" in options:
        inner["mp_policy"] = dataclasses.replace(options["mp_policy"], output_dtype=None)
        whole_over = {**whole_over, "mp_policy": inner["mp_policy"]}

    def place(parameter: nn.Parameter) -> Any:
        if program.placement == "last dim" and parameter.ndim > 1:
            return Shard(parameter.ndim - 1)
        if program.placement == "small whole" and parameter.numel() < 10:
            return Replicate()
        return None

    # A module that several units contain needs a unit of its own.
    holders = Counter(id(node.own) for node in [*nodes(model), model])
    for node in nodes(model):
        if holders[id(node.own)] > 1 and not isinstance(node.own, FSDPModule):
            fully_shard(node.own, shard_placement_fn=place, **inner)
    done: set[Node] = set()
    for group in groups(model):
        if done.intersection(group):
            continue
        done.update(group)
        layer = group[0].layer
        if layer.unit == "replicated":
            replicate(group[0], **whole_over)
            continue
        reshard = layer.reshard
        if type(reshard) is int and shape[1] % reshard:
            reshard = True
        target = group[0] if len(group) == 1 else group
        fully_shard(target, reshard_after_forward=reshard, shard_placement_fn=place, **inner)
    return fully_shard(model, shard_placement_fn=place, **options)


def groups(model: Node) -> Iterator[list[Node]]:
    """The nodes that become units, inner ones first; those of one unit together."""
    for node in [*nodes(model), model]:
        siblings = list(node.parts())
        for number, part in enumerate(siblings):
            if part.layer.unit == "with the next":
                yield siblings[number : number + 2]
            elif part.layer.unit:
                yield [part]


# ---------------------------------------------------------------------------- operations


class Run:
    """Both models in the middle of a program; every method is an operation."""

    def __init__(
        self, model: Node, plain: Node, optimizer: tuple[str, str] = ("sgd", "plain")
    ) -> None:
        self.model, self.plain = model, plain
        self.count = 0
        self.keeps = False  # what is gathered, after backward
        self.had_backward = False
        self.optimizer(*optimizer)

    # What operations are made of.

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

    # Steps.

    def step(self, *micro: str, clip: bool = False, to_none: bool = True) -> None:
        """Micro-batches with or without a reduction, the last with; then the optimizer."""
        assert isinstance(self.model, FSDPModule)
        for mode in micro:
            context: Any = contextlib.nullcontext()
            if mode == "no_sync":
                context = self.model.no_sync()
            self.model.set_requires_gradient_sync(mode != "skip")
            if mode == "sharded":
                self.model.set_accumulate_sharded(True)
                self.model.set_requires_gradient_sync(False)
            with context:
                self.backward(*self.forward(*self.batch()))
            if mode == "reduce" and self.had_backward:
                self.after_backward()
            self.model.set_accumulate_sharded(False)
            self.model.set_requires_gradient_sync(True)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if micro and not losses[0].requires_grad:
            self.zero()  # without a backward nothing reduces what micro-batches have left
        self.after_backward()
        if clip:
            with self.sharded_shown():
                norms = [fsdp2.clip_grad_norm_(each.parameters(), 0.1) for each in self.both()]
            assert_same(whole(norms[1]), whole(norms[0]), "norm")
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        with self.sharded_shown():
            assert_same_parameters(self.model, self.plain)

    def step_with(self, clip: bool, to_none: bool) -> None:
        self.step("reduce", clip=clip, to_none=to_none)

    def optimizer(self, kind: str, wrapped: str) -> None:
        """New ones."""
        makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1),
            # (A large eps: dividing by their own size makes rounding of tiny gradients a step.)
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=0.1),
        }
        wrap = {"plain": lambda o: o, "local": optim.local_step, "flat": optim.flat_step}[wrapped]
        make = makes[kind]
        self.zero()
        self.free()
        self.make_ours = lambda: wrap(make(self.model.parameters()))
        self.optimizers = [make(self.plain.parameters()), self.make_ours()]

    # Other forwards and backwards. None leaves gradients.

    def forwards(self, num: int, order: str) -> None:
        """Several forwards, then their backwards: as one, in turn or in reverse."""
        losses = [self.forward(*self.batch()) for _ in range(num)]
        if order == "sum":
            losses = [tuple(torch.stack(mine).sum() for mine in zip(*losses, strict=True))]
        for pair in losses if order == "in turn" else losses[::-1]:
            self.backward(*pair)
        self.after_backward()
        self.zero()

    def twice(self) -> None:
        """Two backwards of one graph."""
        losses = self.forward(*self.batch())
        if losses[0].requires_grad:
            for loss in losses:
                loss.backward(retain_graph=True)
        self.backward(*losses)
        self.after_backward()
        self.zero()

    def partial(self, number: int) -> None:
        """A loss of what a unit in the middle returns."""
        chosen = self.node(number, units=True)[0]
        around = [n for n in (*nodes(self.plain), self.plain) if chosen in [*n.modules()][1:]]
        if any(node.layer.recomputed for node in around):
            # Refused: to recompute, backward would enter a unit in the middle, whose output the
            # loss does not depend on.
            return
        seen: list[list[Tensor]] = [[], []]
        handles = [
            node.register_forward_hook(lambda _m, _a, out, into=into: into.append(out))
            for node, into in zip(self.node(number, units=True), seen, strict=True)
        ]
        self.forward(*self.batch())
        for handle in handles:
            handle.remove()
        assert len(seen[0]) == len(seen[1])
        if seen[0]:
            self.backward(*(outputs[-1].square().mean() for outputs in seen))
            self.after_backward()
        self.zero()

    def inputs(self) -> None:
        """Gradients of the input, alone."""
        self.zero()
        x, step = self.batch()
        found = []
        for each in self.both():
            mine = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad((each(mine, step) - 1).square().mean(), mine)
            found.append(grad)
        assert_same(found[1], found[0], "gradient of the input")
        assert all(p.grad is None for p in self.model.parameters())

    def evaluate(self, mode: str) -> None:
        """A forward without gradients."""
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        for each in self.both():
            each.eval()
        with context[mode]() if mode in context else contextlib.nullcontext():
            self.forward(*self.batch())
        for each in self.both():
            each.train()

    def drop(self) -> None:
        """A forward whose output nobody uses."""
        self.forward(*self.batch())

    def alone(self, number: int, method: str) -> None:
        """A module in the middle is called by itself."""
        pair = self.node(number, units=True)
        inside = [node.own for node in (*nodes(pair[0]), pair[0])]
        everywhere = [node.own for node in (*nodes(self.plain), self.plain)]
        weights = [id(getattr(own, "weight", own)) for own in everywhere]
        if any(weights.count(id(getattr(own, "weight", own))) > 1 for own in inside):
            return  # they may belong to a unit around this module, and such calls are refused
        x, step = self.batch()
        if method == "encode" and isinstance(pair[1], FSDPModule):
            fsdp2.register_fsdp_forward_method(pair[1], "encode")
        call = "__call__" if method == "forward" else method
        # (In fp64: a unit inside of the model returns what it computes in.)
        losses = [getattr(each, call)(x, step).double().square().mean() for each in pair]
        assert_same(losses[1], losses[0], "loss of a module alone")
        self.backward(*losses)
        self.after_backward()
        self.zero()

    def hooked(self) -> None:
        """Hooks of the user's on parameters: one changes gradients, one is told of them."""
        told: tuple[set[str], set[str]] = (set(), set())
        handles = []
        with self.sharded_shown():
            for seen, each in zip(told, self.both(), strict=True):
                for name, parameter in each.named_parameters():
                    if parameter.requires_grad:
                        note = functools.partial(lambda names, name, _: names.add(name), seen, name)
                        handles.append(parameter.register_hook(lambda grad: grad * 0.5))
                        handles.append(parameter.register_post_accumulate_grad_hook(note))
        self.backward(*self.forward(*self.batch()))
        self.after_backward()
        assert told[1] == told[0]
        for handle in handles:
            handle.remove()
        self.zero()

    def divide(self, factor: float) -> None:
        """Gradients are sums over ranks divided by another number than that of the ranks."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_gradient_divide_factor(factor)
        self.backward(*self.forward(*self.batch()))
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                parameter.grad *= dist.get_world_size() / factor
        self.after_backward()
        for unit in units:
            unit.set_gradient_divide_factor(dist.get_world_size())
        self.zero()

    def between(self, mode: str, what: Operation) -> None:
        """Something is done after a micro-batch that reduces nothing, before the one that does."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        self.model.set_accumulate_sharded(mode == "sharded")
        self.backward(*self.forward(*self.batch()))
        self.do(what)
        self.model.set_accumulate_sharded(False)
        self.model.set_requires_gradient_sync(True)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if losses[0].requires_grad:
            self.after_backward()
        self.zero()

    def before_backward(self, what: Operation) -> None:
        """Something is done between a forward and its backward."""
        losses = self.forward(*self.batch())
        self.do(what)
        self.backward(*losses)
        self.after_backward()
        self.zero()

    def do(self, what: Operation) -> None:
        name, *arguments = what
        getattr(self, name)(*arguments)

    def look(self, kind: str) -> None:
        """Weights are read."""
        full = kind == "whole"
        found = fsdp2.full_state_dict(self.model) if full else self.model.state_dict()
        if full and dist.get_rank():
            return  # rank 0 has them
        for name, value in self.plain.state_dict().items():
            if name in dict(self.plain.named_parameters()):
                assert_same(found[name] if full else whole(found[name]), value, name)

    def observe(self, what: Operation) -> None:
        """A step under a profile, perhaps with more, and what it says of the model."""
        with fsdp2.profile(self.model) as profile:
            self.do(what)
            self.step("reduce")
        assert str(profile)
        assert str(fsdp2.explain(self.model))

    def budget(self) -> None:
        """The least limit on gathered bytes that works, as errors tell it."""
        assert isinstance(self.model, FSDPModule)
        self.free()
        limit: int | None = 1
        for _ in range(4):
            self.model.set_max_gathered_bytes(limit)
            try:
                self.step("reduce")
                break
            except GatherBudgetError as error:
                limit = error.least_bytes
                self.zero()
                # The plain model has been through this forward.
                for buffer, expected in zip(
                    self.model.buffers(), self.plain.buffers(), strict=True
                ):
                    buffer.copy_(expected)
        # Other ways through the model may need more.
        self.model.set_max_gathered_bytes(10**6)

    def resume(self) -> None:
        """Model and optimizer go to a checkpoint, and come back into a new optimizer."""
        model, old = self.model, self.optimizers[1]
        self.free()
        with shared_folder() as folder, Checkpointer(folder) as checkpointer:
            checkpointer.save(1, model=model, optimizer=old).wait()
            dist.barrier()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            self.optimizers[1] = self.make_ours()
            checkpointer.load(model=model, optimizer=self.optimizers[1], random_state=False)
        assert_same_parameters(model, self.plain)
        self.step("reduce")

    def fail(self, number: int, place: str, kind: str) -> None:
        """An exception in forward or backward; all gradients are dropped after it."""
        batch = self.batch()
        raised = []
        for each, node in zip(self.both(), self.node(number), strict=True):
            node.fault = f"{place}/{kind}"
            handle = add_faulty_hook(node, place) if place in HOOK_FAULTS else None
            try:
                loss = (each(*batch) - 1).square().mean()
                if loss.requires_grad:
                    loss.backward()
            except (PlannedError, KeyboardInterrupt):
                raised.append(each)
            node.fault = ""
            if handle is not None:
                handle.remove()
        assert len(raised) in (0, 2)
        self.zero()

    # What happens between steps.

    def freeze(self, number: int) -> None:
        """A parameter is frozen, or thawed."""
        for each in self.both():
            parameters = list(each.parameters())
            if parameters:
                chosen = parameters[number % len(parameters)]
                chosen.requires_grad_(not chosen.requires_grad)

    def state_dict(self, kind: str) -> None:
        """Weights go out, are overwritten, and come back."""
        model = self.model
        full = kind == "whole"
        state = fsdp2.full_state_dict(model) if full else model.state_dict()
        state = {name: value.clone() for name, value in state.items()}
        with shared_folder() as folder:
            if kind == "files":
                save_model(model, f"{folder}/model").wait()
                dist.barrier()
            with self.sharded_shown(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            if kind == "files":
                load_model(model, f"{folder}/model")
            elif full:
                fsdp2.load_full_state_dict(model, state)
            else:
                model.load_state_dict(state, assign=False)
        if kind in ("whole", "files"):
            for buffer in self.plain.buffers():
                dist.broadcast(buffer, 0)  # whose buffers it had
        with self.sharded_shown():
            assert_same_parameters(model, self.plain, bitwise=False)

    def copy(self) -> None:
        """A deep copy takes its place."""
        self.model = copy.deepcopy(self.model)
        self.optimizer("sgd", "plain")

    def setting(self, method: str, value: Any) -> None:
        getattr(self.model, method)(value)
        if method == "set_reshard_after_backward":
            self.keeps = not value

    def node_setting(self, number: int, method: str, value: Any) -> None:
        node = self.node(number)[1]
        if isinstance(node, FSDPModule):
            getattr(node, method)(value)

    def merge(self, min_bytes: int) -> None:
        self.step("reduce")  # not between a forward and a backward that never comes
        fsdp2.merge_units(self.model, min_bytes=min_bytes)

    def gather(self, number: int, frees: bool) -> None:
        """By hand, as whoever looks at whole weights does."""
        node = self.node(number)[1]
        if isinstance(node, FSDPModule):
            node.unshard()
            if frees:
                node.reshard()
        if not frees:
            self.evaluate("no_grad")
            self.free()

    def functional(self) -> None:
        """One forward with other weights."""
        owns = [node.own for node in [*nodes(self.plain), self.plain]]
        if len({*owns}) < len(owns):
            return  # torch leaves the other weights in a module with two names, also in plain ones
        batch = self.batch()
        outputs = []
        for each in self.both():
            others = {name: whole(p) * 0.9 for name, p in each.named_parameters()}
            with torch.no_grad():
                outputs.append(torch.func.functional_call(each, others, batch))
        assert_same(outputs[1], outputs[0], "output of other weights")

    def change(self, number: int) -> None:
        """The user writes into a sharded parameter."""
        self.free()
        with torch.no_grad():
            for each in self.both():
                parameters = list(each.parameters())
                if parameters:
                    parameters[number % len(parameters)].mul_(0.5)

    def move(self) -> None:
        for each in self.both():
            each.to("cpu")
