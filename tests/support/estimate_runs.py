"""Runs a random configuration, predicts it, and says where the two differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from benchmarks.ledger import Ledger
from benchmarks.transport import KINDS, around_waits, counting_sent
from by_keywords import estimate
from estimate_grammar import WIDTH, Configuration, scaled
from fsdp2 import shard_model
from fsdp2.optim import dtensor_step
from fsdp2.planning import estimating
from fsdp2.planning.replay.counted_transports import _CountingExchange
from fsdp2.planning.trace.checkpointing import apply_checkpointing
from fsdp2.planning.workload import default_checkpoint_modules
from fsdp2.runtime.unit import units_in
from fsdp2.transports.compressed.transports import Wire
from fsdp2.transports.host.exchange import Exchange
from fsdp2.wrap import units_of
from harness import cached_mesh
from random_models import Node, build, tensor_of
from traffic import held_by

TOLERANCE = 0.02
SMALL = 300  # bytes: losses, counters
WARM_UP_STEPS = 2
MEASURED_STEPS = 2


@dataclasses.dataclass
class Found:
    """What a step does on a rank; see `differences`.

    Attributes:
        calls: collectives in order: kind, ranks, and the unit or, where it is not known, the bytes.
        sent: bytes by kind of collective.
        figures: bytes by name.
        late_bytes: of the largest reduction, what it holds while gradients are added up: when
            messages have come, which may be at once or when backward is over.
        error: of arguments that are refused: the type and the message.
    """

    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    figures: dict[str, int] = dataclasses.field(default_factory=dict)
    error: tuple[str, str] | None = None
    late_bytes: int = 0

    def num(self, kind: str) -> int:
        """Collectives of this kind."""
        return sum(call[0] == kind for call in self.calls)


# -- the run ---------------------------------------------------------------------------------------


def inputs_of(made: Configuration) -> Any:
    """The sample input of `estimate`."""
    x = torch.randn(made.batch, WIDTH, dtype=torch.float64)
    x.requires_grad_(made.needs_grad)
    if made.model.passes == "keyword":
        return {"step": 0, "x": x}
    if made.model.passes == "nested":
        return ({"x": [x]}, 0)
    return (x, 0)


def loss_of(made: Configuration) -> Any:
    if made.loss == "sum":
        return None
    return lambda output: tensor_of(output).float().square().mean()


def run(configurations: list[Configuration]) -> list[Found]:
    """Each, on this rank."""
    return [run_one(made) for made in configurations]


def run_one(made: Configuration) -> Found:
    found = Found()
    torch.manual_seed(0)
    ledger = Ledger(every_operation=False)
    names = ("replicate", "shard") if len(made.mesh) == 2 else None
    mesh = cached_mesh(*made.mesh, names=names)
    with scaled(), ledger, around_waits(ledger.paused), counting_sent() as sent:
        model = build(made.model)
        try:
            _shard(model, made, mesh)
        except Exception as error:
            found.error = (type(error).__name__, str(error))
            return found
        optimizer = _optimizer(model, made)
        torch.manual_seed(dist.get_rank())
        batch = inputs_of(made)
        try:
            for _ in range(WARM_UP_STEPS):
                _train(model, made, batch)
                optimizer.step()
                _move_gradients(model)
                optimizer.zero_grad()
                _drop_input_gradients(batch)
        except Exception as error:
            found.error = (type(error).__name__, str(error))
            return found
        ledger.every_operation = True
        for _ in range(MEASURED_STEPS):
            optimizer.zero_grad()
            _drop_input_gradients(batch)
            sent.clear()
            with noting_calls(model) as found.calls:
                moments = _train(model, made, batch, ledger)
            ledger.sample("step begins")
            start = ledger.now
            optimizer.step()
            ledger.sample("step ends")
            moments["step"] = [(start, ledger.now + 1)]
            figures = _figures(model, optimizer, ledger, moments)
            # Threads of an exchange may drop their buffers earlier in one step than in another.
            found.figures = {k: max(v, found.figures.get(k, 0)) for k, v in figures.items()}
        found.sent = dict(sent)
    return found


def _figures(model: nn.Module, optimizer: Any, ledger: Ledger, moments: Any) -> dict[str, int]:
    peaks = {
        phase: max(max(ledger.live_bytes[a:b]) for a, b in spans)
        for phase, spans in moments.items()
    }
    states = (v for s in optimizer.state.values() for v in s.values())
    held = held_by(model)
    return {
        "parameters": held.shards,
        "optimizer": _nbytes(states),
        "buffers": _nbytes(model.buffers()),
        "gradients": _gradients(model),
        **peaks,
    }


def _gradients(model: nn.Module) -> int:
    """Of the storages in which sharded gradients lie, with what fills them up."""
    total = 0
    for unit in units_in(model):
        for bucket in unit.buckets:
            grads = [p.sharded.grad for p in bucket.params if p.sharded.grad is not None]
            store = bucket.grads
            if store is not None and any(g is d for g in grads for d in store.dtensors):
                total += store.storage.nbytes()
            else:
                total += _nbytes(grads)
    return total


def _shard(model: Node, made: Configuration, mesh: Any) -> None:
    if made.checkpointing != "none":
        names = made.checkpointed
        if names is None:
            names = tuple(default_checkpoint_modules(model, units_of(model, made.shared["wrap"])))
        for name in names:
            block: Any = model.get_submodule(name)
            block.forward = apply_checkpointing(block.forward, made.checkpointing)
    shard_model(model, mesh, **made.shared)
    if made.accumulation == "sharded":
        model.set_accumulate_sharded(True)  # type: ignore[operator]


def _optimizer(model: nn.Module, made: Configuration) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    # Estimates are of a step on each parameter, as by default on accelerators: on the CPU, flat
    # tensors of small parameters take some memory in addition.
    if made.optimizer == "adamw":
        return dtensor_step(torch.optim.AdamW(params, lr=1e-3))
    momentum = 0.9 if made.optimizer == "momentum" else 0.0
    return dtensor_step(torch.optim.SGD(params, lr=1e-3, momentum=momentum))


def _train(
    model: Any, made: Configuration, batch: Any, ledger: Ledger | None = None
) -> dict[str, list[tuple[int, int]]]:
    """All micro-batches of a step; returns from which to which moment each phase went."""
    moments: dict[str, list[tuple[int, int]]] = {"forward": [], "backward": []}
    loss_fn = loss_of(made) or (lambda output: tensor_of(output).sum())

    def now() -> int:
        if ledger is None:
            return 0
        ledger.sample("between phases")
        return ledger.now

    for i in range(made.micro_batches):
        if made.accumulation != "every":
            model.set_requires_gradient_sync(i == made.micro_batches - 1)
        start = now()
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = loss_fn(output)
        del output
        middle = now()
        loss.backward()
        del loss
        end = now()
        # Not the moment before: a forward frees gradients that were dropped as it begins.
        moments["forward"].append((start + 1, middle + 1))
        moments["backward"].append((middle, end + 1))
    return moments


def _move_gradients(model: nn.Module) -> None:
    """Small gradients keep their memory from when on it has moved, which is up to malloc."""
    for unit in units_in(model):
        for bucket in unit.buckets:
            if bucket.grads is not None:
                bucket.grads._moves = True


def _drop_input_gradients(batch: Any) -> None:
    for tensor in tree_iter(batch):
        if isinstance(tensor, Tensor):
            tensor.grad = None


def _nbytes(tensors: Any) -> int:
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if isinstance(t, Tensor))


@contextmanager
def noting_calls(model: nn.Module) -> Iterator[list[tuple[Any, ...]]]:
    """Yields the collectives of the units of ``model`` inside the context."""
    calls: list[tuple[Any, ...]] = []
    names = {module: name for name, module in model.named_modules()}
    units = {
        id(bucket): ", ".join(names[m] or "(root)" for m in unit.modules)
        for unit in units_in(model)
        for bucket in unit.buckets
    }
    gather, scatter, reduce = Exchange.all_gather, Exchange.reduce_scatter, Exchange.all_reduce
    rows, all_to_all = Wire.all_gather, Wire.all_to_all

    def all_gather(self: Any, plan: Any, tag: int) -> Any:
        nbytes = sum(output.nbytes for output in plan.outputs)
        calls.append(("all_gather", self.group.size(), nbytes))
        return gather(self, plan, tag)

    def reduce_scatter(self: Any, bucket: Any, plan: Any, grads: Any, outs: Any, tag: int) -> Any:
        calls.append(("reduce_scatter", self.group.size(), units[id(bucket)]))
        return scatter(self, bucket, plan, grads, outs, tag)

    def all_reduce(self: Any, tensors: Any, tag: int) -> Any:
        calls.append(("all_reduce", self.group.size(), sum(t.nbytes for t in tensors)))
        return reduce(self, tensors, tag)

    def gather_rows(self: Any, received: Any, mine: Any, tag: int) -> Any:
        calls.append(("all_gather", self.size, self.size * mine.nbytes))
        return rows(self, received, mine, tag)

    def exchange_rows(self: Any, received: Any, sent: Any) -> Any:
        calls.append(("all_to_all", self.size, sent.nbytes))
        return all_to_all(self, received, sent)

    with (
        mock.patch.multiple(
            Exchange, all_gather=all_gather, reduce_scatter=reduce_scatter, all_reduce=all_reduce
        ),
        mock.patch.multiple(Wire, all_gather=gather_rows, all_to_all=exchange_rows),
    ):
        yield calls


# -- the prediction --------------------------------------------------------------------------------


def predict(made: Configuration) -> list[Found]:
    """What `estimate` says of each rank that has other shards."""
    replays: list[Any] = []
    late = [0]
    real, real_add_up = estimating.replay, _CountingExchange._add_up

    def add_up(self: Any, made: int, held: list[Any]) -> Any:
        late.append(made + sum(each.nbytes for each in held if each is not None))
        return real_add_up(self, made, held)

    def replay(*args: Any, **kwargs: Any) -> Any:
        replays.append(real(*args, **kwargs))
        return replays[-1]

    def all_ranks(trace: Any, setup: Any) -> set[int]:
        return set(range(setup.num_shards))

    with (
        scaled(),
        mock.patch.object(estimating, "replay", replay),
        mock.patch.object(estimating, "_boundary_ranks", all_ranks),
        mock.patch.object(_CountingExchange, "_add_up", add_up),
    ):
        model = build(made.model)
        try:
            estimate(
                model,
                made.mesh if len(made.mesh) > 1 else made.mesh[0],
                inputs_of(made),
                loss_fn=loss_of(made),
                device_type="cpu",
                activation_checkpointing=made.checkpointing,
                checkpoint_modules=made.checkpointed,
                micro_batches=made.micro_batches,
                accumulation=made.accumulation,
                optimizer=made.optimizer,
                ranks_per_node=made.world_size,
                **made.shared,
            )
        except Exception as error:
            return [Found(error=(type(error).__name__, str(error)))]
    return [_found(replay, max(late)) for replay in replays]


def _found(replay: Any, late_bytes: int) -> Found:
    setup, account = replay.setup, replay.account
    policy = setup.sharding.comm_policy
    if policy is not None:  # numbers are made bytes in chunks, in their own dtype
        late_bytes += 8 * max((t.nbytes for t in replay.transfers), default=0)
    found = Found(late_bytes=late_bytes)
    sizes = {"shard": setup.num_shards, "replicate": setup.num_replicas, "all": setup.num_ranks}
    for transfer in replay.transfers:
        size = sizes.get(transfer.group)
        if transfer.group == "secondary":
            gathered = [b.gathered for unit in replay.units for b in unit.buckets if b.gathered]
            kept = [each.secondary for each in gathered if each.secondary]
            size = kept[0].layout.num_shards
        if transfer.group in ("within", "across"):
            node = policy.ranks_per_node
            size = node if transfer.group == "within" else setup.num_shards // node
        what = transfer.unit if transfer.kind == "reduce_scatter" else transfer.nbytes
        found.calls.append((transfer.kind, size, what))
        found.sent[transfer.kind] = found.sent.get(transfer.kind, 0) + transfer.sent
    everywhere = {
        name: account.now.get(name, 0) + account.host.get(name, 0)
        for name in ("parameters", "gradients", "optimizer state", "buffers")
    }
    found.figures = {
        "parameters": everywhere["parameters"],
        "optimizer": everywhere["optimizer state"],
        "buffers": everywhere["buffers"],
        "gradients": everywhere["gradients"],
        "forward": account.peaks["forward"].total,
        "backward": account.peaks["backward"].total,
        "step": account.peaks["optimizer"].total,
    }
    return found


# -- the comparison --------------------------------------------------------------------------------


def differences(made: Configuration, real: list[Found], predicted: list[Found]) -> list[str]:
    """Where a prediction is wrong, as sentences."""
    refused = [found.error for found in (real[0], predicted[0])]
    if any(refused):
        return _refusals(*refused)
    found: list[str] = []
    for rank, ran in enumerate(real):
        told = predicted[rank % len(predicted)]
        found += [f"rank {rank}: {each}" for each in _of_rank(made, ran, told)]
    return found


def _refusals(ran: tuple[str, str] | None, told: tuple[str, str] | None) -> list[str]:
    if ran is not None and told is None and "type" in ran[1]:
        return []  # fake kernels compute with mixed dtypes, where real ones raise
    if told is not None and ran is None:
        return [f"a run is possible, but the prediction raises {told}"]
    if told is None:
        return [f"predicted, but a run raises {ran}"]
    return []


def _of_rank(made: Configuration, ran: Found, told: Found) -> Iterator[str]:
    narrow = "comm_policy" in made.shared
    a, b = list(map(str, told.calls)), list(map(str, ran.calls))
    if narrow:  # the ends of reductions are collectives, too, which come when the others are over
        a, b = sorted(a), sorted(b)
    if a != b:
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1), 0)
        yield f"call {at}: predicted {a[at : at + 3]} of {len(a)}, ran {b[at : at + 3]} of {len(b)}"
    for kind in () if narrow else KINDS:
        said, value = told.sent.get(kind, 0), ran.sent.get(kind, 0)
        # (Of an all-reduce the parts of ranks are predicted as if they were equal.)
        uneven = TOLERANCE * value + 512 * told.num(kind) if kind == "all_reduce" else 0
        if abs(said - value) > uneven:
            yield f"{kind} sends {value}, predicted {said}"
    for name, value in ran.figures.items():
        said = told.figures[name]
        late = told.late_bytes if name in ("forward", "backward") else 0
        if abs(said - value) > TOLERANCE * value + SMALL + late:
            yield f"{name} is {value}, predicted {said}"
