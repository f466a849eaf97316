"""Stream order, proved without a GPU: generated trainings give traces without a violation.

The trace is that of the real runtime with its real streams code (`DeviceStreams`), on a simulated
device; see `fsdp2.testing`. The path of the CPU, where functions finish collectives, is checked by
the same rules: its messages are streams, and the host waits for them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

import trace_hashes
from fsdp2.comm.streams import DeviceStreams
from fsdp2.features.deferred_weight_grads import DeferredWeightGrads
from fsdp2.runtime.unit import Unit
from fsdp2.testing import Violation, check
from harness import ours_only
from stream_schedules import (
    POLICIES,
    Layer,
    Micro,
    Plan,
    Step,
    pipelined,
    plan_of,
    traced,
    used_once,
)

pytestmark = [
    ours_only("records what this runtime does"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]
SEEDS = 300
# Fields of plans that are chosen by tests, or are not values.
NOT_DRAWN = ("host", "policy", "layers", "steps", "micros", "inside", "order")
NOT_DRAWN += ("pipeline", "accumulates_sharded", "tight")  # see `pipelined`


def violations(plan: Plan) -> list[Violation]:
    with traced(plan) as recorder:
        return check(recorder.events)


def found(seeds: range) -> list[str]:
    return [f"seed {seed}: {v}" for seed in seeds for v in violations(plan_of(seed))[:2]]


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_generated_schedules(first: int) -> None:
    assert found(range(first, first + 6)) == []


def found_within_budgets(seeds: range, **options: Any) -> list[str]:
    plans = {seed: dataclasses.replace(plan_of(seed), tight=True, **options) for seed in seeds}
    return [f"seed {seed}: {v}" for seed, plan in plans.items() for v in violations(plan)[:2]]


def test_schedules_within_the_least_budget() -> None:
    """Units are freed to make room, in place of the usual order; and errors name the budget."""
    assert found_within_budgets(range(12)) == []
    assert found_within_budgets(range(4), host="exchange", offload=False) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_schedules_within_the_least_budget() -> None:
    assert found_within_budgets(range(12, 150)) == []
    assert found_within_budgets(range(4, 60), host="exchange", offload=False) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(12, SEEDS, 70))
def test_many_generated_schedules(first: int) -> None:
    assert found(range(first, first + 70)) == []


@pytest.mark.parametrize("host", ["group", "exchange"])
def test_generated_schedules_ordered_by_the_host(host: str) -> None:
    plans = [dataclasses.replace(plan_of(seed), host=host, offload=False) for seed in range(5)]
    assert [str(v) for plan in plans for v in violations(plan)[:2]] == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("host", ["group", "exchange"])
def test_many_generated_schedules_ordered_by_the_host(host: str) -> None:
    plans = [dataclasses.replace(plan_of(s), host=host, offload=False) for s in range(8, 215)]
    assert [str(v) for plan in plans for v in violations(plan)[:2]] == []


def with_policy(seed: int, policy: str, **options: Any) -> Plan:
    plan = dataclasses.replace(plan_of(seed), policy=policy, custom=False, **options)
    # Most generated weights are small: all of them in blocks of their own.
    return dataclasses.replace(plan, direct_min_bytes=min(plan.direct_min_bytes, 16))


@pytest.mark.parametrize(
    "policy", [p if p == "both" else pytest.param(p, marks=pytest.mark.long) for p in POLICIES]
)
def test_generated_schedules_in_fewer_bytes(policy: str) -> None:
    plans = [with_policy(seed, policy) for seed in range(2)]
    plans += [with_policy(2, policy, mesh=(4,), reshard=2), with_policy(3, policy, mesh=(2, 2))]
    assert [str(v) for plan in plans for v in violations(plan)[:2]] == []
    hosted = [with_policy(seed, policy, host="group", offload=False) for seed in (2, 4)]
    assert [str(v) for plan in hosted for v in violations(plan)[:2]] == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
def test_many_generated_schedules_in_fewer_bytes(policy: str) -> None:
    plans = [with_policy(seed, policy) for seed in range(4, 40)]
    plans += [with_policy(s, policy, host="group", offload=False) for s in range(40, 60)]
    plans += [with_policy(s, policy, host="exchange", offload=False) for s in range(60, 70)]
    assert [str(v) for plan in plans for v in violations(plan)[:2]] == []


PIPELINES = 100


def found_in_pipelines(seeds: range, **options: Any) -> list[str]:
    plans = {seed: pipelined(dataclasses.replace(plan_of(seed), **options), seed) for seed in seeds}
    return [f"seed {seed}: {v}" for seed, plan in plans.items() for v in violations(plan)[:2]]


def test_stages_of_zero_bubble_pipelines() -> None:
    """Gradients of weights are computed apart: no hook is called, and they are taken later."""
    assert found_in_pipelines(range(8)) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_stages_of_zero_bubble_pipelines() -> None:
    assert found_in_pipelines(range(8, PIPELINES)) == []


@pytest.mark.parametrize("host", ["group", "exchange"])
def test_stages_of_zero_bubble_pipelines_ordered_by_the_host(host: str) -> None:
    assert found_in_pipelines(range(6), host=host, offload=False) == []


def test_pipelines_reach_what_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that no hook has seen are reduced, and added up; gathers happen in between."""
    seen: Counter[str] = Counter()
    gather, reduce = DeferredWeightGrads.gather, DeferredWeightGrads.reduce

    def counted_gather(self: DeferredWeightGrads, unit: Unit) -> None:
        before = unit.state
        gather(self, unit)
        deferred = any(other.step.is_read_outside for other in unit.runtime.units)
        seen["gathered apart"] += deferred and before is not unit.state

    def counted_reduce(self: DeferredWeightGrads, unit: Unit) -> None:
        there = unit.step.is_read_outside and unit.gradients.has_unsharded()
        reduce(self, unit)
        seen["reduced" if unit.config.reduce_grads else "added up"] += there

    monkeypatch.setattr(DeferredWeightGrads, "gather", counted_gather)
    monkeypatch.setattr(DeferredWeightGrads, "reduce", counted_reduce)
    for seed in range(8):
        violations(pipelined(plan_of(seed), seed))
    assert min(seen[key] for key in ("gathered apart", "reduced", "added up")) >= 3, seen


