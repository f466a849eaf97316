"""The step of an optimizer: its cost, and the place of its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as _DataDependent
from torch._subclasses.fake_tensor import FakeTensorMode

from ...common.checks import check_bytes
from ...common.suggestions import did_you_mean
from ...offload.homes import PAGE_BYTES, whole_pages
from ...offload.paging import ALIGN_BYTES, chunks_of
from .account import Account, HeldBytes
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
        moments: the part of ``moment`` for each parameter.
        operations: the operations of a step.
    """

    state: int
    moment: int
    traffic: int
    tensors: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class ParamCost:
    """The optimizer's cost of one parameter on a rank.

    Attributes:
        nbytes: bytes of the parameter.
        state: bytes of each tensor of its state that has a value for each element.
        numbers: bytes of each other tensor of its state.
        moment, traffic: as in `OptimizerCost`.
        on_host: whether it is in host memory although there is a device.
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
        known: a cache of costs of single shards, for calls with the same optimizer and device.

    Raises:
        ValueError: for an unknown name, or an optimizer whose step depends on values.
    """
    if optimizer is None or not shards:
        return NO_OPTIMIZER
    factory = _factory(optimizer, device_type)
    if device_type != "cpu":
        # The total cost is the sum of the costs of all shards, so every shape is tried only once.
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
    """The cost of each shard as if the optimizer had no other; arguments as above."""
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
    """Run two steps; the tensors of the state are added to ``state``."""
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


IN_HOST_MEMORY, IN_FILES = "cpu", "files"


@dataclass(frozen=True)
class StateOffload:
    """The arguments of an `fsdp2.offload_optimizer`, for `estimate`, `predict` and `plan`.

    Attributes:
        to: "cpu" (host memory) or "files" (in any folder).
        max_device_bytes, chunk_bytes, min_bytes: as in `fsdp2.offload_optimizer`.

    Raises:
        ValueError: if ``to`` is something else, or a number is negative.
        TypeError: if a number is not an int.

    Example:
        >>> from fsdp2.planning import StateOffload
        >>> StateOffload(max_device_bytes=2 << 30).to
        'cpu'
    """

    to: str = IN_HOST_MEMORY
    max_device_bytes: int = 0
    chunk_bytes: int = 256 << 20
    min_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        if self.to not in (IN_HOST_MEMORY, IN_FILES):
            raise ValueError(
                f"StateOffload: to must be '{IN_HOST_MEMORY}' or '{IN_FILES}' (in any folder), got "
                f"{self.to!r}"
            )
        for name in ("max_device_bytes", "chunk_bytes", "min_bytes"):
            check_bytes(name, getattr(self, name))


class PagedPart(NamedTuple):
    """A group of parameters that are stepped together.

    Attributes:
        away: bytes of its state that are offloaded between steps.
        image: bytes of this state in device memory during its step.
        buffer: bytes of host memory for its transfer from and to files.
        traffic: bytes that its step reads and writes.
        moment: scratch bytes of its step.
    """

    away: int
    image: int
    buffer: int
    traffic: int
    moment: int


@dataclass(frozen=True)
class PagedState:
    """The state of a partly offloaded optimizer, on one rank.

    Attributes:
        kept: bytes of each tensor that stays on the device.
        host_kept: bytes of each tensor that stays in host memory, because its parameter is there.
        parts: the parts of a step, in order.
        in_files: whether offloaded state is in files.
    """

    kept: tuple[int, ...]
    host_kept: tuple[int, ...]
    parts: tuple[PagedPart, ...]
    in_files: bool = False

    @property
    def away(self) -> int:
        """Bytes that are offloaded between steps."""
        return sum(part.away for part in self.parts)

    @property
    def back_peak(self) -> int:
        """The peak of offloaded bytes that are on the device at once."""
        sizes = [part.away for part in self.parts]
        return max((sum(sizes[max(i - 1, 0) : i + 2]) for i in range(len(sizes))), default=0)

    @property
    def buffer_peak(self) -> int:
        """The peak of buffers in host memory: reads are one more part ahead."""
        sizes = [part.buffer for part in self.parts]
        return max((sum(sizes[max(i - 1, 0) : i + 3]) for i in range(len(sizes))), default=0)


