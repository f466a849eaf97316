"""`predict` with context parallelism: attention over parts of sequences, as torch runs it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.utils._python_dispatch import TorchDispatchMode

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from test_predict_tensor import parallelize

from by_keywords import plan, predict, sweep, trace_step
from fsdp2 import MixedPrecisionPolicy
from fsdp2.cli.main import main
from fsdp2.planning import Plan, find_hardware
from fsdp2.planning.replay.device import Collective
from fsdp2.planning.simulation.costs import transfer_cost
from fsdp2.planning.simulation.loads import with_part_of_context
from fsdp2.planning.trace.attention import ContextParallel
from fsdp2.planning.trace.events import Compute, ExchangeEnd, ModelExchange
from fsdp2.planning.trace.expert_units import InnerTopology
from fsdp2.planning.traces import parallel_copy
from fsdp2.transports.host.topology import Ring
from harness import cached_mesh, distributed
from ring_attention import RingAttention

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH, HEAD, SAMPLES, LENGTH = 32, 8, 2, 64


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, head: int, attention: Any) -> None:
        super().__init__()
        self.head, self.attention = head, attention
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = (
            p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        x = x + self.out(self.attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(
        self, width: int = WIDTH, head: int = HEAD, num_blocks: int = 2, attention: Any = attend
    ) -> None:
        super().__init__()
        self.first = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, head, attention) for _ in range(num_blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(samples: int = SAMPLES, length: int = LENGTH) -> Tensor:
    return torch.zeros(samples, length, dtype=torch.long, device="meta")


def on_meta(**sizes: Any) -> Model:
    with torch.device("meta"):
        return Model(**sizes)


def traced(ranks: int, **options: Any) -> Any:
    sizes = options.pop("sizes", {})
    sample, length = with_part_of_context(batch(), ranks) if ranks > 1 else (batch(), 0)
    with parallel_copy(on_meta(**sizes), None, 1, ranks) as (model, mesh):
        context = None if mesh is None else ContextParallel(mesh, length)
        names = ["blocks.0", "blocks.1"]
        options.setdefault("mp_policy", BF16)
        return trace_step(model, sample, names, context=context, **options)


def attention_flops(trace: Any) -> int:
    computes = [event for event in trace.events if isinstance(event, Compute)]
    return sum(o.flops for c in computes for o in c.operations if o.attention)


def exchanges(trace: Any) -> list[tuple[str, int]]:
    return [(e.kind, e.nbytes) for e in trace.events if isinstance(e, ModelExchange)]


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_has_its_part_of_the_work(ranks: int) -> None:
    """All FLOPs are divided evenly, also those of causal attention."""
    one, part = traced(1), traced(ranks)
    assert attention_flops(part) * ranks == attention_flops(one) > 0
    assert part.flops * ranks == one.flops
    assert part.input_bytes * ranks == one.input_bytes
    assert [p.shape for p in part.params] == [p.shape for p in one.params]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent(ranks: int) -> None:
    """Keys and values once in forward and once in backward, their gradients around the ring."""
    kv = 2 * SAMPLES * (LENGTH // ranks) * WIDTH  # elements of a rank
    gathered = ("all_gather", ranks * kv * 2)
    around = ("send", kv * 4)  # summed in float32
    assert exchanges(traced(ranks)) == 2 * [gathered] + 2 * [gathered, *ranks * [around]]


def test_keys_and_values_go_around_if_torch_is_told_so() -> None:
    kv = 2 * SAMPLES * (LENGTH // 4) * WIDTH
    set_rotate_method("alltoall")
    try:
        made = traced(4)
    finally:
        set_rotate_method("allgather")
    assert Counter(exchanges(made)) == {
        ("send", kv * 2): 2 * 2 * 3,  # blocks, forward and backward, steps but the first
        ("send", kv * 4): 2 * 4,
    }
    assert any("all-to-all" in note for note in made.notes)
    assert any("all-gather" in note for note in traced(4).notes)


def test_what_is_sent_is_waited_for_when_it_is_read() -> None:
    made = traced(4, sizes={"num_blocks": 2})
    begun: dict[int, int] = {}
    between = []
    for i, event in enumerate(made.events):
        if isinstance(event, ModelExchange):
            assert event.group == "context"
            assert event.number is not None
            begun[event.number] = i
        elif isinstance(event, ExchangeEnd):
            inside = made.events[begun.pop(event.number) + 1 : i]
            computes = [e for e in inside if isinstance(e, Compute)]
            between.append(sum(o.flops for c in computes for o in c.operations if o.attention))
    assert not begun
    # Beside each gather runs the attention to the keys that are there already.
    own = attention_flops(made) / (2 * 3.5)  # of a forward; backward has 2.5 times as much
    first = own * (LENGTH // 4) ** 2 / 2 / (LENGTH**2 / 2 / 4)
    assert between[:2] == [first, first]


def test_memory_is_that_of_the_part_and_what_is_gathered() -> None:
    one, four = traced(1), traced(4)
    assert four.activation_peak < one.activation_peak / 2
    # What autograd keeps of a block, without its attention, is a quarter.
    assert four.activation_peak > one.activation_peak / 4


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_of_attention(mode: str) -> None:
    """Selective checkpointing keeps the results of attention; full sends keys and values again."""
    blocks = ["blocks.0", "blocks.1"]
    made = traced(2, activation_checkpointing=mode, checkpoint_modules=blocks)
    gathers = sum(1 for kind, _ in exchanges(made) if kind == "all_gather")
    assert gathers == {"selective": 4, "full": 6}[mode]
    whole = traced(1, activation_checkpointing=mode, checkpoint_modules=blocks)
    assert attention_flops(made) * 2 == attention_flops(whole)


def test_where_the_ranks_are() -> None:
    assert InnerTopology(64, 1, 8, context=4).ring("context") == Ring(4, 4, 2)
    assert InnerTopology(64, 1, 8, context=16).ring("context") == Ring(16, 8, 1)
    assert InnerTopology(16, 1, 8, tensor=4, context=4).ring("context") == Ring(4, 2, 4)
    assert InnerTopology(16, 1, 8, tensor=4, context=4).ring("shard") == Ring(16, 2, 4)
    assert InnerTopology(8, 2, 8, context=8).ring("context") == Ring(8, 8, 1)


def test_the_time_of_a_message() -> None:
    send = Collective("send", "context", 10**9, 10**9, 1, "")
    within = transfer_cost(send, Ring(4, 4, 2), H100)
    assert within.shared_s == 1e9 / H100.node_bandwidth
    between = transfer_cost(send, Ring(16, 8, 1), H100)
    # One rank of a node sends over its network, the others to their neighbours.
    network = H100.network_bandwidth * H100.network_efficiency
    assert between.shared_s == 1e9 / min(network, H100.node_bandwidth)
    assert between.fixed_s > within.fixed_s


# -- a run ---------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """The collectives of a run: their kinds and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if "all_gather_into_tensor" in name:
            self.found.append(("all_gather", result.nbytes))
        elif "all_to_all_single" in name:
            self.found.append(("send", args[0].nbytes))
        return result


