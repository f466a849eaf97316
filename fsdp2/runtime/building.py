"""Makes the runtime of a tree of units, at the first forward of its root: what is known only then.

Which unit is the root, what encloses what, qualified names, and parameters that were tied or
replaced after `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..sharding.param import ORIGINS
from .first_forward import FirstForward
from .functional_call import in_functional_call
from .optimizer_checks import watch_originals
from .root import Runtime
from .unit import Unit, unit_of, units_in
from .unwritten import check_meta_buffers


def build_runtime(root_module: nn.Module) -> Runtime:
    """Make the runtime of the tree under ``root_module`` and give it to all units there.

    The root is whichever sharded module runs first; when one that contains it runs later, that
    becomes the root of a new runtime over all units.
    """
    units = units_in(root_module)
    root = unit_of(root_module)
    name_units(root_module, units)
    _check_finalization(root, units)
    for old in {id(u.runtime): u.runtime for u in units if u.runtime is not None}.values():
        old.reset()
    lent = (
        [x for u in units for x in u.registration.take_overrides()] if in_functional_call() else ()
    )
    for unit in units:
        unit.param_group.adopt_replaced(keep_objects=False)
    _check_ties(root_module, units)
    members = {unit: {m for top in unit.modules for m in top.modules()} for unit in units}
    for unit in units:
        unit.enclosing = tuple(
            other for other in units if other is not unit and unit.modules[0] in members[other]
        )
        unit.encloses = any(
            other.modules[0] in members[unit] for other in units if other is not unit
        )
        unit.choose_reshard(is_root=unit is root)
    for unit in units:
        unit.materialize()
    check_meta_buffers(root_module)
    runtime = Runtime(root, units, root.device)
    for unit in units:
        unit.runtime = runtime
    runtime.choose_cached()
    runtime.first_forward = FirstForward.of(root_module, units)
    watch_originals(units)
    for parameters, name, value in lent:
        parameters[name] = value
    return runtime


def _check_finalization(root: Unit, units: list[Unit]) -> None:
    """Only a root ends iterations, and nothing may begin while reductions are waited for."""
    for unit in units:
        if unit.runtime is not None:
            unit.runtime.finalization.check_forward()
        if unit is not root and unit.config.manual_finalization:
            raise RuntimeError(
                "set_manual_backward_finalization must be called on the root FSDP module "
                f"'{root.name}', not on '{unit.name}'"
            )


def name_units(root_module: nn.Module, units: Iterable[Unit]) -> None:
    """Qualified names of units and parameters, for messages."""
    names = {module: name for name, module in root_module.named_modules()}
    for unit in units:
        unit.name = ", ".join(names.get(m, "") or "(root)" for m in unit.modules)
        unit.registration.unit_name = unit.name
        for param in unit.params:
            module, name = param.owners[0]
            prefix = names.get(module, "")
            param.fqn = f"{prefix}.{name}" if prefix else name


def _check_ties(root_module: nn.Module, units: list[Unit]) -> None:
    """Find parameters that were tied after sharding, and ties that nobody resolved."""
    managed = {id(p.sharded): (unit, p) for unit in units for p in unit.params}
    touched = set()
    for name, module in root_module.named_modules():
        for key, value in module._parameters.items():
            if value is None:
                continue
            unit, param = managed.get(id(value), (None, None))
            if unit is not None and param is not None:
                if not any(m is module and k == key for m, k in param.owners):
                    param.owners.append((module, key))
                    touched.add(unit)
            elif value in ORIGINS:
                other = ORIGINS[value][1].fqn
                full = f"{name}.{key}" if name else key
                raise ValueError(
                    f"Parameter '{full}' is shared with a parameter already managed by another "
                    f"FSDP group: it is tied to '{other}', which is sharded in another unit. "
                    "Shard a common parent with fully_shard(parent), which takes tied parameters "
                    "over, or put the modules into one unit with fully_shard([module_a, module_b])"
                )
    for unit in touched:
        unit.param_group.register_sharded()