@dataclass(frozen=True)
class PlacedOptimizer:
    """The optimizer of one rank, and where its state is.

    Attributes:
        device: its cost for the parameters on the device; on the CPU, for all parameters.
        host: its cost for parameters in host memory, if there is a device.
        paged: the state under `offload_optimizer`, for both; None: it is not used.
    """

    device: OptimizerCost
    host: OptimizerCost = NO_OPTIMIZER
    paged: PagedState | None = None

    @property
    def device_tensors(self) -> tuple[int, ...]:
        """Bytes of each tensor of the state that stays on the device between steps."""
        return self.device.tensors if self.paged is None else self.paged.kept

    @property
    def host_state(self) -> int:
        """Bytes of the state in host memory between steps."""
        if self.paged is None:
            return self.host.state
        return sum(self.paged.host_kept) + (0 if self.paged.in_files else self.paged.away)

    def count_away(self, account: Account, *, offloaded: bool) -> None:
        """Count the state in host memory and in files, and the buffers for files."""
        if offloaded or self.host_state:
            account.host["optimizer state"] = self.host_state
        if self.paged is not None and self.paged.in_files and self.paged.away:
            account.host["optimizer state in files"] = self.paged.away
        if self.paged is not None and self.paged.buffer_peak:
            account.host["buffers of files"] = self.paged.buffer_peak

    def make_state(self, account: Account) -> None:
        """Allocate the state that the first step creates."""
        for nbytes in self.device_tensors:
            account.allocate(nbytes)

    def step(self, account: Account, *, ordered: bool) -> None:
        """The memory of a step; ``ordered``: the device is the CPU."""
        if self.paged is None:
            account.touch("optimizer scratch", self.device.moment, allocates=False)
            for block in [account.allocate(nbytes) for nbytes in self.device.moments]:
                account.free(block)
        else:
            # On the CPU, the step works on the buffers that files are read into.
            _step_parts(account, self.paged, 2 if ordered else 1)


def _step_parts(account: Account, paged: PagedState, ahead: int) -> None:
    """The images and the scratch memory of a step in parts, as in `offload_optimizer`.

    Args:
        ahead: number of parts whose images are present in advance.
    """
    images: dict[int, HeldBytes] = {}
    for number, part in enumerate(paged.parts):
        for each in range(number, number + ahead + 1):
            if each < len(paged.parts) and each not in images:
                images[each] = HeldBytes(account, "optimizer state", paged.parts[each].image)
        account.touch("optimizer scratch", part.moment)
        images.pop(number - 1, None)


def sum_of_placed(optimizers: Sequence[PlacedOptimizer]) -> PlacedOptimizer:
    """One optimizer for the parameters of several models, none of it paged."""
    assert all(each.paged is None for each in optimizers)
    return PlacedOptimizer(
        sum_of([each.device for each in optimizers]), sum_of([each.host for each in optimizers])
    )


NOTHING = PlacedOptimizer(NO_OPTIMIZER)


class _Page(NamedTuple):
    cost: ParamCost
    nbytes: int  # as `Page.nbytes`
    away: int


def paged_state(params: Sequence[ParamCost], offload: StateOffload, *, is_cpu: bool) -> PagedState:
    """Divide the state of an optimizer into parts.

    Args:
        params: of this rank, in the order of the optimizer.
        is_cpu: whether the device is the CPU: its memory is host memory.
    """
    in_files = offload.to == IN_FILES
    pages: list[_Page] = []
    kept: dict[bool, list[int]] = {False: [], True: []}
    stays = 0  # as `StateBytes.kept`
    for param in params:
        large = [n for n in param.state if n >= offload.min_bytes]
        here = kept[param.on_host]
        here += [*(n for n in param.state if n < offload.min_bytes), *param.numbers]
        end = sum(-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in large)
        if (
            not end
            or ((param.on_host or is_cpu) and not in_files)
            or stays + end <= offload.max_device_bytes
        ):
            stays += end
            here += large
            pages.append(_Page(param, end or 2 * param.nbytes, 0))
        else:
            pages.append(_Page(param, end, end))
    parts = [_part(chunk, in_files, is_cpu) for chunk in chunks_of(pages, offload.chunk_bytes)]
    return PagedState(tuple(kept[False]), tuple(kept[True]), tuple(parts), in_files)


def _part(pages: Sequence[_Page], in_files: bool, is_cpu: bool) -> PagedPart:
    buffers = sum(whole_pages(p.away) + PAGE_BYTES for p in pages if p.away) if in_files else 0
    moments = [page.cost.moment for page in pages]
    return PagedPart(
        sum(page.away for page in pages),
        buffers if is_cpu else sum(p.away for p in pages if not p.cost.on_host),
        0 if is_cpu else buffers,
        sum(page.cost.traffic for page in pages),
        max(moments, default=0) if is_cpu else sum(moments),
    )
