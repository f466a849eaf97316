"""Finds out by experiment whether an optimizer treats elements or parameters independently.

No attribute shows whether an optimizer treats every element, or every parameter, independently, and
it depends on the options. So the optimizer's own step runs on small parameters, with the groups'
options and gradients of very different sizes, in two ways: as one process would, and in parts. If
the results differ, the parts depend on each other. The optimizer itself is left unchanged.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dtensor.parts import local_part
from .stepping import isolated, original_name, own_attributes
from .values import copied, is_container, map_tensors, same

RawStep = Callable[..., Any]
Groups = list[dict[str, Any]]
# Factors of the gradients of each step: large ones trip clipping, small ones do not.
SCALES = (1.0, 0.01, 30.0, 1.0, 100.0, 0.3, 1e-3, 1.0)
# Options that count steps (something happens every so many, or after so many) are tried up to this.
MOST_STEPS = 100
# Shapes of probes by number of dims; the first dim has rows for several parts.
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((7,), (12,)),
    2: ((6, 5), (9, 4)),
    3: ((4, 3, 2), (5, 2, 3)),
    4: ((4, 3, 2, 2), (5, 2, 3, 3)),
}
# 8-bit optimizers treat parameters of 4,096 elements or more in blocks of 64 to 2,048 elements, if
# blocks divide them evenly: they do divide these, but not their shards.
LARGE: dict[int, tuple[int, ...]] = {1: (12288,), 2: (128, 96), 3: (128, 8, 12), 4: (128, 4, 4, 6)}
LARGE_FROM = 4096


class CannotTry(Exception):
    """The optimizer's step raised on the probes."""


@dataclass
class Probe:
    """A small parameter to try an optimizer on, and the real parameter that it stands for."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int
    real: Tensor  # the parameter that it stands for

    def value(self) -> Tensor:
        return self._draw(0) * self._rows()

    def grad(self, step: int) -> Tensor:
        return self._draw(step + 1) * self._rows().flip(0) * SCALES[step % len(SCALES)]

    def _draw(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        drawn = torch.randn(self.shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(self.device, self.dtype)

    def _rows(self) -> Tensor:
        """Factors that make rows, and so shards, different in size."""
        if not self.shape:
            return torch.ones(1, device=self.device, dtype=self.dtype)[0]
        factors = torch.logspace(-1, 1, self.shape[0], device=self.device, dtype=torch.float64)
        return factors.to(self.dtype).reshape(-1, *[1] * (len(self.shape) - 1))


@dataclass
class Run:
    """Parameters that an optimizer steps together, with its groups, state and attributes."""

    groups: Groups
    state: Any = field(default_factory=lambda: defaultdict(dict))
    attributes: dict[str, Any] = field(default_factory=dict)


def why_not_elementwise(optimizer: Optimizer, raw: RawStep, closure: bool) -> str | None:
    """Why stepping shards differs from stepping whole parameters; None if it does not.

    Raises:
        CannotTry: if a step raised.
    """
    probes = probes_of(optimizer)

    def compare(dtype: torch.dtype | None) -> str | None:
        return _compare_shards(optimizer, raw, [in_dtype(p, dtype) for p in probes], closure)

    return in_double(compare, probes, lambda: _draws(optimizer, raw, probes, closure))


def why_not_separable(
    optimizer: Optimizer, raw: RawStep, closure: bool
) -> tuple[str | None, frozenset[tuple[int, str]]]:
    """Why stepping one parameter at a time differs from stepping all at once; None if it does not.

    Returns:
        The reason, and the (group, key) pairs of values that the parameters of a group write
        differently into it: the last parameter's counts.

    Raises:
        CannotTry: if a step raised.
    """
    probes = probes_of(optimizer, vectors=False)
    varying: set[tuple[int, str]] = set()

    def compare(dtype: torch.dtype | None) -> str | None:
        chosen = [in_dtype(p, dtype) for p in probes]
        return _compare_separate(optimizer, raw, chosen, closure, varying)

    reason = in_double(compare, probes, lambda: _draws(optimizer, raw, probes, closure))
    return reason, frozenset(varying)


def in_double(
    compare: Callable[[torch.dtype | None], str | None],
    probes: Sequence[Probe],
    draws: Callable[[], str | None],
) -> str | None:
    """Compare in float64, where differences are not rounding; else in the parameters' dtypes."""
    with quietly():
        try:
            reason = compare(torch.float64)
        except CannotTry:
            if all(p.dtype == torch.float64 for p in probes):
                raise
            return compare(None)
        # Low precision may be rounded at random.
        low = any(p.dtype != torch.float64 for p in probes)
        return reason if reason is not None or not low else draws()


