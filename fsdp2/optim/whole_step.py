"""Steps of any optimizer on whole parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from .exchange import Exchange, Layout
from .parts import local_part, placed_like
from .stepping import replace_step
from .whole import BATCH_BYTES, WholeTask, run_whole

T = TypeVar("T", bound=Optimizer)


def whole_step(optimizer: T, *, batch_bytes: int = BATCH_BYTES) -> T:
    """Make ``optimizer.step()`` see whole parameters, gradients and state.

    For optimizers that are not elementwise (Adafactor, Muon, Shampoo, LAMB, ...), unchanged: each
    parameter is put together on one rank with its gradient and state, the optimizer steps there,
    and everything is dealt out again. The ranks share the parameters out by cost. The result is
    that of one process. Outside of the step everything stays as it was, DTensors; state of other
    shapes than the parameter's is sharded by its first dim.

    It moves the state both ways in each step; an optimizer that is written with `run_whole`, like
    `fsdp2.optim.Muon`, moves only what it needs whole. The first step computes twice, to learn
    from it what state there is.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: its class becomes a
            subclass of what it was. It must treat parameters one by one and remember what it needs
            in their state: numbers and tensors.
        batch_bytes: bytes of whole tensors that a rank handles at a time; see `run_whole`.

    Returns:
        The same optimizer.

    Raises:
        ValueError: its ``step`` was replaced already.
        TypeError: in a step, of state that is neither a tensor nor a number.
        RuntimeError: in a step, of a parameter whose state changes its keys or shapes.

    Example:
        >>> optimizer = fsdp2.optim.whole_step(torch.optim.Adafactor(model.parameters()))
        >>> optimizer.step()
    """
    replace_step(optimizer, "Whole", _run)
    vars(optimizer)["_whole_view"] = WholeView(batch_bytes)
    return optimizer


def _run(
    optimizer: Any,
    raw: Callable[..., Any],
    closure: Callable[[], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    view = vars(optimizer).setdefault("_whole_view", WholeView(BATCH_BYTES))
    view.step(optimizer, lambda: raw(optimizer, *((None, *args) if args else ()), **kwargs))
    return loss


@dataclass(frozen=True)
class Entry:
    """One value of a parameter's state.

    Attributes:
        shape, dtype: of the whole tensor; a number is a 0-dim float64 tensor on its way.
        kind: ``int``, ``float`` or ``bool`` of a number.
        on_host: the tensor is on the CPU wherever the parameter is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type | None = None
    on_host: bool = False

    @staticmethod
    def of(value: Any, name: str) -> Entry:
        if isinstance(value, Tensor):
            on_host = value.ndim == 0 and value.device.type == "cpu"
            return Entry(tuple(value.shape), value.dtype, None, on_host)
        if type(value) in (int, float, bool):
            return Entry((), torch.float64, type(value))
        raise TypeError(
            f"whole_step moves state between ranks, and can move tensors and numbers; '{name}' is "
            f"of type {type(value).__name__}"
        )

    def layout(self, param: Layout) -> Layout:
        """As the parameter where the shape is its own, else sharded by the first dim."""
        if self.shape == param.shape:
            return Layout(param.mesh, param.placements, self.shape, self.dtype)
        placements: list[Placement] = [Replicate() for _ in param.placements]
        cuts = [d for d, p in enumerate(param.placements) if not isinstance(p, Replicate)]
        if self.shape and cuts:
            placements[cuts[0]] = Shard(0)
        return Layout(param.mesh, tuple(placements), self.shape, self.dtype)

    def pack(self, value: Any) -> Tensor:
        """A tensor to be sent."""
        if isinstance(value, Tensor):
            return local_part(value)
        return torch.tensor(value, dtype=self.dtype)

    def unpack(self, part: Tensor) -> Any:
        """What the optimizer keeps: the reverse of `pack`."""
        if self.kind is not None:
            return self.kind(part.item())
        return part.cpu() if self.on_host else part


Structure = dict[Any, Entry]


