"""`fsdp2.profile`: what it measures is what happened, and without it nothing is different.

Where numbers are compared, time is virtual (`virtual_time`): compute and links take what they are
told to take, so that exposed time, durations and bandwidths can be worked out by hand.
"""

from __future__ import annotations

import ast
import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import fsdp2
from benchmarks.calls import called_by
from fsdp2 import CPUOffloadPolicy, FSDPModule, explain, fully_shard, profile, replicate
from fsdp2.profiling import Profile, recorder
from fsdp2.runtime.unit import Unit, units_in
from fsdp2.testing import simulated_mesh
from harness import DEVICE, cached_mesh, distributed, ours_only
from models import MLP, NESTED, TRANSFORMER, build_even_mlp, build_mlp
from reference import pair, shard_case
from virtual_time import Layer, Time, virtual_device, virtual_host

pytestmark = ours_only("torch's fully_shard has no profile")

# -- times ---------------------------------------------------------------------------------------

DIM, RANKS = 64, 8
WHOLE = DIM * DIM * 4  # bytes of a layer's weight
SENT = WHOLE * (RANKS - 1) // RANKS
FORWARD_S, BACKWARD_S = 3.0, 5.0
LATENCY_S = 1.0

Virtual = Callable[..., Any]


def layers(mesh: DeviceMesh, time: Time) -> nn.Module:
    """Three units, in a root without parameters."""
    model = nn.Sequential(*(Layer(DIM, time, FORWARD_S, BACKWARD_S) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh, direct_min_bytes=0)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module) -> None:
    model(torch.ones(2, DIM)).sum().backward()


def recorded(virtual: Virtual, communication_s: float) -> Profile:
    """A step after the first, with gathers and reductions of so many seconds."""
    with virtual(RANKS, SENT / (communication_s - LATENCY_S), LATENCY_S) as (mesh, time):
        model = layers(mesh, time)
        train(model)
        with profile(model) as p:
            train(model)
        return p


def check_exposed(p: Profile, gathers: list[float], reductions: list[float], total: float) -> None:
    root, *units = p.units
    assert [unit.name for unit in p.units] == ["(root)", "0", "1", "2"]
    assert root.exposed_s == 0
    assert [unit.gather.exposed_s for unit in units] == pytest.approx(gathers)
    assert [unit.reduce.exposed_s for unit in units] == pytest.approx(reductions)
    (step,) = p.measures.steps
    assert step.seconds == pytest.approx(total)
    assert step.exposed_s == pytest.approx(sum(gathers) + sum(reductions))
    assert step.compute_s == pytest.approx(3 * (FORWARD_S + BACKWARD_S))
    for unit in units:
        assert unit.forward_s == pytest.approx(FORWARD_S)
        assert unit.backward_s == pytest.approx(BACKWARD_S)


def test_a_fast_link_on_the_host() -> None:
    """Gathers hide behind compute but for the first, reductions but for the last.

    Backward begins with the last unit, which is still gathered. The end of a gather is seen when
    it is waited for, which is when the unit before it is done.
    """
    p = recorded(virtual_host, 2.0)
    check_exposed(p, [2, 0, 0], [2, 0, 0], total=28)
    first, second, third = p.units[1:]
    assert first.gather.seconds == pytest.approx(2 + 5)  # forward: exact; in backward: a bound
    assert second.gather.seconds == pytest.approx(3 + 5)
    assert third.gather.seconds == pytest.approx(3)  # kept until its backward
    assert p.measures.host_timed


def test_a_slow_link_on_the_host() -> None:
    p = recorded(virtual_host, 6.0)
    check_exposed(p, [6 + 6, 3 + 1, 3], [6, 1, 1], total=51)
    assert [unit.gather.count for unit in p.units] == [0, 2, 2, 1]
    # In forward compute waits for each, so that its time is that of the link.
    third = p.units[3].gather
    assert third.seconds == pytest.approx(6)
    assert third.bandwidth == pytest.approx(SENT / 6)


