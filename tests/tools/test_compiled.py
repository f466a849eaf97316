"""`compiled=`: what `torch.compile` of blocks changes in a step, beside torch's own compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from by_keywords import estimate, plan, predict, predict_planned, sweep, trace_step
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning import Kernels
from fsdp2.planning.trace.checkpointing import apply_checkpointing
from fsdp2.planning.trace.compiled import FUSED, Program
from fsdp2.planning.trace.events import Compute, Operation, StartOfBackward, StepTrace
from fsdp2.planning.trace.fusion import Kernel, kernels_of
from fsdp2.planning.trace.meter import StorageMeter

ROWS, WIDTH = 96, 64
X = ROWS * WIDTH * 4  # bytes of an activation
W = WIDTH * WIDTH * 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# -- which operators are one kernel ----------------------------------------------------------------


def kernels(function: Callable[..., Any], *shapes: Sequence[int]) -> list[Kernel]:
    inputs = [torch.empty(*shape) for shape in shapes]
    return kernels_of(make_fx(function, tracing_mode="fake")(*inputs).graph)


def fused(function: Callable[..., Any], *shapes: Sequence[int]) -> list[int]:
    """Bytes that each fused kernel reads and writes."""
    return [kernel.nbytes for kernel in kernels(function, *shapes) if kernel.fused]


def test_a_chain_of_pointwise_operators_reads_its_inputs_and_writes_its_result() -> None:
    def chain(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return ((x + 1).sigmoid() * y).float() @ w

    made = kernels(chain, (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, WIDTH))
    assert [k.fused for k in made] == [True, False]
    assert made[0].nbytes == 3 * X


def test_a_norm_is_one_kernel_with_what_comes_before_and_after() -> None:
    def norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x + y
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x, (x * scale * weight).relu()

    assert fused(norm, (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)) == [4 * X + 4 * WIDTH]


def test_sums_over_rows_and_over_columns_are_two_kernels() -> None:
    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y.sum(0), y.sum(1)

    for rows in (ROWS, WIDTH):  # as many rows as columns, too
        made = fused(sums, (rows, WIDTH))
        whole = rows * WIDTH * 4
        # Both compute exp, which nobody else reads.
        assert made == [whole + 4 * WIDTH, whole + 4 * rows]


def test_what_a_multiplication_is_between_stays_apart() -> None:
    def around(x: Tensor, w: Tensor) -> Tensor:
        y = x.exp()
        return (y @ w) + y

    made = kernels(around, (ROWS, WIDTH), (WIDTH, WIDTH))
    assert [k.fused for k in made] == [True, False, True]
    assert [k.nbytes for k in made if k.fused] == [2 * X, 3 * X]


def test_complex_numbers_and_views_of_what_is_not_in_memory() -> None:
    def rotate(x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex((x * 2).unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.view_as_complex(turn))
        return turned.flatten(1) + 1

    made = kernels(rotate, (ROWS, WIDTH), (WIDTH // 2, 2))
    assert [k.nbytes for k in made if k.fused] == [2 * X, 2 * X]  # not the product
    # Of what is computed on the way, a part is read; each element once.
    assert fused(lambda x: (x + 1).view(-1)[: X // 8].neg(), (ROWS, WIDTH)) == [X // 2 + X // 2]

    def halves(x: Tensor) -> Tensor:
        first, second = x.exp().chunk(2, -1)
        return torch.cat([-second, first, first], -1)

    assert fused(halves, (ROWS, WIDTH)) == [X + 3 * X // 2]
    assert fused(lambda table, i: table[i.long()] * 2, (1000, WIDTH), (ROWS,)) == [2 * X + 4 * ROWS]


def test_what_is_read_through_two_views_is_read_once() -> None:
    assert fused(lambda x: x + x.t(), (WIDTH, WIDTH)) == [2 * W]


def test_inputs_are_freed_when_nothing_needs_them_and_results_are_written_in_place() -> None:
    def layers(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
        return (((x @ up).relu() @ down).relu(),)

    shapes = (ROWS, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    graph = make_fx(layers, tracing_mode="fake")(*map(torch.empty, shapes))
    with FakeTensorMode(), StorageMeter() as meter:
        args = [torch.empty(shape) for shape in shapes]
        meter.begin()
        [result] = Program(graph, meter)(args)
        done = meter.take()
    assert args == []
    assert result.nbytes == X
    assert done is not None
    # First x and what is four times as wide; then that without x, and the result.
    assert done.peak == 4 * X
    assert done.net == X - X - 8 * W  # without x and the weights, which nobody else has


# -- what is saved, beside torch ----------------------------------------------------------------


class Block(nn.Module):
    """Attention and a gated layer, with norms, dropout and a buffer."""

    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).unbind(-3)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(a.transpose(1, 2).flatten(2)) * self.scale.to(x.dtype)
        y = self.ffn_norm(x)
        return x + F.leaky_relu(self.down(F.silu(self.gate(y)) * self.up(y)), self.slope)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 3, slopes: Sequence[float] = ()) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(*slopes[i : i + 1]) for i in range(num_blocks))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.zeros(2, ROWS // 2, dtype=torch.long)
NAMES = [f"blocks.{i}" for i in range(3)]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


@functools.cache
def traced(compiled: bool, mode: str = "none", **options: Any) -> StepTrace:
    return trace_step(
        Model(),
        TOKENS,
        NAMES,
        loss_fn=loss_of,
        activation_checkpointing=mode,
        checkpoint_modules=NAMES,
        compiled=NAMES if compiled else (),
        **options,
    )


def saved_bytes(trace: StepTrace) -> int:
    """What is in memory when backward begins, beside parameters and inputs."""
    forward = trace.events[: [type(e) for e in trace.events].index(StartOfBackward)]
    return sum(event.net for event in forward if isinstance(event, Compute))


def operations(trace: StepTrace) -> list[Operation]:
    return [o for e in trace.events if isinstance(e, Compute) for o in e.operations]


def saved_by_torch(mode: str) -> int:
    """The same of a step under `torch.compile`, on real memory."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model()
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    for block in model.blocks:
        forward = block.forward if mode == "none" else apply_checkpointing(block.forward, mode)
        block.forward = torch.compile(  # type: ignore[method-assign]
            forward, backend="aot_eager_decomp_partition", fullgraph=True
        )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model(TOKENS))
    kept[loss.untyped_storage().data_ptr()] = loss.untyped_storage()
    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    outside.add(TOKENS.untyped_storage().data_ptr())
    return sum(storage.nbytes() for at, storage in kept.items() if at not in outside)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_is_saved_for_backward_is_what_torch_saves(mode: str) -> None:
    made = traced(True, mode, device_type="cpu", kernels=Kernels("cpu"))
    assert saved_bytes(made) == saved_by_torch(mode)
    if mode == "none":
        assert saved_bytes(made) < saved_bytes(traced(False, device_type="cpu"))