def test_the_seeds_reach_everything() -> None:
    """No option of plans is out of use by accident."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        plan = plan_of(seed)
        micros = [micro for step in plan.steps for micro in step.micros]
        layers = list(plan.layers)
        for layer in layers:
            layers += layer.inside
        parts = [plan, *plan.steps, *micros, *layers]
        for part in parts:
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if not isinstance(value, tuple) or field.name == "mesh":
                    seen[f"{type(part).__name__}.{field.name}={value}"] += 1
        seen["reuse"] += any(m.order and len(set(m.order)) < len(m.order) for m in micros)
    for part in (Plan(), Step(), Micro(), Layer()):
        for field in dataclasses.fields(part):
            values = [key for key in seen if key.startswith(f"{type(part).__name__}.{field.name}=")]
            if field.name not in NOT_DRAWN:
                assert len(values) >= 2, field.name
    assert min(seen["reuse"], seen["Plan.mesh=(2, 2)"], seen["Plan.reshard=2"]) > 10


# Bugs that the checker has found in the runtime, each by the smallest plan that shows it.
TWO_STEPS = (Step(), Step())
FOUND = {
    "a gather of shards that compute is still making anew after a move": Plan(
        steps=(Step(), Step(moves=True))
    ),
    "a gather that waits for the optimizer's event, though a checkpoint was loaded after it": Plan(
        steps=(Step(event=True), Step(reloads=True))
    ),
    "secondary shards that are looked at before the copy into them is done": Plan(
        mesh=(4,), reshard=2, steps=(Step((Micro(looks=True),)), Step())
    ),
    "offloaded gradients freed while they are copied, after a backward that failed": Plan(
        offload=True, steps=(Step((Micro(fails="backward"), Micro())), Step())
    ),
    "an optimizer in backward that writes what a useless prefetch is reading": used_once(
        Plan(in_backward=True, prefetch="b", distance=3, steps=(Step((Micro(order=(2, 1, 0)),)),))
    ),
    "a prefetch that nobody used, still reading when the optimizer writes": Plan(
        prefetch="b",
        steps=(Step((Micro(), Micro(order=(1, 2), wastes=True, keep=True))), Step()),
    ),
    "offloaded shards written by the optimizer while an evaluation copies them": Plan(
        offload=True, steps=(Step((Micro(), Micro(evaluates=True))), Step())
    ),
    "a stage of gradients of two dtypes": Plan(
        layers=(Layer(unit=False), Layer(unit=False)),
        precision="mixed",
        direct_min_bytes=10**9,
        steps=(Step((Micro(order=(0,), sync=False), Micro(order=(1,)))), Step()),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_fixed(name: str) -> None:
    assert list(map(str, violations(FOUND[name])))[:3] == []


@pytest.mark.skipif(
    trace_hashes.KEPT.are_of_another_torch(),
    reason="traces have the operators of one version of torch",
)
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_traces_are_what_they_were() -> None:
    """Where this fails and the change meant it: ``python -m trace_hashes --write``."""
    trace_hashes.warm_up()
    known = trace_hashes.KEPT.read()
    chosen = [name for name in trace_hashes.names() if name in known]
    assert len(chosen) > 150
    changed = [n for n in chosen if trace_hashes.hash_of(trace_hashes.plan_named(n)) != known[n]]
    assert changed == []


@pytest.mark.long
def test_a_trace_knows_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hashes rely on: they change with an order between streams, and with nothing else."""
    trace_hashes.warm_up()
    plan = trace_hashes.plan_named("device 2")
    before = trace_hashes.hash_of(plan)
    assert trace_hashes.hash_of(plan) == before
    monkeypatch.setattr(DeviceStreams, "before_free", lambda streams: None)
    assert trace_hashes.hash_of(plan) != before
