"""Adapts methods of other libraries that need whole parameters and are called between steps.

Layers of peft merge an adapter into a weight with ``weight.data = merged``, computed from
``weight``. On a DTensor that assignment silently does nothing, and while a root is gathered it
changes memory that the next free discards. So inside `merge` and `unmerge` the parameters of such
a layer are whole plain tensors, and their final values are written into the shards.

torch.nn.utils.prune registers the parameter under another name, with a mask computed from it.

``save_pretrained`` (peft, transformers) writes what ``state_dict()`` returns, and files of whole
weights cannot be written from shards. ``share_memory`` of a DTensor crashes the process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..dtensor.placement import own_part
from ..runtime.hooks import about_to_write, units_holding
from ..sharding.param import managed_param

_refuses_pruning = False


def refuse_pruning() -> None:
    """Make pruning a sharded parameter raise before anything changes, from now on."""
    global _refuses_pruning
    if not _refuses_pruning:
        _refuses_pruning = True
        register_module_parameter_registration_hook(_check_registration)


def _check_registration(module: nn.Module, name: str, param: Any) -> None:
    if name.endswith("_orig") and name not in module._parameters:
        managed = managed_param(param)
        if managed is not None:
            raise RuntimeError(
                f"torch.nn.utils.prune of '{managed.fqn}', which is sharded: prune before "
                "fully_shard (masks are buffers, and the pruned weight is computed in forward)"
            )


def adapt_layers(modules: Iterable[nn.Module]) -> None:
    """Make peft layers among ``modules`` merge and unmerge adapters while sharded."""
    layer = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if layer is None:
        return
    for module in modules:
        if isinstance(module, layer):
            for name, method in (("merge", _merge), ("unmerge", _unmerge)):
                vars(module)[name] = MethodType(method, module)  # `copy.deepcopy` binds it anew


def _merge(self: Any, *args: Any, **kwargs: Any) -> Any:
    with whole_parameters(self):
        return type(self).merge(self, *args, **kwargs)


def _unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
    with whole_parameters(self):
        return type(self).unmerge(self, *args, **kwargs)


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Context in which the parameters of ``module`` and its submodules are whole and plain.

    Their final values are written into the shards. Collective: every rank gathers all of them and
    must make the same changes. An exception leaves the shards as they were.
    """
    for unit in units_holding(module.modules()):
        about_to_write(unit)
    places: list[tuple[dict[str, Any], str, Any]] = [
        (owner._parameters, name, param)
        for owner in module.modules()
        for name, param in owner._parameters.items()
        if isinstance(param, DTensor)
    ]
    wholes: dict[Any, nn.Parameter] = {}
    for parameters, name, param in places:
        if param not in wholes:
            whole = param.detach().full_tensor().clone()  # may be the shard itself
            wholes[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
        parameters[name] = wholes[param]
    try:
        yield
    finally:
        for parameters, name, param in places:
            parameters[name] = param
    with torch.no_grad():
        for param, whole in wholes.items():
            param.copy_(own_part(whole.detach().to(param.dtype), param))


def _share_memory(self: nn.Module) -> Any:
    raise RuntimeError(
        f"{type(self).__name__}.share_memory: its parameters are sharded, and a shard is a part of "
        "its unit's memory. Share whole tensors: state = fsdp2.full_state_dict(model), which "
        "rank 0 gets"
    )


def refused_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """What to put into the class of sharded modules of class ``cls``."""
    refused: dict[str, Callable[..., Any]] = {"share_memory": _share_memory}
    original = getattr(cls, "save_pretrained", None)
    if original is None:
        return refused
    signature = inspect.signature(original)

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind(self, *args, **kwargs).arguments, **kwargs}
        rest = given.get("kwargs", {})
        if given.get("state_dict", rest.get("state_dict")) is None:
            raise RuntimeError(
                f"{cls.__name__}.save_pretrained of a sharded model needs whole tensors: call "
                "state = fsdp2.full_state_dict(model) on every rank, and then on rank 0 "
                "model.save_pretrained(folder, state_dict=state)"
            )
        return original(self, *args, **kwargs)

    return refused | {"save_pretrained": save_pretrained}
