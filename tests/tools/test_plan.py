"""`plan`: what it chooses follows from the hardware and the memory, and runs as planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from by_keywords import make_setup, plan, trace_step
from fsdp2 import CommPolicy, MixedPrecisionPolicy
from fsdp2.planning import Hardware, Plan, SimulatedStep, Simulator, find_hardware
from fsdp2.planning.choices import meshes_of
from fsdp2.planning.replay.device import Collective
from fsdp2.planning.trace.events import StepTrace
from fsdp2.planning.traces import wraps_of
from fsdp2.planning.workload import default_checkpoint_modules
from fsdp2.runtime.unit import unit_of
from fsdp2.wrap import units_of
from harness import distributed

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(nn.Module):
    """Blocks of two matrices with an embedding and a head around them."""

    def __init__(self, width: int = 2048, num_blocks: int = 8, rows: int = 1024) -> None:
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


def on_meta(**sizes: int) -> Model:
    with torch.device("meta"):
        return Model(**sizes)


def tokens(num: int = 4096) -> Tensor:
    return torch.empty(1, num, dtype=torch.long, device="meta")


def traced(num_tokens: int = 4096, mode: str = "none", **sizes: int) -> tuple[StepTrace, Any]:
    model = on_meta(**sizes)
    units = units_of(model, "auto")
    trace = trace_step(
        model,
        tokens(num_tokens),
        [name for unit in units for name in unit.modules],
        mp_policy=BF16,
        activation_checkpointing=mode,
        checkpoint_modules=default_checkpoint_modules(model, units),
    )
    return trace, units


@pytest.fixture(scope="module")
def step() -> Any:
    return traced()


def simulate(step: Any, hardware: Hardware = H100, mesh: Any = 64, **options: Any) -> SimulatedStep:
    trace, units = step
    setup = make_setup(units, mesh, mp_policy=BF16, **options)
    return Simulator(hardware).run(trace, setup)


# -- the simulation ------------------------------------------------------------------------------


def test_without_communication_a_step_is_its_kernels(step: Any) -> None:
    alone = simulate(step, mesh=1)
    assert alone.seconds == pytest.approx(alone.compute_s + alone.optimizer_s)
    assert set(alone.stream_s) == {"compute"}


def test_a_step_takes_at_least_every_stream_and_less_than_all_together(step: Any) -> None:
    made = simulate(step)
    assert made.seconds >= max(made.stream_s.values())
    assert made.seconds < sum(made.stream_s.values())
    assert made.exposed_s >= 0


class Float8(nn.Module):
    """A linear that multiplies in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2048, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones((), device=x.device)
        a, b = (t.detach().to(torch.float8_e4m3fn) for t in (x, self.linear.weight))
        y = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
        return y + self.linear(x)


def test_float8_has_its_own_rate_or_the_plan_says_which() -> None:
    assert H100.flops_of(torch.float8_e4m3fn) > 1.9 * H100.flops_of(torch.bfloat16)
    for name, said in (("h100", False), ("a100-80", True)):
        made = plan(Float8(), torch.zeros(64, 2048), name, 8, mp_policy=BF16)
        note = "has no FLOP/s of float8_e4m3fn: multiplications in it take the time of bfloat16"
        assert (note in str(made)) == said
        assert "of bfloat16: mult" not in str(made)


def test_faster_hardware_is_never_slower(step: Any) -> None:
    for field in ("network_bandwidth", "node_bandwidth", "memory_bandwidth", "matmul_efficiency"):
        before = None
        for factor in (0.01, 0.1, 0.5, 1.0):
            hardware = replace(H100, **{field: getattr(H100, field) * factor})
            seconds = simulate(step, hardware).seconds
            assert before is None or seconds <= before * (1 + 1e-9), field
            before = seconds


def test_a_slow_network_is_waited_for(step: Any) -> None:
    slow = simulate(step, replace(H100, network_bandwidth=10e9))
    gathered = slow.stream_s["all-gather"]
    assert slow.exposed_s > 0.5 * gathered > slow.compute_s


def test_gathers_of_the_next_unit_run_beside_compute(step: Any) -> None:
    made = simulate(step)
    spans = {name: [] for name in made.stream_s}  # type: dict[str, list[Any]]
    for launch, span in zip(made.launches, made.spans, strict=True):
        spans[launch.stream].append(span)
    covered = sum(
        max(0.0, min(g.end, c.end) - max(g.begin, c.begin))
        for g in spans["all-gather"]
        for c in spans["compute"]
    )
    assert covered > 0.5 * made.stream_s["all-gather"]


