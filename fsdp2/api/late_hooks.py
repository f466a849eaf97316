"""Hooks on a sharded embedding that may read its weight: then it is gathered for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..runtime.unit import unit_of
from .arguments import reads_no_weight
from .module import FSDPModule


def register_forward_pre_hook(
    self: FSDPModule, hook: Callable[..., Any], **options: Any
) -> RemovableHandle:
    """Register a hook, as ``nn.Module`` does. A hook on a sharded embedding may read its weight."""
    _gather_for_backward(self, hook)
    return super(FSDPModule, self).register_forward_pre_hook(hook, **options)


def register_forward_hook(
    self: FSDPModule, hook: Callable[..., Any], **options: Any
) -> RemovableHandle:
    """Register a hook, as ``nn.Module`` does. A hook on a sharded embedding may read its weight."""
    _gather_for_backward(self, hook)
    return super(FSDPModule, self).register_forward_hook(hook, **options)


def _gather_for_backward(module: FSDPModule, hook: Callable[..., Any]) -> None:
    config = unit_of(module).config
    if config.unshard_in_backward is None and not reads_no_weight(hook):
        config.unshard_in_backward = True
