"""Modes of torch that may be active around a hook, and how hooks bypass them.

torch.compile traces Python code; ``torch.func`` transforms wrap tensors; selective activation
checkpointing caches results of operations and returns them in the recomputation; other modes check
operands. None of them may see the work of hooks: gather, free, wait.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any, ParamSpec, Protocol, TypeVar, TypeVarTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint as _checkpoint

_P = ParamSpec("_P")
_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")

# The modes under which selective checkpointing runs a forward and its recomputation. Looked up by
# name, as they are private and hooks work without: `common/torch_private.py` lists them.
_SELECTIVE = tuple(
    getattr(_checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(_checkpoint, name)
)


# For functions that call a method of a module like a forward, with ``module`` as first argument:
# the file and the qualified name, which torch.compile keeps in the code that it generates.
method_calls: list[tuple[str, str]] = []

NOT_TRACED = (
    "{} of a sharded model: its parameters are gathered and freed while it runs, which a traced "
    "program cannot do. Trace a model that is not sharded: build one, load "
    "fsdp2.full_state_dict(model) into it (collective; whole tensors on rank 0) and trace that"
)


def skip_compile(hook: Callable[[*_Ts], _R]) -> Callable[[*_Ts], _R]:
    """``hook``, as a function that torch.compile calls and does not trace.

    There are two cases. If the call of the module is compiled (`Module.compile`), the hook is a
    separate frame, which `_never_compile` excludes, so that ``fullgraph=True`` holds for the
    forward. If a caller is traced (a whole model), the graph breaks here.
    """

    @functools.wraps(hook)
    def call(*args: *_Ts) -> _R:
        if torch.compiler.is_compiling():
            # The tracer inlines calls, and marks on code do not stop it: only `disable` breaks the
            # graph. An exported program has no place for a break.
            if torch.compiler.is_exporting():
                raise RuntimeError(NOT_TRACED.format("torch.export"))
            return torch.compiler.disable(hook)(*args)
        return hook(*args)

    _never_compile(call.__code__)  # type: ignore[attr-defined]
    return call


def _never_compile(code: CodeType) -> None:
    """Let torch.compile run frames of ``code``, and what they call, as they are."""
    # `torch.compiler.disable` does the same at every call, for a context switch each: hooks run in
    # every step and are marked once.
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return  # a torch without a compiler
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class FunctionMode(Protocol):
    """A torch function mode whose library must be notified of the work of hooks."""

    def unseen(self) -> AbstractContextManager[None]:
        """A context in which the mode sees nothing."""

    def replaced(self, given: Any, made: Any) -> None:
        """``made`` are the tensors that replace those in ``given``."""


# Each returns its mode if that is active; asked only while any torch function mode is.
function_modes: list[Callable[[], FunctionMode | None]] = []


def function_mode() -> FunctionMode | None:
    """The active function mode, if any."""
    if not torch._C._len_torch_function_stack():
        return None
    return next(filter(None, (find() for find in function_modes)), None)


def replacing(given: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, which replaces the tensors in ``given``."""
    mode = function_mode()
    if mode is None:
        return function(*args)
    with mode.unseen():
        made = function(*args)
    mode.replaced(given, made)
    return made


def outside_torch_modes(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call ``function`` on plain tensors, unseen by checkpoints and `function_modes`."""
    # Inside a transform, collectives on our memory would be recorded as a part of it. If a
    # checkpoint cached a gather, the recomputation would get the cached result, but no memory.
    if torch._C._are_functorch_transforms_active():
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)
    if torch._C._len_torch_function_stack() and (mode := function_mode()) is not None:
        with mode.unseen():
            return function(*args, **kwargs)
    if torch._C._len_torch_dispatch_stack():
        with _without_selective_checkpoints():
            return function(*args, **kwargs)
    return function(*args, **kwargs)


@contextmanager
def _without_selective_checkpoints() -> Iterator[None]:
    """Keep the other dispatch modes: those that count operations or collectives, say."""
    # Modes can be taken only off the top, so all of them go and the others come back.
    stack = dispatch._get_current_dispatch_mode_stack()
    others = [mode for mode in stack if not isinstance(mode, _SELECTIVE)]
    if len(others) == len(stack):
        yield
        return
    for _ in stack:
        dispatch._pop_mode()
    for mode in others:
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            dispatch._pop_mode()
        for mode in stack:
            dispatch._push_mode(mode)


def modules_being_called() -> Counter[nn.Module]:
    """How often the forward of each module, or a registered method, is on the stack of any thread.

    Any thread, since autograd calls hooks from its own threads on accelerators.
    """
    # A flag that hooks set and clear cannot tell: no hook runs at the end of a forward that raised.
    found: Counter[nn.Module] = Counter()
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            module = None
            if frame.f_code is nn.Module._call_impl.__code__:
                module = frame.f_locals.get("self")
            elif (frame.f_code.co_filename, frame.f_code.co_qualname) in method_calls:
                module = frame.f_locals.get("module")
            if isinstance(module, nn.Module):
                found[module] += 1
            frame = frame.f_back
    return found


def autograd_is_running() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() != -1
