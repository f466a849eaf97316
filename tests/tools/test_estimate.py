"""What `estimate` says before a run is what the run does: bytes in memory and bytes sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import models as benchmark_models
from benchmarks.estimate import MAIN, MORE, Case, measure, predict
from by_keywords import estimate, trace_step
from fsdp2 import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, explain
from fsdp2.planning import Estimate
from fsdp2.planning.trace.account import Account, HeldBytes
from fsdp2.planning.trace.events import Gradient
from fsdp2.planning.trace.meter import StorageMeter
from fsdp2.planning.trace.optimizers import optimizer_cost
from fsdp2.sharding.bucket import KEEPS_DTYPES
from fsdp2.transports.host.topology import Ring, Topology, split_by_link
from harness import run_on

TOLERANCE = 0.02
SHORT = [
    Case("convolutional", strategy="optimizer", micro_batches=2, replicate_below=2**16),
    Case("recommender", micro_batches=3, accumulation="every"),
]
FOUR = [
    Case("transformer", (2, 2), strategy="hybrid", bf16=True),
    Case("transformer", (4,), reshard=2, checkpointing="full"),
]
LONG = [*FOUR, *(case for case in MAIN + MORE if case not in SHORT)]


@pytest.fixture(autouse=True)
def _no_fake_tables() -> Iterator[None]:
    """The language model caches its angles in a function, fake ones too."""
    yield
    benchmark_models.rotation.cache_clear()


def _measure(case: dict[str, Any]) -> dict[str, int]:
    benchmark_models.rotation.cache_clear()
    return measure(case)


def _check_against_a_run(case: Case) -> None:
    predicted = predict(case)
    measured = run_on(case.num_ranks, _measure, asdict(case))[0]
    assert measured["peak"] > measured["state"] > 0
    if case.ranks_per_node is not None and not measured["between"]:
        pytest.skip("processes may not read each other's memory here")
    for key, value in measured.items():
        assert predicted[key] == pytest.approx(value, rel=TOLERANCE), f"{key} of {case.name}"


def test_micro_batches_without_sync_are_added_up_in_the_dtype_of_the_reduction() -> None:
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, batch = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.zeros(2, 256)
    one, two = (estimate(model, 4, batch, mp_policy=low, micro_batches=n) for n in (1, 2))
    more = two.ranks[0].peak.total - one.ranks[0].peak.total
    numel = sum(p.numel() for p in model.parameters())
    assert more >= 2 * numel  # at least what float32 takes more than the bfloat16 of one backward


def test_sums_on_shards_need_less_and_send_more() -> None:
    model, batch = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24))), torch.zeros(2, 256)
    mesh, strategy = (4, 8), "hybrid"
    sent, peaks = {}, {}
    for kind in ("unsharded", "sharded", "every"):
        made = estimate(model, mesh, batch, strategy=strategy, micro_batches=4, accumulation=kind)
        peaks[kind] = made.worst.peak.total
        sent[kind] = {row.kind: row.sent for row in made.traffic}
    whole = sum(p.nbytes for p in model.parameters())
    assert peaks["unsharded"] - peaks["sharded"] > whole / 2
    assert peaks["every"] <= peaks["sharded"]
    once = sent["unsharded"]
    for kind, times in (("sharded", (4, 1)), ("every", (4, 4))):
        assert sent[kind]["all_gather"] == once["all_gather"]
        assert sent[kind]["reduce_scatter"] == times[0] * once["reduce_scatter"]
        assert sent[kind]["all_reduce"] == times[1] * once["all_reduce"]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_sums_on_shards_stay_between_micro_batches(num_ranks: int) -> None:
    """Also where they are reduced in another dtype than they have, and so not in place."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).bfloat16()
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    made = estimate(
        model,
        num_ranks,
        torch.zeros(2, 512, dtype=torch.bfloat16),
        mp_policy=wide,
        micro_batches=2,
        accumulation="every",
    ).worst
    whole = sum(p.nbytes for p in model.parameters())
    assert made.gradients == whole / num_ranks
    for peak in (made.forward, made.step):
        assert peak.parts["gradients"] == whole / num_ranks


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_a_run_needs_and_sends_what_was_estimated(case: Case) -> None:
    _check_against_a_run(case)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_more_runs_need_and_send_what_was_estimated(case: Case) -> None:
    _check_against_a_run(case)


