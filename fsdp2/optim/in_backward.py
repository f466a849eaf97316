"""`step_in_backward`: parameters in host memory are stepped while backward continues.

The owner of gradients reports when some of them are complete (`BackwardSteps.begin`), and a thread
steps their parameters. ``optimizer.step()`` waits for the thread, and steps what is left.

[Note: what comes between backward and step]
A step in backward uses gradients that nothing may change any more. Much of what users do between
``backward()`` and ``step()`` changes them (clipping, a `GradScaler`, another backward), or other
inputs of the step (the learning rate, the parameter). On parameters that were stepped, it would
silently have no effect. So until ``step()`` their ``.grad`` is a `SteppedGradient`, which has no
data and raises in every operation; options and parameters are compared in ``step()``. Steps are not
undone then: errors say that parameters are ahead.

Rejected: gradients that stay attached, with a look at their version counters. `torch._foreach`
operators on DTensors, and a `GradScaler`'s operators on any tensor, do not count as writes. Also
rejected: copies of parameters and state to undo steps, which are as large as what is saved.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from ..common.classes import original_class
from ..common.steppers import SteppedBackward, Stepper, not_stepped, partly_stepped, register
from ..dtensor.parts import local_part
from .local import LocalView, Stand, elementwise_trial, step_in, step_with, steps_with
from .stepping import (
    KEPT,
    original_name,
    raw_step,
    remembered_attributes,
)

T = TypeVar("T", bound=Optimizer)
_NOTHING = object()
_STEPS = "_fsdp2_backward_steps"  # of an optimizer's `__dict__`
_FREES = "free_gradients"
_AHEAD = (
    "Parameters were stepped in backward, so training would not continue as without it: load a "
    "checkpoint"
)


def step_in_backward(optimizer: T, *, elementwise: bool = False, free_gradients: bool = False) -> T:
    """Let a thread step parameters in host memory while backward continues.

    In the last backward before ``optimizer.step()``, the thread steps a parameter of `fully_shard`
    as soon as its reduced gradient is in host memory: with `CPUOffloadPolicy`, or if the model
    trains on the CPU. ``optimizer.step()`` then waits for these steps and does the others: plain
    parameters, shards on a device, parameters that a later part of backward might still use, and
    all parameters in the first two steps. Results, state dicts and checkpoints are bitwise the same
    as with `local_step`. As there, the optimizer must treat every element independently.

    Between ``backward()`` and ``step()``, some parameters and states are already one step ahead. So
    nothing may depend on them or change them:

    - Do not clip gradients or use a ``GradScaler``: every gradient is used as backward leaves it.
      Until ``step()``, every operation on the ``.grad`` of a stepped parameter raises; afterwards
      the gradient is there again.
    - Set learning rates and other options before backward or after the step.
    - Follow every backward that ends an accumulation with a step. Mark other backwards with
      ``set_requires_gradient_sync(False)`` or ``set_is_last_backward(False)``.
    - A backward that raises has stepped some parameters: the next forward then raises, once.

    If a rule is broken, the operation, ``step()`` or the next forward raises.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: it becomes an
            instance of a subclass of its class. ``fused=True`` is fastest on the CPU.
        elementwise: True asserts that it is elementwise and skips the test.
        free_gradients: free each gradient as soon as its step in backward is over, unless something
            else refers to it or its memory is page-locked. ``step()`` then ends with the effect of
            ``zero_grad()``: no parameter of the optimizer has a ``.grad``.

    Returns:
        The same optimizer.

    Raises:
        TypeError: if it is not elementwise, wraps another optimizer, or requires a closure. Also in
            its first step, if it keeps state in its groups or attributes, or writes to gradients.
        ValueError: if it is differentiable, or its ``step`` was replaced (for example by
            `fsdp2.optim.flat_step`).

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> optimizer = fsdp2.optim.step_in_backward(optimizer)
        >>> optimizer.step()
    """
    # The CPU step of ZeRO-Offload (arXiv 2101.06840), which begins when backward has ended there.
    if steps_with(optimizer, _run):
        vars(optimizer)[KEPT][_FREES] = free_gradients
        return optimizer
    trials = [] if elementwise else [elementwise_trial()]
    why = "The step of a differentiable optimizer belongs to a graph: a thread cannot do it"
    kept = {_FREES: free_gradients}
    return step_with(optimizer, "step_in_backward", "InBackward", _run, trials, why, **kept)


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
    steps = vars(optimizer).get(_STEPS)
    if steps is None:
        # Here, so that copies and unpickled ones have it as well. Nothing is stepped in backward
        # before: the first step shows whether the optimizer can be.
        steps = vars(optimizer)[_STEPS] = BackwardSteps(optimizer)
    steps.finish(has_arguments=bool(args or kwargs))
    result = steps.step_rest(raw, args, kwargs)
    return result if closure is None else loss


class SteppedGradient(Tensor):
    """Stands for a gradient that a step in backward uses: without data, it raises if it is used."""

    _name: str

    @staticmethod
    def __new__(cls, param: Tensor, name: str) -> SteppedGradient:
        options: dict[str, Any] = {"dtype": param.dtype, "device": param.device}
        made = Tensor._make_wrapper_subclass(cls, param.shape, **options)
        made._name = name
        return made

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"SteppedGradient('{self._name}')"

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} was called with a gradient that a step in backward uses already "
            "(fsdp2.optim.step_in_backward). Gradients can be read between step() and zero_grad(). "
            "Clipping and GradScalers need them before any step, and a parameter must not get a "
            f"second one in the same backward: leave out step_in_backward. {_AHEAD}"
        )


class BackwardSteps(Stepper):
    """The steps of an optimizer that were begun in backward."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stands: dict[int, Stand] = {}  # by the parameter's id
        self._seen: dict[int, dict[Any, Any]] = {}  # the state of their plain tensors
        self._gradients: dict[int, SteppedGradient] = {}
        self._parts: list[_Part] = []
        self._groups: dict[int, int] = {}  # the parameter's id -> the index of its group
        self._num_states = -1
        self._fits = False  # whether a step has shown that the optimizer can be stepped in parts
        self._worker: ThreadPoolExecutor | None = None
        register(self)
        optimizer.register_state_dict_pre_hook(_check_state)
        optimizer.register_load_state_dict_pre_hook(_before_load)

    # -- in backward ------------------------------------------------------------------------

    @override
    def begin(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        wait: Callable[[], None],
        backward: SteppedBackward,
    ) -> int:
        """As `Stepper.begin`."""
        optimizer = self._optimizer()
        if optimizer is None or not self._fits:
            return 0
        if not self._parts:
            self._groups = {
                id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]
            }
            for trial in vars(optimizer)[KEPT]["trials"]:
                trial.check(optimizer, raw_step(original_class(type(optimizer))), False)
        begun = [
            _Begun(param, name, self._stand_of(param, name), self._groups[id(param)])
            for param, name in zip(params, names, strict=True)
            if id(param) in self._groups and _is_on_host(param)
        ]
        if begun:
            part = _Part(optimizer, begun, self._state_of, backward)
            if self._worker is None:  # its thread ends with it, which this object alone holds
                self._worker = ThreadPoolExecutor(1, "fsdp2-step-in-backward")
            part.future = self._worker.submit(part.run, wait)
            self._parts.append(part)
            for each in begun:
                each.param.grad = self._gradients[id(each.param)]
        return len(begun)

    def _stand_of(self, param: Any, name: str) -> Stand:
        stand = self._stands.get(id(param))
        if stand is None or stand.param is not param or stand.source is not param._local_tensor:
            stand = self._stands[id(param)] = Stand(param, counts_apart=True)
            self._gradients[id(param)] = SteppedGradient(param, name)
        return stand

    def _state_of(self, stand: Stand, outer: dict[Any, Any] | None) -> dict[Any, Any]:
        if outer is None or not stand.is_current(outer):
            self._seen[id(stand.param)] = stand.read(outer)
        return self._seen[id(stand.param)]

    @override
    def drop_gradients(self, backward: SteppedBackward) -> list[Tensor]:
        """As `Stepper.drop_gradients`."""
        if not self._frees:
            return []
        parts = [p for p in self._parts if p.backward is backward and p.is_over()]
        return [begun.param for part in parts for begun in part.drop_gradients()]

    @property
    def _frees(self) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and vars(optimizer)[KEPT][_FREES]

    @override
    def is_stepping(self, backward: SteppedBackward) -> bool:
        """As `Stepper.is_stepping`."""
        return any(part.backward is backward for part in self._parts)

    def check_state(self) -> None:
        """Raises RuntimeError if the state is partly one step ahead."""
        if self._parts:
            raise not_stepped("The state of an optimizer was asked for")

    # -- at the end -------------------------------------------------------------------------

    def finish(self, *, has_arguments: bool) -> None:
        """Wait for the thread and take over the state.

        Raises:
            RuntimeError: if what a step has used was changed afterwards, or its backward raised.
            TypeError: if the optimizer keeps what it remembers outside of its state.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        for part in self._parts:  # before anything changes: after Ctrl-C here, a step continues
            part.wait()
            if self._frees:
                part.drop_gradients()
        try:
            self._take_over(optimizer, self._parts)
            for part in self._parts:
                part.check(optimizer, has_arguments)
        except Exception:
            self._parts = []
            raise

    @override
    def abandon(self, backward: SteppedBackward) -> list[str]:
        """As `Stepper.abandon`."""
        parts = [part for part in self._parts if part.backward is backward]
        for part in parts:
            part.wait()
        self._parts = [part for part in self._parts if part.backward is not backward]
        optimizer = self._optimizer()
        if optimizer is not None:
            # The caller raises in any case: that parameters were stepped in part.
            with suppress(Exception):
                self._take_over(optimizer, parts)
        return [begun.name for part in parts for begun in part.begun]

    def forget_failed(self) -> None:
        """Before state is loaded: wait for what was stepped by a backward that raised."""
        for backward in {part.backward for part in self._parts if not part.backward.ended}:
            self.abandon(backward)

    def _take_over(self, optimizer: Optimizer, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.leave(optimizer.state, self._seen)
        errors = [error for part in parts if (error := part.wait()) is not None]
        if errors:
            raise errors[0]

    def _order(self, optimizer: Optimizer) -> None:
        """Put the state in the order of the parameters, which is the same on all ranks."""
        # Checkpoints compare it, and what is stepped in backward may depend on the rank.
        state = optimizer.state
        if len(state) != self._num_states:
            for param in [p for group in optimizer.param_groups for p in group["params"]]:
                if param in state:
                    state[param] = state.pop(param)
            self._num_states = len(state)

    def step_rest(self, raw: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Step the parameters that have a gradient and were not stepped in backward."""
        optimizer = self._optimizer()
        assert optimizer is not None
        begun = [begun for part in self._parts for begun in part.begun]
        self._parts = []
        result = None
        with _hidden(begun):
            rest = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            options, attributes = _options_of(optimizer), remembered_attributes(optimizer)
            versions = [_versions(param.grad) for param in rest]
            if rest or not begun:
                result = step_in(LocalView, optimizer, raw, None, *args, **kwargs)
        self._order(optimizer)
        if rest and not self._fits:
            who = original_name(optimizer)
            _check_unchanged(who, options, _options_of(optimizer))
            _check_unchanged(who, [attributes], [remembered_attributes(optimizer)])
            if versions != [_versions(param.grad) for param in rest]:
                raise TypeError(
                    f"{who} writes to gradients in its step, and step_in_backward could not tell "
                    "that from other writes, which come too late. Leave out step_in_backward"
                )
            self._fits = True
        if self._frees:
            for param in [p for group in optimizer.param_groups for p in group["params"]]:
                param.grad = None
        return result


