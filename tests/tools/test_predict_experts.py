"""Experts on a mesh of their own in `estimate`, `predict` and `plan`; advice where nothing fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from benchmarks.published_models import DeepSeek, deepseek_batch, next_token_loss
from by_keywords import estimate, plan, predict, predict_planned, trace_step
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.experts import TokenExchange, local_experts, shard_experts
from fsdp2.planning import find_hardware
from fsdp2.planning.trace.events import Compute, ModelExchange
from fsdp2.planning.trace.expert_units import InnerTopology
from fsdp2.transports.host.topology import Ring
from harness import cached_mesh, distributed

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Experts(nn.Module):
    """Grouped weights."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        up, down = local_experts(self.up), local_experts(self.down)
        seen.append((len(up), list(counts)))
        parts = rows.split(counts)
        return torch.cat([(part @ up[i]).relu() @ down[i] for i, part in enumerate(parts)])


class Block(nn.Module):
    """A dense layer and experts; token t goes to experts t and t + 1."""

    def __init__(self, num_experts: int = 8, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.mesh: DeviceMesh | None = None
        self.dense = nn.Linear(width, width)
        self.experts = Experts(num_experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        first = torch.arange(len(x), device=x.device) % self.num_experts
        ids = torch.stack([first, (first + 1) % self.num_experts], 1)
        exchange = TokenExchange(ids, self.num_experts, self.mesh)
        rows = exchange.dispatch(x)
        return x + exchange.combine(self.experts(rows, exchange.counts))


seen: list[tuple[int, list[int]]] = []  # experts and rows of each call


def build(**options: Any) -> nn.Sequential:
    return nn.Sequential(Block(**options), Block(**options))


def on_meta(**options: Any) -> nn.Sequential:
    with torch.device("meta"):
        return build(**options)


EXPERTS = ["0.experts", "1.experts"]


def traced(expert_ranks: int, **options: Any) -> Any:
    return trace_step(
        on_meta(**options),
        torch.empty(32, 16, device="meta"),
        ["0", "1", *EXPERTS],
        experts=EXPERTS,
        expert_ranks=expert_ranks,
    )


# -- the trace -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "local"), [(1, 8), (2, 4), (8, 1)])
def test_a_rank_has_its_experts_and_the_tokens_of_all_ranks_for_them(
    ranks: int, local: int
) -> None:
    seen.clear()
    made = traced(ranks)
    # 32 tokens with two choices on each rank: as many rows in all, for fewer experts.
    assert seen == [(local, [64 // local] * local)] * 2
    assert made.params[2].shape == (local, 16, 32)
    assert sum(p.numel_of_all_experts for p in made.params) == sum(
        p.numel() for p in on_meta().parameters()
    )
    sent = [event for event in made.events if isinstance(event, ModelExchange)]
    # Dispatch and combine, forward and backward, in two blocks; nothing travels to oneself.
    assert len(sent) == (0 if ranks == 1 else 8)
    assert {(e.nbytes, e.ranks) for e in sent} <= {(64 * 16 * 4, ranks)}
    flops = [e.flops for e in traced(1).events if isinstance(e, Compute)]
    assert made.flops == sum(flops)


def test_where_the_ranks_of_experts_are() -> None:
    """Consecutive, those over which experts are distributed; not those with the same ones."""
    topology = InnerTopology(64, 1, 8, experts=4)
    assert topology.ring("experts") == Ring(4, 4, 2)
    assert topology.ring("expert shard") == Ring(16, 2, 4)
    assert topology.ring("shard") == Ring(64, 8, 1)
    wide = InnerTopology(64, 1, 8, experts=16)
    assert wide.ring("experts") == Ring(16, 8, 1)
    assert wide.ring("expert shard") == Ring(4, 1, 8)


def test_experts_that_do_not_divide_are_those_of_the_first_rank() -> None:
    seen.clear()
    traced(4, num_experts=6)  # 2, 2, 2 and none
    assert seen[0] == (2, [42, 43])  # a third of 4 * 64


def test_without_an_exchange_more_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"makes no fsdp2\.experts\.TokenExchange"):
        trace_step(nn.Linear(4, 4), torch.zeros(2, 4), [""], experts=[], expert_ranks=2)


# -- beside a run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expert_ranks", "num_experts"),
    # With two experts, there are fewer on a rank than shards: these are on dim 1.
    [
        (2, 8),
        (1, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 8), (4, 8), (2, 2))),
    ],
)
@distributed(4)
def test_shards_and_traffic_are_those_of_a_run(expert_ranks: int, num_experts: int) -> None:
    torch.manual_seed(0)
    made = estimate(
        on_meta(num_experts=num_experts),
        4,
        torch.empty(32, 16),
        wrap=["0", "1"],
        experts="*.experts",
        expert_ranks=expert_ranks,
        device_type="cpu",
        ranks_per_node=4,
    )
    model = build(num_experts=num_experts)
    mesh = cached_mesh(4 // expert_ranks, expert_ranks, names=("efsdp", "ep"))
    data = cached_mesh(4, names=("dp",))
    for block in model:
        assert isinstance(block, Block)
        block.mesh = mesh["ep"]
        shard_experts(block.experts, mesh=mesh)
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    held = sum(p.to_local().nbytes for p in model.parameters())
    sent: list[int] = []
    real = dist.all_to_all_single

    def counted(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.is_floating_point():  # (and not counts)
            sent.append(rows.nbytes)
        return real(out, rows, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        model(torch.randn(32, 16)).sum().backward()
    finally:
        dist.all_to_all_single = real
    rank = made.ranks[0]
    assert rank.parameters == held
    assert rank.gradients == sum(
        p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None
    )
    exchanged = [row for row in made.traffic if row.group == "experts"]
    assert sum(row.sent for row in exchanged) == sum(sent) * (expert_ranks - 1) // expert_ranks
    assert sum(row.calls for row in exchanged) == len(sent)
    assert made.num_params == sum(p.numel() for p in on_meta(num_experts=num_experts).parameters())
    gathers = {r.group: r.sent for r in made.traffic if r.kind == "all_gather"}
    own = sum(
        p.numel() for n, p in on_meta(num_experts=num_experts).named_parameters() if "experts" in n
    )
    if expert_ranks < 4:  # all but the own shard, twice, sent to the others that have these
        alike = 4 // expert_ranks
        # (The last unit, the experts of the second block, stays gathered.)
        assert gathers["expert shard"] in (own * 4 // 4 * (alike - 1) * n // 2 for n in (2, 3, 4))
    else:
        assert "expert shard" not in gathers


# -- what is predicted ---------------------------------------------------------------------------


def large(num_layers: int = 3, **options: Any) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        model = DeepSeek(num_layers=num_layers, num_dense=1, **options)
        return model, deepseek_batch()


def test_experts_over_more_ranks_than_there_are_are_padding(tmp_path: Path) -> None:
    """256 experts over 2,048 ranks: 256 ranks have one each, the others none."""
    model, batch = large()
    options: Any = {"mp_policy": BF16, "loss_fn": next_token_loss, "checkpoint": "full"}
    with pytest.raises(ValueError, match="Nothing fits") as caught:
        plan(model, batch, H100, 2048, strategy="full", wrap="auto", **options)
    message = str(caught.value)
    assert "padding" in message
    assert "256 rows over 2,048 ranks" in message
    assert "More ranks do not help: put experts on a separate mesh" in message
    assert "more ranks, or" not in message
    made = plan(
        model,
        batch,
        H100,
        2048,
        strategy="full",
        wrap="auto",
        experts="layers.*.experts",
        **options,
    )
    assert made.chosen.fits
    assert made.candidate.expert_ranks in (8, 64, 256)
    assert {o.candidate.expert_ranks for o in made.outcomes} >= {8, 64, 256}
    for word in ("Experts", "over 256 ranks", "all-to-all"):
        assert word in str(made)
    pytest.importorskip("matplotlib")
    made.picture(tmp_path / "plan.png")  # with a lane for tokens
    with pytest.raises(ValueError, match="cannot be applied in one call: call shard_experts"):
        made.apply(model, None)
    # The prediction of it is the same, and padding is a figure of its own.
    mode = made.candidate.checkpointing
    same = predict_planned(made)
    assert (same.seconds, same.needed_bytes) == (made.chosen.seconds, made.chosen.needed_bytes)
    assert same.step.stream_s["all-to-all"] > 0
    flat = predict(
        model, batch, H100, 2048, mp_policy=BF16, activation_checkpointing=mode,
        loss_fn=next_token_loss,
    )  # fmt: skip
    assert flat.padding is not None
    assert flat.padding.factor > 4
    assert flat.padding.nbytes > 0.5 * flat.peak_bytes
    assert flat.padding.worst[1:] == (256, 2048)
    assert same.padding is None or same.padding.factor < 1.05


CAUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "activations": (
        {"checkpoint": "none", "samples": 4096},
        "activations: .* a smaller micro-batch, .* or tensor_ranks, activation_checkpointing=",
        "more ranks|padding",
    ),
    "recomputed": (
        {"checkpoint": "full", "samples": 65536},
        "activations: .* shorter sequences or more context_ranks or tensor_ranks",
        "more ranks|padding|activation_checkpointing",
    ),
    "states": (
        {"num_ranks": 8},
        r"shards and their optimizer: .* more ranks, or offload_policy=CPUOffloadPolicy\(\)",
        "micro-batch|padding",
    ),
    "offloaded": (
        {"wrap": "root", "offload_policy": CPUOffloadPolicy()},
        r"gathered parameters: .* make smaller units",
        "micro-batch|padding|offload_policy=|reshard_after_forward",
    ),
    "kept after forward": (
        {"reshard_after_forward": False, "strategy": "full", "num_ranks": 64},
        r"gathered parameters: .* or free them after forward \(reshard_after_forward=True\)",
        "micro-batch|padding",
    ),
    "freed after forward": (
        {"strategy": "full", "offload_policy": CPUOffloadPolicy()},
        r"gathered parameters: .* make smaller units \(wrap=\)",
        "micro-batch|reshard_after_forward",
    ),
    "whole sums": (
        {"micro_batches": 2, "accumulation": ("unsharded",), "num_ranks": 64, "strategy": "full"},
        r"sum them on shards \(accumulation='sharded'\)",
        "padding",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_advice_names_the_cause(case: str) -> None:
    options, named, absent = CAUSES[case]
    options = {"checkpoint": "none", "num_ranks": 8, "samples": 1, **options}
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)]
        model, batch = nn.Sequential(*layers), torch.empty(options.pop("samples"), 2048)
    with pytest.raises(ValueError, match="Nothing fits into") as caught:
        plan(model, batch, H100, options.pop("num_ranks"), 1000, **options)
    assert re.search(named, str(caught.value)), caught.value
    assert not re.search(absent, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expert_ranks": 2}, "needs experts="),
        ({"experts": "*.expert"}, "did you mean"),
        ({"experts": ["0"]}, "must be the number of experts"),
        ({"experts": EXPERTS, "expert_ranks": 16}, "more than the 8 experts"),
        ({"experts": EXPERTS, "expert_ranks": 3}, "must divide"),
        ({"experts": EXPERTS, "expert_ranks": 2, "fake": False}, "which has all experts"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    for call in (predict, plan):
        with pytest.raises(ValueError, match=match):
            call(build(), torch.zeros(32, 16), H100, 16, **options)


@pytest.mark.long
def test_the_whole_of_671_billion() -> None:
    with torch.device("meta"):
        model, batch = DeepSeek(), deepseek_batch()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(671e9, rel=0.005)
    made = plan(
        model,
        batch,
        H100,
        2048,
        mp_policy=BF16,
        loss_fn=next_token_loss,
        experts="layers.*.experts",
        checkpoint="full",
    )
    assert made.chosen.fits
    print(made)