@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_kernels_of_another_device_leave_nothing_behind(first: str) -> None:
    """Whatever was traced before, in this process: torch remembers what it dispatched to."""
    options: dict[str, dict[str, Any]] = {"cuda": {}, "cpu": {"device_type": "cpu"}}
    traced.cache_clear()
    operator: Any = torch.ops.aten.scaled_dot_product_attention.default
    operator._dispatch_cache.clear()
    second = "cpu" if first == "cuda" else "cuda"
    alone = operations(traced(True, **options[second]))
    operator._dispatch_cache.clear()
    traced.cache_clear()
    traced(True, **options[first])
    assert operations(traced(True, **options[second])) == alone


# -- a step --------------------------------------------------------------------------------------


def test_less_is_launched_moved_and_saved_and_the_same_is_multiplied() -> None:
    eager, compiled = traced(False, mp_policy=BF16), traced(True, mp_policy=BF16)
    assert compiled.flops == eager.flops
    assert [o.flops for o in operations(compiled) if o.attention] == [
        o.flops for o in operations(eager) if o.attention
    ]
    moving = [[o.nbytes for o in operations(t) if not o.flops] for t in (eager, compiled)]
    assert len(moving[1]) < 0.7 * len(moving[0])
    assert sum(moving[1]) < 0.8 * sum(moving[0])
    assert compiled.activation_peak < eager.activation_peak
    assert {e.param for e in compiled.events if hasattr(e, "param")} == {
        e.param for e in eager.events if hasattr(e, "param")
    }
    assert any(o.operator == FUSED for o in operations(compiled))
    assert not any(o.operator == FUSED for o in operations(eager))
    assert all(event.net < 1 << 40 for event in compiled.events if isinstance(event, Compute))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_recomputes_in_compiled_modules(mode: str) -> None:
    plain, saving = traced(True), traced(True, mode)
    eager = traced(False, mode)
    assert saving.flops == eager.flops > plain.flops
    assert saved_bytes(saving) < saved_bytes(plain)