def test_the_rate_limiter_holds_gathers_back(step: Any) -> None:
    """No gather begins before compute is through with the unit before the one that computes."""
    made = simulate(step, replace(H100, network_bandwidth=1e15, node_bandwidth=1e15))
    forward = [
        (launch, span)
        for launch, span in zip(made.launches, made.spans, strict=True)
        if launch.phase == "forward"
    ]
    ends = {x.unit: s.end for x, s in forward if x.stream == "compute"}
    begins = {x.unit: s.begin for x, s in forward if x.stream == "all-gather"}
    for i in range(2, 8):
        assert begins[f"blocks.{i}"] >= ends[f"blocks.{i - 2}"] - 1e-9


def test_events_do_not_grow_with_ranks(step: Any) -> None:
    sizes = {simulate(step, mesh=n).num_events for n in (64, 1024, 16384)}
    assert len(sizes) == 1
    assert sizes.pop() < 20 * len(step[1]) * 2


def test_replicas_reduce_less_over_the_network(step: Any) -> None:
    slow = replace(H100, network_bandwidth=20e9)
    flat, hybrid = simulate(step, slow), simulate(step, slow, (8, 8), strategy="hybrid")
    assert hybrid.seconds < flat.seconds
    assert hybrid.peak.total > flat.peak.total


def test_a_pack_saves_messages_and_costs_copies(step: Any) -> None:
    def gathers_s(direct_min_bytes: int, channels: int) -> float:
        hardware = replace(H100, channels=channels)
        made = simulate(step, hardware, 8, direct_min_bytes=direct_min_bytes)
        return made.stream_s["all-gather"]

    assert gathers_s(0, channels=1) > 1.1 * gathers_s(10**12, channels=1)
    assert gathers_s(10**12, channels=1000) > 1.1 * gathers_s(0, channels=1000)


def test_gathers_are_batched_as_ranks_on_so_many_hosts_would(step: Any) -> None:
    """Two matrices of 33.6 MB and a pack; between hosts, all in one."""

    def num_entries(ranks_per_node: int, num_ranks: int, **options: Any) -> set[int]:
        hardware = replace(H100, ranks_per_node=ranks_per_node)
        launches = simulate(step, hardware, num_ranks, **options).launches
        sent = [launch.work for launch in launches if isinstance(launch.work, Collective)]
        return {
            work.messages for work in sent if work.kind == "all_gather" and "blocks" in work.unit
        }

    assert num_entries(8, 8) == num_entries(64, 64) == {3}
    assert num_entries(8, 64) == {1}
    assert num_entries(8, 64, direct_min_bytes=64 * 1024) == {3}
    narrow = CommPolicy(reduce=torch.int8)
    assert num_entries(8, 64, comm_policy=narrow) == {3}, "which needs no packing"


# -- the choice ----------------------------------------------------------------------------------


def planned(hardware: Any = H100, num_ranks: int = 64, **options: Any) -> Plan:
    sizes = options.pop("sizes", {"num_blocks": 4})
    batch = tokens(options.pop("num_tokens", 4096))
    return plan(on_meta(**sizes), batch, hardware, num_ranks, mp_policy=BF16, **options)