def test_a_fast_link_on_a_device() -> None:
    p = recorded(virtual_device, 2.0)
    check_exposed(p, [2, 0, 0], [2, 0, 0], total=28)
    check_durations(p, 2.0)


def test_a_slow_link_on_a_device() -> None:
    """Two reductions may be on their way, and gathers have a communicator of their own."""
    p = recorded(virtual_device, 6.0)
    check_exposed(p, [6 + 1, 3, 3], [6, 1, 0], total=44)
    check_durations(p, 6.0)


def check_durations(p: Profile, seconds: float) -> None:
    """On streams every one is timed on its own stream, waited for or not."""
    assert not p.measures.host_timed
    for unit, num_gathers in zip(p.units[1:], (2, 2, 1), strict=True):
        assert unit.gather.seconds == pytest.approx(num_gathers * seconds)
        assert unit.reduce_scatter.seconds == pytest.approx(seconds)
        assert unit.all_reduce.count == 0
        assert unit.gather.bandwidth == pytest.approx(SENT / seconds)
        assert unit.reduce.bandwidth == pytest.approx(SENT / seconds)


def test_a_device_is_waited_for_at_the_beginning_and_when_results_are_asked_for() -> None:
    with virtual_device(RANKS, SENT) as (mesh, device):
        model = layers(mesh, device)
        train(model)
        with profile(model) as p:
            train(model)
            train(model)
        assert device.num_synchronized == 1
        assert p.measures.steps
        p.table()
        assert device.num_synchronized == 2


@pytest.mark.parametrize("virtual", [virtual_host, virtual_device])
def test_all_reduces_over_replicas_have_their_own_times(virtual: Virtual) -> None:
    shards, replicas = 4, 2
    sent = WHOLE * (shards - 1) // shards
    with virtual((replicas, shards), sent) as (mesh, time):
        model = layers(mesh, time)
        train(model)
        with profile(model) as p:
            train(model)
    for unit in p.units[1:]:
        assert unit.gather.sent_bytes == sent * unit.gather.count
        assert unit.reduce_scatter.sent_bytes == sent
        assert unit.all_reduce.count == 1
        # Each replica has a quarter; a ring sends 2 (n-1) / n of it.
        assert unit.all_reduce.sent_bytes == WHOLE // shards
        assert unit.all_reduce.nbytes == WHOLE // shards
    last = p.units[1]  # the first layer, whose reductions nothing hides
    assert last.reduce_scatter.seconds == pytest.approx(1)
    assert last.all_reduce.seconds == pytest.approx(WHOLE / shards / sent)
    exposed = last.reduce_scatter.seconds + last.all_reduce.seconds
    assert last.reduce.exposed_s == pytest.approx(exposed)
    assert "are all-reduces over replicas" in p.table()


# -- bytes ---------------------------------------------------------------------------------------


@distributed(2)
def test_bytes_are_those_that_explain_tells() -> None:
    for case in (MLP, TRANSFORMER, NESTED):
        model = shard_case(case, case.build(), mesh=cached_mesh(2))
        for step in range(3):
            if step == 2:
                p = profile(model).__enter__()
            case.loss(model, *case.batch(step, dist.get_rank(), torch.float32)).backward()
        p.__exit__(None, None, None)
        for unit, told in zip(p.units, explain(model).units, strict=True):
            assert unit.name == told.name
            assert unit.gather.sent_bytes == told.sent_by_gathers
            assert unit.gather.count == told.num_gathers
            if DEVICE == "cpu" or unit.reduce_scatter.count == 1:
                assert unit.reduce_scatter.sent_bytes == told.sent_by_reduction
            else:  # in several parts, each of which is padded where it is staged
                assert unit.reduce_scatter.sent_bytes >= told.sent_by_reduction


