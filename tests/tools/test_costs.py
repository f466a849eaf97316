"""What operators cost: none that computes costs nothing without saying so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from by_keywords import estimate, plan
from fsdp2.planning import Estimate, register_cost
from fsdp2.planning.trace import op_costs
from fsdp2.planning.trace.meter import StorageMeter


def flops_of(call: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        with StorageMeter() as meter:
            call(*tensors)
    done = meter.take()
    assert done is not None
    assert not meter.uncosted
    return done.flops


def bytes_of(call: Any, *tensors: Any) -> int:
    with StorageMeter() as meter:
        call(*tensors)
    return meter.nbytes


def grouped(a: Tensor, b: Tensor) -> Tensor:
    experts = b.shape[0] if b.dim() == 3 else 4
    offsets = torch.empty(experts, dtype=torch.int32)
    return torch._grouped_mm(a, b, offs=offsets)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    one = torch.empty((), dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "shapes", "flops"),
    [
        (grouped, [(64, 32), (4, 32, 48)], 2 * 64 * 32 * 48),
        (grouped, [(32, 64), (64, 48)], 2 * 64 * 32 * 48),  # the gradient of the weights
        (torch.mv, [(32, 64), (64,)], 2 * 32 * 64),
        (torch.addmv, [(32,), (32, 64), (64,)], 2 * 32 * 64),
        (F.conv2d, [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 6 * 6 * 3 * 9),
        (F.conv1d, [(2, 3, 8), (5, 3, 3)], 2 * 2 * 5 * 6 * 3 * 3),
        (torch.relu, [(64, 64)], 0),
        (torch.sqrt, [(64, 64)], 0),
        (lambda x: torch.cummax(x, 0), [(64, 64)], 0),
        (F.gelu, [(64, 64)], 0),
    ],
)
def test_flops(call: Any, shapes: Any, flops: int) -> None:
    assert flops_of(call, *shapes) == flops


def test_flops_of_other_dtypes() -> None:
    shapes = [(32, 64), (16, 64)]
    assert flops_of(scaled, *shapes, dtype=torch.float8_e4m3fn) == 2 * 32 * 64 * 16
    square = [(8, 8)]
    assert flops_of(torch.linalg.cholesky, *square, dtype=torch.float32) == 512 // 3
    assert flops_of(torch.fft.fft, (2, 16), dtype=torch.complex64) == 5 * 32 * 4


def test_what_is_overwritten_is_not_read_and_what_is_changed_is_written() -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    assert bytes_of(x.fill_, 1.0) == x.nbytes
    assert bytes_of(x.copy_, y) == 2 * x.nbytes
    assert bytes_of(x.add_, y) == 3 * x.nbytes
    assert bytes_of(torch.add, x, y) == 3 * x.nbytes
    assert bytes_of(torch._foreach_add_, [x, y], [y, x]) == 6 * x.nbytes  # returns nothing
    assert bytes_of(lambda: torch.empty_like(x).new_empty(3)) == 0


# -- custom operators ------------------------------------------------------------------------------


@torch.library.custom_op("fsdp2_costs::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("fsdp2_costs::mix_backward", mutates_args=())
def mix_backward(grad: Tensor) -> Tensor:
    return grad.clone()


mix.register_fake(torch.empty_like)
mix_backward.register_fake(torch.empty_like)
mix.register_autograd(lambda ctx, grad: mix_backward(grad))


class Mixing(nn.Module):
    """A linear and an operator that nobody knows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return mix(self.linear(x))


@pytest.fixture
def _nothing_registered() -> Iterator[None]:
    before = dict(op_costs._registered)
    yield
    op_costs._registered.clear()
    op_costs._registered.update(before)


def mixed(**options: Any) -> Estimate:
    return estimate(Mixing(), 2, torch.zeros(32, 64), **options)


@pytest.mark.usefixtures("_nothing_registered")
def test_an_operator_without_a_cost_is_an_error_that_says_how_to_give_one() -> None:
    with pytest.raises(ValueError, match=r"planning\.register_cost\('fsdp2_costs::mix") as raised:
        mixed()
    assert "fsdp2_costs::mix_backward, 1 call, 8.00 KiB" in str(raised.value)
    with pytest.raises(ValueError, match="Operators of unknown cost"):
        plan(Mixing(), torch.zeros(32, 64), "h100", 8)
    listed = mixed(unknown_costs="list")
    assert "Without a cost: fsdp2_costs::mix, 1 call, 16.0 KiB" in str(listed)
    made = plan(Mixing(), torch.zeros(32, 64), "h100", 8, unknown_costs="list")
    assert str(made).count("Without a cost: fsdp2_costs::mix, 1 call") == 1
    with pytest.raises(ValueError, match="unknown_costs must be one of"):
        mixed(unknown_costs="ignore")


@pytest.mark.usefixtures("_nothing_registered")
def test_a_registered_cost_counts() -> None:
    without = mixed(unknown_costs="list").flops
    register_cost("fsdp2_costs::mix", lambda x, *, out: 7 * x.numel() + out.numel())
    register_cost(torch.ops.fsdp2_costs.mix_backward)
    made = mixed()
    assert made.flops == without + 8 * 32 * 64
    assert "Without a cost" not in str(made)
    register_cost(torch.ops.fsdp2_costs.mix.default, 5, nbytes=lambda x, *, out: 3)
    assert mixed().flops == without + 5
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert bytes_of(mix, torch.zeros(32, 64)) == 3


@pytest.mark.usefixtures("_nothing_registered")
def test_few_bytes_of_unknown_cost_are_only_listed() -> None:
    class Rarely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing, self.large = Mixing(8), nn.Linear(8, 4096)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(self.mixing(x))

    made = estimate(Rarely(), 2, torch.zeros(32, 8))
    assert "Without a cost: fsdp2_costs::mix, 1 call" in str(made)
    assert made.to_dict()["notes"]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("mix", 3), TypeError, "its name"),
        ((len, 3), TypeError, "needs an operator"),
        (("a::b", -1), ValueError, "must not be negative"),
        (("a::b", "3"), TypeError, "must be a number or a function"),
        (("a::b", 0, True), TypeError, "nbytes of a::b"),
    ],
)
def test_bad_costs(arguments: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        register_cost(*arguments)
