"""Errors that torch raises about sharded and gathered parameters, with what to call instead.

Outside forward a sharded parameter is a DTensor, inside it is a plain tensor. An operation that
works on one may fail on the other, and torch's messages do not mention units. torch has no hook for
these errors, and our own parameter class would slow down every operator. So the few methods that
often fail are wrapped in torch's classes (`common/torch_patches.py` lists them). No call in a
training step gets slower. Each message still begins with torch's text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import EllipsisType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..common.failures import reraise
from ..common.modules import wrapper_prefix
from ..common.torch_patches import replace, wrap
from ..dtensor.placement import is_gathered_part
from ..features.early_free.freed_params import FreedParameterProxy
from ..runtime.events import UnitPart, registry
from ..runtime.unit import Unit, unit_holding
from ..sharding.param import managed_param, param_gathered_as
from .module import FSDPModule

_DTENSOR = "torch.distributed.tensor.DTensor"
_CLIPPING = "torch.nn.utils.clip_grad"
_items_reach_shards: list[bool] = []


class _Errors(UnitPart):
    @override
    def sharded(self, unit: Unit) -> None:
        _explain_errors()


def _explain_errors() -> None:
    """Wrap the methods that raise them."""
    wrap(f"{_DTENSOR}.copy_", partial(_with_advice, _how_to_write))
    wrap(f"{_DTENSOR}.__setitem__", _set_item)
    for name in ("numpy", "tolist"):
        wrap(f"{_DTENSOR}.{name}", partial(_with_advice, _how_to_read))
    for name in _OF_DTENSORS:
        replace(f"torch.nn.Parameter.{name}", partial(_OfDTensors, name))
    wrap(f"{_INIT}._get_managed_modules", _get_managed_modules)
    what = "full_tensor(), a call of all ranks,"
    wrap(f"{_DTENSOR}.full_tensor", partial(_naming_ranks, what))
    what = "torch's clip_grad_norm_, a call of all ranks,"
    for name in ("_get_total_norm", "_clip_grads_with_norm_"):
        wrap(f"{_CLIPPING}.{name}", partial(_naming_ranks, what))


def load_state_dict(
    self: FSDPModule, state_dict: Mapping[str, Any], *args: Any, **options: Any
) -> Any:
    """`nn.Module.load_state_dict`, with a hint in errors about a wrapper's name prefix."""
    try:
        return super(FSDPModule, self).load_state_dict(state_dict, *args, **options)
    except RuntimeError as error:
        names = (name for name, _ in self.named_parameters())
        advice = wrapper_prefix(state_dict, names)
        if not advice:
            raise
        raise RuntimeError(f"{error}\n{advice[0]}") from None


# -- methods of DTensors ---------------------------------------------------------------------------


