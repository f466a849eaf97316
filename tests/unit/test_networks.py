"""Networks that are not flat: pods with less bandwidth between them, and rails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from fsdp2.planning.hardware.hardware import PRESETS, Hardware, find_hardware
from fsdp2.planning.replay.device import Collective
from fsdp2.planning.simulation.costs import Cost, transfer_cost
from fsdp2.transports.host.topology import Ring, Topology, split_by_link

H100 = PRESETS["h100"]
PODS = replace(H100, nodes_per_pod=384, oversubscription=7.0)  # Llama 3's cluster
RAILS = replace(H100, rail_optimized=True, oversubscription=2.0)
NETWORK = 0.8 * 400e9
GB = 10**9


def cost_of(topology: Topology, group: str, hardware: Hardware, kind: str = "all_gather") -> Cost:
    ring = topology.ring(group)
    sent = 8 * GB * (ring.size - 1) // ring.size if kind == "all_to_all" else 0
    return transfer_cost(Collective(kind, group, 8 * GB, sent, 1, "unit"), ring, hardware)


def slower(topology: Topology, group: str, hardware: Hardware, kind: str = "all_gather") -> float:
    flat = replace(hardware, nodes_per_pod=0, oversubscription=1.0, rail_optimized=False)
    there = cost_of(topology, group, hardware, kind)
    return there.shared_s / cost_of(topology, group, flat, kind).shared_s


def test_one_ring_through_all_nodes_crosses_the_spine_once_and_is_as_fast() -> None:
    # A pod has the bandwidth of 384 / 7 nodes to the spine, and the ring is that of one node.
    assert slower(Topology(16384, 1, 8), "shard", PODS) == 1.0
    # Two nodes whose links to the spine have a seventh of their bandwidth are another matter.
    assert slower(Topology(64, 1, 8), "shard", replace(PODS, nodes_per_pod=2)) == 7 / 2
    assert slower(Topology(16, 1, 8), "shard", replace(PODS, nodes_per_pod=2)) == 1.0  # in a pod


@pytest.mark.parametrize(
    ("nodes_apart", "times"), [(1, 1.0), (48, 1.0), (96, 96 * 7 / 384), (192, 3.5), (384, 7.0)]
)
def test_rings_that_are_interleaved_share_the_spine(nodes_apart: int, times: float) -> None:
    """Replicas of ``nodes_apart`` nodes each: as many rings of all-reduces pass between pods."""
    topology = Topology(nodes_apart * 8, 4 * 384 // nodes_apart, 8)
    assert slower(topology, "replicate", PODS, "all_reduce") == pytest.approx(times)
    assert slower(topology, "shard", PODS) == 1.0  # within pods
    # Pods further apart than a pod is large do not get slower than the spine.
    far = Topology(768 * 8, 2, 8)
    assert slower(far, "replicate", PODS, "all_reduce") == pytest.approx(7.0)


def test_pods_matter_from_their_size_on() -> None:
    for replicas, times in ((12, 1.0), (13, 32 * 7 / 384)):
        # Replicas of 32 nodes: 12 of them are one pod.
        topology = Topology(256, replicas, 8)
        strong = replace(PODS, oversubscription=28.0)
        assert slower(topology, "replicate", strong, "all_reduce") == pytest.approx(
            4 * times if replicas > 12 else 1.0
        )


def test_groups_of_which_some_are_in_two_pods_count_as_those() -> None:
    # Three groups of 8 nodes, and pods of 12: the second group is in two pods.
    topology = Topology(64, 3, 8)
    pods = replace(PODS, nodes_per_pod=12, oversubscription=24.0)
    assert slower(topology, "shard", pods) == 2.0
    assert slower(Topology(64, 1, 8), "shard", pods) == 1.0  # the first is in one


def test_what_an_all_to_all_sends_to_other_pods_passes_the_spine() -> None:
    # Four nodes in two pods: of the 24 ranks elsewhere, 16 are in the other pod.
    pods = replace(H100, nodes_per_pod=2, oversubscription=6.0)
    assert slower(Topology(32, 1, 8), "shard", pods, "all_to_all") == pytest.approx(6 * 16 / 24)
    assert slower(Topology(16, 1, 8), "shard", pods, "all_to_all") == 1.0
    mild = replace(pods, oversubscription=1.2)  # the nodes' own links are slower
    assert slower(Topology(32, 1, 8), "shard", mild, "all_to_all") == 1.0
    cost = cost_of(Topology(32, 1, 8), "shard", pods, "all_to_all")
    assert cost.shared_s == pytest.approx(8 * GB * 31 // 32 * 24 // 31 * 8 * 4 / NETWORK, rel=1e-6)


def test_rings_stay_on_their_rails_and_all_to_alls_do_not() -> None:
    four = Topology(32, 1, 8)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert slower(four, "shard", RAILS, kind) == 1.0
    # Of the 24 ranks elsewhere, 3 are on the rail.
    assert slower(four, "shard", RAILS, "all_to_all") == pytest.approx(2 * 21 / 24)
    # One rank of each node: all on one rail.
    assert slower(Topology(8, 4, 8), "replicate", RAILS, "all_to_all") == 1.0
    # With pods of two nodes, one rank elsewhere is on the rail below the spine.
    pods = replace(RAILS, nodes_per_pod=2)
    assert slower(four, "shard", pods, "all_to_all") == pytest.approx(2 * 23 / 24)
    # As much bandwidth in the spine as below it: a DGX SuperPOD.
    assert slower(four, "shard", replace(RAILS, oversubscription=1.0), "all_to_all") == 1.0


# -- flat networks -------------------------------------------------------------------------------


def flat_cost(transfer: Collective, ring: Ring, hardware: Hardware) -> tuple[float, str]:
    """The seconds on the slowest link, as before there were pods."""
    whole = hardware.network_bandwidth * hardware.network_efficiency
    if transfer.kind == "all_to_all":
        within, between = split_by_link(transfer.sent, ring, to_all=True)
        node_s = within / hardware.node_bandwidth
        network_s = between * ring.per_node * ring.groups_per_node / whole
        return (network_s, "network") if network_s > node_s else (node_s, "node")
    moved = transfer.nbytes * (ring.size - 1) / ring.size
    moved *= 2 if transfer.kind == "all_reduce" else 1
    network = whole / ring.groups_per_node
    slow = ring.num_nodes == 1 or (ring.per_node > 1 and network > hardware.node_bandwidth)
    return (moved / hardware.node_bandwidth, "node") if slow else (moved / network, "network")


@given(
    st.sampled_from([1, 2, 4, 8, 32, 64, 512, 3072]),
    st.sampled_from([2, 3, 16, 64]),
    st.sampled_from(["shard", "replicate", "all"]),
    st.sampled_from(["all_gather", "all_reduce", "all_to_all"]),
    st.integers(1, 10**12),
    st.sampled_from(["h100", "a100-80", "gb200", "cpu"]),
)
def test_flat_networks_take_what_they_took_bit_for_bit(
    shards: int, replicas: int, group: str, kind: str, nbytes: int, name: str
) -> None:
    ring = Topology(shards, replicas, PRESETS[name].ranks_per_node).ring(group)
    transfer = Collective(kind, group, nbytes, nbytes, 1, "unit")
    if ring.size > 1:
        made = transfer_cost(transfer, ring, PRESETS[name])
        assert (made.shared_s, made.link) == flat_cost(transfer, ring, PRESETS[name])


# -- files ---------------------------------------------------------------------------------------


def test_files_have_the_fields(tmp_path: Path) -> None:
    def read(**fields: Any) -> Hardware:
        (tmp_path / "ours.json").write_text(json.dumps({"base": "h100", **fields}))
        return find_hardware(str(tmp_path / "ours.json"))

    made = read(nodes_per_pod=384, oversubscription=7, rail_optimized=True)
    assert (made.nodes_per_pod, made.oversubscription, made.rail_optimized) == (384, 7, True)
    for fields, message in (
        ({"nodes_per_pod": 1.5}, r"ours\.json: nodes_per_pod has to be a whole number"),
        ({"nodes_per_pod": -1}, r"ours\.json: .*nodes_per_pod must not be negative"),
        ({"rail_optimized": 1}, r"ours\.json: rail_optimized has to be true or false"),
        ({"oversubscription": "7:1"}, r"ours\.json: oversubscription has to be a number"),
        ({"oversubscription": 0.5}, r"ours\.json: .*oversubscription must be 1 or more"),
        ({"oversubscription": 7}, r"ours\.json: .*give nodes_per_pod, or rail_optimized"),
        ({"nodes_per_pods": 2}, r"no field 'nodes_per_pods'.*nodes_per_pod"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**fields)
