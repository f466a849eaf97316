"""Which parameters the modules of a unit hold: sharded, unsharded or secondary ones.

Swapping is one dictionary assignment per parameter, from lists made once. While plain modules hold
sharded parameters, they also have a forward pre-hook, the guard: calling them without a gather
raises an error with advice. While they hold unsharded ones there is no such hook, so it costs
nothing during computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..common.classes import original_class
from ..sharding.param import ShardedParam

_AFTER_SHARDING = (
    "Parametrizations (weight_norm, spectral_norm, orthogonal) and pruning (torch.nn.utils.prune) "
    "have to be registered before fully_shard"
)
_REPLACED = (
    "To change it, write into it (copy_, load_state_dict), or replace it before the forward of the "
    "root begins. torch.func.functional_call takes DTensors laid out like the sharded parameters, "
    "or whole tensors, the same one under each name of a tied parameter"
)


def _replaced_text(unit_name: str, fqn: str, module: nn.Module, gone: bool) -> str:
    what = "removed from" if gone else "replaced in"
    return (
        f"Parameter '{fqn}' of unit '{unit_name}' was {what} its {type(module).__name__} after "
        f"fully_shard. {_AFTER_SHARDING if gone else _REPLACED}"
    )


_Columns = tuple[list[Any], list[Any], list[Any]]  # dictionaries, names and what they should hold

# A dictionary, a name, what somebody else has put there, and what it replaced.
Given = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None, nn.Parameter]


class ModulesChanged(Exception):
    """Before a forward: the modules hold other parameters than they were made to hold."""


def _stands_in(given: object) -> bool:
    """Whether ``given`` is of a class for `Registration.register_stand_in`."""
    # Not by the tensors in use: `torch.func.functional_call` puts back the tensor that it found.
    return getattr(type(given), "stands_in", False)


def put(given: Iterable[Given]) -> None:
    """Put back what others have registered, after something else has taken it away."""
    for parameters, name, value, _ in given:
        parameters[name] = value


# Assignments of users after sharding are rejected, since the next forward would overwrite them,
# unless one of these reports that a tensor is there for one forward only. They are called with the
# first module of the unit, a parameter, and the tensors in all of its places.
lenders: list[Callable[[nn.Module, ShardedParam, object], bool]] = []


class WriteGuard(Protocol):
    """Finds writes to the sharded parameters of one unit that do not reach its shards."""

    def follow(self, params: Sequence[ShardedParam]) -> None:
        """Watch ``params`` from now on."""

    def check(self, unit_name: str) -> None:
        """Raise RuntimeError if there was such a write, once per write."""

    def is_intact(self, sharded: torch.Tensor) -> bool:
        """Whether there was no such write to this parameter."""


write_guards: list[Callable[[], WriteGuard]] = []  # each unit has one of each


GUARD = -1  # key in `_forward_pre_hooks`, which otherwise holds ids of handles (not negative)


class Registration:
    """The parameters that are registered in the modules of a unit.

    Attributes:
        registered: "sharded", "unsharded" or "secondary".
        check_is_due: only followers were looked at since the last whole `check`.
    """

    def __init__(self, unit_modules: tuple[nn.Module, ...]) -> None:
        """
        Args:
            unit_modules: the modules of the unit; their hooks gather.
        """
        self.unit_modules = unit_modules
        self.unit_name = type(unit_modules[0]).__name__
        self.registered = "sharded"
        self._stand_ins: list[tuple[ShardedParam, torch.Tensor]] = []
        self._params: Sequence[ShardedParam] = ()
        self._fast: dict[str, list[tuple[dict[str, Any], str, nn.Parameter]]] = {}
        self._expected: dict[str, _Columns] = {}  # the same, by column
        self._slow: dict[str, list[Callable[[], None]]] = {}
        self._guarded: list[dict[int, Any]] = []
        self._guards_are_on = False
        self._write_guards = [make() for make in write_guards]
        self._by_module: dict[int, list[tuple[str, nn.Parameter]]] | None = None
        # For units of several modules: see `check`.
        self._of_module: dict[nn.Module, _Columns] = {}  # of unsharded ones
        self.check_is_due = False

    def plan(self, params: Sequence[ShardedParam]) -> None:
        """Make the lists over ``params``, which were made again or got other owners."""
        self._params = params
        self._by_module = None
        self._of_module.clear()
        for guard in self._write_guards:
            guard.follow(params)
        owners = [(module, name, param) for param in params for module, name in param.owners]
        for kind in ("sharded", "unsharded", "secondary"):
            fast = self._fast[kind] = []
            expected: list[tuple[dict[str, Any], str, Any]] = []
            slow = self._slow[kind] = []
            for module, name, param in owners:
                value = getattr(param, kind)
                # Where a part shows nothing else, users see the sharded parameter after forward.
                if value is None and kind == "secondary":
                    value = param.sharded
                if value is None:
                    continue
                expected.append((module._parameters, name, value))
                # ``nn.Module.__setattr__`` looks through parameters, buffers and modules and calls
                # the global registration hooks, per parameter and gather: the dictionary is set
                # instead. Recurrent layers override it to keep a second list of their weights up
                # to date, so for them, and whatever else overrides it, it is called.
                if type(module).__setattr__ is nn.Module.__setattr__:
                    fast.append((module._parameters, name, value))
                else:
                    slow.append(partial(setattr, module, name, value))
            columns = map(list, zip(*expected, strict=True)) if expected else ([], [], [])
            dicts, names, values = columns
            self._expected[kind] = (dicts, names, values)
        # Off first: a module that owns none of these parameters any more would keep its guard.
        self._switch_guards(False)
        guarded = dict.fromkeys(m for m, _, _ in owners if m not in self.unit_modules)
        self._guarded = [module._forward_pre_hooks for module in guarded]
        self._switch_guards(self.registered != "unsharded")

    def register(self, kind: str, *, for_forward: bool = True) -> None:
        """Make the modules hold their parameters of this kind.

        Args:
            for_forward: False in backward, where modules run only to recompute. The guards permit
                that, so they may stay.

        Raises:
            RuntimeError: if a `check` is due and finds something; calling again registers.
        """
        if self.check_is_due:
            self.check()
        for parameters, name, value in self._fast[kind]:
            parameters[name] = value
        for set_attribute in self._slow[kind]:
            set_attribute()
        self.registered = kind
        guards_on = kind != "unsharded"
        if guards_on != self._guards_are_on and (guards_on or for_forward):
            self._switch_guards(guards_on)
        # The assignments above have replaced them in the modules.
        if self._stand_ins:
            self._stand_ins.clear()

    def check(self, follower: nn.Module | None = None) -> None:
        """Check, before forward, that the modules hold what they were last made to hold.

        If a user put something else there, `register` would silently remove it.

        Args:
            follower: a module of the unit that runs right after another one, whose check passed.
                Only its own parameters are checked: checking the whole unit for each of its modules
                would take quadratic time. A check of the whole unit is due after the last of them,
                and before `register` removes anything.

        Raises:
            RuntimeError: if a parameter was replaced or removed, or a write to it was lost.
        """
        if follower is not None and self.registered == "unsharded":
            self.check_is_due = True
            dicts, names, values = (self._of_module or self._split_columns())[follower]
            if all(map(is_, map(dict.get, dicts, names), values)):
                return
        self.check_is_due = False
        for guard in self._write_guards:
            guard.check(self.unit_name)
        # By identity and in C, below a microsecond for ten parameters.
        dicts, names, values = self._expected[self.registered]
        if all(map(is_, map(dict.get, dicts, names), values)):
            return
        for param in self._params:
            shown = getattr(param, self.registered)
            self._check_param(param, param.sharded if shown is None else shown)

    def is_current(self) -> bool:
        """Whether the modules hold what they were last made to hold."""
        dicts, names, values = self._expected[self.registered]
        return all(map(is_, map(dict.get, dicts, names), values)) or all(
            given is own or _stands_in(given)
            for given, own in zip(map(dict.get, dicts, names), values, strict=True)
        )

    def given_by_others(self) -> list[Given]:
        """Objects that others have put in the place of registered parameters."""
        return [
            (dictionary, name, given, own)
            for dictionary, name, own in zip(*self._expected[self.registered], strict=True)
            if (given := dictionary.get(name, own)) is not own and not _stands_in(given)
        ]

    def _split_columns(self) -> dict[nn.Module, _Columns]:
        """What each module of the unit, with its submodules, should hold while it computes."""
        rows: dict[int, list[tuple[Any, Any, Any]]] = {}
        for row in zip(*self._expected["unsharded"], strict=True):
            rows.setdefault(id(row[0]), []).append(row)
        for module in self.unit_modules:
            own = [r for inner in module.modules() for r in rows.get(id(inner._parameters), ())]
            dicts, names, values = map(list, zip(*own, strict=True)) if own else ([], [], [])
            self._of_module[module] = (dicts, names, values)
        return self._of_module

    def check_writes(self) -> None:
        """Check, before shards are read, that no write to them was lost.

        Raises:
            RuntimeError: if one was.
        """
        for guard in self._write_guards:
            guard.check(self.unit_name)

    def shows_sharded(self, module: nn.Module) -> bool:
        """Whether ``module`` holds the sharded parameters it was given, and no write was lost.

        False may also mean that only a check of the whole unit can tell.
        """
        if self.registered != "sharded" or self._stand_ins:
            return False
        if self._by_module is None:  # most units are planned many times before a state dict
            self._by_module = {}
            for param in self._params:
                for owner, name in param.owners:
                    self._by_module.setdefault(id(owner), []).append((name, param.sharded))
        own, held = self._by_module.get(id(module), ()), module._parameters
        return all(held.get(name) is value for name, value in own) and all(
            guard.is_intact(value) for guard in self._write_guards for _, value in own
        )

    def _check_param(self, param: ShardedParam, shown: nn.Parameter) -> None:
        given = [module._parameters.get(name) for module, name in param.owners]
        changed = [i for i, v in enumerate(given) if v is not shown and not _stands_in(v)]
        if not changed:
            return
        first = given[0]
        # A tied parameter is one slice of memory: other tensors under its names cannot all compute.
        if all(value is first for value in given):
            top = self.unit_modules[0]
            if any(is_lent(top, param, first) for is_lent in lenders):
                return
        module, name = param.owners[changed[0]]
        gone = name not in module._parameters
        raise RuntimeError(_replaced_text(self.unit_name, param.fqn, module, gone))

    def _switch_guards(self, on: bool) -> None:
        self._guards_are_on = on
        if on:
            guard = self._guard
            for hooks in self._guarded:
                hooks[GUARD] = guard
        else:
            for hooks in self._guarded:
                hooks.pop(GUARD, None)

    def register_stand_in(self, param: ShardedParam, stand_in: torch.Tensor) -> None:
        """Make the modules hold ``stand_in`` for a parameter, until `register`.

        Args:
            stand_in: of a class with an attribute ``stands_in = True``.
        """
        self._stand_ins.append((param, stand_in))
        for module, name in param.owners:
            module._parameters[name] = stand_in  # type: ignore[assignment]

    @contextmanager
    def showing_sharded(self) -> Iterator[None]:
        """Context in which the modules hold sharded parameters, for ``state_dict`` and copies."""
        before, released = self.registered, list(self._stand_ins)
        given = self.given_by_others()  # shown as well, until the next forward follows it
        self.register("sharded")
        put(given)
        try:
            yield
        finally:
            self.register(before)
            put(given)
            for item in released:
                self.register_stand_in(*item)

    def __deepcopy__(self, memo: dict) -> Registration:
        unit_type = original_class(type(self.unit_modules[0])).__name__
        raise NotImplementedError(
            "copy.deepcopy of a module whose parameters belong to the sharded unit "
            f"'{self.unit_name}' ({unit_type}) around it: copy that module, or call fully_shard on "
            "this one too"
        )

    def _guard(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # In backward guards stay on (see `register`) while unsharded parameters are there to
        # recompute with. And a module that is called with DTensors computes with sharded
        # parameters as DTensors do: that is no mistake.
        if self.registered == "unsharded" or any(isinstance(arg, DTensor) for arg in args):
            return
        names = ", ".join(p.fqn for p in self._params if any(m is module for m, _ in p.owners))
        unit_type = type(self.unit_modules[0]).__name__
        raise RuntimeError(
            f"{type(module).__name__} was called while its parameters ({names}) are sharded: they "
            f"belong to the unit '{self.unit_name}' ({unit_type}), which gathers them only for its "
            "own forward. Call that module instead; for another method of it, like generate, call "
            "register_fsdp_forward_method(module, 'generate') once; or call unshard() on it before "
            "and reshard() after, or call fully_shard on this submodule too"
        )