def _with_advice(
    advice: Callable[[DTensor, str], str],
    inherited: Callable[..., Any],
    tensor: DTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    try:
        return inherited(tensor, *args, **kwargs)
    except RuntimeError as error:
        told = advice(tensor, str(error))
        if not told:
            raise
        raise RuntimeError(f"{str(error).rstrip()}\n{told}") from None


def _how_to_write(tensor: DTensor, error: str) -> str:
    if "mixed torch.Tensor and DTensor" not in error:
        return ""
    return (
        f"{_subject(tensor)}. To write a whole tensor, call {_load(tensor)}"
        "param.copy_(distribute_tensor(whole, param.device_mesh, param.placements)); to write this "
        "rank's part, param.to_local().copy_(part)"
    )


def _how_to_read(tensor: DTensor, error: str) -> str:
    if "tensor subclasses" not in error:
        return ""
    return (
        f"{_subject(tensor)}. For the whole tensor, call .full_tensor().detach().cpu() on all "
        "ranks first; for this rank's part, .to_local().detach().cpu()"
    )


def _set_item(inherited: Callable[..., Any], tensor: DTensor, index: Any, value: Any) -> None:
    # On a dim that ranks share, DTensor gathers what is indexed and writes to that. (With tensors
    # as indices it calls other operators, which write to shards or raise.)
    parts = index if isinstance(index, tuple) else (index,)
    basic = all(part is None or type(part) in (int, slice, EllipsisType) for part in parts)
    if basic and not _items_reach_shards:
        with torch.no_grad():
            indexed = cast(DTensor, tensor[index])
        if is_gathered_part(indexed, tensor):
            raise RuntimeError(
                f"{_subject(tensor)}: writing to the index {index} would change a gathered copy of "
                "it and no shard. Write to the whole tensor: whole = param.full_tensor(), "
                f"whole[...] = ..., {_load(tensor)}param.copy_(distribute_tensor(whole, "
                "param.device_mesh, param.placements)), all of it on all ranks"
            )
    _with_advice(_how_to_write, inherited, tensor, index, value)


@contextmanager
def items_reach_shards() -> Iterator[None]:
    """Context in which ``param[index] = value`` is let through: something writes it to shards."""
    _items_reach_shards.append(True)
    try:
        yield
    finally:
        _items_reach_shards.pop()


def _load(tensor: DTensor) -> str:
    param = managed_param(tensor)
    if param is None:
        return ""
    return f"model.load_state_dict({{'{param.fqn}': whole}}, strict=False), or "


def _subject(tensor: DTensor) -> str:
    # (Not what ``detach()`` and ``.data`` return: nothing leads from those to the parameter.)
    param = managed_param(tensor)
    what = "This" if param is None else f"Parameter '{param.fqn}'"
    return f"{what} is a DTensor, which holds this rank's part of a tensor"


# -- attributes of DTensors that a gathered parameter lacks ----------------------------------------


class _OfDTensors:
    """An attribute that is still missing (``hasattr`` is False), but whose error has the reason."""

    def __init__(self, name: str, _: object = None) -> None:
        self._name = name

    def __get__(self, tensor: Any, cls: type) -> Any:
        param = None
        if tensor is None:
            text = f"type object '{cls.__name__}' has no attribute '{self._name}'"
        else:
            text = f"'{cls.__name__}' object has no attribute '{self._name}'"
            freed = isinstance(tensor, FreedParameterProxy)
            param = tensor._param if freed else param_gathered_as(tensor)
        if param is not None:
            text += (
                f". Parameter '{param.fqn}' is gathered now (inside of forward, after unshard(), "
                "or kept after forward, as a root is): it is a plain tensor with all values. Use "
                "it as it is, or call reshard() on its module first, which brings the DTensor back"
            )
        raise AttributeError(text, name=self._name, obj=tensor)


_OF_DTENSORS = ("full_tensor", "to_local", "redistribute", "device_mesh", "placements")
for _name in _OF_DTENSORS:
    setattr(FreedParameterProxy, _name, _OfDTensors(_name))


# -- collectives of DTensors that one rank may call alone -----------------------------------------


_SEVERAL_MESHES = (
    "Gradients are on several meshes: call fsdp2.clip_grad_norm_ (or fsdp2.optim.get_total_norm), "
    "which take the same arguments"
)


def _naming_ranks(
    what: str, inherited: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        return inherited(tensors, *args, **kwargs)
    except RuntimeError as error:
        first = tensors if isinstance(tensors, DTensor) else _first_of(tensors)
        if first is None:
            raise
        if "must have the same mesh" in str(error):
            raise RuntimeError(f"{str(error).splitlines()[0]}\n{_SEVERAL_MESHES}") from None
        param = managed_param(first) if tensors is first else None
        of = f" of '{param.fqn}'" if param is not None else ""
        words = what.replace("()", f"(){of}")
        reraise(error, words, tuple(first.device_mesh.mesh.flatten().tolist()))


def _first_of(tensors: Any) -> DTensor | None:
    tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
    return next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)


# -- torch's fully_shard of what is sharded --------------------------------------------------------

_INIT = "torch.distributed.fsdp._fully_shard._fsdp_init"


def _get_managed_modules(
    inherited: Callable[..., Any], roots: Any, ignored_params: Any = None, *args: Any, **kwargs: Any
) -> Any:
    for root in roots:
        _check_tree(root, ignored_params or ())
    return inherited(roots, ignored_params, *args, **kwargs)


def _check_tree(root: nn.Module, ignored: Container[nn.Parameter]) -> None:
    for name, module in root.named_modules():
        for param_name, param in module.named_parameters(recurse=False):
            unit = None if param in ignored else unit_holding(module, param)
            if unit is not None:
                fqn = f"{name}.{param_name}" if name else param_name
                raise ValueError(
                    "torch.distributed.fsdp.fully_shard (or replicate) cannot shard what "
                    f"fsdp2.fully_shard has sharded already: parameter '{fqn}' is in its unit "
                    f"'{unit.name}'. Shard the whole model with one of the two. Is `fully_shard` "
                    "imported from torch in another file?"
                )


registry.add(_Errors())