@distributed(4)
def test_collectives_are_those_of_a_run() -> None:
    """torch's ring attention over gloo, with the kernel that the CPU has."""
    mesh = cached_mesh(4, names=("context",))
    torch.manual_seed(0)
    model = Model(attention=lambda q, k, v: RingAttention.apply(mesh.get_group(), q, k, v))
    length = 256  # the kernel keeps a number for each query, of 32 queries or a multiple
    x = torch.randint(11, (SAMPLES, length // 4))
    with Sent() as sent:
        model(x).sum().backward()
    with pytest.raises(ValueError, match=r"context_ranks=4 .* there is one already"):
        predict(on_meta(), batch(), H100, 4, context_ranks=4)
    sample, part = with_part_of_context(batch(length=length), 4)
    planned = trace_step(
        on_meta(), sample, ["blocks.0", "blocks.1"], context=ContextParallel(mesh, part),
        mp_policy=MixedPrecisionPolicy(),
    )  # fmt: skip
    assert sent.found == exchanges(planned)
    assert dist.get_world_size() == 4


# -- predictions -----------------------------------------------------------------------------------

SIZES = {"width": 2048, "head": 128, "num_blocks": 2}


def test_degrees_side_by_side() -> None:
    made = sweep(
        on_meta(**SIZES), batch(1, 2**16), H100, [16, 64], context_ranks=[1, 2, 8], mp_policy=BF16
    )
    assert made.num_traced == 3
    table = {(p.num_ranks, p.context_ranks): p for p in made.predictions}
    assert set(table) == {(n, c) for n in (16, 64) for c in (1, 2, 8)}
    for ranks in (16, 64):
        one, two, eight = (table[ranks, c] for c in (1, 2, 8))
        assert one.mesh_shape == two.mesh_shape == eight.mesh_shape == (ranks,)
        # Parameters are sharded over data and context ranks together.
        for name in ("parameters", "optimizer state"):
            parts = {p.step.peak.parts[name] for p in (one, two, eight)}
            assert len(parts) == 1
        assert one.step.compute_s > two.step.compute_s > eight.step.compute_s
        assert one.step.flops == 2 * two.step.flops == 8 * eight.step.flops
        assert one.peak_bytes > two.peak_bytes > eight.peak_bytes
        assert eight.samples_per_s == pytest.approx(ranks // 8 / eight.seconds)
        assert eight.tokens_per_s == pytest.approx(ranks // 8 * 2**16 / eight.seconds)
        assert "context parallel" not in one.step.stream_s
        assert eight.step.stream_s["context parallel"] > 0
    assert "Context ranks" in str(made)
    across = predict(on_meta(**SIZES), batch(1, 2**16), H100, 64, context_ranks=16, mp_policy=BF16)
    # Keys and values of a sixteenth each, but over the network.
    eight = table[64, 8]
    assert across.step.stream_s["context parallel"] > eight.step.stream_s["context parallel"]
    data = json.loads(json.dumps(across.to_dict()))
    assert (data["context_ranks"], data["num_ranks"], data["context"]) == (16, 64, 2**16)


def test_what_is_sent_is_hidden_by_attention() -> None:
    """Of long sequences all but the gradients of the last step; of short ones little."""
    hidden = {}
    for length in (2**12, 2**17):
        one, eight = (
            predict(
                on_meta(**SIZES), batch(1, length), H100, 8, context_ranks=c, mp_policy=BF16
            )
            for c in (1, 8)
        )  # fmt: skip
        sent = eight.step.stream_s["context parallel"]
        more = eight.exposed_s - one.exposed_s
        hidden[length] = 1 - more / sent
    assert hidden[2**17] > 0.9 > 0.7 > hidden[2**12]


def test_beside_tensor_parallelism() -> None:
    from test_predict_tensor import Model as Parallel

    with torch.device("meta"):
        model = Parallel(width=64, head=8)
    x = torch.empty(2, 64, 5, device="meta")
    options: dict[str, Any] = {"parallelize": parallelize, "tensor_ranks": 2, "mp_policy": BF16}
    made = predict(model, x, H100, 64, context_ranks=4, **options)
    assert (made.mesh_shape, made.num_ranks) == ((32,), 64)
    assert made.samples_per_s == pytest.approx(2 * 8 / made.seconds)
    alone = predict(model, x, H100, 64, **options)
    assert alone.step.flops == 4 * made.step.flops
    assert {"tensor parallel", "context parallel"} <= set(made.step.stream_s)
    hybrid = predict(model, x, H100, 64, strategy="hybrid", context_ranks=4, **options)
    assert hybrid.mesh_shape == (8, 4)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, mask)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v) + by_hand(q, k, v)


def to_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2])


