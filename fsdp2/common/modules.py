"""Walks over the modules of a model."""

from __future__ import annotations

from torch import nn

# Methods of a module by which its tensors and children get names.
_SHOW = ("named_parameters", "named_buffers", "named_modules", "named_children")


def plain_modules(model: nn.Module) -> list[nn.Module] | None:
    """``model.modules()`` without a Python generator per level for each of them.

    None if any of them may show other tensors or children than are registered.
    """
    left, found = [model], {model: None}
    usual: set[type] = set()
    while left:
        module = left.pop()
        kind = type(module)
        if kind not in usual:
            if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _SHOW):
                return None
            usual.add(kind)
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)
