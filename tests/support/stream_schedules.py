"""Generated models and trainings for the checker of stream order: any nesting, options and events.

A `Plan` comes from a seed; `run` trains it on the CPU with a fake process group (one process, any
number of ranks) while `fsdp2.testing.recording` writes the trace. Values are wrong then, and of no
interest: only what is read, written, allocated and freed, and in which order.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fsdp2.sharding.gathered
from fsdp2 import CommPolicy, CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.testing import Recorder, UsedAfterFreeError, recording
from fsdp2.testing.device import SimulatedDevice

DIM = 4
VOCABULARY = 8


class Boom(Exception):
    """Raised inside of a generated forward or backward."""


# -- plans ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer and those inside it, called one after the other."""

    width: int = 8
    unit: bool = True
    repeats: int = 1
    recomputed: bool = False
    frozen: bool = False  # with lora: apart from that
    lora: bool = False
    tied: bool = False  # `up` is that of the layer before
    inside: tuple[Layer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Micro:
    """One forward and backward."""

    order: tuple[int, ...] | None = None  # of the layers; None: as they are
    sync: bool = True
    all_reduce: bool = True
    keep: bool = False  # gathered after backward
    last: bool = True  # set_is_last_backward
    fails: str | None = None
    evaluates: bool = False  # forward only
    by_hand: str | None = None
    looks: bool = False  # at the parameters between forward and backward
    rewrites: bool = False  # those that are sharded then
    meddles: str | None = None  # then too, with what is kept: "writes" or "unkeeps" it
    wastes: bool = False  # calls the first layer once more, for nothing
    elsewhere: bool = False  # backward is called on another stream


@dataclasses.dataclass(frozen=True)
class Step:
    """Some micro-batches and an optimizer step."""

    micros: tuple[Micro, ...] = (Micro(),)
    event: bool = False
    set_to_none: bool = True
    keep_gradient: bool = False
    moves: bool = False  # as model.to(device) does: storages are made anew
    reloads: bool = False
    clips: bool = False
    writes_frozen: bool = False  # their shards, beside the optimizer
    thaws: bool = False  # or freezes again, and another choice of what is kept
    pipeline: str = ""  # instead of micro-batches; see `Training.pipeline`


@dataclasses.dataclass(frozen=True)
class Plan:
    """One training."""

    layers: tuple[Layer, ...] = (Layer(), Layer(), Layer())
    tokens: bool = False
    head_is_tied: bool = False
    head_is_embedding: bool = False  # its weight, used once more
    freezes_scale: bool = False  # then only inner layers make the first activations need gradients
    freezes_embedding: bool = False
    mesh: tuple[int, ...] = (2,)
    reshard: bool | int | None = None
    precision: str = "full"
    offload: bool = False
    direct_min_bytes: int = 60
    own_pieces: bool = False
    prefetch: str = ""
    distance: int = 1
    factor: float | None = None
    optimizer: str = "sgd"
    in_backward: bool = False
    hook: str = ""  # on reductions: "inline", or on a "stream" of its own
    custom: bool = False  # collectives of the user's
    max_buffers: int | None = None
    keep_frozen: int | None = None  # bytes
    accumulates_sharded: bool = False
    policy: str = ""  # of what is sent in fewer bytes
    tight: bool = False  # the least budget of gathered bytes
    host: str = ""  # "": streams; "group" or "exchange": the host-ordered transports
    steps: tuple[Step, ...] = (Step(), Step(), Step())


# -- models --------------------------------------------------------------------------------------


class _Fails(torch.autograd.Function):
    """Identity; raises in backward if told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, control: dict) -> Tensor:
        ctx.control = control
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.control["fails"] == "backward":
            raise Boom
        return grad, None


class _OnForwardsStream(torch.autograd.Function):
    """Identity on a loss: the rest of its backward is on the simulated stream of its forward.

    As autograd does with real ones, which calls what ends a backward on the caller's stream.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, device: SimulatedDevice) -> Tensor:
        ctx.device, ctx.stream = device, device.current_stream()
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        device, stream, caller = ctx.device, ctx.stream, ctx.device.current_stream()

        def go_back() -> None:
            device._current = caller
            caller.wait_stream(stream)

        stream.wait_stream(caller)
        device._current = stream
        torch.autograd.Variable._execution_engine.queue_callback(go_back)
        return grad, None


class Node(nn.Module):
    """A `Layer` as a module."""

    def __init__(self, layer: Layer, control: dict, before: Node | None) -> None:
        super().__init__()
        self.layer, self.control = layer, control
        self.up = nn.Linear(DIM, layer.width)
        if layer.tied and before is not None and before.layer.width == layer.width:
            self.up.weight = before.up.weight
        self.down = nn.Parameter(torch.randn(DIM, layer.width) / 4)
        if layer.lora:
            self.left = nn.Parameter(torch.randn(2, DIM))
            self.right = nn.Parameter(torch.randn(layer.width, 2))
        if layer.frozen or layer.lora:
            self.up.requires_grad_(False)
            self.down.requires_grad_(not layer.frozen)
        self.inside = nn.ModuleList(make_nodes(layer.inside, control))

    def body(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.layer.lora:
            hidden = hidden + x @ self.left.t() @ self.right.t()
        x = x + hidden.tanh() @ self.down.t()
        for module in self.inside:
            x = module(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layer.repeats):
            if self.layer.recomputed:
                result = checkpoint(self.body, x, use_reentrant=False)
                assert isinstance(result, Tensor)
                x = result
            else:
                x = self.body(x)
        return x


def make_nodes(layers: tuple[Layer, ...], control: dict) -> list[Node]:
    nodes: list[Node] = []
    for layer in layers:
        nodes.append(Node(layer, control, nodes[-1] if nodes else None))
    return nodes


class Net(nn.Module):
    """The root: layers, perhaps between an embedding and a head."""

    def __init__(self, plan: Plan, control: dict) -> None:
        super().__init__()
        self.control = control
        self.embedding = nn.Embedding(VOCABULARY, DIM) if plan.tokens else None
        self.scale = nn.Parameter(torch.ones(DIM), requires_grad=not plan.freezes_scale)
        self.layers = nn.ModuleList(make_nodes(plan.layers, control))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head_is_embedding = plan.tokens and plan.head_is_embedding
        if self.embedding is not None:
            self.embedding.requires_grad_(not plan.freezes_embedding)
        if plan.tokens and plan.head_is_tied:
            assert self.embedding is not None
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = x * self.scale
        order = self.control["order"] or range(len(self.layers))
        for number, index in enumerate(order):
            if number == len(order) // 2:
                if self.control["fails"] == "forward":
                    raise Boom
                if torch.is_grad_enabled():
                    x = _Fails.apply(x, self.control)
                if self.control["wastes"]:  # (backward may come to it for as long as it is held)
                    self.control["wasted"] = self.layers[0](x)
            x = self.layers[index](x)
        if self.head_is_embedding:
            assert self.embedding is not None
            return nn.functional.linear(x, self.embedding.weight)
        return self.head(x)


POLICIES = {
    "gather": CommPolicy(gather=torch.int8, secondary=torch.float8_e4m3fn, block=16),
    "reduce": CommPolicy(reduce=torch.int8, block=16, error_feedback=True),
    "both": CommPolicy(torch.bfloat16, torch.bfloat16, ranks_per_node=2, secondary=torch.bfloat16),
}


def sharded(plan: Plan, control: dict) -> Any:
    """The model of a plan, with its units."""
    model = Net(plan, control)
    options: dict[str, Any] = {
        "mesh": mesh_of(plan.mesh),
        "reshard_after_forward": plan.reshard,
        "direct_min_bytes": plan.direct_min_bytes,
        "mp_policy": {
            "full": MixedPrecisionPolicy(),
            "low": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
            "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "reduce": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        }[plan.precision],
    }
    if plan.policy:
        options["comm_policy"] = POLICIES[plan.policy]
    if plan.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    nodes = [module for module in model.modules() if isinstance(module, Node)]
    units = [node for node in nodes if node.layer.unit]
    for node in reversed(units):
        fully_shard(node, **options)
    fully_shard(model, **options)
    for i, node in enumerate(units):
        unit: Any = node
        if "f" in plan.prefetch:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + plan.distance])
        if "b" in plan.prefetch:
            unit.set_modules_to_backward_prefetch(units[max(0, i - plan.distance) : i][::-1])
    if plan.factor is not None:
        model.set_gradient_divide_factor(plan.factor)  # type: ignore[operator]
    return model


_SHAPES = [(1,), (2,), (4,), (2, 1), (2, 2)]
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of this shape over the first ranks of a fake world of four; this is rank 0."""
    if not dist.is_initialized():
        _meshes.clear()  # of a group that is no more
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        # All at once: DTensor's caches outlive the world and may answer with the mesh of an earlier
        # one, which is equal. Groups have numbers for names; made in one order, they are the same.
        for each in _SHAPES:
            ranks = torch.arange(torch.Size(each).numel()).view(each)
            names = ("replicate", "shard")[-len(each) :]
            _meshes[each] = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    return _meshes[shape]


# -- running -------------------------------------------------------------------------------------


class Training:
    """Runs the steps of a plan; everything that it holds dies with it."""

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self.plan, self.recorder = plan, recorder
        self.control: dict[str, Any] = {"order": None, "fails": None, "wastes": False}
        self.model = sharded(plan, self.control)
        self.model.set_accumulate_sharded(plan.accumulates_sharded)
        if plan.keep_frozen is not None:
            self.model.set_keep_frozen_gathered(plan.keep_frozen)
        if plan.tight:
            self.model.set_max_gathered_bytes(1)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.frozen = [p for p in self.model.parameters() if not p.requires_grad]
        self.optimizer = _OPTIMIZERS[plan.optimizer](params)
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []  # what evaluations and looks gave
        self._choose()
        if plan.in_backward:
            for param in params:
                param.register_post_accumulate_grad_hook(_step_at_once)

    def _choose(self) -> None:
        plan = self.plan
        for unit in (module for module in self.model.modules() if isinstance(module, FSDPModule)):
            if plan.hook:
                own = plan.hook == "stream" and not plan.host
                stream = self.recorder.device.Stream("hook") if own else None
                unit.set_all_reduce_hook(lambda grad: grad.mul_(2), stream=stream)
            if plan.max_buffers is not None:
                unit.set_reduce_scatter_max_input_buffers(plan.max_buffers)
            if plan.custom and not plan.host:
                unit.set_custom_all_gather(_Gather())
                unit.set_custom_reduce_scatter(_Scatter())

    def step(self, step: Step) -> None:
        if step.moves:
            self.model._apply(torch.clone)
        if step.thaws:
            for param in self.frozen:
                param.requires_grad_(not param.requires_grad)
            if self.plan.keep_frozen:  # with less room
                self.model.set_keep_frozen_gathered(self.plan.keep_frozen // 2)
        if step.reloads:
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(state, assign=True)
        if step.pipeline:
            self.pipeline(step.pipeline)
        for micro in () if step.pipeline else step.micros:
            with suppress(Boom):
                for _ in range(20):
                    try:
                        self.micro(micro)
                        break
                    except RuntimeError as error:
                        least = re.search(r"The least budget that works is (\d+)", str(error))
                        if least is not None:
                            self.model.reset_iter_state()
                            self.model.set_max_gathered_bytes(int(least[1]))
                        # The first forward after it says so, and the next one runs.
                        elif "in the middle of an accumulation" not in str(error):
                            raise
        if self.plan.in_backward:
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if step.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if step.keep_gradient and grads:
            self.kept += grads[:1]
            self.recorder.hold("kept by the user", [grads[0]._local_tensor])
        del grads
        if step.writes_frozen:
            self.write_frozen()
        self.optimizer.step()
        if step.event and not self.plan.host:
            event = self.recorder.device.Event()
            event.record()
            self.model.set_post_optim_event(event)
        self.model.zero_grad(set_to_none=step.set_to_none or bool(self.kept))

    @torch.no_grad()
    def write_frozen(self) -> None:
        for param in self.frozen:
            param.mul_(0.5)

    def micro(self, micro: Micro) -> None:
        model = self.model
        self.control.update(order=micro.order, fails=micro.fails, wastes=micro.wastes, wasted=None)
        model.set_requires_gradient_sync(micro.sync)
        if micro.sync:
            model.set_requires_all_reduce(micro.all_reduce)
        model.set_reshard_after_backward(not micro.keep)
        model.set_is_last_backward(micro.last)
        units = [m for m in model.modules() if hasattr(m, "unshard")]
        if micro.by_hand == "async":
            for unit in units[:3]:
                unit.unshard(async_op=True)
        elif micro.by_hand is not None:
            units[-1].unshard()
            units[-1].reshard()
        shape = (2, 3) if self.plan.tokens else (2, 3, DIM)
        x = torch.randint(0, VOCABULARY, shape) if self.plan.tokens else torch.randn(shape)
        if micro.evaluates:
            with torch.no_grad():
                self.seen.append(model(x))
            return
        loss = model(x).square().mean()
        if micro.looks:
            with torch.no_grad():
                for param in model.parameters():
                    self.seen.append(getattr(param, "_local_tensor", param).sum())
        # Gathers that the user has begun may read them still, and so may copies from the host.
        # Secondary shards are there for one backward: what is written to them is lost.
        orderly = micro.by_hand is None and not self.plan.offload and self.plan.reshard != 2
        if micro.rewrites and orderly:
            with torch.no_grad():
                for param in model.parameters():
                    if isinstance(param, DTensor):
                        param.mul_(1.5)
        if micro.meddles == "writes":
            self.write_frozen()
        if micro.meddles == "unkeeps":
            model.set_keep_frozen_gathered(0)
        try:
            self.backward(loss, micro)
        finally:
            if micro.meddles == "unkeeps":
                model.set_keep_frozen_gathered(self.plan.keep_frozen)

    def backward(self, loss: Tensor, micro: Micro) -> None:
        if not micro.elsewhere or self.plan.host:
            loss.backward()
            return
        device = self.recorder.device
        if isinstance(device, SimulatedDevice):
            loss = _OnForwardsStream.apply(loss, device)
        compute, stream = device.current_stream(), device.Stream("elsewhere")
        stream.wait_stream(compute)
        with device.stream(stream):
            loss.backward()
            if micro.last and micro.sync and micro.all_reduce:  # there, gradients may be read
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                self.seen += [grad._local_tensor.sum() for grad in grads]
        compute.wait_stream(stream)

    def pipeline(self, actions: str) -> None:
        """A stage of a zero-bubble schedule: gradients of weights are computed apart, later.

        Args:
            actions: for each micro-batch F (forward), then I (the gradients of its input), then W
                (those of its weights); each kind in the order of micro-batches.
        """
        forwards: deque[tuple[Tensor, Tensor]] = deque()
        waiting: deque[Any] = deque()
        for action in actions:
            if action == "F":
                x = torch.randn(2, 3, DIM, requires_grad=True)
                forwards.append((x, self.model(x).square().mean()))
                continue
            self._say_last(False)
            if action == "I":
                x, loss = forwards.popleft()
                try:
                    _, parts = stage_backward_input([loss], None, [x], self.model.parameters())
                except RuntimeError as error:  # of its own
                    raise error.__cause__ or error from None
                waiting.append(parts)
            else:
                stage_backward_weight(self.model.parameters(), waiting.popleft())
        self._say_last(True)
        state = self.model._get_fsdp_state()
        for unit_state in state._state_ctx.all_states:
            for group in unit_state._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()

    def _say_last(self, last: bool) -> None:
        self.model.set_is_last_backward(last)
        self.model.set_reshard_after_backward(last)
        self.model.set_requires_gradient_sync(last)


class _Buffers:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _Gather(_Buffers):
    def __call__(self, **arguments: Any) -> Any:
        return dist.all_gather_into_tensor(**arguments)


class _Scatter(_Buffers):
    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, **options)


@torch.no_grad()
def _step_at_once(param: Tensor) -> None:
    assert param.grad is not None
    param.sub_(param.grad, alpha=0.01)
    param.grad = None


_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


@contextmanager
def traced(plan: Plan) -> Iterator[Recorder]:
    """Run a plan; the trace ends where an operation would have used memory that is not there."""
    pieces = 64 if plan.own_pieces else fsdp2.sharding.gathered.OWN_PIECE_MIN_BYTES
    with (
        mock.patch.object(fsdp2.sharding.gathered, "OWN_PIECE_MIN_BYTES", pieces),
        recording(
            host_ordered=bool(plan.host), offload=plan.offload, exchange=plan.host == "exchange"
        ) as recorder,
    ):
        mesh_of(plan.mesh)
        training = Training(plan, recorder)
        try:
            for number, step in enumerate(plan.steps):
                recorder.mark("step begins", str(number))
                training.step(step)
        except UsedAfterFreeError:
            pass  # the checker reports it
        yield recorder


# -- generating ----------------------------------------------------------------------------------


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(seed)

    def chance(probability: float) -> bool:
        return draw.random() < probability

    layers = tuple(_layer(draw, 2) for _ in range(draw.randint(1, 4)))
    tokens = chance(0.4)
    mesh = draw.choice([(2,), (2,), (4,), (2, 2), (2, 2), (1,), (2, 1)])  # of `_SHAPES`
    reshards: list[bool | int | None] = [None, None, True, False]
    if mesh[-1] == 4:
        reshards += [2, 2, 2]
    head_is_tied, head_is_embedding = tokens and chance(0.4), tokens and chance(0.2)
    plan = Plan(
        layers=layers,
        tokens=tokens,
        head_is_tied=head_is_tied,
        head_is_embedding=head_is_embedding,
        freezes_scale=chance(0.2),
        freezes_embedding=chance(0.3) and not head_is_tied and not head_is_embedding,
        mesh=mesh,
        reshard=draw.choice(reshards),
        precision=draw.choice(["full", "full", "low", "mixed", "reduce"]),
        offload=mesh[-1] > 1 and chance(0.2),
        direct_min_bytes=draw.choice([0, 60, 130, 10**9]),
        own_pieces=chance(0.5),
        prefetch=draw.choice(["", "", "f", "b", "fb"]),
        distance=draw.randint(1, 2),
        factor=draw.choice([None, None, None, 3.0]),
        optimizer=draw.choice(list(_OPTIMIZERS)),
        in_backward=chance(0.1),
        hook=draw.choice(["", "", "", "inline", "stream" if len(mesh) == 1 else "inline"]),
        custom=chance(0.15),
        max_buffers=draw.choice([None, None, None, 1, 3]),
        keep_frozen=draw.choice([None, None, 10**9, 200]),
        steps=tuple(_step(draw, len(layers)) for _ in range(draw.randint(2, 4))),
    )
    plan = used_once(plan) if plan.in_backward else plan
    plan = meddling(plan, draw) if plan.keep_frozen == 10**9 else plan
    return calling_elsewhere(plan, draw)


SCHEDULES = ("FIW", "FFIIWW", "FIFIWW", "FIWFIW", "FFIFIWIWW", "FIWFFIIWW")


def pipelined(plan: Plan, seed: int) -> Plan:
    """The plan, with the steps of a pipeline's stage.

    Nothing is recomputed, no layer runs twice and none is tied: of the schedules that compute the
    gradients of weights apart torch finds no weights there.
    """
    draw = random.Random(seed)

    def simple(layer: Layer) -> Layer:
        inside = tuple(map(simple, layer.inside))
        return dataclasses.replace(layer, repeats=1, recomputed=False, tied=False, inside=inside)

    steps = tuple(
        dataclasses.replace(step, pipeline=draw.choice(SCHEDULES), thaws=False)
        for step in plan.steps
    )
    return dataclasses.replace(
        plan,
        layers=tuple(map(simple, plan.layers)),
        tokens=False,
        in_backward=False,
        accumulates_sharded=draw.random() < 0.5,
        steps=steps,
    )


def meddling(plan: Plan, draw: random.Random) -> Plan:
    """Change what is kept between forward and backward, which nobody may with other parameters,
    nor on the host, which may still be copying offloaded shards."""
    kinds = [None, None, "unkeeps" if plan.offload else "writes", "unkeeps"]

    def meddle(micro: Micro) -> Micro:
        return dataclasses.replace(micro, meddles=draw.choice(kinds))

    steps = [
        dataclasses.replace(s, thaws=False, micros=tuple(map(meddle, s.micros))) for s in plan.steps
    ]
    return dataclasses.replace(plan, steps=tuple(steps))


def calling_elsewhere(plan: Plan, draw: random.Random) -> Plan:
    """Call some backwards on another stream."""

    def call(micro: Micro) -> Micro:
        return dataclasses.replace(micro, elsewhere=draw.random() < 0.2)

    steps = [dataclasses.replace(s, micros=tuple(map(call, s.micros))) for s in plan.steps]
    return dataclasses.replace(plan, steps=tuple(steps))


def used_once(plan: Plan) -> Plan:
    """Every unit runs once in a forward, and every backward waits for its reductions: an optimizer
    in backward would change weights that an earlier call, or the next backward, still needs."""

    def once(layer: Layer) -> Layer:
        return dataclasses.replace(layer, repeats=1, inside=tuple(map(once, layer.inside)))

    def distinct(micro: Micro) -> Micro:
        order = micro.order and tuple(dict.fromkeys(micro.order))
        return dataclasses.replace(micro, order=order, wastes=False, last=True)

    steps = [dataclasses.replace(s, micros=tuple(map(distinct, s.micros))) for s in plan.steps]
    return dataclasses.replace(plan, layers=tuple(map(once, plan.layers)), steps=tuple(steps))


def _layer(draw: random.Random, depth: int) -> Layer:
    num_inside = draw.choice([0, 0, 1, 2]) if depth else 0
    return Layer(
        width=draw.choice([3, 6, 8, 8, 12]),
        unit=draw.random() < 0.75,
        repeats=draw.choice([1, 1, 1, 2]),
        recomputed=draw.random() < 0.2,
        frozen=draw.random() < 0.15,
        lora=draw.random() < 0.2,
        tied=draw.random() < 0.15,
        inside=tuple(_layer(draw, depth - 1) for _ in range(num_inside)),
    )


def _step(draw: random.Random, num_layers: int) -> Step:
    def chance(probability: float) -> bool:
        return draw.random() < probability

    def micro(last: bool) -> Micro:
        order = None
        if chance(0.3):  # another order, layers left out or used twice
            order = tuple(draw.choices(range(num_layers), k=draw.randint(1, num_layers + 1)))
        return Micro(
            order=order,
            sync=last or chance(0.5),
            all_reduce=last or chance(0.5),
            keep=chance(0.1 if last else 0.3),
            last=last or chance(0.7),
            fails=None if last else draw.choice([None, None, "forward", "backward"]),
            evaluates=not last and chance(0.2),
            by_hand=draw.choice([None, None, None, "async", "wait"]),
            looks=chance(0.2),
            wastes=chance(0.15),
            rewrites=chance(0.2),
        )

    num_micros = draw.choice([1, 1, 2, 3])
    micros = [micro(i == num_micros - 1) for i in range(num_micros)]
    if chance(0.2):
        micros.append(Micro(evaluates=True, order=micros[0].order))
    return Step(
        micros=tuple(micros),
        event=chance(0.3),
        set_to_none=chance(0.8),
        keep_gradient=chance(0.1),
        moves=chance(0.05),
        reloads=chance(0.05),
        clips=chance(0.2),
        writes_frozen=chance(0.2),
        thaws=chance(0.15),
    )