class _Begun:
    """A parameter that is being stepped, and what shows whether it is changed meanwhile."""

    def __init__(self, param: Tensor, name: str, stand: Stand, group: int) -> None:
        self.param, self.name, self.stand, self.group = param, name, stand, group
        self.grad = param.grad
        self.local_grad: Tensor | None = local_part(param.grad)  # type: ignore[arg-type]
        self.versions = _versions(param)  # which the step leaves as they are: see `Stand`
        self.is_written = False  # whether somebody else wrote to it meanwhile
        self.is_replaced = False  # whether ``.grad`` was assigned to meanwhile

    def difference(self) -> str | None:
        """What was changed after the step had begun."""
        if self.is_replaced:
            return "gradient was replaced"
        if local_part(self.param) is not self.stand.source:
            return "memory was replaced"
        if self.is_written:
            return "value was changed"
        return None


@contextmanager
def _hidden(begun: Sequence[_Begun]) -> Iterator[None]:
    """Inside, parameters that were stepped in backward have no gradient."""
    for each in begun:
        each.param.grad = None
    try:
        yield
    finally:
        for each in begun:
            each.param.grad = each.grad


class _Part:
    """Parameters that are stepped together, by an optimizer that has nothing else."""

    def __init__(
        self,
        optimizer: Optimizer,
        begun: list[_Begun],
        state_of: Callable[[Stand, dict[Any, Any] | None], dict[Any, Any]],
        backward: SteppedBackward,
    ) -> None:
        self.begun = begun
        self.backward = backward
        self.future: Future[None] | None = None
        # Not the user's optimizer: other parts of it, and the user, may look at it meanwhile.
        kind: Any = original_class(type(optimizer))
        self._inner = inner = kind.__new__(kind)
        vars(inner).update(vars(optimizer))
        for name in ("step", "_local_view", _STEPS):
            vars(inner).pop(name, None)
        self._attributes = remembered_attributes(inner)
        shown: dict[int, list[Tensor]] = defaultdict(list)
        seen: defaultdict[Any, Any] = defaultdict(dict)
        for each in begun:
            plain = each.stand.plain
            plain.grad = each.local_grad
            shown[each.group].append(plain)
            outer = optimizer.state.get(each.param)
            state = state_of(each.stand, outer)
            if outer is not None:
                seen[plain] = state
        groups = optimizer.param_groups
        # Groups without a parameter too: an optimizer may look at the first one.
        inner.param_groups = [{**g, "params": shown.get(i, [])} for i, g in enumerate(groups)]
        inner.state = seen
        self._options = _options_of(optimizer)

    def run(self, wait: Callable[[], None]) -> None:
        """In the thread: step."""
        wait()
        raw_step(type(self._inner))(self._inner)

    def wait(self) -> BaseException | None:
        """Wait for the thread; returns what it has raised."""
        assert self.future is not None
        return self.future.exception()

    def is_over(self) -> bool:
        """Whether the step has ended without an error."""
        future = self.future
        return future is not None and future.done() and future.exception() is None

    def drop_gradients(self) -> list[_Begun]:
        """Refer to the gradients no more; those whose was referred to until now."""
        begun = [each for each in self.begun if each.local_grad is not None]
        for each in begun:
            each.grad = each.local_grad = each.stand.plain.grad = None
        return begun

    def leave(self, state: Any, seen: dict[int, dict[Any, Any]]) -> None:
        """Take over the state that the step has made."""
        who = original_name(self._inner)
        for each in self.begun:
            plain = each.stand.plain
            plain.grad = None  # code that reuses its memory counts references
            each.is_written = _versions(each.param) != each.versions
            # As a step of the parameter would: what was gathered before is out of date.
            torch.autograd.graph.increment_version(each.stand.source)
            each.is_replaced = type(each.param.grad) is not SteppedGradient
            if not each.is_replaced:
                each.param.grad = each.grad
            inner = self._inner.state.pop(plain, None)
            if inner:
                seen[id(each.param)] = inner
                each.stand.write(inner, state, who)

    def check(self, optimizer: Optimizer, has_arguments: bool) -> None:
        """Raises an error if the step has used anything but what there is now."""
        who = original_name(optimizer)
        if not self.backward.ended:
            raise partly_stepped([each.name for each in self.begun])
        _check_unchanged(who, self._options, _options_of(self._inner))
        _check_unchanged(who, [self._attributes], [remembered_attributes(self._inner)])
        scaled = any(
            getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")
        )
        if has_arguments or scaled:
            raise RuntimeError(
                f"{who}.step() was given a gradient scale or other arguments, which steps in "
                f"backward did not have. {_AHEAD}, and leave out step_in_backward"
            )
        changed = [
            key
            for index in {each.group for each in self.begun}
            for key in _changed(self._options[index], _options_of(optimizer)[index])
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} of {who} was changed between backward and step(). {_AHEAD}, "
                "and change options before backward or after step()"
            )
        for each in self.begun:
            difference = each.difference()
            if difference is not None:
                raise RuntimeError(
                    f"'{each.name}' was stepped in backward, and its {difference} between that "
                    f"and step(). {_AHEAD}, and do that after step()"
                )


