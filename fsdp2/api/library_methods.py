"""Adapts methods of other libraries that need whole parameters and are called between steps.

Layers of peft merge an adapter into a weight with ``weight.data = merged``, computed from
``weight``. On a DTensor that assignment silently does nothing, and while a root is gathered it
changes memory that the next free discards. So inside `merge` and `unmerge` the parameters of such
a layer are whole plain tensors, and their final values are written into the shards.

``save_pretrained`` (transformers, peft, diffusers, sentence-transformers) writes the result of
``state_dict()``. Only some versions can do so with DTensors, and only for some models. So this file
lets the library try: if it raises, or would write a shard, rank 0 saves whole tensors.

`torch.nn.utils.prune` registers the parameter under another name, with a mask computed from it. On
DTensors it fails after it has done a part of that. ``share_memory`` of a DTensor crashes the
process.

`Optimizer.load_state_dict` would combine whole tensors from a plain model's optimizer with sharded
parameters, and the next step would fail in some operator. So the tensors are split first, just as
`load_state_dict` of a sharded model splits whole parameters.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ..comm.transports import backend_name
from ..common.classes import original_class
from ..common.torch_patches import register, wrap
from ..dtensor.placement import own_part, this_rank
from ..dtensor.subclasses import is_subclass
from ..guards.rank_agreement.comparison import by_ranks
from ..guards.rank_agreement.first_forward import WARN_AFTER_S
from ..guards.rank_agreement.store_exchange import StoreExchange, can_meet
from ..runtime.events import UnitPart, registry
from ..runtime.hooks import about_to_write
from ..runtime.unit import Unit, units_holding, units_in
from ..sharding.mesh import replicated
from ..sharding.param import managed_param
from ..sharding.process_groups import timeout_of
from .full_state import full_state_dict
from .fully_shard import class_adapters


class _Libraries(UnitPart):
    @override
    def sharded(self, unit: Unit) -> None:
        _adapt_layers(module for own in unit.modules for module in own.modules())
        _adapt_torch()


def _adapt_torch() -> None:
    """Let pruning of sharded parameters raise, and optimizers cut whole state, from now on."""
    hook = partial(register_module_parameter_registration_hook, _check_registration)
    register(_check_registration, hook)
    wrap("torch.optim.Optimizer.load_state_dict", _load_state_dict)


def _check_registration(module: nn.Module, name: str, param: Any) -> None:
    if name.endswith("_orig") and name not in module._parameters:
        managed = managed_param(param)
        if managed is not None:
            raise RuntimeError(
                f"torch.nn.utils.prune of '{managed.fqn}', which is sharded: prune before "
                "fully_shard (masks are buffers, and the pruned weight is computed in forward)"
            )


# -- state of optimizers ---------------------------------------------------------------------------


def _load_state_dict(
    inherited: Callable[..., None], optimizer: Optimizer, state_dict: dict[str, Any]
) -> None:
    inherited(optimizer, _cut_state(optimizer, state_dict))


def _cut_state(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with this rank's part of each whole tensor; tensors that torch rejects stay."""
    state = given.get("state")
    if not isinstance(state, Mapping):
        return given
    # As torch does it: the parameters of both, in their order.
    numbers = chain.from_iterable(group["params"] for group in given.get("param_groups", ()))
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    managed = {
        number: param
        for number, param in zip(numbers, params, strict=False)
        if isinstance(param, DTensor)
        and isinstance(state.get(number), dict)
        and managed_param(param)
    }
    return {
        **given,
        "state": {
            number: _cut_values(values, managed[number], optimizer) if number in managed else values
            for number, values in state.items()
        },
    }


def _cut_values(values: dict[str, Any], param: DTensor, optimizer: Optimizer) -> dict[str, Any]:
    # Only who has an optimizer needs these.
    from ..optim.stepping import KEPT
    from ..optim.values import SCALARS, is_container, map_tensors
    from ..optim.whole_step import StepOptions

    before = optimizer.state.get(param, {})
    takes_whole = isinstance(vars(optimizer).get(KEPT), StepOptions)

    def cut(key: str, value: Tensor) -> Tensor:
        if isinstance(value, DTensor) or value.shape != param.shape or key in SCALARS:
            return value
        if is_subclass(value) and not takes_whole:
            managed = managed_param(param)
            raise ValueError(
                f"State '{key}' of parameter '{managed.fqn if managed else ''}' is a whole "
                f"{type(value).__name__}, which cannot be cut into shards: call "
                "fsdp2.optim.whole_step(optimizer) before loading it"
            )
        return value if is_subclass(value) else own_part(value, param).clone()

    cuts = dict(values)
    for key, value in values.items():
        kept = before.get(key)
        # An optimizer that itself steps on whole tensors has them already.
        if isinstance(kept, Tensor) and not isinstance(kept, DTensor):
            continue
        if isinstance(value, Tensor) or is_container(value):
            cuts[key] = map_tensors(value, partial(cut, key))
    return cuts


