"""`predict` for tensor-parallel models: a function that makes them so; ranks that share them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from by_keywords import plan, predict, sweep, trace_step
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.cli.main import main
from fsdp2.planning import Plan, find_hardware
from fsdp2.planning.trace.events import Compute, ExchangeEnd, ModelExchange
from fsdp2.planning.trace.expert_units import InnerTopology
from fsdp2.planning.traces import parallel_copy
from fsdp2.transports.host.topology import Ring
from harness import cached_mesh, distributed

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Attention and a feed-forward layer; heads are counted by their width."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm, self.ffn_norm = nn.LayerNorm(width), nn.Sequential(nn.LayerNorm(width))
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = (
            p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        made = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.ffn_norm(x)).relu())


class Model(nn.Module):
    def __init__(self, width: int = 32, head: int = 8, num_blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width, head) for _ in range(num_blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def plan_of(block: Block) -> dict[str, Any]:
    colwise = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    return {**colwise, "out": RowwiseParallel(), "down": RowwiseParallel()}


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        assert isinstance(block, Block)
        parallelize_module(block, mesh, plan_of(block))


def in_sequence(model: Model, mesh: DeviceMesh) -> None:
    """The norms of feed-forward layers work on a part of the sequence."""
    for block in model.blocks:
        assert isinstance(block, Block)
        plan = {
            **plan_of(block),
            "ffn_norm": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1)
            ),
            "ffn_norm.0": SequenceParallel(sequence_dim=1),
            "up": ColwiseParallel(input_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def batch(samples: int = 2, length: int = 16) -> Tensor:
    return torch.empty(samples, length, 5, device="meta")


def on_meta(**sizes: int) -> Model:
    with torch.device("meta"):
        return Model(**sizes)


def traced(ranks: int, how: Any = parallelize, **options: Any) -> Any:
    with parallel_copy(on_meta(), how, ranks) as (model, _):
        names = ["blocks.0", "blocks.1"]
        return trace_step(model, batch(), names, tensor_ranks=ranks, **options)


def collectives(trace: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in trace.events:
        if isinstance(event, ModelExchange):
            assert event.group == "tensor"
            found.setdefault(event.kind, []).append(event.nbytes)
    return found


def test_a_rank_has_its_part_of_operators_and_parameters() -> None:
    one, four = traced(1), traced(4)
    outside = 2 * 2 * 16 * 5 * 32 * 2 + 3 * 2 * 2 * 16 * 32 * 3  # the first and the last layer
    assert four.flops - outside == pytest.approx((one.flops - outside) / 4, rel=0.01)
    shapes = {p.name: p.shape for p in four.params}
    assert shapes["blocks.0.q.weight"] == (8, 32)
    assert shapes["blocks.1.down.weight"] == (32, 32)
    assert shapes["blocks.1.down.bias"] == shapes["blocks.0.norm.weight"] == (32,)
    assert collectives(one) == {}
    # After each of two row-wise layers, and in backward before each of two groups of column-wise
    # ones, of all activations of a block.
    whole = 2 * 16 * 32 * 4
    assert set(collectives(four)["all_reduce"]) == {whole}
    assert 8 <= len(collectives(four)["all_reduce"]) <= 2 * (2 + 4)


class Columns(torch.autograd.Function):
    """A linear layer whose backward multiplies while the gradient of the input is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str, late: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.late = group, late
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        summed = torch.ops._c10d_functional.all_reduce(grad @ weight, "sum", ctx.group)
        if not ctx.late:
            summed = torch.ops._c10d_functional.wait_tensor(summed)
        of_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1)
        if ctx.late:
            summed = torch.ops._c10d_functional.wait_tensor(summed)
        return summed, of_weight, None, None


class ByHand(nn.Linear):
    group: str | None = None
    late = True

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        weight: Any = self.weight
        return Columns.apply(x, weight.to_local(), self.group, self.late)


def by_hand(late: bool) -> Any:
    def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
        for layer in model.modules():
            if isinstance(layer, ByHand):
                layer.group, layer.late = mesh.get_group().group_name, late
                own = distribute_tensor(layer.weight, mesh, [Shard(0)], src_data_rank=None)
                layer.weight = nn.Parameter(own)

    return distribute