@distributed(2)
def test_a_profile_that_begins_after_a_setting_of_communication() -> None:
    """The next gather plans the unit anew."""
    model = shard_case(MLP, MLP.build(), mesh=cached_mesh(2))
    batch = MLP.batch(0, dist.get_rank(), torch.float32)
    MLP.loss(model, *batch).backward()
    for unit in MLP.units(model):
        assert isinstance(unit, FSDPModule)
        unit.set_force_sum_reduction_for_comms(True)
    with profile(model) as p:
        MLP.loss(model, *batch).backward()
    assert p.recording.communications


@distributed(2)
def test_memory_over_the_step() -> None:
    model = shard_case(MLP, MLP.build(), mesh=cached_mesh(2))
    p = run(model, MLP.batch(0, 0, torch.float32)[0], steps=2)
    told = explain(model)
    samples = p.recording.memory
    assert {s.parts["parameters"] for s in samples} == {told.totals.sharded_bytes}
    assert samples[-1].parts["gathered parameters"] == 0
    assert samples[-1].parts["unreduced gradients"] == 0
    assert samples[-1].parts["gradients"] == told.totals.sharded_bytes
    gathered = [unit.gathered_bytes for unit in told.units]
    most = max(sample.parts["gathered parameters"] for sample in samples)
    assert max(gathered) <= most < sum(gathered)
    assert p.measures.steps[-1].peak_gathered_bytes == most
    assert all(s.total is not None and s.total > 0 for s in samples)
    times = [sample.time_s for sample in samples]
    assert times == sorted(times)


# -- all ways to shard ---------------------------------------------------------------------------


def run(model: nn.Module, x: Tensor, steps: int = 1) -> Profile:
    """So many profiled forwards and backwards, after one that is not."""
    model(x).square().mean().backward()
    with profile(model) as p:
        for _ in range(steps):
            model(x).square().mean().backward()
    check_consistent(p)
    return p


def check_consistent(p: Profile) -> None:
    """What holds of every recording: order, and that nothing overlaps that cannot."""
    recording = p.recording
    for spans in (recording.compute, recording.waits, recording.communications):
        assert all(0 <= s.begin_s <= s.end_s <= recording.end_s for s in spans)
    both = sorted((s.begin_s, s.end_s) for s in (*recording.compute, *recording.waits))
    assert all(end <= begin + 1e-12 for (_, end), (begin, _) in pairwise(both))
    assert {s.unit for s in recording.communications} <= set(recording.units)
    assert sum(step.seconds for step in p.measures.steps) <= recording.end_s
    p.table()
    json.dumps(p.as_dict())


def x_of(model_dim: int = 12) -> Tensor:
    return torch.ones(5, model_dim)


@distributed(2)
def test_units_that_share_a_call_or_run_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.other(self.layer(x)))

    model = Twice()
    fully_shard(model.layer, mesh=cached_mesh(2))
    fully_shard(model.other, mesh=cached_mesh(2))
    fully_shard(model, mesh=cached_mesh(2))
    p = run(model, x_of().requires_grad_())
    layer = next(unit for unit in p.units if unit.name == "layer")
    assert layer.gather.count >= 2
    assert layer.reduce.count >= 1
    assert layer.forward_s > 0
    assert layer.backward_s > 0

    grouped = build_even_mlp()
    fully_shard([grouped[0], grouped[2]], mesh=cached_mesh(2))
    fully_shard(grouped, mesh=cached_mesh(2))
    p = run(grouped, x_of())
    assert [unit.name for unit in p.units] == ["(root)", "0, 2"]
    assert p.units[1].gather.count >= 1


@distributed(2)
def test_recomputation_gathers_are_recorded_as_such() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
            return x

    model = Recomputed()
    for block in model.blocks:
        fully_shard(block, mesh=cached_mesh(2))
    fully_shard(model, mesh=cached_mesh(2))
    p = run(model, x_of().requires_grad_())
    for unit in p.units[1:3]:
        assert unit.recompute_s > 0
        assert [c.phase for c in p.recording.communications if c.unit == unit.name] == [
            "forward",
            "backward",
            "backward",
        ]