# -- two ways of stepping --------------------------------------------------------------------


def _compare_shards(
    optimizer: Optimizer, raw: RawStep, probes: Sequence[Probe], closure: bool
) -> str | None:
    """Compare whole probes with three ranks' parts; the last part has no rows."""
    wholes = [new_parameter(p.value()) for p in probes]
    pieces = [[new_parameter(t) for t in _parts(p.value())] for p in probes]
    ranks = list(zip(*pieces, strict=True))
    runs = [new_run(optimizer, probes, params) for params in (wholes, *ranks)]
    for step in range(num_steps(optimizer)):
        before = [p.detach().clone() for p in wholes]
        grads = [p.grad(step) for p in probes]
        for p, grad in zip(wholes, grads, strict=True):
            p.grad = grad.clone()
        for mine, grad in zip(pieces, grads, strict=True):
            for p, part in zip(mine, _parts(grad), strict=True):
                p.grad = part.clone()
        generators = random_state(*(p.device for p in probes))
        step_once(optimizer, raw, runs[0], closure)
        if random_state(*(p.device for p in probes)) != generators:
            return "draws random numbers"
        for run in runs[1:]:
            try:
                step_once(optimizer, raw, run, closure)
            except CannotTry as error:
                return f"cannot step on a part of a parameter ({error})"
        for whole, mine, old in zip(wholes, pieces, before, strict=True):
            if not is_close(torch.cat(list(mine)) if whole.ndim else mine[0], whole, old):
                return "changes an element differently when it sees only part of the parameter"
            reason = _compare_state(runs, whole, mine)
            if reason is not None:
                return reason
        for run in runs[1:]:
            if not same_options(run, runs[0]):
                return "writes group values that depend on which part of a parameter it sees"
    return None


def _compare_separate(
    optimizer: Optimizer,
    raw: RawStep,
    probes: Sequence[Probe],
    closure: bool,
    varying: set[tuple[int, str]],
) -> str | None:
    """Compare one step of all probes with separate steps that see what earlier ones wrote."""
    together = [new_parameter(p.value()) for p in probes]
    alone = [new_parameter(p.value()) for p in probes]
    idle = new_parameter(torch.ones_like(together[0]))
    joint = new_run(optimizer, probes, together)
    joint.groups[probes[0].group]["params"].append(idle)
    shared = Run([{k: copied(v) for k, v in g.items() if k != "params"} for g in joint.groups])
    states: list[Any] = [
        new_run(optimizer, [p], [q]).state for p, q in zip(probes, alone, strict=True)
    ]
    for step in range(num_steps(optimizer)):
        before = [p.detach().clone() for p in together]
        for p, q, probe in zip(together, alone, probes, strict=True):
            p.grad, q.grad = probe.grad(step), probe.grad(step)
        generators = random_state(*(p.device for p in probes))
        step_once(optimizer, raw, joint, closure)
        if random_state(*(p.device for p in probes)) != generators:
            return "draws random numbers"
        if not torch.equal(idle, torch.ones_like(idle)):
            return "changes parameters that have no gradient"
        written: dict[int, dict[str, Any]] = {}
        attributes = shared.attributes
        for probe, q, state in zip(probes, alone, states, strict=True):
            group = {key: copied(v) for key, v in shared.groups[probe.group].items()}
            single = Run([{**group, "params": [q]}], state, map_values(shared.attributes))
            step_once(optimizer, raw, single, closure)
            for key in [key for key in state if key is not q]:
                del state[key]  # whole_step supports state of parameters only
            now = {k: v for k, v in single.groups[0].items() if k != "params"}
            for key, value in written.get(probe.group, now).items():
                if not same(value, now.get(key)):
                    varying.add((probe.group, key))
            written[probe.group], attributes = now, single.attributes
        for i, now in written.items():
            shared.groups[i] = now
        shared.attributes = attributes
        for p, q, old in zip(together, alone, before, strict=True):
            if not is_close(q, p, old):
                return "steps a parameter differently when it also sees the others"
        if not same_options(shared, joint):
            return "writes group values, or keeps attributes, that depend on all parameters"
        for name, value in joint.attributes.items():
            if is_container(value) or isinstance(value, Tensor | torch.Generator):
                original = own_attributes(optimizer).get(name)
                if not same(original, value):
                    return f"stores its history in its attribute '{name}', not in its state"
    return None


