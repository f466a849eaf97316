"""Steps any optimizer on whole parameters.

The optimizer's own step runs on each parameter alone, on one rank. It may write into the
parameter's group and into the optimizer itself, for example a counter. These writes are undone
before the next parameter's step, so that each parameter sees what it would see if all were stepped
at once. At the end they are carried over to all ranks. `probe` tests on small parameters that the
result is the same as if all were stepped at once.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from ..common.failures import explained
from ..dtensor.parts import local_part, placed_like
from ..dtensor.subclasses import is_subclass
from .exchange import Layout, OwnerExchange
from .probe import Trial, random_state, why_not_separable
from .stepping import (
    KEPT,
    check_optimizer,
    isolated,
    original_name,
    own_attributes,
    raw_step,
    replace_step,
)
from .values import (
    NUMBERS,
    Branch,
    Structure,
    Taken,
    TensorLeaf,
    as_subclasses,
    copied,
    map_tensors,
    num_numbers,
    put_together,
    same,
    take_apart,
    tensor_leaves,
)
from .whole import BATCH_BYTES, matrix_cost, run_batch, spread

T = TypeVar("T", bound=Optimizer)


def whole_step(optimizer: T, *, batch_bytes: int = BATCH_BYTES, separable: bool = False) -> T:
    """Make ``optimizer.step()`` see whole parameters, gradients and state.

    Use it for unmodified optimizers that are not elementwise (Adafactor, Muon, Shampoo, LAMB, ...).
    Each parameter is assembled on one rank with its gradient and state, the optimizer steps there,
    and everything is scattered again. Parameters are distributed over ranks by cost. The result is
    the same as on one process, including values in the groups, such as counters. Outside the step
    everything remains DTensors; state whose shape differs from the parameter's is sharded on its
    first dim.

    Each step moves the state both ways. An optimizer that is written with `run_whole`, like
    `fsdp2.optim.Muon`, moves only the tensors that it needs whole.

    Parameters are stepped one by one. So an optimizer is rejected if its step of one parameter
    depends on others: by a norm over all gradients (timm's Lamb by default), or a learning rate
    estimated from all parameters (Prodigy). This is tested on small parameters before anything is
    changed, and again when the options change. docs/optimizers.md lists the optimizers of several
    libraries.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: it becomes an
            instance of a subclass of its class. It must keep all of its state in the parameters'
            state and in its groups, as tensors, numbers, strings, and containers of these. Between
            steps, a tensor subclass in the state (quantized) is a dict of its inner tensors.
        batch_bytes: bytes of whole tensors that a rank handles at a time; see `run_whole`.
        separable: True asserts that it steps each parameter independently and skips the test;
            random numbers are then drawn on the rank that steps the parameter.

    Returns:
        The same optimizer.

    Raises:
        ValueError: if its ``step`` has already been replaced.
        TypeError: if it wraps another optimizer, requires a closure, or does not step each
            parameter independently (raised in a step if it only shows there). In a step, also if
            the state or a class of parameters (torchao's int8 weights) cannot be moved.
        RuntimeError: in a step, on all ranks, if the step of a parameter failed on its rank or
            called the closure more than once.

    Example:
        >>> optimizer = fsdp2.optim.whole_step(torch.optim.Adafactor(model.parameters()))
        >>> optimizer.step()
    """
    check_optimizer(optimizer, "whole_step")
    options = StepOptions(batch_bytes, None if separable else _Separable())
    if options.trial is not None:
        options.trial.check(optimizer, raw_step(type(optimizer)), False, in_step=False)
    replace_step(optimizer, "Whole", _run, "whole_step")
    vars(optimizer)[KEPT] = options
    return optimizer


_AGREEING = "agreeing on the results of an optimizer (whole_step)"
_ADVICE = (
    "whole_step steps parameters one by one, so the result would not be the same as on one "
    "process. If an option is the cause (a norm over all gradients: max_grad_norm, grad_norm), "
    "leave it out and clip with fsdp2.clip_grad_norm_; docs/optimizers.md names others. If it does "
    "step each parameter on its own, pass separable=True"
)


class _Separable(Trial):
    """Also records which values the parameters of a group write differently into it."""

    varying: frozenset[tuple[int, str]] = frozenset()

    def __init__(self) -> None:
        super().__init__("one that steps each parameter on its own", _ADVICE, self._try)

    def _try(self, optimizer: Optimizer, raw: Callable[..., Any], closure: bool) -> str | None:
        reason, self.varying = why_not_separable(optimizer, raw, closure)
        return reason


@dataclass
class StepOptions:
    batch_bytes: int
    trial: _Separable | None


def _run(
    optimizer: Any,
    raw: Callable[..., Any],
    closure: Callable[[], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    options: StepOptions = vars(optimizer)[KEPT]
    if options.trial is not None:
        options.trial.check(optimizer, raw, closure is not None)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()

    def step() -> None:
        given = args
        if closure is not None or args:
            given = (None if closure is None else _Loss(loss, original_name(optimizer)), *args)
        raw(optimizer, *given, **kwargs)

    with torch.no_grad():
        WholeStep(optimizer, options, step).run()
    return loss


class _Loss:
    """The closure that a parameter's step gets: returns the loss, which is computed already."""

    def __init__(self, loss: Any, who: str) -> None:
        self._loss, self.who, self._called = loss, who, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._called:
            raise RuntimeError(
                f"{self.who} calls its closure more than once in a step, while it moves all "
                "parameters; whole_step moves one at a time and cannot run that"
            )
        self._called = True
        return self._loss


_movable: set[type] = set()  # classes whose parts an exchange can send


def _check_movable(param: Tensor, who: str) -> None:
    """Check that parts of a parameter can be sent as numbers; on all ranks alike.

    Raises:
        TypeError: if its class does not let them.
    """
    own = local_part(param.detach())
    if type(own) in _movable:
        return
    grad = local_part(placed_like(cast(Tensor, param.grad), param))
    try:
        torch.cat([part.reshape(-1) for part in (own, grad) if part.dtype == own.dtype])
    except Exception as error:  # the class is somebody else's
        raise TypeError(
            f"whole_step cannot move a parameter of class {type(own).__name__}, of shape "
            f"{tuple(param.shape)}, as numbers ({type(error).__name__}: {error}): step {who} on "
            "shards, as it is or with local_step, if it is elementwise"
        ) from error
    _movable.add(type(own))


Values = dict[str, Any]


@dataclass
class Job:
    """The step of one parameter, in the form of a `WholeTask`.

    Attributes:
        step: the `WholeStep` that it is part of.
        param: the parameter, with a gradient.
        group: the index of its group.
        state: what the optimizer remembers of it; empty before the first step.
        layout: layout of the parameter.
        structure: structure of state, of what is written into the group, and of attributes, which
            all ranks have.
        kept: the tensors and numbers of the state on this rank.
        found: on the owner, the resulting structure, or the error.
        result: the result of the step, on all ranks.
    """

    step: WholeStep
    param: Tensor
    group: int
    state: dict[Any, Any]
    layout: Layout
    structure: Structure
    kept: Taken
    found: Structure | Exception | None = None
    result: Values = field(default_factory=dict)

    @property
    def mesh(self) -> DeviceMesh | None:
        return self.layout.mesh

    @property
    def work(self) -> float:
        return matrix_cost(self.layout.shape)

    @property
    def nbytes(self) -> int:
        return 2 * sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in self.inputs)

    @property
    def inputs(self) -> list[Layout]:
        """Layouts of the parameter, its gradient, and the tensors of the state."""
        assert self.param.grad is not None
        dtype = self.param.grad.dtype
        grad = Layout(self.mesh, self.layout.placements, self.layout.shape, dtype)
        return [self.layout, grad, *(self._layout_now(tensor) for tensor in self.kept.tensors)]

    @property
    def outputs(self) -> list[Layout]:
        """Layouts of the parameter, of all tensors of the result, and of its numbers."""
        numbers = self._whole((num_numbers(self.structure),), torch.float64)
        return [self.layout, *self.leaf_layouts(), numbers]

    def leaf_layouts(self) -> list[Layout]:
        """Layouts of the tensors of the result: state is sharded, values in groups are not."""
        state, *written = self.structure.items  # type: ignore[union-attr]
        whole = [leaf for part in written for leaf in tensor_leaves(part)]
        return [
            *(self._layout_of(leaf) for leaf in tensor_leaves(state)),
            *(self._whole(leaf.shape, leaf.dtype) for leaf in whole),
        ]

    def _layout_of(self, leaf: TensorLeaf) -> Layout:
        """As the parameter's if the shape is the same, else sharded on the first dim."""
        if leaf.shape == self.layout.shape:
            return Layout(self.mesh, self.layout.placements, leaf.shape, leaf.dtype)
        whole = self._whole(leaf.shape, leaf.dtype)
        cuts = [d for d, p in enumerate(self.layout.placements) if not isinstance(p, Replicate)]
        if not leaf.shape or not cuts:
            return whole
        placements = list(whole.placements)
        placements[cuts[0]] = Shard(0)
        return Layout(self.mesh, tuple(placements), leaf.shape, leaf.dtype)

    def _layout_now(self, tensor: Tensor) -> Layout:
        if isinstance(tensor, DTensor):
            return Layout.of(tensor)
        return self._whole(tuple(tensor.shape), tensor.dtype)

    def _whole(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        placements: tuple[Placement, ...] = tuple(Replicate() for _ in self.layout.placements)
        return Layout(self.mesh, placements, shape, dtype)

    def read(self) -> list[Tensor]:
        """This rank's parts of the parameter, its gradient and its state."""
        grad = self.param.grad
        assert grad is not None
        # A copy, because with one rank nothing is sent: the step must not write into the parameter.
        own = local_part(self.param.detach()).clone()
        state = [local_part(tensor) for tensor in self.kept.tensors]
        return [own, local_part(placed_like(grad, self.param)), *state]

    def compute(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs; none after an error, which `WholeStep` reports to all ranks."""
        try:
            result = self.step.compute(self, *inputs)
            taken = Taken()
            self.found = take_apart(result["values"], taken, self.step.who)
        except Exception as error:
            self.found = error
            return []
        numbers = torch.tensor(taken.numbers, dtype=torch.float64, device=inputs[0].device)
        return [result["param"], *map(local_part, taken.tensors), numbers]

    def write(self, param: Tensor, *others: Tensor) -> None:
        """Apply a result: the parameter and its state now, the rest when all jobs are done."""
        *parts, numbers = others
        local_part(self.param.detach()).copy_(param)
        placed: list[Tensor] = []
        leaves = tensor_leaves(self.structure)
        for leaf, layout, part in zip(leaves, self.leaf_layouts(), parts, strict=True):
            own = part.cpu() if leaf.on_host else part.clone()
            placed.append(layout.wrap(own) if leaf.shape else own)
        self.result = put_together(self.structure, iter(placed), iter(numbers.tolist()))
        self.step.update(self, self.result["state"])


class WholeStep:
    """One step of an optimizer on whole parameters."""

    def __init__(
        self, optimizer: Optimizer, options: StepOptions, step: Callable[[], None]
    ) -> None:
        self._optimizer, self._options, self._step = optimizer, options, step
        self.who = original_name(optimizer)
        # The structure of what the last step wrote into each group; this step is expected to write
        # the same keys.
        self._written: dict[int, Structure] = vars(optimizer).setdefault("_fsdp2_written", {})

    def run(self) -> None:
        """
        Raises:
            RuntimeError, TypeError: as for `whole_step`.
        """
        groups = self._optimizer.param_groups
        jobs = [
            self._job(param, i)
            for i, group in enumerate(groups)
            for param in group["params"]
            if param.grad is not None
        ]
        by_mesh: dict[DeviceMesh | None, list[Job]] = {}
        for job in jobs:
            by_mesh.setdefault(job.mesh, []).append(job)
        for job in by_mesh.pop(None, []):  # every rank has it whole
            results = job.compute(*job.read())
            if isinstance(job.found, Exception):
                raise job.found
            job.structure = job.found  # type: ignore[assignment]
            job.write(*results)
        for mesh, several in by_mesh.items():
            exchange = OwnerExchange(mesh)  # type: ignore[arg-type]
            for batch in spread(several, mesh, self._options.batch_bytes):  # type: ignore[arg-type]
                agree = functools.partial(self._agree, exchange, [job for job, _ in batch])
                run_batch(exchange, batch, agree)
        self._step_groups_without_gradients({job.group for job in jobs}, bool(jobs))
        self._carry_over(jobs)

    def _job(self, param: Tensor, group: int) -> Job:
        layout = Layout.of(param)
        if layout.mesh is not None and is_subclass(param):
            _check_movable(param, self.who)
        state = self._optimizer.state.get(param) or {}
        kept = Taken()
        known = take_apart(state, kept, self.who)
        for i, tensor in enumerate(kept.tensors):
            if isinstance(tensor, DTensor) and tensor.device_mesh != layout.mesh:
                raise TypeError(
                    f"The state of {self.who} is on a different mesh than its parameter"
                )
            if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
                kept.tensors[i] = tensor.redistribute(
                    placements=[Replicate()] * len(layout.placements)
                )
        written = self._written.get(group, Branch(dict, (), ()))
        return Job(self, param, group, state, layout, _joined(known, written), kept)

    # -- one parameter ----------------------------------------------------------------------

    def compute(self, job: Job, whole: Tensor, grad: Tensor, *tensors: Tensor) -> Values:
        """The step of a whole parameter: its new state, and what was written elsewhere."""
        state_structure = job.structure.items[0]  # type: ignore[union-attr]
        leaves = tensor_leaves(state_structure)
        given = (
            tensor.cpu() if leaf.on_host else tensor
            for leaf, tensor in zip(leaves, tensors, strict=True)
        )
        state = as_subclasses(put_together(state_structure, given, iter(job.kept.numbers)))
        plain = nn.Parameter(whole, requires_grad=job.param.requires_grad)
        plain.grad = grad
        inner: defaultdict[Tensor, Any] = defaultdict(dict)
        if state:
            inner[plain] = state
        optimizer = self._optimizer
        options = {
            k: copied(v)
            for k, v in optimizer.param_groups[job.group].items()
            if k not in ("params", "param_names")
        }
        group = {key: copied(value) for key, value in options.items()}
        attributes = own_attributes(optimizer)
        with isolated(optimizer, [{**group, "params": [plain]}], inner, copy=False):
            generators = random_state(whole.device) if self._options.trial is not None else None
            self._step()
            if generators is not None and random_state(whole.device) != generators:
                raise RuntimeError(
                    f"{self.who} drew random numbers, and one process would draw different ones. "
                    "If that is all right, pass separable=True to whole_step"
                )
            written = _changes(optimizer.param_groups[0], options, self.who)
            own = {
                name: value
                for name, value in own_attributes(optimizer).items()
                if type(value) in NUMBERS and not same(value, attributes.get(name))
            }
        return {
            "param": plain.detach(),
            "values": {"state": dict(inner.get(plain, {})), "group": written, "self": own},
        }

    def _agree(self, exchange: OwnerExchange, jobs: Sequence[Job]) -> None:
        """Tell all ranks about failures, and about results whose structure was not expected.

        Usually one number is reduced. Objects are sent only if something has changed: in the first
        step, and when an optimizer starts or stops remembering something.
        """
        changed: dict[int, Structure | str] = {}
        for i, job in enumerate(jobs):
            if isinstance(job.found, Exception):
                changed[i] = f"{type(job.found).__name__}: {job.found}"
            elif job.found is not None and job.found != job.structure:
                changed[i] = job.found
        flag = torch.tensor(int(bool(changed)), device=exchange.device)
        for dim in exchange.dims:
            group = exchange.mesh.get_group(dim)
            with explained(_AGREEING, group):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        if not flag.item():
            return
        for dim in exchange.dims:
            several: list[Any] = [None] * exchange.mesh.size(dim)
            group = exchange.mesh.get_group(dim)
            with explained(_AGREEING, group):
                dist.all_gather_object(several, changed, group)
            changed = {i: structure for each in several for i, structure in each.items()}
        for job in jobs:
            if isinstance(job.found, Exception):
                raise job.found
        for i, structure in changed.items():
            if isinstance(structure, str):
                raise RuntimeError(
                    f"The step of {self.who} failed for a parameter of shape "
                    f"{jobs[i].layout.shape} on the rank that owns it: {structure}"
                )
            jobs[i].structure = structure

    def update(self, job: Job, new: dict[Any, Any]) -> None:
        """Write new values into the state, in place if it already has a tensor that fits."""
        if not new and not job.state:
            return
        state = self._optimizer.state[job.param]
        for key in state.keys() - new.keys():
            del state[key]
        for key, value in new.items():
            old = state.get(key)
            if isinstance(old, Tensor) and _alike(old, value):
                local_part(old).copy_(local_part(value))
            else:
                state[key] = value

    # -- groups -----------------------------------------------------------------------------

    def _step_groups_without_gradients(self, stepped: set[int], any_gradient: bool) -> None:
        """Step groups without gradients as well: optimizers count their steps."""
        optimizer = self._optimizer
        groups = [g for i, g in enumerate(optimizer.param_groups) if i not in stepped]
        if not groups:
            return
        if any_gradient:
            with isolated(optimizer, groups, optimizer.state, copy=False):
                self._step()
        else:
            self._step()

    def _carry_over(self, jobs: Sequence[Job]) -> None:
        """Write into groups and optimizer what a step in one process would leave there."""
        trial = self._options.trial
        last: dict[int, Job] = {}
        for job in jobs:
            earlier = last.get(job.group)
            if earlier is not None and trial is not None:
                self._check_agreement(job, earlier, trial.varying)
            last[job.group] = job
            parts = job.structure.items[1:]  # type: ignore[union-attr]
            self._written[job.group] = Branch(dict, ("group", "self"), parts)
        for i, job in last.items():
            group = self._optimizer.param_groups[i]
            for key, value in map_tensors(job.result["group"], local_part).items():
                old = group.get(key)
                if isinstance(old, Tensor) and _alike(old, value):
                    old.copy_(value)
                else:
                    group[key] = value
            vars(self._optimizer).update(job.result["self"])

    def _check_agreement(self, job: Job, other: Job, varying: frozenset[tuple[int, str]]) -> None:
        mine, theirs = job.result["group"], other.result["group"]
        for key in mine.keys() | theirs.keys():
            if not same(mine.get(key), theirs.get(key)) and (job.group, key) not in varying:
                raise RuntimeError(
                    f"{self.who} wrote different '{key}' into a group for two of its parameters "
                    f"({theirs.get(key)} and {mine.get(key)}), so its steps depend on each other. "
                    f"{_ADVICE}"
                )


def _joined(state: Structure, written: Structure) -> Structure:
    """The expected structure of a result: the same state, and the writes of the last step."""
    nothing = Branch(dict, (), ())
    parts = written.items if isinstance(written, Branch) and written.items else (nothing, nothing)
    return Branch(dict, ("state", "group", "self"), (state, *parts))


def _alike(old: Tensor, new: Any) -> bool:
    """Whether a value can be copied into an existing tensor, to which others may refer."""
    if not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return False
    if isinstance(old, DTensor) != isinstance(new, DTensor):
        return False
    return not isinstance(old, DTensor) or old.placements == new.placements  # type: ignore[attr-defined]


def _changes(now: Values, before: Values, who: str) -> Values:
    """What a step wrote into a group."""
    gone = before.keys() - now.keys()
    if gone:
        raise RuntimeError(
            f"{who} removed {', '.join(map(repr, sorted(gone)))} from its groups, which whole_step "
            "cannot follow"
        )
    return {
        key: value
        for key, value in now.items()
        if key != "params" and not (key in before and same(value, before[key]))
    }