@distributed(2)
def test_accumulation_without_sync() -> None:
    model = shard_case(MLP, MLP.build(), mesh=cached_mesh(2))
    assert isinstance(model, FSDPModule)
    x = MLP.batch(0, 0, torch.float32)[0]
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    ends: list[float] = []
    with profile(model) as p:
        clock = p._recorder._clock  # type: ignore[union-attr]
        for _ in range(2):
            with model.no_sync():
                model(x).sum().backward()
            ends.append(clock.mark())
            model(x).sum().backward()
            optimizer.step()
            other.step()
    check_consistent(p)
    for end in ends:
        end_s = clock.read(end)
        held = [sample for sample in p.recording.memory if sample.time_s <= end_s][-1].parts
        assert held["unreduced gradients"] == sum(4 * unit.numel for unit in explain(model).units)
    assert len(p.measures.steps) == 2  # of two micro-batches each
    assert all(step.optimizer_s > 0 for step in p.measures.steps)
    for unit in p.units[1:]:
        assert unit.reduce.count == 1
        assert unit.gather.count >= 2  # at least one per micro-batch
    # Another model's optimizer is none of it.
    assert sum(m.kind == "optimizer" for m in p.recording.moments) == 2


@distributed(2)
def test_a_profiled_step_works_out_nothing_that_is_known_before() -> None:
    """Bytes of buckets at the start, everything else at the end; samples say what has changed."""
    model = shard_case(MLP, MLP.build(), mesh=cached_mesh(2))
    x = MLP.batch(0, 0, torch.float32)[0]
    model(x).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        with profile(model) as p:
            patch.setattr(recorder, "facts_of", lambda *_: 1 / 0)
            patch.setattr(recorder, "replay", lambda *_, **__: 1 / 0)
            model(x).sum().backward()
        with pytest.raises(ZeroDivisionError):
            _ = p.recording
    with profile(model) as p:
        model(x).sum().backward()
    # What says nothing new is left out, but where the total was due.
    follow = list(pairwise(p.recording.memory))
    assert sum(a.parts == b.parts and a.total == b.total for a, b in follow) <= len(follow) / 4
    check_consistent(p)


@distributed(2)
def test_replicated_and_offloaded_units() -> None:
    model = build_even_mlp()
    for layer in (model[0], model[2]):
        replicate(layer, mesh=cached_mesh(2))
    replicate(model, mesh=cached_mesh(2))
    p = run(model, x_of())
    assert p.measures.total.gather.count == 0
    for unit in p.units:
        assert unit.reduce_scatter.count == 0
        assert unit.all_reduce.count == 1
        assert unit.all_reduce.sent_bytes > 0

    model = shard_case(MLP, MLP.build(), mesh=cached_mesh(2), offload_policy=CPUOffloadPolicy())
    p = run(model, MLP.batch(0, 0, torch.float32)[0])
    assert p.measures.total.gather.count > 0


@distributed(4)
def test_meshes_of_two_dims_and_smaller_groups_after_forward() -> None:
    x = MLP.batch(0, 0, torch.float32)[0]
    hybrid = shard_case(MLP, MLP.build(), mesh=cached_mesh(2, 2, names=("r", "s")))
    p = run(hybrid, x)
    told = explain(hybrid)
    assert p.measures.total.reduce_scatter.sent_bytes == told.totals.sent_by_reduction
    assert p.measures.total.all_reduce.sent_bytes == told.totals.sent_by_all_reduction

    secondary = shard_case(MLP, MLP.build(), mesh=cached_mesh(4), reshard_after_forward=2)
    p = run(secondary, x)
    told = explain(secondary)
    assert p.measures.total.gather.sent_bytes == told.totals.sent_by_gathers
    assert {c.num_ranks for c in p.recording.communications} == {2, 4}
    assert max(s.parts["secondary shards"] for s in p.recording.memory) > 0


