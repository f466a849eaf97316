"""The independent reference: what sharded training has to compute.

Every rank holds a whole plain model with its own buffers and its own batch. After backward the
gradients are gathered from all ranks, summed in rank order in the dtype of the reduction and
divided by the number of ranks. Nothing of `fsdp2` is used for it.

How close a sharded model must be, per tensor, in terms of the largest absolute reference value:
1e-10 in fp64 and 1e-6 in fp32. With `bitwise=True` it must be equal. That can be asked for where
both sides do the same arithmetic in the same order: for losses and outputs before the parameters
have seen a reduced gradient, and for gradients at world sizes 1 and 2, where a sum has only one
order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import fully_shard
from harness import RUNS_ON_TORCH
from models import Case

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def whole(tensor: Tensor) -> Tensor:
    """A detached copy of the full tensor; a collective if it is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().clone()
    return tensor.clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters by name."""
    return {name: whole(p) for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The full gradients by name, None where there is none."""
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers of this rank by name."""
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def average_over_ranks(
    tensor: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
    divide_by: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The sum over ranks, in rank order, divided by their number (or by `divide_by`)."""
    world_size = dist.get_world_size(group)
    mine = tensor.detach().to(reduce_dtype or tensor.dtype).contiguous()
    others = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(others, mine, group=group)
    total = others[0]
    for other in others[1:]:
        total = total + other
    return (total / (divide_by or world_size)).to(tensor.dtype)