# -- layers of peft --------------------------------------------------------------------------------


def _adapt_layers(modules: Iterable[nn.Module]) -> None:
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


def _adapted_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Attributes for the class of sharded modules of class ``cls``."""
    adapted: dict[str, Callable[..., Any]] = {"share_memory": _share_memory}
    original = getattr(cls, "save_pretrained", None)
    if original is None:
        return adapted
    signature = inspect.signature(original)

    @wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind(self, *args, **kwargs).arguments, **kwargs}
        state = given.get("state_dict", given.get("kwargs", {}).get("state_dict"))
        if state is not None:
            return original(self, *args, **kwargs)
        return _save_on_all_ranks(self, partial(original, self, *args, **kwargs))

    return adapted | {"save_pretrained": save_pretrained}


def _save_on_all_ranks(model: nn.Module, save: Callable[[], Any]) -> Any:
    """Let the library save shards; if it cannot on some rank, let rank 0 save whole tensors."""
    ranks, unit = _ranks_of(model)
    meeting = _meeting(ranks, unit)
    about = f"call {original_class(type(model)).__name__}.save_pretrained"
    meeting.compare({}, about)  # a rank that calls it alone waits for nothing else
    with _NoShardsInFiles():
        result, error = _attempt(save)
    if not _any_failed(meeting, error, about):
        return result
    everyone = len(ranks) == dist.get_world_size()
    group = None if everyone else replicated(unit.mesh).replicate_group
    state = full_state_dict(model, ranks=ranks[:1], group=group)
    result = error = None
    if this_rank() == ranks[0]:
        result, error = _attempt(partial(_save_whole, model, state, save))
    if _any_failed(meeting, error, about):
        raise error or RuntimeError(f"Rank {ranks[0]} failed to {about}: its error says why")
    return result


def _ranks_of(model: nn.Module) -> tuple[tuple[int, ...], Unit]:
    """The ranks that share ``model``, and one of the units that all of them have."""
    found = by_ranks(units_in(model)).items()
    ranks, units = max(found, key=lambda item: len(item[0]))
    return ranks, units[0]


def _meeting(ranks: tuple[int, ...], unit: Unit) -> StoreExchange:
    group = unit.mesh.shard_group or unit.mesh.replicate_group
    assert group is not None
    if not can_meet(backend_name(group, unit.device)):
        ranks = (this_rank(),)
    timeout_s = timeout_of(group, unit.device).total_seconds()
    return StoreExchange("save", ranks, timeout_s, warn_after_s=WARN_AFTER_S)


def _attempt(save: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return save(), None
    except Exception as error:
        return None, error


def _any_failed(meeting: StoreExchange, error: Exception | None, about: str) -> bool:
    found = meeting.compare({"": {"failed": str(error is not None)}}, about)
    return bool(found) or error is not None


class _NoShardsInFiles(TorchFunctionMode):
    """Makes pickling a DTensor raise: `torch.save` would write this rank's shard alone."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__reduce_ex__ and isinstance(args[0], DTensor):
            raise RuntimeError("A file would have this rank's shard in place of a parameter")
        return func(*args, **(kwargs or {}))


@dataclass
class _WholeState:
    """Stands in for `state_dict` of a module while its whole tensors are saved."""

    state: dict[str, Any]
    at: str  # the module's name with a dot, which its names in ``state`` begin with

    def __call__(
        self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        found = OrderedDict() if destination is None else destination
        for name, value in self.state.items():
            if name.startswith(self.at):
                found[prefix + name.removeprefix(self.at)] = value
        return found


def _save_whole(model: nn.Module, state: dict[str, Any], save: Callable[[], Any]) -> Any:
    """Save while each module of ``model`` has its original class and the values in ``state``."""
    # Libraries write the names of classes into files, from which they load.
    before = [(m, type(m), vars(m).get("state_dict")) for m in model.modules()]
    for name, module in model.named_modules():
        vars(module)["state_dict"] = _WholeState(state, f"{name}." if name else "")
    for module in (m for unit in units_in(model) for m in unit.modules):
        object.__setattr__(module, "__class__", original_class(type(module)))
    try:
        return save()
    finally:
        for module, cls, own in before:
            object.__setattr__(module, "__class__", cls)
            vars(module)["state_dict"] = own
            if own is None:
                del vars(module)["state_dict"]


registry.add(_Libraries())
class_adapters.append(_adapted_methods)