class WholeView:
    """Runs an optimizer on whole parameters."""

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._structures: dict[int, Structure] = {}  # by the parameter's id

    def step(self, optimizer: Optimizer, raw: Callable[[], Any]) -> None:
        """One step; ``raw`` is the optimizer's own."""
        pairs = [
            (param, group)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for param, _ in pairs:
            state = optimizer.state.get(param)
            if state:
                self._structures[id(param)] = {k: Entry.of(v, str(k)) for k, v in state.items()}
        unknown = [pair for pair in pairs if id(pair[0]) not in self._structures]
        if unknown:
            self._learn(optimizer, raw, unknown)
        tasks = [self._task(optimizer, raw, param, group) for param, group in pairs]
        run_whole(tasks, batch_bytes=self.batch_bytes)

    def _learn(
        self,
        optimizer: Optimizer,
        raw: Callable[[], Any],
        pairs: Sequence[tuple[Tensor, dict[str, Any]]],
    ) -> None:
        """Find out what state the optimizer makes: owners try it, and tell the others."""
        found: dict[int, Structure] = {}  # by position

        def task(i: int, param: Tensor, group: dict[str, Any]) -> WholeTask:
            layout = Layout.of(param)

            def compute(whole: Tensor, grad: Tensor) -> list[Tensor]:
                with shown(optimizer, param, group, whole, grad, {}) as (plain, state):
                    raw()
                    made = state.get(plain, {})
                    found[i] = {key: Entry.of(value, str(key)) for key, value in made.items()}
                return []

            return WholeTask([layout, layout], [], lambda: read(param), compute, lambda: None)

        run_whole([task(i, *pair) for i, pair in enumerate(pairs)], batch_bytes=self.batch_bytes)
        meshes = dict.fromkeys(Layout.of(param).mesh for param, _ in pairs)
        for mesh in meshes:
            for dim in () if mesh is None else Exchange(mesh).dims:
                several: list[Any] = [None] * mesh.size(dim)  # type: ignore[union-attr]
                dist.all_gather_object(several, found, mesh.get_group(dim))  # type: ignore[union-attr]
                found = {i: structure for each in several for i, structure in each.items()}
        for i, (param, _) in enumerate(pairs):
            self._structures[id(param)] = found[i]

    def _task(
        self,
        optimizer: Optimizer,
        raw: Callable[[], Any],
        param: Tensor,
        group: dict[str, Any],
    ) -> WholeTask:
        layout, structure = Layout.of(param), self._structures[id(param)]
        state = optimizer.state.get(param) or {}
        # Only what exists is sent to the owner; what is made there is dealt out.
        there = {key: structure[key] for key in state}
        inputs = [entry.layout(layout) for entry in there.values()]
        outputs = [entry.layout(layout) for entry in structure.values()]

        def read_all() -> list[Tensor]:
            for key, to in zip(there, inputs, strict=True):
                if to.mesh is not None and isinstance(state[key], Tensor) and to.shape:
                    state[key] = placed_like(state[key], to.wrap(local_part(state[key])))
            return [*read(param), *(entry.pack(state[key]) for key, entry in there.items())]

        def compute(whole: Tensor, grad: Tensor, *values: Tensor) -> list[Tensor]:
            given = {
                key: entry.unpack(value)
                for (key, entry), value in zip(there.items(), values, strict=True)
            }
            with shown(optimizer, param, group, whole, grad, given) as (plain, inner):
                raw()
                made = inner.get(plain, {})
            now = {key: Entry.of(value, str(key)) for key, value in made.items()}
            if {k: e.shape for k, e in now.items()} != {k: e.shape for k, e in structure.items()}:
                raise RuntimeError(
                    f"{type(optimizer).__name__} changed the keys or shapes of a parameter's state "
                    f"from {structure} to {now}, which whole_step cannot follow"
                )
            return [plain.detach(), *(entry.pack(made[k]) for k, entry in structure.items())]

        def write(part: Tensor, *values: Tensor) -> None:
            local_part(param.detach()).copy_(part)
            for (key, entry), to, value in zip(structure.items(), outputs, values, strict=True):
                keep(optimizer.state[param], key, entry, to, value)

        return WholeTask([layout, layout, *inputs], [layout, *outputs], read_all, compute, write)


def read(param: Tensor) -> list[Tensor]:
    """This rank's parts of a parameter and of its gradient."""
    assert param.grad is not None
    # Copies where there is one rank: the owner's optimizer must not write into the parameter.
    return [local_part(param.detach()).clone(), local_part(placed_like(param.grad, param))]


def keep(state: dict[Any, Any], key: Any, entry: Entry, to: Layout, part: Tensor) -> None:
    """Put a result into a state, in place where it is there already."""
    old = state.get(key)
    if isinstance(old, Tensor):
        local_part(old).copy_(part)
    elif to.shape and to.mesh is not None:
        state[key] = to.wrap(part.clone())
    else:
        state[key] = entry.unpack(part.clone())


@contextmanager
def shown(
    optimizer: Optimizer,
    param: Tensor,
    group: dict[str, Any],
    whole: Tensor,
    grad: Tensor,
    state: dict[Any, Any],
) -> Iterator[tuple[Tensor, dict[Tensor, Any]]]:
    """Let the optimizer have one whole parameter only, for a while."""
    plain = nn.Parameter(whole, requires_grad=param.requires_grad)
    plain.grad = grad
    inner: defaultdict[Tensor, Any] = defaultdict(dict)
    if state:
        inner[plain] = state
    groups, outer = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [{**group, "params": [plain]}]
    optimizer.state = inner
    try:
        yield plain, inner
    finally:
        optimizer.param_groups, optimizer.state = groups, outer