def _check_state(optimizer: Any, *_: Any) -> None:
    steps = vars(optimizer).get(_STEPS)
    if steps is not None:
        steps.check_state()


def _before_load(optimizer: Any, *_: Any) -> None:
    steps = vars(optimizer).get(_STEPS)
    if steps is not None:
        steps.forget_failed()
        steps.check_state()


def _is_on_host(param: Any) -> bool:
    """Whether a parameter and its gradient are alike, in host memory."""
    grad = param.grad
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)):
        return False
    local, local_grad = param._local_tensor, grad._local_tensor
    return (
        grad.placements == param.placements
        and type(local) is Tensor
        and type(local_grad) is Tensor
        and local.device.type == local_grad.device.type == "cpu"
        and local.shape == local_grad.shape
    )


def _versions(tensor: Any) -> tuple[int, int]:
    """Counters of writes: operators on a DTensor do not count as writes to its local tensor."""
    return tensor._version, local_part(tensor)._version


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of all groups; of tensors also how often they were written."""
    return [
        {
            key: (value, value._version) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in now if not _is_same(before.get(key, _NOTHING), now[key])]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    number = (int, float, str, bool)
    return one is other or (isinstance(one, number) and isinstance(other, number) and one == other)


def _check_unchanged(
    who: str, before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]
) -> None:
    names = [key for old, new in zip(before, now, strict=True) for key in _changed(old, new)]
    if names:
        raise TypeError(
            f"{who} keeps what it remembers outside of the state of its parameters "
            f"({', '.join(dict.fromkeys(names))}), and would do so once for each part: it cannot "
            "be stepped in backward"
        )