def test_what_is_waited_for_later_goes_on_beside_kernels() -> None:
    """A model that calls ``wait_tensor`` itself decides where; DTensors wait at once."""
    made = {}
    for late in (True, False):
        with torch.device("meta"):
            model = nn.Sequential(*(ByHand(4096, 8 * 4096, bias=False) for _ in range(4)))
            sample = torch.empty(4, 1024, 4096, requires_grad=True)
        made[late] = predict(
            model, sample, H100, 8, parallelize=by_hand(late), tensor_ranks=8, mp_policy=BF16,
            loss_fn=torch.mean,
        )  # fmt: skip
    late, at_once = made[True], made[False]
    sums = [x.step.stream_s["tensor parallel"] for x in (late, at_once)]
    assert sums[0] == pytest.approx(sums[1], rel=0.05)
    assert at_once.exposed_s > 0.9 * sums[1]
    assert late.exposed_s < 0.4 * sums[0]
    assert not any(operations_in_flight(traced(2)))


def operations_in_flight(trace: Any) -> list[int]:
    """The operations between the begin of each collective and the wait for it."""
    found, events = [], trace.events
    for i, event in enumerate(events):
        if isinstance(event, ModelExchange):
            end = events.index(ExchangeEnd(event.number), i)
            meanwhile = [e for e in events[i:end] if isinstance(e, Compute)]
            found.append(sum(len(each.operations) for each in meanwhile))
    assert found
    return found


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_communicates_again(mode: str) -> None:
    again = traced(2, activation_checkpointing=mode, checkpoint_modules=["blocks.0", "blocks.1"])
    assert len(collectives(again)["all_reduce"]) > len(collectives(traced(2))["all_reduce"])


def test_the_model_and_the_process_stay_as_they_are() -> None:
    model = on_meta()
    before = dict(model.named_parameters())
    predict(model, batch(), H100, 8, parallelize=parallelize, tensor_ranks=2)
    assert not dist.is_initialized()
    after = dict(model.named_parameters())
    assert all(after[name] is param for name, param in before.items())