@distributed(4)
def test_beside_tensor_parallelism() -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    model = build_even_mlp()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    p = run(model, x_of())
    told = explain(model)
    assert p.measures.total.gather.sent_bytes == told.totals.sent_by_gathers


@distributed(2)
def test_several_roots_and_units_that_do_not_run() -> None:
    pieces = {name: build_even_mlp() for name in ("generator", "critic", "idle")}
    for piece in pieces.values():
        fully_shard(piece[0], mesh=cached_mesh(2))
        fully_shard(piece, mesh=cached_mesh(2))
    both = nn.ModuleDict(pieces)
    with profile(both) as p:  # from their very first forwards on
        pieces["generator"](x_of()).sum().backward()
        pieces["critic"](x_of()).sum().backward()
        with torch.no_grad():
            pieces["critic"](x_of())
    check_consistent(p)
    counts = {unit.name: unit.gather.count for unit in p.units}
    assert counts["generator"] > 0
    assert counts["critic.0"] > 0
    assert counts["idle"] == counts["idle.0"] == 0
    assert len(p.measures.steps) == 3
    idle = next(line for line in p.table().splitlines() if line.startswith("idle.0 "))
    assert idle.split() == ["idle.0", "0.00", "0.00", "-", "-"]


def test_a_part_of_a_model(small: nn.Module) -> None:
    x = torch.ones(3, 7)
    small(x).sum().backward()
    with profile(small[0]) as p:  # type: ignore[index]
        small(x).sum().backward()
        small(x).sum().backward()
    check_consistent(p)
    assert [unit.name for unit in p.units] == ["(root)"]  # of what is profiled
    assert p.units[0].reduce.count == 1
    assert len(p.measures.steps) == 2


def test_one_rank_communicates_nothing() -> None:
    with simulated_mesh(1) as mesh:
        model = fully_shard(build_mlp(), mesh=mesh)
        p = run(model, torch.ones(3, 7))
    assert p.measures.total.gather.count == p.measures.total.reduce.count == 0
    assert p.measures.total.forward_s > 0


# -- on: little cost -------------------------------------------------------------------------------


def test_a_profile_adds_few_calls_to_a_unit() -> None:
    """Python calls of a step with a profile, minus those without, per unit: a bound on growth."""
    added = []
    with simulated_mesh(2) as mesh:
        for num_units in (2, 6):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_units)))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)

            def step(model: nn.Module = model) -> None:
                model(torch.ones(2, 4)).sum().backward()

            for _ in range(3):
                step()
            without = called_by(step)[0].total()
            with profile(model) as p:
                step()
                assert p._recorder is not None
                log = p._recorder.log
                assert log is not None
                log.next_total = math.inf  # the clock says when the process' memory is read
                before = log.samples
                with_profile = called_by(step)[0].total()
                samples = log.samples - before
            added.append((with_profile - without, samples))
    (few_calls, few_samples), (calls, samples) = added
    assert (samples - few_samples) / 4 <= 6, added
    assert (calls - few_calls) / 4 <= 30, added


# -- off: no cost --------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a unit and what belongs to it has as attributes, by identity."""
    found = {}
    for unit in units_in(model):
        owned = [
            unit,
            unit.hooks,
            unit.registration,
            unit.runtime,
            unit.gradients,
            unit.param_group,
        ]
        owned += [unit.runtime.streams, *unit.param_group.transports, *unit.buckets]
        owned += [
            t
            for links in unit.param_group.transports
            for t in (links.gather, links.scatter)
            if t is not None
        ]
        for thing in owned:
            for name, value in getattr(thing, "__dict__", {}).items():
                if isinstance(value, weakref.ref):
                    continue  # to the end of the last backward, say
                if callable(value) or "__self__" in dir(value):
                    found[f"{id(thing)}.{name}"] = id(value)
            found[str(id(thing))] = sorted(getattr(thing, "__dict__", {}))
    for module in model.modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        found[f"hooks of {id(module)}"] = [[id(hook) for hook in h.values()] for h in hooks]
    found["optimizers"] = (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks))
    return found