# -- without runs --------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Three blocks with an embedding and a head around them."""

    def __init__(self, rows: int = 48, width: int = 32, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, rows)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def on_meta(make: Any = Blocks, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return make(**options)


TOKENS = torch.empty(4, 16, dtype=torch.long, device="meta")


def of_blocks(mesh: Any = 4, model: nn.Module | None = None, **options: Any) -> Estimate:
    return estimate(model or on_meta(), mesh, TOKENS, **options)


@pytest.mark.parametrize("strategy", ["full", "grad", "none", "hybrid"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_traffic_agrees_with_explain(strategy: str, device: str) -> None:
    model = on_meta()
    mesh = (2, 8) if strategy == "hybrid" else 8
    made = of_blocks(mesh, model, strategy=strategy, device_type=device)
    told = explain(model, mesh, strategy=strategy, device_type=device)
    assert made.sent == pytest.approx(told.totals.sent_bytes, rel=1e-3)
    assert made.worst.parameters == told.totals.sharded_bytes


def test_the_model_is_as_before() -> None:
    model = on_meta()
    tensors = dict(model.named_parameters())
    of_blocks(model=model, activation_checkpointing="full")
    after = dict(model.named_parameters())
    assert all(after[name] is tensor and tensor.is_meta for name, tensor in tensors.items())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    real = Blocks()
    weights = [p.detach().clone() for p in real.parameters()]
    of_blocks(model=real)
    assert all(torch.equal(p, w) for p, w in zip(real.parameters(), weights, strict=True))
    assert real(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


def test_sixteen_thousand_ranks_and_uneven_rows() -> None:
    made = of_blocks(16384)
    assert made.ranks[0].rank == 0
    assert made.ranks[-1].rank == 16383
    # The first 48 ranks have a row of the embedding; the last has nothing of any parameter.
    assert made.ranks[0].optimizer > made.ranks[-1].optimizer
    assert made.worst.rank == 0
    assert made.ranks[0].parameters == made.ranks[-1].parameters  # padding


def test_more_ranks_need_less_and_more_batch_needs_more() -> None:
    # (Small gradients keep their memory between steps, on one rank there are none to keep.)
    wide = on_meta(rows=512, width=256)
    peaks = [of_blocks(n, wide).worst.peak.total for n in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    large = estimate(on_meta(), 4, TOKENS.repeat(8, 1))
    assert large.worst.forward.parts["activations"] == pytest.approx(
        8 * of_blocks().worst.forward.parts["activations"],
        rel=0.1,  # other moments may be the highest
    )


def test_checkpointing_trades_activations_for_flops() -> None:
    none, full = (of_blocks(activation_checkpointing=mode) for mode in ("none", "full"))
    assert full.worst.peak.parts["activations"] < none.worst.peak.parts["activations"]
    # Of a block the first multiplication is done again; the last gives nothing that is needed.
    first = 2 * 64 * 32 * 128
    assert full.flops - none.flops == 3 * first


def test_checkpointing_inside_the_model_is_seen() -> None:
    class Own(Blocks):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    own = of_blocks(model=on_meta(Own)).worst.forward.parts["activations"]
    assert own < of_blocks().worst.forward.parts["activations"]


def test_flops_are_those_of_the_formula() -> None:
    model = on_meta()
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "emb" not in n
    )
    assert of_blocks(model=model).flops == 6 * 64 * matrices


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = on_meta()
    for block in model.blocks:
        block.requires_grad_(False)
    trained, all_trained = of_blocks(model=model).worst, of_blocks().worst
    assert trained.parameters == all_trained.parameters
    assert trained.gradients < all_trained.gradients / 2
    assert trained.optimizer < all_trained.optimizer / 2


def test_tied_parameters_count_once() -> None:
    model = on_meta()
    model.head = nn.Linear(32, 48, bias=False, device="meta")
    model.head.weight = model.embedding.weight
    assert of_blocks(model=model).num_params == sum(p.numel() for p in model.parameters())


def test_offloaded_shards_are_in_the_memory_of_the_host() -> None:
    device, host = of_blocks().worst, of_blocks(offload_policy=CPUOffloadPolicy()).worst
    assert host.host["parameters"] == device.parameters
    assert host.host["optimizer state"] == device.optimizer
    assert host.host["gradients"] == device.gradients
    assert host.peak.total < device.peak.total


def test_low_precision_halves_what_is_gathered() -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sent = [
        next(row.sent for row in of_blocks(mp_policy=p).traffic if row.kind == "all_gather")
        for p in (MixedPrecisionPolicy(), low)
    ]
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.02)


class ByData(nn.Module):
    """Keeps the positive entries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[y > 0].sum()


def test_shapes_that_depend_on_data() -> None:
    with pytest.raises(ValueError, match="fake=False"):
        estimate(ByData(), 2, torch.randn(4, 8))
    made = estimate(ByData(), 2, torch.randn(4, 8), fake=False)
    assert made.worst.peak.total > made.worst.parameters


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mesh": 0}, ValueError, "mesh_shape"),
        ({"mesh": (2, 2, 2)}, ValueError, "mesh_shape"),
        ({"mesh": "8"}, TypeError, "mesh_shape"),
        ({"strategy": "hybrid"}, ValueError, "two dims"),
        ({"strategy": "zero"}, ValueError, "no strategy 'zero'"),
        ({"reshard_after_forward": 3}, ValueError, "divides the number of shards"),
        ({"optimizer": "adamax"}, ValueError, "no optimizer 'adamax'"),
        ({"micro_batches": 0}, ValueError, "micro_batches must be at least 1, got 0"),
        ({"micro_batches": True}, TypeError, "micro_batches must be an int, got True"),
        ({"accumulation": "shardd"}, ValueError, "accumulation must be one of .* 'sharded'"),
        ({"prefetch": -1}, ValueError, "prefetch must be at least 0, got -1"),
        ({"max_gathered_bytes": 0}, ValueError, "max_gathered_bytes must be at least 1, got 0"),
        ({"ranks_per_node": 0}, ValueError, "ranks_per_node must be at least 1, got 0"),
        ({"activation_checkpointing": "some"}, ValueError, "must be one of"),
        ({"loss_fn": lambda out: out}, ValueError, "one element"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        of_blocks(**options)


def test_text_and_data_hold_the_same_numbers() -> None:
    made = of_blocks((2, 2), strategy="hybrid")
    data = made.to_dict()
    assert data["peak_bytes"] == made.worst.peak.total
    assert data["sent_bytes"] == sum(row["sent"] for row in data["traffic"])
    text = str(made)
    assert "all-reduce" in text
    assert "optimizer state" in text


# -- pieces --------------------------------------------------------------------------------------


def test_a_meter_counts_storages_while_they_live() -> None:
    with StorageMeter() as meter:
        meter.begin()
        a = torch.ones(256)
        view = a[:10]
        b = a * 2
        del a
        done = meter.take()
        assert done is not None
        assert (done.peak, done.net) == (2048, 2048)  # the view holds what it views
        del view
        c = b + 1
        del b, c
        done = meter.take()
        assert done is not None
        assert (done.peak, done.net) == (0, -2048)
        assert len(done.operations) == 1


def test_small_gradients_keep_their_memory_between_steps() -> None:
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    wide = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    for model, kept in ((small, 1), (wide, 0)):
        made = estimate(model, 2, torch.zeros(2, model[0].in_features), wrap="root")
        shard = sum(p.nbytes for p in model.parameters()) // 2
        assert made.worst.forward.parts.get("gradients", 0) == kept * shard


@pytest.mark.parametrize("reduces_in", [torch.float32, torch.bfloat16])
def test_gradients_of_an_lstm_have_the_dtype_that_the_device_makes(reduces_in: torch.dtype) -> None:
    model, batch = nn.LSTM(8, 16), torch.zeros(4, 2, 8)
    low = MixedPrecisionPolicy(torch.bfloat16, reduces_in)

    def gradients(device_type: str, *, fake: bool) -> dict[int, tuple[int, torch.dtype]]:
        trace = trace_step(model, batch, [], mp_policy=low, device_type=device_type, fake=fake)
        made = [event for event in trace.events if isinstance(event, Gradient)]
        return {event.param: (event.nbytes, event.dtype) for event in made}

    on_cpu = gradients("cpu", fake=True)
    assert on_cpu == gradients("cpu", fake=False)
    assert len(on_cpu) == 4
    # Processors without a kernel for bfloat16 run an operator for each position.
    one_kernel = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    kept = reduces_in is torch.float32 and KEEPS_DTYPES and one_kernel
    assert {dtype for _, dtype in on_cpu.values()} == {torch.float32 if kept else torch.bfloat16}
    assert {dtype for _, dtype in gradients("cuda", fake=True).values()} == {torch.bfloat16}


def test_attention_with_a_causal_mask_costs_half() -> None:
    q = torch.randn(2, 4, 16, 8)
    flops = []
    for causal in (False, True):
        with StorageMeter() as meter:
            F.scaled_dot_product_attention(q, q, q, is_causal=causal)
        done = meter.take()
        assert done is not None
        flops.append(done.flops)
    assert flops[0] == 2 * flops[1] == 2 * 2 * 2 * 4 * 16 * 16 * 8


def test_held_bytes_go_with_the_last_reference() -> None:
    account = Account()
    held = HeldBytes(account, "a", 100)
    other = held
    account.touch("b", 50)
    del held
    assert account.total == 100
    del other
    assert account.total == 0
    assert account.peak.total == 150
    assert account.peak.parts == {"a": 100, "b": 50}


def test_optimizers_are_asked() -> None:
    shards = [((10, 4), torch.float32), ((3,), torch.float32)]
    adam = optimizer_cost(shards, torch.optim.AdamW, "cuda")
    assert adam.state == 2 * 43 * 4 + 2 * 4  # two moments and a step count each
    assert adam.moment > 0
    assert optimizer_cost(shards, "sgd", "cuda").state == 0
    assert optimizer_cost(shards, "momentum", "cuda").state == 43 * 4
    assert optimizer_cost(shards, None, "cuda").state == 0
    with pytest.raises(ValueError, match="depends on values"):
        optimizer_cost(shards, torch.optim.Adafactor, "cuda")


def test_rings_pass_through_every_node_once() -> None:
    flat = Topology(num_shards=64, num_replicas=1, ranks_per_node=8)
    assert flat.ring("shard") == Ring(64, 8, 1)
    assert flat.ring("shard").num_nodes == 8
    hybrid = Topology(num_shards=8, num_replicas=4, ranks_per_node=8)
    assert hybrid.ring("shard").num_nodes == 1
    assert hybrid.ring("replicate") == Ring(4, 1, 8)  # eight of them at once in each node
    small = Topology(num_shards=2, num_replicas=8, ranks_per_node=8)
    assert small.ring("replicate") == Ring(8, 4, 2)
    assert split_by_link(800, Ring(64, 8, 1)) == (700, 100)
    assert split_by_link(800, Ring(8, 8, 1)) == (800, 0)


def host_bytes(made: Estimate) -> int:
    """What the four ranks of a node send to other nodes."""
    return 4 * sum(row.between_nodes for row in made.traffic)


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_relays_send_each_shard_and_each_sum_once_between_nodes(num_nodes: int) -> None:
    """A node sends 2 M (H-1)/H to the others, and up to half more if backward gathers again."""

    def of(mesh: Any, strategy: str) -> Estimate:
        options: dict[str, Any] = {"device_type": "cpu", "ranks_per_node": 4}
        return of_blocks(mesh, on_meta(rows=1040, width=128), strategy=strategy, **options)

    ranks = 4 * num_nodes
    nbytes = sum(param.nbytes for param in on_meta(rows=1040, width=128).parameters())
    share = nbytes * (num_nodes - 1) / num_nodes
    for strategy in ("grad", "optimizer", "none"):
        assert host_bytes(of(ranks, strategy)) == pytest.approx(2 * share, rel=0.02), strategy
    assert host_bytes(of((num_nodes, 4), "hybrid")) == pytest.approx(2 * share, rel=0.02)
    full = of(ranks, "full")
    assert 2.5 * share < host_bytes(full) < 3 * share
    # In fp32, what is not sent to other nodes is read in this one.
    assert full.sent == of_blocks(ranks, on_meta(rows=1040, width=128), device_type="cpu").sent


def test_sums_for_other_nodes_are_as_wide_as_the_reduction() -> None:
    """Gradients in bfloat16 are added in float32: the node's sums are sent in that."""
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"device_type": "cpu", "mp_policy": low, "direct_min_bytes": 0}
    rows = [
        {row.kind: row for row in of_blocks(8, ranks_per_node=node, **options).traffic}
        for node in (1, 4, 8)
    ]
    alone, relayed, one = (row["reduce_scatter"] for row in rows)
    assert one.between_nodes == 0
    assert alone.within_nodes == 0
    assert alone.between_nodes == one.within_nodes
    # Of the sums of four ranks, one is sent for the four parts of the other node's ranks.
    assert relayed.between_nodes == pytest.approx(2 * alone.between_nodes / 7, rel=0.02)
    gathers = [row["all_gather"] for row in rows]
    assert gathers[1].between_nodes == pytest.approx(gathers[0].between_nodes / 7)
    assert gathers[1].sent == gathers[2].sent == gathers[0].sent


# -- fewer bytes -----------------------------------------------------------------------------------

INT8 = CommPolicy(gather=torch.int8, reduce=torch.int8, error_feedback=True)
NARROW = {
    "int8": ("full", 8, INT8, {}),
    "two hops": ("full", 8, replace(INT8, ranks_per_node=2), {}),
    "replicas": ("hybrid", (2, 4), INT8, {}),
    "replicated": ("none", 4, INT8, {}),
    "secondary": ("full", 8, CommPolicy(secondary=torch.int8), {"reshard_after_forward": 2}),
    "bf16": ("full", 2, CommPolicy(torch.bfloat16, torch.bfloat16), {}),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_narrow_traffic_agrees_with_explain(name: str, device: str) -> None:
    strategy, mesh, policy, options = NARROW[name]
    options = {**options, "strategy": strategy, "device_type": device, "direct_min_bytes": 100}
    model = on_meta()
    made = of_blocks(mesh, model, comm_policy=policy, **options)
    told = explain(model, mesh, comm_policy=policy, **options).totals
    assert made.sent == told.sent_bytes
    in_full = of_blocks(mesh, model, **options)
    assert made.sent < 0.9 * in_full.sent
    held = made.worst.step.parts.get("error feedback", 0)
    assert held == told.residual_bytes
    if name == "secondary":
        kept = made.worst.backward.parts.get("secondary shards", 0)
        assert kept <= in_full.worst.backward.parts.get("secondary shards", 0)


def test_two_hops_send_less_between_nodes() -> None:
    """Of 4 nodes of 8 ranks: an all-to-all sends 24 rows to other nodes, two hops send 3."""
    policy = CommPolicy(reduce=torch.int8)
    flat = of_blocks(32, comm_policy=policy)
    two = of_blocks(32, comm_policy=replace(policy, ranks_per_node=8))
    rows = [{row.group: row for row in m.traffic if row.kind == "all_to_all"} for m in (flat, two)]
    (one,) = rows[0].values()
    assert rows[1].keys() == {"within", "across"}
    assert rows[1]["within"].between_nodes == 0
    assert rows[1]["across"].within_nodes == 0
    assert one.between_nodes == 8 * rows[1]["across"].between_nodes
    assert rows[1]["within"].sent == 7 * 4 * one.sent // 31