def direct(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    return operator(q, k, v, 0.0, True)[0]


def recurrent(q: Tensor, k: Tensor, v: Tensor, kind: type[nn.RNNBase] = nn.LSTM) -> Tensor:
    flat = q.transpose(1, 2).flatten(2)
    made = kind(WIDTH, WIDTH, batch_first=True, dtype=q.dtype)(flat)[0]
    return attend(q, k, v) + made.reshape(*flat.shape[:2], -1, HEAD).transpose(1, 2)


def step_by_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cell = nn.GRUCell(HEAD, HEAD, dtype=q.dtype)
    return attend(q, k, v) + cell(q.reshape(-1, HEAD)).reshape(q.shape)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    made = flex_attention(q, k, v)
    assert isinstance(made, Tensor)
    return made


def beside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v) + F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        (masked, "attention with a mask"),
        (by_hand, r"attention written by hand \(aten::_softmax of 32 by 32 scores"),
        (both, "attention written by hand"),
        (to_half, "attention of 32 queries to 16 keys on a rank that has 32 positions"),
        (direct, "the operator aten::_scaled_dot_product_flash_attention"),
        (recurrent, "the recurrence of LSTM"),
        (partial(recurrent, kind=nn.GRU), "the recurrence of GRU"),
        (step_by_step, "the recurrence of GRUCell"),
        (flex, "flex_attention"),
        (beside, "both causal and non-causal attention"),
        (lambda q, k, v: v, "this model, which calls no such attention"),
    ],
)
def test_attention_that_is_refused(attention: Any, match: str) -> None:
    if attention is flex:
        import torch.nn.attention.flex_attention  # noqa: F401
    with pytest.raises(ValueError, match=f"context_ranks=2: .* does not split {match}"):
        predict(on_meta(attention=attention), batch(), H100, 8, context_ranks=2, mp_policy=BF16)


