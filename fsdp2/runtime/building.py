"""Makes the runtime of a tree of units, at the first forward of its root.

Only then is it known which unit is the root, which units enclose others, what they are called, and
which parameters were tied or replaced after `fully_shard`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from ..comm.streams import streams_for
from ..policy import param_dtype_of
from ..sharding.param import ShardedParam, managed_as
from .events import registry
from .registration import put
from .runtime import Runtime, runtime_of
from .unit import ORIGINS, Unit, modules_outside, unit_holding, unit_of, units_in

Place = tuple[nn.Module, str]
# The last of these are the classes of the units and runtimes that are made: `fsdp2.testing` adds
# its own, which record what they do.
made_types: list[tuple[type[Unit], type[Runtime]]] = [(Unit, Runtime)]


def build_runtime(root_module: nn.Module) -> Runtime:
    """Make the runtime of the tree under ``root_module`` and give it to all its units.

    The root is whichever sharded module runs first. If a module that contains it runs later, that
    module becomes the root of a new runtime over all units.
    """
    units = units_in(root_module)
    root = unit_of(root_module)
    name_units(root_module, units)
    for ask in registry.on.before_tree:
        ask(root_module, root, units)
    # Freeing what is gathered would take away what others have put in its place.
    given = [x for unit in units for x in unit.registration.given_by_others()]
    # Units that ran as roots before may have gathers or reductions in flight, which only their own
    # runtimes can finish. The new one starts from units that are sharded.
    for old in dict.fromkeys(runtime_of(u) for u in units if u.runtime is not None):
        for unit in old.units:
            _forward_gradients(unit)
        old.reset()
    put(given)
    follow_modules(root_module, units)
    name_units(root_module, units)
    members = {unit: {m for top in unit.modules for m in top.modules()} for unit in units}
    for unit in units:
        unit.enclosing = tuple(
            other for other in units if other is not unit and unit.modules[0] in members[other]
        )
        unit.encloses = any(
            other.modules[0] in members[unit] for other in units if other is not unit
        )
        unit.choose_reshard(is_root=unit is root)
    for tell in registry.on.before_materialize:
        tell(units)
    # All units now, not each before its own first gather: message tags are handed out here, in the
    # order of the tree, which ranks share even if their first forwards run other units (experts).
    for unit in units:
        unit.materialize(streams_for(unit.device))
    runtime = made_types[-1][1](root, units, root.device)
    for unit in units:
        unit.runtime = runtime
    for tell_planned in runtime.on.planned:
        tell_planned(root)
    return runtime


def _forward_gradients(unit: Unit) -> None:
    """Pass on gradients of the unsharded parameters that the next plan of ``unit`` replaces.

    A caller may have computed with them, after ``unshard``: autograd accumulates to these.
    """

    def pass_on(param: ShardedParam, former: torch.Tensor) -> None:
        now = param.unsharded
        if now is None or now is former:
            return
        grad, former.grad = former.grad, None
        now.grad = grad if now.grad is None or grad is None else now.grad + grad
        runtime_of(unit).begin_backward()  # its end reduces what is left

    for param in unit.params:
        if param.unsharded is not None and param.unsharded.requires_grad:
            hook = partial(pass_on, param)
            param.unsharded.register_post_accumulate_grad_hook(hook)


def name_units(root_module: nn.Module, units: Iterable[Unit]) -> None:
    """Give units and parameters their qualified names, which messages use."""
    names = {module: name for name, module in root_module.named_modules()}
    for unit in units:
        unit.name = ", ".join(names.get(m, "") or "(root)" for m in unit.modules)
        unit.registration.unit_name = unit.name
        for param in unit.params:
            module, name = param.owners[0]
            prefix = names.get(module, "")
            param.fqn = f"{prefix}.{name}" if prefix else name


# -- which unit has which parameter, read from what the modules hold -------------------------------


def follow_modules(root_module: nn.Module, units: Sequence[Unit]) -> None:
    """Give every parameter of ``units`` to the unit that gathers it wherever it is used now.

    Args:
        root_module: what contains all modules of ``units``, which are sharded and not gathered.

    Raises:
        RuntimeError: if a parameter was removed.
        ValueError: for a tie that no unit encloses, or a replacement that cannot be sharded alike.
    """
    adopted: dict[nn.Parameter, ShardedParam] = {}
    before = {param: param.sharded for unit in units for param in unit.params}
    for unit in units:
        unit.param_group.adopt_replaced(adopted, keep_objects=False)
    of = {param: unit for unit in units for param in unit.params}
    for param, unit in of.items():
        if before.get(param) is not param.sharded:  # gradients were those of the other
            unit.gradients.forget(param)
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
            unit.param_group.forget(param)
            unit.gradients.forget(param)
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
            # outside of them that shares it keeps the original, which each rank would train alone.
            # And the unit of another root does not gather when this one runs.
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
    """The unit that is gathered wherever ``uses`` run: ``unit``, or the innermost such one."""
    for each in (unit, *reversed(units)):  # outer ones come first in the order of the tree
        if uses.isdisjoint(modules_outside([root_module], each)):
            return each
    raise AssertionError("the root encloses everything")


def _move(param: ShardedParam, unit: Unit, around: Unit) -> None:
    if unit.config.offload != around.config.offload:
        raise ValueError(
            f"Parameter '{param.fqn}' of unit '{unit.name}' was tied to a module outside of it, so "
            f"it belongs to the unit '{around.name}', but only one of the two offloads to the "
            "CPU: pass the same offload_policy to both"
        )
    around.gradients.take_over(param, unit.gradients)
    unit.params.remove(param)
    around.params.append(param)
    param.param_dtype = param_dtype_of(around.config.mp_policy, param.sharded)
    for original, (_, managed) in list(ORIGINS.items()):
        if managed is param:
            ORIGINS[original] = around, param