def num_steps(optimizer: Optimizer) -> int:
    """Enough steps to see what happens after a number of steps that an option sets.

    Queues fill up, preconditioners are computed, slow weights are updated: options set when.
    """
    options = [
        *(v for group in optimizer.param_groups for v in group.values()),
        *own_attributes(optimizer).values(),
    ]
    counts = [v for v in options if type(v) is int and v <= MOST_STEPS]
    return max(len(SCALES), *(count + 2 for count in counts), 0)


def random_state(*devices: torch.device) -> tuple[Any, ...]:
    """The states of all generators that a step may use by default."""
    kinds = {device.type for device in devices} - {"cpu"}
    states = [torch.get_device_module(kind).get_rng_state() for kind in sorted(kinds)]
    return (random.getstate(), *(bytes(s.numpy()) for s in (torch.get_rng_state(), *states)))


def map_values(values: dict[str, Any]) -> dict[str, Any]:
    return {key: copied(value) for key, value in values.items()}


def step_once(optimizer: Optimizer, raw: RawStep, run: Run, closure: bool) -> None:
    """One step of one run, which keeps its attributes from step to step."""
    with isolated(optimizer, run.groups, run.state):
        vars(optimizer).update(run.attributes)
        try:
            if closure:
                raw(optimizer, lambda: torch.tensor(0.7, dtype=torch.float64, device="cpu"))
            else:
                raw(optimizer)
        except Exception as error:
            raise CannotTry(f"{type(error).__name__}: {error}") from error
        run.attributes = own_attributes(optimizer)


def _draws(
    optimizer: Optimizer, raw: RawStep, probes: Sequence[Probe], closure: bool
) -> str | None:
    """Whether a step in the parameters' own dtypes draws random numbers."""
    params = [new_parameter(p.value()) for p in probes]
    run = new_run(optimizer, probes, params)
    for step in range(2):
        for p, probe in zip(params, probes, strict=True):
            p.grad = probe.grad(step)
        generators = random_state(*(p.device for p in probes))
        try:
            step_once(optimizer, raw, run, closure)
        except CannotTry:
            return None  # the step itself will say so
        if random_state(*(p.device for p in probes)) != generators:
            return "draws random numbers"
    return None


# -- probes ----------------------------------------------------------------------------------


def probes_of(optimizer: Optimizer, *, vectors: bool = True) -> list[Probe]:
    """Two small parameters per group and number of dims, and a large one if the group has such.

    Args:
        vectors: include large 1-dim parameters, from which some optimizers make square matrices.
    """
    probes: list[Probe] = []
    for i, group in enumerate(optimizer.param_groups):
        seen: dict[int, Tensor] = {}
        for param in group["params"]:
            earlier = seen.get(param.ndim)
            if earlier is None or param.numel() > earlier.numel():
                seen[param.ndim] = param
        for ndim, param in seen.items():
            shapes = list(SHAPES.get(ndim, ((4, *[2] * (ndim - 1)), (5, *[2] * (ndim - 1)))))
            large = prod(param.shape) >= LARGE_FROM and (vectors or ndim > 1)
            if large and ndim in LARGE:
                shapes.append(LARGE[ndim])
            local = local_part(param.detach())
            device = torch.device("cpu") if local.is_meta else local.device
            for shape in shapes:
                probe = Probe(i, shape, local.dtype, device, len(probes), param)
                probes.append(probe)
    return probes