def test_attention_without_a_kernel_is_refused() -> None:
    # No fused kernel has heads of 6 numbers in float32.
    model = on_meta(width=24, head=6)
    with pytest.raises(ValueError, match=r"without a fused kernel .*multiple of 4"):
        predict(model, batch(), H100, 8, context_ranks=2)


def test_attention_that_is_not_causal() -> None:
    made = traced(2, sizes={"attention": F.scaled_dot_product_attention})
    one = traced(1, sizes={"attention": F.scaled_dot_product_attention})
    assert attention_flops(made) * 2 == attention_flops(one)
    assert any("load balance off" in note for note in made.notes)
    from torch.distributed.tensor.experimental._attention import _cp_options

    assert _cp_options.enable_load_balance  # as before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"context_ranks": 3}, "context_ranks=3 must divide the last dim of the mesh, 8"),
        ({"context_ranks": 0}, "context_ranks must be at least 1"),
        ({"context_ranks": 8, "num_ranks": (2, 4)}, "must divide the last dim of the mesh, 4"),
        ({"context_ranks": 2, "batch": batch(2, 62)}, "62 positions .* no multiple of 4: pad"),
        (
            {"context_ranks": 2, "batch": torch.zeros(4, device="meta", dtype=torch.long)},
            "none has two dims",
        ),
        ({"context_ranks": 2, "fake": False}, "fake=False"),
        ({"context_ranks": 2, "hardware": "cpu"}, "no attention kernel of the CPU"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    sample, ranks = options.pop("batch", batch()), options.pop("num_ranks", 8)
    hardware = options.pop("hardware", H100)
    with pytest.raises(ValueError, match=match):
        predict(on_meta(), sample, hardware, ranks, **options)
    with pytest.raises(TypeError, match="context_ranks must be an int"):
        predict(on_meta(), batch(), H100, 8, context_ranks="2")  # type: ignore[arg-type]


# -- plans ---------------------------------------------------------------------------------------


def planned(**options: Any) -> Plan:
    options = {"context_ranks": [1, 2, 8], "wrap": "auto", "prefetch": 1, **options}
    return plan(on_meta(**SIZES), batch(1, 2**16), H100, 64, mp_policy=BF16, **options)


def degrees(made: Plan) -> set[int | None]:
    return {outcome.candidate.context_ranks for outcome in made.outcomes}


def test_a_plan_chooses_among_degrees() -> None:
    made = planned(checkpoint="none", strategy="full")
    assert degrees(made) == {1, 2, 8}
    per_batch = [(o.candidate.context_ranks or 1) * o.seconds for o in made.outcomes]
    assert per_batch[0] <= 1.006 * min(per_batch)
    assert "Context parallel: over" in str(made)
    best = next(o for o in made.outcomes if o.candidate.context_ranks == 8)
    alone = predict(
        on_meta(**SIZES), batch(1, 2**16), H100, best.candidate.mesh, context_ranks=8,
        strategy=best.candidate.strategy, mp_policy=BF16, prefetch=best.candidate.prefetch,
        reshard_after_forward=best.candidate.reshard,
    )  # fmt: skip
    assert (alone.seconds, alone.needed_bytes) == (best.seconds, best.needed_bytes)
    least = min(o.needed_bytes for o in made.outcomes if o.candidate.context_ranks == 2)
    tight = planned(checkpoint="none", strategy="full", memory_budget=0.95 * least)
    assert tight.context_ranks == tight.to_dict()["context_ranks"] == 8
    few = planned(checkpoint="none", strategy="full", max_samples=10)
    assert (degrees(few), few.mesh_shape) == ({8}, (64,))
    hybrid = planned(checkpoint="none", strategy="hybrid", context_ranks=[16])
    assert all(o.candidate.mesh[-1] % 16 == 0 for o in hybrid.outcomes)


def test_degrees_that_a_model_does_not_bear_are_left_out() -> None:
    made = plan(
        on_meta(), batch(2, 24), H100, 32, checkpoint="none", strategy="full", mp_policy=BF16,
        context_ranks=[4, 32],
    )  # fmt: skip
    assert degrees(made) == {4}
    assert "Context parallelism over 32 ranks is left out because it fails" in str(made)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"context_ranks": []}, "context_ranks is an empty list"),
        ({"context_ranks": [3]}, "context_ranks=3 must divide num_ranks=8"),
        (
            {"context_ranks": [4], "mesh_shape": (4, 2)},
            r"context_ranks=\[4\] must divide the last dim of mesh 4 x 2",
        ),
        (
            {"context_ranks": [8], "tensor_ranks": [2], "parallelize": parallelize},
            r"tensor_ranks=\[2\] times context_ranks=\[8\] must divide num_ranks=8",
        ),
    ],
)
def test_bad_arguments_of_a_plan(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        plan(on_meta(), batch(), H100, 8, **options)


@distributed(4)
def test_a_plan_is_applied() -> None:
    made = plan(on_meta(), batch(), "cpu", 4, checkpoint="none", strategy="full")
    made = replace(made, context_ranks=2)
    mesh = made.make_mesh("cpu")
    assert (mesh.mesh_dim_names, mesh.shape) == (("data", "context"), (2, 2))
    torch.manual_seed(0)
    model: Any = Model()
    made.apply(model, mesh)
    assert model.blocks[0].q.weight.to_local().shape == (WIDTH // 4, WIDTH)
    assert model.blocks[0].q.weight.device_mesh.size() == 4


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "context_models.py"
    path.write_text(
        "import test_predict_context as tests\nmodel, batch = tests.Model, tests.batch\n"
    )
    sys.path.insert(0, str(Path(__file__).parent))
    common = (f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100", "--json",
              "--param-dtype", "bf16", "--quiet")  # fmt: skip
    code = main(("predict", *common, "--world-size", "8,16", "--context-ranks", "1,2"))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [p["context_ranks"] for p in data["predictions"]] == [1, 2, 1, 2]
    assert data["num_traced"] == 2
    code = main(
        ("plan", *common, "--world-size", "16", "--context-ranks", "1,2,4", "--max-samples", "16")
    )
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert {o["context_ranks"] for o in json.loads(out)["outcomes"]} == {2, 4}


# -- stages of a pipeline --------------------------------------------------------------------------


def apart(model: Model, num_stages: int) -> list[nn.Module]:
    """The embedding and the last layer are stages of their own: neither has attention."""
    assert num_stages == 4
    return [model.first, *model.blocks, model.last]


def test_stages_without_attention_are_predicted() -> None:
    options: dict[str, Any] = {
        "mp_policy": BF16, "context_ranks": 2, "pipeline_ranks": 4, "micro_batches": 4,
    }  # fmt: skip
    made = predict(on_meta(), batch(), H100, 16, split_stages=apart, **options)
    assert len(made.stages) == 4
    assert any(note.startswith("Context parallel: ") for note in made.notes)
    half = predict(
        on_meta(), batch(), H100, 16, split_stages=lambda model, num: [
            nn.Sequential(model.first, model.blocks[0]), nn.Sequential(model.blocks[1], model.last),
        ],
        **options | {"pipeline_ranks": 2},
    )  # fmt: skip
    # The same blocks in fewer stages: a rank of the middle sends what one of the halves does.
    assert context_sends(half.step) > 0
    whole = predict(on_meta(), batch(), H100, 16, mp_policy=BF16, context_ranks=2, micro_batches=4)
    assert context_sends(whole.step) == 2 * context_sends(half.step)


def context_sends(step: Any) -> int:
    return sum(
        launch.work.sent
        for launch in step.launches
        if isinstance(launch.work, Collective) and launch.work.group == "context"
    )


def test_a_pipeline_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="context_ranks=2: no stage of the pipeline calls"):
        predict(
            on_meta(attention=lambda q, k, v: v), batch(), H100, 16, split_stages=apart,
            context_ranks=2, pipeline_ranks=4, micro_batches=4, mp_policy=BF16,
        )  # fmt: skip
