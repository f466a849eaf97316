"""`merge_units`: small neighbouring units of a sharded model as one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn
from typing_extensions import override

from ..comm.streams import device_module
from ..features.replaced_params import follow_modules
from ..runtime.building import build_runtime, name_units
from ..runtime.events import registry
from ..runtime.hooks import StateDictHooks, UnitHooks, hooks_of
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import ORIGINS, Unit, set_unit, units_in
from .torch_compat import publish_state


@dataclass(frozen=True)
class MergedUnits:
    """The result of `merge_units`; its ``str()`` is a short report.

    Attributes:
        merged: for each new unit, the names of the units that it was made of.
        left: names of unchanged units smaller than ``min_bytes``, each with the reason.
    """

    merged: tuple[tuple[str, ...], ...]
    left: dict[str, str]

    @override
    def __str__(self) -> str:
        lines = [
            f"{len(names)} units are one: {names[0]} .. {names[-1]}" for names in self.merged
        ] or ["No units were merged"]
        for reason, alike in groupby(self.left.items(), key=lambda item: item[1]):
            names = [name for name, _ in alike]
            lines.append(f"Left as they were ({reason}): {', '.join(names)}")
        return "\n".join(lines)


def merge_units(model: nn.Module, *, min_bytes: int) -> MergedUnits:
    """Merge small neighbouring units until each gathers at least ``min_bytes``.

    Even a small unit costs a few hundred microseconds of host time and three collectives per step.
    A merged unit behaves like ``fully_shard([module_a, module_b])``: it is gathered when its first
    module runs, and its gradients are reduced when backward has left that module. Modules that do
    not run one after the other give the same results, but are gathered and reduced more often.

    Neighbours are units inside the same enclosing unit that follow each other in the order of the
    last forward (before the first forward, in module order). These units are never merged:

    - neighbours with different settings, meshes or dtypes;
    - units that enclose other units, replicated units, and units with registered methods;
    - units that did not run exactly once in the last forward.

    Parameters stay the same objects, so optimizers remain valid. Call this on all ranks, outside of
    a step. The next forward compares the ranks again.

    Args:
        model: a sharded model, or one that contains sharded modules.
        min_bytes: minimum size of a unit's gathered parameters, in the compute dtype.

    Returns:
        The merged units, and the small units that were not merged.

    Raises:
        ValueError: if nothing is sharded, or ``min_bytes`` is not positive.
        TypeError: if ``min_bytes`` is not an int.
        RuntimeError: between forward and backward, or while gradients of micro-batches have not
            been reduced.

    Example:
        >>> for layer in model.layers:  # a thousand of them
        ...     fully_shard(layer)
        >>> fully_shard(model)
        >>> print(merge_units(model, min_bytes=4 * 2**20))
    """
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
        raise TypeError(f"min_bytes must be an int, got {min_bytes!r}")
    if min_bytes < 1:
        raise ValueError(f"min_bytes must be positive, got {min_bytes}")
    units = units_in(model)
    if not units:
        raise ValueError("The model is not sharded: call fully_shard or shard_model first")
    if units[0].runtime is None:
        name_units(model, units)
    runtimes = list(dict.fromkeys(runtime_of(u) for u in units if u.runtime is not None))
    _check_between_steps(units, runtimes)
    left: dict[str, str] = {}
    groups = _groups(units, _order(units, runtimes, left), min_bytes, left)
    merged = tuple(tuple(unit.name for unit in group) for group in groups)
    if groups:
        _apply(model, groups, units, runtimes)
    return MergedUnits(merged, left)


def _check_between_steps(units: Sequence[Unit], runtimes: Sequence[Runtime]) -> None:
    for runtime in runtimes:
        runtime.on.before_root_forward()
        runtime.schedule.drop_held()  # of outputs that were dropped
    if any(unit.awaits_backward for unit in units):
        gc.collect()  # a compiled step leaves graphs in cycles, as an exception does
    for unit in units:
        if unit.step.running or unit.awaits_backward:
            raise RuntimeError(
                f"merge_units was called between forward and backward of unit '{unit.name}': call "
                "it before a forward, and drop outputs whose backward will not run"
            )
        if unit.gradients.has_unreduced():
            raise RuntimeError(
                f"merge_units was called while unit '{unit.name}' holds gradients of micro-batches "
                "that are not reduced: call it between steps"
            )


# -- which ---------------------------------------------------------------------------------------


def last_order(root: Unit) -> list[Unit]:
    """The units in the order of the last forward of ``root``; repeats in a row count once."""
    orders = {} if root.runtime is None else runtime_of(root).schedule.orders
    return [unit for unit, _ in groupby(orders.get(root, ()))]


def _order(units: list[Unit], runtimes: list[Runtime], left: dict[str, str]) -> list[Unit]:
    """The units that may be merged, as they run."""
    order = [unit for runtime in runtimes for unit in last_order(runtime.root)]
    if not order:
        return units
    times = Counter(order)
    for unit in units:
        if times[unit] != 1 and not unit.encloses:
            why = "runs several times" if times[unit] else "did not run in the last forward"
            left[unit.name] = why
    known = set(units)
    return [unit for unit in order if unit in known and (times[unit] == 1 or unit.encloses)]


def _groups(
    units: list[Unit], order: list[Unit], min_bytes: int, left: dict[str, str]
) -> list[list[Unit]]:
    """Neighbours to merge; notes why small units are left."""
    around = _parents(units)
    encloses = {unit for unit in around.values() if unit is not None}
    runs: list[list[Unit]] = [[]]
    for unit in order:
        why = _unfit(unit, encloses)
        if why is not None:
            if unit not in encloses and _bytes([unit]) < min_bytes:
                left[unit.name] = why
            runs.append([])
        elif runs[-1] and _alike(runs[-1][-1], unit, around):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    groups = [group for run in runs for group in _cut(run, min_bytes)]
    for group in groups:
        if len(group) == 1 and _bytes(group) < min_bytes:
            left[group[0].name] = "no neighbour with the same settings"
    return [group for group in groups if len(group) > 1]


def _cut(run: list[Unit], min_bytes: int) -> list[list[Unit]]:
    """Cut a run of neighbours into groups of at least so many bytes."""
    groups: list[list[Unit]] = []
    for unit in run:
        if groups and _bytes(groups[-1]) < min_bytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    if len(groups) > 1 and _bytes(groups[-1]) < min_bytes:
        last = groups.pop()
        groups[-1] += last
    return groups


def _parents(units: Iterable[Unit]) -> dict[Unit, Unit | None]:
    """The innermost unit around each."""
    found: dict[Unit, Unit | None] = {}
    owner = {module: unit for unit in units for module in unit.modules}
    for unit in owner.values():
        found.setdefault(unit, None)
    for top, unit in owner.items():  # outer ones first: inner ones overwrite what they write
        for module in top.modules():
            inner = owner.get(module)
            if inner is not None and inner is not unit:
                found[inner] = unit
    return found


def _unfit(unit: Unit, encloses: set[Unit]) -> str | None:
    """Why a unit cannot be merged with any other."""
    if unit in encloses:
        return "contains other units"
    if hooks_of(unit).methods:
        return "has registered methods"
    if unit.mesh.num_shards == 1:
        return "is not gathered: one shard"
    return None if unit.params else "has no parameters"


def _alike(one: Unit, other: Unit, around: dict[Unit, Unit | None]) -> bool:
    return (
        around[one] is around[other]
        and one.mesh == other.mesh
        and one.device == other.device
        and one.config == other.config
    )


def _bytes(units: Iterable[Unit]) -> int:
    """Of gathered parameters, with padding; known before the first gather."""
    return sum(
        slot.full_numel * bucket.itemsizes[0]
        for unit in units
        for bucket in unit.buckets
        for slot in bucket.layout.slots
    )


# -- how -----------------------------------------------------------------------------------------


def _apply(
    model: nn.Module, groups: list[list[Unit]], units: list[Unit], runtimes: list[Runtime]
) -> None:
    for unit in units:
        # The storages are made again on compute's stream: an optimizer may still be writing the old
        # ones on another.
        module = device_module(unit.device)
        if module is not None:
            module.synchronize()
            break
    roots = [(runtime, runtime.root.modules[0]) for runtime in runtimes]
    for runtime in runtimes:
        runtime.reset()
    for top, members in [(root, old.units) for old, root in roots] or [(model, units)]:
        follow_modules(top, members)
    into: dict[Unit, Unit] = {}
    for group in groups:
        made = _merged(group)
        into.update(dict.fromkeys(group, made))
    everywhere = list(dict.fromkeys([*units, *(u for r in runtimes for u in r.units)]))
    for unit in dict.fromkeys(into.get(unit, unit) for unit in everywhere):
        for chosen in (unit.forward_prefetch, unit.backward_prefetch):
            renamed = dict.fromkeys(into.get(other, other) for other in chosen)
            chosen[:] = [other for other in renamed if other is not unit]
    for unit in everywhere:
        unit.runtime = None  # type: ignore[assignment]
    for runtime, root in roots:
        # The same tree again, now and not in the next forward: what was set on it is carried over.
        new = build_runtime(root)
        new.is_last_backward = runtime.is_last_backward


def _merged(group: Sequence[Unit]) -> Unit:
    """One unit with the modules and parameters of ``group``."""
    first = group[0]
    modules = tuple(module for unit in group for module in unit.modules)
    new = type(first)(modules, first.mesh, first.device, replace(first.config))
    new.name = ", ".join(unit.name for unit in group)
    new.registration.unit_name = new.name
    param_group = new.param_group
    for unit in group:
        if unit.registration.registered != "sharded":
            unit.registration.register("sharded")
        unit.registration.check_writes()
        param_group.params += unit.params
    param_group.reshard_storage()
    # Prefetches set by hand: in forward the first module's come first, in backward the last
    # module's, which backward reaches first.
    new.forward_prefetch = list(dict.fromkeys(u for unit in group for u in unit.forward_prefetch))
    new.backward_prefetch = list(
        dict.fromkeys(u for unit in reversed(group) for u in unit.backward_prefetch)
    )
    hooks = UnitHooks.made_for(new)
    for unit in group:
        for module in unit.modules:
            hooks.take_over(hooks_of(unit), module)
            set_unit(module, new)
        for owner in {m for param in unit.params for m, _ in param.owners}:
            for hook in owner._state_dict_pre_hooks.values():
                named = getattr(hook, "__self__", None)
                if isinstance(named, StateDictHooks) and named.unit is unit:
                    named.unit = new
    for original, (owner_unit, param) in list(ORIGINS.items()):
        if owner_unit in group:
            ORIGINS[original] = (new, param)
    publish_state(new)
    registry.on.merged(new, group)
    return new
