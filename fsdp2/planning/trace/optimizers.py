"""The state that an optimizer keeps for a rank's shards, and the scratch memory of its step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as _DataDependent
from torch._subclasses.fake_tensor import FakeTensorMode

from ...common.suggestions import did_you_mean
from .events import Operation
from .meter import StorageMeter

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of an optimizer on one rank.

    Attributes:
        state: bytes kept between steps.
        moment: peak bytes of a step beyond the state.
        traffic: bytes that a step reads and writes.
        tensors: bytes of each tensor of the state.
        moments: of ``moment``, the part for each parameter.
        operations: of a step.
    """

    state: int
    moment: int
    traffic: int
    tensors: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class ParamCost:
    """Of one parameter of a rank.

    Attributes:
        nbytes: of the parameter.
        state: bytes of each tensor of its state that has a value for each element.
        numbers: of each other one.
        moment, traffic: as in `OptimizerCost`.
        on_host: whether it is in host memory beside a device.
    """

    nbytes: int
    state: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    moment: int = 0
    traffic: int = 0
    on_host: bool = False


NO_OPTIMIZER = OptimizerCost(0, 0, 0)


def sum_of(costs: Sequence[OptimizerCost]) -> OptimizerCost:
    """One optimizer for the parameters of several models."""
    return OptimizerCost(
        sum(each.state for each in costs),
        sum(each.moment for each in costs),
        sum(each.traffic for each in costs),
        tuple(nbytes for each in costs for nbytes in each.tensors),
        tuple(nbytes for each in costs for nbytes in each.moments),
        tuple(operation for each in costs for operation in each.operations),
    )


NAMED: dict[str, OptimizerFactory] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


def optimizer_cost(
    shards: Sequence[tuple[tuple[int, ...], torch.dtype]],
    optimizer: str | type | OptimizerFactory | None,
    device_type: str,
    known: dict[Any, OptimizerCost] | None = None,
) -> OptimizerCost:
    """Run two steps of an optimizer on fake shards.

    Args:
        shards: shape and dtype of this rank's shard of every trained parameter.
        optimizer: a name ("adamw", "sgd", "momentum"), an optimizer class, a function of the
            parameters, or None for no optimizer.
        device_type: except on the CPU, torch updates all parameters together (``foreach``).
        known: what earlier calls with the same optimizer found out for single shards of that
            device; it gets what this one does.

    Raises:
        ValueError: for an unknown name, or an optimizer whose step depends on values.
    """
    if optimizer is None or not shards:
        return NO_OPTIMIZER
    factory = _factory(optimizer, device_type)
    if device_type != "cpu":
        # The cost of all is the sum of the costs of each, so every shape is tried only once.
        costs = {} if known is None else known
        for shard in dict.fromkeys(shards):
            if shard not in costs:
                costs[shard] = _run([shard], factory)
        return sum_of([costs[shard] for shard in shards])
    return _run(shards, factory)


def param_costs(
    shards: Sequence[tuple[tuple[int, ...], torch.dtype]],
    optimizer: str | type | OptimizerFactory | None,
    device_type: str,
) -> list[ParamCost]:
    """What an optimizer does about each shard, as if it had no other; arguments as above."""
    found: dict[Any, ParamCost] = {}
    for shape, dtype in dict.fromkeys(shards):
        param = torch.empty(shape, dtype=dtype, device="meta")
        if optimizer is None:
            found[shape, dtype] = ParamCost(param.nbytes)
            continue
        made: list[torch.Tensor] = []
        cost = _run([(shape, dtype)], _factory(optimizer, device_type), made)
        found[shape, dtype] = ParamCost(
            param.nbytes,
            tuple(t.nbytes for t in made if t.shape == param.shape),
            tuple(t.nbytes for t in made if t.shape != param.shape),
            cost.moment,
            cost.traffic,
        )
    return [found[shard] for shard in shards]


def _run(
    shards: Sequence[tuple[tuple[int, ...], torch.dtype]],
    factory: OptimizerFactory,
    state: list[torch.Tensor] | None = None,
) -> OptimizerCost:
    """Two steps; ``state`` gets its tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in shards]
        meter = StorageMeter()
        for param in params:
            param.grad = torch.empty_like(param)
            meter.ignore(param)
            meter.ignore(param.grad)
        try:
            with meter:
                made = factory(params)
                made.step()
                meter.begin()
                made.step()
                second = meter.take()
        except _DataDependent as error:
            raise ValueError(
                f"The step of {type(made).__name__} depends on values, so its memory cannot be "
                "estimated without running it: pass optimizer=None and add its bytes yourself"
            ) from error
        tensors = [
            value
            for state in made.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        if state is not None:
            state += tensors
        if second is None:
            return NO_OPTIMIZER
        traffic = sum(operation.nbytes for operation in second.operations)
        sizes = tuple(t.nbytes for t in tensors)
        operations = tuple(second.operations)
        return OptimizerCost(sum(sizes), second.peak, traffic, sizes, (second.peak,), operations)


def _factory(optimizer: Any, device_type: str) -> OptimizerFactory:
    if isinstance(optimizer, str):
        if optimizer not in NAMED:
            known = ", ".join(f"'{name}'" for name in NAMED)
            hint = did_you_mean(optimizer, NAMED)
            raise ValueError(
                f"There is no optimizer {optimizer!r}: choose one of {known}, or pass a class{hint}"
            )
        optimizer = NAMED[optimizer]
    if isinstance(optimizer, type) and "lr" in inspect.signature(optimizer).parameters:
        kind = optimizer
        optimizer = lambda params: kind(params, lr=1e-3)  # noqa: E731
    if device_type == "cpu":
        return optimizer

    def together(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer(params)
        for group in made.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        return made

    return together