def average_gradients(
    model: nn.Module,
    *,
    reduce_dtype: torch.dtype | None = None,
    divide_by: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replaces every gradient of the plain model by its average over the ranks."""
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    for dtype in dict.fromkeys(p.dtype for p in with_gradient):
        # Together, because on a busy machine each collective costs milliseconds.
        chosen = [p for p in with_gradient if p.dtype == dtype]
        flat = torch.cat([p.grad.flatten() for p in chosen if p.grad is not None])
        flat = average_over_ranks(flat, reduce_dtype=reduce_dtype, divide_by=divide_by, group=group)
        parts = flat.split([p.numel() for p in chosen])
        for parameter, part in zip(chosen, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()


def own_part(reference: Tensor, like: DTensor) -> Tensor:
    """The rows of a full tensor that this rank holds in `like`, sharded by one mesh dim."""
    dims = [dim for dim, placement in enumerate(like.placements) if not placement.is_replicate()]
    if not dims:
        return reference
    (mesh_dim,) = dims
    placement = like.placements[mesh_dim]
    # Rows are dealt out like torch.chunk does it, or in blocks, whose size is a negative split
    # factor; ranks beyond the last hold none.
    assert isinstance(placement, Shard) or placement.split_factor < 0, f"placement {placement}"
    block = 1 if isinstance(placement, Shard) else -placement.split_factor
    num_blocks = -(-reference.shape[placement.dim] // block)
    num_rows = block * -(-num_blocks // like.device_mesh.size(mesh_dim))
    start = min(
        num_rows * like.device_mesh.get_local_rank(mesh_dim), reference.shape[placement.dim]
    )
    end = min(start + num_rows, reference.shape[placement.dim])
    return reference.narrow(placement.dim, start, end - start)


def sharded_once(tensor: Tensor) -> bool:
    """Whether this is a DTensor that one mesh dim shards, so that `own_part` applies."""
    return (
        isinstance(tensor, DTensor)
        and sum(not placement.is_replicate() for placement in tensor.placements) <= 1
    )


def assert_same(actual: Tensor, expected: Tensor, what: str, *, bitwise: bool = False) -> None:
    """Compares a tensor with its full reference, by the tolerances above.

    Of a DTensor each rank compares its own part, so that no communication is needed; the ranks
    together compare all of it.
    """
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    actual, expected = actual.detach(), expected.detach()
    assert expected.isfinite().all(), f"{what}: the reference is not finite"
    scale = expected.abs().max().item() if expected.numel() else 0.0
    if isinstance(actual, DTensor) and sharded_once(actual):
        expected = own_part(expected, actual)
        actual = actual.to_local()
        assert actual.shape == expected.shape, f"{what}: local {actual.shape}, {expected.shape}"
    elif isinstance(actual, DTensor):
        actual = actual.full_tensor()
    actual = actual.to(expected.device)  # an offloaded one
    if torch.equal(actual, expected):
        return
    difference = (actual - expected).abs().max().item()
    note = f"{what}: differs by up to {difference:.3e}, largest reference value {scale:.3e}"
    has_tolerance = expected.dtype in TOLERANCE and not bitwise
    assert has_tolerance, f"{note}; must be equal"
    allowed = TOLERANCE[expected.dtype] * scale
    assert difference <= allowed, f"{note}; allowed is {allowed:.3e}"


def assert_all_same(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    what: str,
    *,
    bitwise: bool = False,
) -> None:
    """Compares tensors by name; None must stand where None stands in the reference."""
    assert list(actual) == list(expected), f"{what}: {list(actual)}, not {list(expected)}"
    for name, reference in expected.items():
        value = actual[name]
        if reference is None or value is None:
            is_none = (value is None, reference is None)
            assert is_none == (True, True), f"{what} of {name}: (is None, should be) = {is_none}"
        else:
            assert_same(value, reference, f"{what} of {name}", bitwise=bitwise)


def assert_same_gradients(model: nn.Module, plain: nn.Module, *, bitwise: bool = False) -> None:
    """Compares the gradients of a sharded model with those of the reference.

    A gradient must be sharded as its parameter is.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            grad = parameter.grad
            assert isinstance(grad, DTensor), f"gradient of {name} is no DTensor"
            assert grad.placements == parameter.placements, f"{name}: {grad.placements}"
            assert grad.device_mesh == parameter.device_mesh, f"{name}: {grad.device_mesh}"
    actual = {name: p.grad for name, p in model.named_parameters()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_all_same(actual, expected, "gradient", bitwise=bitwise)


def assert_same_parameters(model: nn.Module, plain: nn.Module, *, bitwise: bool = False) -> None:
    """Compares the parameters of a sharded model with those of the reference."""
    actual, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert_all_same(actual, expected, "parameter", bitwise=bitwise)


def assert_sharded(modules: nn.Module | Iterable[nn.Module]) -> None:
    """All parameters are in their sharded state: registered as DTensors."""
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"


def assert_unsharded(module: nn.Module) -> None:
    """The parameters of this module itself, not of those inside it, are plain full tensors."""
    for name, parameter in module.named_parameters(recurse=False):
        assert not isinstance(parameter, DTensor), f"{name} is sharded"


def one_order_only() -> bool:
    """Whether a sum over the ranks has one order only, so that gradients must be equal."""
    return dist.get_world_size() <= 2


def gathering() -> dict[str, Any]:
    """How `fully_shard` shall gather: straight into place, packed, or some of each.

    The models of the tests are so small that all would be packed. So the world size decides:
    at 2 every parameter is gathered directly, at 4 those of at least 200 bytes, and elsewhere
    none. Results must not depend on it.
    """
    if RUNS_ON_TORCH:
        return {}
    return {"direct_min_bytes": {2: 0, 4: 200}.get(dist.get_world_size())}


def shard_case(case: Case, model: nn.Module, **options: Any) -> nn.Module:
    """Applies `fully_shard` to the case's units and then to the root."""
    options = {**gathering(), **options}
    for unit in case.units(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def pair(
    case: Case, *, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded model and a plain one with the same weights, which are the same on all ranks."""
    torch.manual_seed(0)
    plain = case.build().to(dtype)
    model = shard_case(case, copy.deepcopy(plain), **options)
    return model, plain


def run_both(
    case: Case,
    model: nn.Module,
    plain: nn.Module,
    step: int,
    *,
    dtype: torch.dtype = torch.float64,
    bitwise_loss: bool = False,
    average: bool = True,
) -> None:
    """Forward and backward of both models on this rank's batch of a step; compares the losses.

    With `average` the reference's gradients are averaged over the ranks; without, they stay this
    rank's own, as in a micro-batch that is accumulated without communication.
    """
    batch = case.batch(step, dist.get_rank(), dtype)
    expected = case.loss(plain, *batch)
    expected.backward()
    if average:
        average_gradients(plain)
    loss = case.loss(model, *batch)
    assert_same(loss, expected, f"loss of step {step}", bitwise=bitwise_loss)
    loss.backward()


@dataclasses.dataclass(frozen=True)
class Training:
    """How `check_training` trains."""

    dtype: torch.dtype = torch.float64
    steps: int = 4
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"lr": 0.05})
    # AdamW divides a gradient by its own size, so that rounding of a tiny one becomes a full
    # step; fed the reference's gradients, it is only the optimizer that is compared.
    feed_reference_gradients: bool = False
    # Whether to ask for equality in the first step (and of parameters, with gradients fed).
    # Not where a backward is several backwards, each reduced on its own: the sum over ranks and
    # backwards has another order; nor where memory formats differ, or vector instructions of an
    # optimizer treat the ends of tensors otherwise than their middles.
    bitwise: bool = True


def feed_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Writes this rank's part of the reference gradients into the sharded ones."""
    for sharded, reference in zip(model.parameters(), plain.parameters(), strict=True):
        if isinstance(sharded.grad, DTensor) and reference.grad is not None:
            sharded.grad.to_local().copy_(own_part(reference.grad, sharded.grad))


def check_training(
    case: Case, training: Training | None = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Trains a sharded model beside the reference and compares them at every step.

    Compared are losses, full gradients, buffers of this rank, and the parameters at the end.
    The loss of the first step must be bitwise equal, and so must the gradients of the first step
    at world sizes 1 and 2.

    Arguments:
        case: the model, its units and its data.
        training: dtype, number of steps, optimizer.
        options: passed on to `fully_shard`.

    Returns:
        the sharded and the plain model.
    """
    training = training or Training()
    model, plain = pair(case, dtype=training.dtype, **options)
    make, settings = training.optimizer, training.optimizer_options
    optimizer = make([p for p in model.parameters() if p.requires_grad], **settings)
    plain_optimizer = make([p for p in plain.parameters() if p.requires_grad], **settings)
    assert_same_parameters(model, plain, bitwise=True)
    for step in range(training.steps):
        first = step == 0
        same = first and training.bitwise
        run_both(case, model, plain, step, dtype=training.dtype, bitwise_loss=same)
        assert_sharded(model)
        assert_same_gradients(model, plain, bitwise=same and one_order_only())
        assert_all_same(buffers(model), buffers(plain), "buffer", bitwise=same)
        if training.feed_reference_gradients:
            feed_gradients(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    fed = training.feed_reference_gradients
    assert_same_parameters(model, plain, bitwise=fed and training.bitwise)
    return model, plain