def test_modules_that_do_the_same_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp2.planning.trace.compiled import Compiler

    made: list[str] = []
    original = Compiler._traced
    monkeypatch.setattr(
        Compiler, "_traced", lambda self, *args: made.append("") or original(self, *args)
    )

    def trace(*slopes: float) -> StepTrace:
        made.clear()
        return trace_step(Model(3, slopes), TOKENS, NAMES, loss_fn=loss_of, compiled=NAMES)

    trace(0.1, 0.1, 0.1)
    assert len(made) == 1
    trace(0.1, 0.2, 0.1)  # an attribute decides what a forward does
    assert len(made) == 2


def test_offloaded_activations_of_compiled_modules_leave_the_device() -> None:
    away = traced(True, max_saved_bytes=0)
    assert away.host_bytes > 3 * X
    assert saved_bytes(away) < saved_bytes(traced(True)) - 3 * X


# -- estimate, predict, sweep, plan, the command line --------------------------------------------


def test_every_public_call_takes_it() -> None:
    options: dict[str, Any] = {"loss_fn": loss_of, "mp_policy": BF16}
    tokens = TOKENS.to("meta")
    eager, compiled = (
        estimate(Model(), 8, tokens, compiled=compiled, **options) for compiled in (False, True)
    )
    assert compiled.ranks[0].peak.total < eager.ranks[0].peak.total
    made = sweep(Model(), tokens, "h100", 8, compiled=[False, True], **options)
    slow, fast = made.predictions
    assert made.num_traced == 2
    assert fast.seconds < slow.seconds
    assert "Compiled" in str(made)
    assert "blocks" in str(made)
    same = predict(Model(), tokens, "h100", 8, compiled=True, **options)
    assert (same.seconds, same.peak_bytes) == (fast.seconds, fast.peak_bytes)
    assert same.choices["compiled"] == "blocks"
    one = predict(Model(), tokens, "h100", 8, compiled=["blocks.1"], **options)
    assert fast.seconds < one.seconds < slow.seconds
    chosen = plan(
        Model(), tokens, "h100", 8, strategy="full", checkpoint="none", compiled=True, **options
    )
    assert predict_planned(chosen).seconds == chosen.step.seconds


class Inner(nn.Module):
    """A block that checkpoints a part of itself, and one with data-dependent shapes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.kind == "data":
            return self.inner(x)[x.sum(-1) > 0]
        return self.inner(x)


def test_what_cannot_be_compiled_says_why() -> None:
    def compiled(kind: str, names: Any, **options: Any) -> StepTrace:
        model = nn.Sequential(Inner(kind), Inner("plain"))
        x = torch.empty(ROWS, WIDTH)
        return trace_step(model, x, options.pop("units", ["0", "1"]), compiled=names, **options)

    with pytest.raises(ValueError, match="no module '2'"):
        compiled("plain", ["2"])
    with pytest.raises(ValueError, match=r"module '0' has the unit '0.inner' in it"):
        compiled("plain", ["0"], units=["0.inner"])
    with pytest.raises(ValueError, match="fake=False"):
        compiled("plain", ["0"], fake=False)
    with pytest.raises(ValueError, match="Module '0' cannot be traced as one graph"):
        compiled("data", ["0"])
    with pytest.raises(ValueError, match="checkpoints a part of itself"):
        compiled("checkpoint", ["0"])
    with pytest.raises(ValueError, match="compiles blocks"):
        estimate(nn.Linear(2, 2), 2, torch.empty(2, 2), compiled=True)
    with pytest.raises(TypeError, match=r"compiled must be.*\(fsdp2\.graph\) cannot be estimated"):
        estimate(nn.Linear(2, 2), 2, torch.empty(2, 2), compiled="0")