def in_dtype(probe: Probe, dtype: torch.dtype | None) -> Probe:
    if dtype is None or probe.dtype.is_complex:
        return probe
    return Probe(probe.group, probe.shape, dtype, probe.device, probe.seed, probe.real)


def new_parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone())


def _parts(tensor: Tensor) -> list[Tensor]:
    """The parts of three ranks: about a third of the rows, the rest, none."""
    if not tensor.ndim:
        return [tensor] * 3
    cut = tensor.shape[0] // 3 + 1
    return [tensor[:cut], tensor[cut:], tensor[:0]]


def new_run(optimizer: Optimizer, probes: Sequence[Probe], params: Sequence[Tensor]) -> Run:
    groups: Groups = [
        {k: copied(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    run = Run(groups)
    for group in groups:
        group["params"] = []
    for probe, param in zip(probes, params, strict=True):
        groups[probe.group]["params"].append(param)
        state = _initial_state(optimizer, probe, param)
        if state:
            run.state[param] = state
    return run


def _initial_state(optimizer: Optimizer, probe: Probe, param: Tensor) -> dict[str, Any]:
    """State that the optimizer's constructor creates, as Adagrad's does.

    After the first steps it is no longer the constructor's. Then a probe begins with the numbers of
    the real state, and with tensors filled with its first element: as good for a comparison.
    """
    real = optimizer.state.get(probe.real)
    if not real:
        return {}

    def alike(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return local_part(tensor.detach()).clone()
        if tensor.shape != probe.real.shape:
            raise CannotTry
        local = local_part(tensor.detach())
        first = local.flatten()[0].item() if local.numel() and not local.is_meta else 0.0
        dtype = param.dtype if tensor.dtype == probe.real.dtype else tensor.dtype
        return torch.full(param.shape, first, dtype=dtype, device=param.device)

    try:
        return map_tensors(dict(real), alike)
    except Exception:  # other shapes, or packed tensors: begin without state
        return {}


# -- comparisons -----------------------------------------------------------------------------


def is_close(actual: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Whether two new values agree, within a small part of what the step changed."""
    actual, expected = actual.detach(), expected.detach()
    if not actual.numel():
        return True
    double = actual.dtype in (torch.float64, torch.complex128)
    of_change, of_value = (1e-7, 1e-13) if double else (1e-3, 1e-6)
    if actual.dtype in (torch.bfloat16, torch.float16):
        of_change, of_value = 0.05, 0.01
    limit = of_change * _largest(expected - before) + of_value * _largest(before)
    return _largest_difference(actual, expected) <= limit


def _largest(tensor: Tensor) -> float:
    finite = torch.nan_to_num(tensor.abs(), nan=0.0, posinf=0.0)
    return finite.max().item()


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    difference = (actual - expected).abs()
    both = ~actual.isfinite() & ~expected.isfinite()
    return torch.nan_to_num(difference.masked_fill(both, 0.0), nan=torch.inf).max().item()


def _compare_state(runs: Sequence[Run], whole: Tensor, pieces: Sequence[Tensor]) -> str | None:
    expected = runs[0].state.get(whole) or {}
    states = [run.state.get(piece) or {} for run, piece in zip(runs[1:], pieces, strict=True)]
    for key, value in expected.items():
        if any(key not in state for state in states):
            return f"keeps '{key}' for some parts of a parameter only"
        found = [state[key] for state in states]
        leaves = [_leaves(value), *map(_leaves, found)]
        if len({len(each) for each in leaves}) > 1:
            return f"keeps a different '{key}' for part of a parameter than for all of it"
        for of_whole, *of_parts in zip(*leaves, strict=True):
            if not _is_cut(of_whole, of_parts, whole):
                return f"keeps a different '{key}' for part of a parameter than for all of it"
    return None


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if is_container(value):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]


def _is_cut(whole: Any, parts: Sequence[Any], param: Tensor) -> bool:
    """Whether the parts' values are parts of the whole's value, or all equal to it."""
    if not isinstance(whole, Tensor):
        return all(same(part, whole) or _almost(part, whole) for part in parts)
    if whole.shape == param.shape and whole.ndim:
        if any(not isinstance(part, Tensor) or part.shape[1:] != whole.shape[1:] for part in parts):
            return False
        joined = torch.cat([part.dequantize() if _packed(part) else part for part in parts])
        whole = whole.dequantize() if _packed(whole) else whole
        if joined.shape != whole.shape:
            return False
        if not whole.dtype.is_floating_point:
            return torch.equal(joined, whole)
        return is_close(joined, whole, torch.zeros_like(whole))
    return whole.ndim == 0 and all(
        isinstance(part, Tensor) and part.shape == whole.shape and is_close(part, whole, whole * 0)
        for part in parts
    )


def _packed(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "dequantize")


def _almost(a: Any, b: Any) -> bool:
    return isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-9 * abs(b)


def same_options(a: Run, b: Run) -> bool:
    """Whether groups and attributes hold the same numbers, up to rounding."""
    for one, other in zip(a.groups, b.groups, strict=True):
        if not other["params"]:
            continue
        keys = (one.keys() | other.keys()) - {"params"}
        if not all(_equal(one.get(key), other.get(key)) for key in keys):
            return False
    keys = a.attributes.keys() | b.attributes.keys()
    return all(
        _equal(a.attributes.get(key), b.attributes.get(key))
        for key in keys
        if isinstance(b.attributes.get(key), int | float)
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return bool(a.numel() == 0) or is_close(a, b, torch.zeros_like(b))
    return same(a, b) or _almost(a, b)


@contextmanager
def quietly() -> Iterator[None]:
    """Compile nothing, and leave the random numbers that come next as they are."""
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        yield


# -- when to try -----------------------------------------------------------------------------


class Trial:
    """Tries an optimizer out as soon as it can step, and again whenever its options change."""

    def __init__(self, what: str, advice: str, why_not: Callable[..., str | None]) -> None:
        """
        Args:
            what: completes the message "... is not".
            advice: what the user can do about it.
            why_not: called with the optimizer, its step, and whether there is a closure.
        """
        self._what, self._advice, self._why_not = what, advice, why_not
        self._options: tuple[Any, ...] | None = None

    def check(
        self, optimizer: Optimizer, raw: RawStep, closure: bool, *, in_step: bool = True
    ) -> None:
        """
        Args:
            in_step: whether the answer is needed now. Before its first step, an optimizer may not
                be ready to step.

        Raises:
            TypeError: if the optimizer does not have the property, or a needed trial fails.
        """
        options = _options_of(optimizer)
        if options == self._options:
            return
        name = original_name(optimizer)
        try:
            reason = self._why_not(optimizer, raw, closure)
        except CannotTry as error:
            if not in_step:
                return
            raise TypeError(
                f"Whether {name} is {self._what} could not be determined on small parameters: "
                f"{error}. {self._advice}"
            ) from error
        if reason is not None:
            raise TypeError(f"{name} is not {self._what}: it {reason}. {self._advice}")
        self._options = options


def _options_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """The options that decide how an optimizer works. Of numbers, only whether they are 0."""
    return tuple(
        (len(group["params"]), *((key, _kind_of(v)) for key, v in group.items() if key != "params"))
        for group in optimizer.param_groups
    )


def _kind_of(option: Any) -> Any:
    if option is None or isinstance(option, str):
        return option
    return bool(option) if isinstance(option, int | float) else type(option)
