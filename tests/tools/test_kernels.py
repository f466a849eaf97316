"""Steps are traced with the kernels that the accelerator runs, and not with those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from by_keywords import estimate, plan, trace_step
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning import Kernels
from fsdp2.planning.trace.events import Compute, StepTrace

BF16 = MixedPrecisionPolicy(torch.bfloat16)
SEQUENCE, WIDTH = 256, 64


class Attention(nn.Module):
    """One projection for queries, keys and values, and attention."""

    def __init__(self, heads: int = 4, attend: Any = None, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.attend = attend or F.scaled_dot_product_attention
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.attend(heads, heads, heads, **self.options).sum()


def traced(model: nn.Module, **options: Any) -> StepTrace:
    return trace_step(model, torch.zeros(2, SEQUENCE, WIDTH), [], mp_policy=BF16, **options)


def attention_flops(trace: StepTrace) -> int:
    made = (event.operations for event in trace.events if isinstance(event, Compute))
    return sum(o.flops for operations in made for o in operations if o.attention)


FORWARD = 2 * 2 * 2 * SEQUENCE * SEQUENCE * WIDTH  # two products of two samples
FUSED = FORWARD * 7 // 2  # and five products in backward
# x, the heads and the result, which share bf16 memory; scores would be 1 MiB for each copy.
KEPT = 2 * SEQUENCE * WIDTH * 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_keeps_no_scores_with_and_without_dropout(dropout: float) -> None:
    trace = traced(Attention(dropout_p=dropout))
    assert attention_flops(trace) == FUSED
    assert trace.activation_peak < 12 * KEPT
    assert trace.notes == []
    on_cpu = traced(Attention(dropout_p=dropout), kernels=Kernels("cpu"))
    if dropout:
        assert on_cpu.activation_peak > 4 * trace.activation_peak  # the math path


def test_causal_and_grouped_attention() -> None:
    assert attention_flops(traced(Attention(is_causal=True))) == FUSED // 2

    def grouped(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], **options)

    made = traced(Attention(attend=grouped, enable_gqa=True))
    assert attention_flops(made) == FUSED
    without = traced(Attention(attend=grouped, enable_gqa=True), kernels=Kernels(attention="math"))
    assert attention_flops(without) == 0
    assert without.activation_peak > 4 * made.activation_peak


def test_masks_and_wide_values_take_the_efficient_kernel() -> None:
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool)
    assert attention_flops(traced(Attention(attn_mask=mask))) == FUSED

    def latent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # as DeepSeek's: 16 and 8 wide
        return F.scaled_dot_product_attention(q, k, v[..., :8])

    made = traced(Attention(attend=latent))
    assert 0 < attention_flops(made) < FUSED
    assert made.notes == []


def test_attention_that_no_kernel_takes_says_so() -> None:
    made = traced(Attention(heads=64, attn_mask=torch.zeros(SEQUENCE, SEQUENCE)))  # 1 wide
    assert attention_flops(made) == 0
    assert (
        "Attention without a fused kernel, 1 call: flash: there is a mask; efficient: the"
        in str(made.notes)
    )
    with pytest.raises(ValueError, match=r"attention='flash'.* cannot be used: there is a mask"):
        traced(
            Attention(attn_mask=torch.zeros(SEQUENCE, SEQUENCE)), kernels=Kernels(attention="flash")
        )
    with sdpa_kernel(SDPBackend.MATH):
        assert "it is switched off" in str(traced(Attention()).notes)
    for kind in ("flash", "efficient", "cudnn"):
        kept = traced(Attention(), kernels=Kernels(attention=kind))
        assert attention_flops(kept) == FUSED


def test_inside_a_library_module_and_when_recomputed() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True, dropout=0.1)
    assert attention_flops(traced(layer)) == FUSED
    again = traced(
        nn.Sequential(Attention()), activation_checkpointing="full", checkpoint_modules=["0"]
    )
    assert attention_flops(again) == FUSED + FORWARD
    kept = traced(
        nn.Sequential(Attention()), activation_checkpointing="selective", checkpoint_modules=["0"]
    )
    assert attention_flops(kept) == FUSED


class Normed(nn.Module):
    """Four RMS norms."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        norms = (nn.RMSNorm(WIDTH, dtype=dtype) for _ in range(4))
        self.norms = nn.Sequential(*norms, nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(x)


def test_norms_and_dropout_are_one_kernel_that_keeps_its_input() -> None:
    trace = traced(Normed())
    forward = next(event for event in trace.events if isinstance(event, Compute))
    values = 2 * SEQUENCE * WIDTH
    kernels = [o.nbytes for o in forward.operations]
    # Parameters have a dtype of their own only under a policy: rows of x, weight, out, scale.
    row = 2 * 2 * values + 2 * WIDTH + 4 * 2 * SEQUENCE
    assert kernels.count(row) == 4
    assert 2 * 2 * values + values in kernels  # dropout: a mask of bytes
    decomposed = traced(Normed(), kernels=Kernels(fused_norms=False))
    assert decomposed.activation_peak > 1.5 * trace.activation_peak
    assert len(decomposed.params) == len(trace.params)
    assert len([e for e in trace.events if type(e).__name__ == "Gradient"]) == 4


def test_a_norm_of_two_dtypes_is_not_fused() -> None:
    """As on CUDA, where the fused kernel takes one dtype."""
    x = torch.zeros(2, SEQUENCE, WIDTH)
    with torch.device("cpu"):
        mixed = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.RMSNorm(WIDTH))
    made = trace_step(mixed, x.bfloat16(), [])
    same = trace_step(mixed.bfloat16(), x.bfloat16(), [])
    assert made.activation_peak > 1.5 * same.activation_peak


