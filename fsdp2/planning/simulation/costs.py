"""Time of kernels (roofline) and collectives (rings): pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, sqrt
from statistics import NormalDist

from ...transports.host.topology import Ring, split_by_link
from ..hardware.curves import Points, rate_at, seconds_at
from ..hardware.hardware import (
    ATTEND,
    CALL,
    CONVOLVE,
    GATHER,
    MOVE,
    MULTIPLY,
    OPERANDS,
    REDUCE,
    Hardware,
)
from ..hardware.hardware import HOST as HOST_PART
from ..replay.device import Collective, Copy
from ..trace.events import Compute, Operation

NODE, NETWORK, HOST = "node", "network", "host"  # links


@dataclass(frozen=True)
class Cost:
    """The time of one piece of work on a stream.

    Attributes:
        fixed_s: seconds that do not depend on other work: latency, or a kernel's time.
        shared_s: seconds on ``link`` if nothing else uses it.
        slowed_by: the fraction of its speed that it loses while something else ``occupies``
            multiprocessors; applies only to ``fixed_s``.
    """

    fixed_s: float
    shared_s: float = 0.0
    link: str | None = None
    slowed_by: float = 0.0
    occupies: bool = False

    @property
    def total_s(self) -> float:
        return self.fixed_s + self.shared_s


def operation_s(operation: Operation, hardware: Hardware) -> float:
    """The measured time, or the roofline model's: the slower of arithmetic and memory.

    It is at least the time between two launches.
    """
    measured = measured_s(operation, hardware)
    if measured is not None:
        return _operator_in_step_s(operation, measured, hardware)
    rate = hardware.flops_of(operation.dtype)
    if operation.attention:
        rate = min(rate, hardware.attention_flops)
    elif hardware.half_intensity and operation.nbytes and operation.flops:
        intensity = operation.flops / operation.nbytes
        rate *= intensity / (intensity + hardware.half_intensity)
    arithmetic = operation.flops / rate
    memory = operation.nbytes / (hardware.memory_bandwidth * hardware.memory_efficiency)
    return max(arithmetic, memory, hardware.kernel_s)


def measured_s(operation: Operation, hardware: Hardware) -> float | None:
    """The time from the hardware's tables; None if it has none.

    A multiplication takes its FLOPs at the FLOP/s of its arithmetic intensity, plus the fixed time
    of a kernel. Other operators take the time of their bytes.
    """
    dtype = str(operation.dtype).removeprefix("torch.")
    if operation.flops:
        found = _rates(operation, hardware)
        if not found or not operation.nbytes:
            return None
        rate = rate_at(found, operation.flops / operation.nbytes)
        return hardware.kernel_s + operation.flops / rate
    times = hardware.operator_s
    for name in (operation.operator, "aten::add"):
        for each in dict.fromkeys((dtype, "float32")):
            if f"{name} {each}" in times:
                return seconds_at(times[f"{name} {each}"], operation.nbytes)
    return None


def _rates(operation: Operation, hardware: Hardware) -> Points:
    """FLOP/s of a multiplying operator, by arithmetic intensity; empty: not measured."""
    dtype = str(operation.dtype).removeprefix("torch.")
    rates = hardware.operator_flops
    other = "attention" if operation.attention else "aten::mm"
    names = (operation.operator, other, "aten::mm")
    return next((rates[key] for n in names if (key := f"{n} {dtype}") in rates), ())


def in_step_s(measured: float, part: str, hardware: Hardware) -> float:
    """The measured time of an operator, multiplied by the step factors.

    If the host orders everything, the fixed time of an operator counts as the host's.
    """
    start = min(measured, hardware.kernel_s) if hardware.host_ordered else 0.0
    return start * hardware.step_factor(HOST_PART) + (measured - start) * hardware.step_factor(part)


def _operator_in_step_s(operation: Operation, measured: float, hardware: Hardware) -> float:
    if not operation.flops:
        return in_step_s(measured, MOVE, hardware)
    if operation.attention:
        return in_step_s(measured, ATTEND, hardware)
    if "conv" in operation.operator:
        return in_step_s(measured, CONVOLVE, hardware)
    least = operation.flops / max(rate for _, rate in _rates(operation, hardware))
    operands = in_step_s(max(0.0, measured - least), OPERANDS, hardware)
    return least * hardware.step_factor(MULTIPLY) + operands


def compute_s(compute: Compute, hardware: Hardware) -> float:
    """Time of all kernels of ``compute``, one after the other."""
    return sum(operation_s(operation, hardware) for operation in compute.operations)


def stragglers_s(kernels_s: float, num_ranks: int, hardware: Hardware) -> float:
    """Additional seconds of the slowest of ``num_ranks``, compared with the mean.

    The times of kernels, host and links vary (clocks, daemons, repeated packets). A disturbance is
    assumed to last for about a second, and different seconds to be independent. So a deviation
    grows linearly with the time up to a second, and then with its square root. Ranks wait for each
    other at the end of the step, if not in every collective (gathers run ahead). The largest of n
    normal deviations is expected at the quantile (n - 3/8) / (n + 1/4) (G. Blom, Statistical
    Estimates and Transformed Beta-Variables, 1958).
    """
    if num_ranks < 2 or kernels_s <= 0:
        return 0.0
    largest = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return hardware.jitter * min(kernels_s, sqrt(kernels_s)) * largest


def ranks_of_pod(ring: Ring, nodes: int) -> int:
    """Number of a ring's ranks in a pod of this many nodes; 0 nodes: all are in one pod.

    If some rings of a group are within one pod and others are not, the result is for the others.
    """
    reach = ring.num_nodes * ring.stride
    if not nodes or max(ring.all_nodes, reach) <= nodes or nodes % reach == 0:
        return ring.size
    return gcd(max(nodes // ring.stride, 1), ring.num_nodes) * ring.per_node


def link_of(ring: Ring, hardware: Hardware) -> tuple[str, float]:
    """The slowest link of a ring, and the bytes per second that the ring has there.

    A ring that leaves the node passes all its bytes over the node's network once. The other rings
    of its kind that start in the node run at the same time and share the network. Between two pods,
    the rings of all interleaved nodes share the pod's bandwidth to the spine.
    """
    if ring.num_nodes == 1:
        return NODE, hardware.node_bandwidth
    network = hardware.network_bandwidth * hardware.network_efficiency / ring.groups_per_node
    pod = hardware.nodes_per_pod
    if ranks_of_pod(ring, pod) < ring.size:
        network *= min(1.0, pod / (min(ring.stride, pod) * hardware.oversubscription))
    if ring.per_node > 1 and network > hardware.node_bandwidth:
        return NODE, hardware.node_bandwidth
    return NETWORK, network


def transfer_cost(transfer: Collective, ring: Ring, hardware: Hardware) -> Cost:
    """The cost of a collective as a ring: n-1 steps, (number of nodes - 1) over the network.

    Every rank passes on (n-1)/n of the whole; an all-reduce does that twice. The messages of a call
    are distributed over the channels, take turns on each, and share the bandwidth. NCCL estimates a
    group of collectives in the same way: latency times collectives per channel, plus bytes over
    bandwidth (``ncclTopoGetAlgoTime`` in src/graph/tuning.cc). The figures are for large messages.
    All-reduces are not grouped, so each message is a call. Copies to and from buffers run on the
    stream of the call, before or after it. A "send" sends everything to the next rank, on all ranks
    of the ring at once, and the slowest link counts.
    """
    if ring.size < 2:
        return Cost(0.0)
    measured = _measured_transfer(transfer, ring, hardware)
    if measured is not None:
        return measured
    link, bandwidth = link_of(ring, hardware)
    between = ring.num_nodes - 1
    ring_s = (
        between * hardware.network_latency_s + (ring.size - 1 - between) * hardware.node_latency_s
    )
    if transfer.kind == "all_to_all":
        return _all_to_all_cost(transfer, ring, hardware)
    if transfer.kind == "send":
        hop_s = hardware.network_latency_s if between else hardware.node_latency_s
        latency = hardware.call_latency_s + hop_s + _copies_s(transfer.copied, hardware)
        return Cost(latency, transfer.nbytes / bandwidth, link, occupies=True)
    moved = transfer.nbytes * (ring.size - 1) / ring.size
    if transfer.kind == "all_reduce":
        latency = transfer.messages * (hardware.call_latency_s + 2 * ring_s)
        moved *= 2
    else:
        rounds = -(-transfer.messages // hardware.channels)
        latency = hardware.call_latency_s + rounds * ring_s
    fixed_s = latency + _copies_s(transfer.copied, hardware)
    return Cost(fixed_s, moved / bandwidth, link, occupies=True)


def _measured_transfer(transfer: Collective, ring: Ring, hardware: Hardware) -> Cost | None:
    """The cost from the table of its group; its time beyond the minimum uses the link.

    The times include copies of packed data, as in the library's calls.
    """
    name = f"{transfer.kind} {ring.size}"
    if ring.num_nodes > 1:
        name += f" on {ring.num_nodes}"
    points = hardware.collective_s.get(name)
    if not points:
        return None
    latency = points[0][1]
    whole = seconds_at(points, transfer.nbytes)
    link = NODE if ring.num_nodes == 1 else NETWORK
    latency += hardware.message_s * max(0, transfer.messages - 1)
    latency += hardware.param_s * max(0, transfer.params - 1)
    latency *= hardware.step_factor(CALL)
    rest = hardware.step_factor(GATHER if transfer.kind == "all_gather" else REDUCE)
    return Cost(latency, rest * (whole - points[0][1]), link, occupies=True)


def _all_to_all_cost(transfer: Collective, ring: Ring, hardware: Hardware) -> Cost:
    """The cost of an all-to-all: every rank sends to every other rank at once, not in a ring.

    All ranks of a node send over its network, and the slower of the network and the links in the
    node counts. Traffic to other pods passes the spine, and with rails also traffic to other rails;
    each node has its part of the spine.
    """
    within, between = split_by_link(transfer.sent, ring, to_all=True)
    latency = hardware.call_latency_s + hardware.node_latency_s
    node_s = within / hardware.node_bandwidth
    fixed_s = latency + _copies_s(transfer.copied, hardware)
    if not between:
        return Cost(fixed_s, node_s, NODE, occupies=True)
    network = hardware.network_bandwidth * hardware.network_efficiency
    spine = between * _over_spine(ring, hardware) * hardware.oversubscription
    network_s = max(between, spine) * ring.per_node * ring.groups_per_node / network
    fixed_s += hardware.network_latency_s
    slower = (network_s, NETWORK) if network_s > node_s else (node_s, NODE)
    return Cost(fixed_s, *slower, occupies=True)


def _over_spine(ring: Ring, hardware: Hardware) -> float:
    """The fraction of an all-to-all's traffic between nodes that passes the spine."""
    elsewhere = ring.size - ring.per_node
    near: float = max(ranks_of_pod(ring, hardware.nodes_per_pod) - ring.per_node, 0)
    if hardware.rail_optimized:  # one rank of each node is on the same rail
        near /= ring.per_node
    return 1 - near / elsewhere


def _copies_s(nbytes: int, hardware: Hardware) -> float:
    """Seconds of copies, as one kernel, that read and write ``nbytes`` in total."""
    if not nbytes:
        return 0.0
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    return max(nbytes / bandwidth, hardware.kernel_s)


def copy_cost(copy: Copy, hardware: Hardware) -> Cost:
    """The cost of a copy between GPU memory and host memory."""
    return Cost(hardware.kernel_s, copy.nbytes / hardware.host_bandwidth, HOST)
