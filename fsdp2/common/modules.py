"""The modules of a model, and what ``state_dict`` makes of its tensors and their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

# Methods of a module by which its tensors and children get names.
_SHOW = ("named_parameters", "named_buffers", "named_modules", "named_children")
_WRAPPER_PREFIXES = (("module.", "DistributedDataParallel"), ("_orig_mod.", "torch.compile"))


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


def registered_tensors(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of ``model``; a tensor in several places may be listed again."""
    modules = plain_modules(model)
    if modules is None:
        return [*model.parameters(), *model.buffers()]
    tables = chain.from_iterable((m._parameters.values(), m._buffers.values()) for m in modules)
    return [tensor for table in tables for tensor in table if tensor is not None]


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` with the parameters and buffers themselves, where hooks leave them."""
    # What hooks compute is no part of a graph: they may need a leaf, and nothing goes backward.
    with torch.no_grad():
        return model.state_dict(keep_vars=True)


def load_through_hooks(model: nn.Module, filled: Mapping[str, Tensor]) -> None:
    """Load what ``state_dict`` hooks made of parameters (split, scaled) after it was filled.

    Args:
        filled: the entries of `own_state`. Values of parameters and buffers are there already.

    Raises:
        RuntimeError: if a parameter gets no value, as nothing reverses what the hooks do.
    """
    own = {id(tensor) for tensor in registered_tensors(model)}
    if all(id(value) in own for value in filled.values()):
        return
    keys = model.load_state_dict({n: v.detach() for n, v in filled.items()}, strict=False)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    lost = [name for name in keys.missing_keys if name in names]
    if lost:
        raise RuntimeError(
            f"'{lost[0]}' was not loaded: a state_dict hook saves it in other entries, and no hook "
            "makes it of these. Reverse it with register_load_state_dict_pre_hook on that module"
        )


def wrapper_prefix(states: Collection[str], wanted: Iterable[str]) -> list[str]:
    """What to do about keys to which a wrapper of the saved model has added a prefix.

    Args:
        states: the keys that exist.
        wanted: keys that should exist.

    Returns:
        One sentence, or nothing if the keys have no such prefix.
    """
    first = next((key for key in wanted if key not in states), None)
    for prefix, wrapper in _WRAPPER_PREFIXES:
        if first is not None and prefix + first in states:
            return [
                f"The keys begin with '{prefix}', as keys of a model inside {wrapper} do: call "
                "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "
                f"'{prefix}') before loading. "
            ]
    return []