@distributed(2)
def test_after_a_profile_everything_is_as_it_was() -> None:
    model, plain = pair(MLP, dtype=torch.float32, mesh=cached_mesh(2))
    x = MLP.batch(0, 0, torch.float32)[0]
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    before = state(model)
    with profile(model):
        model(x).sum().backward()
        assert state(model) != before
    assert state(model) == before
    with suppress(ZeroDivisionError), profile(model):
        model(x)
        raise ZeroDivisionError
    assert state(model) == before
    # And gradients are right in the profile and after it.
    plain(x).sum().backward()
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


def test_the_runtime_knows_nothing_of_it() -> None:
    package = Path(fsdp2.__file__).parent
    users = set()
    for path in set(package.rglob("*.py")) - set((package / "profiling").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            if any("profiling" in name.split(".") for name in names):
                users.add(path.relative_to(package).as_posix())
    assert users == {"__init__.py"}


def test_a_profile_holds_nothing_of_the_model() -> None:
    with simulated_mesh(2) as mesh:
        model = fully_shard(build_mlp(), mesh=mesh)
        x = torch.ones(3, 7)
        model(x).sum().backward()
        with profile(model) as p:
            model(x).sum().backward()
            assert units_in(model)[0] in held_by(p)
        assert not any(isinstance(thing, nn.Module | Unit | Tensor) for thing in held_by(p))
        assert p.units


def held_by(p: Profile) -> list[Any]:
    """All objects to which there is a way from ``p``, but through modules of Python."""
    found: dict[int, Any] = {}
    todo: list[Any] = [p]
    while todo:
        thing = todo.pop()
        if id(thing) in found or isinstance(thing, type | ModuleType | FunctionType):
            continue
        found[id(thing)] = thing
        todo += gc.get_referents(thing)
    return list(found.values())


def test_gradients_are_freed_when_they_are_without_a_profile() -> None:
    """Whoever records a reduction must not keep it alive until the garbage collector runs."""
    with virtual_device(2, 1.0) as (mesh, device):
        model = layers(mesh, device)
        train(model)
        freed: list[Any] = []
        gc.disable()
        try:
            with profile(model):
                units = units_in(model)
                make = units[1].gradients.make_reductions

                def making(*args: Any, **kwargs: Any) -> Any:
                    made = make(*args, **kwargs)
                    freed.extend(weakref.ref(reduction) for reduction in made)
                    return made

                vars(units[1].gradients)["make_reductions"] = making
                train(model)
                assert freed
                assert [ref() for ref in freed] == [None] * len(freed)
                vars(units[1].gradients)["make_reductions"] = make
        finally:
            gc.enable()


# -- what goes wrong -----------------------------------------------------------------------------


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(ValueError, match=r"not sharded.*fully_shard"):
        profile(build_mlp())


@pytest.fixture
def small() -> Iterator[nn.Module]:
    with simulated_mesh(2) as mesh:
        model = build_mlp()
        fully_shard(model[0], mesh=mesh)
        yield fully_shard(model, mesh=mesh)


def test_profiles_of_the_same_model_do_not_nest(small: nn.Module) -> None:
    x = torch.ones(3, 7)
    with profile(small) as p:
        with pytest.raises(RuntimeError, match="already being profiled"), profile(small[0]):  # type: ignore[index]
            pass
        small(x).sum().backward()
    assert p.units[0].forward_s > 0
    with pytest.raises(RuntimeError, match="records once"), p:
        pass
    with profile(small):
        pass


def test_results_before_the_end(small: nn.Module) -> None:
    p = profile(small)
    with pytest.raises(RuntimeError, match="with block"):
        p.step()
    with p, pytest.raises(RuntimeError, match="after the with block"):
        p.table()
    assert "no step was recorded" in p.table()
    with pytest.raises(IndexError, match="no step"):
        p.save_picture("never.png")


def test_what_was_there_before_an_exception_is_kept(small: nn.Module) -> None:
    class Odd(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ArithmeticError
            return x

    x, odd = torch.ones(3, 7), Odd()
    small.insert(3, odd)  # type: ignore[operator]
    with suppress(ArithmeticError), profile(small) as p:
        small(x).sum().backward()
        Odd.fails = True
        small(x).sum().backward()
    check_consistent(p)
    assert p.units[0].reduce.count > 0
    assert p.measures.steps[0].compute_s > 0

    # One that somebody catches inside, and a step after it.
    with profile(small) as p:
        with pytest.raises(ArithmeticError):
            small(x)
        Odd.fails = False
        small(x).sum().backward()
    check_consistent(p)
    assert p.units[0].backward_s > 0


def test_time_after_a_failed_forward_is_nobodys() -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    with virtual_host(RANKS, SENT) as (mesh, time):
        model = layers(mesh, time)
        train(model)
        with profile(model) as p:
            handle = model[2].register_forward_pre_hook(fail)  # type: ignore[index]
            with pytest.raises(ArithmeticError):
                train(model)
            handle.remove()
            time.work(100.0)
            train(model)
    assert len(p.measures.steps) == 2
    assert 2 * p.measures.total.forward_s == pytest.approx((2 + 3) * FORWARD_S)
    assert 2 * p.measures.total.backward_s == pytest.approx(3 * BACKWARD_S)


# -- steps ---------------------------------------------------------------------------------------


def test_steps_that_the_user_marks(small: nn.Module) -> None:
    x = torch.ones(3, 7)
    small(x).sum().backward()
    with profile(small) as p:
        for _ in range(3):
            for _ in range(2):
                small(x).sum().backward()
            p.step()
    assert len(p.measures.steps) == 3
    total = p.measures.total
    with profile(small) as whole:
        for _ in range(6):
            small(x).sum().backward()
    assert len(whole.measures.steps) == 6
    assert total.gather.count == pytest.approx(2 * whole.measures.total.gather.count)


# -- the forms of it -----------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [virtual_host, virtual_device])
def test_the_chrome_trace(virtual: Virtual, tmp_path: Path) -> None:
    p = recorded(virtual, 6.0)
    path = tmp_path / "new" / "trace.json"
    p.export_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_phase.setdefault(event["ph"], []).append(event)
    assert set(by_phase) == {"X", "C", "M"}
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in by_phase["X"]:
        assert event["pid"] == 0
        assert event["dur"] >= 0
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():  # Perfetto shows nothing of what overlaps in a row
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))
    names = {e["tid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"}
    assert set(rows) <= set(names)
    assert {"all-gather", "reduce-scatter"} <= set(names.values())
    assert any(e["name"] == "process_name" for e in by_phase["M"])
    waits = [e for e in by_phase["X"] if e["cat"] == "wait"]
    assert sum(e["dur"] for e in waits) == pytest.approx(1e6 * p.measures.total.exposed_s)
    assert any("gathered parameters" in e["args"] for e in by_phase["C"])


@pytest.mark.parametrize("virtual", [virtual_host, virtual_device])
def test_the_picture(virtual: Virtual, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    p = recorded(virtual, 6.0)
    path = tmp_path / "new" / "profile.png"
    p.save_picture(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 20_000


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = recorded(virtual_host, 6.0)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        p.save_picture(tmp_path / "profile.png")


def test_the_table() -> None:
    p = recorded(virtual_host, 6.0)
    lines = p.table().splitlines()
    assert lines[0] == (
        "Rank 0 on cpu, mean of 1 step: 51000 ms, of which compute waited for communication "
        "27000 ms (52.9 %)"
    )
    first = next(line for line in lines if line.startswith("0 "))
    expected = "0 3000 5000 2 18000 28.0 KiB 1.56 KiB/s 12000 1 6000 14.0 KiB 2.33 KiB/s 6000"
    assert " ".join(first.split()) == expected
    assert "upper bounds" in p.table()
    assert str(p) == p.table()