def test_real_tensors_are_computed_as_before_and_after() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 8)

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            from torch._subclasses.fake_tensor import unset_fake_temporarily

            with unset_fake_temporarily():
                self.seen.append(F.scaled_dot_product_attention(q, q, q))
                self.seen.append(F.rms_norm(q, (8,)))
            return self.linear(x)

    expected = [F.scaled_dot_product_attention(q, q, q), F.rms_norm(q, (8,))]
    model = Beside()
    estimate(model, 2, torch.zeros(2, 8))
    after = [F.scaled_dot_product_attention(q, q, q), F.rms_norm(q, (8,))]
    for seen in (model.seen, after):
        for got, want in zip(seen, expected, strict=True):
            torch.testing.assert_close(got, want)


# -- flex ------------------------------------------------------------------------------------------


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 32)


@pytest.fixture
def _no_warnings() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_no_warnings")
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_costs_the_blocks_of_its_mask(compiled: bool) -> None:
    attend = torch.compile(flex_attention) if compiled else flex_attention
    assert attention_flops(traced(Attention(attend=attend))) == FUSED

    def masked(mask: Any, made_inside: bool) -> Any:
        made = create_block_mask(mask, None, None, SEQUENCE, SEQUENCE, "cpu", BLOCK_SIZE=32)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            block_mask = made
            if made_inside:
                block_mask = create_block_mask(
                    mask, None, None, SEQUENCE, SEQUENCE, "cpu", BLOCK_SIZE=32
                )
            return attend(q, k, v, block_mask=block_mask)

        return traced(Attention(attend=call))

    for mask, blocks in ((causal, 36), (window, 15)):
        for made_inside in (False, True):
            trace = masked(mask, made_inside)
            assert attention_flops(trace) == pytest.approx(FUSED * blocks / 64)
            assert not trace.notes


class Biased(nn.Module):
    """Attention with a trained bias, which its score_mod reaches in different ``way``s."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.attention = Attention(attend=self.attend)
        self.way = way
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(4))])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias, listed = self.bias[0], [self.bias[0]]
        functions: dict[str, Any] = {
            "itself": lambda s, b, h, i, j: s + bias[h],
            "a module": lambda s, b, h, i, j: s + self.bias[0][h],
            "a list": lambda s, b, h, i, j: s + listed[0][h],
            "a default": lambda s, b, h, i, j, table=bias: s + table[h],
            "an operator's result": (lambda made: lambda s, b, h, i, j: s + made[h])(bias * 2),
            "nothing": lambda s, b, h, i, j: s + (i - j),
            "a failing function": lambda s, b, h, i, j: s + bias[h].item(),
        }
        return flex_attention(q, k, v, score_mod=functions[self.way])

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def num_gradients(trace: StepTrace) -> int:
    return sum(type(event).__name__ == "Gradient" for event in trace.events)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_no_warnings")
@pytest.mark.parametrize(
    "way", ["itself", "a module", "a list", "a default", "an operator's result"]
)
def test_a_trained_bias_of_flex_attention_gets_a_gradient_however_it_is_reached(way: str) -> None:
    trace = traced(Biased(way))
    assert num_gradients(trace) == 2  # of the projection too
    assert trace.notes == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_no_warnings")
def test_a_score_mod_that_trains_nothing_or_fails() -> None:
    trace = traced(Biased("nothing"))
    assert num_gradients(trace) == 1
    assert trace.notes == []
    trace = traced(Biased("a failing function"))
    assert "score_mod" in trace.notes[0]
    assert "could not be evaluated" in trace.notes[0]


# -- arguments -------------------------------------------------------------------------------------


def test_plans_and_estimates_take_kernels() -> None:
    batch = torch.zeros(2, SEQUENCE, WIDTH)
    peaks, seconds = [], []
    for kernels in (None, Kernels(attention="math")):
        model = Attention(dropout_p=0.1)
        peaks.append(estimate(model, 2, batch, kernels=kernels).worst.peak.total)
        seconds.append(plan(model, batch, "h100", 8, kernels=kernels).step.compute_s)
    assert peaks[1] > 2 * peaks[0]
    assert seconds[1] > seconds[0]
    with pytest.raises(ValueError, match="attention must be one of"):
        Kernels(attention="fast")
    with pytest.raises(TypeError, match="kernels must be"):
        estimate(Attention(), 2, batch, kernels="cuda")  # type: ignore[arg-type]
