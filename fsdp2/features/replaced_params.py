"""Parameters that users put into modules in place of the parameters that a unit gave them.

``load_state_dict(assign=True)`` does this, and so does code that ties, unties or assigns parameters
after `fully_shard`. Suitable tensors are adopted: whole tensors are sharded, and DTensors with the
same layout become the sharded parameter. Before a tree gets its runtime, each parameter moves to
the unit that is gathered wherever its modules run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..policy import param_dtype_of
from ..runtime.events import UnitPart, registry
from ..runtime.registration import put
from ..runtime.unit import ORIGINS, Unit, unit_holding
from ..sharding.layout import Slot
from ..sharding.param import ShardedParam, carriers, managed_as, own_rows

Place = tuple[nn.Module, str]


class _Replaced(UnitPart):
    @override
    def params_assigned(self, unit: Unit, keep_objects: bool) -> None:
        adopt_replaced(unit, {}, keep_objects=keep_objects)

    @override
    def modules_differ(self, root_module: nn.Module, units: Sequence[Unit]) -> None:
        follow_modules(root_module, units)


def adopt_replaced(
    unit: Unit, adopted: dict[nn.Parameter, ShardedParam], *, keep_objects: bool
) -> None:
    """Adopt the parameters that a user put into the modules in place of the sharded ones.

    Parameters of other units, or of other names, stay where they were put: the next forward
    finds them (`follow_modules`).

    Args:
        adopted: parameters that units of the tree have adopted so far; this unit adds its own.
        keep_objects: if shape, dtype and device are unchanged, copy the data and put the old
            Parameter object back, since an optimizer may hold it: for
            ``load_state_dict(assign=True)``. False before the first use, when optimizers got the
            objects that the user assigned.
    """
    registration = unit.registration
    # Before the parameters are recorded anew: what `swap_tensors` exchanged would be lost.
    registration.check_writes()
    for bucket in unit.buckets:
        for param, slot in zip(bucket.params, bucket.layout.slots, strict=True):
            for module, name in list(param.owners):
                new = module._parameters.get(name)
                if managed_as(new) is not None:
                    continue
                if not isinstance(new, nn.Parameter):
                    # Removed, or made a plain tensor (for example by a parametrization): raises,
                    # unless `functional_call` lends it for one forward.
                    registration.check()
                    continue
                into = adopted.get(new)
                if into is None:
                    adopted[new] = into = _adopt(unit, param, new, slot, bucket.rank, keep_objects)
                module._parameters[name] = into.sharded
    ties = [x for x in registration.given_by_others() if managed_as(x[2]) is not None]
    unit.param_group.register_sharded()
    put(ties)


def _adopt(
    unit: Unit, param: ShardedParam, new: nn.Parameter, slot: Slot, rank: int, keep_objects: bool
) -> ShardedParam:
    """The parameter that ``new`` becomes: ``param``, or another one if a tie of it was cut."""
    before = param.sharded
    held = any(module._parameters.get(name) is before for module, name in param.owners)
    if held and not keep_objects:
        param = _split_off(param, new)
        unit.params.append(param)
        keep = False
    else:
        keep = keep_objects or not isinstance(new.data, DTensor)  # (then only the data is useful)
    _replace_sharded(param, new, slot, rank, keep_object=keep)
    unit.param_group.dirty |= param.sharded is not before
    return param


def _split_off(param: ShardedParam, new: nn.Parameter) -> ShardedParam:
    """Another parameter for the places of ``param`` that hold ``new``: their tie was cut."""
    made = copy.copy(param)
    made.unsharded = made.secondary = None
    made._found_by = set()
    made.owners = [(m, n) for m, n in param.owners if m._parameters.get(n) is new]
    param.owners = [place for place in param.owners if place not in made.owners]
    return made


def _replace_sharded(
    param: ShardedParam, new: nn.Parameter, slot: Slot, rank: int, *, keep_object: bool
) -> None:
    """Take over a tensor that a user registered in place of the sharded form of ``param``.

    Args:
        new: the replacement, a DTensor laid out alike or a whole tensor.
        slot, rank: which part of a whole tensor is this rank's.
        keep_object: if it fits, take the data only.

    Raises:
        ValueError: if it is neither a DTensor laid out alike nor the whole parameter.
    """
    spec, data = param.sharded_spec, new.detach()
    whole = not isinstance(data, DTensor) and data.shape == spec.shape
    if whole and param.tensor_parallel is None:
        data = spec.wrap(own_rows(data, slot, rank).contiguous())
    if not isinstance(data, DTensor) or tuple(data.placements) != spec.placements:
        raise ValueError(
            f"Parameter '{param.fqn}' was replaced by one of shape {tuple(new.shape)} "
            f"({type(data).__name__}); expected a DTensor with placements "
            f"{spec.placements} on {spec.mesh}, or the whole tensor of shape "
            f"{tuple(spec.shape)}"
        )
    local, old = data._local_tensor, param.local
    fits = (local.dtype, local.device, local.shape) == (old.dtype, old.device, old.shape)
    if fits and keep_object:
        # Into the memory that gathers read: storages, plans and views are as before. Anything
        # else makes the unit plan its storages again.
        old.copy_(local)
        return
    if isinstance(new.detach(), DTensor):
        param.sharded = new
    else:
        param.sharded = nn.Parameter(data, requires_grad=new.requires_grad)
    for carry in carriers:
        carry(new, param.sharded, param)
    param.manage(param.sharded)
    param.adopt_grad_dtype(new)
    param.set_grad_dtype(param.sharded)


def _forget_gradient(unit: Unit, param: ShardedParam) -> None:
    """Drop the gradient of ``param``, which was replaced."""
    if param.unsharded is not None:
        param.unsharded.grad = None
    for bucket in unit.buckets:
        if param in bucket.params:
            bucket.partial.present.discard(bucket.params.index(param))


def _move_gradients(param: ShardedParam, unit: Unit, around: Unit) -> None:
    """Move the gradients that ``unit`` has of ``param`` to ``around``.

    Raises:
        RuntimeError: if sums over shards still wait for the sum over replicas.
    """
    around.gradients.holds_earlier |= unit.gradients.holds_earlier
    if any(param is each for bucket in unit.buckets for each, _ in bucket.partial.rows()):
        raise RuntimeError(
            f"Parameter '{param.fqn}' was tied to another unit between two micro-batches, and "
            "its gradients still wait for the all-reduce: do so between steps"
        )


def follow_modules(root_module: nn.Module, units: Sequence[Unit]) -> None:
    """Give every parameter of ``units`` to the unit that gathers it wherever it is used now.

    Args:
        root_module: contains all modules of ``units``, which are sharded and not gathered.

    Raises:
        RuntimeError: if a parameter was removed.
        ValueError: for a tie that no unit encloses, or a replacement that cannot be sharded alike.
    """
    adopted: dict[nn.Parameter, ShardedParam] = {}
    before = {param: param.sharded for unit in units for param in unit.params}
    for unit in units:
        adopt_replaced(unit, adopted, keep_objects=False)
    of = {param: unit for unit in units for param in unit.params}
    for param, unit in of.items():
        if before.get(param) is not param.sharded:  # gradients belonged to the other one
            _forget_gradient(unit, param)
    held = _places(root_module, of)
    num_parents = Counter(child for m in root_module.modules() for child in m.children())
    shared = {inner for m, num in num_parents.items() if num > 1 for inner in m.modules()}
    changed: set[Unit] = set()
    for param, unit in of.items():
        # Modules that were taken out of the tree may come back.
        own = [(m, n) for m, n in param.owners if m._parameters.get(n) is param.sharded]
        places = list(dict.fromkeys(held.get(param, []) + own))
        uses = {module for module, _ in places}
        if set(places) != set(param.owners):
            changed.add(unit)
        elif uses.isdisjoint(shared):
            continue
        if not places:  # others are in all of its places
            unit.params.remove(param)
            _forget_gradient(unit, param)
            continue
        param.owners = places
        around = _unit_around(uses, unit, root_module, units)
        if around is not unit:
            changed |= {unit, around}
            _move(param, unit, around)
    for unit in changed:
        unit.param_group.reshard_storage(renumber=True)
        unit.hooks.follow_state_dicts()


def _places(
    root_module: nn.Module, of: dict[ShardedParam, Unit]
) -> dict[ShardedParam, list[Place]]:
    """Where each parameter is now.

    Raises:
        ValueError: if one of a unit outside of the tree has come to a place of a unit inside.
    """
    held: dict[ShardedParam, list[Place]] = {}
    ours = {place for param in of for place in param.owners}
    for prefix, module in root_module.named_modules():
        for name, value in module._parameters.items():
            if value is None:
                continue
            param = managed_as(value)
            if param in of:
                held.setdefault(param, []).append((module, name))
                continue
            # `fully_shard` replaces a parameter in the modules that it was called on. A module
            # outside that shares it keeps the original, which each rank would train alone. And a
            # unit of another root does not gather when this one runs.
            owner = unit_holding(module, value)
            beside = owner and all(root_module not in top.modules() for top in owner.modules)
            if value in ORIGINS or beside or (param is not None and (module, name) in ours):
                other = ORIGINS[value][1] if param is None else param
                raise ValueError(
                    f"Parameter '{f'{prefix}.{name}'.lstrip('.')}' is shared with a parameter "
                    f"already managed by another FSDP group: it is tied to '{other.fqn}', which "
                    "is sharded in another unit. Shard a common parent with fully_shard(parent), "
                    "which takes tied parameters over, and call it first; or put the modules into "
                    "one unit with fully_shard([module_a, module_b])"
                )
    return held


def _unit_around(
    uses: set[nn.Module], unit: Unit, root_module: nn.Module, units: Sequence[Unit]
) -> Unit:
    """The unit that is gathered wherever ``uses`` run: ``unit`` itself, or the innermost one."""
    for each in (unit, *reversed(units)):  # outer ones come first in the order of the tree
        if uses.isdisjoint(_modules_outside([root_module], each)):
            return each
    raise AssertionError("the root encloses everything")


def _move(param: ShardedParam, unit: Unit, around: Unit) -> None:
    if unit.config.offload != around.config.offload:
        raise ValueError(
            f"Parameter '{param.fqn}' of unit '{unit.name}' was tied to a module outside of it, so "
            f"it belongs to the unit '{around.name}', but only one of the two offloads to the "
            "CPU: pass the same offload_policy to both"
        )
    _move_gradients(param, unit, around)
    unit.params.remove(param)
    around.params.append(param)
    param.param_dtype = param_dtype_of(around.config.mp_policy, param.sharded)
    for original, (_, managed) in list(ORIGINS.items()):
        if managed is param:
            ORIGINS[original] = around, param


def _modules_outside(tops: Iterable[nn.Module], unit: Unit) -> set[nn.Module]:
    """The modules that can be reached from ``tops`` without passing the modules of ``unit``."""
    outside: set[nn.Module] = set()
    waiting = [*tops]
    while waiting:
        module = waiting.pop()
        if module not in outside and module not in unit.modules:
            outside.add(module)
            waiting.extend(module.children())
    return outside


registry.add(_Replaced())
