"""Methods that run like a forward: their unit is gathered before them, and freed after them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..runtime.hooks import UnitHooks, hooks_of
from ..runtime.torch_modes import method_calls
from ..runtime.unit import unit_of
from .module import FSDPModule


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method like forward: gather parameters before it and free them after it.

    Use it for methods other than ``forward`` that compute with parameters, such as ``generate``.
    The method may call forward, and it may be a generator or a coroutine function: then parameters
    stay gathered while it runs and, unless gradients are off, until backward ends. The call has no
    effect if ``module`` is not sharded, or if the method is registered already.

    Args:
        module: the module.
        method_name: name of the method.

    Raises:
        ValueError: if there is no such method.

    Example:
        >>> fully_shard(model)
        >>> register_fsdp_forward_method(model, "generate")
        >>> model.generate(tokens)
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    if _is_wrapped(method, module):  # another time, it would be wrapped twice, and so on
        return
    wrapped = _wrap(hooks_of(unit_of(module)), module, method_name, method)
    setattr(module, method_name, MethodType(wrapped, module))


def _wrap(
    hooks: UnitHooks, owner: nn.Module, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    """``method`` as a forward of the unit of ``hooks``.

    Calls of forward inside it compute with what is gathered already.
    """
    hooks.methods.append((owner, name, method, _wrap))

    @functools.wraps(method)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if hooks.inside_method:
            return method(*args, **kwargs)
        args, kwargs = hooks.pre_forward_hook(module, args, kwargs)
        # ``generate`` calls forward once per token: registering the method avoids the cost of a
        # gather for each.
        hooks.inside_method = True
        try:
            output = method(*args, **kwargs)
        finally:
            hooks.inside_method = False
        return hooks.post_forward_hook(module, args, kwargs, output)

    # These return before they compute, and what they hand out meanwhile passes no hook.
    @functools.wraps(method)
    def generator(module: nn.Module, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with _gathered(hooks, module):
            return (yield from method(*args, **kwargs))

    @functools.wraps(method)
    async def coroutine(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _gathered(hooks, module):
            return await method(*args, **kwargs)

    @functools.wraps(method)
    async def async_generator(module: nn.Module, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with _gathered(hooks, module):
            async for item in method(*args, **kwargs):
                yield item

    if inspect.isgeneratorfunction(method):
        return generator
    if inspect.isasyncgenfunction(method):
        return async_generator
    return coroutine if inspect.iscoroutinefunction(method) else call


@contextmanager
def _gathered(hooks: UnitHooks, module: Any) -> Iterator[None]:
    if hooks.inside_method:
        yield
        return
    module.unshard()
    hooks.inside_method = True  # a forward inside would free them again
    try:
        yield
    finally:
        hooks.inside_method = False
        if not torch.is_grad_enabled():
            module.reshard()


def _is_wrapped(method: object, owner: nn.Module) -> bool:
    """Whether ``method`` of ``owner`` is one that `_wrap` made."""
    if not isinstance(method, MethodType) or method.__self__ is not owner:
        return False
    # By its code, not by a mark on it: what `functools.wraps` puts around it would copy the mark.
    return getattr(method.__func__, "__code__", None) in _wrap.__code__.co_consts


method_calls.append((__file__, "_wrap.<locals>.call"))