class Counting(Model):
    """Does something else when it runs again, as models with caches of keys do."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.calls: list[int] = []
        for block in self.blocks:
            block[0].register_forward_pre_hook(self._count)

    def _count(self, block: nn.Module, args: tuple) -> Any:
        self.calls.append(1)
        x = args[0]
        for _ in self.calls:
            x = x + 0
        return (x,)


def test_checkpointing_that_a_model_does_not_bear_is_left_out() -> None:
    with torch.device("meta"):
        model = Counting()
    made = plan(model, tokens(), H100, 8, mp_policy=BF16)
    assert "Checkpointing 'selective' is left out" in str(made)
    assert {o.candidate.checkpointing for o in made.outcomes} >= {"none"}


@pytest.fixture(scope="module")
def free() -> Plan:
    return planned()


def test_the_chosen_fits_and_none_that_fits_is_faster(free: Plan) -> None:
    made = free
    assert made.chosen.fits
    assert made.step.peak.total <= made.step.reserved < made.step.needed_bytes
    assert made.step.needed_bytes <= made.memory_budget == H100.memory_bytes
    fastest = min(o.seconds for o in made.outcomes if o.fits)
    assert made.step.seconds <= fastest * 1.006
    assert made.runner_up is not None
    assert made.runner_up.candidate != made.chosen.candidate


def test_less_memory_is_respected_and_never_faster(free: Plan) -> None:
    least = min(o.needed_bytes for o in free.outcomes)
    tight = planned(memory_budget=1.02 * least)
    assert tight.step.needed_bytes <= 1.02 * least
    assert tight.step.seconds >= free.step.seconds * 0.999
    assert tight.candidate.checkpointing != "none"
    with pytest.raises(ValueError, match=r"Nothing fits into .* the minimum is"):
        planned(memory_budget=0.5 * least, activation_checkpointing=("full",))


def test_where_activations_alone_are_too_large_one_mesh_is_enough() -> None:
    blocks = {"num_blocks": 2}
    sizes: dict[str, Any] = {"num_tokens": 2**17, "num_ranks": 512, "wrap": "auto", "prefetch": 1}
    sizes["sizes"] = blocks
    most = traced(2**17, **blocks)[0].activation_peak
    made = planned(**sizes, memory_budget=0.98 * most)
    of_mode = {
        mode: [o for o in made.outcomes if o.candidate.checkpointing == mode]
        for mode in ("none", "full")
    }
    assert len(of_mode["none"]) == 1
    assert not of_mode["none"][0].fits
    assert len(of_mode["full"]) > 5
    assert "none needs" in str(made)
    # Nothing is lost. Where a mode is all there is, the mesh that needs the least is found.
    modes = ("selective", "full")
    others = planned(**sizes, memory_budget=0.98 * most, activation_checkpointing=modes)
    assert others.chosen == made.chosen
    alone = {**sizes, "activation_checkpointing": ("none",)}
    least = min(planned(**alone).outcomes, key=lambda outcome: outcome.needed_bytes)
    with pytest.raises(ValueError, match="the minimum is") as caught:
        planned(**alone, memory_budget=0.9 * most)
    assert f"{least.candidate.mesh[-1]}, units" in str(caught.value)


def test_a_slow_network_makes_it_gather_less_over_it() -> None:
    slow = planned(replace(H100, network_bandwidth=5e9), activation_checkpointing=("none",))
    chosen = slow.chosen.candidate
    assert chosen.strategy == "hybrid" or chosen.reshard is not None  # one gather less over it
    usual = [o for o in slow.outcomes if o.candidate.strategy == "full"]
    usual = [o for o in usual if o.candidate.reshard is None and o.candidate.wrap == "blocks"]
    assert min(o.seconds for o in usual) > 1.01 * slow.step.seconds


def test_memory_decides_where_gradients_are_summed() -> None:
    """Whole sums are faster, as they are reduced once; sums on shards need less."""
    options: Any = {"activation_checkpointing": ("none",), "micro_batches": 4, "wrap": "auto"}
    slow = replace(H100, network_bandwidth=20e9)
    free = planned(slow, **options)
    assert free.candidate.accumulation == "unsharded"
    assert "Accumulation   unsharded" in str(free)
    by_kind = {
        kind: min(o.needed_bytes for o in free.outcomes if o.candidate.accumulation == kind)
        for kind in ("unsharded", "sharded")
    }
    assert by_kind["sharded"] < by_kind["unsharded"]
    tight = planned(slow, memory_budget=by_kind["unsharded"] - 1, **options)
    assert tight.candidate.accumulation == "sharded"
    assert tight.chosen.seconds > free.chosen.seconds
    assert "Accumulation: sharded; unsharded needs" in str(tight)
    assert tight.to_dict()["accumulation"] == "sharded"
    assert planned(activation_checkpointing=("none",)).candidate.accumulation is None
    alone = planned(slow, **options, accumulation=("every",))
    assert {o.candidate.accumulation for o in alone.outcomes} == {"every"}


def test_sums_of_whole_gradients_take_time(step: Any) -> None:
    """Alone, each of two micro-batches would cast gradients of 2 bytes to 4; together, one does,
    and the other adds 2 bytes to 4."""
    one, two = (simulate(step, mesh=1, micro_batches=n).compute_s for n in (1, 2))
    nbytes = (6 + 10 - 2 * 6) * sum(p.numel for p in step[0].params)
    added = nbytes / (H100.memory_bandwidth * H100.memory_efficiency)
    assert two - 2 * one == pytest.approx(added, rel=0.05)


def test_messages_that_take_turns_make_it_send_fewer() -> None:
    """A block that is gathered sends a message per matrix; its gradients, not sharded, are one."""
    slow = replace(H100, node_latency_s=300e-6)
    for channels, strategy in ((1000, "full"), (1, "none")):
        made = planned(replace(slow, channels=channels), 8, activation_checkpointing=("none",))
        assert made.chosen.candidate.strategy == strategy


def test_more_ranks_than_anybody_has() -> None:
    made = planned(num_ranks=16384, activation_checkpointing=("none",))
    assert made.step.num_events < 500
    assert {mesh for _, mesh in meshes_of(16384, 8)} >= {(16384,), (2048, 8)}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"hardware": "h1000"}, ValueError, "no hardware 'h1000'"),
        ({"num_ranks": 12}, ValueError, "a multiple of the 8 GPUs"),
        ({"num_ranks": 0}, ValueError, "num_ranks must be at least 1, got 0"),
        ({"num_ranks": 2.0}, TypeError, "must be an int"),
        ({"activation_checkpointing": ("all",)}, ValueError, "got 'all'"),
        ({"micro_batches": 0}, ValueError, "micro_batches must be at least 1, got 0"),
        ({"accumulation": ("some",)}, ValueError, "accumulation must be one of"),
        ({"micro_batches": 1.5}, TypeError, "micro_batches must be an int, got 1.5"),
        ({"max_gathered_bytes": 0}, ValueError, "max_gathered_bytes must be at least 1, got 0"),
        ({"memory_budget": 0}, ValueError, "memory_budget must be a positive number of bytes"),
        ({"memory_budget": -1e9}, ValueError, "memory_budget must be a positive number of bytes"),
        ({"memory_budget": float("nan")}, ValueError, "memory_budget must be a positive number"),
        ({"memory_budget": "8GB"}, TypeError, "memory_budget must be a number of bytes or None"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        planned(**options)


def test_every_units_choice_is_one_that_shard_model_takes() -> None:
    model = on_meta(num_blocks=8)
    auto = units_of(model, "auto")
    wraps = wraps_of(auto, default_checkpoint_modules(model, auto))
    assert set(wraps) == {"blocks", "2 blocks", "4 blocks", "one"}
    names = {label: [u.modules for u in units_of(model, wrap)] for label, wrap in wraps.items()}
    assert ("blocks.0", "blocks.1", "blocks.2", "blocks.3") in names["4 blocks"]
    assert names["one"] == [("",)]
    all_params = {name for name, _ in model.named_parameters()}
    for wrap in wraps.values():
        units = units_of(model, wrap)
        assert {name for unit in units for name in unit.params} == all_params


def test_reasons_name_the_alternatives(free: Plan) -> None:
    text = str(free)
    for word in ("Why", "Runner-up", "Checkpointing", "Mesh", "Units", "Prefetch", "hidden"):
        assert word in text
    data = free.to_dict()
    assert data["shard_model"]["strategy"] in ("full", "none", "hybrid")
    assert data["outcomes"][0]["fits"]


def test_the_picture(free: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "plan.png"
    free.picture(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 20_000


# -- and it runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrap", "reshard"), [("auto", 2), ("pairs", None)])
@distributed(4)
def test_a_plan_is_applied(wrap: str, reshard: int | None) -> None:
    torch.manual_seed(0)
    model, plain = Model(16, 4, 32), Model(16, 4, 32)
    plain.load_state_dict(model.state_dict())
    shape = torch.zeros(2, 6, dtype=torch.long)
    chosen = plan(model, shape, "cpu", 4, activation_checkpointing=("none",))
    accumulation = "sharded" if wrap == "pairs" else "unsharded"
    units: Any = [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")] if wrap == "pairs" else "auto"
    made = replace(
        chosen,
        workload=replace(
            chosen.workload, activation_checkpointing="full", accumulation=accumulation
        ),
        sharding=replace(chosen.sharding, reshard_after_forward=reshard, wrap=units),
        checkpoint_modules=[f"blocks.{i}" for i in range(4)],
    )
    made.apply(model, made.make_mesh("cpu"))
    batch = torch.arange(12).view(2, 6) + dist.get_rank()
    if wrap == "pairs":
        assert unit_of(model).config.accumulate_sharded
        with model.no_sync():
            model(batch).sum().backward()
        plain(batch).sum().backward()
    model(batch).sum().backward()
    plain(batch).sum().backward()
    for param, reference in zip(model.parameters(), plain.parameters(), strict=True):
        expected = reference.grad
        assert expected is not None
        dist.all_reduce(expected)
        grad = param.grad
        assert grad is not None
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(whole, expected / 4)


def test_fewer_bytes_take_less_time_where_the_network_is_slow() -> None:
    """A given policy is planned with; nothing chooses one."""
    policy = CommPolicy(gather=torch.int8, reduce=torch.int8, ranks_per_node=8)
    slow = replace(H100, network_bandwidth=1e9)
    trained = traced(512)
    in_full = simulate(trained, slow, 16)
    narrow = simulate(trained, slow, 16, comm_policy=policy)
    one_hop = simulate(trained, slow, 16, comm_policy=replace(policy, ranks_per_node=None))
    assert narrow.seconds < 0.6 * in_full.seconds
    assert narrow.seconds < one_hop.seconds, "an all-to-all sends each row of a node by itself"