@pytest.mark.parametrize("how", [pytest.param(parallelize, marks=pytest.mark.long), in_sequence])
@distributed(4)
def test_shards_and_collectives_are_those_of_a_run(how: Any) -> None:
    with pytest.raises(ValueError, match="there is one already"):
        predict(on_meta(), batch(), H100, 4, parallelize=how, tensor_ranks=2)
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    planned = on_meta()
    how(planned, mesh["tensor"])
    expected = collectives(trace_step(planned, batch(), ["blocks.0", "blocks.1"], tensor_ranks=2))
    torch.manual_seed(0)
    model = Model()
    how(model, mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    x = torch.randn(2, 16, 5)
    with CommDebugMode() as mode:
        model(x).sum().backward()
    counts = {str(k).rpartition(".")[2]: n for k, n in mode.get_comm_counts().items() if n}
    functional = {
        kind: sum(n for name, n in counts.items() if name.startswith(kind)) for kind in expected
    }
    assert functional == {kind: len(each) for kind, each in expected.items()}
    held = {n: tuple(p.to_local().shape) for n, p in model.named_parameters()}
    assert held["blocks.0.q.weight"] == (8, 32)  # of 32 rows, a half of a half


def test_where_the_ranks_are() -> None:
    topology = InnerTopology(16, 1, 8, tensor=4)
    assert topology.ring("tensor") == Ring(4, 4, 2)
    assert topology.ring("shard") == Ring(16, 2, 4)
    assert InnerTopology(8, 1, 8, tensor=8).ring("shard") == Ring(8, 1, 8)
    assert InnerTopology(4, 2, 8, tensor=4).ring("replicate") == Ring(2, 1, 8)
    across = InnerTopology(4, 1, 8, tensor=16)
    assert across.ring("tensor") == Ring(16, 8, 1)
    assert across.ring("shard") == Ring(4, 1, 8)
    assert InnerTopology(1, 1, 8, tensor=4).ring("tensor") == Ring(4, 4, 1)


def test_degrees_side_by_side() -> None:
    sizes = {"width": 2048, "head": 128, "num_blocks": 4}
    made = sweep(
        on_meta(**sizes),
        batch(1, 2048),
        H100,
        [64, 128],
        tensor_ranks=[1, 2, 8],
        parallelize=parallelize,
        mp_policy=BF16,
        activation_checkpointing="full",
    )
    assert made.num_traced == 3
    table = {(p.num_ranks, p.tensor_ranks): p for p in made.predictions}
    assert set(table) == {(n, t) for n in (64, 128) for t in (1, 2, 8)}
    for ranks in (64, 128):
        one, two, eight = (table[ranks, t] for t in (1, 2, 8))
        assert two.mesh_shape == (ranks // 2,)
        assert one.step.compute_s > two.step.compute_s > eight.step.compute_s
        assert one.peak_bytes > eight.peak_bytes
        assert "tensor parallel" not in one.step.stream_s
        assert eight.step.stream_s["tensor parallel"] > 0
        assert eight.samples_per_s == pytest.approx(ranks // 8 / eight.seconds)
    across = predict(
        on_meta(**sizes), batch(1, 2048), H100, 64, tensor_ranks=16, parallelize=parallelize,
        mp_policy=BF16, activation_checkpointing="full",
    )  # fmt: skip
    # The same bytes take longer over the network than within a node.
    eight = table[64, 8]
    assert across.step.stream_s["tensor parallel"] > 1.5 * eight.step.stream_s["tensor parallel"]
    assert "Tensor ranks" in str(made)
    hybrid = predict(
        on_meta(), batch(), H100, 64, strategy="hybrid", tensor_ranks=2, parallelize=parallelize
    )
    assert (hybrid.mesh_shape, hybrid.num_ranks) == ((8, 4), 64)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_ranks": 2}, "tensor_ranks=2 needs parallelize="),
        ({"tensor_ranks": 3, "parallelize": parallelize}, "must divide num_ranks=8"),
        ({"tensor_ranks": 0, "parallelize": parallelize}, "tensor_ranks must be at least 1"),
        (
            {"tensor_ranks": 2, "parallelize": lambda model, mesh: model},
            "left all parameters of the model plain",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        predict(on_meta(), batch(), H100, 8, **options)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("parallel_models", None)
    path = tmp_path / "parallel_models.py"
    path.write_text(
        "import test_predict_tensor as tests\n"
        "model, batch = tests.Model, tests.batch\n"
        "parallelize = tests.parallelize\n"
    )
    sys.path.insert(0, str(Path(__file__).parent))
    code = main(
        ("predict", f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100",
         "--world-size", "8,16", "--tensor-ranks", "1,2", "--parallelize", f"{path}:parallelize",
         "--json")
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [p["tensor_ranks"] for p in data["predictions"]] == [1, 2, 1, 2]
    assert [p["num_ranks"] for p in data["predictions"]] == [8, 8, 16, 16]
    assert data["num_traced"] == 2
    code = main(
        ("plan", f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100", "--json",
         "--world-size", "16", "--tensor-ranks", "1,2,4", "--parallelize", f"{path}:parallelize",
         "--max-samples", "16", "--quiet")
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert {o["tensor_ranks"] for o in json.loads(out)["outcomes"]} == {2, 4}


# -- plans ---------------------------------------------------------------------------------------

SIZES = {"width": 2048, "head": 128, "num_blocks": 2}


def planned(**options: Any) -> Plan:
    options = {"tensor_ranks": [1, 2, 8], "parallelize": parallelize, "wrap": "auto", **options}
    options["prefetch"] = 1
    return plan(on_meta(**SIZES), batch(1, 8192), H100, 64, mp_policy=BF16, **options)


def degrees(made: Plan) -> set[int | None]:
    return {outcome.candidate.tensor_ranks for outcome in made.outcomes}


def test_a_plan_chooses_the_most_samples_in_a_second() -> None:
    made = planned(checkpoint="full")
    assert degrees(made) == {1, 2, 8}
    per_batch = [(o.candidate.tensor_ranks or 1) * o.seconds for o in made.outcomes]
    assert made.tensor_ranks == made.chosen.candidate.tensor_ranks == 1
    assert made.chosen is made.outcomes[0]
    assert per_batch[0] <= 1.006 * min(per_batch)
    assert "Tensor parallel: over 1 rank; over 2 ranks is" in str(made)
    # Eight times the time for an eighth of the samples: the table says so.
    assert min(o.seconds for o in made.outcomes if o.candidate.tensor_ranks == 8) < (
        made.chosen.seconds
    )
    # Figures are those of `predict`.
    best = next(o for o in made.outcomes if o.candidate.tensor_ranks == 8)
    alone = predict(
        on_meta(**SIZES), batch(1, 8192), H100, best.candidate.mesh, parallelize=parallelize,
        tensor_ranks=8, strategy=best.candidate.strategy, activation_checkpointing="full",
        mp_policy=BF16, prefetch=best.candidate.prefetch,
        reshard_after_forward=best.candidate.reshard,
    )  # fmt: skip
    assert best.candidate.wrap == "blocks"
    assert (alone.seconds, alone.needed_bytes) == (best.seconds, best.needed_bytes)


def test_memory_and_samples_decide_the_degree() -> None:
    two: dict[str, Any] = {"checkpoint": "none", "strategy": "full", "tensor_ranks": [1, 8]}
    free = planned(**two)
    least = min(o.needed_bytes for o in free.outcomes if o.candidate.tensor_ranks == 1)
    tight = planned(**two, memory_budget=0.95 * least)
    assert free.tensor_ranks == 1 < tight.tensor_ranks
    assert not any(o.fits for o in tight.outcomes if o.candidate.tensor_ranks == 1)
    few = planned(checkpoint="none", strategy="full", max_samples=10)
    assert degrees(few) == {8}
    assert (few.mesh_shape, few.to_dict()["tensor_ranks"]) == ((8,), 8)
    assert "h100, 64 ranks" in str(few)
    meshes = planned(checkpoint="full", mesh_shape=(4, 8))
    assert (degrees(meshes), meshes.mesh_shape) == ({2}, (4, 8))
    with pytest.raises(ValueError, match="A step has 8 samples or more, and max_samples=7"):
        planned(max_samples=7)


def test_degrees_that_a_model_does_not_bear_are_left_out() -> None:
    made = plan(
        on_meta(), batch(), H100, 16, checkpoint="none", strategy="full",
        parallelize=parallelize, tensor_ranks=[2, 8],
    )  # fmt: skip
    assert degrees(made) == {2}
    assert "Tensor parallelism over 8 ranks is left out because it fails" in str(made)
    with pytest.raises((RuntimeError, ValueError), match=r"head|shape|size|unflatten"):
        plan(on_meta(), batch(), H100, 16, parallelize=parallelize, tensor_ranks=8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_ranks": [1, 2]}, "tensor_ranks=2 needs parallelize="),
        ({"tensor_ranks": [], "parallelize": parallelize}, "tensor_ranks is an empty list"),
        ({"tensor_ranks": [3], "parallelize": parallelize}, "must divide num_ranks=8"),
        (
            {"tensor_ranks": [2], "parallelize": parallelize, "mesh_shape": (2, 4)},
            r"mesh 2 x 4 is not a mesh of num_ranks=8 ranks with tensor_ranks=\[2\]",
        ),
        ({"max_samples": 0}, "max_samples must be at least 1"),
    ],
)
def test_bad_arguments_of_a_plan(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        plan(on_meta(), batch(), H100, 8, **options)


@distributed(4)
def test_a_tensor_parallel_plan_is_applied() -> None:
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    made = plan(on_meta(), batch(), "cpu", 4, checkpoint="full", strategy="full")
    made = replace(
        made,
        candidate=replace(made.candidate, mesh=(2,)),
        tensor_ranks=2,
        workload=replace(made.workload, parallelize=parallelize),
    )
    mesh = made.make_mesh("cpu")
    assert mesh.mesh_dim_names == ("shard", "tensor")
    made.apply(model, mesh)
    assert model.blocks[0].q.weight.to_local().shape == (8, 32)
    x = torch.randn(2, 16, 5, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    for one in (model, plain):
        one(x).square().mean().backward()
    for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = reference.grad
        assert expected is not None, name
        dist.all_reduce(expected)
        torch.testing.assert_close(param.grad.full_tensor(), expected / 4, msg=name)
