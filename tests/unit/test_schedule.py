"""The event simulation, against schedules worked out by hand, and its costs, against formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.planning.hardware.hardware import PRESETS, Hardware, find_hardware
from fsdp2.planning.replay.device import Collective, LaunchDevice
from fsdp2.planning.simulation.costs import Cost, link_of, operation_s, transfer_cost
from fsdp2.planning.simulation.schedule import Task, schedule
from fsdp2.planning.trace.events import Compute, Operation
from fsdp2.transports.host.topology import Ring

H100 = find_hardware("h100")


def times(*tasks: Task) -> list[tuple[float, float]]:
    return [(round(s.begin, 9), round(s.end, 9)) for s in schedule(tasks)]


def test_one_after_the_other_on_a_stream() -> None:
    assert times(Task("a", Cost(2)), Task("a", Cost(3)), Task("b", Cost(4))) == [
        (0, 2),
        (2, 5),
        (0, 4),
    ]


def test_what_waits_begins_when_the_last_is_over() -> None:
    assert times(
        Task("a", Cost(2)),
        Task("b", Cost(5)),
        Task("c", Cost(1), after=(0, 1)),
        Task("a", Cost(1), after=(2,)),
    ) == [(0, 2), (0, 5), (5, 6), (6, 7)]


def test_prefetch_hides_a_gather_behind_compute() -> None:
    # Gathers of 3, computation of 4 per unit; the gather of unit i+1 begins with compute of i.
    gather, compute = Cost(3), Cost(4)
    spans = times(
        Task("gather", gather),
        Task("gather", gather),
        Task("compute", compute, after=(0,)),
        Task("gather", gather, after=(2,)),
        Task("compute", compute, after=(1,)),
        Task("compute", compute, after=(3,)),
    )
    assert spans == [(0, 3), (3, 6), (3, 7), (7, 10), (7, 11), (11, 15)]


def test_two_on_a_link_have_half_of_it_each() -> None:
    # Both want the link: 4 s and 2 s of it. Half speed until the second is through (at 4 s, when
    # the first has 2 s to go).
    assert times(Task("a", Cost(0, 4, "net")), Task("b", Cost(0, 2, "net"))) == [(0, 6), (0, 4)]
    # On two links nobody waits.
    assert times(Task("a", Cost(0, 4, "x")), Task("b", Cost(0, 2, "y"))) == [(0, 4), (0, 2)]


def test_latency_needs_no_link() -> None:
    # The second has 3 s of latency first: the first is alone until then and has 1 s to go, in
    # which they share.
    assert times(Task("a", Cost(0, 4, "net")), Task("b", Cost(3, 4, "net"))) == [(0, 5), (0, 8)]


def test_something_that_takes_no_time() -> None:
    assert times(Task("a", Cost(0)), Task("a", Cost(1)), Task("b", Cost(0), after=(1,))) == [
        (0, 0),
        (0, 1),
        (1, 1),
    ]
    assert schedule([]) == []


def test_waiting_for_a_later_task_is_refused() -> None:
    with pytest.raises(ValueError, match="only wait for earlier ones"):
        schedule([Task("a", Cost(1), after=(1,)), Task("b", Cost(1))])


@st.composite
def plans(draw: Any) -> list[Task]:
    tasks = []
    for i in range(draw(st.integers(1, 12))):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
        fixed, shared = draw(st.floats(0, 5)), draw(st.floats(0, 5))
        link = draw(st.sampled_from(["x", "y"]))
        tasks.append(Task(draw(st.sampled_from("abc")), Cost(fixed, shared, link), after))
    return tasks


@settings(max_examples=100, deadline=None)
@given(plans())
def test_any_schedule_keeps_order_and_speed(tasks: list[Task]) -> None:
    spans = schedule(tasks)
    ended: dict[str, float] = {}
    for task, span in zip(tasks, spans, strict=True):
        ready = max([ended.get(task.stream, 0.0), *(spans[i].end for i in task.after)])
        assert span.begin >= ready - 1e-9
        assert span.begin <= ready + 1e-9  # and nothing waits without a reason
        assert span.end - span.begin >= task.cost.total_s - 1e-6
        ended[task.stream] = span.end
    for link in "xy":
        busy = sum(t.cost.shared_s for t in tasks if t.cost.link == link)
        assert max(span.end for span in spans) >= busy - 1e-6
    assert max(span.end for span in spans) <= sum(t.cost.total_s for t in tasks) + 1e-6


# -- costs ---------------------------------------------------------------------------------------


def test_kernels_take_the_slower_of_arithmetic_and_memory() -> None:
    hardware = replace(H100, matmul_efficiency=1.0, memory_efficiency=1.0, kernel_s=1e-9)
    bf16 = torch.bfloat16
    assert operation_s(Operation(989 * 10**9, 10**6, bf16), hardware) == pytest.approx(1e-3)
    assert operation_s(Operation(10**6, 3350 * 10**6, bf16), hardware) == pytest.approx(1e-3)
    assert operation_s(Operation(1, 1, bf16), replace(hardware, kernel_s=5e-6)) == 5e-6
    fused = Operation(335 * 10**9, 0, bf16, attention=True)
    assert operation_s(fused, hardware) == pytest.approx(1e-3)


def gather(nbytes: int, kind: str = "all_gather", messages: int = 1, copied: int = 0) -> Collective:
    return Collective(kind, "shard", nbytes, nbytes, messages, "unit", copied)


def test_a_ring_in_a_node() -> None:
    cost = transfer_cost(gather(8 * 10**9), Ring(8, 8, 1), H100)
    assert cost.link == "node"
    assert cost.shared_s == pytest.approx(7e9 / 360e9)
    assert cost.fixed_s == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    twice = transfer_cost(gather(8 * 10**9, "all_reduce"), Ring(8, 8, 1), H100)
    assert twice.shared_s == pytest.approx(2 * cost.shared_s)
    assert transfer_cost(gather(8 * 10**9), Ring(1, 1, 8), H100) == Cost(0.0)


def test_a_ring_over_nodes() -> None:
    cost = transfer_cost(gather(16 * 10**9), Ring(16, 8, 1), H100)
    assert cost.link == "network"
    assert cost.shared_s == pytest.approx(15e9 / (0.8 * 400e9))
    assert cost.fixed_s == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_messages_of_a_call_take_turns_on_the_channels(kind: str) -> None:
    one, all_at_once, one_more, many = (
        transfer_cost(gather(8 * 10**9, kind, messages), Ring(16, 8, 1), H100)
        for messages in (1, 16, 17, 128)
    )
    once_round = 14 * 3.4e-6 + 14e-6
    assert all_at_once == one
    assert one_more.fixed_s - one.fixed_s == pytest.approx(once_round)
    assert many.fixed_s == pytest.approx(8.4e-6 + 8 * once_round)
    assert many.shared_s == one.shared_s  # the bytes are the same


def test_all_reduces_are_calls_of_their_own() -> None:
    one, three = (
        transfer_cost(gather(8 * 10**9, "all_reduce", messages), Ring(8, 8, 1), H100)
        for messages in (1, 3)
    )
    assert three.fixed_s == pytest.approx(3 * one.fixed_s)
    assert three.shared_s == one.shared_s


@pytest.mark.parametrize(("slice_kib", "faster"), [(16, "pack"), (32, "pack"), (256, "direct")])
def test_direct_or_packed_on_gloo_as_measured(slice_kib: int, faster: str) -> None:
    """16 parameters on 2 ranks: docs/developers/streams.md, "Batches"."""
    whole = 16 * 2 * slice_kib * 1024
    seconds = {
        "direct": transfer_cost(gather(whole, messages=16), Ring(2, 2, 1), PRESETS["cpu"]),
        "pack": transfer_cost(gather(whole, copied=2 * whole), Ring(2, 2, 1), PRESETS["cpu"]),
    }
    assert min(seconds, key=lambda name: seconds[name].total_s) == faster


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from([Ring(2, 2, 1), Ring(8, 8, 1), Ring(512, 8, 1), Ring(4, 1, 8)]),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 40),
)
def test_more_messages_are_never_faster_and_more_channels_never_slower(
    kind: str, ring: Ring, messages: int, more: int, channels: int
) -> None:
    def seconds(messages: int, channels: int) -> float:
        hardware = replace(H100, channels=channels)
        return transfer_cost(gather(10**8, kind, messages), ring, hardware).total_s

    assert seconds(messages, channels) <= seconds(messages + more, channels)
    assert seconds(messages, channels + more) <= seconds(messages, channels)


def test_rings_of_replicas_share_the_network_of_a_node() -> None:
    one, eight = Ring(4, 1, 1), Ring(4, 1, 8)
    assert link_of(one, H100)[1] == pytest.approx(8 * link_of(eight, H100)[1])


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    hardware = PRESETS[name]
    assert hardware.name == name
    assert hardware.matmul_efficiency < 1
    assert find_hardware(name) is hardware


def test_hardware_of_ones_own() -> None:
    with pytest.raises(ValueError, match="network_bandwidth must be positive"):
        replace(H100, network_bandwidth=0)
    with pytest.raises(ValueError, match="channels must be positive"):
        replace(H100, channels=0)
    with pytest.raises(ValueError, match="no hardware 'b52'"):
        find_hardware("b52")
    with pytest.raises(TypeError, match="a name or a Hardware"):
        find_hardware(3)  # type: ignore[arg-type]
    ours: Hardware = replace(H100, name="ours", matmul_flops={torch.float32: 1e12})
    assert find_hardware(ours) is ours
    assert ours.flops_of(torch.bfloat16) == ours.flops_of(torch.float32)


# -- launches ------------------------------------------------------------------------------------


def test_a_device_remembers_what_waits_for_what() -> None:
    device = LaunchDevice()
    side, other = device.Stream(), device.Stream()
    work = Compute((), 0, 0)
    device.launch(work)  # 0
    side.wait_stream(device.compute)
    with device.stream(side):
        device.launch(work)  # 1, after 0
        event = device.Event()
        event.record()
        device.launch(work)  # 2
    device.compute.wait_event(event)
    device.launch(work)  # 3, after 1 but not after 2
    other.wait_stream(device.compute)  # nothing on it: what waits for it waits for 3
    side.wait_stream(other)
    with device.stream(side):
        device.launch(work)  # 4
    assert [launch.after for launch in device.launches] == [(), (0,), (), (1,), (3,)]
    assert [launch.stream for launch in device.launches] == [
        "compute", "all-gather", "all-gather", "compute", "all-gather",
    ]  # fmt: skip
    side.synchronize()
    device.launch(work)
    assert device.launches[-1].after == (4,)
