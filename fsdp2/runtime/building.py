"""Makes the runtime of a tree of units, at the first forward of its root.

Only then is it known which unit is the root, which units enclose others, what they are called, and
which parameters were tied or replaced after `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from ..comm.streams import streams_for
from ..sharding.param import ShardedParam
from .events import registry
from .registration import put
from .runtime import Runtime, runtime_of
from .unit import Unit, unit_of, units_in

# The last of these are the classes of new units and runtimes: `fsdp2.testing` adds its own, which
# record what they do.
made_types: list[tuple[type[Unit], type[Runtime]]] = [(Unit, Runtime)]


def build_runtime(root_module: nn.Module) -> Runtime:
    """Make the runtime of the tree under ``root_module`` and give it to all its units.

    The root is whichever sharded module runs first. If a module that contains it runs later, that
    module becomes the root of a new runtime over all units.
    """
    units = units_in(root_module)
    root = unit_of(root_module)
    name_units(root_module, units)
    registry.on.before_tree(root_module, root, units)
    # Freeing gathered parameters would remove what others have put in their place.
    given = [x for unit in units for x in unit.registration.given_by_others()]
    # Units that ran as roots before may have gathers or reductions in flight, which only their own
    # runtimes can finish. The new one starts from units that are sharded.
    for old in dict.fromkeys(runtime_of(u) for u in units if u.runtime is not None):
        for unit in old.units:
            _forward_gradients(unit)
        old.reset()
    put(given)
    registry.on.modules_differ(root_module, units)
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
    registry.on.before_materialize(units)
    # All units now, not each before its own first gather: message tags are handed out here, in the
    # order of the tree, which ranks share even if their first forwards run other units (experts).
    for unit in units:
        unit.materialize(streams_for(unit.device))
    runtime = made_types[-1][1](root, units, root.device)
    for unit in units:
        unit.runtime = runtime
    runtime.on.planned(root)
    return runtime


def _forward_gradients(unit: Unit) -> None:
    """Pass on gradients of the unsharded parameters that the next plan of ``unit`` replaces.

    A caller may have computed with them after ``unshard``, so autograd accumulates to them.
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
